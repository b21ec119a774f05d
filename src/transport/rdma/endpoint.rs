//! One end of the way between a NIC here and a NIC of a peer: its queue pairs, and how they come to be connected.
//!
//! ```text
//! New --somebody submits--> Connecting --the peer's numbers--> Connected --failure, eviction--> Retired --flushed--> gone
//!  `--the peer asks--------------|--> AwaitsReady --ready-ack----^
//! ```
//!
//! An [`Endpoint`] belongs to its NIC's state and changes under that lock. Its [`Connection`] is shared with whoever connects it, on the
//! thread of a handshake: `link` is locked while queue pairs change their state, never together with the NIC's lock taken first.
//! A connection is linked with one peer's queue pairs, once; when both sides ask at a time, the second finds what the first has done.
//!
//! Whoever asks with other queue pairs in the name of a NIC that an endpoint is linked with may be that NIC's process, which has given its
//! own up, or somebody else: nothing in a request proves its origin. He gets an endpoint of his own, a *rival*, which is as good for what he
//! submits. What is submitted here goes by the endpoint until it is given up; then the rival takes its place. To know soon, the peer itself
//! is asked, at its own address, by the last step of connecting: it accepts that for queue pairs that it is connected with only. If it does,
//! the rival goes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

use super::device::PeerQueuePair;
use super::nic::Opened;
use super::peer::Peer;
use super::verbs::QueuePair;
use super::work::{Group, Span};
use crate::error::{Error, Result};
use crate::topology::GidAddress;

/// Queue pairs that belong together.
pub(super) struct Connection {
    /// Where they were made.
    pub opened: Arc<Opened>,
    pub pairs: Vec<QueuePair>,
    /// For each queue pair, the place of its completion queue.
    pub queues: Vec<usize>,
    /// Numbers of the peer's queue pairs, once they are connected.
    link: Mutex<Option<Vec<u32>>>,
    is_given_up: AtomicBool,
}

/// Why a connection cannot be linked.
pub(super) enum LinkError {
    /// It is linked with other queue pairs.
    LinkedElsewhere,
    /// Its queue pairs were put into the error state meanwhile.
    GivenUp,
    /// The device refuses.
    Device(std::io::Error),
}

impl Connection {
    /// Makes the queue pairs. Completions go to the completion queues in turn, from number `first` on.
    pub fn new(opened: Arc<Opened>, first: usize, count: usize) -> Result<Arc<Connection>> {
        let queues: Vec<usize> = (first..first + count).map(|turn| turn % opened.queues.len()).collect();
        let pair = |queue: &usize| opened.device.make_queue_pair(&opened.queues[*queue]);
        let pairs = queues.iter().map(pair).collect::<Result<_>>()?;
        Ok(Arc::new(Connection { pairs, opened, queues, link: Mutex::default(), is_given_up: AtomicBool::new(false) }))
    }

    /// Numbers of the queue pairs.
    pub fn numbers(&self) -> Vec<u32> {
        self.pairs.iter().map(QueuePair::number).collect()
    }

    /// Connects each queue pair with the peer's of the same place; nothing to do if that has been done.
    pub fn link(&self, numbers: &[u32], gid: GidAddress, lid: u16) -> std::result::Result<(), LinkError> {
        let mut link = self.link.lock();
        match &*link {
            Some(linked) if linked == numbers => return Ok(()),
            Some(_) => return Err(LinkError::LinkedElsewhere),
            None => {}
        }
        for (pair, number) in self.pairs.iter().zip(numbers) {
            let refused = |error| match self.is_given_up.load(Ordering::SeqCst) {
                true => LinkError::GivenUp,
                false => LinkError::Device(error),
            };
            self.opened.device.connect(pair, &PeerQueuePair { number: *number, gid, lid }).map_err(refused)?;
        }
        if self.is_given_up.load(Ordering::SeqCst) {
            return Err(LinkError::GivenUp);
        }
        *link = Some(numbers.to_vec());
        Ok(())
    }

