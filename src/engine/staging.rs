//! Puts and gets through a pool: many items at once, each by the way that suits it, with retries and one time limit.
//!
//! [`plan`] says which items wait for which (waves), how each gets there and which share a lease; here that is done:
//!
//! - What is in registered memory, or goes by a transport that needs none, is transferred from where it is.
//! - What cannot be staged is registered for the call, each run of bytes once, and unregistered in all cases. Calls that use the same bytes at
//!   a time share the region: it has a reference for each of them, and the last one unregisters it. The call that has registered it returns no
//!   sooner, and nobody shares it from the moment that it wants to: as long as others find the region, all of its bytes are mapped where they were.
//! - All else is staged: copied into a lease before that is transferred (put), or out of it afterwards (get). One group is copied while
//!   those before are transferred, as many as two of the largest leases hold and no more than eight; they are landed as they end, since to sleep for
//!   each would wake the threads of all NICs each time. Long items that are put are divided into parts for it, each a group; an item has completed
//!   when all of its parts have. What is got is not divided, since the caller's memory is touched only when all of it is there.
//!
//! **A lease is not used twice at a time.** What ends a group gives its lease back with the batch that used it, so that it stays out of use
//! until no task of that batch is running, whatever happens here.
//!
//! **Calls do not wait for each other in a circle.** None waits for a lease while it has any: it finishes the groups that have them first.
//! Whoever waits for a range to be registered or unregistered has nothing registered meanwhile, and registering waits for nobody. Whoever waits for
//! those who share its regions has ended everything else.
//!
//! **The caller's memory is left alone after the return**: transfers from and to it are waited for until they are over, which their deadline
//! sees to. Those that use a lease are not waited for beyond it.
//!
//! Locks: none of its own, and none of others over a copy, a registration's use, a transfer or a wait. Memory that it takes grows with the number of
//! items, not with their bytes.

use std::cell::LazyCell;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::Engine;
use crate::error::{Code, Error, Result};
use crate::pool::choice::{Class, Path, Pick};
use crate::pool::copy;
use crate::pool::plan::{self, Preference, Target, Way};
use crate::pool::{Direction, Fallback, Lease, Outcome, Pool};
use crate::registration::DRAIN_LIMIT;
use crate::registry::{Owner, Region, RegionOptions};
use crate::sys::MemoryRange;
use crate::sys::device_memory::Driver;
use crate::transfer::{Batch, BatchHost, Hints, Request, State, SubmitOptions, TaskStatus};
use crate::transport::Opcode;

/// Bytes that are put or got.
#[derive(Clone, Copy, Debug)]
pub struct Item {
    /// Memory of this process, which need not be registered.
    pub local: MemoryRange,
    /// Id of an opened segment.
    pub segment: u64,
    /// Start of the range there, which is as long.
    pub remote_address: u64,
}

/// Bytes that are got into a lease.
#[derive(Clone, Copy, Debug)]
pub struct LeasedItem {
    /// How many.
    pub length: u64,
    /// Id of an opened segment.
    pub segment: u64,
    /// Where they are there.
    pub remote_address: u64,
}

/// How to put or get.
#[derive(Clone, Copy, Debug, Default)]
pub struct StagingOptions {
    /// How the bytes get there.
    pub preference: Preference,
    /// How often an item that has failed is transferred once more.
    pub retries: u32,
    /// How long to wait before that.
    pub retry_pause: Duration,
    /// When the call gives up.
    pub deadline: Option<Instant>,
}

/// What has become of a put or get that was begun.
#[derive(Debug)]
pub struct Finished {
    /// One for each item, in order.
    pub statuses: Vec<TaskStatus>,
    /// Why memory that was registered for the call could not be unregistered, if it could not.
    pub undone: Result<()>,
}

/// How long to wait for others who are registering or unregistering the same memory, at first and at most.
const SHORT_PAUSE: Duration = Duration::from_micros(50);
const LONG_PAUSE: Duration = Duration::from_millis(5);

const NOT_BEGUN: &str = "it had not been begun";

impl Engine {
    /// Moves the bytes of all items to their segments, and returns when that is over. Of items that arrive at the same bytes the last one in
    /// order wins.
    ///
    /// Errors, with which nothing was begun: InvalidArgument for a pool of another engine or an unknown segment, NotSupportedTransport,
    /// InvalidHandle if the pool is closed, Canceled if it or the engine is being closed.
    pub fn put(&self, pool: &Arc<Pool>, items: &[Item], options: StagingOptions) -> Result<Finished> {
        self.move_items(pool, Direction::Put, items, options)
    }

