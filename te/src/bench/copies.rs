//! How fast the machine copies: by `memcpy` and as the pool does, on one CPU and on all.

use std::error::Error;
use std::time::Instant;

use transfer_engine::pool::copy::gather;
use transfer_engine::sys::limits::cpu_count;
use transfer_engine::sys::{MemoryRange, memory};

use crate::system::Arena;

/// Memory to copy from and to, all of whose pages are there.
pub struct Ground {
    source: Arena,
    target: Arena,
}

impl Ground {
    /// Of so many bytes.
    pub fn new(bytes: usize) -> Result<Ground, Box<dyn Error>> {
        let written = || {
            let mut arena = Arena::new(bytes)?.in_large_pages();
            arena.bytes_mut().fill(1);
            Ok::<Arena, std::io::Error>(arena)
        };
        Ok(Ground { source: written()?, target: written()? })
    }

    /// The most that copying so many bytes reaches in any way, in MB/s.
    pub fn best_rate(&self, bytes: usize) -> f64 {
        let ways: [fn(MemoryRange, MemoryRange); 2] = [memory::copy, |target, source| gather(target, &[source])];
        let rates = ways.iter().flat_map(|way| [1, cpu_count()].map(|threads| self.rate(bytes, threads, *way)));
        rates.fold(0.0, f64::max)
    }

    /// MB/s of so many threads, each of which copies an equal part.
    fn rate(&self, bytes: usize, threads: usize, copy: fn(MemoryRange, MemoryRange)) -> f64 {
        let part = bytes.div_ceil(threads);
        let work = |start: usize| {
            let length = part.min(bytes - start);
            copy(self.target.range(start, length), self.source.range(start, length));
        };
        let begin = Instant::now();
        std::thread::scope(|scope| {
            (part..bytes).step_by(part).for_each(|start| _ = scope.spawn(move || work(start)));
            work(0);
        });
        bytes as f64 / begin.elapsed().as_secs_f64() / 1e6
    }
}
