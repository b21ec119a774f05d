//! Which NIC serves a piece of memory.
//!
//! Lists are made once for each list of devices, names being mapped to their places in it; choosing walks a handful of numbers and takes
//! no lock. Which of several preferred NICs is taken goes by a counter or a random number of the calling thread.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::BTreeMap;

use super::{Matrix, WILDCARD};

/// The NICs for each location, as indexes into a list of devices.
#[derive(Clone, Debug, Default)]
pub struct NicChoice {
    by_location: BTreeMap<String, Candidates>,
    all: Candidates,
    round_robin: bool,
}

/// Indexes of devices; the first `preferred` ones are to be taken where possible.
#[derive(Clone, Debug, Default)]
struct Candidates {
    devices: Vec<usize>,
    preferred: usize,
}

impl NicChoice {
    /// Maps the names of a matrix to places in `devices`. Names that are not among them are left out: a NIC that its owner gave up.
    /// Devices that the matrix does not name are not chosen, except where it names none at all.
    pub fn new(matrix: &Matrix, devices: &[impl AsRef<str>], round_robin: bool) -> NicChoice {
        let place = |name: &String| devices.iter().position(|device| device.as_ref() == name);
        let mut all: Vec<usize> = Vec::new();
        let mut by_location = BTreeMap::new();
        for (location, (preferred, available)) in matrix {
            let mut candidates = Candidates::default();
            for name in preferred {
                candidates.devices.extend(place(name));
            }
            candidates.preferred = candidates.devices.len();
            candidates.devices.extend(available.iter().filter_map(place));
            for device in &candidates.devices {
                if !all.contains(device) {
                    all.push(*device);
                }
            }
            by_location.insert(location.clone(), candidates);
        }
        if all.is_empty() {
            all = (0..devices.len()).collect();
        }
        NicChoice { by_location, all: Candidates { preferred: all.len(), devices: all }, round_robin }
    }

    /// The NIC for memory at `location` among those that are `usable`; `None` if none is. Locations without NICs of their own, and
    /// `*`, are served by all.
    ///
    /// `retry` 0 takes one of the preferred NICs, at random or in turn. Others walk through preferred and available ones in their order,
    /// so that successive tries of the same work take different NICs. Where that NIC is not usable, the next one that is.
    pub fn select(&self, location: &str, retry: u32, usable: impl Fn(usize) -> bool) -> Option<usize> {
        let own = self.by_location.get(location).filter(|candidates| !candidates.devices.is_empty());
        own.and_then(|own| self.pick(own, retry, &usable)).or_else(|| self.pick(&self.all, retry, &usable))
    }

    /// The NICs that [`NicChoice::select`] takes for memory at `location` as long as it can.
    pub fn preferred(&self, location: &str) -> &[usize] {
        let own = self.by_location.get(location).filter(|candidates| !candidates.devices.is_empty());
        let candidates = own.unwrap_or(&self.all);
        match candidates.preferred {
            0 => &candidates.devices,
            preferred => &candidates.devices[..preferred],
        }
    }

    fn pick(&self, candidates: &Candidates, retry: u32, usable: &impl Fn(usize) -> bool) -> Option<usize> {
        let devices = &candidates.devices[..];
        if retry > 0 {
            return first_usable(devices, retry as usize - 1, usable);
        }
        let (preferred, available) = devices.split_at(candidates.preferred);
        let start = if devices.len() > 1 { self.next_number() } else { 0 };
        first_usable(preferred, start, usable).or_else(|| first_usable(available, start, usable))
    }

    /// A number of this thread: the next one, or a random one.
    fn next_number(&self) -> usize {
        thread_local! {
            static TURN: Cell<usize> = const { Cell::new(0) };
            static RANDOM: Cell<u64> = Cell::new(seed());
        }
        if self.round_robin {
            return TURN.replace(TURN.get().wrapping_add(1));
        }
        // Knuth's linear congruential generator, whose upper bits are the good ones.
        RANDOM.set(RANDOM.get().wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407));
        (RANDOM.get() >> 33) as usize
    }
}

/// A different number for each thread.
fn seed() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish()
}

/// The first usable device from a place in the list on, around its end.
fn first_usable(devices: &[usize], start: usize, usable: &impl Fn(usize) -> bool) -> Option<usize> {
    if devices.is_empty() {
        return None;
    }
    let start = start % devices.len();
    devices[start..].iter().chain(&devices[..start]).copied().find(|device| usable(*device))
}

