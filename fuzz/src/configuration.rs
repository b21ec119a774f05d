//! Environments: reading never fails, and whatever is set, the values that hold are in range.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use transfer_engine::config::{Config, Environment, VARIABLES, Value};

/// Lines of `NAME=value`; of several with one name the first counts. A line that begins with `#` and a number names a variable by its
/// place in the table.
pub fn run(data: &[u8]) {
    let mut set: Vec<(OsString, OsString)> = Vec::new();
    for line in data.split(|byte| *byte == b'\n') {
        let mut parts = line.splitn(2, |byte| *byte == b'=');
        let (name, value) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let name = match name {
            [b'#', place] => VARIABLES[*place as usize % VARIABLES.len()].name.into(),
            name => OsString::from_vec(name.to_vec()),
        };
        set.push((name, OsString::from_vec(value.to_vec())));
    }
    let lookup = |name: &str| set.iter().find(|(set, _)| set == name).map(|(_, value)| value.clone());
    let environment = Environment::from_source(&lookup, set.iter().map(|(name, _)| name.clone()));
    assert!(environment.near_misses().iter().all(|text| !text.is_empty()));
    assert_eq!(environment.readings().len(), VARIABLES.len());
    let defaults = Environment::from_source(&|_| None, []);
    for (reading, default) in environment.readings().iter().zip(defaults.readings()) {
        assert!(!reading.shown_value().contains(|c: char| c.is_control()));
        assert!(!reading.text.iter().any(|text| text.contains(|c: char| c.is_control())));
        if reading.text.is_none() || reading.problem.is_some() {
            assert_eq!(reading.value, default.value, "{:?}", reading.problem);
        }
        if let (Value::Number(_), None) = (&default.value, &reading.problem) {
            assert!(matches!(reading.value, Value::Number(_)));
        }
    }
    check(&environment.config());
}

/// What the rest of the library relies on.
fn check(config: &Config) {
    assert!(config.handshake_port > 0);
    assert!(config.min_rpc_port >= 1024 && config.min_rpc_port <= config.max_rpc_port);
    assert!((1..=i32::MAX as u32).contains(&config.handshake_backlog));
    assert!((1..3600).contains(&config.handshake_connect_timeout.as_secs()));
    assert!((1 << 20..=128 << 20).contains(&config.handshake_max_length));
    assert!(config.metadata_refresh_interval.is_none_or(|interval| !interval.is_zero()));
    assert!(config.slice_timeout.is_none_or(|timeout| !timeout.is_zero()));
    assert!(!config.tcp_status_timeout.is_zero());
    assert!(config.tcp_lanes_per_peer >= 1 && config.tcp_io_threads >= 1);
    assert!(config.tcp_bind_address.as_ref().is_none_or(|address| !address.is_empty()));
}
