//! Copies past the caches: for targets larger than what caches keep, which would be read before they are written over, only to throw
//! out what is of use.
//!
//! On x86-64 by the streaming stores that each such processor has; wider ones are no faster. Elsewhere by `memcpy`.

use super::MemoryRange;
use super::memory::copy;

/// What streaming stores write at a time; a line that is written only in part costs more than reading it would.
const LINE: u64 = 64;
/// Shortest pieces of whole lines that are streamed.
const SHORTEST: u64 = 4096;
/// Shortest of the others.
const SHORTEST_UNALIGNED: u64 = 16 << 10;

/// Copies the second range of each pair to the first. The lengths must be equal, and none of the ranges be written by anybody else; ranges
/// that overlap are copied as [`copy`] does. When it returns, the bytes are there for other threads and devices. Pages that are not mapped
/// end the process, as with `memcpy`.
pub fn copy_past_caches(pairs: impl Iterator<Item = (MemoryRange, MemoryRange)>) {
    for (target, source) in pairs {
        let is_whole = (target.address() | target.length()).is_multiple_of(LINE);
        let shortest = if is_whole { SHORTEST } else { SHORTEST_UNALIGNED };
        if target.length() >= shortest && !target.intersects(&source) {
            stream(target, source);
        } else {
            copy(target, source);
        }
    }
    fence();
}

/// [`copy`] of ranges that do not overlap, of a line and more. [`fence`] must follow.
#[cfg(all(target_arch = "x86_64", not(miri)))]
fn stream(target: MemoryRange, source: MemoryRange) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};

    assert!(target.length() == source.length() && target.length() >= LINE);
    let head = target.address().next_multiple_of(LINE) - target.address();
    let streamed = (target.length() - head) / LINE * LINE;
    let tail = target.length() - head - streamed;
    for (offset, length) in [(0, head), (head + streamed, tail)] {
        if let (Some(target), Some(source)) = (target.part(offset, length), source.part(offset, length)) {
            copy(target, source);
        }
    }
    let mut from = (source.address() + head) as *const __m128i;
    let mut to = (target.address() + head) as *mut __m128i;
    for _ in 0..streamed / LINE {
        // SAFETY: both ranges were promised by `MemoryRange::new`, and each step stays within `streamed` bytes behind the head. The target
        // is aligned to a line, the source need not be. All of these instructions are there on every x86-64.
        unsafe {
            let line: [__m128i; 4] = std::array::from_fn(|part| _mm_loadu_si128(from.add(part)));
            for (part, bytes) in line.into_iter().enumerate() {
                _mm_stream_si128(to.add(part), bytes);
            }
            from = from.add(line.len());
            to = to.add(line.len());
        }
    }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn stream(target: MemoryRange, source: MemoryRange) {
    copy(target, source);
}

/// Streaming stores are in no order with others until here.
fn fence() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: an instruction that each x86-64 has, and that changes nothing.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_exact_wherever_they_begin_and_end() {
        let bytes: Vec<u8> = (0..20_000_u32).map(|at| (at * 31 % 251) as u8).collect();
        let lengths = [0, 1, 63, 64, 4095, 4096, 4097, 8192, 16_383, 16_384, 16_385, 16_384 + 63, 18_001];
        // Under miri each takes long, and all offsets are alike.
        let offsets: &[usize] = if cfg!(miri) { &[0, 17] } else { &[0, 1, 15, 16, 17, 63, 64, 65] };
        for &length in &lengths {
            for (&from, &to) in offsets.iter().flat_map(|from| offsets.iter().map(move |to| (from, to))) {
                let mut source = bytes.clone();
                let mut target = vec![0xAA_u8; bytes.len()];
                let [target_range, source_range] = [(&mut target, to), (&mut source, from)].map(|(memory, offset)| {
                    let memory = memory.as_mut_slice();
                    // SAFETY: the memory is the test's, and long enough.
                    unsafe { MemoryRange::new(memory[offset..].as_mut_ptr() as u64, length as u64) }.unwrap()
                });
                copy_past_caches([(target_range, source_range)].into_iter());
                assert!(target[to..to + length] == bytes[from..from + length], "{length} from {from} to {to}");
                assert!(target[..to].iter().chain(&target[to + length..]).all(|byte| *byte == 0xAA), "{length} {from} {to}");
            }
        }
    }

    #[test]
    fn ranges_that_overlap_are_moved() {
        for (from, to) in [(0, 1), (1, 0), (0, 4096), (100, 100)] {
            let mut memory: Vec<u8> = (0..10_000_u32).map(|at| (at * 31 % 251) as u8).collect();
            let mut expected = memory.clone();
            expected.copy_within(from..from + 5000, to);
            let base = memory.as_mut_ptr() as u64;
            // SAFETY: the memory is the test's.
            let [from, to] = [from, to].map(|offset| unsafe { MemoryRange::new(base + offset as u64, 5000) }.unwrap());
            copy_past_caches([(to, from)].into_iter());
            assert!(memory == expected);
        }
    }
}
