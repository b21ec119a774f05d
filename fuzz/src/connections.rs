//! Requests of strangers for RDMA connections, to an engine whose NICs are those of a verbs library without a kernel: each is answered with
//! queue pairs or with a reason, in bounded length, and the engine ends in bounded time whatever it was asked.

#[path = "../../tests/fake_verbs/compile.rs"]
mod compile;

use std::path::PathBuf;
use std::sync::OnceLock;

use serde_json::Value;
use transfer_engine::config::Config;
use transfer_engine::engine::{Engine, EngineOptions, PEER_TO_PEER};
use transfer_engine::handshake::address::HostPort;
use transfer_engine::handshake::{Client, Notification};

use super::loopback;

/// Stands for the path of the engine's NIC.
const NIC: &str = "@NIC@";
const QUEUE_PAIRS: usize = 2;
const LONGEST_REPLY: usize = 64 << 10;
const MOST_REQUESTS: usize = 32;

/// Lines of JSON, each of which is a request on a connection of its own.
pub fn run(data: &[u8]) {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    let mut config = Config::default();
    config.rdma.library = LIBRARY.get_or_init(make_library).clone();
    // So that a few strangers take them all.
    config.rdma.max_endpoints = 4;
    // What one input has connected is not for the next.
    let options = EngineOptions { metadata: PEER_TO_PEER.into(), server_name: "127.0.0.1".into(), ..EngineOptions::default() };
    let engine = Engine::create(&options, config).expect("an engine can be made");
    engine.install_transport("rdma", Some(r#"{"cpu:0":[["fake0"],["fake1"]]}"#)).expect("RDMA can be installed");
    // It is loaded, and stays so.
    let _ = engine.config().rdma.library.parent().map(std::fs::remove_dir_all);
    let address = engine.address();
    let port = HostPort::parse(&address, 0).port;
    let own_path = format!("{address}@fake0");
    for line in String::from_utf8_lossy(data).lines().take(MOST_REQUESTS) {
        let request = line.replace(NIC, &own_path);
        let mut frame = (request.len() as u64 + 1).to_le_bytes().to_vec();
        frame.push(0);
        frame.extend(request.as_bytes());
        let (reply, _) = loopback::exchange(port, &frame, 0);
        match serde_json::from_str::<Value>(&request) {
            Ok(request @ (Value::Object(_) | Value::Null)) => check(&request, &own_path, &reply),
            _ => assert!(reply.is_empty(), "a broken request is answered: {reply:?}"),
        }
    }
    assert_eq!(engine.take_notifications(), Vec::<Notification>::new());
    let client = Client::new(&Config::default()).expect("a client can be made");
    client.probe(&HostPort { host: "127.0.0.1".into(), port }).expect("the engine lives on");
    engine.shutdown();
}

fn check(request: &Value, own_path: &str, reply: &[u8]) {
    let (length, payload) = reply.split_first_chunk::<8>().expect("a request is answered");
    assert_eq!(u64::from_le_bytes(*length), payload.len() as u64);
    assert!(payload.len() <= LONGEST_REPLY, "{} bytes", payload.len());
    assert_eq!(payload[0], 0);
    let reply: Value = serde_json::from_slice(&payload[1..]).expect("the reply is JSON");
    let reason = reply["reply_msg"].as_str().expect("the reason is a text");
    let numbers = reply["qp_num"].as_array().expect("the queue pairs are a list");
    let is_last_step = request["ready_ack"] == Value::Bool(true);
    match reason.is_empty() && !is_last_step {
        true => {
            assert_eq!(request["peer_nic_path"], own_path);
            assert_eq!(request["qp_num"].as_array().map(Vec::len), Some(QUEUE_PAIRS));
            assert_eq!((&reply["local_nic_path"], &reply["peer_nic_path"]), (&own_path.into(), &request["local_nic_path"]));
            assert_eq!(numbers.len(), QUEUE_PAIRS);
        }
        false => assert!(numbers.is_empty(), "{reply}"),
    }
}

/// Compiles the verbs library, in a directory of its own.
fn make_library() -> PathBuf {
    let directory = std::env::temp_dir().join(format!("te-fuzz-verbs-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("there is room for the verbs library");
    compile::compile(&directory)
}
