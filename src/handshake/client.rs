//! The asking side of the handshake channel.
//!
//! Every request makes one connection on the caller's thread, sends one frame, reads one frame and closes at once: upstream's server
//! answers nobody else until then. A request waits for its socket and for [`Client::cancel`] together, so nothing but name
//! resolution outlasts a cancel. Any number of threads may ask at a time; a request uses two descriptors.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;
use socket2::{Domain, Socket, Type};

use super::Notification;
use super::address::HostPort;
use super::frame::{self, Fault, Kind};
use crate::config::Config;
use crate::error::{Code, Error, Result};
use crate::metadata::host_port::is_ipv6_literal;
use crate::metadata::{excerpt, write_json, write_json_string};
use crate::sys::epoll::{Epoll, Events, Interest};
use crate::sys::event::EventFd;
use crate::sys::limits;

/// Longest reply that is accepted: a descriptor of some two million buffers.
const REPLY_MAX: usize = 128 << 20;
/// How long a request may take once it is connected.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// How long the peer may pause.
    pause: Duration,
    /// The request and its reply in all.
    total: Duration,
}

const LIMITS: Limits = Limits { pause: Duration::from_secs(60), total: Duration::from_secs(300) };

const TOKEN_PEER: u64 = 0;
const TOKEN_CANCEL: u64 = 1;

/// Where a peer's handshake channel is: known, or to be looked up, in which case it may be out of date.
pub trait Whereabouts {
    /// Where it is as far as is known. May block.
    fn address(&self) -> Result<HostPort>;

    /// Nobody could be connected to at `failed`: where to try once more, if anywhere. May block.
    fn other_address(&self, failed: &HostPort) -> Option<HostPort>;
}

impl Whereabouts for HostPort {
    fn address(&self) -> Result<HostPort> {
        Ok(self.clone())
    }

    fn other_address(&self, _failed: &HostPort) -> Option<HostPort> {
        None
    }
}

/// Asks other engines. Calls block, at most for the time-outs; any thread may call.
///
/// Errors of every request: [`Code::Dns`], the host cannot be resolved; [`Code::Socket`], no connection, it broke, or the reply is not
/// one; [`Code::MalformedJson`], the reply cannot be read; [`Code::Canceled`], see [`Client::cancel`].
#[derive(Debug)]
pub struct Client {
    use_ipv6: bool,
    connect_timeout: Duration,
    limits: Limits,
    cancel: EventFd,
    is_cancelled: AtomicBool,
}

impl Client {
    /// [`Code::Limit`] if no descriptor is left.
    pub fn new(config: &Config) -> Result<Client> {
        let cancel = EventFd::new().map_err(|error| {
            Error::new(
                Code::Limit,
                format!("no descriptor for the handshake client: {error}; raise the limit of open files (ulimit -n)"),
            )
        })?;
        Ok(Client {
            use_ipv6: config.use_ipv6,
            connect_timeout: config.handshake_connect_timeout,
            limits: LIMITS,
            cancel,
            is_cancelled: AtomicBool::new(false),
        })
    }

