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

/// Copies like [`copy`], by system calls that answer `EFAULT` for bad pages instead of raising a signal; then part of it may have been
/// copied. Some two to four times slower for large ranges.
pub fn copy_checked(target: MemoryRange, source: MemoryRange) -> io::Result<()> {
    assert_eq!(target.length, source.length);
    if !target.intersects(&source) {
        // SAFETY: both ranges were promised by `MemoryRange::new`.
        return unsafe { copy_by_kernel(target.address, source.address, target.length) };
    }
    // The kernel promises no order. So through a buffer, and what is overwritten first has been read before.
    let mut buffer = vec![0_u8; target.length.min(OVERLAP_BUFFER) as usize];
    let mut done = 0;
    while done < target.length {
        let piece = OVERLAP_BUFFER.min(target.length - done);
        let offset = if target.address < source.address { done } else { target.length - done - piece };
        let between = buffer.as_mut_ptr() as u64;
        // SAFETY: the ranges were promised by `MemoryRange::new`, and the buffer is as long as any piece.
        unsafe {
            copy_by_kernel(between, source.address + offset, piece)?;
            copy_by_kernel(target.address + offset, between, piece)?;
        }
        done += piece;
    }
    Ok(())
}

const OVERLAP_BUFFER: u64 = 64 << 10;

/// Copies between ranges that do not overlap; bad pages of either are an error.
///
/// # Safety
/// The library may read the one range and write the other, as [`MemoryRange::new`] has it.
unsafe fn copy_by_kernel(target: u64, source: u64, length: u64) -> io::Result<()> {
    let mut done = 0;
    while done < length {
        let local = libc::iovec { iov_base: (source + done) as *mut libc::c_void, iov_len: (length - done) as usize };
        let remote = libc::iovec { iov_base: (target + done) as *mut libc::c_void, iov_len: (length - done) as usize };
        // SAFETY: the kernel checks every page of both ranges; the caller answers for whose they are.
        let copied = unsafe { libc::process_vm_writev(libc::getpid(), &local, 1, &remote, 1, 0) };
        match copied {
            -1 => return Err(io::Error::last_os_error()),
            0 => return Err(io::Error::from_raw_os_error(libc::EFAULT)),
            copied => done += copied as u64,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checked_copies_that_overlap_are_those_of_memmove() {
        let length = 3 * OVERLAP_BUFFER as usize + 5;
        for distance in [0, 1, 4095, 4096, OVERLAP_BUFFER as usize, OVERLAP_BUFFER as usize + 1, length - 1, length] {
            for upwards in [true, false] {
                let mut memory: Vec<u8> = (0..length + distance).map(|i| (i * 31 % 251) as u8).collect();
                let mut expected = memory.clone();
                let (source, target) = if upwards { (0, distance) } else { (distance, 0) };
                expected.copy_within(source..source + length, target);
                let base = memory.as_mut_ptr() as u64;
                // SAFETY: the memory is the test's.
                let [source, target] =
                    [source, target].map(|offset| unsafe { MemoryRange::new(base + offset as u64, length as u64) }.unwrap());
                copy_checked(target, source).unwrap();
                assert!(memory == expected, "{distance} {upwards}");
            }
        }
    }
}
