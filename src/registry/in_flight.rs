//! A count of users that can be closed and waited for.
//!
//! [`InFlight`] is one atomic word: the top bit says *closed*, the rest counts users.
//!
//! - Acquire adds one, looks at the old value, and takes the one back if it was closed. Cost: one `fetch_add`; when refused also a lock.
//! - Release subtracts one. Cost: one `fetch_sub`; a lock only if it was the last user of a closed word.
//! - Drain closes, then waits until the count is 0.
//!
//! **After a drain has succeeded nobody is inside.** Closing and acquiring are read-modify-writes of the same word, so each acquire
//! is ordered before the close, and is then counted, or after it, and then fails. All later operations are read-modify-writes too,
//! which continue the release sequence of each `Release` subtraction: the `Acquire` load that reads 0 happens after everything that
//! any user did.
//!
//! **No wake-up is lost.** Waiting uses one mutex and one condition variable for the whole process, so a word costs 8 bytes. A
//! waiter reads the word while it holds the mutex and sleeps only if the count is not 0, giving up the mutex in the same step.
//! Whoever brings a closed word to 0 (also by taking back a failed acquire) locks that mutex after its subtraction and then wakes
//! everybody. If it locks before the waiter does, the waiter reads 0; if after, the waiter sleeps already and is woken. The word
//! cannot reach 0 unseen: it is closed before the wait begins, so the subtraction that brings it to 0 sees the bit.
//! Waiters of other words wake, too, and sleep again; that is paid only by those who drain under traffic.
//!
//! **Release touches nothing of the word after its subtraction**, so that the owner may free it as soon as the drain has ended.

use std::time::{Duration, Instant};

#[cfg(all(test, loom))]
use loom::sync::{
    Condvar, Mutex,
    atomic::{AtomicU64, Ordering},
};
#[cfg(not(all(test, loom)))]
use std::sync::{
    Condvar, Mutex,
    atomic::{AtomicU64, Ordering},
};

const CLOSED: u64 = 1 << 63;

#[cfg(not(all(test, loom)))]
static LAST_RELEASE: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());
#[cfg(all(test, loom))]
loom::lazy_static! {
    static ref LAST_RELEASE: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());
}

/// What the waiters of all words sleep on.
fn last_release() -> &'static (Mutex<()>, Condvar) {
    &LAST_RELEASE
}

/// Counts who is inside, refuses who comes after [`InFlight::close`], and waits for the rest. Any thread may call anything.
pub struct InFlight(AtomicU64);

impl InFlight {
    /// Open, with nobody inside.
    pub fn new() -> InFlight {
        InFlight(AtomicU64::new(0))
    }

    /// Closed, with nobody inside.
    pub fn new_closed() -> InFlight {
        InFlight(AtomicU64::new(CLOSED))
    }

    /// Goes in, unless closed. Each success must be matched by one [`InFlight::release`].
    #[must_use]
    pub fn try_acquire(&self) -> bool {
        let open = self.0.fetch_add(1, Ordering::Acquire) & CLOSED == 0;
        if !open {
            self.release();
        }
        open
    }

    /// Goes out.
    pub fn release(&self) {
        if self.0.fetch_sub(1, Ordering::Release) == CLOSED | 1 {
            let (mutex, condition) = last_release();
            drop(mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
            condition.notify_all();
        }
    }

    /// Lets nobody in any more. Does not wait. Closing twice is fine. Whoever is refused sees what was written before.
    pub fn close(&self) {
        self.0.fetch_or(CLOSED, Ordering::Release);
    }

    /// Lets users in (again).
    pub fn open(&self) {
        self.0.fetch_and(!CLOSED, Ordering::Release);
    }

    /// How many are inside now; for texts and checks.
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Acquire) & !CLOSED
    }

    /// Closes, and waits until nobody is inside. False if `limit` passed first; it stays closed then, too.
    #[must_use]
    pub fn drain(&self, limit: Duration) -> bool {
        self.close();
        if self.count() == 0 {
            return true;
        }
        let started = Instant::now();
        let (mutex, condition) = last_release();
        let mut held = mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        while self.count() != 0 {
            let Some(rest) = limit.checked_sub(started.elapsed()).filter(|rest| !rest.is_zero()) else {
                return false;
            };
            held = condition.wait_timeout(held, rest).unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
        true
    }
}

