//! The TCP transport: reads and writes the memory of peers over persistent connections, and serves theirs.
//!
//! | file | what it holds |
//! |---|---|
//! | `wire` | request headers and status frames |
//! | `lane` | a connection of the submitting side |
//! | `attendance` | lanes that polling callers serve |
//! | `peer` | a segment that is submitted to: its address, its lanes, what waits |
//! | `server` | connections from peers |
//! | `io_loop` | the threads that wait for all of them |
//!
//! Who locks what: a peer's lock is taken before none of a lane's and none of a lane's before a peer's; both are released before a
//! completion is called. `peers` and `connections` are locked for look-ups and for collecting what to visit, never during a visit;
//! `retired` likewise, and with `peers` where a peer goes from there to it.
//!
//! The clock (every 10 ms while slices run, asleep when idle) ends what has waited too long.

mod attendance;
mod io_loop;
mod lane;
mod peer;
mod server;
#[cfg(test)]
mod tests;
mod wire;

use std::collections::HashMap;
use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};

use self::attendance::Attendance;
use self::io_loop::{Clock, IoLoop};
use self::peer::Peer;
use self::server::{Acceptor, Connection};
use super::{Segment, Slice, Slices, Transport, Watchers};
use crate::config::Config;
use crate::error::{Code, Error, Result};
use crate::registry::Registry;
use crate::sys::MemoryRange;
use crate::sys::background::Background;
use crate::sys::thread;
use crate::telemetry::Counters;

/// How often deadlines are looked at while slices run.
const TICK: Duration = Duration::from_millis(10);

/// How often, and how many times, when none do: starting again costs a wake-up of the thread.
const IDLE_TICK: Duration = Duration::from_millis(100);
const IDLE_TICKS: usize = 20;

/// The part of the configuration that this transport uses.
struct Settings {
    lanes_per_peer: usize,
    connect_timeout: Duration,
    force_v1: bool,
}

/// What the transport's parts share.
struct Shared {
    registry: Arc<Registry>,
    counters: Arc<Counters>,
    settings: Settings,
    background: Background,
    loops: Vec<Arc<IoLoop>>,
    next_loop: AtomicUsize,
    connections: Mutex<HashMap<usize, Arc<Connection>>>,
    /// Connections that throw away what comes.
    lingering: Mutex<Vec<usize>>,
    peers: RwLock<HashMap<u64, Arc<Peer>>>,
    /// Peers whose segments are forgotten but whose slices run.
    retired: Mutex<Vec<Arc<Peer>>>,
    /// Slices given to this transport that have not ended, and exchanges that outlive theirs.
    running: AtomicUsize,
    attendance: Attendance,
    clock_sleeps: AtomicBool,
    idle_ticks: AtomicUsize,
    accepting_paused: AtomicBool,
    acceptor: OnceLock<Weak<Acceptor>>,
    closing: OnceLock<Error>,
}

impl Shared {
    fn closing(&self) -> Option<Error> {
        self.closing.get().cloned()
    }

    fn loop_for(&self, number: usize) -> &Arc<IoLoop> {
        &self.loops[number % self.loops.len()]
    }

    fn next_loop(&self) -> &Arc<IoLoop> {
        self.loop_for(self.next_loop.fetch_add(1, Ordering::Relaxed))
    }

    fn add_running(&self, count: usize) {
        self.running.fetch_add(count, Ordering::SeqCst);
        self.start_clock();
    }

    fn end_running(&self, count: usize) {
        if count > 0 {
            self.running.fetch_sub(count, Ordering::SeqCst);
        }
    }

    fn start_clock(&self) {
        // What it is started for may be over before it looks, and leave something to be tidied up.
        if self.idle_ticks.load(Ordering::Relaxed) != 0 {
            self.idle_ticks.store(0, Ordering::SeqCst);
        }
        if self.clock_sleeps.load(Ordering::SeqCst) && self.clock_sleeps.swap(false, Ordering::SeqCst) {
            self.loops[0].wake();
        }
    }

    /// Whether something waits for time to pass. Whoever makes it true calls [`Shared::start_clock`] afterwards.
    fn needs_clock(&self) -> bool {
        self.running.load(Ordering::SeqCst) > 0
            || self.accepting_paused.load(Ordering::SeqCst)
            || !self.attendance.is_empty()
            || !self.lingering.lock().is_empty()
            || !self.retired.lock().is_empty()
    }

    fn pause_accepting(&self) {
        self.accepting_paused.store(true, Ordering::SeqCst);
        self.start_clock();
    }

