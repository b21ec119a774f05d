//! Registered memory regions: which ranges there are, who may touch them, and until when.
//!
//! [`Registry`] knows no transport and does no I/O. Registering is *reserve* (blocks the range), the caller's slow work, then
//! *commit* or *abandon*. Removing is *start the drain*, *drain*, the caller's slow work, then *finish*, *give up* (to be tried again) or
//! *quarantine*. Whoever touches bytes holds a [`RegionGuard`]; once a drain has succeeded there is none and never will be.
//!
//! - `index`: the one structure that holds the regions, ordered by address; read without locks
//! - `region`: a region's states
//! - [`in_flight`]: the count behind guard and drain
//! - [`registrations`]: what devices know a region by
//! - `shared`: guards of a submission
//! - `published`: live regions in registration order, with their encoded text
//!
//! Locks: one mutex for all who change something; it is held for the bookkeeping only, and while [`Registry::published`] encodes.
//! Readers take none. No callback may call the registry back, except from inside [`Registry::read`], where nothing is locked.
//!
//! Memory: 88 bytes a region, 24 to 35 in the index, 16 to 32 in the published order, and its encoded text.

pub mod in_flight;
mod index;
mod published;
mod region;
pub mod registrations;
mod shared;
#[cfg(all(test, not(loom)))]
mod tests;

use std::cell::Cell;
use std::collections::HashSet;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::error::{Code, Error, Result};
use crate::sys::MemoryRange;
use index::{Entry, Index, LEAF_CAPACITY, Pinned, Writer};
use published::{BLOCK_CAPACITY, Published};
pub use region::Region;
use region::State;
#[cfg(all(test, not(loom)))]
pub(crate) use region::slowness::pause_after_changing;
#[cfg(all(test, not(loom), feature = "rdma"))]
pub(crate) use region::slowness::pause_before_looking;
pub use registrations::{Chunk, MemoryKey, RegistrationCost, Registrations};
pub use shared::SharedGuards;

/// What a registration asks for, beside its range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionOptions {
    /// NUMA node or device of the memory: `*`, `cpu:0`, `cuda:1`, `segments:…`, or any other text.
    pub location: Arc<str>,
    /// Whether peers may read and write it.
    pub remote_accessible: bool,
    /// Whether registering the very same range, location and access again counts a reference instead of failing. Both must ask for it.
    pub counted: bool,
    /// Who unregisters it.
    pub owner: Owner,
}

/// Who unregisters a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Owner {
    /// The program, by its address.
    #[default]
    Program,
    /// The pool whose arena it is, by [`Registry::start_drain_of`]; not by its address.
    Pool,
    /// The puts and gets that move its bytes, each of which has a reference: as for a pool. If the last one's drain ran out of time, whoever
    /// knows the address may start it again.
    Call,
}

/// Keeps a region from being released while bytes move in it. Dropping ends that.
pub struct RegionGuard {
    region: Arc<Region>,
}

impl RegionGuard {
    /// The region.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }
}

impl Drop for RegionGuard {
    fn drop(&mut self) {
        self.region.in_flight.release();
    }
}

/// Who wants to touch a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// This process.
    Local,
    /// A peer; the region must be `remote_accessible`.
    Remote,
}

/// Why a range was not given out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Some byte of it is in no live region.
    NotRegistered,
    /// Some byte of it is not for peers.
    NotAccessible,
    /// Some byte of it is being unregistered.
    Draining,
}

/// What readers see while they are pinned; made by [`Registry::read`]. Each look-up sees all registrations and removals that ended
/// before it began. For one thread.
pub struct View<'a> {
    pinned: &'a Pinned<'a>,
    /// The last region that was found. Requests often walk through one region.
    hint: Cell<Option<Entry<'a>>>,
}

impl<'a> View<'a> {
    /// The region (in any state but gone) that contains the address.
    pub fn find(&self, address: u64) -> Option<&Region> {
        self.entry(address).map(Entry::get)
    }

