//! The transport against peers that misbehave: scripted servers and raw clients on real sockets of the loopback interface.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::AtomicU64;

use parking_lot::Condvar;

use super::wire::{self, HEADER_LENGTH, Header, Version};
use super::*;
use crate::metadata::{BufferDescriptor, SegmentDescriptor};
use crate::registry::{Owner, Region, RegionOptions, Reservation};
use crate::transport::{Completion, Deadline, Opcode, Piece, Slices, Way};

const PATIENCE: Duration = Duration::from_secs(20);

/// Memory that outlives what works on it.
struct Memory(Vec<u8>);

impl Memory {
    fn new(length: usize) -> Memory {
        Memory((0..length).map(|i| (i * 31 % 251) as u8).collect())
    }

    fn zeroed(length: usize) -> Memory {
        Memory(vec![0; length])
    }

    fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    fn range(&self, offset: usize, length: usize) -> MemoryRange {
        assert!(offset + length <= self.0.len());
        range(self.address() + offset as u64, length as u64)
    }
}

fn range(address: u64, length: u64) -> MemoryRange {
    // SAFETY: tests keep their memory until the transport is gone; addresses of nobody are given to system calls only.
    #[allow(unsafe_code)]
    unsafe { MemoryRange::new(address, length) }.unwrap()
}

/// Waits for the ends of slices, and notices those that end twice.
#[derive(Default)]
struct Outcomes {
    ended: Mutex<Vec<Option<Result<()>>>>,
    changed: Condvar,
    twice: AtomicUsize,
    cancelled: AtomicBool,
}

impl Completion for Outcomes {
    fn finish(&self, index: u32, outcome: Result<()>) {
        if self.ended.lock()[index as usize].replace(outcome).is_some() {
            self.twice.fetch_add(1, Ordering::SeqCst);
        }
        self.changed.notify_all();
    }

    fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::SeqCst)
    }
}

impl Outcomes {
    /// The code of each slice's end, `None` for success.
    fn wait_within(&self, limit: Duration) -> Vec<Option<Code>> {
        let end = Instant::now() + limit;
        let mut ended = self.ended.lock();
        while ended.iter().any(Option::is_none) {
            assert!(!self.changed.wait_until(&mut ended, end).timed_out(), "not ended in {limit:?}: {ended:?}");
        }
        assert_eq!(self.twice.load(Ordering::SeqCst), 0);
        ended.iter().map(|outcome| outcome.as_ref().and_then(|outcome| outcome.as_ref().err().map(Error::code))).collect()
    }

    fn wait(&self) -> Vec<Option<Code>> {
        self.wait_within(PATIENCE)
    }

    fn is_over(&self) -> bool {
        self.ended.lock().iter().all(Option::is_some)
    }
}

/// A segment whose descriptor the test changes.
struct Target {
    id: u64,
    descriptor: RwLock<Arc<SegmentDescriptor>>,
    /// What the peer would say if it were asked.
    fresh: Mutex<Option<Arc<SegmentDescriptor>>>,
    asking_takes: Mutex<Duration>,
    refreshes: AtomicUsize,
}

fn descriptor(port: u16, version: u32) -> SegmentDescriptor {
    SegmentDescriptor {
        name: "scripted".into(),
        tcp_data_host: "127.0.0.1".into(),
        tcp_data_port: port,
        tcp_proto_version: version,
        buffers: vec![BufferDescriptor { address: 0, length: u64::MAX, ..BufferDescriptor::default() }],
        ..SegmentDescriptor::default()
    }
}

impl Target {
    fn new(descriptor: SegmentDescriptor) -> Arc<Target> {
        static IDS: AtomicU64 = AtomicU64::new(1);
        Arc::new(Target {
            id: IDS.fetch_add(1, Ordering::Relaxed),
            descriptor: RwLock::new(Arc::new(descriptor)),
            fresh: Mutex::new(None),
            asking_takes: Mutex::new(Duration::ZERO),
            refreshes: AtomicUsize::new(0),
        })
    }

    fn at(port: u16) -> Arc<Target> {
        Target::new(descriptor(port, 2))
    }

    fn will_say(&self, descriptor: SegmentDescriptor) {
        *self.fresh.lock() = Some(Arc::new(descriptor));
    }
}

impl Segment for Target {
    fn id(&self) -> u64 {
        self.id
    }

    fn descriptor(&self) -> Arc<SegmentDescriptor> {
        self.descriptor.read().clone()
    }

    fn refresh(&self) -> Result<Arc<SegmentDescriptor>> {
        std::thread::sleep(*self.asking_takes.lock());
        self.refreshes.fetch_add(1, Ordering::SeqCst);
        if let Some(fresh) = &*self.fresh.lock() {
            *self.descriptor.write() = fresh.clone();
        }
        Ok(self.descriptor())
    }

    fn host(&self) -> Result<String> {
        Ok(self.descriptor().tcp_data_host.clone())
    }
}

/// A transport with its own registry.
struct Bench {
    transport: Arc<TcpTransport>,
    registry: Arc<Registry>,
    counters: Arc<Counters>,
}

impl Bench {
    fn new() -> Bench {
        Bench::with(&Config::default())
    }

    fn with(config: &Config) -> Bench {
        let (registry, counters) = (Arc::new(Registry::new()), Arc::new(Counters::default()));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let transport = TcpTransport::start(listener, registry.clone(), counters.clone(), Arc::default(), config).unwrap();
        Bench { transport, registry, counters }
    }

    fn register(&self, range: MemoryRange) -> Arc<Region> {
        let options = RegionOptions { location: "*".into(), remote_accessible: true, counted: false, owner: Owner::Program };
        let Ok(Reservation::New(region)) = self.registry.reserve(range, &options) else { panic!("not reserved") };
        self.registry.commit(std::slice::from_ref(&region));
        region
    }

    fn submit(&self, target: &Arc<Target>, work: &[(Opcode, MemoryRange, u64)], deadline: Deadline) -> Arc<Outcomes> {
        let outcomes = Arc::new(Outcomes::default());
        self.submit_as(&outcomes, target, work, deadline);
        outcomes
    }

