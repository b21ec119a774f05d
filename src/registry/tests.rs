//! The registry against a naive model, and under threads.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use proptest::prelude::*;

use super::index::fake_range;
use super::*;
use crate::telemetry::tests::hear;

/// Less where each step is interpreted.
fn count(full: usize, under_miri: usize) -> usize {
    if cfg!(miri) { under_miri } else { full }
}

fn options(location: &str) -> RegionOptions {
    RegionOptions { location: location.into(), remote_accessible: true, counted: false, owner: Owner::Program }
}

fn counted() -> RegionOptions {
    RegionOptions { counted: true, ..options("*") }
}

fn register(registry: &Registry, address: u64, length: u64) -> Arc<Region> {
    match registry.reserve(fake_range(address, length), &options("*")).unwrap() {
        Reservation::New(region) => {
            registry.commit(std::slice::from_ref(&region));
            region
        }
        Reservation::Counted(region) => region,
    }
}

fn start_drain(registry: &Registry, address: u64) -> Arc<Region> {
    match registry.start_drain(address).unwrap() {
        Removal::Last(region) => region,
        Removal::Counted => panic!("other references remain"),
    }
}

fn unregister(registry: &Registry, address: u64) {
    let region = start_drain(registry, address);
    assert!(registry.drain(&region, Duration::from_secs(30)));
    registry.finish(&region);
}

#[test]
fn what_a_put_or_get_waits_for_is_no_line_in_the_log() {
    let registry = Registry::new();
    let reserve = |owner| registry.reserve_batch(&[fake_range(100, 10)], &RegionOptions { owner, ..options("*") });
    let refusals = || {
        [Owner::Call, Owner::Program].map(|owner| {
            let mut code = None;
            let lines = hear(|| code = reserve(owner).err().map(|error| error.code()));
            (code.unwrap(), !lines.is_empty())
        })
    };
    let (waited_for, in_the_way) = ((Code::BatchBusy, false), (Code::AddressOverlapped, true));
    let Ok(Reservation::New(region)) = registry.reserve(fake_range(105, 10), &options("*")) else { panic!("not reserved") };
    assert_eq!(refusals(), [waited_for, in_the_way], "reserved");
    registry.commit(std::slice::from_ref(&region));
    assert_eq!(refusals(), [waited_for, in_the_way], "live");
    let region = start_drain(&registry, 105);
    assert_eq!(refusals(), [waited_for, in_the_way], "draining");
    // That may last.
    registry.give_up_drain(&region);
    assert_eq!(refusals(), [in_the_way, in_the_way], "given up");
}

fn refusal(registry: &Registry, address: u64, length: u64) -> Error {
    registry.reserve(fake_range(address, length), &options("*")).err().expect("registered")
}

fn encode(region: &Region, text: &mut String) {
    text.push_str(&region.sequence().to_string());
}

/// What is published, as sequence numbers.
fn published(registry: &Registry) -> Vec<u64> {
    let pieces = registry.published(&encode);
    pieces.iter().flat_map(|piece| piece.split(',').map(|number| number.parse().unwrap())).collect()
}

fn check(registry: &Registry) {
    let changes = registry.changes.lock();
    changes.index.check();
    changes.published.check();
}

/// Lets the collector run until a condition holds.
fn collect_until(condition: impl Fn() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < Duration::from_secs(60), "something was not given back");
        crossbeam_epoch::pin().flush();
        std::thread::yield_now();
    }
}

mod model {
    //! Random operations on a registry and on a plain list of regions, which must agree on everything.

    use super::*;

    #[derive(Clone, Copy, PartialEq, Debug)]
    enum Life {
        Reserved,
        Live,
        GivenUp,
        Quarantined,
    }

    struct Known {
        region: Arc<Region>,
        start: u128,
        end: u128,
        options: RegionOptions,
        life: Life,
        references: usize,
        guards: usize,
    }

    /// An operation, in numbers that are scaled to what is there.
    pub type Step = (u8, u16, u16);

    pub struct Model {
        registry: Registry,
        known: Vec<Known>,
        guards: Vec<Guards>,
        /// The addresses in play end with the address space or begin low.
        base: u64,
    }

    const SPACE: u64 = 1024;

    impl Model {
        pub fn new(leaf: usize, block: usize, base: u64) -> Model {
            Model { registry: Registry::with_capacities(leaf, block), known: Vec::new(), guards: Vec::new(), base }
        }

        pub fn at_the_end_of_the_address_space() -> u64 {
            u64::MAX - SPACE + 1
        }

        fn span(&self, a: u16, b: u16, longest: u64) -> MemoryRange {
            let offset = u64::from(a) % SPACE;
            fake_range(self.base + offset, 1 + (u64::from(b) % longest).min(SPACE - offset - 1))
        }

        fn owner(&self, address: u64) -> Option<&Known> {
            self.known.iter().find(|known| (known.start..known.end).contains(&u128::from(address)))
        }

        fn blocks(&self, range: MemoryRange) -> bool {
            self.known.iter().any(|known| known.start < range.end() && u128::from(range.address()) < known.end)
        }

        fn know(&mut self, region: &Arc<Region>, options: &RegionOptions, life: Life) {
            let range = region.range();
            let (start, end) = (range.address().into(), range.end());
            let options = options.clone();
            self.known.push(Known { region: region.clone(), start, end, options, life, references: 1, guards: 0 });
        }

        fn pick(&self, life: Option<Life>, number: u16) -> Option<usize> {
            let fit = |known: &Known| life.is_none_or(|life| known.life == life);
            let all: Vec<usize> = (0..self.known.len()).filter(|at| fit(&self.known[*at])).collect();
            (!all.is_empty()).then(|| all[usize::from(number) % all.len()])
        }

