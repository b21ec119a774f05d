//! NICs of a real kernel: soft-RoCE and soft-iWARP, which "make test-lab" brings up in a virtual machine. Ignored elsewhere, since they
//! need such devices and the right to take their links down.
#![cfg(feature = "rdma")]

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use transfer_engine::Code;
use transfer_engine::config::Config;
use transfer_engine::engine::{Engine, EngineOptions, MemoryOptions, PEER_TO_PEER};
use transfer_engine::sys::MemoryRange;
use transfer_engine::topology::{Machine, Topology};
use transfer_engine::transfer::{Batch, Hints, Request, State, SubmitOptions};
use transfer_engine::transport::Opcode;
use transfer_engine::transport::device::{Device, MemoryKey};
use transfer_engine::transport::rdma::device::{Nic, PeerQueuePair, load_library};
use transfer_engine::transport::rdma::verbs::{AsyncEvent, CompletionChannel, CompletionQueue, Outcome, QueuePair, WorkRequest};

/// The lab's devices of a driver, with the addresses of their network interfaces.
fn devices(driver: &str) -> BTreeMap<String, String> {
    let listed = std::env::var("RDMA_LAB_DEVICES").expect("this test runs in the lab: make test-lab");
    let pairs = listed.split_whitespace().filter_map(|entry| entry.split_once('='));
    pairs.filter(|(name, _)| name.starts_with(driver)).map(|(name, address)| (name.to_string(), address.to_string())).collect()
}

fn open(name: &str) -> Nic {
    let config = Config::default().rdma;
    Nic::open(load_library(&config).unwrap(), &Machine::default(), name, &config).unwrap()
}

/// Memory regions on a device, as the kernel counts them.
fn regions(device: &str) -> usize {
    // Without details it shows none, and as JSON neither.
    run("rdma", &["-d", "resource", "show", "mr", "dev", device]).lines().count()
}

/// Packets that a device has received, without those that it had seen before, as the kernel counts them.
fn packets_received(device: &str) -> u64 {
    let counter = |name: &str| {
        let path = format!("/sys/class/infiniband/{device}/ports/1/hw_counters/{name}");
        std::fs::read_to_string(path).unwrap().trim().parse::<u64>().unwrap()
    };
    counter("rcvd_pkts") - counter("duplicate_request")
}

/// Runs a program that succeeds, and returns what it prints.
fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// The network interface of a device, with what the kernel forgets when it goes and the lab's devices need to reach each other.
struct Interface {
    name: String,
    forgotten: Vec<String>,
}

impl Interface {
    fn of(device: &str) -> Interface {
        let name = Machine::default().nic(device).unwrap().port(1).unwrap().gids[1].net_device.clone().unwrap();
        let routes = run("ip", &["-4", "route", "show", "table", "all"]);
        let own_table = format!(" dev {name} table 1");
        let routes = routes.lines().filter(|route| route.contains(&own_table)).map(|route| format!("route replace {route}"));
        let neighbours = run("ip", &["neigh", "show", "dev", &name, "nud", "permanent"]);
        let neighbours =
            neighbours.lines().map(|entry| format!("neigh replace {} dev {name} nud permanent", entry.replace(" PERMANENT", "")));
        let forgotten = routes.chain(neighbours).collect();
        Interface { name, forgotten }
    }

    fn take_down(&self) {
        run("ip", &["link", "set", &self.name, "down"]);
    }

    fn bring_up(&self) {
        run("ip", &["link", "set", &self.name, "up"]);
        for command in &self.forgotten {
            run("ip", &command.split_whitespace().collect::<Vec<_>>());
        }
    }
}

/// Memory of the test.
struct Memory(Vec<u8>);

impl Memory {
    fn new(length: usize) -> Memory {
        Memory(vec![0; length])
    }

    fn range(&self, offset: usize, length: usize) -> MemoryRange {
        let bytes = &self.0[offset..offset + length];
        // SAFETY: the test keeps the memory until the devices have let it go, and looks at it only when nothing is under way.
        #[allow(unsafe_code)]
        unsafe { MemoryRange::new(bytes.as_ptr() as u64, length as u64) }.unwrap()
    }
}

