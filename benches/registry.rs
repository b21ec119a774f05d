//! What the registry costs, beside an ordered map and a plain list under a read-write lock, measured in the same run.
//!
//! `cargo bench --bench registry`. Times are for one operation: a look-up (64 under one pin or one read lock), a churn, a mix of 99 look-ups
//! and one churn, a guard taken and given back. A churn unregisters and registers one region. For the registry that means all of it: start
//! and end of the drain, removal, reservation with overlap check, commit, and the published order. The row `registry, index only` leaves out
//! the drain and the published order, as the map and the list do: it abandons a reservation and makes it again, and keeps the regions
//! in a list behind a lock.
//! Regions are 64 KiB, 128 KiB apart; addresses are random. `2 threads` is for each of
//! two threads. All times are CPU time of the thread, so that other work on the machine disturbs less.
#![allow(unsafe_code, missing_docs)]

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use parking_lot::{Mutex, RwLock};
use transfer_engine::registry::{Access, Region, RegionOptions, Registry, Removal, Reservation};
use transfer_engine::sys::MemoryRange;

const BASE: u64 = 1 << 40;
const STRIDE: u64 = 128 << 10;
const LENGTH: u64 = 64 << 10;
const SIZES: [u64; 3] = [256, 8_192, 65_536];

/// What is measured, for all structures.
trait Store: Sync + Sized {
    const NAME: &'static str;
    fn new() -> Self;
    fn register(&self, start: u64);
    fn unregister(&self, start: u64);
    /// Number of the addresses that are registered.
    fn look_up(&self, addresses: &[u64]) -> usize;
}

struct Engine {
    registry: Registry,
    options: RegionOptions,
}

impl Engine {
    fn reserve(&self, start: u64) -> Option<Arc<Region>> {
        // SAFETY: nobody reads or writes the memory of this made-up range.
        let range = unsafe { MemoryRange::new(start, LENGTH) }.unwrap();
        match self.registry.reserve(range, &self.options).unwrap() {
            Reservation::New(region) => Some(region),
            Reservation::Counted(_) => None,
        }
    }
}

impl Store for Engine {
    const NAME: &'static str = "registry";
    fn new() -> Engine {
        let options = RegionOptions { location: "*".into(), remote_accessible: true, counted: false, owner: Default::default() };
        Engine { registry: Registry::new(), options }
    }
    fn register(&self, start: u64) {
        self.registry.commit(&[self.reserve(start).unwrap()]);
    }
    fn unregister(&self, start: u64) {
        if let Removal::Last(region) = self.registry.start_drain(start).unwrap() {
            assert!(self.registry.drain(&region, Duration::ZERO));
            self.registry.finish(&region);
        }
    }
    fn look_up(&self, addresses: &[u64]) -> usize {
        self.registry.read(|view| addresses.iter().filter(|address| view.find(**address).is_some()).count())
    }
}

/// Regions that are reserved and never committed: in the index, but not in the published order.
struct ReservedOnly {
    engine: Engine,
    regions: Mutex<Vec<Option<Arc<Region>>>>,
}

impl ReservedOnly {
    fn place(start: u64) -> usize {
        ((start - BASE) / STRIDE) as usize
    }
}

impl Store for ReservedOnly {
    const NAME: &'static str = "registry, index only";
    fn new() -> ReservedOnly {
        ReservedOnly { engine: Engine::new(), regions: Mutex::new(vec![None; SIZES[2] as usize]) }
    }
    fn register(&self, start: u64) {
        let region = self.engine.reserve(start).unwrap();
        self.regions.lock()[Self::place(start)] = Some(region);
    }
    fn unregister(&self, start: u64) {
        let region = self.regions.lock()[Self::place(start)].take().unwrap();
        self.engine.registry.abandon(&[region]);
    }
    fn look_up(&self, addresses: &[u64]) -> usize {
        self.engine.look_up(addresses)
    }
}

/// What a peer of the registry keeps for a region.
type Value = (u64, Arc<str>);

struct OrderedMap(RwLock<BTreeMap<u64, Value>>, Arc<str>);

impl Store for OrderedMap {
    const NAME: &'static str = "BTreeMap+RwLock";
    fn new() -> OrderedMap {
        OrderedMap(RwLock::default(), "*".into())
    }
    fn register(&self, start: u64) {
        let mut map = self.0.write();
        let previous = map.range(..start + LENGTH).next_back();
        assert!(previous.is_none_or(|(other, (length, _))| other + length <= start));
        map.insert(start, (LENGTH, self.1.clone()));
    }
    fn unregister(&self, start: u64) {
        self.0.write().remove(&start).unwrap();
    }
    fn look_up(&self, addresses: &[u64]) -> usize {
        let map = self.0.read();
        let contains =
            |address: u64| map.range(..=address).next_back().is_some_and(|(start, (length, _))| address - start < *length);
        addresses.iter().filter(|address| contains(**address)).count()
    }
}

struct List(RwLock<Vec<(u64, Value)>>, Arc<str>);

impl Store for List {
    const NAME: &'static str = "Vec+RwLock";
    fn new() -> List {
        List(RwLock::default(), "*".into())
    }
    fn register(&self, start: u64) {
        let mut list = self.0.write();
        assert!(list.iter().all(|(other, (length, _))| start + LENGTH <= *other || other + length <= start));
        list.push((start, (LENGTH, self.1.clone())));
    }
    fn unregister(&self, start: u64) {
        let mut list = self.0.write();
        let position = list.iter().position(|(other, _)| *other == start).unwrap();
        list.swap_remove(position);
    }
    fn look_up(&self, addresses: &[u64]) -> usize {
        let list = self.0.read();
        let contains = |address: u64| list.iter().any(|(start, (length, _))| address.wrapping_sub(*start) < *length);
        addresses.iter().filter(|address| contains(**address)).count()
    }
}

