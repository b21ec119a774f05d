//! Puts and gets by the NICs of the fake verbs library: what is registered for them, and until when.

use std::time::{Duration, Instant};

use super::rdma_tests::{self, live, options, pattern, wait_until};
use super::staging::{Finished, Item, LeasedItem, StagingOptions};
use super::*;
use crate::pool::plan::Preference;
use crate::pool::{Direction, Fallback, Lease, Outcome};
use crate::registry::pause_before_looking;
use crate::transfer::State;
use crate::transport::rdma::fake::{Fake, Memory};

const MIB: u64 = 1 << 20;
const LARGEST: u64 = MIB / 8;

/// Two engines, of which one puts and gets through a pool, and memory that neither has registered.
struct Bench {
    fake: Fake,
    engines: rdma_tests::Bench,
    pool: Arc<Pool>,
    payload: Memory,
}

impl Bench {
    fn new(options: PoolOptions) -> Bench {
        let fake = Fake::new(2);
        let engines = rdma_tests::Bench::on(&fake, 4 << 20);
        let bench = Bench::between(fake, engines, options);
        // Connected.
        completed(&bench.put(&[bench.item(0, 1)], staged()));
        bench
    }

    fn between(fake: Fake, engines: rdma_tests::Bench, options: PoolOptions) -> Bench {
        let pool = engines.near.create_pool(&PoolOptions { bytes: options.bytes.or(Some(MIB)), ..options }).unwrap();
        Bench { fake, engines, pool, payload: Memory::new(4 << 20) }
    }

    /// An item whose offset is the same here and there.
    fn item(&self, offset: u64, length: u64) -> Item {
        self.item_to(self.payload.range(offset, length), offset)
    }

    fn item_to(&self, local: MemoryRange, offset: u64) -> Item {
        let remote_address = self.engines.theirs.range(offset, local.length()).address();
        Item { local, segment: self.engines.segment, remote_address }
    }

    fn put(&self, items: &[Item], options: StagingOptions) -> Finished {
        self.engines.near.put(&self.pool, items, options).unwrap()
    }

    fn get(&self, items: &[Item], options: StagingOptions) -> Finished {
        self.engines.near.get(&self.pool, items, options).unwrap()
    }

    /// Live regions of the initiator's NIC.
    fn regions(&self) -> i64 {
        self.fake.get(0, "regions")
    }

    /// Registrations that the initiator's NIC has ever made.
    fn registrations(&self) -> i64 {
        self.fake.get(0, "registrations")
    }

    /// Takes all the room that puts may have.
    fn fill_pool(&self) -> Vec<Lease> {
        let all_of = |bytes| std::iter::from_fn(move || self.pool.acquire(Direction::Put, bytes, Some(Duration::ZERO)).ok());
        all_of(LARGEST).chain(all_of(1)).collect()
    }

    fn release(&self, leases: Vec<Lease>) {
        leases.iter().for_each(|lease| self.pool.release(lease.id, Outcome::Over).unwrap());
    }
}

fn pool() -> PoolOptions {
    PoolOptions::default()
}

fn staged() -> StagingOptions {
    StagingOptions { preference: Preference::Staged, ..Default::default() }
}

fn direct() -> StagingOptions {
    StagingOptions { preference: Preference::Direct, ..Default::default() }
}

fn within(limit: Duration) -> Option<Instant> {
    Some(Instant::now() + limit)
}

#[track_caller]
fn completed(finished: &Finished) {
    assert!(finished.statuses.iter().all(|status| status.state == State::Completed), "{:?}", finished.statuses);
    finished.undone.as_ref().unwrap();
}

/// The code of each item's error, if it has one.
fn codes(finished: &Finished) -> Vec<Option<Code>> {
    finished.statuses.iter().map(|status| status.error.as_ref().map(Error::code)).collect()
}

#[test]
fn a_warm_put_or_get_registers_nothing() {
    let bench = Bench::new(pool());
    bench.payload.write(&pattern(MIB as usize, 1));
    let before = bench.registrations();
    let items: Vec<Item> = (0..64).map(|at| bench.item(at * 10_000, 9_000)).collect();
    for _ in 0..20 {
        completed(&bench.put(&items, staged()));
        completed(&bench.get(&items, staged()));
    }
    assert_eq!(bench.registrations(), before);
    let theirs = bench.engines.theirs.read();
    for at in 0..64 {
        assert!(theirs[at * 10_000..][..9_000] == pattern(MIB as usize, 1)[at * 10_000..][..9_000]);
    }
    let statistics = bench.pool.statistics();
    assert_eq!((statistics.puts, statistics.gets), (21, 20));
    assert_eq!((statistics.items_staged, statistics.items_direct, statistics.registrations), (40 * 64 + 1, 0, 0));
    assert_eq!((statistics.bytes_staged, statistics.leases), (40 * 64 * 9_000 + 1, 0));
}

