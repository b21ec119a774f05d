//! Reading descriptors. Unknown keys are skipped; a value of the wrong type, or one that contradicts another, refuses the whole.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::{BufferDescriptor, DeviceDescriptor, SegmentDescriptor, excerpt};
use crate::error::{Code, Error, Result};

/// Protocols that upstream can encode. Only `tcp` and those of [`RDMA_LIKE`] have buffers that this library understands.
const PROTOCOLS: [&str; 17] = [
    "tcp",
    "rdma",
    "barex",
    "efa",
    "cxi",
    "ub",
    "nccl",
    "ascend",
    "nvlink",
    "nvlink_intra",
    "hip",
    "maca",
    "musa",
    "ubshmem",
    "sunrise_link",
    "cxl",
    "nvmeof",
];

/// Protocols whose descriptors have the form of RDMA's.
const RDMA_LIKE: [&str; 4] = ["rdma", "barex", "efa", "cxi"];

impl SegmentDescriptor {
    /// Decodes and checks a descriptor; `source` says in the texts of errors where it comes from.
    ///
    /// [`Code::MalformedJson`]: not JSON, or a value has the wrong type. [`Code::Metadata`]: the JSON describes no sound segment.
    /// Descriptors of protocols that this library does not speak are read as far as their keys are known; of a descriptor with
    /// several protocols only the TCP and RDMA buffers are kept.
    pub fn decode(text: &[u8], source: &dyn std::fmt::Display) -> Result<SegmentDescriptor> {
        let Object(wire) = serde_json::from_slice::<Object<Wire>>(text).map_err(|error| {
            let reason = excerpt(&error.to_string());
            Error::new(
                Code::MalformedJson,
                format!("the segment descriptor of {} bytes from {source} cannot be read: {reason}", text.len()),
            )
        })?;
        let mut protocols = wire.protocol.0;
        protocols.sort_by_key(|protocol| protocol == "tcp");
        let descriptor = SegmentDescriptor {
            name: wire.name.unwrap_or_default(),
            protocols,
            // Peers that know the key ignore it when it is no text.
            tcp_data_host: wire.tcp_data_host.as_str().unwrap_or_default().into(),
            tcp_data_port: wire.tcp_data_port.0,
            tcp_proto_version: wire.tcp_proto_version.map_or(1, |version| version.0),
            rdma_server_name: wire.rdma_server_name.unwrap_or_default(),
            timestamp: wire.timestamp.unwrap_or_default(),
            buffers: wire.buffers.0,
            devices: wire.devices.unwrap_or_default().into_iter().map(DeviceDescriptor::from).collect(),
            priority_matrix: read_priority_matrix(wire.priority_matrix.unwrap_or_default()),
        };
        match descriptor.find_fault() {
            None => Ok(descriptor),
            Some(fault) => {
                let name = excerpt(&descriptor.name);
                Err(Error::new(Code::Metadata, format!("the descriptor of segment '{name}' from {source} is refused: {fault}")))
            }
        }
    }

    /// Whether it has devices, and its buffers have keys.
    pub(super) fn has_rdma_form(&self) -> bool {
        self.protocols.iter().any(|protocol| RDMA_LIKE.contains(&protocol.as_str()))
    }

    fn find_fault(&self) -> Option<String> {
        if self.protocols.is_empty() {
            return Some("it names no protocol".into());
        }
        if let Some(unknown) = self.protocols.iter().find(|protocol| !PROTOCOLS.contains(&protocol.as_str())) {
            return Some(format!("protocol '{}' is unknown", excerpt(unknown)));
        }
        let is_rdma = self.has_rdma_form();
        if !is_rdma && !self.protocols.iter().any(|protocol| protocol == "tcp") {
            return None;
        }
        let devices = if is_rdma { &self.devices[..] } else { &[] };
        for (index, device) in devices.iter().enumerate() {
            if device.name.is_empty() || device.gid.is_empty() {
                return Some(format!("devices[{index}] ('{}') lacks a name or a gid", excerpt(&device.name)));
            }
        }
        for (index, buffer) in self.buffers.iter().enumerate() {
            let BufferDescriptor { name, address, length, lkey, rkey } = buffer;
            if *address == 0 || *length == 0 {
                return Some(format!("buffers[{index}] has address {address:#x} and length {length}; neither may be 0"));
            }
            // Entries of a descriptor with several protocols are not known to carry a name or keys each.
            if self.protocols.len() == 1 && name.is_empty() {
                return Some(format!("buffers[{index}] at {address:#x} has no name"));
            }
            if is_rdma && !rkey.is_empty() && (rkey.len() != lkey.len() || rkey.len() != devices.len()) {
                return Some(format!(
                    "buffers[{index}] at {address:#x} has {} remote keys, {} local keys, for {} devices",
                    rkey.len(),
                    lkey.len(),
                    devices.len()
                ));
            }
        }
        None
    }
}

