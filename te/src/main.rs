//! The command-line program of the transfer engine: shows what an engine would find on this machine, measures engines, and serves their
//! metadata.
//!
//! Results go to standard output, progress and errors to standard error. Exit status: 0 done, 1 failed, 2 wrong arguments.

mod bench;
mod info;
mod metadata_server;
mod output;
mod plot;
mod report;
mod ring;
mod size;
mod system;
mod watch;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Shows and measures Mooncake transfer engines, and serves their metadata.
#[derive(Parser)]
#[command(version, about, disable_help_subcommand = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show version, machine, limits, interfaces, and every environment variable, with advice; or what the engines of a process do.
    Info(info::Arguments),
    /// Measure engines of this library, or compare two files of measurements.
    Bench(Box<bench::Arguments>),
    /// Draw files of `te bench sweep`: a page with every chart, and each as SVG and PNG.
    Plot(plot::Arguments),
    /// Keep the metadata of a cluster's engines, over HTTP, until SIGTERM or SIGINT.
    MetadataServer(metadata_server::Arguments),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Info(arguments) => info::run(&arguments).map_err(Into::into),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Plot(arguments) => plot::run(&arguments),
        Command::MetadataServer(arguments) => metadata_server::run(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("te: {error}");
            ExitCode::FAILURE
        }
    }
}
