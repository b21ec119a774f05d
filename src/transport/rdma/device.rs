//! A NIC that is open: its port, its address, and the memory that it knows.
//!
//! Opening fails where the NIC cannot carry traffic now. What a NIC is asked for later (another address, events of the port) is for the
//! transport to ask for. [`Nic::register`] pins memory and may be called from several threads at once: the lock on the table of regions is
//! held for an insertion only, never while the kernel pins. The table is what makes keys safe: only a key that it holds is given back.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Mutex, RwLock};

use super::verbs::{
    Access, CompletionChannel, CompletionQueue, Context, DeviceLimits, Library, MemoryRegion, PortState, ProtectionDomain,
    QueuePair, QueuePairSize, Route,
};
use crate::config::RdmaConfig;
use crate::error::{Code, Error, Result};
use crate::sys::MemoryRange;
use crate::topology::Link;
use crate::topology::{Gid, GidAddress, GidKind, Machine, gid, machine};
use crate::transport::device::{Device, MemoryKey, registration_error};

/// RDMA reads that upstream lets a queue pair answer, or have under way, at a time.
const READ_DEPTH: u8 = 16;

/// Loads the verbs library. DeviceNotFound where there is none, or where it finds no device.
pub fn load_library(config: &RdmaConfig) -> Result<&'static Library> {
    let name = config.library.display();
    let library = Library::load(&config.library).map_err(|error| {
        let advice = "install it and the NIC's provider (Debian: libibverbs1, ibverbs-providers), or name it in TE_LIBIBVERBS";
        Error::new(Code::DeviceNotFound, format!("no RDMA device: {name} cannot be loaded ({error}); {advice}"))
    })?;
    match library.device_names() {
        Ok(names) if !names.is_empty() => Ok(library),
        Ok(_) => {
            Err(Error::new(Code::DeviceNotFound, format!("no RDMA device: {name} finds none; is the NIC's kernel module loaded?")))
        }
        Err(error) => {
            let text = format!("no RDMA device: {name} cannot list them ({error}); is the kernel module ib_uverbs loaded?");
            Err(Error::new(Code::DeviceNotFound, text))
        }
    }
}

/// A NIC as it is found on a machine, whether or not it can be used.
#[derive(Clone, Debug)]
pub struct FoundNic {
    /// Such as `mlx5_0`.
    pub name: String,
    /// What the kernel tells of it, if it does.
    pub known: Option<machine::Nic>,
    /// The configured port; `None` if the device does not tell of it.
    pub port: Option<PortState>,
    /// What the device can do at most; `None` if it does not say.
    pub limits: Option<DeviceLimits>,
    /// Where peers would reach it, or why it cannot be used.
    pub address: std::result::Result<PortAddress, String>,
}

/// All NICs of this machine, in the order of the verbs library. Opens each for a moment. DeviceNotFound, with the reason, where there is none.
pub fn find_nics(machine: &Machine, config: &RdmaConfig) -> Result<Vec<FoundNic>> {
    let library = load_library(config)?;
    let find = |name: String| {
        let address = Nic::open(library, machine, &name, config).map(|nic| nic.address());
        let context = library.open(&name).ok();
        FoundNic {
            known: machine.nic(&name),
            port: context.as_ref().and_then(|context| context.port(config.port).ok()),
            limits: context.and_then(|context| context.limits().ok()),
            address: address.map_err(|error| error.message().to_string()),
            name,
        }
    };
    Ok(library.device_names().unwrap_or_default().into_iter().map(find).collect())
}

/// Where peers reach a NIC's port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortAddress {
    /// The GID that is used.
    pub gid: GidAddress,
    /// Its place in the port's table.
    pub gid_index: u8,
    /// Local identifier; 0 on Ethernet.
    pub lid: u16,
    /// Path MTU in bytes: what the port and the configuration allow.
    pub mtu: u32,
}

/// A queue pair of a peer, as the handshake tells of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerQueuePair {
    /// Its number.
    pub number: u32,
    /// GID of its port.
    pub gid: GidAddress,
    /// LID of its port.
    pub lid: u16,
}

/// An open NIC.
pub struct Nic {
    name: String,
    /// What the kernel tells of it, if it does.
    known: Option<machine::Nic>,
    limits: DeviceLimits,
    domain: Arc<ProtectionDomain>,
    address: RwLock<PortAddress>,
    regions: Mutex<Table>,
    opening: usize,
    config: RdmaConfig,
}

/// A handle: number of the opening, how often the place was used before, and the place in the table.
const PLACE_BITS: u32 = 28;
const USE_BITS: u32 = 16;
const REGION_BITS: u32 = PLACE_BITS + USE_BITS;