/// Two queue pairs that are connected to each other.
struct Wire {
    queue: Arc<CompletionQueue>,
    pairs: [QueuePair; 2],
}

impl Wire {
    fn new(nics: [&Nic; 2]) -> Wire {
        let queues = nics.map(|nic| nic.make_completion_queue(None).unwrap());
        let pairs = [0, 1].map(|side| nics[side].make_queue_pair(&queues[side]).unwrap());
        let peer = |side: usize| PeerQueuePair {
            number: pairs[side].number(),
            gid: nics[side].address().gid,
            lid: nics[side].address().lid,
        };
        nics[0].connect(&pairs[0], &peer(1)).unwrap();
        nics[1].connect(&pairs[1], &peer(0)).unwrap();
        let [queue, _] = queues;
        Wire { queue, pairs }
    }

    /// Waits for the next completion of the first side.
    fn wait(&self, what: impl std::fmt::Debug) -> (u64, Outcome) {
        let until = Instant::now() + Duration::from_secs(30);
        let mut found = None;
        while found.is_none() {
            assert!(Instant::now() < until, "no completion of {what:?}");
            self.queue.poll(1, |completion| found = Some((completion.id, completion.outcome))).unwrap();
        }
        found.unwrap()
    }
}

fn request(opcode: Opcode, local: MemoryRange, local_key: &MemoryKey, remote: MemoryRange, remote_key: &MemoryKey) -> WorkRequest {
    let (local_key, remote_address, remote_key) = (local_key.lkey, remote.address(), remote_key.rkey);
    WorkRequest { id: local.length(), opcode, local, local_key, remote_address, remote_key }
}

#[test]
#[ignore = "needs the lab"]
fn the_machine_is_discovered_without_verbs() {
    let topology = Topology::discover(&Machine::default(), &[]);
    let rxe = devices("rxe");
    assert!(rxe.len() >= 2);
    for (name, address) in &rxe {
        assert!(topology.nics().contains(&name.as_str()), "{topology:?}");
        let link = topology.links(&Machine::default(), 1, None).into_iter().find(|link| link.device == *name).unwrap();
        let ends: Vec<String> = address.split('.').map(|part| format!("{:02x}", part.parse::<u8>().unwrap())).collect();
        let (gid, index) = link.gid.unwrap();
        assert!(gid.to_string().ends_with(&format!("ff:ff:{}", ends.join(":"))) && index == 1, "{gid}");
        // What verbs tell is the same.
        assert_eq!(open(name).link().gid, link.gid);
    }
    let one = rxe.keys().next().unwrap();
    assert_eq!(Topology::discover(&Machine::default(), &[std::slice::from_ref(one)]).nics(), [one]);
}

#[test]
#[ignore = "needs the lab"]
fn memory_is_registered_and_given_back_exactly_on_every_device() {
    let memory = Memory::new(256 * 4096);
    let names = devices("");
    let nics: Vec<Nic> = names.keys().map(|name| open(name)).collect();
    let before: Vec<usize> = names.keys().map(|name| regions(name)).collect();
    let keys: Vec<Vec<MemoryKey>> = nics
        .iter()
        .map(|nic| (0..256).map(|page| nic.register(memory.range(page * 4096, 4096), page % 2 == 0).unwrap()).collect())
        .collect();
    for (name, before) in names.keys().zip(&before) {
        assert_eq!(regions(name), before + 256, "{name}");
    }
    for (nic, keys) in nics.iter().zip(&keys) {
        keys.iter().for_each(|key| nic.deregister(key).unwrap());
    }
    assert_eq!(names.keys().map(|name| regions(name)).collect::<Vec<_>>(), before);
    // What is not given back goes with the NIC.
    let nic = &nics[0];
    nic.register(memory.range(0, 4096), true).unwrap();
    drop(nics);
    assert_eq!(names.keys().map(|name| regions(name)).collect::<Vec<_>>(), before);
}

