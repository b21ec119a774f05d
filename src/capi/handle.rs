//! The tables of engines, pools, topologies and stores: what C has in its hands is a key of one of them, never an address.
//!
//! A key looks like a pointer that no process can have (its upper bits are not those of an address), is drawn
//! from a counter that never turns back, and carries the generation of its process. So a stale, foreign or
//! made-up key is found to name nothing, and in a child of `fork()` a key of the parent is recognised without
//! touching a lock: a child starts with empty tables of its own, because threads of the parent may have
//! held the locks of the old ones.
//!
//! What follows is said of engines; it goes for the others as well: pools, which are destroyed by closing them, or with their engine,
//! topologies, and stores.
//!
//! An engine or a topology may have an address of the program as a second key, see [`alias`](super::alias): it is
//! looked for where a handle is no key, and goes with the key. `aliases` of the table of engines is held by whoever
//! changes one.
//!
//! Each call holds a reference to its engine, and is counted by the entry's [`Gate`]. Destroying removes the
//! key, so that new calls find nothing; shuts the engine down, which wakes those that wait inside; and waits
//! until no call is inside but those of its own thread: a callback that is called inside a call may destroy
//! the engine of that call.
//!
//! **After destroying nobody is inside.** Entering and closing are read-modify-writes of the gate's word, so a call
//! that found the key before it was removed is counted before the gate closes, and is waited for, or comes after
//! and is refused. What it did happens before the look that finds it gone.
//!
//! **No wake-up is lost.** Whoever waits looks at the word while it holds the gate's lock, and gives that up only
//! by sleeping. A call that leaves a closed gate passes through the lock after it has been subtracted and before
//! it wakes.
//!
//! **Of several that destroy an engine one does**: whoever removes the key. To the others it names nothing.
//!
//! Locks: a table's lock is held for a look-up or a change only, never during a call. Cost of [`enter`] and
//! the end of a call: some six atomic operations, no system call.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

#[cfg(all(test, loom))]
use loom::sync::{Condvar, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard, atomic::AtomicUsize};
#[cfg(not(all(test, loom)))]
use std::sync::{Condvar, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard, atomic::AtomicUsize};

use crate::capi::alias::ALIASES;
use crate::capi::guard;
use crate::engine::Engine;
use crate::error::{Code, Error, Result};
use crate::metadata::store::Store;
use crate::pool::Pool;
use crate::sys::fork;
use crate::topology::LiveTopology;

/// Makes the engine known under a new key.
pub fn insert(engine: Arc<Engine>) -> Key {
    engines(fork::generation()).insert(engine)
}

/// Begins a call on an engine.
pub fn enter(handle: u64) -> Result<Call<Engine>> {
    let (key, generation) = ENGINE.resolve(handle)?;
    engines(generation).enter(key)
}

/// Ends an engine with its pools, and their keys. Returns when no other thread is inside a call on one of them.
pub fn destroy(handle: u64) -> Result<()> {
    let (key, generation) = ENGINE.resolve(handle)?;
    // Weak, so that no engine that is created meanwhile has its address.
    let mut destroyed = Weak::new();
    engines(generation).destroy(key, |engine| {
        remove_alias(key, generation);
        destroyed = engine.downgrade();
        engine.shutdown();
    })?;
    pools(generation).destroy_all(|pool| Weak::ptr_eq(&pool.engine, &destroyed));
    Ok(())
}

/// Marks an engine for [`take_marked`].
pub fn mark(handle: u64) -> Result<()> {
    enter(handle)?.entry.marked.store(true, Ordering::Relaxed);
    Ok(())
}

/// Takes all marked engines out of the table. Calls that are inside go on.
pub fn take_marked() -> Vec<Arc<Engine>> {
    // Their aliases lead to keys that name nothing from now on.
    engines(fork::generation()).take_marked()
}

/// A pool, and the engine that it belongs to.
pub struct EnginePool {
    engine: Weak<Engine>,
    /// The pool.
    pub pool: Arc<Pool>,
}

