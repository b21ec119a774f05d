//! Several engines in one process, and threads that register, unregister, submit, cancel and destroy at random. Every byte is checked.
//!
//! What is asserted: a completed write is in place and a completed read has the target's bytes, at once and until the next transfer;
//! what fails touches nothing outside of its range, and nothing at all where nothing is registered; nothing fails without a reason;
//! after unregistering has succeeded, or an engine is destroyed, no byte changes any more; every batch ends and can be freed; at the
//! end no thread, descriptor or engine is left.
//!
//! What is not asserted, because nobody can promise it: that a write which was cancelled or ran out of time never arrives. Its bytes
//! may be on their way, and land when the target is registered by then. So such memory is not registered again in that engine's life.
//!
//! The choices come from a seed (`TE_STRESS_SEED`), the interleaving does not. `TE_STRESS_SECONDS`: how long.

// Memory is given to engines by its address.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};

use transfer_engine::Code;
use transfer_engine::config::Config;
use transfer_engine::engine::{Engine, EngineOptions, MemoryOptions};
use transfer_engine::sys::MemoryRange;
use transfer_engine::transfer::{Hints, Request, State, SubmitOptions};
use transfer_engine::transport::Opcode;

const NODES: usize = 3;
const WORKERS: usize = 6;
const BLOCKS: usize = 12;
const LENGTHS: [usize; 8] = [1, 7, 24, 1000, 4096, 70_001, 300_000, 1 << 20];
const PATIENCE: Duration = Duration::from_secs(20);

/// xorshift.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    fn percent(&mut self, chance: u64) -> bool {
        self.below(100) < chance
    }

    fn bytes(&mut self, length: usize) -> Vec<u8> {
        let words: Vec<u64> = (0..64).map(|_| self.below(u64::MAX)).collect();
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        while bytes.len() < length {
            bytes.extend_from_within(..);
        }
        bytes.truncate(length);
        bytes
    }
}

/// Bytes between two margins that nobody may touch. Looked at and changed by address only, as engines do.
struct Block {
    memory: *mut u8,
    length: usize,
    /// What is in it, as far as its worker knows.
    content: Vec<u8>,
    /// In which life of its node it is registered.
    registered: Option<u64>,
    /// In which life of its node a write to it was given up: what was sent of it may land whenever the memory is registered.
    barred: Option<u64>,
}

const MARGIN: usize = 64;

impl Block {
    fn new(length: usize) -> Block {
        let memory = Box::leak(vec![0xa5u8; length + 2 * MARGIN].into_boxed_slice()).as_mut_ptr();
        let mut block = Block { memory, length, content: Vec::new(), registered: None, barred: None };
        block.fill(vec![0; length]);
        block
    }

    fn address(&self) -> u64 {
        self.memory as u64 + MARGIN as u64
    }

    fn range(&self) -> MemoryRange {
        // SAFETY: the memory is leaked; its worker leaves it alone while an engine uses it.
        unsafe { MemoryRange::new(self.address(), self.length as u64) }.unwrap()
    }

    fn fill(&mut self, content: Vec<u8>) {
        // SAFETY: the block is as long as the content, and no engine uses it now.
        unsafe { std::ptr::copy(content.as_ptr(), self.memory.add(MARGIN), self.length) };
        self.content = content;
    }

    /// What is in it, margins checked.
    fn look(&self) -> Vec<u8> {
        let mut all = vec![0; self.length + 2 * MARGIN];
        // SAFETY: the block is that long. Engines change it by system calls and copies only, and any byte will do.
        unsafe { std::ptr::copy(self.memory, all.as_mut_ptr(), all.len()) };
        assert!(all[..MARGIN].iter().chain(&all[MARGIN + self.length..]).all(|byte| *byte == 0xa5), "a margin was written");
        all[MARGIN..MARGIN + self.length].to_vec()
    }

    fn check(&self, what: &str) {
        assert!(self.look() == self.content, "{what}: {} bytes at {:#x} have changed", self.length, self.address());
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: it was made from such a box; all engines are gone.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(self.memory, self.length + 2 * MARGIN)) });
    }
}

// SAFETY: a block belongs to one worker.
unsafe impl Send for Block {}

/// An engine that is destroyed and made again.
struct Node {
    engine: RwLock<Arc<Engine>>,
    /// Number of its life: changes after an engine has been destroyed, and before the next can be had.
    life: AtomicU64,
}

impl Node {
    fn get(&self) -> (Arc<Engine>, u64) {
        let engine = self.engine.read().unwrap();
        (engine.clone(), self.life.load(Ordering::SeqCst))
    }

    fn is_at(&self, engine: &Arc<Engine>) -> bool {
        // While it is being destroyed it cannot allocate.
        let alive = engine.allocate_batch(0).map(|batch| engine.free_batch(batch.id()).unwrap()).is_ok();
        alive && Arc::ptr_eq(&self.engine.read().unwrap(), engine)
    }

    fn renew(&self) {
        let old = self.engine.read().unwrap().clone();
        old.shutdown();
        let new = engine();
        let mut slot = self.engine.write().unwrap();
        self.life.fetch_add(1, Ordering::SeqCst);
        *slot = new;
    }
}

