//! The serving side of data connections: peers read and write the registered memory of this process.
//!
//! A connection is served by one I/O thread; its `state` lock is contended only by [`Connection::evict`], which ends it because its
//! memory is to be released. Requests are served strictly one after the other, and replies are kept in order. Many small requests
//! that have arrived together are answered together.
//!
//! Safety of memory: a range is touched only under guards that the registry gave for exactly it, taken when the header has been read
//! and given back when the last byte has moved; and only by system calls, so that a bad page ends the connection and not the process.
//!
//! A refused request is answered with status 1, after which nothing more is read as a request: what follows is thrown away for a
//! while ([`LINGER`] from when the refusal has been sent), so that it is not destroyed by a reset before the peer has read it.
//!
//! Version 1 has no word for "refused": the end of the stream is what a peer gets that reads, and a reset if it writes, because an
//! orderly end tells a version 1 writer that its bytes were applied. So a write of version 1 that is not applied, for whatever reason,
//! always ends in a reset.
//!
//! A peer that closes its side is answered what it asked for before; then the connection ends.
//!
//! Idle connections are never closed from this side: upstream's clients keep theirs and do not notice.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use socket2::Socket;

use super::Shared;
use super::io_loop::{IoLoop, Source};
use super::wire::{self, HEADER_LENGTH, Header, STATUS_LENGTH, Version};
use crate::registry::{Access, Guards, Refusal, View};
use crate::sys::MemoryRange;
use crate::sys::epoll::Interest;
use crate::sys::memory::store_checked;
use crate::sys::socket::{self, Gather, Scatter};
use crate::transport::Opcode;

/// Headers of reads that are taken from the socket together.
const HEADERS: usize = 32;

/// Replies that are kept back while more requests can be read.
const REPLIES: usize = 64;

/// Bytes moved on one connection before the thread looks at the others.
const TURN_BYTES: u64 = 4 << 20;

/// How long and how much is thrown away after a refusal.
pub(super) const LINGER: Duration = Duration::from_secs(1);
const LINGER_BYTES: usize = 256 << 20;

/// The listening socket.
pub(super) struct Acceptor {
    shared: Weak<Shared>,
    listener: std::net::TcpListener,
    io_loop: Arc<IoLoop>,
    token: OnceLock<u64>,
    /// How often it could not accept: a lasting shortage must not fill the log.
    pauses: AtomicU64,
}

impl Acceptor {
    pub fn start(shared: &Arc<Shared>, listener: std::net::TcpListener, io_loop: &Arc<IoLoop>) -> io::Result<Arc<Acceptor>> {
        let acceptor = Arc::new(Acceptor {
            shared: Arc::downgrade(shared),
            listener,
            io_loop: io_loop.clone(),
            token: OnceLock::new(),
            pauses: AtomicU64::new(0),
        });
        let token = io_loop.add(Source::Acceptor(acceptor.clone()), &acceptor.listener, Interest::READ)?;
        acceptor.token.get_or_init(|| token);
        Ok(acceptor)
    }

    /// Takes what has connected.
    pub fn accept(&self) {
        let Some(shared) = self.shared.upgrade() else { return };
        for _ in 0..64 {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    shared.counters.connections_accepted.add(1);
                    Connection::start(&shared, stream);
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return,
                    io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted => {}
                    _ => {
                        // Out of descriptors or memory: the peer stays in the queue until the clock tries again.
                        let pauses = self.pauses.fetch_add(1, Ordering::Relaxed) + 1;
                        if pauses.is_power_of_two() {
                            tracing::warn!(
                                "cannot accept a data connection: {error}; raise the limit on open files (ulimit -n) (pause number {pauses})"
                            );
                        }
                        self.listen(Interest::NONE);
                        shared.pause_accepting();
                        return;
                    }
                },
            }
        }
    }

    /// Accepts again after a pause.
    pub fn resume(&self) {
        self.listen(Interest::READ);
    }

    fn listen(&self, interest: Interest) {
        if let Err(error) = self.io_loop.modify(&self.listener, interest, self.token.get().copied()) {
            tracing::error!("cannot wait for data connections: {error}");
        }
    }

    pub fn stop(&self) {
        if let Some(&token) = self.token.get() {
            self.io_loop.remove(token, &self.listener);
        }
    }
}

