//! Batches and tasks: what callers submit, and how they learn of its end.
//!
//! A batch is a handle with room for a fixed number of tasks. Each submission adds tasks to it and starts them; each task is one
//! [`Slice`](crate::transport::Slice) for a transport. A task's state goes from [`State::Waiting`] to one terminal state, once, and only when the engine will
//! not touch the task's memory any more. All state is read without taking part in the transfer: nobody has to poll for it to advance.
//!
//! Order within the end of a task: guards on local regions are given back, then the state is set, then the batch's count of
//! unfinished tasks falls, from when callers are told the state, then waiters wake. With a notification, the task that ends last keeps its state to itself until the peer
//! has answered or failed.
//!
//! Who locks what: status is atomics, plus a read lock on the list of submissions. How tasks end together, and who waits for it, is
//! argued in `progress`. No lock is held while a transport or the host is called.
//!
//! Who owns whom: a batch holds its submissions; these, and slices on their way, hold what they share with it, never the batch.
//!
//! Cost of a submission: some allocations, as many whatever its length, and 56 bytes a task; one guard for each region, and a look-up in the
//! index for each task whose region is not where [`SharedGuards`] expects it. Tasks that end together share read-modify-writes, but for one
//! on each task's region. Cost of a status: a table look-up, a read lock, two loads.

mod batch;
mod progress;
mod table;

use std::time::{Duration, Instant};

pub use batch::Batch;
pub use table::BatchTable;

use crate::error::{Code, Error, Result};
use crate::handshake::Notification;
use crate::registry::{Refusal, Registry, SharedGuards};
use crate::sys::MemoryRange;
use crate::transport::{Completion, Deadline, Opcode, Piece, Segment, Slices, Transport, Way};
use std::sync::Arc;

/// One transfer that a caller asks for.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Direction.
    pub opcode: Opcode,
    /// Memory of this process; its length is the request's. It need not be registered for TCP. It must stay valid, and for a read
    /// unused by others, until the task is terminal.
    pub local: MemoryRange,
    /// Id of an opened segment; 0 is the own one.
    pub segment: u64,
    /// Start of the range in the segment's address space.
    pub remote_address: u64,
    /// What the caller knows of the way that it should take.
    pub hints: Hints,
}

/// Which way a request should take, where there are several. No larger than what it fills in a [`Request`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hints {
    /// Of groups with different numbers few have the same here.
    group: u16,
    retry: u8,
}

const _: () = assert!(size_of::<Request>() == 40);

/// Knuth's multiplier: the upper bits of a product are of all bits of the number.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

impl Hints {
    /// `retry`: how often the caller has tried it before; each number takes another way than the one before. `group`: requests of one
    /// batch with the same number other than 0 take the same way, in the order of submission; 0: any.
    pub fn new(retry: u32, group: u64) -> Hints {
        let group = if group == 0 { 0 } else { (group.wrapping_mul(SPREAD) >> 48).max(1) as u16 };
        // The walk begins anew after 255 ways.
        let retry = retry.checked_sub(1).map_or(0, |tries| (tries % 255) as u8 + 1);
        Hints { group, retry }
    }

    /// For the transport. `batch` is a number that no other batch has meanwhile: groups of different batches have nothing to do with
    /// each other, so they had better go different ways, though they may not.
    fn way(self, batch: u64) -> Way {
        let path = match self.group {
            0 => 0,
            group => ((u64::from(group) ^ batch).wrapping_mul(SPREAD) >> 56).max(1) as u8,
        };
        Way { path, retry: self.retry }
    }
}

/// State of a task or batch, with upstream's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    /// Not over.
    Waiting = 0,
    /// Never used; part of the numbering.
    Pending = 1,
    /// Never used; part of the numbering.
    Invalid = 2,
    /// Ended by a cancel, by unregistering its memory, or by destroying the engine.
    Canceled = 3,
    /// The bytes are in place.
    Completed = 4,
    /// Given up at a deadline.
    Timeout = 5,
    /// Ended by an error.
    Failed = 6,
}

impl State {
    /// Whether it will never change again.
    pub fn is_terminal(self) -> bool {
        !matches!(self, State::Waiting | State::Pending)
    }

    fn from_number(number: u8) -> State {
        [State::Waiting, State::Pending, State::Invalid, State::Canceled, State::Completed, State::Timeout, State::Failed]
            .into_iter()
            .find(|state| *state as u8 == number)
            .unwrap_or(State::Invalid)
    }

    /// How a task ends that this error ends.
    pub fn of_error(error: &Error) -> State {
        match error.code() {
            Code::Timeout => State::Timeout,
            Code::Canceled => State::Canceled,
            _ => State::Failed,
        }
    }
}

/// What is known of a task.
#[derive(Clone, Debug)]
pub struct TaskStatus {
    /// Where it stands.
    pub state: State,
    /// Bytes that are in place; the task's length once it is completed.
    pub transferred_bytes: u64,
    /// Why it is not completed, once it is terminal.
    pub error: Option<Error>,
}

/// What is known of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchStatus {
    /// Waiting until all tasks are terminal; then the worst of their states, Failed being worst. A batch without tasks is completed.
    pub state: State,
    /// Sum over completed tasks.
    pub transferred_bytes: u64,
    /// Tasks submitted so far.
    pub tasks: usize,
    /// Tasks that are terminal.
    pub finished: usize,
    /// Tasks that are terminal and not completed.
    pub failed: usize,
}

/// How to submit.
#[derive(Clone, Copy, Debug, Default)]
pub struct SubmitOptions {
    /// The tasks end as [`State::Timeout`] at this time, if they have not before.
    pub deadline: Option<Instant>,
    /// They end so when nothing has moved for this long. Default: the engine's.
    pub stall: Option<Duration>,
}

