//! Transfers within this process: from and to the own segment.
//!
//! One `memmove` on the submitting thread, under guards on the target's regions; the target is checked as a peer's request would be.
//! No locks, no state beyond the registry.

use std::sync::Arc;

use super::{Opcode, Segment, Slice, Slices, Transport};
use crate::error::{Code, Error, Result};
use crate::registry::{Access, Refusal, Registry};
use crate::sys::{MemoryRange, memory};

/// The transport to the own segment.
pub struct LocalTransport {
    registry: Arc<Registry>,
    /// Copy by a system call that reports bad pages instead of crashing.
    checked: bool,
}

impl LocalTransport {
    /// Serves the regions of `registry`.
    pub fn new(registry: Arc<Registry>, checked: bool) -> LocalTransport {
        LocalTransport { registry, checked }
    }

    fn copy(&self, slice: &Slice) -> Result<()> {
        let (address, length) = (slice.remote_address, slice.local.length());
        let refuse = |why: &str| {
            Error::new(
                Code::AddressNotRegistered,
                format!(
                    "own memory [{address:#x}, +{length}) is {why}; register it for remote access, or give the number from te_open_segment if it is a peer's"
                ),
            )
        };
        let guards = self.registry.read(|view| view.acquire(address, length, Access::Remote)).map_err(|refusal| match refusal {
            Refusal::NotRegistered => refuse("not (all) registered"),
            Refusal::NotAccessible => refuse("registered for local use only"),
            Refusal::Draining => refuse("being unregistered"),
        })?;
        let registered = guards.range(address, length).ok_or_else(|| refuse("not (all) registered"))?;
        let (target, source) = match slice.opcode {
            Opcode::Read => (slice.local, registered),
            Opcode::Write => (registered, slice.local),
        };
        if !self.checked {
            memory::copy(target, source);
            return Ok(());
        }
        memory::copy_checked(target, source).map_err(|error| {
            let (from, to) = (source.address(), target.address());
            Error::new(Code::Fault, format!("cannot copy {length} bytes from {from:#x} to {to:#x}: {error}; is all of it mapped?"))
        })
    }
}

impl Transport for LocalTransport {
    fn protocol(&self) -> &'static str {
        "local"
    }

    fn submit(&self, _segment: &Arc<dyn Segment>, slices: Slices) {
        for slice in slices.into_each() {
            let outcome = match slice.completion.is_cancelled() {
                true => Err(Error::quiet(Code::Canceled, "cancelled by the caller")),
                false => self.copy(&slice),
            };
            slice.finish(outcome);
        }
    }

    // Slices have ended when `submit` returns: there is nothing to cancel, evict, forget or wait for.

    fn cancel(&self) {}

    fn evict(&self, _range: MemoryRange) {}

    fn forget(&self, _segment: u64) {}

    fn shutdown(&self, _reason: Error) {}
}
