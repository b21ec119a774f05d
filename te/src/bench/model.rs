//! `te bench register --model`: what registering 500 GB with 8 NICs on 64 cores would take, by what a page takes on this machine, beside
//! what a report says that such a machine took.
//!
//! A model, not a measurement. All that it assumes is in the constants below, and all arithmetic in [`Units::predict`].

use std::error::Error;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use serde::Serialize;
use transfer_engine::registration::OUT_OF_CACHE;
use transfer_engine::registration::populate::Provider;
use transfer_engine::sys::pages::HUGE_PAGE;
use transfer_engine::transport::Device;

use super::machine::{Machine, noise, time_fixed_work};
use super::print_report;
use super::statistics::Spread;
use crate::output;
use crate::ring::Ring;
use crate::system::Mapping;

/// Bytes that are registered.
const BYTES: f64 = 500e9;
/// NICs that it is registered with, each on a thread of its own where they work side by side.
const DEVICES: f64 = 8.0;
/// Cores, on all of which pages are provided.
const CORES: f64 = 64.0;
/// Bytes a second that memory takes at most while it is cleared, however many cores clear it.
const CLEARED: f64 = 100e9;
/// Bytes of a page.
const PAGE: f64 = 4096.0;
/// Bytes of the longest chunk; each is a call.
const CHUNK: f64 = 1e9;

/// So much longer or shorter than the report's is a time that is told to disagree.
const DISAGREEMENT: f64 = 1.5;

/// The memory that unit costs are measured with, and how often; both less where it is to be quick.
const SAMPLE: usize = 256 << 20;
const QUICK_SAMPLE: usize = 16 << 20;
const ROUNDS: usize = 5;
const QUICK_ROUNDS: usize = 2;

/// Nanoseconds for a page, unless they say otherwise.
#[derive(Clone, Copy)]
struct Units {
    /// Pinning one that is not there, by a device alone.
    provide_and_pin: f64,
    /// Providing one, on a thread that is one of several.
    provide: f64,
    /// Pinning one that is not there, by each of several devices at once.
    race: f64,
    /// Pinning one that is there, by a device alone.
    pin: f64,
    /// The same by each of several devices at once.
    pin_together: f64,
    /// Giving one back, by a device alone.
    release: f64,
    /// The same by each of several devices that begin together.
    release_together: f64,
    /// The same by each of several devices that begin apart.
    release_apart: f64,
    /// A call, whatever it registers.
    call: f64,
}

/// Seconds.
#[derive(Clone, Copy, Serialize)]
struct Times {
    sequential: f64,
    naive: f64,
    /// The report has none.
    ours: Option<f64>,
}

/// Written memory registered, untouched memory registered, either given back.
type Prediction = [Times; OPERATIONS.len()];

const OPERATIONS: [&str; 3] = ["register, written", "register, untouched", "unregister, written"];

/// What the report has measured, in the order of [`OPERATIONS`].
const REPORT: Prediction = [
    Times { sequential: 49.198, naive: 11.662, ours: None },
    Times { sequential: 86.930, naive: 461.999, ours: None },
    Times { sequential: 11.754, naive: 1.459, ours: None },
];

impl Units {
    /// Those which the report's times amount to. What it does not tell costs nothing, or what is next to it.
    fn of_the_report() -> Units {
        let page = |seconds: f64| seconds * 1e9 / (BYTES / PAGE);
        let [written, untouched, release] = REPORT;
        let provide = page(untouched.sequential - written.sequential);
        let pin = page(written.sequential) / DEVICES;
        Units {
            provide_and_pin: provide + pin,
            provide,
            race: page(untouched.naive),
            pin,
            pin_together: page(written.naive),
            release: page(release.sequential) / DEVICES,
            release_together: page(release.naive),
            release_apart: page(release.naive),
            call: 0.0,
        }
    }

