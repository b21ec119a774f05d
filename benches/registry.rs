//! What the registry costs, beside an ordered map and a plain list under a read-write lock, measured in the same run.
//!
//! `cargo bench --bench registry`. Times are for one operation: a look-up (64 under one pin or one read lock), a churn (unregister
//! and register of one region, with overlap check and published order), a mix of 99 look-ups and one churn, a guard taken and given back.
//! Regions are 64 KiB, 128 KiB apart; addresses are random. `2 threads` is the time of each of two threads.
#![allow(unsafe_code, missing_docs)]

use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use parking_lot::RwLock;
use transfer_engine::registry::{Access, RegionOptions, Registry, Removal, Reservation};
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

impl Store for Engine {
    const NAME: &'static str = "registry";
    fn new() -> Engine {
        let options = RegionOptions { location: "*".into(), remote_accessible: true, counted: false };
        Engine { registry: Registry::new(), options }
    }
    fn register(&self, start: u64) {
        // SAFETY: nobody reads or writes the memory of this made-up range.
        let range = unsafe { MemoryRange::new(start, LENGTH) }.unwrap();
        if let Reservation::New(region) = self.registry.reserve(range, &self.options).unwrap() {
            self.registry.commit(&[region]);
        }
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

fn hits(size: u64, seed: u64) -> Vec<u64> {
    let mut numbers = Numbers(seed);
    (0..1 << 16).map(|_| start(numbers.below(size)) + numbers.below(LENGTH)).collect()
}

fn look_up_all<S: Store>(store: &S, addresses: &[u64], count: u64) -> usize {
    let mut left = count as usize;
    let mut found = 0;
    for batch in addresses.chunks(64).cycle() {
        if left == 0 {
            break;
        }
        let batch = &batch[..batch.len().min(left)];
        found += store.look_up(black_box(batch));
        left -= batch.len();
    }
    assert_eq!(found, count as usize);
    found
}

fn measure<S: Store>(criterion: &mut Criterion, size: u64) {
    let store = S::new();
    let mut numbers = Numbers(0x9E37_79B9_7F4A_7C15);
    let mut order: Vec<u64> = (0..size).collect();
    for last in (1..order.len()).rev() {
        order.swap(last, numbers.below(last as u64 + 1) as usize);
    }
    order.iter().for_each(|region| store.register(start(*region)));
    let addresses = hits(size, 7);

    let mut row = |name: &str, mut run: Box<dyn FnMut(u64) -> Duration + '_>| {
        let mut group = criterion.benchmark_group(format!("{name}/{size}"));
        group.bench_function(BenchmarkId::from_parameter(S::NAME), |bencher| bencher.iter_custom(&mut run));
        group.finish();
    };
    row(
        "look-up",
        Box::new(|count| {
            let started = Instant::now();
            black_box(look_up_all(&store, &addresses, count));
            started.elapsed()
        }),
    );
    row(
        "look-up, 2 threads",
        Box::new(|count| {
            let barrier = Barrier::new(2);
            let thread = |seed| {
                let addresses = hits(size, seed);
                barrier.wait();
                let started = Instant::now();
                black_box(look_up_all(&store, &addresses, count));
                started.elapsed()
            };
            std::thread::scope(|scope| {
                let other = scope.spawn(|| thread(11));
                let own = thread(7);
                (own + other.join().unwrap()) / 2
            })
        }),
    );
    let mut churn = |count: u64| {
        for _ in 0..count {
            let start = start(numbers.below(size));
            store.unregister(start);
            store.register(start);
        }
    };
    row(
        "churn",
        Box::new(|count| {
            let started = Instant::now();
            churn(count);
            started.elapsed()
        }),
    );
    row(
        "mixed",
        Box::new(|count| {
            let started = Instant::now();
            let churns = count.div_ceil(100);
            for _ in 0..churns {
                look_up_all(&store, &addresses, 99);
                churn(1);
            }
            started.elapsed().mul_f64(count as f64 / (churns * 100) as f64)
        }),
    );
}

/// A guard on one region, taken and given back; 64 under one pin, as a submitted batch does it.
fn guards(criterion: &mut Criterion) {
    for size in SIZES {
        let engine = Engine::new();
        (0..size).for_each(|region| engine.register(start(region)));
        let random = hits(size, 7);
        let same = vec![start(size / 2); 1 << 16];
        for (name, addresses) in [("random regions", &random), ("one region", &same)] {
            let mut group = criterion.benchmark_group(format!("guard/{size}"));
            group.bench_function(BenchmarkId::from_parameter(name), |bencher| {
                let mut batches = addresses.chunks(64).cycle();
                bencher.iter_custom(|count| {
                    let rounds = count.div_ceil(64);
                    let started = Instant::now();
                    for _ in 0..rounds {
                        let batch = batches.next().unwrap();
                        engine.registry.read(|view| {
                            batch.iter().for_each(|address| assert!(view.acquire(*address, 1, Access::Remote).is_ok()))
                        });
                    }
                    started.elapsed().mul_f64(count as f64 / (rounds * 64) as f64)
                });
            });
            group.finish();
        }
    }
}

fn all(criterion: &mut Criterion) {
    for size in SIZES {
        measure::<Engine>(criterion, size);
        measure::<OrderedMap>(criterion, size);
        measure::<List>(criterion, size);
    }
    guards(criterion);
}

criterion_group! {
    name = registry;
    config = Criterion::default().sample_size(20).warm_up_time(Duration::from_millis(100)).measurement_time(Duration::from_millis(400));
    targets = all
}
criterion_main!(registry);
