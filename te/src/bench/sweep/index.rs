//! Structures that find regions by their addresses: the library's registry beside a linear scan, an ordered map behind a reader-writer
//! lock, and a descriptor that is copied whole whenever it changes.
//!
//! Each holds the same regions. Look-ups are of random addresses, 64 under one lock or pin. A churn unregisters a random region and
//! registers it again, with the check for overlaps; of the registry that is all of it: drain, removal, reservation, commit, and the
//! published order. A sample is what one operation takes, on average over so many as take some milliseconds: processor time where one
//! thread is at work, and time on the clock with two readers and a writer, since whoever waits for a lock uses no processor. A writer that
//! readers keep out all the while counts as having got in at the end.

use std::error::Error;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use transfer_engine::registry::{RegionOptions, Registry, Removal, Reservation};
use transfer_engine::sys::MemoryRange;

use super::{Cell, Recorder, tables};
use crate::report::{Better, Key, Report, Table};
use crate::system::{Arena, thread_cpu_time};

/// Bytes of a region, and from the start of one to that of the next.
const LENGTH: u64 = 4096;
const STRIDE: u64 = 8192;
/// Look-ups under one lock.
const BATCH: usize = 64;
/// What a sample is to take at least.
const SAMPLE: Duration = Duration::from_millis(2);
/// How long readers and a writer are at work together.
const TOGETHER: Duration = Duration::from_millis(10);

const OURS: &str = "ours";
const LINEAR: &str = "linear scan";
const ORDERED: &str = "ordered map";
const COPY: &str = "descriptor copy";

/// A cell for each number of regions.
pub fn cells(regions: &[usize]) -> Vec<Box<dyn Cell>> {
    regions.iter().map(|regions| Box::new(Stores { regions: *regions, round: 0, ready: None }) as Box<dyn Cell>).collect()
}

/// What is measured. Any thread may call anything. What does not fit is an error, so that what is timed is known to work.
trait Store: Sync {
    fn register(&self, start: u64) -> Result<(), String>;
    fn unregister(&self, start: u64) -> Result<(), String>;
    /// How many of the addresses lie in regions.
    fn look_up(&self, addresses: &[u64]) -> usize;
}

/// All of them with so many regions.
struct Stores {
    regions: usize,
    round: usize,
    ready: Option<Ready>,
}

struct Ready {
    stores: Vec<(&'static str, Box<dyn Store>)>,
    /// Memory at whose addresses the regions are; nobody touches it.
    arena: Arena,
}

impl Ready {
    fn new(regions: usize) -> Result<Ready, Box<dyn Error>> {
        let arena = Arena::new(regions * STRIDE as usize)?;
        let mut starts: Vec<u64> = (0..regions).map(|region| arena.range(region * STRIDE as usize, 1).address()).collect();
        let mut numbers = Numbers(1);
        for last in (1..starts.len()).rev() {
            starts.swap(last, numbers.below(last as u64 + 1) as usize);
        }
        let ours = Ours::new(&arena);
        starts.iter().try_for_each(|start| ours.register(*start))?;
        let entries: Vec<Entry> = starts.iter().map(|start| Entry::new(*start)).collect();
        let mut stores: Vec<(&'static str, Box<dyn Store>)> = vec![(OURS, Box::new(ours))];
        #[cfg(has_ordered_map)]
        {
            let map = ordered::Map::new();
            starts.iter().try_for_each(|start| map.register(*start))?;
            stores.push((ORDERED, Box::new(map)));
        }
        stores.push((LINEAR, Box::new(Linear(RwLock::new(entries.clone())))));
        stores.push((COPY, Box::new(Copied(RwLock::new(Arc::new(entries))))));
        Ok(Ready { stores, arena })
    }
}

impl Cell for Stores {
    fn name(&self) -> String {
        format!("index of {} regions", self.regions)
    }

