//! `te bench pool`: putting or getting by a pool of staging buffers, beside registering the payloads for each put or get.
//!
//! Each cell is a size, a number of keys and a number of devices. In each round every way moves the keys for some milliseconds, of
//! which the median is taken; ways take turns in coming first, and ratios are formed round by round. The engine tries the other path
//! now and then, which a median does not show: what that costs is added to its own choice's time. Payloads are written pages that no
//! device knows; before anything is timed each way is taken once and every byte is compared where it arrives.

use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

use super::machine::{Machine, noise, time_fixed_work};
use super::puts::{Memory, Operation, Package, Round, Subject, WAYS, WAYS_AND_CONTROLS, Way};
use super::rings::Pin;
use super::statistics::Spread;
use super::{Protocol, TransportArguments, parse_size, print_report, seed};
use crate::output;

/// Arguments of `te bench pool`.
#[derive(clap::Args, Serialize)]
pub struct Arguments {
    /// Few figures within a minute, and an error if one is not as it is to be.
    #[arg(long)]
    quick: bool,
    /// Where the bytes go.
    #[arg(long, value_enum, default_value_t = Operation::Put, conflicts_with = "seed_rows")]
    operation: Operation,
    /// Sizes of a key.
    #[arg(long, value_delimiter = ',', value_parser = parse_size, default_value = "4K,64K,1M,16M,256M,1G")]
    #[arg(default_value_if("quick", "true", "4K,64K,1M,16M"))]
    sizes: Vec<usize>,
    /// Numbers of keys in a put or get.
    #[arg(long, value_delimiter = ',', default_value = "1,16,64", default_value_if("quick", "true", "1,16"))]
    keys: Vec<usize>,
    /// Most bytes of a put or get: cells of more are left out.
    #[arg(long, value_parser = parse_size, default_value = "1G", default_value_if("quick", "true", "64M"))]
    memory: usize,
    /// Bytes of the pool.
    #[arg(long, value_parser = parse_size, default_value = "640M")]
    pool: usize,
    /// Rounds.
    #[arg(long, default_value = "15", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// How long a way is measured in a round, in milliseconds; up to ten times as long for 16 puts or gets, and for one at least.
    #[arg(long, default_value_t = 5)]
    milliseconds: u64,
    /// Devices that pin memory on any machine, instead of a transport; bytes are then moved by a memmove.
    #[arg(long, value_enum, conflicts_with_all = ["protocol", "devices"])]
    pin: Option<Pin>,
    /// Numbers of devices: of rings with --pin, else of those that --devices names.
    #[arg(long, value_delimiter = ',', default_value = "1,4,8", default_value_if("quick", "true", "1,4"))]
    counts: Vec<usize>,
    #[command(flatten)]
    transport: TransportArguments,
    /// RDMA devices of the target; without any, the same.
    #[arg(long, value_delimiter = ',')]
    target_devices: Vec<String>,
    /// Measure instead the rows of a report, at 1/16 of their sizes, on the fake verbs library that --verbs names.
    #[arg(long, requires = "verbs", conflicts_with = "pin")]
    seed_rows: bool,
    /// The verbs library of this repository's tests.
    #[arg(long, value_name = "PATH", requires = "seed_rows")]
    verbs: Option<PathBuf>,
    /// Print all figures as JSON instead of tables.
    #[arg(long)]
    json: bool,
}

impl Arguments {
    /// What differs from one subject to the next: how many devices.
    fn device_counts(&self) -> Vec<usize> {
        match (self.pin, self.transport.devices.len()) {
            (Some(_), _) => self.counts.clone(),
            (None, 0) => vec![0],
            (None, names) => self.counts.iter().copied().filter(|count| *count <= names).collect(),
        }
    }

    fn packages(&self) -> Vec<Package> {
        let all = self.sizes.iter().flat_map(|size| self.keys.iter().map(|keys| Package { size: *size, keys: *keys }));
        all.filter(|package| package.bytes() <= self.memory && package.bytes() > 0).collect()
    }

