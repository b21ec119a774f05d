//! A NIC that cannot be used, and how it comes back.
//!
//! A NIC is given up while its port is down, and when what was opened of it is broken: the device or a completion queue has failed, or
//! opening has. Its work goes to other NICs, and peers are told. Events of the port, and a clock, have it looked at again. A *revival* runs
//! on a background thread: what is broken is closed and opened anew, once its queue pairs are gone; all registered memory is made known
//! to it; then it is active, and peers are told of it and of its keys, in that order, so that nobody uses a key that there is not yet.
//!
//! [`Outage`] says where a NIC stands. Its lock is taken alone. Outages are counted: a revival that another outage has overtaken
//! does not activate anything, nor does one that has looked at the port before it changed. A NIC that fails again soon is tried after
//! longer and longer pauses.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Shared;
use super::nic::LocalNic;
use crate::error::{Code, Error, Result};
use crate::transport::Device;

/// How long a NIC is left alone first, and how long at most. One that was active for the latter counts as sound.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Whether a NIC can be used; see the module.
pub(super) struct Outage {
    is_over: AtomicBool,
    state: Mutex<State>,
}

struct State {
    /// How many outages there were.
    count: u64,
    /// Whether what is open has to be closed and opened anew; so it is before anything is.
    is_broken: bool,
    is_reviving: bool,
    /// Whether something has changed that no revival has seen, so that one is worth a try at once.
    has_news: bool,
    next_try: Instant,
    pause: Duration,
    /// When the last outage was over.
    ended: Option<Instant>,
    /// What was logged of the last try.
    logged: String,
}

impl Default for Outage {
    /// An outage from the beginning.
    fn default() -> Outage {
        Outage {
            is_over: AtomicBool::new(false),
            state: Mutex::new(State {
                count: 0,
                is_broken: true,
                is_reviving: false,
                has_news: false,
                next_try: Instant::now() + FIRST_PAUSE,
                pause: FIRST_PAUSE,
                ended: None,
                logged: String::new(),
            }),
        }
    }
}

impl Outage {
    /// Whether the NIC can be used.
    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Whether what is open, if anything is, is of no use any more.
    pub fn is_broken(&self) -> bool {
        self.state.lock().is_broken
    }

    /// The NIC cannot be used. False if that was known.
    fn begin(&self, is_broken: bool) -> bool {
        let now = Instant::now();
        let mut state = self.state.lock();
        let was_active = self.is_over.swap(false, Ordering::AcqRel);
        let is_news = was_active || (is_broken && !state.is_broken);
        if is_news {
            state.count += 1;
            state.is_broken |= is_broken;
            let is_sound = state.ended.is_none_or(|ended| now.saturating_duration_since(ended) >= LONGEST_PAUSE);
            state.pause = if is_sound { FIRST_PAUSE } else { (2 * state.pause).min(LONGEST_PAUSE) };
            state.next_try = now + state.pause;
        } else {
            // Whoever revives it may have found it sound just before.
            state.has_news |= state.is_reviving && !is_broken;
        }
        is_news
    }

    /// Number of the present or last outage.
    pub fn number(&self) -> u64 {
        self.state.lock().count
    }

    /// Something has changed: a revival is worth a try now. False if the NIC can be used: there is nothing to revive.
    pub fn has_news(&self) -> bool {
        let mut state = self.state.lock();
        state.has_news = !self.is_over();
        state.has_news
    }

    /// When a revival is to be tried. `None`: the NIC is active, or is being revived.
    pub fn next_try(&self) -> Option<Instant> {
        if self.is_over() {
            return None;
        }
        let state = self.state.lock();
        (!state.is_reviving).then(|| if state.has_news { Instant::now() } else { state.next_try })
    }

    /// The outage that a revival is to end that begins now.
    fn begin_revival(&self) -> u64 {
        let mut state = self.state.lock();
        (state.is_reviving, state.has_news) = (true, false);
        state.count
    }

    /// What is open is sound. False if another outage has begun meanwhile.
    pub fn mend(&self, number: u64) -> bool {
        let mut state = self.state.lock();
        let is_present = state.count == number;
        state.is_broken &= !is_present;
        is_present
    }

    /// The NIC can be used. False if another outage has begun meanwhile, or something has changed.
    pub fn end(&self, number: u64) -> bool {
        let mut state = self.state.lock();
        let is_present = state.count == number && !state.has_news;
        if is_present {
            self.is_over.store(true, Ordering::Release);
            state.ended = Some(Instant::now());
            state.logged.clear();
        }
        is_present
    }

    /// A revival has ended, for the reason that is given without success. True if that was not the reason the last time.
    fn end_revival(&self, reason: Option<&Error>) -> bool {
        let mut state = self.state.lock();
        state.is_reviving = false;
        let Some(reason) = reason else { return false };
        state.pause = (2 * state.pause).min(LONGEST_PAUSE);
        state.next_try = Instant::now() + state.pause;
        let is_news = state.logged != reason.message();
        if is_news {
            state.logged = reason.message().to_string();
        }
        is_news
    }
}

