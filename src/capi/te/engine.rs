//! Engine
//!
//! An engine is a place in the cluster: it has a name that peers open, threads that serve them, and the
//! transports by which bytes move. Most processes have one. Creating it reads the environment variables MC_*
//! and TE_*.

use std::ffi::{c_char, c_int, c_void};

use crate::capi::growth::{self, Growing};
use crate::capi::te::status::te_status;
use crate::capi::te::topology::te_topology;
use crate::capi::te::{call, with};
use crate::capi::{guard, handle, text};
use crate::config::Config;
use crate::engine::{Engine, EngineOptions};
use crate::metadata::store;

/// An engine.
pub struct te_engine {
    _private: [u8; 0],
}

/// How te_engine_create makes an engine.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct te_engine_options {
    /// sizeof(te_engine_options).
    pub struct_size: usize,
    /// Where descriptors of segments are kept: "P2PHANDSHAKE" (also if NULL), with the engines themselves, which
    /// ask each other; or at a metadata server, such as "http://host:8080/metadata", "redis://host:6379",
    /// "etcd://host:2379", or "host:2379" for etcd. MC_METADATA_CLUSTER_ID keeps clusters apart that share one.
    pub metadata: *const c_char,
    /// With P2PHANDSHAKE, "host" or "host:port" (IPv6 addresses with a port in brackets). Host is the address of
    /// this machine that peers use; the port is drawn anew, and te_engine_address tells it. NULL: an address of
    /// this machine is chosen.
    ///
    /// With a metadata server, the name that peers open: any text that no other running engine has. If two
    /// have the same, peers find the one that came last. NULL: what te_engine_address tells. Peers connect to
    /// MC_TCP_BIND_ADDRESS, or to the address of the first network interface that is up.
    pub server_name: *const c_char,
    /// The transport to install: "tcp" (also if NULL), "rdma", "auto" for RDMA where a NIC is found that can
    /// be used and TCP elsewhere, or "" for none yet.
    pub transport: *const c_char,
    /// For the transport: a NIC priority matrix in JSON, or NULL to look at the hardware. "tcp" has no use
    /// for it.
    pub topology: *const c_char,
    /// Names of the NICs that may be found when the engine looks at the hardware: an array of `nic_count`.
    /// NULL: any. MC_TE_FILTERS holds as well.
    pub nics: *const *const c_char,
    /// Number of the names.
    pub nic_count: usize,
    /// A topology that the engine has in place of one of its own, and goes on having when this handle is
    /// destroyed: what the engine finds or is given goes there, and a transport that is installed without a
    /// matrix of its own goes by what is there then. NULL: its own, which te_engine_topology gives.
    pub topology_handle: *mut te_topology,
}

// SAFETY: the first field is `struct_size`, and all zeros are a valid value.
unsafe impl Growing for te_engine_options {
    const FIRST_VERSION: usize = 40;
}

/// Creates an engine and starts to serve peers. Free it with te_engine_destroy.
///
/// `options` may be NULL. Errors: TE_ERR_SOCKET and TE_ERR_LIMIT when no port could be taken;
/// TE_ERR_METADATA when the metadata server does not answer within some seconds, or refuses;
/// TE_ERR_NOT_IMPLEMENTED for an unknown kind of metadata server or transport.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_engine_create(options: *const te_engine_options, engine: *mut *mut te_engine) -> te_status {
    call(|| {
        guard::check_output(engine, "engine")?;
        // SAFETY: the caller passes NULL or a struct of `struct_size` bytes.
        let options = unsafe { growth::read_options(options) }?;
        // SAFETY: the caller passes NULL or NUL-terminated texts.
        let (metadata, server_name, transport, topology) = unsafe {
            (
                text::read_optional(options.metadata, "metadata")?,
                text::read_optional(options.server_name, "server_name")?,
                text::read_optional(options.transport, "transport")?,
                text::read_optional(options.topology, "topology")?,
            )
        };
        // SAFETY: the caller passes `nic_count` NUL-terminated texts.
        let nics = unsafe { text::read_array(options.nics, options.nic_count, "nics") }?;
        let live = match options.topology_handle.is_null() {
            true => None,
            false => Some(handle::enter_topology(options.topology_handle as u64)?.shared()),
        };
        let options = EngineOptions {
            metadata: metadata.unwrap_or("P2PHANDSHAKE").to_owned(),
            server_name: server_name.unwrap_or("").to_owned(),
            auto_discover: false,
            nics,
            topology: live,
        };
        let created = store::bounded(|| {
            let created = Engine::create(&options, Config::from_environment())?;
            let protocol = transport.unwrap_or("tcp");
            if !protocol.is_empty() {
                created.install_transport(protocol, topology).inspect_err(|_| created.shutdown())?;
            }
            Ok(created)
        })?;
        let key = handle::insert(created);
        // SAFETY: `engine` is not NULL, and the caller passes a place for a pointer.
        unsafe { engine.write(key.as_pointer().cast()) };
        Ok(())
    })
}

/// Destroys an engine: transfers that still run end as TE_STATE_CANCELED, threads that wait in other calls
/// return, memory is unregistered, batches are freed, and peers are no longer served.
///
/// When it returns, no other call on the engine is inside the library, and the engine touches no memory of
/// the program any more; it takes up to about five seconds where a peer is slow. A metadata server forgets
/// the engine; up to ten seconds are waited for one that does not answer. Calls that begin meanwhile or later give TE_ERR_INVALID_HANDLE, as does destroying it twice. NULL is fine and does nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_engine_destroy(engine: *mut te_engine) -> te_status {
    call(|| if engine.is_null() { Ok(()) } else { handle::destroy(engine as u64) })
}

