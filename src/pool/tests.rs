//! Pools without an engine: how options become a layout, and leases memory.

use super::*;

const MIB: u64 = 1 << 20;

fn layout(bytes: u64, options: PoolOptions) -> Result<Layout> {
    Layout::new(&options, bytes)
}

fn parts(layout: &Layout) -> [u64; 3] {
    layout.shares.map(|share| u64::from(share.units) * layout.alignment)
}

fn code<T>(result: Result<T>) -> Option<Code> {
    result.err().map(|error| error.code())
}

fn acquire(pool: &Pool, direction: Direction, bytes: u64) -> Result<Lease> {
    pool.acquire(direction, bytes, Some(Duration::ZERO))
}

#[test]
fn defaults_follow_from_the_arena_and_the_workers() {
    let default = layout(64 * MIB, PoolOptions::default()).unwrap();
    assert_eq!((default.alignment, default.largest_lease), (256, 8 * MIB));
    assert_eq!(parts(&default), [48 * MIB, 8 * MIB, 8 * MIB]);
    assert_eq!(default.shares.map(|share| share.leases), [768, 128, 128]);
    // One worker has half of it, and a quarter is all that can be kept for either direction then.
    let one = layout(64 * MIB, PoolOptions { workers: NonZeroU32::new(1), ..Default::default() }).unwrap();
    assert_eq!((one.largest_lease, parts(&one)), (32 * MIB, [32 * MIB, 16 * MIB, 16 * MIB]));
    let whole = layout(64 * MIB, PoolOptions { largest_lease: Some(64 * MIB), ..Default::default() }).unwrap();
    assert_eq!(parts(&whole), [64 * MIB, 0, 0]);
    let put_only = PoolOptions { get_reserve: Some(0), put_reserve: Some(MIB), ..Default::default() };
    assert_eq!(parts(&layout(64 * MIB, put_only).unwrap()), [63 * MIB, MIB, 0]);
    let odd = PoolOptions { largest_lease: Some(1000), put_reserve: Some(1), ..Default::default() };
    let odd = layout(MIB + 100, odd).unwrap();
    assert_eq!((odd.largest_lease, parts(&odd)[1]), (1000, 256));
    for (bytes, leases) in [(256, None), (1, Some(1)), (4096, Some(2)), (4096, Some(3)), (u64::from(u32::MAX) * 256, None)] {
        let alignment = (bytes == 1).then_some(1);
        let least = layout(bytes, PoolOptions { most_leases: leases, alignment, ..Default::default() }).unwrap();
        assert_eq!(parts(&least).iter().sum::<u64>(), bytes);
        assert!(parts(&least)[0] >= least.largest_lease && least.largest_lease > 0);
        assert_eq!(least.shares.iter().map(|share| share.leases).sum::<u32>(), leases.unwrap_or(1024));
    }
}

#[test]
fn options_that_contradict_each_other_are_refused() {
    let none = PoolOptions::default;
    for (bytes, options) in [
        (MIB, PoolOptions { alignment: Some(3), ..none() }),
        (MIB, PoolOptions { alignment: Some(8192), ..none() }),
        (MIB, PoolOptions { most_leases: Some(MOST_LEASES + 1), ..none() }),
        (MIB, PoolOptions { most_leases: Some(2), put_reserve: Some(1), get_reserve: Some(1), ..none() }),
        (MIB, PoolOptions { largest_lease: Some(MIB + 1), ..none() }),
        (MIB, PoolOptions { largest_lease: Some(u64::MAX), ..none() }),
        (MIB, PoolOptions { largest_lease: Some(MIB / 2), put_reserve: Some(MIB / 2), get_reserve: Some(1), ..none() }),
        (MIB, PoolOptions { put_reserve: Some(u64::MAX), ..none() }),
        (MIB, PoolOptions { put_reserve: Some(u64::MAX), get_reserve: Some(u64::MAX), ..none() }),
        (255, none()),
        (0, none()),
        (1 << 40, none()),
        (u64::MAX, none()),
    ] {
        assert_eq!(code(layout(bytes, options.clone())), Some(Code::InvalidArgument), "{bytes} {options:?}");
    }
}

#[test]
fn only_memory_of_the_host_is_lent() {
    for location in ["cuda:0", "", "cpu:", "cpu:-1", "cpu:x", "segments:1:0"] {
        let options = PoolOptions { bytes: Some(MIB), location: Some(location.into()), ..Default::default() };
        assert_eq!(code(Pool::new(&options)), Some(Code::InvalidArgument), "{location}");
    }
    let options = PoolOptions { bytes: Some(MIB), location: Some("cpu:4000000000".into()), ..Default::default() };
    assert_eq!(code(Pool::new(&options)), Some(Code::DeviceNotFound));
}

