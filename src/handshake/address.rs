//! The addresses of engines: how they are written, and that of this machine.

use std::net::IpAddr;

pub use crate::metadata::host_port::HostPort;
use crate::sys::interfaces::{self, Interface};

/// The address that peers should use when none was given: that of the first interface which is up and running, with bridges and
/// other interfaces of virtual machines and containers last. The choice is logged with its reason.
///
/// Loopback addresses do not count, nor do IPv6 link-local ones, which peers cannot use without a scope of their own. `None` if nothing is left.
pub fn find_local_address(ipv6: bool) -> Option<IpAddr> {
    let family = if ipv6 { "IPv6" } else { "IPv4" };
    let interfaces = interfaces::list().unwrap_or_else(|error| {
        tracing::warn!("network interfaces cannot be listed: {error}");
        Vec::new()
    });
    match choose(&interfaces, ipv6) {
        Some(Interface { name, address, .. }) => {
            let reason =
                if is_virtual(name) { "there is no other than virtual ones" } else { "it is the first that is up and running" };
            tracing::info!("local address is {address}, the {family} address of interface {name}: {reason}");
            Some(*address)
        }
        None => {
            tracing::info!("no interface that is up and running has an {family} address that peers could use");
            None
        }
    }
}

fn choose(interfaces: &[Interface], ipv6: bool) -> Option<&Interface> {
    let usable = |interface: &&Interface| {
        let address = interface.address;
        let is_link_local = matches!(address, IpAddr::V6(address) if address.is_unicast_link_local());
        let is_reachable = interface.up && interface.running && interface.name != "lo" && !address.is_loopback() && !is_link_local;
        is_reachable && address.is_ipv6() == ipv6
    };
    // The first of equals is kept.
    interfaces.iter().filter(usable).min_by_key(|interface| is_virtual(&interface.name))
}

/// Whether an interface leads to machines or containers inside this machine.
fn is_virtual(name: &str) -> bool {
    ["docker", "br-", "veth", "virbr", "cni", "flannel"].iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface(name: &str, address: &str) -> Interface {
        Interface { name: name.into(), address: address.parse().unwrap(), up: true, running: true }
    }

    #[test]
    fn the_first_real_interface_wins() {
        let mut down = interface("eth9", "10.9.9.9");
        down.running = false;
        let mut off = interface("eth8", "10.8.8.8");
        off.up = false;
        let interfaces = [
            interface("lo", "127.0.0.1"),
            interface("lo", "10.77.0.1"),
            interface("docker0", "172.17.0.1"),
            interface("br-1f2e", "172.18.0.1"),
            down,
            off,
            interface("eth0", "fe80::5"),
            interface("eth0", "fd00::2"),
            interface("eth0", "10.0.0.2"),
            interface("eth1", "10.0.0.3"),
        ];
        let chosen = |interfaces, ipv6| choose(interfaces, ipv6).map(|interface| interface.address.to_string());
        assert_eq!(chosen(&interfaces, false).unwrap(), "10.0.0.2");
        assert_eq!(chosen(&interfaces, true).unwrap(), "fd00::2");
        assert_eq!(chosen(&interfaces[..6], false).unwrap(), "172.17.0.1");
        assert_eq!(chosen(&interfaces[..2], false), None);
        assert_eq!(chosen(&interfaces[..7], true), None);
    }
}
