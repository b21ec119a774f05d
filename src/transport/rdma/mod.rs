//! The RDMA transport: NICs read and write registered memory of peers, and serve theirs without this process taking part.
//!
//! | file | what it holds |
//! |---|---|
//! | [`verbs`] | the verbs library, and all that is unsafe about it |
//! | [`device`] | a NIC with its port, address and memory |
//! | `work` | tasks, and the spans of memory that are moved for them |
//! | `peer` | a segment that is submitted to: its descriptor, made ready for looking things up |
//! | `plan` | which way each span goes |
//! | `endpoint` | queue pairs that are connected with those of a peer's NIC |
//! | `nic` | what is posted on a NIC, and what comes back |
//! | `outage` | a NIC that has failed, and how it comes back |
//! | `message` | how queue pairs get to know each other |
//! | `connect` | both sides of that |
//!
//! Life of a span: planned on the submitter's thread; queued at an endpoint, which is connected first if need be, on a background thread;
//! posted; completed on whichever thread polls, the NIC's own or a caller's. If it fails it is parked with its peer until a background
//! thread has the peer's present descriptor, then planned again, on another pair of NICs, up to `MC_RETRY_CNT` times.
//!
//! Memory is quiescent when a task ends: each posted span has completed, or its queue pair has been destroyed. A deadline, a cancel or an
//! eviction retires the endpoint that the work is posted on; other work on it is flushed, too, and tried again. All local memory is
//! guarded by the completion while it is used, so unregistering waits; what peers do ends by deregistering alone.
//!
//! Who locks what: a NIC's state, a peer's waiting spans, the list of peers that are asked and that of paused rails are locked alone, but for
//! a peer that comes on that list, for which its waiting spans are locked; no completion is called, and nobody outside is asked, with a lock
//! held.
//!
//! Threads: one for each NIC; up to four for connecting and asking that come and go, and as many for reviving NICs.

mod connect;
pub mod device;
mod endpoint;
#[cfg(test)]
pub mod fake;
mod message;
mod nic;
mod outage;
mod peer;
mod plan;
pub mod verbs;
mod work;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};

use self::nic::{Fallout, LocalNic, Opened};
use self::peer::Peer;
use self::plan::{NotAtPeer, Planner};
use self::verbs::AsyncEvent;
use self::work::{Group, Span};
use super::{Device, NicLoad, Segment, Slices, Transport, Watchers};
use crate::config::{Config, RdmaConfig};
use crate::error::{Code, Error, Result};
use crate::metadata::{DeviceDescriptor, RdmaHeader};
use crate::sys::MemoryRange;
use crate::sys::background::Background;
use crate::sys::epoll::{Epoll, Events, Interest};
use crate::sys::thread;
use crate::telemetry::Counters;
use crate::topology::{Link, Machine, NicChoice, Topology};

/// How often deadlines are looked at while there is work.
const TICK: Duration = Duration::from_millis(10);

/// How often, and how many times, when there is none: starting again costs a wake-up of the thread.
const IDLE_TICK: Duration = Duration::from_millis(100);
const IDLE_TICKS: usize = 20;

/// How often a NIC's thread looks while callers poll.
const ATTENDED_TICK: Duration = Duration::from_millis(1);

/// Longest text that a peer may give as the path of its NIC.
const PATH_MAX: usize = 1024;

const TOKEN_WAKE: u64 = 0;
const TOKEN_COMPLETION: u64 = 1;
const TOKEN_EVENT: u64 = 2;

/// Who wants to know of changes. Implemented by the engine; called on a NIC's thread, or on a background one.
pub trait Observer: Send + Sync {
    /// What peers are told of the NICs has changed. `header` makes what they are to be told now: to be called with a lock held that keeps the
    /// last one last.
    fn header_changed(&self, header: &dyn Fn() -> RdmaHeader);

