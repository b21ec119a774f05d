//! The C interface of Mooncake's Transfer Engine: the same functions, types and values, so that programs
//! written for it work.
//!
//! An engine moves bytes between the memory of this process and that of its peers. A process registers
//! memory, opens the segments of its peers, allocates a batch, submits requests to it, and asks for the
//! status of each. New programs had better use te.h, which has deadlines, waiting, cancelling, results in one
//! call, and which works on the same engines.
//!
//! Errors come in two forms, as ever. Functions about engines, memory, segments and notifications return 0 or
//! a negative number: -1 invalid argument, -3 address not registered, -4 busy, -7 address overlapped, -101
//! name not resolved, -102 connection failed, -103 malformed JSON, -200 metadata, -202 device refused, and
//! those below -1000, which te.h lists. Functions about batches (submitTransfer, submitTransferWithNotify,
//! getTransferStatus, freeBatchID) and getNicLoadStats return 0 or a positive number: 1 invalid argument or
//! batch, 2 batch full, 3 address not registered, 4 busy, 8 transport not installed, 202 other.
//! te_last_error() of te.h gives the text of a thread's last failure in either form; why a request ended as
//! failed, te_batch_task_error() tells.
//!
//! Texts are read during the call only. A NULL text where one is needed is an error, as is a name that is not
//! UTF-8; in locations and notifications, what is not UTF-8 is replaced by U+FFFD. An engine that was
//! destroyed or never made, and a batch that was freed or never allocated, are errors, never a crash. Any
//! thread may call any function at any time.

// The text above is the prose of include/transfer_engine_c.h. Types and functions carry their names of C.
#![allow(non_camel_case_types, non_snake_case)]

use std::ffi::{c_char, c_int, c_void};

use crate::capi::te::topology::{links, te_topology_discover};
use crate::capi::{guard, handle, memory, messages, text};
use crate::config::Config;
use crate::engine::{Engine, EngineOptions, MemoryOptions};
use crate::error::{Code, Error, Result};
use crate::handshake::Notification;
use crate::transfer::{Hints, Request, State, SubmitOptions};
use crate::transport::Opcode;

// The header defines these three by macros, as it always has.
type segment_handle_t = i32;
type segment_id_t = i32;
type batch_id_t = u64;

/// An engine. It serves the functions of te.h as well, as a te_engine *.
pub type transfer_engine_t = *mut c_void;
/// An installed transport: good for a comparison with NULL.
pub type transport_t = *mut c_void;

/// The segment of the engine itself.
pub const LOCAL_SEGMENT: segment_handle_t = 0;
/// What allocateBatchID returns when it fails.
pub const INVALID_BATCH: batch_id_t = u64::MAX;

/// From the segment into local memory.
pub const OPCODE_READ: c_int = 0;
/// From local memory into the segment.
pub const OPCODE_WRITE: c_int = 1;

/// Under way.
pub const STATUS_WAITING: c_int = 0;
/// Not used.
pub const STATUS_PENDING: c_int = 1;
/// Not used.
pub const STATUS_INVALID: c_int = 2;
/// Not used: requests that were cancelled show as STATUS_FAILED.
pub const STATUS_CANCELED: c_int = 3;
/// Over, and all bytes are in place: in the peer's memory (OPCODE_WRITE), or in the local range
/// (OPCODE_READ).
pub const STATUS_COMPLETED: c_int = 4;
/// Over, since it made no progress in time. Only where the environment variable MC_SLICE_TIMEOUT is set; else
/// STATUS_FAILED.
pub const STATUS_TIMEOUT: c_int = 5;
/// Over, and failed.
pub const STATUS_FAILED: c_int = 6;

/// A transfer between a range of this process and one of a segment.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct transfer_request {
    /// OPCODE_READ or OPCODE_WRITE.
    pub opcode: c_int,
    /// First byte of the local range, which need not be registered. It is the engine's until the request is
    /// over.
    pub source: *mut c_void,
    /// The segment of the other range.
    pub target_id: segment_id_t,
    /// First byte of the other range, as an address in the process of the segment.
    pub target_offset: u64,
    /// Length of both ranges in bytes. 0 completes at once.
    pub length: u64,
}
/// A transfer.
pub type transfer_request_t = transfer_request;