impl EnginePool {
    /// The engine, which is not destroyed before the call ends.
    pub fn engine(&self) -> Result<Arc<Engine>> {
        self.engine.upgrade().ok_or_else(|| Error::quiet(Code::InvalidHandle, "the pool's engine was destroyed"))
    }
}

/// Makes a pool of the engine known under a new key.
pub fn insert_pool(engine: Weak<Engine>, pool: Arc<Pool>) -> Key {
    pools(fork::generation()).insert(Arc::new(EnginePool { engine, pool }))
}

/// Begins a call on a pool.
pub fn enter_pool(handle: u64) -> Result<Call<EnginePool>> {
    let (key, generation) = POOL.resolve(handle)?;
    pools(generation).enter(key)
}

/// Closes a pool, and ends its key. Returns when no other thread is inside a call on it.
pub fn close_pool(handle: u64, limit: Option<Duration>) -> Result<()> {
    let (key, generation) = POOL.resolve(handle)?;
    let table = pools(generation);
    let call = table.enter(key)?;
    let EnginePool { pool, .. } = call.target();
    call.target().engine()?.close_pool(pool, limit)?;
    // Whoever destroys the engine may have been faster.
    table.destroy_all(|other| Arc::ptr_eq(&other.pool, pool));
    Ok(())
}

/// Makes a topology known under a new key. Several keys may lead to one.
pub fn insert_topology(topology: Arc<LiveTopology>) -> Key {
    topologies(fork::generation()).insert(topology)
}

/// Begins a call on a topology.
pub fn enter_topology(handle: u64) -> Result<Call<LiveTopology>> {
    let (key, generation) = TOPOLOGY.resolve(handle)?;
    topologies(generation).enter(key)
}

/// Ends a key of a topology. Returns when no other thread is inside a call by it.
pub fn destroy_topology(handle: u64) -> Result<()> {
    let (key, generation) = TOPOLOGY.resolve(handle)?;
    topologies(generation).destroy(key, |_| remove_alias(key, generation))
}

/// Whether the handle is that of a topology, which may be gone.
pub fn is_topology(handle: u64) -> bool {
    TOPOLOGY.key_of(handle) >> TAG_SHIFT == TOPOLOGY.tag
}

/// A metadata server that the program uses itself.
pub type OpenStore = Arc<dyn Store>;

/// Makes a store known under a new key.
pub fn insert_store(store: OpenStore) -> Key {
    stores(fork::generation()).insert(Arc::new(store))
}

/// Begins a call on a store.
pub fn enter_store(handle: u64) -> Result<Call<OpenStore>> {
    let (key, generation) = STORE.resolve(handle)?;
    stores(generation).enter(key)
}

/// Ends the key of a store. Returns when no other thread is inside a call on it.
pub fn close_store(handle: u64) -> Result<()> {
    let (key, generation) = STORE.resolve(handle)?;
    stores(generation).destroy(key, |_| ())
}

/// Has the address stand for an engine until that is destroyed, in place of what it stood for, and in place of an earlier address of the
/// engine. NULL takes the engine's away.
pub fn set_engine_alias(handle: u64, address: u64) -> Result<()> {
    let (key, generation) = ENGINE.resolve(handle)?;
    let table = engines(generation);
    set_alias(key, address, generation, |key| table.has(key).then_some(()).ok_or_else(|| table.nothing(key)))
}

/// The same for a topology, to which an engine's address is refused.
pub fn set_topology_alias(handle: u64, address: u64) -> Result<()> {
    let (key, generation) = TOPOLOGY.resolve(handle)?;
    let table = topologies(generation);
    set_alias(key, address, generation, |key| {
        if !table.has(key) {
            return Err(table.nothing(key));
        }
        match ALIASES.find(address) {
            Some(other) if engines(generation).has(other) => {
                Err(guard::invalid(format!("address {address:#x} stands for an engine, which a topology cannot replace")))
            }
            _ => Ok(()),
        }
    })
}

