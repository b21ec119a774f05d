//! Doing what a plan says: populating, pinning chunks with devices, and taking them back; all or nothing.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::plan::{JobCost, Plan};
use super::populate::Provider;
use super::workers::Workers;
use crate::error::{Code, Error, Result};
use crate::registry::{Chunk, MemoryKey, RegistrationCost, Registrations};
use crate::transport::Device;

/// Why memory could not be registered, and what could not be undone.
pub struct PinFailure {
    pub error: Error,
    /// Positions of regions that a device may still reach, each with the reason; ascending.
    pub kept: Vec<(usize, Error)>,
}

/// A key to be given back.
#[derive(Clone, Copy)]
pub struct Held {
    /// Position of the region, for the answer.
    pub region: usize,
    /// Which chunk of all, so that keys of the same pages are known.
    pub chunk: usize,
    pub device: usize,
    pub key: MemoryKey,
}

/// What calls took so far, smoothed over the last ones. Devices are not told apart.
pub struct Observed {
    call: AtomicU64,
    pages: AtomicU64,
    /// How long giving keys back took, in thousandths of what it was expected to take on one thread.
    release_alone: AtomicU64,
    /// The same where several threads shared it: key by key, and by chunks.
    release_shared: [AtomicU64; 2],
}

impl Observed {
    pub fn new(assumed: JobCost) -> Observed {
        Observed {
            call: assumed.call.into(),
            pages: assumed.pages.into(),
            release_alone: AtomicU64::new(1000),
            release_shared: [600, 600].map(AtomicU64::new),
        }
    }

    /// On how many threads keys are given back that would be worth so many: on one where that was faster so far. Threads that count down
    /// the users of the same pages lose more than they win where the CPUs' caches are far from each other, or a CPU is busy: they
    /// took four times as long as one. Which it is may change from minute to minute, and is not the same by chunks, where they do not meet.
    pub fn release_threads(&self, threads: usize, by_chunks: bool) -> usize {
        let value = &self.release_shared[usize::from(by_chunks)];
        let shared = value.load(Ordering::Relaxed);
        if threads < 2 || shared < self.release_alone.load(Ordering::Relaxed) {
            return threads;
        }
        // So it is tried again, the later the worse it was: after 11 calls if it took twice as long.
        value.store(shared - shared / 16, Ordering::Relaxed);
        1
    }

    /// What it took, and what it was expected to take on one thread.
    pub fn add_release(&self, threads: usize, by_chunks: bool, expected: Duration, spent: Duration) {
        /// Below, waking threads is a good part of it.
        const SHORT: Duration = Duration::from_micros(500);
        if expected < SHORT {
            return;
        }
        let value = if threads > 1 { &self.release_shared[usize::from(by_chunks)] } else { &self.release_alone };
        // Within limits: a thread that did not run for a while says little.
        let new = (spent.as_nanos() * 1000 / expected.as_nanos()).clamp(100, 5000) as u64;
        value.store(value.load(Ordering::Relaxed).midpoint(new), Ordering::Relaxed);
    }

    pub fn cost(&self) -> JobCost {
        JobCost { call: self.call.load(Ordering::Relaxed), pages: self.pages.load(Ordering::Relaxed) }
    }

    /// Threads may overwrite each other's observation; no harm is done.
    fn add(&self, page_count: u64, spent: Duration) {
        const FEW: u64 = 16;
        let spent = u64::try_from(spent.as_nanos()).unwrap_or(u64::MAX);
        let smooth = |value: &AtomicU64, new: u64| {
            let old = value.load(Ordering::Relaxed);
            value.store(old - old / 8 + new / 8, Ordering::Relaxed);
        };
        if page_count == 0 {
            return;
        }
        if page_count <= FEW {
            smooth(&self.call, spent);
        } else if page_count >= 1024 {
            smooth(&self.pages, spent.saturating_sub(self.call.load(Ordering::Relaxed)) / (page_count / 1024));
        }
    }
}

