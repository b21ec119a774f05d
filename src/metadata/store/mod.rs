//! Metadata servers: where engines with names of their own find each other.
//!
//! A server keeps texts under keys. An engine writes two: where its handshake channel is, and its segment's descriptor. [`Keys`] says how they are
//! called; [`Store`] is what an engine needs of a server, whichever it is; [`connect`] makes one.
//!
//! HTTP and etcd are in builds with the feature `http`, redis in those with `redis`, and TLS in those with `tls`.

#[cfg(any(feature = "http", feature = "redis"))]
mod connection;
#[cfg(feature = "http")]
mod etcd;
#[cfg(feature = "http")]
mod http;
#[cfg(feature = "redis")]
mod redis;
#[cfg(all(test, any(feature = "http", feature = "redis")))]
mod stub;

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::config::Config;
use crate::error::{Code, Error, Result};
use crate::metadata::excerpt;

/// How long a call may take, whatever has to be done for it. What is left of five seconds is for threads that get no processor.
#[cfg(any(feature = "http", feature = "redis"))]
const CALL_LIMIT: Duration = Duration::from_secs(4);

/// How long the calls of an operation may take together.
const OPERATION_LIMIT: Duration = Duration::from_millis(4500);

thread_local! {
    static OPERATION_END: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Has all calls that `operation` makes on this thread end within five seconds together, those of operations in it included. What comes when
/// the time is over fails.
pub fn bounded<T>(operation: impl FnOnce() -> T) -> T {
    struct Reset(Option<Instant>);
    impl Drop for Reset {
        fn drop(&mut self) {
            OPERATION_END.set(self.0);
        }
    }
    let reset = Reset(operation_end());
    OPERATION_END.set(reset.0.or_else(|| Some(Instant::now() + OPERATION_LIMIT)));
    operation()
}

/// Work that may take long without asking a server, in an operation that is bounded: its time is not counted.
pub fn uncounted<T>(work: impl FnOnce() -> T) -> T {
    let begin = Instant::now();
    let outcome = work();
    OPERATION_END.set(operation_end().map(|end| end + begin.elapsed()));
    outcome
}

/// When the operation of this thread has to end, if it has one.
pub(crate) fn operation_end() -> Option<Instant> {
    OPERATION_END.get()
}

/// When a call that begins now has to end.
#[cfg(any(feature = "http", feature = "redis"))]
fn call_end() -> Instant {
    let end = Instant::now() + CALL_LIMIT;
    operation_end().map_or(end, |operation| end.min(operation))
}

/// Longest text that is accepted, in bytes: twice what peers accept of each other. Tests do not fill that.
#[cfg(any(feature = "http", feature = "redis"))]
const LONGEST_TEXT: u64 = if cfg!(test) { 16 << 20 } else { 256 << 20 };

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

/// The metadata server of a connection string: `http://host:port/path`, `https://…`, `redis://host[:port]`, `etcd://endpoints`, or
/// endpoints of etcd alone, separated by commas or semicolons.
///
/// Nothing is sent yet: a server that cannot be reached shows at the first call, which names it. Errors:
/// [`Code::InvalidArgument`], the string is malformed; [`Code::NotImplemented`], its scheme is unknown, or this build lacks it.
#[cfg_attr(not(feature = "redis"), expect(unused_variables, reason = "only redis is configured"))]
pub fn connect(uri: &str, config: &Config) -> Result<Arc<dyn Store>> {
    if uri.eq_ignore_ascii_case("P2PHANDSHAKE") {
        let text =
            format!("'{uri}' names no metadata server; P2PHANDSHAKE, in capitals, means that engines find each other by address");
        return Err(Error::new(Code::InvalidArgument, text));
    }
    // Endpoints may be URLs themselves, so what comes before "://" must look like a scheme.
    let is_scheme = |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte));
    let (scheme, rest) = uri.split_once("://").filter(|(scheme, _)| is_scheme(scheme)).unwrap_or(("etcd", uri));
    if rest.is_empty() {
        let text = format!("'{}' names no metadata server; {KNOWN}", excerpt(uri));
        return Err(Error::new(Code::InvalidArgument, text));
    }
    match scheme {
        #[cfg(feature = "http")]
        "http" | "https" => Ok(Arc::new(http::HttpStore::new(uri)?)),
        #[cfg(feature = "http")]
        "etcd" => Ok(Arc::new(etcd::EtcdStore::new(rest)?)),
        #[cfg(feature = "redis")]
        "redis" => Ok(Arc::new(redis::RedisStore::new(rest, &config.redis)?)),
        #[cfg(not(feature = "http"))]
        "http" | "https" | "etcd" => Err(lacks(scheme, "http")),
        #[cfg(not(feature = "redis"))]
        "redis" => Err(lacks(scheme, "redis")),
        _ => {
            let text = format!("metadata servers of scheme '{}' are not known; {KNOWN}", excerpt(scheme));
            Err(Error::new(Code::NotImplemented, text))
        }
    }
}

