//! GIDs: addresses of a port, of which one is used.

use std::fmt;
use std::net::Ipv4Addr;

/// What a GID is an address of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidKind {
    /// A port of an InfiniBand network.
    InfiniBand,
    /// An Ethernet port, for the protocol that routers do not forward.
    RoceV1,
    /// An Ethernet port, for the protocol over UDP.
    RoceV2,
}

/// An entry of a port's GID table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gid {
    /// Place in the table.
    pub index: u8,
    /// The address; unused entries are zero.
    pub address: GidAddress,
    /// What it is an address of.
    pub kind: GidKind,
    /// Name of the network interface that it belongs to, where there is one in this network name space.
    pub net_device: Option<String>,
}

/// 16 bytes, shown as pairs of hexadecimal digits with colons between, which is how peers tell them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GidAddress(pub [u8; 16]);

impl GidAddress {
    /// Whether the entry is unused.
    pub fn is_zero(&self) -> bool {
        self.0 == [0; 16]
    }

    /// Reads 16 numbers of one or two hexadecimal digits with colons between.
    pub fn parse_bytes(text: &str) -> Option<GidAddress> {
        GidAddress::parse_groups::<16>(text, 2).map(|groups| GidAddress(groups.map(|group| group as u8)))
    }

    /// Reads the kernel's form, 8 groups of four hexadecimal digits with colons between.
    pub fn parse_groups_of_four(text: &str) -> Option<GidAddress> {
        let groups = GidAddress::parse_groups::<8>(text, 4)?;
        let mut bytes = [0; 16];
        for (place, group) in bytes.chunks_exact_mut(2).zip(groups) {
            place.copy_from_slice(&group.to_be_bytes());
        }
        Some(GidAddress(bytes))
    }

    fn parse_groups<const COUNT: usize>(text: &str, digits: usize) -> Option<[u16; COUNT]> {
        let mut groups = [0; COUNT];
        let mut parts = text.split(':');
        for group in &mut groups {
            let part = parts.next()?;
            let sound = (1..=digits).contains(&part.len()) && part.bytes().all(|digit| digit.is_ascii_hexdigit());
            *group = sound.then(|| u16::from_str_radix(part, 16).ok()).flatten()?;
        }
        parts.next().is_none().then_some(groups)
    }

    fn is_link_local(&self) -> bool {
        self.0[0] == 0xfe && self.0[1] & 0xc0 == 0x80
    }

    /// The IPv4 address that an Ethernet port has, if it is one.
    fn ipv4(&self) -> Option<Ipv4Addr> {
        let (prefix, address) = self.0.split_at(12);
        (prefix == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff])
            .then(|| Ipv4Addr::new(address[0], address[1], address[2], address[3]))
    }
}

impl fmt::Display for GidAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().enumerate().try_for_each(|(at, byte)| write!(f, "{}{byte:02x}", if at == 0 { "" } else { ":" }))
    }
}

/// Indexes of the GIDs that can be used, best first. Those that are zero are left out.
///
/// InfiniBand and RoCE v2 are preferred, those of a network interface before those without. RoCE v2 addresses that rarely lead out of
/// the machine come later: private IPv4 addresses other than 192.168, link-local addresses, and interfaces of container networks.
/// Others, such as RoCE v1, are the last resort. The table's order decides between equals.
pub fn rank(gids: &[Gid]) -> Vec<u8> {
    let mut usable: Vec<&Gid> = gids.iter().filter(|gid| !gid.address.is_zero()).collect();
    usable.sort_by_key(|gid| (class(gid), gid.index));
    usable.iter().map(|gid| gid.index).collect()
}

fn class(gid: &Gid) -> u8 {
    let has_interface = gid.net_device.is_some();
    let (ordinary, private, degraded) = if has_interface { (0, 2, 3) } else { (1, 4, 5) };
    match gid.kind {
        GidKind::RoceV1 => 6,
        GidKind::InfiniBand => ordinary,
        GidKind::RoceV2 if gid.address.is_link_local() || gid.net_device.as_deref().is_some_and(is_of_containers) => degraded,
        GidKind::RoceV2 if gid.address.ipv4().is_some_and(is_demoted_private) => private,
        GidKind::RoceV2 => ordinary,
    }
}

fn is_of_containers(interface: &str) -> bool {
    interface == "tunl0" || ["flannel", "cni", "calico", "vxlan", "docker"].iter().any(|prefix| interface.starts_with(prefix))
}