    /// Moves bytes of segments into the memory of the items; see [`Engine::put`].
    pub fn get(&self, pool: &Arc<Pool>, items: &[Item], options: StagingOptions) -> Result<Finished> {
        self.move_items(pool, Direction::Get, items, options)
    }

    fn move_items(&self, pool: &Arc<Pool>, direction: Direction, items: &[Item], options: StagingOptions) -> Result<Finished> {
        self.check_pool(pool)?;
        let _call = pool.begin_call()?;
        let devices = self.devices_of(items.iter().map(|item| item.segment).collect())?;
        let mut run = Run::new(self, pool, direction, items, options, devices);
        let usage = pool.usage();
        if direction == Direction::Put { &usage.puts } else { &usage.gets }.add(1);
        run.run();
        Ok(run.finish())
    }

    /// Gets all items, one after the other, into one lease, which is the caller's if all have completed.
    ///
    /// Errors, with which nothing was begun: as of [`Engine::put`], and those of [`Pool::acquire`].
    pub fn get_leased(&self, pool: &Arc<Pool>, items: &[LeasedItem], options: StagingOptions) -> Result<(Finished, Option<Lease>)> {
        self.check_pool(pool)?;
        let _call = pool.begin_call()?;
        let bytes = items.iter().fold(0_u64, |sum, item| sum.saturating_add(item.length));
        let limit = match pool.fallback() {
            Fallback::Wait => options.deadline.map(|end| end.saturating_duration_since(Instant::now())),
            Fallback::Register | Fallback::Fail => Some(Duration::ZERO),
        };
        // Before it waits for a lease.
        let devices = self.devices_of(items.iter().map(|item| item.segment).collect())?;
        let held = Held { pool, lease: Some(pool.acquire(Direction::Get, bytes, limit)?), batch: None };
        let lengths: Vec<u64> = items.iter().map(|item| item.length).collect();
        let parts = held.parts(&lengths)?;
        let place =
            |(item, local): (&LeasedItem, MemoryRange)| Item { local, segment: item.segment, remote_address: item.remote_address };
        let items: Vec<Item> = items.iter().zip(parts).map(place).collect();
        let mut run = Run::new(self, pool, Direction::Get, &items, options, devices);
        let usage = pool.usage();
        usage.gets.add(1);
        usage.items_staged.add(items.len() as u64);
        usage.bytes_staged.add(bytes);
        let work = items.iter().enumerate().map(|(item, Item { local, .. })| Work { item, offset: 0, local: *local }).collect();
        let mut flight = run.launch(work, Hold::Lease(held));
        run.land(&mut flight);
        let finished = run.finish();
        let is_whole = finished.statuses.iter().all(|status| status.state == State::Completed);
        match flight.hold {
            Hold::Lease(mut held) if is_whole => Ok((finished, held.lease.take())),
            _ => Ok((finished, None)),
        }
    }

    fn check_pool(&self, pool: &Arc<Pool>) -> Result<()> {
        self.check_open()?;
        if self.pools.lock().iter().any(|(own, _)| Arc::ptr_eq(own, pool)) {
            return Ok(());
        }
        self.check_open()?;
        // A closed pool says so.
        drop(pool.begin_call()?);
        Err(Error::new(Code::InvalidArgument, "the pool belongs to another engine; use one that this engine has created"))
    }

    /// For each segment, sorted, how many devices memory must be registered with to be transferred there.
    fn devices_of(&self, mut segments: Vec<u64>) -> Result<Vec<(u64, usize)>> {
        segments.sort_unstable();
        segments.dedup();
        let transports = self.transports.read();
        self.check_open()?;
        let devices = |segment| Ok((segment, self.route(&transports, segment)?.transport.devices().len()));
        segments.into_iter().map(devices).collect()
    }
}

/// A lease that is given back when this is dropped.
struct Held<'a> {
    pool: &'a Pool,
    lease: Option<Lease>,
    /// Whose tasks use it, if there were any.
    batch: Option<Arc<Batch>>,
}

