//! Registering and unregistering regions one by one where others are registered already, and the steps that it consists of.
//!
//! A cell has an engine for one device, one number of regions, one size and stride, and with a metadata server or without. Where a device
//! is a verbs device, the verbs alone are measured with it in turn; and Mooncake's own package, where it is and can do the same.
//! Steps are what the engine itself reports of each registration; book-keeping is the rest of the time on the clock.

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use transfer_engine::config::Config;
use transfer_engine::engine::{DetailedCost, Engine, EngineOptions, MemoryOptions};
use transfer_engine::sys::MemoryRange;
use transfer_engine::telemetry;

use super::{Cell, Recorder, tables};
#[cfg(feature = "rdma")]
use crate::bench::device::Verbs;
use crate::bench::memory_options;
use crate::bench::publish::{self, Operation, OwnServer, Peer, Subject};
use crate::bench::register::{check_absent, check_present};
use crate::bench::rings::Rings;
use crate::output;
use crate::report::{Better, Key, Report, Table, Value};
use crate::size::parse_size;
use crate::system::Arena;

/// Arguments of this table.
#[derive(clap::Args)]
#[group(skip)]
pub struct Arguments {
    /// What registers memory: none, tcp, io_uring, or a verbs device.
    #[arg(long, value_delimiter = ',', default_value = "none,tcp,io_uring")]
    pub device: Vec<String>,
    /// Regions that are registered and unregistered in a round.
    #[arg(long, value_delimiter = ',', default_value = "64,256", default_value_if("quick", "true", "256"))]
    #[arg(value_parser = super::count_parser())]
    measured: Vec<usize>,
    /// Sizes of a region.
    #[arg(long, value_delimiter = ',', value_parser = parse_size)]
    #[arg(default_value = "4K,64K", default_value_if("quick", "true", "4K"))]
    size: Vec<usize>,
    /// Distances from the start of one region to that of the next, as many as sizes. Otherwise twice the size.
    #[arg(long, value_delimiter = ',', value_parser = parse_size)]
    stride: Vec<usize>,
    /// Whether a metadata server is told of each change before the call returns.
    #[arg(long, value_delimiter = ',', default_value = "false,true", action = clap::ArgAction::Set)]
    update_metadata: Vec<bool>,
    /// A Python that has the package mooncake-transfer-engine, to be measured beside this library over TCP, also by transfers.
    #[arg(long, value_name = "PYTHON", default_value = "python3")]
    pub wheel: PathBuf,
}

/// With a metadata server a call carries the whole descriptor, so fewer are made, and not with the most regions.
const PUBLISHED_CALLS: usize = 8;
const PUBLISHED_REGIONS: usize = 16384;
/// The most regions that Mooncake's own package is given: each that is registered costs it more than the one before, so that 65,536 take
/// more than a minute.
const WHEEL_REGIONS: usize = 8192;
/// What may be pinned in all cells of a size.
const PINNED: usize = 1 << 30;

/// A cell for each place.
pub fn cells(arguments: &Arguments, regions: &[usize]) -> Result<Vec<Box<dyn Cell>>, Box<dyn Error>> {
    let strides = match arguments.stride.as_slice() {
        [] => arguments.size.iter().map(|size| size * 2).collect(),
        strides if strides.len() == arguments.size.len() => strides.to_vec(),
        _ => return Err("--stride names not as many as --size".into()),
    };
    let mut cells: Vec<Box<dyn Cell>> = Vec::new();
    for (size, stride) in tables::distinct(arguments.size.iter().copied().zip(strides)) {
        if stride < size {
            return Err(format!("regions of {size} bytes overlap at a stride of {stride}").into());
        }
        for update_metadata in tables::distinct(arguments.update_metadata.iter().copied()) {
            // Without a transport there is nothing to be told.
            for device in tables::distinct(arguments.device.iter().filter(|device| !update_metadata || *device != "none")) {
                for regions in regions.iter().copied().filter(|regions| !update_metadata || *regions <= PUBLISHED_REGIONS) {
                    let place = Place { device: device.clone(), update_metadata, regions, size, stride };
                    let measured = match update_metadata {
                        true => vec![PUBLISHED_CALLS],
                        false => tables::distinct(arguments.measured.iter().copied()),
                    };
                    let wheel = (device == "tcp" && regions <= WHEEL_REGIONS).then(|| arguments.wheel.clone());
                    cells.push(Box::new(Calls { place, measured, wheel, round: 0, ready: None }));
                }
            }
        }
    }
    Ok(cells)
}

#[derive(Clone)]
struct Place {
    device: String,
    update_metadata: bool,
    regions: usize,
    size: usize,
    stride: usize,
}

