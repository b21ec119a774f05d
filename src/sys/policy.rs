//! From which NUMA nodes a thread gets the pages that it is the first to touch. A setting of each thread, which new threads inherit.

/// A set of nodes as the kernel reads and writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Nodes([u64; Nodes::MOST / 64]);

impl Nodes {
    /// Nodes that a kernel can have.
    const MOST: usize = 1024;
    /// How many bits calls that read a set are to be told: they take one less.
    pub(super) const BITS_TO_READ: libc::c_ulong = Nodes::MOST as libc::c_ulong + 1;

    const NONE: Nodes = Nodes([0; Nodes::MOST / 64]);

    /// `None` if no kernel has such a node.
    pub(super) fn only(node: u32) -> Option<Nodes> {
        let mut nodes = Nodes::NONE;
        *nodes.0.get_mut(node as usize / 64)? = 1 << (node % 64);
        Some(nodes)
    }

    pub(super) fn as_ptr(&self) -> *const u64 {
        self.0.as_ptr()
    }
}

/// The memory policy of a thread, for another one to follow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPolicy {
    mode: libc::c_int,
    nodes: Nodes,
}

impl MemoryPolicy {
    /// That of the calling thread. "The node I run on" becomes "the node that you run on now", preferred and not enforced. `None` where
    /// the kernel has no policies, or keeps them from this process. Two system calls.
    pub fn of_this_thread() -> Option<MemoryPolicy> {
        let mut policy = MemoryPolicy { mode: 0, nodes: Nodes::NONE };
        let nothing = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: the kernel writes a number and at most as many bits as it is told.
        let answer = unsafe {
            libc::syscall(
                libc::SYS_get_mempolicy,
                &raw mut policy.mode,
                policy.nodes.0.as_mut_ptr(),
                Nodes::MOST as libc::c_ulong,
                nothing,
                0,
            )
        };
        if answer != 0 {
            return None;
        }
        let is_local = policy.mode == libc::MPOL_DEFAULT
            || policy.mode == libc::MPOL_LOCAL
            || policy.mode == libc::MPOL_PREFERRED && policy.nodes == Nodes::NONE;
        if is_local {
            let mut node: libc::c_uint = 0;
            // SAFETY: the kernel writes one number.
            let answer = unsafe { libc::syscall(libc::SYS_getcpu, nothing, &raw mut node, nothing) };
            if answer != 0 {
                return None;
            }
            policy.mode = libc::MPOL_PREFERRED;
            policy.nodes = Nodes::only(node)?;
        }
        Some(policy)
    }

    /// Makes it that of the calling thread. Whether the kernel did: it may not where other nodes are allowed by now. One system call.
    pub fn adopt(&self) -> bool {
        // SAFETY: the kernel reads as many bits as it is told, less one; pages that are there stay where they are.
        unsafe { libc::syscall(libc::SYS_set_mempolicy, self.mode as libc::c_long, self.nodes.as_ptr(), Nodes::BITS_TO_READ) == 0 }
    }

    /// A policy of the node that every machine has.
    #[cfg(test)]
    pub(crate) fn on_first_node(mode: libc::c_int) -> MemoryPolicy {
        MemoryPolicy { mode, nodes: Nodes::only(0).unwrap() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_is_what_another_thread_adopts() {
        let Some(own) = MemoryPolicy::of_this_thread() else { return eprintln!("skipped: memory policies are forbidden here") };
        let other = MemoryPolicy::on_first_node(libc::MPOL_BIND);
        let adopted =
            std::thread::scope(|scope| scope.spawn(|| other.adopt().then(MemoryPolicy::of_this_thread).flatten()).join().unwrap());
        assert_eq!((adopted, MemoryPolicy::of_this_thread()), (Some(other), Some(own)));
    }

    #[test]
    fn the_node_one_runs_on_is_named() {
        let Some(policy) = MemoryPolicy::of_this_thread() else { return };
        assert_ne!(policy.nodes, Nodes::NONE);
    }
}
