//! `te bench register`: whether registering stays as cheap with many regions as with few.
//!
//! One engine for each number of regions of the sweep. In each round every engine registers and unregisters some more regions one by
//! one and then as a batch, so that a neighbour on the machine hits all alike; ratios are formed round by round. Beside each engine
//! lies an ordered map with as many entries, behind a lock and with the same check for overlaps: what keeping ranges costs at least.

use std::collections::BTreeMap;
use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use serde::Serialize;
use transfer_engine::engine::Engine;
use transfer_engine::sys::MemoryRange;

#[cfg(feature = "rdma")]
use super::device;
use super::machine::{Machine, noise, time_fixed_work};
use super::rings::Pin;
use super::statistics::Spread;
use super::{create_engine, memory_options, parse_size, print_report};
use super::{model, pin, publish};
use crate::output;
use crate::system::{Arena, process_cpu_time};

/// Arguments of `te bench register`.
#[derive(clap::Args, Serialize)]
pub struct Arguments {
    /// Few figures within seconds: other defaults for what takes long.
    #[arg(long)]
    quick: bool,
    /// Numbers of regions that are registered beforehand, ascending.
    #[arg(long, value_delimiter = ',', default_value = "256,1024,4096,8192,16384,65536")]
    #[arg(default_value_if("quick", "true", "256,8192"))]
    regions: Vec<usize>,
    /// Size of a region.
    #[arg(long, value_parser = parse_size, default_value = "4K")]
    size: usize,
    /// Distance from the start of one region to that of the next; the regions touch where it equals the size.
    #[arg(long, value_parser = parse_size, default_value = "8K")]
    stride: usize,
    /// Regions that are registered and unregistered one by one in a round.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    calls: u32,
    /// Regions of the batch in a round.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// Rounds.
    #[arg(long, default_value = "15", value_parser = clap::value_parser!(u32).range(1..))]
    #[arg(default_value_if("quick", "true", "5"))]
    rounds: u32,
    /// Measure instead how memory is registered with several devices, which this stands for.
    #[arg(long, value_enum)]
    pin: Option<Pin>,
    /// Tell instead what 500 GB would take with 8 NICs, by what pages cost here, beside what a report says of it.
    #[arg(long, conflicts_with = "pin")]
    model: bool,
    #[command(flatten)]
    pinning: pin::Arguments,
    /// Register with these RDMA devices, beside the verbs alone.
    #[cfg(feature = "rdma")]
    #[arg(long, value_delimiter = ',', conflicts_with_all = ["pin", "model", "metadata", "batch"])]
    device: Vec<String>,
    /// Measure instead what it costs to tell a metadata server of memory: its URI, or `start` for one that is started and ended again.
    #[arg(long, value_name = "URI|start", conflicts_with_all = ["pin", "model"])]
    metadata: Option<String>,
    #[command(flatten)]
    publishing: publish::Arguments,
    /// Print all figures as JSON instead of tables.
    #[arg(long)]
    json: bool,
}

/// What is measured of each engine, in this order.
const OPERATIONS: [&str; 6] =
    ["register", "unregister", "batch register", "batch unregister", "ordered map, insert", "ordered map, remove"];

/// Nanoseconds per region.
#[derive(Clone, Copy)]
struct Cost {
    clock: f64,
    processor: f64,
}

/// One operation at one number of regions.
#[derive(Serialize)]
struct Row {
    operation: &'static str,
    regions: usize,
    clock_ns: Spread,
    processor_ns: Spread,
    /// Processor time, divided by that at the fewest regions in the same round.
    growth: Spread,
}

#[derive(Serialize)]
struct Report<'a> {
    machine: Machine,
    settings: &'a Arguments,
    fixed_work_ms: Spread,
    rows: Vec<Row>,
}