impl Place {
    fn key(&self, table: Table, quantity: &str, subject: &str, measured: usize, step: Option<&str>) -> Key {
        let mut place: Vec<(&str, Value)> = vec![
            ("device", self.device.as_str().into()),
            ("update_metadata", self.update_metadata.into()),
            ("regions", self.regions.into()),
            ("measured", measured.into()),
            ("size", self.size.into()),
            ("stride", self.stride.into()),
        ];
        place.extend(step.map(|step| ("step", step.into())));
        Key::new(table, quantity, subject, &place)
    }
}

struct Calls {
    place: Place,
    measured: Vec<usize>,
    wheel: Option<PathBuf>,
    round: usize,
    ready: Option<Ready>,
}

/// Fields end in this order.
struct Ready {
    wheel: Option<Peer>,
    #[cfg(feature = "rdma")]
    verbs: Option<Verbs>,
    engine: Ended,
    more: Vec<MemoryRange>,
    _arena: Arena,
    _server: Option<OwnServer>,
}

/// An engine that is shut down when it is dropped.
struct Ended(Arc<Engine>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.shutdown();
    }
}

impl Ready {
    fn new(place: &Place, extra: usize, wheel: Option<&PathBuf>, recorder: &Recorder) -> Result<Ready, Box<dyn Error>> {
        let server = place.update_metadata.then(OwnServer::start).transpose()?;
        let uri = server.as_ref().map(|server| server.uri.clone());
        let count = place.regions + extra;
        let mut arena = Arena::new(count.checked_mul(place.stride).ok_or("so many regions do not fit into the address space")?)?;
        if !["none", "tcp"].contains(&place.device.as_str()) {
            // Pages are there before anything is timed.
            (0..count).for_each(|index| arena.touch(index * place.stride, place.size));
        }
        let ranges: Vec<MemoryRange> = (0..count).map(|index| arena.range(index * place.stride, place.size)).collect();
        let (present, more) = ranges.split_at(place.regions);
        let engine = Ended(create_engine(&place.device, uri.as_deref())?);
        engine.0.register_batch(present, &memory_options())?;
        check_present(&engine.0, present)?;
        let start = |python: &PathBuf| {
            let name = format!("te-sweep-wheel-{}", std::process::id());
            let (uri, name) = uri.as_deref().map_or(("P2PHANDSHAKE", "127.0.0.1"), |uri| (uri, &name));
            let mut peer = Peer::start(python, uri, name, count, [place.size, place.stride], Some(recorder.last_answer()))?;
            peer.grow(place.regions)?;
            Ok::<Peer, Box<dyn Error>>(peer)
        };
        let wheel = wheel.and_then(|python| {
            let skip = |error: &dyn Error| {
                recorder.skip(&format!("the package mooncake-transfer-engine of {}", python.display()), &error.to_string())
            };
            start(python).inspect_err(|error| skip(&**error)).ok()
        });
        Ok(Ready {
            wheel,
            #[cfg(feature = "rdma")]
            verbs: (!["none", "tcp", "io_uring"].contains(&place.device.as_str()))
                .then(|| Verbs::open(std::slice::from_ref(&place.device)))
                .transpose()?,
            engine,
            more: more.to_vec(),
            _arena: arena,
            _server: server,
        })
    }
}

fn create_engine(device: &str, uri: Option<&str>) -> Result<Arc<Engine>, Box<dyn Error>> {
    telemetry::log::install();
    let name = format!("te-sweep-{}", std::process::id());
    let (metadata, server_name) = uri.map_or(("P2PHANDSHAKE", "127.0.0.1"), |uri| (uri, &name));
    let options =
        EngineOptions { metadata: metadata.to_string(), server_name: server_name.to_string(), ..EngineOptions::default() };
    let engine = Engine::create(&options, Config { force_tcp: false, ..publish::config() })?;
    match device {
        "none" => {}
        "tcp" => engine.install_transport("tcp", None)?,
        // Nothing is transferred, so there are no targets.
        "io_uring" => engine.install_own_transport(Arc::new(Rings::new(1, Arc::default())?))?,
        name => engine.install_transport("rdma", Some(&serde_json::json!({ "cpu:0": [[name], []] }).to_string()))?,
    }
    Ok(engine)
}

impl Cell for Calls {
    fn name(&self) -> String {
        let Place { device, update_metadata, regions, size, .. } = &self.place;
        let server = if *update_metadata { ", with a metadata server" } else { "" };
        format!("register, {device}{server}, {} each, {regions} regions", output::bytes(*size as u64))
    }

