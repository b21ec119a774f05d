//! Rings of io_uring in place of NICs: memory is pinned for each of them, as NICs have it pinned, on any machine.

use std::io;
use std::sync::Arc;

use clap::ValueEnum;
use serde::Serialize;
use transfer_engine::error::{Code, Error};
use transfer_engine::registry::Registry;
use transfer_engine::sys::MemoryRange;
use transfer_engine::transport::local::LocalTransport;
use transfer_engine::transport::{Device, Segment, Slices, Transport};

use crate::ring::Ring;

/// What pins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
pub enum Pin {
    /// Fixed buffers of io_uring, one ring for each device.
    #[value(name = "io_uring")]
    #[serde(rename = "io_uring")]
    IoUring,
}

/// A transport whose devices are rings. What moves bytes is one `memmove` on the thread that submits, to memory of this process.
pub struct Rings {
    rings: Vec<Arc<Ring>>,
    mover: LocalTransport,
}

impl Rings {
    /// So many rings, whose targets are the regions of `registry`.
    pub fn new(count: usize, registry: Arc<Registry>) -> Result<Rings, Error> {
        let rings = (0..count).map(|number| Ring::new(number).map(Arc::new)).collect::<Result<_, _>>().map_err(cannot_make)?;
        Ok(Rings { rings, mover: LocalTransport::new(registry, false) })
    }

    /// Each of them.
    pub fn rings(&self) -> &[Arc<Ring>] {
        &self.rings
    }
}

/// A kernel counts rings, too, against the limit on locked memory of a user without rights, and those that were closed for a while longer.
fn cannot_make(error: io::Error) -> Error {
    match error.raw_os_error() {
        Some(libc::ENOMEM) => {
            Error::new(Code::Limit, format!("cannot make an io_uring: {error}; raise the limit on locked memory (ulimit -l)"))
        }
        Some(libc::EMFILE) => {
            Error::new(Code::Limit, format!("cannot make an io_uring: {error}; raise the limit on open files (ulimit -n)"))
        }
        _ => Error::new(Code::Context, format!("cannot make an io_uring: {error}")),
    }
}

impl Transport for Rings {
    /// Of those whose place it takes.
    fn protocol(&self) -> &'static str {
        "tcp"
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.rings.iter().map(|ring| ring.clone() as Arc<dyn Device>).collect()
    }
    fn submit(&self, segment: &Arc<dyn Segment>, slices: Slices) {
        self.mover.submit(segment, slices);
    }
    // Slices have ended when `submit` returns.
    fn cancel(&self) {}
    fn evict(&self, _range: MemoryRange) {}
    fn forget(&self, _segment: u64) {}
    fn shutdown(&self, _reason: transfer_engine::Error) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn that_there_is_no_room_for_a_ring_is_a_limit_and_that_there_are_no_rings_is_not() {
        let code = |errno| cannot_make(io::Error::from_raw_os_error(errno)).code();
        assert_eq!([libc::ENOMEM, libc::EMFILE].map(code), [Code::Limit; 2]);
        assert_ne!(code(libc::ENOSYS), Code::Limit);
    }
}
