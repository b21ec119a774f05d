//! Registered memory regions.
//!
//! (skeleton: signatures are fixed, bodies to be written)
#![allow(missing_docs, unused_variables)]

use std::sync::Arc;

use crate::error::Result;
use crate::sys::MemoryRange;

/// What a registration asks for, beside its range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionOptions {
    /// NUMA node or device of the memory: `*`, `cpu:0`, `cuda:1`, `segments:…`, or any other text.
    pub location: Arc<str>,
    /// Whether peers may read and write it.
    pub remote_accessible: bool,
    /// Whether registering the very same range, location and access again counts a reference instead of failing.
    pub counted: bool,
}

/// A registered range. (fields private; see methods)
pub struct Region {}

impl Region {
    pub fn range(&self) -> MemoryRange {
        todo!()
    }
    pub fn location(&self) -> &Arc<str> {
        todo!()
    }
    pub fn remote_accessible(&self) -> bool {
        todo!()
    }
    /// Registration order; never reused.
    pub fn sequence(&self) -> u64 {
        todo!()
    }
}

/// Keeps a region from being released while bytes move in it. Dropping ends that.
pub struct RegionGuard {}
impl RegionGuard {
    pub fn region(&self) -> &Arc<Region> {
        todo!()
    }
}

/// Who wants to touch a range: a peer (needs `remote_accessible`) or this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Local,
    Remote,
}

/// Why a range was not given out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    NotRegistered,
    NotAccessible,
    Draining,
}

/// What readers see while they are pinned.
pub struct View<'a> {
    _p: std::marker::PhantomData<&'a ()>,
}
impl View<'_> {
    /// The region (in any state but gone) that contains the address.
    pub fn find(&self, address: u64) -> Option<&Region> {
        todo!()
    }
    /// Guards on the live, touching regions that together cover `[address, address + length)`, in address order; all or none.
    /// One region is the common case and costs no allocation.
    pub fn acquire(&self, address: u64, length: u64, access: Access) -> std::result::Result<Guards, Refusal> {
        todo!()
    }
}

/// One or more guards without an allocation for one. Derefs to `[RegionGuard]`.
pub struct Guards {}
impl std::ops::Deref for Guards {
    type Target = [RegionGuard];
    fn deref(&self) -> &[RegionGuard] {
        todo!()
    }
}
impl Guards {
    /// The promised memory `[address, address+length)` that these guards cover. None when outside of them.
    pub fn range(&self, address: u64, length: u64) -> Option<MemoryRange> {
        todo!()
    }
}

/// Outcome of [`Registry::reserve`].
pub enum Reservation {
    /// A new region in state Reserved: do the slow work, then commit or abandon.
    New(Arc<Region>),
    /// One more reference to a live region; nothing to do.
    Counted(Arc<Region>),
}

/// Outcome of [`Registry::start_drain`].
pub enum Removal {
    /// The last reference: drain it, release keys, then finish.
    Last(Arc<Region>),
    /// Other references remain.
    Counted,
}

#[derive(Default)]
pub struct Registry {}

impl Registry {
    pub fn new() -> Registry {
        todo!()
    }
    pub fn read<R>(&self, f: impl FnOnce(&View<'_>) -> R) -> R {
        todo!()
    }
    pub fn reserve(&self, range: MemoryRange, options: &RegionOptions) -> Result<Reservation> {
        todo!()
    }
    /// All or nothing, one lock; results in input order. Overlaps within the list are refused too.
    pub fn reserve_batch(&self, ranges: &[MemoryRange], options: &RegionOptions) -> Result<Vec<Reservation>> {
        todo!()
    }
    /// Reserved -> Live, and into the published order.
    pub fn commit(&self, regions: &[Arc<Region>]) {
        todo!()
    }
    /// Reserved -> gone.
    pub fn abandon(&self, regions: &[Arc<Region>]) {
        todo!()
    }
    /// Reserved or Draining -> Quarantined: undoing failed, the range stays blocked.
    pub fn quarantine(&self, region: &Arc<Region>) {
        todo!()
    }
    /// Live -> Draining, out of the published order at once; new guards are refused. Address must be the exact start.
    /// -3 unknown or interior; -4 when another thread is draining it right now. A region whose drain timed out may be started again.
    pub fn start_drain(&self, address: u64) -> Result<Removal> {
        todo!()
    }
    /// Waits until no guard is left or `limit` has passed. True when drained.
    pub fn drain(&self, region: &Region, limit: std::time::Duration) -> bool {
        todo!()
    }
    /// Draining -> gone. The drain must have succeeded.
    pub fn finish(&self, region: &Arc<Region>) {
        todo!()
    }
    /// Drain timed out: stays Draining, may be started again.
    pub fn give_up_drain(&self, region: &Arc<Region>) {
        todo!()
    }
    /// Live regions in registration order, as encoded text per block; only blocks changed since the last call are encoded again.
    /// `encode` writes one region; regions inside a block are joined by `,`.
    pub fn published(&self, encode: &dyn Fn(&Region, &mut String)) -> Vec<Arc<str>> {
        todo!()
    }
    /// Live regions in registration order (a walk over all; for enumeration and for installing a transport).
    pub fn live(&self) -> Vec<Arc<Region>> {
        todo!()
    }
    /// Number of regions that block their range (any state but gone).
    pub fn len(&self) -> usize {
        todo!()
    }
}
