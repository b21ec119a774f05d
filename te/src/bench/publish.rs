//! `te bench register --metadata`: what it costs to register memory that a metadata server is told of, beside Mooncake's own package.
//!
//! An engine of this library, and with `--peer-python` one of the package in a process of its own, on the same server. Both hold so many
//! regions; in each round each registers and unregisters some more, and they take turns in coming first. What is timed is checked: after
//! every published change the server's text has as many regions as it should. Of the package that is only counted where several callers
//! were at work, since there an older text may replace a newer one.

use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use transfer_engine::config::Config;
use transfer_engine::engine::{Engine, EngineOptions, MemoryOptions};
use transfer_engine::metadata::store::{self, Keys, Store};
use transfer_engine::sys::MemoryRange;
use transfer_engine::telemetry;

use super::machine::{Machine, noise, time_fixed_work};
use super::statistics::Spread;
use super::{memory_options, print_report, transfer};
use crate::output;
use crate::system::{Arena, end_with_parent, process_cpu_time, wait_until_readable};

/// Bytes of a region.
const REGION: usize = 4096;
/// From the start of one region to that of the next.
const STRIDE: usize = 8192;

/// Arguments of `te bench register --metadata`, a part of those of `te bench register`.
#[derive(clap::Args, Serialize)]
#[group(skip)]
pub struct Arguments {
    /// Whether the metadata server is told of each change before the call returns.
    #[arg(long, value_enum, default_value = "both")]
    update_metadata: Choice,
    /// Numbers of regions that are registered beforehand, ascending.
    #[arg(long, value_delimiter = ',', default_value = "256,1024,4096,8192,16384", default_value_if("quick", "true", "256,1024"))]
    published_regions: Vec<usize>,
    /// Callers at a time, beside one alone.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=256))]
    callers: u32,
    /// Calls of each caller in a round.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    published_calls: u32,
    /// Rounds at each number of regions.
    #[arg(long, default_value = "7", default_value_if("quick", "true", "3"), value_parser = clap::value_parser!(u32).range(1..))]
    publish_rounds: u32,
    /// A Python that has the package mooncake-transfer-engine, to be measured beside this library.
    #[arg(long, value_name = "PATH")]
    peer_python: Option<PathBuf>,
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Choice {
    /// Published changes.
    Yes,
    /// Registrations that it learns of later.
    No,
    /// Both.
    Both,
}

/// A kind of call.
#[derive(Clone, Copy, PartialEq, Serialize)]
pub(super) struct Operation {
    pub(super) is_published: bool,
    pub(super) callers: u32,
    /// Calls of each caller.
    pub(super) calls: u32,
}

/// Of one call.
#[derive(Clone, Copy, Default)]
struct Cost {
    clock_us: f64,
    processor_us: f64,
    puts: Option<f64>,
}

/// One kind of call at one number of regions.
#[derive(Serialize)]
struct Row {
    #[serde(flatten)]
    operation: Operation,
    is_registering: bool,
    regions: usize,
    ours: Side,
    peer: Option<Side>,
    /// The peer's to ours, round by round.
    clock_ratio: Option<Spread>,
    processor_ratio: Option<Spread>,
}

#[derive(Serialize)]
struct Side {
    clock_us: Spread,
    processor_us: Spread,
    /// `None` where the server does not tell.
    puts: Option<Spread>,
    /// What one PUT carries.
    put_bytes: usize,
}

#[derive(Serialize)]
struct Report<'a> {
    machine: Machine,
    settings: &'a Arguments,
    server: &'a str,
    fixed_work_ms: Spread,
    rows: Vec<Row>,
    /// How often the package had published something else than it had registered when its callers were done.
    peer_stale: usize,
}