/// What has become of a request.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct transfer_status {
    /// A STATUS_ value.
    pub status: c_int,
    /// Bytes that are known to have moved; never more than the length of the request.
    pub transferred_bytes: u64,
}
/// What has become of a request.
pub type transfer_status_t = transfer_status;

/// A message to or from another engine.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct notify_msg {
    /// What it is about.
    pub name: *mut c_char,
    /// The text.
    pub msg: *mut c_char,
}
/// A message to or from another engine.
pub type notify_msg_t = notify_msg;

/// A range of memory.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct buffer_entry {
    /// Its first byte.
    pub addr: *mut c_void,
    /// Its length in bytes.
    pub length: usize,
}
/// A range of memory.
pub type buffer_entry_t = buffer_entry;

/// Load of a NIC.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nic_load_stat {
    /// Name, with a NUL at its end.
    pub device_name: [c_char; 64],
    /// Bytes under way.
    pub inflight_bytes: u64,
    /// Smoothed bandwidth in bytes per second.
    pub ewma_bandwidth_bps: f64,
}
/// Load of a NIC.
pub type nic_load_stat_t = nic_load_stat;

/// Memory in a segment_desc.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct segment_desc_rdma {
    /// First byte.
    pub addr: *mut c_void,
    /// Length in bytes.
    pub size: u64,
    /// Where it is.
    pub location: *const c_char,
}

/// A file in a segment_desc.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct segment_desc_nvmeof {
    /// Path.
    pub file_path: *const c_char,
    /// Subsystem.
    pub subsystem_name: *const c_char,
    /// Protocol.
    pub proto: *const c_char,
    /// Address of the server.
    pub ip: *const c_char,
    /// Port of the server.
    pub port: u64,
}

/// Either form of a segment_desc.
#[repr(C)]
#[derive(Clone, Copy)]
pub union segment_desc_form {
    /// Memory.
    pub rdma: segment_desc_rdma,
    /// A file.
    pub nvmeof: segment_desc_nvmeof,
}

/// A segment. No function uses it; it is here for programs that name it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct segment_desc {
    /// Which form.
    pub r#type: c_int,
    /// The form.
    pub desc_: segment_desc_form,
}
/// A segment. No function uses it; it is here for programs that name it.
pub type segment_desc_t = segment_desc;

/// Layouts that programs were compiled with, on machines with 64-bit addresses.
const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<transfer_request>() == 40);
    assert!(offset_of!(transfer_request, source) == 8);
    assert!(offset_of!(transfer_request, target_id) == 16);
    assert!(offset_of!(transfer_request, target_offset) == 24);
    assert!(offset_of!(transfer_request, length) == 32);
    assert!(size_of::<transfer_status>() == 16 && offset_of!(transfer_status, transferred_bytes) == 8);
    assert!(size_of::<notify_msg>() == 16 && offset_of!(notify_msg, msg) == 8);
    assert!(size_of::<buffer_entry>() == 16 && offset_of!(buffer_entry, length) == 8);
    assert!(size_of::<nic_load_stat>() == 80 && offset_of!(nic_load_stat, inflight_bytes) == 64);
    assert!(offset_of!(nic_load_stat, ewma_bandwidth_bps) == 72);
    assert!(size_of::<segment_desc>() == 48 && offset_of!(segment_desc, desc_) == 8);
};

