//! Lists of notifications that C receives and frees: one array and two strings for each, all from `malloc`,
//! so that upstream's callers may free them by themselves.

use std::ffi::{c_char, c_void};

use crate::capi::mooncake::notify_msg;
use crate::capi::te::notification::te_notification;
use crate::capi::{guard, text};
use crate::error::{Code, Error, Result};
use crate::handshake::Notification;

/// A notification in C, in both interfaces.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Message {
    name: *mut c_char,
    text: *mut c_char,
}

const _: () = {
    assert!(size_of::<Message>() == size_of::<notify_msg>() && size_of::<Message>() == size_of::<te_notification>());
    assert!(std::mem::offset_of!(te_notification, message) == std::mem::offset_of!(notify_msg, msg));
    assert!(std::mem::offset_of!(te_notification, message) == std::mem::offset_of!(Message, text));
};

/// Copies notifications for C: the array and its length, NULL if it is 0. A text ends at its first NUL.
pub fn allocate(notifications: &[Notification]) -> Result<(*mut Message, usize)> {
    if notifications.is_empty() {
        return Ok((std::ptr::null_mut(), 0));
    }
    // SAFETY: calloc may be called with any size; all zeros are a valid array of messages.
    let array = unsafe { libc::calloc(notifications.len(), size_of::<Message>()) }.cast::<Message>();
    if array.is_null() {
        return Err(out_of_memory(size_of_val(notifications)));
    }
    for (index, notification) in notifications.iter().enumerate() {
        let message = Message { name: text::copy(&notification.name), text: text::copy(&notification.message) };
        // SAFETY: the array has this element.
        unsafe { array.add(index).write(message) };
        if message.name.is_null() || message.text.is_null() {
            // SAFETY: the array is ours, and what has not been filled is NULL.
            unsafe { free(array, notifications.len()) }?;
            return Err(out_of_memory(notification.name.len() + notification.message.len()));
        }
    }
    Ok((array, notifications.len()))
}

/// Frees what [`allocate`] gave.
///
/// # Safety
/// `array` must be what `allocate` gave, not freed before, and `count` its length.
pub unsafe fn free(array: *mut Message, count: usize) -> Result<()> {
    guard::check_array(array, size_of::<Message>(), count, "the list of messages")?;
    for index in 0..count {
        // SAFETY: the array has this element, whose texts are from malloc or NULL.
        unsafe {
            let message = array.add(index).read();
            libc::free(message.name.cast());
            libc::free(message.text.cast());
        }
    }
    // SAFETY: the array is from malloc or NULL.
    unsafe { libc::free(array.cast::<c_void>()) };
    Ok(())
}

fn out_of_memory(size: usize) -> Error {
    Error::new(Code::Memory, format!("no memory for {size} bytes of notifications; they are lost"))
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    #[test]
    fn messages_arrive_as_strings_of_c() {
        let notifications: Vec<_> =
            (0..3).map(|index| Notification { name: format!("name {index}"), message: "m".repeat(index) }).collect();
        let (array, count) = allocate(&notifications).unwrap();
        // SAFETY: the array has three elements with texts, and is freed once.
        unsafe {
            for (index, notification) in notifications.iter().enumerate() {
                let message = array.add(index).read();
                assert_eq!(CStr::from_ptr(message.name).to_str().unwrap(), notification.name);
                assert_eq!(CStr::from_ptr(message.text).to_str().unwrap(), notification.message);
            }
            free(array, count).unwrap();
        }
    }

    #[test]
    fn no_messages_are_null_and_may_be_freed() {
        let (array, count) = allocate(&[]).unwrap();
        assert!(array.is_null() && count == 0);
        // SAFETY: NULL with no elements may be freed.
        unsafe {
            free(array, count).unwrap();
            assert!(free(array, 2).is_err());
        }
    }
}