        pub fn step(&mut self, (kind, a, b): Step) {
            match kind % 20 {
                0..=5 => self.reserve(a, b, kind % 20 > 0),
                6 => self.reserve_again(a),
                7 => self.reserve_batch(a, b),
                8 => self.end_reservation(a, b),
                9..=12 => self.unregister_known(a),
                13 => self.unregister_any(a),
                14..=16 => self.acquire(a, b),
                17 => {
                    if !self.guards.is_empty() {
                        let guards = self.guards.swap_remove(usize::from(a) % self.guards.len());
                        for guard in guards.iter() {
                            let known = self.known.iter_mut().find(|known| Arc::ptr_eq(&known.region, guard.region()));
                            known.expect("a guarded region is gone").guards -= 1;
                        }
                    }
                }
                18 => self.find_borders(a),
                _ => self.compare_published(),
            }
            assert_eq!(self.registry.len(), self.known.len());
        }

        fn choose_options(a: u16, b: u16) -> RegionOptions {
            RegionOptions {
                location: if b.is_multiple_of(3) { "cpu:0" } else { "*" }.into(),
                remote_accessible: !a.is_multiple_of(5),
                counted: b.is_multiple_of(2),
                owner: Owner::Program,
            }
        }

        fn reserve(&mut self, a: u16, b: u16, commit: bool) {
            let (range, options) = (self.span(a, b / 8, 12), Self::choose_options(b, a));
            match self.registry.reserve(range, &options) {
                Ok(Reservation::New(region)) => {
                    assert!(!self.blocks(range));
                    if commit {
                        self.registry.commit(std::slice::from_ref(&region));
                    }
                    self.know(&region, &options, if commit { Life::Live } else { Life::Reserved });
                }
                Ok(Reservation::Counted(region)) => self.count(range, &options, &region),
                Err(error) => {
                    assert_eq!(error.code(), Code::AddressOverlapped);
                    assert!(self.blocks(range), "{error}");
                }
            }
        }

        fn count(&mut self, range: MemoryRange, options: &RegionOptions, region: &Arc<Region>) {
            let known = self.known.iter_mut().find(|known| Arc::ptr_eq(&known.region, region)).unwrap();
            assert!(known.region.range() == range && known.options == *options && options.counted && known.life == Life::Live);
            known.references += 1;
        }

        /// The very same registration again.
        fn reserve_again(&mut self, a: u16) {
            let Some(at) = self.pick(None, a) else { return };
            let (range, options) = (self.known[at].region.range(), self.known[at].options.clone());
            let countable = options.counted && self.known[at].life == Life::Live;
            match self.registry.reserve(range, &options) {
                Ok(Reservation::Counted(region)) => self.count(range, &options, &region),
                Ok(Reservation::New(_)) => panic!("a blocked range was reserved"),
                Err(error) => assert!(!countable && error.code() == Code::AddressOverlapped),
            }
        }

        fn reserve_batch(&mut self, a: u16, b: u16) {
            let ranges: Vec<_> =
                (0..1 + b % 5).map(|at| self.span(a.wrapping_add(at.wrapping_mul(b)), b.wrapping_add(at), 8)).collect();
            let options = RegionOptions { counted: false, ..Self::choose_options(a, b) };
            let inside = ranges.iter().enumerate().any(|(at, range)| ranges[..at].iter().any(|other| other.intersects(range)));
            let clash = inside || ranges.iter().any(|range| self.blocks(*range));
            match self.registry.reserve_batch(&ranges, &options) {
                Ok(reservations) => {
                    assert!(!clash && reservations.len() == ranges.len());
                    for (reservation, range) in reservations.iter().zip(&ranges) {
                        let Reservation::New(region) = reservation else { panic!("counted") };
                        assert_eq!(region.range(), *range);
                        self.know(region, &options, Life::Live);
                        self.registry.commit(std::slice::from_ref(region));
                    }
                }
                Err(error) => assert!(clash && error.code() == Code::AddressOverlapped),
            }
        }

        fn end_reservation(&mut self, a: u16, b: u16) {
            let Some(at) = self.pick(Some(Life::Reserved), a) else { return };
            let region = self.known[at].region.clone();
            let quarantined = self.known.iter().filter(|known| known.life == Life::Quarantined).count();
            match b % 8 {
                0..=4 => {
                    self.registry.commit(&[region]);
                    self.known[at].life = Life::Live;
                }
                5 if quarantined < 5 => {
                    self.registry.quarantine(&region);
                    self.known[at].life = Life::Quarantined;
                }
                _ => {
                    self.registry.abandon(&[region]);
                    self.known.swap_remove(at);
                }
            }
        }

        fn unregister_known(&mut self, a: u16) {
            if let Some(at) = self.pick(None, a) {
                self.unregister(self.known[at].region.range().address());
            }
        }

        fn unregister_any(&mut self, a: u16) {
            self.unregister(self.base + u64::from(a) % SPACE);
        }

        fn unregister(&mut self, address: u64) {
            let at = self.known.iter().position(|known| known.start == u128::from(address));
            let is_removable = |known: &Known| matches!(known.life, Life::Live | Life::GivenUp);
            let Some(at) = at.filter(|at| is_removable(&self.known[*at])) else {
                let error = self.registry.start_drain(address).err().expect("unregistered what is not registered");
                assert_eq!(error.code(), Code::AddressNotRegistered);
                let is_interior = self.owner(address).is_some_and(|known| known.start != u128::from(address));
                assert_eq!(error.message().contains("lies inside the region"), is_interior, "{error}");
                return;
            };
            match self.registry.start_drain(address).unwrap() {
                Removal::Counted => {
                    self.known[at].references -= 1;
                    assert!(self.known[at].references > 0);
                }
                Removal::Last(region) => {
                    assert_eq!(self.known[at].references, 1);
                    assert_eq!(self.registry.start_drain(address).err().unwrap().code(), Code::BatchBusy);
                    let drained = self.registry.drain(&region, Duration::ZERO);
                    assert_eq!(drained, self.known[at].guards == 0);
                    if drained {
                        self.registry.finish(&region);
                        assert!(!region.is_live());
                        self.known.swap_remove(at);
                    } else {
                        self.registry.give_up_drain(&region);
                        self.known[at].life = Life::GivenUp;
                    }
                }
            }
        }

