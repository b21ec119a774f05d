//! The few system calls that measuring needs: memory that may be handed to an engine, processor time, the
//! terminal's width, and dying with the parent.
#![allow(unsafe_code)]

use std::io;
use std::time::Duration;

use transfer_engine::sys::MemoryRange;

/// Zeroed memory of its own mapping, so that nothing else lies in the pages that are registered. Pages are there once touched.
pub struct Arena {
    start: *mut u8,
    length: usize,
}

// SAFETY: the arena owns its mapping, and access to the bytes follows the borrow of the arena.
unsafe impl Send for Arena {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps `length` bytes; none of them may be 0.
    pub fn new(length: usize) -> io::Result<Arena> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: asks for new memory; nothing of ours is replaced.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(Arena { start: start.cast(), length }) }
    }

    /// The part at `offset`, for an engine. The engine must be done with it before the arena is dropped, and nobody may look at the
    /// bytes while a transfer moves them. Panics outside of the arena.
    pub fn range(&self, offset: usize, length: usize) -> MemoryRange {
        assert!(offset <= self.length && length <= self.length - offset, "the arena has {} bytes", self.length);
        // SAFETY: inside of the mapping, which this program owns and hands to one engine.
        unsafe { MemoryRange::new(self.start as u64 + offset as u64, length as u64) }.expect("a mapping does not wrap")
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: mapped for reading as long as the arena lives.
        unsafe { std::slice::from_raw_parts(self.start, self.length) }
    }

    /// Its bytes, to be changed.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: mapped for reading and writing as long as the arena lives, and borrowed by nobody else.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.length) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nothing borrows from it any more.
        unsafe { libc::munmap(self.start.cast(), self.length) };
    }
}

/// Processor time that all threads of this process have used, user and system.
pub fn process_cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes the one structure it is given; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Sleeps until an event descriptor is readable, and clears it.
pub fn wait_for_event(descriptor: i32) {
    let mut poll = libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 };
    let mut count = 0u64;
    // SAFETY: one structure, and room for the eight bytes that such a descriptor gives.
    unsafe {
        libc::poll(&mut poll, 1, -1);
        libc::read(descriptor, (&raw mut count).cast(), 8);
    }
}

/// Columns of the terminal that standard output is.
pub fn terminal_width() -> Option<usize> {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: writes the one structure it is given; fails where there is no terminal.
    let answer = unsafe { libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &mut size) };
    (answer == 0 && size.ws_col > 0).then_some(usize::from(size.ws_col))
}

/// Has the kernel kill this process when the thread that started it ends.
pub fn die_with_parent() {
    // SAFETY: changes a setting of this process only.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arena_is_zeroed_and_holds_what_is_written() {
        let mut arena = Arena::new(10_000).unwrap();
        assert!(arena.bytes().iter().all(|byte| *byte == 0));
        arena.bytes_mut()[9_999] = 7;
        assert_eq!(arena.bytes()[9_999], 7);
        let range = arena.range(1, 9_999);
        assert_eq!((range.address(), range.length()), (arena.range(0, 0).address() + 1, 9_999));
    }

    #[test]
    fn work_uses_processor_time() {
        let before = process_cpu_time();
        let mut sum = 0u64;
        while process_cpu_time() - before < Duration::from_millis(1) {
            sum = std::hint::black_box(sum + 1);
        }
        assert!(sum > 0);
    }
}