    fn submit_as(&self, outcomes: &Arc<Outcomes>, target: &Arc<Target>, work: &[(Opcode, MemoryRange, u64)], deadline: Deadline) {
        outcomes.ended.lock().resize_with(work.len(), || None);
        let segment: Arc<dyn Segment> = target.clone();
        let piece = |(index, &(opcode, local, remote_address)): (usize, &(Opcode, MemoryRange, u64))| Piece {
            opcode,
            local,
            remote_address,
            index: index as u32,
            way: Way::default(),
        };
        let pieces = work.iter().enumerate().map(piece).collect();
        self.transport.submit(&segment, Slices { pieces, deadline, completion: outcomes.clone() });
    }

    /// A raw client's connection to this transport's server.
    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", self.transport.port())).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    fn running(&self) -> usize {
        self.transport.shared.running.load(Ordering::SeqCst)
    }
}

fn eventually(what: &str, condition: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < end, "{what}: not in {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.transport.shutdown(Error::quiet(Code::Canceled, "the test is over"));
        let shared = &self.transport.shared;
        if !std::thread::panicking() {
            assert_eq!(self.running(), 0, "slices are counted that have ended");
            assert_eq!((shared.peers.read().len(), shared.connections.lock().len()), (0, 0));
        }
    }
}

fn stalls_after(milliseconds: u64) -> Deadline {
    Deadline { absolute: None, stall: Duration::from_millis(milliseconds) }
}

const PATIENT: Deadline = Deadline { absolute: None, stall: PATIENCE };

/// A server whose connections are served by a function, each on its own thread, with its number from 0.
struct Script {
    port: u16,
    accepted: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

fn script(serve: impl Fn(usize, TcpStream) + Send + Sync + 'static) -> Script {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    script_on(listener, serve)
}

fn script_on(listener: TcpListener, serve: impl Fn(usize, TcpStream) + Send + Sync + 'static) -> Script {
    let port = listener.local_addr().unwrap().port();
    let (accepted, stop) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let (count, stopped, serve) = (accepted.clone(), stop.clone(), Arc::new(serve));
    let thread = std::thread::spawn(move || {
        let mut served = Vec::new();
        loop {
            let (stream, _) = listener.accept().unwrap();
            if stopped.load(Ordering::SeqCst) {
                break;
            }
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            let (number, serve) = (count.fetch_add(1, Ordering::SeqCst), serve.clone());
            served.push(std::thread::spawn(move || serve(number, stream)));
        }
        drop(listener);
        for thread in served {
            thread.join().unwrap();
        }
    });
    Script { port, accepted, stop, thread: Some(thread) }
}

impl Script {
    fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        let outcome = self.thread.take().unwrap().join();
        assert!(outcome.is_ok() || std::thread::panicking(), "a script failed");
    }
}

/// The next request with its body; `None` at the end of the stream.
fn read_request(stream: &mut TcpStream) -> Option<(Header, Vec<u8>)> {
    let mut header = [0; HEADER_LENGTH];
    stream.read_exact(&mut header).ok()?;
    let header = Header::decode(&header);
    let mut body = vec![0; if header.opcode == Opcode::Write { header.length as usize } else { 0 }];
    stream.read_exact(&mut body).ok()?;
    Some((header, body))
}

/// What a good server answers; reads are answered by bytes that tell their address.
fn answer(header: &Header) -> Vec<u8> {
    let mut reply = Vec::new();
    if header.version == Version::V2 {
        reply.extend(wire::encode_status(wire::STATUS_OK));
    }
    if header.opcode == Opcode::Read {
        reply.extend((0..header.length).map(|i| pattern(header.address + i)));
    }
    reply
}

fn pattern(address: u64) -> u8 {
    (address % 253) as u8
}

fn serve_well(mut stream: TcpStream) {
    while let Some((header, _)) = read_request(&mut stream) {
        if stream.write_all(&answer(&header)).is_err() {
            return;
        }
    }
}

/// Reads until the other side closes, and says nothing.
fn swallow(mut stream: TcpStream) {
    let mut buffer = vec![0; 1 << 16];
    while !matches!(stream.read(&mut buffer), Ok(0) | Err(_)) {}
}

fn reset(stream: TcpStream) {
    let socket = socket2::Socket::from(stream);
    socket.set_linger(Some(Duration::ZERO)).unwrap();
}

fn request(opcode: Opcode, version: Version, address: u64, length: u64) -> Vec<u8> {
    Header { length, address, opcode, version }.encode().into()
}

fn rest_of(mut stream: TcpStream) -> (Vec<u8>, std::io::Result<usize>) {
    let mut received = Vec::new();
    let outcome = stream.read_to_end(&mut received);
    (received, outcome)
}

use Opcode::{Read as READ, Write as WRITE};
use Version::{V1, V2};

// --- This transport asks; the server is scripted. --------------------------------------------------------------------------------

#[test]
fn a_server_that_closes_every_connection_is_given_up() {
    let bench = Bench::new();
    let server = script(|_, stream| drop(stream));
    let ours = Memory::new(1 << 20);
    let target = Target::at(server.port);
    for _ in 0..20 {
        let outcomes = bench.submit(&target, &[(WRITE, ours.range(0, 100), 4096), (READ, ours.range(0, 100), 4096)], PATIENT);
        assert_eq!(outcomes.wait(), [Some(Code::Socket); 2]);
    }
    assert!(server.accepted() <= 20 * 2 * 4, "{} connections for 40 slices", server.accepted());
}

#[test]
fn a_server_that_resets_every_connection_is_given_up() {
    let bench = Bench::new();
    let server = script(|_, mut stream| {
        let _ = stream.read(&mut [0; 10]);
        reset(stream);
    });
    let ours = Memory::new(1 << 20);
    let work: Vec<_> = (0..5).map(|i| (WRITE, ours.range(i * 1000, 1000), 4096)).collect();
    let outcomes = bench.submit(&Target::at(server.port), &work, PATIENT);
    assert_eq!(outcomes.wait(), [Some(Code::Socket); 5]);
    assert!(server.accepted() <= 5 * 4, "{} connections", server.accepted());
}

