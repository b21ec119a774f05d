//! Engine
//!
//! An engine is a place in the cluster: it has a name that peers open, threads that serve them, and the
//! transports by which bytes move. Most processes have one. Creating it reads the environment variables MC_*
//! and TE_*.

use std::ffi::c_char;

use crate::capi::growth::{self, Growing};
use crate::capi::te::status::te_status;
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
    /// The transport to install: "tcp" (also if NULL), "rdma", or "" for none yet.
    pub transport: *const c_char,
    /// For the transport: a NIC priority matrix in JSON, or NULL to look at the hardware. "tcp" has no use
    /// for it.
    pub topology: *const c_char,
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
        let options = EngineOptions {
            metadata: metadata.unwrap_or("P2PHANDSHAKE").to_owned(),
            server_name: server_name.unwrap_or("").to_owned(),
            auto_discover: false,
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
/// `protocol` is "tcp" or "rdma". `topology` is a NIC priority matrix in JSON, or NULL. On failure the engine is as it
/// was before. Calls that register or unregister memory wait meanwhile. Errors: TE_ERR_NOT_IMPLEMENTED for
/// protocols that this build lacks.
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
