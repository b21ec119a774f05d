//! `te bench transfer`: two processes on this machine, beside plain sockets between the same two.
//!
//! In each round every cell is measured once, and before the cells the plain sockets, so that a neighbour on the machine hits all
//! alike; ratios are formed round by round.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use serde::Serialize;
use transfer_engine::engine::Engine;
use transfer_engine::transfer::{Request, State, SubmitOptions};
use transfer_engine::transport::Opcode;

use super::raw::{self, Waiting};
use super::statistics::{Spread, percentile};
use super::target::Target;
use super::{create_engine, fill, find_difference, memory_options, parse_size, write_json};
use crate::output;
use crate::system::{Arena, process_cpu_time};

/// Arguments of `te bench transfer`.
#[derive(clap::Args, Serialize)]
pub struct Arguments {
    /// Sizes of a request.
    #[arg(long, value_delimiter = ',', value_parser = parse_size, default_value = "64,4K,64K,1M,16M")]
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
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// How long a cell is measured in a round, in milliseconds.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..))]
    milliseconds: u64,
    /// Memory of each side; requests beyond it use the same places again.
    #[arg(long, value_parser = parse_size, default_value = "512M")]
    memory: usize,
    /// File that takes all figures.
    #[arg(long)]
    json: Option<PathBuf>,
}

/// A direction, seen from the process that submits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Operation {
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

#[derive(Clone, Copy, Debug, Serialize)]
struct Cell {
    operation: Operation,
    size: usize,
    batch: usize,
    threads: usize,
}

/// What one round of a cell gave.
struct Sample {
    p50: f64,
    p99: f64,
    rate: f64,
    cpu: f64,
    /// Median latency, divided by that of a plain round trip of the same size.
    latency_ratio: f64,
    /// Rate, divided by that of two plain streams with messages of the same size.
    rate_ratio: f64,
}

/// Plain sockets in one round, for one size.
#[derive(Clone, Copy)]
struct Raw {
    polling: f64,
    parked: f64,
    rate: f64,
}

#[derive(Serialize)]
struct RawRow {
    size: usize,
    round_trip_polling_us: Spread,
    round_trip_parked_us: Spread,
    two_streams_mb_per_s: Spread,
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
    /// Median latency / plain round trip that is parked; for single requests on one thread.
    latency_to_raw: Option<Spread>,
    rate_to_raw: Spread,
}

#[derive(Serialize)]
struct Report<'a> {
    settings: &'a Arguments,
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
    let mut bench = Bench::start(arguments.memory)?;
    for size in arguments.sizes.iter().copied() {
        eprintln!("checking content, {}", output::bytes(size as u64));
        bench.check(size)?;
    }
    let cells = cells(arguments);
    let mut raw: BTreeMap<usize, Vec<Raw>> = BTreeMap::new();
    let mut samples: Vec<Vec<Sample>> = cells.iter().map(|_| Vec::new()).collect();
    let limit = Duration::from_millis(arguments.milliseconds);
    for round in 1..=arguments.rounds {
        eprintln!("round {round} of {}", arguments.rounds);
        for size in arguments.sizes.iter().copied() {
            raw.entry(size).or_default().push(bench.measure_raw(size)?);
        }
        for (cell, samples) in cells.iter().zip(&mut samples) {
            let beside = raw[&cell.size][round as usize - 1];
            samples.push(bench.measure(cell, limit, beside)?);
        }
    }
    let report = Report { settings: arguments, raw: raw_rows(&raw), rows: rows(&cells, &samples) };
    output::print(&text(&report))?;
    write_json(arguments.json.as_deref(), &report)?;
    bench.engine.shutdown();
    Ok(())
}

fn cells(arguments: &Arguments) -> Vec<Cell> {
    let mut cells = Vec::new();
    for operation in arguments.operations.iter().copied() {
        for size in arguments.sizes.iter().copied() {
            for batch in arguments.batches.iter().copied() {
                cells.extend(arguments.threads.iter().map(|&threads| Cell { operation, size, batch, threads }));
            }
        }
    }
    cells
}

/// The two processes.
struct Bench {
    engine: std::sync::Arc<Engine>,
    target: Target,
    segment: u64,
    arena: Arena,
    memory: usize,
}

impl Bench {
    fn start(memory: usize) -> Result<Bench, Box<dyn Error>> {
        eprintln!("starting the target");
        let target = Target::start(memory)?;
        let mut arena = Arena::new(memory)?;
        // Pages are there before anything is timed.
        fill(arena.bytes_mut(), 0);
        let engine = create_engine()?;
        engine.register(arena.range(0, memory), &memory_options())?;
        let segment = engine.open_segment(&target.location.segment)?;
        Ok(Bench { engine, target, segment, arena, memory })
    }

