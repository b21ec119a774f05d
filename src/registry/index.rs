//! The ordered index of regions: two levels, read without locks or waiting.
//!
//! ```text
//! Shared.top -> Top   firsts: [    0 | 0x40000 | 0x90000 ]    lower bounds, searched first
//!                     leaves: [    * |       * |       * ]    slots, replaced in place
//!                                            |
//!                           Leaf   version: how often it was changed, and how many regions it has
//!                                  heads:   [ 0x61000 | 0x70000 | ... ]   the first start of each group but the first, searched second
//!                                  groups:  8 of 8 slots, searched third
//!                                           [ 0x61000, 0x1000, * | 0x61000, 0x1000, * | 0x62000, 0x800, * | ... ]
//!                                             start, length and region of each slot
//! ```
//!
//! Slots that no region needs are *gaps*: they repeat the slot before them, or are null before the first region. So searching needs no
//! count, a removal leaves a gap, and a registration between the same neighbours fills one. A look-up touches at most six cache lines of a leaf.
//!
//! # Invariants
//!
//! 1. Regions do not overlap: [`Writer::insert`] refuses.
//! 2. Leaf `i` holds the regions whose start lies in `[firsts[i], firsts[i + 1])`; `firsts[0]` is 0.
//! 3. No leaf is empty. An empty index has a top without leaves.
//! 4. Of two neighbouring leaves at most one is a quarter full or less: whichever becomes so merges with a neighbour if both together
//!    fill three quarters or less. So n regions take at most 8n/capacity + 2 leaves, whatever was removed.
//! 5. The starts of a leaf ascend. The slots of a region are neighbours, and its first one is kept until the region is removed or the leaf is
//!    replaced, but for moves to the next higher slot, which is written before the lower one is overwritten. One reference count stands
//!    for all slots of a region.
//! 6. A leaf is marked before it is replaced, and never changes again. The arrays of a published top never change, but for the slots of the *present* top.
//!
//! A lower bound stays when the leaf's first region goes. So it may later lie *inside* a new region of the leaf before, and a
//! look-up that finds no start at or below the address in its leaf must look at the last region of the previous leaf.
//!
//! # Who may do what
//!
//! There is one [`Writer`]; it lives inside the registry's mutex. It removes a region in place, and inserts one in place if there is a
//! gap at its place or behind it. If there is none, it puts a new leaf with gaps between all regions into the slot of the present top; only when leaves split,
//! merge or vanish does it build a new top. Readers pin an epoch ([`Index::pin`]), load the top, load a slot. What they can reach is
//! destroyed only after all who were pinned have gone on, by `crossbeam-epoch`: the old leaf, the old top, and the index's count of a
//! removed region.
//!
//! What readers and the writer may touch at once is atomic. The writer marks a leaf's version while it changes it, and counts it up
//! afterwards. A reader that sees the mark, or another version after its search than before, does not know what belongs together. It
//! searches the leaf again by its pointers alone, from the first to the last, and takes the ranges from the regions, which never change.
//! Each pointer is right by itself, and a region that is there all the time is found because of invariant 5: its first slot is never one that
//! the reader has passed. What a reader found in a version is in the index for as long as the leaf has that version. So readers never wait, not even for a writer that has lost its processor amid a change.
//!
//! # Why look-ups are right
//!
//! Every look-up has a moment at which its answer was true. A region that it finds was in the index when its version was checked or its
//! pointer was loaded. If it finds none, some moment had no region at the address: of two regions that both hold it, one must go before the
//! other comes, so unless there was such a moment *one* region held it throughout, and that one is found. For it stands in one leaf that
//! the look-up reads: in that of its start, which is the first or the second that is read. A reader that still uses a replaced top or
//! leaf sees it as it was when it was replaced, or with what was changed later; that moment lies within its look-up, since each look-up
//! loads the top anew.
//!
//! # Cost, for n regions
//!
//! | operation | cost |
//! |---|---|
//! | pin | one store and a fence |
//! | look-up | two searches: the lower bounds of n/48 or so leaves, then the heads and one group of a leaf; then one region |
//! | remove | the same, and some stores to the slots of the region; one deferred call, for its count |
//! | insert | the same, and some stores to the gap or as far as the next one; without one behind the place a new leaf (1.6 KiB) |
//! | split, merge | new leaves and a copy of the top; at most one insertion or removal in 16 |
//! | memory | 25 bytes a region after registrations in ascending order, some 36 in random order, at most 200 |
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::{Deref, Range};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crossbeam_epoch::{self as epoch, Atomic, Guard, Owned, Shared as Pointer};
#[cfg(all(test, loom))]
use loom::sync::atomic::{AtomicPtr, AtomicU64, fence};
#[cfg(not(all(test, loom)))]
use std::sync::atomic::{AtomicPtr, AtomicU64, fence};

