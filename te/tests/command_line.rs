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

/// A file of measurements with one look-up.
fn measurements(name: &str, samples: [f64; 6]) -> std::path::PathBuf {
    let path = std::env::temp_dir().join(format!("te-command-line-{name}-{}.json", std::process::id()));
    let report = serde_json::json!({
        "format": "te-measurements", "version": 1, "complete": true, "started": 0, "seconds": 1.0, "command": "te bench sweep",
        "machine": { "processor": "some", "cpus": 2, "kernel": "6.1", "load": 0.0, "optimized": true },
        "measurements": [{ "table": "index", "quantity": "look-up hit", "subject": "ours", "place": { "regions": 256 },
                           "unit": "ns", "better": "less", "samples": samples }],
        "skipped": []
    });
    std::fs::write(&path, report.to_string()).unwrap();
    path
}

#[test]
fn a_comparison_fails_if_and_only_if_something_became_worse_and_wrong_arguments_are_something_else() {
    let [fast, slow] = [("fast", 1.0), ("slow", 1.5)]
        .map(|(name, factor)| measurements(name, [20.0, 20.1, 20.2, 20.3, 20.4, 20.5].map(|sample| sample * factor)));
    let other = measurements("other", [20.0; 6]);
    std::fs::write(&other, std::fs::read_to_string(&other).unwrap().replace("look-up hit", "look-up miss")).unwrap();
    let [fast, slow, other] = [&fast, &slow, &other].map(|path| path.to_str().unwrap());
    for (arguments, status) in [
        (["--compare", fast, slow].as_slice(), 1),
        (&["--compare", slow, fast], 0),
        (&["--compare", fast, fast], 0),
        (&["--compare", fast, slow, "--tolerance", "60"], 0),
        (&["--compare", fast, slow, "--tolerance", "-1"], 2),
        (&["--compare", fast], 2),
        (&["--compare", fast, "/nowhere.json"], 2),
        (&["--compare", fast, other], 2),
        (&["--tolerance", "5"], 2),
        (&[], 2),
    ] {
        let output = te(&[&["bench"], arguments].concat(), &[]);
        assert_eq!(output.status.code(), Some(status), "{arguments:?}: {output:?}");
    }
    let output = te(&["bench", "--compare", fast, slow, "--json"], &[]);
    let outcome: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&outcome["regressions"], &outcome["compared"][0]["verdict"]), (&1.into(), &"regression".into()));
    let text = String::from_utf8(te(&["bench", "--compare", fast, slow], &[]).stdout).unwrap();
    assert!(text.contains("WORSE") && text.contains("1 compared: 1 worse"), "{text}");
    for path in [fast, slow, other] {
        std::fs::remove_file(path).unwrap();
    }
}
