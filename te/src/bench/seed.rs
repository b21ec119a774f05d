//! `te bench pool --seed-rows`: the rows of a report on pooled puts (TransferQueue, PR #216), at 1/16 of their sizes, with this engine.
//!
//! NICs are the fake verbs library's. Their wires have the report's 200 Gb/s each, and registering takes so long that the baseline takes a
//! sixteenth of what it took in the report; bytes are copied into the pool, and not to the target. So what is to be copied is the report's, and
//! what copies is this machine: no row can be faster than that, and the bound is printed. Payloads are in large pages, as the pool is; as in
//! the report, four threads put at a time, each a part of the keys.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

use super::copies::Ground;
use super::machine::{Machine, noise, time_fixed_work};
use super::pool::short_size;
use super::puts::{Memory, Package, Round, Subject, WAYS, Way};
use super::statistics::Spread;
use super::{Protocol, TransportArguments, print_report};
use crate::output;
use crate::system::FakeVerbs;

/// Sizes and times are those of the report divided by this.
pub const SCALE: f64 = 16.0;
/// Bytes a second of a NIC.
const WIRE: f64 = 25e9;
/// Bytes of the pool, 10 GiB in the report.
const POOL: usize = (10 << 30) / SCALE as usize;
/// Threads that put at a time, in the report.
const WORKERS: usize = 4;
/// Numbers of NICs in the report.
pub const NICS: [usize; 2] = [1, 8];

/// A row of the report: MiB of a key, keys, and for 1 and 8 NICs the speed-up and the milliseconds that were saved.
type Reported = (usize, usize, [(f64, f64); 2]);

const REPORT: [Reported; 12] = [
    (4, 256, [(1.40, 36.98), (2.20, 91.13)]),
    (16, 64, [(1.53, 40.57), (2.09, 74.87)]),
    (16, 256, [(1.36, 162.34), (3.22, 475.54)]),
    (64, 16, [(1.66, 44.66), (3.50, 93.62)]),
    (64, 64, [(1.47, 177.99), (2.75, 509.66)]),
    (64, 128, [(1.55, 386.22), (3.20, 1011.39)]),
    (256, 4, [(1.95, 84.01), (3.26, 102.36)]),
    (256, 16, [(1.47, 196.08), (3.29, 506.37)]),
    (256, 32, [(1.65, 412.80), (3.27, 998.25)]),
    (1024, 1, [(1.45, 71.00), (3.02, 155.74)]),
    (1024, 4, [(1.45, 198.54), (3.08, 491.34)]),
    (1024, 8, [(1.46, 404.62), (2.97, 948.90)]),
];

/// What a row of the report amounts to here, in milliseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Script {
    /// Of the scaled size.
    #[serde(flatten)]
    pub package: Package,
    /// NICs of the report.
    pub nics: usize,
    /// Of the report.
    speed_up: f64,
    baseline_ms: f64,
    pooled_ms: f64,
    wire_ms: f64,
    pin_ms: f64,
}

impl Script {
    fn of((mib, keys, figures): Reported, place: usize) -> Script {
        let (speed_up, saved) = figures[place];
        let package = Package { size: (mib << 20) / SCALE as usize, keys };
        let pooled_ms = saved / (speed_up - 1.0) / SCALE;
        let baseline_ms = pooled_ms * speed_up;
        let wire_ms = package.bytes() as f64 / (WIRE * NICS[place] as f64) * 1e3;
        Script { package, nics: NICS[place], speed_up, baseline_ms, pooled_ms, wire_ms, pin_ms: baseline_ms - wire_ms }
    }

    /// What the first NIC takes to register a MiB. The time of the report is what all NICs took together, so the others take none.
    fn pin_us_per_mib(&self) -> f64 {
        self.pin_ms * 1e3 / (self.package.bytes() as f64 / f64::from(1 << 20))
    }
}

/// All rows of no more than so many bytes, those of one NIC first.
pub fn scripts(most_bytes: usize) -> Vec<Script> {
    let all = (0..NICS.len()).flat_map(|place| REPORT.map(|row| Script::of(row, place)));
    all.filter(|script| script.package.bytes() <= most_bytes).collect()
}

/// Speed-up and saved milliseconds of the report's row whose keys have `1 / SCALE` of their size here; `place` is that of [`NICS`].
pub fn reported(size: u64, keys: u64, place: usize) -> Option<(f64, f64)> {
    let scaled = |mib: usize| (mib << 20) as u64 / SCALE as u64;
    REPORT.iter().find(|row| (scaled(row.0), row.1 as u64) == (size, keys)).map(|row| row.2[place])
}

/// The fake verbs library with NICs like the report's, and memory for the rows.
pub struct Stand {
    fake: FakeVerbs,
    verbs: PathBuf,
    memory: Memory,
}

