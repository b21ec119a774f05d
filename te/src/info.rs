//! `te info`: what an engine would find here, and what to do about it.
//!
//! Everything is gathered into one [`Report`] first, so that text and JSON say the same.

use std::fmt::Write;
use std::io;
use std::net::IpAddr;

use serde::Serialize;
use transfer_engine::config::{Config, Environment, Reading, Section, VARIABLES};
use transfer_engine::handshake::address::find_local_address;
use transfer_engine::sys::interfaces::{self, Interface};
use transfer_engine::sys::limits::{self, HugePages, Limit};

use crate::output::{self, Style, wrap};
use crate::watch;

/// Arguments of `te info`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Print everything as JSON.
    #[arg(long, conflicts_with = "markdown")]
    json: bool,
    /// Print docs/configuration.md: the environment variables as Markdown, without what is set here.
    #[arg(long)]
    markdown: bool,
    /// Show instead what the engines of this process do, until it ends. They have to show their metrics: TE_METRICS_DIRECTORY or
    /// te_serve_metrics.
    #[arg(long, value_name = "PID", conflicts_with_all = ["json", "markdown"])]
    watch: Option<u32>,
    /// How often to look, in seconds.
    #[arg(long, default_value_t = 1.0, requires = "watch", value_parser = interval)]
    interval: f64,
    /// Show once what they have done.
    #[arg(long, requires = "watch")]
    once: bool,
}

fn interval(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("give a number of seconds from 0.1 to 3600".into()),
    }
}

/// Runs `te info`.
pub fn run(arguments: &Arguments) -> io::Result<()> {
    if let Some(process) = arguments.watch {
        return watch::run(process, arguments.interval, arguments.once);
    }
    if arguments.markdown {
        return output::print(&markdown());
    }
    let report = Report::gather(&Environment::of_process());
    if arguments.json {
        return output::print(&(serde_json::to_string_pretty(&report)? + "\n"));
    }
    output::print(&report.text(&Style::of_standard_output()))
}

#[derive(Serialize)]
struct Report {
    version: &'static str,
    build: Build,
    machine: Machine,
    limits: Limits,
    interfaces: Vec<InterfaceReport>,
    rdma: RdmaReport,
    /// What peers are told where the program names no host.
    advertised_address: Option<IpAddr>,
    variables: Vec<VariableReport>,
    near_misses: Vec<String>,
    advice: Vec<String>,
}

/// What this program can install.
const TRANSPORTS: &[&str] = if cfg!(feature = "rdma") { &["tcp", "rdma", "local"] } else { &["tcp", "local"] };

#[derive(Serialize)]
struct Build {
    target: String,
    optimized: bool,
    transports: &'static [&'static str],
}

#[derive(Serialize)]
struct Machine {
    kernel: Option<String>,
    cpus: usize,
    numa_nodes: Vec<u32>,
}

/// Soft and hard limits; `null` is unlimited. Absent where the system does not say.
#[derive(Serialize)]
struct Limits {
    locked_memory_bytes: Option<SoftHard>,
    open_files: Option<SoftHard>,
    huge_pages: Option<HugePageReport>,
    ephemeral_ports: Option<(u16, u16)>,
}

#[derive(Clone, Copy, Serialize)]
struct SoftHard {
    soft: Option<u64>,
    hard: Option<u64>,
}

#[derive(Serialize)]
struct HugePageReport {
    size_bytes: u64,
    total: u64,
    free: u64,
    transparent: Option<String>,
}

#[derive(Serialize)]
struct InterfaceReport {
    name: String,
    address: IpAddr,
    up: bool,
    running: bool,
}

/// The NICs, or why there is none.
#[derive(Serialize)]
struct RdmaReport {
    nics: Vec<NicReport>,
    /// "no RDMA device: …"
    problem: Option<String>,
}

#[derive(Default, Serialize)]
struct NicReport {
    name: String,
    port: u8,
    port_active: Option<bool>,
    /// "Ethernet" or "InfiniBand".
    link_layer: Option<&'static str>,
    gigabits: Option<u32>,
    mtu_bytes: Option<u32>,
    gid: Option<String>,
    gid_index: Option<u8>,
    numa_node: Option<u32>,
    pci_address: Option<String>,
    /// Locations of memory that the topology has it serve first, and those that it serves where others cannot.
    preferred_for: Vec<String>,
    available_for: Vec<String>,
    max_mr: Option<u32>,
    max_mr_size_bytes: Option<u64>,
    max_qp: Option<u32>,
    /// Why it cannot be used.
    problem: Option<String>,
}