#[test]
fn groups_are_copied_while_those_before_are_on_their_way_up_to_a_limit() {
    let bench = Bench::new(PoolOptions { bytes: Some(16 * MIB), largest_lease: Some(3 * MIB / 2), ..pool() });
    bench.payload.write(&pattern(4 << 20, 15));
    bench.fake.set(0, "hold", 1);
    std::thread::scope(|scope| {
        // Four groups, and room for three of them in two of the largest leases.
        let items: Vec<Item> = (0..16).map(|at| bench.item(at * MIB / 4, MIB / 4)).collect();
        let put = scope.spawn({
            let bench = &bench;
            move || bench.put(&items, staged())
        });
        wait_until("three are under way", || bench.pool.statistics().bytes_staged == 3 * MIB + 1);
        bench.fake.set(0, "hold", 0);
        completed(&put.join().unwrap());
    });
    assert!(bench.engines.theirs.read() == pattern(4 << 20, 15));
    let statistics = bench.pool.statistics();
    assert_eq!((statistics.leases, statistics.most_leased_bytes), (0, 3 * MIB), "the fourth was not copied beside them");
}

#[test]
fn what_is_too_long_for_a_lease_is_registered_once_where_it_overlaps_or_touches() {
    let bench = Bench::new(pool());
    bench.payload.write(&pattern(4 << 20, 2));
    let (registrations, regions) = (bench.registrations(), bench.regions());
    let long = LARGEST + 1;
    // Two that touch, one inside of both, and one apart; what is short is staged beside them.
    let theirs = |local: (u64, u64), offset| bench.item_to(bench.payload.range(local.0, local.1), offset);
    let items = [
        theirs((0, long), 0),
        theirs((long, long), 400_000),
        theirs((1000, long), 800_000),
        theirs((1_000_000, long), 1_200_000),
        theirs((2_000_000, 100), 1_600_000),
    ];
    completed(&bench.put(&items, StagingOptions::default()));
    assert_eq!((bench.registrations() - registrations, bench.regions()), (2, regions));
    let (ours, there) = (bench.payload.read(), bench.engines.theirs.read());
    for (item, start) in items.iter().zip([0, long, 1000, 1_000_000, 2_000_000]) {
        let target = (item.remote_address - bench.engines.theirs.range(0, 1).address()) as usize;
        let length = item.local.length() as usize;
        assert!(there[target..][..length] == ours[start as usize..][..length]);
    }
    let statistics = bench.pool.statistics();
    assert_eq!((statistics.registrations, statistics.items_direct), (2, 4));
}

#[test]
fn memory_that_is_registered_in_part_is_registered_where_it_is_not() {
    let bench = Bench::new(pool());
    let near = &bench.engines.near;
    bench.payload.write(&pattern(4 << 20, 3));
    near.register(bench.payload.range(300_000, 100_000), &options()).unwrap();
    near.register(bench.payload.range(500_000, 1), &options()).unwrap();
    let (registrations, regions) = (bench.registrations(), bench.regions());
    completed(&bench.put(&[bench.item(0, MIB)], direct()));
    assert_eq!((bench.registrations() - registrations, bench.regions()), (3, regions));
    assert!(bench.engines.theirs.read()[..MIB as usize] == pattern(4 << 20, 3)[..MIB as usize]);
    // All of it: from where it is.
    near.register(bench.payload.range(400_000, 100_000), &options()).unwrap();
    completed(&bench.put(&[bench.item(300_000, 200_001)], direct()));
    assert_eq!(bench.pool.statistics().items_zero_copy, 1);
    assert_eq!(bench.registrations() - registrations, 4);
}

#[test]
fn what_is_in_a_lease_is_transferred_from_there() {
    let bench = Bench::new(pool());
    let lease = bench.pool.acquire(Direction::Put, 5000, None).unwrap();
    let registrations = bench.registrations();
    crate::sys::memory::store_checked(lease.memory, &pattern(5000, 4)).unwrap();
    completed(&bench.put(&[bench.item_to(lease.memory, 77)], StagingOptions::default()));
    assert!(bench.engines.theirs.read()[77..][..5000] == pattern(5000, 4));
    assert_eq!((bench.pool.statistics().items_zero_copy, bench.registrations()), (1, registrations));
    bench.pool.release(lease.id, Outcome::Over).unwrap();
}

#[test]
fn of_items_with_the_same_target_the_last_one_wins_whatever_their_ways() {
    let bench = Bench::new(pool());
    let near = &bench.engines.near;
    bench.payload.write(&pattern(4 << 20, 5));
    near.register(bench.payload.range(3 << 20, 4096), &options()).unwrap();
    let part = |offset, length| bench.payload.range(offset, length);
    // Long ones take longer than those after them: they are registered first.
    let puts = [
        (part(0, LARGEST + 1), 0),
        (part(1 << 20, 4096), 50),
        (part(3 << 20, 4096), 2000),
        (part(2 << 20, LARGEST + 1), 3000),
        (part(100, 10), 0),
        (part(200, 4096), 200_000),
    ];
    let mut expected = vec![0; 4 << 20];
    for (local, offset) in &puts {
        let start = (local.address() - part(0, 1).address()) as usize;
        let length = local.length() as usize;
        expected[*offset as usize..][..length].copy_from_slice(&pattern(4 << 20, 5)[start..][..length]);
    }
    let items: Vec<Item> = puts.iter().map(|(local, offset)| bench.item_to(*local, *offset)).collect();
    for _ in 0..5 {
        bench.engines.theirs.write(&vec![0; 4 << 20]);
        completed(&bench.put(&items, StagingOptions::default()));
        assert!(bench.engines.theirs.read() == expected);
    }
    // And into the same memory here.
    let gets =
        [bench.item_to(part(0, LARGEST + 1), 0), bench.item_to(part(10, 4096), 500_000), bench.item_to(part(20, 16), 600_000)];
    bench.engines.theirs.write(&pattern(4 << 20, 6));
    completed(&bench.get(&gets, StagingOptions::default()));
    let (ours, there) = (bench.payload.read(), pattern(4 << 20, 6));
    assert!(ours[..10] == there[..10] && ours[10..20] == there[500_000..500_010] && ours[20..36] == there[600_000..600_016]);
    assert!(
        ours[36..10 + 4096] == there[500_026..504_096] && ours[4106..LARGEST as usize + 1] == there[4106..LARGEST as usize + 1]
    );
}

