//! Two and more engines in one process that move bytes by the NICs of the fake verbs library.

use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use super::metadata_tests::{Fate, ScriptedStore};
use super::*;
use crate::registry::SharedGuards;
use crate::transfer::{Hints, State};
use crate::transport::rdma::fake::{Fake, Memory};
use crate::transport::{Deadline, Opcode, Piece, Slices, Way};

/// `IBV_EVENT_PORT_ERR`, `IBV_EVENT_PORT_ACTIVE` and the states that go with them.
const PORT_ERROR: (i32, i64) = (10, 1);
const PORT_ACTIVE: (i32, i64) = (9, 4);

/// `IBV_WC_RETRY_EXC_ERR`.
const RETRY_EXCEEDED: i64 = 12;

pub(super) fn config(fake: &Fake) -> Config {
    let mut config = Config::default();
    config.rdma.library = fake.library.path().to_path_buf();
    config
}

pub(super) fn matrix(nics: &[&str]) -> String {
    serde_json::json!({"cpu:0": [nics, []]}).to_string()
}

pub(super) fn engine_of(config: &Config, matrix: &str) -> Arc<Engine> {
    let options = EngineOptions { metadata: PEER_TO_PEER.into(), server_name: "127.0.0.1".into(), ..EngineOptions::default() };
    let engine = Engine::create(&options, config.clone()).unwrap();
    engine.install_transport("rdma", Some(matrix)).unwrap();
    engine
}

pub(super) fn engine_with(config: &Config, nics: &[&str]) -> Arc<Engine> {
    engine_of(config, &matrix(nics))
}

pub(super) fn engine(fake: &Fake, nics: &[&str]) -> Arc<Engine> {
    engine_with(&config(fake), nics)
}

pub(super) fn options() -> MemoryOptions {
    MemoryOptions { location: "cpu:0".into(), remote_accessible: true, counted: false, parallelism: None, publish: true }
}

pub(super) fn request(opcode: Opcode, local: MemoryRange, segment: u64, remote: MemoryRange) -> Request {
    assert_eq!(local.length(), remote.length());
    Request { opcode, local, segment, remote_address: remote.address(), hints: Hints::default() }
}

pub(super) fn pattern(length: usize, seed: usize) -> Vec<u8> {
    (0..length).map(|i| (i * 31 + seed * 17 + i / 251) as u8).collect()
}

/// An engine that transfers, one that is transferred to, and registered memory of each.
pub(super) struct Bench {
    pub near: Arc<Engine>,
    pub far: Arc<Engine>,
    pub ours: Memory,
    pub theirs: Memory,
    length: u64,
    pub segment: u64,
}

impl Bench {
    pub fn new(near: Arc<Engine>, far: Arc<Engine>, length: usize) -> Bench {
        let (ours, theirs) = (Memory::new(length), Memory::new(length));
        let length = length as u64;
        near.register(ours.range(0, length), &options()).unwrap();
        far.register(theirs.range(0, length), &options()).unwrap();
        let segment = near.open_segment(&far.name()).unwrap();
        Bench { near, far, ours, theirs, length, segment }
    }

    pub fn on(fake: &Fake, length: usize) -> Bench {
        Bench::new(engine(fake, &["fake0"]), engine(fake, &["fake1"]), length)
    }

    fn request(&self, opcode: Opcode, offset: u64, length: u64) -> Request {
        request(opcode, self.ours.range(offset, length), self.segment, self.theirs.range(offset, length))
    }

    fn transfer(&self, requests: &[Request]) -> Vec<TaskStatus> {
        self.near.transfer(requests, SubmitOptions::default()).unwrap()
    }

    /// One write of everything.
    fn write(&self) -> TaskStatus {
        self.transfer(&[self.request(Opcode::Write, 0, self.length)]).remove(0)
    }

    fn submit(&self, requests: &[Request], options: SubmitOptions) -> Arc<Batch> {
        let batch = self.near.allocate_batch(requests.len()).unwrap();
        self.near.submit(&batch, requests, None, options).unwrap();
        batch
    }
}

#[track_caller]
pub(super) fn completed(status: &TaskStatus) {
    assert_eq!(status.state, State::Completed, "{:?}", status.error);
}

#[track_caller]
pub(super) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Objects that the fake library has: everything but regions, and regions.
pub(super) fn live(fake: &Fake) -> [i64; 6] {
    ["contexts", "domains", "channels", "queues", "queue_pairs", "regions"].map(|kind| fake.get(-1, kind))
}

#[test]
fn bytes_arrive_in_both_directions_at_all_sizes() {
    let fake = Fake::new(2);
    let bench = Bench::on(&fake, 16 << 20);
    for (turn, size) in
        [1, 2, 7, 63, 4095, 4096, 65535, 65536, 65537, 81920, 81921, (1 << 20) + 1, 16 << 20].into_iter().enumerate()
    {
        for opcode in [Opcode::Write, Opcode::Read] {
            let (source, target) =
                if opcode == Opcode::Write { (&bench.ours, &bench.theirs) } else { (&bench.theirs, &bench.ours) };
            source.write(&pattern(size, turn));
            target.write(&vec![0xee; size + usize::from(size < 16 << 20)]);
            completed(&bench.transfer(&[bench.request(opcode, 0, size as u64)])[0]);
            let bytes = target.read();
            assert!(bytes[..size] == pattern(size, turn)[..], "{opcode:?} of {size} bytes");
            assert!(bytes.get(size).is_none_or(|next| *next == 0xee), "{opcode:?} of {size} bytes");
        }
    }
    // All in place by the NICs alone: the peer has served nothing, and there is one connection.
    assert_eq!(bench.far.counters().requests_served.get(), 0);
    assert_eq!((bench.near.counters().connections_opened.get(), bench.far.counters().connections_accepted.get()), (1, 1));
    assert_eq!(fake.get(-1, "queue_pairs"), 4);
}

#[test]
fn both_sides_may_submit_and_open_connections_at_a_time() {
    let fake = Fake::new(2);
    let bench = Bench::on(&fake, 1 << 20);
    let back = bench.far.open_segment(&bench.near.name()).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..50).for_each(|_| completed(&bench.transfer(&[bench.request(Opcode::Write, 0, 1 << 19)])[0])));
            let read = request(Opcode::Read, bench.theirs.range(1 << 19, 1 << 19), back, bench.ours.range(1 << 19, 1 << 19));
            let bench = &bench;
            scope
                .spawn(move || (0..50).for_each(|_| completed(&bench.far.transfer(&[read], SubmitOptions::default()).unwrap()[0])));
        }
    });
    assert_eq!(fake.get(-1, "queue_pairs"), 4, "one connection, whoever opened it");
}

#[test]
fn requests_cross_borders_of_chunks_and_of_touching_regions() {
    let fake = Fake::new(2);
    fake.set(0, "max_mr_size", 3 << 16);
    fake.set(1, "max_mr_size", 1 << 16);
    let (near, far) = (engine(&fake, &["fake0"]), engine(&fake, &["fake1"]));
    let length = 1 << 20;
    let (ours, theirs) = (Memory::new(length), Memory::new(length));
    near.register(ours.range(0, 300_000), &options()).unwrap();
    near.register(ours.range(300_000, length as u64 - 300_000), &options()).unwrap();
    far.register(theirs.range(0, 500_001), &options()).unwrap();
    far.register(theirs.range(500_001, length as u64 - 500_001), &options()).unwrap();
    let segment = near.open_segment(&far.name()).unwrap();
    assert!(near.segment_buffers(segment).unwrap().len() > 15, "one entry a chunk");
    for (offset, size) in [(0, length), (65_535, 2), (299_999, 65_537), (500_000, 2), (12_345, 1_000_001)] {
        ours.write(&pattern(length, size));
        theirs.write(&vec![0; length]);
        let (local, remote) = (ours.range(offset as u64, size as u64), theirs.range(offset as u64, size as u64));
        completed(&near.transfer(&[request(Opcode::Write, local, segment, remote)], SubmitOptions::default()).unwrap()[0]);
        let mut expected = vec![0; length];
        expected[offset..offset + size].copy_from_slice(&pattern(length, size)[offset..offset + size]);
        assert!(theirs.read() == expected, "{size} bytes from {offset} on");
        ours.write(&vec![0; length]);
        completed(&near.transfer(&[request(Opcode::Read, local, segment, remote)], SubmitOptions::default()).unwrap()[0]);
        assert!(ours.read() == expected, "{size} bytes from {offset} on");
    }
}

/// Requests that go through the same regions again and again take ways that were found before, wherever they lie in these and beyond.
#[test]
fn requests_that_come_by_known_ways_go_no_further_than_chunks_and_entries_do() {
    const REGIONS: u64 = 8;
    const STRIDE: u64 = 1 << 17;
    let fake = Fake::new(2);
    fake.set(0, "max_mr_size", 3 << 14);
    fake.set(1, "max_mr_size", 1 << 14);
    let (near, far) = (engine(&fake, &["fake0"]), engine(&fake, &["fake1"]));
    let length = (REGIONS * STRIDE) as usize;
    let (ours, theirs) = (Memory::new(length), Memory::new(length));
    for region in 0..REGIONS {
        near.register(ours.range(region * STRIDE, STRIDE), &options()).unwrap();
        // The last quarter is of others.
        far.register(theirs.range(region * STRIDE, STRIDE / 4 * 3), &options()).unwrap();
    }
    let segment = near.open_segment(&far.name()).unwrap();
    let write = |offset: u64, size: u64| request(Opcode::Write, ours.range(offset, size), segment, theirs.range(offset, size));
    let bytes = pattern(length, 3);
    ours.write(&bytes);
    // In the first chunk and entry of each region, and from there on: across borders of entries, of chunks, and of what is registered there.
    let sizes =
        [(0, 4096), (4096, 100), (16_000, 384), (16_000, 1000), (49_000, 1000), (0, 60_000), (98_000, 304), (98_000, 305), (0, 64)];
    let turns: Vec<_> = sizes.iter().flat_map(|size| (0..REGIONS).map(move |region| (region, *size))).collect();
    let requests: Vec<_> = turns.iter().map(|(region, (offset, size))| write(region * STRIDE + offset, *size)).collect();
    let statuses = near.transfer(&requests, SubmitOptions::default()).unwrap();
    let mut expected = vec![0; length];
    for ((region, (offset, size)), status) in turns.iter().zip(&statuses) {
        if offset + size > STRIDE / 4 * 3 {
            assert_eq!(status.error.as_ref().map(Error::code), Some(Code::AddressNotRegistered), "{size} bytes from {offset} on");
        } else {
            completed(status);
            let part = (region * STRIDE + offset) as usize..(region * STRIDE + offset + size) as usize;
            expected[part.clone()].copy_from_slice(&bytes[part]);
        }
    }
    assert!(theirs.read() == expected);
    assert_eq!(fake.get(0, "protection_errors"), 0, "no key was used beyond its chunk");
}

#[test]
fn batches_of_many_small_requests_arrive_whole_and_are_posted_in_chains() {
    let fake = Fake::new(2);
    let bench = Bench::on(&fake, 8 << 20);
    let bytes = pattern(8 << 20, 1);
    bench.ours.write(&bytes);
    let requests: Vec<_> = (0..8192).map(|at| bench.request(Opcode::Write, (at * 7919 % 8192) * 1024, 1024)).collect();
    let statuses = bench.transfer(&requests);
    statuses.iter().for_each(completed);
    assert!(bench.theirs.read() == bytes);
    let (posts, posted) = (fake.get(0, "posts"), fake.get(0, "posted"));
    assert_eq!(posted, 8192);
    assert!(posts <= 8192 / 16, "{posts} calls");
}

