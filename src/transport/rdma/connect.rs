//! Connecting with a peer's NIC: the side that asks, on a background thread, and the side that is asked, on the handshake channel's.
//!
//! One message and one reply tell each side the other's queue pairs. Where both know it, a second message says that the side that asked is
//! ready; until then the side that was asked posts nothing. If both ask at a time, each connects the same queue pairs by the other's
//! message, and finds that done when the reply comes.

use std::sync::Arc;

use serde_json::Value;

use super::endpoint::{Connection, LinkError};
use super::message::Message;
use super::nic::LocalNic;
use super::peer::Peer;
use super::{PATH_MAX, Shared};
use crate::error::{Code, Error, Result};
use crate::metadata::excerpt;
use crate::topology::GidAddress;
use crate::transport::Device;

/// Largest number of a queue pair.
const MOST_NUMBER: u32 = (1 << 24) - 1;

/// Connects an endpoint, and has posted what waits for it, or has it tried another way. Blocks.
pub(super) fn open(shared: &Arc<Shared>, nic: &Arc<LocalNic>, index: u32, id: u64, peer: &Arc<Peer>) {
    let connection = match nic.connection_of(index, id) {
        Ok(Some(connection)) => connection,
        // It was given up meanwhile.
        Ok(None) => return,
        Err(error) => return give_up(shared, nic, index, id, None, error),
    };
    let Some(path) = nic.path_of(index, id) else { return };
    let outcome = match shared.is_server_paused(&path) {
        false => ask(shared, nic, (index, id), connection, peer, &path),
        true => {
            let text = format!("{path} is not connected to for a while after a connection has ended (MC_CONN_PAUSE_TTL_MS)");
            Err(Error::new(Code::Endpoint, text))
        }
    };
    let fallout = match outcome {
        Ok(()) => nic.set_connected(index, id, true),
        Err(error) => return give_up(shared, nic, index, id, Some(path), error),
    };
    shared.settle(nic, fallout);
}

fn give_up(shared: &Shared, nic: &Arc<LocalNic>, index: u32, id: u64, path: Option<Arc<str>>, error: Error) {
    shared.counters.connections_failed.add(1);
    if let Some(path) = path {
        shared.pause(nic.index, path);
    }
    let fallout = nic.retire(index, id, Some(error));
    shared.settle(nic, fallout);
}

/// Asks the peer, and connects the endpoint's queue pairs. While the peer is waited for they are not held, so that they can be destroyed.
fn ask(
    shared: &Shared,
    nic: &LocalNic,
    endpoint: (u32, u64),
    connection: Arc<Connection>,
    peer: &Peer,
    path: &Arc<str>,
) -> Result<()> {
    let refused = |reason: String| Error::new(Code::RejectHandshake, format!("{} cannot connect to {path}: {reason}", nic.path));
    let mut request = greeting(nic, &connection, path);
    drop(connection);
    let connection = || {
        let found = nic.connection_of(endpoint.0, endpoint.1)?;
        found
            .ok_or_else(|| Error::quiet(Code::Endpoint, format!("the connection of {} to {path} was given up meanwhile", nic.path)))
    };
    let exchange = |request: &Message| {
        let reply = Message::from_json(&peer.segment.request_connection(&request.to_json())?).map_err(&refused)?;
        match reply.rejection.is_empty() {
            true => Ok(reply),
            false => Err(refused(format!("it says: {}", excerpt(&reply.rejection)))),
        }
    };
    let reply = match exchange(&request) {
        Ok(reply) => reply,
        // The peer has asked meanwhile, and has the same queue pairs.
        Err(_) if shared.closing.get().is_none() && connection().is_ok_and(|connection| connection.is_linked()) => return Ok(()),
        Err(error) => return Err(error),
    };
    if reply.local_path != **path || reply.peer_path != *nic.path {
        let (from, to) = (excerpt(&reply.local_path), excerpt(&reply.peer_path));
        return Err(refused(format!("the reply is from '{from}' to '{to}'; has it installed RDMA?")));
    }
    check_numbers(request.queue_pairs.len(), &reply.queue_pairs).map_err(refused)?;
    let view = peer.view();
    let (gid, lid) = match (reply.gid.as_str(), view.device_at(path)) {
        // Old peers tell of it in their descriptor only.
        ("", Some((gid, lid))) => (gid, lid),
        (gid, _) => (gid, reply.lid),
    };
    let gid = GidAddress::parse_bytes(gid).ok_or_else(|| refused(format!("its GID '{}' cannot be read", excerpt(gid))))?;
    let connection = connection()?;
    if let Err(error) = connection.link(&reply.queue_pairs, gid, lid) {
        return Err(refused(explain(shared, nic, &connection, error, true)));
    }
    nic.prove_gid(connection.opened.device.address().gid_index);
    drop(connection);
    if reply.ready_ack.is_some() {
        request.ready_ack = Some(true);
        exchange(&request)?;
    }
    shared.counters.connections_opened.add(1);
    Ok(())
}

