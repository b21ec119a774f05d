//! Who has which part of the arena: leases, those who wait for one, and closing. It knows units, not addresses.
//!
//! ```text
//!   |  common  |  reserve of puts  |  reserve of gets  |
//! ```
//!
//! A lease lies in one part. Each direction takes from its own reserve first, then from the common part; who says no direction has the
//! common part only. The cap on leases is divided likewise.
//!
//! A lease goes from *out* to *free*, or from *out* to *quarantined* to *free*. Its id is drawn from one counter of the process, so one that
//! was released, or belongs to another pool, is found to name nothing.
//!
//! **First come, first served.** Those who wait stand in one queue a direction, and nobody passes another of the same direction. The common
//! part is given to the one who has waited longest of all, or to nobody: others take from their own reserve alone meanwhile, so that room
//! for a large lease can gather. Whatever makes room serves those who wait before it gives the lock back: releasing, the end of a
//! quarantine or of a trim, and whoever leaves the queue, since others may have stood behind.
//!
//! **No wake-up is lost.** An answer is written under the lock to the ticket of the one who waits, who looks for it under the lock before
//! each sleep and gives the lock up only by sleeping.
//!
//! **After closing nothing is out**: the state turns to Closed under the lock that leases are granted under, at a moment when none is out.
//!
//! Who locks what: one mutex, for O(log n) steps; no allocation but for growing, none of the system's calls but to wake one who waits.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[cfg(all(test, loom))]
use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
#[cfg(not(all(test, loom)))]
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use super::extents::{Extent, Extents};

/// What a lease is for, which says whose reserve it may take from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Neither: the common part only.
    Any = 0,
    /// Bytes that go to a peer.
    Put = 1,
    /// Bytes that come from one.
    Get = 2,
}

const DIRECTIONS: [Direction; 3] = [Direction::Any, Direction::Put, Direction::Get];
/// The part that belongs to no direction.
const COMMON: usize = Direction::Any as usize;

/// A part of the arena: how many units, and how many leases at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Its units.
    pub units: u32,
    /// Its leases.
    pub leases: u32,
}

/// What was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Id of the lease; never 0.
    pub id: u64,
    /// Where it is.
    pub extent: Extent,
}

/// Why something was not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// No room within the time.
    Exhausted,
    /// The pool is being closed, and may be open again afterwards.
    Closing,
    /// The pool is closed.
    Closed,
    /// No such lease is out.
    Unknown,
    /// The lease was released already, and waits for the end of its batch.
    Quarantined,
    /// So many leases are out, so many of them quarantined.
    Busy {
        /// All that are not free.
        leases: u64,
        /// Those that wait for the end of a batch.
        quarantined: u64,
        /// Puts and gets that are inside.
        calls: u64,
    },
}

/// What happened, and what is. Units where not said otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Leases that are out or quarantined.
    pub leases: u64,
    /// Their units.
    pub leased: u64,
    /// The most units that were leased at a time.
    pub most_leased: u64,
    /// Leases that are quarantined.
    pub quarantined: u64,
    /// Threads that wait for a lease.
    pub waiting: u64,
    /// Leases that were granted.
    pub acquired: u64,
    /// Acquires that had to wait.
    pub waited: u64,
    /// Acquires that found no room within their time.
    pub refused: u64,
    /// Leases that were ever quarantined.
    pub ever_quarantined: u64,
    /// The longest lease that could be granted now, of any part.
    pub longest_free: u64,
}

struct Part {
    extents: Extents,
    leases_left: u32,
}

#[derive(Clone, Copy)]
struct Slot {
    /// That of the lease; 0 if there is none.
    id: u64,
    part: usize,
    extent: Extent,
    quarantined: bool,
}

struct Waiter {
    units: u32,
    wake: Arc<Condvar>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Open,
    Closing,
    Closed,
}

struct State {
    phase: Phase,
    parts: [Part; 3],
    slots: Vec<Slot>,
    free_slots: Vec<usize>,
    /// By ticket, one for each direction.
    queues: [BTreeMap<u64, Waiter>; 3],
    /// What became of those who are in no queue any more and have not seen it yet.
    answers: BTreeMap<u64, Result<Grant, Refusal>>,
    next_ticket: u64,
    /// Puts and gets that are inside.
    calls: u64,
    figures: Figures,
}

/// The leases of one pool. Any thread may call anything.
pub struct Ledger {
    state: Mutex<State>,
    /// For who closes, and for who pauses.
    idle: Condvar,
}