#[test]
fn a_submission_guards_each_region_once_and_posts_in_chains() {
    let fake = Fake::new(2);
    let bench = Bench::on(&fake, 1 << 20);
    let more = Memory::new(1 << 20);
    bench.near.register(more.range(0, 1 << 20), &options()).unwrap();
    completed(&bench.write());
    let regions = bench.near.registry.live();
    fake.set(0, "hold", 1);
    let (calls, posted) = (fake.get(0, "posts"), fake.get(0, "posted"));
    // As many as two queue pairs take, in each region in turn.
    let requests: Vec<_> = (0..512)
        .map(|at| {
            let ours = if at % 2 == 0 { &bench.ours } else { &more };
            request(Opcode::Write, ours.range(at * 1024, 1024), bench.segment, bench.theirs.range(at * 1024, 1024))
        })
        .collect();
    let batch = bench.submit(&requests, SubmitOptions::default());
    assert_eq!((fake.get(0, "posted") - posted, fake.get(0, "posts") - calls), (512, 16));
    assert_eq!(regions.iter().map(|region| region.in_flight()).collect::<Vec<_>>(), [1, 1]);
    fake.set(0, "hold", 0);
    assert!(batch.wait(Some(Duration::from_secs(30))));
    assert_eq!(regions.iter().map(|region| region.in_flight()).collect::<Vec<_>>(), [0, 0]);
}

#[test]
fn what_completes_together_is_told_together() {
    let fake = Fake::new(2);
    let bench = Bench::on(&fake, 1 << 20);
    completed(&bench.write());
    fake.set(0, "hold", 1);
    let pieces = (0..300).map(|at| bench.ours.range(at * 1024, 1024)).zip(0..);
    let mut guards = SharedGuards::default();
    bench.near.registry.read(|view| pieces.clone().try_for_each(|(local, _)| view.share(local, &mut guards))).unwrap();
    let told = Arc::new(Told { guards, ..Told::default() });
    let target = bench.theirs.range(0, 1).address();
    let piece = |(local, index): (MemoryRange, u32)| Piece {
        local,
        remote_address: target + u64::from(index) * 1024,
        index,
        opcode: Opcode::Write,
        way: Way::default(),
    };
    let slices = Slices {
        pieces: pieces.map(piece).collect(),
        deadline: Deadline { absolute: None, stall: LONG },
        completion: told.clone(),
    };
    let segment: Arc<dyn Segment> = bench.near.segments.get(bench.segment).unwrap();
    rdma_of(&bench.near).submit(&segment, slices);
    fake.set(0, "hold", 0);
    wait_until("all is moved", || {
        rdma_of(&bench.near).poll();
        told.outcomes.lock().len() == 300
    });
    // Two completion queues of what has run at once; the NIC's own thread may look in between.
    assert!(told.calls.load(Ordering::Relaxed) <= 4, "{} calls", told.calls.load(Ordering::Relaxed));
}

#[test]
fn memory_that_is_not_registered_is_refused_before_anything_is_posted() {
    let fake = Fake::new(2);
    let bench = Bench::on(&fake, 1 << 20);
    completed(&bench.write());
    let posted = fake.get(-1, "posted");
    let stranger = Memory::new(1 << 20);
    let half = bench.length / 2;
    let cases = [
        ("source", request(Opcode::Write, stranger.range(0, 4096), bench.segment, bench.theirs.range(0, 4096))),
        ("sink", request(Opcode::Read, stranger.range(0, 4096), bench.segment, bench.theirs.range(0, 4096))),
        ("target", request(Opcode::Write, bench.ours.range(0, 4096), bench.segment, stranger.range(0, 4096))),
        ("origin", request(Opcode::Read, bench.ours.range(0, 4096), bench.segment, stranger.range(0, 4096))),
        (
            "one byte past the target's end",
            Request { remote_address: bench.theirs.range(half + 1, 0).address(), ..bench.request(Opcode::Write, 0, half) },
        ),
        ("address 0", Request { remote_address: 0, ..bench.request(Opcode::Write, 0, 4096) }),
    ];
    for (what, request) in cases {
        let status = bench.transfer(&[request]).remove(0);
        assert_eq!((status.state, status.error.unwrap().code()), (State::Failed, Code::AddressNotRegistered), "{what}");
    }
    let local_only = Memory::new(4096);
    bench.far.register(local_only.range(0, 4096), &MemoryOptions { remote_accessible: false, ..options() }).unwrap();
    let write = request(Opcode::Write, bench.ours.range(0, 4096), bench.segment, local_only.range(0, 4096));
    assert_eq!(bench.transfer(&[write])[0].state, State::Failed);
    assert_eq!(fake.get(-1, "posted"), posted);
    // As a source at home it works.
    let back = bench.far.open_segment(&bench.near.name()).unwrap();
    let write = request(Opcode::Write, local_only.range(0, 4096), back, bench.ours.range(0, 4096));
    completed(&bench.far.transfer(&[write], SubmitOptions::default()).unwrap()[0]);
    completed(&bench.write());
}

#[test]
fn memory_that_the_peer_registers_later_is_found() {
    let fake = Fake::new(2);
    let bench = Bench::on(&fake, 1 << 16);
    completed(&bench.write());
    let later = Memory::new(1 << 16);
    bench.far.register(later.range(0, 1 << 16), &options()).unwrap();
    let write = request(Opcode::Write, bench.ours.range(0, 1 << 16), bench.segment, later.range(0, 1 << 16));
    completed(&bench.transfer(&[write])[0]);
}

#[test]
fn a_long_request_is_striped_over_two_nics_and_a_short_one_is_not() {
    let fake = Fake::new(4);
    let bench = Bench::new(engine(&fake, &["fake0", "fake1"]), engine(&fake, &["fake2", "fake3"]), 16 << 20);
    bench.ours.write(&pattern(16 << 20, 3));
    completed(&bench.write());
    assert!(bench.theirs.read() == pattern(16 << 20, 3));
    let moved = [0, 1].map(|nic| fake.get(nic, "bytes_written"));
    assert_eq!(moved, [8 << 20; 2]);
    assert_eq!(fake.get(-1, "queue_pairs"), 8, "each NIC has one at the peer");
    let loads = bench.near.nic_loads();
    assert_eq!(loads.iter().map(|load| load.device.as_str()).collect::<Vec<_>>(), ["fake0", "fake1"]);
    assert!(loads.iter().all(|load| load.bytes_in_flight == 0));
    let posted = fake.get(-1, "posted");
    completed(&bench.transfer(&[bench.request(Opcode::Read, 0, 65536)])[0]);
    assert_eq!(fake.get(-1, "posted"), posted + 1);
}

#[test]
fn with_no_nic_left_transfers_fail_and_nothing_hangs() {
    let fake = Fake::new(2);
    let bench = Bench::on(&fake, 1 << 20);
    completed(&bench.write());
    for nic in [0, 1] {
        fake.set(nic, "port_state", PORT_ERROR.1);
        fake.event(nic, PORT_ERROR.0);
        wait_until("its queue pairs are gone", || fake.get(nic, "queue_pairs") == 0);
        assert_eq!(bench.write().state, State::Failed);
        fake.set(nic, "port_state", PORT_ACTIVE.1);
        fake.event(nic, PORT_ACTIVE.0);
        wait_until("it is used again", || bench.write().state == State::Completed);
    }
}

#[test]
fn nics_in_use_are_shown_as_such() {
    let fake = Fake::new(1);
    let shown: serde_json::Value = serde_json::from_str(&engine(&fake, &["fake0"]).show_links(true)).unwrap();
    let nic = &shown["local_nics"][0];
    assert_eq!((&nic["device"], &nic["source"], &nic["port"]), (&"fake0".into(), &"rdma_transport".into(), &1.into()));
    assert_eq!(shown["topology"]["cpu:0"][0][0], "fake0");
}

#[test]
fn the_load_of_a_nic_is_what_is_under_way_on_it() {
    let fake = Fake::new(2);
    let bench = Bench::on(&fake, 1 << 20);
    completed(&bench.write());
    fake.set(0, "hold", 1);
    let batch = bench.submit(&[bench.request(Opcode::Write, 0, 1 << 20)], SubmitOptions::default());
    wait_until("posted", || bench.near.nic_loads()[0].bytes_in_flight == 1 << 20);
    std::thread::sleep(Duration::from_millis(20));
    fake.set(0, "hold", 0);
    assert!(batch.wait(Some(Duration::from_secs(20))));
    let load = bench.near.nic_loads().remove(0);
    assert_eq!(load.bytes_in_flight, 0);
    assert!(load.bytes_per_second > 0.0);
}

/// What a peer looks like that was started anew under its old name: other queue pairs, and other keys for the same memory.
fn restart(fake: &Fake, device: i32, bench: &Bench, meanwhile: impl FnOnce()) {
    bench.far.unregister(bench.theirs.range(0, 1).address()).unwrap();
    fake.set(device, "port_state", PORT_ERROR.1);
    fake.event(device, PORT_ERROR.0);
    wait_until("its queue pairs are gone", || fake.get(device, "queue_pairs") == 0);
    meanwhile();
    fake.set(device, "port_state", PORT_ACTIVE.1);
    fake.event(device, PORT_ACTIVE.0);
    let named = || !bench.far.fetcher.own.read().rdma.clone().unwrap().priority_matrix["cpu:0"].0.is_empty();
    wait_until("its NIC is back", named);
    let other = Memory::new(4096);
    bench.far.register(other.range(0, 4096), &options()).unwrap();
    bench.far.register(bench.theirs.range(0, bench.length), &options()).unwrap();
    bench.far.unregister(other.range(0, 1).address()).unwrap();
}

#[test]
fn a_peer_that_has_restarted_is_connected_with_anew() {
    let fake = Fake::new(2);
    let bench = Bench::on(&fake, 1 << 20);
    completed(&bench.write());
    // Not even one transfer fails.
    restart(&fake, 1, &bench, || ());
    bench.ours.write(&pattern(1 << 20, 9));
    completed(&bench.write());
    assert!(bench.theirs.read() == pattern(1 << 20, 9));
    // Unless it is tried in between.
    restart(&fake, 1, &bench, || assert_eq!(bench.write().state, State::Failed));
    bench.ours.write(&pattern(1 << 20, 10));
    completed(&bench.write());
    assert!(bench.theirs.read() == pattern(1 << 20, 10));
}

#[test]
fn the_restarted_side_may_ask_first() {
    let fake = Fake::new(2);
    let (ours, theirs) = (Memory::new(1 << 20), Memory::new(1 << 20));
    let near = engine(&fake, &["fake0"]);
    near.register(ours.range(0, 1 << 20), &options()).unwrap();
    let transfer_from = |engine: &Arc<Engine>| {
        engine.register(theirs.range(0, 1 << 20), &options()).unwrap();
        let back = engine.open_segment(&near.name()).unwrap();
        let read = request(Opcode::Read, theirs.range(0, 1 << 20), back, ours.range(0, 1 << 20));
        completed(&engine.transfer(&[read], SubmitOptions::default()).unwrap()[0]);
    };
    let first = engine(&fake, &["fake1"]);
    let port: u16 = first.name().rsplit_once(':').unwrap().1.parse().unwrap();
    transfer_from(&first);
    drop(first);
    let mut again = config(&fake);
    (again.min_rpc_port, again.max_rpc_port) = (port, port);
    let second = engine_with(&again, &["fake1"]);
    transfer_from(&second);
    // The first might be alive yet; it is asked as soon as something is submitted to it.
    assert_eq!(fake.get(0, "queue_pairs"), 4);
    let back = near.open_segment(&second.name()).unwrap();
    let write = request(Opcode::Write, ours.range(0, 1 << 20), back, theirs.range(0, 1 << 20));
    completed(&near.transfer(&[write], SubmitOptions::default()).unwrap()[0]);
    wait_until("nothing is left of the first connection", || fake.get(0, "queue_pairs") == 2);
    completed(&near.transfer(&[write], SubmitOptions::default()).unwrap()[0]);
    assert_eq!(near.counters().connections_opened.get(), 0, "by the connection that the other side has asked for");
}

