//! `te bench register --pin io_uring`: registering memory with several devices, in the order and on the threads that this library
//! chooses, beside one device after the other, a thread for each device, and what two threads reach without any library.
//!
//! Each cell is a kind of memory, a size of pages, a size of memory, and a number of devices. In each round, every way registers a fresh
//! mapping that was prepared in the same manner, and unregisters it. Each way comes after each other one equally often, for it finds
//! the caches and the kernel's lists of free pages as the one before has left them. The first two are measured twice: the better of them is
//! what ours is held against, and what it differs from itself is what differences mean here.

use std::error::Error;
use std::fs::File;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use serde::Serialize;
use transfer_engine::config::Config;
use transfer_engine::registration::Registrar;
use transfer_engine::registry::{RegionOptions, Registry};
use transfer_engine::sys::pages;
use transfer_engine::transport::{Device, Transport};

use super::machine::{Machine, noise, time_fixed_work, time_round_trip};
use super::rings::Rings;
use super::statistics::Spread;
use super::{parse_size, print_report};
use crate::output;
use crate::ring::Ring;
use crate::system::{Mapping, memory_file};

/// Arguments of `te bench register --pin`, a part of those of `te bench register`.
#[derive(clap::Args, Serialize)]
#[group(skip)]
pub struct Arguments {
    /// Numbers of devices.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8", default_value_if("quick", "true", "1,4"))]
    devices: Vec<usize>,
    /// Sizes of the memory.
    #[arg(long, value_delimiter = ',', value_parser = parse_size)]
    #[arg(default_value = "64M,256M", default_value_if("quick", "true", "64M"))]
    sizes: Vec<usize>,
    /// Kinds of memory.
    #[arg(long, value_delimiter = ',', value_enum)]
    #[arg(default_value = "written,untouched,zeros,alternating,shared")]
    memory: Vec<Memory>,
    /// Sizes of pages.
    #[arg(long, value_delimiter = ',', value_enum, default_value = "small,huge")]
    pages: Vec<Pages>,
    /// Rounds of each cell.
    #[arg(long, default_value = "5", default_value_if("quick", "true", "3"), value_parser = clap::value_parser!(u32).range(1..))]
    pin_rounds: u32,
}

/// What has been done to the memory before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Memory {
    /// Every page was written.
    Written,
    /// No page was touched.
    Untouched,
    /// Every page was read and none written: all are the same page of zeros.
    Zeros,
    /// Every second page was written.
    Alternating,
    /// A second mapping of a file in memory that was written through the first.
    Shared,
}

/// What it consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Pages {
    /// Of 4 KiB.
    Small,
    /// Transparent ones of 2 MiB.
    Huge,
}

impl Memory {
    /// As on the command line.
    pub fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }

    /// What is in a file is not made of large pages unless the machine is set up so.
    pub fn can_consist_of(self, pages: Pages) -> bool {
        pages == Pages::Small || self != Memory::Shared
    }
}

impl Pages {
    /// Their size.
    pub fn name(self) -> &'static str {
        match self {
            Pages::Small => "4 KiB",
            Pages::Huge => "2 MiB",
        }
    }
}

/// Ways to register, in the order of their costs.
const WAYS: [&str; 4] = ["sequential", "a thread each", "ours", "two threads"];

/// Behind the ways, the first two of them once more.
const WITH_CONTROLS: usize = WAYS.len() + 2;

/// The way of so many whose turn it is: the rounds are a Williams design, in which each way comes after each other one equally often
/// within `count` rounds, or within twice as many if that is odd, and takes each place once.
fn way_of(count: usize, round: usize, position: usize) -> usize {
    // 0, 1, -1, 2, -2, ...
    let step = if position.is_multiple_of(2) { count - position / 2 } else { position.div_ceil(2) };
    let is_backwards = !(round / count).is_multiple_of(2);
    (round + if is_backwards { 2 * count - step } else { step }) % count
}

