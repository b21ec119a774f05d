//! Waiting for many descriptors at once: a thin, safe wrapper of `epoll`.
//!
//! An [`Epoll`] may be shared by threads; the kernel does the locking. `add`, `modify` and `remove` are one system call each, `wait`
//! is one plus one for each signal that interrupts it. A descriptor that is closed leaves the set by itself, unless a duplicate of
//! it is still open.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// What to be told of about a descriptor. Level-triggered. Errors and hang-ups are always
/// reported, also for [`Interest::NONE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interest(u32);

impl Interest {
    /// Errors and hang-ups only.
    pub const NONE: Interest = Interest(0);
    /// Bytes, a connection or the end of the stream can be read.
    pub const READ: Interest = Interest(libc::EPOLLIN as u32);
    /// Bytes can be written.
    pub const WRITE: Interest = Interest(libc::EPOLLOUT as u32);
    /// Both.
    pub const READ_WRITE: Interest = Interest((libc::EPOLLIN | libc::EPOLLOUT) as u32);
}

/// One thing that happened to one descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The number that was given with the descriptor.
    pub token: u64,
    /// Reading will not block: bytes, a connection, or the end of the stream.
    pub readable: bool,
    /// Writing will not block.
    pub writable: bool,
    /// The connection is over in both directions, or has failed; the next read or write says how.
    pub closed: bool,
}

/// Room for what one [`Epoll::wait`] reports. Make it once and use it again.
pub struct Events {
    room: Vec<libc::epoll_event>,
}

impl Events {
    /// Room for `capacity` events (at least one) a wait; what does not fit is reported by the next wait.
    pub fn with_capacity(capacity: usize) -> Events {
        Events { room: vec![libc::epoll_event { events: 0, u64: 0 }; capacity.max(1)] }
    }
}

/// A set of descriptors to wait for.
#[derive(Debug)]
pub struct Epoll {
    descriptor: OwnedFd,
}

impl Epoll {
    /// An empty set. Fails when the process or the system has no descriptor left (`EMFILE`, `ENFILE`).
    pub fn new() -> io::Result<Epoll> {
        // SAFETY: no pointer is passed.
        let descriptor = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and is owned by nobody else.
        Ok(Epoll { descriptor: unsafe { OwnedFd::from_raw_fd(descriptor) } })
    }

    /// Puts a descriptor into the set; its events carry `token`.
    pub fn add(&self, descriptor: &impl AsFd, interest: Interest, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, descriptor, interest, token)
    }

    /// Changes what is reported of a descriptor.
    pub fn modify(&self, descriptor: &impl AsFd, interest: Interest, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, descriptor, interest, token)
    }

    /// Takes a descriptor out of the set. Events of it that a wait has already returned are still seen by whoever holds them.
    pub fn remove(&self, descriptor: &impl AsFd) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_DEL, descriptor, Interest::NONE, 0)
    }

    fn control(&self, operation: libc::c_int, descriptor: &impl AsFd, interest: Interest, token: u64) -> io::Result<()> {
        let mut event = libc::epoll_event { events: interest.0, u64: token };
        // SAFETY: `event` lives through the call and the kernel copies it.
        let result =
            unsafe { libc::epoll_ctl(self.descriptor.as_raw_fd(), operation, descriptor.as_fd().as_raw_fd(), &raw mut event) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Waits until something happens or `timeout` has passed (`None`: for ever; rounded up to milliseconds). No events: it passed.
    /// Signals do not end the wait.
    pub fn wait<'a>(
        &self,
        events: &'a mut Events,
        timeout: Option<Duration>,
    ) -> io::Result<impl ExactSizeIterator<Item = Event> + use<'a>> {
        let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let capacity = i32::try_from(events.room.len()).unwrap_or(i32::MAX);
        loop {
            let milliseconds = end.map_or(-1, |end| milliseconds_until(end, Instant::now()));
            // SAFETY: `room` has at least `capacity` elements for the kernel to fill in.
            let count = unsafe { libc::epoll_wait(self.descriptor.as_raw_fd(), events.room.as_mut_ptr(), capacity, milliseconds) };
            if count >= 0 {
                return Ok(events.room[..count as usize].iter().map(|event| {
                    let flags = event.events;
                    let has = |flag: libc::c_int| flags & flag as u32 != 0;
                    Event {
                        token: event.u64,
                        readable: has(libc::EPOLLIN),
                        writable: has(libc::EPOLLOUT),
                        closed: has(libc::EPOLLHUP) || has(libc::EPOLLERR),
                    }
                }));
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }
}

fn milliseconds_until(end: Instant, now: Instant) -> i32 {
    let rest = end.saturating_duration_since(now);
    i32::try_from(rest.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    fn wait(epoll: &Epoll, milliseconds: u64) -> Vec<Event> {
        let mut events = Events::with_capacity(8);
        epoll.wait(&mut events, Some(Duration::from_millis(milliseconds))).unwrap().collect()
    }

    #[test]
    fn level_triggered_events_repeat_until_read() {
        let epoll = Epoll::new().unwrap();
        let (mut near, mut far) = UnixStream::pair().unwrap();
        epoll.add(&near, Interest::READ, 7).unwrap();
        assert_eq!(wait(&epoll, 0), []);
        far.write_all(b"x").unwrap();
        let expected = [Event { token: 7, readable: true, writable: false, closed: false }];
        assert_eq!(wait(&epoll, 1000), expected);
        assert_eq!(wait(&epoll, 1000), expected);
        near.read_exact(&mut [0]).unwrap();
        assert_eq!(wait(&epoll, 0), []);
    }

    #[test]
    fn removed_descriptors_are_silent_and_hang_ups_always_reported() {
        let epoll = Epoll::new().unwrap();
        let (near, far) = UnixStream::pair().unwrap();
        epoll.add(&near, Interest::NONE, 3).unwrap();
        drop(far);
        assert!(wait(&epoll, 1000)[0].closed);
        epoll.remove(&near).unwrap();
        assert_eq!(wait(&epoll, 0), []);
        assert!(epoll.remove(&near).is_err());
    }

    #[test]
    fn waits_are_rounded_up_to_milliseconds() {
        let now = Instant::now();
        assert_eq!(milliseconds_until(now, now), 0);
        assert_eq!(milliseconds_until(now + Duration::from_nanos(1), now), 1);
        assert_eq!(milliseconds_until(now + Duration::from_secs(1 << 40), now), i32::MAX);
    }
}