    /// Ends all requests, those under way and those to come, with [`Code::Canceled`].
    pub fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Release);
        self.cancel.signal();
    }

    /// The peer's descriptor as JSON text, up to 128 MiB. [`Code::Metadata`] when the peer has none yet.
    ///
    /// `own` is a descriptor of this engine, which the protocol asks for and peers do not use: it need not name any buffer.
    pub fn fetch_descriptor(&self, peer: &HostPort, own: &str) -> Result<Vec<u8>> {
        let (_, descriptor) = self.exchange(peer, Kind::Metadata, own)?;
        if descriptor.trim_ascii() == b"null" {
            let text = format!("{peer} has no segment descriptor yet: it has installed no transport; try again when it has");
            return Err(Error::new(Code::Metadata, text));
        }
        Ok(descriptor)
    }

    /// Sends a notification, once: it is never repeated on a second connection. [`Code::Metadata`] when the peer refuses it.
    pub fn notify(&self, peer: &impl Whereabouts, notification: &Notification) -> Result<()> {
        let mut body = String::from("{\"name\":");
        write_json_string(&notification.name, &mut body);
        body.push_str(",\"notify_msg\":");
        write_json_string(&notification.message, &mut body);
        body.push_str("}\n");
        let (peer, reply) = self.exchange(peer, Kind::Notify, &body)?;
        match serde_json::from_slice::<Value>(&reply) {
            Ok(Value::Object(members)) => match members.get("notify_msg") {
                None | Some(Value::Null) => Err(refused_notification(&peer)),
                Some(Value::String(answer)) if answer.is_empty() => Err(refused_notification(&peer)),
                Some(Value::String(_)) => Ok(()),
                Some(_) => Err(malformed(&peer, &reply, "notify_msg is no text")),
            },
            Ok(Value::Null) => Err(refused_notification(&peer)),
            Ok(_) => Err(malformed(&peer, &reply, "it is no object")),
            Err(error) => Err(malformed(&peer, &reply, &error.to_string())),
        }
    }

    /// Sends an RDMA connection request and returns the reply, both JSON objects. What the reply says is not looked at.
    pub fn request_connection(&self, peer: &impl Whereabouts, request: &Value) -> Result<Value> {
        let mut body = String::new();
        write_json(request, &mut body);
        body.push('\n');
        let (peer, reply) = self.exchange(peer, Kind::Connection, &body)?;
        match serde_json::from_slice::<Value>(&reply) {
            Ok(answer @ Value::Object(_)) => Ok(answer),
            Ok(_) => Err(malformed(&peer, &reply, "it is no object")),
            Err(error) => Err(malformed(&peer, &reply, &error.to_string())),
        }
    }

    /// Asks whether anybody takes connections there. Nothing is sent.
    pub fn reach(&self, peer: &HostPort) -> Result<()> {
        self.connect(peer).map(drop)
    }

    /// Asks whether the peer is alive.
    pub fn probe(&self, peer: &impl Whereabouts) -> Result<()> {
        let (peer, reply) = self.exchange(peer, Kind::Probe, "{}\n")?;
        serde_json::from_slice::<serde::de::IgnoredAny>(&reply).map_err(|error| malformed(&peer, &reply, &error.to_string()))?;
        Ok(())
    }

    /// One request and the JSON of its reply, and who was asked.
    fn exchange(&self, whereabouts: &impl Whereabouts, kind: Kind, body: &str) -> Result<(HostPort, Vec<u8>)> {
        let mut peer = whereabouts.address()?;
        let connection = match self.connect(&peer) {
            Ok(connection) => connection,
            Err(error) if error.code() == Code::Canceled => return Err(error),
            Err(error) => {
                peer = whereabouts.other_address(&peer).ok_or(error)?;
                self.connect(&peer)?
            }
        };
        let failed = |what: &str, reason: String| self.explain(format!("{what} {peer} ({}): {reason}", connection.address), "");
        let mut request = frame::header(kind, body.len());
        request.extend(body.as_bytes());
        if let Err(error) = (&connection).write_all(&request) {
            let reason = format!("{error}; it has {} bytes, the peer's MC_HANDSHAKE_MAX_LENGTH may be less", request.len());
            return Err(failed("a handshake request could not be sent to", reason));
        }
        let mut reader = frame::Reader::new(REPLY_MAX);
        loop {
            match reader.advance(&mut &connection) {
                Ok(true) => break,
                Ok(false) => {}
                Err(fault) => {
                    let reason = match fault {
                        Fault::Io(error) => error.to_string(),
                        Fault::Closed { received } => {
                            format!("it closed the connection after {received} bytes; it does not know the request, or refused it")
                        }
                        Fault::Empty => "it announced an empty reply; it is not an engine".into(),
                        Fault::TooLong { length } => {
                            format!("it announced {length} bytes, more than {REPLY_MAX}; it is not an engine")
                        }
                    };
                    return Err(failed("no reply to a handshake request from", reason));
                }
            }
        }
        match Kind::split(reader.payload()) {
            Some((replied, text)) if replied == kind => Ok((peer, text.to_vec())),
            replied => {
                let replied = replied.map(|(replied, _)| replied);
                Err(failed(
                    "wrong reply to a handshake request from",
                    format!("sent {kind:?}, got {replied:?}; it is not an engine"),
                ))
            }
        }
    }

    /// Addresses of the family that `MC_USE_IPV6` asks for; literals of either family are taken as they are.
    fn resolve(&self, peer: &HostPort) -> Result<Vec<SocketAddr>> {
        let is_literal = is_ipv6_literal(&peer.host) || peer.host.parse::<IpAddr>().is_ok();
        let family = if self.use_ipv6 { "IPv6" } else { "IPv4" };
        let (addresses, reason) = match (peer.host.as_str(), peer.port).to_socket_addrs() {
            Ok(addresses) => (addresses.collect(), format!("it has no {family} address (MC_USE_IPV6 chooses the family)")),
            Err(error) => (Vec::new(), error.to_string()),
        };
        let fits = |address: &SocketAddr| is_literal || address.is_ipv6() == self.use_ipv6;
        let addresses: Vec<SocketAddr> = addresses.into_iter().filter(fits).collect();
        if addresses.is_empty() {
            let host = excerpt(&peer.host);
            return Err(Error::new(
                Code::Dns,
                format!("host '{host}' of a peer cannot be resolved: {reason}; check the segment name"),
            ));
        }
        Ok(addresses)
    }

    /// A connection to the first address that takes one.
    fn connect(&self, peer: &HostPort) -> Result<Connection<'_>> {
        let mut reasons = Vec::new();
        let mut at_limit = false;
        for address in self.resolve(peer)? {
            match Connection::open(self, address) {
                Ok(connection) => return Ok(connection),
                Err(error) => {
                    at_limit |= limits::is_out_of_descriptors(&error);
                    reasons.push(format!("{address}: {error}"));
                }
            }
            if self.is_cancelled.load(Ordering::Acquire) {
                break;
            }
        }
        let text = format!("cannot connect to the handshake port of {peer} ({})", reasons.join("; "));
        if at_limit {
            return Err(Error::new(Code::Limit, text + "; raise the limit on open files (ulimit -n)"));
        }
        Err(self.explain(text, "; check that the peer runs and that no firewall is between"))
    }

    /// The error of a request that failed, or was made to fail.
    fn explain(&self, text: String, advice: &str) -> Error {
        if self.is_cancelled.load(Ordering::Acquire) {
            return Error::quiet(Code::Canceled, format!("the engine is shutting down; {text}"));
        }
        Error::new(Code::Socket, text + advice)
    }
}

