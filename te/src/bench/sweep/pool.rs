//! Puts by a pool of staging buffers, beside registering the payloads for each put, by size, keys and devices.
//!
//! Devices are rings of io_uring, which pin as NICs do; bytes are then moved by a memmove. With the fake verbs library, the rows of the
//! third report, too, at 1/16 of their sizes ([`seed`]). A sample is what a put takes on average over some milliseconds, one put at least:
//! a pool's trials of the other path are in it. In the first round every byte is compared where it arrives, but for the report's rows,
//! whose NICs move none.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::{Cell, Recorder, tables};
use crate::bench::puts::{Memory, Package, Round, Subject, Way};
use crate::bench::rings::Rings;
use crate::bench::seed::{self, Script, Stand};
use crate::bench::statistics::Spread;
use crate::output;
use crate::report::{Better, Key, Measurement, Report, Table, Value};

const REGISTERING: &str = "register each time";
const POOL: &str = "pool";
const WAYS: [Way; 2] = [Way::Baseline, Way::Auto];

const RINGS: &str = "io_uring";
const FAKE_VERBS: &str = "fake verbs";

const UNPREPARED: &str = "a place is measured that was not prepared";

/// How long a way puts in a round.
const LIMIT: Duration = Duration::from_millis(5);

/// A cell for each package and number of devices; and for each of the report's rows, if there is that library.
pub fn cells(is_quick: bool, verbs: Option<&Path>) -> Vec<Box<dyn Cell>> {
    let (sizes, keys, devices, most, pool): (&[usize], &[usize], &[usize], usize, usize) = match is_quick {
        true => (&[4 << 10, 64 << 10, 1 << 20, 4 << 20], &[1, 16], &[1, 8], 64 << 20, 64 << 20),
        // The pool's largest lease is an eighth of it.
        false => (
            &[4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20],
            &[1, 4, 16, 64, 256],
            &[1, 4, 8],
            128 << 20,
            512 << 20,
        ),
    };
    let packages = sizes.iter().flat_map(|size| keys.iter().map(|keys| Package { size: *size, keys: *keys }));
    let packages: Vec<Package> = packages.filter(|package| package.bytes() <= most).collect();
    let rings = Rc::new(RefCell::new(Ringed { pool, packages: packages.clone(), subjects: BTreeMap::new(), memory: None }));
    let mut cells: Vec<Box<dyn Cell>> = Vec::new();
    for devices in devices.iter().copied() {
        for package in packages.iter().copied() {
            cells.push(Box::new(Place { package, devices, device: RINGS, round: 0, stage: rings.clone() }));
        }
    }
    if let Some(verbs) = verbs {
        let scripts = seed::scripts(if is_quick { most } else { usize::MAX });
        let stage = Rc::new(RefCell::new(Scripted {
            verbs: verbs.into(),
            scripts: scripts.clone(),
            subjects: BTreeMap::new(),
            stand: None,
        }));
        for Script { package, nics, .. } in scripts {
            cells.push(Box::new(Place { package, devices: nics, device: FAKE_VERBS, round: 0, stage: stage.clone() }));
        }
    }
    cells
}

/// What places share: memory, and an engine with a pool for each number of devices.
trait Stage {
    /// Why there are no such devices.
    fn missing(&self) -> Option<String>;

    /// Makes what is not there yet, puts once in each way, and lets the engine's choice settle.
    fn prepare(&mut self, package: Package, devices: usize) -> Result<(), Box<dyn Error>>;

    /// Both ways, once.
    fn measure(&self, package: Package, devices: usize, round: usize) -> Result<Round, Box<dyn Error>>;
}

/// Both ways in one place.
struct Place {
    package: Package,
    devices: usize,
    device: &'static str,
    round: usize,
    stage: Rc<RefCell<dyn Stage>>,
}

impl Cell for Place {
    fn name(&self) -> String {
        let size = output::bytes(self.package.size as u64);
        format!("puts of {} keys of {size}, {} devices, {}", self.package.keys, self.devices, self.device)
    }

