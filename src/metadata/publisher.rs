//! Group commit: changes that are told to a metadata server together.
//!
//! A publish carries all changes made before it begins, and one is under way at a time. Who has changed something asks for a publish
//! and returns when one that began afterwards has ended, with its outcome. Whoever finds none under way carries it out; those who come
//! meanwhile gather for the next, which one of them carries out. So a lone caller waits for nobody, and n callers at a time cost
//! two publishes.
//!
//! After a failure what the server has is unknown, and the publisher is *dirty* until a publish succeeds.
//!
//! `state` is locked for looking and while waiting, never during a publish. What is published, and how, is the caller's.

use std::sync::{Arc, OnceLock, PoisonError};

#[cfg(all(test, loom))]
use loom::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(all(test, loom)))]
use std::sync::{Condvar, Mutex, MutexGuard};

use crate::error::{Code, Error, Result};

/// Orders the publishes of one text. Any thread may call anything.
pub struct Publisher {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    is_publishing: bool,
    is_dirty: bool,
    is_closed: bool,
    /// What those who come now wait for.
    next: Arc<Round>,
}

/// The outcome of one publish, once it has ended.
#[derive(Default)]
struct Round(OnceLock<Result<()>>);

impl Default for Publisher {
    fn default() -> Publisher {
        Publisher { state: Mutex::new(State::default()), ended: Condvar::new() }
    }
}

impl Publisher {
    /// Returns when a publish that began after this call has ended, with its outcome. `publish` carries all changes; it is what every
    /// caller passes, and one of them runs it.
    ///
    /// Errors: what `publish` answers; Canceled when the publisher is closed before it has begun.
    pub fn publish(&self, publish: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut state = self.lock();
        let round = state.next.clone();
        loop {
            if let Some(outcome) = round.0.get() {
                return outcome.clone();
            }
            if state.is_closed {
                return Err(closed());
            }
            if !state.is_publishing {
                break;
            }
            state = self.wait(state);
        }
        // Nobody has begun the round, so it is still the next.
        state.next = Arc::default();
        state.is_dirty = false;
        self.run(state, Some(round), publish)
    }

    /// Runs `publish` while no other one is under way. It ends nobody's waiting, and may carry less than all changes.
    pub fn alone(&self, publish: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut state = self.lock();
        while state.is_publishing {
            state = self.wait(state);
        }
        match state.is_closed {
            true => Err(closed()),
            false => self.run(state, None, publish),
        }
    }

    fn run(&self, mut state: MutexGuard<'_, State>, round: Option<Arc<Round>>, publish: impl FnOnce() -> Result<()>) -> Result<()> {
        state.is_publishing = true;
        drop(state);
        let mut turn = Turn { publisher: self, round, outcome: None };
        let outcome = publish();
        turn.outcome = Some(outcome.clone());
        drop(turn);
        outcome
    }

    /// Takes down a change that nobody waits for and that has to be published soon.
    pub fn touch(&self) {
        self.lock().is_dirty = true;
    }

    /// Whether something has to be published that nobody waits for.
    pub fn is_dirty(&self) -> bool {
        self.lock().is_dirty
    }

    /// Lets no publish begin any more, and returns when none is under way.
    pub fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        self.ended.notify_all();
        while state.is_publishing {
            state = self.wait(state);
        }
    }

    /// How many wait for a publish that has not begun.
    #[cfg(test)]
    pub(crate) fn waiting(&self) -> usize {
        Arc::strong_count(&self.lock().next) - 1
    }

    /// Nothing is done under the lock that could leave the state half changed.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.ended.wait(state).unwrap_or_else(PoisonError::into_inner)
    }
}

/// The right to publish. Given back on drop, so also when publishing panics.
struct Turn<'a> {
    publisher: &'a Publisher,
    round: Option<Arc<Round>>,
    outcome: Option<Result<()>>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let broken_off = || Err(Error::quiet(Code::Internal, "publishing broke off, a defect of this library"));
        let outcome = self.outcome.take().unwrap_or_else(broken_off);
        let mut state = self.publisher.lock();
        state.is_publishing = false;
        state.is_dirty |= outcome.is_err();
        if let Some(round) = &self.round {
            let _ = round.0.set(outcome);
        }
        drop(state);
        self.publisher.ended.notify_all();
    }
}