impl Held<'_> {
    /// Its bytes, divided into parts of these lengths.
    fn parts(&self, lengths: &[u64]) -> Result<Vec<MemoryRange>> {
        let parts = self.lease.and_then(|lease| lease.memory.parts(lengths.iter().copied()).collect());
        parts.ok_or_else(|| Error::new(Code::Internal, format!("a lease has no room for parts of {lengths:?} bytes")))
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if let Some(lease) = self.lease {
            let outcome = self.batch.take().map_or(Outcome::Over, Outcome::Unknown);
            // Refused only after the engine was destroyed, when all leases have ended.
            let _ = self.pool.release(lease.id, outcome);
        }
    }
}

/// Regions of puts and gets, each of which one reference is given back when this is dropped.
struct Registered<'a> {
    engine: &'a Engine,
    pool: &'a Pool,
    /// By their numbers.
    regions: BTreeMap<u64, Arc<Region>>,
    /// What this has ever registered.
    own: Vec<Arc<Region>>,
}

impl<'a> Registered<'a> {
    /// Has all of the ranges registered, which do not touch. One answer for each.
    fn cover_each(&mut self, ranges: &[MemoryRange], deadline: Option<Instant>) -> Vec<Result<()>> {
        let mut pause = SHORT_PAUSE;
        loop {
            match self.cover(ranges) {
                Some(Ok(())) => return vec![Ok(()); ranges.len()],
                Some(Err(error)) if ranges.len() == 1 => return vec![Err(error)],
                // Those that can be.
                Some(Err(_)) => {
                    let outcomes = ranges.iter().map(|range| self.cover(std::slice::from_ref(range)));
                    if let Some(outcomes) = outcomes.collect::<Option<Vec<_>>>() {
                        return outcomes;
                    }
                }
                None => {}
            }
            // Those who are waited for may wait for these. Logged where it is found.
            let _ = self.unregister();
            if let Err(error) = self.engine.check_open() {
                return vec![Err(error); ranges.len()];
            }
            if deadline.is_some_and(|end| Instant::now() >= end) {
                let error = out_of_time("its memory was still being registered or unregistered by another call");
                return vec![Err(error); ranges.len()];
            }
            self.pool.pause(pause);
            pause = (pause * 2).min(LONG_PAUSE);
        }
    }

    /// Has all of the ranges registered, or an error. What is live stays as it is; what a put or get has registered is kept for this one, too. `None`
    /// if somebody is about to register or unregister some of it, which is to be waited for.
    fn cover(&mut self, ranges: &[MemoryRange]) -> Option<Result<()>> {
        let gaps = self.find_gaps(ranges)?;
        match self.register(&gaps) {
            // Somebody was faster.
            Err(error) if error.code() == Code::BatchBusy => None,
            outcome => Some(outcome),
        }
    }

    /// What is not live of the ranges; `None` if part of that is about to change.
    fn find_gaps(&mut self, ranges: &[MemoryRange]) -> Option<Vec<MemoryRange>> {
        let mut gaps = Vec::new();
        for range in ranges {
            let regions = self.engine.registry.read(|view| view.within(*range));
            let mut covering = Vec::with_capacity(regions.len());
            for region in regions {
                // Asked once: what is about to become live has no reference of this call.
                let is_kept = match region.owner() {
                    Owner::Call => self.keep(&region),
                    _ => region.is_live(),
                };
                if is_kept {
                    covering.push(region.range());
                } else if region.is_passing() {
                    return None;
                }
                // What is in the way for good is said by trying.
            }
            gaps.extend(plan::gaps(*range, covering.into_iter()));
        }
        Some(gaps)
    }

    /// Whether it has a reference of this call, which is taken if it can be had.
    fn keep(&mut self, region: &Arc<Region>) -> bool {
        if self.regions.contains_key(&region.sequence()) {
            return true;
        }
        let is_retained = self.engine.registrar.retain(region);
        if is_retained {
            self.regions.insert(region.sequence(), region.clone());
        }
        is_retained
    }

    fn register(&mut self, gaps: &[MemoryRange]) -> Result<()> {
        if gaps.is_empty() {
            return Ok(());
        }
        // Peers have no use for it, so they are not told.
        let options = RegionOptions { location: "*".into(), remote_accessible: false, counted: false, owner: Owner::Call };
        let transports = self.engine.transports.read();
        self.engine.check_open()?;
        let regions = self.engine.registrar.register_batch(gaps, &options, None, &transports)?;
        self.pool.usage().registrations.add(regions.len() as u64);
        self.own.extend_from_slice(&regions);
        self.regions.extend(regions.into_iter().map(|region| (region.sequence(), region)));
        Ok(())
    }

