//! A device that every machine has: an io_uring, whose fixed buffers are pinned as an RDMA device pins memory.
#![allow(unsafe_code)]

use std::io;
use std::sync::Mutex;

use io_uring::IoUring;
use transfer_engine::Result;
use transfer_engine::error::{Code, Error};
use transfer_engine::sys::MemoryRange;
use transfer_engine::transport::Device;
use transfer_engine::transport::device::{MemoryKey, registration_error};

/// Buffers that one ring holds at a time: as many as the kernel allows.
pub const SLOTS: u32 = 1 << 14;

/// A ring on which nothing is submitted. Any thread may register with it; the kernel lets one in at a time.
pub struct Ring {
    name: String,
    ring: IoUring,
    free: Mutex<Vec<u32>>,
}

impl Ring {
    /// Fails where the kernel has no io_uring, or it is forbidden.
    pub fn new(number: usize) -> io::Result<Ring> {
        let ring = IoUring::new(1)?;
        ring.submitter().register_buffers_sparse(SLOTS)?;
        Ok(Ring { name: format!("uring{number}"), ring, free: Mutex::new((0..SLOTS).collect()) })
    }

    fn give_back(&self, slot: u32) {
        if let Ok(mut free) = self.free.lock() {
            free.push(slot);
        }
    }

    /// Buffers that it has room for.
    #[cfg(test)]
    pub fn free_count(&self) -> usize {
        self.free.lock().map_or(0, |free| free.len())
    }

    fn update(&self, slot: u32, buffer: libc::iovec) -> io::Result<()> {
        // SAFETY: nothing is submitted on the ring, so the kernel pins the buffer and never reads or writes it.
        unsafe { self.ring.submitter().register_buffers_update(slot, &[buffer], None) }
    }
}

impl Device for Ring {
    fn name(&self) -> &str {
        &self.name
    }

    fn numa_node(&self) -> Option<u32> {
        None
    }

    /// What the kernel takes for one buffer.
    fn max_mr_size(&self) -> u64 {
        1 << 30
    }

    fn register(&self, chunk: MemoryRange, _remote_accessible: bool) -> Result<MemoryKey> {
        let refuse = |error: io::Error| registration_error(self, chunk, error.raw_os_error().unwrap_or(0), Some(SLOTS.into()));
        let slot = self.free.lock().ok().and_then(|mut free| free.pop());
        let slot = slot.ok_or_else(|| refuse(io::Error::from_raw_os_error(libc::ENOSPC)))?;
        let buffer = libc::iovec { iov_base: chunk.address() as *mut libc::c_void, iov_len: chunk.length() as usize };
        self.update(slot, buffer).map_err(|error| {
            self.give_back(slot);
            refuse(error)
        })?;
        Ok(MemoryKey { lkey: slot, rkey: 0, handle: slot as usize })
    }

    fn deregister(&self, key: &MemoryKey) -> Result<()> {
        let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        self.update(key.lkey, nothing)
            .map_err(|error| Error::new(Code::Context, format!("{} does not give buffer {} back: {error}", self.name, key.lkey)))?;
        self.give_back(key.lkey);
        Ok(())
    }
}
