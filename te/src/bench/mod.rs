//! `te bench`: measures engines of this library, beside what the machine itself can do.
//!
//! Figures are medians over rounds with their smallest and largest. What is timed is checked: regions are looked up, and bytes are
//! compared where they arrive; the program fails if anything is not as it should be. Tables, or JSON, go to standard output, progress
//! to standard error.

mod compare;
mod copies;
#[cfg(feature = "rdma")]
mod device;
pub mod machine;
mod model;
mod open;
mod perftest;
mod pin;
mod pool;
mod publish;
mod puts;
mod raw;
mod register;
mod rings;
mod seed;
pub mod statistics;
mod sweep;
mod target;
mod transfer;

pub use self::seed::reported as reported_put;
pub use self::sweep::REPORTED_PARALLEL;

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;

use clap::{Subcommand, ValueEnum};
use serde::Serialize;
use transfer_engine::config::Config;
use transfer_engine::engine::{Engine, EngineOptions, MemoryOptions};
use transfer_engine::telemetry;

use crate::output;
use crate::size::parse_size;

/// What is to be measured, or compared.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true, arg_required_else_help = true)]
pub struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    /// Compare two files of `te bench sweep`: exit status 1 if the second is worse than the first.
    #[arg(long, num_args = 2, value_names = ["FIRST", "SECOND"], required = true)]
    compare: Vec<PathBuf>,
    /// Percent by which a measurement may become worse.
    #[arg(long, value_name = "PERCENT", default_value_t = 10.0, value_parser = parse_percent, requires = "compare")]
    tolerance: f64,
    /// Print the comparison as JSON.
    #[arg(long, requires = "compare")]
    json: bool,
}

fn parse_percent(text: &str) -> Result<f64, String> {
    let percent: f64 = text.parse().map_err(|_| "is no number".to_string())?;
    if percent.is_finite() && percent >= 0.0 { Ok(percent) } else { Err("must be 0 or more".to_string()) }
}

/// What can be measured.
#[derive(Subcommand)]
pub enum Command {
    /// Cost of registering and unregistering memory, by the number of regions that are there already.
    Register(register::Arguments),
    /// Time to open the segment of a peer with many regions, and to the end of the first transfer.
    Open(open::Arguments),
    /// Latency, throughput and processor time of transfers between two processes, beside plain sockets or perftest.
    Transfer(transfer::Arguments),
    /// Putting by a pool of staging buffers, beside registering for each put.
    Pool(pool::Arguments),
    /// All tables in one run, into a file of measurements, with what they are measured beside.
    Sweep(sweep::Arguments),
    /// The other end of `open` and `transfer`, which start it themselves.
    #[command(hide = true)]
    Target(target::Arguments),
}

/// Runs `te bench`.
pub fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let Some(command) = &arguments.command else {
        let [first, second] = arguments.compare.as_slice() else { return Err("two files are compared".into()) };
        return compare::run(first, second, arguments.tolerance, arguments.json);
    };
    match command {
        Command::Register(arguments) => register::run(arguments),
        Command::Open(arguments) => open::run(arguments),
        Command::Transfer(arguments) => transfer::run(arguments),
        Command::Pool(arguments) => pool::run(arguments),
        Command::Sweep(arguments) => sweep::run(arguments),
        Command::Target(arguments) => target::run(arguments),
    }
}

/// What moves bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Protocol {
    /// Sockets.
    Tcp,
    /// RDMA devices.
    Rdma,
}

/// The transport of an engine, as arguments of a command.
#[derive(clap::Args, Clone, Serialize)]
struct TransportArguments {
    /// What moves the bytes.
    #[arg(long, value_enum, default_value = "tcp")]
    protocol: Protocol,
    /// RDMA devices, all alike; without any, those that the engine finds.
    #[arg(long, value_delimiter = ',')]
    devices: Vec<String>,
}

impl TransportArguments {
    fn tcp() -> TransportArguments {
        TransportArguments { protocol: Protocol::Tcp, devices: Vec::new() }
    }

    /// As words of a command line.
    fn words(&self) -> Vec<String> {
        match (self.protocol, self.devices.is_empty()) {
            (Protocol::Tcp, _) => Vec::new(),
            (Protocol::Rdma, true) => vec!["--protocol=rdma".to_string()],
            (Protocol::Rdma, false) => vec!["--protocol=rdma".to_string(), format!("--devices={}", self.devices.join(","))],
        }
    }

    /// An engine on the loopback address with this transport, whose log is shown.
    fn create_engine(&self) -> transfer_engine::Result<Arc<Engine>> {
        self.create_engine_with(Config::from_environment())
    }

    fn create_engine_with(&self, config: Config) -> transfer_engine::Result<Arc<Engine>> {
        let engine = bare_engine(config)?;
        match self.protocol {
            Protocol::Tcp if engine.has_transport("tcp") => {}
            Protocol::Tcp => engine.install_transport("tcp", None)?,
            Protocol::Rdma => {
                let matrix = serde_json::json!({ "cpu:0": [self.devices, []] }).to_string();
                engine.install_transport("rdma", (!self.devices.is_empty()).then_some(&matrix))?;
            }
        }
        Ok(engine)
    }
}

/// An engine on the loopback address without a transport, whose log is shown.
fn bare_engine(config: Config) -> transfer_engine::Result<Arc<Engine>> {
    telemetry::log::install();
    let options =
        EngineOptions { metadata: "P2PHANDSHAKE".to_string(), server_name: "127.0.0.1".to_string(), ..EngineOptions::default() };
    Engine::create(&options, config)
}

/// An engine with the TCP transport.
fn create_engine() -> transfer_engine::Result<Arc<Engine>> {
    TransportArguments::tcp().create_engine()
}

fn memory_options() -> MemoryOptions {
    MemoryOptions { location: "cpu:0".into(), remote_accessible: true, counted: false, parallelism: None, publish: true }
}

/// Prints a report: as text, or everything as JSON.
fn print_report<R: Serialize>(as_json: bool, report: &R, text: impl FnOnce(&R) -> String) -> Result<(), Box<dyn Error>> {
    let text = if as_json { serde_json::to_string_pretty(report)? + "\n" } else { text(report) };
    Ok(output::print(&text)?)
}

/// Fills memory with bytes that depend on the seed and on each place, so that what lands in the wrong place is noticed.
fn fill(bytes: &mut [u8], seed: u64) {
    for (index, chunk) in bytes.chunks_mut(8).enumerate() {
        chunk.copy_from_slice(&pattern(seed, index)[..chunk.len()]);
    }
}

/// Offset of the first byte, rounded down to 8, that is not as [`fill`] leaves it.
fn find_difference(bytes: &[u8], seed: u64) -> Option<usize> {
    bytes.chunks(8).enumerate().find(|(index, chunk)| pattern(seed, *index)[..chunk.len()] != **chunk).map(|(index, _)| index * 8)
}

/// Splitmix64 of the place and the seed.
fn pattern(seed: u64, index: usize) -> [u8; 8] {
    let mut value = seed.wrapping_add((index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (value ^ (value >> 31)).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_wrong_byte_anywhere_is_found() {
        let mut bytes = vec![0; 1003];
        fill(&mut bytes, 5);
        assert_eq!((find_difference(&bytes, 5), find_difference(&bytes, 6)), (None, Some(0)));
        for wrong in [0, 8, 500, 1002] {
            bytes[wrong] ^= 1;
            assert_eq!(find_difference(&bytes, 5), Some(wrong / 8 * 8));
            bytes[wrong] ^= 1;
        }
    }
}
