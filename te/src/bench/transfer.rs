//! `te bench transfer`: two processes on this machine, beside plain sockets between the same two, or with RDMA beside perftest.
//!
//! In each round every cell is measured once, and before the cells the plain sockets, or after each cell as many messages of perftest,
//! so that a neighbour on the machine hits all alike; ratios are formed round by round. In the first round every byte of every cell is
//! compared on the side where it arrives.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use serde::Serialize;
use transfer_engine::engine::Engine;
use transfer_engine::transfer::{Hints, Request, State, SubmitOptions, TaskStatus};
use transfer_engine::transport::Opcode;

use super::machine::{Machine, noise, time_fixed_work};
use super::perftest::Perftest;
use super::raw::{self, Waiting};
use super::statistics::{Spread, percentile};
use super::target::Target;
use super::{Protocol, TransportArguments, fill, find_difference, memory_options, parse_size, print_report};
use crate::output;
use crate::system::{Arena, process_cpu_time, wait_for_event};

/// Arguments of `te bench transfer`.
#[derive(clap::Args, Serialize)]
pub struct Arguments {
    /// Few figures within seconds: other defaults for --sizes, --rounds, --milliseconds and --memory.
    #[arg(long)]
    quick: bool,
    /// Sizes of a request.
    #[arg(long, value_delimiter = ',', value_parser = parse_size, default_value = "64,4K,64K,1M,16M")]
    #[arg(default_value_if("quick", "true", "4K,1M"))]
    sizes: Vec<usize>,
    /// Numbers of requests in a batch.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 32])]
    batches: Vec<usize>,
    /// Numbers of threads that submit.
    #[arg(long, value_delimiter = ',', default_values_t = [1])]
    threads: Vec<usize>,
    /// Directions.
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = [Operation::Read, Operation::Write])]
    operations: Vec<Operation>,
    /// Rounds.
    #[arg(long, default_value = "5", value_parser = clap::value_parser!(u32).range(1..))]
    #[arg(default_value_if("quick", "true", "3"))]
    rounds: u32,
    /// How long a cell is measured in a round, in milliseconds.
    #[arg(long, default_value = "200", value_parser = clap::value_parser!(u64).range(1..))]
    #[arg(default_value_if("quick", "true", "100"))]
    milliseconds: u64,
    /// Memory of each side; requests beyond it use the same places again.
    #[arg(long, value_parser = parse_size, default_value = "512M")]
    #[arg(default_value_if("quick", "true", "64M"))]
    memory: usize,
    #[command(flatten)]
    transport: TransportArguments,
    /// RDMA devices of the target; without any, the same.
    #[arg(long, value_delimiter = ',')]
    target_devices: Vec<String>,
    /// Print all figures as JSON instead of tables.
    #[arg(long)]
    json: bool,
}

impl Arguments {
    fn target_transport(&self) -> TransportArguments {
        let devices = if self.target_devices.is_empty() { &self.transport.devices } else { &self.target_devices };
        TransportArguments { devices: devices.clone(), ..self.transport }
    }

    /// perftest between the first devices of both sides.
    fn perftest(&self) -> Option<Perftest> {
        match (self.transport.devices.first(), self.target_transport().devices.first()) {
            (Some(near), Some(far)) if self.transport.protocol == Protocol::Rdma => Perftest::find(near, far),
            _ => None,
        }
    }
}

/// A direction, seen from the process that submits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Operation {
    /// From the target.
    Read,
    /// To the target.
    Write,
}

impl Operation {
    fn opcode(self) -> Opcode {
        match self {
            Operation::Read => Opcode::Read,
            Operation::Write => Opcode::Write,
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Operation::Read => "read",
            Operation::Write => "write",
        })
    }
}

/// What is moved, and how.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Cell {
    /// Direction.
    pub operation: Operation,
    /// Bytes of a request.
    pub size: usize,
    /// Requests that a thread submits at a time.
    pub batch: usize,
    /// Threads that submit.
    pub threads: usize,
    /// How they wait.
    pub waiting: Waiting,
}

