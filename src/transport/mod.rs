//! How bytes move. A transport knows slices and memory, not batches.
//!
//! A transport is given [`Slices`] and must end each exactly once, by [`Completion::finish`] or [`Completion::complete`], after which it
//! never touches the slice's memory again. It owns deadlines and cancellation of what it was given.

pub mod device;
pub mod local;
#[cfg(feature = "rdma")]
pub mod rdma;
pub mod tcp;

use std::sync::Arc;
use std::time::{Duration, Instant};

#[cfg(all(test, loom))]
use loom::sync::atomic::{AtomicUsize, Ordering};
#[cfg(not(all(test, loom)))]
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::{Code, Error, Result};
use crate::metadata::SegmentDescriptor;
use crate::registry::Region;
use crate::sys::MemoryRange;
use crate::topology::Link;
pub use device::Device;

/// Counts the callers of an engine that wait for the end of their transfers otherwise than by polling. The engine counts, transports
/// look. Whoever begins is counted first and looks at what a transport has decided afterwards; a transport decides first and looks here
/// afterwards: one of them sees the other, by a lock (see [`tcp`]'s `attendance`) or because both are sequentially consistent.
#[derive(Default)]
pub struct Watchers(AtomicUsize);

impl Watchers {
    /// One more. Followed by [`Transport::watch`].
    pub fn begin(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    /// One less.
    pub fn end(&self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether there are any.
    pub fn are_there(&self) -> bool {
        self.0.load(Ordering::SeqCst) > 0
    }
}

/// Which way the bytes go, seen from the submitter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opcode {
    /// From the target segment into local memory.
    Read,
    /// From local memory into the target segment.
    Write,
}

/// When a slice is given up.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    /// It ends at this time, whatever has moved.
    pub absolute: Option<Instant>,
    /// It ends when nothing has moved on its connection for this long.
    pub stall: Duration,
}

/// Who is told of a slice's end. Implemented by the transfer room.
pub trait Completion: Send + Sync {
    /// The slice is over: its bytes are in place, or the error says why not. Once for each slice, this or [`Completion::complete`].
    fn finish(&self, index: u32, outcome: Result<()>);

    /// These slices are over, and their bytes are in place: [`Completion::finish`] for all of them, at a lower cost for each.
    fn complete(&self, indices: &[u32]) {
        indices.iter().for_each(|index| self.finish(*index, Ok(())));
    }

    /// When the tasks were submitted: asking the clock again costs more than all else that telemetry does.
    fn started(&self) -> Instant {
        Instant::now()
    }

    /// Whether the caller has cancelled everything it submitted with this completion.
    fn is_cancelled(&self) -> bool;

    /// The registered region that holds the byte at this address of the slice's local memory, if one does; guarded until the slice is
    /// finished.
    fn region(&self, index: u32, address: u64) -> Option<&Region> {
        let _ = (index, address);
        None
    }

    /// Whether this region, which was found for another slice of the same submission, is guarded for this one as well.
    fn is_in(&self, index: u32, region: *const Region) -> bool {
        let _ = (index, region);
        false
    }
}

/// Which way a slice is to take, where a transport has several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Way {
    /// Slices to one segment with the same number other than 0 go the same way, in the order in which they are submitted, as long as none
    /// fails. 0: any.
    pub path: u8,
    /// Ways that have been tried for it by others. Successive numbers take different ways; 0 takes one of the preferred ones.
    pub retry: u8,
}

/// A piece of work for a transport: one contiguous local range against one contiguous range of a peer.
pub struct Slice {
    /// Direction.
    pub opcode: Opcode,
    /// Memory of this process: source of a write, sink of a read. Never empty.
    pub local: MemoryRange,
    /// Start of the range in the target segment's address space; its length is that of `local`.
    pub remote_address: u64,
    /// When to give up.
    pub deadline: Deadline,
    /// Who is told, and by which index it knows this slice.
    pub completion: Arc<dyn Completion>,
    /// See `completion`.
    pub index: u32,
    /// Which way to take.
    pub way: Way,
}

impl Slice {
    /// Tells the owner that the slice is over.
    pub fn finish(self, outcome: Result<()>) {
        self.completion.finish(self.index, outcome);
    }
}

/// A [`Slice`] without what it shares with others.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// See [`Slice::local`].
    pub local: MemoryRange,
    /// See [`Slice::remote_address`].
    pub remote_address: u64,
    /// See [`Slice::index`].
    pub index: u32,
    /// Direction.
    pub opcode: Opcode,
    /// See [`Slice::way`].
    pub way: Way,
}

// Submissions are copied about.
const _: () = assert!(size_of::<Piece>() == 32);