    /// What the constants make of it.
    fn predict(&self) -> Prediction {
        let seconds = |page: f64| BYTES / PAGE * page / 1e9;
        let calls = BYTES / CHUNK * self.call / 1e9;
        let sequential = DEVICES * (seconds(self.pin) + calls);
        let together = seconds(self.pin_together) + calls;
        let provided = (seconds(self.provide) / CORES).max(BYTES / CLEARED);
        [
            Times { sequential, naive: together, ours: Some(together) },
            Times {
                sequential: sequential + seconds(self.provide_and_pin - self.pin),
                naive: seconds(self.race) + calls,
                ours: Some(provided + together),
            },
            Times {
                sequential: DEVICES * seconds(self.release),
                naive: seconds(self.release_together),
                ours: Some(seconds(self.release_apart)),
            },
        ]
    }
}

#[derive(Serialize)]
struct Row {
    operation: &'static str,
    report: Times,
    by_its_costs: Times,
    by_this_machine: Times,
}

#[derive(Serialize)]
struct Report {
    machine: Machine,
    sample_bytes: usize,
    rounds: usize,
    /// By name: medians that the model takes, with their spread.
    measured_ns: Vec<(&'static str, Spread)>,
    rows: Vec<Row>,
    fixed_work_ms: Spread,
}

/// Runs `te bench register --model`.
pub fn run(is_quick: bool, as_json: bool) -> Result<(), Box<dyn Error>> {
    let (sample, round_count) = if is_quick { (QUICK_SAMPLE, QUICK_ROUNDS) } else { (SAMPLE, ROUNDS) };
    let machine = Machine::look();
    let (mut rounds, mut fixed_work) = (Vec::new(), Vec::new());
    for round in 1..=round_count {
        eprintln!("round {round} of {round_count}");
        fixed_work.push(time_fixed_work());
        rounds.push(measure(sample)?);
    }
    type Unit = fn(&Units) -> f64;
    let units: [(&'static str, Unit); 9] = [
        ("provide and pin, a device alone", |units| units.provide_and_pin),
        ("provide, each of two threads", |units| units.provide),
        ("provide and pin, two devices at once", |units| units.race),
        ("pin, a device alone", |units| units.pin),
        ("pin, two devices at once", |units| units.pin_together),
        ("give back, a device alone", |units| units.release),
        ("give back, two devices in step", |units| units.release_together),
        ("give back, two devices apart", |units| units.release_apart),
        ("a call", |units| units.call),
    ];
    let measured = units.map(|(name, unit)| (name, Spread::over(&rounds, unit)));
    let [provide_and_pin, provide, race, pin, pin_together, release, release_together, release_apart, call] =
        measured.map(|(_, spread)| spread.median);
    let here = Units { provide_and_pin, provide, race, pin, pin_together, release, release_together, release_apart, call };
    let (theirs, ours) = (Units::of_the_report().predict(), here.predict());
    let rows = (0..OPERATIONS.len()).map(|at| Row {
        operation: OPERATIONS[at],
        report: REPORT[at],
        by_its_costs: theirs[at],
        by_this_machine: ours[at],
    });
    let report = Report {
        machine,
        sample_bytes: sample,
        rounds: round_count,
        measured_ns: measured.to_vec(),
        rows: rows.collect(),
        fixed_work_ms: Spread::of(fixed_work),
    };
    print_report(as_json, &report, text)
}

fn measure(sample: usize) -> Result<Units, Box<dyn Error>> {
    let rings = [Ring::new(0)?, Ring::new(1)?];
    let untouched = || Mapping::new(sample, false, None);
    let pages = sample as f64 / PAGE;

    let memory = untouched()?;
    let range = memory.range();
    let (provide_and_pin, key) = time(|| rings[0].register(range, true))?;
    rings[0].deregister(&key)?;
    let (pin, key) = time(|| rings[0].register(range, true))?;
    let (release, ()) = time(|| rings[0].deregister(&key))?;
    let (pin_together, keys) = time_both(Duration::ZERO, |number| rings[number].register(range, true))?;
    let (release_together, _) = time_both(Duration::ZERO, |number| rings[number].deregister(&keys[number]))?;
    let (_, keys) = time_both(Duration::ZERO, |number| rings[number].register(range, true))?;
    let (release_apart, _) = time_both(OUT_OF_CACHE, |number| rings[number].deregister(&keys[number]))?;

    let memory = untouched()?;
    let range = memory.range();
    let (race, keys) = time_both(Duration::ZERO, |number| rings[number].register(range, true))?;
    rings.iter().zip(&keys).try_for_each(|(ring, key)| ring.deregister(key))?;

    let memory = untouched()?;
    let range = memory.range();
    let half = range.length() / 2;
    let provider = Provider::default();
    let (provide, _) = time_both(Duration::ZERO, |number| {
        let parts = (0..half).step_by(HUGE_PAGE as usize);
        let parts = parts.filter_map(|offset| range.part(half * number as u64 + offset, HUGE_PAGE.min(half - offset)));
        parts.for_each(|part| provider.populate(part));
        Ok(())
    })?;

    let short = range.part(0, PAGE as u64).expect("it has a page");
    let mut calls = Vec::new();
    for _ in 0..ROUNDS {
        let (call, key) = time(|| rings[0].register(short, true))?;
        rings[0].deregister(&key)?;
        calls.push(call);
    }
    Ok(Units {
        provide_and_pin: provide_and_pin / pages,
        provide: provide / (pages / 2.0),
        race: race / pages,
        pin: pin / pages,
        pin_together: pin_together / pages,
        release: release / pages,
        release_together: release_together / pages,
        release_apart: release_apart / pages,
        call: Spread::of(calls).median,
    })
}

/// Nanoseconds.
fn time<T>(work: impl FnOnce() -> transfer_engine::Result<T>) -> transfer_engine::Result<(f64, T)> {
    let begin = Instant::now();
    let outcome = work()?;
    Ok((begin.elapsed().as_nanos() as f64, outcome))
}

/// On two threads, of which the second begins later by `lag`: nanoseconds that the slower one works.
fn time_both<T: Send>(
    lag: Duration,
    work: impl Fn(usize) -> transfer_engine::Result<T> + Sync,
) -> Result<(f64, Vec<T>), Box<dyn Error>> {
    let start = Barrier::new(2);
    std::thread::scope(|scope| {
        let (start, work) = (&start, &work);
        let threads = [0, 1].map(|number: u32| {
            scope.spawn(move || {
                start.wait();
                let begin = Instant::now();
                while begin.elapsed() < lag * number {
                    std::hint::spin_loop();
                }
                time(|| work(number as usize))
            })
        });
        let (mut longest, mut outcomes) = (0.0_f64, Vec::new());
        for thread in threads {
            let (spent, outcome) = thread.join().map_err(|_| "a thread panicked")??;
            longest = longest.max(spent);
            outcomes.push(outcome);
        }
        Ok((longest, outcomes))
    })
}

fn text(report: &Report) -> String {
    let mut out = report.machine.to_string();
    out.push('\n');
    out += &output::paragraph(&format!(
        "A model, not a measurement: registering {} GB with {DEVICES} NICs on {CORES} cores. It takes what a page of 4 KiB costs here, \
         with rings of io_uring, in ns, median (smallest..largest) of {} rounds with {}:",
        BYTES / 1e9,
        report.rounds,
        output::bytes(report.sample_bytes as u64)
    ));
    for (name, spread) in &report.measured_ns {
        out += &format!("  {name:<38} {spread:>21}\n");
    }
    out += &output::paragraph(&format!(
        "Assumed: each NIC works on a thread of its own, and what two lose to each other here, {DEVICES} lose there; pages are provided \
         on all cores, each as fast as one of two here, up to {} GB/s in all; a chunk has {} GB.",
        CLEARED / 1e9,
        CHUNK / 1e9
    ));
    out += &output::paragraph(
        "Seconds: what the report measured (Mooncake, PR #855), what the model makes of the costs that its times amount to, and of those \
         above.",
    );
    out += &format!("\n{:<40} {:>8} {:>14} {:>14}\n", "", "report", "by its costs", "by these here");
    let mut disagreements = Vec::new();
    for row in &report.rows {
        type Way = fn(&Times) -> Option<f64>;
        let ways: [(&str, Way); 3] = [
            ("sequential", |times| Some(times.sequential)),
            ("a thread each", |times| Some(times.naive)),
            ("ours", |times| times.ours),
        ];
        for (name, way) in ways {
            let [measured, theirs, here] = [&row.report, &row.by_its_costs, &row.by_this_machine].map(way);
            let show = |seconds: Option<f64>| seconds.map(|seconds| format!("{seconds:.1}")).unwrap_or_default();
            let what = format!("{}, {name}", row.operation);
            out += &format!("{what:<40} {:>8} {:>14} {:>14}\n", show(measured), show(theirs), show(here));
            if let (Some(measured), Some(here)) = (measured, here)
                && disagrees(measured, here)
            {
                disagreements.push(format!("{what} ({:.1} times the report's)", here / measured));
            }
        }
    }
    out.push('\n');
    if !disagreements.is_empty() {
        out += &output::paragraph(&format!(
            "The model and the report disagree, by more than {DISAGREEMENT} times, on: {}.",
            disagreements.join("; ")
        ));
    }
    out += &output::paragraph(
        "By its costs, all but ours is the report's own time again. Nothing that two threads do here foretells what more of them lose \
         where they fault the same pages.",
    );
    out += &noise(report.fixed_work_ms);
    out
}

/// Whether one is so much more than the other that it is to be told.
fn disagrees(one: f64, other: f64) -> bool {
    one.max(other) > DISAGREEMENT * one.min(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_near(one: f64, other: f64) -> bool {
        (one - other).abs() < 0.001 * other
    }

    #[test]
    fn the_costs_of_the_report_give_its_times_again() {
        for (predicted, measured) in Units::of_the_report().predict().iter().zip(REPORT) {
            assert!(is_near(predicted.sequential, measured.sequential) && is_near(predicted.naive, measured.naive));
        }
        let [written, untouched, released] = Units::of_the_report().predict().map(|times| times.ours.unwrap());
        // 5 s at 100 GB/s, then what the devices take at once.
        assert!(is_near(untouched, 5.0 + 11.662) && is_near(written, 11.662) && is_near(released, 1.459));
    }

    #[test]
    fn each_cost_is_counted_as_often_as_it_arises() {
        let nothing = Units {
            provide_and_pin: 0.0,
            provide: 0.0,
            race: 0.0,
            pin: 0.0,
            pin_together: 0.0,
            release: 0.0,
            release_together: 0.0,
            release_apart: 0.0,
            call: 0.0,
        };
        let seconds = BYTES / PAGE / 1e9;
        let [written, untouched, released] =
            Units { pin: 1.0, provide_and_pin: 10.0, release: 2.0, ..nothing }.predict().map(|times| times.sequential);
        assert!(is_near(written, 8.0 * seconds) && is_near(untouched, 17.0 * seconds) && is_near(released, 16.0 * seconds));
        let naive = Units { pin_together: 1.0, race: 3.0, release_together: 2.0, ..nothing }.predict().map(|times| times.naive);
        assert!(is_near(naive[0], seconds) && is_near(naive[1], 3.0 * seconds) && is_near(naive[2], 2.0 * seconds));
        // Slow cores are slower than the memory that they clear.
        let slow = Units { provide: 6400.0, release_apart: 4.0, ..nothing }.predict().map(|times| times.ours.unwrap());
        assert!(is_near(slow[1], 100.0 * seconds) && is_near(slow[2], 4.0 * seconds));
        let calls = Units { call: 1e9, ..nothing }.predict();
        assert!(is_near(calls[0].sequential, 8.0 * 500.0) && is_near(calls[0].naive, 500.0));
    }

    #[test]
    fn disagreement_goes_both_ways() {
        assert!(disagrees(1.0, 1.6) && disagrees(1.6, 1.0) && !disagrees(1.0, 1.4) && !disagrees(1.4, 1.0));
    }
}