/// Microseconds.
#[derive(Clone, Copy, Default)]
pub struct Cost {
    /// Mapping the memory and bringing it into its state.
    pub allocate: f64,
    /// With all devices.
    pub register: f64,
    /// With all devices.
    pub unregister: f64,
    parts: Parts<f64>,
}

/// What ours spends its time on, in microseconds, and its threads.
#[derive(Clone, Copy, Default, Serialize)]
struct Parts<T> {
    residency_us: T,
    population_us: T,
    pinning_us: T,
    book_keeping_us: T,
    threads: T,
}

/// What was measured, and how far the CPUs were apart meanwhile.
#[derive(Clone, Copy, Serialize)]
struct Cell {
    memory: Memory,
    pages: Pages,
    bytes: usize,
    devices: usize,
    round_trip_ns: Spread,
}

#[derive(Serialize)]
struct Row {
    operation: &'static str,
    #[serde(flatten)]
    cell: Cell,
    sequential_us: Spread,
    naive_us: Spread,
    ours_us: Spread,
    /// What two threads take by plain calls, without a library.
    limit_us: Spread,
    /// Of a registration.
    #[serde(skip_serializing_if = "Option::is_none")]
    ours: Option<Parts<Spread>>,
    /// Sequential time divided by ours, round by round.
    gain: Spread,
    /// What the median of `gain` is to reach, where something is promised.
    #[serde(skip_serializing_if = "Option::is_none")]
    wanted_gain: Option<f64>,
    /// As `gain`, of the two threads.
    limit_gain: Spread,
    /// Ours divided by what the two threads take, round by round.
    of_limit: Spread,
    /// Ours less that of the first two whose median is smaller, in microseconds, round by round.
    loss_us: Spread,
    /// That way, measured once more in the same rounds, less itself.
    control_us: Spread,
    /// How far those two are from each other in the middle of the rounds: what is seen without any difference.
    chance_us: f64,
    /// What the median of `loss_us` is allowed: 5 % of that way's, 50 µs at least.
    allowed_us: f64,
}

impl Row {
    /// Whether ours takes longer than it may.
    fn is_above_limit(&self) -> bool {
        self.loss_us.median > self.allowed_us
    }

    /// Whether it takes longer than it may, but not by more than the better way does by chance.
    fn is_undecided(&self) -> bool {
        self.is_above_limit() && self.loss_us.median <= self.chance_us
    }

    fn is_slower(&self) -> bool {
        self.is_above_limit() && !self.is_undecided()
    }

    fn misses(&self) -> bool {
        self.wanted_gain.is_some_and(|wanted| self.gain.median < wanted)
    }

    /// Whether it misses what two threads miss here, too.
    fn is_limited(&self) -> bool {
        self.misses() && self.wanted_gain.is_some_and(|wanted| self.limit_gain.median < wanted)
    }

    /// What came of it, in a word each.
    fn verdict(&self) -> String {
        let gain = match (self.wanted_gain.is_some(), self.misses()) {
            (true, true) if self.is_limited() => Some("missed by both"),
            (true, true) => Some("missed"),
            (true, false) => Some("reached"),
            (false, _) => None,
        };
        let words = [self.is_slower().then_some("slower"), self.is_undecided().then_some("undecided"), gain];
        words.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }
}

/// How much faster than one device after the other it is to be.
fn wanted_gain(operation: &str, memory: Memory, pages: Pages, devices: usize) -> Option<f64> {
    match (operation, memory, pages) {
        ("register", Memory::Untouched, _) => Some(if devices < 8 { 1.4 } else { 1.3 }),
        ("register", Memory::Written, Pages::Small) | ("unregister", _, Pages::Small) if devices > 1 => Some(1.4),
        _ => None,
    }
}

#[derive(Serialize)]
struct Report<'a> {
    machine: Machine,
    settings: &'a Arguments,
    fixed_work_ms: Spread,
    rows: Vec<Row>,
}