    /// The NIC, at this place among [`Transport::devices`], has come back: makes all registered memory known to it, and has peers see the
    /// keys the next time that they ask. Blocks, on a background thread; stops early where that is not wanted any more. Called again once the
    /// NIC is active, for what was registered without it meanwhile.
    fn attach_memory(&self, position: usize, device: &dyn Device, is_wanted: &dyn Fn() -> bool);
}

/// What the transport's parts share.
struct Shared {
    this: Weak<Shared>,
    server: String,
    counters: Arc<Counters>,
    watchers: Arc<Watchers>,
    observer: OnceLock<Weak<dyn Observer>>,
    config: RdmaConfig,
    round_robin: bool,
    topology: Topology,
    machine: Machine,
    /// Names of all NICs.
    names: Vec<String>,
    /// All of them: those that have failed keep their places.
    nics: Vec<Arc<LocalNic>>,
    choice: NicChoice,
    /// With which of several preferred NICs the next submission begins.
    next_turn: AtomicUsize,
    peers: RwLock<HashMap<u64, Arc<Peer>>>,
    /// Peers that are asked, or will be: those that spans may wait with, forgotten ones among them.
    asked: Mutex<Vec<Arc<Peer>>>,
    /// Pairs of NICs that have failed, and until when they are not used if there are others.
    paused: RwLock<HashMap<(usize, Arc<str>), Instant>>,
    has_paused: AtomicBool,
    /// Servers that are not connected to, and until when.
    paused_servers: Mutex<HashMap<String, Instant>>,
    background: Background,
    revivals: Background,
    closing: OnceLock<Error>,
}

impl Shared {
    fn nics(&self) -> impl Iterator<Item = &Arc<LocalNic>> {
        self.nics.iter()
    }

    fn observer(&self) -> Option<Arc<dyn Observer>> {
        self.observer.get().and_then(Weak::upgrade)
    }

    fn is_paused(&self, nic: usize, path: &Arc<str>, now: Instant) -> bool {
        self.has_paused.load(Ordering::Relaxed) && self.paused.read().get(&(nic, path.clone())).is_some_and(|until| now < *until)
    }

    fn pause(&self, nic: usize, path: Arc<str>) {
        let (now, mut paused) = (Instant::now(), self.paused.write());
        paused.retain(|_, until| now < *until);
        paused.insert((nic, path), now + self.config.rail_pause);
        self.has_paused.store(true, Ordering::Relaxed);
    }

    /// A connection with a NIC of this path has ended: its server is left alone for a while, if the configuration says so.
    fn pause_server(&self, path: &str) {
        if !self.config.reconnect_pause.is_zero() {
            let (now, mut paused) = (Instant::now(), self.paused_servers.lock());
            paused.retain(|_, until| now < *until);
            paused.insert(server_of(path).to_string(), now + self.config.reconnect_pause);
        }
    }

    fn is_server_paused(&self, path: &str) -> bool {
        !self.config.reconnect_pause.is_zero()
            && self.paused_servers.lock().get(server_of(path)).is_some_and(|until| Instant::now() < *until)
    }

    fn peer(&self, segment: &Arc<dyn Segment>) -> Arc<Peer> {
        if let Some(peer) = self.peers.read().get(&segment.id()) {
            return peer.clone();
        }
        let peer = Arc::new(Peer::new(segment.clone(), self.round_robin));
        self.peers.write().entry(segment.id()).or_insert(peer).clone()
    }