    fn forget(&self, segment: u64) {
        let peer = {
            let mut peers = self.peers.write();
            let peer = peers.remove(&segment);
            // With the lock: whoever goes through all peers finds it in one of the lists.
            self.retired.lock().extend(peer.clone());
            peer
        };
        if let Some(peer) = peer {
            peer.retire();
            self.start_clock();
        }
    }

    fn linger(&self, connection: usize) {
        self.lingering.lock().push(connection);
        self.start_clock();
    }

    /// Counts a refused request and logs it, less and less often: a peer must not fill the log.
    fn complain(&self, text: std::fmt::Arguments<'_>) {
        self.counters.requests_refused.add(1);
        let number = self.counters.requests_refused.get();
        if number <= 10 || number.is_power_of_two() {
            tracing::warn!("{text} (refusal number {number})");
        }
    }

    fn all_peers(&self) -> Vec<Arc<Peer>> {
        let mut peers: Vec<_> = self.peers.read().values().cloned().collect();
        peers.extend(self.retired.lock().iter().cloned());
        peers
    }
}

impl Clock for Shared {
    fn tick(&self) -> Option<Duration> {
        let now = Instant::now();
        self.attendance.expire();
        for peer in self.all_peers() {
            if peer.is_forgotten() {
                self.forget(peer.id());
            }
            peer.expire(now);
        }
        let lingering = std::mem::take(&mut *self.lingering.lock());
        let mut left = Vec::new();
        for key in lingering {
            let connection = self.connections.lock().get(&key).cloned();
            if connection.is_some_and(|connection| !connection.end_linger(now)) {
                left.push(key);
            }
        }
        self.lingering.lock().extend(left);
        let retired = self.retired.lock().clone();
        retired.iter().for_each(|peer| peer.retire());
        drop(retired);
        // Whoever works for a retired peer, such as its lanes, holds it.
        self.retired.lock().retain(|peer| Arc::strong_count(peer) > 1);
        if self.accepting_paused.load(Ordering::SeqCst)
            && self.closing.get().is_none()
            && let Some(acceptor) = self.acceptor.get().and_then(Weak::upgrade)
        {
            self.accepting_paused.store(false, Ordering::SeqCst);
            acceptor.resume();
        }
        if self.needs_clock() {
            self.idle_ticks.store(0, Ordering::SeqCst);
            return Some(TICK);
        }
        if self.idle_ticks.fetch_add(1, Ordering::SeqCst) < IDLE_TICKS {
            return Some(IDLE_TICK);
        }
        self.clock_sleeps.store(true, Ordering::SeqCst);
        // What came before the flag was seen must not wait for the next.
        let has_started = self.needs_clock() || self.idle_ticks.load(Ordering::SeqCst) == 0;
        if has_started && self.clock_sleeps.swap(false, Ordering::SeqCst) {
            return Some(TICK);
        }
        None
    }
}

