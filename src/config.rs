//! One table of every environment variable, and the reading of it.
//!
//! [`VARIABLES`] is the only place where a variable's name, aliases, range, default, help and effect are written down: the reader goes
//! through it, `te info` prints it, and the documentation is generated from it.
//!
//! Reading never fails. A value that is not of its variable's kind or range is replaced by the default, and a name that looks like a
//! misspelt variable is pointed out; each such text is logged once per process, whatever the number of engines.
//!
//! The environment is read when an engine is created (some 50 look-ups, microseconds) and not again. The process environment is
//! only read, never written. Nothing here is locked but the list of texts already logged.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use parking_lot::Mutex;
use tracing::Level;

use crate::sys::limits;

/// What the environment says, checked. Read when an engine is created.
#[derive(Clone, Debug)]
pub struct Config {
    /// Port of a peer whose name carries none.
    pub handshake_port: u16,
    /// Lowest port that RPC and TCP data listeners draw; at most `max_rpc_port`.
    pub min_rpc_port: u16,
    /// Highest port that RPC and TCP data listeners draw.
    pub max_rpc_port: u16,
    /// Whether sockets, names and interfaces are IPv6 only.
    pub use_ipv6: bool,
    /// Listen backlog of the handshake channel; at least 1.
    pub handshake_backlog: u32,
    /// How long connecting to a peer's handshake channel may take.
    pub handshake_connect_timeout: Duration,
    /// Largest request that the handshake channel accepts, in bytes.
    pub handshake_max_length: usize,
    /// Whether, with a metadata server, the RPC location is taken from the local server name.
    pub legacy_rpc_port_binding: bool,
    /// Host that is advertised with a metadata server.
    pub tcp_bind_address: Option<String>,
    /// Part of the prefix of metadata keys.
    pub metadata_cluster_id: String,
    /// What a redis metadata server asks of its clients.
    pub redis: RedisConfig,
    /// Whether descriptors of peers are fetched anew at every use.
    pub disable_metacache: bool,
    /// How often descriptors of peers are fetched anew in the background.
    pub metadata_refresh_interval: Option<Duration>,
    /// `TE_METRICS_DIRECTORY`: where engines open the sockets at which their metrics can be read; none are opened without.
    pub metrics_directory: Option<PathBuf>,
    /// Whether creating an engine installs TCP and nothing else.
    pub force_tcp: bool,
    /// `MC_SLICE_TIMEOUT`, when set: the deadline of transfers. Also decides whether the old C API shows TIMEOUT.
    pub slice_timeout: Option<Duration>,
    /// Whether devices register memory side by side; where nothing is said, as with [`Parallelism::Auto`].
    pub parallel_registration: Option<Parallelism>,
    /// Most threads that register memory at a time, the caller's among them; 0: as many as there are CPUs.
    pub registration_threads: usize,
    /// Longest piece of memory that is registered with a device at once, in bytes; at least 1.
    pub max_mr_size: u64,
    /// Whether transfers use version 1 of the TCP protocol with every peer.
    pub tcp_force_v1: bool,
    /// How long a peer may take to answer a TCP request.
    pub tcp_status_timeout: Duration,
    /// Connections to one peer; at least 1.
    pub tcp_lanes_per_peer: usize,
    /// Threads that move bytes over TCP; at least 1.
    pub tcp_io_threads: usize,
    /// Whether local copies go through the kernel, which refuses bad pages instead of raising a signal.
    pub checked_local_copy: bool,
    /// Whether registering the same range again counts a reference.
    pub register_refcount: bool,
    /// Whether throughput is logged at intervals.
    pub metric: bool,
    /// How often throughput is logged.
    pub metric_interval: Duration,
    /// Least severe level that is logged.
    pub log_level: Level,
    /// Directory of the log file; standard error without.
    pub log_directory: Option<PathBuf>,
    /// Which devices discovery finds and how they are chosen.
    pub topology: TopologyConfig,
    /// What only the RDMA transport reads.
    pub rdma: RdmaConfig,
}

/// The part of the configuration about finding and choosing NICs.
#[derive(Clone, Debug, Default)]
pub struct TopologyConfig {
    /// File with a NIC priority matrix that replaces discovery.
    pub file: Option<PathBuf>,
    /// Names of the NICs that discovery may use; all where it is empty.
    pub filters: Vec<String>,
    /// Whether NICs are chosen in turn instead of at random.
    pub round_robin: bool,
    /// Whether automatic discovery installs RDMA even where it finds no NIC.
    pub force_rdma: bool,
}

/// The part of the configuration about a redis metadata server.
#[derive(Clone, Default)]
pub struct RedisConfig {
    /// Whose password it is; the server's default user without.
    pub username: Option<String>,
    /// Without one nothing is authenticated, whatever the user.
    pub password: Option<String>,
    /// Number of the database.
    pub database: u8,
}

/// The password stays hidden.
impl fmt::Debug for RedisConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let password = self.password.as_ref().map(|_| "(hidden)");
        let RedisConfig { username, database, .. } = self;
        f.debug_struct("RedisConfig").field("username", username).field("password", &password).field("database", database).finish()
    }
}

/// The part of the configuration about the RDMA transport.
#[derive(Clone, Debug, Default)]
pub struct RdmaConfig {
    /// The verbs library to load: a path, or a name that the loader looks for.
    pub library: PathBuf,
    /// Port of each NIC, from 1.
    pub port: u8,
    /// Index in the port's GID table; chosen by the kinds of GIDs where not set.
    pub gid_index: Option<u8>,
    /// Index in the port's table of partition keys.
    pub pkey_index: u16,
    /// Completion queues per NIC; at least 1.
    pub completion_queues: usize,
    /// Entries of a completion queue.
    pub completion_queue_entries: u32,
    /// Endpoints per NIC.
    pub max_endpoints: usize,
    /// Queue pairs per endpoint, at least 1; peers must agree.
    pub queue_pairs_per_endpoint: usize,
    /// Pieces of local memory that a queue pair's work requests have room for.
    pub max_pieces: u32,
    /// Outstanding work requests per queue pair.
    pub max_work_requests: u32,
    /// Inline bytes that a queue pair's work requests have room for.
    pub max_inline: u32,
    /// Ceiling of the path MTU, in bytes.
    pub mtu: u32,
    /// Bytes of a slice; at least 1.
    pub slice_size: u64,
    /// `MC_FRAGMENT_RATIO`: see [`RdmaConfig::fragment_limit`].
    pub fragment_ratio: Option<u64>,
    /// How often a slice is tried before it fails.
    pub retry_count: u32,
    /// Whether endpoints are evicted in order of age alone.
    pub evict_oldest: bool,
    /// Traffic class of the global route.
    pub traffic_class: u8,
    /// Service level.
    pub service_level: u8,
    /// Whether devices may order their writes to memory as they like.
    pub relaxed_ordering: bool,
    /// How many other GIDs are tried when a connection fails with EINVAL and the GID was chosen automatically.
    pub gid_retries: u32,
    /// How long a pair of NICs is not used after an error.
    pub rail_pause: Duration,
    /// How long a server is not connected to anew after an endpoint to it has ended.
    pub reconnect_pause: Duration,
    /// Host in the names of NICs that peers are told; the engine's own name without.
    pub bind_address: Option<String>,
    /// Whether the peer's NIC of the same name is preferred.
    pub same_name_affinity: bool,
    /// Whether `peer_affinity` holds.
    pub use_peer_affinity: bool,
    /// For NICs of this process, the peers' NICs to use.
    pub peer_affinity: PeerAffinity,
}

impl RdmaConfig {
    /// A slice takes the remainder of a request if it is longer than `slice_size` by at most this.
    pub fn fragment_limit(&self) -> u64 {
        match self.fragment_ratio {
            Some(ratio) if ratio < self.slice_size => self.slice_size / ratio,
            Some(_) => self.slice_size / 4,
            None => 16384,
        }
    }
}

/// NICs of this process, and for each the peers' NICs to use.
pub type PeerAffinity = Vec<(String, Vec<String>)>;

/// Reads `mlx5_0=mlx5_0,mlx5_1;mlx5_1=mlx5_2`.
fn parse_peer_affinity(text: &str) -> PeerAffinity {
    let entry = |part: &str| {
        let (nic, peers) = part.split_once('=')?;
        let peers: Vec<String> = parse_names(peers);
        (!nic.trim().is_empty() && !peers.is_empty()).then(|| (nic.trim().to_string(), peers))
    };
    text.split(';').filter_map(entry).collect()
}

/// Reads names that are separated by commas.
fn parse_names(text: &str) -> Vec<String> {
    text.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_string).collect()
}

