//! Batches and tasks. (skeleton: the public face is fixed)
#![allow(missing_docs, unused_variables)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::sys::MemoryRange;
use crate::transport::Opcode;

/// One transfer that a caller asks for.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    pub opcode: Opcode,
    pub local: MemoryRange,
    pub segment: u64,
    pub remote_address: u64,
}

/// State of a task or batch, with upstream's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    Waiting = 0,
    Pending = 1,
    Invalid = 2,
    Canceled = 3,
    Completed = 4,
    Timeout = 5,
    Failed = 6,
}
impl State {
    pub fn is_terminal(self) -> bool {
        todo!()
    }
}

#[derive(Clone, Debug)]
pub struct TaskStatus {
    pub state: State,
    pub transferred_bytes: u64,
    pub error: Option<Error>,
}

#[derive(Clone, Debug)]
pub struct BatchStatus {
    pub state: State,
    pub transferred_bytes: u64,
    pub tasks: usize,
    pub finished: usize,
    pub failed: usize,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct SubmitOptions {
    pub deadline: Option<Instant>,
    pub stall: Option<Duration>,
}

/// A batch: handed out by the engine's table under a 64-bit id that carries a generation.
pub struct Batch {}
impl Batch {
    pub fn id(&self) -> u64 {
        todo!()
    }
    pub fn capacity(&self) -> usize {
        todo!()
    }
    /// Number of tasks submitted so far.
    pub fn len(&self) -> usize {
        todo!()
    }
    /// None when there is no such task.
    pub fn task_status(&self, task: usize) -> Option<TaskStatus> {
        todo!()
    }
    pub fn status(&self) -> BatchStatus {
        todo!()
    }
    /// Polls up to 50 us, then parks. True when every task is terminal.
    pub fn wait(&self, limit: Option<Duration>) -> bool {
        todo!()
    }
    pub fn cancel(&self) {
        todo!()
    }
    /// An eventfd that becomes readable each time the batch has no running task left. Owned by the batch, closed with it.
    pub fn event_fd(&self) -> Result<i32> {
        todo!()
    }
}
#[allow(dead_code)]
type Unused = Arc<()>;
