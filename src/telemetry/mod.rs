//! Counters, histograms, the log, and how they are shown to Prometheus.
//!
//! [`Counters`] belongs to one engine. Its list exists once, in the `counters!` call below: the structure, its documentation,
//! [`Counters::iter`] (for the C statistics and `te`) come from there. Adding to a counter is one relaxed
//! atomic addition, some 5 ns where no other CPU adds to a neighbour at the same time; a caller that adds per slice should sum up
//! first. Counters only grow, and are not read in one moment: two of them may disagree by what is under way.
//!
//! [`exporter`] answers whoever connects to a unix socket; what it answers is given by the engine, which knows more than counters.

pub mod exporter;
pub mod histogram;
pub mod log;
pub mod prometheus;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use self::histogram::Histogram;

/// A counter that any thread may add to.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`; wraps past 2^64.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// What has been added so far.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! counters {
    ($($name:ident: $help:literal;)*) => {
        /// What an engine counts, from its creation on.
        #[derive(Debug, Default)]
        pub struct Counters {
            $(#[doc = $help] pub $name: Counter,)*
            /// From the submission of reads to their ends being told; of those that completed.
            pub read_latency: Histogram,
            /// The same of writes.
            pub write_latency: Histogram,
            /// Calls that registered memory with devices, without what a metadata server takes.
            pub registration_latency: Histogram,
        }

        impl Counters {
            /// Name, help and present value of each counter, in a fixed order. New ones are added at the end.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, &'static str, u64)> {
                [$((stringify!($name), $help, self.$name.get()),)*].into_iter()
            }
        }
    };
}

counters! {
    regions_registered: "Memory regions registered, each counted reference and each region of a batch as one.";
    regions_unregistered: "Memory regions unregistered, each counted reference and each region of a batch as one.";
    registrations_refused: "Memory regions that were not registered because of an error.";
    batches_allocated: "Batches allocated.";
    batches_freed: "Batches freed.";
    tasks_submitted: "Transfer requests accepted for transfer.";
    tasks_completed: "Transfer requests that ended with all bytes in place.";
    tasks_failed: "Transfer requests that ended with an error other than a deadline or a cancel.";
    tasks_timed_out: "Transfer requests that ended because their deadline passed.";
    tasks_cancelled: "Transfer requests that were cancelled.";
    bytes_read: "Bytes read from peers and the own segment by completed requests.";
    bytes_written: "Bytes written to peers and the own segment by completed requests.";
    requests_served: "Reads and writes of peers that were carried out.";
    requests_refused: "Reads and writes of peers that were refused or broke off.";
    bytes_served: "Bytes that peers read from or wrote to this engine's memory.";
    connections_opened: "Data connections made to peers.";
    connections_accepted: "Data connections accepted from peers.";
    connections_failed: "Data connections that could not be made or broke.";
    descriptor_fetches: "Descriptors fetched from peers or the metadata server.";
    notifications_sent: "Notifications that peers have taken.";
    notifications_received: "Notifications taken from peers.";
    registration_residency_ns: "Nanoseconds that registering with devices spent on finding out which pages are there.";
    registration_population_ns: "Nanoseconds that registering with devices spent on having absent pages provided.";
    registration_pinning_ns: "Nanoseconds from the first to the last call of a device, summed up over registrations.";
    registration_publishing_ns: "Nanoseconds that registrations waited for a metadata server to be told.";
    registration_book_keeping_ns: "Nanoseconds that registering with devices spent on everything else.";
    deregistration_ns: "Nanoseconds from the first to the last call of a device, summed up over unregistrations.";
    retries: "Parts of requests that were tried again, on another connection or NIC or with a fresh descriptor.";
}

/// What an engine has moved since the last look, for a line of the log now and then. For one thread.
pub struct Throughput {
    looked: Instant,
    counted: [u64; 5],
}

impl Throughput {
    /// From now on.
    pub fn since_now(counters: &Counters) -> Throughput {
        Throughput { looked: Instant::now(), counted: Throughput::count(counters) }
    }