    fn unregister(&mut self) -> Result<()> {
        let regions: Vec<_> = std::mem::take(&mut self.regions).into_values().collect();
        if regions.is_empty() {
            return Ok(());
        }
        self.engine.registry.end_sharing(&self.own);
        self.engine.registrar.give_back_references(&regions, &self.engine.transports.read())
    }
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        // Logged where it is found.
        let _ = self.unregister();
    }
}

/// An item that is to be transferred, or a part of it, and from or to where: its own memory, or a part of a lease.
#[derive(Clone, Copy)]
struct Work {
    item: usize,
    /// Where the part begins in the item.
    offset: u64,
    local: MemoryRange,
}

/// What keeps the memory of transfers usable.
enum Hold<'a> {
    /// The caller, who has registered it if that is needed.
    Caller,
    /// A lease.
    Lease(Held<'a>),
    /// Regions of the call.
    Regions(Registered<'a>),
}

/// Work that is under way.
struct Flight<'a> {
    work: Vec<Work>,
    under_way: Launched,
    hold: Hold<'a>,
}

/// Requests that were submitted together.
struct Launched {
    batch: Arc<Batch>,
    /// Those that were not even begun, by their places, in order.
    refused: Vec<(usize, Error)>,
}

/// One put or get.
struct Run<'a> {
    engine: &'a Engine,
    pool: &'a Pool,
    direction: Direction,
    items: &'a [Item],
    options: StagingOptions,
    devices: Vec<(u64, usize)>,
    statuses: Vec<Option<TaskStatus>>,
    undone: Result<()>,
    /// Regions that the call has registered and given back, which others may still use.
    shared: Vec<Arc<Region>>,
    /// Something took longer than it does as a rule: it was tried again, or there was no room.
    is_disturbed: bool,
}

