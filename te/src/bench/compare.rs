//! `te bench --compare`: whether the second of two files of measurements is worse than the first, for people and for CI.
//!
//! For each measurement of ours that both files have, the interval of the factor by which it became worse: that of Hodges and Lehmann
//! around the median of all ratios of a sample of the one to a sample of the other, whose ends come from the distribution of Mann and
//! Whitney's statistic. It assumes nothing of the samples but that both have the same shape on a logarithmic axis, single outliers move
//! it little, and for few samples it is exact, where intervals from resampled medians are known to be too narrow. All intervals together
//! hold with 95 %: each alone holds with 1 − 0.05 / the number compared (Bonferroni), so that at most one comparison of equal programs in
//! twenty finds anything, however many measurements there are. It is a regression only if the whole interval lies beyond the tolerance.
//! Fewer samples than such an interval takes ([`samples_needed`]) say nothing, and that is said.
//!
//! Samples of one process share its luck: addresses, the host's other guests. No interval over them knows of it; the tolerance has to.
//! What others need (linear scans, plain sockets, fixed work) is no regression of ours, but shows that the machine became another.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;

use serde::Serialize;

use super::statistics::Spread;
use crate::output;
use crate::report::{Better, Measurement, Report, Table};

/// With which chance all intervals together hold.
const CONFIDENCE: f64 = 0.95;
/// Up to this product of the numbers of samples the distribution is computed, above it is as good as normal.
const EXACT: usize = 2_500;
/// Subjects that are ours: what they need can regress.
const OURS: [&str; 2] = ["ours", "pool"];

/// What the interval says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Verdict {
    /// All of it lies beyond the tolerance.
    Regression,
    /// All of it lies beyond the tolerance on the good side.
    Better,
    /// All of it lies within.
    Same,
    /// It does not tell: more samples would.
    Unclear,
    /// There is none.
    TooFew,
}

impl Verdict {
    fn of(interval: Option<(f64, f64)>, tolerance: f64) -> Verdict {
        match interval {
            None => Verdict::TooFew,
            Some((low, _)) if low > 1.0 + tolerance => Verdict::Regression,
            Some((_, high)) if high < 1.0 / (1.0 + tolerance) => Verdict::Better,
            Some((low, high)) if low >= 1.0 / (1.0 + tolerance) && high <= 1.0 + tolerance => Verdict::Same,
            Some(_) => Verdict::Unclear,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Verdict::Regression => "WORSE",
            Verdict::Better => "better",
            Verdict::Same => "same",
            Verdict::Unclear => "unclear",
            Verdict::TooFew => "too few samples",
        }
    }
}

/// One measurement in both files.
#[derive(Debug, Serialize)]
struct Comparison {
    what: String,
    unit: String,
    /// How much worse the second is: above 1 worse, below better, whichever direction the quantity's good one is.
    ratio: f64,
    /// Between these, if there are samples enough.
    interval: Option<(f64, f64)>,
    verdict: Verdict,
    first: Spread,
    second: Spread,
    /// In either file.
    samples: (usize, usize),
}

/// The whole answer.
#[derive(Debug, Serialize)]
struct Outcome {
    tolerance_percent: f64,
    confidence_of_all: f64,
    confidence_of_each: f64,
    /// In both files, for an interval at that confidence.
    samples_needed: usize,
    regressions: usize,
    warnings: Vec<String>,
    /// Worst first.
    compared: Vec<Comparison>,
    only_in_first: Vec<String>,
    only_in_second: Vec<String>,
}

/// Compares two files: an error says how many regressions there are. A file that cannot be read is a wrong argument, and so are files of
/// which nothing can be compared: a gate that compares nothing has to be noticed.
pub fn run(first: &Path, second: &Path, tolerance_percent: f64, as_json: bool) -> Result<(), Box<dyn Error>> {
    let read = |path: &Path| {
        Report::read(path)
            .unwrap_or_else(|error| clap::Error::raw(clap::error::ErrorKind::ValueValidation, format!("{error}\n")).exit())
    };
    let outcome = compare(&read(first), &read(second), tolerance_percent);
    super::print_report(as_json, &outcome, print)?;
    if outcome.compared.is_empty() {
        let nothing = format!("{} and {} have no measurement of ours in common\n", first.display(), second.display());
        clap::Error::raw(clap::error::ErrorKind::ValueValidation, nothing).exit();
    }
    match outcome.regressions {
        0 => Ok(()),
        count => {
            Err(format!("{count} of {} measurements became worse by more than {tolerance_percent} %", outcome.compared.len())
                .into())
        }
    }
}

