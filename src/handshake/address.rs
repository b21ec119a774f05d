//! Host and port texts, and the address of this machine.
//!
//! Parsing follows upstream's rules, since names travel between engines as text. It allocates the host and does no I/O;
//! [`find_local_address`] asks the system for its interfaces.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

use crate::metadata::excerpt;
use crate::sys::interfaces::{self, Interface};

/// A host and a port. Displayed as `host:port`, with brackets around an IPv6 literal.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HostPort {
    /// A name, or an IPv4 or IPv6 literal without brackets, the latter perhaps with `%scope`.
    pub host: String,
    /// TCP port.
    pub port: u16,
}

impl HostPort {
    /// Splits a text such as `node7:12345`, `[::1]:12345`, `fe80::1%eth0:12345` or `::1`.
    ///
    /// What follows the last colon is the port, unless the whole text is an IPv6 literal: `::1:9999` is one, `::1:15087` is not,
    /// because no group of an IPv6 address has five digits. A missing port becomes `default_port`; so does one that is not a decimal
    /// number up to 65535, with a warning.
    pub fn parse(text: &str, default_port: u16) -> HostPort {
        let (host, port) = split(text);
        let port = port.map_or(default_port, |port| {
            parse_port(port).unwrap_or_else(|| {
                tracing::warn!("'{}' has no valid port (0 to 65535); {default_port} is used", excerpt(text));
                default_port
            })
        });
        HostPort { host: host.into(), port }
    }

    /// The host of such a text alone.
    pub fn parse_host(text: &str) -> String {
        split(text).0.into()
    }

    /// Whether the text carries a valid port of its own.
    pub fn has_port(text: &str) -> bool {
        split(text).1.and_then(parse_port).is_some()
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if is_ipv6_literal(&self.host) {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// Host, and the text of the port if there is one.
fn split(text: &str) -> (&str, Option<&str>) {
    if let Some((host, rest)) = text.strip_prefix('[').and_then(|inner| inner.split_once(']'))
        && is_ipv6_literal(host)
    {
        return (host, rest.strip_prefix(':'));
    }
    if is_ipv6_literal(text) {
        return (text, None);
    }
    if let Some((scope_start, colon)) = text.find('%').and_then(|percent| Some((percent, percent + text[percent..].find(':')?)))
        && text[..scope_start].parse::<Ipv6Addr>().is_ok()
    {
        return (&text[..colon], Some(&text[colon + 1..]));
    }
    match text.rsplit_once(':') {
        Some((host, port)) => (host, Some(port)),
        None => (text, None),
    }
}

fn parse_port(text: &str) -> Option<u16> {
    if text.bytes().all(|byte| byte.is_ascii_digit()) { text.parse().ok() } else { None }
}

/// Whether the text is an IPv6 address, perhaps followed by `%scope`.
pub(super) fn is_ipv6_literal(text: &str) -> bool {
    let (address, scope) = text.split_once('%').unwrap_or((text, ""));
    !scope.contains(':') && address.parse::<Ipv6Addr>().is_ok()
}

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

    #[test]
    fn texts_are_split_as_upstream_does() {
        const DEFAULT: u16 = 12001;
        for (text, host, port, displayed) in [
            ("node7:12345", "node7", 12345, "node7:12345"),
            ("node7", "node7", DEFAULT, "node7:12001"),
            ("10.0.0.1:1", "10.0.0.1", 1, "10.0.0.1:1"),
            ("10.0.0.1", "10.0.0.1", DEFAULT, "10.0.0.1:12001"),
            ("[::1]:12345", "::1", 12345, "[::1]:12345"),
            ("[::1]", "::1", DEFAULT, "[::1]:12001"),
            ("[::1]x", "::1", DEFAULT, "[::1]:12001"),
            ("[fe80::1%lo]:12345", "fe80::1%lo", 12345, "[fe80::1%lo]:12345"),
            ("::1", "::1", DEFAULT, "[::1]:12001"),
            ("::1:9999", "::1:9999", DEFAULT, "[::1:9999]:12001"),
            ("::1:15087", "::1", 15087, "[::1]:15087"),
            ("fe80::1%lo", "fe80::1%lo", DEFAULT, "[fe80::1%lo]:12001"),
            ("fe80::1%lo:12345", "fe80::1%lo", 12345, "[fe80::1%lo]:12345"),
            ("fe80::1%lo:99", "fe80::1%lo", 99, "[fe80::1%lo]:99"),
            ("2001:db8::7:15000", "2001:db8::7", 15000, "[2001:db8::7]:15000"),
            ("::ffff:10.0.0.1", "::ffff:10.0.0.1", DEFAULT, "[::ffff:10.0.0.1]:12001"),
            ("::ffff:10.0.0.1:80", "::ffff:10.0.0.1", 80, "[::ffff:10.0.0.1]:80"),
            ("a%b:80", "a%b", 80, "a%b:80"),
            ("a:b:80", "a:b", 80, "a:b:80"),
            ("[node]:80", "[node]", 80, "[node]:80"),
            ("node:0", "node", 0, "node:0"),
            ("node:65535", "node", 65535, "node:65535"),
            ("node:65536", "node", DEFAULT, "node:12001"),
            ("node:", "node", DEFAULT, "node:12001"),
            ("node:abc", "node", DEFAULT, "node:12001"),
            ("node:-1", "node", DEFAULT, "node:12001"),
            ("node:+5", "node", DEFAULT, "node:12001"),
            ("node: 5", "node", DEFAULT, "node:12001"),
            ("node:5x", "node", DEFAULT, "node:12001"),
            ("[::1]:70000", "::1", DEFAULT, "[::1]:12001"),
            (":80", "", 80, ":80"),
            ("", "", DEFAULT, ":12001"),
            ("%", "%", DEFAULT, "%:12001"),
            ("::1%", "::1%", DEFAULT, "[::1%]:12001"),
            ("[", "[", DEFAULT, "[:12001"),
            ("[]:1", "[]", 1, "[]:1"),
        ] {
            let parsed = HostPort::parse(text, DEFAULT);
            assert_eq!((&*parsed.host, parsed.port), (host, port), "{text}");
            assert_eq!(parsed.to_string(), displayed, "{text}");
            assert_eq!(HostPort::has_port(text), port != DEFAULT, "{text}");
        }
    }

    #[test]
    fn displayed_literals_round_trip() {
        for host in ["::1", "fe80::1%lo", "::1:9999", "10.0.0.1", "node7", "2001:db8::7"] {
            for port in [0, 7, 12345, 65535] {
                let address = HostPort { host: host.into(), port };
                assert_eq!(HostPort::parse(&address.to_string(), 1), address);
            }
        }
    }

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
