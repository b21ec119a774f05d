//! `te bench sweep` as its users start it: what ends it leaves a file that can be read, and nobody behind.
#![allow(unsafe_code)]

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

fn directory(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("te-sweep-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&path);
    path
}

/// Processes that this one has started.
fn children(process: u32) -> Vec<u32> {
    let text = std::fs::read_to_string(format!("/proc/{process}/task/{process}/children")).unwrap_or_default();
    text.split_whitespace().filter_map(|number| number.parse().ok()).collect()
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_signal_leaves_a_partial_file_and_no_process() {
    for (signal, code) in [(libc::SIGINT, 130), (libc::SIGTERM, 143)] {
        let out = directory("signal");
        let mut sweep = Command::new(env!("CARGO_BIN_EXE_te"))
            .args(["bench", "sweep", "--quick", "--budget", "600", "--rounds", "100000", "--tables", "register", "--regions", "16"])
            .args(["--device", "tcp", "--update-metadata", "true", "--wheel", "/nonexistent", "--out"])
            .arg(&out)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let read = || {
            std::fs::read_to_string(out.join("measurements.json")).ok().and_then(|text| serde_json::from_str::<Value>(&text).ok())
        };
        let is_measuring = || read().is_some_and(|report| report["measurements"].as_array().is_some_and(|all| all.len() > 4));
        wait_until("nothing was measured", is_measuring);
        let started = children(sweep.id());
        assert_eq!(started.len(), 1, "the metadata server");
        // SAFETY: a process that this test has started and not waited for.
        unsafe { libc::kill(sweep.id() as i32, signal) };
        assert_eq!(sweep.wait().unwrap().code(), Some(code));
        let report = read().expect("the file is whole");
        assert_eq!(report["complete"], false);
        assert!(
            report["measurements"]
                .as_array()
                .unwrap()
                .iter()
                .all(|measurement| !measurement["samples"].as_array().unwrap().is_empty())
        );
        wait_until("a child is left", || started.iter().all(|child| !is_running(*child)));
        std::fs::remove_dir_all(&out).unwrap();
    }
}

fn is_running(process: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    status.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
}

/// What a value breaks of those rules of JSON schema that ours has.
fn check_schema(schema: &Value, value: &Value, at: &str) -> Result<(), String> {
    let is_typed = match schema["type"].as_str() {
        None => true,
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("boolean") => value.is_boolean(),
        Some("integer") => value.is_u64(),
        Some("number") => value.is_number(),
        Some(other) => return Err(format!("{at}: the schema has the type {other}")),
    };
    let is_allowed = schema.get("const").is_none_or(|only| only == value)
        && schema.get("enum").and_then(Value::as_array).is_none_or(|all| all.contains(value));
    let missing =
        schema["required"].as_array().into_iter().flatten().find(|name| value.get(name.as_str().unwrap_or_default()).is_none());
    if !is_typed || !is_allowed || missing.is_some() {
        return Err(format!("{at}: {value} is not as it should be; missing: {missing:?}"));
    }
    if value.as_array().is_some_and(|all| (all.len() as u64) < schema["minItems"].as_u64().unwrap_or(0)) {
        return Err(format!("{at} has too few entries"));
    }
    for (name, schema) in schema["properties"].as_object().into_iter().flatten() {
        value.get(name).map_or(Ok(()), |value| check_schema(schema, value, &format!("{at}/{name}")))?;
    }
    let items =
        schema.get("items").into_iter().flat_map(|schema| value.as_array().into_iter().flatten().map(move |item| (schema, item)));
    items.enumerate().try_for_each(|(index, (schema, item))| check_schema(schema, item, &format!("{at}/{index}")))
}

/// Whether a complete report is as the schema says, a linear scan grows with the regions, and registering with this library hardly does.
/// The smallest sample of each, for what else the machine does only adds.
fn check(report: &Value) -> Result<(), String> {
    let schema =
        serde_json::from_str(include_str!("../measurements.schema.json")).map_err(|error| format!("the schema: {error}"))?;
    check_schema(&schema, report, "")?;
    if report["complete"] != true {
        return Err("the report is not complete".to_string());
    }
    let least = |table: &str, quantity: &str, subject: &str, device: Option<&str>, regions: u64| {
        let is_it = |row: &&Value| {
            let place = &row["place"];
            row["table"] == table
                && row["quantity"] == quantity
                && row["subject"] == subject
                && place["regions"] == regions
                && place["device"].as_str() == device
                && place["update_metadata"] != true
        };
        let row = report["measurements"].as_array().into_iter().flatten().find(is_it);
        let samples = row.into_iter().flat_map(|row| row["samples"].as_array().into_iter().flatten()).filter_map(Value::as_f64);
        samples.reduce(f64::min).ok_or_else(|| format!("there is no {table} {quantity} of {subject} at {regions} regions"))
    };
    let growth = |table, quantity, subject, device| {
        Ok::<f64, String>(least(table, quantity, subject, device, 65536)? / least(table, quantity, subject, device, 256)?)
    };
    let linear = growth("index", "look-up hit", "linear scan", None)?;
    if linear < 32.0 {
        return Err(format!("a linear scan of 256 times as many regions takes {linear} times as long"));
    }
    let ours = growth("register", "register", "ours", Some("none"))?;
    if ours > 2.0 {
        return Err(format!("registering beside 256 times as many regions takes {ours} times as long"));
    }
    Ok(())
}

/// A quick sweep of these tables, without Mooncake's package.
fn sweep_quickly(tables: &str) -> Value {
    let out = directory(&format!("quick-{tables}"));
    // On a busy machine it may take longer than a quick one is meant to.
    let arguments = ["bench", "sweep", "--quick", "--budget", "600", "--tables", tables, "--wheel", "/nonexistent", "--out"];
    let output = Command::new(env!("CARGO_BIN_EXE_te")).args(arguments).arg(&out).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("look-up hit at 8192 regions: ordered map to linear scan"), "{text}");
    for file in ["measurements.csv", "report.html", "finding-and-keeping-regions.svg", "finding-and-keeping-regions.png"] {
        assert!(out.join(file).metadata().is_ok_and(|file| file.len() > 1000), "{file}");
    }
    let report = serde_json::from_str(&std::fs::read_to_string(out.join("measurements.json")).unwrap()).unwrap();
    std::fs::remove_dir_all(&out).unwrap();
    report
}

#[test]
fn a_quick_sweep_is_as_its_schema_says_and_what_is_wrong_with_a_file_is_noticed() {
    let all = sweep_quickly("index,register,parallel,pool,transfer");
    let schema = serde_json::from_str(include_str!("../measurements.schema.json")).unwrap();
    assert_eq!(check_schema(&schema, &all, ""), Ok(()));
    assert!(
        ["index", "register", "steps", "transfer"]
            .iter()
            .all(|table| { all["measurements"].as_array().unwrap().iter().any(|row| row["table"] == *table) })
    );
    // Whoever else uses the machine may spoil all rounds of a cell, though hardly of three sweeps.
    let mut report = all;
    for _ in 0..2 {
        if check(&report).is_err() {
            report = sweep_quickly("index,register");
        }
    }
    assert_eq!(check(&report), Ok(()));

    let doctored = |change: &dyn Fn(&mut Value)| {
        let mut report = report.clone();
        change(&mut report);
        check(&report)
    };
    assert!(doctored(&|report| report["version"] = 2.into()).is_err());
    assert!(doctored(&|report| report["complete"] = false.into()).is_err());
    assert!(doctored(&|report| report["measurements"][0]["samples"] = Value::Array(Vec::new())).is_err());
    assert!(doctored(&|report| report["measurements"][0]["samples"][0] = "1".into()).is_err());
    assert!(doctored(&|report| drop(report["measurements"][0].as_object_mut().unwrap().remove("unit"))).is_err());
    let set = |table: &'static str, subject: &'static str, regions: u64, sample: f64| {
        doctored(&move |report| {
            for row in report["measurements"].as_array_mut().unwrap() {
                if row["table"] == table && row["subject"] == subject && row["place"]["regions"] == regions {
                    row["samples"] = serde_json::json!([sample]);
                }
            }
        })
    };
    assert!(set("index", "linear scan", 65536, 1.0).unwrap_err().contains("a linear scan"));
    assert!(set("register", "ours", 65536, 1e12).unwrap_err().contains("registering beside"));
}

#[test]
fn wrong_arguments_are_told_before_the_files_of_an_earlier_sweep_are_touched() {
    let out = directory("wrong");
    std::fs::create_dir_all(&out).unwrap();
    let earlier = out.join("measurements.json");
    std::fs::write(&earlier, "earlier").unwrap();
    for wrong in ["--measured=0", "--regions=0", "--regions=18446744073709551615", "--stride=1K", "--stride=8K,8K", "--size=0"] {
        let arguments = ["bench", "sweep", "--quick", "--rounds", "1", "--tables", "register", "--device", "none", wrong, "--out"];
        let output = Command::new(env!("CARGO_BIN_EXE_te")).args(arguments).arg(&out).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{wrong}: {}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(std::fs::read_to_string(&earlier).unwrap(), "earlier", "{wrong}");
    }
    std::fs::remove_dir_all(&out).unwrap();
}

/// A sweep of these arguments that is to succeed: its report.
fn sweep(name: &str, arguments: &[&str]) -> Value {
    let out = directory(name);
    let output =
        Command::new(env!("CARGO_BIN_EXE_te")).args(["bench", "sweep", "--out"]).arg(&out).args(arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let report = serde_json::from_str(&std::fs::read_to_string(out.join("measurements.json")).unwrap()).unwrap();
    std::fs::remove_dir_all(&out).unwrap();
    report
}

#[test]
fn what_is_named_twice_is_measured_once() {
    let tables = ["--tables", "index,register,index", "--regions", "16,16", "--device", "none,none", "--measured", "8,8"];
    let report = sweep("twice", &[&tables[..], &["--rounds", "1", "--size", "4K,4K", "--update-metadata", "false,false"]].concat());
    let measurements = report["measurements"].as_array().unwrap();
    assert!(["index", "register"].iter().all(|table| measurements.iter().any(|row| row["table"] == *table)));
    assert!(measurements.iter().all(|row| row["samples"].as_array().unwrap().len() == 1), "{measurements:?}");
}

#[test]
fn a_package_that_hangs_ends_with_the_time_and_what_is_left_is_told_once_for_each_table() {
    // The first cell waits for the package until the time is over.
    let python = program("late", "exec sleep 1000");
    let arguments =
        ["--tables", "register,index,parallel", "--device", "tcp", "--regions", "16,32", "--budget", "1", "--rounds", "1"];
    let report = sweep("late", &[&arguments[..], &["--wheel", python.to_str().unwrap(), "--quick"]].concat());
    std::fs::remove_file(python).unwrap();
    let skipped = report["skipped"].as_array().unwrap();
    for why in skipped.iter().filter_map(|skipped| skipped["why"].as_str()) {
        let waited = why.strip_prefix("the peer has given no answer in ").and_then(|rest| rest.split(' ').next());
        assert!(waited.is_none_or(|seconds| seconds.parse().is_ok_and(|seconds: u64| seconds <= 3)), "{why}");
    }
    let late: Vec<&Value> = skipped.iter().filter(|skipped| skipped["why"] == "the time was over").collect();
    let tables = ["register", "index", "parallel"].map(|table| {
        let of =
            |skipped: &&&Value| skipped["what"].as_str().is_some_and(|what| what.ends_with(&format!("cells of the table {table}")));
        late.iter().filter(of).count()
    });
    assert_eq!((tables, late.len()), ([1; 3], 3), "{late:?}");
}

#[test]
fn transfers_of_a_package_are_beside_ours_only_if_its_bytes_arrive() {
    const GOOD: &str = r#"{"clock":0.001,"processor":0,"error":null,"rate":5.0,"segment":"peer","base":1}"#;
    const BAD: &str = r#"{"clock":0,"processor":0,"error":"WRONG CONTENT"}"#;
    for (compared, is_measured) in [(GOOD, true), (BAD, false)] {
        let answers = format!("case $line in *compare*) echo '{compared}';; *) echo '{GOOD}';; esac");
        let python = program("transfers", &format!("echo '{GOOD}'\nwhile read -r line; do {answers}; done"));
        let arguments =
            ["--quick", "--tables", "transfer", "--rounds", "1", "--budget", "600", "--wheel", python.to_str().unwrap()];
        let report = sweep("transfers", &arguments);
        std::fs::remove_file(&python).unwrap();
        let of = |subject: &str, quantity: &str| -> Vec<&Value> {
            let is_it = |row: &&Value| row["subject"] == subject && row["quantity"] == quantity;
            report["measurements"].as_array().unwrap().iter().filter(is_it).collect()
        };
        for (quantity, sample) in [("latency", 1000.0), ("throughput", 5.0)] {
            let (ours, wheel) = (of("ours", quantity), of("wheel", quantity));
            assert!(!ours.is_empty() && wheel.len() == if is_measured { ours.len() } else { 0 }, "{report}");
            assert!(wheel.iter().all(|row| row["samples"] == serde_json::json!([sample])), "{wheel:?}");
        }
        let is_told = report["skipped"].as_array().unwrap().iter().any(|skipped| skipped["why"] == "the peer: WRONG CONTENT");
        assert_eq!(is_told, !is_measured, "{report}");
    }
}

/// A shell script with these lines that takes any arguments.
fn program(name: &str, lines: &str) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let path = directory(&format!("program-{name}"));
    std::fs::write(&path, format!("#!/bin/sh\n{lines}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}
