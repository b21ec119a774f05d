//! What the engine costs where the NIC costs next to nothing: on the verbs library of `tests/fake_verbs`, which does a NIC's checks and copies
//! no bytes.
//!
//! `cargo bench --bench rdma` (1 min); behind `--`, a number sets the rounds (9) and `submit` or `register` asks for one part. It compiles the
//! library itself, with `$CC` or `cc`.
//!
//! *Submitting*: 200,000 writes of 4 KiB between 256 regions here and as many at the peer, by `te_batch_submit` in batches of some size; each
//! batch is polled to its end and freed. `submit` is the clock's time inside of `te_batch_submit`, `verbs in it` what of that passes in
//! `ibv_post_send`, and `engine` the rest. `all CPU` is the process's from creating the batch to freeing it, of all threads,
//! the verbs library's share and what building the requests takes included. *In turn*: each request is in another region than the one before.
//! *In runs*: all requests of a region come one after the other. *Fresh*: the array of requests is allocated and built for each batch; *reused*: the
//! same array is passed each time.
//!
//! *Registering*: 512 regions of 4 KiB are registered and unregistered one by one beside so many others. `engine` is the clock's time without
//! what passes in `ibv_reg_mr` and `ibv_dereg_mr` of all devices.
//!
//! Rows take turns within a round. Figures are medians with the smallest and largest of all rounds.
#![allow(unsafe_code, missing_docs)]

#[path = "../tests/fake_verbs/compile.rs"]
mod compile;

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_void};
use std::path::Path;
use std::ptr::{null, null_mut};
use std::time::{Duration, Instant};

use transfer_engine::capi::te::batch::{te_batch_create, te_batch_free, te_batch_poll, te_batch_status, te_batch_submit};
use transfer_engine::capi::te::engine::{
    te_engine, te_engine_address, te_engine_create, te_engine_destroy, te_engine_options, te_install_transport,
};
use transfer_engine::capi::te::memory::{te_memory_options, te_register_local_memory, te_unregister_local_memory};
use transfer_engine::capi::te::segment::te_open_segment;
use transfer_engine::capi::te::status::te_last_error;
use transfer_engine::capi::te::transfer::te_transfer_request;

const REQUESTS: usize = 200_000;
const REGIONS: usize = 256;
const BLOCK: usize = 4096;
/// In each region.
const BLOCKS: usize = 64;
const BATCHES: [usize; 3] = [128, 1024, REQUESTS];

const LIVE: [usize; 5] = [256, 1024, 4096, 8192, 65_536];
const DEVICES: [usize; 3] = [1, 2, 4];
/// Registered and unregistered again.
const MORE: usize = 512;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let rounds = words.iter().find_map(|word| word.parse().ok()).unwrap_or(9);
    let is_wanted =
        |part: &str| words.iter().all(|word| word != "submit" && word != "register") || words.iter().any(|word| word == part);
    let verbs = Verbs::load();
    if is_wanted("submit") {
        submitting(&verbs, rounds);
    }
    if is_wanted("register") {
        registering(&verbs, rounds);
    }
}

/// The fake verbs library.
struct Verbs {
    get: unsafe extern "C" fn(c_int, *const c_char) -> c_long,
}

impl Verbs {
    /// Compiles it and has engines use it.
    fn load() -> Verbs {
        let library = compile::compile(Path::new(env!("CARGO_TARGET_TMPDIR")));
        let name = CString::new(library.to_str().unwrap()).unwrap();
        // SAFETY: there are no other threads yet; the functions of the library have these types.
        unsafe {
            std::env::set_var("TE_LIBIBVERBS", &library);
            let handle = libc::dlopen(name.as_ptr(), libc::RTLD_NOW);
            assert!(!handle.is_null(), "the fake verbs library cannot be loaded");
            let find = |name: &CStr| libc::dlsym(handle, name.as_ptr());
            let set = std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int, *const c_char, c_long) -> c_int>(find(
                c"fake_verbs_set",
            ));
            for (name, value) in [(c"devices", *DEVICES.iter().max().unwrap() as c_long), (c"copy", 0), (c"timed", 1)] {
                assert_eq!(set(-1, name.as_ptr(), value), 0, "{name:?}");
            }
            Verbs {
                get: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int, *const c_char) -> c_long>(find(
                    c"fake_verbs_get",
                )),
            }
        }
    }

    /// What calls for work have taken so far on the first device.
    fn work(&self) -> Duration {
        // SAFETY: a C string.
        Duration::from_nanos(unsafe { (self.get)(0, c"work_ns".as_ptr()) } as u64)
    }

    /// What calls for memory have taken so far on all devices.
    fn memory(&self) -> Duration {
        // SAFETY: a C string.
        Duration::from_nanos(unsafe { (self.get)(-1, c"memory_ns".as_ptr()) } as u64)
    }
}

