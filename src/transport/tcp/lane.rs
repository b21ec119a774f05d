//! Lanes: the persistent connections of the submitting side.
//!
//! A lane carries exchanges (request and reply) in order, as many at once as are queued: requests are sent without waiting for the
//! replies before them, which a server answers one after the other. Many small requests and replies so share a system call.
//!
//! ```text
//!   queue:   [ replied … | sent, reply expected … | being sent | not started … ]
//!              popped      0 ..                     started      ..
//! ```
//!
//! Invariants:
//! * Replies belong to the front of the queue. `started` is the first exchange that is not completely sent; everything before it is.
//! * A slice that has ended leaves its exchange behind without a slice ("abandoned") when the reply is still to be consumed.
//! * Memory of a slice is touched only by system calls made under `state`, and only while its exchange holds the slice.
//!
//! Who locks what: `inbox` and `state` are leaves; neither is held while a completion or the peer is called. Whoever holds `state`
//! serves the inbox before and after: a submitter that finds `state` taken leaves its work in the inbox and goes on.
//!
//! What ends a lane, and what becomes of its exchanges: an orderly or abrupt end by the peer proves that the peer applies nothing
//! more, so its exchanges may be tried again elsewhere. A reset can destroy the refusal that caused it, so the oldest exchange without
//! a reply is suspected, started or not, and from then on travels alone; after [`ATTEMPTS`] such ends it fails. When this side ends a
//! lane that has started writes, their bytes may still land, so they fail and are not retried. A half-sent write that must end at once
//! makes the lane `Draining`: nothing more is sent, and replies are read while anybody waits for one.
//!
//! A lane whose front has not moved for as long as its slice allowed has stalled and ends, also if the slice has ended before.
//!
//! Version 1 has no status frames. A read is over when its bytes are there. A write is over when the peer has closed its side after
//! we closed ours: an orderly end says that everything was consumed, a reset that it was not. So such a lane serves one exchange.
//!
//! Cost of one small exchange: one `sendmsg` on the submitter's thread, one `epoll_wait` and one `recvmsg` on the lane's I/O thread.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use socket2::{Domain, Protocol, Socket, Type};

use super::attendance;
use super::io_loop::{IoLoop, Source};
use super::peer::Peer;
use super::wire::{self, HEADER_LENGTH, Header, STATUS_LENGTH, Version};
use crate::error::{Code, Error, Result};
use crate::sys::MemoryRange;
use crate::sys::epoll::Interest;
use crate::sys::socket::{self, Gather, Scatter};
use crate::transport::{Opcode, Slice};

/// Bytes that a submitter sends itself before it leaves the rest to the I/O thread.
const INLINE_BYTES: u64 = 256 << 10;

/// Bytes that an I/O thread moves on one lane before it looks at the others.
const TURN_BYTES: u64 = 4 << 20;

/// Bytes of an abandoned reply that are worth reading to keep the connection.
const DISCARD_BYTES: u64 = 1 << 20;

/// How often an exchange is tried on connections that the peer ended.
pub(super) const ATTEMPTS: u8 = 3;

/// Room that a queue keeps when it is empty.
const KEPT_ROOM: usize = 1024;

/// Gives back what a large batch has left behind.
pub(super) fn release_if_empty<T>(queue: &mut VecDeque<T>) {
    if queue.is_empty() && queue.capacity() > KEPT_ROOM {
        *queue = VecDeque::new();
    }
}

/// A slice on its way, with what was tried for it.
pub(super) struct Work {
    pub slice: Slice,
    /// Connections that the peer ended under it.
    pub attempts: u8,
    /// The peer has refused it and its fresh descriptor was looked at.
    pub examined: bool,
    /// When it was given to the transport.
    pub since: Instant,
}

impl Work {
    /// When it gives up although its connection, if any, last moved at `progress`.
    pub fn expires(&self, progress: Option<Instant>) -> Instant {
        let stall = self.since.max(progress.unwrap_or(self.since)) + self.slice.deadline.stall;
        self.slice.deadline.absolute.map_or(stall, |absolute| absolute.min(stall))
    }

    /// Whether the caller has cancelled it. Asked when it enters a queue: whoever cancels sets the flag before looking through the
    /// queues, so work that is on its way from one to the other is found here.
    pub fn is_cancelled(&self) -> bool {
        self.slice.completion.is_cancelled()
    }
}