fn compare(first: &Report, second: &Report, tolerance_percent: f64) -> Outcome {
    let ours = |report: &Report| -> BTreeMap<String, Measurement> {
        let ours = report.measurements.iter().filter(|measurement| OURS.contains(&measurement.key.subject.as_str()));
        ours.map(|measurement| (measurement.key.to_string(), measurement.clone())).collect()
    };
    let (of_first, of_second) = (ours(first), ours(second));
    let mut warnings = warnings(first, second, tolerance_percent);
    let mut pairs = Vec::new();
    for (what, base) in &of_first {
        let Some(new) = of_second.get(what) else { continue };
        match base.unit == new.unit && base.better == new.better {
            true => pairs.push((what.clone(), base, new)),
            false => warnings.push(format!("{what} cannot be compared: its units differ")),
        }
    }
    let error = (1.0 - CONFIDENCE) / pairs.len().max(1) as f64;
    let tolerance = tolerance_percent / 100.0;
    let mut distributions = Distributions::default();
    let mut compared: Vec<Comparison> = pairs
        .into_iter()
        .map(|(what, base, new)| {
            let (better, worse) = if base.better == Better::Less { (base, new) } else { (new, base) };
            let (ratio, interval) = estimate(&better.samples, &worse.samples, error, &mut distributions);
            Comparison {
                what,
                unit: base.unit.clone(),
                ratio,
                interval,
                verdict: Verdict::of(interval, tolerance),
                first: base.spread(),
                second: new.spread(),
                samples: (base.samples.len(), new.samples.len()),
            }
        })
        .collect();
    // A regression is above a larger ratio that may be chance.
    compared.sort_by(|a, b| {
        (b.verdict == Verdict::Regression).cmp(&(a.verdict == Verdict::Regression)).then(b.ratio.total_cmp(&a.ratio))
    });
    let only = |in_one: &BTreeMap<String, Measurement>, in_other: &BTreeMap<String, Measurement>| {
        in_one.keys().filter(|what| !in_other.contains_key(*what)).cloned().collect()
    };
    Outcome {
        tolerance_percent,
        confidence_of_all: CONFIDENCE,
        confidence_of_each: 1.0 - error,
        samples_needed: samples_needed(error, &mut distributions),
        regressions: compared.iter().filter(|comparison| comparison.verdict == Verdict::Regression).count(),
        warnings,
        only_in_first: only(&of_first, &of_second),
        only_in_second: only(&of_second, &of_first),
        compared,
    }
}

/// What makes the comparison doubtful.
fn warnings(first: &Report, second: &Report, tolerance_percent: f64) -> Vec<String> {
    let mut warnings = Vec::new();
    if first.machine.name() != second.machine.name() {
        warnings.push(format!("the machines differ: {}; {}", first.machine.name(), second.machine.name()));
    }
    for (file, report) in [("first", first), ("second", second)] {
        if !report.complete {
            warnings.push(format!("the run of the {file} file was interrupted"));
        }
        if !report.machine.is_optimized() {
            warnings.push(format!("the {file} file is of a debug build, whose figures say nothing of a release build"));
        }
    }
    // What nobody changed should take as long as before.
    for base in first.measurements.iter().filter(|base| !OURS.contains(&base.key.subject.as_str())) {
        let Some(new) = second.measurements.iter().find(|new| new.key == base.key) else { continue };
        let ratio = new.spread().median / base.spread().median;
        if base.key.table == Table::Machine && (ratio.max(1.0 / ratio) - 1.0) * 100.0 > tolerance_percent {
            warnings.push(format!("the machine itself became another: {} is {ratio:.2} times what it was", base.key.quantity));
        }
    }
    warnings
}

