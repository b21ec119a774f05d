//! The submitting side's view of one segment: where its data port is, the lanes to it, and the work that waits for either.
//!
//! `state` is the peer's one lock. It is never held while a lane's locks are or a completion is called; lanes call back with none of
//! their own locks held.
//!
//! Invariants:
//! * Work is in exactly one place: the backlog, `refused`, a lane's inbox or queue, or in the hands of a thread that carries it from one
//!   to the next. The latter is what [`Peer::abandon`] cannot see. So each place looks, under its lock, whether work that comes in was
//!   cancelled ([`Work::is_cancelled`]) or the peer is closed, and whoever evicts memory does it again until no guard is held.
//! * Whatever waits here has its deadline: [`Peer::expire`] looks at the backlog and at what waits for the peer's answer.
//! * Every retry uses something up: an attempt of the front of a lost lane, the one examination of what was refused, the one fresh
//!   descriptor since a lane was last connected. So no peer, whatever it does, keeps work going for ever.
//!
//! Finding the peer again: when no lane can be connected, the descriptor is fetched anew (the peer may have restarted on other ports)
//! and connecting is tried once more; only then does the work fail, with that of all lanes that were begun before. A peer that ends
//! connections under the same request, or talks nonsense, may be another program at an address that is out of date: its descriptor is
//! fetched before more is sent. When anybody has fetched a descriptor that names another place, lanes to the old one are left. All that
//! blocks is done by the transport's background threads.
//!
//! When the peer refuses a range, its descriptor is fetched anew, too: the range may have been registered since, and an upstream
//! server refuses one that spans registrations which only touch, so the slice is split at their borders and tried once more. A peer
//! that speaks version 1 only checks no address at all; there the descriptor is looked at before anything is sent.
//!
//! Balancing: a lane is filled up to [`FILL_BYTES`], so that small requests share system calls; beyond that an idle or new lane is
//! taken, and when there are as many lanes as allowed, the least loaded one. Slices of one path keep to one lane for as long as that takes
//! work, since a lane carries exchanges in order; with version 1, whose lanes carry one each, they do not.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::Mutex;

use super::Shared;
use super::attendance::Attendance;
use super::lane::{self, ATTEMPTS, Lane, Loss, Work};
use super::wire::Version;
use crate::error::{Code, Error, Result};
use crate::metadata::SegmentDescriptor;
use crate::sys::limits;
use crate::transport::{Completion, Opcode, Segment, Slice, Slices};

/// How much is queued on a lane before another is taken.
const FILL_BYTES: u64 = 64 << 10;

/// Where a peer's data port is, as its descriptor says it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Endpoint {
    host: Option<String>,
    port: Option<u16>,
    version: Version,
}

/// Where a peer's data port is.
#[derive(Clone, Debug)]
struct Target {
    addresses: Vec<SocketAddr>,
    version: Version,
}

#[derive(Default)]
struct State {
    /// The transport has ended: nothing more is taken.
    closed: bool,
    /// The descriptor that was looked at last, and what it says.
    descriptor: Option<Arc<SegmentDescriptor>>,
    endpoint: Option<Endpoint>,
    /// The endpoint, resolved.
    target: Option<Target>,
    /// Which of the target's addresses to connect to.
    address: usize,
    lanes: Vec<Arc<Lane>>,
    /// The lanes of slices that go the same way: see [`Way::path`](crate::transport::Way).
    paths: HashMap<u8, Weak<Lane>>,
    /// Waits for a target or, in version 1, for a lane.
    backlog: VecDeque<Work>,
    /// A background job is finding the target.
    finding: bool,
    /// What listens at the target may be another program by now: the descriptor is to be fetched before more is sent.
    doubtful: bool,
    /// The descriptor was fetched since a lane was last connected.
    refreshed: bool,
    /// The peer could not be found, which holds for all lanes up to this number.
    unreachable: Option<(usize, Error)>,
    /// Refused by the peer; a background job looks at its fresh descriptor.
    refused: Vec<Work>,
    examining: bool,
    lanes_opened: usize,
}

/// Work that cannot be carried out, and why.
type Failure = (Error, Vec<Work>);

impl State {
    fn fail_backlog(&mut self, error: Error) -> Option<Failure> {
        Some((error, std::mem::take(&mut self.backlog).into()))
    }