/// Runs `te bench register --pin`.
pub fn run(arguments: &Arguments, as_json: bool) -> Result<(), Box<dyn Error>> {
    let machine = Machine::look();
    let mut rows = Vec::new();
    let mut fixed_work = Vec::new();
    for devices in arguments.devices.iter().copied() {
        let fleet = Fleet::new(devices)?;
        for bytes in arguments.sizes.iter().copied() {
            for pages in arguments.pages.iter().copied() {
                for memory in arguments.memory.iter().copied().filter(|memory| memory.can_consist_of(pages)) {
                    eprintln!("{devices} devices, {}, {memory:?}, {pages:?} pages", output::bytes(bytes as u64));
                    let (mut rounds, mut round_trip_ns) = (Vec::new(), Vec::new());
                    // The first round finds no thread and nothing learnt.
                    for round in 0..=arguments.pin_rounds as usize {
                        fixed_work.push(time_fixed_work());
                        round_trip_ns.push(time_round_trip());
                        let costs = fleet.measure_round(round, memory, pages, bytes)?;
                        rounds.extend((round > 0).then_some(costs));
                    }
                    let cell = Cell { memory, pages, bytes, devices, round_trip_ns: Spread::of(round_trip_ns) };
                    rows.extend(rows_of(&rounds, cell));
                }
            }
        }
    }
    let report = Report { machine, settings: arguments, fixed_work_ms: Spread::of(fixed_work), rows };
    print_report(as_json, &report, text)
}

/// A mapping in the state that a cell asks for.
struct Prepared {
    mapping: Mapping,
    /// The first mapping of the file, which holds its pages.
    _other: Option<(Mapping, File)>,
}

impl Prepared {
    fn new(memory: Memory, pages: Pages, bytes: usize) -> Result<Prepared, Box<dyn Error>> {
        let is_huge = pages == Pages::Huge;
        let fail = |error| format!("cannot map {}: {error}", output::bytes(bytes as u64));
        if memory == Memory::Shared {
            let file = memory_file(bytes as u64).map_err(fail)?;
            let mut first = Mapping::new(bytes, is_huge, Some(&file)).map_err(fail)?;
            first.write(4096);
            let mapping = Mapping::new(bytes, is_huge, Some(&file)).map_err(fail)?;
            return Ok(Prepared { mapping, _other: Some((first, file)) });
        }
        let mut mapping = Mapping::new(bytes, is_huge, None).map_err(fail)?;
        let page = if is_huge { 2 << 20 } else { 4096 };
        match memory {
            Memory::Written => mapping.write(4096),
            Memory::Alternating => mapping.write(2 * page),
            Memory::Zeros => assert_eq!(mapping.read(4096), 0),
            Memory::Untouched | Memory::Shared => {}
        }
        Ok(Prepared { mapping, _other: None })
    }
}

/// Some rings, and a registrar that knows them as the devices of a transport.
pub struct Fleet {
    rings: Vec<Arc<Ring>>,
    registry: Arc<Registry>,
    registrar: Registrar,
    transports: Vec<Arc<dyn Transport>>,
}

impl Fleet {
    /// Fails where there is no io_uring.
    pub fn new(devices: usize) -> Result<Fleet, Box<dyn Error>> {
        let registry = Arc::new(Registry::new());
        let transport = Rings::new(devices, registry.clone())?;
        let rings = transport.rings().to_vec();
        let registrar = Registrar::new(registry.clone(), Arc::default(), &Config::from_environment());
        Ok(Fleet { registry, registrar, transports: vec![Arc::new(transport)], rings })
    }

    /// Each of the first `COUNT` of [`WAYS`] and those that are measured twice in its turn, with memory of its own. Costs are in that order.
    pub fn measure_round<const COUNT: usize>(
        &self,
        round: usize,
        memory: Memory,
        pages: Pages,
        bytes: usize,
    ) -> Result<[Cost; COUNT], Box<dyn Error>> {
        let mut costs = [Cost::default(); COUNT];
        for position in 0..COUNT {
            let way = way_of(COUNT, round, position);
            let begin = Instant::now();
            let prepared = Prepared::new(memory, pages, bytes)?;
            let allocate = begin.elapsed().as_secs_f64() * 1e6;
            costs[way] = Cost { allocate, ..self.measure(way % WAYS.len(), memory, &prepared)? };
        }
        Ok(costs)
    }