    fn count(counters: &Counters) -> [u64; 5] {
        let ended_badly = counters.tasks_failed.get() + counters.tasks_timed_out.get() + counters.tasks_cancelled.get();
        let Counters { bytes_read, bytes_written, bytes_served, tasks_completed, .. } = counters;
        [bytes_read.get(), bytes_written.get(), bytes_served.get(), tasks_completed.get(), ended_badly]
    }

    /// Rates since the last look, which is now. MB are 10^6 bytes.
    pub fn report(&mut self, counters: &Counters) -> String {
        self.report_at(counters, Instant::now())
    }

    fn report_at(&mut self, counters: &Counters, now: Instant) -> String {
        let last = std::mem::replace(self, Throughput { looked: now, counted: Throughput::count(counters) });
        let seconds = (now - last.looked).as_secs_f64().max(1e-9);
        let rate = |counter: usize| self.counted[counter].wrapping_sub(last.counted[counter]) as f64 / seconds;
        let [read, written, served] = [0, 1, 2].map(|counter| rate(counter) / 1e6);
        let (completed, ended_badly) = (rate(3), self.counted[4].wrapping_sub(last.counted[4]));
        format!(
            "read {read:.1} MB/s, wrote {written:.1} MB/s, {completed:.0} requests/s, {ended_badly} not completed; peers moved \
             {served:.1} MB/s (over {seconds:.1} s)"
        )
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use super::*;

    /// What is logged on this thread meanwhile, in a line each.
    pub(crate) fn hear(what: impl FnOnce()) -> String {
        let heard = Heard::default();
        tracing::subscriber::with_default(heard.clone(), what);
        std::mem::take(&mut *heard.0.lock())
    }

    #[derive(Clone, Default)]
    struct Heard(std::sync::Arc<parking_lot::Mutex<String>>);

    impl tracing::Subscriber for Heard {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            true
        }
        fn event(&self, event: &tracing::Event<'_>) {
            event.record(&mut |_: &tracing::field::Field, value: &dyn std::fmt::Debug| {
                self.0.lock().push_str(&format!("{value:?}\n"))
            });
        }
        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }
        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
        fn enter(&self, _: &tracing::span::Id) {}
        fn exit(&self, _: &tracing::span::Id) {}
    }

    #[test]
    fn throughput_is_what_came_since_the_last_look() {
        let counters = Counters::default();
        counters.bytes_read.add(1 << 40);
        let mut throughput = Throughput::since_now(&counters);
        let start = throughput.looked;
        counters.bytes_read.add(10_000_000);
        counters.bytes_written.add(5_000_000);
        counters.bytes_served.add(300_000);
        counters.tasks_completed.add(8);
        counters.tasks_failed.add(1);
        counters.tasks_cancelled.add(2);
        assert_eq!(
            throughput.report_at(&counters, start + Duration::from_secs(2)),
            "read 5.0 MB/s, wrote 2.5 MB/s, 4 requests/s, 3 not completed; peers moved 0.1 MB/s (over 2.0 s)"
        );
        counters.bytes_written.add(1_000_000);
        let second = throughput.report_at(&counters, start + Duration::from_secs(3));
        assert!(second.starts_with("read 0.0 MB/s, wrote 1.0 MB/s, 0 requests/s, 0 not") && second.ends_with("1.0 s)"), "{second}");
        assert!(throughput.report_at(&counters, start + Duration::from_secs(3)).starts_with("read 0.0 MB/s"));
    }

    #[test]
    fn the_list_shows_each_counter_under_its_own_name() {
        let counters = Counters::default();
        counters.regions_registered.add(2);
        counters.regions_registered.add(3);
        counters.retries.add(7);
        let values: Vec<_> = counters.iter().collect();
        assert_eq!((values[0].0, values[0].2), ("regions_registered", 5));
        assert_eq!((values[values.len() - 1].0, values[values.len() - 1].2), ("retries", 7));
        assert_eq!(values.iter().map(|(_, _, value)| value).sum::<u64>(), 12);
        let names: std::collections::BTreeSet<_> = values.iter().map(|(name, _, _)| name).collect();
        assert_eq!(names.len(), values.len());
    }

    #[test]
    fn threads_lose_no_count() {
        let counters = Counters::default();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..10_000).for_each(|_| counters.bytes_read.add(3)));
            }
        });
        assert_eq!(counters.bytes_read.get(), 120_000);
    }
}
