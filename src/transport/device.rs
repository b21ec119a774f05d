//! What pins memory: an RDMA device with one protection domain, seen from whoever registers memory.

use crate::error::{Code, Error, Result};
pub use crate::registry::MemoryKey;
use crate::sys::{MemoryRange, limits};

/// A device that must know memory before its transport can use it. Any thread may call anything.
pub trait Device: Send + Sync {
    /// Such as `mlx5_0`.
    fn name(&self) -> &str;

    /// The NUMA node that it is attached to, if that is known.
    fn numa_node(&self) -> Option<u32>;

    /// Longest chunk that one registration takes, in bytes.
    fn max_mr_size(&self) -> u64;

    /// Whether memory can be registered with it now. A device that failed to start or has gone keeps its place among its transport's devices.
    fn is_active(&self) -> bool {
        true
    }

    /// Pins a chunk and makes it known to the device. Blocks for as long as the kernel needs; called from several threads at once.
    /// [`registration_error`] makes the error.
    fn register(&self, chunk: MemoryRange, remote_accessible: bool) -> Result<MemoryKey>;

    /// Whether the key is of memory that is registered. False once the device has failed and was opened anew: then nothing is to be undone,
    /// and [`Device::deregister`] does nothing.
    fn knows(&self, key: &MemoryKey) -> bool {
        let _ = key;
        true
    }

    /// Undoes it, after everything that used the key has ended. On an error the device may still reach the memory.
    fn deregister(&self, key: &MemoryKey) -> Result<()>;
}

/// The error for a chunk that a device or the system refused with `errno`. `max_mr` is how many registrations the device holds at most,
/// where that is known.
#[track_caller]
pub fn registration_error(device: &dyn Device, chunk: MemoryRange, errno: i32, max_mr: Option<u64>) -> Error {
    let locked = limits::locked_memory().map_or_else(|error| format!("unknown ({error})"), |limit| limit.to_string());
    let advice = match errno {
        libc::ENOMEM => {
            "raise the limit on locked memory (ulimit -l, LimitMEMLOCK= of systemd, --ulimit memlock of a container), or register \
             less memory or in fewer and larger pieces"
        }
        libc::EAGAIN => "the system is short of memory or of locked pages at the moment: try again, or register less memory",
        libc::EFAULT => {
            "all of the range must be mapped; memory of a GPU needs its driver's peer memory module, such as nvidia_peermem"
        }
        libc::EACCES | libc::EPERM => "the process may not write to all of the range, or not use the device: check both",
        libc::EINVAL => {
            "the range is longer than the device takes (MC_MAX_MR_SIZE can lower the length of a chunk), or of a kind that cannot be pinned"
        }
        libc::ENOSPC => {
            "the device has no room for another registration: unregister memory, or register it in fewer and larger pieces"
        }
        libc::EIO | libc::ENODEV => "the device does not answer or is gone: look into the kernel's log",
        libc::EHWPOISON => "a page of the range is broken (memory error): map it anew",
        libc::EOPNOTSUPP => "the device cannot register memory of this kind, such as a file or another device's memory",
        _ => "look into the kernel's log",
    };
    let code = match errno {
        libc::ENOMEM | libc::EAGAIN | libc::ENOSPC => Code::Limit,
        libc::EFAULT | libc::EHWPOISON => Code::Fault,
        _ => Code::Context,
    };
    let max_mr = max_mr.map_or("unknown".to_string(), |count| count.to_string());
    let text = format!(
        "cannot register {} bytes at {:#x} with {}: {} (errno {errno}); RLIMIT_MEMLOCK is {locked} bytes, max_mr_size {} bytes, max_mr \
         {max_mr}; {advice}",
        chunk.length(),
        chunk.address(),
        device.name(),
        std::io::Error::from_raw_os_error(errno),
        device.max_mr_size(),
    );
    Error::new(code, text)
}
