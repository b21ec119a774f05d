//! What registering and unregistering allocate, counted: the figures must not grow with the number of regions.
#![allow(unsafe_code, missing_docs)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use transfer_engine::registry::{RegionOptions, Registry, Removal, Reservation};
use transfer_engine::sys::MemoryRange;

static CALLS: AtomicUsize = AtomicUsize::new(0);
static BYTES: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: all calls are passed on.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::Relaxed);
        BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn register(registry: &Registry, options: &RegionOptions, at: u64) {
    // SAFETY: nobody reads or writes the memory of this made-up range.
    let range = unsafe { MemoryRange::new((at + 1) << 16, 1 << 16) }.unwrap();
    let Reservation::New(region) = registry.reserve(range, options).unwrap() else { panic!("counted") };
    registry.commit(&[region]);
}

fn unregister(registry: &Registry, at: u64) {
    let Removal::Last(region) = registry.start_drain((at + 1) << 16).unwrap() else { panic!("counted") };
    assert!(registry.drain(&region, Duration::ZERO));
    registry.finish(&region);
}

/// Calls and bytes of one operation, on average.
fn counted(operations: u64, mut operation: impl FnMut(u64)) -> (f64, f64) {
    let (calls, bytes) = (CALLS.load(Ordering::Relaxed), BYTES.load(Ordering::Relaxed));
    (0..operations).for_each(&mut operation);
    let since = |counter: &AtomicUsize, before| (counter.load(Ordering::Relaxed) - before) as f64 / operations as f64;
    (since(&CALLS, calls), since(&BYTES, bytes))
}

#[test]
fn a_change_allocates_a_region_and_little_else_whatever_is_registered() {
    let options = RegionOptions { location: "*".into(), remote_accessible: true, counted: false, owner: Default::default() };
    for size in [256u64, 8_192, 65_536] {
        let registry = Registry::new();
        // An odd factor visits each number below a power of two once, here in no helpful order.
        let scattered = |at: u64| at.wrapping_mul(0x9E37_79B9_7F4A_7C15) % size;
        let (calls, bytes) = counted(size, |at| register(&registry, &options, scattered(at)));
        assert!(calls <= 1.5 && bytes <= 1_400.0, "{size}: a registration makes {calls} calls for {bytes} bytes");
        let churn = |at| {
            unregister(&registry, scattered(at));
            register(&registry, &options, scattered(at));
        };
        // The region, and parts of what the collector and the published order keep.
        let (calls, bytes) = counted(size.max(4_096), churn);
        assert!(calls <= 1.1 && bytes <= 200.0, "{size}: a churn makes {calls} calls for {bytes} bytes");
    }
}
