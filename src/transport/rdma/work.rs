//! What a submission becomes: a group of tasks, and spans of memory that are moved for them.
//!
//! A [`Span`] is a contiguous part of one task's range inside one chunk here and one buffer entry there. A task counts its spans; whoever
//! has a span ends it once, by [`Group::end`], and the end of the last one is the end of the task. **A span is ended only by whoever holds
//! it, and while it is posted the device holds it**: that is why a task never ends while a device may touch its memory.
//!
//! An error that is kept with a task (its own, a deadline, a cancel) dooms its other spans: they end where they are next looked at.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use parking_lot::Mutex;

use super::peer::Peer;
use crate::error::{Code, Error, Result};
use crate::registry::Guards;
use crate::sys::MemoryRange;
use crate::transport::Slice;

/// A request, until it is over.
pub(super) struct Task {
    pub slice: Slice,
    /// On the regions that its local memory is in, of which the keys are used.
    pub guards: Mutex<Option<Guards>>,
    /// Spans that have not ended.
    spans: AtomicU32,
    error: OnceLock<Error>,
}

impl Task {
    /// With one span, which is all of it.
    pub fn new(slice: Slice, guards: Guards) -> Task {
        Task { slice, guards: Mutex::new(Some(guards)), spans: AtomicU32::new(1), error: OnceLock::new() }
    }

    /// Keeps the error, unless there is one already.
    pub fn doom(&self, error: Error) {
        self.error.get_or_init(|| error);
    }

    /// Why nothing more is to be started for it.
    pub fn doomed(&self) -> Option<Error> {
        self.error
            .get()
            .cloned()
            .or_else(|| self.slice.completion.is_cancelled().then(|| Error::quiet(Code::Canceled, "cancelled by the caller")))
    }
}

/// The tasks of one submission to one segment.
pub(super) struct Group {
    pub peer: Arc<Peer>,
    pub tasks: Box<[Task]>,
    pub started: Instant,
}

impl Group {
    /// A span of the task is over.
    pub fn end(&self, task: u32, outcome: Result<()>) {
        let task = &self.tasks[task as usize];
        if let Err(error) = outcome {
            task.doom(error);
        }
        if task.spans.fetch_sub(1, Ordering::AcqRel) == 1 {
            drop(task.guards.lock().take());
            let outcome = task.error.get().cloned().map_or(Ok(()), Err);
            task.slice.completion.finish(task.slice.index, outcome);
        }
    }
}

/// A part of a task; see the module.
pub(super) struct Span {
    group: Arc<Group>,
    task: u32,
    /// How often it has failed.
    pub attempt: u16,
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
    /// The one span of a new task.
    pub fn whole(group: &Arc<Group>, task: u32) -> Span {
        let slice = &group.tasks[task as usize].slice;
        Span {
            group: group.clone(),
            task,
            attempt: 0,
            is_refused: false,
            has_missed: false,
            local: slice.local,
            remote_address: slice.remote_address,
            local_key: 0,
            remote_key: 0,
        }
    }

    pub fn group(&self) -> &Arc<Group> {
        &self.group
    }

    pub fn task_index(&self) -> usize {
        self.task as usize
    }

    pub fn task(&self) -> &Task {
        &self.group.tasks[self.task as usize]
    }

    pub fn slice(&self) -> &Slice {
        &self.task().slice
    }

    /// Takes the first `length` bytes off as a span of their own. The rest must not be empty.
    pub fn split(&mut self, length: u64) -> Span {
        debug_assert!(length > 0 && length < self.local.length());
        let (Some(first), Some(rest)) = (self.local.part(0, length), self.local.part(length, self.local.length() - length)) else {
            unreachable!("the length is inside the span")
        };
        self.task().spans.fetch_add(1, Ordering::Relaxed);
        let taken = Span { group: self.group.clone(), local: first, ..*self };
        self.local = rest;
        self.remote_address += length;
        taken
    }

    /// When it has waited for too long, on a connection on which something has moved last at that time.
    pub fn expiry(&self, moved: Instant) -> Instant {
        let deadline = &self.slice().deadline;
        let stalled = self.group.started.max(moved).checked_add(deadline.stall);
        let far = self.group.started + std::time::Duration::from_secs(1 << 30);
        stalled.into_iter().chain(deadline.absolute).min().unwrap_or(far)
    }

    /// The error of one that has.
    pub fn timeout(&self, now: Instant) -> Error {
        let Span { local, remote_address, .. } = self;
        let text = match self.slice().deadline.absolute {
            Some(end) if now >= end => "the batch's deadline has passed".to_string(),
            _ => format!("nothing has moved for {:?}", self.slice().deadline.stall),
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

    /// It has been moved: what [`Group::end`] has to be told.
    pub fn into_done(self) -> (Arc<Group>, u32) {
        (self.group, self.task)
    }
}
