//! TCP connections to metadata servers, on which every call has an end.
//!
//! Time-outs of sockets bound one read or write, so a server that sends a byte a second would hold a caller for ever. A [`Connection`]
//! has a deadline instead, which all its reads and writes share.
//!
//! The system's look-up of names can be neither bounded nor interrupted. It therefore runs on a thread of its own, `te-resolve`, which
//! whoever asked leaves behind at the deadline. At most one such thread exists for each [`Server`], since callers share its answer. It
//! may outlive the engine, holds no lock meanwhile, and ends when the system gives up. Literal addresses need no thread.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::metadata::host_port::HostPort;
use crate::sys::{socket, thread};

/// How long making a connection may take, the look-up of the name included; upstream's.
pub(super) const CONNECT_LIMIT: Duration = Duration::from_millis(1500);

/// Where a metadata server listens.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) address: HostPort,
    look_up: fn(&str) -> io::Result<Vec<IpAddr>>,
    /// The look-up that is under way.
    pending: Mutex<Option<Arc<LookUp>>>,
}

#[derive(Debug, Default)]
struct LookUp {
    /// Errors are shared by those who wait, so they are texts.
    answer: Mutex<Option<Result<Vec<IpAddr>, String>>>,
    answered: Condvar,
}

impl Server {
    pub(super) fn new(address: HostPort) -> Arc<Server> {
        Arc::new(Server { address, look_up: ask_system, pending: Mutex::new(None) })
    }

    /// A new connection, to the first address that takes one. `end` is its deadline.
    pub(super) fn connect(self: &Arc<Self>, end: Instant) -> io::Result<Connection> {
        let connect_end = end.min(Instant::now() + CONNECT_LIMIT);
        let addresses = self.resolve(connect_end)?;
        let mut failure = io::Error::other(format!("host '{}' has no address", self.address.host));
        for (index, address) in addresses.iter().enumerate() {
            let address = SocketAddr::new(*address, self.address.port);
            // Later addresses get their share of the time, in case that earlier ones do not answer.
            let share = connect_end.saturating_duration_since(Instant::now()) / (addresses.len() - index) as u32;
            match TcpStream::connect_timeout(&address, share.max(Duration::from_millis(1))) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    return Ok(Connection { stream, end });
                }
                Err(error) => {
                    let text = format!("cannot connect to {address}: {error}; check that it runs and that no firewall is between");
                    failure = io::Error::new(error.kind(), text);
                }
            }
        }
        Err(failure)
    }

    fn resolve(self: &Arc<Self>, end: Instant) -> io::Result<Vec<IpAddr>> {
        if let Ok(address) = self.address.host.parse() {
            return Ok(vec![address]);
        }
        let look_up = {
            let mut pending = self.pending.lock();
            match &*pending {
                Some(look_up) => look_up.clone(),
                None => {
                    let look_up = Arc::new(LookUp::default());
                    let (server, shared) = (self.clone(), look_up.clone());
                    thread::spawn("te-resolve", move || {
                        let answer = (server.look_up)(&server.address.host).map_err(|error| error.to_string());
                        *server.pending.lock() = None;
                        *shared.answer.lock() = Some(answer);
                        shared.answered.notify_all();
                    })?;
                    pending.insert(look_up).clone()
                }
            }
        };
        let mut answer = look_up.answer.lock();
        while answer.is_none() {
            if look_up.answered.wait_until(&mut answer, end).timed_out() {
                let text = format!("the look-up of host '{}' takes longer than the call may", self.address.host);
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
        }
        match &*answer {
            Some(Ok(addresses)) => Ok(addresses.clone()),
            Some(Err(reason)) => Err(io::Error::other(format!("host '{}' cannot be resolved: {reason}", self.address.host))),
            None => Err(io::ErrorKind::TimedOut.into()),
        }
    }
}

fn ask_system(host: &str) -> io::Result<Vec<IpAddr>> {
    Ok((host, 0).to_socket_addrs()?.map(|address| address.ip()).collect())
}

/// What is left until `end`, never zero.
pub(super) fn remaining(end: Instant) -> io::Result<Duration> {
    match end.checked_duration_since(Instant::now()) {
        Some(left) if !left.is_zero() => Ok(left),
        _ => Err(io::ErrorKind::TimedOut.into()),
    }
}

/// A connection whose reads and writes fail with `TimedOut` from its deadline on. A lost peer raises no signal.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    end: Instant,
}