    /// Sends spans of one peer on their ways.
    fn dispatch(&self, peer: &Arc<Peer>, spans: impl ExactSizeIterator<Item = Span>) {
        let view = peer.view();
        let mut planner = Planner::new(self, peer, &view, spans.len());
        let mut missing = Vec::new();
        // Mostly all are of the same.
        let (mut groups, mut is_over): (Vec<Arc<Group>>, bool) = (Vec::new(), false);
        for span in spans {
            if !groups.last().is_some_and(|group| Arc::ptr_eq(group, span.group())) {
                is_over = span.group().is_troubled() || span.group().is_cancelled();
                groups.push(span.group().clone());
                planner.begin_group();
            }
            if is_over && let Some(error) = span.doomed() {
                span.end(Err(error));
                continue;
            }
            if let Some(place) = planner.find_known(&span) {
                planner.put_as_known(span, place);
                continue;
            }
            let Some(group) = groups.last() else { unreachable!("the span's is there") };
            match planner.plan(group, span) {
                Ok(()) => {}
                Err(NotAtPeer(mut span)) if !span.has_missed => {
                    span.has_missed = true;
                    missing.push(span);
                }
                Err(NotAtPeer(span)) => {
                    let text = format!(
                        "{} bytes at {:#x} of {} are not (all) registered there for remote access",
                        span.local.length(),
                        span.remote_address,
                        peer.segment.descriptor().name
                    );
                    span.end(Err(Error::new(Code::AddressNotRegistered, text)));
                }
            }
        }
        for (span, error) in planner.ended {
            span.end(Err(error));
        }
        for rail in planner.rails {
            let nic = &self.nics[rail.nic];
            let fallout = nic.submit(&rail.path, peer, rail.spans, &groups);
            self.settle(nic, fallout);
        }
        self.park(peer, missing);
    }

    /// Does what has come of a NIC's work, without any lock.
    fn settle(&self, nic: &Arc<LocalNic>, fallout: Fallout) {
        if fallout.is_empty() {
            return;
        }
        let Fallout { moved, ended, retries, failures, connect, doubts, pauses, given_up, dropped } = fallout;
        for (path, connection) in given_up {
            connection.give_up(&path);
        }
        for (path, connection) in dropped {
            if connection.is_linked() {
                self.pause_server(&path);
            }
        }
        for (group, tasks) in moved {
            group.end_moved(tasks);
        }
        for (span, error) in ended {
            span.end(Err(error));
        }
        for path in pauses {
            self.pause(nic.index, path);
        }
        for (index, id, peer) in connect {
            let (shared, to) = (self.this.clone(), nic.clone());
            let job = move || {
                if let Some(shared) = shared.upgrade() {
                    connect::open(&shared, &to, index, id, &peer);
                }
            };
            if self.background.run(job).is_err() {
                let error = self.closing.get().cloned().unwrap_or_else(|| Error::new(Code::Limit, "no thread to connect on"));
                let fallout = nic.retire(index, id, Some(error));
                self.settle(nic, fallout);
            }
        }
        for (index, id, peer) in doubts {
            let (shared, to) = (self.this.clone(), nic.clone());
            let job = move || {
                if let Some(shared) = shared.upgrade() {
                    connect::verify(&shared, &to, index, id, &peer);
                }
            };
            // Without a thread the endpoint stays until it fails.
            let _ = self.background.run(job);
        }
        let mut again: Vec<Span> = retries;
        for (mut span, error) in failures {
            span.attempt = span.attempt.saturating_add(1);
            // A refused key may be old: there is one look at the peer's present descriptor, however few tries there are.
            let has_look = span.is_refused && span.attempt == 1;
            if u32::from(span.attempt) >= self.config.retry_count && !has_look {
                span.end(Err(error));
            } else {
                again.push(span);
            }
        }
        if !again.is_empty() {
            self.counters.retries.add(again.len() as u64);
        }
        while let Some(last) = again.last() {
            let peer = last.group().peer.clone();
            let of_peer = again.extract_if(.., |span| Arc::ptr_eq(&span.group().peer, &peer)).collect();
            self.park(&peer, of_peer);
        }
    }

