//! The answering side of the handshake channel.
//!
//! One thread waits for all connections with epoll; each is a small state machine that never blocks:
//!
//! ```text
//! Reading --frame complete--> Writing --sent--> Closing --peer closed--> gone
//!    `----frame refused, no reply is due---------^
//! ```
//!
//! Invariants: every connection has a deadline, so it is gone in bounded time whatever its peer does. Bytes of peers are held only
//! while Reading, as they arrive, and in bounded amount over all connections. A connection is closed only when its request has been
//! read to the end, within bounds, because upstream's clients die of SIGPIPE otherwise.
//!
//! The thread owns everything; [`Server`] only holds the event that stops it. An idle connection costs nothing but its descriptor;
//! every step costs the logarithm of the number of connections for its deadline.

use std::collections::{BTreeSet, HashMap};
use std::io::{self, IoSlice, Read};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::{Map, Value};
use socket2::SockRef;

use super::frame::{self, Fault, Kind};
use super::{Listener, Notification, Service};
use crate::config::Config;
use crate::error::{Code, Error, Result};
use crate::metadata::write_json;
use crate::sys::epoll::{Epoll, Events, Interest};
use crate::sys::event::EventFd;
use crate::sys::thread;

/// What a peer without RDMA answers to a connection request.
const EMPTY_CONNECTION: &str = "{\"local_gid\":\"\",\"local_lid\":0,\"local_nic_path\":\"\",\"payload\":\"\",\"peer_nic_path\":\"\",\"qp_num\":[],\"reply_msg\":\"\"}\n";
const NOTIFY_SUCCESS: &str = "{\"name\":\"\",\"notify_msg\":\"success\"}\n";
const NOTIFY_REFUSED: &str = "{\"name\":\"\",\"notify_msg\":\"\"}\n";
const PROBE_SUCCESS: &str = "{\"status\":\"success\"}\n";
const NULL: &str = "null\n";

/// How long accepting pauses when it fails, for instance because no descriptor is left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Connections accepted, and pieces written, before others have their turn.
const ACCEPT_ROUND: usize = 64;
const PIECES_ROUND: usize = 256;
/// How much is read at once to be thrown away.
const DISCARD_ROUND: usize = 64 << 10;

const TOKEN_STOP: u64 = 0;
const TOKEN_LISTENER: u64 = 1;
const TOKEN_FIRST_CONNECTION: u64 = 2;

/// Bounds on what peers can take.
#[derive(Clone, Debug)]
struct Limits {
    /// Bytes of a request after its length.
    request: usize,
    /// Bytes of unfinished requests of all connections.
    buffered: usize,
    /// Bytes that are read of a peer only to be thrown away, before it is cut off.
    discarded: usize,
    /// Connections at a time. Past it, the one whose deadline is nearest is closed.
    connections: usize,
    /// For the whole request from accept on, for progress with the reply, and for the peer to close.
    step: Duration,
    /// For the whole reply.
    reply: Duration,
}

impl Limits {
    fn new(config: &Config) -> Limits {
        Limits {
            request: config.handshake_max_length,
            buffered: (4 * config.handshake_max_length).max(64 << 20),
            discarded: 128 << 20,
            connections: 4096,
            step: Duration::from_secs(5),
            reply: Duration::from_secs(60),
        }
    }
}

