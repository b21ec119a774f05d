//! `te bench` as its users start it: the shape of what it prints, that wrong content is noticed, and that nobody is left behind.
#![allow(unsafe_code)]

#[cfg(feature = "rdma")]
#[path = "../../tests/fake_verbs/compile.rs"]
mod compile;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use transfer_engine::config::Config;
use transfer_engine::engine::{Engine, EngineOptions};
use transfer_engine::sys::MemoryRange;
use transfer_engine::transfer::{Hints, Request, State, SubmitOptions};
use transfer_engine::transport::Opcode;

fn te(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_te"));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"MC_")) {
        command.env_remove(name);
    }
    command.args(arguments);
    command
}

fn run(arguments: &[&str]) -> Output {
    let output = te(arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap()
}

const REGISTER: &[&str] = &["bench", "register", "--quick", "--regions", "16,64", "--calls", "8", "--batch", "16", "--rounds", "2"];
const TRANSFER: &[&str] = &[
    "bench",
    "transfer",
    "--quick",
    "--sizes",
    "1,4K",
    "--batches",
    "1,3",
    "--memory",
    "1M",
    "--rounds",
    "2",
    "--milliseconds",
    "5",
];

/// The keys of a spread, which every figure has.
fn assert_is_spread(value: &Value) {
    let [minimum, median, maximum] = ["minimum", "median", "maximum"].map(|key| value[key].as_f64().unwrap());
    assert!(0.0 < minimum && minimum <= median && median <= maximum, "{value}");
}

#[test]
fn register_prints_a_table_of_every_operation_at_every_number_of_regions() {
    let output = run(REGISTER);
    let table = text(output.stdout);
    for operation in ["register", "unregister", "batch register", "batch unregister", "ordered map, insert", "ordered map, remove"]
    {
        let mut lines = table.lines().skip_while(|line| !line.starts_with(operation)).skip(1);
        let (first, second) = (lines.next().unwrap().trim_start(), lines.next().unwrap().trim_start());
        assert!(first.starts_with("16 ") && second.starts_with("64 "), "{operation}: {table}");
        assert_eq!((first.matches("..").count(), second.matches("..").count()), (2, 3), "{operation}: {table}");
    }
    assert!(table.contains("of 2 rounds") && table.contains("Noise: "), "{table}");
    assert!(table.lines().all(|line| line.chars().count() <= 120), "{table}");
    assert!(text(output.stderr).contains("round 2 of 2\n"));
}

#[test]
fn register_pins_with_rings_in_every_way() {
    if std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").is_ok_and(|text| text.trim() != "0") {
        return eprintln!("skipped: io_uring is switched off here");
    }
    const PIN: &[&str] =
        &["bench", "register", "--pin", "io_uring", "--quick", "--sizes", "1M", "--devices", "1,2", "--pin-rounds", "2"];
    let table = text(run(PIN).stdout);
    // Five kinds of memory in small pages and four in large ones, with each number of devices.
    for operation in ["register ", "unregister "] {
        let lines = table.lines().skip_while(|line| !line.starts_with(operation)).skip(1);
        let lines: Vec<_> = lines.take_while(|line| line.contains("..")).collect();
        assert_eq!(lines.len(), 2 * (5 + 4), "{table}");
        assert!(lines.iter().all(|line| line.matches("..").count() == 9), "{table}");
    }
    let report: Value = serde_json::from_slice(&run(&[PIN, &["--json", "--memory", "untouched"]].concat()).stdout).unwrap();
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2 * 2 * 2);
    for row in rows {
        ["sequential_us", "naive_us", "ours_us", "limit_us", "of_limit", "round_trip_ns", "gain"]
            .iter()
            .for_each(|figure| assert_is_spread(&row[figure]));
        // Of either sign.
        ["loss_us", "control_us"].iter().for_each(|figure| assert!(row[figure]["median"].is_number(), "{row}"));
        assert_eq!(row["ours"].is_object(), row["operation"] == "register");
    }
}