    /// Keeps spans until the peer's present descriptor is there, then plans them again.
    fn park(&self, peer: &Arc<Peer>, spans: Vec<Span>) {
        let (mut kept, mut over) = (Vec::with_capacity(spans.len()), Vec::new());
        let is_first = {
            let mut waiting = peer.waiting.lock();
            // With the lock: whoever cancels or closes looks afterwards for what is parked with the peers that are asked.
            for span in spans {
                match self.closing.get().cloned().or_else(|| span.doomed()) {
                    Some(error) => over.push((span, error)),
                    None => kept.push(span),
                }
            }
            let is_first = !kept.is_empty() && !std::mem::replace(&mut waiting.is_asking, true);
            if is_first {
                self.asked.lock().push(peer.clone());
            }
            if !kept.is_empty() {
                waiting.parked.add(kept);
            }
            is_first
        };
        over.into_iter().for_each(|(span, error)| span.end(Err(error)));
        if !is_first {
            return;
        }
        // Its thread looks at deadlines of what is parked.
        self.nics().take(1).for_each(|nic| nic.wake_sleeper());
        let (shared, to) = (self.this.clone(), peer.clone());
        let job = move || {
            if let Some(shared) = shared.upgrade() {
                shared.ask(&to);
            }
        };
        if self.background.run(job).is_err() {
            let error = self.closing.get().cloned().unwrap_or_else(|| Error::new(Code::Limit, "no thread to ask the peer on"));
            let spans = {
                let mut waiting = peer.waiting.lock();
                waiting.is_asking = false;
                std::mem::take(&mut waiting.parked.spans)
            };
            self.is_not_asked(peer);
            spans.into_iter().for_each(|span| span.end(Err(error.clone())));
        }
    }

    /// Fetches the peer's descriptor and plans what waits for it, until nothing does. Blocks.
    fn ask(&self, peer: &Arc<Peer>) {
        loop {
            {
                let mut guard = peer.waiting.lock();
                let waiting = &mut *guard;
                if waiting.parked.spans.is_empty() {
                    waiting.is_asking = false;
                    break;
                }
                std::mem::swap(&mut waiting.parked, &mut waiting.asking);
            }
            let refreshed = peer.segment.refresh();
            let spans = std::mem::take(&mut peer.waiting.lock().asking.spans);
            match refreshed {
                Ok(_) => self.dispatch(peer, spans.into_iter()),
                Err(error) => spans.into_iter().for_each(|span| span.end(Err(error.clone()))),
            }
        }
        self.is_not_asked(peer);
    }

    /// Takes back one entry of `asked`; if somebody asks again already, there is another one.
    fn is_not_asked(&self, peer: &Arc<Peer>) {
        let mut asked = self.asked.lock();
        if let Some(place) = asked.iter().position(|other| Arc::ptr_eq(other, peer)) {
            asked.swap_remove(place);
        }
    }

    /// Ends what is to be given up and can be, wherever it is.
    fn abandon(&self, matches: &dyn Fn(&Span) -> bool, error: &dyn Fn(&Span) -> Error) {
        for nic in self.nics() {
            let fallout = nic.abandon(matches, error);
            self.settle(nic, fallout);
            nic.wake();
        }
        self.end_parked(|span, _| matches(span).then(|| error(span)));
    }

    /// Ends parked spans that `error` has something against; it is told since when they wait. True if others are left.
    fn end_parked(&self, error: impl Fn(&Span, Instant) -> Option<Error>) -> bool {
        let peers = self.asked.lock().clone();
        let mut are_left = false;
        for peer in peers {
            let mut ended = Vec::new();
            {
                let mut guard = peer.waiting.lock();
                let waiting = &mut *guard;
                for list in [&mut waiting.parked, &mut waiting.asking] {
                    let since = list.since;
                    for span in std::mem::take(&mut list.spans) {
                        match error(&span, since) {
                            Some(error) => ended.push((span, error)),
                            None => list.spans.push(span),
                        }
                    }
                    are_left |= !list.spans.is_empty();
                }
            }
            ended.into_iter().for_each(|(span, error)| span.end(Err(error)));
        }
        are_left
    }

    fn header_changed(&self) {
        if let Some(observer) = self.observer() {
            observer.header_changed(&|| self.header());
        }
    }

