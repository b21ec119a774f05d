//! Two and more engines in one process: what peers see of each other.

use std::time::{Duration, Instant};

use super::*;
use crate::pool::{Direction, Outcome};
use crate::transfer::{Hints, State};
use crate::transport::Opcode;

fn engine(config: &Config) -> Arc<Engine> {
    let options = EngineOptions { metadata: PEER_TO_PEER.into(), server_name: "127.0.0.1".into(), ..EngineOptions::default() };
    let engine = Engine::create(&options, config.clone()).unwrap();
    engine.install_transport("tcp", None).unwrap();
    engine
}

/// Memory that outlives the engines of a test.
pub(super) struct Memory(pub Vec<u8>);

impl Memory {
    pub fn new(length: usize) -> Memory {
        Memory((0..length).map(|i| (i * 31 % 251) as u8).collect())
    }

    pub fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    pub fn range(&self, offset: usize, length: usize) -> MemoryRange {
        assert!(offset + length <= self.0.len());
        // SAFETY: tests keep the memory until their engines are gone, and look at it when nothing is in flight.
        #[allow(unsafe_code)]
        unsafe { MemoryRange::new(self.address() + offset as u64, length as u64) }.unwrap()
    }
}

pub(super) fn options() -> MemoryOptions {
    MemoryOptions { location: "*".into(), remote_accessible: true, counted: false, parallelism: None, publish: true }
}

pub(super) fn write(local: MemoryRange, segment: u64, remote_address: u64) -> Request {
    Request { opcode: Opcode::Write, local, segment, remote_address, hints: Hints::default() }
}

pub(super) fn read(local: MemoryRange, segment: u64, remote_address: u64) -> Request {
    Request { opcode: Opcode::Read, local, segment, remote_address, hints: Hints::default() }
}

pub(super) fn states(statuses: &[TaskStatus]) -> Vec<State> {
    statuses.iter().map(|status| status.state).collect()
}

#[test]
fn names_that_are_no_hosts_are_refused_and_ports_are_drawn() {
    let create = |name: &str| {
        let options = EngineOptions { metadata: PEER_TO_PEER.into(), server_name: name.into(), ..EngineOptions::default() };
        Engine::create(&options, Config::default())
    };
    for name in ["a b", "127.0.0.1 :1", "x/y", "a\nb"] {
        assert_eq!(create(name).err().unwrap().code(), Code::InvalidArgument, "{name:?}");
    }
    for (name, host) in
        [("127.0.0.1:7", "127.0.0.1:"), ("localhost", "localhost:"), ("[::1]:9", "[::1]:"), ("127.0.0.1:x", "127.0.0.1:")]
    {
        assert!(create(name).unwrap().name().starts_with(host), "{name}");
    }
    let error = create("127.0.0.1").unwrap().open_segment("127.0.0.1").unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument, "no transport yet");
}

/// Ends everything at once, and counts it.
#[derive(Default)]
struct Counting(std::sync::atomic::AtomicUsize);

impl Transport for Counting {
    fn protocol(&self) -> &'static str {
        "tcp"
    }
    fn submit(&self, _segment: &Arc<dyn Segment>, slices: crate::transport::Slices) {
        for slice in slices.into_each() {
            self.0.fetch_add(1, Ordering::Relaxed);
            slice.finish(Ok(()));
        }
    }
    fn cancel(&self) {}
    fn evict(&self, _range: MemoryRange) {}
    fn forget(&self, _segment: u64) {}
    fn shutdown(&self, _reason: Error) {}
}

#[test]
fn a_transport_of_the_programs_own_takes_the_place_of_the_engines() {
    let target = engine(&Config::default());
    let options = EngineOptions { metadata: PEER_TO_PEER.into(), server_name: "127.0.0.1".into(), ..EngineOptions::default() };
    let initiator = Engine::create(&options, Config::default()).unwrap();
    let (own, other) = (Arc::new(Counting::default()), Arc::new(Counting::default()));
    initiator.install_own_transport(own.clone()).unwrap();
    // Its protocol has one already.
    initiator.install_own_transport(other.clone()).unwrap();
    initiator.install_transport("tcp", None).unwrap();
    let segment = initiator.open_segment(&target.name()).unwrap();
    let memory = Memory::new(8);
    let statuses = initiator.transfer(&[write(memory.range(0, 8), segment, 1)], SubmitOptions::default()).unwrap();
    assert_eq!(states(&statuses), [State::Completed]);
    assert_eq!([&own, &other].map(|transport| transport.0.load(Ordering::Relaxed)), [1, 0]);
}

