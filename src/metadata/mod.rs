//! Segment descriptors and their JSON. (skeleton)
#![allow(missing_docs, unused_variables)]

use std::sync::Arc;

use crate::error::Result;
use crate::registry::Region;

/// What a process publishes of itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SegmentDescriptor {
    pub name: String,
    /// Usually one; an array in multi-protocol builds.
    pub protocols: Vec<String>,
    pub tcp_data_port: u16,
    pub tcp_proto_version: u32,
    pub rdma_server_name: String,
    pub timestamp: String,
    pub buffers: Vec<BufferDescriptor>,
    pub devices: Vec<DeviceDescriptor>,
    /// Location -> [preferred NICs, available NICs]
    pub priority_matrix: std::collections::BTreeMap<String, (Vec<String>, Vec<String>)>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct BufferDescriptor {
    pub name: Arc<str>,
    pub address: u64,
    pub length: u64,
    pub lkey: Vec<u32>,
    pub rkey: Vec<u32>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeviceDescriptor {
    pub name: String,
    pub lid: u16,
    pub gid: String,
}

impl SegmentDescriptor {
    /// Decodes and validates (interop D.5).
    pub fn decode(text: &[u8]) -> Result<SegmentDescriptor> {
        todo!()
    }
}

/// What the local process publishes beside its buffers.
#[derive(Clone, Debug, Default)]
pub struct SegmentHeader {
    pub name: String,
    pub protocol: String,
    pub tcp_data_port: u16,
    pub tcp_proto_version: u32,
}

impl SegmentHeader {
    /// The whole document as pieces to be sent one after the other; `buffers` are comma-joined entries per block.
    /// FastWriter form: compact, sorted keys, trailing newline.
    pub fn assemble(&self, buffers: Vec<Arc<str>>) -> Vec<Arc<str>> {
        todo!()
    }
    /// The tcp form of one buffer entry.
    pub fn encode_buffer(&self, region: &Region, out: &mut String) {
        todo!()
    }
}

/// Encodes a string the way jsoncpp's FastWriter does, with quotes, non-ASCII as \uXXXX.
pub fn write_json_string(text: &str, out: &mut String) {
    todo!()
}
