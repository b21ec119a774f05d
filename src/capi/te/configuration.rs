//! Configuration
//!
//! What the environment variables MC_* and TE_* say. An engine takes it down when it is created;
//! docs/configuration.md has them all.

use std::ffi::c_int;

use tracing::Level;

use crate::capi::growth::{self, Growing};
use crate::capi::te::call;
use crate::capi::te::status::{te_log_level, te_status};
use crate::config::{Environment, Parallelism};

/// The configuration. Each field is as the variable named says, or its default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct te_configuration {
    /// sizeof(te_configuration).
    pub struct_size: usize,
    /// MC_MAX_MR_SIZE: longest piece of memory that is registered with a NIC at once, in bytes.
    pub max_mr_size: u64,
    /// MC_SLICE_SIZE: bytes of a slice.
    pub slice_size: u64,
    /// A slice takes the remainder of a request if it is longer by at most as many bytes: see MC_FRAGMENT_RATIO.
    pub fragment_limit: u64,
    /// MC_HANDSHAKE_MAX_LENGTH: longest request that the handshake channel accepts, in bytes.
    pub handshake_max_length: u64,
    /// MC_TE_METADATA_REFRESH_INTERVAL_SECONDS; 0: never.
    pub metadata_refresh_interval_s: u64,
    /// MC_SLICE_TIMEOUT in seconds; 0: it is not set.
    pub slice_timeout_s: u64,
    /// MC_HANDSHAKE_PORT: port of a peer whose name has none.
    pub handshake_port: u32,
    /// MC_HANDSHAKE_LISTEN_BACKLOG.
    pub handshake_backlog: u32,
    /// MC_HANDSHAKE_CONNECT_TIMEOUT in seconds.
    pub handshake_connect_timeout_s: u32,
    /// MC_MIN_RPC_PORT: lowest port that is drawn.
    pub min_rpc_port: u32,
    /// MC_MAX_RPC_PORT: highest port that is drawn.
    pub max_rpc_port: u32,
    /// MC_USE_IPV6: 1 if it is set, else 0.
    pub use_ipv6: u32,
    /// 1 if descriptors of peers are kept, 0 if MC_DISABLE_METACACHE is set.
    pub metadata_cache: u32,
    /// MC_LOG_LEVEL: a te_log_level.
    pub log_level: u32,
    /// MC_ENABLE_PARALLEL_REG_MR: 1, 0, or -1 for as it is faster.
    pub parallel_registration: i32,
    /// MC_MAX_CONCURRENT_REG_MR: threads that register memory at a time; 0: as many as there are CPUs.
    pub registration_threads: u32,
    /// MC_IB_PORT: port of each NIC.
    pub ib_port: u32,
    /// MC_GID_INDEX; -1: the best kind.
    pub gid_index: i32,
    /// MC_PKEY_INDEX.
    pub pkey_index: u32,
    /// MC_IB_TC; -1: it is not set.
    pub ib_traffic_class: i32,
    /// MC_IB_SL; -1: it is not set.
    pub ib_service_level: i32,
    /// MC_MTU in bytes.
    pub mtu: u32,
    /// MC_NUM_CQ_PER_CTX: completion queues of a NIC.
    pub completion_queues: u32,
    /// MC_MAX_CQE_PER_CTX: entries of a completion queue.
    pub completion_queue_entries: u32,
    /// MC_MAX_EP_PER_CTX: endpoints of a NIC.
    pub max_endpoints: u32,
    /// MC_NUM_QP_PER_EP: queue pairs of an endpoint.
    pub queue_pairs_per_endpoint: u32,
    /// MC_MAX_SGE.
    pub max_pieces: u32,
    /// MC_MAX_WR: work requests of a queue pair that may be under way.
    pub max_work_requests: u32,
    /// 1 if MC_MAX_WR is set, else 0.
    pub max_work_requests_is_set: u32,
    /// MC_MAX_INLINE in bytes.
    pub max_inline: u32,
    /// MC_RETRY_CNT: how often a slice is tried.
    pub retry_count: u32,
    /// MC_AUTO_GID_MAX_RETRIES.
    pub gid_retries: u32,
    /// MC_RDMA_RAIL_PAUSE_SECONDS.
    pub rail_pause_s: u32,
    /// MC_CONN_PAUSE_TTL_MS.
    pub reconnect_pause_ms: u32,
    /// MC_ENDPOINT_STORE_TYPE: 1 for SIEVE, 0 for FIFO.
    pub endpoint_sieve: u32,
    /// MC_IB_PCI_RELAXED_ORDERING: 0 if it forbids that, else 1.
    pub relaxed_ordering: u32,
    /// MC_PATH_ROUNDROBIN: 1 if NICs are chosen in turn, else 0.
    pub round_robin: u32,
    /// MC_ENABLE_DEST_DEVICE_AFFINITY: 1 if the peer's NIC of the same name is preferred, else 0.
    pub same_name_affinity: u32,
    /// MC_ENABLE_HCA_PEER_AFFINITY: 1 if MC_NIC_PEER_AFFINITY holds, else 0.
    pub peer_affinity: u32,
    /// MC_FORCE_TCP: 1 if it is set, else 0.
    pub force_tcp: u32,
    /// MC_FORCE_HCA: 1 if it is set, else 0.
    pub force_rdma: u32,
    /// MC_TCP_STATUS_TIMEOUT_SEC.
    pub tcp_status_timeout_s: u32,
    /// MC_TCP_LANES_PER_PEER: connections to one peer.
    pub tcp_lanes_per_peer: u32,
}

