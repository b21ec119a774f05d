//! A NIC at work: its endpoints, what is posted on them, and the completions that come back.
//!
//! All of that is one [`State`] under one lock, which is held while work is posted and completions are polled, and released before anybody
//! is told of the end of a span: what has to be said and done afterwards is collected in a [`Fallout`].
//!
//! Invariants:
//! - A posted span is in exactly one slot. It leaves it by its completion, or when its queue pair has been destroyed; only then does anybody
//!   else get it. A completion of a slot's earlier use is known by the generation in its number, and ignored.
//! - Never more is posted than the queue pair and the completion queue have room for.
//! - An endpoint that has failed, or holds work that is to be given up, is retired: its queue pairs go to the error state, so that all that
//!   is posted comes back soon, and is moved anew whatever is said of it. If it does not within a second, the queue pairs are destroyed.
//!
//! The NIC's thread sleeps until the device says that something has completed, or until a deadline. While callers poll it leaves the device
//! unarmed, and looks for itself every millisecond only.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard, RwLock};

use super::device::{Nic, PortAddress};
use super::endpoint::{Connection, Endpoint, Phase, Retirement};
use super::outage::Outage;
use super::peer::Peer;
use super::verbs::{CompletionChannel, CompletionQueue, Library, Outcome, WorkCompletion, WorkRequest};
use super::work::{Group, Span};
use crate::config::RdmaConfig;
use crate::error::{Code, Error, Result};
use crate::registry::MemoryKey;
use crate::sys::MemoryRange;
use crate::sys::event::EventFd;
use crate::topology::Machine;
use crate::transport::{Device, NicLoad, Watchers};

/// How long flushing may take before queue pairs are destroyed.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);

/// How long a peer that has asked for a connection may take to say that it is ready.
const READY_LIMIT: Duration = Duration::from_secs(10);

/// Over how long the bandwidth is averaged before it counts.
const RATE_WINDOW: Duration = Duration::from_millis(10);

/// Longest work request, whatever the configuration says. Devices take 1 GiB or more.
const LONGEST: u64 = 1 << 30;

/// How many spans that wait for another queue pair are looked past for one that need not. All of them, each time that there is room, would
/// take quadratic time under the lock; a queue pair for which so many wait keeps the NIC busy by itself.
const MOST_PASSED: usize = 1024;

/// What there is to do once the lock is released.
#[derive(Default)]
pub(super) struct Fallout {
    /// Tasks by their groups, each with a span whose bytes are in place.
    pub moved: Vec<(Arc<Group>, Vec<u32>)>,
    /// Spans that are over.
    pub ended: Vec<(Span, Error)>,
    /// Spans to be tried again.
    pub retries: Vec<Span>,
    /// Spans to be tried again, and why they have failed.
    pub failures: Vec<(Span, Error)>,
    /// Endpoints to be connected.
    pub connect: Vec<(u32, u64, Arc<Peer>)>,
    /// Endpoints of which the peer is to be asked whether it is connected with them yet.
    pub doubts: Vec<(u32, u64, Arc<Peer>)>,
    /// Peers' NICs that are better not used for a while.
    pub pauses: Vec<Arc<str>>,
    /// To be put into the error state, each with the peer's NIC that it is for.
    pub given_up: Vec<(Arc<str>, Arc<Connection>)>,
    /// To be destroyed, likewise.
    pub dropped: Vec<(Arc<str>, Arc<Connection>)>,
}

impl Fallout {
    pub fn is_empty(&self) -> bool {
        let Fallout { moved, ended, retries, failures, connect, doubts, pauses, given_up, dropped } = self;
        moved.is_empty()
            && ended.is_empty()
            && retries.is_empty()
            && failures.is_empty()
            && connect.is_empty()
            && doubts.is_empty()
            && pauses.is_empty()
            && given_up.is_empty()
            && dropped.is_empty()
    }

    /// A span's bytes are in place.
    fn add_moved(&mut self, span: Span) {
        // Completions of few submissions come in turn.
        const FEW: usize = 4;
        match self.moved.iter_mut().rev().take(FEW).find(|(group, _)| Arc::ptr_eq(group, span.group())) {
            Some((_, tasks)) => tasks.push(span.into_moved().1),
            None => {
                let (group, task) = span.into_moved();
                self.moved.push((group, vec![task]));
            }
        }
    }
}

/// A posted span.
struct Posted {
    span: Span,
    endpoint: u32,
    pair: u16,
}

/// Posted spans by the number of their work request: place and generation.
#[derive(Default)]
struct Slots {
    slots: Vec<(u32, Option<Posted>)>,
    free: Vec<u32>,
}

impl Slots {
    fn insert(&mut self, posted: Posted) -> u64 {
        let place = self.free.pop().unwrap_or_else(|| {
            self.slots.push((0, None));
            self.slots.len() as u32 - 1
        });
        let slot = &mut self.slots[place as usize];
        slot.1 = Some(posted);
        u64::from(slot.0) << 32 | u64::from(place)
    }

    fn remove(&mut self, number: u64) -> Option<Posted> {
        let place = number as u32;
        let slot = self.slots.get_mut(place as usize).filter(|slot| slot.0 == (number >> 32) as u32)?;
        let posted = slot.1.take()?;
        slot.0 = slot.0.wrapping_add(1);
        self.free.push(place);
        Some(posted)
    }

    fn iter(&self) -> impl Iterator<Item = &Posted> {
        self.slots.iter().filter_map(|slot| slot.1.as_ref())
    }

    /// Numbers of what is posted on an endpoint.
    fn of_endpoint(&self, endpoint: u32) -> Vec<u64> {
        let posted = |(place, slot): (usize, &(u32, Option<Posted>))| {
            let number = u64::from(slot.0) << 32 | place as u64;
            slot.1.as_ref().filter(|posted| posted.endpoint == endpoint).map(|_| number)
        };
        self.slots.iter().enumerate().filter_map(posted).collect()
    }
}