fn engine() -> Arc<Engine> {
    let options = EngineOptions { metadata: "P2PHANDSHAKE".into(), server_name: "127.0.0.1".into(), ..EngineOptions::default() };
    let engine = Engine::create(&options, Config { tcp_io_threads: 2, ..Config::default() }).unwrap();
    engine.install_transport("tcp", None).unwrap();
    engine
}

#[derive(Default)]
struct Tally {
    completed: AtomicU64,
    refused: AtomicU64,
    cut_short: AtomicU64,
}

struct Worker<'a> {
    random: Random,
    nodes: &'a [Node],
    /// For each node.
    blocks: Vec<Vec<Block>>,
    local: Vec<Block>,
    tally: &'a Tally,
}

/// What was asked for.
struct Asked {
    opcode: Opcode,
    block: usize,
    registered: bool,
    unregistered: bool,
}

impl Worker<'_> {
    fn run(mut self, stop: &AtomicBool) {
        while !stop.load(Ordering::Relaxed) {
            self.round();
        }
        // Engines may hold the memory until they are gone.
        for (node, blocks) in self.nodes.iter().zip(&mut self.blocks) {
            let (engine, life) = node.get();
            for block in blocks.iter_mut().filter(|block| block.registered == Some(life)) {
                let _ = engine.unregister(block.address());
                block.check("at the end");
            }
        }
    }

    fn round(&mut self) {
        let from = self.random.below(NODES as u64) as usize;
        let to = self.random.below(NODES as u64) as usize;
        let ((initiator, _), (target, life)) = (self.nodes[from].get(), self.nodes[to].get());
        let nodes = self.nodes;
        let undisturbed = || nodes[from].is_at(&initiator) && nodes[to].is_at(&target);
        let options =
            MemoryOptions { location: "*".into(), remote_accessible: true, counted: false, parallelism: None, publish: true };
        for block in &mut self.blocks[to] {
            if block.registered != Some(life) {
                block.registered = None;
                block.check("not registered");
            }
            if block.registered.is_none() && block.barred != Some(life) && self.random.percent(70) {
                match target.register(block.range(), &options) {
                    Ok(()) => block.registered = Some(life),
                    Err(error) => assert!(!nodes[to].is_at(&target), "not registered: {error}"),
                }
            } else if block.registered.is_some() && self.random.percent(20) {
                Self::unregister(&nodes[to], &target, block);
            }
        }
        let segment = match initiator.open_segment(&target.name()) {
            Ok(segment) => segment,
            Err(error) => return assert!(!undisturbed(), "not opened: {error}"),
        };
        let mut asked = Vec::new();
        let mut requests = Vec::new();
        for block in 0..BLOCKS {
            if !self.random.percent(50) {
                continue;
            }
            let remote = &self.blocks[to][block];
            let local = &mut self.local[block];
            local.check("a local buffer after its transfer");
            let opcode = if self.random.percent(50) { Opcode::Read } else { Opcode::Write };
            local.fill(self.random.bytes(remote.length));
            requests.push(Request {
                opcode,
                local: local.range(),
                segment,
                remote_address: remote.address(),
                hints: Hints::default(),
            });
            asked.push(Asked { opcode, block, registered: remote.registered.is_some(), unregistered: false });
        }
        let soon = self.random.percent(15).then(|| Instant::now() + Duration::from_micros(self.random.below(3000)));
        let batch = match initiator.allocate_batch(requests.len()) {
            Ok(batch) => batch,
            Err(_) => return assert!(!undisturbed()),
        };
        if let Err(error) = initiator.submit(&batch, &requests, None, SubmitOptions { deadline: soon, stall: None }) {
            assert!(!undisturbed(), "not submitted: {error}");
            initiator.free_batch(batch.id()).unwrap();
            return;
        }
        let cancelled = self.random.percent(15);
        if self.random.percent(40) {
            std::thread::sleep(Duration::from_micros(self.random.below(500)));
        }
        if cancelled {
            batch.cancel();
        }
        if self.random.percent(25) && !asked.is_empty() {
            let unlucky = self.random.below(asked.len() as u64) as usize;
            let block = &mut self.blocks[to][asked[unlucky].block];
            asked[unlucky].unregistered = true;
            if block.registered.is_some() {
                Self::unregister(&nodes[to], &target, block);
            }
            block.content = block.look();
        }
        assert!(batch.wait(Some(PATIENCE)), "a batch has not ended: {:?}", batch.status());
        let excused = cancelled || soon.is_some() || !undisturbed();
        for (number, asked) in asked.iter().enumerate() {
            let status = batch.task_status(number).unwrap();
            let (remote, local) = (&mut self.blocks[to][asked.block], &mut self.local[asked.block]);
            let completed = status.state == State::Completed;
            assert_eq!(status.transferred_bytes, if completed { remote.length as u64 } else { 0 });
            assert!(completed || !asked.registered || asked.unregistered || excused, "without a reason: {status:?}");
            if asked.opcode == Opcode::Write && status.error.is_some_and(|error| error.code() != Code::AddressNotRegistered) {
                remote.barred = Some(life);
            }
            assert!(!completed || asked.registered, "{} bytes at {:#x} are not registered", remote.length, remote.address());
            match (completed, asked.opcode) {
                (true, _) => {
                    self.tally.completed.fetch_add(1, Ordering::Relaxed);
                    // Its memory was looked at after unregistering: all bytes were in place by then.
                    if asked.opcode == Opcode::Write {
                        if !asked.unregistered {
                            remote.content.clone_from(&local.content);
                        }
                    } else {
                        local.content.clone_from(&remote.content);
                    }
                    remote.check("a completed transfer's target");
                    local.check("a completed transfer's local memory");
                    assert!(remote.content == local.content, "completed, and not the same");
                }
                (false, opcode) if asked.registered => {
                    self.tally.cut_short.fetch_add(1, Ordering::Relaxed);
                    let either = |now: &[u8], old: &[u8], new: &[u8]| (0..now.len()).all(|i| now[i] == old[i] || now[i] == new[i]);
                    if opcode == Opcode::Read {
                        let now = local.look();
                        assert!(either(&now, &local.content, &remote.content), "bytes of nobody");
                        local.content = now;
                    } else {
                        if !asked.unregistered {
                            Self::unregister(&nodes[to], &target, remote);
                            let now = remote.look();
                            assert!(either(&now, &remote.content, &local.content), "bytes of nobody");
                            remote.content = now;
                        }
                    }
                }
                _ => {
                    self.tally.refused.fetch_add(1, Ordering::Relaxed);
                    remote.check("not registered");
                    local.check("the local memory of a refused transfer");
                }
            }
        }
        initiator.free_batch(batch.id()).unwrap();
    }

    /// After this no engine touches the block.
    fn unregister(node: &Node, engine: &Arc<Engine>, block: &mut Block) {
        block.registered = None;
        if let Err(error) = engine.unregister(block.address()) {
            assert_eq!(error.code(), Code::Canceled, "{error}");
            let end = Instant::now() + PATIENCE;
            while node.is_at(engine) || Arc::ptr_eq(&node.engine.read().unwrap(), engine) {
                assert!(Instant::now() < end, "an engine is not destroyed in {PATIENCE:?}");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

fn threads() -> Vec<String> {
    let names = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let mut names: Vec<_> = names.filter_map(|entry| std::fs::read_to_string(entry.path().join("comm")).ok()).collect();
    names.retain(|name| name.starts_with("te-"));
    names
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[test]
fn everything_at_once() {
    let (seed, seconds) = (number("TE_STRESS_SEED", 1), number("TE_STRESS_SECONDS", 5));
    // What is made once per process is there before descriptors are counted.
    drop(engine());
    let descriptors_before = descriptors();
    let nodes: Vec<Node> = (0..NODES).map(|_| Node { engine: RwLock::new(engine()), life: AtomicU64::new(1) }).collect();
    let (stop, tally) = (AtomicBool::new(false), Tally::default());
    std::thread::scope(|scope| {
        let mut workers = Vec::new();
        for worker in 0..WORKERS {
            let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ (seed << 8 | worker as u64));
            let lengths: Vec<_> = (0..BLOCKS).map(|_| LENGTHS[random.below(LENGTHS.len() as u64) as usize]).collect();
            let blocks = |lengths: &[usize]| lengths.iter().map(|length| Block::new(*length)).collect::<Vec<_>>();
            let worker = Worker {
                random,
                nodes: &nodes,
                blocks: (0..NODES).map(|_| blocks(&lengths)).collect(),
                local: blocks(&lengths),
                tally: &tally,
            };
            let stop = &stop;
            workers.push(scope.spawn(move || worker.run(stop)));
        }
        let mut random = Random(seed);
        let end = Instant::now() + Duration::from_secs(seconds);
        while Instant::now() < end && workers.iter().all(|worker| !worker.is_finished()) {
            std::thread::sleep(Duration::from_millis(50 + random.below(400)));
            if random.percent(60) {
                nodes[random.below(NODES as u64) as usize].renew();
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    let engines: Vec<_> = nodes.iter().map(|node| Arc::downgrade(&node.get().0)).collect();
    for node in &nodes {
        node.get().0.shutdown();
    }
    drop(nodes);
    assert!(engines.iter().all(|engine| engine.strong_count() == 0), "an engine is held by somebody");
    let end = Instant::now() + Duration::from_secs(5);
    while (!threads().is_empty() || descriptors() != descriptors_before) && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(threads(), Vec::<String>::new());
    assert_eq!(descriptors(), descriptors_before);
    let tally = [&tally.completed, &tally.refused, &tally.cut_short].map(|count| count.load(Ordering::Relaxed));
    eprintln!("{} transfers completed, {} were refused, {} were cut short", tally[0], tally[1], tally[2]);
    assert!(tally.iter().all(|count| *count > 20), "too few to say anything: {tally:?}");
}
