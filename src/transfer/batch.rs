//! One batch: its tasks, their ends, and who waits for them. See the module above for the order of events.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};

use super::progress::Progress;
use super::{BatchHost, BatchStatus, Request, State, TaskStatus};
use crate::error::{Code, Error, Result};
use crate::handshake::Notification;
use crate::registry::{Region, SharedGuards};
use crate::sys::event::EventFd;
use crate::telemetry::Counters;
use crate::transport::{Completion, Opcode};

/// How long a waiter polls before it parks: about what parking and waking cost.
const POLL: Duration = Duration::from_micros(50);

/// A waiter that gave the processor up for longer than this has lost it to something else than the end it waits for: programs that
/// compute get it for some milliseconds at a time. Who sleeps gets it back sooner, so that for a while nobody polls.
const LOST: Duration = Duration::from_millis(1);
const CROWDED: Duration = Duration::from_millis(100);

/// Until when that while lasts, in this process, in milliseconds after the first wait.
static CROWDED_UNTIL: AtomicU64 = AtomicU64::new(0);
static FIRST_WAIT: OnceLock<Instant> = OnceLock::new();

fn since_first_wait(now: Instant) -> Duration {
    now.saturating_duration_since(*FIRST_WAIT.get_or_init(|| now))
}

/// How often the processor is offered to others before a caller sleeps until a task is counted.
const YIELDS: u32 = 16;

/// Beside a terminal state: the batch has not counted the task yet.
const UNCOUNTED: u8 = 0x80;

struct Task {
    /// A [`State`]. It is terminal before the batch counts the task, so that a batch that is over has none that runs, and is
    /// [`UNCOUNTED`] until then, so that callers who have seen all tasks end find the batch over.
    state: AtomicU8,
    opcode: Opcode,
    length: u64,
}

impl Task {
    /// Waits for the few instructions between the end and its being counted.
    fn state(&self) -> State {
        let mut looks = 0;
        loop {
            let state = self.state.load(Ordering::Acquire);
            if state & UNCOUNTED == 0 {
                return State::from_number(state);
            }
            // A realtime thread that only yields may keep the processor from the very thread that counts.
            if looks < YIELDS {
                std::thread::yield_now()
            } else {
                std::thread::sleep(POLL)
            }
            looks += 1;
        }
    }
}

/// What a batch and its submissions share. It knows neither, so that a batch goes when its last user does.
struct Shared {
    host: Weak<dyn BatchHost>,
    counters: Arc<Counters>,
    progress: Progress<(u64, Notification)>,
    failed: AtomicUsize,
    worst: AtomicU8,
    bytes: AtomicU64,
    cancelled: AtomicBool,
    event: OnceLock<(EventFd, Watch)>,
    /// What is to be done when no task is unfinished.
    actions: Mutex<Vec<Action>>,
}

type Action = Box<dyn FnOnce() + Send>;

impl Shared {
    fn act(&self) {
        let actions = std::mem::take(&mut *self.actions.lock());
        actions.into_iter().for_each(|action| action());
    }
}

/// Somebody waits otherwise than by polling, as long as this lives.
struct Watch(Weak<dyn BatchHost>);

impl Watch {
    fn begin(host: &Weak<dyn BatchHost>) -> Watch {
        if let Some(host) = host.upgrade() {
            host.begin_watch();
        }
        Watch(host.clone())
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(host) = self.0.upgrade() {
            host.end_watch();
        }
    }
}

/// The tasks that one call added to a batch.
pub(super) struct Submission {
    this: Weak<Submission>,
    shared: Arc<Shared>,
    started: Instant,
    first: usize,
    tasks: Box<[Task]>,
    /// Why tasks have not completed; set before their state.
    errors: Mutex<HashMap<u32, Error>>,
    /// The regions that the tasks' local memory is in; each task is a user.
    guards: SharedGuards,
}