/// Creates an engine. Returns NULL on failure; te_last_error() of te.h says why. Free it with
/// destroyTransferEngine.
///
/// metadata_conn_string is "P2PHANDSHAKE" or a metadata server, such as "http://host:8080/metadata",
/// "redis://host:6379", "etcd://host:2379", or "host:2379" for etcd.
/// With P2PHANDSHAKE, local_server_name is "host" or "host:port" of this machine; the port is drawn anew
/// (getLocalIpAndPort tells it). With a metadata server it is the name that peers open, and none that another
/// running engine has; peers connect to the environment variable MC_TCP_BIND_ADDRESS, or to the address of the
/// first network interface that is up. ip_or_host_name and rpc_port have no effect.
/// auto_discover other than 0 looks at the hardware and installs the best transport; with 0 there is none
/// until installTransport.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn createTransferEngine(
    metadata_conn_string: *const c_char,
    local_server_name: *const c_char,
    ip_or_host_name: *const c_char,
    rpc_port: u64,
    auto_discover: c_int,
) -> transfer_engine_t {
    let _ = (ip_or_host_name, rpc_port);
    guard::call(null, || {
        // SAFETY: the caller passes NULL or NUL-terminated texts.
        let (metadata, server_name) = unsafe {
            (text::read(metadata_conn_string, "metadata_conn_string")?, text::read(local_server_name, "local_server_name")?)
        };
        let options = EngineOptions {
            metadata: metadata.to_owned(),
            server_name: server_name.to_owned(),
            auto_discover: auto_discover != 0,
            ..EngineOptions::default()
        };
        let engine = Engine::create(&options, Config::from_environment())?;
        Ok(handle::insert(engine).as_pointer())
    })
}

/// Destroys an engine: transfers that still run are cancelled, and memory is unregistered. When it returns,
/// no other call on the engine is inside the library, and the engine touches no memory of the program any
/// more. NULL is fine and does nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn destroyTransferEngine(engine: transfer_engine_t) {
    guard::call(|_| (), || if engine.is_null() { Ok(()) } else { handle::destroy(engine as u64) })
}

/// Looks at the NICs of this machine, for a later installTransport. Returns 0 or a negative number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn discoverTopology(engine: transfer_engine_t) -> c_int {
    if handle::is_topology(engine as u64) {
        // SAFETY: no names are passed.
        return unsafe { te_topology_discover(engine.cast(), std::ptr::null(), 0) };
    }
    negative(engine, |engine| engine.discover_topology())
}

/// Writes the address at which peers reach this engine, "host:port" with IPv6 addresses in brackets, into
/// buf_out of buf_len bytes, with a NUL at its end; a text that does not fit is cut. With P2PHANDSHAKE it is
/// the name that peers open; with a metadata server they open local_server_name. Returns 0 or a negative
/// number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getLocalIpAndPort(engine: transfer_engine_t, buf_out: *mut c_char, buf_len: usize) -> c_int {
    // SAFETY: the caller passes a buffer of `buf_len` bytes.
    negative(engine, |engine| unsafe { text::write_cut(buf_out, buf_len, &engine.address()) })
}

/// Installs a transport, registers all memory with it, and publishes it to peers. Returns NULL on failure,
/// and the engine is as it was before; te_last_error() of te.h says why. A transport that is installed
/// already is returned as it is.
///
/// proto is "tcp" or "rdma". args may be NULL; else its first element is a NIC priority matrix in JSON, or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn installTransport(engine: transfer_engine_t, proto: *const c_char, args: *mut *mut c_void) -> transport_t {
    guard::call_engine(engine, null, |engine| {
        // SAFETY: the caller passes a NUL-terminated text.
        let protocol = unsafe { text::read(proto, "proto") }?;
        if !engine.has_transport(protocol) {
            // SAFETY: the caller passes NULL or an array with at least one element.
            let topology = if args.is_null() { std::ptr::null_mut() } else { unsafe { args.read() } };
            // SAFETY: the caller passes NULL or a NUL-terminated text.
            let topology = unsafe { text::read_optional(topology.cast(), "args[0]") }?;
            engine.install_transport(protocol, topology)?;
        }
        Ok(handle::transport_key(protocol))
    })
}

/// Does nothing, and returns 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uninstallTransport(engine: transfer_engine_t, proto: *const c_char) -> c_int {
    // SAFETY: the caller passes a NUL-terminated text.
    negative(engine, |_| unsafe { text::read(proto, "proto") }.map(drop))
}

