//! Lanes that callers serve: a caller that polls for the end of its transfers receives the replies itself, which spares waking an
//! I/O thread for each (about a third of a small round trip).
//!
//! A lane becomes *attended* when work is pushed while callers poll without pause: epoll is told to keep silent about what arrives
//! there, and every poll looks at all attended lanes. It becomes ordinary again when much is queued on it, when nobody has polled for a
//! moment (the clock looks), or when somebody begins to wait in another way. Being attended is only about who receives: an attended lane that nobody polls is
//! served with a delay of some milliseconds, not never, and what does not fit into a socket at once is sent by the I/O thread.
//!
//! `lanes` is a leaf lock: taken with a lane's `state` held, and never the other way round. A lane that becomes attended enters the list
//! and then looks at the watchers; whoever begins to watch counts itself and then goes through the list: one of them sees the other.
//! For of the two holders of the lock one comes first. If it is the lane, the watcher finds it, and waits for its `state` until it has
//! entered. If it is the watcher, it was counted before, and the lane sees that.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

#[cfg(all(test, loom))]
use loom::sync::RwLock;
#[cfg(not(all(test, loom)))]
use std::sync::RwLock;

use super::lane::Lane;
use crate::transport::Watchers;

/// Most bytes on an attended lane. With more, the caller's one thread would receive what several could: 5 to 10 % slower here.
pub(super) const MOST_BYTES: u64 = 1280 << 10;

/// Longest time between two polls of callers that poll without pause. One that sleeps in between would let sockets run full.
const PACE: Duration = Duration::from_micros(100);

/// How long attended lanes with work may go without a poll; those without work stay for [`IDLE`].
const NEGLECTED: Duration = Duration::from_millis(3);
const IDLE: Duration = Duration::from_millis(200);

/// The attended lanes of a transport. It is generic for the sake of its tests alone.
pub(super) struct Attendance<L = Lane> {
    start: Instant,
    /// When somebody polled last, in nanoseconds after `start`.
    polled: AtomicU64,
    /// Nanoseconds between the last two polls.
    pace: AtomicU64,
    watchers: Arc<Watchers>,
    lanes: RwLock<Arc<[Arc<L>]>>,
}

impl<L> Attendance<L> {
    pub fn new(watchers: Arc<Watchers>) -> Attendance<L> {
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
        !self.watchers.are_there()
            && self.pace.load(Ordering::Relaxed) < PACE.as_nanos() as u64
            && self.since_last_poll() < NEGLECTED
    }

    /// Takes a lane into the list. False: somebody watches, the lane must stay ordinary.
    pub fn enter(&self, lane: &Arc<L>) -> bool {
        self.change(|lanes| lanes.iter().chain([lane]).cloned().collect());
        let accepted = !self.watchers.are_there();
        if !accepted {
            self.leave(lane);
        }
        accepted
    }

    /// Takes a lane off the list.
    pub fn leave(&self, lane: &L) {
        self.change(|lanes| lanes.iter().filter(|other| !std::ptr::eq(&***other, lane)).cloned().collect());
    }

    fn change(&self, changed: impl FnOnce(&[Arc<L>]) -> Arc<[Arc<L>]>) {
        let mut lanes = self.lanes.write().unwrap_or_else(PoisonError::into_inner);
        *lanes = changed(&lanes);
    }

    fn all(&self) -> Arc<[Arc<L>]> {
        self.lanes.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether the clock has something to look after.
    pub fn is_empty(&self) -> bool {
        self.all().is_empty()
    }
}

impl Attendance {
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
}

/// Every interleaving.
#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Mutex;
    use loom::thread;

    /// Of a lane: whether it is attended, under its `state`.
    type Attended = Mutex<bool>;

    fn become_attended(lane: &Arc<Attended>, attendance: &Attendance<Attended>) {
        let mut attended = lane.lock().unwrap();
        *attended = attendance.enter(lane);
    }

    fn watch(attendance: &Attendance<Attended>) {
        attendance.watchers.begin();
        for lane in attendance.all().iter() {
            let mut attended = lane.lock().unwrap();
            if std::mem::replace(&mut *attended, false) {
                attendance.leave(lane);
            }
        }
    }

    #[test]
    fn no_lane_is_attended_when_somebody_has_begun_to_watch() {
        loom::model(|| {
            let attendance = Arc::new(Attendance::new(Arc::default()));
            let lanes = [Arc::new(Mutex::new(false)), Arc::new(Mutex::new(false))];
            let entering = {
                let (attendance, lanes) = (attendance.clone(), lanes.clone());
                thread::spawn(move || lanes.iter().for_each(|lane| become_attended(lane, &attendance)))
            };
            watch(&attendance);
            entering.join().unwrap();
            assert!(lanes.iter().all(|lane| !*lane.lock().unwrap()));
            assert!(attendance.is_empty());
        });
    }

    #[test]
    fn a_lane_that_enters_when_the_watcher_has_gone_is_attended() {
        loom::model(|| {
            let attendance = Arc::new(Attendance::new(Arc::default()));
            let lane = Arc::new(Mutex::new(false));
            let watching = {
                let attendance = attendance.clone();
                thread::spawn(move || {
                    watch(&attendance);
                    attendance.watchers.end();
                })
            };
            become_attended(&lane, &attendance);
            watching.join().unwrap();
            // It is in the list exactly if it is attended, whoever came first.
            assert_eq!(*lane.lock().unwrap(), !attendance.is_empty());
            if attendance.is_empty() {
                become_attended(&lane, &attendance);
            }
            assert!(*lane.lock().unwrap());
        });
    }
}