/// Bytes under way, and how fast they go.
struct Load {
    in_flight: u64,
    /// Completed since the NIC is known.
    completed: u64,
    /// Completed since `since`.
    recent: u64,
    since: Instant,
    bytes_per_second: f64,
}

impl Load {
    fn posted(&mut self, bytes: u64, now: impl FnOnce() -> Instant) {
        if self.in_flight == 0 {
            (self.recent, self.since) = (0, now());
        }
        self.in_flight += bytes;
    }

    fn ended(&mut self, bytes: u64) {
        self.in_flight -= bytes;
    }

    fn completed(&mut self, bytes: u64, now: Instant) {
        self.recent += bytes;
        self.completed += bytes;
        let elapsed = now.saturating_duration_since(self.since);
        if elapsed >= RATE_WINDOW || (self.in_flight == 0 && !elapsed.is_zero()) {
            let rate = self.recent as f64 / elapsed.as_secs_f64();
            self.bytes_per_second = match self.bytes_per_second {
                0.0 => rate,
                average => 0.8 * average + 0.2 * rate,
            };
            (self.recent, self.since) = (0, now);
        }
    }
}

/// What there is of a NIC while it is open.
pub(super) struct Opened {
    pub device: Nic,
    pub channel: Arc<CompletionChannel>,
    pub queues: Vec<Arc<CompletionQueue>>,
}

/// What the lock guards.
pub(super) struct State {
    /// Why nothing is taken any more.
    closed: Option<Error>,
    endpoints: Vec<Option<Endpoint>>,
    /// The endpoint of each peer's NIC, which is used for what is submitted.
    by_path: HashMap<Arc<str>, u32>,
    /// Those that would take its place; see the module of endpoints.
    rivals: HashMap<Arc<str>, u32>,
    next_id: u64,
    /// Connected endpoints that had no room for all of their spans.
    backlog: Vec<u32>,
    slots: Slots,
    /// Those of what is open; none while nothing is.
    queues: Vec<Arc<CompletionQueue>>,
    /// Why they cannot be polled any more.
    poll_failure: Option<String>,
    /// What completion queues may get yet.
    outstanding: Vec<u32>,
    /// Limits of what is open.
    work_requests: u32,
    max_endpoints: usize,
    load: Load,
    completions: Vec<WorkCompletion>,
    requests: Vec<WorkRequest>,
    /// Whether an endpoint needs one.
    needs_clock: bool,
}

/// A NIC at work, or one that has failed and may come back.
pub(super) struct LocalNic {
    /// Its place among the transport's NICs.
    pub index: usize,
    name: String,
    /// `<server>@<device>`, as peers know it.
    pub path: Arc<str>,
    pub wake: EventFd,
    pub outage: Outage,
    /// GIDs that connecting has failed with.
    pub tried_gids: Mutex<Vec<u8>>,
    /// One more than the index of the GID that a connection was linked with last; 0 before the first.
    proven_gid: AtomicU32,
    library: &'static Library,
    config: RdmaConfig,
    slice_size: u64,
    fragment_limit: u64,
    queue_pairs: usize,
    next_queue: AtomicUsize,
    /// Whether the thread sleeps until it is woken.
    asleep: AtomicBool,
    /// Whether somebody has polled since the thread has looked.
    polled: AtomicBool,
    /// Whether the thread relies on that.
    is_attended: AtomicBool,
    /// Whether something is posted or waits.
    is_busy: AtomicBool,
    /// Changed with `state` locked.
    opened: RwLock<Option<Arc<Opened>>>,
    state: Mutex<State>,
}

impl LocalNic {
    /// One that is not open. Limit where the process has no descriptor left.
    pub fn new(index: usize, name: &str, path: String, library: &'static Library, config: &RdmaConfig) -> Result<LocalNic> {
        let wake = EventFd::new().map_err(|error| {
            Error::new(Code::Limit, format!("{name} cannot be used: no event descriptor: {error}; check ulimit -n"))
        })?;
        Ok(LocalNic {
            index,
            name: name.to_string(),
            path: path.into(),
            wake,
            outage: Outage::default(),
            tried_gids: Mutex::default(),
            proven_gid: AtomicU32::new(0),
            library,
            config: config.clone(),
            slice_size: config.slice_size.clamp(1, LONGEST),
            fragment_limit: config.fragment_limit(),
            queue_pairs: config.queue_pairs_per_endpoint.max(1),
            next_queue: AtomicUsize::new(0),
            asleep: AtomicBool::new(false),
            polled: AtomicBool::new(false),
            is_attended: AtomicBool::new(false),
            is_busy: AtomicBool::new(false),
            opened: RwLock::default(),
            state: Mutex::new(State {
                closed: None,
                endpoints: Vec::new(),
                by_path: HashMap::new(),
                rivals: HashMap::new(),
                next_id: 0,
                backlog: Vec::new(),
                slots: Slots::default(),
                queues: Vec::new(),
                poll_failure: None,
                outstanding: Vec::new(),
                work_requests: 0,
                max_endpoints: 1,
                load: Load { in_flight: 0, completed: 0, recent: 0, since: Instant::now(), bytes_per_second: 0.0 },
                completions: Vec::new(),
                requests: Vec::new(),
                needs_clock: false,
            }),
        })
    }