impl Nic {
    /// Opens the NIC of this name. DeviceNotFound where there is none; Context where it cannot carry traffic, and why. Errors are not logged:
    /// it may be tried again and again.
    pub fn open(library: &'static Library, machine: &Machine, name: &str, config: &RdmaConfig) -> Result<Nic> {
        let context = library.open(name).map_err(|error| {
            if error.raw_os_error() == Some(libc::ENODEV) {
                let names = library.device_names().unwrap_or_default().join(", ");
                return Error::quiet(Code::DeviceNotFound, format!("no RDMA device is named '{name}'; there are: {names}"));
            }
            let advice = "may this process read and write the device's node in /dev/infiniband?";
            Error::quiet(Code::Context, format!("{name} cannot be opened: {error}; {advice}"))
        })?;
        let limits = context.limits().map_err(|error| quiet_failure(name, "tells no limits", error))?;
        if !(1..=limits.ports).contains(&config.port) {
            let text = format!("{name} has {} ports and no port {}: correct MC_IB_PORT", limits.ports, config.port);
            return Err(Error::quiet(Code::Context, text));
        }
        static OPENINGS: AtomicUsize = AtomicUsize::new(0);
        let known = machine.nic(name);
        let address = find_address(&context, name, known.as_ref().and_then(|nic| nic.port(config.port)), config, &[])?;
        let domain = ProtectionDomain::new(&context).map_err(|error| quiet_failure(name, "gives no protection domain", error))?;
        Ok(Nic {
            name: name.to_string(),
            known,
            limits,
            domain,
            address: RwLock::new(address),
            regions: Mutex::default(),
            opening: OPENINGS.fetch_add(1, Ordering::Relaxed) & (usize::MAX >> REGION_BITS),
            config: config.clone(),
        })
    }

    /// The open device, for its events.
    pub fn context(&self) -> &Arc<Context> {
        self.domain.context()
    }

    /// What the device can do at most.
    pub fn limits(&self) -> &DeviceLimits {
        &self.limits
    }

    /// Where peers reach it now.
    pub fn address(&self) -> PortAddress {
        *self.address.read()
    }

    /// Looks up anew where peers reach it, after the port's state or addresses have changed, and returns whether that has changed.
    /// Context, and nothing changed, where it carries no traffic.
    pub fn refresh_address(&self, machine: &Machine) -> Result<bool> {
        self.readdress(machine, &[])
    }

    /// Takes the best GID that is not among `tried`, after connecting with those failed. Context, and nothing changed, where none is
    /// left, or where the configuration names one.
    pub fn take_other_gid(&self, machine: &Machine, tried: &[u8]) -> Result<()> {
        self.readdress(machine, tried).map(drop)
    }

    fn readdress(&self, machine: &Machine, tried: &[u8]) -> Result<bool> {
        let known = machine.nic(&self.name);
        let port = known.as_ref().and_then(|nic| nic.port(self.config.port));
        let address = find_address(self.context(), &self.name, port, &self.config, tried)?;
        Ok(std::mem::replace(&mut *self.address.write(), address) != address)
    }

    /// Makes a completion queue as long as configuration and device allow. With a channel it can be armed.
    pub fn make_completion_queue(&self, channel: Option<&Arc<CompletionChannel>>) -> Result<Arc<CompletionQueue>> {
        let entries = self.config.completion_queue_entries.min(self.limits.max_cqe.max(1));
        CompletionQueue::new(self.context(), entries, channel)
            .map_err(|error| quiet_failure(&self.name, &format!("gives no completion queue of {entries} entries"), error))
    }

    /// What queue pairs have room for: as configured, but not more than the device has.
    pub fn queue_pair_size(&self) -> QueuePairSize {
        QueuePairSize {
            work_requests: self.config.max_work_requests.min(self.limits.max_qp_wr.max(1)),
            pieces: self.config.max_pieces.min(self.limits.max_sge.max(1)),
            inline_bytes: self.config.max_inline,
        }
    }

    /// Makes a queue pair whose completions go to `queue`, ready to be connected.
    pub fn make_queue_pair(&self, queue: &Arc<CompletionQueue>) -> Result<QueuePair> {
        let size = self.queue_pair_size();
        let pair = QueuePair::new(&self.domain, queue, size).or_else(|error| match error.raw_os_error() {
            // Devices differ in how much they can carry inline, and do not say so beforehand. Nothing is sent inline.
            Some(libc::EINVAL | libc::ENOMEM) => QueuePair::new(&self.domain, queue, QueuePairSize { inline_bytes: 0, ..size }),
            _ => Err(error),
        });
        let pair = pair.map_err(|error| {
            let limit = format!("gives no queue pair for {} work requests (max_qp {})", size.work_requests, self.limits.max_qp);
            failure(&self.name, &limit, error)
        })?;
        pair.reset()
            .and_then(|()| pair.initialize(self.config.port, self.config.pkey_index))
            .map_err(|error| failure(&self.name, "cannot initialize a queue pair; is MC_PKEY_INDEX right?", error))?;
        Ok(pair)
    }

    /// Connects a new queue pair with a peer's. EINVAL mostly means that the GIDs do not reach each other: see [`Nic::take_other_gid`].
    pub fn connect(&self, pair: &QueuePair, peer: &PeerQueuePair) -> io::Result<()> {
        let address = self.address();
        let route = Route {
            queue_pair: peer.number,
            gid: peer.gid.0,
            lid: peer.lid,
            port: self.config.port,
            gid_index: address.gid_index,
            mtu: address.mtu,
            traffic_class: self.config.traffic_class,
            service_level: self.config.service_level,
            read_depth: (READ_DEPTH.min(self.limits.max_qp_rd_atom), READ_DEPTH.min(self.limits.max_qp_init_rd_atom)),
        };
        pair.connect(&route)?;
        pair.start(&route)
    }