#[test]
#[ignore = "needs the lab"]
fn what_cannot_be_pinned_is_refused_and_says_why() {
    let name = devices("rxe").into_keys().next().unwrap();
    let nic = open(&name);
    // SAFETY: nothing is there, which is what the test is about.
    #[allow(unsafe_code)]
    let nothing = unsafe { MemoryRange::new(1 << 20, 8192) }.unwrap();
    let error = nic.register(nothing, true).unwrap_err();
    for part in ["0x100000", "8192 bytes", name.as_str(), "errno 14", "RLIMIT_MEMLOCK"] {
        assert!(error.message().contains(part), "{error}");
    }
    // Text of the program, which is mapped for reading only, can be read by peers.
    let text: &'static [u8; 16] = b"for reading only";
    // SAFETY: a constant of the program; the device does not write to it.
    #[allow(unsafe_code)]
    let constant = unsafe { MemoryRange::new(text.as_ptr() as u64, 16) }.unwrap();
    let key = nic.register(constant, true).unwrap();
    let memory = Memory::new(16);
    let local = nic.register(memory.range(0, 16), false).unwrap();
    let wire = Wire::new([&nic, &nic]);
    wire.pairs[0].post(&[request(Opcode::Read, memory.range(0, 16), &local, constant, &key)]).unwrap();
    assert_eq!(wire.wait("it"), (16, Outcome::Success));
    assert_eq!(&memory.0, text);
    wire.pairs[0].post(&[request(Opcode::Write, memory.range(0, 16), &local, constant, &key)]).unwrap();
    assert_eq!(wire.wait("it").1, Outcome::RemoteAccess);
}

#[test]
#[ignore = "needs the lab"]
fn bytes_move_between_two_devices_in_both_directions() {
    let names: Vec<String> = devices("rxe").into_keys().collect();
    let nics = [open(&names[0]), open(&names[1])];
    let wire = Wire::new([&nics[0], &nics[1]]);
    const MOST: usize = 4 << 20;
    let (mut ours, mut theirs) = (Memory::new(MOST), Memory::new(MOST));
    ours.0.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at % 251) as u8);
    let keys = [nics[0].register(ours.range(0, MOST), false).unwrap(), nics[1].register(theirs.range(0, MOST), true).unwrap()];
    for length in [1, 4095, 65536, MOST] {
        theirs.0[..length].fill(0);
        wire.pairs[0].post(&[request(Opcode::Write, ours.range(0, length), &keys[0], theirs.range(0, length), &keys[1])]).unwrap();
        assert_eq!(wire.wait(length), (length as u64, Outcome::Success));
        assert!(ours.0[..length] == theirs.0[..length], "write of {length} bytes");
        theirs.0[..length].iter_mut().for_each(|byte| *byte ^= 0xff);
        wire.pairs[0].post(&[request(Opcode::Read, ours.range(0, length), &keys[0], theirs.range(0, length), &keys[1])]).unwrap();
        assert_eq!(wire.wait(length), (length as u64, Outcome::Success));
        assert!(ours.0[..length] == theirs.0[..length], "read of {length} bytes");
    }
    // A key that was given back opens nothing any more.
    nics[1].deregister(&keys[1]).unwrap();
    wire.pairs[0].post(&[request(Opcode::Read, ours.range(0, 1), &keys[0], theirs.range(0, 1), &keys[1])]).unwrap();
    assert_eq!(wire.wait("it").1, Outcome::RemoteAccess);
}

