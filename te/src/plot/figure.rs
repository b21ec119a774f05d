//! What all charts have in common: the measurements of several files side by side, axes, and the frame with title and legend.

use std::collections::BTreeMap;

use crate::output;
use crate::report::{Key, Measurement, Report, Table, Value};

use super::scene::{Anchor, Ink, PartKind, Scene, Text, dashes, text_width};

/// Width of a picture with one panel, and of a panel where there are more.
const WIDE: f64 = 760.0;
const NARROW: f64 = 540.0;
/// Heights of text: the title, what stands on axes and in legends.
const TITLE: f64 = 17.0;
pub const SMALL: f64 = 12.0;
/// From one line of small text to the next.
pub const LINE: f64 = 17.0;
const MARGIN: f64 = 14.0;

/// How many calls were timed together.
pub const MEASURED: &str = "measured";

/// A file of measurements, and what to call it where there are several.
pub struct Input {
    /// The name of the file; empty if there is only one.
    pub label: String,
    /// What is in it.
    pub report: Report,
}

/// One chart with its numbers.
pub struct Figure {
    /// Stem of its files, in small letters without spaces.
    pub name: String,
    /// Over it.
    pub title: String,
    /// What is the same in all of it.
    pub constant: String,
    /// How to read it.
    pub note: String,
    /// The picture.
    pub scene: Scene,
    /// Names of the columns of its numbers.
    pub columns: Vec<String>,
    /// Its numbers.
    pub rows: Vec<Vec<String>>,
}

/// A measurement of one of the files.
#[derive(Clone, Copy)]
pub struct Point<'a> {
    label: &'a str,
    /// The measurement.
    pub measurement: &'a Measurement,
}

impl Point<'_> {
    /// What a part of the key is, as words; `file` is one of them. Empty if it has none.
    pub fn part(&self, name: &str) -> String {
        match name {
            "file" => self.label.to_string(),
            "quantity" => self.measurement.key.quantity.clone(),
            "subject" => self.measurement.key.subject.clone(),
            _ => self.measurement.key.place.get(name).map(|value| describe(name, value)).unwrap_or_default(),
        }
    }

    /// Some of them, as words.
    pub fn parts(&self, names: &[String]) -> String {
        Vec::from_iter(names.iter().map(|name| self.part(name)).filter(|part| !part.is_empty())).join(", ")
    }

    /// A number of the place.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.measurement.key.number(name)
    }
}

/// A coordinate as words that stand alone.
fn describe(name: &str, value: &Value) -> String {
    match (name, value) {
        ("update_metadata", Value::Flag(true)) => "metadata updated".to_string(),
        ("update_metadata", Value::Flag(false)) => "metadata not updated".to_string(),
        ("size", Value::Number(size)) => output::bytes(*size),
        ("stride", Value::Number(size)) => format!("every {}", output::bytes(*size)),
        ("device" | "memory" | "step" | "operation" | "page", value) => value.to_string(),
        ("devices" | "regions" | "measured" | "keys" | "threads", Value::Number(1)) => format!("1 {}", name.trim_end_matches('s')),
        ("devices" | "regions" | "measured" | "keys" | "threads", Value::Number(count)) => format!("{} {name}", grouped(*count)),
        (name, value) => format!("{name} {value}"),
    }
}

/// All measurements of a table in all files. How many calls were timed together is no property of what is measured: of those that differ
/// in nothing else, the one with the most.
pub fn points(inputs: &[Input], table: Table) -> Vec<Point<'_>> {
    let mut points = Vec::new();
    for input in inputs {
        let calls = |measurement: &Measurement| measurement.key.number(MEASURED).unwrap_or(0);
        let beside = |measurement: &Measurement| {
            let mut key = measurement.key.clone();
            key.place.remove(MEASURED);
            key
        };
        let mut most: BTreeMap<Key, u64> = BTreeMap::new();
        for measurement in input.report.table(table) {
            let most = most.entry(beside(measurement)).or_default();
            *most = calls(measurement).max(*most);
        }
        let kept = input.report.table(table).filter(|measurement| most.get(&beside(measurement)) == Some(&calls(measurement)));
        points.extend(kept.map(|measurement| Point { label: &input.label, measurement }));
    }
    points
}