#[test]
fn a_key_that_has_changed_is_fetched_anew() {
    let fake = Fake::new(2);
    let bench = Bench::on(&fake, 1 << 20);
    completed(&bench.write());
    bench.far.unregister(bench.theirs.range(0, 1).address()).unwrap();
    let other = Memory::new(4096);
    bench.far.register(other.range(0, 4096), &options()).unwrap();
    bench.far.register(bench.theirs.range(0, bench.length), &options()).unwrap();
    bench.ours.write(&pattern(1 << 20, 4));
    completed(&bench.write());
    assert!(bench.theirs.read() == pattern(1 << 20, 4));
}

#[test]
fn memory_that_the_peer_has_unregistered_is_refused_by_its_nic_and_others_go_on() {
    let fake = Fake::new(2);
    let bench = Bench::on(&fake, 1 << 20);
    let gone = Memory::new(4096);
    bench.far.register(gone.range(0, 4096), &options()).unwrap();
    bench.near.refresh_segment(bench.segment).unwrap();
    completed(&bench.write());
    bench.far.unregister(gone.range(0, 1).address()).unwrap();
    let bad = request(Opcode::Write, bench.ours.range(0, 4096), bench.segment, gone.range(0, 4096));
    let mut requests: Vec<_> = (0..64).map(|at| bench.request(Opcode::Write, at * 4096, 4096)).collect();
    requests.insert(20, bad);
    let statuses = bench.transfer(&requests);
    for (index, status) in statuses.iter().enumerate() {
        match index {
            20 => assert_eq!((status.state, status.error.as_ref().unwrap().code()), (State::Failed, Code::AddressNotRegistered)),
            _ => completed(status),
        }
    }
    assert_eq!(gone.read(), vec![0; 4096]);
}

#[test]
fn a_way_that_fails_is_replaced_by_another() {
    let fake = Fake::new(4);
    let bench = Bench::new(engine(&fake, &["fake0", "fake1"]), engine(&fake, &["fake2", "fake3"]), 4 << 20);
    completed(&bench.write());
    for turn in 0..3 {
        fake.set(0, "status", RETRY_EXCEEDED);
        fake.set(0, "status_at", 5);
        bench.ours.write(&pattern(4 << 20, 20 + turn));
        completed(&bench.write());
        assert!(bench.theirs.read() == pattern(4 << 20, 20 + turn));
    }
}

#[test]
fn a_fault_on_the_only_way_is_overcome_and_a_lasting_one_ends_the_transfer() {
    let fake = Fake::new(2);
    let bench = Bench::on(&fake, 1 << 20);
    completed(&bench.write());
    fake.set(0, "status_at", 3);
    bench.ours.write(&pattern(1 << 20, 5));
    completed(&bench.write());
    assert!(bench.theirs.read() == pattern(1 << 20, 5));
    fake.set(0, "post_errno", i64::from(libc::EIO));
    fake.set(0, "post_fail_at", 2);
    completed(&bench.write());
    fake.set(1, "port_state", PORT_ERROR.1);
    let status = bench.write();
    assert_eq!((status.state, status.error.unwrap().code()), (State::Failed, Code::Endpoint));
    fake.set(1, "port_state", PORT_ACTIVE.1);
    completed(&bench.write());
}

#[test]
fn a_queue_pair_that_is_stuck_is_given_up_at_the_deadline() {
    let fake = Fake::new(2);
    let bench = Bench::on(&fake, 1 << 20);
    completed(&bench.write());
    for flushes in [1, 0] {
        fake.set(0, "flush", flushes);
        fake.set(0, "hold", 1);
        let begin = Instant::now();
        let deadline = Some(begin + Duration::from_millis(200));
        let batch = bench.submit(&[bench.request(Opcode::Read, 0, 1 << 20)], SubmitOptions { deadline, stall: None });
        assert!(batch.wait(Some(Duration::from_secs(20))));
        let elapsed = begin.elapsed();
        assert_eq!(batch.status().state, State::Timeout);
        let limit = Duration::from_millis(if flushes == 1 { 900 } else { 5000 });
        assert!(elapsed >= Duration::from_millis(200) && elapsed < limit, "{elapsed:?}");
        bench.ours.write(&pattern(1 << 20, 6));
        fake.set(0, "hold", 0);
        assert!(bench.ours.read() == pattern(1 << 20, 6), "nothing moves after the end");
        completed(&bench.write());
    }
}

#[test]
fn what_does_not_move_at_all_ends_as_stalled_and_what_moves_does_not() {
    let fake = Fake::new(2);
    let bench = Bench::on(&fake, 1 << 20);
    let stall = Some(Duration::from_millis(300));
    fake.set(0, "hold", 1);
    let batch = bench.submit(&[bench.request(Opcode::Write, 0, 1 << 20)], SubmitOptions { deadline: None, stall });
    assert!(batch.wait(Some(Duration::from_secs(20))));
    assert_eq!(batch.task_status(0).unwrap().state, State::Timeout);
    fake.set(0, "hold", 0);
    completed(&bench.write());
}

#[test]
fn cancelled_work_ends_and_the_rest_arrives() {
    let fake = Fake::new(2);
    let bench = Bench::on(&fake, 1 << 20);
    completed(&bench.write());
    fake.set(0, "hold", 1);
    let half = bench.length / 2;
    let cancelled = bench.submit(&[bench.request(Opcode::Read, 0, half)], SubmitOptions::default());
    let kept = bench.submit(&[bench.request(Opcode::Write, half, half)], SubmitOptions::default());
    bench.ours.write(&pattern(1 << 20, 7));
    cancelled.cancel();
    assert!(cancelled.wait(Some(Duration::from_secs(20))));
    assert_eq!(cancelled.status().state, State::Canceled);
    fake.set(0, "hold", 0);
    assert!(kept.wait(Some(Duration::from_secs(20))));
    completed(&kept.task_status(0).unwrap());
    assert!(bench.ours.read() == pattern(1 << 20, 7), "what was cancelled has moved nothing");
    assert!(bench.theirs.read()[half as usize..] == pattern(1 << 20, 7)[half as usize..]);
}

#[test]
fn unregistering_waits_for_work_and_no_key_is_used_after_it() {
    let fake = Fake::new(2);
    let bench = Bench::on(&fake, 1 << 20);
    let (more, count) = (Memory::new(1 << 20), std::sync::atomic::AtomicUsize::new(0));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let local = more.range(0, 1 << 20);
                    let write = request(Opcode::Write, local, bench.segment, bench.theirs.range(0, 1 << 20));
                    let Ok(statuses) = bench.near.transfer(&[write], SubmitOptions::default()) else { continue };
                    match (statuses[0].state, statuses[0].error.as_ref().map(Error::code)) {
                        (State::Completed, _) => _ = count.fetch_add(1, Ordering::Relaxed),
                        (State::Failed, Some(Code::AddressNotRegistered)) | (State::Canceled, _) => {}
                        other => panic!("{other:?}"),
                    }
                }
            });
        }
        for _ in 0..100 {
            bench.near.register(more.range(0, 1 << 20), &options()).unwrap();
            std::thread::sleep(Duration::from_millis(2));
            bench.near.unregister(more.range(0, 1).address()).unwrap();
            assert_eq!(fake.get(0, "regions"), 1);
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(count.load(Ordering::Relaxed) > 0);
    assert_eq!(fake.get(0, "protection_errors"), 0);
}

#[test]
fn what_a_queue_pair_says_has_arrived_once_it_is_given_up_is_moved_anew() {
    let fake = Fake::new(2);
    let bench = Bench::on(&fake, 1 << 20);
    completed(&bench.write());
    fake.set(0, "flush_status", 0);
    fake.set(0, "hold", 1);
    let half = bench.length / 2;
    bench.theirs.write(&pattern(1 << 20, 8));
    let kept = bench.submit(&[bench.request(Opcode::Read, 0, half)], SubmitOptions::default());
    let cancelled = bench.submit(&[bench.request(Opcode::Read, half, half)], SubmitOptions::default());
    cancelled.cancel();
    assert!(cancelled.wait(Some(Duration::from_secs(20))));
    fake.set(0, "hold", 0);
    assert!(kept.wait(Some(Duration::from_secs(20))));
    completed(&kept.task_status(0).unwrap());
    assert!(bench.ours.read()[..half as usize] == pattern(1 << 20, 8)[..half as usize]);
}

#[test]
fn unregistering_ends_work_that_is_stuck() {
    let fake = Fake::new(2);
    let bench = Bench::on(&fake, 1 << 20);
    completed(&bench.write());
    fake.set(0, "hold", 1);
    let batch = bench.submit(&[bench.request(Opcode::Read, 0, 1 << 20)], SubmitOptions::default());
    bench.near.unregister(bench.ours.range(0, 1).address()).unwrap();
    assert_eq!(fake.get(0, "regions"), 0);
    assert!(batch.wait(Some(Duration::from_secs(20))));
    assert_eq!(batch.status().state, State::Canceled);
    fake.set(0, "hold", 0);
    assert_eq!(bench.ours.read(), vec![0; 1 << 20]);
}

#[test]
fn a_pool_whose_arena_a_device_keeps_says_so_and_keeps_it_mapped() {
    let fake = Fake::new(1);
    let engine = engine(&fake, &["fake0"]);
    let pool = engine.create_pool(&PoolOptions { bytes: Some(1 << 20), ..Default::default() }).unwrap();
    let arena = pool.arena().address();
    fake.set(0, "deregister_fail_at", 1);
    assert_eq!(engine.close_pool(&pool, None).unwrap_err().code(), Code::Context);
    assert_eq!(engine.region_count(), 1, "its range stays blocked");
    drop(pool);
    assert!(crate::sys::pages::is_in_memory(arena).is_ok(), "a device may still write there");
}

#[test]
fn shutting_down_with_work_under_way_leaves_nothing_behind() {
    let fake = Fake::new(4);
    for flushes in [1, 0] {
        fake.set(-1, "flush", flushes);
        let bench = Bench::new(engine(&fake, &["fake0", "fake1"]), engine(&fake, &["fake2", "fake3"]), 4 << 20);
        completed(&bench.write());
        fake.set(0, "hold", 1);
        let batch = bench.submit(&[bench.request(Opcode::Write, 0, 4 << 20)], SubmitOptions::default());
        bench.near.shutdown();
        assert!(batch.is_finished());
        assert_eq!(batch.status().state, State::Canceled);
        fake.set(0, "hold", 0);
        drop(batch);
        let Bench { near, far, .. } = bench;
        drop((near, far));
        wait_until("everything is destroyed", || live(&fake) == [0; 6]);
    }
}

#[test]
fn transfers_end_whether_or_not_somebody_polls() {
    let fake = Fake::new(2);
    let bench = Bench::on(&fake, 1 << 16);
    for _ in 0..50 {
        let batch = bench.submit(&[bench.request(Opcode::Write, 0, 1 << 16)], SubmitOptions::default());
        wait_until("the end without a poll", || batch.is_finished());
        let batch = bench.submit(&[bench.request(Opcode::Write, 0, 1 << 16)], SubmitOptions::default());
        wait_until("the end by polling", || batch.status().state == State::Completed);
    }
}

