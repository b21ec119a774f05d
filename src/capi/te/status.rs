//! Version, errors, texts and log

use std::ffi::{CStr, c_char, c_void};

use tracing::Level;

use crate::capi::te::call;
use crate::capi::{guard, text};
use crate::error::Code;
use crate::telemetry::log;

/// What a function returns: TE_OK or a negative TE_ERR_ number.
pub type te_status = i32;

/// Success.
pub const TE_OK: te_status = 0;
/// An argument is out of range, NULL where it may not be, or contradicts another one.
pub const TE_ERR_INVALID_ARGUMENT: te_status = -1;
/// The batch has no room for that many more requests. Nothing was queued.
pub const TE_ERR_TOO_MANY_REQUESTS: te_status = -2;
/// No registration has that address.
pub const TE_ERR_ADDRESS_NOT_REGISTERED: te_status = -3;
/// Work is still under way on the batch, the memory or the pool. Call again later.
pub const TE_ERR_BATCH_BUSY: te_status = -4;
/// There is no such device.
pub const TE_ERR_DEVICE_NOT_FOUND: te_status = -6;
/// The range has bytes in common with a registered one.
pub const TE_ERR_ADDRESS_OVERLAPPED: te_status = -7;
/// A host name could not be resolved.
pub const TE_ERR_DNS: te_status = -101;
/// A connection could not be made, or broke.
pub const TE_ERR_SOCKET: te_status = -102;
/// A peer, a server or the caller gave what is not the expected JSON.
pub const TE_ERR_MALFORMED_JSON: te_status = -103;
/// A peer refused to connect.
pub const TE_ERR_REJECT_HANDSHAKE: te_status = -104;
/// Metadata could not be fetched or published.
pub const TE_ERR_METADATA: te_status = -200;
/// An endpoint of a device could not be made.
pub const TE_ERR_ENDPOINT: te_status = -201;
/// A device refused to register memory.
pub const TE_ERR_CONTEXT: te_status = -202;
/// Memory ran out.
pub const TE_ERR_MEMORY: te_status = -302;
/// This build or this version cannot do it.
pub const TE_ERR_NOT_IMPLEMENTED: te_status = -303;
/// The protocol of the target segment is not installed in this engine.
pub const TE_ERR_NOT_SUPPORTED_TRANSPORT: te_status = -1001;
/// The deadline passed.
pub const TE_ERR_TIMEOUT: te_status = -1002;
/// Cancelled: by te_batch_cancel, by unregistering the memory, or by destroying the engine.
pub const TE_ERR_CANCELED: te_status = -1003;
/// A defect of this library. Please report it with the text.
pub const TE_ERR_INTERNAL: te_status = -1004;
/// Memory is not mapped, or not with the needed access.
pub const TE_ERR_FAULT: te_status = -1005;
/// The engine belongs to the process that this one was forked from.
pub const TE_ERR_FORKED: te_status = -1006;
/// The engine, pool, lease, batch or segment was destroyed, freed, or never made.
pub const TE_ERR_INVALID_HANDLE: te_status = -1007;
/// A limit of the process or the system was reached, such as that of open files. The text names it.
pub const TE_ERR_LIMIT: te_status = -1008;