/// Parts of the keys that are not the same for all points, without those in `except`: first those of `first`, then the others by name.
pub fn varying(points: &[Point<'_>], first: &[&str], except: &[&str]) -> Vec<String> {
    let mut names: Vec<String> = first.iter().map(|name| name.to_string()).collect();
    for point in points {
        for name in point.measurement.key.place.keys() {
            if !names.contains(name) {
                names.push(name.clone());
            }
        }
    }
    let varies = |name: &String| points.iter().any(|point| point.part(name) != points[0].part(name));
    names.retain(|name| !except.contains(&name.as_str()) && varies(name));
    names
}

/// What is the same for all points, as words.
pub fn constant(points: &[Point<'_>], except: &[&str]) -> String {
    let Some(first) = points.first() else { return String::new() };
    let same = |name: &&String| points.iter().all(|point| point.part(name) == first.part(name));
    let names = first.measurement.key.place.keys().filter(|name| !except.contains(&name.as_str())).filter(same);
    Vec::from_iter(names.map(|name| first.part(name))).join(", ")
}

/// Points that are alike, under what they have in common as words.
pub type Group<'a> = (String, Vec<Point<'a>>);

/// Puts points together that are alike in these parts, in the order of their coming; each group with those parts as words.
pub fn groups<'a>(points: &[Point<'a>], names: &[String]) -> Vec<Group<'a>> {
    let mut groups: Vec<Group<'a>> = Vec::new();
    for point in points {
        let name = point.parts(names);
        match groups.iter_mut().find(|(other, _)| *other == name) {
            Some((_, members)) => members.push(*point),
            None => groups.push((name, vec![*point])),
        }
    }
    groups
}

/// Names of the series of a chart: ours has always the first ink, others come in the order of their coming.
pub fn order_series(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut series: Vec<String> = Vec::new();
    for name in names {
        if !series.contains(&name) {
            series.push(name);
        }
    }
    series.sort_by_key(|name| !(name == "ours" || name.starts_with("ours,")));
    series
}

/// A stem of a file name out of words.
pub fn file_stem(words: &str) -> String {
    let letter = |letter: char| if letter.is_ascii_alphanumeric() { letter.to_ascii_lowercase() } else { '-' };
    let stem: String = words.chars().map(letter).collect();
    Vec::from_iter(stem.split('-').filter(|part| !part.is_empty())).join("-")
}

/// Digits in groups of three.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A value with its unit, in three digits: times and rates in the unit that suits them.
pub fn value(value: f64, unit: &str) -> String {
    const TIMES: [(f64, &str); 4] = [(1e-9, "ns"), (1e-6, "µs"), (1e-3, "ms"), (1.0, "s")];
    let seconds = match unit {
        "ns" => value * 1e-9,
        "us" => value * 1e-6,
        "ms" => value * 1e-3,
        "s" => value,
        "MB/s" if value >= 999.5 => return format!("{} GB/s", digits(value / 1e3)),
        "ratio" => return times(value),
        _ => return format!("{} {unit}", digits(value)),
    };
    let fits = |(scale, _): &&(f64, &str)| seconds < scale * 999.5;
    let (scale, unit) = TIMES.iter().find(fits).unwrap_or(&TIMES[3]);
    format!("{} {unit}", digits(seconds / scale))
}

/// Three digits that count, without zeros at the end of a fraction.
pub fn digits(value: f64) -> String {
    if value == 0.0 {
        return "0".to_string();
    }
    if value.abs() >= 999.5 {
        return grouped(value.abs().round() as u64);
    }
    let before = value.abs().log10().floor() as i32 + 1;
    let text = format!("{value:.*}", (3 - before).clamp(0, 6) as usize);
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_string() } else { text }
}

/// How many times: in a list, points stand one below the other.
pub fn times(ratio: f64) -> String {
    let digits = match ratio {
        ratio if ratio < 0.0995 => 3,
        ratio if ratio < 9.995 => 2,
        ratio if ratio < 99.95 => 1,
        _ => 0,
    };
    format!("{ratio:.digits$}×")
}