        fn acquire(&mut self, a: u16, b: u16) {
            let address = self.base + u64::from(a) % SPACE;
            let length = u64::from(b / 4) % 40;
            let access = if b.is_multiple_of(2) { Access::Local } else { Access::Remote };
            let mut expected = Ok(Vec::new());
            let mut reached = u128::from(address);
            while expected.as_ref().is_ok_and(|found: &Vec<usize>| found.is_empty())
                || reached < u128::from(address) + u128::from(length)
            {
                let next = self.known.iter().position(|known| (known.start..known.end).contains(&reached));
                let refused = match next.map(|at| &self.known[at]) {
                    None => Some(Refusal::NotRegistered),
                    Some(known) if access == Access::Remote && !known.options.remote_accessible => Some(Refusal::NotAccessible),
                    Some(known) if known.life == Life::GivenUp => Some(Refusal::Draining),
                    Some(known) if known.life != Life::Live => Some(Refusal::NotRegistered),
                    Some(_) => None,
                };
                if let Some(refused) = refused {
                    expected = Err(refused);
                    break;
                }
                let next = next.unwrap();
                reached = self.known[next].end;
                expected.as_mut().unwrap().push(next);
            }
            let acquired = self.registry.read(|view| view.acquire(address, length, access));
            match (acquired, expected) {
                (Err(refused), Err(expected)) => assert_eq!(refused, expected),
                (Ok(guards), Ok(expected)) => {
                    assert_eq!(guards.len(), expected.len());
                    for (guard, at) in guards.iter().zip(&expected) {
                        assert!(Arc::ptr_eq(guard.region(), &self.known[*at].region));
                        self.known[*at].guards += 1;
                    }
                    let range = guards.range(address, length).expect("covered");
                    assert_eq!((range.address(), range.length()), (address, length));
                    let (start, end) = (self.known[expected[0]].start, self.known[*expected.last().unwrap()].end);
                    assert!(guards.range(address, (end - u128::from(address)) as u64).is_some());
                    if end <= u128::from(u64::MAX) {
                        assert!(guards.range(address, (end - u128::from(address)) as u64 + 1).is_none());
                    }
                    if start > 0 {
                        assert!(guards.range(start as u64 - 1, 1).is_none());
                    }
                    self.guards.push(guards);
                }
                (acquired, expected) => panic!("acquired {:?}, expected {expected:?}", acquired.map(|guards| guards.len())),
            }
        }

        fn find_borders(&mut self, a: u16) {
            let Some(at) = self.pick(None, a) else { return };
            let (start, last) = (self.known[at].start as u64, (self.known[at].end - 1) as u64);
            let addresses =
                [start - 1, start, last, last.wrapping_add(1), start + (last - start) / 2, self.base + u64::from(a) % SPACE];
            self.registry.read(|view| addresses.iter().for_each(|address| self.compare(view, *address)));
        }

        fn compare(&self, view: &View<'_>, address: u64) {
            let found = view.find(address).map(std::ptr::from_ref);
            assert_eq!(found, self.owner(address).map(|known| Arc::as_ptr(&known.region)), "{address:#x}");
        }

        pub fn compare_all(&self) {
            check(&self.registry);
            let compare =
                || self.registry.read(|view| (0..SPACE).step_by(count(1, 29)).for_each(|at| self.compare(view, self.base + at)));
            compare();
            // A writer that stopped amid a change holds up nobody.
            self.registry.changes.lock().index.mark_changing(true);
            compare();
            self.registry.changes.lock().index.mark_changing(false);
        }

        fn compare_published(&self) {
            let live = self.known.iter().filter(|known| known.life == Life::Live);
            let mut expected: Vec<u64> = live.map(|known| known.region.sequence()).collect();
            expected.sort();
            assert_eq!(published(&self.registry), expected);
            assert!(self.registry.live().iter().map(|region| region.sequence()).eq(expected));
        }
    }
}

use model::Model;

/// The same numbers in each run (splitmix64).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

fn agree_with_the_model(leaf: usize, block: usize, base: u64, seed: u64) {
    let mut model = Model::new(leaf, block, base);
    let mut numbers = Numbers(seed);
    for round in 0..count(100_000, 150) {
        let number = numbers.next();
        model.step((number as u8, (number >> 16) as u16, (number >> 32) as u16));
        if round % count(500, 150) == 0 {
            model.compare_all();
        }
    }
    model.compare_all();
}

#[test]
fn agrees_with_the_model_with_leaves_of_4() {
    agree_with_the_model(4, 4, 4096, 1);
    agree_with_the_model(4, 8, Model::at_the_end_of_the_address_space(), 2);
}

#[test]
fn agrees_with_the_model_with_leaves_of_8() {
    agree_with_the_model(8, 4, Model::at_the_end_of_the_address_space(), 3);
    agree_with_the_model(8, 8, 1, 4);
}

#[test]
fn agrees_with_the_model_with_real_leaves() {
    agree_with_the_model(LEAF_CAPACITY, BLOCK_CAPACITY, Model::at_the_end_of_the_address_space(), 5);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 2 } else { 300 }, failure_persistence: None, ..ProptestConfig::default() })]

    /// As above; short runs, so that a failure shrinks to a few steps.
    #[test]
    fn agrees_with_the_model_in_short_runs(steps in prop::collection::vec(any::<model::Step>(), 0..count(150, 40)), leaf in 2usize..9) {
        let mut model = Model::new(leaf, leaf, 4096);
        for step in steps {
            model.step(step);
        }
        model.compare_all();
    }
}

#[test]
fn a_separator_inside_a_region_of_the_leaf_before_hides_nothing() {
    let registry = Registry::with_capacities(4, 4);
    for at in 1..=5 {
        register(&registry, at * 100, 10);
    }
    // The second leaf begins at one of these; then the leaf before gets a region that reaches across that border.
    for at in 3..=4 {
        unregister(&registry, at * 100);
    }
    register(&registry, 290, 150);
    check(&registry);
    for address in [290, 300, 350, 400, 439] {
        registry.read(|view| assert_eq!(view.find(address).unwrap().range().address(), 290));
    }
    registry.read(|view| assert!(view.find(440).is_none() && view.find(289).is_none() && view.find(500).is_some()));
}