use super::Region;
use crate::sys::MemoryRange;

/// Slots in a group. Models try all interleavings, so they get less.
const GROUP: usize = if cfg!(all(test, loom)) { 2 } else { 8 };

/// Groups in a leaf. The version and the heads of all but the first make 64 bytes.
const GROUPS: usize = GROUP;

/// Most regions in a leaf. Tests choose less.
pub(super) const LEAF_CAPACITY: usize = GROUP * GROUPS;

/// What a leaf knows of one region.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Slot {
    start: u64,
    length: u64,
    region: *mut Region,
}

impl Slot {
    /// A gap before the first region.
    const NULL: Slot = Slot { start: 0, length: 0, region: ptr::null_mut() };
}

/// A slot that readers read while the writer writes it. Fields of one slot lie together: searching a group touches all of its lines at
/// once, so that nothing else has to be waited for.
struct SharedSlot {
    start: AtomicU64,
    length: AtomicU64,
    region: AtomicPtr<Region>,
}

impl SharedSlot {
    fn new(slot: Slot) -> SharedSlot {
        let Slot { start, length, region } = slot;
        SharedSlot { start: AtomicU64::new(start), length: AtomicU64::new(length), region: AtomicPtr::new(region) }
    }

    fn load(&self) -> Slot {
        Slot {
            start: self.start.load(Ordering::Relaxed),
            length: self.length.load(Ordering::Relaxed),
            region: self.region.load(Ordering::Relaxed),
        }
    }

    fn store(&self, slot: Slot) {
        self.start.store(slot.start, Ordering::Relaxed);
        self.length.store(slot.length, Ordering::Relaxed);
        // Readers amid a change rely on this pointer alone, and on what was stored before it.
        self.region.store(slot.region, Ordering::Release);
    }
}

/// See the module. Not aligned to cache lines: what the allocator then does about placing leaves cost more than the lines saved.
#[repr(C)]
struct Leaf {
    /// The number of regions, the mark, and the number of changes.
    version: AtomicU64,
    heads: [AtomicU64; GROUPS - 1],
    groups: [[SharedSlot; GROUP]; GROUPS],
}

/// The bits of [`Leaf::version`] that count regions.
const COUNT: u64 = CHANGING - 1;
/// The bit of [`Leaf::version`] that is set during a change.
const CHANGING: u64 = 1 << 8;
/// One change.
const CHANGE: u64 = CHANGING << 1;
/// No leaf has this version.
const NO_VERSION: u64 = u64::MAX;

impl Leaf {
    /// A leaf with these regions, in ascending order, and gaps after all of them if there are few.
    fn new(items: &[Slot]) -> Owned<Leaf> {
        assert!(!items.is_empty() && items.len() <= LEAF_CAPACITY);
        let slot = |at: usize| items[at * items.len() / LEAF_CAPACITY];
        let group = |group: usize| std::array::from_fn(|at| SharedSlot::new(slot(group * GROUP + at)));
        Owned::new(Leaf {
            version: AtomicU64::new(items.len() as u64),
            heads: std::array::from_fn(|at| AtomicU64::new(slot((at + 1) * GROUP).start)),
            groups: std::array::from_fn(group),
        })
    }

    /// Number of slots, from the first, that start at or below the address. Counts instead of halving: the comparisons do not wait
    /// for each other.
    fn rank(&self, address: u64) -> usize {
        let is_reached = |start: &AtomicU64| start.load(Ordering::Relaxed) <= address;
        let group = self.heads.iter().filter(|head| is_reached(head)).count();
        group * GROUP + self.groups[group].iter().filter(|slot| is_reached(&slot.start)).count()
    }

    fn slot(&self, at: usize) -> Slot {
        self.groups[at / GROUP][at % GROUP].load()
    }

