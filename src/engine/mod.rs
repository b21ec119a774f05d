//! The engine: makes the rooms below into one thing, and owns their life.
//!
//! An engine has a name by which peers open its segment, a registry of its memory, transports, and a cache of the peers it has opened.
//! Peers ask for its descriptor over the handshake channel; the descriptor is put together when it is asked for, from text that is
//! kept for blocks of regions, so registering memory sends nothing.
//!
//! Who locks what: `transports` is read by registrations and submissions and written by [`Engine::install_transport`], which holds
//! it throughout: it excludes registering and unregistering, so a new transport learns of every region exactly once. Everything else
//! has its locks in the rooms.
//!
//! Threads of an idle engine: one for the handshake channel, `TE_TCP_IO_THREADS` for TCP, one for each NIC with RDMA, one more each if
//! `MC_TE_METADATA_REFRESH_INTERVAL_SECONDS` or `MC_TE_METRIC` is set. Up to four more each for finding peers and for notifications come and go.

mod card;
mod periodic;
#[cfg(all(test, feature = "rdma"))]
mod rdma_tests;
mod segments;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, RwLock};

use self::card::Card;
use self::periodic::Periodic;
use self::segments::{Fetcher, Segments};
use crate::config::{Config, Parallelism};
use crate::error::{Code, Error, Result};
use crate::handshake::address::{HostPort, find_local_address};
use crate::handshake::{Client, Listener, Notification, Server};
use crate::metadata::{SegmentDescriptor, SegmentHeader};
use crate::registration::Registrar;
use crate::registry::{Region, RegionOptions, RegistrationCost, Registry};
use crate::sys::background::Background;
use crate::sys::{MemoryRange, limits};
use crate::telemetry::{Counters, Throughput};
use crate::topology::{Machine, Topology};
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

/// Id of the own segment.
pub const LOCAL_SEGMENT: u64 = 0;

/// How an engine is made.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// `P2PHANDSHAKE`. URIs of metadata servers are refused in this version.
    pub metadata: String,
    /// `host[:port]`: the host is what peers connect to. The port is not used with `P2PHANDSHAKE`: a free one is drawn. An empty host
    /// is replaced by the address of the first interface that is up.
    pub server_name: String,
    /// Install the best transport there is at once.
    pub auto_discover: bool,
}

/// What installing a transport changes of what peers are told.
type HeaderChange = Box<dyn FnOnce(&mut SegmentHeader)>;

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
    registry: Arc<Registry>,
    registrar: Registrar,
    card: Arc<Card>,
    fetcher: Arc<Fetcher>,
    segments: Segments,
    own_segment: Arc<dyn Segment>,
    transports: RwLock<Vec<Arc<dyn Transport>>>,
    watchers: Arc<Watchers>,
    batches: BatchTable,
    topology: Mutex<Topology>,
    server: Server,
    background: Background,
    periodic: Mutex<Vec<Periodic>>,
    closed: AtomicBool,
}