impl Completion for Submission {
    fn finish(&self, index: u32, outcome: Result<()>) {
        match outcome {
            Ok(()) => self.complete(&[index]),
            Err(error) => {
                self.guards.release(index as usize);
                self.shared.failed.fetch_add(1, Ordering::Relaxed);
                drop(self.shared.progress.end_running(1));
                self.publish_failed(index, error);
            }
        }
    }

    fn complete(&self, indices: &[u32]) {
        let Some((last, others)) = indices.split_last() else { return };
        indices.iter().for_each(|index| self.guards.release(*index as usize));
        let shared = &self.shared;
        // The thread that ends the batch's last running task sees all failures, which precede the ends of their tasks.
        let messages = shared.progress.end_running(indices.len());
        if !messages.is_empty()
            && shared.failed.load(Ordering::Relaxed) == 0
            && let Some(host) = shared.host.upgrade()
            && let Some(submission) = self.this.upgrade()
        {
            self.publish_completed(others);
            return host.send_notifications(messages, Box::new(Publication { submission, index: *last }));
        }
        self.publish_completed(indices);
    }

    fn started(&self) -> Instant {
        self.started
    }

    fn is_cancelled(&self) -> bool {
        self.shared.cancelled.load(Ordering::SeqCst)
    }

    fn region(&self, index: u32, address: u64) -> Option<&Region> {
        self.guards.region(index as usize, address)
    }

    fn is_in(&self, index: u32, region: *const Region) -> bool {
        self.guards.is_in(index as usize, region)
    }
}

/// Publishes a completed task when it is dropped: nothing that happens to the sender of its notification can lose the task.
struct Publication {
    submission: Arc<Submission>,
    index: u32,
}

impl Drop for Publication {
    fn drop(&mut self) {
        self.submission.publish_completed(&[self.index]);
    }
}

impl Submission {
    fn publish_completed(&self, indices: &[u32]) {
        if indices.is_empty() {
            return;
        }
        let (shared, counters) = (&self.shared, &self.shared.counters);
        let (mut read, mut written, mut reads) = (0, 0, 0);
        for index in indices {
            let task = &self.tasks[*index as usize];
            match task.opcode {
                Opcode::Read => (read, reads) = (read + task.length, reads + 1),
                Opcode::Write => written += task.length,
            }
        }
        // Tasks of one submission that end together took the same time: one look at the clock for them all.
        let latency = self.started.elapsed();
        for (histogram, tasks) in [(&counters.read_latency, reads), (&counters.write_latency, indices.len() as u64 - reads)] {
            if tasks > 0 {
                histogram.record(latency, tasks);
            }
        }
        counters.tasks_completed.add(indices.len() as u64);
        counters.bytes_read.add(read);
        counters.bytes_written.add(written);
        shared.bytes.fetch_add(read + written, Ordering::Relaxed);
        self.publish(indices, State::Completed);
    }

    fn publish_failed(&self, index: u32, error: Error) {
        let (shared, counters) = (&self.shared, &self.shared.counters);
        let state = State::of_error(&error);
        match state {
            State::Timeout => counters.tasks_timed_out.add(1),
            State::Canceled => counters.tasks_cancelled.add(1),
            _ => counters.tasks_failed.add(1),
        }
        shared.worst.fetch_max(rank(state), Ordering::Relaxed);
        self.errors.lock().entry(index).or_insert(error);
        self.publish(&[index], state);
    }

    /// At least one task.
    fn publish(&self, indices: &[u32], state: State) {
        let store = |number| indices.iter().for_each(|index| self.tasks[*index as usize].state.store(number, Ordering::Release));
        store(state as u8 | UNCOUNTED);
        let is_announced = self.shared.progress.end_tasks(indices.len());
        store(state as u8);
        if is_announced {
            if let Some((event, _)) = self.shared.event.get() {
                event.signal();
            }
            self.shared.act();
        }
    }

