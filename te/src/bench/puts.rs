//! What `te bench pool` measures: puts of one engine into the memory of another in this process, in each way that there is.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use transfer_engine::config::Config;
use transfer_engine::engine::staging::{Item, StagingOptions};
use transfer_engine::engine::{Engine, MemoryOptions};
use transfer_engine::pool::plan::Preference;
use transfer_engine::pool::{Pool, PoolOptions};
use transfer_engine::registration::Registrar;
use transfer_engine::registry::{Owner, RegionOptions, Registry};
use transfer_engine::sys::MemoryRange;
use transfer_engine::transfer::{Request, SubmitOptions};
use transfer_engine::transport::Opcode;

use super::rings::Rings;
use super::statistics::percentile;
use super::transfer::check_statuses;
use super::{TransportArguments, bare_engine, fill, memory_options};
use crate::output;
use crate::system::Arena;

/// A way to put.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// Register every key's memory, in one call; transfer; unregister.
    Baseline,
    /// By the pool, which is told to register.
    Direct,
    /// By the pool, which is told to stage.
    Staged,
    /// By the pool, which chooses.
    Auto,
}

/// All ways, in the order of figures.
pub const WAYS: [Way; 4] = [Way::Baseline, Way::Direct, Way::Staged, Way::Auto];

/// What one put moves: so many keys of the same size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Package {
    /// Bytes of a key.
    pub size: usize,
    /// Keys.
    pub keys: usize,
}

/// A page: payloads of different keys lie at least so far apart.
const PAGE: usize = 4096;

impl Package {
    /// Bytes that are moved.
    pub fn bytes(&self) -> usize {
        self.size * self.keys
    }

    /// From the payload of a key to that of the next: no two share a page, and none touch.
    fn stride(&self) -> usize {
        self.size.next_multiple_of(PAGE) + PAGE
    }

    fn source_bytes(&self) -> usize {
        self.stride() * self.keys
    }
}

/// Where payloads come from, and where they go.
pub struct Memory {
    source: Arena,
    target: Arena,
}

impl Memory {
    /// Room for each of the packages, with all pages of the source there: pages of 4 KiB, or large ones.
    pub fn new(packages: &[Package], is_huge: bool) -> Result<Memory, Box<dyn Error>> {
        let most = |bytes: fn(&Package) -> usize| packages.iter().map(bytes).max().ok_or("nothing is to be measured");
        let map = |bytes| Arena::new(bytes).map_err(|error| format!("cannot map {}: {error}", output::bytes(bytes as u64)));
        let source = map(most(Package::source_bytes)?)?;
        let source = if is_huge { source.in_large_pages() } else { source };
        let mut memory = Memory { source, target: map(most(Package::bytes)?)? };
        fill(memory.source.bytes_mut(), 1);
        Ok(memory)
    }

    /// The payload of a key.
    fn payload(&self, package: Package, key: usize) -> MemoryRange {
        self.source.range(key * package.stride(), package.size)
    }

    fn target(&self) -> MemoryRange {
        self.target.range(0, self.target.bytes().len())
    }

    fn clear_target(&mut self, package: Package) {
        self.target.bytes_mut()[..package.bytes()].fill(0);
    }

    /// An error if a byte has not arrived.
    fn compare(&self, package: Package, way: Way) -> Result<(), String> {
        let arrived = |key: &usize| {
            let (from, to) = (key * package.stride(), key * package.size);
            self.source.bytes()[from..][..package.size] == self.target.bytes()[to..][..package.size]
        };
        match (0..package.keys).find(|key| !arrived(key)) {
            None => Ok(()),
            Some(key) => Err(format!("WRONG CONTENT: key {key} of {package:?}, way {way:?}, differs from what was put")),
        }
    }
}

/// What one round of a way gave.
#[derive(Clone, Copy, Default)]
pub struct Sample {
    /// Microseconds of a put, the median.
    pub us: f64,
    /// The same on average, with what trials of the other path cost.
    pub mean_us: f64,
    /// Regions that were registered, by put.
    pub registrations: f64,
}

/// Samples of all ways.
pub type Round = [Sample; WAYS.len()];