/// Upstream keeps the entries before a bad one, and so do we: the matrix is advice.
fn read_priority_matrix(matrix: Map<String, Value>) -> BTreeMap<String, (Vec<String>, Vec<String>)> {
    let mut read = BTreeMap::new();
    for (location, names) in matrix {
        match serde_json::from_value::<[Vec<String>; 2]>(names) {
            Ok([preferred, available]) => read.insert(location, (preferred, available)),
            Err(error) => {
                let (location, error) = (excerpt(&location), excerpt(&error.to_string()));
                tracing::warn!(
                    "priority_matrix['{location}'] is not two lists of device names ({error}); it and what follows are left out"
                );
                break;
            }
        };
    }
    read
}

#[derive(serde::Deserialize)]
#[serde(default)]
#[derive(Default)]
struct Wire {
    name: Option<String>,
    protocol: Protocols,
    tcp_data_host: Value,
    tcp_data_port: Integer<u16>,
    tcp_proto_version: Option<Integer<u32>>,
    rdma_server_name: Option<String>,
    timestamp: Option<String>,
    buffers: Buffers,
    devices: Option<Vec<Object<DeviceWire>>>,
    priority_matrix: Option<Map<String, Value>>,
}

#[derive(serde::Deserialize)]
struct DeviceWire {
    #[serde(default)]
    name: String,
    #[serde(default)]
    lid: Integer<u16>,
    #[serde(default)]
    gid: String,
}

impl From<Object<DeviceWire>> for DeviceDescriptor {
    fn from(Object(wire): Object<DeviceWire>) -> DeviceDescriptor {
        DeviceDescriptor { name: wire.name, lid: wire.lid.0, gid: wire.gid }
    }
}

#[derive(serde::Deserialize)]
struct BufferWire<'a> {
    #[serde(default, borrow)]
    name: Cow<'a, str>,
    #[serde(default)]
    addr: Integer<u64>,
    #[serde(default)]
    length: Integer<u64>,
    #[serde(default)]
    lkey: Vec<Integer<u32>>,
    #[serde(default)]
    rkey: Vec<Integer<u32>>,
    /// Only in descriptors with several protocols.
    #[serde(default, borrow)]
    protocol: Option<Cow<'a, str>>,
}

/// A JSON object. Derived readers of structures would take an array of the values, too.
struct Object<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct ObjectVisitor<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
            type Value = Object<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> std::result::Result<Object<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }
        deserializer.deserialize_map(ObjectVisitor(PhantomData))
    }
}

/// A whole number that fits, written with or without a fraction of zero.
#[derive(Clone, Copy, Default)]
struct Integer<T>(T);

impl<'de, T: TryFrom<u64>> Deserialize<'de> for Integer<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct IntegerVisitor<T>(PhantomData<T>);
        impl<T: TryFrom<u64>> Visitor<'_> for IntegerVisitor<T> {
            type Value = Integer<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a whole number of {} bits", 8 * size_of::<T>())
            }
            fn visit_u64<E: serde::de::Error>(self, number: u64) -> std::result::Result<Integer<T>, E> {
                let out_of_range = |_| E::invalid_value(serde::de::Unexpected::Unsigned(number), &self);
                T::try_from(number).map(Integer).map_err(out_of_range)
            }
            fn visit_f64<E: serde::de::Error>(self, number: f64) -> std::result::Result<Integer<T>, E> {
                // 2^64 itself is out of range, and every float below it that has no fraction converts exactly.
                if number.fract() == 0.0 && (0.0..18_446_744_073_709_551_616.0).contains(&number) {
                    return self.visit_u64(number as u64);
                }
                Err(E::invalid_value(serde::de::Unexpected::Float(number), &self))
            }
        }
        deserializer.deserialize_u64(IntegerVisitor(PhantomData))
    }
}

/// One name, or several.
#[derive(Default)]
struct Protocols(Vec<String>);