/// When a time that begins now is over. Too far away to be told is for ever.
fn end_of(limit: Option<Duration>) -> Option<Instant> {
    limit.and_then(|limit| Instant::now().checked_add(limit))
}

/// Sleeps until somebody wakes this thread, or for no reason, or until `end`. False, without sleep, if that has passed.
fn sleep<'a>(wake: &Condvar, state: MutexGuard<'a, State>, end: Option<Instant>) -> (MutexGuard<'a, State>, bool) {
    let Some(end) = end else {
        return (wake.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner()), true);
    };
    let rest = end.saturating_duration_since(Instant::now());
    if rest.is_zero() {
        return (state, false);
    }
    (wake.wait_timeout(state, rest).unwrap_or_else(|poisoned| poisoned.into_inner()).0, true)
}

/// Ids are a number of the process in the upper part, a slot in the lower.
const SLOT_BITS: u32 = 16;
/// The most leases that a pool can have at a time.
pub const MOST_LEASES: u32 = 1 << SLOT_BITS;

impl Ledger {
    /// Shares of the common part, of puts and of gets, one behind the other. All their units fit into 32 bits, all their leases are
    /// at most [`MOST_LEASES`].
    pub fn new(shares: [Share; 3]) -> Ledger {
        let mut start = 0;
        let parts = shares.map(|share| {
            let extents = Extents::new(start, share.units);
            start += share.units;
            Part { extents, leases_left: share.leases }
        });
        Ledger {
            state: Mutex::new(State {
                phase: Phase::Open,
                parts,
                slots: Vec::new(),
                free_slots: Vec::new(),
                queues: Default::default(),
                answers: BTreeMap::new(),
                next_ticket: 0,
                calls: 0,
                figures: Figures::default(),
            }),
            idle: Condvar::new(),
        }
    }

    /// Grants a lease of `units`, at least one, waiting for up to `limit` (`None`: for as long as it takes).
    ///
    /// Refused as Exhausted, Closing or Closed.
    pub fn acquire(&self, direction: Direction, units: u32, limit: Option<Duration>) -> Result<Grant, Refusal> {
        let mut state = self.lock();
        state.check_open()?;
        if state.queues[direction as usize].is_empty() {
            let nobody_waits = state.queues.iter().all(BTreeMap::is_empty);
            if let Some(grant) = state.grant(direction, units, nobody_waits) {
                return Ok(grant);
            }
        }
        if limit == Some(Duration::ZERO) {
            state.figures.refused += 1;
            return Err(Refusal::Exhausted);
        }
        self.wait(state, direction, units, end_of(limit))
    }

    #[cold]
    fn wait(
        &self,
        mut state: MutexGuard<'_, State>,
        direction: Direction,
        units: u32,
        end: Option<Instant>,
    ) -> Result<Grant, Refusal> {
        let wake = Arc::new(Condvar::new());
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        state.figures.waited += 1;
        state.figures.waiting += 1;
        state.queues[direction as usize].insert(ticket, Waiter { units, wake: wake.clone() });
        loop {
            if let Some(answer) = state.answers.remove(&ticket) {
                return answer;
            }
            let is_in_time;
            (state, is_in_time) = sleep(&wake, state, end);
            if !is_in_time {
                state.queues[direction as usize].remove(&ticket);
                state.figures.waiting -= 1;
                state.figures.refused += 1;
                state.serve();
                return Err(Refusal::Exhausted);
            }
        }
    }

    /// Ends a lease that nothing uses any more.
    ///
    /// Refused as Unknown, Quarantined or Closed.
    pub fn release(&self, id: u64) -> Result<(), Refusal> {
        let mut state = self.lock();
        let slot = state.find(id)?;
        if state.slots[slot].quarantined {
            return Err(Refusal::Quarantined);
        }
        self.free(&mut state, slot);
        Ok(())
    }

    /// Ends a lease whose memory may still be used until [`Ledger::end_quarantine`]. Refused as [`Ledger::release`] is.
    pub fn quarantine(&self, id: u64) -> Result<(), Refusal> {
        let mut state = self.lock();
        let slot = state.find(id)?;
        if std::mem::replace(&mut state.slots[slot].quarantined, true) {
            return Err(Refusal::Quarantined);
        }
        state.figures.quarantined += 1;
        state.figures.ever_quarantined += 1;
        Ok(())
    }

