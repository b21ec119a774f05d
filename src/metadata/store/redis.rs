//! Redis as the metadata server: GET, SET and DEL of plain keys, in version 2 of its protocol, which every redis and its relatives speak.
//!
//! Written here because the calls must end: the crate `redis` bounds single reads and writes only, and takes an answer of any length.
//!
//! Connections are kept, up to [`KEPT`], and used by one call each, so that a slow SET holds up nobody. One mutex guards the list of
//! those that are idle; nothing is sent or received under it. A call that loses its connection is repeated once on a new one. A text
//! is copied once, through a buffer of 64 KiB, and ends with a newline as upstream's.

use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use super::connection::{Connection, Server, is_lost};
use super::{CALL_LIMIT, LONGEST_TEXT, Store, failed, text_of};
use crate::config::RedisConfig;
use crate::error::{Code, Error, Result};
use crate::metadata::excerpt;
use crate::metadata::host_port::HostPort;

/// Upstream's, and not redis's own, which is 6379.
const DEFAULT_PORT: u16 = 12001;

/// Idle connections that are kept.
const KEPT: usize = 8;

/// Longest line of an answer; errors are lines.
const LONGEST_LINE: u64 = 64 << 10;

/// A redis server.
pub(super) struct RedisStore {
    server: Arc<Server>,
    config: RedisConfig,
    idle: Mutex<Vec<Connection>>,
}

