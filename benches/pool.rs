//! What a pool costs beside the transfers. A lease, acquired and released by the functions of `te.h`: alone, beside other leases, and by four
//! threads at a time. Copies of pieces into a lease, beside `memcpy` of the same bytes at once.
//!
//! `cargo bench --bench pool`; only the copies with `-- copies`. All times are CPU time of the thread, so that other work on the machine
//! disturbs less; of four threads, their mean.
#![allow(unsafe_code, missing_docs)]

use std::ptr;
use std::time::Duration;

use criterion::{Criterion, criterion_group};
use transfer_engine::capi::te::engine::{te_engine, te_engine_create, te_engine_destroy, te_engine_options};
use transfer_engine::capi::te::pool::{
    TE_POOL_OVER, TE_POOL_PUT, te_pool, te_pool_acquire, te_pool_close, te_pool_create, te_pool_lease, te_pool_release,
};
use transfer_engine::pool::copy;
use transfer_engine::sys::MemoryRange;
use transfer_engine::sys::arena::Arena;

#[derive(Clone, Copy)]
struct Pool(*mut te_pool);

// SAFETY: the pointer is a key, which any thread may use.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    fn acquire(self, bytes: u64) -> u64 {
        let mut lease = te_pool_lease {
            struct_size: size_of::<te_pool_lease>(),
            direction: TE_POOL_PUT,
            reserved: 0,
            id: 0,
            addr: ptr::null_mut(),
            length: 0,
        };
        // SAFETY: the struct has its size.
        assert_eq!(unsafe { te_pool_acquire(self.0, bytes, -1, &raw mut lease) }, 0);
        lease.id
    }

    fn release(self, lease: u64) {
        // SAFETY: passes numbers.
        assert_eq!(unsafe { te_pool_release(self.0, lease, TE_POOL_OVER, 0) }, 0);
    }

    /// What so many pairs take.
    fn pairs(self, count: u64) -> Duration {
        let started = cpu_time();
        (0..count).for_each(|_| self.release(self.acquire(4096)));
        cpu_time() - started
    }
}

fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the argument may be written.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn all(criterion: &mut Criterion) {
    let mut engine: *mut te_engine = ptr::null_mut();
    let options = te_engine_options {
        struct_size: size_of::<te_engine_options>(),
        metadata: ptr::null(),
        server_name: c"127.0.0.1".as_ptr(),
        transport: ptr::null(),
        topology: ptr::null(),
        nics: ptr::null(),
        nic_count: 0,
        topology_handle: ptr::null_mut(),
    };
    let mut pool = Pool(ptr::null_mut());
    // SAFETY: the struct has its size, and the outputs are places for pointers.
    unsafe {
        assert_eq!(te_engine_create(&raw const options, &raw mut engine), 0);
        assert_eq!(te_pool_create(engine, ptr::null(), &raw mut pool.0), 0);
    }
    criterion.bench_function("acquire and release", |bencher| {
        bencher.iter_custom(|count| pool.pairs(count));
    });
    let others: Vec<_> = (0..700).map(|_| pool.acquire(4096)).collect();
    // Every other one, so that there are as many gaps.
    let (gaps, kept): (Vec<_>, Vec<_>) = others.into_iter().enumerate().partition(|(index, _)| index % 2 == 0);
    gaps.into_iter().for_each(|(_, lease)| pool.release(lease));
    criterion.bench_function("acquire and release, 350 gaps", |bencher| {
        bencher.iter_custom(|count| pool.pairs(count));
    });
    kept.into_iter().for_each(|(_, lease)| pool.release(lease));
    criterion.bench_function("acquire and release, each of 4 threads", |bencher| {
        bencher.iter_custom(|count| {
            std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| pool.pairs(count))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).sum::<Duration>() / 4
            })
        });
    });
    // SAFETY: passes a key.
    assert_eq!(unsafe { te_pool_close(pool.0, 0) }, 0);
    // SAFETY: as above.
    assert_eq!(unsafe { te_engine_destroy(engine) }, 0);
}

/// More than the caches have.
const ARENA: u64 = 512 << 20;
/// What is copied in a round of each way.
const ROUND: u64 = 64 << 20;
const ROUNDS: u64 = 11;

/// A way to fill a lease: the lease, and memory of the same length that has what is to go there.
type Way = fn(MemoryRange, MemoryRange);

fn memcpy(lease: MemoryRange, source: MemoryRange) {
    // SAFETY: both are parts of the arenas of `copies`.
    unsafe { ptr::copy_nonoverlapping(source.address() as *const u8, lease.address() as *mut u8, lease.length() as usize) }
}

