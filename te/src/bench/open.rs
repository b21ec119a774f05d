//! `te bench open`: how long it takes to open the segment of a peer with many regions, and to move the first bytes.
//!
//! One target process for each number of regions. In each round a new engine opens each of them, after the target has replaced one of
//! its regions, so that nothing is answered from what is left of the round before. The first transfer connects; one more shows what a
//! transfer costs after that.

use std::error::Error;
use std::time::Instant;

use serde::Serialize;
use transfer_engine::engine::Engine;
use transfer_engine::transfer::{Hints, Request, State, SubmitOptions};
use transfer_engine::transport::Opcode;

use super::machine::{Machine, noise, time_fixed_work};
use super::statistics::Spread;
use super::target::Target;
use super::{TransportArguments, create_engine, parse_size, print_report};
use crate::output;
use crate::system::Arena;

/// Arguments of `te bench open`.
#[derive(clap::Args, Serialize)]
pub struct Arguments {
    /// Few figures within seconds: other defaults for --regions and --rounds.
    #[arg(long)]
    quick: bool,
    /// Numbers of regions that the peer has registered.
    #[arg(long, value_delimiter = ',', default_value = "256,8192,65536")]
    #[arg(default_value_if("quick", "true", "256,8192"))]
    regions: Vec<usize>,
    /// Size of a region.
    #[arg(long, value_parser = parse_size, default_value = "4K")]
    size: usize,
    /// Rounds.
    #[arg(long, default_value = "15", value_parser = clap::value_parser!(u32).range(1..))]
    #[arg(default_value_if("quick", "true", "5"))]
    rounds: u32,
    /// Print all figures as JSON instead of tables.
    #[arg(long)]
    json: bool,
}

/// Milliseconds of one round.
#[derive(Clone, Copy)]
struct Sample {
    open: f64,
    first: f64,
    second: f64,
}

#[derive(Serialize)]
struct Row {
    regions: usize,
    open_ms: Spread,
    first_transfer_ms: Spread,
    both_ms: Spread,
    second_transfer_ms: Spread,
}

#[derive(Serialize)]
struct Report<'a> {
    machine: Machine,
    settings: &'a Arguments,
    fixed_work_ms: Spread,
    rows: Vec<Row>,
}

/// Runs `te bench open`.
pub fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    if arguments.regions.is_empty() || arguments.regions.contains(&0) {
        return Err("--regions must name numbers of at least 1".into());
    }
    let machine = Machine::look();
    let mut targets = Vec::new();
    for regions in arguments.regions.iter().copied() {
        eprintln!("starting a target with {regions} regions");
        let memory = regions.checked_mul(arguments.size).ok_or("so many regions of that size fill more than all memory")?;
        targets.push(Target::start(memory, arguments.size, &TransportArguments::tcp())?);
    }
    let mut samples: Vec<Vec<Sample>> = targets.iter().map(|_| Vec::new()).collect();
    let mut fixed_work = Vec::new();
    for round in 1..=arguments.rounds {
        eprintln!("round {round} of {}", arguments.rounds);
        for (target, samples) in targets.iter_mut().zip(&mut samples) {
            fixed_work.push(time_fixed_work());
            target.replace_region()?;
            samples.push(measure(target, arguments)?);
        }
    }
    let row = |(regions, rounds): (&usize, &Vec<Sample>)| Row {
        regions: *regions,
        open_ms: Spread::over(rounds, |round| round.open),
        first_transfer_ms: Spread::over(rounds, |round| round.first),
        both_ms: Spread::over(rounds, |round| round.open + round.first),
        second_transfer_ms: Spread::over(rounds, |round| round.second),
    };
    let rows = arguments.regions.iter().zip(&samples).map(row).collect();
    print_report(arguments.json, &Report { machine, settings: arguments, fixed_work_ms: Spread::of(fixed_work), rows }, text)
}

fn measure(target: &Target, arguments: &Arguments) -> Result<Sample, Box<dyn Error>> {
    let engine = create_engine()?;
    let mut arena = Arena::new(arguments.size)?;
    arena.bytes_mut().fill(1);
    let start = Instant::now();
    let segment = engine.open_segment(&target.location.segment)?;
    let open = start.elapsed();
    let request = Request {
        opcode: Opcode::Write,
        local: arena.range(0, arguments.size.min(64)),
        segment,
        remote_address: target.location.address,
        hints: Hints::default(),
    };
    let start = Instant::now();
    transfer(&engine, request)?;
    let first = start.elapsed();
    let start = Instant::now();
    transfer(&engine, request)?;
    let second = start.elapsed();
    engine.shutdown();
    Ok(Sample { open: open.as_secs_f64() * 1e3, first: first.as_secs_f64() * 1e3, second: second.as_secs_f64() * 1e3 })
}

fn transfer(engine: &Engine, request: Request) -> Result<(), Box<dyn Error>> {
    let statuses = engine.transfer(&[request], SubmitOptions::default())?;
    match statuses.iter().all(|status| status.state == State::Completed) {
        true => Ok(()),
        false => Err("a transfer to the first region has failed; the reason is above".into()),
    }
}

fn text(report: &Report<'_>) -> String {
    let mut out = report.machine.to_string();
    out.push('\n');
    out += &output::paragraph(&format!(
        "A new engine opens the segment of a process with so many regions, and writes 64 bytes into one, twice. Milliseconds; median \
         (smallest..largest) of {} rounds.",
        report.settings.rounds
    ));
    out += &format!("\n{:>7} {:>20} {:>20} {:>20} {:>20}\n", "regions", "open", "first transfer", "both", "second transfer");
    for row in &report.rows {
        out += &format!(
            "{:>7} {:>20} {:>20} {:>20} {:>20}\n",
            row.regions, row.open_ms, row.first_transfer_ms, row.both_ms, row.second_transfer_ms
        );
    }
    out.push('\n');
    out += &noise(report.fixed_work_ms);
    out
}
