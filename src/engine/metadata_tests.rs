//! Engines that find each other by a metadata server, which does what a test says.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use parking_lot::{Condvar, MutexGuard};

use super::tests::{Memory, options, read, states, write};
use super::*;
use crate::metadata::BufferDescriptor;
use crate::telemetry::tests::hear;
use crate::transfer::State;

/// What becomes of a PUT of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Fate {
    Taken,
    Refused,
    /// Taken, but the answer is lost.
    Lost,
}

#[derive(Default)]
pub(super) struct Script {
    pub texts: HashMap<String, String>,
    pub fates: VecDeque<Fate>,
    is_down: bool,
    /// PUTs of descriptors wait.
    is_gated: bool,
    /// So do GETs.
    holds_gets: bool,
    at_gate: usize,
    descriptor_puts: usize,
    address_puts: usize,
    gets: usize,
    /// By when each call had to end, where it was one of several of an operation.
    ends: Vec<Option<Instant>>,
}

#[derive(Default)]
pub(super) struct ScriptedStore {
    script: Mutex<Script>,
    changed: Condvar,
}

fn refusal() -> Error {
    Error::quiet(Code::Metadata, "the test says so")
}

impl Store for ScriptedStore {
    fn get(&self, key: &str) -> Result<Option<String>> {
        let mut script = self.script.lock();
        script.gets += 1;
        script.ends.push(store::operation_end());
        script.at_gate += 1;
        self.changed.notify_all();
        self.changed.wait_while(&mut script, |script| script.holds_gets);
        script.at_gate -= 1;
        if script.is_down { Err(refusal()) } else { Ok(script.texts.get(key).cloned()) }
    }

    fn put(&self, key: &str, text: &[Arc<str>]) -> Result<()> {
        let mut script = self.script.lock();
        script.ends.push(store::operation_end());
        let mut fate = Fate::Taken;
        if key.contains("rpc_meta/") {
            script.address_puts += 1;
        } else {
            script.descriptor_puts += 1;
            script.at_gate += 1;
            self.changed.notify_all();
            self.changed.wait_while(&mut script, |script| script.is_gated);
            script.at_gate -= 1;
            fate = script.fates.pop_front().unwrap_or(Fate::Taken);
        }
        if script.is_down {
            return Err(refusal());
        }
        if fate != Fate::Refused {
            script.texts.insert(key.into(), text.concat());
        }
        if fate == Fate::Taken { Ok(()) } else { Err(refusal()) }
    }

    fn remove(&self, key: &str) -> Result<()> {
        let mut script = self.script.lock();
        if script.is_down {
            return Err(refusal());
        }
        script.texts.remove(key);
        Ok(())
    }
}

impl ScriptedStore {
    pub fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock()
    }

    fn keys(&self) -> Vec<String> {
        let mut keys: Vec<_> = self.script().texts.keys().cloned().collect();
        keys.sort();
        keys
    }

    fn set_gated(&self, is_gated: bool) {
        self.script().is_gated = is_gated;
        self.changed.notify_all();
    }

    /// Returns when a call waits.
    fn await_call(&self) {
        self.changed.wait_while(&mut self.script(), |script| script.at_gate == 0);
    }

    pub fn descriptor(&self, name: &str) -> SegmentDescriptor {
        let text = self.script().texts[&format!("mooncake/ram/{name}")].clone();
        SegmentDescriptor::decode(text.as_bytes(), &"the test").unwrap()
    }

    /// First bytes of what peers are told of.
    fn addresses(&self, name: &str) -> Vec<u64> {
        self.descriptor(name).buffers.iter().map(|buffer: &BufferDescriptor| buffer.address).collect()
    }
}

fn config() -> Config {
    Config { tcp_bind_address: Some("127.0.0.1".into()), ..Config::default() }
}

/// The server is looked at when the test says so.
pub(super) fn create_with(store: &Arc<ScriptedStore>, name: &str, config: Config) -> Result<Arc<Engine>> {
    let options = EngineOptions { metadata: "the test's".into(), server_name: name.into(), ..EngineOptions::default() };
    Engine::create_with(&options, config, Some(store.clone()), Duration::from_secs(3600))
}

fn create(store: &Arc<ScriptedStore>, name: &str) -> Arc<Engine> {
    let engine = create_with(store, name, config()).unwrap();
    engine.install_transport("tcp", None).unwrap();
    engine
}

fn check(engine: &Engine) {
    engine.presence.as_ref().unwrap().check(&engine.fetcher.client);
}