    /// Nothing uses a quarantined lease any more.
    pub fn end_quarantine(&self, id: u64) {
        let mut state = self.lock();
        // Not there: the pool was closed with its engine.
        let Ok(slot) = state.find(id) else { return };
        if std::mem::replace(&mut state.slots[slot].quarantined, false) {
            state.figures.quarantined -= 1;
            self.free(&mut state, slot);
        }
    }

    /// Begins a put or get, during which the ledger is not closed but by [`Ledger::invalidate`].
    ///
    /// Refused as Closing or Closed.
    pub fn enter(&self) -> Result<(), Refusal> {
        let mut state = self.lock();
        state.check_open()?;
        state.calls += 1;
        Ok(())
    }

    /// Ends what [`Ledger::enter`] began.
    pub fn leave(&self) {
        let mut state = self.lock();
        state.calls -= 1;
        self.tell_if_idle(&state);
    }

    /// Sleeps, but not after the ledger is closed.
    pub fn pause(&self, limit: Duration) {
        let end = end_of(Some(limit));
        let (mut state, mut is_in_time) = (self.lock(), true);
        while is_in_time && state.phase != Phase::Closed {
            (state, is_in_time) = sleep(&self.idle, state, end);
        }
    }

    /// Closes when no lease is out and no call inside, waiting for that for up to `limit` (`None`: for as long as it takes). With a limit
    /// of 0 leases that are out change nothing; else none is granted meanwhile, those who wait for one are refused, and when the time has
    /// passed it is open as before.
    ///
    /// Refused as Busy, also if somebody else is closing it, or Closed.
    pub fn close(&self, limit: Option<Duration>) -> Result<(), Refusal> {
        let mut state = self.lock();
        match state.phase {
            Phase::Open => {}
            Phase::Closing => return Err(state.busy()),
            Phase::Closed => return Err(Refusal::Closed),
        }
        if !state.is_idle() {
            if limit == Some(Duration::ZERO) {
                return Err(state.busy());
            }
            state.phase = Phase::Closing;
            state.refuse_all(Refusal::Closing);
            let end = end_of(limit);
            while !state.is_idle() && state.phase == Phase::Closing {
                let is_in_time;
                (state, is_in_time) = sleep(&self.idle, state, end);
                if !is_in_time {
                    state.phase = Phase::Open;
                    return Err(state.busy());
                }
            }
            if state.phase == Phase::Closed {
                return Err(Refusal::Closed);
            }
        }
        state.phase = Phase::Closed;
        Ok(())
    }

    /// Undoes a [`Ledger::close`] after which something failed.
    pub fn reopen(&self) {
        self.lock().phase = Phase::Open;
    }

    /// Closes at once. Leases that are out become unknown, those who wait are refused.
    pub fn invalidate(&self) {
        let mut state = self.lock();
        state.phase = Phase::Closed;
        state.refuse_all(Refusal::Closed);
        drop(state);
        self.idle.notify_all();
    }

    /// Calls `visit` for one free extent after the other, each of which is out of everybody's reach meanwhile. What becomes free or is
    /// taken while it runs may be left out.
    pub fn visit_free(&self, mut visit: impl FnMut(Extent)) {
        for part in 0..DIRECTIONS.len() {
            let mut start = 0;
            while let Some(extent) = { self.lock().parts[part].extents.take_next(start) } {
                // Not reached only if it panics, and then these units are lost and nothing else.
                visit(extent);
                start = extent.start + extent.units;
                let mut state = self.lock();
                state.parts[part].extents.give_back(extent);
                state.serve();
            }
        }
    }

    /// What is and was.
    pub fn figures(&self) -> Figures {
        let state = self.lock();
        let available = state.parts.iter().filter(|part| part.leases_left > 0);
        let longest_free = available.map(|part| u64::from(part.extents.longest())).max().unwrap_or(0);
        Figures { longest_free, ..state.figures }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere does not make the state wrong.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn free(&self, state: &mut State, slot: usize) {
        state.free(slot);
        self.tell_if_idle(state);
    }

    fn tell_if_idle(&self, state: &State) {
        if state.phase == Phase::Closing && state.is_idle() {
            self.idle.notify_all();
        }
    }
}

impl State {
    fn check_open(&self) -> Result<(), Refusal> {
        match self.phase {
            Phase::Open => Ok(()),
            Phase::Closing => Err(Refusal::Closing),
            Phase::Closed => Err(Refusal::Closed),
        }
    }

    fn is_idle(&self) -> bool {
        self.figures.leases == 0 && self.calls == 0
    }

    fn busy(&self) -> Refusal {
        Refusal::Busy { leases: self.figures.leases, quarantined: self.figures.quarantined, calls: self.calls }
    }

