//! Latency and throughput of transfers between two processes over TCP, by size, beside plain sockets between the same two, and beside
//! Mooncake's own package between two of its own, where it is.
//!
//! Latency is that of one request of each thread at a time, and throughput that of batches. Plain sockets: as many as there are threads; a
//! message there and a byte back, and messages one after the other. They are measured in turn with the engine, in each place anew, and
//! stand for both directions. In the first round every byte is compared where it arrives, also those of the package, which is called from
//! Python.

use std::cell::RefCell;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use super::{Cell, Recorder, tables};
use crate::bench::TransportArguments;
use crate::bench::publish::{Peer, Subject};
use crate::bench::raw::Waiting;
use crate::bench::transfer::{self, Bench, Operation};
use crate::output;
use crate::report::{Better, Key, Report, Table, Value};

const OURS: &str = "ours";
const SOCKETS: &str = "plain sockets";
const WHEEL: &str = "wheel";

/// Memory of each side.
const MEMORY: usize = 128 << 20;

/// The largest requests that Mooncake's own package is given: batches of larger ones would take most of the sweep's time.
const WHEEL_SIZE: usize = 4 << 20;

/// Requests of a batch where throughput is measured.
const BATCH: usize = 16;

/// A cell for each size, direction and number of threads.
pub fn cells(is_quick: bool, python: &Path) -> Vec<Box<dyn Cell>> {
    let (powers, milliseconds) = match is_quick {
        true => (vec![6, 12, 16, 20], 20),
        // 64 B to 16 MiB.
        false => ((6..=24).step_by(2).collect(), 40),
    };
    let stage = Rc::new(RefCell::new(Stage { bench: None, python: Some(python.to_path_buf()), wheel: None }));
    let mut cells: Vec<Box<dyn Cell>> = Vec::new();
    for power in powers {
        for operation in [Operation::Read, Operation::Write] {
            for threads in [1, 4] {
                let one = transfer::Cell { operation, size: 1 << power, threads, batch: 1, waiting: Waiting::Polling };
                let limit = Duration::from_millis(milliseconds);
                cells.push(Box::new(Place { one, limit, stage: stage.clone(), round: 0, plain: Plain::default() }));
            }
        }
    }
    cells
}

/// What all places share.
struct Stage {
    bench: Option<Bench>,
    /// Taken when the package is looked for.
    python: Option<PathBuf>,
    wheel: Option<Wheel>,
}

/// Two engines of Mooncake's own package.
struct Wheel {
    initiator: Peer,
    target: Peer,
}

impl Wheel {
    fn start(python: &Path, recorder: &Recorder) -> Result<Wheel, Box<dyn Error>> {
        let peer = || -> Result<Peer, Box<dyn Error>> {
            let mut peer = Peer::start(python, "P2PHANDSHAKE", "127.0.0.1", 1, [MEMORY, MEMORY], Some(recorder.last_answer()))?;
            peer.grow(1)?;
            Ok(peer)
        };
        Ok(Wheel { target: peer()?, initiator: peer()? })
    }

    /// A batch of each thread, and every byte is compared where it was to arrive.
    fn check(&mut self, cell: &transfer::Cell) -> Result<(), Box<dyn Error>> {
        let (from, to) = (1, 2);
        let (here, there) = match cell.operation {
            Operation::Read => (to, from),
            Operation::Write => (from, to),
        };
        self.initiator.fill(here)?;
        self.target.fill(there)?;
        self.initiator.transfer(&self.target, cell, Duration::ZERO)?;
        let arrived = match cell.operation {
            Operation::Read => &mut self.initiator,
            Operation::Write => &mut self.target,
        };
        arrived.compare(from, cell.bytes_at_once().min(MEMORY))
    }

    /// Latency and throughput.
    fn measure(&mut self, [one, many]: [&transfer::Cell; 2], limit: Duration) -> Result<(f64, f64), Box<dyn Error>> {
        let (latency, _) = self.initiator.transfer(&self.target, one, limit)?;
        let (_, rate) = self.initiator.transfer(&self.target, many, limit)?;
        Ok((latency, rate))
    }
}

/// Latency and throughput in one place.
struct Place {
    /// One request of each thread.
    one: transfer::Cell,
    /// How long each is measured in a round.
    limit: Duration,
    stage: Rc<RefCell<Stage>>,
    round: usize,
    /// Of the last round.
    plain: Plain,
}

/// What plain sockets gave: microseconds of a round trip, and MB/s.
#[derive(Clone, Copy, Default)]
struct Plain {
    latency: f64,
    rate: f64,
}

impl Plain {
    /// As many messages as take about so long, by what they took before.
    fn measure(self, bench: &Bench, many: &transfer::Cell, limit: Duration) -> Result<Plain, Box<dyn Error>> {
        let us = limit.as_secs_f64() * 1e6;
        let count = (us / self.latency).clamp(4.0, 10_000.0) as u64;
        // Bytes in a microsecond are MB in a second.
        let total = (us * self.rate) as usize;
        Ok(Plain {
            latency: bench.measure_round_trips(many.size, many.threads, count)?,
            rate: bench.measure_streams(many, total.max(many.size * many.threads))?,
        })
    }
}

impl Cell for Place {
    fn name(&self) -> String {
        let transfer::Cell { operation, size, threads, .. } = self.one;
        format!("{operation}s of {} by {threads} threads", output::bytes(size as u64))
    }

