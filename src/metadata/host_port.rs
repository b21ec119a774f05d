//! Host and port texts, by upstream's rules, since names travel between engines as text. Parsing allocates the host and does no I/O.

use std::fmt;
use std::net::Ipv6Addr;

use crate::metadata::excerpt;

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
pub(crate) fn is_ipv6_literal(text: &str) -> bool {
    let (address, scope) = text.split_once('%').unwrap_or((text, ""));
    !scope.contains(':') && address.parse::<Ipv6Addr>().is_ok()
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
}
