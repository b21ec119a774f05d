//! The NICs of a machine, as the kernel tells of them in `/sys` and `/dev`.
//!
//! Read anew at each call: some ten small files for each NIC, and three for each entry of its GID tables. Nothing is kept or locked.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use super::gid::{Gid, GidAddress, GidKind};

/// Where the kernel tells of its devices.
#[derive(Clone, Debug)]
pub struct Machine {
    sys: PathBuf,
    dev: PathBuf,
}

impl Default for Machine {
    /// This machine.
    fn default() -> Machine {
        Machine::at("/sys", "/dev")
    }
}

/// A port of a NIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// From 1.
    pub number: u8,
    /// Whether it carries traffic.
    pub active: bool,
    /// Speed of the link, in Gbit/s, rounded down.
    pub gigabits: u32,
    /// The used entries of its GID table.
    pub gids: Vec<Gid>,
}

/// A NIC that does RDMA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// Such as `mlx5_0`.
    pub name: String,
    /// The NUMA node that it is attached to, where the machine has several and the kernel knows.
    pub numa_node: Option<u32>,
    /// Such as `0000:3b:00.0`; devices without hardware have none.
    pub pci_address: Option<String>,
    /// By number.
    pub ports: Vec<Port>,
}

impl Nic {
    /// The port of this number.
    pub fn port(&self, number: u8) -> Option<&Port> {
        self.ports.iter().find(|port| port.number == number)
    }
}

impl Machine {
    /// A machine whose `/sys` and `/dev` are elsewhere.
    pub fn at(sys: impl Into<PathBuf>, dev: impl Into<PathBuf>) -> Machine {
        Machine { sys: sys.into(), dev: dev.into() }
    }

    /// The NICs that this process can use now, by name: it may open them, and a port carries traffic and has a GID.
    pub fn usable_nics(&self) -> Vec<Nic> {
        let usable = |nic: &Nic| nic.ports.iter().any(|port| port.active && !port.gids.is_empty()) && self.may_open(&nic.name);
        let mut nics: Vec<Nic> = names_in(&self.sys.join("class/infiniband")).iter().filter_map(|name| self.nic(name)).collect();
        nics.retain(usable);
        nics
    }

    /// What is known of a NIC, whether it can be used or not.
    pub fn nic(&self, name: &str) -> Option<Nic> {
        let directory = self.sys.join("class/infiniband").join(name);
        // The name comes from whoever wrote the matrix.
        if name.is_empty() || name.contains('/') || name.starts_with('.') || !directory.is_dir() {
            return None;
        }
        let device = directory.join("device");
        let numa_node = read(&device.join("numa_node")).and_then(|text| text.parse().ok());
        let pci_address = fs::canonicalize(&device).ok().and_then(|path| Some(path.file_name()?.to_str()?.to_string()));
        let ports = directory.join("ports");
        let mut ports: Vec<Port> = names_in(&ports).iter().filter_map(|number| read_port(&ports.join(number), number)).collect();
        ports.sort_by_key(|port| port.number);
        Some(Nic { name: name.to_string(), numa_node, pci_address: pci_address.filter(|address| is_pci(address)), ports })
    }

    /// Numbers of the NUMA nodes, ascending.
    pub fn numa_nodes(&self) -> Vec<u32> {
        let names = names_in(&self.sys.join("devices/system/node"));
        let mut nodes: Vec<u32> = names.iter().filter_map(|name| name.strip_prefix("node")?.parse().ok()).collect();
        nodes.sort_unstable();
        // Kernels without NUMA have none.
        if nodes.is_empty() { vec![0] } else { nodes }
    }

    /// Whether the NIC's node in `/dev/infiniband` can be read and written. Opening does nothing to the device.
    fn may_open(&self, nic: &str) -> bool {
        let class = self.sys.join("class/infiniband_verbs");
        let node = names_in(&class).into_iter().find(|node| read(&class.join(node).join("ibdev")).as_deref() == Some(nic));
        let path = node.map(|node| self.dev.join("infiniband").join(node));
        path.is_some_and(|path| {
            fs::metadata(&path).is_ok_and(|data| data.file_type().is_char_device())
                && OpenOptions::new().read(true).write(true).open(&path).is_ok()
        })
    }
}