/// One request and its reply.
struct Exchange {
    /// `None`: abandoned.
    work: Option<Work>,
    /// That of the slice.
    stall: Duration,
    opcode: Opcode,
    length: u64,
    header: [u8; HEADER_LENGTH],
    /// Bytes sent of header and, for a write, body.
    sent: u64,
    status: [u8; STATUS_LENGTH],
    /// Bytes received of status and, for a read, body.
    received: u64,
}

impl Exchange {
    fn new(work: Work, version: Version) -> Exchange {
        let slice = &work.slice;
        let header = Header { length: slice.local.length(), address: slice.remote_address, opcode: slice.opcode, version };
        Exchange {
            stall: slice.deadline.stall,
            opcode: slice.opcode,
            length: slice.local.length(),
            header: header.encode(),
            work: Some(work),
            sent: 0,
            status: [0; STATUS_LENGTH],
            received: 0,
        }
    }

    fn request_length(&self) -> u64 {
        HEADER_LENGTH as u64 + if self.opcode == Opcode::Write { self.length } else { 0 }
    }

    /// Whether a connection has ended under it before: then it travels alone, so that only its own fault can end the next one.
    fn is_suspect(&self) -> bool {
        self.work.as_ref().is_some_and(|work| work.attempts > 0)
    }

    fn is_sent(&self) -> bool {
        self.sent == self.request_length()
    }

