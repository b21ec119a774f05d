//! NIC priority matrices: what is accepted can be shown, and what is shown as JSON names the same NICs.

use serde_json::Value;
use transfer_engine::Code;
use transfer_engine::topology::{Machine, Topology};

/// One text.
pub fn run(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let topology = match Topology::parse(&text) {
        Ok(topology) => topology,
        Err(error) => return assert_eq!(error.code(), Code::MalformedJson),
    };
    let links = topology.links(&Machine::at("/nowhere", "/nowhere"), 1, None);
    assert!(topology.show(&links, false).starts_with("=== Local NICs ===\n"));
    let shown: Value = serde_json::from_str(&topology.show(&links, true)).expect("it is JSON");
    let nics = shown["local_nics"].as_array().expect("it is a list");
    assert!(nics.iter().map(|nic| nic["device"].as_str()).eq(topology.nics().into_iter().map(Some)));
    if !shown["topology"].is_null() {
        let again = Topology::parse(&shown["topology"].to_string()).expect("what is shown can be read");
        assert_eq!(again, topology);
    }
}