fn check(status: c_int) {
    // SAFETY: the text is there until the next call.
    assert_eq!(status, 0, "{}", unsafe { CStr::from_ptr(te_last_error()) }.to_string_lossy());
}

/// An engine with NICs of the fake library.
struct Engine(*mut te_engine);

impl Engine {
    fn new(devices: impl Iterator<Item = usize>) -> Engine {
        let options = te_engine_options {
            struct_size: size_of::<te_engine_options>(),
            metadata: null(),
            server_name: c"127.0.0.1".as_ptr(),
            transport: c"".as_ptr(),
            topology: null(),
            nics: null(),
            nic_count: 0,
            topology_handle: null_mut(),
        };
        let names: Vec<String> = devices.map(|device| format!("\"fake{device}\"")).collect();
        let matrix = CString::new(format!("{{\"cpu:0\": [[{}], []]}}", names.join(", "))).unwrap();
        let mut engine = null_mut();
        // SAFETY: the options are complete, and the texts end with a NUL.
        unsafe {
            check(te_engine_create(&options, &mut engine));
            check(te_install_transport(engine, c"rdma".as_ptr(), matrix.as_ptr()));
        }
        Engine(engine)
    }

    fn register(&self, address: usize, length: usize) {
        let options = te_memory_options {
            struct_size: size_of::<te_memory_options>(),
            location: c"cpu:0".as_ptr(),
            access: 0,
            publish: 0,
            count_references: 0,
            parallel: 0,
        };
        // SAFETY: the memory is mapped as long as the process lives, and nobody else uses it.
        check(unsafe { te_register_local_memory(self.0, address as *mut c_void, length, &options) });
    }

    fn unregister(&self, address: usize) {
        // SAFETY: an address is only looked up.
        check(unsafe { te_unregister_local_memory(self.0, address as *mut c_void) });
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // SAFETY: the engine is there, and destroyed once.
        check(unsafe { te_engine_destroy(self.0) });
    }
}

/// Memory that is never touched, for as long as the process lives.
fn map(length: usize) -> usize {
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
    // SAFETY: a new mapping.
    let start = unsafe { libc::mmap(null_mut(), length, access, flags, -1, 0) };
    assert_ne!(start, libc::MAP_FAILED);
    start as usize
}

/// Processor time of all threads.
fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the argument may be written.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Median, smallest and largest of the rounds.
fn spread(values: impl Iterator<Item = f64>) -> String {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let digits = if values[values.len() / 2] < 10.0 { 2 } else { 0 };
    let last = values.len() - 1;
    format!("{:.digits$} ({:.digits$}..{:.digits$})", values[last / 2], values[0], values[last])
}

fn print_row(cells: &[String]) {
    println!("| {} |", cells.join(" | "));
}

struct Row {
    batch: usize,
    in_turn: bool,
    fresh: bool,
}

/// Nanoseconds of a request.
struct Cost {
    submit: f64,
    verbs: f64,
    cpu: f64,
}