#[test]
fn a_batch_that_was_freed_takes_no_more_requests() {
    let (target, initiator) = (engine(&Config::default()), engine(&Config::default()));
    let segment = initiator.open_segment(&target.name()).unwrap();
    let memory = Memory::new(8);
    // As two threads have it, of which one was about to submit.
    let batch = initiator.batch(initiator.allocate_batch(1).unwrap().id()).unwrap();
    initiator.free_batch(batch.id()).unwrap();
    let error = initiator.submit(&batch, &[write(memory.range(0, 8), segment, 1)], None, SubmitOptions::default()).unwrap_err();
    assert_eq!(error.code(), Code::InvalidHandle);
    assert!(batch.is_empty());
}

#[test]
fn bytes_arrive_in_both_directions_at_all_sizes() {
    for config in [Config::default(), Config { tcp_force_v1: true, ..Config::default() }] {
        let (target, initiator) = (engine(&config), engine(&config));
        let length = (5 << 20) + 3;
        let (theirs, mut ours) = (Memory(vec![0; length]), Memory::new(length));
        target.register(theirs.range(0, length), &options()).unwrap();
        let segment = initiator.open_segment(&target.name()).unwrap();
        for size in [1, 2, 7, 8, 9, 23, 24, 25, 4095, 4096, 65536, 65537, (1 << 20) + 1, length - 1] {
            let statuses =
                initiator.transfer(&[write(ours.range(1, size), segment, theirs.address())], Default::default()).unwrap();
            assert_eq!(states(&statuses), [State::Completed], "{size} {:?}", statuses[0].error);
            assert_eq!(theirs.0[..size], ours.0[1..=size], "{size}");
            ours.0.rotate_left(7);
            let into = Memory(vec![0; size]);
            let statuses = initiator.transfer(&[read(into.range(0, size), segment, theirs.address())], Default::default()).unwrap();
            assert_eq!(states(&statuses), [State::Completed], "{size}");
            assert_eq!(into.0, theirs.0[..size], "{size}");
        }
    }
}

#[test]
fn large_batches_are_pipelined_and_complete() {
    let config = Config::default();
    let (target, initiator) = (engine(&config), engine(&config));
    let (count, size) = (2000, 1000);
    let (theirs, ours) = (Memory(vec![0; count * size]), Memory::new(count * size));
    target.register(theirs.range(0, count * size), &options()).unwrap();
    let segment = initiator.open_segment(&target.name()).unwrap();
    let requests: Vec<_> =
        (0..count).map(|i| write(ours.range(i * size, size), segment, theirs.address() + (i * size) as u64)).collect();
    let statuses = initiator.transfer(&requests, Default::default()).unwrap();
    assert!(statuses.iter().all(|status| status.state == State::Completed));
    assert_eq!(theirs.0, ours.0);
    let into = Memory(vec![0; count * size]);
    let requests: Vec<_> =
        (0..count).map(|i| read(into.range(i * size, size), segment, theirs.address() + (i * size) as u64)).collect();
    let statuses = initiator.transfer(&requests, Default::default()).unwrap();
    assert!(statuses.iter().all(|status| status.state == State::Completed));
    assert_eq!(into.0, ours.0);
    assert!(initiator.counters().connections_opened.get() <= config.tcp_lanes_per_peer as u64);
}

#[test]
fn bad_targets_fail_alone_and_write_nothing() {
    let config = Config::default();
    let (target, initiator) = (engine(&config), engine(&config));
    let (theirs, ours) = (Memory(vec![0; 4096]), Memory::new(4096));
    target.register(theirs.range(0, 2048), &options()).unwrap();
    let segment = initiator.open_segment(&target.name()).unwrap();
    let base = theirs.address();
    let requests = [
        write(ours.range(0, 10), segment, base),
        write(ours.range(0, 10), segment, base + 2040),
        write(ours.range(0, 10), segment, 0),
        write(ours.range(0, 10), segment, base + 100),
        write(ours.range(0, 10), segment, u64::MAX - 3),
        read(ours.range(4000, 10), segment, base + 2048),
        write(ours.range(0, 10), segment, base + 200),
    ];
    let statuses = initiator.transfer(&requests, Default::default()).unwrap();
    use State::{Completed as Good, Failed as Bad};
    assert_eq!(states(&statuses), [Good, Bad, Bad, Good, Bad, Bad, Good]);
    assert_eq!(statuses[1].error.as_ref().unwrap().code(), Code::AddressNotRegistered);
    assert_eq!(theirs.0.iter().filter(|byte| **byte != 0).count(), ours.0[..10].iter().filter(|byte| **byte != 0).count() * 3);
    assert_eq!(ours.0[4000..4010], Memory::new(4096).0[4000..4010]);
}

