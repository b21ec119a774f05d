//! The engine: makes the rooms below into one thing, and owns their life.
//!
//! An engine has a name by which peers open its segment, a registry of its memory, transports, and a cache of the peers it has opened.
//! Its descriptor is put together from text that is kept for blocks of regions. Without a metadata server peers ask for it over the
//! handshake channel, and registering memory sends nothing. With one, `presence` keeps it there: registering and unregistering return
//! when the server has it.
//!
//! Who locks what: `transports` is read by registrations and submissions and written by [`Engine::install_transport`], which holds
//! it throughout: it excludes registering and unregistering, so a new transport learns of every region exactly once. Memory is published
//! after the lock is released, since a metadata server may take seconds. `pools` is locked for moments. Everything else has its locks in the
//! rooms.
//!
//! Threads of an idle engine: one for the handshake channel, `TE_TCP_IO_THREADS` for TCP, one for each NIC with RDMA, one with a metadata
//! server, one more each if `MC_TE_METADATA_REFRESH_INTERVAL_SECONDS`, `MC_TE_METRIC` or `TE_METRICS_DIRECTORY` is set. Up to four more each for finding peers,
//! for notifications and what is published with them, and for NICs that come back, come and go.

mod card;
mod directory;
#[cfg(test)]
mod metadata_tests;
mod metrics;
#[cfg(test)]
mod metrics_tests;
mod periodic;
mod presence;
#[cfg(all(test, feature = "rdma"))]
mod rdma_tests;
mod segments;
pub mod staging;
#[cfg(all(test, feature = "rdma"))]
mod staging_rdma_tests;
#[cfg(test)]
mod staging_tests;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};

use self::card::Card;
use self::directory::{Directory, Place};
use self::periodic::Periodic;
use self::presence::Presence;
use self::segments::{Fetcher, Segments};
use crate::config::{Config, Parallelism};
use crate::error::{Code, Error, Result};
use crate::handshake::address::{HostPort, find_local_address};
use crate::handshake::{Client, Listener, Notification, Server, Service};
use crate::metadata::store::{self, Store};
use crate::metadata::{SegmentDescriptor, SegmentHeader};
use crate::pool::{Pool, PoolOptions};
use crate::registration::Registrar;
use crate::registry::{Owner, Region, RegionOptions, RegistrationCost, Registry};
use crate::sys::background::Background;
use crate::sys::{MemoryRange, limits};
use crate::telemetry::exporter::Exporter;
use crate::telemetry::{Counters, Throughput};
use crate::topology::{LiveTopology, Machine, Topology};
use crate::transfer::{self, Batch, BatchHost, BatchTable, Request, Route, SubmitOptions, TaskStatus};
#[cfg(feature = "rdma")]
use crate::transport::Device;
use crate::transport::local::LocalTransport;
#[cfg(feature = "rdma")]
use crate::transport::rdma::{self, RdmaTransport};
use crate::transport::tcp::TcpTransport;
use crate::transport::{NicLoad, Segment, Transport, Watchers};

/// Metadata "server" of engines that find each other by address.
pub const PEER_TO_PEER: &str = "P2PHANDSHAKE";

/// Stands for the best transport there is.
pub const AUTO: &str = "auto";

/// Id of the own segment.
pub const LOCAL_SEGMENT: u64 = 0;

/// How an engine is made.
#[derive(Clone, Debug, Default)]
pub struct EngineOptions {
    /// `P2PHANDSHAKE`, or a metadata server: see [`store::connect`].
    pub metadata: String,
    /// With `P2PHANDSHAKE`, `host[:port]`: the host is what peers connect to, and the port is not used, for a free one is drawn. An empty
    /// host is replaced by the address of the first interface that is up.
    ///
    /// With a metadata server, the name by which peers open the engine's segment, any text that no other engine of the cluster has; an empty
    /// one is replaced by the engine's address. Peers connect to `MC_TCP_BIND_ADDRESS`, or else to the address of the first interface that is
    /// up, at a free port that is drawn; with `MC_LEGACY_RPC_PORT_BINDING` the name is `host[:port]`, and that is what they connect to.
    pub server_name: String,
    /// Install the best transport there is at once.
    pub auto_discover: bool,
    /// Names of the NICs that the engine may discover; all where it is empty. `MC_TE_FILTERS` holds as well.
    pub nics: Vec<String>,
    /// Where discovered NICs go, and by which transports choose theirs; the engine's own where not given.
    pub topology: Option<Arc<LiveTopology>>,
}

/// What installing a transport changes of what peers are told.
type HeaderChange = Box<dyn Fn(&mut SegmentHeader)>;

/// How memory is registered.
#[derive(Clone, Debug)]
pub struct MemoryOptions {
    /// NUMA node or device: `*`, `cpu:0`, `cuda:1`, or any other text.
    pub location: Arc<str>,
    /// Whether peers may read and write it.
    pub remote_accessible: bool,
    /// Whether the very same registration again counts a reference. Both must ask for it.
    pub counted: bool,
    /// Whether devices register it side by side; as the configuration says where nothing is given.
    pub parallelism: Option<Parallelism>,
    /// Whether a metadata server has to know of it before the registration returns. Otherwise it learns of it with the next change that is
    /// published.
    pub publish: bool,
}

/// A registered range, of this process or of a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionInfo {
    /// First byte.
    pub address: u64,
    /// Bytes.
    pub length: u64,
    /// See [`MemoryOptions::location`]; of a peer over TCP it is the peer's name.
    pub location: Arc<str>,
    /// Whether peers may read and write it.
    pub remote_accessible: bool,
}