#[test]
fn register_publishes_alone_and_together() {
    const PUBLISH: &[&str] = &["bench", "register", "--metadata", "start", "--published-regions", "3,100", "--publish-rounds", "2"];
    let table = text(run(PUBLISH).stdout);
    for operation in ["register", "unregister", "register, 8 callers", "unregister, 8 callers", "register, not published"] {
        let lines: Vec<_> = table.lines().skip_while(|line| *line != operation).skip(2).take(2).map(str::trim_start).collect();
        assert!(lines.len() == 2 && lines[0].starts_with("3 ") && lines[1].starts_with("100 "), "{operation}: {table}");
    }
    assert!(table.contains("Noise: ") && table.lines().all(|line| line.chars().count() <= 120), "{table}");

    let report: Value = serde_json::from_slice(&run(&[PUBLISH, &["--json"]].concat()).stdout).unwrap();
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 5 * 2);
    for row in rows {
        ["clock_us", "processor_us"].iter().for_each(|figure| assert_is_spread(&row["ours"][figure]));
        let puts = row["ours"]["puts"]["maximum"].as_f64().unwrap();
        match (row["is_published"].as_bool().unwrap(), row["callers"].as_u64().unwrap()) {
            (true, 1) => assert_eq!(puts, 1.0, "{row}"),
            (true, _) => assert!(0.0 < puts && puts <= 1.0, "{row}"),
            (false, _) => assert_eq!(puts, 0.0, "{row}"),
        }
        assert!(row["peer"].is_null() && row["ours"]["put_bytes"].as_u64() > Some(0), "{row}");
    }
    let published: Value =
        serde_json::from_slice(&run(&[PUBLISH, &["--json", "--update-metadata", "no"]].concat()).stdout).unwrap();
    assert_eq!(published["rows"].as_array().unwrap().len(), 2);
}

#[test]
fn register_tells_what_500_gb_would_take_beside_the_report() {
    if std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").is_ok_and(|text| text.trim() != "0") {
        return eprintln!("skipped: io_uring is switched off here");
    }
    const MODEL: &[&str] = &["bench", "register", "--model", "--quick"];
    let table = text(run(MODEL).stdout);
    let rows = table.lines().filter(|line| line.starts_with("register, ") || line.starts_with("unregister, "));
    assert_eq!(rows.filter(|line| line.split_whitespace().any(|word| word.parse::<f64>().is_ok())).count(), 9, "{table}");
    assert!(table.contains("A model, not a measurement") && table.contains("Assumed: "), "{table}");
    let report: Value = serde_json::from_slice(&run(&[MODEL, &["--json"]].concat()).stdout).unwrap();
    assert_eq!(report["rows"][1]["report"]["naive"], json!(461.999));
    assert!(report["rows"].as_array().unwrap().iter().all(|row| row["by_this_machine"]["ours"].as_f64().unwrap() > 0.0));
    report["measured_ns"].as_array().unwrap().iter().for_each(|cost| assert_is_spread(&cost[1]));
}

#[test]
fn register_gives_all_figures_as_json() {
    let report: Value = serde_json::from_slice(&run(&[REGISTER, &["--json"]].concat()).stdout).unwrap();
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 6 * 2);
    for row in rows {
        ["clock_ns", "processor_ns", "growth"].iter().for_each(|figure| assert_is_spread(&row[figure]));
        assert!(row["regions"] == 16 || row["regions"] == 64);
    }
    assert_is_spread(&report["fixed_work_ms"]);
    assert_eq!((&report["settings"]["rounds"], report["machine"]["cpus"].as_u64() > Some(0)), (&json!(2), true));
}

#[test]
fn open_gives_every_number_of_regions_as_table_and_as_json() {
    let arguments = ["bench", "open", "--regions", "3,1000", "--rounds", "2"];
    let table = text(run(&arguments).stdout);
    let rows = table.lines().filter(|line| line.matches("..").count() == 4);
    let regions: Vec<&str> = rows.filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(regions, ["3", "1000"], "{table}");
    assert!(table.contains("Noise: ") && table.lines().all(|line| line.chars().count() <= 120), "{table}");
    let report: Value = serde_json::from_slice(&run(&[&arguments[..], &["--json"]].concat()).stdout).unwrap();
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.iter().map(|row| row["regions"].as_u64().unwrap()).collect::<Vec<_>>(), [3, 1000]);
    for row in rows {
        ["open_ms", "first_transfer_ms", "both_ms", "second_transfer_ms"].iter().for_each(|figure| assert_is_spread(&row[figure]));
    }
}