fn later() -> MemoryOptions {
    MemoryOptions { publish: false, ..options() }
}

#[test]
fn keys_come_with_the_engine_and_go_with_it_and_each_change_is_one_put() {
    let store = Arc::new(ScriptedStore::default());
    let memory = Memory::new(8192);
    let engine = create_with(&store, "node A:x", config()).unwrap();
    assert_eq!((engine.name(), store.keys()), ("node A:x".into(), vec!["mooncake/rpc_meta/node A:x".into()]));
    let port = engine.address().strip_prefix("127.0.0.1:").unwrap().to_string();
    let location = format!("{{\"ip_or_host_name\":\"127.0.0.1\",\"rpc_port\":{port}}}\n");
    assert_eq!(store.script().texts["mooncake/rpc_meta/node A:x"], location);
    engine.register(memory.range(0, 16), &options()).unwrap();
    assert_eq!(store.script().descriptor_puts, 0, "nothing can be reached without a transport");

    engine.install_transport("tcp", None).unwrap();
    let descriptor = store.descriptor("node A:x");
    assert_eq!((descriptor.name.as_str(), descriptor.tcp_data_host.as_str()), ("node A:x", "127.0.0.1"));
    assert_ne!(descriptor.tcp_data_port, 0);
    assert_eq!(store.addresses("node A:x"), [memory.address()]);
    let puts = |expected: usize, what: &str| {
        assert_eq!(std::mem::take(&mut store.script().descriptor_puts), expected, "{what}");
    };
    puts(1, "install");
    engine.register(memory.range(16, 16), &options()).unwrap();
    puts(1, "register");
    engine.register_batch(&[memory.range(32, 16), memory.range(64, 16)], &options()).unwrap();
    puts(1, "register a batch");
    engine.register_batch(&[], &options()).unwrap();
    assert!(engine.unregister(1).is_err());
    puts(0, "nothing changes");
    assert_eq!(store.addresses("node A:x"), [0, 16, 32, 64].map(|offset| memory.address() + offset));
    engine.unregister(memory.address()).unwrap();
    puts(1, "unregister");
    assert!(engine.unregister_batch(&[memory.address() + 32, 1, memory.address() + 16]).is_err());
    puts(1, "unregister a batch");
    assert_eq!(store.addresses("node A:x"), [memory.address() + 64]);
    let counted = MemoryOptions { counted: true, ..options() };
    engine.register(memory.range(1024, 16), &counted).unwrap();
    engine.register(memory.range(1024, 16), &counted).unwrap();
    engine.unregister(memory.address() + 1024).unwrap();
    puts(1, "further references change nothing that peers see");
    engine.unregister(memory.address() + 1024).unwrap();
    puts(1, "the last reference");

    engine.shutdown();
    assert!(store.keys().is_empty());
    assert_eq!(store.script().address_puts, 1);
}

#[test]
fn engines_open_each_other_by_name_and_reach_each_other() {
    let store = Arc::new(ScriptedStore::default());
    let (target, initiator) = (create(&store, "target"), create(&store, "the/initiator"));
    assert!(store.keys().contains(&"mooncake/the/initiator".to_string()));
    let (theirs, ours) = (Memory(vec![0; 4096]), Memory::new(4096));
    target.register(theirs.range(0, 4096), &options()).unwrap();
    assert_eq!(initiator.open_segment("/the/initiator").unwrap(), LOCAL_SEGMENT);
    assert_eq!(initiator.open_segment("nobody").unwrap_err().code(), Code::Metadata);
    let segment = initiator.open_segment("//target").unwrap();
    assert_eq!(initiator.open_segment("target").unwrap(), segment);
    let statuses = initiator.transfer(&[write(ours.range(0, 4096), segment, theirs.address())], Default::default()).unwrap();
    assert_eq!(states(&statuses), [State::Completed]);
    assert_eq!(theirs.0, ours.0);
    let into = Memory(vec![0; 100]);
    let statuses = initiator.transfer(&[read(into.range(0, 100), segment, theirs.address())], Default::default()).unwrap();
    assert_eq!(states(&statuses), [State::Completed]);

    let message = Notification { name: "a".into(), message: "b".into() };
    let gets = store.script().gets;
    initiator.send_notification(segment, &message).unwrap();
    initiator.send_notification_to("target", &message).unwrap();
    initiator.probe(segment).unwrap();
    assert_eq!(store.script().gets, gets + 1, "where the peer is, is looked up once");
    assert_eq!(target.take_notifications().len(), 2);
    initiator.send_notification_to("the/initiator", &message).unwrap();
    assert_eq!(initiator.take_notifications().len(), 1);
    assert_eq!(initiator.send_notification_to("nobody", &message).unwrap_err().code(), Code::Metadata);
    // Before its memory goes.
    target.unregister(theirs.address()).unwrap();
}

