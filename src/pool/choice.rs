//! Whether payloads are staged or their memory is registered directly: whichever took less time lately.
//!
//! What either path costs depends on pages, devices, links and what else the machine does, so it is measured, for each [`Class`] of calls by
//! itself. The cost of a path is the median of what a byte took in its last [`LATELY`] calls, so that what happens now and then
//! moves nothing. The cheaper path is taken, and left for the other one where that is clearly cheaper, by [`CLEAR`]. The other one is tried again:
//!
//! - until it was seen [`WARM_UP`] times, unless it is out of the question: at first, and when the paths have just changed places;
//! - then when trying it is expected to cost no more than 1 % of the time that was spent since, and not within [`SPACING`] calls. So a path that
//!   costs r times as much is tried once in 200 (r - 1) calls or in [`SPACING`], whichever is more, and a change for the better is
//!   noticed by then;
//! - at once, if it looked cheaper when it was last tried: some calls later its median says whether it is.
//!
//! **A path is judged by calls that follow on one of its own.** The first after the other path is not measured, and a trial is two calls: what the
//! other path has left in the caches makes the first one slower, by a third for 16 MiB. A path that is only ever tried once at a time would never show
//! what it costs.
//!
//! The path taken is measured all the time, and left when half of its last calls cost more than the other path does. A path whose
//! trial was never recorded, because the call failed, is tried no sooner than one that is known to cost [`UNKNOWN`] times as much.
//!
//! Of calls shorter than [`SHORT`] whose class is settled only one in [`ONE_IN`] is to be measured, which counts for all of them: reading
//! clocks and recording takes a twentieth of the shortest ones.
//!
//! Reads no clock. One mutex for all classes, held for a search in a map of at most [`CLASSES`], and for a record one median; memory is
//! allocated only when a class is met for the first time. The class that was used least recently makes room for a new one.

use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::Mutex;

use super::Direction;

/// Calls that a median is of.
const LATELY: usize = 9;
/// Calls of a path before it is judged.
const WARM_UP: u8 = 5;
/// A path that took so many times as long at first sight need not be seen again in the warm-up.
const FAR: f64 = 16.0;
/// Calls between two trials, at least: however little the other path costs, it makes two calls follow on the wrong one.
const SPACING: u32 = 64;
/// The part of its own cost that a path must cost less than to be taken instead.
const CLEAR: f64 = 0.98;
/// The part of the time that trials may cost.
const BUDGET: f64 = 0.01;
/// How many times as much a path is taken to cost whose trial was not recorded.
const UNKNOWN: f64 = 8.0;
/// Nanoseconds of calls that are not all measured …
const SHORT: f64 = 20_000.0;
/// … but one in so many.
const ONE_IN: u32 = 8;
/// Most classes that are remembered.
const CLASSES: usize = 256;
/// Largest distance, in doublings of both lengths together, over which a class makes a first guess for another.
const NEAR: u32 = 4;

/// How payloads get to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// Through a lease of the pool.
    Staged,
    /// From where they are, registered for the call.
    Direct,
}

impl Path {
    fn other(self) -> Path {
        match self {
            Path::Staged => Path::Direct,
            Path::Direct => Path::Staged,
        }
    }
}

/// What a call should do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pick {
    /// The path to take.
    pub path: Path,
    /// Whether to record what it took.
    pub is_measured: bool,
}

/// Calls that are alike: their costs are kept together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Class {
    direction: u8,
    devices: u16,
    item: u8,
    call: u8,
}

impl Class {
    /// Of a call that moves `call_bytes` in items of `item_length` (their mean, if they differ), to be registered with so many devices.
    pub fn new(direction: Direction, item_length: u64, call_bytes: u64, devices: usize) -> Class {
        let doublings = |bytes: u64| bytes.max(1).ilog2() as u8;
        Class {
            direction: direction as u8,
            devices: u16::try_from(devices).unwrap_or(u16::MAX),
            item: doublings(item_length),
            call: doublings(call_bytes),
        }
    }

    /// How far apart two classes are, if one says anything of the other: first the number of devices counts, then the lengths.
    fn distance(&self, other: &Class) -> Option<(u16, u32)> {
        let lengths = u32::from(self.item.abs_diff(other.item)) + u32::from(self.call.abs_diff(other.call));
        (self.direction == other.direction && lengths <= NEAR).then_some((self.devices.abs_diff(other.devices), lengths))
    }
}