impl Connection {
    pub(super) fn set_end(&mut self, end: Instant) {
        self.end = end;
    }

    /// Whether the server has neither closed it nor sent what nobody asked for, as far as is known here.
    pub(super) fn is_quiet(&self) -> bool {
        matches!(socket::peek(&self.stream, &mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }
}

/// Sockets say `WouldBlock` when their time is over.
fn timed_out(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::WouldBlock { io::ErrorKind::TimedOut.into() } else { error }
}

impl Read for Connection {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(remaining(self.end)?))?;
        self.stream.read(buffer).map_err(timed_out)
    }
}

impl Write for Connection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(remaining(self.end)?))?;
        self.stream.write(bytes).map_err(timed_out)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether a connection was lost, as one is that the server closes while it is idle; a new one may fare better.
pub(super) fn is_lost(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, NotConnected, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | NotConnected | UnexpectedEof)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(50)
    }

    fn later() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    fn server(host: &str, port: u16, look_up: fn(&str) -> io::Result<Vec<IpAddr>>) -> Arc<Server> {
        Arc::new(Server { address: HostPort { host: host.into(), port }, look_up, pending: Mutex::new(None) })
    }

    #[test]
    fn a_look_up_that_hangs_holds_nobody_and_is_not_made_twice() {
        static CALLS: AtomicUsize = AtomicUsize::new(0);
        static RELEASE: Mutex<bool> = Mutex::new(false);
        fn hang(_: &str) -> io::Result<Vec<IpAddr>> {
            CALLS.fetch_add(1, Ordering::SeqCst);
            while !*RELEASE.lock() {
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(vec!["127.0.0.1".parse().unwrap()])
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = server("hangs", listener.local_addr().unwrap().port(), hang);
        for _ in 0..3 {
            assert_eq!(server.connect(soon()).unwrap_err().kind(), io::ErrorKind::TimedOut);
        }
        assert_eq!(CALLS.load(Ordering::SeqCst), 1);
        *RELEASE.lock() = true;
        while server.pending.lock().is_some() {
            std::thread::yield_now();
        }
        server.connect(later()).unwrap();
        assert_eq!(CALLS.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn a_name_that_is_nobodys_is_named() {
        let server = server("nobody", 1, |_| Err(io::Error::other("no such name")));
        let text = server.connect(later()).unwrap_err().to_string();
        assert_eq!(text, "host 'nobody' cannot be resolved: no such name");
    }

    #[test]
    fn the_next_address_is_tried_when_one_refuses() {
        let listener = TcpListener::bind("127.0.0.2:0").unwrap();
        let both = |_: &str| Ok(vec!["127.0.0.3".parse().unwrap(), "127.0.0.2".parse().unwrap()]);
        server("two", listener.local_addr().unwrap().port(), both).connect(later()).unwrap();
    }

    #[test]
    fn reads_and_writes_end_at_the_deadline_whatever_arrives_until_then() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = Server::new(HostPort { host: "127.0.0.1".into(), port: listener.local_addr().unwrap().port() });
        let mut connection = server.connect(later()).unwrap();
        let mut far = listener.accept().unwrap().0;
        // A byte now and then, which time-outs of single reads would take for progress.
        let dribble = std::thread::spawn(move || {
            while far.write_all(b"x").is_ok() {
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        connection.set_end(soon());
        let mut buffer = Vec::new();
        assert_eq!(connection.read_to_end(&mut buffer).unwrap_err().kind(), io::ErrorKind::TimedOut);
        connection.set_end(soon());
        let block = vec![0; 1 << 20];
        let error = std::iter::from_fn(|| connection.write_all(&block).err().map_or(Some(None), |error| Some(Some(error))));
        assert_eq!(error.flatten().next().unwrap().kind(), io::ErrorKind::TimedOut);
        drop(connection);
        dribble.join().unwrap();
    }

    #[test]
    fn a_connection_that_was_closed_or_written_to_is_not_quiet() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = Server::new(HostPort { host: "127.0.0.1".into(), port: listener.local_addr().unwrap().port() });
        for what in [&b""[..], b"x"] {
            let connection = server.connect(later()).unwrap();
            let mut far = listener.accept().unwrap().0;
            assert!(connection.is_quiet());
            far.write_all(what).unwrap();
            drop(far);
            while connection.is_quiet() {
                std::thread::yield_now();
            }
        }
    }
}
