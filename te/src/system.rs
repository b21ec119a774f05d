//! The few system calls that measuring needs: memory that may be handed to an engine, processor time, the
//! terminal's width, dying with the parent, and loading the fake verbs library.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

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

    /// Has the kernel use large pages where it can, for what is touched from now on.
    pub fn in_large_pages(self) -> Arena {
        // SAFETY: advice on a mapping of ours touches nothing.
        unsafe { libc::madvise(self.start.cast(), self.length, libc::MADV_HUGEPAGE) };
        self
    }

    /// The part at `offset`, for an engine. The engine must be done with it before the arena is dropped, and nobody may look at the
    /// bytes while a transfer moves them. Panics outside of the arena.
    pub fn range(&self, offset: usize, length: usize) -> MemoryRange {
        assert!(offset <= self.length && length <= self.length - offset, "the arena has {} bytes", self.length);
        // SAFETY: inside of the mapping, which this program owns and hands to one engine.
        unsafe { MemoryRange::new(self.start as u64 + offset as u64, length as u64) }.expect("a mapping does not wrap")
    }

    /// Has the pages of this part there, and no others. Panics outside of the arena, or if the part is empty.
    pub fn touch(&mut self, offset: usize, length: usize) {
        let part = &mut self.bytes_mut()[offset..offset + length];
        part.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
        part[length - 1] = 1;
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

/// Memory whose pages are of one kind: private, or a mapping of a file. It begins at a border of 2 MiB.
pub struct Mapping {
    whole: *mut u8,
    whole_length: usize,
    start: *mut u8,
    length: usize,
}

// SAFETY: the mapping is owned, and access to its bytes follows the borrow of it.
unsafe impl Send for Mapping {}

impl Mapping {
    const BORDER: usize = 2 << 20;

    /// Maps `length` bytes, which may not be 0, for large pages or never for large pages.
    pub fn new(length: usize, is_huge: bool, file: Option<&File>) -> io::Result<Mapping> {
        let whole_length = length.checked_add(Mapping::BORDER).ok_or(io::ErrorKind::OutOfMemory)?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: asks for new memory, then replaces a part of that alone; advice touches nothing.
        unsafe {
            let whole = libc::mmap(std::ptr::null_mut(), whole_length, protection, anonymous, -1, 0);
            if whole == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            let whole = whole.cast::<u8>();
            let start = whole.add(whole.align_offset(Mapping::BORDER));
            let mapping = Mapping { whole, whole_length, start, length };
            if let Some(file) = file {
                let flags = libc::MAP_SHARED | libc::MAP_FIXED;
                if libc::mmap(start.cast(), length, protection, flags, file.as_raw_fd(), 0) == libc::MAP_FAILED {
                    return Err(io::Error::last_os_error());
                }
            }
            libc::madvise(start.cast(), length, if is_huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE });
            Ok(mapping)
        }
    }

    /// The memory, for an engine, which must be done with it before the mapping is dropped.
    pub fn range(&self) -> MemoryRange {
        // SAFETY: inside of the mapping, which this program owns and hands to one engine.
        unsafe { MemoryRange::new(self.start as u64, self.length as u64) }.expect("a mapping does not wrap")
    }

    /// Writes one byte in each `step`.
    pub fn write(&mut self, step: usize) {
        // SAFETY: inside of the mapping, and borrowed by nobody else.
        (0..self.length).step_by(step).for_each(|offset| unsafe { self.start.add(offset).write_volatile(1) });
    }

    /// The sum of one byte in each `step`.
    pub fn read(&self, step: usize) -> u64 {
        // SAFETY: inside of the mapping.
        (0..self.length).step_by(step).map(|offset| u64::from(unsafe { self.start.add(offset).read_volatile() })).sum()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nothing borrows from it any more.
        unsafe { libc::munmap(self.whole.cast(), self.whole_length) };
    }
}