impl Cell {
    /// One request at a time: what counts is how long it takes.
    fn is_single(&self) -> bool {
        self.batch == 1 && self.threads == 1
    }

    /// Bytes that are asked for at once.
    pub fn bytes_at_once(&self) -> usize {
        self.size * self.batch * self.threads
    }
}

/// Less than this at once does not fill a connection; its rate is then that of its latency, and no stream's.
const FILLS_A_STREAM: usize = 64 << 10;

/// What one round of a cell gave.
pub struct Sample {
    /// Microseconds of a batch: the median.
    pub p50: f64,
    p99: f64,
    /// MB/s.
    pub rate: f64,
    /// Seconds in a GiB, and microseconds in a request.
    cpu: f64,
    cpu_of_request: f64,
    /// Batches that were moved.
    calls: usize,
    beside: Option<Beside>,
}

/// A sample beside what was measured in the same round without an engine.
struct Beside {
    /// Median latency, divided by that of a plain round trip of the same size: the parked one, or the faster one for whoever polls. Or by
    /// the time that perftest takes for a message, with one under way.
    latency_ratio: f64,
    /// Rate, divided by that of two plain streams with messages of the same size; or by that of perftest.
    rate_ratio: f64,
    /// MB/s of perftest.
    perftest: Option<f64>,
}

impl Beside {
    fn sockets(sample: &Sample, cell: &Cell, raw: &Raw) -> Beside {
        let plain = match cell.waiting {
            Waiting::Polling => raw.polling.min(raw.parked),
            Waiting::Parked => raw.parked,
        };
        Beside { latency_ratio: sample.p50 / plain, rate_ratio: sample.rate / raw.rates[&cell.batch], perftest: None }
    }

    /// As many messages, with as many under way.
    fn perftest(sample: &Sample, cell: &Cell, perftest: &Perftest) -> Result<Beside, Box<dyn Error>> {
        let rate = perftest.measure(cell.operation, cell.size, cell.batch * cell.threads, sample.calls * cell.batch)?;
        Ok(Beside { latency_ratio: sample.p50 / (cell.size as f64 / rate), rate_ratio: sample.rate / rate, perftest: Some(rate) })
    }
}

/// Plain sockets in one round, for one size.
struct Raw {
    polling: f64,
    parked: f64,
    /// By the engine's system calls.
    alike: f64,
    /// MB/s of two streams, by the number of messages that they take turns with.
    rates: BTreeMap<usize, f64>,
}

#[derive(Serialize)]
struct RawRow {
    size: usize,
    round_trip_polling_us: Spread,
    round_trip_parked_us: Spread,
    /// By the system calls that the engine makes, polling.
    round_trip_alike_us: Spread,
    two_streams: Vec<StreamsRow>,
}

#[derive(Serialize)]
struct StreamsRow {
    batch: usize,
    mb_per_s: Spread,
}

#[derive(Serialize)]
struct Row {
    #[serde(flatten)]
    cell: Cell,
    /// Of a whole batch.
    p50_us: Spread,
    p99_us: Spread,
    mb_per_s: Spread,
    /// Of both processes.
    cpu_s_per_gib: Spread,
    cpu_us_per_request: Spread,
    /// Median latency / that of a plain round trip: the parked one, or the faster one for whoever polls; for single requests on one
    /// thread.
    latency_to_raw: Option<Spread>,
    /// Rate / that of two plain streams, where enough is asked at once; or / that of perftest.
    rate_to_raw: Option<Spread>,
    #[serde(skip_serializing_if = "Option::is_none")]
    perftest_mb_per_s: Option<Spread>,
}

#[derive(Serialize)]
struct Report<'a> {
    machine: Machine,
    settings: &'a Arguments,
    fixed_work_ms: Spread,
    raw: Vec<RawRow>,
    rows: Vec<Row>,
}

