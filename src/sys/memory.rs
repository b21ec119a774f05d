//! Ranges of the host program's memory, and the one copy between them.

use std::io;

/// A range of memory of this process that the host program has put into our hands.
///
/// Its existence is a promise: whoever made it (see [`MemoryRange::new`]) vouches that the library may read and write the range for
/// as long as the contract of the function that took it says. The promise covers who owns the bytes, not that pages are mapped:
/// system calls answer `EFAULT` for bad pages, and only [`copy`] touches memory directly.
///
/// Never empty ranges that wrap: `address + length <= 2^64` always holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRange {
    address: u64,
    length: u64,
}

impl MemoryRange {
    /// Takes a range into our hands. `None` if it runs past the end of the address space; ending exactly there is fine.
    ///
    /// # Safety
    /// The caller owns the range, or was given it by its owner for the use that the receiving function documents, until that
    /// function's contract ends the use.
    pub unsafe fn new(address: u64, length: u64) -> Option<MemoryRange> {
        (length == 0 || address.checked_add(length - 1).is_some()).then_some(MemoryRange { address, length })
    }

    /// First byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Length in bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// One past the last byte; 2^64 does not fit into 64 bits, hence 128.
    pub fn end(&self) -> u128 {
        u128::from(self.address) + u128::from(self.length)
    }

    /// Whether `[address, address + length)` lies inside.
    pub fn contains(&self, address: u64, length: u64) -> bool {
        address >= self.address && u128::from(address) + u128::from(length) <= self.end()
    }

    /// Whether the two have a byte in common.
    pub fn intersects(&self, other: &MemoryRange) -> bool {
        u128::from(self.address) < other.end() && u128::from(other.address) < self.end()
    }

    /// The part `[offset, offset + length)` of this range, if it has one.
    pub fn part(&self, offset: u64, length: u64) -> Option<MemoryRange> {
        (offset <= self.length && length <= self.length - offset).then(|| MemoryRange { address: self.address + offset, length })
    }
}

/// Copies `source` to `target` as `memmove` does; the lengths must be equal. Pages that are not mapped end the process, as with
/// `memcpy`: see [`copy_checked`].
pub fn copy(target: MemoryRange, source: MemoryRange) {
    assert_eq!(target.length, source.length);
    // SAFETY: both ranges were promised by `MemoryRange::new`, and memmove allows overlap.
    unsafe { std::ptr::copy(source.address as *const u8, target.address as *mut u8, target.length as usize) }
}

/// Copies like [`copy`], by a system call that answers `EFAULT` for bad pages instead of raising a signal. Some two to four times
/// slower for large ranges, and overlap is not handled as by memmove: the kernel copies page by page, ascending.
pub fn copy_checked(target: MemoryRange, source: MemoryRange) -> io::Result<()> {
    assert_eq!(target.length, source.length);
    let mut done = 0;
    while done < target.length {
        let local =
            libc::iovec { iov_base: (source.address + done) as *mut libc::c_void, iov_len: (target.length - done) as usize };
        let remote =
            libc::iovec { iov_base: (target.address + done) as *mut libc::c_void, iov_len: (target.length - done) as usize };
        // SAFETY: the kernel checks every page of both ranges; both were promised by `MemoryRange::new`.
        let copied = unsafe { libc::process_vm_writev(libc::getpid(), &local, 1, &remote, 1, 0) };
        match copied {
            -1 => return Err(io::Error::last_os_error()),
            0 => return Err(io::Error::from_raw_os_error(libc::EFAULT)),
            copied => done += copied as u64,
        }
    }
    Ok(())
}
