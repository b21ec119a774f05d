//! Which pages of a range the process has, and asking the kernel for those that it has not. Nothing here reads or writes a byte of them.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use super::MemoryRange;

/// Borders that keep two threads off the same large page, which each would clear whole.
pub const HUGE_PAGE: u64 = 2 << 20;

/// Bytes of an ordinary page.
pub fn page_size() -> u64 {
    static SIZE: OnceLock<u64> = OnceLock::new();
    // SAFETY: passes no pointer.
    *SIZE.get_or_init(|| u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096))
}

/// What the kernel tells of a page of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// It has memory now, if only the one page of zeros that is read where nothing was written.
    pub present: bool,
    /// The memory is mapped here and nowhere else.
    pub exclusive: bool,
    /// The memory belongs to a file, or is shared.
    pub file: bool,
}

/// The kernel's table of the pages of this process. It belongs to the process that opened it, not to its children.
pub struct Pagemap(File);

impl Pagemap {
    /// Fails where `/proc` is not mounted.
    pub fn open() -> io::Result<Pagemap> {
        File::open("/proc/self/pagemap").map(Pagemap)
    }

    /// The page that holds the byte at `address`. One system call.
    pub fn page(&self, address: u64) -> io::Result<Page> {
        let mut entry = [0; 8];
        self.0.read_exact_at(&mut entry, address / page_size() * 8)?;
        let entry = u64::from_ne_bytes(entry);
        let has = |bit: u32| entry >> bit & 1 == 1;
        Ok(Page { present: has(63), exclusive: has(56), file: has(61) })
    }

    /// Whether the byte at `address` lies in a large page. No, where the kernel cannot tell: before Linux 6.7. One system call.
    pub fn is_huge(&self, address: u64) -> bool {
        let start = address & !(page_size() - 1);
        let mut found = Region { start: 0, end: 0, categories: 0 };
        let mut request = ScanRequest {
            size: size_of::<ScanRequest>() as u64,
            start,
            end: start.saturating_add(page_size()),
            regions: (&raw mut found) as u64,
            region_count: 1,
            category_mask: PAGE_IS_HUGE,
            return_mask: PAGE_IS_HUGE,
            ..ScanRequest::default()
        };
        // SAFETY: the kernel writes at most one region, and how far it came into the request.
        unsafe { libc::ioctl(self.0.as_raw_fd(), PAGEMAP_SCAN, &raw mut request) == 1 }
    }
}

