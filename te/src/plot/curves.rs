//! Curves on two logarithmic axes: cost by the number of regions, latency and throughput by size.

use crate::output;
use crate::report::Table;

use super::figure::{
    Axis, Figure, Frame, LINE, MEASURED, Point, Sample, constant, file_stem, grouped, groups, label, order_series, points, spaced,
    value, varying,
};
use super::figure::{Input, SMALL};
use super::scene::{Anchor, Ink, Text, dashes, text_width};

const HEIGHT: f64 = 270.0;

/// What curves are made of a table.
pub struct Curves {
    /// The table.
    pub table: Table,
    /// The number along the axis of x.
    pub along: &'static str,
    /// Beside that axis.
    pub axis: &'static str,
    /// What the whole figure is about.
    pub title: &'static str,
    /// There is a figure for each value of these.
    pub figure: &'static [&'static str],
    /// In each a panel for each value of these, and a curve for each of what is left.
    pub panel: &'static [&'static str],
    /// Beside the other axis; if empty, the quantity.
    pub values: &'static str,
}

impl Curves {
    /// The figures.
    pub fn draw(&self, inputs: &[Input], machine: &str) -> Vec<Figure> {
        let except = [self.along, MEASURED];
        let all: Vec<Point<'_>> =
            points(inputs, self.table).into_iter().filter(|point| point.number(self.along).is_some()).collect();
        let by: Vec<String> = self.figure.iter().map(|name| name.to_string()).collect();
        groups(&all, &by).into_iter().map(|(name, points)| self.draw_one(&name, &points, &except, machine)).collect()
    }