/// An argument of a command, in pieces.
type Argument<'a> = &'a [&'a [u8]];

enum Answer {
    Text(Vec<u8>),
    Nothing,
    /// A status or a number.
    Done,
}

enum Fault {
    Io(io::Error),
    /// The server said no; the connection can be used on.
    Refused(String),
    Garbage(String),
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Fault {
        Fault::Io(error)
    }
}

impl RedisStore {
    /// `address` is `host[:port]`, by upstream's rules for those.
    pub(super) fn new(address: &str, config: &RedisConfig) -> Result<RedisStore> {
        let parsed = HostPort::parse(address, DEFAULT_PORT);
        if parsed.host.is_empty() || address.contains(['/', '@', '?']) {
            // A password is not shown.
            let shown = excerpt(address.rsplit('@').next().unwrap_or(address));
            let text = format!(
                "'{shown}' is no address of a redis server: write redis://host:port; user, password and database are given by \
                 MC_REDIS_USERNAME, MC_REDIS_PASSWORD and MC_REDIS_DB_INDEX"
            );
            return Err(Error::new(Code::InvalidArgument, text));
        }
        Ok(RedisStore { server: Server::new(parsed), config: config.clone(), idle: Mutex::default() })
    }

    fn call(&self, name: &str, key: &str, text: Option<Argument<'_>>) -> Result<Answer> {
        let (started, end) = (Instant::now(), Instant::now() + CALL_LIMIT);
        let (name_argument, key_argument) = ([name.as_bytes()], [key.as_bytes()]);
        let mut arguments: Vec<Argument<'_>> = vec![&name_argument, &key_argument];
        arguments.extend(text);
        let fault = match self.attempt(self.take_idle(), &arguments, end) {
            Err(Fault::Io(error)) if is_lost(&error) => {
                // What was connected at the same time has probably met the same fate.
                self.idle.lock().clear();
                self.attempt(None, &arguments, end)
            }
            result => result,
        };
        fault.map_err(|fault| {
            let reason = match fault {
                Fault::Io(error) if error.kind() == io::ErrorKind::TimedOut && error.get_ref().is_none() => {
                    format!("no answer within {:.1} s", started.elapsed().as_secs_f32())
                }
                Fault::Io(error) => error.to_string(),
                Fault::Refused(said) => {
                    let advice = match said.split(' ').next() {
                        Some("NOAUTH" | "WRONGPASS" | "NOPERM") => "; check MC_REDIS_USERNAME and MC_REDIS_PASSWORD",
                        Some("OOM") => "; check its maxmemory",
                        _ => "",
                    };
                    format!("it answered '{}'{advice}", excerpt(&said))
                }
                Fault::Garbage(what) => format!("it answered {what}; is it a redis server?"),
            };
            failed(name, key, &format!("redis://{}", self.server.address), reason)
        })
    }

    fn attempt(&self, idle: Option<Connection>, arguments: &[Argument<'_>], end: Instant) -> std::result::Result<Answer, Fault> {
        let mut connection = match idle {
            Some(connection) => connection,
            None => self.connect(end)?,
        };
        connection.set_end(end);
        let result = exchange(&mut connection, arguments);
        if matches!(result, Ok(_) | Err(Fault::Refused(_))) {
            let mut idle = self.idle.lock();
            if idle.len() < KEPT {
                idle.push(connection);
            }
        }
        result
    }

    fn take_idle(&self) -> Option<Connection> {
        loop {
            let connection = self.idle.lock().pop()?;
            if connection.is_quiet() {
                return Some(connection);
            }
        }
    }

    fn connect(&self, end: Instant) -> std::result::Result<Connection, Fault> {
        let mut connection = self.server.connect(end)?;
        if let Some(password) = &self.config.password {
            let user = self.config.username.as_ref().map(|user| [user.as_bytes()]);
            let password = [password.as_bytes()];
            let mut arguments: Vec<Argument<'_>> = vec![&[b"AUTH"]];
            arguments.extend(user.as_ref().map(|user| -> Argument<'_> { user }));
            arguments.push(&password);
            exchange(&mut connection, &arguments)?;
        }
        if self.config.database != 0 {
            exchange(&mut connection, &[&[b"SELECT"], &[self.config.database.to_string().as_bytes()]])?;
        }
        Ok(connection)
    }
}

impl Store for RedisStore {
    fn get(&self, key: &str) -> Result<Option<String>> {
        match self.call("GET", key, None)? {
            Answer::Text(bytes) => match text_of(bytes) {
                Ok(text) => Ok(Some(text)),
                Err(reason) => Err(failed("GET", key, &format!("redis://{}", self.server.address), reason)),
            },
            Answer::Nothing => Ok(None),
            Answer::Done => Err(failed("GET", key, &format!("redis://{}", self.server.address), "it answered with no text".into())),
        }
    }

    fn put(&self, key: &str, text: &[Arc<str>]) -> Result<()> {
        let pieces: Vec<&[u8]> = text.iter().map(|piece| piece.as_bytes()).collect();
        self.call("SET", key, Some(&pieces)).map(drop)
    }

    fn remove(&self, key: &str) -> Result<()> {
        self.call("DEL", key, None).map(drop)
    }
}

/// One command and its answer.
fn exchange(connection: &mut Connection, arguments: &[Argument<'_>]) -> std::result::Result<Answer, Fault> {
    send(connection, arguments)?;
    let mut reader = BufReader::new(connection);
    let answer = receive(&mut reader);
    match reader.buffer() {
        [] => answer,
        _ => Err(Fault::Garbage("with more than was asked for".into())),
    }
}

fn send(connection: &mut Connection, arguments: &[Argument<'_>]) -> io::Result<()> {
    let mut writer = BufWriter::with_capacity(64 << 10, connection);
    write!(writer, "*{}\r\n", arguments.len())?;
    for argument in arguments {
        write!(writer, "${}\r\n", argument.iter().map(|piece| piece.len()).sum::<usize>())?;
        for piece in *argument {
            writer.write_all(piece)?;
        }
        writer.write_all(b"\r\n")?;
    }
    writer.flush()
}

fn receive(reader: &mut impl BufRead) -> std::result::Result<Answer, Fault> {
    let mut line = Vec::new();
    reader.take(LONGEST_LINE).read_until(b'\n', &mut line)?;
    let Some(line) = line.strip_suffix(b"\r\n") else {
        return Err(match line.len() as u64 {
            LONGEST_LINE => Fault::Garbage("with a line that does not end".into()),
            _ => io::Error::from(io::ErrorKind::UnexpectedEof).into(),
        });
    };
    let line = String::from_utf8_lossy(line);
    let garbage = || Fault::Garbage(format!("'{}'", excerpt(&line)));
    match line.split_at_checked(1) {
        Some(("+" | ":", _)) => Ok(Answer::Done),
        Some(("-", said)) => Err(Fault::Refused(said.to_string())),
        Some(("$", "-1")) => Ok(Answer::Nothing),
        Some(("$", length)) => {
            let length: u64 = length.parse().map_err(|_| garbage())?;
            if length > LONGEST_TEXT {
                return Err(Fault::Garbage(format!("with {length} bytes, more than {LONGEST_TEXT}")));
            }
            let mut text = Vec::new();
            reader.take(length + 2).read_to_end(&mut text)?;
            if text.len() as u64 != length + 2 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
            match text.ends_with(b"\r\n") {
                true => text.truncate(length as usize),
                false => return Err(Fault::Garbage("with a text that is longer than announced".into())),
            }
            Ok(Answer::Text(text))
        }
        _ => Err(garbage()),
    }
}