#[test]
fn leases_are_aligned_parts_of_the_arena_that_do_not_meet() {
    let pool = Pool::new(&PoolOptions { bytes: Some(MIB), ..Default::default() }).unwrap();
    let arena = pool.arena();
    let mut leases: Vec<Lease> = Vec::new();
    for round in 0.. {
        let direction = [Direction::Put, Direction::Get, Direction::Any][round % 3];
        let bytes = 1 + round as u64 * 977 % (32 << 10);
        let Ok(lease) = acquire(&pool, direction, bytes) else { break };
        assert_eq!((lease.memory.length(), lease.memory.address() % 256), (bytes, 0));
        assert!(arena.contains(lease.memory.address(), bytes));
        assert!(leases.iter().all(|other| !other.memory.intersects(&lease.memory)));
        leases.push(lease);
    }
    assert!(leases.len() > 20);
    let statistics = pool.statistics();
    assert_eq!((statistics.leases, statistics.acquired), (leases.len() as u64, leases.len() as u64));
    assert_eq!(statistics.leased_bytes, leases.iter().map(|lease| lease.memory.length().next_multiple_of(256)).sum::<u64>());
    leases.iter().for_each(|lease| pool.release(lease.id, Outcome::Over).unwrap());
    assert_eq!(pool.statistics().leased_bytes, 0);
    assert_eq!(pool.statistics().most_leased_bytes, statistics.leased_bytes);
}

#[test]
fn what_can_never_be_lent_is_told_apart_from_what_cannot_be_lent_now() {
    let pool = Pool::new(&PoolOptions { bytes: Some(MIB), ..Default::default() }).unwrap();
    let largest = pool.statistics().largest_lease;
    for bytes in [0, largest + 1, u64::MAX] {
        assert_eq!(code(pool.acquire(Direction::Put, bytes, None)), Some(Code::InvalidArgument), "{bytes}");
    }
    let held: Vec<_> = std::iter::from_fn(|| acquire(&pool, Direction::Put, largest).ok()).collect();
    let error = acquire(&pool, Direction::Put, largest).unwrap_err();
    assert_eq!(error.code(), Code::Timeout);
    assert!(error.message().contains(&format!("leases out: {},", held.len())), "{error}");
    assert_eq!(code(pool.acquire(Direction::Put, largest, Some(Duration::from_millis(1)))), Some(Code::Timeout));
    assert_eq!(pool.statistics().refused, 3);
}

#[test]
fn a_lease_of_another_pool_and_one_that_was_released_are_refused() {
    let options = PoolOptions { bytes: Some(MIB), ..Default::default() };
    let (pool, other) = (Pool::new(&options).unwrap(), Pool::new(&options).unwrap());
    let lease = acquire(&pool, Direction::Any, 1).unwrap();
    let foreign = acquire(&other, Direction::Any, 1).unwrap();
    for id in [foreign.id, 0, u64::MAX, lease.id + 1, lease.id ^ 1 << 40] {
        assert_eq!(code(pool.release(id, Outcome::Over)), Some(Code::InvalidHandle), "{id:#x}");
    }
    pool.release(lease.id, Outcome::Over).unwrap();
    let next = acquire(&pool, Direction::Any, 1).unwrap();
    assert_eq!(next.memory, lease.memory);
    assert_eq!(code(pool.release(lease.id, Outcome::Over)), Some(Code::InvalidHandle), "its successor is at the same place");
    pool.release(next.id, Outcome::Over).unwrap();
    other.release(foreign.id, Outcome::Over).unwrap();
}

#[test]
fn trimming_gives_back_what_is_free_and_leaves_leases_alone() {
    let pool = Pool::new(&PoolOptions { bytes: Some(MIB), alignment: Some(4096), ..Default::default() }).unwrap();
    let lease = acquire(&pool, Direction::Put, 8192).unwrap();
    crate::sys::memory::store_checked(lease.memory, &[7; 8192]).unwrap();
    assert_eq!(pool.trim(), MIB - 8192);
    let mut seen = [0_u8; 8192];
    // SAFETY: the bytes are the test's own.
    #[allow(unsafe_code)]
    let target = unsafe { MemoryRange::new(seen.as_mut_ptr() as u64, 8192) }.unwrap();
    crate::sys::memory::copy_checked(target, lease.memory).unwrap();
    assert_eq!(seen, [7; 8192]);
    assert!(acquire(&pool, Direction::Any, pool.statistics().largest_lease).is_ok());
    let given = Pool::new(&PoolOptions { arena: Some(pool.arena()), ..Default::default() }).unwrap();
    assert_eq!(given.trim(), 0);
}