    fn status_of(&self, index: usize) -> TaskStatus {
        let task = &self.tasks[index];
        let state = task.state();
        let (transferred_bytes, error) = match state {
            State::Completed => (task.length, None),
            state if state.is_terminal() => (0, self.errors.lock().get(&(index as u32)).cloned()),
            _ => (0, None),
        };
        TaskStatus { state, transferred_bytes, error }
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
    shared: Arc<Shared>,
    submissions: RwLock<Vec<Arc<Submission>>>,
    /// Changed with `submissions` locked.
    closed: AtomicBool,
}

impl Batch {
    /// A batch with room for `capacity` tasks; memory is taken as tasks come.
    pub fn new(id: u64, capacity: usize, host: Weak<dyn BatchHost>, counters: Arc<Counters>) -> Arc<Batch> {
        let shared = Arc::new(Shared {
            host,
            counters,
            progress: Progress::default(),
            failed: AtomicUsize::new(0),
            worst: AtomicU8::new(0),
            bytes: AtomicU64::new(0),
            cancelled: AtomicBool::new(false),
            event: OnceLock::new(),
            actions: Mutex::default(),
        });
        Arc::new(Batch { id, capacity, shared, submissions: RwLock::default(), closed: AtomicBool::new(false) })
    }

    /// The id it is known by in the engine's table.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Tasks submitted so far.
    pub fn len(&self) -> usize {
        count(&self.submissions.read())
    }

    /// Whether nothing was submitted yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether no task is running.
    pub fn is_finished(&self) -> bool {
        self.shared.progress.is_finished()
    }

    /// Has nothing more submitted, unless a task is running: then it answers false, and the batch stays as it is.
    pub fn close(&self) -> bool {
        let _no_submission_begins = self.submissions.write();
        let is_finished = self.is_finished();
        self.closed.fetch_or(is_finished, Ordering::Relaxed);
        is_finished
    }

    /// Has `action` called once, as soon as no task is running: now, or by the thread that ends the last one. It must not block for long.
    pub fn when_finished(&self, action: impl FnOnce() + Send + 'static) {
        // First the action, then the announcement, then the look: whoever ends the last task sees the announcement, or is seen here.
        self.shared.actions.lock().push(Box::new(action));
        self.shared.progress.announce();
        if self.is_finished() {
            self.shared.act();
        }
    }

    /// Adds tasks, all waiting. The message, if any, goes to its segment when the batch has completed.
    pub(super) fn begin(
        &self,
        requests: &[Request],
        guards: SharedGuards,
        message: Option<(u64, Notification)>,
    ) -> Result<Arc<Submission>> {
        let task = |request: &Request| Task {
            state: AtomicU8::new(State::Waiting as u8),
            opcode: request.opcode,
            length: request.local.length(),
        };
        let tasks: Box<[Task]> = requests.iter().map(task).collect();
        let mut submissions = self.submissions.write();
        if self.closed.load(Ordering::Relaxed) {
            return Err(Error::new(Code::InvalidHandle, format!("batch {:#x} was freed", self.id)));
        }
        if self.shared.cancelled.load(Ordering::SeqCst) {
            return Err(Error::new(Code::Canceled, format!("batch {:#x} was cancelled; free it and make another", self.id)));
        }
        let first = count(&submissions);
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
        self.shared.counters.tasks_submitted.add(requests.len() as u64);
        self.shared.progress.add(requests.len(), message);
        let shared = self.shared.clone();
        let make = |this: &Weak<Submission>| Submission {
            this: this.clone(),
            shared,
            started: Instant::now(),
            first,
            tasks,
            errors: Mutex::default(),
            guards,
        };
        let submission = Arc::new_cyclic(make);
        if !requests.is_empty() {
            submissions.push(submission.clone());
        }
        Ok(submission)
    }