fn submitting(verbs: &Verbs, rounds: usize) {
    let (near, far) = (Engine::new(0..1), Engine::new(1..2));
    let length = BLOCK * BLOCKS;
    // A page between two regions: they do not touch.
    let stride = length + BLOCK;
    let (ours, theirs) = (map(REGIONS * stride), map(REGIONS * stride));
    for region in 0..REGIONS {
        near.register(ours + region * stride, length);
        far.register(theirs + region * stride, length);
    }
    let mut segment = 0;
    let mut name = [0; 64];
    // SAFETY: the buffer has its size, and the segment may be written.
    unsafe {
        check(te_engine_address(far.0, name.as_mut_ptr(), name.len()));
        check(te_open_segment(near.0, name.as_ptr(), &mut segment));
    }
    let request = |at: usize, in_turn: bool| {
        let run = REQUESTS.div_ceil(REGIONS);
        let (region, block) = if in_turn { (at % REGIONS, at / REGIONS) } else { (at / run, at % run) };
        let offset = region * stride + block % BLOCKS * BLOCK;
        te_transfer_request {
            opcode: 1,
            reserved: 0,
            local: (ours + offset) as *mut c_void,
            segment,
            remote_addr: (theirs + offset) as u64,
            length: BLOCK as u64,
            retry_hint: 0,
            transport_hint: 0,
            group: 0,
        }
    };
    let build = |first: usize, row: &Row| -> Vec<te_transfer_request> {
        (first..(first + row.batch).min(REQUESTS)).map(|at| request(at, row.in_turn)).collect()
    };
    let run = |row: &Row| {
        let kept: Vec<_> =
            if row.fresh { Vec::new() } else { (0..REQUESTS).step_by(row.batch).map(|first| build(first, row)).collect() };
        let (mut submit, mut in_verbs) = (Duration::ZERO, Duration::ZERO);
        let begin = cpu_time();
        for first in (0..REQUESTS).step_by(row.batch) {
            let fresh;
            let requests = match row.fresh {
                true => {
                    fresh = build(first, row);
                    &fresh
                }
                false => &kept[first / row.batch],
            };
            let mut batch = 0;
            let mut status = te_batch_status {
                struct_size: size_of::<te_batch_status>(),
                state: 0,
                reserved: 0,
                bytes: 0,
                tasks: 0,
                finished: 0,
                failed: 0,
            };
            // SAFETY: the requests name registered memory that nobody else uses; all structs have their sizes.
            unsafe {
                check(te_batch_create(near.0, requests.len(), &mut batch));
                let (before, since) = (verbs.work(), Instant::now());
                check(te_batch_submit(near.0, batch, requests.as_ptr(), size_of::<te_transfer_request>(), requests.len(), null()));
                submit += since.elapsed();
                in_verbs += verbs.work() - before;
                while status.state == 0 {
                    check(te_batch_poll(near.0, batch, &mut status));
                }
                check(te_batch_free(near.0, batch));
            }
            assert_eq!((status.state, status.failed), (4, 0));
        }
        let cpu = cpu_time() - begin;
        let each = |time: Duration| time.as_nanos() as f64 / REQUESTS as f64;
        Cost { submit: each(submit), verbs: each(in_verbs), cpu: each(cpu) }
    };
    let mut rows = Vec::new();
    for batch in BATCHES {
        for in_turn in [true, false] {
            for fresh in [true, false] {
                rows.push((Row { batch, in_turn, fresh }, Vec::new()));
            }
        }
    }
    // The first connects.
    run(&rows[0].0);
    for round in 0..rounds {
        let count = rows.len();
        for place in 0..count {
            let (row, costs) = &mut rows[(place + round) % count];
            costs.push(run(row));
        }
    }
    println!("Submitting {REQUESTS} writes of {BLOCK} bytes between {REGIONS} regions: ns of a request\n");
    print_row(&["batch", "regions", "array", "submit", "verbs in it", "engine", "all CPU"].map(String::from));
    println!("|---|---|---|---|---|---|---|");
    for (row, costs) in &rows {
        print_row(&[
            row.batch.to_string(),
            if row.in_turn { "in turn" } else { "in runs" }.to_string(),
            if row.fresh { "fresh" } else { "reused" }.to_string(),
            spread(costs.iter().map(|cost| cost.submit)),
            spread(costs.iter().map(|cost| cost.verbs)),
            spread(costs.iter().map(|cost| cost.submit - cost.verbs)),
            spread(costs.iter().map(|cost| cost.cpu)),
        ]);
    }
    println!();
}

fn registering(verbs: &Verbs, rounds: usize) {
    // A page between two regions: they do not touch.
    let stride = 2 * BLOCK;
    let most = LIVE.iter().max().unwrap();
    let memory = map((most + MORE) * stride);
    let address = |region: usize| memory + region * stride;
    let mut rows = Vec::new();
    for devices in DEVICES {
        for live in LIVE {
            let engine = Engine::new(0..devices);
            (0..live).for_each(|region| engine.register(address(region), BLOCK));
            rows.push((devices, live, engine, Vec::new()));
        }
    }
    let each = |time: Duration| time.as_nanos() as f64 / MORE as f64 / 1000.0;
    let timed = |operation: &dyn Fn(usize)| {
        let (before, since) = (verbs.memory(), Instant::now());
        (0..MORE).for_each(operation);
        let (all, in_verbs) = (since.elapsed(), verbs.memory() - before);
        (each(all), each(in_verbs))
    };
    for round in 0..=rounds {
        let count = rows.len();
        for place in 0..count {
            let (_, live, engine, costs) = &mut rows[(place + round) % count];
            let spent = [
                timed(&|turn| engine.register(address(*live + turn), BLOCK)),
                timed(&|turn| engine.unregister(address(*live + turn))),
            ];
            // The first round finds nothing in the caches.
            if round > 0 {
                costs.push(spent);
            }
        }
    }
    let fewest = LIVE[0];
    println!("Registering one region of {BLOCK} bytes, and unregistering it: µs\n");
    print_row(
        &[
            "devices",
            "regions",
            "register",
            "verbs in it",
            "engine",
            "to that at 256",
            "unregister",
            "verbs in it",
            "engine",
            "to that at 256",
        ]
        .map(String::from),
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for (devices, live, _, costs) in &rows {
        let (.., few) = rows.iter().find(|row| row.0 == *devices && row.1 == fewest).unwrap();
        let mut cells = vec![devices.to_string(), live.to_string()];
        for operation in 0..2 {
            let engine = |costs: &[(f64, f64); 2]| costs[operation].0 - costs[operation].1;
            cells.push(spread(costs.iter().map(|costs| costs[operation].0)));
            cells.push(spread(costs.iter().map(|costs| costs[operation].1)));
            cells.push(spread(costs.iter().map(engine)));
            cells.push(spread(costs.iter().zip(few).map(|(costs, few)| engine(costs) / engine(few))));
        }
        print_row(&cells);
    }
}