impl RegionInfo {
    fn of(region: &Region) -> RegionInfo {
        RegionInfo {
            address: region.range().address(),
            length: region.range().length(),
            location: region.location().clone(),
            remote_accessible: region.remote_accessible(),
        }
    }
}

/// What a registration took.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DetailedCost {
    /// The figures.
    pub cost: RegistrationCost,
    /// Names of the devices, in the order of [`RegistrationCost::pinning`].
    pub devices: Vec<String>,
}

/// An engine. Any thread may call anything at any time.
pub struct Engine {
    this: Weak<Engine>,
    config: Config,
    counters: Arc<Counters>,
    name: String,
    /// Where the handshake channel is.
    location: HostPort,
    /// With a metadata server.
    presence: Option<Presence>,
    registry: Arc<Registry>,
    registrar: Registrar,
    card: Arc<Card>,
    fetcher: Arc<Fetcher>,
    segments: Segments,
    own_segment: Arc<dyn Segment>,
    transports: RwLock<Vec<Arc<dyn Transport>>>,
    watchers: Arc<Watchers>,
    batches: BatchTable,
    /// With their arenas.
    pools: Mutex<Vec<(Arc<Pool>, Arc<Region>)>>,
    nics: Vec<String>,
    topology: Arc<LiveTopology>,
    server: Server,
    background: Background,
    periodic: Mutex<Vec<Periodic>>,
    exporter: Mutex<Option<Exporter>>,
    closed: AtomicBool,
}

impl Engine {
    /// Makes an engine that peers can reach as soon as a transport is installed. With a metadata server it blocks until that has its address, for
    /// up to five seconds.
    ///
    /// Errors: InvalidArgument for a name that is no host where it must be one, or where no interface is up; those of [`store::connect`];
    /// Metadata when the metadata server does not take the address, Socket when no port is free, Limit when the process is out of descriptors or
    /// threads.
    pub fn create(options: &EngineOptions, config: Config) -> Result<Arc<Engine>> {
        let store = match options.metadata.as_str() {
            PEER_TO_PEER => None,
            uri => Some(store::connect(uri, &config)?),
        };
        Engine::create_with(options, config, store, presence::CHECK_INTERVAL)
    }

    fn create_with(
        options: &EngineOptions,
        config: Config,
        store: Option<Arc<dyn Store>>,
        check_interval: Duration,
    ) -> Result<Arc<Engine>> {
        if let Err(error) = limits::raise_open_files() {
            tracing::info!("the limit on open files stays as it is: {error}");
        }
        let directory = store.map(|store| Arc::new(Directory::new(store, &config.metadata_cluster_id)));
        let (location, listener) = match &directory {
            Some(_) => take_place(&options.server_name, &config)?,
            None => take_peer_to_peer_place(&options.server_name, &config)?,
        };
        let name = match &directory {
            Some(_) if !options.server_name.is_empty() => options.server_name.clone(),
            _ => location.to_string(),
        };
        let header = SegmentHeader {
            name: name.clone(),
            protocol: "tcp".into(),
            tcp_data_host: location.host.clone(),
            tcp_data_port: 0,
            tcp_proto_version: 1,
            rdma: None,
        };
        let counters = Arc::new(Counters::default());
        let registry = Arc::new(Registry::new());
        let card = Arc::new(Card::new(registry.clone(), counters.clone()));
        let fetcher = Arc::new(Fetcher {
            client: Client::new(&config)?,
            counters: counters.clone(),
            default_port: config.handshake_port,
            directory: directory.clone(),
            own: RwLock::new(header),
        });
        let presence = directory.map(|directory| Presence::new(directory, &name, location.clone(), card.clone()));
        let server = Server::start(listener, card.clone(), &config)?;
        let engine = Arc::new_cyclic(|this| Engine {
            this: this.clone(),
            counters: counters.clone(),
            name,
            location,
            presence,
            registrar: Registrar::new(registry.clone(), counters, &config),
            registry,
            card,
            segments: Segments::new(fetcher.clone()),
            fetcher,
            own_segment: Arc::new(OwnSegment),
            transports: RwLock::default(),
            watchers: Arc::default(),
            batches: BatchTable::default(),
            pools: Mutex::default(),
            nics: options.nics.clone(),
            topology: options.topology.clone().unwrap_or_else(|| Arc::new(LiveTopology::new(config.topology.round_robin))),
            server,
            background: Background::new("te-notify"),
            periodic: Mutex::default(),
            exporter: Mutex::default(),
            closed: AtomicBool::new(false),
            config,
        });
        // What fails takes back what the server has been told, in the same time.
        store::bounded(move || {
            engine.start(options, check_interval)?;
            tracing::info!("engine {} is ready", engine.name);
            Ok(engine)
        })
    }

    /// Tells a metadata server where the engine is, and starts what it begins with. Its handshake channel listens already.
    fn start(&self, options: &EngineOptions, check_interval: Duration) -> Result<()> {
        if let Some(presence) = &self.presence {
            presence.announce()?;
        }
        if options.auto_discover || self.config.force_tcp {
            self.install_best(None)?;
        }
        if self.presence.is_some() {
            let check = |engine: &Engine| engine.presence.iter().for_each(|presence| presence.check(&engine.fetcher.client));
            self.periodic.lock().push(Periodic::start("te-metadata", check_interval, self.this.clone(), check)?);
        }
        if let Some(interval) = self.config.metadata_refresh_interval {
            let refresh = |engine: &Engine| drop(engine.refresh_all_segments());
            self.periodic.lock().push(Periodic::start("te-refresh", interval, self.this.clone(), refresh)?);
        }
        if self.config.metrics_directory.is_some() {
            // The failure is logged: an engine is not to be lost for want of somebody who looks at it.
            let _ = self.serve_metrics(None);
        }
        if self.config.metric {
            let mut throughput = Throughput::since_now(&self.counters);
            let report = move |engine: &Engine| tracing::info!("{}: {}", engine.name, throughput.report(&engine.counters));
            let interval = self.config.metric_interval;
            self.periodic.lock().push(Periodic::start("te-metric", interval, self.this.clone(), report)?);
        }
        Ok(())
    }

