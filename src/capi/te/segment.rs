//! Segments
//!
//! A segment is the registered memory of one engine. Transfers name it by a number, which is valid in the
//! engine that opened it, for as long as that engine lives (or te_forget_segment is called for it). The
//! engine keeps what it knows of a segment, and looks anew by itself when a transfer fails because the peer
//! has changed or was started again.

use std::ffi::{c_char, c_int};

use crate::capi::te::engine::te_engine;
use crate::capi::te::memory::{te_memory_region, write_regions};
use crate::capi::te::status::te_status;
use crate::capi::te::with;
use crate::capi::{guard, text};

/// A segment.
pub type te_segment = u64;

/// The segment of the engine itself, which needs no opening.
pub const TE_LOCAL_SEGMENT: te_segment = 0;

/// Opens the segment of the engine that is called `name`: te_engine_address of the peer, or its `server_name`
/// where there is a metadata server. Gives the same number when it is open already.
///
/// Asks the peer, or the metadata server, and blocks for up to some seconds; for a minute if the peer takes
/// the connection and then says nothing, as a stopped process does. te_engine_destroy ends the wait. Leading
/// '/' are not part of a name. Errors: TE_ERR_INVALID_ARGUMENT for an empty name; TE_ERR_DNS and
/// TE_ERR_SOCKET if the peer cannot be reached; TE_ERR_METADATA if there is no such segment;
/// TE_ERR_MALFORMED_JSON.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_open_segment(engine: *mut te_engine, name: *const c_char, segment: *mut te_segment) -> te_status {
    with(engine, |engine| {
        guard::check_output(segment, "segment")?;
        // SAFETY: the caller passes a NUL-terminated text.
        let opened = engine.open_segment(unsafe { text::read(name, "name") }?)?;
        // SAFETY: `segment` is not NULL, and the caller passes a place for a number.
        unsafe { segment.write(opened) };
        Ok(())
    })
}

/// Says that the program is done with a segment. What is known of it and the connections to the peer are
/// kept, since the number may be in use elsewhere in the program and stays valid; it costs nothing not to
/// call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_close_segment(engine: *mut te_engine, segment: te_segment) -> te_status {
    with(engine, |engine| engine.segment_name(segment).map(drop))
}

/// Asks the peer, or the metadata server, for the present state of a segment. On failure the former state is
/// kept.
///
/// Blocks as long as te_open_segment, with the same errors.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_refresh_segment(engine: *mut te_engine, segment: te_segment) -> te_status {
    with(engine, |engine| engine.refresh_segment(segment))
}

/// Describes the registered ranges of a segment in `regions`, in the order in which the peer registered them,
/// as far as is known here: te_refresh_segment first, if it matters.
///
/// `regions` is an array of `capacity` elements of `region_size` bytes, sizeof(te_memory_region); it may be
/// NULL if `capacity` is 0. `count` receives how many ranges there are, which may be more than `capacity`;
/// the first `capacity` are described then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_list_segment_memory(
    engine: *mut te_engine,
    segment: te_segment,
    regions: *mut te_memory_region,
    region_size: usize,
    capacity: usize,
    count: *mut usize,
) -> te_status {
    with(engine, |engine| {
        // SAFETY: the caller passes `capacity` elements of `region_size` bytes, and a place for a number.
        unsafe { write_regions(regions, region_size, capacity, count, || engine.segment_buffers(segment)) }
    })
}

/// Asks the peer whether it is alive: 0 if it answers. Blocks as long as te_open_segment.
///
/// Errors: TE_ERR_DNS, TE_ERR_SOCKET, and TE_ERR_MALFORMED_JSON if something else answers there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_probe_segment(engine: *mut te_engine, segment: te_segment) -> te_status {
    with(engine, |engine| engine.probe(segment))
}

/// Asks the engine that is called `name` whether it is alive, as te_probe_segment; its segment need not be open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_probe(engine: *mut te_engine, name: *const c_char) -> te_status {
    // SAFETY: the caller passes a NUL-terminated text.
    with(engine, |engine| engine.probe_name(unsafe { text::read(name, "name") }?))
}

/// Forgets what is known here of the segment of that name. Its number becomes invalid, connections to the
/// peer are closed when they are idle, and opening it again asks the peer and gives another number. A name
/// that is not open is no error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_forget_segment(engine: *mut te_engine, name: *const c_char) -> te_status {
    // SAFETY: the caller passes a NUL-terminated text.
    with(engine, |engine| engine.forget_segment(unsafe { text::read(name, "name") }?))
}

/// Gives the descriptor of a segment in JSON: what the peer tells of itself, as it is kept at metadata
/// servers. TE_LOCAL_SEGMENT gives what peers are told of this engine.
///
/// As far as it is known here, or, with `refresh` other than 0, after asking as te_refresh_segment does, with
/// its errors. `json` receives a text that the caller frees with te_free_text: an object with "name",
/// "protocol", "buffers" in the peer's order of registration, each with "addr" and "length", and so on.
/// Errors: TE_ERR_METADATA for TE_LOCAL_SEGMENT as long as no transport is installed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_segment_json(
    engine: *mut te_engine,
    segment: te_segment,
    refresh: c_int,
    json: *mut *mut c_char,
) -> te_status {
    with(engine, |engine| {
        let describe = || {
            if refresh != 0 {
                engine.refresh_segment(segment)?;
            }
            engine.segment_json(segment)
        };
        // SAFETY: the caller passes a place for a pointer.
        unsafe { text::give(json, "json", describe) }
    })
}