#[test]
fn a_peer_that_restarts_under_its_name_is_found_by_transfers_notifications_and_probes() {
    let store = Arc::new(ScriptedStore::default());
    let initiator = create(&store, "initiator");
    let (theirs, ours) = (Memory(vec![0; 4096]), Memory::new(4096));
    let message = Notification { name: "a".into(), message: "b".into() };
    let mut segment = None;
    for round in 0..3 {
        let target = create(&store, "target");
        target.register(theirs.range(0, 4096), &options()).unwrap();
        let first = segment.is_none();
        let segment = *segment.get_or_insert_with(|| initiator.open_segment("target").unwrap());
        if round == 1 || first {
            initiator.probe(segment).unwrap();
            initiator.send_notification_to("target", &message).unwrap();
            initiator.send_notification(segment, &message).unwrap();
            assert_eq!(target.take_notifications().len(), 2);
        }
        let request = [write(ours.range(0, 100 + round), segment, theirs.address())];
        let statuses = initiator.transfer(&request, Default::default()).unwrap();
        assert_eq!(states(&statuses), [State::Completed], "round {round}: {:?}", statuses[0].error);
        assert_eq!(theirs.0[..100 + round], ours.0[..100 + round]);
        target.shutdown();
    }
    let segment = segment.unwrap();
    assert!(initiator.probe(segment).is_err());
    assert_eq!(initiator.refresh_all_segments().unwrap(), 1, "it has vanished");
    assert_eq!(initiator.open_segment("target").unwrap(), segment, "what was known is kept");
    assert_eq!(initiator.open_segment_fresh("target").unwrap(), segment);
    initiator.forget_segment("target").unwrap();
    assert_eq!(initiator.open_segment("target").unwrap_err().code(), Code::Metadata);
}

#[test]
fn what_a_crashed_predecessor_left_is_replaced_and_its_memory_is_not_adopted() {
    let store = Arc::new(ScriptedStore::default());
    let memory = Memory::new(4096);
    let first = create(&store, "node");
    first.register(memory.range(0, 4096), &options()).unwrap();
    let left = store.script().texts.clone();
    first.shutdown();
    store.script().texts = left.clone();
    let second = create(&store, "node");
    assert!(store.addresses("node").is_empty());
    assert_ne!(store.script().texts["mooncake/rpc_meta/node"], left["mooncake/rpc_meta/node"]);
    second.shutdown();
    assert!(store.keys().is_empty());
}

#[test]
fn names_and_places_are_as_the_environment_says() {
    let store = Arc::new(ScriptedStore::default());
    let nameless = create_with(&store, "", config()).unwrap();
    assert_eq!(nameless.name(), nameless.address());
    let legacy = Config { legacy_rpc_port_binding: true, metadata_cluster_id: "c".into(), ..Config::default() };
    let engine = create_with(&store, "127.0.0.1:0", legacy.clone()).unwrap();
    assert!(engine.address().starts_with("127.0.0.1:") && engine.name() == "127.0.0.1:0");
    assert!(store.keys().contains(&"mooncake/c/rpc_meta/127.0.0.1:0".to_string()));
    assert_eq!(create_with(&store, ":7", legacy).err().unwrap().code(), Code::InvalidArgument);
    store.script().is_down = true;
    assert_eq!(create_with(&store, "node", config()).err().unwrap().code(), Code::Metadata);
}

/// Whether the server took what it gave no answer to makes no difference.
#[test]
fn a_registration_that_cannot_be_published_is_undone_whichever_it_is() {
    for fate in [Fate::Refused, Fate::Lost] {
        for failing in 0..4 {
            let store = Arc::new(ScriptedStore::default());
            let memory = Memory::new(4096);
            let engine = create(&store, "node");
            store.script().fates = (0..4).map(|at| if at == failing { fate } else { Fate::Taken }).collect();
            for at in 0..4 {
                let ranges = [memory.range(at * 64, 16), memory.range(at * 64 + 32, 16)];
                let outcome =
                    if at % 2 == 0 { engine.register(ranges[0], &options()) } else { engine.register_batch(&ranges, &options()) };
                assert_eq!(outcome.map_err(|error| error.code()), if at == failing { Err(Code::Metadata) } else { Ok(()) });
            }
            let count = if failing % 2 == 0 { 5 } else { 4 };
            assert_eq!((engine.region_count(), engine.regions().len()), (count, count));
            check(&engine);
            let present = engine.regions().iter().map(|region| region.address).collect::<Vec<_>>();
            assert_eq!(store.addresses("node"), present, "{fate:?} {failing}");
            // The range is free.
            engine.register(memory.range(failing * 64, 16), &options()).unwrap();
        }
    }
}

