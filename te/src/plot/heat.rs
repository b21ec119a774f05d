//! A map of the pool's speed-up: a row for each size of a key, a column for each size of a put.

use crate::bench::reported_put;
use crate::bench::statistics::Spread;
use crate::output;
use crate::report::Table;

use super::bars::ratio;
use super::figure::{Figure, Frame, Input, LINE, Point, SMALL, constant, groups, label, points, times, value, varying};
use super::scene::{Anchor, Ink, STEPS, Text, text_width};

const HEIGHT: f64 = 58.0;
/// The ratio at which colours end; beyond, they stay.
const FULL: f64 = 4.0;

/// A put of so many keys of this size, both ways.
struct Cell<'a> {
    size: u64,
    keys: u64,
    direct: Point<'a>,
    pool: Point<'a>,
}

impl Cell<'_> {
    fn total(&self) -> u64 {
        self.size * self.keys
    }

    fn speed_up(&self) -> Spread {
        ratio(&self.direct.measurement.samples, &self.pool.measurement.samples)
    }

    fn saved(&self) -> f64 {
        self.direct.measurement.spread().median - self.pool.measurement.spread().median
    }

    /// What is in its field: text, size, and whether it is bold.
    fn lines(&self) -> [(String, f64, bool); 3] {
        let (spread, saved) = (self.speed_up(), self.saved());
        let word = if saved < 0.0 { "lost" } else { "saved" };
        [
            (times(spread.median), 13.0, true),
            (format!("{} to {}", times(spread.minimum), times(spread.maximum)), 11.0, false),
            (format!("{} {word}", value(saved.abs(), &self.pool.measurement.unit)), 11.0, false),
        ]
    }

    /// What a report has of puts of 16 times the size, with 1 and 8 NICs.
    fn reported(&self) -> Option<String> {
        let of = |place| reported_put(self.size, self.keys, place).map(|(speed_up, _)| format!("{speed_up:.2}×"));
        Some(format!("{} | {}", of(0)?, of(1)?))
    }
}