/// The median of all ratios of a sample of `new` to one of `base`, and between which of them it lies but for this chance.
fn estimate(base: &[f64], new: &[f64], error: f64, distributions: &mut Distributions) -> (f64, Option<(f64, f64)>) {
    let [base, new] = [base, new].map(|samples| {
        let mut samples = samples.to_vec();
        samples.sort_by(f64::total_cmp);
        samples
    });
    let at = |place: usize| ratio_at(&base, &new, place);
    let pairs = base.len() * new.len();
    let cut = distributions.cut(base.len(), new.len(), error / 2.0);
    let interval = (cut > 0).then(|| (at(cut - 1), at(pairs - cut)));
    let median = if pairs % 2 == 1 { at(pairs / 2) } else { (at(pairs / 2 - 1) + at(pairs / 2)) / 2.0 };
    (median, interval)
}

/// The ratio of this place in the order of all ratios of a sample of `new` to one of `base`, which both ascend from 0 or more. The ratios
/// are counted and never listed: those of 100,000 samples to as many others would fill 80 GB.
fn ratio_at(base: &[f64], new: &[f64], place: usize) -> f64 {
    let ratio = |new: f64, base: f64| if new == base { 1.0 } else { new / base };
    let count_to = |bound: f64| {
        // What is small enough beside one of `base` is so beside all larger ones.
        let mut small = 0;
        let counts = base.iter().map(|base| {
            small += new[small..].iter().take_while(|new| ratio(**new, *base) <= bound).count();
            small
        });
        counts.sum::<usize>()
    };
    // Numbers from 0 on are in the order of their bits.
    let (mut low, mut high) = (0, f64::INFINITY.to_bits());
    while low < high {
        let middle = low + (high - low) / 2;
        if count_to(f64::from_bits(middle)) > place { high = middle } else { low = middle + 1 }
    }
    f64::from_bits(low)
}

/// The least number of samples, the same in both files, with which there is an interval at all.
fn samples_needed(error: f64, distributions: &mut Distributions) -> usize {
    (1..).find(|count| distributions.cut(*count, *count, error / 2.0) > 0).expect("more samples always suffice")
}

/// Distributions of Mann and Whitney's statistic (of how many pairs the second is the smaller), by the numbers of samples.
#[derive(Default)]
struct Distributions {
    known: BTreeMap<(usize, usize), Vec<f64>>,
}

impl Distributions {
    /// The largest number whose chance that the statistic lies below it is at most `chance`; 0 if there is none.
    fn cut(&mut self, first: usize, second: usize, chance: f64) -> usize {
        let pairs = first * second;
        if pairs > EXACT {
            let deviation = ((pairs * (first + second + 1)) as f64 / 12.0).sqrt();
            return (pairs as f64 / 2.0 + deviation * quantile(chance) + 0.5).floor().max(0.0) as usize;
        }
        // What rounding adds to a chance is far less than a billionth of it.
        let sums = self.of(first, second).iter().scan(0.0, |sum, chance| {
            *sum += chance;
            Some(*sum)
        });
        sums.take_while(|below| *below <= chance * (1.0 + 1e-9)).count()
    }

    /// The chance of each value: the largest of all samples belongs to the one or to the other.
    fn of(&mut self, first: usize, second: usize) -> &[f64] {
        let (first, second) = (first.min(second), first.max(second));
        self.known.entry((first, second)).or_insert_with(|| {
            // For `m` and each number of the others.
            let mut rows: Vec<Vec<f64>> = vec![vec![1.0]; second + 1];
            for m in 1..=first {
                let mut row: Vec<Vec<f64>> = vec![vec![1.0]];
                for n in 1..=second {
                    let share = m as f64 / (m + n) as f64;
                    let mut chances = vec![0.0; m * n + 1];
                    for (value, chance) in rows[n].iter().enumerate() {
                        chances[value + n] += chance * share;
                    }
                    for (value, chance) in row[n - 1].iter().enumerate() {
                        chances[value] += chance * (1.0 - share);
                    }
                    row.push(chances);
                }
                rows = row;
            }
            rows.swap_remove(second)
        })
    }
}

