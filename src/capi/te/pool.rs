//! Pools
//!
//! A pool lends registered memory for a moment, for payloads that live too short to be worth a registration of
//! their own: copy the bytes into a lease, transfer from there, release the lease; or transfer into a lease and
//! copy them out. The memory is registered once, for transfers of its engine: peers cannot reach it. Over TCP
//! memory need not be registered at all, and there is little to gain from a pool.
//!
//! ```c
//! te_pool *pool;
//! te_pool_lease lease = {.struct_size = sizeof lease, .direction = TE_POOL_PUT};
//!
//! te_pool_create(engine, NULL, &pool);
//! te_pool_acquire(pool, length, 100, &lease);
//! memcpy(lease.addr, payload, length);
//!
//! te_transfer_request request = {
//!     .opcode = TE_WRITE, .local = lease.addr, .segment = peer, .remote_addr = remote_addr, .length = length};
//! te_batch_transfer(engine, &request, sizeof request, 1, NULL, NULL, 0);
//!
//! te_pool_release(pool, lease.id, TE_POOL_OVER, 0);
//! te_pool_close(pool, 1000);
//! ```
//!
//! te_put and te_get do all of that for many ranges in one call, by the way that suits each of them; te_get_leased hands the
//! lease out.
//!
//! ```c
//! te_pool_item item = {payload, length, peer, remote_addr};
//!
//! te_put(engine, pool, &item, sizeof item, 1, NULL, NULL, 0);
//! ```
//!
//! Who waits for a lease is served in the order of arrival. Puts and gets share the memory, but a part of it is
//! kept for either: however many leases puts have, gets can go on, and the other way round. Acquiring and
//! releasing a lease take some hundred nanoseconds and no system call, unless a thread waits.

use std::ffi::{c_char, c_void};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::capi::growth::{self, Growing};
use crate::capi::te::batch::te_batch;
use crate::capi::te::engine::te_engine;
use crate::capi::te::segment::te_segment;
use crate::capi::te::status::{TE_OK, te_status};
use crate::capi::te::transfer::{failure, read_timeout, te_transfer_result};
use crate::capi::te::{call, with};
use crate::capi::{guard, handle, memory, text};
use crate::engine::Engine;
use crate::engine::staging::{Finished, Item, LeasedItem, StagingOptions};
use crate::error::Result;
use crate::pool::plan::Preference;
use crate::pool::{Direction, Fallback, Lease, Outcome, Pool, PoolOptions, PoolStatistics};
use crate::transfer::State;

/// A pool.
pub struct te_pool {
    _private: [u8; 0],
}

/// A lease that is neither for a put nor for a get. It is taken from what is kept for neither.
pub const TE_POOL_ANY: u32 = 0;
/// A lease for bytes that go to a peer.
pub const TE_POOL_PUT: u32 = 1;
/// A lease for bytes that come from a peer.
pub const TE_POOL_GET: u32 = 2;

/// All transfers that used the lease are over.
pub const TE_POOL_OVER: u32 = 0;
/// Transfers of a batch may still use the lease, for instance after te_batch_wait has timed out.
pub const TE_POOL_UNKNOWN: u32 = 1;

/// No bytes are kept for the direction.
pub const TE_POOL_NO_RESERVE: u64 = u64::MAX;

/// While a pool has no room, te_put and te_get register the memory of what they would stage, and transfer it from there.
pub const TE_POOL_REGISTER: u32 = 0;
/// They wait until there is room.
pub const TE_POOL_WAIT: u32 = 1;
/// They give up what they would stage, as TE_STATE_TIMEOUT.
pub const TE_POOL_FAIL: u32 = 2;

/// te_put and te_get choose the way of each item.
pub const TE_POOL_AUTO: u32 = 0;
/// Whatever can be staged is staged, unless its memory is registered.
pub const TE_POOL_STAGED: u32 = 1;
/// Nothing is staged.
pub const TE_POOL_DIRECT: u32 = 2;