    /// For readers: the region with the largest start at or below the address, if any, and the version in which it is there.
    ///
    /// # Safety
    /// The leaf was reached as [`Top::leaf`] demands.
    unsafe fn predecessor(&self, address: u64) -> (Slot, u64) {
        // Synchronises with the end of the last change, so what the slots lead to is seen, too.
        let version = self.version.load(Ordering::Acquire);
        let slot = self.rank(address).checked_sub(1).map_or(Slot::NULL, |at| self.slot(at));
        // If a load above saw a store of a later change, the load below sees the mark of that change or something later.
        fence(Ordering::Acquire);
        if version & CHANGING == 0 && self.version.load(Ordering::Relaxed) == version {
            return (slot, version);
        }
        // SAFETY: passed on to the caller.
        (unsafe { self.predecessor_amid_change(address) }, NO_VERSION)
    }

    /// As [`Leaf::predecessor`], whatever the writer does meanwhile.
    #[cold]
    #[inline(never)]
    unsafe fn predecessor_amid_change(&self, address: u64) -> Slot {
        let mut best = Slot::NULL;
        for slot in self.groups.iter().flatten() {
            let region = slot.region.load(Ordering::Acquire);
            // SAFETY: a region that a slot leads to is destroyed only after the caller is done.
            let Some(range) = (unsafe { region.as_ref() }).map(Region::range) else { continue };
            if (best.start..=address).contains(&range.address()) {
                best = Slot { start: range.address(), length: range.length(), region };
            }
        }
        best
    }

    // What follows is for the writer.

    /// Number of regions.
    fn count(&self) -> usize {
        (self.version.load(Ordering::Relaxed) & COUNT) as usize
    }

    /// All slots of the region, or all gaps before the first one, of which this is the last.
    fn slots_until(&self, last: usize) -> Range<usize> {
        let region = self.slot(last).region;
        let before = (0..last).rev().take_while(|at| self.slot(*at).region == region).count();
        last - before..last + 1
    }

    /// Puts a new region between its neighbours: into the gaps before its place, or into the place, after moving what lies between that and
    /// the next gap by one. False if there is neither.
    fn insert(&self, item: Slot) -> bool {
        let rank = self.rank(item.start);
        let count = self.count() + 1;
        if let Some(last) = rank.checked_sub(1) {
            let Range { start: first, end } = self.slots_until(last);
            let gaps = first + usize::from(!self.slot(last).region.is_null())..end;
            if !gaps.is_empty() {
                self.change(gaps.map(|at| (at, item)), count);
                return true;
            }
        }
        let Some(gap) = (rank + 1..LEAF_CAPACITY).find(|at| self.slot(*at).region == self.slot(at - 1).region) else {
            return false;
        };
        let moves = (rank + 1..=gap).rev().map(|at| (at, self.slot(at - 1)));
        self.change(moves.chain([(rank, item)]), count);
        true
    }

    /// Removes the region of which this is the last slot, and leaves gaps.
    fn remove(&self, last: usize) {
        let slots = self.slots_until(last);
        let before = slots.start.checked_sub(1).map_or(Slot::NULL, |at| self.slot(at));
        self.change(slots.map(|at| (at, before)), self.count() - 1);
    }

    /// The regions, in ascending order.
    fn items(&self) -> Vec<Slot> {
        let mut items = Vec::with_capacity(LEAF_CAPACITY + 1);
        items.extend((0..LEAF_CAPACITY).map(|at| self.slot(at)).filter(|slot| !slot.region.is_null()));
        items.dedup();
        items
    }

    /// Writes slots, in this order; afterwards there are `count` regions.
    fn change(&self, slots: impl Iterator<Item = (usize, Slot)>, count: usize) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version | CHANGING, Ordering::Relaxed);
        // Whoever sees one of the following stores sees the mark.
        fence(Ordering::Release);
        for (at, slot) in slots {
            let (group, at) = (at / GROUP, at % GROUP);
            if at == 0 && group > 0 {
                self.heads[group - 1].store(slot.start, Ordering::Relaxed);
            }
            self.groups[group][at].store(slot);
        }
        self.version.store((version & !COUNT) + CHANGE + count as u64, Ordering::Release);
    }
}

