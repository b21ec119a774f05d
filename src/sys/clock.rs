//! The time of day where the process runs.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The present local time as `YYYY-MM-DD HH:MM:SS.uuuuuu`.
pub fn local_timestamp() -> String {
    format_local(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

fn format_local(since_epoch: Duration) -> String {
    let seconds = libc::time_t::try_from(since_epoch.as_secs()).unwrap_or(libc::time_t::MAX);
    // SAFETY: `tm` is plain numbers and a pointer, for which all zeroes are valid.
    let mut parts: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to locals that live through the call. On failure `parts` stays zero, which is printable.
    unsafe { libc::localtime_r(&raw const seconds, &raw mut parts) };
    format!(
        "{:04}-{:02}-{:02} {:02}:{:02}:{:02}.{:06}",
        i64::from(parts.tm_year) + 1900,
        parts.tm_mon + 1,
        parts.tm_mday,
        parts.tm_hour,
        parts.tm_min,
        parts.tm_sec,
        since_epoch.subsec_micros()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Zones differ from UTC by whole minutes since 1972, so seconds and what is below them are known everywhere.
    #[test]
    fn timestamps_have_the_fixed_width_of_the_wire() {
        let text = format_local(Duration::new(1_796_000_003, 42_999));
        assert_eq!(text.len(), "2026-11-29 13:29:35.836204".len());
        assert!(text.starts_with("2026-11-"), "{text}");
        assert!(text.ends_with(":23.000042"), "{text}");
        assert_eq!(local_timestamp().len(), text.len());
    }
}