/// How te_pool_create makes a pool.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct te_pool_options {
    /// sizeof(te_pool_options).
    pub struct_size: usize,
    /// The memory to lend out: `bytes` at `arena`, aligned to `alignment`, and not registered yet. It is the pool's
    /// until te_pool_close has returned 0, or te_engine_destroy has returned. NULL: the pool maps memory itself, in
    /// large pages where there are some, and unmaps it at its end.
    pub arena: *mut c_void,
    /// How many bytes it lends at most at a time. 0: 64 MiB; it must be given with `arena`.
    pub bytes: u64,
    /// Where the memory is: "cpu:0" for a NUMA node, "*" or NULL for any. Memory that the pool maps is taken from
    /// that node for as long as it has some. Memory of devices cannot be lent.
    pub location: *const c_char,
    /// How many threads put and get at a time, from which the defaults below follow. 0: 4.
    pub workers: u32,
    /// How many leases it lends at most at a time, up to 65536. 0: 1024.
    pub most_leases: u32,
    /// Leases begin at multiples of it and are charged with multiples of it, in bytes: a power of two up to 4096. 0: 256.
    pub alignment: u64,
    /// Bytes of the largest lease. 0: `bytes` / (2 x `workers`).
    pub largest_lease: u64,
    /// Bytes that are kept for TE_POOL_PUT, so that gets cannot starve puts, and leases likewise in proportion. What
    /// is left by both reserves must be as large as the largest lease. 0: `bytes` / (2 x `workers`), or less if more does not fit.
    /// TE_POOL_NO_RESERVE: none.
    pub put_reserve: u64,
    /// The same for TE_POOL_GET, so that puts cannot starve gets.
    pub get_reserve: u64,
    /// What te_put and te_get do while there is no room: TE_POOL_REGISTER, TE_POOL_WAIT or TE_POOL_FAIL. The first
    /// time that something is registered for this reason is logged, and all are counted in te_pool_statistics.
    pub fallback: u32,
    /// Zero.
    pub reserved: u32,
}

// SAFETY: the first field is `struct_size`, and all zeros are a valid value.
unsafe impl Growing for te_pool_options {
    const FIRST_VERSION: usize = 72;
}

/// Memory that a pool has lent.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct te_pool_lease {
    /// sizeof(te_pool_lease).
    pub struct_size: usize,
    /// Set before te_pool_acquire: TE_POOL_PUT, TE_POOL_GET or TE_POOL_ANY.
    pub direction: u32,
    /// Zero.
    pub reserved: u32,
    /// The number to release it by. No other lease ever has it.
    pub id: u64,
    /// Its first byte.
    pub addr: *mut c_void,
    /// Its length in bytes, as it was asked for.
    pub length: u64,
}

// SAFETY: the first field is `struct_size`, and all zeros are a valid value.
unsafe impl Growing for te_pool_lease {
    const FIRST_VERSION: usize = 40;
}