/// The value below which a standard normal variable lies with this chance, below a half.
fn quantile(chance: f64) -> f64 {
    let (mut low, mut high) = (-40.0, 0.0);
    for _ in 0..80 {
        let middle = (low + high) / 2.0;
        if normal(middle) < chance { low = middle } else { high = middle }
    }
    low
}

/// The chance that a standard normal variable lies below a negative value: the continued fraction of Laplace where it is fast, else the
/// series around 0.
fn normal(value: f64) -> f64 {
    let density = (-value * value / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
    let x = -value;
    if x > 3.0 {
        return density / (1..=60).rev().fold(x, |fraction, step| x + f64::from(step) / fraction);
    }
    let (mut term, mut sum) = (x, x);
    for step in 1..60 {
        term *= x * x / f64::from(2 * step + 1);
        sum += term;
    }
    0.5 - density * sum
}

/// The aligned text.
fn print(outcome: &Outcome) -> String {
    let mut text = String::new();
    for warning in &outcome.warnings {
        text += &format!("Warning: {warning}.\n");
    }
    let Outcome { tolerance_percent, samples_needed, .. } = outcome;
    text += &output::paragraph(&format!(
        "Factor by which the second file is worse (below 1 better), with intervals that all hold together with {:.0} % ({:.3} % each). \
         WORSE: all of the interval lies above {:.2}. With fewer than {samples_needed} samples in both files there is no interval.",
        outcome.confidence_of_all * 100.0,
        outcome.confidence_of_each * 100.0,
        1.0 + tolerance_percent / 100.0
    ));
    let header = ["worse by", "interval", "", "first", "second", "unit", "samples", "what"].map(str::to_string);
    let row = |comparison: &Comparison| {
        let interval = comparison.interval.map_or("-".to_string(), |(low, high)| format!("{low:.2}..{high:.2}"));
        [
            format!("{:.2}", comparison.ratio),
            interval,
            comparison.verdict.name().to_string(),
            comparison.first.to_string(),
            comparison.second.to_string(),
            comparison.unit.clone(),
            format!("{}, {}", comparison.samples.0, comparison.samples.1),
            comparison.what.clone(),
        ]
    };
    let rows: Vec<[String; 8]> = std::iter::once(header).chain(outcome.compared.iter().map(row)).collect();
    let widths: [usize; 8] = std::array::from_fn(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0));
    text.push('\n');
    for row in &rows {
        let cells = row.iter().zip(widths).enumerate().map(|(column, (cell, width))| match column {
            0 | 1 | 3 | 4 => format!("{cell:>width$}"),
            _ => format!("{cell:<width$}"),
        });
        text += Vec::from_iter(cells).join("  ").trim_end();
        text.push('\n');
    }
    text.push('\n');
    for (name, only) in [("first", &outcome.only_in_first), ("second", &outcome.only_in_second)] {
        for what in only {
            text += &format!("Only in the {name} file: {what}\n");
        }
    }
    let count = |verdict: Verdict| outcome.compared.iter().filter(|comparison| comparison.verdict == verdict).count();
    text += &format!(
        "{} compared: {} worse, {} better, {} the same, {} unclear, {} with too few samples.\n",
        outcome.compared.len(),
        outcome.regressions,
        count(Verdict::Better),
        count(Verdict::Same),
        count(Verdict::Unclear),
        count(Verdict::TooFew)
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Key, Value};

    /// Numbers that look like chance, the same ones each time.
    struct Chance(u64);

    impl Chance {
        fn share(&mut self) -> f64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut value = self.0;
            value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((value ^ (value >> 31)) >> 11) as f64 / (1u64 << 53) as f64
        }

        /// Times around 100 as machines give them: a bulk, and a long tail above.
        fn times(&mut self, count: usize, factor: f64) -> Vec<f64> {
            let time = |chance: &mut Chance| 100.0 * factor * (1.0 + 0.05 * chance.share() - 0.03 * (1.0 - chance.share()).ln());
            (0..count).map(|_| time(self)).collect()
        }
    }

    fn report(cells: &[(&str, &str, &[f64])]) -> Report {
        let mut report = Report::begin("te bench sweep".to_string());
        report.complete = true;
        for (quantity, subject, samples) in cells {
            let better = if *quantity == "throughput" { Better::More } else { Better::Less };
            for sample in *samples {
                report.add(Key::new(Table::Index, quantity, subject, &[("regions", Value::Number(256))]), "ns", better, *sample);
            }
        }
        report
    }

    #[test]
    fn chances_are_those_of_counted_orders() {
        let mut distributions = Distributions::default();
        // Of the 6 orders of two and two samples, the statistic is 0, 1, 2, 2, 3 and 4.
        let sixths = [1.0, 1.0, 2.0, 1.0, 1.0].map(|count| count / 6.0);
        assert!(distributions.of(2, 2).iter().zip(sixths).all(|(chance, expected)| (chance - expected).abs() < 1e-12));
        assert!((distributions.of(7, 30).iter().sum::<f64>() - 1.0).abs() < 1e-12);
        // Tables of the test have these for two-sided 5 %.
        let cuts = [(3, 3), (4, 4), (5, 5), (8, 8), (10, 10), (5, 9)].map(|(m, n)| distributions.cut(m, n, 0.025));
        assert_eq!(cuts, [0, 1, 3, 14, 24, 8]);
    }

    #[test]
    fn many_samples_have_the_normal_distribution() {
        let mut distributions = Distributions::default();
        for chance in [0.025, 1e-3, 1e-5] {
            let exact = distributions.cut(50, 50, chance) as f64;
            let deviation = (50.0 * 50.0 * 101.0f64 / 12.0).sqrt();
            let near = 1250.0 + deviation * quantile(chance);
            // The tail of the normal distribution is the heavier one: intervals become a little wider.
            assert!((near..near + 20.0).contains(&(exact + 1.0)), "{chance}: {exact}, {near}");
        }
        assert!((quantile(0.025) + 1.959_964).abs() < 1e-5);
        assert!((quantile(1e-6) + 4.753_424).abs() < 1e-5);
        assert!((normal(-3.0) - 0.001_349_898).abs() < 1e-8 && (normal(-3.000_001) - 0.001_349_893).abs() < 1e-8);
    }

    #[test]
    fn intervals_hold_the_true_factor_as_often_as_they_say() {
        let mut chance = Chance(8);
        let mut distributions = Distributions::default();
        for (first, second) in [(6, 6), (8, 15), (60, 60)] {
            let tries = 2_000;
            let holds = (0..tries).filter(|_| {
                let (base, new) = (chance.times(first, 1.0), chance.times(second, 1.25));
                let (_, interval) = estimate(&base, &new, 0.05, &mut distributions);
                interval.is_some_and(|(low, high)| (low..=high).contains(&1.25))
            });
            let share = holds.count() as f64 / f64::from(tries);
            assert!((0.935..=0.985).contains(&share), "{first} and {second} samples: {share}");
        }
    }

    #[test]
    fn ratios_are_found_in_their_order_and_of_many_samples_too() {
        let (base, new) = ([0.0, 0.0, 2.0, 3.0, 3.0, 7.0], [0.0, 1.0, 2.0, 2.0, 9.0]);
        let ratio = |new: f64, base: f64| if new == base { 1.0 } else { new / base };
        let mut all = Vec::from_iter(base.iter().flat_map(|base| new.iter().map(move |new| ratio(*new, *base))));
        all.sort_by(f64::total_cmp);
        assert_eq!(Vec::from_iter((0..all.len()).map(|place| ratio_at(&base, &new, place))), all);

        let [base, new] =
            [1.0, 2.0].map(|factor| Vec::from_iter((0..100_000).map(|index| factor * (1.0 + f64::from(index) * 1e-6))));
        let (ratio, interval) = estimate(&base, &new, 0.05, &mut Distributions::default());
        assert!((ratio - 2.0).abs() < 1e-3 && interval.is_some_and(|(low, high)| low < 2.0 && high > 2.0));
    }

    #[test]
    fn equal_programs_are_seldom_called_worse_and_slower_ones_are_found() {
        let mut chance = Chance(1);
        let quantities: Vec<String> = (0..40).map(|number| format!("quantity {number}")).collect();
        let mut compare_all = |factor: f64| {
            let [first, second] = [1.0, factor].map(|factor| {
                let samples: Vec<Vec<f64>> = quantities.iter().map(|_| chance.times(10, factor)).collect();
                let cells =
                    quantities.iter().zip(&samples).map(|(quantity, samples)| (quantity.as_str(), "ours", samples.as_slice()));
                report(&Vec::from_iter(cells))
            });
            compare(&first, &second, 0.0).regressions
        };
        // With no tolerance at all, 5 % of the comparisons may be wrong on either side.
        let wrong = (0..40).filter(|_| compare_all(1.0) > 0).count();
        assert!(wrong <= 4, "{wrong} of 40 comparisons of equal programs found a regression");
        assert!(compare_all(1.3) > 36);
    }

    #[test]
    fn the_good_direction_is_that_of_the_quantity() {
        let slow: Vec<f64> = (0..8).map(|number| 200.0 + f64::from(number)).collect();
        let fast: Vec<f64> = slow.iter().map(|sample| sample / 2.0).collect();
        let first = report(&[("look-up hit", "ours", &fast), ("throughput", "ours", &fast)]);
        let second = report(&[("look-up hit", "ours", &slow), ("throughput", "ours", &slow)]);
        let outcome = compare(&first, &second, 10.0);
        let verdicts = Vec::from_iter(outcome.compared.iter().map(|comparison| (comparison.what.as_str(), comparison.verdict)));
        let expected = [
            ("index look-up hit, ours (regions 256)", Verdict::Regression),
            ("index throughput, ours (regions 256)", Verdict::Better),
        ];
        assert_eq!(verdicts, expected);
        assert!((1.9..2.1).contains(&outcome.compared[0].ratio));
        assert_eq!(compare(&first, &second, 150.0).regressions, 0);
    }

    #[test]
    fn few_samples_give_no_verdict_and_the_number_that_would_is_said() {
        let first = report(&[("churn", "ours", &[1.0, 1.1, 1.2])]);
        let second = report(&[("churn", "ours", &[9.0, 9.1, 9.2])]);
        let outcome = compare(&first, &second, 10.0);
        assert_eq!((outcome.compared[0].verdict, outcome.regressions, outcome.samples_needed), (Verdict::TooFew, 0, 4));
        assert!(print(&outcome).contains("With fewer than 4 samples"));
        // 200 comparisons need more: of the 12,870 orders of 8 and 8, one has all of the second above the first.
        assert_eq!(samples_needed(0.05 / 200.0, &mut Distributions::default()), 8);
    }

    #[test]
    fn counts_that_leave_zero_are_worse_and_those_that_stay_are_the_same() {
        let first = report(&[("churn", "ours", &[0.0; 6]), ("look-up hit", "ours", &[0.0; 6])]);
        let second = report(&[("churn", "ours", &[5.0; 6]), ("look-up hit", "ours", &[0.0; 6])]);
        let outcome = compare(&first, &second, 10.0);
        assert_eq!(Vec::from_iter(outcome.compared.iter().map(|of| of.verdict)), [Verdict::Regression, Verdict::Same]);
    }

    #[test]
    fn what_is_in_one_file_only_and_what_is_doubtful_is_said() {
        let mut first = report(&[("churn", "ours", &[1.0]), ("churn", "linear scan", &[1.0])]);
        let second = report(&[("look-up hit", "ours", &[1.0]), ("churn", "linear scan", &[9.0])]);
        first.complete = false;
        let outcome = compare(&first, &second, 10.0);
        assert_eq!(outcome.only_in_first, ["index churn, ours (regions 256)"]);
        assert_eq!(outcome.only_in_second, ["index look-up hit, ours (regions 256)"]);
        assert!(outcome.warnings[0].contains("first file was interrupted"));
        assert_eq!(outcome.compared.len(), 0, "linear scans are not ours");
    }
}
