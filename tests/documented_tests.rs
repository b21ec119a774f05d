//! `docs/testing.md` names, for each kind of fault, the tests that hold its outcome. They must exist, and be run.

use std::path::Path;

const DOCUMENT: &str = include_str!("../docs/testing.md");

fn read(file: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("docs/testing.md names {file}: {error}"))
}

/// Lines of the tables under "Faults and their tests", as cells, without the headings.
fn rows() -> Vec<Vec<&'static str>> {
    let section = DOCUMENT.split("\n## ").find(|section| section.starts_with("Faults and their tests\n")).unwrap();
    let mut rows: Vec<Vec<&str>> = Vec::new();
    let mut lines = section.lines().peekable();
    while let Some(line) = lines.next() {
        let is_heading = line.starts_with("|---") || lines.peek().is_some_and(|next| next.starts_with("|---"));
        if line.starts_with('|') && !is_heading {
            rows.push(line.trim_matches('|').split(" | ").map(str::trim).collect());
        }
    }
    rows
}

/// What a cell such as "`a`, `b` in `file`; `c` in `other`" names: pairs of test and file. Nothing if it is prose.
fn names(cell: &'static str) -> Vec<(&'static str, &'static str)> {
    let mut named = Vec::new();
    for group in cell.split("; ") {
        let Some((tests, file)) = group.split_once(" in `") else { continue };
        if tests.starts_with('`') && file.ends_with('`') {
            named.extend(tests.split(", ").map(|test| (test.trim_matches('`'), file.trim_end_matches('`'))));
        }
    }
    named
}

/// Why a test is not run, if it is not.
fn find_fault(test: &str, file: &str) -> Option<String> {
    if file.ends_with("CMakeLists.txt") {
        return (!read(file).contains(&format!("add_test(NAME {test} "))).then(|| format!("{file} adds no test {test}"));
    }
    let programs = [
        (".c", "ctests/clients", "ctests/CMakeLists.txt", "add_client("),
        (".cpp", "ctests/cpp/consumers", "ctests/cpp/CMakeLists.txt", "add_consumer("),
    ];
    for (suffix, directory, list, command) in programs {
        let Some(program) = file.strip_suffix(suffix) else { continue };
        let source = read(&format!("{directory}/{file}"));
        if !source.contains(&format!("static void {test}(")) {
            return Some(format!("{file} has no {test}"));
        }
        let (_, main) = source.split_once("\nint main(").unwrap_or_default();
        if !main.contains(&format!(" {test}(")) {
            return Some(format!("main() of {file} does not call {test}"));
        }
        let list_text = read(list);
        let mut added =
            list_text.lines().filter_map(|line| line.strip_prefix(command).and_then(|rest| rest.split([' ', ')']).next()));
        return (!added.any(|name| name == program)).then(|| format!("{list} does not add {program}"));
    }
    let source = read(file);
    if file.ends_with(".py") {
        // A file is run because of its name, and a method because of its.
        let is_run = test.starts_with("test_") && file.rsplit('/').next().is_some_and(|name| name.starts_with("test_"));
        let is_there = source.contains(&format!("    def {test}(self"));
        return (!(is_run && is_there)).then(|| format!("{file} has no {test} that is run"));
    }
    if file == "tests/fuzz_corpus.rs" {
        let is_run = source.split_once("corpus_tests! {").is_some_and(|(_, list)| list.split_whitespace().any(|word| word == test));
        return (!is_run).then(|| format!("{file} does not run {test}"));
    }
    let lines: Vec<&str> = source.lines().map(str::trim).collect();
    let Some(at) = lines.iter().position(|line| line.starts_with(&format!("fn {test}("))) else {
        return Some(format!("{file} has no {test}"));
    };
    let attributes: Vec<_> = lines[..at].iter().rev().take_while(|line| line.starts_with('#')).collect();
    // "make test-lab" runs what is ignored elsewhere.
    let is_of_lab = |line: &str| file == "tests/rdma_lab.rs" && line == "#[ignore = \"needs the lab\"]";
    let is_left_out = |line: &&&str| line.starts_with("#[ignore") && !is_of_lab(line);
    let is_run = attributes.contains(&&"#[test]") && !attributes.iter().any(is_left_out);
    (!is_run).then(|| format!("{test} in {file} is no test that runs"))
}

#[test]
fn every_test_that_the_documentation_names_is_run() {
    let rows = rows();
    assert!(rows.len() >= 50, "{} kinds of faults", rows.len());
    let mut faults = Vec::new();
    for row in &rows {
        assert_eq!(row.len(), 3, "{row:?}");
        let named: Vec<_> = row[1..].iter().flat_map(|cell| names(cell)).collect();
        if named.is_empty() || names(row[2]).is_empty() {
            faults.push(format!("no test is named for: {}", row[0]));
        }
        // Names that are written in another way would not be looked for.
        let ticks: usize = row[1..].iter().map(|cell| cell.matches('`').count()).sum();
        let files: usize = row[1..].iter().map(|cell| cell.matches(" in `").count()).sum();
        if ticks != 2 * (named.len() + files) {
            faults.push(format!("cannot be read: {row:?}"));
        }
        faults.extend(named.into_iter().filter_map(|(test, file)| find_fault(test, file)));
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn tests_that_are_missing_or_not_run_are_noticed() {
    for (test, file) in [
        ("no_such_test", "te_memory.c"),
        ("count_by_the_environment", "te_memory.c"),
        ("no_such_test", "python_module.cpp"),
        ("serve_later", "store_client.cpp"),
        ("no_such_test", "ctests/cpp/CMakeLists.txt"),
        ("no_such_test", "src/registry/tests.rs"),
        ("child_decides_an_error", "src/telemetry/log.rs"),
        ("no_such_target", "tests/fuzz_corpus.rs"),
        ("test_nothing", "tests/interop/servers/test_servers.py"),
        ("pairs", "tests/interop/servers/backends.py"),
        ("no_such_test", "ctests/CMakeLists.txt"),
        ("no_such_test", "tests/rdma_lab.rs"),
        ("test_no_such_thing", "tests/interop/test_rdma.py"),
    ] {
        assert!(find_fault(test, file).is_some(), "{test} in {file}");
    }
}
