//! Order, undoing and threads of registrations, on devices and transports that fail on command.

use std::sync::Weak;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::ThreadId;

use parking_lot::{Condvar, Mutex};

use super::*;
use crate::registry::{Access, MemoryKey, Owner};
use crate::transport::{Segment, Slices};

/// Fails on demand, and keeps count.
#[derive(Default)]
struct Moody {
    this: Weak<Moody>,
    attached: Mutex<Vec<u64>>,
    refuses: Mutex<Option<u64>>,
    keeps: Mutex<bool>,
    evicted: Mutex<Vec<MemoryRange>>,
    held: Mutex<Option<crate::registry::Guards>>,
    /// How many times evicting overlooks what is on its way.
    misses: Mutex<usize>,
    /// What somebody else does during a registration that fails.
    meanwhile: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Moody {
    fn new() -> Arc<Moody> {
        Arc::new_cyclic(|this| Moody { this: this.clone(), ..Moody::default() })
    }
}

impl Transport for Moody {
    fn protocol(&self) -> &'static str {
        "moody"
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.this.upgrade().into_iter().map(|this| this as Arc<dyn Device>).collect()
    }
    fn submit(&self, _segment: &Arc<dyn Segment>, _slices: Slices) {}
    fn cancel(&self) {}
    fn evict(&self, range: MemoryRange) {
        self.evicted.lock().push(range);
        if self.evicted.lock().len() > *self.misses.lock() {
            *self.held.lock() = None;
        }
    }
    fn forget(&self, _segment: u64) {}
    fn shutdown(&self, _reason: Error) {}
}

impl Device for Moody {
    fn name(&self) -> &str {
        "moody0"
    }
    fn numa_node(&self) -> Option<u32> {
        None
    }
    fn max_mr_size(&self) -> u64 {
        u64::MAX
    }
    fn register(&self, chunk: MemoryRange, _remote_accessible: bool) -> Result<MemoryKey> {
        if *self.refuses.lock() == Some(chunk.address()) {
            if let Some(meanwhile) = self.meanwhile.lock().take() {
                meanwhile();
            }
            return Err(Error::quiet(Code::Context, "refused"));
        }
        self.attached.lock().push(chunk.address());
        Ok(MemoryKey { handle: chunk.address() as usize, ..MemoryKey::default() })
    }
    fn deregister(&self, key: &MemoryKey) -> Result<()> {
        if *self.keeps.lock() {
            return Err(Error::quiet(Code::Context, "kept"));
        }
        self.attached.lock().retain(|address| *address as usize != key.handle);
        Ok(())
    }
}

struct Bench {
    registry: Arc<Registry>,
    counters: Arc<Counters>,
    registrar: Registrar,
    transports: Vec<Arc<dyn Transport>>,
    first: Arc<Moody>,
    second: Arc<Moody>,
}

impl Bench {
    fn new() -> Bench {
        let (registry, counters) = (Arc::new(Registry::new()), Arc::new(Counters::default()));
        let (first, second) = (Moody::new(), Moody::new());
        Bench {
            registrar: Registrar::new(registry.clone(), counters.clone(), &Config::default()),
            registry,
            counters,
            transports: vec![first.clone(), second.clone()],
            first,
            second,
        }
    }
}

fn range(address: u64) -> MemoryRange {
    // SAFETY: nobody touches these addresses.
    #[allow(unsafe_code)]
    unsafe { MemoryRange::new(address, 4096) }.unwrap()
}

fn options(counted: bool) -> RegionOptions {
    RegionOptions { location: "*".into(), remote_accessible: true, counted, owner: Owner::Program }
}

