//! Bars: what a registration consists of, one part upon the other; and how many times faster parallel registration is.

use crate::bench::REPORTED_PARALLEL;
use crate::bench::statistics::Spread;
use crate::report::Table;

use super::figure::{
    Area, Axis, Figure, Frame, Group, Input, LINE, MEASURED, Point, SMALL, Sample, constant, digits, file_stem, groups, label,
    points, spaced, times, value, varying, wrap,
};
use super::scene::{Anchor, Ink, Scene, Text, text_width};

const THICKNESS: f64 = 17.0;
const GAP: f64 = 11.0;

/// Draws the steps of registering, one bar for each place.
pub fn draw_steps(inputs: &[Input], machine: &str) -> Vec<Figure> {
    let all = points(inputs, Table::Steps);
    if all.is_empty() {
        return Vec::new();
    }
    const TITLE: &str = "What registering a region consists of";
    let except = ["step", MEASURED];
    let by_panel = among(&varying(&all, &["file"], &except), &["file", "device", "update_metadata", "size", "stride"]);
    let skip: Vec<&str> = except.iter().copied().chain(by_panel.iter().map(String::as_str)).collect();
    let by_row = varying(&all, &[], &skip);
    let mut steps: Vec<String> = Vec::new();
    for point in &all {
        let step = point.part("step");
        if !steps.contains(&step) {
            steps.push(step);
        }
    }
    // Publishing comes last, after whatever pins; the others are in their order already.
    steps.sort_by_key(|step| (step == "publishing", step.starts_with("pinning")));
    let name = |index: usize| format!("{} {}", index + 1, steps[index]);
    let legend: Vec<_> = (0..steps.len()).map(|index| (name(index), index, Sample::Bar)).collect();
    let panels = groups(&all, &by_panel);
    let rows_of = |members: &[Point<'_>]| -> Vec<(String, Spread)> {
        groups(members, &by_row).into_iter().map(|(name, parts)| (name, total(&parts))).collect()
    };
    // Pinning and telling a server differ too much from book-keeping for one axis; the same place has the same in each file.
    let by_place: Vec<String> = by_panel.iter().filter(|part| *part != "file").cloned().collect();
    // One wild round is no reason to draw all bars small.
    let end = |total: &Spread| total.maximum.min(2.0 * total.median);
    let high = |members: &[Point<'_>]| rows_of(members).iter().map(|(_, total)| end(total)).fold(0.0, f64::max);
    let axis_of = |members: &[Point<'_>]| {
        let place = groups(members, &by_place).into_iter().next().map(|(name, _)| name);
        let same = panels.iter().filter(|(_, others)| groups(others, &by_place).first().map(|(name, _)| name) == place.as_ref());
        Axis::linear(same.map(|(_, others)| high(others)).fold(0.0, f64::max))
    };
    let unit = &all[0].measurement.unit;
    let labels = panels.iter().flat_map(|(_, members)| rows_of(members)).map(|(name, _)| name);
    let room = label_room(labels, panels.len());
    let constant = constant(&all, &except);
    let mut frame = Frame::begin(TITLE, &[machine.to_string(), constant.clone()], panels.len(), &legend);
    for (panel, members) in &panels {
        let area = frame.panel(panel);
        let rows = groups(members, &by_row);
        let right_room = 66.0;
        let axis = axis_of(members).between(area.left + room, area.right - right_room);
        let bottom = area.top + rows.len() as f64 * (THICKNESS + GAP) + GAP;
        draw_scale(&mut frame.scene, axis, area.top, bottom, |tick| value(tick, unit), "median time of a call");
        for (row, (name, parts)) in rows.iter().enumerate() {
            let top = area.top + GAP + row as f64 * (THICKNESS + GAP);
            let middle = top + THICKNESS / 2.0;
            row_label(&mut frame.scene, area, room, middle, name);
            let spread = total(parts);
            let line = axis.at(spread.minimum) - 6.0..axis.at(spread.maximum) + 6.0;
            let mut sum = 0.0;
            for (index, step) in steps.iter().enumerate() {
                let Some(point) = parts.iter().find(|point| point.part("step") == *step) else { continue };
                let median = point.measurement.spread().median;
                let (left, right) = (axis.at(sum), axis.at(sum + median));
                sum += median;
                // What is between two steps is paper, so that they are told apart without colours.
                let end = if right - left > 2.0 { right - 1.0 } else { right };
                frame.scene.rectangle((left, top), (end, top + THICKNESS), Ink::Series(index));
                frame.scene.hint(format!("{name}, {step}: {}", value(median, unit)));
                let number = (index + 1).to_string();
                let width = text_width(&number, SMALL, true) + 4.0;
                let is_free = left + width < line.start || line.end < left;
                if end - left > width && is_free {
                    let text = label(left + 3.0, middle + 4.0, number, Anchor::Start);
                    frame.scene.text(Text { bold: true, ink: Ink::Paper, ..text });
                }
            }
            whisker(&mut frame.scene, axis, spread, middle);
            let end = axis.at(spread.maximum).max(axis.at(sum));
            frame.scene.text(label(end + 7.0, middle + 4.0, value(sum, unit), Anchor::Start));
        }
        frame.reached(bottom + 2.0 * LINE + 8.0);
    }
    let parts: Vec<String> = by_panel.iter().chain(&by_row).cloned().chain(["step".to_string()]).collect();
    let columns = parts.iter().cloned().chain(["median", "smallest", "largest", "rounds"].map(str::to_string)).collect();
    let row = |point: &Point<'_>| {
        let spread = point.measurement.spread();
        let mut row: Vec<String> = parts.iter().map(|part| point.part(part)).collect();
        row.extend([spread.median, spread.minimum, spread.maximum].map(|number| value(number, unit)));
        row.push(point.measurement.samples.len().to_string());
        row
    };
    let note = "Medians of the steps, one after the other; the line at the end reaches from the smallest to the largest sum of a round, \
                with an arrow where it goes on beyond the axis, and the figure beside it is the sum of the medians. Numbers in the bars \
                are those of the legend, where there is room. Axes differ from place to place.";
    vec![Figure {
        name: "registration-steps".to_string(),
        title: TITLE.to_string(),
        constant,
        note: note.to_string(),
        scene: frame.end(),
        columns,
        rows: all.iter().map(row).collect(),
    }]
}

