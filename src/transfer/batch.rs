//! One batch: its tasks, their ends, and who waits for them. See the module above for the order of events.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, RwLock};

use super::{BatchHost, BatchStatus, Request, State, TaskStatus};
use crate::error::{Code, Error, Result};
use crate::handshake::Notification;
use crate::registry::{Guards, RegionGuard};
use crate::sys::event::EventFd;
use crate::telemetry::Counters;
use crate::transport::{Completion, Opcode};

/// How long a waiter polls before it parks: about what parking and waking cost.
const POLL: Duration = Duration::from_micros(50);

/// How many of the last held regions are looked through for one that a further task uses, too.
const RECENT_REGIONS: usize = 8;

/// The local regions that a submission's tasks move bytes of, each guarded until the last of those tasks has ended.
#[derive(Default)]
pub(super) struct HeldRegions {
    regions: Vec<HeldRegion>,
    /// For each task, its part of `uses`.
    tasks: Vec<(u32, u32)>,
    /// Positions in `regions`.
    uses: Vec<u32>,
}

struct HeldRegion {
    guard: Mutex<Option<RegionGuard>>,
    /// Tells regions apart; never dereferenced.
    address: usize,
    tasks: AtomicU32,
}

impl HeldRegions {
    /// Adds the next task with the guards on its memory.
    pub fn push(&mut self, guards: Option<Guards>) {
        let start = self.uses.len() as u32;
        if let Some(guards) = guards {
            guards.into_each(|guard| {
                let address = Arc::as_ptr(guard.region()) as usize;
                let known = self.regions.iter().rev().take(RECENT_REGIONS).position(|held| held.address == address);
                let position = match known {
                    Some(back) => self.regions.len() - 1 - back,
                    None => {
                        self.regions.push(HeldRegion { guard: Mutex::new(Some(guard)), address, tasks: AtomicU32::new(0) });
                        self.regions.len() - 1
                    }
                };
                *self.regions[position].tasks.get_mut() += 1;
                self.uses.push(position as u32);
            });
        }
        self.tasks.push((start, self.uses.len() as u32));
    }

    /// A task has ended: regions that no other task uses are given back.
    fn release(&self, task: usize) {
        let (start, end) = self.tasks[task];
        for &position in &self.uses[start as usize..end as usize] {
            let held = &self.regions[position as usize];
            if held.tasks.fetch_sub(1, Ordering::AcqRel) == 1 {
                drop(held.guard.lock().take());
            }
        }
    }
}

struct Task {
    state: AtomicU8,
    opcode: Opcode,
    length: u64,
    error: OnceLock<Error>,
}

impl Task {
    fn status(&self) -> TaskStatus {
        let state = State::from_number(self.state.load(Ordering::Acquire));
        let transferred_bytes = if state == State::Completed { self.length } else { 0 };
        let error = if state.is_terminal() { self.error.get().cloned() } else { None };
        TaskStatus { state, transferred_bytes, error }
    }
}

/// The tasks that one call added to a batch. The batch owns it, not the other way round: else neither would ever be dropped. Whoever
/// made the batch keeps it until all its tasks have ended.
pub(super) struct Submission {
    batch: Weak<Batch>,
    first: usize,
    tasks: Box<[Task]>,
    held: HeldRegions,
}

impl Completion for Submission {
    fn finish(&self, index: u32, outcome: Result<()>) {
        self.held.release(index as usize);
        let Some(batch) = self.batch.upgrade() else { return };
        if outcome.is_err() {
            batch.failed.fetch_add(1, Ordering::Relaxed);
        }
        // The thread that ends the batch's last running task sees all failures and all notifications, which precede their tasks.
        if batch.running.fetch_sub(1, Ordering::AcqRel) == 1 && batch.has_notifications.load(Ordering::Acquire) {
            let messages = std::mem::take(&mut *batch.notifications.lock());
            batch.has_notifications.store(false, Ordering::Release);
            if batch.failed.load(Ordering::Relaxed) == 0
                && !messages.is_empty()
                && let Some(host) = batch.host.upgrade()
                && let Some(submission) = batch.submission(self.first)
            {
                return host.send_notifications(messages, Box::new(Publication { submission, index }));
            }
        }
        self.publish(&batch, index, outcome);
    }