    fn find(&self, id: u64) -> Result<usize, Refusal> {
        if self.phase == Phase::Closed {
            return Err(Refusal::Closed);
        }
        let slot = (id & u64::from(MOST_LEASES - 1)) as usize;
        match self.slots.get(slot) {
            Some(found) if id != 0 && found.id == id => Ok(slot),
            _ => Err(Refusal::Unknown),
        }
    }

    fn grant(&mut self, direction: Direction, units: u32, from_common: bool) -> Option<Grant> {
        let own = direction as usize;
        let candidates = [(own, own != COMMON || from_common), (COMMON, own != COMMON && from_common)];
        let (part, extent) = candidates.into_iter().filter(|(_, allowed)| *allowed).find_map(|(index, _)| {
            let part = &mut self.parts[index];
            let extent = if part.leases_left > 0 { part.extents.take(units) } else { None }?;
            part.leases_left -= 1;
            Some((index, extent))
        })?;
        let slot = self.free_slots.pop().unwrap_or(self.slots.len());
        /// Drawn in all pools of a process and its children, so that no id ever means two leases: it lasts for two years at five
        /// million a second.
        static DRAWN: AtomicU64 = AtomicU64::new(0);
        let id = (DRAWN.fetch_add(1, Ordering::Relaxed) + 1) << SLOT_BITS | slot as u64;
        let lease = Slot { id, part, extent, quarantined: false };
        match self.slots.get_mut(slot) {
            Some(place) => *place = lease,
            None => self.slots.push(lease),
        }
        let figures = &mut self.figures;
        figures.acquired += 1;
        figures.leases += 1;
        figures.leased += u64::from(extent.units);
        figures.most_leased = figures.most_leased.max(figures.leased);
        Some(Grant { id, extent })
    }

    fn free(&mut self, slot: usize) {
        let Slot { part, extent, .. } = self.slots[slot];
        self.slots[slot].id = 0;
        self.free_slots.push(slot);
        self.parts[part].extents.give_back(extent);
        self.parts[part].leases_left += 1;
        self.figures.leases -= 1;
        self.figures.leased -= u64::from(extent.units);
        self.serve();
    }

    /// Grants what can be granted to those who wait.
    fn serve(&mut self) {
        while self.figures.waiting > 0 && self.serve_one() {}
    }

    fn serve_one(&mut self) -> bool {
        let mut heads = DIRECTIONS.map(|direction| {
            let first = self.queues[direction as usize].first_key_value();
            first.map(|(ticket, waiter)| (*ticket, waiter.units, direction))
        });
        heads.sort_by_key(|head| head.map_or(u64::MAX, |(ticket, ..)| ticket));
        for (index, (ticket, units, direction)) in heads.into_iter().flatten().enumerate() {
            if let Some(grant) = self.grant(direction, units, index == 0) {
                self.answer(direction, ticket, Ok(grant));
                return true;
            }
        }
        false
    }

    fn answer(&mut self, direction: Direction, ticket: u64, answer: Result<Grant, Refusal>) {
        if let Some(waiter) = self.queues[direction as usize].remove(&ticket) {
            self.figures.waiting -= 1;
            self.answers.insert(ticket, answer);
            waiter.wake.notify_one();
        }
    }