    /// A reference that does not keep the engine alive.
    pub fn downgrade(&self) -> Weak<Engine> {
        self.this.clone()
    }

    /// What the environment said when the engine was made.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What the engine has counted.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// `host:port` of the handshake channel, IPv6 literals in brackets. With `P2PHANDSHAKE` it is the name that peers open; with a metadata
    /// server they open [`Engine::name`].
    pub fn address(&self) -> String {
        self.location.to_string()
    }

    /// Name of the own segment.
    pub fn name(&self) -> String {
        self.name.clone()
    }

    fn check_open(&self) -> Result<()> {
        match self.closed.load(Ordering::Acquire) {
            false => Ok(()),
            true => Err(Error::quiet(Code::Canceled, "the engine is being destroyed")),
        }
    }

    /// Installs `tcp` or `rdma`, or does nothing if it is installed; `auto` is the best of them, by what is discovered. All memory registered
    /// so far becomes known to it. On an error nothing has changed, but for what was discovered. `topology`: a NIC priority matrix as JSON, which
    /// replaces the one at hand, and discovery.
    ///
    /// Errors: NotImplemented for other protocols, MalformedJson for the matrix, Socket and Limit when it cannot listen, DeviceNotFound where
    /// there is no NIC that can be used, what a device answers to memory that is registered already, and Metadata when it cannot be published.
    pub fn install_transport(&self, protocol: &str, topology: Option<&str>) -> Result<()> {
        if protocol == AUTO {
            return self.install_best(topology);
        }
        let mut transports = self.transports.write();
        self.check_open()?;
        if transports.iter().any(|transport| transport.protocol() == protocol) {
            return Ok(());
        }
        if !["tcp", "rdma"].contains(&protocol) {
            let text = format!("there is no transport named '{protocol}'; install \"tcp\", \"rdma\" or \"auto\"");
            return Err(Error::new(Code::NotImplemented, text));
        }
        let topology = topology.map(Topology::parse).transpose()?;
        let matrix = topology.clone().unwrap_or_else(|| self.topology.current());
        // Devices take the time that they take.
        let (transport, change_header) = store::uncounted(|| match protocol {
            "tcp" => self.start_tcp(),
            _ => self.start_rdma(matrix),
        })?;
        self.attach(&mut transports, transport, topology, &*change_header)
    }

    /// Installs a transport of the program's own instead of the engine's, and nothing if its protocol is installed. Segments of peers with this
    /// protocol are reached by it; what peers are told does not change.
    ///
    /// Errors: what a device answers to memory that is registered already; then nothing has changed.
    pub fn install_own_transport(&self, transport: Arc<dyn Transport>) -> Result<()> {
        let mut transports = self.transports.write();
        self.check_open()?;
        if transports.iter().any(|other| other.protocol() == transport.protocol()) {
            return Ok(());
        }
        self.attach(&mut transports, transport, None, &|_| {})
    }

    /// Makes all memory known to the transport, and tells peers.
    fn attach(
        &self,
        transports: &mut Vec<Arc<dyn Transport>>,
        transport: Arc<dyn Transport>,
        topology: Option<Topology>,
        change_header: &dyn Fn(&mut SegmentHeader),
    ) -> Result<()> {
        let mut header = self.fetcher.own.read().clone();
        change_header(&mut header);
        let attach = || {
            self.registrar.attach_live(&transport, |keys| match &self.presence {
                Some(presence) => presence.write(self.card.describe_as(&header, keys)),
                None => Ok(()),
            })?;
            if let Some(topology) = topology {
                self.topology.replace(topology);
            }
            if transports.is_empty() {
                transports.push(Arc::new(LocalTransport::new(self.registry.clone(), self.config.checked_local_copy)));
            }
            self.card.add_acceptor(&transport);
            transports.push(transport.clone());
            // Both with the lock, as whoever changes it later does.
            let mut own = self.fetcher.own.write();
            change_header(&mut own);
            self.card.publish(own.clone());
            // A NIC may have changed meanwhile, or come back and been given memory.
            if let Some(presence) = self.presence.as_ref().filter(|_| own.rdma.is_some()) {
                presence.touch();
            }
            Ok(())
        };
        match &self.presence {
            Some(presence) => presence.install(attach),
            None => attach(),
        }
        .inspect_err(|error| transport.shutdown(error.clone()))
    }

    /// A transport, and how what peers are told changes once it is installed.
    fn start_tcp(&self) -> Result<(Arc<dyn Transport>, HeaderChange)> {
        let listener = Listener::draw_data(&self.config)?;
        let tcp = TcpTransport::start(
            listener.into_std()?,
            self.registry.clone(),
            self.counters.clone(),
            self.watchers.clone(),
            &self.config,
        )?;
        let port = tcp.port();
        let change = move |header: &mut SegmentHeader| (header.tcp_data_port, header.tcp_proto_version) = (port, 2);
        Ok((tcp, Box::new(change)))
    }