/// Answers other engines until it is stopped or dropped. One thread, any number of connections.
pub struct Server {
    stop: Arc<EventFd>,
    thread_id: ThreadId,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Server {
    /// Begins to listen and to answer. [`Code::Socket`] or [`Code::Limit`] when the system refuses a descriptor or a thread.
    pub fn start(listener: Listener, service: Arc<dyn Service>, config: &Config) -> Result<Server> {
        Server::start_limited(listener, service, Limits::new(config))
    }

    fn start_limited(listener: Listener, service: Arc<dyn Service>, limits: Limits) -> Result<Server> {
        let port = listener.port();
        let listener = listener.into_std()?;
        let refused = |error: io::Error| {
            let text =
                format!("the handshake server on port {port} cannot start: {error}; see the limits of open files and processes");
            Error::new(Code::Limit, text)
        };
        let (worker, stop) = Worker::new(listener, service, limits).map_err(refused)?;
        let thread = thread::spawn("te-handshake", move || worker.run()).map_err(refused)?;
        Ok(Server { stop, thread_id: thread.thread().id(), thread: Mutex::new(Some(thread)) })
    }

    /// Closes the port and all connections, and returns when the thread has ended: at once, or when the [`Service`] call that is
    /// under way returns. From within such a call it returns before. Any number of times, from any thread; also done on drop.
    pub fn stop(&self) {
        self.stop.signal();
        if std::thread::current().id() == self.thread_id {
            return;
        }
        if let Some(thread) = self.thread.lock().take() {
            // The thread catches what its service panics with.
            let _ = thread.join();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

struct Connection {
    stream: TcpStream,
    state: State,
    deadline: Instant,
}

enum State {
    Reading(frame::Reader),
    Writing(Reply),
    Closing { discarded: usize },
}

impl Connection {
    fn interest(&self) -> Interest {
        match self.state {
            State::Writing(_) => Interest::WRITE,
            State::Reading(_) | State::Closing { .. } => Interest::READ,
        }
    }

    fn held(&self) -> usize {
        match &self.state {
            State::Reading(reader) => reader.held(),
            State::Writing(_) | State::Closing { .. } => 0,
        }
    }
}

/// A frame on its way to a peer.
struct Reply {
    header: Vec<u8>,
    pieces: Vec<Arc<str>>,
    /// Index of the chunk that is next, the header being chunk 0, and how much of it is sent.
    next: usize,
    sent: usize,
    end: Instant,
}

impl Reply {
    fn new(kind: Kind, pieces: Vec<Arc<str>>, end: Instant) -> Reply {
        let length = pieces.iter().map(|piece| piece.len()).sum();
        Reply { header: frame::header(kind, length), pieces, next: 0, sent: 0, end }
    }

    /// Sends what the socket takes. True when all is sent.
    fn send(&mut self, stream: &TcpStream) -> io::Result<bool> {
        let chunks = std::iter::once(&self.header[..]).chain(self.pieces.iter().map(|piece| piece.as_bytes()));
        let chunks: Vec<_> = chunks.skip(self.next).take(PIECES_ROUND).collect();
        let mut slices: Vec<_> = chunks.iter().map(|chunk| IoSlice::new(chunk)).collect();
        slices[0].advance(self.sent);
        self.sent += SockRef::from(stream).send_vectored_with_flags(&slices, libc::MSG_NOSIGNAL)?;
        for chunk in chunks {
            if self.sent < chunk.len() {
                break;
            }
            self.sent -= chunk.len();
            self.next += 1;
        }
        Ok(self.next > self.pieces.len())
    }
}

/// What the thread owns.
struct Worker {
    epoll: Epoll,
    listener: TcpListener,
    /// Open as long as it is waited for.
    _stop: Arc<EventFd>,
    service: Arc<dyn Service>,
    limits: Limits,
    connections: HashMap<u64, Connection>,
    /// One element for each connection, and only for them.
    deadlines: BTreeSet<(Instant, u64)>,
    /// Sum of what all connections hold.
    buffered: usize,
    /// Never reused, so an event of a closed connection is not taken for one of another.
    next_token: u64,
    /// Set while accepting pauses.
    accept_again: Option<Instant>,
    /// Whether the last accept failed: only the first of several failures is logged as a warning.
    accept_failed: bool,
}

impl Worker {
    fn new(listener: TcpListener, service: Arc<dyn Service>, limits: Limits) -> io::Result<(Worker, Arc<EventFd>)> {
        let epoll = Epoll::new()?;
        let stop = Arc::new(EventFd::new()?);
        listener.set_nonblocking(true)?;
        epoll.add(&*stop, Interest::READ, TOKEN_STOP)?;
        epoll.add(&listener, Interest::READ, TOKEN_LISTENER)?;
        let worker = Worker {
            epoll,
            listener,
            _stop: stop.clone(),
            service,
            limits,
            connections: HashMap::new(),
            deadlines: BTreeSet::new(),
            buffered: 0,
            next_token: TOKEN_FIRST_CONNECTION,
            accept_again: None,
            accept_failed: false,
        };
        Ok((worker, stop))
    }

    fn run(mut self) {
        let mut events = Events::with_capacity(256);
        loop {
            let first_deadline = self.deadlines.first().map(|(deadline, _)| *deadline);
            let wake = first_deadline.into_iter().chain(self.accept_again).min();
            let timeout = wake.map(|wake| wake.saturating_duration_since(Instant::now()));
            let ready = match self.epoll.wait(&mut events, timeout) {
                Ok(ready) => ready,
                Err(error) => {
                    tracing::error!("the handshake server ends because it cannot wait for its peers: {error}");
                    return;
                }
            };
            for event in ready {
                match event.token {
                    TOKEN_STOP => return,
                    TOKEN_LISTENER => self.accept(),
                    token => self.step(token),
                }
            }
            self.expire(Instant::now());
        }
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPT_ROUND {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    self.accept_failed = false;
                    self.admit(stream);
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return,
                    // Of that connection alone; the next may be well.
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset => {}
                    _ => return self.pause_accepting(&error),
                },
            }
        }
    }

    /// The listener would be reported ready again and again, so it is left alone for a while.
    fn pause_accepting(&mut self, error: &io::Error) {
        if !std::mem::replace(&mut self.accept_failed, true) {
            tracing::warn!(
                "the handshake server cannot accept connections: {error}; it tries again every {ACCEPT_PAUSE:?}. \
                 If open files are the limit, raise it (ulimit -n)"
            );
        }
        if self.epoll.modify(&self.listener, Interest::NONE, TOKEN_LISTENER).is_ok() {
            self.accept_again = Some(Instant::now() + ACCEPT_PAUSE);
        }
    }

    fn admit(&mut self, stream: TcpStream) {
        while self.connections.len() >= self.limits.connections {
            let Some((_, token)) = self.deadlines.first().copied() else { break };
            tracing::debug!("a handshake connection is closed to make room: {} are open", self.connections.len());
            self.close(token);
        }
        let token = self.next_token;
        self.next_token += 1;
        let made = stream
            .set_nonblocking(true)
            .and_then(|()| stream.set_nodelay(true))
            .and_then(|()| self.epoll.add(&stream, Interest::READ, token));
        match made {
            Ok(()) => {
                let state = State::Reading(frame::Reader::new(self.limits.request));
                self.keep(token, Connection { stream, state, deadline: Instant::now() + self.limits.step });
            }
            Err(error) => tracing::debug!("a handshake connection cannot be used: {error}"),
        }
    }

    fn keep(&mut self, token: u64, connection: Connection) {
        self.deadlines.insert((connection.deadline, token));
        self.buffered += connection.held();
        self.connections.insert(token, connection);
    }

    fn take(&mut self, token: u64) -> Option<Connection> {
        let connection = self.connections.remove(&token)?;
        self.deadlines.remove(&(connection.deadline, token));
        self.buffered -= connection.held();
        Some(connection)
    }

    fn close(&mut self, token: u64) {
        if let Some(connection) = self.take(token) {
            self.end(connection);
        }
    }

    /// A child of `fork()` may have it open, too: it is taken out of the set, which would report it for ever, and ends for the peer.
    fn end(&self, connection: Connection) {
        let _ = self.epoll.remove(&connection.stream);
        let _ = connection.stream.shutdown(Shutdown::Both);
    }

    /// Does what can be done for a connection without waiting. It may be gone already: closed by an earlier event of this round.
    fn step(&mut self, token: u64) {
        let Some(mut connection) = self.take(token) else { return };
        let interest = connection.interest();
        let is_open = self.advance(&mut connection);
        if !is_open
            || connection.interest() != interest && self.epoll.modify(&connection.stream, connection.interest(), token).is_err()
        {
            return self.end(connection);
        }
        self.keep(token, connection);
        while self.buffered > self.limits.buffered {
            let Some((&token, largest)) = self.connections.iter().max_by_key(|(_, connection)| connection.held()) else { break };
            tracing::warn!(
                "unfinished handshake requests take {} bytes; the largest, {}, is dropped",
                self.buffered,
                largest.held()
            );
            self.close(token);
        }
    }

    /// False when the connection is over.
    fn advance(&self, connection: &mut Connection) -> bool {
        loop {
            match &mut connection.state {
                State::Reading(reader) => match reader.advance(&mut &connection.stream) {
                    Ok(true) => {
                        let answer = self.answer(reader.payload());
                        let now = Instant::now();
                        match answer {
                            Some((kind, pieces)) => {
                                connection.deadline = now + self.limits.step;
                                connection.state = State::Writing(Reply::new(kind, pieces, now + self.limits.reply));
                            }
                            None => self.start_closing(connection),
                        }
                    }
                    Ok(false) => return true,
                    Err(Fault::Io(error)) => return error.kind() == io::ErrorKind::WouldBlock,
                    Err(Fault::Closed { .. }) => return false,
                    Err(Fault::Empty) => self.start_closing(connection),
                    Err(Fault::TooLong { length }) => {
                        tracing::warn!(
                            "a handshake request of {length} bytes from {} is refused; up to {} are accepted (MC_HANDSHAKE_MAX_LENGTH)",
                            peer_of(&connection.stream),
                            self.limits.request
                        );
                        self.start_closing(connection);
                    }
                },
                State::Writing(reply) => match reply.send(&connection.stream) {
                    Ok(true) => self.start_closing(connection),
                    Ok(false) => {
                        connection.deadline = reply.end.min(Instant::now() + self.limits.step);
                        return true;
                    }
                    Err(error) => return matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted),
                },
                State::Closing { discarded } => {
                    let mut scratch = [0; DISCARD_ROUND];
                    return match (&connection.stream).read(&mut scratch) {
                        Ok(0) => false,
                        Ok(read) => {
                            *discarded += read;
                            *discarded < self.limits.discarded
                        }
                        Err(error) => matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted),
                    };
                }
            }
        }
    }

