//! What an engine shows Prometheus: its counters and histograms, and what is so at the moment of its memory, NICs and pools.

use std::path::Path;

use super::Engine;
use crate::error::Result;
use crate::pool::PoolStatistics;
use crate::telemetry::exporter::{self, Exporter, Place};
use crate::telemetry::prometheus::{Exposition, Kind};

type PoolFigure = (&'static str, Kind, &'static str, fn(&PoolStatistics) -> u64);

/// Families with one value for each pool.
const POOL: [PoolFigure; 19] = [
    ("arena_bytes", Kind::Gauge, "Bytes of the arena.", |pool| pool.arena.length()),
    ("leases", Kind::Gauge, "Leases that are out or quarantined.", |pool| pool.leases),
    ("leased_bytes", Kind::Gauge, "Bytes of leases that are out or quarantined.", |pool| pool.leased_bytes),
    ("most_leased_bytes", Kind::Gauge, "The most bytes that were leased at a time.", |pool| pool.most_leased_bytes),
    ("leases_quarantined", Kind::Gauge, "Leases that are quarantined.", |pool| pool.quarantined),
    ("longest_free_bytes", Kind::Gauge, "Bytes of the longest free extent.", |pool| pool.longest_free),
    ("waiting", Kind::Gauge, "Threads that wait for a lease.", |pool| pool.waiting),
    ("leases_granted_total", Kind::Counter, "Leases that were granted.", |pool| pool.acquired),
    ("waits_total", Kind::Counter, "Leases that had to be waited for.", |pool| pool.waited),
    ("refusals_total", Kind::Counter, "Leases that were not granted in time.", |pool| pool.refused),
    ("puts_total", Kind::Counter, "Calls that put.", |pool| pool.puts),
    ("gets_total", Kind::Counter, "Calls that get.", |pool| pool.gets),
    ("items_zero_copy_total", Kind::Counter, "Items that were in registered memory.", |pool| pool.items_zero_copy),
    ("items_direct_total", Kind::Counter, "Items that were registered for the call, or needed no registration.", |pool| {
        pool.items_direct
    }),
    ("items_staged_total", Kind::Counter, "Items that went through a lease.", |pool| pool.items_staged),
    ("staged_bytes_total", Kind::Counter, "Bytes of items that went through a lease.", |pool| pool.bytes_staged),
    ("registrations_total", Kind::Counter, "Ranges that puts and gets have registered.", |pool| pool.registrations),
    ("fallbacks_total", Kind::Counter, "Groups of items that were not staged because there was no room.", |pool| pool.fallbacks),
    ("retries_total", Kind::Counter, "Items that were transferred once more, each time.", |pool| pool.retried),
];

impl Engine {
    /// All numbers of the engine in Prometheus's text format. Names of counters are those of `Counters`, with `_total` at the end and seconds for
    /// nanoseconds. Waits while a transport is installed; looks at each live region, some nanoseconds each.
    pub fn metrics(&self) -> String {
        let mut text = Exposition::default();
        text.family("transfer_engine_info", Kind::Gauge, "The engine: its name, where peers reach it, and its version.");
        let (name, address) = (self.name(), self.address());
        let version = env!("CARGO_PKG_VERSION");
        text.sample(&[("engine", &name), ("address", &address), ("version", version)], 1);
        self.show_counters(&mut text);
        self.show_latencies(&mut text);
        let regions = self.registry.live();
        let bytes: u64 = regions.iter().map(|region| region.range().length()).sum();
        let segments = self.segments.all().len();
        for (name, help, value) in [
            ("regions", "Memory regions that are registered.", regions.len() as u64),
            ("registered_bytes", "Bytes of memory regions that are registered.", bytes),
            ("open_segments", "Segments of peers that are open.", segments as u64),
        ] {
            text.single(&format!("transfer_engine_{name}"), Kind::Gauge, help, value);
        }
        self.show_devices(&mut text);
        self.show_pools(&mut text);
        text.into_text()
    }

