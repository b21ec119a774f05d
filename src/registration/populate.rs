//! Which pages of a range are there, by samples, and having the kernel provide the others.
//!
//! Pinning a page that is not there, or that is the common page of zeros, costs its allocation and clearing; devices that pin the same
//! range at the same time all wait for the same pages. So absent pages are provided first, by several threads in parts that do not
//! touch, and as devices would have them provided where that is to be had, see [`PinningRing`]. That is skipped for pages that are there,
//! where it would only cost: some samples tell. Whatever goes wrong here is left for the pinning to find and to report.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::sys::MemoryRange;
use crate::sys::pages::{self, Page, Pagemap};
use crate::sys::pinning::PinningRing;

/// Most samples of a range.
pub const MOST_SAMPLES: u32 = 64;

/// Which samples of a range found no page that is ready to be pinned. The range is cut into as many equal strides, one sample in each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Residency {
    /// At most [`MOST_SAMPLES`]; 0 if nothing is known.
    pub samples: u32,
    /// Bit i: the page in stride i was absent.
    pub absent: u64,
    /// Most of the absent ones are there to be read, and are replaced when they are written: zeros, or shared with a forked process. Each
    /// replacement interrupts all CPUs on which threads of the process run, which is dearer than the page where several do it at once:
    /// 4 times as long on two threads as on one.
    pub is_replaced: bool,
    /// Most pages are large ones.
    pub is_huge: bool,
}

/// From this length on, all samples are taken even if the first find nothing absent.
const LOOKED_AT_CLOSELY: u64 = 1 << 30;

/// Looks at a few pages of a range: fewer of short ones, and fewer where the first are all there. Some 1 µs for each; nothing is faulted
/// in.
///
/// `pagemap` is that of this process; without it, `mincore` must do.
pub fn sample(range: MemoryRange, pagemap: Option<&Pagemap>) -> Residency {
    let samples = (range.length() / pages::page_size() / 32).clamp(1, u64::from(MOST_SAMPLES)) as u32;
    let stride = range.length() / u64::from(samples);
    let address = |number: u32| range.address() + u64::from(number) * stride + scatter(range.address() + u64::from(number), stride);
    let (mut shared, mut replaced) = (None, 0);
    let mut is_absent = |number| {
        let address = address(number);
        match pagemap.map(|pagemap| pagemap.page(address)) {
            Some(Ok(page)) => {
                // The mapping is looked up once, for the first page that needs it.
                let ready = is_ready(page, || *shared.get_or_insert_with(|| pages::is_shared(address).unwrap_or(false)));
                replaced += u32::from(page.present && !ready);
                !ready
            }
            // It takes the page of zeros, and pages of a file that others have, for present; better than nothing.
            _ => !pages::is_in_memory(address).unwrap_or(true),
        }
    };
    let mut residency = Residency { samples, ..Residency::default() };
    let is_first = |number: &u32| number.is_multiple_of(8);
    let first = (0..samples).filter(is_first);
    first.for_each(|number| residency.absent |= u64::from(is_absent(number)) << number);
    if residency.absent > 0 || range.length() >= LOOKED_AT_CLOSELY {
        let rest = (0..samples).filter(|number| !is_first(number));
        rest.for_each(|number| residency.absent |= u64::from(is_absent(number)) << number);
    }
    residency.is_replaced = replaced > residency.absent.count_ones() / 2;
    if let Some(pagemap) = pagemap.filter(|_| residency.absent == 0) {
        residency.is_huge = is_huge(range, pagemap);
    }
    residency
}

/// Whether pages of a range are large ones, by two of them.
pub fn is_huge(range: MemoryRange, pagemap: &Pagemap) -> bool {
    [1, 2].into_iter().all(|third| pagemap.is_huge(range.address() + range.length() / 3 * third))
}

/// Whether pinning a page for writing finds it as it needs it. Not the page of zeros, nor one that is shared with a forked process or
/// belongs to a file of which a private mapping gets its own copy.
fn is_ready(page: Page, is_shared: impl FnOnce() -> bool) -> bool {
    page.present && if page.file { is_shared() } else { page.exclusive }
}

/// A place within a stride that follows no pattern of the program's: every second page may be there.
fn scatter(seed: u64, stride: u64) -> u64 {
    let mut value = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (value ^ (value >> 31)) % stride.max(1)
}

/// Has the kernel provide pages, for any number of threads: as for a device where it can be asked so, and as for anybody where not.
#[derive(Default)]
pub struct Provider {
    /// Those that no thread uses now; one for each thread at most.
    rings: Mutex<Vec<PinningRing>>,
    /// There can be none.
    has_none: AtomicBool,
}

