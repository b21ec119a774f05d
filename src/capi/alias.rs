//! Addresses of the program that stand for a handle: second keys.
//!
//! A class of the program that wraps an engine says where its object lives, so that a cast of the object's address to a handle
//! works. Whoever is given a handle that is no key looks here. An address is only ever compared: what is not registered, any more or
//! ever, is found to name nothing, whatever is in memory there.
//!
//! The table is a fixed number of slots that are read without a lock: in a child of `fork()`, whose parent's threads may have held any,
//! an alias of the parent still leads to the parent's key, which tells what is wrong. Writers exclude each other by a lock that their caller
//! holds. A slot is free while its address is 0. A reader takes a key only if the address is the same before and after; the address of
//! a slot is cleared before the slot is another's, so what it takes was the address's key at some moment of the look-up. It is for its
//! caller to find out whether the key still names something.
//!
//! Cost of a look-up: one load for each slot that was ever used. It is made for handles that are no keys only.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::error::{Code, Error, Result};

/// Aliases that a process may have at a time.
const SLOTS: usize = 1024;

struct Slot {
    address: AtomicU64,
    key: AtomicU64,
}

static TABLE: [Slot; SLOTS] = [const { Slot { address: AtomicU64::new(0), key: AtomicU64::new(0) } }; SLOTS];
/// Slots from here on were never used.
static USED: AtomicUsize = AtomicUsize::new(0);

fn used() -> impl Iterator<Item = &'static Slot> {
    TABLE[..USED.load(Ordering::SeqCst)].iter()
}

/// The key that an address stands for.
pub fn find(address: u64) -> Option<u64> {
    if address == 0 {
        return None;
    }
    used().find_map(|slot| {
        let is_here = || slot.address.load(Ordering::SeqCst) == address;
        let key = is_here().then(|| slot.key.load(Ordering::SeqCst))?;
        is_here().then_some(key)
    })
}

/// Makes the address stand for the key, which has no other afterwards, and the address no other key. By one writer at a time.
///
/// Errors: Limit when there are too many.
pub fn set(address: u64, key: u64) -> Result<()> {
    let is_of = |slot: &Slot, address| slot.address.load(Ordering::SeqCst) == address;
    clear(|slot| !is_of(slot, address) && slot.key.load(Ordering::SeqCst) == key);
    // In place: nobody finds the address to name nothing meanwhile.
    if let Some(slot) = used().find(|slot| is_of(slot, address)) {
        slot.key.store(key, Ordering::SeqCst);
        return Ok(());
    }
    let Some(place) = TABLE.iter().position(|slot| is_of(slot, 0)) else {
        let text = format!("{SLOTS} addresses stand for handles already; destroy engines that are not used");
        return Err(Error::new(Code::Limit, text));
    };
    TABLE[place].key.store(key, Ordering::SeqCst);
    TABLE[place].address.store(address, Ordering::SeqCst);
    USED.fetch_max(place + 1, Ordering::SeqCst);
    Ok(())
}

/// Takes the alias of a key away, if it has one. By one writer at a time.
pub fn remove(key: u64) {
    clear(|slot| slot.key.load(Ordering::SeqCst) == key);
}

fn clear(is_meant: impl Fn(&Slot) -> bool) {
    used().filter(|slot| is_meant(slot)).for_each(|slot| slot.address.store(0, Ordering::SeqCst));
}