    #[cfg(feature = "rdma")]
    fn start_rdma(&self, topology: Topology) -> Result<(Arc<dyn Transport>, HeaderChange)> {
        let topology = match topology.nics().is_empty() {
            false => topology,
            true => self.find_topology(),
        };
        let rdma = RdmaTransport::start(&self.name, topology, self.counters.clone(), self.watchers.clone(), &self.config)?;
        let transport: Arc<dyn Transport> = rdma.clone();
        let observer: Weak<dyn rdma::Observer> = self.this.clone();
        // Before its NICs learn of memory: one that comes back meanwhile learns of it, too.
        rdma.observe(observer);
        // Peers use the one protocol that a descriptor names, and can do more with this one.
        let change = move |header: &mut SegmentHeader| (header.protocol, header.rdma) = ("rdma".into(), Some(rdma.header()));
        Ok((transport, Box::new(change)))
    }

    #[cfg(not(feature = "rdma"))]
    fn start_rdma(&self, _topology: Topology) -> Result<(Arc<dyn Transport>, HeaderChange)> {
        let text = "this library was built without RDMA (Cargo feature rdma); install \"tcp\"";
        Err(Error::new(Code::NotImplemented, text))
    }

    /// What each NIC is doing; nothing without RDMA.
    pub fn nic_loads(&self) -> Vec<NicLoad> {
        self.transports.read().iter().flat_map(|transport| transport.loads()).collect()
    }

    /// Installs RDMA where the topology, given or discovered, names a NIC and it can be used, else TCP.
    fn install_best(&self, topology: Option<&str>) -> Result<()> {
        let config = &self.config;
        if let Some(text) = topology {
            self.topology.replace(Topology::parse(text)?);
        } else if !config.force_tcp {
            self.topology.replace(self.find_topology());
        }
        let has_nic = !self.topology.current().nics().is_empty();
        if !config.force_tcp && (has_nic || config.topology.force_rdma) {
            match self.install_transport("rdma", None) {
                Err(_) if !config.topology.force_rdma => tracing::warn!("RDMA cannot be used; TCP is installed instead"),
                outcome => return outcome,
            }
        }
        self.install_transport("tcp", None)
    }

    /// Whether the transport is installed.
    pub fn has_transport(&self, protocol: &str) -> bool {
        self.transports.read().iter().any(|transport| transport.protocol() == protocol)
    }

    /// Finds out which NICs serve which memory, for [`Engine::show_links`].
    pub fn discover_topology(&self) -> Result<()> {
        self.check_open()?;
        self.topology.replace(Topology::discover(&Machine::default(), &[&self.config.topology.filters, &self.nics]));
        Ok(())
    }

    fn find_topology(&self) -> Topology {
        Topology::find(&Machine::default(), &self.config.topology, &self.nics)
    }

    /// Which NICs serve which memory, as discovered, parsed or given. A change holds for transports that are installed later.
    pub fn topology(&self) -> &Arc<LiveTopology> {
        &self.topology
    }

    /// A description of the NICs and of what they serve, for people or as JSON.
    pub fn show_links(&self, json: bool) -> String {
        let topology = self.topology.current();
        let mut links = topology.links(&Machine::default(), self.config.rdma.port, self.config.rdma.gid_index);
        let in_use: Vec<_> = self.transports.read().iter().flat_map(|transport| transport.links()).collect();
        for link in &mut links {
            if let Some(used) = in_use.iter().find(|used| used.device == link.device) {
                *link = used.clone();
            }
        }
        topology.show(&links, json)
    }

    /// Registers memory with all installed transports, and with those that are installed later.
    ///
    /// Errors: InvalidArgument (empty, or at address 0), AddressOverlapped, what a transport answers, and Metadata when it could not be
    /// published; then nothing has changed.
    pub fn register(&self, range: MemoryRange, options: &MemoryOptions) -> Result<()> {
        let region = {
            let transports = self.transports.read();
            self.check_open()?;
            self.registrar.register(range, &region_options(options), options.parallelism, &transports)?
        };
        match &self.presence {
            Some(presence) if options.publish => self.publish_registered(presence, std::slice::from_ref(&region)),
            _ => Ok(()),
        }
    }

    /// Registers all ranges or none.
    pub fn register_batch(&self, ranges: &[MemoryRange], options: &MemoryOptions) -> Result<()> {
        let regions = {
            let transports = self.transports.read();
            self.check_open()?;
            self.registrar.register_batch(ranges, &region_options(options), options.parallelism, &transports)?
        };
        match &self.presence {
            Some(presence) if options.publish && !regions.is_empty() => self.publish_registered(presence, &regions),
            _ => Ok(()),
        }
    }

    /// Publishes what has been registered, or unregisters it. Not inlined: without a metadata server a registration is all that a call does.
    #[inline(never)]
    fn publish_registered(&self, presence: &Presence, regions: &[Arc<Region>]) -> Result<()> {
        let begin = Instant::now();
        let published = presence.publish();
        let spent = begin.elapsed();
        self.counters.registration_publishing_ns.add(u64::try_from(spent.as_nanos()).unwrap_or(u64::MAX));
        let Err(error) = published else {
            regions.iter().for_each(|region| region.set_publishing(spent));
            return Ok(());
        };
        let revoked = self.registrar.revoke(regions, &self.transports.read());
        // The server may have been told of them all the same.
        presence.touch();
        let consequence = match revoked {
            Ok(()) => "so nothing was registered".to_string(),
            Err(error) => format!("so it was to be unregistered again, but {}", error.message()),
        };
        Err(Error::quiet(error.code(), format!("{}; {consequence}", error.message())))
    }