/// What a pool is, has, and has done. Bytes of leases are rounded up to the alignment.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct te_pool_statistics {
    /// sizeof(te_pool_statistics).
    pub struct_size: usize,
    /// First byte of the memory that it lends.
    pub arena: *mut c_void,
    /// Bytes of that memory, as it is registered: whole pages where the pool has mapped it.
    pub bytes: u64,
    /// Bytes of the pages that it has mapped; 0 for memory of the caller.
    pub page_bytes: u64,
    /// As in te_pool_options, with the defaults filled in; so are the next three.
    pub alignment: u64,
    /// Bytes of the largest lease.
    pub largest_lease: u64,
    /// Bytes that are kept for TE_POOL_PUT; 0: none.
    pub put_reserve: u64,
    /// Bytes that are kept for TE_POOL_GET; 0: none.
    pub get_reserve: u64,
    /// Leases that are out or quarantined.
    pub leases: u64,
    /// Their bytes.
    pub leased_bytes: u64,
    /// The most bytes that were leased at a time.
    pub most_leased_bytes: u64,
    /// Leases that are quarantined: released, and out of use until their batches are over.
    pub quarantined: u64,
    /// Threads that wait for a lease.
    pub waiting: u64,
    /// Bytes of the longest lease that there is room for in some direction, up to the largest lease.
    pub longest_free: u64,
    /// Leases that were granted.
    pub acquired: u64,
    /// How often te_pool_acquire, te_put or a get had to wait for a lease.
    pub waited: u64,
    /// How often they found no room within their time. Puts and gets look without waiting first.
    pub refused: u64,
    /// Leases that were ever quarantined.
    pub ever_quarantined: u64,
    /// Calls of te_put.
    pub puts: u64,
    /// Calls of te_get and te_get_leased.
    pub gets: u64,
    /// Items that were transferred from or to memory that was registered.
    pub items_zero_copy: u64,
    /// Items that were transferred from or to where they are, after their memory was registered for the call, or without that where
    /// it need not be.
    pub items_direct: u64,
    /// Items that went through a lease.
    pub items_staged: u64,
    /// Their bytes.
    pub bytes_staged: u64,
    /// Ranges that were registered for te_put and te_get.
    pub registrations: u64,
    /// Groups of items that were registered instead of staged, because there was no room.
    pub fallbacks: u64,
    /// Items that were transferred again after a failure, counted each time; of long ones each part that was.
    pub retried: u64,
}

// SAFETY: the first field is `struct_size`, and all zeros are a valid value.
unsafe impl Growing for te_pool_statistics {
    const FIRST_VERSION: usize = 144;
}

/// An item of te_put, te_get or te_get_leased.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct te_pool_item {
    /// First byte of the local range, which need not be registered. NULL for te_get_leased.
    pub local: *mut c_void,
    /// Length of both ranges in bytes. 0 completes at once.
    pub length: u64,
    /// The segment of the other range.
    pub segment: te_segment,
    /// First byte of the other range, in the address space of its process.
    pub remote_addr: u64,
}

// SAFETY: all zeros are a valid value.
unsafe impl Growing for te_pool_item {
    const FIRST_VERSION: usize = 32;
}

/// Options of te_put, te_get and te_get_leased.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct te_pool_transfer_options {
    /// sizeof(te_pool_transfer_options).
    pub struct_size: usize,
    /// TE_POOL_AUTO, TE_POOL_STAGED or TE_POOL_DIRECT. te_get_leased ignores it.
    pub path: u32,
    /// How many times an item is transferred again that has failed. What ended because of `timeout_ms`, or was canceled, is not.
    pub retries: u32,
    /// How long to wait before that, in milliseconds.
    pub retry_pause_ms: u32,
    /// Zero.
    pub reserved: u32,
    /// Limit of the whole call, in milliseconds: items that are not over by then end as TE_STATE_TIMEOUT. 0: no such limit.
    pub timeout_ms: i64,
}

// SAFETY: the first field is `struct_size`, and all zeros are a valid value.
unsafe impl Growing for te_pool_transfer_options {
    const FIRST_VERSION: usize = 32;
}

/// Creates a pool and registers its memory, for transfers of this engine. Free it with te_pool_close.
///
/// `options` may be NULL. te_engine_destroy closes the pools of the engine, whatever they have lent: when it has
/// returned, memory that they have mapped is gone, and calls on them give TE_ERR_INVALID_HANDLE. Errors:
/// TE_ERR_INVALID_ARGUMENT for options that are out of range or contradict each other; TE_ERR_DEVICE_NOT_FOUND if there is no
/// such NUMA node; TE_ERR_MEMORY if the memory cannot be mapped; else as for te_register_local_memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_pool_create(
    engine: *mut te_engine,
    options: *const te_pool_options,
    pool: *mut *mut te_pool,
) -> te_status {
    with(engine, |engine| {
        guard::check_output(pool, "pool")?;
        // SAFETY: the caller passes NULL or a struct of `struct_size` bytes with NUL-terminated texts, and leaves the arena to the pool.
        let options = unsafe { read_pool_options(options) }?;
        let created = engine.create_pool(&options)?;
        let key = handle::insert_pool(engine.downgrade(), created);
        // SAFETY: `pool` is not NULL, and the caller passes a place for a pointer.
        unsafe { pool.write(key.as_pointer().cast()) };
        Ok(())
    })
}