/// A test of the lab: see its network interfaces' backlog in `scripts/rdma-lab`.
#[test]
#[ignore = "needs the lab"]
fn reads_that_succeed_under_load_have_brought_their_bytes() {
    const WIRES: usize = 8;
    const READS: usize = 32;
    const LENGTH: usize = 65536;
    let names: Vec<String> = devices("rxe").into_keys().collect();
    let nics = [open(&names[0]), open(&names[1])];
    let (mut ours, mut theirs) = (Memory::new(WIRES * READS * LENGTH), Memory::new(WIRES * READS * LENGTH));
    theirs.0.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at % 251) as u8);
    let everything = |memory: &Memory| memory.range(0, WIRES * READS * LENGTH);
    let keys = [nics[0].register(everything(&ours), false).unwrap(), nics[1].register(everything(&theirs), true).unwrap()];
    let mut succeeded = 0;
    for round in 0..10 {
        ours.0.fill(255);
        let wires: Vec<Wire> = (0..WIRES).map(|_| Wire::new([&nics[0], &nics[1]])).collect();
        for (place, wire) in wires.iter().enumerate() {
            let read = |turn: usize| {
                let at = (place * READS + turn) * LENGTH;
                let request = request(Opcode::Read, ours.range(at, LENGTH), &keys[0], theirs.range(at, LENGTH), &keys[1]);
                WorkRequest { id: at as u64, ..request }
            };
            wire.pairs[0].post(&(0..READS).map(read).collect::<Vec<_>>()).unwrap();
        }
        for wire in &wires {
            for _ in 0..READS {
                // Under such a load some may fail, but must say so.
                let (at, outcome) = wire.wait("a read");
                let slice = at as usize..at as usize + LENGTH;
                if outcome == Outcome::Success {
                    succeeded += 1;
                    assert!(ours.0[slice.clone()] == theirs.0[slice], "round {round}: a read at {at} succeeded without its bytes");
                }
            }
        }
    }
    assert!(succeeded > 0);
}