/// Runs the benchmark against a metadata server: a URI, or `start` for one of its own.
pub fn run(metadata: &str, arguments: &Arguments, as_json: bool) -> Result<(), Box<dyn Error>> {
    if !arguments.published_regions.is_sorted_by(|one, next| one < next) {
        return Err("--published-regions must be ascending".into());
    }
    let most = *arguments.published_regions.last().ok_or("--published-regions names none")?;
    let operations = operations(arguments);
    let extra = operations.iter().map(|operation| (operation.callers * operation.calls) as usize).max().unwrap_or(0);
    let machine = Machine::look();
    let started = (metadata == "start").then(OwnServer::start).transpose()?;
    let uri = started.as_ref().map_or(metadata, |server| &server.uri);
    let server = Server::new(uri)?;

    let mut subjects: Vec<(Box<dyn Subject>, String)> = Vec::new();
    let name = format!("te-bench-{}", std::process::id());
    subjects.push((Box::new(Own::new(uri, &name, most + extra)?), server.keys.segment(&name)));
    if let Some(python) = &arguments.peer_python {
        let name = format!("{name}-peer");
        subjects
            .push((Box::new(Peer::start(python, uri, &name, most + extra, [REGION, STRIDE], None)?), server.keys.segment(&name)));
    }
    let mut rows = Vec::new();
    let mut fixed_work = Vec::new();
    let mut peer_stale = 0;
    for regions in arguments.published_regions.iter().copied() {
        eprintln!("registering {regions} regions");
        for (subject, key) in &mut subjects {
            subject.grow(regions)?;
            server.check(key, regions)?;
        }
        // For each round, for each subject, for each operation: registering and unregistering.
        let mut rounds: Vec<Vec<Vec<[Cost; 2]>>> = Vec::new();
        for round in 0..=arguments.publish_rounds as usize {
            let mut costs = vec![Vec::new(); subjects.len()];
            for position in 0..subjects.len() {
                fixed_work.push(time_fixed_work());
                let at = (position + round) % subjects.len();
                let (subject, key) = &mut subjects[at];
                for operation in &operations {
                    let mut check = |expected| match server.check(key, expected) {
                        Err(_) if at > 0 && operation.callers > 1 => {
                            peer_stale += 1;
                            Ok(())
                        }
                        outcome => outcome,
                    };
                    costs[at].push(measure(subject.as_mut(), *operation, &server, |added| check(regions + added))?);
                }
            }
            // The first round finds nothing in the caches.
            if round > 0 {
                rounds.push(costs);
            }
        }
        let put_bytes = subjects.iter().map(|(_, key)| server.text(key).map(|text| text.len())).collect::<Result<Vec<_>, _>>()?;
        for (index, operation) in operations.iter().enumerate() {
            for change in 0..if operation.is_published { 2 } else { 1 } {
                let side = |subject: usize| Side {
                    clock_us: Spread::over(&rounds, |round| round[subject][index][change].clock_us),
                    processor_us: Spread::over(&rounds, |round| round[subject][index][change].processor_us),
                    puts: rounds[0][subject][index][change]
                        .puts
                        .map(|_| Spread::over(&rounds, |round| round[subject][index][change].puts.unwrap_or_default())),
                    put_bytes: put_bytes[subject],
                };
                let ratio = |figure: fn(&Cost) -> f64| {
                    let of = |round: &Vec<Vec<[Cost; 2]>>| figure(&round[1][index][change]) / figure(&round[0][index][change]);
                    (subjects.len() > 1).then(|| Spread::over(&rounds, of))
                };
                rows.push(Row {
                    operation: *operation,
                    is_registering: change == 0,
                    regions,
                    ours: side(0),
                    peer: (subjects.len() > 1).then(|| side(1)),
                    clock_ratio: ratio(|cost| cost.clock_us),
                    processor_ratio: ratio(|cost| cost.processor_us),
                });
            }
        }
    }
    rows.sort_by_key(|row| operations.iter().position(|operation| *operation == row.operation).map(|at| (at, !row.is_registering)));
    let report = Report { machine, settings: arguments, server: metadata, fixed_work_ms: Spread::of(fixed_work), rows, peer_stale };
    print_report(as_json, &report, text)
}

