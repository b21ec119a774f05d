//! Who is at the other end of a unix socket.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// A process at the other end of a unix socket, when it connected or began to listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its number; 0 where it is in another namespace of processes that this one cannot see.
    pub process: i32,
    /// Its effective user.
    pub user: u32,
}

impl Peer {
    /// Of a connected unix socket. One system call.
    pub fn of(socket: &impl AsFd) -> io::Result<Peer> {
        let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut size = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: the kernel writes at most `size` bytes to `found`, which has as many.
        let result = unsafe {
            let socket = socket.as_fd().as_raw_fd();
            libc::getsockopt(socket, libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut found).cast(), &raw mut size)
        };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Peer { process: found.pid, user: found.uid })
    }

    /// Whether the process is there, be it somebody else's.
    pub fn is_alive(&self) -> bool {
        // SAFETY: signal 0 is none.
        let answer = unsafe { libc::kill(self.process.max(1), 0) };
        answer == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH)
    }
}

/// The effective user of this process.
pub fn own_user() -> u32 {
    // SAFETY: takes nothing and cannot fail.
    unsafe { libc::geteuid() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_other_end_of_an_own_pair_is_this_process() {
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let peer = Peer::of(&one).unwrap();
        assert_eq!(peer, Peer { process: std::process::id() as i32, user: own_user() });
        assert!(peer.is_alive());
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        assert!(!Peer { process: child.id() as i32, ..peer }.is_alive());
    }
}
