//! Host and port texts: parsing never fails, and what is displayed is read back as the same.

use std::net::Ipv6Addr;

use transfer_engine::handshake::address::HostPort;

/// One text.
pub fn run(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (first, second) = (HostPort::parse(&text, 1), HostPort::parse(&text, 2));
    assert_eq!(first.host, second.host);
    match HostPort::has_port(&text) {
        true => assert_eq!(first.port, second.port),
        false => assert_eq!((first.port, second.port), (1, 2)),
    }
    assert!(text.contains(&*first.host), "the host is part of the text");
    // Hosts that cannot exist need not survive.
    let is_literal = first.host.split('%').next().is_some_and(|address| address.parse::<Ipv6Addr>().is_ok());
    if first.host.contains(['[', ']']) || first.host.contains(':') && !is_literal {
        return;
    }
    let shown = first.to_string();
    assert!(HostPort::has_port(&shown), "{text:?} is shown as {shown:?}");
    assert_eq!(HostPort::parse(&shown, 3), first, "{text:?} is shown as {shown:?}");
}