/// Every code with its name in C, which `te_status_name` prints.
const NAMES: [(Code, te_status, &CStr); 23] = [
    (Code::InvalidArgument, TE_ERR_INVALID_ARGUMENT, c"TE_ERR_INVALID_ARGUMENT"),
    (Code::TooManyRequests, TE_ERR_TOO_MANY_REQUESTS, c"TE_ERR_TOO_MANY_REQUESTS"),
    (Code::AddressNotRegistered, TE_ERR_ADDRESS_NOT_REGISTERED, c"TE_ERR_ADDRESS_NOT_REGISTERED"),
    (Code::BatchBusy, TE_ERR_BATCH_BUSY, c"TE_ERR_BATCH_BUSY"),
    (Code::DeviceNotFound, TE_ERR_DEVICE_NOT_FOUND, c"TE_ERR_DEVICE_NOT_FOUND"),
    (Code::AddressOverlapped, TE_ERR_ADDRESS_OVERLAPPED, c"TE_ERR_ADDRESS_OVERLAPPED"),
    (Code::Dns, TE_ERR_DNS, c"TE_ERR_DNS"),
    (Code::Socket, TE_ERR_SOCKET, c"TE_ERR_SOCKET"),
    (Code::MalformedJson, TE_ERR_MALFORMED_JSON, c"TE_ERR_MALFORMED_JSON"),
    (Code::RejectHandshake, TE_ERR_REJECT_HANDSHAKE, c"TE_ERR_REJECT_HANDSHAKE"),
    (Code::Metadata, TE_ERR_METADATA, c"TE_ERR_METADATA"),
    (Code::Endpoint, TE_ERR_ENDPOINT, c"TE_ERR_ENDPOINT"),
    (Code::Context, TE_ERR_CONTEXT, c"TE_ERR_CONTEXT"),
    (Code::Memory, TE_ERR_MEMORY, c"TE_ERR_MEMORY"),
    (Code::NotImplemented, TE_ERR_NOT_IMPLEMENTED, c"TE_ERR_NOT_IMPLEMENTED"),
    (Code::NotSupportedTransport, TE_ERR_NOT_SUPPORTED_TRANSPORT, c"TE_ERR_NOT_SUPPORTED_TRANSPORT"),
    (Code::Timeout, TE_ERR_TIMEOUT, c"TE_ERR_TIMEOUT"),
    (Code::Canceled, TE_ERR_CANCELED, c"TE_ERR_CANCELED"),
    (Code::Internal, TE_ERR_INTERNAL, c"TE_ERR_INTERNAL"),
    (Code::Fault, TE_ERR_FAULT, c"TE_ERR_FAULT"),
    (Code::Forked, TE_ERR_FORKED, c"TE_ERR_FORKED"),
    (Code::InvalidHandle, TE_ERR_INVALID_HANDLE, c"TE_ERR_INVALID_HANDLE"),
    (Code::Limit, TE_ERR_LIMIT, c"TE_ERR_LIMIT"),
];

const _: () = {
    let mut index = 0;
    while index < NAMES.len() {
        assert!(NAMES[index].0 as i32 == NAMES[index].1);
        index += 1;
    }
};

/// How important a line of the log is. A level includes those above it.
#[repr(C)]
pub enum te_log_level {
    /// Something failed for good.
    TE_LOG_ERROR = 1,
    /// A call failed, or something will go wrong later. The default.
    TE_LOG_WARNING = 2,
    /// Life cycle: engines, transports, segments.
    TE_LOG_INFO = 3,
    /// Connections and registrations.
    TE_LOG_DEBUG = 4,
    /// Every transfer.
    TE_LOG_TRACE = 5,
}

/// Receives a line of the log.
///
/// It is called on any thread, also on threads of the engine and during calls of the program, and on several
/// threads at once. It must not block for long, and not destroy or create engines; lines that its own calls
/// would make are left out. `target` names the part of the library that speaks; both texts are valid during
/// the call only, and have no line break at their end.
pub type te_log_callback =
    Option<unsafe extern "C" fn(user_data: *mut c_void, level: te_log_level, target: *const c_char, message: *const c_char)>;

/// The version of the library that is loaded, such as "0.1.0". The text is static.
#[unsafe(no_mangle)]
pub extern "C" fn te_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// The text of the last failure of a call on this thread, of this interface or that of transfer_engine_c.h;
/// "" if there was none.
///
/// The text belongs to the library. It stays at the same address for the life of the thread, and is replaced
/// when the next call on the thread fails; calls that succeed leave it alone. It may have several sentences:
/// what failed, with addresses and limits, and what to do.
#[unsafe(no_mangle)]
pub extern "C" fn te_last_error() -> *const c_char {
    guard::last_error()
}