#[test]
fn a_dead_port_fails_all_work_after_one_look_for_the_peer() {
    let bench = Bench::new();
    // Bound, so that nobody else gets the port, and not listening.
    let closed = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    closed.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    let port = closed.local_addr().unwrap().as_socket().unwrap().port();
    let ours = Memory::zeroed(64 << 20);
    let target = Target::at(port);
    let work: Vec<_> = (0..64).map(|i| (WRITE, ours.range(i << 20, 1 << 20), 4096)).collect();
    let outcomes = bench.submit(&target, &work, PATIENT);
    assert_eq!(outcomes.wait(), [Some(Code::Socket); 64]);
    let (opened, refreshes) = (bench.counters.connections_opened.get(), target.refreshes.load(Ordering::SeqCst));
    assert!(opened <= 12 && refreshes == 1, "{opened} connections, {refreshes} refreshes");
}

#[test]
fn an_address_that_cannot_be_tried_is_replaced_by_a_fresh_one() {
    let bench = Bench::new();
    let server = script(|_, stream| serve_well(stream));
    let ours = Memory::new(4096);
    let nowhere = SegmentDescriptor { tcp_data_host: "255.255.255.255".into(), ..descriptor(server.port, 2) };
    let target = Target::new(nowhere);
    target.will_say(descriptor(server.port, 2));
    let outcomes = bench.submit(&target, &[(WRITE, ours.range(0, 10), 4096)], PATIENT);
    assert_eq!(outcomes.wait(), [None]);
}

#[test]
fn a_connection_whose_abandoned_request_is_never_answered_is_closed() {
    let bench = Bench::new();
    let server = script(|number, stream| if number == 0 { swallow(stream) } else { serve_well(stream) });
    let ours = Memory::new(4096);
    let target = Target::at(server.port);
    let soon = Deadline { absolute: Some(Instant::now() + Duration::from_millis(30)), stall: Duration::from_millis(200) };
    assert_eq!(bench.submit(&target, &[(WRITE, ours.range(0, 10), 4096)], soon).wait(), [Some(Code::Timeout)]);
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!(bench.submit(&target, &[(WRITE, ours.range(0, 10), 4096)], stalls_after(5000)).wait(), [None]);
    assert_eq!(server.accepted(), 2);
}

#[test]
fn sending_more_does_not_hide_that_nothing_is_answered() {
    let bench = Bench::with(&Config { tcp_lanes_per_peer: 1, ..Config::default() });
    let server = script(|_, stream| swallow(stream));
    let ours = Memory::new(4096);
    let target = Target::at(server.port);
    let first = bench.submit(&target, &[(WRITE, ours.range(0, 10), 4096)], stalls_after(200));
    let mut later = Vec::new();
    for _ in 0..40 {
        if first.is_over() {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
        later.push(bench.submit(&target, &[(WRITE, ours.range(0, 10), 4096)], stalls_after(300)));
    }
    assert!(later.len() < 20, "the first was kept waiting by {} later ones", later.len());
    assert_eq!(first.wait(), [Some(Code::Timeout)]);
    for outcomes in later {
        assert!(outcomes.wait()[0].is_some());
    }
}

#[test]
fn version_1_writes_that_were_applied_are_never_called_failed() {
    let bench = Bench::new();
    let server = script(|_, stream| serve_well(stream));
    let ours = Memory::new(1 << 16);
    let target = Target::new(descriptor(server.port, 1));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Looks at all lanes again and again, as the clock does.
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                bench.transport.cancel();
            }
        });
        let mut bad = Vec::new();
        for round in 0..300 {
            let outcome = bench.submit(&target, &[(WRITE, ours.range(0, 1 + round * 7), 4096)], PATIENT).wait();
            bad.extend(outcome[0]);
        }
        stop.store(true, Ordering::Relaxed);
        assert_eq!(bad, []);
    });
}

#[test]
fn a_version_1_write_whose_bytes_the_peer_has_not_taken_has_failed() {
    let bench = Bench::new();
    let listener = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    listener.set_recv_buffer_size(4096).unwrap();
    listener.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    listener.listen(5).unwrap();
    let server = script_on(listener.into(), |_, mut stream| {
        stream.read_exact(&mut [0; HEADER_LENGTH]).unwrap();
        // As the end of a process looks when all that had arrived was read.
        stream.shutdown(Shutdown::Write).unwrap();
        std::thread::sleep(Duration::from_millis(500));
    });
    let ours = Memory::new(1 << 20);
    let target = Target::new(descriptor(server.port, 1));
    let outcomes = bench.submit(&target, &[(WRITE, ours.range(0, 200_000), 4096)], PATIENT);
    assert_eq!(outcomes.wait(), [Some(Code::Socket)]);
}

#[test]
fn version_1_reads_take_exactly_their_bytes() {
    let bench = Bench::new();
    let server = script(|_, stream| serve_well(stream));
    let into = Memory::zeroed(100_000);
    let target = Target::new(descriptor(server.port, 1));
    let work: Vec<_> = (0..20).map(|i| (READ, into.range(i * 5000, 4999), 4096 + i as u64)).collect();
    assert_eq!(bench.submit(&target, &work, PATIENT).wait(), [None; 20]);
    for i in 0..20 {
        assert!((0..4999).all(|at| into.0[i * 5000 + at] == pattern(4096 + (i + at) as u64)));
        assert_eq!(into.0[i * 5000 + 4999], 0);
    }
}

#[test]
fn many_version_1_transfers_wait_as_long_as_others_progress() {
    let bench = Bench::with(&Config { tcp_lanes_per_peer: 1, ..Config::default() });
    let server = script(|_, mut stream| {
        let Some((header, _)) = read_request(&mut stream) else { return };
        std::thread::sleep(Duration::from_millis(60));
        let _ = stream.write_all(&answer(&header));
    });
    let into = Memory::zeroed(1000);
    let target = Target::new(descriptor(server.port, 1));
    let work: Vec<_> = (0..10).map(|i| (READ, into.range(i * 100, 100), 4096)).collect();
    assert_eq!(bench.submit(&target, &work, stalls_after(250)).wait(), [None; 10]);
}