/// Runs `te bench transfer`.
pub fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let longest = arguments.sizes.iter().copied().max().ok_or("--sizes names none")?;
    if longest > arguments.memory {
        return Err(format!("a request of {longest} bytes does not fit into --memory {}", arguments.memory).into());
    }
    if arguments.batches.contains(&0) || arguments.threads.contains(&0) {
        return Err("--batches and --threads must be at least 1".into());
    }
    let machine = Machine::look();
    let perftest = arguments.perftest();
    let mut bench = Bench::start(arguments.memory, &arguments.transport, &arguments.target_transport())?;
    let cells = cells(arguments);
    let mut raw: BTreeMap<usize, Vec<Raw>> = BTreeMap::new();
    let mut samples: Vec<Vec<Sample>> = cells.iter().map(|_| Vec::new()).collect();
    let mut fixed_work = Vec::new();
    let limit = Duration::from_millis(arguments.milliseconds);
    for round in 1..=arguments.rounds {
        eprintln!("round {round} of {}{}", arguments.rounds, if round == 1 { ", comparing content" } else { "" });
        // Where the engine uses RDMA, sockets say nothing about it.
        for size in arguments.sizes.iter().copied().filter(|_| arguments.transport.protocol == Protocol::Tcp) {
            raw.entry(size).or_default().push(bench.measure_raw(size, &arguments.batches)?);
        }
        for (cell, samples) in cells.iter().zip(&mut samples) {
            fixed_work.push(time_fixed_work());
            let mut sample = if round == 1 { bench.measure_checked(cell, limit)? } else { bench.measure(cell, limit)? };
            sample.beside = match (raw.get(&cell.size).and_then(|rounds| rounds.last()), &perftest) {
                (Some(raw), _) => Some(Beside::sockets(&sample, cell, raw)),
                (None, Some(perftest)) => Some(Beside::perftest(&sample, cell, perftest)?),
                (None, None) => None,
            };
            samples.push(sample);
        }
    }
    let (raw, rows) = (raw_rows(&raw), rows(&cells, &samples));
    print_report(arguments.json, &Report { machine, settings: arguments, fixed_work_ms: Spread::of(fixed_work), raw, rows }, text)?;
    Ok(())
}

fn cells(arguments: &Arguments) -> Vec<Cell> {
    let mut cells = Vec::new();
    for operation in arguments.operations.iter().copied() {
        for size in arguments.sizes.iter().copied() {
            for batch in arguments.batches.iter().copied() {
                for threads in arguments.threads.iter().copied() {
                    let cell = Cell { operation, size, batch, threads, waiting: Waiting::Polling };
                    cells.push(cell);
                    cells.extend(cell.is_single().then_some(Cell { waiting: Waiting::Parked, ..cell }));
                }
            }
        }
    }
    cells
}

/// Seed of what is moved.
const CONTENT: u64 = 1;

/// An error if bytes that were moved are not where they belong.
fn judge_content(cell: &Cell, used: usize, difference: Option<usize>) -> Result<(), String> {
    let Some(offset) = difference else { return Ok(()) };
    let side = match cell.operation {
        Operation::Read => "this process",
        Operation::Write => "the target",
    };
    let Cell { operation, size, batch, threads, .. } = cell;
    Err(format!(
        "WRONG CONTENT: after {operation}s of {size} bytes, {batch} at once on {threads} threads, the memory of {side} differs from \
         what was sent within the 8 bytes at offset {offset} of {used}"
    ))
}

/// The two processes.
pub struct Bench {
    engine: std::sync::Arc<Engine>,
    target: Target,
    segment: u64,
    arena: Arena,
    memory: usize,
}

impl Bench {
    /// With so much memory on either side.
    pub fn start(memory: usize, near: &TransportArguments, far: &TransportArguments) -> Result<Bench, Box<dyn Error>> {
        eprintln!("starting the target");
        let target = Target::start(memory, memory, far)?;
        let mut arena = Arena::new(memory)?;
        // Pages are there before anything is timed.
        fill(arena.bytes_mut(), 0);
        let engine = near.create_engine()?;
        engine.register(arena.range(0, memory), &memory_options())?;
        let segment = engine.open_segment(&target.location.segment)?;
        Ok(Bench { engine, target, segment, arena, memory })
    }

