//! Registering large memory with several devices: one after the other, on a thread for each, and as this library does it.
//!
//! Devices are rings of io_uring, which pin as NICs do. Each way registers fresh memory that was prepared in the same manner, and
//! unregisters it; ways take turns in coming first. How a round is measured is [`pin`]'s.
//!
//! [`pin`]: super::super::pin

use std::cell::OnceCell;
use std::error::Error;
use std::rc::Rc;

use super::{Cell, Recorder, tables};
use crate::bench::pin::{Cost, Fleet, Memory, Pages};
use crate::output;
use crate::report::{Better, Key, Measurement, Report, Table, Value};

const SEQUENTIAL: &str = "sequential";
const THREADS: &str = "thread per device";
const OURS: &str = "ours";
/// As [`Fleet::measure_round`] has the costs of the ways.
const SUBJECTS: [&str; 3] = [SEQUENTIAL, THREADS, OURS];

type Figure = fn(&Cost) -> f64;

/// What is measured of each.
const QUANTITIES: [(&str, Figure); 3] = [
    ("register", |cost| cost.register),
    ("unregister", |cost| cost.unregister),
    ("allocate, register, unregister", |cost| cost.allocate + cost.register + cost.unregister),
];

/// A cell for each kind of memory, size of pages and number of devices.
pub fn cells(is_quick: bool) -> Vec<Box<dyn Cell>> {
    use Memory::{Alternating, Shared, Untouched, Written, Zeros};
    let (devices, kinds, size): (&[usize], &[Memory], usize) = match is_quick {
        true => (&[1, 4, 8], &[Written, Untouched], 32 << 20),
        false => (&[1, 2, 4, 8], &[Written, Untouched, Zeros, Alternating, Shared], 64 << 20),
    };
    let mut cells: Vec<Box<dyn Cell>> = Vec::new();
    for devices in devices.iter().copied() {
        let fleet = Rc::new(OnceCell::new());
        for memory in kinds.iter().copied() {
            let all = [Pages::Small, Pages::Huge].into_iter();
            for pages in all.filter(|pages| memory.can_consist_of(*pages)) {
                cells.push(Box::new(Way { memory, pages, devices, size, fleet: fleet.clone(), round: 0 }));
            }
        }
    }
    cells
}

/// All ways in one place.
struct Way {
    memory: Memory,
    pages: Pages,
    devices: usize,
    size: usize,
    /// Of all places with as many devices.
    fleet: Rc<OnceCell<Fleet>>,
    round: usize,
}

impl Cell for Way {
    fn name(&self) -> String {
        let size = output::bytes(self.size as u64);
        format!("{size} {}, pages of {}, {} devices", self.memory.name(), self.pages.name(), self.devices)
    }

    fn measure(&mut self, recorder: &Recorder) -> Result<(), Box<dyn Error>> {
        let fleet = match (self.fleet.get(), self.round) {
            (Some(fleet), _) => fleet,
            (None, 0) => match Fleet::new(self.devices) {
                Ok(fleet) => self.fleet.get_or_init(|| fleet),
                Err(error) => {
                    self.round = 1;
                    recorder.skip("registering with several devices", &error.to_string());
                    return Ok(());
                }
            },
            (None, _) => return Ok(()),
        };
        let measure = |round| fleet.measure_round::<{ SUBJECTS.len() }>(round, self.memory, self.pages, self.size);
        if self.round == 0 {
            measure(0)?;
        }
        let costs = measure(self.round)?;
        self.round += 1;
        for (subject, cost) in SUBJECTS.iter().zip(&costs) {
            for (quantity, figure) in QUANTITIES {
                let place: [(&str, Value); 4] = [
                    ("memory", self.memory.name().as_str().into()),
                    ("page", self.pages.name().into()),
                    ("devices", self.devices.into()),
                    ("size", self.size.into()),
                ];
                recorder.add(Key::new(Table::Parallel, quantity, subject, &place), "ms", Better::Less, figure(cost) / 1e3);
            }
        }
        Ok(())
    }
}

