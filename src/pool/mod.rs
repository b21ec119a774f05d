//! Staging buffers: memory that is registered once and then lent out, for payloads that live too short to be worth a registration.
//!
//! A pool is one arena, mapped here or the caller's, which the engine registers before the first lease and unregisters after the last.
//! `extents` keeps what is free, `ledger` who has what; this module turns units into addresses and options into shares. Which
//! transfers use a lease is the caller's business: it releases with what it knows of them. The engine is such a caller: its puts and gets go
//! through pools by a [`plan`], and are counted here.
//!
//! **A lease is never handed out while late bytes may land in it.** Whoever releases it says that no transfer uses it, or names the batch that
//! may. Then the lease is quarantined until no task of that batch is running; the thread that ends the last one frees it.
//!
//! **Neither direction starves the other**: each has a reserve that the other cannot take from, in bytes and in leases. See `ledger`.
//!
//! The arena stays mapped until nobody has the pool any more: the engine gives it up only when it moves no byte of it.
//!
//! Who locks what: the ledger's one lock, for some steps of book-keeping; under no lock anything is copied, registered or transferred.
//! Cost of acquiring and of releasing without a wait: the lock and four steps in ordered maps, no system call.

pub mod choice;
pub mod copy;
mod extents;
mod ledger;
pub mod plan;
#[cfg(all(test, not(loom)))]
mod tests;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use self::choice::Choice;
use self::extents::Extent;
pub use self::ledger::Direction;
use self::ledger::{Grant, Ledger, MOST_LEASES, Refusal, Share};
use crate::error::{Code, Error, Result};
use crate::sys::MemoryRange;
use crate::sys::arena::Arena;
use crate::sys::pages;
use crate::telemetry::Counter;
use crate::transfer::Batch;

/// How a pool is made. `None` is the default.
#[derive(Clone, Debug, Default)]
pub struct PoolOptions {
    /// The caller's memory, to be used instead of memory that is mapped for the pool. It is the pool's until that is closed.
    pub arena: Option<MemoryRange>,
    /// Bytes of the arena to be mapped: 64 MiB by default.
    pub bytes: Option<u64>,
    /// `*`, or `cpu:N` for a NUMA node.
    pub location: Option<Arc<str>>,
    /// How many put and get at a time, from which the other defaults follow: 4.
    pub workers: Option<NonZeroU32>,
    /// A power of two up to 4096: 256.
    pub alignment: Option<u64>,
    /// Bytes of the largest lease: an equal share of half of the arena for each worker.
    pub largest_lease: Option<u64>,
    /// Most leases at a time: 1024.
    pub most_leases: Option<u32>,
    /// Bytes that only puts may have; by default as many as the largest lease has by default, if the common part stays as large as the largest lease.
    pub put_reserve: Option<u64>,
    /// The same for gets.
    pub get_reserve: Option<u64>,
    /// What puts and gets do when there is no room.
    pub fallback: Fallback,
}

/// What puts and gets do with payloads for which a pool has no room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fallback {
    /// They register their memory, and transfer from there.
    #[default]
    Register,
    /// They wait until there is.
    Wait,
    /// They give them up.
    Fail,
}

const DEFAULT_BYTES: u64 = 64 << 20;
const DEFAULT_WORKERS: u64 = 4;
const DEFAULT_ALIGNMENT: u64 = 256;
const DEFAULT_LEASES: u32 = 1024;
const LARGEST_ALIGNMENT: u64 = 4096;

/// Memory that was lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Its number, which no other lease ever has.
    pub id: u64,
    /// Its bytes, as many as were asked for.
    pub memory: MemoryRange,
}

/// What the transfers are doing that used a lease.
#[derive(Clone)]
pub enum Outcome {
    /// None uses it any more.
    Over,
    /// Those of a batch may.
    Unknown(Arc<Batch>),
}

