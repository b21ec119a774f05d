//! Segment descriptors: what a process tells others about itself, and its JSON.
//!
//! [`SegmentDescriptor::decode`] reads what peers and metadata servers send; it trusts nothing, and an unsound descriptor is refused
//! as a whole with a text that names the entry. [`SegmentHeader`] writes what this process publishes, in the form of jsoncpp's
//! FastWriter: compact, keys in ascending order, ASCII only, one newline at the end.
//!
//! Everything here is plain data without locks. Decoding is one pass over the text, about 100 bytes of memory a buffer entry; equal
//! names share one allocation. Assembling copies no entry: it puts the head and the tail around blocks that are encoded already.

mod decode;
mod encode;
pub mod host_port;
pub mod publisher;
pub mod store;

use std::collections::BTreeMap;
use std::sync::Arc;

pub use encode::{write_json, write_json_string};

/// What a process publishes of itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SegmentDescriptor {
    /// Segment name: `host:port` of the handshake channel in peer-to-peer mode. May be empty if the peer left it out.
    pub name: String,
    /// Usually one; several in builds of upstream with several protocols, and then TCP is the last: as upstream, others are preferred.
    pub protocols: Vec<String>,
    /// Host of the TCP data port, without brackets. Empty: the host of the handshake channel, as with older peers.
    pub tcp_data_host: String,
    /// Port of the TCP transport; 0 if it is not installed.
    pub tcp_data_port: u16,
    /// 1 or 2; 1 if the peer does not say.
    pub tcp_proto_version: u32,
    /// Server part of the NIC paths; empty for peers without RDMA.
    pub rdma_server_name: String,
    /// When the peer encoded it, in the peer's local time. For people only.
    pub timestamp: String,
    /// Registered memory in the order of registration.
    pub buffers: Vec<BufferDescriptor>,
    /// NICs; keys of buffers are in this order.
    pub devices: Vec<DeviceDescriptor>,
    /// Location -> (preferred NICs, available NICs).
    pub priority_matrix: PriorityMatrix,
}

/// One registered range of a peer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BufferDescriptor {
    /// Location for RDMA (`cpu:0`), the server's name for TCP.
    pub name: Arc<str>,
    /// First byte, in the address space of the peer. Never 0 with TCP and RDMA.
    pub address: u64,
    /// Bytes. Never 0 with TCP and RDMA.
    pub length: u64,
    /// Local keys, one a device.
    pub lkey: Vec<u32>,
    /// Remote keys, one a device; empty if peers may not touch the range.
    pub rkey: Vec<u32>,
}

/// One NIC of a peer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeviceDescriptor {
    /// Such as `mlx5_0`.
    pub name: String,
    /// Local identifier of the port; 0 with RoCE.
    pub lid: u16,
    /// Sixteen hexadecimal bytes joined by colons.
    pub gid: String,
}

/// What the local process publishes beside its buffers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SegmentHeader {
    /// Segment name; must be dialable by peers in peer-to-peer mode.
    pub name: String,
    /// Such as `tcp`.
    pub protocol: String,
    /// Where peers find the TCP data port, without brackets; empty: at the host of the handshake channel.
    pub tcp_data_host: String,
    /// Port of the TCP transport; 0 if it is not installed.
    pub tcp_data_port: u16,
    /// 2 with the TCP transport, else 1.
    pub tcp_proto_version: u32,
    /// What the RDMA transport adds, once it is installed; entries then have RDMA's form.
    pub rdma: Option<RdmaHeader>,
}

/// What a process with RDMA publishes beside its buffers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RdmaHeader {
    /// Server part of the NIC paths.
    pub server_name: String,
    /// All NICs, those that are gone included, in the order of the keys.
    pub devices: Vec<DeviceDescriptor>,
    /// Location -> (preferred NICs, available NICs); only NICs that can be used.
    pub priority_matrix: PriorityMatrix,
}

/// Location -> (preferred NICs, available NICs).
pub type PriorityMatrix = BTreeMap<String, (Vec<String>, Vec<String>)>;

/// The beginning of a text that a stranger sent, fit for a line in the log.
pub(crate) fn excerpt(text: &str) -> String {
    const LONGEST: usize = 160;
    match text.char_indices().nth(LONGEST) {
        None => text.escape_debug().to_string(),
        Some((end, _)) => format!("{}… ({} bytes)", text[..end].escape_debug(), text.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excerpts_are_short_and_on_one_line() {
        assert_eq!(excerpt("a\nb"), "a\\nb");
        assert_eq!(excerpt(&"ä".repeat(160)), "ä".repeat(160));
        assert_eq!(excerpt(&"ä".repeat(1000)), format!("{}… (2000 bytes)", "ä".repeat(160)));
    }
}