    /// How many bytes from the start of either arena the cell uses.
    fn used(&self, cell: &Cell) -> usize {
        cell.bytes_at_once().min(self.memory / cell.size * cell.size)
    }

    /// Fills what the cell moves from, and differently what it moves to.
    fn prepare_content(&mut self, cell: &Cell) -> Result<(), Box<dyn Error>> {
        let used = self.used(cell);
        let (ours, theirs) = match cell.operation {
            Operation::Read => (!CONTENT, CONTENT),
            Operation::Write => (CONTENT, !CONTENT),
        };
        fill(&mut self.arena.bytes_mut()[..used], ours);
        self.target.fill(used, theirs)
    }

    /// Compares every byte on the side where it was to arrive.
    fn compare_content(&mut self, cell: &Cell) -> Result<(), Box<dyn Error>> {
        let used = self.used(cell);
        let difference = match cell.operation {
            Operation::Read => find_difference(&self.arena.bytes()[..used], CONTENT),
            Operation::Write => self.target.find_difference(used, CONTENT)?,
        };
        Ok(judge_content(cell, used, difference)?)
    }

    /// The requests of a batch, from the place of request `first` on.
    fn requests(&self, operation: Operation, size: usize, batch: usize, first: usize) -> Vec<Request> {
        let places = self.memory / size;
        let request = |index: usize| {
            let offset = (first + index) % places * size;
            Request {
                opcode: operation.opcode(),
                local: self.arena.range(offset, size),
                segment: self.segment,
                remote_address: self.target.location.address + offset as u64,
                hints: Hints::default(),
            }
        };
        (0..batch).map(request).collect()
    }

    fn measure_raw(&self, size: usize, batches: &[usize]) -> Result<Raw, Box<dyn Error>> {
        let port = self.target.location.raw_port;
        // Some 64 MiB a way of waiting, so that a round stays short.
        let count = ((64 << 20) / size).clamp(8, 2000) as u64;
        let median = |waiting| Ok::<f64, Box<dyn Error>>(percentile(&mut raw::round_trips(port, size, count, waiting)?, 0.5));
        let total = (size * 20_000).clamp(64 << 20, 512 << 20);
        let total = if size < 4096 { size * 100_000 } else { total };
        let mut rates = BTreeMap::new();
        for batch in batches.iter().copied() {
            let memory = &self.arena.bytes()[..size * batch.min(self.memory / size)];
            rates.insert(batch, raw::throughput(port, memory, size, total.max(memory.len()), 2)?);
        }
        let alike = percentile(&mut raw::round_trips_like_the_engine(port, size, count)?, 0.5);
        Ok(Raw { polling: median(Waiting::Polling)?, parked: median(Waiting::Parked)?, alike, rates })
    }

    /// As [`Bench::measure`], and every byte is compared where it was to arrive.
    pub fn measure_checked(&mut self, cell: &Cell, limit: Duration) -> Result<Sample, Box<dyn Error>> {
        self.prepare_content(cell)?;
        let sample = self.measure(cell, limit)?;
        self.compare_content(cell)?;
        Ok(sample)
    }

    /// Microseconds of a round trip by a plain socket of each of so many threads, the median. One that is alone polls or is parked,
    /// whichever is faster; several would take the CPUs from each other, and are parked.
    pub fn measure_round_trips(&self, size: usize, threads: usize, count: u64) -> Result<f64, Box<dyn Error>> {
        let port = self.target.location.raw_port;
        let median = |waiting| -> Result<f64, Box<dyn Error>> {
            let mut times = Vec::new();
            std::thread::scope(|scope| {
                let run = || scope.spawn(move || raw::round_trips(port, size, count, waiting));
                let threads: Vec<_> = (0..threads).map(|_| run()).collect();
                threads.into_iter().try_for_each(|thread| {
                    times.extend(thread.join().map_err(|_| "a thread panicked")??);
                    Ok::<(), Box<dyn Error>>(())
                })
            })?;
            Ok(percentile(&mut times, 0.5))
        };
        let parked = median(Waiting::Parked)?;
        Ok(if threads == 1 { parked.min(median(Waiting::Polling)?) } else { parked })
    }

