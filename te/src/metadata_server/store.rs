//! Values under keys, in memory that is bounded.
//!
//! Memory is taken before it is allocated, and given back when the last holder of a value is gone: a value that was replaced counts for
//! as long as it is still being sent. What is on its way in counts as well, at most twice what has arrived of it, so that announcing a
//! large value takes nothing. Keys and a fixed share for each entry are included; buffers of connections are not.
//!
//! The map has one lock, held for a look-up and never while bytes move. Values are shared, so a GET copies none.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, RwLock};

use hyper::body::Bytes;

/// What an entry takes besides its key and its value.
const ENTRY: usize = 256;

/// The memory that keys and values may take.
pub struct Memory {
    limit: usize,
    used: AtomicUsize,
}

impl Memory {
    /// `limit` bytes, of which none is taken.
    pub fn new(limit: usize) -> Arc<Memory> {
        Arc::new(Memory { limit, used: AtomicUsize::new(0) })
    }

    /// Bytes there are.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Bytes taken.
    pub fn used(&self) -> usize {
        self.used.load(Relaxed)
    }
}

/// Memory taken, given back when dropped.
struct Share {
    memory: Arc<Memory>,
    bytes: usize,
}

impl Share {
    fn grow(&mut self, bytes: usize) -> Result<(), Refusal> {
        let add = |used: usize| used.checked_add(bytes).filter(|sum| *sum <= self.memory.limit);
        self.memory.used.fetch_update(Relaxed, Relaxed, add).map_err(|_| Refusal::OutOfMemory)?;
        self.bytes += bytes;
        Ok(())
    }

    fn shrink_to(&mut self, bytes: usize) {
        self.memory.used.fetch_sub(self.bytes - bytes, Relaxed);
        self.bytes = bytes;
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

/// Why a value cannot be stored.
#[derive(Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It is larger than it was said to be, or than values may be.
    TooLarge,
    /// There is no memory left for it.
    OutOfMemory,
}

/// A value while it arrives.
pub struct Upload {
    key: String,
    bytes: Vec<u8>,
    largest: usize,
    share: Share,
}

impl Upload {
    /// For a value of `largest` bytes at most.
    pub fn new(memory: &Arc<Memory>, key: String, largest: usize) -> Result<Upload, Refusal> {
        let mut share = Share { memory: memory.clone(), bytes: 0 };
        share.grow(ENTRY + key.len())?;
        Ok(Upload { key, bytes: Vec::new(), largest, share })
    }

    /// Adds what arrived.
    pub fn push(&mut self, piece: &[u8]) -> Result<(), Refusal> {
        let length = self.bytes.len() + piece.len();
        if length > self.largest {
            return Err(Refusal::TooLarge);
        }
        let capacity = self.bytes.capacity();
        if length > capacity {
            let wanted = (2 * capacity).clamp(length, self.largest);
            self.share.grow(wanted - capacity)?;
            self.bytes.try_reserve_exact(wanted - self.bytes.len()).map_err(|_| Refusal::OutOfMemory)?;
        }
        self.bytes.extend_from_slice(piece);
        Ok(())
    }
}

/// A stored value with the memory that it has taken.
struct Value {
    bytes: Vec<u8>,
    _share: Share,
}

impl AsRef<[u8]> for Value {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// The values.
#[derive(Default)]
pub struct Store {
    values: RwLock<HashMap<String, Bytes>>,
}

impl Store {
    /// The value under a key.
    pub fn get(&self, key: &str) -> Option<Bytes> {
        self.values.read().expect("nothing panics under this lock").get(key).cloned()
    }

    /// Stores a value that has arrived, in the place of one that may be there.
    pub fn put(&self, upload: Upload) {
        let Upload { key, mut bytes, mut share, .. } = upload;
        bytes.shrink_to_fit();
        share.shrink_to(ENTRY + key.len() + bytes.len());
        let value = Bytes::from_owner(Value { bytes, _share: share });
        // Kept until the lock is released: freeing a large value takes time.
        let _replaced = self.values.write().expect("nothing panics under this lock").insert(key, value);
    }

    /// Removes a value, if there is one.
    pub fn remove(&self, key: &str) {
        let _removed = self.values.write().expect("nothing panics under this lock").remove(key);
    }

    /// How many values there are, and the bytes of all.
    pub fn totals(&self) -> (usize, usize) {
        let values = self.values.read().expect("nothing panics under this lock");
        (values.len(), values.values().map(Bytes::len).sum())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn upload(memory: &Arc<Memory>, key: &str, pieces: &[&[u8]]) -> Result<Upload, Refusal> {
        let mut upload = Upload::new(memory, key.to_string(), 1000)?;
        pieces.iter().try_for_each(|piece| upload.push(piece))?;
        Ok(upload)
    }

    #[test]
    fn a_value_counts_until_its_last_holder_is_gone() {
        let (memory, store) = (Memory::new(10_000), Store::default());
        store.put(upload(&memory, "key", &[b"abc", b"de"]).unwrap());
        assert_eq!((store.totals(), memory.used()), ((1, 5), ENTRY + 3 + 5));

        let held = store.get("key").unwrap();
        store.put(upload(&memory, "key", &[b"new"]).unwrap());
        assert_eq!(memory.used(), 2 * (ENTRY + 3) + 5 + 3);
        assert_eq!(held, "abcde");
        drop(held);
        assert_eq!(memory.used(), ENTRY + 3 + 3);

        store.remove("key");
        store.remove("key");
        assert_eq!((store.get("key"), store.totals(), memory.used()), (None, (0, 0), 0));
    }

    #[test]
    fn what_is_on_its_way_counts_twice_at_most_and_is_given_back_when_it_ends() {
        let memory = Memory::new(10_000);
        let mut value = upload(&memory, "", &[]).unwrap();
        for arrived in 1..=1000 {
            value.push(b"x").unwrap();
            assert!((arrived..=2 * arrived).contains(&(memory.used() - ENTRY)), "{arrived}: {}", memory.used());
        }
        assert_eq!(value.push(b"x"), Err(Refusal::TooLarge));
        drop(value);
        assert_eq!(memory.used(), 0);
    }

    #[test]
    fn what_has_no_room_is_refused_and_takes_nothing() {
        let memory = Memory::new(ENTRY + 3 + 100);
        assert_eq!(upload(&memory, "key", &[&[0; 60], &[0; 41]]).err(), Some(Refusal::OutOfMemory));
        assert_eq!(memory.used(), 0);
        let fits = upload(&memory, "key", &[&[0; 100]]).unwrap();
        assert_eq!(upload(&memory, "other", &[]).err(), Some(Refusal::OutOfMemory));
        drop(fits);
        assert!(upload(&memory, "other", &[]).is_ok());
    }
}