#[test]
fn two_calls_that_use_the_same_memory_share_its_registration() {
    let bench = Bench::new(pool());
    bench.payload.write(&pattern(4 << 20, 7));
    let (registrations, regions) = (bench.registrations(), bench.regions());
    bench.fake.set(0, "hold", 1);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| bench.put(&[bench.item(0, MIB)], direct()));
        wait_until("registered", || bench.regions() == regions + 1);
        // The second half of the first one's, and more.
        let second = scope.spawn(|| bench.put(&[bench.item(MIB / 2, MIB)], direct()));
        wait_until("the rest is registered", || bench.regions() == regions + 2);
        bench.fake.set(0, "hold", 0);
        completed(&first.join().unwrap());
        completed(&second.join().unwrap());
    });
    assert_eq!((bench.registrations() - registrations, bench.regions()), (2, regions));
    assert!(bench.engines.theirs.read()[..3 << 19] == pattern(4 << 20, 7)[..3 << 19]);
    let counters = bench.engines.near.counters();
    let live = counters.regions_registered.get() - counters.regions_unregistered.get();
    assert_eq!(live as usize, bench.engines.near.region_count());
}

#[test]
fn a_call_returns_when_those_that_share_its_memory_have_let_it_go() {
    let bench = Bench::new(pool());
    let near = &bench.engines.near;
    let gone = Memory::new(4096);
    let (regions, retried) = (bench.regions(), bench.pool.statistics().retried);
    bench.payload.write(&pattern(4 << 20, 11));
    bench.fake.set(0, "hold", 1);
    std::thread::scope(|scope| {
        let bench = &bench;
        let whole = scope.spawn(move || {
            completed(&bench.put(&[bench.item(0, MIB)], direct()));
            // The caller may unmap it now, and what is mapped there next must not be taken for what was registered.
            assert!(near.find_region(bench.payload.range(0, 1).address()).is_none());
        });
        wait_until("registered", || bench.regions() == regions + 1);
        // A few of these bytes, which do not get away for now.
        let few = Item { remote_address: gone.range(0, 1).address(), ..bench.item(0, 100) };
        let part = scope.spawn(move || {
            near.put(&bench.pool, &[few], StagingOptions { retries: 1_000_000, retry_pause: Duration::from_millis(1), ..direct() })
                .unwrap()
        });
        wait_until("it is tried again", || bench.pool.statistics().retried > retried + 5);
        let shared = bench.regions();
        bench.fake.set(0, "hold", 0);
        let theirs = || bench.engines.theirs.read()[..MIB as usize] == pattern(4 << 20, 11)[..MIB as usize];
        wait_until("the bytes are there", theirs);
        // One that comes later waits for that, too, lest there is always somebody who shares it.
        let late = || bench.put(&[bench.item(0, 100)], StagingOptions { deadline: within(Duration::from_millis(20)), ..direct() });
        wait_until("it is shared no more", || codes(&late()) == [Some(Code::Timeout)]);
        let returned = whole.is_finished();
        bench.engines.far.register(gone.range(0, 4096), &rdma_tests::options()).unwrap();
        completed(&part.join().unwrap());
        whole.join().unwrap();
        assert_eq!((shared, returned), (regions + 1, false));
    });
    assert_eq!(bench.regions(), regions);
}

#[test]
fn many_threads_may_put_and_get_the_same_memory_directly() {
    let bench = Bench::new(pool());
    bench.payload.write(&pattern(4 << 20, 8));
    bench.engines.theirs.write(&pattern(4 << 20, 8));
    let regions = bench.regions();
    std::thread::scope(|scope| {
        for thread in 0..6_u64 {
            let bench = &bench;
            scope.spawn(move || {
                for round in 0..30_u64 {
                    let offset = (thread * 7 + round * 13) % 5 * 50_000;
                    let item = bench.item(offset, LARGEST + 1 + round * 1000);
                    completed(&match thread % 2 {
                        0 => bench.put(&[item], direct()),
                        _ => bench.get(&[item], direct()),
                    });
                }
            });
        }
    });
    assert_eq!((bench.regions(), bench.fake.get(-1, "protection_errors")), (regions, 0));
    assert!(bench.engines.theirs.read() == pattern(4 << 20, 8) && bench.payload.read() == pattern(4 << 20, 8));
}