/// Borrows `bytes` of memory, until te_pool_release. What is in it is what was there before.
///
/// Set `lease->struct_size` and `lease->direction` before the call. While there is no room it waits, for up to `timeout_ms`
/// milliseconds: 0 does not wait, and a negative number waits for as long as it takes. Errors:
/// TE_ERR_INVALID_ARGUMENT for 0 bytes, or more than the largest lease; TE_ERR_TIMEOUT if there was no room within
/// the time, or others wait already; TE_ERR_CANCELED while the pool is being closed; TE_ERR_INVALID_HANDLE if it was closed, or its
/// engine destroyed, also while the call was waiting.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_pool_acquire(pool: *mut te_pool, bytes: u64, timeout_ms: i64, lease: *mut te_pool_lease) -> te_status {
    with_pool(pool, |pool| {
        // SAFETY: the caller passes a struct of `struct_size` bytes, and `direction` is of the first version.
        let (size, direction) = unsafe {
            let size = growth::output_size(lease, "lease")?;
            (size, (&raw const (*lease).direction).read_unaligned())
        };
        let granted = pool.pool.acquire(read_direction(direction)?, bytes, read_limit(timeout_ms))?;
        // SAFETY: as above.
        unsafe { growth::write(lease, size, &te_pool_lease::new(direction, granted, size)) };
        Ok(())
    })
}

/// Gives a lease back. The caller does not use its memory any more.
///
/// `outcome` is TE_POOL_OVER if no transfer uses it any more; `batch` is ignored then. With TE_POOL_UNKNOWN it is
/// quarantined, that is, not lent again until no request of `batch`, of the pool's engine, is under way, and nothing more is to be
/// done about it. A batch can be freed only when it is over, so with one that was freed the outcome is TE_POOL_OVER. Never
/// waits. Errors: TE_ERR_INVALID_HANDLE if the pool has not lent `lease`, which was released already or is of another
/// pool, or there is no such batch; nothing has changed then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_pool_release(pool: *mut te_pool, lease: u64, outcome: u32, batch: te_batch) -> te_status {
    with_pool(pool, |pool| {
        let outcome = match outcome {
            TE_POOL_OVER => Outcome::Over,
            TE_POOL_UNKNOWN => Outcome::Unknown(pool.engine()?.batch(batch)?),
            other => {
                return Err(guard::invalid(format!("outcome is {other}; it must be TE_POOL_OVER or TE_POOL_UNKNOWN (0 or 1)")));
            }
        };
        pool.pool.release(lease, outcome)
    })
}

/// Closes a pool: unregisters its memory, and unmaps it if the pool has mapped it.
///
/// Waits until all leases are released, and quarantined ones free, for up to `timeout_ms` milliseconds: 0 does not wait,
/// and a negative number waits for as long as it takes. While it waits, calls of te_pool_acquire give
/// TE_ERR_CANCELED, also those that were waiting; so do te_put and te_get, and their items that have not been staged yet.
/// Errors: TE_ERR_BATCH_BUSY if leases are still out, a te_put or te_get has not returned, or the pool
/// is being closed by another call: it is open as before. The same if a transfer that uses its memory without
/// a lease did not end within five seconds: then the memory takes no new transfers, and the call can be repeated. What a
/// device answers that does not give the memory back: the pool is closed then, and its memory stays mapped.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_pool_close(pool: *mut te_pool, timeout_ms: i64) -> te_status {
    call(|| handle::close_pool(pool as u64, read_limit(timeout_ms)))
}

