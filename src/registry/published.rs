//! Live regions in registration order, with the text that was encoded for them.
//!
//! Blocks of at most [`BLOCK_CAPACITY`] regions, ascending by sequence number. Each block caches its text; a change throws away the
//! text of its own block and of no other one. The registry's lock guards it all.
//!
//! Invariants: a block is never empty; block `i` holds sequence numbers in `[first(i), first(i + 1))`, where `first` is a lower
//! bound that removals leave alone; of two neighbours at most one is a quarter full or less, so n regions take at most n/8 + 2 blocks.
//!
//! | operation | cost for n regions |
//! |---|---|
//! | add, remove | binary search over n/64 lower bounds, then moves in one block; one call in 16 or fewer moves the list of blocks |
//! | encode | one call per region of the changed blocks, one reference count per block |
//!
//! Memory: 16 bytes a region in a full block, and its text.

use std::sync::Arc;

use super::Region;

/// Most regions in a block.
pub(super) const BLOCK_CAPACITY: usize = 64;

/// The two lists are parallel: searching by sequence number touches no region.
struct Block {
    sequences: Vec<u64>,
    regions: Vec<Arc<Region>>,
    /// `None` after a change.
    text: Option<Arc<str>>,
}

/// See the module.
pub(super) struct Published {
    capacity: usize,
    /// Parallel to `blocks`.
    firsts: Vec<u64>,
    blocks: Vec<Block>,
}

impl Published {
    pub(super) fn new(capacity: usize) -> Published {
        Published { capacity, firsts: Vec::new(), blocks: Vec::new() }
    }

    /// Index of the block in which the sequence number is, or belongs.
    fn locate(&self, sequence: u64) -> usize {
        self.firsts.partition_point(|first| *first <= sequence).saturating_sub(1)
    }

    fn insert_block(&mut self, at: usize, first: u64) -> &mut Block {
        let block = Block { sequences: Vec::with_capacity(self.capacity), regions: Vec::with_capacity(self.capacity), text: None };
        self.firsts.insert(at, first);
        self.blocks.insert(at, block);
        &mut self.blocks[at]
    }

    fn remove_block(&mut self, at: usize) -> Block {
        self.firsts.remove(at);
        self.blocks.remove(at)
    }

    /// Adds a region; usually at the end, but a region that was reserved earlier may be committed later.
    pub(super) fn add(&mut self, region: &Arc<Region>) {
        let sequence = region.sequence();
        let mut at = self.locate(sequence);
        if self.blocks.is_empty() {
            self.insert_block(0, sequence);
        } else if self.blocks[at].len() == self.capacity {
            self.split(at, sequence);
            at += usize::from(sequence >= self.firsts[at + 1]);
        }
        self.firsts[at] = self.firsts[at].min(sequence);
        let block = &mut self.blocks[at];
        let position = block.position(sequence);
        block.sequences.insert(position, sequence);
        block.regions.insert(position, region.clone());
        block.text = None;
    }

    /// Removes a region that was added.
    pub(super) fn remove(&mut self, region: &Region) {
        let at = self.locate(region.sequence());
        let Some(block) = self.blocks.get_mut(at) else { return };
        let position = block.position(region.sequence());
        if block.sequences.get(position) != Some(&region.sequence()) {
            return;
        }
        block.sequences.remove(position);
        block.regions.remove(position);
        block.text = None;
        let length = block.len();
        if length == 0 {
            self.remove_block(at);
        } else if length <= self.capacity / 4 {
            let fits = |other: &Block| other.len() + length <= self.capacity * 3 / 4;
            if at > 0 && fits(&self.blocks[at - 1]) {
                self.merge_next(at - 1);
            } else if self.blocks.get(at + 1).is_some_and(fits) {
                self.merge_next(at);
            }
        }
    }

    /// Throws away the text that holds a region, if it was added.
    pub(super) fn touch(&mut self, region: &Region) {
        let at = self.locate(region.sequence());
        if let Some(block) = self.blocks.get_mut(at) {
            block.text = None;
        }
    }

    /// Makes room for `sequence` in a full block: by a new block after it when it is the newest of all, so that blocks are full
    /// after registrations one by one, else by moving the upper half.
    fn split(&mut self, at: usize, sequence: u64) {
        let sequences = &self.blocks[at].sequences;
        if at + 1 == self.blocks.len() && sequences.last().is_some_and(|last| *last < sequence) {
            self.insert_block(at + 1, sequence);
        } else {
            let half = sequences.len() / 2;
            let lower = &mut self.blocks[at];
            lower.text = None;
            let (sequences, regions) = (lower.sequences.split_off(half), lower.regions.split_off(half));
            let upper = self.insert_block(at + 1, sequences[0]);
            upper.sequences.extend(sequences);
            upper.regions.extend(regions);
        }
    }

    fn merge_next(&mut self, at: usize) {
        let next = self.remove_block(at + 1);
        let block = &mut self.blocks[at];
        block.sequences.extend(next.sequences);
        block.regions.extend(next.regions);
        block.text = None;
    }

    /// The text of each block; only blocks that changed are encoded.
    pub(super) fn encode(&mut self, encode: &dyn Fn(&Region, &mut String)) -> Vec<Arc<str>> {
        let text_of = |Block { regions, text, .. }: &mut Block| {
            let encode_block = || {
                let mut text = String::with_capacity(regions.len() * 96);
                for region in regions.iter() {
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
            text.get_or_insert_with(encode_block).clone()
        };
        self.blocks.iter_mut().map(text_of).filter(|text| !text.is_empty()).collect()
    }

    /// All regions, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Arc<Region>> {
        self.blocks.iter().flat_map(|block| &block.regions)
    }

    /// Panics where an invariant of the module does not hold.
    #[cfg(all(test, not(loom)))]
    pub(super) fn check(&self) {
        assert_eq!(self.firsts.len(), self.blocks.len());
        for (at, block) in self.blocks.iter().enumerate() {
            assert!(block.len() > 0 && block.len() <= self.capacity);
            assert!(block.sequences.is_sorted_by(|a, b| a < b) && self.firsts[at] <= block.sequences[0]);
            assert!(block.regions.iter().map(|region| region.sequence()).eq(block.sequences.iter().copied()));
            if let Some(next) = self.blocks.get(at + 1) {
                assert!(block.sequences[block.len() - 1] < self.firsts[at + 1]);
                assert!(block.len() > self.capacity / 4 || next.len() > self.capacity / 4, "two thin neighbours");
            }
        }
    }
}

impl Block {
    fn len(&self) -> usize {
        self.sequences.len()
    }

    /// Where the sequence number is, or belongs. Counts instead of halving: the loads, usually from memory that was not used for
    /// long, do not wait for each other.
    fn position(&self, sequence: u64) -> usize {
        if self.sequences.last().is_some_and(|last| *last < sequence) {
            return self.len();
        }
        self.sequences.iter().filter(|other| **other < sequence).count()
    }
}