#[derive(Serialize)]
struct VariableReport {
    name: &'static str,
    aliases: &'static [&'static str],
    section: &'static str,
    values: String,
    default: String,
    /// The text in the environment, under `name` or an alias.
    set: Option<String>,
    /// What holds.
    value: String,
    problem: Option<String>,
    has_effect: bool,
    help: &'static str,
}

impl From<Limit> for SoftHard {
    fn from(limit: Limit) -> SoftHard {
        SoftHard { soft: limit.soft, hard: limit.hard }
    }
}

impl From<HugePages> for HugePageReport {
    fn from(pages: HugePages) -> HugePageReport {
        HugePageReport { size_bytes: pages.size, total: pages.total, free: pages.free, transparent: pages.transparent }
    }
}

impl From<Interface> for InterfaceReport {
    fn from(interface: Interface) -> InterfaceReport {
        let Interface { name, address, up, running } = interface;
        InterfaceReport { name, address, up, running }
    }
}

impl From<&Reading> for VariableReport {
    fn from(reading: &Reading) -> VariableReport {
        let variable = reading.variable;
        VariableReport {
            name: variable.name,
            aliases: variable.aliases,
            section: variable.section.title(),
            values: variable.kind.to_string(),
            default: variable.default_text(),
            set: reading.text.clone(),
            value: reading.shown_value(),
            problem: reading.problem.clone(),
            has_effect: variable.has_effect(),
            help: variable.help,
        }
    }
}

#[cfg(feature = "rdma")]
impl RdmaReport {
    fn gather(config: &Config) -> RdmaReport {
        use transfer_engine::topology::{Machine, Topology};
        use transfer_engine::transport::rdma::device;

        let machine = Machine::default();
        let nics = match device::find_nics(&machine, &config.rdma) {
            Ok(nics) => nics,
            Err(error) => return RdmaReport { nics: Vec::new(), problem: Some(error.message().to_string()) },
        };
        let topology = Topology::find(&machine, &config.topology, &[]);
        let report = |nic: device::FoundNic| {
            let served = |is_preferred: bool| {
                let names = |(preferred, available): &(Vec<String>, Vec<String>)| match is_preferred {
                    true => preferred.contains(&nic.name),
                    false => available.contains(&nic.name),
                };
                topology.matrix().iter().filter(|(_, lists)| names(lists)).map(|(location, _)| location.clone()).collect()
            };
            NicReport {
                port: config.rdma.port,
                port_active: nic.port.map(|port| port.active),
                link_layer: nic.port.map(|port| if port.ethernet { "Ethernet" } else { "InfiniBand" }),
                gigabits: nic.port.map(|port| device::gigabits(port.active_speed, port.active_width)),
                mtu_bytes: nic.address.as_ref().ok().map(|address| address.mtu),
                gid: nic.address.as_ref().ok().map(|address| address.gid.to_string()),
                gid_index: nic.address.as_ref().ok().map(|address| address.gid_index),
                numa_node: nic.known.as_ref().and_then(|known| known.numa_node),
                pci_address: nic.known.as_ref().and_then(|known| known.pci_address.clone()),
                preferred_for: served(true),
                available_for: served(false),
                max_mr: nic.limits.map(|limits| limits.max_mr),
                max_mr_size_bytes: nic.limits.map(|limits| limits.max_mr_size),
                max_qp: nic.limits.map(|limits| limits.max_qp),
                problem: nic.address.err(),
                name: nic.name,
            }
        };
        RdmaReport { nics: nics.into_iter().map(report).collect(), problem: None }
    }
}

#[cfg(not(feature = "rdma"))]
impl RdmaReport {
    fn gather(_config: &Config) -> RdmaReport {
        let problem = "no RDMA device: this program was built without RDMA (Cargo feature rdma)";
        RdmaReport { nics: Vec::new(), problem: Some(problem.to_string()) }
    }
}