/// `check`, with the lock, whether the key may have it: an entry is taken out of its table before its alias is taken away.
fn set_alias(key: u64, address: u64, generation: u32, check: impl FnOnce(u64) -> Result<()>) -> Result<()> {
    if KINDS.iter().any(|kind| address >> TAG_SHIFT == kind.tag) {
        return Err(guard::invalid(format!("{address:#x} is no address of this process: it is a handle")));
    }
    let _writing = engines(generation).aliases.lock().unwrap_or_else(PoisonError::into_inner);
    check(key)?;
    match address {
        0 => {
            ALIASES.remove(key);
            Ok(())
        }
        address => ALIASES.set(address, key),
    }
}

fn remove_alias(key: u64, generation: u32) {
    let _writing = engines(generation).aliases.lock().unwrap_or_else(PoisonError::into_inner);
    ALIASES.remove(key);
}

/// A pointer that stands for an installed transport: never NULL, the same for the same protocol, and not to
/// be dereferenced.
pub fn transport_key(protocol: &str) -> *mut c_void {
    let hash =
        protocol.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    ((TRANSPORT_TAG << TAG_SHIFT) | (hash >> 8)) as *mut c_void
}

/// What keys stand for. The tag is their upper byte: on no machine do addresses of a process begin with anything but 0.
struct Kind {
    tag: u64,
    name: &'static str,
}

const ENGINE: Kind = Kind { tag: 0x7e, name: "engine" };
const POOL: Kind = Kind { tag: 0x5e, name: "pool" };
const TOPOLOGY: Kind = Kind { tag: 0x4e, name: "topology" };
const STORE: Kind = Kind { tag: 0x3e, name: "store" };
const KINDS: [&Kind; 4] = [&ENGINE, &POOL, &TOPOLOGY, &STORE];
const TRANSPORT_TAG: u64 = 0x6e;
/// Where the tag begins.
const TAG_SHIFT: u32 = 56;
/// The lower part of keys: the number.
const NUMBER_BITS: u32 = 40;

/// What C has instead of an engine or a pool: tag (8 bits), generation of the process that made it (16), number (40).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key(u64);

impl Key {
    /// The key as C has it.
    pub fn as_pointer(self) -> *mut c_void {
        self.0 as *mut c_void
    }
}

impl Kind {
    /// The key that a handle is or, as an address of the program, stands for; else the handle, which names nothing.
    fn key_of(&self, handle: u64) -> u64 {
        match handle >> TAG_SHIFT == self.tag {
            true => handle,
            false => ALIASES.find(handle).unwrap_or(handle),
        }
    }

    /// The key that a handle leads to, and the generation of this process, of whose table it may be.
    fn resolve(&self, handle: u64) -> Result<(u64, u32)> {
        let name = self.name;
        if handle == 0 {
            return Err(guard::invalid(format!("{name} is NULL")));
        }
        let key = self.key_of(handle);
        let generation = fork::generation();
        let maker = (key >> NUMBER_BITS) as u16;
        match key >> TAG_SHIFT == self.tag && (1..generation).contains(&u32::from(maker)) {
            // Not logged: a thread of the parent may have held a lock of the log.
            true => Err(Error::quiet(
                Code::Forked,
                format!("{name} {handle:#x} belongs to the process that this one was forked from; create one here"),
            )),
            false => Ok((key, generation)),
        }
    }
}

/// The engines of this process, which has that generation.
fn engines(generation: u32) -> &'static Table<Engine> {
    static TABLE: AtomicPtr<Table<Engine>> = AtomicPtr::new(std::ptr::null_mut());
    current(&TABLE, &ENGINE, generation)
}

/// The pools of this process, which has that generation.
fn pools(generation: u32) -> &'static Table<EnginePool> {
    static TABLE: AtomicPtr<Table<EnginePool>> = AtomicPtr::new(std::ptr::null_mut());
    current(&TABLE, &POOL, generation)
}

/// The topologies of this process, which has that generation.
fn topologies(generation: u32) -> &'static Table<LiveTopology> {
    static TABLE: AtomicPtr<Table<LiveTopology>> = AtomicPtr::new(std::ptr::null_mut());
    current(&TABLE, &TOPOLOGY, generation)
}

