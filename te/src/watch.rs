//! `te info --watch`: what the engines of another process do, read from the sockets that they have opened for it.
//!
//! Sockets are found by what the kernel says of the process: those that it listens at, with names as engines draw them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::{self, IsTerminal, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use transfer_engine::sys::peer::Peer;
use transfer_engine::telemetry::exporter::PREFIX;
use transfer_engine::telemetry::prometheus::{self, Sample};

/// How long an engine may take to answer, such as while it installs a transport.
const PATIENCE: Duration = Duration::from_secs(10);

/// Shows what the engines of the process do every `interval` seconds until it ends; `once`: what they have done, once.
pub fn run(process: u32, interval: f64, once: bool) -> io::Result<()> {
    let interval = Duration::try_from_secs_f64(interval).map_err(io::Error::other)?;
    if find_sockets(process)?.is_empty() {
        return Err(io::Error::other(format!(
            "process {process} has no engine that shows its metrics: set TE_METRICS_DIRECTORY where it starts to a directory of its \
             user, or have it call te_serve_metrics(engine, NULL)"
        )));
    }
    let is_terminal = io::stdout().is_terminal();
    let mut last: BTreeMap<PathBuf, State> = BTreeMap::new();
    let mut lines = 0;
    loop {
        let begin = Instant::now();
        // Whatever fails is an engine or a process that has gone; the next look tells.
        let sockets = match find_sockets(process) {
            Ok(sockets) => sockets,
            Err(_) if !is_alive(process) => return Ok(()),
            Err(error) => return Err(error),
        };
        let states: BTreeMap<_, _> =
            sockets.into_iter().filter_map(|path| Some((path.clone(), State::ask(&path, process)?))).collect();
        let mut text = String::new();
        for (path, state) in &states {
            text += &state.report(last.get(path));
        }
        if states.is_empty() {
            if !is_alive(process) {
                return Ok(());
            }
            text = format!("process {process} has no engine at the moment\n");
        }
        if is_terminal && lines > 0 {
            text = format!("\x1b[{lines}F\x1b[J{text}");
        }
        lines = text.lines().count();
        let is_read = show(&mut io::stdout().lock(), &text)?;
        if once || !is_read {
            return Ok(());
        }
        last = states;
        std::thread::sleep(interval.saturating_sub(begin.elapsed()));
    }
}

/// False when whoever read it has gone, such as `head`: there is nobody to go on for.
fn show(out: &mut impl Write, text: &str) -> io::Result<bool> {
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        result => result.map(|()| true),
    }
}

fn is_alive(process: u32) -> bool {
    Path::new("/proc").join(process.to_string()).exists()
}

/// Paths of the sockets at which engines of the process listen, as this process can open them.
fn find_sockets(process: u32) -> io::Result<Vec<PathBuf>> {
    let folder = Path::new("/proc").join(process.to_string());
    let explain = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => io::Error::new(error.kind(), format!("there is no process {process}")),
        kind => io::Error::new(kind, format!("cannot look at process {process}: {error}; be its user, or root")),
    };
    let mut own = Vec::new();
    for entry in fs::read_dir(folder.join("fd")).map_err(explain)?.flatten() {
        let link = fs::read_link(entry.path()).unwrap_or_default();
        if let Some(inode) = link.to_string_lossy().strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']')) {
            own.push(inode.to_string());
        }
    }
    let table = fs::read_to_string(folder.join("net/unix")).map_err(explain)?;
    Ok(listening(&table, &own).into_iter().map(|path| seen_from_here(&folder, path)).collect())
}

/// Of the kernel's table of unix sockets, the paths of engines' that are listened at and have one of the inodes.
fn listening<'a>(table: &'a str, inodes: &[String]) -> Vec<&'a str> {
    let path = |line: &'a str| {
        // Num RefCount Protocol Flags Type St Inode Path
        let mut rest = line;
        let mut fields = [""; 7];
        for field in &mut fields {
            (*field, rest) = rest.trim_start().split_once(' ')?;
        }
        let is_listening = u32::from_str_radix(fields[3], 16).ok()? & 0x1_0000 != 0;
        let path = rest.trim_start();
        let name = Path::new(path).file_name()?.to_str()?;
        (is_listening && name.starts_with(PREFIX) && inodes.iter().any(|inode| inode == fields[6])).then_some(path)
    };
    table.lines().filter_map(path).collect()
}

