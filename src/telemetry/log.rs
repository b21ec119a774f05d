//! The log: one line per event on standard error or in a file, or a call of the host program's function.
//!
//! Events are made with `tracing`'s macros anywhere in the library. This subscriber takes those of this library only, so that a Rust
//! program without a subscriber of its own does not find its own events on standard error.
//!
//! # Invariants
//! - Nothing is ever written to standard output.
//! - A line is one `write`, so that lines of several threads and processes do not mix, and control characters are escaped, so that
//!   what a peer sends cannot forge a line. That a line cannot be written is ignored.
//! - A callback is not called from within itself on the same thread: what it makes the library log is dropped. A panic in it ends
//!   there.
//! - When [`set_callback`] has returned, no thread is in the previous callback any more, so its data can be freed.
//!
//! # Locks and cost
//! `CALLBACK` is held for reading during a callback and for writing while it is replaced; lines without a callback take no lock, so
//! a forked child can log. A disabled event costs a load and a branch, since `tracing` is told the level and caches what it is told.

use std::cell::Cell;
use std::fmt::{self, Write as _};
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::RwLock;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span;
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber};

use crate::config::Environment;
use crate::error::{Code, Error, Result};
use crate::sys::process;

/// What a host program wants to be called with: level, the part of the library that speaks, and the text without a line end.
pub type Callback = Box<dyn Fn(Level, &str, &str) + Send + Sync>;

/// The crate's name as it begins the target of its events.
const CRATE: &str = "transfer_engine";

static CALLBACK: RwLock<Option<Callback>> = RwLock::new(None);
static HAS_CALLBACK: AtomicBool = AtomicBool::new(false);
/// The least severe level that is logged, as [`rank`] counts.
static LEVEL: AtomicU8 = AtomicU8::new(1);