/// An engine with a pool, and the peer that it puts to.
pub struct Subject {
    engine: Arc<Engine>,
    peer: Arc<Engine>,
    pool: Arc<Pool>,
    segment: u64,
    target: u64,
    workers: usize,
}

impl Subject {
    /// With rings as devices; bytes are moved by a `memmove` on the thread that puts.
    pub fn with_rings(count: usize, memory: &Memory, pool_bytes: usize) -> Result<Subject, Box<dyn Error>> {
        let targets = Arc::new(Registry::new());
        let options = RegionOptions { location: "*".into(), remote_accessible: true, counted: false, owner: Owner::Program };
        let config = Config { force_tcp: false, ..Config::from_environment() };
        Registrar::new(targets.clone(), Arc::default(), &config).register(memory.target(), &options, None, &[])?;
        let engine = bare_engine(config)?;
        engine.install_own_transport(Arc::new(Rings::new(count, targets)?))?;
        Subject::new(engine, TransportArguments::tcp().create_engine()?, memory, pool_bytes)
    }

    /// With transports of the engines, and that verbs library, if any.
    pub fn over(
        near: &TransportArguments,
        far: &TransportArguments,
        verbs: Option<&Path>,
        memory: &Memory,
        pool_bytes: usize,
    ) -> Result<Subject, Box<dyn Error>> {
        let create = |transport: &TransportArguments| {
            let mut config = Config::from_environment();
            if let Some(verbs) = verbs {
                config.rdma.library = verbs.into();
            }
            transport.create_engine_with(config)
        };
        let peer = create(far)?;
        peer.register(memory.target(), &memory_options())?;
        Subject::new(create(near)?, peer, memory, pool_bytes)
    }

    fn new(engine: Arc<Engine>, peer: Arc<Engine>, memory: &Memory, pool_bytes: usize) -> Result<Subject, Box<dyn Error>> {
        let segment = engine.open_segment(&peer.name())?;
        let pool = engine.create_pool(&PoolOptions { bytes: Some(pool_bytes as u64), ..PoolOptions::default() })?;
        Ok(Subject { engine, peer, pool, segment, target: memory.target().address(), workers: 1 })
    }

    /// From now on the keys of a put are divided among so many threads, each of which puts its own.
    pub fn with_workers(mut self, workers: usize) -> Subject {
        self.workers = workers;
        self
    }

    /// Bytes of a key up to which the pool can stage it.
    pub fn largest_lease(&self) -> u64 {
        self.pool.statistics().largest_lease
    }

    /// Puts once in each way and compares what arrives, unless nothing does.
    pub fn check(&self, memory: &mut Memory, package: Package, moves_bytes: bool) -> Result<(), Box<dyn Error>> {
        for way in WAYS {
            if moves_bytes {
                memory.clear_target(package);
            }
            self.put(way, &self.requests(memory, package))?;
            if moves_bytes {
                memory.compare(package, way)?;
            }
        }
        Ok(())
    }

    /// Lets the choice of the engine settle.
    pub fn warm_up(&self, memory: &Memory, package: Package) -> Result<(), Box<dyn Error>> {
        const PUTS: u32 = 16;
        const LEAST: Duration = Duration::from_millis(50);
        let requests = self.requests(memory, package);
        let begin = Instant::now();
        let mut puts = 0;
        while puts < PUTS || begin.elapsed() < LEAST {
            self.put(Way::Auto, &requests)?;
            puts += 1;
        }
        Ok(())
    }

    /// Each of the ways for so long; another one comes first in the next round. The others' samples are zeros.
    pub fn measure_round(
        &self,
        memory: &Memory,
        package: Package,
        ways: &[Way],
        round: usize,
        limit: Duration,
    ) -> Result<Round, Box<dyn Error>> {
        let mut samples = Round::default();
        for position in 0..ways.len() {
            let way = ways[(position + round) % ways.len()];
            samples[way as usize] = self.measure(way, memory, package, limit)?;
        }
        Ok(samples)
    }