/// Does not own its leaves: they outlive it when a new top takes them over.
struct Top {
    firsts: Box<[u64]>,
    leaves: Box<[Atomic<Leaf>]>,
}

impl Top {
    /// Index of the leaf in which a region that starts at the address is, or belongs.
    fn locate(&self, address: u64) -> usize {
        self.firsts.partition_point(|first| *first <= address).saturating_sub(1)
    }

    /// # Safety
    /// The top is reached through an index's `top` while `guard` is pinned, or is that of the only writer.
    unsafe fn leaf<'g>(&self, at: usize, guard: &'g Guard) -> Option<&'g Leaf> {
        let slot = self.leaves.get(at)?.load(Ordering::Acquire, guard);
        // SAFETY: slots are never null, point to initialised leaves, and what was in one is destroyed only after `guard`.
        Some(unsafe { slot.deref() })
    }

    /// The region with the largest start at or below the address.
    ///
    /// # Safety
    /// As [`Top::leaf`].
    // Inline, because the result otherwise goes through memory in pieces that are read as larger ones, for which the processor waits.
    #[inline(always)]
    unsafe fn predecessor<'g>(&self, address: u64, guard: &'g Guard) -> Option<Entry<'g>> {
        let mut at = self.locate(address);
        loop {
            // SAFETY: passed on to the caller.
            let leaf = unsafe { self.leaf(at, guard) }?;
            // SAFETY: as above.
            let (Slot { start, length, region }, version) = unsafe { leaf.predecessor(address) };
            if let Some(region) = NonNull::new(region) {
                return Some(Entry { start, length, region, at, leaf, version, pin: PhantomData });
            }
            at = at.checked_sub(1)?;
        }
    }
}

struct Shared {
    top: Atomic<Top>,
}

impl Shared {
    /// # Safety
    /// The caller is the only writer, or `guard` is pinned. `self` outlives `'g`.
    unsafe fn top<'g>(&self, guard: &'g Guard) -> &'g Top {
        // SAFETY: never null; a replaced top is destroyed only after `guard`.
        unsafe { self.top.load(Ordering::Acquire, guard).deref() }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: no `Pinned` and no `Writer` is left, for both hold on to `self`; so nobody else can reach what `top` leads to, and what
        // was unlinked before belongs to the collector. Each leaf is in one slot, each region in one leaf.
        unsafe {
            let guard = epoch::unprotected();
            let top = self.top.load(Ordering::Relaxed, guard).into_owned();
            for slot in &top.leaves {
                for item in slot.load(Ordering::Relaxed, guard).into_owned().items() {
                    drop(Arc::from_raw(item.region));
                }
            }
        }
    }
}

/// A region found in the index, valid for as long as the pin or the borrow of the writer.
#[derive(Clone, Copy)]
pub(super) struct Entry<'g> {
    start: u64,
    length: u64,
    region: NonNull<Region>,
    /// Where it was found: the place in the top, the leaf that was there, and the version of that.
    at: usize,
    leaf: &'g Leaf,
    version: u64,
    pin: PhantomData<&'g Region>,
}

impl<'g> Entry<'g> {
    /// Whether the region contains the address. Does not touch the region.
    pub(super) fn contains(&self, address: u64) -> bool {
        // Wraps to something larger than any length if the address is below, for no region begins at 0.
        address.wrapping_sub(self.start) < self.length
    }

    /// Whether the region has a byte of `[address, address + length)`. Does not touch the region.
    pub(super) fn intersects(&self, range: &MemoryRange) -> bool {
        self.contains(range.address()) || range.contains(self.start, 1)
    }

    /// Whether the region is still in the index. False, too, if its leaf was changed since it was found.
    pub(super) fn is_present(&self) -> bool {
        self.leaf.version.load(Ordering::Acquire) == self.version
    }

    pub(super) fn get(self) -> &'g Region {
        // SAFETY: the index owns a count of the region, and gives it up only after `'g`.
        unsafe { self.region.as_ref() }
    }

    /// One more reference, which outlives the pin.
    pub(super) fn to_arc(self) -> Arc<Region> {
        // SAFETY: the pointer comes from `Arc::into_raw`, and the index's own count is there throughout `'g`.
        unsafe {
            Arc::increment_strong_count(self.region.as_ptr());
            Arc::from_raw(self.region.as_ptr())
        }
    }
}