    /// A region (in any state but gone) that has a byte in common with the range.
    pub fn find_overlap(&self, range: MemoryRange) -> Option<&Region> {
        let last = range.address().checked_add(range.length().checked_sub(1)?)?;
        // Regions have no byte in common, so none that begins before this one reaches further.
        self.pinned.predecessor(last).map(Entry::get).filter(|region| region.range().intersects(&range))
    }

    /// The hint, if it is still in the index and contains the address.
    fn present_hint(&self, address: u64) -> Option<Entry<'a>> {
        self.hint.get().filter(|hint| hint.contains(address) && hint.is_present())
    }

    fn entry(&self, address: u64) -> Option<Entry<'a>> {
        if let Some(hint) = self.present_hint(address) {
            return Some(hint);
        }
        let found = self.pinned.predecessor(address).filter(|entry| entry.contains(address));
        self.hint.set(found);
        found
    }

    /// Whether live regions, which touch, hold every byte of `range`, other than those that puts and gets unregister when they end.
    pub fn is_registered(&self, range: MemoryRange) -> bool {
        let mut reached = u128::from(range.address());
        while reached < range.end() {
            let region = u64::try_from(reached).ok().and_then(|next| self.find(next));
            let Some(region) = region.filter(|region| region.is_live() && region.owner() != Owner::Call) else { return false };
            reached = region.range().end();
        }
        true
    }

    /// The regions, in any state but gone, that have a byte in common with `range`, in address order.
    pub fn within(&self, range: MemoryRange) -> Vec<Arc<Region>> {
        let mut regions = Vec::new();
        let mut next = range.length().checked_sub(1).map(|last| range.address() + last);
        while let Some(entry) = next.and_then(|address| self.pinned.predecessor(address)).filter(|entry| entry.intersects(&range)) {
            regions.push(entry.to_arc());
            next = entry.range().address().checked_sub(1).filter(|before| *before >= range.address());
        }
        regions.reverse();
        regions
    }

    /// Guards on the live, touching regions that together cover `[address, address + length)`, in address order; all or none.
    /// One region is the common case and costs no allocation, one `fetch_add` and one reference count. An empty range needs a region
    /// that contains `address`.
    pub fn acquire(&self, address: u64, length: u64, access: Access) -> std::result::Result<Guards, Refusal> {
        let first = self.acquire_region(address, access)?;
        if first.region.range().contains(address, length) {
            return Ok(Guards(GuardList::One(first)));
        }
        let end = u128::from(address) + u128::from(length);
        let mut reached = first.region.range().end();
        let mut guards = vec![first];
        while reached < end {
            // What is reached may be 2^64, where nothing begins.
            let next = u64::try_from(reached).map_err(|_| Refusal::NotRegistered)?;
            let guard = self.acquire_region(next, access)?;
            reached = guard.region.range().end();
            guards.push(guard);
        }
        Ok(Guards(GuardList::Many(guards.into())))
    }

    /// Adds a user to the guards, who is in the live regions that have a byte in common with `range`. Bytes of `range` that no region holds,
    /// or that only a quarantined or not yet committed one does, are nobody's concern here, nor are those that a put or get has just let
    /// go. A refusal leaves the guards fit to be dropped.
    pub fn share(&self, range: MemoryRange, guards: &mut SharedGuards) -> std::result::Result<(), Refusal> {
        if guards.use_recent(range) {
            return Ok(());
        }
        let mut next = range.length().checked_sub(1).map(|last| range.address() + last);
        while let Some(address) = next {
            let Some(entry) = self.pinned.predecessor(address).filter(|entry| entry.intersects(&range)) else { break };
            if !guards.use_known(&entry) {
                if entry.in_flight.try_acquire() {
                    guards.use_new(entry.to_arc());
                } else if entry.owner != Owner::Call && matches!(entry.state(), State::Draining | State::DrainGivenUp) {
                    return Err(Refusal::Draining);
                }
            }
            next = entry.range().address().checked_sub(1).filter(|before| *before >= range.address());
        }
        guards.end_user();
        Ok(())
    }

    fn acquire_region(&self, address: u64, access: Access) -> std::result::Result<RegionGuard, Refusal> {
        let entry = self.entry(address).ok_or(Refusal::NotRegistered)?;
        if access == Access::Remote && !entry.remote_accessible() {
            return Err(Refusal::NotAccessible);
        }
        if !entry.in_flight.try_acquire() {
            return Err(match entry.state() {
                State::Draining | State::DrainGivenUp => Refusal::Draining,
                _ => Refusal::NotRegistered,
            });
        }
        Ok(RegionGuard { region: entry.to_arc() })
    }
}