    fn measure(&mut self, recorder: &Recorder) -> Result<(), Box<dyn Error>> {
        let Stage { bench, python, wheel } = &mut *self.stage.borrow_mut();
        let bench = match bench {
            Some(bench) => bench,
            None => bench.insert(Bench::start(MEMORY, &TransportArguments::tcp(), &TransportArguments::tcp())?),
        };
        if let Some(python) = python.take() {
            let what = format!("the package mooncake-transfer-engine of {}", python.display());
            *wheel = Wheel::start(&python, recorder).inspect_err(|error| recorder.skip(&what, &error.to_string())).ok();
        }
        let (one, many) = (self.one, transfer::Cell { batch: BATCH, ..self.one });
        if self.round == 0 {
            // Too few to be a sample.
            let guess = Plain { latency: self.limit.as_secs_f64() * 1e6 / 20.0, rate: 100.0 };
            self.plain = guess.measure(bench, &many, self.limit)?;
            bench.measure_checked(&one, Duration::ZERO)?;
            bench.measure_checked(&many, Duration::ZERO)?;
        }
        let (mut ours, mut theirs) = (None, None);
        // Each comes first in every third round.
        for position in 0..3 {
            match (position + self.round) % 3 {
                0 => ours = Some((bench.measure(&one, self.limit)?.p50, bench.measure(&many, self.limit)?.rate)),
                1 => self.plain = self.plain.measure(bench, &many, self.limit)?,
                _ => {
                    let Some(running) = wheel.as_mut().filter(|_| one.size <= WHEEL_SIZE) else { continue };
                    let checked = if self.round == 0 { running.check(&one).and_then(|()| running.check(&many)) } else { Ok(()) };
                    match checked.and_then(|()| running.measure([&one, &many], self.limit)) {
                        Ok(figures) => theirs = Some(figures),
                        Err(error) => {
                            recorder.skip("the package mooncake-transfer-engine", &error.to_string());
                            *wheel = None;
                        }
                    }
                }
            }
        }
        self.round += 1;
        let (latency, rate) = ours.ok_or("the engine has not had its turn")?;
        let theirs = theirs.map(|(latency, rate)| (WHEEL, latency, rate));
        let subjects = [(OURS, latency, rate), (SOCKETS, self.plain.latency, self.plain.rate)];
        for (subject, latency, rate) in subjects.into_iter().chain(theirs) {
            let key = |quantity, batch: usize| {
                let place: [(&str, Value); 4] = [
                    ("operation", one.operation.to_string().as_str().into()),
                    ("size", one.size.into()),
                    ("threads", one.threads.into()),
                    ("batch", batch.into()),
                ];
                Key::new(Table::Transfer, quantity, subject, &place)
            };
            recorder.add(key("latency", 1), "us", Better::Less, latency);
            recorder.add(key("throughput", BATCH), "MB/s", Better::More, rate);
        }
        Ok(())
    }
}

/// A line for each place.
pub fn text(report: &Report) -> String {
    let mut lines = vec![
        ["", "threads", "size", "latency, us", SOCKETS, "to sockets", "to wheel", "MB/s", SOCKETS, "to sockets", "to wheel"]
            .map(str::to_string)
            .to_vec(),
    ];
    let mut latencies: Vec<_> = report
        .table(Table::Transfer)
        .filter(|measurement| measurement.key.quantity == "latency" && measurement.key.subject == OURS)
        .collect();
    latencies.sort_by_key(|latency| (latency.key.place.get("operation"), latency.key.number("threads")));
    for latency in latencies {
        let key = &latency.key;
        let word = |name: &str| key.place.get(name).map(Value::to_string).unwrap_or_default();
        let mut line = vec![word("operation"), word("threads"), output::bytes(key.number("size").unwrap_or(0))];
        let mut of_throughput = key.clone();
        of_throughput.quantity = "throughput".to_string();
        of_throughput.place.insert("batch".to_string(), BATCH.into());
        for key in [key, &of_throughput] {
            let of = |subject: &str| report.find(&Key { subject: subject.to_string(), ..key.clone() });
            let (Some(ours), Some(plain)) = (of(OURS), of(SOCKETS)) else { continue };
            line.extend([ours.spread(), plain.spread(), ours.ratio_to(plain)].map(|spread| spread.to_string()));
            line.push(of(WHEEL).map_or(String::new(), |wheel| ours.ratio_to(wheel).to_string()));
        }
        lines.push(line);
    }
    let mut out = "\n".to_string();
    out += &output::paragraph(&format!(
        "Transfers between two processes over TCP, beside plain sockets between the same two, and beside upstream's package: latency of one request of each thread at a time, \
         and throughput with {BATCH} requests in a batch of each thread. Ratios round by round: below 1 is better for latency, above 1 for \
         throughput."
    ));
    out.push('\n');
    if lines.len() > 1 { out + &tables::aligned(&lines) } else { String::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latency_and_throughput_of_a_place_share_a_line() {
        let mut report = Report::begin(String::new());
        for (subject, factor) in [(OURS, 1.0), (SOCKETS, 2.0), (WHEEL, 4.0)] {
            for (quantity, unit, batch, sample) in [("latency", "us", 1, 10.0), ("throughput", "MB/s", BATCH, 500.0)] {
                let place: [(&str, Value); 4] =
                    [("operation", "read".into()), ("size", 4096usize.into()), ("threads", 4usize.into()), ("batch", batch.into())];
                report.add(Key::new(Table::Transfer, quantity, subject, &place), unit, Better::Less, sample * factor);
            }
        }
        let text = text(&report);
        let line: Vec<&str> = text.lines().last().unwrap_or_default().split("  ").map(str::trim).collect();
        let figures = [
            "10.0 (10.0..10.0)",
            "20.0 (20.0..20.0)",
            "0.50 (0.50..0.50)",
            "500 (500..500)",
            "1000 (1000..1000)",
            "0.25 (0.25..0.25)",
        ];
        assert!(figures.iter().all(|figure| line.contains(figure)) && line[0] == "read", "{text}");
    }
}