/// Runs `te bench register`.
pub fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    if arguments.model {
        return model::run(arguments.quick, arguments.json);
    }
    if arguments.pin.is_some() {
        return pin::run(&arguments.pinning, arguments.json);
    }
    if let Some(metadata) = &arguments.metadata {
        return publish::run(metadata, &arguments.publishing, arguments.json);
    }
    if arguments.stride < arguments.size {
        return Err(format!("regions of {} bytes overlap at a stride of {}", arguments.size, arguments.stride).into());
    }
    if !arguments.regions.is_sorted_by(|one, next| one < next) {
        return Err("--regions must be ascending".into());
    }
    #[cfg(feature = "rdma")]
    if !arguments.device.is_empty() {
        let Arguments { device: devices, regions, size, stride, calls, rounds, .. } = arguments;
        let settings = device::Settings { devices, regions, size: *size, stride: *stride, calls: *calls as usize, rounds: *rounds };
        return device::run(&settings, arguments.json);
    }
    let most = *arguments.regions.last().ok_or("--regions names none")?;
    let extra = arguments.calls.max(arguments.batch) as usize;
    let length = most.checked_add(extra).and_then(|regions| regions.checked_mul(arguments.stride));
    let length = length.ok_or("so many regions do not fit into the address space")?;
    let arena = Arena::new(length).map_err(|error| format!("cannot map {} of memory: {error}", output::bytes(length as u64)))?;
    let ranges: Vec<MemoryRange> = (0..most + extra).map(|index| arena.range(index * arguments.stride, arguments.size)).collect();

    let machine = Machine::look();
    let mut subjects = Vec::new();
    for regions in arguments.regions.iter().copied() {
        eprintln!("registering {regions} regions");
        subjects.push(Subject::new(&ranges[..regions], &ranges[regions..regions + extra])?);
    }
    // The first calls of all find nothing in the caches.
    subjects.iter().try_for_each(|subject| subject.measure(arguments).map(drop))?;
    // For each round, for each number of regions, for each operation.
    let mut rounds: Vec<Vec<[Cost; OPERATIONS.len()]>> = Vec::new();
    let mut fixed_work = Vec::new();
    for round in 1..=arguments.rounds {
        eprintln!("round {round} of {}", arguments.rounds);
        // Whoever comes first in a round finds colder caches than the others: each in turn.
        let mut costs = vec![[Cost { clock: 0.0, processor: 0.0 }; OPERATIONS.len()]; subjects.len()];
        for position in 0..subjects.len() {
            fixed_work.push(time_fixed_work());
            let subject = (position + round as usize) % subjects.len();
            costs[subject] = subjects[subject].measure(arguments)?;
        }
        rounds.push(costs);
    }
    let report = Report { machine, settings: arguments, fixed_work_ms: Spread::of(fixed_work), rows: rows(arguments, &rounds) };
    print_report(arguments.json, &report, text)?;
    subjects.iter().for_each(|subject| subject.engine.shutdown());
    Ok(())
}

/// An engine with some regions, and a map with as many entries.
struct Subject<'a> {
    engine: Arc<Engine>,
    map: OrderedMap,
    /// What is registered and unregistered again.
    more: &'a [MemoryRange],
}

impl<'a> Subject<'a> {
    fn new(present: &[MemoryRange], more: &'a [MemoryRange]) -> Result<Subject<'a>, Box<dyn Error>> {
        let subject = Subject { engine: create_engine()?, map: OrderedMap::default(), more };
        for range in present {
            subject.engine.register(*range, &memory_options())?;
            subject.map.insert(*range)?;
        }
        check_present(&subject.engine, present)?;
        Ok(subject)
    }

    fn measure(&self, arguments: &Arguments) -> Result<[Cost; OPERATIONS.len()], Box<dyn Error>> {
        let (engine, map, options) = (&self.engine, &self.map, memory_options());
        let (single, batch) = (&self.more[..arguments.calls as usize], &self.more[..arguments.batch as usize]);
        let addresses: Vec<u64> = batch.iter().map(MemoryRange::address).collect();

        let register = time(single.len(), || single.iter().try_for_each(|range| engine.register(*range, &options)))?;
        check_present(engine, single)?;
        let unregister = time(single.len(), || single.iter().try_for_each(|range| engine.unregister(range.address())))?;
        check_absent(engine, single)?;
        let batch_register = time(batch.len(), || engine.register_batch(batch, &options))?;
        check_present(engine, batch)?;
        let batch_unregister = time(batch.len(), || engine.unregister_batch(&addresses))?;
        check_absent(engine, batch)?;
        let insert = time(single.len(), || single.iter().try_for_each(|range| map.insert(*range)))?;
        let remove = time(single.len(), || single.iter().try_for_each(|range| map.remove(range.address())))?;
        Ok([register, unregister, batch_register, batch_unregister, insert, remove])
    }
}

/// Ranges by their start: the length of each.
#[derive(Default)]
struct OrderedMap(Mutex<BTreeMap<u64, u64>>);

impl OrderedMap {
    fn insert(&self, range: MemoryRange) -> Result<(), String> {
        let mut map = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = map.range(..range.address() + range.length()).next_back();
        if before.is_some_and(|(start, length)| start + length > range.address()) {
            return Err(format!("the range at {:#x} overlaps another one", range.address()));
        }
        map.insert(range.address(), range.length());
        Ok(())
    }

    fn remove(&self, address: u64) -> Result<(), String> {
        let removed = self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&address);
        removed.map(drop).ok_or_else(|| format!("no range starts at {address:#x}"))
    }
}

