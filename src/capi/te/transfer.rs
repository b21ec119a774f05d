//! Transfers
//!
//! A request moves bytes between a contiguous range of this process, which need not be registered, and one of
//! a segment, which must be, and may reach across ranges that touch. Requests run at the same time and end in
//! any order. Each ends in one of the final states, which never changes; it always ends, since an engine
//! gives up a transfer that makes no progress. No memory of a request is touched after its end, whatever its
//! state.

use std::ffi::{c_char, c_void};
use std::time::{Duration, Instant};

use crate::capi::growth::{self, Growing};
use crate::capi::te::engine::te_engine;
use crate::capi::te::segment::te_segment;
use crate::capi::te::status::{TE_OK, te_status};
use crate::capi::te::with;
use crate::capi::{guard, memory, text};
use crate::error::{Error, Result};
use crate::handshake::Notification;
use crate::transfer::{Hints, Request, State, SubmitOptions, TaskStatus};
use crate::transport::Opcode;

/// Which way the bytes go.
#[repr(C)]
pub enum te_opcode {
    /// From the segment into local memory.
    TE_READ = 0,
    /// From local memory into the segment.
    TE_WRITE = 1,
}

/// One transfer.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct te_transfer_request {
    /// A te_opcode.
    pub opcode: u32,
    /// Zero.
    pub reserved: u32,
    /// First byte of the local range. The memory is the engine's until the transfer is over: it is read
    /// (TE_WRITE) or written (TE_READ).
    pub local: *mut c_void,
    /// The segment of the other range. TE_LOCAL_SEGMENT is this engine's own.
    pub segment: te_segment,
    /// First byte of the other range, in the address space of its process.
    pub remote_addr: u64,
    /// Length of both ranges in bytes. 0 completes at once.
    pub length: u64,
    /// How often the program has tried this transfer before; 0: it has not. Over RDMA each number takes
    /// another pair of NICs than the one before, as far as there are some, instead of the next preferred one.
    /// Tries that the engine makes by itself come on top. Other transports have no use for it.
    pub retry_hint: u32,
    /// Has no effect at present: which transport to prefer.
    pub transport_hint: u32,
    /// Requests of one batch with the same number other than 0 go the same way one after the other, in the
    /// order in which they were submitted: over the same connection with TCP, over the same queue pair with
    /// RDMA, which moves a long one by one pair of NICs then, as long as both memories are in one place of
    /// their machines and the NICs that serve those stay. What fails there and is tried again goes anywhere,
    /// and so does what follows on a connection that is given up. 0: any way.
    pub group: u64,
}

// SAFETY: all zeros are a valid value.
unsafe impl Growing for te_transfer_request {
    const FIRST_VERSION: usize = 40;
}

/// Options of a set of requests that are submitted together.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct te_transfer_options {
    /// sizeof(te_transfer_options).
    pub struct_size: usize,
    /// Requests that are not over after this time end as TE_STATE_TIMEOUT, in milliseconds since the call. 0:
    /// no such limit.
    pub timeout_ms: i64,
    /// A request whose connection moves nothing for this time ends as TE_STATE_TIMEOUT, in milliseconds. 0:
    /// as MC_SLICE_TIMEOUT says, or 30 s.
    pub stall_timeout_ms: i64,
    /// With notify_message: a notification for the engine of the first request's segment. It is sent when all
    /// requests have completed, so the peer finds the bytes in place, and not at all if one fails. NULL for
    /// none.
    pub notify_name: *const c_char,
    /// Set exactly when notify_name is.
    pub notify_message: *const c_char,
}

// SAFETY: the first field is `struct_size`, and all zeros are a valid value.
unsafe impl Growing for te_transfer_options {
    const FIRST_VERSION: usize = 40;
}