/// What the second report says: memory, quantity, and how many times as fast as one after the other a thread for each device was.
pub const REPORTED: [(&str, &str, f64); 6] = [
    ("written", "register", 49.198 / 11.662),
    ("written", "unregister", 11.754 / 1.459),
    ("written", "allocate, register, unregister", 65.399 / 17.353),
    ("untouched", "register", 86.930 / 461.999),
    ("untouched", "unregister", 11.498 / 1.822),
    ("untouched", "allocate, register, unregister", 98.945 / 464.469),
];

/// The table in the report's columns.
pub fn text(report: &Report) -> String {
    let sequential: Vec<&Measurement> =
        report.table(Table::Parallel).filter(|measurement| measurement.key.subject == SEQUENTIAL).collect();
    if sequential.is_empty() {
        return String::new();
    }
    let mut out = "\n".to_string();
    out += &output::paragraph(
        "Registering memory with several devices (rings of io_uring): by a thread for each device, as the report's parallel registration; as \
         this library does; and one device after the other. ms. Ratios are to one after the other, round by round. The report's figures \
         are of 500 GB of DRAM and several NICs.",
    );
    out.push('\n');
    let heading =
        ["memory", "page", "size", "devices", "step", "parallel", "ours", "sequential", "parallel ratio", "our ratio", "report"];
    let mut lines = vec![heading.map(str::to_string).to_vec()];
    for measurement in sequential {
        let key = &measurement.key;
        let word = |name: &str| key.place.get(name).map(Value::to_string).unwrap_or_default();
        let of = |subject: &str| report.find(&Key { subject: subject.to_string(), ..key.clone() });
        let figure = |subject| of(subject).map(|of| of.spread().to_string()).unwrap_or_default();
        let ratio = |subject| of(subject).map(|of| measurement.ratio_to(of)).map(|ratio| speed(ratio.median)).unwrap_or_default();
        // One device is neither.
        let reported = REPORTED.iter().filter(|_| key.number("devices") > Some(1));
        let reported = reported.filter(|(memory, quantity, _)| word("memory") == *memory && key.quantity == *quantity);
        lines.push(vec![
            word("memory"),
            word("page"),
            output::bytes(key.number("size").unwrap_or(0)),
            word("devices"),
            key.quantity.clone(),
            figure(THREADS),
            figure(OURS),
            measurement.spread().to_string(),
            ratio(THREADS),
            ratio(OURS),
            reported.map(|(_, _, ratio)| format!("the report has {}", speed(*ratio))).collect(),
        ]);
    }
    out + &tables::aligned(&lines)
}

/// `4.2x faster`, `5.3x slower`.
fn speed(ratio: f64) -> String {
    if ratio >= 1.0 { format!("{ratio:.1}x faster") } else { format!("{:.1}x slower", 1.0 / ratio) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_stand_beside_what_the_report_has() {
        let mut report = Report::begin(String::new());
        for (subject, samples) in [(SEQUENTIAL, [8.0, 16.0]), (THREADS, [16.0, 32.0]), (OURS, [4.0, 8.0])] {
            for sample in samples {
                let place = [("memory", "untouched".into()), ("devices", 8usize.into())];
                report.add(Key::new(Table::Parallel, "register", subject, &place), "ms", Better::Less, sample);
            }
        }
        let text = text(&report);
        let line = text.lines().last().unwrap_or_default();
        assert!(line.ends_with("2.0x slower  2.0x faster  the report has 5.3x slower"), "{text}");
    }

    #[test]
    fn what_a_kind_of_memory_cannot_consist_of_is_no_cell() {
        // Large pages of a file are the machine's choice.
        assert_eq!((cells(true).len(), cells(false).len()), (3 * 4, 4 * 9));
    }
}
