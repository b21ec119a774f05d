//! Segment descriptors: what is accepted is sound, and assembling it anew gives a document that decodes to the same.

use std::fmt::Write;
use std::sync::Arc;

use serde_json::Value;
use transfer_engine::Code;
use transfer_engine::metadata::{BufferDescriptor, SegmentDescriptor, SegmentHeader, write_json, write_json_string};

/// One document.
pub fn run(data: &[u8]) {
    check_json(data);
    let descriptor = match SegmentDescriptor::decode(data, &"the input") {
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
    let Ok(value) = serde_json::from_slice::<Value>(data) else { return };
    let mut text = String::new();
    write_json(&value, &mut text);
    assert!(text.is_ascii() && !text.contains('\n'));
    let again = serde_json::from_str::<Value>(&text).expect("it is JSON");
    assert!(are_same(&again, &value), "{value} is written as {text}");
}

/// Fractions may differ in their last digit: serde_json reads them only nearly.
fn are_same(left: &Value, right: &Value) -> bool {
    match (left, right) {
        (Value::Array(left), Value::Array(right)) => {
            left.len() == right.len() && left.iter().zip(right).all(|(left, right)| are_same(left, right))
        }
        (Value::Object(left), Value::Object(right)) => {
            let are_same = |((left_key, left), (right_key, right))| left_key == right_key && are_same(left, right);
            left.len() == right.len() && left.iter().zip(right).all(are_same)
        }
        (Value::Number(left), Value::Number(right)) if left.is_f64() || right.is_f64() => match (left.as_f64(), right.as_f64()) {
            (Some(left), Some(right)) => (left - right).abs() <= 1e-15 * left.abs().max(right.abs()),
            _ => false,
        },
        _ => left == right,
    }
}

fn assemble_again(descriptor: SegmentDescriptor) {
    let header = SegmentHeader {
        name: descriptor.name.clone(),
        protocol: "tcp".into(),
        tcp_data_host: descriptor.tcp_data_host.clone(),
        tcp_data_port: descriptor.tcp_data_port,
        tcp_proto_version: descriptor.tcp_proto_version,
        rdma: None,
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
    let again = SegmentDescriptor::decode(document.as_bytes(), &"the input").expect("what is published can be read");
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