/// What is still to be sent.
enum Reply {
    Status([u8; STATUS_LENGTH]),
    Body { range: MemoryRange, _guards: Guards },
}

impl Reply {
    fn length(&self) -> u64 {
        match self {
            Reply::Status(status) => status.len() as u64,
            Reply::Body { range, .. } => range.length(),
        }
    }
}

/// A write whose body is being received.
struct Incoming {
    range: MemoryRange,
    done: u64,
    version: Version,
    _guards: Guards,
}

/// What is done with what comes.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Input {
    /// Requests are served.
    #[default]
    Served,
    /// A request was refused: what follows is thrown away.
    ThrownAway,
    /// Nothing more is read; the connection ends when the replies are sent.
    Over,
}

/// What has been taken from the socket and not looked at: the beginning of a header, or, after reads, up to [`HEADERS`] of them.
struct Taken {
    bytes: [u8; HEADERS * HEADER_LENGTH],
    start: usize,
    end: usize,
}

impl Default for Taken {
    fn default() -> Taken {
        Taken { bytes: [0; HEADERS * HEADER_LENGTH], start: 0, end: 0 }
    }
}

impl Taken {
    fn has_header(&self) -> bool {
        self.end - self.start >= HEADER_LENGTH
    }

    fn header(&mut self) -> Option<Header> {
        let header = Header::decode(self.bytes[self.start..self.end].first_chunk()?);
        self.start += HEADER_LENGTH;
        Some(header)
    }

    /// Takes up to `length` bytes that are not a header after all.
    fn body(&mut self, length: u64) -> &mut [u8] {
        let start = self.start;
        self.start = self.end.min(start.saturating_add(length as usize));
        &mut self.bytes[start..self.start]
    }

    /// Room to receive into, for as much as ends with the given number of headers.
    fn room(&mut self, headers: usize) -> &mut [u8] {
        self.bytes.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        &mut self.bytes[self.end..headers * HEADER_LENGTH]
    }
}

#[derive(Default)]
struct State {
    input: Input,
    taken: Taken,
    incoming: Option<Incoming>,
    replies: VecDeque<Reply>,
    /// Bytes of the first reply that are sent.
    sent: u64,
    /// Whether the last request was a read, so that more of them may follow, with no bodies between them.
    reads: bool,
    /// Since when a refusal has been sent.
    refused: Option<Instant>,
    thrown_away: usize,
    /// The connection ends in a reset.
    resets: bool,
    closed: bool,
    waits_for_writable: bool,
}

impl State {
    /// Whether there is something to serve that has been taken from the socket.
    fn has_taken_request(&self) -> bool {
        self.input == Input::Served
            && if self.incoming.is_some() { self.taken.start < self.taken.end } else { self.taken.has_header() }
    }

    /// Whether the write that begins changes bytes that an earlier read has still to send.
    fn writes_over_replies(&self) -> bool {
        let Some(incoming) = self.incoming.as_ref().filter(|incoming| incoming.done == 0) else { return false };
        self.replies.iter().any(|reply| matches!(reply, Reply::Body { range, .. } if range.intersects(&incoming.range)))
    }
}

/// What a step of serving found.
enum Step {
    /// There may be more.
    Go,
    /// Nothing more can be read now.
    Drained,
    /// Nothing more is to be read.
    Over,
    /// The connection is broken.
    Close,
}

/// A connection from a peer.
pub(super) struct Connection {
    shared: Weak<Shared>,
    io_loop: Arc<IoLoop>,
    token: OnceLock<u64>,
    socket: Socket,
    state: Mutex<State>,
}

impl Connection {
    fn start(shared: &Arc<Shared>, stream: std::net::TcpStream) {
        let socket = Socket::from(stream);
        let ready =
            socket.set_nonblocking(true).and_then(|()| socket.set_tcp_nodelay(true)).and_then(|()| socket.set_keepalive(true));
        if let Err(error) = ready {
            tracing::info!("cannot prepare a data connection: {error}");
            return;
        }
        let io_loop = shared.next_loop();
        let connection = Arc::new(Connection {
            shared: Arc::downgrade(shared),
            io_loop: io_loop.clone(),
            token: OnceLock::new(),
            socket,
            state: Mutex::default(),
        });
        let state = connection.state.lock();
        match io_loop.add(Source::Connection(connection.clone()), &connection.socket, Interest::READ) {
            Ok(token) => {
                connection.token.get_or_init(|| token);
                shared.connections.lock().insert(connection.key(), connection.clone());
            }
            Err(error) => tracing::warn!("cannot wait for a data connection: {error}"),
        }
        drop(state);
    }

