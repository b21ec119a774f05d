//! Replies of strangers to the requests of an engine: each is taken for what it says or refused, in bounded time.

use std::io::{self, Read};
use std::net::TcpStream;
use std::sync::OnceLock;

use serde_json::Value;
use transfer_engine::Code;
use transfer_engine::config::Config;
use transfer_engine::handshake::address::HostPort;
use transfer_engine::handshake::{Client, Notification};
use transfer_engine::metadata::SegmentDescriptor;

use super::loopback::Parrot;

/// The bytes of a reply, after one that chooses the request.
pub fn run(data: &[u8]) {
    static PEER: OnceLock<(Parrot, Client)> = OnceLock::new();
    let (parrot, client) =
        PEER.get_or_init(|| (Parrot::start(hear), Client::new(&Config::default()).expect("a client can be made")));
    let Some((&choice, reply)) = data.split_first() else { return };
    parrot.learn(reply);
    let peer = HostPort { host: "127.0.0.1".into(), port: parrot.port() };
    let kind = choice % 3 + 1;
    let body = body(kind, reply);
    let json = body.and_then(|body| serde_json::from_slice::<Value>(body).ok());
    let outcome = match kind {
        1 => client.fetch_descriptor(&peer, "{}").map(|text| {
            assert_eq!(Some(&*text), body);
            let _ = SegmentDescriptor::decode(&text, &"the target");
        }),
        2 => client.notify(&peer, &Notification { name: "name".into(), message: "text".into() }),
        _ => client.probe(&peer),
    };
    let accepted = match (kind, body) {
        (_, None) => false,
        (1, Some(text)) => text.trim_ascii() != b"null",
        (2, _) => json.is_some_and(|json| json["notify_msg"].as_str().is_some_and(|text| !text.is_empty())),
        // What the reply to a probe says is of no interest.
        (_, Some(text)) => serde_json::from_slice::<serde::de::IgnoredAny>(text).is_ok(),
    };
    match outcome {
        Ok(()) => assert!(accepted, "a reply is taken that says something else"),
        Err(error) => {
            assert!(!accepted, "{error}");
            assert!(matches!(error.code(), Code::Socket | Code::MalformedJson | Code::Metadata), "{error}");
            assert_eq!(body.is_none(), error.code() == Code::Socket, "{error}");
        }
    }
}

/// Reads one request.
fn hear(stream: &mut TcpStream) -> io::Result<()> {
    let mut length = [0; 8];
    stream.read_exact(&mut length)?;
    io::copy(&mut stream.take(u64::from_le_bytes(length)), &mut io::sink()).map(drop)
}

/// The JSON of a reply, if it is a whole frame of the kind. What follows it is not read.
fn body(kind: u8, reply: &[u8]) -> Option<&[u8]> {
    let (length, rest) = reply.split_first_chunk::<8>()?;
    let payload = rest.get(..usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
    payload.split_first().filter(|(first, _)| **first == kind).map(|(_, text)| text)
}