/// Tells what a pool is, has, and has done. Set `statistics->struct_size` before the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_pool_stats(pool: *mut te_pool, statistics: *mut te_pool_statistics) -> te_status {
    with_pool(pool, |pool| {
        // SAFETY: the caller passes a struct of `struct_size` bytes.
        let size = unsafe { growth::output_size(statistics, "statistics") }?;
        // SAFETY: as above.
        unsafe { growth::write(statistics, size, &te_pool_statistics::new(&pool.pool.statistics(), size)) };
        Ok(())
    })
}

/// Gives the system back the memory of a pool that is not lent; it is taken anew when it is. What is lent is not
/// touched, and calls of te_pool_acquire meanwhile may find less room than there is.
///
/// `bytes` receives how much is not lent and was given back, whether it took memory or had not been used yet; it may
/// be NULL. It is 0 where a device has registered the memory, as with RDMA, since devices keep the memory that they
/// know; and for memory of the caller.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_pool_trim(pool: *mut te_pool, bytes: *mut u64) -> te_status {
    with_pool(pool, |pool| {
        if !bytes.is_null() {
            guard::check_output(bytes, "bytes")?;
        }
        let given_back = pool.engine()?.trim_pool(&pool.pool);
        if !bytes.is_null() {
            // SAFETY: the caller passes a place for a number.
            unsafe { bytes.write(given_back) };
        }
        Ok(())
    })
}

/// Writes `count` items into their segments, and returns when all are over.
///
/// The local ranges need not be registered. For each item the engine chooses the best way: from where it is, if it is
/// registered or the segment is reached by a transport that needs no registration (TCP, and the engine itself);
/// registered for the call, if it is memory of a device or longer than the largest lease; else through a lease of the pool or
/// registered for the call, whichever has taken less time lately. Ranges that overlap or touch are registered once, and
/// unregistered before the call returns, which waits for other calls that use the same bytes; while they are registered,
/// te_register_local_memory refuses them with TE_ERR_ADDRESS_OVERLAPPED. Of items whose ranges in the same segment overlap
/// the last one wins.
///
/// `items` is an array with elements of `item_size` bytes, sizeof(te_pool_item); `options` may be NULL. `results` is an
/// array of `count` elements of `result_size` bytes, sizeof(te_transfer_result), or NULL (`result_size` is
/// ignored then).
///
/// Returns 0 if all items have completed, else the error of the first that has not, and te_last_error() is its text. In both
/// cases all results are written. Memory of the caller is not touched any more then. What uses a lease may be under way when
/// `timeout_ms` has passed: its lease is quarantined until it is over. If the call is refused as a whole, nothing is
/// started and no result is written: TE_ERR_INVALID_ARGUMENT for a bad argument, or a pool of another engine;
/// TE_ERR_INVALID_HANDLE for an unknown segment, or a pool that was closed; TE_ERR_CANCELED for one that is being closed;
/// TE_ERR_NOT_SUPPORTED_TRANSPORT.
///
/// If all items have completed but memory that was registered for the call could not be unregistered, that error is
/// returned; the memory stays blocked. It is TE_ERR_BATCH_BUSY if another call still used the memory when `timeout_ms` had passed, and
/// five seconds: then it stays registered until that call returns.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // As few as there are things to be said.
pub unsafe extern "C" fn te_put(
    engine: *mut te_engine,
    pool: *mut te_pool,
    items: *const te_pool_item,
    item_size: usize,
    count: usize,
    options: *const te_pool_transfer_options,
    results: *mut te_transfer_result,
    result_size: usize,
) -> te_status {
    let array = Array { first: items, size: item_size, count };
    let results = Results { first: results, size: result_size, count };
    // SAFETY: the caller passes arrays of these sizes, and NULL or a struct of `struct_size` bytes, and leaves the ranges to us until we return.
    unsafe { transfer(engine, pool, array, options, results, Engine::put) }
}