impl<'de> Deserialize<'de> for Protocols {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        match Value::deserialize(deserializer)? {
            Value::String(name) => Ok(Protocols(vec![name])),
            Value::Array(names) => {
                let name = |name| match name {
                    Value::String(name) => Ok(name),
                    _ => Err(D::Error::custom("an element of \"protocol\" is not a string")),
                };
                names.into_iter().map(name).collect::<std::result::Result<_, _>>().map(Protocols)
            }
            _ => Err(D::Error::custom("\"protocol\" is neither a string nor an array of strings")),
        }
    }
}

/// The entries of `buffers`, which may be many.
#[derive(Default)]
struct Buffers(Vec<BufferDescriptor>);

impl<'de> Deserialize<'de> for Buffers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct BuffersVisitor;
        impl<'de> Visitor<'de> for BuffersVisitor {
            type Value = Buffers;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an array of buffers")
            }
            fn visit_unit<E>(self) -> std::result::Result<Buffers, E> {
                Ok(Buffers::default())
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> std::result::Result<Buffers, A::Error> {
                let mut names = Names::default();
                let mut buffers = Vec::new();
                while let Some(Object(entry)) = entries.next_element::<Object<BufferWire<'de>>>()? {
                    let known = |protocol: &Cow<'_, str>| protocol == "tcp" || RDMA_LIKE.contains(&&**protocol);
                    if entry.protocol.as_ref().is_none_or(known) {
                        buffers.push(BufferDescriptor {
                            name: names.share(&entry.name),
                            address: entry.addr.0,
                            length: entry.length.0,
                            lkey: entry.lkey.into_iter().map(|key| key.0).collect(),
                            rkey: entry.rkey.into_iter().map(|key| key.0).collect(),
                        });
                    }
                }
                Ok(Buffers(buffers))
            }
        }
        deserializer.deserialize_any(BuffersVisitor)
    }
}

/// One allocation for each distinct text.
#[derive(Default)]
struct Names {
    last: Option<Arc<str>>,
    all: HashSet<Arc<str>>,
}

