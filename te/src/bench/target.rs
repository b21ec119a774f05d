//! The other end of `te bench open` and `transfer`: a process with a registered arena, and the handle on it.
//!
//! The target prints one line of JSON that says where it is. Then each line on its standard input is a request and is answered by
//! one line; at the end of the input it ends, and so it does when its parent dies.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use transfer_engine::sys::MemoryRange;

use super::{TransportArguments, fill, find_difference, memory_options, raw};
use crate::system::{self, Arena};

/// Arguments of the hidden `te bench target`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Bytes of the arena.
    #[arg(long)]
    memory: usize,
    /// Bytes of each region of it.
    #[arg(long)]
    region: usize,
    #[command(flatten)]
    transport: TransportArguments,
}

/// Where a target is.
#[derive(Clone, Serialize, Deserialize)]
pub struct Location {
    /// Name of its segment.
    pub segment: String,
    /// Address of its arena.
    pub address: u64,
    /// Port of its plain sockets.
    pub raw_port: u16,
}

#[derive(Serialize, Deserialize)]
enum Request {
    /// Fill the first bytes. Answered by nothing.
    Fill { length: usize, seed: u64 },
    /// Compare the first bytes. Answered by the place of a difference.
    Check { length: usize, seed: u64 },
    /// Answered by the processor time in nanoseconds.
    CpuTime,
    /// Unregister the last region and register it again. Answered by nothing.
    ReplaceRegion,
}

/// Runs `te bench target`.
pub fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    system::die_with_parent();
    let mut arena = Arena::new(arguments.memory)?;
    // Pages are there before anything is timed.
    fill(arena.bytes_mut(), 0);
    let engine = arguments.transport.create_engine()?;
    let regions: Vec<MemoryRange> =
        (0..arguments.memory / arguments.region).map(|index| arena.range(index * arguments.region, arguments.region)).collect();
    let last = *regions.last().ok_or("a region is larger than the memory")?;
    engine.register_batch(&regions, &memory_options())?;
    let raw_port = raw::serve(arguments.memory)?;
    answer(&Location { segment: engine.name(), address: regions[0].address(), raw_port })?;
    for line in std::io::stdin().lock().lines() {
        match serde_json::from_str(&line?)? {
            Request::Fill { length, seed } => {
                fill(&mut arena.bytes_mut()[..length], seed);
                answer(&())?;
            }
            Request::Check { length, seed } => answer(&find_difference(&arena.bytes()[..length], seed))?,
            Request::ReplaceRegion => {
                engine.unregister(last.address())?;
                engine.register(last, &memory_options())?;
                answer(&())?;
            }
            Request::CpuTime => answer(&(system::process_cpu_time().as_nanos() as u64))?,
        }
    }
    engine.shutdown();
    Ok(())
}

fn answer(answer: &impl Serialize) -> Result<(), Box<dyn Error>> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(answer)?)?;
    Ok(out.flush()?)
}

/// A running target. Dropping it ends the process.
pub struct Target {
    child: Child,
    /// Taken when the target is to end.
    requests: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    /// Where it is.
    pub location: Location,
}

impl Target {
    /// Starts a target with so many bytes in regions of `region` bytes each, and returns when it can be reached.
    pub(super) fn start(memory: usize, region: usize, transport: &TransportArguments) -> Result<Target, Box<dyn Error>> {
        let mut child = std::process::Command::new(std::env::current_exe()?)
            .args(["bench", "target", "--memory", &memory.to_string(), "--region", &region.to_string()])
            .args(transport.words())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let requests = child.stdin.take();
        let mut answers = BufReader::new(child.stdout.take().ok_or("the target has no standard output")?);
        let location = match read_answer(&mut answers) {
            Ok(location) => location,
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(error);
            }
        };
        Ok(Target { child, requests, answers, location })
    }

    /// Fills the first bytes of its arena.
    pub fn fill(&mut self, length: usize, seed: u64) -> Result<(), Box<dyn Error>> {
        self.ask(&Request::Fill { length, seed })
    }

    /// Where the first bytes of its arena are not as [`super::fill`] makes them.
    pub fn find_difference(&mut self, length: usize, seed: u64) -> Result<Option<usize>, Box<dyn Error>> {
        self.ask(&Request::Check { length, seed })
    }

    /// Has it unregister and register its last region.
    pub fn replace_region(&mut self) -> Result<(), Box<dyn Error>> {
        self.ask(&Request::ReplaceRegion)
    }

    /// Processor time that it has used.
    pub fn cpu_time(&mut self) -> Result<Duration, Box<dyn Error>> {
        self.ask(&Request::CpuTime).map(Duration::from_nanos)
    }

    fn ask<T: DeserializeOwned>(&mut self, request: &Request) -> Result<T, Box<dyn Error>> {
        let requests = self.requests.as_mut().ok_or("the target has no standard input")?;
        writeln!(requests, "{}", serde_json::to_string(request)?)?;
        read_answer(&mut self.answers)
    }
}

fn read_answer<T: DeserializeOwned>(answers: &mut BufReader<ChildStdout>) -> Result<T, Box<dyn Error>> {
    let mut line = String::new();
    if answers.read_line(&mut line)? == 0 {
        return Err("the target process has ended; its messages are above".into());
    }
    Ok(serde_json::from_str(&line)?)
}

impl Drop for Target {
    fn drop(&mut self) {
        drop(self.requests.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