#[test]
fn a_slow_wire_ends_what_it_carries_in_its_time_whether_or_not_somebody_polls() {
    let fake = Fake::new(2);
    let bench = Bench::on(&fake, 1 << 19);
    completed(&bench.write());
    // 10 bytes in a microsecond: 52 ms for all.
    fake.set(0, "wire_mbits", 80);
    let whole = || bench.request(Opcode::Write, 0, 1 << 19);
    let is_over = |batch: &Batch, polls: bool| match polls {
        false => batch.is_finished(),
        true => batch.status().state == State::Completed,
    };
    for (how, polls) in [("the end without a poll", false), ("the end by polling", true)] {
        let begin = Instant::now();
        // The second one after the first.
        let batches = [whole(), whole()].map(|request| bench.submit(&[request], SubmitOptions::default()));
        batches.iter().for_each(|batch| wait_until(how, || is_over(batch, polls)));
        assert!(begin.elapsed() >= Duration::from_millis(2 * 52), "{how}: {:?}", begin.elapsed());
        batches.iter().for_each(|batch| assert_eq!(batch.status().state, State::Completed));
    }
}

#[test]
fn a_port_that_goes_down_is_left_and_used_again_when_it_is_back() {
    let fake = Fake::new(4);
    let bench = Bench::new(engine(&fake, &["fake0", "fake1"]), engine(&fake, &["fake2", "fake3"]), 4 << 20);
    completed(&bench.write());
    let set = |nic: i32, (event, state): (i32, i64)| {
        fake.set(nic, "port_state", state);
        fake.event(nic, event);
    };
    // One here and one there.
    set(0, PORT_ERROR);
    set(3, PORT_ERROR);
    let named = |engine: &Engine| {
        let header = engine.fetcher.own.read().rdma.clone().unwrap();
        (header.devices.len(), header.priority_matrix["cpu:0"].0.clone())
    };
    wait_until("the NICs are left", || {
        named(&bench.near) == (2, vec!["fake1".into()]) && named(&bench.far) == (2, vec!["fake2".into()])
    });
    let (later, here) = (Memory::new(4 << 20), Memory::new(4 << 20));
    bench.far.register(later.range(0, 4 << 20), &options()).unwrap();
    bench.near.register(here.range(0, 4 << 20), &options()).unwrap();
    here.write(&pattern(4 << 20, 8));
    let write = request(Opcode::Write, here.range(0, 4 << 20), bench.segment, later.range(0, 4 << 20));
    let before = fake.get(0, "bytes_written");
    completed(&bench.transfer(&[write])[0]);
    completed(&bench.write());
    assert!(later.read() == pattern(4 << 20, 8));
    assert_eq!(fake.get(0, "bytes_written"), before);
    set(0, PORT_ACTIVE);
    set(3, PORT_ACTIVE);
    wait_until("the NICs know what was registered meanwhile", || [0, 3].map(|nic| fake.get(nic, "regions")) == [2; 2]);
    bench.near.refresh_segment(bench.segment).unwrap();
    wait_until("the NIC is used again", || {
        completed(&bench.transfer(&[write])[0]);
        fake.get(0, "bytes_written") > before
    });
    for engine in [&bench.near, &bench.far] {
        assert_eq!(named(engine).1.len(), 2);
    }
}

#[test]
fn without_a_usable_nic_installing_fails_and_changes_nothing() {
    let fake = Fake::new(1);
    let options_of_engine =
        EngineOptions { metadata: PEER_TO_PEER.into(), server_name: "127.0.0.1".into(), ..EngineOptions::default() };
    let engine = Engine::create(&options_of_engine, config(&fake)).unwrap();
    engine.install_transport("tcp", None).unwrap();
    let memory = Memory::new(4096);
    engine.register(memory.range(0, 4096), &options()).unwrap();
    let before = engine.card.publish_text();
    fake.set(0, "open_errno", i64::from(libc::EACCES));
    for matrix in [matrix(&["fake0"]), matrix(&["fake7"])] {
        let error = engine.install_transport("rdma", Some(&matrix)).unwrap_err();
        assert_eq!(error.code(), Code::DeviceNotFound, "{error}");
        assert!(error.message().contains("no RDMA device"), "{error}");
    }
    fake.set(0, "open_errno", 0);
    fake.set(0, "register_fail_at", 1);
    assert_eq!(engine.install_transport("rdma", Some(&matrix(&["fake0"]))).unwrap_err().code(), Code::Limit);
    let mut missing = config(&fake);
    missing.rdma.library = "/nonexistent/libibverbs.so.1".into();
    let other = Engine::create(&options_of_engine, missing).unwrap();
    assert_eq!(other.install_transport("rdma", Some(&matrix(&["fake0"]))).unwrap_err().code(), Code::DeviceNotFound);
    assert!(!engine.has_transport("rdma") && !other.has_transport("rdma"));
    assert_eq!(engine.card.publish_text(), before);
    wait_until("nothing is left open", || live(&fake) == [0; 6]);
    engine.install_transport("rdma", Some(&matrix(&["fake0"]))).unwrap();
    assert_eq!(fake.get(0, "regions"), 1, "what was registered before is known to the NIC");
}

#[test]
fn a_nic_that_does_not_start_keeps_its_place_and_is_not_used() {
    let fake = Fake::new(3);
    fake.set(1, "open_errno", i64::from(libc::EACCES));
    let bench = Bench::new(engine(&fake, &["fake0", "fake1"]), engine(&fake, &["fake1", "fake2"]), 4 << 20);
    let header = bench.far.fetcher.own.read().rdma.clone().unwrap();
    assert_eq!(header.devices.iter().map(|device| device.name.as_str()).collect::<Vec<_>>(), ["fake1", "fake2"]);
    assert_eq!(header.priority_matrix["cpu:0"].0, ["fake2"]);
    bench.ours.write(&pattern(4 << 20, 11));
    completed(&bench.write());
    assert!(bench.theirs.read() == pattern(4 << 20, 11));
}

#[test]
fn peers_with_another_number_of_queue_pairs_are_told_why_they_are_rejected() {
    let fake = Fake::new(2);
    let mut other = config(&fake);
    other.rdma.queue_pairs_per_endpoint = 3;
    let bench = Bench::new(engine(&fake, &["fake0"]), engine_with(&other, &["fake1"]), 4096);
    let status = bench.write();
    assert_eq!(status.state, State::Failed);
    let error = status.error.unwrap();
    assert!(error.message().contains("MC_NUM_QP_PER_EP"), "{error}");
}

#[test]
fn strange_connection_requests_are_rejected_with_a_reason() {
    let fake = Fake::new(1);
    let engine = engine(&fake, &["fake0"]);
    let own = format!("{}@fake0", engine.name());
    let gid = "00:00:00:00:00:00:00:00:00:00:ff:ff:c0:a8:00:09";
    let good = serde_json::json!({"local_nic_path": "peer:1@nic", "peer_nic_path": own, "local_gid": gid, "qp_num": [1, 2]});
    let ask = |changes: &[(&str, serde_json::Value)]| {
        let mut request = good.clone();
        changes.iter().for_each(|(key, value)| request[*key] = value.clone());
        crate::handshake::Service::connect(&*engine.card, &request).unwrap()
    };
    for changes in [
        ("peer_nic_path", serde_json::json!("elsewhere@fake0")),
        ("peer_nic_path", serde_json::json!(5)),
        ("local_nic_path", serde_json::json!("")),
        ("local_nic_path", serde_json::json!("x".repeat(100_000))),
        ("local_gid", serde_json::json!("")),
        ("local_gid", serde_json::json!("zz")),
        ("local_gid", serde_json::json!("00:00:00:00:00:00:00:00:00:00:00:00:00:00:00:00")),
        ("qp_num", serde_json::json!([1])),
        ("qp_num", serde_json::json!([1, -1])),
        ("qp_num", serde_json::json!([1, 1 << 24])),
        ("ready_ack", serde_json::json!(true)),
    ] {
        let reply = ask(std::slice::from_ref(&changes));
        assert_ne!(reply["reply_msg"], "", "{changes:?}");
        assert_eq!(reply["qp_num"], serde_json::json!([]), "{changes:?}");
    }
    assert_eq!(fake.get(0, "queue_pairs"), 0);
    let reply = ask(&[]);
    assert_eq!((&reply["reply_msg"], &reply["local_nic_path"]), (&serde_json::json!(""), &serde_json::json!(own)));
    assert_eq!(ask(&[]), reply, "asking again is answered alike");
    let other = ask(&[("qp_num", serde_json::json!([3, 4]))]);
    assert_ne!(other["qp_num"], reply["qp_num"], "a peer that has restarted, or another one");
    assert_eq!((ask(&[("qp_num", serde_json::json!([3, 4]))]), ask(&[])), (other, reply));
    ask(&[("qp_num", serde_json::json!([5, 6]))]);
    assert_eq!(fake.get(0, "queue_pairs"), 4, "the first and the last");
}

#[test]
fn idle_connections_make_room_for_others() {
    let fake = Fake::new(2);
    let mut few = config(&fake);
    few.rdma.max_endpoints = 2;
    let near = engine_with(&few, &["fake0"]);
    let ours = Memory::new(4096);
    near.register(ours.range(0, 4096), &options()).unwrap();
    let peers: Vec<_> = (0..5).map(|_| engine(&fake, &["fake1"])).collect();
    let theirs: Vec<_> = (0..5).map(|_| Memory::new(4096)).collect();
    for turn in 0..3 {
        for (peer, memory) in peers.iter().zip(&theirs) {
            if turn == 0 {
                peer.register(memory.range(0, 4096), &options()).unwrap();
            }
            let segment = near.open_segment(&peer.name()).unwrap();
            let write = request(Opcode::Write, ours.range(0, 4096), segment, memory.range(0, 4096));
            completed(&near.transfer(&[write], SubmitOptions::default()).unwrap()[0]);
            assert!(fake.get(0, "queue_pairs") <= 6, "{}", fake.get(0, "queue_pairs"));
        }
    }
}

#[test]
fn a_server_is_left_alone_after_a_connection_has_ended_if_that_is_asked_for() {
    let fake = Fake::new(2);
    let mut pausing = config(&fake);
    pausing.rdma.reconnect_pause = Duration::from_millis(1500);
    let bench = Bench::new(engine_with(&pausing, &["fake0"]), engine(&fake, &["fake1"]), 4096);
    completed(&bench.write());
    fake.set(0, "status_at", 1);
    let begin = Instant::now();
    let status = bench.write();
    assert_eq!(status.state, State::Failed);
    assert!(status.error.unwrap().message().contains("MC_CONN_PAUSE_TTL_MS"));
    wait_until("it is connected to again", || bench.write().state == State::Completed);
    assert!(begin.elapsed() >= Duration::from_millis(1500));
}

#[test]
fn another_gid_is_taken_where_one_does_not_connect() {
    let fake = Fake::new(2);
    fake.set(0, "rtr_errno", i64::from(libc::EINVAL));
    fake.set(0, "rtr_fail_gid_index", 1);
    let bench = Bench::on(&fake, 4096);
    completed(&bench.write());
}

/// A peer's segment as a test wants it: another id, another descriptor, other answers.
struct Altered {
    id: u64,
    of: Arc<dyn Segment>,
    descriptor: Arc<SegmentDescriptor>,
    refresh: Box<dyn Fn() + Send + Sync>,
    connect: Box<Connect>,
}

type Connect = dyn Fn(&dyn Segment, &serde_json::Value) -> Result<serde_json::Value> + Send + Sync;

impl Altered {
    fn new(bench: &Bench, id: u64) -> Altered {
        let of: Arc<dyn Segment> = bench.near.segments.get(bench.segment).unwrap();
        let descriptor = of.descriptor();
        Altered { id, of, descriptor, refresh: Box::new(|| ()), connect: Box::new(|of, request| of.request_connection(request)) }
    }

