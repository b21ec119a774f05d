//! A file of measurements: `te bench sweep` writes it, `te plot` draws it and `te bench --compare` compares two of them.
//!
//! A measurement is all samples of one quantity of one subject in one place, where a place is what else was fixed: the number of
//! regions, the device, the size and so on. Tables, curves and ratios are made from the samples, so that each figure can be traced.
//! Names of tables, quantities, subjects and keys of places are written once, below.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::bench::machine::Machine;
use crate::bench::statistics::Spread;

/// What [`Report::format`] says.
const FORMAT: &str = "te-measurements";
/// The version of the format: a reader refuses others. New keys of places, tables and quantities do not change it.
const VERSION: u32 = 1;
/// What a sample that is not 0 lies between, whatever its unit: no clock or link has others, and pictures have no room for them.
const SAMPLES: std::ops::RangeInclusive<f64> = 1e-12..=1e18;

/// Everything that one run has measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Always `te-measurements`.
    pub format: String,
    /// Always 1.
    pub version: u32,
    /// Whether the run came to its end; what an interrupted one has measured until then is as good.
    pub complete: bool,
    /// When it began: seconds since 1970.
    pub started: u64,
    /// How long it took.
    pub seconds: f64,
    /// The command line.
    pub command: String,
    /// What it ran on.
    pub machine: Machine,
    /// In the order in which they were begun.
    pub measurements: Vec<Measurement>,
    /// What was to be measured and was not.
    pub skipped: Vec<Skipped>,
}

/// All samples of one thing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// What they are samples of.
    #[serde(flatten)]
    pub key: Key,
    /// `ns`, `us`, `ms`, `MB/s`, `ratio` …
    pub unit: String,
    /// Which direction is the good one.
    pub better: Better,
    /// One for each round, in their order.
    pub samples: Vec<f64>,
}

/// What is measured: equal keys in two reports can be compared.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Key {
    /// Which table it belongs to.
    pub table: Table,
    /// What is measured: `register`, `look-up`.
    pub quantity: String,
    /// Whose it is: `ours`, `wheel`, `linear scan`.
    pub subject: String,
    /// What is fixed besides.
    pub place: BTreeMap<String, Value>,
}

/// Parts of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Table {
    /// Structures that find regions, by the number of regions: `look-up`, `churn`, and both with two readers and a writer.
    Index,
    /// Registering and unregistering, by the number of regions that are there already.
    Register,
    /// The steps that registering consists of; `step` of the place says which.
    Steps,
    /// Registering large memory with several devices, one after the other and at a time.
    Parallel,
    /// Puts through a pool, and with a registration each.
    Pool,
    /// Latency and throughput of transfers.
    Transfer,
    /// How steady the machine was.
    Machine,
}

/// Whether less or more is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// Times.
    Less,
    /// Rates.
    More,
}

/// One coordinate of a place.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Value {
    /// Yes or no.
    Flag(bool),
    /// Counts and sizes in bytes.
    Number(u64),
    /// Names.
    Text(String),
}

/// Something that was not measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    /// Which part of the run.
    pub what: String,
    /// Why not.
    pub why: String,
}

impl Report {
    /// Of a run that begins now.
    pub fn begin(command: String) -> Report {
        let started = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |time| time.as_secs());
        Report {
            format: FORMAT.to_string(),
            version: VERSION,
            complete: false,
            started,
            seconds: 0.0,
            command,
            machine: Machine::look(),
            measurements: Vec::new(),
            skipped: Vec::new(),
        }
    }

    /// Adds a sample to the measurement of that key, which the first sample makes.
    pub fn add(&mut self, key: Key, unit: &str, better: Better, sample: f64) {
        match self.measurements.iter_mut().find(|measurement| measurement.key == key) {
            Some(measurement) => measurement.samples.push(sample),
            None => self.measurements.push(Measurement { key, unit: unit.to_string(), better, samples: vec![sample] }),
        }
    }

    /// The measurements of a table.
    pub fn table(&self, table: Table) -> impl Iterator<Item = &Measurement> {
        self.measurements.iter().filter(move |measurement| measurement.key.table == table)
    }

    /// What was measured of that key.
    pub fn find(&self, key: &Key) -> Option<&Measurement> {
        self.measurements.iter().find(|measurement| measurement.key == *key)
    }

    /// Reads a file; one of another kind or version is an error that says so.
    pub fn read(path: &Path) -> io::Result<Report> {
        let fail = |what: String| io::Error::new(io::ErrorKind::InvalidData, format!("{}: {what}", path.display()));
        let text =
            fs::read_to_string(path).map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))?;
        let report: Report =
            serde_json::from_str(&text).map_err(|error| fail(format!("is not a file of te bench sweep: {error}")))?;
        if report.format != FORMAT || report.version != VERSION {
            return Err(fail(format!("has format {} version {}, not {FORMAT} version {VERSION}", report.format, report.version)));
        }
        if let Some(empty) = report.measurements.iter().find(|measurement| measurement.samples.is_empty()) {
            return Err(fail(format!("has no samples of {}", empty.key)));
        }
        for measurement in &report.measurements {
            if let Some(sample) = measurement.samples.iter().find(|sample| **sample != 0.0 && !SAMPLES.contains(sample)) {
                return Err(fail(format!("has a sample of {sample:e} {} of {}", measurement.unit, measurement.key)));
            }
        }
        Ok(report)
    }

    /// Writes the file whole or not at all: a reader never sees a part of it.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let partial = path.with_extension("json.partial");
        fs::write(&partial, serde_json::to_string_pretty(self)? + "\n")?;
        fs::rename(&partial, path)
    }
}

