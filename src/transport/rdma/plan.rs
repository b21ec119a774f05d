//! Which way bytes go: spans are cut where registrations here and entries of the peer's descriptor end, striped over NICs if they are
//! long, and given the keys of the pair of NICs that is to move them.
//!
//! A span is looked at from end to end before any part of it goes anywhere, so a request is refused as a whole. The NIC here goes by the
//! location of the memory here, the peer's by that of the peer's memory; each NIC here keeps to one of several equal ones there, so that
//! few connections are needed. A span that has failed takes the next pair of NICs.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::Shared;
use super::peer::{Peer, View};
use super::work::Span;
use crate::error::{Code, Error};
use crate::metadata::BufferDescriptor;
use crate::registry::{Chunk, Guards, Registrations};
use crate::topology::{NicChoice, location_at};
use crate::transport::Device;

/// A stripe has this many slices or more.
const STRIPE_SLICES: u64 = 4;

/// Spans that go the same way.
pub(super) struct Rail {
    pub nic: usize,
    pub path: Arc<str>,
    pub spans: Vec<Span>,
}

/// The peer's descriptor has no entry for it; a newer one may.
pub(super) struct NotAtPeer(pub Span);

/// The preferred NICs of the location that was asked for last: most spans of a submission are at the same.
#[derive(Default)]
struct Preferred {
    /// Where the location's text is; texts are shared.
    text: usize,
    nics: Vec<usize>,
}

impl Preferred {
    fn get(&mut self, choice: &NicChoice, name: &str, length: u64, offset: u64) -> &[usize] {
        let text = name.as_ptr() as usize;
        if text != self.text {
            let location = location_at(name, length, offset);
            self.nics.clear();
            self.nics.extend_from_slice(choice.preferred(&location));
            // Of such a name each part is at another location.
            self.text = if name.starts_with("segments:") { 0 } else { text };
        }
        &self.nics
    }
}

/// Plans spans for one peer.
pub(super) struct Planner<'a> {
    shared: &'a Shared,
    peer: &'a Peer,
    view: Arc<View>,
    hint: usize,
    now: Instant,
    here: Preferred,
    there: Preferred,
    /// Which of several preferred NICs is next.
    turn: usize,
    pub rails: Vec<Rail>,
    /// Spans that are over. They are ended when nothing is locked.
    pub ended: Vec<(Span, Error)>,
}