/// What a byte took on one path lately, in nanoseconds.
#[derive(Clone, Copy)]
struct Cost {
    recent: [f32; LATELY],
    /// Of these.
    middle: f32,
    count: u8,
    next: u8,
    /// Calls that are still wanted before the path is judged.
    wanted: u8,
    /// The last trial was not recorded: it is still under way, or failed.
    is_unanswered: bool,
}

impl Cost {
    const NOTHING: Cost = Cost { recent: [0.0; LATELY], middle: 0.0, count: 0, next: 0, wanted: WARM_UP, is_unanswered: false };

    fn add(&mut self, cost: f32) {
        self.recent[usize::from(self.next)] = cost;
        self.next = (self.next + 1) % LATELY as u8;
        self.count = (self.count + 1).min(LATELY as u8);
        self.wanted = self.wanted.saturating_sub(1);
        self.is_unanswered = false;
        let mut sorted = self.recent;
        // Until the ring is full, what was recorded is at its beginning.
        let sorted = &mut sorted[..self.count.into()];
        sorted.sort_unstable_by(f32::total_cmp);
        // Of two in the middle the smaller one: calls are slow by chance, but never fast.
        self.middle = sorted[(sorted.len() - 1) / 2];
    }

    fn last(&self) -> Option<f64> {
        let last = (usize::from(self.next) + LATELY - 1) % LATELY;
        (self.count > 0).then(|| self.recent[last].into())
    }

    fn median(&self) -> Option<f64> {
        (self.count > 0).then(|| self.middle.into())
    }
}

/// What is known of a class.
struct Experience {
    costs: [Cost; 2],
    /// The path that is taken, unless the other one is clearly cheaper: a guess, as long as neither was recorded.
    taken: Path,
    /// That of the last call.
    last: Option<Path>,
    /// One that is tried, in a call that was not measured: the next one is.
    begun: Option<Path>,
    /// Nanoseconds that trials may cost by now.
    credit: f64,
    /// Bytes of the last call.
    bytes: f64,
    /// Calls since the last trial.
    since_trial: u32,
    /// Calls until the next that is measured.
    unmeasured: u32,
    /// When it was used last, counted in calls of all classes.
    used: u64,
}

impl Experience {
    fn new(guess: Path) -> Experience {
        Experience {
            costs: [Cost::NOTHING; 2],
            taken: guess,
            last: None,
            begun: None,
            credit: 0.0,
            bytes: 0.0,
            since_trial: 0,
            unmeasured: 0,
            used: 0,
        }
    }

    /// The path to take and its cost, if any is known.
    fn best(&self) -> Option<(Path, f64)> {
        let known = |path: Path| Some((path, self.costs[path as usize].median()?));
        match (known(self.taken), known(self.taken.other())) {
            (Some((_, taken)), Some(other)) if other.1 < taken * CLEAR => Some(other),
            (taken, other) => taken.or(other),
        }
    }

    /// By how many nanoseconds a byte is expected to cost more on the path that is not the best.
    fn excess(&self, (best, cost): (Path, f64)) -> f64 {
        self.costs[best.other() as usize].median().unwrap_or(cost * UNKNOWN) - cost
    }

    /// Whether the other path is to be tried whatever that costs: it has not been seen often enough, or looked cheaper.
    fn is_open(&self, (best, cost): (Path, f64)) -> bool {
        let other = &self.costs[best.other() as usize];
        !other.is_unanswered && other.last().is_none_or(|last| last < cost * CLEAR || (other.wanted > 0 && last < cost * FAR))
    }

    fn pick(&mut self) -> Pick {
        self.since_trial = self.since_trial.saturating_add(1);
        let Some((path, cost)) = self.best() else { return self.take(self.taken) };
        if let Some(begun) = self.begun.take() {
            self.costs[begun as usize].is_unanswered = true;
            return self.take(begun);
        }
        if self.unmeasured > 0 {
            self.unmeasured -= 1;
            return Pick { is_measured: false, ..self.take(path) };
        }
        let is_known = self.costs[path.other() as usize].count > 0;
        let price = self.excess((path, cost)) * self.bytes * if is_known { 2.0 } else { 1.0 };
        let is_open = self.is_open((path, cost));
        let is_due = self.since_trial >= SPACING && self.credit >= price;
        if !(is_open || is_due) {
            return self.take(path);
        }
        let pick = self.take(path.other());
        let other = &mut self.costs[pick.path as usize];
        let is_new = is_open && other.wanted > 0;
        if !is_new {
            self.credit -= price;
        }
        if pick.is_measured {
            other.is_unanswered = true;
        } else {
            self.begun = Some(pick.path);
        }
        self.since_trial = 0;
        pick
    }

