//! Metadata servers that speak HTTP, and the client that etcd's gateway is reached by, too.
//!
//! Mooncake has three such servers. A key is the parameter `key` of the URL, escaped exactly as libcurl does, because one of them
//! compares the escaped text. Only status 200 is success. A text has no newline at the end here.
//!
//! Two of the servers refuse to replace where an engine is reached, with status 400, so that an engine which died could not come back
//! under its name. Such a key is removed and written once more.
//!
//! Connections are kept, and shared by the threads that call; ureq's pool has one mutex, which is not held while anything is sent or
//! received. A kept connection may turn out to be lost, since servers close idle ones, so a request that lost its connection is
//! repeated once on a new one: everything here may be done twice. Proxies of the environment (`http_proxy`) are not used, other than by
//! upstream: a metadata server is within the cluster.
//!
//! A PUT copies its text once, through a buffer of 128 KiB.

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use ureq::http::{Method, Request, Response, Uri};
use ureq::unversioned::resolver::{ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{Buffers, ConnectionDetails, Connector, LazyBuffers, NextTimeout, Transport};
use ureq::{Agent, AsSendBody, Body, SendBody};

use super::connection::{CONNECT_LIMIT, Connection, Server, is_lost, remaining};
use super::{LONGEST_TEXT, Store, call_end, failed, text_of};
use crate::error::{Code, Error, Result};
use crate::metadata::excerpt;
use crate::metadata::host_port::HostPort;

/// How long a request may take; upstream's.
pub(super) const REQUEST_LIMIT: Duration = Duration::from_secs(3);

/// How much of a reply that is no success is looked at.
const LONGEST_COMPLAINT: u64 = 64 << 10;

/// Connections that are kept.
const KEPT: usize = 8;

/// A metadata server of Mooncake's.
pub(super) struct HttpStore {
    client: Client,
}

impl HttpStore {
    /// `uri` such as `http://host:8080/metadata`.
    pub(super) fn new(uri: &str) -> Result<HttpStore> {
        if uri.contains(['?', '#']) {
            let text = "the URL of an HTTP metadata server must have no '?' and no '#': the key is added as its only parameter";
            return Err(Error::new(Code::InvalidArgument, text));
        }
        Ok(HttpStore { client: Client::new(uri, None)? })
    }

    fn exchange(&self, method: Method, key: &str, body: Option<&[&[u8]]>, call_end: Instant) -> std::result::Result<Reply, String> {
        let end = call_end.min(Instant::now() + REQUEST_LIMIT);
        let headers: &[_] = if body.is_some() { &[("Content-Type", "application/json")] } else { &[] };
        self.client.exchange(method, &format!("?key={}", escape(key)), headers, body, end)
    }

    #[track_caller]
    fn failed(&self, method: &Method, key: &str, reason: String) -> Error {
        failed(method.as_str(), key, self.client.shown(), reason)
    }

    /// The reply, if it has one of these statuses.
    fn expect(&self, method: Method, key: &str, body: Option<&[&[u8]]>, end: Instant, statuses: &[u16]) -> Result<Reply> {
        let reply = self.exchange(method.clone(), key, body, end).map_err(|reason| self.failed(&method, key, reason))?;
        match statuses.contains(&reply.status) {
            true => Ok(reply),
            false => Err(self.failed(&method, key, reply.complaint())),
        }
    }
}

impl Store for HttpStore {
    fn get(&self, key: &str) -> Result<Option<String>> {
        let reply = self.expect(Method::GET, key, None, call_end(), &[200, 404])?;
        if reply.status == 404 {
            return Ok(None);
        }
        text_of(reply.body).map(Some).map_err(|reason| self.failed(&Method::GET, key, reason))
    }

    fn put(&self, key: &str, text: &[Arc<str>]) -> Result<()> {
        let end = call_end();
        let pieces = without_newline(text);
        let is_location = key.contains("rpc_meta");
        let statuses: &[u16] = if is_location { &[200, 400] } else { &[200] };
        let reply = self.expect(Method::PUT, key, Some(&pieces), end, statuses)?;
        if reply.status == 200 {
            return Ok(());
        }
        let stored = self.expect(Method::GET, key, None, end, &[200, 404])?;
        if stored.status == 404 {
            // It is not about the key being there.
            return Err(self.failed(&Method::PUT, key, reply.complaint()));
        }
        if stored.body == pieces.concat() {
            return Ok(());
        }
        tracing::warn!(
            "{} has '{}' from an engine that did not say that it ended, or that has the same name: it is replaced ({})",
            self.client.shown(),
            excerpt(key),
            excerpt(&String::from_utf8_lossy(&stored.body))
        );
        self.expect(Method::DELETE, key, None, end, &[200, 404])?;
        self.expect(Method::PUT, key, Some(&pieces), end, &[200]).map(drop)
    }

    fn remove(&self, key: &str) -> Result<()> {
        self.expect(Method::DELETE, key, None, call_end(), &[200, 404]).map(drop)
    }
}

/// The pieces of a text without the newline that ends it.
fn without_newline(text: &[Arc<str>]) -> Vec<&[u8]> {
    let mut pieces: Vec<&[u8]> = text.iter().map(|piece| piece.as_bytes()).filter(|piece| !piece.is_empty()).collect();
    if let Some(last) = pieces.last_mut() {
        *last = last.strip_suffix(b"\n").unwrap_or(last);
    }
    pieces
}

/// Escapes a text as libcurl does: all but unreserved characters, in upper-case hexadecimal.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len() + 16);
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => escaped.push(byte.into()),
            _ => escaped.push_str(&format!("%{byte:02X}")),
        }
    }
    escaped
}