#[test]
fn touching_registrations_are_one_range_to_peers() {
    let config = Config::default();
    let (target, initiator) = (engine(&config), engine(&config));
    let (theirs, ours) = (Memory(vec![0; 3000]), Memory::new(3000));
    for part in 0..3 {
        target.register(theirs.range(part * 1000, 1000), &options()).unwrap();
    }
    let segment = initiator.open_segment(&target.name()).unwrap();
    let statuses = initiator.transfer(&[write(ours.range(0, 3000), segment, theirs.address())], Default::default()).unwrap();
    assert_eq!(states(&statuses), [State::Completed]);
    assert_eq!(theirs.0, ours.0);
}

#[test]
fn memory_for_local_use_is_closed_to_peers_and_to_the_own_segment() {
    let config = Config::default();
    let (target, initiator) = (engine(&config), engine(&config));
    let (theirs, ours) = (Memory::new(4096), Memory::new(4096));
    target.register(theirs.range(0, 4096), &MemoryOptions { remote_accessible: false, ..options() }).unwrap();
    let segment = initiator.open_segment(&target.name()).unwrap();
    let statuses = initiator.transfer(&[write(ours.range(0, 10), segment, theirs.address() + 1)], Default::default()).unwrap();
    assert_eq!(states(&statuses), [State::Failed]);
    let statuses = target.transfer(&[write(ours.range(0, 10), LOCAL_SEGMENT, theirs.address() + 1)], Default::default()).unwrap();
    assert_eq!(states(&statuses), [State::Failed]);
    assert_eq!(theirs.0, Memory::new(4096).0);
    assert!(initiator.segment_buffers(segment).unwrap().is_empty());
}

#[test]
fn local_transfers_move_in_the_right_direction_and_may_overlap() {
    let target = engine(&Config::default());
    let memory = Memory::new(100);
    target.register(memory.range(0, 100), &options()).unwrap();
    let mut expected = memory.0.clone();
    assert_eq!(target.open_segment(&target.name()).unwrap(), LOCAL_SEGMENT);
    let requests = [write(memory.range(0, 50), LOCAL_SEGMENT, memory.address() + 10)];
    target.transfer(&requests, Default::default()).unwrap();
    expected.copy_within(0..50, 10);
    assert_eq!(memory.0, expected);
    target.transfer(&[read(memory.range(0, 50), LOCAL_SEGMENT, memory.address() + 20)], Default::default()).unwrap();
    expected.copy_within(20..70, 0);
    assert_eq!(memory.0, expected);
}

#[test]
fn a_peer_that_has_closed_its_side_is_still_answered() {
    use std::io::{Read, Write};
    let target = engine(&Config::default());
    let theirs = Memory::new(4 << 20);
    target.register(theirs.range(0, 4 << 20), &options()).unwrap();
    let port = target.fetcher.own.read().tcp_data_port;
    for (address, length) in [(theirs.address(), 100), (theirs.address(), 4 << 20), (16, 100)] {
        let header = [&u64::to_le_bytes(length)[..], &u64::to_le_bytes(address), &[0x80, 0, 0, 0, 0, 0, 0, 0]].concat();
        let (mut stream, mut reply) = (std::net::TcpStream::connect(("127.0.0.1", port)).unwrap(), Vec::new());
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        // Twice, so that a request is read when the end is already there.
        stream.write_all(&header.repeat(2)).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        stream.read_to_end(&mut reply).unwrap();
        assert_eq!(reply.len(), if address == 16 { 8 } else { 2 * (8 + length as usize) });
    }
}