    /// Says that nothing more will be sent, and waits for the peer to close.
    fn start_closing(&self, connection: &mut Connection) {
        // Fails when the peer has reset the connection; the next read tells.
        let _ = connection.stream.shutdown(Shutdown::Write);
        connection.state = State::Closing { discarded: 0 };
        connection.deadline = Instant::now() + self.limits.step;
    }

    fn expire(&mut self, now: Instant) {
        while let Some((_, token)) = self.deadlines.first().filter(|(deadline, _)| *deadline <= now).copied() {
            self.close(token);
        }
        if self.accept_again.is_some_and(|again| again <= now) {
            self.accept_again = None;
            if let Err(error) = self.epoll.modify(&self.listener, Interest::READ, TOKEN_LISTENER) {
                self.pause_accepting(&error);
            }
        }
    }

    /// What is to be sent. `None`: nothing, the request is broken.
    fn answer(&self, payload: &[u8]) -> Option<(Kind, Vec<Arc<str>>)> {
        let pieces = Kind::split(payload).and_then(|(kind, text)| {
            let service = AssertUnwindSafe(&*self.service);
            let answered = catch_unwind(move || answer_request(*service, kind, text)).unwrap_or_else(|_| {
                tracing::error!("a defect ended the answer to a {kind:?} request");
                None
            });
            answered.map(|pieces| (kind, pieces))
        });
        if pieces.is_none() {
            tracing::debug!("a handshake request of {} bytes is broken and gets no reply", payload.len());
        }
        pieces
    }
}