    /// Opens it, with a channel and completion queues. It must not be open, and is not used before [`Outage::end`]. Errors are not logged.
    pub fn open(&self, machine: &Machine) -> Result<()> {
        let (name, config) = (&self.name, &self.config);
        let device = Nic::open(self.library, machine, name, config)?;
        let channel = CompletionChannel::new(device.context()).map_err(|error| {
            Error::quiet(Code::Limit, format!("{name} cannot be used: no completion channel: {error}; check ulimit -n"))
        })?;
        let queues = (0..config.completion_queues.max(1))
            .map(|_| device.make_completion_queue(Some(&channel)))
            .collect::<Result<Vec<_>>>()?;
        let mut state = self.state.lock();
        state.poll_failure = None;
        state.outstanding = vec![0; queues.len()];
        state.work_requests = device.queue_pair_size().work_requests;
        state.max_endpoints = config.max_endpoints.min(device.limits().max_qp as usize / self.queue_pairs).max(1);
        state.queues.clone_from(&queues);
        *self.opened.write() = Some(Arc::new(Opened { device, channel, queues }));
        Ok(())
    }

    /// Gives back all that was opened, memory included. No queue pair is left: see [`LocalNic::is_flushed`].
    pub fn close(&self) {
        let (queues, opened) = {
            let mut state = self.state.lock();
            (std::mem::take(&mut state.queues), self.opened.write().take())
        };
        // Without a lock: deregistering memory takes its time.
        drop((queues, opened));
    }

    /// What is open.
    pub fn opened(&self) -> Option<Arc<Opened>> {
        self.opened.read().clone()
    }

    /// Where peers reach it, if it is open.
    pub fn address(&self) -> Option<PortAddress> {
        self.opened.read().as_ref().map(|opened| opened.device.address())
    }

    /// Why its completion queues cannot be polled, if they cannot.
    pub fn poll_failure(&self) -> Option<String> {
        self.state.lock().poll_failure.clone()
    }

