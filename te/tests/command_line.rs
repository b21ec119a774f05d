//! The program as its users start it: exit status, and what goes to which stream.

use std::process::{Command, Output};

fn te(arguments: &[&str], settings: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_te"));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"MC_")) {
        command.env_remove(name);
    }
    command.args(arguments).envs(settings.iter().copied()).output().unwrap()
}

#[test]
fn info_reports_a_bad_environment_and_succeeds() {
    let settings = [("MC_HANDSHAKE_PORT", "abc"), ("MC_TCP_LANE_PER_PEER", "4"), ("MC_LOG_LEVEL", "INFO")];
    let output = te(&["info", "--json"], &settings);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let problems: Vec<_> =
        report["variables"].as_array().unwrap().iter().filter(|variable| variable["problem"].is_string()).collect();
    assert_eq!((problems.len(), &problems[0]["name"]), (1, &"MC_HANDSHAKE_PORT".into()));
    assert_eq!(report["near_misses"].as_array().unwrap().len(), 1);

    let text = String::from_utf8(te(&["info"], &settings).stdout).unwrap();
    assert!(text.contains("MC_HANDSHAKE_PORT=\"abc\" is not a whole number from 1 to 65535") && !text.contains('\x1b'));
}

#[test]
fn wrong_arguments_and_failures_have_their_own_status_and_keep_standard_output_clean() {
    for (arguments, status) in [
        (&["info", "--json", "--markdown"][..], 2),
        (&["nonsense"], 2),
        (&["bench", "register", "--rounds", "0"], 2),
        (&["bench", "transfer", "--sizes", "4X"], 2),
        (&["bench", "register", "--size", "8K", "--stride", "4K"], 1),
        (&["bench", "register", "--regions", "2,1"], 1),
        (&["bench", "register", "--metadata", "start", "--callers", "0"], 2),
        (&["bench", "register", "--metadata", "start", "--published-regions", "2,1"], 1),
        (&["bench", "register", "--metadata", "start", "--quick", "--peer-python", "/bin/false"], 1),
        (&["bench", "register", "--metadata", "nonsense://host"], 1),
        (&["bench", "transfer", "--sizes", "1G", "--memory", "1M"], 1),
    ] {
        let output = te(arguments, &[]);
        assert_eq!(output.status.code(), Some(status), "{arguments:?}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{arguments:?}");
    }
}

#[test]
fn the_documentation_of_the_configuration_is_what_info_prints() {
    let written = include_str!("../../docs/configuration.md");
    let printed = String::from_utf8(te(&["info", "--markdown"], &[("MC_HANDSHAKE_PORT", "1")]).stdout).unwrap();
    assert!(printed == written, "write it anew: te info --markdown > docs/configuration.md");
}

#[test]
fn info_says_when_the_metric_will_not_be_seen() {
    let advice = |settings| String::from_utf8(te(&["info"], settings).stdout).unwrap().contains("MC_TE_METRIC logs at level INFO");
    assert!(advice(&[("MC_TE_METRIC", "1")]));
    assert!(!advice(&[("MC_TE_METRIC", "1"), ("MC_LOG_LEVEL", "DEBUG")]) && !advice(&[("MC_TE_METRIC", "0")]));
}
