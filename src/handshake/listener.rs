//! Ports to listen on.
//!
//! A port is drawn by binding: the socket that got it is the one that listens later, so no other process can take it in between.
//! Until then peers are refused by the kernel. Ports on which connections of an earlier process are not quite over are drawn last: whoever
//! dies and starts again with a range of few ports finds no others. On those the kernel takes connections at once.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};

use socket2::{Domain, Socket, Type};

use crate::config::Config;
use crate::error::{Code, Error, Result};
use crate::sys::limits;

/// How many ports of the range are tried.
const ATTEMPTS: usize = 500;
/// Connections that may wait to be accepted on a data port. The kernel has a bound of its own.
const DATA_BACKLOG: i32 = 4096;

/// A socket that holds a port of this machine, on all its interfaces, and serves nobody yet.
#[derive(Debug)]
pub struct Listener {
    socket: Socket,
    port: u16,
    backlog: i32,
}

impl Listener {
    /// Draws a port from `MC_MIN_RPC_PORT` to `MC_MAX_RPC_PORT` for the handshake channel: of IPv4, or with `MC_USE_IPV6` of IPv6
    /// and IPv4 both.
    ///
    /// [`Code::Socket`]: none is free, or the family is not there. [`Code::Limit`]: no descriptor is left.
    pub fn draw(config: &Config) -> Result<Listener> {
        let (socket, port) = draw(config, config.use_ipv6).map_err(|error| explain_draw(config, &error))?;
        Ok(Listener { socket, port, backlog: backlog(config) })
    }

    /// Draws a port from the same range for the TCP transport: of IPv6 and IPv4 both where the machine has IPv6, else of IPv4.
    /// Errors as [`Listener::draw`].
    pub fn draw_data(config: &Config) -> Result<Listener> {
        let drawn = match draw(config, true) {
            Err(error) if is_family_missing(&error) => draw(config, false),
            drawn => drawn,
        };
        let (socket, port) = drawn.map_err(|error| explain_draw(config, &error))?;
        Ok(Listener { socket, port, backlog: DATA_BACKLOG })
    }

    /// Takes a given port for the handshake channel. Connections of an earlier process that are not quite over do not hinder it; 0
    /// lets the system choose.
    pub fn bind(config: &Config, port: u16) -> Result<Listener> {
        let bound = bind(config.use_ipv6, port, true);
        let (socket, port) = bound.map_err(|error| {
            let text = format!("handshake port {port} cannot be bound: {error}; choose another in the server name");
            Error::new(code_of(&error), text)
        })?;
        Ok(Listener { socket, port, backlog: backlog(config) })
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Begins to listen, for a caller that accepts by itself. The socket blocks.
    pub fn into_std(self) -> Result<TcpListener> {
        self.socket
            .listen(self.backlog)
            .and_then(|()| {
                // Of its connections, so that what is left of them when this process dies does not keep the port from the next one. Not
                // before it listens: others could bind the port as well.
                self.socket.set_reuse_address(true)
            })
            .map_err(|error| Error::new(code_of(&error), format!("port {} cannot be listened on: {error}", self.port)))?;
        Ok(self.socket.into())
    }
}

fn backlog(config: &Config) -> i32 {
    i32::try_from(config.handshake_backlog).unwrap_or(i32::MAX)
}

fn draw(config: &Config, ipv6: bool) -> io::Result<(Socket, u16)> {
    let mut ports: Vec<u16> = (config.min_rpc_port..=config.max_rpc_port).collect();
    let mut last_error = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for reuse_address in [false, true] {
        for attempt in 0..ATTEMPTS.min(ports.len()) {
            let drawn = attempt + random() as usize % (ports.len() - attempt);
            ports.swap(attempt, drawn);
            let bound = bind(ipv6, ports[attempt], reuse_address).and_then(|(socket, port)| {
                // Until one listens, several can be bound that reuse an address.
                if reuse_address {
                    socket.listen(1)?;
                }
                Ok((socket, port))
            });
            match bound {
                Err(error) if matches!(error.kind(), io::ErrorKind::AddrInUse | io::ErrorKind::PermissionDenied) => {
                    last_error = error
                }
                bound => return bound,
            }
        }
    }
    Err(last_error)
}

fn bind(ipv6: bool, port: u16, reuse_address: bool) -> io::Result<(Socket, u16)> {
    let domain = if ipv6 { Domain::IPV6 } else { Domain::IPV4 };
    let socket = Socket::new(domain, Type::STREAM, None)?;
    let any: SocketAddr = if ipv6 { (Ipv6Addr::UNSPECIFIED, port).into() } else { (Ipv4Addr::UNSPECIFIED, port).into() };
    if ipv6 {
        socket.set_only_v6(false)?;
    }
    if reuse_address {
        socket.set_reuse_address(true)?;
    }
    socket.bind(&any.into())?;
    let port = socket.local_addr()?.as_socket().map_or(port, |address| address.port());
    Ok((socket, port))
}

/// A number that differs between processes and between calls; the standard library's hash keys are random.
fn random() -> u64 {
    RandomState::new().hash_one(std::process::id())
}

fn is_family_missing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL))
}