fn operations(arguments: &Arguments) -> Vec<Operation> {
    let calls = arguments.published_calls;
    let mut operations = Vec::new();
    if arguments.update_metadata != Choice::No {
        operations.extend([1, arguments.callers].map(|callers| Operation { is_published: true, callers, calls }));
    }
    if arguments.update_metadata != Choice::Yes {
        // They are so much faster that a few are lost in what the clock takes.
        operations.push(Operation { is_published: false, callers: 1, calls: calls * 16 });
    }
    operations.dedup();
    operations
}

/// Registers and unregisters. Removals that are not published are not measured. `check` is told how many more regions are published.
fn measure(
    subject: &mut dyn Subject,
    operation: Operation,
    server: &Server,
    mut check: impl FnMut(usize) -> Result<(), Box<dyn Error>>,
) -> Result<[Cost; 2], Box<dyn Error>> {
    let mut costs = [Cost::default(); 2];
    let calls = operation.callers * operation.calls;
    for (cost, is_registering) in costs.iter_mut().zip([true, false]) {
        let before = server.puts()?;
        let (clock, processor) = subject.call(operation, is_registering)?;
        let puts = server.puts()?.zip(before).map(|(after, before)| (after - before) / f64::from(calls));
        let per_call = |time: Duration| time.as_secs_f64() * 1e6 / f64::from(calls);
        *cost = Cost { clock_us: per_call(clock), processor_us: per_call(processor), puts };
        if operation.is_published {
            check(if is_registering { calls as usize } else { 0 })?;
        }
    }
    Ok(costs)
}

/// A metadata server, past all engines.
struct Server {
    store: Arc<dyn Store>,
    keys: Keys,
    /// Where it may tell how many requests it has answered.
    address: Option<String>,
}

impl Server {
    fn new(uri: &str) -> Result<Server, Box<dyn Error>> {
        let config = config();
        let address = uri.strip_prefix("http://").map(|rest| rest.split('/').next().unwrap_or(rest).to_string());
        Ok(Server { store: store::connect(uri, &config)?, keys: Keys::new(&config.metadata_cluster_id), address })
    }

    fn text(&self, key: &str) -> Result<String, Box<dyn Error>> {
        Ok(self.store.get(key)?.ok_or_else(|| format!("the metadata server has nothing under {key}"))?)
    }

    /// Whether the published segment has so many regions.
    fn check(&self, key: &str, regions: usize) -> Result<(), Box<dyn Error>> {
        match self.text(key)?.matches("\"addr\":").count() {
            found if found == regions => Ok(()),
            found => Err(format!("{regions} regions were to be published under {key}, and there are {found}").into()),
        }
    }

    /// PUTs that it has answered, where it is `te metadata-server`.
    fn puts(&self) -> Result<Option<f64>, Box<dyn Error>> {
        let Some(address) = &self.address else { return Ok(None) };
        let mut connection = TcpStream::connect(address)?;
        connection.write_all(format!("GET /metrics HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").as_bytes())?;
        let mut text = String::new();
        connection.read_to_string(&mut text)?;
        let count = |line: &str| line.rsplit_once(' ').and_then(|(_, count)| count.parse::<f64>().ok());
        let is_own = text.contains("te_metadata_requests_total");
        let puts = text.lines().filter(|line| line.starts_with("te_metadata_requests_total{method=\"PUT\"")).filter_map(count);
        Ok(is_own.then(|| puts.sum()))
    }
}

/// As the environment says, with engines that can be reached on this machine only.
pub(super) fn config() -> Config {
    let mut config = Config::from_environment();
    config.tcp_bind_address.get_or_insert_with(|| "127.0.0.1".to_string());
    config
}

/// A running `te metadata-server`. Dropping it ends the process.
pub(super) struct OwnServer {
    child: Child,
    pub(super) uri: String,
}