/// The process may be in a container, with another root.
fn seen_from_here(folder: &Path, path: &str) -> PathBuf {
    let theirs = folder.join("root").join(path.trim_start_matches('/'));
    // The path of a socket has at most 107 bytes.
    if theirs.as_os_str().len() < 108 && theirs.exists() { theirs } else { path.into() }
}

/// What an engine has told.
struct State {
    taken: Instant,
    samples: Vec<Sample>,
}

impl State {
    /// Nothing where it cannot be asked, or somebody else listens there: a child of `fork` has its parent's sockets open.
    fn ask(path: &Path, process: u32) -> Option<State> {
        let mut stream = UnixStream::connect(path).ok()?;
        let peer = Peer::of(&stream).ok()?;
        if peer.process != process as i32 {
            return None;
        }
        stream.set_read_timeout(Some(PATIENCE)).ok()?;
        stream.shutdown(Shutdown::Write).ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        State::parse(&text)
    }

    fn parse(text: &str) -> Option<State> {
        Some(State { taken: Instant::now(), samples: prometheus::parse(text).ok()? })
    }

    fn named<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a Sample> {
        let name = format!("transfer_engine_{name}");
        self.samples.iter().filter(move |sample| sample.name == name)
    }

    /// Sum over all labels.
    fn sum(&self, name: &str) -> f64 {
        self.named(name).map(|sample| sample.value).sum()
    }

    /// Counts of a histogram by their bounds, each with those below.
    fn buckets(&self, name: &str, operation: &str) -> Vec<(f64, f64)> {
        let of_operation = |sample: &&Sample| sample.label("operation") == operation;
        let read = |sample: &Sample| Some((sample.label("le").parse().ok()?, sample.value));
        self.named(&format!("{name}_bucket")).filter(of_operation).filter_map(read).collect()
    }