#[test]
fn calls_that_wait_for_memory_do_not_wait_for_each_other() {
    let bench = Bench::new(pool());
    bench.payload.write(&pattern(4 << 20, 12));
    bench.engines.theirs.write(&pattern(4 << 20, 12));
    let regions = bench.regions();
    // So what could be staged is registered, too, beside what is registered already.
    let leases = bench.fill_pool();
    // SAFETY: nothing is ever mapped there.
    #[allow(unsafe_code)]
    let nowhere = unsafe { MemoryRange::new(1 << 62, LARGEST + 1) }.unwrap();
    std::thread::scope(|scope| {
        for thread in 0..6_u64 {
            let bench = &bench;
            scope.spawn(move || {
                pause_before_looking(Duration::from_micros(20 * thread));
                for round in 0..30_u64 {
                    // In one order and in the other.
                    let place = |at: u64| if thread % 2 == 0 { at } else { 5 - at };
                    let length = |at: u64| if at.is_multiple_of(2) { LARGEST + 1 + thread * 1000 } else { 30_000 + round * 10 };
                    let mut items: Vec<Item> = (0..6).map(|at| bench.item(place(at) * 100_000 + thread * 7, length(at))).collect();
                    if round % 3 == 0 {
                        // Then each is registered by itself.
                        items.push(bench.item_to(nowhere, 2 << 20));
                    }
                    let finished = bench.put(&items, staged());
                    let expected: Vec<_> = (0..items.len()).map(|at| (at == 6).then_some(Code::Fault)).collect();
                    assert_eq!(codes(&finished), expected);
                    finished.undone.unwrap();
                }
            });
        }
    });
    bench.release(leases);
    assert_eq!((bench.regions(), bench.fake.get(-1, "protection_errors")), (regions, 0));
    assert!(bench.engines.theirs.read() == pattern(4 << 20, 12));
}

#[test]
fn memory_that_the_program_is_registering_is_waited_for() {
    let bench = Bench::new(pool());
    let registrations = bench.registrations();
    bench.fake.set(0, "register_microseconds", 30_000);
    std::thread::scope(|scope| {
        let blocked = bench.engines.near.region_count();
        scope.spawn(|| bench.engines.near.register(bench.payload.range(0, MIB), &options()).unwrap());
        wait_until("its range is taken", || bench.engines.near.region_count() > blocked);
        completed(&bench.put(&[bench.item(0, MIB)], direct()));
    });
    assert_eq!(bench.registrations() - registrations, 1, "by the program");
    assert_eq!(bench.regions(), 3);
}

#[test]
fn memory_that_a_call_has_registered_is_not_the_programs_to_unregister() {
    let bench = Bench::new(pool());
    let near = &bench.engines.near;
    let regions = bench.regions();
    bench.fake.set(0, "hold", 1);
    std::thread::scope(|scope| {
        let put = scope.spawn(|| bench.put(&[bench.item(0, MIB)], direct()));
        wait_until("registered", || near.find_region(bench.payload.range(0, 1).address()).is_some());
        wait_until("live", || near.regions().len() == 3);
        let error = near.unregister(bench.payload.range(0, 1).address()).unwrap_err();
        assert!(error.code() == Code::AddressNotRegistered && error.message().contains("put"), "{error}");
        let error = near.register(bench.payload.range(5, 1), &options()).unwrap_err();
        assert!(error.code() == Code::AddressOverlapped && error.message().contains("put"), "{error}");
        bench.fake.set(0, "hold", 0);
        completed(&put.join().unwrap());
    });
    assert_eq!(bench.regions(), regions);
    near.register(bench.payload.range(5, 1), &options()).unwrap();
}

#[test]
fn a_registration_that_fails_fails_its_items_and_leaves_nothing() {
    let bench = Bench::new(pool());
    let regions = bench.regions();
    let items = [bench.item(0, LARGEST + 1), bench.item(MIB, LARGEST + 1), bench.item(2 * MIB, 100)];
    for failing in 1..=3 {
        bench.fake.set(0, "register_fail_at", failing);
        let finished = bench.put(&items, StagingOptions::default());
        // Tried once more, each by itself, and then it goes.
        completed(&finished);
        assert_eq!((bench.regions(), bench.engines.near.region_count()), (regions, regions as usize));
        bench.fake.set(0, "register_fail_at", 0);
    }
    bench.fake.set(0, "register_fail_from", 1);
    let finished = bench.put(&items, StagingOptions::default());
    assert_eq!(codes(&finished), [Some(Code::Limit), Some(Code::Limit), None], "{finished:?}");
    bench.fake.set(0, "register_fail_from", 0);
    // One is not mapped.
    let unmapped = bench.item_to(Memory::unmapped(LARGEST + 1), 0);
    let finished = bench.put(&[items[0], unmapped, items[2]], StagingOptions::default());
    assert_eq!(codes(&finished), [None, Some(Code::Fault), None]);
    assert_eq!(
        (bench.regions(), bench.engines.near.region_count(), bench.pool.statistics().leases),
        (regions, regions as usize, 0)
    );
}

#[test]
fn a_transfer_that_fails_leaves_nothing_registered_or_leased() {
    let bench = Bench::new(pool());
    let (regions, near) = (bench.regions(), &bench.engines.near);
    bench.engines.far.unregister(bench.engines.theirs.range(0, 1).address()).unwrap();
    let finished = bench.put(&[bench.item(0, LARGEST + 1), bench.item(MIB, 100)], StagingOptions::default());
    assert_eq!(codes(&finished), [Some(Code::AddressNotRegistered); 2]);
    assert_eq!((bench.regions(), near.region_count(), bench.pool.statistics().leases), (regions, regions as usize, 0));
}

