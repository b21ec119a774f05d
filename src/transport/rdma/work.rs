//! What a submission becomes: a group of tasks, and spans of memory that are moved for them.
//!
//! A [`Span`] is a contiguous part of one task's range inside one chunk here and one buffer entry there. A task counts its spans; whoever
//! has a span ends it once, and the end of the last one is the end of the task. **A span is ended only by whoever holds
//! it, and while it is posted the device holds it**: that is why a task never ends while a device may touch its memory, nor while its spans
//! use keys of the regions that the completion guards for it.
//!
//! An error that is kept with a task (its own, a deadline, a cancel) dooms its other spans: they end where they are next looked at.
//!
//! A task that ends well has had each of its bytes in exactly one completion that says success. Builds with debug assertions count them,
//! and let a task of which that is not so fail.
//!
//! Memory: 36 bytes a task, 48 a span.

use std::collections::HashMap;
use std::sync::Arc;
#[cfg(debug_assertions)]
use std::sync::atomic::AtomicU64;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

use super::peer::Peer;
use crate::error::{Code, Error, Result};
use crate::registry::Region;
use crate::sys::MemoryRange;
use crate::transport::{Completion, Deadline, Piece, Slices};

/// What there is of a task.
struct Task {
    /// Spans that have not ended.
    spans: AtomicU32,
    /// Bytes of spans that have been moved.
    #[cfg(debug_assertions)]
    moved: AtomicU64,
}

/// The tasks of one submission to one segment, one for each slice.
pub(super) struct Group {
    pub peer: Arc<Peer>,
    pub deadline: Deadline,
    pub started: Instant,
    completion: Arc<dyn Completion>,
    pieces: Vec<Piece>,
    tasks: Box<[Task]>,
    /// What dooms tasks.
    errors: Mutex<HashMap<u32, Error>>,
    /// Whether there are errors.
    is_troubled: AtomicBool,
}

impl Group {
    /// With one span for each task, which is all of it.
    pub fn new(peer: Arc<Peer>, slices: Slices) -> Group {
        let Slices { pieces, deadline, completion } = slices;
        let task = |_| Task {
            spans: AtomicU32::new(1),
            #[cfg(debug_assertions)]
            moved: AtomicU64::new(0),
        };
        let tasks = pieces.iter().map(task).collect();
        let (errors, is_troubled) = (Mutex::default(), AtomicBool::new(false));
        Group { peer, deadline, started: completion.started(), completion, pieces, tasks, errors, is_troubled }
    }

    /// The one span of each new task.
    pub fn whole(self: &Arc<Self>) -> impl ExactSizeIterator<Item = Span> {
        self.pieces.iter().enumerate().map(|(task, piece)| Span {
            group: self.clone(),
            task: task as u32,
            attempt: 0,
            path: piece.way.path,
            is_refused: false,
            has_missed: false,
            local: piece.local,
            remote_address: piece.remote_address,
            local_key: 0,
            remote_key: 0,
        })
    }

    pub fn is_cancelled(&self) -> bool {
        self.completion.is_cancelled()
    }

    /// Whether some task is doomed by an error.
    pub fn is_troubled(&self) -> bool {
        self.is_troubled.load(Ordering::Acquire)
    }

    /// The registered region that holds the byte at this address of a task's memory; guarded until the task ends.
    pub fn region(&self, task: u32, address: u64) -> Option<&Region> {
        self.completion.region(self.pieces[task as usize].index, address)
    }

    /// Whether this region, which was found for another task of the group, is guarded for this one as well.
    pub fn is_in(&self, task: u32, region: *const Region) -> bool {
        self.completion.is_in(self.pieces[task as usize].index, region)
    }

    /// When a span has waited for too long, on a connection on which something has moved last at that time.
    pub fn expiry(&self, moved: Instant) -> Instant {
        let stalled = self.started.max(moved).checked_add(self.deadline.stall);
        let far = self.started + std::time::Duration::from_secs(1 << 30);
        stalled.into_iter().chain(self.deadline.absolute).min().unwrap_or(far)
    }

    /// A span of the task is over.
    fn end(&self, task: u32, outcome: Result<()>) {
        if let Err(error) = outcome {
            self.doom(task, error);
        }
        if self.end_span(task) {
            self.finish(task);
        }
    }

    /// A span of each of the tasks has been moved.
    pub fn end_moved(&self, mut tasks: Vec<u32>) {
        tasks.retain(|task| self.end_span(*task));
        #[cfg(debug_assertions)]
        tasks.iter().for_each(|task| self.check_moved(*task));
        if self.is_troubled() {
            return tasks.into_iter().for_each(|task| self.finish(task));
        }
        tasks.iter_mut().for_each(|task| *task = self.pieces[*task as usize].index);
        self.completion.complete(&tasks);
    }