    /// The NIC as listings show it.
    pub fn link(&self) -> Link {
        let address = self.address();
        let gigabits = self.context().port(self.config.port).map_or(0, |port| gigabits(port.active_speed, port.active_width));
        Link {
            device: self.name.clone(),
            numa_node: self.numa_node(),
            gid: Some((address.gid, address.gid_index)),
            port: self.config.port,
            gigabits,
            in_use: true,
        }
    }

    /// Whether the key was made since the device was opened; others are of an earlier opening.
    fn has_made(&self, key: &MemoryKey) -> bool {
        key.handle >> REGION_BITS == self.opening
    }
}

impl Device for Nic {
    fn name(&self) -> &str {
        &self.name
    }

    fn numa_node(&self) -> Option<u32> {
        self.known.as_ref().and_then(|nic| nic.numa_node)
    }

    fn max_mr_size(&self) -> u64 {
        self.limits.max_mr_size
    }

    fn register(&self, chunk: MemoryRange, remote_accessible: bool) -> Result<MemoryKey> {
        let mut access = Access { remote: remote_accessible, relaxed_ordering: self.config.relaxed_ordering, local_write: true };
        let registered = MemoryRegion::register(&self.domain, chunk, access).or_else(|error| match error.raw_os_error() {
            // Memory that is mapped for reading only, such as a file of weights, can still be read by peers and be sent from.
            Some(libc::EFAULT | libc::EACCES) => {
                access.local_write = false;
                MemoryRegion::register(&self.domain, chunk, access).map_err(|_| error)
            }
            _ => Err(error),
        });
        let region = registered.map_err(|error| {
            registration_error(self, chunk, error.raw_os_error().unwrap_or(libc::EIO), Some(u64::from(self.limits.max_mr)))
        })?;
        let (lkey, rkey) = (region.local_key(), if remote_accessible { region.remote_key() } else { 0 });
        let handle = self.opening << REGION_BITS | self.regions.lock().insert(region);
        Ok(MemoryKey { lkey, rkey, handle })
    }

    fn knows(&self, key: &MemoryKey) -> bool {
        self.has_made(key) && self.regions.lock().place(key.handle).is_some_and(|place| place.region.is_some())
    }

    fn deregister(&self, key: &MemoryKey) -> Result<()> {
        if !self.has_made(key) {
            return Ok(());
        }
        let Some(region) = self.regions.lock().place(key.handle).and_then(|place| place.region.take()) else {
            let text = format!("{} has no memory region {:#x} with key {:#x}", self.name, key.handle, key.lkey);
            return Err(Error::new(Code::Internal, text));
        };
        let outcome = region.deregister();
        self.regions
            .lock()
            .settle(key.handle, outcome)
            .map_err(|error| failure(&self.name, &format!("keeps the memory region with key {:#x} registered", key.lkey), error))
    }
}

/// A NIC's memory regions by the handles of their keys. What is registered takes the place that was freed last: whatever is registered, few
/// places are touched. A place counts its uses, so that a key that was given back finds nothing.
#[derive(Default)]
struct Table {
    places: Vec<Place>,
    free: Vec<usize>,
}

#[derive(Default)]
struct Place {
    uses: usize,
    region: Option<MemoryRegion>,
}

impl Table {
    /// The part of the region's handle that this table knows.
    fn insert(&mut self, region: MemoryRegion) -> usize {
        let index = self.free.pop().unwrap_or_else(|| {
            self.places.push(Place::default());
            self.places.len() - 1
        });
        let place = &mut self.places[index];
        place.region = Some(region);
        place.uses << PLACE_BITS | index
    }

    /// The place of a handle, if it is still used for that.
    fn place(&mut self, handle: usize) -> Option<&mut Place> {
        let uses = handle >> PLACE_BITS & ((1 << USE_BITS) - 1);
        self.places.get_mut(place_of(handle)).filter(|place| place.uses == uses)
    }

    /// Frees the place of a region that was taken out, or puts the region back.
    fn settle(&mut self, handle: usize, outcome: std::result::Result<(), (MemoryRegion, io::Error)>) -> io::Result<()> {
        let place = &mut self.places[place_of(handle)];
        match outcome {
            Ok(()) => {
                place.uses = (place.uses + 1) & ((1 << USE_BITS) - 1);
                self.free.push(place_of(handle));
                Ok(())
            }
            Err((region, error)) => {
                place.region = Some(region);
                Err(error)
            }
        }
    }
}

fn place_of(handle: usize) -> usize {
    handle & ((1 << PLACE_BITS) - 1)
}

#[track_caller]
fn failure(name: &str, what: &str, error: io::Error) -> Error {
    Error::new(Code::Context, format!("{name} {what}: {error}"))
}

/// Not logged; see [`Nic::open`].
fn quiet_failure(name: &str, what: &str, error: io::Error) -> Error {
    Error::quiet(Code::Context, format!("{name} {what}: {error}"))
}