impl NicReport {
    /// What there is to say, in pieces.
    fn text(&self) -> String {
        let mut pieces = Vec::new();
        let state = match self.port_active {
            Some(true) => "active",
            Some(false) => "not active",
            None => "in an unknown state",
        };
        let mut port = format!("port {} is {state}", self.port);
        if let (Some(layer), Some(gigabits)) = (self.link_layer, self.gigabits) {
            port += &format!(" ({layer}, {gigabits} Gbit/s)");
        }
        pieces.push(port);
        if let (Some(gid), Some(index), Some(mtu)) = (&self.gid, self.gid_index, self.mtu_bytes) {
            pieces.push(format!("GID {gid} (index {index}), path MTU {mtu}"));
        }
        pieces.push(format!("NUMA node {}", self.numa_node.map_or_else(unknown, |node| node.to_string())));
        pieces.extend(self.pci_address.as_ref().map(|address| format!("PCI {address}")));
        let lists = [("preferred for", &self.preferred_for), ("available for", &self.available_for)];
        pieces.extend(lists.iter().filter(|(_, list)| !list.is_empty()).map(|(what, list)| format!("{what} {}", list.join(", "))));
        if let (Some(count), Some(size), Some(pairs)) = (self.max_mr, self.max_mr_size_bytes, self.max_qp) {
            pieces.push(format!("at most {count} memory regions of up to {}, {pairs} queue pairs", output::bytes(size)));
        }
        pieces.extend(self.problem.as_ref().map(|problem| format!("cannot be used: {problem}")));
        pieces.join("; ")
    }
}

impl Report {
    fn gather(environment: &Environment) -> Report {
        let limits = Limits {
            locked_memory_bytes: limits::locked_memory().ok().map(SoftHard::from),
            open_files: limits::open_files().ok().map(SoftHard::from),
            huge_pages: limits::huge_pages().ok().map(HugePageReport::from),
            ephemeral_ports: limits::ephemeral_ports().ok(),
        };
        let config = environment.config();
        let target = format!("{} {}", std::env::consts::ARCH, std::env::consts::OS);
        let mut report = Report {
            version: env!("CARGO_PKG_VERSION"),
            build: Build { target, optimized: !cfg!(debug_assertions), transports: TRANSPORTS },
            machine: Machine { kernel: limits::kernel_version().ok(), cpus: limits::cpu_count(), numa_nodes: limits::numa_nodes() },
            limits,
            interfaces: interfaces::list().unwrap_or_default().into_iter().map(InterfaceReport::from).collect(),
            rdma: RdmaReport::gather(&config),
            advertised_address: find_local_address(config.use_ipv6),
            variables: environment.readings().iter().map(VariableReport::from).collect(),
            near_misses: environment.near_misses().to_vec(),
            advice: Vec::new(),
        };
        report.advice = report.advise(&config);
        report
    }

    fn advise(&self, config: &Config) -> Vec<String> {
        let mut advice: Vec<String> = self.variables.iter().filter_map(|variable| variable.problem.clone()).collect();
        advice.extend(self.near_misses.iter().cloned());
        let idle: Vec<&str> = self
            .variables
            .iter()
            .filter(|variable| variable.set.is_some() && !variable.has_effect)
            .map(|variable| variable.name)
            .collect();
        if !idle.is_empty() {
            advice.push(format!("Set, but without effect in this version: {}.", idle.join(", ")));
        }
        if config.metric && matches!(config.log_level.as_str(), "WARN" | "ERROR") {
            advice.push("MC_TE_METRIC logs at level INFO, which is not logged here: set MC_LOG_LEVEL=INFO too.".to_string());
        }
        advice.extend(self.limits.advise(config));
        if self.advertised_address.is_none() {
            let family = if config.use_ipv6 { "IPv6" } else { "IPv4" };
            advice.push(format!(
                "No interface that is up and running has an {family} address that peers could use: name a host when creating an engine."
            ));
        }
        if !self.build.optimized {
            advice.push("This is a debug build: it is several times slower. Build with --release before measuring.".to_string());
        }
        advice
    }