fn refused_notification(peer: &HostPort) -> Error {
    Error::new(Code::Metadata, format!("{peer} refused a notification: its reply is empty"))
}

fn malformed(peer: &HostPort, reply: &[u8], reason: &str) -> Error {
    let reason = excerpt(reason);
    Error::new(Code::MalformedJson, format!("the reply of {peer}, {} bytes, cannot be read: {reason}", reply.len()))
}

/// A connection whose reads and writes look blocking, and end at their deadlines or by a cancel.
struct Connection<'a> {
    client: &'a Client,
    address: SocketAddr,
    stream: TcpStream,
    epoll: Epoll,
    end: Instant,
}

impl<'a> Connection<'a> {
    fn open(client: &'a Client, address: SocketAddr) -> io::Result<Connection<'a>> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        socket.set_tcp_nodelay(true)?;
        let connected = match socket.connect(&address.into()) {
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => false,
            result => result.map(|()| true)?,
        };
        let epoll = Epoll::new()?;
        epoll.add(&client.cancel, Interest::READ, TOKEN_CANCEL)?;
        epoll.add(&socket, Interest::NONE, TOKEN_PEER)?;
        let stream = TcpStream::from(socket);
        let connection = Connection { client, address, stream, epoll, end: Instant::now() + client.limits.total };
        if !connected {
            connection.wait(Interest::WRITE, client.connect_timeout)?;
            if let Some(error) = connection.stream.take_error()? {
                return Err(error);
            }
        }
        // A port that nobody listens on may connect to itself when the system gives it out as the source.
        if connection.stream.local_addr()? == connection.stream.peer_addr()? {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        Ok(connection)
    }

    /// Waits until the socket is ready, for at most `limit` and not beyond the end of the whole request.
    fn wait(&self, interest: Interest, limit: Duration) -> io::Result<()> {
        let limit = limit.min(self.end.saturating_duration_since(Instant::now()));
        self.epoll.modify(&self.stream, interest, TOKEN_PEER)?;
        let mut events = Events::with_capacity(2);
        let mut ready = self.epoll.wait(&mut events, Some(limit))?;
        if limit.is_zero() {
            return Err(io::Error::new(io::ErrorKind::TimedOut, format!("it took longer than {:?}", self.client.limits.total)));
        }
        if ready.len() == 0 {
            return Err(io::Error::new(io::ErrorKind::TimedOut, format!("nothing happened for {limit:?}")));
        }
        if ready.any(|event| event.token == TOKEN_CANCEL) || self.client.is_cancelled.load(Ordering::Acquire) {
            return Err(io::Error::other("cancelled"));
        }
        Ok(())
    }
}

impl Read for &Connection<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match (&self.stream).read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait(Interest::READ, self.client.limits.pause)?,
                result => return result,
            }
        }
    }
}

