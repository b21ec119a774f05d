//! Which NICs serve which memory: the NIC priority matrix.
//!
//! A matrix maps a location (`cpu:0`, `cuda:1`, …) to the NICs to prefer and those that may be used as well. It comes from the caller as
//! JSON, from a file, or from the machine: one entry per NUMA node, whose own NICs are preferred. What is known of NICs comes from
//! [`Machine`], never from the devices themselves. [`NicChoice`] is the matrix made ready for choosing; [`gid`] says which address of a
//! port to use; [`LiveTopology`] is one that the program changes while an engine has it.
//!
//! Values only, but for the last; nothing else is locked.

pub mod choice;
pub mod gid;
mod live;
pub mod machine;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::sync::{Arc, OnceLock};

use serde::Deserialize;

pub use choice::{NicChoice, location_at};
pub use gid::{Gid, GidAddress, GidKind};
pub use live::LiveTopology;
pub use machine::Machine;

use crate::config::TopologyConfig;
use crate::error::{Code, Error, Result};
use crate::sys::{MemoryRange, pages};

/// Location to the names of preferred and of available NICs.
pub type Matrix = BTreeMap<String, (Vec<String>, Vec<String>)>;

/// The location that any NIC serves.
pub const WILDCARD: &str = "*";

/// A NIC priority matrix.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Topology {
    matrix: Matrix,
}

/// A NIC as [`Topology::show`] shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// Name of the NIC.
    pub device: String,
    /// Its NUMA node, if that is known.
    pub numa_node: Option<u32>,
    /// The GID that is used, or would be.
    pub gid: Option<(GidAddress, u8)>,
    /// Port that is used; 0 if the NIC is not known to the machine.
    pub port: u8,
    /// Speed of the port in Gbit/s.
    pub gigabits: u32,
    /// Whether a transport uses it; else it is known from the topology.
    pub in_use: bool,
}

impl Topology {
    /// Reads `{"cpu:0": [["preferred", …], ["available", …]], …}`. Anything else is MalformedJson.
    pub fn parse(text: &str) -> Result<Topology> {
        serde_json::from_str(text).map_err(|error| {
            let form = r#"{"location": [["preferred NIC", …], ["available NIC", …]], …}"#;
            Error::new(Code::MalformedJson, format!("the NIC priority matrix is not of the form {form}: {error}"))
        })
    }

    /// What the machine has: one entry per NUMA node, in which its own NICs are preferred and all others available. Only NICs that
    /// each of the `filters` names, those that are empty aside.
    pub fn discover(machine: &Machine, filters: &[&[String]]) -> Topology {
        let mut nics = machine.usable_nics();
        nics.retain(|nic| filters.iter().all(|names| names.is_empty() || names.contains(&nic.name)));
        let entry = |node: u32| {
            let (own, others): (Vec<_>, Vec<_>) = nics.iter().partition(|nic| nic.numa_node == Some(node));
            let names = |nics: Vec<&machine::Nic>| nics.into_iter().map(|nic| nic.name.clone()).collect();
            (format!("cpu:{node}"), (names(own), names(others)))
        };
        Topology { matrix: machine.numa_nodes().into_iter().map(entry).collect() }
    }

    /// What the operator's file says, else what the machine has of `nics`, or all where there are none. A file that cannot be used is logged.
    pub fn find(machine: &Machine, config: &TopologyConfig, nics: &[String]) -> Topology {
        let from_file = config.file.as_ref().and_then(|path| {
            let text = fs::read_to_string(path).map_err(|error| {
                Error::new(
                    Code::InvalidArgument,
                    format!("MC_CUSTOM_TOPO_JSON={}: {error}; NICs are discovered instead", path.display()),
                )
            });
            Topology::parse(&text.ok()?).ok()
        });
        from_file.unwrap_or_else(|| Topology::discover(machine, &[&config.filters, nics]))
    }

