//! Registering and unregistering memory: from an address range to a region that every installed transport can use, and back.
//!
//! Registering reserves the range, plans, has absent pages provided, registers every chunk with every device of the transports, and
//! commits; a failure undoes what was done, and the range is free again. If undoing fails, too, the range stays blocked (quarantined) and
//! the error says so. Unregistering refuses new work on the region at once, waits for what is in flight, then takes the region from the
//! devices and frees the range.
//!
//! - [`plan`]: chunks, parts and thread counts, from what is known; pure
//! - [`populate`]: which pages are there, and providing the others
//! - [`workers`]: the threads that help
//! - `pinning`: doing what the plan says, and undoing it
//!
//! Two locks of its own: one for moments, of the devices' times, and one that is held while a device that has come back is told of a region: of the live ones, one by one, each of which is not
//! unregistered meanwhile. Who registers at that time compares a count and sees to its own regions, so nobody waits for the other. Cost beyond the devices': two short holds of the registry's mutex for each call, whatever is registered; with
//! devices, some microseconds for the plan and for handing out work, and 10 to 60 µs for looking at pages of ranges from 512 KiB on.

mod pinning;
pub mod plan;
pub mod populate;
#[cfg(test)]
mod tests;
pub mod workers;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

pub use self::pinning::OUT_OF_CACHE;
use self::pinning::{Held, Observed, PinFailure};
use self::plan::{DeviceLimits, JobCost, Settings, Subject};
use self::populate::Residency;
use self::workers::Workers;
use crate::config::{Config, Parallelism};
use crate::error::{Code, Error, Result};
use crate::registry::{Access, Guards, Region, RegionOptions, RegistrationCost, Registrations, Registry, Removal, Reservation};
use crate::sys::pages::{self, Pagemap};
use crate::sys::{MemoryRange, limits};
use crate::telemetry::Counters;
use crate::topology;
use crate::transport::{Device, Transport};

/// How long work in flight may go on before the connections that carry it are closed, and how long until that is tried again.
const GRACE: Duration = Duration::from_millis(100);

/// How long unregistering waits in all before it answers "busy".
pub const DRAIN_LIMIT: Duration = Duration::from_secs(5);

/// Most threads where the configuration does not say; providing pages is bound by the memory long before.
const MOST_THREADS: usize = 64;

/// Giving memory back takes about this part of what pinning it took.
const RELEASE_SHARE: u32 = 4;

/// Registers and unregisters with all of an engine's transports.
pub struct Registrar {
    registry: Arc<Registry>,
    counters: Arc<Counters>,
    workers: Arc<Workers>,
    observed: Arc<Observed>,
    /// Opened when a device first needs it. Engines do not outlive a fork, and it is that of this process.
    pagemap: OnceLock<Option<Pagemap>>,
    /// Held while a device that has come back is told of a region, so that no two threads give a chunk a key.
    returning: Mutex<()>,
    /// How often one was told. Who finds it changed since before asking which devices are active has to look again.
    returns: AtomicU64,
    /// Time inside of each device's calls, by the device's name.
    pinning: Mutex<BTreeMap<String, Duration>>,
    parallelism: Parallelism,
    threads: usize,
    max_mr_size: u64,
}

/// The devices of a call, and when it began.
struct Call {
    devices: Arc<[Arc<dyn Device>]>,
    settings: Settings,
    begin: Instant,
    /// [`Registrar::returns`] at that time.
    returns: u64,
}

impl Registrar {
    /// For the regions of `registry`.
    pub fn new(registry: Arc<Registry>, counters: Arc<Counters>, config: &Config) -> Registrar {
        let threads = match config.registration_threads {
            0 => limits::cpu_count().clamp(1, MOST_THREADS),
            threads => threads,
        };
        Registrar {
            registry,
            counters,
            workers: Workers::of_process(),
            observed: Arc::new(Observed::new(JobCost::ASSUMED)),
            pagemap: OnceLock::new(),
            returning: Mutex::new(()),
            returns: AtomicU64::new(0),
            pinning: Mutex::default(),
            parallelism: config.parallel_registration.unwrap_or_default(),
            threads,
            max_mr_size: config.max_mr_size,
        }
    }

    /// Time inside of each device's calls that registered memory, by the device's name.
    pub fn pinning(&self) -> BTreeMap<String, Duration> {
        self.pinning.lock().clone()
    }