    fn subject(&self, devices: usize, memory: &Memory) -> Result<Subject, Box<dyn Error>> {
        if self.pin.is_some() {
            return Subject::with_rings(devices, memory, self.pool);
        }
        let of = |names: &[String]| TransportArguments {
            devices: names.iter().take(devices).cloned().collect(),
            protocol: self.transport.protocol,
        };
        let near = of(&self.transport.devices);
        let far = if self.target_devices.is_empty() { near.clone() } else { of(&self.target_devices) };
        Subject::over(&near, &far, None, memory, self.pool)
    }

    fn what(&self) -> &'static str {
        match (self.pin, self.transport.protocol) {
            (Some(Pin::IoUring), _) => {
                "Rings of io_uring pin for as many devices; bytes are moved by a memmove on the calling thread, in place of a NIC"
            }
            (None, Protocol::Tcp) => "TCP on the loopback interface, with which nothing is pinned",
            (None, Protocol::Rdma) => "RDMA between two engines",
        }
    }
}

/// How much longer than the better way the choice of the engine may take.
const WORST_CHOICE: f64 = 1.05;

/// A way in a cell.
#[derive(Serialize)]
struct WayFigures {
    us: Spread,
    /// Regions that were registered, by put or get.
    registrations: f64,
}

#[derive(Serialize)]
struct Row {
    #[serde(flatten)]
    package: Package,
    devices: usize,
    baseline: WayFigures,
    direct: WayFigures,
    staged: WayFigures,
    auto: WayFigures,
    /// Baseline to auto, round by round.
    speed_up: Spread,
    /// Baseline to the transfer of memory that is registered already, round by round: no pool makes puts and gets faster than that.
    limit: Spread,
    /// Baseline less auto, round by round.
    saved_ms: Spread,
    /// Auto to that of direct and staged whose median is smaller, round by round.
    auto_to_better: Spread,
    /// That way, measured once more in the same rounds, to itself.
    control: Spread,
    /// How far those two are from each other in the middle of the rounds, as a ratio above 1: what is seen without any difference.
    chance: f64,
    /// What the median of `speed_up` is to reach, where something is promised.
    #[serde(skip_serializing_if = "Option::is_none")]
    wanted_speed_up: Option<f64>,
    /// Whether a lease holds a key: what does not fit is registered whatever is asked for.
    is_stageable: bool,
}

impl Row {
    fn of(package: Package, devices: usize, is_stageable: bool, rounds: &[Round]) -> Row {
        let us = |way: Way| Spread::over(rounds, |round| round[way as usize].us);
        let registrations =
            |way: Way| rounds.iter().map(|round| round[way as usize].registrations).sum::<f64>() / rounds.len() as f64;
        let (better, worse) = match us(Way::Direct).median < us(Way::Staged).median {
            true => (Way::Direct, Way::Staged),
            false => (Way::Staged, Way::Direct),
        };
        let registering = registrations(Way::Auto) / registrations(Way::Direct).max(1.0);
        let trials = if better == Way::Staged { registering } else { 1.0 - registering };
        // More than half are no trials, and seen in the median.
        let trials = if trials < 0.5 { trials } else { 0.0 };
        let auto = |round: &Round| {
            let [worse, better, auto] = [worse, better, Way::Auto].map(|way| round[way as usize].us);
            auto + trials * (worse - better).max(0.0)
        };
        let again = if better == Way::Direct { Way::DirectAgain } else { Way::StagedAgain };
        let control = |round: &Round| round[again as usize].us / round[better as usize].us;
        let [baseline, direct, staged, chosen] = WAYS.map(|way| WayFigures { us: us(way), registrations: registrations(way) });
        Row {
            package,
            devices,
            speed_up: Spread::over(rounds, |round| round[Way::Baseline as usize].us / auto(round)),
            limit: Spread::over(rounds, |round| round[Way::Baseline as usize].us / round[Way::Transfer as usize].us),
            saved_ms: Spread::over(rounds, |round| (round[Way::Baseline as usize].us - auto(round)) / 1e3),
            auto_to_better: Spread::over(rounds, |round| auto(round) / round[better as usize].us),
            control: Spread::over(rounds, control),
            chance: Spread::over(rounds, |round| control(round).max(control(round).recip())).median,
            auto: WayFigures { us: Spread::over(rounds, auto), ..chosen },
            wanted_speed_up: (package.size <= 64 << 10 && devices >= 4).then_some(2.0),
            baseline,
            direct,
            staged,
            is_stageable,
        }
    }