    /// Has the next call take this path.
    fn take(&mut self, path: Path) -> Pick {
        let follows = self.last.replace(path) != Some(path.other());
        Pick { path, is_measured: follows || self.costs[path as usize].count == 0 }
    }

    fn record(&mut self, path: Path, bytes: u64, spent: Duration) {
        let nanoseconds = spent.as_nanos() as f64;
        self.bytes = bytes as f64;
        let former = self.best();
        self.costs[path as usize].add((nanoseconds / self.bytes) as f32);
        if let Some(best) = self.best() {
            if let Some((left, _)) = former
                && left != best.0
            {
                // Were its last calls slow by chance?
                self.costs[left as usize].wanted = WARM_UP;
            }
            self.taken = best.0;
            // No more than two trials are saved up for, lest they come in a crowd when the other path becomes expensive.
            let most = 4.0 * self.excess(best) * self.bytes;
            let is_settled = path == best.0 && self.costs[path as usize].wanted == 0 && !self.is_open(best);
            let calls = if is_settled && nanoseconds < SHORT { ONE_IN } else { 1 };
            self.unmeasured = calls - 1;
            self.credit = (self.credit + nanoseconds * f64::from(calls) * BUDGET).min(most);
        }
    }
}

/// See the module. Any thread may call anything at any time.
#[derive(Default)]
pub struct Choice {
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    classes: BTreeMap<Class, Experience>,
    /// Calls so far.
    now: u64,
}

impl Known {
    fn of(&mut self, class: Class) -> &mut Experience {
        let is_new = !self.classes.contains_key(&class);
        let guess = if is_new { self.guess(class) } else { Path::Staged };
        if is_new && self.classes.len() >= CLASSES {
            let oldest = self.classes.iter().min_by_key(|(_, known)| known.used).map(|(class, _)| *class);
            oldest.and_then(|oldest| self.classes.remove(&oldest));
        }
        let experience = self.classes.entry(class).or_insert_with(|| Experience::new(guess));
        self.now += 1;
        experience.used = self.now;
        experience
    }

    /// What the nearest class found best that has seen both paths.
    fn guess(&self, class: Class) -> Path {
        let near = self.classes.iter().filter(|(_, known)| known.costs.iter().all(|cost| cost.count > 0));
        let near = near.filter_map(|(other, known)| Some((class.distance(other)?, known.best()?.0)));
        near.min_by_key(|(distance, _)| *distance).map_or(Path::Staged, |(_, path)| path)
    }
}

impl Choice {
    /// One that knows nothing yet.
    pub fn new() -> Choice {
        Choice::default()
    }

    /// What a call should do.
    pub fn pick(&self, class: Class) -> Pick {
        self.known.lock().of(class).pick()
    }

