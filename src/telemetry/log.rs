//! The log: one line per event on standard error or in a file, or a call of the host program's function.
//!
//! Events are made with `tracing`'s macros anywhere in the library. This subscriber takes those of this library only, so that a Rust
//! program without a subscriber of its own does not find its own events on standard error. A line names the part of the library that
//! speaks: the event's field `room` if it has one, which errors use to name the room that decided them, else its target.
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
        let Some(target) = part(metadata.target()) else { return };
        let mut message = Message::default();
        event.record(&mut message);
        let part = message.room.as_deref().unwrap_or(target);
        if HAS_CALLBACK.load(Ordering::Relaxed) && call(*metadata.level(), part, &message.text) {
            return;
        }
        let line = format_line(SystemTime::now(), *metadata.level(), process::thread_id(), part, &message.text);
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
pub fn civil_date(days: u64) -> (u64, u64, u64) {
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

/// What an event says: its message, then its other fields as `name=value`; and who says it.
#[derive(Default)]
struct Message {
    text: String,
    room: Option<String>,
}

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "room" {
            self.room = Some(format!("{value:?}"));
            return;
        }
        let start = self.text.len();
        let separator = if start == 0 { "" } else { " " };
        // Writing to a String fails only if the value's own formatting does; then what there is of it is shown.
        let _ = match field.name() {
            "message" => write!(self.text, "{separator}{value:?}"),
            name => write!(self.text, "{separator}{name}={value:?}"),
        };
        if self.text[start..].contains(char::is_control) {
            let escaped: String = self.text[start..]
                .chars()
                .flat_map(|c| if c.is_control() { c.escape_default().collect::<Vec<_>>() } else { vec![c] })
                .collect();
            self.text.replace_range(start.., &escaped);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Output};
    use std::sync::atomic::AtomicUsize;
    use std::sync::{Arc, mpsc};
    use std::time::Duration;

    use parking_lot::Mutex;

    use super::*;
    use crate::metadata::SegmentDescriptor;

    /// The callback belongs to the process; tests that set one take turns.
    static TURN: Mutex<()> = Mutex::new(());

    type Lines = Arc<Mutex<Vec<(Level, String, String)>>>;

    /// A callback that collects what contains `marker`: other tests log at the same time.
    fn collect(marker: &'static str) -> (Lines, Callback) {
        let lines = Lines::default();
        let sink = lines.clone();
        let callback = Box::new(move |level, part: &str, text: &str| {
            if text.contains(marker) {
                sink.lock().push((level, part.to_string(), text.to_string()));
            }
        });
        (lines, callback)
    }

    /// Runs the ignored test of that name in a process of its own, where the log is not yet in place.
    fn run_alone(name: &str, settings: &[(&str, &str)], redirect: &str) -> Output {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("exec \"$0\" \"$@\" {redirect}")]).arg(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "--nocapture", "--test-threads=1", &format!("telemetry::log::tests::{name}")]);
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("MC_")) {
            command.env_remove(name);
        }
        let output = command.envs(settings.iter().copied()).output().unwrap();
        assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
        output
    }

    #[test]
    #[ignore = "run by others in a process of its own"]
    fn child_logs_at_every_level() {
        assert!(install());
        tracing::trace!("a trace");
        tracing::debug!("a debug");
        tracing::info!(size = 3, "an info");
        tracing::warn!("a {}", "warning\nforged");
        tracing::error!("an error");
        tracing::error!(target: "elsewhere", "of others");
        tracing::error!(target: "transfer_engine_of_others", "of others");
    }

    fn levels_in(text: &str) -> String {
        let lines = text.lines().filter(|line| line.contains(" telemetry::log::tests: "));
        lines.map(|line| line.split(' ').nth(2).unwrap().to_string()).collect()
    }

    #[test]
    fn lines_go_to_standard_error_from_the_level_of_the_environment_on() {
        for (level, expected) in
            [(None, "WE"), (Some("ERROR"), "E"), (Some("INFO"), "IWE"), (Some("TRACE"), "TDIWE"), (Some("x"), "WE")]
        {
            let settings: Vec<_> = level.map(|level| ("MC_LOG_LEVEL", level)).into_iter().collect();
            let output = run_alone("child_logs_at_every_level", &settings, "");
            let (stdout, stderr) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
            assert_eq!(levels_in(&stderr), expected, "{stderr}");
            assert!(!stdout.contains("an error") && !stderr.contains("of others"), "{stdout}{stderr}");
            assert!(expected == "E" || stderr.contains(": a warning\\nforged\n"), "{stderr}");
            assert!(!expected.contains('I') || stderr.contains(": an info size=3\n"), "{stderr}");
        }
    }

    #[test]
    fn a_full_or_closed_standard_error_is_ignored() {
        run_alone("child_logs_at_every_level", &[], "2>/dev/full");
        run_alone("child_logs_at_every_level", &[], "2>&-");
    }

    #[test]
    fn a_directory_takes_the_lines_into_a_file() {
        let directory = std::env::temp_dir().join(format!("transfer_engine_log_test.{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let output = run_alone("child_logs_at_every_level", &[("MC_LOG_DIR", directory.to_str().unwrap())], "");
        let files: Vec<_> = std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()).collect();
        let text = std::fs::read_to_string(&files[0]).unwrap();
        std::fs::remove_dir_all(&directory).unwrap();
        assert_eq!((files.len(), levels_in(&text).as_str(), output.stderr.as_slice()), (1, "WE", &b""[..]));
        let name = files[0].file_name().unwrap().to_str().unwrap();
        assert!(name.starts_with("transfer_engine.") && name.ends_with(".log"), "{name}");
    }

    #[test]
    fn a_directory_that_is_not_there_is_told_and_standard_error_used() {
        let output = run_alone("child_logs_at_every_level", &[("MC_LOG_DIR", "/nonexistent/directory")], "");
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(stderr.contains("MC_LOG_DIR: cannot open /nonexistent/directory/transfer_engine."), "{stderr}");
        assert_eq!(levels_in(&stderr), "WE");
    }

    #[test]
    #[ignore = "run by others in a process of its own"]
    fn child_reads_a_bad_environment_twice() {
        assert!(install());
        crate::config::Config::from_environment();
        crate::config::Config::from_environment();
    }

    #[test]
    fn problems_of_the_environment_are_logged_once_a_process() {
        let settings = [("MC_HANDSHAKE_PORT", "abc"), ("MC_TCP_LANE_PER_PEER", "4")];
        let output = run_alone("child_reads_a_bad_environment_twice", &settings, "");
        let stderr = String::from_utf8(output.stderr).unwrap();
        let count = |text| stderr.matches(text).count();
        assert_eq!(
            count(" config: MC_HANDSHAKE_PORT=\"abc\" is not a whole number from 1 to 65535; the default holds: 12001\n"),
            1,
            "{stderr}"
        );
        assert_eq!(count("MC_TCP_LANE_PER_PEER is not known and has no effect; is MC_TCP_LANES_PER_PEER meant?\n"), 1, "{stderr}");
    }

    #[test]
    #[ignore = "run by others in a process of its own"]
    fn child_decides_an_error() {
        assert!(install());
        SegmentDescriptor::decode(b"{", &"the test").map(drop).unwrap_err();
    }

    #[test]
    fn lines_of_errors_name_the_room_that_decided_them() {
        let output = run_alone("child_decides_an_error", &[], "");
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(stderr.contains(" metadata::decode: malformed JSON: the segment descriptor of 1 bytes from the test"), "{stderr}");
        assert!(!stderr.contains("room"), "{stderr}");
    }

    #[test]
    #[ignore = "run by others in a process of its own"]
    fn child_has_a_subscriber_of_its_own() {
        tracing::subscriber::set_global_default(tracing::subscriber::NoSubscriber::new()).unwrap();
        assert!(!install());
        assert!(!install());
        let error = set_callback(Some(Box::new(|_, _, _| {})), Level::TRACE).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        tracing::error!("to the other subscriber");
    }

    #[test]
    fn a_subscriber_of_the_host_stays_in_place() {
        let output = run_alone("child_has_a_subscriber_of_its_own", &[], "");
        assert_eq!(output.stderr, b"");
    }

    #[test]
    fn lines_have_time_level_thread_part_and_text() {
        let time = UNIX_EPOCH + Duration::new(1_795_964_645, 123_456_789);
        assert_eq!(
            format_line(time, Level::WARN, 12345, "registry", "text"),
            "2026-11-29 15:04:05.123456Z W 12345 registry: text\n"
        );
        assert!(
            format_line(UNIX_EPOCH - Duration::from_secs(1), Level::ERROR, 1, "a", "b")
                .starts_with("1970-01-01 00:00:00.000000Z E 1")
        );
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (days, date) in [
            (0, (1970, 1, 1)),
            (58, (1970, 2, 28)),
            (59, (1970, 3, 1)),
            (11_016, (2000, 2, 29)),
            (11_017, (2000, 3, 1)),
            (20_512, (2026, 2, 28)),
            (20_513, (2026, 3, 1)),
            (47_541, (2100, 3, 1)),
            (19_722, (2023, 12, 31)),
        ] {
            assert_eq!(civil_date(days), date, "{days}");
        }
    }

    #[test]
    fn targets_lose_the_name_of_the_crate() {
        assert_eq!(part("transfer_engine::registry::index"), Some("registry::index"));
        assert_eq!(part("transfer_engine"), Some("transfer_engine"));
        assert_eq!((part("transfer_engines"), part("tokio"), part("")), (None, None, None));
    }

    #[test]
    fn the_callback_gets_what_its_level_asks_for() {
        let _turn = TURN.lock();
        let (lines, callback) = collect("marker-levels");
        set_callback(Some(callback), Level::INFO).unwrap();
        let formatted = AtomicUsize::new(0);
        struct Costly<'a>(&'a AtomicUsize);
        impl fmt::Display for Costly<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fetch_add(1, Ordering::Relaxed);
                f.write_str("marker-levels")
            }
        }
        let log = || {
            tracing::debug!("{}", Costly(&formatted));
            tracing::info!("{}", Costly(&formatted));
            tracing::error!("{}", Costly(&formatted));
        };
        log();
        assert_eq!(formatted.load(Ordering::Relaxed), 2, "disabled events are not formatted");
        let (_, callback) = collect("nothing");
        set_callback(Some(callback), Level::ERROR).unwrap();
        log();
        assert_eq!(formatted.load(Ordering::Relaxed), 3);
        set_callback(None, Level::WARN).unwrap();
        let text = "marker-levels".to_string();
        let part = "telemetry::log::tests".to_string();
        assert_eq!(*lines.lock(), [(Level::INFO, part.clone(), text.clone()), (Level::ERROR, part, text)]);
    }

    #[test]
    fn the_callback_gets_the_room_that_decided_an_error() {
        let _turn = TURN.lock();
        let (lines, callback) = collect("marker-room");
        set_callback(Some(callback), Level::WARN).unwrap();
        Error::new(Code::Limit, "marker-room");
        set_callback(None, Level::WARN).unwrap();
        assert_eq!(*lines.lock(), [(Level::WARN, "telemetry::log".to_string(), "limit reached: marker-room".to_string())]);
    }

    #[test]
    fn logging_and_replacing_from_within_the_callback_neither_recurse_nor_hang() {
        let _turn = TURN.lock();
        let calls = Arc::new(AtomicUsize::new(0));
        let refusals = Arc::new(AtomicUsize::new(0));
        let (count, refused) = (calls.clone(), refusals.clone());
        let callback = Box::new(move |_, _: &str, text: &str| {
            if text.contains("marker-reentrance") {
                count.fetch_add(1, Ordering::Relaxed);
                Error::new(Code::Internal, "marker-reentrance again");
                if set_callback(None, Level::TRACE).is_err() {
                    refused.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        set_callback(Some(callback), Level::WARN).unwrap();
        tracing::warn!("marker-reentrance");
        tracing::warn!("marker-reentrance");
        set_callback(None, Level::WARN).unwrap();
        assert_eq!((calls.load(Ordering::Relaxed), refusals.load(Ordering::Relaxed)), (2, 2));
    }

    #[test]
    fn a_panicking_callback_harms_nobody() {
        let _turn = TURN.lock();
        let calls = Arc::new(AtomicUsize::new(0));
        let count = calls.clone();
        let callback = Box::new(move |_, _: &str, text: &str| {
            if text.contains("marker-panic") {
                count.fetch_add(1, Ordering::Relaxed);
                std::panic::resume_unwind(Box::new("on purpose"));
            }
        });
        set_callback(Some(callback), Level::WARN).unwrap();
        tracing::warn!("marker-panic");
        tracing::warn!("marker-panic");
        set_callback(None, Level::WARN).unwrap();
        assert_eq!(calls.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn replacing_waits_for_the_callback_that_runs() {
        let _turn = TURN.lock();
        let (entered, has_entered) = mpsc::channel();
        let (release, released) = mpsc::channel::<()>();
        let released = Mutex::new(released);
        let done = Arc::new(AtomicBool::new(false));
        let set_done = done.clone();
        let callback = Box::new(move |_, _: &str, text: &str| {
            if text.contains("marker-replace") {
                entered.send(()).unwrap();
                released.lock().recv().unwrap();
                set_done.store(true, Ordering::SeqCst);
            }
        });
        set_callback(Some(callback), Level::WARN).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| tracing::warn!("marker-replace"));
            has_entered.recv().unwrap();
            let replacing = scope.spawn(|| {
                set_callback(None, Level::WARN).unwrap();
                done.load(Ordering::SeqCst)
            });
            std::thread::sleep(Duration::from_millis(20));
            release.send(()).unwrap();
            assert!(replacing.join().unwrap(), "replaced while the callback was running");
        });
    }
}
