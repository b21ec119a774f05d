//! What `te bench pool` measures: puts of one engine into the memory of another in this process, or gets from there, in each way that
//! there is.

use std::error::Error;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::ValueEnum;
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

/// A direction, seen from the engine that has the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Operation {
    /// To the other engine.
    Put,
    /// From the other engine.
    Get,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Operation::Put => "put",
            Operation::Get => "get",
        })
    }
}

/// A way to put or get.
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
    /// The same as direct, measured once more: how much it differs by chance.
    DirectAgain,
    /// The same as staged, measured once more.
    StagedAgain,
    /// Of memory that is registered already: the transfer alone, which no way can do without.
    Transfer,
}

/// The ways that are compared, in the order of figures.
pub const WAYS: [Way; 4] = [Way::Baseline, Way::Direct, Way::Staged, Way::Auto];
/// Those, what shows how much a way differs from itself, and what none can be faster than.
pub const WAYS_AND_CONTROLS: [Way; 7] =
    [Way::Baseline, Way::Direct, Way::Staged, Way::Auto, Way::DirectAgain, Way::StagedAgain, Way::Transfer];

/// What one put or get moves: so many keys of the same size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Package {
    /// Bytes of a key.
    pub size: usize,
    /// Keys.
    pub keys: usize,
}

/// Calls that follow on each other in a round, if they are not too long: the first finds in the caches what another way has left.
const IN_A_ROW: usize = 16;
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

    fn local_bytes(&self) -> usize {
        self.stride() * self.keys
    }
}

/// Payloads here, and their places in the memory of the other engine.
pub struct Memory {
    local: Arena,
    remote: Arena,
}

impl Memory {
    /// Room for each of the packages, with all pages there: pages of 4 KiB, or large ones for payloads.
    pub fn new(packages: &[Package], is_huge: bool) -> Result<Memory, Box<dyn Error>> {
        let most = |bytes: fn(&Package) -> usize| packages.iter().map(bytes).max().ok_or("nothing is to be measured");
        let map = |bytes| Arena::new(bytes).map_err(|error| format!("cannot map {}: {error}", output::bytes(bytes as u64)));
        let local = map(most(Package::local_bytes)?)?;
        let local = if is_huge { local.in_large_pages() } else { local };
        let mut memory = Memory { local, remote: map(most(Package::bytes)?)? };
        fill(memory.local.bytes_mut(), 1);
        fill(memory.remote.bytes_mut(), 2);
        Ok(memory)
    }

    /// The payload of a key.
    fn payload(&self, package: Package, key: usize) -> MemoryRange {
        self.local.range(key * package.stride(), package.size)
    }

    fn remote(&self) -> MemoryRange {
        self.remote.range(0, self.remote.bytes().len())
    }

    /// Clears what is to arrive.
    fn clear(&mut self, package: Package, operation: Operation) {
        match operation {
            Operation::Put => self.remote.bytes_mut()[..package.bytes()].fill(0),
            Operation::Get => self.local.bytes_mut()[..package.local_bytes()].fill(0),
        }
    }

    /// An error if a byte has not arrived.
    fn compare(&self, package: Package, way: Way) -> Result<(), String> {
        let arrived = |key: &usize| {
            let (from, to) = (key * package.stride(), key * package.size);
            self.local.bytes()[from..][..package.size] == self.remote.bytes()[to..][..package.size]
        };
        match (0..package.keys).find(|key| !arrived(key)) {
            None => Ok(()),
            Some(key) => Err(format!("WRONG CONTENT: key {key} of {package:?}, way {way:?}, has not arrived")),
        }
    }
}

/// What one round of a way gave.
#[derive(Clone, Copy, Default)]
pub struct Sample {
    /// Microseconds of a put or get, the median.
    pub us: f64,
    /// The same on average, with what trials of the other path cost.
    pub mean_us: f64,
    /// Regions that were registered, by put or get.
    pub registrations: f64,
}

/// Samples of all ways; zeros for those that were not measured.
pub type Round = [Sample; WAYS_AND_CONTROLS.len()];