    /// `None` if no transport has a device: there is nothing to plan.
    fn begin(&self, transports: &[Arc<dyn Transport>], parallelism: Option<Parallelism>) -> Option<Call> {
        // Not by iterators: without devices this is a tenth of the cost of a registration as it is.
        let mut devices = Vec::new();
        for transport in transports {
            devices.append(&mut transport.devices());
        }
        if devices.is_empty() {
            return None;
        }
        let settings = Settings {
            parallelism: parallelism.unwrap_or(self.parallelism),
            threads: self.threads,
            max_mr_size: self.max_mr_size,
            page_size: pages::page_size(),
            can_populate: pages::can_populate(),
            cost: self.observed.cost(),
        };
        let returns = self.returns.load(Ordering::SeqCst);
        Some(Call { devices: devices.into(), settings, begin: Instant::now(), returns })
    }

    fn pagemap(&self) -> Option<&Pagemap> {
        self.pagemap.get_or_init(|| Pagemap::open().ok()).as_ref()
    }

    /// What pinning a region takes for each device, where that is not known because it had to provide the pages. They are there by now.
    /// Large ones are given back faster than threads can be called.
    fn estimate_pinning(&self, range: MemoryRange, settings: &Settings) -> Duration {
        let is_huge = || self.pagemap().is_some_and(|pagemap| populate::is_huge(range, pagemap));
        if !plan::needs_sampling(range.length(), settings) || is_huge() {
            return Duration::ZERO;
        }
        settings.cost.of(range.length() / settings.page_size)
    }

    /// Registers one range, and returns its region; `parallelism` overrides the configuration. Errors: InvalidArgument (empty or null),
    /// AddressOverlapped, and what a device answers.
    pub fn register(
        &self,
        range: MemoryRange,
        options: &RegionOptions,
        parallelism: Option<Parallelism>,
        transports: &[Arc<dyn Transport>],
    ) -> Result<Arc<Region>> {
        let call = self.begin(transports, parallelism);
        let reservation = self.registry.reserve(range, options).inspect_err(|_| self.counters.registrations_refused.add(1))?;
        match reservation {
            Reservation::New(region) => {
                self.attach_all(std::slice::from_ref(&region), &[], call, transports)?;
                Ok(region)
            }
            Reservation::Counted(region) => {
                self.counters.regions_registered.add(1);
                Ok(region)
            }
        }
    }

    /// Registers all ranges or none, and returns their regions in no special order. Ranges may come in any order and are published in it;
    /// overlaps among them are refused, too. BatchBusy tells a put or get that it has lost a race, which is no refusal: see
    /// [`Registry::reserve_batch`].
    pub fn register_batch(
        &self,
        ranges: &[MemoryRange],
        options: &RegionOptions,
        parallelism: Option<Parallelism>,
        transports: &[Arc<dyn Transport>],
    ) -> Result<Vec<Arc<Region>>> {
        let call = self.begin(transports, parallelism);
        let reservations = self.registry.reserve_batch(ranges, options).inspect_err(|error| {
            if error.code() != Code::BatchBusy {
                self.counters.registrations_refused.add(ranges.len() as u64);
            }
        })?;
        let (mut new, mut counted) = (Vec::with_capacity(ranges.len()), Vec::new());
        for reservation in reservations {
            match reservation {
                Reservation::New(region) => new.push(region),
                Reservation::Counted(region) => counted.push(region),
            }
        }
        self.attach_all(&new, &counted, call, transports)?;
        new.append(&mut counted);
        Ok(new)
    }

    /// Takes registrations back that were successful, such as those that cannot be published: one reference of each region, and those that
    /// have been given back meanwhile are left alone. The first error of what then stays blocked or busy.
    pub fn revoke(&self, regions: &[Arc<Region>], transports: &[Arc<dyn Transport>]) -> Result<()> {
        self.counters.registrations_refused.add(regions.len() as u64);
        self.give_back_references(regions, transports)
    }

    fn attach_all(
        &self,
        new: &[Arc<Region>],
        counted: &[Arc<Region>],
        call: Option<Call>,
        transports: &[Arc<dyn Transport>],
    ) -> Result<()> {
        let mut cost = None;
        if let Some(call) = &call {
            match self.pin(new, call) {
                Ok((pinned, taken)) => {
                    new.iter().zip(pinned).for_each(|(region, keys)| self.registry.equip(region, keys));
                    cost = Some((taken, call));
                }
                Err(failure) => {
                    self.counters.registrations_refused.add((new.len() + counted.len()) as u64);
                    let error = self.give_back(new, failure);
                    self.counters.regions_registered.add(counted.len() as u64);
                    // Logged where it is found; the caller has to know why the registration failed.
                    let _ = self.give_back_references(counted, transports);
                    return Err(error);
                }
            }
        }
        self.registry.commit(new);
        self.counters.regions_registered.add((new.len() + counted.len()) as u64);
        if let Some((cost, call)) = cost {
            self.keep_cost(new, cost, call);
            self.catch_up(new, call);
        }
        Ok(())
    }

