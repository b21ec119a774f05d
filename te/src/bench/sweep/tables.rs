//! A report's measurements as aligned text.

use std::collections::BTreeMap;

use crate::bench::machine::noise;
use crate::output;
use crate::report::{Measurement, Report, Table, Value};

type Place = BTreeMap<String, Value>;

/// For each quantity of a table: places from top to bottom, subjects from left to right, as they came.
pub fn table(report: &Report, table: Table) -> String {
    let mut out = String::new();
    for quantity in distinct(report.table(table).map(|measurement| measurement.key.quantity.as_str())) {
        let rows: Vec<&Measurement> = report.table(table).filter(|measurement| measurement.key.quantity == quantity).collect();
        out += &format!("\n{quantity}, {}\n", rows[0].unit);
        out += &aligned(&lines(&rows));
    }
    out
}

/// The heading, and a line for each place.
fn lines(rows: &[&Measurement]) -> Vec<Vec<String>> {
    let names = distinct(rows.iter().flat_map(|row| row.key.place.keys().map(String::as_str)));
    let subjects = distinct(rows.iter().map(|row| row.key.subject.as_str()));
    let places: Vec<&Place> = distinct(rows.iter().map(|row| &row.key.place));
    let heading = names.iter().chain(&subjects).map(|word| word.to_string()).collect();
    let line = |place: &&Place| {
        let coordinates = names.iter().map(|name| place.get(*name).map(Value::to_string).unwrap_or_default());
        let figures = subjects.iter().map(|subject| {
            let of = rows.iter().find(|row| row.key.subject == *subject && row.key.place == **place);
            of.map(|row| row.spread().to_string()).unwrap_or_default()
        });
        coordinates.chain(figures).collect()
    };
    std::iter::once(heading).chain(places.iter().map(line)).collect()
}

/// Columns as wide as what is in them, words at the right.
pub fn aligned(lines: &[Vec<String>]) -> String {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| lines.iter().filter_map(|line| line.get(column)).map(|word| word.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let line = |line: &Vec<String>| {
        let words: Vec<String> = line.iter().zip(&widths).map(|(word, width)| format!("{word:>width$}")).collect();
        words.join("  ").trim_end().to_string() + "\n"
    };
    lines.iter().map(line).collect()
}

/// How steady the machine was, and what was not measured.
pub fn ending(report: &Report) -> String {
    let mut out = "\n".to_string();
    for measurement in report.table(Table::Machine).filter(|measurement| measurement.key.quantity == "fixed work") {
        out += &noise(measurement.spread());
    }
    for skipped in &report.skipped {
        out += &output::paragraph(&format!("Not measured: {}: {}", skipped.what, skipped.why));
    }
    out
}

/// Each once, in the order of their first appearance.
pub fn distinct<T: PartialEq>(all: impl Iterator<Item = T>) -> Vec<T> {
    let mut distinct = Vec::new();
    for one in all {
        if !distinct.contains(&one) {
            distinct.push(one);
        }
    }
    distinct
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Better, Key};

    #[test]
    fn a_table_has_a_line_for_each_place_and_a_column_for_each_subject() {
        let mut report = Report::begin(String::new());
        let mut add = |subject, regions: u64, sample| {
            report.add(Key::new(Table::Index, "churn", subject, &[("regions", regions.into())]), "ns", Better::Less, sample);
        };
        add("ours", 256, 1.0);
        add("linear scan", 256, 100.0);
        add("ours", 8192, 2.0);
        report.add(Key::new(Table::Machine, "fixed work", "machine", &[]), "ms", Better::Less, 1.0);
        let expected = "\nchurn, ns\n\
                        regions               ours     linear scan\n    \
                        256  1.00 (1.00..1.00)  100 (100..100)\n   \
                        8192  2.00 (2.00..2.00)\n";
        assert_eq!(table(&report, Table::Index), expected);
        report.skipped.push(crate::report::Skipped { what: "wheel".to_string(), why: "none".to_string() });
        assert!(ending(&report).contains("Noise: ") && ending(&report).ends_with("Not measured: wheel: none\n"));
    }
}