/// `struct pm_scan_arg` of `linux/fs.h`.
#[repr(C)]
#[derive(Default)]
struct ScanRequest {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    regions: u64,
    region_count: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region`, which only the kernel writes.
#[repr(C)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::Ioctl = 0xc060_6610_u32 as libc::Ioctl;
const PAGE_IS_HUGE: u64 = 1 << 6;

/// Whether the page that holds the byte at `address` is in memory, for this process or for another one that has the same file. One
/// system call. Fails with `ENOMEM` where nothing is mapped.
pub fn is_in_memory(address: u64) -> io::Result<bool> {
    let mut state = 0u8;
    // SAFETY: the kernel reads none of the page, and writes one byte for it.
    match unsafe { libc::mincore((address & !(page_size() - 1)) as *mut libc::c_void, 1, &raw mut state) } {
        0 => Ok(state & 1 == 1),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The NUMA node of the first page, where there is a page and the kernel says. Touches nothing: a page that is absent stays absent.
pub fn numa_node(range: MemoryRange) -> Option<u32> {
    let mut node = [None];
    look_up_nodes(&[range.address() & !(page_size() - 1)], &mut node).ok()?;
    node[0]
}

/// Calls `visit` with the NUMA node of each page of a range, in order of address, as [`numa_node`] tells it. One system call for 512
/// pages. An error where the kernel does not say anything.
pub fn for_each_numa_node(range: MemoryRange, mut visit: impl FnMut(Option<u32>)) -> io::Result<()> {
    const AT_A_TIME: usize = 512;
    let (mut pages, mut nodes) = ([0; AT_A_TIME], [None; AT_A_TIME]);
    let mut next = range.address() & !(page_size() - 1);
    let mut left = (range.end() - u128::from(next)).div_ceil(u128::from(page_size()));
    if range.length() == 0 {
        return Ok(());
    }
    while left > 0 {
        let count = left.min(AT_A_TIME as u128) as usize;
        for page in &mut pages[..count] {
            *page = next;
            next = next.wrapping_add(page_size());
        }
        look_up_nodes(&pages[..count], &mut nodes[..count])?;
        nodes[..count].iter().for_each(|node| visit(*node));
        left -= count as u128;
    }
    Ok(())
}

/// The NUMA nodes of up to 512 pages.
fn look_up_nodes(pages: &[u64], nodes: &mut [Option<u32>]) -> io::Result<()> {
    assert!(pages.len() == nodes.len() && pages.len() <= 512);
    let mut status: [libc::c_int; 512] = [-1; 512];
    // SAFETY: without a list of target nodes nothing is moved; as many addresses are read as there are, and as many numbers written, for
    // which there is room. The pages are only looked up.
    let result = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0,
            pages.len(),
            pages.as_ptr().cast::<*const libc::c_void>(),
            std::ptr::null::<libc::c_int>(),
            status.as_mut_ptr(),
            0,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    for (node, status) in nodes.iter_mut().zip(status) {
        *node = u32::try_from(status).ok();
    }
    Ok(())
}

/// Whether what is mapped at `address` is shared, so that writing to a page does not give the process one of its own. Walks the list
/// of all mappings, some microseconds for each ten. `None` if nothing is mapped there.
pub fn is_shared(address: u64) -> Option<bool> {
    is_shared_in(&fs::read_to_string("/proc/self/maps").ok()?, address)
}

fn is_shared_in(maps: &str, address: u64) -> Option<bool> {
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
        (start <= address && address < end).then(|| rest.as_bytes().get(3) == Some(&b's'))
    })
}

/// Whether this kernel has [`populate`]: since Linux 5.14.
pub fn can_populate() -> bool {
    static CAN: OnceLock<bool> = OnceLock::new();
    // SAFETY: no byte is named; only whether the kernel knows the request matters.
    *CAN.get_or_init(|| unsafe { libc::madvise(std::ptr::null_mut(), 0, libc::MADV_POPULATE_WRITE) == 0 })
}

/// Has the kernel provide all pages that hold bytes of `range`: for writing, or only for reading where writing is not allowed. No byte
/// changes. Blocks until it is done.
///
/// Errors: `ENOMEM` where nothing is mapped or memory has run out, `EFAULT` for what cannot be accessed, such as the part of a mapping
/// that is beyond the end of its file, `EHWPOISON` for a broken page, `EINVAL` where the kernel does not do it.
pub fn populate(range: MemoryRange) -> io::Result<()> {
    match advise(range, libc::MADV_POPULATE_WRITE) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => advise(range, libc::MADV_POPULATE_READ),
        outcome => outcome,
    }
}

fn advise(range: MemoryRange, advice: libc::c_int) -> io::Result<()> {
    let start = range.address() & !(page_size() - 1);
    let length = (range.end() - u128::from(start)) as usize;
    loop {
        // SAFETY: populating changes no byte, and the range was promised by `MemoryRange::new`.
        if unsafe { libc::madvise(start as *mut libc::c_void, length, advice) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        // EAGAIN: the kernel was kept from it for the moment; a signal ends the call between two pages.
        if !matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) {
            return Err(error);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A mapping that ends with the value.
    pub(crate) struct Mapping {
        start: *mut libc::c_void,
        length: usize,
    }

    // SAFETY: the pointer is a number until somebody asks for the bytes.
    unsafe impl Send for Mapping {}
    // SAFETY: as above; tests look at the bytes when nobody writes them.
    unsafe impl Sync for Mapping {}

    impl Mapping {
        pub fn new(length: usize, protection: i32, flags: i32, file: Option<&File>) -> Mapping {
            let descriptor = file.map_or(-1, AsRawFd::as_raw_fd);
            // SAFETY: a new mapping touches nothing.
            let start = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, descriptor, 0) };
            assert_ne!(start, libc::MAP_FAILED);
            // SAFETY: only advice. Small pages, so that the tests know what they touch.
            unsafe { libc::madvise(start, length, libc::MADV_NOHUGEPAGE) };
            Mapping { start, length }
        }

        pub fn anonymous(length: usize) -> Mapping {
            Mapping::new(length, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, None)
        }

        pub fn range(&self) -> MemoryRange {
            // SAFETY: the mapping is ours.
            unsafe { MemoryRange::new(self.start as u64, self.length as u64) }.unwrap()
        }

        pub fn write(&self, offset: usize, byte: u8) {
            assert!(offset < self.length);
            // SAFETY: within the mapping, which nobody else uses.
            unsafe { self.start.cast::<u8>().add(offset).write_volatile(byte) }
        }

        pub fn read(&self, offset: usize) -> u8 {
            assert!(offset < self.length);
            // SAFETY: within the mapping, which nobody else uses.
            unsafe { self.start.cast::<u8>().add(offset).read_volatile() }
        }
    }

    impl Drop for Mapping {
        fn drop(&mut self) {
            // SAFETY: nobody uses the mapping any more.
            unsafe { libc::munmap(self.start, self.length) };
        }
    }

    pub(crate) fn memory_file(length: u64) -> File {
        use std::os::fd::FromRawFd;
        // SAFETY: the name lives through the call, and the descriptor is new.
        let file = unsafe { File::from_raw_fd(libc::memfd_create(c"te-test".as_ptr(), libc::MFD_CLOEXEC)) };
        file.set_len(length).unwrap();
        file
    }

    #[test]
    fn pages_are_absent_until_written_and_zero_pages_are_not_exclusive() {
        let page = page_size();
        let memory = Mapping::anonymous(3 * page as usize);
        let pagemap = Pagemap::open().unwrap();
        memory.write(0, 1);
        assert_eq!(memory.read(page as usize), 0);
        let look = |number| pagemap.page(memory.range().address() + number * page).unwrap();
        assert_eq!(look(0), Page { present: true, exclusive: true, file: false });
        assert_eq!((look(1).present, look(1).exclusive), (true, false));
        assert!(!look(2).present);
        assert!(is_in_memory(memory.range().address()).unwrap());
        assert!(!is_in_memory(memory.range().address() + 2 * page).unwrap());
        assert!(is_in_memory(page).is_err());
    }

    #[test]
    fn asking_for_the_node_of_absent_pages_leaves_them_absent() {
        let memory = Mapping::anonymous(4 * page_size() as usize);
        let (range, pagemap) = (memory.range(), Pagemap::open().unwrap());
        let present = || (0..4).filter(|page| pagemap.page(range.address() + page * page_size()).unwrap().present).count();
        assert_eq!((numa_node(range), present()), (None, 0));
        memory.write(0, 1);
        let written = numa_node(range.part(1, 1).unwrap());
        // Some containers forbid the question.
        assert!(written.is_none_or(|node| crate::sys::limits::numa_nodes().contains(&node)), "{written:?}");
        assert_eq!(present(), 1);
        drop(memory);
        assert_eq!(numa_node(range), None);
    }

    #[test]
    fn the_node_of_each_page_is_told_once_and_absent_ones_stay_absent() {
        let pages = 1100;
        let memory = Mapping::anonymous(pages * page_size() as usize);
        let present = |page: usize| page % 3 == 1;
        (0..pages).filter(|page| present(*page)).for_each(|page| memory.write(page * page_size() as usize, 1));
        let mut nodes = Vec::new();
        if for_each_numa_node(memory.range(), |node| nodes.push(node)).is_err() {
            return; // Some containers forbid the question.
        }
        assert_eq!(nodes.len(), pages);
        assert!(nodes.iter().enumerate().all(|(page, node)| node.is_some() == present(page)), "{nodes:?}");
        let pagemap = Pagemap::open().unwrap();
        let is_present = |page: usize| pagemap.page(memory.range().address() + page as u64 * page_size()).unwrap().present;
        assert!((0..pages).all(|page| is_present(page) == present(page)));
        // Parts of a page are that page; no bytes are none.
        let mut counts = Vec::new();
        for (offset, length) in [(1, 1), (page_size() - 1, 2), (5, 0)] {
            let mut count = 0;
            for_each_numa_node(memory.range().part(offset, length).unwrap(), |_| count += 1).unwrap();
            counts.push(count);
        }
        assert_eq!(counts, [1, 2, 0]);
    }

    #[test]
    fn large_pages_are_told_from_small_ones_where_there_are_any() {
        let length = 3 * HUGE_PAGE as usize;
        let memory = Mapping::anonymous(length);
        // SAFETY: only advice on memory of ours.
        unsafe { libc::madvise(memory.start, length, libc::MADV_HUGEPAGE) };
        (0..length).step_by(page_size() as usize).for_each(|offset| memory.write(offset, 1));
        let inside = memory.range().address().next_multiple_of(HUGE_PAGE) + 5;
        let mappings = fs::read_to_string("/proc/self/smaps").unwrap();
        let start = format!("{:x}-", memory.range().address());
        let entry = mappings.split_inclusive('\n').skip_while(|line| !line.starts_with(&start));
        let has_huge = entry.take(30).any(|line| line.starts_with("AnonHugePages:") && !line.contains(" 0 kB"));
        let pagemap = Pagemap::open().unwrap();
        let version = super::super::limits::kernel_version().unwrap();
        let mut numbers = version.split('.').map(|number| number.parse::<u32>().unwrap_or(0));
        let knows = has_huge && (numbers.next().unwrap(), numbers.next().unwrap()) >= (6, 7);
        assert_eq!(pagemap.is_huge(inside), knows);
        let small = Mapping::anonymous(4096);
        small.write(0, 1);
        assert!(!pagemap.is_huge(small.range().address()));
    }

    #[test]
    fn populating_provides_pages_and_changes_no_byte() {
        let page = page_size() as usize;
        let memory = Mapping::anonymous(4 * page);
        memory.write(page, 7);
        assert_eq!(memory.read(2 * page), 0);
        // From the middle of a page to the middle of another.
        populate(memory.range().part(page as u64 / 2, 3 * page as u64).unwrap()).unwrap();
        let pagemap = Pagemap::open().unwrap();
        for number in 0..4 {
            assert!(pagemap.page(memory.range().address() + number * page as u64).unwrap().exclusive, "{number}");
            assert_eq!(memory.read(number as usize * page), if number == 1 { 7 } else { 0 });
        }
    }

    #[test]
    fn what_may_only_be_read_is_populated_for_reading() {
        let page = page_size() as usize;
        let memory = Mapping::new(2 * page, libc::PROT_READ, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, None);
        populate(memory.range()).unwrap();
        assert!(Pagemap::open().unwrap().page(memory.range().address()).unwrap().present);
    }

    #[test]
    fn what_cannot_be_populated_is_an_error_and_no_signal() {
        let page = page_size();
        let file = memory_file(page);
        let beyond = Mapping::new(4 * page as usize, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, Some(&file));
        assert_eq!(populate(beyond.range()).unwrap_err().raw_os_error(), Some(libc::EFAULT));
        let nothing = Mapping::anonymous(page as usize).range();
        assert_eq!(populate(nothing).unwrap_err().raw_os_error(), Some(libc::ENOMEM));
    }

    #[test]
    fn shared_mappings_are_told_from_private_ones() {
        let page = page_size();
        let file = memory_file(page);
        let shared = Mapping::new(page as usize, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, Some(&file));
        let private = Mapping::new(page as usize, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE, Some(&file));
        assert_eq!(is_shared(shared.range().address() + 5), Some(true));
        assert_eq!(is_shared(private.range().address()), Some(false));
        assert_eq!((is_shared(1), is_shared_in("nonsense\n10-x rw-p\n10-20 rw", 0x10)), (None, Some(false)));
    }
}