#[test]
fn null_and_empty_ranges_are_invalid() {
    let registry = Registry::new();
    for (address, length) in [(0, 1), (0, 0), (0x1000, 0), (u64::MAX, 0)] {
        assert_eq!(refusal(&registry, address, length).code(), Code::InvalidArgument);
        let batch = [fake_range(0x5000, 1), fake_range(address, length)];
        let error = registry.reserve_batch(&batch, &options("*")).err().unwrap();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.message().contains("entry 1 of 2"), "{error}");
    }
    assert!(registry.is_empty());
    assert!(registry.reserve_batch(&[], &options("*")).unwrap().is_empty());
}

#[test]
fn a_region_may_end_exactly_at_the_end_of_the_address_space() {
    let registry = Registry::new();
    register(&registry, u64::MAX - 9, 10);
    register(&registry, u64::MAX - 19, 10);
    registry.read(|view| {
        assert_eq!(view.find(u64::MAX).unwrap().range().end(), 1 << 64);
        assert_eq!(view.acquire(u64::MAX - 19, 20, Access::Remote).unwrap().len(), 2);
        assert_eq!(view.acquire(u64::MAX - 19, 21, Access::Remote).err(), Some(Refusal::NotRegistered));
        assert_eq!(view.acquire(u64::MAX, u64::MAX, Access::Remote).err(), Some(Refusal::NotRegistered));
    });
    assert!(refusal(&registry, u64::MAX, 1).message().contains("0x10000000000000000"));
    unregister(&registry, u64::MAX - 9);
    register(&registry, u64::MAX, 1);
    unregister(&registry, u64::MAX);
}

#[test]
fn every_kind_of_overlap_names_what_it_collides_with_and_touching_is_fine() {
    let registry = Registry::new();
    register(&registry, 0x2000, 0x1000);
    for (address, length) in
        [(0x2000, 0x1000), (0x2400, 0x10), (0x1000, 0x3000), (0x1fff, 2), (0x2fff, 2), (1, u64::MAX), (0x2000, 1), (0x2000, 0x2000)]
    {
        let error = refusal(&registry, address, length);
        assert_eq!(error.code(), Code::AddressOverlapped);
        assert!(error.message().contains("[0x2000, 0x3000) (4096 bytes)"), "{error}");
        assert!(error.message().contains("unregister it first"), "{error}");
    }
    register(&registry, 0x1000, 0x1000);
    register(&registry, 0x3000, 0x1000);
    assert_eq!(registry.len(), 3);
}

#[test]
fn texts_say_what_blocks_the_range() {
    let registry = Registry::new();
    let Reservation::New(region) = registry.reserve(fake_range(0x1000, 16), &options("*")).unwrap() else { panic!() };
    assert!(refusal(&registry, 0x1000, 16).message().contains("another call is registering it"));
    assert!(registry.start_drain(0x1000).err().unwrap().message().contains("its registration has not ended"));
    registry.commit(&[region]);
    let guards = registry.read(|view| view.acquire(0x1000, 16, Access::Local)).unwrap();
    let region = start_drain(&registry, 0x1000);
    assert!(refusal(&registry, 0x1000, 16).message().contains("it is being unregistered"));
    let busy = registry.start_drain(0x1000).err().unwrap();
    assert_eq!(busy.code(), Code::BatchBusy);
    assert!(busy.message().contains("1 uses"), "{busy}");
    assert!(!registry.drain(&region, Duration::from_millis(1)));
    registry.give_up_drain(&region);
    assert!(refusal(&registry, 0x1000, 16).message().contains("unregister it again"));
    drop(guards);
    unregister(&registry, 0x1000);
    register(&registry, 0x1000, 16);
}

#[test]
fn unregistering_needs_the_exact_start_and_happens_once() {
    let registry = Registry::new();
    register(&registry, 0x1000, 0x100);
    let unknown = registry.start_drain(0x5000).err().unwrap();
    assert_eq!(unknown.code(), Code::AddressNotRegistered);
    let interior = registry.start_drain(0x1001).err().unwrap();
    assert_eq!(interior.code(), Code::AddressNotRegistered);
    assert!(interior.message().contains("[0x1000, 0x1100)"), "{interior}");
    assert_eq!(published(&registry), [0]);
    unregister(&registry, 0x1000);
    assert_eq!(registry.start_drain(0x1000).err().unwrap().code(), Code::AddressNotRegistered);
    assert!(registry.is_empty() && registry.published(&encode).is_empty());
}

#[test]
fn a_region_that_is_live_can_be_guarded() {
    let registry = Registry::new();
    let Reservation::New(region) = registry.reserve(fake_range(0x1000, 0x100), &options("*")).unwrap() else { panic!() };
    std::thread::scope(|scope| {
        let (registry, region) = (&registry, &region);
        scope.spawn(move || {
            pause_after_changing(Duration::from_millis(20));
            registry.commit(std::slice::from_ref(region));
        });
        while !region.is_live() {
            std::thread::yield_now();
        }
        let guards = registry.read(|view| view.acquire(0x1000, 0x100, Access::Local).map(drop));
        assert_eq!(guards, Ok(()));
    });
}

#[test]
fn a_quarantined_range_stays_blocked_and_says_why() {
    let registry = Registry::new();
    register(&registry, 0x1000, 0x100);
    let region = start_drain(&registry, 0x1000);
    registry.quarantine(&region);
    let Reservation::New(reserved) = registry.reserve(fake_range(0x2000, 0x100), &options("*")).unwrap() else { panic!() };
    registry.quarantine(&reserved);
    for start in [0x1000, 0x2000] {
        let error = refusal(&registry, start + 0x80, 1);
        assert_eq!(error.code(), Code::AddressOverlapped);
        assert!(error.message().contains("undoing an earlier registration or removal failed"), "{error}");
        let error = registry.start_drain(start).err().unwrap();
        assert_eq!(error.code(), Code::AddressNotRegistered);
        assert!(error.message().contains("quarantined"), "{error}");
        assert_eq!(registry.read(|view| view.acquire(start, 1, Access::Local).err()), Some(Refusal::NotRegistered));
    }
    assert_eq!(registry.len(), 2);
    assert!(registry.published(&encode).is_empty());
}