/// Opens the segment of a peer by its name. Returns its number, or -1. Gives the same number when it is open
/// already.
///
/// Asks the peer or the metadata server unless it is open. Leading '/' are not part of a name. The engine
/// looks anew by itself when a transfer fails because the peer has changed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn openSegment(engine: transfer_engine_t, segment_name: *const c_char) -> segment_id_t {
    // SAFETY: the caller passes a NUL-terminated text.
    guard::call_engine(
        engine,
        |_| -1,
        |engine| segment_number(engine.open_segment(unsafe { text::read(segment_name, "segment_name") }?)?),
    )
}

/// Like openSegment, but asks the peer or the metadata server for the present state of the segment also if it
/// is open. If that fails, the former state is kept.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn openSegmentNoCache(engine: transfer_engine_t, segment_name: *const c_char) -> segment_id_t {
    // SAFETY: the caller passes a NUL-terminated text.
    guard::call_engine(
        engine,
        |_| -1,
        |engine| segment_number(engine.open_segment_fresh(unsafe { text::read(segment_name, "segment_name") }?)?),
    )
}

/// Does nothing, and returns 0; the number stays valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn closeSegment(engine: transfer_engine_t, segment_id: segment_id_t) -> c_int {
    let _ = segment_id;
    negative(engine, |_| Ok(()))
}

/// Does nothing, and returns 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warmupEfaSegment(engine: transfer_engine_t, segment_name: *const c_char) -> c_int {
    // SAFETY: the caller passes a NUL-terminated text.
    negative(engine, |_| unsafe { text::read(segment_name, "segment_name") }.map(drop))
}

/// Forgets what is known here of the segment with that name, whichever process it is of. Its number becomes
/// invalid, and opening it again gives another. Returns 0, also when no such segment is open, or a negative
/// number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn removeLocalSegment(engine: transfer_engine_t, segment_name: *const c_char) -> c_int {
    // SAFETY: the caller passes a NUL-terminated text.
    negative(engine, |engine| engine.forget_segment(unsafe { text::read(segment_name, "segment_name") }?))
}

/// Asks anew for the state of all open segments. Returns 0, also where that fails, such as for a peer that has
/// vanished: the former state is kept then, and the log names the segment.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncSegmentCache(engine: transfer_engine_t) -> c_int {
    negative(engine, |engine| {
        // What could not be fetched has been logged, and callers of this interface do not expect to hear of it.
        let _ = engine.refresh_all_segments();
        Ok(())
    })
}

/// Registers length bytes at addr, so that peers can read and write them, and publishes that. Returns 0 or a
/// negative number: -200 if the metadata server could not be told; nothing is registered then.
///
/// location says where the memory is: "cpu:0" for a NUMA node, "cuda:1" for a GPU; "*" or NULL if unknown.
/// remote_accessible 0: only this engine may use it, as the local side of transfers. The range may touch
/// registered ones, but have no byte in common with them (-7).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn registerLocalMemory(
    engine: transfer_engine_t,
    addr: *mut c_void,
    length: usize,
    location: *const c_char,
    remote_accessible: c_int,
) -> c_int {
    negative(engine, |engine| {
        // SAFETY: the caller owns the memory until it is unregistered.
        let range = unsafe { memory::range(addr, length as u64) }?;
        // SAFETY: the caller passes NULL or a NUL-terminated text.
        engine.register(range, &unsafe { memory_options(engine, location, remote_accessible != 0) })
    })
}

/// Unregisters the memory that was registered at addr, the first byte of its range. Returns 0 or a negative
/// number: -3 if nothing was registered there, -4 if a transfer on it did not end within five seconds, so
/// that it is still in use, -200 if the metadata server could not be told, which is tried again in the
/// background. After 0 or -200 neither peers nor this engine touch it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unregisterLocalMemory(engine: transfer_engine_t, addr: *mut c_void) -> c_int {
    negative(engine, |engine| engine.unregister(addr as u64))
}

