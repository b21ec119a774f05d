//! Keeps what a sweep has measured, and its files up to date: whoever ends the sweep finds in them what was measured until then.
//!
//! The report is behind one lock that is held for moments. The files are written from a copy of it, behind a lock of their own, every
//! two seconds by a thread, and by whoever ends the sweep: its end, or the thread that hears of a signal ([`Recorder::save_at_the_end`]).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use transfer_engine::sys::{signals, thread};

use crate::report::{Better, Key, Report, Skipped};

/// Where a sweep's figures go. Any thread may call anything.
pub struct Recorder {
    report: Mutex<Report>,
    begin: Instant,
    /// How long the sweep may take.
    budget: Duration,
    directory: PathBuf,
    /// Held while the files are written. Whether that was for the last time.
    files: Mutex<bool>,
}

/// The sweep of this process.
static RECORDER: OnceLock<Arc<Recorder>> = OnceLock::new();

impl Recorder {
    /// Begins the report of a sweep that may take so long, whose files will be in this directory; makes the directory.
    pub fn begin(command: String, directory: &Path, budget: Duration) -> io::Result<Arc<Recorder>> {
        fs::create_dir_all(directory).map_err(|error| cannot_write(directory, &error))?;
        let recorder = Recorder {
            report: Mutex::new(Report::begin(command)),
            begin: Instant::now(),
            budget,
            directory: directory.to_path_buf(),
            files: Mutex::new(false),
        };
        recorder.save()?;
        Ok(Arc::new(recorder))
    }

    /// Adds a sample to the measurement of that key.
    pub fn add(&self, key: Key, unit: &str, better: Better, sample: f64) {
        self.report().add(key, unit, better, sample);
    }

    /// Notes that something cannot be measured here, once.
    pub fn skip(&self, what: &str, why: &str) {
        let skipped = Skipped { what: what.to_string(), why: why.to_string() };
        let mut report = self.report();
        if !report.skipped.contains(&skipped) {
            report.skipped.push(skipped);
        }
    }

    /// How long the sweep may still take.
    pub fn remaining(&self) -> Duration {
        self.budget.saturating_sub(self.begin.elapsed())
    }

    /// Until when other processes are waited for: a little past the end, so that what takes all that was left is still a sample.
    pub fn last_answer(&self) -> Instant {
        self.begin + self.budget + Duration::from_secs(2)
    }

    /// Where the report is.
    pub fn path(&self) -> PathBuf {
        self.directory.join("measurements.json")
    }

    /// Has the files written every two seconds from now on, and once more when SIGINT or SIGTERM ends the process, which they then do at
    /// once, with 128 plus the number of the signal. For one sweep of a process.
    pub fn save_at_the_end(self: &Arc<Recorder>) -> io::Result<()> {
        if RECORDER.set(self.clone()).is_err() {
            return Err(io::Error::other("this process has another sweep"));
        }
        signals::run_at_end(|| {
            if let Some(recorder) = RECORDER.get() {
                let mut files = recorder.files();
                let _ = recorder.write(&recorder.copy(), &mut files).inspect_err(Recorder::complain);
                *files = true;
            }
        })?;
        let recorder = self.clone();
        let save = move || {
            loop {
                std::thread::sleep(Duration::from_secs(2));
                let _ = recorder.save().inspect_err(Recorder::complain);
            }
        };
        thread::spawn("te-sweep", save).map(drop)
    }

    /// Writes the files for the last time, as those of a sweep that has come to its end. The report, and whether it was written.
    pub fn finish(&self) -> (Report, io::Result<()>) {
        let report = Report { complete: true, ..self.copy() };
        let mut files = self.files();
        let written = self.write(&report, &mut files);
        *files = true;
        (report, written)
    }

    fn save(&self) -> io::Result<()> {
        let mut files = self.files();
        self.write(&self.copy(), &mut files)
    }

    /// Without effect after the last time.
    fn write(&self, report: &Report, is_last_written: &mut bool) -> io::Result<()> {
        if *is_last_written {
            return Ok(());
        }
        let partial = self.directory.join("measurements.csv.partial");
        report
            .write(&self.path())
            .and_then(|()| fs::write(&partial, csv(report)))
            .and_then(|()| fs::rename(&partial, self.directory.join("measurements.csv")))
            .map_err(|error| cannot_write(&self.directory, &error))
    }

