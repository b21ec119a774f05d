//! How the end of many tasks becomes the end of a batch: two counts, who waits for the second to reach 0, and messages that go out
//! between the two.
//!
//! *running* counts tasks whose memory may still be touched, *unfinished* those that callers see as not over. A task leaves the first
//! count, then the second, each once; whoever adds tasks adds to *unfinished* first. Whoever brings *running* to 0 takes the messages;
//! its own task stays unfinished until they are delivered.
//!
//! **A message never leaves before the tasks that came with it have ended.** They are added to *running* under the lock of `messages`
//! and before the message is there. A thread that brought *running* to 0 looks again under that lock, and takes nothing if tasks were
//! added meanwhile: one of them will be the last.
//!
//! **A message is never left behind.** It is there, and `has_messages` says so, before the first of its tasks can end; each end is a
//! read-modify-write of *running*, so the thread that brings it to 0 for the last time sees both.
//!
//! **No wake-up is lost.** A waiter announces itself in `waiting`, then looks at *unfinished*; the last task subtracts from
//! *unfinished*, then looks at `waiting`, by a read-modify-write that adds nothing. Of the two read-modify-writes of `waiting` one comes
//! first: the waiter's, and the task sees it, or the task's, and the waiter's look at *unfinished* happens after it. The waiter holds
//! the lock from its look to its sleep, and the last task passes through the lock before it wakes.
//!
//! Tasks that end together are taken off the counts together; what is said of one of them is true of all.
//!
//! Cost of the end of one or more tasks: two read-modify-writes, three for the last; nobody locks unless it is the last and somebody waits
//! or a message is due.

use std::time::Instant;

#[cfg(all(test, loom))]
use loom::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};
#[cfg(not(all(test, loom)))]
use std::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

/// In `waiting`: somebody has been announced.
const ANNOUNCED: usize = 1 << (usize::BITS - 1);

/// The counts of one batch. Any thread may call anything.
pub(super) struct Progress<M> {
    running: AtomicUsize,
    unfinished: AtomicUsize,
    messages: Mutex<Vec<M>>,
    has_messages: AtomicBool,
    /// Who sleeps, and [`ANNOUNCED`].
    waiting: AtomicUsize,
    lock: Mutex<()>,
    done: Condvar,
}

impl<M> Default for Progress<M> {
    fn default() -> Progress<M> {
        Progress {
            running: AtomicUsize::new(0),
            unfinished: AtomicUsize::new(0),
            messages: Mutex::new(Vec::new()),
            has_messages: AtomicBool::new(false),
            waiting: AtomicUsize::new(0),
            lock: Mutex::new(()),
            done: Condvar::new(),
        }
    }
}

/// A panic elsewhere does not make counts wrong.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl<M> Progress<M> {
    /// Adds tasks that have not started. The message is due when no task is running any more.
    pub fn add(&self, count: usize, message: Option<M>) {
        self.unfinished.fetch_add(count, Ordering::AcqRel);
        match message.filter(|_| count > 0) {
            None => {
                self.running.fetch_add(count, Ordering::AcqRel);
            }
            Some(message) => {
                let mut messages = lock(&self.messages);
                self.running.fetch_add(count, Ordering::AcqRel);
                messages.push(message);
                self.has_messages.store(true, Ordering::Release);
            }
        }
    }

    /// The memory of so many tasks is not touched any more; at least one. Returns the messages that are due: to be delivered before
    /// [`Progress::end_tasks`] for the last of them.
    pub fn end_running(&self, count: usize) -> Vec<M> {
        if self.running.fetch_sub(count, Ordering::AcqRel) == count && self.has_messages.load(Ordering::Acquire) {
            let mut messages = lock(&self.messages);
            if self.running.load(Ordering::Acquire) == 0 {
                self.has_messages.store(false, Ordering::Relaxed);
                return std::mem::take(&mut *messages);
            }
        }
        Vec::new()
    }

    /// So many tasks are over for everybody; at least one. True if the last was among them and somebody has been announced.
    pub fn end_tasks(&self, count: usize) -> bool {
        if self.unfinished.fetch_sub(count, Ordering::AcqRel) > count {
            return false;
        }
        let waiting = self.waiting.fetch_add(0, Ordering::AcqRel);
        // Waking is a system call, also when nobody sleeps.
        if waiting & !ANNOUNCED > 0 {
            drop(lock(&self.lock));
            self.done.notify_all();
        }
        waiting & ANNOUNCED != 0
    }

    /// Tasks that are not over.
    pub fn unfinished(&self) -> usize {
        self.unfinished.load(Ordering::Acquire)
    }

    /// Whether all tasks are over. What they did happens before this.
    pub fn is_finished(&self) -> bool {
        self.unfinished() == 0
    }

    /// Says that somebody wants to know of the end by other means than [`Progress::park`], for good.
    pub fn announce(&self) {
        self.waiting.fetch_or(ANNOUNCED, Ordering::AcqRel);
    }

    /// Sleeps until all tasks are over or `end` has come (`None`: never). True: they are.
    pub fn park(&self, end: Option<Instant>) -> bool {
        self.waiting.fetch_add(1, Ordering::AcqRel);
        let mut held = lock(&self.lock);
        while !self.is_finished() {
            let Some(end) = end else {
                held = self.done.wait(held).unwrap_or_else(|poisoned| poisoned.into_inner());
                continue;
            };
            let rest = end.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                break;
            }
            held = self.done.wait_timeout(held, rest).unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
        drop(held);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        self.is_finished()
    }

    /// How many wait now.
    #[cfg(test)]
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_message_waits_for_the_tasks_that_came_with_it() {
        for _ in 0..if cfg!(miri) { 10 } else { 2000 } {
            let progress = Progress::default();
            let second_has_ended = AtomicBool::new(false);
            progress.add(1, None);
            let taken: usize = std::thread::scope(|scope| {
                let first = scope.spawn(|| {
                    let messages = progress.end_running(1);
                    assert!(messages.is_empty() || second_has_ended.load(Ordering::SeqCst), "sent too early");
                    messages.len()
                });
                progress.add(1, Some("message"));
                std::thread::yield_now();
                second_has_ended.store(true, Ordering::SeqCst);
                progress.end_running(1).len() + first.join().unwrap()
            });
            assert_eq!(taken, 1);
        }
    }
}