    fn measure(&self, way: usize, memory: Memory, prepared: &Prepared) -> Result<Cost, Box<dyn Error>> {
        let range = prepared.mapping.range();
        let begin = Instant::now();
        match way {
            0 => {
                let keys = self.rings.iter().map(|ring| ring.register(range, true)).collect::<Result<Vec<_>, _>>()?;
                let middle = Instant::now();
                self.rings.iter().zip(&keys).try_for_each(|(ring, key)| ring.deregister(key))?;
                Ok(cost(begin, middle))
            }
            1 => {
                let keys = self.on_a_thread_each(|ring, _| ring.register(range, true))?;
                let middle = Instant::now();
                self.on_a_thread_each(|ring, number| ring.deregister(&keys[number]))?;
                Ok(cost(begin, middle))
            }
            2 => {
                let options =
                    RegionOptions { location: "*".into(), remote_accessible: true, counted: false, owner: Default::default() };
                self.registrar.register(range, &options, None, &self.transports)?;
                let middle = Instant::now();
                let region = self.registry.read(|view| view.find(range.address()).and_then(|region| region.cost()));
                self.registrar.unregister(range.address(), &self.transports)?;
                let spent = region.ok_or("the region is not there")?;
                let us = |duration: Duration| duration.as_secs_f64() * 1e6;
                let parts = Parts {
                    residency_us: us(spent.residency),
                    population_us: us(spent.population),
                    pinning_us: us(spent.pinning_elapsed),
                    book_keeping_us: us(spent.book_keeping),
                    threads: spent.threads as f64,
                };
                Ok(Cost { parts, ..cost(begin, middle) })
            }
            _ => {
                if matches!(memory, Memory::Untouched | Memory::Alternating | Memory::Shared) {
                    let half = range.length() / 2;
                    on_two_threads(2, 2, |number| pages::populate(range.part(half * number as u64, half).expect("it has halves")))?;
                }
                // Two that replace the page of zeros are slower than one.
                let threads = if memory == Memory::Zeros { 1 } else { 2 };
                let keys = on_two_threads(threads, self.rings.len(), |number| self.rings[number].register(range, true))?;
                let middle = Instant::now();
                on_two_threads(2, self.rings.len(), |number| self.rings[number].deregister(&keys[number]))?;
                Ok(cost(begin, middle))
            }
        }
    }

    fn on_a_thread_each<T: Send>(
        &self,
        work: impl Fn(&Ring, usize) -> transfer_engine::Result<T> + Sync,
    ) -> Result<Vec<T>, Box<dyn Error>> {
        std::thread::scope(|scope| {
            let work = &work;
            let threads: Vec<_> =
                self.rings.iter().enumerate().map(|(number, ring)| scope.spawn(move || work(ring, number))).collect();
            let mut results = Vec::new();
            for thread in threads {
                results.push(thread.join().map_err(|_| "a thread panicked")??);
            }
            Ok(results)
        })
    }
}

/// Jobs by number, on this thread and, if `threads` is 2, on another one that takes every second of them.
fn on_two_threads<T: Send, E: Error + Send + 'static>(
    threads: usize,
    count: usize,
    job: impl Fn(usize) -> Result<T, E> + Sync,
) -> Result<Vec<T>, Box<dyn Error>> {
    let threads = threads.min(count).max(1);
    // A thread cannot start, for it maps memory, while another one has pages provided.
    let both_run = Barrier::new(threads);
    let jobs = |first: usize| {
        both_run.wait();
        (first..count).step_by(threads).map(&job).collect::<Result<Vec<T>, E>>()
    };
    let (first, second) = std::thread::scope(|scope| {
        let other = (threads > 1).then(|| scope.spawn(|| jobs(1)));
        (jobs(0), other.map(|other| other.join()))
    });
    let second = second.transpose().map_err(|_| "a thread panicked")?.transpose()?.unwrap_or_default();
    let mut all: Vec<T> = Vec::with_capacity(count);
    let mut second = second.into_iter();
    for result in first? {
        all.push(result);
        all.extend(second.next());
    }
    Ok(all)
}