/// What batches need of whoever made them.
pub trait BatchHost: Send + Sync {
    /// Has transports end what is cancelled; see [`Transport::cancel`].
    fn sweep_cancelled(&self);

    /// A caller has looked for the end of a task in vain; see [`Transport::poll`].
    fn poll(&self) {}

    /// A caller waits without polling until [`BatchHost::end_watch`]; see [`Transport::watch`].
    fn begin_watch(&self) {}

    /// See [`BatchHost::begin_watch`].
    fn end_watch(&self) {}

    /// Sends the messages, each to its segment, from another thread, and drops `after` when all were answered or have failed.
    fn send_notifications(&self, messages: Vec<(u64, Notification)>, after: Box<dyn Send>);
}

/// Which transport reaches a segment.
#[derive(Clone)]
pub struct Route {
    /// The transport.
    pub transport: Arc<dyn Transport>,
    /// The segment.
    pub segment: Arc<dyn Segment>,
}

/// Adds tasks for `requests` to the batch and starts them. All or nothing: on an error nothing was queued.
///
/// `route` is asked once for each segment.
///
/// Errors: TooManyRequests when the batch has no room, InvalidHandle when it was freed, Canceled when it was cancelled,
/// AddressNotRegistered when local memory is being unregistered, and what `route` returns.
pub fn submit(
    batch: &Arc<Batch>,
    registry: &Registry,
    route: &dyn Fn(u64) -> Result<Route>,
    requests: &[Request],
    notification: Option<Notification>,
    options: SubmitOptions,
    default_stall: Duration,
) -> Result<()> {
    let mut routes: Vec<(u64, Route, Vec<Piece>)> = Vec::new();
    for request in requests {
        if !routes.iter().rev().any(|(segment, ..)| *segment == request.segment) {
            // Most submissions go to one segment.
            let room = if routes.is_empty() { requests.len() } else { 0 };
            routes.push((request.segment, route(request.segment)?, Vec::with_capacity(room)));
        }
    }
    let mut guards = SharedGuards::with_capacity(requests.len());
    // Requests that no transport is asked for.
    let mut others = Vec::new();
    let mut at = 0;
    registry.read(|view| {
        requests.iter().enumerate().try_for_each(|(index, request)| -> Result<()> {
            let Request { opcode, local, segment, remote_address, hints } = *request;
            view.share(local, &mut guards).map_err(|refusal| {
                let (address, length) = (local.address(), local.length());
                let why = match refusal {
                    Refusal::Draining => "is being unregistered",
                    Refusal::NotRegistered | Refusal::NotAccessible => "is not registered",
                };
                Error::new(Code::AddressNotRegistered, format!("local memory [{address:#x}, +{length}) {why}"))
            })?;
            let (index, length) = (index as u32, local.length());
            if isize::try_from(length).is_ok_and(|length| length > 0) && remote_address.checked_add(length - 1).is_some() {
                if routes[at].0 != segment {
                    at = routes.iter().position(|(other, ..)| *other == segment).unwrap_or(at);
                }
                routes[at].2.push(Piece { local, remote_address, index, opcode, way: hints.way(Arc::as_ptr(batch) as u64) });
            } else {
                others.push(index);
            }
            Ok(())
        })
    })?;
    let first_segment = requests.first().map_or(0, |request| request.segment);
    let submission = batch.begin(requests, guards, notification.map(|notification| (first_segment, notification)))?;
    for index in others {
        let Request { local, remote_address, .. } = requests[index as usize];
        let length = local.length();
        if length == 0 {
            submission.complete(&[index]);
        } else if isize::try_from(length).is_err() {
            let text = format!("local memory [{:#x}, +{length}) is longer than any memory", local.address());
            submission.finish(index, Err(Error::new(Code::Fault, text)));
        } else {
            let text = format!("remote range [{remote_address:#x}, +{length}) runs past the end of the address space");
            submission.finish(index, Err(Error::new(Code::AddressNotRegistered, text)));
        }
    }
    let deadline = Deadline { absolute: options.deadline, stall: options.stall.unwrap_or(default_stall) };
    for (_, route, pieces) in routes {
        if !pieces.is_empty() {
            let slices = Slices { pieces, deadline, completion: submission.clone() };
            route.transport.submit(&route.segment, slices);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_a_group_have_one_path_and_those_of_none_have_none() {
        let way = |group, batch| Hints::new(0, group).way(batch);
        for batch in [0, 0x7f00_1234_5670, u64::MAX] {
            assert_eq!(way(0, batch), Way::default());
            for group in [1, 2, 255, 256, u64::MAX, batch] {
                assert_eq!(way(group, batch), way(group, batch));
                assert_eq!(way(group, batch).path == 0, group == 0);
            }
            let paths: std::collections::BTreeSet<u8> = (1..=100).map(|group| way(group, batch).path).collect();
            assert!(paths.len() > 50, "groups go many ways: {paths:?}");
        }
        let of_batches: std::collections::BTreeSet<u8> = (0..100).map(|batch| way(1, 0x7f00_0000_0000 + 64 * batch).path).collect();
        assert!(of_batches.len() > 50, "groups of the same number go many ways: {of_batches:?}");
    }

    #[test]
    fn each_raise_of_the_number_of_tries_is_another_way() {
        let way = |retry| Hints::new(retry, 0).way(1).retry;
        assert_eq!(way(0), 0);
        let mut last = 0;
        for retry in (1..600).chain([u32::MAX - 1, u32::MAX]) {
            assert_ne!(way(retry), 0, "a further try is never a first one");
            assert_ne!(way(retry), last);
            last = way(retry);
        }
    }
}