#[test]
fn what_a_lost_answer_left_on_the_server_is_corrected() {
    let store = Arc::new(ScriptedStore::default());
    let memory = Memory::new(4096);
    let engine = create(&store, "node");
    store.script().fates = [Fate::Lost].into();
    engine.register(memory.range(0, 16), &options()).unwrap_err();
    assert_eq!(store.addresses("node"), [memory.address()]);
    check(&engine);
    assert!(store.addresses("node").is_empty());
    let puts = store.script().descriptor_puts;
    check(&engine);
    assert_eq!(store.script().descriptor_puts, puts, "once is enough");
}

/// What a slow server does to a write that was given up.
#[test]
fn a_write_that_lands_after_a_later_one_is_corrected() {
    let store = Arc::new(ScriptedStore::default());
    let memory = Memory::new(4096);
    let engine = create(&store, "node");
    store.script().fates = [Fate::Lost].into();
    engine.register(memory.range(0, 16), &options()).unwrap_err();
    let late = store.script().texts["mooncake/ram/node"].clone();
    engine.register(memory.range(64, 16), &options()).unwrap();
    check(&engine);
    store.script().texts.insert("mooncake/ram/node".into(), late);
    check(&engine);
    assert_eq!(store.addresses("node"), [memory.address() + 64]);
}

#[test]
fn sixteen_registrations_at_a_time_are_two_puts_and_fail_together() {
    for fate in [Fate::Taken, Fate::Refused] {
        let store = Arc::new(ScriptedStore::default());
        let memory = Memory::new(4096);
        let engine = create(&store, "node");
        store.set_gated(true);
        store.script().descriptor_puts = 0;
        store.script().fates = [Fate::Taken, fate].into();
        std::thread::scope(|scope| {
            let register = |at: usize| engine.register(memory.range(at * 64, 16), &options()).map_err(|error| error.code());
            let first = scope.spawn(move || register(0));
            store.await_call();
            let others: Vec<_> = (1..16).map(|at| scope.spawn(move || register(at))).collect();
            while engine.presence.as_ref().unwrap().waiting() < 15 {
                std::thread::yield_now();
            }
            store.set_gated(false);
            assert_eq!(first.join().unwrap(), Ok(()));
            let expected = if fate == Fate::Taken { Ok(()) } else { Err(Code::Metadata) };
            others.into_iter().for_each(|other| assert_eq!(other.join().unwrap(), expected));
        });
        assert_eq!(store.script().descriptor_puts, 2);
        let left = if fate == Fate::Taken { 16 } else { 1 };
        assert_eq!((engine.region_count(), store.addresses("node").len()), (left, left));
        check(&engine);
        assert_eq!(store.addresses("node").len(), left);
    }
}

#[test]
fn whatever_has_been_registered_is_seen_by_who_looks_afterwards() {
    let store = Arc::new(ScriptedStore::default());
    let memory = Memory::new(1 << 20);
    let engine = create(&store, "node");
    std::thread::scope(|scope| {
        for thread in 0..16 {
            let (store, engine, memory) = (&store, &engine, &memory);
            scope.spawn(move || {
                for round in 0..20 {
                    let range = memory.range((thread * 20 + round) * 64, 16);
                    engine.register(range, &options()).unwrap();
                    assert!(store.addresses("node").contains(&range.address()));
                    if round % 2 == 0 {
                        engine.unregister(range.address()).unwrap();
                        assert!(!store.addresses("node").contains(&range.address()));
                    }
                }
            });
        }
    });
    assert_eq!(store.addresses("node").len(), 160);
}