impl Measurement {
    /// Median, smallest and largest.
    pub fn spread(&self) -> Spread {
        Spread::of(self.samples.clone())
    }

    /// These samples divided by those of another one, round by round.
    pub fn ratio_to(&self, other: &Measurement) -> Spread {
        Spread::of(self.samples.iter().zip(&other.samples).map(|(sample, other)| sample / other).collect())
    }
}

impl Key {
    /// A key with this place.
    pub fn new(table: Table, quantity: &str, subject: &str, place: &[(&str, Value)]) -> Key {
        Key {
            table,
            quantity: quantity.to_string(),
            subject: subject.to_string(),
            place: place.iter().map(|(name, value)| (name.to_string(), value.clone())).collect(),
        }
    }

    /// A number of the place.
    pub fn number(&self, name: &str) -> Option<u64> {
        match self.place.get(name) {
            Some(Value::Number(number)) => Some(*number),
            _ => None,
        }
    }
}

/// As in the file.
impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// `index look-up, ours (regions 256)`.
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let table = self.table;
        let place: Vec<String> = self.place.iter().map(|(name, value)| format!("{name} {value}")).collect();
        write!(f, "{table} {}, {} ({})", self.quantity, self.subject, place.join(", "))
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Flag(flag) => write!(f, "{flag}"),
            Value::Number(number) => write!(f, "{number}"),
            Value::Text(text) => f.pad(text),
        }
    }
}

impl From<bool> for Value {
    fn from(flag: bool) -> Value {
        Value::Flag(flag)
    }
}

impl From<u64> for Value {
    fn from(number: u64) -> Value {
        Value::Number(number)
    }
}

impl From<usize> for Value {
    fn from(number: usize) -> Value {
        Value::Number(number as u64)
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        Value::Text(text.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(regions: u64) -> Key {
        Key::new(Table::Index, "look-up", "ours", &[("regions", regions.into()), ("device", "none".into())])
    }

    fn sample_report() -> Report {
        let mut report = Report::begin("te bench sweep".to_string());
        for sample in [3.0, 1.0, 2.0] {
            report.add(key(256), "ns", Better::Less, sample);
        }
        report.add(key(8192), "ns", Better::Less, 4.5);
        report
    }

    #[test]
    fn samples_of_a_key_come_together_in_their_order() {
        let report = sample_report();
        assert_eq!(report.measurements.len(), 2);
        assert_eq!(report.measurements[0].samples, [3.0, 1.0, 2.0]);
        assert_eq!(report.measurements[0].spread().median, 2.0);
        assert_eq!(report.measurements[0].key.number("regions"), Some(256));
        assert_eq!(key(256).to_string(), "index look-up, ours (device none, regions 256)");
    }

    #[test]
    fn what_is_written_can_be_read() {
        let path = std::env::temp_dir().join(format!("te-report-{}.json", std::process::id()));
        let report = sample_report();
        report.write(&path).unwrap();
        assert_eq!(Report::read(&path).unwrap(), report);
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn files_of_another_kind_or_version_are_refused_with_a_reason() {
        let path = std::env::temp_dir().join(format!("te-report-bad-{}.json", std::process::id()));
        let refuse = |text: &str| {
            fs::write(&path, text).unwrap();
            Report::read(&path).unwrap_err().to_string()
        };
        assert!(refuse("[1]").contains("is not a file of te bench sweep"));
        let other = Report { version: 2, ..sample_report() };
        assert!(refuse(&serde_json::to_string(&other).unwrap()).contains("version 2, not te-measurements version 1"));
        let mut empty = sample_report();
        empty.measurements[1].samples.clear();
        assert!(refuse(&serde_json::to_string(&empty).unwrap()).contains("no samples of index look-up"));
        for sample in [1e308, 5e-324, -5.0] {
            let mut odd = sample_report();
            odd.measurements[1].samples[0] = sample;
            assert!(refuse(&serde_json::to_string(&odd).unwrap()).contains("ns of index look-up"), "{sample:e}");
        }
        fs::remove_file(&path).unwrap();
        assert!(Report::read(&path).unwrap_err().to_string().contains("te-report-bad"));
    }
}