impl Deref for Entry<'_> {
    type Target = Region;
    fn deref(&self) -> &Region {
        self.get()
    }
}

/// The readers' side.
pub(super) struct Index {
    shared: Arc<Shared>,
}

impl Index {
    /// An empty index and its only writer, which splits leaves of `capacity` regions (2 to [`LEAF_CAPACITY`]).
    pub(super) fn new(capacity: usize) -> (Index, Writer) {
        assert!((2..=LEAF_CAPACITY).contains(&capacity));
        let top = Top { firsts: Box::new([]), leaves: Box::new([]) };
        let shared = Arc::new(Shared { top: Atomic::new(top) });
        (Index { shared: shared.clone() }, Writer { shared, capacity, length: 0 })
    }

    /// Holds back the destruction of everything that can be found meanwhile; so keep it short, and never wait while pinned.
    pub(super) fn pin(&self) -> Pinned<'_> {
        Pinned { shared: &self.shared, guard: epoch::pin() }
    }
}

/// A pinned reader.
pub(super) struct Pinned<'a> {
    shared: &'a Shared,
    guard: Guard,
}

impl Pinned<'_> {
    /// The region with the largest start at or below the address: the only one that can contain it.
    pub(super) fn predecessor(&self, address: u64) -> Option<Entry<'_>> {
        // SAFETY: `guard` is pinned, and both it and `shared` outlive the entry.
        unsafe { self.shared.top(&self.guard).predecessor(address, &self.guard) }
    }
}

/// The writers' side. There is one for an index, and changing needs it mutably.
pub(super) struct Writer {
    shared: Arc<Shared>,
    capacity: usize,
    length: usize,
}

impl Writer {
    /// Number of regions.
    pub(super) fn len(&self) -> usize {
        self.length
    }