/// Of labels in the middle of these places along a line, in their order: all, or every second, or third …, so that there is space between.
pub fn spaced(labels: Vec<(f64, String)>) -> Vec<(f64, String)> {
    let half = |label: &(f64, String)| text_width(&label.1, SMALL, false) / 2.0;
    let fit = |step: &usize| {
        let shown: Vec<&(f64, String)> = labels.iter().step_by(*step).collect();
        shown.windows(2).all(|pair| pair[0].0 + half(pair[0]) + 6.0 <= pair[1].0 - half(pair[1]))
    };
    let step = (1..=labels.len()).find(fit).unwrap_or(1);
    labels.into_iter().step_by(step).collect()
}

/// Maps values to pixels.
#[derive(Clone, Copy)]
pub struct Axis {
    logarithmic: bool,
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    /// From these values, rounded outwards to 1, 2 or 5 times a power of ten, to pixels set by [`Axis::between`].
    pub fn logarithmic(low: f64, high: f64) -> Axis {
        let step = |value: f64, upwards: bool| {
            let power = 10f64.powf(value.log10().floor());
            let steps = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power);
            let nearly = 1e-9 * value;
            if upwards {
                steps.into_iter().find(|step| *step >= value - nearly)
            } else {
                steps.into_iter().rev().find(|step| *step <= value + nearly)
            }
            .unwrap_or(value)
        };
        let (low, mut high) = (step(low, false), step(high, true));
        if high <= low {
            high = low * 10.0;
        }
        Axis { logarithmic: true, low, high, from: 0.0, to: 1.0 }
    }

    /// Exactly between these values.
    pub fn exact(low: f64, high: f64) -> Axis {
        Axis { logarithmic: true, low, high, from: 0.0, to: 1.0 }
    }

    /// From nothing to a round number above this value.
    pub fn linear(high: f64) -> Axis {
        let step = step_of(high);
        Axis { logarithmic: false, low: 0.0, high: (high / step - 1e-9).ceil() * step, from: 0.0, to: 1.0 }
    }

    /// The same axis between these pixels.
    pub fn between(self, from: f64, to: f64) -> Axis {
        Axis { from, to, ..self }
    }

    /// Where it ends.
    pub fn ends(&self) -> [f64; 2] {
        [self.from, self.to]
    }

    /// Whether a value is between its ends.
    pub fn holds(&self, value: f64) -> bool {
        (self.low * (1.0 - 1e-9)..=self.high * (1.0 + 1e-9)).contains(&value)
    }

    /// Where a value is; what lies outside is at the end.
    pub fn at(&self, value: f64) -> f64 {
        let share = if self.logarithmic {
            (value.max(self.low) / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        self.from + share.clamp(0.0, 1.0) * (self.to - self.from)
    }

    /// Values to write beside the axis.
    pub fn ticks(&self) -> Vec<f64> {
        if !self.logarithmic {
            let step = step_of(self.high);
            return (0..=(self.high / step).round() as u32).map(|index| f64::from(index) * step).collect();
        }
        let decades = (self.high / self.low).log10();
        let factors: &[f64] = if decades > 2.2 { &[1.0] } else { &[1.0, 2.0, 5.0] };
        let exponents = self.low.log10().floor() as i32..=self.high.log10().ceil() as i32;
        let all = exponents.flat_map(|exponent| factors.iter().map(move |factor| factor * 10f64.powi(exponent)));
        all.filter(|tick| (self.low * 0.999..=self.high * 1.001).contains(tick)).collect()
    }
}

/// The distance of about five ticks up to this value.
fn step_of(high: f64) -> f64 {
    let raw = high.max(f64::MIN_POSITIVE) / 5.0;
    let power = 10f64.powf(raw.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * power).find(|step| *step >= raw * 0.999).unwrap_or(raw)
}

/// A text for [`Scene::text`], small and in the ink of text.
pub fn label(x: f64, y: f64, text: impl Into<String>, anchor: Anchor) -> Text {
    Text { x, y, text: text.into(), size: SMALL, anchor, upright: false, bold: false, ink: Ink::Text }
}

/// How a series is shown in the legend.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Sample {
    /// A line with markers.
    Curve,
    /// A bar.
    Bar,
    /// A figure from elsewhere.
    Reference,
}

