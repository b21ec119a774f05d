//! `te bench register`: whether registering stays as cheap with many regions as with few.
//!
//! One engine. Regions are registered one by one up to each number of the sweep; there, each round registers and unregisters some
//! more one by one, and then a batch.

use std::error::Error;
use std::path::PathBuf;
use std::time::Instant;

use serde::Serialize;
use transfer_engine::engine::Engine;
use transfer_engine::sys::MemoryRange;

use super::statistics::Spread;
use super::{create_engine, memory_options, parse_size, write_json};
use crate::output;
use crate::system::{Arena, process_cpu_time};

/// Arguments of `te bench register`.
#[derive(clap::Args, Serialize)]
pub struct Arguments {
    /// Numbers of regions that are registered beforehand, ascending.
    #[arg(long, value_delimiter = ',', default_values_t = [256, 1024, 4096, 8192, 16384, 65536])]
    regions: Vec<usize>,
    /// Size of a region.
    #[arg(long, value_parser = parse_size, default_value = "4K")]
    size: usize,
    /// Distance from the start of one region to that of the next; the regions touch where it equals the size.
    #[arg(long, value_parser = parse_size, default_value = "8K")]
    stride: usize,
    /// Regions that are registered and unregistered one by one in a round.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    calls: u32,
    /// Regions of the batch in a round.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// Rounds at each number of regions.
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// File that takes all figures.
    #[arg(long)]
    json: Option<PathBuf>,
}

/// Nanoseconds per region, on the clock and of the processor.
#[derive(Clone, Copy, Serialize)]
struct Cost {
    wall: Spread,
    cpu: Spread,
}

#[derive(Serialize)]
struct Row {
    regions: usize,
    register: Cost,
    unregister: Cost,
    batch_register: Cost,
    batch_unregister: Cost,
}

/// How [`Row`]'s figures are called, in their order.
const OPERATIONS: [&str; 4] = ["register", "unregister", "batch register", "batch unregister"];

impl Row {
    fn costs(&self) -> [Cost; 4] {
        [self.register, self.unregister, self.batch_register, self.batch_unregister]
    }
}

#[derive(Serialize)]
struct Report<'a> {
    settings: &'a Arguments,
    unit: &'static str,
    rows: Vec<Row>,
    /// Median cost of the processor at the most regions, divided by that at the fewest, for each operation.
    growth: Vec<(&'static str, f64)>,
}

/// Runs `te bench register`.
pub fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    if arguments.stride < arguments.size {
        return Err(format!("regions of {} bytes overlap at a stride of {}", arguments.size, arguments.stride).into());
    }
    if arguments.regions.is_empty() || !arguments.regions.is_sorted() {
        return Err("--regions must be ascending".into());
    }
    let most = arguments.regions[arguments.regions.len() - 1];
    let extra = arguments.calls.max(arguments.batch) as usize;
    let length = (most + extra).checked_mul(arguments.stride).ok_or("so many regions do not fit into the address space")?;
    let arena = Arena::new(length).map_err(|error| format!("cannot map {} of memory: {error}", output::bytes(length as u64)))?;
    let range = |index: usize| arena.range(index * arguments.stride, arguments.size);

    let engine = create_engine()?;
    let mut rows = Vec::new();
    let mut present = 0;
    output::print(&format!("ns per region, median (smallest..largest) of {} rounds\n\n", arguments.rounds))?;
    output::print(&format!("{:>8}  {:<17}{:>24}{:>24}\n", "regions", "operation", "clock", "processor"))?;
    for regions in arguments.regions.iter().copied() {
        eprintln!("registering up to {regions} regions");
        for index in present..regions {
            engine.register(range(index), &memory_options())?;
        }
        present = regions;
        check(&engine, (0..regions).step_by(regions.div_ceil(256).max(1)).map(range))?;
        let more: Vec<MemoryRange> = (regions..regions + extra).map(range).collect();
        let row = measure(&engine, regions, &more, arguments)?;
        for (name, cost) in OPERATIONS.iter().zip(row.costs()) {
            output::print(&format!("{regions:>8}  {name:<17}{:>24}{:>24}\n", cost.wall, cost.cpu))?;
        }
        rows.push(row);
    }

    let (first, last) = (rows[0].costs(), rows[rows.len() - 1].costs());
    let ratio = |operation: usize| (OPERATIONS[operation], last[operation].cpu.median / first[operation].cpu.median);
    let growth: Vec<_> = (0..OPERATIONS.len()).map(ratio).collect();
    let shown: Vec<String> = growth.iter().map(|(name, ratio)| format!("{name} {ratio:.2}")).collect();
    output::print(&format!("\nprocessor time at {most} / at {} regions: {}\n", arguments.regions[0], shown.join(", ")))?;
    write_json(arguments.json.as_deref(), &Report { settings: arguments, unit: "ns per region", rows, growth })?;
    engine.shutdown();
    Ok(())
}

/// Looks regions up, so that what is timed is known to have worked.
fn check(engine: &Engine, ranges: impl Iterator<Item = MemoryRange>) -> Result<(), Box<dyn Error>> {
    for range in ranges {
        let found = engine.find_region(range.address()).map(|region| (region.address, region.length));
        if found != Some((range.address(), range.length())) {
            return Err(format!("the region at {:#x} was registered, and looking it up gives {found:?}", range.address()).into());
        }
    }
    Ok(())
}

fn measure(engine: &Engine, regions: usize, more: &[MemoryRange], arguments: &Arguments) -> Result<Row, Box<dyn Error>> {
    let options = memory_options();
    let (single, batch) = (&more[..arguments.calls as usize], &more[..arguments.batch as usize]);
    let addresses: Vec<u64> = batch.iter().map(MemoryRange::address).collect();
    let mut samples: [Vec<(f64, f64)>; 4] = Default::default();
    for _ in 0..arguments.rounds {
        samples[0].push(time(single.len(), || single.iter().try_for_each(|range| engine.register(*range, &options)))?);
        check(engine, single.iter().copied())?;
        samples[1].push(time(single.len(), || single.iter().try_for_each(|range| engine.unregister(range.address())))?);
        samples[2].push(time(batch.len(), || engine.register_batch(batch, &options))?);
        check(engine, batch.iter().copied())?;
        samples[3].push(time(batch.len(), || engine.unregister_batch(&addresses))?);
        if let Some(left) = more.iter().find_map(|range| engine.find_region(range.address())) {
            return Err(format!("the region at {:#x} was unregistered and is still there", left.address).into());
        }
    }
    let [register, unregister, batch_register, batch_unregister] =
        samples.map(|rounds| Cost { wall: Spread::over(&rounds, |round| round.0), cpu: Spread::over(&rounds, |round| round.1) });
    Ok(Row { regions, register, unregister, batch_register, batch_unregister })
}

/// Nanoseconds per item on the clock and of the processor.
fn time(items: usize, work: impl FnOnce() -> transfer_engine::Result<()>) -> transfer_engine::Result<(f64, f64)> {
    let (clock, cpu) = (Instant::now(), process_cpu_time());
    work()?;
    let (clock, cpu) = (clock.elapsed(), process_cpu_time() - cpu);
    Ok((clock.as_nanos() as f64 / items as f64, cpu.as_nanos() as f64 / items as f64))
}