/// The stores of this process, which has that generation.
fn stores(generation: u32) -> &'static Table<OpenStore> {
    static TABLE: AtomicPtr<Table<OpenStore>> = AtomicPtr::new(std::ptr::null_mut());
    current(&TABLE, &STORE, generation)
}

/// The table of that generation: the one at hand, or a new one.
fn current<T>(place: &'static AtomicPtr<Table<T>>, kind: &'static Kind, generation: u32) -> &'static Table<T> {
    loop {
        let current = place.load(Ordering::Acquire);
        // SAFETY: tables are never freed. That of a parent is left alone, since its engines have threads that do not exist here.
        match unsafe { current.as_ref() } {
            Some(table) if table.generation == generation => return table,
            _ => {}
        }
        let new = Box::into_raw(Box::new(Table::new(kind, generation)));
        if place.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire).is_err() {
            // SAFETY: no other thread has seen it.
            drop(unsafe { Box::from_raw(new) });
        }
    }
}

/// Entries by key.
struct Table<T> {
    kind: &'static Kind,
    generation: u32,
    entries: RwLock<Entries<T>>,
    /// See the module.
    aliases: Mutex<()>,
}

type Entries<T> = BTreeMap<u64, Arc<Entry<T>>>;

struct Entry<T> {
    target: Arc<T>,
    gate: Gate,
    marked: AtomicBool,
}

impl<T> Table<T> {
    fn new(kind: &'static Kind, generation: u32) -> Table<T> {
        Table { kind, generation, entries: RwLock::new(BTreeMap::new()), aliases: Mutex::new(()) }
    }

    fn read(&self) -> RwLockReadGuard<'_, Entries<T>> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Entries<T>> {
        self.entries.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn insert(&self, target: Arc<T>) -> Key {
        /// Drawn in all tables of a process and its children, so that no number ever means two things.
        static DRAWN: AtomicU64 = AtomicU64::new(0);
        let number = DRAWN.fetch_add(1, Ordering::Relaxed) + 1;
        let key =
            (self.kind.tag << TAG_SHIFT) | (u64::from(self.generation as u16) << NUMBER_BITS) | (number & ((1 << NUMBER_BITS) - 1));
        let entry = Entry { target, gate: Gate::default(), marked: AtomicBool::new(false) };
        self.write().insert(key, Arc::new(entry));
        Key(key)
    }

    fn has(&self, key: u64) -> bool {
        self.read().contains_key(&key)
    }

    fn enter(&self, key: u64) -> Result<Call<T>> {
        let entry = self.read().get(&key).cloned();
        match entry {
            Some(entry) if entry.gate.enter() => Ok(Call::new(entry)),
            _ => Err(self.nothing(key)),
        }
    }

    fn destroy(&self, key: u64, shut_down: impl FnOnce(&T)) -> Result<()> {
        let removed = self.write().remove(&key);
        let entry = removed.ok_or_else(|| self.nothing(key))?;
        entry.gate.close();
        shut_down(&entry.target);
        entry.gate.wait(calls_of_this_thread(&entry));
        Ok(())
    }

    /// Ends all entries of which that is true, and which have been shut down.
    fn destroy_all(&self, is_meant: impl Fn(&T) -> bool) {
        for entry in self.take(|entry| is_meant(&entry.target)) {
            entry.gate.close();
            entry.gate.wait(calls_of_this_thread(&entry));
        }
    }

    fn take_marked(&self) -> Vec<Arc<T>> {
        let taken = self.take(|entry| entry.marked.load(Ordering::Relaxed));
        taken.iter().map(|entry| entry.target.clone()).collect()
    }

    /// Removes the entries of which that is true.
    fn take(&self, is_meant: impl Fn(&Entry<T>) -> bool) -> Vec<Arc<Entry<T>>> {
        let mut taken = Vec::new();
        self.write().retain(|_, entry| {
            let is_meant = is_meant(entry);
            if is_meant {
                taken.push(entry.clone());
            }
            !is_meant
        });
        taken
    }

