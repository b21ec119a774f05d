//! Writing descriptors and other JSON as jsoncpp's FastWriter does.

use std::fmt::Write;
use std::sync::Arc;

use serde_json::{Value, json};

use super::{BufferDescriptor, DeviceDescriptor, PriorityMatrix, SegmentDescriptor, SegmentHeader};
use crate::registry::{Chunk, MemoryKey, Region, Registrations};
use crate::sys::clock;

impl SegmentDescriptor {
    /// The document that it was read from, as far as it is kept: decoding it gives the same again.
    pub fn to_json(&self) -> String {
        let has_devices = self.has_rdma_form();
        let buffer = |buffer: &BufferDescriptor| {
            let mut entry = json!({"addr": buffer.address, "length": buffer.length, "name": *buffer.name});
            if has_devices {
                entry["lkey"] = json!(buffer.lkey);
                entry["rkey"] = json!(buffer.rkey);
            }
            entry
        };
        let mut document = json!({
            "buffers": self.buffers.iter().map(buffer).collect::<Vec<_>>(),
            "name": self.name,
            "protocol": match &self.protocols[..] {
                [protocol] => json!(protocol),
                protocols => json!(protocols),
            },
            "rdma_server_name": self.rdma_server_name,
            "tcp_data_host": self.tcp_data_host,
            "tcp_data_port": self.tcp_data_port,
            "tcp_proto_version": self.tcp_proto_version,
            "timestamp": self.timestamp,
        });
        if has_devices {
            document["devices"] = self.devices.iter().map(DeviceDescriptor::to_json).collect();
            document["priority_matrix"] = matrix_json(&self.priority_matrix);
        }
        let mut out = String::new();
        write_json(&document, &mut out);
        out
    }
}

impl DeviceDescriptor {
    fn to_json(&self) -> Value {
        json!({"name": self.name, "lid": self.lid, "gid": self.gid})
    }
}

fn matrix_json(matrix: &PriorityMatrix) -> Value {
    if matrix.is_empty() { Value::Null } else { json!(matrix) }
}

