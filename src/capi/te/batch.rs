//! Batches
//!
//! A batch runs requests while the program goes on: submit, then poll, wait, or watch a file descriptor. The
//! requests of a batch are numbered from 0, in the order in which they were submitted.

use std::ffi::{c_char, c_int};
use std::time::Duration;

use crate::capi::growth::{self, Growing};
use crate::capi::te::engine::te_engine;
use crate::capi::te::status::te_status;
use crate::capi::te::transfer::{
    no_notification_target, read_requests, read_transfer_options, te_transfer_options, te_transfer_request, te_transfer_result,
};
use crate::capi::te::with;
use crate::capi::{guard, text};
use crate::error::{Code, Error, Result};
use crate::transfer::{Batch, BatchStatus, TaskStatus};

/// A batch. Its number is valid in the engine that created it.
pub type te_batch = u64;

/// What has become of a batch.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct te_batch_status {
    /// sizeof(te_batch_status).
    pub struct_size: usize,
    /// A te_state: TE_STATE_WAITING while a request is under way; TE_STATE_COMPLETED when all have completed,
    /// also if there are none; else how the requests that have not completed ended: FAILED if one did, else
    /// TIMEOUT if one did, else CANCELED.
    pub state: i32,
    /// Zero.
    pub reserved: u32,
    /// Bytes that are known to have moved.
    pub bytes: u64,
    /// Requests that were submitted.
    pub tasks: u64,
    /// Requests that are over.
    pub finished: u64,
    /// Requests that are over and have not completed.
    pub failed: u64,
}

// SAFETY: the first field is `struct_size`, and all zeros are a valid value.
unsafe impl Growing for te_batch_status {
    const FIRST_VERSION: usize = 48;
}

impl te_batch_status {
    /// The status as C sees it, in a struct of `struct_size` bytes.
    fn new(status: &BatchStatus, struct_size: usize) -> te_batch_status {
        te_batch_status {
            struct_size,
            state: status.state as i32,
            reserved: 0,
            bytes: status.transferred_bytes,
            tasks: status.tasks as u64,
            finished: status.finished as u64,
            failed: status.failed as u64,
        }
    }
}

/// Creates a batch with room for `capacity` requests. Free it with te_batch_free.
///
/// Errors: TE_ERR_MEMORY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_batch_create(engine: *mut te_engine, capacity: usize, batch: *mut te_batch) -> te_status {
    with(engine, |engine| {
        guard::check_output(batch, "batch")?;
        let created = engine.allocate_batch(capacity)?;
        // SAFETY: `batch` is not NULL, and the caller passes a place for a number.
        unsafe { batch.write(created.id()) };
        Ok(())
    })
}

/// Starts `count` requests and returns without waiting for them. They take the next numbers in the batch.
///
/// `requests` is an array with elements of `request_size` bytes, sizeof(te_transfer_request); it may be
/// reused after the call, but the memory that it names belongs to the engine until each request is over.
/// `options` may be NULL. May be called again until the batch is full or cancelled, also while earlier requests
/// run.
///
/// On failure nothing is started: TE_ERR_TOO_MANY_REQUESTS if the batch has not that much room, TE_ERR_CANCELED
/// if it was cancelled, else as for te_batch_transfer. Requests that fail after that tell so by their own status. A notification that cannot
/// be sent is told in the log only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_batch_submit(
    engine: *mut te_engine,
    batch: te_batch,
    requests: *const te_transfer_request,
    request_size: usize,
    count: usize,
    options: *const te_transfer_options,
) -> te_status {
    with(engine, |engine| {
        let batch = engine.batch(batch)?;
        // SAFETY: the caller passes `count` elements of `request_size` bytes, which describe memory that is ours until they are over.
        let requests = unsafe { read_requests(requests, request_size, count) }?;
        // SAFETY: the caller passes NULL or a struct of `struct_size` bytes with NUL-terminated texts.
        let (options, notification) = unsafe { read_transfer_options(options) }?;
        if notification.is_some() && requests.is_empty() {
            return Err(no_notification_target());
        }
        engine.submit(&batch, &requests, notification, options)
    })
}

/// Tells what has become of request number `task` of a batch. Never blocks.
///
/// Set `result->struct_size` before the call. Errors: TE_ERR_INVALID_ARGUMENT if the batch has no such
/// request.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_batch_task_status(
    engine: *mut te_engine,
    batch: te_batch,
    task: usize,
    result: *mut te_transfer_result,
) -> te_status {
    with(engine, |engine| {
        // SAFETY: the caller passes a struct of `struct_size` bytes.
        let size = unsafe { growth::output_size(result, "result") }?;
        let status = task_status(&*engine.batch(batch)?, task)?;
        // SAFETY: as above.
        unsafe { growth::write(result, size, &te_transfer_result::new(&status, size)) };
        Ok(())
    })
}