/// Serves the descriptor of whatever engine it is told to, under a name that stays: what a restarted peer looks like to others.
struct Name {
    name: String,
    card: Arc<Card>,
    _server: Server,
}

impl Name {
    fn new() -> Name {
        let config = Config::default();
        let listener = Listener::draw(&config).unwrap();
        let name = format!("127.0.0.1:{}", listener.port());
        let card = Arc::new(Card::new(Arc::default(), Arc::default()));
        let server = Server::start(listener, card.clone(), &config).unwrap();
        Name { name, card, _server: server }
    }

    fn point_to(&self, tcp_data_port: u16) {
        self.card.publish(SegmentHeader {
            name: self.name.clone(),
            protocol: "tcp".into(),
            tcp_data_host: String::new(),
            tcp_data_port,
            tcp_proto_version: 2,
            rdma: None,
        });
    }

    fn point_to_engine(&self, engine: &Engine) {
        self.point_to(engine.fetcher.own.read().tcp_data_port);
    }
}

#[test]
fn a_peer_that_comes_back_on_another_port_is_found_without_a_failed_transfer() {
    let config = Config::default();
    let (initiator, name) = (engine(&config), Name::new());
    let (theirs, ours) = (Memory(vec![0; 4096]), Memory::new(4096));
    let mut segment = 0;
    for round in 0..3 {
        let target = engine(&config);
        target.register(theirs.range(0, 4096), &options()).unwrap();
        name.point_to_engine(&target);
        segment = initiator.open_segment(&name.name).unwrap();
        let request = [write(ours.range(0, 100 + round), segment, theirs.address())];
        let statuses = initiator.transfer(&request, Default::default()).unwrap();
        assert_eq!(states(&statuses), [State::Completed], "round {round}: {:?}", statuses[0].error);
        assert_eq!(theirs.0[..100 + round], ours.0[..100 + round]);
        target.shutdown();
    }
    let statuses = initiator.transfer(&[write(ours.range(0, 1), segment, theirs.address())], Default::default()).unwrap();
    assert_eq!(statuses[0].error.as_ref().unwrap().code(), Code::Socket);
}

#[test]
fn a_peer_that_is_gone_fails_many_large_transfers_after_a_few_attempts() {
    let config = Config::default();
    let (target, initiator) = (engine(&config), engine(&config));
    let (theirs, ours) = (Memory::new(1 << 20), Memory::new(1 << 20));
    target.register(theirs.range(0, 1 << 20), &options()).unwrap();
    let segment = initiator.open_segment(&target.name()).unwrap();
    let requests = [write(ours.range(0, 1 << 20), segment, theirs.address()); 32];
    target.shutdown();
    let statuses = initiator.transfer(&requests, Default::default()).unwrap();
    assert_eq!(states(&statuses), [State::Failed; 32]);
    assert_eq!(statuses[0].error.as_ref().unwrap().code(), Code::Socket);
    assert!(initiator.counters().connections_opened.get() <= 2 * config.tcp_lanes_per_peer as u64);
}

#[test]
fn notifications_arrive_after_the_bytes_and_before_completion() {
    let config = Config::default();
    let (target, initiator) = (engine(&config), engine(&config));
    let (theirs, ours) = (Memory(vec![0; 4096]), Memory::new(4096));
    target.register(theirs.range(0, 4096), &options()).unwrap();
    let segment = initiator.open_segment(&target.name()).unwrap();
    let message = Notification { name: "näme".into(), message: "text".into() };
    let requests = [write(ours.range(0, 4096), segment, theirs.address())];
    let batch = initiator.allocate_batch(1).unwrap();
    initiator.submit(&batch, &requests, Some(message.clone()), Default::default()).unwrap();
    assert!(batch.wait(Some(Duration::from_secs(20))));
    assert_eq!(batch.status().state, State::Completed);
    assert_eq!(target.take_notifications(), std::slice::from_ref(&message));
    target.send_notification(LOCAL_SEGMENT, &message).unwrap();
    initiator.send_notification_to(&target.name(), &message).unwrap();
    assert_eq!(target.take_notifications().len(), 2);
    initiator.probe(segment).unwrap();
}