/// A file that exists in memory only.
pub fn memory_file(length: u64) -> io::Result<File> {
    // SAFETY: the name lives through the call.
    let descriptor = unsafe { libc::memfd_create(c"te-bench".as_ptr(), libc::MFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and is owned by nobody else.
    let file = unsafe { File::from_raw_fd(descriptor) };
    file.set_len(length)?;
    Ok(file)
}

type SetOfFakeVerbs = unsafe extern "C" fn(libc::c_int, *const libc::c_char, libc::c_long) -> libc::c_int;

/// The verbs library that this repository's tests use, to be told what its devices are like. It stays loaded.
pub struct FakeVerbs(SetOfFakeVerbs);

impl FakeVerbs {
    /// Loads it, or finds it loaded by an engine.
    pub fn load(path: &Path) -> Result<FakeVerbs, String> {
        let fail = |why: &str| format!("{} {why}; build it as docs/performance.md says", path.display());
        let name = CString::new(path.as_os_str().as_encoded_bytes()).map_err(|_| fail("is no path"))?;
        // SAFETY: a C string; loading runs the library's initializers, and it has none.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        if library.is_null() {
            return Err(fail("cannot be loaded"));
        }
        // SAFETY: a library that is loaded, and a C string.
        let set = unsafe { libc::dlsym(library, c"fake_verbs_set".as_ptr()) };
        if set.is_null() {
            return Err(fail("is not the verbs library of tests/fake_verbs"));
        }
        // SAFETY: that is the function's type in the one library that has one of this name.
        Ok(FakeVerbs(unsafe { std::mem::transmute::<*mut libc::c_void, SetOfFakeVerbs>(set) }))
    }

    /// Sets a setting of a device, or of all with -1; for which there are, see the library's source.
    pub fn set(&self, device: i32, name: &CStr, value: i64) -> Result<(), String> {
        // SAFETY: a C string.
        match unsafe { (self.0)(device, name.as_ptr(), value) } {
            0 => Ok(()),
            _ => Err(format!("the fake verbs library has no setting {name:?} of device {device}; build it anew")),
        }
    }
}

/// Processor time that all threads of this process have used, user and system.
pub fn process_cpu_time() -> Duration {
    cpu_time(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// Processor time that this thread has used, user and system.
pub fn thread_cpu_time() -> Duration {
    cpu_time(libc::CLOCK_THREAD_CPUTIME_ID)
}

fn cpu_time(clock: libc::clockid_t) -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes the one structure it is given; both of these clocks always exist.
    unsafe { libc::clock_gettime(clock, &mut time) };
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

/// Waits until there is something to be read, or the other end is closed. False if there is nothing for so long.
pub fn wait_until_readable(descriptor: i32, limit: Duration) -> bool {
    let end = Instant::now() + limit;
    let mut poll = libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 };
    loop {
        let left = i32::try_from(end.saturating_duration_since(Instant::now()).as_millis()).unwrap_or(i32::MAX);
        // SAFETY: one structure.
        match unsafe { libc::poll(&mut poll, 1, left) } {
            // A signal was handled.
            -1 if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            answer => return answer > 0,
        }
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

/// Has the kernel kill the process that a command starts when the thread that starts it ends.
pub fn end_with_parent(command: &mut Command) {
    let prepare = || {
        die_with_parent();
        Ok(())
    };
    // SAFETY: between fork and exec of the child, this makes one system call and nothing else.
    unsafe { command.pre_exec(prepare) };
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
    fn pages_between_parts_that_are_touched_are_never_there() {
        let mut arena = Arena::new(16 << 12).unwrap();
        arena.touch(2 << 12, 4096);
        arena.touch((8 << 12) + 100, 4096);
        let mut there = [0u8; 16];
        // SAFETY: the mapping is whole pages, and there is a byte for each.
        assert_eq!(unsafe { libc::mincore(arena.start.cast(), arena.length, there.as_mut_ptr()) }, 0);
        let touched = Vec::from_iter((0..16).filter(|page| there[*page] & 1 == 1));
        assert_eq!(touched, [2, 8, 9]);
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
