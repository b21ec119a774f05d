//! Memory at an address that is the same in every process, so that inputs can name its bytes.

use std::sync::atomic::{AtomicU8, Ordering};

/// Pages with a fixed address and a known content.
pub struct Arena {
    bytes: &'static [AtomicU8],
}

impl Arena {
    /// Maps `length` bytes at `address`; once per process and address.
    #[allow(unsafe_code)]
    pub fn map(address: usize, length: usize) -> Arena {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: a new mapping that replaces none harms nobody.
        let mapped = unsafe { libc::mmap(address as *mut _, length, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        assert_eq!(mapped as usize, address, "the arena cannot be mapped: {}", std::io::Error::last_os_error());
        // SAFETY: the pages are mapped for good, and atomics may be read and written by anybody, the kernel included.
        let arena = Arena { bytes: unsafe { std::slice::from_raw_parts(mapped.cast(), length) } };
        arena.fill();
        arena
    }

    /// What byte number `index` is after [`Arena::fill`]: neither zero nor the same as its neighbours.
    pub fn pattern(index: usize) -> u8 {
        (index * 31 % 251 + index / 4096 + 1) as u8
    }

    pub fn fill(&self) {
        for (index, byte) in self.bytes.iter().enumerate() {
            byte.store(Arena::pattern(index), Ordering::Relaxed);
        }
    }

    pub fn content(&self) -> Vec<u8> {
        self.bytes.iter().map(|byte| byte.load(Ordering::Relaxed)).collect()
    }
}