impl<'a> Planner<'a> {
    pub fn new(shared: &'a Shared, peer: &'a Peer) -> Planner<'a> {
        Planner {
            shared,
            peer,
            view: peer.view(),
            hint: 0,
            now: Instant::now(),
            here: Preferred::default(),
            there: Preferred::default(),
            turn: shared.next_turn.fetch_add(1, Ordering::Relaxed),
            rails: Vec::new(),
            ended: Vec::new(),
        }
    }

    /// Puts a span, or its parts, on rails, or among those that are over.
    pub fn plan(&mut self, mut span: Span) -> Result<(), NotAtPeer> {
        if let Some(error) = span.task().doomed() {
            self.ended.push((span, error));
            return Ok(());
        }
        let group = span.group().clone();
        let guards = group.tasks[span.task_index()].guards.lock();
        // They are given back when the last span ends, and this one has not.
        let Some(guards) = guards.as_ref() else { return Ok(()) };
        let view = self.view.clone();
        let mut checked = 0;
        while checked < span.local.length() {
            let (address, remote) = (span.local.address() + checked, span.remote_address + checked);
            let (Some(chunk), Some(buffer)) = (find_chunk(guards, address), view.find(remote, &mut self.hint)) else {
                if find_chunk(guards, address).is_some() {
                    return Err(NotAtPeer(span));
                }
                let text = format!("local memory at {address:#x} is not registered with any NIC");
                self.ended.push((span, Error::new(Code::AddressNotRegistered, text)));
                return Ok(());
            };
            checked += length_in(chunk, address, buffer, remote).min(span.local.length() - checked);
        }
        loop {
            let (address, remote) = (span.local.address(), span.remote_address);
            let (Some(chunk), Some(buffer)) = (find_chunk(guards, address), view.find(remote, &mut self.hint)) else { break };
            let length = length_in(chunk, address, buffer, remote);
            let location = location_of(guards, address);
            if length >= span.local.length() {
                self.stripe(span, &view, chunk, buffer, location);
                break;
            }
            let part = span.split(length);
            self.stripe(part, &view, chunk, buffer, location);
        }
        Ok(())
    }

    /// Puts a span that is inside of one chunk and one entry on one rail or, if it is long, on several.
    fn stripe(&mut self, mut span: Span, view: &View, chunk: &Chunk, buffer: &BufferDescriptor, location: (&str, u64, u64)) {
        let (name, length, offset) = location;
        let shared = self.shared;
        let is_usable = |nic: usize| shared.nics[nic].is_active() && chunk.key(nic).is_some();
        if span.attempt == 0 {
            let preferred = self.here.get(&shared.choice, name, length, offset);
            let slice = shared.config.slice_size;
            let stripes = (span.local.length() / (STRIPE_SLICES * slice)).clamp(1, preferred.len().max(1) as u64) as usize;
            // From the next one on, around the end, those that can be used.
            let (before, from) = preferred.split_at(self.turn % preferred.len().max(1));
            let mut usable = from.iter().chain(before).copied().filter(|nic| is_usable(*nic));
            self.turn = self.turn.wrapping_add(1);
            if stripes == 1 {
                if let Some(nic) = usable.next() {
                    return self.put(span, nic, view, chunk, buffer);
                }
            } else {
                let nics: Vec<usize> = usable.take(stripes).collect();
                let length = (span.local.length() / nics.len().max(1) as u64).next_multiple_of(slice);
                for (place, nic) in nics.iter().enumerate() {
                    if place + 1 == nics.len() || length >= span.local.length() {
                        return self.put(span, *nic, view, chunk, buffer);
                    }
                    let part = span.split(length);
                    self.put(part, *nic, view, chunk, buffer);
                }
            }
        }
        match shared.choice.select(&location_at(name, length, offset), u32::from(span.attempt), is_usable) {
            Some(nic) => self.put(span, nic, view, chunk, buffer),
            None => {
                let text = format!("no NIC that knows local memory at {:#x} is active", span.local.address());
                self.ended.push((span, Error::new(Code::DeviceNotFound, text)));
            }
        }
    }

    /// Puts a span on the rail of a NIC here and the one at the peer that goes with it.
    fn put(&mut self, mut span: Span, nic: usize, view: &View, chunk: &Chunk, buffer: &BufferDescriptor) {
        let device = self.peer_device(&span, nic, view, buffer);
        let (Some(key), Some(device)) = (chunk.key(nic), device) else {
            let name = self.peer.segment.descriptor().name.clone();
            let text = format!("{name} has no NIC that knows its memory at {:#x}", span.remote_address);
            self.ended.push((span, Error::new(Code::DeviceNotFound, text)));
            return;
        };
        let remote_key = buffer.rkey[device];
        // The peer still has the key that was refused: the keys of its other NICs are for the same memory, and no better.
        if std::mem::take(&mut span.is_refused) && buffer.rkey.contains(&span.remote_key) {
            let name = self.peer.segment.descriptor().name.clone();
            let text = format!(
                "{name} refuses access to {} bytes at {:#x}: not registered there, or not with that access",
                span.local.length(),
                span.remote_address
            );
            self.ended.push((span, Error::new(Code::AddressNotRegistered, text)));
            return;
        }
        (span.local_key, span.remote_key) = (key.lkey, remote_key);
        let path = &view.paths[device];
        match self.rails.iter_mut().find(|rail| rail.nic == nic && Arc::ptr_eq(&rail.path, path)) {
            Some(rail) => rail.spans.push(span),
            None => self.rails.push(Rail { nic, path: path.clone(), spans: vec![span] }),
        }
    }

    /// The peer's NIC for memory of an entry.
    fn peer_device(&mut self, span: &Span, nic: usize, view: &View, buffer: &BufferDescriptor) -> Option<usize> {
        let shared = self.shared;
        let has_key = |device: usize| buffer.rkey.get(device).is_some_and(|key| *key != 0);
        let now = self.now;
        let is_usable = |device: usize| has_key(device) && !shared.is_paused(nic, &view.paths[device], now);
        let offset = span.remote_address - buffer.address;
        let config = &shared.config;
        let attempt = u32::from(span.attempt);
        if attempt == 0 {
            let name = shared.names[nic].as_str();
            let preferred = self.there.get(&view.choice, &buffer.name, buffer.length, offset);
            let is_wanted = |device: &&usize| -> bool {
                match (config.same_name_affinity, config.use_peer_affinity) {
                    (true, false) => view.name(**device) == name,
                    (false, true) => {
                        let peers = config.peer_affinity.iter().find(|(own, _)| own == name);
                        peers.is_some_and(|(_, peers)| peers.iter().any(|peer| peer == view.name(**device)))
                    }
                    _ => false,
                }
            };
            if (config.same_name_affinity || config.use_peer_affinity)
                && let Some(device) = preferred.iter().filter(is_wanted).find(|device| is_usable(**device))
            {
                return Some(*device);
            }
            if !preferred.is_empty() {
                let device = preferred[nic % preferred.len()];
                if is_usable(device) {
                    return Some(device);
                }
            }
        }
        // Each walk through the NICs here begins with another one there.
        let retry = attempt + attempt.saturating_sub(1) / shared.nics.len().max(1) as u32;
        let location = location_at(&buffer.name, buffer.length, offset);
        view.choice.select(&location, retry, is_usable).or_else(|| view.choice.select(&location, retry, has_key))
    }
}

/// The chunk of a guarded region that holds the byte at `address`.
fn find_chunk(guards: &Guards, address: u64) -> Option<&Chunk> {
    let guard = guards.iter().find(|guard| guard.region().range().contains(address, 1))?;
    guard.region().registrations().and_then(|registrations: &Registrations| registrations.find(address))
}

/// Location of the region that holds the byte at `address`, its length, and where in it the byte is.
fn location_of(guards: &Guards, address: u64) -> (&str, u64, u64) {
    match guards.iter().find(|guard| guard.region().range().contains(address, 1)) {
        Some(guard) => {
            let range = guard.region().range();
            (guard.region().location(), range.length(), address - range.address())
        }
        None => ("*", 0, 0),
    }
}

/// How many bytes from there on are in both.
fn length_in(chunk: &Chunk, address: u64, buffer: &BufferDescriptor, remote: u64) -> u64 {
    (chunk.range().length() - (address - chunk.range().address())).min(buffer.length - (remote - buffer.address))
}