/// Reads `count` items from their segments into local ranges, as te_put writes them; of items whose local ranges overlap the
/// last one wins. A local range is not touched before its item has arrived if that is staged.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // As few as there are things to be said.
pub unsafe extern "C" fn te_get(
    engine: *mut te_engine,
    pool: *mut te_pool,
    items: *const te_pool_item,
    item_size: usize,
    count: usize,
    options: *const te_pool_transfer_options,
    results: *mut te_transfer_result,
    result_size: usize,
) -> te_status {
    let array = Array { first: items, size: item_size, count };
    let results = Results { first: results, size: result_size, count };
    // SAFETY: as for `te_put`.
    unsafe { transfer(engine, pool, array, options, results, Engine::get) }
}

/// Reads `count` items from their segments into one lease of the pool, and hands it out: item i begins at
/// `lease->addr` plus the lengths of the items before it. `local` of each item is NULL. Nothing is copied.
///
/// Set `lease->struct_size` before the call. If all items have completed, the lease is written; the caller gives it back by
/// te_pool_release. Otherwise the call gives it back, and results are written, and errors are, as of te_put. The lease is for
/// TE_POOL_GET; while there is no room, the call waits for it if the pool's fallback is TE_POOL_WAIT, and is refused with
/// TE_ERR_TIMEOUT otherwise. TE_ERR_INVALID_ARGUMENT for 0 bytes in all, or more than the largest lease.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // As few as there are things to be said.
pub unsafe extern "C" fn te_get_leased(
    engine: *mut te_engine,
    pool: *mut te_pool,
    items: *const te_pool_item,
    item_size: usize,
    count: usize,
    options: *const te_pool_transfer_options,
    lease: *mut te_pool_lease,
    results: *mut te_transfer_result,
    result_size: usize,
) -> te_status {
    let results = Results { first: results, size: result_size, count };
    with(engine, |engine| {
        let call = handle::enter_pool(pool as u64)?;
        // SAFETY: the caller passes a struct of `struct_size` bytes.
        let size = unsafe { growth::output_size(lease, "lease") }?;
        results.check()?;
        let items = Array { first: items, size: item_size, count };
        // SAFETY: the caller passes an array of these sizes, and NULL or a struct of `struct_size` bytes.
        let (items, options) = unsafe { (read_items(items, leased_item)?, read_transfer_options(options)?) };
        let (finished, granted) = engine.get_leased(&call.target().pool, &items, options)?;
        if let Some(granted) = granted {
            // SAFETY: as above.
            unsafe { growth::write(lease, size, &te_pool_lease::new(TE_POOL_GET, granted, size)) };
        }
        // SAFETY: the caller passes an array of these sizes.
        unsafe { results.write(&finished) }
    })
}

/// An array of items that C passes.
#[derive(Clone, Copy)]
struct Array {
    first: *const te_pool_item,
    size: usize,
    count: usize,
}

/// Where C wants to have the results, if it does.
#[derive(Clone, Copy)]
struct Results {
    first: *mut te_transfer_result,
    size: usize,
    count: usize,
}

impl Results {
    fn check(&self) -> Result<()> {
        match self.first.is_null() {
            true => Ok(()),
            false => growth::check_array(self.first, self.size, self.count, "results"),
        }
    }

    /// Writes the results, and answers what the call returns.
    ///
    /// # Safety
    /// The array must be NULL or have `count` elements of `size` bytes.
    unsafe fn write(&self, finished: &Finished) -> Result<()> {
        if !self.first.is_null() {
            for (index, status) in finished.statuses.iter().enumerate().take(self.count) {
                // SAFETY: as for this function.
                unsafe { growth::write_element(self.first, self.size, index, &te_transfer_result::new(status, self.size)) };
            }
        }
        match finished.statuses.iter().find(|status| status.state != State::Completed) {
            Some(status) => Err(failure(status)),
            None => finished.undone.clone(),
        }
    }
}

