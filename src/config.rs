//! One table of every environment variable. (skeleton: fields are fixed; the table and the reading are to be written)
#![allow(missing_docs)]

use std::time::Duration;

/// What the environment says, checked. Read when an engine is created.
#[derive(Clone, Debug)]
pub struct Config {
    pub handshake_port: u16,
    pub min_rpc_port: u16,
    pub max_rpc_port: u16,
    pub use_ipv6: bool,
    pub handshake_backlog: u32,
    pub handshake_connect_timeout: Duration,
    pub handshake_max_length: usize,
    pub legacy_rpc_port_binding: bool,
    pub tcp_bind_address: Option<String>,
    pub metadata_cluster_id: String,
    pub disable_metacache: bool,
    pub metadata_refresh_interval: Option<Duration>,
    pub force_tcp: bool,
    /// `MC_SLICE_TIMEOUT`, when set. Also decides whether the old C API shows TIMEOUT.
    pub slice_timeout: Option<Duration>,
    pub tcp_force_v1: bool,
    pub tcp_status_timeout: Duration,
    pub tcp_lanes_per_peer: usize,
    /// TE_TCP_IO_THREADS
    pub tcp_io_threads: usize,
    /// TE_CHECKED_LOCAL_COPY
    pub checked_local_copy: bool,
    /// TE_REGISTER_REFCOUNT
    pub register_refcount: bool,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            handshake_port: 12001,
            min_rpc_port: 15000,
            max_rpc_port: 17000,
            use_ipv6: false,
            handshake_backlog: 128,
            handshake_connect_timeout: Duration::from_secs(5),
            handshake_max_length: 1 << 20,
            legacy_rpc_port_binding: false,
            tcp_bind_address: None,
            metadata_cluster_id: String::new(),
            disable_metacache: false,
            metadata_refresh_interval: None,
            force_tcp: false,
            slice_timeout: None,
            tcp_force_v1: false,
            tcp_status_timeout: Duration::from_secs(30),
            tcp_lanes_per_peer: 4,
            tcp_io_threads: 2,
            checked_local_copy: false,
            register_refcount: false,
        }
    }
}

impl Config {
    /// Reads the environment. Bad values are warned about and replaced by the default.
    pub fn from_environment() -> Config {
        Config::default()
    }
}