    fn is_cancelled(&self) -> bool {
        self.batch.upgrade().is_none_or(|batch| batch.cancelled.load(Ordering::Relaxed))
    }
}

/// Publishes a completed task when it is dropped: nothing that happens to the sender of its notification can lose the task.
struct Publication {
    submission: Arc<Submission>,
    index: u32,
}

impl Drop for Publication {
    fn drop(&mut self) {
        if let Some(batch) = self.submission.batch.upgrade() {
            self.submission.publish(&batch, self.index, Ok(()));
        }
    }
}

impl Submission {
    fn publish(&self, batch: &Batch, index: u32, outcome: Result<()>) {
        let task = &self.tasks[index as usize];
        let counters = &batch.counters;
        let state = match &outcome {
            Ok(()) => {
                counters.tasks_completed.add(1);
                match task.opcode {
                    Opcode::Read => counters.bytes_read.add(task.length),
                    Opcode::Write => counters.bytes_written.add(task.length),
                }
                batch.bytes.fetch_add(task.length, Ordering::Relaxed);
                State::Completed
            }
            Err(error) => {
                let state = State::of_error(error);
                match state {
                    State::Timeout => counters.tasks_timed_out.add(1),
                    State::Canceled => counters.tasks_cancelled.add(1),
                    _ => counters.tasks_failed.add(1),
                }
                batch.worst.fetch_max(rank(state), Ordering::Relaxed);
                state
            }
        };
        if let Err(error) = outcome {
            task.error.get_or_init(|| error);
        }
        task.state.store(state as u8, Ordering::Release);
        if batch.unfinished.fetch_sub(1, Ordering::SeqCst) == 1 {
            batch.wake();
        }
    }
}

/// Order of badness of terminal states.
fn rank(state: State) -> u8 {
    match state {
        State::Failed => 3,
        State::Timeout => 2,
        State::Canceled => 1,
        _ => 0,
    }
}

/// A batch of tasks. Any thread may call anything; submitting to one batch from several threads at once is safe, but which tasks get
/// which numbers is then open.
pub struct Batch {
    id: u64,
    capacity: usize,
    host: Weak<dyn BatchHost>,
    counters: Arc<Counters>,
    submissions: RwLock<Vec<Arc<Submission>>>,
    /// Tasks whose memory may still be touched.
    running: AtomicUsize,
    /// Tasks that are not published as terminal.
    unfinished: AtomicUsize,
    failed: AtomicUsize,
    worst: AtomicU8,
    bytes: AtomicU64,
    cancelled: AtomicBool,
    notifications: Mutex<Vec<(u64, Notification)>>,
    has_notifications: AtomicBool,
    waiting: AtomicUsize,
    done: Condvar,
    done_lock: Mutex<()>,
    event: OnceLock<EventFd>,
}

impl Batch {
    /// A batch with room for `capacity` tasks; memory is taken as tasks come.
    pub fn new(id: u64, capacity: usize, host: Weak<dyn BatchHost>, counters: Arc<Counters>) -> Arc<Batch> {
        Arc::new(Batch {
            id,
            capacity,
            host,
            counters,
            submissions: RwLock::default(),
            running: AtomicUsize::new(0),
            unfinished: AtomicUsize::new(0),
            failed: AtomicUsize::new(0),
            worst: AtomicU8::new(0),
            bytes: AtomicU64::new(0),
            cancelled: AtomicBool::new(false),
            notifications: Mutex::default(),
            has_notifications: AtomicBool::new(false),
            waiting: AtomicUsize::new(0),
            done: Condvar::new(),
            done_lock: Mutex::new(()),
            event: OnceLock::new(),
        })
    }

    /// The id it is known by in the engine's table.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Most tasks it can hold.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Tasks submitted so far.
    pub fn len(&self) -> usize {
        self.submissions.read().last().map_or(0, |last| last.first + last.tasks.len())
    }