/// Every interleaving of small cases. A lost wake-up shows as a deadlock.
#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    #[test]
    fn progress_wakes_a_waiter_after_all_tasks() {
        let mut model = loom::model::Builder::new();
        // All interleavings of three threads take minutes; none that matters here needs more switches.
        model.preemption_bound = Some(3);
        model.check(|| {
            let progress = Arc::new(Progress::<()>::default());
            let bytes = Arc::new([UnsafeCell::new(0), UnsafeCell::new(0)]);
            progress.add(2, None);
            for task in 0..2 {
                let (progress, bytes) = (progress.clone(), bytes.clone());
                thread::spawn(move || {
                    // SAFETY: loom checks that nobody else looks at the same time.
                    #[allow(unsafe_code)]
                    bytes[task].with_mut(|byte| unsafe { *byte = 1 });
                    assert!(progress.end_running(1).is_empty());
                    progress.end_tasks(1);
                });
            }
            assert!(progress.park(None));
            for byte in bytes.iter() {
                // SAFETY: as above.
                #[allow(unsafe_code)]
                byte.with(|byte| assert_eq!(unsafe { *byte }, 1));
            }
        });
    }

    #[test]
    fn progress_of_tasks_that_end_together_and_alone_wakes_a_waiter_after_all() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let progress = Arc::new(Progress::default());
            let bytes = Arc::new([UnsafeCell::new(0), UnsafeCell::new(0)]);
            progress.add(3, Some(()));
            let messages: Vec<_> = [2, 1]
                .into_iter()
                .enumerate()
                .map(|(thread, tasks)| {
                    let (progress, bytes) = (progress.clone(), bytes.clone());
                    thread::spawn(move || {
                        // SAFETY: loom checks that nobody else looks at the same time.
                        #[allow(unsafe_code)]
                        bytes[thread].with_mut(|byte| unsafe { *byte = 1 });
                        let messages = progress.end_running(tasks);
                        progress.end_tasks(tasks);
                        messages.len()
                    })
                })
                .collect();
            assert!(progress.park(None));
            for byte in bytes.iter() {
                // SAFETY: as above.
                #[allow(unsafe_code)]
                byte.with(|byte| assert_eq!(unsafe { *byte }, 1));
            }
            assert_eq!(messages.into_iter().map(|thread| thread.join().unwrap()).sum::<usize>(), 1);
        });
    }

    #[test]
    fn progress_tells_whoever_is_announced_or_is_seen_finished() {
        loom::model(|| {
            let progress = Arc::new(Progress::<()>::default());
            progress.add(1, None);
            let task = {
                let progress = progress.clone();
                thread::spawn(move || {
                    progress.end_running(1);
                    progress.end_tasks(1)
                })
            };
            progress.announce();
            let seen = progress.is_finished();
            let told = task.join().unwrap();
            assert!(seen || told);
        });
    }

    #[test]
    fn progress_gives_a_message_out_once_and_after_its_task() {
        loom::model(|| {
            let progress = Arc::new(Progress::default());
            let second_has_ended = Arc::new(AtomicBool::new(false));
            progress.add(1, None);
            let first = {
                let (progress, second_has_ended) = (progress.clone(), second_has_ended.clone());
                thread::spawn(move || {
                    let messages = progress.end_running(1);
                    assert!(messages.is_empty() || second_has_ended.load(Ordering::Acquire));
                    messages.len()
                })
            };
            progress.add(1, Some(()));
            second_has_ended.store(true, Ordering::Release);
            let taken = progress.end_running(1).len();
            assert_eq!(taken + first.join().unwrap(), 1);
        });
    }
}
