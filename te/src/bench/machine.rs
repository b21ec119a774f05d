//! What the figures were measured on, and how steady it was.

use std::fmt;
use std::hint::black_box;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use transfer_engine::sys::limits;

use super::statistics::Spread;

/// The machine as it was found before anything was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    processor: String,
    cpus: usize,
    kernel: Option<String>,
    /// Programs that wanted a CPU, averaged over the last minute.
    load: Option<f64>,
    optimized: bool,
}

impl Machine {
    /// Looks around.
    pub fn look() -> Machine {
        let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpus.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        let load = std::fs::read_to_string("/proc/loadavg").ok();
        Machine {
            processor: model.map_or("unknown processor", |(_, name)| name.trim()).to_string(),
            cpus: limits::cpu_count(),
            kernel: limits::kernel_version().ok(),
            load: load.and_then(|text| text.split(' ').next()?.parse().ok()),
            optimized: !cfg!(debug_assertions),
        }
    }

    /// What it is, in one line.
    pub fn name(&self) -> String {
        format!("{}, {} CPUs, kernel {}", self.processor, self.cpus, self.kernel.as_deref().unwrap_or("unknown"))
    }

    /// Whether the program is a release build.
    pub fn is_optimized(&self) -> bool {
        self.optimized
    }
}

/// A line about the machine, and one for each thing that spoils figures.
impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.name())?;
        if let Some(load) = self.load.filter(|load| *load > self.cpus as f64 / 4.0) {
            writeln!(
                f,
                "Load {load} at the start: other programs compete for the CPUs, figures are worse and vary more than alone."
            )?;
        }
        if !self.optimized {
            writeln!(f, "This is a debug build: figures say nothing about a release build.")?;
        }
        Ok(())
    }
}

/// Milliseconds on the clock for work that is always the same. How far its times lie apart is the machine's own noise.
pub fn time_fixed_work() -> f64 {
    let start = Instant::now();
    let mut value = 1u64;
    for _ in 0..1 << 20 {
        value = black_box(value.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (value >> 30));
    }
    black_box(value);
    start.elapsed().as_secs_f64() * 1e3
}

/// Nanoseconds for a cache line from one thread to another and back. It shows how far apart the CPUs are, which the host of a virtual
/// machine may change at any time. The best of some tries, for threads do not always run.
pub fn time_round_trip() -> f64 {
    const TRIPS: u32 = 200;
    let line = AtomicU32::new(0);
    let pass_on = |number: u32| {
        while line.load(Ordering::Acquire) != number {
            std::hint::spin_loop();
        }
        line.store(number + 1, Ordering::Release);
    };
    let tries = 0..20;
    let begins = |number: u32| number * TRIPS * 2;
    std::thread::scope(|scope| {
        scope.spawn(|| tries.clone().for_each(|number| (0..TRIPS).for_each(|trip| pass_on(begins(number) + 2 * trip + 1))));
        let time = |number| {
            let start = Instant::now();
            (0..TRIPS).for_each(|trip| pass_on(begins(number) + 2 * trip));
            start.elapsed().as_nanos() as f64 / f64::from(TRIPS)
        };
        tries.clone().map(time).fold(f64::INFINITY, f64::min)
    })
}

/// What [`time_fixed_work`] says of the figures beside it.
pub fn noise(fixed_work_ms: Spread) -> String {
    format!(
        "Noise: a loop of fixed work took {fixed_work_ms} ms between the figures; differences of that proportion mean nothing.\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_trip_takes_some_time() {
        assert!((1.0..1e9).contains(&time_round_trip()));
    }

    #[test]
    fn what_spoils_figures_is_said() {
        let machine = |load, optimized| Machine {
            processor: "Processor".to_string(),
            cpus: 2,
            kernel: Some("6.1".to_string()),
            load,
            optimized,
        };
        assert_eq!(machine(Some(0.4), true).to_string(), "Processor, 2 CPUs, kernel 6.1\n");
        assert_eq!(machine(None, true).to_string().lines().count(), 1);
        assert!(machine(Some(0.6), true).to_string().contains("Load 0.6"));
        assert!(machine(None, false).to_string().contains("debug build"));
    }

    #[test]
    fn fixed_work_takes_time() {
        assert!(time_fixed_work() > 0.0);
    }
}