thread_local! {
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// Puts this log in place, with the level and directory of the environment, unless that has been done. Called by everything that may
/// be first in a process. False if the program has installed a `tracing` subscriber of its own, which then gets the events.
pub fn install() -> bool {
    static INSTALLED: OnceLock<bool> = OnceLock::new();
    *INSTALLED.get_or_init(|| {
        let config = Environment::of_process().config();
        LEVEL.store(rank(config.log_level), Ordering::Relaxed);
        let opened = config.log_directory.as_deref().map(open_file);
        let (file, problem) = match opened {
            None => (None, None),
            Some(Ok(file)) => (Some(file), None),
            Some(Err(problem)) => (None, Some(problem)),
        };
        let installed = tracing::subscriber::set_global_default(Log { file }).is_ok();
        if let Some(problem) = problem.filter(|_| installed) {
            tracing::warn!("{problem}");
        }
        installed
    })
}

/// Gives all further events of at least `level` to `callback`, or with `None` to standard error or the file again.
///
/// Waits until no thread is in the previous callback; so the caller must not hold a lock that the callback takes.
///
/// # Errors
/// [`Code::InvalidArgument`] from within a callback, or if the program has a `tracing` subscriber of its own.
pub fn set_callback(callback: Option<Callback>, level: Level) -> Result<()> {
    if IN_CALLBACK.get() {
        return Err(Error::quiet(Code::InvalidArgument, "the log callback cannot be replaced from within a log callback"));
    }
    if !install() {
        let text = "the program has a tracing subscriber of its own, which gets all log events; use that instead of a callback";
        return Err(Error::quiet(Code::InvalidArgument, text));
    }
    let previous = {
        let mut current = CALLBACK.write();
        HAS_CALLBACK.store(callback.is_some(), Ordering::Relaxed);
        std::mem::replace(&mut *current, callback)
    };
    // Its destructor is the host's code too, and may log.
    drop(previous);
    LEVEL.store(rank(level), Ordering::Relaxed);
    tracing::callsite::rebuild_interest_cache();
    Ok(())
}

fn open_file(directory: &Path) -> std::result::Result<File, String> {
    let path = directory.join(format!("{CRATE}.{}.log", std::process::id()));
    OpenOptions::new().create(true).append(true).open(&path).map_err(|error| {
        let path = path.display();
        format!("MC_LOG_DIR: cannot open {path}: {error}; logging to standard error")
    })
}

/// Orders levels by how much they say. `tracing` compares the other way round and cannot be put into an atomic.
fn rank(level: Level) -> u8 {
    match level {
        Level::ERROR => 0,
        Level::WARN => 1,
        Level::INFO => 2,
        Level::DEBUG => 3,
        Level::TRACE => 4,
    }
}

struct Log {
    file: Option<File>,
}

impl Subscriber for Log {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        if self.enabled(metadata) { Interest::always() } else { Interest::never() }
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        rank(*metadata.level()) <= LEVEL.load(Ordering::Relaxed) && metadata.is_event() && part(metadata.target()).is_some()
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(match LEVEL.load(Ordering::Relaxed) {
            0 => LevelFilter::ERROR,
            1 => LevelFilter::WARN,
            2 => LevelFilter::INFO,
            3 => LevelFilter::DEBUG,
            _ => LevelFilter::TRACE,
        })
    }

    fn event(&self, event: &Event<'_>) {
        let metadata = event.metadata();
        let Some(part) = part(metadata.target()) else { return };
        let mut message = Message(String::new());
        event.record(&mut message);
        if HAS_CALLBACK.load(Ordering::Relaxed) && call(*metadata.level(), part, &message.0) {
            return;
        }
        let line = format_line(SystemTime::now(), *metadata.level(), process::thread_id(), part, &message.0);
        match &self.file {
            // A full disk must not stop a transfer.
            Some(file) => drop((&*file).write_all(line.as_bytes())),
            None => process::write_standard_error(line.as_bytes()),
        }
    }

    // Spans are not used by this library and not enabled.
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// Calls the callback. True if there was one, or if this thread is in it already.
fn call(level: Level, part: &str, message: &str) -> bool {
    // On a thread that is ending there is no telling; then the line is better written than called for.
    let Ok(nested) = IN_CALLBACK.try_with(|inside| inside.replace(true)) else { return false };
    if nested {
        return true;
    }
    let called = {
        let callback = CALLBACK.read();
        callback.as_ref().map(|callback| catch_unwind(AssertUnwindSafe(|| callback(level, part, message))))
    };
    let _ = IN_CALLBACK.try_with(|inside| inside.set(false));
    called.is_some()
}

/// The target without the crate's name; `None` for targets of others.
fn part(target: &str) -> Option<&str> {
    match target.strip_prefix(CRATE)? {
        "" => Some(CRATE),
        rest => rest.strip_prefix("::"),
    }
}

/// `2026-11-29 15:04:05.123456Z W 12345 registry: text`, with the time in UTC: local time needs the environment and a lock, neither
/// of which is safe to touch on every thread and after a fork.
fn format_line(time: SystemTime, level: Level, thread: i32, part: &str, message: &str) -> String {
    let since_epoch = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (seconds, microseconds) = (since_epoch.as_secs(), since_epoch.subsec_micros());
    let (year, month, day) = civil_date(seconds / 86_400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let letter = match level {
        Level::ERROR => 'E',
        Level::WARN => 'W',
        Level::INFO => 'I',
        Level::DEBUG => 'D',
        Level::TRACE => 'T',
    };
    format!(
        "{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}.{microseconds:06}Z {letter} {thread} {part}: {message}\n"
    )
}

/// Year, month and day of the Gregorian calendar, from days since 1970.
fn civil_date(days: u64) -> (u64, u64, u64) {
    // Years are counted from 1 March of year 0, so that the leap day comes last; 719,468 days lie between that and 1970.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

/// An event's text: its message, then its other fields as `name=value`.
struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let start = self.0.len();
        let separator = if start == 0 { "" } else { " " };
        // Writing to a String fails only if the value's own formatting does; then what there is of it is shown.
        let _ = match field.name() {
            "message" => write!(self.0, "{separator}{value:?}"),
            name => write!(self.0, "{separator}{name}={value:?}"),
        };
        if self.0[start..].contains(char::is_control) {
            let escaped: String = self.0[start..]
                .chars()
                .flat_map(|c| if c.is_control() { c.escape_default().collect::<Vec<_>>() } else { vec![c] })
                .collect();
            self.0.replace_range(start.., &escaped);
        }
    }
}