    fn show_counters(&self, text: &mut Exposition) {
        for (name, help, value) in self.counters.iter() {
            match name.strip_suffix("_ns") {
                Some(name) => {
                    let help = help.replacen("Nanoseconds", "Seconds", 1);
                    text.single(&format!("transfer_engine_{name}_seconds_total"), Kind::Counter, &help, value as f64 / 1e9);
                }
                None => text.single(&format!("transfer_engine_{name}_total"), Kind::Counter, help, value),
            }
        }
    }

    fn show_latencies(&self, text: &mut Exposition) {
        let counters = &self.counters;
        let help = "Seconds from the submission of a request to its end being told, of those that completed.";
        text.family("transfer_engine_request_latency_seconds", Kind::Histogram, help);
        for (operation, latency) in [("read", &counters.read_latency), ("write", &counters.write_latency)] {
            text.histogram(&[("operation", operation)], latency.cumulative(), latency.seconds());
        }
        let help =
            "Seconds that calls took that registered memory with devices, a batch being one, without telling a metadata server.";
        text.family("transfer_engine_registration_latency_seconds", Kind::Histogram, help);
        let latency = &counters.registration_latency;
        text.histogram(&[], latency.cumulative(), latency.seconds());
    }

    fn show_devices(&self, text: &mut Exposition) {
        let pinning = self.registrar.pinning();
        if !pinning.is_empty() {
            let help = "Seconds inside of calls that pin memory and register it with the device, of all threads.";
            text.family("transfer_engine_device_pinning_seconds_total", Kind::Counter, help);
            for (device, spent) in &pinning {
                text.sample(&[("device", device)], spent.as_secs_f64());
            }
        }
        let loads = self.nic_loads();
        if !loads.is_empty() {
            let help = "Bytes that the NIC has moved for requests of this engine.";
            text.family("transfer_engine_nic_bytes_total", Kind::Counter, help);
            loads.iter().for_each(|load| text.sample(&[("device", &load.device)], load.bytes_completed));
            let help = "Bytes of work that the NIC has been given and that has not ended.";
            text.family("transfer_engine_nic_bytes_in_flight", Kind::Gauge, help);
            loads.iter().for_each(|load| text.sample(&[("device", &load.device)], load.bytes_in_flight));
        }
    }

    /// A pool is told by the address of its arena.
    fn show_pools(&self, text: &mut Exposition) {
        let pools: Vec<_> = self.pools.lock().iter().map(|(pool, _)| pool.clone()).collect();
        let pools: Vec<_> = pools.iter().map(|pool| pool.statistics()).collect();
        if pools.is_empty() {
            return;
        }
        for (name, kind, help, value) in POOL {
            text.family(&format!("transfer_engine_pool_{name}"), kind, help);
            for pool in &pools {
                text.sample(&[("arena", &format!("{:#x}", pool.arena.address()))], value(pool));
            }
        }
    }

    /// Opens a unix socket at which [`Engine::metrics`] can be read until the engine is destroyed: at the path, or at one that is drawn in
    /// `TE_METRICS_DIRECTORY`. An engine has one; a later call moves it. Errors: those of [`Exporter::start`].
    pub fn serve_metrics(&self, path: Option<&Path>) -> Result<()> {
        let mut exporter = self.exporter.lock();
        self.check_open()?;
        let path = path.map(exporter::absolute).transpose()?;
        let is_there = |exporter: &Exporter| path.as_ref().is_none_or(|path| path == exporter.path());
        if exporter.as_ref().is_some_and(is_there) {
            return Ok(());
        }
        let directory = self.config.metrics_directory.clone().unwrap_or_else(exporter::default_directory);
        let place = path.as_deref().map_or(Place::Directory(&directory), Place::Path);
        let this = self.this.clone();
        let opened = Exporter::start(place, move || this.upgrade().map(|engine| engine.metrics()))?;
        *exporter = Some(opened);
        Ok(())
    }
}
