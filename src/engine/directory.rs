//! A metadata server as an engine uses it: under which keys it looks for peers, and what is there.
//!
//! Where a peer's handshake channel is, is looked up when it is first needed, and kept until nobody answers there or the peer's
//! descriptor is fetched anew. `locations` is locked for looking and changing, never during a call to the server.

use std::collections::HashMap;
use std::fmt::Write;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::Value;

use crate::error::{Code, Error, Result};
use crate::handshake::Whereabouts;
use crate::handshake::address::HostPort;
use crate::metadata::store::{Keys, Store};
use crate::metadata::{SegmentDescriptor, excerpt, write_json_string};

/// A metadata server, and where it says that peers are.
pub(super) struct Directory {
    pub store: Arc<dyn Store>,
    pub keys: Keys,
    locations: Mutex<HashMap<String, HostPort>>,
}

impl Directory {
    pub fn new(store: Arc<dyn Store>, cluster: &str) -> Directory {
        Directory { store, keys: Keys::new(cluster), locations: Mutex::default() }
    }

    /// The descriptor of a segment. Metadata if there is none.
    pub fn describe(&self, name: &str) -> Result<SegmentDescriptor> {
        let key = self.keys.segment(name);
        let text = self.store.get(&key)?.ok_or_else(|| {
            let text = format!(
                "no engine is called '{}': the metadata server has nothing under '{}'. Check that it runs and has installed a transport, \
                 and that both use the same server and MC_METADATA_CLUSTER_ID",
                excerpt(name),
                excerpt(&key)
            );
            Error::new(Code::Metadata, text)
        })?;
        self.forget(name);
        let mut descriptor = SegmentDescriptor::decode(text.as_bytes(), &"the metadata server")?;
        // Older peers do not say it there.
        if descriptor.tcp_data_host.is_empty() && descriptor.protocols.iter().any(|protocol| protocol == "tcp") {
            descriptor.tcp_data_host = self.locate(name)?.host;
        }
        Ok(descriptor)
    }

    /// Where the handshake channel of an engine is. Metadata if nothing is known of it.
    fn locate(&self, name: &str) -> Result<HostPort> {
        if let Some(known) = self.locations.lock().get(name) {
            return Ok(known.clone());
        }
        let key = self.keys.rpc(name);
        let (name_shown, key_shown) = (excerpt(name), excerpt(&key));
        let text = self.store.get(&key)?.ok_or_else(|| {
            let text = format!(
                "engine '{name_shown}' cannot be reached: the metadata server has nothing under '{key_shown}'; check that it runs"
            );
            Error::new(Code::Metadata, text)
        })?;
        let location = parse_location(&text).ok_or_else(|| {
            let text =
                format!("engine '{name_shown}' cannot be reached: what is under '{key_shown}' is no address: {}", excerpt(&text));
            Error::new(Code::Metadata, text)
        })?;
        self.locations.lock().insert(name.into(), location.clone());
        Ok(location)
    }

    fn forget(&self, name: &str) {
        self.locations.lock().remove(name);
    }
}

/// The handshake channel of an engine.
pub(super) enum Place {
    /// At an address that is its name.
    Address(HostPort),
    /// Where the metadata server says.
    Named(Arc<Directory>, String),
}

impl Whereabouts for Place {
    fn address(&self) -> Result<HostPort> {
        match self {
            Place::Address(address) => Ok(address.clone()),
            Place::Named(directory, name) => directory.locate(name),
        }
    }

    fn other_address(&self, failed: &HostPort) -> Option<HostPort> {
        let Place::Named(directory, name) = self else { return None };
        directory.forget(name);
        directory.locate(name).ok().filter(|found| found != failed)
    }
}

/// What an engine keeps on the server about its handshake channel, with the newline that ends a document. Servers compare it byte by byte
/// with what they have.
pub(super) fn location_text(address: &HostPort) -> String {
    let mut text = String::from(r#"{"ip_or_host_name":"#);
    write_json_string(&address.host, &mut text);
    let _ = writeln!(text, r#","rpc_port":{}}}"#, address.port);
    text
}

/// Reads such a text. `None` if it is not that.
pub(super) fn parse_location(text: &str) -> Option<HostPort> {
    let location: Value = serde_json::from_str(text).ok()?;
    let host = location.get("ip_or_host_name")?.as_str().filter(|host| !host.is_empty())?;
    let port = u16::try_from(location.get("rpc_port")?.as_u64()?).ok()?;
    Some(HostPort { host: host.into(), port })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_are_written_as_upstream_does_and_read_whatever_comes() {
        let address = HostPort { host: "fe80::1%lo".into(), port: 15329 };
        assert_eq!(location_text(&address), "{\"ip_or_host_name\":\"fe80::1%lo\",\"rpc_port\":15329}\n");
        assert_eq!(parse_location(&location_text(&address)), Some(address));
        let odd = " { \"rpc_port\" : 1, \"x\": [], \"ip_or_host_name\" : \"a\" } ";
        assert_eq!(parse_location(odd), Some(HostPort { host: "a".into(), port: 1 }));
        for text in [
            "",
            "null",
            "[]",
            "{}",
            r#"{"ip_or_host_name":"","rpc_port":1}"#,
            r#"{"ip_or_host_name":"a","rpc_port":65536}"#,
            r#"{"ip_or_host_name":"a","rpc_port":-1}"#,
            r#"{"ip_or_host_name":"a","rpc_port":"1"}"#,
            r#"{"ip_or_host_name":1,"rpc_port":1}"#,
            r#"{"ip_or_host_name":"a"}"#,
        ] {
            assert_eq!(parse_location(text), None, "{text}");
        }
    }
}