/// One or more guards on touching regions in address order, without an allocation for one. Derefs to `[RegionGuard]`.
pub struct Guards(GuardList);

enum GuardList {
    One(RegionGuard),
    Many(Box<[RegionGuard]>),
}

impl Deref for Guards {
    type Target = [RegionGuard];
    fn deref(&self) -> &[RegionGuard] {
        match &self.0 {
            GuardList::One(guard) => std::slice::from_ref(guard),
            GuardList::Many(guards) => guards,
        }
    }
}

impl Guards {
    /// The promised memory `[address, address + length)` that these guards cover. None when a byte of it is outside of them. The
    /// caller keeps the guards for as long as it uses the range.
    pub fn range(&self, address: u64, length: u64) -> Option<MemoryRange> {
        let (first, others) = self.split_first()?;
        let covered = others.iter().try_fold(first.region.range(), |covered, next| index::join(covered, next.region.range()))?;
        covered.part(address.checked_sub(covered.address())?, length)
    }
}

/// Outcome of [`Registry::reserve`].
pub enum Reservation {
    /// A new region in state Reserved: do the slow work, then commit or abandon.
    New(Arc<Region>),
    /// One more reference to a live region; nothing to do. Undone by a [`Registry::start_drain_of`].
    Counted(Arc<Region>),
}

/// Outcome of [`Registry::start_drain`].
pub enum Removal {
    /// The last reference: drain it, release keys, then finish.
    Last(Arc<Region>),
    /// Other references remain.
    Counted,
}

/// The registered regions of one engine. Any thread may call anything.
pub struct Registry {
    index: Index,
    changes: Mutex<Changes>,
}

/// What changes go through, under the lock.
struct Changes {
    index: Writer,
    published: Published,
    locations: Locations,
    next_sequence: u64,
}

/// Why a region cannot be drained: the one that contains the address, if any, and its state.
type RefusedDrain = Option<(Arc<Region>, State)>;

/// The error for it, made without the lock.
fn refused_drain(address: u64, refusal: RefusedDrain) -> Error {
    let Some((region, state)) = refusal else {
        return Error::quiet(
            Code::AddressNotRegistered,
            format!("cannot unregister {address:#x}: no region contains it; give the address that it was registered with"),
        );
    };
    let range = Shown(region.range());
    if region.range().address() != address {
        let text = format!(
            "cannot unregister {address:#x}: it lies inside the region {range}, which stays; use the address that was registered"
        );
        return Error::new(Code::AddressNotRegistered, text);
    }
    match state {
        State::Draining => Error::quiet(
            Code::BatchBusy,
            format!("cannot unregister {range}: another call is unregistering it, with {} uses under way", region.in_flight()),
        ),
        State::Quarantined => Error::new(Code::AddressNotRegistered, format!("cannot unregister {range}: {QUARANTINED}")),
        State::Live if region.owner == Owner::Call => {
            Error::new(Code::AddressNotRegistered, format!("cannot unregister {range}: {IN_A_CALL}"))
        }
        State::Live | State::DrainGivenUp => Error::new(Code::InvalidArgument, format!("cannot unregister {range}: {AN_ARENA}")),
        _ => Error::quiet(
            Code::AddressNotRegistered,
            format!("cannot unregister {range}: its registration has not ended; wait for that call to return"),
        ),
    }
}

