//! Waking a thread that waits in [`Epoll`](super::epoll::Epoll): a wrapper of `eventfd`.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// A descriptor that is readable from [`EventFd::signal`] until [`EventFd::clear`]. Any thread may call either; neither blocks.
/// Signals are not counted: several before a clear are one.
#[derive(Debug)]
pub struct EventFd {
    descriptor: OwnedFd,
}

impl EventFd {
    /// A descriptor that is not readable yet; closed by `exec`. Fails when no descriptor is left (`EMFILE`, `ENFILE`).
    pub fn new() -> io::Result<EventFd> {
        // SAFETY: no pointer is passed.
        let descriptor = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and is owned by nobody else.
        Ok(EventFd { descriptor: unsafe { OwnedFd::from_raw_fd(descriptor) } })
    }

    /// Makes it readable. It cannot fail: a full counter is readable already.
    pub fn signal(&self) {
        let one = 1u64;
        // SAFETY: eight bytes are read from `one`.
        unsafe { libc::write(self.descriptor.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Makes it unreadable. True if it was signalled since the last clear.
    pub fn clear(&self) -> bool {
        let mut count = 0u64;
        // SAFETY: eight bytes are written to `count`.
        let read = unsafe { libc::read(self.descriptor.as_raw_fd(), (&raw mut count).cast(), 8) };
        read == 8
    }

    /// The number of the descriptor, for callers outside that poll it themselves. Valid as long as this object.
    pub fn raw(&self) -> RawFd {
        self.descriptor.as_raw_fd()
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::epoll::{Epoll, Events, Interest};
    use super::*;

    #[test]
    fn readable_from_signal_to_clear() {
        let event = EventFd::new().unwrap();
        let epoll = Epoll::new().unwrap();
        let mut events = Events::with_capacity(1);
        epoll.add(&event, Interest::READ, 9).unwrap();
        assert!(!event.clear());
        assert_eq!(epoll.wait(&mut events, Some(Duration::ZERO)).unwrap().len(), 0);
        event.signal();
        event.signal();
        assert_eq!(epoll.wait(&mut events, None).unwrap().next().unwrap().token, 9);
        assert!(event.clear());
        assert!(!event.clear());
        assert_eq!(epoll.wait(&mut events, Some(Duration::ZERO)).unwrap().len(), 0);
    }

    #[test]
    fn wakes_a_waiting_thread() {
        let event = EventFd::new().unwrap();
        let epoll = Epoll::new().unwrap();
        epoll.add(&event, Interest::READ, 1).unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| epoll.wait(&mut Events::with_capacity(1), Some(Duration::from_secs(30))).unwrap().len());
            event.signal();
            assert_eq!(waiter.join().unwrap(), 1);
        });
    }
}
