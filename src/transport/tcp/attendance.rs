//! Lanes that callers serve: a caller that polls for the end of its transfers receives the replies itself, which spares waking an
//! I/O thread for each (about a third of a small round trip).
//!
//! A lane becomes *attended* when work is pushed while callers poll without pause: epoll is told to keep silent about what arrives
//! there, and every poll looks at all attended lanes. It becomes ordinary again when much is queued on it, when nobody has polled for a
//! moment (the clock looks), or when somebody begins to wait in another way. Being attended is only about who receives: an attended lane that nobody polls is
//! served with a delay of some milliseconds, not never, and what does not fit into a socket at once is sent by the I/O thread.
//!
//! `lanes` is a leaf lock: taken with a lane's `state` held, and never the other way round. A lane that becomes attended enters the list
//! and then looks at `watchers`; whoever begins to watch counts itself and then goes through the list: one of them sees the other.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::RwLock;

use super::lane::Lane;

/// Most bytes on an attended lane. With more, the caller's one thread would receive what several could: 5 to 10 % slower here.
pub(super) const MOST_BYTES: u64 = 1280 << 10;

/// Longest time between two polls of callers that poll without pause. One that sleeps in between would let sockets run full.
const PACE: Duration = Duration::from_micros(100);

/// How long attended lanes with work may go without a poll; those without work stay for [`IDLE`].
const NEGLECTED: Duration = Duration::from_millis(3);
const IDLE: Duration = Duration::from_millis(200);

/// The attended lanes of a transport.
pub(super) struct Attendance {
    start: Instant,
    /// When somebody polled last, in nanoseconds after `start`.
    polled: AtomicU64,
    /// Nanoseconds between the last two polls.
    pace: AtomicU64,
    /// Callers that wait otherwise than by polling. Shared with whoever knows of them.
    watchers: Arc<AtomicUsize>,
    lanes: RwLock<Arc<[Arc<Lane>]>>,
}

impl Attendance {
    pub fn new(watchers: Arc<AtomicUsize>) -> Attendance {
        Attendance {
            start: Instant::now(),
            polled: AtomicU64::new(0),
            pace: AtomicU64::new(u64::MAX),
            watchers,
            lanes: RwLock::new(Arc::from([])),
        }
    }

    fn since_last_poll(&self) -> Duration {
        let now = self.start.elapsed();
        now.saturating_sub(Duration::from_nanos(self.polled.load(Ordering::Relaxed)))
    }

    /// Whether lanes may become attended now.
    pub fn is_open(&self) -> bool {
        self.watchers.load(Ordering::SeqCst) == 0
            && self.pace.load(Ordering::Relaxed) < PACE.as_nanos() as u64
            && self.since_last_poll() < NEGLECTED
    }

    /// Takes a lane into the list. False: somebody watches, the lane must stay ordinary.
    pub fn enter(&self, lane: &Arc<Lane>) -> bool {
        {
            let mut lanes = self.lanes.write();
            *lanes = lanes.iter().chain([lane]).cloned().collect();
        }
        let accepted = self.watchers.load(Ordering::SeqCst) == 0;
        if !accepted {
            self.leave(lane);
        }
        accepted
    }

    /// Takes a lane off the list.
    pub fn leave(&self, lane: &Lane) {
        let mut lanes = self.lanes.write();
        *lanes = lanes.iter().filter(|other| !std::ptr::eq(&***other, lane)).cloned().collect();
    }

    fn all(&self) -> Arc<[Arc<Lane>]> {
        self.lanes.read().clone()
    }

    /// Serves all attended lanes on the caller's thread.
    pub fn poll(&self) {
        let now = self.start.elapsed().as_nanos() as u64;
        self.pace.store(now.saturating_sub(self.polled.swap(now, Ordering::Relaxed)), Ordering::Relaxed);
        self.all().iter().for_each(|lane| lane.poll());
    }

    /// Makes all lanes ordinary. Whoever will not poll calls this after it has counted itself among the watchers.
    pub fn end(&self) {
        self.all().iter().for_each(|lane| lane.end_attendance());
    }

    /// Makes lanes ordinary that nobody has polled for a while.
    pub fn expire(&self) {
        let since = self.since_last_poll();
        for lane in self.all().iter() {
            if since > IDLE || since > NEGLECTED && lane.load() > 0 {
                lane.end_attendance();
            }
        }
    }

    /// Whether the clock has something to look after.
    pub fn is_empty(&self) -> bool {
        self.lanes.read().is_empty()
    }
}