    /// The peer cannot be found; whoever comes later looks again.
    fn give_up(&mut self, error: Error) -> Option<Failure> {
        self.refreshed = false;
        self.target = None;
        self.unreachable = Some((self.lanes_opened, error.clone()));
        self.fail_backlog(error)
    }
}

/// One segment that slices are submitted to.
pub(super) struct Peer {
    shared: Arc<Shared>,
    segment: Arc<dyn Segment>,
    state: Mutex<State>,
}

impl Peer {
    /// Takes no work if the transport has ended.
    pub fn new(shared: Arc<Shared>, segment: Arc<dyn Segment>) -> Arc<Peer> {
        let state = State { closed: shared.closing().is_some(), ..State::default() };
        Arc::new(Peer { shared, segment, state: Mutex::new(state) })
    }

    /// The lanes that callers serve.
    pub fn attendance(&self) -> &Attendance {
        &self.shared.attendance
    }

    /// The segment's id.
    pub fn id(&self) -> u64 {
        self.segment.id()
    }

    /// Whether nobody else knows the segment any more, so that nothing will be submitted to it.
    pub fn is_forgotten(&self) -> bool {
        Arc::strong_count(&self.segment) == 1
    }

    pub fn submit(self: &Arc<Self>, slices: Slices) {
        let since = Instant::now();
        self.take_back(slices.into_each().map(|slice| Work { slice, attempts: 0, examined: false, since }).collect());
    }

    /// Takes work that no lane has, and gives it to lanes.
    pub fn take_back(self: &Arc<Self>, works: Vec<Work>) {
        let failures = self.enqueue(&mut self.state.lock(), works);
        self.fail_all(failures);
        self.dispatch();
    }

    /// Puts work into the backlog. Returns what does not belong there: what was cancelled, or everything if the transport has ended.
    fn enqueue(&self, state: &mut State, works: Vec<Work>) -> Vec<Failure> {
        if state.closed {
            return vec![(self.shared.closing().unwrap_or_else(lane::cancelled), works)];
        }
        let mut over = Vec::new();
        for work in works {
            if work.is_cancelled() { over.push(work) } else { state.backlog.push_back(work) }
        }
        if over.is_empty() { Vec::new() } else { vec![(lane::cancelled(), over)] }
    }

    /// Like [`Peer::enqueue`], for the work of a lane that has ended.
    fn enqueue_of(&self, state: &mut State, lane: &Lane, works: Vec<Work>) -> Vec<Failure> {
        match &state.unreachable {
            Some((lanes, error)) if lane.number() < *lanes && !lane.is_connected() => vec![(error.clone(), works)],
            _ => self.enqueue(state, works),
        }
    }

    /// Gives the backlog to lanes, as far as the peer's address is known and lanes can be had.
    fn dispatch(self: &Arc<Self>) {
        loop {
            let mut assigned: Vec<(Arc<Lane>, Vec<Work>)> = Vec::new();
            let mut failures = Vec::new();
            let mut unknown = Vec::new();
            let left;
            {
                let mut guard = self.state.lock();
                let state = &mut *guard;
                if state.backlog.is_empty() || state.finding {
                    return;
                }
                left = self.look_at(state, self.segment.descriptor());
                if state.doubtful {
                    failures.extend(self.find(state, None, true));
                } else if state.target.is_none() {
                    match state.endpoint.as_ref().and_then(literal) {
                        Some(target) => self.set_target(state, target),
                        None => failures.extend(self.find(state, None, false)),
                    }
                }
                while !state.finding
                    && let Some(work) = state.backlog.front()
                {
                    if state.target.as_ref().is_some_and(|target| target.version == Version::V1) && !self.vouches_for(work) {
                        unknown.extend(state.backlog.pop_front());
                        continue;
                    }
                    let (length, path) = (work.slice.local.length(), work.slice.way.path);
                    match self.pick_lane_of_path(state, length, path) {
                        Ok(Some(lane)) => {
                            let Some(work) = state.backlog.pop_front() else { break };
                            lane.reserve(&work);
                            match assigned.last_mut() {
                                Some((last, works)) if Arc::ptr_eq(last, &lane) => works.push(work),
                                _ => assigned.push((lane, vec![work])),
                            }
                        }
                        Ok(None) => break,
                        Err((address, error)) => {
                            self.shared.counters.connections_failed.add(1);
                            failures.extend(self.give_up_address(state, address, error));
                        }
                    }
                }
                lane::release_if_empty(&mut state.backlog);
            }
            let mut again = false;
            for (lane, works) in assigned {
                if let Err(works) = lane.push(works) {
                    failures.extend(self.enqueue_of(&mut self.state.lock(), &lane, works));
                    again = true;
                }
            }
            self.fail_all(failures);
            if !unknown.is_empty() {
                self.reexamine(unknown);
            }
            left.iter().for_each(|lane| lane.leave());
            if !again {
                return;
            }
        }
    }