#[test]
fn what_was_cancelled_before_it_came_is_not_started() {
    let bench = Bench::new();
    let server = script(|_, stream| swallow(stream));
    let ours = Memory::new(4096);
    let outcomes = Arc::new(Outcomes::default());
    outcomes.cancelled.store(true, Ordering::SeqCst);
    bench.transport.cancel();
    bench.submit_as(&outcomes, &Target::at(server.port), &[(WRITE, ours.range(0, 10), 4096)], PATIENT);
    assert_eq!(outcomes.wait_within(Duration::from_secs(2)), [Some(Code::Canceled)]);
}

/// Refuses each request by its header, and reads the rest until the client closes.
fn refuse_all(mut stream: TcpStream) {
    let mut header = [0; HEADER_LENGTH];
    if stream.read_exact(&mut header).is_ok() {
        let _ = stream.write_all(&wire::encode_status(wire::STATUS_REJECTED));
        let _ = stream.shutdown(Shutdown::Write);
        swallow(stream);
    }
}

#[test]
fn a_refusal_asks_for_the_descriptor_once_and_tries_once_more() {
    let bench = Bench::new();
    let server = script(|_, stream| refuse_all(stream));
    let ours = Memory::new(4096);
    let target = Target::at(server.port);
    let outcomes = bench.submit(&target, &[(WRITE, ours.range(0, 10), 4096)], PATIENT);
    assert_eq!(outcomes.wait(), [Some(Code::AddressNotRegistered)]);
    assert_eq!((target.refreshes.load(Ordering::SeqCst), server.accepted()), (1, 2));
}

#[test]
fn refused_work_keeps_its_deadline_while_the_peer_is_asked() {
    let bench = Bench::new();
    let server = script(|_, stream| refuse_all(stream));
    let ours = Memory::new(4096);
    let target = Target::at(server.port);
    *target.asking_takes.lock() = Duration::from_secs(3);
    let soon = Deadline { absolute: Some(Instant::now() + Duration::from_millis(200)), stall: PATIENCE };
    let outcomes = bench.submit(&target, &[(WRITE, ours.range(0, 10), 4096)], soon);
    assert_eq!(outcomes.wait_within(Duration::from_secs(2)), [Some(Code::Timeout)]);
}

#[test]
fn ranges_over_touching_buffers_are_split_when_the_peer_refuses_them() {
    let bench = Bench::new();
    // As upstream: a range must lie in one buffer of 100 bytes.
    let server = script(|_, mut stream| {
        while let Some((header, _)) = read_request(&mut stream) {
            if header.address / 100 != (header.address + header.length - 1) / 100 {
                let _ = stream.write_all(&wire::encode_status(wire::STATUS_REJECTED));
                return;
            }
            stream.write_all(&answer(&header)).unwrap();
        }
    });
    let buffers = (0..50).map(|i| BufferDescriptor { address: i * 100, length: 100, ..BufferDescriptor::default() }).collect();
    let target = Target::new(SegmentDescriptor { buffers, ..descriptor(server.port, 2) });
    let into = Memory::zeroed(3000);
    let work = [(READ, into.range(0, 50), 120), (READ, into.range(100, 1000), 1050), (READ, into.range(2000, 250), 2000)];
    assert_eq!(bench.submit(&target, &work, PATIENT).wait(), [None; 3]);
    for (offset, length, address) in [(0, 50, 120), (100, 1000, 1050), (2000, 250, 2000)] {
        assert!((0..length).all(|i| into.0[offset + i] == pattern(address + i as u64)), "{address}");
    }
}

#[test]
fn a_reset_in_a_pipeline_is_the_fault_of_one_request() {
    let bench = Bench::with(&Config { tcp_lanes_per_peer: 1, ..Config::default() });
    // A process that dies of one address, and is back at once.
    let server = script(|_, mut stream| {
        while let Some((header, _)) = read_request(&mut stream) {
            if header.address == 5000 {
                return reset(stream);
            }
            let _ = stream.write_all(&answer(&header));
        }
    });
    let ours = Memory::new(4096);
    let work: Vec<_> = (0..50).map(|i| (WRITE, ours.range(i, 50), if i == 20 { 5000 } else { 6000 })).collect();
    let outcomes = bench.submit(&Target::at(server.port), &work, PATIENT).wait();
    for (i, outcome) in outcomes.iter().enumerate() {
        assert_eq!(*outcome, (i == 20).then_some(Code::Socket), "{i}");
    }
}

#[test]
fn replies_that_come_in_drips_are_put_together() {
    let bench = Bench::new();
    let server = script(|_, mut stream| {
        stream.set_nodelay(true).unwrap();
        while let Some((header, _)) = read_request(&mut stream) {
            for byte in answer(&header) {
                if stream.write_all(&[byte]).is_err() {
                    return;
                }
            }
        }
    });
    let into = Memory::zeroed(4000);
    let work: Vec<_> =
        (0..40).map(|i| (if i % 3 == 0 { WRITE } else { READ }, into.range(i * 100, 1 + i), 1000 + i as u64)).collect();
    assert_eq!(bench.submit(&Target::at(server.port), &work, PATIENT).wait(), [None; 40]);
    for (i, (opcode, ..)) in work.iter().enumerate().filter(|(_, (opcode, ..))| *opcode == READ) {
        assert!((0..=i).all(|at| into.0[i * 100 + at] == pattern((1000 + i + at) as u64)), "{i} {opcode:?}");
        assert_eq!(into.0[i * 100 + i + 1], 0);
    }
}

#[test]
fn nonsense_instead_of_status_frames_fails_and_heals() {
    let bench = Bench::new();
    let replies: [&[u8]; 4] =
        [b"HTTP/1.1 400 Bad Request\r\n\r\n", &[0; 64], &wire::encode_status(7), &wire::encode_status(0)[1..]];
    for (number, reply) in replies.into_iter().enumerate() {
        let reply = reply.to_vec();
        let bad = script(move |_, mut stream| {
            let mut header = [0; HEADER_LENGTH];
            let _ = stream.read_exact(&mut header);
            let _ = stream.write_all(&reply);
            swallow(stream);
        });
        let ours = Memory::new(4096);
        let target = Target::at(bad.port);
        let work = [(WRITE, ours.range(0, 10), 4096), (READ, ours.range(100, 10), 4096), (WRITE, ours.range(0, 10), 4096)];
        let outcomes = bench.submit(&target, &work, stalls_after(500)).wait();
        assert!(outcomes.iter().all(Option::is_some), "{number}: {outcomes:?}");
        assert!(bad.accepted() < 12, "{number}: {} connections", bad.accepted());
        // The descriptor was out of date: the peer has moved meanwhile.
        let good = script(|_, stream| serve_well(stream));
        target.will_say(descriptor(good.port, 2));
        let outcomes = bench.submit(&target, &[(WRITE, ours.range(0, 10), 4096)], stalls_after(500)).wait();
        assert!(number == 3 || outcomes == [None], "{number}: {outcomes:?}");
        drop(target);
    }
}