/// Where peers reach the port, with the configured GID or the best one that is not among `tried`. `known` is what the kernel tells of the
/// port beyond verbs: kinds and interfaces of its GIDs. Errors are not logged.
fn find_address(
    context: &Context,
    name: &str,
    known: Option<&machine::Port>,
    config: &RdmaConfig,
    tried: &[u8],
) -> Result<PortAddress> {
    let port =
        context.port(config.port).map_err(|error| quiet_failure(name, &format!("does not tell of port {}", config.port), error))?;
    if !port.active {
        let text =
            format!("port {} of {name} is not active: look at its cable, switch or network interface (ip link)", config.port);
        return Err(Error::quiet(Code::Context, text));
    }
    let read = |index: u8| context.gid(config.port, u32::from(index)).map(GidAddress).ok().filter(|address| !address.is_zero());
    let (gid, gid_index) = match config.gid_index {
        Some(index) if tried.is_empty() => {
            let gid = read(index).ok_or_else(|| {
                let text =
                    format!("entry {index} of the GID table of {name}, port {}, is not used: correct MC_GID_INDEX", config.port);
                Error::quiet(Code::Context, text)
            })?;
            (gid, index)
        }
        Some(index) => {
            let text =
                format!("{name} cannot connect with GID {index}, which MC_GID_INDEX names; without that variable others are tried");
            return Err(Error::quiet(Code::Context, text));
        }
        None => {
            let entry = |index: u8| {
                let known = known.and_then(|port| port.gids.iter().find(|gid| gid.index == index));
                let guess = if port.ethernet { GidKind::RoceV2 } else { GidKind::InfiniBand };
                let (kind, net_device) = known.map_or((guess, None), |gid| (gid.kind, gid.net_device.clone()));
                Some(Gid { index, address: read(index)?, kind, net_device })
            };
            let table: Vec<Gid> = (0..=u8::MAX).take(port.gids as usize).filter_map(entry).collect();
            let best = gid::rank(&table).into_iter().find(|index| !tried.contains(index));
            let best = best.and_then(|index| table.iter().find(|gid| gid.index == index));
            let best = best.ok_or_else(|| {
                let besides = if tried.is_empty() { String::new() } else { format!(" besides {tried:?}") };
                let advice = "give its network interface an address";
                Error::quiet(
                    Code::Context,
                    format!("port {} of {name} has no GID{besides} that could be used: {advice}", config.port),
                )
            })?;
            (best.address, best.index)
        }
    };
    Ok(PortAddress { gid, gid_index, lid: port.lid, mtu: port.mtu.min(config.mtu) })
}

