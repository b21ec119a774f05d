//! Live regions in registration order, with the text that was encoded for them.
//!
//! Blocks of at most [`BLOCK_CAPACITY`] regions, ascending by sequence number. Each block caches its text; a change throws away the
//! text of its own block and of no other one. The registry's lock guards it all.
//!
//! Invariants: a block is never empty; block `i` holds sequence numbers in `[first(i), first(i + 1))`, where `first` is a lower
//! bound that removals leave alone; of two neighbours at most one is a quarter full or less, so n regions take at most n/16 + 2 blocks.
//!
//! | operation | cost for n regions |
//! |---|---|
//! | add, remove | binary search over n/128 lower bounds, then moves in one block; one call in 32 or fewer moves the list of blocks |
//! | encode | one call per region of the changed blocks, one reference count per block |
//!
//! Memory: 16 bytes a region in a full block, and its text.

use std::sync::Arc;

use super::Region;

/// Most regions in a block.
pub(super) const BLOCK_CAPACITY: usize = 128;

struct Block {
    /// No sequence number in this block is smaller, none in the blocks before is as large.
    first: u64,
    /// Sequence numbers are kept here, too, so that searching touches no region.
    entries: Vec<(u64, Arc<Region>)>,
    /// `None` after a change.
    text: Option<Arc<str>>,
}

/// See the module.
pub(super) struct Published {
    capacity: usize,
    blocks: Vec<Block>,
}

impl Published {
    pub(super) fn new(capacity: usize) -> Published {
        Published { capacity, blocks: Vec::new() }
    }

    /// Index of the block in which the sequence number is, or belongs.
    fn locate(&self, sequence: u64) -> usize {
        self.blocks.partition_point(|block| block.first <= sequence).saturating_sub(1)
    }

    fn new_block(&self, first: u64) -> Block {
        Block { first, entries: Vec::with_capacity(self.capacity), text: None }
    }

    /// Adds a region; usually at the end, but a region that was reserved earlier may be committed later.
    pub(super) fn add(&mut self, region: &Arc<Region>) {
        let sequence = region.sequence();
        let mut at = self.locate(sequence);
        if self.blocks.is_empty() {
            let block = self.new_block(sequence);
            self.blocks.push(block);
        } else if self.blocks[at].entries.len() == self.capacity {
            self.split(at, sequence);
            at += usize::from(sequence >= self.blocks[at + 1].first);
        }
        let block = &mut self.blocks[at];
        let position = block.entries.partition_point(|entry| entry.0 < sequence);
        block.entries.insert(position, (sequence, region.clone()));
        block.first = block.first.min(sequence);
        block.text = None;
    }

    /// Removes a region that was added.
    pub(super) fn remove(&mut self, region: &Region) {
        let at = self.locate(region.sequence());
        let Some(block) = self.blocks.get_mut(at) else { return };
        let Ok(position) = block.entries.binary_search_by_key(&region.sequence(), |entry| entry.0) else { return };
        block.entries.remove(position);
        block.text = None;
        let length = block.entries.len();
        if length == 0 {
            self.blocks.remove(at);
        } else if length <= self.capacity / 4 {
            let fits = |other: &Block| other.entries.len() + length <= self.capacity * 3 / 4;
            if at > 0 && fits(&self.blocks[at - 1]) {
                self.merge_next(at - 1);
            } else if self.blocks.get(at + 1).is_some_and(fits) {
                self.merge_next(at);
            }
        }
    }

    /// Makes room for `sequence` in a full block: by a new block after it when it is the newest of all, so that blocks are full
    /// after registrations one by one, else by moving the upper half.
    fn split(&mut self, at: usize, sequence: u64) {
        let entries = &self.blocks[at].entries;
        let is_newest = at + 1 == self.blocks.len() && entries.last().is_some_and(|last| last.0 < sequence);
        let half = entries.len() / 2;
        let mut upper = self.new_block(if is_newest { sequence } else { entries[half].0 });
        if !is_newest {
            let block = &mut self.blocks[at];
            upper.entries.extend(block.entries.drain(half..));
            block.text = None;
        }
        self.blocks.insert(at + 1, upper);
    }

    fn merge_next(&mut self, at: usize) {
        let next = self.blocks.remove(at + 1);
        self.blocks[at].entries.extend(next.entries);
        self.blocks[at].text = None;
    }

    /// The text of each block; only blocks that changed are encoded.
    pub(super) fn encode(&mut self, encode: &dyn Fn(&Region, &mut String)) -> Vec<Arc<str>> {
        let text = |block: &mut Block| {
            let encode_block = || {
                let mut text = String::with_capacity(block.entries.len() * 96);
                for (_, region) in &block.entries {
                    let start = text.len();
                    if start > 0 {
                        text.push(',');
                    }
                    let comma = text.len();
                    encode(region, &mut text);
                    if text.len() == comma {
                        text.truncate(start);
                    }
                }
                text.into()
            };
            block.text.get_or_insert_with(encode_block).clone()
        };
        self.blocks.iter_mut().map(text).filter(|text| !text.is_empty()).collect()
    }

    /// All regions, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Arc<Region>> {
        self.blocks.iter().flat_map(|block| block.entries.iter().map(|entry| &entry.1))
    }

    /// Panics where an invariant of the module does not hold.
    #[cfg(test)]
    pub(super) fn check(&self) {
        for (at, block) in self.blocks.iter().enumerate() {
            let length = block.entries.len();
            assert!(length > 0 && length <= self.capacity);
            assert!(block.entries.is_sorted_by(|a, b| a.0 < b.0) && block.first <= block.entries[0].0);
            if let Some(next) = self.blocks.get(at + 1) {
                assert!(block.entries[length - 1].0 < next.first);
                assert!(length > self.capacity / 4 || next.entries.len() > self.capacity / 4, "two thin neighbours");
            }
        }
    }
}