    /// Whether nothing was submitted yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether no task is running: the batch can be freed.
    pub fn is_finished(&self) -> bool {
        self.unfinished.load(Ordering::SeqCst) == 0
    }

    /// Adds tasks, all waiting. The message, if any, goes to its segment when the batch has completed.
    pub(super) fn begin(
        self: &Arc<Self>,
        requests: &[Request],
        held: HeldRegions,
        message: Option<(u64, Notification)>,
    ) -> Result<Arc<Submission>> {
        let task = |request: &Request| Task {
            state: AtomicU8::new(State::Waiting as u8),
            opcode: request.opcode,
            length: request.local.length(),
            error: OnceLock::new(),
        };
        let tasks: Box<[Task]> = requests.iter().map(task).collect();
        let mut submissions = self.submissions.write();
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(Error::new(Code::Canceled, format!("batch {:#x} was cancelled; free it and make another", self.id)));
        }
        let first = submissions.last().map_or(0, |last| last.first + last.tasks.len());
        let room = self.capacity - first;
        if requests.len() > room {
            let text = format!(
                "batch {:#x} has room for {room} of its {} tasks, {} were submitted",
                self.id,
                self.capacity,
                requests.len()
            );
            return Err(Error::new(Code::TooManyRequests, text));
        }
        self.counters.tasks_submitted.add(requests.len() as u64);
        if let Some(message) = message.filter(|_| !requests.is_empty()) {
            self.notifications.lock().push(message);
            self.has_notifications.store(true, Ordering::Release);
        }
        self.unfinished.fetch_add(requests.len(), Ordering::SeqCst);
        self.running.fetch_add(requests.len(), Ordering::AcqRel);
        let submission = Arc::new(Submission { batch: Arc::downgrade(self), first, tasks, held });
        if !requests.is_empty() {
            submissions.push(submission.clone());
        }
        Ok(submission)
    }

    fn submission(&self, task: usize) -> Option<Arc<Submission>> {
        let submissions = self.submissions.read();
        let after = submissions.partition_point(|submission| submission.first <= task);
        submissions[..after].last().cloned()
    }

    /// What is known of a task; `None` when there is no such task. Tasks are numbered from 0 in the order of submission.
    pub fn task_status(&self, task: usize) -> Option<TaskStatus> {
        let submissions = self.submissions.read();
        let after = submissions.partition_point(|submission| submission.first <= task);
        let submission = submissions[..after].last()?;
        Some(submission.tasks.get(task - submission.first)?.status())
    }

    /// What is known of the batch as a whole.
    pub fn status(&self) -> BatchStatus {
        // Read in this order, a batch that looks finished has its final figures.
        let unfinished = self.unfinished.load(Ordering::SeqCst);
        let tasks = self.len();
        let state = match (unfinished, self.worst.load(Ordering::Relaxed)) {
            (0, 0) => State::Completed,
            (0, 1) => State::Canceled,
            (0, 2) => State::Timeout,
            (0, _) => State::Failed,
            _ => State::Waiting,
        };
        BatchStatus {
            state,
            transferred_bytes: self.bytes.load(Ordering::Relaxed),
            tasks,
            finished: tasks.saturating_sub(unfinished),
            failed: self.failed.load(Ordering::Relaxed),
        }
    }

    /// Waits until every task is terminal or `limit` has passed (`None`: for ever). Polls for 50 µs, then parks. True: all are terminal.
    pub fn wait(&self, limit: Option<Duration>) -> bool {
        let start = Instant::now();
        let end = limit.and_then(|limit| start.checked_add(limit));
        let poll_end = end.map_or(start + POLL, |end| end.min(start + POLL));
        while !self.is_finished() {
            if Instant::now() >= poll_end {
                return self.park(end);
            }
            std::thread::yield_now();
        }
        true
    }

    fn park(&self, end: Option<Instant>) -> bool {
        // Announced before the last look: either this thread sees the end, or whoever brings it sees this thread.
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let mut lock = self.done_lock.lock();
        let mut in_time = true;
        while !self.is_finished() && in_time {
            match end {
                None => self.done.wait(&mut lock),
                Some(end) => in_time = !self.done.wait_until(&mut lock, end).timed_out(),
            }
        }
        drop(lock);
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        self.is_finished()
    }

    fn wake(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            drop(self.done_lock.lock());
            self.done.notify_all();
        }
        if let Some(event) = self.event.get() {
            event.signal();
        }
    }

    /// Ends what can be ended: tasks that have not started at once, running ones as soon as their memory is no longer touched, as
    /// [`State::Canceled`]. Returns before that; wait for it with [`Batch::wait`]. Nothing more can be submitted.
    pub fn cancel(&self) {
        {
            let _no_submission_begins = self.submissions.write();
            self.cancelled.store(true, Ordering::SeqCst);
        }
        if let Some(host) = self.host.upgrade() {
            host.sweep_cancelled();
        }
    }

    /// A descriptor that becomes readable each time the batch has no unfinished task left (an eventfd: reading it clears it). It belongs
    /// to the batch and is closed with it.
    pub fn event_fd(&self) -> Result<i32> {
        if self.event.get().is_none() {
            let event = EventFd::new().map_err(|error| {
                Error::new(
                    Code::Limit,
                    format!("cannot make an event descriptor: {error}; raise the limit on open files (ulimit -n)"),
                )
            })?;
            let _ = self.event.set(event);
        }
        let event = self.event.get().ok_or_else(|| Error::new(Code::Internal, "the event descriptor is gone"))?;
        if !self.is_empty() && self.is_finished() {
            event.signal();
        }
        Ok(event.raw())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::SubmitOptions;
    use super::*;
    use crate::metadata::SegmentDescriptor;
    use crate::registry::{RegionOptions, Registry, Reservation};
    use crate::sys::MemoryRange;
    use crate::transfer::{Route, submit};
    use crate::transport::{Segment, Slice, Transport};

    struct NoHost;

    impl BatchHost for NoHost {
        fn sweep_cancelled(&self) {}
        fn send_notifications(&self, _messages: Vec<(u64, Notification)>, _after: Box<dyn Send>) {}
    }

    /// Keeps what it is told and answers when asked.
    #[derive(Default)]
    struct Recorder {
        slices: Mutex<Vec<Slice>>,
        messages: Mutex<Vec<(u64, Notification)>>,
        unanswered: Mutex<Vec<Box<dyn Send>>>,
    }

    impl BatchHost for Recorder {
        fn sweep_cancelled(&self) {
            let error = Error::quiet(Code::Canceled, "cancelled");
            let slices = std::mem::take(&mut *self.slices.lock());
            for slice in slices {
                if slice.completion.is_cancelled() { slice.finish(Err(error.clone())) } else { self.slices.lock().push(slice) }
            }
        }

        fn send_notifications(&self, messages: Vec<(u64, Notification)>, after: Box<dyn Send>) {
            self.messages.lock().extend(messages);
            self.unanswered.lock().push(after);
        }
    }

    impl Transport for Recorder {
        fn protocol(&self) -> &'static str {
            "recorder"
        }
        fn register(&self, _region: &Arc<crate::registry::Region>) -> Result<()> {
            Ok(())
        }
        fn unregister(&self, _region: &Arc<crate::registry::Region>) -> Result<()> {
            Ok(())
        }
        fn submit(&self, _segment: &Arc<dyn Segment>, slices: Vec<Slice>) {
            self.slices.lock().extend(slices);
        }
        fn cancel(&self) {}
        fn evict(&self, _range: MemoryRange) {}
        fn forget(&self, _segment: u64) {}
        fn shutdown(&self, _reason: Error) {}
    }

    struct Nowhere;

    impl Segment for Nowhere {
        fn id(&self) -> u64 {
            1
        }
        fn descriptor(&self) -> Arc<SegmentDescriptor> {
            Arc::default()
        }
        fn refresh(&self) -> Result<Arc<SegmentDescriptor>> {
            Ok(Arc::default())
        }
        fn host(&self) -> Result<String> {
            Ok(String::new())
        }
    }

    pub fn batch_with_id(id: u64) -> Arc<Batch> {
        let host: Weak<NoHost> = Weak::new();
        Batch::new(id, 10, host, Arc::default())
    }

    struct Bench {
        recorder: Arc<Recorder>,
        registry: Registry,
        batch: Arc<Batch>,
        memory: Vec<u8>,
    }

    impl Bench {
        fn new(capacity: usize) -> Bench {
            let recorder = Arc::new(Recorder::default());
            let host: Arc<dyn BatchHost> = recorder.clone();
            let batch = Batch::new(7, capacity, Arc::downgrade(&host), Arc::default());
            Bench { recorder, registry: Registry::new(), batch, memory: vec![0; 4096] }
        }

        fn range(&self, offset: usize, length: u64) -> MemoryRange {
            // SAFETY: nothing reads or writes through it in these tests.
            #[allow(unsafe_code)]
            unsafe { MemoryRange::new(self.memory.as_ptr() as u64 + offset as u64, length) }.unwrap()
        }

        fn submit(&self, lengths: &[u64], message: Option<&str>) -> Result<()> {
            let mut requests = Vec::new();
            for &length in lengths {
                requests.push(Request { opcode: Opcode::Write, local: self.range(0, length), segment: 1, remote_address: 4096 });
            }
            let route = |segment| match segment {
                1 => Ok(Route { transport: self.recorder.clone(), segment: Arc::new(Nowhere) }),
                other => Err(Error::quiet(Code::InvalidArgument, format!("no segment {other}"))),
            };
            let message = message.map(|text| Notification { name: "name".into(), message: text.into() });
            submit(&self.batch, &self.registry, &route, &requests, message, SubmitOptions::default(), Duration::from_secs(30))
        }

        fn end(&self, position: usize, outcome: Result<()>) {
            let slice = self.recorder.slices.lock().remove(position);
            slice.finish(outcome);
        }

        fn states(&self) -> Vec<State> {
            (0..self.batch.len()).map(|task| self.batch.task_status(task).unwrap().state).collect()
        }
    }

    #[test]
    fn tasks_are_numbered_across_submissions_and_end_on_their_own() {
        let bench = Bench::new(5);
        bench.submit(&[10, 20], None).unwrap();
        bench.submit(&[30], None).unwrap();
        assert_eq!(bench.states(), [State::Waiting; 3]);
        bench.end(1, Ok(()));
        bench.end(1, Err(Error::quiet(Code::Timeout, "late")));
        assert_eq!(bench.states(), [State::Waiting, State::Completed, State::Timeout]);
        assert_eq!(bench.batch.status().state, State::Waiting);
        assert!(bench.batch.task_status(2).unwrap().error.unwrap().message().contains("late"));
        bench.end(0, Err(Error::quiet(Code::Socket, "lost")));
        let expected = BatchStatus { state: State::Failed, transferred_bytes: 20, tasks: 3, finished: 3, failed: 2 };
        assert_eq!(bench.batch.status(), expected);
        assert!(bench.batch.task_status(3).is_none());
        assert!(bench.batch.is_finished());
    }

    #[test]
    fn nothing_is_queued_beyond_the_capacity() {
        let bench = Bench::new(2);
        bench.submit(&[1], None).unwrap();
        assert_eq!(bench.submit(&[1, 1], None).unwrap_err().code(), Code::TooManyRequests);
        assert_eq!((bench.batch.len(), bench.recorder.slices.lock().len()), (1, 1));
        bench.submit(&[], None).unwrap();
        bench.submit(&[1], None).unwrap();
        assert_eq!(bench.batch.len(), 2);
    }

    #[test]
    fn empty_requests_and_empty_batches_are_complete() {
        let bench = Bench::new(2);
        assert_eq!(bench.batch.status().state, State::Completed);
        bench.submit(&[0], None).unwrap();
        assert_eq!(bench.states(), [State::Completed]);
        assert!(bench.batch.wait(Some(Duration::ZERO)));
    }

    #[test]
    fn the_last_task_waits_for_its_notification() {
        let bench = Bench::new(4);
        bench.submit(&[1, 2], Some("hello")).unwrap();
        bench.end(0, Ok(()));
        assert!(bench.recorder.messages.lock().is_empty());
        bench.end(0, Ok(()));
        assert_eq!(bench.recorder.messages.lock().len(), 1);
        assert_eq!(bench.states(), [State::Completed, State::Waiting]);
        assert!(!bench.batch.is_finished());
        bench.recorder.unanswered.lock().clear();
        assert_eq!(bench.states(), [State::Completed; 2]);
        bench.submit(&[1], None).unwrap();
        bench.end(0, Ok(()));
        assert_eq!(bench.recorder.messages.lock().len(), 1);
    }

    #[test]
    fn no_notification_is_sent_for_a_batch_that_failed() {
        let bench = Bench::new(4);
        bench.submit(&[1, 2], Some("hello")).unwrap();
        bench.end(0, Err(Error::quiet(Code::Socket, "lost")));
        bench.end(0, Ok(()));
        assert!(bench.recorder.messages.lock().is_empty());
        assert_eq!(bench.states(), [State::Failed, State::Completed]);
    }

    #[test]
    fn cancelling_ends_what_runs_and_refuses_more() {
        let bench = Bench::new(4);
        bench.submit(&[1, 2], None).unwrap();
        bench.end(0, Ok(()));
        bench.batch.cancel();
        assert_eq!(bench.states(), [State::Completed, State::Canceled]);
        assert_eq!(bench.batch.status().state, State::Canceled);
        assert_eq!(bench.submit(&[1], None).unwrap_err().code(), Code::Canceled);
    }

    #[test]
    fn waiters_wake_at_the_end_and_at_the_limit() {
        let bench = Bench::new(1);
        bench.submit(&[1], None).unwrap();
        assert!(!bench.batch.wait(Some(Duration::from_millis(1))));
        let descriptor = bench.batch.event_fd().unwrap();
        assert_eq!(descriptor, bench.batch.event_fd().unwrap());
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| bench.batch.wait(None));
            while bench.batch.waiting.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            bench.end(0, Ok(()));
            assert!(waiter.join().unwrap());
        });
        assert!(bench.batch.event.get().unwrap().clear());
    }

    #[test]
    fn nothing_is_left_of_a_batch_that_was_let_go() {
        let bench = Bench::new(2);
        bench.submit(&[1, 2], None).unwrap();
        bench.end(0, Ok(()));
        bench.end(0, Err(Error::quiet(Code::Socket, "lost")));
        let (batch, submission) = (Arc::downgrade(&bench.batch), Arc::downgrade(&bench.batch.submission(0).unwrap()));
        drop(bench);
        assert!(batch.upgrade().is_none() && submission.upgrade().is_none());
    }

    #[test]
    fn local_regions_are_held_until_their_last_task_has_ended() {
        let bench = Bench::new(4);
        let options = RegionOptions { location: "*".into(), remote_accessible: false, counted: false };
        let Ok(Reservation::New(region)) = bench.registry.reserve(bench.range(0, 100), &options) else { panic!("not reserved") };
        bench.registry.commit(std::slice::from_ref(&region));
        bench.submit(&[10, 20, 200], None).unwrap();
        assert_eq!(region.in_flight(), 1);
        bench.end(0, Ok(()));
        bench.end(0, Ok(()));
        assert_eq!(region.in_flight(), 1);
        bench.end(0, Ok(()));
        assert_eq!(region.in_flight(), 0);
    }

    #[test]
    fn memory_that_is_being_unregistered_is_refused_before_anything_starts() {
        let bench = Bench::new(4);
        let options = RegionOptions { location: "*".into(), remote_accessible: true, counted: false };
        let Ok(Reservation::New(region)) = bench.registry.reserve(bench.range(0, 100), &options) else { panic!("not reserved") };
        bench.registry.commit(std::slice::from_ref(&region));
        bench.registry.start_drain(region.range().address()).unwrap();
        assert_eq!(bench.submit(&[10], None).unwrap_err().code(), Code::AddressNotRegistered);
        assert_eq!((bench.batch.len(), bench.recorder.slices.lock().len()), (0, 0));
    }
}