#[test]
fn memory_that_a_device_keeps_is_said_to_stay_blocked() {
    let bench = Bench::new(pool());
    bench.fake.set(0, "deregister_fail_at", 1);
    let finished = bench.put(&[bench.item(0, LARGEST + 1)], direct());
    assert_eq!(finished.statuses[0].state, State::Completed);
    assert_eq!(finished.undone.unwrap_err().code(), Code::Context);
    let error = bench.engines.near.register(bench.payload.range(0, 1), &options()).unwrap_err();
    assert!(error.message().contains("quarantined"), "{error}");
    // It is in the way for good, which is not waited for.
    let finished = bench.put(&[bench.item(0, LARGEST + 1)], direct());
    assert_eq!(codes(&finished), [Some(Code::AddressOverlapped)]);
}

#[test]
fn memory_that_another_call_could_not_give_back_is_said_to_stay_blocked() {
    let bench = Bench::new(pool());
    let gone = Memory::new(4096);
    let (regions, retried) = (bench.regions(), bench.pool.statistics().retried);
    bench.fake.set(0, "hold", 1);
    std::thread::scope(|scope| {
        let bench = &bench;
        let whole = scope.spawn(move || bench.put(&[bench.item(0, MIB)], direct()));
        wait_until("registered", || bench.regions() == regions + 1);
        // A few of these bytes, which do not get away before the other call has given its reference back.
        let few = Item { remote_address: gone.range(0, 1).address(), ..bench.item(0, 100) };
        let options = StagingOptions { retries: 1_000_000, retry_pause: Duration::from_millis(1), ..direct() };
        let part = scope.spawn(move || bench.put(&[few], options));
        wait_until("it is tried again", || bench.pool.statistics().retried > retried + 5);
        bench.fake.set(0, "hold", 0);
        let late = || bench.put(&[bench.item(0, 100)], StagingOptions { deadline: within(Duration::from_millis(20)), ..direct() });
        wait_until("it is shared no more", || codes(&late()) == [Some(Code::Timeout)]);
        bench.fake.set(0, "deregister_fail_at", 1);
        bench.engines.far.register(gone.range(0, 4096), &rdma_tests::options()).unwrap();
        assert_eq!(part.join().unwrap().undone.unwrap_err().code(), Code::Context);
        let whole = whole.join().unwrap();
        assert_eq!(whole.statuses[0].state, State::Completed);
        let error = whole.undone.unwrap_err();
        assert!(error.message().contains("stays blocked"), "{error}");
    });
}

#[test]
fn unregistering_under_a_zero_copy_put_ends_its_items_alone() {
    let bench = Bench::new(pool());
    let near = &bench.engines.near;
    near.register(bench.payload.range(0, 4096), &options()).unwrap();
    bench.fake.set(0, "hold", 1);
    std::thread::scope(|scope| {
        let posted = bench.fake.get(0, "posted");
        let put = scope.spawn(|| bench.put(&[bench.item(0, 4096), bench.item(8192, 100)], staged()));
        wait_until("both are under way", || bench.fake.get(0, "posted") == posted + 2);
        near.unregister(bench.payload.range(0, 1).address()).unwrap();
        bench.fake.set(0, "hold", 0);
        let finished = put.join().unwrap();
        assert_eq!((finished.statuses[0].state, finished.statuses[1].state), (State::Canceled, State::Completed));
    });
    assert_eq!(bench.pool.statistics().leases, 0);
}

#[test]
fn only_what_has_failed_is_tried_again_inside_the_lease() {
    let bench = Bench::new(pool());
    let gone = Memory::new(4096);
    let mut items: Vec<Item> = (0..8).map(|at| bench.item(at * 100, 100)).collect();
    items[5].remote_address = gone.range(0, 1).address();
    let (posted, acquired) = (bench.fake.get(0, "posted"), bench.pool.statistics().acquired);
    let options = StagingOptions { retries: 3, retry_pause: Duration::from_millis(1), ..staged() };
    let finished = bench.put(&items, options);
    let expected: Vec<_> = (0..8).map(|at| (at == 5).then_some(Code::AddressNotRegistered)).collect();
    assert_eq!(codes(&finished), expected);
    let statistics = bench.pool.statistics();
    assert_eq!((statistics.retried, statistics.acquired - acquired, statistics.leases), (3, 1, 0));
    assert_eq!(bench.fake.get(0, "posted") - posted, 7);
    // It is there before the retries are used up.
    std::thread::scope(|scope| {
        let put = scope.spawn(|| bench.put(&items, StagingOptions { retries: 1_000_000, ..options }));
        wait_until("it is tried again", || bench.pool.statistics().retried > 5);
        bench.engines.far.register(gone.range(0, 4096), &rdma_tests::options()).unwrap();
        completed(&put.join().unwrap());
    });
    assert!(gone.read()[..100] == bench.payload.read()[500..600]);
}

