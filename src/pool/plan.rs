//! How a put or get goes through a pool: which items wait for which, how each of them gets there, and which share a lease. Pure functions of
//! numbers; who moves bytes is the engine.
//!
//! Cost of each: O(n log n) for n items, and where nothing overlaps one sort.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::sys::MemoryRange;

/// How items are to get there, as the caller asks for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preference {
    /// As is best for each.
    #[default]
    Auto,
    /// Through the pool, whatever can be.
    Staged,
    /// From where they are.
    Direct,
}

/// How an item gets there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From registered memory, or there is nothing to be moved.
    ZeroCopy,
    /// From where it is, which need not be registered.
    Direct,
    /// From where it is, which is registered for the call.
    Registered,
    /// Through a lease.
    Staged,
    /// Registered or staged, whichever takes less time.
    Either,
}

/// What decides on an item's way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// Its bytes.
    pub length: u64,
    /// Whether all of its memory is registered.
    pub is_registered: bool,
    /// Whether it is in memory of a device, which the host does not copy.
    pub is_of_device: bool,
    /// Whether the transport to its segment needs registered memory.
    pub needs_registration: bool,
}

impl Item {
    /// The way it goes through a pool with that largest lease.
    pub fn way(&self, asked: Preference, largest_lease: u64) -> Way {
        if self.length == 0 || self.is_registered {
            return Way::ZeroCopy;
        }
        let can_be_staged = !self.is_of_device && self.length <= largest_lease;
        match (asked, self.needs_registration) {
            (Preference::Staged, _) if can_be_staged => Way::Staged,
            (_, false) => Way::Direct,
            (Preference::Auto, true) if can_be_staged => Way::Either,
            (_, true) => Way::Registered,
        }
    }
}

/// Where the bytes of an item arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Target {
    /// Whose address space it is.
    pub space: u64,
    /// First byte.
    pub address: u64,
    /// Bytes.
    pub length: u64,
}

impl Target {
    fn end(&self) -> u128 {
        u128::from(self.address) + u128::from(self.length)
    }
}

/// For each item the number of its wave, so that of those that arrive at the same byte the last in input order arrives last: an item is in the
/// wave after the last one of the earlier items that it overlaps, and in wave 0 if there are none. `None` if all are.
pub fn waves(targets: &[Target]) -> Option<Vec<u32>> {
    let mut sorted: Vec<&Target> = targets.iter().filter(|target| target.length > 0).collect();
    sorted.sort_unstable();
    let mut reached = (0, 0);
    let overlap = sorted.iter().any(|target| {
        let meets = target.space == reached.0 && u128::from(target.address) < reached.1;
        reached = (target.space, if target.space == reached.0 { reached.1.max(target.end()) } else { target.end() });
        meets
    });
    if !overlap {
        return None;
    }
    // By space and start: end, and the wave of the item that arrives there last so far, which is later than all that arrive there before it.
    let mut arrivals: BTreeMap<(u64, u128), (u128, u32)> = BTreeMap::new();
    let wave_of = |target: &Target| {
        if target.length == 0 {
            return 0;
        }
        let (start, end) = (u128::from(target.address), target.end());
        let mut wave = 0;
        let last_before = |arrivals: &BTreeMap<(u64, u128), (u128, u32)>| {
            let (&(space, from), &(to, wave)) = arrivals.range(..(target.space, end)).next_back()?;
            (space == target.space && to > start).then_some((from, to, wave))
        };
        while let Some((from, to, other)) = last_before(&arrivals) {
            wave = wave.max(other + 1);
            arrivals.remove(&(target.space, from));
            if from < start {
                arrivals.insert((target.space, from), (start, other));
            }
            if to > end {
                arrivals.insert((target.space, end), (to, other));
            }
        }
        arrivals.insert((target.space, start), (end, wave));
        wave
    };
    Some(targets.iter().map(wave_of).collect())
}