    /// Takes note of a descriptor. Returns the lanes to leave because the peer is elsewhere now.
    fn look_at(&self, state: &mut State, descriptor: Arc<SegmentDescriptor>) -> Vec<Arc<Lane>> {
        if state.descriptor.as_ref().is_some_and(|known| Arc::ptr_eq(known, &descriptor)) {
            return Vec::new();
        }
        let endpoint =
            Endpoint { host: self.segment.host().ok(), port: data_port(&descriptor), version: self.version(&descriptor) };
        state.descriptor = Some(descriptor);
        if state.endpoint.as_ref() == Some(&endpoint) {
            return Vec::new();
        }
        state.endpoint = Some(endpoint);
        state.target = None;
        state.lanes.iter().for_each(|lane| lane.refuse());
        state.lanes.clone()
    }

    /// Whether the range is in the descriptor at hand, or a fresh one was looked at.
    fn vouches_for(&self, work: &Work) -> bool {
        let slice = &work.slice;
        work.examined || !split(&self.segment.descriptor(), slice.remote_address, slice.local.length()).is_empty()
    }

    /// The lane for the next piece of work, which is that of its path, if it has one: see [`Peer::pick_lane`].
    fn pick_lane_of_path(
        self: &Arc<Self>,
        state: &mut State,
        length: u64,
        path: u8,
    ) -> std::result::Result<Option<Arc<Lane>>, (SocketAddr, io::Error)> {
        if path == 0 || state.target.as_ref().is_none_or(|target| target.version == Version::V1) {
            return self.pick_lane(state, length);
        }
        if let Some(lane) = state.paths.get(&path).and_then(Weak::upgrade).filter(|lane| lane.is_accepting()) {
            return Ok(Some(lane));
        }
        let picked = self.pick_lane(state, length)?;
        if let Some(lane) = &picked {
            state.paths.insert(path, Arc::downgrade(lane));
        }
        Ok(picked)
    }

    /// The lane for the next piece of work. `None`: it has to wait for one. An error: none can be had, nor waited for.
    fn pick_lane(
        self: &Arc<Self>,
        state: &mut State,
        length: u64,
    ) -> std::result::Result<Option<Arc<Lane>>, (SocketAddr, io::Error)> {
        let Some(target) = &state.target else { return Ok(None) };
        let accepting = || state.lanes.iter().filter(|lane| lane.is_accepting());
        let least_loaded = || accepting().min_by_key(|lane| lane.load()).cloned();
        let count = accepting().count();
        let may_open = count < self.shared.settings.lanes_per_peer;
        if target.version == Version::V2 {
            let fits = |lane: &&Arc<Lane>| lane.load() == 0 || lane.load().saturating_add(length) <= FILL_BYTES;
            if let Some(lane) = accepting().filter(fits).max_by_key(|lane| lane.load()) {
                return Ok(Some(lane.clone()));
            }
            if !may_open {
                return Ok(least_loaded());
            }
        } else if !may_open {
            return Ok(None);
        }
        let address = target.addresses[state.address];
        let io_loop = self.shared.loop_for(self.segment.id() as usize + state.lanes_opened);
        match Lane::open(self, io_loop, state.lanes_opened, address, target.version) {
            Ok(lane) => {
                self.shared.counters.connections_opened.add(1);
                state.lanes_opened += 1;
                state.lanes.push(lane.clone());
                Ok(Some(lane))
            }
            Err(_) if count > 0 && target.version == Version::V2 => Ok(least_loaded()),
            Err(_) if count > 0 => Ok(None),
            Err(error) => Err((address, error)),
        }
    }

    fn version(&self, descriptor: &SegmentDescriptor) -> Version {
        if descriptor.tcp_proto_version >= 2 && !self.shared.settings.force_v1 { Version::V2 } else { Version::V1 }
    }

    fn set_target(&self, state: &mut State, target: Target) {
        state.address = 0;
        state.target = Some(target);
    }