impl Provider {
    /// Has the kernel provide the pages of one part. Whether that succeeds shows when it is pinned.
    pub fn populate(&self, part: MemoryRange) {
        if self.pin_briefly(part).is_none()
            && let Err(error) = pages::populate(part)
        {
            tracing::debug!("[{:#x}, +{}) could not be populated before pinning: {error}", part.address(), part.length());
        }
    }

    /// `None` if it failed: there is no ring, the limit on locked memory is reached, or the part may not be written.
    fn pin_briefly(&self, part: MemoryRange) -> Option<()> {
        if self.has_none.load(Ordering::Relaxed) {
            return None;
        }
        let idle = self.rings.lock().pop();
        let ring = match idle.map_or_else(PinningRing::open, Ok) {
            Ok(ring) => ring,
            Err(error) => {
                tracing::debug!("absent pages are not provided by pinning them: {error}");
                self.has_none.store(true, Ordering::Relaxed);
                return None;
            }
        };
        let outcome = ring.provide(part);
        self.rings.lock().push(ring);
        outcome.ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::pages::tests::{Mapping, memory_file};

    fn look(range: MemoryRange) -> Residency {
        sample(range, Some(&Pagemap::open().unwrap()))
    }

    const PAGES: usize = 64 * 32;

    fn length() -> usize {
        PAGES * pages::page_size() as usize
    }

    fn write(memory: &Mapping, step: usize) {
        (0..PAGES).step_by(step).for_each(|page| memory.write(page * pages::page_size() as usize, 1));
    }

    #[test]
    fn untouched_memory_is_absent_and_written_memory_is_not() {
        let memory = Mapping::anonymous(length());
        let untouched = look(memory.range());
        assert_eq!((untouched.samples, untouched.absent, untouched.is_replaced), (64, u64::MAX, false));
        write(&memory, 1);
        assert_eq!(look(memory.range()).absent, 0);
        assert_eq!(look(memory.range().part(5, 4096).unwrap()).samples, 1);
    }

    #[test]
    fn without_a_page_map_present_and_absent_are_told_apart_still() {
        let memory = Mapping::anonymous(length());
        assert_eq!(sample(memory.range(), None).absent, u64::MAX);
        write(&memory, 1);
        assert_eq!(sample(memory.range(), None).absent, 0);
    }

    #[test]
    fn zeros_that_were_only_read_count_as_absent() {
        let memory = Mapping::anonymous(length());
        (0..PAGES).for_each(|page| assert_eq!(memory.read(page * pages::page_size() as usize), 0));
        let zeros = look(memory.range());
        assert_eq!((zeros.absent, zeros.is_replaced), (u64::MAX, true));
        Provider::default().populate(memory.range());
        assert_eq!((look(memory.range()).absent, look(memory.range()).is_replaced), (0, false));
    }

    #[test]
    fn every_second_page_is_seen_as_about_half() {
        let memory = Mapping::anonymous(length());
        write(&memory, 2);
        let half = look(memory.range()).absent.count_ones();
        assert!((16..=48).contains(&half), "{half}");
    }

    #[test]
    fn a_second_mapping_of_a_file_is_absent_until_populated() {
        let file = memory_file(length() as u64);
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let first = Mapping::new(length(), protection, libc::MAP_SHARED, Some(&file));
        write(&first, 1);
        assert_eq!(look(first.range()).absent, 0);
        let second = Mapping::new(length(), protection, libc::MAP_SHARED, Some(&file));
        assert_eq!(look(second.range()).absent, u64::MAX);
        Provider::default().populate(second.range());
        assert_eq!((look(first.range()).absent, look(second.range()).absent), (0, 0));
    }

    #[test]
    fn a_private_mapping_of_a_file_is_ready_when_it_has_its_own_pages() {
        let file = memory_file(length() as u64);
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let private = Mapping::new(length(), protection, libc::MAP_PRIVATE, Some(&file));
        (0..PAGES).for_each(|page| assert_eq!(private.read(page * pages::page_size() as usize), 0));
        assert_eq!(look(private.range()).absent, u64::MAX);
        Provider::default().populate(private.range());
        assert_eq!(look(private.range()).absent, 0);
    }

    #[test]
    fn samples_lie_within_their_stride() {
        for stride in [1, 2, 4096, 1 << 30] {
            assert!((0..64).all(|number| scatter(number, stride) < stride));
        }
        assert_eq!(scatter(3, 0), 0);
    }
}