/// The ranges, sorted, those that overlap or touch as one.
pub fn merge(ranges: impl Iterator<Item = MemoryRange>) -> Vec<MemoryRange> {
    let mut sorted: Vec<MemoryRange> = ranges.filter(|range| range.length() > 0).collect();
    sorted.sort_unstable_by_key(MemoryRange::address);
    sorted.dedup_by(|next, before| match before.union(next) {
        Some(union) => {
            *before = union;
            true
        }
        None => false,
    });
    sorted
}

/// The parts of `range` that none of the others holds, which are sorted and do not overlap.
pub fn gaps(range: MemoryRange, others: impl Iterator<Item = MemoryRange>) -> Vec<MemoryRange> {
    let mut gaps = Vec::new();
    let mut reached = 0;
    let offset_of = |address: u128| address.saturating_sub(range.address().into()).min(range.length().into()) as u64;
    for other in others {
        let start = offset_of(other.address().into());
        gaps.extend(range.part(reached, start.saturating_sub(reached)).filter(|gap| gap.length() > 0));
        reached = reached.max(offset_of(other.end()));
    }
    gaps.extend(range.part(reached, range.length() - reached).filter(|gap| gap.length() > 0));
    gaps
}

/// Groups are not made smaller than this for the sake of copying one while another is transferred, in bytes.
const LEAST_GROUP: u64 = 512 << 10;
/// Nor larger: what is copied first, and transferred last, overlaps with nothing. Shorter ones are not copied past the caches.
const LARGEST_GROUP: u64 = 4 << 20;
/// Into so many groups a call is divided between the two.
const GROUPS: u64 = 4;
/// Most groups that one call has under way at a time.
const MOST_AT_ONCE: u64 = 8;
/// Parts of items begin at multiples of this.
const PART_ALIGNMENT: u64 = 4096;

/// Bytes of the groups that are staged together, in a call that stages `total` by leases of at most `largest`.
pub fn group_limit(total: u64, largest: u64) -> u64 {
    (total / GROUPS).clamp(LEAST_GROUP, LARGEST_GROUP).next_multiple_of(PART_ALIGNMENT).min(largest)
}

/// How many groups of `limit` bytes a call may have in leases at a time, where each may have `largest`: two of them, as the largest lease is made for.
pub fn groups_at_once(limit: u64, largest: u64) -> usize {
    (largest.saturating_mul(2) / limit.max(1)).clamp(2, MOST_AT_ONCE) as usize
}

/// Offsets and lengths of the parts that an item of `length` is divided into: as few as have at most `limit` each, and about as long as each other.
pub fn parts(length: u64, limit: u64) -> impl Iterator<Item = (u64, u64)> {
    let part = match length <= limit {
        true => length.max(1),
        false => length.div_ceil(length.div_ceil(limit)).next_multiple_of(PART_ALIGNMENT).min(limit),
    };
    (0..length.div_ceil(part)).map(move |number| (number * part, part.min(length - number * part)))
}