    /// Unregisters the region that starts at `address`. When it returns without an error not one byte of the region moves any more.
    ///
    /// Errors: AddressNotRegistered; BatchBusy if transfers did not end within five seconds: call again; Metadata if a metadata server could
    /// not be told, which is tried again in the background: the memory is released all the same.
    pub fn unregister(&self, address: u64) -> Result<()> {
        let outcome = {
            let transports = self.transports.read();
            self.check_open()?;
            self.registrar.unregister(address, &transports)
        };
        match outcome {
            // Nothing has changed.
            Err(error) if error.code() == Code::AddressNotRegistered => Err(error),
            outcome => self.publish_unregistered(outcome),
        }
    }

    /// Unregisters all that can be unregistered, and returns the first error.
    pub fn unregister_batch(&self, addresses: &[u64]) -> Result<()> {
        let outcome = {
            let transports = self.transports.read();
            self.check_open()?;
            self.registrar.unregister_batch(addresses, &transports)
        };
        self.publish_unregistered(outcome)
    }

    /// Publishes what is left, also where not all could be unregistered; nothing is written where nothing has changed.
    fn publish_unregistered(&self, outcome: Result<()>) -> Result<()> {
        match &self.presence {
            Some(presence) => outcome.and(presence.publish().map_err(|error| {
                let text = format!("{}; the memory is released all the same, and the server is told later", error.message());
                Error::quiet(error.code(), text)
            })),
            None => outcome,
        }
    }

    /// The region that contains the address, in any state in which it blocks its range.
    pub fn find_region(&self, address: u64) -> Option<RegionInfo> {
        self.registry.read(|view| view.find(address).map(RegionInfo::of))
    }

    /// A region that has a byte in common with the range, in any state in which it blocks its own, also while it is being registered.
    pub fn find_overlap(&self, range: MemoryRange) -> Option<RegionInfo> {
        self.registry.read(|view| view.find_overlap(range).map(RegionInfo::of))
    }

    /// Has a metadata server told of all registrations and unregistrations so far, and returns when it knows them. Without one there is
    /// nothing to do. Errors: Metadata.
    pub fn publish(&self) -> Result<()> {
        self.check_open()?;
        self.presence.as_ref().map_or(Ok(()), Presence::publish)
    }

    /// Writes to a metadata server, whatever is there, where this engine is reached. Without one there is nothing to do. Errors: Metadata.
    pub fn publish_address(&self) -> Result<()> {
        self.check_open()?;
        self.presence.as_ref().map_or(Ok(()), |presence| store::bounded(|| presence.announce()))
    }

    /// What registering the region that contains the address took. `None` if no region does, or neither a device nor a metadata server knows
    /// it: then there was nothing to be waited for.
    pub fn registration_cost(&self, address: u64) -> Option<DetailedCost> {
        let transports = self.transports.read();
        let devices = transports.iter().flat_map(|transport| transport.devices()).map(|device| device.name().to_string()).collect();
        let cost = self.registry.read(|view| view.find(address).and_then(Region::cost))?;
        Some(DetailedCost { cost, devices })
    }

    /// All live regions in the order of registration.
    pub fn regions(&self) -> Vec<RegionInfo> {
        self.registry.live().iter().map(|region| RegionInfo::of(region)).collect()
    }

    /// Number of regions that block their range, in whatever state.
    pub fn region_count(&self) -> usize {
        self.registry.len()
    }

    /// Opens a segment by its name; leading slashes are ignored. The own name is segment 0. A name that was opened before is answered
    /// from the cache. Asking a peer blocks for up to the handshake time-outs, a metadata server for up to five seconds.
    ///
    /// Errors: InvalidArgument for an empty name or an engine without transports; Dns, Socket, MalformedJson, Metadata from asking.
    pub fn open_segment(&self, name: &str) -> Result<u64> {
        let name = stripped(name)?;
        self.check_open()?;
        if self.transports.read().is_empty() {
            let text = format!("cannot open segment {name}: no transport is installed; install \"tcp\" or \"rdma\" first");
            return Err(Error::new(Code::InvalidArgument, text));
        }
        if name == self.name {
            return Ok(LOCAL_SEGMENT);
        }
        Ok(self.segments.open(name)?.id())
    }

    /// Like [`Engine::open_segment`], after asking the peer anew if the name is in the cache. If that fails the old descriptor stays.
    pub fn open_segment_fresh(&self, name: &str) -> Result<u64> {
        self.check_open()?;
        if let Some(segment) = self.segments.find(stripped(name)?) {
            // The failure is logged; the segment stays usable as it is.
            let _ = segment.refresh();
        }
        self.open_segment(name)
    }

    /// Asks for the segment's descriptor anew.
    pub fn refresh_segment(&self, id: u64) -> Result<()> {
        self.check_open()?;
        if id != LOCAL_SEGMENT {
            self.segments.get(id)?.refresh()?;
        }
        Ok(())
    }

    /// Asks for the descriptors of all opened segments anew, one after the other. Where that fails, such as for a peer that has vanished, the
    /// descriptor stays, and the failure is logged with the segment's name. The number of such segments.
    pub fn refresh_all_segments(&self) -> Result<usize> {
        let mut failures = 0;
        for segment in self.segments.all() {
            self.check_open()?;
            failures += usize::from(segment.refresh().is_err());
        }
        Ok(failures)
    }

    /// Forgets an opened segment: its id becomes invalid, its connections close when idle, and opening it again asks the peer.
    /// An unknown name is no error.
    pub fn forget_segment(&self, name: &str) -> Result<()> {
        let name = stripped(name)?;
        self.check_open()?;
        if let Some(segment) = self.segments.remove(name) {
            for transport in self.transports.read().iter() {
                transport.forget(segment.id());
            }
        }
        Ok(())
    }