    fn measure(&mut self, recorder: &Recorder) -> Result<(), Box<dyn Error>> {
        let mut stage = self.stage.borrow_mut();
        if let Some(why) = stage.missing() {
            recorder.skip(&format!("puts with {}", self.device), &why);
            return Ok(());
        }
        if self.round == 0 {
            stage.prepare(self.package, self.devices)?;
        }
        let samples = stage.measure(self.package, self.devices, self.round)?;
        self.round += 1;
        for (subject, way) in [REGISTERING, POOL].into_iter().zip(WAYS) {
            let place: [(&str, Value); 4] = [
                ("size", self.package.size.into()),
                ("keys", self.package.keys.into()),
                ("devices", self.devices.into()),
                ("device", self.device.into()),
            ];
            let sample = samples[way as usize];
            recorder.add(Key::new(Table::Pool, "put", subject, &place), "ms", Better::Less, sample.mean_us / 1e3);
            let key = Key::new(Table::Pool, "registrations", subject, &place);
            recorder.add(key, "calls", Better::Less, sample.registrations);
        }
        Ok(())
    }
}

/// Rings of io_uring.
struct Ringed {
    packages: Vec<Package>,
    pool: usize,
    // Ended before the memory.
    subjects: BTreeMap<usize, Subject>,
    memory: Option<Memory>,
}

impl Stage for Ringed {
    fn missing(&self) -> Option<String> {
        match self.subjects.is_empty() {
            true => Rings::new(1, Arc::default()).err().map(|error| error.to_string()),
            false => None,
        }
    }

    fn prepare(&mut self, package: Package, devices: usize) -> Result<(), Box<dyn Error>> {
        let memory = match &mut self.memory {
            Some(memory) => memory,
            None => self.memory.insert(Memory::new(&self.packages, false)?),
        };
        let subject = match self.subjects.entry(devices) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(Subject::with_rings(devices, memory, self.pool)?),
        };
        subject.check(memory, package, true)?;
        subject.warm_up(memory, package)
    }

    fn measure(&self, package: Package, devices: usize, round: usize) -> Result<Round, Box<dyn Error>> {
        let (memory, subject) = (self.memory.as_ref().ok_or(UNPREPARED)?, self.subjects.get(&devices).ok_or(UNPREPARED)?);
        subject.measure_round(memory, package, &WAYS, round, LIMIT)
    }
}

/// The report's rows.
struct Scripted {
    verbs: PathBuf,
    scripts: Vec<Script>,
    // Ended before the memory.
    subjects: BTreeMap<usize, Subject>,
    stand: Option<Stand>,
}

impl Scripted {
    fn script(&self, package: Package, nics: usize) -> Result<Script, &'static str> {
        self.scripts.iter().find(|script| script.package == package && script.nics == nics).copied().ok_or(UNPREPARED)
    }
}

impl Stage for Scripted {
    fn missing(&self) -> Option<String> {
        None
    }

    fn prepare(&mut self, package: Package, devices: usize) -> Result<(), Box<dyn Error>> {
        let script = self.script(package, devices)?;
        let stand = match &mut self.stand {
            Some(stand) => stand,
            None => self.stand.insert(Stand::new(&self.verbs, &self.scripts)?),
        };
        let subject = match self.subjects.entry(devices) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(stand.subject(devices)?),
        };
        stand.prepare(subject, &script)
    }

    fn measure(&self, package: Package, devices: usize, round: usize) -> Result<Round, Box<dyn Error>> {
        let (stand, subject) = (self.stand.as_ref().ok_or(UNPREPARED)?, self.subjects.get(&devices).ok_or(UNPREPARED)?);
        stand.measure_round(subject, &self.script(package, devices)?, &WAYS, round, LIMIT)
    }
}

/// The tables in the report's columns, one for each kind of devices.
pub fn text(report: &Report) -> String {
    let rows: Vec<&Measurement> = report
        .table(Table::Pool)
        .filter(|measurement| measurement.key.quantity == "put" && measurement.key.subject == REGISTERING)
        .collect();
    let kinds = tables::distinct(rows.iter().filter_map(|row| row.key.place.get("device")));
    let of_kind = |kind: &Value| {
        let rows: Vec<&Measurement> = rows.iter().copied().filter(|row| row.key.place.get("device") == Some(kind)).collect();
        let mut out = "\n".to_string();
        out += &output::paragraph(&format!(
            "Puts by a pool beside registering each key for each put, devices: {kind}. Speed-up and ms saved, round by round; registrations of \
             a put: without the pool and with it. The report's figures are of {} times the size, where it has that row.",
            seed::SCALE
        ));
        out.push('\n');
        out + &tables::aligned(&lines(report, &rows))
    };
    kinds.into_iter().map(of_kind).collect()
}

