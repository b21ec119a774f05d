//! A last deed before the process ends: at `exit()`, and on SIGTERM and SIGINT. Nothing happens unless
//! [`run_at_end`] is called.
//!
//! The handler writes the number of the signal into a pipe, and a thread that takes no signals reads it, does
//! the deed, and ends the process with 128 plus the number. The program goes on meanwhile, since a thread
//! that were stopped in the handler might hold a lock that the deed needs. If it calls `exit()`, that waits
//! for the thread. The deed is done once, and only in the process that asked for it: in a child of `fork()`
//! that did not ask again, a signal ends the process at once with 128 plus the number.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::sync::{Once, OnceLock};

use crate::sys::{fork, thread};

/// The generation of the process that has called, so that one thread of it sets things up.
static CLAIMED: AtomicU32 = AtomicU32::new(0);
/// The generation of the process whose thread reads the pipe; 0 if there is none. Set after [`PIPE`].
static WATCHED: AtomicU32 = AtomicU32::new(0);
/// Where the handler writes.
static PIPE: AtomicI32 = AtomicI32::new(-1);
/// Whether a signal has arrived, so that the thread is going to end the process.
static ENDING: AtomicBool = AtomicBool::new(false);
static DEED: OnceLock<fn()> = OnceLock::new();
static DONE: Once = Once::new();

/// Has `deed` run when the process ends by `exit()`, SIGTERM or SIGINT; the process's handlers of these
/// signals are replaced. Calls after the first one do nothing, except in a child of `fork()`, where the first
/// one counts anew. `deed` is the same for the life of the program, and must end within bounded time.
///
/// # Errors
/// What the system said about a pipe, a thread or a handler. The call can be repeated.
pub fn run_at_end(deed: fn()) -> io::Result<()> {
    let here = fork::generation();
    let before = CLAIMED.load(Ordering::Acquire);
    if before == here || CLAIMED.compare_exchange(before, here, Ordering::AcqRel, Ordering::Acquire).is_err() {
        return Ok(());
    }
    DEED.get_or_init(|| deed);
    install(here).inspect_err(|_| CLAIMED.store(before, Ordering::Release))
}

fn install(here: u32) -> io::Result<()> {
    static AT_EXIT: AtomicBool = AtomicBool::new(false);
    let (reader, writer) = pipe()?;
    thread::spawn("te-end", move || watch(reader))?;
    // The write end stays open for as long as the process lives. In a child it takes the place of the parent's.
    PIPE.store(writer.into_raw_fd(), Ordering::Release);
    WATCHED.store(here, Ordering::Release);
    // SAFETY: the function may be called when the process exits.
    if !AT_EXIT.swap(true, Ordering::AcqRel) && unsafe { libc::atexit(end_by_exit) } != 0 {
        AT_EXIT.store(false, Ordering::Release);
        return Err(io::Error::other("atexit has no room"));
    }
    for signal in [libc::SIGTERM, libc::SIGINT] {
        // SAFETY: all zeros are a valid action, and the handler does only what is safe in one.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = end_by_signal as extern "C" fn(i32) as usize;
            action.sa_flags = libc::SA_RESTART;
            libc::sigfillset(&mut action.sa_mask);
            if libc::sigaction(signal, &action, std::ptr::null_mut()) != 0 {
                return Err(io::Error::last_os_error());
            }
        }
    }
    Ok(())
}

fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut ends = [0; 2];
    // SAFETY: the array has room for two descriptors, which are ours alone.
    unsafe {
        if libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok((OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])))
    }
}

fn watch(reader: OwnedFd) {
    let mut signal = 0u8;
    // SAFETY: the buffer has room for the byte that is read.
    while unsafe { libc::read(reader.as_raw_fd(), (&raw mut signal).cast(), 1) } != 1 {
        // Nothing but an interruption can come between: the write end stays open.
    }
    do_deed();
    // SAFETY: ends the process.
    unsafe { libc::_exit(128 + i32::from(signal)) }
}

fn do_deed() {
    DONE.call_once(|| {
        if let Some(deed) = DEED.get() {
            deed();
        }
    });
}