    /// Registers the regions with the call's devices, all or none.
    fn pin(&self, regions: &[Arc<Region>], call: &Call) -> std::result::Result<(Vec<Registrations>, RegistrationCost), PinFailure> {
        let Call { devices, settings, .. } = call;
        let mut cost = RegistrationCost::default();
        let looking = Instant::now();
        let look = |region: &Arc<Region>| {
            let range = region.range();
            let is_worthwhile = plan::needs_sampling(range.length(), settings);
            if !is_worthwhile {
                return Subject { range, residency: Residency::default() };
            }
            Subject { range, residency: populate::sample(range, self.pagemap()) }
        };
        let subjects: Vec<Subject> = regions.iter().map(look).collect();
        cost.residency = looking.elapsed();
        let limits: Vec<DeviceLimits> = devices
            .iter()
            .map(|device| DeviceLimits { max_mr_size: device.max_mr_size(), is_active: device.is_active() })
            .collect();
        let plan = plan::plan(&subjects, &limits, settings);
        let remote = regions.iter().map(|region| region.remote_accessible()).collect();
        let pinned = pinning::pin(plan, remote, devices, &self.workers, &self.observed, &mut cost)?;
        // Where the caller has left it open, now that there are pages.
        let locate = |(region, pinned): (&Arc<Region>, Registrations)| match &**region.location() {
            topology::WILDCARD => pinned.found_at(topology::location_of(region.range())),
            _ => pinned,
        };
        Ok((regions.iter().zip(pinned).map(locate).collect(), cost))
    }

    /// Makes what the call took known with its regions, and adds it up.
    fn keep_cost(&self, regions: &[Arc<Region>], mut cost: RegistrationCost, call: &Call) {
        cost.total = call.begin.elapsed();
        self.counters.registration_latency.record(cost.total, 1);
        let known = cost.residency + cost.population + cost.pinning_elapsed;
        cost.book_keeping = cost.total.saturating_sub(known);
        let Counters {
            registration_residency_ns,
            registration_population_ns,
            registration_pinning_ns,
            registration_book_keeping_ns,
            ..
        } = &*self.counters;
        for (counter, spent) in [
            (registration_residency_ns, cost.residency),
            (registration_population_ns, cost.population),
            (registration_pinning_ns, cost.pinning_elapsed),
            (registration_book_keeping_ns, cost.book_keeping),
        ] {
            counter.add(spent.as_nanos() as u64);
        }
        {
            let mut pinning = self.pinning.lock();
            for (device, spent) in call.devices.iter().zip(&cost.pinning) {
                match pinning.get_mut(device.name()) {
                    Some(sum) => *sum += *spent,
                    None => _ = pinning.insert(device.name().to_string(), *spent),
                }
            }
        }
        let cost = Arc::new(cost);
        regions.iter().for_each(|region| region.set_cost(cost.clone()));
    }

    /// Frees reserved ranges, except for those that a device may still reach. The error for the caller.
    fn give_back(&self, regions: &[Arc<Region>], failure: PinFailure) -> Error {
        let PinFailure { mut error, kept } = failure;
        for (position, region) in regions.iter().enumerate() {
            match kept.iter().find(|(kept, _)| *kept == position) {
                None => self.registry.abandon(std::slice::from_ref(region)),
                Some((_, reason)) => {
                    self.registry.quarantine(region);
                    let (address, length) = (region.range().address(), region.range().length());
                    let text =
                        format!("[{address:#x}, +{length}) stays blocked: undoing its registration failed as well ({reason})");
                    tracing::error!("{text}");
                    error = Error::quiet(error.code(), format!("{}; {text}", error.message()));
                }
            }
        }
        error
    }