#[test]
fn a_peer_that_does_not_answer_ends_in_a_timeout_and_the_batch_can_be_freed() {
    let config = Config::default();
    let initiator = engine(&config);
    // A peer with a descriptor whose data port accepts and says nothing.
    let (silent, name) = (std::net::TcpListener::bind("127.0.0.1:0").unwrap(), Name::new());
    name.point_to(silent.local_addr().unwrap().port());
    let segment = initiator.open_segment(&name.name).unwrap();
    let ours = Memory::new(4096);
    let requests = [write(ours.range(0, 100), segment, 4096), read(ours.range(0, 100), segment, 4096)];
    for options in [
        SubmitOptions { deadline: Some(Instant::now() + Duration::from_millis(50)), stall: None },
        SubmitOptions { deadline: None, stall: Some(Duration::from_millis(50)) },
    ] {
        let batch = initiator.allocate_batch(2).unwrap();
        initiator.submit(&batch, &requests, None, options).unwrap();
        assert_eq!(initiator.free_batch(batch.id()).unwrap_err().code(), Code::BatchBusy);
        assert!(batch.wait(Some(Duration::from_secs(20))));
        assert_eq!(batch.status().state, State::Timeout);
        initiator.free_batch(batch.id()).unwrap();
    }
    let batch = initiator.allocate_batch(2).unwrap();
    initiator.submit(&batch, &requests, None, Default::default()).unwrap();
    batch.cancel();
    assert!(batch.wait(Some(Duration::from_secs(20))));
    assert_eq!(batch.status().state, State::Canceled);
}

#[test]
fn unregistering_local_memory_ends_the_transfers_that_use_it() {
    let config = Config::default();
    let initiator = engine(&config);
    let (silent, name) = (std::net::TcpListener::bind("127.0.0.1:0").unwrap(), Name::new());
    name.point_to(silent.local_addr().unwrap().port());
    let segment = initiator.open_segment(&name.name).unwrap();
    let ours = Memory::new(64 << 20);
    initiator.register(ours.range(0, 32 << 20), &options()).unwrap();
    let batch = initiator.allocate_batch(2).unwrap();
    let requests = [read(ours.range(0, 100), segment, 4096), write(ours.range(0, 32 << 20), segment, 4096)];
    initiator.submit(&batch, &requests, None, Default::default()).unwrap();
    initiator.unregister(ours.address()).unwrap();
    assert_eq!(batch.status().state, State::Canceled);
    assert!(initiator.regions().is_empty());
}

/// Polls small transfers to their end without pause, so that the callers' threads have come to receive the replies.
fn poll_for_a_while(initiator: &Engine, request: Request) {
    for _ in 0..200 {
        let batch = initiator.allocate_batch(1).unwrap();
        initiator.submit(&batch, &[request], None, Default::default()).unwrap();
        while batch.task_status(0).unwrap().state == State::Waiting {
            std::hint::spin_loop();
        }
        assert_eq!(batch.status().state, State::Completed);
        initiator.free_batch(batch.id()).unwrap();
    }
}

#[test]
fn transfers_end_whoever_looks_or_does_not() {
    // One I/O thread: nobody else looks while it keeps the time.
    let config = Config { tcp_io_threads: 1, ..Config::default() };
    let (target, initiator) = (engine(&config), engine(&config));
    let (theirs, ours) = (Memory(vec![0; 4096]), Memory::new(4096));
    target.register(theirs.range(0, 4096), &options()).unwrap();
    let segment = initiator.open_segment(&target.name()).unwrap();
    let request = write(ours.range(0, 100), segment, theirs.address());
    for _ in 0..5 {
        // Nobody polls any more.
        poll_for_a_while(&initiator, request);
        let batch = initiator.allocate_batch(1).unwrap();
        let before = initiator.counters().tasks_completed.get();
        initiator.submit(&batch, &[request], None, Default::default()).unwrap();
        let limit = Instant::now() + Duration::from_secs(20);
        while initiator.counters().tasks_completed.get() == before {
            assert!(Instant::now() < limit, "nobody receives the reply");
            std::thread::sleep(Duration::from_millis(1));
        }
        // Somebody waits, and parks.
        poll_for_a_while(&initiator, request);
        let batch = initiator.allocate_batch(1).unwrap();
        initiator.submit(&batch, &[request], None, Default::default()).unwrap();
        assert!(batch.wait(Some(Duration::from_secs(20))));
        // Somebody waits for a descriptor while others poll.
        let watched = initiator.allocate_batch(2).unwrap();
        watched.event_fd().unwrap();
        initiator.submit(&watched, &[request], None, Default::default()).unwrap();
        poll_for_a_while(&initiator, request);
        assert!(watched.wait(Some(Duration::from_secs(20))));
        assert_eq!(batch.status().state, State::Completed);
    }
    assert!(initiator.counters().connections_opened.get() <= config.tcp_lanes_per_peer as u64);
}