/// The bytes that an escaped text stands for; what is no escape stands for itself.
pub(super) fn unescape(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        let escaped = (*first == b'%').then(|| std::str::from_utf8(after.get(..2)?).ok()).flatten();
        match escaped.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    bytes
}

/// Sends requests to one server.
pub(super) struct Client {
    agent: Agent,
    /// What each URL begins with.
    base: String,
    authorization: Option<String>,
}

/// What a server answered.
pub(super) struct Reply {
    pub(super) status: u16,
    pub(super) body: Vec<u8>,
}

impl Reply {
    /// A reply that is no success.
    pub(super) fn complaint(&self) -> String {
        let said = String::from_utf8_lossy(&self.body);
        let said = match said.trim() {
            "" => String::new(),
            said => format!(": {}", excerpt(said)),
        };
        format!("it answered with status {}{said}", self.status)
    }
}

impl Client {
    /// `base` is a URL, perhaps with a user and a password. Without a default port, that of its scheme holds.
    pub(super) fn new(base: &str, default_port: Option<u16>) -> Result<Client> {
        let malformed = |reason: &str| {
            // Credentials are not shown.
            let shown = excerpt(base.rsplit('@').next().unwrap_or(base));
            let text = format!("'{shown}' is no URL of a metadata server, such as http://host:8080/metadata: {reason}");
            Error::new(Code::InvalidArgument, text)
        };
        let uri: Uri = base.parse().map_err(|error: ureq::http::uri::InvalidUri| malformed(&error.to_string()))?;
        let authority = uri.authority().ok_or_else(|| malformed("it has no host"))?;
        let is_tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") if cfg!(feature = "tls") => true,
            Some("https") => {
                let text = "this build has no TLS, which https:// needs: build with the feature tls, or use http://";
                return Err(Error::new(Code::NotImplemented, text));
            }
            _ => return Err(malformed("it does not begin with http:// or https://")),
        };
        let host = authority.host();
        if host.is_empty() {
            return Err(malformed("it has no host"));
        }
        let (credentials, after) = match authority.as_str().rsplit_once('@') {
            Some((credentials, after)) => (Some(credentials), after),
            None => (None, authority.as_str()),
        };
        let port = match authority.port_u16() {
            Some(port) => port,
            None if after.len() != host.len() => return Err(malformed("its port is no number up to 65535")),
            None => default_port.unwrap_or(if is_tls { 443 } else { 80 }),
        };
        let path = if uri.path() == "/" && !base.ends_with('/') { "" } else { uri.path() };
        let bare_host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        Ok(Client {
            agent: agent(Server::new(HostPort { host: bare_host.into(), port })),
            base: format!("{}://{host}:{port}{path}", if is_tls { "https" } else { "http" }),
            authorization: credentials.map(|credentials| format!("Basic {}", BASE64_STANDARD.encode(unescape(credentials)))),
        })
    }

    /// What the server is called in texts.
    pub(super) fn shown(&self) -> &str {
        &self.base
    }

    /// One request and its reply, whatever its status, until `end`.
    pub(super) fn exchange(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Option<&[&[u8]]>,
        end: Instant,
    ) -> std::result::Result<Reply, String> {
        let started = Instant::now();
        let url = format!("{}{path}", self.base);
        let result = match self.attempt(&method, &url, headers, body, end, false) {
            Err(ureq::Error::Io(error)) if is_lost(&error) => self.attempt(&method, &url, headers, body, end, true),
            result => result,
        };
        result.map_err(|error| match error {
            ureq::Error::Timeout(_) => format!("no answer within {:.1} s", started.elapsed().as_secs_f32()),
            ureq::Error::BodyExceedsLimit(limit) => format!("its answer is longer than {limit} bytes"),
            ureq::Error::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                "it closed the connection and did not answer".into()
            }
            ureq::Error::Io(error) => error.to_string(),
            error => format!("{error}; is it a metadata server?"),
        })
    }

    fn attempt(
        &self,
        method: &Method,
        url: &str,
        headers: &[(&str, &str)],
        body: Option<&[&[u8]]>,
        end: Instant,
        on_new_connection: bool,
    ) -> std::result::Result<Reply, ureq::Error> {
        let mut request = ureq::http::Request::builder().method(method).uri(url);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        if let Some(authorization) = &self.authorization {
            request = request.header("Authorization", authorization);
        }
        let mut response = match body {
            None => self.run(request.body(())?, end, on_new_connection),
            Some(pieces) => {
                let mut pieces = Pieces { pieces, sent: 0 };
                let request = request.header("Content-Length", pieces.length());
                self.run(request.body(SendBody::from_reader(&mut pieces))?, end, on_new_connection)
            }
        }?;
        let status = response.status().as_u16();
        let limit = if status == 200 { LONGEST_TEXT } else { LONGEST_COMPLAINT };
        match response.body_mut().with_config().limit(limit).read_to_vec() {
            Ok(body) => Ok(Reply { status, body }),
            Err(ureq::Error::BodyExceedsLimit(_)) if status != 200 => Ok(Reply { status, body: Vec::new() }),
            Err(error) => Err(error),
        }
    }

    fn run(
        &self,
        request: Request<impl AsSendBody>,
        end: Instant,
        on_new_connection: bool,
    ) -> std::result::Result<Response<Body>, ureq::Error> {
        let config = self.agent.configure_request(request).timeout_global(Some(remaining(end)?));
        // Kept ones are passed over.
        let config = if on_new_connection { config.max_idle_age(Duration::ZERO) } else { config };
        self.agent.run(config.build())
    }
}