impl Default for Config {
    /// What an empty environment says.
    fn default() -> Config {
        Environment::from_source(&|_| None, []).config()
    }
}

impl Config {
    /// Reads the environment of the process, and logs what is wrong with it unless that has been done before.
    pub fn from_environment() -> Config {
        let environment = Environment::of_process();
        environment.log_problems();
        environment.config()
    }

    /// Where the table's effects start from; each default is applied on top.
    fn blank() -> Config {
        Config {
            handshake_port: 0,
            min_rpc_port: 0,
            max_rpc_port: 0,
            use_ipv6: false,
            handshake_backlog: 0,
            handshake_connect_timeout: Duration::ZERO,
            handshake_max_length: 0,
            legacy_rpc_port_binding: false,
            tcp_bind_address: None,
            metadata_cluster_id: String::new(),
            redis: RedisConfig::default(),
            disable_metacache: false,
            metadata_refresh_interval: None,
            metrics_directory: None,
            force_tcp: false,
            slice_timeout: None,
            parallel_registration: None,
            registration_threads: 0,
            max_mr_size: 0,
            tcp_force_v1: false,
            tcp_status_timeout: Duration::ZERO,
            tcp_lanes_per_peer: 0,
            tcp_io_threads: 0,
            checked_local_copy: false,
            register_refcount: false,
            metric: false,
            metric_interval: Duration::ZERO,
            log_level: Level::ERROR,
            log_directory: None,
            topology: TopologyConfig::default(),
            rdma: RdmaConfig::default(),
        }
    }
}

/// Whether devices register memory side by side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Parallelism {
    /// Where it is faster.
    #[default]
    Auto,
    /// Never: one after the other on the caller's thread.
    Sequential,
    /// Always, whatever the size.
    Parallel,
}

/// Which part of the engine a variable belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    /// Engine, names, metadata, log; upstream's names.
    Core,
    /// TCP transport; upstream's names.
    Tcp,
    /// RDMA transport; upstream's names.
    Rdma,
    /// What only this library has.
    Ours,
}

impl Section {
    /// The heading that listings show.
    pub fn title(self) -> &'static str {
        match self {
            Section::Core => "Core and metadata",
            Section::Tcp => "TCP",
            Section::Rdma => "RDMA",
            Section::Ours => "This library's own",
        }
    }
}

/// What a number counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Things, or an ordinal.
    One,
    /// Bytes.
    Bytes,
    /// Seconds.
    Seconds,
    /// Milliseconds.
    Milliseconds,
}

impl Unit {
    /// Something numeric followed by the unit's short form.
    pub fn with(self, number: impl fmt::Display) -> String {
        match self {
            Unit::One => number.to_string(),
            Unit::Bytes => format!("{number} bytes"),
            Unit::Seconds => format!("{number} s"),
            Unit::Milliseconds => format!("{number} ms"),
        }
    }
}

/// What a variable's value may be.
#[derive(Clone, Debug)]
pub enum Kind {
    /// Any value, even an empty one, switches it on.
    Presence,
    /// 1, true, yes, on, or 0, false, no, off; in any case.
    Switch,
    /// Decimal digits and nothing else, within one of the ranges.
    Number(&'static [RangeInclusive<u64>], Unit),
    /// One of the words, in any case.
    Choice(&'static [&'static str]),
    /// Any text; an empty one is as good as none.
    Text,
    /// Text that is never shown or logged.
    Secret,
    /// A path of the file system; an empty one is as good as none.
    Path,
}

const ON: [&str; 4] = ["1", "true", "yes", "on"];
const OFF: [&str; 4] = ["0", "false", "no", "off"];

impl Kind {
    fn parse(&self, text: &str) -> Option<Value> {
        let is = |word: &&&str| word.eq_ignore_ascii_case(text);
        match self {
            Kind::Presence => Some(Value::Switch(true)),
            Kind::Switch if ON.iter().any(|word| is(&word)) => Some(Value::Switch(true)),
            Kind::Switch => OFF.iter().any(|word| is(&word)).then_some(Value::Switch(false)),
            // `parse` alone would take a leading plus sign.
            Kind::Number(ranges, _) if text.bytes().all(|byte| byte.is_ascii_digit()) => {
                let number = text.parse().ok()?;
                ranges.iter().any(|range| range.contains(&number)).then_some(Value::Number(number))
            }
            Kind::Number(..) => None,
            Kind::Choice(words) => words.iter().find(is).map(|word| Value::Text(word.to_string())),
            Kind::Text | Kind::Secret | Kind::Path if text.is_empty() => Some(Value::Unset),
            Kind::Text | Kind::Secret | Kind::Path => Some(Value::Text(text.to_string())),
        }
    }
}

/// What a listing shows as its range.
impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Presence => write!(f, "any value, even an empty one"),
            Kind::Switch => write!(f, "{} or {}", ON.join(", "), OFF.join(", ")),
            Kind::Number(ranges, unit) => {
                let ranges: Vec<String> = ranges.iter().map(|range| format!("{} to {}", range.start(), range.end())).collect();
                f.write_str(&unit.with(ranges.join(" or ")))
            }
            Kind::Choice(words) => write!(f, "{}", words.join(", ")),
            Kind::Text | Kind::Secret => write!(f, "text"),
            Kind::Path => write!(f, "a path"),
        }
    }
}

/// What holds where a variable is not set, or badly.
#[derive(Clone, Copy, Debug)]
pub enum Preset {
    /// Nothing: off, none, or empty, as the help says.
    Unset,
    /// A value, written as one would write it into the environment.
    Text(&'static str),
    /// As many as the CPUs that this process may run on, but not more than this, and at least one.
    CpusAtMost(u64),
}

/// A checked value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// Not set, without a default.
    Unset,
    /// Of a presence variable or a switch.
    Switch(bool),
    /// In the unit of its kind.
    Number(u64),
    /// Text, path, or the chosen word as the table spells it.
    Text(String),
}

impl Value {
    fn is_on(&self) -> bool {
        *self == Value::Switch(true)
    }

    fn number(&self) -> u64 {
        if let Value::Number(number) = self { *number } else { 0 }
    }

    fn text(&self) -> Option<&str> {
        if let Value::Text(text) = self { Some(text) } else { None }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Unset => Ok(()),
            Value::Switch(on) => f.write_str(if *on { "on" } else { "off" }),
            Value::Number(number) => write!(f, "{number}"),
            Value::Text(text) => f.write_str(text),
        }
    }
}

/// An environment variable.
#[derive(Debug)]
pub struct Variable {
    /// The name to use.
    pub name: &'static str,
    /// Other names that are read where `name` is not set, in this order.
    pub aliases: &'static [&'static str],
    /// Which part of the engine it belongs to.
    pub section: Section,
    /// What its value may be.
    pub kind: Kind,
    /// What holds without it.
    pub default: Preset,
    /// One sentence on what it does.
    pub help: &'static str,
    /// How it changes the configuration; without one it is accepted and has no effect in this version.
    effect: Option<fn(&mut Config, &Value)>,
}

impl Variable {
    /// Whether setting it changes anything in this version. The others are accepted because deployments set them.
    pub fn has_effect(&self) -> bool {
        self.effect.is_some()
    }

    fn default_value(&self) -> Value {
        match self.default {
            Preset::Unset if matches!(self.kind, Kind::Presence | Kind::Switch) => Value::Switch(false),
            Preset::Unset => Value::Unset,
            Preset::Text(text) => self.kind.parse(text).unwrap_or(Value::Unset),
            Preset::CpusAtMost(limit) => Value::Number((limits::cpu_count() as u64).clamp(1, limit)),
        }
    }

    /// The default with its unit; `off` or `none` where nothing holds.
    pub fn default_text(&self) -> String {
        match (&self.kind, self.default) {
            (Kind::Presence | Kind::Switch, Preset::Unset) => "off".to_string(),
            (_, Preset::Unset) => "none".to_string(),
            (Kind::Number(_, unit), Preset::Text(text)) => unit.with(text),
            (_, Preset::Text(text)) => text.to_string(),
            (_, Preset::CpusAtMost(limit)) => format!("number of CPUs, at most {limit}"),
        }
    }
}

const CORE: Variable = Variable {
    name: "",
    aliases: &[],
    section: Section::Core,
    kind: Kind::Presence,
    default: Preset::Unset,
    help: "",
    effect: None,
};
const TCP: Variable = Variable { section: Section::Tcp, ..CORE };
const RDMA: Variable = Variable { section: Section::Rdma, ..CORE };
const OURS: Variable = Variable { section: Section::Ours, ..CORE };