/// Registers buffer_len ranges for peers to read and write: all of them or, on failure, none. Publishes once.
/// Returns 0 or a negative number. buffer_list may be NULL if buffer_len is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn registerLocalMemoryBatch(
    engine: transfer_engine_t,
    buffer_list: *mut buffer_entry_t,
    buffer_len: usize,
    location: *const c_char,
) -> c_int {
    negative(engine, |engine| {
        // SAFETY: the caller passes `buffer_len` elements.
        let ranges = unsafe { memory::read_array(buffer_list, buffer_len, "buffer_list") }?
            // SAFETY: the caller owns the memory until it is unregistered.
            .map(|buffer| unsafe { memory::range(buffer.addr, buffer.length as u64) })
            .collect::<Result<Vec<_>>>()?;
        // SAFETY: the caller passes NULL or a NUL-terminated text.
        engine.register_batch(&ranges, &unsafe { memory_options(engine, location, true) })
    })
}

/// Unregisters the memory that was registered at each of addr_len addresses. Publishes once. An address that
/// fails does not keep the others from being released; the first failure is returned, else 0. addr_list may
/// be NULL if addr_len is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unregisterLocalMemoryBatch(
    engine: transfer_engine_t,
    addr_list: *mut *mut c_void,
    addr_len: usize,
) -> c_int {
    // SAFETY: the caller passes `addr_len` addresses.
    negative(engine, |engine| engine.unregister_batch(&unsafe { memory::read_addresses(addr_list, addr_len) }?))
}

/// Allocates a batch with room for batch_size requests. Returns its number, or INVALID_BATCH. Free it with
/// freeBatchID.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn allocateBatchID(engine: transfer_engine_t, batch_size: usize) -> batch_id_t {
    guard::call_engine(engine, |_| INVALID_BATCH, |engine| Ok(engine.allocate_batch(batch_size)?.id()))
}

/// Starts count requests. They take the next numbers in the batch, from 0 on. Returns 0 or a positive number:
/// 1 for a bad argument, such as an unknown segment, an opcode other than OPCODE_READ and OPCODE_WRITE, or a
/// NULL source; 2 if the batch has not that much room; 8 if the transport of the segment is not installed. On
/// failure nothing is started. Requests that fail after that tell so by their status.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn submitTransfer(
    engine: transfer_engine_t,
    batch_id: batch_id_t,
    entries: *mut transfer_request,
    count: usize,
) -> c_int {
    // SAFETY: the caller passes `count` elements, which describe memory that is ours until they are over.
    positive(engine, |engine| unsafe { submit(engine, batch_id, entries, count, None) })
}

/// Like submitTransfer, and sends notify_msg to the engine of the first request's segment when all requests
/// of the call have completed, so that the peer finds the bytes in place; not at all if one fails. count may
/// not be 0. The texts are copied.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn submitTransferWithNotify(
    engine: transfer_engine_t,
    batch_id: batch_id_t,
    entries: *mut transfer_request,
    count: usize,
    notify_msg: notify_msg_t,
) -> c_int {
    positive(engine, |engine| {
        if count == 0 {
            return Err(guard::invalid("a notification goes to the segment of the first request, but count is 0"));
        }
        // SAFETY: the caller passes NUL-terminated texts.
        let notification = unsafe { text::read_notification(notify_msg.name, notify_msg.msg) }?;
        // SAFETY: the caller passes `count` elements, which describe memory that is ours until they are over.
        unsafe { submit(engine, batch_id, entries, count, Some(notification)) }
    })
}

