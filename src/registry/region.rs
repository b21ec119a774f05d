//! One registered region and its life.
//!
//! ```text
//!            commit           start_drain            finish
//! Reserved ---------> Live ---------------> Draining --------> Gone
//!    |                                      |   ^  |             ^
//!    |                        give_up_drain v   |  |             |
//!    |                                 DrainGivenUp |             |
//!    +--------------- quarantine -> Quarantined <---+             |
//!    +--------------- abandon ------------------------------------+
//! ```
//!
//! Every state but Gone blocks the range. Only Live is open for guards: [`InFlight`] is open as long as the state is Live and for a moment
//! before, so one `fetch_add` both tests the state and keeps it, and whoever has seen a live region is refused only if it is being removed.
//! The state and the reference count change only under the registry's lock; readers may look at any time. 88 bytes with the two counts of its
//! `Arc`; what devices know of a region, and what publishing it took, is beside it where there is any.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::in_flight::InFlight;
use super::registrations::{RegistrationCost, Registrations};
use super::{Owner, RegionOptions};
use crate::sys::MemoryRange;

/// Where a region is in its life; see the module's picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum State {
    /// The range is blocked while slow work is under way.
    Reserved,
    /// Registered.
    Live,
    /// Someone is removing it.
    Draining,
    /// The removal ran out of time; it may be started again.
    DrainGivenUp,
    /// An undo failed: a device may still reach it.
    Quarantined,
    /// No longer in the index.
    Gone,
}

impl State {
    fn from_number(number: u8) -> State {
        use State::*;
        [Reserved, Live, Draining, DrainGivenUp, Quarantined, Gone][usize::from(number)]
    }

    /// It becomes live or goes without anything being done about it, where a put or get has it.
    pub(super) fn is_passing(self) -> bool {
        matches!(self, State::Reserved | State::Live | State::Draining)
    }

    /// Its range is neither registered nor becomes free without something being done about it.
    fn is_stuck(self) -> bool {
        matches!(self, State::DrainGivenUp | State::Quarantined)
    }
}

/// What is kept beside a region.
#[derive(Default)]
struct Details {
    registrations: OnceLock<Registrations>,
    /// What telling a metadata server of it took.
    publishing: OnceLock<Duration>,
}

/// A registered range of memory. Shared by the index, the guards, and whoever registers or removes it.
pub struct Region {
    range: MemoryRange,
    location: Arc<str>,
    sequence: u64,
    pub(super) in_flight: InFlight,
    /// Only where there is something to be kept: most registrations over TCP have none of it.
    details: OnceLock<Box<Details>>,
    references: AtomicU32,
    state: AtomicU8,
    remote_accessible: bool,
    /// Whether there may be more references: as the program said, or until the put or get ends that registered it.
    sharable: AtomicBool,
    pub(super) owner: Owner,
}

impl Region {
    /// A reserved region. `location` is the interned text of `options.location`.
    pub(super) fn new(range: MemoryRange, options: &RegionOptions, location: Arc<str>, sequence: u64) -> Region {
        Region {
            range,
            location,
            sequence,
            in_flight: InFlight::new_closed(),
            details: OnceLock::new(),
            references: AtomicU32::new(1),
            state: AtomicU8::new(State::Reserved as u8),
            remote_accessible: options.remote_accessible,
            sharable: AtomicBool::new(options.counted || options.owner == Owner::Call),
            owner: options.owner,
        }
    }

    /// The memory.
    pub fn range(&self) -> MemoryRange {
        self.range
    }

    /// NUMA node or device of the memory: as the registration said, or as was found where that left it open and devices know the region.
    pub fn location(&self) -> &Arc<str> {
        self.registrations().and_then(Registrations::place).unwrap_or(&self.location)
    }

    /// Whether peers may read and write it.
    pub fn remote_accessible(&self) -> bool {
        self.remote_accessible
    }

    /// Registration order; never reused within a registry.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Who unregisters it.
    pub fn owner(&self) -> Owner {
        self.owner
    }

    /// Whether a put or get may wait for it to become live or go.
    pub fn is_passing(&self) -> bool {
        self.state().is_passing()
    }

    /// Whether its range stays blocked until something is done about it. Not so what has just gone, which who looked earlier may still hold.
    pub fn is_stuck(&self) -> bool {
        self.state().is_stuck()
    }

    /// Whether its range is free again, for good.
    pub fn is_gone(&self) -> bool {
        self.state() == State::Gone
    }

    /// Whether it is registered now: committed, and its removal has not begun.
    pub fn is_live(&self) -> bool {
        self.state() == State::Live
    }

    /// Its keys, if devices know it. Set before the region is live, or when the first transport that has devices is installed.
    pub fn registrations(&self) -> Option<&Registrations> {
        self.details.get()?.registrations.get()
    }