    fn nothing(&self, key: u64) -> Error {
        Error::new(Code::InvalidHandle, format!("{key:#x} is no {}; it was destroyed or never created", self.kind.name))
    }
}

#[cfg(not(all(test, loom)))]
thread_local! {
    /// The entries of the calls that this thread is inside, by address, outermost first.
    static CALLS: RefCell<Vec<*const c_void>> = const { RefCell::new(Vec::new()) };
}
#[cfg(all(test, loom))]
loom::thread_local! {
    static CALLS: RefCell<Vec<*const c_void>> = RefCell::new(Vec::new());
}

fn calls_of_this_thread<T>(entry: &Arc<Entry<T>>) -> usize {
    let address = Arc::as_ptr(entry).cast();
    CALLS.try_with(|calls| calls.borrow().iter().filter(|call| **call == address).count()).unwrap_or(0)
}

/// A call that is inside an engine or a pool. It ends when this is dropped, on the thread that began it.
pub struct Call<T> {
    entry: Arc<Entry<T>>,
}

impl<T> Call<T> {
    fn new(entry: Arc<Entry<T>>) -> Call<T> {
        let _ = CALLS.try_with(|calls| calls.borrow_mut().push(Arc::as_ptr(&entry).cast()));
        Call { entry }
    }

    /// What the call is on.
    pub fn target(&self) -> &T {
        &self.entry.target
    }

    /// The same, for longer than the call.
    pub fn shared(&self) -> Arc<T> {
        self.entry.target.clone()
    }
}

impl<T> Drop for Call<T> {
    fn drop(&mut self) {
        let _ = CALLS.try_with(|calls| calls.borrow_mut().pop());
        self.entry.gate.leave();
    }
}

/// Counts the calls that are inside, and can be closed to new ones.
#[derive(Default)]
struct Gate {
    /// Number of calls inside, and [`CLOSED`].
    state: AtomicUsize,
    lock: Mutex<()>,
    left: Condvar,
}

const CLOSED: usize = 1 << (usize::BITS - 1);

impl Gate {
    fn enter(&self) -> bool {
        let open = self.state.fetch_add(1, Ordering::AcqRel) & CLOSED == 0;
        if !open {
            self.leave();
        }
        open
    }

    fn leave(&self) {
        if self.state.fetch_sub(1, Ordering::AcqRel) & CLOSED != 0 {
            // Whoever waits has either seen the new count, or sleeps by the time the lock is ours.
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.left.notify_all();
        }
    }

    fn close(&self) {
        self.state.fetch_or(CLOSED, Ordering::AcqRel);
    }