    fn measure(&mut self, recorder: &Recorder) -> Result<(), Box<dyn Error>> {
        let ready = match &mut self.ready {
            Some(ready) => ready,
            None => {
                if !cfg!(has_ordered_map) {
                    recorder.skip(ORDERED, "this program was built without a C++ compiler");
                }
                self.ready.insert(Ready::new(self.regions)?)
            }
        };
        let count = ready.stores.len();
        for position in 0..count {
            let (subject, store) = &ready.stores[(position + self.round) % count];
            let places = Places { base: ready.arena.range(0, 1).address(), regions: self.regions as u64 };
            let add = |quantity, sample| {
                let key = Key::new(Table::Index, quantity, subject, &[("regions", self.regions.into())]);
                recorder.add(key, "ns", Better::Less, sample);
            };
            let seed = self.round as u64 + 2;
            add("look-up hit", time(BATCH as u64, |count| look_up(&**store, places, true, Numbers(seed), count))?);
            add("look-up miss", time(BATCH as u64, |count| look_up(&**store, places, false, Numbers(seed), count))?);
            add("churn", time(1, |count| churn(&**store, places, &mut Numbers(seed), count))?);
            let [hit, change] = together(&**store, places, seed)?;
            add("look-up, 2 readers and 1 writer", hit);
            add("churn, 2 readers and 1 writer", change);
        }
        self.round += 1;
        Ok(())
    }
}

/// Nanoseconds of processor time of one operation: twice as many are done until they take [`SAMPLE`].
fn time(least: u64, mut run: impl FnMut(u64) -> Result<(), String>) -> Result<f64, String> {
    let mut count = least;
    loop {
        let begin = thread_cpu_time();
        run(count)?;
        let took = thread_cpu_time() - begin;
        if took >= SAMPLE {
            return Ok(took.as_nanos() as f64 / count as f64);
        }
        count *= 2;
    }
}

/// Where the regions are.
#[derive(Clone, Copy)]
struct Places {
    base: u64,
    regions: u64,
}

impl Places {
    fn random_region(self, numbers: &mut Numbers) -> u64 {
        self.base + numbers.below(self.regions) * STRIDE
    }

    /// An address in a region, or in the gap behind it.
    fn random_address(self, is_hit: bool, numbers: &mut Numbers) -> u64 {
        self.random_region(numbers) + numbers.0 % LENGTH + if is_hit { 0 } else { LENGTH }
    }
}

fn look_up_batch(store: &dyn Store, places: Places, is_hit: bool, numbers: &mut Numbers) -> usize {
    let batch: [u64; BATCH] = std::array::from_fn(|_| places.random_address(is_hit, numbers));
    store.look_up(black_box(&batch))
}

fn look_up(store: &dyn Store, places: Places, is_hit: bool, mut numbers: Numbers, count: u64) -> Result<(), String> {
    let batches = count / BATCH as u64;
    let found: usize = (0..batches).map(|_| look_up_batch(store, places, is_hit, &mut numbers)).sum();
    let expected = if is_hit { count as usize } else { 0 };
    if found == expected { Ok(()) } else { Err(format!("{found} of {expected} look-ups have found a region")) }
}

fn churn(store: &dyn Store, places: Places, numbers: &mut Numbers, count: u64) -> Result<(), String> {
    (0..count).map(|_| places.random_region(numbers)).try_for_each(|start| {
        store.unregister(start)?;
        store.register(start)
    })
}

/// Nanoseconds on the clock that a look-up takes, and a churn, where two threads look up and this one churns.
fn together(store: &dyn Store, places: Places, seed: u64) -> Result<[f64; 2], String> {
    let (begin, is_over) = (Barrier::new(3), AtomicBool::new(false));
    let (begin, is_over) = (&begin, &is_over);
    let reader = |seed| {
        move || {
            begin.wait();
            let (mut numbers, mut count, started) = (Numbers(seed), 0, Instant::now());
            loop {
                black_box(look_up_batch(store, places, true, &mut numbers));
                count += BATCH;
                if is_over.load(Ordering::Relaxed) {
                    return (count, started.elapsed());
                }
            }
        }
    };
    std::thread::scope(|scope| {
        let readers = [seed + 100, seed + 200].map(|seed| scope.spawn(reader(seed)));
        // Ends the readers also while this thread waits for them to let it in.
        scope.spawn(|| {
            std::thread::sleep(TOGETHER);
            is_over.store(true, Ordering::Relaxed);
        });
        begin.wait();
        let (mut numbers, mut churns, started) = (Numbers(seed), 0, Instant::now());
        let outcome = loop {
            let outcome = churn(store, places, &mut numbers, 1);
            churns += 1;
            if outcome.is_err() || is_over.load(Ordering::Relaxed) {
                break outcome;
            }
        };
        let churned = started.elapsed();
        is_over.store(true, Ordering::Relaxed);
        let readers = readers.map(|reader| reader.join().unwrap_or_default());
        outcome?;
        let look_ups: usize = readers.iter().map(|(count, _)| count).sum();
        let looked: Duration = readers.iter().map(|(_, took)| *took).sum();
        Ok([looked.as_nanos() as f64 / look_ups as f64, churned.as_nanos() as f64 / f64::from(churns)])
    })
}

/// Numbers that are the same in each run (splitmix64), of any seed.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^= value >> 31;
        ((u128::from(value) * u128::from(limit)) >> 64) as u64
    }
}