/// An engine with a pool, and the peer that it puts to or gets from.
pub struct Subject {
    engine: Arc<Engine>,
    peer: Arc<Engine>,
    pool: Arc<Pool>,
    segment: u64,
    remote: u64,
    operation: Operation,
    workers: usize,
}

impl Subject {
    /// With rings as devices; bytes are moved by a `memmove` on the calling thread.
    pub fn with_rings(count: usize, memory: &Memory, pool_bytes: usize) -> Result<Subject, Box<dyn Error>> {
        let remote = Arc::new(Registry::new());
        let options = RegionOptions { location: "*".into(), remote_accessible: true, counted: false, owner: Owner::Program };
        let config = Config { force_tcp: false, ..Config::from_environment() };
        Registrar::new(remote.clone(), Arc::default(), &config).register(memory.remote(), &options, None, &[])?;
        let engine = bare_engine(config)?;
        engine.install_own_transport(Arc::new(Rings::new(count, remote)?))?;
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
        peer.register(memory.remote(), &memory_options())?;
        Subject::new(create(near)?, peer, memory, pool_bytes)
    }

    fn new(engine: Arc<Engine>, peer: Arc<Engine>, memory: &Memory, pool_bytes: usize) -> Result<Subject, Box<dyn Error>> {
        let segment = engine.open_segment(&peer.name())?;
        let pool = engine.create_pool(&PoolOptions { bytes: Some(pool_bytes as u64), ..PoolOptions::default() })?;
        Ok(Subject { engine, peer, pool, segment, remote: memory.remote().address(), operation: Operation::Put, workers: 1 })
    }

    /// From now on keys go this way; until then they are put.
    pub fn with_operation(mut self, operation: Operation) -> Subject {
        self.operation = operation;
        self
    }

    /// From now on the keys of a put or get are divided among so many threads, each of which moves its own.
    pub fn with_workers(mut self, workers: usize) -> Subject {
        self.workers = workers;
        self
    }

    /// Bytes of a key up to which the pool can stage it.
    pub fn largest_lease(&self) -> u64 {
        self.pool.statistics().largest_lease
    }

    /// Moves all once in each way and compares what arrives, unless nothing does.
    pub fn check(&self, memory: &mut Memory, package: Package, moves_bytes: bool) -> Result<(), Box<dyn Error>> {
        for way in WAYS {
            if moves_bytes {
                memory.clear(package, self.operation);
            }
            self.run(way, &self.requests(memory, package))?;
            if moves_bytes {
                memory.compare(package, way)?;
            }
        }
        Ok(())
    }