fn answer_request(service: &dyn Service, kind: Kind, text: &[u8]) -> Option<Vec<Arc<str>>> {
    let text_of = |text: &str| vec![text.into()];
    match kind {
        Kind::Connection | Kind::Untyped => {
            let request = Value::Object(parse_members(text)?);
            Some(match service.connect(&request) {
                None => text_of(EMPTY_CONNECTION),
                Some(reply) => {
                    let mut text = String::new();
                    write_json(&reply, &mut text);
                    text.push('\n');
                    text_of(&text)
                }
            })
        }
        // What peers say of themselves here is not needed, and not read.
        Kind::Metadata => Some(service.describe().unwrap_or_else(|| text_of(NULL))),
        Kind::Notify => {
            let mut members = parse_members(text)?;
            let notification =
                Notification { name: take_text(&mut members, "name")?, message: take_text(&mut members, "notify_msg")? };
            Some(text_of(if service.notify(notification) { NOTIFY_SUCCESS } else { NOTIFY_REFUSED }))
        }
        Kind::Probe => Some(text_of(PROBE_SUCCESS)),
    }
}

/// The members of an object; `null` has none.
fn parse_members(text: &[u8]) -> Option<Map<String, Value>> {
    serde_json::from_slice::<Option<Map<String, Value>>>(text).ok().map(Option::unwrap_or_default)
}

