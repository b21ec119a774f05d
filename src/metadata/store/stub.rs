//! A metadata server for tests, which does with each connection what the test says.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::Store;
use crate::error::Code;

/// A text in the pieces in which a publisher hands it over.
pub(super) fn pieces(text: &[&str]) -> Vec<Arc<str>> {
    text.iter().map(|piece| Arc::from(*piece)).collect()
}

/// Listens until it is dropped. Each connection has a thread.
pub(super) struct Stub {
    pub(super) address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    closed: AtomicBool,
    connections: AtomicUsize,
}

impl Stub {
    /// `serve` gets each connection and its number, from 0.
    pub(super) fn new(serve: impl Fn(TcpStream, usize) + Send + Sync + 'static) -> Stub {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared::default());
        let (serve, accepted) = (Arc::new(serve), shared.clone());
        let thread = std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                if accepted.closed.load(Ordering::SeqCst) {
                    return;
                }
                let number = accepted.connections.fetch_add(1, Ordering::SeqCst);
                let serve = serve.clone();
                std::thread::spawn(move || serve(stream, number));
            }
        });
        Stub { address, shared, thread: Some(thread) }
    }

    /// Connections so far.
    pub(super) fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::SeqCst)
    }
}

impl Drop for Stub {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
        let _ = self.thread.take().unwrap().join();
    }
}

/// Closes a connection in a way that the other side takes for a broken one.
pub(super) fn reset(stream: TcpStream) {
    socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
}

/// Keeps a connection until the other side closes it.
pub(super) fn hold(mut stream: TcpStream) {
    let mut rest = [0; 4096];
    while matches!(stream.read(&mut rest), Ok(1..)) {}
}

/// A request as an HTTP server sees it.
#[cfg(feature = "http")]
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) method: String,
    pub(super) target: String,
    /// The lines before the body, without the first.
    pub(super) head: String,
    pub(super) body: String,
}

/// The next request, or `None` if there is none any more.
#[cfg(feature = "http")]
pub(super) fn read_request(stream: &mut TcpStream) -> Option<Request> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).ok()?;
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap();
    let (first, head) = head.split_once("\r\n").unwrap();
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(": ")?;
        name.eq_ignore_ascii_case("content-length").then(|| value.parse::<usize>().unwrap())
    });
    let mut body = vec![0; length.unwrap_or(0)];
    stream.read_exact(&mut body).ok()?;
    let mut words = first.split(' ');
    Some(Request {
        method: words.next().unwrap().into(),
        target: words.next().unwrap().into(),
        head: head.to_lowercase(),
        body: String::from_utf8(body).unwrap(),
    })
}

/// Answers a request. The connection is kept.
#[cfg(feature = "http")]
pub(super) fn answer(stream: &mut TcpStream, status: u16, body: &str) {
    let text = format!("HTTP/1.1 {status} Said\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    // Whoever asked may be gone.
    let _ = stream.write_all(text.as_bytes());
}

/// Answers each request with what `reply` says, on connections that are kept.
#[cfg(feature = "http")]
pub(super) fn http_stub(reply: impl Fn(Request) -> (u16, String) + Send + Sync + 'static) -> Stub {
    Stub::new(move |mut stream, _| {
        while let Some(request) = read_request(&mut stream) {
            let (status, body) = reply(request);
            answer(&mut stream, status, &body);
        }
    })
}

/// What servers do that do not answer: nothing, a byte now and then, bytes without end.
pub(super) fn misbehave(mut stream: TcpStream, number: usize) {
    match number % 3 {
        0 => {}
        1 => {
            while stream.write_all(b"H").is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        _ => while stream.write_all(&[b'H'; 4096]).is_ok() {},
    }
    hold(stream);
}

/// An address where connections are not taken and not refused, as behind a firewall, while the value lives.
pub(super) fn unreachable() -> (SocketAddr, impl Sized) {
    let listener = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    listener.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    listener.listen(0).unwrap();
    let address = listener.local_addr().unwrap().as_socket().unwrap();
    // The queue of connections to be accepted is full with the first or the second.
    let waiting: Vec<_> = (0..4).map(|_| TcpStream::connect_timeout(&address, Duration::from_millis(100))).collect();
    assert!(waiting.last().unwrap().is_err());
    (address, (listener, waiting))
}

/// Has a store ask servers that do all that keeps a caller waiting; were there no deadline, this would not end. `greeting` begins a good
/// answer of a million bytes.
pub(super) fn assert_that_calls_end_whatever_the_server_does<S: Store>(
    connect: impl Fn(SocketAddr) -> S + Sync,
    greeting: &'static [u8],
) {
    let pause = || std::thread::sleep(Duration::from_millis(20));
    let ignores = Stub::new(misbehave);
    // Sends the beginning of a good answer, then the rest a byte at a time.
    let dribbles = Stub::new(move |mut stream: TcpStream, _| {
        let _ = stream.write_all(greeting);
        while stream.write_all(b"x").is_ok() {
            pause();
        }
    });
    // Takes a request a byte at a time.
    let sips = Stub::new(move |mut stream: TcpStream, _| {
        while stream.read_exact(&mut [0]).is_ok() {
            pause();
        }
    });
    let (nowhere, _waiting) = unreachable();
    let mut addresses = vec![ignores.address; 3];
    addresses.extend([dribbles.address, sips.address, nowhere]);
    let long = vec![Arc::<str>::from("x".repeat(1 << 20)); 16];
    let started = Instant::now();
    std::thread::scope(|scope| {
        for address in addresses {
            let (long, connect) = (&long, &connect);
            scope.spawn(move || {
                let store = connect(address);
                assert_eq!(store.put("key", long).unwrap_err().code(), Code::Metadata);
                assert_eq!(store.get("key").unwrap_err().code(), Code::Metadata);
            });
        }
    });
    assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
}
