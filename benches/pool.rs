//! A lease, acquired and released by the functions of `te.h`: alone, beside other leases, and by four threads at a time.
//!
//! `cargo bench --bench pool`. All times are CPU time of the thread, so that other work on the machine disturbs less; of four threads, their mean.
#![allow(unsafe_code, missing_docs)]

use std::ptr;
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use transfer_engine::capi::te::engine::{te_engine, te_engine_create, te_engine_destroy, te_engine_options};
use transfer_engine::capi::te::pool::{
    TE_POOL_OVER, TE_POOL_PUT, te_pool, te_pool_acquire, te_pool_close, te_pool_create, te_pool_lease, te_pool_release,
};

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

criterion_group! {
    name = pool;
    config = Criterion::default().sample_size(20).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(2));
    targets = all
}
criterion_main!(pool);
