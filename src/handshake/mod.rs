//! The handshake channel: small requests between engines.
//!
//! One TCP connection carries one request and its reply, each a frame of JSON (`frame`). A [`Server`] answers on a port that a
//! [`Listener`] holds, on one thread for any number of peers; a [`Client`] asks on the thread of its caller. The engine provides
//! what is said, as a [`Service`].

pub mod address;
mod client;
mod frame;
mod listener;
mod server;

use std::sync::Arc;

pub use client::{Client, Whereabouts};
pub use listener::Listener;
pub use server::Server;

/// A message of one engine to another. Both texts may be empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notification {
    /// Who sends it, or what it is about: the application decides.
    pub name: String,
    /// The message.
    pub message: String,
}

/// What a [`Server`] answers with. Implemented by the engine.
///
/// All calls come from the server's one thread, and while one runs no peer is served: they must not wait for anything slow.
pub trait Service: Send + Sync {
    /// The own descriptor as pieces of JSON text to be sent one after the other. `None`: there is none yet; peers are told `null`.
    fn describe(&self) -> Option<Vec<Arc<str>>>;

    /// A notification has arrived. True: the sender is told of success; false: that it was refused.
    fn notify(&self, notification: Notification) -> bool;

    /// An RDMA connection request, a JSON object, is answered by a JSON object. `None`: there is no RDMA here, and the peer gets the
    /// reply that has all members and says nothing.
    fn connect(&self, request: &serde_json::Value) -> Option<serde_json::Value>;
}
