//! Both ends of a connection on loopback.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use socket2::SockRef;
use transfer_engine::config::Config;
use transfer_engine::engine::{Engine, EngineOptions, PEER_TO_PEER};
use transfer_engine::handshake::Client;
use transfer_engine::handshake::address::HostPort;
use transfer_engine::metadata::SegmentDescriptor;

/// Far more than anything takes.
const PATIENCE: Duration = Duration::from_secs(20);

/// An engine with the TCP transport that lives as long as the process.
pub fn engine(config: Config) -> Arc<Engine> {
    let options = EngineOptions { metadata: PEER_TO_PEER.into(), server_name: "127.0.0.1".into(), ..EngineOptions::default() };
    let engine = Engine::create(&options, config).expect("an engine can be made");
    engine.install_transport("tcp", None).expect("TCP can be installed");
    engine
}

/// What an engine publishes.
pub fn descriptor_of(engine: &Engine) -> SegmentDescriptor {
    let client = Client::new(&Config::default()).expect("a client can be made");
    let text = client.fetch_descriptor(&HostPort::parse(&engine.address(), 0), "{}").expect("the engine answers");
    SegmentDescriptor::decode(&text, &"the target").expect("its descriptor is sound")
}

/// Sends bytes in pieces of up to `piece` bytes (0: at once) and says that there are no more. Returns all that comes back until the
/// peer says the same, and whether it ended in order, not by a reset.
pub fn exchange(port: u16, sent: &[u8], piece: usize) -> (Vec<u8>, bool) {
    let mut stream = TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).expect("the server accepts");
    // Closing by a reset keeps ports from running out: no end waits for stray segments.
    SockRef::from(&stream).set_linger(Some(Duration::ZERO)).expect("linger can be set");
    stream.set_nodelay(true).expect("it can be set");
    stream.set_read_timeout(Some(PATIENCE)).expect("it can be set");
    for piece in sent.chunks(if piece == 0 { usize::MAX } else { piece }) {
        // The server may have closed already.
        if stream.write_all(piece).is_err() {
            break;
        }
    }
    let _ = stream.shutdown(Shutdown::Write);
    let mut received = Vec::new();
    match stream.read_to_end(&mut received) {
        Ok(_) => (received, true),
        Err(error) if is_reset(&error) => (received, false),
        Err(error) => panic!("the server neither answers nor closes: {error}"),
    }
}

fn is_reset(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
}

/// A peer that answers every connection with the same bytes, whatever it is asked.
pub struct Parrot {
    port: u16,
    answer: Arc<Mutex<Vec<u8>>>,
}

impl Parrot {
    /// Begins to listen. `hear` reads the beginning of a request, up to where the answer is due.
    pub fn start(hear: fn(&mut TcpStream) -> io::Result<()>) -> Parrot {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port is free");
        let port = listener.local_addr().expect("it has an address").port();
        let answer: Arc<Mutex<Vec<u8>>> = Arc::default();
        let said = answer.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // One that breaks is the other side's affair, as is one that closes without a word.
                let _ = Parrot::serve(stream, hear, &said);
            }
        });
        Parrot { port, answer }
    }

    fn serve(mut stream: TcpStream, hear: fn(&mut TcpStream) -> io::Result<()>, answer: &Mutex<Vec<u8>>) -> io::Result<()> {
        stream.set_read_timeout(Some(PATIENCE))?;
        hear(&mut stream)?;
        let answer = answer.lock().map_or_else(|_| Vec::new(), |answer| answer.clone());
        stream.write_all(&answer)?;
        stream.shutdown(Shutdown::Write)?;
        let mut rest = [0; 4096];
        while stream.read(&mut rest)? > 0 {}
        Ok(())
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// From now on it answers with this.
    pub fn learn(&self, answer: &[u8]) {
        if let Ok(mut known) = self.answer.lock() {
            *known = answer.to_vec();
        }
    }
}
