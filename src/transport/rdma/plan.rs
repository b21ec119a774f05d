//! Which way bytes go: spans are cut where registrations here and entries of the peer's descriptor end, striped over NICs if they are
//! long, and given the keys of the pair of NICs that is to move them.
//!
//! A span is looked at from end to end before any part of it goes anywhere, so a request is refused as a whole. The NIC here goes by the
//! location of the memory here, the peer's by that of the peer's memory; each NIC here keeps to one of several equal ones there, so that
//! few connections are needed. A span that has failed takes the next pair of NICs, as does one of which the caller says that it has. Spans of
//! one path take the same pair, and are not striped.
//!
//! Where there is only one way between a chunk here and an entry there it is kept for the rest of the group's spans, so that of those that go
//! through the same regions in the same order again and again only the first of each looks for it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::Shared;
use super::peer::{Peer, View};
use super::work::{Group, Span};
use crate::error::{Code, Error};
use crate::metadata::BufferDescriptor;
use crate::registry::{Chunk, Region};
use crate::sys::MemoryRange;
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

/// Which way a span has gone: the NIC at the peer, a rail, and keys.
struct Way {
    device: usize,
    rail: usize,
    local_key: u32,
    remote_key: u32,
}

/// The only way between a chunk here and an entry there that the spans of a group have.
struct Known {
    /// It is compared only: a span's task may be in another region, or none.
    region: *const Region,
    chunk: MemoryRange,
    remote_address: u64,
    remote_length: u64,
    local_key: u32,
    remote_key: u32,
    rail: usize,
}

impl Known {
    fn contains(&self, local: MemoryRange, remote_address: u64) -> bool {
        let offset = remote_address.wrapping_sub(self.remote_address);
        self.chunk.contains(local.address(), local.length())
            && offset < self.remote_length
            && local.length() <= self.remote_length - offset
    }
}

/// No more ways than this are kept: they are of use where they come again in the same order, and while they are in the processor's cache.
const MOST_KNOWN: usize = 1024;

/// The peer's descriptor has no entry for it; a newer one may.
pub(super) struct NotAtPeer(pub Span);

/// Where a byte lies.
struct Place<'a> {
    /// Here, and the part of it that devices know as one.
    region: &'a Region,
    chunk: &'a Chunk,
    /// There.
    buffer: &'a BufferDescriptor,
    /// How many bytes from this one on are in both.
    length: u64,
}

/// Why a byte cannot be moved.
enum Refused {
    /// No NIC knows the memory at this address here.
    Here(u64),
    AtPeer,
}

/// The preferred NICs of the location that was asked for last: most spans of a submission are at the same.
#[derive(Default)]
struct Preferred {
    /// Where the location's text is; texts are shared. 0 if they are of that one byte only.
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

    /// Whether these are the preferred ones of all bytes of their buffer, and this one among them.
    fn is_always(&self, nic: usize) -> bool {
        self.text != 0 && self.nics.contains(&nic)
    }
}

/// Plans spans for one peer.
pub(super) struct Planner<'a> {
    shared: &'a Shared,
    peer: &'a Peer,
    view: &'a View,
    hint: usize,
    now: Instant,
    here: Preferred,
    there: Preferred,
    /// Which of several preferred NICs is next.
    turn: usize,
    expected: usize,
    known: Vec<Known>,
    /// The one that was of use last.
    last_known: usize,
    pub rails: Vec<Rail>,
    /// Spans that are over. They are ended when nothing is locked.
    pub ended: Vec<(Span, Error)>,
}

