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
