//! `te bench sweep`: all tables in one run, into a file of measurements.
//!
//! A table is a list of cells. A round measures each cell once, in an order that is the same in every round, so that a neighbour on the
//! machine hits all alike and that every cell has about as many samples when the time is over. Cells are set up when they are measured
//! for the first time. A cell that fails is noted among what was skipped, and left out from then on; the sweep ends with status 1
//! then, but for what a limit of the process forbids. Nothing waits for other processes for much longer than the time that is left
//! ([`Recorder::last_answer`]).
//!
//! The files are written every two seconds ([`recorder`]). SIGINT and SIGTERM end the process within the second, in whatever call it is, and
//! leave them behind; processes that it has started end with it.

mod index;
mod parallel;
mod pool;
mod recorder;
mod register;
mod tables;
mod transfer;

pub use self::parallel::REPORTED as REPORTED_PARALLEL;

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use clap::builder::RangedU64ValueParser;
use indicatif::{ProgressBar, ProgressStyle};
use transfer_engine::error::Code;

use self::recorder::Recorder;
use super::machine::{time_fixed_work, time_round_trip};
use crate::output;
use crate::plot;
use crate::report::{Better, Key, Report, Table};

/// Arguments of `te bench sweep`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Few figures within a minute: other defaults for what takes long.
    #[arg(long)]
    quick: bool,
    /// Where the files go: measurements.json, measurements.csv, report.html and the charts.
    #[arg(long, default_value = "te-sweep")]
    out: PathBuf,
    /// Seconds after which no further round is begun, and which the last one is to end in.
    #[arg(long, default_value_t = 540, default_value_if("quick", "true", "50"), value_parser = clap::value_parser!(u64).range(1..))]
    budget: u64,
    /// Rounds, if there is time for so many.
    #[arg(long, default_value_t = 15, default_value_if("quick", "true", "3"), value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// What to measure, each once.
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = Part::value_variants().to_vec())]
    tables: Vec<Part>,
    /// Numbers of regions that are there beforehand, ascending.
    #[arg(long, value_delimiter = ',', default_value = "256,1024,4096,8192,16384,65536")]
    #[arg(default_value_if("quick", "true", "256,8192,65536"), value_parser = count_parser())]
    regions: Vec<usize>,
    #[command(flatten)]
    register: register::Arguments,
    /// The verbs library of this repository's tests, for the rows of a report on puts at 1/16 of their sizes.
    #[arg(long, value_name = "PATH")]
    verbs: Option<PathBuf>,
}

impl Arguments {
    /// What is measured. Whoever names a part twice does not want twice as many samples.
    fn parts(&self) -> Vec<Part> {
        tables::distinct(self.tables.iter().copied())
    }
}

/// Of numbers of regions: no more than addresses can be computed of.
fn count_parser() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=1 << 32)
}

/// A part of the sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
enum Part {
    /// Structures that find regions.
    Index,
    /// Registering and unregistering, and the steps of it.
    Register,
    /// Registering with several devices.
    Parallel,
    /// Puts by a pool of staging buffers.
    Pool,
    /// Latency and throughput of transfers between two processes.
    Transfer,
}

/// As on the command line.
impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.to_possible_value().as_ref().map_or("", |value| value.get_name()))
    }
}

impl Part {
    fn cells(self, arguments: &Arguments) -> Result<Vec<Box<dyn Cell>>, Box<dyn Error>> {
        Ok(match self {
            Part::Index => index::cells(&tables::distinct(arguments.regions.iter().copied())),
            Part::Register => register::cells(&arguments.register, &tables::distinct(arguments.regions.iter().copied()))?,
            Part::Parallel => parallel::cells(arguments.quick),
            Part::Pool => pool::cells(arguments.quick, arguments.verbs.as_deref()),
            Part::Transfer => transfer::cells(arguments.quick, &arguments.register.wheel),
        })
    }

    /// Its tables, as text.
    fn text(self, report: &Report) -> String {
        match self {
            Part::Index => index::text(report),
            Part::Register => register::text(report),
            Part::Parallel => parallel::text(report),
            Part::Pool => pool::text(report),
            Part::Transfer => transfer::text(report),
        }
    }
}

/// What is measured together in a round: all subjects in one place, or in a few.
trait Cell {
    /// For progress, and for what is said of it if it fails.
    fn name(&self) -> String;

    /// Adds one sample of each of its measurements. The first time it is set up; what the caches have to learn is not in the samples.
    /// What cannot be measured on this machine is told to the recorder, and is no error.
    fn measure(&mut self, recorder: &Recorder) -> Result<(), Box<dyn Error>>;
}

/// What a round measures, each with the part that it belongs to.
type Cells = Vec<(Part, Box<dyn Cell>)>;