#[test]
fn each_retry_of_an_item_begins_at_another_nic() {
    let fake = Fake::new(3);
    let mut config = rdma_tests::config(&fake);
    // The engine leaves trying again to the call, and nothing but the number of tries keeps a NIC from being taken.
    (config.rdma.retry_count, config.rdma.rail_pause) = (1, Duration::ZERO);
    let near = rdma_tests::engine_of(&config, r#"{"cpu:0": [["fake0"], ["fake1"]]}"#);
    let far = rdma_tests::engine(&fake, &["fake2"]);
    fake.set(0, "rtr_errno", i64::from(libc::EINVAL));
    let bench = Bench::between(fake, rdma_tests::Bench::new(near, far, MIB as usize), pool());
    bench.engines.ours.write(&pattern(MIB as usize, 16));
    let items = [bench.item_to(bench.engines.ours.range(0, 5000), 0)];
    let put = |retries| bench.put(&items, StagingOptions { retries, retry_pause: Duration::from_millis(1), ..Default::default() });
    assert_eq!(put(0).statuses[0].state, State::Failed);
    // The preferred one, the first of all, the second.
    completed(&put(2));
    assert!(bench.engines.theirs.read()[..5000] == pattern(MIB as usize, 16)[..5000]);
    assert_eq!((bench.pool.statistics().retried, bench.fake.get(0, "posted"), bench.fake.get(1, "posted")), (2, 0, 1));
}

/// A pool by which an item of 2 MiB is put in four parts.
fn pool_for_parts(bench: &Bench, fallback: Fallback) -> Arc<Pool> {
    bench.engines.near.create_pool(&PoolOptions { bytes: Some(16 * MIB), fallback, ..pool() }).unwrap()
}

#[test]
fn a_long_item_is_put_in_parts_and_is_one_item_to_the_caller() {
    let bench = Bench::new(pool());
    let pool = pool_for_parts(&bench, Fallback::Register);
    bench.payload.write(&pattern(4 * MIB as usize, 1));
    let items = [bench.item(100, 2 * MIB), bench.item(3 * MIB, 50)];
    let finished = bench.engines.near.put(&pool, &items, staged()).unwrap();
    completed(&finished);
    assert_eq!([0, 1].map(|item| finished.statuses[item].transferred_bytes), [2 * MIB, 50]);
    let statistics = pool.statistics();
    assert_eq!((statistics.items_staged, statistics.bytes_staged, statistics.leases), (2, 2 * MIB + 50, 0));
    assert!(statistics.acquired >= 4 && statistics.most_leased_bytes < 2 * MIB, "{statistics:?}");
    let (ours, theirs) = (bench.payload.read(), bench.engines.theirs.read());
    for (offset, length) in [(100, 2 * MIB as usize), (3 * MIB as usize, 50)] {
        assert!(theirs[offset..][..length] == ours[offset..][..length]);
    }
    // What is got comes in one piece: it is copied out when all of it is there.
    let acquired = pool.statistics().acquired;
    completed(&bench.engines.near.get(&pool, &items[..1], staged()).unwrap());
    assert_eq!(pool.statistics().acquired - acquired, 1);
}

#[test]
fn no_part_of_a_long_item_goes_past_the_end_of_the_address_space() {
    let bench = Bench::new(pool());
    let pool = pool_for_parts(&bench, Fallback::Register);
    let item = Item { remote_address: u64::MAX - MIB, ..bench.item(0, 2 * MIB) };
    let finished = bench.engines.near.put(&pool, &[item, bench.item(3 * MIB, 50)], staged()).unwrap();
    assert_eq!(codes(&finished), [Some(Code::AddressNotRegistered), None]);
}

#[test]
fn of_a_long_item_only_the_parts_that_have_failed_are_tried_again() {
    let bench = Bench::new(pool());
    let (near, far) = (&bench.engines.near, &bench.engines.far);
    let pool = pool_for_parts(&bench, Fallback::Register);
    bench.payload.write(&pattern(4 * MIB as usize, 2));
    let target = Memory::new(2 << 20);
    far.register(target.range(0, MIB), &rdma_tests::options()).unwrap();
    let item = Item { remote_address: target.range(0, 1).address(), ..bench.item(0, 2 * MIB) };
    let options = StagingOptions { retries: 3, retry_pause: Duration::from_millis(1), ..staged() };
    let posted = bench.fake.get(0, "posted");
    let finished = near.put(&pool, &[item], options).unwrap();
    assert_eq!(codes(&finished), [Some(Code::AddressNotRegistered)]);
    assert_eq!(
        (finished.statuses[0].state, finished.statuses[0].transferred_bytes),
        (State::Failed, MIB),
        "the first half is there"
    );
    // Two parts of four, three times each.
    let statistics = pool.statistics();
    assert_eq!((statistics.retried, statistics.items_staged, statistics.leases), (6, 1, 0));
    std::thread::scope(|scope| {
        let put = scope.spawn(|| near.put(&pool, &[item], StagingOptions { retries: 1_000_000, ..options }).unwrap());
        wait_until("it is tried again", || pool.statistics().retried > 8);
        far.register(target.range(MIB, MIB), &rdma_tests::options()).unwrap();
        let finished = put.join().unwrap();
        completed(&finished);
        assert_eq!(finished.statuses[0].transferred_bytes, 2 * MIB);
    });
    assert!(target.read()[..] == bench.payload.read()[..2 << 20]);
    assert!(bench.fake.get(0, "posted") > posted);
}

#[test]
fn a_long_item_for_which_there_is_no_room_is_registered_in_parts_or_fails_as_one() {
    let bench = Bench::new(pool());
    let near = &bench.engines.near;
    bench.payload.write(&pattern(4 * MIB as usize, 3));
    let fill = |pool: &Pool| while pool.acquire(Direction::Put, 256 << 10, Some(Duration::ZERO)).is_ok() {};
    let register = pool_for_parts(&bench, Fallback::Register);
    fill(&register);
    let regions = bench.regions();
    let finished = near.put(&register, &[bench.item(0, 2 * MIB)], staged()).unwrap();
    completed(&finished);
    assert_eq!(finished.statuses[0].transferred_bytes, 2 * MIB);
    let statistics = register.statistics();
    assert_eq!((statistics.items_direct, statistics.items_staged, statistics.fallbacks), (1, 0, 4));
    assert_eq!(bench.regions(), regions);
    assert!(bench.engines.theirs.read()[..2 << 20] == bench.payload.read()[..2 << 20]);

    let fail = pool_for_parts(&bench, Fallback::Fail);
    fill(&fail);
    let finished = near.put(&fail, &[bench.item(0, 2 * MIB)], staged()).unwrap();
    assert_eq!((codes(&finished), finished.statuses[0].transferred_bytes), (vec![Some(Code::Timeout)], 0));
}

#[test]
fn a_lease_is_not_lent_while_the_batch_runs_that_the_call_has_given_up() {
    let bench = Bench::new(pool());
    // Nothing runs, and what has failed stays queued until its queue pair is gone.
    bench.fake.set(0, "hold", 1);
    bench.fake.set(0, "flush", 0);
    let options = StagingOptions { deadline: within(Duration::from_millis(50)), retries: 5, ..staged() };
    let finished = bench.put(&[bench.item(0, 100), bench.item(200, 100)], options);
    assert_eq!(codes(&finished), [Some(Code::Timeout); 2]);
    assert_eq!(bench.pool.statistics().retried, 0);
    // By the end of the batch, without anybody's doing.
    wait_until("the lease is free", || bench.pool.statistics().leases == 0);
    bench.fake.set(0, "hold", 0);
    completed(&bench.put(&[bench.item(0, 100)], staged()));
}

#[test]
fn without_room_memory_is_registered_or_the_items_fail_or_the_call_waits() {
    let register = Bench::new(PoolOptions { fallback: Fallback::Register, ..pool() });
    let leases = register.fill_pool();
    let (registrations, regions) = (register.registrations(), register.regions());
    // All in one group, and each a range by itself.
    completed(&register.put(&[register.item(0, 100), register.item(200, 100), register.item(300, 50)], staged()));
    completed(&register.put(&[register.item(0, 100)], staged()));
    let statistics = register.pool.statistics();
    assert_eq!((statistics.fallbacks, statistics.registrations, statistics.items_direct), (2, 3, 4));
    assert_eq!((register.registrations() - registrations, register.regions()), (3, regions));
    register.release(leases);
    completed(&register.put(&[register.item(0, 100)], staged()));
    assert_eq!(register.pool.statistics().fallbacks, 2);

    let fail = Bench::new(PoolOptions { fallback: Fallback::Fail, ..pool() });
    let leases = fail.fill_pool();
    let finished = fail.put(&[fail.item(0, 100), fail.item(200, 100)], staged());
    assert_eq!(codes(&finished), [Some(Code::Timeout); 2]);
    assert!(finished.statuses[0].error.as_ref().unwrap().message().contains("no room for a lease of 200 bytes"), "{finished:?}");
    fail.release(leases);

    let wait = Bench::new(PoolOptions { fallback: Fallback::Wait, ..pool() });
    let leases = wait.fill_pool();
    let finished = wait.put(&[wait.item(0, 100)], StagingOptions { deadline: within(Duration::from_millis(20)), ..staged() });
    assert_eq!(codes(&finished), [Some(Code::Timeout)]);
    std::thread::scope(|scope| {
        let put = scope.spawn(|| wait.put(&[wait.item(0, 100)], staged()));
        wait_until("it waits", || wait.pool.statistics().waiting == 1);
        wait.release(leases);
        completed(&put.join().unwrap());
    });
    assert_eq!(wait.pool.statistics().registrations, 0);
}

#[test]
fn calls_that_wait_for_leases_do_not_wait_for_each_other() {
    // Room for two leases, whatever the direction, and each call needs many.
    let options = PoolOptions {
        fallback: Fallback::Wait,
        largest_lease: Some(MIB / 2),
        put_reserve: Some(0),
        get_reserve: Some(0),
        ..pool()
    };
    let bench = Bench::new(options);
    bench.engines.theirs.write(&pattern(4 << 20, 9));
    let leases = bench.fill_pool();
    std::thread::scope(|scope| {
        for thread in 0..8_u64 {
            let bench = &bench;
            scope.spawn(move || {
                let payload = Memory::new(4 << 20);
                payload.write(&pattern(4 << 20, 9));
                let item = |at: u64| bench.item_to(payload.range(at * 500_000, 450_000 - thread * 1000), at * 500_000);
                let items: Vec<Item> = (0..8).map(item).collect();
                for _ in 0..4 {
                    completed(&if thread % 2 == 0 { bench.put(&items, staged()) } else { bench.get(&items, staged()) });
                }
                assert!(payload.read() == pattern(4 << 20, 9));
            });
        }
        wait_until("all of them wait", || bench.pool.statistics().waiting == 8);
        bench.release(leases);
    });
    let statistics = bench.pool.statistics();
    assert_eq!((statistics.leases, statistics.registrations), (0, 0));
    assert!(bench.engines.theirs.read() == pattern(4 << 20, 9));
}

#[test]
fn a_pool_is_not_closed_under_a_call_that_has_no_lease() {
    let bench = Bench::new(pool());
    let near = &bench.engines.near;
    bench.fake.set(0, "hold", 1);
    std::thread::scope(|scope| {
        let posted = bench.fake.get(0, "posted");
        let put = scope.spawn(|| bench.put(&[bench.item(0, MIB)], direct()));
        wait_until("it is under way", || bench.fake.get(0, "posted") > posted);
        assert_eq!(near.close_pool(&bench.pool, Some(Duration::ZERO)).unwrap_err().code(), Code::BatchBusy);
        let error = near.close_pool(&bench.pool, Some(Duration::from_millis(5))).unwrap_err();
        assert!(error.message().contains("have not returned: 1"), "{error}");
        let close = scope.spawn(|| near.close_pool(&bench.pool, None));
        wait_until("it is closing", || near.put(&bench.pool, &[], staged()).is_err_and(|error| error.code() == Code::Canceled));
        bench.fake.set(0, "hold", 0);
        completed(&put.join().unwrap());
        close.join().unwrap().unwrap();
    });
    assert_eq!(near.put(&bench.pool, &[], staged()).unwrap_err().code(), Code::InvalidHandle);
}

#[test]
fn an_engine_that_ends_ends_its_puts_and_leaves_nothing_behind() {
    let bench = Bench::new(PoolOptions { fallback: Fallback::Wait, ..pool() });
    bench.fake.set(0, "hold", 1);
    std::thread::scope(|scope| {
        let posted = bench.fake.get(0, "posted");
        let bench = &bench;
        let items = [bench.item(0, MIB), bench.item(MIB, 100)];
        let moving = scope.spawn(move || bench.put(&items, StagingOptions { retries: 9, ..staged() }));
        wait_until("both are under way", || bench.fake.get(0, "posted") > posted + 1);
        let leases = bench.fill_pool();
        let waiting = scope.spawn(|| bench.put(&[bench.item(0, 100)], staged()));
        wait_until("it waits", || bench.pool.statistics().waiting == 1);
        // One that sleeps before its retry.
        let mut gone = bench.item(0, 0);
        gone.remote_address = 8;
        gone.local = bench.engines.ours.range(0, 8);
        let options = StagingOptions { retries: 9, retry_pause: Duration::from_secs(3600), ..staged() };
        let sleeping = scope.spawn(move || bench.put(&[gone], options));
        wait_until("it is about to be moved", || bench.pool.statistics().items_zero_copy == 1);
        bench.engines.near.shutdown();
        for finished in [moving.join().unwrap(), waiting.join().unwrap()] {
            assert!(codes(&finished).iter().all(|code| *code == Some(Code::Canceled)), "{finished:?}");
        }
        assert_ne!(codes(&sleeping.join().unwrap()), [None]);
        assert!(leases.len() > 4);
    });
    let Bench { fake, engines, pool, .. } = bench;
    let error = engines.near.put(&pool, &[], staged()).unwrap_err();
    assert_eq!(error.code(), Code::Canceled);
    fake.set(0, "hold", 0);
    drop((engines, pool));
    wait_until("everything is destroyed", || live(&fake) == [0; 6]);
}

#[test]
fn a_lease_of_what_was_got_is_the_callers() {
    let bench = Bench::new(pool());
    let near = &bench.engines.near;
    bench.engines.theirs.write(&pattern(4 << 20, 10));
    let item = |offset: u64, length| LeasedItem {
        length,
        segment: bench.engines.segment,
        remote_address: bench.engines.theirs.range(offset, length).address(),
    };
    let (finished, lease) = near.get_leased(&bench.pool, &[item(1000, 70), item(0, 0), item(3, 500)], staged()).unwrap();
    completed(&finished);
    let lease = lease.unwrap();
    let mut expected = pattern(4 << 20, 10)[1000..1070].to_vec();
    expected.extend_from_slice(&pattern(4 << 20, 10)[3..503]);
    let copy = Memory::new(570);
    crate::sys::memory::copy(copy.range(0, 570), lease.memory);
    assert!(copy.read()[..570] == expected);
    assert_eq!(bench.pool.statistics().leases, 1);
    bench.pool.release(lease.id, Outcome::Over).unwrap();
    // One that fails keeps no lease.
    let mut gone = item(0, 8);
    gone.remote_address = 8;
    let (finished, lease) = near.get_leased(&bench.pool, &[item(0, 8), gone], staged()).unwrap();
    assert_eq!((codes(&finished), lease), (vec![None, Some(Code::AddressNotRegistered)], None));
    assert_eq!(bench.pool.statistics().leases, 0);
    for (items, expected) in [
        (vec![item(0, LARGEST), item(0, 1)], Code::InvalidArgument),
        (vec![], Code::InvalidArgument),
        (vec![LeasedItem { segment: 4711, ..item(0, 8) }], Code::InvalidHandle),
    ] {
        assert_eq!(near.get_leased(&bench.pool, &items, staged()).unwrap_err().code(), expected);
    }
    let leases: Vec<_> = std::iter::from_fn(|| bench.pool.acquire(Direction::Get, LARGEST, Some(Duration::ZERO)).ok()).collect();
    assert_eq!(near.get_leased(&bench.pool, &[item(0, 8)], staged()).unwrap_err().code(), Code::Timeout);
    bench.release(leases);
}

#[test]
fn both_ways_are_tried_where_either_is_possible() {
    let bench = Bench::new(pool());
    let (staged, registrations) = (bench.pool.statistics().items_staged, bench.registrations());
    for _ in 0..2 {
        completed(&bench.put(&[bench.item(0, 1000), bench.item(1000, 1000)], StagingOptions::default()));
    }
    let statistics = bench.pool.statistics();
    assert_eq!((statistics.items_staged - staged, statistics.items_direct), (2, 2), "one call each");
    assert_eq!(bench.registrations() - registrations, 1);
}
