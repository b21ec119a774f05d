//! Batch ids: keys of a table, with a generation, so that an id of a freed batch or of another engine is never taken for a live one.
//!
//! ```text
//!   63        32 31      24 23            0
//!   | generation |  table  |     slot      |
//! ```
//!
//! Generations start at 1 and stay below 2^31: an id is neither 0 nor `UINT64_MAX`. A slot whose generations are used up is retired.
//! One reader–writer lock; a look-up holds it for reading and clones a reference.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use parking_lot::RwLock;

use super::Batch;
use crate::error::{Code, Error, Result};

const SLOT_BITS: u32 = 24;
const LAST_GENERATION: u32 = i32::MAX as u32;

struct Slot {
    generation: u32,
    batch: Option<Arc<Batch>>,
}

#[derive(Default)]
struct Slots {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

/// The batches of one engine by id.
pub struct BatchTable {
    tag: u8,
    slots: RwLock<Slots>,
}

impl Default for BatchTable {
    fn default() -> BatchTable {
        static TABLES: AtomicU8 = AtomicU8::new(1);
        BatchTable { tag: TABLES.fetch_add(1, Ordering::Relaxed), slots: RwLock::default() }
    }
}

impl BatchTable {
    /// Makes a batch and keeps it under its id. Fails when 2^24 batches exist.
    pub fn insert(&self, make: impl FnOnce(u64) -> Arc<Batch>) -> Result<Arc<Batch>> {
        let mut guard = self.slots.write();
        let table = &mut *guard;
        let slot = match table.free.pop() {
            Some(slot) => slot,
            None if table.slots.len() < 1 << SLOT_BITS => {
                table.slots.push(Slot { generation: 1, batch: None });
                table.slots.len() as u32 - 1
            }
            None => {
                let limit = 1 << SLOT_BITS;
                return Err(Error::new(Code::Limit, format!("{limit} batches exist; free some")));
            }
        };
        let entry = &mut table.slots[slot as usize];
        let id = u64::from(entry.generation) << 32 | u64::from(self.tag) << SLOT_BITS | u64::from(slot);
        let batch = make(id);
        entry.batch = Some(batch.clone());
        Ok(batch)
    }

    /// The batch of an id.
    pub fn get(&self, id: u64) -> Option<Arc<Batch>> {
        let table = self.slots.read();
        table.slots.get(self.slot_of(id)?).filter(|slot| slot.generation == (id >> 32) as u32)?.batch.clone()
    }

    /// Forgets a batch; its id is never used again.
    pub fn remove(&self, id: u64) -> Option<Arc<Batch>> {
        let mut guard = self.slots.write();
        let table = &mut *guard;
        let slot = self.slot_of(id)?;
        let entry = table.slots.get_mut(slot).filter(|slot| slot.generation == (id >> 32) as u32)?;
        let batch = entry.batch.take()?;
        entry.generation += 1;
        if entry.generation <= LAST_GENERATION {
            table.free.push(slot as u32);
        }
        Some(batch)
    }

    fn slot_of(&self, id: u64) -> Option<usize> {
        let tag = (id >> SLOT_BITS) as u8;
        (tag == self.tag).then_some((id & ((1 << SLOT_BITS) - 1)) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::super::batch::tests::batch_with_id;
    use super::*;

    #[test]
    fn an_id_never_means_another_batch() {
        let (table, other) = (BatchTable::default(), BatchTable::default());
        let first = table.insert(batch_with_id).unwrap().id();
        assert_eq!(table.get(first).unwrap().id(), first);
        assert!(other.get(first).is_none());
        other.insert(batch_with_id).unwrap();
        assert!(other.get(first).is_none());
        assert!(table.remove(first).is_some());
        assert!(table.remove(first).is_none());
        let second = table.insert(batch_with_id).unwrap().id();
        assert_ne!(first, second);
        assert!(table.get(first).is_none());
        assert_eq!(table.get(second).unwrap().id(), second);
        for garbage in [0, 1, u64::MAX, second ^ 1 << 63, second + 1] {
            assert!(table.get(garbage).is_none() && table.remove(garbage).is_none(), "{garbage:#x}");
        }
    }

    #[test]
    fn used_up_slots_are_retired() {
        let table = BatchTable::default();
        let id = table.insert(batch_with_id).unwrap().id();
        table.slots.write().slots[0].generation = LAST_GENERATION;
        let last = u64::from(LAST_GENERATION) << 32 | id & 0xffff_ffff;
        assert!(table.remove(last).is_some());
        let next = table.insert(batch_with_id).unwrap().id();
        assert_eq!(next & 0xff_ffff, 1);
    }
}