impl Engine {
    /// Makes an engine that peers can reach as soon as a transport is installed.
    ///
    /// Errors: NotImplemented for metadata servers, Socket when no port is free, Limit when the process is out of descriptors or threads.
    pub fn create(options: &EngineOptions, config: Config) -> Result<Arc<Engine>> {
        if options.metadata != PEER_TO_PEER {
            let text = format!(
                "metadata server '{}' cannot be used: this version knows {PEER_TO_PEER} only, by which engines find each other by address",
                options.metadata
            );
            return Err(Error::new(Code::NotImplemented, text));
        }
        if let Err(error) = limits::raise_open_files() {
            tracing::info!("the limit on open files stays as it is: {error}");
        }
        // The port is drawn, so one that is given, right or wrong, is of no consequence.
        let given = HostPort::parse_host(&options.server_name);
        if given.contains(|c: char| c.is_whitespace() || c.is_control() || c == '/') {
            let text =
                format!("'{}' is no host name: the server's name is what peers connect to", options.server_name.escape_debug());
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
        let listener = Listener::draw(&config)?;
        let name = HostPort { host: host.clone(), port: listener.port() }.to_string();
        let header = SegmentHeader {
            name: name.clone(),
            protocol: "tcp".into(),
            tcp_data_host: host,
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
            own: RwLock::new(header),
        });
        let server = Server::start(listener, card.clone(), &config)?;
        let engine = Arc::new_cyclic(|this| Engine {
            this: this.clone(),
            counters: counters.clone(),
            name,
            registrar: Registrar::new(registry.clone(), counters, &config),
            registry,
            card,
            segments: Segments::new(fetcher.clone()),
            fetcher,
            own_segment: Arc::new(OwnSegment),
            transports: RwLock::default(),
            watchers: Arc::default(),
            batches: BatchTable::default(),
            topology: Mutex::default(),
            server,
            background: Background::new("te-notify"),
            periodic: Mutex::default(),
            closed: AtomicBool::new(false),
            config,
        });
        if options.auto_discover {
            *engine.topology.lock() = Topology::find(&Machine::default(), &engine.config.topology);
        }
        if options.auto_discover || engine.config.force_tcp {
            engine.install_best()?;
        }
        if let Some(interval) = engine.config.metadata_refresh_interval {
            let refresh = |engine: &Engine| drop(engine.refresh_all_segments());
            engine.periodic.lock().push(Periodic::start("te-refresh", interval, engine.this.clone(), refresh)?);
        }
        if engine.config.metric {
            let mut throughput = Throughput::since_now(&engine.counters);
            let report = move |engine: &Engine| tracing::info!("{}: {}", engine.name, throughput.report(&engine.counters));
            let interval = engine.config.metric_interval;
            engine.periodic.lock().push(Periodic::start("te-metric", interval, engine.this.clone(), report)?);
        }
        tracing::info!("engine {} is ready", engine.name);
        Ok(engine)
    }

    /// What the environment said when the engine was made.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What the engine has counted.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// `host:port` of the handshake channel, IPv6 literals in brackets. With `P2PHANDSHAKE` it is the name that peers open.
    pub fn address(&self) -> String {
        self.name.clone()
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

    /// Installs `tcp` or `rdma`, or does nothing if it is installed. All memory registered so far becomes known to it. On an error nothing has
    /// changed. `topology`: a NIC priority matrix as JSON, which replaces the one at hand.
    ///
    /// Errors: NotImplemented for other protocols, MalformedJson for the matrix, Socket and Limit when it cannot listen, DeviceNotFound where
    /// there is no NIC that can be used, and what a device answers to memory that is registered already.
    pub fn install_transport(&self, protocol: &str, topology: Option<&str>) -> Result<()> {
        let mut transports = self.transports.write();
        self.check_open()?;
        if transports.iter().any(|transport| transport.protocol() == protocol) {
            return Ok(());
        }
        if !["tcp", "rdma"].contains(&protocol) {
            let text = format!("there is no transport named '{protocol}'; install \"tcp\" or \"rdma\"");
            return Err(Error::new(Code::NotImplemented, text));
        }
        let topology = topology.map(Topology::parse).transpose()?;
        let matrix = topology.clone().unwrap_or_else(|| self.topology.lock().clone());
        let (transport, change_header) = match protocol {
            "tcp" => self.start_tcp()?,
            _ => self.start_rdma(matrix)?,
        };
        if let Some(topology) = topology {
            *self.topology.lock() = topology;
        }
        if transports.is_empty() {
            transports.push(Arc::new(LocalTransport::new(self.registry.clone(), self.config.checked_local_copy)));
        }
        self.card.add_acceptor(&transport);
        transports.push(transport);
        // Both with the lock, as whoever changes it later does.
        let mut own = self.fetcher.own.write();
        change_header(&mut own);
        self.card.publish(own.clone());
        Ok(())
    }

    /// A transport that knows all live memory, and how what peers are told changes once it is installed.
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
            true => Topology::find(&Machine::default(), &self.config.topology),
        };
        let rdma = RdmaTransport::start(&self.name, topology, self.counters.clone(), self.watchers.clone(), &self.config)?;
        let transport: Arc<dyn Transport> = rdma.clone();
        let observer: Weak<dyn rdma::Observer> = self.this.clone();
        // Before its NICs learn of memory: one that comes back meanwhile learns of it, too.
        rdma.observe(observer);
        self.registrar.attach_live(&transport)?;
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

