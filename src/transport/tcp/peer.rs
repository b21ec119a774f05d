//! The submitting side's view of one segment: where its data port is, the lanes to it, and the work that waits for either.
//!
//! `state` is the peer's one lock. It is never held while a lane is locked or a completion is called; lanes call back with none of
//! their own locks held.
//!
//! Finding the peer again: when no lane can be connected, the descriptor is fetched anew (the peer may have restarted on other ports)
//! and connecting is tried once more; only then does the work fail. All that blocks is done by the transport's background threads.
//! When the peer refuses a range, its descriptor is fetched anew, too: the range may have been registered since, and an upstream
//! server refuses one that spans registrations which only touch, so the slice is split at their borders and tried once more. A peer
//! that speaks version 1 only checks no address at all; there the descriptor is looked at before anything is sent.
//!
//! Balancing: a lane is filled up to [`FILL_BYTES`], so that small requests share system calls; beyond that an idle or new lane is
//! taken, and when there are as many lanes as allowed, the least loaded one.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

use super::Shared;
use super::lane::{Lane, Work};
use super::wire::Version;
use crate::error::{Code, Error, Result};
use crate::metadata::SegmentDescriptor;
use crate::transport::{Completion, Opcode, Segment, Slice};

/// How much is queued on a lane before another is taken.
const FILL_BYTES: u64 = 64 << 10;

/// Where a peer's data port is.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Target {
    addresses: Vec<SocketAddr>,
    version: Version,
}

#[derive(Default)]
struct State {
    target: Option<Target>,
    /// Which of the target's addresses to connect to.
    address: usize,
    lanes: Vec<Arc<Lane>>,
    /// Waits for a target or, in version 1, for a lane.
    backlog: VecDeque<Work>,
    /// A background job is finding the target.
    finding: bool,
    /// The descriptor was fetched since a lane was last connected.
    refreshed: bool,
    /// Refused by the peer; a background job looks at its fresh descriptor.
    refused: Vec<Work>,
    examining: bool,
    lanes_opened: usize,
}

/// One segment that slices are submitted to.
pub(super) struct Peer {
    shared: Arc<Shared>,
    segment: Arc<dyn Segment>,
    state: Mutex<State>,
}

impl Peer {
    pub fn new(shared: Arc<Shared>, segment: Arc<dyn Segment>) -> Arc<Peer> {
        Arc::new(Peer { shared, segment, state: Mutex::default() })
    }

    pub fn submit(self: &Arc<Self>, slices: Vec<Slice>) {
        let since = Instant::now();
        self.take_back(slices.into_iter().map(|slice| Work { slice, attempts: 0, examined: false, since }).collect());
    }

    /// Takes work that no lane has, and gives it to lanes.
    pub fn take_back(self: &Arc<Self>, works: Vec<Work>) {
        if let Some(reason) = self.shared.closing() {
            return self.fail(works, &reason);
        }
        self.state.lock().backlog.extend(works);
        self.dispatch();
    }

    /// Gives the backlog to lanes, as far as the peer's address is known and lanes can be had.
    fn dispatch(self: &Arc<Self>) {
        loop {
            let mut assigned: Vec<(Arc<Lane>, Vec<Work>)> = Vec::new();
            let mut failure = None;
            let mut unknown = Vec::new();
            {
                let mut state = self.state.lock();
                if state.backlog.is_empty() || state.finding {
                    return;
                }
                if state.target.is_none() {
                    match self.known_target() {
                        Some(target) => self.set_target(&mut state, target),
                        None => return self.find(&mut state, None),
                    }
                }
                while let Some(work) = state.backlog.front() {
                    if state.target.as_ref().is_some_and(|target| target.version == Version::V1) && !self.vouches_for(work) {
                        unknown.extend(state.backlog.pop_front());
                        continue;
                    }
                    let length = work.slice.local.length();
                    match self.pick_lane(&mut state, length) {
                        Ok(Some(lane)) => {
                            let Some(work) = state.backlog.pop_front() else { break };
                            lane.reserve(&work);
                            match assigned.last_mut() {
                                Some((last, works)) if Arc::ptr_eq(last, &lane) => works.push(work),
                                _ => assigned.push((lane, vec![work])),
                            }
                        }
                        Ok(None) => break,
                        Err(error) => {
                            failure = Some((error, std::mem::take(&mut state.backlog)));
                            break;
                        }
                    }
                }
            }
            let mut again = false;
            for (lane, works) in assigned {
                if let Err(works) = lane.push(works) {
                    self.state.lock().backlog.extend(works);
                    again = true;
                }
            }
            if let Some((error, works)) = failure {
                self.fail(works, &error);
            }
            if !unknown.is_empty() {
                self.reexamine(unknown);
            }
            if !again {
                return;
            }
        }
    }

