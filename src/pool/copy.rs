//! Copies between a lease and the pieces of a payload.
//!
//! From [`LARGE`] on the copy goes past the caches: twice as fast into leases that are in no cache, and about as fast into others. Shorter
//! copies stay in the caches, for devices whose DMA is done by the processor. docs/performance.md has the figures, also of what did not
//! pay and is not here: special treatment of pieces that lie side by side or at a constant distance, and several threads for one copy.
//!
//! Cost: a check and a call of the copy for each piece. No allocation, no lock, no system call.

use crate::sys::MemoryRange;
use crate::sys::memory::copy;
use crate::sys::streaming::copy_past_caches;

/// Bytes of a copy from which on caches are left alone.
const LARGE: u64 = 4 << 20;

/// Copies the sources, one after the other, into the lease. Together they must be as long as it is, and overlap it nowhere. Pages that are not
/// mapped end the process, as with `memcpy`. When it returns, a device may be told to read.
pub fn gather(lease: MemoryRange, sources: &[MemoryRange]) {
    copy_each(lease.length(), parts(lease, sources).zip(sources.iter().copied()));
}

/// Copies the bytes of the lease, one after the other, into the targets; else as [`gather`]. Where targets overlap, the last one has its bytes.
pub fn scatter(lease: MemoryRange, targets: &[MemoryRange]) {
    copy_each(lease.length(), targets.iter().copied().zip(parts(lease, targets)));
}

fn copy_each(bytes: u64, pairs: impl Iterator<Item = (MemoryRange, MemoryRange)>) {
    if bytes >= LARGE {
        copy_past_caches(pairs);
    } else {
        pairs.for_each(|(target, source)| copy(target, source));
    }
}

/// The part of the lease for each of the pieces.
fn parts(lease: MemoryRange, pieces: &[MemoryRange]) -> impl Iterator<Item = MemoryRange> {
    let total = pieces.iter().try_fold(0_u64, |sum, piece| sum.checked_add(piece.length()));
    assert_eq!(total, Some(lease.length()));
    // Each piece has its part, by the sum.
    lease.parts(pieces.iter().map(|piece| piece.length())).flatten()
}

#[cfg(test)]
#[allow(unsafe_code)]
mod tests {
    use super::*;

    fn range(bytes: &mut [u8]) -> MemoryRange {
        // SAFETY: the memory is the test's, and is used no longer than the test lasts.
        unsafe { MemoryRange::new(bytes.as_mut_ptr() as u64, bytes.len() as u64) }.unwrap()
    }

    /// Pieces of these lengths, with a byte between any two, so that few of them are aligned.
    fn cut(memory: &mut [u8], lengths: &[usize]) -> Vec<MemoryRange> {
        let whole = range(memory);
        let mut offset = 0;
        let place = |length: &usize| {
            let piece = whole.part(offset, *length as u64).unwrap();
            offset += *length as u64 + 1;
            piece
        };
        lengths.iter().map(place).collect()
    }

    fn sample(length: usize) -> Vec<u8> {
        (0..length).map(|at| (at * 31 % 251) as u8).collect()
    }

    /// Lists of lengths of pieces, on both sides of [`LARGE`].
    fn payloads() -> Vec<Vec<usize>> {
        let odd = vec![0, 1, 3, 64, 4095, 4096, 4097, 0, 5001, 20_000, 1];
        let mut payloads = vec![vec![], vec![0], vec![1], odd.clone(), vec![4096; 8]];
        if !cfg!(miri) {
            payloads.extend([odd.repeat(120), vec![4096; 1024], vec![LARGE as usize - 1], vec![LARGE as usize + 1]]);
        }
        payloads
    }

    #[test]
    fn a_lease_has_all_pieces_one_after_the_other_and_gives_them_back() {
        for lengths in payloads() {
            let total: usize = lengths.iter().sum();
            let original = sample(total + lengths.len());
            let mut memory = original.clone();
            let mut lease = vec![0xAA; total + 3];
            let sources = cut(&mut memory, &lengths);
            let part = range(&mut lease).part(1, total as u64).unwrap();
            gather(part, &sources);
            let mut expected = vec![0xAA];
            let mut offset = 0;
            for length in &lengths {
                expected.extend_from_slice(&original[offset..offset + length]);
                offset += length + 1;
            }
            expected.extend([0xAA; 2]);
            assert!(lease == expected, "{} pieces, {total} bytes", lengths.len());

            let mut back = vec![0xBB; total + lengths.len()];
            let targets = cut(&mut back, &lengths);
            scatter(part, &targets);
            let mut offset = 0;
            for length in &lengths {
                assert!(back[offset..offset + length] == memory[offset..offset + length]);
                assert_eq!(back[offset + length], 0xBB, "between the pieces");
                offset += length + 1;
            }
        }
    }

    #[test]
    fn where_targets_overlap_the_last_one_has_its_bytes() {
        for length in if cfg!(miri) { vec![10] } else { vec![10, LARGE as usize] } {
            let mut lease = [vec![1; length], vec![2; length]].concat();
            let mut memory = vec![0; length + 5];
            let whole = range(&mut memory);
            let targets = [whole.part(5, length as u64).unwrap(), whole.part(0, length as u64).unwrap()];
            scatter(range(&mut lease), &targets);
            assert!(memory == [vec![2; length], vec![1; 5]].concat(), "{length}");
        }
    }

    #[test]
    #[should_panic(expected = "left == right")]
    fn pieces_that_do_not_fill_the_lease_are_a_defect() {
        let (mut lease, mut piece) = ([0; 10], [0; 9]);
        gather(range(&mut lease), &[range(&mut piece)]);
    }
}