impl<'a> Run<'a> {
    fn new(
        engine: &'a Engine,
        pool: &'a Pool,
        direction: Direction,
        items: &'a [Item],
        options: StagingOptions,
        devices: Vec<(u64, usize)>,
    ) -> Run<'a> {
        let statuses = vec![None; items.len()];
        Run { engine, pool, direction, items, options, devices, statuses, undone: Ok(()), shared: Vec::new(), is_disturbed: false }
    }

    fn finish(mut self) -> Finished {
        self.wait_for_others();
        let missing = || failed(Error::new(Code::Internal, "an item of a put or get was forgotten"));
        let statuses = self.statuses.into_iter().map(|status| status.unwrap_or_else(missing)).collect();
        Finished { statuses, undone: self.undone }
    }

    /// Waits until those who share the regions of this call have let them go: without a time limit if the call has none, else for as long as
    /// unregistering waits, too.
    fn wait_for_others(&mut self) {
        let end = self.options.deadline.map(|deadline| deadline.max(Instant::now() + DRAIN_LIMIT));
        let mut pause = SHORT_PAUSE;
        while let Some(region) = self.shared.last() {
            // What is neither gone nor stuck is waited for, in this order: it may become stuck between the two looks.
            let is_gone = region.is_gone();
            if is_gone || region.is_stuck() {
                if !is_gone {
                    let (address, length) = (region.range().address(), region.range().length());
                    let text = format!(
                        "[{address:#x}, +{length}) stays blocked: another put or get of this memory could not unregister it, for the reason \
                         that it has returned"
                    );
                    self.undone = std::mem::replace(&mut self.undone, Ok(())).and(Err(Error::quiet(Code::Context, text)));
                }
                self.shared.pop();
                continue;
            }
            if end.is_some_and(|end| Instant::now() >= end) {
                let (address, length) = (region.range().address(), region.range().length());
                let text = format!(
                    "[{address:#x}, +{length}) stays registered: another put or get of this memory goes on after {DRAIN_LIMIT:?}; leave it mapped \
                     until that call has returned, too, and give both a time limit"
                );
                self.undone = std::mem::replace(&mut self.undone, Ok(())).and(Err(Error::new(Code::BatchBusy, text)));
                return;
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONG_PAUSE);
        }
    }

    fn run(&mut self) {
        let mut ways = self.ways();
        let to_be_recorded = self.decide(&mut ways);
        let begin = to_be_recorded.map(|_| Instant::now());
        let target = |item: &Item| match self.direction {
            Direction::Get => Target { space: 0, address: item.local.address(), length: item.local.length() },
            _ => Target { space: item.segment, address: item.remote_address, length: item.local.length() },
        };
        let targets: Vec<Target> = self.items.iter().map(target).collect();
        let mut order: Vec<usize> = (0..self.items.len()).collect();
        let Some(waves) = plan::waves(&targets) else {
            self.run_wave(&ways, &order);
            let is_complete = |status: &Option<TaskStatus>| status.as_ref().is_some_and(|status| status.state == State::Completed);
            let is_usual = !self.is_disturbed && self.statuses.iter().all(is_complete);
            if let Some(((class, path, bytes), begin)) = to_be_recorded.zip(begin).filter(|_| is_usual) {
                self.pool.choice().record(class, path, bytes, begin.elapsed());
            }
            return;
        };
        // Stable: those of a wave stay in input order.
        order.sort_by_key(|item| waves[*item]);
        order.chunk_by(|a, b| waves[*a] == waves[*b]).for_each(|wave| self.run_wave(&ways, wave));
    }

    /// The way of each item.
    fn ways(&self) -> Vec<Way> {
        let (asked, largest) = (self.options.preference, self.pool.largest_lease());
        let driver = LazyCell::new(Driver::find);
        let registered: Vec<bool> =
            self.engine.registry.read(|view| self.items.iter().map(|item| view.is_registered(item.local)).collect());
        let way = |(item, is_registered): (&Item, bool)| {
            let facts = plan::Item {
                length: item.local.length(),
                is_registered,
                is_of_device: !is_registered && driver.owns(item.local.address()),
                needs_registration: self.devices_to(item.segment) > 0,
            };
            facts.way(asked, largest)
        };
        self.items.iter().zip(registered).map(way).collect()
    }

    /// Decides for the items that could go either way, all of them alike. What is to be recorded if they complete: nothing if the call moves others,
    /// too.
    fn decide(&self, ways: &mut [Way]) -> Option<(Class, Path, u64)> {
        let open = || self.items.iter().zip(ways.iter()).filter(|(_, way)| **way == Way::Either).map(|(item, _)| item);
        let count = open().count();
        if count == 0 {
            return None;
        }
        let bytes = open().fold(0_u64, |sum, item| sum.saturating_add(item.local.length()));
        let devices = open().map(|item| self.devices_to(item.segment)).max().unwrap_or(0);
        let class = Class::new(self.direction, bytes / count as u64, bytes, devices);
        let Pick { path, is_measured } = self.pool.choice().pick(class);
        let decided = if path == Path::Staged { Way::Staged } else { Way::Registered };
        ways.iter_mut().filter(|way| **way == Way::Either).for_each(|way| *way = decided);
        (is_measured && count == ways.len()).then_some((class, path, bytes))
    }

    fn devices_to(&self, segment: u64) -> usize {
        self.devices.binary_search_by_key(&segment, |(segment, _)| *segment).map_or(0, |at| self.devices[at].1)
    }

    /// Moves the items of one wave, which are in input order.
    fn run_wave(&mut self, ways: &[Way], wave: &[usize]) {
        if self.is_out_of_time() {
            wave.iter().for_each(|item| self.statuses[*item] = Some(failed(out_of_time(NOT_BEGUN))));
            return;
        }
        let of = |wanted: Way| -> Vec<usize> { wave.iter().copied().filter(|item| ways[*item] == wanted).collect() };
        let mut flights = Vec::new();
        let usage = self.pool.usage();
        for (way, counter) in [(Way::ZeroCopy, &usage.items_zero_copy), (Way::Direct, &usage.items_direct)] {
            let items = of(way);
            if !items.is_empty() {
                counter.add(items.len() as u64);
                flights.push(self.launch(self.in_place(&items), Hold::Caller));
            }
        }
        let registered = of(Way::Registered);
        flights.extend(self.launch_registered(self.in_place(&registered)));
        self.stage(&of(Way::Staged), &mut flights);
        flights.iter_mut().for_each(|flight| self.land(flight));
    }

    fn in_place(&self, items: &[usize]) -> Vec<Work> {
        items.iter().map(|&item| Work { item, offset: 0, local: self.items[item].local }).collect()
    }

    /// Registers the memory of the work, if its transports need it, and begins to move it. What cannot be registered fails.
    fn launch_registered(&mut self, mut work: Vec<Work>) -> Option<Flight<'a>> {
        let needs_it = |work: &&Work| self.devices_to(self.items[work.item].segment) > 0;
        let ranges = plan::merge(work.iter().filter(needs_it).map(|work| work.local));
        let mut registered = Registered { engine: self.engine, pool: self.pool, regions: BTreeMap::new(), own: Vec::new() };
        let outcomes = if ranges.is_empty() { Vec::new() } else { registered.cover_each(&ranges, self.options.deadline) };
        work.retain(|Work { item, local, .. }| {
            if self.devices_to(self.items[*item].segment) == 0 {
                return true;
            }
            let holder = ranges.partition_point(|range| range.address() <= local.address()).checked_sub(1);
            match holder.and_then(|holder| outcomes[holder].as_ref().err()) {
                None => true,
                Some(error) => {
                    self.settle(*item, failed(error.clone()));
                    false
                }
            }
        });
        self.pool.usage().items_direct.add(count_items(&work));
        if work.is_empty() {
            self.give_back(&mut registered);
            return None;
        }
        Some(self.launch(work, Hold::Regions(registered)))
    }

    /// Moves the items, which are in the order of the input, through leases. Before it registers any for want of room it lands the flights.
    fn stage(&mut self, items: &[usize], flights: &mut Vec<Flight<'a>>) {
        let work = self.in_place(items);
        let total = work.iter().fold(0_u64, |sum, work| sum.saturating_add(work.local.length()));
        let limit = plan::group_limit(total, self.pool.largest_lease());
        // What is got is copied out when all of the item is there.
        let work = if self.direction == Direction::Put { divide(work, limit) } else { work };
        let lengths: Vec<u64> = work.iter().map(|work| work.local.length()).collect();
        let most = plan::groups_at_once(limit, self.pool.largest_lease());
        let mut before = VecDeque::with_capacity(most);
        for group in plan::groups(&lengths, limit) {
            let (members, lengths) = (&work[group.clone()], &lengths[group]);
            let begun = self.acquire(lengths.iter().sum(), &mut before).and_then(|held| match held {
                Some(held) => self.launch_staged(members, lengths, held).map(Some),
                None => {
                    flights.drain(..).for_each(|mut flight| self.land(&mut flight));
                    Ok(self.launch_registered(members.to_vec()))
                }
            });
            match begun {
                Ok(Some(flight)) => {
                    before.push_back(flight);
                    self.land_groups(&mut before, most);
                }
                Ok(None) => {}
                Err(error) => members.iter().for_each(|work| self.settle(work.item, failed(error.clone()))),
            }
        }
        before.into_iter().for_each(|flight| self.land_group(flight));
    }

    /// Lands the groups that are over, in order, and as many more as make room for one to be copied beside the rest. To wait for each would wake the thread
    /// of every NIC for each.
    fn land_groups(&mut self, flights: &mut VecDeque<Flight<'a>>, most: usize) {
        self.engine.poll();
        let is_due = |flights: &VecDeque<Flight>| {
            flights.len() >= most || flights.front().is_some_and(|first| first.under_way.batch.is_finished())
        };
        while is_due(flights)
            && let Some(flight) = flights.pop_front()
        {
            self.land_group(flight);
        }
    }

    /// A lease; `None` if there is none to be had, and the memory is to be registered instead. Before it waits for one it finishes what is before.
    fn acquire(&mut self, bytes: u64, before: &mut VecDeque<Flight<'a>>) -> Result<Option<Held<'a>>> {
        if self.is_out_of_time() {
            return Err(out_of_time(NOT_BEGUN));
        }
        let at_once = Some(Duration::ZERO);
        let mut lease = self.pool.acquire(self.direction, bytes, at_once);
        let is_full = |lease: &Result<Lease>| lease.as_ref().is_err_and(|error| error.code() == Code::Timeout);
        while is_full(&lease)
            && let Some(flight) = before.pop_front()
        {
            self.land_group(flight);
            lease = self.pool.acquire(self.direction, bytes, at_once);
        }
        self.is_disturbed |= is_full(&lease);
        if is_full(&lease) && self.pool.fallback() == Fallback::Wait {
            let rest = self.options.deadline.map(|end| end.saturating_duration_since(Instant::now()));
            lease = self.pool.acquire(self.direction, bytes, rest);
        }
        match lease {
            Ok(lease) => Ok(Some(Held { pool: self.pool, lease: Some(lease), batch: None })),
            Err(error) if error.code() == Code::Timeout && self.pool.fallback() == Fallback::Register => {
                self.pool.fall_back(&error);
                Ok(None)
            }
            Err(error) => Err(self.engine.check_open().err().unwrap_or(error)),
        }
    }

    fn launch_staged(&mut self, members: &[Work], lengths: &[u64], held: Held<'a>) -> Result<Flight<'a>> {
        let parts = held.parts(lengths)?;
        let work: Vec<Work> = members.iter().zip(parts).map(|(work, local)| Work { local, ..*work }).collect();
        if let Some(lease) = held.lease.filter(|_| self.direction == Direction::Put) {
            copy::gather(lease.memory, &members.iter().map(|work| work.local).collect::<Vec<_>>());
        }
        let usage = self.pool.usage();
        usage.items_staged.add(count_items(&work));
        usage.bytes_staged.add(lengths.iter().sum());
        Ok(self.launch(work, Hold::Lease(held)))
    }

    /// Begins to move what is in place.
    fn launch(&self, work: Vec<Work>, mut hold: Hold<'a>) -> Flight<'a> {
        let under_way = self.submit(&work, 0);
        if let Hold::Lease(held) = &mut hold {
            held.batch = Some(under_way.batch.clone());
        }
        Flight { work, under_way, hold }
    }

    /// `attempt`: how often it has been tried before.
    fn submit(&self, work: &[Work], attempt: u32) -> Launched {
        let opcode = if self.direction == Direction::Put { Opcode::Write } else { Opcode::Read };
        let hints = Hints::new(attempt, 0);
        let request = |Work { item, offset, local }: &Work| {
            let Item { segment, remote_address, .. } = self.items[*item];
            // A part that would begin past the end of the address space is refused, as is the one that reaches it.
            let remote_address = remote_address.saturating_add(*offset);
            Request { opcode, local: *local, segment, remote_address, hints }
        };
        let requests: Vec<Request> = work.iter().map(request).collect();
        let host: Weak<dyn BatchHost> = self.engine.this.clone();
        let batch = Batch::new(0, requests.len(), host, self.engine.counters.clone());
        let options = SubmitOptions { deadline: self.options.deadline, stall: None };
        let mut refused = Vec::new();
        match self.engine.submit(&batch, &requests, None, options) {
            Ok(()) => {}
            Err(error) if requests.len() == 1 => refused.push((0, error)),
            // One is no reason for all to fail, such as one whose memory is being unregistered.
            Err(_) => {
                for (place, request) in requests.iter().enumerate() {
                    let outcome = self.engine.submit(&batch, std::slice::from_ref(request), None, options);
                    refused.extend(outcome.err().map(|error| (place, error)));
                }
            }
        }
        Launched { batch, refused }
    }

    /// Waits for the end of a flight, and has what has failed transferred again.
    fn land(&mut self, flight: &mut Flight<'a>) {
        let Flight { work, under_way, hold } = flight;
        let mut pending = std::borrow::Cow::Borrowed(work.as_slice());
        for attempt in 0.. {
            let limit = match hold {
                Hold::Lease(_) => self.options.deadline.map(|end| end.saturating_duration_since(Instant::now())),
                Hold::Caller | Hold::Regions(_) => None,
            };
            let is_over = under_way.batch.wait(limit);
            let outcomes = self.outcomes(under_way, pending.len());
            let mut unsuccessful = Vec::new();
            for (work, status) in pending.iter().zip(outcomes) {
                match status.state {
                    State::Failed | State::Timeout => unsuccessful.push((*work, status)),
                    _ => self.settle(work.item, status),
                }
            }
            if unsuccessful.is_empty() || !is_over || attempt >= self.options.retries || !self.pause_before_retry() {
                unsuccessful.into_iter().for_each(|(work, status)| self.settle(work.item, status));
                break;
            }
            let again: Vec<Work> = unsuccessful.into_iter().map(|(work, _)| work).collect();
            self.is_disturbed = true;
            self.pool.usage().retried.add(again.len() as u64);
            *under_way = self.submit(&again, attempt + 1);
            if let Hold::Lease(held) = hold {
                held.batch = Some(under_way.batch.clone());
            }
            pending = again.into();
        }
        if let Hold::Regions(registered) = hold {
            self.give_back(registered);
        }
    }

    /// What has become of an item, or of one more part of it: bytes add up, and the first that has not completed says why the item has not.
    fn settle(&mut self, item: usize, status: TaskStatus) {
        match &mut self.statuses[item] {
            Some(earlier) => {
                let transferred_bytes = earlier.transferred_bytes + status.transferred_bytes;
                if earlier.state == State::Completed {
                    *earlier = status;
                }
                earlier.transferred_bytes = transferred_bytes;
            }
            none => *none = Some(status),
        }
    }

    fn give_back(&mut self, registered: &mut Registered<'a>) {
        let undone = registered.unregister();
        self.undone = std::mem::replace(&mut self.undone, Ok(())).and(undone);
        self.shared.extend(registered.own.drain(..).filter(|region| !region.is_gone()));
    }

    /// Lands a flight, copies out what it has got, and ends its lease.
    fn land_group(&mut self, mut flight: Flight<'a>) {
        self.land(&mut flight);
        let Flight { work, hold: Hold::Lease(Held { lease: Some(lease), .. }), .. } = &flight else { return };
        if self.direction == Direction::Get {
            let is_there = |work: &&Work| self.statuses[work.item].as_ref().is_some_and(|status| status.state == State::Completed);
            let target = |work: &Work| self.items[work.item].local;
            if work.iter().all(|work| is_there(&work)) {
                copy::scatter(lease.memory, &work.iter().map(target).collect::<Vec<_>>());
            } else {
                work.iter().filter(is_there).for_each(|work| copy::scatter(work.local, &[target(work)]));
            }
        }
    }

    /// What has become of so many requests.
    fn outcomes(&self, launched: &Launched, count: usize) -> Vec<TaskStatus> {
        let Launched { batch, refused } = launched;
        if batch.len() + refused.len() != count {
            let text = format!("of {count} requests {} were begun and {} refused", batch.len(), refused.len());
            return vec![failed(Error::new(Code::Internal, text)); count];
        }
        let mut refused = refused.iter().peekable();
        let mut task = 0;
        let outcome = |place: usize| {
            if let Some((_, error)) = refused.next_if(|(refused, _)| *refused == place) {
                return failed(error.clone());
            }
            task += 1;
            match batch.task_status(task - 1) {
                Some(status) if status.state.is_terminal() => status,
                _ => failed(out_of_time("bytes were still on their way")),
            }
        };
        (0..count).map(outcome).collect()
    }

    /// False if there is no time left for one.
    fn pause_before_retry(&self) -> bool {
        let end = Instant::now().checked_add(self.options.retry_pause);
        if self.options.deadline.is_some_and(|deadline| end.is_none_or(|end| end >= deadline)) {
            return false;
        }
        self.pool.pause(self.options.retry_pause);
        self.engine.check_open().is_ok()
    }

    fn is_out_of_time(&self) -> bool {
        self.options.deadline.is_some_and(|end| Instant::now() >= end)
    }
}

/// In parts that fit into a group each, so that one can be copied while another is transferred.
fn divide(work: Vec<Work>, limit: u64) -> Vec<Work> {
    if work.iter().all(|work| work.local.length() <= limit) {
        return work;
    }
    let parts = |whole: Work| {
        let parts = plan::parts(whole.local.length(), limit);
        parts.filter_map(move |(offset, length)| Some(Work { offset, local: whole.local.part(offset, length)?, ..whole }))
    };
    work.into_iter().flat_map(parts).collect()
}

/// Items that begin in this work.
fn count_items(work: &[Work]) -> u64 {
    work.iter().filter(|work| work.offset == 0).count() as u64
}

fn out_of_time(what: &str) -> Error {
    Error::quiet(Code::Timeout, format!("the time of the call had passed when {what}"))
}

fn failed(error: Error) -> TaskStatus {
    TaskStatus { state: State::of_error(&error), transferred_bytes: 0, error: Some(error) }
}