fn is_demoted_private(address: Ipv4Addr) -> bool {
    let [first, second, ..] = address.octets();
    first == 10 || (first == 172 && second & 0xf0 == 16) || (first == 100 && second & 0xc0 == 64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(index: u8, address: &str, kind: GidKind, net_device: &str) -> Gid {
        let address = GidAddress::parse_groups_of_four(address).unwrap();
        Gid { index, address, kind, net_device: (!net_device.is_empty()).then(|| net_device.to_string()) }
    }

    const PUBLIC: &str = "0000:0000:0000:0000:0000:ffff:c0a8:0105";
    const PRIVATE: [&str; 3] = [
        "0000:0000:0000:0000:0000:ffff:0a58:0001",
        "0000:0000:0000:0000:0000:ffff:ac1f:0001",
        "0000:0000:0000:0000:0000:ffff:6440:0001",
    ];
    const LINK_LOCAL: &str = "fe80:0000:0000:0000:5054:00ff:fe12:3456";
    const ZERO: &str = "0000:0000:0000:0000:0000:0000:0000:0000";

    #[test]
    fn each_class_is_preferred_to_the_next_and_ties_go_by_index() {
        use GidKind::{InfiniBand, RoceV1, RoceV2};
        let ordered = [
            vec![gid(0, PUBLIC, RoceV2, "eth0"), gid(0, LINK_LOCAL, InfiniBand, "ib0"), gid(0, PRIVATE[0], InfiniBand, "ib0")],
            vec![gid(0, PUBLIC, RoceV2, ""), gid(0, LINK_LOCAL, InfiniBand, "")],
            PRIVATE.map(|private| gid(0, private, RoceV2, "eth0")).to_vec(),
            vec![gid(0, LINK_LOCAL, RoceV2, "eth0"), gid(0, PUBLIC, RoceV2, "docker0"), gid(0, PRIVATE[1], RoceV2, "docker0")],
            PRIVATE.map(|private| gid(0, private, RoceV2, "")).to_vec(),
            vec![gid(0, LINK_LOCAL, RoceV2, "")],
            vec![gid(0, PUBLIC, RoceV1, "eth0"), gid(0, LINK_LOCAL, RoceV1, "")],
        ];
        for (place, class) in ordered.iter().enumerate() {
            for later in ordered[place + 1..].iter().flatten() {
                for this in class {
                    let table = [Gid { index: 1, ..later.clone() }, Gid { index: 2, ..this.clone() }];
                    assert_eq!(rank(&table), [2, 1], "{this:?} before {later:?}");
                }
            }
            let table = [Gid { index: 7, ..class[0].clone() }, Gid { index: 3, ..class[class.len() - 1].clone() }];
            assert_eq!(rank(&table), [3, 7]);
        }
    }

    #[test]
    fn zero_gids_are_left_out() {
        assert_eq!(rank(&[gid(0, ZERO, GidKind::RoceV2, "eth0"), gid(1, LINK_LOCAL, GidKind::RoceV1, "")]), [1]);
        assert!(rank(&[]).is_empty());
    }

    #[test]
    fn interfaces_of_container_networks_are_known_by_name() {
        for name in ["flannel.1", "cni0", "calico12", "vxlan.calico", "docker0", "tunl0"] {
            assert!(is_of_containers(name), "{name}");
        }
        for name in ["eth0", "tunl1", "mydocker0", "ib0"] {
            assert!(!is_of_containers(name), "{name}");
        }
        for (address, demoted) in
            [([172, 15, 0, 1], false), ([172, 32, 0, 1], false), ([100, 128, 0, 1], false), ([11, 0, 0, 1], false)]
        {
            assert_eq!(is_demoted_private(address.into()), demoted);
        }
    }

    #[test]
    fn texts_of_both_forms_are_read_and_others_refused() {
        let address = GidAddress::parse_groups_of_four(PUBLIC).unwrap();
        assert_eq!(address.to_string(), "00:00:00:00:00:00:00:00:00:00:ff:ff:c0:a8:01:05");
        assert_eq!(GidAddress::parse_bytes(&address.to_string()), Some(address));
        assert_eq!(GidAddress::parse_bytes("0:0:0:0:0:0:0:0:0:0:FF:ff:c0:a8:1:5"), Some(address));
        for text in [
            "",
            ":",
            "0:0",
            PUBLIC,
            "0:0:0:0:0:0:0:0:0:0:0:0:0:0:0:0:0",
            "0:0:0:0:0:0:0:0:0:0:0:0:0:0:0:100",
            "+1:0:0:0:0:0:0:0:0:0:0:0:0:0:0:0",
        ] {
            assert_eq!(GidAddress::parse_bytes(text), None, "{text}");
        }
    }
}