const MIN_RPC_PORT: &str = "MC_MIN_RPC_PORT";
const MAX_RPC_PORT: &str = "MC_MAX_RPC_PORT";
/// Outside of the range from which Linux draws ports of outgoing connections, by default 32768 to 60999.
const RPC_PORTS: Kind = Kind::Number(&[1024..=32767, 61000..=65535], Unit::One);
/// What the loader looks for where nothing else is said.
const VERBS_LIBRARY: &str = "libibverbs.so.1";
/// Upstream's "greater than zero", bounded by what its 32-bit integers hold.
const POSITIVE: RangeInclusive<u64> = 1..=i32::MAX as u64;

/// Every variable that is read, by section.
pub static VARIABLES: &[Variable] = &[
    Variable {
        name: "MC_HANDSHAKE_PORT",
        kind: Kind::Number(&[1..=65535], Unit::One),
        default: Preset::Text("12001"),
        help: "Port of a server name that carries none.",
        effect: Some(|config, value| config.handshake_port = value.number() as u16),
        ..CORE
    },
    Variable {
        name: MIN_RPC_PORT,
        aliases: &["MC_MIN_PRC_PORT"],
        kind: RPC_PORTS,
        default: Preset::Text("15000"),
        help: "Lowest port that handshake and TCP data listeners draw; if it or the highest is bad, both defaults hold.",
        effect: Some(|config, value| config.min_rpc_port = value.number() as u16),
        ..CORE
    },
    Variable {
        name: MAX_RPC_PORT,
        aliases: &["MC_MAX_PRC_PORT"],
        kind: RPC_PORTS,
        default: Preset::Text("17000"),
        help: "Highest port that handshake and TCP data listeners draw; not below the lowest.",
        effect: Some(|config, value| config.max_rpc_port = value.number() as u16),
        ..CORE
    },
    Variable {
        name: "MC_LEGACY_RPC_PORT_BINDING",
        help: "With a metadata server: be reached at the host and port of the local server name instead of a drawn port.",
        effect: Some(|config, value| config.legacy_rpc_port_binding = value.is_on()),
        ..CORE
    },
    Variable {
        name: "MC_TCP_BIND_ADDRESS",
        kind: Kind::Text,
        help: "With a metadata server: host that peers are told; listeners still bind to every address.",
        effect: Some(|config, value| config.tcp_bind_address = value.text().map(str::to_string)),
        ..CORE
    },
    Variable {
        name: "MC_USE_IPV6",
        help: "Sockets, names and interfaces in IPv6 only.",
        effect: Some(|config, value| config.use_ipv6 = value.is_on()),
        ..CORE
    },
    Variable {
        name: "MC_HANDSHAKE_LISTEN_BACKLOG",
        kind: Kind::Number(&[POSITIVE], Unit::One),
        default: Preset::Text("128"),
        help: "Connections to the handshake channel that may wait to be accepted.",
        effect: Some(|config, value| config.handshake_backlog = value.number() as u32),
        ..CORE
    },
    Variable {
        name: "MC_HANDSHAKE_CONNECT_TIMEOUT",
        kind: Kind::Number(&[1..=3599], Unit::Seconds),
        default: Preset::Text("5"),
        help: "How long connecting to a peer's handshake channel may take.",
        effect: Some(|config, value| config.handshake_connect_timeout = Duration::from_secs(value.number())),
        ..CORE
    },
    Variable {
        name: "MC_HANDSHAKE_MAX_LENGTH",
        kind: Kind::Number(&[1 << 20..=128 << 20], Unit::Bytes),
        default: Preset::Text("1048576"),
        help: "Largest handshake request that is accepted; replies are accepted up to 134217728 bytes whatever it says.",
        effect: Some(|config, value| config.handshake_max_length = value.number() as usize),
        ..CORE
    },
    Variable {
        name: "MC_METADATA_CLUSTER_ID",
        kind: Kind::Text,
        help: "Part of the prefix of all metadata keys, which keeps clusters on one metadata server apart.",
        effect: Some(|config, value| config.metadata_cluster_id = value.text().unwrap_or_default().to_string()),
        ..CORE
    },
    Variable {
        name: "MC_REDIS_USERNAME",
        kind: Kind::Text,
        help: "User of the redis metadata server; its default user without. Counts only with a password.",
        effect: Some(|config, value| config.redis.username = value.text().map(str::to_string)),
        ..CORE
    },
    Variable {
        name: "MC_REDIS_PASSWORD",
        kind: Kind::Secret,
        help: "Password of the redis metadata server; nothing is authenticated without.",
        effect: Some(|config, value| config.redis.password = value.text().map(str::to_string)),
        ..CORE
    },
    Variable {
        name: "MC_REDIS_DB_INDEX",
        kind: Kind::Number(&[0..=255], Unit::One),
        default: Preset::Text("0"),
        help: "Database of the redis metadata server.",
        effect: Some(|config, value| config.redis.database = value.number() as u8),
        ..CORE
    },
    Variable {
        name: "MC_DISABLE_METACACHE",
        help: "Fetch a peer's descriptor anew at every use.",
        effect: Some(|config, value| config.disable_metacache = value.is_on()),
        ..CORE
    },
    Variable {
        name: "MC_TE_METADATA_REFRESH_INTERVAL_SECONDS",
        kind: Kind::Number(&[0..=i32::MAX as u64], Unit::Seconds),
        default: Preset::Text("0"),
        help: "How often peers' descriptors are fetched anew in the background; 0 is never.",
        effect: Some(|config, value| {
            config.metadata_refresh_interval = (value.number() > 0).then(|| Duration::from_secs(value.number()));
        }),
        ..CORE
    },
    Variable {
        name: "MC_FORCE_TCP",
        help: "Creating an engine installs the TCP transport and nothing else.",
        effect: Some(|config, value| config.force_tcp = value.is_on()),
        ..CORE
    },
    Variable {
        name: "MC_FORCE_HCA",
        help: "Automatic discovery installs RDMA even where it finds no device.",
        effect: Some(|config, value| config.topology.force_rdma = value.is_on()),
        ..CORE
    },
    Variable {
        name: "MC_CUSTOM_TOPO_JSON",
        kind: Kind::Path,
        help: "File with a NIC priority matrix that replaces automatic discovery.",
        effect: Some(|config, value| config.topology.file = value.text().map(PathBuf::from)),
        ..CORE
    },
    Variable {
        name: "MC_TE_FILTERS",
        kind: Kind::Text,
        help: "Names of the devices that discovery may use, separated by commas; all without.",
        effect: Some(|config, value| config.topology.filters = value.text().map(parse_names).unwrap_or_default()),
        ..CORE
    },
    Variable {
        name: "MC_PATH_ROUNDROBIN",
        kind: Kind::Switch,
        help: "Choose RDMA devices in turn instead of at random.",
        effect: Some(|config, value| config.topology.round_robin = value.is_on()),
        ..CORE
    },
    Variable {
        name: "MC_SLICE_TIMEOUT",
        kind: Kind::Number(&[1..=65535], Unit::Seconds),
        help: "A transfer without progress for this long ends, shown as TIMEOUT; without it after 30 s, shown as FAILED.",
        effect: Some(|config, value| {
            config.slice_timeout = matches!(value, Value::Number(_)).then(|| Duration::from_secs(value.number()));
        }),
        ..CORE
    },
    Variable {
        name: "MC_ENABLE_PARALLEL_REG_MR",
        aliases: &["MC_PARALLEL_REG_MR"],
        kind: Kind::Choice(&["-1", "0", "1"]),
        help: "Register memory with several devices side by side: 0 never, 1 always, -1 (as without it) where it is faster.",
        effect: Some(|config, value| {
            config.parallel_registration = value.text().map(|text| match text {
                "0" => Parallelism::Sequential,
                "1" => Parallelism::Parallel,
                _ => Parallelism::Auto,
            });
        }),
        ..CORE
    },
    Variable {
        name: "MC_DISABLE_PARALLEL_REG_MR",
        kind: Kind::Switch,
        help: "As MC_ENABLE_PARALLEL_REG_MR=0; without effect where that is set.",
        effect: Some(|config, value| {
            if value.is_on() {
                config.parallel_registration.get_or_insert(Parallelism::Sequential);
            }
        }),
        ..CORE
    },
    Variable {
        name: "MC_MAX_CONCURRENT_REG_MR",
        kind: Kind::Number(&[0..=1024], Unit::One),
        default: Preset::Text("0"),
        help: "Most threads for one call that registers memory, the caller's among them; all calls share them. 0 is the number of CPUs.",
        effect: Some(|config, value| config.registration_threads = value.number() as usize),
        ..CORE
    },
    Variable {
        name: "MC_MAX_MR_SIZE",
        kind: Kind::Number(&[1..=i64::MAX as u64], Unit::Bytes),
        default: Preset::Text("1099511627776"),
        help: "Longest piece that is registered with a device at once, whole pages; devices may allow less. Peers see each piece.",
        effect: Some(|config, value| config.max_mr_size = value.number()),
        ..CORE
    },
    Variable {
        name: "MC_LOG_LEVEL",
        kind: Kind::Choice(&["TRACE", "DEBUG", "INFO", "WARNING", "ERROR"]),
        default: Preset::Text("WARNING"),
        help: "Least severe messages that are logged.",
        effect: Some(|config, value| {
            let name = value.text().unwrap_or_default();
            // The log's own word is WARN; its parser knows the others.
            config.log_level = name.parse().unwrap_or(Level::WARN);
        }),
        ..CORE
    },
    Variable {
        name: "MC_LOG_DIR",
        kind: Kind::Path,
        help: "Existing directory: log to transfer_engine.<process id>.log there instead of to standard error.",
        effect: Some(|config, value| config.log_directory = value.text().map(PathBuf::from)),
        ..CORE
    },
    Variable {
        name: "MC_TE_METRIC",
        kind: Kind::Switch,
        help: "Log throughput at intervals, at level INFO: MC_LOG_LEVEL must let that through.",
        effect: Some(|config, value| config.metric = value.is_on()),
        ..CORE
    },
    Variable {
        name: "MC_TE_METRIC_INTERVAL_SECONDS",
        kind: Kind::Number(&[POSITIVE], Unit::Seconds),
        default: Preset::Text("5"),
        help: "How often MC_TE_METRIC logs.",
        effect: Some(|config, value| config.metric_interval = Duration::from_secs(value.number())),
        ..CORE
    },
    Variable { name: "MC_USE_TENT", help: "Choose upstream's other engine, in its builds that have it.", ..CORE },
    Variable { name: "MC_USE_TEV1", help: "Choose upstream's other engine, in its builds that have it.", ..CORE },
    Variable {
        name: "MC_DISABLE_HIP",
        help: "Do not route to HIP devices, in upstream's builds that have several protocols.",
        ..CORE
    },
    Variable {
        name: "MC_DISABLE_MACA",
        help: "Do not route to MACA devices, in upstream's builds that have several protocols.",
        ..CORE
    },
    Variable {
        name: "MC_DISABLE_MUSA",
        help: "Do not route to MUSA devices, in upstream's builds that have several protocols.",
        ..CORE
    },
    Variable {
        name: "MC_TCP_SLICE_SIZE",
        kind: Kind::Number(&[POSITIVE], Unit::Bytes),
        default: Preset::Text("65536"),
        help: "Bytes per socket call; here each call moves as much as the socket takes.",
        ..TCP
    },
    Variable {
        name: "MC_TCP_PROTO",
        kind: Kind::Number(&[1..=2], Unit::One),
        default: Preset::Text("2"),
        help: "Highest protocol version to use; 1 gives up the acknowledgement that a write is visible.",
        effect: Some(|config, value| config.tcp_force_v1 = value.number() == 1),
        ..TCP
    },
    Variable {
        name: "MC_TCP_STATUS_TIMEOUT_SEC",
        kind: Kind::Number(&[POSITIVE], Unit::Seconds),
        default: Preset::Text("30"),
        help: "How long a peer may take to answer a request.",
        effect: Some(|config, value| config.tcp_status_timeout = Duration::from_secs(value.number())),
        ..TCP
    },
    Variable {
        name: "MC_TCP_ENABLE_CONNECTION_POOL",
        kind: Kind::Switch,
        help: "Keep connections between transfers; here they are always kept.",
        ..TCP
    },
    Variable {
        name: "MC_TCP_LANES_PER_PEER",
        aliases: &["MC_TCP_MAX_CONNECTIONS_PER_PEER"],
        kind: Kind::Number(&[1..=16], Unit::One),
        default: Preset::Text("4"),
        help: "Connections that are kept to one peer.",
        effect: Some(|config, value| config.tcp_lanes_per_peer = value.number() as usize),
        ..TCP
    },
    Variable {
        name: "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER",
        kind: Kind::Number(&[1..=65535], Unit::One),
        default: Preset::Text("1024"),
        help: "Transfers that may wait for a connection; here queues are bounded by the batches alone.",
        ..TCP
    },
    Variable {
        name: "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER",
        kind: Kind::Number(&[1..=65535], Unit::One),
        default: Preset::Text("1024"),
        help: "Transfers that may wait for a place in the queue; here queues are bounded by the batches alone.",
        ..TCP
    },
    Variable {
        name: "MC_TCP_ADMISSION_TIMEOUT_MS",
        kind: Kind::Number(&[1..=600_000], Unit::Milliseconds),
        default: Preset::Text("1000"),
        help: "How long a transfer may wait for a place in the queue; here the transfer's own deadline holds.",
        ..TCP
    },
    Variable {
        name: "MC_NUM_CQ_PER_CTX",
        kind: Kind::Number(&[1..=255], Unit::One),
        default: Preset::Text("1"),
        help: "Completion queues per NIC.",
        effect: Some(|config, value| config.rdma.completion_queues = value.number() as usize),
        ..RDMA
    },
    Variable {
        name: "MC_NUM_COMP_CHANNELS_PER_CTX",
        kind: Kind::Number(&[1..=255], Unit::One),
        default: Preset::Text("1"),
        help: "Completion channels per NIC; here each completion queue has what it needs.",
        ..RDMA
    },
    Variable {
        name: "MC_IB_PORT",
        kind: Kind::Number(&[1..=255], Unit::One),
        default: Preset::Text("1"),
        help: "Port of each NIC.",
        effect: Some(|config, value| config.rdma.port = value.number() as u8),
        ..RDMA
    },
    Variable {
        name: "MC_GID_INDEX",
        aliases: &["NCCL_IB_GID_INDEX"],
        kind: Kind::Number(&[0..=255], Unit::One),
        help: "Index in the GID table of each NIC; without it the best kind of GID is chosen.",
        effect: Some(|config, value| config.rdma.gid_index = matches!(value, Value::Number(_)).then(|| value.number() as u8)),
        ..RDMA
    },
    Variable {
        name: "MC_PKEY_INDEX",
        kind: Kind::Number(&[0..=65535], Unit::One),
        default: Preset::Text("0"),
        help: "Index in the table of partition keys of each NIC.",
        effect: Some(|config, value| config.rdma.pkey_index = value.number() as u16),
        ..RDMA
    },
    Variable {
        name: "MC_MAX_CQE_PER_CTX",
        kind: Kind::Number(&[1..=65535], Unit::One),
        default: Preset::Text("4096"),
        help: "Entries of a completion queue.",
        effect: Some(|config, value| config.rdma.completion_queue_entries = value.number() as u32),
        ..RDMA
    },
    Variable {
        name: "MC_MAX_EP_PER_CTX",
        kind: Kind::Number(&[1..=65535], Unit::One),
        default: Preset::Text("65535"),
        help: "Connections to NICs of peers that a NIC keeps.",
        effect: Some(|config, value| config.rdma.max_endpoints = value.number() as usize),
        ..RDMA
    },
    Variable {
        name: "MC_NUM_QP_PER_EP",
        kind: Kind::Number(&[1..=255], Unit::One),
        default: Preset::Text("2"),
        help: "Queue pairs per connection to a NIC of a peer; the peer must have as many.",
        effect: Some(|config, value| config.rdma.queue_pairs_per_endpoint = value.number() as usize),
        ..RDMA
    },
    Variable {
        name: "MC_MAX_SGE",
        kind: Kind::Number(&[1..=65535], Unit::One),
        default: Preset::Text("4"),
        help: "Pieces of memory that a work request of a queue pair has room for.",
        effect: Some(|config, value| config.rdma.max_pieces = value.number() as u32),
        ..RDMA
    },
    Variable {
        name: "MC_MAX_WR",
        kind: Kind::Number(&[1..=65535], Unit::One),
        default: Preset::Text("256"),
        help: "Work requests of a queue pair that may be under way.",
        effect: Some(|config, value| config.rdma.max_work_requests = value.number() as u32),
        ..RDMA
    },
    Variable {
        name: "MC_MAX_INLINE",
        kind: Kind::Number(&[0..=65535], Unit::Bytes),
        default: Preset::Text("64"),
        help: "Bytes that a work request of a queue pair can carry itself.",
        effect: Some(|config, value| config.rdma.max_inline = value.number() as u32),
        ..RDMA
    },
    Variable {
        name: "MC_MTU",
        kind: Kind::Choice(&["512", "1024", "2048", "4096"]),
        default: Preset::Text("4096"),
        help: "Largest path MTU in bytes; the port may allow less.",
        effect: Some(|config, value| config.rdma.mtu = value.text().and_then(|text| text.parse().ok()).unwrap_or_default()),
        ..RDMA
    },
    Variable {
        name: "MC_WORKERS_PER_CTX",
        kind: Kind::Number(&[1..=8], Unit::One),
        default: Preset::Text("2"),
        help: "Threads per NIC; here one, and those of callers while they poll or submit: a NIC's work is posted and completed by whoever has it at hand.",
        ..RDMA
    },
    Variable {
        name: "MC_SLICE_SIZE",
        kind: Kind::Number(&[POSITIVE], Unit::Bytes),
        default: Preset::Text("65536"),
        help: "Bytes of one work request.",
        effect: Some(|config, value| config.rdma.slice_size = value.number()),
        ..RDMA
    },
    Variable {
        name: "MC_FRAGMENT_RATIO",
        kind: Kind::Number(&[POSITIVE], Unit::One),
        help: "A request's last slice may be longer by MC_SLICE_SIZE divided by this; without it by 16384 bytes.",
        effect: Some(|config, value| config.rdma.fragment_ratio = matches!(value, Value::Number(_)).then(|| value.number())),
        ..RDMA
    },
    Variable {
        name: "MC_RETRY_CNT",
        kind: Kind::Number(&[1..=127], Unit::One),
        default: Preset::Text("9"),
        help: "How often a slice is tried before its transfer fails.",
        effect: Some(|config, value| config.rdma.retry_count = value.number() as u32),
        ..RDMA
    },
    Variable {
        name: "MC_ENDPOINT_STORE_TYPE",
        kind: Kind::Choice(&["FIFO", "SIEVE"]),
        default: Preset::Text("SIEVE"),
        help: "Which connection is given up when there are too many: the oldest, or the oldest that was not used lately.",
        effect: Some(|config, value| config.rdma.evict_oldest = value.text() == Some("FIFO")),
        ..RDMA
    },
    Variable {
        name: "MC_IB_TC",
        kind: Kind::Number(&[0..=255], Unit::One),
        help: "Traffic class; 0 without it.",
        effect: Some(|config, value| config.rdma.traffic_class = value.number() as u8),
        ..RDMA
    },
    Variable {
        name: "MC_IB_SL",
        kind: Kind::Number(&[0..=15], Unit::One),
        help: "Service level; 0 without it.",
        effect: Some(|config, value| config.rdma.service_level = value.number() as u8),
        ..RDMA
    },
    Variable {
        name: "MC_IB_PCI_RELAXED_ORDERING",
        kind: Kind::Number(&[0..=2], Unit::One),
        default: Preset::Text("1"),
        help: "0 forbids devices to order their writes to memory as they like; 1 and 2 let those do so that can.",
        effect: Some(|config, value| config.rdma.relaxed_ordering = value.number() != 0),
        ..RDMA
    },
    Variable {
        name: "MC_AUTO_GID_MAX_RETRIES",
        kind: Kind::Number(&[0..=16], Unit::One),
        default: Preset::Text("2"),
        help: "How many other GIDs are tried when connecting fails and MC_GID_INDEX is not set.",
        effect: Some(|config, value| config.rdma.gid_retries = value.number() as u32),
        ..RDMA
    },
    Variable {
        name: "MC_RDMA_RAIL_PAUSE_SECONDS",
        kind: Kind::Number(&[1..=3599], Unit::Seconds),
        default: Preset::Text("30"),
        help: "How long a pair of NICs is not used after an error.",
        effect: Some(|config, value| config.rdma.rail_pause = Duration::from_secs(value.number())),
        ..RDMA
    },
    Variable {
        name: "MC_CONN_PAUSE_TTL_MS",
        kind: Kind::Number(&[0..=600_000], Unit::Milliseconds),
        default: Preset::Text("0"),
        help: "How long a server is not connected to anew after a connection to it has ended.",
        effect: Some(|config, value| config.rdma.reconnect_pause = Duration::from_millis(value.number())),
        ..RDMA
    },
    Variable {
        name: "MC_RDMA_BIND_ADDRESS",
        kind: Kind::Text,
        help: "Host in the names of NICs that peers are told; the engine's own name without.",
        effect: Some(|config, value| config.rdma.bind_address = value.text().map(str::to_string)),
        ..RDMA
    },
    Variable {
        name: "MC_ENABLE_DEST_DEVICE_AFFINITY",
        help: "Prefer the peer's NIC that has the name of the own one.",
        effect: Some(|config, value| config.rdma.same_name_affinity = value.is_on()),
        ..RDMA
    },
    Variable {
        name: "MC_ENABLE_HCA_PEER_AFFINITY",
        kind: Kind::Switch,
        help: "Use only the peers' NICs that MC_NIC_PEER_AFFINITY lists.",
        effect: Some(|config, value| config.rdma.use_peer_affinity = value.is_on()),
        ..RDMA
    },
    Variable {
        name: "MC_NIC_PEER_AFFINITY",
        kind: Kind::Text,
        help: "For NICs of this process, those of peers to use: mlx5_0=mlx5_0,mlx5_1;mlx5_1=mlx5_2.",
        effect: Some(|config, value| config.rdma.peer_affinity = value.text().map(parse_peer_affinity).unwrap_or_default()),
        ..RDMA
    },
    Variable {
        name: "MC_LOG_RDMA_SLICE_AFFINITY",
        kind: Kind::Switch,
        help: "Log which NICs slices take; here MC_LOG_LEVEL=TRACE shows it.",
        ..RDMA
    },
    Variable {
        name: "MC_TRACK_RDMA_POSTED_SLICES",
        kind: Kind::Switch,
        help: "Keep track of posted slices for diagnosis; here they are always tracked.",
        ..RDMA
    },
    Variable {
        name: "MC_MLX5_QP_UDP_SPORTS",
        kind: Kind::Text,
        help: "UDP source ports of queue pairs, in upstream's builds with mlx5 direct verbs.",
        ..RDMA
    },
    Variable {
        name: "MC_MLX5_QP_LAG_PORT_BALANCE",
        kind: Kind::Switch,
        help: "Spread queue pairs over the ports of a bond, in upstream's builds with mlx5 direct verbs.",
        ..RDMA
    },
    Variable {
        name: "WITH_NVIDIA_PEERMEM",
        kind: Kind::Switch,
        default: Preset::Text("true"),
        help: "Register memory of GPUs as any other, which needs nvidia_peermem; off: by dma-buf, in upstream's builds with CUDA. Here it is always registered as any other.",
        ..RDMA
    },
    Variable {
        name: "TE_LIBIBVERBS",
        kind: Kind::Path,
        default: Preset::Text(VERBS_LIBRARY),
        help: "The verbs library to load: a path, or a name that the loader looks for.",
        effect: Some(|config, value| config.rdma.library = value.text().unwrap_or(VERBS_LIBRARY).into()),
        ..OURS
    },
    Variable {
        name: "TE_TCP_IO_THREADS",
        kind: Kind::Number(&[1..=64], Unit::One),
        default: Preset::CpusAtMost(4),
        help: "Threads of an engine that move bytes over TCP.",
        effect: Some(|config, value| config.tcp_io_threads = value.number() as usize),
        ..OURS
    },
    Variable {
        name: "TE_CHECKED_LOCAL_COPY",
        kind: Kind::Switch,
        help: "Transfers within the process go through the kernel, so that unmapped pages fail them instead of raising SIGSEGV.",
        effect: Some(|config, value| config.checked_local_copy = value.is_on()),
        ..OURS
    },
    Variable {
        name: "TE_METRICS_DIRECTORY",
        kind: Kind::Path,
        help: "Each engine opens a unix socket in this directory, which is made if need be, at which Prometheus and te info --watch can read what it does.",
        effect: Some(|config, value| config.metrics_directory = value.text().map(PathBuf::from)),
        ..OURS
    },
    Variable {
        name: "TE_REGISTER_REFCOUNT",
        kind: Kind::Switch,
        help: "Registering the same range, location and access again counts a reference instead of failing with -7.",
        effect: Some(|config, value| config.register_refcount = value.is_on()),
        ..OURS
    },
];

