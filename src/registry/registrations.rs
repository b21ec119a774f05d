//! What devices know a region by: its chunks, and the keys of each chunk with each device.
//!
//! Plain data: whoever registers memory makes it, transports read it, and nothing here calls a device. Chunks and the number of
//! devices stay as they are for a region's life; a key can be replaced at any time, because a device may go and come back. Reading a
//! key takes no lock: two loads. A key stays valid for whoever holds a guard on the region and has not been told that the device is gone.
//!
//! Memory: 40 bytes a chunk, 24 more for each device.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::sys::MemoryRange;

/// Keys of one chunk on one device. `handle` is the device's own name for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryKey {
    /// For work requests of this process.
    pub lkey: u32,
    /// For peers; 0 where they may not touch the memory.
    pub rkey: u32,
    /// For deregistering.
    pub handle: usize,
}

/// Room for a key that may come and go.
#[derive(Default)]
struct Slot {
    present: AtomicBool,
    /// Both keys in one word, so that they are of the same registration.
    keys: AtomicU64,
    handle: AtomicUsize,
}

/// A part of a region that devices know by one key each.
pub struct Chunk {
    range: MemoryRange,
    slots: Box<[Slot]>,
}

impl Chunk {
    /// A chunk with one key for each device, in the order of [`devices`](crate::transport::Transport::devices); `None` where a device is gone.
    pub fn new(range: MemoryRange, keys: &[Option<MemoryKey>]) -> Chunk {
        let chunk = Chunk { range, slots: keys.iter().map(|_| Slot::default()).collect() };
        keys.iter().enumerate().for_each(|(device, key)| chunk.replace(device, *key));
        chunk
    }

    /// The memory.
    pub fn range(&self) -> MemoryRange {
        self.range
    }

    /// Number of devices, those that are gone included.
    pub fn device_count(&self) -> usize {
        self.slots.len()
    }

    /// Key with the device of that index; `None` if the device is gone or there is none.
    pub fn key(&self, device: usize) -> Option<MemoryKey> {
        let slot = self.slots.get(device)?;
        slot.present.load(Ordering::Acquire).then(|| {
            let keys = slot.keys.load(Ordering::Relaxed);
            MemoryKey { lkey: (keys >> 32) as u32, rkey: keys as u32, handle: slot.handle.load(Ordering::Relaxed) }
        })
    }

    /// Puts another key, or none, in place. For whoever registers, one thread at a time; readers see the old or the new keys.
    pub fn replace(&self, device: usize, key: Option<MemoryKey>) {
        let Some(slot) = self.slots.get(device) else { return };
        if let Some(key) = key {
            slot.keys.store((u64::from(key.lkey) << 32) | u64::from(key.rkey), Ordering::Relaxed);
            slot.handle.store(key.handle, Ordering::Relaxed);
        }
        slot.present.store(key.is_some(), Ordering::Release);
    }
}

/// All chunks of a region, ascending and without gaps.
pub struct Registrations {
    chunks: Box<[Chunk]>,
    place: Option<Arc<str>>,
    pinning: Duration,
    /// Known when the registration is over.
    pub(super) cost: OnceLock<Arc<RegistrationCost>>,
}

impl Registrations {
    /// `chunks` cover the region once, ascending. `pinning` is what the devices' calls took for all of them, added up.
    pub fn new(chunks: Vec<Chunk>, pinning: Duration) -> Registrations {
        Registrations { chunks: chunks.into(), place: None, pinning, cost: OnceLock::new() }
    }

    /// With where the memory was found to be, of a region that was registered without saying where it is.
    pub fn found_at(self, place: Option<Arc<str>>) -> Registrations {
        Registrations { place, ..self }
    }

    /// Where the memory was found to be, if that was looked for.
    pub fn place(&self) -> Option<&Arc<str>> {
        self.place.as_ref()
    }

    /// What registering this region took inside of the devices' calls, added up.
    pub fn pinning(&self) -> Duration {
        self.pinning
    }

    /// The chunks, ascending.
    pub fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// The chunk that holds the byte at `address`. O(log chunks).
    pub fn find(&self, address: u64) -> Option<&Chunk> {
        let at = self.chunks.partition_point(|chunk| chunk.range.address() <= address);
        self.chunks[..at].last().filter(|chunk| chunk.range.contains(address, 1))
    }
}

/// What registering one region with devices took. Times overlap where threads work side by side.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegistrationCost {
    /// From the call to its end; of a batch, of the whole call.
    pub total: Duration,
    /// Finding out which pages are there.
    pub residency: Duration,
    /// Making the kernel provide the pages that are not.
    pub population: Duration,
    /// Inside the calls that pin and register, summed up for each device, in their order.
    pub pinning: Vec<Duration>,
    /// From the first of these calls to the end of the last.
    pub pinning_elapsed: Duration,
    /// Telling peers and metadata servers.
    pub publishing: Duration,
    /// Everything else: the index, the plan, handing work to threads.
    pub book_keeping: Duration,
    /// How many threads worked on it at most, the caller's among them.
    pub threads: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(address: u64, length: u64) -> MemoryRange {
        // SAFETY: nobody touches these addresses.
        #[allow(unsafe_code)]
        unsafe { MemoryRange::new(address, length) }.unwrap()
    }

    #[test]
    fn keys_come_and_go() {
        let key = MemoryKey { lkey: 1, rkey: u32::MAX, handle: 0 };
        let chunk = Chunk::new(range(4096, 4096), &[Some(key), None]);
        assert_eq!((chunk.key(0), chunk.key(1), chunk.key(2)), (Some(key), None, None));
        let other = MemoryKey { lkey: u32::MAX, rkey: 0, handle: usize::MAX };
        chunk.replace(0, None);
        chunk.replace(1, Some(other));
        chunk.replace(2, Some(other));
        assert_eq!((chunk.key(0), chunk.key(1), chunk.device_count()), (None, Some(other), 2));
    }

    #[test]
    fn addresses_are_found_in_their_chunks_only() {
        let chunks = [(100, 50), (150, 4096), (4246, 4096)].map(|(address, length)| Chunk::new(range(address, length), &[]));
        let registrations = Registrations::new(chunks.into(), Duration::ZERO);
        for (address, start) in [(99, None), (100, Some(100)), (149, Some(100)), (150, Some(150)), (8341, Some(4246)), (8342, None)]
        {
            assert_eq!(registrations.find(address).map(|chunk| chunk.range().address()), start, "{address}");
        }
    }
}