impl Stand {
    /// For these rows. No engine may have loaded that library before.
    pub fn new(verbs: &Path, scripts: &[Script]) -> Result<Stand, Box<dyn Error>> {
        let fake = FakeVerbs::load(verbs)?;
        // The other engine's devices come after the first one's.
        fake.set(-1, c"devices", 2 * NICS[NICS.len() - 1] as i64)?;
        fake.set(-1, c"copy", 0)?;
        fake.set(-1, c"register_serially", 1)?;
        fake.set(-1, c"wire_mbits", (WIRE * 8.0 / 1e6) as i64)?;
        let packages: Vec<Package> = scripts.iter().map(|script| script.package).collect();
        Ok(Stand { fake, verbs: verbs.to_path_buf(), memory: Memory::new(&packages, true)? })
    }

    /// An engine with so many NICs, and its peer.
    pub fn subject(&self, nics: usize) -> Result<Subject, Box<dyn Error>> {
        let of = |first: usize| TransportArguments {
            protocol: Protocol::Rdma,
            devices: (first..first + nics).map(|number| format!("fake{number}")).collect(),
        };
        let (near, far) = (of(0), of(NICS[NICS.len() - 1]));
        Ok(Subject::over(&near, &far, Some(&self.verbs), &self.memory, POOL)?.with_workers(WORKERS))
    }

    /// Puts in each way, and lets the choice of the engine settle.
    pub fn prepare(&mut self, subject: &Subject, script: &Script) -> Result<(), Box<dyn Error>> {
        self.set_cost(script.pin_us_per_mib())?;
        subject.check(&mut self.memory, script.package, false)?;
        subject.warm_up(&self.memory, script.package)?;
        self.set_cost(0.0)
    }

    /// One round of these ways.
    pub fn measure_round(
        &self,
        subject: &Subject,
        script: &Script,
        ways: &[Way],
        round: usize,
        limit: Duration,
    ) -> Result<Round, Box<dyn Error>> {
        self.set_cost(script.pin_us_per_mib())?;
        let samples = subject.measure_round(&self.memory, script.package, ways, round, limit)?;
        self.set_cost(0.0)?;
        Ok(samples)
    }

    /// What registering costs from now on: nothing, while engines are made.
    fn set_cost(&self, us_per_mib: f64) -> Result<(), Box<dyn Error>> {
        Ok(self.fake.set(0, c"register_microseconds_per_mib", us_per_mib.round() as i64)?)
    }
}

#[derive(Serialize)]
struct Row {
    script: Script,
    baseline_ms: Spread,
    direct_ms: Spread,
    staged_ms: Spread,
    auto_ms: Spread,
    /// Baseline to auto, round by round.
    speed_up: Spread,
    /// What copying the bytes once takes in the fastest way.
    copy_ms: Spread,
    /// The report's baseline to the longer of the wire and the copies, round by round.
    bound: Spread,
}

impl Row {
    /// `copies`: MB/s of copying in each round.
    fn of(script: Script, copies: &[f64], rounds: &[Round]) -> Row {
        let [baseline_ms, direct_ms, staged_ms, auto_ms] =
            WAYS.map(|way| Spread::over(rounds, |round| round[way as usize].us / 1e3));
        let speed_up = Spread::over(rounds, |round| round[Way::Baseline as usize].us / round[Way::Auto as usize].us);
        let copy_ms = |rate: &f64| script.package.bytes() as f64 / rate / 1e3;
        let bound = Spread::over(copies, |rate| script.baseline_ms / script.wire_ms.max(copy_ms(rate)));
        Row { script, baseline_ms, direct_ms, staged_ms, auto_ms, speed_up, copy_ms: Spread::over(copies, copy_ms), bound }
    }

    /// Against the baseline that was measured, or the report's: that one is longer where here one thread's transfer passes while another registers.
    fn verdict(&self) -> &'static str {
        let best = self.speed_up.median.max(self.script.baseline_ms / self.auto_ms.median);
        match (best >= self.script.speed_up, self.bound.median < self.script.speed_up) {
            (true, _) => "reached",
            (false, true) => "bounded",
            (false, false) => "missed",
        }
    }
}

#[derive(Serialize)]
struct Report {
    machine: Machine,
    rounds: u32,
    fixed_work_ms: Spread,
    rows: Vec<Row>,
}