    /// Has the target found in the background; the backlog waits. `refresh`: by a fresh descriptor; `cause`: why that at hand is not
    /// enough. Fails the backlog when it cannot.
    fn find(self: &Arc<Self>, state: &mut State, cause: Option<Error>, refresh: bool) -> Option<Failure> {
        state.finding = true;
        let peer = self.clone();
        let job = move || peer.finish_finding(cause, refresh);
        if self.shared.background.run(job).is_ok() {
            return None;
        }
        state.finding = false;
        state.fail_backlog(self.cannot_ask())
    }

    /// No background job can be had.
    fn cannot_ask(&self) -> Error {
        self.shared.closing().unwrap_or_else(|| {
            Error::new(Code::Limit, format!("{self}: cannot be looked for without one more thread; raise the limit (ulimit -u)"))
        })
    }

    fn finish_finding(self: &Arc<Self>, cause: Option<Error>, refresh: bool) {
        let found = self.resolve(refresh);
        let mut left = Vec::new();
        let mut failure = None;
        {
            let mut state = self.state.lock();
            state.finding = false;
            state.doubtful = false;
            match found {
                Ok((descriptor, target)) => {
                    left = self.look_at(&mut state, descriptor);
                    self.set_target(&mut state, target);
                    state.refreshed |= refresh;
                }
                // What is known may still do.
                Err(_) if cause.is_none() && state.target.is_some() => {}
                Err(error) => {
                    let error = match cause {
                        Some(first) => Error::quiet(first.code(), format!("{}; then: {}", first.message(), error.message())),
                        None => error,
                    };
                    failure = state.give_up(error);
                }
            }
        }
        self.fail_all(failure);
        left.iter().for_each(|lane| lane.leave());
        self.dispatch();
    }

    fn resolve(&self, refresh: bool) -> Result<(Arc<SegmentDescriptor>, Target)> {
        let descriptor = if refresh { self.segment.refresh()? } else { self.segment.descriptor() };
        let host = self.segment.host()?;
        let port = data_port(&descriptor).ok_or_else(|| {
            Error::new(Code::Metadata, format!("{self}: its descriptor names no TCP data port; is its tcp transport installed?"))
        })?;
        let addresses: Vec<SocketAddr> = (host.as_str(), port)
            .to_socket_addrs()
            .map_err(|error| {
                Error::new(Code::Dns, format!("{self}: cannot resolve {host}: {error}; check the name and the resolver"))
            })?
            .collect();
        if addresses.is_empty() {
            return Err(Error::new(Code::Dns, format!("{self}: {host} has no address; check the name and the resolver")));
        }
        let version = self.version(&descriptor);
        Ok((descriptor, Target { addresses, version }))
    }

    /// A lane is connected: what was done to find the peer was enough.
    pub fn lane_connected(&self) {
        self.state.lock().refreshed = false;
    }

    /// A lane could not be connected.
    fn could_not_connect(self: &Arc<Self>, state: &mut State, lane: &Lane, error: io::Error) -> Option<Failure> {
        self.shared.counters.connections_failed.add(1);
        let is_known = state.unreachable.as_ref().is_some_and(|(lanes, _)| lane.number() < *lanes);
        let is_connected = state.lanes.iter().any(|lane| lane.is_accepting() && lane.is_connected());
        if state.finding || is_connected || is_known { None } else { self.give_up_address(state, lane.address(), error) }
    }

    /// No connection to the address: the next one is tried, then those of a fresh descriptor, then the backlog fails.
    fn give_up_address(self: &Arc<Self>, state: &mut State, address: SocketAddr, error: io::Error) -> Option<Failure> {
        let addresses = state.target.as_ref().map_or(&[][..], |target| &target.addresses);
        // Another lane may have failed there before.
        if addresses.get(state.address) != Some(&address) {
            return None;
        }
        if state.address + 1 < addresses.len() {
            state.address += 1;
            return None;
        }
        let is_limit = limits::is_out_of_descriptors(&error);
        let error = self.cannot_connect(address, &error, is_limit);
        if is_limit {
            return state.fail_backlog(error);
        }
        // Also with an empty backlog: what was meant for the lane is on its way back.
        if state.refreshed { state.give_up(error) } else { self.find(state, Some(error), true) }
    }

