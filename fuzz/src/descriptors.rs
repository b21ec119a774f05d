//! Segment descriptors: what is accepted is sound, and assembling it anew gives a document that decodes to the same.

use std::fmt::Write;
use std::sync::Arc;

use transfer_engine::Code;
use transfer_engine::metadata::{BufferDescriptor, SegmentDescriptor, SegmentHeader, write_json, write_json_string};

/// One document.
pub fn run(data: &[u8]) {
    check_json(data);
    let descriptor = match SegmentDescriptor::decode(data) {
        Ok(descriptor) => descriptor,
        Err(error) => {
            assert!(matches!(error.code(), Code::MalformedJson | Code::Metadata), "{error}");
            assert!(!error.message().contains('\n') && error.message().len() < 2000, "{error}");
            return;
        }
    };
    let speaks = |names: &[&str]| descriptor.protocols.iter().any(|protocol| names.contains(&&**protocol));
    assert!(!descriptor.protocols.is_empty());
    if speaks(&["tcp", "rdma"]) {
        assert!(descriptor.buffers.iter().all(|buffer| buffer.address != 0 && buffer.length != 0));
    }
    if speaks(&["rdma"]) {
        let is_sound = |buffer: &BufferDescriptor| buffer.rkey.is_empty() || buffer.rkey.len() == descriptor.devices.len();
        assert!(descriptor.buffers.iter().all(is_sound));
    }
    if descriptor.protocols == ["tcp"] {
        assemble_again(descriptor);
    }
}

/// Any JSON that is written is read back as the same, and is ASCII on one line.
fn check_json(data: &[u8]) {
    let Ok(value) = serde_json::from_slice::<serde_json::Value>(data) else { return };
    let mut text = String::new();
    write_json(&value, &mut text);
    assert!(text.is_ascii() && !text.contains('\n'));
    assert_eq!(serde_json::from_str::<serde_json::Value>(&text).expect("it is JSON"), value);
}

fn assemble_again(descriptor: SegmentDescriptor) {
    let header = SegmentHeader {
        name: descriptor.name.clone(),
        protocol: "tcp".into(),
        tcp_data_host: descriptor.tcp_data_host.clone(),
        tcp_data_port: descriptor.tcp_data_port,
        tcp_proto_version: descriptor.tcp_proto_version,
    };
    // In blocks of two, as the registry keeps blocks of many, with an empty one in front.
    let mut blocks: Vec<Arc<str>> = vec!["".into()];
    for pair in descriptor.buffers.chunks(2) {
        let entry = |buffer: &BufferDescriptor| {
            let mut text = String::new();
            let _ = write!(text, r#"{{"addr":{},"length":{},"name":"#, buffer.address, buffer.length);
            write_json_string(&buffer.name, &mut text);
            text.push('}');
            text
        };
        blocks.push(pair.iter().map(entry).collect::<Vec<_>>().join(",").into());
    }
    let document = header.assemble(blocks).concat();
    assert!(document.is_ascii() && document.ends_with("}\n"));
    let again = SegmentDescriptor::decode(document.as_bytes()).expect("what is published can be read");
    let plain = |buffer: BufferDescriptor| BufferDescriptor { lkey: Vec::new(), rkey: Vec::new(), ..buffer };
    let expected = SegmentDescriptor {
        timestamp: again.timestamp.clone(),
        rdma_server_name: String::new(),
        buffers: descriptor.buffers.into_iter().map(plain).collect(),
        devices: Vec::new(),
        priority_matrix: Default::default(),
        ..descriptor
    };
    assert_eq!(again, expected);
}
