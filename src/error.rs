//! The one error type of the library and the numbers that leave it through the C interfaces.
//!
//! An error is logged once, by [`Error::new`], where it is first decided; whoever passes it on adds nothing to the log. The line shows
//! the room that decided it, as if the room had logged it itself. Its text carries what the reader needs to act: address, size,
//! device, errno, limit, and what to do.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

/// Result of everything that can fail in this library.
pub type Result<T> = std::result::Result<T, Error>;

/// What kind of failure it was, as the `ERR_` number that `te.h` returns.
///
/// Numbers from -1 to -303 are upstream's; those below -1000 are ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Code {
    /// An argument is out of range, null, or contradicts another one.
    InvalidArgument = -1,
    /// More requests than the batch has room for.
    TooManyRequests = -2,
    /// No live registration covers the address.
    AddressNotRegistered = -3,
    /// Work is still under way on the batch or region; call again later.
    BatchBusy = -4,
    /// No such device.
    DeviceNotFound = -6,
    /// The range collides with a registered one.
    AddressOverlapped = -7,
    /// A host name could not be resolved.
    Dns = -101,
    /// A connection could not be made or broke.
    Socket = -102,
    /// A peer or server sent what is not the JSON that was expected.
    MalformedJson = -103,
    /// A peer refused a handshake.
    RejectHandshake = -104,
    /// Metadata could not be fetched or published.
    Metadata = -200,
    /// An endpoint could not be made.
    Endpoint = -201,
    /// A device refused to register memory.
    Context = -202,
    /// Memory ran out.
    Memory = -302,
    /// This build or this version cannot do it.
    NotImplemented = -303,
    /// The target's protocol is not installed here.
    NotSupportedTransport = -1001,
    /// The deadline passed.
    Timeout = -1002,
    /// Cancelled by the caller, by unregistering its memory, or by destroying the engine.
    Canceled = -1003,
    /// A defect of this library, caught at the boundary.
    Internal = -1004,
    /// Memory could not be read or written: not mapped, or not with that access.
    Fault = -1005,
    /// The handle belongs to the parent of this forked process.
    Forked = -1006,
    /// The handle names nothing: destroyed, freed, or never made.
    InvalidHandle = -1007,
    /// A limit of the process or system was hit, such as open files.
    Limit = -1008,
}

impl Code {
    /// The number for `te.h` and for upstream's functions that return `ERR_` values.
    pub fn number(self) -> i32 {
        self as i32
    }

    /// The number for upstream's functions that return `Status::Code` values, where errors are positive.
    pub fn status_number(self) -> i32 {
        match self {
            Code::NotSupportedTransport => 8,
            Code::InvalidHandle => 1,
            Code::NotImplemented => 999,
            Code::Timeout | Code::Canceled | Code::Internal | Code::Fault | Code::Forked | Code::Limit => 202,
            other => -(other as i32),
        }
    }

    /// The short name that logs and `te_status_name` show.
    pub fn name(self) -> &'static str {
        match self {
            Code::InvalidArgument => "invalid argument",
            Code::TooManyRequests => "too many requests",
            Code::AddressNotRegistered => "address not registered",
            Code::BatchBusy => "busy",
            Code::DeviceNotFound => "device not found",
            Code::AddressOverlapped => "address overlapped",
            Code::Dns => "name not resolved",
            Code::Socket => "connection failed",
            Code::MalformedJson => "malformed JSON",
            Code::RejectHandshake => "handshake rejected",
            Code::Metadata => "metadata",
            Code::Endpoint => "endpoint",
            Code::Context => "device context",
            Code::Memory => "out of memory",
            Code::NotImplemented => "not implemented",
            Code::NotSupportedTransport => "transport not installed",
            Code::Timeout => "timeout",
            Code::Canceled => "cancelled",
            Code::Internal => "internal error",
            Code::Fault => "bad memory",
            Code::Forked => "handle of the parent process",
            Code::InvalidHandle => "invalid handle",
            Code::Limit => "limit reached",
        }
    }
}

/// A failure: what kind, and a text that says why and what to do. Cloning shares the text.
#[derive(Clone, Debug)]
pub struct Error {
    code: Code,
    message: Arc<str>,
}

impl Error {
    /// Decides an error and logs it. Call it once per failure, where the failure is found.
    #[track_caller]
    pub fn new(code: Code, message: impl Into<String>) -> Error {
        let error = Error::quiet(code, message);
        let room = Room(Location::caller().file());
        // The log shows a field of this name in place of the target, which is always this module.
        tracing::warn!(%room, "{error}");
        error
    }

    /// An error that is not worth a line in the log, because it is an expected answer or its cause was logged already.
    pub fn quiet(code: Code, message: impl Into<String>) -> Error {
        Error { code, message: message.into().into() }
    }

    /// The kind.
    pub fn code(&self) -> Code {
        self.code
    }

    /// The text, without the kind.
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code.name(), self.message)
    }
}

impl std::error::Error for Error {}

/// The module that a source file holds, as targets of the log name it: `transport::tcp::lane` for `src/transport/tcp/lane.rs`.
struct Room(&'static str);

impl fmt::Display for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.0.rsplit_once("src/").map_or(self.0, |(_, path)| path);
        let module = path.strip_suffix("/mod.rs").or(path.strip_suffix(".rs")).unwrap_or(path);
        module.split('/').enumerate().try_for_each(|(depth, part)| write!(f, "{}{part}", if depth == 0 { "" } else { "::" }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_file_is_shown_as_its_module() {
        for (file, module) in [
            ("src/error.rs", "error"),
            ("src/registry/mod.rs", "registry"),
            ("src/transport/tcp/lane.rs", "transport::tcp::lane"),
            ("/build/engine/src/transport/tcp/mod.rs", "transport::tcp"),
            ("elsewhere.c", "elsewhere.c"),
        ] {
            assert_eq!(Room(file).to_string(), module);
        }
    }
}