    /// Writes and reads one request, and compares every byte on the side where it arrives.
    fn check(&mut self, size: usize) -> Result<(), Box<dyn Error>> {
        fill(&mut self.arena.bytes_mut()[..size], size as u64);
        self.target.fill(size, !0)?;
        transfer(&self.engine, &self.requests(Operation::Write, size, 1, 0))?;
        let wrong = self.target.find_difference(size, size as u64)?;
        if let Some(offset) = wrong {
            return Err(format!("after a write of {size} bytes the target differs at {offset}").into());
        }
        let seed = size as u64 + 1;
        self.target.fill(size, seed)?;
        transfer(&self.engine, &self.requests(Operation::Read, size, 1, 0))?;
        if let Some(offset) = find_difference(&self.arena.bytes()[..size], seed) {
            return Err(format!("after a read of {size} bytes the own memory differs at {offset}").into());
        }
        Ok(())
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
            }
        };
        (0..batch).map(request).collect()
    }

    fn measure_raw(&self, size: usize) -> Result<Raw, Box<dyn Error>> {
        let port = self.target.location.raw_port;
        // Some 64 MiB a way of waiting, so that a round stays short.
        let count = ((64 << 20) / size).clamp(8, 2000) as u64;
        let median = |waiting| Ok::<f64, Box<dyn Error>>(percentile(&mut raw::round_trips(port, size, count, waiting)?, 0.5));
        let total = (size * 20_000).clamp(64 << 20, 512 << 20);
        let total = if size < 4096 { size * 100_000 } else { total };
        Ok(Raw {
            polling: median(Waiting::Polling)?,
            parked: median(Waiting::Parked)?,
            rate: raw::throughput(port, size, total, 2)?,
        })
    }

    fn measure(&mut self, cell: &Cell, limit: Duration, raw: Raw) -> Result<Sample, Box<dyn Error>> {
        let work: Vec<Vec<Request>> =
            (0..cell.threads).map(|thread| self.requests(cell.operation, cell.size, cell.batch, thread * cell.batch)).collect();
        // Connections and descriptors are there before anything is timed.
        for requests in &work {
            transfer(&self.engine, requests)?;
        }
        let engine = &self.engine;
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
                            transfer(engine, requests)?;
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
        let bytes = (times.len() * cell.batch * cell.size) as f64;
        let (p50, p99) = (percentile(&mut times, 0.5), percentile(&mut times, 0.99));
        let rate = bytes / elapsed / 1e6;
        Ok(Sample {
            p50,
            p99,
            rate,
            cpu: cpu.as_secs_f64() / (bytes / f64::from(1 << 30)),
            latency_ratio: p50 / raw.parked,
            rate_ratio: rate / raw.rate,
        })
    }
}

/// One synchronous batch, all of which must succeed.
fn transfer(engine: &Engine, requests: &[Request]) -> Result<(), String> {
    let statuses = engine.transfer(requests, SubmitOptions::default()).map_err(|error| error.to_string())?;
    match statuses.iter().zip(requests).find(|(status, _)| status.state != State::Completed) {
        None => Ok(()),
        Some((status, request)) => {
            let reason = status.error.as_ref().map_or("no reason is given".to_string(), ToString::to_string);
            Err(format!("a {:?} of {} bytes ended as {:?}: {reason}", request.opcode, request.local.length(), status.state))
        }
    }
}

fn raw_rows(raw: &BTreeMap<usize, Vec<Raw>>) -> Vec<RawRow> {
    let row = |(size, rounds): (&usize, &Vec<Raw>)| RawRow {
        size: *size,
        round_trip_polling_us: Spread::over(rounds, |round| round.polling),
        round_trip_parked_us: Spread::over(rounds, |round| round.parked),
        two_streams_mb_per_s: Spread::over(rounds, |round| round.rate),
    };
    raw.iter().map(row).collect()
}

fn rows(cells: &[Cell], samples: &[Vec<Sample>]) -> Vec<Row> {
    let row = |(cell, rounds): (&Cell, &Vec<Sample>)| Row {
        cell: *cell,
        p50_us: Spread::over(rounds, |round| round.p50),
        p99_us: Spread::over(rounds, |round| round.p99),
        mb_per_s: Spread::over(rounds, |round| round.rate),
        cpu_s_per_gib: Spread::over(rounds, |round| round.cpu),
        latency_to_raw: (cell.batch == 1 && cell.threads == 1).then(|| Spread::over(rounds, |round| round.latency_ratio)),
        rate_to_raw: Spread::over(rounds, |round| round.rate_ratio),
    };
    cells.iter().zip(samples).map(row).collect()
}

fn text(report: &Report<'_>) -> String {
    let rounds = report.settings.rounds;
    let mut out = format!("Plain sockets, median (smallest..largest) of {rounds} rounds\n\n");
    out += &format!("{:>8}{:>26}{:>26}{:>26}\n", "size", "round trip polling, us", "parked, us", "two streams, MB/s");
    for row in &report.raw {
        let size = output::bytes(row.size as u64);
        let (polling, parked) = (row.round_trip_polling_us, row.round_trip_parked_us);
        out += &format!("{size:>8}{polling:>26}{parked:>26}{:>26}\n", row.two_streams_mb_per_s);
    }
    out += "\nEngine: latency of a whole batch; CPU of both processes; ratios to the parked round trip (below 1 is better) and to the\n\
            two streams (above 1 is better) of the same size\n\n";
    out += &format!(
        "{:<6}{:>8}{:>6}{:>8}{:>24}{:>9}{:>22}{:>8}{:>9}{:>8}\n",
        "", "size", "batch", "threads", "p50, us", "p99, us", "MB/s", "s/GiB", "latency", "rate"
    );
    for row in &report.rows {
        let latency = row.latency_to_raw.map_or(String::new(), |ratio| format!("{:.2}", ratio.median));
        out += &format!(
            "{:<6}{:>8}{:>6}{:>8}{:>24}{:>9.0}{:>22}{:>8.2}{latency:>9}{:>8.2}\n",
            row.cell.operation,
            output::bytes(row.cell.size as u64),
            row.cell.batch,
            row.cell.threads,
            row.p50_us,
            row.p99_us.median,
            row.mb_per_s,
            row.cpu_s_per_gib.median,
            row.rate_to_raw.median
        );
    }
    out
}