    /// The segment's registered memory as far as it is known here, in the peer's order of registration.
    pub fn segment_buffers(&self, id: u64) -> Result<Vec<RegionInfo>> {
        self.check_open()?;
        if id == LOCAL_SEGMENT {
            return Ok(self.regions());
        }
        let info = |buffer: &crate::metadata::BufferDescriptor| RegionInfo {
            address: buffer.address,
            length: buffer.length,
            location: buffer.name.clone(),
            remote_accessible: true,
        };
        Ok(self.segments.get(id)?.descriptor().buffers.iter().map(info).collect())
    }

    /// The segment's descriptor as peers and metadata servers exchange it, as far as it is known here. Metadata for the own one as long as no
    /// transport is installed: there is none yet.
    pub fn segment_json(&self, id: u64) -> Result<String> {
        self.check_open()?;
        if id != LOCAL_SEGMENT {
            return Ok(self.segments.get(id)?.descriptor().to_json());
        }
        let pieces = self.card.describe().ok_or_else(|| {
            Error::quiet(Code::Metadata, "the own segment has no descriptor before a transport is installed; install one")
        })?;
        let mut text = pieces.concat();
        text.truncate(text.trim_end().len());
        Ok(text)
    }

    /// The name by which the segment was opened.
    pub fn segment_name(&self, id: u64) -> Result<String> {
        match id {
            LOCAL_SEGMENT => Ok(self.name()),
            id => Ok(self.segments.get(id)?.name().to_string()),
        }
    }

    /// Makes a batch with room for `capacity` tasks.
    pub fn allocate_batch(&self, capacity: usize) -> Result<Arc<Batch>> {
        self.check_open()?;
        let host: Weak<dyn BatchHost> = self.this.clone();
        let batch = self.batches.insert(|id| Batch::new(id, capacity, host, self.counters.clone()))?;
        self.counters.batches_allocated.add(1);
        Ok(batch)
    }

    /// The batch of that id. InvalidHandle if there is none (any more).
    pub fn batch(&self, id: u64) -> Result<Arc<Batch>> {
        self.batches.get(id).ok_or_else(|| unknown_batch(id))
    }

    /// Adds tasks to the batch and starts them; all or nothing. The notification, if any, goes to the first request's segment when the whole batch
    /// has completed.
    ///
    /// Errors: TooManyRequests, InvalidArgument (unknown segment), NotSupportedTransport, AddressNotRegistered (local memory that is being
    /// unregistered), Canceled.
    pub fn submit(
        &self,
        batch: &Arc<Batch>,
        requests: &[Request],
        notification: Option<Notification>,
        options: SubmitOptions,
    ) -> Result<()> {
        if self.config.disable_metacache {
            self.refresh_targets(requests)?;
        }
        let transports = self.transports.read();
        self.check_open()?;
        let route = |segment| self.route(&transports, segment);
        let stall = self.config.slice_timeout.unwrap_or(self.config.tcp_status_timeout);
        transfer::submit(batch, &self.registry, &route, requests, notification, options, stall)
    }

    /// Asks for the descriptors of all segments that the requests go to. Under no lock: it may take seconds.
    fn refresh_targets(&self, requests: &[Request]) -> Result<()> {
        let mut segments: Vec<u64> = requests.iter().map(|request| request.segment).collect();
        segments.sort_unstable();
        segments.dedup();
        segments.into_iter().try_for_each(|segment| self.refresh_segment(segment))
    }

    fn route(&self, transports: &[Arc<dyn Transport>], segment: u64) -> Result<Route> {
        let installed = |protocol: &str| transports.iter().find(|transport| transport.protocol() == protocol).cloned();
        if segment == LOCAL_SEGMENT {
            let transport = installed("local").ok_or_else(|| {
                Error::new(Code::NotSupportedTransport, "no transport is installed; install \"tcp\" or \"rdma\" first")
            })?;
            return Ok(Route { transport, segment: self.own_segment.clone() });
        }
        let segment = self.segments.get(segment)?;
        let protocols = segment.descriptor().protocols.clone();
        let transport = protocols.iter().find_map(|protocol| installed(protocol)).ok_or_else(|| {
            let text = format!("segment {} is reached by {}, which is not installed here", segment.name(), protocols.join(", "));
            Error::new(Code::NotSupportedTransport, text)
        })?;
        Ok(Route { transport, segment })
    }

    /// Frees a batch. BatchBusy while a task is not terminal; InvalidHandle if there is no such batch.
    pub fn free_batch(&self, id: u64) -> Result<()> {
        if !self.batch(id)?.close() {
            let text = format!("batch {id:#x} has unfinished tasks; wait for them or cancel them first");
            return Err(Error::quiet(Code::BatchBusy, text));
        }
        self.batches.remove(id).ok_or_else(|| unknown_batch(id))?;
        self.counters.batches_freed.add(1);
        Ok(())
    }

    /// Carries out the requests and returns when all are terminal: one status for each, in order. An error means that nothing was
    /// started.
    pub fn transfer(&self, requests: &[Request], options: SubmitOptions) -> Result<Vec<TaskStatus>> {
        let host: Weak<dyn BatchHost> = self.this.clone();
        let batch = Batch::new(0, requests.len(), host, self.counters.clone());
        self.submit(&batch, requests, None, options)?;
        batch.wait(None);
        Ok((0..requests.len()).filter_map(|task| batch.task_status(task)).collect())
    }