    fn refuse_all(&mut self, refusal: Refusal) {
        for direction in DIRECTIONS {
            while let Some((&ticket, _)) = self.queues[direction as usize].first_key_value() {
                self.answer(direction, ticket, Err(refusal));
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn ledger(shares: [(u32, u32); 3]) -> Ledger {
        Ledger::new(shares.map(|(units, leases)| Share { units, leases }))
    }

    fn now(ledger: &Ledger, direction: Direction, units: u32) -> Result<Grant, Refusal> {
        ledger.acquire(direction, units, Some(Duration::ZERO))
    }

    /// Returns when so many threads wait.
    fn await_waiting(ledger: &Ledger, count: u64) {
        while ledger.figures().waiting != count {
            std::thread::yield_now();
        }
    }

    /// What the ledger must do, by looking at every unit.
    #[derive(Clone)]
    struct Model {
        /// First unit, and whether each is taken.
        parts: Vec<(u32, Vec<bool>)>,
        leases_left: Vec<u32>,
        /// By id: part, extent, quarantined.
        leases: BTreeMap<u64, (usize, Extent, bool)>,
        closed: bool,
    }

    impl Model {
        fn new(shares: [(u32, u32); 3]) -> Model {
            let mut start = 0;
            let parts = shares.map(|(units, _)| {
                start += units;
                (start - units, vec![false; units as usize])
            });
            let leases_left = shares.map(|(_, leases)| leases);
            Model { parts: parts.into(), leases_left: leases_left.into(), leases: BTreeMap::new(), closed: false }
        }

        fn place(&self, part: usize, units: u32) -> Option<Extent> {
            let (first, taken) = &self.parts[part];
            let runs = taken.split(|taken| *taken).scan(0, |at, run| {
                let start = *at;
                *at += run.len() as u32 + 1;
                Some((run.len() as u32, first + start))
            });
            let (length, start) = runs.filter(|(length, _)| *length >= units).min()?;
            (self.leases_left[part] > 0).then_some(Extent { start: start + length - units, units })
        }

        /// Where a lease must be granted, if at all.
        fn grant(&self, direction: Direction, units: u32) -> Option<(usize, Extent)> {
            let own = direction as usize;
            [own, COMMON].into_iter().find_map(|part| Some((part, self.place(part, units)?)))
        }

        fn set(&mut self, part: usize, extent: Extent, value: bool) {
            let (first, taken) = &mut self.parts[part];
            for unit in extent.start..extent.start + extent.units {
                assert_eq!(std::mem::replace(&mut taken[(unit - *first) as usize], value), !value);
            }
        }

        fn free(&mut self, id: u64) {
            let (part, extent, _) = self.leases.remove(&id).unwrap();
            self.set(part, extent, false);
            self.leases_left[part] += 1;
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Acquire(u8, u32),
        Release(usize),
        Quarantine(usize),
        EndQuarantine(usize),
        VisitFree,
        Close,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            8 => (0..3_u8, 1..12_u32).prop_map(|(direction, units)| Step::Acquire(direction, units)),
            4 => any::<usize>().prop_map(Step::Release),
            2 => any::<usize>().prop_map(Step::Quarantine),
            2 => any::<usize>().prop_map(Step::EndQuarantine),
            1 => Just(Step::VisitFree),
            1 => Just(Step::Close),
        ];
        prop::collection::vec(step, 0..150)
    }

    proptest! {
        #[test]
        fn leases_are_those_of_a_naive_model(
            shares in [(1..40_u32, 1..8_u32), (0..20_u32, 0..4_u32), (0..20_u32, 0..4_u32)],
            steps in steps(),
        ) {
            let ledger = ledger(shares);
            let mut model = Model::new(shares);
            // Every id there ever was, most of them stale, and some that never were.
            let mut ids = vec![0, 1, u64::MAX];
            for step in steps {
                match step {
                    Step::Acquire(direction, units) => {
                        let direction = DIRECTIONS[direction as usize];
                        let expected = model.grant(direction, units).filter(|_| !model.closed);
                        match now(&ledger, direction, units) {
                            Ok(grant) => {
                                let (part, extent) = expected.unwrap();
                                prop_assert_eq!(grant.extent, extent);
                                prop_assert!(!ids.contains(&grant.id));
                                model.set(part, extent, true);
                                model.leases_left[part] -= 1;
                                model.leases.insert(grant.id, (part, extent, false));
                                ids.push(grant.id);
                            }
                            Err(refusal) => {
                                let closed = if model.closed { Refusal::Closed } else { Refusal::Exhausted };
                                prop_assert_eq!((refusal, expected), (closed, None));
                            }
                        }
                    }
                    Step::Release(index) | Step::Quarantine(index) => {
                        let id = ids[index % ids.len()];
                        let is_quarantine = matches!(step, Step::Quarantine(_));
                        let outcome = if is_quarantine { ledger.quarantine(id) } else { ledger.release(id) };
                        let expected = match model.leases.get_mut(&id) {
                            _ if model.closed => Err(Refusal::Closed),
                            None => Err(Refusal::Unknown),
                            Some((.., true)) => Err(Refusal::Quarantined),
                            Some((.., quarantined)) => {
                                *quarantined = true;
                                if !is_quarantine {
                                    model.free(id);
                                }
                                Ok(())
                            }
                        };
                        prop_assert_eq!(outcome, expected);
                    }
                    Step::EndQuarantine(index) => {
                        let id = ids[index % ids.len()];
                        ledger.end_quarantine(id);
                        if model.leases.get(&id).is_some_and(|(.., quarantined)| *quarantined) {
                            model.free(id);
                        }
                    }
                    Step::VisitFree => {
                        let mut units = 0;
                        ledger.visit_free(|extent| units += extent.units as usize);
                        let free = model.parts.iter().flat_map(|(_, taken)| taken).filter(|taken| !**taken).count();
                        prop_assert_eq!(units, free);
                    }
                    Step::Close => {
                        let leases = model.leases.len() as u64;
                        let quarantined = model.leases.values().filter(|(.., quarantined)| *quarantined).count() as u64;
                        let expected = match leases {
                            _ if model.closed => Err(Refusal::Closed),
                            0 => Ok(()),
                            _ => Err(Refusal::Busy { leases, quarantined, calls: 0 }),
                        };
                        prop_assert_eq!(ledger.close(Some(Duration::ZERO)), expected);
                        model.closed |= leases == 0;
                    }
                }
                let figures = ledger.figures();
                prop_assert_eq!(figures.leases, model.leases.len() as u64);
                prop_assert_eq!(figures.leased, model.leases.values().map(|(_, extent, _)| u64::from(extent.units)).sum::<u64>());
            }
        }
    }

    /// One that waits, begun after those before it.
    fn wait_in_line<'scope>(
        scope: &'scope std::thread::Scope<'scope, '_>,
        ledger: &'scope Ledger,
        direction: Direction,
        units: u32,
    ) -> std::thread::ScopedJoinHandle<'scope, Result<Grant, Refusal>> {
        let before = ledger.figures().waiting;
        let waiter = scope.spawn(move || ledger.acquire(direction, units, None));
        await_waiting(ledger, before + 1);
        waiter
    }

    #[test]
    fn who_waits_is_served_in_the_order_of_arrival_whatever_the_size() {
        let ledger = ledger([(8, 8), (0, 0), (0, 0)]);
        let leases: Vec<_> = (0..4).map(|_| now(&ledger, Direction::Any, 2).unwrap().id).collect();
        std::thread::scope(|scope| {
            let large = wait_in_line(scope, &ledger, Direction::Put, 6);
            let small = wait_in_line(scope, &ledger, Direction::Get, 2);
            let last = wait_in_line(scope, &ledger, Direction::Any, 1);
            ledger.release(leases[0]).unwrap();
            // There is room for it, but others wait.
            assert_eq!(now(&ledger, Direction::Any, 1), Err(Refusal::Exhausted));
            ledger.release(leases[1]).unwrap();
            assert_eq!(ledger.figures().waiting, 3, "the small ones do not pass the large one");
            ledger.release(leases[2]).unwrap();
            let large = large.join().unwrap().unwrap();
            assert_eq!((large.extent.units, ledger.figures().waiting), (6, 2));
            ledger.release(leases[3]).unwrap();
            small.join().unwrap().unwrap();
            assert_eq!(ledger.figures().waiting, 1);
            ledger.release(large.id).unwrap();
            last.join().unwrap().unwrap();
        });
        assert_eq!(ledger.figures().waited, 3);
    }

    #[test]
    fn neither_direction_starves_the_other_in_bytes_or_in_leases() {
        for (mine, other) in [(Direction::Put, Direction::Get), (Direction::Get, Direction::Put)] {
            let ledger = ledger([(6, 3), (2, 1), (2, 1)]);
            let mut held: Vec<_> = std::iter::from_fn(|| now(&ledger, mine, 2).ok()).collect();
            assert_eq!(held.len(), 4, "its own reserve, and all that is common");
            held.extend(now(&ledger, Direction::Any, 1).ok());
            assert_eq!(held.len(), 4);
            std::thread::scope(|scope| {
                let waiter = wait_in_line(scope, &ledger, mine, 2);
                for _ in 0..100 {
                    let lease = now(&ledger, other, 2).unwrap();
                    ledger.release(lease.id).unwrap();
                }
                assert_eq!(ledger.figures().waiting, 1);
                ledger.release(held[0].id).unwrap();
                waiter.join().unwrap().unwrap();
            });
            // Many small leases take no more of the other's.
            let ledger = self::ledger([(60, 3), (20, 1), (20, 1)]);
            assert_eq!(std::iter::from_fn(|| now(&ledger, mine, 1).ok()).count(), 4);
            assert!(now(&ledger, other, 20).is_ok());
        }
    }

    #[test]
    fn who_gives_up_lets_those_behind_go_on() {
        let ledger = ledger([(4, 4), (0, 0), (0, 0)]);
        let held = now(&ledger, Direction::Any, 2).unwrap();
        std::thread::scope(|scope| {
            let large = scope.spawn(|| ledger.acquire(Direction::Any, 4, Some(Duration::from_millis(200))));
            // Either it stands behind, or it comes when the other has given up.
            let small = scope.spawn(|| ledger.acquire(Direction::Any, 2, None));
            assert_eq!(large.join().unwrap(), Err(Refusal::Exhausted));
            let small = small.join().unwrap().unwrap();
            ledger.release(small.id).unwrap();
        });
        ledger.release(held.id).unwrap();
        assert_eq!(ledger.close(Some(Duration::ZERO)), Ok(()));
    }

    #[test]
    fn closing_refuses_who_waits_and_opens_again_when_its_time_has_passed() {
        let ledger = ledger([(4, 4), (0, 0), (0, 0)]);
        let held = now(&ledger, Direction::Any, 4).unwrap();
        let busy = Err(Refusal::Busy { leases: 1, quarantined: 0, calls: 0 });
        std::thread::scope(|scope| {
            let waiter = wait_in_line(scope, &ledger, Direction::Any, 1);
            assert_eq!(ledger.close(Some(Duration::ZERO)), busy);
            assert_eq!(ledger.figures().waiting, 1, "a look changes nothing");
            assert_eq!(ledger.close(Some(Duration::from_millis(1))), busy);
            assert_eq!(waiter.join().unwrap(), Err(Refusal::Closing));
        });
        ledger.release(held.id).unwrap();
        let next = now(&ledger, Direction::Any, 4).unwrap();
        std::thread::scope(|scope| {
            let closing = scope.spawn(|| ledger.close(None));
            while now(&ledger, Direction::Any, 4) != Err(Refusal::Closing) {
                std::thread::yield_now();
            }
            assert_eq!(ledger.close(None), busy, "one closes at a time");
            ledger.quarantine(next.id).unwrap();
            ledger.end_quarantine(next.id);
            assert_eq!(closing.join().unwrap(), Ok(()));
        });
        assert_eq!(ledger.release(next.id), Err(Refusal::Closed));
        assert_eq!(now(&ledger, Direction::Any, 1), Err(Refusal::Closed));
    }

    #[test]
    fn invalidating_ends_waits_and_leases_at_once() {
        let ledger = ledger([(4, 4), (0, 0), (0, 0)]);
        let held = now(&ledger, Direction::Any, 4).unwrap();
        std::thread::scope(|scope| {
            let waiter = wait_in_line(scope, &ledger, Direction::Put, 1);
            ledger.invalidate();
            assert_eq!(waiter.join().unwrap(), Err(Refusal::Closed));
        });
        assert_eq!(ledger.release(held.id), Err(Refusal::Closed));
        assert_eq!(ledger.close(None), Err(Refusal::Closed));
    }
}

/// The interleavings of those who acquire, release and close, with up to three forced switches between threads. A lost wake-up shows as
/// a deadlock, since nobody times out; memory that two have at a time as accesses that are not ordered.
#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::thread;