#[test]
fn a_failing_transport_leaves_nothing_behind() {
    let bench = Bench::new();
    *bench.second.refuses.lock() = Some(0x3000);
    let ranges: Vec<_> = [0x1000, 0x2000, 0x3000, 0x4000].map(range).into();
    let error = bench.registrar.register_batch(&ranges, &options(false), None, &bench.transports).err().unwrap();
    assert_eq!(error.code(), Code::Context);
    assert_eq!((bench.registry.len(), bench.first.attached.lock().len(), bench.second.attached.lock().len()), (0, 0, 0));
    *bench.second.refuses.lock() = None;
    bench.registrar.register_batch(&ranges, &options(false), None, &bench.transports).unwrap();
    assert_eq!(bench.registry.live().len(), 4);
}

#[test]
fn a_failing_undo_blocks_the_range() {
    let bench = Bench::new();
    *bench.second.refuses.lock() = Some(0x1000);
    *bench.first.keeps.lock() = true;
    assert!(bench.registrar.register(range(0x1000), &options(false), None, &bench.transports).is_err());
    assert_eq!(bench.registry.len(), 1);
    assert!(bench.registry.live().is_empty());
    let error = bench.registrar.register(range(0x1000), &options(false), None, &bench.transports).err().unwrap();
    assert_eq!(error.code(), Code::AddressOverlapped);
}

#[test]
fn counted_registrations_end_with_the_last() {
    let bench = Bench::new();
    for _ in 0..3 {
        bench.registrar.register(range(0x1000), &options(true), None, &bench.transports).unwrap();
    }
    assert_eq!(bench.first.attached.lock().len(), 1);
    for remaining in [1, 1, 0] {
        bench.registrar.unregister(0x1000, &bench.transports).unwrap();
        assert_eq!(bench.registry.len(), remaining);
    }
    assert_eq!(bench.registrar.unregister(0x1000, &bench.transports).unwrap_err().code(), Code::AddressNotRegistered);
}

#[test]
fn a_batch_that_fails_gives_back_counted_references() {
    let bench = Bench::new();
    bench.registrar.register(range(0x1000), &options(true), None, &bench.transports).unwrap();
    *bench.first.refuses.lock() = Some(0x2000);
    assert!(bench.registrar.register_batch(&[range(0x1000), range(0x2000)], &options(true), None, &bench.transports).is_err());
    bench.registrar.unregister(0x1000, &bench.transports).unwrap();
    assert_eq!(bench.registry.len(), 0);
}

#[test]
fn what_a_put_or_get_waits_for_is_no_refused_registration() {
    let bench = Bench::new();
    let call = RegionOptions { owner: Owner::Call, ..options(false) };
    let register = || {
        let outcome = bench.registrar.register_batch(&[range(0x1000)], &call, None, &bench.transports);
        (outcome.err().unwrap().code(), bench.counters.registrations_refused.get())
    };
    let Ok(Reservation::New(region)) = bench.registry.reserve(range(0x1000), &options(false)) else { panic!("not reserved") };
    assert_eq!(register(), (Code::BatchBusy, 0));
    bench.registry.quarantine(&region);
    assert_eq!(register(), (Code::AddressOverlapped, 1));
}

#[test]
fn unregistering_a_batch_does_all_it_can() {
    let bench = Bench::new();
    let ranges: Vec<_> = (1..=100).map(|page| range(page * 0x1000)).collect();
    bench.registrar.register_batch(&ranges, &options(false), None, &bench.transports).unwrap();
    let mut addresses: Vec<_> = ranges.iter().map(MemoryRange::address).collect();
    addresses[50] += 8;
    let error = bench.registrar.unregister_batch(&addresses, &bench.transports).unwrap_err();
    assert_eq!((error.code(), bench.registry.len()), (Code::AddressNotRegistered, 1));
}

#[test]
fn an_address_that_comes_again_in_a_batch_is_unregistered_once_for_each_reference() {
    for references in 1..4 {
        let bench = Bench::new();
        for _ in 0..references {
            bench.registrar.register(range(0x1000), &options(true), None, &bench.transports).unwrap();
        }
        let error = bench.registrar.unregister_batch(&[0x1000; 4], &bench.transports).unwrap_err();
        assert_eq!((error.code(), bench.registry.len()), (Code::AddressNotRegistered, 0), "{references}: {error}");
        assert!(bench.first.attached.lock().is_empty());
    }
}