/// The registration that fails is undone, and not the one that has taken its place meanwhile.
#[test]
fn undoing_does_not_hit_another_registration_of_the_same_range() {
    let store = Arc::new(ScriptedStore::default());
    let memory = Memory::new(4096);
    let engine = create(&store, "node");
    store.set_gated(true);
    store.script().fates = [Fate::Refused].into();
    let range = memory.range(0, 16);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| engine.register(range, &options()));
        store.await_call();
        let others = scope.spawn(|| {
            engine.unregister(range.address())?;
            engine.register(range, &options())
        });
        while engine.presence.as_ref().unwrap().waiting() < 1 {
            std::thread::yield_now();
        }
        // Its region is gone; the next of this range comes when this is published.
        let between = scope.spawn(|| engine.register(range, &options()));
        while engine.presence.as_ref().unwrap().waiting() < 2 {
            std::thread::yield_now();
        }
        store.set_gated(false);
        assert_eq!(first.join().unwrap().unwrap_err().code(), Code::Metadata);
        between.join().unwrap().unwrap();
        assert_eq!(others.join().unwrap().unwrap_err().code(), Code::AddressOverlapped);
    });
    assert_eq!((engine.region_count(), store.addresses("node")), (1, vec![range.address()]));
}

#[test]
fn counted_references_are_undone_one_by_one() {
    let store = Arc::new(ScriptedStore::default());
    let memory = Memory::new(4096);
    let engine = create(&store, "node");
    let counted = MemoryOptions { counted: true, ..options() };
    engine.register(memory.range(0, 16), &counted).unwrap();
    store.script().fates = [Fate::Refused].into();
    let ranges = [memory.range(0, 16), memory.range(64, 16)];
    engine.register_batch(&ranges, &counted).unwrap_err();
    assert_eq!(engine.regions().len(), 1);
    engine.unregister(memory.address()).unwrap();
    assert_eq!((engine.region_count(), store.addresses("node").len()), (0, 0));
}

#[test]
fn what_is_to_be_published_later_comes_with_the_next_change_and_survives_its_failure() {
    let store = Arc::new(ScriptedStore::default());
    let memory = Memory::new(4096);
    let engine = create(&store, "node");
    engine.register(memory.range(0, 16), &later()).unwrap();
    engine.register_batch(&[memory.range(32, 16)], &later()).unwrap();
    check(&engine);
    assert!(store.addresses("node").is_empty());
    store.script().fates = [Fate::Refused].into();
    engine.register(memory.range(64, 16), &options()).unwrap_err();
    assert_eq!(engine.regions().len(), 2);
    engine.register(memory.range(64, 16), &options()).unwrap();
    assert_eq!(store.addresses("node"), [0, 32, 64].map(|offset| memory.address() + offset));
}

#[test]
fn an_unregistration_that_cannot_be_published_stays_done_and_is_published_later() {
    for batch in [false, true] {
        let store = Arc::new(ScriptedStore::default());
        let memory = Memory::new(4096);
        let engine = create(&store, "node");
        engine.register(memory.range(0, 16), &options()).unwrap();
        store.script().is_down = true;
        let outcome = if batch { engine.unregister_batch(&[memory.address()]) } else { engine.unregister(memory.address()) };
        assert_eq!(outcome.unwrap_err().code(), Code::Metadata);
        assert_eq!(engine.region_count(), 0);
        check(&engine);
        store.script().is_down = false;
        assert_eq!(store.addresses("node"), [memory.address()]);
        check(&engine);
        assert!(store.addresses("node").is_empty());
    }
}

#[test]
fn publishing_is_part_of_what_a_registration_costs() {
    let store = Arc::new(ScriptedStore::default());
    let memory = Memory::new(4096);
    let engine = create(&store, "node");
    engine.register(memory.range(0, 16), &options()).unwrap();
    let cost = engine.registration_cost(memory.address()).unwrap().cost;
    assert!(!cost.publishing.is_zero() && cost.total == cost.publishing);
    assert_eq!(engine.counters().registration_publishing_ns.get(), cost.publishing.as_nanos() as u64);
    engine.register(memory.range(64, 16), &later()).unwrap();
    assert!(engine.registration_cost(memory.address() + 64).is_none());
}