/// Writes the address at which peers reach this engine, such as "10.0.0.7:15002", into `buffer`, with a NUL at
/// its end.
///
/// With P2PHANDSHAKE it is the name that peers open; with a metadata server they open the `server_name` of
/// te_engine_options. `size` is that of the buffer in bytes; if the text does not fit,
/// TE_ERR_INVALID_ARGUMENT, and the text of the error tells the size it takes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_engine_address(engine: *mut te_engine, buffer: *mut c_char, size: usize) -> te_status {
    with(engine, |engine| {
        // SAFETY: the caller passes a buffer of `size` bytes.
        unsafe { text::write_whole(buffer, size, &engine.address()) }
    })
}

/// Installs a transport, registers all memory with it, and publishes it to peers. Installing one that is
/// there already gives 0.
///
/// `protocol` is "tcp", "rdma" or "auto", which looks at the hardware and installs the better one. `topology`
/// is a NIC priority matrix in JSON, which takes the place of what is in the engine's topology, or NULL. On
/// failure the engine is as it was before. Calls that register or unregister memory wait meanwhile. Errors:
/// TE_ERR_NOT_IMPLEMENTED for protocols that this build lacks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_install_transport(
    engine: *mut te_engine,
    protocol: *const c_char,
    topology: *const c_char,
) -> te_status {
    with(engine, |engine| {
        // SAFETY: the caller passes NULL or NUL-terminated texts.
        let (protocol, topology) = unsafe { (text::read(protocol, "protocol")?, text::read_optional(topology, "topology")?) };
        engine.install_transport(protocol, topology)
    })
}

/// Tells whether a transport is installed: `installed` receives 1, or 0. `protocol` is "tcp", "rdma", or any
/// other text, which is the name of none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_has_transport(engine: *mut te_engine, protocol: *const c_char, installed: *mut c_int) -> te_status {
    with(engine, |engine| {
        guard::check_output(installed, "installed")?;
        // SAFETY: the caller passes a NUL-terminated text.
        let is_installed = engine.has_transport(unsafe { text::read(protocol, "protocol") }?);
        // SAFETY: `installed` is not NULL, and the caller passes a place for a number.
        unsafe { installed.write(c_int::from(is_installed)) };
        Ok(())
    })
}

/// Gives a handle of the topology of an engine: the very one that was given when it was created, or the
/// engine's own. Free it with te_topology_destroy; it may outlive the engine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_engine_topology(engine: *mut te_engine, topology: *mut *mut te_topology) -> te_status {
    with(engine, |engine| {
        guard::check_output(topology, "topology")?;
        let key = handle::insert_topology(engine.topology().clone());
        // SAFETY: `topology` is not NULL, and the caller passes a place for a pointer.
        unsafe { topology.write(key.as_pointer().cast()) };
        Ok(())
    })
}

/// Describes the NICs of an engine and which one serves which memory: in JSON if `as_json` is not 0, else for
/// people. As te_topology_links, but of NICs that a transport uses it tells the port and the address that are
/// in use.
///
/// `text` receives a text that the caller frees with te_free_text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_engine_links(engine: *mut te_engine, as_json: c_int, text: *mut *mut c_char) -> te_status {
    // SAFETY: the caller passes a place for a pointer.
    with(engine, |engine| unsafe { text::give(text, "text", || Ok(engine.show_links(as_json != 0))) })
}

/// Has an address of this program stand for an engine, in this interface and in that of transfer_engine_c.h:
/// a class that wraps an engine gives its object's, and a cast of the object's address to te_engine * or
/// transfer_engine_t does as well as the handle.
///
/// It does so until the engine is destroyed, or another address is given, or NULL, which gives none. What
/// else stood for the address, an engine or a topology, is not found by it any more. The memory there is
/// never looked at. A call by an address takes some ten nanoseconds more. Errors: TE_ERR_INVALID_ARGUMENT for
/// an address that looks like a handle; TE_ERR_LIMIT when 1024 addresses of the process stand for something.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_engine_set_alias(engine: *mut te_engine, address: *const c_void) -> te_status {
    call(|| handle::set_engine_alias(engine as u64, address as u64))
}

/// Has the metadata server told of all memory that has been registered and unregistered so far, also with
/// TE_PUBLISH_LATER, and returns when it knows. Without a metadata server there is nothing to do: peers ask
/// the engine itself.
///
/// Errors: TE_ERR_METADATA, and it is tried again in the background.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_publish(engine: *mut te_engine) -> te_status {
    with(engine, Engine::publish)
}

/// Writes to the metadata server where this engine is reached, whatever it has about that. The engine looks
/// after it by itself every two seconds; this is for a program that cannot wait. Without a metadata server
/// there is nothing to do.
///
/// Errors: TE_ERR_METADATA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_publish_address(engine: *mut te_engine) -> te_status {
    with(engine, Engine::publish_address)
}

/// Ends all that an engine does, as te_engine_destroy, and leaves the handle: when it has returned, no byte
/// moves, peers are no longer served, and the engine touches no memory of the program any more, but for that of calls
/// of te_put and te_get that have not returned yet; calls on it give TE_ERR_CANCELED, but for those that only tell what is known, such as the status of a batch. Destroy
/// it when its handle is of no use any more. Doing it twice gives 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_shut_down(engine: *mut te_engine) -> te_status {
    with(engine, |engine| {
        engine.shutdown();
        Ok(())
    })
}