    struct Bench {
        ledger: Ledger,
        bytes: [UnsafeCell<()>; 2],
    }

    impl Bench {
        fn new(units: u32) -> Arc<Bench> {
            let common = Share { units, leases: 2 };
            let none = Share { units: 0, leases: 0 };
            Arc::new(Bench { ledger: Ledger::new([common, none, none]), bytes: Default::default() })
        }

        fn acquire(&self, direction: Direction, units: u32) -> Result<Grant, Refusal> {
            self.ledger.acquire(direction, units, None)
        }

        /// Uses the memory, as its only user.
        fn write(&self, grant: Grant) {
            for unit in grant.extent.start..grant.extent.start + grant.extent.units {
                self.bytes[unit as usize].with_mut(|_| ());
            }
        }

        fn use_once(&self, direction: Direction, units: u32) {
            let grant = self.acquire(direction, units).unwrap();
            self.write(grant);
            self.ledger.release(grant.id).unwrap();
        }
    }

    fn model(run: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(run);
    }

    #[test]
    fn a_lease_is_handed_over_to_whoever_waits() {
        model(|| {
            let bench = Bench::new(2);
            let users: Vec<_> = [(Direction::Put, 2), (Direction::Get, 1)]
                .into_iter()
                .map(|(direction, units)| {
                    let bench = bench.clone();
                    thread::spawn(move || bench.use_once(direction, units))
                })
                .collect();
            bench.use_once(Direction::Any, 2);
            users.into_iter().for_each(|user| user.join().unwrap());
            let figures = bench.ledger.figures();
            assert_eq!((figures.leases, figures.waiting, figures.acquired), (0, 0, 3));
        });
    }

