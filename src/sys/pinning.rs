//! Pinning memory for a moment, by which the kernel provides its pages as it does for a device.
//!
//! Pages that are asked for in any other way are taken from those that the kernel may move, for it cannot know that a device will pin them.
//! Where such memory has become fragmented they lie scattered, which makes providing, pinning, and giving them back slower by a quarter to
//! a half each; and where none of it may stay pinned (`ZONE_MOVABLE`, CMA), pinning first copies every page to another place. What is
//! pinned for long, as the fixed buffers of an io_uring are, comes from where it can stay.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::MemoryRange;

/// An io_uring on which nothing is ever submitted. Any thread may use it; the kernel lets one in at a time.
pub struct PinningRing(OwnedFd);

/// `IORING_FEAT_RW_ATTR`, of Linux 6.14: earlier ones may wait for all CPUs before they give buffers back.
const GIVES_BACK_AT_ONCE: u32 = 1 << 16;

const REGISTER_BUFFERS: libc::c_uint = 0;
const UNREGISTER_BUFFERS: libc::c_uint = 1;

impl PinningRing {
    /// Some 10 µs, the end included. Errors: `ENOSYS` and `EPERM` where there is no io_uring or it is forbidden, `EOPNOTSUPP` where it is
    /// too old or calls are filtered, `EMFILE`.
    pub fn open() -> io::Result<PinningRing> {
        refuse_if_filtered()?;
        // `struct io_uring_params`; the sixth number is the kernel's features.
        let mut parameters = [0u32; 30];
        // SAFETY: the kernel reads and writes the parameters, which are as long as it takes them.
        let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) };
        if ring < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new, and closed on exec.
        let ring = PinningRing(unsafe { OwnedFd::from_raw_fd(ring as libc::c_int) });
        if parameters[5] & GIVES_BACK_AT_ONCE == 0 {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        Ok(ring)
    }

    /// Pins the range for writing, and lets go of it. No byte changes; pages that are absent, or would be replaced when they are written,
    /// are provided. It counts as locked memory meanwhile.
    ///
    /// Errors, after which some pages may have been provided: `EFAULT` for what cannot be written or pinned for long, `ENOMEM` where
    /// `RLIMIT_MEMLOCK` or memory is exceeded.
    pub fn provide(&self, range: MemoryRange) -> io::Result<()> {
        refuse_if_filtered()?;
        let buffer = libc::iovec { iov_base: range.address() as *mut libc::c_void, iov_len: range.length() as usize };
        self.register(REGISTER_BUFFERS, &raw const buffer, 1)?;
        self.register(UNREGISTER_BUFFERS, std::ptr::null(), 0)
    }

    fn register(&self, operation: libc::c_uint, buffers: *const libc::iovec, count: libc::c_uint) -> io::Result<()> {
        // SAFETY: the kernel reads as many entries as it is told. Nothing is submitted, so it touches no byte of the buffer, and the
        // range was promised by `MemoryRange::new`.
        match unsafe { libc::syscall(libc::SYS_io_uring_register, self.0.as_raw_fd(), operation, buffers, count) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// A filter of system calls may end the process at one that it does not expect.
fn refuse_if_filtered() -> io::Result<()> {
    // SAFETY: passes no pointer.
    match unsafe { libc::prctl(libc::PR_GET_SECCOMP) } {
        0 => Ok(()),
        _ => Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::pages::tests::{Mapping, memory_file};
    use super::super::pages::{Pagemap, page_size};
    use super::*;

    fn open() -> Option<PinningRing> {
        PinningRing::open().inspect_err(|error| eprintln!("skipped: no io_uring here ({error})")).ok()
    }

    #[test]
    fn pages_are_provided_and_no_byte_changes() {
        let Some(ring) = open() else { return };
        let page = page_size() as usize;
        let memory = Mapping::anonymous(4 * page);
        memory.write(page, 7);
        assert_eq!(memory.read(2 * page), 0);
        // From the middle of a page to the middle of another; and again, for nothing may be left pinned.
        for _ in 0..2 {
            ring.provide(memory.range().part(page as u64 / 2, 3 * page as u64).unwrap()).unwrap();
        }
        let pagemap = Pagemap::open().unwrap();
        for number in 0..4 {
            assert!(pagemap.page(memory.range().address() + number * page as u64).unwrap().exclusive, "{number}");
            assert_eq!(memory.read(number as usize * page), if number == 1 { 7 } else { 0 });
        }
    }

    #[test]
    fn what_cannot_be_written_is_refused_and_the_ring_stays_usable() {
        let Some(ring) = open() else { return };
        let page = page_size() as usize;
        let constant = Mapping::new(2 * page, libc::PROT_READ, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, None);
        let file = memory_file(page as u64);
        let beyond = Mapping::new(4 * page, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, Some(&file));
        for refused in [constant.range(), beyond.range()] {
            assert_eq!(ring.provide(refused).unwrap_err().raw_os_error(), Some(libc::EFAULT));
        }
        let memory = Mapping::anonymous(page);
        ring.provide(memory.range()).unwrap();
    }

    #[test]
    fn a_process_whose_calls_are_filtered_makes_none_of_these() {
        let code = super::super::fork::tests::fork_and_run(|| {
            let ring = PinningRing::open().ok();
            let allow = [libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW }];
            let program = libc::sock_fprog { len: 1, filter: allow.as_ptr().cast_mut() };
            // SAFETY: the program is one instruction, which allows everything, and the kernel copies it.
            let is_filtered = unsafe {
                libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                    && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
            };
            let is_refused = |outcome: io::Result<()>| outcome.is_err_and(|error| error.raw_os_error() == Some(libc::EOPNOTSUPP));
            let memory = Mapping::anonymous(page_size() as usize);
            let refuses =
                is_refused(PinningRing::open().map(|_| ())) && ring.is_none_or(|ring| is_refused(ring.provide(memory.range())));
            i32::from(!is_filtered || refuses)
        });
        assert_eq!(code, 1);
    }
}
