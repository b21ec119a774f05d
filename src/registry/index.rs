//! The ordered index of regions: two levels, copy-on-write, read without locks.
//!
//! ```text
//! Shared.top -> Top   firsts: [    0 | 0x40000 | 0x90000 ]    lower bounds, searched first
//!                     leaves: [    * |       * |       * ]    slots, replaced in place
//!                                            |
//!                           Leaf   length:  3
//!                                  starts:  [ 0x41000 | 0x52000 | 0x60000 | 0 ... ]   searched second, apart from the pointers
//!                                  regions: [       * |       * |       * | null ]    each owns one count of an Arc<Region>
//! ```
//!
//! # Invariants
//!
//! 1. Regions do not overlap: [`Writer::insert`] refuses.
//! 2. Leaf `i` holds the regions whose start lies in `[firsts[i], firsts[i + 1])`; `firsts[0]` is 0.
//! 3. No leaf is empty. An empty index has a top without leaves.
//! 4. Of two neighbouring leaves at most one is a quarter full or less: whichever becomes so merges with a neighbour if both together
//!    fill three quarters or less. So n regions take at most 8n/capacity + 2 leaves, whatever was removed.
//! 5. A published leaf and the arrays of a published top never change, but for the slots of the *present* top.
//!
//! A lower bound stays when the leaf's first region goes. So it may later lie *inside* a new region of the leaf before, and a
//! look-up that finds no start at or below the address in its leaf must look at the last region of the previous leaf.
//!
//! # Who may do what
//!
//! There is one [`Writer`]; it lives inside the registry's mutex. It copies a leaf, changes the copy and puts it into the slot of the
//! present top; only when leaves split, merge or vanish does it build a new top. Readers pin an epoch ([`Index::pin`]), load the
//! top, load a slot. What they can reach is destroyed only after all who were pinned have gone on, by `crossbeam-epoch`: the old
//! leaf, the old top, and the index's count of a removed region. Copying a leaf copies its pointers and no reference count.
//!
//! A reader that still uses a replaced top sees its slots as they were when it was replaced. That moment lies within its look-up, since each
//! look-up loads the top anew. A look-up that reads two leaves does so in the order *its own, previous*: if it finds nothing, there
//! was a moment between the two reads at which no region held the address, for a region that held it throughout is in one of them
//! all the time. So every look-up has a moment at which its answer was true.
//!
//! # Cost, for n regions
//!
//! | operation | cost |
//! |---|---|
//! | pin | one store and a fence |
//! | look-up | two binary searches: the lower bounds of n/48 or so leaves, the starts of one leaf; then one region |
//! | insert, remove | the same, and a copy of one leaf (1.5 KiB); for one call in 16 or fewer a copy of the top as well |
//! | memory | 24 bytes a region after registrations in ascending order, some 35 in random order, at most 200 |
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::{Deref, Range};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crossbeam_epoch::{self as epoch, Atomic, Guard, Owned, Shared as Pointer};

use super::Region;
use crate::sys::MemoryRange;

/// Most regions in a leaf. Tests choose less.
pub(super) const LEAF_CAPACITY: usize = 64;

/// Starts in a cache line.
const GROUP: usize = 8;

/// Ordered by start. Behind the last region `starts` holds `u64::MAX`, so that searching needs no length.
struct Leaf {
    length: usize,
    starts: [u64; LEAF_CAPACITY],
    lengths: [u64; LEAF_CAPACITY],
    regions: [*const Region; LEAF_CAPACITY],
}

// SAFETY: the pointers stand for shared ownership of `Region`s, which may be used and dropped by any thread.
unsafe impl Send for Leaf {}
// SAFETY: as above; a shared leaf gives out shared access to its regions only.
unsafe impl Sync for Leaf {}

/// What a leaf knows of one region.
type Item = (MemoryRange, *const Region);

impl Leaf {
    const EMPTY: Leaf =
        Leaf { length: 0, starts: [u64::MAX; LEAF_CAPACITY], lengths: [0; LEAF_CAPACITY], regions: [ptr::null(); LEAF_CAPACITY] };