    /// Rates since `last`, and totals.
    fn report(&self, last: Option<&State>) -> String {
        let seconds = last.map(|last| (self.taken - last.taken).as_secs_f64().max(1e-9));
        let rate = |name: &str| Some((self.sum(name) - last?.sum(name)) / seconds?);
        let bytes = |name: &str| format!("{:>10}/s {:>10}", rate(name).map_or("-".into(), size), size(self.sum(name)));
        let count = |name: &str| format!("{:>9}/s {:>10}", rate(name).map_or("-".into(), number), number(self.sum(name)));
        let latency = |name: &str, operation: &str| {
            let now = self.buckets(name, operation);
            let before = last.map(|last| last.buckets(name, operation)).unwrap_or_default();
            // Of what came since; where nothing did, of all.
            let since: Vec<_> =
                now.iter().enumerate().map(|(at, (le, n))| (*le, n - before.get(at).map_or(0.0, |b| b.1))).collect();
            let shown = if since.last().is_some_and(|(_, count)| *count > 0.0) { since } else { now };
            [0.5, 0.9, 0.99].map(|part| percentile(&shown, part).map_or("-".into(), duration)).join(" / ")
        };
        let info = self.named("info").next();
        let label = |name| info.map_or("", |info| info.label(name));
        let mut text = format!("engine {} at {}\n", label("engine"), label("address"));
        let mut line = |name: &str, rest: String| _ = writeln!(text, "  {name:<14} {rest}");
        line("", format!("{:>12} {:>10}   p50 / p90 / p99", "rate", "total"));
        line("read", format!("{}   {}", bytes("bytes_read_total"), latency("request_latency_seconds", "read")));
        line("written", format!("{}   {}", bytes("bytes_written_total"), latency("request_latency_seconds", "write")));
        line("served", bytes("bytes_served_total"));
        line("requests", count("tasks_completed_total"));
        let bad = ["failed", "timed_out", "cancelled"].map(|kind| self.sum(&format!("tasks_{kind}_total")));
        let [failed, timed_out, cancelled] = bad.map(number);
        line(
            "not completed",
            format!("{failed} failed, {timed_out} timed out, {cancelled} cancelled, {} retries", number(self.sum("retries_total"))),
        );
        line("registrations", format!("{}   {}", count("regions_registered_total"), latency("registration_latency_seconds", "")));
        let [regions, refused] = ["regions", "registrations_refused_total"].map(|name| number(self.sum(name)));
        line("registered", format!("{} in {regions} regions; {refused} were refused", size(self.sum("registered_bytes"))));
        let spent = ["residency", "population", "pinning", "publishing", "book_keeping"].map(|step| {
            let name = format!("registration_{step}_seconds_total");
            format!("{} {}", step.replace('_', "-"), duration(self.sum(&name)))
        });
        line("time spent", spent.join(", "));
        let [opened, accepted, failed] =
            ["opened", "accepted", "failed"].map(|how| number(self.sum(&format!("connections_{how}_total"))));
        line("connections", format!("{opened} opened, {accepted} accepted, {failed} failed"));
        for nic in self.named("nic_bytes_total") {
            let device = nic.label("device");
            let find =
                |state: &State, name| state.named(name).find(|other| other.label("device") == device).map(|found| found.value);
            let before = last.and_then(|last| find(last, "nic_bytes_total")).zip(seconds);
            let rate = before.map_or("-".into(), |(before, seconds)| size((nic.value - before) / seconds));
            let pinning = find(self, "device_pinning_seconds_total").map_or("-".into(), duration);
            line(device, format!("{rate:>10}/s {:>10}   {pinning} pinning", size(nic.value)));
        }
        for arena in self.named("pool_arena_bytes") {
            let figure = |name: &str| {
                let name = format!("pool_{name}");
                self.named(&name).find(|sample| sample.label("arena") == arena.label("arena")).map_or(0.0, |sample| sample.value)
            };
            line(
                "pool",
                format!(
                    "{} of {} leased, {} waited, {} refused, {} fallbacks; items: {} staged, {} direct, {} zero copy",
                    size(figure("leased_bytes")),
                    size(arena.value),
                    number(figure("waits_total")),
                    number(figure("refusals_total")),
                    number(figure("fallbacks_total")),
                    number(figure("items_staged_total")),
                    number(figure("items_direct_total")),
                    number(figure("items_zero_copy_total")),
                ),
            );
        }
        text
    }
}

/// Where in the bucket that holds this part of all values it would be if they were spread evenly. Nothing without values.
fn percentile(cumulative: &[(f64, f64)], part: f64) -> Option<f64> {
    let all = cumulative.last()?.1;
    if all <= 0.0 {
        return None;
    }
    let rank = part * all;
    let at = cumulative.iter().position(|(_, count)| *count >= rank)?;
    let (below, before) = if at == 0 { (0.0, 0.0) } else { cumulative[at - 1] };
    let (bound, count) = cumulative[at];
    if !bound.is_finite() {
        return Some(below);
    }
    Some(below + (bound - below) * (rank - before) / (count - before))
}

/// Bytes in decimal units.
fn size(bytes: f64) -> String {
    scaled(bytes, 1000.0, &["B", "kB", "MB", "GB", "TB", "PB"])
}

fn number(count: f64) -> String {
    scaled(count, 1000.0, &["", "k", "M", "G", "T"]).trim_end().to_string()
}

fn duration(seconds: f64) -> String {
    match seconds {
        0.0 => "0 s".into(),
        s if s < 1e-6 => format!("{:.0} ns", s * 1e9),
        s if s < 1e-3 => format!("{:.1} µs", s * 1e6),
        s if s < 1.0 => format!("{:.1} ms", s * 1e3),
        s => format!("{s:.1} s"),
    }
}

