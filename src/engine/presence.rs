//! What an engine keeps of itself on a metadata server: where its handshake channel is, and its segment's descriptor.
//!
//! Both are written under the engine's name, which is the caller's. Whoever wrote last has the name: an engine that finds another
//! one's address under its own key says so once, and writes nothing more for as long as that is so and somebody listens there. A server
//! that was set back to an earlier state names an engine of before, which is gone.
//!
//! Servers lose what they had, and are away for a while. So the address is looked at every [`CHECK_INTERVAL`]; if it is gone the server was
//! wiped, and both texts are written again, the address first: if the server is wiped in between, the next look finds that. The descriptor,
//! which may be megabytes, is looked at every [`DESCRIPTOR_CHECKS`]th time only, and that many times after a write has failed: a server
//! that was slow may carry it out after a later one, and one that was away may have come back with what it had long ago. What could
//! not be published is tried again at each look.
//!
//! The [`Publisher`] has one write of the descriptor under way at a time; `written` changes in its turn only, and is locked for that
//! moment. `checking` is held by the one thread that looks. No lock is held during a call to the server but `checking`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tracing::dispatcher::{self, Dispatch};

use super::card::Card;
use super::directory::{Directory, location_text, parse_location};
use crate::error::{Code, Error, Result};
use crate::handshake::address::HostPort;
use crate::handshake::{Client, Service};
use crate::metadata::publisher::Publisher;
use crate::metadata::{excerpt, store};

/// How often the server is asked whether it still knows the engine. With a call that lasts as long as it may, five seconds at most pass.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// One of so many looks is at the descriptor, too.
const DESCRIPTOR_CHECKS: u32 = 15;

type Text = Vec<Arc<str>>;

/// What the server has of the descriptor.
#[derive(Default)]
enum Written {
    /// Nothing of ours.
    #[default]
    Nothing,
    /// Some text of ours, or nothing: a write failed, or the server has lost it.
    Unknown,
    This(Text),
}

/// See the module.
pub(super) struct Presence {
    directory: Arc<Directory>,
    name: String,
    location: HostPort,
    card: Arc<Card>,
    publisher: Publisher,
    written: Mutex<Written>,
    /// Where the engine is that has taken the name.
    successor: Mutex<Option<HostPort>>,
    /// How many of the next looks are at the descriptor, too, since a call has failed.
    doubts: AtomicU32,
    checking: Mutex<Checking>,
}

#[derive(Default)]
struct Checking {
    count: u32,
    is_away: bool,
    is_over: bool,
}

impl Presence {
    /// Of an engine with this name, whose handshake channel is at `location`. Nothing is written yet.
    pub fn new(directory: Arc<Directory>, name: &str, location: HostPort, card: Arc<Card>) -> Presence {
        Presence {
            directory,
            name: name.into(),
            location,
            card,
            publisher: Publisher::default(),
            written: Mutex::default(),
            successor: Mutex::default(),
            doubts: AtomicU32::new(0),
            checking: Mutex::default(),
        }
    }

    /// Writes where the handshake channel is, whatever is there.
    pub fn announce(&self) -> Result<()> {
        self.directory.store.put(&self.directory.keys.rpc(&self.name), &[location_text(&self.location).into()])
    }

    /// Returns when a write of the descriptor that began after this call has ended, with its outcome; a descriptor that the server has
    /// already is not written. Waiting for another's write and writing end within five seconds together.
    /// Errors: Metadata; Canceled when the engine is destroyed meanwhile.
    pub fn publish(&self) -> Result<()> {
        store::bounded(|| self.publisher.publish(|| self.write_present()))
    }

    /// How many wait for a write that has not begun.
    #[cfg(test)]
    pub fn waiting(&self) -> usize {
        self.publisher.waiting()
    }

    /// Has the descriptor published soon.
    pub fn touch(&self) {
        self.publisher.touch();
    }

    /// Runs `install` while nothing else is published: it writes a text with [`Presence::write`], and makes the card say the same.
    pub fn install(&self, install: impl FnOnce() -> Result<()>) -> Result<()> {
        self.publisher.alone(install)
    }

