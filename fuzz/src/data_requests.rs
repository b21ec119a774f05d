//! A data connection from a stranger: compared with a model of the server, byte by byte, in what it answers and in what it does to
//! memory. Whatever comes, memory that is not registered for peers is neither written nor read out.

use std::sync::{Arc, OnceLock};

use transfer_engine::config::Config;
use transfer_engine::engine::{Engine, MemoryOptions};
use transfer_engine::sys::MemoryRange;

use super::arena::Arena;
use super::loopback;

const BASE: u64 = 0x2000_0000_0000;
const LENGTH: usize = 8 << 10;

/// What is registered: offset, length, and whether peers may use it. The second and third touch; so do the fourth and the fifth, of
/// which peers may use one only.
const REGIONS: [(u64, u64, bool); 5] =
    [(0x0100, 0x0100, true), (0x0800, 0x0200, true), (0x0a00, 0x0001, true), (0x1000, 0x0100, true), (0x1100, 0x0100, false)];
/// What of that peers can use in one piece.
const GRANTED: [(u64, u64); 3] = [(0x0100, 0x0200), (0x0800, 0x0a01), (0x1000, 0x1100)];

struct Server {
    arena: Arena,
    port: u16,
    _engine: Arc<Engine>,
}

impl Server {
    #[allow(unsafe_code)]
    fn start() -> Server {
        let arena = Arena::map(BASE as usize, LENGTH);
        let engine = loopback::engine(Config::default());
        for (offset, length, remote_accessible) in REGIONS {
            let options =
                MemoryOptions { location: "*".into(), remote_accessible, counted: false, parallelism: None, publish: true };
            // SAFETY: the arena lives as long as the process, and nobody holds references to its bytes but as atomics.
            let range = unsafe { MemoryRange::new(BASE + offset, length) }.expect("it does not wrap");
            engine.register(range, &options).expect("it can be registered");
        }
        let port = loopback::descriptor_of(&engine).tcp_data_port;
        Server { arena, port, _engine: engine }
    }
}

/// The bytes of one connection, after one that says in pieces of how many they are sent.
pub fn run(data: &[u8]) {
    static SERVER: OnceLock<Server> = OnceLock::new();
    let Server { arena, port, .. } = SERVER.get_or_init(Server::start);
    let Some((&piece, sent)) = data.split_first() else { return };
    let mut model = Model::new();
    model.serve(sent);
    let (reply, in_order) = loopback::exchange(*port, sent, piece as usize);
    model.check(&reply, in_order);
    assert!(arena.content() == model.memory, "memory differs from what the requests say");
    arena.fill();
}

/// What the server must do with a connection.
struct Model {
    memory: Vec<u8>,
    reply: Vec<u8>,
    /// The end may be a reset, which destroys replies that are under way.
    cut_off: bool,
}

impl Model {
    fn new() -> Model {
        Model { memory: (0..LENGTH).map(Arena::pattern).collect(), reply: Vec::new(), cut_off: false }
    }

    fn status(&mut self, code: u32) {
        self.reply.extend((0x4D43_5456u64 << 32 | u64::from(code)).to_le_bytes());
    }

    fn serve(&mut self, mut sent: &[u8]) {
        while let Some((header, rest)) = sent.split_first_chunk::<24>() {
            sent = rest;
            let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| header[at + i]));
            let (length, address) = (number(0), number(8));
            let (acknowledged, is_write) = (header[16] & 0x80 != 0, header[16] & 0x7f == 1);
            let Some(range) = granted(address, length) else {
                match acknowledged {
                    true => self.status(1),
                    false => self.cut_off = true,
                }
                return;
            };
            if is_write {
                let (body, rest) = sent.split_at(sent.len().min(range.len()));
                sent = rest;
                self.memory[range.start..][..body.len()].copy_from_slice(body);
                if body.len() < range.len() {
                    self.cut_off = true;
                    return;
                }
            }
            if acknowledged {
                self.status(0);
            }
            if !is_write {
                self.reply.extend_from_slice(&self.memory[range]);
            }
        }
    }

    fn check(&self, reply: &[u8], in_order: bool) {
        assert!(in_order || self.cut_off, "the connection was reset");
        assert!(self.reply.starts_with(reply), "the reply differs from what the requests ask for");
        if !self.cut_off {
            assert_eq!(reply.len(), self.reply.len(), "bytes of the reply are missing");
        }
    }
}

/// The range as indices, if peers may use it.
fn granted(address: u64, length: u64) -> Option<std::ops::Range<usize>> {
    let start = address.checked_sub(BASE)?;
    let end = start.checked_add(length)?;
    let inside = |&&(first, last): &&(u64, u64)| length > 0 && start >= first && end <= last;
    GRANTED.iter().find(inside).map(|_| start as usize..end as usize)
}