#[test]
fn transfer_prints_plain_sockets_and_every_cell() {
    let output = run(TRANSFER);
    let table = text(output.stdout);
    let cells: Vec<String> = table
        .lines()
        .filter(|line| line.starts_with("read") || line.starts_with("write"))
        .map(|line| line.split_whitespace().take(5).collect::<Vec<_>>().join(" "))
        .map(|line| line.split(" polling").next().unwrap().split(" parked").next().unwrap().to_string())
        .collect();
    let cells_of = |operation| {
        let single = ["1 B", "1 B", "4 KiB", "4 KiB"].map(|cell| (0, format!("{operation} {cell}")));
        let batched = ["1 B 3 1", "4 KiB 3 1"].map(|cell| (1, format!("{operation} {cell}")));
        single.into_iter().chain(batched)
    };
    let mut expected: Vec<(u8, String)> = ["read", "write"].into_iter().flat_map(cells_of).collect();
    expected.sort_by_key(|(table, _)| *table);
    let expected: Vec<String> = expected.into_iter().map(|(_, cell)| cell).collect();
    assert_eq!(cells, expected, "{table}");
    let sockets = table.lines().skip_while(|line| !line.contains("polling, us")).skip(1).take(2);
    assert!(sockets.clone().count() == 2 && sockets.clone().all(|line| line.matches("..").count() == 3), "{table}");
    let streams = table.lines().skip_while(|line| !line.contains("buffers  ")).skip(1).take(4);
    assert!(streams.clone().count() == 4 && streams.clone().all(|line| line.matches("..").count() == 1), "{table}");
    assert!(table.contains("Every byte was compared") && table.contains("Noise: "), "{table}");
    assert!(table.lines().all(|line| line.chars().count() <= 120), "{table}");
}

#[test]
fn transfer_gives_all_figures_as_json() {
    let report: Value = serde_json::from_slice(&run(&[TRANSFER, &["--json"]].concat()).stdout).unwrap();
    let (raw, rows) = (report["raw"].as_array().unwrap(), report["rows"].as_array().unwrap());
    assert_eq!((raw.len(), rows.len()), (2, 12));
    for row in raw {
        ["round_trip_polling_us", "round_trip_parked_us", "round_trip_alike_us"]
            .iter()
            .for_each(|figure| assert_is_spread(&row[figure]));
        let streams = row["two_streams"].as_array().unwrap();
        assert_eq!(streams.len(), 2);
        streams.iter().for_each(|streams| assert_is_spread(&streams["mb_per_s"]));
    }
    for row in rows {
        ["p50_us", "p99_us", "mb_per_s", "cpu_s_per_gib", "cpu_us_per_request"]
            .iter()
            .for_each(|figure| assert_is_spread(&row[figure]));
        assert_eq!(row["latency_to_raw"].is_null(), row["batch"] != 1, "{row}");
        assert!(row["rate_to_raw"].is_null(), "so few bytes at once fill no stream: {row}");
    }
}

const POOL: &[&str] =
    &["bench", "pool", "--quick", "--sizes", "4K,100K", "--keys", "1,3", "--rounds", "2", "--milliseconds", "1", "--pool", "4M"];

/// Standard output of `te bench pool`, which fails where it is slower than it is to be: a debug build may be.
fn run_pool(arguments: &[&str]) -> Vec<u8> {
    let output = te(&[POOL, arguments].concat()).output().unwrap();
    let errors = text(output.stderr);
    let is_slow =
        errors.ends_with('\n') && errors.lines().last().unwrap().starts_with("te: figures that are not as they are to be: ");
    assert!(output.status.success() || output.status.code() == Some(1) && is_slow, "{errors}");
    output.stdout
}