    fn draw_one(&self, name: &str, points: &[Point<'_>], except: &[&str], machine: &str) -> Figure {
        let by_panel = varying(points, &["quantity", "file"], except);
        let by_panel: Vec<String> =
            by_panel.into_iter().filter(|name| name == "file" || self.panel.contains(&name.as_str())).collect();
        let skip: Vec<&str> = except.iter().copied().chain(by_panel.iter().map(String::as_str)).collect();
        let mut by_series = vec!["subject".to_string()];
        by_series.extend(varying(points, &[], &skip));
        let series = order_series(groups(points, &by_series).into_iter().map(|(name, _)| name));
        let title = if name.is_empty() { self.title.to_string() } else { format!("{}: {name}", self.title) };
        let legend: Vec<_> = series.iter().enumerate().map(|(index, name)| (name.clone(), index, Sample::Curve)).collect();
        let panels = groups(points, &by_panel);
        let constant = constant(points, &[except, self.figure].concat());
        let lines = [machine.to_string(), constant.clone()];
        let mut frame = Frame::begin(&title, &lines, panels.len(), &legend);

        let spreads = || points.iter().map(|point| point.measurement.spread());
        let low = spreads().map(|spread| spread.minimum).filter(|value| *value > 0.0).fold(f64::INFINITY, f64::min);
        let high = spreads().map(|spread| spread.maximum).fold(0.0, f64::max);
        let vertical = Axis::logarithmic(low.min(high.max(1e-9)), high.max(1e-9));
        let at = |point: &Point<'_>| point.number(self.along).unwrap_or(1).max(1);
        let mut places: Vec<u64> = points.iter().map(at).collect();
        places.sort_unstable();
        places.dedup();
        let (first, last) = (places[0] as f64, places[places.len() - 1] as f64);
        let horizontal = if first == last { Axis::exact(first / 2.0, last * 2.0) } else { Axis::exact(first, last) };
        let unit = &points[0].measurement.unit;
        let values = if self.values.is_empty() { points[0].part("quantity") } else { self.values.to_string() };

        for (panel, members) in &panels {
            let area = frame.panel(panel);
            let ticks: Vec<(f64, String)> = vertical.ticks().into_iter().map(|tick| (tick, value(tick, unit))).collect();
            let widest = ticks.iter().map(|(_, text)| text_width(text, SMALL, false)).fold(0.0, f64::max);
            let (left, right) = (area.left + LINE + widest + 8.0, area.right - 12.0);
            let (top, bottom) = (area.top, area.top + HEIGHT);
            let (x_axis, y_axis) = (horizontal.between(left + 10.0, right - 10.0), vertical.between(bottom, top));
            let scene = &mut frame.scene;
            for (tick, text) in &ticks {
                let y = y_axis.at(*tick);
                scene.line(&[(left, y), (right, y)], Ink::Grid, 1.0, &[]);
                scene.text(label(left - 6.0, y + 4.0, text.as_str(), Anchor::End));
            }
            let name = |place: &u64| if self.along == "size" { output::bytes(*place) } else { grouped(*place) };
            let marks: Vec<(f64, String)> = places.iter().map(|place| (x_axis.at(*place as f64), name(place))).collect();
            for (x, _) in &marks {
                scene.line(&[(*x, bottom), (*x, bottom + 4.0)], Ink::Faint, 1.0, &[]);
            }
            for (x, text) in spaced(marks) {
                scene.text(label(x, bottom + LINE, text, Anchor::Middle));
            }
            scene.line(&[(left, top), (left, bottom), (right, bottom)], Ink::Faint, 1.0, &[]);
            scene.text(label((left + right) / 2.0, bottom + 2.0 * LINE + 2.0, self.axis, Anchor::Middle));
            scene.text(Text { upright: true, ..label(area.left + 10.0, (top + bottom) / 2.0, values.as_str(), Anchor::Middle) });

            // Ours is drawn last and lies above the others.
            for (number, name) in series.iter().enumerate().rev() {
                let mut members: Vec<Point<'_>> = groups(members, &by_series)
                    .into_iter()
                    .filter(|(other, _)| other == name)
                    .flat_map(|(_, points)| points)
                    .collect();
                members.sort_by_key(at);
                let ink = Ink::Series(number);
                // Side by side, for where they are equal one would hide the other.
                let aside = (number as f64 - (series.len() - 1) as f64 / 2.0) * (14.0 / series.len() as f64).min(4.0);
                let place = |point: &Point<'_>| (x_axis.at(at(point) as f64) + aside, y_axis.at(point.measurement.spread().median));
                scene.line(&Vec::from_iter(members.iter().map(place)), ink, 2.0, dashes(number));
                for point in &members {
                    let spread = point.measurement.spread();
                    let (x, y) = place(point);
                    let (high, low) = (y_axis.at(spread.maximum), y_axis.at(spread.minimum));
                    scene.line(&[(x, high), (x, low)], ink, 1.2, &[]);
                    for end in [high, low] {
                        scene.line(&[(x - 4.0, end), (x + 4.0, end)], ink, 1.2, &[]);
                    }
                    scene.marker((x, y), number);
                    scene.hint(format!(
                        "{name}, {} {}: {} ({} to {})",
                        grouped(at(point)),
                        self.along,
                        value(spread.median, unit),
                        value(spread.minimum, unit),
                        value(spread.maximum, unit)
                    ));
                }
            }
            frame.reached(bottom + 3.0 * LINE);
        }
        let parts: Vec<String> = by_panel.iter().chain(&by_series).cloned().collect();
        let columns = parts.iter().cloned().chain([self.along, "median", "smallest", "largest", "rounds"].map(str::to_string));
        let row = |point: &Point<'_>| {
            let spread = point.measurement.spread();
            let mut row: Vec<String> = parts.iter().map(|part| point.part(part)).collect();
            row.push(if self.along == "size" { output::bytes(at(point)) } else { grouped(at(point)) });
            row.extend([spread.median, spread.minimum, spread.maximum].map(|number| value(number, unit)));
            row.push(point.measurement.samples.len().to_string());
            row
        };
        // As the panels and the legend are.
        let mut sorted = points.to_vec();
        let place_of = |point: &Point<'_>| {
            let (panel, name) = (point.parts(&by_panel), point.parts(&by_series));
            (panels.iter().position(|(other, _)| *other == panel), series.iter().position(|other| *other == name), at(point))
        };
        sorted.sort_by_key(place_of);
        Figure {
            name: file_stem(&format!("{} {name}", self.title)),
            title,
            constant,
            note: format!(
                "Medians over the rounds; bars reach from the smallest to the largest. Both axes are logarithmic: what is level does not \
                 grow, and what rises by a decade in each decade grows in proportion. Subjects are drawn a little aside of their place, \
                 so that none hides another. {}",
                if panels.len() > 1 { "All panels have the same axes." } else { "" }
            ),
            scene: frame.end(),
            columns: columns.collect(),
            rows: sorted.iter().map(row).collect(),
        }
    }
}