    /// Returns when no more than `remaining` calls are inside.
    fn wait(&self, remaining: usize) {
        let mut held = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        while self.state.load(Ordering::Acquire) & !CLOSED > remaining {
            held = self.left.wait(held).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Barrier;
    use std::sync::mpsc::channel;

    use super::*;
    use crate::sys::fork::tests::fork_and_run;

    fn new_table() -> Table<&'static str> {
        Table::new(&ENGINE, fork::generation())
    }

    fn code<T>(result: Result<T>) -> Option<Code> {
        result.err().map(|error| error.code())
    }

    #[test]
    fn a_key_finds_its_engine_until_it_is_destroyed_and_never_again() {
        let table = new_table();
        let (first, second) = (table.insert(Arc::new("first")), table.insert(Arc::new("second")));
        assert_eq!(*table.enter(first.0).unwrap().target(), "first");
        assert_eq!(*table.enter(second.0).unwrap().target(), "second");
        table.destroy(first.0, |_| ()).unwrap();
        assert_eq!(code(table.enter(first.0)), Some(Code::InvalidHandle));
        assert_eq!(code(table.destroy(first.0, |_| panic!("shut down twice"))), Some(Code::InvalidHandle));
        let third = table.insert(Arc::new("third"));
        assert_ne!(third, first);
        assert_eq!(code(table.enter(first.0)), Some(Code::InvalidHandle));
        assert_eq!(*table.enter(second.0).unwrap().target(), "second");
    }

    #[test]
    fn garbage_names_nothing() {
        let table = new_table();
        let key = table.insert(Arc::new("engine"));
        let stack = 0u64;
        for garbage in [1, u64::MAX, (&raw const stack) as u64, ENGINE.tag << 56, key.0 + 1, key.0 ^ 1 << NUMBER_BITS] {
            assert_eq!(code(table.enter(garbage)), Some(Code::InvalidHandle), "{garbage:#x}");
            assert_eq!(code(enter(garbage)), Some(Code::InvalidHandle), "{garbage:#x}");
        }
        assert_eq!(code(ENGINE.resolve(0)), Some(Code::InvalidArgument));
        assert_eq!(code(enter(key.0)).unwrap(), Code::InvalidHandle, "a key of another table");
    }

    #[test]
    fn keys_are_no_addresses() {
        let key = new_table().insert(Arc::new("engine")).0;
        for other in [key, transport_key("tcp") as u64, transport_key("rdma") as u64] {
            assert!(!matches!(other >> 56, 0 | 0xff), "{other:#x}");
        }
        assert_eq!(transport_key("tcp"), transport_key("tcp"));
        assert_ne!(transport_key("tcp"), transport_key("rdma"));
    }

    #[test]
    fn destroying_waits_for_the_calls_of_other_threads() {
        let table = new_table();
        let key = table.insert(Arc::new("engine"));
        let entered = Barrier::new(2);
        let (wake, woken) = channel();
        let left = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (table, entered, left) = (&table, &entered, &left);
            scope.spawn(move || {
                let call = table.enter(key.0).unwrap();
                entered.wait();
                woken.recv().unwrap();
                assert_eq!(code(table.enter(key.0)), Some(Code::InvalidHandle), "no new call begins meanwhile");
                left.store(true, Ordering::SeqCst);
                drop(call);
            });
            entered.wait();
            table.destroy(key.0, |_| wake.send(()).unwrap()).unwrap();
            assert!(left.load(Ordering::SeqCst));
        });
    }

    #[test]
    fn a_call_may_destroy_its_own_engine() {
        let table = new_table();
        let key = table.insert(Arc::new("engine"));
        let outer = table.enter(key.0).unwrap();
        let inner = table.enter(key.0).unwrap();
        table.destroy(key.0, |_| ()).unwrap();
        assert_eq!(*inner.target(), "engine", "the call that is inside keeps it alive");
        drop(inner);
        drop(outer);
    }

    #[test]
    fn of_many_that_destroy_one_engine_one_does() {
        let table = new_table();
        for _ in 0..20 {
            let key = table.insert(Arc::new("engine"));
            let done = AtomicUsize::new(0);
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        let found = table.enter(key.0).map(|call| assert_eq!(*call.target(), "engine"));
                        assert!(matches!(code(found), None | Some(Code::InvalidHandle)));
                        let destroyed = table.destroy(key.0, |_| {
                            done.fetch_add(1, Ordering::SeqCst);
                        });
                        assert!(matches!(code(destroyed), None | Some(Code::InvalidHandle)));
                    });
                }
            });
            assert_eq!(done.load(Ordering::SeqCst), 1);
        }
        assert!(table.read().is_empty());
    }

    #[test]
    fn marked_engines_are_taken_and_others_stay() {
        let table = new_table();
        let (plain, marked) = (table.insert(Arc::new("plain")), table.insert(Arc::new("marked")));
        table.enter(marked.0).unwrap().entry.marked.store(true, Ordering::Relaxed);
        assert_eq!(table.take_marked(), [Arc::new("marked")]);
        assert_eq!(table.take_marked(), []);
        assert!(table.enter(plain.0).is_ok());
        assert!(table.enter(marked.0).is_err());
    }

    #[test]
    fn a_forked_child_knows_the_keys_of_its_parent_and_has_a_table_of_its_own() {
        let here = new_table();
        let key = here.insert(Arc::new("parent"));
        // As if a thread of the parent were in the middle of a change.
        let lock = here.write();
        let exit = fork_and_run(|| {
            if code(ENGINE.resolve(key.0)) != Some(Code::Forked) || code(destroy(key.0)) != Some(Code::Forked) {
                return 1;
            }
            let child = new_table();
            let own = child.insert(Arc::new("child"));
            if own == key || code(ENGINE.resolve(own.0)).is_some() {
                return 2;
            }
            if child.enter(own.0).map(|call| *call.target()).ok() == Some("child") { 42 } else { 3 }
        });
        drop(lock);
        assert_eq!(exit, 42);
        assert!(here.enter(key.0).is_ok());
    }

    #[test]
    fn an_alias_leads_to_the_key_and_in_a_child_to_the_parents() {
        let key = new_table().insert(Arc::new("engine"));
        let place = 0u8;
        let address = &raw const place as u64;
        assert_eq!(ENGINE.resolve(address).unwrap().0, address, "it names nothing yet");
        let writing = engines(fork::generation()).aliases.lock().unwrap();
        ALIASES.set(address, key.0).unwrap();
        drop(writing);
        assert_eq!(ENGINE.resolve(address).unwrap().0, key.0);
        assert!(!is_topology(address));
        // As if a thread of the parent were changing another.
        let writing = engines(fork::generation()).aliases.lock().unwrap();
        let exit = fork_and_run(|| match code(ENGINE.resolve(address)) {
            Some(Code::Forked) => 42,
            _ => 1,
        });
        drop(writing);
        assert_eq!(exit, 42);
        remove_alias(key.0, fork::generation());
        assert_eq!(ENGINE.resolve(address).unwrap().0, address);
    }

    #[test]
    fn an_engine_takes_the_address_of_a_topology_and_not_the_other_way_round() {
        let topology = insert_topology(Arc::default());
        let options = crate::engine::EngineOptions {
            metadata: crate::engine::PEER_TO_PEER.into(),
            server_name: "127.0.0.1".into(),
            ..Default::default()
        };
        let engine = insert(Engine::create(&options, crate::config::Config::default()).unwrap());
        let place = 0u8;
        let address = &raw const place as u64;
        assert!(!is_topology(address));
        set_topology_alias(topology.0, address).unwrap();
        assert!(is_topology(address) && enter_topology(address).is_ok());
        assert_eq!(code(enter(address)), Some(Code::InvalidHandle));
        set_engine_alias(engine.0, address).unwrap();
        assert!(!is_topology(address) && enter(address).is_ok());
        assert_eq!(code(set_topology_alias(topology.0, address)), Some(Code::InvalidArgument));
        assert!(enter(address).is_ok());
        // No address: the handle of an engine, of a pool, and of a topology.
        for handle in [engine.0, POOL.tag << TAG_SHIFT, topology.0] {
            assert_eq!(code(set_engine_alias(engine.0, handle)), Some(Code::InvalidArgument));
        }
        destroy(address).unwrap();
        assert_eq!(code(enter(address)), Some(Code::InvalidHandle));
        assert_eq!(code(set_engine_alias(engine.0, address)), Some(Code::InvalidHandle));
        // The address is free for the next.
        set_topology_alias(topology.0, address).unwrap();
        set_topology_alias(topology.0, 0).unwrap();
        assert!(!is_topology(address));
        set_topology_alias(topology.0, address).unwrap();
        destroy_topology(address).unwrap();
        assert_eq!(code(enter_topology(address)), Some(Code::InvalidHandle));
        assert_eq!(code(set_topology_alias(topology.0, address)), Some(Code::InvalidHandle));
    }
}