/// A put or a get.
///
/// # Safety
/// `items` must have its elements, whose local ranges are the caller's to give until this returns; `options` must be NULL or a struct of
/// `struct_size` bytes; `results` must be NULL or have its elements.
unsafe fn transfer(
    engine: *mut te_engine,
    pool: *mut te_pool,
    items: Array,
    options: *const te_pool_transfer_options,
    results: Results,
    body: impl FnOnce(&Engine, &Arc<Pool>, &[Item], StagingOptions) -> Result<Finished>,
) -> te_status {
    with(engine, |engine| {
        let call = handle::enter_pool(pool as u64)?;
        results.check()?;
        // SAFETY: as for this function.
        let item = |index, te_pool_item { local, length, segment, remote_addr }: te_pool_item| {
            // SAFETY: as for this function.
            let local = unsafe { memory::local_range(local, length, index) }?;
            Ok(Item { local, segment, remote_address: remote_addr })
        };
        // SAFETY: as for this function.
        let (items, options) = unsafe { (read_items(items, item)?, read_transfer_options(options)?) };
        let finished = body(engine, &call.target().pool, &items, options)?;
        // SAFETY: as for this function.
        unsafe { results.write(&finished) }
    })
}

/// Reads and checks the caller's items by `check`, which is given their places: all or none.
///
/// # Safety
/// The array must have its elements.
unsafe fn read_items<T>(items: Array, check: impl Fn(usize, te_pool_item) -> Result<T>) -> Result<Vec<T>> {
    let Array { first, size, count } = items;
    // SAFETY: as for this function.
    let array = unsafe { growth::read_array(first, size, count, "items") }?;
    // Not by `collect`, which does not know how many there are until all are checked.
    let mut items = Vec::with_capacity(count);
    for (index, item) in array.enumerate() {
        items.push(check(index, item?)?);
    }
    Ok(items)
}

fn leased_item(index: usize, item: te_pool_item) -> Result<LeasedItem> {
    let te_pool_item { local, length, segment, remote_addr } = item;
    if !local.is_null() {
        let text = format!("items[{index}].local is {local:p}; it must be NULL, since the bytes go into a lease");
        return Err(guard::invalid(text));
    }
    Ok(LeasedItem { length, segment, remote_address: remote_addr })
}

/// Reads and checks the caller's options.
///
/// # Safety
/// `options` must be NULL or a struct of `struct_size` bytes.
unsafe fn read_transfer_options(options: *const te_pool_transfer_options) -> Result<StagingOptions> {
    // SAFETY: as for this function.
    let options = unsafe { growth::read_options(options) }?;
    let preference = match options.path {
        TE_POOL_AUTO => Preference::Auto,
        TE_POOL_STAGED => Preference::Staged,
        TE_POOL_DIRECT => Preference::Direct,
        other => {
            return Err(guard::invalid(format!(
                "options->path is {other}; it must be TE_POOL_AUTO, TE_POOL_STAGED or TE_POOL_DIRECT (0 to 2)"
            )));
        }
    };
    if options.reserved != 0 {
        return Err(guard::invalid(format!("options->reserved is {}, not 0", options.reserved)));
    }
    let timeout = read_timeout(options.timeout_ms, "options->timeout_ms")?;
    Ok(StagingOptions {
        preference,
        retries: options.retries,
        retry_pause: Duration::from_millis(options.retry_pause_ms.into()),
        // A time beyond what the clock can hold is as good as no limit.
        deadline: timeout.and_then(|timeout| Instant::now().checked_add(timeout)),
    })
}

impl te_pool_lease {
    /// The lease as C sees it, in a struct of `struct_size` bytes.
    fn new(direction: u32, lease: Lease, struct_size: usize) -> te_pool_lease {
        let addr = lease.memory.address() as *mut c_void;
        te_pool_lease { struct_size, direction, reserved: 0, id: lease.id, addr, length: lease.memory.length() }
    }
}