#[test]
fn a_reference_that_became_the_last_is_given_back_by_a_failing_batch() {
    let bench = Bench::new();
    bench.registrar.register(range(0x1000), &options(true), None, &bench.transports).unwrap();
    *bench.first.refuses.lock() = Some(0x2000);
    let (registry, transports) = (bench.registry.clone(), bench.transports.clone());
    let unregister = move || Registrar::new(registry, Arc::default(), &Config::default()).unregister(0x1000, &transports).unwrap();
    *bench.first.meanwhile.lock() = Some(Box::new(unregister));
    assert!(bench.registrar.register_batch(&[range(0x1000), range(0x2000)], &options(true), None, &bench.transports).is_err());
    assert_eq!((bench.registry.len(), bench.first.attached.lock().len()), (0, 0));
}

#[test]
fn work_that_an_eviction_overlooks_is_found_by_the_next() {
    let bench = Bench::new();
    bench.registrar.register(range(0x1000), &options(false), None, &bench.transports).unwrap();
    let Ok(guards) = bench.registry.read(|view| view.acquire(0x1000, 10, Access::Remote)) else { panic!("no guard") };
    *bench.first.held.lock() = Some(guards);
    *bench.first.misses.lock() = 2;
    bench.registrar.unregister(0x1000, &bench.transports).unwrap();
    assert_eq!((bench.first.evicted.lock().len(), bench.registry.len()), (3, 0));
}

#[test]
fn unregistering_waits_for_work_in_flight_and_then_evicts_it() {
    let bench = Bench::new();
    bench.registrar.register(range(0x1000), &options(false), None, &bench.transports).unwrap();
    let Ok(guards) = bench.registry.read(|view| view.acquire(0x1000, 10, Access::Remote)) else { panic!("no guard") };
    *bench.first.held.lock() = Some(guards);
    bench.registrar.unregister(0x1000, &bench.transports).unwrap();
    assert_eq!(*bench.first.evicted.lock(), [range(0x1000)]);
    assert_eq!(bench.registry.len(), 0);
}

#[test]
fn a_late_transport_learns_of_all_regions_or_of_none() {
    let bench = Bench::new();
    let ranges: Vec<_> = (1..=3).map(|page| range(page * 0x1000)).collect();
    bench.registrar.register_batch(&ranges, &options(false), None, &[]).unwrap();
    *bench.first.refuses.lock() = Some(0x3000);
    assert!(bench.registrar.attach_live(&bench.transports[0], |_| Ok(())).is_err());
    assert!(bench.first.attached.lock().is_empty());
    bench.registrar.attach_live(&bench.transports[1], |_| Ok(())).unwrap();
    assert_eq!(bench.second.attached.lock().len(), 3);
}

/// A device that counts, and does what a test tells it.
struct Scripted {
    name: String,
    max_mr_size: u64,
    is_active: bool,
    live: Mutex<Vec<MemoryRange>>,
    /// The chunk that begins here is refused.
    refuses: Mutex<Option<u64>>,
    /// The chunk that begins here cannot be given back.
    keeps: Mutex<Option<u64>>,
    /// Every call waits for as many others.
    gate: Mutex<Option<Arc<Gate>>>,
    load: Arc<Load>,
    calls: Mutex<Vec<(u64, ThreadId)>>,
    returns: Mutex<Vec<(u64, ThreadId)>>,
}

/// Opens for as many at a time; whoever waits for too long panics.
struct Gate {
    width: usize,
    arrived: Mutex<usize>,
    opened: Condvar,
}

impl Gate {
    fn pass(&self) {
        let mut arrived = self.arrived.lock();
        *arrived += 1;
        let group = (*arrived - 1) / self.width;
        self.opened.notify_all();
        while *arrived < (group + 1) * self.width {
            let waited = self.opened.wait_for(&mut arrived, Duration::from_secs(20));
            assert!(!waited.timed_out(), "{} calls at a time never came", self.width);
        }
    }
}

