//! Guards that many users share: a submission guards each region that its tasks are in once, until the last of these has ended.
//!
//! Made by one thread with [`View::share`](super::View::share), one call for each user, in order; after that any thread may release users
//! and look regions up. A region that was guarded stays in memory, though not registered, as long as this does.
//!
//! Cost of a user whose range lies in the region of the user before, or in the one that was first guarded after that: some compares and 8
//! bytes. So it is for ranges that walk through a region, and for those that go through the same regions in the same order again and again.
//! Other users pay a search of the index; a guard is taken, with two read-modify-writes, for the first user of a region only. Releasing costs
//! one for each region that the user is in.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::Region;
use crate::sys::MemoryRange;

/// So many regions are looked through one by one; more are found by a table.
const FEW: usize = 8;

const NOBODY: u32 = u32::MAX;

/// See the module.
#[derive(Default)]
pub struct SharedGuards {
    guards: Vec<Shared>,
    /// If there are more than a few: a hash table of positions in `guards`, [`NOBODY`] where none is, by the regions' addresses. Its length is a
    /// power of two, and twice that of `guards` or more; what is taken is looked for in the next place.
    table: Vec<u32>,
    /// Position of the region that was used last.
    last: usize,
    /// For each user, where its part of `uses` ends.
    ends: Vec<u32>,
    /// Positions in `guards`.
    uses: Vec<u32>,
}

/// A guard, held while there are users.
struct Shared {
    region: Arc<Region>,
    users: AtomicU32,
}

impl Shared {
    fn address(&self) -> usize {
        Arc::as_ptr(&self.region) as usize
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if *self.users.get_mut() > 0 {
            self.region.in_flight.release();
        }
    }
}

impl SharedGuards {
    /// For so many users, most of them in one region each.
    pub fn with_capacity(users: usize) -> SharedGuards {
        SharedGuards { ends: Vec::with_capacity(users), uses: Vec::with_capacity(users), ..SharedGuards::default() }
    }

    /// The region of this user that contains the address. It is guarded until the user is released.
    pub fn region(&self, user: usize, address: u64) -> Option<&Region> {
        let mut regions = self.uses_of(user).iter().map(|position| &*self.guards[*position as usize].region);
        regions.find(|region| region.range().contains(address, 1))
    }

    /// Whether this user is in the region. No more than some compares: the region itself is not looked at.
    pub fn is_in(&self, user: usize, region: *const Region) -> bool {
        self.uses_of(user).iter().any(|position| std::ptr::eq(Arc::as_ptr(&self.guards[*position as usize].region), region))
    }

    /// The user touches its memory no more: regions that no other user is in are given back. Once for each user.
    pub fn release(&self, user: usize) {
        for position in self.uses_of(user) {
            let Shared { region, users } = &self.guards[*position as usize];
            if users.fetch_sub(1, Ordering::AcqRel) == 1 {
                region.in_flight.release();
            }
        }
    }

    fn uses_of(&self, user: usize) -> &[u32] {
        let start = user.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.uses[start as usize..self.ends[user] as usize]
    }

    /// The next user is in one region, if that is the one of the user before, or the one that was guarded next. True if it is.
    pub(super) fn use_recent(&mut self, range: MemoryRange) -> bool {
        let contains = |shared: &Shared| shared.region.range().contains(range.address(), range.length());
        let next = if self.last + 1 < self.guards.len() { self.last + 1 } else { 0 };
        let found = [self.last, next].into_iter().find(|position| self.guards.get(*position).is_some_and(contains));
        if let Some(position) = found {
            self.use_at(position);
            self.end_user();
        }
        found.is_some()
    }

    /// The next user is in this region, which is guarded already. False if it is not.
    pub(super) fn use_known(&mut self, region: &Region) -> bool {
        let address = &raw const *region as usize;
        let position = match self.guards.len() {
            0..=FEW => self.guards.iter().position(|shared| shared.address() == address),
            _ => Some(self.table[self.find(address)]).filter(|found| *found != NOBODY).map(|found| found as usize),
        };
        if let Some(position) = position {
            self.use_at(position);
        }
        position.is_some()
    }

    /// The next user is in this region, whose guard was just taken.
    pub(super) fn use_new(&mut self, region: Arc<Region>) {
        self.guards.push(Shared { region, users: AtomicU32::new(0) });
        let count = self.guards.len();
        if count > FEW {
            let is_roomy = self.table.len() >= 2 * count;
            if !is_roomy {
                self.table = vec![NOBODY; (4 * count).max(2 * self.ends.capacity()).next_power_of_two()];
            }
            for position in if is_roomy { count - 1 } else { 0 }..count {
                let place = self.find(self.guards[position].address());
                self.table[place] = position as u32;
            }
        }
        self.use_at(count - 1);
    }

    /// The place in the table where the region is, or may come.
    fn find(&self, address: usize) -> usize {
        let last = self.table.len() - 1;
        // Addresses of allocations are multiples of 16, and near each other.
        let mut place = ((address as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as usize & last;
        while self.table[place] != NOBODY && self.guards[self.table[place] as usize].address() != address {
            place = (place + 1) & last;
        }
        place
    }

    fn use_at(&mut self, position: usize) {
        *self.guards[position].users.get_mut() += 1;
        self.uses.push(position as u32);
        self.last = position;
    }

    /// All regions of a user were told.
    pub(super) fn end_user(&mut self) {
        self.ends.push(self.uses.len() as u32);
    }

    /// Regions that were guarded.
    #[cfg(all(test, not(loom)))]
    pub(super) fn len(&self) -> usize {
        self.guards.len()
    }
}