    /// What is to be sent of the body, unless the exchange is abandoned.
    fn body_to_send(&self) -> Option<MemoryRange> {
        let done = self.sent.saturating_sub(HEADER_LENGTH as u64);
        self.work.as_ref()?.slice.local.part(done, self.length - done)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Connecting,
    Open,
    /// Our side is closed; replies are read until the peer closes its own.
    Draining,
    Closed,
}

struct State {
    phase: Phase,
    queue: VecDeque<Exchange>,
    started: usize,
    /// What the I/O thread is told of.
    interest: Interest,
    /// Callers that poll receive the replies; see [`super::attendance`].
    attended: bool,
    /// Our side of a version 1 lane is closed: its write is completely sent.
    half_closed: bool,
    /// When the front of the queue moved last, or got there. Bytes sent for what is behind it are no sign of life: the kernel takes
    /// them for a while whether or not the peer lives.
    progress: Instant,
}

struct Inbox {
    open: bool,
    works: Vec<Work>,
}

/// What a pass over a lane leads to, applied when its locks are released.
#[derive(Default)]
pub(super) struct Effects {
    finished: Vec<(Work, Result<()>)>,
    /// Exchanges that have left the lane for good.
    ended: usize,
    refused: Vec<Work>,
    returned: Vec<Work>,
    connected: bool,
    closed: bool,
    loss: Option<Loss>,
}

/// How a lane was lost, as far as the peer has to know.
pub(super) enum Loss {
    /// No connection.
    Unconnected(io::Error),
    /// The peer ended it, or talked nonsense, under an exchange that was tried for this many times.
    Broken(u8),
}

/// A connection to a peer's data port.
pub(super) struct Lane {
    this: Weak<Lane>,
    peer: Arc<Peer>,
    io_loop: Arc<IoLoop>,
    token: OnceLock<u64>,
    number: usize,
    address: SocketAddr,
    version: Version,
    socket: Socket,
    /// Bytes queued and not ended, plus one for each exchange: what the peer balances lanes by.
    load: AtomicU64,
    /// Whether work may be pushed; a hint, the truth is in `inbox`.
    accepting: AtomicBool,
    connected: AtomicBool,
    inbox: Mutex<Inbox>,
    state: Mutex<State>,
}

impl Lane {
    /// Begins to connect; work may be pushed at once.
    pub fn open(
        peer: &Arc<Peer>,
        io_loop: &Arc<IoLoop>,
        number: usize,
        address: SocketAddr,
        version: Version,
    ) -> io::Result<Arc<Lane>> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking().cloexec(), Some(Protocol::TCP))?;
        socket.set_tcp_nodelay(true)?;
        socket.set_keepalive(true)?;
        match socket.connect(&address.into()) {
            Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => return Err(error),
            _ => {}
        }
        let lane = Arc::new_cyclic(|this| Lane {
            this: this.clone(),
            peer: peer.clone(),
            io_loop: io_loop.clone(),
            token: OnceLock::new(),
            number,
            address,
            version,
            socket,
            load: AtomicU64::new(0),
            accepting: AtomicBool::new(true),
            connected: AtomicBool::new(false),
            inbox: Mutex::new(Inbox { open: true, works: Vec::new() }),
            state: Mutex::new(State {
                phase: Phase::Connecting,
                queue: VecDeque::new(),
                started: 0,
                interest: Interest::READ_WRITE,
                attended: false,
                half_closed: false,
                progress: Instant::now(),
            }),
        });
        // Under the lock, so that an event cannot be served before the token is known.
        let state = lane.state.lock();
        let token = io_loop.add(Source::Lane(lane.clone()), &lane.socket, Interest::READ_WRITE)?;
        lane.token.get_or_init(|| token);
        drop(state);
        Ok(lane)
    }

    pub fn load(&self) -> u64 {
        self.load.load(Ordering::Relaxed)
    }

    /// Whether it takes work; it may stop doing so at any time.
    pub fn is_accepting(&self) -> bool {
        self.accepting.load(Ordering::Relaxed)
    }

    /// Whether it was connected at some time.
    pub fn is_connected(&self) -> bool {
        self.connected.load(Ordering::Relaxed)
    }

    /// Has the peer give it no more work; see [`Lane::leave`].
    pub fn refuse(&self) {
        self.accepting.store(false, Ordering::Relaxed);
    }

    /// How many lanes the peer had opened before.
    pub fn number(&self) -> usize {
        self.number
    }

    /// Where it connects to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Counts work that is about to be pushed.
    pub fn reserve(&self, work: &Work) {
        self.load.fetch_add(work.slice.local.length() + 1, Ordering::Relaxed);
    }

    fn unload(&self, length: u64) {
        self.load.fetch_sub(length + 1, Ordering::Relaxed);
    }

    /// Takes work, which [`Lane::reserve`] has counted. Given back if the lane has ended.
    pub fn push(&self, works: Vec<Work>) -> std::result::Result<(), Vec<Work>> {
        {
            let mut inbox = self.inbox.lock();
            if !inbox.open {
                return Err(works);
            }
            if inbox.works.is_empty() {
                inbox.works = works;
            } else {
                inbox.works.extend(works);
            }
        }
        self.settle();
        Ok(())
    }

    /// Sends what is queued, and what was left in the inbox while `state` was taken. Whoever releases `state` comes through here or
    /// looks into the inbox itself.
    fn settle(&self) {
        while let Some(mut state) = self.state.try_lock() {
            let mut effects = Effects::default();
            self.send(&mut state, INLINE_BYTES, &mut effects);
            drop(state);
            self.apply(effects);
            if self.inbox.lock().works.is_empty() {
                break;
            }
        }
    }

    /// Serves an event; called by the I/O thread.
    pub fn serve(&self, readable: bool, writable: bool) {
        let mut readable = readable;
        loop {
            let mut effects = Effects::default();
            let mut state = self.state.lock();
            if state.phase == Phase::Connecting && writable {
                self.finish_connecting(&mut state, &mut effects);
            }
            if readable && matches!(state.phase, Phase::Open | Phase::Draining) {
                self.receive(&mut state, &mut effects);
            }
            self.send(&mut state, TURN_BYTES, &mut effects);
            drop(state);
            self.apply(effects);
            if self.inbox.lock().works.is_empty() {
                return;
            }
            readable = false;
        }
    }

    /// Ends what has waited too long. `connect_limit` bounds connecting. Returns when the front of the queue moved last.
    pub fn expire(&self, now: Instant, connect_limit: Duration) -> Instant {
        let mut effects = Effects::default();
        let mut state = self.state.lock();
        self.take_inbox(&mut state, &mut effects);
        let progress = state.progress;
        match state.phase {
            Phase::Closed => {}
            Phase::Connecting if now > progress + connect_limit => {
                self.close(&mut state, Ended::Connecting(io::ErrorKind::TimedOut.into()), &mut effects);
            }
            Phase::Draining if now > progress + DRAIN_LIMIT => {
                let error = || Error::quiet(Code::Socket, format!("{}: the connection did not end in time", self.peer));
                self.close(&mut state, Ended::Here(&error), &mut effects);
            }
            _ => {
                let waited = |work: &Work| work.expires(Some(progress)) <= now;
                // When the front has stalled, so has the connection: nothing on it can be waited for.
                let stalled = |exchange: &Exchange| progress + exchange.stall <= now && exchange.work.as_ref().is_none_or(waited);
                if state.queue.front().is_some_and(stalled) {
                    self.expire_queue(&mut state, &waited, &mut effects);
                } else {
                    let error = |work: &Work| self.peer.timed_out(&work.slice);
                    self.abandon_matching(&mut state, &waited, &error, &mut effects);
                }
            }
        }
        drop(state);
        self.apply(effects);
        self.settle();
        progress
    }

    /// Ends the slices that match. Their memory is not touched after this returns.
    pub fn abandon(&self, matches: &dyn Fn(&Slice) -> bool, error: &dyn Fn(&Slice) -> Error) {
        let mut effects = Effects::default();
        let mut state = self.state.lock();
        self.take_inbox(&mut state, &mut effects);
        self.abandon_matching(&mut state, &|work| matches(&work.slice), &|work| error(&work.slice), &mut effects);
        drop(state);
        self.apply(effects);
        self.settle();
    }

    /// Ends the lane and all its slices.
    pub fn fail(&self, error: &Error) {
        let mut effects = Effects::default();
        let mut state = self.state.lock();
        self.take_inbox(&mut state, &mut effects);
        for exchange in &mut state.queue {
            effects.finished.extend(exchange.work.take().map(|work| (work, Err(error.clone()))));
        }
        self.close(&mut state, Ended::Here(&|| error.clone()), &mut effects);
        drop(state);
        self.apply(effects);
        self.settle();
    }

    /// Ends the lane if nothing is queued on it.
    pub fn close_if_idle(&self) -> bool {
        let mut effects = Effects::default();
        let mut state = self.state.lock();
        let idle = state.queue.is_empty() && self.inbox.lock().works.is_empty();
        if idle {
            self.close(&mut state, Ended::Unused, &mut effects);
        }
        drop(state);
        self.apply(effects);
        self.settle();
        idle
    }

    fn status_length(&self) -> u64 {
        if self.version == Version::V2 { STATUS_LENGTH as u64 } else { 0 }
    }

    /// Takes no more work, returns what is not started, and ends with what is: the peer is to be found elsewhere.
    pub fn leave(&self) {
        let mut effects = Effects::default();
        let mut state = self.state.lock();
        self.refuse_work(&mut state, &mut effects);
        self.return_unsent(&mut state, &mut effects);
        drop(state);
        self.apply(effects);
        self.settle();
    }

    fn take_inbox(&self, state: &mut State, effects: &mut Effects) {
        let works = std::mem::take(&mut self.inbox.lock().works);
        if state.queue.is_empty() && !works.is_empty() && state.phase == Phase::Open {
            state.progress = Instant::now();
        }
        for work in works {
            if work.is_cancelled() {
                self.unload(work.slice.local.length());
                effects.ended += 1;
                effects.finished.push((work, Err(cancelled())));
            } else {
                state.queue.push_back(Exchange::new(work, self.version));
            }
        }
    }

    fn finish_connecting(&self, state: &mut State, effects: &mut Effects) {
        let outcome = match self.socket.take_error() {
            Ok(Some(error)) | Err(error) => Err(error),
            // A port that nobody listens on may connect to itself when the system gives it out as the source.
            Ok(None) => match is_connected_to_itself(&self.socket) {
                true => Err(io::ErrorKind::ConnectionRefused.into()),
                false => Ok(()),
            },
        };
        match outcome {
            Ok(()) => {
                state.phase = Phase::Open;
                state.progress = Instant::now();
                self.connected.store(true, Ordering::Relaxed);
                effects.connected = true;
            }
            Err(error) => self.close(state, Ended::Connecting(error), effects),
        }
    }

    fn send(&self, state: &mut State, limit: u64, effects: &mut Effects) {
        self.take_inbox(state, effects);
        let mut budget = limit;
        let mut blocked = false;
        let mut most = usize::MAX;
        while state.phase == Phase::Open && state.started < state.queue.len() {
            if budget == 0 {
                blocked = true;
                break;
            }
            let mut gather = Gather::default();
            let mut gathered = 0;
            let alone = state.queue[0].is_suspect();
            if alone && state.started > 0 {
                break;
            }
            for (position, exchange) in state.queue.iter().enumerate().skip(state.started).take(most) {
                if gather.is_full() || gather.length() >= budget || position > 0 && (alone || exchange.is_suspect()) {
                    break;
                }
                gathered += 1;
                if exchange.sent < HEADER_LENGTH as u64 {
                    gather.push_bytes(&exchange.header[exchange.sent as usize..]);
                }
                if exchange.opcode == Opcode::Write {
                    match exchange.body_to_send() {
                        Some(body) if !gather.is_full() => gather.push_memory(body),
                        _ => break,
                    }
                }
            }
            let length = gather.length();
            if length == 0 {
                break;
            }
            match gather.send(&self.socket) {
                Ok(sent) => {
                    self.advance_sent(state, sent);
                    budget = budget.saturating_sub(sent);
                    blocked = sent < length;
                    if blocked {
                        break;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    blocked = true;
                    break;
                }
                // The kernel does not say which piece it could not read: one exchange at a time will.
                Err(error) if error.raw_os_error() == Some(libc::EFAULT) && gathered > 1 => most = 1,
                Err(error) if error.raw_os_error() == Some(libc::EFAULT) => self.fault_in_body(state, effects),
                Err(error) => self.broken(state, error, effects),
            }
        }
        let is_sent_write = |exchange: &Exchange| exchange.opcode == Opcode::Write && exchange.is_sent();
        if state.phase == Phase::Open
            && self.version == Version::V1
            && !state.half_closed
            && state.queue.front().is_some_and(is_sent_write)
        {
            // No status will come; the peer's own end is the answer. If the connection is gone, reading would answer with a clean end.
            // Once only: when the peer has closed its side, too, a second time fails.
            state.half_closed = true;
            if let Err(error) = self.socket.shutdown(std::net::Shutdown::Write) {
                self.close(state, Ended::ByPeer(error.to_string()), effects);
            }
        }
        self.end_if_done(state, effects);
        if matches!(state.phase, Phase::Open | Phase::Draining) {
            self.attend_or_not(state);
            let interest = match (state.attended, blocked) {
                (false, false) => Interest::READ,
                (false, true) => Interest::READ_WRITE,
                (true, false) => Interest::NONE,
                (true, true) => Interest::WRITE,
            };
            if interest != state.interest {
                match self.io_loop.modify(&self.socket, interest, self.token.get().copied()) {
                    Ok(()) => state.interest = interest,
                    Err(error) => self.broken(state, error, effects),
                }
            }
        }
    }

    /// Decides who receives the replies.
    fn attend_or_not(&self, state: &mut State) {
        let attendance = self.peer.attendance();
        let may_be = state.phase == Phase::Open && self.version == Version::V2 && self.load() <= attendance::MOST_BYTES;
        if state.attended && !may_be {
            state.attended = false;
            attendance.leave(self);
        } else if !state.attended
            && may_be
            && !state.queue.is_empty()
            && attendance.is_open()
            && let Some(lane) = self.this.upgrade()
        {
            state.attended = attendance.enter(&lane);
        }
    }

    /// Receives what has arrived on an attended lane; called by whoever polls.
    pub fn poll(&self) {
        if self.load() == 0 {
            return;
        }
        let Some(mut state) = self.state.try_lock() else { return };
        if !state.attended || state.queue.is_empty() {
            return;
        }
        let mut effects = Effects::default();
        self.receive(&mut state, &mut effects);
        self.send(&mut state, INLINE_BYTES, &mut effects);
        drop(state);
        self.apply(effects);
        if !self.inbox.lock().works.is_empty() {
            self.settle();
        }
    }

    /// Has the I/O thread receive again.
    pub fn end_attendance(&self) {
        let mut effects = Effects::default();
        let mut state = self.state.lock();
        if state.attended {
            state.attended = false;
            self.peer.attendance().leave(self);
            let interest = if state.interest == Interest::WRITE { Interest::READ_WRITE } else { Interest::READ };
            match self.io_loop.modify(&self.socket, interest, self.token.get().copied()) {
                Ok(()) => state.interest = interest,
                Err(error) => self.broken(&mut state, error, &mut effects),
            }
        }
        drop(state);
        self.apply(effects);
        if !self.inbox.lock().works.is_empty() {
            self.settle();
        }
    }

    /// Ends a lane that takes no more work when nothing on it is waited for.
    fn end_if_done(&self, state: &mut State, effects: &mut Effects) {
        match state.phase {
            Phase::Draining if state.queue.iter().all(|exchange| exchange.work.is_none()) => {
                self.close(state, Ended::Here(&cancelled), effects);
            }
            Phase::Connecting | Phase::Open if !self.is_accepting() && state.queue.is_empty() => {
                self.close(state, Ended::Unused, effects);
            }
            _ => {}
        }
    }

    /// A system call has failed.
    fn broken(&self, state: &mut State, error: io::Error, effects: &mut Effects) {
        match error.raw_os_error() {
            Some(libc::ECONNRESET | libc::EPIPE) => self.close(state, Ended::ByPeer(error.to_string()), effects),
            // The connection was given up on this side, as after a time-out: the peer may live, and apply what it has received.
            _ => self.close(state, Ended::Lost(error.to_string()), effects),
        }
    }

    fn advance_sent(&self, state: &mut State, mut sent: u64) {
        if state.started == 0 {
            state.progress = Instant::now();
        }
        while sent > 0 {
            let exchange = &mut state.queue[state.started];
            let step = sent.min(exchange.request_length() - exchange.sent);
            exchange.sent += step;
            sent -= step;
            if exchange.is_sent() {
                state.started += 1;
            }
        }
    }

    /// The kernel could not read the memory of the slice that is being sent.
    fn fault_in_body(&self, state: &mut State, effects: &mut Effects) {
        let exchange = &mut state.queue[state.started];
        if let Some(work) = exchange.work.take() {
            let error = memory_fault(&work.slice, "read");
            effects.finished.push((work, Err(error)));
        }
        if exchange.sent > 0 {
            return self.drain(state, effects);
        }
        let length = exchange.length;
        state.queue.remove(state.started);
        self.unload(length);
        effects.ended += 1;
    }

    /// Sends no more, and reads what is still to come until the peer closes.
    fn drain(&self, state: &mut State, effects: &mut Effects) {
        if state.phase != Phase::Open {
            return;
        }
        state.phase = Phase::Draining;
        state.progress = Instant::now();
        self.refuse_work(state, effects);
        self.return_unsent(state, effects);
        let _ = self.socket.shutdown(std::net::Shutdown::Write);
        self.end_if_done(state, effects);
    }

    fn refuse_work(&self, state: &mut State, effects: &mut Effects) {
        self.accepting.store(false, Ordering::Relaxed);
        self.inbox.lock().open = false;
        self.take_inbox(state, effects);
    }

    fn return_unsent(&self, state: &mut State, effects: &mut Effects) {
        let unsent = state.queue.iter().position(|exchange| exchange.sent == 0).unwrap_or(state.queue.len());
        for exchange in state.queue.drain(unsent..) {
            self.unload(exchange.length);
            effects.returned.extend(exchange.work);
        }
    }

    fn receive(&self, state: &mut State, effects: &mut Effects) {
        let mut budget = TURN_BYTES;
        let mut most = usize::MAX;
        while budget > 0 && matches!(state.phase, Phase::Open | Phase::Draining) {
            let status_length = self.status_length();
            let mut scatter = Scatter::default();
            let mut discard = 0;
            for (position, exchange) in state.queue.iter_mut().enumerate() {
                if scatter.is_full() || scatter.pieces() >= most || exchange.sent < HEADER_LENGTH as u64 {
                    break;
                }
                if exchange.received < status_length {
                    scatter.push_buffer(&mut exchange.status[exchange.received as usize..]);
                    if scatter.pieces() >= most {
                        break;
                    }
                }
                if exchange.opcode == Opcode::Read {
                    let done = exchange.received.saturating_sub(status_length);
                    match &exchange.work {
                        Some(work) => match work.slice.local.part(done, exchange.length - done) {
                            Some(body) if !scatter.is_full() => scatter.push_memory(body),
                            _ => break,
                        },
                        None => {
                            if position == 0 && exchange.received >= status_length {
                                discard = exchange.length - done;
                            }
                            break;
                        }
                    }
                }
            }
            let length = if discard > 0 { discard.min(TURN_BYTES) } else { scatter.length() };
            let received = if discard > 0 {
                socket::discard(&self.socket, length as usize).map(|bytes| bytes as u64)
            } else if length > 0 {
                scatter.receive(&self.socket)
            } else {
                // Nothing is expected but, perhaps, the end.
                match socket::peek(&self.socket, &mut [0]) {
                    Ok(0) => Ok(0),
                    Ok(_) => {
                        let reason = "it sent bytes that nobody asked for".to_string();
                        return self.close(state, Ended::Lost(reason), effects);
                    }
                    Err(error) => Err(error),
                }
            };
            match received {
                Ok(0) => return self.end_of_stream(state, effects),
                Ok(received) => {
                    state.progress = Instant::now();
                    budget = budget.saturating_sub(received);
                    self.advance_received(state, received, effects);
                    if received < length {
                        return;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // The kernel does not say which piece it could not write: one piece at a time will.
                Err(error) if error.raw_os_error() == Some(libc::EFAULT) && most > 1 => most = 1,
                Err(error) if error.raw_os_error() == Some(libc::EFAULT) => self.fault_in_reply(state, effects),
                Err(error) => return self.broken(state, error, effects),
            }
            if state.queue.is_empty() && state.phase == Phase::Open {
                return;
            }
        }
    }

    fn advance_received(&self, state: &mut State, mut received: u64, effects: &mut Effects) {
        let status_length = self.status_length();
        while received > 0 {
            let Some(exchange) = state.queue.front_mut() else { return };
            if exchange.received < status_length {
                let step = received.min(status_length - exchange.received);
                exchange.received += step;
                received -= step;
                if exchange.received < status_length {
                    return;
                }
                match wire::decode_status(&exchange.status) {
                    Some(wire::STATUS_OK) if exchange.opcode == Opcode::Read || exchange.is_sent() => {}
                    Some(wire::STATUS_REJECTED) => return self.refused(state, effects),
                    other => {
                        let reason = match other {
                            Some(wire::STATUS_OK) => "it acknowledged a write before it could have received it".into(),
                            Some(code) => format!("it answered with status {code}, which this version does not know"),
                            None => "it answered with something else than a status frame".into(),
                        };
                        return self.close(state, Ended::Lost(reason), effects);
                    }
                }
            }
            let reply_length = status_length + if exchange.opcode == Opcode::Read { exchange.length } else { 0 };
            let step = received.min(reply_length - exchange.received);
            exchange.received += step;
            received -= step;
            if exchange.received < reply_length {
                return;
            }
            self.pop_front(state, effects);
            if self.version == Version::V1 {
                return self.close(state, Ended::ByPeer("one exchange is all".into()), effects);
            }
        }
    }

    /// The exchange at the front has succeeded.
    fn pop_front(&self, state: &mut State, effects: &mut Effects) {
        if let Some(exchange) = state.queue.pop_front() {
            self.unload(exchange.length);
            effects.ended += 1;
            effects.finished.extend(exchange.work.map(|work| (work, Ok(()))));
            state.started = state.started.saturating_sub(1);
            release_if_empty(&mut state.queue);
        }
    }

    /// The peer has refused the range of the exchange at the front and stopped reading: nothing behind it was looked at.
    fn refused(&self, state: &mut State, effects: &mut Effects) {
        if let Some(exchange) = state.queue.pop_front() {
            self.unload(exchange.length);
            match exchange.work {
                Some(work) => effects.refused.push(work),
                None => effects.ended += 1,
            }
        }
        self.close(state, Ended::Refused, effects);
    }

    fn fault_in_reply(&self, state: &mut State, effects: &mut Effects) {
        let Some(exchange) = state.queue.front_mut() else { return };
        if let Some(work) = exchange.work.take() {
            let error = memory_fault(&work.slice, "written");
            effects.finished.push((work, Err(error)));
        }
    }

    fn end_of_stream(&self, state: &mut State, effects: &mut Effects) {
        // What had arrived was read, or a reset would have come; what has not arrived is not acknowledged, but for our own end of the
        // stream, which need not have arrived.
        if state.half_closed && state.phase == Phase::Open && socket::unacknowledged(&self.socket).is_ok_and(|bytes| bytes <= 1) {
            self.pop_front(state, effects);
        }
        self.close(state, Ended::ByPeer("it closed the connection".into()), effects);
    }

    fn expire_queue(&self, state: &mut State, waited: &dyn Fn(&Work) -> bool, effects: &mut Effects) {
        for exchange in &mut state.queue {
            if exchange.work.as_ref().is_some_and(waited) {
                effects.finished.extend(exchange.work.take().map(|work| {
                    let error = self.peer.timed_out(&work.slice);
                    (work, Err(error))
                }));
            }
        }
        let error = || Error::quiet(Code::Socket, format!("{}: the connection stalled and was closed", self.peer));
        self.close(state, Ended::Here(&error), effects);
    }

    fn abandon_matching(
        &self,
        state: &mut State,
        matches: &dyn Fn(&Work) -> bool,
        error: &dyn Fn(&Work) -> Error,
        effects: &mut Effects,
    ) {
        if state.phase == Phase::Closed {
            return;
        }
        let mut must_drain = false;
        for exchange in &mut state.queue {
            if exchange.work.as_ref().is_some_and(matches) {
                if let Some(work) = exchange.work.take() {
                    let error = error(&work);
                    effects.finished.push((work, Err(error)));
                }
                effects.ended += usize::from(exchange.sent == 0);
                let half_sent = exchange.sent > 0 && !exchange.is_sent();
                must_drain |=
                    half_sent || (exchange.opcode == Opcode::Read && exchange.sent > 0 && exchange.length > DISCARD_BYTES);
            }
        }
        state.queue.retain(|exchange| {
            let keep = exchange.work.is_some() || exchange.sent > 0;
            if !keep {
                self.unload(exchange.length);
            }
            keep
        });
        if must_drain {
            self.drain(state, effects);
        }
    }

    fn close(&self, state: &mut State, ended: Ended<'_>, effects: &mut Effects) {
        if state.phase == Phase::Closed {
            return;
        }
        state.phase = Phase::Closed;
        if std::mem::take(&mut state.attended) {
            self.peer.attendance().leave(self);
        }
        self.refuse_work(state, effects);
        for (position, exchange) in state.queue.drain(..).enumerate() {
            self.unload(exchange.length);
            let Some(mut work) = exchange.work else {
                effects.ended += 1;
                continue;
            };
            let started = exchange.sent > 0;
            let may_land = started && exchange.opcode == Opcode::Write;
            let error = match &ended {
                Ended::Connecting(_) | Ended::Unused | Ended::Refused => None,
                Ended::Here(error) => may_land.then(error),
                Ended::ByPeer(reason) | Ended::Lost(reason) if position == 0 => {
                    work.attempts += 1;
                    let is_final = match ended {
                        Ended::Lost(_) => may_land,
                        _ => started && self.version == Version::V1,
                    };
                    let is_last = is_final || work.attempts >= ATTEMPTS;
                    effects.loss = Some(Loss::Broken(if is_last { ATTEMPTS } else { work.attempts }));
                    is_last.then(|| self.peer.broke(&work.slice, reason, self.version))
                }
                Ended::ByPeer(_) => None,
                Ended::Lost(reason) => may_land.then(|| self.peer.broke(&work.slice, reason, self.version)),
            };
            match error {
                Some(error) => {
                    effects.ended += 1;
                    effects.finished.push((work, Err(error)));
                }
                None => effects.returned.push(work),
            }
        }
        state.started = 0;
        if let Some(&token) = self.token.get() {
            self.io_loop.remove(token, &self.socket);
        }
        let _ = match ended {
            // What is still in the socket's buffer is of no use to anybody: thrown away when the last reference to this goes.
            Ended::Here(_) => self.socket.set_linger(Some(Duration::ZERO)),
            _ => self.socket.shutdown(std::net::Shutdown::Both),
        };
        effects.closed = true;
        if let Ended::Connecting(error) = ended {
            effects.loss = Some(Loss::Unconnected(error));
        }
    }

    fn apply(&self, effects: Effects) {
        if effects.connected {
            self.peer.lane_connected();
        }
        // Before slices end: what is submitted because of their end is not given to what was lost.
        if effects.closed {
            self.peer.lane_closed(self, effects.returned, effects.loss);
        } else if !effects.returned.is_empty() {
            self.peer.take_back(effects.returned);
        }
        for (work, outcome) in effects.finished {
            work.slice.finish(outcome);
        }
        self.peer.count_ended(effects.ended);
        if !effects.refused.is_empty() {
            self.peer.reexamine(effects.refused);
        }
    }
}

/// How long a draining lane waits for the peer to close.
const DRAIN_LIMIT: Duration = Duration::from_secs(2);

/// Why a lane ends.
enum Ended<'a> {
    /// It never was.
    Connecting(io::Error),
    /// Nothing is under way on it.
    Unused,
    /// The peer refused a request, after which it reads no more.
    Refused,
    /// The peer's end, after which it applies nothing more.
    ByPeer(String),
    /// The connection is of no use: the peer does not keep to the protocol, or a system call has failed. The peer may go on with what it
    /// has received.
    Lost(String),
    /// We gave up; bytes under way may still land.
    Here(&'a dyn Fn() -> Error),
}

fn is_connected_to_itself(socket: &Socket) -> bool {
    match (socket.local_addr(), socket.peer_addr()) {
        (Ok(local), Ok(peer)) => local == peer,
        _ => false,
    }
}

/// The end of a slice whose caller has cancelled it.
pub(super) fn cancelled() -> Error {
    Error::quiet(Code::Canceled, "cancelled by the caller")
}

fn memory_fault(slice: &Slice, what: &str) -> Error {
    Error::new(
        Code::Fault,
        format!(
            "local memory [{:#x}, +{}) cannot be {what}: it is not mapped, not with that access, or memory of a GPU, which this version does not support; give mapped memory and keep it mapped until the transfer has ended",
            slice.local.address(),
            slice.local.length()
        ),
    )
}

impl AsFd for Lane {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_that_has_met_itself_is_recognised() {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        socket.connect(&socket.local_addr().unwrap()).unwrap();
        assert!(is_connected_to_itself(&socket));
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let other = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(!is_connected_to_itself(&other.into()));
    }
}