    #[test]
    fn of_two_that_wait_the_first_is_served_first() {
        model(|| {
            let bench = Bench::new(1);
            let order = Arc::new(Mutex::new(Vec::new()));
            let held = bench.acquire(Direction::Any, 1).unwrap();
            let waiters: Vec<_> = [Direction::Put, Direction::Get]
                .into_iter()
                .map(|direction| {
                    let (bench, order) = (bench.clone(), order.clone());
                    thread::spawn(move || {
                        let grant = bench.acquire(direction, 1).unwrap();
                        order.lock().unwrap().push(direction);
                        bench.ledger.release(grant.id).unwrap();
                    })
                })
                .collect();
            // Who stands in line now, and since when.
            let state = bench.ledger.lock();
            let ticket = |direction: Direction| state.queues[direction as usize].first_key_value().map(|(ticket, _)| *ticket);
            let (put, get) = (ticket(Direction::Put), ticket(Direction::Get));
            drop(state);
            bench.ledger.release(held.id).unwrap();
            waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
            let order = order.lock().unwrap().clone();
            match (put, get) {
                (Some(put), Some(get)) => assert_eq!(order[0] == Direction::Put, put < get),
                (Some(_), None) => assert_eq!(order[0], Direction::Put),
                (None, Some(_)) => assert_eq!(order[0], Direction::Get),
                (None, None) => {}
            }
        });
    }