    /// As [`Pinned::predecessor`], without pinning.
    pub(super) fn predecessor(&self, address: u64) -> Option<Entry<'_>> {
        // SAFETY: only the writer unlinks anything, and it is borrowed for as long as the entry.
        unsafe {
            let guard = epoch::unprotected();
            self.shared.top(guard).predecessor(address, guard)
        }
    }

    /// Adds the region that `make` answers, which has this range. If the range, which is not empty, overlaps another region, that one is the
    /// error.
    pub(super) fn insert(&mut self, range: MemoryRange, make: impl FnOnce() -> Arc<Region>) -> Result<Arc<Region>, Arc<Region>> {
        let (start, last) = (range.address(), range.address() + (range.length() - 1));
        // Regions do not overlap, so if any meets the range, the one with the largest start does. If none does, the range's place is
        // right behind that one.
        let at = match self.predecessor(last) {
            Some(other) if other.intersects(&range) => return Err(other.to_arc()),
            Some(other) => other.at,
            None => 0,
        };
        let region = make();
        debug_assert_eq!(region.range(), range);
        self.insert_from(at, Slot { start, length: range.length(), region: Arc::into_raw(region.clone()).cast_mut() });
        Ok(region)
    }

    /// Puts the region into the leaf or, if that begins at or below its start, the next one.
    fn insert_from(&mut self, at: usize, item: Slot) {
        self.length += 1;
        // SAFETY: this is the only writer.
        let top = unsafe { self.shared.top(epoch::unprotected()) };
        let at = at + usize::from(top.firsts.get(at + 1).is_some_and(|first| *first <= item.start));
        // SAFETY: as above.
        let Some(leaf) = (unsafe { top.leaf(at, epoch::unprotected()) }) else {
            return self.splice(top, 0..0, [Leaf::new(&[item])]);
        };
        let count = leaf.count();
        if count < self.capacity && leaf.insert(item) {
            return;
        }
        let mut items = leaf.items();
        let rank = items.partition_point(|other| other.start < item.start);
        if count == self.capacity && rank == count && at + 1 == top.leaves.len() {
            // Registering in ascending order leaves full leaves behind.
            return self.splice(top, at + 1..at + 1, [Leaf::new(&[item])]);
        }
        items.insert(rank, item);
        if count < self.capacity {
            self.replace(top, at, Leaf::new(&items));
        } else {
            let (lower, upper) = items.split_at(items.len() / 2);
            self.splice(top, at..at + 1, [Leaf::new(lower), Leaf::new(upper)]);
        }
    }

    /// Removes the region that starts at the address. False if there is none. The reference to it is given up when no reader can
    /// have it any more.
    pub(super) fn remove(&mut self, start: u64) -> bool {
        // SAFETY: this is the only writer.
        let top = unsafe { self.shared.top(epoch::unprotected()) };
        // SAFETY: as above.
        let leaf = |at: usize| unsafe { top.leaf(at, epoch::unprotected()) };
        let at = top.locate(start);
        let Some(old) = leaf(at) else { return false };
        let Some(last) = old.rank(start).checked_sub(1) else { return false };
        let Slot { start: found, region, .. } = old.slot(last);
        if found != start || region.is_null() {
            return false;
        }
        self.length -= 1;
        let count = old.count() - 1;
        if count == 0 {
            match at.checked_sub(1).and_then(leaf).filter(|before| before.count() > self.capacity * 3 / 4) {
                // What is next to a full leaf may soon come back, and is not to split it, or to begin another one, each time.
                Some(before) => {
                    let items = before.items();
                    let (lower, upper) = items.split_at(items.len() / 2);
                    self.splice(top, at - 1..at + 1, [Leaf::new(lower), Leaf::new(upper)]);
                }
                None => self.splice(top, at..at + 1, []),
            }
        } else {
            old.remove(last);
            if count <= self.capacity / 4 {
                let fits = |other: usize| leaf(other).is_some_and(|other| other.count() + count <= self.capacity * 3 / 4);
                if let Some(first) = at.checked_sub(1).filter(|at| fits(*at)).or_else(|| fits(at + 1).then_some(at)) {
                    let items: Vec<Slot> = [first, first + 1].into_iter().filter_map(leaf).flat_map(Leaf::items).collect();
                    self.splice(top, first..first + 2, [Leaf::new(&items)]);
                }
            }
        }
        // SAFETY: no leaf leads to the region any more, so nobody finds it who pins from now on; the count is the one that `insert` took.
        unsafe { epoch::pin().defer_unchecked(move || drop(Arc::from_raw(region))) };
        true
    }

    /// Puts a new leaf into the slot.
    fn replace(&self, top: &Top, at: usize, leaf: Owned<Leaf>) {
        let guard = &epoch::pin();
        Self::close(top, at..at + 1);
        let old = top.leaves[at].swap(leaf, Ordering::AcqRel, guard);
        // SAFETY: unlinked: this slot was the only way to it, but for slots of tops that are replaced already.
        unsafe { guard.defer_destroy(old) };
    }

    /// Marks leaves that are about to be replaced, for good: from here on no reader relies on their versions.
    fn close(top: &Top, leaves: Range<usize>) {
        // SAFETY: this is the only writer.
        let leaves = leaves.filter_map(|at| unsafe { top.leaf(at, epoch::unprotected()) });
        leaves.for_each(|leaf| leaf.version.store(leaf.version.load(Ordering::Relaxed) | CHANGING, Ordering::Release));
    }

    /// Replaces the top by one in which `leaves` stand in the place of the leaves `old`.
    fn splice<const N: usize>(&self, top: &Top, old: Range<usize>, leaves: [Owned<Leaf>; N]) {
        let guard = &epoch::pin();
        let mut firsts = Vec::with_capacity(top.firsts.len() + N);
        let mut slots = Vec::with_capacity(top.leaves.len() + N);
        let slot = |slot: &Atomic<Leaf>| Atomic::from(slot.load(Ordering::Relaxed, guard));
        firsts.extend_from_slice(&top.firsts[..old.start]);
        slots.extend(top.leaves[..old.start].iter().map(slot));
        for (position, leaf) in leaves.into_iter().enumerate() {
            // The first of the new leaves takes over the whole room of the first old one, which may begin before its first region.
            firsts.push(if position == 0 && !old.is_empty() { top.firsts[old.start] } else { leaf.slot(0).start });
            slots.push(Atomic::from(leaf));
        }
        firsts.extend_from_slice(&top.firsts[old.end..]);
        slots.extend(top.leaves[old.end..].iter().map(slot));
        if let Some(first) = firsts.first_mut() {
            *first = 0;
        }
        Self::close(top, old.clone());
        let new = Owned::new(Top { firsts: firsts.into(), leaves: slots.into() });
        let replaced = self.shared.top.swap(new, Ordering::AcqRel, guard);
        // SAFETY: the old top and the leaves `old` are unlinked; all other leaves went over to the new top.
        unsafe {
            for slot in &top.leaves[old] {
                let leaf: Pointer<'_, Leaf> = slot.load(Ordering::Relaxed, guard);
                guard.defer_destroy(leaf);
            }
            guard.defer_destroy(replaced);
        }
    }

    /// Marks all leaves as if the writer had stopped amid a change of each, or takes the marks away.
    #[cfg(all(test, not(loom)))]
    pub(super) fn mark_changing(&mut self, changing: bool) {
        // SAFETY: the writer is borrowed.
        let (top, guard) = unsafe { (self.shared.top(epoch::unprotected()), epoch::unprotected()) };
        // SAFETY: as above.
        for leaf in (0..top.leaves.len()).filter_map(|at| unsafe { top.leaf(at, guard) }) {
            let version = leaf.version.load(Ordering::Relaxed) & !CHANGING;
            leaf.version.store(version | if changing { CHANGING } else { 0 }, Ordering::Relaxed);
        }
    }

    /// Tells tops apart, as long as none is destroyed.
    #[cfg(all(test, not(loom)))]
    pub(super) fn top_address(&self) -> usize {
        // SAFETY: the writer is borrowed.
        ptr::from_ref(unsafe { self.shared.top(epoch::unprotected()) }) as usize
    }

    /// Panics where an invariant of the module does not hold. Returns the number of leaves.
    #[cfg(all(test, not(loom)))]
    pub(super) fn check(&self) -> usize {
        // SAFETY: the writer is borrowed.
        let (top, guard) = unsafe { (self.shared.top(epoch::unprotected()), epoch::unprotected()) };
        assert_eq!(top.firsts.len(), top.leaves.len());
        assert!(top.firsts.first().is_none_or(|first| *first == 0));
        assert!(top.firsts.is_sorted_by(|a, b| a < b));
        // SAFETY: the writer is borrowed.
        let leaves: Vec<&Leaf> = (0..top.leaves.len()).map(|at| unsafe { top.leaf(at, guard) }.unwrap()).collect();
        let mut end = 0;
        for (at, leaf) in leaves.iter().enumerate() {
            let items = leaf.items();
            assert_eq!(items.len(), leaf.count());
            assert_eq!(leaf.version.load(Ordering::Relaxed) & CHANGING, 0);
            assert!(!items.is_empty() && items.len() <= self.capacity);
            assert!(items[0].start >= top.firsts[at]);
            if let Some(next) = top.firsts.get(at + 1) {
                assert!(items[items.len() - 1].start < *next);
                let is_thin = |leaf: &Leaf| leaf.count() <= self.capacity / 4;
                assert!(!is_thin(leaf) || !is_thin(leaves[at + 1]), "two thin neighbours");
            }
            let starts = (0..LEAF_CAPACITY).map(|at| leaf.slot(at).start);
            assert!(starts.clone().is_sorted());
            assert!(leaf.heads.iter().map(|head| head.load(Ordering::Relaxed)).eq(starts.step_by(GROUP).skip(1)));
            for item in items {
                // SAFETY: the writer is borrowed, and the index owns a count of the region.
                let range = unsafe { (*item.region).range() };
                assert_eq!((range.address(), range.length()), (item.start, item.length));
                assert!(u128::from(item.start) >= end, "overlap");
                end = range.end();
            }
        }
        assert_eq!(leaves.iter().map(|leaf| leaf.count()).sum::<usize>(), self.length);
        leaves.len()
    }
}