/// Tells what has become of request number task_id of a batch. Returns 0 or a positive number: 1 if there is
/// no such request or batch, and status is left alone then. STATUS_COMPLETED, STATUS_TIMEOUT and
/// STATUS_FAILED are final, and the engine touches no memory of the request any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getTransferStatus(
    engine: transfer_engine_t,
    batch_id: batch_id_t,
    task_id: usize,
    status: *mut transfer_status,
) -> c_int {
    positive(engine, |engine| {
        guard::check_output(status, "status")?;
        let batch = engine.batch(batch_id)?;
        let task = batch
            .task_status(task_id)
            .ok_or_else(|| guard::invalid(format!("the batch has {} requests, none with number {task_id}", batch.len())))?;
        let shown = transfer_status {
            status: shown_state(task.state, engine.config().slice_timeout.is_some()) as c_int,
            transferred_bytes: task.transferred_bytes,
        };
        // SAFETY: `status` is not NULL, and the caller passes a place for a status.
        unsafe { status.write(shown) };
        Ok(())
    })
}

/// Frees a batch. Returns 0 or a positive number: 4 while a request is under way, and the batch stays as it
/// is. Requests need not have been asked for before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freeBatchID(engine: transfer_engine_t, batch_id: batch_id_t) -> c_int {
    positive(engine, |engine| engine.free_batch(batch_id))
}

/// Takes all messages that have arrived at this engine, in the order of their arrival. Returns an array of
/// *size messages, which the caller frees with freeNotifsMsgBuf; NULL and 0 if there are none or on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getNotifsFromEngine(engine: transfer_engine_t, size: *mut c_int) -> *mut notify_msg_t {
    if !size.is_null() && size.is_aligned() {
        // SAFETY: the caller passes a place for a number.
        unsafe { size.write(0) };
    }
    guard::call_engine(
        engine,
        |_| std::ptr::null_mut(),
        |engine| {
            guard::check_output(size, "size")?;
            let (messages, count) = messages::allocate(&engine.take_notifications())?;
            // SAFETY: as above. More than two thousand million messages do not fit into memory.
            unsafe { size.write(count as c_int) };
            Ok(messages.cast())
        },
    )
}

/// Frees what getNotifsFromEngine returned. (NULL, 0) is fine. Returns 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freeNotifsMsgBuf(msg_list: *mut notify_msg_t, size: c_int) -> c_int {
    guard::call(guard::negative, || {
        let count = usize::try_from(size).map_err(|_| guard::invalid(format!("size is {size}")))?;
        // SAFETY: the caller passes what `getNotifsFromEngine` returned, once.
        unsafe { messages::free(msg_list.cast(), count) }?;
        Ok(0)
    })
}

/// Sends a message to the engine of a segment, and returns when it has arrived there: 0, or a negative
/// number, -200 if the segment is unknown. The texts are copied.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn genNotifyInEngine(engine: transfer_engine_t, target_id: u64, notify_msg: notify_msg_t) -> c_int {
    negative(engine, |engine| {
        // SAFETY: the caller passes NUL-terminated texts.
        let notification = unsafe { text::read_notification(notify_msg.name, notify_msg.msg) }?;
        // This interface has a number of its own for an unknown segment here.
        engine.segment_name(target_id).map_err(|error| Error::quiet(Code::Metadata, error.message()))?;
        engine.send_notification(target_id, &notification)
    })
}

/// Tells the load of each NIC: *count is the room in stats before, and the number of NICs, which may be more,
/// after the call. None without RDMA. Returns 0, or -1 if an argument is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getNicLoadStats(engine: transfer_engine_t, stats: *mut nic_load_stat_t, count: *mut usize) -> c_int {
    // Of the functions with positive errors, only this one says -1 for NULL.
    if engine.is_null() || stats.is_null() || count.is_null() {
        return guard::call(guard::negative, || Err(guard::invalid("engine, stats or count is NULL")));
    }
    positive(engine, |engine| {
        let loads = engine.nic_loads();
        // SAFETY: `count` is not NULL, and the caller passes a number and its place.
        let room = unsafe { count.read_unaligned() };
        // SAFETY: as above.
        unsafe { count.write_unaligned(loads.len()) };
        for (index, load) in loads.iter().take(room).enumerate() {
            let device_name = text::array(&load.device);
            let (inflight_bytes, ewma_bandwidth_bps) = (load.bytes_in_flight, load.bytes_per_second);
            // SAFETY: the caller has room for so many.
            unsafe { stats.add(index).write_unaligned(nic_load_stat { device_name, inflight_bytes, ewma_bandwidth_bps }) };
        }
        Ok(())
    })
}

