//! What every function of the C interfaces does: find the engine, stop panics, turn an error into a number,
//! and keep its text.
//!
//! [`call`] is the way in. A panic inside becomes [`Code::Internal`] with the panic's text and one line in
//! the log; nothing is printed, since a panic hook that is set at the first call keeps quiet for panics
//! inside a call and leaves all others to the hook that was there. The text of the last error belongs to a
//! thread, and is replaced by its next failure only. Cost of a call that succeeds: some thread-local
//! arithmetic and, with an engine, what [`handle::enter`] costs.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ffi::{c_char, c_void};
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

use crate::capi::{handle, text};
use crate::engine::Engine;
use crate::error::{Code, Error, Result};
use crate::telemetry::log;

/// Room for the text of an error; longer ones are cut.
const TEXT_SIZE: usize = 2048;

thread_local! {
    /// It stays where it is for the life of the thread: programs ask for it in the same statement that calls
    /// the function.
    static LAST_ERROR: RefCell<Box<[c_char; TEXT_SIZE]>> = RefCell::new(Box::new([0; TEXT_SIZE]));
    /// How many calls this thread is inside: more than one when a callback calls the library.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    /// Where the panic that this thread unwinds from happened.
    static PANIC_PLACE: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs the body of a C function. `failed` makes the function's value of an error, whose text becomes the
/// thread's last one.
pub fn call<R>(failed: impl FnOnce(&Error) -> R, body: impl FnOnce() -> Result<R>) -> R {
    prepare_process();
    DEPTH.set(DEPTH.get() + 1);
    // Nothing of the body is looked at after a panic but the state of the engine, whose locks do not poison and whose invariants hold
    // between any two statements that can panic.
    let outcome = panic::catch_unwind(AssertUnwindSafe(body));
    DEPTH.set(DEPTH.get() - 1);
    let error = match outcome {
        Ok(Ok(value)) => return value,
        Ok(Err(error)) => error,
        Err(payload) => Error::new(Code::Internal, panic_text(payload)),
    };
    keep_last_error(&error);
    failed(&error)
}

/// Like [`call`], for functions that work on an engine.
pub fn call_engine<R>(engine: *mut c_void, failed: impl FnOnce(&Error) -> R, body: impl FnOnce(&Engine) -> Result<R>) -> R {
    call(failed, || {
        let call = handle::enter(engine as u64)?;
        body(call.target())
    })
}

/// The number of an error for `te.h`, and for the functions of upstream whose errors are negative.
pub fn negative(error: &Error) -> i32 {
    error.code().number()
}

/// The number of an error for the functions of upstream whose errors are positive.
pub fn positive(error: &Error) -> i32 {
    error.code().status_number()
}

/// The text of this thread's last failure, at an address that is the same for the life of the thread.
pub fn last_error() -> *const c_char {
    // A thread whose locals are gone already has nothing to tell.
    LAST_ERROR.try_with(|text| text.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// An error for a bad argument.
pub fn invalid(message: impl Into<String>) -> Error {
    Error::new(Code::InvalidArgument, message)
}

/// Checks a pointer that the library is to write one value to.
pub fn check_output<T>(output: *mut T, name: &str) -> Result<()> {
    if output.is_null() {
        return Err(invalid(format!("{name} is NULL")));
    }
    if !output.is_aligned() {
        return Err(invalid(format!("{name} is {output:p}, which is not aligned to {} bytes", align_of::<T>())));
    }
    Ok(())
}

/// No process has as much memory. Without this bound a garbled count would make the library ask for a copy of that size, and end the
/// process when there is none.
const MOST_ARRAY_BYTES: usize = 1 << 48;

/// Checks an array of C, as far as can be without touching it.
pub fn check_array<T>(array: *const T, element_size: usize, count: usize, name: &str) -> Result<()> {
    if array.is_null() && count != 0 {
        return Err(invalid(format!("{name} is NULL, but has {count} elements")));
    }
    match element_size.checked_mul(count) {
        Some(size) if size < MOST_ARRAY_BYTES => Ok(()),
        _ => Err(invalid(format!("{name} cannot have {count} elements of {element_size} bytes"))),
    }
}

fn keep_last_error(error: &Error) {
    // A thread whose locals are gone already goes without.
    let _ = LAST_ERROR.try_with(|last| **last.borrow_mut() = text::array(&error.to_string()));
}

/// Puts the log and the quiet panic hook in place, once.
fn prepare_process() {
    static PREPARED: Once = Once::new();
    // The hook cannot be changed while this thread unwinds.
    if PREPARED.is_completed() || std::thread::panicking() {
        return;
    }
    PREPARED.call_once(|| {
        log::install();
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if DEPTH.get() == 0 {
                return previous(info);
            }
            let place = info.location().map(|place| place.to_string()).unwrap_or_default();
            let _ = PANIC_PLACE.try_with(|last| *last.borrow_mut() = place);
        }));
    });
}

