//! perftest's `ib_write_bw` and `ib_read_bw` on the same devices: what verbs themselves can do, as the limit beside the engine's figures.
//!
//! Both its ends are programs of their own. They meet on a port of the loopback address; bytes go from device to device.

use std::error::Error;
use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use transfer_engine::config::Config;
use transfer_engine::topology::{Machine, Topology};

use super::transfer::Operation;

/// How long its server may take to listen.
const START_LIMIT: Duration = Duration::from_secs(30);

/// How often it is run where it fails: on a machine that is emulated or busy it does not get to know the speed of the processor's clock, and
/// soft-RoCE gives queue pairs up.
const TRIES: usize = 5;

/// A device, and the place of the GID that engines use.
#[derive(Clone)]
struct Device {
    name: String,
    gid_index: Option<u8>,
}

impl Device {
    fn find(name: &str) -> Device {
        let machine = Machine::default();
        let config = Config::from_environment().rdma;
        let links = Topology::discover(&machine, &[&[name.to_string()]]).links(&machine, config.port, config.gid_index);
        Device { name: name.to_string(), gid_index: links.first().and_then(|link| link.gid).map(|(_, index)| index) }
    }
}

/// perftest between two devices.
pub struct Perftest {
    near: Device,
    far: Device,
}

/// A child that ends with its owner.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Perftest {
    /// Between devices of these names. `None` where it is not installed.
    pub fn find(near: &str, far: &str) -> Option<Perftest> {
        let is_there =
            |program| Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
        let is_installed = ["ib_write_bw", "ib_read_bw"].into_iter().all(is_there);
        is_installed.then(|| Perftest { near: Device::find(near), far: Device::find(far) })
    }

    /// MB/s (10^6) of `count` messages of `size` bytes, of which `depth` are under way at a time.
    pub fn measure(&self, operation: Operation, size: usize, depth: usize, count: usize) -> Result<f64, Box<dyn Error>> {
        let mut outcome = self.try_to_measure(operation, size, depth, count);
        for _ in 1..TRIES {
            outcome = outcome.or_else(|_| self.try_to_measure(operation, size, depth, count));
        }
        outcome
    }

    fn try_to_measure(&self, operation: Operation, size: usize, depth: usize, count: usize) -> Result<f64, Box<dyn Error>> {
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
        let command = |device: &Device| {
            let mut command = Command::new(match operation {
                Operation::Read => "ib_read_bw",
                Operation::Write => "ib_write_bw",
            });
            // It refuses to send fewer than five messages.
            command.args(["-F", "-d", &device.name, "-p", &port.to_string(), "-s", &size.to_string()]);
            command.args(["-t", &depth.to_string(), "-n", &count.max(5).to_string()]);
            command.args(device.gid_index.into_iter().flat_map(|index| ["-x".to_string(), index.to_string()]));
            command
        };
        let mut server = Server(command(&self.far).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?);
        let until = Instant::now() + START_LIMIT;
        while !is_listened_on(port)? {
            if server.0.try_wait()?.is_some() || Instant::now() > until {
                return Err(format!("the server of perftest does not start: {:?}", command(&self.far)).into());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let mut client = command(&self.near);
        let output = client.args(["--report_gbits", "--output=bandwidth", "127.0.0.1"]).output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        match parse(&text) {
            Some(0.0) => Err("perftest does not get to know the speed of its clock".into()),
            Some(gigabits) => Ok(gigabits * 1e3 / 8.0),
            None => Err(format!("{client:?} fails: {text}{}", String::from_utf8_lossy(&output.stderr)).into()),
        }
    }
}

/// Whether a socket listens on the port. Connecting would be taken for the client.
fn is_listened_on(port: u16) -> std::io::Result<bool> {
    let is_it = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        fields.len() > 3 && fields[1].ends_with(&format!(":{port:04X}")) && fields[3] == "0A"
    };
    let sockets = std::fs::read_to_string("/proc/net/tcp")? + &std::fs::read_to_string("/proc/net/tcp6").unwrap_or_default();
    Ok(sockets.lines().any(is_it))
}

/// The figure, which comes last; warnings come before it. 0 if it did not get to know the speed of the clock that it reads.
fn parse(text: &str) -> Option<f64> {
    text.lines().rev().map(str::trim).find(|line| !line.is_empty())?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figure_is_told_from_what_is_said_before_it() {
        let with_warning = "Device not recognized to implement inline feature. Disabling it\n-----\n0.659389\n";
        assert_eq!(parse(with_warning), Some(0.659389));
        for text in ["", "\n\n", "Couldn't connect to 127.0.0.1:18515\n", "0.5\n failed\n"] {
            assert_eq!(parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn a_port_is_listened_on_while_somebody_does() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(is_listened_on(port).unwrap());
        drop(listener);
        assert!(!is_listened_on(port).unwrap());
    }
}