/// Names of upstream that this version does not read: the near-miss check knows them and keeps silent.
static FOREIGN_NAMES: &[&str] = &[
    "MC_INTRANODE_NVLINK",
    "MC_INTRA_NVLINK",
    "MC_FORCE_MNNVL",
    "MC_FORCE_MUSA",
    "MC_MACA_HOST_TRANSPORT",
    "MC_CXL_DEV_PATH",
    "MC_MIN_REG_SIZE",
    "MC_EFA_NIC_SELECTION",
    "MC_TE_FILTERS_EXCLUDE",
    "MC_TRANSFER_TIMEOUT",
    "MC_MS_AUTO_DISC",
    "MC_MS_FILTERS",
];
/// Variables of Mooncake's store, whose names are its own affair.
const FOREIGN_PREFIX: &str = "MC_STORE_";

/// What was found for one variable.
#[derive(Clone, Debug)]
pub struct Reading {
    /// Its entry in the table.
    pub variable: &'static Variable,
    /// The name under which it was found; the table's where it is not set.
    pub name: &'static str,
    /// The text that was found, fit to be shown: long ones cut, control characters escaped, secrets hidden. `None` where not set.
    pub text: Option<String>,
    /// The value that holds.
    pub value: Value,
    /// What is wrong with the text, and what holds instead.
    pub problem: Option<String>,
}