#[test]
fn a_port_that_another_program_took_over_is_left_at_the_next_transfer() {
    let bench = Bench::new();
    let other = script(|_, stream| drop(stream));
    let good = script(|_, stream| serve_well(stream));
    let ours = Memory::new(4096);
    let target = Target::at(other.port);
    target.will_say(descriptor(good.port, 2));
    bench.submit(&target, &[(WRITE, ours.range(0, 10), 4096)], PATIENT).wait();
    assert_eq!(bench.submit(&target, &[(WRITE, ours.range(0, 10), 4096)], PATIENT).wait(), [None]);
}

#[test]
fn bytes_that_nobody_asked_for_end_the_connection() {
    let bench = Bench::new();
    let server = script(|number, mut stream| {
        let Some((header, _)) = read_request(&mut stream) else { return };
        stream.write_all(&answer(&header)).unwrap();
        if number == 0 {
            stream.write_all(b"more").unwrap();
            swallow(stream);
        } else {
            serve_well(stream);
        }
    });
    let ours = Memory::new(4096);
    let target = Target::at(server.port);
    for _ in 0..3 {
        assert_eq!(bench.submit(&target, &[(WRITE, ours.range(0, 10), 4096)], PATIENT).wait(), [None]);
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(server.accepted(), 2);
}

#[test]
fn a_peer_that_moved_is_followed_when_its_descriptor_was_fetched() {
    let bench = Bench::new();
    let (old, new) = (script(|_, stream| serve_well(stream)), script(|_, stream| serve_well(stream)));
    let ours = Memory::new(4096);
    let target = Target::at(old.port);
    assert_eq!(bench.submit(&target, &[(WRITE, ours.range(0, 10), 4096)], PATIENT).wait(), [None]);
    target.will_say(descriptor(new.port, 2));
    target.refresh().unwrap();
    assert_eq!(bench.submit(&target, &[(WRITE, ours.range(0, 10), 4096)], PATIENT).wait(), [None]);
    assert_eq!((old.accepted(), new.accepted()), (1, 1));
    // Its old connection is closed, or the script would not end.
    drop(old);
}

#[test]
fn a_peer_that_was_replaced_and_refuses_is_left_for_the_fresh_address() {
    let bench = Bench::new();
    let (old, new) = (script(|_, stream| refuse_all(stream)), script(|_, stream| serve_well(stream)));
    let ours = Memory::new(4 << 20);
    let target = Target::at(old.port);
    target.will_say(descriptor(new.port, 2));
    let work: Vec<_> = (0..8).map(|i| (WRITE, ours.range(i << 18, 1 << 18), 4096)).collect();
    assert_eq!(bench.submit(&target, &work, PATIENT).wait(), [None; 8]);
}

#[test]
fn connections_of_a_forgotten_segment_close_when_their_work_has_ended() {
    let bench = Bench::new();
    let (ended, end) = std::sync::mpsc::channel();
    let ended = Mutex::new(ended);
    let server = script(move |_, mut stream| {
        let Some((header, _)) = read_request(&mut stream) else { return };
        std::thread::sleep(Duration::from_millis(200));
        stream.write_all(&answer(&header)).unwrap();
        assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
        ended.lock().send(()).unwrap();
    });
    let ours = Memory::new(4096);
    let target = Target::at(server.port);
    let outcomes = bench.submit(&target, &[(WRITE, ours.range(0, 10), 4096)], PATIENT);
    eventually("connected", || server.accepted() == 1);
    bench.transport.forget(target.id);
    assert_eq!(outcomes.wait(), [None]);
    end.recv_timeout(Duration::from_secs(5)).unwrap();
    eventually("dropped", || bench.transport.shared.retired.lock().is_empty());
}

#[test]
fn a_segment_that_only_this_transport_still_knows_is_forgotten() {
    let bench = Bench::new();
    let server = script(|_, stream| serve_well(stream));
    let ours = Memory::new(4096);
    let target = Target::at(server.port);
    assert_eq!(bench.submit(&target, &[(WRITE, ours.range(0, 10), 4096)], PATIENT).wait(), [None]);
    drop(target);
    eventually("forgotten", || bench.transport.shared.peers.read().is_empty());
    drop(server);
}

#[test]
fn abandoned_requests_do_not_harm_the_others_of_their_connection() {
    let bench = Bench::with(&Config { tcp_lanes_per_peer: 1, ..Config::default() });
    let server = script(|_, mut stream| {
        while let Some((header, _)) = read_request(&mut stream) {
            if header.address == 77 {
                std::thread::sleep(Duration::from_millis(200));
            }
            if stream.write_all(&answer(&header)).is_err() {
                return;
            }
        }
    });
    let into = Memory::zeroed(64 << 20);
    let target = Target::at(server.port);
    for (opcode, length) in [(READ, 100), (WRITE, 100), (READ, 4 << 20), (WRITE, 32 << 20)] {
        let kept = bench.submit(&target, &[(READ, into.range(0, 1000), 77)], PATIENT);
        let cancelled = bench.submit(&target, &[(opcode, into.range(1 << 20, length), 88)], PATIENT);
        std::thread::sleep(Duration::from_millis(50));
        let behind = bench.submit(&target, &[(READ, into.range(2000, 1000), 99)], PATIENT);
        cancelled.cancelled.store(true, Ordering::SeqCst);
        bench.transport.cancel();
        assert!(cancelled.is_over());
        assert_eq!(cancelled.wait(), [Some(Code::Canceled)]);
        assert_eq!((kept.wait(), behind.wait()), (vec![None], vec![None]), "{opcode:?} {length}");
        assert!((0..1000).all(|i| into.0[i] == pattern(77 + i as u64) && into.0[2000 + i] == pattern(99 + i as u64)));
    }
}

#[test]
fn memory_that_cannot_be_read_or_written_fails_its_own_slice_only() {
    let bench = Bench::with(&Config { tcp_lanes_per_peer: 1, ..Config::default() });
    let server = script(|_, stream| serve_well(stream));
    let into = Memory::zeroed(1 << 20);
    let nowhere = range(4096, 8192);
    let work = [
        (READ, into.range(0, 1000), 1),
        (READ, nowhere, 2),
        (READ, into.range(1000, 1000), 3),
        (WRITE, nowhere, 4),
        (WRITE, into.range(0, 1000), 5),
        (READ, nowhere, 6),
        (READ, into.range(2000, 100_000), 7),
    ];
    let outcomes = bench.submit(&Target::at(server.port), &work, PATIENT).wait();
    let bad = Some(Code::Fault);
    assert_eq!(outcomes, [None, bad, None, bad, None, bad, None]);
    assert!((0..1000).all(|i| into.0[i] == pattern(1 + i as u64) && into.0[1000 + i] == pattern(3 + i as u64)));
    assert!((0..100_000).all(|i| into.0[2000 + i] == pattern(7 + i as u64)));
}

#[test]
fn lengths_that_no_memory_has_fail() {
    let bench = Bench::new();
    let server = script(|_, stream| swallow(stream));
    let target = Target::at(server.port);
    for length in [1u64 << 47, 1 << 62, u64::MAX - 4096, u64::MAX - 23] {
        let work = [(WRITE, range(4096, length.min(u64::MAX - 4096)), 4096), (READ, range(1, length), 1)];
        let outcomes = bench.submit(&target, &work, stalls_after(100)).wait();
        assert!(outcomes.iter().all(Option::is_some), "{length:#x}: {outcomes:?}");
    }
}

#[test]
fn evicting_local_memory_ends_its_slices_at_once_and_no_byte_of_it_moves_after() {
    let bench = Bench::with(&Config { tcp_lanes_per_peer: 1, ..Config::default() });
    let server = script(|_, mut stream| {
        while let Some((header, _)) = read_request(&mut stream) {
            for part in answer(&header).chunks(100_000) {
                std::thread::sleep(Duration::from_millis(10));
                if stream.write_all(part).is_err() {
                    return;
                }
            }
        }
    });
    let into = Memory::zeroed(4 << 20);
    let target = Target::at(server.port);
    let outcomes = bench.submit(&target, &[(READ, into.range(0, 3 << 20), 0), (READ, into.range(3 << 20, 1000), 5)], PATIENT);
    eventually("some bytes came", || into.range(0, 1).length() == 1 && into.0[1000..2000].iter().any(|byte| *byte != 0));
    bench.transport.evict(into.range(0, 3 << 20));
    let then = into.0[..3 << 20].to_vec();
    let outcome = outcomes.wait();
    assert_eq!(outcome, [Some(Code::Canceled), None]);
    std::thread::sleep(Duration::from_millis(50));
    assert!(into.0[..3 << 20] == then);
}

#[test]
fn shutting_down_ends_what_comes_at_the_same_time() {
    for round in 0..20 {
        let bench = Bench::new();
        let server = script(|_, stream| serve_well(stream));
        let ours = Memory::new(4096);
        let target = Target::at(server.port);
        let go = std::sync::Barrier::new(3);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    go.wait();
                    let submitted: Vec<_> =
                        (0..50).map(|_| bench.submit(&target, &[(WRITE, ours.range(0, 10), 4096)], PATIENT)).collect();
                    for outcomes in submitted {
                        outcomes.wait();
                    }
                });
            }
            go.wait();
            std::thread::sleep(Duration::from_micros(100 * round));
            bench.transport.shutdown(Error::quiet(Code::Canceled, "over"));
        });
    }
}