/// From now on this engine is shut down when the process calls exit() or gets SIGTERM or SIGINT; the process
/// then ends with status 128 plus the number of the signal. Replaces what the program had set for these two
/// signals. Without this call the library leaves signals alone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn enableGracefulShutdown(engine: transfer_engine_t) {
    guard::call(|_| (), || crate::capi::shutdown::enable(engine as u64))
}

/// Writes a description of the NICs and of which one serves which memory into buf of buf_len bytes, with a
/// NUL at its end: in JSON if json is not 0, else for people. A text that does not fit is cut. Returns 0 or a
/// negative number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn showLinks(engine: transfer_engine_t, buf: *mut c_char, buf_len: usize, json: c_int) -> c_int {
    if handle::is_topology(engine as u64) {
        return guard::call(guard::negative, || {
            let call = handle::enter_topology(engine as u64)?;
            // SAFETY: the caller passes a buffer of `buf_len` bytes.
            unsafe { text::write_cut(buf, buf_len, &links(call.target(), json != 0)) }.map(|()| 0)
        });
    }
    // SAFETY: the caller passes a buffer of `buf_len` bytes.
    negative(engine, |engine| unsafe { text::write_cut(buf, buf_len, &engine.show_links(json != 0)) })
}

/// What functions that return pointers give on failure.
fn null(_: &Error) -> *mut c_void {
    std::ptr::null_mut()
}

/// Runs a function whose errors are negative.
fn negative(engine: transfer_engine_t, body: impl FnOnce(&Engine) -> Result<()>) -> c_int {
    guard::call_engine(engine, guard::negative, |engine| body(engine).map(|()| 0))
}

/// Runs a function whose errors are positive.
fn positive(engine: transfer_engine_t, body: impl FnOnce(&Engine) -> Result<()>) -> c_int {
    guard::call_engine(engine, guard::positive, |engine| body(engine).map(|()| 0))
}

/// The number of a segment, which must fit into 31 bits here.
fn segment_number(id: u64) -> Result<segment_id_t> {
    segment_id_t::try_from(id)
        .map_err(|_| Error::new(Code::Limit, format!("segment number {id} does not fit into 31 bits; use te_open_segment")))
}

/// How memory is registered by this interface.
///
/// # Safety
/// `location` must be NULL or a NUL-terminated text.
unsafe fn memory_options(engine: &Engine, location: *const c_char, remote_accessible: bool) -> MemoryOptions {
    MemoryOptions {
        // SAFETY: as for this function.
        location: unsafe { text::read_location(location) },
        remote_accessible,
        counted: engine.config().register_refcount,
        parallelism: None,
        publish: true,
    }
}

/// Checks the caller's requests and submits them: all or none.
///
/// # Safety
/// `entries` must have `count` elements. Their local ranges must be the caller's to give, until the transfers
/// are over.
unsafe fn submit(
    engine: &Engine,
    batch_id: batch_id_t,
    entries: *const transfer_request,
    count: usize,
    notification: Option<Notification>,
) -> Result<()> {
    let batch = engine.batch(batch_id)?;
    // SAFETY: as for this function.
    let requests = unsafe { memory::read_array(entries, count, "entries") }?
        .enumerate()
        .map(|(index, entry)| {
            let opcode = match entry.opcode {
                OPCODE_READ => Opcode::Read,
                OPCODE_WRITE => Opcode::Write,
                other => return Err(guard::invalid(format!("entries[{index}].opcode is {other}; it must be 0 or 1"))),
            };
            // SAFETY: as for this function.
            let local = unsafe { memory::local_range(entry.source, entry.length, index) }?;
            // A negative number becomes one that no segment has.
            let (segment, remote_address) = (entry.target_id as u64, entry.target_offset);
            Ok(Request { opcode, local, segment, remote_address, hints: Hints::default() })
        })
        .collect::<Result<Vec<_>>>()?;
    engine.submit(&batch, &requests, notification, SubmitOptions::default())
}

