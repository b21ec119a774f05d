//! Strings that C passes and receives.
//!
//! Names must be UTF-8. Locations and the texts of notifications may be any bytes, as upstream's callers are
//! used to; what is not UTF-8 in them is replaced by U+FFFD, since they travel in JSON.

use std::ffi::{CStr, CString, c_char};
use std::sync::Arc;

use crate::capi::guard;
use crate::error::{Code, Error, Result};
use crate::handshake::Notification;

/// A text that must be there and be UTF-8. `name` is that of the argument.
///
/// # Safety
/// `text` must be NULL or end with a NUL, and stay as it is for `'a`.
pub unsafe fn read<'a>(text: *const c_char, name: &str) -> Result<&'a str> {
    // SAFETY: as for this function.
    unsafe { read_optional(text, name) }?.ok_or_else(|| guard::invalid(format!("{name} is NULL")))
}

/// A text that may be NULL, else must be UTF-8.
///
/// # Safety
/// As for [`read`].
pub unsafe fn read_optional<'a>(text: *const c_char, name: &str) -> Result<Option<&'a str>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: as for this function.
    let text = unsafe { CStr::from_ptr(text) };
    let text = text.to_str().map_err(|error| {
        guard::invalid(format!("{name} is not UTF-8 after its first {} bytes: {:?}", error.valid_up_to(), text))
    })?;
    Ok(Some(text))
}

/// A location; `*` for NULL.
///
/// # Safety
/// As for [`read`].
pub unsafe fn read_location(text: *const c_char) -> Arc<str> {
    if text.is_null() {
        return "*".into();
    }
    // SAFETY: as for this function.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into()
}

/// A notification, of which both texts must be there.
///
/// # Safety
/// As for [`read`].
pub unsafe fn read_notification(name: *const c_char, message: *const c_char) -> Result<Notification> {
    if name.is_null() || message.is_null() {
        return Err(guard::invalid("the name or the text of a notification is NULL"));
    }
    // SAFETY: as for this function.
    let (name, message) = unsafe { (CStr::from_ptr(name), CStr::from_ptr(message)) };
    Ok(Notification { name: name.to_string_lossy().into(), message: message.to_string_lossy().into() })
}

/// How many of `room` bytes a text takes, no character of which is cut in two.
fn length_within(text: &str, room: usize) -> usize {
    let fits = |length: &usize| text.is_char_boundary(*length);
    (0..=text.len().min(room)).rev().find(fits).unwrap_or(0)
}

/// Writes a text into a buffer of `size` bytes, cut where it does not fit, always with a NUL at its end.
///
/// # Safety
/// `buffer` must be NULL or have `size` bytes.
pub unsafe fn write_cut(buffer: *mut c_char, size: usize, text: &str) -> Result<()> {
    if buffer.is_null() || size == 0 {
        return Err(guard::invalid(format!("the buffer for a text is {buffer:p} with {size} bytes; it must have at least one")));
    }
    let length = length_within(text, size - 1);
    // SAFETY: the buffer has room for as many bytes and the NUL.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), buffer, length);
        buffer.add(length).write(0);
    }
    Ok(())
}

/// Writes a text with a NUL at its end into a buffer of `size` bytes, or nothing if it does not fit.
///
/// # Safety
/// As for [`write_cut`].
pub unsafe fn write_whole(buffer: *mut c_char, size: usize, text: &str) -> Result<()> {
    if !buffer.is_null() && size <= text.len() {
        return Err(guard::invalid(format!("the buffer has {size} bytes, but \"{text}\" takes {}", text.len() + 1)));
    }
    // SAFETY: as for this function.
    unsafe { write_cut(buffer, size, text) }
}

/// A copy of a text from `malloc`, with a NUL at its end; C sees it end at its first NUL. NULL if there is no memory.
pub fn copy(text: &str) -> *mut c_char {
    // SAFETY: malloc may be called with any size; the copy has room for the text and the NUL.
    unsafe {
        let copy = libc::malloc(text.len() + 1).cast::<u8>();
        if !copy.is_null() {
            std::ptr::copy_nonoverlapping(text.as_ptr(), copy, text.len());
            copy.add(text.len()).write(0);
        }
        copy.cast()
    }
}

/// Gives C a text of any length, which it frees: see [`copy`].
///
/// # Safety
/// `output` must be NULL, or a place for a pointer if it is aligned.
pub unsafe fn give(output: *mut *mut c_char, name: &str, text: impl FnOnce() -> Result<String>) -> Result<()> {
    guard::check_output(output, name)?;
    let text = text()?;
    let copy = copy(&text);
    if copy.is_null() {
        return Err(Error::new(Code::Memory, format!("no memory for a text of {} bytes", text.len())));
    }
    // SAFETY: it is not NULL and aligned, and the caller passes a place for a pointer.
    unsafe { output.write(copy) };
    Ok(())
}