impl Shared {
    /// The NIC cannot be used: its work goes elsewhere, and peers are told.
    pub(super) fn deactivate(&self, nic: &Arc<LocalNic>, reason: &str, is_broken: bool) {
        if !nic.outage.begin(is_broken) {
            return;
        }
        let error = Error::new(Code::Context, format!("{} is not used any more: {reason}", nic.name()));
        let fallout = nic.retire_all(None, Some(&error));
        self.settle(nic, fallout);
        self.header_changed();
    }

    /// The NIC's port or address has changed, or it was given up: perhaps it can be used again, or cannot any more.
    pub(super) fn readdress(&self, nic: &Arc<LocalNic>) {
        if nic.outage.has_news() {
            return;
        }
        let Some(opened) = nic.opened() else { return };
        match opened.device.refresh_address(&self.machine) {
            Err(error) => self.deactivate(nic, error.message(), false),
            Ok(false) => {}
            Ok(true) => {
                let error = Error::new(Code::Context, format!("{} has another address", nic.name()));
                let fallout = nic.retire_all(None, Some(&error));
                self.settle(nic, fallout);
                self.header_changed();
            }
        }
    }

    /// Has a background thread revive the NIC. On the NIC's thread, which does not use what is broken any more.
    pub(super) fn begin_revival(&self, nic: &Arc<LocalNic>) {
        let outage = nic.outage.begin_revival();
        let (shared, of_job) = (self.this.clone(), nic.clone());
        let job = move || {
            let Some(shared) = shared.upgrade() else { return };
            let outcome = shared.revive(&of_job, outage);
            let name = of_job.name();
            match &outcome {
                Ok(()) => drop(of_job.outage.end_revival(None)),
                Err(error) if of_job.outage.end_revival(Some(error)) => tracing::warn!("{name} cannot be used yet: {error}"),
                Err(error) => tracing::debug!("{name} cannot be used yet: {error}"),
            }
            of_job.wake();
        };
        if self.revivals.run(job).is_err() {
            nic.outage.end_revival(Some(&Error::quiet(Code::Limit, "no thread to revive it on")));
        }
    }

    /// Makes a NIC usable again, if it can be. Errors are not logged.
    fn revive(&self, nic: &Arc<LocalNic>, outage: u64) -> Result<()> {
        let overtaken = || Error::quiet(Code::Context, format!("{} has failed again, or its port has changed", nic.name()));
        if nic.outage.is_broken() {
            nic.close();
            nic.open(&self.machine)?;
            if !nic.outage.mend(outage) {
                return Err(overtaken());
            }
            // Its thread looks for events from now on.
            nic.wake();
        }
        if let Some(opened) = nic.opened() {
            opened.device.refresh_address(&self.machine)?;
        }
        let is_wanted = || self.closing.get().is_none() && nic.outage.number() == outage;
        let attach = || {
            if let Some(observer) = self.observer() {
                observer.attach_memory(nic.index, &**nic, &is_wanted);
            }
        };
        attach();
        if !nic.outage.end(outage) {
            return Err(overtaken());
        }
        // What was registered without it meanwhile.
        attach();
        tracing::info!("{} is used again", nic.name());
        self.header_changed();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One that is over.
    fn sound() -> Outage {
        let outage = Outage::default();
        assert!(outage.mend(0) && outage.end(0));
        outage
    }

    #[test]
    fn a_revival_ends_only_the_outage_that_it_has_seen() {
        let outage = sound();
        assert!(outage.begin(false));
        let number = outage.begin_revival();
        assert!(outage.begin(true), "the device breaks meanwhile");
        assert!(!outage.mend(number) && !outage.end(number) && outage.is_broken());
        outage.end_revival(Some(&Error::quiet(Code::Context, "overtaken")));
        let number = outage.begin_revival();
        assert!(outage.mend(number) && outage.end(number) && outage.is_over());
        outage.end_revival(None);
    }

    #[test]
    fn what_changes_during_a_revival_is_looked_at_before_the_nic_is_used() {
        type Change = fn(&Outage);
        let changes: [(&str, Change); 2] = [
            ("the port goes down once more", |outage| assert!(!outage.begin(false))),
            ("the port has another address", |outage| assert!(outage.has_news())),
        ];
        for (what, change) in changes {
            let outage = sound();
            assert!(outage.begin(false));
            let number = outage.begin_revival();
            change(&outage);
            assert!(!outage.end(number) && !outage.is_over(), "{what}");
            outage.end_revival(Some(&Error::quiet(Code::Context, "overtaken")));
            assert!(outage.next_try().is_some_and(|at| at <= Instant::now()), "{what}: at once");
            let number = outage.begin_revival();
            assert!(outage.end(number), "{what}");
            outage.end_revival(None);
            assert!(!outage.has_news(), "what changes now is the active NIC's affair");
            assert!(outage.begin(false));
            assert!(outage.next_try().is_some_and(|at| at > Instant::now()), "{what}: nothing is left of it");
        }
    }

    #[test]
    fn what_is_broken_still_is_no_news() {
        let outage = sound();
        assert!(outage.begin(true) && !outage.begin(true));
        let number = outage.begin_revival();
        assert!(!outage.begin(true), "its queues cannot be polled yet");
        assert!(outage.mend(number) && outage.end(number));
    }
}
