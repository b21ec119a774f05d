//! Which units of a part of the arena are free: best fit, the lowest of equals, taken from the end; neighbours joined at once.
//!
//! Two ordered maps of the same free extents, by start and by length. No two of them touch, so there are at most as many as there are
//! leases, and one. Cost of taking and of giving back: O(log n), some tens of nanoseconds.

use std::collections::{BTreeMap, BTreeSet};

/// A contiguous run of units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Number of the first.
    pub start: u32,
    /// How many; at least one.
    pub units: u32,
}

/// The free extents of a run of units.
#[derive(Debug)]
pub struct Extents {
    by_start: BTreeMap<u32, u32>,
    /// Length in the upper half, start in the lower: one number, which is compared faster than two.
    by_length: BTreeSet<u64>,
}

fn key(extent: Extent) -> u64 {
    u64::from(extent.units) << 32 | u64::from(extent.start)
}

impl Extents {
    /// All `units` from `start` on are free; `start + units` must fit into 32 bits. There may be none.
    pub fn new(start: u32, units: u32) -> Extents {
        let mut extents = Extents { by_start: BTreeMap::new(), by_length: BTreeSet::new() };
        if units > 0 {
            extents.by_start.insert(start, units);
            extents.by_length.insert(key(Extent { start, units }));
        }
        extents
    }

    /// Takes the end of the first of the shortest extents that are long enough, so that its start, by which it is found, stays.
    pub fn take(&mut self, units: u32) -> Option<Extent> {
        let &found = self.by_length.range(key(Extent { start: 0, units })..).next()?;
        self.by_length.remove(&found);
        let (length, start) = ((found >> 32) as u32, found as u32);
        let left = length - units;
        if left == 0 {
            self.by_start.remove(&start);
        } else {
            self.by_start.insert(start, left);
            self.by_length.insert(key(Extent { start, units: left }));
        }
        Some(Extent { start: start + left, units })
    }

    /// Takes the whole of the first extent that starts at `start` or later.
    pub fn take_next(&mut self, start: u32) -> Option<Extent> {
        let (&start, &units) = self.by_start.range(start..).next()?;
        let extent = Extent { start, units };
        self.by_start.remove(&start);
        self.by_length.remove(&key(extent));
        Some(extent)
    }

    /// Gives back what was taken, or a part of it that was not given back yet.
    pub fn give_back(&mut self, extent: Extent) {
        let end = extent.start + extent.units;
        let mut joined = extent;
        let mut around = self.by_start.range_mut(..=end);
        let mut before = around.next_back();
        if let Some((&start, &mut units)) = before
            && start == end
        {
            self.by_length.remove(&key(Extent { start, units }));
            joined.units += units;
            before = around.next_back();
        }
        let joins_after = joined.units > extent.units;
        match before {
            Some((&start, length)) if start + *length == extent.start => {
                self.by_length.remove(&key(Extent { start, units: *length }));
                joined = Extent { start, units: joined.units + *length };
                *length = joined.units;
            }
            _ => {
                self.by_start.insert(joined.start, joined.units);
            }
        }
        if joins_after {
            self.by_start.remove(&end);
        }
        self.by_length.insert(key(joined));
    }

    /// The length of the longest.
    pub fn longest(&self) -> u32 {
        self.by_length.last().map_or(0, |key| (key >> 32) as u32)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const START: u32 = 5;

    /// A unit a flag: what the allocator must do, by looking at all of them.
    #[derive(Clone)]
    struct Model(Vec<bool>);

    impl Model {
        fn free_extents(&self) -> Vec<Extent> {
            let mut extents = Vec::new();
            let mut at = 0;
            while at < self.0.len() {
                let units = self.0[at..].iter().take_while(|taken| !**taken).count();
                if units > 0 {
                    extents.push(Extent { start: START + at as u32, units: units as u32 });
                }
                at += units.max(1);
            }
            extents
        }

        fn take(&mut self, units: u32) -> Option<Extent> {
            let fits = self.free_extents().into_iter().filter(|extent| extent.units >= units);
            let found = fits.min_by_key(|extent| (extent.units, extent.start))?;
            let extent = Extent { start: found.start + found.units - units, units };
            self.set(extent, true);
            Some(extent)
        }

        fn set(&mut self, extent: Extent, taken: bool) {
            let from = (extent.start - START) as usize;
            self.0[from..from + extent.units as usize].fill(taken);
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Take(u32),
        GiveBack(usize),
        TakeNext(u32),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            3 => (1..24_u32).prop_map(Step::Take),
            3 => any::<usize>().prop_map(Step::GiveBack),
            1 => (0..70_u32).prop_map(Step::TakeNext),
        ];
        prop::collection::vec(step, 0..120)
    }

    proptest! {
        #[test]
        fn extents_are_those_of_a_list_of_units(units in 0..64_u32, steps in steps()) {
            let mut extents = Extents::new(START, units);
            let mut model = Model(vec![false; units as usize]);
            let mut taken = Vec::new();
            for step in steps {
                match step {
                    Step::Take(units) => {
                        let extent = extents.take(units);
                        prop_assert_eq!(extent, model.take(units));
                        taken.extend(extent);
                    }
                    Step::TakeNext(start) => {
                        let extent = extents.take_next(start);
                        prop_assert_eq!(extent, model.free_extents().into_iter().find(|extent| extent.start >= start));
                        extent.iter().for_each(|extent| model.set(*extent, true));
                        taken.extend(extent);
                    }
                    Step::GiveBack(index) if !taken.is_empty() => {
                        let extent = taken.swap_remove(index % taken.len());
                        extents.give_back(extent);
                        model.set(extent, false);
                    }
                    Step::GiveBack(_) => {}
                }
                let free = extents.by_start.iter().map(|(&start, &units)| Extent { start, units }).collect::<Vec<_>>();
                prop_assert_eq!(&free, &model.free_extents());
                prop_assert_eq!(extents.by_length.len(), free.len());
                prop_assert_eq!(extents.longest(), free.iter().map(|extent| extent.units).max().unwrap_or(0));
            }
        }
    }
}