/// What a pool is, has, and has done. Bytes of leases are rounded up to the alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolStatistics {
    /// The arena.
    pub arena: MemoryRange,
    /// Bytes of the pages that it was mapped with; 0 for the caller's.
    pub page: u64,
    /// See [`PoolOptions::alignment`].
    pub alignment: u64,
    /// See [`PoolOptions::largest_lease`].
    pub largest_lease: u64,
    /// See [`PoolOptions::put_reserve`].
    pub put_reserve: u64,
    /// See [`PoolOptions::get_reserve`].
    pub get_reserve: u64,
    /// Leases that are out or quarantined.
    pub leases: u64,
    /// Their bytes.
    pub leased_bytes: u64,
    /// The most bytes that were leased at a time.
    pub most_leased_bytes: u64,
    /// Leases that are quarantined.
    pub quarantined: u64,
    /// Threads that wait for a lease.
    pub waiting: u64,
    /// Bytes of the longest free extent.
    pub longest_free: u64,
    /// Leases that were granted.
    pub acquired: u64,
    /// Acquires that had to wait.
    pub waited: u64,
    /// Acquires that found no room within their time.
    pub refused: u64,
    /// Leases that were ever quarantined.
    pub ever_quarantined: u64,
    /// Calls that put.
    pub puts: u64,
    /// Calls that get.
    pub gets: u64,
    /// Items of puts and gets that were in registered memory.
    pub items_zero_copy: u64,
    /// Items whose memory was registered for the call, or needed no registration.
    pub items_direct: u64,
    /// Items that went through a lease.
    pub items_staged: u64,
    /// Their bytes.
    pub bytes_staged: u64,
    /// Ranges that puts and gets have registered.
    pub registrations: u64,
    /// Groups of items that were not staged because there was no room.
    pub fallbacks: u64,
    /// Items, or parts of them, that were transferred once more, each time.
    pub retried: u64,
}

/// What puts and gets have counted. See [`PoolStatistics`].
#[derive(Debug, Default)]
pub struct Usage {
    /// See [`PoolStatistics::puts`].
    pub puts: Counter,
    /// See [`PoolStatistics::gets`].
    pub gets: Counter,
    /// See [`PoolStatistics::items_zero_copy`].
    pub items_zero_copy: Counter,
    /// See [`PoolStatistics::items_direct`].
    pub items_direct: Counter,
    /// See [`PoolStatistics::items_staged`].
    pub items_staged: Counter,
    /// See [`PoolStatistics::bytes_staged`].
    pub bytes_staged: Counter,
    /// See [`PoolStatistics::registrations`].
    pub registrations: Counter,
    /// See [`PoolStatistics::fallbacks`].
    pub fallbacks: Counter,
    /// See [`PoolStatistics::retried`].
    pub retried: Counter,
}

/// A put or get that is inside a pool, which is not closed meanwhile unless its engine is destroyed.
pub struct Call<'a>(&'a Pool);

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.0.ledger.leave();
    }
}

enum Memory {
    Mapped(Arena),
    Given(MemoryRange),
}

/// A pool. Any thread may call anything at any time.
pub struct Pool {
    memory: Memory,
    location: Arc<str>,
    layout: Layout,
    ledger: Arc<Ledger>,
    fallback: Fallback,
    usage: Usage,
    has_warned: AtomicBool,
    choice: Choice,
}

impl Pool {
    /// Checks the options and maps the arena, which is not registered yet.
    ///
    /// Errors: InvalidArgument for options out of range or that contradict each other, DeviceNotFound where there is no such NUMA node,
    /// Memory when the arena cannot be mapped.
    pub fn new(options: &PoolOptions) -> Result<Pool> {
        let location = options.location.clone().unwrap_or_else(|| "*".into());
        let node = read_node(&location)?;
        let bytes = match options.arena {
            Some(arena) => arena.length(),
            None => options.bytes.unwrap_or(DEFAULT_BYTES),
        };
        let layout = Layout::new(options, bytes)?;
        let memory = match options.arena {
            Some(arena) if !arena.address().is_multiple_of(layout.alignment) => {
                let text =
                    format!("the arena begins at {:#x}, which is not aligned to {} bytes", arena.address(), layout.alignment);
                return Err(invalid(text));
            }
            Some(arena) => Memory::Given(arena),
            None => Memory::Mapped(Arena::map(bytes, node).map_err(|error| map_error(error, bytes, &location))?),
        };
        let ledger = Arc::new(Ledger::new(layout.shares));
        let (fallback, usage, has_warned) = (options.fallback, Usage::default(), AtomicBool::new(false));
        Ok(Pool { memory, location, layout, ledger, fallback, usage, has_warned, choice: Choice::new() })
    }