fn scaled(mut value: f64, step: f64, units: &[&str]) -> String {
    let mut at = 0;
    while value >= step && at + 1 < units.len() {
        value /= step;
        at += 1;
    }
    if at == 0 && value.fract() == 0.0 { format!("{value} {}", units[at]) } else { format!("{value:.1} {}", units[at]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_are_those_that_the_process_listens_at_under_a_drawn_name() {
        let table = "Num       RefCount Protocol Flags    Type St Inode Path\n\
             0000000000000000: 00000002 00000000 00010000 0001 01 4711 /tmp/a b/transfer-engine-1-1.sock\n\
             0000000000000000: 00000003 00000000 00000000 0001 03 4712 /tmp/transfer-engine-1-2.sock\n\
             0000000000000000: 00000002 00000000 00010000 0001 01 4713 /run/other.sock\n\
             0000000000000000: 00000002 00000000 00010000 0001 01 4714 /tmp/transfer-engine-2-1.sock\n\
             0000000000000000: 00000003 00000000 00000000 0001 03 4715\n";
        let own = ["4711", "4712", "4713", "4715"].map(String::from);
        assert_eq!(listening(table, &own), ["/tmp/a b/transfer-engine-1-1.sock"]);
    }

    #[test]
    fn it_is_told_when_nobody_reads_any_more() {
        let (mut here, there) = UnixStream::pair().unwrap();
        assert!(show(&mut here, "text").unwrap());
        drop(there);
        assert!(!show(&mut here, "text").unwrap());
    }

    #[test]
    fn percentiles_lie_within_the_bucket_that_holds_them() {
        let buckets = [(1.0, 0.0), (2.0, 10.0), (4.0, 20.0), (f64::INFINITY, 20.0)];
        assert_eq!(percentile(&buckets, 0.5), Some(2.0));
        assert_eq!(percentile(&buckets, 0.25), Some(1.5));
        assert_eq!(percentile(&buckets, 1.0), Some(4.0));
        assert_eq!(percentile(&[(1.0, 0.0), (f64::INFINITY, 5.0)], 0.9), Some(1.0), "beyond the last bound that is known");
        assert_eq!((percentile(&[], 0.5), percentile(&[(1.0, 0.0)], 0.5)), (None, None));
    }

    #[test]
    fn rates_are_of_the_time_since_the_last_look() {
        let text = |read: u64, slow: u64| {
            format!(
                "transfer_engine_info{{engine=\"a\",address=\"b:1\"}} 1\ntransfer_engine_bytes_read_total {read}\n\
                 transfer_engine_request_latency_seconds_bucket{{operation=\"read\",le=\"0.001\"}} 5\n\
                 transfer_engine_request_latency_seconds_bucket{{operation=\"read\",le=\"0.002\"}} {slow}\n\
                 transfer_engine_request_latency_seconds_bucket{{operation=\"read\",le=\"+Inf\"}} {slow}\n"
            )
        };
        let first = State::parse(&text(1_000, 5)).unwrap();
        let mut second = State::parse(&text(5_000_000, 9)).unwrap();
        second.taken = first.taken + Duration::from_secs(2);
        assert!(first.report(None).starts_with("engine a at b:1\n"));
        let report = second.report(Some(&first));
        let line = report.lines().find(|line| line.contains("read ")).unwrap();
        let figures: Vec<_> = line.split_whitespace().collect();
        assert_eq!(figures.join(" "), "read 2.5 MB/s 5.0 MB 1.5 ms / 1.9 ms / 2.0 ms");
    }

    #[test]
    fn a_process_without_an_engine_is_told_from_one_that_is_not_there() {
        let error = run(std::process::id(), 1.0, true).unwrap_err().to_string();
        assert!(error.contains("TE_METRICS_DIRECTORY"), "{error}");
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        assert!(run(child.id(), 1.0, true).unwrap_err().to_string().contains("there is no process"));
    }
}