    /// Installs RDMA where the topology names a NIC and it can be used, else TCP.
    fn install_best(&self) -> Result<()> {
        let config = &self.config;
        let has_nic = !self.topology.lock().nics().is_empty();
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
        *self.topology.lock() = Topology::discover(&Machine::default(), &self.config.topology.filters);
        Ok(())
    }

    /// A description of the NICs and of what they serve, for people or as JSON.
    pub fn show_links(&self, json: bool) -> String {
        let topology = self.topology.lock().clone();
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
    /// Errors: InvalidArgument (empty, or at address 0), AddressOverlapped, and what a transport answers; then nothing has changed.
    pub fn register(&self, range: MemoryRange, options: &MemoryOptions) -> Result<()> {
        let transports = self.transports.read();
        self.check_open()?;
        self.registrar.register(range, &region_options(options), options.parallelism, &transports)
    }

    /// Registers all ranges or none.
    pub fn register_batch(&self, ranges: &[MemoryRange], options: &MemoryOptions) -> Result<()> {
        let transports = self.transports.read();
        self.check_open()?;
        self.registrar.register_batch(ranges, &region_options(options), options.parallelism, &transports)
    }

    /// Unregisters the region that starts at `address`. When it returns without an error not one byte of the region moves any more.
    ///
    /// Errors: AddressNotRegistered; BatchBusy if transfers did not end within five seconds:
    /// call again.
    pub fn unregister(&self, address: u64) -> Result<()> {
        let transports = self.transports.read();
        self.check_open()?;
        self.registrar.unregister(address, &transports)
    }

    /// Unregisters all that can be unregistered, and returns the first error.
    pub fn unregister_batch(&self, addresses: &[u64]) -> Result<()> {
        let transports = self.transports.read();
        self.check_open()?;
        self.registrar.unregister_batch(addresses, &transports)
    }

    /// The region that contains the address, in any state in which it blocks its range.
    pub fn find_region(&self, address: u64) -> Option<RegionInfo> {
        self.registry.read(|view| view.find(address).map(RegionInfo::of))
    }

    /// What registering the region that contains the address took. `None` if no region does, or no device knows it: then there was
    /// nothing to be waited for.
    pub fn registration_cost(&self, address: u64) -> Option<DetailedCost> {
        let transports = self.transports.read();
        let devices = transports.iter().flat_map(|transport| transport.devices()).map(|device| device.name().to_string()).collect();
        let cost = self.registry.read(|view| view.find(address).and_then(|region| region.cost().cloned()))?;
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
    /// from the cache. Asking a peer blocks for up to the handshake time-outs.
    ///
    /// Errors: InvalidArgument for an empty name or an engine without transports; Dns, Socket, MalformedJson, Metadata from asking.
    pub fn open_segment(&self, name: &str) -> Result<u64> {
        let name = stripped(name)?;
        self.check_open()?;
        if self.transports.read().is_empty() {
            let text = format!("cannot open segment {name}: no transport is installed; install \"tcp\" first");
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

    /// Asks the segment's peer for its descriptor anew.
    pub fn refresh_segment(&self, id: u64) -> Result<()> {
        self.check_open()?;
        if id != LOCAL_SEGMENT {
            self.segments.get(id)?.refresh()?;
        }
        Ok(())
    }

    /// Asks the peers of all opened segments anew, one after the other. Descriptors of peers that do not answer stay; each is logged.
    pub fn refresh_all_segments(&self) -> Result<()> {
        for segment in self.segments.all() {
            self.check_open()?;
            let _ = segment.refresh();
        }
        Ok(())
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
        let transports = self.transports.read();
        self.check_open()?;
        let route = |segment| self.route(&transports, segment);
        let stall = self.config.slice_timeout.unwrap_or(self.config.tcp_status_timeout);
        transfer::submit(batch, &self.registry, &route, requests, notification, options, stall)
    }

    fn route(&self, transports: &[Arc<dyn Transport>], segment: u64) -> Result<Route> {
        let installed = |protocol: &str| transports.iter().find(|transport| transport.protocol() == protocol).cloned();
        if segment == LOCAL_SEGMENT {
            let transport = installed("local")
                .ok_or_else(|| Error::new(Code::NotSupportedTransport, "no transport is installed; install \"tcp\" first"))?;
            return Ok(Route { transport, segment: self.own_segment.clone() });
        }
        let segment = self.segments.get(segment)?;
        if self.config.disable_metacache {
            segment.refresh()?;
        }
        let protocols = segment.descriptor().protocols.clone();
        let transport = protocols.iter().find_map(|protocol| installed(protocol)).ok_or_else(|| {
            let text = format!("segment {} is reached by {}, which is not installed here", segment.name(), protocols.join(", "));
            Error::new(Code::NotSupportedTransport, text)
        })?;
        Ok(Route { transport, segment })
    }

    /// Frees a batch. BatchBusy while a task is not terminal; InvalidHandle if there is no such batch.
    pub fn free_batch(&self, id: u64) -> Result<()> {
        if !self.batch(id)?.is_finished() {
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

    /// Sends a message to the engine of an opened segment and waits for its reply. The own segment works, too.
    ///
    /// Errors: InvalidArgument (unknown segment), Dns, Socket, MalformedJson, Metadata (refused).
    pub fn send_notification(&self, segment: u64, notification: &Notification) -> Result<()> {
        self.check_open()?;
        if segment == LOCAL_SEGMENT {
            return self.card.receive(notification.clone());
        }
        let segment = self.segments.get(segment)?;
        self.notify_peer(segment.address(), notification)
    }

    fn notify_peer(&self, peer: &HostPort, notification: &Notification) -> Result<()> {
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
        self.notify_peer(&HostPort::parse(name, self.config.handshake_port), notification)
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
            segment => self.fetcher.client.probe(self.segments.get(segment)?.address()),
        }
    }

    /// Ends everything: requests to peers are broken off, tasks end as cancelled, waiters wake, threads stop. Calls that come later
    /// answer Canceled. When it returns no byte moves any more; only a second call that comes meanwhile returns at once.
    pub fn shutdown(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        let periodic = std::mem::take(&mut *self.periodic.lock());
        periodic.iter().for_each(Periodic::order_stop);
        self.fetcher.client.cancel();
        self.server.stop();
        let reason = Error::quiet(Code::Canceled, "the engine was destroyed");
        // A submission may hold the list while it waits for nothing but locks; an installation sees `closed` when it is done.
        let transports = std::mem::take(&mut *self.transports.write());
        for transport in transports {
            transport.shutdown(reason.clone());
        }
        self.background.close();
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
        }
    }

    fn attach_memory(&self, position: usize, device: &dyn Device, is_wanted: &dyn Fn() -> bool) {
        self.registrar.attach_device(position, device, is_wanted);
    }
}

fn region_options(options: &MemoryOptions) -> RegionOptions {
    RegionOptions { location: options.location.clone(), remote_accessible: options.remote_accessible, counted: options.counted }
}

fn stripped(name: &str) -> Result<&str> {
    match name.trim_start_matches('/') {
        "" => Err(Error::new(Code::InvalidArgument, "the segment's name is empty")),
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
