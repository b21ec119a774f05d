//! Ranges of the host program's memory, and copies between them.

use std::io;
use std::os::fd::AsRawFd;

/// A range of memory of this process that the host program has put into our hands.
///
/// Its existence is a promise: whoever made it (see [`MemoryRange::new`]) vouches that the library may read and write the range for
/// as long as the contract of the function that took it says. The promise covers who owns the bytes, not that pages are mapped:
/// system calls answer `EFAULT` for bad pages, and only [`copy`] and [`super::streaming`] touch memory directly.
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
        let address = self.address.checked_add(offset)?;
        (offset <= self.length && length <= self.length - offset).then_some(MemoryRange { address, length })
    }

    /// Its parts of these lengths, one behind the other; `None` for each that does not fit.
    pub fn parts(self, lengths: impl IntoIterator<Item = u64>) -> impl Iterator<Item = Option<MemoryRange>> {
        let mut offset = 0_u64;
        lengths.into_iter().map(move |length| {
            let part = self.part(offset, length);
            offset = offset.saturating_add(length);
            part
        })
    }

    /// The range that both make up if they overlap or touch.
    pub fn union(&self, other: &MemoryRange) -> Option<MemoryRange> {
        let (address, end) = (self.address.min(other.address), self.end().max(other.end()));
        let is_whole = self.end().min(other.end()) >= u128::from(self.address.max(other.address));
        // All 2^64 bytes have no length.
        let length = u64::try_from(end - u128::from(address)).ok()?;
        is_whole.then_some(MemoryRange { address, length })
    }

    /// What is behind the offset, for a system call.
    fn vector(&self, offset: u64) -> libc::iovec {
        libc::iovec { iov_base: (self.address + offset) as *mut libc::c_void, iov_len: (self.length - offset) as usize }
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
        return copy_apart(target, source);
    }
    // The kernel promises no order. So through a buffer, and what is overwritten first has been read before.
    let mut buffer = vec![0_u8; target.length.min(OVERLAP_BUFFER) as usize];
    let mut done = 0;
    while done < target.length {
        let length = OVERLAP_BUFFER.min(target.length - done);
        let offset = if target.address < source.address { done } else { target.length - done - length };
        let part = |range: MemoryRange| MemoryRange { address: range.address + offset, length };
        let between = MemoryRange { address: buffer.as_mut_ptr() as u64, length };
        copy_apart(between, part(source))?;
        copy_apart(part(target), between)?;
        done += length;
    }
    Ok(())
}

const OVERLAP_BUFFER: u64 = 64 << 10;

/// [`copy_checked`] of ranges that do not overlap.
fn copy_apart(target: MemoryRange, source: MemoryRange) -> io::Result<()> {
    let mut done = 0;
    while done < target.length {
        let (local, remote) = (source.vector(done), target.vector(done));
        // SAFETY: the kernel checks every page of both ranges; both were promised by `MemoryRange::new`.
        let copied = unsafe { libc::process_vm_writev(libc::getpid(), &local, 1, &remote, 1, 0) };
        match copied {
            -1 => {
                let error = io::Error::last_os_error();
                return match error.raw_os_error() {
                    // Some containers forbid the call, even towards oneself.
                    Some(libc::EPERM | libc::ENOSYS) => copy_through_pipe(target, source, done),
                    _ => Err(error),
                };
            }
            0 => return Err(io::Error::from_raw_os_error(libc::EFAULT)),
            copied => done += copied as u64,
        }
    }
    Ok(())
}

/// Copies bytes of ours into a range of the same length, as [`copy_checked`] does.
pub fn store_checked(target: MemoryRange, bytes: &[u8]) -> io::Result<()> {
    copy_checked(target, MemoryRange { address: bytes.as_ptr() as u64, length: bytes.len() as u64 })
}

/// What [`copy_checked`] does where the kernel does not let it: slower, and takes two descriptors for as long as it lasts. Begins at
/// the offset `done`.
fn copy_through_pipe(target: MemoryRange, source: MemoryRange, mut done: u64) -> io::Result<()> {
    let (receiver, sender) = io::pipe()?;
    while done < target.length {
        // What fits into the pipe by itself, so that neither call waits for the other.
        let length = (target.length - done).min(4096) as usize;
        let call = |moved: isize| match usize::try_from(moved) {
            Ok(moved) if moved > 0 => Ok(moved),
            Ok(_) => Err(io::Error::from_raw_os_error(libc::EFAULT)),
            Err(_) => Err(io::Error::last_os_error()),
        };
        // SAFETY: the kernel checks every page of the range, which was promised by `MemoryRange::new`.
        let sent = call(unsafe { libc::write(sender.as_raw_fd(), source.vector(done).iov_base, length) })?;
        let mut received = 0;
        while received < sent {
            let place = target.vector(done + received as u64).iov_base;
            // SAFETY: as above.
            received += call(unsafe { libc::read(receiver.as_raw_fd(), place, sent - received) })?;
        }
        done += sent as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    type Copy = fn(MemoryRange, MemoryRange) -> io::Result<()>;
    const CHECKED: [Copy; 2] = [copy_checked, |target, source| copy_through_pipe(target, source, 0)];

    fn range(bytes: &mut [u8]) -> MemoryRange {
        MemoryRange { address: bytes.as_mut_ptr() as u64, length: bytes.len() as u64 }
    }

    #[test]
    fn checked_copies_are_exact() {
        for copy in CHECKED {
            for length in [0, 1, 4095, 4096, 4097, 1 << 20] {
                let mut source: Vec<u8> = (0..length).map(|at| (at * 7 / 5) as u8).collect();
                let mut target = vec![0; length];
                copy(range(&mut target), range(&mut source)).unwrap();
                assert!(source == target, "{length}");
            }
        }
        let mut target = [0; 5];
        store_checked(range(&mut target), b"bytes").unwrap();
        assert_eq!(&target, b"bytes");
    }

    #[test]
    fn checked_copies_from_and_to_bad_pages_are_errors() {
        let mut good = vec![0; 10_000];
        let bad = MemoryRange { address: 16, length: 10_000 };
        for copy in CHECKED {
            for (target, source) in [(bad, range(&mut good)), (range(&mut good), bad)] {
                assert_eq!(copy(target, source).unwrap_err().raw_os_error(), Some(libc::EFAULT));
            }
        }
    }

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
