//! What the server has done, as Prometheus reads it.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use hyper::{Method, StatusCode};
use transfer_engine::telemetry::prometheus::{Exposition, Kind};

/// Upper bounds of the latency histogram in seconds, the last of which is infinite.
const BOUNDS: [f64; 11] = [0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, f64::INFINITY];

/// Requests of one method.
#[derive(Default)]
struct Requests {
    by_status: BTreeMap<u16, u64>,
    /// How many took at most as long as each bound says.
    within: [u64; BOUNDS.len()],
    seconds: f64,
}

/// Counts since the start.
#[derive(Default)]
pub struct Metrics {
    /// Held for a few additions.
    requests: Mutex<BTreeMap<&'static str, Requests>>,
    /// Connections that were refused because there were too many.
    pub refused_connections: AtomicU64,
    /// Requests that could not be read.
    pub malformed_requests: AtomicU64,
}

/// What is so at the moment.
pub struct Gauges {
    /// Values that are stored.
    pub keys: usize,
    /// Bytes of all values.
    pub value_bytes: usize,
    /// Bytes that count against the limit.
    pub memory_bytes: usize,
    /// The limit.
    pub memory_limit_bytes: usize,
    /// Open connections.
    pub connections: usize,
}

impl Metrics {
    /// Counts a request that was answered, and how long that took from the end of its head on.
    pub fn count(&self, method: &Method, status: StatusCode, duration: Duration) {
        // What clients make up may not become labels.
        let method = ["DELETE", "GET", "HEAD", "PUT"].into_iter().find(|name| *name == method.as_str()).unwrap_or("other");
        let seconds = duration.as_secs_f64();
        let mut requests = self.requests.lock().expect("nothing panics under this lock");
        let requests = requests.entry(method).or_default();
        *requests.by_status.entry(status.as_u16()).or_default() += 1;
        requests.seconds += seconds;
        for (within, bound) in requests.within.iter_mut().zip(BOUNDS) {
            *within += u64::from(seconds <= bound);
        }
    }

    /// The text format, version 0.0.4.
    pub fn render(&self, gauges: &Gauges) -> String {
        let mut text = Exposition::default();
        let refused = self.refused_connections.load(Relaxed);
        let malformed = self.malformed_requests.load(Relaxed);
        for (name, kind, help, value) in [
            ("keys", Kind::Gauge, "Keys that have a value.", gauges.keys as u64),
            ("value_bytes", Kind::Gauge, "Bytes of all values.", gauges.value_bytes as u64),
            ("memory_bytes", Kind::Gauge, "Bytes that count against the limit.", gauges.memory_bytes as u64),
            ("memory_limit_bytes", Kind::Gauge, "The limit, --max-memory.", gauges.memory_limit_bytes as u64),
            ("connections", Kind::Gauge, "Open connections.", gauges.connections as u64),
            ("refused_connections_total", Kind::Counter, "Connections beyond --max-connections.", refused),
            ("malformed_requests_total", Kind::Counter, "Requests that could not be read.", malformed),
        ] {
            text.single(&format!("te_metadata_{name}"), kind, help, value);
        }
        let requests = self.requests.lock().expect("nothing panics under this lock");
        text.family("te_metadata_requests_total", Kind::Counter, "Requests that were answered.");
        for (method, requests) in &*requests {
            for (status, count) in &requests.by_status {
                text.sample(&[("method", method), ("status", &status.to_string())], count);
            }
        }
        let help = "From the end of a request's head to its answer.";
        text.family("te_metadata_request_duration_seconds", Kind::Histogram, help);
        for (method, Requests { within, seconds, .. }) in &*requests {
            text.histogram(&[("method", method)], BOUNDS.into_iter().zip(*within), *seconds);
        }
        text.into_text()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_by_method_status_and_duration() {
        let metrics = Metrics::default();
        metrics.count(&Method::GET, StatusCode::OK, Duration::from_micros(100));
        metrics.count(&Method::GET, StatusCode::NOT_FOUND, Duration::from_secs(9));
        metrics.count(&Method::from_bytes(b"MADE-UP").unwrap(), StatusCode::METHOD_NOT_ALLOWED, Duration::ZERO);
        let text = metrics.render(&Gauges { keys: 7, value_bytes: 6, memory_bytes: 5, memory_limit_bytes: 4, connections: 3 });
        for line in [
            "te_metadata_keys 7",
            "te_metadata_memory_bytes 5",
            "te_metadata_requests_total{method=\"GET\",status=\"200\"} 1",
            "te_metadata_requests_total{method=\"GET\",status=\"404\"} 1",
            "te_metadata_requests_total{method=\"other\",status=\"405\"} 1",
            "te_metadata_request_duration_seconds_bucket{method=\"GET\",le=\"0.0001\"} 1",
            "te_metadata_request_duration_seconds_bucket{method=\"GET\",le=\"5\"} 1",
            "te_metadata_request_duration_seconds_bucket{method=\"GET\",le=\"+Inf\"} 2",
            "te_metadata_request_duration_seconds_sum{method=\"GET\"} 9.0001",
            "te_metadata_request_duration_seconds_count{method=\"GET\"} 2",
        ] {
            assert!(text.lines().any(|written| written == line), "{line} is not in\n{text}");
        }
    }
}