    /// What peers are told of the NICs.
    fn header(&self) -> RdmaHeader {
        let mut devices = Vec::new();
        let mut active = Vec::new();
        for (name, nic) in self.names.iter().zip(&self.nics) {
            let (gid, lid) = nic.address().map_or_else(Default::default, |address| (address.gid, address.lid));
            devices.push(DeviceDescriptor { name: name.clone(), lid, gid: gid.to_string() });
            if nic.is_active() {
                active.push(name);
            }
        }
        let mut priority_matrix = self.topology.matrix().clone();
        for (preferred, available) in priority_matrix.values_mut() {
            preferred.retain(|name| active.contains(&name));
            available.retain(|name| active.contains(&name));
        }
        RdmaHeader { server_name: self.server.clone(), devices, priority_matrix }
    }

    /// Has the NIC's thread told of what happens to what is open of the NIC.
    fn serve(nic: &LocalNic, epoll: &Epoll) -> std::io::Result<Option<Arc<Opened>>> {
        let Some(opened) = nic.opened() else { return Ok(None) };
        epoll.add(&opened.channel.descriptor(), Interest::READ, TOKEN_COMPLETION)?;
        epoll.add(&opened.device.context().async_descriptor(), Interest::READ, TOKEN_EVENT)?;
        Ok(Some(opened))
    }

    /// The loop of a NIC's thread. `served`: what is open of it, if anything is, and is served by [`Shared::serve`].
    fn run(&self, nic: &Arc<LocalNic>, epoll: &Epoll, mut served: Option<Arc<Opened>>, is_first: bool) {
        let mut events = Events::with_capacity(8);
        let mut next_tick = Instant::now();
        let mut needs_clock = false;
        let mut idle_ticks = 0;
        while !(self.closing.get().is_some() && nic.is_flushed()) {
            let fallout = nic.drive();
            self.settle(nic, fallout);
            let now = Instant::now();
            if now >= next_tick {
                let (fallout, mut needs) = nic.expire(now);
                self.settle(nic, fallout);
                if is_first {
                    needs |= self.end_parked(|span, since| (now >= span.group().expiry(since)).then(|| span.timeout(now)));
                }
                needs_clock = needs;
                idle_ticks = if needs { 0 } else { idle_ticks + 1 };
                next_tick = now + if needs { TICK } else { IDLE_TICK };
            }
            self.look_after(nic, epoll, &mut served);
            let is_attended = nic.decide_attended(&self.watchers);
            if !is_attended && served.is_some() {
                if let Err(error) = nic.arm() {
                    self.deactivate(nic, &format!("it does not tell of completions ({error})"), true);
                }
                let fallout = nic.drive();
                if !fallout.is_empty() {
                    self.settle(nic, fallout);
                    continue;
                }
            }
            let rest = next_tick.saturating_duration_since(Instant::now());
            let timeout = match is_attended {
                true => Some(ATTENDED_TICK.min(rest)),
                false if needs_clock || idle_ticks < IDLE_TICKS || self.closing.get().is_some() => Some(rest),
                false if nic.begin_sleep(|| is_first && !self.asked.lock().is_empty()) => None,
                false => {
                    // Something has come meanwhile, and has woken nobody.
                    next_tick = Instant::now();
                    Some(Duration::ZERO)
                }
            };
            // One that is due waits for queue pairs to be gone.
            let until_revival = nic.outage.next_try().map(|at| at.saturating_duration_since(Instant::now()).max(TICK));
            let Ok(ready) = epoll.wait(&mut events, timeout.into_iter().chain(until_revival).min()) else { return };
            let mut has_events = false;
            for event in ready {
                match event.token {
                    TOKEN_WAKE => {
                        nic.wake.clear();
                        next_tick = Instant::now();
                        idle_ticks = 0;
                    }
                    TOKEN_COMPLETION => {
                        if let Some(Err(error)) = served.as_ref().map(|opened| opened.channel.take_events()) {
                            self.deactivate(nic, &format!("it tells nothing of completions ({error})"), true);
                        }
                    }
                    _ => has_events = true,
                }
            }
            if has_events && let Some(opened) = &served {
                self.take_events(nic, opened);
            }
        }
    }