impl<'a> Planner<'a> {
    /// `view` is the peer's; `expected` spans will come.
    pub fn new(shared: &'a Shared, peer: &'a Peer, view: &'a View, expected: usize) -> Planner<'a> {
        Planner {
            shared,
            peer,
            view,
            hint: 0,
            now: Instant::now(),
            here: Preferred::default(),
            there: Preferred::default(),
            turn: shared.next_turn.fetch_add(1, Ordering::Relaxed),
            expected,
            known: Vec::new(),
            last_known: 0,
            rails: Vec::new(),
            ended: Vec::new(),
        }
    }

    /// The next spans are of another group, whose tasks are in regions that are guarded for it.
    pub fn begin_group(&mut self) {
        self.known.clear();
        self.last_known = 0;
    }

    /// The place of the only way that a span has, if that is known: it is the one of the span before, or the one that was found after that.
    #[inline]
    pub fn find_known(&self, span: &Span) -> Option<usize> {
        let next = if self.last_known + 1 < self.known.len() { self.last_known + 1 } else { 0 };
        let is_its =
            |known: &Known| known.contains(span.local, span.remote_address) && span.group().is_in(span.task(), known.region);
        let found = [self.last_known, next].into_iter().find(|place| self.known.get(*place).is_some_and(is_its));
        found.filter(|_| span.tries() == 0)
    }

    /// Puts a span on the rail of such a way.
    #[inline]
    pub fn put_as_known(&mut self, mut span: Span, place: usize) {
        self.last_known = place;
        let Known { local_key, remote_key, rail, .. } = self.known[place];
        (span.local_key, span.remote_key) = (local_key, remote_key);
        self.rails[rail].spans.push(span);
    }

    /// Puts a span of the group, or its parts, on rails, or among those that are over.
    pub fn plan(&mut self, group: &Group, mut span: Span) -> Result<(), NotAtPeer> {
        let (task, view) = (span.task(), self.view);
        let mut place = match self.place(group, task, span.local.address(), span.remote_address) {
            Ok(place) => place,
            Err(refusal) => return self.refuse(span, refusal),
        };
        let mut checked = place.length;
        while checked < span.local.length() {
            match self.place(group, task, span.local.address() + checked, span.remote_address + checked) {
                Ok(next) => checked = checked.saturating_add(next.length),
                Err(refusal) => return self.refuse(span, refusal),
            }
        }
        while place.length < span.local.length() {
            let part = span.split(place.length);
            self.stripe(part, view, &place);
            match self.place(group, task, span.local.address(), span.remote_address) {
                Ok(next) => place = next,
                Err(refusal) => return self.refuse(span, refusal),
            }
        }
        self.stripe(span, view, &place);
        Ok(())
    }

    /// Where a byte lies, here and there.
    fn place<'g>(&mut self, group: &'g Group, task: u32, local: u64, remote: u64) -> Result<Place<'g>, Refused>
    where
        'a: 'g,
    {
        let region = group.region(task, local).ok_or(Refused::Here(local))?;
        let chunk = region.registrations().and_then(|chunks| chunks.find(local)).ok_or(Refused::Here(local))?;
        let buffer = self.view.find(remote, &mut self.hint).ok_or(Refused::AtPeer)?;
        let here = chunk.range().length() - (local - chunk.range().address());
        let there = buffer.length - (remote - buffer.address);
        Ok(Place { region, chunk, buffer, length: here.min(there) })
    }

    /// A span that cannot go anywhere as it is.
    fn refuse(&mut self, span: Span, refusal: Refused) -> Result<(), NotAtPeer> {
        match refusal {
            Refused::AtPeer => Err(NotAtPeer(span)),
            Refused::Here(address) => {
                let (start, length) = (span.piece().local.address(), span.piece().local.length());
                let text = format!(
                    "local memory [{start:#x}, +{length}) is not (all) registered, at {address:#x} for one; RDMA needs it registered"
                );
                self.ended.push((span, Error::new(Code::AddressNotRegistered, text)));
                Ok(())
            }
        }
    }

    /// Puts a span that is inside of one chunk and one entry on one rail or, if it is long, on several.
    fn stripe(&mut self, mut span: Span, view: &View, place: &Place) {
        let Place { region, chunk, buffer, .. } = *place;
        let (name, length, offset) = (region.location(), region.range().length(), span.local.address() - region.range().address());
        let shared = self.shared;
        let is_usable = |nic: usize| shared.nics[nic].is_active() && chunk.key(nic).is_some();
        let tries = span.tries();
        if tries == 0 {
            let preferred = self.here.get(&shared.choice, name, length, offset);
            let slice = shared.config.slice_size;
            // Without dividing where one is all there can be.
            let stripes = match span.local.length() {
                bytes if preferred.len() < 2 || bytes < 2 * STRIPE_SLICES * slice || span.path != 0 => 1,
                bytes => (bytes / (STRIPE_SLICES * slice)).min(preferred.len() as u64) as usize,
            };
            // From the next one on, around the end, those that can be used.
            let first = match (preferred.len(), span.path) {
                (0 | 1, _) => 0,
                (count, 0) => self.turn % count,
                (count, path) => usize::from(path) % count,
            };
            let (before, from) = preferred.split_at(first);
            self.turn = self.turn.wrapping_add(1);
            if stripes == 1 {
                let is_usable = |nic: &&usize| is_usable(**nic);
                let nic = from.iter().find(is_usable).or_else(|| before.iter().find(is_usable)).copied();
                if let Some(nic) = nic {
                    let is_only = preferred.len() == 1 && self.here.is_always(nic);
                    let way = self.put(span, tries, nic, view, chunk, buffer);
                    if is_only && let Some(way) = way {
                        self.keep(region, chunk, buffer, way);
                    }
                    return;
                }
            } else {
                let usable = from.iter().chain(before).copied().filter(|nic| is_usable(*nic));
                let nics: Vec<usize> = usable.take(stripes).collect();
                let length = (span.local.length() / nics.len().max(1) as u64).next_multiple_of(slice);
                for (place, nic) in nics.iter().enumerate() {
                    if place + 1 == nics.len() || length >= span.local.length() {
                        self.put(span, tries, *nic, view, chunk, buffer);
                        return;
                    }
                    let part = span.split(length);
                    self.put(part, tries, *nic, view, chunk, buffer);
                }
            }
        }
        match shared.choice.select(&location_at(name, length, offset), tries, is_usable) {
            Some(nic) => {
                self.put(span, tries, nic, view, chunk, buffer);
            }
            None => {
                let text = format!("no NIC that knows local memory at {:#x} is active", span.local.address());
                self.ended.push((span, Error::new(Code::DeviceNotFound, text)));
            }
        }
    }