/// Populates and pins. `remote[i]` says whether peers may reach region i. Adds to `cost` what it took.
pub fn pin(
    mut plan: Plan,
    remote: Vec<bool>,
    devices: &Arc<[Arc<dyn Device>]>,
    workers: &Workers,
    observed: &Arc<Observed>,
    cost: &mut RegistrationCost,
) -> std::result::Result<Vec<Registrations>, PinFailure> {
    if !plan.populate.is_empty() {
        let begin = Instant::now();
        let parts = std::mem::take(&mut plan.populate);
        let provider = Provider::default();
        let team = workers.run(parts.len(), plan.populate_threads, Arc::new(move |part: usize| provider.populate(parts[part])));
        cost.population = begin.elapsed();
        cost.threads = cost.threads.max(team.threads);
    }

    let begin = Instant::now();
    let (threads, region_count) = (plan.pin_threads, remote.len());
    let jobs = Arc::new(Pinning {
        outcomes: plan.pins.iter().map(|_| OnceLock::new()).collect(),
        failed: AtomicBool::new(false),
        plan,
        remote,
        devices: devices.clone(),
        observed: observed.clone(),
    });
    let work = jobs.clone();
    let team = workers.run(jobs.plan.pins.len(), threads, Arc::new(move |job| work.run(job)));
    cost.threads = cost.threads.max(team.threads);
    cost.pinning_elapsed = begin.elapsed();
    cost.pinning = vec![Duration::ZERO; devices.len()];

    let mut keys = vec![None; jobs.plan.chunks.len() * devices.len()];
    let mut held = Vec::new();
    let mut pinning = vec![Duration::ZERO; region_count];
    let mut failure: Option<(usize, Error)> = None;
    for (at, pin) in jobs.plan.pins.iter().enumerate() {
        let chunk = jobs.plan.chunks[pin.chunk];
        match jobs.outcomes[at].get() {
            Some((spent, Ok(key))) => {
                cost.pinning[pin.device] += *spent;
                keys[pin.chunk * devices.len() + pin.device] = Some(*key);
                // What providing pages took says nothing of giving them back, which it stands for.
                if chunk.pages > 0 {
                    pinning[chunk.region] += *spent;
                }
                held.push(Held { region: chunk.region, chunk: pin.chunk, device: pin.device, key: *key });
            }
            // Whatever the order of the threads, the error of the first chunk is told.
            Some((_, Err(error))) if failure.as_ref().is_none_or(|(first, _)| pin.chunk < *first) => {
                failure = Some((pin.chunk, error.clone()));
            }
            Some(_) => {}
            None if failure.is_none() && !jobs.failed.load(Ordering::Relaxed) => {
                failure = Some((usize::MAX, Error::new(Code::Internal, "registering memory broke off, a defect of this library")));
            }
            None => {}
        }
    }
    if let Some((_, error)) = failure {
        let outcomes = unpin(held, region_count, threads, Duration::ZERO, devices, workers);
        let kept = outcomes.into_iter().enumerate().filter_map(|(region, outcome)| Some((region, outcome.err()?))).collect();
        return Err(PinFailure { error, kept });
    }
    let mut chunks: Vec<Vec<Chunk>> = (0..region_count).map(|_| Vec::new()).collect();
    for (number, chunk) in jobs.plan.chunks.iter().enumerate() {
        let keys = &keys[number * devices.len()..(number + 1) * devices.len()];
        chunks[chunk.region].push(Chunk::new(chunk.range, keys));
    }
    Ok(chunks.into_iter().zip(pinning).map(|(chunks, pinning)| Registrations::new(chunks, pinning)).collect())
}

struct Pinning {
    plan: Plan,
    remote: Vec<bool>,
    devices: Arc<[Arc<dyn Device>]>,
    outcomes: Vec<OnceLock<(Duration, Result<MemoryKey>)>>,
    /// What is not started is left undone.
    failed: AtomicBool,
    observed: Arc<Observed>,
}

impl Pinning {
    fn run(&self, job: usize) {
        if self.failed.load(Ordering::Relaxed) {
            return;
        }
        let pin = self.plan.pins[job];
        let chunk = self.plan.chunks[pin.chunk];
        let begin = Instant::now();
        let outcome = self.devices[pin.device].register(chunk.range, self.remote[chunk.region]);
        let spent = begin.elapsed();
        match &outcome {
            Ok(_) => self.observed.add(chunk.pages, spent),
            Err(_) => self.failed.store(true, Ordering::Relaxed),
        }
        let _ = self.outcomes[job].set((spent, outcome));
    }
}

/// Longest time by which threads that give keys back begin after each other: until what the one before has counted is out of its cache.
pub const OUT_OF_CACHE: Duration = Duration::from_micros(300);

/// How long after each other threads begin that give keys back, each of which takes about `cost`.
///
/// Devices count down the users of the same pages in the same order. Threads that begin together stay together, and each count travels
/// between their caches: two take as long as one, or three times as long. Once the first is so far ahead that what it has counted
/// is out of its own cache, some 1 MiB of the kernel's page structures, they do not meet. All of them have begun within a third of a job.
fn lag(cost: Duration, threads: usize, count: usize) -> Duration {
    /// Waking a thread is not more exact than that.
    const SHORTEST: Duration = Duration::from_micros(100);
    if threads < 2 || count < threads {
        return Duration::ZERO;
    }
    let lag = (cost / (3 * (threads - 1) as u32)).min(OUT_OF_CACHE);
    if lag < SHORTEST { Duration::ZERO } else { lag }
}

/// Keys of the same chunk that follow each other.
fn chunks(held: &[Held]) -> impl Iterator<Item = &[Held]> {
    held.chunk_by(|one, next| one.chunk == next.chunk)
}