/// Asks a peer whether it is connected with an endpoint yet, after somebody has asked for others in its name. One that does not answer is not.
/// Blocks.
pub(super) fn verify(shared: &Shared, nic: &Arc<LocalNic>, index: u32, id: u64, peer: &Peer) {
    let (Ok(Some(connection)), Some(path)) = (nic.connection_of(index, id), nic.path_of(index, id)) else { return };
    let request = Message { ready_ack: Some(true), ..greeting(nic, &connection, &path) };
    drop(connection);
    let answer = peer.segment.request_connection(&request.to_json()).ok().and_then(|reply| Message::from_json(&reply).ok());
    let is_connected = answer.is_some_and(|reply| {
        // Old peers take it for a request, and say with what they are connected: that, or new ones.
        let is_same = || nic.linked_endpoint(&path, &reply.queue_pairs).is_some_and(|(linked, ..)| linked == index);
        reply.rejection.is_empty() && (reply.queue_pairs.is_empty() || is_same())
    });
    let fallout = nic.decide_rivalry(index, id, is_connected);
    shared.settle(nic, fallout);
}

/// What a NIC says of itself and its queue pairs to another one.
fn greeting(nic: &LocalNic, connection: &Connection, path: &str) -> Message {
    let address = connection.opened.device.address();
    Message {
        local_path: nic.path.to_string(),
        peer_path: path.to_string(),
        lid: address.lid,
        gid: address.gid.to_string(),
        queue_pairs: connection.numbers(),
        ready_ack: Some(false),
        rejection: String::new(),
    }
}

/// Whether a peer's numbers of queue pairs can be connected with that many here.
fn check_numbers(own: usize, numbers: &[u32]) -> std::result::Result<(), String> {
    let peers = numbers.len();
    if peers != own {
        return Err(format!(
            "QP count mismatch: {own} queue pairs on one side, {peers} on the other; MC_NUM_QP_PER_EP must be the same on both"
        ));
    }
    match numbers.iter().find(|number| **number > MOST_NUMBER) {
        Some(number) => Err(format!("{number} is no number of a queue pair: these have 24 bits")),
        None => Ok(()),
    }
}

/// Says why queue pairs cannot be connected, and takes another GID for the next try if this one may be the reason. Where a stranger has
/// asked, a GID that has connected before is not the reason: what strangers send does not change the address that peers know.
fn explain(shared: &Shared, nic: &LocalNic, connection: &Connection, error: LinkError, is_chosen: bool) -> String {
    let device = &connection.opened.device;
    match error {
        LinkError::LinkedElsewhere => "its queue pairs have changed meanwhile".to_string(),
        LinkError::GivenUp => "the connection was given up meanwhile".to_string(),
        LinkError::Device(error) => {
            let address = device.address();
            if error.raw_os_error() == Some(libc::EINVAL) && (is_chosen || !nic.has_proven_gid(address.gid_index)) {
                let mut tried = nic.tried_gids.lock();
                if !tried.contains(&address.gid_index) {
                    tried.push(address.gid_index);
                }
                if tried.len() <= shared.config.gid_retries as usize && device.take_other_gid(&shared.machine, &tried).is_ok() {
                    drop(tried);
                    shared.header_changed();
                }
            }
            format!("its device refuses ({error}), with GID {} (index {})", address.gid, address.gid_index)
        }
    }
}