fn cost(begin: Instant, middle: Instant) -> Cost {
    let (register, unregister) = ((middle - begin).as_secs_f64() * 1e6, middle.elapsed().as_secs_f64() * 1e6);
    Cost { register, unregister, ..Cost::default() }
}

fn rows_of(rounds: &[[Cost; WITH_CONTROLS]], cell: Cell) -> [Row; 2] {
    type Figure = fn(&Cost) -> f64;
    let operations: [(&str, Figure); 2] = [("register", |cost| cost.register), ("unregister", |cost| cost.unregister)];
    operations.map(|(operation, figure)| {
        let [sequential_us, naive_us, ours_us, limit_us] =
            [0, 1, 2, 3].map(|way| Spread::over(rounds, |round| figure(&round[way])));
        // Not the shorter of the two in each round, which is shorter than either by chance.
        let better = usize::from(naive_us.median < sequential_us.median);
        let less_better = |way: usize| move |round: &[Cost; WITH_CONTROLS]| figure(&round[way]) - figure(&round[better]);
        let again = less_better(WAYS.len() + better);
        Row {
            operation,
            cell,
            sequential_us,
            naive_us,
            ours_us,
            limit_us,
            ours: (operation == "register").then(|| {
                let of = |part: fn(&Parts<f64>) -> f64| Spread::over(rounds, |round| part(&round[2].parts));
                Parts {
                    residency_us: of(|parts| parts.residency_us),
                    population_us: of(|parts| parts.population_us),
                    pinning_us: of(|parts| parts.pinning_us),
                    book_keeping_us: of(|parts| parts.book_keeping_us),
                    threads: of(|parts| parts.threads),
                }
            }),
            gain: Spread::over(rounds, |round| figure(&round[0]) / figure(&round[2])),
            wanted_gain: wanted_gain(operation, cell.memory, cell.pages, cell.devices),
            limit_gain: Spread::over(rounds, |round| figure(&round[0]) / figure(&round[3])),
            of_limit: Spread::over(rounds, |round| figure(&round[2]) / figure(&round[3])),
            loss_us: Spread::over(rounds, less_better(2)),
            control_us: Spread::over(rounds, again),
            chance_us: Spread::over(rounds, |round| again(round).abs()).median,
            allowed_us: ([sequential_us, naive_us][better].median * 0.05).max(50.0),
        }
    })
}