/// Whether each of so many threads gives all keys of a chunk back before it takes another one: where there are enough chunks that all
/// of them are busy for four fifths of the time. No two are at the same pages then, which costs most where the CPUs are far
/// from each other, and a chunk's pages are still in a thread's cache for the next device.
pub fn is_shared_by_chunks(held: &[Held], threads: usize) -> bool {
    let count = chunks(held).count();
    threads > 1 && 4 * threads * count.div_ceil(threads) <= 5 * count
}

/// What is given back at a time, by positions.
fn jobs(held: &[Held], by_chunks: bool) -> Vec<Range<usize>> {
    let mut start = 0;
    let next = |length| {
        start += length;
        start - length..start
    };
    match by_chunks {
        true => chunks(held).map(<[Held]>::len).map(next).collect(),
        false => held.iter().map(|_| 1).map(next).collect(),
    }
}

/// Gives all keys back, whatever fails; each takes about `cost`. One answer for each of `region_count` regions: its first error.
pub fn unpin(
    held: Vec<Held>,
    region_count: usize,
    threads: usize,
    cost: Duration,
    devices: &Arc<[Arc<dyn Device>]>,
    workers: &Workers,
) -> Vec<Result<()>> {
    let by_chunks = is_shared_by_chunks(&held, threads);
    let jobs = jobs(&held, by_chunks);
    let outcomes: Vec<OnceLock<Result<()>>> = held.iter().map(|_| OnceLock::new()).collect();
    let (lag, begin) = (if by_chunks { Duration::ZERO } else { lag(cost, threads, held.len()) }, Instant::now());
    let keys = Arc::new((held, outcomes));
    let (work, devices, count) = (keys.clone(), devices.clone(), jobs.len());
    let deregister = move |job: usize| {
        let (held, outcomes) = &*work;
        if job < threads {
            // Waking took part of it; a sleep is not that exact.
            while begin.elapsed() < lag * job as u32 {
                std::hint::spin_loop();
            }
        }
        for at in jobs[job].clone() {
            let _ = outcomes[at].set(devices[held[at].device].deregister(&held[at].key));
        }
    };
    workers.run(count, threads, Arc::new(deregister));
    let mut answers = vec![Ok(()); region_count];
    for (held, outcome) in keys.0.iter().zip(&keys.1) {
        let defect = || Err(Error::new(Code::Internal, "deregistering memory broke off, a defect of this library"));
        let outcome = outcome.get().cloned().unwrap_or_else(defect);
        let answer = &mut answers[held.region];
        *answer = std::mem::replace(answer, Ok(())).and(outcome);
    }
    answers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_keep_apart_only_where_keys_take_long_to_give_back() {
        let (short, long) = (Duration::from_micros(100), Duration::from_millis(100));
        assert_eq!((lag(short, 2, 8), lag(long, 1, 8), lag(long, 4, 2)), (Duration::ZERO, Duration::ZERO, Duration::ZERO));
        assert_eq!(lag(long, 2, 2), Duration::from_micros(300));
        assert_eq!(
            (lag(long, 8, 8), lag(Duration::from_micros(600), 2, 8)),
            (Duration::from_micros(300), Duration::from_micros(200))
        );
        for threads in 2..20 {
            let cost = Duration::from_millis(2);
            assert!(lag(cost, threads, 32) * (threads - 1) as u32 <= cost / 3);
        }
    }

    #[test]
    fn keys_are_given_back_by_one_thread_where_several_were_slower_and_by_several_again_later() {
        let observed = Observed::new(JobCost::ASSUMED);
        let (expected, short) = (Duration::from_millis(2), Duration::from_micros(50));
        assert_eq!((observed.release_threads(4, false), observed.release_threads(1, false)), (4, 1));
        observed.add_release(4, false, short, Duration::from_secs(1));
        assert_eq!(observed.release_threads(4, false), 4);
        observed.add_release(4, false, expected, Duration::from_secs(1));
        let retries = |observed: &Observed| (0..).take_while(|_| observed.release_threads(4, false) == 1).count();
        let (far, near) = (retries(&observed), {
            observed.add_release(4, false, expected, expected * 3 / 2);
            retries(&observed)
        });
        assert!(near > 0 && far > near && far < 32, "{far} {near}");
        // The same that is slower than one thread here is faster than one thread there.
        observed.add_release(4, false, expected, expected * 3 / 2);
        assert_eq!(observed.release_threads(4, false), 1);
        (0..8).for_each(|_| observed.add_release(1, false, expected, 3 * expected));
        assert_eq!(observed.release_threads(4, false), 4);
    }

    #[test]
    fn what_pinning_takes_is_learnt_from_pages_that_are_there() {
        let observed = Observed::new(JobCost::ASSUMED);
        observed.add(0, Duration::from_secs(1));
        assert_eq!(observed.cost(), JobCost::ASSUMED);
        observed.add(4096, Duration::from_secs(1));
        assert!(observed.cost().pages > JobCost::ASSUMED.pages);
    }
}