#[test]
fn duplicates_are_counted_only_if_both_ask_and_all_is_equal() {
    let registry = Registry::new();
    let range = fake_range(0x1000, 0x100);
    let Reservation::New(region) = registry.reserve(range, &counted()).unwrap() else { panic!() };
    assert!(registry.reserve(range, &counted()).is_err(), "its registration has not ended");
    registry.commit(std::slice::from_ref(&region));
    assert!(matches!(registry.reserve(range, &counted()).unwrap(), Reservation::Counted(again) if Arc::ptr_eq(&again, &region)));
    let others = [
        RegionOptions { counted: false, ..counted() },
        RegionOptions { location: "cpu:0".into(), ..counted() },
        RegionOptions { remote_accessible: false, ..counted() },
    ];
    for options in others {
        assert_eq!(registry.reserve(range, &options).err().unwrap().code(), Code::AddressOverlapped);
    }
    assert!(registry.reserve(fake_range(0x1000, 0xff), &counted()).is_err());
    assert!(matches!(registry.start_drain(0x1000).unwrap(), Removal::Counted));
    assert!(region.is_live());
    assert_eq!(published(&registry), [0]);
    unregister(&registry, 0x1000);
    assert!(registry.is_empty());
}

#[test]
fn a_batch_is_reserved_whole_or_not_at_all() {
    let registry = Registry::new();
    let Reservation::New(region) = registry.reserve(fake_range(0x9000, 0x100), &counted()).unwrap() else { panic!() };
    registry.commit(&[region]);
    let fresh = |count: u64| (1..=count).map(|at| fake_range(at * 0x100, 0x100)).collect::<Vec<_>>();

    let mut ranges = fresh(20);
    ranges.insert(0, fake_range(0x9000, 0x100));
    ranges.push(fake_range(0x9080, 0x100));
    let error = registry.reserve_batch(&ranges, &counted()).err().unwrap();
    assert_eq!(error.code(), Code::AddressOverlapped);
    assert!(error.message().contains("entry 21 of 22") && error.message().contains("[0x9000, 0x9100)"), "{error}");
    assert_eq!(registry.len(), 1);
    assert!(registry.read(|view| view.find(0x100).is_none()));

    let mut ranges = fresh(20);
    ranges.push(fake_range(0x300, 1));
    let error = registry.reserve_batch(&ranges, &counted()).err().unwrap();
    assert_eq!(error.code(), Code::AddressOverlapped);
    assert!(error.message().contains("entry 2 of the same call"), "{error}");
    assert_eq!(registry.len(), 1);

    // The reference that the first attempt counted was given back, so one removal is enough.
    unregister(&registry, 0x9000);
    let reservations = registry.reserve_batch(&fresh(20), &options("*")).unwrap();
    let new = |reservation| match reservation {
        Reservation::New(region) => region,
        Reservation::Counted(_) => panic!("counted"),
    };
    let regions: Vec<_> = reservations.into_iter().map(new).collect();
    assert!(regions.iter().zip(fresh(20)).all(|(region, range)| region.range() == range));
    registry.abandon(&regions[..10]);
    registry.commit(&regions[10..]);
    assert_eq!(registry.len(), 10);
    assert_eq!(published(&registry).len(), 10);
}

#[test]
fn peers_get_no_guard_on_what_is_not_for_them() {
    let registry = Registry::new();
    register(&registry, 0x1000, 0x100);
    let private = RegionOptions { remote_accessible: false, ..options("*") };
    let Reservation::New(region) = registry.reserve(fake_range(0x1100, 0x100), &private).unwrap() else { panic!() };
    registry.commit(std::slice::from_ref(&region));
    registry.read(|view| {
        assert_eq!(view.acquire(0x1100, 1, Access::Remote).err(), Some(Refusal::NotAccessible));
        assert_eq!(view.acquire(0x1000, 0x101, Access::Remote).err(), Some(Refusal::NotAccessible));
        assert_eq!(view.acquire(0x1000, 0x101, Access::Local).unwrap().len(), 2);
        assert!(view.acquire(0x1000, 0x100, Access::Remote).is_ok());
    });
    assert_eq!(region.in_flight(), 0, "guards of a refused range were kept");
}

#[test]
fn guards_hold_up_the_drain_and_refuse_newcomers() {
    let registry = Registry::new();
    register(&registry, 0x1000, 0x100);
    let guards = registry.read(|view| view.acquire(0x1010, 8, Access::Remote)).unwrap();
    let region = start_drain(&registry, 0x1000);
    assert_eq!(published(&registry).len(), 0, "still published while draining");
    assert_eq!(registry.read(|view| view.acquire(0x1010, 8, Access::Remote).err()), Some(Refusal::Draining));
    assert!(!registry.drain(&region, Duration::from_millis(1)));
    registry.give_up_drain(&region);
    assert_eq!(registry.read(|view| view.acquire(0x1010, 8, Access::Local).err()), Some(Refusal::Draining));
    let region = start_drain(&registry, 0x1000);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            drop(guards);
        });
        assert!(registry.drain(&region, Duration::from_secs(60)));
    });
    registry.finish(&region);
    assert_eq!(registry.read(|view| view.acquire(0x1010, 8, Access::Local).err()), Some(Refusal::NotRegistered));
}

#[test]
fn guards_outlive_the_registry() {
    let registry = Registry::new();
    register(&registry, 0x1000, 0x100);
    let guards = registry.read(|view| view.acquire(0x1000, 1, Access::Local)).unwrap();
    drop(registry);
    assert_eq!(guards[0].region().range().length(), 0x100);
}

#[test]
fn the_hint_of_a_view_sees_removals_and_new_registrations() {
    let registry = Registry::new();
    register(&registry, 0x1000, 0x100);
    registry.read(|view| {
        assert_eq!(view.find(0x1000).unwrap().sequence(), 0);
        unregister(&registry, 0x1000);
        assert!(view.find(0x1000).is_none());
        register(&registry, 0x0f80, 0x100);
        assert_eq!(view.find(0x1000).unwrap().sequence(), 1);
        assert!(view.find(0x1080).is_none());
    });
}

