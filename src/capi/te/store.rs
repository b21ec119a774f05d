//! Metadata servers
//!
//! A metadata server keeps texts under keys; engines look after what they keep there by themselves. These
//! functions are for programs that look for or clean up what is there, with or without an engine. Keys and
//! values are used as they are: engines put "mooncake/" and MC_METADATA_CLUSTER_ID before theirs.
//!
//! Each call ends within five seconds, whatever the server does.

use std::ffi::c_char;

use crate::capi::te::call;
use crate::capi::te::status::{TE_OK, te_status};
use crate::capi::{guard, handle, text};
use crate::config::Config;
use crate::error::Result;
use crate::metadata::store;

/// A metadata server that is in use.
pub struct te_store {
    _private: [u8; 0],
}

/// Makes a metadata server ready for use. Free it with te_store_close. Asks nobody: a server that is away
/// shows at the first call.
///
/// `uri` is as in te_engine_options. Errors: TE_ERR_NOT_IMPLEMENTED for an unknown kind of server;
/// TE_ERR_INVALID_ARGUMENT for what names none, such as "P2PHANDSHAKE".
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_store_open(uri: *const c_char, store: *mut *mut te_store) -> te_status {
    call(|| {
        guard::check_output(store, "store")?;
        // SAFETY: the caller passes a NUL-terminated text.
        let opened = store::connect(unsafe { text::read(uri, "uri") }?, &Config::from_environment())?;
        let key = handle::insert_store(opened);
        // SAFETY: `store` is not NULL, and the caller passes a place for a pointer.
        unsafe { store.write(key.as_pointer().cast()) };
        Ok(())
    })
}

/// Closes a metadata server: its connections end, and calls on it give TE_ERR_INVALID_HANDLE. Waits for those
/// that are under way. NULL is fine and does nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_store_close(store: *mut te_store) -> te_status {
    call(|| if store.is_null() { Ok(()) } else { handle::close_store(store as u64) })
}

/// Asks for the text under a key. `value` receives a text that the caller frees with te_free_text, or NULL if
/// there is none under the key.
///
/// Errors: TE_ERR_METADATA if the server cannot be asked.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_store_get(store: *mut te_store, key: *const c_char, value: *mut *mut c_char) -> te_status {
    with_store(store, |store| {
        guard::check_output(value, "value")?;
        // SAFETY: the caller passes a NUL-terminated text.
        match store.get(unsafe { text::read(key, "key") }?)? {
            // SAFETY: the caller passes a place for a pointer.
            Some(found) => unsafe { text::give(value, "value", || Ok(found)) },
            None => {
                // SAFETY: `value` is not NULL, and the caller passes a place for a pointer.
                unsafe { value.write(std::ptr::null_mut()) };
                Ok(())
            }
        }
    })
}

/// Puts a text under a key, in place of what was there. Servers of Mooncake expect JSON. Line breaks at the
/// end may be left out.
///
/// Errors: TE_ERR_METADATA; then it is not known whether it was put there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_store_put(store: *mut te_store, key: *const c_char, value: *const c_char) -> te_status {
    with_store(store, |store| {
        // SAFETY: the caller passes NUL-terminated texts.
        let (key, value) = unsafe { (text::read(key, "key")?, text::read(value, "value")?) };
        store.put(key, &[value.into()])
    })
}

/// Removes what is under a key. That there is nothing is no error.
///
/// Errors: TE_ERR_METADATA; then it is not known whether it was removed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_store_remove(store: *mut te_store, key: *const c_char) -> te_status {
    // SAFETY: the caller passes a NUL-terminated text.
    with_store(store, |store| store.remove(unsafe { text::read(key, "key") }?))
}

/// Runs a function of this section on a store. What it asks the server ends within five seconds together.
fn with_store(store: *mut te_store, body: impl FnOnce(&handle::OpenStore) -> Result<()>) -> te_status {
    guard::call(guard::negative, || {
        let call = handle::enter_store(store as u64)?;
        store::bounded(|| body(call.target())).map(|()| TE_OK)
    })
}