impl Write for &Connection<'_> {
    /// The standard library sends with `MSG_NOSIGNAL`.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match (&self.stream).write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait(Interest::WRITE, self.client.limits.pause)?,
                result => return result,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr, TcpListener};
    use std::sync::Arc;
    use std::thread::JoinHandle;

    use parking_lot::Mutex;

    use super::super::{Listener, Server, Service};
    use super::*;
    use crate::metadata::SegmentDescriptor;
    use crate::sys::interfaces;

    struct Engine {
        descriptor: Option<Arc<str>>,
        notifications: Mutex<Vec<Notification>>,
    }

    impl Service for Engine {
        fn describe(&self) -> Option<Vec<Arc<str>>> {
            self.descriptor.clone().map(|text| vec![text])
        }
        fn notify(&self, notification: Notification) -> bool {
            self.notifications.lock().push(notification);
            true
        }
        fn connect(&self, _: &Value) -> Option<Value> {
            None
        }
    }

    fn start(descriptor: Option<&str>, config: &Config, host: &str) -> (Server, HostPort, Arc<Engine>) {
        let engine = Arc::new(Engine { descriptor: descriptor.map(Arc::from), notifications: Mutex::default() });
        let listener = Listener::bind(config, 0).unwrap();
        let peer = HostPort { host: host.into(), port: listener.port() };
        (Server::start(listener, engine.clone(), config).unwrap(), peer, engine)
    }

    fn client() -> Client {
        Client::new(&Config::default()).unwrap()
    }

    fn local(port: u16) -> HostPort {
        HostPort { host: "127.0.0.1".into(), port }
    }

    fn message(name: &str, message: &str) -> Notification {
        Notification { name: name.into(), message: message.into() }
    }

    /// A peer that reads one request and answers with given bytes. The thread ends with the request.
    fn scripted(reply: &[u8]) -> (HostPort, JoinHandle<Vec<u8>>) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let peer = local(listener.local_addr().unwrap().port());
        let reply = reply.to_vec();
        let thread = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = vec![0; 8];
            stream.read_exact(&mut request).unwrap();
            let length = u64::from_le_bytes(request[..8].try_into().unwrap()) as usize;
            request.resize(8 + length, 0);
            stream.read_exact(&mut request[8..]).unwrap();
            stream.write_all(&reply).unwrap();
            request
        });
        (peer, thread)
    }

    fn reply(kind: u8, body: &[u8]) -> Vec<u8> {
        [&(body.len() as u64 + 1).to_le_bytes()[..], &[kind], body].concat()
    }

    #[test]
    fn requests_are_answered() {
        let (_server, peer, engine) = start(Some("{\"protocol\":\"tcp\"}\n"), &Config::default(), "localhost");
        let client = client();
        client.probe(&peer).unwrap();
        assert_eq!(client.fetch_descriptor(&peer, "{}").unwrap(), b"{\"protocol\":\"tcp\"}\n");
        let notifications = [message("näme", "\u{1F600}\n\0"), message("", ""), message("x", &"y".repeat(1 << 19))];
        for notification in &notifications {
            client.notify(&peer, notification).unwrap();
        }
        assert_eq!(*engine.notifications.lock(), notifications);
    }

    #[test]
    fn ipv6_literals_work_with_and_without_the_ipv6_setting() {
        if TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_err() {
            eprintln!("skipped: no IPv6 here");
            return;
        }
        let config = Config { use_ipv6: true, ..Config::default() };
        let (_server, peer, _) = start(None, &config, "::1");
        let client_ipv6 = Client::new(&config).unwrap();
        for client in [&client_ipv6, &client()] {
            client.probe(&peer).unwrap();
            client.probe(&local(peer.port)).unwrap();
            for interface in interfaces::list().unwrap() {
                if matches!(interface.address, IpAddr::V6(address) if address.is_unicast_link_local()) {
                    let host = format!("{}%{}", interface.address, interface.name);
                    client.probe(&HostPort { host, port: peer.port }).unwrap();
                }
            }
        }
    }

    #[test]
    fn frames_are_those_of_the_wire() {
        let (peer, thread) = scripted(&reply(2, b"{\"name\":\"\",\"notify_msg\":\"success\"}\n"));
        client().notify(&peer, &message("a\"", "é")).unwrap();
        assert_eq!(thread.join().unwrap(), reply(2, b"{\"name\":\"a\\\"\",\"notify_msg\":\"\\u00e9\"}\n"));
        let (peer, thread) = scripted(&reply(1, b"{\"x\":1}"));
        assert_eq!(client().fetch_descriptor(&peer, "{\"own\":0}\n").unwrap(), b"{\"x\":1}");
        assert_eq!(thread.join().unwrap(), reply(1, b"{\"own\":0}\n"));
    }

    #[test]
    fn a_peer_without_descriptor_is_an_error() {
        let (_server, peer, _) = start(None, &Config::default(), "127.0.0.1");
        let error = client().fetch_descriptor(&peer, "{}").unwrap_err();
        assert_eq!(error.code(), Code::Metadata);
        assert!(error.message().contains(&peer.to_string()), "{error}");
    }

    #[test]
    fn failures_have_their_codes() {
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
        let error = client().probe(&local(free)).unwrap_err();
        assert_eq!(error.code(), Code::Socket);
        assert!(error.message().contains(&format!("127.0.0.1:{free}")) && error.message().contains("refused"), "{error}");

        let error = client().probe(&HostPort { host: "x".repeat(300), port: 1 }).unwrap_err();
        assert_eq!(error.code(), Code::Dns);

        for (kind, answer, code) in [
            (Kind::Probe, &b""[..], Code::Socket),
            (Kind::Probe, &[9, 0, 0, 0, 0, 0, 0, 0, 3], Code::Socket),
            (Kind::Probe, &[0; 8], Code::Socket),
            (Kind::Probe, &[0xff; 8], Code::Socket),
            (Kind::Probe, &reply(2, b"{}"), Code::Socket),
            (Kind::Probe, &reply(0x80, b"{}"), Code::Socket),
            (Kind::Probe, &reply(b'{', b"}"), Code::Socket),
            (Kind::Probe, &reply(3, b"{"), Code::MalformedJson),
            (Kind::Notify, &reply(2, b"{\"notify_msg\":\"\"}"), Code::Metadata),
            (Kind::Notify, &reply(2, b"{}"), Code::Metadata),
            (Kind::Notify, &reply(2, b"null\n"), Code::Metadata),
            (Kind::Notify, &reply(2, b"{\"notify_msg\":5}"), Code::MalformedJson),
            (Kind::Notify, &reply(2, b"[]"), Code::MalformedJson),
            (Kind::Notify, &reply(2, b"x"), Code::MalformedJson),
            (Kind::Notify, &reply(2, &[b'['; 100_000]), Code::MalformedJson),
            (Kind::Metadata, &reply(1, b" null\n"), Code::Metadata),
            (Kind::Metadata, &reply(0, b"{}"), Code::Socket),
        ] {
            let (peer, thread) = scripted(answer);
            let client = client();
            let error = match kind {
                Kind::Probe => client.probe(&peer).unwrap_err(),
                Kind::Notify => client.notify(&peer, &message("a", "b")).unwrap_err(),
                _ => client.fetch_descriptor(&peer, "{}").unwrap_err(),
            };
            assert_eq!(error.code(), code, "{answer:?}: {error}");
            assert!(error.message().contains(&peer.to_string()), "{error}");
            thread.join().unwrap();
        }
    }

    #[test]
    fn large_replies_are_accepted_beyond_the_limit_of_requests() {
        let text = format!("{{\"protocol\":\"tcp\",\"x\":\"{}\"}}", "y".repeat(8 << 20));
        let (_server, peer, _) = start(Some(&text), &Config::default(), "127.0.0.1");
        let fetched = client().fetch_descriptor(&peer, "{}").unwrap();
        assert_eq!(fetched.len(), text.len());
        assert_eq!(SegmentDescriptor::decode(&fetched, &peer).unwrap().protocols, ["tcp"]);
    }

    #[test]
    fn cancel_ends_requests_that_wait_and_those_to_come() {
        let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let peer = local(silent.local_addr().unwrap().port());
        let client = client();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| client.fetch_descriptor(&peer, "{}"));
            let (mut stream, _) = silent.accept().unwrap();
            stream.read_exact(&mut [0; 11]).unwrap();
            client.cancel();
            assert_eq!(waiting.join().unwrap().unwrap_err().code(), Code::Canceled);
        });
        assert_eq!(client.probe(&peer).unwrap_err().code(), Code::Canceled);
    }

    #[test]
    fn peers_that_are_silent_or_never_come_to_an_end_are_given_up() {
        assert!(LIMITS.pause <= Duration::from_secs(60) && LIMITS.total <= Duration::from_secs(300));
        for drips in [false, true] {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            let peer = local(listener.local_addr().unwrap().port());
            let script = std::thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                stream.write_all(&reply(1, &[b' '; 100_000])[..100]).unwrap();
                while drips && stream.write_all(b" ").is_ok() {
                    std::thread::sleep(Duration::from_millis(5));
                }
                stream
            });
            let limits =
                Limits { pause: Duration::from_millis(if drips { 60_000 } else { 50 }), total: Duration::from_millis(500) };
            let client = Client { limits, ..client() };
            let started = Instant::now();
            let error = client.fetch_descriptor(&peer, "{}").unwrap_err();
            assert!(error.code() == Code::Socket && error.message().contains(&peer.to_string()), "{error}");
            assert!(started.elapsed() < Duration::from_secs(20), "{drips}");
            drop(script.join());
        }
    }

    #[test]
    fn connecting_ends_at_its_time_out() {
        let full = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        full.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
        full.listen(0).unwrap();
        let address = full.local_addr().unwrap().as_socket().unwrap();
        // A queue that is full makes the kernel drop further attempts.
        let waiting = [0; 4].map(|_| {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
            socket.set_nonblocking(true).unwrap();
            let _ = socket.connect(&address.into());
            socket
        });
        let config = Config { handshake_connect_timeout: Duration::from_millis(50), ..Config::default() };
        let error = Client::new(&config).unwrap().probe(&local(address.port())).unwrap_err();
        assert_eq!(error.code(), Code::Socket);
        assert!(error.message().contains("nothing happened for 50ms"), "{error}");
        drop(waiting);
    }
}