#[test]
fn shared_guards_are_taken_once_and_held_until_the_last_user_is_released() {
    let registry = Registry::new();
    let regions: Vec<_> = (1..=20).map(|at| register(&registry, at * 0x1000, 0x1000)).collect();
    let mut guards = SharedGuards::with_capacity(3 * 20 + 2);
    registry.read(|view| {
        // In order, again in order, and here and there; then across a border, and where nothing is.
        let order = (0..20).chain(0..20).chain((0..20).map(|at| at * 7 % 20));
        order.for_each(|at| view.share(fake_range((at + 1) * 0x1000, 0x100), &mut guards).unwrap());
        view.share(fake_range(0x1f00, 0x200), &mut guards).unwrap();
        view.share(fake_range(0x100, 0x100), &mut guards).unwrap();
    });
    assert_eq!(guards.len(), 20);
    assert!(regions.iter().all(|region| region.in_flight() == 1));
    assert_eq!(guards.region(40 + 3, 0x2010).map(Region::sequence), Some(1), "21 % 20");
    assert!(guards.region(40 + 3, 0x1010).is_none(), "not that user's");
    assert_eq!([0x1fff, 0x2000].map(|address| guards.region(60, address).map(Region::sequence)), [Some(0), Some(1)]);
    assert!(guards.region(61, 0x100).is_none());
    for (user, its) in [(3, &[3][..]), (40 + 3, &[1][..]), (60, &[0, 1][..]), (61, &[][..])] {
        let found: Vec<usize> = (0..20).filter(|at| guards.is_in(user, Arc::as_ptr(&regions[*at]))).collect();
        assert_eq!(found, its, "of user {user}");
    }
    (0..60).for_each(|user| guards.release(user));
    let held: Vec<_> = regions.iter().filter(|region| region.in_flight() == 1).map(|region| region.sequence()).collect();
    assert_eq!(held, [0, 1]);
    guards.release(60);
    assert!(regions.iter().all(|region| region.in_flight() == 0));
}

#[test]
fn shared_guards_that_are_dropped_give_back_what_has_users() {
    let registry = Registry::new();
    let (first, second) = (register(&registry, 0x1000, 0x100), register(&registry, 0x2000, 0x100));
    let mut guards = SharedGuards::default();
    registry.read(|view| {
        view.share(fake_range(0x1000, 0x100), &mut guards).unwrap();
        view.share(fake_range(0x2000, 0x100), &mut guards).unwrap();
        start_drain(&registry, 0x2000);
        view.share(fake_range(0x2000, 0x10), &mut guards).expect("guarded already");
        let mut others = SharedGuards::default();
        assert_eq!(view.share(fake_range(0x2000, 0x10), &mut others), Err(Refusal::Draining));
    });
    guards.release(0);
    assert_eq!((first.in_flight(), second.in_flight()), (0, 1));
    drop(guards);
    assert_eq!((first.in_flight(), second.in_flight()), (0, 0));
}

#[test]
fn memory_that_took_the_place_of_other_memory_is_guarded() {
    let registry = Registry::new();
    register(&registry, 0x1000, 0x100);
    registry.read(|view| {
        let mut guards = SharedGuards::default();
        view.share(fake_range(0x1000, 0x100), &mut guards).unwrap();
        drop(guards);
        unregister(&registry, 0x1000);
        let region = register(&registry, 0x1000, 0x80);
        let mut guards = SharedGuards::default();
        view.share(fake_range(0x1000, 0x100), &mut guards).unwrap();
        assert_eq!((guards.len(), region.in_flight()), (1, 1));
    });
}

#[test]
#[cfg_attr(miri, ignore = "takes minutes there, and does nothing that other tests do not")]
fn coming_and_going_at_the_end_of_a_full_index_seldom_makes_a_top() {
    let registry = Registry::new();
    let regions = 4 * LEAF_CAPACITY as u64;
    (1..=regions).for_each(|at| drop(register(&registry, at * 0x1000, 0x1000)));
    let mut tops = Vec::new();
    // While this reads, no address is used again.
    registry.read(|_| {
        for _ in 0..100 {
            register(&registry, (regions + 1) * 0x1000, 0x1000);
            tops.push(registry.changes.lock().index.top_address());
            unregister(&registry, (regions + 1) * 0x1000);
            tops.push(registry.changes.lock().index.top_address());
            check(&registry);
        }
    });
    let made = tops.windows(2).filter(|pair| pair[0] != pair[1]).count();
    assert!(made <= tops.len() / 16, "{made} tops in {} calls", tops.len());
    // From the end, so that each leaf in turn is the last and is emptied.
    for at in (1..=regions).rev() {
        unregister(&registry, at * 0x1000);
        check(&registry);
    }
    assert!(registry.is_empty());
}

/// Whoever looks for each refused address among the others does not end within a test's patience.
#[test]
fn many_removals_at_once_that_are_refused_say_who_removes() {
    let registry = Registry::new();
    let regions = count(200_000, 20) as u64;
    let addresses: Vec<u64> = (1..=regions).map(|at| at * 0x1000).collect();
    addresses.iter().for_each(|address| drop(register(&registry, *address, 0x1000)));
    // Those of another call are busy; those of the same call are gone for whoever named them twice.
    let (theirs, ours) = addresses.split_at(addresses.len() / 2);
    assert!(registry.start_drain_batch(theirs).iter().all(|outcome| matches!(outcome, Ok(Removal::Last(_)))));
    let outcomes = registry.start_drain_batch(&[theirs, ours, ours].concat());
    let code = |outcome: &Result<Removal>| outcome.as_ref().err().map(Error::code);
    for (outcomes, expected) in outcomes.chunks(theirs.len()).zip([Some(Code::BatchBusy), None, Some(Code::AddressNotRegistered)]) {
        assert!(outcomes.iter().all(|outcome| code(outcome) == expected), "{expected:?}");
    }
}