fn read_port(directory: &Path, number: &str) -> Option<Port> {
    let number = number.parse().ok()?;
    // "4: ACTIVE"
    let active = read(&directory.join("state")).is_some_and(|state| state.split(':').next() == Some("4"));
    // "100 Gb/sec (4X EDR)"
    let rate = read(&directory.join("rate")).and_then(|rate| rate.split_whitespace().next()?.parse::<f64>().ok());
    let ethernet = read(&directory.join("link_layer")).as_deref() == Some("Ethernet");
    let mut gids: Vec<Gid> =
        names_in(&directory.join("gids")).iter().filter_map(|index| read_gid(directory, index, ethernet)).collect();
    gids.sort_by_key(|gid| gid.index);
    Some(Port { number, active, gigabits: rate.unwrap_or(0.0) as u32, gids })
}

/// An entry of a GID table, if it is used.
fn read_gid(port: &Path, index: &str, ethernet: bool) -> Option<Gid> {
    let address = GidAddress::parse_groups_of_four(&read(&port.join("gids").join(index))?)?;
    if address.is_zero() {
        return None;
    }
    let attributes = port.join("gid_attrs");
    let kind = match read(&attributes.join("types").join(index)).as_deref() {
        Some("RoCE v2") => GidKind::RoceV2,
        _ if ethernet => GidKind::RoceV1,
        _ => GidKind::InfiniBand,
    };
    let net_device = read(&attributes.join("ndevs").join(index)).filter(|name| !name.is_empty());
    // Tables are longer than what a queue pair's attributes can name only in theory.
    Some(Gid { index: index.parse().ok()?, address, kind, net_device })
}

/// The text of a small file without the line's end.
fn read(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_string())
}

/// Names in a directory, sorted; none where there is no such directory.
fn names_in(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// Whether the text has the form `0000:3b:00.0`.
fn is_pci(text: &str) -> bool {
    text.len() >= 12 && text.contains('.') && text.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b':' || byte == b'.')
}

#[cfg(test)]
pub(super) mod tests {
    use std::os::unix::fs::symlink;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// A made-up `/sys` and `/dev`, deleted when dropped.
    pub struct FakeMachine {
        root: PathBuf,
    }

    impl FakeMachine {
        pub fn new(numa_nodes: u32) -> FakeMachine {
            static COUNT: AtomicU32 = AtomicU32::new(0);
            let name = format!("te-machine-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
            let fake = FakeMachine { root: std::env::temp_dir().join(name) };
            for node in 0..numa_nodes {
                fs::create_dir_all(fake.root.join(format!("sys/devices/system/node/node{node}"))).unwrap();
            }
            fs::create_dir_all(fake.root.join("dev/infiniband")).unwrap();
            fake
        }

        pub fn machine(&self) -> Machine {
            Machine::at(self.root.join("sys"), self.root.join("dev"))
        }

        /// Changes a file of a NIC, whose place is as in `/sys/class/infiniband`.
        pub fn write(&self, path: &str, text: &str) {
            let path = self.root.join("sys/class/infiniband").join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        pub fn dev(&self, node: &str) -> PathBuf {
            self.root.join("dev/infiniband").join(node)
        }

        /// Adds a NIC that is in order: one active port with three GIDs. Returns the name of its node in `/dev`.
        pub fn add_nic(&self, name: &str, numa_node: i32, bus: u8) -> String {
            let pci = self.root.join(format!("sys/devices/pci0000:00/0000:{bus:02x}:00.0"));
            fs::create_dir_all(&pci).unwrap();
            fs::write(pci.join("numa_node"), format!("{numa_node}\n")).unwrap();
            let nic = self.root.join("sys/class/infiniband").join(name);
            fs::create_dir_all(&nic).unwrap();
            symlink(&pci, nic.join("device")).unwrap();
            let files = [
                ("state", "4: ACTIVE\n"),
                ("rate", "100 Gb/sec (4X EDR)\n"),
                ("link_layer", "Ethernet\n"),
                ("gids/0", "fe80:0000:0000:0000:0000:00ff:fe00:0001\n"),
                ("gids/1", "0000:0000:0000:0000:0000:ffff:c0a8:0001\n"),
                ("gids/2", "0000:0000:0000:0000:0000:0000:0000:0000\n"),
                ("gid_attrs/types/0", "IB/RoCE v1\n"),
                ("gid_attrs/types/1", "RoCE v2\n"),
                ("gid_attrs/ndevs/0", "eth0\n"),
                ("gid_attrs/ndevs/1", "eth0\n"),
            ];
            for (file, text) in files {
                self.write(&format!("{name}/ports/1/{file}"), text);
            }
            let node = format!("uverbs{bus}");
            let verbs = self.root.join("sys/class/infiniband_verbs").join(&node);
            fs::create_dir_all(&verbs).unwrap();
            fs::write(verbs.join("ibdev"), format!("{name}\n")).unwrap();
            // The one kind of file that a character device can be made from without privileges.
            symlink("/dev/null", self.dev(&node)).unwrap();
            node
        }
    }

    impl Drop for FakeMachine {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.root);
        }
    }