    fn copy(&self) -> Report {
        Report { seconds: self.begin.elapsed().as_secs_f64(), ..self.report().clone() }
    }

    fn complain(error: &io::Error) {
        eprintln!("te: {error}");
    }

    fn report(&self) -> MutexGuard<'_, Report> {
        self.report.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn files(&self) -> MutexGuard<'_, bool> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn cannot_write(directory: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("cannot write to {}: {error}", directory.display()))
}

/// A line for each sample.
fn csv(report: &Report) -> String {
    let mut out = "table,quantity,subject,place,unit,round,value\n".to_string();
    for measurement in &report.measurements {
        let key = &measurement.key;
        let place: Vec<String> = key.place.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let words =
            [&key.table.to_string(), &key.quantity, &key.subject, &place.join(";"), &measurement.unit].map(|word| field(word));
        for (round, sample) in measurement.samples.iter().enumerate() {
            out += &format!("{},{},{sample}\n", words.join(","), round + 1);
        }
    }
    out
}

/// A field of a CSV file: in quotes if a reader could take a part of it for something else.
fn field(word: &str) -> String {
    match word.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", word.replace('"', "\"\"")),
        false => word.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Table;

    fn key(quantity: &str) -> Key {
        Key::new(Table::Index, quantity, "ours", &[("regions", 256u64.into()), ("device", "none".into())])
    }

    #[test]
    fn files_hold_what_was_recorded_until_the_last_time() {
        let directory = std::env::temp_dir().join(format!("te-recorder-{}", std::process::id()));
        let recorder = Recorder::begin("te bench sweep".to_string(), &directory, Duration::ZERO).unwrap();
        assert_eq!(Report::read(&recorder.path()).unwrap().measurements, []);
        recorder.add(key("churn"), "ns", Better::Less, 1.5);
        recorder.skip("wheel", "none");
        recorder.skip("wheel", "none");
        recorder.save().unwrap();
        let report = Report::read(&recorder.path()).unwrap();
        assert_eq!((report.complete, report.measurements[0].samples.as_slice(), report.skipped.len()), (false, &[1.5][..], 1));
        let (last, written) = recorder.finish();
        written.unwrap();
        recorder.add(key("churn"), "ns", Better::Less, 2.5);
        recorder.save().unwrap();
        assert!(last.complete);
        assert_eq!(Report::read(&recorder.path()).unwrap(), last);
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 2, "nothing half-written is left");
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn what_was_measured_is_there_even_if_it_cannot_be_written() {
        let directory = std::env::temp_dir().join(format!("te-recorder-gone-{}", std::process::id()));
        let recorder = Recorder::begin("te bench sweep".to_string(), &directory, Duration::ZERO).unwrap();
        recorder.add(key("churn"), "ns", Better::Less, 1.5);
        fs::remove_dir_all(&directory).unwrap();
        let (report, written) = recorder.finish();
        assert_eq!(report.measurements[0].samples, [1.5]);
        assert!(written.unwrap_err().to_string().contains("cannot write to"));
    }

    #[test]
    fn a_line_of_csv_is_a_sample() {
        let mut report = Report::begin(String::new());
        report.add(key("churn"), "ns", Better::Less, 1.5);
        report.add(key("look-up, 2 readers"), "ns", Better::Less, 3.0);
        report.add(key("churn"), "ns", Better::Less, 2.0);
        let lines = ["churn,ours,device=none;regions=256,ns,1,1.5", "churn,ours,device=none;regions=256,ns,2,2"];
        let quoted = "\"look-up, 2 readers\",ours,device=none;regions=256,ns,1,3";
        let expected =
            format!("table,quantity,subject,place,unit,round,value\nindex,{}\nindex,{}\nindex,{quoted}\n", lines[0], lines[1]);
        assert_eq!(csv(&report), expected);
        assert_eq!(field("a\"b"), "\"a\"\"b\"");
    }
}