/// Divides items of these lengths, in their order, into groups that are staged together: none has more than `limit` bytes, unless one item has.
pub fn groups(lengths: &[u64], limit: u64) -> Vec<Range<usize>> {
    let (mut groups, mut start, mut bytes) = (Vec::new(), 0, 0_u64);
    for (at, length) in lengths.iter().enumerate() {
        if at > start && bytes.saturating_add(*length) > limit {
            groups.push(start..at);
            (start, bytes) = (at, 0);
        }
        bytes = bytes.saturating_add(*length);
    }
    if start < lengths.len() {
        groups.push(start..lengths.len());
    }
    groups
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn range((address, length): (u64, u64)) -> MemoryRange {
        // SAFETY: nobody reads or writes the memory of a made-up range.
        #[allow(unsafe_code)]
        unsafe { MemoryRange::new(address, length) }.unwrap()
    }

    fn numbers(ranges: &[MemoryRange]) -> Vec<(u64, u64)> {
        ranges.iter().map(|range| (range.address(), range.length())).collect()
    }

    /// The runs of the bytes that are set.
    fn runs(bytes: &[bool]) -> Vec<(u64, u64)> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for at in (0..bytes.len()).filter(|at| bytes[*at]) {
            match runs.last_mut() {
                Some((start, length)) if *start + *length == at as u64 => *length += 1,
                _ => runs.push((at as u64, 1)),
            }
        }
        runs
    }

    const BYTES: usize = 64;

    fn ranges() -> impl Strategy<Value = Vec<(u64, u64)>> {
        prop::collection::vec((0..40_u64, 0..20_u64), 0..12)
    }

    proptest! {
        #[test]
        fn waves_are_those_of_comparing_each_with_each(
            targets in prop::collection::vec((0..3_u64, 0..60_u64, 0..12_u64), 0..40),
            base in prop_oneof![Just(0), Just(u64::MAX - 70)],
        ) {
            let targets: Vec<Target> =
                targets.into_iter().map(|(space, address, length)| Target { space, address: base + address, length }).collect();
            let meet = |a: &Target, b: &Target| {
                a.space == b.space && u128::from(a.address.max(b.address)) < a.end().min(b.end())
            };
            let mut expected: Vec<u32> = Vec::new();
            for (at, target) in targets.iter().enumerate() {
                let earlier = targets[..at].iter().zip(&expected).filter(|(other, _)| meet(other, target));
                expected.push(earlier.map(|(_, wave)| wave + 1).max().unwrap_or(0));
            }
            let all_first = expected.iter().all(|wave| *wave == 0);
            prop_assert_eq!(waves(&targets), (!all_first).then_some(expected));
        }

        #[test]
        fn merged_ranges_are_the_runs_of_their_bytes(given in ranges()) {
            let mut bytes = [false; BYTES];
            given.iter().for_each(|(start, length)| bytes[*start as usize..][..*length as usize].fill(true));
            prop_assert_eq!(numbers(&merge(given.into_iter().map(range))), runs(&bytes));
        }

        #[test]
        fn gaps_are_the_runs_of_bytes_that_nobody_holds(whole in (0..40_u64, 0..24_u64), others in ranges()) {
            let others = merge(others.into_iter().map(range));
            let mut bytes = [false; BYTES];
            bytes[whole.0 as usize..][..whole.1 as usize].fill(true);
            others.iter().for_each(|other| bytes[other.address() as usize..][..other.length() as usize].fill(false));
            prop_assert_eq!(numbers(&gaps(range(whole), others.into_iter())), runs(&bytes));
        }

        #[test]
        fn groups_are_all_items_in_order_and_fit_into_a_lease(
            lengths in prop::collection::vec(0..3 * LEAST_GROUP, 0..60),
            largest in 1..4 * LEAST_GROUP,
        ) {
            let groups = groups(&lengths, largest);
            let mut next = 0;
            for group in groups {
                prop_assert_eq!(group.start, next);
                prop_assert!(!group.is_empty());
                prop_assert!(group.len() == 1 || lengths[group.clone()].iter().sum::<u64>() <= largest);
                next = group.end;
            }
            prop_assert_eq!(next, lengths.len());
        }
    }

    proptest! {
        #[test]
        fn parts_are_all_of_an_item_in_order_and_fit_into_a_group(length in 0..20 * LARGEST_GROUP, limit in 1..4 * LARGEST_GROUP) {
            let limit = limit.next_multiple_of(PART_ALIGNMENT);
            let mut next = 0;
            let parts: Vec<_> = parts(length, limit).collect();
            for (offset, length) in &parts {
                prop_assert_eq!(*offset, next);
                prop_assert!(*length > 0 && *length <= limit && offset.is_multiple_of(PART_ALIGNMENT));
                next += length;
            }
            prop_assert_eq!(next, length);
            prop_assert!(parts.len() as u64 <= length.div_ceil(limit));
        }
    }

    #[test]
    fn ranges_at_the_end_of_the_address_space_are_merged_and_divided() {
        let (last, before) = ((u64::MAX - 9, 10), (u64::MAX - 19, 10));
        let merged = merge([last, before].into_iter().map(range));
        assert_eq!(numbers(&merged), [(u64::MAX - 19, 20)]);
        assert_eq!(numbers(&gaps(merged[0], [range(last)].into_iter())), [before]);
        assert_eq!(numbers(&gaps(merged[0], [range(before)].into_iter())), [last]);
    }

    #[test]
    fn a_call_is_divided_so_that_copying_one_part_overlaps_moving_another() {
        const MIB: u64 = 1 << 20;
        let count = |length: u64, items: usize, largest| {
            let limit = group_limit(length.saturating_mul(items as u64), largest);
            let lengths: Vec<_> = (0..items).flat_map(|_| parts(length, limit).map(|(_, length)| length)).collect();
            groups(&lengths, limit).len()
        };
        assert_eq!(count(4096, 16, 8 * MIB), 1, "not worth it");
        assert_eq!(count(LEAST_GROUP, 1, 8 * MIB), 1, "not worth it");
        assert_eq!(count(64 << 10, 64, 8 * MIB), 4);
        assert_eq!(count(4 * MIB, 1, 8 * MIB), 4, "in one item");
        assert_eq!(count(100 << 10, 100, 100 << 10), 100, "as the largest lease says");
        assert_eq!(count(64 * MIB, 1, 64 * MIB) as u64, 64 * MIB / LARGEST_GROUP, "none longer than needed");
        assert_eq!(group_limit(u64::MAX, u64::MAX), LARGEST_GROUP);
        assert_eq!(group_limit(u64::MAX, 1001), 1001);
        assert_eq!(parts(1001, 1001).collect::<Vec<_>>(), [(0, 1001)]);
    }

    #[test]
    fn a_call_has_as_many_groups_under_way_as_two_of_the_largest_leases_hold() {
        const MIB: u64 = 1 << 20;
        let at_once = [(4 * MIB, 4 * MIB), (4 * MIB, 8 * MIB), (4 * MIB, 11 * MIB), (4 * MIB, 80 * MIB), (4096, 4096), (0, 0)];
        assert_eq!(at_once.map(|(limit, largest)| groups_at_once(limit, largest)), [2, 4, 5, 8, 2, 2]);
        assert_eq!(groups_at_once(1, u64::MAX), 8);
    }

    #[test]
    fn each_item_goes_the_way_that_suits_it() {
        use Preference::{Auto, Direct as AskedDirect, Staged as AskedStaged};
        let rdma = Item { length: 100, is_registered: false, is_of_device: false, needs_registration: true };
        let tcp = Item { needs_registration: false, ..rdma };
        for (item, expected) in [
            (rdma, [Way::Either, Way::Staged, Way::Registered]),
            (Item { is_registered: true, ..rdma }, [Way::ZeroCopy; 3]),
            (Item { is_registered: true, is_of_device: true, length: 101, ..rdma }, [Way::ZeroCopy; 3]),
            (Item { length: 0, ..rdma }, [Way::ZeroCopy; 3]),
            (Item { length: 101, ..rdma }, [Way::Registered; 3]),
            (Item { is_of_device: true, ..rdma }, [Way::Registered; 3]),
            (tcp, [Way::Direct, Way::Staged, Way::Direct]),
            (Item { length: 101, ..tcp }, [Way::Direct; 3]),
            (Item { is_of_device: true, ..tcp }, [Way::Direct; 3]),
        ] {
            assert_eq!([Auto, AskedStaged, AskedDirect].map(|asked| item.way(asked, 100)), expected, "{item:?}");
        }
    }
}