fn agent(server: Arc<Server>) -> Agent {
    let config = Agent::config_builder()
        .proxy(None)
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .timeout_connect(Some(CONNECT_LIMIT))
        .max_idle_connections(KEPT)
        .max_idle_connections_per_host(KEPT)
        .user_agent(concat!("transfer-engine/", env!("CARGO_PKG_VERSION")));
    let connector = Dial(server);
    #[cfg(feature = "tls")]
    let (config, connector) = {
        use ureq::tls::{RootCerts, TlsConfig};
        let tls = TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build();
        (config.tls_config(tls), connector.chain(ureq::unversioned::transport::RustlsConnector::default()))
    };
    Agent::with_parts(config.build(), connector, ResolvedLater)
}

/// A text in pieces, as ureq reads it.
struct Pieces<'a> {
    pieces: &'a [&'a [u8]],
    /// Bytes of the first piece that were read.
    sent: usize,
}

impl Pieces<'_> {
    fn length(&self) -> usize {
        self.pieces.iter().map(|piece| piece.len()).sum()
    }
}

impl Read for Pieces<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        while let [piece, after @ ..] = self.pieces {
            let length = (piece.len() - self.sent).min(buffer.len() - filled);
            buffer[filled..filled + length].copy_from_slice(&piece[self.sent..self.sent + length]);
            filled += length;
            self.sent += length;
            if self.sent < piece.len() {
                break;
            }
            (self.pieces, self.sent) = (after, 0);
        }
        Ok(filled)
    }
}