#[test]
fn pool_puts_and_gets_in_every_way_and_staging_registers_nothing() {
    let is_without_rings = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").is_ok_and(|text| text.trim() != "0");
    let ways: [(&[&str], Vec<u64>); 4] = [
        (&["--pin", "io_uring", "--counts", "1,2"], vec![1, 2]),
        (&["--pin", "io_uring", "--counts", "1,2", "--operation", "get"], vec![1, 2]),
        (&[], vec![0]),
        (&["--operation", "get"], vec![0]),
    ];
    for (arguments, devices) in ways.into_iter().skip(if is_without_rings { 2 } else { 0 }) {
        let table = text(run_pool(arguments));
        let lines = table.lines().filter(|line| line.starts_with("   4K ") || line.starts_with(" 100K "));
        let lines: Vec<_> = lines.filter(|line| line.matches("..").count() == 4).collect();
        assert_eq!(lines.len(), 2 * 2 * devices.len(), "{table}");
        assert!(table.contains("Every byte was compared") && table.contains("Noise: "), "{table}");
        let operation = if arguments.contains(&"get") { "get" } else { "put" };
        assert!(table.contains(&format!("Time to {operation} keys")), "{table}");

        let report: Value = serde_json::from_slice(&run_pool(&[arguments, &["--json"]].concat())).unwrap();
        let rows = report["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 2 * 2 * devices.len());
        assert_eq!(report["settings"]["operation"], operation);
        for row in rows {
            ["speed_up", "limit", "auto_to_better"].iter().for_each(|figure| assert_is_spread(&row[figure]));
            let of_way = |way: &str| {
                assert_is_spread(&row[way]["us"]);
                row[way]["registrations"].as_f64().unwrap()
            };
            let keys = row["keys"].as_f64().unwrap();
            // Without devices there is nothing to be registered, but the caller's own registrations.
            let direct = if row["devices"] == 0 { 0.0 } else { keys };
            assert_eq!(["baseline", "direct", "staged"].map(of_way), [keys, direct, 0.0], "{row}");
            assert!((0.0..=direct).contains(&of_way("auto")), "{row}");
            assert!(devices.contains(&row["devices"].as_u64().unwrap()));
        }
    }
}

#[cfg(feature = "rdma")]
#[test]
fn pool_sets_the_rows_of_the_report_beside_what_is_possible_here() {
    let verbs = compile::compile(std::path::Path::new(env!("CARGO_TARGET_TMPDIR")));
    let arguments = ["bench", "pool", "--quick", "--seed-rows", "--verbs", verbs.to_str().unwrap(), "--rounds", "1", "--json"];
    let report: Value = serde_json::from_slice(&run(&arguments).stdout).unwrap();
    let rows = report["rows"].as_array().unwrap();
    // Those of 64 MiB, with 1 and 8 NICs.
    assert_eq!(rows.len(), 5 * 2);
    for row in rows {
        ["baseline_ms", "direct_ms", "staged_ms", "auto_ms", "speed_up", "copy_ms", "bound"]
            .iter()
            .for_each(|figure| assert_is_spread(&row[figure]));
        let figure = |name: &str| row["script"][name].as_f64().unwrap();
        // Registering takes its time, and so does the wire, whatever else does.
        assert!(row["baseline_ms"]["minimum"].as_f64().unwrap() > 0.95 * figure("pin_ms"), "{row}");
        assert!(row["staged_ms"]["minimum"].as_f64().unwrap() > 0.95 * figure("wire_ms"), "{row}");
    }
}

#[test]
fn throughput_is_logged_at_intervals_where_it_is_asked_for() {
    let arguments = ["bench", "transfer", "--quick", "--sizes", "4K", "--batches", "1", "--operations", "write"];
    let mut command = te(&arguments);
    command.args(["--memory", "1M", "--rounds", "1", "--milliseconds", "1500"]);
    command.envs([("MC_TE_METRIC", "yes"), ("MC_TE_METRIC_INTERVAL_SECONDS", "1"), ("MC_LOG_LEVEL", "INFO")]);
    let output = command.output().unwrap();
    let log = text(output.stderr);
    let lines: Vec<&str> = log.lines().filter(|line| line.contains(" MB/s, wrote ")).collect();
    assert!(output.status.success() && lines.len() >= 2, "{log}");
    assert!(lines.iter().any(|line| !line.contains(", wrote 0.0 MB/s")), "{log}");
    assert!(lines.iter().any(|line| !line.contains("peers moved 0.0 MB/s")), "{log}");
}

/// The other end of `te bench transfer`, driven by hand.
struct Target {
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Target {
    fn start(memory: usize) -> (Target, Value) {
        let mut child = te(&["bench", "target", "--memory", &memory.to_string(), "--region", &memory.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (requests, answers) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut target = Target { child, requests, answers };
        let location = target.answer();
        (target, location)
    }

    fn answer(&mut self) -> Value {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    fn ask(&mut self, request: Value) -> Value {
        writeln!(self.requests, "{request}").unwrap();
        self.answer()
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn one_wrong_byte_in_the_target_is_noticed() {
    const LENGTH: usize = 100_003;
    let (mut target, location) = Target::start(LENGTH);
    let check = |seed: u64| json!({"Check": {"length": LENGTH, "seed": seed}});
    assert_eq!(target.ask(json!({"Fill": {"length": LENGTH, "seed": 5}})), Value::Null);
    assert_eq!((target.ask(check(5)), target.ask(check(6))), (Value::Null, json!(0)));

    let options = EngineOptions { metadata: "P2PHANDSHAKE".into(), server_name: "127.0.0.1".into(), ..EngineOptions::default() };
    let engine = Engine::create(&options, Config::default()).unwrap();
    engine.install_transport("tcp", None).unwrap();
    let segment = engine.open_segment(location["segment"].as_str().unwrap()).unwrap();
    let address = location["address"].as_u64().unwrap();
    let byte = [0u8; 2];
    // SAFETY: read by one transfer, which has ended before the bytes go.
    let local = |index: usize| unsafe { MemoryRange::new(byte[index..].as_ptr() as u64, 1) }.unwrap();
    // The content there is neither all zeros: what is put there differs from it.
    for offset in [LENGTH - 1, 50_001] {
        let request = Request {
            opcode: Opcode::Write,
            local: local(0),
            segment,
            remote_address: address + offset as u64,
            hints: Hints::default(),
        };
        let statuses = engine.transfer(&[request], SubmitOptions::default()).unwrap();
        assert_eq!(statuses[0].state, State::Completed);
        assert_eq!(target.ask(check(5)), json!(offset / 8 * 8));
    }
    engine.shutdown();
}

/// Processes that this one has started and that have not ended.
fn children(parent: u32) -> Vec<u32> {
    let processes = std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    processes.filter(|process| stat(*process).is_some_and(|(state, of)| of == parent && !"ZX".contains(&state))).collect()
}

/// State and parent of a process.
fn stat(process: u32) -> Option<(String, u32)> {
    let text = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    let mut fields = text.rsplit_once(") ")?.1.split(' ');
    Some((fields.next()?.to_string(), fields.next()?.parse().ok()?))
}

/// Ends with the test, whatever happens.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < Duration::from_secs(30), "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn the_target_ends_with_a_parent_that_is_killed() {
    let mut bench = te(&["bench", "transfer", "--sizes", "4K", "--memory", "1M", "--milliseconds", "60000"]);
    let mut bench = Killed(bench.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap());
    let mut progress = BufReader::new(bench.0.stderr.take().unwrap()).lines();
    assert!(progress.any(|line| line.unwrap().starts_with("round 1")), "it is measuring");
    let target = wait_for("a target", || children(bench.0.id()).first().copied());
    bench.0.kill().unwrap();
    wait_for("the target's end", || stat(target).is_none_or(|(state, _)| "ZX".contains(&state)).then_some(()));
}