/// Runs `te bench pool --seed-rows`, without rows of more than `most_bytes`.
pub fn run(verbs: &Path, most_bytes: usize, rounds: u32, limit: Duration, as_json: bool) -> Result<(), Box<dyn Error>> {
    let machine = Machine::look();
    let scripts = scripts(most_bytes);
    let mut stand = Stand::new(verbs, &scripts)?;
    let ground = Ground::new(scripts.iter().map(|script| script.package.bytes()).max().unwrap_or(0))?;
    let mut fixed_work = Vec::new();
    let mut rows = Vec::new();
    for nics in NICS {
        let subject = stand.subject(nics)?;
        for script in scripts.iter().filter(|script| script.nics == nics) {
            eprintln!("{nics} NICs, {} keys of {}", script.package.keys, output::bytes(script.package.size as u64));
            stand.prepare(&subject, script)?;
            fixed_work.push(time_fixed_work());
            let (mut samples, mut copies) = (Vec::new(), Vec::new());
            for round in 0..rounds as usize {
                samples.push(stand.measure_round(&subject, script, &WAYS, round, limit)?);
                copies.push(ground.best_rate(script.package.bytes()));
            }
            rows.push(Row::of(*script, &copies, &samples));
        }
    }
    let report = Report { machine, rounds, fixed_work_ms: Spread::of(fixed_work), rows };
    print_report(as_json, &report, text)
}

fn text(report: &Report) -> String {
    let mut out = report.machine.to_string();
    out.push('\n');
    out += &output::paragraph(&format!(
        "A report's rows at 1/{SCALE} of their sizes and times. NICs of the fake verbs library: wires of 200 Gb/s each; registering takes \
         what remains of the report's time without a pool. {WORKERS} threads put, as in the report. ms of a put, medians of {} rounds. To be: \
         what the report amounts to, without and with its pool. Wire, copy: what moving the bytes takes, and copying them once by memcpy \
         or as the pool does, on one or all CPUs, whichever is fastest, in the same rounds. Bound: how much faster than the report's baseline a put would be that takes the longer of \
         the two and nothing else. Then the report's speed-up, and what came of it, against the baseline that was measured or the report's.",
        report.rounds
    ));
    out += &format!(
        "\n{:>4} {:>5} {:>4} {:>10} {:>8} {:>6} {:>6} {:>6} {:>5} {:>5} {:>17} {:>17} {:>6}\n",
        "NICs", "size", "keys", "to be", "baseline", "direct", "staged", "auto", "wire", "copy", "speed-up", "bound", "report"
    );
    for row in &report.rows {
        let Script { package, nics, speed_up, baseline_ms, pooled_ms, wire_ms, .. } = row.script;
        let to_be = format!("{baseline_ms:.1} {pooled_ms:.1}");
        let [baseline, direct, staged, auto, copy] =
            [row.baseline_ms, row.direct_ms, row.staged_ms, row.auto_ms, row.copy_ms].map(|spread| format!("{:.1}", spread.median));
        out += &format!(
            "{nics:>4} {:>5} {:>4} {to_be:>10} {baseline:>8} {direct:>6} {staged:>6} {auto:>6} {wire_ms:>5.1} {copy:>5} {:>17} {:>17} \
             {speed_up:>6.2} {}\n",
            short_size(package.size),
            package.keys,
            row.speed_up,
            row.bound,
            row.verdict()
        );
    }
    let count = |verdict| report.rows.iter().filter(|row| row.verdict() == verdict).count();
    out += &format!(
        "\nOf {} rows, the report's speed-up is reached or beaten in {}, out of reach of this machine's copies in {}, missed in {}.\n",
        report.rows.len(),
        count("reached"),
        count("bounded"),
        count("missed")
    );
    out += &noise(report.fixed_work_ms);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_row_takes_adds_up_to_the_report() {
        for place in 0..NICS.len() {
            for row in REPORT {
                let script = Script::of(row, place);
                let (speed_up, saved) = row.2[place];
                assert!((script.baseline_ms - script.pooled_ms - saved / SCALE).abs() < 1e-9, "{script:?}");
                assert!((script.baseline_ms / script.pooled_ms - speed_up).abs() < 1e-9, "{script:?}");
                assert!(script.pin_ms > 0.0 && script.pin_us_per_mib() > 40.0, "{script:?}");
            }
        }
        // 1 GiB over one NIC of 25 GB/s, a sixteenth.
        assert!((Script::of(REPORT[0], 0).wire_ms - 2.684).abs() < 0.001);
    }

    #[test]
    fn rows_that_copying_keeps_from_the_report_are_told_from_those_that_are_missed() {
        let verdict = |auto, copy_ms, baseline: f64| {
            let script = Script::of(REPORT[6], 1);
            let mut round = Round::default();
            (round[Way::Baseline as usize].us, round[Way::Auto as usize].us) = (script.baseline_ms * baseline * 1e3, auto * 1e3);
            Row::of(script, &[script.package.bytes() as f64 / copy_ms / 1e3], &[round]).verdict()
        };
        // To be: 9.2 ms without, 2.8 with.
        assert_eq!([verdict(2.8, 1.0, 1.0), verdict(3.0, 1.0, 1.0), verdict(7.0, 6.5, 1.0)], ["reached", "missed", "bounded"]);
        assert_eq!([verdict(2.8, 1.0, 0.8), verdict(3.0, 1.0, 0.8), verdict(3.0, 1.0, 1.2)], ["reached", "missed", "reached"]);
    }
}
