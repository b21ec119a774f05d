//! `te plot`: draws files of measurements: a page that needs nothing else, and every chart as SVG and PNG.
//!
//! A chart is a [`figure::Figure`]: a picture, how to read it, and its numbers. Charts of which the files have no measurements are left
//! out, and that is said. Several files stand side by side, in panels with the same axes.

mod bars;
mod curves;
mod figure;
mod heat;
mod scene;

use std::error::Error;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use transfer_engine::telemetry::log::civil_date;

use crate::bench::statistics::Spread;
use crate::output;
use crate::report::{Report, Table};

use curves::Curves;
use figure::{Figure, Input};
use scene::{FAMILY, PartKind, escape};

/// What to draw.
#[derive(clap::Args)]
pub struct Arguments {
    /// Files that `te bench sweep` has written.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Directory for report.html and the charts; without it, that of the first file.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Runs `te plot`.
pub fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let beside = arguments.files[0].parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let written = draw(&arguments.files, arguments.out.as_deref().unwrap_or(beside))?;
    let lines = written.iter().fold(String::new(), |lines, path| lines + &format!("{}\n", path.display()));
    Ok(output::print(&lines)?)
}

const CURVES: [Curves; 3] = [
    Curves {
        table: Table::Index,
        along: "regions",
        axis: "regions that are there",
        title: "Finding and keeping regions",
        figure: &[],
        panel: &["quantity"],
        values: "time of an operation",
    },
    Curves {
        table: Table::Register,
        along: "regions",
        axis: "regions that are registered already",
        title: "Registering and unregistering, device",
        figure: &["device"],
        panel: &["quantity", "update_metadata", "size", "stride"],
        values: "time of a call",
    },
    Curves {
        table: Table::Transfer,
        along: "size",
        axis: "size of a request",
        title: "Transfers",
        figure: &["quantity"],
        panel: &["operation", "threads", "batch"],
        values: "",
    },
];

/// Draws the files into a directory, which is made if need be: the paths of what was written, the page first. What is left out is said
/// on standard error.
pub fn draw(files: &[PathBuf], out: &Path) -> Result<Vec<PathBuf>, Box<dyn Error>> {
    let read = |path: &PathBuf| -> Result<Input, Box<dyn Error>> {
        let label = if files.len() > 1 { path.display().to_string() } else { String::new() };
        Ok(Input { label, report: Report::read(path)? })
    };
    let inputs = files.iter().map(read).collect::<Result<Vec<Input>, _>>()?;
    let (figures, missing) = figures(&inputs);
    fs::create_dir_all(out).map_err(|error| format!("{}: {error}", out.display()))?;
    let mut written = vec![out.join("report.html")];
    let write = |path: &Path, bytes: &[u8]| fs::write(path, bytes).map_err(|error| format!("{}: {error}", path.display()));
    write(&written[0], page(&inputs, &figures, &missing).as_bytes())?;
    for figure in &figures {
        let path = |extension: &str| out.join(format!("{}.{extension}", figure.name));
        write(&path("svg"), figure.scene.svg(&figure.title, &figure.note, &figure.name).as_bytes())?;
        write(&path("png"), &figure.scene.png(false)?)?;
        written.extend([path("svg"), path("png")]);
    }
    for missing in missing {
        eprintln!("te plot: left out, for there are no measurements: {missing}");
    }
    Ok(written)
}

/// All charts, and names of those that cannot be drawn.
fn figures(inputs: &[Input]) -> (Vec<Figure>, Vec<&'static str>) {
    let machine = &machines(inputs);
    let [index, register, transfer] = CURVES.each_ref().map(|curves| curves.draw(inputs, machine));
    let kinds = [
        ("finding and keeping regions, by their number", index),
        ("registering and unregistering, by the number of regions", register),
        ("the steps of registering", bars::draw_steps(inputs, machine)),
        ("parallel registration", bars::draw_parallel(inputs, machine)),
        ("puts through a pool", heat::draw_pool(inputs, machine)),
        ("latency and throughput of transfers", transfer),
    ];
    let missing = kinds.iter().filter(|(_, figures)| figures.is_empty()).map(|(name, _)| *name).collect();
    (kinds.into_iter().flat_map(|(_, figures)| figures).collect(), missing)
}

