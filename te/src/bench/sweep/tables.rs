//! A report's measurements as aligned text.

use std::collections::BTreeMap;

use crate::bench::machine::noise;
use crate::output;
use crate::report::{Key, Measurement, Report, Table, Value};

type Place = BTreeMap<String, Value>;

/// For each quantity of a table: places from top to bottom, subjects from left to right, as they came.
pub fn table(report: &Report, table: Table) -> String {
    table_with(report, table, |key| (key.place.clone(), key.subject.clone()))
}

/// The same with a column for each value of one coordinate of the place, of the only subject.
pub fn table_by(report: &Report, table: Table, coordinate: &str) -> String {
    table_with(report, table, |key| {
        let mut place = key.place.clone();
        let column = place.remove(coordinate).map(|value| value.to_string()).unwrap_or_default();
        (place, column)
    })
}

fn table_with(report: &Report, table: Table, split: impl Fn(&Key) -> (Place, String)) -> String {
    let mut out = String::new();
    for quantity in distinct(report.table(table).map(|measurement| measurement.key.quantity.as_str())) {
        let rows: Vec<&Measurement> = report.table(table).filter(|measurement| measurement.key.quantity == quantity).collect();
        out += &format!("\n{quantity}, {}\n", rows[0].unit);
        out += &aligned(&lines(&rows, &split));
    }
    out
}

/// The heading, and a line for each place. A measurement is split into its place and its column.
fn lines(rows: &[&Measurement], split: impl Fn(&Key) -> (Place, String)) -> Vec<Vec<String>> {
    let split: Vec<(Place, String)> = rows.iter().map(|row| split(&row.key)).collect();
    let names = distinct(split.iter().flat_map(|(place, _)| place.keys().map(String::as_str)));
    let columns = distinct(split.iter().map(|(_, column)| column.as_str()));
    let places: Vec<&Place> = distinct(split.iter().map(|(place, _)| place));
    let heading = names.iter().chain(&columns).map(|word| word.to_string()).collect();
    let line = |place: &&Place| {
        let coordinates = names.iter().map(|name| place.get(*name).map(Value::to_string).unwrap_or_default());
        let figures = columns.iter().map(|column| {
            let of = split.iter().zip(rows).find(|((other, of), _)| other == *place && of == column);
            of.map(|(_, row)| row.spread().to_string()).unwrap_or_default()
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
    use crate::report::Better;

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

    #[test]
    fn a_coordinate_can_be_what_columns_differ_in() {
        let mut report = Report::begin(String::new());
        for (step, sample) in [("residency", 1.0), ("publishing", 2.0)] {
            let place = [("regions", 256u64.into()), ("step", step.into())];
            report.add(Key::new(Table::Steps, "register", "ours", &place), "ns", Better::Less, sample);
        }
        let lines: Vec<String> = table_by(&report, Table::Steps, "step").lines().map(str::to_string).collect();
        assert_eq!(lines[2].split_whitespace().collect::<Vec<_>>(), ["regions", "residency", "publishing"]);
        assert!(lines[3].contains("256") && lines[3].contains("1.00 (") && lines[3].contains("2.00 ("), "{}", lines[3]);
    }
}