impl SegmentHeader {
    /// The whole document as pieces to be sent one after the other. `buffers` are blocks of entries that are joined by commas, made
    /// by [`SegmentHeader::encode_buffer`]; blocks may be empty. Costs one piece a block and copies none.
    pub fn assemble(&self, buffers: Vec<Arc<str>>) -> Vec<Arc<str>> {
        let comma: Arc<str> = ",".into();
        let mut pieces = Vec::with_capacity(2 * buffers.len() + 2);
        pieces.push(r#"{"buffers":["#.into());
        for block in buffers.into_iter().filter(|block| !block.is_empty()) {
            if pieces.len() > 1 {
                pieces.push(comma.clone());
            }
            pieces.push(block);
        }
        pieces.push(self.tail(&clock::local_timestamp()).into());
        pieces
    }

    fn tail(&self, timestamp: &str) -> String {
        let mut out = String::from("]");
        if let Some(rdma) = &self.rdma {
            out.push_str(r#","devices":"#);
            write_json(&rdma.devices.iter().map(DeviceDescriptor::to_json).collect(), &mut out);
        }
        out.push_str(r#","name":"#);
        write_json_string(&self.name, &mut out);
        if let Some(rdma) = &self.rdma {
            out.push_str(r#","priority_matrix":"#);
            write_json(&matrix_json(&rdma.priority_matrix), &mut out);
        }
        out.push_str(r#","protocol":"#);
        write_json_string(&self.protocol, &mut out);
        out.push_str(r#","rdma_server_name":"#);
        write_json_string(self.rdma.as_ref().map_or("", |rdma| &rdma.server_name), &mut out);
        out.push_str(r#","tcp_data_host":"#);
        write_json_string(&self.tcp_data_host, &mut out);
        let _ = write!(out, r#","tcp_data_port":{},"tcp_proto_version":{}"#, self.tcp_data_port, self.tcp_proto_version);
        out.push_str(r#","timestamp":"#);
        write_json_string(timestamp, &mut out);
        out.push_str("}\n");
        out
    }

    /// Appends what peers are told of one region: for TCP an entry; for RDMA an entry for each chunk, joined by commas, with one key for each
    /// device, 0 where it is gone. Nothing where peers may not touch it and TCP would be the way.
    pub fn encode_buffer(&self, region: &Region, out: &mut String) {
        if self.rdma.is_none() {
            if region.remote_accessible() {
                let range = region.range();
                self.write_buffer(range.address(), range.length(), out);
            }
            return;
        }
        if let Some(registrations) = region.registrations() {
            self.encode_registrations(region, registrations, out);
        }
    }

    /// What [`SegmentHeader::encode_buffer`] appends with RDMA once the region has these keys.
    pub fn encode_registrations(&self, region: &Region, registrations: &Registrations, out: &mut String) {
        let location = registrations.place().unwrap_or(region.location());
        for (index, chunk) in registrations.chunks().iter().enumerate() {
            if index > 0 {
                out.push(',');
            }
            write_chunk(chunk, location, region.remote_accessible(), out);
        }
    }

    fn write_buffer(&self, address: u64, length: u64, out: &mut String) {
        let _ = write!(out, r#"{{"addr":{address},"length":{length},"name":"#);
        write_json_string(&self.name, out);
        out.push('}');
    }
}

/// Appends the RDMA form of one entry.
fn write_chunk(chunk: &Chunk, location: &str, remote_accessible: bool, out: &mut String) {
    let (address, length) = (chunk.range().address(), chunk.range().length());
    let write_keys = |count: usize, key: fn(&MemoryKey) -> u32, out: &mut String| {
        for device in 0..count {
            let comma = if device > 0 { "," } else { "" };
            let _ = write!(out, "{comma}{}", chunk.key(device).as_ref().map_or(0, key));
        }
    };
    let _ = write!(out, r#"{{"addr":{address},"length":{length},"lkey":["#);
    write_keys(chunk.device_count(), |key| key.lkey, out);
    out.push_str(r#"],"name":"#);
    // An entry without a name would have peers refuse the whole.
    write_json_string(if location.is_empty() { "*" } else { location }, out);
    out.push_str(r#","rkey":["#);
    write_keys(if remote_accessible { chunk.device_count() } else { 0 }, |key| key.rkey, out);
    out.push_str("]}");
}

/// Appends a string with its quotes. Everything beyond ASCII becomes `\uXXXX`, in two parts where UTF-16 needs two.
pub fn write_json_string(text: &str, out: &mut String) {
    out.push('"');
    let mut rest = text;
    while let Some(special) = rest.find(|c: char| c < ' ' || c == '"' || c == '\\' || !c.is_ascii()) {
        let (plain, after) = rest.split_at(special);
        out.push_str(plain);
        let mut characters = after.chars();
        match characters.next().unwrap_or_default() {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            other => {
                for unit in other.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
        }
        rest = characters.as_str();
    }
    out.push_str(rest);
    out.push('"');
}

/// Appends a JSON value: compact, keys in ascending order, without the newline that ends a document.
pub fn write_json(value: &Value, out: &mut String) {
    match value {
        Value::String(text) => write_json_string(text, out),
        Value::Array(elements) => {
            out.push('[');
            for (index, element) in elements.iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                write_json(element, out);
            }
            out.push(']');
        }
        Value::Object(members) => {
            out.push('{');
            for (index, (key, member)) in members.iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                write_json_string(key, out);
                out.push(':');
                write_json(member, out);
            }
            out.push('}');
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {
            let _ = write!(out, "{value}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quoted(text: &str) -> String {
        let mut out = String::new();
        write_json_string(text, &mut out);
        out
    }

    fn header(name: &str, tcp_data_port: u16) -> SegmentHeader {
        let tcp_data_host = name.rsplit_once(':').unwrap().0.into();
        SegmentHeader { name: name.into(), protocol: "tcp".into(), tcp_data_host, tcp_data_port, tcp_proto_version: 2, rdma: None }
    }

    #[test]
    fn a_descriptor_is_written_as_it_was_read() {
        let tcp = r#"{"buffers":[{"addr":4096,"length":8,"name":"a:1"}],"name":"a:1","protocol":"tcp","rdma_server_name":"","tcp_data_host":"a","tcp_data_port":5,"tcp_proto_version":2,"timestamp":"t"}"#;
        let rdma = concat!(
            r#"{"buffers":[{"addr":4096,"length":8,"lkey":[1],"name":"cpu:0","rkey":[2]}],"#,
            r#""devices":[{"gid":"00:01","lid":3,"name":"mlx5_0"}],"name":"a:1","priority_matrix":{"cpu:0":[["mlx5_0"],[]]},"#,
            r#""protocol":"rdma","rdma_server_name":"b:1","tcp_data_host":"","tcp_data_port":0,"tcp_proto_version":1,"timestamp":"\u00fc"}"#
        );
        let empty = rdma.replace(r#"{"cpu:0":[["mlx5_0"],[]]}"#, "null");
        let several = tcp.replace(r#""protocol":"tcp""#, r#""protocol":["cxl","tcp"]"#);
        for text in [tcp, rdma, &empty, &several] {
            let descriptor = SegmentDescriptor::decode(text.as_bytes(), &"a test").unwrap();
            assert_eq!(descriptor.to_json(), text);
        }
    }

    /// Published by mooncake-transfer-engine-non-cuda 0.3.13.post1 for one region of 8192 bytes.
    #[test]
    fn documents_equal_what_upstream_publishes() {
        let captured = concat!(
            r#"{"buffers":[{"addr":94573289459408,"length":8192,"name":"127.0.0.1:16498"}],"name":"127.0.0.1:16498","#,
            r#""protocol":"tcp","rdma_server_name":"","tcp_data_host":"127.0.0.1","tcp_data_port":15983,"#,
            r#""tcp_proto_version":2,"timestamp":"2026-11-29 15:54:51.448344"}"#,
            "\n"
        );
        let header = header("127.0.0.1:16498", 15983);
        let mut block = String::new();
        header.write_buffer(94573289459408, 8192, &mut block);
        let written = format!(r#"{{"buffers":[{block}{}"#, header.tail("2026-11-29 15:54:51.448344"));
        assert_eq!(written, captured);
    }

    /// A host name with every control character, as the same version of upstream publishes it.
    #[test]
    fn strings_are_escaped_as_upstream_does() {
        let controls: String = ('\u{1}'..' ').chain("\u{7f}/\"\\:15734".chars()).collect();
        let captured = concat!(
            r#""\u0001\u0002\u0003\u0004\u0005\u0006\u0007\b\t\n\u000b\f\r\u000e\u000f\u0010\u0011\u0012\u0013\u0014\u0015"#,
            r#"\u0016\u0017\u0018\u0019\u001a\u001b\u001c\u001d\u001e\u001f"#,
            "\u{7f}",
            r#"/\"\\:15734""#
        );
        assert_eq!(quoted(&controls), captured);
        assert_eq!(quoted("é\u{2028}\u{d7ff}\u{ffff}\u{1F600}"), r#""\u00e9\u2028\ud7ff\uffff\ud83d\ude00""#);
        assert_eq!(quoted("\0"), r#""\u0000""#);
        assert_eq!(quoted(""), r#""""#);
    }

    #[test]
    fn strings_of_all_kinds_round_trip() {
        let text: String = (0..0x11_0000).step_by(97).filter_map(char::from_u32).chain('\0'..'\u{100}').collect();
        assert!(quoted(&text).is_ascii());
        assert_eq!(serde_json::from_str::<String>(&quoted(&text)).unwrap(), text);
    }

    #[test]
    fn values_are_compact_and_sorted() {
        let value = serde_json::json!({"z": [1, -2, 1.5, true, null], "a": {"é": "\n"}, "e": [], "o": {}});
        let mut out = String::new();
        write_json(&value, &mut out);
        assert_eq!(out, r#"{"a":{"\u00e9":"\n"},"e":[],"o":{},"z":[1,-2,1.5,true,null]}"#);
    }

    fn chunk(address: u64, length: u64, keys: &[Option<MemoryKey>]) -> Chunk {
        // SAFETY: nobody touches these addresses.
        #[allow(unsafe_code)]
        let range = unsafe { crate::sys::MemoryRange::new(address, length) }.unwrap();
        Chunk::new(range, keys)
    }

    /// The form that upstream's metadata classes give.
    #[test]
    fn rdma_entries_have_one_key_for_each_device() {
        let keys = [Some(MemoryKey { lkey: 7, rkey: 4294967295, handle: 1 }), None];
        let mut out = String::new();
        write_chunk(&chunk(4096, 8192, &keys), "cpu:0", true, &mut out);
        out.push(',');
        write_chunk(&chunk(65536, 1, &keys), "", false, &mut out);
        let expected = concat!(
            r#"{"addr":4096,"length":8192,"lkey":[7,0],"name":"cpu:0","rkey":[4294967295,0]},"#,
            r#"{"addr":65536,"length":1,"lkey":[7,0],"name":"*","rkey":[]}"#
        );
        assert_eq!(out, expected);
    }

    #[test]
    fn rdma_documents_name_devices_and_their_priorities() {
        let device = |name: &str, lid| DeviceDescriptor { name: name.into(), lid, gid: "00:01".into() };
        let mut rdma = super::super::RdmaHeader {
            server_name: "10.0.0.2:15234".into(),
            devices: vec![device("mlx5_0", 0), device("mlx5_1", 7)],
            priority_matrix: [("cpu:0".to_string(), (vec!["mlx5_0".to_string()], vec!["mlx5_1".to_string()]))].into(),
        };
        let header = |rdma| SegmentHeader { protocol: "rdma".into(), rdma: Some(rdma), ..header("10.0.0.1:15234", 0) };
        let written = header(rdma.clone()).tail("now");
        let expected = concat!(
            r#"],"devices":[{"gid":"00:01","lid":0,"name":"mlx5_0"},{"gid":"00:01","lid":7,"name":"mlx5_1"}],"name":"10.0.0.1:15234","#,
            r#""priority_matrix":{"cpu:0":[["mlx5_0"],["mlx5_1"]]},"protocol":"rdma","rdma_server_name":"10.0.0.2:15234","#,
            r#""tcp_data_host":"10.0.0.1","tcp_data_port":0,"tcp_proto_version":2,"timestamp":"now"}"#,
            "\n"
        );
        assert_eq!(written, expected);
        let decoded = SegmentDescriptor::decode(format!(r#"{{"buffers":[{written}"#).as_bytes(), &"a peer").unwrap();
        assert_eq!((&decoded.devices, &decoded.priority_matrix), (&rdma.devices, &rdma.priority_matrix));
        assert_eq!(decoded.rdma_server_name, rdma.server_name);
        rdma.priority_matrix.clear();
        assert!(header(rdma).tail("now").contains(r#""priority_matrix":null"#));
    }

    #[test]
    fn assembled_documents_decode_to_what_went_in() {
        let header = header("[::1]:15329", 16848);
        for blocks in [vec![], vec![1], vec![2, 0, 1], vec![0, 0]] {
            let mut expected = Vec::new();
            let mut texts: Vec<Arc<str>> = Vec::new();
            for size in blocks {
                let mut block = String::new();
                for _ in 0..size {
                    let address = 4096 * (expected.len() as u64 + 1);
                    if !block.is_empty() {
                        block.push(',');
                    }
                    header.write_buffer(address, u64::MAX - address, &mut block);
                    expected.push((address, u64::MAX - address));
                }
                texts.push(block.into());
            }
            let document = header.assemble(texts).concat();
            assert!(document.ends_with("\"}\n"));
            let decoded = SegmentDescriptor::decode(document.as_bytes(), &"the test").unwrap();
            assert_eq!(decoded.buffers.iter().map(|buffer| (buffer.address, buffer.length)).collect::<Vec<_>>(), expected);
            assert!(decoded.buffers.iter().all(|buffer| &*buffer.name == "[::1]:15329"));
            assert_eq!((decoded.tcp_data_port, decoded.tcp_proto_version), (16848, 2));
            assert_eq!(decoded.protocols, ["tcp"]);
        }
    }
}