/// A line for each machine, and what spoils its figures.
fn machines(inputs: &[Input]) -> String {
    let mut lines: Vec<String> = Vec::new();
    for input in inputs {
        let machine = input.report.machine.to_string();
        let line = if input.label.is_empty() { machine } else { format!("{}: {machine}", input.label) };
        let partial = if input.report.complete { "" } else { "The run was interrupted: some rounds are missing.\n" };
        lines.push(line + partial);
    }
    lines.concat()
}

const STYLE: &str = "\
*{box-sizing:border-box}
body{margin:0 auto;max-width:1112px;padding:1.5rem 1rem;background:var(--paper);color:var(--text);font-size:16px;line-height:1.5}
h1{font-size:1.6rem;line-height:1.25}h2{font-size:1.25rem;line-height:1.3;margin:3rem 0 .5rem}
a{color:var(--s0)}
nav ul{padding-left:1.2rem;columns:25rem;column-gap:2.5rem}
figure{margin:0}figure svg{max-width:100%;height:auto}figcaption{max-width:48rem;color:var(--faint);font-size:.9rem}
.constant{margin:0;color:var(--faint);font-size:.85rem}
.legend{display:flex;flex-wrap:wrap;gap:0 1.4rem}
.panels{display:flex;flex-wrap:wrap;align-items:flex-start;overflow-x:auto}
.numbers{overflow-x:auto}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums;margin:.5rem 0}
th,td{padding:.2rem .7rem;border-bottom:1px solid var(--grid);text-align:left;vertical-align:top}
.numbers td{white-space:nowrap}.number{text-align:right}
thead th{border-bottom-color:var(--faint);vertical-align:bottom}
.run td{overflow-wrap:anywhere}.run td:first-child{white-space:nowrap;color:var(--faint)}
summary{cursor:pointer;margin-top:.5rem}
.warning{border-left:4px solid var(--s1);padding-left:.7rem}
@media (max-width:30rem){body{padding:1rem .5rem}th,td{padding:.2rem .4rem}}
@page{size:landscape;margin:12mm}
@media print{body{max-width:none;padding:0;font-size:10pt}nav{display:none}.panels,.numbers{overflow:visible}
section{break-before:page}h2{margin-top:0}figcaption{max-width:none;break-inside:avoid}
.panels svg{max-width:38%;min-width:0!important;break-inside:avoid}.numbers table{font-size:7pt;line-height:1.2}tr{break-inside:avoid}
summary{display:none}}
";

/// The page: what was measured where, then each chart with its numbers.
fn page(inputs: &[Input], figures: &[Figure], missing: &[&str]) -> String {
    let first = inputs[0].report.machine.to_string();
    let title = format!("Measurements of the transfer engine: {}", first.lines().next().unwrap_or_default());
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" \
         content=\"width=device-width,initial-scale=1\">\n<meta name=\"color-scheme\" content=\"light dark\">\n<title>{}</title>\n\
         <style>\n{}body{{font-family:{FAMILY}}}\n{STYLE}</style>\n</head>\n<body>\n<main>\n\
         <h1>Measurements of the transfer engine</h1>\n",
        escape(&title),
        scene::page_colours()
    );
    for input in inputs {
        write_run(&mut page, input);
    }
    page.push_str("<nav aria-label=\"Charts\"><ul>\n");
    for figure in figures {
        let _ = writeln!(page, "<li><a href=\"#{}\">{}</a></li>", figure.name, escape(&figure.title));
    }
    page.push_str("</ul></nav>\n");
    if !missing.is_empty() {
        let _ = writeln!(page, "<p>Left out, for there are no measurements: {}.</p>", escape(&missing.join("; ")));
    }
    for figure in figures {
        let Figure { name, title, constant, note, scene, columns, rows } = figure;
        let _ = writeln!(
            page,
            "<section id=\"{name}\">\n<h2>{}</h2>\n<figure>\n<p class=\"constant\">{}</p>\n<div class=\"legend\">\n{}</div>\n\
             <div class=\"panels\">\n{}</div>\n<figcaption>{} As a file: <a href=\"{name}.svg\">SVG</a>, \
             <a href=\"{name}.png\">PNG</a>.</figcaption>\n</figure>\n<details><summary>The numbers</summary>\n\
             <div class=\"numbers\" tabindex=\"0\">",
            escape(title),
            escape(constant),
            scene.parts(PartKind::Legend),
            scene.parts(PartKind::Panel),
            escape(note)
        );
        write_table(&mut page, "", columns, rows);
        page.push_str("</div></details>\n</section>\n");
    }
    page + "</main>\n</body>\n</html>\n"
}

