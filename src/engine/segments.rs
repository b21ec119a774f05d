//! The segments an engine has opened: names, ids, and the peers' descriptors, which the peers themselves are asked for or, where there is
//! one, a metadata server.
//!
//! Ids count up from 1 and are never reused; 0 is the own segment. A descriptor is replaced as a whole, so whoever holds one has a
//! consistent snapshot. `table` is locked for look-ups only, never while a peer is asked; one peer is asked once at a time, and who
//! waits for that takes its result.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};

use super::directory::{Directory, Place};
use crate::error::{Code, Error, Result};
use crate::handshake::Client;
use crate::handshake::address::HostPort;
use crate::metadata::{SegmentDescriptor, SegmentHeader, store};
use crate::telemetry::Counters;
use crate::transport::Segment;

/// What asking a peer takes.
pub(super) struct Fetcher {
    pub client: Client,
    pub counters: Arc<Counters>,
    pub default_port: u16,
    /// Where peers are found by their names; `None`: their names are their addresses.
    pub directory: Option<Arc<Directory>>,
    /// What is told of the own segment: the protocol asks for it, and peers do not look at it.
    pub own: RwLock<SegmentHeader>,
}

impl Fetcher {
    fn fetch(&self, place: &Place) -> Result<Arc<SegmentDescriptor>> {
        self.counters.descriptor_fetches.add(1);
        let descriptor = match place {
            Place::Named(directory, name) => store::bounded(|| directory.describe(name))?,
            Place::Address(peer) => {
                let own = self.own.read().assemble(Vec::new()).concat();
                let text = self.client.fetch_descriptor(peer, &own)?;
                SegmentDescriptor::decode(&text, peer)?
            }
        };
        Ok(Arc::new(descriptor))
    }

    /// Where the handshake channel of the engine with that name is.
    pub fn place(&self, name: &str) -> Place {
        match &self.directory {
            Some(directory) => Place::Named(directory.clone(), name.into()),
            None => Place::Address(HostPort::parse(name, self.default_port)),
        }
    }
}

/// A segment of a peer.
pub(super) struct RemoteSegment {
    id: u64,
    name: String,
    place: Place,
    fetcher: Arc<Fetcher>,
    descriptor: RwLock<Arc<SegmentDescriptor>>,
    /// Number of the last fetch that has ended; held during a fetch.
    fetches: Mutex<u64>,
    started: AtomicU64,
}

impl RemoteSegment {
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where the peer's handshake channel is.
    pub fn place(&self) -> &Place {
        &self.place
    }
}

impl Segment for RemoteSegment {
    fn id(&self) -> u64 {
        self.id
    }

    fn descriptor(&self) -> Arc<SegmentDescriptor> {
        self.descriptor.read().clone()
    }

    fn refresh(&self) -> Result<Arc<SegmentDescriptor>> {
        let arrived = self.started.load(Ordering::SeqCst);
        let mut fetches = self.fetches.lock();
        if *fetches > arrived {
            // A fetch that began after this call did has ended meanwhile.
            return Ok(self.descriptor());
        }
        self.started.fetch_add(1, Ordering::SeqCst);
        let descriptor = self.fetcher.fetch(&self.place)?;
        *self.descriptor.write() = descriptor.clone();
        *fetches = self.started.load(Ordering::SeqCst);
        Ok(descriptor)
    }

    fn request_connection(&self, request: &serde_json::Value) -> Result<serde_json::Value> {
        self.fetcher.client.request_connection(&self.place, request)
    }

    fn host(&self) -> Result<String> {
        let descriptor = self.descriptor();
        if !descriptor.tcp_data_host.is_empty() {
            return Ok(descriptor.tcp_data_host.clone());
        }
        let name = match &self.place {
            Place::Address(address) if descriptor.name.is_empty() => return Ok(address.host.clone()),
            _ => &descriptor.name,
        };
        Ok(HostPort::parse(name, self.fetcher.default_port).host)
    }
}

#[derive(Default)]
struct Table {
    by_id: HashMap<u64, Arc<RemoteSegment>>,
    by_name: HashMap<String, u64>,
    last_id: u64,
}

/// The cache of opened segments.
pub(super) struct Segments {
    fetcher: Arc<Fetcher>,
    table: RwLock<Table>,
}

impl Segments {
    pub fn new(fetcher: Arc<Fetcher>) -> Segments {
        Segments { fetcher, table: RwLock::default() }
    }

    /// The segment of that name, asking for it if it is not known.
    pub fn open(&self, name: &str) -> Result<Arc<RemoteSegment>> {
        if let Some(segment) = self.find(name) {
            return Ok(segment);
        }
        let place = self.fetcher.place(name);
        let descriptor = self.fetcher.fetch(&place).map_err(|error| match &place {
            Place::Named(..) => error,
            Place::Address(_) if HostPort::has_port(name) => error,
            Place::Address(_) => {
                let hint = "the name has no port, so the default was tried; give all of the address that the peer's engine has";
                Error::quiet(error.code(), format!("{}; {hint}", error.message()))
            }
        })?;
        let mut table = self.table.write();
        // Another thread may have been faster.
        if let Some(segment) = table.by_name.get(name).and_then(|id| table.by_id.get(id)) {
            return Ok(segment.clone());
        }
        // Ids fit into the int32_t of the old interface.
        if table.last_id >= i32::MAX as u64 {
            return Err(Error::new(Code::Limit, "2^31 segments have been opened; make a new engine"));
        }
        table.last_id += 1;
        let id = table.last_id;
        let segment = Arc::new(RemoteSegment {
            id,
            name: name.into(),
            place,
            fetcher: self.fetcher.clone(),
            descriptor: RwLock::new(descriptor),
            fetches: Mutex::new(0),
            started: AtomicU64::new(0),
        });
        table.by_id.insert(id, segment.clone());
        table.by_name.insert(name.into(), id);
        Ok(segment)
    }

    pub fn find(&self, name: &str) -> Option<Arc<RemoteSegment>> {
        let table = self.table.read();
        table.by_id.get(table.by_name.get(name)?).cloned()
    }

    pub fn get(&self, id: u64) -> Result<Arc<RemoteSegment>> {
        self.table.read().by_id.get(&id).cloned().ok_or_else(|| {
            // Callers of the old interface may pass on the -1 of a failure.
            let text = format!("segment {} is not known here: never opened, or removed; open it by its name", id as i64);
            Error::new(Code::InvalidHandle, text)
        })
    }

    pub fn all(&self) -> Vec<Arc<RemoteSegment>> {
        self.table.read().by_id.values().cloned().collect()
    }

    /// Forgets the segment of that name; its id is invalid from now on.
    pub fn remove(&self, name: &str) -> Option<Arc<RemoteSegment>> {
        let mut table = self.table.write();
        let id = table.by_name.remove(name)?;
        table.by_id.remove(&id)
    }
}