extern "C" fn end_by_exit() {
    if WATCHED.load(Ordering::Acquire) != fork::generation() {
        return;
    }
    do_deed();
    while ENDING.load(Ordering::Acquire) {
        // SAFETY: waits for the thread that ends the process with the status of the signal.
        unsafe { libc::pause() };
    }
}

extern "C" fn end_by_signal(signal: i32) {
    // SAFETY: `_exit` and `write` are safe in a signal handler, and so is looking at the generation; errno is put back.
    unsafe {
        if WATCHED.load(Ordering::Acquire) != fork::generation() {
            libc::_exit(128 + signal);
        }
        ENDING.store(true, Ordering::Release);
        let error = libc::__errno_location();
        let before = *error;
        libc::write(PIPE.load(Ordering::Acquire), (&raw const signal).cast(), 1);
        *error = before;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::fork::tests::fork_and_run;

    /// Where the deed of the tests leaves a byte.
    static TRACE: AtomicI32 = AtomicI32::new(-1);

    fn leave_trace() {
        // SAFETY: the buffer has the byte that is written.
        unsafe { libc::write(TRACE.load(Ordering::SeqCst), c"x".as_ptr().cast(), 1) };
    }

    /// Runs `body` in a child. Its exit code, and how often the deed was done in it or in its children.
    fn run(body: impl FnOnce() -> i32) -> (i32, usize) {
        use std::io::Read;
        let (reader, writer) = pipe().unwrap();
        let code = fork_and_run(|| {
            TRACE.store(writer.as_raw_fd(), Ordering::SeqCst);
            body()
        });
        drop(writer);
        let mut trace = Vec::new();
        std::fs::File::from(reader).read_to_end(&mut trace).unwrap();
        (code, trace.len())
    }

    fn raise(signal: i32) {
        // SAFETY: the process wants the signal.
        unsafe { libc::raise(signal) };
    }

    fn exit(code: i32) -> i32 {
        // SAFETY: ends a process that no other thread of the tests is part of.
        unsafe { libc::exit(code) }
    }

    fn wait_for_the_end() -> i32 {
        loop {
            // SAFETY: waits for a signal.
            unsafe { libc::pause() };
        }
    }

    #[test]
    fn a_signal_ends_the_process_after_the_deed() {
        for signal in [libc::SIGTERM, libc::SIGINT] {
            let ended = run(|| {
                run_at_end(leave_trace).unwrap();
                run_at_end(leave_trace).unwrap();
                raise(signal);
                wait_for_the_end()
            });
            assert_eq!(ended, (128 + signal, 1));
        }
    }

    #[test]
    fn exit_does_the_deed_and_keeps_its_code() {
        let ended = run(|| {
            run_at_end(leave_trace).unwrap();
            exit(5)
        });
        assert_eq!(ended, (5, 1));
    }

    #[test]
    fn a_program_that_exits_on_a_signal_ends_by_the_signal() {
        let ended = run(|| {
            run_at_end(leave_trace).unwrap();
            raise(libc::SIGTERM);
            exit(5)
        });
        assert_eq!(ended, (128 + libc::SIGTERM, 1));
    }

    #[test]
    fn a_child_that_did_not_ask_does_no_deed() {
        let ended = run(|| {
            run_at_end(leave_trace).unwrap();
            let by_signal = fork_and_run(|| {
                raise(libc::SIGTERM);
                wait_for_the_end()
            });
            let by_exit = fork_and_run(|| exit(6));
            if (by_signal, by_exit) == (128 + libc::SIGTERM, 6) { 42 } else { 1 }
        });
        assert_eq!(ended, (42, 0));
    }

    #[test]
    fn a_child_that_asks_anew_does_the_deed() {
        let ended = run(|| {
            run_at_end(leave_trace).unwrap();
            let by_signal = fork_and_run(|| {
                run_at_end(leave_trace).unwrap();
                raise(libc::SIGTERM);
                wait_for_the_end()
            });
            let by_exit = fork_and_run(|| {
                run_at_end(leave_trace).unwrap();
                exit(6)
            });
            if (by_signal, by_exit) == (128 + libc::SIGTERM, 6) { 42 } else { 1 }
        });
        assert_eq!(ended, (42, 2));
    }
}