#[test]
fn the_hint_of_a_view_outlives_no_split_or_merge_of_leaves() {
    let registry = Registry::with_capacities(4, 4);
    (1..=4).for_each(|at| drop(register(&registry, at * 0x1000, 0x10)));
    registry.read(|view| {
        let is_found = |address| view.find(address).is_some();
        // Filled up, so that the next registration splits the leaf.
        assert!(is_found(0x2000));
        register(&registry, 0x2800, 0x10);
        assert!(is_found(0x2000));
        unregister(&registry, 0x2000);
        assert!(!is_found(0x2000));
        // Of each half one region is left, and they merge.
        assert!(is_found(0x4000));
        [0x1000, 0x2800].iter().for_each(|start| unregister(&registry, *start));
        assert_eq!(registry.changes.lock().index.check(), 1);
        assert!(is_found(0x4000));
        unregister(&registry, 0x4000);
        assert!(!is_found(0x4000) && is_found(0x3000));
    });
}

#[test]
fn one_change_among_65536_encodes_one_block_anew() {
    let registry = Registry::new();
    let regions = count(65_536, 150) as u64;
    (1..=regions).for_each(|at| drop(register(&registry, at * 0x1000, 0x1000)));
    let encoded = AtomicUsize::new(0);
    let publish = || {
        encoded.store(0, Ordering::Relaxed);
        let pieces = registry.published(&|region, text| {
            encoded.fetch_add(1, Ordering::Relaxed);
            encode(region, text);
        });
        assert!(pieces.iter().all(|piece| !piece.is_empty()));
        (pieces.len(), encoded.load(Ordering::Relaxed))
    };
    let blocks = (regions as usize).div_ceil(BLOCK_CAPACITY);
    assert_eq!(publish(), (blocks, regions as usize));
    assert_eq!(publish(), (blocks, 0));
    register(&registry, (regions + 1) * 0x1000, 0x1000);
    assert!(publish().1 <= BLOCK_CAPACITY);
    unregister(&registry, 0x1000 * (regions / 2));
    assert_eq!(publish().1, BLOCK_CAPACITY - 1);
    assert_eq!(published(&registry).len() as u64, regions);
}

#[test]
fn thin_leaves_and_blocks_merge() {
    let registry = Registry::new();
    let regions = count(20_000, 200) as u64;
    (1..=regions).for_each(|at| drop(register(&registry, at * 0x1000, 0x1000)));
    (1..=regions).filter(|at| at % 20 != 0).for_each(|at| unregister(&registry, at * 0x1000));
    check(&registry);
    let left = (regions / 20) as usize;
    assert_eq!(registry.len(), left);
    let leaves = registry.changes.lock().index.check();
    assert!(leaves <= 8 * left / LEAF_CAPACITY + 2, "{leaves} leaves for {left} regions");
    let blocks = registry.published(&encode).len();
    assert!(blocks <= 8 * left / BLOCK_CAPACITY + 2, "{blocks} blocks for {left} regions");
    assert_eq!(published(&registry).len(), left);
}

#[test]
fn late_commits_are_published_in_the_order_of_registration() {
    let registry = Registry::with_capacities(4, 4);
    let reserve = |at: u64| match registry.reserve(fake_range(at * 16, 16), &options("*")).unwrap() {
        Reservation::New(region) => region,
        Reservation::Counted(_) => panic!(),
    };
    let regions: Vec<_> = (1..=count(100, 25) as u64).map(reserve).collect();
    let mut numbers = Numbers(9);
    let mut order: Vec<usize> = (0..regions.len()).collect();
    (1..order.len()).rev().for_each(|last| order.swap(last, numbers.below(last as u64 + 1) as usize));
    for at in order {
        registry.commit(&[regions[at].clone()]);
        check(&registry);
    }
    assert!(published(&registry).into_iter().eq(0..regions.len() as u64));
}

#[test]
fn equal_locations_share_one_text() {
    let registry = Registry::new();
    let regions: Vec<_> = (1..=50).map(|at| register(&registry, at * 16, 16)).collect();
    assert!(regions.iter().all(|region| Arc::ptr_eq(region.location(), regions[0].location())));
    // More than are remembered: still right.
    for at in 0..100 {
        let name = format!("cpu:{}", at % 40);
        let Reservation::New(region) = registry.reserve(fake_range(0x10000 + at, 1), &options(&name)).unwrap() else { panic!() };
        assert_eq!(&**region.location(), name);
    }
}

#[test]
fn nothing_is_leaked() {
    let location: Arc<str> = "cpu:0".into();
    let registered = RegionOptions { location: location.clone(), ..options("*") };
    let references = || Arc::strong_count(&location);
    let before = references();
    let registry = Registry::with_capacities(8, 8);
    for at in 1..=count(5_000, 100) as u64 {
        let Reservation::New(region) = registry.reserve(fake_range(at * 16, 16), &registered).unwrap() else { panic!() };
        registry.commit(&[region]);
        if at % 3 > 0 {
            unregister(&registry, at * 16);
        }
    }
    let left = registry.len();
    // One more is remembered by the registry.
    collect_until(|| references() == before + left + 1);
    drop(registry);
    assert_eq!(references(), before);
}

#[test]
#[cfg_attr(miri, ignore = "Miri refuses the futex call that parking_lot makes when a lock is contended")]
fn of_32_threads_that_reserve_one_range_one_wins_each_round() {
    let registry = Registry::new();
    for round in 0..50 {
        let winners = AtomicUsize::new(0);
        let barrier = std::sync::Barrier::new(32);
        std::thread::scope(|scope| {
            for thread in 0..32 {
                let (registry, winners, barrier) = (&registry, &winners, &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    // Not all the same, but all have a byte in common.
                    let range = fake_range(0x1000 - thread, 2 * thread + 1);
                    match registry.reserve(range, &options("*")) {
                        Ok(Reservation::New(region)) => {
                            winners.fetch_add(1, Ordering::Relaxed);
                            registry.commit(&[region]);
                        }
                        Ok(Reservation::Counted(_)) => panic!("counted"),
                        Err(error) => assert_eq!(error.code(), Code::AddressOverlapped),
                    }
                });
            }
        });
        assert_eq!(winners.load(Ordering::Relaxed), 1, "round {round}");
        assert_eq!(registry.len(), 1);
        let start = registry.live()[0].range().address();
        unregister(&registry, start);
    }
}