impl Changes {
    fn start_drain(&mut self, address: u64, by_owner: bool) -> std::result::Result<Removal, RefusedDrain> {
        let Changes { index, published, .. } = self;
        let entry = index.predecessor(address).filter(|entry| entry.contains(address)).ok_or(None)?;
        let state = entry.state();
        let region = match state {
            _ if entry.range().address() != address => return Err(Some((entry.to_arc(), state))),
            State::Live if entry.owner != Owner::Program && !by_owner => return Err(Some((entry.to_arc(), state))),
            State::DrainGivenUp if entry.owner == Owner::Pool && !by_owner => return Err(Some((entry.to_arc(), state))),
            State::Live if entry.drop_reference_unless_last() => return Ok(Removal::Counted),
            State::Live => {
                // Whoever finds the count closed looks at the state for the reason.
                entry.set_state(State::Draining);
                entry.in_flight.close();
                published.remove(&entry).unwrap_or_else(|| entry.to_arc())
            }
            State::DrainGivenUp => {
                entry.set_state(State::Draining);
                entry.to_arc()
            }
            state => return Err(Some((entry.to_arc(), state))),
        };
        Ok(Removal::Last(region))
    }
}

impl Default for Registry {
    fn default() -> Registry {
        Registry::new()
    }
}

impl Registry {
    /// Without regions.
    pub fn new() -> Registry {
        Registry::with_capacities(LEAF_CAPACITY, BLOCK_CAPACITY)
    }

    fn with_capacities(leaf: usize, block: usize) -> Registry {
        let (index, writer) = Index::new(leaf);
        let changes =
            Changes { index: writer, published: Published::new(block), locations: Locations::default(), next_sequence: 0 };
        Registry { index, changes: Mutex::new(changes) }
    }