impl OwnServer {
    pub(super) fn start() -> Result<OwnServer, Box<dyn Error>> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["metadata-server", "--listen", "127.0.0.1:0"]).stdin(Stdio::null()).stdout(Stdio::piped());
        end_with_parent(&mut command);
        let mut child = command.spawn()?;
        let stdout = child.stdout.take();
        let mut server = OwnServer { child, uri: String::new() };
        let mut port = String::new();
        BufReader::new(stdout.ok_or("the metadata server has no standard output")?).read_line(&mut port)?;
        if port.is_empty() {
            return Err("the metadata server has ended; its messages are above".into());
        }
        server.uri = format!("http://127.0.0.1:{}/metadata", port.trim());
        Ok(server)
    }
}

impl Drop for OwnServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What is measured: an engine.
pub(super) trait Subject {
    /// Registers more regions, until there are so many.
    fn grow(&mut self, regions: usize) -> Result<(), Box<dyn Error>>;

    /// Registers some more regions, or unregisters them again. How long it took, and how much of its process's processor time.
    fn call(&mut self, operation: Operation, is_registering: bool) -> Result<(Duration, Duration), Box<dyn Error>>;
}

/// An engine of this library, in this process.
struct Own {
    engine: Arc<Engine>,
    arena: Arena,
    regions: usize,
}

impl Own {
    fn new(uri: &str, name: &str, regions: usize) -> Result<Own, Box<dyn Error>> {
        telemetry::log::install();
        let options = EngineOptions { metadata: uri.to_string(), server_name: name.to_string(), ..EngineOptions::default() };
        let engine = Engine::create(&options, config())?;
        if !engine.has_transport("tcp") {
            engine.install_transport("tcp", None)?;
        }
        Ok(Own { engine, arena: Arena::new(regions * STRIDE)?, regions: 0 })
    }

    fn range(&self, index: usize) -> MemoryRange {
        self.arena.range(index * STRIDE, REGION)
    }
}

impl Subject for Own {
    fn grow(&mut self, regions: usize) -> Result<(), Box<dyn Error>> {
        let ranges: Vec<MemoryRange> = (self.regions..regions).map(|index| self.range(index)).collect();
        self.engine.register_batch(&ranges, &memory_options())?;
        self.regions = regions;
        Ok(())
    }

    fn call(&mut self, operation: Operation, is_registering: bool) -> Result<(Duration, Duration), Box<dyn Error>> {
        let options = MemoryOptions { publish: operation.is_published, ..memory_options() };
        let calls = operation.calls as usize;
        let this = &*self;
        let ranges = |caller: usize| (0..calls).map(move |call| this.range(this.regions + caller * calls + call));
        let work = |caller: usize| {
            ranges(caller).try_for_each(|range| match is_registering {
                true => this.engine.register(range, &options),
                false => this.engine.unregister(range.address()),
            })
        };
        if !is_registering && !operation.is_published {
            // This engine tells of every removal, so of all at once.
            let addresses: Vec<u64> = ranges(0).map(|range| range.address()).collect();
            this.engine.unregister_batch(&addresses)?;
            return Ok(Default::default());
        }
        if operation.callers == 1 {
            let (clock, processor) = (Instant::now(), process_cpu_time());
            work(0)?;
            return Ok((clock.elapsed(), process_cpu_time() - processor));
        }
        let ready = Barrier::new(operation.callers as usize + 1);
        std::thread::scope(|scope| {
            let callers: Vec<_> = (0..operation.callers as usize)
                .map(|caller| {
                    let (ready, work) = (&ready, &work);
                    scope.spawn(move || {
                        ready.wait();
                        work(caller)
                    })
                })
                .collect();
            let (clock, processor) = (Instant::now(), process_cpu_time());
            ready.wait();
            for caller in callers {
                caller.join().map_err(|_| "a caller has panicked")??;
            }
            Ok((clock.elapsed(), process_cpu_time() - processor))
        })
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        self.engine.shutdown();
    }
}