// SAFETY: the first field is `struct_size`, and all zeros are a valid value.
unsafe impl Growing for te_configuration {
    const FIRST_VERSION: usize = 208;
}

/// Reads the environment, anew at each call, and tells what it says. Variables that are out of range have
/// their defaults. Engines that are there already keep what they have.
///
/// Set `configuration->struct_size` before the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_read_configuration(configuration: *mut te_configuration) -> te_status {
    call(|| {
        // SAFETY: the caller passes a struct of `struct_size` bytes.
        let size = unsafe { growth::output_size(configuration, "configuration") }?;
        // SAFETY: as above.
        unsafe { growth::write(configuration, size, &read(&Environment::of_process(), size)) };
        Ok(())
    })
}

/// What an environment says, in a struct of `struct_size` bytes.
fn read(environment: &Environment, struct_size: usize) -> te_configuration {
    let config = environment.config();
    let is_set = |name: &str| {
        environment
            .readings()
            .iter()
            .any(|reading| reading.variable.name == name && reading.text.is_some() && reading.problem.is_none())
    };
    let if_set = |name, value: u8| if is_set(name) { c_int::from(value) } else { -1 };
    let number = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    let rdma = &config.rdma;
    te_configuration {
        struct_size,
        max_mr_size: config.max_mr_size,
        slice_size: rdma.slice_size,
        fragment_limit: rdma.fragment_limit(),
        handshake_max_length: config.handshake_max_length as u64,
        metadata_refresh_interval_s: config.metadata_refresh_interval.map_or(0, |interval| interval.as_secs()),
        slice_timeout_s: config.slice_timeout.map_or(0, |timeout| timeout.as_secs()),
        handshake_port: config.handshake_port.into(),
        handshake_backlog: config.handshake_backlog,
        handshake_connect_timeout_s: number(config.handshake_connect_timeout.as_secs() as usize),
        min_rpc_port: config.min_rpc_port.into(),
        max_rpc_port: config.max_rpc_port.into(),
        use_ipv6: config.use_ipv6.into(),
        metadata_cache: (!config.disable_metacache).into(),
        log_level: match config.log_level {
            Level::ERROR => te_log_level::TE_LOG_ERROR,
            Level::WARN => te_log_level::TE_LOG_WARNING,
            Level::INFO => te_log_level::TE_LOG_INFO,
            Level::DEBUG => te_log_level::TE_LOG_DEBUG,
            Level::TRACE => te_log_level::TE_LOG_TRACE,
        } as u32,
        parallel_registration: match config.parallel_registration {
            None | Some(Parallelism::Auto) => -1,
            Some(Parallelism::Sequential) => 0,
            Some(Parallelism::Parallel) => 1,
        },
        registration_threads: number(config.registration_threads),
        ib_port: rdma.port.into(),
        gid_index: rdma.gid_index.map_or(-1, c_int::from),
        pkey_index: rdma.pkey_index.into(),
        ib_traffic_class: if_set("MC_IB_TC", rdma.traffic_class),
        ib_service_level: if_set("MC_IB_SL", rdma.service_level),
        mtu: rdma.mtu,
        completion_queues: number(rdma.completion_queues),
        completion_queue_entries: rdma.completion_queue_entries,
        max_endpoints: number(rdma.max_endpoints),
        queue_pairs_per_endpoint: number(rdma.queue_pairs_per_endpoint),
        max_pieces: rdma.max_pieces,
        max_work_requests: rdma.max_work_requests,
        max_work_requests_is_set: is_set("MC_MAX_WR").into(),
        max_inline: rdma.max_inline,
        retry_count: rdma.retry_count,
        gid_retries: rdma.gid_retries,
        rail_pause_s: number(rdma.rail_pause.as_secs() as usize),
        reconnect_pause_ms: number(rdma.reconnect_pause.as_millis() as usize),
        endpoint_sieve: (!rdma.evict_oldest).into(),
        relaxed_ordering: rdma.relaxed_ordering.into(),
        round_robin: config.topology.round_robin.into(),
        same_name_affinity: rdma.same_name_affinity.into(),
        peer_affinity: rdma.use_peer_affinity.into(),
        force_tcp: config.force_tcp.into(),
        force_rdma: config.topology.force_rdma.into(),
        tcp_status_timeout_s: number(config.tcp_status_timeout.as_secs() as usize),
        tcp_lanes_per_peer: number(config.tcp_lanes_per_peer),
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;

    fn configuration(variables: &[(&str, &str)]) -> te_configuration {
        let lookup = |name: &str| variables.iter().find(|(other, _)| *other == name).map(|(_, text)| OsString::from(text));
        read(&Environment::from_source(&lookup, []), size_of::<te_configuration>())
    }

    #[test]
    fn an_empty_environment_gives_the_defaults_of_upstream() {
        let empty = configuration(&[]);
        assert_eq!((empty.struct_size, empty.max_mr_size, empty.slice_size), (size_of::<te_configuration>(), 1 << 40, 65536));
        assert_eq!((empty.ib_port, empty.gid_index, empty.pkey_index, empty.mtu), (1, -1, 0, 4096));
        assert_eq!((empty.ib_traffic_class, empty.ib_service_level, empty.parallel_registration), (-1, -1, -1));
        assert_eq!((empty.max_work_requests, empty.max_work_requests_is_set), (256, 0));
        assert_eq!((empty.metadata_cache, empty.metadata_refresh_interval_s, empty.use_ipv6, empty.slice_timeout_s), (1, 0, 0, 0));
        assert_eq!((empty.endpoint_sieve, empty.gid_retries, empty.retry_count, empty.handshake_port), (1, 2, 9, 12001));
        assert_eq!(empty.log_level, te_log_level::TE_LOG_WARNING as u32);
    }

    #[test]
    fn what_is_set_is_told_and_what_is_out_of_range_is_not() {
        let set = configuration(&[
            ("MC_MAX_WR", "512"),
            ("MC_IB_TC", "0"),
            ("MC_IB_SL", "16"),
            ("MC_MTU", "1024"),
            ("MC_LOG_LEVEL", "TRACE"),
            ("MC_DISABLE_METACACHE", "1"),
            ("MC_TE_METADATA_REFRESH_INTERVAL_SECONDS", "7"),
            ("MC_ENABLE_PARALLEL_REG_MR", "0"),
            ("MC_ENDPOINT_STORE_TYPE", "FIFO"),
            ("MC_CONN_PAUSE_TTL_MS", "250"),
            ("MC_GID_INDEX", "300"),
        ]);
        assert_eq!((set.max_work_requests, set.max_work_requests_is_set), (512, 1));
        assert_eq!((set.ib_traffic_class, set.ib_service_level, set.gid_index), (0, -1, -1));
        assert_eq!((set.mtu, set.log_level, set.metadata_cache), (1024, te_log_level::TE_LOG_TRACE as u32, 0));
        assert_eq!((set.metadata_refresh_interval_s, set.parallel_registration, set.endpoint_sieve), (7, 0, 0));
        assert_eq!(set.reconnect_pause_ms, 250);
    }
}