/// The name of a status, such as "TE_ERR_TIMEOUT"; "unknown" for other numbers. The text is static.
#[unsafe(no_mangle)]
pub extern "C" fn te_status_name(status: te_status) -> *const c_char {
    let named = NAMES.iter().find(|(_, number, _)| *number == status).map(|(_, _, name)| *name);
    named.unwrap_or(if status == TE_OK { c"TE_OK" } else { c"unknown" }).as_ptr()
}

/// Frees a text that a function of this interface gave by a `char **`. NULL is fine. The text is from
/// malloc(), so free() does as well.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_free_text(text: *mut c_char) {
    call(|| {
        // SAFETY: the caller passes NULL or a text from malloc, once.
        unsafe { libc::free(text.cast()) };
        Ok(())
    });
}

/// Sends the log of all engines of this process to `callback` instead of to standard error.
///
/// `callback` gets the lines of `level` (a te_log_level) and those more important, and `user_data` with each.
/// NULL sends the log to standard error again, or to the file of MC_LOG_DIR. When this function has returned,
/// no thread is inside the callback that was set before, so `user_data` may be freed. Errors:
/// TE_ERR_INVALID_ARGUMENT for an unknown level, or when called by a log callback.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_set_log_callback(callback: te_log_callback, user_data: *mut c_void, level: i32) -> te_status {
    call(|| {
        let level = match level {
            level if level == te_log_level::TE_LOG_ERROR as i32 => Level::ERROR,
            level if level == te_log_level::TE_LOG_WARNING as i32 => Level::WARN,
            level if level == te_log_level::TE_LOG_INFO as i32 => Level::INFO,
            level if level == te_log_level::TE_LOG_DEBUG as i32 => Level::DEBUG,
            level if level == te_log_level::TE_LOG_TRACE as i32 => Level::TRACE,
            other => return Err(guard::invalid(format!("level is {other}; it must be a te_log_level (1 to 5)"))),
        };
        let callback = callback.map(|function| {
            let receiver = Receiver { function, user_data };
            Box::new(move |level, target: &str, message: &str| receiver.call(level, target, message)) as log::Callback
        });
        log::set_callback(callback, level)
    })
}

/// The program's function, with its data.
struct Receiver {
    function: unsafe extern "C" fn(*mut c_void, te_log_level, *const c_char, *const c_char),
    user_data: *mut c_void,
}

// SAFETY: the program was told that its function is called on any thread, and on several at once.
unsafe impl Send for Receiver {}
// SAFETY: as above.
unsafe impl Sync for Receiver {}

impl Receiver {
    fn call(&self, level: Level, target: &str, message: &str) {
        let level = match level {
            Level::ERROR => te_log_level::TE_LOG_ERROR,
            Level::WARN => te_log_level::TE_LOG_WARNING,
            Level::INFO => te_log_level::TE_LOG_INFO,
            Level::DEBUG => te_log_level::TE_LOG_DEBUG,
            Level::TRACE => te_log_level::TE_LOG_TRACE,
        };
        let (target, message) = (text::to_c(target), text::to_c(message));
        // SAFETY: the program passed a function of this type, and both texts live until it returns.
        unsafe { (self.function)(self.user_data, level, target.as_ptr(), message.as_ptr()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_its_name() {
        let name = |status| {
            // SAFETY: the names are static and end with a NUL.
            unsafe { CStr::from_ptr(te_status_name(status)) }.to_str().unwrap()
        };
        assert_eq!((name(0), name(-4), name(-1008), name(1)), ("TE_OK", "TE_ERR_BATCH_BUSY", "TE_ERR_LIMIT", "unknown"));
        let source = include_str!("status.rs");
        for (_, status, text) in NAMES {
            assert_eq!(name(status), text.to_str().unwrap());
            assert!(source.contains(&format!("pub const {}: te_status = {status};", name(status))), "{}", name(status));
        }
    }
}
