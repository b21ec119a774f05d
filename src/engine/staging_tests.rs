//! Puts and gets between two engines in one process, over TCP, where nothing is registered for them.

use super::staging::{Finished, Item, StagingOptions};
use super::tests::{Memory, options};
use super::*;
use crate::pool::plan::Preference;
use crate::transfer::State;

const MIB: usize = 1 << 20;

struct Bench {
    near: Arc<Engine>,
    _far: Arc<Engine>,
    pool: Arc<Pool>,
    theirs: Memory,
    segment: u64,
}

impl Bench {
    fn new(pool: PoolOptions) -> Bench {
        let engine = || {
            let options =
                EngineOptions { metadata: PEER_TO_PEER.into(), server_name: "127.0.0.1".into(), ..EngineOptions::default() };
            let engine = Engine::create(&options, Config::default()).unwrap();
            engine.install_transport("tcp", None).unwrap();
            engine
        };
        let (near, far) = (engine(), engine());
        let theirs = Memory::new(8 * MIB);
        far.register(theirs.range(0, 8 * MIB), &options()).unwrap();
        let segment = near.open_segment(&far.name()).unwrap();
        let pool = near.create_pool(&pool).unwrap();
        Bench { near, _far: far, pool, theirs, segment }
    }

    fn item(&self, local: MemoryRange, offset: usize) -> Item {
        Item { local, segment: self.segment, remote_address: self.theirs.address() + offset as u64 }
    }
}

fn small_pool() -> PoolOptions {
    PoolOptions { bytes: Some(MIB as u64), ..Default::default() }
}

#[track_caller]
fn completed(finished: &Finished) {
    assert!(finished.statuses.iter().all(|status| status.state == State::Completed), "{:?}", finished.statuses);
    finished.undone.as_ref().unwrap();
}

#[test]
fn bytes_arrive_in_both_directions_whatever_the_path_and_the_lengths() {
    let bench = Bench::new(small_pool());
    for preference in [Preference::Auto, Preference::Staged, Preference::Direct] {
        let options = StagingOptions { preference, ..Default::default() };
        // Longer than the largest lease, a lease, many, nothing; uniform and ragged.
        for lengths in [vec![200_000, 0, 1, 131_072], vec![1000; 500], (0..300).map(|i| i * 37 % 5000).collect(), vec![]] {
            let total: usize = lengths.iter().sum();
            let (source, target) = (Memory::new(total + 1), Memory(vec![0; total + 1]));
            let items = |memory: &Memory| -> Vec<Item> {
                let mut at = 0;
                lengths
                    .iter()
                    .map(|&length| {
                        at += length;
                        bench.item(memory.range(at - length, length), at - length)
                    })
                    .collect()
            };
            let put = bench.near.put(&bench.pool, &items(&source), options).unwrap();
            completed(&put);
            assert_eq!(put.statuses.iter().map(|status| status.transferred_bytes as usize).collect::<Vec<_>>(), lengths);
            completed(&bench.near.get(&bench.pool, &items(&target), options).unwrap());
            assert!(source.0[..total] == target.0[..total], "{preference:?} {lengths:?}");
            assert_eq!(target.0[total], 0);
        }
    }
    let statistics = bench.pool.statistics();
    assert_eq!((statistics.puts, statistics.gets, statistics.leases, statistics.registrations), (12, 12, 0, 0));
    assert!(statistics.items_staged > 0 && statistics.items_direct > 0 && statistics.items_zero_copy > 0, "{statistics:?}");
    bench.near.close_pool(&bench.pool, Some(Duration::ZERO)).unwrap();
    assert_eq!(bench.near.region_count(), 0);
}

#[test]
fn what_has_not_begun_when_the_time_is_over_is_not_begun() {
    let bench = Bench::new(small_pool());
    let source = Memory::new(4096);
    // Each waits for the one before it.
    let items = vec![bench.item(source.range(0, 100), 0); 1000];
    let requests = || bench.near.counters().tasks_submitted.get();
    for preference in [Preference::Auto, Preference::Staged, Preference::Direct] {
        let options = StagingOptions { preference, deadline: Some(Instant::now()), ..Default::default() };
        let before = requests();
        for count in [1, 1000] {
            let finished = bench.near.put(&bench.pool, &items[..count], options).unwrap();
            assert!(finished.statuses.iter().all(|status| status.state == State::Timeout), "{:?}", finished.statuses[0]);
        }
        assert_eq!(requests(), before);
    }
}