#[test]
#[ignore = "needs the lab"]
fn a_completion_wakes_a_sleeper() {
    let name = devices("rxe").into_keys().next().unwrap();
    let nic = open(&name);
    let channel = CompletionChannel::new(nic.context()).unwrap();
    let queue = nic.make_completion_queue(Some(&channel)).unwrap();
    let pair = nic.make_queue_pair(&queue).unwrap();
    let address = nic.address();
    nic.connect(&pair, &PeerQueuePair { number: pair.number(), gid: address.gid, lid: address.lid }).unwrap();
    let memory = Memory::new(4096);
    let key = nic.register(memory.range(0, 4096), true).unwrap();
    assert_eq!(channel.take_events().unwrap(), 0);
    queue.request_notification().unwrap();
    pair.post(&[request(Opcode::Write, memory.range(0, 100), &key, memory.range(1000, 100), &key)]).unwrap();
    let until = Instant::now() + Duration::from_secs(30);
    while channel.take_events().unwrap() == 0 {
        assert!(Instant::now() < until, "no event");
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut outcomes = Vec::new();
    queue.poll(2, |completion| outcomes.push(completion.outcome)).unwrap();
    assert_eq!(outcomes, [Outcome::Success]);
}

#[test]
#[ignore = "needs the lab"]
fn a_link_that_goes_and_comes_is_told() {
    let names: Vec<String> = devices("rxe").into_keys().collect();
    let nic = open(&names[1]);
    let wait_for = |expected: AsyncEvent| {
        let until = Instant::now() + Duration::from_secs(30);
        while nic.context().next_event().unwrap() != Some(expected) {
            assert!(Instant::now() < until, "no {expected:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let interface = Interface::of(&names[1]);
    interface.take_down();
    wait_for(AsyncEvent::PortError(1));
    assert!(nic.refresh_address(&Machine::default()).unwrap_err().message().contains("is not active"));
    assert!(!Topology::discover(&Machine::default(), &[]).nics().contains(&names[1].as_str()));
    interface.bring_up();
    wait_for(AsyncEvent::PortActive(1));
    nic.refresh_address(&Machine::default()).unwrap();
    assert!(Topology::discover(&Machine::default(), &[]).nics().contains(&names[1].as_str()));
}

/// An engine that uses NICs of these names, all alike.
fn engine(nics: &[&str]) -> Arc<Engine> {
    engine_with(nics, Config::default())
}

fn engine_with(nics: &[&str], config: Config) -> Arc<Engine> {
    let host = devices("rxe")[nics[0]].clone();
    let options = EngineOptions { metadata: PEER_TO_PEER.into(), server_name: host, ..EngineOptions::default() };
    let engine = Engine::create(&options, config).unwrap();
    let names: Vec<String> = nics.iter().map(|name| format!("\"{name}\"")).collect();
    engine.install_transport("rdma", Some(&format!(r#"{{"cpu:0":[[{}],[]]}}"#, names.join(",")))).unwrap();
    engine
}

fn memory_options() -> MemoryOptions {
    MemoryOptions { location: "cpu:0".into(), remote_accessible: true, counted: false, parallelism: None, publish: true }
}

fn register(engine: &Engine, memory: &Memory) {
    engine.register(memory.range(0, memory.0.len()), &memory_options()).unwrap();
}

fn submit(engine: &Engine, opcode: Opcode, local: &Memory, segment: u64, remote: &Memory) -> Arc<Batch> {
    let batch = engine.allocate_batch(1).unwrap();
    let (local, remote_address) = (local.range(0, local.0.len()), remote.range(0, 1).address());
    engine
        .submit(
            &batch,
            &[Request { opcode, local, segment, remote_address, hints: Hints::default() }],
            None,
            SubmitOptions::default(),
        )
        .unwrap();
    batch
}

/// Moves that many bytes from one beginning to the other.
fn transfer(engine: &Engine, opcode: Opcode, local: &Memory, segment: u64, remote: &Memory, length: usize) -> State {
    let (local, remote_address) = (local.range(0, length), remote.range(0, length).address());
    let statuses = engine
        .transfer(&[Request { opcode, local, segment, remote_address, hints: Hints::default() }], SubmitOptions::default())
        .unwrap();
    if let Some(error) = &statuses[0].error {
        eprintln!("{error}");
    }
    statuses[0].state
}

fn fill(memory: &mut Memory, length: usize, seed: usize) {
    memory.0[..length].iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 3 + at % 251 + seed) as u8);
}

#[test]
#[ignore = "needs the lab"]
fn engines_move_bytes_over_one_nic_and_over_two() {
    let names: Vec<String> = devices("rxe").into_keys().collect();
    let (first, second) = (names[0].as_str(), names[1].as_str());
    for (nics, sizes) in [(1, &[1, 65_537, 1 << 20, 64 << 20][..]), (2, &[1, 65_537, 16 << 20])] {
        let before = [first, second].map(regions);
        let both = [first, second];
        let (near, far) = (engine(&both[..nics]), engine(&both[2 - nics..]));
        let most = *sizes.last().unwrap();
        let (mut ours, mut theirs) = (Memory::new(most), Memory::new(most));
        register(&near, &ours);
        register(&far, &theirs);
        let segment = near.open_segment(&far.name()).unwrap();
        for (seed, size) in sizes.iter().enumerate() {
            fill(&mut ours, *size, seed);
            assert_eq!(transfer(&near, Opcode::Write, &ours, segment, &theirs, *size), State::Completed, "write of {size}");
            assert!(ours.0[..*size] == theirs.0[..*size], "write of {size} over {nics}");
            fill(&mut theirs, *size, seed + 100);
            assert_eq!(transfer(&near, Opcode::Read, &ours, segment, &theirs, *size), State::Completed, "read of {size}");
            assert!(ours.0[..*size] == theirs.0[..*size], "read of {size} over {nics}");
        }
        assert!(near.nic_loads().iter().all(|load| load.bytes_per_second > 0.0 && load.bytes_in_flight == 0));
        near.unregister(ours.range(0, 1).address()).unwrap();
        drop((near, far));
        assert_eq!([first, second].map(regions), before);
    }
}

#[test]
#[ignore = "needs the lab"]
fn a_link_that_goes_down_in_mid_transfer_is_left_for_the_other_and_taken_again() {
    let names: Vec<String> = devices("rxe").into_keys().collect();
    let both = [names[0].as_str(), names[1].as_str()];
    let (near, far) = (engine(&both), engine(&both));
    let length = 32 << 20;
    let (mut ours, theirs) = (Memory::new(length), Memory::new(length));
    register(&near, &ours);
    register(&far, &theirs);
    let segment = near.open_segment(&far.name()).unwrap();
    assert_eq!(transfer(&near, Opcode::Write, &ours, segment, &theirs, 1 << 20), State::Completed);
    fill(&mut ours, length, 7);
    let interface = Interface::of(both[1]);
    let batch = submit(&near, Opcode::Write, &ours, segment, &theirs);
    interface.take_down();
    assert!(batch.wait(Some(Duration::from_secs(60))));
    assert_eq!(batch.status().state, State::Completed, "{:?}", batch.task_status(0));
    assert!(ours.0 == theirs.0);
    interface.bring_up();
    // Both links are in use again: they share what is long.
    let until = Instant::now() + Duration::from_secs(60);
    let is_used = |engine: &Engine| engine.show_links(true).matches("rdma_transport").count() == 2;
    while !(is_used(&near) && is_used(&far)) {
        assert!(Instant::now() < until, "the link is not used again: {}", near.show_links(true));
        std::thread::sleep(Duration::from_millis(10));
    }
    near.refresh_segment(segment).unwrap();
    fill(&mut ours, length, 8);
    assert_eq!(transfer(&near, Opcode::Write, &ours, segment, &theirs, length), State::Completed);
    assert!(ours.0 == theirs.0);
}

#[test]
#[ignore = "needs the lab"]
fn unregistering_amid_transfers_lets_nothing_through_afterwards() {
    let names: Vec<String> = devices("rxe").into_keys().collect();
    let (near, far) = (engine(&[&names[0]]), engine(&[&names[1]]));
    let (ours, mut theirs) = (Memory::new(8 << 20), Memory::new(8 << 20));
    register(&far, &theirs);
    let segment = near.open_segment(&far.name()).unwrap();
    fill(&mut theirs, 8 << 20, 1);
    for _ in 0..5 {
        register(&near, &ours);
        let batch = submit(&near, Opcode::Read, &ours, segment, &theirs);
        near.unregister(ours.range(0, 1).address()).unwrap();
        let seen = ours.0.clone();
        std::thread::sleep(Duration::from_millis(100));
        assert!(ours.0 == seen, "bytes moved after unregistering");
        assert!(batch.wait(Some(Duration::from_secs(10))));
    }
}

#[test]
#[ignore = "needs the lab"]
fn a_target_that_unregisters_amid_transfers_is_not_written_to_afterwards() {
    let names: Vec<String> = devices("rxe").into_keys().collect();
    let (near, far) = (engine(&[&names[0]]), engine(&[&names[1]]));
    let (mut ours, theirs) = (Memory::new(8 << 20), Memory::new(8 << 20));
    register(&near, &ours);
    let segment = near.open_segment(&far.name()).unwrap();
    let before = regions(&names[1]);
    for seed in 0..5 {
        fill(&mut ours, 8 << 20, seed);
        register(&far, &theirs);
        near.refresh_segment(segment).unwrap();
        let batch = submit(&near, Opcode::Write, &ours, segment, &theirs);
        far.unregister(theirs.range(0, 1).address()).unwrap();
        let seen = theirs.0.clone();
        assert_eq!(regions(&names[1]), before);
        std::thread::sleep(Duration::from_millis(100));
        assert!(theirs.0 == seen, "bytes moved after unregistering");
        assert!(batch.wait(Some(Duration::from_secs(60))));
        assert!(batch.status().state != State::Completed || ours.0 == seen, "called complete, and is not");
    }
}

#[test]
#[ignore = "needs the lab"]
fn two_nics_carry_about_half_of_the_bytes_each() {
    let names: Vec<String> = devices("rxe").into_keys().collect();
    assert!(names.len() >= 4, "needs four devices: {names:?}");
    let (near_nics, far_nics) = ([names[0].as_str(), &names[1]], [names[2].as_str(), &names[3]]);
    let (near, far) = (engine(&near_nics), engine(&far_nics));
    let (mut ours, mut theirs) = (Memory::new(16 << 20), Memory::new(16 << 20));
    register(&near, &ours);
    register(&far, &theirs);
    let segment = near.open_segment(&far.name()).unwrap();
    // One long request, and many short ones.
    for length in [16 << 20, 64 << 10] {
        for (opcode, receivers) in [(Opcode::Write, far_nics), (Opcode::Read, near_nics)] {
            let before = receivers.map(packets_received);
            for seed in 0..(16 << 20) / length {
                fill(if opcode == Opcode::Write { &mut ours } else { &mut theirs }, length, seed);
                assert_eq!(transfer(&near, opcode, &ours, segment, &theirs, length), State::Completed);
                assert!(ours.0[..length] == theirs.0[..length]);
            }
            let after = receivers.map(packets_received);
            let carried = [0, 1].map(|nic| (after[nic] - before[nic]) as f64);
            let share = carried[0] / (carried[0] + carried[1]);
            assert!((0.4..=0.6).contains(&share), "{opcode:?} of {length}: {carried:?} packets");
        }
    }
}

#[test]
#[ignore = "needs the lab"]
fn an_engine_leaves_nothing_on_any_of_four_devices() {
    let names: Vec<String> = devices("rxe").into_keys().take(4).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    assert_eq!(names.len(), 4);
    let count = || names.iter().map(|name| regions(name)).collect::<Vec<_>>();
    let before = count();
    let more = |by: usize| before.iter().map(|count| count + by).collect::<Vec<_>>();
    let engine = engine(&names);
    let memory = Memory::new(64 << 12);
    let ranges: Vec<MemoryRange> = (0..64).map(|page| memory.range(page << 12, 1 << 12)).collect();
    engine.register_batch(&ranges, &memory_options()).unwrap();
    assert_eq!(count(), more(64));
    engine.unregister(ranges[0].address()).unwrap();
    assert_eq!(count(), more(63));
    // One that cannot be pinned fails the batch, on all devices.
    // SAFETY: nothing is there, which is what the test is about.
    #[allow(unsafe_code)]
    let nothing = unsafe { MemoryRange::new(1 << 20, 8192) }.unwrap();
    let error = engine.register_batch(&[ranges[0], nothing], &memory_options()).unwrap_err();
    assert!(error.message().contains("0x100000") && error.message().contains("errno 14"), "{error}");
    assert_eq!(count(), more(63));
    engine.unregister_batch(&ranges[1..].iter().map(MemoryRange::address).collect::<Vec<_>>()).unwrap();
    assert_eq!(count(), before);
    engine.register(ranges[0], &memory_options()).unwrap();
    drop(engine);
    assert_eq!(count(), before);
}

/// Runs in a process of its own that has no right to lock more memory than 1 MiB.
#[test]
#[ignore = "needs the lab"]
fn memory_beyond_the_limit_on_locked_memory_is_refused_and_nothing_is_left() {
    const CHILD: &str = "TE_TEST_IS_LIMITED";
    if std::env::var_os(CHILD).is_none() {
        let mut child = Command::new("prlimit");
        child.args(["--memlock=1048576:1048576", "setpriv", "--bounding-set=-ipc_lock"]).arg(std::env::current_exe().unwrap());
        let name = "memory_beyond_the_limit_on_locked_memory_is_refused_and_nothing_is_left";
        let output = child.args(["--ignored", "--exact", name, "--nocapture"]).env(CHILD, "1").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{output:?}");
        return;
    }
    let names: Vec<String> = devices("rxe").into_keys().collect();
    let both = [names[0].as_str(), names[1].as_str()];
    let before = both.map(regions);
    let engine = engine(&both);
    let memory = Memory::new(4 << 20);
    // Too much for one device; and for the second, after the first has pinned it.
    for length in [2 << 20, 768 << 10] {
        let error = engine.register(memory.range(0, length), &memory_options()).unwrap_err();
        assert_eq!(error.code(), Code::Limit);
        let requested = format!("cannot register {length} bytes");
        for part in [requested.as_str(), "RLIMIT_MEMLOCK is 1048576", "errno 12", "ulimit -l"] {
            assert!(error.message().contains(part), "{error}");
        }
        assert_eq!(both.map(regions), before);
        assert!(engine.find_region(memory.range(0, 1).address()).is_none());
    }
    // Nothing that was pinned in vain counts any more.
    engine.register(memory.range(0, 384 << 10), &memory_options()).unwrap();
    assert_eq!(both.map(regions), before.map(|count| count + 1));
}

#[test]
#[ignore = "needs the lab"]
fn transfers_cross_the_borders_of_chunks() {
    let names: Vec<String> = devices("rxe").into_keys().collect();
    let both = [names[0].as_str(), names[1].as_str()];
    let before = both.map(regions);
    let chunks_of = |bytes: u64| Config { max_mr_size: bytes, ..Config::default() };
    let (near, far) = (engine_with(&both[..1], chunks_of(1 << 20)), engine_with(&both[1..], chunks_of(3 << 19)));
    const LENGTH: usize = 4 << 20;
    // Chunks end between pages: ranges begin with one.
    let mut memories = [Memory::new(LENGTH + 4096), Memory::new(LENGTH + 4096)];
    let offsets = [0, 1].map(|side: usize| memories[side].0.as_ptr().align_offset(4096));
    let range =
        |memories: &[Memory; 2], side: usize, from: usize, length: usize| memories[side].range(offsets[side] + from, length);
    near.register(range(&memories, 0, 0, LENGTH), &memory_options()).unwrap();
    far.register(range(&memories, 1, 0, LENGTH), &memory_options()).unwrap();
    assert_eq!(both.map(regions), [before[0] + 4, before[1] + 3]);
    let segment = near.open_segment(&far.name()).unwrap();
    for (from, length) in [(0, LENGTH), ((1 << 20) - 1, 2), ((3 << 19) - 1, 2), ((1 << 20) + 7, LENGTH / 2)] {
        for opcode in [Opcode::Write, Opcode::Read] {
            let source = if opcode == Opcode::Write { 0 } else { 1 };
            memories[1 - source].0.fill(0);
            fill(&mut memories[source], LENGTH + 4096, from + length);
            let (local, remote_address) = (range(&memories, 0, from, length), range(&memories, 1, from, length).address());
            let status = near
                .transfer(&[Request { opcode, local, segment, remote_address, hints: Hints::default() }], SubmitOptions::default())
                .unwrap();
            assert_eq!(status[0].state, State::Completed, "{opcode:?} of {length} from {from}: {:?}", status[0].error);
            let bytes = |side: usize| &memories[side].0[offsets[side] + from..][..length];
            assert!(bytes(0) == bytes(1), "{opcode:?} of {length} from {from}");
            assert_eq!(
                memories[1 - source].0.iter().filter(|byte| **byte != 0).count(),
                bytes(source).iter().filter(|byte| **byte != 0).count()
            );
        }
    }
    near.unregister(range(&memories, 0, 0, 1).address()).unwrap();
    far.unregister(range(&memories, 1, 0, 1).address()).unwrap();
    assert_eq!(both.map(regions), before);
}

#[test]
#[ignore = "needs the lab"]
fn memory_that_was_registered_while_a_link_was_down_is_reached_over_it_afterwards() {
    let names: Vec<String> = devices("rxe").into_keys().collect();
    assert!(names.len() >= 4, "needs four devices: {names:?}");
    let (near, far) = (engine(&[&names[0], &names[1]]), engine(&[&names[2], &names[3]]));
    let before = regions(&names[3]);
    let length = 16 << 20;
    let (mut ours, theirs) = (Memory::new(length), Memory::new(length));
    register(&near, &ours);
    let segment = near.open_segment(&far.name()).unwrap();
    let uses = |count: usize| {
        let until = Instant::now() + Duration::from_secs(60);
        while far.show_links(true).matches("rdma_transport").count() != count {
            assert!(Instant::now() < until, "{}", far.show_links(true));
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    let interface = Interface::of(&names[3]);
    interface.take_down();
    uses(1);
    register(&far, &theirs);
    assert_eq!(regions(&names[3]), before);
    near.refresh_segment(segment).unwrap();
    fill(&mut ours, length, 1);
    assert_eq!(transfer(&near, Opcode::Write, &ours, segment, &theirs, length), State::Completed);
    assert!(ours.0 == theirs.0);
    interface.bring_up();
    uses(2);
    let until = Instant::now() + Duration::from_secs(60);
    while regions(&names[3]) != before + 1 {
        assert!(Instant::now() < until, "the memory is not registered with the NIC that is back");
        std::thread::sleep(Duration::from_millis(10));
    }
    // Peers that look get its key, and use it.
    near.refresh_segment(segment).unwrap();
    let received = packets_received(&names[3]);
    fill(&mut ours, length, 2);
    assert_eq!(transfer(&near, Opcode::Write, &ours, segment, &theirs, length), State::Completed);
    assert!(ours.0 == theirs.0);
    assert!(packets_received(&names[3]) - received > 1000, "the NIC that is back is not used");
}