    /// Looks things up without a lock. Call it once for many look-ups: entering costs as much as one does. Memory of removed regions is not
    /// given back meanwhile, so `f` must not block; guards that it acquires may be kept.
    pub fn read<R>(&self, f: impl FnOnce(&View<'_>) -> R) -> R {
        let pinned = self.index.pin();
        f(&View { pinned: &pinned, hint: Cell::new(None) })
    }

    /// Blocks a range for the caller, who makes it usable and then commits it.
    ///
    /// Errors: `InvalidArgument` for an empty range or one at address 0; `AddressOverlapped` if any byte is blocked already, which the
    /// text explains. O(log n), and in few cases a copy of 2 KiB.
    pub fn reserve(&self, range: MemoryRange, options: &RegionOptions) -> Result<Reservation> {
        check(range).map_err(|reason| Error::new(Code::InvalidArgument, format!("cannot register {}: {reason}", Shown(range))))?;
        let outcome = self.changes.lock().reserve(range, options);
        // Whoever gets the log may look into the registry, so errors are made without the lock.
        outcome.map_err(|collision| {
            Error::new(Code::AddressOverlapped, format!("cannot register {}: {}", Shown(range), collision.explain(options)))
        })
    }

    /// [`Registry::reserve`] for many ranges, all or nothing, under one lock; results in input order. Overlaps within the list are refused,
    /// too, also of counted ranges. The text of an error says which entry it was. `BatchBusy`, unlogged, for a put or get if what is in
    /// the way becomes live or goes by itself: it waits and tries again.
    pub fn reserve_batch(&self, ranges: &[MemoryRange], options: &RegionOptions) -> Result<Vec<Reservation>> {
        let explain = |at: usize, reason: &str| {
            format!(
                "cannot register {}, entry {at} of {} (counted from 0), so none was registered: {reason}",
                Shown(ranges[at]),
                ranges.len()
            )
        };
        for (at, range) in ranges.iter().enumerate() {
            check(*range).map_err(|reason| Error::new(Code::InvalidArgument, explain(at, reason)))?;
        }
        let mut reservations = Vec::with_capacity(ranges.len());
        let mut changes = self.changes.lock();
        for (at, range) in ranges.iter().enumerate() {
            match changes.reserve(*range, options) {
                Ok(reservation) => reservations.push(reservation),
                Err(collision) => {
                    for reservation in reservations.iter().rev() {
                        match reservation {
                            Reservation::New(region) => changes.forget(region),
                            Reservation::Counted(region) => {
                                region.drop_reference_unless_last();
                            }
                        }
                    }
                    drop(changes);
                    let within = ranges[..at].iter().position(|earlier| earlier.intersects(range));
                    let reason = match within {
                        Some(earlier) => {
                            format!("it overlaps entry {earlier} of the same call, {}; name each byte once", Shown(ranges[earlier]))
                        }
                        None => collision.explain(options),
                    };
                    let text = explain(at, &reason);
                    return Err(match collision.is_waited_for(options) {
                        true => Error::quiet(Code::BatchBusy, text),
                        false => Error::new(Code::AddressOverlapped, text),
                    });
                }
            }
        }
        Ok(reservations)
    }

    /// Reserved -> Live, and into the published order. Only for what the caller has reserved.
    pub fn commit(&self, regions: &[Arc<Region>]) {
        let mut changes = self.changes.lock();
        for region in regions {
            debug_assert_eq!(region.state(), State::Reserved);
            // First, so that whoever sees a live region can guard it.
            region.in_flight.open();
            region.set_state(State::Live);
            changes.published.add(region);
        }
    }

    /// Gives a reserved region its keys. Only for what the caller has reserved, once.
    pub fn equip(&self, region: &Region, registrations: Registrations) {
        debug_assert_eq!(region.state(), State::Reserved);
        let is_first = region.set_registrations(registrations);
        debug_assert!(is_first);
    }

    /// Gives live regions their keys, and has them published anew. Only while nobody else registers or unregisters; regions that have
    /// keys already keep them.
    pub fn equip_live(&self, keys: Vec<(Arc<Region>, Registrations)>) {
        let mut changes = self.changes.lock();
        for (region, registrations) in keys {
            if region.set_registrations(registrations) {
                changes.published.touch(&region);
            }
        }
    }

    /// Has a region published anew whose keys were replaced.
    pub fn republish(&self, region: &Region) {
        self.changes.lock().published.touch(region);
    }

    /// Reserved -> gone. Only for what the caller has reserved.
    pub fn abandon(&self, regions: &[Arc<Region>]) {
        let mut changes = self.changes.lock();
        for region in regions {
            debug_assert_eq!(region.state(), State::Reserved);
            changes.forget(region);
        }
    }

    /// Reserved or Draining -> Quarantined: undoing failed, so a device may still reach the range; it stays blocked for as long as the registry
    /// lives. Only for what the caller has reserved or is draining.
    pub fn quarantine(&self, region: &Arc<Region>) {
        let _changes = self.changes.lock();
        debug_assert!(matches!(region.state(), State::Reserved | State::Draining));
        region.set_state(State::Quarantined);
    }

    /// Live -> Draining, out of the published order at once; new guards are refused. A region whose drain was given up may be started again.
    /// Of several references one is given back instead.
    ///
    /// Errors: `AddressNotRegistered` unless a live region starts at the very address (the text says which region contains it, if one
    /// does); `BatchBusy` while another thread is removing it.
    pub fn start_drain(&self, address: u64) -> Result<Removal> {
        let outcome = self.changes.lock().start_drain(address, false);
        outcome.map_err(|refusal| refused_drain(address, refusal))
    }

    /// [`Registry::start_drain`] for a region itself, whatever is at its address by now, also if it is owned. `None` if there is nothing to
    /// be begun: it is not registered any more, or another thread is unregistering it.
    pub fn start_drain_of(&self, region: &Region) -> Option<Removal> {
        let mut changes = self.changes.lock();
        match region.state() {
            // Then it is what the index has at its address.
            State::Live | State::DrainGivenUp => changes.start_drain(region.range().address(), true).ok(),
            _ => None,
        }
    }

    /// [`Registry::start_drain`] for many, seen by peers as one change. Results in the order of `addresses`; one that comes again after
    /// its last reference is not registered.
    pub fn start_drain_batch(&self, addresses: &[u64]) -> Vec<Result<Removal>> {
        let mut outcomes: Vec<std::result::Result<Removal, RefusedDrain>> = Vec::with_capacity(addresses.len());
        let mut changes = self.changes.lock();
        outcomes.extend(addresses.iter().map(|address| changes.start_drain(*address, false)));
        drop(changes);
        let is_draining = |outcome: &std::result::Result<_, RefusedDrain>| matches!(outcome, Err(Some((_, State::Draining))));
        if outcomes.iter().any(is_draining) {
            let granted = addresses.iter().zip(&outcomes).filter(|(_, outcome)| outcome.is_ok());
            let ours: HashSet<u64> = granted.map(|(address, _)| *address).collect();
            for (address, outcome) in addresses.iter().zip(&mut outcomes) {
                if is_draining(outcome) && ours.contains(address) {
                    *outcome = Err(None);
                }
            }
        }
        let explain =
            |(outcome, address): (std::result::Result<_, _>, &u64)| outcome.map_err(|refusal| refused_drain(*address, refusal));
        outcomes.into_iter().zip(addresses).map(explain).collect()
    }

    /// No put or get that comes later shares these regions, which one has registered that is about to end.
    pub fn end_sharing(&self, regions: &[Arc<Region>]) {
        let _changes = self.changes.lock();
        regions.iter().for_each(|region| region.end_sharing());
    }

    /// One more reference to a region of puts and gets, to be given back as the others are. False if it is none, or not live any more, or not
    /// shared any more.
    pub fn retain(&self, region: &Region) -> bool {
        let _changes = self.changes.lock();
        let is_live = region.owner == Owner::Call && region.state() == State::Live && region.is_sharable();
        if is_live {
            region.add_reference();
        }
        is_live
    }

    /// Waits until no guard is left or `limit` has passed. True when drained. Takes no lock of the registry.
    #[must_use]
    pub fn drain(&self, region: &Region, limit: Duration) -> bool {
        region.in_flight.drain(limit)
    }

    /// Draining -> gone. Only for what the caller is draining, after [`Registry::drain`] has answered true.
    pub fn finish(&self, region: &Arc<Region>) {
        debug_assert_eq!(region.state(), State::Draining);
        self.changes.lock().forget(region);
    }

    /// The drain ran out of time: the region stays blocked and refuses guards, and its drain may be started again. Only for what the
    /// caller is draining.
    pub fn give_up_drain(&self, region: &Arc<Region>) {
        let _changes = self.changes.lock();
        debug_assert_eq!(region.state(), State::Draining);
        region.set_state(State::DrainGivenUp);
    }

    /// Live regions in registration order, as encoded text per block of at most 64; only blocks changed since the last call are encoded
    /// again. `encode` appends one region and must not use the registry; regions inside a block are joined by `,`. No piece is empty.
    pub fn published(&self, encode: &dyn Fn(&Region, &mut String)) -> Vec<Arc<str>> {
        self.changes.lock().published.encode(encode)
    }

    /// Live regions in registration order (a walk over all; for enumeration and for installing a transport).
    pub fn live(&self) -> Vec<Arc<Region>> {
        self.changes.lock().published.iter().cloned().collect()
    }

    /// Number of regions that block their range (any state but gone).
    pub fn len(&self) -> usize {
        self.changes.lock().index.len()
    }

    /// Whether no range is blocked.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Changes {
    /// The range is not empty.
    fn reserve(&mut self, range: MemoryRange, options: &RegionOptions) -> std::result::Result<Reservation, Collision> {
        let Changes { index, locations, next_sequence, .. } = self;
        let make = || {
            let sequence = *next_sequence;
            *next_sequence += 1;
            Arc::new(Region::new(range, options, locations.intern(&options.location), sequence))
        };
        match index.insert(range, make) {
            Ok(region) => Ok(Reservation::New(region)),
            Err(other) if other.counts(range, options) => {
                other.add_reference();
                Ok(Reservation::Counted(other))
            }
            Err(other) => {
                let is_same = other.range() == range;
                Err(Collision { range: other.range(), state: other.state(), owner: other.owner, is_same })
            }
        }
    }

    /// To Gone, from whatever.
    fn forget(&mut self, region: &Region) {
        self.index.remove(region.range().address());
        region.set_state(State::Gone);
    }
}

/// What is wrong with a range, whatever is registered.
fn check(range: MemoryRange) -> std::result::Result<(), &'static str> {
    if range.length() == 0 {
        Err("it is empty; give the length in bytes, at least 1")
    } else if range.address() == 0 {
        Err("its address is NULL")
    } else {
        Ok(())
    }
}

