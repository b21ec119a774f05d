//! A few threads for calls that block: name resolution, descriptor fetches, notifications.
//!
//! Threads start when there is work and nobody idle, up to [`MAX_THREADS`], and end after ten seconds without work. Jobs start in the
//! order in which they came. One mutex guards the queue; no job runs under it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::sys::thread;

/// Most threads of one [`Background`]. Jobs wait for connection time-outs of seconds at the worst; four peers may be dead at once
/// before others wait for them.
pub const MAX_THREADS: usize = 4;

const IDLE: Duration = Duration::from_secs(10);

type Job = Box<dyn FnOnce() + Send>;

/// The threads and their queue.
pub struct Background {
    shared: Arc<Shared>,
    name: &'static str,
}

struct Shared {
    state: Mutex<State>,
    work: Condvar,
    /// How long a thread waits for work.
    idle: Duration,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    idle: usize,
    closed: bool,
    /// Those that will look for a job again.
    threads: Vec<JoinHandle<()>>,
    /// Those that will not, and are about to end.
    leaving: Vec<JoinHandle<()>>,
}

impl State {
    /// The calling thread takes no more jobs.
    fn leave(&mut self) {
        let own = std::thread::current().id();
        self.leaving.extend(self.threads.extract_if(.., |thread| thread.thread().id() == own));
    }
}

impl Background {
    /// No thread yet. `name` is shown by `top -H`.
    pub fn new(name: &'static str) -> Background {
        Background::with_idle(name, IDLE)
    }

    fn with_idle(name: &'static str, idle: Duration) -> Background {
        Background { shared: Arc::new(Shared { state: Mutex::default(), work: Condvar::new(), idle }), name }
    }

    /// Runs the job soon. The job is given back if it will never run: the pool is closed, or no thread could be started.
    pub fn run(&self, job: impl FnOnce() + Send + 'static) -> Result<(), Job> {
        let mut state = self.shared.state.lock();
        if state.closed {
            return Err(Box::new(job));
        }
        state.jobs.push_back(Box::new(job));
        // What panics takes its thread along.
        state.threads.retain(|thread| !thread.is_finished());
        state.leaving.retain(|thread| !thread.is_finished());
        if state.jobs.len() > state.idle && state.threads.len() < MAX_THREADS {
            let shared = self.shared.clone();
            match thread::spawn(self.name, move || shared.work()) {
                Ok(thread) => state.threads.push(thread),
                Err(error) if state.threads.is_empty() => {
                    tracing::warn!("cannot start a thread ({error}); check the limit on processes (ulimit -u)");
                    return match state.jobs.pop_back() {
                        Some(job) => Err(job),
                        None => Ok(()),
                    };
                }
                Err(_) => {}
            }
        }
        drop(state);
        self.shared.work.notify_one();
        Ok(())
    }

    /// Takes no more jobs, drops those that have not started, and waits for those that have.
    pub fn close(&self) {
        let threads = {
            let mut state = self.shared.state.lock();
            state.closed = true;
            state.jobs.clear();
            let mut threads = std::mem::take(&mut state.threads);
            threads.append(&mut state.leaving);
            threads
        };
        self.shared.work.notify_all();
        for thread in threads {
            // Closing from within a job must not wait for itself.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    fn work(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                job();
                state = self.state.lock();
                continue;
            }
            if state.closed {
                return;
            }
            state.idle += 1;
            let timed_out = self.work.wait_for(&mut state, self.idle).timed_out();
            state.idle -= 1;
            if timed_out && state.jobs.is_empty() {
                // With the lock: a job that comes now finds one thread less.
                return state.leave();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn jobs_run_and_threads_stay_few() {
        let background = Background::new("test");
        let (done, results) = mpsc::channel();
        for number in 0..100 {
            let done = done.clone();
            assert!(background.run(move || done.send(number).unwrap()).is_ok());
            assert!(background.shared.state.lock().threads.len() <= MAX_THREADS);
        }
        let mut seen: Vec<i32> = results.iter().take(100).collect();
        seen.sort();
        assert_eq!(seen, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn closing_waits_for_running_jobs_and_refuses_new_ones() {
        let background = Background::new("test");
        let (started, wait) = mpsc::channel();
        let (done, result) = mpsc::channel();
        let job = background.run(move || {
            started.send(()).unwrap();
            std::thread::sleep(Duration::from_millis(20));
            done.send(()).unwrap();
        });
        assert!(job.is_ok());
        wait.recv().unwrap();
        background.close();
        assert!(result.try_recv().is_ok());
        assert!(background.run(|| ()).is_err());
    }

    #[test]
    fn a_blocked_job_does_not_hold_up_the_next() {
        let background = Background::new("test");
        let (release, blocked) = mpsc::channel::<()>();
        let (done, result) = mpsc::channel();
        assert!(background.run(move || _ = blocked.recv()).is_ok());
        assert!(background.run(move || done.send(()).unwrap()).is_ok());
        result.recv_timeout(Duration::from_secs(30)).unwrap();
        drop(release);
    }

    #[test]
    fn a_thread_that_ends_is_not_counted_on() {
        let background = Background::with_idle("test", Duration::from_millis(1));
        assert!(background.run(|| ()).is_ok());
        let begin = std::time::Instant::now();
        // Nobody is asked whether it has ended: until that can be seen it takes no job, and keeps no other thread from being started.
        while !background.shared.state.lock().threads.is_empty() {
            assert!(begin.elapsed() < Duration::from_secs(30), "it waits for no work any more");
            std::thread::yield_now();
        }
        let (done, result) = mpsc::channel();
        assert!(background.run(move || done.send(()).unwrap()).is_ok());
        result.recv_timeout(Duration::from_secs(30)).unwrap();
    }
}
