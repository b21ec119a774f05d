//! The threads of a process that help to register memory: few, long-lived, and shared by all its engines.
//!
//! Whoever has work takes part in it: [`Workers::run`] hands out jobs by number, to its own thread and to as many helpers as are free,
//! and returns when all jobs have ended. So work ends even if no thread can be started, several callers share the helpers, and their
//! number stays within the limit that `MC_MAX_CONCURRENT_REG_MR` sets. A job that calls `run` again does its work alone. Helpers work under
//! the caller's memory policy: pages that they are the first to touch come from the nodes that the caller's would come from.
//!
//! Threads start when there is work for them, end after [`IDLE`] without any, and are joined when the last engine is gone, so that the
//! library may be unloaded. A child of `fork` makes new ones for its engines. One mutex guards the queue; no job runs under it.

use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::sys::policy::MemoryPolicy;
use crate::sys::{fork, thread};

/// How long a thread waits for more work.
const IDLE: Duration = Duration::from_secs(10);

/// How long whoever has no more jobs of its own looks for the end of the others before it sleeps.
const SPIN: Duration = Duration::from_micros(50);

thread_local! {
    static IN_JOB: Cell<bool> = const { Cell::new(false) };
}

/// Jobs by number. Must not panic: what panics counts as done.
pub type Work = dyn Fn(usize) + Send + Sync;

/// See the module.
pub struct Workers {
    shared: Arc<Shared>,
    generation: u32,
}

struct Shared {
    state: Mutex<State>,
    news: Condvar,
}

#[derive(Default)]
struct State {
    /// What may still have use for helpers.
    queue: VecDeque<Arc<Batch>>,
    idle: usize,
    next_number: usize,
    closed: bool,
    threads: Vec<JoinHandle<()>>,
}

/// The jobs of one call.
struct Batch {
    work: Arc<Work>,
    /// The caller's.
    policy: Option<MemoryPolicy>,
    count: usize,
    next: AtomicUsize,
    unfinished: AtomicUsize,
    /// Helpers that may still come, under the pool's lock.
    places: AtomicUsize,
    /// Helpers that came.
    helpers: AtomicUsize,
    sleeps: AtomicBool,
    lock: Mutex<()>,
    end: Condvar,
}

impl Batch {
    /// Does jobs until none is left to be started.
    fn work(&self) {
        loop {
            let job = self.next.fetch_add(1, Ordering::Relaxed);
            if job >= self.count {
                return;
            }
            let within = IN_JOB.replace(true);
            let outcome = catch_unwind(AssertUnwindSafe(|| (self.work)(job)));
            IN_JOB.set(within);
            if outcome.is_err() {
                tracing::error!("a defect: a job of a registration panicked");
            }
            if self.unfinished.fetch_sub(1, Ordering::SeqCst) == 1 && self.sleeps.load(Ordering::SeqCst) {
                drop(self.lock.lock());
                self.end.notify_all();
            }
        }
    }

    fn wait(&self) {
        let begin = Instant::now();
        while self.unfinished.load(Ordering::Acquire) > 0 {
            if begin.elapsed() < SPIN {
                std::hint::spin_loop();
                continue;
            }
            let mut lock = self.lock.lock();
            self.sleeps.store(true, Ordering::SeqCst);
            while self.unfinished.load(Ordering::SeqCst) > 0 {
                self.end.wait(&mut lock);
            }
        }
    }
}

/// How a call went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Team {
    /// Threads that took part, the caller's among them.
    pub threads: usize,
}

impl Workers {
    /// Those of this process.
    pub fn of_process() -> Arc<Workers> {
        static CURRENT: Mutex<Weak<Workers>> = Mutex::new(Weak::new());
        // A thread that is not there any more may have held the lock when this process was forked. Nobody holds it for long.
        let Some(mut current) = CURRENT.try_lock_for(Duration::from_millis(200)) else { return Arc::new(Workers::new()) };
        match current.upgrade().filter(|workers| !fork::in_child_of(workers.generation)) {
            Some(workers) => workers,
            None => {
                let workers = Arc::new(Workers::new());
                *current = Arc::downgrade(&workers);
                workers
            }
        }
    }

    fn new() -> Workers {
        Workers { shared: Arc::new(Shared { state: Mutex::default(), news: Condvar::new() }), generation: fork::generation() }
    }