/// Names are looked up by [`Server::connect`], when a connection is made; ureq would have it done for each request.
#[derive(Debug)]
struct ResolvedLater;

impl Resolver for ResolvedLater {
    fn resolve(&self, _: &Uri, _: &ureq::config::Config, _: NextTimeout) -> std::result::Result<ResolvedSocketAddrs, ureq::Error> {
        Ok(self.empty())
    }
}

/// Makes connections.
#[derive(Debug)]
struct Dial(Arc<Server>);

impl<In: Transport> Connector<In> for Dial {
    type Out = Wire;

    fn connect(&self, details: &ConnectionDetails, _: Option<In>) -> std::result::Result<Option<Wire>, ureq::Error> {
        let connection = self.0.connect(end_of(details.timeout))?;
        let buffers = LazyBuffers::new(details.config.input_buffer_size(), details.config.output_buffer_size());
        Ok(Some(Wire { connection, buffers }))
    }
}

fn end_of(timeout: NextTimeout) -> Instant {
    // There is always a time-out. Were there none, ureq would have it be an age.
    Instant::now() + REQUEST_LIMIT.min(*timeout.after)
}

/// A connection as ureq uses it.
#[derive(Debug)]
struct Wire {
    connection: Connection,
    buffers: LazyBuffers,
}

/// What ureq calls it when the time is over.
fn explain(error: io::Error, timeout: NextTimeout) -> ureq::Error {
    if error.kind() == io::ErrorKind::TimedOut { ureq::Error::Timeout(timeout.reason) } else { error.into() }
}

impl Transport for Wire {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> std::result::Result<(), ureq::Error> {
        self.connection.set_end(end_of(timeout));
        self.connection.write_all(&self.buffers.output()[..amount]).map_err(|error| explain(error, timeout))
    }