    /// Whether the range is in the descriptor at hand, or a fresh one was looked at.
    fn vouches_for(&self, work: &Work) -> bool {
        let slice = &work.slice;
        work.examined || !split(&self.segment.descriptor(), slice.remote_address, slice.local.length()).is_empty()
    }

    /// The lane for the next piece of work. `None`: it has to wait for one.
    fn pick_lane(self: &Arc<Self>, state: &mut State, length: u64) -> Result<Option<Arc<Lane>>> {
        let Some(target) = &state.target else { return Ok(None) };
        let accepting = || state.lanes.iter().filter(|lane| lane.is_accepting());
        let count = accepting().count();
        let may_open = count < self.shared.settings.lanes_per_peer;
        if target.version == Version::V2 {
            let fits = |lane: &&Arc<Lane>| lane.load() == 0 || lane.load() + length <= FILL_BYTES;
            if let Some(lane) = accepting().filter(fits).max_by_key(|lane| lane.load()) {
                return Ok(Some(lane.clone()));
            }
            if !may_open {
                return Ok(accepting().min_by_key(|lane| lane.load()).cloned());
            }
        } else if !may_open {
            return Ok(None);
        }
        let address = target.addresses[state.address];
        let io_loop = self.shared.loop_for(self.segment.id() as usize + state.lanes_opened);
        match Lane::open(self, io_loop, address, target.version) {
            Ok(lane) => {
                self.shared.counters.connections_opened.add(1);
                state.lanes_opened += 1;
                state.lanes.push(lane.clone());
                Ok(Some(lane))
            }
            Err(_) if count > 0 && target.version == Version::V2 => Ok(accepting().min_by_key(|lane| lane.load()).cloned()),
            Err(error) => Err(self.cannot_connect(address, &error)),
        }
    }

    /// The target by the descriptor that is at hand, if that needs no name resolution.
    fn known_target(&self) -> Option<Target> {
        let host = self.segment.host().ok()?;
        let address: IpAddr = host.parse().ok()?;
        let descriptor = self.segment.descriptor();
        let port = data_port(&descriptor)?;
        Some(Target { addresses: vec![SocketAddr::new(address, port)], version: self.version(&descriptor) })
    }

    fn version(&self, descriptor: &SegmentDescriptor) -> Version {
        if descriptor.tcp_proto_version >= 2 && !self.shared.settings.force_v1 { Version::V2 } else { Version::V1 }
    }

    fn set_target(&self, state: &mut State, target: Target) {
        if state.target.as_ref() != Some(&target) {
            state.address = 0;
            state.target = Some(target);
        }
    }

    /// Has the target found in the background; the backlog waits. `connect_error`: why the descriptor at hand is not enough.
    fn find(self: &Arc<Self>, state: &mut State, connect_error: Option<Error>) {
        state.finding = true;
        let peer = self.clone();
        let job = move || peer.finish_finding(connect_error);
        if self.shared.background.run(job).is_err() {
            // Closing: the backlog is failed by whoever closes.
            state.finding = false;
        }
    }

    fn finish_finding(self: &Arc<Self>, connect_error: Option<Error>) {
        let refresh = connect_error.is_some();
        let found = self.resolve(refresh);
        let mut state = self.state.lock();
        state.finding = false;
        match found {
            Ok(target) => {
                self.set_target(&mut state, target);
                state.address = 0;
                state.refreshed |= refresh;
                drop(state);
                self.dispatch();
            }
            Err(error) => {
                state.target = None;
                state.refreshed = false;
                let works = std::mem::take(&mut state.backlog);
                drop(state);
                let error = match connect_error {
                    Some(first) => Error::quiet(first.code(), format!("{}; then: {}", first.message(), error.message())),
                    None => error,
                };
                self.fail(works, &error);
            }
        }
    }