    /// Lets the choice of the engine settle.
    pub fn warm_up(&self, memory: &Memory, package: Package) -> Result<(), Box<dyn Error>> {
        const CALLS: u32 = 16;
        const LEAST: Duration = Duration::from_millis(50);
        let requests = self.requests(memory, package);
        let begin = Instant::now();
        let mut calls = 0;
        while calls < CALLS || begin.elapsed() < LEAST {
            self.run(Way::Auto, &requests)?;
            calls += 1;
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

    /// Again and again for so long, once at least, and [`IN_A_ROW`] times where that takes no more than ten times as long.
    fn measure(&self, way: Way, memory: &Memory, package: Package, limit: Duration) -> Result<Sample, Box<dyn Error>> {
        let requests = self.requests(memory, package);
        if way == Way::Transfer {
            self.register(&requests)?;
        }
        let registered = self.engine.counters().regions_registered.get();
        let begin = Instant::now();
        let mut times = Vec::new();
        while times.is_empty() || begin.elapsed() < limit || (times.len() < IN_A_ROW && begin.elapsed() < 10 * limit) {
            let since = Instant::now();
            self.run(way, &requests)?;
            times.push(since.elapsed().as_secs_f64() * 1e6);
        }
        let registered = self.engine.counters().regions_registered.get() - registered;
        if way == Way::Transfer {
            self.unregister(&requests)?;
        }
        let puts = times.len() as f64;
        let mean_us = times.iter().sum::<f64>() / puts;
        Ok(Sample { us: percentile(&mut times, 0.5), mean_us, registrations: registered as f64 / puts })
    }

    fn requests(&self, memory: &Memory, package: Package) -> Vec<Request> {
        let opcode = match self.operation {
            Operation::Put => Opcode::Write,
            Operation::Get => Opcode::Read,
        };
        let request = |key| Request {
            opcode,
            local: memory.payload(package, key),
            segment: self.segment,
            remote_address: self.remote + (key * package.size) as u64,
            hints: Default::default(),
        };
        (0..package.keys).map(request).collect()
    }

    fn run(&self, way: Way, requests: &[Request]) -> Result<(), Box<dyn Error>> {
        let mut parts = requests.chunks(requests.len().div_ceil(self.workers));
        let own = parts.next().unwrap_or_default();
        std::thread::scope(|scope| {
            let run = |part| self.run_part(way, part).map_err(|error| error.to_string());
            let others: Vec<_> = parts.map(|part| scope.spawn(move || run(part))).collect();
            let outcome = self.run_part(way, own);
            let others = others.into_iter().map(|other| other.join().unwrap_or_else(|_| Err("a thread panicked".to_string())));
            outcome.and(others.collect::<Result<(), _>>().map_err(Into::into))
        })
    }

    fn run_part(&self, way: Way, requests: &[Request]) -> Result<(), Box<dyn Error>> {
        match way {
            Way::Baseline => {
                self.register(requests)?;
                let transferred = self.transfer(requests);
                self.unregister(requests)?;
                transferred
            }
            Way::Transfer => self.transfer(requests),
            Way::Direct | Way::DirectAgain => self.run_by_pool(Preference::Direct, requests),
            Way::Staged | Way::StagedAgain => self.run_by_pool(Preference::Staged, requests),
            Way::Auto => self.run_by_pool(Preference::Auto, requests),
        }
    }

    fn register(&self, requests: &[Request]) -> Result<(), Box<dyn Error>> {
        let ranges: Vec<_> = requests.iter().map(|request| request.local).collect();
        let options = MemoryOptions { remote_accessible: false, ..memory_options() };
        Ok(self.engine.register_batch(&ranges, &options)?)
    }

    fn unregister(&self, requests: &[Request]) -> Result<(), Box<dyn Error>> {
        let addresses: Vec<_> = requests.iter().map(|request| request.local.address()).collect();
        Ok(self.engine.unregister_batch(&addresses)?)
    }

    fn transfer(&self, requests: &[Request]) -> Result<(), Box<dyn Error>> {
        Ok(check_statuses(requests, &self.engine.transfer(requests, SubmitOptions::default())?)?)
    }

    fn run_by_pool(&self, preference: Preference, requests: &[Request]) -> Result<(), Box<dyn Error>> {
        let item =
            |request: &Request| Item { local: request.local, segment: request.segment, remote_address: request.remote_address };
        let items: Vec<_> = requests.iter().map(item).collect();
        let options = StagingOptions { preference, ..StagingOptions::default() };
        let finished = match self.operation {
            Operation::Put => self.engine.put(&self.pool, &items, options),
            Operation::Get => self.engine.get(&self.pool, &items, options),
        }?;
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
            let payload = memory.local.bytes()[from..][..package.size].to_vec();
            memory.remote.bytes_mut()[key * package.size..][..package.size].copy_from_slice(&payload);
        }
        assert!(memory.compare(package, Way::Staged).unwrap_err().contains("key 2"));
        assert_eq!(memory.compare(Package { keys: 2, ..package }, Way::Staged), Ok(()));
        memory.clear(package, Operation::Put);
        assert!(memory.compare(package, Way::Staged).is_err());
        fill(memory.remote.bytes_mut(), 2);
        memory.clear(package, Operation::Get);
        assert!(memory.payload(package, 2).end() <= memory.local.range(0, package.local_bytes()).end());
        assert!(memory.compare(package, Way::Staged).unwrap_err().contains("key 0"));
    }
}