/// The interleavings of destroying an engine and calls on it, with up to three forced switches between threads. A call that is never
/// woken or never waited for shows as a deadlock, or as an access to the engine's memory that is not ordered with another one.
#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::thread;

    /// An engine: memory that calls work on until it is shut down, and a wait that shutting down ends.
    struct Target {
        number: u32,
        bytes: UnsafeCell<()>,
        open: Mutex<bool>,
        woken: Condvar,
    }

    impl Target {
        fn new(number: u32) -> Arc<Target> {
            Arc::new(Target { number, bytes: UnsafeCell::new(()), open: Mutex::new(true), woken: Condvar::new() })
        }

        fn work(&self) {
            self.bytes.with(|_| ());
        }

        fn wait(&self) {
            let mut open = self.open.lock().unwrap();
            while *open {
                open = self.woken.wait(open).unwrap();
            }
            self.bytes.with(|_| ());
        }

        fn shut_down(&self) {
            assert!(std::mem::replace(&mut *self.open.lock().unwrap(), false), "shut down twice");
            self.woken.notify_all();
        }

        /// The owner of the memory takes it back.
        fn reclaim(&self) {
            self.bytes.with_mut(|_| ());
        }
    }

    fn model(run: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(run);
    }

    fn refused<V>(result: &Result<V>) -> bool {
        result.as_ref().err().is_some_and(|error| error.code() == Code::InvalidHandle)
    }

    #[test]
    fn destroying_waits_for_two_calls_or_refuses_them() {
        model(|| {
            let table = Arc::new(Table::new(&ENGINE, 1));
            let target = Target::new(1);
            let key = table.insert(target.clone()).0;
            let callers: Vec<_> = (0..2)
                .map(|_| {
                    let table = table.clone();
                    thread::spawn(move || match table.enter(key) {
                        Ok(call) => call.target().work(),
                        other => assert!(refused(&other)),
                    })
                })
                .collect();
            table.destroy(key, Target::shut_down).unwrap();
            target.reclaim();
            assert!(refused(&table.enter(key)));
            callers.into_iter().for_each(|caller| caller.join().unwrap());
        });
    }

    #[test]
    fn destroying_wakes_a_call_that_waits_inside_and_waits_for_it() {
        model(|| {
            let table = Arc::new(Table::new(&ENGINE, 1));
            let target = Target::new(1);
            let key = table.insert(target.clone()).0;
            let caller = {
                let table = table.clone();
                thread::spawn(move || {
                    if let Ok(call) = table.enter(key) {
                        call.target().wait();
                    }
                })
            };
            table.destroy(key, Target::shut_down).unwrap();
            target.reclaim();
            caller.join().unwrap();
        });
    }

    #[test]
    fn of_two_that_destroy_one_does_also_from_inside_a_call() {
        model(|| {
            let table = Arc::new(Table::new(&ENGINE, 1));
            let target = Target::new(1);
            let key = table.insert(target.clone()).0;
            let other = {
                let (table, target) = (table.clone(), target.clone());
                thread::spawn(move || {
                    // As a callback of the call does: it waits for the calls of others only.
                    let call = table.enter(key);
                    let destroyed = table.destroy(key, Target::shut_down);
                    match &destroyed {
                        Ok(()) => target.reclaim(),
                        _ => assert!(refused(&destroyed)),
                    }
                    drop(call);
                    destroyed.is_ok()
                })
            };
            let destroyed = table.destroy(key, Target::shut_down);
            match &destroyed {
                Ok(()) => target.reclaim(),
                _ => assert!(refused(&destroyed)),
            }
            assert_eq!(u32::from(destroyed.is_ok()) + u32::from(other.join().unwrap()), 1);
        });
    }

    #[test]
    fn a_stale_key_never_meets_a_new_engine() {
        model(|| {
            let table = Arc::new(Table::new(&ENGINE, 1));
            let key = table.insert(Target::new(1)).0;
            let stale = {
                let table = table.clone();
                thread::spawn(move || {
                    for _ in 0..2 {
                        match table.enter(key) {
                            Ok(call) => assert_eq!(call.target().number, 1),
                            other => assert!(refused(&other)),
                        }
                    }
                })
            };
            table.destroy(key, Target::shut_down).unwrap();
            let new = table.insert(Target::new(2)).0;
            assert_eq!(table.enter(new).unwrap().target().number, 2);
            stale.join().unwrap();
        });
    }
}
