//! Live regions in registration order, with the text that was encoded for them.
//!
//! Blocks of at most [`BLOCK_CAPACITY`] regions, ascending by sequence number. Each block caches its text; a change throws away the
//! text of its own block and of no other one. The registry's lock guards it all.
//!
//! Invariants: a block is never without regions; block `i` holds sequence numbers in `[first(i), first(i + 1))`, where `first` is a lower
//! bound that removals leave alone; of two neighbours at most one is a quarter full or less, so n regions take at most n/8 + 2 blocks.
//! A removal leaves its place empty. So in most blocks a sequence number is as far behind the first as its place is, which is looked at
//! before anything is searched: removing a region that nobody touched for long waits for memory once.
//!
//! | operation | cost for n regions |
//! |---|---|
//! | add | at the end; a region that was reserved earlier moves those behind it in one block |
//! | remove | binary search over n/64 lower bounds, then one place; in a block that lost regions before, a search |
//! | split, merge, drop empty places | moves in one block; at most one call in 16; some move the list of blocks, too |
//! | encode | one call per region of the changed blocks, one reference count per block |
//!
//! Memory: 16 bytes a region in a full block, and its text.

use std::sync::Arc;

use super::Region;

/// Most regions in a block.
pub(super) const BLOCK_CAPACITY: usize = 64;

/// The two arrays are parallel: searching by sequence number touches no region.
struct Block {
    /// Places in use, also those whose region was removed. Behind them nothing is read.
    places: usize,
    regions: usize,
    /// `None` after a change.
    text: Option<Arc<str>>,
    /// Ascending.
    sequence_at: [u64; BLOCK_CAPACITY],
    region_at: [Option<Arc<Region>>; BLOCK_CAPACITY],
}

/// See the module.
pub(super) struct Published {
    capacity: usize,
    /// Parallel to `blocks`.
    firsts: Vec<u64>,
    /// Boxed, because the list is moved when a block comes or goes, and blocks take a kilobyte.
    #[allow(clippy::vec_box)]
    blocks: Vec<Box<Block>>,
}

impl Published {
    /// Empty. Blocks have up to `capacity` regions (2 to [`BLOCK_CAPACITY`]).
    pub(super) fn new(capacity: usize) -> Published {
        assert!((2..=BLOCK_CAPACITY).contains(&capacity));
        Published { capacity, firsts: Vec::new(), blocks: Vec::new() }
    }

    /// Index of the block in which the sequence number is, or belongs.
    fn locate(&self, sequence: u64) -> usize {
        self.firsts.partition_point(|first| *first <= sequence).saturating_sub(1)
    }

    fn insert_block(&mut self, at: usize, first: u64) -> &mut Block {
        self.firsts.insert(at, first);
        self.blocks.insert(at, Box::default());
        &mut self.blocks[at]
    }

    /// Adds a region; usually at the end, but a region that was reserved earlier may be committed later.
    pub(super) fn add(&mut self, region: &Arc<Region>) {
        let sequence = region.sequence();
        let mut at = self.locate(sequence);
        if self.blocks.is_empty() {
            self.insert_block(0, sequence);
        } else if self.blocks[at].places == self.capacity {
            self.make_room(at, sequence);
            at = self.locate(sequence);
        }
        self.firsts[at] = self.firsts[at].min(sequence);
        self.blocks[at].insert(region.clone());
    }

    /// Removes a region that was added.
    pub(super) fn remove(&mut self, region: &Region) -> Option<Arc<Region>> {
        let at = self.locate(region.sequence());
        let block = self.blocks.get_mut(at)?;
        let removed = block.remove(region.sequence(), self.firsts[at])?;
        let regions = block.regions;
        if regions == 0 {
            self.firsts.remove(at);
            self.blocks.remove(at);
        } else if regions <= self.capacity / 4 {
            let fits = |other: &Block| other.regions + regions <= self.capacity * 3 / 4;
            if at > 0 && fits(&self.blocks[at - 1]) {
                self.merge_next(at - 1);
            } else if self.blocks.get(at + 1).is_some_and(|next| fits(next)) {
                self.merge_next(at);
            }
        }
        Some(removed)
    }

    /// Throws away the text that holds a region, if it was added.
    pub(super) fn touch(&mut self, region: &Region) {
        let at = self.locate(region.sequence());
        if let Some(block) = self.blocks.get_mut(at) {
            block.text = None;
        }
    }