    fn lock(&self) -> Locked<'_> {
        Locked { nic: self, state: self.state.lock(), fallout: Fallout::default() }
    }

    /// Puts spans for a peer's NIC, which are of no other groups than these, into its queue, and posts what can be.
    pub fn submit(&self, path: &Arc<str>, peer: &Arc<Peer>, mut spans: Vec<Span>, groups: &[Arc<Group>]) -> Fallout {
        let mut locked = self.lock();
        // Whoever cancels later finds them in the queue, or posted.
        if groups.iter().any(|group| group.is_cancelled()) {
            for span in std::mem::take(&mut spans) {
                match span.doomed() {
                    Some(error) => locked.fallout.ended.push((span, error)),
                    None => spans.push(span),
                }
            }
        }
        if let Some(reason) = locked.state.closed.clone() {
            locked.fallout.ended.extend(spans.into_iter().map(|span| (span, reason.clone())));
        } else if !self.is_active() {
            let error = Error::quiet(Code::Context, format!("{} is not active", self.name));
            locked.fallout.failures.extend(spans.into_iter().map(|span| (span, error.clone())));
        } else {
            let index = locked.endpoint(path);
            let locked = &mut locked;
            if let Some(endpoint) = &mut locked.state.endpoints[index as usize] {
                endpoint.queue(spans, groups);
                endpoint.peer.get_or_insert_with(|| peer.clone());
                if matches!(endpoint.phase, Phase::New) {
                    endpoint.phase = Phase::Connecting;
                    locked.fallout.connect.push((index, endpoint.id, peer.clone()));
                }
            }
            locked.state.needs_clock = true;
            self.is_busy.store(true, Ordering::Relaxed);
            locked.doubt(index);
            locked.post(index);
        }
        let fallout = locked.release();
        self.wake_sleeper();
        fallout
    }

    /// Has the thread look at what there is, if nothing else would before long.
    pub fn wake_sleeper(&self) {
        if self.asleep.load(Ordering::SeqCst) && self.asleep.swap(false, Ordering::SeqCst) {
            self.wake.signal();
        }
    }

    /// Takes completions and posts what waits, on the thread of a caller, unless somebody else does.
    pub fn poll(&self) -> Fallout {
        if !self.is_busy.load(Ordering::Relaxed) {
            return Fallout::default();
        }
        if !self.polled.load(Ordering::Relaxed) {
            self.polled.store(true, Ordering::Relaxed);
        }
        match self.state.try_lock() {
            None => Fallout::default(),
            Some(state) => {
                let mut locked = Locked { nic: self, state, fallout: Fallout::default() };
                locked.drive();
                locked.release()
            }
        }
    }

    /// Like [`LocalNic::poll`], for the NIC's own thread.
    pub fn drive(&self) -> Fallout {
        let mut locked = self.lock();
        locked.drive();
        locked.release()
    }

    /// Somebody waits without polling: the device must be asked to say when something completes.
    pub fn watch(&self) {
        if self.polled.swap(false, Ordering::SeqCst) || self.is_attended.load(Ordering::SeqCst) {
            self.wake();
        }
    }

    /// Whether somebody has polled since the last time, and nobody waits otherwise: the device need not say that something completes.
    /// Whoever begins to wait is counted among the `watchers` first, and looks at what is decided here afterwards.
    pub fn decide_attended(&self, watchers: &Watchers) -> bool {
        let is_polled = self.polled.swap(false, Ordering::SeqCst);
        self.is_attended.store(is_polled, Ordering::SeqCst);
        let is_attended = is_polled && !watchers.are_there();
        self.is_attended.store(is_attended, Ordering::SeqCst);
        is_attended
    }

    /// Asks the device to say when something completes. Poll once more afterwards.
    pub fn arm(&self) -> std::io::Result<()> {
        self.opened().iter().flat_map(|opened| &opened.queues).try_for_each(|queue| queue.request_notification())
    }

    /// The thread is about to sleep until it is woken. False if it must not: something here or elsewhere needs a clock.
    pub fn begin_sleep(&self, is_needed: impl FnOnce() -> bool) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        let is_needed_here = self.state.lock().needs_clock;
        let needs_clock = is_needed_here || is_needed();
        if needs_clock {
            self.asleep.store(false, Ordering::SeqCst);
        }
        !needs_clock
    }

    /// Has the thread look at everything soon.
    pub fn wake(&self) {
        self.asleep.store(false, Ordering::SeqCst);
        self.wake.signal();
    }

    /// Gives up what has waited for too long. True if something has to be looked at again before long.
    pub fn expire(&self, now: Instant) -> (Fallout, bool) {
        let mut locked = self.lock();
        locked.expire(now);
        let needs_clock = locked.state.endpoints.iter().flatten().any(Endpoint::needs_clock);
        locked.state.needs_clock = needs_clock;
        let is_busy = locked.state.endpoints.iter().flatten().any(|endpoint| endpoint.is_posted() || !endpoint.waiting.is_empty());
        self.is_busy.store(is_busy, Ordering::Relaxed);
        (locked.release(), needs_clock)
    }

    /// Ends what waits of the requests that match, and gives up the endpoints on which they are posted.
    pub fn abandon(&self, matches: &dyn Fn(&Span) -> bool, error: &dyn Fn(&Span) -> Error) -> Fallout {
        let mut locked = self.lock();
        let Locked { state, fallout, .. } = &mut locked;
        for endpoint in state.endpoints.iter_mut().flatten() {
            take_out(endpoint, fallout, |span| matches(span).then(|| error(span)));
        }
        let mut hit = Vec::new();
        for posted in state.slots.iter().filter(|posted| matches(&posted.span)) {
            posted.span.doom(error(&posted.span));
            hit.push(posted.endpoint);
        }
        hit.sort_unstable();
        hit.dedup();
        for endpoint in hit {
            locked.retire(endpoint, None);
        }
        locked.release()
    }

    /// Gives up all endpoints, for good if a reason is given.
    pub fn retire_all(&self, closing: Option<&Error>, fault: Option<&Error>) -> Fallout {
        let mut locked = self.lock();
        if let Some(reason) = closing {
            locked.state.closed.get_or_insert_with(|| reason.clone());
            let Locked { state, fallout, .. } = &mut locked;
            state.slots.iter().for_each(|posted| posted.span.doom(reason.clone()));
            for endpoint in state.endpoints.iter_mut().flatten() {
                take_out(endpoint, fallout, |_| Some(reason.clone()));
            }
        }
        for endpoint in 0..locked.state.endpoints.len() as u32 {
            locked.retire(endpoint, fault.cloned());
        }
        locked.release()
    }

    /// Gives up the endpoint that has a queue pair of this number.
    pub fn retire_pair(&self, number: u32) -> Fallout {
        let mut locked = self.lock();
        let has_pair = |endpoint: &Endpoint| endpoint.connection.as_ref().is_some_and(|it| it.numbers().contains(&number));
        let found = locked.state.endpoints.iter().position(|endpoint| endpoint.as_ref().is_some_and(has_pair));
        if let Some(index) = found {
            let error = Error::quiet(Code::Endpoint, format!("queue pair {number} of {} has failed", self.name));
            locked.retire(index as u32, Some(error));
        }
        locked.release()
    }

    /// Whether no queue pair is left.
    pub fn is_flushed(&self) -> bool {
        self.state.lock().endpoints.iter().all(Option::is_none)
    }

    /// What is under way.
    pub fn load(&self) -> NicLoad {
        let state = self.state.lock();
        NicLoad {
            device: self.name.clone(),
            bytes_in_flight: state.load.in_flight,
            bytes_per_second: state.load.bytes_per_second,
            bytes_completed: state.load.completed,
        }
    }

    /// The connection of an endpoint that is there still, with queue pairs, which are made now if there are none. `None`: it is gone.
    pub fn connection_of(&self, index: u32, id: u64) -> Result<Option<Arc<Connection>>> {
        let is_it = |endpoint: &&mut Endpoint| endpoint.id == id && !endpoint.is_retired();
        let find = |state: &mut State| {
            let endpoint = state.endpoints.get_mut(index as usize).and_then(Option::as_mut).filter(is_it)?;
            Some(endpoint.connection.clone())
        };
        let opened = {
            let mut state = self.state.lock();
            match find(&mut state) {
                None => return Ok(None),
                Some(Some(connection)) => return Ok(Some(connection)),
                // With the lock: what is open has not changed since the endpoint was made.
                Some(None) => self.opened(),
            }
        };
        let Some(opened) = opened else { return Ok(None) };
        let first = self.next_queue.fetch_add(self.queue_pairs, Ordering::Relaxed);
        let made = Connection::new(opened, first, self.queue_pairs)?;
        let mut state = self.state.lock();
        let Some(endpoint) = state.endpoints.get_mut(index as usize).and_then(Option::as_mut).filter(is_it) else {
            return Ok(None);
        };
        if let Some(other) = &endpoint.connection {
            // Another thread was faster. What was made is destroyed without the lock.
            let other = other.clone();
            drop(state);
            return Ok(Some(other));
        }
        endpoint.connection = Some(made.clone());
        Ok(Some(made))
    }

    /// The peer's NIC that an endpoint is for.
    pub fn path_of(&self, index: u32, id: u64) -> Option<Arc<str>> {
        let state = self.state.lock();
        let endpoint = state.endpoints.get(index as usize).and_then(Option::as_ref).filter(|endpoint| endpoint.id == id)?;
        Some(endpoint.path.clone())
    }

    /// The endpoint of a peer's NIC that asks for a connection, or why there is none. Unlike work of this process, strangers do not get
    /// more endpoints than are configured.
    ///
    /// `is_rival`: a new one beside the one that there is, unless that is gone.
    pub fn passive_endpoint(&self, path: &str, is_rival: bool) -> (std::result::Result<(u32, u64), String>, Fallout) {
        let mut locked = self.lock();
        if locked.state.closed.is_some() {
            return (Err("shutting down".to_string()), locked.release());
        }
        if !self.is_active() {
            return (Err(format!("{} is not active", self.path)), locked.release());
        }
        let max_endpoints = locked.state.max_endpoints;
        if is_rival && let Some(former) = locked.state.rivals.get(path).copied() {
            locked.retire(former, None);
        }
        let is_new = is_rival || !locked.state.by_path.contains_key(path);
        if is_new && locked.state.count() >= max_endpoints && !locked.evict() {
            let text = format!("all {max_endpoints} endpoints of {} are in use (MC_MAX_EP_PER_CTX)", self.path);
            return (Err(text), locked.release());
        }
        let path: Arc<str> = path.into();
        let index = match locked.state.by_path.get(&path).copied().filter(|_| is_rival) {
            Some(present) => {
                let index = locked.make(&path);
                locked.state.rivals.insert(path, index);
                locked.doubt(present);
                index
            }
            None => locked.endpoint(&path),
        };
        let id = locked.state.endpoints[index as usize].as_ref().map(|endpoint| (index, endpoint.id));
        (id.ok_or_else(String::new), locked.release())
    }

    /// A connection was linked with this GID of the NIC.
    pub fn prove_gid(&self, index: u8) {
        self.proven_gid.store(u32::from(index) + 1, Ordering::Relaxed);
    }

    /// Whether a connection was linked with this GID of the NIC, and with no other one after it.
    pub fn has_proven_gid(&self, index: u8) -> bool {
        self.proven_gid.load(Ordering::Relaxed) == u32::from(index) + 1
    }

    /// The connection with a peer's NIC, if it is linked with exactly these queue pairs, is ready: work can be posted.
    pub fn acknowledge(&self, path: &str, numbers: &[u32]) -> (bool, Fallout) {
        match self.linked_endpoint(path, numbers) {
            Some((index, id, _)) => (true, self.set_connected(index, id, true)),
            None => (false, Fallout::default()),
        }
    }

    /// The endpoint of a peer's NIC, or its rival, that is linked with exactly these queue pairs.
    pub fn linked_endpoint(&self, path: &str, numbers: &[u32]) -> Option<(u32, u64, Arc<Connection>)> {
        let found: Vec<_> = {
            let state = self.state.lock();
            let places = state.by_path.get(path).into_iter().chain(state.rivals.get(path));
            let endpoints = places.filter_map(|index| Some((*index, state.endpoints[*index as usize].as_ref()?)));
            endpoints.filter_map(|(index, endpoint)| Some((index, endpoint.id, endpoint.connection.clone()?))).collect()
        };
        found.into_iter().find(|(.., connection)| connection.is_linked_with(numbers))
    }

    /// The peer has said whether it is connected with an endpoint yet: its rival goes, or takes its place.
    pub fn decide_rivalry(&self, index: u32, id: u64, is_connected: bool) -> Fallout {
        let mut locked = self.lock();
        if let Some(endpoint) = locked.get(index).filter(|endpoint| endpoint.id == id && !endpoint.is_retired()) {
            endpoint.is_doubted = false;
            let path = endpoint.path.clone();
            match locked.state.rivals.get(&path).copied() {
                Some(rival) if is_connected => locked.retire(rival, None),
                Some(_) => locked.retire(index, None),
                None => {}
            }
        }
        locked.release()
    }

    /// The endpoint's queue pairs are connected. Work is posted at once, or when the peer says that it is ready.
    pub fn set_connected(&self, index: u32, id: u64, is_ready: bool) -> Fallout {
        let mut locked = self.lock();
        if let Some(endpoint) = locked.state.endpoints.get_mut(index as usize).and_then(Option::as_mut)
            && endpoint.id == id
            && !endpoint.is_retired()
        {
            let now = Instant::now();
            match (is_ready, &endpoint.phase) {
                (true, _) => {
                    endpoint.phase = Phase::Connected;
                    endpoint.moved = now;
                }
                // The side that asks, too, says that the peer is ready.
                (false, Phase::Connected | Phase::Connecting) => {}
                (false, _) => endpoint.phase = Phase::AwaitsReady(now),
            }
            locked.state.needs_clock = true;
            locked.post(index);
        }
        let fallout = locked.release();
        self.wake_sleeper();
        fallout
    }

    /// Connecting has failed, or the endpoint is of no use any more.
    pub fn retire(&self, index: u32, id: u64, fault: Option<Error>) -> Fallout {
        let mut locked = self.lock();
        let is_it = locked.state.endpoints.get(index as usize).and_then(Option::as_ref).is_some_and(|endpoint| endpoint.id == id);
        if is_it {
            locked.retire(index, fault);
        }
        locked.release()
    }
}