/// A place where one region after the other is registered, with what a reader may rely on.
#[derive(Default)]
struct Place {
    /// Sequence number + 1 of the last region whose registration has ended.
    registered: AtomicU64,
    /// Sequence number + 1 of the last region whose removal has begun.
    removing: AtomicU64,
    /// Sequence number + 1 of the last region whose removal has ended.
    removed: AtomicU64,
}

#[test]
fn readers_see_no_region_outside_of_its_life_and_miss_none_inside_of_it() {
    const PLACES: u64 = 24;
    let registry = Registry::with_capacities(4, 4);
    let places: Vec<Place> = (0..PLACES).map(|_| Place::default()).collect();
    let stop = AtomicBool::new(false);
    let hits = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..2u64)
            .map(|reader| {
                let (registry, places, stop, hits) = (&registry, &places, &stop, &hits);
                scope.spawn(move || {
                    let mut numbers = Numbers(100 + reader);
                    while !stop.load(Ordering::Relaxed) {
                        registry.read(|view| {
                            for _ in 0..16 {
                                let at = numbers.below(PLACES);
                                let place = &places[at as usize];
                                let removed = place.removed.load(Ordering::SeqCst);
                                let registered = place.registered.load(Ordering::SeqCst);
                                let address = 0x1000 + at * 32 + numbers.below(8);
                                if let Some(region) = view.find(address) {
                                    assert!(region.range().contains(address, 1));
                                    assert!(region.sequence() + 1 > removed, "found after its removal");
                                    hits.fetch_add(1, Ordering::Relaxed);
                                } else {
                                    let removing = place.removing.load(Ordering::SeqCst);
                                    assert!(registered <= removing, "not found though registered");
                                }
                                if let Ok(guards) = view.acquire(address, 1, Access::Remote) {
                                    let sequence = guards[0].region().sequence();
                                    assert!(place.removed.load(Ordering::SeqCst) < sequence + 1, "removed under a guard");
                                }
                            }
                        });
                    }
                })
            })
            .collect();
        // One under Miri: see the other tests with several writers.
        let writers: Vec<_> = (0..count(2, 1) as u64)
            .map(|writer| {
                let (registry, places, hits) = (&registry, &places, &hits);
                scope.spawn(move || {
                    let mut numbers = Numbers(200 + writer);
                    let mut round = 0;
                    while round < count(20_000, 60) || hits.load(Ordering::Relaxed) < count(1000, 5) {
                        round += 1;
                        // Each writer has its own places. The regions' starts vary, so that separators come to lie inside of them.
                        let at = numbers.below(PLACES / 2) * 2 + writer;
                        let place = &places[at as usize];
                        if place.registered.load(Ordering::SeqCst) > place.removed.load(Ordering::SeqCst) {
                            place.removing.store(place.registered.load(Ordering::SeqCst), Ordering::SeqCst);
                            let start = registry.read(|view| view.find(0x1000 + at * 32).unwrap().range().address());
                            unregister(registry, start);
                            place.removed.store(place.registered.load(Ordering::SeqCst), Ordering::SeqCst);
                        } else {
                            let region = register(registry, 0x1000 + at * 32 - numbers.below(8), 24);
                            place.registered.store(region.sequence() + 1, Ordering::SeqCst);
                        }
                    }
                })
            })
            .collect();
        let ended: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
        stop.store(true, Ordering::Relaxed);
        let ended: Vec<_> = ended.into_iter().chain(readers.into_iter().map(|reader| reader.join())).collect();
        assert!(ended.iter().all(|thread| thread.is_ok()));
    });
    check(&registry);
}

#[test]
fn bytes_move_only_while_the_region_is_registered() {
    let registry = Registry::new();
    let busy: Vec<AtomicUsize> = (0..4).map(|_| AtomicUsize::new(0)).collect();
    let stop = AtomicBool::new(false);
    let moved = AtomicUsize::new(0);
    let names: BTreeMap<u64, usize> = (0..4).map(|at| (0x1000 * (at as u64 + 1), at)).collect();
    std::thread::scope(|scope| {
        for seed in 0..3 {
            let (registry, busy, stop, moved, names) = (&registry, &busy, &stop, &moved, &names);
            scope.spawn(move || {
                let mut numbers = Numbers(seed);
                while !stop.load(Ordering::Relaxed) {
                    let address = 0x1000 + numbers.below(0x4000);
                    let Ok(guards) = registry.read(|view| view.acquire(address, 16, Access::Remote)) else { continue };
                    for guard in guards.iter() {
                        let busy = &busy[names[&guard.region().range().address()]];
                        busy.fetch_add(1, Ordering::SeqCst);
                        std::thread::yield_now();
                        busy.fetch_sub(1, Ordering::SeqCst);
                    }
                    moved.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let mut rounds = 0;
        while rounds < count(2_000, 10) || moved.load(Ordering::Relaxed) < count(100, 2) {
            rounds += 1;
            for (start, at) in &names {
                register(&registry, *start, 0x1000);
                std::thread::yield_now();
                if rounds % 2 == 0 || *at == 0 {
                    continue;
                }
                unregister(&registry, *start);
                assert_eq!(busy[*at].load(Ordering::SeqCst), 0, "bytes moved after the drain");
            }
            for region in registry.live() {
                let start = region.range().address();
                unregister(&registry, start);
                assert_eq!(busy[names[&start]].load(Ordering::SeqCst), 0, "bytes moved after the drain");
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
#[cfg_attr(miri, ignore = "Miri refuses the futex call that parking_lot makes when a lock is contended")]
fn two_threads_that_unregister_one_region_do_not_both_succeed() {
    let registry = Registry::new();
    for _ in 0..500 {
        register(&registry, 0x1000, 16);
        let removals = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| match registry.start_drain(0x1000) {
                    Ok(Removal::Last(region)) => {
                        removals.fetch_add(1, Ordering::Relaxed);
                        assert!(registry.drain(&region, Duration::from_secs(30)));
                        registry.finish(&region);
                    }
                    Ok(Removal::Counted) => panic!("not counted"),
                    Err(error) => assert!(matches!(error.code(), Code::BatchBusy | Code::AddressNotRegistered)),
                });
            }
        });
        assert_eq!(removals.load(Ordering::Relaxed), 1);
        assert!(registry.is_empty());
    }
}