#[test]
fn a_server_that_was_wiped_or_away_gets_everything_again() {
    let store = Arc::new(ScriptedStore::default());
    let memory = Memory::new(4096);
    let engine = create(&store, "node");
    engine.register(memory.range(0, 16), &options()).unwrap();
    let before = store.keys();
    store.script().texts.clear();
    check(&engine);
    assert_eq!((store.keys(), store.addresses("node")), (before.clone(), vec![memory.address()]));

    store.script().is_down = true;
    for _ in 0..3 {
        check(&engine);
    }
    store.script().texts.clear();
    store.script().is_down = false;
    // The descriptor is refused at first.
    store.script().fates = [Fate::Refused].into();
    check(&engine);
    check(&engine);
    assert_eq!((store.keys(), store.addresses("node")), (before.clone(), vec![memory.address()]));

    // A change writes the descriptor again, the next look the address.
    store.script().texts.clear();
    engine.register(memory.range(64, 16), &options()).unwrap();
    check(&engine);
    assert_eq!((store.keys(), store.addresses("node").len()), (before.clone(), 2));

    store.script().texts.insert("mooncake/rpc_meta/node".into(), "nonsense".into());
    check(&engine);
    assert!(store.script().texts["mooncake/rpc_meta/node"].contains("rpc_port"));

    store.script().texts.remove("mooncake/ram/node");
    for _ in 0..15 {
        check(&engine);
    }
    assert_eq!(store.keys(), before);
    let puts = store.script().descriptor_puts;
    for _ in 0..30 {
        check(&engine);
    }
    assert_eq!(store.script().descriptor_puts, puts, "what is right is left alone");
}

#[test]
fn the_newer_of_two_engines_has_the_name_until_it_is_gone() {
    let store = Arc::new(ScriptedStore::default());
    let memory = Memory::new(4096);
    let (older, newer) = (create(&store, "node"), create(&store, "node"));
    newer.register(memory.range(0, 16), &options()).unwrap();
    let texts = store.script().texts.clone();
    for _ in 0..30 {
        check(&older);
        check(&newer);
    }
    let error = older.register(memory.range(64, 16), &options()).unwrap_err();
    assert!(error.code() == Code::Metadata && error.message().contains(&newer.address()), "{error}");
    assert_eq!(older.region_count(), 0);
    assert_eq!(store.script().texts, texts);
    newer.shutdown();
    assert!(store.keys().is_empty());
    check(&older);
    assert_eq!(store.keys().len(), 2);
    older.register(memory.range(64, 16), &options()).unwrap();

    let newest = create(&store, "node");
    let texts = store.script().texts.clone();
    older.shutdown();
    assert_eq!(store.script().texts, texts, "what is another engine's is not removed");
    drop(newest);
}