/// The texts of an array of C.
///
/// # Safety
/// `texts` must have `count` elements, each as for [`read`].
pub unsafe fn read_array(texts: *const *const c_char, count: usize, name: &str) -> Result<Vec<String>> {
    guard::check_array(texts, size_of::<*const c_char>(), count, name)?;
    // SAFETY: as for this function.
    let element = |index| unsafe { read(texts.add(index).read_unaligned(), &format!("{name}[{index}]")).map(str::to_owned) };
    (0..count).map(element).collect()
}

/// A copy of a text with a NUL at its end; a NUL inside becomes a space.
pub fn to_c(text: &str) -> CString {
    CString::new(text.replace('\0', " ")).unwrap_or_default()
}

/// A text in an array of `N` characters, cut where it does not fit, always with a NUL at its end; a NUL
/// inside becomes a space.
pub fn array<const N: usize>(text: &str) -> [c_char; N] {
    let mut array = [0; N];
    for (to, from) in array[..length_within(text, N - 1)].iter_mut().zip(text.bytes()) {
        *to = if from == 0 { b' ' } else { from } as c_char;
    }
    array
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_buffer(buffer: &[c_char]) -> &str {
        // SAFETY: the functions under test have put a NUL into the buffer.
        unsafe { CStr::from_ptr(buffer.as_ptr()) }.to_str().unwrap()
    }

    #[test]
    fn names_must_be_there_and_be_utf8() {
        // SAFETY: the texts are NULL or end with a NUL.
        unsafe {
            assert!(read(std::ptr::null(), "name").unwrap_err().message().contains("name is NULL"));
            assert_eq!(read_optional(std::ptr::null(), "name").unwrap(), None);
            assert_eq!(read(c"grüße".as_ptr(), "name").unwrap(), "grüße");
            let error = read(c"ab\xff".as_ptr(), "name").unwrap_err();
            assert!(error.message().contains("name is not UTF-8 after its first 2 bytes"), "{error}");
        }
    }

    #[test]
    fn locations_and_notifications_may_be_any_bytes() {
        // SAFETY: the texts are NULL or end with a NUL.
        unsafe {
            assert_eq!(&*read_location(std::ptr::null()), "*");
            assert_eq!(&*read_location(c"cpu:\xff0".as_ptr()), "cpu:\u{fffd}0");
            let notification = read_notification(c"\xfe".as_ptr(), c"".as_ptr()).unwrap();
            assert_eq!(notification, Notification { name: "\u{fffd}".into(), message: "".into() });
            assert!(read_notification(c"a".as_ptr(), std::ptr::null()).is_err());
            assert!(read_notification(std::ptr::null(), c"a".as_ptr()).is_err());
        }
    }

    #[test]
    fn a_cut_text_always_ends_with_a_nul() {
        let mut buffer = [1; 8];
        // SAFETY: the sizes are not above that of the buffer.
        unsafe {
            for (size, written) in [(1, ""), (2, "a"), (6, "abcde"), (7, "abcdef"), (8, "abcdef")] {
                buffer.fill(1);
                write_cut(buffer.as_mut_ptr(), size, "abcdef").unwrap();
                assert_eq!(read_buffer(&buffer), written);
                assert!(buffer[size..].iter().all(|byte| *byte == 1), "nothing is written beyond {size} bytes");
            }
            assert!(write_cut(buffer.as_mut_ptr(), 0, "a").is_err());
            assert!(write_cut(std::ptr::null_mut(), 8, "a").is_err());
        }
    }

    #[test]
    fn a_text_that_must_fit_is_written_whole_or_not_at_all() {
        let mut buffer = [1; 8];
        // SAFETY: the sizes are not above that of the buffer.
        unsafe {
            let error = write_whole(buffer.as_mut_ptr(), 6, "abcdef").unwrap_err();
            assert!(error.message().contains("takes 7"), "{error}");
            assert_eq!(buffer, [1; 8]);
            write_whole(buffer.as_mut_ptr(), 7, "abcdef").unwrap();
            assert!(write_whole(std::ptr::null_mut(), 7, "abcdef").is_err());
        }
        assert_eq!(read_buffer(&buffer), "abcdef");
    }

    #[test]
    fn no_character_is_cut_in_two() {
        let mut buffer = [1; 8];
        for (size, written) in [(2, ""), (3, "\u{fc}"), (4, "\u{fc}"), (5, "\u{fc}"), (6, "\u{fc}\u{20ac}")] {
            buffer.fill(1);
            // SAFETY: the sizes are not above that of the buffer.
            unsafe { write_cut(buffer.as_mut_ptr(), size, "\u{fc}\u{20ac}") }.unwrap();
            assert_eq!(read_buffer(&buffer), written);
        }
        assert_eq!(read_buffer(&array::<3>("a\u{fc}")), "a");
        assert_eq!(read_buffer(&array::<4>("a\u{fc}")), "a\u{fc}");
    }

    #[test]
    fn an_array_keeps_room_for_the_nul() {
        assert_eq!(read_buffer(&array::<4>("abcdef")), "abc");
        assert_eq!(read_buffer(&array::<4>("ab")), "ab");
        assert_eq!(read_buffer(&array::<4>("a\0b")), "a b");
    }
}
