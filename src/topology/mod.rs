//! Which NICs serve which memory: the NIC priority matrix.
//!
//! A matrix maps a location (`cpu:0`, `cuda:1`, …) to the NICs to prefer and those that may be used as well. It comes from the caller as
//! JSON or from the machine: one entry per NUMA node, without NICs as long as there is no RDMA transport to use them.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::Deserialize;

use crate::error::{Code, Error, Result};
use crate::sys::limits;

/// A NIC priority matrix: location to preferred and available NICs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Topology {
    matrix: BTreeMap<String, (Vec<String>, Vec<String>)>,
}

impl Topology {
    /// Reads `{"cpu:0": [["preferred", …], ["available", …]], …}`. Anything else is MalformedJson.
    pub fn parse(text: &str) -> Result<Topology> {
        serde_json::from_str(text).map_err(|error| {
            let form = r#"{"location": [["preferred NIC", …], ["available NIC", …]], …}"#;
            Error::new(Code::MalformedJson, format!("the NIC priority matrix is not of the form {form}: {error}"))
        })
    }

    /// What this machine has.
    pub fn discover() -> Topology {
        Topology { matrix: limits::numa_nodes().into_iter().map(|node| (format!("cpu:{node}"), Default::default())).collect() }
    }

    /// All NIC names, in order of location, preferred ones first; each once.
    pub fn nics(&self) -> Vec<&str> {
        let mut names = Vec::new();
        for name in self.matrix.values().flat_map(|(preferred, available)| preferred.iter().chain(available)) {
            if !names.contains(&name.as_str()) {
                names.push(name);
            }
        }
        names
    }

    /// A description for people, or the same as JSON: `local_nics` and `topology`.
    pub fn show(&self, json: bool) -> String {
        let nics = self.nics();
        if json {
            let nic = |name: &&str| serde_json::json!({"device": name, "numa": -1, "gid": "", "gid_index": -1, "port": 0, "speed_gbps": 0, "source": "topology"});
            let matrix = if self.matrix.is_empty() { serde_json::Value::Null } else { serde_json::json!(self.matrix) };
            let shown = serde_json::json!({"local_nics": nics.iter().map(nic).collect::<Vec<_>>(), "topology": matrix});
            return format!("{shown:#}");
        }
        let mut text = String::from("=== Local NICs ===\n");
        if nics.is_empty() {
            text.push_str("  No RDMA devices were found.\n");
        }
        for nic in &nics {
            let _ = writeln!(text, "  {nic} (known from the topology only)");
        }
        if !nics.is_empty() {
            text.push_str("\n=== Topology (NIC Selection) ===\n");
            for (location, (preferred, available)) in &self.matrix {
                let _ = writeln!(text, "  {location}: preferred [{}], available [{}]", preferred.join(", "), available.join(", "));
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_are_read_and_shown() {
        let topology = Topology::parse(r#"{"cpu:0":[["a"],["b"]],"cuda:0":[["b"],[]]}"#).unwrap();
        assert_eq!(topology.nics(), ["a", "b"]);
        let shown: serde_json::Value = serde_json::from_str(&topology.show(true)).unwrap();
        assert_eq!(shown["local_nics"][1]["device"], "b");
        assert_eq!(shown["topology"]["cpu:0"][1][0], "b");
        assert!(topology.show(false).contains("cuda:0: preferred [b], available []"));
    }

    #[test]
    fn anything_else_is_an_error() {
        for text in ["", "[]", "1", r#"{"cpu:0":[["a"]]}"#, r#"{"cpu:0":[["a"],["b"],["c"]]}"#, r#"{"cpu:0":[[1],[]]}"#, "{"] {
            assert_eq!(Topology::parse(text).unwrap_err().code(), Code::MalformedJson, "{text}");
        }
    }

    #[test]
    fn no_nics_is_said_and_an_empty_matrix_is_null() {
        let empty = Topology::default();
        assert!(empty.show(false).contains("No RDMA devices"));
        let shown: serde_json::Value = serde_json::from_str(&empty.show(true)).unwrap();
        assert_eq!(shown["topology"], serde_json::Value::Null);
        assert!(Topology::discover().nics().is_empty());
    }
}
