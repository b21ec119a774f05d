//! What to do, in which parts and on how many threads, to register some regions with some devices. Pure: it looks at nothing but its arguments.
//!
//! Chunks are as long as every device takes them, with borders between pages: each is a registration on every device and an entry that
//! peers see, so there are no more than needed. Work is handed to threads only where that saves more than it costs; what it saves is
//! estimated from what such work took before.

use std::time::Duration;

use super::populate::Residency;
use crate::config::Parallelism;
use crate::sys::MemoryRange;
use crate::sys::pages::HUGE_PAGE;

/// What a plan needs to know of a device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceLimits {
    /// Longest chunk in bytes.
    pub max_mr_size: u64,
    /// Whether memory is registered with it now.
    pub is_active: bool,
}

/// What a plan needs to know of process and machine.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Whether work is shared out.
    pub parallelism: Parallelism,
    /// Most threads, the caller's among them; at least 1.
    pub threads: usize,
    /// Longest chunk that the configuration allows, in bytes.
    pub max_mr_size: u64,
    /// Bytes of a page.
    pub page_size: u64,
    /// Whether the kernel provides pages on request.
    pub can_populate: bool,
    /// What pinning took so far.
    pub cost: JobCost,
}

/// What registering a chunk takes: so much for each call, and so much for each page that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobCost {
    /// Nanoseconds for a call.
    pub call: u64,
    /// Nanoseconds for 1024 pages.
    pub pages: u64,
}

impl JobCost {
    /// What it is taken for before any has been seen: soft-RoCE and io_uring on a machine of 2024.
    pub const ASSUMED: JobCost = JobCost { call: 10_000, pages: 92_000 };

    /// For a chunk of that many pages.
    pub fn of(&self, pages: u64) -> Duration {
        Duration::from_nanos(self.call.saturating_add((u128::from(self.pages) * u128::from(pages) / 1024) as u64))
    }
}

/// Calling threads takes some 30 µs until the first one helps, and more where CPUs are busy.
const WORTHWHILE: Duration = Duration::from_micros(60);

/// Providing an absent page: allocation, clearing, mapping.
const POPULATION: JobCost = JobCost { call: 1_000, pages: 1_000_000 };

/// So many times faster are pages pinned that lie in large ones; each is still looked at.
const HUGE_GAIN: u64 = 16;

/// Shortest range whose pages are looked at: providing them takes less than calling threads below.
pub const SAMPLED: u64 = 512 << 10;

/// As many samples in a row must be present for their strides not to be populated, at the ends of a region, too. Fewer may be by chance,
/// where some pages are there and some are not; and one absent page is enough for devices to pin all that follow it the slow way, for
/// which they wait for each other: two took 81 ms instead of 12 for 256 MiB of which every second page was there.
const PRESENT_RUN: u32 = 16;

/// A part of a populate step. The shortest that keeps threads off each other's large pages and page tables: the threads then work side
/// by side, and the pages that they take in turn from the kernel's lists end up beside each other. That makes providing some 5 % faster
/// than by longer parts, and little is pinned at a time.
const PART: u64 = HUGE_PAGE;

/// One region of the plan.
#[derive(Clone, Copy, Debug)]
pub struct Subject {
    /// Its memory; not empty.
    pub range: MemoryRange,
    /// What is known of its pages.
    pub residency: Residency,
}

impl Subject {
    /// How much there is to pin, in ordinary pages.
    fn pages(&self, length: u64, settings: &Settings) -> u64 {
        let pages = length.div_ceil(settings.page_size);
        if self.residency.is_huge { pages.div_ceil(HUGE_GAIN) } else { pages }
    }
}

/// A part of a region that each device registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedChunk {
    /// Position of the region among the subjects.
    pub region: usize,
    /// Its memory.
    pub range: MemoryRange,
    /// How much there is to pin, as [`JobCost`] counts. 0 where pinning has to provide pages, and tells nothing of what it takes otherwise.
    pub pages: u64,
}

/// One registration of one chunk with one device, by their positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pin {
    /// Which chunk.
    pub chunk: usize,
    /// Which device.
    pub device: usize,
}

/// See the module. First all populate steps, then all pins; within each, any order will do, and the given one is best.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// All regions' chunks: regions in order, chunks ascending.
    pub chunks: Vec<PlannedChunk>,
    /// Parts whose pages are asked for beforehand; disjoint.
    pub populate: Vec<MemoryRange>,
    /// Every chunk with every device that is active.
    pub pins: Vec<Pin>,
    /// Threads for the populate steps.
    pub populate_threads: usize,
    /// Threads for the pins.
    pub pin_threads: usize,
}