    fn resolve(&self, refresh: bool) -> Result<Target> {
        let descriptor = if refresh { self.segment.refresh()? } else { self.segment.descriptor() };
        let host = self.segment.host()?;
        let port = data_port(&descriptor).ok_or_else(|| {
            Error::new(Code::Metadata, format!("{self}: its descriptor names no TCP data port; is its tcp transport installed?"))
        })?;
        let addresses: Vec<SocketAddr> = (host.as_str(), port)
            .to_socket_addrs()
            .map_err(|error| {
                Error::new(Code::Dns, format!("{self}: cannot resolve {host}: {error}; check the name and the resolver"))
            })?
            .collect();
        if addresses.is_empty() {
            return Err(Error::new(Code::Dns, format!("{self}: {host} has no address; check the name and the resolver")));
        }
        Ok(Target { addresses, version: self.version(&descriptor) })
    }

    /// A lane is connected: what was done to find the peer was enough.
    pub fn lane_connected(&self) {
        self.state.lock().refreshed = false;
    }

    /// A lane has ended. `returned` is work that may be tried elsewhere.
    pub fn lane_closed(self: &Arc<Self>, lane: &Lane, returned: Vec<Work>, connect_error: Option<io::Error>) {
        if let Some(reason) = self.shared.closing() {
            self.state.lock().lanes.retain(|other| !std::ptr::eq(&**other, lane));
            return self.fail(returned, &reason);
        }
        let mut failed = None;
        {
            let mut state = self.state.lock();
            state.lanes.retain(|other| !std::ptr::eq(&**other, lane));
            state.backlog.extend(returned);
            if let Some(error) = connect_error {
                self.shared.counters.connections_failed.add(1);
                let connected_elsewhere = state.lanes.iter().any(|lane| lane.is_connected());
                let addresses = state.target.as_ref().map_or(0, |target| target.addresses.len());
                if !state.finding && !connected_elsewhere {
                    if state.address + 1 < addresses {
                        state.address += 1;
                    } else {
                        let address = state.target.as_ref().map(|target| target.addresses[state.address]);
                        let error = match address {
                            Some(address) => self.cannot_connect(address, &error),
                            None => Error::new(Code::Socket, format!("{self}: cannot connect: {error}")),
                        };
                        if state.refreshed {
                            state.refreshed = false;
                            state.target = None;
                            failed = Some((error, std::mem::take(&mut state.backlog)));
                        } else if !state.backlog.is_empty() {
                            self.find(&mut state, Some(error));
                        } else {
                            state.target = None;
                        }
                    }
                }
            }
        }
        match failed {
            Some((error, works)) => self.fail(works, &error),
            None => self.dispatch(),
        }
    }

    /// Looks at the fresh descriptor of a peer that has refused work, in the background.
    pub fn reexamine(self: &Arc<Self>, works: Vec<Work>) {
        let (again, last): (Vec<Work>, Vec<Work>) = works.into_iter().partition(|work| !work.examined);
        for work in last {
            let error = self.refusal(&work.slice);
            self.finish(work, Err(error));
        }
        if again.is_empty() {
            return;
        }
        let mut state = self.state.lock();
        state.refused.extend(again);
        if !state.examining {
            state.examining = true;
            let peer = self.clone();
            if self.shared.background.run(move || peer.examine()).is_err() {
                state.examining = false;
            }
        }
    }

    fn examine(self: &Arc<Self>) {
        loop {
            let descriptor = self.segment.refresh();
            let moved = descriptor.as_ref().is_ok() && {
                let fresh = self.known_target();
                let mut state = self.state.lock();
                match fresh {
                    Some(target) if state.target.as_ref().is_some_and(|old| *old != target) => {
                        self.set_target(&mut state, target);
                        true
                    }
                    _ => false,
                }
            };
            let works = {
                let mut state = self.state.lock();
                let works = std::mem::take(&mut state.refused);
                state.examining = !works.is_empty();
                works
            };
            if works.is_empty() {
                return;
            }
            let mut again = Vec::new();
            for mut work in works {
                work.examined = true;
                let pieces = match &descriptor {
                    Ok(descriptor) => split(descriptor, work.slice.remote_address, work.slice.local.length()),
                    Err(_) => Vec::new(),
                };
                if moved || pieces.len() == 1 {
                    again.push(work);
                } else if pieces.len() > 1 {
                    // The whole is counted as running, and ends without this transport's help.
                    self.shared.add_running(pieces.len());
                    self.shared.end_running(1);
                    again.extend(divide(work, &pieces));
                } else {
                    let error = self.refusal(&work.slice);
                    self.finish(work, Err(error));
                }
            }
            if !again.is_empty() {
                self.take_back(again);
            }
        }
    }

