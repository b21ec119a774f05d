//! `te metadata-server`: keeps what engines tell each other, for clusters without a metadata server of their own.
//!
//! The interface is that of Mooncake's HTTP metadata servers. Values are in memory only: after a restart engines write theirs again.
//!
//! A connection is a task on one of a few threads. Whatever clients do, memory is bounded: by `--max-memory` for keys and values
//! ([`store`]), and by `--max-connections` times the two buffers of [`BUFFER`] bytes that a connection has at most. A client that stops
//! in the middle of a head, a value or an answer, or is idle, loses its connection after `--timeout`.

mod metrics;
mod service;
mod store;

use std::error::Error;
use std::future::poll_fn;
use std::io::{self, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use hyper::body::Incoming;
use hyper::header::CONNECTION;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_io_timeout::TimeoutStream;
use transfer_engine::sys::limits;

use crate::output;
use crate::size::parse_size;
use service::{Answer, Service};

/// Bytes of a head at most, and of each of a connection's two buffers.
const BUFFER: usize = 64 << 10;

/// Connections that the kernel holds until they are taken. A cluster that starts connects all at once.
const BACKLOG: u32 = 4096;

/// How long a client that was refused may take to read why, while what it still sends is thrown away. To close at once would make its
/// kernel throw the answer away.
const LINGER: Duration = Duration::from_secs(5);

/// Arguments of `te metadata-server`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Address and port to listen on; [::]:8080 is IPv6, and on most machines IPv4 too. There is no authentication: anyone who
    /// reaches the port can read, change and remove all. With port 0 the system draws one. The port is printed on standard output.
    #[arg(long, default_value = "0.0.0.0:8080", value_name = "HOST:PORT")]
    listen: String,
    /// Path of the metadata.
    #[arg(long, default_value = "/metadata", value_parser = parse_path)]
    path: String,
    /// Bytes that a value may have.
    #[arg(long, value_parser = parse_size, default_value = "64M", value_name = "SIZE")]
    max_value: usize,
    /// Bytes that keys and values may take together, those on their way included.
    #[arg(long, value_parser = parse_size, default_value = "4G", value_name = "SIZE")]
    max_memory: usize,
    /// Connections at a time; more are refused with status 503.
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1_000_000), value_name = "COUNT")]
    max_connections: u32,
    /// Seconds that a client may take for a head, for a value, until it reads on, and between requests.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=86_400), value_name = "SECONDS")]
    timeout: u64,
    /// Seconds that requests may take to end once the server is told to stop.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(..=86_400), value_name = "SECONDS")]
    grace: u64,
}

fn parse_path(text: &str) -> Result<String, String> {
    match text {
        "/health" | "/metrics" => Err("something else is at that path".to_string()),
        _ if text.starts_with('/') && !text.contains(['?', '#']) => Ok(text.to_string()),
        _ => Err("a path begins with / and has neither ? nor #".to_string()),
    }
}

/// Serves until SIGTERM or SIGINT.
pub fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    check_open_files(arguments.max_connections);
    let threads = std::thread::available_parallelism().map_or(1, |count| count.get().min(4));
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(threads).thread_name("te-metadata").enable_all().build()?;
    runtime.block_on(serve(arguments))
}

/// Lets the process hold as many connections as it is to take, or says that it cannot.
fn check_open_files(max_connections: u32) {
    let limit = limits::raise_open_files().or_else(|_| limits::open_files()).ok().and_then(|limit| limit.soft);
    // Some more are the server's own.
    if let Some(limit) = limit.filter(|limit| *limit < u64::from(max_connections) + 32) {
        eprintln!(
            "te: {limit} files may be open, too few for {max_connections} connections: raise `ulimit -n` or lower --max-connections"
        );
    }
}