    /// Begins a put or get. Errors: Canceled if the pool is being closed; InvalidHandle if it is closed.
    pub fn begin_call(&self) -> Result<Call<'_>> {
        self.ledger.enter().map_err(|refusal| self.error(refusal, 0))?;
        Ok(Call(self))
    }

    /// Sleeps for so long, or until the engine is destroyed.
    pub fn pause(&self, limit: Duration) {
        self.ledger.pause(limit);
    }

    /// See [`PoolOptions::fallback`].
    pub fn fallback(&self) -> Fallback {
        self.fallback
    }

    /// See [`PoolOptions::largest_lease`].
    pub fn largest_lease(&self) -> u64 {
        self.layout.largest_lease
    }

    /// What puts and gets have learned of the ways that there are.
    pub fn choice(&self) -> &Choice {
        &self.choice
    }

    /// Where puts and gets count.
    pub fn usage(&self) -> &Usage {
        &self.usage
    }

    /// A group of items is not staged because of this refusal. It is logged once in the life of the pool.
    #[cold]
    pub fn fall_back(&self, refusal: &Error) {
        self.usage.fallbacks.add(1);
        if !self.has_warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "{}. Memory of puts and gets is registered instead when that happens, which takes longer; it is not said again",
                refusal.message()
            );
        }
    }

    /// The memory that is to be registered.
    pub fn arena(&self) -> MemoryRange {
        match &self.memory {
            Memory::Mapped(arena) => arena.range(),
            Memory::Given(range) => *range,
        }
    }

    /// Where it is, for transports to choose NICs by.
    pub fn location(&self) -> &Arc<str> {
        &self.location
    }

    /// Lends `bytes`, waiting for up to `limit` (`None`: for as long as it takes) while there is no room. First come, first served.
    ///
    /// Errors: InvalidArgument for no bytes, or more than the largest lease; Timeout if there was no room within the time; Canceled if the
    /// pool is being closed; InvalidHandle if it is closed.
    pub fn acquire(&self, direction: Direction, bytes: u64, limit: Option<Duration>) -> Result<Lease> {
        if bytes == 0 || bytes > self.layout.largest_lease {
            let largest = self.layout.largest_lease;
            return Err(invalid(format!("a lease of {bytes} bytes was asked for; this pool lends 1 to {largest} bytes")));
        }
        // A unit is at least a byte, and the largest lease has fewer than 2^32.
        let units = bytes.div_ceil(self.layout.alignment) as u32;
        let Grant { id, extent } = self.ledger.acquire(direction, units, limit).map_err(|refusal| self.error(refusal, bytes))?;
        let memory = self.arena().part(u64::from(extent.start) * self.layout.alignment, bytes);
        // It lies inside by the layout.
        let memory = memory.ok_or_else(|| Error::new(Code::Internal, format!("the lease {extent:?} is outside of its arena")))?;
        Ok(Lease { id, memory })
    }

    /// Takes a lease back. Where the outcome is unknown it stays out of use until no task of the batch is running.
    ///
    /// Errors: InvalidHandle if no such lease is out: it was released, or is another pool's. On an error nothing has changed.
    pub fn release(&self, id: u64, outcome: Outcome) -> Result<()> {
        let released = match outcome {
            Outcome::Unknown(batch) if !batch.is_finished() => self.ledger.quarantine(id).map(|()| {
                let ledger = self.ledger.clone();
                batch.when_finished(move || ledger.end_quarantine(id));
            }),
            _ => self.ledger.release(id),
        };
        released.map_err(|refusal| self.error(refusal, id))
    }

    /// Closes the pool when all leases are back, waiting for up to `limit` (`None`: for as long as it takes). Meanwhile none is lent.
    ///
    /// Errors: BatchBusy if some are out or quarantined, or a put or get is inside; the pool is as before. InvalidHandle if it is closed.
    pub fn close(&self, limit: Option<Duration>) -> Result<()> {
        self.ledger.close(limit).map_err(|refusal| self.error(refusal, 0))
    }

    /// Undoes a [`Pool::close`] when the arena could not be unregistered.
    pub fn reopen(&self) {
        self.ledger.reopen();
    }

    /// Closes the pool whatever is out, when the engine moves no byte any more. Leases become invalid, those who wait for one are refused.
    pub fn invalidate(&self) {
        self.ledger.invalidate();
    }

    /// Gives the kernel back the pages of what is free, which no device may have registered. How many bytes that were; none of the caller's memory.
    pub fn trim(&self) -> u64 {
        let Memory::Mapped(arena) = &self.memory else { return 0 };
        let mut given_back = 0;
        let alignment = self.layout.alignment;
        self.ledger.visit_free(|Extent { start, units }| {
            let part = arena.range().part(u64::from(start) * alignment, u64::from(units) * alignment);
            given_back += part.map_or(0, |part| arena.give_back(part));
        });
        given_back
    }

    /// What it is, has, and has done.
    pub fn statistics(&self) -> PoolStatistics {
        let (layout, figures) = (&self.layout, self.ledger.figures());
        let (bytes, usage) = (|units: u64| units * layout.alignment, &self.usage);
        let [_, put, get] = layout.shares;
        PoolStatistics {
            arena: self.arena(),
            page: match &self.memory {
                Memory::Mapped(arena) => arena.page(),
                Memory::Given(_) => 0,
            },
            alignment: layout.alignment,
            largest_lease: layout.largest_lease,
            put_reserve: bytes(put.units.into()),
            get_reserve: bytes(get.units.into()),
            leases: figures.leases,
            leased_bytes: bytes(figures.leased),
            most_leased_bytes: bytes(figures.most_leased),
            quarantined: figures.quarantined,
            waiting: figures.waiting,
            longest_free: bytes(figures.longest_free).min(layout.largest_lease),
            acquired: figures.acquired,
            waited: figures.waited,
            refused: figures.refused,
            ever_quarantined: figures.ever_quarantined,
            puts: usage.puts.get(),
            gets: usage.gets.get(),
            items_zero_copy: usage.items_zero_copy.get(),
            items_direct: usage.items_direct.get(),
            items_staged: usage.items_staged.get(),
            bytes_staged: usage.bytes_staged.get(),
            registrations: usage.registrations.get(),
            fallbacks: usage.fallbacks.get(),
            retried: usage.retried.get(),
        }
    }

    /// The error of a refusal; `subject` is the bytes that were asked for, or the lease. Not logged: that there is no room is an answer.
    #[cold]
    fn error(&self, refusal: Refusal, subject: u64) -> Error {
        match refusal {
            Refusal::Exhausted => {
                let PoolStatistics { leases, leased_bytes, quarantined, longest_free, .. } = self.statistics();
                let text = format!(
                    "the pool has no room for a lease of {subject} bytes now: leases out: {leases}, of {leased_bytes} bytes, quarantined: \
                     {quarantined}. The longest that is free has {longest_free}, which may be kept for the other direction or for those who \
                     wait already; release some, wait longer, or make a larger pool"
                );
                Error::quiet(Code::Timeout, text)
            }
            Refusal::Closing => Error::quiet(Code::Canceled, "the pool is being closed"),
            Refusal::Closed => Error::quiet(Code::InvalidHandle, "the pool was closed, or its engine destroyed"),
            Refusal::Unknown => {
                let text = format!("no lease {subject:#x} is out of this pool: it was released, or is another pool's");
                Error::new(Code::InvalidHandle, text)
            }
            Refusal::Quarantined => {
                let text = format!("lease {subject:#x} was released already, and is quarantined until its batch is over");
                Error::new(Code::InvalidHandle, text)
            }
            Refusal::Busy { leases, quarantined, calls } => {
                let text = format!(
                    "leases of the pool are out: {leases}, of them quarantined until their batches are over: {quarantined}; puts and gets that \
                     have not returned: {calls}; release them, or wait for them, first"
                );
                Error::quiet(Code::BatchBusy, text)
            }
        }
    }
}