    fn measure(&mut self, recorder: &Recorder) -> Result<(), Box<dyn Error>> {
        let place = &self.place;
        let is_pinned = !["none", "tcp"].contains(&place.device.as_str());
        if self.ready.is_none() {
            if is_pinned && place.regions.saturating_mul(place.size) > PINNED {
                recorder.skip(&self.name(), &format!("more than {} would be pinned", output::bytes(PINNED as u64)));
                return Ok(());
            }
            let most = self.measured.iter().copied().max().unwrap_or(0);
            if place.device == "io_uring" && place.regions + most > crate::ring::SLOTS as usize {
                recorder.skip(&self.name(), &format!("a ring holds {} buffers", crate::ring::SLOTS));
                return Ok(());
            }
            self.ready = Some(Ready::new(place, most, self.wheel.as_ref(), recorder)?);
        }
        let Some(ready) = &mut self.ready else { return Ok(()) };
        for measured in self.measured.iter().copied() {
            let more = &ready.more[..measured];
            let add = |quantity, subject, ns| {
                let key = place.key(Table::Register, quantity, subject, measured, None);
                recorder.add(key, "ns", Better::Less, ns);
            };
            // They take turns in coming first.
            for position in 0..3 {
                match (position + self.round) % 3 {
                    0 => {
                        let ours = measure_engine(&ready.engine.0, more, place.update_metadata)?;
                        add("register", "ours", ours.register);
                        add("unregister", "ours", ours.unregister);
                        for (step, ns) in ours.steps {
                            recorder.add(
                                place.key(Table::Steps, "register", "ours", measured, Some(&step)),
                                "ns",
                                Better::Less,
                                ns,
                            );
                        }
                    }
                    1 => {
                        if let Some(wheel) = &mut ready.wheel {
                            match measure_wheel(wheel, measured, place.update_metadata) {
                                Ok([register, unregister]) => {
                                    add("register", "wheel", register);
                                    add("unregister", "wheel", unregister);
                                }
                                Err(error) => {
                                    recorder.skip("the package mooncake-transfer-engine", &error.to_string());
                                    ready.wheel = None;
                                }
                            }
                        }
                    }
                    _ =>
                    {
                        #[cfg(feature = "rdma")]
                        if let Some(verbs) = &ready.verbs {
                            let cost = verbs.measure(more)?;
                            add("register", "verbs", cost.register * 1e3);
                            add("unregister", "verbs", cost.unregister * 1e3);
                        }
                    }
                }
            }
        }
        self.round += 1;
        Ok(())
    }
}

/// Nanoseconds a call.
struct Cost {
    register: f64,
    unregister: f64,
    steps: Vec<(String, f64)>,
}

fn measure_engine(engine: &Engine, ranges: &[MemoryRange], publish: bool) -> Result<Cost, Box<dyn Error>> {
    let options = MemoryOptions { publish, ..memory_options() };
    // What the caches have to learn is not measured.
    if let [first, ..] = ranges {
        engine.register(*first, &options)?;
        engine.unregister(first.address())?;
    }
    let per_call = |time: Duration| time.as_nanos() as f64 / ranges.len() as f64;
    let begin = Instant::now();
    ranges.iter().try_for_each(|range| engine.register(*range, &options))?;
    let register = per_call(begin.elapsed());
    check_present(engine, ranges)?;
    let costs: Vec<DetailedCost> = ranges.iter().filter_map(|range| engine.registration_cost(range.address())).collect();
    let begin = Instant::now();
    ranges.iter().try_for_each(|range| engine.unregister(range.address()))?;
    let unregister = per_call(begin.elapsed());
    check_absent(engine, ranges)?;

    let sum = |step: &dyn Fn(&DetailedCost) -> Duration| per_call(costs.iter().map(step).sum());
    let (residency, population) = (sum(&|cost| cost.cost.residency), sum(&|cost| cost.cost.population));
    let (pinning, publishing) = (sum(&|cost| cost.cost.pinning_elapsed), sum(&|cost| cost.cost.publishing));
    let rest = (register - residency - population - pinning - publishing).max(0.0);
    let mut steps = vec![("book-keeping".to_string(), rest)];
    steps.push(("residency".to_string(), residency));
    steps.push(("population".to_string(), population));
    let devices = costs.first().map(|cost| cost.devices.clone()).unwrap_or_default();
    for (index, name) in devices.iter().enumerate() {
        let of = |cost: &DetailedCost| cost.cost.pinning.get(index).copied().unwrap_or_default();
        steps.push((format!("pinning {name}"), sum(&of)));
    }
    steps.push(("publishing".to_string(), publishing));
    Ok(Cost { register, unregister, steps })
}

fn measure_wheel(wheel: &mut Peer, calls: usize, is_published: bool) -> Result<[f64; 2], Box<dyn Error>> {
    let operation = Operation { is_published, callers: 1, calls: calls as u32 };
    let mut call = |is_registering| {
        let (clock, _) = wheel.call(operation, is_registering)?;
        Ok::<f64, Box<dyn Error>>(clock.as_nanos() as f64 / calls as f64)
    };
    Ok([call(true)?, call(false)?])
}

/// The tables.
pub fn text(report: &Report) -> String {
    let mut out =
        "\nRegistering regions one by one, where others are registered already, with a metadata server or without. ns of a call.\n"
            .to_string();
    out += &tables::table(report, Table::Register);
    out += "\nWhat registering consists of. ns of a call.\n";
    out += &tables::table_by(report, Table::Steps, "step");
    out
}