    /// How many regions start at or below the address. Counts instead of halving: the comparisons do not wait for each other.
    fn rank(&self, address: u64) -> usize {
        let group = self.starts.chunks_exact(GROUP).skip(1).filter(|group| group[0] <= address).count();
        let rank = group * GROUP + self.starts[group * GROUP..][..GROUP].iter().filter(|start| **start <= address).count();
        // Counts the places behind the last region, too, when the address is `u64::MAX`.
        rank.min(self.length)
    }

    /// A new leaf, with the item put in at its place.
    fn inserting(&self, at: usize, (range, region): Item) -> Owned<Leaf> {
        assert!(at <= self.length && self.length < LEAF_CAPACITY);
        let mut leaf = Box::<Leaf>::new_uninit();
        let target = leaf.as_mut_ptr();
        // SAFETY: all fields are written, in bounds, before the memory is used as a leaf.
        let leaf = unsafe {
            (&raw mut (*target).length).write(self.length + 1);
            copy_inserting(&self.starts, &raw mut (*target).starts, at, range.address());
            copy_inserting(&self.lengths, &raw mut (*target).lengths, at, range.length());
            copy_inserting(&self.regions, &raw mut (*target).regions, at, region);
            leaf.assume_init()
        };
        Owned::from(leaf)
    }

    /// A new leaf without the item.
    fn removing(&self, at: usize) -> Owned<Leaf> {
        assert!(at < self.length);
        let mut leaf = Box::<Leaf>::new_uninit();
        let target = leaf.as_mut_ptr();
        // SAFETY: all fields are written, in bounds, before the memory is used as a leaf.
        let leaf = unsafe {
            (&raw mut (*target).length).write(self.length - 1);
            copy_removing(&self.starts, &raw mut (*target).starts, at, u64::MAX);
            copy_removing(&self.lengths, &raw mut (*target).lengths, at, 0);
            copy_removing(&self.regions, &raw mut (*target).regions, at, ptr::null());
            leaf.assume_init()
        };
        Owned::from(leaf)
    }

    /// A new leaf with the items of `part` of this one.
    fn part(&self, part: Range<usize>) -> Owned<Leaf> {
        let mut leaf = Owned::new(Leaf::EMPTY);
        leaf.append(self, part);
        leaf
    }

    fn append(&mut self, other: &Leaf, part: Range<usize>) {
        let target = self.length..self.length + part.len();
        self.starts[target.clone()].copy_from_slice(&other.starts[part.clone()]);
        self.lengths[target.clone()].copy_from_slice(&other.lengths[part.clone()]);
        self.regions[target.clone()].copy_from_slice(&other.regions[part]);
        self.length = target.end;
    }
}

/// Copies an array and puts `value` in at `at`; the last element falls out.
///
/// # Safety
/// `target` may be written, and `at` is an index of it.
unsafe fn copy_inserting<T: Copy, const N: usize>(source: &[T; N], target: *mut [T; N], at: usize, value: T) {
    let (source, target) = (source.as_ptr(), target.cast::<T>());
    // SAFETY: 0..at, at, and at + 1..N are the whole target; the source is read from 0..N - 1.
    unsafe {
        target.copy_from_nonoverlapping(source, at);
        target.add(at).write(value);
        target.add(at + 1).copy_from_nonoverlapping(source.add(at), N - 1 - at);
    }
}