    /// Its JSON, as [`Topology::parse`] reads it.
    pub fn to_json(&self) -> String {
        serde_json::json!(self.matrix).to_string()
    }

    /// The matrix itself, as descriptors carry it.
    pub fn matrix(&self) -> &Matrix {
        &self.matrix
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

    /// What the machine tells of the NICs; `port` and `gid_index` are those that a transport would use.
    pub fn links(&self, machine: &Machine, port: u8, gid_index: Option<u8>) -> Vec<Link> {
        let link = |name: &str| {
            let nic = machine.nic(name);
            let link = nic.as_ref().and_then(|nic| nic.port(port));
            let best = link.and_then(|link| {
                let index = gid_index.or_else(|| gid::rank(&link.gids).first().copied())?;
                link.gids.iter().find(|gid| gid.index == index).map(|gid| (gid.address, index))
            });
            Link {
                device: name.to_string(),
                numa_node: nic.as_ref().and_then(|nic| nic.numa_node),
                gid: best,
                port: link.map_or(0, |link| link.number),
                gigabits: link.map_or(0, |link| link.gigabits),
                in_use: false,
            }
        };
        self.nics().into_iter().map(link).collect()
    }

    /// A description for people, or the same as JSON: `local_nics` and `topology`.
    pub fn show(&self, links: &[Link], json: bool) -> String {
        if json {
            let matrix = if self.matrix.is_empty() { serde_json::Value::Null } else { serde_json::json!(self.matrix) };
            let shown = serde_json::json!({"local_nics": links.iter().map(Link::to_json).collect::<Vec<_>>(), "topology": matrix});
            return format!("{shown:#}");
        }
        let mut text = String::from("=== Local NICs ===\n");
        if links.is_empty() {
            text.push_str("  No RDMA devices were found.\n");
        }
        for link in links {
            let _ = writeln!(text, "  {}", link.to_text());
        }
        if !links.is_empty() {
            text.push_str("\n=== Topology (NIC Selection) ===\n");
            for (location, (preferred, available)) in &self.matrix {
                let _ = writeln!(text, "  {location}: preferred [{}], available [{}]", preferred.join(", "), available.join(", "));
            }
        }
        text
    }
}

impl Link {
    fn to_json(&self) -> serde_json::Value {
        serde_json::json!({
            "device": self.device,
            "numa": self.numa_node.map_or(-1, i64::from),
            "gid": self.gid.map_or(String::new(), |(address, _)| address.to_string()),
            "gid_index": self.gid.map_or(-1, |(_, index)| i32::from(index)),
            "port": self.port,
            "speed_gbps": self.gigabits,
            "source": if self.in_use { "rdma_transport" } else { "topology" },
        })
    }