const KNOWN: &str = "known are http://host:port/path, redis://host:port, etcd://host:port,…, and P2PHANDSHAKE for none";

#[cfg(not(all(feature = "http", feature = "redis")))]
#[track_caller]
fn lacks(scheme: &str, feature: &str) -> Error {
    Error::new(
        Code::NotImplemented,
        format!("this build knows no metadata servers of scheme '{scheme}': build with the feature {feature}"),
    )
}

/// The error of a call that a server did not answer well.
#[cfg(any(feature = "http", feature = "redis"))]
#[track_caller]
fn failed(call: &str, key: &str, server: &str, reason: String) -> Error {
    Error::new(Code::Metadata, format!("{call} of '{}' at metadata server {server} failed: {reason}", excerpt(key)))
}

#[cfg(any(feature = "http", feature = "redis"))]
fn text_of(bytes: Vec<u8>) -> std::result::Result<String, String> {
    String::from_utf8(bytes).map_err(|error| {
        let bytes = error.as_bytes();
        format!("what it has is no text: {}", excerpt(&String::from_utf8_lossy(&bytes[..bytes.len().min(1000)])))
    })
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

    #[test]
    #[cfg(any(feature = "http", feature = "redis"))]
    fn calls_of_an_operation_share_its_time() {
        let begun = Instant::now();
        bounded(|| {
            let end = operation_end().unwrap();
            assert!(end >= begun + OPERATION_LIMIT && call_end() <= end);
            OPERATION_END.set(Some(begun));
            bounded(|| assert_eq!(call_end(), begun));
            assert_eq!(call_end(), begun);
        });
        assert!(operation_end().is_none() && call_end() >= begun + CALL_LIMIT);
    }

    #[test]
    fn a_scheme_decides_and_what_is_not_known_or_not_built_is_named() {
        let code = |uri: &str| connect(uri, &Config::default()).err().map(|error| error.code());
        let http = (!cfg!(feature = "http")).then_some(Code::NotImplemented);
        for uri in
            ["http://h:8080/metadata", "etcd://h:2379", "etcd://me:secret@h1,h2", "h1:2379,h2:2379;h3", "h:2379,http://h:2379"]
        {
            assert_eq!(code(uri), http, "{uri}");
        }
        assert_eq!(code("redis://h:6379"), (!cfg!(feature = "redis")).then_some(Code::NotImplemented));
        assert_eq!(code("https://h/metadata"), (!cfg!(feature = "tls")).then_some(Code::NotImplemented));
        for uri in ["", "http://", "redis://", "etcd://"] {
            assert_eq!(code(uri), Some(Code::InvalidArgument), "{uri}");
        }
        for uri in ["ftp://h", "HTTP://h", "rediss://h", "etcd3://h"] {
            let error = connect(uri, &Config::default()).err().unwrap();
            assert_eq!(error.code(), Code::NotImplemented, "{uri}");
            assert!(error.message().contains("redis://host:port"), "{error}");
        }
    }
}