    fn text(&self, style: &Style) -> String {
        let mut out = String::new();
        let section = |out: &mut String, title: &str| *out += &format!("\n{}\n", style.heading(title));
        let row = |out: &mut String, name: &str, value: String| {
            for (index, line) in wrap(&value, style.width - 20).iter().enumerate() {
                *out += &format!("  {:<17} {line}\n", if index == 0 { name } else { "" });
            }
        };

        out += &style.heading(&format!("transfer engine {}", self.version));
        out.push('\n');
        let optimization = if self.build.optimized { "optimized" } else { "debug" };
        row(&mut out, "Build", format!("{}, {optimization}; transports: {}", self.build.target, self.build.transports.join(", ")));
        row(&mut out, "Kernel", self.machine.kernel.clone().unwrap_or_else(unknown));
        row(&mut out, "CPUs", self.machine.cpus.to_string());
        let nodes: Vec<String> = self.machine.numa_nodes.iter().map(u32::to_string).collect();
        row(&mut out, "NUMA nodes", nodes.join(", "));

        section(&mut out, "Limits");
        let limit = |limit: Option<SoftHard>, show: &dyn Fn(u64) -> String| {
            let show = |value: Option<u64>| value.map_or("unlimited".to_string(), show);
            limit.map_or_else(unknown, |limit| format!("{} (hard limit {})", show(limit.soft), show(limit.hard)))
        };
        row(&mut out, "Locked memory", limit(self.limits.locked_memory_bytes, &output::bytes));
        row(&mut out, "Open files", limit(self.limits.open_files, &|number| number.to_string()));
        let pages = self.limits.huge_pages.as_ref().map_or_else(unknown, |pages| {
            let transparent = pages.transparent.as_deref().unwrap_or("not supported");
            let size = output::bytes(pages.size_bytes);
            let set_aside = match pages.total {
                0 => format!("none of {size} set aside"),
                total => format!("{total} of {size} set aside, {} free", pages.free),
            };
            format!("{set_aside}; transparent: {transparent}")
        });
        row(&mut out, "Huge pages", pages);
        let ports = self.limits.ephemeral_ports.map_or_else(unknown, |(lowest, highest)| format!("{lowest} to {highest}"));
        row(&mut out, "Outgoing ports", ports);

        section(&mut out, "Interfaces");
        for interface in &self.interfaces {
            let state = match (interface.up, interface.running) {
                (true, true) => "",
                (true, false) => ", up but not running",
                (false, _) => ", down",
            };
            let advertised = self.advertised_address == Some(interface.address);
            let advertised = if advertised { ", told to peers where the program names no host" } else { "" };
            row(&mut out, &interface.name, format!("{}{state}{advertised}", interface.address));
        }

        section(&mut out, "RDMA");
        for nic in &self.rdma.nics {
            row(&mut out, &nic.name, nic.text());
        }
        if let Some(problem) = &self.rdma.problem {
            for line in wrap(problem, style.width - 4) {
                let _ = writeln!(out, "  {line}");
            }
        }

        section(&mut out, "Advice");
        for advice in &self.advice {
            for (index, line) in wrap(advice, style.width - 4).iter().enumerate() {
                let mark = if index == 0 { style.warning("!") } else { " ".to_string() };
                let _ = writeln!(out, "  {mark} {line}");
            }
        }
        if self.advice.is_empty() {
            out += "  none\n";
        }

        section(&mut out, "Environment variables");
        let _ = writeln!(out, "  {}", style.faint("* set here   ! set here, but badly   - without effect in this version"));
        let mut last = "";
        for variable in &self.variables {
            if last != variable.section {
                last = variable.section;
                section(&mut out, variable.section);
            }
            variable.text(style, &mut out);
        }
        out
    }
}

fn unknown() -> String {
    "unknown".to_string()
}

impl VariableReport {
    fn text(&self, style: &Style, out: &mut String) {
        let effect = if self.has_effect { ' ' } else { '-' };
        let value = if self.value.is_empty() { "none" } else { &self.value };
        let head = match (&self.set, &self.problem) {
            (None, _) => format!("  {effect} {:<42} {value}", self.name),
            (Some(_), None) => style.set(&format!("* {effect} {:<42} {value}", self.name)),
            (Some(set), Some(_)) => style.warning(&format!("! {effect} {:<42} {value}, not {set:?}", self.name)),
        };
        let _ = writeln!(out, "{head}");
        let mut details = format!("{} Default: {}. Values: {}.", self.help, self.default, self.values);
        if !self.aliases.is_empty() {
            details += &format!(" Also read as {}.", self.aliases.join(", "));
        }
        for line in wrap(&details, style.width - 6) {
            let _ = writeln!(out, "      {}", style.faint(&line));
        }
    }
}