/// Slices that are submitted together to one segment.
pub struct Slices {
    /// Each of them.
    pub pieces: Vec<Piece>,
    /// When to give each of them up.
    pub deadline: Deadline,
    /// Who is told of all of them.
    pub completion: Arc<dyn Completion>,
}

impl Slices {
    /// Takes them apart.
    pub fn into_each(self) -> impl Iterator<Item = Slice> {
        let Slices { pieces, deadline, completion } = self;
        pieces.into_iter().map(move |Piece { local, remote_address, index, opcode, way }| {
            let completion = completion.clone();
            Slice { opcode, local, remote_address, deadline, completion, index, way }
        })
    }
}

/// A segment of another process (or of this one), as transports see it. Implemented by the engine's segment cache.
pub trait Segment: Send + Sync {
    /// Unique within the engine, never reused.
    fn id(&self) -> u64;

    /// The descriptor as it is known now.
    fn descriptor(&self) -> Arc<SegmentDescriptor>;

    /// Fetches the descriptor anew from the peer or the metadata server, and keeps it. Blocks for up to the handshake time-outs.
    fn refresh(&self) -> Result<Arc<SegmentDescriptor>>;

    /// Host of the peer's handshake channel: where its data port is, too.
    fn host(&self) -> Result<String>;

    /// Sends the peer a request for an RDMA connection, and returns its reply, both JSON objects. Blocks for up to the handshake time-outs.
    fn request_connection(&self, request: &serde_json::Value) -> Result<serde_json::Value> {
        let _ = request;
        Err(Error::quiet(Code::NotSupportedTransport, "the own segment needs no connection"))
    }
}

/// A segment of nobody, for tests.
#[cfg(test)]
pub(crate) struct Nowhere;

#[cfg(test)]
impl Segment for Nowhere {
    fn id(&self) -> u64 {
        1
    }
    fn descriptor(&self) -> Arc<SegmentDescriptor> {
        Arc::default()
    }
    fn refresh(&self) -> Result<Arc<SegmentDescriptor>> {
        Ok(self.descriptor())
    }
    fn host(&self) -> Result<String> {
        Ok(String::new())
    }
}

/// What a NIC is doing.
#[derive(Clone, Debug, PartialEq)]
pub struct NicLoad {
    /// Such as `mlx5_0`.
    pub device: String,
    /// Bytes of work that it has been given and that has not ended.
    pub bytes_in_flight: u64,
    /// Bytes a second that it has moved lately, averaged while it had work; 0 if it never had.
    pub bytes_per_second: f64,
    /// Bytes that it has moved for requests of this engine.
    pub bytes_completed: u64,
}

/// A way to move bytes.
pub trait Transport: Send + Sync {
    /// Name in `installTransport` and in descriptors.
    fn protocol(&self) -> &'static str;

    /// Devices that memory must be registered with before this transport can use it; none for most. Always the same ones in the same
    /// order, those that are gone included: keys of a region are found by the position of their device. At most one transport of
    /// an engine has any.
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        Vec::new()
    }

    /// Starts the slices. Failures are reported per slice through its completion.
    fn submit(&self, segment: &Arc<dyn Segment>, slices: Slices);

    /// Ends what can be ended of cancelled completions. They are set cancelled before the call, and what is on its way between queues
    /// meanwhile is ended when it arrives. The local memory of what has ended is not touched any more; bytes of a write that are on
    /// their way may still land at the peer.
    fn cancel(&self);

    /// Ends what still moves bytes of `range`, by a peer's order or this process's, so that guards on it are given back. Work that is on
    /// its way between queues is not seen: call it again as long as guards are held.
    fn evict(&self, range: MemoryRange);

    /// Moves what can be moved on the caller's thread, which polls for the end of its slices anyway. Calling it is never needed.
    fn poll(&self) {}

    /// Somebody begins to wait without polling, and is counted among the watchers: nothing may be left to be moved by polls.
    fn watch(&self) {}

    /// What is to be shown of the NICs that it uses.
    fn links(&self) -> Vec<Link> {
        Vec::new()
    }

    /// What each of its NICs is doing.
    fn loads(&self) -> Vec<NicLoad> {
        Vec::new()
    }

    /// Answers a peer's request for an RDMA connection; both are JSON objects. `None`: there is no RDMA here. Must not wait for anything slow.
    fn accept(&self, request: &serde_json::Value) -> Option<serde_json::Value> {
        let _ = request;
        None
    }

    /// Drops what is kept for a segment; its running slices end first.
    fn forget(&self, segment: u64);

    /// Ends everything with `reason`, also what is submitted at the same time or later, and returns when no thread of the transport
    /// touches memory any more.
    fn shutdown(&self, reason: Error);
}
