//! Replies of a stranger on data connections: every transfer ends, what is said to be read was sent, and no other memory is written.

use std::io::{self, Read};
use std::net::TcpStream;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use transfer_engine::config::Config;
use transfer_engine::engine::Engine;
use transfer_engine::handshake::{Listener, Notification, Server, Service};
use transfer_engine::sys::MemoryRange;
use transfer_engine::transfer::{Hints, Request, State, SubmitOptions};
use transfer_engine::transport::Opcode;

use super::arena::Arena;
use super::input::Input;
use super::loopback::{self, Parrot};

const BASE: u64 = 0x2100_0000_0000;
const PAGE: usize = 4096;
const REQUESTS: usize = 4;
const REMOTE: u64 = 0x10000;
/// Of the local ranges, in their pages.
const OFFSET: usize = 256;
const LONGEST: usize = 600;

struct Stranger {
    arena: Arena,
    engine: Arc<Engine>,
    parrot: Parrot,
    /// Segments of the first and the second version of the protocol.
    names: [String; 2],
    _servers: [Server; 2],
}

/// Says where the parrot is.
struct Descriptor(Arc<str>);

impl Service for Descriptor {
    fn describe(&self) -> Option<Vec<Arc<str>>> {
        Some(vec![self.0.clone()])
    }
    fn notify(&self, _: Notification) -> bool {
        false
    }
    fn connect(&self, _: &serde_json::Value) -> Option<serde_json::Value> {
        None
    }
}

impl Stranger {
    fn meet() -> Stranger {
        // Requests travel on one connection after the other, so that an input always meets the same.
        let engine = loopback::engine(Config { tcp_lanes_per_peer: 1, ..Config::default() });
        let parrot = Parrot::start(hear);
        let segments = [1, 2].map(|version| {
            let config = Config::default();
            let listener = Listener::draw(&config).expect("a port is free");
            let name = format!("127.0.0.1:{}", listener.port());
            let text = format!(
                r#"{{"buffers":[{{"addr":{REMOTE},"length":1048576,"name":"x"}}],"name":"{name}","protocol":"tcp","tcp_data_port":{},"tcp_proto_version":{version}}}"#,
                parrot.port()
            );
            let server = Server::start(listener, Arc::new(Descriptor(text.into())), &config).expect("it can be served");
            (name, server)
        });
        let [(first, first_server), (second, second_server)] = segments;
        let (names, _servers) = ([first, second], [first_server, second_server]);
        Stranger { arena: Arena::map(BASE as usize, REQUESTS * PAGE), engine, parrot, names, _servers }
    }
}

/// The version, the number of requests, direction and length of each, and then what every connection is answered.
#[allow(unsafe_code)]
pub fn run(data: &[u8]) {
    static STRANGER: OnceLock<Stranger> = OnceLock::new();
    let Stranger { arena, engine, parrot, names, .. } = STRANGER.get_or_init(Stranger::meet);
    let mut input = Input::new(data);
    let name = &names[usize::from(input.byte() % 2)];
    let requests: Vec<(Opcode, usize)> =
        (0..1 + input.below(REQUESTS)).map(|_| (input.choose(&[Opcode::Read, Opcode::Write]), 1 + input.below(LONGEST))).collect();
    let answer = input.rest();
    parrot.learn(answer);
    // Connections of the input before, and what is left on them, are not for this one.
    engine.forget_segment(name).expect("it is open or not");
    let segment = engine.open_segment(name).expect("it answers");
    let mut submitted = Vec::new();
    for (number, (opcode, length)) in requests.iter().enumerate() {
        let address = BASE + (number * PAGE + OFFSET) as u64;
        // SAFETY: the arena lives as long as the process, and nobody holds references to its bytes but as atomics.
        let local = unsafe { MemoryRange::new(address, *length as u64) }.expect("it does not wrap");
        submitted.push(Request {
            opcode: *opcode,
            local,
            segment,
            remote_address: REMOTE + (number * PAGE) as u64,
            hints: Hints::default(),
        });
    }
    let options = SubmitOptions { deadline: None, stall: Some(Duration::from_secs(10)) };
    let statuses = engine.transfer(&submitted, options).expect("it is started");
    assert_eq!(statuses.len(), requests.len());
    let content = arena.content();
    let is_untouched = |range: std::ops::Range<usize>| range.into_iter().all(|index| content[index] == Arena::pattern(index));
    for number in 0..REQUESTS {
        let (start, end) = (number * PAGE + OFFSET, (number + 1) * PAGE);
        let (Some((opcode, length)), Some(status)) = (requests.get(number), statuses.get(number)) else {
            assert!(is_untouched(start..end));
            continue;
        };
        assert!(
            is_untouched(start - OFFSET..start) && is_untouched(start + length..end),
            "memory beside request {number} is written"
        );
        assert!(status.state.is_terminal() && status.transferred_bytes <= *length as u64);
        assert_ne!(status.state, State::Timeout, "request {number} of {requests:?} waits for a peer that has closed");
        match opcode {
            Opcode::Write => assert!(is_untouched(start..start + length), "the source of write {number} is written"),
            Opcode::Read if status.state == State::Completed => {
                let read = &content[start..start + length];
                assert!(answer.windows(*length).any(|sent| sent == read), "request {number} has read what was never sent");
            }
            Opcode::Read => {}
        }
    }
    arena.fill();
}

/// Reads one request with its body.
fn hear(stream: &mut TcpStream) -> io::Result<()> {
    let mut header = [0; 24];
    stream.read_exact(&mut header)?;
    let length = u64::from_le_bytes(std::array::from_fn(|at| header[at]));
    let body = if header[16] & 0x7f == 1 { length } else { 0 };
    io::copy(&mut stream.take(body), &mut io::sink()).map(drop)
}
