//! How results look: width, colour, wrapping, and writing them.

use std::io::{self, IsTerminal, Write};

use crate::system;

/// Colour and width of standard output.
pub struct Style {
    /// Whether to colour.
    pub colour: bool,
    /// Columns to fill.
    pub width: usize,
}

impl Style {
    /// Colour on terminals only, and not where `NO_COLOR` forbids it; the width of `COLUMNS` or the terminal, between 80 and 120, else
    /// 100.
    pub fn of_standard_output() -> Style {
        let colour = io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let columns = std::env::var("COLUMNS").ok().and_then(|text| text.parse().ok()).or_else(system::terminal_width);
        Style { colour, width: columns.unwrap_or(100).clamp(80, 120) }
    }

    /// A heading.
    pub fn heading(&self, text: &str) -> String {
        self.paint("1", text)
    }

    /// Something that is as its user set it.
    pub fn set(&self, text: &str) -> String {
        self.paint("32", text)
    }

    /// Something that wants attention.
    pub fn warning(&self, text: &str) -> String {
        self.paint("33", text)
    }

    /// Something of less weight.
    pub fn faint(&self, text: &str) -> String {
        self.paint("2", text)
    }

    fn paint(&self, code: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_string() }
    }
}

/// Breaks a text between words into lines of at most `width` characters; longer words stand alone.
pub fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("there is always one line");
        if line.is_empty() {
            line.push_str(word);
        } else if line.chars().count() + 1 + word.chars().count() <= width {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(word.to_string());
        }
    }
    lines
}

/// Running text in lines that are read with ease.
pub fn paragraph(text: &str) -> String {
    wrap(text, 100).join("\n") + "\n"
}

/// A number of bytes with the largest binary unit that keeps it readable.
pub fn bytes(number: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = number as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if value.fract() == 0.0 { format!("{value} {}", UNITS[unit]) } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// Writes to standard output. That the reader has gone, as with `te info | head`, is no error.
pub fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_filled_and_never_too_long() {
        assert_eq!(wrap("a bb ccc dddd", 6), ["a bb", "ccc", "dddd"]);
        assert_eq!(wrap("abcdefgh i", 4), ["abcdefgh", "i"]);
        assert_eq!(wrap("ää ää", 5), ["ää ää"]);
        assert_eq!(wrap("", 5), [""]);
    }

    #[test]
    fn sizes_are_shown_in_binary_units() {
        let shown = [0, 1023, 1024, 1536, 8 << 20, u64::MAX].map(bytes);
        assert_eq!(shown, ["0 B", "1023 B", "1 KiB", "1.5 KiB", "8 MiB", "16384 PiB"]);
    }

    #[test]
    fn colour_is_used_only_where_it_is_on() {
        assert_eq!(Style { colour: false, width: 80 }.warning("x"), "x");
        assert_eq!(Style { colour: true, width: 80 }.warning("x"), "\x1b[33mx\x1b[0m");
    }
}
