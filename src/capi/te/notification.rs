//! Notifications
//!
//! Short messages between engines: a name and a text. te_transfer_options can send one after a transfer.

use std::ffi::c_char;

use crate::capi::te::engine::te_engine;
use crate::capi::te::segment::te_segment;
use crate::capi::te::status::te_status;
use crate::capi::te::{call, with};
use crate::capi::{guard, messages, text};

/// A message.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct te_notification {
    /// What it is about, as its sender chose.
    pub name: *mut c_char,
    /// The text.
    pub message: *mut c_char,
}

/// Sends a message to the engine of a segment, and returns when it has arrived there. Blocks as long as
/// te_open_segment.
///
/// Errors: TE_ERR_DNS and TE_ERR_SOCKET if the peer cannot be reached; TE_ERR_METADATA if it refuses. After a
/// failure of the connection it is not known whether the message arrived; it never arrives twice.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_notify(
    engine: *mut te_engine,
    segment: te_segment,
    name: *const c_char,
    message: *const c_char,
) -> te_status {
    with(engine, |engine| {
        // SAFETY: the caller passes NUL-terminated texts.
        engine.send_notification(segment, &unsafe { text::read_notification(name, message) }?)
    })
}

/// Sends a message to the engine that is called `peer`, as te_notify; its segment need not be open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_notify_name(
    engine: *mut te_engine,
    peer: *const c_char,
    name: *const c_char,
    message: *const c_char,
) -> te_status {
    with(engine, |engine| {
        // SAFETY: the caller passes NUL-terminated texts.
        let (peer, notification) = unsafe { (text::read(peer, "peer")?, text::read_notification(name, message)?) };
        engine.send_notification_to(peer, &notification)
    })
}

/// Takes all messages that have arrived at this engine, in the order of their arrival. Never blocks.
///
/// `list` receives an array of `count` messages, which the caller frees with te_free_notifications, or NULL
/// if there are none. Errors: TE_ERR_MEMORY; the messages are lost then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_take_notifications(
    engine: *mut te_engine,
    list: *mut *mut te_notification,
    count: *mut usize,
) -> te_status {
    with(engine, |engine| {
        guard::check_output(list, "list")?;
        guard::check_output(count, "count")?;
        let (messages, length) = messages::allocate(&engine.take_notifications())?;
        // SAFETY: neither is NULL, and the caller passes places for a pointer and a number.
        unsafe {
            list.write(messages.cast());
            count.write(length);
        }
        Ok(())
    })
}

/// Frees what te_take_notifications gave. (NULL, 0) is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_free_notifications(list: *mut te_notification, count: usize) {
    // SAFETY: the caller passes what `te_take_notifications` gave, once.
    call(|| unsafe { messages::free(list.cast(), count) });
}
