//! What is said of a set of measurements.

use std::fmt;

use serde::Serialize;

/// Median, smallest and largest of the rounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// The middle one, or the mean of the two middle ones.
    pub median: f64,
    /// The smallest.
    pub minimum: f64,
    /// The largest.
    pub maximum: f64,
}

impl Spread {
    /// Of at least one value.
    pub fn of(mut values: Vec<f64>) -> Spread {
        values.sort_by(f64::total_cmp);
        let middle = values.len() / 2;
        let median = if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 };
        Spread { median, minimum: values[0], maximum: values[values.len() - 1] }
    }

    /// Of one figure of each round.
    pub fn over<T>(rounds: &[T], figure: impl Fn(&T) -> f64) -> Spread {
        Spread::of(rounds.iter().map(figure).collect())
    }
}

/// `1234 (1200..1300)`; numbers below 10 with two digits after the point, below 100 with one.
impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = match self.median.abs() {
            median if median < 10.0 => 2,
            median if median < 100.0 => 1,
            _ => 0,
        };
        f.pad(&format!("{:.digits$} ({:.digits$}..{:.digits$})", self.median, self.minimum, self.maximum))
    }
}

/// The value below which `share` (0 to 1) of the values lie; sorts them. Of at least one value.
pub fn percentile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * share).round() as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spreads_have_the_middle_and_the_ends() {
        assert_eq!(Spread::of(vec![3.0, 1.0, 2.0]), Spread { median: 2.0, minimum: 1.0, maximum: 3.0 });
        assert_eq!(Spread::of(vec![4.0, 1.0, 2.0, 3.0]).median, 2.5);
        assert_eq!(Spread::over(&[(1, 5.0)], |round| round.1), Spread { median: 5.0, minimum: 5.0, maximum: 5.0 });
    }

    #[test]
    fn spreads_are_shown_with_few_digits_and_can_be_aligned() {
        let spread = |median| Spread { median, minimum: 1.0, maximum: 2.0 };
        assert_eq!(spread(1.234).to_string(), "1.23 (1.00..2.00)");
        assert_eq!(format!("{:>20}", spread(12.34)), "      12.3 (1.0..2.0)"[1..].to_string());
        assert_eq!(spread(1234.5).to_string(), "1234 (1..2)");
        assert_eq!(spread(-1234.5).to_string(), "-1234 (1..2)");
    }

    #[test]
    fn percentiles_are_values_that_occurred() {
        let mut values: Vec<f64> = (1..=101).rev().map(f64::from).collect();
        assert_eq!(
            (percentile(&mut values, 0.5), percentile(&mut values, 0.99), percentile(&mut values, 1.0)),
            (51.0, 100.0, 101.0)
        );
        assert_eq!(percentile(&mut [7.0], 0.99), 7.0);
    }
}