    fn key(&self) -> usize {
        std::ptr::from_ref(self) as usize
    }

    /// Serves an event; called by the I/O thread.
    pub fn serve(&self, readable: bool, writable: bool) {
        let Some(shared) = self.shared.upgrade() else { return };
        let mut state = self.state.lock();
        if !state.closed && !self.take_turn(&shared, &mut state, readable, writable) {
            self.close(&shared, &mut state);
        }
    }

    /// Ends the connection if it moves bytes of the range, or (`None`) in any case. No byte moves on it after this returns.
    pub fn evict(&self, range: Option<MemoryRange>) {
        let Some(shared) = self.shared.upgrade() else { return };
        let mut state = self.state.lock();
        let uses = match range {
            None => true,
            Some(range) => {
                state.incoming.as_ref().is_some_and(|incoming| incoming.range.intersects(&range))
                    || state.replies.iter().any(|reply| matches!(reply, Reply::Body { range: body, .. } if body.intersects(&range)))
            }
        };
        if uses && !state.closed {
            self.close(&shared, &mut state);
        }
    }

    /// Closes the connection if its refusal was sent long enough ago. False: look again later.
    pub fn end_linger(&self, now: Instant) -> bool {
        let Some(shared) = self.shared.upgrade() else { return true };
        let mut state = self.state.lock();
        // Without a refusal it is another connection, at the address of the one that lingered.
        let Some(since) = state.refused.filter(|_| !state.closed) else { return true };
        let is_over = now >= since + LINGER;
        if is_over {
            self.close(&shared, &mut state);
        }
        is_over
    }

    fn close(&self, shared: &Shared, state: &mut State) {
        state.closed = true;
        state.resets |= state.incoming.take().is_some_and(|incoming| incoming.version == Version::V1);
        state.replies.clear();
        if let Some(&token) = self.token.get() {
            self.io_loop.remove(token, &self.socket);
        }
        shared.connections.lock().remove(&self.key());
        // The socket is closed with the last reference to this, which is now or when the visitor of all connections goes on.
        let _ = match state.resets {
            true => self.socket.set_linger(Some(Duration::ZERO)),
            false => self.socket.shutdown(std::net::Shutdown::Both),
        };
    }

    /// False: the connection is over.
    fn take_turn(&self, shared: &Arc<Shared>, state: &mut State, readable: bool, writable: bool) -> bool {
        let mut budget = TURN_BYTES;
        let mut may_read = readable;
        if writable && !self.flush(shared, state, &mut budget) {
            return false;
        }
        loop {
            if !self.serve_requests(shared, state, &mut may_read, &mut budget) || !self.flush(shared, state, &mut budget) {
                return false;
            }
            // What has been taken from the socket causes no event any more: if what was in its way has just been sent, it is served now.
            if !(state.replies.is_empty() && state.has_taken_request()) {
                return state.input != Input::Over || !state.replies.is_empty();
            }
        }
    }

    /// Until replies are stuck, or nothing more can or should be read in this turn. False: the connection is over.
    fn serve_requests(&self, shared: &Arc<Shared>, state: &mut State, may_read: &mut bool, budget: &mut u64) -> bool {
        while (*may_read && *budget > 0 || state.has_taken_request()) && (state.replies.is_empty() || !state.waits_for_writable) {
            if state.writes_over_replies() {
                if !self.flush(shared, state, budget) {
                    return false;
                }
                if !state.replies.is_empty() {
                    break;
                }
            }
            let step = match state.input {
                Input::Served => self.read(shared, state, budget),
                Input::ThrownAway => self.throw_away(state, budget),
                Input::Over => Step::Over,
            };
            match step {
                Step::Go if state.replies.len() < REPLIES => {}
                Step::Go => {
                    if !self.flush(shared, state, budget) {
                        return false;
                    }
                }
                Step::Drained => *may_read = false,
                Step::Over => {
                    state.input = Input::Over;
                    *may_read = false;
                }
                Step::Close => return false,
            }
        }
        true
    }

