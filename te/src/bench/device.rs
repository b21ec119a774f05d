//! `te bench register --device`: what registering costs where RDMA devices pin the memory, beside the same verbs without an engine.
//!
//! One engine, which gets more and more regions. At each number of them, every round registers and unregisters some more one by one:
//! with the engine, and by plain `ibv_reg_mr` and `ibv_dereg_mr` of the library that the engine has loaded, one device after the other.
//! Devices know the engine's regions meanwhile, so both find them equally full. The two take turns in coming first.

use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;
use transfer_engine::config::Config;
use transfer_engine::engine::Engine;
use transfer_engine::sys::MemoryRange;
use transfer_engine::transport::rdma::device::load_library;
use transfer_engine::transport::rdma::verbs::{Access, MemoryRegion, ProtectionDomain};

use super::machine::{Machine, noise, time_fixed_work};
use super::register::{check_absent, check_present};
use super::statistics::Spread;
use super::{Protocol, TransportArguments, memory_options, print_report};
use crate::output;
use crate::system::Arena;

/// What is measured: the arguments of `te bench register` that count here.
#[derive(Serialize)]
pub struct Settings<'a> {
    /// Names of the devices.
    pub devices: &'a [String],
    /// Numbers of regions that are there already, ascending.
    pub regions: &'a [usize],
    /// Bytes of a region.
    pub size: usize,
    /// Bytes from the start of a region to that of the next.
    pub stride: usize,
    /// Regions in a round.
    pub calls: usize,
    /// Rounds.
    pub rounds: u32,
}

/// Microseconds per region.
#[derive(Clone, Copy)]
pub(super) struct Cost {
    pub(super) register: f64,
    pub(super) unregister: f64,
}

#[derive(Serialize)]
struct Row {
    operation: &'static str,
    regions: usize,
    ours_us: Spread,
    verbs_us: Spread,
    /// Ours divided by the verbs' alone, round by round.
    ratio: Spread,
    /// Ours less the verbs' alone, round by round.
    excess_us: Spread,
    /// Median, divided by that at the fewest regions.
    growth: f64,
}

#[derive(Serialize)]
struct Report<'a> {
    machine: Machine,
    settings: &'a Settings<'a>,
    fixed_work_ms: Spread,
    rows: Vec<Row>,
}

/// Runs `te bench register --device`.
pub fn run(settings: &Settings<'_>, as_json: bool) -> Result<(), Box<dyn Error>> {
    let most = *settings.regions.last().ok_or("--regions names none")?;
    let length = most.checked_add(settings.calls).and_then(|regions| regions.checked_mul(settings.stride));
    let mut arena = Arena::new(length.ok_or("so many regions do not fit into the address space")?)?;
    // Pages are there before anything is timed.
    (0..most + settings.calls).for_each(|index| arena.touch(index * settings.stride, settings.size));
    let ranges: Vec<MemoryRange> =
        (0..most + settings.calls).map(|index| arena.range(index * settings.stride, settings.size)).collect();
    let (present, more) = ranges.split_at(most);
    let machine = Machine::look();
    let engine = TransportArguments { protocol: Protocol::Rdma, devices: settings.devices.to_vec() }.create_engine()?;
    let verbs = Verbs::open(settings.devices)?;
    let mut fixed_work = Vec::new();
    let mut measured: Vec<Vec<[Cost; 2]>> = Vec::new();
    let mut there = 0;
    for regions in settings.regions.iter().copied() {
        eprintln!("registering up to {regions} regions");
        for range in &present[there..regions] {
            engine.register(*range, &memory_options())?;
        }
        there = regions;
        check_present(&engine, &present[..regions])?;
        let mut rounds = Vec::new();
        // The first calls of all find nothing in the caches.
        for round in 0..=settings.rounds {
            fixed_work.push(time_fixed_work());
            let costs = match round % 2 {
                0 => {
                    let ours = measure_engine(&engine, more)?;
                    [ours, verbs.measure(more)?]
                }
                _ => {
                    let plain = verbs.measure(more)?;
                    [measure_engine(&engine, more)?, plain]
                }
            };
            rounds.extend((round > 0).then_some(costs));
        }
        measured.push(rounds);
    }
    let report = Report { machine, settings, fixed_work_ms: Spread::of(fixed_work), rows: rows(settings.regions, &measured) };
    print_report(as_json, &report, text)?;
    engine.shutdown();
    Ok(())
}

