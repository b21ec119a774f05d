//! Sizes in arguments.

/// Parses a size such as `64`, `4K`, `1M`, `2GiB`; units are binary.
pub fn parse_size(text: &str) -> Result<usize, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let shift = match text[digits..].to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        _ => return Err("a size is a number, with K, M or G where it is large".to_string()),
    };
    let number: usize = text[..digits].parse().map_err(|error| format!("not a size: {error}"))?;
    match number.checked_mul(1 << shift) {
        Some(size) if size > 0 => Ok(size),
        _ => Err("the size must be from 1 byte to what an address can hold".to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed_with_binary_units() {
        for (text, size) in [("64", 64), ("4K", 4096), ("1m", 1 << 20), ("2GiB", 2 << 30), ("5b", 5)] {
            assert_eq!(parse_size(text), Ok(size));
        }
        for text in ["", "0", "K", "4X", "-1", "1.5M", "99999999999999999999", "99999999999G"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }
}
