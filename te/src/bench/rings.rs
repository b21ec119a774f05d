//! Rings of io_uring in place of NICs: memory is pinned for each of them, as NICs have it pinned, on any machine.

use std::sync::Arc;

use clap::ValueEnum;
use serde::Serialize;
use transfer_engine::registry::Registry;
use transfer_engine::sys::MemoryRange;
use transfer_engine::transport::local::LocalTransport;
use transfer_engine::transport::{Device, Segment, Slices, Transport};

use crate::ring::Ring;

/// What pins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
pub enum Pin {
    /// Fixed buffers of io_uring, one ring for each device.
    #[value(name = "io_uring")]
    #[serde(rename = "io_uring")]
    IoUring,
}

/// A transport whose devices are rings. What moves bytes is one `memmove` on the thread that submits, to memory of this process.
pub struct Rings {
    rings: Vec<Arc<Ring>>,
    mover: LocalTransport,
}

impl Rings {
    /// So many rings, whose targets are the regions of `registry`.
    pub fn new(count: usize, registry: Arc<Registry>) -> Result<Rings, String> {
        let rings = (0..count).map(|number| Ring::new(number).map(Arc::new)).collect::<Result<_, _>>();
        let rings = rings.map_err(|error| format!("cannot make an io_uring: {error}"))?;
        Ok(Rings { rings, mover: LocalTransport::new(registry, false) })
    }

    /// Each of them.
    pub fn rings(&self) -> &[Arc<Ring>] {
        &self.rings
    }
}

impl Transport for Rings {
    /// Of those whose place it takes.
    fn protocol(&self) -> &'static str {
        "tcp"
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.rings.iter().map(|ring| ring.clone() as Arc<dyn Device>).collect()
    }
    fn submit(&self, segment: &Arc<dyn Segment>, slices: Slices) {
        self.mover.submit(segment, slices);
    }
    // Slices have ended when `submit` returns.
    fn cancel(&self) {}
    fn evict(&self, _range: MemoryRange) {}
    fn forget(&self, _segment: u64) {}
    fn shutdown(&self, _reason: transfer_engine::Error) {}
}
