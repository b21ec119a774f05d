//! Addresses of the program that stand for a handle: second keys.
//!
//! A class of the program that wraps an engine says where its object lives, so that a cast of the object's address to a handle
//! works. Whoever is given a handle that is no key looks here. An address is only ever compared: what is not registered, any more or
//! ever, is found to name nothing, whatever is in memory there.
//!
//! The table is a fixed number of slots that are read without a lock: in a child of `fork()`, whose parent's threads may have held any,
//! an alias of the parent still leads to the parent's key, which tells what is wrong. Writers exclude each other by a lock that their caller
//! holds. A slot is free while its address is 0. Between one address and the next it has its address cleared and its number of owners
//! raised, in this order and before its key changes; so a reader that finds the same number before and after has read a key of that very
//! address, at some moment of the look-up. It is for its caller to find out whether the key still names something.
//!
//! Cost of a look-up: one load for each slot that was ever used. It is made for handles that are no keys only.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::error::{Code, Error, Result};

/// Aliases that a process may have at a time.
const SLOTS: usize = 1024;

/// Those of this process. A child of `fork()` begins with its parent's.
pub static ALIASES: Aliases<SLOTS> = Aliases::new();

/// Addresses with their keys; see the module.
pub struct Aliases<const COUNT: usize> {
    slots: [Slot; COUNT],
    /// Slots from here on were never used.
    used: AtomicUsize,
}

struct Slot {
    address: AtomicU64,
    key: AtomicU64,
    /// Addresses that it has had.
    owners: AtomicU64,
}

impl Slot {
    fn is_of(&self, address: u64) -> bool {
        self.address.load(Ordering::SeqCst) == address
    }

    /// The key of the address, if the slot is its.
    fn key_of(&self, address: u64) -> Option<u64> {
        loop {
            let owners = self.owners.load(Ordering::SeqCst);
            let key = self.is_of(address).then(|| self.key.load(Ordering::SeqCst))?;
            if self.owners.load(Ordering::SeqCst) == owners {
                return Some(key);
            }
        }
    }

    fn clear(&self) {
        self.address.store(0, Ordering::SeqCst);
        self.owners.fetch_add(1, Ordering::SeqCst);
    }
}

impl<const COUNT: usize> Aliases<COUNT> {
    const fn new() -> Aliases<COUNT> {
        let slots = [const { Slot { address: AtomicU64::new(0), key: AtomicU64::new(0), owners: AtomicU64::new(0) } }; COUNT];
        Aliases { slots, used: AtomicUsize::new(0) }
    }

    fn used(&self) -> impl Iterator<Item = &Slot> {
        self.slots[..self.used.load(Ordering::SeqCst)].iter()
    }

    /// The key that an address stands for.
    pub fn find(&self, address: u64) -> Option<u64> {
        if address == 0 { None } else { self.used().find_map(|slot| slot.key_of(address)) }
    }

    /// Makes the address stand for the key, which has no other afterwards, and the address no other key. By one writer at a time.
    ///
    /// Errors: Limit when there are too many.
    pub fn set(&self, address: u64, key: u64) -> Result<()> {
        self.clear(|slot| !slot.is_of(address) && slot.key.load(Ordering::SeqCst) == key);
        // In place: nobody finds the address to name nothing meanwhile.
        if let Some(slot) = self.used().find(|slot| slot.is_of(address)) {
            slot.key.store(key, Ordering::SeqCst);
            return Ok(());
        }
        let Some(place) = self.slots.iter().position(|slot| slot.is_of(0)) else {
            let text = format!("{COUNT} addresses stand for handles already; destroy what is not used any more");
            return Err(Error::new(Code::Limit, text));
        };
        self.slots[place].key.store(key, Ordering::SeqCst);
        self.slots[place].address.store(address, Ordering::SeqCst);
        self.used.fetch_max(place + 1, Ordering::SeqCst);
        Ok(())
    }

    /// Takes the alias of a key away, if it has one. By one writer at a time.
    pub fn remove(&self, key: u64) {
        self.clear(|slot| slot.key.load(Ordering::SeqCst) == key);
    }

    fn clear(&self, is_meant: impl Fn(&Slot) -> bool) {
        self.used().filter(|slot| is_meant(slot)).for_each(Slot::clear);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn an_address_stands_for_one_key_and_a_key_has_one_address() {
        let aliases = Aliases::<4>::new();
        assert_eq!((aliases.find(0), aliases.find(8)), (None, None));
        aliases.set(8, 1).unwrap();
        aliases.set(16, 2).unwrap();
        assert_eq!((aliases.find(8), aliases.find(16), aliases.find(24)), (Some(1), Some(2), None));
        aliases.set(24, 1).unwrap();
        assert_eq!((aliases.find(8), aliases.find(24)), (None, Some(1)));
        aliases.set(16, 1).unwrap();
        assert_eq!((aliases.find(16), aliases.find(24)), (Some(1), None));
        aliases.remove(2);
        assert_eq!(aliases.find(16), Some(1));
        aliases.remove(1);
        assert_eq!((aliases.find(16), aliases.find(0)), (None, None));
    }

    #[test]
    fn slots_are_used_again_and_too_many_are_refused() {
        let aliases = Aliases::<4>::new();
        for round in 0..10 {
            for key in 1..=4 {
                aliases.set(8 * key + round, key).unwrap();
            }
            assert_eq!(aliases.set(4096, 5).unwrap_err().code(), Code::Limit);
            assert_eq!(aliases.find(4096), None);
            // One that has one can have another.
            aliases.set(4096, 4).unwrap();
            (1..=4).for_each(|key| aliases.remove(key));
        }
    }

    #[test]
    fn who_looks_while_slots_change_hands_finds_a_key_of_the_address_or_none() {
        let aliases = Aliases::<2>::new();
        let is_over = AtomicBool::new(false);
        aliases.set(800, 800).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for turn in 0..20_000 {
                    // The other slot is one address's, then the other's, and never with the key of the former.
                    let address = 100 + 100 * (turn % 2);
                    aliases.set(address, address + 1 + turn % 7).unwrap();
                    aliases.remove(address + 1 + turn % 7);
                }
                is_over.store(true, Ordering::SeqCst);
            });
            while !is_over.load(Ordering::SeqCst) {
                for address in [100, 200] {
                    let found = aliases.find(address);
                    assert!(found.is_none_or(|key| (address + 1..address + 8).contains(&key)), "{address}: {found:?}");
                }
                assert_eq!(aliases.find(800), Some(800));
            }
        });
    }
}