/// Looks regions up, so that what is timed is known to have worked.
pub(super) fn check_present(engine: &Engine, ranges: &[MemoryRange]) -> Result<(), String> {
    for range in ranges {
        let found = engine.find_region(range.address()).map(|region| (region.address, region.length));
        if found != Some((range.address(), range.length())) {
            return Err(format!("the region at {:#x} was registered, and looking it up gives {found:?}", range.address()));
        }
    }
    Ok(())
}

pub(super) fn check_absent(engine: &Engine, ranges: &[MemoryRange]) -> Result<(), String> {
    match ranges.iter().find_map(|range| engine.find_region(range.address())) {
        Some(left) => Err(format!("the region at {:#x} was unregistered and is still there", left.address)),
        None => Ok(()),
    }
}

fn time<E>(items: usize, work: impl FnOnce() -> Result<(), E>) -> Result<Cost, E> {
    let (clock, processor) = (Instant::now(), process_cpu_time());
    work()?;
    let (clock, processor) = (clock.elapsed(), process_cpu_time() - processor);
    Ok(Cost { clock: clock.as_nanos() as f64 / items as f64, processor: processor.as_nanos() as f64 / items as f64 })
}

fn rows(arguments: &Arguments, rounds: &[Vec<[Cost; OPERATIONS.len()]>]) -> Vec<Row> {
    let mut rows = Vec::new();
    for (operation, name) in OPERATIONS.into_iter().enumerate() {
        for (position, regions) in arguments.regions.iter().copied().enumerate() {
            rows.push(Row {
                operation: name,
                regions,
                clock_ns: Spread::over(rounds, |round| round[position][operation].clock),
                processor_ns: Spread::over(rounds, |round| round[position][operation].processor),
                growth: Spread::over(rounds, |round| round[position][operation].processor / round[0][operation].processor),
            });
        }
    }
    rows
}

fn text(report: &Report<'_>) -> String {
    let settings = report.settings;
    let (size, stride) = (output::bytes(settings.size as u64), output::bytes(settings.stride as u64));
    let mut out = report.machine.to_string();
    out.push('\n');
    out += &output::paragraph(&format!(
        "Registering {} regions one by one, and {} as a batch, where others are registered already; {size} each, {stride} apart. ns per \
         region, median (smallest..largest) of {} rounds. Ratio: processor time to that at {} regions in the same round.",
        settings.calls, settings.batch, settings.rounds, settings.regions[0]
    ));
    let mut last = "";
    for row in &report.rows {
        if last != row.operation {
            last = row.operation;
            out += &format!("\n{last:<21} {:>8} {:>21} {:>21} {:>21}\n", "regions", "clock", "processor", "ratio");
        }
        let ratio = if row.regions == settings.regions[0] { String::new() } else { row.growth.to_string() };
        let line = format!("{:>30} {:>21} {:>21} {ratio:>21}", row.regions, row.clock_ns, row.processor_ns);
        out += &format!("{}\n", line.trim_end());
    }
    out += "\nThe ordered map keeps as many ranges behind a lock and nothing else: the least that keeping them costs.\n";
    out += &noise(report.fixed_work_ms);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_that_are_missing_or_left_are_noticed() {
        let arena = Arena::new(3 << 12).unwrap();
        let ranges = [0, 1].map(|index| arena.range(index << 12, 1 << 12));
        let engine = create_engine().unwrap();
        engine.register(ranges[0], &memory_options()).unwrap();
        assert_eq!(check_present(&engine, &ranges[..1]), Ok(()));
        assert!(check_present(&engine, &ranges).unwrap_err().contains("looking it up gives None"));
        assert!(check_present(&engine, &[arena.range(0, 1 << 11)]).is_err());
        assert_eq!(check_absent(&engine, &ranges[1..]), Ok(()));
        assert!(check_absent(&engine, &ranges).unwrap_err().contains("is still there"));
        engine.shutdown();
    }

    #[test]
    fn the_ordered_map_refuses_overlaps_and_unknown_ranges() {
        let arena = Arena::new(1 << 14).unwrap();
        let map = OrderedMap::default();
        assert_eq!(map.insert(arena.range(4096, 4096)), Ok(()));
        assert!(map.insert(arena.range(8191, 1)).is_err() && map.insert(arena.range(0, 4097)).is_err());
        assert_eq!((map.insert(arena.range(0, 4096)), map.insert(arena.range(8192, 1))), (Ok(()), Ok(())));
        assert_eq!(map.remove(arena.range(4096, 1).address()), Ok(()));
        assert!(map.remove(arena.range(4096, 1).address()).is_err());
    }
}