/// A text; missing ones are empty, and what is no text makes `None`.
fn take_text(members: &mut Map<String, Value>, key: &str) -> Option<String> {
    match members.remove(key) {
        None | Some(Value::Null) => Some(String::new()),
        Some(Value::String(text)) => Some(text),
        Some(_) => None,
    }
}

fn peer_of(stream: &TcpStream) -> String {
    stream.peer_addr().map_or_else(|_| "a peer that is gone".into(), |address| address.to_string())
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::Ipv4Addr;
    use std::sync::OnceLock;

    use super::super::Client;
    use super::super::address::HostPort;
    use super::*;

    /// Says of itself what it was made with, and keeps notifications.
    #[derive(Default)]
    struct Engine {
        descriptor: Option<Vec<Arc<str>>>,
        notifications: Mutex<Vec<Notification>>,
        server: OnceLock<Server>,
    }

    impl Service for Engine {
        fn describe(&self) -> Option<Vec<Arc<str>>> {
            self.descriptor.clone()
        }
        fn notify(&self, notification: Notification) -> bool {
            match &*notification.name {
                "panic" => panic!("as the test wants it"),
                "stop" => self.server.wait().stop(),
                "refuse" => return false,
                _ => self.notifications.lock().push(notification),
            }
            true
        }
        fn connect(&self, request: &Value) -> Option<Value> {
            request.get("mirror").cloned()
        }
    }

    struct Fixture {
        engine: Arc<Engine>,
        server: Server,
        port: u16,
    }

    /// Deadlines that no test reaches unless it wants to.
    fn patient() -> Limits {
        Limits { step: Duration::from_secs(600), ..Limits::new(&Config::default()) }
    }

    fn impatient() -> Limits {
        Limits { step: Duration::from_millis(200), ..patient() }
    }

    fn start_with(engine: Engine, limits: Limits) -> Fixture {
        let engine = Arc::new(engine);
        let listener = Listener::bind(&Config::default(), 0).unwrap();
        let port = listener.port();
        let server = Server::start_limited(listener, engine.clone(), limits).unwrap();
        Fixture { engine, server, port }
    }

    fn start(limits: Limits) -> Fixture {
        start_with(Engine::default(), limits)
    }

    impl Fixture {
        fn connect(&self) -> TcpStream {
            let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            stream
        }

        /// All that comes back for some bytes.
        fn exchange(&self, request: &[u8]) -> Vec<u8> {
            let mut stream = self.connect();
            stream.write_all(request).unwrap();
            read_all(stream)
        }

        fn check_alive(&self) {
            let mut reply = frame::header(Kind::Probe, PROBE_SUCCESS.len());
            reply.extend(PROBE_SUCCESS.as_bytes());
            assert_eq!(self.exchange(&request(3, b"{}")), reply);
        }
    }

    fn read_all(mut stream: TcpStream) -> Vec<u8> {
        let mut reply = Vec::new();
        stream.read_to_end(&mut reply).unwrap();
        reply
    }

    fn payload(bytes: &[u8]) -> Vec<u8> {
        [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
    }

    fn request(kind: u8, body: &[u8]) -> Vec<u8> {
        payload(&[&[kind], body].concat())
    }

    #[test]
    fn every_kind_of_request_has_its_reply() {
        let fixture = start_with(Engine { descriptor: Some(vec!["{}".into(), "\n".into()]), ..Engine::default() }, patient());
        let empty = concat!(
            r#"{"local_gid":"","local_lid":0,"local_nic_path":"","payload":"","peer_nic_path":"","qp_num":[],"reply_msg":""}"#,
            "\n"
        );
        let notify = b"{\"name\":\"a\\u00e9\",\"notify_msg\":\"b\"}\n";
        for (sent, received) in [
            (request(0, b"{}"), request(0, empty.as_bytes())),
            (request(0, b"null\n"), request(0, empty.as_bytes())),
            (payload(b"{\"qp_num\":[1]}\n"), payload(empty.as_bytes())),
            (payload(b" {}"), payload(empty.as_bytes())),
            (request(0, br#"{"mirror":{"z":"\u00e9","a":[1]}}"#), request(0, b"{\"a\":[1],\"z\":\"\\u00e9\"}\n")),
            (request(1, b"{}"), request(1, b"{}\n")),
            (request(1, b""), request(1, b"{}\n")),
            (request(2, notify), request(2, b"{\"name\":\"\",\"notify_msg\":\"success\"}\n")),
            (request(2, b"{}"), request(2, b"{\"name\":\"\",\"notify_msg\":\"success\"}\n")),
            (request(3, b"{}"), request(3, b"{\"status\":\"success\"}\n")),
        ] {
            assert_eq!(fixture.exchange(&sent), received, "{}", String::from_utf8_lossy(&sent));
        }
        let notification = |name: &str, message: &str| Notification { name: name.into(), message: message.into() };
        assert_eq!(*fixture.engine.notifications.lock(), [notification("aé", "b"), notification("", "")]);
        assert_eq!(start(patient()).exchange(&request(1, b"{}")), request(1, b"null\n"));
    }

    #[test]
    fn broken_requests_end_without_reply_and_harm_nobody() {
        let fixture = start(patient());
        let deep = "[".repeat(100_000);
        for broken in [
            payload(b""),
            request(4, b"{}"),
            request(0x7f, b"{}"),
            request(0x80, b"{}"),
            request(0xfe, b"{}"),
            request(0xff, b"{}"),
            payload(b"x"),
            payload(b"[]"),
            payload(deep.as_bytes()),
            request(0, b""),
            request(0, b"[]"),
            request(0, b"7"),
            request(0, b"{"),
            request(0, b"{} x"),
            request(0, format!("{{\"mirror\":{deep}").as_bytes()),
            request(2, b""),
            request(2, b"[]"),
            request(2, br#"["a","b"]"#),
            request(2, br#"{"name":{},"notify_msg":"x"}"#),
            request(2, br#"{"name":"x","notify_msg":[]}"#),
            request(2, br#"{"name":7,"notify_msg":"x"}"#),
            request(2, format!("{{\"name\":{deep}").as_bytes()),
            request(2, b"{\"name\":\"\xff\"}"),
            request(2, br#"{"name":"panic"}"#),
        ] {
            assert_eq!(fixture.exchange(&broken), b"", "{}", String::from_utf8_lossy(&broken[..broken.len().min(60)]));
        }
        assert_eq!(*fixture.engine.notifications.lock(), []);
        fixture.check_alive();
    }

    #[test]
    fn truncated_requests_end_when_the_peer_stops_sending() {
        let fixture = start(patient());
        let whole = request(2, br#"{"name":"x","notify_msg":"y"}"#);
        for length in 0..whole.len() {
            let mut stream = fixture.connect();
            stream.write_all(&whole[..length]).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
            assert_eq!(read_all(stream), b"");
        }
        assert_eq!(*fixture.engine.notifications.lock(), []);
        let mut stream = fixture.connect();
        stream.write_all(&whole).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        assert_ne!(read_all(stream), b"");
    }

    #[test]
    fn dripped_requests_are_served_within_the_deadline_only() {
        let fixture = start(patient());
        let mut stream = fixture.connect();
        stream.set_nodelay(true).unwrap();
        for byte in request(3, b"{}") {
            stream.write_all(&[byte]).unwrap();
        }
        assert_eq!(read_all(stream), request(3, PROBE_SUCCESS.as_bytes()));

        let fixture = start(impatient());
        let mut stream = fixture.connect();
        stream.write_all(&1_000_000u64.to_le_bytes()).unwrap();
        let dripped = (0..6000).find(|_| {
            std::thread::sleep(Duration::from_millis(10));
            stream.write_all(b"x").is_err()
        });
        assert!(dripped.is_some());
        fixture.check_alive();
    }

    #[test]
    fn idle_connections_delay_nobody() {
        let fixture = start(patient());
        let idle: Vec<_> = (0..100).map(|_| fixture.connect()).collect();
        for _ in 0..100 {
            fixture.check_alive();
        }
        for mut stream in idle {
            stream.write_all(&request(3, b"{}")).unwrap();
            assert_eq!(read_all(stream), request(3, PROBE_SUCCESS.as_bytes()));
        }
    }

    #[test]
    fn the_oldest_connection_makes_room_for_new_ones() {
        let fixture = start(Limits { connections: 8, ..patient() });
        let idle: Vec<_> = (0..20).map(|_| fixture.connect()).collect();
        fixture.check_alive();
        for (index, mut stream) in idle.into_iter().enumerate() {
            // 20 were let in and one probe: 13 had to go, in order.
            stream.write_all(&request(3, b"{}")).ok();
            let mut reply = Vec::new();
            let is_served = stream.read_to_end(&mut reply).is_ok() && !reply.is_empty();
            assert_eq!(is_served, index >= 13, "{index}");
        }
    }

    #[test]
    fn requests_up_to_the_limit_are_served_and_longer_ones_drained() {
        let fixture = start(patient());
        let limit = Config::default().handshake_max_length;
        let mut body = vec![b' '; limit - 1];
        body[..2].copy_from_slice(b"{}");
        assert_eq!(fixture.exchange(&request(3, &body)), request(3, PROBE_SUCCESS.as_bytes()));
        body.push(b' ');
        assert_eq!(fixture.exchange(&request(3, &body)), b"");
        body.resize(8 * limit, b' ');
        assert_eq!(fixture.exchange(&request(3, &body)), b"");
    }

    #[test]
    fn endless_requests_are_cut_off() {
        for length in [u64::MAX, 1 << 40, 0] {
            let fixture = start(Limits { discarded: 1 << 20, ..patient() });
            let mut stream = fixture.connect();
            stream.write_all(&length.to_le_bytes()).unwrap();
            let sent = (0..10_000).find(|_| stream.write_all(&[0; 64 << 10]).is_err());
            assert!(sent.is_some(), "{length}");
            fixture.check_alive();
        }
    }

    #[test]
    fn unfinished_requests_share_a_bounded_amount_of_memory() {
        let fixture = start(Limits { buffered: 4 << 20, ..patient() });
        let mut stopped = 0;
        let mut streams: Vec<_> = (0..32)
            .map(|_| {
                let mut stream = fixture.connect();
                stream.write_all(&(1u64 << 20).to_le_bytes()).unwrap();
                stopped += usize::from(stream.write_all(&vec![1; (1 << 20) - 1]).is_err());
                stream
            })
            .collect();
        fixture.check_alive();
        streams.iter().for_each(|stream| stream.set_nonblocking(true).unwrap());
        let is_waiting =
            |stream: &mut TcpStream| stream.read(&mut [0]).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
        let mut count = || streams.iter_mut().filter_map(|stream| is_waiting(stream).then_some(())).count();
        let (mut waiting, end) = (count(), Instant::now() + Duration::from_secs(20));
        // Those that are too many are closed once the server comes to them.
        while waiting > 4 && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
            waiting = count();
        }
        assert!((1..=4).contains(&waiting), "{waiting} waiting, {stopped} stopped early");
    }

    fn large() -> Engine {
        let piece: Arc<str> = "0123456789abcdef".repeat(64).into();
        Engine { descriptor: Some(vec![piece; 32 << 10]), ..Engine::default() }
    }

    #[test]
    fn large_replies_arrive_whole_while_others_are_served() {
        let fixture = start_with(large(), patient());
        let mut streams: Vec<_> = (0..3).map(|_| fixture.connect()).collect();
        for stream in &mut streams {
            stream.write_all(&request(1, b"{}")).unwrap();
        }
        fixture.check_alive();
        let expected = request(1, large().descriptor.unwrap().concat().as_bytes());
        for stream in streams {
            assert!(read_all(stream) == expected);
        }
    }

    #[test]
    fn peers_that_do_not_read_their_reply_are_dropped() {
        let fixture = start_with(large(), impatient());
        let mut stream = fixture.connect();
        stream.write_all(&request(1, b"{}")).unwrap();
        std::thread::sleep(Duration::from_secs(1));
        let mut reply = Vec::new();
        let _ = stream.read_to_end(&mut reply);
        assert!(reply.len() < 32 << 20, "{}", reply.len());
        fixture.check_alive();
    }

    #[test]
    fn peers_that_do_not_close_are_dropped() {
        let fixture = start(impatient());
        let mut stream = fixture.connect();
        stream.write_all(&request(3, b"{}")).unwrap();
        // A write after the server has closed is answered by a reset.
        let kept = (0..6000).find(|_| {
            std::thread::sleep(Duration::from_millis(10));
            stream.write_all(b"x").is_err()
        });
        assert!(kept.is_some());
    }

    #[test]
    fn stop_ends_all_connections_and_closes_the_port() {
        let fixture = start_with(large(), patient());
        let idle = fixture.connect();
        let mut reading = fixture.connect();
        reading.write_all(&[1, 2, 3]).unwrap();
        let mut writing = fixture.connect();
        writing.write_all(&request(1, b"{}")).unwrap();
        let mut closing = fixture.connect();
        closing.write_all(&request(3, b"{}")).unwrap();
        closing.read_exact(&mut [0; 9]).unwrap();
        fixture.check_alive();
        fixture.server.stop();
        for mut stream in [idle, reading, writing] {
            let mut rest = Vec::new();
            let _ = stream.read_to_end(&mut rest);
            assert!(rest.len() < 32 << 20);
        }
        let refused = TcpStream::connect((Ipv4Addr::LOCALHOST, fixture.port)).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        fixture.server.stop();
    }

    #[test]
    fn a_service_may_stop_its_own_server() {
        let Fixture { engine, server, port } = start(patient());
        assert!(engine.server.set(server).is_ok());
        let client = Client::new(&Config::default()).unwrap();
        let peer = HostPort { host: "127.0.0.1".into(), port };
        let _ = client.notify(&peer, &Notification { name: "stop".into(), message: String::new() });
        engine.server.wait().stop();
        assert_eq!(client.probe(&peer).unwrap_err().code(), Code::Socket);
    }

    #[test]
    fn a_connection_that_was_closed_is_not_reported_though_a_child_has_it_open() {
        let listener = Listener::bind(&Config::default(), 0).unwrap();
        let port = listener.port();
        let listener = listener.into_std().unwrap();
        let accepting = listener.try_clone().unwrap();
        accepting.set_nonblocking(false).unwrap();
        let (mut worker, _stop) = Worker::new(listener, Arc::new(Engine::default()), patient()).unwrap();
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        let accepted = accepting.accept().unwrap().0;
        // What a child of fork has, too.
        let _childs = accepted.try_clone().unwrap();
        worker.admit(accepted);
        drop(stream);
        let token = worker.next_token - 1;
        let mut events = Events::with_capacity(4);
        assert!(worker.epoll.wait(&mut events, Some(Duration::from_secs(30))).unwrap().any(|event| event.token == token));
        worker.step(token);
        assert!(worker.connections.is_empty());
        assert!(worker.epoll.wait(&mut events, Some(Duration::ZERO)).unwrap().all(|event| event.token != token));
    }

    #[test]
    fn accepting_goes_on_after_a_pause() {
        let listener = Listener::bind(&Config::default(), 0).unwrap();
        let port = listener.port();
        let (mut worker, stop) = Worker::new(listener.into_std().unwrap(), Arc::new(Engine::default()), patient()).unwrap();
        worker.pause_accepting(&io::Error::from_raw_os_error(libc::EMFILE));
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        // Nothing is reported while it pauses, though a connection waits.
        assert_eq!(worker.epoll.wait(&mut Events::with_capacity(4), Some(Duration::ZERO)).unwrap().len(), 0);
        let thread = std::thread::spawn(move || worker.run());
        stream.write_all(&request(3, b"{}")).unwrap();
        assert_eq!(read_all(stream), request(3, PROBE_SUCCESS.as_bytes()));
        stop.signal();
        thread.join().unwrap();
    }
}
