//! Counters and the log. (skeleton)
#![allow(missing_docs, unused_variables)]

use std::sync::atomic::{AtomicU64, Ordering};

/// A counter that any thread may add to.
#[derive(Default)]
pub struct Counter(AtomicU64);
impl Counter {
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What an engine counts.
#[derive(Default)]
pub struct Counters {
    pub regions_registered: Counter,
    pub regions_unregistered: Counter,
    pub registrations_refused: Counter,
    pub batches_allocated: Counter,
    pub batches_freed: Counter,
    pub tasks_submitted: Counter,
    pub tasks_completed: Counter,
    pub tasks_failed: Counter,
    pub tasks_timed_out: Counter,
    pub tasks_cancelled: Counter,
    pub bytes_read: Counter,
    pub bytes_written: Counter,
    pub requests_served: Counter,
    pub requests_refused: Counter,
    pub bytes_served: Counter,
    pub connections_opened: Counter,
    pub connections_accepted: Counter,
    pub connections_failed: Counter,
    pub descriptor_fetches: Counter,
    pub notifications_sent: Counter,
    pub notifications_received: Counter,
}