#[test]
fn nothing_is_kept_alive_by_a_transport_that_is_gone() {
    let bench = Bench::new();
    let server = script(|number, stream| if number % 2 == 0 { swallow(stream) } else { serve_well(stream) });
    let ours = Memory::new(4 << 20);
    let theirs = Memory::zeroed(4096);
    let region = bench.register(theirs.range(0, 4096));
    let target = Target::at(server.port);
    let work: Vec<_> = (0..8).map(|i| (WRITE, ours.range(i << 18, 1 << 18), 4096)).collect();
    let outcomes = bench.submit(&target, &work, PATIENT);
    let mut client = bench.connect();
    client.write_all(&request(WRITE, V2, theirs.address(), 4096)).unwrap();
    eventually("held", || region.in_flight() == 1);
    bench.transport.shutdown(Error::quiet(Code::Canceled, "over"));
    outcomes.wait();
    assert_eq!(region.in_flight(), 0);
    let shared = Arc::downgrade(&bench.transport.shared);
    drop(bench);
    assert_eq!(shared.strong_count(), 0);
    assert_eq!(Arc::strong_count(&target), 1);
}

#[test]
fn a_batch_of_small_requests_is_one_send_of_the_submitter() {
    let bench = Bench::new();
    let server = script(|_, stream| serve_well(stream));
    let ours = Memory::new(4096);
    let target = Target::at(server.port);
    assert_eq!(bench.submit(&target, &[(WRITE, ours.range(0, 10), 4096)], PATIENT).wait(), [None]);
    for (opcode, count) in [(WRITE, 1), (WRITE, 32), (READ, 1), (READ, 60)] {
        let work: Vec<_> = (0..count).map(|i| (opcode, ours.range(i * 10, 10), 4096)).collect();
        let before = crate::sys::socket::sends_of_this_thread();
        let outcomes = bench.submit(&target, &work, PATIENT);
        assert_eq!(crate::sys::socket::sends_of_this_thread() - before, 1, "{opcode:?} {count}");
        assert_eq!(outcomes.wait(), vec![None; count]);
    }
    assert_eq!(bench.counters.connections_opened.get(), 1);
}