    #[test]
    fn closing_waits_for_the_last_lease_and_refuses_or_waits_for_others() {
        model(|| {
            let bench = Bench::new(1);
            let held = bench.acquire(Direction::Any, 1).unwrap();
            let holder = {
                let bench = bench.clone();
                thread::spawn(move || {
                    bench.write(held);
                    bench.ledger.release(held.id).unwrap();
                })
            };
            let other = {
                let bench = bench.clone();
                thread::spawn(move || match bench.acquire(Direction::Put, 1) {
                    Ok(grant) => {
                        bench.write(grant);
                        bench.ledger.release(grant.id).unwrap();
                    }
                    Err(refusal) => assert!(matches!(refusal, Refusal::Closing | Refusal::Closed)),
                })
            };
            bench.ledger.close(None).unwrap();
            // The owner of the memory takes it back.
            bench.bytes[0].with_mut(|_| ());
            holder.join().unwrap();
            other.join().unwrap();
        });
    }

    #[test]
    fn closing_waits_for_the_end_of_a_quarantine() {
        model(|| {
            let bench = Bench::new(1);
            let held = bench.acquire(Direction::Any, 1).unwrap();
            bench.ledger.quarantine(held.id).unwrap();
            let transfer = {
                let bench = bench.clone();
                thread::spawn(move || {
                    bench.write(held);
                    bench.ledger.end_quarantine(held.id);
                })
            };
            bench.ledger.close(None).unwrap();
            bench.bytes[0].with_mut(|_| ());
            transfer.join().unwrap();
        });
    }

    #[test]
    fn closing_waits_for_the_calls_that_are_inside() {
        model(|| {
            let bench = Bench::new(1);
            let call = {
                let bench = bench.clone();
                thread::spawn(move || {
                    if bench.ledger.enter().is_err() {
                        return;
                    }
                    if let Ok(grant) = bench.acquire(Direction::Put, 1) {
                        bench.write(grant);
                        bench.ledger.release(grant.id).unwrap();
                    }
                    // The arena stays while it is inside, with a lease and without one.
                    bench.bytes[0].with_mut(|_| ());
                    bench.ledger.leave();
                })
            };
            bench.ledger.close(None).unwrap();
            bench.bytes[0].with_mut(|_| ());
            call.join().unwrap();
        });
    }

    #[test]
    fn invalidating_wakes_everybody() {
        model(|| {
            let bench = Bench::new(1);
            let held = bench.acquire(Direction::Any, 1).unwrap();
            let waiter = {
                let bench = bench.clone();
                // By whoever closes, if that comes first.
                thread::spawn(move || assert!(matches!(bench.acquire(Direction::Put, 1), Err(Refusal::Closing | Refusal::Closed))))
            };
            let closer = {
                let bench = bench.clone();
                thread::spawn(move || assert_eq!(bench.ledger.close(None), Err(Refusal::Closed)))
            };
            bench.ledger.invalidate();
            assert_eq!(bench.ledger.release(held.id), Err(Refusal::Closed));
            waiter.join().unwrap();
            closer.join().unwrap();
        });
    }
}
