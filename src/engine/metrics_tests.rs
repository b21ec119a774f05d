//! What the text says, that it keeps to the format, and how long its socket is there.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use super::tests::{Memory, options, read, write};
use super::*;
use crate::telemetry::prometheus::{self, Sample};

fn engine(config: &Config) -> Arc<Engine> {
    let options = EngineOptions { metadata: PEER_TO_PEER.into(), server_name: "127.0.0.1".into(), ..EngineOptions::default() };
    let engine = Engine::create(&options, config.clone()).unwrap();
    engine.install_transport("tcp", None).unwrap();
    engine
}

fn value(samples: &[Sample], name: &str, labels: &[(&str, &str)]) -> f64 {
    let is_it = |sample: &&Sample| {
        sample.name == format!("transfer_engine_{name}") && labels.iter().all(|(label, value)| sample.label(label) == *value)
    };
    samples.iter().find(is_it).unwrap_or_else(|| panic!("{name} {labels:?}")).value
}

/// Families come once, with their help and type before their values, named as Prometheus asks for; counts of a histogram grow from bound to
/// bound, to that of all.
fn check_format(text: &str) -> Vec<Sample> {
    assert!(text.ends_with('\n'));
    let mut families: BTreeMap<&str, &str> = BTreeMap::new();
    let (mut family, mut helped) = ("", "");
    let mut seen = BTreeSet::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            helped = rest.split_once(' ').unwrap().0;
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert_eq!(name, helped);
            assert!(families.insert(name, kind).is_none(), "{name} comes twice");
            assert!(name.starts_with("transfer_engine_") && !name.contains("_ns"), "{name}");
            assert_eq!(kind == "counter", name.ends_with("_total"), "{name}");
            family = name;
        } else {
            let sample = &prometheus::parse(line).unwrap()[0];
            let suffix = sample.name.strip_prefix(family).unwrap_or_else(|| panic!("{line} is not of {family}"));
            match families[family] {
                "histogram" => assert!(["_bucket", "_sum", "_count"].contains(&suffix), "{line}"),
                _ => assert_eq!(suffix, "", "{line}"),
            }
            assert!(seen.insert(line.rsplit_once(' ').unwrap().0), "{line} comes twice");
        }
    }
    let samples = prometheus::parse(text).unwrap();
    let mut last: Option<&Sample> = None;
    for sample in &samples {
        if let Some(before) = last.filter(|last| last.name.ends_with("_bucket")) {
            if sample.name == before.name && sample.label("operation") == before.label("operation") {
                assert!(sample.value >= before.value);
                assert!(sample.label("le").parse::<f64>().unwrap() > before.label("le").parse::<f64>().unwrap());
            } else {
                assert_eq!(before.label("le"), "+Inf");
                let count = before.name.strip_prefix("transfer_engine_").unwrap().replace("_bucket", "_count");
                assert_eq!(value(&samples, &count, &[("operation", before.label("operation"))]), before.value);
            }
        }
        last = Some(sample);
    }
    samples
}