#[test]
fn small_requests_of_many_threads_need_few_connections() {
    let bench = Bench::new();
    let server = script(|_, stream| serve_well(stream));
    let target = Target::at(server.port);
    let memory: Vec<_> = (0..8).map(|_| Memory::zeroed(4096)).collect();
    std::thread::scope(|scope| {
        for into in &memory {
            let (bench, target) = (&bench, &target);
            scope.spawn(move || {
                for round in 0..200 {
                    let work = [(READ, into.range(0, 100), round), (READ, into.range(100, 100), round + 7)];
                    assert_eq!(bench.submit(target, &work, PATIENT).wait(), [None; 2]);
                    assert!(
                        (0..100)
                            .all(|i| into.0[i] == pattern(round + i as u64) && into.0[100 + i] == pattern(round + 7 + i as u64))
                    );
                }
            });
        }
    });
    assert!(server.accepted() <= Config::default().tcp_lanes_per_peer);
    drop(target);
}

// --- This transport serves; the client is scripted. ------------------------------------------------------------------------------

#[test]
fn requests_before_a_half_close_are_answered() {
    let bench = Bench::new();
    let theirs = Memory::new(4096);
    bench.register(theirs.range(0, 4096));
    let ok = wire::encode_status(wire::STATUS_OK);
    for version in [V1, V2] {
        let status: &[u8] = if version == V2 { &ok } else { &[] };
        let mut client = bench.connect();
        client.write_all(&request(READ, version, theirs.address(), 100)).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        assert_eq!(rest_of(client).0, [status, &theirs.0[..100]].concat());
        // A whole write, and half of another one.
        let mut client = bench.connect();
        let mut bytes = request(WRITE, version, theirs.address() + 1000, 10);
        bytes.extend([7; 10]);
        bytes.extend(request(WRITE, V2, theirs.address() + 2000, 10));
        bytes.extend([7; 5]);
        client.write_all(&bytes).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        let (received, outcome) = rest_of(client);
        assert_eq!(received, status);
        outcome.unwrap();
        assert_eq!(theirs.0[1000..1010], [7; 10]);
    }
}

#[test]
fn replies_to_what_came_before_a_refusal_are_complete() {
    let bench = Bench::new();
    let theirs = Memory::new(8 << 20);
    bench.register(theirs.range(0, 8 << 20));
    let ok = wire::encode_status(wire::STATUS_OK);
    let mut client = bench.connect();
    let mut bytes = request(READ, V2, theirs.address(), 8 << 20);
    bytes.extend(request(READ, V2, 16, 100));
    bytes.extend(request(READ, V2, theirs.address(), 100));
    client.write_all(&bytes).unwrap();
    // Slower than the time for which a refusal lingers.
    std::thread::sleep(server::LINGER + Duration::from_millis(500));
    let (received, outcome) = rest_of(client);
    outcome.unwrap();
    assert!(received == [&ok, &theirs.0[..], &wire::encode_status(wire::STATUS_REJECTED)].concat(), "{} bytes", received.len());
    // Version 1 has no word for a refusal: a read is refused by the end of the stream.
    let mut client = bench.connect();
    client.write_all(&[request(READ, V1, theirs.address(), 50_000), request(READ, V1, 16, 100)].concat()).unwrap();
    assert!(rest_of(client).0 == theirs.0[..50_000]);
}

#[test]
fn a_refused_version_1_write_ends_in_a_reset() {
    let bench = Bench::new();
    for round in 0..60 {
        let mut client = bench.connect();
        let mut bytes = request(WRITE, V1, 4096, 1000);
        if round % 2 == 0 {
            bytes.extend([1; 1000]);
        }
        client.write_all(&bytes).unwrap();
        if round % 3 == 0 {
            let _ = client.shutdown(Shutdown::Write);
        }
        let (_, outcome) = rest_of(client);
        assert_eq!(outcome.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset, "{round}");
    }
}

