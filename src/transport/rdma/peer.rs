//! A segment that is submitted to: its memory as the peer describes it, and spans that wait for a fresh description.
//!
//! `view` is replaced as a whole when the descriptor is another one. Of the spans that wait, those in `asking` wait for the request that
//! is under way, those in `parked` for the next; both are moved, and none is lost or seen twice, under the one lock.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Mutex, RwLock};

use super::work::Span;
use crate::metadata::{BufferDescriptor, SegmentDescriptor};
use crate::topology::NicChoice;
use crate::transport::Segment;

/// Where a buffer lies, and its place in the descriptor.
struct Entry {
    address: u64,
    length: u64,
    buffer: u32,
}

/// A peer's descriptor, made ready for looking things up.
pub(super) struct View {
    descriptor: Arc<SegmentDescriptor>,
    /// Buffers that peers may touch, by address.
    entries: Vec<Entry>,
    /// Which of its NICs serves which memory.
    pub choice: NicChoice,
    /// Its NICs' paths, in the order of the keys.
    pub paths: Vec<Arc<str>>,
}

impl View {
    pub fn new(descriptor: Arc<SegmentDescriptor>, round_robin: bool) -> View {
        let entry = |(at, buffer): (usize, &BufferDescriptor)| {
            let BufferDescriptor { address, length, ref rkey, .. } = *buffer;
            (!rkey.is_empty()).then_some(Entry { address, length, buffer: at as u32 })
        };
        let mut entries: Vec<Entry> = descriptor.buffers.iter().enumerate().filter_map(entry).collect();
        entries.sort_by_key(|entry| entry.address);
        let names: Vec<&str> = descriptor.devices.iter().map(|device| device.name.as_str()).collect();
        let server = match descriptor.rdma_server_name.as_str() {
            "" => &descriptor.name,
            server => server,
        };
        let paths = names.iter().map(|name| format!("{server}@{name}").into()).collect();
        let choice = NicChoice::new(&descriptor.priority_matrix, &names, round_robin);
        View { entries, choice, paths, descriptor }
    }

    /// The buffer that holds the byte at `address`. `hint` is where the last one was: O(1) for that and the next one, else O(log buffers).
    pub fn find(&self, address: u64, hint: &mut usize) -> Option<&BufferDescriptor> {
        let find = |place: usize| self.entries.get(place).filter(|entry| address.wrapping_sub(entry.address) < entry.length);
        let found = find(*hint).or_else(|| {
            *hint += 1;
            find(*hint)
        });
        let found = found.or_else(|| {
            let after = self.entries.partition_point(|entry| entry.address <= address);
            *hint = after.saturating_sub(1);
            find(*hint)
        });
        found.map(|entry| &self.descriptor.buffers[entry.buffer as usize])
    }

    /// Name of a NIC.
    pub fn name(&self, device: usize) -> &str {
        self.descriptor.devices.get(device).map_or("", |device| &device.name)
    }

    /// GID text and LID of the NIC with this path.
    pub fn device_at(&self, path: &str) -> Option<(&str, u16)> {
        let place = self.paths.iter().position(|known| &**known == path)?;
        self.descriptor.devices.get(place).map(|device| (device.gid.as_str(), device.lid))
    }
}

/// Spans, and since when the first of them waits.
pub(super) struct Parked {
    pub spans: Vec<Span>,
    pub since: Instant,
}

impl Default for Parked {
    fn default() -> Parked {
        Parked { spans: Vec::new(), since: Instant::now() }
    }
}

impl Parked {
    /// More spans.
    pub fn add(&mut self, spans: Vec<Span>) {
        if self.spans.is_empty() {
            self.since = Instant::now();
        }
        self.spans.extend(spans);
    }
}

/// Spans that wait for a descriptor.
#[derive(Default)]
pub(super) struct Waiting {
    pub parked: Parked,
    pub asking: Parked,
    /// Whether somebody asks, and will ask for what is parked meanwhile.
    pub is_asking: bool,
}

/// A segment, as this transport keeps it.
pub(super) struct Peer {
    pub segment: Arc<dyn Segment>,
    pub waiting: Mutex<Waiting>,
    round_robin: bool,
    view: RwLock<Arc<View>>,
}

impl Peer {
    pub fn new(segment: Arc<dyn Segment>, round_robin: bool) -> Peer {
        let view = RwLock::new(Arc::new(View::new(segment.descriptor(), round_robin)));
        Peer { segment, waiting: Mutex::default(), round_robin, view }
    }

    /// The descriptor as it is known now.
    pub fn view(&self) -> Arc<View> {
        let descriptor = self.segment.descriptor();
        let view = self.view.read().clone();
        if Arc::ptr_eq(&view.descriptor, &descriptor) {
            return view;
        }
        let view = Arc::new(View::new(descriptor, self.round_robin));
        *self.view.write() = view.clone();
        view
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::DeviceDescriptor;

    #[test]
    fn entries_are_found_by_any_of_their_bytes_unless_they_are_not_for_peers() {
        let buffer =
            |address, length, rkey: &[u32]| BufferDescriptor { name: "*".into(), address, length, lkey: vec![], rkey: rkey.into() };
        let descriptor = SegmentDescriptor {
            name: "host:1".into(),
            buffers: vec![
                buffer(8192, 4096, &[1]),
                buffer(4096, 4096, &[2]),
                buffer(1 << 20, 10, &[]),
                buffer(u64::MAX - 9, 10, &[3]),
            ],
            devices: vec![DeviceDescriptor { name: "nic".into(), lid: 3, gid: "g".into() }],
            ..SegmentDescriptor::default()
        };
        let view = View::new(Arc::new(descriptor), false);
        let mut hint = 0;
        let key = |address, hint: &mut usize| view.find(address, hint).map(|buffer| buffer.rkey[0]);
        for (address, expected) in [
            (4095, None),
            (4096, Some(2)),
            (8191, Some(2)),
            (8192, Some(1)),
            (12287, Some(1)),
            (12288, None),
            (1 << 20, None),
            (0, None),
            (u64::MAX, Some(3)),
            (u64::MAX - 10, None),
        ] {
            assert_eq!(key(address, &mut hint), expected, "{address:#x}");
            assert_eq!(key(address, &mut 0), expected, "{address:#x}");
        }
        assert_eq!(view.paths, ["host:1@nic".into()]);
        assert_eq!((view.device_at("host:1@nic"), view.device_at("host:2@nic")), (Some(("g", 3)), None));
    }
}