/// What the steps of one place take together: in each round, if every step was measured in each.
fn total(parts: &[Point<'_>]) -> Spread {
    let rounds = parts[0].measurement.samples.len();
    if parts.iter().all(|part| part.measurement.samples.len() == rounds) {
        let round = |index: usize| parts.iter().map(|part| part.measurement.samples[index]).sum();
        return Spread::of((0..rounds).map(round).collect());
    }
    let sum = parts.iter().map(|part| part.measurement.spread().median).sum();
    Spread { median: sum, minimum: sum, maximum: sum }
}

/// Draws how many times faster than one device after the other registering is.
pub fn draw_parallel(inputs: &[Input], machine: &str) -> Vec<Figure> {
    let all = points(inputs, Table::Parallel);
    // A figure for each number of devices, for all of them together are too tall to be read.
    let figures = groups(&all, &["devices".to_string()]);
    figures.iter().filter_map(|(devices, points)| draw_parallel_with(devices, points, machine)).collect()
}

fn draw_parallel_with(devices: &str, all: &[Point<'_>], machine: &str) -> Option<Figure> {
    let title = format!("Parallel registration against one device after the other: {devices}");
    const SEQUENTIAL: &str = "sequential";
    const SUBJECTS: [&str; 2] = ["ours", "thread per device"];
    let by_panel = varying(all, &["file", "quantity"], &[]);
    let by_panel = among(&by_panel, &["file", "quantity"]);
    let skip: Vec<&str> = by_panel.iter().map(String::as_str).collect();
    let by_row = varying(all, &["memory", "page", "devices", "size"], &skip);
    // Without the other one there is nothing to set a time beside.
    let speed_up = |members: &[Point<'_>], subject: &str| -> Option<Spread> {
        let of = |subject: &str| members.iter().find(|point| point.part("subject") == subject);
        Some(ratio(&of(SEQUENTIAL)?.measurement.samples, &of(subject)?.measurement.samples))
    };
    let panels: Vec<(String, Vec<Group<'_>>)> = groups(all, &by_panel)
        .into_iter()
        .map(|(name, members)| {
            let mut rows = groups(&members, &by_row);
            rows.retain(|(_, members)| SUBJECTS.iter().any(|subject| speed_up(members, subject).is_some()));
            (name, rows)
        })
        .filter(|(_, rows)| !rows.is_empty())
        .collect();
    if panels.is_empty() {
        return None;
    }
    let reported = |members: &[Point<'_>]| {
        let of = |(memory, quantity, _): &&(&str, &str, f64)| {
            members[0].part("quantity") == *quantity && members[0].part("memory") == *memory
        };
        REPORTED_PARALLEL.iter().find(of).map(|(_, _, times)| *times)
    };
    let mut ends = vec![0.5, 2.0];
    for (_, members) in panels.iter().flat_map(|(_, rows)| rows) {
        ends.extend(reported(members));
        ends.extend(SUBJECTS.iter().filter_map(|subject| speed_up(members, subject)).map(|spread| spread.median));
    }
    // Wild rounds may reach beyond, and are no reason to draw all bars small.
    let (low, high) = (ends.iter().copied().fold(f64::INFINITY, f64::min), ends.iter().copied().fold(0.0, f64::max));
    let axis = Axis::logarithmic(low / 1.2, high * 1.2);
    let mut legend: Vec<_> = SUBJECTS.iter().enumerate().map(|(index, name)| (name.to_string(), index, Sample::Bar)).collect();
    if panels.iter().flat_map(|(_, rows)| rows).any(|(_, members)| reported(members).is_some()) {
        legend.push(("thread per device, as reported upstream (500 GB, several NICs)".to_string(), 0, Sample::Reference));
    }
    let room = label_room(panels.iter().flat_map(|(_, rows)| rows).map(|(name, _)| name.clone()), panels.len());
    let constant = constant(all, &["devices"]);
    let mut frame = Frame::begin(&title, &[machine.to_string(), constant.clone()], panels.len(), &legend);
    let mut rows_of_table = Vec::new();
    let parts: Vec<String> = by_panel.iter().chain(&by_row).cloned().collect();
    for (panel, rows) in &panels {
        let area = frame.panel(panel);
        let axis = axis.between(area.left + room, area.right - 64.0);
        let height = 2.0 * THICKNESS + 2.0 + GAP;
        let bottom = area.top + rows.len() as f64 * height + GAP;
        draw_scale(
            &mut frame.scene,
            axis,
            area.top,
            bottom,
            |tick| format!("{}×", digits(tick)),
            "times as fast as one after the other",
        );
        let one = axis.at(1.0);
        frame.scene.line(&[(one, area.top), (one, bottom)], Ink::Text, 1.5, &[]);
        for (row, (name, members)) in rows.iter().enumerate() {
            let top = area.top + GAP + row as f64 * height;
            row_label(&mut frame.scene, area, room, top + THICKNESS + 1.0, name);
            for (index, subject) in SUBJECTS.iter().enumerate() {
                let Some(spread) = speed_up(members, subject) else { continue };
                let top = top + index as f64 * (THICKNESS + 2.0);
                let middle = top + THICKNESS / 2.0;
                let end = axis.at(spread.median);
                frame.scene.rectangle(
                    (one.min(end), top),
                    (one.max(end).max(one.min(end) + 1.0), top + THICKNESS),
                    Ink::Series(index),
                );
                let text = times(spread.median);
                frame.scene.hint(format!("{name}, {subject}: {text} ({} to {})", times(spread.minimum), times(spread.maximum)));
                whisker(&mut frame.scene, axis, spread, middle);
                if let (1, Some(times)) = (index, reported(members)) {
                    frame.scene.reference((axis.at(times), middle));
                }
                frame.scene.text(label(area.right, middle + 4.0, text.as_str(), Anchor::End));
                let mut row: Vec<String> = parts.iter().map(|part| members[0].part(part)).collect();
                let rounds = members
                    .iter()
                    .find(|point| point.part("subject") == *subject)
                    .map_or(0, |point| point.measurement.samples.len());
                row.extend([subject.to_string(), text, times(spread.minimum), times(spread.maximum), rounds.to_string()]);
                let of =
                    |subject: &str| members.iter().find(|point| point.part("subject") == subject).map(|point| point.measurement);
                row.extend(
                    [SEQUENTIAL, subject]
                        .map(|subject| of(subject).map_or(String::new(), |of| value(of.spread().median, &of.unit))),
                );
                row.push(reported(members).filter(|_| index == 1).map_or(String::new(), times));
                rows_of_table.push(row);
            }
        }
        frame.reached(bottom + 2.0 * LINE + 8.0);
    }
    let more = ["subject", "times as fast", "least", "most", "rounds", "sequential", "its own time", "reported"];
    Some(Figure {
        name: file_stem(&format!("parallel registration {devices}")),
        title,
        constant,
        note: "Time of one device after the other divided by the time of the subject, on a logarithmic axis: bars to the right of the \
               line at 1× are faster, to the left slower. Medians of the ratios of rounds; thin lines from the least to the most, with an \
               arrow where they go on beyond the axis. Diamonds \
               are what upstream reported for its thread for each device on another machine with more memory: they show a direction, \
               and are no target."
            .to_string(),
        scene: frame.end(),
        columns: parts.iter().cloned().chain(more.map(str::to_string)).collect(),
        rows: rows_of_table,
    })
}

/// The ratio in each round, or where rounds are not pairs that of the medians with the widest there can be.
pub fn ratio(base: &[f64], other: &[f64]) -> Spread {
    if base.len() == other.len() {
        return Spread::of(base.iter().zip(other).map(|(base, other)| base / other).collect());
    }
    let (base, other) = (Spread::of(base.to_vec()), Spread::of(other.to_vec()));
    Spread { median: base.median / other.median, minimum: base.minimum / other.maximum, maximum: base.maximum / other.minimum }
}

fn among(names: &[String], of: &[&str]) -> Vec<String> {
    names.iter().filter(|name| of.contains(&name.as_str())).cloned().collect()
}

/// Room for what stands before bars: no more than a third of a panel, for longer ones are broken.
fn label_room(names: impl Iterator<Item = String>, panels: usize) -> f64 {
    let most = if panels > 1 { 170.0 } else { 250.0 };
    names.map(|name| text_width(&name, SMALL, false) + 10.0).fold(20.0, f64::max).min(most)
}

fn row_label(scene: &mut Scene, area: Area, room: f64, middle: f64, name: &str) {
    let lines = wrap(name, room - 10.0, SMALL, false);
    let first = middle + 4.0 - (lines.len() - 1) as f64 * 7.0;
    for (index, line) in lines.into_iter().enumerate() {
        scene.text(label(area.left + room - 8.0, first + index as f64 * 14.0, line, Anchor::End));
    }
}

/// Lines to read values by, what they are, and what of.
fn draw_scale(scene: &mut Scene, axis: Axis, top: f64, bottom: f64, name: impl Fn(f64) -> String, title: &str) {
    let marks: Vec<(f64, String)> = axis.ticks().into_iter().map(|tick| (axis.at(tick), name(tick))).collect();
    for (x, _) in &marks {
        scene.line(&[(*x, top), (*x, bottom)], Ink::Grid, 1.0, &[]);
    }
    for (x, text) in spaced(marks) {
        scene.text(label(x, bottom + LINE - 2.0, text, Anchor::Middle));
    }
    let ends = axis.ends();
    scene.line(&[(ends[0], bottom), (ends[1], bottom)], Ink::Faint, 1.0, &[]);
    scene.text(label((ends[0] + ends[1]) / 2.0, bottom + 2.0 * LINE, title, Anchor::Middle));
}

/// From the smallest to the largest, with an arrow where the axis ends before.
fn whisker(scene: &mut Scene, axis: Axis, spread: Spread, y: f64) {
    // One round has no spread.
    if spread.minimum == spread.maximum {
        return;
    }
    let [from, to] = [spread.minimum, spread.maximum].map(|end| axis.at(end));
    // A rim of paper keeps it visible on a bar of any colour.
    for (ink, width) in [(Ink::Paper, 3.6), (Ink::Text, 1.4)] {
        scene.line(&[(from, y), (to, y)], ink, width, &[]);
        for (value, end, inwards) in [(spread.minimum, from, 5.0), (spread.maximum, to, -5.0)] {
            let back = if axis.holds(value) { end } else { end + inwards };
            scene.line(&[(back, y - 4.5), (end, y), (back, y + 4.5)], ink, width, &[]);
        }
    }
}