#[test]
fn the_text_keeps_to_the_format_and_counts_what_was_done() {
    let (near, far) = (engine(&Config::default()), engine(&Config::default()));
    let (here, there) = (Memory::new(1 << 16), Memory::new(1 << 16));
    near.register(here.range(0, 1 << 16), &options()).unwrap();
    far.register(there.range(0, 1 << 16), &options()).unwrap();
    let _pool = near.create_pool(&PoolOptions { bytes: Some(1 << 20), ..PoolOptions::default() }).unwrap();
    let segment = near.open_segment(&far.name()).unwrap();
    let requests: Vec<_> = (0..5)
        .map(|at| {
            let (local, remote) = (here.range(at * 4096, 4096), there.address() + at as u64 * 4096);
            if at < 3 { write(local, segment, remote) } else { read(local, segment, remote) }
        })
        .collect();
    let statuses = near.transfer(&requests, SubmitOptions::default()).unwrap();
    assert!(statuses.iter().all(|status| status.transferred_bytes == 4096));
    let failing = near.transfer(&[write(here.range(0, 8), segment, 8)], SubmitOptions::default()).unwrap();
    assert!(failing[0].error.is_some());

    let samples = check_format(&near.metrics());
    let value = |name: &str, labels: &[(&str, &str)]| value(&samples, name, labels);
    assert_eq!(value("info", &[("engine", &near.name()), ("address", &near.address())]), 1.0);
    assert_eq!(value("tasks_completed_total", &[]), 5.0);
    assert_eq!(value("tasks_failed_total", &[]), 1.0);
    assert_eq!((value("bytes_written_total", &[]), value("bytes_read_total", &[])), (3.0 * 4096.0, 2.0 * 4096.0));
    for (operation, count) in [("write", 3.0), ("read", 2.0)] {
        let labels = [("operation", operation)];
        assert_eq!(value("request_latency_seconds_count", &labels), count, "completed requests only");
        let sum = value("request_latency_seconds_sum", &labels);
        assert!(sum > 0.0 && sum < 3600.0, "{sum}");
    }
    // The pool's arena, too.
    assert_eq!((value("regions", &[]), value("open_segments", &[])), (2.0, 1.0));
    assert!(value("registered_bytes", &[]) >= (1 << 16) as f64 + (1 << 20) as f64);
    assert!(value("pool_arena_bytes", &[]) >= (1 << 20) as f64);
    assert_eq!(value("pool_leases", &[]), 0.0);
    check_format(&far.metrics());
}

/// A directory that goes with the test.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Directory {
        Directory(std::env::temp_dir().join(format!("te-metrics-{name}-{}", std::process::id())))
    }

    fn sockets(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&self.0).into_iter().flatten();
        let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn ask(path: &Path) -> String {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn engines_of_a_directory_are_each_seen_until_they_are_destroyed() {
    let directory = Directory::new("engines");
    let config = Config { metrics_directory: Some(directory.0.clone()), ..Config::default() };
    let (first, second) = (engine(&config), engine(&config));
    let texts: Vec<_> = directory.sockets().iter().map(|path| ask(path)).collect();
    assert_eq!(texts.len(), 2);
    for engine in [&first, &second] {
        assert_eq!(texts.iter().filter(|text| text.contains(&format!("engine=\"{}\"", engine.name()))).count(), 1);
    }
    first.shutdown();
    let left = directory.sockets();
    assert_eq!(left.len(), 1);
    assert!(ask(&left[0]).contains(&second.name()));
    drop(second);
    assert!(directory.sockets().is_empty());
}

#[test]
fn a_socket_is_opened_when_it_is_asked_for_and_moved_when_asked_again() {
    let directory = Directory::new("asked");
    std::fs::create_dir(&directory.0).unwrap();
    let engine = engine(&Config::default());
    assert!(engine.exporter.lock().is_none());
    let (one, other) = (directory.0.join("one"), directory.0.join("other"));
    engine.serve_metrics(Some(&one)).unwrap();
    engine.serve_metrics(Some(&one)).unwrap();
    engine.serve_metrics(None).unwrap();
    assert_eq!(directory.sockets(), std::slice::from_ref(&one), "it is open already");
    engine.serve_metrics(Some(&other)).unwrap();
    assert_eq!(directory.sockets(), std::slice::from_ref(&other));
    assert_eq!(engine.serve_metrics(Some(&directory.0)).unwrap_err().code(), Code::Socket);
    assert!(!ask(&other).is_empty(), "what fails changes nothing");
    engine.shutdown();
    assert!(directory.sockets().is_empty());
    assert_eq!(engine.serve_metrics(Some(&one)).unwrap_err().code(), Code::Canceled);
}

#[test]
fn an_engine_whose_socket_cannot_be_opened_works_all_the_same() {
    let config = Config { metrics_directory: Some("/proc/none".into()), ..Config::default() };
    assert!(engine(&config).exporter.lock().is_none());
}