    /// Ends what has waited too long.
    pub fn expire(self: &Arc<Self>, now: Instant) {
        let (lanes, expired) = {
            let mut state = self.state.lock();
            let mut expired = Vec::new();
            let mut position = 0;
            while let Some(work) = state.backlog.get(position) {
                if work.expires(None) <= now {
                    expired.extend(state.backlog.remove(position));
                } else {
                    position += 1;
                }
            }
            (state.lanes.clone(), expired)
        };
        for lane in lanes {
            lane.expire(now, self.shared.settings.connect_timeout);
        }
        for work in expired {
            let error = self.timed_out(&work.slice);
            self.finish(work, Err(error));
        }
    }

    /// Ends the slices that match; their memory is not touched after this returns.
    pub fn abandon(self: &Arc<Self>, matches: &dyn Fn(&Slice) -> bool, error: &dyn Fn(&Slice) -> Error) {
        let (lanes, works) = {
            let mut guard = self.state.lock();
            let state = &mut *guard;
            let mut works = Vec::new();
            let mut keep = VecDeque::new();
            for work in state.backlog.drain(..) {
                if matches(&work.slice) { works.push(work) } else { keep.push_back(work) }
            }
            state.backlog = keep;
            for work in std::mem::take(&mut state.refused) {
                if matches(&work.slice) { works.push(work) } else { state.refused.push(work) }
            }
            (state.lanes.clone(), works)
        };
        for work in works {
            let error = error(&work.slice);
            self.finish(work, Err(error));
        }
        for lane in lanes {
            lane.abandon(matches, error);
        }
    }

    /// Closes idle lanes; the others end with what they carry. For a segment that is no longer opened by anybody.
    pub fn retire(&self) {
        let lanes = self.state.lock().lanes.clone();
        for lane in lanes {
            lane.close_if_idle();
        }
    }

    /// Ends all work with `reason`.
    pub fn close(self: &Arc<Self>, reason: &Error) {
        let (lanes, mut works) = {
            let mut state = self.state.lock();
            (state.lanes.clone(), std::mem::take(&mut state.backlog))
        };
        works.extend(std::mem::take(&mut self.state.lock().refused));
        for lane in lanes {
            lane.fail(reason);
        }
        self.fail(works, reason);
    }

    pub fn count_ended(&self, count: usize) {
        self.shared.end_running(count);
    }

    fn fail(&self, works: impl IntoIterator<Item = Work>, error: &Error) {
        for work in works {
            self.finish(work, Err(error.clone()));
        }
    }

    fn finish(&self, work: Work, outcome: Result<()>) {
        work.slice.finish(outcome);
        self.shared.end_running(1);
    }

    fn cannot_connect(&self, address: SocketAddr, error: &io::Error) -> Error {
        let limit = matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE));
        let code = if limit { Code::Limit } else { Code::Socket };
        let advice = if limit {
            "raise the limit on open files (ulimit -n)"
        } else {
            "check that the peer runs and that its data port is reachable"
        };
        Error::new(code, format!("{self}: cannot connect to its data port {address}: {error}; {advice}"))
    }

    pub fn timed_out(&self, slice: &Slice) -> Error {
        let limit = slice.deadline.stall;
        Error::new(Code::Timeout, format!("{} gave no answer in time (at most {limit:?} without progress)", self.what(slice)))
    }

    pub fn broke(&self, slice: &Slice, reason: &str, version: Version) -> Error {
        let hint = match version {
            Version::V1 => "; it speaks protocol 1, which closes the connection on an address that is not registered",
            Version::V2 => "",
        };
        Error::new(Code::Socket, format!("{}: {reason}{hint}", self.what(slice)))
    }

    fn refusal(&self, slice: &Slice) -> Error {
        let text = format!("{}: refused; the range is not registered there, or not open to peers", self.what(slice));
        Error::new(Code::AddressNotRegistered, text)
    }

    fn what(&self, slice: &Slice) -> String {
        let what = match slice.opcode {
            Opcode::Read => "read of",
            Opcode::Write => "write to",
        };
        format!("{what} [{:#x}, +{}) at {self}", slice.remote_address, slice.local.length())
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "segment {}", self.segment.descriptor().name)
    }
}