fn write_table(page: &mut String, class: &str, columns: &[String], rows: &[Vec<String>]) {
    let is_number = |cell: &String| cell.is_empty() || cell.starts_with(|letter: char| letter.is_ascii_digit());
    let are_numbers: Vec<bool> = (0..columns.len()).map(|column| rows.iter().all(|row| is_number(&row[column]))).collect();
    let row = |cells: &[String], tag: &str| {
        let cells = cells.iter().zip(&are_numbers).fold(String::new(), |row, (cell, is_number)| {
            let class = if *is_number { " class=\"number\"" } else { "" };
            row + &format!("<{tag}{class}>{}</{}>", escape(cell), &tag[..2])
        });
        format!("<tr>{cells}</tr>\n")
    };
    let _ = write!(page, "<table class=\"{class}\">\n<thead>{}</thead>\n<tbody>\n", row(columns, "th scope=\"col\""));
    rows.iter().for_each(|cells| page.push_str(&row(cells, "td")));
    page.push_str("</tbody>\n</table>\n");
}

/// What one file is, and what is to be known before its figures are believed.
fn write_run(page: &mut String, input: &Input) {
    let report = &input.report;
    let machine = report.machine.to_string();
    let (first, warnings) = machine.split_once('\n').unwrap_or((&machine, ""));
    if !input.label.is_empty() {
        let _ = writeln!(page, "<h2>{}</h2>", escape(&input.label));
    }
    let mut rows = vec![
        vec!["machine".to_string(), first.to_string()],
        vec!["begun".to_string(), date(report.started)],
        vec!["took".to_string(), format!("{:.0} s", report.seconds)],
        vec!["command".to_string(), report.command.clone()],
    ];
    for measurement in report.table(Table::Machine) {
        let Spread { median, minimum, maximum } = measurement.spread();
        let [median, minimum, maximum] = [median, minimum, maximum].map(|number| figure::value(number, &measurement.unit));
        let what = format!("{median} ({minimum} to {maximum}) between the figures: differences of that proportion mean nothing");
        rows.push(vec![measurement.key.quantity.clone(), what]);
    }
    rows.extend(
        report.skipped.iter().map(|skipped| vec!["not measured".to_string(), format!("{}: {}", skipped.what, skipped.why)]),
    );
    write_table(page, "run", &["".to_string(), "this run".to_string()], &rows);
    let partial = (!report.complete).then_some("The run was interrupted: some rounds or tables are missing.");
    for warning in warnings.lines().chain(partial) {
        let _ = writeln!(page, "<p class=\"warning\">{}</p>", escape(warning));
    }
}

/// Seconds since 1970 as a date and time of UTC.
fn date(seconds: u64) -> String {
    let ((year, month, day), rest) = (civil_date(seconds / 86_400), seconds % 86_400);
    format!("{year}-{month:02}-{day:02} {:02}:{:02} UTC", rest / 3_600, rest / 60 % 60)
}

#[cfg(test)]
mod tests;