/// Answers a peer's NIC that asks for a connection.
pub(super) fn accept(shared: &Shared, request: &Value) -> Value {
    let reply = match Message::from_json(request) {
        Ok(request) => answer(shared, &request).unwrap_or_else(|reason| {
            let from = excerpt(&request.local_path);
            tracing::warn!("a connection request from '{from}' was rejected: {reason}");
            Message::rejection(reason)
        }),
        Err(reason) => Message::rejection(reason),
    };
    reply.to_json()
}

fn answer(shared: &Shared, request: &Message) -> std::result::Result<Message, String> {
    let is_asked = |nic: &&Arc<LocalNic>| *nic.path == *request.peer_path;
    let Some(nic) = shared.nics().find(is_asked).filter(|nic| nic.is_active()) else {
        let paths: Vec<&str> = shared.nics().filter(|nic| nic.is_active()).map(|nic| &*nic.path).collect();
        return Err(format!("no NIC here is '{}'; there are: {}", excerpt(&request.peer_path), paths.join(", ")));
    };
    if request.local_path.is_empty() || request.local_path.len() > PATH_MAX {
        return Err("local_nic_path is empty or too long".to_string());
    }
    if request.ready_ack == Some(true) {
        let (is_known, fallout) = nic.acknowledge(&request.local_path, &request.queue_pairs);
        shared.settle(nic, fallout);
        return match is_known {
            true => Ok(Message::default()),
            false => Err(format!("{} is not connected with these queue pairs; ask again", excerpt(&request.local_path))),
        };
    }
    check_numbers(shared.config.queue_pairs_per_endpoint, &request.queue_pairs)?;
    let gid = GidAddress::parse_bytes(&request.gid).filter(|gid| !gid.is_zero());
    let gid = gid.ok_or_else(|| format!("local_gid '{}' is no address", excerpt(&request.gid)))?;
    if let Some((.., connection)) = nic.linked_endpoint(&request.local_path, &request.queue_pairs) {
        return Ok(greeting(nic, &connection, &request.local_path));
    }
    // The first may be linked with queue pairs of a peer that has restarted, or of another one.
    for is_rival in [false, true] {
        let (endpoint, fallout) = nic.passive_endpoint(&request.local_path, is_rival);
        shared.settle(nic, fallout);
        let (index, id) = endpoint?;
        let connection = match nic.connection_of(index, id) {
            Ok(Some(connection)) => connection,
            Ok(None) => continue,
            Err(error) => {
                let fallout = nic.retire(index, id, Some(error.clone()));
                shared.settle(nic, fallout);
                return Err(error.message().to_string());
            }
        };
        let was_linked = connection.is_linked();
        match connection.link(&request.queue_pairs, gid, request.lid) {
            Ok(()) => {
                if !was_linked {
                    nic.prove_gid(connection.opened.device.address().gid_index);
                    shared.counters.connections_accepted.add(1);
                    let fallout = nic.set_connected(index, id, request.ready_ack.is_none());
                    shared.settle(nic, fallout);
                }
                return Ok(greeting(nic, &connection, &request.local_path));
            }
            Err(LinkError::LinkedElsewhere) => {}
            Err(LinkError::GivenUp) => {
                let fallout = nic.retire(index, id, None);
                shared.settle(nic, fallout);
            }
            Err(error) => {
                let reason = explain(shared, nic, &connection, error, false);
                let fallout = nic.retire(index, id, Some(Error::quiet(Code::Endpoint, reason.clone())));
                shared.settle(nic, fallout);
                return Err(reason);
            }
        }
    }
    Err("its queue pairs change faster than they can be connected".to_string())
}