    /// Gives one reference of each region back, and unregisters those of which it was the last. Those that have been given back meanwhile
    /// are left alone. The first error, as of [`Registrar::unregister`].
    pub fn give_back_references(&self, regions: &[Arc<Region>], transports: &[Arc<dyn Transport>]) -> Result<()> {
        let mut draining = Vec::new();
        for region in regions {
            match self.registry.start_drain_of(region) {
                Some(Removal::Last(region)) => draining.push(region),
                Some(Removal::Counted) => self.counters.regions_unregistered.add(1),
                None => {}
            }
        }
        self.drain_all(&draining, transports)
    }

    /// See [`Registry::retain`].
    pub fn retain(&self, region: &Region) -> bool {
        let is_live = self.registry.retain(region);
        self.counters.regions_registered.add(u64::from(is_live));
        is_live
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
        let call = self.begin(transports, None);
        let mut busy: Vec<&Arc<Region>> = Vec::new();
        let mut drained: Vec<&Arc<Region>> = Vec::new();
        for region in regions {
            match self.registry.drain(region, Duration::ZERO) {
                // Without devices nothing is won by doing it for all at once.
                true if call.is_none() => self.finish(region),
                true => drained.push(region),
                false => busy.push(region),
            }
        }
        let mut outcome = self.release(&drained, &call);
        if busy.is_empty() {
            return outcome;
        }
        let mut now = Instant::now();
        let end = now + DRAIN_LIMIT;
        loop {
            let pause = end.min(now + GRACE);
            drained.clear();
            busy.retain(|region| {
                let is_drained = self.registry.drain(region, pause.saturating_duration_since(Instant::now()));
                if is_drained {
                    drained.push(region);
                }
                !is_drained
            });
            outcome = outcome.and(self.release(&drained, &call));
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

    /// Takes drained regions from the devices and frees their ranges. All that can be, and the first error.
    fn release(&self, regions: &[&Arc<Region>], call: &Option<Call>) -> Result<()> {
        let Some(Call { devices, settings, .. }) = call else {
            regions.iter().for_each(|region| self.finish(region));
            return Ok(());
        };
        if regions.is_empty() {
            return Ok(());
        }
        let begin = Instant::now();
        let registrations: Vec<_> = regions.iter().map(|region| region.registrations()).collect();
        let outcomes = self.unpin(&registrations, devices, settings);
        self.counters.deregistration_ns.add(begin.elapsed().as_nanos() as u64);
        let mut first = Ok(());
        for (region, outcome) in regions.iter().zip(outcomes) {
            match outcome {
                Ok(()) => self.finish(region),
                Err(error) => {
                    self.registry.quarantine(region);
                    let (address, length) = (region.range().address(), region.range().length());
                    let text =
                        format!("{}; [{address:#x}, +{length}) stays blocked, for a device may still reach it", error.message());
                    first = first.and(Err(Error::quiet(error.code(), text)));
                }
            }
        }
        first
    }

    /// Gives all their keys back. One answer for each element.
    fn unpin(
        &self,
        registrations: &[Option<&Registrations>],
        devices: &Arc<[Arc<dyn Device>]>,
        settings: &Settings,
    ) -> Vec<Result<()>> {
        let (mut held, mut costs, mut chunk_count) = (Vec::new(), Vec::new(), 0);
        for (position, registrations) in registrations.iter().enumerate() {
            let Some(registrations) = registrations else { continue };
            let before = held.len();
            for chunk in registrations.chunks() {
                // Each chunk from another device on, so that threads at different chunks are not at the same device, either.
                let count = chunk.device_count();
                let keys = (0..count).map(|step| (chunk_count + step) % count);
                let keys = keys.filter_map(|device| Some((device, chunk.key(device)?)));
                held.extend(keys.map(|(device, key)| Held { region: position, chunk: chunk_count, device, key }));
                chunk_count += 1;
            }
            let count = (held.len() - before) as u32;
            let pinning = match (registrations.pinning(), registrations.chunks()) {
                (Duration::ZERO, [first, ..]) if count > 1 => self.estimate_pinning(first.range(), settings),
                (known, _) => known / count.max(1),
            };
            costs.resize(held.len(), pinning / RELEASE_SHARE);
        }
        let longest = costs.iter().copied().max().unwrap_or_default();
        let expected = costs.iter().sum();
        let threads = plan::team(costs.into_iter(), settings);
        let by_chunks = pinning::is_shared_by_chunks(&held, threads);
        let threads = match settings.parallelism {
            Parallelism::Auto => self.observed.release_threads(threads, by_chunks),
            _ => threads,
        };
        let begin = Instant::now();
        let outcomes = pinning::unpin(held, registrations.len(), threads, longest, devices, &self.workers);
        self.observed.add_release(threads, by_chunks, expected, begin.elapsed());
        outcomes
    }

    fn finish(&self, region: &Arc<Region>) {
        self.registry.finish(region);
        self.counters.regions_unregistered.add(1);
    }

    /// Makes all live regions known to the devices of one more transport, or none of them. Only while nobody registers or unregisters.
    /// `confirm` is told of the keys that regions will have, none where the transport has no devices; if it fails, nothing has changed.
    pub fn attach_live(
        &self,
        transport: &Arc<dyn Transport>,
        confirm: impl FnOnce(&[(Arc<Region>, Registrations)]) -> Result<()>,
    ) -> Result<()> {
        let Some(call) = self.begin(std::slice::from_ref(transport), None) else { return confirm(&[]) };
        let regions = self.registry.live();
        let confirmed = self.pin(&regions, &call).and_then(|(pinned, cost)| {
            let keys: Vec<_> = regions.iter().cloned().zip(pinned).collect();
            match confirm(&keys) {
                Ok(()) => Ok((keys, cost)),
                Err(error) => {
                    let registrations: Vec<_> = keys.iter().map(|(_, registrations)| Some(registrations)).collect();
                    let outcomes = self.unpin(&registrations, &call.devices, &call.settings);
                    let kept = outcomes.into_iter().enumerate().filter_map(|(region, outcome)| Some((region, outcome.err()?)));
                    Err(PinFailure { error, kept: kept.collect() })
                }
            }
        });
        match confirmed {
            Ok((keys, cost)) => {
                self.registry.equip_live(keys);
                self.keep_cost(&regions, cost, &call);
                self.catch_up(&regions, &call);
                Ok(())
            }
            Err(PinFailure { mut error, kept }) => {
                // The regions stay as they are: the transport is not used, and closing the device ends its access.
                for (position, reason) in kept {
                    let (address, length) = (regions[position].range().address(), regions[position].range().length());
                    let text = format!("undoing it for [{address:#x}, +{length}) failed as well ({reason})");
                    error = Error::quiet(error.code(), format!("{}; {text}", error.message()));
                }
                Err(error)
            }
        }
    }

    /// Makes all live regions known to a device that has come back; `position` is its place among those of the transports. What it refuses
    /// is logged, and stays with the other devices. Peers see the new keys. Returns early where that is not wanted any more. No region
    /// is missed if it is called, once more, after the device has become active.
    pub fn attach_device(&self, position: usize, device: &dyn Device, is_wanted: &dyn Fn() -> bool) {
        // Before the regions are listed: whoever has begun without the device, and commits after that, sees it.
        self.returns.fetch_add(1, Ordering::SeqCst);
        self.attach_regions(&self.registry.live(), position, device, is_wanted);
    }

    /// Makes regions that were just committed known to devices that have come back since the call began.
    fn catch_up(&self, regions: &[Arc<Region>], call: &Call) {
        if self.returns.load(Ordering::SeqCst) != call.returns {
            for (position, device) in call.devices.iter().enumerate().filter(|(_, device)| device.is_active()) {
                self.attach_regions(regions, position, &**device, &|| true);
            }
        }
    }

    fn attach_regions(&self, regions: &[Arc<Region>], position: usize, device: &dyn Device, is_wanted: &dyn Fn() -> bool) {
        for region in regions {
            if !is_wanted() {
                return;
            }
            // For each anew: who registers meanwhile does not wait for all that there is.
            let _alone = self.returning.lock();
            let range = region.range();
            // Nobody unregisters it meanwhile.
            let guards = self.registry.read(|view| view.acquire(range.address(), range.length(), Access::Local));
            // Another one may have its range by now, which was registered with the device, or is told of later.
            let is_it = |guards: &Guards| guards.iter().any(|guard| Arc::ptr_eq(guard.region(), region));
            let Some(_guards) = guards.ok().filter(is_it) else { continue };
            let chunks = region.registrations().map_or(&[][..], Registrations::chunks);
            let missing = chunks.iter().filter(|chunk| !chunk.key(position).is_some_and(|key| device.knows(&key)));
            let mut has_changed = false;
            for chunk in missing {
                // The error is logged where it is found.
                chunk.replace(position, device.register(chunk.range(), region.remote_accessible()).ok());
                has_changed = true;
            }
            if has_changed {
                self.registry.republish(region);
            }
        }
    }
}