    /// False if it has them already. Under the registry's lock, or before it is live.
    pub(super) fn set_registrations(&self, registrations: Registrations) -> bool {
        self.details().registrations.set(registrations).is_ok()
    }

    fn details(&self) -> &Details {
        self.details.get_or_init(Box::default)
    }

    /// What registering it took; `None` if neither a device nor a metadata server knows it, or the registration has not ended.
    pub fn cost(&self) -> Option<RegistrationCost> {
        let kept = self.registrations().and_then(|registrations| registrations.cost.get());
        let publishing = self.details.get()?.publishing.get().copied();
        if kept.is_none() && publishing.is_none() {
            return None;
        }
        let mut cost = kept.map_or_else(RegistrationCost::default, |cost| (**cost).clone());
        cost.publishing = publishing.unwrap_or_default();
        cost.total += cost.publishing;
        Some(cost)
    }

    /// Keeps what telling a metadata server of it took. Once.
    pub fn set_publishing(&self, spent: Duration) {
        let _ = self.details().publishing.set(spent);
    }

    /// Keeps what registering it took. Once; without effect where no device knows the region.
    pub fn set_cost(&self, cost: Arc<RegistrationCost>) {
        if let Some(registrations) = self.registrations() {
            let _ = registrations.cost.set(cost);
        }
    }

    /// How many guards are held on it now; for texts.
    pub fn in_flight(&self) -> u64 {
        self.in_flight.count()
    }

    pub(super) fn state(&self) -> State {
        #[cfg(all(test, not(loom)))]
        slowness::dawdle();
        State::from_number(self.state.load(Ordering::Acquire))
    }

    /// Under the registry's lock.
    pub(super) fn set_state(&self, state: State) {
        self.state.store(state as u8, Ordering::Release);
        #[cfg(all(test, not(loom)))]
        slowness::rest();
    }

    /// Whether registering `range` with `options` again may count a reference on this one.
    pub(super) fn counts(&self, range: MemoryRange, options: &RegionOptions) -> bool {
        self.owner == Owner::Program
            && self.is_sharable()
            && options.counted
            && self.is_live()
            && self.range == range
            && self.remote_accessible == options.remote_accessible
            && self.location == options.location
            && self.references.load(Ordering::Relaxed) < u32::MAX
    }

    pub(super) fn is_sharable(&self) -> bool {
        self.sharable.load(Ordering::Relaxed)
    }

    /// No more references are added. Under the registry's lock.
    pub(super) fn end_sharing(&self) {
        self.sharable.store(false, Ordering::Relaxed);
    }

    /// Under the registry's lock.
    pub(super) fn add_reference(&self) {
        self.references.fetch_add(1, Ordering::Relaxed);
    }

    /// Gives one reference back unless it is the last; true if it did. Under the registry's lock.
    pub(super) fn drop_reference_unless_last(&self) -> bool {
        let others = self.references.load(Ordering::Relaxed) > 1;
        if others {
            self.references.fetch_sub(1, Ordering::Relaxed);
        }
        others
    }
}

/// Threads that look at states or change them slowly, so that what comes between two steps does come.
#[cfg(all(test, not(loom)))]
pub(crate) mod slowness {
    use std::cell::Cell;
    use std::time::Duration;

    thread_local! {
        static BEFORE_LOOKING: Cell<Duration> = const { Cell::new(Duration::ZERO) };
        static AFTER_CHANGING: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    }

    /// From now on the calling thread sleeps as long before it looks at the state of a region.
    #[cfg(feature = "rdma")]
    pub fn pause_before_looking(pause: Duration) {
        BEFORE_LOOKING.set(pause);
    }

    /// From now on the calling thread sleeps as long after it has changed the state of a region.
    pub fn pause_after_changing(pause: Duration) {
        AFTER_CHANGING.set(pause);
    }

    pub(super) fn dawdle() {
        sleep(BEFORE_LOOKING.get());
    }

    pub(super) fn rest() {
        sleep(AFTER_CHANGING.get());
    }

    fn sleep(pause: Duration) {
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_numbers_round_trip() {
        for state in [State::Reserved, State::Live, State::Draining, State::DrainGivenUp, State::Quarantined, State::Gone] {
            assert_eq!(State::from_number(state as u8), state);
        }
    }

    #[test]
    fn a_range_is_registered_or_becomes_free_by_itself_unless_its_region_is_stuck() {
        let stuck = |state: &State| state.is_stuck();
        let states = [State::Reserved, State::Live, State::Draining, State::DrainGivenUp, State::Quarantined, State::Gone];
        assert_eq!(states.into_iter().filter(stuck).collect::<Vec<_>>(), [State::DrainGivenUp, State::Quarantined]);
        assert!(states.iter().all(|state| !(state.is_stuck() && state.is_passing())));
    }

    #[test]
    fn a_region_is_small() {
        assert!(std::mem::size_of::<Region>() <= 72, "{}", std::mem::size_of::<Region>());
    }
}