    /// Does the jobs `0..count` on at most `width` threads, the caller's among them. Returns when all have ended.
    pub fn run(&self, count: usize, width: usize, work: Arc<Work>) -> Team {
        let width = width.min(count);
        let may_have_help = width > 1 && !IN_JOB.get();
        let batch = Arc::new(Batch {
            work,
            policy: if may_have_help { MemoryPolicy::of_this_thread() } else { None },
            count,
            next: AtomicUsize::new(0),
            unfinished: AtomicUsize::new(count),
            places: AtomicUsize::new(width.saturating_sub(1)),
            helpers: AtomicUsize::new(0),
            sleeps: AtomicBool::new(false),
            lock: Mutex::new(()),
            end: Condvar::new(),
        });
        if may_have_help {
            self.call_helpers(&batch, width - 1);
        }
        batch.work();
        if may_have_help {
            self.shared.state.lock().queue.retain(|other| !Arc::ptr_eq(other, &batch));
        }
        batch.wait();
        Team { threads: 1 + batch.helpers.load(Ordering::Relaxed) }
    }

    fn call_helpers(&self, batch: &Arc<Batch>, wanted: usize) {
        let mut state = self.shared.state.lock();
        state.queue.push_back(batch.clone());
        state.threads.retain(|thread| !thread.is_finished());
        // All who are idle may have been woken for somebody else; then one thread too many is started, within the limit.
        let asked: usize = state.queue.iter().map(|batch| batch.places.load(Ordering::Relaxed)).sum();
        while state.threads.len() < wanted && state.idle < asked {
            let number = state.next_number;
            let shared = self.shared.clone();
            match thread::spawn(format!("te-register-{number}"), move || shared.help()) {
                Ok(thread) => {
                    state.next_number += 1;
                    // It counts as idle from now on, and takes that back when it begins.
                    state.idle += 1;
                    state.threads.push(thread);
                }
                Err(error) => {
                    tracing::debug!("registering goes on without another thread: {error}; the limit on processes is ulimit -u");
                    break;
                }
            }
        }
        drop(state);
        if wanted == 1 {
            self.shared.news.notify_one();
        } else {
            self.shared.news.notify_all();
        }
    }