#[test]
fn a_version_1_write_that_is_cut_short_here_ends_in_a_reset() {
    let bench = Bench::new();
    let theirs = Memory::zeroed(4096);
    let region = bench.register(theirs.range(0, 4096));
    let mut client = bench.connect();
    client.write_all(&[request(WRITE, V1, theirs.address(), 4096), vec![1; 100]].concat()).unwrap();
    eventually("held and received", || region.in_flight() == 1 && theirs.0[99] == 1);
    bench.transport.evict(theirs.range(0, 4096));
    assert_eq!(region.in_flight(), 0);
    assert_eq!(rest_of(client).1.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
}

#[test]
fn a_refused_body_of_any_size_does_not_destroy_the_refusal() {
    let bench = Bench::new();
    for size in [1, 100, 1 << 16, 32 << 20] {
        let mut client = bench.connect();
        client.write_all(&request(WRITE, V2, 4096, size)).unwrap();
        let _ = client.write_all(&vec![1; size as usize]);
        let mut status = [0; 8];
        client.read_exact(&mut status).unwrap();
        assert_eq!(wire::decode_status(&status), Some(wire::STATUS_REJECTED), "{size}");
        drop(client);
    }
    eventually("closed", || bench.transport.shared.connections.lock().is_empty());
    eventually("forgotten", || bench.transport.shared.lingering.lock().is_empty());
}

#[test]
fn a_client_that_stays_after_its_refusal_is_closed() {
    let bench = Bench::new();
    let mut client = bench.connect();
    client.write_all(&request(WRITE, V2, 4096, 1000)).unwrap();
    let started = Instant::now();
    eventually("refused", || bench.counters.requests_refused.get() == 1);
    eventually("closed", || bench.transport.shared.connections.lock().is_empty());
    assert!(started.elapsed() >= server::LINGER);
    drop(client);
}

#[test]
fn connections_that_have_lingered_are_forgotten_whatever_comes_after_them() {
    let bench = Bench::new();
    let theirs = Memory::zeroed(4096);
    bench.register(theirs.range(0, 4096));
    let mut kept = Vec::new();
    for _ in 0..50 {
        let mut refused = bench.connect();
        refused.write_all(&request(READ, V2, 4096, 1000)).unwrap();
        assert_eq!(rest_of(refused).0, wire::encode_status(wire::STATUS_REJECTED));
        let mut client = bench.connect();
        client.write_all(&request(READ, V2, theirs.address(), 1)).unwrap();
        client.read_exact(&mut [0; 9]).unwrap();
        kept.push(client);
    }
    eventually("forgotten", || bench.transport.shared.lingering.lock().is_empty());
}

#[test]
fn bad_pages_of_registered_memory_refuse_a_write_and_end_a_read() {
    let bench = Bench::new();
    let theirs = Memory::zeroed(4096);
    bench.register(theirs.range(0, 4096));
    bench.register(range(4096, 4096));
    let mut client = bench.connect();
    let mut bytes = request(WRITE, V2, theirs.address(), 4);
    bytes.extend([9; 4]);
    bytes.extend(request(WRITE, V2, 4096, 1000));
    bytes.extend([9; 1000]);
    client.write_all(&bytes).unwrap();
    let expected = [wire::encode_status(wire::STATUS_OK), wire::encode_status(wire::STATUS_REJECTED)].concat();
    assert_eq!(rest_of(client).0, expected);
    // Behind reads, the first bytes of the body are taken together with the headers.
    let mut client = bench.connect();
    let read = request(READ, V2, theirs.address(), 4);
    client.write_all(&[&read[..], &read, &request(WRITE, V2, 4096, 1000), &[9; 1000]].concat()).unwrap();
    let reply = [&wire::encode_status(wire::STATUS_OK)[..], &[9; 4]].concat();
    let expected = [&reply[..], &reply, &wire::encode_status(wire::STATUS_REJECTED)].concat();
    assert_eq!(rest_of(client).0, expected);
    let mut client = bench.connect();
    client.write_all(&[request(READ, V2, theirs.address(), 4), request(READ, V2, 4096, 1000)].concat()).unwrap();
    let (received, _) = rest_of(client);
    assert!(received.starts_with(&[&wire::encode_status(0)[..], &[9; 4]].concat()) && received.len() <= 20, "{received:?}");
    let mut client = bench.connect();
    client.write_all(&[request(WRITE, V1, 4096, 1000), vec![1; 1000]].concat()).unwrap();
    assert_eq!(rest_of(client).1.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
}

/// A small generator of test data (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

#[test]
fn what_was_taken_behind_a_large_read_is_served_once_that_is_sent() {
    const LENGTH: u64 = 12 << 20;
    let bench = Bench::new();
    let theirs = Memory::zeroed(LENGTH as usize);
    let _region = bench.register(theirs.range(0, LENGTH as usize));
    let client = bench.connect();
    // The last write changes what is read, and has arrived with the header of that.
    let last = request(WRITE, V2, theirs.address() + LENGTH - 4, 4);
    let bytes = [&request(READ, V2, theirs.address(), LENGTH)[..], &last, b"late"].concat();
    let mut reply = vec![0; LENGTH as usize + 16];
    // Whether the peer makes room for the rest just as the server looks is a matter of chance.
    client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    for round in 0..300 {
        (&client).write_all(&bytes).unwrap();
        (&client).read_exact(&mut reply).unwrap_or_else(|error| panic!("round {round}: {error}"));
    }
}

#[test]
fn pipelines_of_mixed_requests_in_arbitrary_pieces_are_answered_in_order() {
    let bench = Bench::new();
    for seed in 1..=30 {
        let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ seed);
        let theirs = Memory::zeroed(1 << 16);
        let region = bench.register(theirs.range(0, 1 << 16));
        let mut model = theirs.0.clone();
        let (mut bytes, mut expected) = (Vec::new(), Vec::new());
        let mut refused = false;
        let longest = [30, 3000, 30_000][(seed % 3) as usize];
        for _ in 0..150 {
            let version = if random.below(4) == 0 { V1 } else { V2 };
            let opcode = if random.below(2) == 0 { READ } else { WRITE };
            let length = 1 + random.below(longest);
            let offset = random.below((1 << 16) - length);
            let bad = version == V2 && random.below(200) == 0;
            let address = if bad { 4096 + offset } else { theirs.address() + offset };
            bytes.extend(request(opcode, version, address, length));
            let body: Vec<u8> = (0..length).map(|_| random.below(256) as u8).collect();
            if opcode == WRITE {
                bytes.extend(&body);
            }
            if refused {
                continue;
            }
            if bad {
                refused = true;
                expected.extend(wire::encode_status(wire::STATUS_REJECTED));
                continue;
            }
            if version == V2 {
                expected.extend(wire::encode_status(wire::STATUS_OK));
            }
            let part = offset as usize..(offset + length) as usize;
            match opcode {
                READ => expected.extend(&model[part]),
                WRITE => model[part].copy_from_slice(&body),
            }
        }
        let client = bench.connect();
        let mut sender = client.try_clone().unwrap();
        let biggest = [1 + longest / 30, 1 + longest / 4, longest * 2, longest * 20][(seed % 4) as usize];
        // Nobody's bytes are lost to a reset unless the client goes on after its refusal.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut rest = &bytes[..];
                while !rest.is_empty() {
                    let (piece, later) = rest.split_at(rest.len().min(1 + random.below(biggest) as usize));
                    if sender.write_all(piece).is_err() {
                        break;
                    }
                    rest = later;
                }
                let _ = sender.shutdown(Shutdown::Write);
            });
            let (received, _) = rest_of(client);
            assert!(received == expected, "seed {seed}: {} of {} bytes", received.len(), expected.len());
        });
        eventually("given back", || region.in_flight() == 0);
        assert!(theirs.0 == model, "seed {seed}");
        assert!(matches!(bench.registry.start_drain(theirs.address()), Ok(crate::registry::Removal::Last(_))));
        assert!(bench.registry.drain(&region, PATIENCE));
        bench.registry.finish(&region);
    }
}

#[test]
fn a_client_that_takes_no_replies_stops_being_read_and_is_evicted() {
    let bench = Bench::new();
    let theirs = Memory::new(16 << 20);
    let region = bench.register(theirs.range(0, 16 << 20));
    let mut client = bench.connect();
    for _ in 0..4 {
        client.write_all(&request(READ, V2, theirs.address(), 16 << 20)).unwrap();
    }
    eventually("held", || region.in_flight() > 0);
    bench.transport.evict(theirs.range(100, 1));
    assert_eq!(region.in_flight(), 0);
    let (received, _) = rest_of(client);
    assert!(received.len() < 64 << 20);
}