fn closed() -> Error {
    Error::quiet(Code::Canceled, "it was not published: the engine is being destroyed")
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;

    fn failure() -> Error {
        Error::quiet(Code::Metadata, "the test says so")
    }

    #[test]
    fn a_lone_caller_publishes_at_once_each_time() {
        let publisher = Publisher::default();
        let mut count = 0;
        for _ in 0..3 {
            publisher
                .publish(|| {
                    count += 1;
                    Ok(())
                })
                .unwrap();
        }
        assert_eq!(count, 3);
    }

    /// Those who come while a publish is under way share one, which begins after it.
    #[test]
    fn who_comes_during_a_publish_shares_the_next() {
        let publisher = Publisher::default();
        let (begun, has_begun) = mpsc::channel();
        let (go, may_go) = mpsc::channel::<()>();
        let count = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let first = scope.spawn(|| {
                publisher.publish(move || {
                    begun.send(()).unwrap();
                    may_go.recv().unwrap();
                    Err(failure())
                })
            });
            has_begun.recv().unwrap();
            let others: Vec<_> = (0..16)
                .map(|_| {
                    scope.spawn(|| {
                        publisher.publish(|| {
                            count.fetch_add(1, Ordering::SeqCst);
                            Ok(())
                        })
                    })
                })
                .collect();
            while publisher.waiting() < 16 {
                std::thread::yield_now();
            }
            assert_eq!(count.load(Ordering::SeqCst), 0);
            go.send(()).unwrap();
            assert_eq!(first.join().unwrap().unwrap_err().code(), Code::Metadata);
            others.into_iter().for_each(|other| other.join().unwrap().unwrap());
        });
        assert_eq!(count.load(Ordering::SeqCst), 1);
        assert!(!publisher.is_dirty());
    }

    #[test]
    fn a_failure_stays_dirty_until_a_publish_succeeds() {
        let publisher = Publisher::default();
        assert!(!publisher.is_dirty());
        assert!(publisher.publish(|| Err(failure())).is_err());
        assert!(publisher.is_dirty());
        publisher.publish(|| Ok(())).unwrap();
        assert!(!publisher.is_dirty());
        publisher.touch();
        publisher.alone(|| Ok(())).unwrap();
        assert!(publisher.is_dirty(), "what was told alone may have been less");
    }

    #[test]
    fn a_publish_that_panics_fails_and_the_next_one_runs() {
        let publisher = Publisher::default();
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| publisher.publish(|| panic!("the test says so"))));
        assert!(caught.is_err());
        assert!(publisher.is_dirty());
        publisher.publish(|| Ok(())).unwrap();
    }

    #[test]
    fn closing_waits_for_the_publish_under_way_and_turns_away_who_waits() {
        let publisher = Publisher::default();
        let (begun, has_begun) = mpsc::channel();
        let (go, may_go) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let first = scope.spawn(|| {
                publisher.publish(move || {
                    begun.send(()).unwrap();
                    may_go.recv().unwrap();
                    Ok(())
                })
            });
            has_begun.recv().unwrap();
            let second = scope.spawn(|| publisher.publish(|| unreachable!()));
            let close = scope.spawn(|| {
                publisher.close();
                assert!(!publisher.lock().is_publishing);
            });
            assert_eq!(second.join().unwrap().unwrap_err().code(), Code::Canceled);
            go.send(()).unwrap();
            first.join().unwrap().unwrap();
            close.join().unwrap();
        });
        assert_eq!(publisher.publish(|| unreachable!()).unwrap_err().code(), Code::Canceled);
        assert_eq!(publisher.alone(|| unreachable!()).unwrap_err().code(), Code::Canceled);
    }
}

/// All interleavings of a few callers, with up to three forced switches between threads. A lost wake-up shows as a deadlock.
#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::atomic::{AtomicUsize, Ordering};
    use loom::thread;

    #[derive(Default)]
    struct Server {
        changes: AtomicUsize,
        stored: AtomicUsize,
        visitors: AtomicUsize,
        publishes: AtomicUsize,
    }

    impl Server {
        /// Fails after writing where the number of the publish is among `failing`.
        fn put(&self, failing: usize) -> Result<()> {
            assert_eq!(self.visitors.fetch_add(1, Ordering::SeqCst), 0, "one at a time");
            let changes = self.changes.load(Ordering::SeqCst);
            self.stored.store(changes, Ordering::SeqCst);
            self.visitors.fetch_sub(1, Ordering::SeqCst);
            match self.publishes.fetch_add(1, Ordering::SeqCst) {
                number if failing & (1 << number) == 0 => Ok(()),
                _ => Err(Error::quiet(Code::Metadata, "the test says so")),
            }
        }
    }

    fn model(run: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(run);
    }

    fn callers(count: usize, failing: usize) {
        model(move || {
            let shared = loom::sync::Arc::new((Publisher::default(), Server::default()));
            let call = move |shared: &(Publisher, Server), bit: usize| {
                let (publisher, server) = shared;
                server.changes.fetch_or(1 << bit, Ordering::SeqCst);
                let outcome = publisher.publish(|| server.put(failing));
                // Whatever came later has written it, too.
                assert_ne!(server.stored.load(Ordering::SeqCst) & (1 << bit), 0);
                outcome.is_ok()
            };
            let threads: Vec<_> = (1..count)
                .map(|bit| {
                    let shared = shared.clone();
                    thread::spawn(move || call(&shared, bit))
                })
                .collect();
            let mut succeeded = usize::from(call(&shared, 0));
            succeeded += threads.into_iter().map(|thread| usize::from(thread.join().unwrap())).sum::<usize>();
            let (publisher, server) = &*shared;
            let publishes = server.publishes.load(Ordering::SeqCst);
            assert!((1..=count).contains(&publishes));
            // Each publish ends the waiting of somebody, with its own outcome.
            let failed = (0..publishes).filter(|number| failing & (1 << number) != 0).count();
            assert!(succeeded >= publishes - failed && count - succeeded >= failed);
            assert_eq!(publisher.is_dirty(), failing & (1 << (publishes - 1)) != 0);
        });
    }

    #[test]
    fn two_callers() {
        callers(2, 0);
    }

    #[test]
    fn three_callers_of_which_the_first_publish_fails() {
        callers(3, 1);
    }

    #[test]
    fn two_callers_of_which_the_last_publish_fails() {
        callers(2, 2);
    }

    #[test]
    fn a_caller_against_closing() {
        model(|| {
            let shared = loom::sync::Arc::new((Publisher::default(), Server::default()));
            let caller = {
                let shared = shared.clone();
                thread::spawn(move || shared.0.publish(|| shared.1.put(0)).is_ok())
            };
            shared.0.close();
            let stored = shared.1.publishes.load(Ordering::SeqCst);
            let published = caller.join().unwrap();
            assert_eq!(stored, usize::from(published));
            assert_eq!(shared.1.publishes.load(Ordering::SeqCst), stored, "nothing begins afterwards");
        });
    }
}