    /// A lane has ended. `returned` is work that may be tried elsewhere.
    pub fn lane_closed(self: &Arc<Self>, lane: &Lane, returned: Vec<Work>, loss: Option<Loss>) {
        let mut others = Vec::new();
        {
            let mut state = self.state.lock();
            state.lanes.retain(|other| !std::ptr::eq(&**other, lane));
            state.paths.retain(|_, other| !std::ptr::eq(other.as_ptr(), lane));
            if let Some(Loss::Broken(attempts)) = loss {
                self.shared.counters.retries.add(returned.len() as u64);
                state.doubtful |= attempts + 1 >= ATTEMPTS;
                others = state.lanes.clone();
            }
        }
        // They may have been lost, too, without a sign so far: what is tried again gets a new connection.
        for other in others {
            other.close_if_idle();
        }
        let failures = {
            let mut state = self.state.lock();
            let mut failures = self.enqueue_of(&mut state, lane, returned);
            if let Some(Loss::Unconnected(error)) = loss {
                failures.extend(self.could_not_connect(&mut state, lane, error));
            }
            failures
        };
        self.fail_all(failures);
        self.dispatch();
    }

    /// Looks at the fresh descriptor of a peer that has refused work, in the background.
    pub fn reexamine(self: &Arc<Self>, works: Vec<Work>) {
        let (again, last): (Vec<Work>, Vec<Work>) = works.into_iter().partition(|work| !work.examined);
        for work in last {
            let error = self.refusal(&work.slice);
            self.finish(work, Err(error));
        }
        let mut failures = Vec::new();
        {
            let mut state = self.state.lock();
            if state.closed {
                failures.push((self.shared.closing().unwrap_or_else(lane::cancelled), again));
            } else {
                let (over, again): (Vec<Work>, Vec<Work>) = again.into_iter().partition(Work::is_cancelled);
                failures.push((lane::cancelled(), over));
                state.refused.extend(again);
                if !state.examining && !state.refused.is_empty() {
                    state.examining = true;
                    let peer = self.clone();
                    if self.shared.background.run(move || peer.examine()).is_err() {
                        state.examining = false;
                        failures.push((self.cannot_ask(), std::mem::take(&mut state.refused)));
                    }
                }
            }
        }
        self.fail_all(failures);
    }

    fn examine(self: &Arc<Self>) {
        loop {
            {
                let mut state = self.state.lock();
                if state.refused.is_empty() {
                    state.examining = false;
                    return;
                }
            }
            // What waits keeps its place meanwhile, where deadlines and cancellation find it.
            let descriptor = self.segment.refresh();
            let works = std::mem::take(&mut self.state.lock().refused);
            let mut again = Vec::new();
            for mut work in works {
                work.examined = true;
                let pieces = match &descriptor {
                    Ok(descriptor) => split(descriptor, work.slice.remote_address, work.slice.local.length()),
                    Err(_) => Vec::new(),
                };
                match pieces.len() {
                    0 => {
                        let error = self.refusal(&work.slice);
                        self.finish(work, Err(error));
                    }
                    1 => again.push(work),
                    count => {
                        // The whole is counted as running, and ends without this transport's help.
                        self.shared.add_running(count);
                        self.shared.end_running(1);
                        again.extend(divide(work, &pieces));
                    }
                }
            }
            if !again.is_empty() {
                self.shared.counters.retries.add(again.len() as u64);
                self.take_back(again);
            }
        }
    }

    /// Ends what has waited too long.
    pub fn expire(self: &Arc<Self>, now: Instant) {
        let lanes = self.state.lock().lanes.clone();
        let limit = self.shared.settings.connect_timeout;
        // What waits for a lane waits for the progress of those that there are.
        let progress = lanes.iter().map(|lane| lane.expire(now, limit)).max();
        let mut expired = Vec::new();
        {
            let mut state = self.state.lock();
            if state.backlog.iter().any(|work| work.expires(progress) <= now) {
                let (over, rest): (Vec<Work>, Vec<Work>) =
                    std::mem::take(&mut state.backlog).into_iter().partition(|work| work.expires(progress) <= now);
                state.backlog = rest.into();
                expired = over;
            }
            expired.extend(state.refused.extract_if(.., |work| work.expires(None) <= now));
        }
        for work in expired {
            let error = self.timed_out(&work.slice);
            self.finish(work, Err(error));
        }
    }