/// Runs `te bench sweep`.
pub fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let cells = cells(arguments)
        .unwrap_or_else(|error| clap::Error::raw(clap::error::ErrorKind::ValueValidation, format!("{error}\n")).exit());
    let command: Vec<String> = std::env::args().collect();
    let recorder = Recorder::begin(command.join(" "), &arguments.out, Duration::from_secs(arguments.budget))?;
    recorder.save_at_the_end()?;
    let failed = measure(cells, arguments.rounds, &recorder);
    let (report, written) = recorder.finish();
    // What was measured is shown even where it cannot be written.
    output::print(&text(arguments, &report))?;
    written?;
    for path in [vec![recorder.path()], plot::draw(&[recorder.path()], &arguments.out)?].concat() {
        eprintln!("{}", path.display());
    }
    match failed {
        0 => Ok(()),
        _ => Err(format!("{failed} cells have failed; what was skipped says why").into()),
    }
}

/// Those of all parts. Nothing is set up or written yet: an error is one of the arguments.
fn cells(arguments: &Arguments) -> Result<Cells, Box<dyn Error>> {
    let mut cells = Cells::new();
    for part in arguments.parts() {
        cells.extend(part.cells(arguments)?.into_iter().map(|cell| (part, cell)));
    }
    Ok(cells)
}

/// Measures round by round, until there are so many or the time is over. How many cells have failed.
fn measure(cells: Cells, rounds: u32, recorder: &Recorder) -> usize {
    let mut failed = 0;
    let mut progress = Progress::new(cells.len() as u64 * u64::from(rounds));
    // What a cell took the last time, once there was one.
    let mut cells: Vec<_> = cells.into_iter().map(|(part, cell)| (part, cell, None::<Duration>)).collect();
    for round in 1..=rounds {
        let is_over = |least: Duration| recorder.remaining() <= least;
        let last: Duration = cells.iter().filter_map(|(_, _, took)| *took).sum();
        let mut unbegun: BTreeMap<Part, usize> = BTreeMap::new();
        if cells.is_empty() || is_over(last) {
            break;
        }
        let machine = |quantity| Key::new(Table::Machine, quantity, "machine", &[]);
        recorder.add(machine("fixed work"), "ms", Better::Less, time_fixed_work());
        recorder.add(machine("round trip"), "ns", Better::Less, time_round_trip());
        cells.retain_mut(|(part, cell, took)| {
            progress.step(round, &cell.name());
            if is_over(took.unwrap_or_default()) {
                if took.is_none() {
                    *unbegun.entry(*part).or_default() += 1;
                }
                return took.is_some();
            }
            let begin = Instant::now();
            let outcome = cell.measure(recorder);
            *took = Some(begin.elapsed());
            if let Err(error) = &outcome {
                recorder.skip(&cell.name(), &error.to_string());
                if !is_limit(error.as_ref()) {
                    eprintln!("te: {}: {error}", cell.name());
                    failed += 1;
                }
            }
            outcome.is_ok()
        });
        for (part, count) in unbegun {
            recorder.skip(&format!("{count} cells of the table {part}"), "the time was over");
        }
    }
    progress.finish();
    failed
}

/// Whether a limit of this process forbids it, such as that on locked memory: the machine is told about, and nothing is wrong.
fn is_limit(error: &(dyn Error + 'static)) -> bool {
    error.downcast_ref::<transfer_engine::Error>().is_some_and(|error| error.code() == Code::Limit)
}

/// How far it is: a bar on a terminal, else a line now and then.
struct Progress {
    bar: ProgressBar,
    is_terminal: bool,
    last_line: Option<Instant>,
}

impl Progress {
    /// Of so many steps.
    fn new(steps: u64) -> Progress {
        let bar = ProgressBar::new(steps);
        if let Ok(style) = ProgressStyle::with_template("{elapsed_precise} [{bar:40}] {pos}/{len} {msg}") {
            bar.set_style(style.progress_chars("=> "));
        }
        Progress { bar, is_terminal: std::io::stderr().is_terminal(), last_line: None }
    }

    fn step(&mut self, round: u32, what: &str) {
        self.bar.set_message(format!("round {round}: {what}"));
        self.bar.inc(1);
        if !self.is_terminal && self.last_line.is_none_or(|line| line.elapsed() > Duration::from_secs(10)) {
            eprintln!("round {round}: {what}");
            self.last_line = Some(Instant::now());
        }
    }

    fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

fn text(arguments: &Arguments, report: &Report) -> String {
    let mut out = report.machine.to_string();
    out.push('\n');
    out += &output::paragraph("Medians (smallest..largest) of the rounds.");
    for part in arguments.parts() {
        out += &part.text(report);
    }
    out += &tables::ending(report);
    out
}