/// Whether the pages of a region of this length are worth a look.
pub fn needs_sampling(length: u64, settings: &Settings) -> bool {
    length >= SAMPLED && settings.threads > 1 && settings.parallelism != Parallelism::Sequential
}

/// Makes the plan.
pub fn plan(subjects: &[Subject], devices: &[DeviceLimits], settings: &Settings) -> Plan {
    let active = || devices.iter().enumerate().filter(|(_, device)| device.is_active);
    let limit = active().map(|(_, device)| device.max_mr_size).fold(settings.max_mr_size, u64::min);
    let limit = (limit / settings.page_size * settings.page_size).max(settings.page_size);
    let mut plan = Plan::default();
    for (region, subject) in subjects.iter().enumerate() {
        plan.chunks.extend(cut(subject.range, limit, settings.page_size).map(|range| PlannedChunk {
            region,
            range,
            pages: subject.pages(range.length(), settings),
        }));
    }
    // In a diagonal: at a time, each device is at another chunk, so that neither a device nor a page is waited for by several.
    let count = plan.chunks.len();
    for round in 0..count {
        plan.pins.extend(active().map(|(device, _)| Pin { chunk: (round + device) % count, device }));
    }

    let is_absent = |subject: &Subject| subject.residency.absent > 0;
    let bytes = |is_counted: &dyn Fn(&Subject) -> bool| -> u128 {
        subjects.iter().filter(|subject| is_counted(subject)).map(|subject| u128::from(subject.range.length())).sum()
    };
    // Then several threads are slower than one, whether they populate or pin.
    let is_replaced = 2 * bytes(&|subject: &Subject| subject.residency.is_replaced) > bytes(&is_absent);
    let unprepared = subjects.iter().any(is_absent) && (!settings.can_populate || is_replaced);
    let job = |pin: &Pin| settings.cost.of(plan.chunks[pin.chunk].pages);
    plan.pin_threads = match settings.parallelism {
        // Devices would wait for each other at every page.
        Parallelism::Auto if unprepared && active().count() > 1 => 1,
        _ => team(plan.pins.iter().map(job), settings),
    };
    if settings.can_populate && settings.threads > 1 && settings.parallelism != Parallelism::Sequential {
        let parts: Vec<MemoryRange> = subjects.iter().filter(|subject| is_absent(subject)).flat_map(parts).collect();
        plan.populate_threads = match settings.parallelism {
            Parallelism::Auto if is_replaced => 1,
            _ => team(parts.iter().map(|part| POPULATION.of(part.length() / settings.page_size)), settings),
        };
        // A single thread gains nothing by itself, but threads that pin side by side must find the pages there.
        if plan.populate_threads > 1 || plan.pin_threads > 1 {
            plan.populate = parts;
        }
    }
    if plan.populate.is_empty() {
        plan.chunks.iter_mut().filter(|chunk| is_absent(&subjects[chunk.region])).for_each(|chunk| chunk.pages = 0);
    }
    plan
}

/// Threads for jobs of these costs.
pub fn team(jobs: impl Iterator<Item = Duration>, settings: &Settings) -> usize {
    let (mut count, mut sum, mut longest) = (0, Duration::ZERO, Duration::ZERO);
    for job in jobs {
        (count, sum, longest) = (count + 1, sum.saturating_add(job), longest.max(job));
    }
    let threads = settings.threads.min(count).max(1);
    let saved = sum.saturating_sub(longest.max(sum / threads as u32));
    match settings.parallelism {
        Parallelism::Sequential => 1,
        Parallelism::Parallel => threads,
        Parallelism::Auto if saved > WORTHWHILE => threads,
        Parallelism::Auto => 1,
    }
}

/// Cuts into parts of `step` bytes, counted from the border of `alignment` at or before the start; a multiple of which `step` is. So all
/// borders inside are aligned.
fn cut(range: MemoryRange, step: u64, alignment: u64) -> impl Iterator<Item = MemoryRange> {
    let mut offset = 0;
    std::iter::from_fn(move || {
        let room = if offset == 0 { step - range.address() % alignment } else { step };
        let part = range.part(offset, room.min(range.length() - offset)).filter(|part| part.length() > 0)?;
        offset += part.length();
        Some(part)
    })
}