/// The heading, and a line for each size and number of keys.
fn lines(report: &Report, rows: &[&Measurement]) -> Vec<Vec<String>> {
    let number = |row: &Measurement, name: &str| row.key.number(name).unwrap_or(0);
    let counts = tables::distinct(rows.iter().map(|row| number(row, "devices")));
    let mut heading = ["size a key", "keys", "total"].map(str::to_string).to_vec();
    for devices in &counts {
        let count = if *devices == 1 { "1 device".to_string() } else { format!("{devices} devices") };
        heading.extend([format!("{count}: speed-up"), "ms saved".into(), "registrations".into()]);
        heading.extend(seed::NICS.contains(&(*devices as usize)).then(|| "report".to_string()));
    }
    let mut lines = vec![heading];
    for (size, keys) in tables::distinct(rows.iter().map(|row| (number(row, "size"), number(row, "keys")))) {
        let mut line = vec![output::bytes(size), keys.to_string(), output::bytes(size * keys)];
        for devices in &counts {
            let is_it =
                |row: &&&Measurement| [number(row, "size"), number(row, "keys"), number(row, "devices")] == [size, keys, *devices];
            line.extend(rows.iter().find(is_it).map_or_else(Default::default, |row| figures(report, row)));
            let reported = seed::NICS.iter().position(|nics| *nics as u64 == *devices);
            line.extend(reported.map(|place| seed::reported(size, keys, place).map(beside).unwrap_or_default()));
        }
        lines.push(line);
    }
    lines
}

/// Speed-up, ms saved, registrations.
fn figures(report: &Report, registering: &Measurement) -> [String; 3] {
    let of = |quantity: &str, subject: &str| {
        report.find(&Key { quantity: quantity.to_string(), subject: subject.to_string(), ..registering.key.clone() })
    };
    let Some(pool) = of("put", POOL) else { return Default::default() };
    let saved: Vec<f64> = registering.samples.iter().zip(&pool.samples).map(|(one, other)| one - other).collect();
    let registrations = [REGISTERING, POOL].map(|subject| of("registrations", subject).map_or(0.0, |of| of.spread().median));
    [
        registering.ratio_to(pool).to_string(),
        format!("{:.3}", Spread::of(saved).median),
        registrations.map(|count| format!("{count:.0}")).join(" "),
    ]
}

/// `1.40x, 36.98 ms`.
fn beside((speed_up, saved): (f64, f64)) -> String {
    format!("{speed_up:.2}x, {saved:.2} ms")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_stands_beside_its_rows() {
        let mut report = Report::begin(String::new());
        for (keys, devices) in [(256usize, 1usize), (256, 4), (256, 8), (16, 1)] {
            for (subject, ms, registrations) in [(REGISTERING, 6.0, keys as f64), (POOL, 2.0, 0.0)] {
                let place: [(&str, Value); 4] = [
                    ("size", (256usize << 10).into()),
                    ("keys", keys.into()),
                    ("devices", devices.into()),
                    ("device", RINGS.into()),
                ];
                report.add(Key::new(Table::Pool, "put", subject, &place), "ms", Better::Less, ms);
                report.add(Key::new(Table::Pool, "registrations", subject, &place), "calls", Better::Less, registrations);
            }
        }
        let text = text(&report);
        let lines: Vec<&str> = text.lines().collect();
        let words =
            |line: &str| line.split("  ").map(str::trim).filter(|word| !word.is_empty()).map(str::to_string).collect::<Vec<_>>();
        let figures = ["3.00 (3.00..3.00)", "4.000", "256 0"];
        let first =
            [["256 KiB", "256", "64 MiB"].as_slice(), &figures, &["1.40x, 36.98 ms"], &figures, &figures, &["2.20x, 91.13 ms"]];
        assert_eq!(words(lines[lines.len() - 2]), first.concat(), "{text}");
        assert_eq!(words(lines[lines.len() - 1])[3..], ["3.00 (3.00..3.00)", "4.000", "16 0"], "{text}");
    }
}