/// Speed of a link in Gbit/s, from the encoded speed of a lane and number of lanes.
pub fn gigabits(speed: u8, width: u8) -> u32 {
    let lane = match speed {
        1 => 2,
        2 => 5,
        4 | 8 => 10,
        16 => 14,
        32 => 25,
        64 => 50,
        128 => 100,
        other => u32::from(other),
    };
    let lanes = match width {
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => 1,
    };
    lane * lanes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::Opcode;
    use crate::transport::rdma::fake::{Fake, Memory};
    use crate::transport::rdma::verbs::{AsyncEvent, Outcome, QueuePairState, WorkRequest};

    fn nowhere() -> Machine {
        Machine::at("/nowhere", "/nowhere")
    }

    fn config() -> RdmaConfig {
        crate::config::Config::default().rdma
    }

    fn open(fake: &Fake, name: &str) -> Nic {
        Nic::open(fake.library, &nowhere(), name, &config()).unwrap()
    }

    /// Two queue pairs on their NICs, connected to each other.
    struct Wire {
        nics: [Nic; 2],
        queues: [Arc<CompletionQueue>; 2],
        pairs: [QueuePair; 2],
    }

    fn peer(nic: &Nic, pair: &QueuePair) -> PeerQueuePair {
        PeerQueuePair { number: pair.number(), gid: nic.address().gid, lid: nic.address().lid }
    }

    impl Wire {
        fn new(fake: &Fake) -> Wire {
            let nics = [open(fake, "fake0"), open(fake, "fake1")];
            let queues = [0, 1].map(|side| nics[side].make_completion_queue(None).unwrap());
            let pairs = [0, 1].map(|side| nics[side].make_queue_pair(&queues[side]).unwrap());
            let peers = [0, 1].map(|side| peer(&nics[side], &pairs[side]));
            nics[0].connect(&pairs[0], &peers[1]).unwrap();
            nics[1].connect(&pairs[1], &peers[0]).unwrap();
            Wire { nics, queues, pairs }
        }

        /// The completions of the first side: number and outcome.
        fn completions(&self) -> Vec<(u64, Outcome)> {
            let mut seen = Vec::new();
            self.queues[0].poll(1000, |completion| seen.push((completion.id, completion.outcome))).unwrap();
            seen
        }
    }

    fn request(opcode: Opcode, id: u64, local: (MemoryRange, &MemoryKey), remote: (MemoryRange, &MemoryKey)) -> WorkRequest {
        WorkRequest {
            id,
            opcode,
            local: local.0,
            local_key: local.1.lkey,
            remote_address: remote.0.address(),
            remote_key: remote.1.rkey,
        }
    }

    #[test]
    fn without_a_library_or_devices_there_is_no_rdma_device() {
        let missing = RdmaConfig { library: "/nowhere/libibverbs.so.1".into(), ..config() };
        let error = load_library(&missing).unwrap_err();
        assert_eq!(error.code(), Code::DeviceNotFound);
        assert!(error.message().starts_with("no RDMA device: ") && error.message().contains("TE_LIBIBVERBS"), "{error}");

        let other = RdmaConfig { library: "libc.so.6".into(), ..config() };
        let error = load_library(&other).unwrap_err();
        assert!(error.message().contains("it has no function ibv_get_device_list"), "{error}");

        let fake = Fake::new(0);
        let error = load_library(&RdmaConfig { library: fake.library.path().into(), ..config() }).unwrap_err();
        assert_eq!(error.code(), Code::DeviceNotFound);
        assert!(error.message().contains("finds none"), "{error}");
        fake.set(-1, "list_errno", i64::from(libc::ENOSYS));
        let error = load_library(&RdmaConfig { library: fake.library.path().into(), ..config() }).unwrap_err();
        assert_eq!(error.code(), Code::DeviceNotFound);
        assert!(error.message().contains("cannot list them") && error.message().contains("ib_uverbs"), "{error}");
        fake.set(-1, "list_errno", 0);
        fake.set(-1, "devices", 1);
        assert_eq!(
            load_library(&RdmaConfig { library: fake.library.path().into(), ..config() }).unwrap().device_names().unwrap(),
            ["fake0"]
        );
    }

    #[test]
    fn what_cannot_be_opened_says_why() {
        let fake = Fake::new(2);
        let refused = |config: &RdmaConfig, name: &str| Nic::open(fake.library, &nowhere(), name, config).err().unwrap();
        let error = refused(&config(), "mlx5_0");
        assert_eq!(error.code(), Code::DeviceNotFound);
        assert!(error.message().contains("there are: fake0, fake1"), "{error}");
        assert!(refused(&RdmaConfig { port: 2, ..config() }, "fake0").message().contains("MC_IB_PORT"));
        for index in [2, 200] {
            assert!(refused(&RdmaConfig { gid_index: Some(index), ..config() }, "fake0").message().contains("MC_GID_INDEX"));
        }
        fake.set(0, "port_state", 1);
        let error = refused(&config(), "fake0");
        assert_eq!(error.code(), Code::Context);
        assert!(error.message().contains("port 1 of fake0 is not active"), "{error}");
        fake.set(1, "open_errno", i64::from(libc::EACCES));
        assert!(refused(&config(), "fake1").message().contains("/dev/infiniband"));
        assert_eq!(fake.get(-1, "contexts"), 0);
    }

    #[test]
    fn all_nics_are_found_and_those_that_cannot_be_used_say_why() {
        let fake = Fake::new(3);
        fake.set(1, "port_state", 1);
        fake.set(2, "open_errno", i64::from(libc::EACCES));
        let config = RdmaConfig { library: fake.library.path().into(), ..config() };
        let found = find_nics(&nowhere(), &config).unwrap();
        assert_eq!(found.iter().map(|nic| nic.name.as_str()).collect::<Vec<_>>(), ["fake0", "fake1", "fake2"]);
        assert_eq!(found[0].address.as_ref().unwrap().gid_index, 1);
        assert_eq!((found[0].limits.unwrap().max_mr, found[0].port.unwrap().active), (1 << 20, true));
        assert!(!found[1].port.unwrap().active && found[1].limits.is_some());
        assert!(found[1].address.as_ref().unwrap_err().contains("not active"));
        assert!(found[2].port.is_none() && found[2].limits.is_none());
        assert!(found[2].address.as_ref().unwrap_err().contains("/dev/infiniband"));
        assert_eq!(fake.get(-1, "contexts"), 0);
    }

    #[test]
    fn the_address_is_the_best_gid_and_the_smaller_mtu() {
        let fake = Fake::new(1);
        let address = open(&fake, "fake0").address();
        assert_eq!((address.gid_index, address.lid, address.mtu), (1, 0, 4096));
        assert_eq!(address.gid.to_string(), "00:00:00:00:00:00:00:00:00:00:ff:ff:c0:a8:00:01");
        let chosen = RdmaConfig { gid_index: Some(0), mtu: 1024, ..config() };
        let chosen = Nic::open(fake.library, &nowhere(), "fake0", &chosen).unwrap();
        assert_eq!((chosen.address().gid_index, chosen.address().mtu), (0, 1024));
        assert!(chosen.take_other_gid(&nowhere(), &[0]).unwrap_err().message().contains("MC_GID_INDEX"));
        fake.set(0, "active_mtu", 3);
        fake.set(0, "link_layer", 1);
        let infiniband = open(&fake, "fake0").address();
        assert_eq!((infiniband.gid_index, infiniband.lid, infiniband.mtu), (0, 1, 1024));
    }

    #[test]
    fn other_gids_are_taken_in_order_until_none_is_left() {
        let fake = Fake::new(1);
        let nic = open(&fake, "fake0");
        nic.take_other_gid(&nowhere(), &[1]).unwrap();
        assert_eq!(nic.address().gid_index, 0);
        assert!(nic.take_other_gid(&nowhere(), &[1, 0]).unwrap_err().message().contains("has no GID besides [1, 0]"));
        assert_eq!(nic.address().gid_index, 0);
    }

    #[test]
    fn a_changed_gid_is_seen_by_an_event_and_a_new_look() {
        let fake = Fake::new(1);
        let nic = open(&fake, "fake0");
        assert_eq!(nic.context().next_event().unwrap(), None);
        assert!(!nic.refresh_address(&nowhere()).unwrap());
        fake.set(0, "gid_subnet", 9);
        fake.event(0, 18);
        assert_eq!(nic.context().next_event().unwrap(), Some(AsyncEvent::GidChange(1)));
        assert!(nic.refresh_address(&nowhere()).unwrap());
        assert!(nic.address().gid.to_string().ends_with(":09:01"));
        fake.set(0, "port_state", 1);
        for (number, event) in [
            (10, AsyncEvent::PortError(1)),
            (9, AsyncEvent::PortActive(1)),
            (8, AsyncEvent::DeviceFatal),
            (4711, AsyncEvent::Other(4711)),
        ] {
            fake.event(0, number);
            assert_eq!(nic.context().next_event().unwrap(), Some(event));
        }
        assert!(nic.refresh_address(&nowhere()).is_err());
        assert!(nic.address().gid.to_string().ends_with(":09:01"));
    }

    #[test]
    fn memory_is_registered_with_the_access_that_was_asked_for_and_given_back() {
        let fake = Fake::new(1);
        let nic = open(&fake, "fake0");
        let memory = Memory::new(8192);
        let open_to_peers = nic.register(memory.range(0, 4096), true).unwrap();
        let local = nic.register(memory.range(4096, 4096), false).unwrap();
        assert_eq!((fake.get(0, "regions"), fake.get(0, "region_bytes"), fake.get(0, "relaxed_registrations")), (2, 8192, 2));
        assert!(open_to_peers.rkey != 0 && local.rkey == 0 && local.lkey != open_to_peers.lkey);
        nic.deregister(&open_to_peers).unwrap();
        assert_eq!(nic.deregister(&open_to_peers).unwrap_err().code(), Code::Internal);
        assert_eq!(fake.get(0, "regions"), 1);
        // A NIC that is closed leaves nothing behind.
        drop(nic);
        assert_eq!((fake.get(0, "regions"), fake.get(0, "domains"), fake.get(0, "contexts")), (0, 0, 0));
        let strict = RdmaConfig { relaxed_ordering: false, ..config() };
        Nic::open(fake.library, &nowhere(), "fake0", &strict).unwrap().register(memory.range(0, 1), true).unwrap();
        assert_eq!(fake.get(0, "relaxed_registrations"), 2);
    }

    #[test]
    fn refused_registrations_say_what_the_reader_must_know() {
        let fake = Fake::new(1);
        fake.set(0, "max_mr", 1234);
        fake.set(0, "max_mr_size", 1 << 20);
        let nic = open(&fake, "fake0");
        let memory = Memory::new(4096);
        let range = memory.range(0, 4096);
        let cases = [
            (libc::ENOMEM, Code::Limit, "limit on locked memory"),
            (libc::EAGAIN, Code::Limit, "try again"),
            (libc::EIO, Code::Context, "kernel's log"),
            (libc::EPERM, Code::Context, "may not"),
            (libc::EINVAL, Code::Context, "MC_MAX_MR_SIZE"),
        ];
        for (errno, code, advice) in cases {
            fake.set(0, "register_errno", i64::from(errno));
            fake.set(0, "register_fail_at", 1);
            let error = nic.register(range, true).unwrap_err();
            assert_eq!(error.code(), code);
            let address = format!("{:#x}", range.address());
            for part in
                [&address, "4096 bytes", "fake0", &format!("errno {errno}"), "RLIMIT_MEMLOCK is ", "1048576", "1234", advice]
            {
                assert!(error.message().contains(part), "{part}: {error}");
            }
        }
        assert_eq!(fake.get(0, "regions"), 0);
        nic.register(range, true).unwrap();
        assert_eq!(nic.register(Memory::unmapped(4096), true).unwrap_err().code(), Code::Fault);
    }

    #[test]
    fn a_region_that_is_not_given_back_is_still_there() {
        let fake = Fake::new(1);
        let nic = open(&fake, "fake0");
        let memory = Memory::new(4096);
        let key = nic.register(memory.range(0, 4096), true).unwrap();
        fake.set(0, "deregister_fail_at", 1);
        let error = nic.deregister(&key).unwrap_err();
        assert!(error.message().contains("fake0 keeps"), "{error}");
        assert_eq!(fake.get(0, "regions"), 1);
        nic.deregister(&key).unwrap();
        assert_eq!(fake.get(0, "regions"), 0);
    }

    #[test]
    fn registrations_of_several_threads_run_side_by_side() {
        let fake = Fake::new(2);
        fake.set(-1, "register_microseconds", 100_000);
        let nics = [open(&fake, "fake0"), open(&fake, "fake1")];
        let memory = Memory::new(4096);
        let range = memory.range(0, 4096);
        std::thread::scope(|scope| {
            for nic in nics.iter().chain(&nics) {
                scope.spawn(move || nic.register(range, true).unwrap());
            }
        });
        assert_eq!((fake.get(-1, "most_registering"), fake.get(-1, "regions")), (4, 4));
    }

    #[test]
    fn bytes_are_read_and_written_in_lists_longer_than_a_chain() {
        let fake = Fake::new(2);
        let wire = Wire::new(&fake);
        const PIECES: u64 = 100;
        let (ours, theirs) = (Memory::new(PIECES as usize * 64), Memory::new(PIECES as usize * 64));
        let whole = |memory: &Memory| memory.range(0, PIECES * 64);
        let keys = [wire.nics[0].register(whole(&ours), false).unwrap(), wire.nics[1].register(whole(&theirs), true).unwrap()];
        let work = |opcode| -> Vec<WorkRequest> {
            let place = |memory: &Memory, piece| memory.range(piece * 64, 64);
            (0..PIECES)
                .map(|at| request(opcode, at, (place(&ours, at), &keys[0]), (place(&theirs, PIECES - 1 - at), &keys[1])))
                .collect()
        };
        let pattern: Vec<u8> = (0..PIECES * 64).map(|at| (at / 64 + at) as u8).collect();
        ours.write(&pattern);
        wire.pairs[0].post(&work(Opcode::Write)).unwrap();
        assert_eq!(wire.completions(), (0..PIECES).map(|id| (id, Outcome::Success)).collect::<Vec<_>>());
        let turned: Vec<u8> = pattern.chunks(64).rev().flatten().copied().collect();
        assert!(theirs.read() == turned);
        ours.write(&vec![0; pattern.len()]);
        wire.pairs[0].post(&work(Opcode::Read)).unwrap();
        assert_eq!(wire.completions().len(), PIECES as usize);
        assert!(ours.read() == pattern);
        assert_eq!((fake.get(0, "bytes_written"), fake.get(0, "bytes_read"), fake.get(0, "posts")), (6400, 6400, 8));
        wire.pairs[0].post(&[]).unwrap();
        // The first call of four fails, and does not say where.
        let list = work(Opcode::Read);
        fake.set(0, "doorbell_errno", i64::from(libc::ENOMEM));
        let error = wire.pairs[0].post(&list).unwrap_err();
        assert_eq!((error.posted, error.error.raw_os_error()), (32, None), "all that it may have taken");
        assert_eq!(wire.completions().len(), 32);
    }

    #[test]
    fn errors_end_the_connection_and_flush_what_waits() {
        let fake = Fake::new(2);
        let (ours, theirs) = (Memory::new(4096), Memory::new(4096));
        let both = |wire: &Wire| {
            [wire.nics[0].register(ours.range(0, 4096), true).unwrap(), wire.nics[1].register(theirs.range(0, 4096), true).unwrap()]
        };
        type Spoil = fn(&mut WorkRequest);
        let refused: [(Spoil, Outcome); 4] = [
            (|request| request.remote_key ^= 0x100, Outcome::RemoteAccess),
            (|request| request.remote_address += 4000, Outcome::RemoteAccess),
            (|request| request.local_key ^= 0x100, Outcome::Local),
            (|request| request.remote_key = 0, Outcome::RemoteAccess),
        ];
        for (spoil, outcome) in refused {
            let wire = Wire::new(&fake);
            let keys = both(&wire);
            let mut list =
                [1, 2, 3].map(|id| request(Opcode::Write, id, (ours.range(0, 100), &keys[0]), (theirs.range(0, 100), &keys[1])));
            spoil(&mut list[1]);
            wire.pairs[0].post(&list).unwrap();
            assert_eq!(wire.completions(), [(1, Outcome::Success), (2, outcome), (3, Outcome::Flushed)]);
            assert_eq!(wire.pairs[0].state().unwrap(), QueuePairState::Failed);
            if outcome == Outcome::RemoteAccess {
                let event = AsyncEvent::QueuePairFatal(wire.pairs[1].number());
                assert_eq!(wire.nics[1].context().next_event().unwrap(), Some(event));
            }
            wire.pairs[0].post(&list[..1]).unwrap();
            assert_eq!(wire.completions(), [(1, Outcome::Flushed)]);
        }
        // The peer's port is down: no answer.
        let wire = Wire::new(&fake);
        let keys = both(&wire);
        fake.set(1, "port_state", 1);
        wire.pairs[0].post(&[request(Opcode::Read, 7, (ours.range(0, 1), &keys[0]), (theirs.range(0, 1), &keys[1]))]).unwrap();
        assert_eq!(wire.completions(), [(7, Outcome::Remote)]);
    }

    #[test]
    fn giving_a_queue_pair_up_flushes_what_is_under_way() {
        let fake = Fake::new(2);
        let wire = Wire::new(&fake);
        let memory = Memory::new(4096);
        let keys = [0, 1].map(|side| wire.nics[side].register(memory.range(0, 4096), true).unwrap());
        fake.set(0, "hold", 1);
        let list = [1, 2].map(|id| request(Opcode::Read, id, (memory.range(0, 10), &keys[0]), (memory.range(100, 10), &keys[1])));
        wire.pairs[0].post(&list).unwrap();
        assert_eq!(wire.completions(), []);
        wire.pairs[0].fail().unwrap();
        assert_eq!(wire.completions(), [(1, Outcome::Flushed), (2, Outcome::Flushed)]);
        fake.set(0, "hold", 0);
        assert_eq!(wire.completions(), []);
    }

    #[test]
    fn a_full_queue_takes_what_fits_and_says_how_much() {
        let fake = Fake::new(2);
        let mut wire = Wire::new(&fake);
        let small = RdmaConfig { max_work_requests: 40, ..config() };
        wire.nics[0] = Nic::open(fake.library, &nowhere(), "fake0", &small).unwrap();
        wire.queues[0] = wire.nics[0].make_completion_queue(None).unwrap();
        wire.pairs[0] = wire.nics[0].make_queue_pair(&wire.queues[0]).unwrap();
        wire.pairs[1] = wire.nics[1].make_queue_pair(&wire.queues[1]).unwrap();
        let peers = [0, 1].map(|side| peer(&wire.nics[side], &wire.pairs[side]));
        wire.nics[0].connect(&wire.pairs[0], &peers[1]).unwrap();
        wire.nics[1].connect(&wire.pairs[1], &peers[0]).unwrap();
        let memory = Memory::new(4096);
        let keys = [0, 1].map(|side| wire.nics[side].register(memory.range(0, 4096), true).unwrap());
        fake.set(0, "hold", 1);
        let list: Vec<_> =
            (0..50).map(|id| request(Opcode::Write, id, (memory.range(0, 1), &keys[0]), (memory.range(1, 1), &keys[1]))).collect();
        let refused = wire.pairs[0].post(&list).unwrap_err();
        assert_eq!((refused.posted, refused.error.raw_os_error()), (40, Some(libc::ENOMEM)));
        fake.set(0, "hold", 0);
        assert_eq!(wire.completions().len(), 40);
        wire.pairs[0].post(&list[40..]).unwrap();
        assert_eq!(wire.completions().len(), 10);
    }

    #[test]
    fn a_queue_pair_goes_through_its_states() {
        let fake = Fake::new(1);
        let nic = open(&fake, "fake0");
        let queue = nic.make_completion_queue(None).unwrap();
        let pair = nic.make_queue_pair(&queue).unwrap();
        assert_eq!(pair.state().unwrap(), QueuePairState::Initialized);
        assert_eq!(pair.post(&[]).map_err(|refused| refused.posted), Ok(()));
        // To itself.
        nic.connect(&pair, &peer(&nic, &pair)).unwrap();
        assert_eq!(pair.state().unwrap(), QueuePairState::ReadyToSend);
        pair.drain().unwrap();
        assert_eq!(pair.state().unwrap(), QueuePairState::Draining);
        pair.fail().unwrap();
        assert_eq!(pair.state().unwrap(), QueuePairState::Failed);
        pair.reset().unwrap();
        assert_eq!(pair.state().unwrap(), QueuePairState::Reset);
        fake.set(0, "rtr_errno", i64::from(libc::EINVAL));
        pair.initialize(1, 0).unwrap();
        assert_eq!(nic.connect(&pair, &peer(&nic, &pair)).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }

    #[test]
    fn a_completion_wakes_whoever_asked_for_it() {
        let fake = Fake::new(1);
        let nic = open(&fake, "fake0");
        let channel = CompletionChannel::new(nic.context()).unwrap();
        let queue = nic.make_completion_queue(Some(&channel)).unwrap();
        let pair = nic.make_queue_pair(&queue).unwrap();
        nic.connect(&pair, &peer(&nic, &pair)).unwrap();
        let memory = Memory::new(4096);
        let key = nic.register(memory.range(0, 4096), true).unwrap();
        let write = |id| request(Opcode::Write, id, (memory.range(0, 1), &key), (memory.range(1, 1), &key));
        pair.post(&[write(1)]).unwrap();
        assert_eq!(channel.take_events().unwrap(), 0);
        queue.request_notification().unwrap();
        pair.post(&[write(2), write(3)]).unwrap();
        assert_eq!(channel.take_events().unwrap(), 1);
        assert_eq!(queue.poll(2, |_| {}).unwrap(), 2);
        assert_eq!(queue.poll(2, |_| {}).unwrap(), 1);
        assert!(queue.channel().is_some() && queue.capacity() >= 4096);
    }

    #[test]
    fn everything_is_destroyed_in_the_right_order() {
        let fake = Fake::new(1);
        let nic = open(&fake, "fake0");
        let channel = CompletionChannel::new(nic.context()).unwrap();
        let queue = nic.make_completion_queue(Some(&channel)).unwrap();
        let pair = nic.make_queue_pair(&queue).unwrap();
        drop((nic, channel, queue));
        let live = || ["contexts", "domains", "channels", "queues", "queue_pairs"].map(|kind| fake.get(0, kind));
        assert_eq!(live(), [1; 5]);
        drop(pair);
        assert_eq!(live(), [0; 5]);
    }

    #[test]
    fn limits_of_the_device_bound_what_is_asked_of_it() {
        let fake = Fake::new(1);
        fake.set(0, "max_qp_wr", 10);
        fake.set(0, "max_cqe", 20);
        fake.set(0, "max_qp", 1);
        let nic = open(&fake, "fake0");
        assert_eq!(nic.queue_pair_size().work_requests, 10);
        let queue = nic.make_completion_queue(None).unwrap();
        assert_eq!(queue.capacity(), 20);
        let _pair = nic.make_queue_pair(&queue).unwrap();
        let error = nic.make_queue_pair(&queue).err().unwrap();
        assert!(error.message().contains("max_qp 1"), "{error}");
    }

    #[test]
    fn a_link_is_shown_with_its_speed() {
        let fake = Fake::new(1);
        let link = open(&fake, "fake0").link();
        assert_eq!((link.port, link.gigabits, link.in_use, link.numa_node), (1, 100, true, None));
        assert_eq!((gigabits(1, 1), gigabits(16, 2), gigabits(64, 16), gigabits(128, 4), gigabits(7, 9)), (2, 56, 100, 800, 7));
    }
}