    /// What is known of a task; `None` when there is no such task. Tasks are numbered from 0 in the order of submission.
    pub fn task_status(&self, task: usize) -> Option<TaskStatus> {
        let submissions = self.submissions.read();
        let after = submissions.partition_point(|submission| submission.first <= task);
        let submission = submissions[..after].last()?;
        let index = task - submission.first;
        let task = submission.tasks.get(index)?;
        if task.state().is_terminal() {
            return Some(submission.status_of(index));
        }
        let submission = submission.clone();
        drop(submissions);
        self.poll();
        Some(submission.status_of(index))
    }

    /// Lends the caller's thread to the transports.
    fn poll(&self) {
        if let Some(host) = self.shared.host.upgrade() {
            host.poll();
        }
    }

    /// What is known of the batch as a whole.
    pub fn status(&self) -> BatchStatus {
        if !self.is_finished() {
            self.poll();
        }
        // Tasks are added under the write lock, so both counts are of the same time; what ends meanwhile is not counted as failed yet.
        let (tasks, unfinished) = {
            let submissions = self.submissions.read();
            (count(&submissions), self.shared.progress.unfinished())
        };
        let shared = &self.shared;
        let finished = tasks - unfinished;
        let state = match (unfinished, shared.worst.load(Ordering::Relaxed)) {
            (0, 0) => State::Completed,
            (0, 1) => State::Canceled,
            (0, 2) => State::Timeout,
            (0, _) => State::Failed,
            _ => State::Waiting,
        };
        BatchStatus {
            state,
            transferred_bytes: shared.bytes.load(Ordering::Relaxed),
            tasks,
            finished,
            failed: shared.failed.load(Ordering::Relaxed).min(finished),
        }
    }

    /// Waits until every task is terminal or `limit` has passed (`None`: for ever). Polls for 50 µs, then parks; parks at once where
    /// other programs want the processors. True: all are terminal.
    pub fn wait(&self, limit: Option<Duration>) -> bool {
        let start = Instant::now();
        let end = limit.and_then(|limit| start.checked_add(limit));
        let poll_end = end.map_or(start + POLL, |end| end.min(start + POLL));
        let is_crowded = since_first_wait(start).as_millis() < u128::from(CROWDED_UNTIL.load(Ordering::Relaxed));
        let mut now = start;
        while !self.is_finished() {
            if is_crowded || now >= poll_end {
                let _watch = Watch::begin(&self.shared.host);
                return self.shared.progress.park(end);
            }
            // First, because the peer may need this processor to answer.
            std::thread::yield_now();
            let before = std::mem::replace(&mut now, Instant::now());
            if now - before >= LOST {
                CROWDED_UNTIL.fetch_max((since_first_wait(now) + CROWDED).as_millis() as u64, Ordering::Relaxed);
            }
            self.poll();
        }
        true
    }

    /// Ends what can be ended: tasks that have not started at once, running ones as soon as their memory is no longer touched, as
    /// [`State::Canceled`]. Returns before that; wait for it with [`Batch::wait`]. Nothing more can be submitted.
    pub fn cancel(&self) {
        {
            let _no_submission_begins = self.submissions.write();
            self.shared.cancelled.store(true, Ordering::SeqCst);
        }
        if let Some(host) = self.shared.host.upgrade() {
            host.sweep_cancelled();
        }
    }