/// The union of two ranges of which the second begins where the first ends.
pub(super) fn join(first: MemoryRange, second: MemoryRange) -> Option<MemoryRange> {
    if first.end() != u128::from(second.address()) {
        return None;
    }
    // SAFETY: every byte of the union was promised with one of the two.
    unsafe { MemoryRange::new(first.address(), first.length().checked_add(second.length())?) }
}

/// Makes up ranges for tests, in which nobody touches the bytes.
#[cfg(test)]
pub(super) fn fake_range(address: u64, length: u64) -> MemoryRange {
    // SAFETY: no test reads or writes the memory of a made-up range.
    unsafe { MemoryRange::new(address, length) }.expect("the range wraps")
}

/// A reader and the writer of one leaf of four slots, with up to two forced switches between them.
#[cfg(all(test, loom))]
mod loom_tests {
    use std::sync::Arc;

    use super::*;
    use crate::registry::{Owner, RegionOptions};

    /// Regions of 5 bytes.
    const LENGTH: u64 = 5;

    struct Regions(Vec<Arc<Region>>);

    impl Regions {
        fn new(starts: &[u64]) -> Regions {
            let options = RegionOptions { location: "*".into(), remote_accessible: true, counted: false, owner: Owner::Program };
            let region =
                |start: &u64| Arc::new(Region::new(fake_range(*start, LENGTH), &options, options.location.clone(), *start));
            Regions(starts.iter().map(region).collect())
        }