    /// Keeps the way that a span has just taken between a chunk, by the only NIC that its region prefers, and an entry.
    fn keep(&mut self, region: &Region, chunk: &Chunk, buffer: &BufferDescriptor, way: Way) {
        if self.known.len() < MOST_KNOWN && self.there.is_always(way.device) {
            self.last_known = self.known.len();
            let Way { local_key, remote_key, rail, .. } = way;
            let (remote_address, remote_length) = (buffer.address, buffer.length);
            self.known.push(Known { region, chunk: chunk.range(), remote_address, remote_length, local_key, remote_key, rail });
        }
    }

    /// Puts a span on the rail of a NIC here and the one at the peer that goes with it, and answers which way that is. It may be over instead.
    fn put(
        &mut self,
        mut span: Span,
        tries: u32,
        nic: usize,
        view: &View,
        chunk: &Chunk,
        buffer: &BufferDescriptor,
    ) -> Option<Way> {
        let device = self.peer_device(&span, tries, nic, view, buffer);
        let (Some(key), Some(device)) = (chunk.key(nic), device) else {
            let name = self.peer.segment.descriptor().name.clone();
            let text = format!("{name} has no NIC that knows its memory at {:#x}", span.remote_address);
            self.ended.push((span, Error::new(Code::DeviceNotFound, text)));
            return None;
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
            return None;
        }
        (span.local_key, span.remote_key) = (key.lkey, remote_key);
        let path = &view.paths[device];
        let found = self.rails.iter().position(|rail| rail.nic == nic && Arc::ptr_eq(&rail.path, path));
        let rail = found.unwrap_or(self.rails.len());
        match found {
            Some(rail) => self.rails[rail].spans.push(span),
            None => {
                let room = if self.rails.is_empty() { self.expected } else { 1 };
                let mut spans = Vec::with_capacity(room.max(1));
                spans.push(span);
                self.rails.push(Rail { nic, path: path.clone(), spans });
            }
        }
        Some(Way { device, rail, local_key: key.lkey, remote_key })
    }

    /// The peer's NIC for memory of an entry.
    fn peer_device(&mut self, span: &Span, tries: u32, nic: usize, view: &View, buffer: &BufferDescriptor) -> Option<usize> {
        let shared = self.shared;
        let has_key = |device: usize| buffer.rkey.get(device).is_some_and(|key| *key != 0);
        let now = self.now;
        let is_usable = |device: usize| has_key(device) && !shared.is_paused(nic, &view.paths[device], now);
        let offset = span.remote_address - buffer.address;
        let config = &shared.config;
        if tries == 0 {
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
                let device = if preferred.len() < 2 { preferred[0] } else { preferred[nic % preferred.len()] };
                if is_usable(device) {
                    return Some(device);
                }
            }
        }
        // Each walk through the NICs here begins with another one there.
        let retry = tries + tries.saturating_sub(1) / shared.nics.len().max(1) as u32;
        let location = location_at(&buffer.name, buffer.length, offset);
        view.choice.select(&location, retry, is_usable).or_else(|| view.choice.select(&location, retry, has_key))
    }
}