fn measure_engine(engine: &Engine, ranges: &[MemoryRange]) -> Result<Cost, Box<dyn Error>> {
    let options = memory_options();
    let register = time(ranges, |range| engine.register(*range, &options))?;
    check_present(engine, ranges)?;
    let unregister = time(ranges, |range| engine.unregister(range.address()))?;
    check_absent(engine, ranges)?;
    Ok(Cost { register, unregister })
}

/// The devices once more, with protection domains of their own.
pub(super) struct Verbs(Vec<Arc<ProtectionDomain>>);

impl Verbs {
    pub(super) fn open(devices: &[String]) -> Result<Verbs, Box<dyn Error>> {
        let library = load_library(&Config::from_environment().rdma)?;
        let domain = |name: &String| ProtectionDomain::new(&library.open(name)?);
        Ok(Verbs(devices.iter().map(domain).collect::<std::io::Result<_>>()?))
    }

    pub(super) fn measure(&self, ranges: &[MemoryRange]) -> Result<Cost, Box<dyn Error>> {
        let access = Access { remote: true, relaxed_ordering: false, local_write: true };
        let mut regions = Vec::with_capacity(ranges.len() * self.0.len());
        let register = time(ranges, |range| {
            self.0.iter().try_for_each(|domain| MemoryRegion::register(domain, *range, access).map(|region| regions.push(region)))
        })?;
        let mut regions = regions.into_iter();
        let unregister = time(ranges, |_| {
            regions.by_ref().take(self.0.len()).try_for_each(|region| region.deregister().map_err(|(_, error)| error))
        })?;
        Ok(Cost { register, unregister })
    }
}

/// Microseconds that a call takes, on average.
fn time<E>(ranges: &[MemoryRange], mut call: impl FnMut(&MemoryRange) -> Result<(), E>) -> Result<f64, E> {
    let start = Instant::now();
    ranges.iter().try_for_each(&mut call)?;
    Ok(start.elapsed().as_secs_f64() * 1e6 / ranges.len() as f64)
}

fn rows(regions: &[usize], measured: &[Vec<[Cost; 2]>]) -> Vec<Row> {
    let mut rows = Vec::new();
    for operation in ["register", "unregister"] {
        let of = |cost: &Cost| if operation == "register" { cost.register } else { cost.unregister };
        let median = |rounds: &Vec<[Cost; 2]>| Spread::over(rounds, |[ours, _]| of(ours)).median;
        for (regions, rounds) in regions.iter().zip(measured) {
            rows.push(Row {
                operation,
                regions: *regions,
                ours_us: Spread::over(rounds, |[ours, _]| of(ours)),
                verbs_us: Spread::over(rounds, |[_, verbs]| of(verbs)),
                ratio: Spread::over(rounds, |[ours, verbs]| of(ours) / of(verbs)),
                excess_us: Spread::over(rounds, |[ours, verbs]| of(ours) - of(verbs)),
                growth: median(rounds) / median(&measured[0]),
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
        "Registering {} regions one by one with {}, where others are registered already; {size} each, {stride} apart. Beside it the verbs \
         alone, one device after the other, while the devices know the same regions. us per region, median (smallest..largest) of {} \
         rounds. Growth: our median to that at {} regions.",
        settings.calls,
        settings.devices.join(" and "),
        settings.rounds,
        settings.regions[0]
    ));
    out += &format!(
        "\n{:<10} {:>8} {:>20} {:>20} {:>18} {:>20} {:>7}\n",
        "", "regions", "ours", "verbs", "ratio", "ours less verbs", "growth"
    );
    for row in &report.rows {
        out += &format!(
            "{:<10} {:>8} {:>20} {:>20} {:>18} {:>20} {:>7.2}\n",
            row.operation, row.regions, row.ours_us, row.verbs_us, row.ratio, row.excess_us, row.growth
        );
    }
    out.push('\n');
    out += &noise(report.fixed_work_ms);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_set_ours_beside_the_verbs_and_beside_the_fewest_regions() {
        let cost = |register, unregister| Cost { register, unregister };
        let few = vec![[cost(30.0, 8.0), cost(10.0, 4.0)]; 3];
        let many = vec![[cost(60.0, 8.0), cost(20.0, 2.0)]; 3];
        let rows = rows(&[256, 1024], &[few, many]);
        let seen: Vec<_> =
            rows.iter().map(|row| (row.operation, row.regions, row.ratio.median, row.excess_us.median, row.growth)).collect();
        assert_eq!(
            seen,
            [
                ("register", 256, 3.0, 20.0, 1.0),
                ("register", 1024, 3.0, 40.0, 2.0),
                ("unregister", 256, 2.0, 4.0, 1.0),
                ("unregister", 1024, 4.0, 6.0, 1.0)
            ]
        );
    }
}
