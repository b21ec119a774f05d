//! Metadata servers: where engines with names of their own find each other.
//!
//! A server keeps texts under keys. An engine writes two: where its handshake channel is, and its segment's descriptor. [`Keys`] says how they are
//! called; [`Store`] is what an engine needs of a server, whichever it is.

use std::sync::Arc;

use crate::error::Result;

/// A metadata server. Any thread may call anything at any time; a call blocks for five seconds at most, whatever the server does.
///
/// Errors are [`Code::Metadata`](crate::error::Code::Metadata), logged where they are made, and name the server, the key and what it
/// answered. An error of a change leaves open whether it was made. A server that was away is used again when it is back.
pub trait Store: Send + Sync {
    /// The text under a key, or `None` if there is none.
    fn get(&self, key: &str) -> Result<Option<String>>;

    /// Writes a text, given in pieces as the descriptor is assembled: a JSON document with the newline that ends it, which some servers
    /// are not sent.
    fn put(&self, key: &str, text: &[Arc<str>]) -> Result<()>;

    /// Removes a key. That there is none is no error.
    fn remove(&self, key: &str) -> Result<()>;
}

/// How the keys of engines are called.
#[derive(Clone, Debug)]
pub struct Keys {
    prefix: String,
}

impl Keys {
    /// For the engines of a cluster, which see no others; `cluster` may be empty (`MC_METADATA_CLUSTER_ID`).
    pub fn new(cluster: &str) -> Keys {
        let slash = if cluster.is_empty() || cluster.ends_with('/') { "" } else { "/" };
        Keys { prefix: format!("mooncake/{cluster}{slash}") }
    }

    /// Where a segment's descriptor is.
    pub fn segment(&self, name: &str) -> String {
        match name.contains('/') {
            true => format!("{}{name}", self.prefix),
            false => format!("{}ram/{name}", self.prefix),
        }
    }

    /// Where it is said how an engine's handshake channel is reached.
    pub fn rpc(&self, server_name: &str) -> String {
        format!("{}rpc_meta/{server_name}", self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_called_as_upstream_calls_them() {
        let keys = Keys::new("");
        assert_eq!(keys.rpc("nodeA:12345"), "mooncake/rpc_meta/nodeA:12345");
        assert_eq!(keys.segment("nodeA:12345"), "mooncake/ram/nodeA:12345");
        assert_eq!(keys.segment("foo/bar"), "mooncake/foo/bar");
        for cluster in ["clusterX", "clusterX/"] {
            assert_eq!(Keys::new(cluster).segment("a"), "mooncake/clusterX/ram/a");
        }
    }
}
