//! Statistics
//!
//! Numbers since the engine was created. Each is exact, but they are not read at one instant.

use std::ffi::c_char;
use std::path::Path;

use crate::capi::growth::{self, Growing};
use crate::capi::te::engine::te_engine;
use crate::capi::te::status::te_status;
use crate::capi::te::with;
use crate::capi::{guard, text};
use crate::engine::Engine;

/// What an engine has counted.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct te_statistics {
    /// sizeof(te_statistics).
    pub struct_size: usize,
    /// Ranges of memory that are registered now, being registered or unregistered, or blocked because a device keeps them.
    pub regions_live: u64,
    /// Ranges that were registered.
    pub regions_registered: u64,
    /// Ranges that were unregistered.
    pub regions_unregistered: u64,
    /// Registrations that failed.
    pub registrations_refused: u64,
    /// Batches that were created.
    pub batches_allocated: u64,
    /// Batches that were freed.
    pub batches_freed: u64,
    /// Requests that were submitted.
    pub tasks_submitted: u64,
    /// Requests that ended as TE_STATE_COMPLETED.
    pub tasks_completed: u64,
    /// Requests that ended as TE_STATE_FAILED.
    pub tasks_failed: u64,
    /// Requests that ended as TE_STATE_TIMEOUT.
    pub tasks_timed_out: u64,
    /// Requests that ended as TE_STATE_CANCELED.
    pub tasks_cancelled: u64,
    /// Bytes that requests of this engine have read from segments.
    pub bytes_read: u64,
    /// Bytes that requests of this engine have written to segments.
    pub bytes_written: u64,
    /// Requests of peers that were served.
    pub requests_served: u64,
    /// Requests of peers that were refused, for instance because the memory is not registered.
    pub requests_refused: u64,
    /// Bytes that were moved for peers.
    pub bytes_served: u64,
    /// Connections that were made to peers.
    pub connections_opened: u64,
    /// Connections that were accepted from peers.
    pub connections_accepted: u64,
    /// Connections to peers that could not be made or broke.
    pub connections_failed: u64,
    /// Descriptors of segments that were asked for.
    pub descriptor_fetches: u64,
    /// Messages that were sent.
    pub notifications_sent: u64,
    /// Messages that have arrived.
    pub notifications_received: u64,
    /// Nanoseconds that registering with devices has spent on finding out which pages are there.
    pub registration_residency_ns: u64,
    /// Nanoseconds that it has spent on having the kernel provide absent pages.
    pub registration_population_ns: u64,
    /// Nanoseconds from the first to the last call of a device, added up over registrations.
    pub registration_pinning_ns: u64,
    /// Nanoseconds that registrations have waited for a metadata server to be told.
    pub registration_publishing_ns: u64,
    /// Nanoseconds that it has spent on everything else.
    pub registration_book_keeping_ns: u64,
    /// Nanoseconds from the first to the last call of a device, added up over unregistrations.
    pub deregistration_ns: u64,
    /// Parts of requests that were tried again, on another connection or NIC or with a fresh descriptor.
    pub retries: u64,
}

// SAFETY: the first field is `struct_size`, and all zeros are a valid value.
unsafe impl Growing for te_statistics {
    const FIRST_VERSION: usize = 184;
}

/// Tells what the engine has counted. Set `statistics->struct_size` before the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_get_statistics(engine: *mut te_engine, statistics: *mut te_statistics) -> te_status {
    with(engine, |engine| {
        // SAFETY: the caller passes a struct of `struct_size` bytes.
        let size = unsafe { growth::output_size(statistics, "statistics") }?;
        // SAFETY: as above.
        unsafe { growth::write(statistics, size, &read(engine, size)) };
        Ok(())
    })
}

/// What a NIC is doing.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct te_nic_load {
    /// sizeof(te_nic_load). Functions that fill arrays set it.
    pub struct_size: usize,
    /// Bytes of work that it has been given and that has not ended.
    pub bytes_in_flight: u64,
    /// Bytes a second that it has moved lately, averaged while it had work; 0 if it never had.
    pub bytes_per_second: f64,
    /// The NIC, such as "mlx5_0", with a NUL at its end; longer names are cut.
    pub name: [c_char; 64],
}

// SAFETY: all zeros are a valid value.
unsafe impl Growing for te_nic_load {
    const FIRST_VERSION: usize = 88;
}