    /// Writes a descriptor. In the publisher's turn.
    pub fn write(&self, text: Text) -> Result<()> {
        if let Some(successor) = &*self.successor.lock() {
            let text = format!(
                "'{}' is the name of another engine now, at {successor}, so peers do not find this one; give each engine a name of its own",
                excerpt(&self.name)
            );
            return Err(Error::quiet(Code::Metadata, text));
        }
        if matches!(&*self.written.lock(), Written::This(written) if says_the_same(written, &text)) {
            return Ok(());
        }
        *self.written.lock() = Written::Unknown;
        self.directory
            .store
            .put(&self.directory.keys.segment(&self.name), &text)
            .inspect_err(|_| self.doubts.store(DESCRIPTOR_CHECKS, Ordering::Relaxed))?;
        *self.written.lock() = Written::This(text);
        Ok(())
    }

    /// Writes what peers are to be told now. In the publisher's turn.
    fn write_present(&self) -> Result<()> {
        match self.card.describe() {
            Some(text) => self.write(text),
            None => {
                // Without a transport there is nothing to tell; what was written when installing one failed is not true.
                if !matches!(&*self.written.lock(), Written::Nothing) {
                    self.directory.store.remove(&self.directory.keys.segment(&self.name))?;
                    *self.written.lock() = Written::Nothing;
                }
                Ok(())
            }
        }
    }

    /// Finds out whether the server has what it should, and writes what it has not. Failures are logged when an outage begins, and the end
    /// of it when it ends. `client` asks whoever has the name.
    pub fn check(&self, client: &Client) {
        let mut checking = self.checking.lock();
        if checking.is_over {
            return;
        }
        checking.count = checking.count.wrapping_add(1);
        let outcome = self.repair(checking.count.is_multiple_of(DESCRIPTOR_CHECKS), checking.is_away, client);
        if outcome.is_err() {
            self.doubts.store(DESCRIPTOR_CHECKS, Ordering::Relaxed);
        }
        match (checking.is_away, outcome) {
            (false, Err(error)) if error.code() != Code::Canceled => {
                tracing::warn!(
                    "'{}' cannot be kept on the metadata server now; it is tried again every {CHECK_INTERVAL:?}",
                    excerpt(&self.name)
                );
                checking.is_away = true;
            }
            (true, Ok(())) => {
                // As loud as the begin.
                tracing::warn!("the metadata server of '{}' is back", excerpt(&self.name));
                checking.is_away = false;
            }
            _ => {}
        }
    }

    /// `is_away`: it is known that the server is.
    fn repair(&self, with_descriptor: bool, is_away: bool, client: &Client) -> Result<()> {
        let stored = ask(is_away, || self.directory.store.get(&self.directory.keys.rpc(&self.name)))?;
        let fault = match stored.as_deref().map(parse_location) {
            Some(Some(location)) if location == self.location => None,
            Some(Some(location)) if self.is_taken(&location, client)? => return Ok(()),
            Some(Some(_)) => Some("has an address where nobody is in place of"),
            Some(None) => Some("has nonsense in place of"),
            None => Some("no longer has"),
        };
        if let Some(fault) = fault {
            tracing::warn!("the metadata server {fault} the address of '{}'; it is written again", excerpt(&self.name));
            ask(is_away, || self.announce())?;
        }
        *self.successor.lock() = None;
        if fault.is_some() {
            self.publisher.alone(|| {
                self.forget_written();
                Ok(())
            })?;
        }
        let doubts = self.doubts.load(Ordering::Relaxed);
        if with_descriptor || doubts > 0 {
            let _ = self.doubts.compare_exchange(doubts, doubts.saturating_sub(1), Ordering::Relaxed, Ordering::Relaxed);
            self.publisher.alone(|| self.compare(is_away))?;
        }
        match self.publisher.is_dirty() {
            true => ask(is_away, || self.publish()),
            false => Ok(()),
        }
    }