    /// True if it was the task's last. What others did with theirs happens before that.
    fn end_span(&self, task: u32) -> bool {
        let spans = &self.tasks[task as usize].spans;
        // Whoever holds the only one is alone: only a span's holder splits it.
        spans.load(Ordering::Acquire) == 1 || spans.fetch_sub(1, Ordering::AcqRel) == 1
    }

    fn finish(&self, task: u32) {
        let outcome = self.error(task).map_or(Ok(()), Err);
        self.completion.finish(self.pieces[task as usize].index, outcome);
    }

    /// The task's last span has ended: without an error, all was moved. A thread of a NIC that panics would leave others waiting.
    #[cfg(debug_assertions)]
    fn check_moved(&self, task: u32) {
        let (moved, length) = (self.tasks[task as usize].moved.load(Ordering::Relaxed), self.pieces[task as usize].local.length());
        if moved != length && self.error(task).is_none() {
            self.doom(task, Error::new(Code::Internal, format!("a task of {length} bytes ended when {moved} had been moved")));
        }
    }

    fn doom(&self, task: u32, error: Error) {
        self.errors.lock().entry(task).or_insert(error);
        self.is_troubled.store(true, Ordering::Release);
    }

    fn error(&self, task: u32) -> Option<Error> {
        if self.is_troubled() { self.errors.lock().get(&task).cloned() } else { None }
    }
}

/// A part of a task; see the module.
pub(super) struct Span {
    group: Arc<Group>,
    task: u32,
    /// How often it has failed.
    pub attempt: u8,
    /// See [`Way::path`](crate::transport::Way).
    pub path: u8,
    /// Whether the peer's device has refused `remote_key` for it.
    pub is_refused: bool,
    /// Whether no entry was found for it in the peer's descriptor.
    pub has_missed: bool,
    pub local: MemoryRange,
    pub remote_address: u64,
    pub local_key: u32,
    pub remote_key: u32,
}

impl Span {
    pub fn group(&self) -> &Arc<Group> {
        &self.group
    }

    pub fn task(&self) -> u32 {
        self.task
    }

    /// What was asked for, of which this is a part.
    pub fn piece(&self) -> &Piece {
        &self.group.pieces[self.task as usize]
    }

    /// How often it has been tried, by the caller as well: 0 takes one of the preferred ways, others walk through all.
    pub fn tries(&self) -> u32 {
        u32::from(self.piece().way.retry) + u32::from(self.attempt)
    }

    /// Keeps the error with the task, unless there is one already.
    pub fn doom(&self, error: Error) {
        self.group.doom(self.task, error);
    }

    /// Why nothing more is to be started for the task.
    pub fn doomed(&self) -> Option<Error> {
        match self.group.error(self.task) {
            None if self.group.is_cancelled() => Some(Error::quiet(Code::Canceled, "cancelled by the caller")),
            error => error,
        }
    }

    /// Takes the first `length` bytes off as a span of their own. The rest must not be empty.
    pub fn split(&mut self, length: u64) -> Span {
        debug_assert!(length > 0 && length < self.local.length());
        let (Some(first), Some(rest)) = (self.local.part(0, length), self.local.part(length, self.local.length() - length)) else {
            unreachable!("the length is inside the span")
        };
        self.group.tasks[self.task as usize].spans.fetch_add(1, Ordering::Relaxed);
        let taken = Span { group: self.group.clone(), local: first, ..*self };
        self.local = rest;
        self.remote_address += length;
        taken
    }

    /// The error of one that has waited for too long.
    pub fn timeout(&self, now: Instant) -> Error {
        let Span { local, remote_address, group, .. } = self;
        let text = match group.deadline.absolute {
            Some(end) if now >= end => "the batch's deadline has passed".to_string(),
            _ => format!("nothing has moved for {:?}", group.deadline.stall),
        };
        Error::new(
            Code::Timeout,
            format!(
                "RDMA of {} bytes between {:#x} and {remote_address:#x} of the peer was given up: {text}",
                local.length(),
                local.address()
            ),
        )
    }

    /// It is over.
    pub fn end(self, outcome: Result<()>) {
        self.group.end(self.task, outcome);
    }

    /// It has been moved: [`Group::end_moved`] has to be told of the task.
    pub fn into_moved(self) -> (Arc<Group>, u32) {
        #[cfg(debug_assertions)]
        self.group.tasks[self.task as usize].moved.fetch_add(self.local.length(), Ordering::Relaxed);
        (self.group, self.task)
    }
}

// There may be very many.
const _: () = assert!(size_of::<Span>() == 48);