impl Limits {
    fn advise(&self, config: &Config) -> Vec<String> {
        /// An engine with a thousand peers and four connections each way.
        const ENOUGH_FILES: u64 = 8192;
        /// Two ports an engine; a draw gives up after 500 attempts.
        const ENOUGH_PORTS: u16 = 64;
        let mut advice = Vec::new();
        if let Some(SoftHard { soft: Some(soft), hard }) = self.locked_memory_bytes {
            let how = if hard.is_none() { "Run `ulimit -l unlimited` first." } else { RAISE_LOCKED_MEMORY };
            advice.push(format!(
                "Locked memory is limited to {}: RDMA cannot register more than that, unless the process has CAP_IPC_LOCK; TCP does \
                 not care. {how}",
                output::bytes(soft)
            ));
        }
        if let Some(SoftHard { hard: Some(hard), .. }) = self.open_files.filter(|limit| limit.hard < Some(ENOUGH_FILES)) {
            advice.push(format!(
                "Only {hard} files may be open, and every peer takes up to {} connections each way. Raise the hard limit: `LimitNOFILE=` \
                 in a systemd unit, `--ulimit nofile=` of docker, or /etc/security/limits.conf.",
                config.tcp_lanes_per_peer
            ));
        }
        if let Some(pages) = &self.huge_pages {
            let transparent = pages.transparent.as_deref().unwrap_or("never");
            if pages.total == 0 && transparent == "never" {
                advice.push(
                    "Huge pages are off: registering large memory for RDMA takes several times longer on 4 KiB pages. Set some aside \
                     (`sysctl vm.nr_hugepages=`), or let programs ask for them (`echo madvise > \
                     /sys/kernel/mm/transparent_hugepage/enabled`)."
                        .to_string(),
                );
            }
        }
        let (lowest, highest) = (config.min_rpc_port, config.max_rpc_port);
        if highest - lowest < ENOUGH_PORTS {
            advice.push(format!(
                "Only {} ports ({lowest} to {highest}) are there to be drawn, and each engine takes two; leave at least {ENOUGH_PORTS}.",
                u32::from(highest - lowest) + 1
            ));
        }
        if let Some((first, last)) = self.ephemeral_ports.filter(|(first, last)| lowest <= *last && *first <= highest) {
            advice.push(format!(
                "The ports that engines draw ({lowest} to {highest}) overlap with those of outgoing connections ({first} to {last}), which \
                 may take them away. Move one: MC_MIN_RPC_PORT and MC_MAX_RPC_PORT, or `sysctl net.ipv4.ip_local_port_range`."
            ));
        }
        advice
    }
}

const RAISE_LOCKED_MEMORY: &str = "Raise it: `LimitMEMLOCK=infinity` in a systemd unit, `--ulimit memlock=-1` of docker, or \
                                   /etc/security/limits.conf.";