    /// Starts a write of the first bytes there; the answer is the only word of its end.
    fn write(self, bench: &Bench, length: u64, stall: Duration) -> Arc<Told> {
        self.write_to(bench, bench.theirs.range(0, 1).address(), length, stall)
    }

    fn write_to(self, bench: &Bench, remote_address: u64, length: u64, stall: Duration) -> Arc<Told> {
        let local = bench.ours.range(0, length);
        let mut guards = SharedGuards::default();
        bench.near.registry.read(|view| view.share(local, &mut guards)).unwrap();
        let told = Arc::new(Told { guards, ..Told::default() });
        let slices = Slices {
            pieces: vec![Piece { local, remote_address, index: 0, opcode: Opcode::Write, way: Way::default() }],
            deadline: Deadline { absolute: None, stall },
            completion: told.clone(),
        };
        let segment: Arc<dyn Segment> = Arc::new(self);
        rdma_of(&bench.near).submit(&segment, slices);
        told
    }
}

impl Segment for Altered {
    fn id(&self) -> u64 {
        self.id
    }

    fn descriptor(&self) -> Arc<SegmentDescriptor> {
        self.descriptor.clone()
    }

    fn refresh(&self) -> Result<Arc<SegmentDescriptor>> {
        (self.refresh)();
        Ok(self.descriptor.clone())
    }

    fn host(&self) -> Result<String> {
        self.of.host()
    }

    fn request_connection(&self, request: &serde_json::Value) -> Result<serde_json::Value> {
        (self.connect)(&*self.of, request)
    }
}

/// Keeps what it is told.
#[derive(Default)]
struct Told {
    guards: SharedGuards,
    outcomes: Mutex<Vec<Result<()>>>,
    /// How often it is told that something has completed.
    calls: AtomicUsize,
    cancelled: AtomicBool,
}

impl Told {
    fn is_over(&self) -> bool {
        !self.outcomes.lock().is_empty()
    }

    /// The one outcome.
    #[track_caller]
    fn outcome(&self) -> std::result::Result<(), Code> {
        wait_until("it ends", || self.is_over());
        let outcomes = self.outcomes.lock();
        assert_eq!(outcomes.len(), 1);
        outcomes[0].as_ref().copied().map_err(Error::code)
    }
}

impl crate::transport::Completion for Told {
    fn finish(&self, index: u32, outcome: Result<()>) {
        self.guards.release(index as usize);
        self.outcomes.lock().push(outcome);
    }

    fn complete(&self, indices: &[u32]) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        indices.iter().for_each(|index| self.finish(*index, Ok(())));
    }

    fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::SeqCst)
    }

    fn region(&self, index: u32, address: u64) -> Option<&Region> {
        self.guards.region(index as usize, address)
    }
}

fn rdma_of(engine: &Engine) -> Arc<dyn Transport> {
    engine.transports.read().iter().find(|transport| transport.protocol() == "rdma").unwrap().clone()
}

fn gid_of(engine: &Engine) -> String {
    engine.fetcher.own.read().rdma.as_ref().unwrap().devices[0].gid.clone()
}

const LONG: Duration = Duration::from_secs(3600);

/// Each way has a key of its own that is refused; none of them is a reason to try the other one again.
#[test]
fn memory_to_which_no_nic_of_the_peer_gives_access_is_not_tried_for_ever() {
    let fake = Fake::new(4);
    let bench = Bench::new(engine(&fake, &["fake0", "fake1"]), engine(&fake, &["fake2", "fake3"]), 1 << 20);
    completed(&bench.write());
    let mut altered = Altered::new(&bench, 1000);
    let mut descriptor = (*altered.descriptor).clone();
    descriptor.buffers.iter_mut().flat_map(|buffer| &mut buffer.rkey).for_each(|key| *key ^= 0xff00_0000);
    altered.descriptor = Arc::new(descriptor);
    let posted = fake.get(-1, "posted");
    assert_eq!(altered.write(&bench, 4096, LONG).outcome(), Err(Code::AddressNotRegistered));
    assert_eq!(fake.get(-1, "posted"), posted + 1);
    completed(&bench.write());
}

#[test]
fn waiting_for_a_descriptor_is_no_stall_of_what_has_moved_before() {
    let fake = Fake::new(2);
    let bench = Bench::on(&fake, 4096);
    let mut altered = Altered::new(&bench, 1000);
    altered.refresh = Box::new(|| std::thread::sleep(Duration::from_millis(400)));
    altered.connect = Box::new(|of, request| {
        std::thread::sleep(Duration::from_millis(500));
        of.request_connection(request)
    });
    fake.set(0, "hold", 1);
    let told = altered.write(&bench, 4096, Duration::from_millis(1500));
    wait_until("posted", || fake.get(0, "posted") == 1);
    // Later than the limit after the beginning, but not after the connection.
    std::thread::sleep(Duration::from_millis(700));
    fake.set(0, "status_at", 1);
    fake.set(0, "hold", 0);
    assert_eq!(told.outcome(), Ok(()));
}

#[test]
fn what_waits_for_the_descriptor_of_a_forgotten_segment_can_be_cancelled_and_ends_at_the_end() {
    let fake = Fake::new(2);
    let bench = Bench::on(&fake, 4096);
    let transport = rdma_of(&bench.near);
    let is_held = Arc::new(AtomicBool::new(true));
    // One more than there are threads to ask: the last is never asked.
    let told: Vec<_> = (0..5)
        .map(|number| {
            let mut altered = Altered::new(&bench, 1000 + number);
            let is_held = is_held.clone();
            altered.refresh = Box::new(move || wait_until("released", || !is_held.load(Ordering::SeqCst)));
            altered.write_to(&bench, 4096, 4096, LONG)
        })
        .collect();
    (0..5).for_each(|number| transport.forget(1000 + number));
    told[0].cancelled.store(true, Ordering::SeqCst);
    transport.cancel();
    assert!(told[0].is_over());
    assert!(told[1..].iter().all(|told| !told.is_over()));
    let release = is_held.clone();
    let releasing = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        release.store(false, Ordering::SeqCst);
    });
    bench.near.shutdown();
    releasing.join().unwrap();
    // Some may have had their descriptors just before.
    told.iter().for_each(|told| assert!(told.outcome().is_err()));
}

#[test]
fn a_peer_that_rejects_the_last_step_is_not_connected_with() {
    let fake = Fake::new(2);
    let bench = Bench::on(&fake, 4096);
    let mut altered = Altered::new(&bench, 1000);
    altered.connect = Box::new(|of, request| match request["ready_ack"] {
        serde_json::Value::Bool(true) => Ok(serde_json::json!({"reply_msg": "not connected with these"})),
        _ => of.request_connection(request),
    });
    assert_eq!(altered.write(&bench, 4096, LONG).outcome(), Err(Code::RejectHandshake));
    assert_eq!(fake.get(0, "posted"), 0);
}

#[test]
fn a_port_that_flaps_while_a_connection_is_made_does_not_cost_the_nic_its_address() {
    let fake = Arc::new(Fake::new(2));
    let bench = Bench::on(&fake, 4096);
    let before = gid_of(&bench.near);
    let mut altered = Altered::new(&bench, 1000);
    let (flapping, near, is_first) = (fake.clone(), Arc::downgrade(&bench.near), AtomicBool::new(true));
    altered.connect = Box::new(move |of, request| {
        if is_first.swap(false, Ordering::SeqCst) {
            let near = near.upgrade().unwrap();
            let is_named = || !near.fetcher.own.read().rdma.clone().unwrap().priority_matrix["cpu:0"].0.is_empty();
            for (event, state) in [PORT_ERROR, PORT_ACTIVE] {
                flapping.set(0, "port_state", state);
                flapping.event(0, event);
                wait_until("it is noticed", || is_named() == (event == PORT_ACTIVE.0));
            }
        }
        of.request_connection(request)
    });
    let told = altered.write(&bench, 4096, LONG);
    let _ = told.outcome();
    wait_until("it is connected with", || bench.write().state == State::Completed);
    assert_eq!(gid_of(&bench.near), before);
}

#[test]
fn strangers_do_not_change_the_address_of_a_nic() {
    let fake = Fake::new(2);
    let bench = Bench::on(&fake, 4096);
    completed(&bench.write());
    let before = gid_of(&bench.far);
    fake.set(1, "rtr_errno", i64::from(libc::EINVAL));
    let gid = "00:00:00:00:00:00:00:00:00:00:ff:ff:c0:a8:00:09";
    let path = format!("{}@fake1", bench.far.name());
    let request = serde_json::json!({"local_nic_path": "peer:1@nic", "peer_nic_path": path, "local_gid": gid, "qp_num": [1, 2]});
    let reply = crate::handshake::Service::connect(&*bench.far.card, &request).unwrap();
    assert_ne!(reply["reply_msg"], "");
    assert_eq!(gid_of(&bench.far), before);
}

#[test]
fn strangers_do_not_end_the_connections_of_others() {
    let fake = Fake::new(2);
    let bench = Bench::on(&fake, 1 << 16);
    let back = bench.far.open_segment(&bench.near.name()).unwrap();
    completed(&bench.write());
    let gid = "00:00:00:00:00:00:00:00:00:00:ff:ff:c0:a8:00:09";
    // In the name of the peer: to the side that submits, and to the one that only serves.
    for turn in 0..3 {
        for (of, name) in [(&bench.near, &bench.far), (&bench.far, &bench.near)] {
            let [nic, other] = if Arc::ptr_eq(of, &bench.near) { ["fake0", "fake1"] } else { ["fake1", "fake0"] };
            let (to, from) = (format!("{}@{nic}", of.name()), format!("{}@{other}", name.name()));
            for ready in [false, true] {
                let request = serde_json::json!({"local_nic_path": from, "peer_nic_path": to, "local_gid": gid,
                    "qp_num": [7 + turn, 8], "ready_ack": ready});
                // Where the peer has been asked already, it is rejected.
                crate::handshake::Service::connect(&*of.card, &request).unwrap();
            }
        }
        bench.ours.write(&pattern(1 << 16, 40 + turn));
        completed(&bench.write());
        assert!(bench.theirs.read() == pattern(1 << 16, 40 + turn));
    }
    wait_until("the peer has been asked, and the stranger is gone", || {
        completed(&bench.write());
        fake.get(0, "queue_pairs") == 2
    });
    completed(&bench.far.transfer(&[request_of(&bench, back)], SubmitOptions::default()).unwrap()[0]);
    let (near, far) = (bench.near.counters(), bench.far.counters());
    assert_eq!((near.connections_opened.get(), far.connections_opened.get()), (1, 0), "the one of the beginning");
    assert_eq!((near.connections_failed.get(), far.connections_failed.get()), (0, 0));
}

#[test]
fn strangers_get_no_more_endpoints_than_there_are() {
    let fake = Fake::new(1);
    let mut few = config(&fake);
    few.rdma.max_endpoints = 2;
    let engine = engine_with(&few, &["fake0"]);
    let own = format!("{}@fake0", engine.name());
    let gid = "00:00:00:00:00:00:00:00:00:00:ff:ff:c0:a8:00:09";
    let replies: Vec<_> = (0..4)
        .map(|number| {
            let path = format!("peer:{number}@nic");
            let request = serde_json::json!({"local_nic_path": path, "peer_nic_path": own, "local_gid": gid, "qp_num": [1, 2],
                "ready_ack": false});
            crate::handshake::Service::connect(&*engine.card, &request).unwrap()["reply_msg"].to_string()
        })
        .collect();
    assert_eq!(replies[..2], ["\"\"", "\"\""]);
    assert!(replies[2..].iter().all(|reply| reply.contains("MC_MAX_EP_PER_CTX")), "{replies:?}");
    assert_eq!(fake.get(0, "queue_pairs"), 4);
}