impl Reading {
    fn take(variable: &'static Variable, lookup: &dyn Fn(&str) -> Option<OsString>) -> Reading {
        let found =
            [variable.name].into_iter().chain(variable.aliases.iter().copied()).find_map(|name| Some((name, lookup(name)?)));
        let Some((name, raw)) = found else {
            return Reading { variable, name: variable.name, text: None, value: variable.default_value(), problem: None };
        };
        let text =
            Some(if matches!(variable.kind, Kind::Secret) { "(hidden)".to_string() } else { presentable(&raw.to_string_lossy()) });
        let mut reading = Reading { variable, name, text, value: variable.default_value(), problem: None };
        match raw.to_str() {
            Some(text) => match variable.kind.parse(text) {
                Some(value) => reading.value = value,
                None => {
                    let numeric = matches!(variable.kind, Kind::Number(..));
                    let what = if numeric { "a whole number from" } else { "one of" };
                    reading.refuse(&format!("is not {what} {}", variable.kind));
                }
            },
            None if matches!(variable.kind, Kind::Presence) => reading.value = Value::Switch(true),
            None => reading.refuse("is not UTF-8"),
        }
        reading
    }

    /// The value that holds, fit to be shown; empty for none.
    pub fn shown_value(&self) -> String {
        match (&self.variable.kind, &self.value) {
            (Kind::Secret, Value::Text(_)) => "(hidden)".to_string(),
            (Kind::Number(_, unit), Value::Number(number)) => unit.with(number),
            (_, value) => presentable(&value.to_string()),
        }
    }

