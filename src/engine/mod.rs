//! The engine: composition root. (skeleton: the public face is fixed)
#![allow(missing_docs, unused_variables)]

use std::sync::Arc;
use std::time::Duration;

use crate::config::Config;
use crate::error::Result;
use crate::handshake::Notification;
use crate::sys::MemoryRange;
use crate::telemetry::Counters;
use crate::transfer::{Batch, Request, SubmitOptions, TaskStatus};

/// How an engine is made.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// `P2PHANDSHAKE`, or a metadata server's URI.
    pub metadata: String,
    /// Name of the local server, `host[:port]`.
    pub server_name: String,
    /// Install a transport at once: the best one there is.
    pub auto_discover: bool,
}

#[derive(Clone, Debug)]
pub struct MemoryOptions {
    pub location: Arc<str>,
    pub remote_accessible: bool,
    pub counted: bool,
    pub publish: bool,
}

#[derive(Clone, Debug)]
pub struct RegionInfo {
    pub address: u64,
    pub length: u64,
    pub location: Arc<str>,
    pub remote_accessible: bool,
}

pub struct Engine {}
impl Engine {
    pub fn create(options: &EngineOptions, config: Config) -> Result<Arc<Engine>> {
        todo!()
    }
    pub fn config(&self) -> &Config {
        todo!()
    }
    pub fn counters(&self) -> &Counters {
        todo!()
    }
    /// `host:port` of the handshake channel, IPv6 in brackets.
    pub fn address(&self) -> String {
        todo!()
    }
    /// Segment name that peers open.
    pub fn name(&self) -> String {
        todo!()
    }
    pub fn install_transport(&self, protocol: &str, topology: Option<&str>) -> Result<()> {
        todo!()
    }
    pub fn has_transport(&self, protocol: &str) -> bool {
        todo!()
    }
    pub fn discover_topology(&self) -> Result<()> {
        todo!()
    }
    pub fn show_links(&self, json: bool) -> String {
        todo!()
    }

    pub fn register(&self, range: MemoryRange, options: &MemoryOptions) -> Result<()> {
        todo!()
    }
    pub fn register_batch(&self, ranges: &[MemoryRange], options: &MemoryOptions) -> Result<()> {
        todo!()
    }
    pub fn unregister(&self, address: u64, publish: bool) -> Result<()> {
        todo!()
    }
    pub fn unregister_batch(&self, addresses: &[u64], publish: bool) -> Result<()> {
        todo!()
    }
    pub fn find_region(&self, address: u64) -> Option<RegionInfo> {
        todo!()
    }
    pub fn regions(&self) -> Vec<RegionInfo> {
        todo!()
    }

    pub fn open_segment(&self, name: &str) -> Result<u64> {
        todo!()
    }
    pub fn open_segment_fresh(&self, name: &str) -> Result<u64> {
        todo!()
    }
    pub fn refresh_segment(&self, id: u64) -> Result<()> {
        todo!()
    }
    pub fn refresh_all_segments(&self) -> Result<()> {
        todo!()
    }
    pub fn forget_segment(&self, name: &str) -> Result<()> {
        todo!()
    }
    pub fn segment_buffers(&self, id: u64) -> Result<Vec<RegionInfo>> {
        todo!()
    }
    pub fn segment_name(&self, id: u64) -> Result<String> {
        todo!()
    }

    pub fn allocate_batch(&self, capacity: usize) -> Result<Arc<Batch>> {
        todo!()
    }
    pub fn batch(&self, id: u64) -> Result<Arc<Batch>> {
        todo!()
    }
    pub fn submit(
        &self,
        batch: &Arc<Batch>,
        requests: &[Request],
        notification: Option<Notification>,
        options: SubmitOptions,
    ) -> Result<()> {
        todo!()
    }
    /// Code BatchBusy while a task is running.
    pub fn free_batch(&self, id: u64) -> Result<()> {
        todo!()
    }
    /// Synchronous; one status per request, in order. Returns when all are terminal.
    pub fn transfer(&self, requests: &[Request], options: SubmitOptions) -> Result<Vec<TaskStatus>> {
        todo!()
    }

    pub fn send_notification(&self, segment: u64, notification: &Notification) -> Result<()> {
        todo!()
    }
    pub fn send_notification_to(&self, name: &str, notification: &Notification) -> Result<()> {
        todo!()
    }
    pub fn take_notifications(&self) -> Vec<Notification> {
        todo!()
    }
    pub fn probe(&self, segment: u64) -> Result<()> {
        todo!()
    }

    /// Cancels everything, wakes waiters, stops the threads; later calls answer Canceled. Bounded by `limit` for what must drain.
    pub fn shutdown(&self, limit: Duration) {
        todo!()
    }
}
