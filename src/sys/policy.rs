//! From which NUMA nodes a thread gets the pages that it is the first to touch. A setting of each thread, which new threads inherit.

/// Bits of a set of nodes; the kernel has at most 1024 nodes.
const NODES: usize = 1024;

/// The memory policy of a thread, for another one to follow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPolicy {
    mode: libc::c_int,
    nodes: [u64; NODES / 64],
}

impl MemoryPolicy {
    /// That of the calling thread. "The node I run on" becomes "the node that you run on now", preferred and not enforced. `None` where
    /// the kernel has no policies, or keeps them from this process. Two system calls.
    pub fn of_this_thread() -> Option<MemoryPolicy> {
        let mut policy = MemoryPolicy { mode: 0, nodes: [0; NODES / 64] };
        let nothing = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: the kernel writes a number and at most as many bits as it is told.
        let answer = unsafe {
            libc::syscall(
                libc::SYS_get_mempolicy,
                &raw mut policy.mode,
                policy.nodes.as_mut_ptr(),
                NODES as libc::c_ulong,
                nothing,
                0,
            )
        };
        if answer != 0 {
            return None;
        }
        let is_local = policy.mode == libc::MPOL_DEFAULT
            || policy.mode == libc::MPOL_LOCAL
            || policy.mode == libc::MPOL_PREFERRED && policy.nodes.iter().all(|word| *word == 0);
        if is_local {
            let mut node: libc::c_uint = 0;
            // SAFETY: the kernel writes one number.
            let answer = unsafe { libc::syscall(libc::SYS_getcpu, nothing, &raw mut node, nothing) };
            if answer != 0 || node as usize >= NODES {
                return None;
            }
            policy.mode = libc::MPOL_PREFERRED;
            policy.nodes[node as usize / 64] = 1 << (node % 64);
        }
        Some(policy)
    }

    /// Makes it that of the calling thread. Whether the kernel did: it may not where other nodes are allowed by now. One system call.
    pub fn adopt(&self) -> bool {
        // SAFETY: the kernel reads as many bits as it is told; pages that are there stay where they are. It takes one bit less than told.
        unsafe {
            libc::syscall(libc::SYS_set_mempolicy, self.mode as libc::c_long, self.nodes.as_ptr(), (NODES + 1) as libc::c_ulong)
                == 0
        }
    }

    /// A policy of the node that every machine has.
    #[cfg(test)]
    pub(crate) fn on_first_node(mode: libc::c_int) -> MemoryPolicy {
        let mut policy = MemoryPolicy { mode, nodes: [0; NODES / 64] };
        policy.nodes[0] = 1;
        policy
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
        assert!(policy.nodes.iter().any(|word| *word != 0));
    }
}
