//! The network interfaces of the machine: a wrapper of `getifaddrs`.

use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// One IP address of one interface. An interface with several addresses appears several times, one without any does not appear.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Name, such as `eth0`.
    pub name: String,
    /// Its address. The scope of IPv6 link-local addresses is the interface.
    pub address: IpAddr,
    /// Switched on (`IFF_UP`).
    pub up: bool,
    /// Has what it needs to carry packets, such as a cable (`IFF_RUNNING`).
    pub running: bool,
}

/// All of them, in the order of the system. A few system calls.
pub fn list() -> io::Result<Vec<Interface>> {
    let mut head: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `head` is a valid place for the pointer.
    if unsafe { libc::getifaddrs(&raw mut head) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut interfaces = Vec::new();
    let mut next = head;
    // SAFETY: getifaddrs made a list of valid elements that ends in null; it stays until freeifaddrs.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        // SAFETY: an element's address is null or of the type that its family says.
        let Some(address) = (unsafe { ip_address(entry.ifa_addr) }) else { continue };
        // SAFETY: the name of an element is a string that ends in zero.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) }.to_string_lossy().into_owned();
        let has = |flag: libc::c_int| entry.ifa_flags & flag as libc::c_uint != 0;
        interfaces.push(Interface { name, address, up: has(libc::IFF_UP), running: has(libc::IFF_RUNNING) });
    }
    // SAFETY: made by getifaddrs above, freed once; nothing borrowed from it is left.
    unsafe { libc::freeifaddrs(head) };
    Ok(interfaces)
}

/// # Safety
/// `address` is null or points to a socket address that is as long as its family says.
unsafe fn ip_address(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: every socket address begins with its family.
    let family = unsafe { address.as_ref() }?.sa_family;
    match i32::from(family) {
        libc::AF_INET => {
            // SAFETY: the family says that it is one.
            let address = unsafe { *address.cast::<libc::sockaddr_in>() };
            Some(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: the family says that it is one.
            let address = unsafe { *address.cast::<libc::sockaddr_in6>() };
            Some(Ipv6Addr::from(address.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_is_listed() {
        let interfaces = list().unwrap();
        let loopback = interfaces.iter().find(|interface| interface.address == Ipv4Addr::LOCALHOST).unwrap();
        assert_eq!(*loopback, Interface { name: "lo".into(), address: Ipv4Addr::LOCALHOST.into(), up: true, running: true });
    }
}