/// State of a request or a batch. CANCELED, COMPLETED, TIMEOUT and FAILED are final.
#[repr(C)]
pub enum te_state {
    /// Under way.
    TE_STATE_WAITING = 0,
    /// Under way; not used at present.
    TE_STATE_PENDING = 1,
    /// Not used at present.
    TE_STATE_INVALID = 2,
    /// Ended by te_batch_cancel, by unregistering its memory, or by destroying the engine.
    TE_STATE_CANCELED = 3,
    /// All bytes are in place: in the peer's memory (TE_WRITE), or in the local range (TE_READ).
    TE_STATE_COMPLETED = 4,
    /// Given up after one of the times of te_transfer_options.
    TE_STATE_TIMEOUT = 5,
    /// Failed. Any part of the target range may have been written.
    TE_STATE_FAILED = 6,
}

const _: () = {
    assert!(te_state::TE_STATE_WAITING as i32 == State::Waiting as i32);
    assert!(te_state::TE_STATE_PENDING as i32 == State::Pending as i32);
    assert!(te_state::TE_STATE_INVALID as i32 == State::Invalid as i32);
    assert!(te_state::TE_STATE_CANCELED as i32 == State::Canceled as i32);
    assert!(te_state::TE_STATE_COMPLETED as i32 == State::Completed as i32);
    assert!(te_state::TE_STATE_TIMEOUT as i32 == State::Timeout as i32);
    assert!(te_state::TE_STATE_FAILED as i32 == State::Failed as i32);
};

/// What has become of a request.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct te_transfer_result {
    /// sizeof(te_transfer_result). Functions that fill arrays set it.
    pub struct_size: usize,
    /// A te_state.
    pub state: i32,
    /// Why it ended as it did; 0 unless the state is CANCELED, TIMEOUT or FAILED.
    pub error: te_status,
    /// Bytes that are known to have moved; never more than the request's length, and all of them when it has
    /// completed.
    pub bytes: u64,
}

// SAFETY: all zeros are a valid value.
unsafe impl Growing for te_transfer_result {
    const FIRST_VERSION: usize = 24;
}

impl te_transfer_result {
    /// The status as C sees it, in a struct of `struct_size` bytes.
    pub(super) fn new(status: &TaskStatus, struct_size: usize) -> te_transfer_result {
        te_transfer_result {
            struct_size,
            state: status.state as i32,
            error: status.error.as_ref().map_or(TE_OK, |error| error.code().number()),
            bytes: status.transferred_bytes,
        }
    }
}

/// Runs `count` requests and returns when all are over.
///
/// `requests` is an array with elements of `request_size` bytes, sizeof(te_transfer_request); `options` may
/// be NULL. `results` is an array of `count` elements of `result_size` bytes, sizeof(te_transfer_result), or
/// NULL (`result_size` is ignored then).
///
/// Returns 0 if all requests have completed, else the error of the first that has not, and te_last_error() is
/// its text. In both cases all results are written. If the call is refused as a whole, nothing is started and
/// no result is written: TE_ERR_INVALID_ARGUMENT for a bad argument, such as an unknown opcode, or a local
/// range that is NULL but not empty or that runs past the end of the address space; TE_ERR_INVALID_HANDLE for
/// an unknown segment; TE_ERR_NOT_SUPPORTED_TRANSPORT. What is wrong with the range of the peer fails its
/// request only.
///
/// If all requests have completed but the notification could not be sent, its error is returned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_batch_transfer(
    engine: *mut te_engine,
    requests: *const te_transfer_request,
    request_size: usize,
    count: usize,
    options: *const te_transfer_options,
    results: *mut te_transfer_result,
    result_size: usize,
) -> te_status {
    with(engine, |engine| {
        if !results.is_null() {
            growth::check_array(results, result_size, count, "results")?;
        }
        // SAFETY: the caller passes `count` elements of `request_size` bytes, which describe memory that is ours until we return.
        let requests = unsafe { read_requests(requests, request_size, count) }?;
        // SAFETY: the caller passes NULL or a struct of `struct_size` bytes with NUL-terminated texts.
        let (options, notification) = unsafe { read_transfer_options(options) }?;
        let target = match (&notification, requests.first()) {
            (Some(_), None) => return Err(no_notification_target()),
            (_, first) => first.map(|request| request.segment),
        };
        let statuses = engine.transfer(&requests, options)?;
        if !results.is_null() {
            for (index, status) in statuses.iter().enumerate() {
                // SAFETY: the caller passes `count` elements of `result_size` bytes, and there is one status for each request.
                unsafe { growth::write_element(results, result_size, index, &te_transfer_result::new(status, result_size)) };
            }
        }
        if let Some(status) = statuses.iter().find(|status| status.state != State::Completed) {
            return Err(failure(status));
        }
        match (notification, target) {
            (Some(notification), Some(target)) => engine.send_notification(target, &notification),
            _ => Ok(()),
        }
    })
}