#[test]
fn a_name_that_was_taken_during_an_outage_is_said_to_be() {
    let store = Arc::new(ScriptedStore::default());
    let engine = create(&store, "node");
    store.script().is_down = true;
    let heard = hear(|| (0..3).for_each(|_| check(&engine)));
    assert_eq!(heard.matches("cannot be kept").count(), 1, "{heard}");
    store.script().is_down = false;
    store.script().texts.insert("mooncake/rpc_meta/node".into(), r#"{"ip_or_host_name":"elsewhere","rpc_port":1}"#.into());
    let heard = hear(|| check(&engine));
    assert!(heard.contains("is back") && heard.contains("elsewhere:1"), "{heard}");
}

/// A server that was set back to an earlier state names an engine of before.
#[test]
fn an_address_at_which_nobody_listens_does_not_keep_the_name() {
    let store = Arc::new(ScriptedStore::default());
    let memory = Memory::new(4096);
    let engine = create(&store, "node");
    let (before, port) = (store.script().texts.clone(), engine.address());
    engine.register(memory.range(0, 16), &options()).unwrap();
    // The port is taken, so that no other test listens there.
    let taken = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    taken.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    let gone = taken.local_addr().unwrap().as_socket().unwrap().port();
    let port = port.rsplit(':').next().unwrap();
    store.script().texts = before.into_iter().map(|(key, text)| (key, text.replace(port, &gone.to_string()))).collect();
    for _ in 0..2 {
        check(&engine);
    }
    assert!(store.script().texts["mooncake/rpc_meta/node"].contains(port));
    assert_eq!(store.addresses("node"), [memory.address()]);
    engine.register(memory.range(64, 16), &options()).unwrap();
}

#[test]
fn a_server_that_comes_back_with_an_earlier_descriptor_is_corrected_at_once() {
    let store = Arc::new(ScriptedStore::default());
    let memory = Memory::new(4096);
    let engine = create(&store, "node");
    let before = store.script().texts.clone();
    engine.register(memory.range(0, 16), &options()).unwrap();
    store.script().is_down = true;
    check(&engine);
    store.script().texts = before;
    store.script().is_down = false;
    check(&engine);
    assert_eq!(store.addresses("node"), [memory.address()]);
}

/// However many calls that takes.
#[test]
fn creating_publishing_opening_and_withdrawing_have_one_time_limit_each() {
    let store = Arc::new(ScriptedStore::default());
    let take_ends = || std::mem::take(&mut store.script().ends).into_iter().map(Option::unwrap).collect::<Vec<Instant>>();
    let ends = |expected: usize| {
        let ends = take_ends();
        assert!(ends.len() == expected && ends.iter().all(|end| *end == ends[0]), "{ends:?}");
    };
    store.script().is_down = true;
    create_with(&store, "node", config()).err().unwrap();
    ends(2);
    store.script().is_down = false;
    store.script().fates = [Fate::Refused].into();
    let begin = Instant::now();
    create_with(&store, "node", Config { force_tcp: true, ..config() }).err().unwrap();
    // The limit moves by the time that opening devices took.
    let (created, ends_of_create) = (begin.elapsed(), take_ends());
    assert!(ends_of_create.len() == 3 && ends_of_create[1] == ends_of_create[2], "{ends_of_create:?}");
    assert!(ends_of_create[1] - ends_of_create[0] <= created, "{ends_of_create:?} {created:?}");
    let engine = create(&store, "node");
    store.script().ends.clear();
    let memory = Memory::new(16);
    engine.register(memory.range(0, 16), &options()).unwrap();
    ends(1);
    let older = r#"{"buffers":[],"name":"older","protocol":"tcp","tcp_data_port":1}"#;
    store.script().texts.insert("mooncake/ram/older".into(), older.into());
    engine.open_segment("older").unwrap_err();
    ends(2);
    engine.shutdown();
    ends(2);
}

#[test]
fn asking_the_server_at_each_submission_holds_up_nothing_else() {
    let store = Arc::new(ScriptedStore::default());
    let target = create(&store, "target");
    let initiator = create_with(&store, "initiator", Config { disable_metacache: true, ..config() }).unwrap();
    initiator.install_transport("tcp", None).unwrap();
    let (theirs, ours) = (Memory(vec![0; 64]), Memory::new(64));
    target.register(theirs.range(0, 64), &options()).unwrap();
    let segment = initiator.open_segment("target").unwrap();
    store.script().holds_gets = true;
    std::thread::scope(|scope| {
        let transfer =
            scope.spawn(|| initiator.transfer(&[write(ours.range(0, 64), segment, theirs.address())], Default::default()));
        store.await_call();
        let is_free = initiator.transports.try_write().is_some();
        store.script().holds_gets = false;
        store.changed.notify_all();
        assert!(is_free);
        assert_eq!(states(&transfer.join().unwrap().unwrap()), [State::Completed]);
    });
    assert_eq!(theirs.0, ours.0);
}

#[test]
fn installing_a_transport_that_cannot_be_published_changes_nothing() {
    for fate in [Fate::Refused, Fate::Lost] {
        let store = Arc::new(ScriptedStore::default());
        let memory = Memory::new(4096);
        let engine = create_with(&store, "node", config()).unwrap();
        engine.register(memory.range(0, 16), &options()).unwrap();
        store.script().fates = [fate].into();
        assert_eq!(engine.install_transport("tcp", None).unwrap_err().code(), Code::Metadata);
        assert!(!engine.has_transport("tcp") && engine.card.publish_text().is_empty());
        check(&engine);
        assert_eq!(store.keys(), ["mooncake/rpc_meta/node"]);
        engine.install_transport("tcp", None).unwrap();
        assert_eq!(store.addresses("node"), [memory.address()]);
    }
}

#[test]
fn an_engine_that_is_destroyed_during_a_publish_leaves_nothing_behind() {
    let store = Arc::new(ScriptedStore::default());
    let memory = Memory::new(4096);
    let engine = create(&store, "node");
    store.set_gated(true);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| engine.register(memory.range(0, 16), &options()));
        store.await_call();
        let second = scope.spawn(|| engine.register(memory.range(64, 16), &options()));
        while engine.presence.as_ref().unwrap().waiting() < 1 {
            std::thread::yield_now();
        }
        let destroying = scope.spawn(|| engine.shutdown());
        assert_eq!(second.join().unwrap().unwrap_err().code(), Code::Canceled, "who waits is turned away at once");
        store.set_gated(false);
        first.join().unwrap().unwrap();
        destroying.join().unwrap();
    });
    assert!(store.keys().is_empty());
    check(&engine);
    assert!(store.keys().is_empty());
}