/// Calls inside of all devices of a test.
#[derive(Default)]
struct Load {
    inside: AtomicUsize,
    peak: AtomicUsize,
}

impl Scripted {
    fn enter(&self) {
        let inside = self.load.inside.fetch_add(1, Ordering::SeqCst) + 1;
        self.load.peak.fetch_max(inside, Ordering::SeqCst);
        let gate = self.gate.lock().clone();
        match gate {
            Some(gate) => gate.pass(),
            None => std::thread::yield_now(),
        }
        self.load.inside.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Device for Scripted {
    fn name(&self) -> &str {
        &self.name
    }
    fn numa_node(&self) -> Option<u32> {
        None
    }
    fn max_mr_size(&self) -> u64 {
        self.max_mr_size
    }
    fn is_active(&self) -> bool {
        self.is_active
    }
    fn register(&self, chunk: MemoryRange, remote_accessible: bool) -> Result<MemoryKey> {
        self.enter();
        self.calls.lock().push((chunk.address(), std::thread::current().id()));
        if *self.refuses.lock() == Some(chunk.address()) {
            return Err(crate::transport::device::registration_error(self, chunk, libc::ENOMEM, Some(7)));
        }
        assert!(chunk.length() <= self.max_mr_size);
        self.live.lock().push(chunk);
        Ok(MemoryKey { lkey: 1, rkey: u32::from(remote_accessible), handle: chunk.address() as usize })
    }
    fn deregister(&self, key: &MemoryKey) -> Result<()> {
        self.enter();
        self.returns.lock().push((key.handle as u64, std::thread::current().id()));
        if *self.keeps.lock() == Some(key.handle as u64) {
            return Err(Error::quiet(Code::Context, format!("{} keeps it", self.name)));
        }
        let mut live = self.live.lock();
        let at = live.iter().position(|chunk| chunk.address() == key.handle as u64).expect("never registered");
        live.remove(at);
        Ok(())
    }
}

/// A transport with scripted devices.
struct Rig(Vec<Arc<Scripted>>);

impl Transport for Rig {
    fn protocol(&self) -> &'static str {
        "rig"
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.0.iter().map(|device| device.clone() as Arc<dyn Device>).collect()
    }
    fn submit(&self, _segment: &Arc<dyn Segment>, _slices: Slices) {}
    fn cancel(&self) {}
    fn evict(&self, _range: MemoryRange) {}
    fn forget(&self, _segment: u64) {}
    fn shutdown(&self, _reason: Error) {}
}

struct Fleet {
    registry: Arc<Registry>,
    counters: Arc<Counters>,
    registrar: Registrar,
    devices: Vec<Arc<Scripted>>,
    transports: Vec<Arc<dyn Transport>>,
    load: Arc<Load>,
}

const MIB: u64 = 1 << 20;

impl Fleet {
    fn new(devices: usize, max_mr_size: u64, threads: usize) -> Fleet {
        let load = Arc::new(Load::default());
        let device = |number| Scripted {
            name: format!("fake{number}"),
            max_mr_size,
            is_active: true,
            live: Mutex::default(),
            refuses: Mutex::default(),
            keeps: Mutex::default(),
            gate: Mutex::default(),
            load: load.clone(),
            calls: Mutex::default(),
            returns: Mutex::default(),
        };
        let devices: Vec<_> = (0..devices).map(|number| Arc::new(device(number))).collect();
        let (registry, counters) = (Arc::new(Registry::new()), Arc::new(Counters::default()));
        let config = Config { registration_threads: threads, ..Config::default() };
        Fleet {
            registrar: Registrar::new(registry.clone(), counters.clone(), &config),
            registry,
            counters,
            transports: vec![Arc::new(Rig(devices.clone()))],
            devices,
            load,
        }
    }

    fn register(&self, ranges: &[MemoryRange], parallelism: Parallelism) -> Result<()> {
        self.registrar.register_batch(ranges, &options(false), Some(parallelism), &self.transports).map(drop)
    }