/// Work waits for room in the completion queue, all of which is taken by a connection that does not flush.
fn room_is_used_when_a_stuck_connection_is_gone(flush: i64) {
    let fake = Fake::new(2);
    fake.set(0, "max_cqe", 4);
    let bench = Bench::on(&fake, 1 << 20);
    let other = engine(&fake, &["fake1"]);
    let theirs = Memory::new(4096);
    other.register(theirs.range(0, 4096), &options()).unwrap();
    let segment = bench.near.open_segment(&other.name()).unwrap();
    let write = request(Opcode::Write, bench.ours.range(0, 4096), segment, theirs.range(0, 4096));
    completed(&bench.write());
    completed(&bench.transfer(&[write])[0]);
    fake.set(0, "hold", 1);
    fake.set(0, "flush", flush);
    let posted = fake.get(0, "posted");
    let deadline = Some(Instant::now() + Duration::from_millis(100));
    let stuck = bench.submit(&[bench.request(Opcode::Write, 0, 1 << 20)], SubmitOptions { deadline, stall: None });
    wait_until("the completion queue has no more room", || fake.get(0, "posted") == posted + 4);
    let waiting = bench.submit(&[write], SubmitOptions::default());
    std::thread::sleep(Duration::from_millis(300));
    fake.set(0, "hold", 0);
    assert!(stuck.wait(Some(Duration::from_secs(10))));
    assert!(waiting.wait(Some(Duration::from_secs(10))));
    completed(&waiting.task_status(0).unwrap());
    assert_eq!(fake.get(0, "posted"), posted + 5, "what waited was posted once, and its completion came");
}

#[test]
fn room_that_a_stuck_connection_leaves_is_used_by_others() {
    room_is_used_when_a_stuck_connection_is_gone(0);
}

#[test]
fn completions_of_a_connection_that_was_destroyed_leave_room_for_those_of_others() {
    room_is_used_when_a_stuck_connection_is_gone(2);
}

#[test]
fn a_nic_that_comes_back_twice_is_given_memory_once() {
    let fake = Fake::new(2);
    let near = engine(&fake, &["fake0", "fake1"]);
    fake.set(0, "port_state", PORT_ERROR.1);
    fake.event(0, PORT_ERROR.0);
    let named = || near.fetcher.own.read().rdma.clone().unwrap().priority_matrix["cpu:0"].0.len();
    wait_until("it is left", || named() == 1);
    let memory = Memory::new(4096);
    near.register(memory.range(0, 4096), &options()).unwrap();
    fake.set(0, "register_microseconds", 100_000);
    let device = rdma_of(&near).devices().swap_remove(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| near.registrar.attach_device(0, &*device, &|| true));
        }
    });
    assert_eq!(fake.get(0, "regions"), 1);
    near.unregister(memory.range(0, 1).address()).unwrap();
    assert_eq!(fake.get(-1, "regions"), 0);
}

/// `IBV_EVENT_CQ_ERR` and `IBV_EVENT_DEVICE_FATAL`.
const QUEUE_ERROR: i32 = 0;
const DEVICE_FATAL: i32 = 8;

/// NICs that peers are told of.
fn named(engine: &Engine) -> Vec<String> {
    engine.fetcher.own.read().rdma.clone().unwrap().priority_matrix["cpu:0"].0.clone()
}

/// Two engines with two NICs each, and 4 MiB.
fn two_by_two(fake: &Fake) -> Bench {
    Bench::new(engine(fake, &["fake0", "fake1"]), engine(fake, &["fake2", "fake3"]), 4 << 20)
}

#[test]
fn a_nic_that_failed_to_start_is_used_once_it_can_be() {
    let fake = Fake::new(4);
    let sound = |setting: &str| if setting == "port_state" { PORT_ACTIVE.1 } else { 0 };
    for setting in ["open_errno", "domain_errno", "channel_errno", "queue_errno", "port_state"] {
        for nic in [0, 3] {
            fake.set(nic, setting, 1);
        }
        let bench = two_by_two(&fake);
        completed(&bench.write());
        assert_eq!((named(&bench.near), named(&bench.far)), (vec!["fake1".to_string()], vec!["fake2".to_string()]), "{setting}");
        assert_eq!([0, 3].map(|nic| fake.get(nic, "regions")), [0; 2]);
        for nic in [0, 3] {
            fake.set(nic, setting, sound(setting));
        }
        wait_until("the NICs are used", || named(&bench.near).len() == 2 && named(&bench.far).len() == 2);
        assert_eq!([0, 3].map(|nic| fake.get(nic, "regions")), [1; 2], "{setting}");
        bench.near.refresh_segment(bench.segment).unwrap();
        let before = [0, 3].map(|nic| fake.get(nic, "queue_pairs"));
        let moved = fake.get(0, "bytes_written");
        bench.ours.write(&pattern(4 << 20, 30));
        completed(&bench.write());
        assert!(bench.theirs.read() == pattern(4 << 20, 30));
        assert!(fake.get(0, "bytes_written") > moved, "{setting}");
        assert!([0, 3].map(|nic| fake.get(nic, "queue_pairs")) > before, "{setting}");
        drop(bench);
        wait_until("nothing is left", || live(&fake) == [0; 6]);
    }
}

#[test]
fn a_nic_that_breaks_comes_back_with_all_memory_and_peers_use_its_new_keys() {
    let fake = Fake::new(4);
    let breaks: [(&str, &dyn Fn(i32)); 3] = [
        ("a completion queue fails", &|nic| fake.event(nic, QUEUE_ERROR)),
        ("the device fails", &|nic| fake.event(nic, DEVICE_FATAL)),
        ("a completion queue cannot be polled", &|nic| fake.set(nic, "poll_errno", i64::from(libc::EIO))),
    ];
    // Whether the peer transfers meanwhile, or is left with what it knew.
    for ((what, fail), is_idle) in breaks.into_iter().flat_map(|it| [(it, false), (it, true)]) {
        let mut hasty = config(&fake);
        hasty.rdma.rail_pause = Duration::from_millis(100);
        let bench = Bench::new(engine_with(&hasty, &["fake0", "fake1"]), engine(&fake, &["fake2", "fake3"]), 4 << 20);
        let (gone, later) = (Memory::new(4096), Memory::new(1 << 20));
        bench.far.register(gone.range(0, 4096), &options()).unwrap();
        completed(&bench.write());
        let before = fake.get(2, "registrations");
        // It cannot be opened for a while.
        fake.set(2, "open_errno", i64::from(libc::EIO));
        fail(2);
        wait_until("it is given up", || named(&bench.far) == ["fake3"]);
        if !is_idle {
            bench.ours.write(&pattern(4 << 20, 31));
            completed(&bench.write());
            assert!(bench.theirs.read() == pattern(4 << 20, 31), "{what}");
        }
        bench.far.unregister(gone.range(0, 1).address()).unwrap();
        bench.far.register(later.range(0, 1 << 20), &options()).unwrap();
        wait_until("it is closed", || fake.get(2, "contexts") == 0);
        assert_eq!((fake.get(2, "regions"), fake.get(3, "regions")), (0, 2), "{what}");
        fake.set(2, "poll_errno", 0);
        fake.set(2, "open_errno", 0);
        wait_until("it is back", || named(&bench.far).len() == 2);
        assert_eq!((fake.get(2, "contexts"), fake.get(2, "regions")), (1, 2), "{what}");
        assert_eq!(fake.get(2, "registrations"), before + 2);
        // With the keys of before, and those of what was registered meanwhile.
        for _ in 0..4 {
            let read = request(Opcode::Read, bench.ours.range(0, 1 << 20), bench.segment, later.range(0, 1 << 20));
            completed(&bench.transfer(&[read])[0]);
            bench.ours.write(&pattern(4 << 20, 32));
            completed(&bench.write());
            assert!(bench.theirs.read() == pattern(4 << 20, 32), "{what}");
        }
        // What it was told meanwhile does not name the NIC.
        bench.near.refresh_segment(bench.segment).unwrap();
        wait_until("the peer uses it again", || {
            completed(&bench.write());
            fake.get(2, "queue_pairs") > 0
        });
        for memory in [&bench.theirs, &later] {
            bench.far.unregister(memory.range(0, 1).address()).unwrap();
        }
        assert_eq!((fake.get(2, "regions"), fake.get(3, "regions")), (0, 0), "{what}");
        drop(bench);
        wait_until("nothing is left", || live(&fake) == [0; 6]);
    }
}

#[test]
fn work_on_a_nic_that_breaks_ends_elsewhere() {
    let fake = Fake::new(4);
    let bench = two_by_two(&fake);
    completed(&bench.write());
    fake.set(0, "hold", 1);
    bench.ours.write(&pattern(4 << 20, 33));
    let batch = bench.submit(&[bench.request(Opcode::Write, 0, 4 << 20)], SubmitOptions::default());
    wait_until("posted", || bench.near.nic_loads()[0].bytes_in_flight > 0);
    // Nothing comes back from its queues any more.
    fake.set(0, "poll_errno", i64::from(libc::EIO));
    assert!(batch.wait(Some(Duration::from_secs(20))));
    completed(&batch.task_status(0).unwrap());
    assert!(bench.theirs.read() == pattern(4 << 20, 33));
    fake.set(0, "poll_errno", 0);
    fake.set(0, "hold", 0);
    wait_until("it is back", || named(&bench.near).len() == 2);
    completed(&bench.write());
}

#[test]
fn the_thread_of_a_nic_that_breaks_sleeps_until_its_queue_pairs_are_gone() {
    let fake = Fake::new(4);
    let bench = two_by_two(&fake);
    completed(&bench.write());
    fake.set(0, "hold", 1);
    fake.set(0, "flush", 0);
    let batch = bench.submit(&[bench.request(Opcode::Write, 0, 4 << 20)], SubmitOptions::default());
    wait_until("posted", || bench.near.nic_loads()[0].bytes_in_flight > 0);
    let (polls, registrations) = (fake.get(0, "polls"), fake.get(0, "registrations"));
    fake.event(0, DEVICE_FATAL);
    wait_until("it is opened anew", || fake.get(0, "registrations") > registrations);
    let polls = fake.get(0, "polls") - polls;
    // For a second, every ten milliseconds or when there is something to be done.
    assert!(polls < 10_000, "{polls} calls");
    fake.set(0, "hold", 0);
    assert!(batch.wait(Some(Duration::from_secs(20))));
    completed(&batch.task_status(0).unwrap());
}

#[test]
fn a_port_that_goes_down_while_its_nic_comes_back_is_left() {
    let fake = Fake::new(2);
    let near = engine(&fake, &["fake0", "fake1"]);
    let set = |(event, state): (i32, i64)| {
        fake.set(0, "port_state", state);
        fake.event(0, event);
    };
    set(PORT_ERROR);
    wait_until("it is left", || named(&near).len() == 1);
    let memory = Memory::new(4096);
    near.register(memory.range(0, 4096), &options()).unwrap();
    fake.set(0, "register_microseconds", 300_000);
    set(PORT_ACTIVE);
    wait_until("it is told of memory", || fake.get(0, "registering") == 1);
    set(PORT_ERROR);
    wait_until("it has been told", || fake.get(0, "registering") == 0);
    let device = rdma_of(&near).devices().swap_remove(0);
    std::thread::sleep(Duration::from_millis(200));
    wait_until("it is left again", || !device.is_active() && named(&near) == ["fake1"]);
    set(PORT_ACTIVE);
    wait_until("it is back", || named(&near).len() == 2);
}