    fn refuse(&mut self, reason: &str) {
        let text = self.text.as_deref().unwrap_or_default();
        self.value = self.variable.default_value();
        self.problem = Some(format!("{}={text:?} {reason}; the default holds: {}", self.name, self.variable.default_text()));
    }
}

/// A text cut to a line's worth, without control characters.
fn presentable(text: &str) -> String {
    const LONGEST: usize = 80;
    let mut shown: String =
        text.chars().take(LONGEST).map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect();
    if text.chars().nth(LONGEST).is_some() {
        shown.push('…');
    }
    shown
}

/// All variables as one environment sets them.
#[derive(Clone, Debug)]
pub struct Environment {
    readings: Vec<Reading>,
    near_misses: Vec<String>,
}

impl Environment {
    /// Reads the environment of the process.
    pub fn of_process() -> Environment {
        Environment::from_source(&|name| std::env::var_os(name), std::env::vars_os().map(|(name, _)| name))
    }

    /// Reads any environment: `lookup` gives the value of a name, `names` lists what is set.
    pub fn from_source(lookup: &dyn Fn(&str) -> Option<OsString>, names: impl IntoIterator<Item = OsString>) -> Environment {
        let mut readings: Vec<Reading> = VARIABLES.iter().map(|variable| Reading::take(variable, lookup)).collect();
        check_port_range(&mut readings);
        let near_misses = names.into_iter().filter_map(|name| near_miss(name.to_str()?)).collect();
        Environment { readings, near_misses }
    }

    /// One entry for each of [`VARIABLES`], in its order.
    pub fn readings(&self) -> &[Reading] {
        &self.readings
    }

    /// A text for each name that looks like a misspelt variable.
    pub fn near_misses(&self) -> &[String] {
        &self.near_misses
    }

    /// The values that hold.
    pub fn config(&self) -> Config {
        let mut config = Config::blank();
        for reading in &self.readings {
            if let Some(effect) = reading.variable.effect {
                effect(&mut config, &reading.value);
            }
        }
        config
    }

    fn log_problems(&self) {
        static LOGGED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
        for problem in self.readings.iter().filter_map(|reading| reading.problem.as_ref()).chain(&self.near_misses) {
            let new = LOGGED.lock().insert(problem.clone());
            if new {
                tracing::warn!("{problem}");
            }
        }
    }
}

/// The two ends of the port range hold together or not at all.
fn check_port_range(readings: &mut [Reading]) {
    let find = |name| readings.iter().position(|reading| reading.variable.name == name);
    let (Some(lowest), Some(highest)) = (find(MIN_RPC_PORT), find(MAX_RPC_PORT)) else { return };
    let ends = [readings[lowest].clone(), readings[highest].clone()];
    if ends[0].value.number() <= ends[1].value.number() && ends.iter().all(|end| end.problem.is_none()) {
        return;
    }
    for (this, other) in [(lowest, &ends[1]), (highest, &ends[0])] {
        if readings[this].text.is_some() && readings[this].problem.is_none() {
            let other_text = other.text.as_ref().map_or("not set".to_string(), |text| format!("{text:?}"));
            readings[this].refuse(&format!("makes no range with {}, which is {other_text}", other.name));
        }
    }
}

/// A text if the name is unknown but close to a known one.
fn near_miss(name: &str) -> Option<String> {
    const FARTHEST: usize = 2;
    let known = || {
        VARIABLES.iter().flat_map(|v| [v.name].into_iter().chain(v.aliases.iter().copied())).chain(FOREIGN_NAMES.iter().copied())
    };
    let ours = name.starts_with("MC_") || name.starts_with("TE_");
    if !ours || name.starts_with(FOREIGN_PREFIX) || known().any(|other| other == name) {
        return None;
    }
    let near = |other: &&str| other.len().abs_diff(name.len()) <= FARTHEST;
    let (distance, meant) =
        known().filter(near).map(|other| (edit_distance(name, other), other)).min_by_key(|(distance, _)| *distance)?;
    (distance <= FARTHEST)
        .then(|| format!("environment variable {} is not known and has no effect; is {meant} meant?", presentable(name)))
}