    /// Puts the queue pairs into the error state, for good: all that is posted comes back. System calls: not with the NIC's lock.
    pub fn give_up(&self, path: &str) {
        self.is_given_up.store(true, Ordering::SeqCst);
        // A device that is gone answers with an error; its queue pairs are destroyed after a while.
        for pair in &self.pairs {
            if let Err(error) = pair.fail() {
                tracing::debug!("a queue pair to {path} cannot be put into the error state: {error}");
            }
        }
    }

    /// Whether it is linked with exactly these.
    pub fn is_linked_with(&self, numbers: &[u32]) -> bool {
        self.link.lock().as_deref() == Some(numbers)
    }

    /// Whether it is linked.
    pub fn is_linked(&self) -> bool {
        self.link.lock().is_some()
    }
}

/// Where an endpoint stands.
pub(super) enum Phase {
    /// Nobody has asked the peer.
    New,
    /// The peer is asked.
    Connecting,
    /// Connected by the peer's wish, which has yet to say that it is ready.
    AwaitsReady(Instant),
    /// Work can be posted.
    Connected,
    /// Everything is being flushed; nothing is posted any more.
    Retired(Retirement),
}

/// Why and since when an endpoint is given up.
pub(super) struct Retirement {
    pub since: Instant,
    /// What was wrong with it; `None` if it was given up for something that its other work has nothing to do with.
    pub fault: Option<Error>,
}

/// An endpoint; see the module.
pub(super) struct Endpoint {
    /// Unique within the NIC, never reused.
    pub id: u64,
    /// The peer's NIC.
    pub path: Arc<str>,
    pub phase: Phase,
    pub connection: Option<Arc<Connection>>,
    /// Whom to ask for a connection; `None` until somebody submits.
    pub peer: Option<Arc<Peer>>,
    /// What is to be posted.
    pub waiting: VecDeque<Span>,
    /// Work requests that are posted, for each queue pair.
    pub posted: Vec<u32>,
    /// When something has moved last.
    pub moved: Instant,
    /// No span has waited for too long before that.
    pub next_expiry: Option<Instant>,
    /// Whether the peer is being asked if it is connected with it yet.
    pub is_doubted: bool,
    /// Whether something was submitted since eviction has looked at it.
    pub was_used: bool,
    pub is_in_backlog: bool,
}

impl Endpoint {
    pub fn new(id: u64, path: Arc<str>, queue_pairs: usize) -> Endpoint {
        Endpoint {
            id,
            path,
            phase: Phase::New,
            connection: None,
            peer: None,
            waiting: VecDeque::new(),
            posted: vec![0; queue_pairs],
            moved: Instant::now(),
            next_expiry: None,
            is_doubted: false,
            was_used: true,
            is_in_backlog: false,
        }
    }

    pub fn is_retired(&self) -> bool {
        matches!(self.phase, Phase::Retired(_))
    }

    pub fn is_posted(&self) -> bool {
        self.posted.iter().any(|count| *count > 0)
    }

    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && !self.is_posted() && !matches!(self.phase, Phase::Connecting | Phase::AwaitsReady(_))
    }

    /// Whether a clock has to look at it now and then.
    pub fn needs_clock(&self) -> bool {
        self.is_retired() || matches!(self.phase, Phase::AwaitsReady(_)) || !self.waiting.is_empty() || self.is_posted()
    }

    /// Puts spans, which are of no other groups than these, into the queue.
    pub fn queue(&mut self, spans: Vec<Span>, groups: &[Arc<Group>]) {
        self.was_used = true;
        if self.waiting.is_empty() && !self.is_posted() {
            self.next_expiry = None;
        }
        let expiry = groups.iter().map(|group| group.expiry(self.moved)).min();
        self.next_expiry = self.next_expiry.into_iter().chain(expiry).min();
        if self.waiting.is_empty() {
            self.waiting = spans.into();
        } else {
            self.waiting.extend(spans);
        }
    }
}