#[cfg(feature = "rdma")]
#[test]
fn publishing_in_the_background_does_not_delay_the_end_of_an_engine() {
    let store = Arc::new(ScriptedStore::default());
    let memory = Memory::new(4096);
    let engine = create(&store, "node");
    store.set_gated(true);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| engine.register(memory.range(0, 16), &options()));
        store.await_call();
        engine.publish_soon();
        let waiting = || engine.presence.as_ref().unwrap().waiting();
        while waiting() < 1 {
            std::thread::yield_now();
        }
        let destroying = scope.spawn(|| engine.shutdown());
        while waiting() > 0 {
            std::thread::yield_now();
        }
        store.set_gated(false);
        first.join().unwrap().unwrap();
        destroying.join().unwrap();
    });
    assert!(store.keys().is_empty());
}

#[test]
fn an_engine_can_be_destroyed_when_the_server_is_gone() {
    let store = Arc::new(ScriptedStore::default());
    let engine = create(&store, "node");
    store.script().is_down = true;
    let gets = store.script().gets;
    engine.shutdown();
    assert_eq!(store.script().gets, gets + 1, "it is not asked again and again");
}

#[test]
fn descriptors_of_older_peers_and_of_several_protocols_are_usable() {
    let store = Arc::new(ScriptedStore::default());
    let (target, initiator) = (create(&store, "target"), create(&store, "initiator"));
    let (theirs, ours) = (Memory(vec![0; 64]), Memory::new(64));
    target.register(theirs.range(0, 64), &options()).unwrap();
    let port = store.descriptor("target").tcp_data_port;
    let location = store.script().texts["mooncake/rpc_meta/target"].clone();
    let (address, key) = (theirs.address(), r#""lkey":[1],"rkey":[2],"#);
    let older = format!(
        r#"{{"buffers":[{{"addr":{address},"length":64,"name":"older"}}],"name":"older","protocol":"tcp","tcp_data_port":{port},"tcp_proto_version":2}}"#
    );
    let several = format!(
        r#"{{"buffers":[{{"addr":{address},"length":64,{key}"protocol":"rdma"}},{{"addr":{address},"length":64,"protocol":"tcp"}},
            {{"addr":{address},"length":64,"shm_name":"x","protocol":"hip"}}],"devices":[{{"name":"nic","gid":"0:1","lid":0}}],
            "name":"several","protocol":["hip","rdma","tcp"],"tcp_data_port":{port},"tcp_proto_version":2}}"#
    );
    for (name, text) in [("older", older), ("several", several)] {
        store.script().texts.insert(format!("mooncake/ram/{name}"), text);
        store.script().texts.insert(format!("mooncake/rpc_meta/{name}"), location.clone());
        let segment = initiator.open_segment(name).unwrap();
        let statuses = initiator.transfer(&[write(ours.range(0, 64), segment, address)], Default::default()).unwrap();
        assert_eq!(states(&statuses), [State::Completed], "{name}: {:?}", statuses[0].error);
    }
    assert_eq!(theirs.0, ours.0);
}

#[test]
fn publishing_again_tells_of_what_was_left_for_later_and_writes_the_address_whatever_is_there() {
    let store = Arc::new(ScriptedStore::default());
    let memory = Memory::new(4096);
    let engine = create(&store, "node");
    engine.register(memory.range(0, 16), &later()).unwrap();
    assert!(store.addresses("node").is_empty());
    store.script().fates.push_back(Fate::Refused);
    assert_eq!(engine.publish().unwrap_err().code(), Code::Metadata);
    engine.publish().unwrap();
    assert_eq!(store.addresses("node"), [memory.address()]);
    let puts = store.script().descriptor_puts;
    engine.publish().unwrap();
    assert_eq!(store.script().descriptor_puts, puts, "the server has it already");

    let key = "mooncake/rpc_meta/node";
    let address = store.script().texts[key].clone();
    store.script().texts.remove(key);
    engine.publish_address().unwrap();
    assert_eq!(store.script().texts[key], address);
    let puts = store.script().address_puts;
    engine.publish_address().unwrap();
    assert_eq!(store.script().address_puts, puts + 1);
    store.script().is_down = true;
    assert_eq!(engine.publish_address().unwrap_err().code(), Code::Metadata);
    store.script().is_down = false;
    let own = SegmentDescriptor::decode(engine.segment_json(LOCAL_SEGMENT).unwrap().as_bytes(), &"the test").unwrap();
    assert_eq!(own.buffers, store.descriptor("node").buffers);
    engine.probe_name("node").unwrap();
    assert_eq!(engine.probe_name("nobody").unwrap_err().code(), Code::Metadata);
    // Before its memory goes.
    engine.shutdown();
}