#[test]
fn destroying_an_engine_wakes_waiters_and_ends_batches() {
    let config = Config::default();
    let (target, initiator) = (engine(&config), engine(&config));
    let (theirs, ours) = (Memory(vec![0; 64 << 20]), Memory::new(64 << 20));
    target.register(theirs.range(0, 64 << 20), &options()).unwrap();
    let segment = initiator.open_segment(&target.name()).unwrap();
    let batch = initiator.allocate_batch(64).unwrap();
    let requests: Vec<_> =
        (0..64).map(|i| write(ours.range(i << 20, 1 << 20), segment, theirs.address() + (i << 20) as u64)).collect();
    initiator.submit(&batch, &requests, None, Default::default()).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| batch.wait(None));
        initiator.shutdown();
        assert!(waiter.join().unwrap());
    });
    assert!(batch.status().state.is_terminal());
    let local = initiator.transfer(&requests, Default::default());
    assert_eq!(local.unwrap_err().code(), Code::Canceled);
    // What was under way may still land, as long as the memory is registered.
    target.shutdown();
}

#[test]
fn one_more_registration_encodes_one_block_whatever_is_registered() {
    let config = Config::default();
    let (target, initiator) = (engine(&config), engine(&config));
    let theirs = Memory(vec![0; 1]);
    let base = theirs.address() & !4095;
    for page in 1..=20_000 {
        // SAFETY: never touched; no peer asks for it.
        #[allow(unsafe_code)]
        let range = unsafe { MemoryRange::new(base + page * 8192, 4096) }.unwrap();
        target.register(range, &options()).unwrap();
    }
    let segment = initiator.open_segment(&target.name()).unwrap();
    let buffers = initiator.segment_buffers(segment).unwrap();
    assert_eq!(buffers.len(), 20_000);
    assert!(buffers.windows(2).all(|pair| pair[0].address < pair[1].address));
}

#[test]
fn a_pool_registers_once_and_leases_nothing() {
    let engine = engine(&Config::default());
    let pool = engine.create_pool(&PoolOptions { bytes: Some(1 << 20), ..Default::default() }).unwrap();
    assert_eq!(engine.regions().len(), 1);
    assert!(!engine.regions()[0].remote_accessible);
    for _ in 0..1000 {
        let lease = pool.acquire(Direction::Put, 4096, Some(Duration::ZERO)).unwrap();
        pool.release(lease.id, Outcome::Over).unwrap();
    }
    assert_eq!(engine.counters().regions_registered.get(), 1);
    engine.close_pool(&pool, Some(Duration::ZERO)).unwrap();
    assert_eq!((engine.region_count(), engine.counters().regions_unregistered.get()), (0, 1));
    assert_eq!(engine.close_pool(&pool, None).unwrap_err().code(), Code::InvalidHandle);
}