#[test]
fn memory_that_is_registered_while_a_nic_comes_back_is_known_to_it() {
    let fake = Fake::new(2);
    let near = engine(&fake, &["fake0", "fake1"]);
    let memory = Memory::new(4096);
    for turn in 0..3 {
        fake.set(0, "port_state", PORT_ERROR.1);
        fake.event(0, PORT_ERROR.0);
        wait_until("it is left", || named(&near).len() == 1);
        fake.set(1, "register_microseconds", 400_000);
        std::thread::scope(|scope| {
            scope.spawn(|| near.register(memory.range(0, 4096), &options()).unwrap());
            wait_until("it is under way", || fake.get(1, "registering") == 1);
            fake.set(0, "port_state", PORT_ACTIVE.1);
            fake.event(0, PORT_ACTIVE.0);
            wait_until("it is back", || named(&near).len() == 2);
        });
        fake.set(1, "register_microseconds", 0);
        assert_eq!((fake.get(0, "regions"), fake.get(1, "regions")), (1, 1), "{turn}");
        near.unregister(memory.range(0, 1).address()).unwrap();
        assert_eq!(fake.get(-1, "regions"), 0);
    }
}

#[test]
fn registering_does_not_wait_until_a_nic_that_comes_back_knows_all_memory() {
    let fake = Fake::new(2);
    let near = engine(&fake, &["fake0", "fake1"]);
    fake.set(0, "port_state", PORT_ERROR.1);
    fake.event(0, PORT_ERROR.0);
    wait_until("it is left", || named(&near).len() == 1);
    let memory: Vec<_> = (0..41).map(|_| Memory::new(4096)).collect();
    memory[1..].iter().for_each(|memory| near.register(memory.range(0, 4096), &options()).unwrap());
    fake.set(0, "register_microseconds", 200_000);
    fake.set(1, "register_microseconds", 400_000);
    std::thread::scope(|scope| {
        let registering = scope.spawn(|| near.register(memory[0].range(0, 4096), &options()).unwrap());
        wait_until("it is under way", || fake.get(1, "registering") == 1);
        fake.set(0, "port_state", PORT_ACTIVE.1);
        fake.event(0, PORT_ACTIVE.0);
        registering.join().unwrap();
        assert!(fake.get(0, "registrations") < 40);
        fake.set(0, "register_microseconds", 0);
    });
    wait_until("it knows all", || fake.get(0, "regions") == 41);
}

#[test]
fn an_engine_ends_while_a_nic_comes_back_and_leaves_nothing_behind() {
    let fake = Fake::new(4);
    for is_open in [false, true] {
        let bench = two_by_two(&fake);
        completed(&bench.write());
        let registrations = fake.get(0, "registrations");
        if is_open {
            fake.set(0, "register_microseconds", 200_000);
        } else {
            fake.set(0, "open_errno", i64::from(libc::EIO));
        }
        fake.event(0, DEVICE_FATAL);
        match is_open {
            true => wait_until("it is told of memory", || fake.get(0, "registering") == 1),
            false => wait_until("it is closed", || fake.get(0, "contexts") == 0),
        }
        bench.near.shutdown();
        fake.set(0, "register_microseconds", 0);
        fake.set(0, "open_errno", 0);
        assert!(fake.get(0, "registrations") <= registrations + 1);
        drop(bench);
        wait_until("nothing is left", || live(&fake) == [0; 6]);
    }
}

#[test]
fn memory_may_come_and_go_while_nics_break_and_come_back() {
    let fake = Fake::new(4);
    let bench = two_by_two(&fake);
    let others: Vec<_> = (0..3).map(|_| Memory::new(1 << 16)).collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for memory in &others {
            let (stop, near) = (&stop, &bench.near);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    // A device that breaks while it registers fails the call.
                    if near.register(memory.range(0, 1 << 16), &options()).is_ok() {
                        std::thread::sleep(Duration::from_millis(1));
                        near.unregister(memory.range(0, 1).address()).unwrap();
                    }
                }
            });
        }
        for turn in 0..4 {
            let before = fake.get(0, "registrations");
            fake.event(0, if turn % 2 == 0 { QUEUE_ERROR } else { DEVICE_FATAL });
            wait_until("it is given up", || named(&bench.near) == ["fake1"]);
            completed(&bench.write());
            wait_until("it is back", || named(&bench.near).len() == 2 && fake.get(0, "registrations") > before);
            completed(&bench.write());
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!((fake.get(0, "regions"), fake.get(1, "regions")), (1, 1));
    bench.near.unregister(bench.ours.range(0, 1).address()).unwrap();
    assert_eq!((fake.get(0, "regions"), fake.get(1, "regions")), (0, 0));
}

#[test]
fn a_nic_that_comes_back_does_not_wait_for_an_unregistration_that_waits() {
    let fake = Fake::new(4);
    let bench = two_by_two(&fake);
    completed(&bench.write());
    fake.set(0, "port_state", PORT_ERROR.1);
    fake.event(0, PORT_ERROR.0);
    wait_until("it is left", || named(&bench.near).len() == 1);
    fake.set(1, "hold", 1);
    fake.set(1, "flush", 0);
    let batch = bench.submit(&[bench.request(Opcode::Read, 0, 1 << 20)], SubmitOptions::default());
    std::thread::scope(|scope| {
        scope.spawn(|| bench.near.unregister(bench.ours.range(0, 1).address()).unwrap());
        wait_until("it is being unregistered", || bench.near.regions().is_empty());
        fake.set(0, "port_state", PORT_ACTIVE.1);
        fake.event(0, PORT_ACTIVE.0);
        wait_until("it is back", || named(&bench.near).len() == 2);
        assert!(bench.near.find_region(bench.ours.range(0, 1).address()).is_some(), "it is being unregistered yet");
        let other = Memory::new(4096);
        bench.near.register(other.range(0, 4096), &options()).unwrap();
        let write = request(Opcode::Write, other.range(0, 4096), bench.segment, bench.theirs.range(0, 4096));
        wait_until("by the NIC that is back", || bench.transfer(&[write])[0].state == State::Completed);
        bench.near.unregister(other.range(0, 1).address()).unwrap();
    });
    assert!(batch.wait(Some(Duration::from_secs(20))));
    fake.set(1, "hold", 0);
}

#[test]
fn a_location_that_is_left_open_is_found_once_there_are_pages() {
    let fake = Fake::new(2);
    let bench = Bench::on(&fake, 4096);
    let anywhere = MemoryOptions { location: "*".into(), ..options() };
    let published = |memory: &Memory| {
        bench.near.refresh_segment(bench.segment).unwrap();
        let buffers = bench.near.segments.get(bench.segment).unwrap().descriptor().buffers.clone();
        buffers.into_iter().find(|buffer| buffer.address == memory.range(0, 1).address()).unwrap().name.to_string()
    };
    let (written, absent, said) = (Memory::new(1 << 16), Memory::new(1 << 16), Memory::new(1 << 16));
    written.write(&[1]);
    // Some containers forbid the question.
    let expected = crate::topology::location_of(written.range(0, 1 << 16)).unwrap_or("*".into());
    let nodes = crate::sys::limits::numa_nodes();
    assert!(*expected == *"*" || nodes.iter().any(|node| *expected == format!("cpu:{node}")), "{expected}");
    bench.far.register(written.range(0, 1 << 16), &anywhere).unwrap();
    assert_eq!(published(&written), *expected);
    assert_eq!(bench.far.find_region(written.range(0, 1).address()).unwrap().location, expected);
    // The fake NIC pins nothing, so the page is still to come, and is not made by asking.
    bench.far.register(absent.range(0, 1 << 16), &anywhere).unwrap();
    assert_eq!(published(&absent), "*");
    let pagemap = crate::sys::pages::Pagemap::open().unwrap();
    assert!(!pagemap.page(absent.range(0, 1).address()).unwrap().present);
    // What the caller says is taken as it is.
    said.write(&[1]);
    bench.far.register(said.range(0, 1 << 16), &MemoryOptions { location: "cuda:7".into(), ..options() }).unwrap();
    assert_eq!(published(&said), "cuda:7");
    // The same again means the same words, whatever was found.
    let counted = MemoryOptions { counted: true, ..anywhere };
    let twice = Memory::new(4096);
    twice.write(&[1]);
    (0..2).for_each(|_| bench.far.register(twice.range(0, 4096), &counted).unwrap());
    (0..2).for_each(|_| bench.far.unregister(twice.range(0, 1).address()).unwrap());
}

#[test]
fn memory_that_was_registered_before_the_transport_is_located_when_it_comes() {
    let fake = Fake::new(1);
    let options_of_engine =
        EngineOptions { metadata: PEER_TO_PEER.into(), server_name: "127.0.0.1".into(), ..EngineOptions::default() };
    let engine = Engine::create(&options_of_engine, config(&fake)).unwrap();
    let memory = Memory::new(4096);
    memory.write(&[1]);
    engine.register(memory.range(0, 4096), &MemoryOptions { location: "*".into(), ..options() }).unwrap();
    let location = || engine.find_region(memory.range(0, 1).address()).unwrap().location;
    assert_eq!(&*location(), "*");
    engine.install_transport("rdma", Some(&matrix(&["fake0"]))).unwrap();
    assert_eq!(location(), crate::topology::location_of(memory.range(0, 4096)).unwrap_or("*".into()));
}

#[test]
fn memory_of_a_gpu_that_no_driver_makes_known_is_refused_with_what_is_missing() {
    let fake = Fake::new(1);
    let engine = engine(&fake, &["fake0"]);
    // To a kernel without the GPU's peer memory module its addresses are not mapped.
    let of_gpu = Memory::unmapped(1 << 20);
    for location in ["cuda:0", "*"] {
        let error = engine.register(of_gpu, &MemoryOptions { location: location.into(), ..options() }).unwrap_err();
        assert_eq!(error.code(), Code::Fault);
        assert!(error.message().contains("nvidia_peermem"), "{error}");
        assert!(engine.find_region(of_gpu.address()).is_none(), "nothing is left of it");
    }
}

#[test]
fn a_handshake_that_hangs_does_not_keep_queue_pairs_from_being_destroyed() {
    let fake = Fake::new(2);
    let bench = Arc::new(Bench::on(&fake, 4096));
    let back = bench.far.open_segment(&bench.near.name()).unwrap();
    fake.set(0, "hold", 1);
    fake.set(0, "flush", 0);
    let is_held = Arc::new(AtomicBool::new(true));
    let mut altered = Altered::new(&bench, 1000);
    let (other, held) = (Arc::downgrade(&bench), is_held.clone());
    altered.connect = Box::new(move |of, request| {
        // The peer asks at the same time, and connects the same queue pairs.
        if let Some(bench) = other.upgrade() {
            let read = request_of(&bench, back);
            completed(&bench.far.transfer(&[read], SubmitOptions::default()).unwrap()[0]);
        }
        wait_until("released", || !held.load(Ordering::SeqCst));
        of.request_connection(request)
    });
    let told = altered.write(&bench, 4096, Duration::from_millis(200));
    wait_until("posted by the peer's wish", || fake.get(0, "posted") == 1);
    assert_eq!(told.outcome(), Err(Code::Timeout));
    assert!(is_held.swap(false, Ordering::SeqCst));
    fake.set(0, "hold", 0);
}

/// A read of everything by the other side.
fn request_of(bench: &Bench, back: u64) -> Request {
    request(Opcode::Read, bench.theirs.range(0, bench.length), back, bench.ours.range(0, bench.length))
}