/// The transport named `tcp`.
pub struct TcpTransport {
    shared: Arc<Shared>,
    acceptor: Arc<Acceptor>,
    port: u16,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl TcpTransport {
    /// Starts the I/O threads and serves `listener`. `watchers` is read: see [`Transport::watch`].
    ///
    /// Fails when the process has no descriptor or thread left.
    pub fn start(
        listener: TcpListener,
        registry: Arc<Registry>,
        counters: Arc<Counters>,
        watchers: Arc<Watchers>,
        config: &Config,
    ) -> Result<Arc<TcpTransport>> {
        let limit = |what: &str, error: std::io::Error| {
            Error::new(Code::Limit, format!("cannot start the TCP transport: {what}: {error}; check ulimit -n and ulimit -u"))
        };
        listener.set_nonblocking(true).map_err(|error| limit("the listener", error))?;
        let port = listener.local_addr().map_err(|error| limit("no local address", error))?.port();
        let mut loops = Vec::new();
        for _ in 0..config.tcp_io_threads.max(1) {
            loops.push(IoLoop::new().map_err(|error| limit("no event descriptor", error))?);
        }
        let shared = Arc::new(Shared {
            registry,
            counters,
            settings: Settings {
                lanes_per_peer: config.tcp_lanes_per_peer.max(1),
                connect_timeout: config.handshake_connect_timeout,
                force_v1: config.tcp_force_v1,
            },
            background: Background::new("te-tcp-find"),
            loops,
            next_loop: AtomicUsize::new(0),
            connections: Mutex::default(),
            lingering: Mutex::default(),
            peers: RwLock::default(),
            retired: Mutex::default(),
            running: AtomicUsize::new(0),
            attendance: Attendance::new(watchers),
            clock_sleeps: AtomicBool::new(false),
            idle_ticks: AtomicUsize::new(IDLE_TICKS),
            accepting_paused: AtomicBool::new(false),
            acceptor: OnceLock::new(),
            closing: OnceLock::new(),
        });
        let acceptor =
            Acceptor::start(&shared, listener, &shared.loops[0]).map_err(|error| limit("cannot wait for peers", error))?;
        shared.acceptor.get_or_init(|| Arc::downgrade(&acceptor));
        let transport = TcpTransport { shared, acceptor, port, threads: Mutex::default() };
        for (number, io_loop) in transport.shared.loops.iter().enumerate() {
            let (io_loop, shared) = (io_loop.clone(), transport.shared.clone());
            let run = move || io_loop.run((number == 0).then_some(&*shared as &dyn Clock));
            match thread::spawn(format!("te-tcp-{number}"), run) {
                Ok(thread) => transport.threads.lock().push(thread),
                Err(error) => return Err(limit("no thread", error)),
            }
        }
        Ok(Arc::new(transport))
    }

    /// The port that peers connect to.
    pub fn port(&self) -> u16 {
        self.port
    }

    fn peer(&self, segment: &Arc<dyn Segment>) -> Arc<Peer> {
        if let Some(peer) = self.shared.peers.read().get(&segment.id()) {
            return peer.clone();
        }
        let mut peers = self.shared.peers.write();
        if self.shared.closing.get().is_some() {
            // Nobody would take it from the list.
            return Peer::new(self.shared.clone(), segment.clone());
        }
        peers.entry(segment.id()).or_insert_with(|| Peer::new(self.shared.clone(), segment.clone())).clone()
    }

    fn abandon(&self, matches: &dyn Fn(&Slice) -> bool, error: &dyn Fn(&Slice) -> Error) {
        for peer in self.shared.all_peers() {
            peer.abandon(matches, error);
        }
    }
}

impl Transport for TcpTransport {
    fn protocol(&self) -> &'static str {
        "tcp"
    }

    fn submit(&self, segment: &Arc<dyn Segment>, slices: Slices) {
        self.shared.add_running(slices.pieces.len());
        self.peer(segment).submit(slices);
    }

    fn cancel(&self) {
        let error = Error::quiet(Code::Canceled, "cancelled by the caller");
        self.abandon(&|slice| slice.completion.is_cancelled(), &|_| error.clone());
    }

    fn evict(&self, range: MemoryRange) {
        let error = |slice: &Slice| {
            let (address, length) = (slice.local.address(), slice.local.length());
            Error::quiet(Code::Canceled, format!("local memory [{address:#x}, +{length}) was unregistered during the transfer"))
        };
        self.abandon(&|slice| slice.local.intersects(&range), &error);
        let connections: Vec<_> = self.shared.connections.lock().values().cloned().collect();
        for connection in connections {
            connection.evict(Some(range));
        }
    }

    fn poll(&self) {
        self.shared.attendance.poll();
    }

    fn watch(&self) {
        self.shared.attendance.end();
    }

    fn forget(&self, segment: u64) {
        self.shared.forget(segment);
    }

    fn shutdown(&self, reason: Error) {
        self.shared.closing.get_or_init(|| reason.clone());
        self.acceptor.stop();
        self.shared.background.close();
        for peer in self.shared.all_peers() {
            peer.close(&reason);
        }
        let connections: Vec<_> = self.shared.connections.lock().values().cloned().collect();
        for connection in connections {
            connection.evict(None);
        }
        for io_loop in &self.shared.loops {
            io_loop.stop();
        }
        for thread in std::mem::take(&mut *self.threads.lock()) {
            // The last reference may be dropped by one of the threads themselves.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
        // Lanes and connections that were made while the others were closed.
        for peer in self.shared.all_peers() {
            peer.close(&reason);
        }
        self.shared.peers.write().clear();
        self.shared.retired.lock().clear();
        let connections: Vec<_> = self.shared.connections.lock().drain().map(|(_, connection)| connection).collect();
        for connection in connections {
            connection.evict(None);
        }
    }
}

impl Drop for TcpTransport {
    fn drop(&mut self) {
        self.shutdown(Error::quiet(Code::Canceled, "the transport was dropped"));
    }
}