/// In pieces of the lengths that come in turn, and the rest.
fn gather_pieces(lease: MemoryRange, source: MemoryRange, lengths: &[u64]) {
    let (mut pieces, mut offset) = (Vec::with_capacity((lease.length() >> 11) as usize + 1), 0);
    for length in lengths.iter().cycle() {
        let length = (*length).min(source.length() - offset);
        pieces.push(source.part(offset, length).unwrap());
        offset += length;
        if offset == source.length() {
            break;
        }
    }
    copy::gather(lease, &pieces);
}

const WAYS: [(&str, Way); 5] = [
    ("memcpy", memcpy),
    ("whole", |lease, source| copy::gather(lease, &[source])),
    ("pieces of 4 KiB", |lease, source| gather_pieces(lease, source, &[4096])),
    ("ragged, 40 KiB", |lease, source| gather_pieces(lease, source, &[20_001, 100_003, 17_000, 33_333])),
    ("ragged, 5 KiB", |lease, source| gather_pieces(lease, source, &[5001, 64, 12_345, 1, 4095, 8192])),
];

/// Reads as a device would whose DMA is done by the processor.
fn read(memory: MemoryRange) {
    let mut buffer = [0_u8; 16 << 10];
    for offset in (0..memory.length()).step_by(buffer.len()) {
        let length = (memory.length() - offset).min(buffer.len() as u64);
        // SAFETY: the range is a part of an arena of `copies`, and the buffer is long enough.
        unsafe { ptr::copy_nonoverlapping((memory.address() + offset) as *const u8, buffer.as_mut_ptr(), length as usize) };
        std::hint::black_box(&buffer);
    }
}

/// GB/s of each way, in turn in each round: to leases that are in no cache and to one that is used again and again, with and without somebody
/// who reads it then. The sources are in no cache.
fn copies() {
    let [target, source] = [(); 2].map(|()| Arena::map(ARENA, None).unwrap());
    for arena in [&target, &source] {
        // SAFETY: the mapping is ours.
        unsafe { ptr::write_bytes(arena.range().address() as *mut u8, 1, ARENA as usize) };
    }
    for bytes in [12, 14, 16, 18, 20, 22, 23, 24, 26].map(|exponent| 1_u64 << exponent) {
        for is_hot in [false, true] {
            let mut rates = [const { (Vec::new(), Vec::new()) }; WAYS.len()];
            for round in 0..ROUNDS {
                for (at, (_, way)) in WAYS.into_iter().enumerate() {
                    let (mut copied, mut used) = (Duration::ZERO, Duration::ZERO);
                    // Some at a time: the clock takes longer than a short copy.
                    let (count, batch) = (ROUND / bytes, (1_u64 << 20).div_ceil(bytes));
                    let begin = (round * WAYS.len() as u64 + at as u64) * ROUND;
                    let offset = |number| (begin + number * bytes) % ARENA;
                    let part = |offset| source.range().part(offset, bytes).unwrap();
                    let lease = |number| {
                        let offset = if is_hot { 0 } else { (offset(number) + ARENA / 2) % ARENA };
                        target.range().part(offset, bytes).unwrap()
                    };
                    for first in (0..count).step_by(batch as usize) {
                        let numbers = first..first + batch;
                        let started = cpu_time();
                        numbers.clone().for_each(|number| way(lease(number), part(offset(number))));
                        copied += cpu_time() - started;
                        numbers.for_each(|number| read(lease(number)));
                        used += cpu_time() - started;
                    }
                    let rate = |spent: Duration| ROUND as f64 / spent.as_nanos() as f64;
                    rates[at].0.push(rate(copied));
                    rates[at].1.push(rate(used));
                }
            }
            let show = |rates: &mut Vec<f64>| {
                rates.sort_by(f64::total_cmp);
                format!("{:.1} ({:.1}..{:.1})", rates[rates.len() / 2], rates[0], rates[rates.len() - 1])
            };
            for ((name, _), (copied, used)) in WAYS.iter().zip(&mut rates) {
                let kind = if is_hot { "used again" } else { "cold" };
                println!("| {} KiB | {kind} | {name} | {} | {} |", bytes >> 10, show(copied), show(used));
            }
        }
    }
}

criterion_group! {
    name = pool;
    config = Criterion::default().sample_size(20).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(2));
    targets = all
}

fn main() {
    println!("| bytes | lease | | copy, GB/s | copy and read, GB/s |\n|---|---|---|---|---|");
    copies();
    if !std::env::args().any(|argument| argument == "copies") {
        pool();
    }
}
