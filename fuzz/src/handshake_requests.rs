//! The handshake channel of an engine, asked by strangers: it answers a request or closes, in bounded time, and lives on.

use std::sync::{Arc, OnceLock};

use serde_json::Value;
use transfer_engine::config::Config;
use transfer_engine::engine::Engine;
use transfer_engine::handshake::address::HostPort;
use transfer_engine::handshake::{Client, Notification};
use transfer_engine::metadata::SegmentDescriptor;

use super::loopback;

/// The bytes of one connection, after one that says in pieces of how many they are sent.
pub fn run(data: &[u8]) {
    static ENGINE: OnceLock<(Arc<Engine>, u16)> = OnceLock::new();
    let (engine, port) = ENGINE.get_or_init(|| {
        let engine = loopback::engine(Config::default());
        let port = HostPort::parse(&engine.address(), 0).port;
        (engine, port)
    });
    let Some((&piece, request)) = data.split_first() else { return };
    let (reply, _) = loopback::exchange(*port, request, piece as usize);
    let messages = engine.take_notifications();
    match expected(request) {
        Some((kind, Some(message))) => {
            assert_eq!(kind, Some(2));
            assert_eq!(messages, [message]);
            check(kind, &reply);
        }
        Some((kind, None)) => {
            assert!(messages.is_empty());
            check(kind, &reply);
        }
        None => assert!(reply.is_empty() && messages.is_empty(), "a broken request is answered: {reply:?}"),
    }
    let client = Client::new(&Config::default()).expect("a client can be made");
    client.probe(&HostPort { host: "127.0.0.1".into(), port: *port }).expect("the server lives on");
}

/// The type byte of the reply that is due, if any is, and the message that arrives by the request.
fn expected(request: &[u8]) -> Option<(Option<u8>, Option<Notification>)> {
    let (length, rest) = request.split_first_chunk::<8>()?;
    let length = usize::try_from(u64::from_le_bytes(*length)).ok().filter(|length| (1..=1 << 20).contains(length))?;
    let payload = rest.get(..length)?;
    let object = |text: &[u8]| match serde_json::from_slice::<Value>(text) {
        Ok(Value::Object(members)) => Some(members),
        Ok(Value::Null) => Some(Default::default()),
        _ => None,
    };
    match payload[0] {
        0 => object(&payload[1..]).map(|_| (Some(0), None)),
        kind @ (1 | 3) => Some((Some(kind), None)),
        2 => {
            let members = object(&payload[1..])?;
            let text = |key| match members.get(key) {
                None | Some(Value::Null) => Some(String::new()),
                Some(Value::String(text)) => Some(text.clone()),
                Some(_) => None,
            };
            Some((Some(2), Some(Notification { name: text("name")?, message: text("notify_msg")? })))
        }
        4..0x80 => object(payload).map(|_| (None, None)),
        0x80.. => None,
    }
}

/// Whether the reply is one whole frame of the kind, with nothing after it.
fn check(kind: Option<u8>, reply: &[u8]) {
    let (length, payload) = reply.split_first_chunk::<8>().expect("a request is answered");
    assert_eq!(u64::from_le_bytes(*length), payload.len() as u64);
    let text = match kind {
        Some(kind) => {
            assert_eq!(payload[0], kind);
            &payload[1..]
        }
        None => payload,
    };
    let value: Value = serde_json::from_slice(text).expect("the reply is JSON");
    match kind {
        Some(1) => drop(SegmentDescriptor::decode(text, &"the target").expect("it is a descriptor")),
        Some(2) => assert_eq!(value["notify_msg"], "success"),
        Some(3) => assert_eq!(value["status"], "success"),
        _ => assert_eq!(value["reply_msg"], ""),
    }
}