    /// Ends the slices that match; their memory is not touched after this returns. Work that is on its way between queues is not seen.
    pub fn abandon(self: &Arc<Self>, matches: &dyn Fn(&Slice) -> bool, error: &dyn Fn(&Slice) -> Error) {
        let (lanes, works) = {
            let mut guard = self.state.lock();
            let state = &mut *guard;
            let (mut works, rest): (Vec<Work>, Vec<Work>) =
                std::mem::take(&mut state.backlog).into_iter().partition(|work| matches(&work.slice));
            state.backlog = rest.into();
            works.extend(state.refused.extract_if(.., |work| matches(&work.slice)));
            (state.lanes.clone(), works)
        };
        for work in works {
            let error = error(&work.slice);
            self.finish(work, Err(error));
        }
        for lane in lanes {
            lane.abandon(matches, error);
        }
    }

    /// Closes idle lanes; the others end with what they carry, if this is called again. For a segment that nobody has opened any more.
    pub fn retire(&self) {
        let lanes = self.state.lock().lanes.clone();
        for lane in lanes {
            lane.close_if_idle();
        }
    }

    /// Ends all work with `reason`, and takes no more.
    pub fn close(self: &Arc<Self>, reason: &Error) {
        let (lanes, works) = {
            let mut state = self.state.lock();
            state.closed = true;
            let mut works: Vec<Work> = std::mem::take(&mut state.backlog).into();
            works.append(&mut state.refused);
            (state.lanes.clone(), works)
        };
        for lane in lanes {
            lane.fail(reason);
        }
        self.fail_all([(reason.clone(), works)]);
    }

    pub fn count_ended(&self, count: usize) {
        self.shared.end_running(count);
    }

    fn fail_all(&self, failures: impl IntoIterator<Item = Failure>) {
        for (error, works) in failures {
            for work in works {
                self.finish(work, Err(error.clone()));
            }
        }
    }

    fn finish(&self, work: Work, outcome: Result<()>) {
        work.slice.finish(outcome);
        self.shared.end_running(1);
    }

    fn cannot_connect(&self, address: SocketAddr, error: &io::Error, is_limit: bool) -> Error {
        let code = if is_limit { Code::Limit } else { Code::Socket };
        let advice = if is_limit {
            "raise the limit on open files (ulimit -n)"
        } else {
            "check that the peer runs and that its data port is reachable"
        };
        Error::new(code, format!("{self}: cannot connect to its data port {address}: {error}; {advice}"))
    }

    pub fn timed_out(&self, slice: &Slice) -> Error {
        let why = match slice.deadline.absolute {
            Some(deadline) if deadline <= Instant::now() => "did not end by its deadline".to_string(),
            _ => format!("made no progress for {:?}", slice.deadline.stall),
        };
        Error::new(Code::Timeout, format!("{} {why}; is the peer alive, and the time enough?", self.what(slice)))
    }

    pub fn broke(&self, slice: &Slice, reason: &str, version: Version) -> Error {
        let hint = match version {
            Version::V1 => "; it speaks protocol 1, which closes the connection on an address that is not registered",
            Version::V2 => "",
        };
        Error::new(Code::Socket, format!("{}: {reason}{hint}", self.what(slice)))
    }

    fn refusal(&self, slice: &Slice) -> Error {
        let text = format!(
            "{}: refused; the peer has not registered all of the range, or not for peers; te_list_segment_memory tells what it has",
            self.what(slice)
        );
        Error::new(Code::AddressNotRegistered, text)
    }

    fn what(&self, slice: &Slice) -> String {
        let what = match slice.opcode {
            Opcode::Read => "read of",
            Opcode::Write => "write to",
        };
        format!("{what} [{:#x}, +{}) at {self}", slice.remote_address, slice.local.length())
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "segment {}", self.segment.descriptor().name)
    }
}

/// The target, if that needs no name resolution.
fn literal(endpoint: &Endpoint) -> Option<Target> {
    let address: IpAddr = endpoint.host.as_ref()?.parse().ok()?;
    Some(Target { addresses: vec![SocketAddr::new(address, endpoint.port?)], version: endpoint.version })
}

fn data_port(descriptor: &SegmentDescriptor) -> Option<u16> {
    Some(descriptor.tcp_data_port).filter(|&port| port != 0)
}