    /// Makes room for `sequence` in a block whose places are all in use: by dropping its empty places if those are a quarter, else by a
    /// new block after it when `sequence` is the newest of all, so that blocks are full after registrations one by one, else by
    /// moving the upper half.
    fn make_room(&mut self, at: usize, sequence: u64) {
        let is_last = at + 1 == self.blocks.len();
        let block = &mut self.blocks[at];
        if block.regions <= self.capacity * 3 / 4 {
            block.drop_empty_places();
        } else if is_last && block.sequence_at[block.places - 1] < sequence {
            self.insert_block(at + 1, sequence);
        } else {
            block.drop_empty_places();
            let half = block.places / 2;
            let first = block.sequence_at[half];
            let upper: Vec<_> = block.region_at[half..block.places].iter_mut().filter_map(Option::take).collect();
            block.places = half;
            block.regions = half;
            block.text = None;
            let block = self.insert_block(at + 1, first);
            upper.into_iter().for_each(|region| block.insert(region));
        }
    }

    fn merge_next(&mut self, at: usize) {
        self.firsts.remove(at + 1);
        let next = self.blocks.remove(at + 1);
        let block = &mut self.blocks[at];
        block.drop_empty_places();
        next.region_at.into_iter().flatten().for_each(|region| block.insert(region));
    }

    /// The text of each block; only blocks that changed are encoded.
    pub(super) fn encode(&mut self, encode: &dyn Fn(&Region, &mut String)) -> Vec<Arc<str>> {
        let text_of = |block: &mut Box<Block>| {
            let Block { regions, region_at, text, .. } = &mut **block;
            let encode_block = || {
                let mut text = String::with_capacity(*regions * 96);
                for region in region_at.iter().flatten() {
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
        self.blocks.iter().flat_map(|block| block.region_at.iter().flatten())
    }

    /// Panics where an invariant of the module does not hold.
    #[cfg(all(test, not(loom)))]
    pub(super) fn check(&self) {
        assert_eq!(self.firsts.len(), self.blocks.len());
        for (at, block) in self.blocks.iter().enumerate() {
            assert!(block.regions > 0 && block.regions <= block.places && block.places <= self.capacity);
            let sequences = &block.sequence_at[..block.places];
            assert!(sequences.is_sorted_by(|a, b| a < b) && self.firsts[at] <= sequences[0]);
            let in_place = |(region, sequence): (&Option<Arc<Region>>, &u64)| {
                region.as_ref().is_none_or(|region| region.sequence() == *sequence)
            };
            assert!(block.region_at.iter().zip(sequences).all(in_place));
            assert!(block.region_at[block.places..].iter().all(Option::is_none));
            assert_eq!(block.region_at.iter().flatten().count(), block.regions);
            if let Some(next) = self.blocks.get(at + 1) {
                assert!(sequences[block.places - 1] < self.firsts[at + 1]);
                let is_thin = |block: &Block| block.regions <= self.capacity / 4;
                assert!(!is_thin(block) || !is_thin(next), "two thin neighbours");
            }
        }
    }
}

impl Default for Block {
    /// Without regions.
    fn default() -> Block {
        Block { places: 0, regions: 0, text: None, sequence_at: [0; BLOCK_CAPACITY], region_at: [const { None }; BLOCK_CAPACITY] }
    }
}

impl Block {
    /// Not all places are in use.
    fn insert(&mut self, region: Arc<Region>) {
        let sequence = region.sequence();
        let behind = self.sequence_at[..self.places].iter().rev().take_while(|other| **other > sequence).count();
        let (at, end) = (self.places - behind, self.places + 1);
        self.sequence_at[at..end].rotate_right(1);
        self.region_at[at..end].rotate_right(1);
        self.sequence_at[at] = sequence;
        self.region_at[at] = Some(region);
        self.places = end;
        self.regions += 1;
        self.text = None;
    }

    /// `first` is a lower bound of the block.
    fn remove(&mut self, sequence: u64, first: u64) -> Option<Arc<Region>> {
        // Sequence numbers ascend, so the place is this one or, if some numbers are missing, one before.
        let limit = sequence.wrapping_sub(first).min(BLOCK_CAPACITY as u64 - 1) as usize;
        let at = if self.sequence_at[limit] == sequence && limit < self.places {
            limit
        } else {
            // Counts instead of halving: the loads do not wait for each other.
            self.sequence_at[..self.places].iter().filter(|other| **other < sequence).count()
        };
        let removed = self.region_at.get_mut(at)?.take_if(|region| region.sequence() == sequence)?;
        self.regions -= 1;
        self.text = None;
        Some(removed)
    }

    fn drop_empty_places(&mut self) {
        let mut places = 0;
        for from in 0..self.places {
            if self.region_at[from].is_some() {
                self.region_at.swap(places, from);
                self.sequence_at[places] = self.sequence_at[from];
                places += 1;
            }
        }
        self.places = places;
    }
}