    /// Leaves what is broken of the NIC alone, serves what was opened anew, and has the NIC revived when it is time.
    fn look_after(&self, nic: &Arc<LocalNic>, epoll: &Epoll, served: &mut Option<Arc<Opened>>) {
        if let Some(reason) = nic.poll_failure() {
            self.deactivate(nic, &reason, true);
        }
        if nic.is_active() && served.is_some() {
            return;
        }
        let is_broken = nic.outage.is_broken();
        match (is_broken, &served) {
            (true, Some(opened)) => {
                // They would be reported ready again and again.
                let _ = epoll.remove(&opened.channel.descriptor());
                let _ = epoll.remove(&opened.device.context().async_descriptor());
                *served = None;
            }
            (false, None) => match Shared::serve(nic, epoll) {
                Ok(opened) => *served = opened,
                Err(error) => self.deactivate(nic, &format!("no event descriptor: {error}; check ulimit -n"), true),
            },
            _ => {}
        }
        let is_due = nic.outage.next_try().is_some_and(|at| Instant::now() >= at);
        if is_due && self.closing.get().is_none() && (!is_broken || nic.is_flushed()) {
            self.begin_revival(nic);
        }
    }

    /// What the device says of itself.
    fn take_events(&self, nic: &Arc<LocalNic>, opened: &Opened) {
        loop {
            let event = match opened.device.context().next_event() {
                Ok(Some(event)) => event,
                Ok(None) => return,
                Err(error) => return self.deactivate(nic, &format!("its events cannot be read ({error})"), true),
            };
            tracing::info!("{}: {event:?}", nic.name());
            let is_ours = |port: u8| port == self.config.port;
            match event {
                AsyncEvent::DeviceFatal => self.deactivate(nic, "the device has failed", true),
                AsyncEvent::CompletionQueueError => self.deactivate(nic, "a completion queue has failed", true),
                AsyncEvent::PortError(port) if is_ours(port) => self.deactivate(nic, "its port is down", false),
                AsyncEvent::LidChange(port) | AsyncEvent::GidChange(port) | AsyncEvent::PortActive(port) if is_ours(port) => {
                    self.readdress(nic);
                }
                AsyncEvent::QueuePairFatal(number) => {
                    let fallout = nic.retire_pair(number);
                    self.settle(nic, fallout);
                }
                _ => {}
            }
        }
    }
}

/// The server part of a NIC's path.
fn server_of(path: &str) -> &str {
    path.rsplit_once('@').map_or(path, |(server, _)| server)
}