    fn usable(fake: &FakeMachine) -> Vec<String> {
        fake.machine().usable_nics().into_iter().map(|nic| nic.name).collect()
    }

    #[test]
    fn a_nic_is_read_with_its_place_ports_and_gids() {
        let fake = FakeMachine::new(2);
        fake.add_nic("mlx5_0", 1, 0x3b);
        let nic = fake.machine().nic("mlx5_0").unwrap();
        assert_eq!((nic.numa_node, nic.pci_address.as_deref()), (Some(1), Some("0000:3b:00.0")));
        let port = nic.port(1).unwrap();
        assert_eq!((port.active, port.gigabits, port.gids.len()), (true, 100, 2));
        assert_eq!((port.gids[0].kind, port.gids[1].kind), (GidKind::RoceV1, GidKind::RoceV2));
        assert_eq!(port.gids[1].net_device.as_deref(), Some("eth0"));
        assert_eq!(nic.port(2), None);
        assert_eq!(fake.machine().numa_nodes(), [0, 1]);
        assert_eq!(usable(&fake), ["mlx5_0"]);
    }

    #[test]
    fn nics_that_cannot_be_used_are_left_out() {
        let fake = FakeMachine::new(1);
        for (bus, name) in ["down", "no_gid", "no_node", "plain_file", "good"].iter().enumerate() {
            fake.add_nic(name, -1, bus as u8);
        }
        fake.write("down/ports/1/state", "1: DOWN\n");
        fake.write("no_gid/ports/1/gids/0", "0000:0000:0000:0000:0000:0000:0000:0000\n");
        fake.write("no_gid/ports/1/gids/1", "0000:0000:0000:0000:0000:0000:0000:0000\n");
        fs::remove_file(fake.dev("uverbs2")).unwrap();
        fs::remove_file(fake.dev("uverbs3")).unwrap();
        fs::write(fake.dev("uverbs3"), "").unwrap();
        assert_eq!(usable(&fake), ["good"]);
        assert_eq!(fake.machine().nic("good").unwrap().numa_node, None);
        fake.write("down/ports/2/state", "4: ACTIVE\n");
        fake.write("down/ports/2/gids/0", "fe80:0000:0000:0000:0000:00ff:fe00:0001\n");
        assert_eq!(usable(&fake), ["down", "good"]);
    }

    #[test]
    fn names_from_elsewhere_do_not_leave_the_directory() {
        let fake = FakeMachine::new(1);
        fake.add_nic("mlx5_0", 0, 1);
        for name in ["", ".", "..", "../infiniband/mlx5_0", "/", "mlx5_0/ports", "mlx5_1"] {
            assert_eq!(fake.machine().nic(name), None, "{name}");
        }
    }

    #[test]
    fn a_machine_without_rdma_has_no_nic_and_one_node() {
        let fake = FakeMachine::new(0);
        assert!(fake.machine().usable_nics().is_empty());
        assert_eq!(fake.machine().numa_nodes(), [0]);
    }
}