/// How many letters must be inserted, removed or replaced to make one text of the other.
fn edit_distance(from: &str, to: &str) -> usize {
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (i, a) in from.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, b) in to.bytes().enumerate() {
            let cheapest = (diagonal + usize::from(a != b)).min(row[j] + 1).min(row[j + 1] + 1);
            diagonal = std::mem::replace(&mut row[j + 1], cheapest);
        }
    }
    row[to.len()]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    fn environment(set: &[(&str, &str)]) -> Environment {
        let set: BTreeMap<String, OsString> = set.iter().map(|(name, value)| (name.to_string(), value.into())).collect();
        Environment::from_source(&|name| set.get(name).cloned(), set.keys().map(OsString::from))
    }

    fn reading<'a>(environment: &'a Environment, name: &str) -> &'a Reading {
        environment.readings().iter().find(|reading| reading.variable.name == name).unwrap()
    }

    fn problems(environment: &Environment) -> Vec<&String> {
        environment.readings().iter().filter_map(|reading| reading.problem.as_ref()).collect()
    }

    /// A value that the variable takes and that is not its default.
    fn other_value(variable: &Variable) -> String {
        match &variable.kind {
            Kind::Number(ranges, _) => {
                let candidates = ranges.iter().flat_map(|range| [*range.start(), *range.end()]);
                let default = variable.default_value().number();
                candidates.into_iter().find(|candidate| *candidate != default).unwrap().to_string()
            }
            Kind::Choice(words) => words[0].to_string(),
            _ if variable.name == "MC_NIC_PEER_AFFINITY" => "a=b".to_string(),
            _ => "1".to_string(),
        }
    }

    #[test]
    fn an_empty_environment_gives_the_documented_defaults() {
        let config = Config::default();
        assert_eq!((config.handshake_port, config.min_rpc_port, config.max_rpc_port), (12001, 15000, 17000));
        assert_eq!((config.handshake_backlog, config.handshake_max_length), (128, 1 << 20));
        assert_eq!(config.handshake_connect_timeout, Duration::from_secs(5));
        assert_eq!((config.metadata_refresh_interval, config.slice_timeout), (None, None));
        assert_eq!((config.tcp_status_timeout, config.tcp_lanes_per_peer), (Duration::from_secs(30), 4));
        assert!((1..=4).contains(&config.tcp_io_threads));
        assert_eq!((config.log_level, config.log_directory), (Level::WARN, None));
        assert_eq!((config.tcp_bind_address, config.metadata_cluster_id.as_str()), (None, ""));
        let switches = [config.use_ipv6, config.legacy_rpc_port_binding, config.disable_metacache, config.force_tcp];
        assert_eq!(switches, [false; 4]);
        assert_eq!([config.tcp_force_v1, config.checked_local_copy, config.register_refcount], [false; 3]);
    }

    #[test]
    fn an_empty_environment_gives_the_documented_defaults_of_rdma() {
        let Config { topology, rdma, .. } = Config::default();
        assert_eq!((topology.file, topology.filters.len(), topology.round_robin, topology.force_rdma), (None, 0, false, false));
        assert_eq!((rdma.port, rdma.gid_index, rdma.pkey_index, rdma.mtu), (1, None, 0, 4096));
        assert_eq!((rdma.completion_queues, rdma.completion_queue_entries), (1, 4096));
        assert_eq!((rdma.queue_pairs_per_endpoint, rdma.max_work_requests, rdma.max_pieces, rdma.max_inline), (2, 256, 4, 64));
        assert_eq!((rdma.slice_size, rdma.fragment_limit(), rdma.retry_count, rdma.gid_retries), (65536, 16384, 9, 2));
        assert_eq!((rdma.traffic_class, rdma.service_level, rdma.relaxed_ordering, rdma.evict_oldest), (0, 0, true, false));
        assert_eq!((rdma.rail_pause, rdma.reconnect_pause), (Duration::from_secs(30), Duration::ZERO));
        assert_eq!(rdma.library.to_str(), Some(VERBS_LIBRARY));
    }

    #[test]
    fn lists_of_names_are_read_with_blanks_trimmed() {
        let config = environment(&[
            ("MC_TE_FILTERS", " mlx5_0,mlx5_1 ,, "),
            ("MC_NIC_PEER_AFFINITY", "a=b,c; d = e ;=f;g=;h"),
            ("TE_LIBIBVERBS", ""),
        ])
        .config();
        assert_eq!(config.topology.filters, ["mlx5_0", "mlx5_1"]);
        let affinity = |nic: &str, peers: &[&str]| (nic.to_string(), peers.iter().map(|peer| peer.to_string()).collect::<Vec<_>>());
        assert_eq!(config.rdma.peer_affinity, [affinity("a", &["b", "c"]), affinity("d", &["e"])]);
        assert_eq!(config.rdma.library.to_str(), Some(VERBS_LIBRARY));
    }

    #[test]
    fn the_last_slice_grows_by_the_ratio() {
        let limit = |slice, ratio| {
            let environment = environment(&[("MC_SLICE_SIZE", slice), ("MC_FRAGMENT_RATIO", ratio)]);
            environment.config().rdma.fragment_limit()
        };
        assert_eq!((limit("65536", "8"), limit("1000", "1000"), limit("1000", "999")), (8192, 250, 1));
        assert_eq!(environment(&[("MC_SLICE_SIZE", "1000")]).config().rdma.fragment_limit(), 16384);
        assert_eq!(environment(&[("NCCL_IB_GID_INDEX", "3")]).config().rdma.gid_index, Some(3));
    }

    #[test]
    fn the_table_is_sound() {
        let mut names = BTreeSet::new();
        for variable in VARIABLES {
            for name in [variable.name].iter().chain(variable.aliases) {
                assert!(names.insert(*name), "{name} is there twice");
                let foreign = ["NCCL_IB_GID_INDEX", "WITH_NVIDIA_PEERMEM"].contains(name);
                assert!(name.starts_with("MC_") || name.starts_with("TE_") || foreign, "{name}");
                assert!(!FOREIGN_NAMES.contains(name), "{name} is also among those that are not read");
            }
            assert!(variable.help.ends_with('.') && variable.help.len() > 10, "{} needs help", variable.name);
            match variable.default {
                Preset::Text(text) => assert!(variable.kind.parse(text).is_some(), "default of {}", variable.name),
                Preset::CpusAtMost(_) => assert!(matches!(variable.kind, Kind::Number(..)), "{}", variable.name),
                Preset::Unset => {}
            }
        }
    }

    #[test]
    fn every_variable_with_an_effect_changes_the_configuration() {
        let default = format!("{:?}", Config::default());
        for variable in VARIABLES {
            let mut set = vec![(variable.name, other_value(variable))];
            if variable.name == MIN_RPC_PORT {
                set.push((MAX_RPC_PORT, "17000".to_string()));
            } else if variable.name == MAX_RPC_PORT {
                set = vec![(MAX_RPC_PORT, "20000".to_string())];
            }
            let set: Vec<(&str, &str)> = set.iter().map(|(name, value)| (*name, value.as_str())).collect();
            let environment = environment(&set);
            assert_eq!(problems(&environment), Vec::<&String>::new());
            let changed = format!("{:?}", environment.config()) != default;
            assert_eq!(changed, variable.has_effect(), "{set:?}");
        }
    }

    #[test]
    fn every_number_refuses_what_is_not_one_in_its_range() {
        let default = format!("{:?}", Config::default());
        for variable in VARIABLES {
            let Kind::Number(ranges, _) = &variable.kind else { continue };
            let lowest = *ranges.iter().map(|range| range.start()).min().unwrap();
            let highest = *ranges.iter().map(|range| range.end()).max().unwrap();
            let mut bad: Vec<String> =
                ["", " ", "abc", "1e99", "-1", "12x", "+5", " 5", "5 ", "0x10", "1.5", "१", "18446744073709551616"]
                    .map(str::to_string)
                    .into();
            bad.push((highest + 1).to_string());
            bad.extend(lowest.checked_sub(1).map(|below| below.to_string()));
            for name in [variable.name].iter().chain(variable.aliases) {
                for text in &bad {
                    let environment = environment(&[(name, text)]);
                    let problems = problems(&environment);
                    assert_eq!(problems.len(), 1, "{name}={text:?}: {problems:?}");
                    assert!(problems[0].starts_with(&format!("{name}={text:?} is not ")), "{}", problems[0]);
                    assert!(problems[0].contains(&variable.kind.to_string()), "{}", problems[0]);
                    assert!(problems[0].ends_with(&variable.default_text()), "{}", problems[0]);
                    assert_eq!(format!("{:?}", environment.config()), default, "{name}={text:?}");
                }
            }
        }
    }

    #[test]
    fn ends_of_ranges_and_leading_zeros_are_taken() {
        for (text, port) in [("1", 1), ("65535", 65535), ("0012", 12)] {
            assert_eq!(environment(&[("MC_HANDSHAKE_PORT", text)]).config().handshake_port, port);
        }
        let units = environment(&[("MC_HANDSHAKE_CONNECT_TIMEOUT", "3599"), ("MC_HANDSHAKE_MAX_LENGTH", "134217728")]).config();
        assert_eq!((units.handshake_connect_timeout, units.handshake_max_length), (Duration::from_secs(3599), 128 << 20));
    }

    #[test]
    fn presence_is_on_whatever_the_value() {
        for value in ["", "0", "no", "1"] {
            assert!(environment(&[("MC_USE_IPV6", value)]).config().use_ipv6, "{value:?}");
        }
        let bytes = |name: &str| (name == "MC_USE_IPV6").then(|| OsString::from_vec(vec![0xff]));
        assert!(Environment::from_source(&bytes, []).config().use_ipv6);
    }

    #[test]
    fn switches_know_the_usual_words_and_refuse_others() {
        for (value, on) in [("1", true), ("TRUE", true), ("yes", true), ("On", true), ("0", false), ("no", false), ("OFF", false)] {
            let environment = environment(&[("TE_REGISTER_REFCOUNT", value)]);
            assert_eq!(environment.config().register_refcount, on, "{value}");
            assert_eq!(problems(&environment).len(), 0);
        }
        for value in ["", "2", "ja", "-1"] {
            let environment = environment(&[("TE_REGISTER_REFCOUNT", value)]);
            assert!(!environment.config().register_refcount, "{value:?}");
            assert_eq!(problems(&environment).len(), 1);
        }
    }

    #[test]
    fn log_levels_are_read_and_others_refused() {
        for (text, level) in [("TRACE", Level::TRACE), ("debug", Level::DEBUG), ("INFO", Level::INFO), ("warning", Level::WARN)] {
            assert_eq!(environment(&[("MC_LOG_LEVEL", text)]).config().log_level, level);
        }
        assert_eq!(environment(&[("MC_LOG_LEVEL", "ERROR")]).config().log_level, Level::ERROR);
        for text in ["", "FATAL", "2"] {
            let environment = environment(&[("MC_LOG_LEVEL", text)]);
            assert_eq!((environment.config().log_level, problems(&environment).len()), (Level::WARN, 1));
        }
    }

    #[test]
    fn both_ends_of_the_port_range_hold_or_neither() {
        let range = |set: &[(&str, &str)]| {
            let environment = environment(set);
            let config = environment.config();
            (config.min_rpc_port, config.max_rpc_port, problems(&environment).len())
        };
        assert_eq!(range(&[("MC_MIN_RPC_PORT", "20000"), ("MC_MAX_RPC_PORT", "20010")]), (20000, 20010, 0));
        assert_eq!(range(&[("MC_MIN_RPC_PORT", "20000"), ("MC_MAX_RPC_PORT", "20000")]), (20000, 20000, 0));
        assert_eq!(range(&[("MC_MIN_RPC_PORT", "30000"), ("MC_MAX_RPC_PORT", "62000")]), (30000, 62000, 0));
        assert_eq!(range(&[("MC_MIN_RPC_PORT", "16000")]), (16000, 17000, 0));
        assert_eq!(range(&[("MC_MIN_RPC_PORT", "20010"), ("MC_MAX_RPC_PORT", "20000")]), (15000, 17000, 2));
        assert_eq!(range(&[("MC_MIN_RPC_PORT", "20000")]), (15000, 17000, 1));
        assert_eq!(range(&[("MC_MAX_RPC_PORT", "2000")]), (15000, 17000, 1));
        assert_eq!(range(&[("MC_MIN_RPC_PORT", "20000"), ("MC_MAX_RPC_PORT", "40000")]), (15000, 17000, 2));
        assert_eq!(range(&[("MC_MIN_RPC_PORT", "abc"), ("MC_MAX_RPC_PORT", "20000")]), (15000, 17000, 2));
        assert_eq!(range(&[("MC_MIN_RPC_PORT", "abc")]), (15000, 17000, 1));
    }

    #[test]
    fn aliases_are_read_where_the_name_itself_is_not_set() {
        let old = environment(&[("MC_MIN_PRC_PORT", "20000"), ("MC_MAX_PRC_PORT", "20010")]);
        assert_eq!((old.config().min_rpc_port, old.config().max_rpc_port), (20000, 20010));
        assert_eq!(reading(&old, "MC_MIN_RPC_PORT").name, "MC_MIN_PRC_PORT");
        assert_eq!(environment(&[("MC_TCP_MAX_CONNECTIONS_PER_PEER", "7")]).config().tcp_lanes_per_peer, 7);

        let both = environment(&[("MC_TCP_MAX_CONNECTIONS_PER_PEER", "7"), ("MC_TCP_LANES_PER_PEER", "2")]);
        assert_eq!(both.config().tcp_lanes_per_peer, 2);
        let bad = environment(&[("MC_TCP_MAX_CONNECTIONS_PER_PEER", "7"), ("MC_TCP_LANES_PER_PEER", "x")]);
        assert_eq!(bad.config().tcp_lanes_per_peer, 4);
    }

    #[test]
    fn the_first_name_for_parallel_registration_wins() {
        let mode = |set: &[(&str, &str)]| environment(set).config().parallel_registration;
        let (enable, plain, disable) = ("MC_ENABLE_PARALLEL_REG_MR", "MC_PARALLEL_REG_MR", "MC_DISABLE_PARALLEL_REG_MR");
        for (set, expected) in [
            (&[][..], None),
            (&[(enable, "-1")], Some(Parallelism::Auto)),
            (&[(enable, "1")], Some(Parallelism::Parallel)),
            (&[(plain, "0")], Some(Parallelism::Sequential)),
            (&[(plain, "1"), (enable, "0")], Some(Parallelism::Sequential)),
            (&[(disable, "1")], Some(Parallelism::Sequential)),
            (&[(disable, "0")], None),
            (&[(disable, "1"), (enable, "-1")], Some(Parallelism::Auto)),
            (&[(disable, "1"), (plain, "1")], Some(Parallelism::Parallel)),
            (&[(disable, "1"), (enable, "2")], Some(Parallelism::Sequential)),
        ] {
            assert_eq!(mode(set), expected, "{set:?}");
        }
        assert_eq!(problems(&environment(&[(enable, "2")])).len(), 1);
    }

    #[test]
    fn near_misses_name_what_is_meant() {
        for (name, meant) in [
            ("MC_HANDSHAKE_PROT", "MC_HANDSHAKE_PORT"),
            ("MC_HANDSHAKEPORT", "MC_HANDSHAKE_PORT"),
            ("MC_HANDSHAKE_PORTS", "MC_HANDSHAKE_PORT"),
            ("TE_LOG_LEVEL", "MC_LOG_LEVEL"),
            ("MC_MIN_PORC_PORT", "MC_MIN_PRC_PORT"),
            ("MC_RETRY_COUNT", "MC_RETRY_CNT"),
            ("TE_REGISTER_REFCOUNTS", "TE_REGISTER_REFCOUNT"),
        ] {
            let environment = environment(&[(name, "1")]);
            assert_eq!(environment.near_misses().len(), 1, "{name}");
            assert!(environment.near_misses()[0].contains(name) && environment.near_misses()[0].contains(meant), "{name}");
        }
    }

    #[test]
    fn known_and_distant_names_are_left_in_peace() {
        let all = VARIABLES.iter().flat_map(|v| [v.name].into_iter().chain(v.aliases.iter().copied()));
        for name in all.chain(FOREIGN_NAMES.iter().copied()).chain([
            "MC_STORE_MEMCPY",
            "MC_SID",
            "MC_COLOR_TABLE",
            "TE_X",
            "MC_",
            "HANDSHAKE_PORT",
            "PATH",
            "mc_log_level",
        ]) {
            assert_eq!(near_miss(name), None);
        }
        let bytes = OsString::from_vec(b"MC_LOG_LEVEL\xff".to_vec());
        assert!(Environment::from_source(&|_| None, [bytes]).near_misses().is_empty());
    }

    #[test]
    fn edit_distances_are_those_of_levenshtein() {
        for (from, to, distance) in [("", "", 0), ("", "abc", 3), ("kitten", "sitting", 3), ("abc", "acb", 2), ("abc", "abc", 0)] {
            assert_eq!(edit_distance(from, to), distance, "{from} {to}");
            assert_eq!(edit_distance(to, from), distance, "{to} {from}");
        }
    }

    #[test]
    fn values_that_are_not_text_are_refused() {
        let bytes = |name: &str| (name == "MC_METADATA_CLUSTER_ID").then(|| OsString::from_vec(vec![b'a', 0xff]));
        let environment = Environment::from_source(&bytes, []);
        assert_eq!(environment.config().metadata_cluster_id, "");
        assert_eq!(problems(&environment).len(), 1);
        assert!(problems(&environment)[0].contains("is not UTF-8"), "{:?}", problems(&environment));
    }

    #[test]
    fn huge_and_odd_texts_make_short_and_harmless_messages() {
        let environment = environment(&[("MC_HANDSHAKE_PORT", &"x\n\x1b".repeat(10_000))]);
        let problem = problems(&environment)[0];
        assert!(problem.len() < 500 && !problem.contains(|c: char| c.is_control()), "{problem}");
    }

    #[test]
    fn passwords_are_not_shown() {
        let environment = environment(&[("MC_REDIS_PASSWORD", "hunter2")]);
        let reading = reading(&environment, "MC_REDIS_PASSWORD");
        assert_eq!((reading.text.as_deref(), reading.shown_value().as_str()), (Some("(hidden)"), "(hidden)"));
        assert_eq!(reading.value, Value::Text("hunter2".to_string()));
        let config = environment.config();
        assert_eq!(config.redis.password.as_deref(), Some("hunter2"));
        assert!(!format!("{config:?}").contains("hunter2"));
    }

    #[test]
    fn empty_texts_are_as_good_as_none() {
        let config = environment(&[("MC_TCP_BIND_ADDRESS", ""), ("MC_LOG_DIR", ""), ("MC_METADATA_CLUSTER_ID", "a")]).config();
        assert_eq!((config.tcp_bind_address, config.log_directory, config.metadata_cluster_id.as_str()), (None, None, "a"));
    }
}