#[test]
fn the_arena_of_a_pool_is_unregistered_by_closing_it_alone() {
    let engine = engine(&Config::default());
    let memory = Memory::new(4096);
    engine.register(memory.range(0, 4096), &options()).unwrap();
    let pool = engine.create_pool(&PoolOptions { bytes: Some(1 << 20), ..Default::default() }).unwrap();
    let arena = pool.arena().address();
    let error = engine.unregister(arena).unwrap_err();
    assert!(error.code() == Code::InvalidArgument && error.message().contains("pool"), "{error}");
    assert_eq!(engine.unregister_batch(&[arena, memory.address()]).unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(engine.regions().iter().map(|region| region.address).collect::<Vec<_>>(), [arena], "all but the arena");
    engine.close_pool(&pool, None).unwrap();
    assert_eq!(engine.unregister(arena).unwrap_err().code(), Code::AddressNotRegistered);
}

#[test]
fn a_pool_whose_arena_cannot_be_registered_leaves_nothing_behind() {
    let engine = engine(&Config::default());
    let memory = Memory::new(1 << 20);
    let arena = memory.range(memory.0.as_ptr().align_offset(4096), 1 << 19);
    engine.register(memory.range(0, memory.0.len()), &options()).unwrap();
    let on_it = PoolOptions { arena: Some(arena), ..Default::default() };
    assert_eq!(engine.create_pool(&on_it).err().unwrap().code(), Code::AddressOverlapped);
    engine.unregister(memory.address()).unwrap();
    let pool = engine.create_pool(&on_it).unwrap();
    assert_eq!(pool.arena(), arena);
    engine.close_pool(&pool, None).unwrap();
}

#[test]
fn an_engine_that_shuts_down_closes_its_pools_whatever_is_out() {
    let engine = engine(&Config::default());
    let pool = engine.create_pool(&PoolOptions { bytes: Some(1 << 20), ..Default::default() }).unwrap();
    let lease = pool.acquire(Direction::Get, 1, None).unwrap();
    let arena = pool.arena().address();
    assert_eq!(engine.close_pool(&pool, Some(Duration::ZERO)).unwrap_err().code(), Code::BatchBusy);
    engine.shutdown();
    for outcome in
        [pool.release(lease.id, Outcome::Over), pool.acquire(Direction::Get, 1, None).map(drop), engine.close_pool(&pool, None)]
    {
        assert_eq!(outcome.unwrap_err().code(), Code::InvalidHandle);
    }
    assert!(crate::sys::pages::is_in_memory(arena).is_ok(), "mapped while somebody has the pool");
    assert_eq!(engine.create_pool(&PoolOptions::default()).err().unwrap().code(), Code::Canceled);
}

#[test]
fn the_best_transport_is_tcp_where_no_nic_can_be_used_and_the_topology_says_what_was_found() {
    let topology = Arc::new(LiveTopology::new(false));
    topology.replace(Topology::parse(r#"{"cpu:0":[["stale"],[]]}"#).unwrap());
    // No machine has a NIC of that name.
    let options = EngineOptions {
        metadata: PEER_TO_PEER.into(),
        server_name: "127.0.0.1".into(),
        nics: vec!["no such NIC".into()],
        topology: Some(topology.clone()),
        ..EngineOptions::default()
    };
    let engine = Engine::create(&options, Config::default()).unwrap();
    assert_eq!(topology.nics(), ["stale"], "nothing was looked for yet");
    assert!(engine.install_transport(AUTO, Some("no matrix")).is_err());
    engine.install_transport(AUTO, None).unwrap();
    assert!(engine.has_transport("tcp") && !engine.has_transport("rdma") && !engine.has_transport(AUTO));
    assert!(topology.nics().is_empty() && !topology.current().matrix().is_empty());
    topology.replace(Topology::parse(r#"{"cpu:0":[["later"],[]]}"#).unwrap());
    assert!(engine.show_links(true).contains("later"), "what the program puts in is what the engine has");
    engine.discover_topology().unwrap();
    assert!(topology.nics().is_empty() && Arc::ptr_eq(engine.topology(), &topology));
    engine.install_transport(AUTO, Some(r#"{"cpu:0":[["no such NIC"],[]]}"#)).unwrap();
    assert_eq!(topology.nics(), ["no such NIC"], "a matrix that is given holds in place of discovery");
    assert!(!engine.has_transport("rdma"));
}

#[test]
fn overlaps_are_found_at_both_ends_and_inside_and_nowhere_else() {
    let engine = engine(&Config::default());
    let memory = Memory::new(4096);
    engine.register(memory.range(1000, 100), &options()).unwrap();
    engine.register(memory.range(1100, 100), &options()).unwrap();
    engine.register(memory.range(2000, 1), &options()).unwrap();
    let found = |offset: usize, length: usize| {
        engine.find_overlap(memory.range(offset, length)).map(|region| (region.address - memory.address(), region.length))
    };
    for (offset, length) in [(0, 1000), (1000, 0), (1050, 0), (1200, 800), (2001, 100), (999, 1), (4095, 1)] {
        assert_eq!(found(offset, length), None, "{length} bytes at {offset}");
    }
    for (offset, length) in [(999, 2), (1000, 1), (1099, 1), (1000, 100), (0, 1001), (1050, 10)] {
        assert_eq!(found(offset, length), Some((1000, 100)), "{length} bytes at {offset}");
    }
    for (offset, length) in [(1100, 1), (1199, 2), (1199, 801)] {
        assert_eq!(found(offset, length), Some((1100, 100)), "{length} bytes at {offset}");
    }
    assert!(found(1099, 2).is_some() && found(0, 4096).is_some());
    assert_eq!(found(1500, 2000), Some((2000, 1)));
}

#[test]
fn a_descriptor_is_told_as_it_is_exchanged() {
    let (target, initiator) = (engine(&Config::default()), engine(&Config::default()));
    let memory = Memory::new(4096);
    target.register(memory.range(0, 16), &options()).unwrap();
    let segment = initiator.open_segment(&target.name()).unwrap();
    target.register(memory.range(64, 16), &options()).unwrap();
    let parse = |text: String| SegmentDescriptor::decode(text.as_bytes(), &"the test").unwrap();
    let (known, own) = (parse(initiator.segment_json(segment).unwrap()), parse(target.segment_json(LOCAL_SEGMENT).unwrap()));
    assert_eq!((known.name, known.tcp_data_port), (target.name(), own.tcp_data_port));
    assert_eq!((known.buffers.len(), own.buffers.len()), (1, 2));
    initiator.refresh_segment(segment).unwrap();
    assert_eq!(parse(initiator.segment_json(segment).unwrap()).buffers, own.buffers);
    assert_eq!(initiator.segment_json(segment + 1).unwrap_err().code(), Code::InvalidHandle);
    let options = EngineOptions { metadata: PEER_TO_PEER.into(), server_name: "127.0.0.1".into(), ..EngineOptions::default() };
    let without = Engine::create(&options, Config::default()).unwrap();
    assert_eq!(without.segment_json(LOCAL_SEGMENT).unwrap_err().code(), Code::Metadata);
    // Before its memory goes.
    target.shutdown();
}

#[test]
fn a_name_that_is_not_open_can_be_probed_and_an_engine_without_a_server_has_nothing_to_publish() {
    let (target, initiator) = (engine(&Config::default()), engine(&Config::default()));
    initiator.probe_name(&target.name()).unwrap();
    initiator.probe_name(&format!("//{}", initiator.name())).unwrap();
    assert_eq!(initiator.probe_name("/").unwrap_err().code(), Code::InvalidArgument);
    initiator.publish().unwrap();
    initiator.publish_address().unwrap();
    let name = target.name();
    target.shutdown();
    assert_eq!(initiator.probe_name(&name).unwrap_err().code(), Code::Socket);
    initiator.shutdown();
    for error in [initiator.probe_name(&name), initiator.publish(), initiator.publish_address()] {
        assert_eq!(error.unwrap_err().code(), Code::Canceled);
    }
}

#[test]
fn requests_of_a_group_keep_to_one_connection_and_their_order() {
    let config = Config::default();
    let (target, initiator) = (engine(&config), engine(&config));
    // Each is more than what makes others take a further connection.
    let (count, size) = (20, 200 << 10);
    let (theirs, ours) = (Memory(vec![0; count * size]), Memory::new(count * size));
    target.register(theirs.range(0, count * size), &options()).unwrap();
    let segment = initiator.open_segment(&target.name()).unwrap();
    let requests = |group: u64, distance: usize| -> Vec<Request> {
        let to = |i: usize| theirs.address() + (i * distance) as u64;
        (0..count).map(|i| Request { hints: Hints::new(0, group), ..write(ours.range(i * size, size), segment, to(i)) }).collect()
    };
    let batch = initiator.allocate_batch(2 * count).unwrap();
    for half in requests(7, 0).chunks(count / 2) {
        initiator.submit(&batch, half, None, SubmitOptions::default()).unwrap();
    }
    assert!(batch.wait(Some(Duration::from_secs(60))));
    assert_eq!(batch.status().state, State::Completed);
    assert_eq!(initiator.counters().connections_opened.get(), 1);
    assert!(theirs.0[..size] == ours.0[(count - 1) * size..], "the last one submitted is the last one that was written");
    // Nothing orders these, so each has its own place to go to.
    initiator.submit(&batch, &requests(0, size), None, SubmitOptions::default()).unwrap();
    assert!(batch.wait(Some(Duration::from_secs(60))));
    assert!(initiator.counters().connections_opened.get() > 1, "others take as many as there may be");
}