/// How an arena is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layout {
    alignment: u64,
    largest_lease: u64,
    /// Of the common part, of puts, of gets.
    shares: [Share; 3],
}

impl Layout {
    fn new(options: &PoolOptions, bytes: u64) -> Result<Layout> {
        let alignment = options.alignment.unwrap_or(DEFAULT_ALIGNMENT);
        if !alignment.is_power_of_two() || alignment > LARGEST_ALIGNMENT {
            return Err(invalid(format!("the alignment is {alignment}; it must be a power of two up to {LARGEST_ALIGNMENT}")));
        }
        let units = bytes / alignment;
        if units == 0 || units > u64::from(u32::MAX) {
            let most = alignment.saturating_mul(u32::MAX.into());
            return Err(invalid(format!(
                "an arena of {bytes} bytes with an alignment of {alignment}; it takes {alignment} to {most} bytes"
            )));
        }
        let workers = options.workers.map_or(DEFAULT_WORKERS, |workers| workers.get().into());
        let share = (units / workers.saturating_mul(2)).max(1);
        let largest = match options.largest_lease {
            None => share,
            Some(largest) if largest.div_ceil(alignment) <= units && largest > 0 => largest.div_ceil(alignment),
            Some(largest) => return Err(invalid(format!("a largest lease of {largest} bytes, in an arena of {bytes} bytes"))),
        };
        let leases = options.most_leases.unwrap_or(DEFAULT_LEASES);
        if !(1..=MOST_LEASES).contains(&leases) {
            return Err(invalid(format!("at most {leases} leases at a time; it must be 1 to {MOST_LEASES}")));
        }
        // What is asked for is kept; what is not takes from the common part only as much as leaves room there for a largest lease.
        let asked = [options.put_reserve, options.get_reserve].map(|asked| asked.map(|bytes| bytes.div_ceil(alignment)));
        let spare = units
            .saturating_sub(largest)
            .saturating_sub(asked.iter().flatten().fold(0_u64, |sum, units| sum.saturating_add(*units)));
        let default =
            if leases < 3 { 0 } else { share.min(spare / asked.iter().filter(|asked| asked.is_none()).count().max(1) as u64) };
        let [put, get] = asked.map(|asked| asked.unwrap_or(default));
        let common = units.saturating_sub(put).saturating_sub(get);
        if common < largest {
            return Err(invalid(format!(
                "reserves of {} and {} bytes leave {} of {bytes} bytes; the largest lease of {} bytes must fit there, too",
                put.saturating_mul(alignment),
                get.saturating_mul(alignment),
                common * alignment,
                largest * alignment
            )));
        }
        let reserved_leases = |reserve: u64| match reserve {
            0 => 0,
            reserve => ((u128::from(leases) * u128::from(reserve) / u128::from(units)) as u32).max(1),
        };
        let (put_leases, get_leases) = (reserved_leases(put), reserved_leases(get));
        if put_leases + get_leases >= leases {
            return Err(invalid(format!(
                "{leases} leases at a time are too few for a reserve for each direction and a common part"
            )));
        }
        let share = |units: u64, leases| Share { units: units as u32, leases };
        let largest_lease = match options.largest_lease {
            Some(largest) => largest,
            None => largest * alignment,
        };
        let shares = [share(common, leases - put_leases - get_leases), share(put, put_leases), share(get, get_leases)];
        Ok(Layout { alignment, largest_lease, shares })
    }
}

fn read_node(location: &str) -> Result<Option<u32>> {
    let node = location.strip_prefix("cpu:").and_then(|node| node.parse().ok());
    match node {
        None if location != "*" => Err(invalid(format!(
            "a pool at '{}': it must be in memory of the host, at \"cpu:N\" or \"*\"; memory of a device is not staged",
            location.escape_debug()
        ))),
        node => Ok(node),
    }
}

fn map_error(error: std::io::Error, bytes: u64, location: &str) -> Error {
    match error.raw_os_error() {
        Some(libc::EINVAL) => Error::new(Code::DeviceNotFound, format!("there is no NUMA node '{location}' for a pool: {error}")),
        _ => {
            let page = pages::page_size();
            Error::new(Code::Memory, format!("cannot map {bytes} bytes for a pool, in pages of {page} bytes or larger: {error}"))
        }
    }
}

fn invalid(text: String) -> Error {
    Error::new(Code::InvalidArgument, text)
}