impl Default for InFlight {
    fn default() -> InFlight {
        InFlight::new()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn closed_refuses_and_open_admits() {
        let word = InFlight::new_closed();
        assert!(!word.try_acquire());
        assert_eq!(word.count(), 0);
        word.open();
        assert!(word.try_acquire());
        word.close();
        assert!(!word.try_acquire());
        assert_eq!(word.count(), 1);
        word.release();
        assert!(word.drain(Duration::ZERO));
    }

    #[test]
    fn drain_gives_up_at_its_limit_and_stays_closed() {
        let word = InFlight::new();
        assert!(word.try_acquire());
        assert!(!word.drain(Duration::from_millis(5)));
        assert!(!word.try_acquire());
        word.release();
        assert!(word.drain(Duration::MAX));
    }

    #[test]
    fn drain_ends_only_when_everybody_is_out() {
        let rounds = if cfg!(miri) { 5 } else { 500 };
        for _ in 0..rounds {
            let word = InFlight::new();
            let drained = AtomicBool::new(false);
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| {
                        while word.try_acquire() {
                            assert!(!drained.load(Ordering::Relaxed), "inside after the drain");
                            word.release();
                        }
                    });
                }
                assert!(word.drain(Duration::from_secs(30)));
                drained.store(true, Ordering::Relaxed);
            });
        }
    }
}

/// The interleavings of a few users and one drain with up to three forced switches between threads. A lost wake-up shows as a deadlock: loom's condition variable never times out.
#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    struct Region {
        in_flight: InFlight,
        /// Stands for the memory: loom refuses an access that is not ordered with another one.
        bytes: UnsafeCell<()>,
    }

    fn model(run: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(run);
    }

    fn drain_against(users: usize, rounds: usize) {
        model(move || {
            let region = Arc::new(Region { in_flight: InFlight::new(), bytes: UnsafeCell::new(()) });
            let threads: Vec<_> = (0..users)
                .map(|_| {
                    let region = region.clone();
                    thread::spawn(move || {
                        for _ in 0..rounds {
                            if region.in_flight.try_acquire() {
                                region.bytes.with(|_| ());
                                region.in_flight.release();
                            }
                        }
                    })
                })
                .collect();
            assert!(region.in_flight.drain(Duration::MAX));
            region.bytes.with_mut(|_| ());
            assert!(!region.in_flight.try_acquire());
            for thread in threads {
                thread.join().unwrap();
            }
            assert_eq!(region.in_flight.count(), 0);
        });
    }

    #[test]
    fn drain_against_one_user_that_comes_twice() {
        drain_against(1, 2);
    }

    #[test]
    fn drain_against_two_users() {
        drain_against(2, 1);
    }

    #[test]
    fn what_was_written_before_close_is_seen_by_whoever_is_refused() {
        model(|| {
            let region = Arc::new(Region { in_flight: InFlight::new(), bytes: UnsafeCell::new(()) });
            let user = {
                let region = region.clone();
                thread::spawn(move || match region.in_flight.try_acquire() {
                    true => region.in_flight.release(),
                    false => region.bytes.with(|_| ()),
                })
            };
            region.bytes.with_mut(|_| ());
            region.in_flight.close();
            user.join().unwrap();
        });
    }

    #[test]
    fn what_was_written_before_open_is_seen_inside() {
        model(|| {
            let region = Arc::new(Region { in_flight: InFlight::new_closed(), bytes: UnsafeCell::new(()) });
            let user = {
                let region = region.clone();
                thread::spawn(move || {
                    if region.in_flight.try_acquire() {
                        region.bytes.with(|_| ());
                        region.in_flight.release();
                    }
                })
            };
            region.bytes.with_mut(|_| ());
            region.in_flight.open();
            assert!(region.in_flight.drain(Duration::MAX));
            region.bytes.with_mut(|_| ());
            user.join().unwrap();
        });
    }
}