    /// Puts again and again for so long, once at least.
    fn measure(&self, way: Way, memory: &Memory, package: Package, limit: Duration) -> Result<Sample, Box<dyn Error>> {
        let requests = self.requests(memory, package);
        let registered = self.engine.counters().regions_registered.get();
        let begin = Instant::now();
        let mut times = Vec::new();
        while times.is_empty() || begin.elapsed() < limit {
            let since = Instant::now();
            self.put(way, &requests)?;
            times.push(since.elapsed().as_secs_f64() * 1e6);
        }
        let registered = self.engine.counters().regions_registered.get() - registered;
        let puts = times.len() as f64;
        let mean_us = times.iter().sum::<f64>() / puts;
        Ok(Sample { us: percentile(&mut times, 0.5), mean_us, registrations: registered as f64 / puts })
    }

    fn requests(&self, memory: &Memory, package: Package) -> Vec<Request> {
        let request = |key| Request {
            opcode: Opcode::Write,
            local: memory.payload(package, key),
            segment: self.segment,
            remote_address: self.target + (key * package.size) as u64,
            hints: Default::default(),
        };
        (0..package.keys).map(request).collect()
    }

    fn put(&self, way: Way, requests: &[Request]) -> Result<(), Box<dyn Error>> {
        let mut parts = requests.chunks(requests.len().div_ceil(self.workers));
        let own = parts.next().unwrap_or_default();
        std::thread::scope(|scope| {
            let put = |part| self.put_part(way, part).map_err(|error| error.to_string());
            let others: Vec<_> = parts.map(|part| scope.spawn(move || put(part))).collect();
            let outcome = self.put_part(way, own);
            let others = others.into_iter().map(|other| other.join().unwrap_or_else(|_| Err("a thread panicked".to_string())));
            outcome.and(others.collect::<Result<(), _>>().map_err(Into::into))
        })
    }

    fn put_part(&self, way: Way, requests: &[Request]) -> Result<(), Box<dyn Error>> {
        match way {
            Way::Baseline => {
                let ranges: Vec<_> = requests.iter().map(|request| request.local).collect();
                let addresses: Vec<_> = ranges.iter().map(MemoryRange::address).collect();
                let options = MemoryOptions { remote_accessible: false, ..memory_options() };
                self.engine.register_batch(&ranges, &options)?;
                let transferred = self.engine.transfer(requests, SubmitOptions::default());
                self.engine.unregister_batch(&addresses)?;
                Ok(check_statuses(requests, &transferred?)?)
            }
            Way::Direct => self.put_by_pool(Preference::Direct, requests),
            Way::Staged => self.put_by_pool(Preference::Staged, requests),
            Way::Auto => self.put_by_pool(Preference::Auto, requests),
        }
    }

    fn put_by_pool(&self, preference: Preference, requests: &[Request]) -> Result<(), Box<dyn Error>> {
        let item =
            |request: &Request| Item { local: request.local, segment: request.segment, remote_address: request.remote_address };
        let items: Vec<_> = requests.iter().map(item).collect();
        let options = StagingOptions { preference, ..StagingOptions::default() };
        let finished = self.engine.put(&self.pool, &items, options)?;
        finished.undone?;
        Ok(check_statuses(requests, &finished.statuses)?)
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        self.engine.shutdown();
        self.peer.shutdown();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_share_no_page_and_what_does_not_arrive_is_noticed() {
        let package = Package { size: 5000, keys: 3 };
        let mut memory = Memory::new(&[package, Package { size: 1, keys: 1 }], false).unwrap();
        let payloads = [0, 1, 2].map(|key| memory.payload(package, key));
        let pages = payloads.map(|payload| (payload.address() / 4096, (payload.end() as u64 - 1) / 4096));
        assert!(pages.windows(2).all(|two| two[0].1 + 1 < two[1].0), "{pages:?}");
        assert!(memory.compare(package, Way::Staged).unwrap_err().contains("key 0"));
        for key in 0..2 {
            let from = key * package.stride();
            let payload = memory.source.bytes()[from..][..package.size].to_vec();
            memory.target.bytes_mut()[key * package.size..][..package.size].copy_from_slice(&payload);
        }
        assert!(memory.compare(package, Way::Staged).unwrap_err().contains("key 2"));
        assert_eq!(memory.compare(Package { keys: 2, ..package }, Way::Staged), Ok(()));
        memory.clear_target(package);
        assert!(memory.compare(package, Way::Staged).is_err());
    }
}