/// Parts of a region whose pages are to be provided. Borders inside of it are those of large pages.
fn parts(subject: &Subject) -> Vec<MemoryRange> {
    let Subject { range, residency } = *subject;
    let stride = range.length() / u64::from(residency.samples.max(1));
    // Offsets of the borders of large pages around a place. Sums may wrap: the address space is a multiple of them, too.
    let down = |offset: u64| offset.saturating_sub(range.address().wrapping_add(offset) % HUGE_PAGE);
    let up =
        |offset: u64| offset.saturating_add(range.address().wrapping_add(offset).wrapping_neg() % HUGE_PAGE).min(range.length());
    let mut spans: Vec<(u64, u64)> = Vec::new();
    for (first, last) in absent_runs(residency) {
        let start = down(u64::from(first) * stride);
        let end = if last + 1 >= residency.samples { range.length() } else { up(u64::from(last + 1) * stride) };
        match spans.last_mut() {
            Some((_, before)) if start <= *before => *before = end,
            _ => spans.push((start, end)),
        }
    }
    let span = |(start, end): (u64, u64)| range.part(start, end - start);
    spans.into_iter().filter_map(span).flat_map(|span| cut(span, PART, HUGE_PAGE)).collect()
}

/// Runs of strides, first and last, that are absent at least in part.
fn absent_runs(residency: Residency) -> Vec<(u32, u32)> {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for stride in (0..residency.samples).filter(|stride| residency.absent >> stride & 1 == 1) {
        match runs.last_mut() {
            Some((_, last)) if stride - *last <= PRESENT_RUN => *last = stride,
            None if stride < PRESENT_RUN => runs.push((0, stride)),
            _ => runs.push((stride, stride)),
        }
    }
    if let Some((_, last)) = runs.last_mut().filter(|(_, last)| residency.samples - 1 - *last < PRESENT_RUN) {
        *last = residency.samples - 1;
    }
    runs
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGE: u64 = 4096;

    fn range(address: u64, length: u64) -> MemoryRange {
        // SAFETY: nobody touches these addresses.
        #[allow(unsafe_code)]
        unsafe { MemoryRange::new(address, length) }.unwrap()
    }

    fn settings() -> Settings {
        Settings {
            parallelism: Parallelism::Auto,
            threads: 4,
            max_mr_size: 1 << 40,
            page_size: PAGE,
            can_populate: true,
            cost: JobCost::ASSUMED,
        }
    }

    fn devices(count: usize) -> Vec<DeviceLimits> {
        vec![DeviceLimits { max_mr_size: u64::MAX, is_active: true }; count]
    }

    const ABSENT: Residency = Residency { samples: 64, absent: u64::MAX, is_replaced: false, is_huge: false };
    const PRESENT: Residency = Residency { absent: 0, ..ABSENT };

    /// Whether the parts cover the range once, ascending, with borders at multiples of `alignment`.
    fn check_cover(range: MemoryRange, parts: &[MemoryRange], alignment: u64) {
        let mut next = u128::from(range.address());
        for part in parts {
            assert!(part.length() > 0);
            assert_eq!(u128::from(part.address()), next);
            assert!(part.address() == range.address() || part.address().is_multiple_of(alignment));
            next = part.end();
        }
        assert_eq!(next, range.end());
    }

    fn subject() -> impl Strategy<Value = Subject> {
        let length = prop_oneof![1..3 * PAGE, 1..64u64 << 20, 1..1u64 << 37];
        let residency = prop_oneof![Just(u64::MAX), Just(0), any::<u64>(), any::<u64>().prop_map(|bits| bits & (bits >> 7))];
        (1..1u64 << 40, length, 0..=64u32, residency).prop_map(|(address, length, samples, bits)| Subject {
            range: range(address, length),
            residency: Residency { samples, absent: if samples == 64 { bits } else { bits & ((1 << samples) - 1) }, ..PRESENT },
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        #[test]
        fn plans_cover_all_bytes_with_all_devices_once(
            subjects in proptest::collection::vec(subject(), 1..5),
            sizes in proptest::collection::vec((prop_oneof![0..1u64 << 20, (1u64 << 33)..u64::MAX, Just(u64::MAX)], any::<bool>()), 0..9),
            mode in prop_oneof![Just(Parallelism::Auto), Just(Parallelism::Sequential), Just(Parallelism::Parallel)],
            threads in 1..9usize,
            can_populate: bool,
        ) {
            // Chunks of a page in a range of terabytes are no plan for a test.
            let longest = subjects.iter().map(|subject| subject.range.length()).max().unwrap();
            let devices: Vec<DeviceLimits> =
                sizes.iter().map(|(size, is_active)| DeviceLimits { max_mr_size: (*size).max(longest / 40), is_active: *is_active }).collect();
            let settings = Settings { parallelism: mode, threads, can_populate, ..settings() };
            let plan = plan(&subjects, &devices, &settings);

            let active: Vec<usize> = (0..devices.len()).filter(|device| devices[*device].is_active).collect();
            let least = active.iter().map(|device| devices[*device].max_mr_size).min().unwrap_or(u64::MAX).min(settings.max_mr_size);
            prop_assert!(plan.chunks.iter().all(|chunk| chunk.range.length() <= least.max(PAGE)));
            for (number, subject) in subjects.iter().enumerate() {
                let chunks: Vec<_> = plan.chunks.iter().filter(|chunk| chunk.region == number).map(|chunk| chunk.range).collect();
                check_cover(subject.range, &chunks, PAGE);
                // No more than the limit asks for.
                let pages = |bytes: u64| (subject.range.address() % PAGE + bytes).div_ceil(PAGE);
                prop_assert_eq!(chunks.len() as u64, pages(subject.range.length()).div_ceil((least / PAGE).max(1)));
            }
            prop_assert!(plan.chunks.is_sorted_by_key(|chunk| (chunk.region, chunk.range.address())));

            let mut pins = plan.pins.clone();
            pins.sort();
            let all: Vec<Pin> =
                (0..plan.chunks.len()).flat_map(|chunk| active.iter().map(move |device| Pin { chunk, device: *device })).collect();
            prop_assert_eq!(pins, all);
            prop_assert!((1..=threads).contains(&plan.pin_threads));

            for part in &plan.populate {
                prop_assert!(part.length() > 0);
                let is_of = |subject: &Subject| {
                    let is_border = |at: u128| {
                        at.is_multiple_of(u128::from(HUGE_PAGE)) || at == u128::from(subject.range.address()) || at == subject.range.end()
                    };
                    subject.range.contains(part.address(), part.length())
                        && subject.residency.absent > 0
                        && is_border(part.address().into())
                        && is_border(part.end())
                };
                prop_assert!(subjects.iter().any(is_of), "{part:?}");
            }
            if mode == Parallelism::Sequential || threads == 1 || !can_populate {
                prop_assert!(plan.populate.is_empty());
            }
            if mode == Parallelism::Sequential || threads == 1 {
                prop_assert_eq!(plan.pin_threads, 1);
            }
        }

        #[test]
        fn populate_steps_hold_every_absent_sample_once(subject in subject()) {
            let parts = parts(&subject);
            prop_assert!(parts.is_sorted_by(|one, next| one.end() <= u128::from(next.address())));
            let stride = subject.range.length() / u64::from(subject.residency.samples.max(1));
            for number in (0..subject.residency.samples).filter(|number| subject.residency.absent >> number & 1 == 1) {
                let address = subject.range.address() + u64::from(number) * stride;
                prop_assert!(parts.iter().any(|part| part.contains(address, 1)), "{number}");
            }
        }
    }

    #[test]
    fn absent_memory_is_populated_by_several_threads_and_present_memory_is_not() {
        let region = |residency| [Subject { range: range(1 << 32, 256 << 20), residency }];
        let absent = plan(&region(ABSENT), &devices(1), &settings());
        assert_eq!((absent.populate_threads, absent.pin_threads, absent.chunks.len()), (4, 1, 1));
        check_cover(range(1 << 32, 256 << 20), &absent.populate, HUGE_PAGE);
        let present = plan(&region(PRESENT), &devices(4), &settings());
        assert_eq!((present.populate.len(), present.pin_threads), (0, 4));
        let half = plan(
            &[Subject { range: range(1 << 32, 256 << 20), residency: Residency { absent: 0xffff_ffff, ..ABSENT } }],
            &devices(1),
            &settings(),
        );
        check_cover(range(1 << 32, 128 << 20), &half.populate, HUGE_PAGE);
    }

    #[test]
    fn pages_that_are_replaced_are_provided_by_the_devices_one_after_the_other() {
        let zeros = [Subject { range: range(1 << 32, 256 << 20), residency: Residency { is_replaced: true, ..ABSENT } }];
        for count in [1, 4] {
            let plan = plan(&zeros, &devices(count), &settings());
            assert_eq!((plan.populate.len(), plan.pin_threads, plan.chunks[0].pages), (0, 1, 0));
        }
        // A little of it beside much that is absent changes nothing.
        let mixed = [zeros[0], Subject { range: range(1 << 33, 1 << 30), residency: ABSENT }];
        assert_eq!(
            (plan(&mixed, &devices(4), &settings()).populate_threads, plan(&mixed, &devices(4), &settings()).pin_threads),
            (4, 4)
        );
        let forced = Settings { parallelism: Parallelism::Parallel, ..settings() };
        assert_eq!(plan(&zeros, &devices(4), &forced).populate_threads, 4);
    }

    #[test]
    fn a_region_may_end_with_the_address_space() {
        let subject = Subject { range: range(u64::MAX - (32 << 20) + 1, 32 << 20), residency: ABSENT };
        let plan = plan(&[subject], &devices(2), &settings());
        check_cover(subject.range, &plan.populate, HUGE_PAGE);
    }

    #[test]
    fn alternating_pages_are_populated_as_a_whole() {
        let residency = Residency { absent: 0x9249_2492_4924_9249, ..ABSENT };
        let plan = plan(&[Subject { range: range(1 << 32, 256 << 20), residency }], &devices(1), &settings());
        check_cover(range(1 << 32, 256 << 20), &plan.populate, HUGE_PAGE);
    }

    #[test]
    fn pages_that_may_be_absent_at_the_ends_are_populated_too() {
        let whole = range(1 << 32, 256 << 20);
        let populated = |absent| {
            let subject = Subject { range: whole, residency: Residency { absent, ..ABSENT } };
            plan(&[subject], &devices(2), &settings()).populate
        };
        // Every second page is there, and the samples of the first and last three strides met those.
        check_cover(whole, &populated(0x1555_5555_5555_5558), HUGE_PAGE);
        // Three quarters in a row are there.
        check_cover(range(1 << 32, 64 << 20), &populated(0xffff), HUGE_PAGE);
        check_cover(range((1 << 32) + (192 << 20), 64 << 20), &populated(0xffff << 48), HUGE_PAGE);
    }

    #[test]
    fn large_pages_are_less_to_pin() {
        let huge = Residency { is_huge: true, ..PRESENT };
        let threads =
            |length| plan(&[Subject { range: range(1 << 32, length), residency: huge }], &devices(4), &settings()).pin_threads;
        assert_eq!((threads(2 << 20), threads(256 << 20)), (1, 4));
    }

    #[test]
    fn small_work_stays_on_the_callers_thread() {
        let small = [Subject { range: range(1 << 32, 4096), residency: Residency::default() }];
        assert_eq!(plan(&small, &devices(4), &settings()).pin_threads, 1);
        // Unless each call has been seen to take long, or it is asked for.
        let slow = Settings { cost: JobCost { call: 100_000, pages: 0 }, ..settings() };
        assert_eq!(plan(&small, &devices(4), &slow).pin_threads, 4);
        let forced = Settings { parallelism: Parallelism::Parallel, ..settings() };
        assert_eq!((plan(&small, &devices(4), &forced).pin_threads, plan(&small, &devices(1), &forced).pin_threads), (4, 1));
        let many: Vec<_> = (0..1000).map(|page| Subject { range: range((1 << 32) + page * 8192, 4096), ..small[0] }).collect();
        assert_eq!(plan(&many, &devices(1), &settings()).pin_threads, 4);
    }

    #[test]
    fn devices_do_not_race_for_absent_pages_where_the_kernel_cannot_provide_them() {
        let region = [Subject { range: range(1 << 32, 256 << 20), residency: ABSENT }];
        let old = Settings { can_populate: false, ..settings() };
        assert_eq!((plan(&region, &devices(4), &old).pin_threads, plan(&region, &devices(4), &old).populate.len()), (1, 0));
    }

    #[test]
    fn devices_are_at_different_chunks_at_a_time() {
        let limited = [DeviceLimits { max_mr_size: 1 << 20, is_active: true }; 3];
        let plan = plan(&[Subject { range: range(1 << 32, 4 << 20), residency: PRESENT }], &limited, &settings());
        for round in plan.pins.chunks(3) {
            let chunks: std::collections::BTreeSet<_> = round.iter().map(|pin| pin.chunk).collect();
            assert_eq!(chunks.len(), 3);
        }
    }
}