/// How long the package may take for an answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// An engine of Mooncake's package, in a Python of its own.
pub(super) struct Peer {
    child: Child,
    requests: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    /// When the last answer is due, whatever [`PATIENCE`] says.
    end: Option<Instant>,
    /// What its segment is called where there is no metadata server, and where its memory is.
    segment: String,
    base: u64,
}

#[derive(Serialize)]
#[serde(tag = "do", rename_all = "snake_case")]
enum Request {
    Grow {
        regions: usize,
    },
    Call {
        #[serde(flatten)]
        operation: Operation,
        is_registering: bool,
    },
    Transfer {
        segment: String,
        remote: u64,
        operation: transfer::Operation,
        size: usize,
        batch: usize,
        threads: usize,
        seconds: f64,
    },
    Fill {
        value: u8,
    },
    Compare {
        value: u8,
        length: usize,
    },
}

#[derive(Deserialize)]
struct Answer {
    error: Option<String>,
    clock: f64,
    processor: f64,
    #[serde(default)]
    rate: f64,
    #[serde(default)]
    segment: String,
    #[serde(default)]
    base: u64,
}

impl Peer {
    /// With memory for so many regions of so many bytes, and so many from the start of one to that of the next; answers are waited for
    /// until `end` at most.
    pub(super) fn start(
        python: &Path,
        uri: &str,
        name: &str,
        regions: usize,
        [size, stride]: [usize; 2],
        end: Option<Instant>,
    ) -> Result<Peer, Box<dyn Error>> {
        let mut command = Command::new(python);
        command
            .args(["-c", include_str!("publish_peer.py"), uri, name, &(regions * stride).to_string()])
            .args([stride.to_string(), size.to_string()])
            .env("MC_LOG_LEVEL", "ERROR")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if std::env::var_os("MC_TCP_BIND_ADDRESS").is_none() {
            command.env("MC_TCP_BIND_ADDRESS", "127.0.0.1");
        }
        end_with_parent(&mut command);
        let mut child = command.spawn().map_err(|error| format!("cannot run {}: {error}", python.display()))?;
        let requests = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().ok_or("the peer has no standard output")?);
        let mut peer = Peer { child, requests, answers, end, segment: String::new(), base: 0 };
        let answer = peer.read()?;
        (peer.segment, peer.base) = (answer.segment, answer.base);
        Ok(peer)
    }

    /// Moves bytes from or to the memory of another one, for so long, once for each thread at least: microseconds of a batch, the median,
    /// and MB/s. It is called from Python, which adds microseconds to each call and lets one of its threads in at a time.
    pub(super) fn transfer(&mut self, target: &Peer, cell: &transfer::Cell, limit: Duration) -> Result<(f64, f64), Box<dyn Error>> {
        let transfer::Cell { operation, size, batch, threads, .. } = *cell;
        let (segment, seconds) = (target.segment.clone(), limit.as_secs_f64());
        let request = Request::Transfer { segment, remote: target.base, operation, size, batch, threads, seconds };
        let answer = self.ask(&request)?;
        Ok((answer.clock * 1e6, answer.rate))
    }

    /// Fills its memory.
    pub(super) fn fill(&mut self, value: u8) -> Result<(), Box<dyn Error>> {
        self.ask(&Request::Fill { value }).map(drop)
    }

    /// Whether the first bytes are all the same: an error if not.
    pub(super) fn compare(&mut self, value: u8, length: usize) -> Result<(), Box<dyn Error>> {
        self.ask(&Request::Compare { value, length }).map(drop)
    }

    fn ask(&mut self, request: &Request) -> Result<Answer, Box<dyn Error>> {
        writeln!(self.requests.as_mut().ok_or("the peer has no standard input")?, "{}", serde_json::to_string(request)?)?;
        self.read()
    }

    fn patience(&self) -> Duration {
        self.end.map_or(PATIENCE, |end| end.saturating_duration_since(Instant::now()).min(PATIENCE))
    }

    fn read(&mut self) -> Result<Answer, Box<dyn Error>> {
        // What it has written is one line, so nothing is in the buffer before.
        let patience = self.patience();
        if !wait_until_readable(self.answers.get_ref().as_raw_fd(), patience) {
            let _ = self.child.kill();
            return Err(format!("the peer has given no answer in {} s, and was ended", patience.as_secs()).into());
        }
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            return Err("the peer's process has ended; its messages are above".into());
        }
        let answer: Answer = serde_json::from_str(&line)?;
        match answer.error {
            Some(error) => Err(format!("the peer: {error}").into()),
            None => Ok(answer),
        }
    }
}