impl Names {
    fn share(&mut self, text: &str) -> Arc<str> {
        if let Some(last) = self.last.as_ref().filter(|last| &***last == text) {
            return last.clone();
        }
        let name = self.all.get(text).cloned().unwrap_or_else(|| {
            let name: Arc<str> = text.into();
            self.all.insert(name.clone());
            name
        });
        self.last = Some(name.clone());
        name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(text: &str) -> Result<SegmentDescriptor> {
        SegmentDescriptor::decode(text.as_bytes(), &"the test")
    }

    #[track_caller]
    fn refused(text: &str, code: Code, reason: &str) {
        let error = decode(text).unwrap_err();
        assert_eq!(error.code(), code, "{text}: {error}");
        assert!(error.message().contains(reason), "{text}: {error}");
    }

    const RDMA: &str = r#"{"buffers":[{"addr":4096,"length":8192,"lkey":[1,2],"name":"cpu:0","rkey":[3,4]},
        {"addr":65536,"length":1,"lkey":[5,6],"name":"cpu:0","rkey":[]}],
        "devices":[{"gid":"00:01","lid":7,"name":"mlx5_0"},{"gid":"00:02","lid":0,"name":"mlx5_1"}],
        "name":"10.0.0.1:15234","priority_matrix":{"cpu:0":[["mlx5_0"],["mlx5_1"]],"cuda:0":[["mlx5_1"],[]]},
        "protocol":"rdma","rdma_server_name":"10.0.0.1:15234","tcp_data_port":0,"tcp_proto_version":1,"timestamp":"x"}"#;

    #[test]
    fn reads_what_upstream_publishes_for_tcp() {
        let text = concat!(
            r#"{"buffers":[{"addr":140177505814832,"length":64,"name":"[::1]:15329"}],"name":"[::1]:15329","protocol":"tcp","#,
            r#""rdma_server_name":"","tcp_data_host":"::1","tcp_data_port":16848,"tcp_proto_version":2,"#,
            r#""timestamp":"2026-11-29 15:59:52.729610"}"#,
            "\n"
        );
        let expected = SegmentDescriptor {
            name: "[::1]:15329".into(),
            protocols: vec!["tcp".into()],
            tcp_data_host: "::1".into(),
            tcp_data_port: 16848,
            tcp_proto_version: 2,
            timestamp: "2026-11-29 15:59:52.729610".into(),
            buffers: vec![BufferDescriptor {
                name: "[::1]:15329".into(),
                address: 140177505814832,
                length: 64,
                ..Default::default()
            }],
            ..Default::default()
        };
        assert_eq!(decode(text).unwrap(), expected);
    }

    #[test]
    fn reads_rdma_descriptors() {
        let descriptor = decode(RDMA).unwrap();
        assert_eq!(descriptor.buffers[0].lkey, [1, 2]);
        assert_eq!(descriptor.buffers[0].rkey, [3, 4]);
        assert_eq!(descriptor.buffers[1].rkey, [0; 0]);
        assert_eq!(descriptor.devices[0], DeviceDescriptor { name: "mlx5_0".into(), lid: 7, gid: "00:01".into() });
        assert_eq!(descriptor.priority_matrix["cpu:0"], (vec!["mlx5_0".into()], vec!["mlx5_1".into()]));
        assert_eq!(descriptor.rdma_server_name, "10.0.0.1:15234");
    }

    #[test]
    fn reads_leniently_what_may_differ() {
        let minimal = decode(r#"{"protocol":"tcp"}"#).unwrap();
        assert_eq!((minimal.tcp_proto_version, minimal.tcp_data_port, minimal.buffers.len()), (1, 0, 0));
        let odd = decode(concat!(
            r#"{"protocol":"tcp","buffers":null,"devices":null,"priority_matrix":null,"name":null,"tcp_data_host":5,"#,
            r#""tcp_data_port":15000.0,"tcp_proto_version":2.0,"new":{"deep":[[[{}]]]}}"#
        ));
        let odd = odd.unwrap();
        assert_eq!((odd.tcp_data_port, odd.tcp_proto_version, &*odd.tcp_data_host), (15000, 2, ""));
        let largest =
            decode(r#"{"protocol":"tcp","buffers":[{"addr":18446744073709551615,"length":1e3,"name":"\u00e9","x":[1]}]}"#);
        let largest = &largest.unwrap().buffers[0];
        assert_eq!((largest.address, largest.length, &*largest.name), (u64::MAX, 1000, "é"));
    }

    #[test]
    fn descriptors_of_several_protocols_keep_tcp_and_rdma_buffers() {
        let text = concat!(
            r#"{"protocol":["tcp","rdma","cxl"],"devices":[{"name":"m","gid":"0","lid":0}],"buffers":["#,
            r#"{"protocol":"rdma","addr":1,"length":2,"lkey":[1],"rkey":[2],"name":"cpu:0"},"#,
            r#"{"protocol":"tcp","addr":1,"length":2},{"protocol":"cxl","offset":0,"length":2,"name":"x"}]}"#
        );
        let descriptor = decode(text).unwrap();
        assert_eq!(descriptor.protocols, ["rdma", "cxl", "tcp"], "in the order of preference");
        assert_eq!(descriptor.buffers.len(), 2);
    }

    #[test]
    fn other_protocols_of_upstream_are_read_and_unknown_ones_refused() {
        assert_eq!(decode(r#"{"protocol":"nvlink","buffers":[{"addr":0,"length":0,"shm_name":"x"}]}"#).unwrap().buffers.len(), 1);
        refused(r#"{"protocol":"pigeon"}"#, Code::Metadata, "protocol 'pigeon' is unknown");
        refused(r#"{"protocol":["tcp","pigeon"]}"#, Code::Metadata, "protocol 'pigeon' is unknown");
        refused(r#"{"protocol":[]}"#, Code::Metadata, "no protocol");
        refused("{}", Code::Metadata, "no protocol");
    }

    #[test]
    fn unsound_entries_refuse_the_whole_and_are_named() {
        for (entry, reason) in [
            (r#"{"addr":1,"length":1}"#, "buffers[1] at 0x1 has no name"),
            (r#"{"addr":0,"length":1,"name":"n"}"#, "buffers[1] has address 0x0"),
            (r#"{"addr":1,"length":0,"name":"n"}"#, "length 0"),
            (r#"{}"#, "buffers[1]"),
        ] {
            for protocol in ["tcp", "rdma"] {
                let text =
                    format!(r#"{{"name":"seg","protocol":"{protocol}","buffers":[{{"addr":1,"length":1,"name":"n"}},{entry}]}}"#);
                refused(&text, Code::Metadata, reason);
                refused(&text, Code::Metadata, "segment 'seg'");
            }
        }
        for (from, to, reason) in [
            (r#""rkey":[3,4]"#, r#""rkey":[3]"#, "buffers[0] at 0x1000 has 1 remote keys, 2 local keys, for 2 devices"),
            (r#""lkey":[1,2]"#, r#""lkey":[]"#, "2 remote keys, 0 local keys"),
            (r#",{"gid":"00:02","lid":0,"name":"mlx5_1"}"#, "", "for 1 devices"),
            (r#""gid":"00:02""#, r#""gid":"""#, "devices[1] ('mlx5_1')"),
            (r#""name":"mlx5_0""#, r#""name":"""#, "devices[0] ('')"),
        ] {
            assert!(RDMA.contains(from));
            refused(&RDMA.replace(from, to), Code::Metadata, reason);
        }
    }

    #[test]
    fn wrong_types_are_malformed() {
        for text in [
            "",
            "null",
            "[]",
            "7",
            "\"tcp\"",
            "{",
            r#"{"protocol":"tcp"} x"#,
            r#"{"protocol":5}"#,
            r#"{"protocol":["tcp",5]}"#,
            r#"{"protocol":{"tcp":1}}"#,
            r#"{"protocol":"tcp","name":5}"#,
            r#"{"protocol":"tcp","tcp_data_port":"15000"}"#,
            r#"{"protocol":"tcp","tcp_data_port":-1}"#,
            r#"{"protocol":"tcp","tcp_data_port":65536}"#,
            r#"{"protocol":"tcp","tcp_proto_version":"2"}"#,
            r#"{"protocol":"tcp","tcp_proto_version":2.5}"#,
            r#"{"protocol":"tcp","buffers":{}}"#,
            r#"{"protocol":"tcp","buffers":[5]}"#,
            r#"{"protocol":"tcp","buffers":[["n",1,1]]}"#,
            r#"{"protocol":"tcp","buffers":[{"addr":"1","length":1,"name":"n"}]}"#,
            r#"{"protocol":"tcp","buffers":[{"addr":-1,"length":1,"name":"n"}]}"#,
            r#"{"protocol":"tcp","buffers":[{"addr":18446744073709551616,"length":1,"name":"n"}]}"#,
            r#"{"protocol":"tcp","buffers":[{"addr":1,"length":1,"name":["n"]}]}"#,
            r#"{"protocol":"rdma","buffers":[{"addr":1,"length":1,"name":"n","rkey":[4294967296]}]}"#,
            r#"{"protocol":"rdma","buffers":[{"addr":1,"length":1,"name":"n","rkey":5}]}"#,
            r#"{"protocol":"rdma","devices":[["m",0,"g"]]}"#,
            r#"{"protocol":"rdma","devices":[{"name":"m","gid":"g","lid":65536}]}"#,
            r#"{"protocol":"rdma","priority_matrix":[]}"#,
        ] {
            refused(text, Code::MalformedJson, "cannot be read");
        }
    }

    #[test]
    fn deep_nesting_and_long_texts_are_harmless() {
        let deep = format!(r#"{{"protocol":{}"#, "[".repeat(100_000));
        refused(&deep, Code::MalformedJson, "recursion limit");
        let unknown = format!(r#"{{"protocol":"tcp","x":{}{}}}"#, "[".repeat(100_000), "]".repeat(100_000));
        let _ = decode(&unknown);
        let error = decode(&format!(r#"{{"protocol":"tcp","buffers":"{}"}}"#, "x".repeat(1 << 20))).unwrap_err();
        assert!(error.message().len() < 1000, "{}", error.message().len());
    }

    #[test]
    fn a_bad_row_of_the_priority_matrix_ends_it_without_harm() {
        let text = r#"{"protocol":"rdma","priority_matrix":{"a":[["m"],[]],"b":[["m"]],"c":[[],["m"]]}}"#;
        assert_eq!(decode(text).unwrap().priority_matrix.into_keys().collect::<Vec<_>>(), ["a"]);
    }

    #[test]
    fn equal_names_share_one_allocation() {
        let entries = (1..=65_536).map(|i| format!(r#"{{"addr":{},"length":4096,"name":"{}"}}"#, i * 4096, ["a", "b"][i % 2]));
        let text = format!(r#"{{"protocol":"tcp","buffers":[{}]}}"#, entries.collect::<Vec<_>>().join(","));
        let buffers = decode(&text).unwrap().buffers;
        assert_eq!(buffers.len(), 65_536);
        for index in 2..buffers.len() {
            assert!(Arc::ptr_eq(&buffers[index].name, &buffers[index - 2].name));
        }
        assert_eq!(Arc::strong_count(&buffers[0].name), 32_768);
    }
}