fn data_port(descriptor: &SegmentDescriptor) -> Option<u16> {
    Some(descriptor.tcp_data_port).filter(|&port| port != 0)
}

/// Lengths of the parts of `[address, address + length)` by the registered buffers that it spans. Empty if it is not covered.
fn split(descriptor: &SegmentDescriptor, address: u64, length: u64) -> Vec<u64> {
    let end = u128::from(address) + u128::from(length);
    let mut covering: Vec<(u128, u128)> = descriptor
        .buffers
        .iter()
        .map(|buffer| (u128::from(buffer.address), u128::from(buffer.address) + u128::from(buffer.length)))
        .filter(|&(from, to)| from < end && to > u128::from(address))
        .collect();
    covering.sort_unstable();
    let mut at = u128::from(address);
    let mut pieces = Vec::new();
    for (from, to) in covering {
        if from > at {
            return Vec::new();
        }
        let next = to.min(end);
        if next > at {
            pieces.push((next - at) as u64);
            at = next;
        }
    }
    if at == end { pieces } else { Vec::new() }
}

/// The parts of a slice that was split, as far as they have not ended.
struct Division {
    whole: Mutex<Option<Slice>>,
    remaining: AtomicU32,
    error: Mutex<Option<Error>>,
    owner: Arc<dyn Completion>,
}

impl Completion for Division {
    fn finish(&self, _index: u32, outcome: Result<()>) {
        if let Err(error) = outcome {
            self.error.lock().get_or_insert(error);
        }
        if self.remaining.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(slice) = self.whole.lock().take()
        {
            let outcome = self.error.lock().take().map_or(Ok(()), Err);
            slice.finish(outcome);
        }
    }

    fn is_cancelled(&self) -> bool {
        self.owner.is_cancelled()
    }
}

fn divide(work: Work, pieces: &[u64]) -> Vec<Work> {
    let Work { slice, attempts, examined, since } = work;
    let (opcode, local, remote_address, deadline) = (slice.opcode, slice.local, slice.remote_address, slice.deadline);
    let division: Arc<dyn Completion> = Arc::new(Division {
        owner: slice.completion.clone(),
        whole: Mutex::new(Some(slice)),
        remaining: AtomicU32::new(pieces.len() as u32),
        error: Mutex::new(None),
    });
    let mut offset = 0;
    let mut works = Vec::with_capacity(pieces.len());
    for (index, &length) in pieces.iter().enumerate() {
        if let Some(part) = local.part(offset, length) {
            let slice = Slice {
                opcode,
                local: part,
                remote_address: remote_address + offset,
                deadline,
                completion: division.clone(),
                index: index as u32,
            };
            works.push(Work { slice, attempts, examined, since });
        }
        offset += length;
    }
    works
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::BufferDescriptor;

    fn descriptor(buffers: &[(u64, u64)]) -> SegmentDescriptor {
        let buffers =
            buffers.iter().map(|&(address, length)| BufferDescriptor { address, length, ..BufferDescriptor::default() }).collect();
        SegmentDescriptor { buffers, ..SegmentDescriptor::default() }
    }

    #[test]
    fn ranges_are_split_at_the_borders_of_touching_buffers() {
        let descriptor = descriptor(&[(300, 100), (100, 100), (200, 100), (500, 10)]);
        assert_eq!(split(&descriptor, 150, 200), [50, 100, 50]);
        assert_eq!(split(&descriptor, 100, 300), [100, 100, 100]);
        assert_eq!(split(&descriptor, 120, 10), [10]);
    }

    #[test]
    fn ranges_with_a_gap_are_not_split() {
        let descriptor = descriptor(&[(100, 100), (200, 100), (400, u64::MAX - 399)]);
        for (address, length) in [(250, 100), (50, 100), (299, 102), (0, 1)] {
            assert_eq!(split(&descriptor, address, length), [0u64; 0], "{address} {length}");
        }
        assert_eq!(split(&descriptor, u64::MAX - 9, 10), [10]);
    }
}