/// Tells what each NIC of an engine is doing; there are none without RDMA.
///
/// `loads` is an array of `capacity` elements of `load_size` bytes, sizeof(te_nic_load); it may be NULL if
/// `capacity` is 0. `count` receives how many NICs there are, which may be more than `capacity`; the first
/// `capacity` are described then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_nic_loads(
    engine: *mut te_engine,
    loads: *mut te_nic_load,
    load_size: usize,
    capacity: usize,
    count: *mut usize,
) -> te_status {
    with(engine, |engine| {
        growth::check_array(loads, load_size, capacity, "loads")?;
        guard::check_output(count, "count")?;
        let found = engine.nic_loads();
        for (index, load) in found.iter().take(capacity).enumerate() {
            let value = te_nic_load {
                struct_size: load_size,
                bytes_in_flight: load.bytes_in_flight,
                bytes_per_second: load.bytes_per_second,
                name: text::array(&load.device),
            };
            // SAFETY: the caller passes `capacity` elements of `load_size` bytes.
            unsafe { growth::write_element(loads, load_size, index, &value) };
        }
        // SAFETY: `count` is not NULL, and the caller passes a place for a number.
        unsafe { count.write(found.len()) };
        Ok(())
    })
}

/// All numbers of an engine in the text format of Prometheus, version 0.0.4: those of te_statistics, histograms of latencies, and
/// what NICs and pools have done.
///
/// `text` receives a text that the caller frees with te_free_text. Waits while a transport is being installed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_metrics(engine: *mut te_engine, text: *mut *mut c_char) -> te_status {
    with(engine, |engine| {
        // SAFETY: the caller passes a place for a pointer.
        unsafe { text::give(text, "text", || Ok(engine.metrics())) }
    })
}

/// Opens a unix socket at which te_metrics can be read, until the engine is destroyed: by
/// `curl --unix-socket PATH http://te/metrics`, by a scraper, or by `te info --watch`. Nothing is opened without this call or
/// TE_METRICS_DIRECTORY in the environment.
///
/// `path` is where; a socket that a dead process has left there is replaced. NULL:
/// "transfer-engine-PID-NUMBER.sock", where `te info --watch PID` finds it, in TE_METRICS_DIRECTORY, or in
/// "/tmp/transfer-engine-UID" if that is not set. Such a directory is made if need be, and must belong to this
/// user, or root, and be writable to nobody else. An engine has one socket: a later call with another path moves it.
///
/// The socket has mode 0600; other users than this one and root are not answered. A thread of its own serves
/// it, which sleeps between requests. In a child made by fork() it is not served. Errors: TE_ERR_INVALID_ARGUMENT
/// for a path of more than 107 bytes or a directory that others may write to; TE_ERR_SOCKET if something is at
/// the path, or it cannot be used; TE_ERR_LIMIT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_serve_metrics(engine: *mut te_engine, path: *const c_char) -> te_status {
    with(engine, |engine| {
        // SAFETY: the caller passes NULL or a NUL-terminated text.
        let path = unsafe { text::read_optional(path, "path") }?;
        engine.serve_metrics(path.map(Path::new))
    })
}

/// The present numbers, in a struct of `struct_size` bytes.
fn read(engine: &Engine, struct_size: usize) -> te_statistics {
    let counters = engine.counters();
    te_statistics {
        struct_size,
        regions_live: engine.region_count() as u64,
        regions_registered: counters.regions_registered.get(),
        regions_unregistered: counters.regions_unregistered.get(),
        registrations_refused: counters.registrations_refused.get(),
        batches_allocated: counters.batches_allocated.get(),
        batches_freed: counters.batches_freed.get(),
        tasks_submitted: counters.tasks_submitted.get(),
        tasks_completed: counters.tasks_completed.get(),
        tasks_failed: counters.tasks_failed.get(),
        tasks_timed_out: counters.tasks_timed_out.get(),
        tasks_cancelled: counters.tasks_cancelled.get(),
        bytes_read: counters.bytes_read.get(),
        bytes_written: counters.bytes_written.get(),
        requests_served: counters.requests_served.get(),
        requests_refused: counters.requests_refused.get(),
        bytes_served: counters.bytes_served.get(),
        connections_opened: counters.connections_opened.get(),
        connections_accepted: counters.connections_accepted.get(),
        connections_failed: counters.connections_failed.get(),
        descriptor_fetches: counters.descriptor_fetches.get(),
        notifications_sent: counters.notifications_sent.get(),
        notifications_received: counters.notifications_received.get(),
        registration_residency_ns: counters.registration_residency_ns.get(),
        registration_population_ns: counters.registration_population_ns.get(),
        registration_pinning_ns: counters.registration_pinning_ns.get(),
        registration_publishing_ns: counters.registration_publishing_ns.get(),
        registration_book_keeping_ns: counters.registration_book_keeping_ns.get(),
        deregistration_ns: counters.deregistration_ns.get(),
        retries: counters.retries.get(),
    }
}