#[test]
fn threads_of_nics_take_no_signals() {
    let fake = Fake::new(1);
    let _engine = engine(&fake, &["fake0"]);
    let user = [libc::SIGINT, libc::SIGTERM, libc::SIGUSR1, libc::SIGALRM];
    let masks = || -> Vec<u64> {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        // Others of this process come and go.
        let texts = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("status")).ok());
        let field = |text: &str, name: &str| text.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_string();
        let of_nics = texts.filter(|text| field(text, "Name:").starts_with("te-rdma-"));
        of_nics.map(|text| u64::from_str_radix(&field(&text, "SigBlk:"), 16).unwrap()).collect()
    };
    wait_until("it has begun", || !masks().is_empty());
    assert!(masks().iter().all(|mask| user.iter().all(|signal| mask >> (signal - 1) & 1 == 1)));
}

/// An engine that peers find by a metadata server.
fn engine_called(store: &Arc<ScriptedStore>, name: &str, fake: &Fake, nics: &[&str]) -> Arc<Engine> {
    let config = Config { tcp_bind_address: Some("127.0.0.1".into()), ..config(fake) };
    let engine = metadata_tests::create_with(store, name, config).unwrap();
    engine.install_transport("rdma", Some(&matrix(nics))).unwrap();
    engine
}

#[test]
fn engines_connect_by_their_names_and_find_one_that_restarts() {
    let fake = Fake::new(2);
    let store = Arc::new(ScriptedStore::default());
    let near = engine_called(&store, "near", &fake, &["fake0"]);
    let mut bench = Bench::new(near, engine_called(&store, "far", &fake, &["fake1"]), 1 << 20);
    assert_eq!(store.descriptor("far").rdma_server_name, "far");
    for round in 0..3 {
        bench.ours.write(&pattern(1 << 20, round));
        completed(&bench.write());
        assert!(bench.theirs.read() == pattern(1 << 20, round));
        bench.far.shutdown();
        bench.far = engine_called(&store, "far", &fake, &["fake1"]);
        bench.far.register(bench.theirs.range(0, 1 << 20), &options()).unwrap();
    }
}

#[test]
fn rdma_that_cannot_be_published_is_taken_back_whole() {
    let fake = Fake::new(1);
    let store = Arc::new(ScriptedStore::default());
    let config = Config { tcp_bind_address: Some("127.0.0.1".into()), ..config(&fake) };
    let engine = metadata_tests::create_with(&store, "node", config).unwrap();
    engine.install_transport("tcp", None).unwrap();
    let memory = Memory::new(1 << 20);
    engine.register(memory.range(0, 1 << 20), &options()).unwrap();
    let before = engine.card.publish_text();
    for fate in [Fate::Refused, Fate::Lost] {
        store.script().fates = [fate].into();
        assert_eq!(engine.install_transport("rdma", Some(&matrix(&["fake0"]))).unwrap_err().code(), Code::Metadata);
        assert!(!engine.has_transport("rdma"));
        assert_eq!(engine.card.publish_text(), before);
        wait_until("nothing is left open", || live(&fake) == [0; 6]);
        engine.presence.as_ref().unwrap().check(&engine.fetcher.client);
        assert_eq!(store.descriptor("node").protocols, ["tcp"]);
    }
    engine.install_transport("rdma", Some(&matrix(&["fake0"]))).unwrap();
    let descriptor = store.descriptor("node");
    assert_eq!((descriptor.protocols, descriptor.buffers[0].rkey.len()), (vec!["rdma".to_string()], 1));
    assert_eq!(fake.get(0, "regions"), 1);
    // What the device knows and cannot be published goes back to it.
    let other = Memory::new(4096);
    store.script().fates = [Fate::Refused].into();
    assert_eq!(engine.register(other.range(0, 4096), &options()).unwrap_err().code(), Code::Metadata);
    assert_eq!((fake.get(0, "regions"), engine.region_count()), (1, 1));
    engine.register(other.range(0, 4096), &options()).unwrap();
    let cost = engine.registration_cost(other.range(0, 1).address()).unwrap().cost;
    assert!(!cost.publishing.is_zero() && cost.total >= cost.publishing + cost.pinning_elapsed, "{cost:?}");
}

#[test]
fn a_port_that_goes_down_and_comes_back_is_published() {
    let fake = Fake::new(2);
    let store = Arc::new(ScriptedStore::default());
    let engine = engine_called(&store, "node", &fake, &["fake0", "fake1"]);
    let published = || store.descriptor("node").priority_matrix["cpu:0"].0.len();
    assert_eq!(published(), 2);
    fake.set(0, "port_state", PORT_ERROR.1);
    fake.event(0, PORT_ERROR.0);
    wait_until("peers are told that it is gone", || published() == 1);
    let memory = Memory::new(4096);
    engine.register(memory.range(0, 4096), &options()).unwrap();
    assert_eq!(store.descriptor("node").buffers[0].rkey[0], 0);
    fake.set(0, "port_state", PORT_ACTIVE.1);
    fake.event(0, PORT_ACTIVE.0);
    wait_until("peers are told of its keys", || published() == 2 && store.descriptor("node").buffers[0].rkey[0] != 0);
}

#[test]
fn each_raise_of_the_number_of_tries_takes_another_nic() {
    let fake = Fake::new(5);
    let near = engine(&fake, &["fake0", "fake1", "fake2"]);
    let bench = Bench::new(near, engine(&fake, &["fake3", "fake4"]), 1 << 16);
    let nic_of = |retry: u32| {
        let before: Vec<i64> = (0..3).map(|nic| fake.get(nic, "posted")).collect();
        let hints = Hints::new(retry, 0);
        completed(&bench.transfer(&[Request { hints, ..bench.request(Opcode::Write, 0, 4096) }])[0]);
        let posted: Vec<usize> = (0..3).filter(|nic| fake.get(*nic as i32, "posted") > before[*nic]).collect();
        assert_eq!(posted.len(), 1, "{posted:?}");
        posted[0]
    };
    let walk: Vec<usize> = (1..=7).map(nic_of).collect();
    assert_eq!(walk, [0, 1, 2, 0, 1, 2, 0]);
    assert_eq!(nic_of(2), 1, "the number alone decides");
    // A number of tries leaves the tries of the engine alone: one that fails is tried on the next.
    fake.set(1, "status_at", 1);
    let (failed, next) = (fake.get(1, "posted"), fake.get(2, "posted"));
    let hints = Hints::new(2, 0);
    completed(&bench.transfer(&[Request { hints, ..bench.request(Opcode::Write, 0, 4096) }])[0]);
    assert_eq!((fake.get(1, "posted") - failed, fake.get(2, "posted") - next), (1, 1));
}

#[test]
fn requests_of_a_group_wait_for_their_queue_pair_behind_however_many_others() {
    let fake = Fake::new(2);
    // A little more than a slice, which is moved in one piece.
    let length = (64 << 10) + 1024;
    let bench = Bench::on(&fake, length);
    completed(&bench.transfer(&[bench.request(Opcode::Write, 0, 64)])[0]);
    let waits = |group: u64| {
        let batch = bench.near.allocate_batch(400).unwrap();
        let plain = bench.request(Opcode::Write, 0, length as u64);
        let grouped = Request { hints: Hints::new(0, group), ..bench.request(Opcode::Write, 0, 64) };
        let before = fake.get(0, "posted");
        fake.set(-1, "hold", 1);
        // The first queue pair is full of 256, and there is room in the second.
        bench.near.submit(&batch, &[vec![plain; 300], vec![grouped; 20]].concat(), None, SubmitOptions::default()).unwrap();
        let posted = fake.get(0, "posted") - before;
        fake.set(-1, "hold", 0);
        assert!(batch.wait(Some(Duration::from_secs(30))));
        assert!([300, 320].contains(&posted), "{posted}");
        posted == 300
    };
    let waiting = (1..=16).filter(|group| waits(*group)).count();
    assert!((1..16).contains(&waiting), "{waiting} of 16 groups wait for the first queue pair");
}

#[test]
fn requests_of_a_group_go_by_one_queue_pair_of_one_nic_in_their_order() {
    let fake = Fake::new(4);
    let bench = Bench::new(engine(&fake, &["fake0", "fake1"]), engine(&fake, &["fake2", "fake3"]), 1 << 20);
    let posted = || [fake.get(0, "posted"), fake.get(1, "posted")];
    // All to the same bytes.
    let grouped = |at: u64| Request {
        hints: Hints::new(0, 5),
        ..request(Opcode::Write, bench.ours.range(at * 1024, 1024), bench.segment, bench.theirs.range(0, 1024))
    };
    bench.ours.write(&pattern(1 << 20, 3));
    // Long enough for both NICs, which are connected from now on.
    completed(&bench.write());
    let batch = bench.near.allocate_batch(2000).unwrap();
    let submit = |requests: &[Request]| bench.near.submit(&batch, requests, None, SubmitOptions::default()).unwrap();
    let before = posted();
    submit(&[grouped(0)]);
    assert!(batch.wait(Some(Duration::from_secs(30))));
    let nic = (0..2).find(|nic| posted()[*nic] == before[*nic] + 1).unwrap();
    let before = posted();
    fake.set(-1, "hold", 1);
    submit(&(0..600).map(grouped).collect::<Vec<_>>());
    // No more than one queue pair takes, where two could take 512.
    assert_eq!(posted()[nic] - before[nic], 256);
    assert_eq!(posted()[1 - nic], before[1 - nic]);
    // Others pass those that wait.
    let others: Vec<_> = (0..4).map(|at| bench.request(Opcode::Write, (700 + at) * 1024, 1024)).collect();
    submit(&others);
    assert_eq!(posted().iter().sum::<i64>() - before.iter().sum::<i64>(), 256 + 4);
    fake.set(-1, "hold", 0);
    assert!(batch.wait(Some(Duration::from_secs(30))));
    assert_eq!(batch.status().state, State::Completed);
    assert!(bench.theirs.read()[..1024] == pattern(1 << 20, 3)[599 * 1024..600 * 1024], "the last one submitted is there");
    // A long one is not striped.
    let before = posted();
    completed(&bench.transfer(&[Request { hints: Hints::new(0, 1), ..bench.request(Opcode::Write, 0, 1 << 20) }])[0]);
    assert!(posted() != before && (0..2).any(|nic| posted()[nic] == before[nic]), "{before:?}, {:?}", posted());
    completed(&bench.write());
}

#[test]
fn rdma_goes_by_the_live_topology_and_is_the_best_transport_where_it_names_a_nic() {
    let fake = Fake::new(3);
    let topology = Arc::new(LiveTopology::new(false));
    let options = EngineOptions {
        metadata: PEER_TO_PEER.into(),
        server_name: "127.0.0.1".into(),
        topology: Some(topology.clone()),
        ..EngineOptions::default()
    };
    let engine = Engine::create(&options, config(&fake)).unwrap();
    topology.replace(Topology::parse(&matrix(&["fake0", "fake1", "fake2"])).unwrap());
    topology.disable("fake1").unwrap();
    engine.install_transport("rdma", None).unwrap();
    let names = |engine: &Engine| engine.nic_loads().into_iter().map(|load| load.device).collect::<Vec<_>>();
    assert_eq!(names(&engine), ["fake0", "fake2"]);
    let json: serde_json::Value = serde_json::from_str(&engine.segment_json(LOCAL_SEGMENT).unwrap()).unwrap();
    assert_eq!(json["devices"][1]["name"], "fake2");
    assert_eq!(json["priority_matrix"], serde_json::json!({"cpu:0": [["fake0", "fake2"], []]}));

    let best = Engine::create(&EngineOptions { topology: None, ..options }, config(&fake)).unwrap();
    best.install_transport(AUTO, Some(&matrix(&["fake1"]))).unwrap();
    assert!(best.has_transport("rdma") && !best.has_transport("tcp"));
    assert_eq!((names(&best), best.topology().nics()), (vec!["fake1".to_string()], vec!["fake1".to_string()]));
}
