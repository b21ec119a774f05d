//! Registering and unregistering memory: from an address range to a region that every installed transport can use, and back.
//!
//! Registering reserves the range, registers it with each device of the transports, and commits; a failure undoes what was done, and the range
//! is free again. If undoing fails, too, the range stays blocked (quarantined) and the log says so. Unregistering refuses new work on
//! the region at once, waits for what is in flight, then takes the region from the devices and frees the range.
//!
//! No lock of its own. Cost beyond the devices': two short holds of the registry's mutex for each call, whatever is registered.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Code, Error, Result};
use crate::registry::{Access, Chunk, MemoryKey, Region, RegionOptions, Registrations, Registry, Removal, Reservation};
use crate::sys::MemoryRange;
use crate::telemetry::Counters;
use crate::transport::{Device, Transport};

/// How long work in flight may go on before the connections that carry it are closed, and how long until that is tried again.
const GRACE: Duration = Duration::from_millis(100);

/// How long unregistering waits in all before it answers "busy".
const DRAIN_LIMIT: Duration = Duration::from_secs(5);

/// Registers and unregisters with all of an engine's transports.
pub struct Registrar {
    registry: Arc<Registry>,
    counters: Arc<Counters>,
}

impl Registrar {
    /// For the regions of `registry`.
    pub fn new(registry: Arc<Registry>, counters: Arc<Counters>) -> Registrar {
        Registrar { registry, counters }
    }

    /// Registers one range. Errors: InvalidArgument (empty or null), AddressOverlapped, and what a device answers.
    pub fn register(&self, range: MemoryRange, options: &RegionOptions, transports: &[Arc<dyn Transport>]) -> Result<()> {
        let reservation = self.registry.reserve(range, options).inspect_err(|_| self.counters.registrations_refused.add(1))?;
        match reservation {
            Reservation::New(region) => self.attach_all(std::slice::from_ref(&region), &[], transports),
            Reservation::Counted(_) => {
                self.counters.regions_registered.add(1);
                Ok(())
            }
        }
    }

    /// Registers all ranges or none. Ranges may come in any order and are published in it; overlaps among them are refused, too.
    pub fn register_batch(&self, ranges: &[MemoryRange], options: &RegionOptions, transports: &[Arc<dyn Transport>]) -> Result<()> {
        let reservations = self
            .registry
            .reserve_batch(ranges, options)
            .inspect_err(|_| self.counters.registrations_refused.add(ranges.len() as u64))?;
        let (mut new, mut counted) = (Vec::with_capacity(ranges.len()), Vec::new());
        for reservation in reservations {
            match reservation {
                Reservation::New(region) => new.push(region),
                Reservation::Counted(region) => counted.push(region),
            }
        }
        self.attach_all(&new, &counted, transports)
    }

    fn attach_all(&self, new: &[Arc<Region>], counted: &[Arc<Region>], transports: &[Arc<dyn Transport>]) -> Result<()> {
        let devices = devices_of(transports);
        if !devices.is_empty() {
            match pin(new, &devices) {
                Ok(pinned) => new.iter().zip(pinned).for_each(|(region, keys)| self.registry.equip(region, keys)),
                Err(failure) => {
                    self.counters.registrations_refused.add((new.len() + counted.len()) as u64);
                    self.give_back(new, &failure);
                    self.drop_references(counted, transports);
                    return Err(failure.error);
                }
            }
        }
        self.registry.commit(new);
        self.counters.regions_registered.add((new.len() + counted.len()) as u64);
        Ok(())
    }

    /// Frees reserved ranges, except for those that a device may still reach.
    fn give_back(&self, regions: &[Arc<Region>], failure: &PinFailure) {
        for (position, region) in regions.iter().enumerate() {
            match failure.kept.iter().find(|(kept, _)| *kept == position) {
                None => self.registry.abandon(std::slice::from_ref(region)),
                Some((_, error)) => {
                    let (address, length, cause) = (region.range().address(), region.range().length(), &failure.error);
                    tracing::error!(
                        "[{address:#x}, +{length}) stays blocked: its registration failed ({cause}), and undoing it as well ({error})"
                    );
                    self.registry.quarantine(region);
                }
            }
        }
    }