/// The transport named `rdma`.
pub struct RdmaTransport {
    shared: Arc<Shared>,
    devices: Vec<Arc<dyn Device>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl RdmaTransport {
    /// Opens the topology's NICs and starts a thread for each, also for those that cannot be used yet. `name` is the engine's; `watchers` is
    /// read: see [`Transport::watch`].
    ///
    /// DeviceNotFound where there is no verbs library or no NIC that can be used; Limit when the process has no descriptor or thread left.
    pub fn start(
        name: &str,
        topology: Topology,
        counters: Arc<Counters>,
        watchers: Arc<Watchers>,
        config: &Config,
    ) -> Result<Arc<RdmaTransport>> {
        let library = device::load_library(&config.rdma)?;
        let names: Vec<String> = topology.nics().into_iter().map(str::to_string).collect();
        let machine = Machine::default();
        let server = match &config.rdma.bind_address {
            Some(host) => format!("{host}:{}", name.rsplit_once(':').map_or("", |(_, port)| port)),
            None => name.to_string(),
        };
        let mut nics: Vec<Arc<LocalNic>> = Vec::new();
        let mut failure = None;
        for (index, name) in names.iter().enumerate() {
            let nic = LocalNic::new(index, name, format!("{server}@{name}"), library, &config.rdma)?;
            match nic.open(&machine) {
                Ok(()) => {
                    nic.outage.mend(0);
                    nic.outage.end(0);
                }
                Err(error) => {
                    tracing::warn!("{name} is left out until it can be used: {error}");
                    failure.get_or_insert(error);
                }
            }
            nics.push(Arc::new(nic));
        }
        if !nics.iter().any(|nic| nic.is_active()) {
            let reason = failure.map_or("the topology names none".to_string(), |error| error.message().to_string());
            return Err(Error::new(Code::DeviceNotFound, format!("no RDMA device can be used: {reason}")));
        }
        let shared = Arc::new_cyclic(|this| Shared {
            this: this.clone(),
            server,
            counters,
            watchers,
            observer: OnceLock::new(),
            config: config.rdma.clone(),
            round_robin: config.topology.round_robin,
            choice: NicChoice::new(topology.matrix(), &names, config.topology.round_robin),
            topology,
            machine,
            names,
            nics,
            next_turn: AtomicUsize::new(0),
            peers: RwLock::default(),
            asked: Mutex::default(),
            paused: RwLock::default(),
            has_paused: AtomicBool::new(false),
            paused_servers: Mutex::default(),
            background: Background::new("te-rdma-find"),
            revivals: Background::new("te-rdma-revive"),
            closing: OnceLock::new(),
        });
        let device = |nic: &Arc<LocalNic>| nic.clone() as Arc<dyn Device>;
        let devices = shared.nics().map(device).collect();
        let transport = Arc::new(RdmaTransport { shared: shared.clone(), devices, threads: Mutex::default() });
        for (number, nic) in shared.nics().enumerate() {
            let limit = |what: &str, error: std::io::Error| {
                let text = format!("cannot start the RDMA transport: {what}: {error}; check ulimit -n and ulimit -u");
                Error::new(Code::Limit, text)
            };
            let (epoll, served) = Epoll::new()
                .and_then(|epoll| {
                    epoll.add(&nic.wake, Interest::READ, TOKEN_WAKE)?;
                    let served = Shared::serve(nic, &epoll)?;
                    Ok((epoll, served))
                })
                .map_err(|error| limit("no event descriptor", error))?;
            let (of_thread, nic) = (shared.clone(), nic.clone());
            let thread = thread::spawn(format!("te-rdma-{}", nic.index), move || of_thread.run(&nic, &epoll, served, number == 0))
                .map_err(|error| limit("no thread", error))?;
            transport.threads.lock().push(thread);
        }
        Ok(transport)
    }

    /// Has somebody told of changes, from now on; once.
    pub fn observe(&self, observer: Weak<dyn Observer>) {
        self.shared.observer.get_or_init(|| observer);
    }

    /// What peers are told of the NICs now.
    pub fn header(&self) -> RdmaHeader {
        self.shared.header()
    }
}

impl Transport for RdmaTransport {
    fn protocol(&self) -> &'static str {
        "rdma"
    }

    fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.devices.clone()
    }

    fn submit(&self, segment: &Arc<dyn Segment>, slices: Slices) {
        let peer = self.shared.peer(segment);
        let group = Arc::new(Group::new(peer.clone(), slices));
        self.shared.dispatch(&peer, group.whole());
    }

    fn cancel(&self) {
        let error = Error::quiet(Code::Canceled, "cancelled by the caller");
        self.shared.abandon(&|span| span.group().is_cancelled(), &|_| error.clone());
    }

    fn evict(&self, range: MemoryRange) {
        let error = |span: &Span| {
            let (address, length) = (span.piece().local.address(), span.piece().local.length());
            Error::quiet(Code::Canceled, format!("local memory [{address:#x}, +{length}) was unregistered during the transfer"))
        };
        self.shared.abandon(&|span| span.piece().local.intersects(&range), &error);
    }

    fn poll(&self) {
        for nic in self.shared.nics() {
            let fallout = nic.poll();
            self.shared.settle(nic, fallout);
        }
    }

    fn watch(&self) {
        for nic in self.shared.nics() {
            nic.watch();
        }
    }

    fn forget(&self, segment: u64) {
        // Spans that are under way hold their peer; connections may be in use by the peer, too, and stay until there are too many.
        self.shared.peers.write().remove(&segment);
    }

    fn links(&self) -> Vec<Link> {
        let opened = self.shared.nics().filter(|nic| nic.is_active()).filter_map(|nic| nic.opened());
        opened.map(|opened| opened.device.link()).collect()
    }

    fn loads(&self) -> Vec<NicLoad> {
        self.shared.nics().map(|nic| nic.load()).collect()
    }

    fn accept(&self, request: &serde_json::Value) -> Option<serde_json::Value> {
        Some(connect::accept(&self.shared, request))
    }

    fn shutdown(&self, reason: Error) {
        let shared = &self.shared;
        shared.closing.get_or_init(|| reason.clone());
        for nic in shared.nics() {
            let fallout = nic.retire_all(Some(&reason), None);
            shared.settle(nic, fallout);
            nic.wake();
        }
        shared.background.close();
        shared.revivals.close();
        shared.end_parked(|_, _| Some(reason.clone()));
        for thread in std::mem::take(&mut *self.threads.lock()) {
            // The last reference may be dropped by one of the threads themselves.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
        shared.peers.write().clear();
    }
}