/// The library's registry.
struct Ours {
    registry: Registry,
    options: RegionOptions,
    /// Where the memory begins that regions may be in.
    whole: MemoryRange,
}

impl Ours {
    fn new(arena: &Arena) -> Ours {
        let options =
            RegionOptions { location: "cpu:0".into(), remote_accessible: true, counted: false, owner: Default::default() };
        Ours { registry: Registry::new(), options, whole: arena.range(0, arena.bytes().len()) }
    }
}

impl Store for Ours {
    fn register(&self, start: u64) -> Result<(), String> {
        let range = self.whole.part(start - self.whole.address(), LENGTH).ok_or("a region is outside of the memory")?;
        match self.registry.reserve(range, &self.options).map_err(|error| error.to_string())? {
            Reservation::New(region) => self.registry.commit(&[region]),
            Reservation::Counted(_) => return Err(format!("the region at {start:#x} is there already")),
        }
        Ok(())
    }
    fn unregister(&self, start: u64) -> Result<(), String> {
        match self.registry.start_drain(start).map_err(|error| error.to_string())? {
            Removal::Last(region) if self.registry.drain(&region, Duration::ZERO) => self.registry.finish(&region),
            _ => return Err(format!("the region at {start:#x} is in use")),
        }
        Ok(())
    }
    fn look_up(&self, addresses: &[u64]) -> usize {
        self.registry.read(|view| addresses.iter().filter(|address| view.find(**address).is_some()).count())
    }
}

/// What a descriptor says of a region, to be copied.
#[derive(Clone)]
struct Entry {
    start: u64,
    length: u64,
    _location: String,
    _local_keys: Vec<u32>,
    _remote_keys: Vec<u32>,
}

impl Entry {
    fn new(start: u64) -> Entry {
        Entry { start, length: LENGTH, _location: "cpu:0".to_string(), _local_keys: vec![1], _remote_keys: vec![2] }
    }
}

fn add(entries: &mut Vec<Entry>, start: u64) -> Result<(), String> {
    let overlaps = |entry: &Entry| start < entry.start + entry.length && entry.start < start + LENGTH;
    if entries.iter().any(overlaps) {
        return Err(format!("the region at {start:#x} overlaps another one"));
    }
    entries.push(Entry::new(start));
    Ok(())
}

fn remove(entries: &mut Vec<Entry>, start: u64) -> Result<(), String> {
    let place = entries.iter().position(|entry| entry.start == start);
    entries.swap_remove(place.ok_or_else(|| format!("no region starts at {start:#x}"))?);
    Ok(())
}

fn count_in(entries: &[Entry], addresses: &[u64]) -> usize {
    let is_in = |address: &&u64| entries.iter().any(|entry| address.wrapping_sub(entry.start) < entry.length);
    addresses.iter().filter(is_in).count()
}

/// A list behind a reader-writer lock.
struct Linear(RwLock<Vec<Entry>>);

impl Store for Linear {
    fn register(&self, start: u64) -> Result<(), String> {
        add(&mut write(&self.0), start)
    }
    fn unregister(&self, start: u64) -> Result<(), String> {
        remove(&mut write(&self.0), start)
    }
    fn look_up(&self, addresses: &[u64]) -> usize {
        count_in(&read(&self.0), addresses)
    }
}

/// A list that is never changed: a change makes a new one, which takes its place. Readers keep theirs, and look without a lock.
struct Copied(RwLock<Arc<Vec<Entry>>>);