fn text(report: &Report<'_>) -> String {
    let mut out = report.machine.to_string();
    out.push('\n');
    out += &output::paragraph(&format!(
        "Registering memory with several devices (rings of io_uring), and unregistering it: one after the other, on a thread for each, as \
         this library does it, and by two threads without a library: each populates one half if pages are absent, then both pin. µs, median \
         (smallest..largest) of {} rounds. Gain: sequential time to ours, round by round, and what it is to reach; missed by both: two \
         threads miss it, too. Round trip: of a cache line from one CPU to another, which every page costs if several threads count its users. \
         Loss: ours less that of the first two whose median is smaller, round by round. Control: that way, measured once more in each \
         round, less itself. Slower: the loss is more than 5 % of that way and 50 µs, in the median. Undecided: it is, but no more than the \
         control is off in half of the rounds.",
        report.settings.pin_rounds
    ));
    for operation in ["register", "unregister"] {
        out += &format!(
            "\n{operation:<22} {:>7} {:>3} {:>21} {:>21} {:>21} {:>21} {:>17} {:>15} {:>17} {:>6} {:>21} {:>21}\n",
            "size",
            "dev",
            WAYS[0],
            WAYS[1],
            WAYS[2],
            WAYS[3],
            "ours/two threads",
            "round trip, ns",
            "gain",
            "wanted",
            "loss",
            "control"
        );
        for row in report.rows.iter().filter(|row| row.operation == operation) {
            let what = format!("{:?}, {:?}", row.cell.memory, row.cell.pages).to_lowercase();
            let line = format!(
                "{what:<22} {:>7} {:>3} {:>21} {:>21} {:>21} {:>21} {:>17} {:>15} {:>17} {:>6} {:>21} {:>21} {}",
                output::bytes(row.cell.bytes as u64).replace(' ', "").replace("iB", ""),
                row.cell.devices,
                row.sequential_us,
                row.naive_us,
                row.ours_us,
                row.limit_us,
                row.of_limit,
                row.cell.round_trip_ns,
                row.gain,
                row.wanted_gain.map(|wanted| wanted.to_string()).unwrap_or_default(),
                row.loss_us,
                row.control_us,
                row.verdict()
            );
            out += &format!("{}\n", line.trim_end());
        }
    }
    let slower = report.rows.iter().filter(|row| row.is_slower()).count();
    let undecided = report.rows.iter().filter(|row| row.is_undecided()).count();
    let wanted = report.rows.iter().filter(|row| row.wanted_gain.is_some()).count();
    let missed = report.rows.iter().filter(|row| row.misses()).count();
    out += &format!(
        "\n{slower} of {} lines are slower than the better of the first two, {undecided} are undecided.\n",
        report.rows.len()
    );
    let limited = report.rows.iter().filter(|row| row.is_limited()).count();
    out += &format!(
        "{} of {wanted} gains are reached; {limited} of the {missed} others are missed by two threads, too.\n",
        wanted - missed
    );
    out += &noise(report.fixed_work_ms);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring::SLOTS;

    #[test]
    fn every_way_gives_all_buffers_back() {
        let Ok(fleet) = Fleet::new(2) else { return eprintln!("skipped: no io_uring here") };
        for memory in [Memory::Written, Memory::Untouched, Memory::Zeros, Memory::Alternating, Memory::Shared] {
            for way in 0..WAYS.len() {
                // More often than a ring has places.
                for _ in 0..3 {
                    fleet.measure(way, memory, &Prepared::new(memory, Pages::Small, 1 << 20).unwrap()).unwrap();
                }
            }
        }
        assert!(fleet.rings.iter().all(|ring| ring.free_count() == SLOTS as usize));
    }

    #[test]
    fn ways_come_first_and_after_each_other_equally_often() {
        for (count, rounds) in [(WITH_CONTROLS, WITH_CONTROLS), (WITH_CONTROLS, 2 * WITH_CONTROLS), (3, 6)] {
            let mut follows = vec![0; count * count];
            let mut first = vec![0; count];
            for round in 0..rounds {
                let order: Vec<usize> = (0..count).map(|position| way_of(count, round, position)).collect();
                first[order[0]] += 1;
                order.windows(2).for_each(|pair| follows[pair[0] * count + pair[1]] += 1);
                let all: std::collections::BTreeSet<usize> = order.into_iter().collect();
                assert!(all.into_iter().eq(0..count));
            }
            assert!(first.iter().all(|times| *times == rounds / count), "{first:?}");
            let is_even = |(pair, times): (usize, &usize)| *times == if pair % (count + 1) == 0 { 0 } else { rounds / count };
            assert!(follows.iter().enumerate().all(is_even), "{follows:?}");
        }
    }

    #[test]
    fn two_threads_do_every_job_once_and_tell_of_the_first_error() {
        let run =
            |threads, count| on_two_threads(threads, count, |number| if number < 5 { Ok(number) } else { Err(std::fmt::Error) });
        for threads in [1, 2] {
            for count in [0, 1, 2, 5] {
                assert_eq!(run(threads, count).unwrap(), (0..count).collect::<Vec<_>>());
            }
            assert!(run(threads, 6).is_err());
        }
    }

    fn cell(memory: Memory, pages: Pages, devices: usize) -> Cell {
        Cell { memory, pages, bytes: 1, devices, round_trip_ns: Spread::of(vec![50.0]) }
    }

    /// What the first two and ours take, and the first two again.
    fn round_with([sequential, naive, ours]: [f64; 3], again: [f64; 2]) -> [Cost; WITH_CONTROLS] {
        let times = [sequential, naive, ours, 1010.0, again[0], again[1]];
        times.map(|register| Cost { register, unregister: 10.0, ..Cost::default() })
    }

    fn round(times: [f64; 3]) -> [Cost; WITH_CONTROLS] {
        round_with(times, [times[0], times[1]])
    }

    fn verdict(rounds: &[[Cost; WITH_CONTROLS]]) -> String {
        rows_of(rounds, cell(Memory::Zeros, Pages::Huge, 1))[0].verdict()
    }

    #[test]
    fn lines_that_are_slower_are_marked() {
        assert_eq!([100.0, 149.0, 151.0].map(|ours| verdict(&[round([100.0, 200.0, ours])])), ["", "", "slower"]);
        assert_eq!([2090.0, 2110.0].map(|ours| verdict(&[round([3000.0, 2000.0, ours])])), ["", "slower"], "5 %");
        // Each round by itself: the machine was slower in the last one, and so was everything.
        assert_eq!(verdict(&[[100.0, 200.0, 90.0], [100.0, 200.0, 90.0], [1000.0, 2000.0, 900.0]].map(round)), "");
    }

    #[test]
    fn ways_that_are_equal_but_for_chance_are_not_told_slower() {
        // In each round one of three is longer by chance: the shorter of two is mostly short, and so is each in the median.
        let rounds = [[200.0, 100.0, 100.0], [100.0, 200.0, 100.0], [100.0, 100.0, 200.0], [100.0, 100.0, 200.0]].map(round);
        assert_eq!(verdict(&rounds), "");
        assert_eq!(verdict(&[[200.0, 100.0, 200.0], [100.0, 200.0, 200.0], [200.0, 200.0, 200.0]].map(round)), "");
    }

    #[test]
    fn a_line_is_undecided_where_the_better_way_differs_from_itself_by_as_much() {
        let of = |ours: f64, again: [f64; 3]| verdict(&again.map(|again| round_with([2000.0, 1000.0, ours], [2000.0, again])));
        assert_eq!(of(1100.0, [1000.0; 3]), "slower");
        assert_eq!(of(1100.0, [1120.0, 1000.0, 880.0]), "undecided", "longer or shorter in two of three rounds");
        assert_eq!(of(1100.0, [1120.0, 1000.0, 1000.0]), "slower", "one round says nothing");
        assert_eq!(of(1300.0, [1120.0, 1000.0, 880.0]), "slower", "more than that");
        assert_eq!(of(1040.0, [1120.0, 1000.0, 880.0]), "", "as it is to be");
        // The control is of the way that is better.
        let rounds = [round_with([1000.0, 2000.0, 1100.0], [1000.0, 3000.0])];
        assert_eq!(verdict(&rounds), "slower");
        let rows = rows_of(&[round_with([1000.0, 2000.0, 1100.0], [1120.0, 2000.0])], cell(Memory::Untouched, Pages::Small, 1));
        assert_eq!(rows[0].verdict(), "undecided, missed by both");
    }

    #[test]
    fn gains_that_are_not_reached_are_told() {
        let verdict =
            |ours, memory, devices| rows_of(&[round([1400.0, 1400.0, ours])], cell(memory, Pages::Small, devices))[0].verdict();
        assert_eq!(
            [1000.0, 1010.0, 1500.0].map(|ours| verdict(ours, Memory::Untouched, 4)),
            ["reached", "missed by both", "slower, missed by both"]
        );
        // Two threads take 1010 µs.
        assert_eq!([1010.0, 1100.0].map(|ours| verdict(ours, Memory::Untouched, 8)), ["reached", "missed"]);
        assert_eq!([(Memory::Written, 1), (Memory::Zeros, 4)].map(|(memory, devices)| verdict(1400.0, memory, devices)), ["", ""]);
    }
}