    /// Whether the name is that of an engine at `location` now. At first sight it is: it may not listen yet.
    fn is_taken(&self, location: &HostPort, client: &Client) -> Result<bool> {
        if self.successor.lock().as_ref() == Some(location) {
            // That nobody is there is logged by the look that finds it.
            return match ask(true, || client.reach(location)) {
                Err(error) if error.code() == Code::Canceled => Err(error),
                Err(error) => Ok(error.code() != Code::Socket),
                Ok(()) => Ok(true),
            };
        }
        tracing::warn!(
            "'{}' is the name of another engine now, at {location}: this one, at {}, is not found by it any more; give each engine a \
             name of its own",
            excerpt(&self.name),
            self.location
        );
        *self.successor.lock() = Some(location.clone());
        Ok(true)
    }

    fn forget_written(&self) {
        let mut written = self.written.lock();
        if !matches!(*written, Written::Nothing) {
            *written = Written::Unknown;
            self.publisher.touch();
        }
    }

    /// Looks whether the server has the descriptor that was written. In the publisher's turn.
    fn compare(&self, is_away: bool) -> Result<()> {
        if !matches!(&*self.written.lock(), Written::This(_)) {
            return Ok(());
        }
        let stored = ask(is_away, || self.directory.store.get(&self.directory.keys.segment(&self.name)))?;
        let is_there = matches!((&*self.written.lock(), stored), (Written::This(text), Some(stored)) if is_text(text, &stored));
        if !is_there {
            tracing::warn!(
                "the metadata server has lost the descriptor of '{}', or has another; it is written again",
                excerpt(&self.name)
            );
            self.forget_written();
        }
        Ok(())
    }

    /// Publishes nothing more: who waits is turned away, and what is under way is waited for.
    pub fn close(&self) {
        self.publisher.close();
    }

    /// Once it is closed: removes from the server what is this engine's there. Blocks for five seconds at most, and before that for
    /// what is under way.
    pub fn withdraw(&self) {
        self.checking.lock().is_over = true;
        if store::bounded(|| self.remove()).is_err() {
            tracing::warn!(
                "what the metadata server has of '{}' stays there; it is replaced when an engine of that name comes",
                excerpt(&self.name)
            );
        }
    }

    fn remove(&self) -> Result<()> {
        let Directory { store, keys, .. } = &*self.directory;
        let rpc = keys.rpc(&self.name);
        match store.get(&rpc)?.as_deref().and_then(parse_location) {
            Some(location) if location != self.location => {
                tracing::info!("'{}' stays on the metadata server: it is the name of an engine at {location}", excerpt(&self.name));
                return Ok(());
            }
            Some(_) => store.remove(&rpc)?,
            None => {}
        }
        let segment = keys.segment(&self.name);
        let written = std::mem::take(&mut *self.written.lock());
        let is_ours = match written {
            Written::Nothing => false,
            Written::Unknown => true,
            Written::This(text) => store.get(&segment)?.is_some_and(|stored| is_text(&text, &stored)),
        };
        if is_ours { store.remove(&segment) } else { Ok(()) }
    }
}

/// Asks a server, or a peer. Errors are logged where they are made, each time; in an outage once is enough.
fn ask<T>(is_quiet: bool, call: impl FnOnce() -> Result<T>) -> Result<T> {
    match is_quiet {
        true => dispatcher::with_default(&Dispatch::none(), call),
        false => call(),
    }
}

/// Whether two descriptors differ in nothing but the time. O(blocks): what has not changed is the very same text.
fn says_the_same(one: &[Arc<str>], other: &[Arc<str>]) -> bool {
    let timeless = |text: &Arc<str>| text.split(r#","timestamp":""#).next().map(str::len);
    let (Some((one_tail, one)), Some((other_tail, other))) = (one.split_last(), other.split_last()) else { return false };
    one.len() == other.len()
        && one.iter().zip(other).all(|(one, other)| Arc::ptr_eq(one, other) || one == other)
        && timeless(one_tail) == timeless(other_tail)
        && timeless(one_tail).is_some_and(|length| one_tail[..length] == other_tail[..length])
}

/// Whether `stored` is the text in pieces, but for space around it.
fn is_text(text: &[Arc<str>], stored: &str) -> bool {
    let mut rest = stored.trim();
    let last = text.len().saturating_sub(1);
    text.iter().enumerate().all(|(at, piece)| {
        let piece = if at == last { piece.trim_end() } else { &**piece };
        rest.strip_prefix(piece).map(|after| rest = after).is_some()
    }) && rest.is_empty()
}