/// Writes the text of the error of request number `task` into `buffer` of `size` bytes, with a NUL at its
/// end; "" if it has none. A text that does not fit is cut.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_batch_task_error(
    engine: *mut te_engine,
    batch: te_batch,
    task: usize,
    buffer: *mut c_char,
    size: usize,
) -> te_status {
    with(engine, |engine| {
        let status = task_status(&*engine.batch(batch)?, task)?;
        let error = status.error.map(|error| error.to_string()).unwrap_or_default();
        // SAFETY: the caller passes a buffer of `size` bytes.
        unsafe { text::write_cut(buffer, size, &error) }
    })
}

/// Tells what has become of a batch. Never blocks.
///
/// Set `status->struct_size` before the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_batch_poll(engine: *mut te_engine, batch: te_batch, status: *mut te_batch_status) -> te_status {
    with(engine, |engine| {
        // SAFETY: the caller passes a struct of `struct_size` bytes.
        let size = unsafe { growth::output_size(status, "status") }?;
        let batch = engine.batch(batch)?;
        // SAFETY: as above.
        unsafe { growth::write(status, size, &te_batch_status::new(&batch.status(), size)) };
        Ok(())
    })
}

/// Waits until all requests of a batch are over, for up to `timeout_ms` milliseconds; a negative number waits
/// for as long as it takes.
///
/// Returns 0 when all are over, however they ended. TE_ERR_TIMEOUT if a request still runs: nothing is
/// cancelled, and the call can be repeated. `status` may be NULL; else set `status->struct_size` before the
/// call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_batch_wait(
    engine: *mut te_engine,
    batch: te_batch,
    timeout_ms: i64,
    status: *mut te_batch_status,
) -> te_status {
    with(engine, |engine| {
        let size = match status.is_null() {
            true => None,
            // SAFETY: the caller passes a struct of `struct_size` bytes.
            false => Some(unsafe { growth::output_size(status, "status") }?),
        };
        let batch = engine.batch(batch)?;
        if !batch.wait(u64::try_from(timeout_ms).ok().map(Duration::from_millis)) {
            return Err(Error::quiet(Code::Timeout, format!("a request of the batch still runs after {timeout_ms} ms")));
        }
        if let Some(size) = size {
            // SAFETY: as above.
            unsafe { growth::write(status, size, &te_batch_status::new(&batch.status(), size)) };
        }
        Ok(())
    })
}

/// Asks for the end of all requests of a batch that are under way. They end within a fraction of a second, as
/// TE_STATE_CANCELED unless they were over before; te_batch_wait waits for that. Then the engine does not touch
/// local memory for them any more; bytes of a WRITE that were sent before may still arrive at the peer a little
/// later, as after TE_STATE_TIMEOUT. The batch takes no more requests: free it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_batch_cancel(engine: *mut te_engine, batch: te_batch) -> te_status {
    with(engine, |engine| {
        engine.batch(batch)?.cancel();
        Ok(())
    })
}

/// Gives a file descriptor for poll() and the like. It becomes readable each time that no request of the
/// batch is under way any more, not before the first submit; read its 8 bytes before the next submit. It does
/// not block, and is closed by exec.
///
/// The descriptor belongs to the batch, which closes it when it is freed. Errors: TE_ERR_LIMIT if there are
/// too many open files.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_batch_event_fd(engine: *mut te_engine, batch: te_batch, fd: *mut c_int) -> te_status {
    with(engine, |engine| {
        guard::check_output(fd, "fd")?;
        let event = engine.batch(batch)?.event_fd()?;
        // SAFETY: `fd` is not NULL, and the caller passes a place for a number.
        unsafe { fd.write(event) };
        Ok(())
    })
}

/// Frees a batch. A notification that is still to be sent is sent nevertheless.
///
/// Errors: TE_ERR_BATCH_BUSY while a request is under way; the batch stays as it is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_batch_free(engine: *mut te_engine, batch: te_batch) -> te_status {
    with(engine, |engine| engine.free_batch(batch))
}

/// The status of a task that must exist.
fn task_status(batch: &Batch, task: usize) -> Result<TaskStatus> {
    batch
        .task_status(task)
        .ok_or_else(|| guard::invalid(format!("the batch has {} requests, none with number {task}", batch.len())))
}
