//! A metadata server for tests, which does with each connection what the test says.

use std::io::Read;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

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
    socket2::SockRef::from(&stream).set_linger(Some(std::time::Duration::ZERO)).unwrap();
}

/// Keeps a connection until the other side closes it.
pub(super) fn hold(mut stream: TcpStream) {
    let mut rest = [0; 4096];
    while matches!(stream.read(&mut rest), Ok(1..)) {}
}