    /// Whether auto takes longer than it may.
    fn is_above_limit(&self) -> bool {
        // Where nothing is registered, or nothing can be staged, there is nothing to choose.
        self.is_stageable && self.direct.registrations > 0.0 && self.auto_to_better.median > WORST_CHOICE
    }

    /// Whether it takes longer than it may, but not by more than the better way does by chance.
    fn is_undecided(&self) -> bool {
        self.is_above_limit() && self.auto_to_better.median <= self.chance
    }

    /// Whether less is gained than is promised.
    fn is_slow(&self) -> bool {
        self.wanted_speed_up.is_some_and(|wanted| self.speed_up.median < wanted)
    }

    /// Whether that is because the transfer alone takes too long for more.
    fn is_bounded(&self) -> bool {
        self.is_slow() && self.wanted_speed_up.is_some_and(|wanted| self.limit.median < wanted)
    }

    /// What is not as it is to be, in a word each.
    fn misses(&self) -> Vec<&'static str> {
        let checks = [
            (self.is_slow() && !self.is_bounded(), "slow"),
            (self.is_stageable && self.staged.registrations > 0.0, "registers"),
            (self.is_above_limit() && !self.is_undecided(), "misjudged"),
        ];
        checks.into_iter().filter(|(is_missed, _)| *is_missed).map(|(_, word)| word).collect()
    }

    /// What cannot be told, or cannot be had, in a word each.
    fn excuses(&self) -> impl Iterator<Item = &'static str> {
        let excuses = [(self.is_bounded(), "bounded"), (self.is_undecided(), "undecided")];
        excuses.into_iter().filter(|(is_so, _)| *is_so).map(|(_, word)| word)
    }
}

#[derive(Serialize)]
struct Report<'a> {
    machine: Machine,
    settings: &'a Arguments,
    fixed_work_ms: Spread,
    rows: Vec<Row>,
}

/// Runs `te bench pool`.
pub fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let limit = Duration::from_millis(arguments.milliseconds);
    if let Some(verbs) = arguments.verbs.as_ref().filter(|_| arguments.seed_rows) {
        return seed::run(verbs, arguments.memory, arguments.rounds, limit, arguments.json);
    }
    let machine = Machine::look();
    let packages = arguments.packages();
    let mut memory = Memory::new(&packages, false)?;
    let mut fixed_work = Vec::new();
    let mut rows = Vec::new();
    for devices in arguments.device_counts() {
        let subject = arguments.subject(devices, &memory)?.with_operation(arguments.operation);
        for package in packages.iter().copied() {
            eprintln!("{devices} devices, {} keys of {}", package.keys, output::bytes(package.size as u64));
            subject.check(&mut memory, package, true)?;
            subject.warm_up(&memory, package)?;
            let mut rounds = Vec::new();
            for round in 0..arguments.rounds as usize {
                rounds.push(subject.measure_round(&memory, package, &WAYS_AND_CONTROLS, round, limit)?);
                fixed_work.push(time_fixed_work());
            }
            rows.push(Row::of(package, devices, package.size as u64 <= subject.largest_lease(), &rounds));
        }
    }
    let misses: usize = rows.iter().map(|row| row.misses().len()).sum();
    let report = Report { machine, settings: arguments, fixed_work_ms: Spread::of(fixed_work), rows };
    print_report(arguments.json, &report, text)?;
    match misses {
        1.. if arguments.quick => Err(format!("figures that are not as they are to be: {misses}").into()),
        _ => Ok(()),
    }
}

/// A size without blanks.
pub fn short_size(bytes: usize) -> String {
    output::bytes(bytes as u64).replace(' ', "").replace("iB", "")
}