impl Drop for RdmaTransport {
    fn drop(&mut self) {
        self.shutdown(Error::quiet(Code::Canceled, "the transport was dropped"));
    }
}

#[cfg(test)]
mod tests {
    use super::fake::{Fake, Memory};
    use super::*;
    use crate::metadata::SegmentDescriptor;
    use crate::transport::{Completion, Deadline, Opcode, Piece, Way};

    /// A peer that does not answer while this is locked.
    #[derive(Default)]
    struct Silent(Mutex<()>);

    impl Segment for Silent {
        fn id(&self) -> u64 {
            1
        }
        fn descriptor(&self) -> Arc<SegmentDescriptor> {
            Arc::default()
        }
        fn refresh(&self) -> Result<Arc<SegmentDescriptor>> {
            drop(self.0.lock());
            Ok(self.descriptor())
        }
        fn host(&self) -> Result<String> {
            Ok(String::new())
        }
    }

    #[derive(Default)]
    struct Told {
        is_cancelled: AtomicBool,
        ends: Mutex<Vec<Code>>,
    }

    impl Completion for Told {
        fn finish(&self, _index: u32, outcome: Result<()>) {
            self.ends.lock().push(outcome.unwrap_err().code());
        }
        fn is_cancelled(&self) -> bool {
            self.is_cancelled.load(Ordering::SeqCst)
        }
    }

    #[test]
    fn what_is_cancelled_on_its_way_to_those_that_wait_for_the_peer_does_not_wait_for_it() {
        let fake = Fake::new(1);
        let mut config = Config::default();
        config.rdma.library = fake.library.path().to_path_buf();
        let topology = Topology::parse(r#"{"cpu:0": [["fake0"], []]}"#).unwrap();
        let transport = RdmaTransport::start("127.0.0.1:1", topology, Arc::default(), Arc::default(), &config).unwrap();
        let (segment, told, memory) = (Arc::new(Silent::default()), Arc::new(Told::default()), Memory::new(4096));
        let shared = &transport.shared;
        let peer = shared.peer(&(segment.clone() as Arc<dyn Segment>));
        let piece =
            Piece { local: memory.range(0, 4096), remote_address: 4096, index: 0, opcode: Opcode::Write, way: Way::default() };
        let deadline = Deadline { absolute: None, stall: Duration::from_secs(600) };
        let group = Arc::new(Group::new(peer.clone(), Slices { pieces: vec![piece], deadline, completion: told.clone() }));
        let silence = segment.0.lock();
        std::thread::scope(|scope| {
            // Whoever cancels has looked here.
            let waiting = peer.waiting.lock();
            scope.spawn(|| shared.park(&peer, group.whole().collect()));
            std::thread::sleep(Duration::from_millis(50));
            told.is_cancelled.store(true, Ordering::SeqCst);
            drop(waiting);
        });
        let ends = told.ends.lock().clone();
        drop(silence);
        assert_eq!(ends, [Code::Canceled]);
    }
}
