//! How long things took: counts by duration, in memory of a fixed size.
//!
//! Bounds are powers of two of nanoseconds and the middles between them, from 256 ns to 34 s, so that a percentile that is read from the
//! counts is off by a quarter at most, and where values are spread evenly by far less. Recording is two relaxed atomic additions, without
//! a lock or an allocation, for any number of equal durations. The counts and the sum are not read in one moment: they may differ by what is
//! under way.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The first bound is 2 to this power, in nanoseconds; the last finite one 2 to the other.
const FIRST: u32 = 8;
const LAST: u32 = 35;
const FINITE: usize = 2 * (LAST - FIRST) as usize + 1;

/// Durations, counted.
#[derive(Debug)]
pub struct Histogram {
    /// How many took longer than the bound before and at most as long as this one's. The last has no bound.
    counts: [AtomicU64; FINITE + 1],
    nanoseconds: AtomicU64,
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram { counts: [const { AtomicU64::new(0) }; FINITE + 1], nanoseconds: AtomicU64::new(0) }
    }
}

impl Histogram {
    /// Counts `times` things that each took so long.
    pub fn record(&self, duration: Duration, times: u64) {
        let nanoseconds = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.counts[bucket(nanoseconds)].fetch_add(times, Ordering::Relaxed);
        self.nanoseconds.fetch_add(nanoseconds.saturating_mul(times), Ordering::Relaxed);
    }

    /// How many were recorded.
    pub fn count(&self) -> u64 {
        self.counts.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }

    /// Sum of all durations in seconds.
    pub fn seconds(&self) -> f64 {
        self.nanoseconds.load(Ordering::Relaxed) as f64 / 1e9
    }

    /// For each bound in seconds, the last of which is infinite, how many took at most as long.
    pub fn cumulative(&self) -> impl Iterator<Item = (f64, u64)> {
        let mut sum = 0;
        self.counts.iter().enumerate().map(move |(index, count)| {
            sum += count.load(Ordering::Relaxed);
            (if index < FINITE { bound(index) as f64 / 1e9 } else { f64::INFINITY }, sum)
        })
    }
}

/// Where a duration is counted: bounds belong to what is below them.
fn bucket(nanoseconds: u64) -> usize {
    let below = nanoseconds.saturating_sub(1);
    if below < 1 << FIRST {
        return 0;
    }
    let exponent = below.ilog2();
    let is_upper_half = below >> (exponent - 1) & 1;
    (2 * (exponent - FIRST) as usize + is_upper_half as usize + 1).min(FINITE)
}

fn bound(index: usize) -> u64 {
    let power = 1 << (FIRST as usize + index / 2);
    if index.is_multiple_of(2) { power } else { power + power / 2 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_duration_is_counted_under_the_first_bound_that_holds_it() {
        for index in 0..FINITE {
            assert_eq!(bucket(bound(index)), index);
            assert_eq!(bucket(bound(index) + 1), index + 1);
        }
        assert_eq!((bound(0), bound(1), bound(2), bound(FINITE - 1)), (256, 384, 512, 1 << 35));
        assert_eq!((bucket(0), bucket(1), bucket(u64::MAX)), (0, 0, FINITE));
    }

    #[test]
    fn counts_add_up_and_the_last_is_of_all() {
        let histogram = Histogram::default();
        histogram.record(Duration::ZERO, 2);
        histogram.record(Duration::from_nanos(300), 3);
        histogram.record(Duration::from_secs(40), 1);
        histogram.record(Duration::from_secs(1), 0);
        let cumulative: Vec<_> = histogram.cumulative().collect();
        assert_eq!(cumulative[..3], [(256e-9, 2), (384e-9, 5), (512e-9, 5)]);
        assert_eq!(cumulative[FINITE - 1], ((1u64 << 35) as f64 / 1e9, 5));
        assert_eq!(cumulative[FINITE], (f64::INFINITY, 6));
        assert!(cumulative.is_sorted());
        assert_eq!((histogram.count(), histogram.seconds()), (6, 40.0000009));
    }

    #[test]
    fn threads_lose_no_count() {
        let histogram = Histogram::default();
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let histogram = &histogram;
                scope.spawn(move || (0..10_000).for_each(|at| histogram.record(Duration::from_nanos(at * (thread + 1)), 2)));
            }
        });
        assert_eq!(histogram.count(), 80_000);
        assert_eq!(histogram.nanoseconds.into_inner(), 2 * 10 * (9_999 * 10_000 / 2));
    }
}
