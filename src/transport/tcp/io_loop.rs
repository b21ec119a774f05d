//! The I/O threads: each waits for the events of its share of the connections and serves them.
//!
//! `sources` maps tokens to what they stand for and is locked for a look-up per event; tokens are never used twice, so an event that
//! arrives late for a connection that is gone finds nothing. The first loop also keeps the time: see [`Clock`].

use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::lane::Lane;
use super::server::{Acceptor, Connection};
use crate::sys::epoll::{Epoll, Events, Interest};
use crate::sys::event::EventFd;

/// What a token stands for.
#[derive(Clone)]
pub(super) enum Source {
    Lane(Arc<Lane>),
    Connection(Arc<Connection>),
    Acceptor(Arc<Acceptor>),
}

/// What the first loop does at intervals.
pub(super) trait Clock: Send + Sync {
    /// Looks for what has waited too long. Returns when to look again; `None`: when [`IoLoop::wake`] is called.
    fn tick(&self) -> Option<Duration>;
}

/// One I/O thread's set of connections.
pub(super) struct IoLoop {
    epoll: Epoll,
    wake: EventFd,
    next_token: AtomicU64,
    sources: Mutex<HashMap<u64, Source>>,
    stopping: AtomicBool,
}

const WAKE: u64 = 0;

impl IoLoop {
    pub fn new() -> io::Result<Arc<IoLoop>> {
        let io_loop = IoLoop {
            epoll: Epoll::new()?,
            wake: EventFd::new()?,
            next_token: AtomicU64::new(WAKE + 1),
            sources: Mutex::default(),
            stopping: AtomicBool::new(false),
        };
        io_loop.epoll.add(&io_loop.wake, Interest::READ, WAKE)?;
        Ok(Arc::new(io_loop))
    }

    /// Waits for a descriptor on behalf of `source` until [`IoLoop::remove`].
    pub fn add(&self, source: Source, descriptor: &impl AsFd, interest: Interest) -> io::Result<u64> {
        let token = self.next_token.fetch_add(1, Ordering::Relaxed);
        self.sources.lock().insert(token, source);
        self.epoll.add(descriptor, interest, token).inspect_err(|_| {
            self.sources.lock().remove(&token);
        })?;
        Ok(token)
    }

    pub fn modify(&self, descriptor: &impl AsFd, interest: Interest, token: Option<u64>) -> io::Result<()> {
        match token {
            Some(token) => self.epoll.modify(descriptor, interest, token),
            None => Ok(()),
        }
    }

    pub fn remove(&self, token: u64, descriptor: &impl AsFd) {
        let source = self.sources.lock().remove(&token);
        if source.is_some() {
            let _ = self.epoll.remove(descriptor);
        }
    }

    /// Makes the thread look up: at the clock, or at the order to stop.
    pub fn wake(&self) {
        self.wake.signal();
    }

    /// Makes [`IoLoop::run`] return soon.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        self.wake();
    }

    /// Serves events until stopped. All sources are dropped at the end.
    pub fn run(&self, clock: Option<&dyn Clock>) {
        let mut events = Events::with_capacity(64);
        let mut next_tick = clock.map(|_| Instant::now());
        while !self.stopping.load(Ordering::Relaxed) {
            let timeout = next_tick.map(|tick| tick.saturating_duration_since(Instant::now()));
            let mut woken = false;
            match self.epoll.wait(&mut events, timeout) {
                Ok(ready) => {
                    for event in ready {
                        if event.token == WAKE {
                            woken = self.wake.clear();
                            continue;
                        }
                        let source = self.sources.lock().get(&event.token).cloned();
                        let (readable, writable) = (event.readable || event.closed, event.writable || event.closed);
                        match source {
                            Some(Source::Lane(lane)) => lane.serve(readable, writable),
                            Some(Source::Connection(connection)) => connection.serve(readable, writable),
                            Some(Source::Acceptor(acceptor)) => acceptor.accept(),
                            None => {}
                        }
                    }
                }
                Err(error) => {
                    tracing::error!("cannot wait for connections: {error}");
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
            if let Some(clock) = clock {
                let now = Instant::now();
                if woken || next_tick.is_some_and(|tick| tick <= now) {
                    next_tick = clock.tick().map(|interval| now + interval);
                }
            }
        }
        let sources = std::mem::take(&mut *self.sources.lock());
        drop(sources);
    }
}
