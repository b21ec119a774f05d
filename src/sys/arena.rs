//! Memory that the library maps for itself: large pages where there are some, from one NUMA node where that is asked for.

use std::io;

use super::policy::Nodes;
use super::{MemoryRange, pages};

/// A private mapping, all zeros, which ends with the value. Nothing of it takes memory before it is touched, except where large pages were
/// set aside for it.
#[derive(Debug)]
pub struct Arena {
    range: MemoryRange,
    page: u64,
}

impl Arena {
    /// Maps at least `bytes`, rounded up to whole pages.
    ///
    /// Large pages that the administrator has set aside are taken where there are enough, else those that the kernel makes by itself.
    /// With `node` pages come from that NUMA node, and from others only when it has none left. Errors: `ENOMEM`; `EINVAL` if there is
    /// no such node.
    pub fn map(bytes: u64, node: Option<u32>) -> io::Result<Arena> {
        if bytes >= pages::HUGE_PAGE {
            let large = Arena::map_pages(bytes, pages::HUGE_PAGE, libc::MAP_HUGETLB | libc::MAP_HUGE_2MB);
            // At once: where a node or a control group has too few after all, touching one later would be a signal.
            if let Ok(arena) = large
                && arena.prefer(node).is_ok()
                && pages::can_populate()
                && pages::populate(arena.range).is_ok()
            {
                return Ok(arena);
            }
        }
        let arena = Arena::map_pages(bytes, pages::page_size(), 0)?;
        // SAFETY: advice about our own mapping, which changes no byte. Kernels without large pages refuse it.
        unsafe { libc::madvise(arena.start(), arena.length(), libc::MADV_HUGEPAGE) };
        arena.prefer(node)?;
        Ok(arena)
    }

    fn map_pages(bytes: u64, page: u64, flags: libc::c_int) -> io::Result<Arena> {
        let length = bytes.max(1).checked_next_multiple_of(page).and_then(|length| usize::try_from(length).ok());
        let length = length.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags;
        // SAFETY: a new anonymous mapping touches nothing.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), length, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the range is our own mapping, which lives as long as the arena; users of it keep that alive.
        let range = unsafe { MemoryRange::new(start as u64, length as u64) };
        Ok(Arena { range: range.ok_or_else(|| io::Error::from_raw_os_error(libc::EFAULT))?, page })
    }

    fn prefer(&self, node: Option<u32>) -> io::Result<()> {
        let Some(node) = node else { return Ok(()) };
        let nodes = Nodes::only(node).ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
        // SAFETY: the kernel reads as many bits as it is told, less one; the mapping is ours, and no byte changes.
        let answer = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.start(),
                self.length(),
                libc::MPOL_PREFERRED as libc::c_ulong,
                nodes.as_ptr(),
                Nodes::BITS_TO_READ,
                0 as libc::c_ulong,
            )
        };
        match answer {
            0 => Ok(()),
            _ => match io::Error::last_os_error() {
                // Kernels without NUMA, and containers that are not allowed to ask: there is nothing to choose.
                error if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) => {
                    tracing::warn!("memory cannot be taken from NUMA node {node} by preference: {error}");
                    Ok(())
                }
                error => Err(error),
            },
        }
    }

    /// The memory, whole pages.
    pub fn range(&self) -> MemoryRange {
        self.range
    }

    /// Bytes of the pages that it was mapped with.
    pub fn page(&self) -> u64 {
        self.page
    }

    /// Gives the kernel back the pages that lie wholly in `part`, which nobody uses and no device knows. They read as zeros when they
    /// are touched again. How many bytes that were; 0 where the kernel does not take them, or they are outside.
    pub fn give_back(&self, part: MemoryRange) -> u64 {
        let start = part.address().next_multiple_of(self.page);
        let end = (part.end() as u64) / self.page * self.page;
        if !self.range.contains(part.address(), part.length()) || start >= end {
            return 0;
        }
        // SAFETY: the pages are of our own mapping, and whoever calls says that nobody uses them.
        match unsafe { libc::madvise(start as *mut libc::c_void, (end - start) as usize, libc::MADV_DONTNEED) } {
            0 => end - start,
            _ => 0,
        }
    }

    fn start(&self) -> *mut libc::c_void {
        self.range.address() as *mut libc::c_void
    }

    fn length(&self) -> usize {
        self.range.length() as usize
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: our own mapping, which nobody uses any more.
        unsafe { libc::munmap(self.start(), self.length()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::memory;

    #[test]
    fn an_arena_is_whole_pages_of_zeros_that_can_be_given_back() {
        for bytes in [1, 4096, 4097, 3 << 20] {
            let arena = Arena::map(bytes, None).unwrap();
            let range = arena.range();
            assert!(range.length() >= bytes && range.length() < bytes + arena.page());
            assert_eq!(range.address() % arena.page(), 0);
            let (page, mut seen) = (range.part(0, 4096).unwrap(), [1_u8; 4096]);
            memory::store_checked(page, &[7; 4096]).unwrap();
            assert_eq!(arena.give_back(range), range.length());
            assert!(pages::is_in_memory(range.address()).is_ok_and(|present| !present || arena.page() > pages::page_size()));
            // SAFETY: the bytes are the test's own.
            let target = unsafe { MemoryRange::new(seen.as_mut_ptr() as u64, 4096) }.unwrap();
            memory::copy_checked(target, page).unwrap();
            assert_eq!(seen, [0; 4096]);
        }
    }

    #[test]
    fn only_pages_that_lie_wholly_inside_are_given_back() {
        let arena = Arena::map_pages(16 << 12, 4096, 0).unwrap();
        let range = arena.range();
        assert_eq!(arena.give_back(range.part(1, 4096).unwrap()), 0);
        assert_eq!(arena.give_back(range.part(4095, 4097).unwrap()), 4096);
        assert_eq!(arena.give_back(range.part(4096, 8193).unwrap()), 8192);
        // SAFETY: the range is looked at, not used.
        let outside = unsafe { MemoryRange::new(range.end() as u64, 4096) }.unwrap();
        assert_eq!(arena.give_back(outside), 0);
    }

    #[test]
    fn a_node_that_is_not_there_is_refused_and_one_that_is_gives_its_pages() {
        let Ok(arena) = Arena::map(1 << 20, Some(0)) else { return eprintln!("skipped: no NUMA node 0 here") };
        memory::store_checked(arena.range().part(0, 5).unwrap(), b"touch").unwrap();
        assert!(matches!(pages::numa_node(arena.range()), Some(0) | None));
        assert_eq!(Arena::map(1 << 20, Some(u32::MAX)).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }

    #[test]
    fn what_cannot_be_mapped_is_an_error() {
        assert_eq!(Arena::map(u64::MAX, None).unwrap_err().raw_os_error(), Some(libc::ENOMEM));
        assert_eq!(Arena::map(1 << 60, None).unwrap_err().raw_os_error(), Some(libc::ENOMEM));
    }
}
