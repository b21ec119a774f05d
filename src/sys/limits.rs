//! What the kernel and the machine allow this process: limits, huge pages, CPUs, NUMA nodes.
//!
//! Everything is read anew at each call, from a system call or a small file of `/proc` or `/sys`; nothing is kept or locked. Only
//! [`raise_open_files`] changes anything.

use std::fmt;
use std::fs;
use std::io;

/// A limit of this process. `None` is unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// What holds now.
    pub soft: Option<u64>,
    /// How far the process itself may raise `soft`.
    pub hard: Option<u64>,
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let show = |value: Option<u64>| value.map_or("unlimited".to_string(), |value| value.to_string());
        write!(f, "{} (hard limit {})", show(self.soft), show(self.hard))
    }
}

/// Which limit. Named because the C library gives the numbers different types.
#[derive(Clone, Copy)]
enum Resource {
    LockedMemory,
    OpenFiles,
}

impl Resource {
    fn read(self) -> io::Result<libc::rlimit> {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        let resource = match self {
            Resource::LockedMemory => libc::RLIMIT_MEMLOCK,
            Resource::OpenFiles => libc::RLIMIT_NOFILE,
        };
        // SAFETY: writes the one structure it is given.
        if unsafe { libc::getrlimit(resource, &mut limit) } == 0 { Ok(limit) } else { Err(io::Error::last_os_error()) }
    }
}

impl From<libc::rlimit> for Limit {
    fn from(limit: libc::rlimit) -> Limit {
        let bound = |value| (value != libc::RLIM_INFINITY).then_some(value);
        Limit { soft: bound(limit.rlim_cur), hard: bound(limit.rlim_max) }
    }
}

/// Bytes that this process may lock, which is what registering memory with an RDMA device does.
pub fn locked_memory() -> io::Result<Limit> {
    Resource::LockedMemory.read().map(Limit::from)
}

/// Descriptors that this process may hold: files, connections, events.
pub fn open_files() -> io::Result<Limit> {
    Resource::OpenFiles.read().map(Limit::from)
}

/// Whether a call has failed because the process, or the system, has no descriptor left.
pub fn is_out_of_descriptors(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

/// Raises the soft limit of open files to the hard limit and returns what holds then. Needs no privilege.
pub fn raise_open_files() -> io::Result<Limit> {
    let mut limit = Resource::OpenFiles.read()?;
    if limit.rlim_cur != limit.rlim_max {
        limit.rlim_cur = limit.rlim_max;
        // SAFETY: reads the one structure it is given.
        if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(limit.into())
}

/// Large pages that the kernel has set aside, and whether it makes others by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HugePages {
    /// Pages set aside.
    pub total: u64,
    /// Pages of these that nobody has reserved or uses.
    pub free: u64,
    /// Size of one in bytes.
    pub size: u64,
    /// When the kernel backs ordinary memory with large pages: `always`, `madvise` or `never`. `None` where it never can.
    pub transparent: Option<String>,
}

/// Reads the state of large pages. Fails only where `/proc/meminfo` cannot be read.
pub fn huge_pages() -> io::Result<HugePages> {
    let transparent = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").ok();
    Ok(parse_huge_pages(&fs::read_to_string("/proc/meminfo")?, transparent.as_deref()))
}

fn parse_huge_pages(meminfo: &str, transparent: Option<&str>) -> HugePages {
    let number = |key: &str| {
        let rest = meminfo.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        rest.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
    };
    // The kernel lists the words and brackets the one that holds.
    let chosen = |text: &str| Some(text.split_once('[')?.1.split_once(']')?.0.to_string());
    let free: u64 = number("HugePages_Free");
    HugePages {
        total: number("HugePages_Total"),
        free: free.saturating_sub(number("HugePages_Rsvd")),
        size: number("Hugepagesize") << 10,
        transparent: transparent.and_then(chosen),
    }
}

/// CPUs that this process may keep busy, by its affinity and its control group; at least 1.
pub fn cpu_count() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Release of the running kernel, such as `6.1.0-18-amd64`.
pub fn kernel_version() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().to_string())
}

/// Numbers of the NUMA nodes that are online, ascending; one node, 0, where the kernel knows nothing of them.
pub fn numa_nodes() -> Vec<u32> {
    fs::read_to_string("/sys/devices/system/node/online").map_or(vec![0], |text| parse_list(&text))
}

/// The ports from which the kernel draws those of outgoing connections.
pub fn ephemeral_ports() -> io::Result<(u16, u16)> {
    let text = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")?;
    let mut words = text.split_whitespace().map(str::parse);
    match (words.next(), words.next()) {
        (Some(Ok(lowest)), Some(Ok(highest))) => Ok((lowest, highest)),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, format!("ip_local_port_range says {text:?}"))),
    }
}

/// Parses the kernel's list form, such as `0-1,4`. What is not a number is left out, and so is what goes beyond any real list.
fn parse_list(text: &str) -> Vec<u32> {
    const MOST: u32 = 4096;
    let mut numbers = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.parse::<u32>(), last.parse::<u32>()) {
            numbers.extend(first..=last.min(first.saturating_add(MOST)));
        }
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:       16 kB\nHugePages_Total:      10\nHugePages_Free:        7\nHugePages_Rsvd:        3\n\
                           HugePages_Surp:        0\nHugepagesize:       2048 kB\nHugetlb:           20480 kB\n";

    #[test]
    fn huge_pages_are_read_with_reserved_ones_taken_off() {
        let pages = parse_huge_pages(MEMINFO, Some("always [madvise] never\n"));
        assert_eq!(pages, HugePages { total: 10, free: 4, size: 2 << 20, transparent: Some("madvise".to_string()) });
    }

    #[test]
    fn a_kernel_without_huge_pages_has_none() {
        assert_eq!(parse_huge_pages("MemTotal: 16 kB\n", None), HugePages { total: 0, free: 0, size: 0, transparent: None });
        assert_eq!(parse_huge_pages("HugePages_Total: many\nHugePages_Rsvd: 3\n", Some("nonsense")).free, 0);
    }

    #[test]
    fn lists_of_the_kernel_are_parsed() {
        assert_eq!(parse_list("0\n"), [0]);
        assert_eq!(parse_list("0-2,5,7-8\n"), [0, 1, 2, 5, 7, 8]);
        assert!(parse_list("").is_empty());
        assert_eq!(parse_list("x,1-y,3"), [3]);
        assert!(parse_list("0-4294967295").len() < 10_000);
    }

    #[test]
    fn this_machine_can_be_read() {
        assert!(cpu_count() >= 1);
        assert!(!numa_nodes().is_empty());
        let kernel = kernel_version().unwrap();
        assert!(kernel.starts_with(|c: char| c.is_ascii_digit()), "{kernel}");
        assert!(huge_pages().unwrap().size.is_power_of_two());
        assert!(locked_memory().is_ok());
        let (lowest, highest) = ephemeral_ports().unwrap();
        assert!(lowest <= highest);
    }

    #[test]
    fn raising_open_files_reaches_the_hard_limit() {
        let before = open_files().unwrap();
        let raised = raise_open_files().unwrap();
        assert_eq!((raised.soft, raised.hard), (before.hard, before.hard));
        assert_eq!(open_files().unwrap(), raised);
    }

    #[test]
    fn an_infinite_limit_is_none() {
        let limit = Limit::from(libc::rlimit { rlim_cur: 1024, rlim_max: libc::RLIM_INFINITY });
        assert_eq!(limit, Limit { soft: Some(1024), hard: None });
        assert_eq!(limit.to_string(), "1024 (hard limit unlimited)");
    }
}
