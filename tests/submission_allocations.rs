//! What submitting over RDMA allocates, counted: how often must not depend on how much is submitted, and a request must not take more memory
//! than it needs, for pages that are touched first are what large submissions wait for. And that leases of a pool allocate nothing: an
//! allocation takes as long as half of what a lease may.
#![allow(unsafe_code, missing_docs)]

#[path = "fake_verbs/compile.rs"]
mod compile;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use transfer_engine::capi::te::engine::{te_engine, te_engine_create, te_engine_destroy, te_engine_options};
use transfer_engine::capi::te::pool::{
    TE_POOL_OVER, TE_POOL_PUT, te_pool, te_pool_acquire, te_pool_close, te_pool_create, te_pool_lease, te_pool_release,
};
use transfer_engine::config::Config;
use transfer_engine::engine::{Engine, EngineOptions, MemoryOptions};
use transfer_engine::sys::MemoryRange;
use transfer_engine::transfer::{Hints, Request, State, SubmitOptions};
use transfer_engine::transport::Opcode;

thread_local! {
    /// Calls and bytes of this thread: those of NICs and connections allocate when they like.
    static ALLOCATED: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

struct Counting;

fn count(bytes: usize) {
    let _ = ALLOCATED.try_with(|allocated| allocated.set((allocated.get().0 + 1, allocated.get().1 + bytes)));
}

// SAFETY: all calls are passed on.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        // SAFETY: as the caller promised.
        unsafe { System.realloc(pointer, layout, size) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 64;
/// A page between two regions: they do not touch.
const STRIDE: u64 = (BLOCKS + 1) * BLOCK;
const REGIONS: u64 = 256;

fn engine(config: &Config, nic: &str) -> Arc<Engine> {
    let options = EngineOptions { metadata: "P2PHANDSHAKE".into(), server_name: "127.0.0.1".into(), ..EngineOptions::default() };
    let engine = Engine::create(&options, config.clone()).unwrap();
    engine.install_transport("rdma", Some(&format!("{{\"cpu:0\": [[\"{nic}\"], []]}}"))).unwrap();
    engine
}

/// Registers memory of the engine's own, and answers where it begins.
fn register(engine: &Engine) -> u64 {
    let memory = vec![0u8; (REGIONS * STRIDE + BLOCK) as usize].leak();
    let start = (memory.as_ptr() as u64).next_multiple_of(BLOCK);
    let options =
        MemoryOptions { location: "cpu:0".into(), remote_accessible: true, counted: false, parallelism: None, publish: true };
    for region in 0..REGIONS {
        engine.register(range(start + region * STRIDE, BLOCKS * BLOCK), &options).unwrap();
    }
    start
}

fn range(start: u64, length: u64) -> MemoryRange {
    // SAFETY: memory that is never freed, and only the engines use.
    unsafe { MemoryRange::new(start, length) }.unwrap()
}

#[test]
fn a_submission_allocates_as_often_whatever_its_length() {
    let mut config = Config::default();
    config.rdma.library = compile::compile(Path::new(env!("CARGO_TARGET_TMPDIR")));
    let (near, far) = (engine(&config, "fake0"), engine(&config, "fake1"));
    let (ours, theirs) = (register(&near), register(&far));
    let segment = near.open_segment(&far.name()).unwrap();
    let submit = |count: u64, region: &dyn Fn(u64) -> u64| {
        let requests: Vec<Request> = (0..count)
            .map(|at| {
                let offset = region(at) * STRIDE + at % BLOCKS * BLOCK;
                let (local, remote_address) = (range(ours + offset, BLOCK), theirs + offset);
                Request { opcode: Opcode::Write, local, segment, remote_address, hints: Hints::default() }
            })
            .collect();
        let batch = near.allocate_batch(count as usize).unwrap();
        let before = ALLOCATED.get();
        near.submit(&batch, &requests, None, SubmitOptions::default()).unwrap();
        let after = ALLOCATED.get();
        assert!(batch.wait(Some(Duration::from_secs(60))));
        assert_eq!(batch.status().state, State::Completed);
        near.free_batch(batch.id()).unwrap();
        (after.0 - before.0, (after.1 - before.1) as u64 / count)
    };
    let (in_turn, in_runs): (&dyn Fn(u64) -> u64, &dyn Fn(u64) -> u64) = (&|at| at % REGIONS, &|at| at / BLOCKS % REGIONS);
    // Connects, and fills what is kept from one submission to the next.
    for _ in 0..3 {
        submit(4096, in_turn);
    }
    let (few, _) = submit(256, in_turn);
    for count in [1024, 16_384, 131_072] {
        for region in [in_turn, in_runs] {
            let (calls, bytes) = submit(count, region);
            // What is kept for work that is posted may still grow a little: the NIC's thread may have taken completions before.
            assert!(calls <= few + 4, "{count} requests make {calls} calls, 256 make {few}");
            // 128 to 130, and at 1024 requests some 16 more for the guards of 256 regions, and 18 for the ways between them.
            assert!(bytes <= 170, "{count} requests take {bytes} bytes each");
        }
    }
    assert!(few <= 40, "{few} calls");
    near.shutdown();
    far.shutdown();
}

#[test]
fn a_warm_lease_allocates_nothing() {
    // SAFETY: all zeros are a valid value of each of the structs, and each has its size and outlives the calls; outputs are places for their values.
    unsafe {
        let mut options: te_engine_options = std::mem::zeroed();
        (options.struct_size, options.server_name) = (size_of::<te_engine_options>(), c"127.0.0.1".as_ptr());
        let (mut engine, mut pool): (*mut te_engine, *mut te_pool) = (std::ptr::null_mut(), std::ptr::null_mut());
        assert_eq!(te_engine_create(&raw const options, &raw mut engine), 0);
        assert_eq!(te_pool_create(engine, std::ptr::null(), &raw mut pool), 0);
        let pair = || {
            let mut lease: te_pool_lease = std::mem::zeroed();
            (lease.struct_size, lease.direction) = (size_of::<te_pool_lease>(), TE_POOL_PUT);
            assert_eq!(te_pool_acquire(pool, 4096, 0, &raw mut lease), 0);
            assert_eq!(te_pool_release(pool, lease.id, TE_POOL_OVER, 0), 0);
        };
        pair();
        let before = ALLOCATED.get();
        (0..100).for_each(|_| pair());
        assert_eq!(ALLOCATED.get(), before);
        assert_eq!(te_pool_close(pool, 0), 0);
        assert_eq!(te_engine_destroy(engine), 0);
    }
}