impl Subject for Peer {
    fn grow(&mut self, regions: usize) -> Result<(), Box<dyn Error>> {
        self.ask(&Request::Grow { regions }).map(drop)
    }

    fn call(&mut self, operation: Operation, is_registering: bool) -> Result<(Duration, Duration), Box<dyn Error>> {
        let answer = self.ask(&Request::Call { operation, is_registering })?;
        Ok((Duration::from_secs_f64(answer.clock), Duration::from_secs_f64(answer.processor)))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.requests.take());
        // It closes its end when it is done.
        if !wait_until_readable(self.answers.get_ref().as_raw_fd(), self.patience()) {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}

fn text(report: &Report<'_>) -> String {
    let settings = report.settings;
    let mut out = report.machine.to_string();
    out.push('\n');
    out += &output::paragraph(&format!(
        "An engine on a metadata server ({}) registers regions of {}, and unregisters them, {} calls of each caller, where others are \
         registered already. Microseconds per call, on the clock and of the engine's processor time, and PUTs per call; median \
         (smallest..largest) of {} rounds.",
        report.server,
        output::bytes(REGION as u64),
        settings.published_calls,
        settings.publish_rounds,
    ));
    let mut last = None;
    for row in &report.rows {
        let kind = (row.operation, row.is_registering);
        if last != Some(kind) {
            last = Some(kind);
            let verb = if row.is_registering { "register" } else { "unregister" };
            let callers = if row.operation.callers == 1 { String::new() } else { format!(", {} callers", row.operation.callers) };
            let published = if row.operation.is_published { "" } else { ", not published" };
            out += &format!("\n{verb}{callers}{published}\n{:>9} {:>8} {:>24} {:>24}", "regions", "", "clock", "processor");
            out += &format!(" {:>18} {:>9}\n", "PUTs", "PUT");
        }
        let mut line = |name: &str, side: &Side| {
            let puts = side.puts.map_or_else(|| "?".to_string(), |puts| puts.to_string());
            let (clock, processor) = (side.clock_us, side.processor_us);
            let size = output::bytes(side.put_bytes as u64);
            out += &format!("{:>9} {name:>8} {clock:>24} {processor:>24} {puts:>18} {size:>9}\n", row.regions);
        };
        line("ours", &row.ours);
        if let (Some(peer), Some(clock), Some(processor)) = (&row.peer, row.clock_ratio, row.processor_ratio) {
            line("Mooncake", peer);
            out += &format!("{:>9} {:>8} {clock:>24} {processor:>24}\n", "", "ratio");
        }
    }
    out += "\nPUT: what one carries.\n";
    if report.peer_stale > 0 {
        let text = "times Mooncake's server text was not what its engine had registered when its callers were done.";
        out += &format!("{} {text}\n", report.peer_stale);
    }
    out += &noise(report.fixed_work_ms);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_hangs_is_waited_for_until_its_end_only() {
        use std::os::unix::fs::PermissionsExt;
        let program = std::env::temp_dir().join(format!("te-peer-that-hangs-{}", std::process::id()));
        std::fs::write(&program, "#!/bin/sh\nexec sleep 1000\n").unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let error = Peer::start(&program, "", "", 1, [REGION, STRIDE], Some(Instant::now())).map(drop).unwrap_err().to_string();
        std::fs::remove_file(&program).unwrap();
        assert_eq!(error, "the peer has given no answer in 0 s, and was ended");
    }
}