    /// How long a call took that moved all of its bytes on that path, picked or not.
    pub fn record(&self, class: Class, path: Path, bytes: u64, spent: Duration) {
        if bytes > 0 {
            self.known.lock().of(class).record(path, bytes, spent);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn class() -> Class {
        Class::new(Direction::Put, 64 << 10, MIB, 4)
    }

    /// What calls take, by chance: seeded, so that each run is the same.
    struct Chance(u64);

    impl Chance {
        fn next(&mut self) -> f64 {
            // xorshift64*
            self.0 ^= self.0 >> 12;
            self.0 ^= self.0 << 25;
            self.0 ^= self.0 >> 27;
            (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11) as f64 / (1_u64 << 53) as f64
        }

        /// About 1, spread by so much to either side at most; one in so many takes ten times as long.
        fn factor(&mut self, spread: f64, outliers: f64) -> f64 {
            let middle = (self.next() + self.next() + self.next()) / 1.5 - 1.0;
            let factor = 1.0 + spread * middle;
            if self.next() < outliers { 10.0 * factor } else { factor }
        }
    }

    fn time(nanoseconds: f64) -> Duration {
        Duration::from_nanos(nanoseconds as u64)
    }

    /// One call of 1 MiB. What it took, and which path it took.
    fn call(choice: &Choice, class: Class, costs: [f64; 2]) -> (f64, Path) {
        let Pick { path, is_measured } = choice.pick(class);
        let cost = costs[path as usize];
        if is_measured {
            choice.record(class, path, MIB, time(cost));
        }
        (cost, path)
    }

    const STAGED: f64 = 100_000.0;
    const RATIOS: [f64; 13] = [0.3, 0.5, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 2.5, 3.0];

    #[test]
    fn calls_take_no_more_than_5_percent_longer_than_on_the_better_path() {
        // Spread and outliers of the calls; by how much both paths are slower or faster at times, and for how many calls on average.
        let steady = [(0.0, 0.0), (0.2, 0.0), (0.2, 0.02), (0.5, 0.0), (0.5, 0.02), (0.5, 0.05)].map(|(a, b)| (a, b, 0.0, 1.0));
        let in_phases = [(0.2, 0.02, 0.5, 10.0), (0.2, 0.02, 0.7, 30.0), (0.2, 0.02, 0.7, 100.0), (0.5, 0.02, 0.7, 30.0)];
        for ratio in RATIOS {
            for (spread, outliers, depth, length) in steady.into_iter().chain(in_phases) {
                for seed in 1..=2 {
                    let (choice, mut chance) = (Choice::new(), Chance(seed * 0x9E37_79B9));
                    // On average, so that chance decides what is picked, but not whether that was right.
                    let (mut taken, mut better, mut level) = (0.0, 0.0, 1.0);
                    for number in 0..3_000 {
                        if depth > 0.0 && chance.next() * length < 1.0 {
                            level = chance.factor(depth, 0.0);
                        }
                        let costs = [STAGED, STAGED * ratio].map(|cost| cost * level * chance.factor(spread, outliers));
                        let (_, path) = call(&choice, class(), costs);
                        if number >= 100 {
                            taken += level * [1.0, ratio][path as usize];
                            better += level * ratio.min(1.0);
                        }
                    }
                    let excess = taken / better;
                    let kind = format!("spread {spread}, outliers {outliers}, phases {depth} of {length}");
                    assert!(excess <= 1.05, "ratio {ratio}, {kind}, seed {seed}: {excess}");
                }
            }
        }
    }

    #[test]
    fn calls_that_are_slow_after_the_other_path_mislead_nobody() {
        for ratio in RATIOS {
            for (slow, spread) in [(1.35, 0.0), (1.35, 0.2), (1.35, 0.5), (2.0, 0.2)] {
                let (choice, mut chance) = (Choice::new(), Chance(0x9E37_79B9));
                let (mut taken, mut former) = (0.0, None);
                let (begin, end) = (100, 5_000);
                for number in 0..end {
                    let Pick { path, is_measured } = choice.pick(class());
                    let level = [1.0, ratio][path as usize] * if former.replace(path) == Some(path.other()) { slow } else { 1.0 };
                    if is_measured {
                        choice.record(class(), path, MIB, time(STAGED * level * chance.factor(spread, 0.02)));
                    }
                    taken += if number >= begin { level } else { 0.0 };
                }
                let excess = taken / (f64::from(end - begin) * ratio.min(1.0));
                assert!(excess <= 1.05, "ratio {ratio}, {slow} times as long, spread {spread}: {excess}");
            }
        }
    }

    #[test]
    fn trying_the_other_path_costs_no_more_than_1_percent() {
        for ratio in [1.01, 1.5, 3.0, 30.0, 1000.0] {
            let choice = Choice::new();
            let calls = 20_000;
            let taken: f64 = (0..calls).map(|_| call(&choice, class(), [STAGED, STAGED * ratio]).0).sum();
            let excess = taken - STAGED * f64::from(calls);
            // Beside the trials of the warm-up.
            let first = f64::from(WARM_UP) * (ratio.min(FAR) - 1.0) + (ratio - 1.0);
            assert!(excess <= taken * BUDGET + STAGED * first, "{ratio}: {}", excess / STAGED);
        }
    }

    #[test]
    fn costs_that_change_are_noticed_in_time() {
        for (before, after) in [(0.3, 3.0), (3.0, 0.3), (1.1, 0.9), (0.9, 1.1), (3.0, 0.9), (10.0, 0.5)] {
            for calls in [20, 1_000, 3_456] {
                let choice = Choice::new();
                let mut chance = Chance(calls);
                for _ in 0..calls {
                    call(&choice, class(), [STAGED, STAGED * before].map(|cost| cost * chance.factor(0.02, 0.0)));
                }
                let better = if after < 1.0 { Path::Direct } else { Path::Staged };
                let bound = (220.0 * (before.max(1.0 / before) - 1.0)) as usize + SPACING as usize + 2 * LATELY;
                let mut noticed = |costs: [f64; 2]| {
                    (0..bound).map(|_| call(&choice, class(), costs.map(|cost| cost * chance.factor(0.02, 0.0))).1).last()
                };
                // What changes is the path that is not taken, which is the harder one to see.
                let costs = if before < 1.0 { [STAGED * before / after, STAGED * before] } else { [STAGED, STAGED * after] };
                noticed(costs);
                let picked: Vec<_> = (0..10).map(|_| call(&choice, class(), costs).1).filter(|path| *path == better).collect();
                assert!(picked.len() >= 8, "{before} to {after} after {calls} calls: {}", picked.len());
            }
        }
    }

    #[test]
    fn a_path_that_becomes_slow_is_left_soon() {
        let choice = Choice::new();
        (0..200).for_each(|_| _ = call(&choice, class(), [STAGED, STAGED * 1.5]));
        let slow: Vec<_> = (0..20).map(|_| call(&choice, class(), [STAGED * 4.0, STAGED * 1.5]).1).collect();
        let staged = slow.iter().filter(|path| **path == Path::Staged).count();
        // One more that follows on a trial, and is not measured.
        assert!(staged <= LATELY.div_ceil(2) + usize::from(WARM_UP) + 1, "{slow:?}");
    }

    #[test]
    fn classes_do_not_disturb_each_other() {
        let choice = Choice::new();
        let (small, large) = (Class::new(Direction::Put, 4096, 4096, 1), Class::new(Direction::Put, 1 << 30, 1 << 30, 1));
        let other_direction = Class::new(Direction::Get, 4096, 4096, 1);
        let mut direct = [0; 3];
        for _ in 0..1_000 {
            for (at, (class, ratio)) in [(small, 2.0), (large, 0.5), (other_direction, 0.5)].into_iter().enumerate() {
                direct[at] += usize::from(call(&choice, class, [STAGED, STAGED * ratio]).1 == Path::Direct);
            }
        }
        assert!(direct[0] <= 20 && direct[1] >= 980 && direct[2] >= 980, "{direct:?}");
    }

    #[test]
    fn the_first_guess_is_that_of_the_nearest_class_or_staging() {
        let choice = Choice::new();
        let known = Class::new(Direction::Put, 64 << 10, MIB, 4);
        assert_eq!(choice.pick(known).path, Path::Staged);
        choice.record(known, Path::Staged, MIB, time(STAGED));
        let near = Class::new(Direction::Put, 64 << 10, 2 * MIB, 4);
        assert_eq!(choice.pick(near).path, Path::Staged, "one path alone says nothing");
        choice.record(known, Path::Direct, MIB, time(STAGED / 2.0));
        for (class, path) in [
            (Class::new(Direction::Put, 128 << 10, 2 * MIB, 4), Path::Direct),
            (Class::new(Direction::Put, 64 << 10, MIB, 8), Path::Direct),
            (Class::new(Direction::Get, 64 << 10, MIB, 4), Path::Staged),
            (Class::new(Direction::Put, 4 << 10, 4 << 10, 4), Path::Staged),
        ] {
            assert_eq!(choice.pick(class).path, path, "{class:?}");
        }
        // A class with as many devices is nearer than one with as long items.
        let few = Class::new(Direction::Put, 256 << 10, MIB, 8);
        choice.record(few, Path::Staged, MIB, time(STAGED));
        choice.record(few, Path::Direct, MIB, time(STAGED * 2.0));
        assert_eq!(choice.pick(Class::new(Direction::Put, 32 << 10, MIB, 8)).path, Path::Staged);
    }

    #[test]
    fn short_calls_are_measured_once_in_a_while_when_their_class_is_settled() {
        let measured = |staged: f64, direct: f64| {
            let choice = Choice::new();
            let mut measured = 0;
            for number in 0..1_000 {
                let Pick { path, is_measured } = choice.pick(class());
                if is_measured {
                    choice.record(class(), path, MIB, time([staged, direct][path as usize]));
                }
                measured += usize::from(is_measured && number >= 200);
            }
            (measured, choice.pick(class()).path)
        };
        let (few, path) = measured(SHORT / 10.0, SHORT / 2.0);
        assert!((80..=140).contains(&few) && path == Path::Staged, "{few} {path:?}");
        // But for those that follow on the other path.
        let (nearly_all, _) = measured(SHORT * 2.0, SHORT * 4.0);
        assert!((780..=800).contains(&nearly_all), "{nearly_all}");
    }

    #[test]
    fn a_short_path_that_becomes_slow_is_left_soon() {
        let choice = Choice::new();
        let mut slow = 0;
        for number in 0..400 {
            let costs = if number < 200 { [2_000.0, 3_000.0] } else { [8_000.0, 3_000.0] };
            let Pick { path, is_measured } = choice.pick(class());
            if is_measured {
                choice.record(class(), path, MIB, time(costs[path as usize]));
            }
            slow += usize::from(number >= 200 && path == Path::Staged);
        }
        assert!(slow <= (LATELY.div_ceil(2) + 1) * ONE_IN as usize + usize::from(WARM_UP), "{slow}");
    }

    /// What fails is not recorded.
    #[test]
    fn a_path_that_always_fails_is_tried_rarely() {
        let choice = Choice::new();
        let mut failed = 0;
        for _ in 0..10_000 {
            match choice.pick(class()).path {
                Path::Staged => choice.record(class(), Path::Staged, MIB, time(STAGED)),
                Path::Direct => failed += 1,
            }
        }
        assert!((2..=20).contains(&failed), "{failed}");
    }

    #[test]
    fn the_classes_used_lately_are_kept_and_no_more() {
        let choice = Choice::new();
        for _ in 0..10 {
            call(&choice, class(), [STAGED, STAGED / 2.0]);
        }
        for devices in 100..100 + 4 * CLASSES {
            choice.record(Class::new(Direction::Get, 1, 1, devices), Path::Staged, 1, time(1.0));
            assert_eq!(choice.pick(class()).path, Path::Direct);
        }
        assert_eq!(choice.known.lock().classes.len(), CLASSES);
    }

    #[test]
    fn threads_share_what_they_learn() {
        let (choice, direct) = (Choice::new(), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..1_000 {
                        let (_, path) = call(&choice, class(), [STAGED, STAGED / 2.0]);
                        direct.fetch_add(usize::from(path == Path::Direct), Ordering::Relaxed);
                    }
                });
            }
        });
        // 1 % of the time for trials that cost as much again, and the first ones.
        let staged = 8_000 - direct.load(Ordering::Relaxed);
        assert!(staged <= 200, "{staged}");
    }

    proptest! {
        /// Whatever is picked and recorded, in any order: the path that is not best is picked within its budget.
        #[test]
        fn any_order_of_picks_and_records_keeps_within_the_budget(
            steps in proptest::collection::vec((any::<bool>(), any::<bool>(), 0_u64..=u64::MAX, 0_u64..=u64::MAX), 0..300),
        ) {
            let choice = Choice::new();
            for (picks, is_staged, bytes, spent) in steps {
                let class = Class::new(Direction::Get, bytes, bytes, spent as usize);
                match (picks, is_staged) {
                    (true, _) => _ = choice.pick(class),
                    (false, true) => choice.record(class, Path::Staged, bytes, Duration::from_nanos(spent)),
                    (false, false) => choice.record(class, Path::Direct, bytes, Duration::MAX),
                }
            }
            let known = choice.known.lock();
            prop_assert!(known.classes.len() <= CLASSES);
            for experience in known.classes.values() {
                prop_assert!(!experience.credit.is_nan());
                prop_assert!(experience.costs.iter().all(|cost| cost.median().is_none_or(|median| median >= 0.0)));
            }
        }

        #[test]
        fn the_median_is_one_of_the_last_with_as_many_on_either_side(costs in proptest::collection::vec(0_u16..20, 1..40)) {
            let mut cost = Cost::NOTHING;
            costs.iter().for_each(|value| cost.add((*value).into()));
            let recent = &costs[costs.len().saturating_sub(LATELY)..];
            let median = cost.median().unwrap();
            let below = recent.iter().filter(|value| f64::from(**value) < median).count();
            let above = recent.iter().filter(|value| f64::from(**value) > median).count();
            prop_assert!(below <= (recent.len() - 1) / 2 && above <= recent.len() / 2, "{recent:?}: {median}");
            prop_assert_eq!(cost.last(), costs.last().map(|value| f64::from(*value)));
        }
    }
}