    /// Threads that there are now.
    #[cfg(test)]
    fn thread_count(&self) -> usize {
        self.shared.state.lock().threads.iter().filter(|thread| !thread.is_finished()).count()
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        if fork::in_child_of(self.generation) {
            // The threads, and whoever held the lock, are the parent's.
            return;
        }
        let threads = {
            let mut state = self.shared.state.lock();
            state.closed = true;
            std::mem::take(&mut state.threads)
        };
        self.shared.news.notify_all();
        for thread in threads {
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

impl Shared {
    fn help(&self) {
        let mut state = self.state.lock();
        loop {
            while let Some(batch) = state.queue.front().cloned() {
                let places = batch.places.load(Ordering::Relaxed);
                if places == 0 {
                    state.queue.pop_front();
                    continue;
                }
                batch.places.store(places - 1, Ordering::Relaxed);
                batch.helpers.fetch_add(1, Ordering::Relaxed);
                state.idle -= 1;
                drop(state);
                if let Some(policy) = &batch.policy {
                    policy.adopt();
                }
                batch.work();
                drop(batch);
                state = self.state.lock();
                state.idle += 1;
            }
            if state.closed || self.news.wait_for(&mut state, IDLE).timed_out() && state.queue.is_empty() {
                state.idle -= 1;
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn every_job_runs_once() {
        let workers = Workers::new();
        for (count, width) in [(0, 4), (1, 4), (1000, 1), (1000, 4), (3, 100)] {
            let seen: Arc<Vec<AtomicUsize>> = Arc::new((0..count).map(|_| AtomicUsize::new(0)).collect());
            let counts = seen.clone();
            let team = workers.run(count, width, Arc::new(move |job| _ = counts[job].fetch_add(1, Ordering::Relaxed)));
            assert!(team.threads <= width.max(1), "{team:?}");
            assert!(seen.iter().all(|times| times.load(Ordering::Relaxed) == 1), "{count} {width}");
        }
    }

    /// The barrier opens only if as many jobs as are allowed run at once.
    #[test]
    fn jobs_run_side_by_side_up_to_the_width_and_no_further() {
        let workers = Workers::new();
        let (barrier, inside, most) = (Arc::new(Barrier::new(4)), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (now, peak) = (inside.clone(), most.clone());
        let work = move |_| {
            peak.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            barrier.wait();
            now.fetch_sub(1, Ordering::SeqCst);
        };
        assert_eq!(workers.run(40, 4, Arc::new(work)), Team { threads: 4 });
        assert_eq!((most.load(Ordering::SeqCst), workers.thread_count()), (4, 3));
    }

    #[test]
    fn callers_share_the_helpers_and_their_number_stays_bounded() {
        let workers = Arc::new(Workers::new());
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..20 {
                        workers.run(16, 3, Arc::new(|_| std::thread::yield_now()));
                        assert!(workers.thread_count() <= 2);
                    }
                });
            }
        });
    }

    #[test]
    fn a_job_that_asks_for_help_does_its_work_alone() {
        let workers = Arc::new(Workers::new());
        let (again, alone) = (workers.clone(), Arc::new(AtomicUsize::new(0)));
        let count = alone.clone();
        let work = move |_| {
            let team = again.run(8, 4, Arc::new(|_| std::thread::yield_now()));
            count.fetch_add(usize::from(team.threads == 1), Ordering::Relaxed);
        };
        workers.run(12, 3, Arc::new(work));
        assert_eq!(alone.load(Ordering::Relaxed), 12);
        assert!(workers.thread_count() <= 2);
    }

    #[test]
    fn a_job_that_panics_holds_nobody_up() {
        let workers = Workers::new();
        let done = Arc::new(AtomicUsize::new(0));
        let count = done.clone();
        let work = move |job| {
            assert_ne!(job, 3, "on purpose");
            count.fetch_add(1, Ordering::Relaxed);
        };
        workers.run(8, 2, Arc::new(work));
        assert_eq!(done.load(Ordering::Relaxed), 7);
    }

    #[test]
    fn threads_end_with_the_last_owner_and_carry_their_name() {
        let workers = Workers::new();
        let barrier = Arc::new(Barrier::new(2));
        let names = Arc::new(Mutex::new(Vec::new()));
        let (meet, list) = (barrier, names.clone());
        let work = move |_| {
            list.lock().push(std::thread::current().name().map(str::to_string));
            meet.wait();
        };
        workers.run(2, 2, Arc::new(work));
        assert!(names.lock().iter().flatten().any(|name| name == "te-register-0"), "{:?}", names.lock());
        let shared = workers.shared.clone();
        drop(workers);
        assert_eq!(Arc::strong_count(&shared), 1);
    }

    #[test]
    fn helpers_take_no_signals() {
        let workers = Workers::new();
        let barrier = Arc::new(Barrier::new(2));
        let masks = Arc::new(Mutex::new(Vec::new()));
        let (meet, list) = (barrier, masks.clone());
        let work = move |_| {
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap().trim().to_string();
            let is_helper = std::thread::current().name().is_some_and(|name| name.starts_with("te-register-"));
            list.lock().push((is_helper, u64::from_str_radix(&mask, 16).unwrap()));
            meet.wait();
        };
        workers.run(2, 2, Arc::new(work));
        let masks = masks.lock();
        let (_, helper) = masks.iter().find(|(is_helper, _)| *is_helper).unwrap();
        assert!([libc::SIGINT, libc::SIGTERM, libc::SIGUSR1].iter().all(|signal| helper >> (signal - 1) & 1 == 1), "{helper:#x}");
    }

    #[test]
    fn helpers_take_memory_where_their_caller_would() {
        let workers = Workers::new();
        // The first time, helpers inherit it when they start; afterwards they have to be told.
        for mode in [libc::MPOL_INTERLEAVE, libc::MPOL_BIND] {
            let Some(former) = MemoryPolicy::of_this_thread() else {
                return eprintln!("skipped: memory policies are forbidden here");
            };
            let policy = MemoryPolicy::on_first_node(mode);
            assert!(policy.adopt());
            let barrier = Arc::new(Barrier::new(2));
            let seen = Arc::new(Mutex::new(Vec::new()));
            let list = seen.clone();
            let work = move |_| {
                barrier.wait();
                list.lock().push(MemoryPolicy::of_this_thread().unwrap());
            };
            workers.run(2, 2, Arc::new(work));
            assert_eq!(*seen.lock(), vec![policy.clone(), policy]);
            former.adopt();
        }
    }

    #[test]
    fn engines_share_one_pool_and_a_child_has_its_own() {
        let first = Workers::of_process();
        assert!(Arc::ptr_eq(&first, &Workers::of_process()));
        first.run(2, 2, Arc::new(|_| ()));
        let code = fork::tests::fork_and_run(|| {
            let own = Workers::of_process();
            let done = Arc::new(AtomicUsize::new(0));
            let count = done.clone();
            own.run(4, 2, Arc::new(move |_| _ = count.fetch_add(1, Ordering::Relaxed)));
            let is_own = !Arc::ptr_eq(&own, &first);
            drop(own);
            i32::from(is_own && done.load(Ordering::Relaxed) == 4)
        });
        assert_eq!(code, 1);
    }
}
