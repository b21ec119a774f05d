//! Threads that do something for an engine at intervals, until they are told to stop or the engine is gone.
//!
//! `stop` is locked for looking and while waiting, never while the action runs.

use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::Engine;
use crate::error::{Code, Error, Result};
use crate::sys::thread;

/// One such thread.
pub(super) struct Periodic {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: JoinHandle<()>,
}

impl Periodic {
    /// Runs `action` every `interval`, for the first time after one. `name` is shown by `top -H`.
    pub fn start(
        name: &str,
        interval: Duration,
        engine: Weak<Engine>,
        mut action: impl FnMut(&Engine) + Send + 'static,
    ) -> Result<Periodic> {
        let stop = Arc::new((Mutex::new(false), Condvar::new()));
        let ordered = stop.clone();
        let run = move || {
            loop {
                {
                    let mut stopped = ordered.0.lock();
                    if !*stopped {
                        ordered.1.wait_for(&mut stopped, interval);
                    }
                    if *stopped {
                        return;
                    }
                }
                match engine.upgrade() {
                    Some(engine) => action(&engine),
                    None => return,
                }
            }
        };
        let thread = thread::spawn(name, run)
            .map_err(|error| Error::new(Code::Limit, format!("cannot start a thread: {error}; check ulimit -u")))?;
        Ok(Periodic { stop, thread })
    }

    /// Ends the thread after what it is doing. Does not wait.
    pub fn order_stop(&self) {
        *self.stop.0.lock() = true;
        self.stop.1.notify_all();
    }

    /// Waits for the end of a thread that was told to stop, unless it is the calling one: the last reference to the engine may be its.
    pub fn join(self) {
        if self.thread.thread().id() != std::thread::current().id() {
            let _ = self.thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::config::Config;
    use crate::engine::{EngineOptions, PEER_TO_PEER};

    fn start(interval: Duration) -> (Arc<Engine>, Periodic, mpsc::Receiver<String>) {
        let options = EngineOptions { metadata: PEER_TO_PEER.into(), server_name: "127.0.0.1".into(), ..EngineOptions::default() };
        let engine = Engine::create(&options, Config::default()).unwrap();
        let (told, hears) = mpsc::channel();
        let tell = move |engine: &Engine| told.send(engine.name()).unwrap_or_default();
        let periodic = Periodic::start("te-test", interval, Arc::downgrade(&engine), tell).unwrap();
        (engine, periodic, hears)
    }

    #[test]
    fn the_action_runs_again_and_again_until_it_is_stopped() {
        let (engine, periodic, hears) = start(Duration::from_millis(1));
        for _ in 0..3 {
            assert_eq!(hears.recv_timeout(Duration::from_secs(30)).unwrap(), engine.name());
        }
        periodic.order_stop();
        periodic.join();
        hears.try_iter().for_each(drop);
        assert_eq!(hears.try_recv(), Err(mpsc::TryRecvError::Disconnected));
    }

    #[test]
    fn a_long_interval_does_not_delay_the_end() {
        let (_engine, periodic, hears) = start(Duration::from_secs(3600));
        periodic.order_stop();
        periodic.join();
        assert_eq!(hears.recv().ok(), None);
    }

    #[test]
    fn the_thread_ends_when_the_engine_is_gone() {
        let (engine, periodic, _hears) = start(Duration::from_millis(1));
        drop(engine);
        periodic.join();
    }
}