/// CPU time of this thread: other work on the machine then disturbs less.
fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the argument may be written.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Pseudo-random numbers that are the same in each run (xorshift).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((u128::from(self.0) * u128::from(limit)) >> 64) as u64
    }
}

fn start(region: u64) -> u64 {
    BASE + region * STRIDE
}

/// Looks up addresses inside of random regions, 64 in one go, which costs some 2 ns each for making them up.
fn look_up_random<S: Store>(store: &S, size: u64, seed: u64, count: u64) {
    let mut numbers = Numbers(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let mut batch = [0; 64];
    let mut found = 0;
    let mut left = count as usize;
    while left > 0 {
        let batch = &mut batch[..left.min(64)];
        batch.iter_mut().for_each(|address| *address = start(numbers.below(size)) + numbers.0 % LENGTH);
        found += store.look_up(black_box(batch));
        left -= batch.len();
    }
    assert_eq!(found, count as usize);
}

/// All regions, registered in random order.
fn fill<S: Store>(size: u64) -> S {
    let store = S::new();
    let mut numbers = Numbers(0x9E37_79B9_7F4A_7C15);
    let mut order: Vec<u64> = (0..size).collect();
    for last in (1..order.len()).rev() {
        order.swap(last, numbers.below(last as u64 + 1) as usize);
    }
    order.iter().for_each(|region| store.register(start(*region)));
    store
}

/// One row for one structure; `run` answers how long that many operations took.
fn row<S: Store>(criterion: &mut Criterion, name: &str, size: u64, store: &OnceCell<S>, mut run: impl FnMut(&S, u64) -> Duration) {
    let mut group = criterion.benchmark_group(format!("{name}/{size}"));
    group.bench_function(BenchmarkId::from_parameter(S::NAME), |bencher| {
        let store = store.get_or_init(|| fill(size));
        bencher.iter_custom(|count| run(store, count));
    });
    group.finish();
}

fn measure<S: Store>(criterion: &mut Criterion, size: u64) {
    let store = &OnceCell::new();
    row::<S>(criterion, "look-up", size, store, |store, count| {
        let started = cpu_time();
        look_up_random(store, size, 7, count);
        cpu_time() - started
    });
    row::<S>(criterion, "look-up, 2 threads", size, store, |store, count| {
        let barrier = Barrier::new(2);
        let thread = |seed| {
            barrier.wait();
            let started = cpu_time();
            look_up_random(store, size, seed, count);
            cpu_time() - started
        };
        std::thread::scope(|scope| {
            let other = scope.spawn(|| thread(11));
            let own = thread(7);
            (own + other.join().unwrap()) / 2
        })
    });
    churn(criterion, size, store);
    row::<S>(criterion, "mixed", size, store, |store, count| {
        let mut numbers = Numbers(0x2545_F491_4F6C_DD1D);
        let started = cpu_time();
        let churns = count.div_ceil(100);
        for round in 0..churns {
            look_up_random(store, size, round + 1, 99);
            churn_random(store, size, &mut numbers);
        }
        (cpu_time() - started).mul_f64(count as f64 / (churns * 100) as f64)
    });
}

fn churn_random<S: Store>(store: &S, size: u64, numbers: &mut Numbers) {
    let start = start(numbers.below(size));
    store.unregister(start);
    store.register(start);
}

fn churn<S: Store>(criterion: &mut Criterion, size: u64, store: &OnceCell<S>) {
    let mut numbers = Numbers(0x2545_F491_4F6C_DD1D);
    row::<S>(criterion, "churn", size, store, |store, count| {
        let started = cpu_time();
        (0..count).for_each(|_| churn_random(store, size, &mut numbers));
        cpu_time() - started
    });
}

/// A guard on one region, taken and given back; 64 under one pin, as a submitted batch does it.
fn guards(criterion: &mut Criterion, size: u64) {
    let store = &OnceCell::new();
    for (name, regions) in [("guard, random regions", size), ("guard, one region", 1)] {
        row::<Engine>(criterion, name, size, store, |engine, count| {
            let mut numbers = Numbers(7);
            let rounds = count.div_ceil(64);
            let started = cpu_time();
            for _ in 0..rounds {
                engine.registry.read(|view| {
                    for _ in 0..64 {
                        let address = start(numbers.below(regions));
                        assert!(view.acquire(address, 1, Access::Remote).is_ok());
                    }
                });
            }
            (cpu_time() - started).mul_f64(count as f64 / (rounds * 64) as f64)
        });
    }
}

fn all(criterion: &mut Criterion) {
    for size in SIZES {
        measure::<Engine>(criterion, size);
        churn::<ReservedOnly>(criterion, size, &OnceCell::new());
        measure::<OrderedMap>(criterion, size);
        measure::<List>(criterion, size);
        guards(criterion, size);
    }
}

criterion_group! {
    name = registry;
    config = Criterion::default().sample_size(20).warm_up_time(Duration::from_millis(100)).measurement_time(Duration::from_millis(400));
    targets = all
}
criterion_main!(registry);
