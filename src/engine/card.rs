//! What peers see of an engine: its descriptor and its letter box.

use std::sync::{Arc, Weak};

use parking_lot::{Mutex, RwLock};

use crate::error::{Code, Error, Result};
use crate::handshake::{Notification, Service};
use crate::metadata::SegmentHeader;
use crate::registry::{Region, Registrations, Registry};
use crate::telemetry::Counters;
use crate::transport::Transport;

/// Most messages, and most bytes of messages, that are kept for an application that does not take them.
const LETTERS: usize = 1 << 20;
const LETTER_BYTES: usize = 256 << 20;

#[derive(Default)]
struct Letters {
    letters: Vec<Notification>,
    bytes: usize,
}

/// Answers the handshake channel.
pub(super) struct Card {
    registry: Arc<Registry>,
    counters: Arc<Counters>,
    /// `None` until a transport is installed.
    header: RwLock<Option<SegmentHeader>>,
    letters: Mutex<Letters>,
    /// Who may answer connection requests.
    acceptors: RwLock<Vec<Weak<dyn Transport>>>,
}

impl Card {
    pub fn new(registry: Arc<Registry>, counters: Arc<Counters>) -> Card {
        Card { registry, counters, header: RwLock::default(), letters: Mutex::default(), acceptors: RwLock::default() }
    }

    /// Has the transport asked when a peer wants to connect.
    pub fn add_acceptor(&self, transport: &Arc<dyn Transport>) {
        self.acceptors.write().push(Arc::downgrade(transport));
    }

    /// Shows peers a descriptor with this header from now on.
    pub fn publish(&self, header: SegmentHeader) {
        *self.header.write() = Some(header);
    }

    /// Keeps a message for the application.
    pub fn receive(&self, notification: Notification) -> Result<()> {
        let size = notification.name.len() + notification.message.len();
        let mut letters = self.letters.lock();
        if letters.letters.len() >= LETTERS || letters.bytes + size > LETTER_BYTES {
            let (count, bytes) = (letters.letters.len(), letters.bytes);
            drop(letters);
            let text = format!(
                "a notification was refused: {count} of {bytes} bytes wait already; take them (getNotifsFromEngine, te_take_notifications)"
            );
            return Err(Error::new(Code::Limit, text));
        }
        letters.bytes += size;
        letters.letters.push(notification);
        self.counters.notifications_received.add(1);
        Ok(())
    }

    /// What peers would be told with this header, once regions have these keys; none where they keep what they have.
    pub fn describe_as(&self, header: &SegmentHeader, keys: &[(Arc<Region>, Registrations)]) -> Vec<Arc<str>> {
        if keys.is_empty() {
            return header.assemble(self.registry.published(&|region, out| header.encode_buffer(region, out)));
        }
        // Not kept by the registry: it may not come to that.
        let mut block = String::new();
        for (region, registrations) in keys {
            if !block.is_empty() {
                block.push(',');
            }
            header.encode_registrations(region, registrations, &mut block);
        }
        header.assemble(vec![block.into()])
    }

    /// What peers are told, but for the time.
    #[cfg(test)]
    pub fn publish_text(&self) -> String {
        let text = self.describe().unwrap_or_default().concat();
        text.split(r#","timestamp""#).next().unwrap_or_default().to_string()
    }

    pub fn take_notifications(&self) -> Vec<Notification> {
        std::mem::take(&mut *self.letters.lock()).letters
    }
}

impl Service for Card {
    fn describe(&self) -> Option<Vec<Arc<str>>> {
        Some(self.describe_as(self.header.read().as_ref()?, &[]))
    }

    fn notify(&self, notification: Notification) -> bool {
        self.receive(notification).is_ok()
    }

    fn connect(&self, request: &serde_json::Value) -> Option<serde_json::Value> {
        let acceptors = self.acceptors.read().clone();
        acceptors.iter().filter_map(Weak::upgrade).find_map(|transport| transport.accept(request))
    }
}