/// The location of a byte of a buffer with this name. Names of the form `segments:<page size>:<node>,<node>,…` say that equal parts
/// of the buffer are on the nodes listed; every other name is a location itself.
pub fn location_at(name: &str, length: u64, offset: u64) -> Cow<'_, str> {
    let Some(rest) = name.strip_prefix("segments:") else { return Cow::Borrowed(name) };
    let nodes: Option<Vec<u32>> =
        rest.split_once(':').and_then(|(_, nodes)| nodes.split(',').map(|node| node.parse().ok()).collect());
    let Some(nodes) = nodes else { return Cow::Borrowed(WILDCARD) };
    let part = (length / nodes.len() as u64).max(1);
    let index = usize::try_from(offset / part).unwrap_or(usize::MAX).min(nodes.len() - 1);
    Cow::Owned(format!("cpu:{}", nodes[index]))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn matrix(entries: &[(&str, &[&str], &[&str])]) -> Matrix {
        let names = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
        entries
            .iter()
            .map(|(location, preferred, available)| (location.to_string(), (names(preferred), names(available))))
            .collect()
    }

    fn chosen(choice: &NicChoice, location: &str, usable: impl Fn(usize) -> bool) -> BTreeSet<usize> {
        (0..200).filter_map(|_| choice.select(location, 0, &usable)).collect()
    }

    #[test]
    fn names_are_found_by_name_whatever_the_order_and_whoever_is_gone() {
        let matrix = matrix(&[("cpu:0", &["c", "a"], &["b"]), ("cpu:1", &["b"], &["a", "c"])]);
        let choice = NicChoice::new(&matrix, &["a", "b", "c"], false);
        assert_eq!(chosen(&choice, "cpu:0", |_| true), BTreeSet::from([0, 2]));
        assert_eq!(chosen(&choice, "cpu:1", |_| true), BTreeSet::from([1]));
        assert_eq!(chosen(&choice, WILDCARD, |_| true), BTreeSet::from([0, 1, 2]));
        // `a` has been given up by its owner.
        let choice = NicChoice::new(&matrix, &["c", "b"], false);
        assert_eq!(chosen(&choice, "cpu:0", |_| true), BTreeSet::from([0]));
        assert_eq!(chosen(&choice, "cpu:1", |_| true), BTreeSet::from([1]));
    }

    #[test]
    fn preferred_nics_are_those_that_a_first_try_takes() {
        let matrix = matrix(&[("cpu:0", &["c", "a"], &["b"]), ("cpu:1", &[], &["b"]), ("cpu:2", &[], &[])]);
        let choice = NicChoice::new(&matrix, &["a", "b", "c"], false);
        for (location, expected) in [("cpu:0", &[2, 0][..]), ("cpu:1", &[1]), ("cpu:2", &[2, 0, 1]), ("elsewhere", &[2, 0, 1])] {
            assert_eq!(choice.preferred(location), expected);
            assert_eq!(chosen(&choice, location, |_| true), expected.iter().copied().collect());
        }
    }

    #[test]
    fn retries_walk_through_preferred_then_available() {
        let matrix = matrix(&[("cpu:0", &["b"], &["a", "c"])]);
        let choice = NicChoice::new(&matrix, &["a", "b", "c"], false);
        let walk: Vec<usize> = (1..=7).map(|retry| choice.select("cpu:0", retry, |_| true).unwrap()).collect();
        assert_eq!(walk, [1, 0, 2, 1, 0, 2, 1]);
        assert!(choice.select("cpu:0", u32::MAX, |_| true).is_some());
    }

    #[test]
    fn nics_that_are_not_usable_are_passed_over() {
        let matrix = matrix(&[("cpu:0", &["a", "b"], &["c"]), ("cpu:1", &["d"], &[])]);
        let choice = NicChoice::new(&matrix, &["a", "b", "c", "d"], false);
        assert_eq!(chosen(&choice, "cpu:0", |device| device != 0), BTreeSet::from([1]));
        assert_eq!(chosen(&choice, "cpu:0", |device| device > 1), BTreeSet::from([2]));
        assert_eq!(choice.select("cpu:0", 1, |device| device != 0), Some(1));
        // None of its own is left: any other.
        assert_eq!(chosen(&choice, "cpu:1", |device| device != 3), BTreeSet::from([0, 1, 2]));
        assert_eq!(choice.select("cpu:1", 0, |_| false), None);
    }

    #[test]
    fn unknown_and_empty_locations_are_served_by_all() {
        let choice = NicChoice::new(&matrix(&[("cpu:0", &["a"], &["b"]), ("cpu:1", &[], &[])]), &["a", "b"], false);
        for location in ["cpu:1", "cpu:99", "", "cuda:0", WILDCARD] {
            assert_eq!(chosen(&choice, location, |_| true), BTreeSet::from([0, 1]), "{location}");
        }
        let without_matrix = NicChoice::new(&Matrix::new(), &["a", "b"], false);
        assert_eq!(chosen(&without_matrix, "cpu:0", |_| true), BTreeSet::from([0, 1]));
        assert_eq!(NicChoice::new(&Matrix::new(), &[""; 0], false).select("cpu:0", 0, |_| true), None);
    }

    #[test]
    fn in_turn_means_evenly() {
        let choice = NicChoice::new(&matrix(&[("cpu:0", &["a", "b", "c"], &[])]), &["a", "b", "c"], true);
        let mut counts = [0; 3];
        (0..300).for_each(|_| counts[choice.select("cpu:0", 0, |_| true).unwrap()] += 1);
        assert_eq!(counts, [100; 3]);
    }

    #[test]
    fn at_random_means_about_evenly() {
        let choice = NicChoice::new(&matrix(&[("cpu:0", &["a", "b"], &[])]), &["a", "b"], false);
        let first = (0..10_000).filter(|_| choice.select("cpu:0", 0, |_| true) == Some(0)).count();
        assert!((4000..6000).contains(&first), "{first}");
    }

    #[test]
    fn parts_of_segmented_buffers_are_where_their_name_says() {
        let name = "segments:4096:0,1,3";
        for (offset, location) in
            [(0, "cpu:0"), (332, "cpu:0"), (333, "cpu:1"), (666, "cpu:3"), (999, "cpu:3"), (u64::MAX, "cpu:3")]
        {
            assert_eq!(location_at(name, 1000, offset), location, "{offset}");
        }
        assert_eq!(location_at(name, 2, 1), "cpu:1");
        for broken in ["segments:", "segments:4096", "segments:4096:", "segments:4096:a", "segments:4096:0,,1"] {
            assert_eq!(location_at(broken, 1000, 10), WILDCARD, "{broken}");
        }
        for plain in ["cpu:0", "*", "", "anything", "segment"] {
            assert_eq!(location_at(plain, 1000, 10), plain);
        }
    }
}