fn text(report: &Report<'_>) -> String {
    let settings = report.settings;
    let operation = settings.operation;
    let mut out = report.machine.to_string();
    out.push('\n');
    out += &output::paragraph(&format!(
        "Time to {operation} keys, both engines in this process. {}. Baseline: register each key, transfer, unregister, for each {operation}. Direct and \
         staged: by a pool that is told so. Auto: by a pool that chooses. µs of a {operation}, medians of {} rounds. Speed-up, and ms saved: \
         baseline to auto. Registrations of a {operation}: baseline, direct, staged, auto. Auto to the better of direct and staged. Control: \
         that way, measured once more in each round, to itself. Limit: baseline to the transfer alone, of memory that is registered already. \
         Slow: less than twice as fast, up to 64 KiB with 4 devices or more; bounded: no pool could be. \
         Registers: staging does. Misjudged: auto takes more than 5 % longer. Undecided: it does, but by no more than the control is off in \
         half of the rounds.",
        settings.what(),
        settings.rounds,
    ));
    out += &format!(
        "\n{:>5} {:>4} {:>3} {:>9} {:>9} {:>9} {:>9} {:>17} {:>17} {:>8} {:>14} {:>17} {:>17}\n",
        "size",
        "keys",
        "dev",
        "baseline",
        "direct",
        "staged",
        "auto",
        "speed-up",
        "limit",
        "saved",
        "registrations",
        "auto to better",
        "control"
    );
    let time = |figures: &WayFigures| match figures.us.median {
        us if us < 1000.0 => format!("{us:.1}"),
        us => format!("{us:.0}"),
    };
    let count = |figures: &WayFigures| match figures.registrations {
        count if count.fract() == 0.0 => format!("{count}"),
        count => format!("{count:.2}"),
    };
    for row in &report.rows {
        let ways = [&row.baseline, &row.direct, &row.staged, &row.auto];
        let [baseline, direct, staged, auto] = ways.map(time);
        let line = format!(
            "{:>5} {:>4} {:>3} {baseline:>9} {direct:>9} {staged:>9} {auto:>9} {:>17} {:>17} {:>8.3} {:>14} {:>17} {:>17} {}",
            short_size(row.package.size),
            row.package.keys,
            row.devices,
            row.speed_up,
            row.limit,
            row.saved_ms.median,
            ways.map(count).join(" "),
            row.auto_to_better,
            row.control,
            row.misses().into_iter().chain(row.excuses()).collect::<Vec<_>>().join(", ")
        );
        out += &format!("{}\n", line.trim_end());
    }
    let misses: usize = report.rows.iter().map(|row| row.misses().len()).sum();
    let undecided = report.rows.iter().filter(|row| row.is_undecided()).count();
    let bounded = report.rows.iter().filter(|row| row.is_bounded()).count();
    out += &format!(
        "\n{misses} figures of {} lines are not as they are to be, {undecided} are undecided, {bounded} bounded by the transfer itself.\n",
        report.rows.len()
    );
    out += "Every byte was compared where it arrived, once for each way and line.\n";
    out += &noise(report.fixed_work_ms);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::puts::Sample;

    /// What each way takes, and those again that are measured twice. Transfers alone take a microsecond.
    fn round(us: [f64; 4], again: [f64; 2]) -> Round {
        let us = [us.as_slice(), &again, &[1.0]].concat();
        WAYS_AND_CONTROLS.map(|way| Sample {
            us: us[way as usize],
            mean_us: us[way as usize],
            registrations: if way == Way::Staged { 0.0 } else { 1.0 },
        })
    }

    fn row(size: usize, devices: usize, us: [f64; 4], staged_registrations: f64) -> Row {
        let mut round = round(us, [us[Way::Direct as usize], us[Way::Staged as usize]]);
        round[Way::Staged as usize].registrations = staged_registrations;
        Row::of(Package { size, keys: 1 }, devices, size <= 1 << 20, &[round])
    }

    #[test]
    fn a_choice_is_misjudged_only_beyond_what_the_better_way_differs_from_itself() {
        let row = |auto: f64, again: [f64; 3]| {
            let rounds = again.map(|again| round([20.0, 15.0, 10.0, auto], [15.0, again]));
            Row::of(Package { size: 1 << 20, keys: 1 }, 1, true, &rounds)
        };
        let verdict = |auto, again| (row(auto, again).misses(), row(auto, again).is_undecided());
        assert_eq!(verdict(12.0, [10.0; 3]), (vec!["misjudged"], false));
        assert_eq!(verdict(12.0, [13.0, 10.0, 7.0]), (vec![], true), "slower or faster in two of three rounds");
        assert_eq!(verdict(12.0, [13.0, 10.0, 10.0]), (vec!["misjudged"], false), "one round says nothing");
        assert_eq!(verdict(15.0, [13.0, 10.0, 7.0]), (vec!["misjudged"], false), "more than that");
        assert_eq!(verdict(10.4, [13.0, 10.0, 7.0]), (vec![], false), "as it is to be");
        // The control is of the way that is better.
        assert_eq!(row(12.0, [10.0; 3]).control.median, 1.0);
    }

    #[test]
    fn figures_that_are_not_as_they_are_to_be_are_told() {
        let misses = |auto| row(4096, 4, [20.0, 15.0, 10.0, auto], 0.0).misses();
        assert_eq!([9.0, 10.0, 10.4].map(|auto| misses(auto).len()), [0, 0, 1]);
        assert_eq!((misses(10.4), misses(10.6)), (vec!["slow"], vec!["slow", "misjudged"]));
        // Nothing is promised of larger keys and fewer devices, but that the choice is right.
        assert!(row(1 << 20, 4, [20.0, 20.0, 30.0, 20.0], 0.0).misses().is_empty());
        assert!(row(4096, 1, [20.0, 20.0, 30.0, 20.0], 0.0).misses().is_empty());
        assert_eq!(row(4096, 1, [20.0, 20.0, 30.0, 21.5], 0.0).misses(), ["misjudged"]);
        // No lease holds it, so that all three do the same.
        assert!(row(2 << 20, 1, [20.0, 20.0, 20.0, 21.5], 1.0).misses().is_empty());
    }

    #[test]
    fn what_the_transfer_alone_keeps_from_being_twice_as_fast_is_not_missed() {
        let row = |transfer| {
            let mut round = round([20.0, 15.0, 11.0, 11.0], [15.0, 11.0]);
            round[Way::Transfer as usize].us = transfer;
            let row = Row::of(Package { size: 4096, keys: 1 }, 4, true, &[round]);
            (row.misses(), row.excuses().collect())
        };
        assert_eq!(row(10.5), (vec![], vec!["bounded"]));
        assert_eq!(row(9.5), (vec!["slow"], vec![]));
    }

    #[test]
    fn staging_must_not_register_what_fits_into_a_lease() {
        assert_eq!(row(4096, 1, [1.0; 4], 0.01).misses(), ["registers"]);
        assert!(row(2 << 20, 1, [1.0; 4], 1.0).misses().is_empty());
    }

    #[test]
    fn trials_of_the_other_path_count() {
        let auto = |us: [f64; 4], registrations| {
            let mut round = round(us, [us[Way::Direct as usize], us[Way::Staged as usize]]);
            round[Way::Direct as usize].registrations = 16.0;
            round[Way::Auto as usize].registrations = registrations;
            Row::of(Package { size: 4096, keys: 16 }, 1, true, &[round]).auto.us.median
        };
        // Staging is better: each put that registers costs 90 more.
        assert_eq!([0.0, 0.16, 1.6].map(|registrations| auto([100.0, 100.0, 10.0, 10.0], registrations)), [10.0, 10.9, 19.0]);
        // Registering is better, and then staging.
        assert_eq!([16.0, 14.4].map(|registrations| auto([100.0, 10.0, 100.0, 10.0], registrations)), [10.0, 19.0]);
        // Nearly always the wrong one: the median has it already.
        assert_eq!(auto([100.0, 100.0, 10.0, 100.0], 15.0), 100.0);
    }
}