    fn live(&self) -> Vec<usize> {
        self.devices.iter().map(|device| device.live.lock().len()).collect()
    }

    fn set_gate(&self, width: usize) {
        let gate = (width > 0).then(|| Arc::new(Gate { width, arrived: Mutex::default(), opened: Condvar::new() }));
        self.devices.iter().for_each(|device| *device.gate.lock() = gate.clone());
    }
}

fn long_range(address: u64, length: u64) -> MemoryRange {
    // SAFETY: nobody touches these addresses; what looks at their pages finds none.
    #[allow(unsafe_code)]
    unsafe { MemoryRange::new(address, length) }.unwrap()
}

const MODES: [Parallelism; 3] = [Parallelism::Auto, Parallelism::Sequential, Parallelism::Parallel];

#[test]
fn every_chunk_is_registered_with_every_device_and_given_back() {
    for mode in MODES {
        let fleet = Fleet::new(3, 2 * MIB, 4);
        let region = long_range(MIB, 5 * MIB);
        fleet.register(&[region], mode).unwrap();
        assert_eq!(fleet.live(), [3, 3, 3]);
        let live = fleet.registry.live();
        let chunks = live[0].registrations().unwrap().chunks();
        let shape: Vec<_> =
            chunks.iter().map(|chunk| (chunk.range().address(), chunk.range().length(), chunk.device_count())).collect();
        assert_eq!(shape, [(MIB, 2 * MIB, 3), (3 * MIB, 2 * MIB, 3), (5 * MIB, MIB, 3)]);
        for chunk in chunks {
            for device in 0..3 {
                let key = MemoryKey { lkey: 1, rkey: 1, handle: chunk.range().address() as usize };
                assert_eq!(chunk.key(device), Some(key));
            }
        }
        fleet.registrar.unregister(MIB, &fleet.transports).unwrap();
        assert_eq!((fleet.live(), fleet.registry.len()), (vec![0; 3], 0));
    }
}

#[test]
fn a_failure_of_any_device_at_any_chunk_leaves_nothing_behind() {
    for mode in MODES {
        let fleet = Fleet::new(4, MIB, 3);
        let regions = [long_range(MIB, 3 * MIB), long_range(8 * MIB, 2 * MIB)];
        for device in &fleet.devices {
            for chunk in [1, 2, 3, 8, 9] {
                *device.refuses.lock() = Some(chunk * MIB);
                let error = fleet.register(&regions, mode).unwrap_err();
                assert_eq!(error.code(), Code::Limit);
                assert!(error.message().contains(&device.name), "{error}");
                assert_eq!((fleet.live(), fleet.registry.len()), (vec![0; 4], 0), "{} {chunk}", device.name);
            }
            *device.refuses.lock() = None;
        }
        fleet.register(&regions, mode).unwrap();
        assert_eq!(fleet.live(), [5; 4]);
    }
}

#[test]
fn an_undo_that_fails_blocks_its_region_alone_and_says_so() {
    let fleet = Fleet::new(2, MIB, 2);
    let regions = [long_range(MIB, 2 * MIB), long_range(8 * MIB, MIB)];
    // The second chunk is among the first calls of the second device, the last one among the last of the first device.
    *fleet.devices[1].keeps.lock() = Some(2 * MIB);
    *fleet.devices[0].refuses.lock() = Some(8 * MIB);
    let error = fleet.register(&regions, Parallelism::Sequential).unwrap_err();
    assert!(error.message().contains("stays blocked") && error.message().contains("fake1 keeps it"), "{error}");
    assert_eq!((fleet.live(), fleet.registry.len()), (vec![0, 1], 1));
    assert_eq!(fleet.register(&regions[..1], Parallelism::Auto).unwrap_err().code(), Code::AddressOverlapped);
    *fleet.devices[0].refuses.lock() = None;
    fleet.register(&regions[1..], Parallelism::Auto).unwrap();
}

#[test]
fn a_deregistration_that_fails_blocks_its_region_and_frees_the_others() {
    let fleet = Fleet::new(2, MIB, 2);
    let regions = [long_range(MIB, MIB), long_range(3 * MIB, MIB), long_range(5 * MIB, MIB)];
    fleet.register(&regions, Parallelism::Auto).unwrap();
    *fleet.devices[0].keeps.lock() = Some(3 * MIB);
    let addresses = regions.map(|region| region.address());
    let error = fleet.registrar.unregister_batch(&addresses, &fleet.transports).unwrap_err();
    assert!(error.message().contains("stays blocked"), "{error}");
    assert_eq!((fleet.live(), fleet.registry.len(), fleet.counters.regions_unregistered.get()), (vec![1, 0], 1, 2));
}

/// The gate opens only when as many calls as there are devices are inside: what is side by side takes as long as the slowest.
#[test]
fn devices_work_side_by_side_where_they_may() {
    for mode in [Parallelism::Parallel, Parallelism::Auto] {
        let mut fleet = Fleet::new(4, u64::MAX, 4);
        fleet.set_gate(4);
        let region = long_range(1 << 32, 256 * MIB);
        fleet.register(&[region], mode).unwrap();
        // How it is given back is not for the call to say, and depends on what it took.
        fleet.registrar.parallelism = Parallelism::Parallel;
        fleet.registrar.unregister(region.address(), &fleet.transports).unwrap();
        assert_eq!((fleet.live(), fleet.load.peak.load(Ordering::SeqCst)), (vec![0; 4], 4));
    }
}

#[test]
fn the_sequential_mode_stays_on_the_callers_thread_in_order() {
    let fleet = Fleet::new(3, u64::MAX, 4);
    fleet.register(&[long_range(1 << 32, 256 * MIB)], Parallelism::Sequential).unwrap();
    let here = std::thread::current().id();
    assert!(fleet.devices.iter().all(|device| *device.calls.lock() == [(1 << 32, here)]));
    assert_eq!(fleet.load.peak.load(Ordering::SeqCst), 1);
}

#[test]
fn batches_share_the_threads_and_nothing_exceeds_their_number() {
    let fleet = Fleet::new(8, MIB, 3);
    let regions: Vec<_> = (0..20).map(|number| long_range((1 << 32) + number * 16 * MIB, 8 * MIB)).collect();
    fleet.register(&regions, Parallelism::Parallel).unwrap();
    assert_eq!(fleet.live(), [160; 8]);
    let addresses: Vec<_> = regions.iter().map(MemoryRange::address).collect();
    fleet.registrar.unregister_batch(&addresses, &fleet.transports).unwrap();
    assert_eq!(fleet.live(), [0; 8]);
    assert!(fleet.load.peak.load(Ordering::SeqCst) <= 3, "{}", fleet.load.peak.load(Ordering::SeqCst));
}

#[test]
fn a_transport_that_comes_late_gets_all_regions_or_none() {
    let fleet = Fleet::new(3, MIB, 2);
    let regions = [long_range(MIB, 2 * MIB), long_range(8 * MIB, MIB)];
    fleet.registrar.register_batch(&regions, &options(false), None, &[]).unwrap();
    for device in &fleet.devices {
        for chunk in [1, 2, 8] {
            *device.refuses.lock() = Some(chunk * MIB);
            assert!(fleet.registrar.attach_live(&fleet.transports[0], |_| Ok(())).is_err());
            assert_eq!(fleet.live(), [0; 3]);
            assert!(fleet.registry.live().iter().all(|region| region.is_live() && region.registrations().is_none()));
        }
        *device.refuses.lock() = None;
    }
    let count = || {
        let encoded = std::cell::Cell::new(0);
        fleet.registry.published(&|_, out| {
            encoded.set(encoded.get() + 1);
            out.push('x');
        });
        encoded.get()
    };
    assert_eq!((count(), count()), (2, 0));
    fleet.registrar.attach_live(&fleet.transports[0], |_| Ok(())).unwrap();
    assert_eq!((fleet.live(), count()), (vec![3; 3], 2));
    fleet.registrar.unregister_batch(&[MIB, 8 * MIB], &fleet.transports).unwrap();
    assert_eq!(fleet.live(), [0; 3]);
}

#[test]
fn a_device_that_is_gone_has_no_key() {
    let mut fleet = Fleet::new(3, u64::MAX, 2);
    let load = fleet.load.clone();
    let gone = Scripted {
        name: "gone".into(),
        max_mr_size: 0,
        is_active: false,
        live: Mutex::default(),
        refuses: Mutex::default(),
        keeps: Mutex::default(),
        gate: Mutex::default(),
        load,
        calls: Mutex::default(),
        returns: Mutex::default(),
    };
    fleet.devices[1] = Arc::new(gone);
    fleet.transports = vec![Arc::new(Rig(fleet.devices.clone()))];
    fleet.register(&[long_range(MIB, MIB)], Parallelism::Auto).unwrap();
    let live = fleet.registry.live();
    let chunk = &live[0].registrations().unwrap().chunks()[0];
    assert_eq!([0, 1, 2].map(|device| chunk.key(device).is_some()), [true, false, true]);
    fleet.registrar.unregister(MIB, &fleet.transports).unwrap();
    assert_eq!(fleet.live(), [0; 3]);
}

#[test]
fn the_parts_of_the_cost_add_up() {
    let fleet = Fleet::new(2, u64::MAX, 2);
    fleet.register(&[long_range(1 << 32, 8 * MIB)], Parallelism::Auto).unwrap();
    let live = fleet.registry.live();
    let cost = live[0].cost().unwrap();
    let parts = cost.residency + cost.population + cost.pinning_elapsed + cost.publishing + cost.book_keeping;
    assert_eq!((parts, cost.pinning.len()), (cost.total, 2));
    assert!(cost.residency > Duration::ZERO && cost.pinning.iter().all(|spent| *spent > Duration::ZERO));
    assert_eq!(fleet.counters.registration_pinning_ns.get(), cost.pinning_elapsed.as_nanos() as u64);
    assert_eq!(fleet.counters.registration_residency_ns.get(), cost.residency.as_nanos() as u64);
}

#[test]
fn what_providing_pages_took_is_no_measure_of_giving_them_back() {
    let fleet = Fleet::new(2, u64::MAX, 2);
    let memory = pages::tests::Mapping::anonymous(MIB as usize);
    let look_at = |step| (0..MIB as usize).step_by(step).map(|offset| u32::from(memory.read(offset))).sum::<u32>();
    let pinning = || {
        fleet.register(&[memory.range()], Parallelism::Auto).unwrap();
        let taken = fleet.registry.live()[0].registrations().unwrap().pinning();
        fleet.registrar.unregister(memory.range().address(), &fleet.transports).unwrap();
        taken
    };
    assert_eq!(look_at(4096), 0);
    assert_eq!(pinning(), Duration::ZERO);
    (0..MIB as usize).step_by(4096).for_each(|offset| memory.write(offset, 1));
    assert!(pinning() > Duration::ZERO);
}

/// Gives back 64 MiB of zeros, whose pages the first device has provided, once it is known that sharing took 100 times as long
/// as expected. Most calls at a time, which wait for each other if there are to be two.
fn calls_at_a_time_after_a_bad_one(max_mr_size: u64, wanted: usize) -> Option<usize> {
    let fleet = Fleet::new(2, max_mr_size, 2);
    let memory = pages::tests::Mapping::anonymous(64 * MIB as usize);
    let look_at = |offset| u32::from(memory.read(offset));
    assert_eq!((0..64 * MIB as usize).step_by(4096).map(look_at).sum::<u32>(), 0);
    fleet.register(&[memory.range()], Parallelism::Auto).unwrap();
    if Pagemap::open().is_ok_and(|pagemap| populate::is_huge(memory.range(), &pagemap)) {
        return None;
    }
    let expected = Duration::from_millis(1);
    fleet.registrar.observed.add_release(2, false, expected, 100 * expected);
    fleet.set_gate(wanted);
    fleet.registrar.unregister(memory.range().address(), &fleet.transports).unwrap();
    assert_eq!(fleet.live(), [0; 2]);
    Some(fleet.load.peak.load(Ordering::SeqCst))
}

#[test]
fn what_sharing_the_same_pages_took_keeps_threads_from_it_but_not_from_sharing_chunks() {
    let seen = [(u64::MAX, 1), (16 * MIB, 2)].map(|(max_mr_size, wanted)| calls_at_a_time_after_a_bad_one(max_mr_size, wanted));
    if seen.contains(&None) {
        return eprintln!("skipped: the page of zeros is a large one here");
    }
    assert_eq!(seen, [Some(1), Some(2)]);
}

/// The gate opens only for two at a time.
#[test]
fn pages_that_pinning_provided_are_given_back_by_several_threads() {
    let fleet = Fleet::new(2, u64::MAX, 2);
    let memory = pages::tests::Mapping::anonymous(64 * MIB as usize);
    let look_at = |offset| u32::from(memory.read(offset));
    assert_eq!((0..64 * MIB as usize).step_by(4096).map(look_at).sum::<u32>(), 0);
    fleet.register(&[memory.range()], Parallelism::Auto).unwrap();
    let live = fleet.registry.live();
    assert_eq!((fleet.load.peak.load(Ordering::SeqCst), live[0].registrations().unwrap().pinning()), (1, Duration::ZERO));
    if Pagemap::open().is_ok_and(|pagemap| populate::is_huge(memory.range(), &pagemap)) {
        return eprintln!("skipped: the page of zeros is a large one here");
    }
    fleet.set_gate(2);
    fleet.registrar.unregister(memory.range().address(), &fleet.transports).unwrap();
    assert_eq!((fleet.live(), fleet.load.peak.load(Ordering::SeqCst)), (vec![0; 2], 2));
}

/// The gate opens only for two at a time, so both threads do half of it.
#[test]
fn threads_that_give_chunks_back_are_not_at_the_same_one() {
    for (count, devices) in [(2, 2), (4, 3), (6, 8)] {
        let mut fleet = Fleet::new(devices, MIB, 2);
        fleet.registrar.parallelism = Parallelism::Parallel;
        let regions = [long_range(1 << 32, count / 2 * MIB), long_range(1 << 33, count / 2 * MIB)];
        fleet.register(&regions, Parallelism::Sequential).unwrap();
        fleet.set_gate(2);
        fleet.registrar.unregister_batch(&regions.map(|region| region.address()), &fleet.transports).unwrap();
        assert_eq!(fleet.live(), vec![0; devices]);
        let mut threads_of: BTreeMap<u64, Vec<ThreadId>> = BTreeMap::new();
        for (chunk, thread) in fleet.devices.iter().flat_map(|device| device.returns.lock().clone()) {
            threads_of.entry(chunk).or_default().push(thread);
        }
        assert_eq!(threads_of.len() as u64, count);
        assert!(threads_of.values().all(|threads| threads.iter().all(|thread| *thread == threads[0])), "{threads_of:?}");
        let here = std::thread::current().id();
        assert_eq!(threads_of.values().filter(|threads| threads[0] == here).count() as u64, count / 2);
    }
}

#[test]
fn refusals_name_what_there_is_to_know() {
    let fleet = Fleet::new(1, 4 * MIB, 1);
    *fleet.devices[0].refuses.lock() = Some(MIB);
    let error = fleet.register(&[long_range(MIB, MIB)], Parallelism::Auto).unwrap_err();
    for part in ["0x100000", "1048576 bytes", "fake0", "errno 12", "RLIMIT_MEMLOCK", "max_mr_size 4194304", "max_mr 7", "ulimit -l"]
    {
        assert!(error.message().contains(part), "{part}: {error}");
    }
}