/// The documentation of [`VARIABLES`], `docs/configuration.md`.
fn markdown() -> String {
    let mut out = String::from(
        "# Configuration\n\n\
         <!-- Written by `te info --markdown`; do not edit. -->\n\n\
         Environment variables, read when an engine is created; later changes have no effect on it. A value that is not among those \
         listed is reported in the log, and the default holds; so is a name that looks like a misspelt one. `te info` shows what holds \
         on a machine, with advice.\n\n\
         A switch takes 1, true, yes, on, or 0, false, no, off, in any case. Variables for which any value, even an empty one, will do \
         are off only where they are not set. Of several names the first that is set counts.\n\n",
    );
    for section in [Section::Core, Section::Tcp, Section::Rdma, Section::Ours] {
        let _ = write!(out, "## {}\n\n| variable | values | default | what it does |\n|---|---|---|---|\n", section.title());
        for variable in VARIABLES.iter().filter(|variable| variable.section == section) {
            let names: Vec<String> = [variable.name].iter().chain(variable.aliases).map(|name| format!("`{name}`")).collect();
            let effect = if variable.has_effect() { "" } else { " *Accepted, without effect in this version.*" };
            let _ = writeln!(
                out,
                "| {} | {} | {} | {}{effect} |",
                names.join("<br>"),
                variable.kind,
                variable.default_text(),
                variable.help.replace('<', "&lt;")
            );
        }
        out.push('\n');
    }
    out.truncate(out.trim_end().len());
    out.push('\n');
    out
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;

    fn report(set: &'static [(&'static str, &'static str)]) -> Report {
        let lookup = |name: &str| set.iter().find(|(set, _)| *set == name).map(|(_, value)| OsString::from(value));
        Report::gather(&Environment::from_source(&lookup, set.iter().map(|(name, _)| OsString::from(name))))
    }

    fn plain(report: &Report, width: usize) -> String {
        report.text(&Style { colour: false, width })
    }

    const ODD: &[(&str, &str)] = &[
        ("MC_HANDSHAKE_PORT", "abc"),
        ("MC_TCP_LANES_PER_PEER", "7"),
        ("MC_TCP_SLICE_SIZE", "4096"),
        ("MC_LOG_LEVLE", "INFO"),
        ("MC_REDIS_PASSWORD", "hunter2"),
    ];

    #[test]
    fn text_shows_every_variable_with_its_value_and_marks_what_is_set() {
        let text = plain(&report(ODD), 100);
        for variable in VARIABLES {
            assert!(text.contains(variable.name) && text.contains(&variable.help[..10]), "{}", variable.name);
        }
        let line = |name: &str| text.lines().find(|line| line.contains(&format!(" {name} "))).unwrap();
        assert_eq!(
            line("MC_HANDSHAKE_PORT").split_whitespace().collect::<Vec<_>>().join(" "),
            "! MC_HANDSHAKE_PORT 12001, not \"abc\""
        );
        assert!(line("MC_TCP_LANES_PER_PEER").starts_with("*   MC") && line("MC_TCP_LANES_PER_PEER").ends_with(" 7"));
        assert!(line("MC_TCP_SLICE_SIZE").starts_with("* - MC"));
        assert!(line("MC_TCP_PROTO").starts_with("    MC"));
    }

    #[test]
    fn text_fits_eighty_columns() {
        for line in plain(&report(ODD), 80).lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
    }

    #[test]
    fn advice_names_bad_values_near_misses_and_what_has_no_effect() {
        let advice = report(ODD).advice.join("\n");
        for text in ["MC_HANDSHAKE_PORT=\"abc\"", "MC_LOG_LEVLE", "is MC_LOG_LEVEL meant", "MC_TCP_SLICE_SIZE, "] {
            assert!(advice.contains(text) || advice.contains(text.trim_end_matches(", ")), "{text}: {advice}");
        }
    }

    #[test]
    fn secrets_are_in_no_form_of_the_report() {
        let report = report(ODD);
        let json = serde_json::to_string(&report).unwrap();
        assert!(!json.contains("hunter2") && !plain(&report, 80).contains("hunter2"));
    }

    #[test]
    fn json_says_what_the_text_says() {
        let json: serde_json::Value = serde_json::from_str(&serde_json::to_string(&report(ODD)).unwrap()).unwrap();
        let variables = json["variables"].as_array().unwrap();
        assert_eq!(variables.len(), VARIABLES.len());
        let port = variables.iter().find(|variable| variable["name"] == "MC_HANDSHAKE_PORT").unwrap();
        assert_eq!((&port["set"], &port["value"], &port["default"]), (&"abc".into(), &"12001".into(), &"12001".into()));
        assert!(port["problem"].is_string() && json["machine"]["cpus"].as_u64() >= Some(1));
        assert!(!json["advice"].as_array().unwrap().is_empty());
    }

    #[test]
    fn limits_are_advised_on_only_where_they_hurt() {
        let good = || Limits {
            locked_memory_bytes: Some(SoftHard { soft: None, hard: None }),
            open_files: Some(SoftHard { soft: Some(1024), hard: Some(1 << 20) }),
            huge_pages: Some(HugePageReport { size_bytes: 2 << 20, total: 0, free: 0, transparent: Some("madvise".to_string()) }),
            ephemeral_ports: Some((32768, 60999)),
        };
        let config = Config::default();
        assert_eq!(good().advise(&config), Vec::<String>::new());
        let advice = |limits: Limits, config: &Config| {
            let advice = limits.advise(config);
            assert_eq!(advice.len(), 1, "{advice:?}");
            advice[0].clone()
        };
        let eight = Some(8 << 20);
        let memory = |hard| Limits { locked_memory_bytes: Some(SoftHard { soft: eight, hard }), ..good() };
        assert!(
            advice(memory(eight), &config).contains("limited to 8 MiB") && advice(memory(eight), &config).contains("LimitMEMLOCK")
        );
        assert!(advice(memory(None), &config).contains("ulimit -l unlimited"));
        let files = Limits { open_files: Some(SoftHard { soft: Some(64), hard: Some(64) }), ..good() };
        assert!(advice(files, &config).contains("Only 64 files"));
        let pages = HugePageReport { size_bytes: 2 << 20, total: 0, free: 0, transparent: Some("never".to_string()) };
        assert!(advice(Limits { huge_pages: Some(pages), ..good() }, &config).contains("Huge pages are off"));
        let ports = Limits { ephemeral_ports: Some((16000, 60999)), ..good() };
        assert!(advice(ports, &config).contains("overlap"));
        let few = Config { min_rpc_port: 15000, max_rpc_port: 15001, ..Config::default() };
        assert!(advice(good(), &few).contains("Only 2 ports (15000 to 15001)"));
    }

    #[test]
    fn interfaces_are_shown_with_the_one_that_peers_are_told() {
        let mut report = report(&[]);
        let interface =
            |name: &str, address: [u8; 4], up| InterfaceReport { name: name.to_string(), address: address.into(), up, running: up };
        report.interfaces = vec![
            interface("lo", [127, 0, 0, 1], true),
            interface("eth0", [10, 0, 0, 1], true),
            interface("eth1", [10, 0, 0, 2], false),
        ];
        report.advertised_address = Some([10, 0, 0, 1].into());
        let text = plain(&report, 80);
        let line = |name: &str| text.lines().find(|line| line.trim_start().starts_with(name)).unwrap();
        assert!(line("eth0").contains("10.0.0.1") && line("eth0").contains("told to peers"));
        assert!(!line("lo ").contains("told") && line("eth1").ends_with("down"));

        report.advertised_address = None;
        assert!(report.advise(&Config::default()).join("\n").contains("name a host when creating"));
    }

    #[test]
    fn nics_are_shown_with_all_that_is_known_of_them() {
        let mut report = report(&[]);
        assert_eq!(report.rdma.nics.is_empty(), report.rdma.problem.is_some(), "NICs, or why there is none");
        let good = NicReport {
            name: "mlx5_0".into(),
            port: 1,
            port_active: Some(true),
            link_layer: Some("Ethernet"),
            gigabits: Some(100),
            mtu_bytes: Some(4096),
            gid: Some("00:01".into()),
            gid_index: Some(3),
            numa_node: Some(1),
            pci_address: Some("0000:3b:00.0".into()),
            preferred_for: vec!["cpu:1".into()],
            available_for: vec!["cpu:0".into()],
            max_mr: Some(1000),
            max_mr_size_bytes: Some(1 << 30),
            max_qp: Some(200),
            problem: None,
        };
        let bad = NicReport { name: "mlx5_1".into(), port: 1, problem: Some("its cable is out".into()), ..NicReport::default() };
        report.rdma = RdmaReport { nics: vec![good, bad], problem: None };
        let text = plain(&report, 1000);
        let line = |name: &str| text.lines().find(|line| line.trim_start().starts_with(name)).unwrap().to_string();
        for part in [
            "port 1 is active (Ethernet, 100 Gbit/s)",
            "GID 00:01 (index 3), path MTU 4096",
            "NUMA node 1; PCI 0000:3b:00.0",
            "preferred for cpu:1; available for cpu:0",
        ] {
            assert!(line("mlx5_0").contains(part), "{part}: {text}");
        }
        assert!(text.contains("at most 1000 memory regions of up to 1 GiB, 200 queue pairs"), "{text}");
        assert!(line("mlx5_1").contains("unknown state") && line("mlx5_1").contains("cannot be used: its cable is out"));

        report.rdma = RdmaReport { nics: Vec::new(), problem: Some("no RDMA device: for a reason".into()) };
        assert!(plain(&report, 80).contains("\n  no RDMA device: for a reason\n"));
    }

    #[test]
    fn markdown_has_a_row_for_every_variable() {
        let text = markdown();
        let rows: Vec<&str> = text.lines().filter(|line| line.starts_with("| `")).collect();
        assert_eq!(rows.len(), VARIABLES.len());
        for row in rows {
            assert_eq!(row.matches('|').count(), 5, "{row}");
        }
        assert!(text.contains("| `MC_MIN_RPC_PORT`<br>`MC_MIN_PRC_PORT` | 1024 to 32767 or 61000 to 65535 | 15000 |"));
        assert!(text.contains("transfer_engine.&lt;process id>.log"));
    }
}