    fn to_text(&self) -> String {
        let Link { device, port, gigabits, .. } = self;
        if *port == 0 {
            return format!("{device} (known from the topology only)");
        }
        let numa = self.numa_node.map_or("unknown".to_string(), |node| node.to_string());
        let gid = self.gid.map_or("none".to_string(), |(address, index)| format!("{address} (index {index})"));
        let use_ = if self.in_use { "" } else { ", not in use" };
        format!("{device}: NUMA node {numa}, GID {gid}, port {port}, {gigabits} Gbit/s{use_}")
    }
}

/// Where memory is: `cpu:<node>` of its first page. `None` where that page is not there yet, or the kernel does not say. Nothing is touched,
/// so pages that are absent stay absent. One system call. Equal texts are one.
pub fn location_of(range: MemoryRange) -> Option<Arc<str>> {
    location_of_node(pages::numa_node(range)?)
}

fn location_of_node(node: u32) -> Option<Arc<str>> {
    /// As many nodes as Linux can have.
    static TEXTS: [OnceLock<Arc<str>>; 1024] = [const { OnceLock::new() }; 1024];
    let text = TEXTS.get(node as usize)?;
    Some(text.get_or_init(|| format!("cpu:{node}").into()).clone())
}

/// Where each part of a range is, in order of address: runs of pages on one node as [`location_of`] has it, or `*` for pages that are not
/// there. One part for all of it where the kernel does not say. Touches nothing. One system call for 512 pages.
pub fn locations_of(range: MemoryRange) -> Vec<(MemoryRange, Arc<str>)> {
    let page = pages::page_size();
    let mut runs: Vec<(u64, Option<u32>)> = Vec::new();
    let mut offset = 0;
    let told = pages::for_each_numa_node(range, |node| {
        if runs.last().is_none_or(|(_, last)| *last != node) {
            runs.push((offset, node));
        }
        // The first page may begin before the range does.
        offset += page - if offset == 0 { range.address() % page } else { 0 };
    });
    if told.is_err() {
        runs = vec![(0, None)];
    }
    let end = |index: usize| runs.get(index + 1).map_or(range.length(), |(offset, _)| *offset);
    let part = |(index, (offset, node)): (usize, &(u64, Option<u32>))| {
        let location = node.and_then(location_of_node).unwrap_or_else(|| WILDCARD.into());
        Some((range.part(*offset, end(index) - offset)?, location))
    };
    runs.iter().enumerate().filter_map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::machine::tests::FakeMachine;
    use super::*;
    use crate::sys::pages::tests::Mapping;

    fn links(topology: &Topology) -> Vec<Link> {
        topology.links(&Machine::at("/nowhere", "/nowhere"), 1, None)
    }

    #[test]
    fn matrices_are_read_and_shown() {
        let topology = Topology::parse(r#"{"cpu:0":[["a"],["b"]],"cuda:0":[["b"],[]]}"#).unwrap();
        assert_eq!(topology.nics(), ["a", "b"]);
        let shown: serde_json::Value = serde_json::from_str(&topology.show(&links(&topology), true)).unwrap();
        let unknown =
            serde_json::json!({"device":"b","numa":-1,"gid":"","gid_index":-1,"port":0,"speed_gbps":0,"source":"topology"});
        assert_eq!(shown["local_nics"][1], unknown);
        assert_eq!(shown["topology"]["cpu:0"][1][0], "b");
        let text = topology.show(&links(&topology), false);
        assert!(text.contains("  a (known from the topology only)\n"), "{text}");
        assert!(text.contains("cuda:0: preferred [b], available []"), "{text}");
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
        assert!(empty.show(&[], false).contains("No RDMA devices"));
        let shown: serde_json::Value = serde_json::from_str(&empty.show(&[], true)).unwrap();
        assert_eq!(shown["topology"], serde_json::Value::Null);
        let discovered = Topology::discover(&FakeMachine::new(2).machine(), &[]);
        assert!(discovered.nics().is_empty());
        assert_eq!(discovered.matrix().keys().collect::<Vec<_>>(), ["cpu:0", "cpu:1"]);
        assert!(!Topology::discover(&Machine::default(), &[]).matrix().is_empty());
    }

    #[test]
    fn nics_of_the_own_node_are_preferred_and_all_others_available() {
        let fake = FakeMachine::new(2);
        for (bus, (name, node)) in [("a", 0), ("b", 1), ("c", 1), ("d", -1)].iter().enumerate() {
            fake.add_nic(name, *node, bus as u8);
        }
        let expected = r#"{"cpu:0":[["a"],["b","c","d"]],"cpu:1":[["b","c"],["a","d"]]}"#;
        assert_eq!(Topology::discover(&fake.machine(), &[]), Topology::parse(expected).unwrap());
        let filtered = Topology::discover(&fake.machine(), &[&["c".to_string(), "d".to_string(), "unknown".to_string()]]);
        assert_eq!(filtered, Topology::parse(r#"{"cpu:0":[[],["c","d"]],"cpu:1":[["c"],["d"]]}"#).unwrap());
        let both =
            Topology::discover(&fake.machine(), &[&["a".to_string(), "c".to_string()], &[], &["c".to_string(), "d".to_string()]]);
        assert_eq!(both.to_json(), r#"{"cpu:0":[[],["c"]],"cpu:1":[["c"],[]]}"#);
        let none = Topology::discover(&fake.machine(), &[&["a".to_string()], &["b".to_string()]]);
        assert!(none.nics().is_empty(), "two lists without a common name are not the same as none");
    }

    #[test]
    fn the_parts_of_a_range_touch_and_tell_where_its_pages_are() {
        let page = pages::page_size();
        let memory = Mapping::anonymous(8 * page as usize);
        [1, 2, 5].into_iter().for_each(|at| memory.write(at * page as usize, 1));
        let range = memory.range().part(7, 6 * page).unwrap();
        let parts = locations_of(range);
        assert_eq!(parts.first().unwrap().0.address(), range.address());
        assert!(
            parts.windows(2).all(|pair| pair[0].0.end() == u128::from(pair[1].0.address()) && pair[0].1 != pair[1].1),
            "{parts:?}"
        );
        assert_eq!(parts.last().unwrap().0.end(), range.end());
        assert!(parts.iter().all(|(_, location)| &**location == WILDCARD || location.starts_with("cpu:")), "{parts:?}");
        assert_eq!(location_of(range).map_or(WILDCARD.into(), |location| location), parts[0].1);
        assert!(locations_of(range.part(0, 0).unwrap()).is_empty());
        let nowhere = memory.range().part(0, 3 * page).unwrap();
        drop(memory);
        assert_eq!(locations_of(nowhere), [(nowhere, WILDCARD.into())]);
    }

    #[test]
    fn a_nic_is_shown_with_what_the_machine_knows_of_it() {
        let fake = FakeMachine::new(1);
        fake.add_nic("mlx5_0", 0, 1);
        let topology = Topology::discover(&fake.machine(), &[]);
        let links = topology.links(&fake.machine(), 1, None);
        let shown: serde_json::Value = serde_json::from_str(&topology.show(&links, true)).unwrap();
        let expected = serde_json::json!({"device":"mlx5_0","numa":0,"gid":"00:00:00:00:00:00:00:00:00:00:ff:ff:c0:a8:00:01",
            "gid_index":1,"port":1,"speed_gbps":100,"source":"topology"});
        assert_eq!(shown["local_nics"][0], expected);
        let text = topology.show(&links, false);
        let line = "  mlx5_0: NUMA node 0, GID 00:00:00:00:00:00:00:00:00:00:ff:ff:c0:a8:00:01 (index 1), port 1, 100 Gbit/s, not in use\n";
        assert!(text.contains(line), "{text}");
        assert_eq!(topology.links(&fake.machine(), 1, Some(0))[0].gid.unwrap().1, 0);
        assert_eq!(topology.links(&fake.machine(), 1, Some(2))[0].gid, None);
        assert_eq!(topology.links(&fake.machine(), 2, None)[0].port, 0);
    }

    #[test]
    fn a_file_replaces_discovery_unless_it_is_of_no_use() {
        let fake = FakeMachine::new(1);
        fake.add_nic("mlx5_0", 0, 1);
        let path = std::env::temp_dir().join(format!("te-topology-{}.json", std::process::id()));
        let config = TopologyConfig { file: Some(path.clone()), ..TopologyConfig::default() };
        for (text, nics) in [(r#"{"cpu:0":[["x"],["y"]]}"#, vec!["x", "y"]), ("{", vec!["mlx5_0"]), ("", vec!["mlx5_0"])] {
            fs::write(&path, text).unwrap();
            assert_eq!(Topology::find(&fake.machine(), &config, &[]).nics(), nics, "{text}");
        }
        fs::remove_file(&path).unwrap();
        assert_eq!(Topology::find(&fake.machine(), &config, &[]).nics(), ["mlx5_0"]);
    }
}