/// Why a task has not completed.
pub(super) fn failure(status: &TaskStatus) -> Error {
    status.error.clone().unwrap_or_else(|| {
        Error::new(crate::error::Code::Internal, format!("a transfer ended as {:?} without an error", status.state))
    })
}

/// The error for a notification without a request that names its target.
pub(super) fn no_notification_target() -> Error {
    guard::invalid("a notification goes to the segment of the first request, but there is no request")
}

/// Reads and checks the caller's requests: all or none.
///
/// # Safety
/// `requests` must have `count` elements of `request_size` bytes. Their local ranges must be the caller's to
/// give, until the transfers are over.
pub(super) unsafe fn read_requests(
    requests: *const te_transfer_request,
    request_size: usize,
    count: usize,
) -> Result<Vec<Request>> {
    // SAFETY: as for this function.
    let array = unsafe { growth::read_array(requests, request_size, count, "requests") }?;
    // Not by `collect`, which does not know how many there are until all are checked.
    let mut requests = Vec::with_capacity(count);
    for (index, request) in array.enumerate() {
        let request = request?;
        if request.reserved != 0 {
            return Err(guard::invalid(format!("requests[{index}].reserved is {}, not 0", request.reserved)));
        }
        let opcode = match request.opcode {
            opcode if opcode == te_opcode::TE_READ as u32 => Opcode::Read,
            opcode if opcode == te_opcode::TE_WRITE as u32 => Opcode::Write,
            other => {
                return Err(guard::invalid(format!("requests[{index}].opcode is {other}; it must be TE_READ (0) or TE_WRITE (1)")));
            }
        };
        // SAFETY: as for this function.
        let local = unsafe { memory::local_range(request.local, request.length, index) }?;
        let hints = Hints::new(request.retry_hint, request.group);
        requests.push(Request { opcode, local, segment: request.segment, remote_address: request.remote_addr, hints });
    }
    Ok(requests)
}

/// Reads and checks the caller's transfer options.
///
/// # Safety
/// `options` must be NULL or a struct of `struct_size` bytes with NUL-terminated texts.
pub(super) unsafe fn read_transfer_options(options: *const te_transfer_options) -> Result<(SubmitOptions, Option<Notification>)> {
    // SAFETY: as for this function.
    let options = unsafe { growth::read_options(options) }?;
    let notification = match (options.notify_name.is_null(), options.notify_message.is_null()) {
        (true, true) => None,
        // SAFETY: as for this function.
        (false, false) => Some(unsafe { text::read_notification(options.notify_name, options.notify_message) }?),
        _ => return Err(guard::invalid("one of options->notify_name and options->notify_message is NULL; set both or none")),
    };
    let timeout = read_timeout(options.timeout_ms, "options->timeout_ms")?;
    let stall = read_timeout(options.stall_timeout_ms, "options->stall_timeout_ms")?;
    // A time beyond what the clock can hold is as good as no limit.
    Ok((SubmitOptions { deadline: timeout.and_then(|timeout| Instant::now().checked_add(timeout)), stall }, notification))
}