impl Copied {
    fn change(&self, change: impl FnOnce(&mut Vec<Entry>) -> Result<(), String>) -> Result<(), String> {
        let mut current = write(&self.0);
        let mut entries = current.to_vec();
        change(&mut entries)?;
        *current = Arc::new(entries);
        Ok(())
    }
}

impl Store for Copied {
    fn register(&self, start: u64) -> Result<(), String> {
        self.change(|entries| add(entries, start))
    }
    fn unregister(&self, start: u64) -> Result<(), String> {
        self.change(|entries| remove(entries, start))
    }
    fn look_up(&self, addresses: &[u64]) -> usize {
        let entries = read(&self.0).clone();
        count_in(&entries, addresses)
    }
}

fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

/// `std::map` behind `std::shared_mutex`.
#[cfg(has_ordered_map)]
mod ordered {
    #![allow(unsafe_code)]

    use super::{LENGTH, Store};

    /// What `ordered_map.cpp` keeps.
    #[repr(C)]
    struct OrderedMap {
        _private: [u8; 0],
    }

    unsafe extern "C" {
        fn ordered_map_new() -> *mut OrderedMap;
        fn ordered_map_free(map: *mut OrderedMap);
        fn ordered_map_insert(map: *mut OrderedMap, start: u64, length: u64) -> bool;
        fn ordered_map_remove(map: *mut OrderedMap, start: u64) -> bool;
        fn ordered_map_look_up(map: *mut OrderedMap, addresses: *const u64, count: usize) -> usize;
    }

    pub struct Map(*mut OrderedMap);

    // SAFETY: each of the functions takes the map's own lock.
    unsafe impl Sync for Map {}

    impl Map {
        pub fn new() -> Map {
            // SAFETY: makes a map that is ours.
            Map(unsafe { ordered_map_new() })
        }
    }

    impl Store for Map {
        fn register(&self, start: u64) -> Result<(), String> {
            // SAFETY: the map lives as long as this.
            let is_new = unsafe { ordered_map_insert(self.0, start, LENGTH) };
            if is_new { Ok(()) } else { Err(format!("the region at {start:#x} overlaps another one")) }
        }
        fn unregister(&self, start: u64) -> Result<(), String> {
            // SAFETY: as above.
            let was_there = unsafe { ordered_map_remove(self.0, start) };
            if was_there { Ok(()) } else { Err(format!("no region starts at {start:#x}")) }
        }
        fn look_up(&self, addresses: &[u64]) -> usize {
            // SAFETY: as above, and so many addresses are there to be read.
            unsafe { ordered_map_look_up(self.0, addresses.as_ptr(), addresses.len()) }
        }
    }

    impl Drop for Map {
        fn drop(&mut self) {
            // SAFETY: made by `ordered_map_new`, and nobody has it any more.
            unsafe { ordered_map_free(self.0) };
        }
    }
}

/// What a report says that an ordered index is faster by than a linear scan, at so many regions.
const REPORTED: [(&str, f64); 2] = [("look-up hit", 27.0), ("churn", 22.0)];
const REPORTED_REGIONS: u64 = 8192;

/// The table, and what came of the report's figures.
pub fn text(report: &Report) -> String {
    let mut out = "\nFinding regions. ns of an operation; a churn unregisters one region and registers it again.\n".to_string();
    out += &tables::table(report, Table::Index);
    out.push('\n');
    for (quantity, reported) in REPORTED {
        let samples = |subject: &str| {
            let is_it =
                |key: &Key| key.quantity == quantity && key.subject == subject && key.number("regions") == Some(REPORTED_REGIONS);
            report.table(Table::Index).find(|measurement| is_it(&measurement.key)).map(|measurement| measurement.spread().median)
        };
        let (Some(linear), Some(ours)) = (samples(LINEAR), samples(OURS)) else { continue };
        let Some(ordered) = samples(ORDERED) else { continue };
        let ratio = linear / ordered;
        let verdict = if ratio >= reported { "reproduced" } else { "not reproduced" };
        out += &format!(
            "{quantity} at {REPORTED_REGIONS} regions: ordered map to linear scan {ratio:.1}x (reported: {reported}x, {verdict}), ours to linear \
             scan {:.1}x\n",
            linear / ours
        );
    }
    out
}