impl te_pool_statistics {
    /// The numbers as C sees them, in a struct of `struct_size` bytes.
    fn new(statistics: &PoolStatistics, struct_size: usize) -> te_pool_statistics {
        te_pool_statistics {
            struct_size,
            arena: statistics.arena.address() as *mut c_void,
            bytes: statistics.arena.length(),
            page_bytes: statistics.page,
            alignment: statistics.alignment,
            largest_lease: statistics.largest_lease,
            put_reserve: statistics.put_reserve,
            get_reserve: statistics.get_reserve,
            leases: statistics.leases,
            leased_bytes: statistics.leased_bytes,
            most_leased_bytes: statistics.most_leased_bytes,
            quarantined: statistics.quarantined,
            waiting: statistics.waiting,
            longest_free: statistics.longest_free,
            acquired: statistics.acquired,
            waited: statistics.waited,
            refused: statistics.refused,
            ever_quarantined: statistics.ever_quarantined,
            puts: statistics.puts,
            gets: statistics.gets,
            items_zero_copy: statistics.items_zero_copy,
            items_direct: statistics.items_direct,
            items_staged: statistics.items_staged,
            bytes_staged: statistics.bytes_staged,
            registrations: statistics.registrations,
            fallbacks: statistics.fallbacks,
            retried: statistics.retried,
        }
    }
}

/// Runs a function of this interface on a pool.
fn with_pool(pool: *mut te_pool, body: impl FnOnce(&handle::EnginePool) -> Result<()>) -> te_status {
    guard::call(guard::negative, || {
        let call = handle::enter_pool(pool as u64)?;
        body(call.target()).map(|()| TE_OK)
    })
}

fn read_limit(timeout_ms: i64) -> Option<Duration> {
    u64::try_from(timeout_ms).ok().map(Duration::from_millis)
}

fn read_direction(direction: u32) -> Result<Direction> {
    match direction {
        TE_POOL_ANY => Ok(Direction::Any),
        TE_POOL_PUT => Ok(Direction::Put),
        TE_POOL_GET => Ok(Direction::Get),
        other => {
            Err(guard::invalid(format!("lease->direction is {other}; it must be TE_POOL_ANY, TE_POOL_PUT or TE_POOL_GET (0 to 2)")))
        }
    }
}

/// Reads the caller's options. What contradicts itself is found by the pool.
///
/// # Safety
/// `options` must be NULL or a struct of `struct_size` bytes with a NUL-terminated text, and its arena the pool's until that is closed.
unsafe fn read_pool_options(options: *const te_pool_options) -> Result<PoolOptions> {
    // SAFETY: as for this function.
    let options = unsafe { growth::read_options(options) }?;
    let given = |number: u64| (number != 0).then_some(number);
    let reserve = |number: u64| match number {
        TE_POOL_NO_RESERVE => Some(0),
        number => given(number),
    };
    let fallback = match options.fallback {
        TE_POOL_REGISTER => Fallback::Register,
        TE_POOL_WAIT => Fallback::Wait,
        TE_POOL_FAIL => Fallback::Fail,
        other => {
            return Err(guard::invalid(format!(
                "options->fallback is {other}; it must be TE_POOL_REGISTER, TE_POOL_WAIT or TE_POOL_FAIL (0 to 2)"
            )));
        }
    };
    if options.reserved != 0 {
        return Err(guard::invalid(format!("options->reserved is {}, not 0", options.reserved)));
    }
    Ok(PoolOptions {
        fallback,
        arena: match options.arena.is_null() {
            true => None,
            // SAFETY: as for this function.
            false => Some(unsafe { memory::range(options.arena, options.bytes) }?),
        },
        bytes: given(options.bytes),
        // SAFETY: as for this function.
        location: Some(unsafe { text::read_location(options.location) }),
        workers: NonZeroU32::new(options.workers),
        alignment: given(options.alignment),
        largest_lease: given(options.largest_lease),
        most_leases: NonZeroU32::new(options.most_leases).map(NonZeroU32::get),
        put_reserve: reserve(options.put_reserve),
        get_reserve: reserve(options.get_reserve),
    })
}