    fn await_input(&mut self, timeout: NextTimeout) -> std::result::Result<bool, ureq::Error> {
        self.connection.set_end(end_of(timeout));
        let received = loop {
            match self.connection.read(self.buffers.input_append_buf()) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => break result.map_err(|error| explain(error, timeout))?,
            }
        };
        self.buffers.input_appended(received);
        Ok(received > 0)
    }

    fn is_open(&mut self) -> bool {
        self.connection.is_quiet()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use parking_lot::Mutex;

    use super::super::stub::{
        Request, Stub, answer, assert_that_calls_end_whatever_the_server_does, http_stub, pieces, read_request, reset,
    };
    use super::*;

    fn store(stub: &Stub) -> HttpStore {
        HttpStore::new(&format!("http://{}/metadata", stub.address)).unwrap()
    }

    /// Keeps texts as Mooncake's servers do; `refuses` says whether it keeps locations from being replaced.
    fn serve(refuses: bool) -> (Stub, Arc<Mutex<Vec<Request>>>) {
        let (requests, texts) = (Arc::new(Mutex::new(Vec::new())), Mutex::new(HashMap::new()));
        let seen = requests.clone();
        let stub = http_stub(move |request| {
            requests.lock().push(request.clone());
            let (mut texts, key) = (texts.lock(), request.target.clone());
            match request.method.as_str() {
                "GET" => texts.get(&key).cloned().map_or((404, "metadata not found".into()), |text| (200, text)),
                "PUT" if refuses && key.contains("rpc_meta") && texts.contains_key(&key) => (400, "Duplicate rpc_meta key".into()),
                "PUT" => (200, texts.insert(key, request.body).map(|_| String::new()).unwrap_or_default()),
                _ => (if texts.remove(&key).is_some() { 200 } else { 404 }, String::new()),
            }
        });
        (stub, seen)
    }

    #[test]
    fn keys_are_escaped_as_libcurl_does() {
        for (text, escaped) in [
            ("mooncake/ram/nodeA:12345", "mooncake%2Fram%2FnodeA%3A12345"),
            ("AZaz09-._~", "AZaz09-._~"),
            (
                " !\"#$%&'()*+,/:;<=>?@[\\]^`{|}",
                "%20%21%22%23%24%25%26%27%28%29%2A%2B%2C%2F%3A%3B%3C%3D%3E%3F%40%5B%5C%5D%5E%60%7B%7C%7D",
            ),
            ("ä\n\u{7f}", "%C3%A4%0A%7F"),
            ("[::1]:1", "%5B%3A%3A1%5D%3A1"),
        ] {
            assert_eq!(escape(text), escaped);
            assert_eq!(unescape(escaped), text.as_bytes());
        }
        assert_eq!(unescape("%zz%2"), b"%zz%2");
    }

    #[test]
    fn texts_are_written_read_and_removed_as_upstream_does_on_one_connection() {
        let (stub, requests) = serve(false);
        let store = store(&stub);
        let key = "mooncake/ram/nodeA:12345";
        assert_eq!(store.get(key).unwrap(), None);
        store.put(key, &pieces(&["{\"a\":", "", "1}\n", ""])).unwrap();
        assert_eq!(store.get(key).unwrap().unwrap(), "{\"a\":1}");
        store.put(key, &pieces(&["{}", "\n"])).unwrap();
        assert_eq!(store.get(key).unwrap().unwrap(), "{}");
        store.remove(key).unwrap();
        store.remove(key).unwrap();
        assert_eq!(stub.connections(), 1);
        let requests = requests.lock();
        assert!(requests.iter().all(|request| request.target == "/metadata?key=mooncake%2Fram%2FnodeA%3A12345"), "{requests:?}");
        assert!(requests[1].head.contains("content-type: application/json\r\n"), "{}", requests[1].head);
        assert!(
            requests[1].head.contains("content-length: 7\r\n") && !requests[1].head.contains("expect:"),
            "{}",
            requests[1].head
        );
    }

    #[test]
    fn long_texts_arrive_whole() {
        let (stub, _) = serve(false);
        let store = store(&stub);
        let text: Vec<Arc<str>> = (0..1000).map(|number| format!("{number:>4000}").into()).collect();
        store.put("key", &text).unwrap();
        assert_eq!(store.get("key").unwrap().unwrap(), text.concat());
    }

    #[test]
    fn only_status_200_is_success() {
        for status in [201, 204, 301, 401, 500, 503] {
            let stub = http_stub(move |_| (status, if status == 204 { String::new() } else { "be\nquiet".into() }));
            let store = store(&stub);
            for error in [
                store.get("a key").unwrap_err(),
                store.put("a key", &pieces(&["{}\n"])).unwrap_err(),
                store.remove("a key").unwrap_err(),
            ] {
                assert_eq!(error.code(), Code::Metadata);
                let text = error.message();
                let said = if status == 204 { "" } else { ": be\\nquiet" };
                assert!(text.contains("'a key'") && text.ends_with(&format!("status {status}{said}")), "{text}");
                assert!(text.contains(&format!("http://{}/metadata", stub.address)), "{text}");
            }
        }
    }

    #[test]
    fn a_location_that_a_server_does_not_replace_is_removed_and_written_again() {
        let (stub, requests) = serve(true);
        let store = store(&stub);
        let methods = || std::mem::take(&mut *requests.lock()).into_iter().map(|request| request.method).collect::<Vec<_>>();
        store.put("rpc_meta/a", &pieces(&["{\"port\":1}\n"])).unwrap();
        assert_eq!(methods(), ["PUT"]);
        store.put("rpc_meta/a", &pieces(&["{\"port\"", ":1}\n"])).unwrap();
        assert_eq!(methods(), ["PUT", "GET"]);
        store.put("rpc_meta/a", &pieces(&["{\"port\":2}\n"])).unwrap();
        assert_eq!(methods(), ["PUT", "GET", "DELETE", "PUT"]);
        assert_eq!(store.get("rpc_meta/a").unwrap().unwrap(), "{\"port\":2}");
    }

    #[test]
    fn a_refused_text_is_not_tried_for_ever_and_a_refused_descriptor_not_removed() {
        let methods = Arc::new(Mutex::new(Vec::new()));
        let seen = methods.clone();
        let stub = http_stub(move |request| {
            seen.lock().push(request.method.clone());
            if request.method == "PUT" { (400, "no".into()) } else { (200, "old".into()) }
        });
        let store = store(&stub);
        assert!(store.put("rpc_meta/a", &pieces(&["new\n"])).unwrap_err().message().ends_with("status 400: no"));
        assert_eq!(std::mem::take(&mut *methods.lock()), ["PUT", "GET", "DELETE", "PUT"]);
        assert!(store.put("ram/a", &pieces(&["new\n"])).unwrap_err().message().ends_with("status 400: no"));
        assert_eq!(*methods.lock(), ["PUT"]);
    }

    #[test]
    fn a_kept_connection_that_was_lost_is_replaced_once() {
        let stub = Stub::new(|mut stream, number| {
            // Connections 0 and 2 take a second request and are lost over it.
            while let Some(request) = read_request(&mut stream) {
                if request.method == "PUT" && number.is_multiple_of(2) {
                    return reset(stream);
                }
                answer(&mut stream, 200, "text");
            }
        });
        let store = store(&stub);
        store.get("key").unwrap();
        store.put("key", &pieces(&["text"])).unwrap();
        assert_eq!(stub.connections(), 2);
        let stub = Stub::new(|mut stream, _| {
            read_request(&mut stream);
            reset(stream);
        });
        let store = self::store(&stub);
        assert_eq!(store.remove("key").unwrap_err().code(), Code::Metadata);
        assert_eq!(stub.connections(), 2);
    }

    #[test]
    fn a_server_that_was_away_is_used_again() {
        let stub = Stub::new(|mut stream, number| {
            while number >= 2 && read_request(&mut stream).is_some() {
                answer(&mut stream, 200, "back");
            }
        });
        let store = store(&stub);
        assert_eq!(store.get("key").unwrap_err().code(), Code::Metadata);
        assert_eq!(store.get("key").unwrap().unwrap(), "back");
    }

    #[test]
    fn answers_that_break_off_are_errors() {
        let says = |text: &'static str| {
            Stub::new(move |mut stream, _| {
                read_request(&mut stream);
                let _ = stream.write_all(text.as_bytes());
                if text.ends_with('!') {
                    reset(stream)
                }
            })
        };
        for text in [
            "",
            "garbage without end of line",
            "SSH-2.0-OpenSSH\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Len",
            "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf",
            "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nreset!",
            "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\n",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhalf",
        ] {
            let stub = says(text);
            assert_eq!(store(&stub).get("key").unwrap_err().code(), Code::Metadata, "{text}");
            assert!(stub.connections() <= 2, "{text}");
        }
        let latin = Stub::new(|mut stream, _| {
            read_request(&mut stream);
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\xe4!");
        });
        assert!(store(&latin).get("key").unwrap_err().message().contains("no text"));
    }

    #[test]
    fn a_text_without_end_is_given_up() {
        let stub = Stub::new(|mut stream, _| {
            read_request(&mut stream);
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
            let chunk = format!("10000\r\n{}\r\n", "x".repeat(0x10000));
            while stream.write_all(chunk.as_bytes()).is_ok() {}
        });
        let end = Instant::now() + Duration::from_secs(600);
        let reason = store(&stub).client.exchange(Method::GET, "", &[], None, end).err().unwrap();
        assert_eq!(reason, format!("its answer is longer than {LONGEST_TEXT} bytes"));
    }

    #[test]
    fn calls_end_whatever_the_server_does() {
        let connect = |address| HttpStore::new(&format!("http://{address}")).unwrap();
        assert_that_calls_end_whatever_the_server_does(connect, b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n");
    }

    #[test]
    fn threads_get_each_its_own_answer_of_a_server_that_delays_drops_and_errs() {
        let dropped = Mutex::new(HashSet::new());
        let texts = Mutex::new(HashMap::new());
        let stub = Stub::new(move |mut stream, _| {
            while let Some(Request { method, target, body, .. }) = read_request(&mut stream) {
                let first = dropped.lock().insert((method.clone(), target.clone()));
                if target.contains("delay") {
                    std::thread::sleep(Duration::from_millis(5));
                }
                if target.contains("gone") || (target.contains("drop") && first) {
                    return reset(stream);
                }
                match method.as_str() {
                    _ if target.contains("err") => answer(&mut stream, 500, "no"),
                    "PUT" => {
                        texts.lock().insert(target, body);
                        answer(&mut stream, 200, "");
                    }
                    _ => {
                        let text = texts.lock().get(&target).cloned();
                        answer(&mut stream, if text.is_some() { 200 } else { 404 }, &text.unwrap_or_default());
                    }
                }
            }
        });
        let store = store(&stub);
        std::thread::scope(|scope| {
            for thread in 0..32 {
                let store = &store;
                scope.spawn(move || {
                    for round in 0..4 {
                        for what in ["good", "delay", "drop", "err", "gone"] {
                            let key = format!("{what}{thread}.{round}");
                            let (put, got) = (store.put(&key, &pieces(&[&key, "\n"])), store.get(&key));
                            match what {
                                "err" | "gone" => assert!(put.is_err() && got.is_err(), "{key}"),
                                _ => assert_eq!((put.ok(), got.unwrap()), (Some(()), Some(key))),
                            }
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn credentials_of_the_url_are_sent_and_not_shown() {
        let (stub, requests) = serve(false);
        let store = HttpStore::new(&format!("http://me:my%20secret@{}/metadata", stub.address)).unwrap();
        store.get("key").unwrap();
        // "me:my secret" in base64, in lower case as the stub keeps heads.
        assert!(requests.lock()[0].head.contains("authorization: basic bwu6bxkgc2vjcmv0\r\n"), "{:?}", requests.lock()[0]);
        assert!(!store.client.shown().contains("secret"), "{}", store.client.shown());
    }

    #[test]
    fn a_proxy_of_the_environment_is_not_used() {
        const NAME: &str = "metadata::store::http::tests::a_proxy_of_the_environment_is_not_used";
        if std::env::var_os("http_proxy").is_none() {
            // The environment of this process is everybody's, so another one has it.
            let mut child = std::process::Command::new(std::env::current_exe().unwrap());
            for name in ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"] {
                child.env(name, "http://127.0.0.1:1");
            }
            let output = child.args([NAME, "--exact"]).env_remove("no_proxy").env_remove("NO_PROXY").output().unwrap();
            let said = String::from_utf8_lossy(&output.stdout);
            return assert!(output.status.success() && said.contains("1 passed"), "{said}");
        }
        let (stub, _) = serve(false);
        store(&stub).get("key").unwrap();
    }

    #[test]
    fn what_is_no_url_of_a_server_is_refused() {
        for uri in [
            "http://h/metadata?x=1",
            "http://h/#x",
            "http://h:99999/",
            "http://h:x/",
            "http:// h",
            "http://h:",
            "http://u:secret@h:x/",
            "http://:80/",
        ] {
            let error = HttpStore::new(uri).err().unwrap_or_else(|| panic!("{uri}"));
            assert_eq!(error.code(), Code::InvalidArgument, "{uri}");
            assert!(!error.message().contains("secret"), "{error}");
        }
        for (uri, shown) in [
            ("http://h", "http://h:80"),
            ("http://h/", "http://h:80/"),
            ("http://h:8080/metadata", "http://h:8080/metadata"),
            ("http://[::1]:8080/metadata", "http://[::1]:8080/metadata"),
        ] {
            assert_eq!(HttpStore::new(uri).unwrap().client.shown(), shown);
        }
        let tls = HttpStore::new("https://h/metadata");
        match cfg!(feature = "tls") {
            true => assert_eq!(tls.unwrap().client.shown(), "https://h:443/metadata"),
            false => assert!(tls.err().unwrap().message().contains("feature tls")),
        }
    }
}