async fn serve(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    // Before anyone can know the port, so that no signal finds them missing.
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let listener =
        listen(&arguments.listen).map_err(|error| format!("cannot listen on {} (--listen): {error}", arguments.listen))?;
    let address = listener.local_addr()?;
    output::print(&format!("{}\n", address.port()))?;
    eprintln!("te: the metadata server is on {address}: give engines http://HOST:{}{}", address.port(), arguments.path);

    let patience = Duration::from_secs(arguments.timeout);
    let service = Arc::new(Service::new(arguments.path.clone(), arguments.max_value, arguments.max_memory, patience));
    let max_connections = arguments.max_connections as usize;
    let free = Arc::new(Semaphore::new(max_connections));
    let (stop, stopped) = watch::channel(false);
    let mut connections = JoinSet::new();
    let mut is_accepting = true;
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => continue,
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
        };
        match accepted {
            Ok((stream, _)) => {
                is_accepting = true;
                let Ok(permit) = free.clone().try_acquire_owned() else {
                    service.metrics.refused_connections.fetch_add(1, Relaxed);
                    let _ = refuse(stream);
                    continue;
                };
                let connection = Connection { service: service.clone(), max_connections, free: free.clone(), _permit: permit };
                connections.spawn(connection.serve(stream, stopped.clone()));
            }
            Err(error) => {
                // Such as that too many files are open. It is logged once, not ten times a second.
                if std::mem::take(&mut is_accepting) {
                    eprintln!("te: cannot accept connections: {error}; trying again");
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
    drop(listener);
    eprintln!("te: the metadata server stops; {} keys are gone", service.keys());
    let _ = stop.send(true);
    let grace = Duration::from_secs(arguments.grace);
    let _ = timeout(grace, async { while connections.join_next().await.is_some() {} }).await;
    Ok(())
}

fn listen(address: &str) -> io::Result<TcpListener> {
    let mut fault = io::Error::new(io::ErrorKind::InvalidInput, "the host has no address");
    for address in address.to_socket_addrs()? {
        match bind(address) {
            Ok(listener) => return Ok(listener),
            Err(error) => fault = error,
        }
    }
    Err(fault)
}

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv6() { TcpSocket::new_v6() } else { TcpSocket::new_v4() }?;
    // Connections of a predecessor that are still being closed do not keep the port.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Tells a client that there are too many connections. The answer fits into the socket, so this does not wait.
fn refuse(stream: TcpStream) -> io::Result<()> {
    let text = "too many connections (--max-connections)\n";
    let head = "HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Type: text/plain; charset=utf-8\r\n";
    stream.into_std()?.write_all(format!("{head}Content-Length: {}\r\n\r\n{text}", text.len()).as_bytes())
}

/// What a connection needs of the server.
struct Connection {
    service: Arc<Service>,
    max_connections: usize,
    free: Arc<Semaphore>,
    _permit: OwnedSemaphorePermit,
}

impl Connection {
    /// Answers requests until the client or `stopped` ends that.
    async fn serve(self, stream: TcpStream, mut stopped: watch::Receiver<bool>) {
        let patience = self.service.timeout;
        // Answers are written whole.
        let _ = stream.set_nodelay(true);
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(patience));

        let has_unread = AtomicBool::new(false);
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(patience).max_buf_size(BUFFER).half_close(true);
        let answer = service_fn(|request| Box::pin(self.answer(request, &has_unread)));
        let mut connection = http.serve_connection(TokioIo::new(Box::pin(stream)), answer);
        let mut is_stopping = false;
        let end = loop {
            tokio::select! {
                end = poll_fn(|context| connection.poll_without_shutdown(context)) => break end,
                _ = stopped.changed(), if !is_stopping => {
                    is_stopping = true;
                    std::pin::Pin::new(&mut connection).graceful_shutdown();
                }
            }
        };
        let is_malformed = end.is_err_and(|error| error.is_parse());
        if is_malformed {
            self.service.metrics.malformed_requests.fetch_add(1, Relaxed);
        }
        let mut stream = connection.into_parts().io.into_inner();
        let _ = stream.shutdown().await;
        if is_malformed || has_unread.load(Relaxed) {
            let mut discarded = vec![0; BUFFER];
            let _ = timeout(LINGER, async { while stream.read(&mut discarded).await.is_ok_and(|length| length > 0) {} }).await;
        }
    }

    async fn answer(&self, request: Request<Incoming>, has_unread: &AtomicBool) -> Result<Answer, std::convert::Infallible> {
        let connections = self.max_connections - self.free.available_permits();
        let answer: Response<_> = self.service.answer(request, connections).await;
        has_unread.fetch_or(answer.headers().contains_key(CONNECTION), Relaxed);
        Ok(answer)
    }
}