fn panic_text(payload: Box<dyn Any + Send>) -> String {
    let text = match (payload.downcast_ref::<&str>(), payload.downcast_ref::<String>()) {
        (Some(text), _) => text,
        (_, Some(text)) => text.as_str(),
        _ => "a panic without text",
    };
    let place = PANIC_PLACE.try_with(|place| place.take()).unwrap_or_default();
    format!("{text} (at {place}); this is a defect of the library, please report it")
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    fn last_text() -> String {
        // SAFETY: the text ends with a NUL, and no call fails meanwhile on this thread.
        unsafe { CStr::from_ptr(last_error()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_becomes_an_internal_error_with_its_text() {
        let number = call(negative, || {
            let divisor = "0".len() - 1;
            Ok((100 / divisor) as i32)
        });
        assert_eq!(number, Code::Internal.number());
        assert!(last_text().contains("divide by zero"), "{}", last_text());
        assert!(last_text().contains("guard.rs"), "{}", last_text());
        assert_eq!(call(positive, || panic!("no luck {}", 7)), Code::Internal.status_number());
        assert!(last_text().contains("no luck 7"), "{}", last_text());
    }

    #[test]
    fn the_last_error_stays_through_successes_and_is_each_threads_own() {
        assert_eq!(last_text(), "");
        assert_eq!(call(negative, || Err::<i32, _>(Error::quiet(Code::Dns, "no host\0x"))), -101);
        assert_eq!(call(negative, || Ok(5)), 5);
        assert_eq!(last_text(), "name not resolved: no host x");
        std::thread::spawn(|| assert_eq!(last_text(), "")).join().unwrap();
        assert_eq!(call(positive, || Err::<i32, _>(Error::quiet(Code::Metadata, "second"))), 200);
        assert_eq!(last_text(), "metadata: second");
        let before = last_error();
        call(|_| (), || Err(Error::quiet(Code::Memory, "x".repeat(2 * TEXT_SIZE))));
        assert_eq!(last_error(), before);
        assert_eq!(last_text().len(), TEXT_SIZE - 1);
    }

    #[test]
    fn a_panic_outside_of_a_call_reaches_the_hook_that_was_there() {
        call(|_| (), || Ok(()));
        // The quiet hook leaves no place behind for a panic that it passed on.
        panic::catch_unwind(|| panic!("outside")).unwrap_err();
        assert_eq!(PANIC_PLACE.with(|place| place.borrow().clone()), "");
    }

    #[test]
    fn arrays_must_fit_into_memory() {
        let array = [0u8; 8];
        assert!(check_array(array.as_ptr(), 8, 1, "array").is_ok());
        for (element_size, count) in [(8, 1 << 45), (8, usize::MAX), (usize::MAX, 1), (48, usize::MAX / 48 + 1)] {
            assert!(check_array(array.as_ptr(), element_size, count, "array").is_err());
        }
    }

    #[test]
    fn outputs_must_be_places_for_a_value() {
        let mut value = 0u64;
        assert!(check_output(&raw mut value, "value").is_ok());
        assert!(check_output(std::ptr::null_mut::<u64>(), "value").is_err());
        assert!(check_output((&raw mut value).wrapping_byte_add(1), "value").is_err());
    }
}