/// Copies an array but for the element at `at`, and ends it with `last`.
///
/// # Safety
/// `target` may be written, and `at` is an index of it.
unsafe fn copy_removing<T: Copy, const N: usize>(source: &[T; N], target: *mut [T; N], at: usize, last: T) {
    let (source, target) = (source.as_ptr(), target.cast::<T>());
    // SAFETY: 0..at, at..N - 1, and N - 1 are the whole target; the source is read from 0..at and at + 1..N.
    unsafe {
        target.copy_from_nonoverlapping(source, at);
        target.add(at).copy_from_nonoverlapping(source.add(at + 1), N - 1 - at);
        target.add(N - 1).write(last);
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
    unsafe fn predecessor<'g>(&self, address: u64, guard: &'g Guard) -> Option<Entry<'g>> {
        let mut at = self.locate(address);
        // SAFETY: passed on to the caller.
        let mut leaf = unsafe { self.leaf(at, guard) }?;
        let mut rank = leaf.rank(address);
        if rank == 0 {
            at = at.checked_sub(1)?;
            // SAFETY: passed on to the caller.
            leaf = unsafe { self.leaf(at, guard) }?;
            rank = leaf.length;
        }
        let position = rank.checked_sub(1)?;
        Some(Entry {
            start: leaf.starts[position],
            length: leaf.lengths[position],
            region: NonNull::new(leaf.regions[position].cast_mut())?,
            top: self,
            at,
            leaf,
            position,
            pin: PhantomData,
        })
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
                let leaf = slot.load(Ordering::Relaxed, guard).into_owned();
                for region in &leaf.regions[..leaf.length] {
                    drop(Arc::from_raw(*region));
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
    /// Where it was found: the top, the place in it, the leaf that was there, and the place in that.
    top: *const Top,
    at: usize,
    leaf: *const Leaf,
    position: usize,
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

    /// Whether an entry that this reader found is still in the index. Comparing addresses is enough: none is used again while pinned.
    pub(super) fn is_present(&self, entry: &Entry<'_>) -> bool {
        // SAFETY: `guard` is pinned.
        let top = unsafe { self.shared.top(&self.guard) };
        ptr::eq(top, entry.top) && top.leaves[entry.at].load(Ordering::Acquire, &self.guard).as_raw() == entry.leaf
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
        let start = range.address();
        let guard = &epoch::pin();
        // SAFETY: pinned.
        let top = unsafe { self.shared.top(guard) };
        // Regions do not overlap, so if any meets the range, the one with the largest start does. If none does, the range's place is
        // right behind that one.
        // SAFETY: pinned.
        let before = unsafe { top.predecessor(start + (range.length() - 1), guard) };
        let (at, rank) = match before {
            Some(other) if other.intersects(&range) => return Err(other.to_arc()),
            Some(other) if top.firsts.get(other.at + 1).is_some_and(|first| *first <= start) => (other.at + 1, 0),
            Some(other) => (other.at, other.position + 1),
            None => (0, 0),
        };
        let region = make();
        debug_assert_eq!(region.range(), range);
        self.insert_at(top, at, rank, (range, Arc::into_raw(region.clone())), guard);
        Ok(region)
    }

    fn insert_at(&mut self, top: &Top, at: usize, rank: usize, item: Item, guard: &Guard) {
        self.length += 1;
        // SAFETY: pinned.
        let Some(old) = (unsafe { top.leaf(at, guard) }) else {
            return self.splice(top, 0..0, [Leaf::EMPTY.inserting(0, item)], guard);
        };
        if old.length < self.capacity {
            return self.replace(top, at, old.inserting(rank, item), guard);
        }
        if rank == old.length && at + 1 == top.leaves.len() {
            // Registering in ascending order leaves full leaves behind.
            return self.splice(top, at + 1..at + 1, [Leaf::EMPTY.inserting(0, item)], guard);
        }
        let half = old.length / 2;
        let (mut lower, mut upper) = (old.part(0..half), old.part(half..old.length));
        if rank <= half {
            lower = lower.inserting(rank, item);
        } else {
            upper = upper.inserting(rank - half, item);
        }
        self.splice(top, at..at + 1, [lower, upper], guard);
    }

    /// Removes the region that starts at the address. False if there is none. The reference to it is given up when no reader can
    /// have it any more.
    pub(super) fn remove(&mut self, start: u64) -> bool {
        let guard = &epoch::pin();
        // SAFETY: pinned.
        let top = unsafe { self.shared.top(guard) };
        let at = top.locate(start);
        // SAFETY: pinned, here and below.
        let leaf = |at: usize| unsafe { top.leaf(at, guard) };
        let Some(old) = leaf(at) else { return false };
        let Some(position) = old.rank(start).checked_sub(1).filter(|at| old.starts[*at] == start) else { return false };
        let region = old.regions[position];
        self.length -= 1;

        let length = old.length - 1;
        let fits = |other: Option<&Leaf>| other.is_some_and(|other| other.length + length <= self.capacity * 3 / 4);
        if length == 0 {
            self.splice(top, at..at + 1, [], guard);
        } else {
            let mut new = old.removing(position);
            let previous = at.checked_sub(1);
            if length > self.capacity / 4 {
                self.replace(top, at, new, guard);
            } else if let Some((previous, leaf)) = previous.and_then(|at| Some((at, leaf(at)?))).filter(|found| fits(Some(found.1)))
            {
                let mut merged = leaf.part(0..leaf.length);
                merged.append(&new, 0..new.length);
                self.splice(top, previous..at + 1, [merged], guard);
            } else if let Some(next) = leaf(at + 1).filter(|next| fits(Some(next))) {
                new.append(next, 0..next.length);
                self.splice(top, at..at + 2, [new], guard);
            } else {
                self.replace(top, at, new, guard);
            }
        }
        // SAFETY: no leaf leads to the region any more, so nobody finds it who pins from now on; the count is the one that `insert` took.
        unsafe { guard.defer_unchecked(move || drop(Arc::from_raw(region))) };
        true
    }

    /// Puts a new leaf into the slot.
    fn replace(&self, top: &Top, at: usize, leaf: Owned<Leaf>, guard: &Guard) {
        let old = top.leaves[at].swap(leaf, Ordering::AcqRel, guard);
        // SAFETY: unlinked: this slot was the only way to it, but for slots of tops that are replaced already.
        unsafe { guard.defer_destroy(old) };
    }

    /// Replaces the top by one in which `leaves` stand in the place of the leaves `old`.
    fn splice<const N: usize>(&self, top: &Top, old: Range<usize>, leaves: [Owned<Leaf>; N], guard: &Guard) {
        let mut firsts = Vec::with_capacity(top.firsts.len() + N);
        let mut slots = Vec::with_capacity(top.leaves.len() + N);
        let slot = |slot: &Atomic<Leaf>| Atomic::from(slot.load(Ordering::Relaxed, guard));
        firsts.extend_from_slice(&top.firsts[..old.start]);
        slots.extend(top.leaves[..old.start].iter().map(slot));
        for (position, leaf) in leaves.into_iter().enumerate() {
            // The first of the new leaves takes over the whole room of the first old one, which may begin before its first region.
            firsts.push(if position == 0 && !old.is_empty() { top.firsts[old.start] } else { leaf.starts[0] });
            slots.push(Atomic::from(leaf));
        }
        firsts.extend_from_slice(&top.firsts[old.end..]);
        slots.extend(top.leaves[old.end..].iter().map(slot));
        if let Some(first) = firsts.first_mut() {
            *first = 0;
        }
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
            assert!(leaf.length > 0 && leaf.length <= self.capacity);
            assert!(leaf.starts[0] >= top.firsts[at]);
            if let Some(next) = top.firsts.get(at + 1) {
                assert!(leaf.starts[leaf.length - 1] < *next);
                assert!(leaf.length > self.capacity / 4 || leaves[at + 1].length > self.capacity / 4, "two thin neighbours");
            }
            for (position, start) in leaf.starts[..leaf.length].iter().enumerate() {
                // SAFETY: the writer is borrowed, and the index owns a count of the region.
                let range = unsafe { (*leaf.regions[position]).range() };
                assert_eq!((range.address(), range.length()), (*start, leaf.lengths[position]));
                assert!(u128::from(*start) >= end, "overlap");
                end = range.end();
            }
        }
        assert_eq!(leaves.iter().map(|leaf| leaf.length).sum::<usize>(), self.length);
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
#[cfg(all(test, not(loom)))]
pub(super) fn fake_range(address: u64, length: u64) -> MemoryRange {
    // SAFETY: no test reads or writes the memory of a made-up range.
    unsafe { MemoryRange::new(address, length) }.expect("the range wraps")
}