    /// A descriptor that becomes readable each time the batch has no unfinished task left (an eventfd: reading it clears it). It belongs
    /// to the batch and is closed with it.
    pub fn event_fd(&self) -> Result<i32> {
        let event = &self.shared.event;
        if event.get().is_none() {
            let made = EventFd::new().map_err(|error| {
                Error::new(
                    Code::Limit,
                    format!("cannot make an event descriptor: {error}; raise the limit on open files (ulimit -n)"),
                )
            })?;
            if event.set((made, Watch::begin(&self.shared.host))).is_ok() {
                self.shared.progress.announce();
            }
        }
        let (event, _) = event.get().ok_or_else(|| Error::new(Code::Internal, "the event descriptor is gone"))?;
        if !self.is_empty() && self.is_finished() {
            event.signal();
        }
        Ok(event.raw())
    }
}

/// Tasks of all submissions.
fn count(submissions: &[Arc<Submission>]) -> usize {
    submissions.last().map_or(0, |last| last.first + last.tasks.len())
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::{Hints, SubmitOptions};
    use super::*;
    use crate::registry::{Owner, RegionOptions, Registry, Reservation};
    use crate::sys::MemoryRange;
    use crate::transfer::{Route, submit};
    use crate::transport::{Nowhere, Segment, Slice, Slices, Transport};

    struct NoHost;

    impl BatchHost for NoHost {
        fn sweep_cancelled(&self) {}
        fn send_notifications(&self, _messages: Vec<(u64, Notification)>, _after: Box<dyn Send>) {}
    }

    /// Keeps what it is told and answers when asked.
    #[derive(Default)]
    struct Recorder {
        polls: AtomicUsize,
        slices: Mutex<Vec<Slice>>,
        messages: Mutex<Vec<(u64, Notification)>>,
        unanswered: Mutex<Vec<Box<dyn Send>>>,
    }

    impl BatchHost for Recorder {
        fn poll(&self) {
            self.polls.fetch_add(1, Ordering::Relaxed);
        }

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
        fn submit(&self, _segment: &Arc<dyn Segment>, slices: Slices) {
            self.slices.lock().extend(slices.into_each());
        }
        fn cancel(&self) {}
        fn evict(&self, _range: MemoryRange) {}
        fn forget(&self, _segment: u64) {}
        fn shutdown(&self, _reason: Error) {}
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
                requests.push(Request {
                    opcode: Opcode::Write,
                    local: self.range(0, length),
                    segment: 1,
                    remote_address: 4096,
                    hints: Hints::default(),
                });
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
    fn what_is_to_be_done_at_the_end_is_done_once_and_not_before() {
        let bench = Bench::new(4);
        let done = Arc::new(AtomicUsize::new(0));
        let action = || {
            let done = done.clone();
            move || {
                done.fetch_add(1, Ordering::SeqCst);
            }
        };
        bench.batch.when_finished(action());
        assert_eq!(done.load(Ordering::SeqCst), 1, "nothing runs");
        bench.submit(&[1, 2], None).unwrap();
        bench.batch.when_finished(action());
        bench.batch.when_finished(action());
        bench.end(0, Ok(()));
        assert_eq!(done.load(Ordering::SeqCst), 1, "one still runs");
        bench.end(0, Err(Error::quiet(Code::Socket, "gone")));
        assert_eq!(done.load(Ordering::SeqCst), 3);
        bench.submit(&[1], None).unwrap();
        bench.end(0, Ok(()));
        assert_eq!(done.load(Ordering::SeqCst), 3);
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
    fn tasks_that_end_together_end_as_those_that_end_alone() {
        let bench = Bench::new(8);
        bench.submit(&[1, 2, 4, 8], Some("hello")).unwrap();
        let completion = bench.recorder.slices.lock()[0].completion.clone();
        completion.complete(&[]);
        completion.complete(&[2, 0]);
        assert_eq!(bench.states(), [State::Completed, State::Waiting, State::Completed, State::Waiting]);
        completion.complete(&[1, 3]);
        assert_eq!(bench.recorder.messages.lock().len(), 1);
        let expected = BatchStatus { state: State::Waiting, transferred_bytes: 7, tasks: 4, finished: 3, failed: 0 };
        assert_eq!(bench.batch.status(), expected, "the last waits for its notification");
        bench.recorder.unanswered.lock().clear();
        assert_eq!((bench.batch.status().finished, bench.batch.status().transferred_bytes), (4, 15));
        assert_eq!(bench.batch.shared.counters.tasks_completed.get(), 4);
        assert_eq!(bench.batch.shared.counters.bytes_written.get(), 15);
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
            while bench.batch.shared.progress.waiting() == 0 {
                std::thread::yield_now();
            }
            bench.end(0, Ok(()));
            assert!(waiter.join().unwrap());
        });
        assert!(bench.batch.shared.event.get().unwrap().0.clear());
    }

    #[test]
    fn nobody_polls_while_others_want_the_processors() {
        let bench = Bench::new(1);
        bench.submit(&[1], None).unwrap();
        assert!(!bench.batch.wait(Some(Duration::from_millis(1))));
        let later = since_first_wait(Instant::now()) + Duration::from_secs(1000);
        CROWDED_UNTIL.store(later.as_millis() as u64, Ordering::Relaxed);
        let looked = bench.recorder.polls.load(Ordering::Relaxed);
        assert!(!bench.batch.wait(Some(Duration::from_millis(1))));
        let looked = bench.recorder.polls.load(Ordering::Relaxed) - looked;
        CROWDED_UNTIL.store(0, Ordering::Relaxed);
        assert_eq!(looked, 0);
    }

    #[test]
    fn what_no_memory_can_be_fails_alone() {
        let bench = Bench::new(2);
        let request = |local| Request { opcode: Opcode::Write, local, segment: 1, remote_address: 1, hints: Hints::default() };
        // SAFETY: nothing reads or writes through it.
        #[allow(unsafe_code)]
        let requests = [1, u64::MAX].map(|length| request(unsafe { MemoryRange::new(1, length) }.unwrap()));
        let route = |_| Ok(Route { transport: bench.recorder.clone(), segment: Arc::new(Nowhere) });
        submit(&bench.batch, &bench.registry, &route, &requests, None, SubmitOptions::default(), Duration::from_secs(30)).unwrap();
        assert_eq!(bench.states(), [State::Waiting, State::Failed]);
        assert_eq!(bench.batch.task_status(1).unwrap().error.unwrap().code(), Code::Fault);
    }

    #[test]
    fn a_batch_goes_with_its_last_user_and_its_last_task() {
        let bench = Bench::new(2);
        bench.submit(&[1, 1], Some("hello")).unwrap();
        bench.batch.event_fd().unwrap();
        bench.end(0, Ok(()));
        let (batch, shared) = (Arc::downgrade(&bench.batch), Arc::downgrade(&bench.batch.shared));
        let Bench { recorder, batch: last, .. } = bench;
        drop(last);
        assert!(batch.upgrade().is_none());
        let slice = recorder.slices.lock().remove(0);
        slice.finish(Ok(()));
        assert!(shared.upgrade().is_some(), "its last task waits for the notification");
        recorder.unanswered.lock().clear();
        assert!(shared.upgrade().is_none());
    }

    #[test]
    fn figures_fit_together_whenever_they_are_read() {
        let bench = Bench::new(4000);
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut before = 0;
                while !over.load(Ordering::SeqCst) {
                    let status = bench.batch.status();
                    assert!(status.failed <= status.finished && status.finished <= status.tasks, "{status:?}");
                    assert_eq!(status.state.is_terminal(), status.finished == status.tasks, "{status:?}");
                    assert!(status.finished >= before, "{status:?} after {before}");
                    before = status.finished;
                }
            });
            for round in 0..1000 {
                bench.submit(&[1, 1], None).unwrap();
                bench.end(0, Ok(()));
                bench.end(0, if round % 2 == 0 { Ok(()) } else { Err(Error::quiet(Code::Socket, "lost")) });
            }
            over.store(true, Ordering::SeqCst);
        });
        let status = bench.batch.status();
        assert_eq!((status.tasks, status.finished, status.failed, status.state), (2000, 2000, 500, State::Failed));
    }

    #[test]
    fn the_end_of_a_task_is_told_when_the_batch_has_counted_it() {
        let bench = Bench::new(1);
        bench.submit(&[1], None).unwrap();
        let told = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let submission = bench.batch.submissions.read()[0].clone();
            let state = &submission.tasks[0].state;
            // As if the thread that ends the task were held up half-way.
            state.store(State::Completed as u8 | UNCOUNTED, Ordering::Release);
            let caller = scope.spawn(|| {
                let states = bench.states();
                told.store(true, Ordering::SeqCst);
                states
            });
            std::thread::sleep(Duration::from_millis(20));
            assert!(!told.load(Ordering::SeqCst));
            state.store(State::Completed as u8, Ordering::Release);
            assert_eq!(caller.join().unwrap(), [State::Completed]);
        });
        bench.end(0, Ok(()));
    }

    #[test]
    fn whoever_waits_for_the_counting_of_a_task_sleeps() {
        let bench = Bench::new(1);
        bench.submit(&[1], None).unwrap();
        let sleeps = |thread: &std::path::Path| -> u64 {
            let status = std::fs::read_to_string(thread.join("status")).unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            line.unwrap().trim().parse().unwrap()
        };
        let submission = bench.batch.submissions.read()[0].clone();
        let state = &submission.tasks[0].state;
        state.store(State::Completed as u8 | UNCOUNTED, Ordering::Release);
        let slept = std::thread::scope(|scope| {
            let (tell, told) = std::sync::mpsc::channel();
            let bench = &bench;
            scope.spawn(move || {
                tell.send(std::path::Path::new("/proc").join(std::fs::read_link("/proc/thread-self").unwrap())).unwrap();
                bench.states()
            });
            let caller = told.recv().unwrap();
            let (before, started) = (sleeps(&caller), Instant::now());
            let has_slept = || sleeps(&caller) >= before + 10;
            while !has_slept() && started.elapsed() < Duration::from_secs(5) {
                std::thread::sleep(Duration::from_millis(1));
            }
            let slept = has_slept();
            state.store(State::Completed as u8, Ordering::Release);
            slept
        });
        assert!(slept, "a realtime thread would keep the processor from the one that counts");
        bench.end(0, Ok(()));
    }

    #[test]
    fn a_batch_is_over_as_soon_as_all_its_tasks_are_seen_to_be() {
        for _ in 0..200 {
            let bench = Bench::new(2);
            bench.submit(&[1, 1], None).unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    bench.end(0, Ok(()));
                    bench.end(0, Ok(()));
                });
                while !bench.states().iter().all(|state| state.is_terminal()) {
                    std::thread::yield_now();
                }
                assert!(bench.batch.is_finished(), "it could not be freed");
                assert_eq!(bench.batch.status().state, State::Completed);
            });
        }
    }

    #[test]
    fn nothing_is_left_of_a_batch_that_was_let_go() {
        let bench = Bench::new(2);
        bench.submit(&[1, 2], None).unwrap();
        bench.end(0, Ok(()));
        bench.end(0, Err(Error::quiet(Code::Socket, "lost")));
        let (batch, counters) = (Arc::downgrade(&bench.batch), Arc::downgrade(&bench.batch.shared));
        drop(bench);
        assert!(batch.upgrade().is_none() && counters.upgrade().is_none());
    }

    #[test]
    fn local_regions_are_held_until_their_last_task_has_ended() {
        let bench = Bench::new(4);
        let options = RegionOptions { location: "*".into(), remote_accessible: false, counted: false, owner: Owner::Program };
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
        let options = RegionOptions { location: "*".into(), remote_accessible: true, counted: false, owner: Owner::Program };
        let Ok(Reservation::New(region)) = bench.registry.reserve(bench.range(0, 100), &options) else { panic!("not reserved") };
        bench.registry.commit(std::slice::from_ref(&region));
        bench.registry.start_drain(region.range().address()).unwrap();
        assert_eq!(bench.submit(&[10], None).unwrap_err().code(), Code::AddressNotRegistered);
        assert_eq!((bench.batch.len(), bench.recorder.slices.lock().len()), (0, 0));
    }
}