/// The picture of a figure as it is made: title and legend above, then panels in one or two columns.
pub struct Frame {
    /// What is drawn on.
    pub scene: Scene,
    title: String,
    columns: usize,
    width: f64,
    placed: usize,
    top: f64,
    bottom: f64,
}

/// Where a panel may draw.
#[derive(Clone, Copy)]
pub struct Area {
    /// Its left edge.
    pub left: f64,
    /// Below its title.
    pub top: f64,
    /// Its right edge.
    pub right: f64,
}

impl Frame {
    /// A frame for so many panels with what stands above them.
    pub fn begin(title: &str, lines: &[String], panels: usize, legend: &[(String, usize, Sample)]) -> Frame {
        let columns = panels.clamp(1, 2);
        let width = if columns == 1 { WIDE } else { NARROW * 2.0 };
        let mut scene = Scene::new(width);
        let mut y = MARGIN + TITLE;
        for line in wrap(title, width - 2.0 * MARGIN, TITLE, true) {
            scene.text(Text { size: TITLE, bold: true, ..label(MARGIN, y, line, Anchor::Start) });
            y += TITLE + 4.0;
        }
        for line in lines.iter().flat_map(|lines| lines.lines()).filter(|line| !line.is_empty()) {
            for line in wrap(line, width - 2.0 * MARGIN, SMALL, false) {
                scene.text(Text { ink: Ink::Faint, ..label(MARGIN, y, line, Anchor::Start) });
                y += LINE;
            }
        }
        y += 8.0;
        let mut x = MARGIN;
        for (name, series, sample) in legend {
            let needed = 34.0 + text_width(name, SMALL, false);
            if x > MARGIN && x + needed > width - MARGIN {
                (x, y) = (MARGIN, y + LINE + 3.0);
            }
            let middle = y - 4.0;
            scene.begin_part(PartKind::Legend, name, (x, y - LINE), (needed, LINE + 6.0));
            match sample {
                Sample::Curve => {
                    scene.line(&[(x, middle), (x + 28.0, middle)], Ink::Series(*series), 2.0, dashes(*series));
                    scene.marker((x + 14.0, middle), *series);
                }
                Sample::Reference => scene.reference((x + 18.0, middle)),
                Sample::Bar => scene.rectangle((x + 8.0, middle - 6.0), (x + 28.0, middle + 6.0), Ink::Series(*series)),
            }
            scene.text(label(x + 34.0, y, name, Anchor::Start));
            x += needed + 22.0;
        }
        let top = if legend.is_empty() { y - 8.0 } else { y + 12.0 };
        Frame { scene, title: title.to_string(), columns, width, placed: 0, top, bottom: top }
    }

    /// Room for the next panel, whose title is written.
    pub fn panel(&mut self, title: &str) -> Area {
        let column = self.placed % self.columns;
        if column == 0 {
            self.top = self.bottom;
        }
        self.placed += 1;
        let width = self.width / self.columns as f64;
        let left = column as f64 * width;
        let name = if title.is_empty() { &self.title } else { title };
        self.scene.begin_part(PartKind::Panel, name, (left, self.top), (width, 0.0));
        let mut top = self.top + 8.0;
        if !title.is_empty() {
            for line in wrap(title, width - 2.0 * MARGIN, SMALL + 1.0, true) {
                top += LINE;
                self.scene.text(Text { size: SMALL + 1.0, bold: true, ..label(left + MARGIN, top, line, Anchor::Start) });
            }
        }
        Area { left: left + MARGIN, top: top + 14.0, right: left + width - MARGIN }
    }

    /// That the last panel reaches down to here.
    pub fn reached(&mut self, bottom: f64) {
        self.scene.end_part(bottom + 8.0);
        self.bottom = self.bottom.max(bottom);
    }

    /// The picture.
    pub fn end(mut self) -> Scene {
        self.scene.set_height(self.bottom + MARGIN);
        self.scene
    }
}

/// Breaks a text between words where it would be wider.
pub fn wrap(text: &str, width: f64, size: f64, bold: bool) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("there is always one line");
        let longer = if line.is_empty() { word.to_string() } else { format!("{line} {word}") };
        if line.is_empty() || text_width(&longer, size, bold) <= width {
            *line = longer;
        } else {
            lines.push(word.to_string());
        }
    }
    lines
}