/// Lengths of the parts of `[address, address + length)` by the registered buffers that it spans. Empty if it is not covered.
fn split(descriptor: &SegmentDescriptor, address: u64, length: u64) -> Vec<u64> {
    let end = u128::from(address) + u128::from(length);
    let mut covering: Vec<(u128, u128)> = descriptor
        .buffers
        .iter()
        .map(|buffer| (u128::from(buffer.address), u128::from(buffer.address) + u128::from(buffer.length)))
        .filter(|&(from, to)| from < end && to > u128::from(address))
        .collect();
    covering.sort_unstable();
    let mut at = u128::from(address);
    let mut pieces = Vec::new();
    for (from, to) in covering {
        if from > at {
            return Vec::new();
        }
        let next = to.min(end);
        if next > at {
            pieces.push((next - at) as u64);
            at = next;
        }
    }
    if at == end { pieces } else { Vec::new() }
}

/// The parts of a slice that was split, as far as they have not ended.
struct Division {
    whole: Mutex<Option<Slice>>,
    remaining: AtomicU32,
    error: Mutex<Option<Error>>,
    owner: Arc<dyn Completion>,
}

impl Completion for Division {
    fn finish(&self, _index: u32, outcome: Result<()>) {
        if let Err(error) = outcome {
            self.error.lock().get_or_insert(error);
        }
        if self.remaining.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(slice) = self.whole.lock().take()
        {
            let outcome = self.error.lock().take().map_or(Ok(()), Err);
            slice.finish(outcome);
        }
    }

    fn is_cancelled(&self) -> bool {
        self.owner.is_cancelled()
    }
}

fn divide(work: Work, pieces: &[u64]) -> Vec<Work> {
    let Work { slice, attempts, examined, since } = work;
    let (opcode, local, remote_address, deadline, way) =
        (slice.opcode, slice.local, slice.remote_address, slice.deadline, slice.way);
    let division: Arc<dyn Completion> = Arc::new(Division {
        owner: slice.completion.clone(),
        whole: Mutex::new(Some(slice)),
        remaining: AtomicU32::new(pieces.len() as u32),
        error: Mutex::new(None),
    });
    let mut offset = 0;
    let mut works = Vec::with_capacity(pieces.len());
    for (index, &length) in pieces.iter().enumerate() {
        if let Some(part) = local.part(offset, length) {
            let slice = Slice {
                opcode,
                local: part,
                remote_address: remote_address + offset,
                deadline,
                completion: division.clone(),
                index: index as u32,
                way,
            };
            works.push(Work { slice, attempts, examined, since });
        }
        offset += length;
    }
    works
}

#[cfg(test)]
mod tests {
    use super::super::TcpTransport;
    use super::*;
    use crate::config::Config;
    use crate::metadata::BufferDescriptor;
    use crate::transport::{Nowhere, Transport};

    #[test]
    fn who_goes_through_all_peers_finds_one_that_is_being_forgotten() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let transport = TcpTransport::start(listener, Arc::default(), Arc::default(), Arc::default(), &Config::default()).unwrap();
        let segment: Arc<dyn Segment> = Arc::new(Nowhere);
        let peer = transport.peer(&segment);
        std::thread::scope(|scope| {
            // Its lanes are asked for.
            let held = peer.state.lock();
            scope.spawn(|| transport.forget(segment.id()));
            while transport.shared.peers.read().contains_key(&segment.id()) {
                std::thread::yield_now();
            }
            let is_found = transport.shared.all_peers().iter().any(|other| Arc::ptr_eq(other, &peer));
            drop(held);
            assert!(is_found);
        });
    }

    fn descriptor(buffers: &[(u64, u64)]) -> SegmentDescriptor {
        let buffers =
            buffers.iter().map(|&(address, length)| BufferDescriptor { address, length, ..BufferDescriptor::default() }).collect();
        SegmentDescriptor { buffers, ..SegmentDescriptor::default() }
    }

    #[test]
    fn ranges_are_split_at_the_borders_of_touching_buffers() {
        let descriptor = descriptor(&[(300, 100), (100, 100), (200, 100), (500, 10)]);
        assert_eq!(split(&descriptor, 150, 200), [50, 100, 50]);
        assert_eq!(split(&descriptor, 100, 300), [100, 100, 100]);
        assert_eq!(split(&descriptor, 120, 10), [10]);
    }

    #[test]
    fn ranges_with_a_gap_are_not_split() {
        let descriptor = descriptor(&[(100, 100), (200, 100), (400, u64::MAX - 399)]);
        for (address, length) in [(250, 100), (50, 100), (299, 102), (0, 1)] {
            assert_eq!(split(&descriptor, address, length), [0u64; 0], "{address} {length}");
        }
        assert_eq!(split(&descriptor, u64::MAX - 9, 10), [10]);
    }
}