    /// Gives counted references back after a failure.
    fn drop_references(&self, counted: &[Arc<Region>], transports: &[Arc<dyn Transport>]) {
        let mut last = Vec::new();
        for region in counted {
            // The others may have been given back meanwhile.
            if let Ok(Removal::Last(region)) = self.registry.start_drain(region.range().address()) {
                last.push(region);
            }
        }
        // Logged where it is found; the caller has to know why the registration failed.
        let _ = self.drain_all(&last, transports);
    }

    /// Unregisters the region that starts at `address`. Errors: AddressNotRegistered; BatchBusy when work in flight did not end within
    /// five seconds (call again; the region takes no new work meanwhile) or another thread is unregistering it; what a device answers.
    pub fn unregister(&self, address: u64, transports: &[Arc<dyn Transport>]) -> Result<()> {
        match self.registry.start_drain(address)? {
            Removal::Counted => self.counters.regions_unregistered.add(1),
            Removal::Last(region) => self.drain_all(&[region], transports)?,
        }
        Ok(())
    }

    /// Unregisters all that can be, and returns the first error.
    pub fn unregister_batch(&self, addresses: &[u64], transports: &[Arc<dyn Transport>]) -> Result<()> {
        let mut outcome = Ok(());
        let mut draining = Vec::with_capacity(addresses.len());
        for removal in self.registry.start_drain_batch(addresses) {
            match removal {
                Ok(Removal::Last(region)) => draining.push(region),
                Ok(Removal::Counted) => self.counters.regions_unregistered.add(1),
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        outcome.and(self.drain_all(&draining, transports))
    }

    /// Waits for what is in flight on regions that take no new work, and releases them. The time limits are shared.
    fn drain_all(&self, regions: &[Arc<Region>], transports: &[Arc<dyn Transport>]) -> Result<()> {
        let mut busy: Vec<&Arc<Region>> = Vec::new();
        let mut outcome = Ok(());
        for region in regions {
            if self.registry.drain(region, Duration::ZERO) {
                outcome = outcome.and(self.release(region, transports));
            } else {
                busy.push(region);
            }
        }
        if busy.is_empty() {
            return outcome;
        }
        let mut now = Instant::now();
        let end = now + DRAIN_LIMIT;
        loop {
            let pause = end.min(now + GRACE);
            busy.retain(|region| {
                let drained = self.registry.drain(region, pause.saturating_duration_since(Instant::now()));
                if drained {
                    outcome = std::mem::replace(&mut outcome, Ok(())).and(self.release(region, transports));
                }
                !drained
            });
            now = Instant::now();
            if busy.is_empty() || now >= end {
                break;
            }
            // Again each time: work that is on its way from one queue to another is not seen.
            for region in &busy {
                transports.iter().for_each(|transport| transport.evict(region.range()));
            }
        }
        for region in busy {
            self.registry.give_up_drain(region);
            let (address, length, uses) = (region.range().address(), region.range().length(), region.in_flight());
            let error = Error::new(
                Code::BatchBusy,
                format!(
                    "[{address:#x}, +{length}) is still used by {uses} transfers after {DRAIN_LIMIT:?}; it takes no new ones: unregister it again later, and do not unmap it before"
                ),
            );
            outcome = outcome.and(Err(error));
        }
        outcome
    }

    fn release(&self, region: &Arc<Region>, transports: &[Arc<dyn Transport>]) -> Result<()> {
        match unpin(region, &devices_of(transports)) {
            Ok(()) => {
                self.registry.finish(region);
                self.counters.regions_unregistered.add(1);
                Ok(())
            }
            Err(error) => {
                self.registry.quarantine(region);
                Err(error)
            }
        }
    }

    /// Makes all live regions known to the devices of one more transport, or none of them. Only while nobody registers or unregisters.
    pub fn attach_live(&self, transport: &Arc<dyn Transport>) -> Result<()> {
        let devices = transport.devices();
        if devices.is_empty() {
            return Ok(());
        }
        let regions = self.registry.live();
        // What is kept by a device that will not be used matters to nobody but the device.
        let pinned = pin(&regions, &devices).map_err(|failure| failure.error)?;
        self.registry.equip_live(regions.into_iter().zip(pinned).collect());
        Ok(())
    }

    /// Makes all live regions known to a device that has come back; `position` is its place among those of the transports. What it refuses
    /// is logged, and stays with the other devices. Peers see the new keys.
    pub fn attach_device(&self, position: usize, transports: &[Arc<dyn Transport>]) {
        let Some(device) = transports.iter().flat_map(|transport| transport.devices()).nth(position) else { return };
        for region in self.registry.live() {
            let range = region.range();
            // Nobody unregisters it meanwhile.
            let Ok(_guards) = self.registry.read(|view| view.acquire(range.address(), range.length(), Access::Local)) else { continue };
            let chunks = region.registrations().map_or(&[][..], Registrations::chunks);
            let missing: Vec<_> = chunks.iter().filter(|chunk| chunk.key(position).is_none()).collect();
            for chunk in &missing {
                // The error is logged where it is found.
                if let Ok(key) = device.register(chunk.range(), region.remote_accessible()) {
                    chunk.replace(position, Some(key));
                }
            }
            if !missing.is_empty() {
                self.registry.republish(&region);
            }
        }
    }
}

fn devices_of(transports: &[Arc<dyn Transport>]) -> Vec<Arc<dyn Device>> {
    transports.iter().flat_map(|transport| transport.devices()).collect()
}

/// Why memory could not be registered, and what could not be undone.
struct PinFailure {
    error: Error,
    /// Positions of regions that a device may still reach, and why.
    kept: Vec<(usize, Error)>,
}

/// Registers all regions with all devices, or none.
fn pin(regions: &[Arc<Region>], devices: &[Arc<dyn Device>]) -> std::result::Result<Vec<Registrations>, PinFailure> {
    let mut done = Vec::new();
    for (position, region) in regions.iter().enumerate() {
        for (number, device) in devices.iter().enumerate().filter(|(_, device)| device.is_active()) {
            match device.register(region.range(), region.remote_accessible()) {
                Ok(key) => done.push((position, number, key)),
                Err(error) => {
                    let undo = |(position, number, key): &(usize, usize, MemoryKey)| {
                        devices[*number].deregister(key).err().map(|error| (*position, error))
                    };
                    return Err(PinFailure { error, kept: done.iter().filter_map(undo).collect() });
                }
            }
        }
    }
    let registrations = |(position, region): (usize, &Arc<Region>)| {
        let mut keys = vec![None; devices.len()];
        done.iter().filter(|(of, ..)| *of == position).for_each(|(_, number, key)| keys[*number] = Some(*key));
        Registrations::new(vec![Chunk::new(region.range(), &keys)])
    };
    Ok(regions.iter().enumerate().map(registrations).collect())
}

fn unpin(region: &Region, devices: &[Arc<dyn Device>]) -> Result<()> {
    let mut outcome = Ok(());
    for chunk in region.registrations().map_or(&[][..], Registrations::chunks) {
        for (number, device) in devices.iter().enumerate() {
            if let Some(key) = chunk.key(number) {
                outcome = outcome.and(device.deregister(&key));
            }
        }
    }
    outcome
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use parking_lot::Mutex;

    use super::*;
    use crate::registry::Access;
    use crate::transport::{Segment, Slice};

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
        fn submit(&self, _segment: &Arc<dyn Segment>, _slices: Vec<Slice>) {}
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
        registrar: Registrar,
        transports: Vec<Arc<dyn Transport>>,
        first: Arc<Moody>,
        second: Arc<Moody>,
    }

    impl Bench {
        fn new() -> Bench {
            let registry = Arc::new(Registry::new());
            let (first, second) = (Moody::new(), Moody::new());
            Bench {
                registrar: Registrar::new(registry.clone(), Arc::default()),
                registry,
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
        RegionOptions { location: "*".into(), remote_accessible: true, counted }
    }

    #[test]
    fn a_failing_transport_leaves_nothing_behind() {
        let bench = Bench::new();
        *bench.second.refuses.lock() = Some(0x3000);
        let ranges: Vec<_> = [0x1000, 0x2000, 0x3000, 0x4000].map(range).into();
        let error = bench.registrar.register_batch(&ranges, &options(false), &bench.transports).unwrap_err();
        assert_eq!(error.code(), Code::Context);
        assert_eq!((bench.registry.len(), bench.first.attached.lock().len(), bench.second.attached.lock().len()), (0, 0, 0));
        *bench.second.refuses.lock() = None;
        bench.registrar.register_batch(&ranges, &options(false), &bench.transports).unwrap();
        assert_eq!(bench.registry.live().len(), 4);
    }

    #[test]
    fn a_failing_undo_blocks_the_range() {
        let bench = Bench::new();
        *bench.second.refuses.lock() = Some(0x1000);
        *bench.first.keeps.lock() = true;
        assert!(bench.registrar.register(range(0x1000), &options(false), &bench.transports).is_err());
        assert_eq!(bench.registry.len(), 1);
        assert!(bench.registry.live().is_empty());
        let error = bench.registrar.register(range(0x1000), &options(false), &bench.transports).unwrap_err();
        assert_eq!(error.code(), Code::AddressOverlapped);
    }

    #[test]
    fn counted_registrations_end_with_the_last() {
        let bench = Bench::new();
        for _ in 0..3 {
            bench.registrar.register(range(0x1000), &options(true), &bench.transports).unwrap();
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
        bench.registrar.register(range(0x1000), &options(true), &bench.transports).unwrap();
        *bench.first.refuses.lock() = Some(0x2000);
        assert!(bench.registrar.register_batch(&[range(0x1000), range(0x2000)], &options(true), &bench.transports).is_err());
        bench.registrar.unregister(0x1000, &bench.transports).unwrap();
        assert_eq!(bench.registry.len(), 0);
    }

    #[test]
    fn unregistering_a_batch_does_all_it_can() {
        let bench = Bench::new();
        let ranges: Vec<_> = (1..=100).map(|page| range(page * 0x1000)).collect();
        bench.registrar.register_batch(&ranges, &options(false), &bench.transports).unwrap();
        let mut addresses: Vec<_> = ranges.iter().map(MemoryRange::address).collect();
        addresses[50] += 8;
        let error = bench.registrar.unregister_batch(&addresses, &bench.transports).unwrap_err();
        assert_eq!((error.code(), bench.registry.len()), (Code::AddressNotRegistered, 1));
    }

    #[test]
    fn a_reference_that_became_the_last_is_given_back_by_a_failing_batch() {
        let bench = Bench::new();
        bench.registrar.register(range(0x1000), &options(true), &bench.transports).unwrap();
        *bench.first.refuses.lock() = Some(0x2000);
        let (registry, transports) = (bench.registry.clone(), bench.transports.clone());
        let unregister = move || Registrar::new(registry, Arc::default()).unregister(0x1000, &transports).unwrap();
        *bench.first.meanwhile.lock() = Some(Box::new(unregister));
        assert!(bench.registrar.register_batch(&[range(0x1000), range(0x2000)], &options(true), &bench.transports).is_err());
        assert_eq!((bench.registry.len(), bench.first.attached.lock().len()), (0, 0));
    }

    #[test]
    fn work_that_an_eviction_overlooks_is_found_by_the_next() {
        let bench = Bench::new();
        bench.registrar.register(range(0x1000), &options(false), &bench.transports).unwrap();
        let Ok(guards) = bench.registry.read(|view| view.acquire(0x1000, 10, Access::Remote)) else { panic!("no guard") };
        *bench.first.held.lock() = Some(guards);
        *bench.first.misses.lock() = 2;
        bench.registrar.unregister(0x1000, &bench.transports).unwrap();
        assert_eq!((bench.first.evicted.lock().len(), bench.registry.len()), (3, 0));
    }

    #[test]
    fn unregistering_waits_for_work_in_flight_and_then_evicts_it() {
        let bench = Bench::new();
        bench.registrar.register(range(0x1000), &options(false), &bench.transports).unwrap();
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
        bench.registrar.register_batch(&ranges, &options(false), &[]).unwrap();
        *bench.first.refuses.lock() = Some(0x3000);
        assert!(bench.registrar.attach_live(&bench.transports[0]).is_err());
        assert!(bench.first.attached.lock().is_empty());
        bench.registrar.attach_live(&bench.transports[1]).unwrap();
        assert_eq!(bench.second.attached.lock().len(), 3);
    }
}
