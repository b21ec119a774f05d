//! The handshake channel. (skeleton)
#![allow(missing_docs, unused_variables)]

use std::sync::Arc;

use crate::config::Config;
use crate::error::Result;

pub mod address {
    //! Host and port texts (interop C.8).
    /// A host and a port. Display brackets IPv6 literals.
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    pub struct HostPort {
        pub host: String,
        pub port: u16,
    }
    impl HostPort {
        /// The rules of upstream; a missing or bad port becomes `default_port` (the latter with a warning).
        pub fn parse(text: &str, default_port: u16) -> HostPort {
            todo!()
        }
        /// Whether the text carries a port of its own.
        pub fn has_port(text: &str) -> bool {
            todo!()
        }
    }
    impl std::fmt::Display for HostPort {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            todo!()
        }
    }
    /// The address that peers should use when none was given: first UP and RUNNING interface not `lo`; docker/bridges last. Logs the choice and why.
    pub fn find_local_address(ipv6: bool) -> Option<std::net::IpAddr> {
        todo!()
    }
}

/// A message of one engine to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notification {
    pub name: String,
    pub message: String,
}

/// What a server answers with. Implemented by the engine.
pub trait Service: Send + Sync {
    /// The own descriptor as JSON text pieces; None = no transport yet, answered with `null`.
    fn describe(&self) -> Option<Vec<Arc<str>>>;
    /// A notification has arrived.
    fn notify(&self, notification: Notification);
    /// An RDMA connection request (JSON object), answered by a JSON object. `None`: no RDMA here, answered with the all-empty object.
    fn connect(&self, request: &serde_json::Value) -> Option<serde_json::Value>;
}

/// A listening socket on a drawn port (interop C.2); the socket that was probed is the one that listens.
pub struct Listener {}
impl Listener {
    pub fn draw(config: &Config) -> Result<Listener> {
        todo!()
    }
    pub fn bind(config: &Config, port: u16) -> Result<Listener> {
        todo!()
    }
    pub fn port(&self) -> u16 {
        todo!()
    }
    /// For a listener that the caller serves itself (TCP data port).
    pub fn into_std(self) -> std::net::TcpListener {
        todo!()
    }
}

/// One thread, any number of connections.
pub struct Server {}
impl Server {
    pub fn start(listener: Listener, service: Arc<dyn Service>, config: &Config) -> Result<Server> {
        todo!()
    }
    /// Stops; returns when the thread has ended. Also done on drop.
    pub fn stop(&self) {
        todo!()
    }
}

/// Requests to other engines. Each makes one connection, closes it right after the reply, and blocks.
pub struct Client {}
impl Client {
    pub fn new(config: &Config) -> Client {
        todo!()
    }
    /// The peer's descriptor text. Err(Metadata) when the peer has none (`null`).
    pub fn fetch_descriptor(&self, peer: &address::HostPort) -> Result<Vec<u8>> {
        todo!()
    }
    pub fn notify(&self, peer: &address::HostPort, notification: &Notification) -> Result<()> {
        todo!()
    }
    pub fn probe(&self, peer: &address::HostPort) -> Result<()> {
        todo!()
    }
}