    /// Sends what waits, and asks for the events that are needed next. False: the connection is over.
    fn flush(&self, shared: &Arc<Shared>, state: &mut State, budget: &mut u64) -> bool {
        let mut most = usize::MAX;
        let mut blocked = false;
        while !state.replies.is_empty() {
            let mut gather = Gather::default();
            for (position, reply) in state.replies.iter().enumerate() {
                if gather.is_full() || position >= most {
                    break;
                }
                let skip = if position == 0 { state.sent } else { 0 };
                match reply {
                    Reply::Status(status) => gather.push_bytes(&status[skip as usize..]),
                    Reply::Body { range, .. } => match range.part(skip, range.length() - skip) {
                        Some(rest) => gather.push_memory(rest),
                        None => return false,
                    },
                }
            }
            let length = gather.length();
            match gather.send(&self.socket) {
                Ok(sent) => {
                    *budget = budget.saturating_sub(sent);
                    self.advance_sent(shared, state, sent);
                    if sent < length || *budget == 0 {
                        blocked = !state.replies.is_empty();
                        break;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    blocked = true;
                    break;
                }
                Err(error) if error.raw_os_error() == Some(libc::EFAULT) && most > 1 => most = 1,
                Err(error) => {
                    if let (Some(libc::EFAULT), Some(Reply::Body { range, .. })) = (error.raw_os_error(), state.replies.front()) {
                        shared.complain(format_args!(
                            "a peer reads [{:#x}, +{}), which is registered but cannot be read: it was unmapped or protected before it was unregistered",
                            range.address(),
                            range.length()
                        ));
                    }
                    return false;
                }
            }
        }
        if state.replies.is_empty() && state.input == Input::ThrownAway && state.refused.is_none() {
            if self.socket.shutdown(std::net::Shutdown::Write).is_err() {
                return false;
            }
            state.refused = Some(Instant::now());
            shared.linger(self.key());
        }
        if blocked != state.waits_for_writable {
            // While replies are stuck nothing more is read: the peer has to take them first.
            let interest = if blocked { Interest::WRITE } else { Interest::READ };
            if self.io_loop.modify(&self.socket, interest, self.token.get().copied()).is_err() {
                return false;
            }
            state.waits_for_writable = blocked;
        }
        true
    }

    fn advance_sent(&self, shared: &Shared, state: &mut State, sent: u64) {
        state.sent += sent;
        while let Some(reply) = state.replies.front() {
            let length = reply.length();
            if state.sent < length {
                break;
            }
            if matches!(reply, Reply::Body { .. }) {
                shared.counters.requests_served.add(1);
                shared.counters.bytes_served.add(length);
            }
            state.sent -= length;
            state.replies.pop_front();
        }
    }

    fn read(&self, shared: &Arc<Shared>, state: &mut State, budget: &mut u64) -> Step {
        if state.incoming.is_some() {
            return self.read_body(shared, state, budget);
        }
        let mut step = Step::Go;
        if !state.taken.has_header() {
            let mut scatter = Scatter::default();
            // What follows the header of a write belongs into the memory that it names.
            scatter.push_buffer(state.taken.room(if state.reads { HEADERS } else { 1 }));
            let wanted = scatter.length();
            match scatter.receive(&self.socket) {
                Ok(0) => return Step::Over,
                Ok(received) => {
                    state.taken.end += received as usize;
                    if received < wanted {
                        step = Step::Drained;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Step::Drained,
                Err(_) => return Step::Close,
            }
        }
        shared.registry.read(|view| {
            while let Some(header) = state.taken.header() {
                match self.begin(shared, state, view, header) {
                    Step::Go if state.incoming.is_none() && state.input == Input::Served && state.replies.len() < REPLIES => {}
                    Step::Go => break,
                    over => return over,
                }
            }
            step
        })
    }

    /// Acts on a header.
    fn begin(&self, shared: &Arc<Shared>, state: &mut State, view: &View<'_>, header: Header) -> Step {
        state.reads = header.opcode == Opcode::Read;
        let granted = match header.length {
            0 => Err(Refusal::NotRegistered),
            length => view.acquire(header.address, length, Access::Remote),
        };
        let granted = granted.map(|guards| (guards.range(header.address, header.length), guards));
        let (range, guards) = match granted {
            Ok((Some(range), guards)) => (range, guards),
            Ok((None, _)) => return self.refuse(shared, state, header, "registered"),
            Err(Refusal::NotRegistered) => return self.refuse(shared, state, header, "not (all) registered"),
            Err(Refusal::NotAccessible) => return self.refuse(shared, state, header, "registered for local use only"),
            Err(Refusal::Draining) => return self.refuse(shared, state, header, "being unregistered"),
        };
        match header.opcode {
            Opcode::Write => {
                state.incoming = Some(Incoming { range, done: 0, version: header.version, _guards: guards });
            }
            Opcode::Read => {
                if header.version == Version::V2 {
                    state.replies.push_back(Reply::Status(wire::encode_status(wire::STATUS_OK)));
                }
                state.replies.push_back(Reply::Body { range, _guards: guards });
            }
        }
        Step::Go
    }

    fn refuse(&self, shared: &Arc<Shared>, state: &mut State, header: Header, why: &str) -> Step {
        let what = match header.opcode {
            Opcode::Read => "read",
            Opcode::Write => "write",
        };
        shared.complain(format_args!(
            "refused a {what} of [{:#x}, +{}) by {}: the range is {why}",
            header.address,
            header.length,
            self.socket
                .peer_addr()
                .ok()
                .and_then(|address| address.as_socket())
                .map_or("a peer".into(), |address| address.to_string())
        ));
        match header.version {
            Version::V1 => {
                state.resets = header.opcode == Opcode::Write;
                Step::Over
            }
            Version::V2 => {
                state.replies.push_back(Reply::Status(wire::encode_status(wire::STATUS_REJECTED)));
                state.input = Input::ThrownAway;
                Step::Go
            }
        }
    }

    fn read_body(&self, shared: &Arc<Shared>, state: &mut State, budget: &mut u64) -> Step {
        let Some(incoming) = &mut state.incoming else { return Step::Go };
        let rest = incoming.range.length() - incoming.done;
        let taken = state.taken.body(rest);
        let outcome = if taken.is_empty() {
            let Some(body) = incoming.range.part(incoming.done, rest) else { return Step::Close };
            let mut scatter = Scatter::default();
            scatter.push_memory(body);
            // The next header usually follows; taking it now spares a call.
            scatter.push_buffer(state.taken.room(1));
            let wanted = scatter.length();
            scatter.receive(&self.socket).map(|received| (received, received < wanted))
        } else {
            let Some(body) = incoming.range.part(incoming.done, taken.len() as u64) else { return Step::Close };
            store_checked(body, taken).map(|()| (body.length(), false))
        };
        match outcome {
            Ok((0, _)) => Step::Over,
            Ok((received, is_drained)) => {
                *budget = budget.saturating_sub(received);
                if received < rest {
                    incoming.done += received;
                    return if is_drained { Step::Drained } else { Step::Go };
                }
                if incoming.version == Version::V2 {
                    state.replies.push_back(Reply::Status(wire::encode_status(wire::STATUS_OK)));
                }
                shared.counters.requests_served.add(1);
                shared.counters.bytes_served.add(incoming.range.length());
                state.incoming = None;
                state.taken.end += (received - rest) as usize;
                if is_drained { Step::Drained } else { Step::Go }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Step::Drained,
            Err(error) if error.raw_os_error() == Some(libc::EFAULT) => {
                let header = Header {
                    length: incoming.range.length(),
                    address: incoming.range.address(),
                    opcode: Opcode::Write,
                    version: incoming.version,
                };
                state.incoming = None;
                self.refuse(
                    shared,
                    state,
                    header,
                    "registered but cannot be written: it was unmapped or protected before it was unregistered",
                )
            }
            Err(_) => Step::Close,
        }
    }

    fn throw_away(&self, state: &mut State, budget: &mut u64) -> Step {
        match socket::discard(&self.socket, TURN_BYTES as usize) {
            Ok(0) => Step::Over,
            Ok(discarded) => {
                *budget = budget.saturating_sub(discarded as u64);
                state.thrown_away += discarded;
                if state.thrown_away > LINGER_BYTES { Step::Close } else { Step::Go }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Step::Drained,
            Err(_) => Step::Close,
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