/// A range as texts show it.
struct Shown(MemoryRange);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{:#x}, {:#x}) ({} bytes)", self.0.address(), self.0.end(), self.0.length())
    }
}

/// What blocks a range.
struct Collision {
    range: MemoryRange,
    state: State,
    owner: Owner,
    is_same: bool,
}

const QUARANTINED: &str = "it is quarantined: undoing an earlier registration or removal failed, so a device may still reach its \
                           memory; it stays blocked until the engine is destroyed";

const AN_ARENA: &str = "it is the arena of a pool, which is unregistered by closing that";

const IN_A_CALL: &str = "a put or get registered it for as long as it moves these bytes, and unregisters it by itself; wait for that call to \
                         return, or register the memory before it";

impl Collision {
    /// Whether whoever asks waits until it is over: a put or get, of which several may be about to register the same memory.
    fn is_waited_for(&self, options: &RegionOptions) -> bool {
        options.owner == Owner::Call && self.state.is_passing()
    }

    fn explain(&self, options: &RegionOptions) -> String {
        let what = match self.state {
            State::Reserved => "another call is registering it; wait for that call to return",
            State::Live if self.owner == Owner::Call => IN_A_CALL,
            State::Live if self.owner == Owner::Pool => AN_ARENA,
            State::Live if self.is_same && options.counted => {
                "it is registered with another location or access, or without counted references; unregister it first"
            }
            State::Live if self.is_same => {
                "it is registered already; unregister it first, or ask for counted references in both calls \
                 (TE_REGISTER_REFCOUNT=1 for all)"
            }
            State::Live => "it is registered; unregister it first, or register only what lies outside of it",
            State::Draining => "it is being unregistered; wait for that call to return",
            State::DrainGivenUp => {
                "unregistering it ran out of time while bytes were moving in it; unregister it again until that succeeds"
            }
            State::Quarantined => QUARANTINED,
            State::Gone => "it has just been unregistered; try again",
        };
        format!("it overlaps the region {}: {what}", Shown(self.range))
    }
}

/// The location texts that were used last, so that regions with equal ones share them. Bounded: texts come from outside.
#[derive(Default)]
struct Locations {
    recent: Vec<Arc<str>>,
    oldest: usize,
}

impl Locations {
    const LIMIT: usize = 16;

    fn intern(&mut self, location: &Arc<str>) -> Arc<str> {
        if let Some(known) = self.recent.iter().find(|known| *known == location) {
            return known.clone();
        }
        if self.recent.len() < Self::LIMIT {
            self.recent.push(location.clone());
        } else {
            self.recent[self.oldest] = location.clone();
            self.oldest = (self.oldest + 1) % Self::LIMIT;
        }
        location.clone()
    }
}