/// Draws the map.
pub fn draw_pool(inputs: &[Input], machine: &str) -> Vec<Figure> {
    const TITLE: &str = "Puts through a pool against a registration for each";
    let puts: Vec<Point<'_>> = points(inputs, Table::Pool).into_iter().filter(|point| point.part("quantity") == "put").collect();
    let except = ["size", "keys"];
    let by_panel = varying(&puts, &["file"], &except);
    let panels: Vec<(String, Vec<Cell<'_>>)> = groups(&puts, &by_panel)
        .into_iter()
        .map(|(name, members)| (name, cells(&members)))
        .filter(|(_, cells)| !cells.is_empty())
        .collect();
    if panels.is_empty() {
        return Vec::new();
    }
    let constant = constant(&puts, &except);
    let mut frame = Frame::begin(TITLE, &[machine.to_string(), constant.clone()], panels.len(), &[]);
    let mut rows = Vec::new();
    for (panel, cells) in &panels {
        let area = frame.panel(panel);
        let distinct = |of: &dyn Fn(&Cell<'_>) -> u64| {
            let mut values: Vec<u64> = cells.iter().map(of).collect();
            values.sort_unstable();
            values.dedup();
            values
        };
        let (sizes, totals) = (distinct(&|cell| cell.size), distinct(&|cell| cell.total()));
        let widest = sizes.iter().map(|size| text_width(&output::bytes(*size), SMALL, false)).fold(0.0, f64::max);
        let left = area.left + LINE + widest + 14.0;
        let width = ((area.right - left) / totals.len() as f64).min(210.0);
        let (top, right) = (area.top, left + width * totals.len() as f64);
        let bottom = top + HEIGHT * sizes.len() as f64;
        for (row, size) in sizes.iter().enumerate() {
            let middle = top + (row as f64 + 0.5) * HEIGHT;
            frame.scene.text(label(left - 8.0, middle + 4.0, output::bytes(*size), Anchor::End));
        }
        for (column, total) in totals.iter().enumerate() {
            let middle = left + (column as f64 + 0.5) * width;
            frame.scene.text(label(middle, bottom + LINE, output::bytes(*total), Anchor::Middle));
        }
        frame.scene.text(Text { upright: true, ..label(area.left + 10.0, (top + bottom) / 2.0, "size of a key", Anchor::Middle) });
        frame.scene.text(label(
            (left + right) / 2.0,
            bottom + 2.0 * LINE + 4.0,
            "bytes of a put, all keys together",
            Anchor::Middle,
        ));
        // What does not fit into each field is in none.
        let fits: [bool; 3] = std::array::from_fn(|line| {
            cells.iter().all(|cell| {
                let (text, size, bold) = &cell.lines()[line];
                text_width(text, *size, *bold) < width - 4.0
            })
        });
        for cell in cells {
            let index = |values: &[u64], value: u64| values.iter().position(|other| *other == value).unwrap_or(0) as f64;
            let (x, y) = (left + width * index(&totals, cell.total()), top + HEIGHT * index(&sizes, cell.size));
            let spread = cell.speed_up();
            let (colour, ink) = colour(spread.median);
            frame.scene.rectangle((x + 1.0, y + 1.0), (x + width - 1.0, y + HEIGHT - 1.0), colour);
            frame.scene.hint(format!(
                "{} keys of {}: {} ({} to {})",
                cell.keys,
                output::bytes(cell.size),
                times(spread.median),
                times(spread.minimum),
                times(spread.maximum)
            ));
            let unit = &cell.pool.measurement.unit;
            let lines: Vec<_> = cell.lines().into_iter().zip(fits).filter_map(|(line, fits)| fits.then_some(line)).collect();
            let first = y + HEIGHT / 2.0 + 5.0 - (lines.len() - 1) as f64 * 8.0;
            for (line, (text, size, bold)) in lines.into_iter().enumerate() {
                let text = label(x + width / 2.0, first + line as f64 * 16.0, text, Anchor::Middle);
                frame.scene.text(Text { size, bold, ink, ..text });
            }
            let mut row: Vec<String> = by_panel.iter().map(|part| cell.pool.part(part)).collect();
            row.extend([output::bytes(cell.size), cell.keys.to_string(), output::bytes(cell.total())]);
            row.extend([spread.median, spread.minimum, spread.maximum].map(times));
            row.extend([cell.direct, cell.pool].map(|point| value(point.measurement.spread().median, unit)));
            row.push(cell.pool.measurement.samples.len().to_string());
            row.push(cell.reported().unwrap_or_default());
            rows.push(row);
        }
        draw_colours(&mut frame, left, bottom + 3.0 * LINE);
        frame.reached(bottom + 4.0 * LINE + 22.0);
    }
    let columns = ["size of a key", "keys", "all keys", "times as fast", "least", "most", "registered each", "pool", "rounds"];
    let reported = "reported of 16 times the size, 1 NIC | 8 NICs";
    vec![Figure {
        name: "pool".to_string(),
        title: TITLE.to_string(),
        constant,
        note: "In each field how many times faster a put through the pool is than one that registers its memory (median of the ratios of \
               rounds), the least and the most, and the time that it saves, as far as there is room. Blue is faster, orange slower; grey makes no difference."
            .to_string(),
        scene: frame.end(),
        columns: by_panel.iter().cloned().chain(columns.map(str::to_string)).chain([reported.to_string()]).collect(),
        rows,
    }]
}

fn cells<'a>(members: &[Point<'a>]) -> Vec<Cell<'a>> {
    let by = ["size".to_string(), "keys".to_string()];
    let cell = |(_, both): (String, Vec<Point<'a>>)| {
        let of = |subject: &str| both.iter().find(|point| point.part("subject") == subject).copied();
        let (direct, pool) = (of("register each time")?, of("pool")?);
        Some(Cell { size: pool.number("size")?, keys: pool.number("keys")?, direct, pool })
    };
    groups(members, &by).into_iter().filter_map(cell).collect()
}

/// From grey at 1 to blue or orange at [`FULL`] or one through it, and an ink that can be read on it.
fn colour(times: f64) -> (Ink, Ink) {
    const MIDDLE: f64 = (STEPS / 2) as f64;
    let away = (times.ln() / FULL.ln() * MIDDLE).round().clamp(-MIDDLE, MIDDLE);
    (Ink::Scale((MIDDLE + away) as usize), if away.abs() < 3.0 { Ink::Text } else { Ink::Paper })
}

/// What the colours mean.
fn draw_colours(frame: &mut Frame, left: f64, top: f64) {
    const WIDTH: f64 = 34.0;
    for step in 0..STEPS {
        let ratio = FULL.powf(step as f64 / (STEPS / 2) as f64 - 1.0);
        let x = left + step as f64 * WIDTH;
        frame.scene.rectangle((x, top), (x + WIDTH, top + 12.0), colour(ratio).0);
        if step.is_multiple_of(2) {
            frame.scene.text(label(x + WIDTH / 2.0, top + 12.0 + LINE - 2.0, times(ratio), Anchor::Middle));
        }
    }
    frame.scene.text(label(left + (STEPS as f64 + 0.5) * WIDTH, top + 10.0, "times as fast", Anchor::Start));
}