fn code_of(error: &io::Error) -> Code {
    if limits::is_out_of_descriptors(error) { Code::Limit } else { Code::Socket }
}

fn explain_draw(config: &Config, error: &io::Error) -> Error {
    let advice = match error {
        _ if limits::is_out_of_descriptors(error) => "raise the limit of open files (ulimit -n)",
        _ if is_family_missing(error) => "this machine has no IPv6; unset MC_USE_IPV6",
        _ => "widen the range with MC_MIN_RPC_PORT and MC_MAX_RPC_PORT",
    };
    let (min, max) = (config.min_rpc_port, config.max_rpc_port);
    let text = format!("no port could be bound from {min} to {max} (up to {ATTEMPTS} are tried at random): {error}; {advice}");
    Error::new(code_of(error), text)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::net::TcpStream;
    use std::os::fd::AsRawFd;

    use super::*;

    fn config(min_rpc_port: u16, max_rpc_port: u16) -> Config {
        Config { min_rpc_port, max_rpc_port, ..Config::default() }
    }

    /// A hundred ports below those that the system gives out, most likely of this process alone.
    fn range() -> (u16, u16) {
        let first = 20_000 + (std::process::id() % 80) as u16 * 100;
        (first, first + 99)
    }

    #[test]
    fn many_draws_are_distinct_until_the_range_is_full() {
        let (min, max) = range();
        let config = config(min, max);
        let taken: Vec<_> = (min..min + 50).filter_map(|port| bind(false, port, false).ok()).collect();
        let threads = std::thread::scope(|scope| {
            let drawn = |_| scope.spawn(|| std::iter::from_fn(|| Listener::draw(&config).ok()).take(20).collect::<Vec<_>>());
            let threads: Vec<_> = (0..4).map(drawn).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        let ports: HashSet<u16> = threads.iter().map(Listener::port).chain(taken.iter().map(|(_, port)| *port)).collect();
        assert_eq!(ports.len(), threads.len() + taken.len());
        assert!(ports.len() > 90, "{}", ports.len());
        assert!(ports.iter().all(|port| (min..=max).contains(port)));

        let error = Listener::draw(&config).unwrap_err();
        assert_eq!(error.code(), Code::Socket);
        for part in [&*min.to_string(), &max.to_string(), "MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT", "in use"] {
            assert!(error.message().contains(part), "{error}");
        }
    }

    #[test]
    fn peers_are_refused_until_it_listens() {
        let listener = Listener::bind(&Config::default(), 0).unwrap();
        let address = (Ipv4Addr::LOCALHOST, listener.port());
        assert_eq!(TcpStream::connect(address).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        let listening = listener.into_std().unwrap();
        TcpStream::connect(address).unwrap();
        assert_eq!(listening.local_addr().unwrap().port(), address.1);
    }

    #[test]
    fn a_port_in_use_is_reported() {
        let config = Config::default();
        let holder = Listener::bind(&config, 0).unwrap();
        let port = holder.port();
        let holder = holder.into_std().unwrap();
        let error = Listener::bind(&config, port).unwrap_err();
        assert_eq!(error.code(), Code::Socket);
        assert!(error.message().contains(&port.to_string()), "{error}");
        drop(holder);
    }

    #[test]
    fn a_port_whose_connections_are_not_quite_over_is_drawn_when_there_is_no_other() {
        let listening = Listener::draw(&config(29_000, 29_999)).unwrap().into_std().unwrap();
        let port = listening.local_addr().unwrap().port();
        let config = config(port, port);
        assert_eq!(Listener::draw(&config).unwrap_err().code(), Code::Socket, "somebody listens");
        let client = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        // The side that closes first keeps the port for a minute.
        drop(listening.accept().unwrap());
        drop(client);
        drop(listening);
        assert_eq!(bind(false, port, false).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        let drawn = Listener::draw(&config).unwrap();
        assert_eq!(drawn.port(), port);
        assert_eq!(Listener::draw(&config).unwrap_err().code(), Code::Socket, "it is taken");
        drawn.into_std().unwrap();
    }

    #[test]
    fn data_ports_take_ipv4_and_ipv6() {
        let listener = Listener::draw_data(&config(28_000, 28_999)).unwrap();
        let port = listener.port();
        let listening = listener.into_std().unwrap();
        TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        if TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_ok() {
            TcpStream::connect((Ipv6Addr::LOCALHOST, port)).unwrap();
        }
        drop(listening);
    }

    #[test]
    fn descriptors_are_closed_by_exec() {
        let listener = Listener::bind(&Config::default(), 0).unwrap();
        let flags = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", listener.socket.as_raw_fd())).unwrap();
        let flags = flags.lines().find_map(|line| line.strip_prefix("flags:")).unwrap().trim();
        assert_ne!(i32::from_str_radix(flags, 8).unwrap() & libc::O_CLOEXEC, 0);
    }
}