        fn slot(&self, start: u64) -> Slot {
            let region = self.0.iter().find(|region| region.range().address() == start).unwrap();
            Slot { start, length: LENGTH, region: Arc::as_ptr(region).cast_mut() }
        }
    }

    struct Model {
        regions: Regions,
        leaf: Box<Leaf>,
    }

    impl Model {
        fn insert(&self, start: u64) {
            assert!(self.leaf.insert(self.regions.slot(start)));
        }

        fn remove(&self, start: u64) {
            self.leaf.remove(self.leaf.rank(start) - 1);
        }

        /// Whether a region starts at the address. It must be the right one.
        fn finds(&self, start: u64) -> bool {
            // SAFETY: the regions live as long as the leaf.
            let (slot, _) = unsafe { self.leaf.predecessor(start) };
            assert!(slot == Slot::NULL || slot == self.regions.slot(slot.start), "of two regions");
            slot.start == start
        }
    }

    /// A leaf with regions at these starts, `write` in one thread and `read` in another.
    fn model(starts: &'static [u64], write: fn(&Model), read: fn(&Model)) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(2);
        builder.check(move || {
            let regions = Regions::new(&[10, 20, 30, 40, 50]);
            let items: Vec<Slot> = starts.iter().map(|start| regions.slot(*start)).collect();
            let leaf = Leaf::new(&items).into_box();
            let model = loom::sync::Arc::new(Model { regions, leaf });
            let reader = {
                let model = model.clone();
                loom::thread::spawn(move || read(&model))
            };
            write(&model);
            reader.join().unwrap();
        });
    }

    // SAFETY: the pointers in the leaf lead to the regions, which may be used by any thread.
    unsafe impl Send for Model {}
    // SAFETY: as above.
    unsafe impl Sync for Model {}

    #[test]
    fn what_stays_is_found_while_others_come_and_go() {
        let fill_and_empty = |model: &Model| {
            model.insert(20);
            model.remove(20);
        };
        model(&[10, 40], fill_and_empty, |model| assert!(model.finds(10)));
        model(&[10, 40], fill_and_empty, |model| assert!(model.finds(40)));
    }

    #[test]
    fn what_moves_is_found() {
        // The second region finds no gap before its place, and takes one of the two slots of 40.
        let insert_two = |model: &Model| {
            model.insert(20);
            model.insert(30);
        };
        model(&[10, 40], insert_two, |model| assert!(model.finds(40)));
        model(&[10, 40], insert_two, |model| assert!(model.finds(10)));
        // The gap that 50 leaves is the last slot, so 30 moves into the one that 40 has besides.
        let move_up = |model: &Model| {
            model.remove(50);
            model.insert(20);
        };
        model(&[10, 30, 40, 50], move_up, |model| assert!(model.finds(30)));
    }

    #[test]
    fn what_takes_over_slots_is_not_mixed_up_with_what_had_them() {
        let replace = |model: &Model| {
            model.remove(40);
            model.insert(30);
        };
        let starts = &[10, 20, 40, 50];
        model(starts, replace, |model| {
            model.finds(40);
        });
        model(starts, replace, |model| {
            model.finds(30);
        });
    }

    #[test]
    fn once_found_stays_found_and_once_gone_stays_gone() {
        model(&[10, 40], |model| model.insert(20), |model| assert!(!model.finds(20) || model.finds(20)));
        model(&[10, 40], |model| model.remove(40), |model| assert!(model.finds(40) || !model.finds(40)));
    }
}