    /// MB/s of a plain socket of each of the cell's threads, about `total` bytes in all, from as many buffers as the cell has.
    pub fn measure_streams(&self, cell: &Cell, total: usize) -> Result<f64, Box<dyn Error>> {
        let memory = &self.arena.bytes()[..self.used(cell)];
        Ok(raw::throughput(self.target.location.raw_port, memory, cell.size, total, cell.threads)?)
    }

    /// Has connections made, and moves for so long; a batch of each thread at least.
    pub fn measure(&mut self, cell: &Cell, limit: Duration) -> Result<Sample, Box<dyn Error>> {
        let work: Vec<Vec<Request>> =
            (0..cell.threads).map(|thread| self.requests(cell.operation, cell.size, cell.batch, thread * cell.batch)).collect();
        // Connections and descriptors are there before anything is timed.
        for requests in &work {
            transfer(&self.engine, requests, cell.waiting)?;
        }
        let (engine, waiting) = (&self.engine, cell.waiting);
        let cpu = process_cpu_time() + self.target.cpu_time()?;
        let start = Instant::now();
        let times: Vec<Result<Vec<f64>, String>> = std::thread::scope(|scope| {
            let threads: Vec<_> = work
                .iter()
                .map(|requests| {
                    scope.spawn(move || {
                        let mut times = Vec::new();
                        while times.is_empty() || start.elapsed() < limit {
                            let begin = Instant::now();
                            transfer(engine, requests, waiting)?;
                            times.push(begin.elapsed().as_secs_f64() * 1e6);
                        }
                        Ok(times)
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err("a thread panicked".to_string()))).collect()
        });
        let elapsed = start.elapsed().as_secs_f64();
        let cpu = process_cpu_time() + self.target.cpu_time()? - cpu;
        let mut times: Vec<f64> = times.into_iter().collect::<Result<Vec<_>, _>>()?.concat();
        let requests = (times.len() * cell.batch) as f64;
        let bytes = requests * cell.size as f64;
        let (p50, p99) = (percentile(&mut times, 0.5), percentile(&mut times, 0.99));
        let rate = bytes / elapsed / 1e6;
        Ok(Sample {
            p50,
            p99,
            rate,
            cpu: cpu.as_secs_f64() / (bytes / f64::from(1 << 30)),
            cpu_of_request: cpu.as_secs_f64() * 1e6 / requests,
            calls: times.len(),
            beside: None,
        })
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.engine.shutdown();
    }
}

/// One batch, all of which must succeed. Whoever polls makes a synchronous call; whoever is parked sleeps until the batch's event.
fn transfer(engine: &Engine, requests: &[Request], waiting: Waiting) -> Result<(), String> {
    let statuses = match waiting {
        Waiting::Polling => engine.transfer(requests, SubmitOptions::default()),
        Waiting::Parked => transfer_parked(engine, requests),
    };
    check_statuses(requests, &statuses.map_err(|error| error.to_string())?)
}

/// An error if a request has failed.
pub fn check_statuses(requests: &[Request], statuses: &[TaskStatus]) -> Result<(), String> {
    if statuses.len() != requests.len() {
        return Err(format!("{} requests have {} results", requests.len(), statuses.len()));
    }
    match statuses.iter().zip(requests).find(|(status, _)| status.state != State::Completed) {
        None => Ok(()),
        Some((status, request)) => {
            let reason = status.error.as_ref().map_or("no reason is given".to_string(), ToString::to_string);
            Err(format!("a {:?} of {} bytes ended as {:?}: {reason}", request.opcode, request.local.length(), status.state))
        }
    }
}

fn transfer_parked(engine: &Engine, requests: &[Request]) -> transfer_engine::Result<Vec<TaskStatus>> {
    let batch = engine.allocate_batch(requests.len())?;
    let event = batch.event_fd()?;
    engine.submit(&batch, requests, None, SubmitOptions::default())?;
    while !batch.is_finished() {
        wait_for_event(event);
    }
    let statuses = (0..requests.len()).filter_map(|task| batch.task_status(task)).collect();
    engine.free_batch(batch.id())?;
    Ok(statuses)
}

fn raw_rows(raw: &BTreeMap<usize, Vec<Raw>>) -> Vec<RawRow> {
    let row = |(size, rounds): (&usize, &Vec<Raw>)| {
        let batches = rounds.first().map(|round| round.rates.keys().copied()).into_iter().flatten();
        RawRow {
            size: *size,
            round_trip_polling_us: Spread::over(rounds, |round| round.polling),
            round_trip_parked_us: Spread::over(rounds, |round| round.parked),
            round_trip_alike_us: Spread::over(rounds, |round| round.alike),
            two_streams: batches
                .map(|batch| StreamsRow { batch, mb_per_s: Spread::over(rounds, |round| round.rates[&batch]) })
                .collect(),
        }
    };
    raw.iter().map(row).collect()
}

/// One figure of each round, if they have it.
fn beside(rounds: &[Sample], figure: impl Fn(&Beside) -> Option<f64>) -> Option<Spread> {
    rounds.iter().map(|round| round.beside.as_ref().and_then(&figure)).collect::<Option<_>>().map(Spread::of)
}

fn rows(cells: &[Cell], samples: &[Vec<Sample>]) -> Vec<Row> {
    let row = |(cell, rounds): (&Cell, &Vec<Sample>)| Row {
        cell: *cell,
        p50_us: Spread::over(rounds, |round| round.p50),
        p99_us: Spread::over(rounds, |round| round.p99),
        mb_per_s: Spread::over(rounds, |round| round.rate),
        cpu_s_per_gib: Spread::over(rounds, |round| round.cpu),
        cpu_us_per_request: Spread::over(rounds, |round| round.cpu_of_request),
        latency_to_raw: beside(rounds, |beside| Some(beside.latency_ratio)).filter(|_| cell.is_single()),
        rate_to_raw: beside(rounds, |beside| Some(beside.rate_ratio)).filter(|_| cell.bytes_at_once() >= FILLS_A_STREAM),
        perftest_mb_per_s: beside(rounds, |beside| beside.perftest),
    };
    cells.iter().zip(samples).map(row).collect()
}

fn text(report: &Report<'_>) -> String {
    let rounds = report.settings.rounds;
    let mut out = report.machine.to_string();
    let ways = match report.settings.transport.protocol {
        Protocol::Tcp => "the loopback interface".to_string(),
        Protocol::Rdma => {
            let names = |transport: &TransportArguments| match transport.devices.as_slice() {
                [] => "all devices".to_string(),
                devices => devices.join(" and "),
            };
            format!("RDMA between {} and {}", names(&report.settings.transport), names(&report.settings.target_transport()))
        }
    };
    out += &format!("\nTwo processes over {ways}; median (smallest..largest) of {rounds} rounds.\n");
    if report.settings.transport.protocol == Protocol::Tcp {
        out += &sockets_text(report);
    } else if report.rows.iter().all(|row| row.perftest_mb_per_s.is_none()) {
        out += "Not beside perftest: it is not installed, or --devices names none.\n";
    }
    out += &engine_text(report);
    out += "\nEvery byte was compared where it arrived, in the first round.\n";
    out += &noise(report.fixed_work_ms);
    out
}

fn sockets_text(report: &Report<'_>) -> String {
    let mut out = "\n".to_string();
    out += &output::paragraph(
        "Plain sockets: a message there and a byte back, the client polling or parked; and the same by the system calls that the engine \
         makes for a write, polling",
    );
    out += &format!("\n{:>8} {:>23} {:>23} {:>23}\n", "size", "polling, us", "parked, us", "engine's calls, us");
    for row in &report.raw {
        let size = output::bytes(row.size as u64);
        let (polling, parked, alike) = (row.round_trip_polling_us, row.round_trip_parked_us, row.round_trip_alike_us);
        out += &format!("{size:>8} {polling:>23} {parked:>23} {alike:>23}\n");
    }
    out += "\nPlain sockets: two streams of messages from and to as many buffers as the engine's\n\n";
    out += &format!("{:>8} {:>7} {:>23}\n", "size", "buffers", "MB/s");
    for (row, streams) in report.raw.iter().flat_map(|row| row.two_streams.iter().map(move |streams| (row, streams))) {
        out += &format!("{:>8} {:>7} {:>23}\n", output::bytes(row.size as u64), streams.batch, streams.mb_per_s);
    }
    out
}

fn engine_text(report: &Report<'_>) -> String {
    let ratio = |ratio: Option<Spread>| ratio.map_or(String::new(), |ratio| ratio.to_string());
    let mut out = "\n".to_string();
    let (plain_latency, plain_rate) = match report.settings.transport.protocol {
        Protocol::Tcp => (
            "that of a plain round trip of the same size in the same round: for whoever polls the faster one, else the parked one",
            "that of the plain streams in the same round",
        ),
        Protocol::Rdma => (
            "what perftest's ib_read_bw or ib_write_bw takes for a message in the same round, with one under way, polling",
            "that of perftest with as many requests under way, in the same round",
        ),
    };
    out += &output::paragraph(&format!(
        "Engine, one request at a time. Polling: a synchronous call, which polls for 50 us before it sleeps; parked: asleep until the \
         batch's event. Latency; processor time of both processes for a request; latency / {plain_latency} (below 1 is better)."
    ));
    out += &format!(
        "\n{:<5} {:>7} {:<7} {:>23} {:>7} {:>19} {:>7} {:>17}\n",
        "", "size", "waiting", "p50, us", "p99, us", "MB/s", "CPU, us", "latency ratio"
    );
    for row in report.rows.iter().filter(|row| row.cell.is_single()) {
        let line = format!(
            "{:<5} {:>7} {:<7} {:>23} {:>7.0} {:>19} {:>7.0} {:>17}",
            row.cell.operation,
            output::bytes(row.cell.size as u64),
            row.cell.waiting,
            row.p50_us,
            row.p99_us.median,
            row.mb_per_s,
            row.cpu_us_per_request.median,
            ratio(row.latency_to_raw)
        );
        out += &format!("{}\n", line.trim_end());
    }
    let mut streams = report.rows.iter().filter(|row| !row.cell.is_single()).peekable();
    if streams.peek().is_some() {
        out.push('\n');
        out += &output::paragraph(&format!(
            "Engine, by requests in a batch and threads that submit: latency of a whole batch; rate; processor time of both processes; rate \
             / {plain_rate} (above 1 is better)."
        ));
        out += &format!(
            "\n{:<5} {:>7} {:>5} {:>3} {:>23} {:>7} {:>19} {:>7} {:>17}\n",
            "", "size", "batch", "thr", "p50, us", "p99, us", "MB/s", "s/GiB", "rate ratio"
        );
    }
    for row in streams {
        let cpu = row.cpu_s_per_gib.median;
        let line = format!(
            "{:<5} {:>7} {:>5} {:>3} {:>23} {:>7.0} {:>19} {:>7} {:>17}",
            row.cell.operation,
            output::bytes(row.cell.size as u64),
            row.cell.batch,
            row.cell.threads,
            row.p50_us,
            row.p99_us.median,
            row.mb_per_s,
            if cpu < 100.0 { format!("{cpu:.2}") } else { format!("{cpu:.0}") },
            ratio(row.rate_to_raw)
        );
        out += &format!("{}\n", line.trim_end());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_that_differs_is_an_error_that_names_side_and_place() {
        let cell = |operation| Cell { operation, size: 4096, batch: 32, threads: 2, waiting: Waiting::Polling };
        assert_eq!(judge_content(&cell(Operation::Read), 4096, None), Ok(()));
        let text = judge_content(&cell(Operation::Write), 8192, Some(4096)).unwrap_err();
        assert!(text.contains("WRONG CONTENT: after writes of 4096 bytes") && text.contains("of the target differs"), "{text}");
        assert!(text.ends_with("at offset 4096 of 8192"), "{text}");
        assert!(judge_content(&cell(Operation::Read), 8192, Some(0)).unwrap_err().contains("of this process differs"));
    }
}
