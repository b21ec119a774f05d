//! Prometheus's text format, version 0.0.4: how numbers become text, and are read from it. What they are is for whoever has them to say.

use std::collections::BTreeMap;
use std::fmt::{Display, Write};

/// What HTTP calls the format.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// What a family's values are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// Grows and shrinks.
    Gauge,
    /// Counts by size.
    Histogram,
}

/// A text that is written family by family.
#[derive(Debug, Default)]
pub struct Exposition {
    text: String,
    name: String,
}

impl Exposition {
    /// Begins the next family; what is written from now on is its. A name may come once. Counters' names end in `_total`, and units are
    /// seconds and bytes.
    pub fn family(&mut self, name: &str, kind: Kind, help: &str) {
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        let help = help.replace('\\', "\\\\").replace('\n', "\\n");
        self.name = name.to_string();
        self.text += &format!("# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    /// One value of the family.
    pub fn sample(&mut self, labels: &[(&str, &str)], value: impl Display) {
        self.line("", labels, None, value);
    }

    /// A family of one value without labels.
    pub fn single(&mut self, name: &str, kind: Kind, help: &str, value: impl Display) {
        self.family(name, kind, help);
        self.sample(&[], value);
    }

    /// A histogram of the family: for each bound, the last of which is infinite, how many values are at most as large, and the sum of
    /// all values.
    pub fn histogram(&mut self, labels: &[(&str, &str)], cumulative: impl IntoIterator<Item = (f64, u64)>, sum: f64) {
        let mut count = 0;
        for (bound, within) in cumulative {
            let bound = if bound.is_finite() { bound.to_string() } else { "+Inf".to_string() };
            self.line("_bucket", labels, Some(&bound), within);
            count = within;
        }
        self.line("_sum", labels, None, sum);
        self.line("_count", labels, None, count);
    }

    /// All that was written.
    pub fn into_text(self) -> String {
        self.text
    }

    fn line(&mut self, suffix: &str, labels: &[(&str, &str)], bound: Option<&str>, value: impl Display) {
        let Exposition { text, name } = self;
        let _ = write!(text, "{name}{suffix}");
        let mut separator = '{';
        for (label, value) in labels.iter().copied().chain(bound.map(|bound| ("le", bound))) {
            let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let _ = write!(text, "{separator}{label}=\"{value}\"");
            separator = ',';
        }
        let _ = writeln!(text, "{} {value}", if separator == ',' { "}" } else { "" });
    }
}

/// One line that has a value.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// With the suffix of histograms' lines.
    pub name: String,
    /// Values of labels by their names.
    pub labels: BTreeMap<String, String>,
    /// Not a number where the line says so.
    pub value: f64,
}

impl Sample {
    /// The label's value; empty if there is none, which means the same in this format.
    pub fn label(&self, name: &str) -> &str {
        self.labels.get(name).map_or("", String::as_str)
    }
}

/// Reads a text without time stamps. The first line that is not understood is the error.
pub fn parse(text: &str) -> Result<Vec<Sample>, String> {
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(|line| parse_line(line).ok_or_else(|| format!("not in Prometheus's text format: {line:?}"))).collect()
}

fn parse_line(line: &str) -> Option<Sample> {
    let (name, mut rest) = split_name(line)?;
    let mut labels = BTreeMap::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        while !rest.starts_with('}') {
            let (label, after) = split_name(rest)?;
            let (value, after) = split_quoted(after.strip_prefix('=')?)?;
            if labels.insert(label.to_string(), value).is_some() {
                return None;
            }
            rest = after.strip_prefix(',').or_else(|| after.starts_with('}').then_some(after))?;
        }
        rest = &rest[1..];
    }
    let value = rest.strip_prefix(' ')?.parse().ok()?;
    Some(Sample { name: name.to_string(), labels, value })
}

fn split_name(text: &str) -> Option<(&str, &str)> {
    let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(text.len());
    (end > 0 && !text.starts_with(|c: char| c.is_ascii_digit())).then(|| text.split_at(end))
}

/// The text between quotes, with its escapes undone, and what comes after it.
fn split_quoted(text: &str) -> Option<(String, &str)> {
    let inner = text.strip_prefix('"')?;
    let mut value = String::new();
    let mut characters = inner.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((value, &inner[at + 1..])),
            '\\' => value.push(match characters.next()?.1 {
                'n' => '\n',
                other @ ('"' | '\\') => other,
                _ => return None,
            }),
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_as_it_was() {
        let mut exposition = Exposition::default();
        exposition.family("a_seconds", Kind::Histogram, "A.");
        exposition.histogram(&[("x", "q\"b\\n\n")], [(0.5, 1), (f64::INFINITY, 3)], 0.25);
        let samples = parse(&exposition.into_text()).unwrap();
        assert_eq!(samples.len(), 4);
        assert_eq!((samples[0].label("x"), samples[0].label("le"), samples[0].value), ("q\"b\\n\n", "0.5", 1.0));
        assert_eq!((samples[2].name.as_str(), samples[2].value), ("a_seconds_sum", 0.25));
    }

    #[test]
    fn what_is_not_in_the_format_is_refused() {
        for line in [
            "a",
            "a ",
            "1a 1",
            "a{ 1",
            "a{x} 1",
            "a{x=1} 1",
            "a{x=\"1} 1",
            "a{x=\"1\"y=\"2\"} 1",
            "a{x=\"\\t\"} 1",
            "a{x=\"1\",x=\"1\"} 1",
            "a b",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
        assert_eq!(parse("# anything\n\na +Inf\n").unwrap()[0].value, f64::INFINITY);
    }

    #[test]
    fn texts_of_others_cannot_break_a_line() {
        let mut exposition = Exposition::default();
        exposition.family("a_total", Kind::Counter, "Back\\slash,\nnew line.");
        exposition.sample(&[("x", "\"\\\n"), ("y", "ü")], 7);
        let expected = "# HELP a_total Back\\\\slash,\\nnew line.\n# TYPE a_total counter\na_total{x=\"\\\"\\\\\\n\",y=\"ü\"} 7\n";
        assert_eq!(exposition.into_text(), expected);
    }

    #[test]
    fn a_histogram_ends_with_all_its_values() {
        let mut exposition = Exposition::default();
        exposition.family("a_seconds", Kind::Histogram, "A.");
        exposition.histogram(&[("x", "1")], [(0.000000256, 1), (f64::INFINITY, 3)], 0.5);
        exposition.single("b", Kind::Gauge, "B.", 0.25);
        let expected = "# HELP a_seconds A.\n# TYPE a_seconds histogram\na_seconds_bucket{x=\"1\",le=\"0.000000256\"} 1\n\
                        a_seconds_bucket{x=\"1\",le=\"+Inf\"} 3\na_seconds_sum{x=\"1\"} 0.5\na_seconds_count{x=\"1\"} 3\n\
                        # HELP b B.\n# TYPE b gauge\nb 0.25\n";
        assert_eq!(exposition.into_text(), expected);
    }
}