/// Takes spans that `error` has something against out of the queue, and those that are doomed.
fn take_out(endpoint: &mut Endpoint, fallout: &mut Fallout, mut error: impl FnMut(&Span) -> Option<Error>) {
    let (mut kept, queue) = (std::collections::VecDeque::new(), std::mem::take(&mut endpoint.waiting));
    for span in queue {
        match error(&span).or_else(|| span.doomed()) {
            Some(error) => fallout.ended.push((span, error)),
            None => kept.push_back(span),
        }
    }
    endpoint.waiting = kept;
}

/// The state while it is locked, and what comes of what is done to it.
struct Locked<'a> {
    nic: &'a LocalNic,
    state: MutexGuard<'a, State>,
    fallout: Fallout,
}

impl State {
    /// How many endpoints there are that were not given up.
    fn count(&self) -> usize {
        self.by_path.len() + self.rivals.len()
    }
}

impl Locked<'_> {
    fn release(self) -> Fallout {
        self.fallout
    }

    fn get(&mut self, index: u32) -> Option<&mut Endpoint> {
        self.state.endpoints.get_mut(index as usize).and_then(Option::as_mut)
    }

    /// The endpoint for a peer's NIC, made if there is none.
    fn endpoint(&mut self, path: &Arc<str>) -> u32 {
        if let Some(index) = self.state.by_path.get(path) {
            return *index;
        }
        if self.state.count() >= self.state.max_endpoints {
            self.evict();
        }
        let index = self.make(path);
        self.state.by_path.insert(path.clone(), index);
        index
    }

    /// A new endpoint, which no list has.
    fn make(&mut self, path: &Arc<str>) -> u32 {
        let id = self.state.next_id;
        self.state.next_id += 1;
        let endpoint = Endpoint::new(id, path.clone(), self.nic.queue_pairs);
        let index = match self.state.endpoints.iter().position(Option::is_none) {
            Some(index) => index,
            None => {
                self.state.endpoints.push(None);
                self.state.endpoints.len() - 1
            }
        };
        self.state.endpoints[index] = Some(endpoint);
        index as u32
    }

    /// Has the peer asked whether it is connected with an endpoint yet, if there is a rival, and it is known whom to ask.
    fn doubt(&mut self, index: u32) {
        if self.state.rivals.is_empty() {
            return;
        }
        let Locked { state, fallout, .. } = self;
        let State { endpoints, rivals, .. } = &mut **state;
        if let Some(endpoint) = endpoints.get_mut(index as usize).and_then(Option::as_mut)
            && rivals.contains_key(&endpoint.path)
            && let Some(peer) = endpoint.peer.clone()
            && !std::mem::replace(&mut endpoint.is_doubted, true)
        {
            fallout.doubts.push((index, endpoint.id, peer));
        }
    }

    /// Gives up an endpoint that nothing is done with: the oldest, or the oldest that was not used since this was asked for the last time.
    /// False if there is none.
    fn evict(&mut self) -> bool {
        let mut idle: Vec<(u64, u32, bool)> = Vec::new();
        for (index, endpoint) in self.state.endpoints.iter_mut().enumerate() {
            if let Some(endpoint) = endpoint.as_mut().filter(|endpoint| endpoint.is_idle() && !endpoint.is_retired()) {
                idle.push((endpoint.id, index as u32, std::mem::replace(&mut endpoint.was_used, false)));
            }
        }
        idle.sort_unstable();
        let victim = idle.iter().find(|(.., was_used)| self.nic.config.evict_oldest || !was_used).or(idle.first());
        let victim = victim.copied();
        if let Some((_, index, _)) = victim {
            self.retire(index, None);
        }
        victim.is_some()
    }

    /// Posts what waits on an endpoint, as far as there is room.
    fn post(&mut self, index: u32) {
        let nic = self.nic;
        let State { endpoints, slots, queues, work_requests, outstanding, load, requests, backlog, .. } = &mut *self.state;
        let Some(endpoint) = endpoints.get_mut(index as usize).and_then(Option::as_mut) else { return };
        let (Phase::Connected, Some(connection)) = (&endpoint.phase, endpoint.connection.clone()) else { return };
        let length_of_next = |span: &Span| match span.local.length() {
            rest if rest <= nic.slice_size.saturating_add(nic.fragment_limit).min(LONGEST) => rest,
            _ => nic.slice_size,
        };
        let room = |endpoint: &Endpoint, outstanding: &[u32], pair: usize| {
            let queue = connection.queues[pair];
            let in_pair = work_requests.saturating_sub(endpoint.posted[pair]);
            in_pair.min(queues[queue].capacity().saturating_sub(outstanding[queue])) as u64
        };
        let pairs = connection.pairs.len();
        let all_room: u64 = (0..pairs).map(|pair| room(endpoint, outstanding, pair)).sum();
        // How many work requests there will be, as far as there is room for them.
        let mut wanted = 0;
        let mut has_paths = false;
        for span in &endpoint.waiting {
            if wanted >= all_room {
                break;
            }
            has_paths |= span.path != 0;
            wanted += match span.local.length() {
                length if length <= nic.slice_size => 1,
                length => length.div_ceil(nic.slice_size),
            };
        }
        let mut wanted = wanted.min(all_room);
        let mut fault = None;
        for pair in 0..pairs {
            let share = match has_paths {
                false => wanted.div_ceil((pairs - pair) as u64),
                true => wanted,
            };
            let share = share.min(room(endpoint, outstanding, pair));
            requests.clear();
            // Spans of a path wait for its queue pair, and let others pass.
            let is_for_pair = |span: &Span| span.path == 0 || usize::from(span.path) % pairs == pair;
            let mut passed = Vec::new();
            while (requests.len() as u64) < share
                && passed.len() < MOST_PASSED
                && let Some(mut span) = endpoint.waiting.pop_front()
            {
                if !is_for_pair(&span) {
                    passed.push(span);
                    continue;
                }
                if span.group().is_troubled()
                    && let Some(error) = span.doomed()
                {
                    self.fallout.ended.push((span, error));
                    continue;
                }
                let length = length_of_next(&span);
                if length < span.local.length() {
                    let next = span.split(length);
                    endpoint.waiting.push_front(std::mem::replace(&mut span, next));
                }
                let Span { local, local_key, remote_address, remote_key, .. } = span;
                let opcode = span.piece().opcode;
                let id = slots.insert(Posted { span, endpoint: index, pair: pair as u16 });
                requests.push(WorkRequest { id, opcode, local, local_key, remote_address, remote_key });
            }
            passed.into_iter().rev().for_each(|span| endpoint.waiting.push_front(span));
            if requests.is_empty() {
                continue;
            }
            let posted = match connection.pairs[pair].post(requests) {
                Ok(()) => requests.len(),
                Err(refused) => {
                    let is_full =
                        refused.error.raw_os_error() == Some(libc::ENOMEM) && endpoint.posted[pair] + refused.posted as u32 > 0;
                    if !is_full {
                        fault = Some(refused.error);
                    }
                    refused.posted
                }
            };
            for request in requests[posted..].iter().rev() {
                if let Some(back) = slots.remove(request.id) {
                    endpoint.waiting.push_front(back.span);
                }
            }
            endpoint.posted[pair] += posted as u32;
            outstanding[connection.queues[pair]] += posted as u32;
            wanted = wanted.saturating_sub(posted as u64);
            load.posted(requests[..posted].iter().map(|request| request.local.length()).sum(), Instant::now);
        }
        if !endpoint.waiting.is_empty() && !endpoint.is_in_backlog {
            endpoint.is_in_backlog = true;
            backlog.push(index);
        }
        if let Some(error) = fault {
            let text = format!("{} refuses work for {}: {error}", nic.name, endpoint.path);
            self.retire(index, Some(Error::new(Code::Endpoint, text)));
        }
    }

    /// Takes completions, and posts what there is room for now.
    fn drive(&mut self) {
        let State { completions, queues, poll_failure, .. } = &mut *self.state;
        let mut completions = std::mem::take(completions);
        for queue in queues {
            // As many as there can be: new ones come from what is posted below only.
            let polled = queue.poll(queue.capacity() as usize, |completion| completions.push(completion));
            if let Err(error) = polled
                && poll_failure.is_none()
            {
                *poll_failure = Some(format!("a completion queue cannot be polled ({error})"));
                self.nic.wake();
            }
        }
        if !completions.is_empty() {
            let now = Instant::now();
            completions.drain(..).for_each(|completion| self.complete(completion, now));
            self.post_backlog();
        }
        self.state.completions = completions;
    }

    /// Posts what had no room before: there is some now.
    fn post_backlog(&mut self) {
        let backlog = std::mem::take(&mut self.state.backlog);
        for index in &backlog {
            if let Some(endpoint) = self.get(*index) {
                endpoint.is_in_backlog = false;
            }
        }
        // In turn: who comes first now comes last the next time, if it has no room for all again.
        backlog.into_iter().for_each(|index| self.post(index));
    }

    fn complete(&mut self, completion: WorkCompletion, now: Instant) {
        let Some(Posted { span, endpoint: index, pair }) = self.state.slots.remove(completion.id) else { return };
        let bytes = span.local.length();
        self.state.load.ended(bytes);
        let State { endpoints, outstanding, load, .. } = &mut *self.state;
        let Some(endpoint) = endpoints[index as usize].as_mut() else { return };
        endpoint.posted[usize::from(pair)] -= 1;
        if let Some(connection) = &endpoint.connection {
            outstanding[connection.queues[usize::from(pair)]] -= 1;
        }
        let outcome = match completion.outcome {
            // Of what is under way when queue pairs fail, soft-RoCE may call the request a success that would have been next.
            Outcome::Success if endpoint.is_retired() => Outcome::Flushed,
            outcome => outcome,
        };
        match outcome {
            Outcome::Success => {
                endpoint.moved = now;
                load.completed(bytes, now);
                self.fallout.add_moved(span);
            }
            Outcome::Flushed => match &endpoint.phase {
                Phase::Retired(Retirement { fault: None, .. }) => self.fallout.retries.push(span),
                Phase::Retired(Retirement { fault: Some(fault), .. }) => {
                    let fault = fault.clone();
                    self.fallout.failures.push((span, fault));
                }
                _ => {
                    let text = format!("a queue pair of {} to {} has failed", self.nic.name, endpoint.path);
                    let error = Error::new(Code::Endpoint, text);
                    self.fallout.failures.push((span, error.clone()));
                    self.retire(index, Some(error));
                }
            },
            outcome => self.fail(index, span, outcome, &completion),
        }
        self.drop_if_flushed(index);
    }

    /// A work request has failed by itself.
    fn fail(&mut self, index: u32, mut span: Span, outcome: Outcome, completion: &WorkCompletion) {
        let nic = self.nic;
        let path = self.get(index).map_or_else(|| "".into(), |endpoint| endpoint.path.clone());
        let text = format!(
            "RDMA of {} bytes between {:#x} and {:#x} of {path} by {} failed: {} (status {}, vendor error {:#x})",
            span.local.length(),
            span.local.address(),
            span.remote_address,
            nic.name,
            nic.library.status_text(completion.status),
            completion.status,
            completion.vendor_error
        );
        let error = Error::new(Code::Endpoint, text);
        match outcome {
            Outcome::RemoteAccess => {
                // The peer's descriptor may be old: nothing is wrong with the way.
                span.is_refused = true;
                self.retire(index, None);
                self.fallout.failures.push((span, error));
            }
            Outcome::Local => {
                self.retire(index, None);
                self.fallout.failures.push((span, error));
            }
            _ => {
                self.fallout.pauses.push(path);
                self.retire(index, Some(error.clone()));
                self.fallout.failures.push((span, error));
            }
        }
    }

    /// Gives an endpoint up: what waits is to be tried again, what is posted comes back by and by.
    fn retire(&mut self, index: u32, fault: Option<Error>) {
        let Locked { state, fallout, .. } = self;
        let Some(endpoint) = state.endpoints.get_mut(index as usize).and_then(Option::as_mut) else { return };
        if endpoint.is_retired() {
            return;
        }
        for span in endpoint.waiting.drain(..) {
            match &fault {
                Some(fault) => fallout.failures.push((span, fault.clone())),
                None => fallout.retries.push(span),
            }
        }
        endpoint.phase = Phase::Retired(Retirement { since: Instant::now(), fault });
        let path = endpoint.path.clone();
        fallout.given_up.extend(endpoint.connection.iter().map(|connection| (path.clone(), connection.clone())));
        if state.by_path.get(&path) == Some(&index) {
            state.by_path.remove(&path);
            if let Some(rival) = state.rivals.remove(&path) {
                state.by_path.insert(path, rival);
            }
        } else if state.rivals.get(&path) == Some(&index) {
            state.rivals.remove(&path);
        }
        state.needs_clock = true;
        self.drop_if_flushed(index);
    }

    fn drop_if_flushed(&mut self, index: u32) {
        let endpoint = &mut self.state.endpoints[index as usize];
        if endpoint.as_ref().is_some_and(|endpoint| endpoint.is_retired() && !endpoint.is_posted())
            && let Some(endpoint) = endpoint.take()
        {
            self.fallout.dropped.extend(endpoint.connection.map(|connection| (endpoint.path, connection)));
        }
    }

    /// Destroys the queue pairs of an endpoint that does not flush. Only then is the memory of what is posted nobody's any more.
    fn destroy(&mut self, index: u32) {
        let Some(endpoint) = self.get(index) else { return };
        let Some(connection) = endpoint.connection.take() else { return };
        let connection = match Arc::try_unwrap(connection) {
            Ok(connection) => connection,
            Err(shared) => {
                // Somebody looks at it; the next tick comes soon.
                endpoint.connection = Some(shared);
                return;
            }
        };
        let queues = connection.queues.clone();
        drop(connection);
        let Some(endpoint) = self.state.endpoints[index as usize].take() else { return };
        tracing::warn!("queue pairs of {} to {} did not flush, and were destroyed", self.nic.name, endpoint.path);
        for number in self.state.slots.of_endpoint(index) {
            let Some(Posted { span, pair, .. }) = self.state.slots.remove(number) else { continue };
            self.state.outstanding[queues[usize::from(pair)]] -= 1;
            self.state.load.ended(span.local.length());
            match &endpoint.phase {
                Phase::Retired(Retirement { fault: Some(fault), .. }) => self.fallout.failures.push((span, fault.clone())),
                _ => self.fallout.retries.push(span),
            }
        }
        // Devices may leave completions of what was destroyed in the completion queue, where they take room until they are polled.
        self.drive();
        // No completion tells that there is room in the completion queue now.
        self.post_backlog();
    }

    /// Looks at everything that time ends.
    fn expire(&mut self, now: Instant) {
        let mut due = Vec::new();
        for index in 0..self.state.endpoints.len() as u32 {
            let Some(endpoint) = self.get(index) else { continue };
            match &endpoint.phase {
                Phase::Retired(retirement) if now.saturating_duration_since(retirement.since) >= FLUSH_LIMIT => self.destroy(index),
                Phase::AwaitsReady(since) if now.saturating_duration_since(*since) >= READY_LIMIT => {
                    let path = endpoint.path.clone();
                    let text =
                        format!("{path} has asked for a connection, and did not say within {READY_LIMIT:?} that it is ready");
                    // What a rival leaves undone is not the fault of the NIC that it names.
                    if self.state.by_path.get(&path) == Some(&index) {
                        self.fallout.pauses.push(path);
                    }
                    self.retire(index, Some(Error::new(Code::Endpoint, text)));
                }
                _ if endpoint.next_expiry.is_some_and(|expiry| now >= expiry) => due.push(index),
                _ => {}
            }
        }
        if due.is_empty() {
            return;
        }
        let Locked { state, fallout, .. } = self;
        let State { endpoints, slots, .. } = &mut **state;
        let mut stuck = Vec::new();
        for index in due {
            let Some(endpoint) = endpoints[index as usize].as_mut() else { continue };
            let moved = endpoint.moved;
            let mut next = None;
            take_out(endpoint, fallout, |span| {
                let expiry = span.group().expiry(moved);
                if now >= expiry {
                    return Some(span.timeout(now));
                }
                next = next.into_iter().chain([expiry]).min();
                None
            });
            for posted in slots.iter().filter(|posted| posted.endpoint == index) {
                let expiry = posted.span.group().expiry(moved);
                if now >= expiry {
                    if posted.span.doomed().is_none() {
                        posted.span.doom(posted.span.timeout(now));
                    }
                    stuck.push(index);
                } else {
                    next = next.into_iter().chain([expiry]).min();
                }
            }
            endpoint.next_expiry = next;
        }
        stuck.dedup();
        for index in stuck {
            self.retire(index, None);
        }
    }
}

impl Device for LocalNic {
    fn name(&self) -> &str {
        &self.name
    }

    fn numa_node(&self) -> Option<u32> {
        self.opened.read().as_ref().and_then(|opened| opened.device.numa_node())
    }

    fn max_mr_size(&self) -> u64 {
        self.opened.read().as_ref().map_or(u64::MAX, |opened| opened.device.limits().max_mr_size)
    }

    fn is_active(&self) -> bool {
        self.outage.is_over()
    }

    fn register(&self, chunk: MemoryRange, remote_accessible: bool) -> Result<MemoryKey> {
        match self.opened() {
            Some(opened) => opened.device.register(chunk, remote_accessible),
            None => Err(Error::new(Code::Context, format!("{} has failed, and registers no memory now", self.name))),
        }
    }

    fn knows(&self, key: &MemoryKey) -> bool {
        self.opened.read().as_ref().is_some_and(|opened| opened.device.knows(key))
    }

    fn deregister(&self, key: &MemoryKey) -> Result<()> {
        // Where the device was closed since, nothing reaches the memory, without its queue pairs.
        self.opened().map_or(Ok(()), |opened| opened.device.deregister(key))
    }
}