    /// Makes a pool of staging buffers and registers its arena, once, for transfers of this engine alone.
    ///
    /// Errors: those of [`Pool::new`], and of [`Engine::register`]; then nothing is left of it.
    pub fn create_pool(&self, options: &PoolOptions) -> Result<Arc<Pool>> {
        self.check_open()?;
        let pool = Arc::new(Pool::new(options)?);
        // Peers have no use for it, so they are not told.
        let options =
            RegionOptions { location: pool.location().clone(), remote_accessible: false, counted: false, owner: Owner::Pool };
        let transports = self.transports.read();
        // With the lock: whoever shuts the engine down finds the pool, or is seen here, and then nothing moves.
        self.check_open()?;
        let arena = self.registrar.register(pool.arena(), &options, None, &transports)?;
        self.pools.lock().push((pool.clone(), arena));
        Ok(pool)
    }

    /// Closes a pool of this engine when all its leases are back, waiting for up to `limit` (`None`: for as long as it takes), and unregisters
    /// its arena, which may take five seconds more if a transfer uses it without a lease.
    ///
    /// Errors: BatchBusy if a lease is out or quarantined, or a transfer does not end: the pool stays; InvalidHandle if it is closed; what a
    /// device answers that keeps the arena: then it is closed, and the arena stays mapped and blocked.
    pub fn close_pool(&self, pool: &Arc<Pool>, limit: Option<Duration>) -> Result<()> {
        pool.close(limit)?;
        let transports = self.transports.read();
        if self.check_open().is_err() {
            // The engine gives the arena up when no byte moves.
            return Ok(());
        }
        let arena = self.pools.lock().iter().find(|(other, _)| Arc::ptr_eq(other, pool)).map(|(_, arena)| arena.clone());
        let Some(arena) = arena else { return Ok(()) };
        match self.registrar.give_back_references(std::slice::from_ref(&arena), &transports) {
            Ok(()) => self.pools.lock().retain(|(other, _)| !Arc::ptr_eq(other, pool)),
            Err(error) => {
                if error.code() == Code::BatchBusy {
                    pool.reopen();
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Gives the kernel back the free memory of a pool of this engine. How many bytes that were: none where devices have registered it, since
    /// they keep what they know.
    pub fn trim_pool(&self, pool: &Pool) -> u64 {
        // Held: no device comes meanwhile.
        let transports = self.transports.read();
        match transports.iter().all(|transport| transport.devices().is_empty()) {
            true => pool.trim(),
            false => 0,
        }
    }

    /// Sends a message to the engine of an opened segment and waits for its reply. The own segment works, too.
    ///
    /// Errors: InvalidArgument (unknown segment), Dns, Socket, MalformedJson, Metadata (refused).
    pub fn send_notification(&self, segment: u64, notification: &Notification) -> Result<()> {
        self.check_open()?;
        if segment == LOCAL_SEGMENT {
            return self.card.receive(notification.clone());
        }
        let segment = self.segments.get(segment)?;
        self.notify_peer(segment.place(), notification)
    }

    fn notify_peer(&self, peer: &Place, notification: &Notification) -> Result<()> {
        self.fetcher.client.notify(peer, notification)?;
        self.counters.notifications_sent.add(1);
        Ok(())
    }

    /// Like [`Engine::send_notification`], to a name that need not be opened.
    pub fn send_notification_to(&self, name: &str, notification: &Notification) -> Result<()> {
        let name = stripped(name)?;
        self.check_open()?;
        if name == self.name {
            return self.card.receive(notification.clone());
        }
        self.notify_peer(&self.fetcher.place(name), notification)
    }

    /// Has a metadata server told of what has changed, without waiting for it.
    #[cfg(feature = "rdma")]
    fn publish_soon(&self) {
        let Some(presence) = &self.presence else { return };
        // Where nobody can be found to do it at once, or it fails, it is done with the next look at the server.
        presence.touch();
        let this = self.this.clone();
        let _ = self.background.run(move || {
            let Some(engine) = this.upgrade() else { return };
            let _ = engine.presence.as_ref().map(Presence::publish);
        });
    }

    /// Takes all messages that have arrived, in order of arrival.
    pub fn take_notifications(&self) -> Vec<Notification> {
        self.card.take_notifications()
    }

    /// Asks whether the segment's engine is alive.
    pub fn probe(&self, segment: u64) -> Result<()> {
        self.check_open()?;
        match segment {
            LOCAL_SEGMENT => Ok(()),
            segment => self.fetcher.client.probe(self.segments.get(segment)?.place()),
        }
    }

    /// Asks whether the engine of that name is alive; it need not be opened.
    pub fn probe_name(&self, name: &str) -> Result<()> {
        let name = stripped(name)?;
        self.check_open()?;
        match name == self.name {
            true => Ok(()),
            false => self.fetcher.client.probe(&self.fetcher.place(name)),
        }
    }

    /// Ends everything: requests to peers are broken off, tasks end as cancelled, waiters wake, threads stop. Calls that come later
    /// answer Canceled. At last a metadata server forgets the engine; up to some ten seconds are waited for one that does not answer. When it
    /// returns no byte moves any more; only a second call that comes meanwhile returns at once.
    pub fn shutdown(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        let periodic = std::mem::take(&mut *self.periodic.lock());
        periodic.iter().for_each(Periodic::order_stop);
        // Taken out first: dropping waits for its thread.
        let exporter = self.exporter.lock().take();
        drop(exporter);
        self.fetcher.client.cancel();
        self.server.stop();
        let reason = Error::quiet(Code::Canceled, "the engine was destroyed");
        // A submission may hold the list while it waits for nothing but locks; an installation sees `closed` when it is done.
        let transports = std::mem::take(&mut *self.transports.write());
        for transport in transports {
            transport.shutdown(reason.clone());
        }
        // No byte moves any more. Their arenas go with their last users.
        std::mem::take(&mut *self.pools.lock()).iter().for_each(|(pool, _)| pool.invalidate());
        // Nobody is to wait for a server in it.
        self.presence.iter().for_each(Presence::close);
        self.background.close();
        // Last: a server that does not answer keeps nobody waiting for the end of a transfer.
        if let Some(presence) = &self.presence {
            presence.withdraw();
        }
        periodic.into_iter().for_each(Periodic::join);
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl BatchHost for Engine {
    fn sweep_cancelled(&self) {
        for transport in self.transports.read().iter() {
            transport.cancel();
        }
    }

    fn poll(&self) {
        for transport in self.transports.read().iter() {
            transport.poll();
        }
    }

    fn begin_watch(&self) {
        self.watchers.begin();
        for transport in self.transports.read().iter() {
            transport.watch();
        }
    }

    fn end_watch(&self) {
        self.watchers.end();
    }

    fn send_notifications(&self, messages: Vec<(u64, Notification)>, after: Box<dyn Send>) {
        let this = self.this.clone();
        // If the job never runs it is dropped, and `after` with it.
        let _ = self.background.run(move || {
            for (segment, notification) in messages {
                if let Some(engine) = this.upgrade() {
                    // The failure is logged where it is found; the transfer itself has succeeded.
                    let _ = engine.send_notification(segment, &notification);
                }
            }
            drop(after);
        });
    }
}

#[cfg(feature = "rdma")]
impl rdma::Observer for Engine {
    fn header_changed(&self, header: &dyn Fn() -> crate::metadata::RdmaHeader) {
        let mut own = self.fetcher.own.write();
        // Before that, whoever installs the transport asks for it.
        if own.rdma.is_some() {
            own.rdma = Some(header());
            self.card.publish(own.clone());
            drop(own);
            self.publish_soon();
        }
    }

    fn attach_memory(&self, position: usize, device: &dyn Device, is_wanted: &dyn Fn() -> bool) {
        self.registrar.attach_device(position, device, is_wanted);
        self.publish_soon();
    }
}

/// The address at which peers find an engine without a metadata server, by its name: the port is drawn, so one that is given, right or wrong,
/// is of no consequence.
fn take_peer_to_peer_place(server_name: &str, config: &Config) -> Result<(HostPort, Listener)> {
    let given = HostPort::parse_host(server_name);
    if given.contains(|c: char| c.is_whitespace() || c.is_control() || c == '/') {
        let text = format!("'{}' is no host name: the server's name is what peers connect to", server_name.escape_debug());
        return Err(Error::new(Code::InvalidArgument, text));
    }
    let host = match given {
        host if !host.is_empty() => host,
        _ => match find_local_address(config.use_ipv6) {
            Some(address) => address.to_string(),
            None => {
                let loopback = if config.use_ipv6 { "::1" } else { "127.0.0.1" };
                tracing::warn!(
                    "no network interface is up: only this machine can reach the engine, at {loopback}; give a host otherwise"
                );
                loopback.into()
            }
        },
    };
    let listener = Listener::draw(config)?;
    Ok((HostPort { host, port: listener.port() }, listener))
}

/// The address that a metadata server is told of.
fn take_place(server_name: &str, config: &Config) -> Result<(HostPort, Listener)> {
    if config.legacy_rpc_port_binding {
        let place = HostPort::parse(server_name, config.handshake_port);
        if place.host.is_empty() {
            let text = "the server's name has no host, which MC_LEGACY_RPC_PORT_BINDING takes from it; give \"host:port\"";
            return Err(Error::new(Code::InvalidArgument, text));
        }
        let listener = Listener::bind(config, place.port)?;
        return Ok((HostPort { port: listener.port(), ..place }, listener));
    }
    let host = match &config.tcp_bind_address {
        Some(host) => host.clone(),
        None => find_local_address(config.use_ipv6).map(|address| address.to_string()).ok_or_else(|| {
            let text =
                "no network interface is up, so peers could not connect; set MC_TCP_BIND_ADDRESS to the host that they are to use";
            Error::new(Code::InvalidArgument, text)
        })?,
    };
    let listener = Listener::draw(config)?;
    Ok((HostPort { host, port: listener.port() }, listener))
}

fn region_options(options: &MemoryOptions) -> RegionOptions {
    RegionOptions {
        location: options.location.clone(),
        remote_accessible: options.remote_accessible,
        counted: options.counted,
        owner: Owner::Program,
    }
}

fn stripped(name: &str) -> Result<&str> {
    match name.trim_start_matches('/') {
        "" => Err(Error::new(
            Code::InvalidArgument,
            "the segment's name is empty; give what te_engine_address tells of the peer, or its name at the metadata server",
        )),
        name => Ok(name),
    }
}

fn unknown_batch(id: u64) -> Error {
    Error::new(Code::InvalidHandle, format!("there is no batch {id:#x}: it was freed, or belongs to another engine"))
}

/// The own segment, for [`LocalTransport`], which needs nothing of it.
struct OwnSegment;

impl Segment for OwnSegment {
    fn id(&self) -> u64 {
        LOCAL_SEGMENT
    }

    fn descriptor(&self) -> Arc<SegmentDescriptor> {
        Arc::default()
    }

    fn refresh(&self) -> Result<Arc<SegmentDescriptor>> {
        Ok(self.descriptor())
    }

    fn host(&self) -> Result<String> {
        Ok(String::new())
    }
}