/// Reads a time in milliseconds, where 0 means that none was given.
pub(super) fn read_timeout(milliseconds: i64, name: &str) -> Result<Option<Duration>> {
    match u64::try_from(milliseconds) {
        Ok(0) => Ok(None),
        Ok(milliseconds) => Ok(Some(Duration::from_millis(milliseconds))),
        Err(_) => Err(guard::invalid(format!("{name} is {milliseconds}; it must be 0 or more milliseconds"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;

    fn read(request: te_transfer_request) -> Result<Vec<Request>> {
        // SAFETY: the array has one element; its ranges are looked at, not used.
        unsafe { read_requests(&request, size_of_val(&request), 1) }
    }

    const GOOD: te_transfer_request = te_transfer_request {
        opcode: te_opcode::TE_WRITE as u32,
        reserved: 0,
        local: 0x1000 as *mut c_void,
        segment: 3,
        remote_addr: 0x2000,
        length: 16,
        retry_hint: 0,
        transport_hint: 0,
        group: 0,
    };

    #[test]
    fn a_request_is_taken_as_it_is() {
        let request = read(GOOD).unwrap()[0];
        assert_eq!((request.opcode, request.segment, request.remote_address), (Opcode::Write, 3, 0x2000));
        assert_eq!((request.local.address(), request.local.length()), (0x1000, 16));
        assert_eq!(read(te_transfer_request { opcode: 0, ..GOOD }).unwrap()[0].opcode, Opcode::Read);
        let empty = te_transfer_request { local: std::ptr::null_mut(), length: 0, ..GOOD };
        assert_eq!(read(empty).unwrap()[0].local.length(), 0);
    }

    #[test]
    fn bad_requests_are_refused() {
        let end = (u64::MAX - 7) as *mut c_void;
        for bad in [
            te_transfer_request { opcode: 2, ..GOOD },
            te_transfer_request { reserved: 1, ..GOOD },
            te_transfer_request { local: std::ptr::null_mut(), ..GOOD },
            te_transfer_request { local: end, length: 9, ..GOOD },
        ] {
            assert_eq!(read(bad).unwrap_err().code(), Code::InvalidArgument);
        }
        // Where the other range lies is for its process to judge.
        assert!(read(te_transfer_request { remote_addr: u64::MAX, ..GOOD }).is_ok());
    }

    #[test]
    fn options_are_times_and_a_notification() {
        let none = te_transfer_options {
            struct_size: size_of::<te_transfer_options>(),
            timeout_ms: 0,
            stall_timeout_ms: 0,
            notify_name: std::ptr::null(),
            notify_message: std::ptr::null(),
        };
        // SAFETY: the struct has its size, and its texts are NULL or end with a NUL.
        let read = |options: te_transfer_options| unsafe { read_transfer_options(&options) };
        let (options, notification) = read(none).unwrap();
        assert!(options.deadline.is_none() && options.stall.is_none() && notification.is_none());
        let (name, message) = (c"name".as_ptr(), c"message".as_ptr());
        let all =
            te_transfer_options { timeout_ms: 60_000, stall_timeout_ms: 5, notify_name: name, notify_message: message, ..none };
        let (options, notification) = read(all).unwrap();
        assert!(options.deadline.unwrap() > Instant::now() + Duration::from_secs(30));
        assert_eq!(options.stall, Some(Duration::from_millis(5)));
        assert_eq!(notification.unwrap(), Notification { name: "name".into(), message: "message".into() });
        assert!(read(te_transfer_options { timeout_ms: -1, ..none }).is_err());
        assert!(read(te_transfer_options { stall_timeout_ms: i64::MIN, ..none }).is_err());
        assert!(read(te_transfer_options { notify_name: name, ..none }).is_err());
        assert!(read(te_transfer_options { notify_message: message, ..none }).is_err());
        // SAFETY: NULL stands for no options.
        assert!(unsafe { read_transfer_options(std::ptr::null()) }.is_ok());
    }
}