/// The state that this interface shows. Its callers know COMPLETED and FAILED for certain; some take every
/// other final state for success.
fn shown_state(state: State, shows_timeouts: bool) -> State {
    match state {
        State::Timeout if !shows_timeouts => State::Failed,
        State::Canceled => State::Failed,
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_upstreams_own_final_states_are_shown() {
        let states =
            [State::Waiting, State::Pending, State::Invalid, State::Canceled, State::Completed, State::Timeout, State::Failed];
        assert_eq!(states.map(|state| shown_state(state, false) as c_int), [0, 1, 2, 6, 4, 6, 6]);
        assert_eq!(states.map(|state| shown_state(state, true) as c_int), [0, 1, 2, 6, 4, 5, 6]);
    }

    #[test]
    fn segment_numbers_must_fit_into_31_bits() {
        assert_eq!(segment_number(7).unwrap(), 7);
        assert_eq!(segment_number((1 << 31) - 1).unwrap(), i32::MAX);
        assert_eq!(segment_number(1 << 31).unwrap_err().code(), Code::Limit);
        assert_eq!(segment_number(u64::MAX).unwrap_err().code(), Code::Limit);
    }

    #[test]
    fn functions_without_an_engine_fail_in_their_own_way() {
        let (mut count, mut byte) = (9usize, 0);
        let garbage = 0x1234 as transfer_engine_t;
        let message = notify_msg { name: std::ptr::null_mut(), msg: std::ptr::null_mut() };
        // SAFETY: no function goes beyond its look-up of the engine; the buffers are as long as is said.
        unsafe {
            for engine in [std::ptr::null_mut(), garbage] {
                let negative = if engine.is_null() { Code::InvalidArgument } else { Code::InvalidHandle }.number();
                assert!(installTransport(engine, c"tcp".as_ptr(), std::ptr::null_mut()).is_null());
                assert_eq!(openSegment(engine, c"name".as_ptr()), -1);
                assert_eq!(openSegmentNoCache(engine, c"name".as_ptr()), -1);
                assert_eq!(closeSegment(engine, 0), negative);
                assert_eq!(registerLocalMemory(engine, std::ptr::null_mut(), 1, c"*".as_ptr(), 1), negative);
                assert_eq!(unregisterLocalMemory(engine, std::ptr::null_mut()), negative);
                assert_eq!(getLocalIpAndPort(engine, &raw mut byte, 1), negative);
                assert_eq!(genNotifyInEngine(engine, 0, message), negative);
                assert_eq!(allocateBatchID(engine, 1), INVALID_BATCH);
                assert_eq!(submitTransfer(engine, 0, std::ptr::null_mut(), 0), 1);
                assert_eq!(submitTransferWithNotify(engine, 0, std::ptr::null_mut(), 0, message), 1);
                assert_eq!(getTransferStatus(engine, 0, 0, std::ptr::null_mut()), 1);
                assert_eq!(freeBatchID(engine, 0), 1);
                let mut size = 9;
                assert!(getNotifsFromEngine(engine, &raw mut size).is_null());
                assert_eq!(size, 0);
                assert!(getNotifsFromEngine(engine, std::ptr::null_mut()).is_null());
            }
            assert_eq!(getNicLoadStats(garbage, std::ptr::null_mut(), &raw mut count), -1);
            assert!(createTransferEngine(std::ptr::null(), c"localhost".as_ptr(), c"".as_ptr(), 0, 0).is_null());
            assert!(createTransferEngine(c"P2PHANDSHAKE".as_ptr(), std::ptr::null(), c"".as_ptr(), 0, 0).is_null());
            destroyTransferEngine(std::ptr::null_mut());
            assert_eq!(freeNotifsMsgBuf(std::ptr::null_mut(), 0), 0);
        }
        assert_eq!(count, 9);
    }
}
