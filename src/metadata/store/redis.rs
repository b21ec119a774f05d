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
use super::{LONGEST_TEXT, Store, call_end, failed, text_of};
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
        // Before it is parsed, which logs all of an address that is none.
        let is_address = !address.contains(['/', '@', '?']);
        let parsed = is_address.then(|| HostPort::parse(address, DEFAULT_PORT)).filter(|parsed| !parsed.host.is_empty());
        let Some(parsed) = parsed else {
            // A password is not shown.
            let shown = excerpt(address.rsplit('@').next().unwrap_or(address));
            let text = format!(
                "'{shown}' is no address of a redis server: write redis://host:port; user, password and database are given by \
                 MC_REDIS_USERNAME, MC_REDIS_PASSWORD and MC_REDIS_DB_INDEX"
            );
            return Err(Error::new(Code::InvalidArgument, text));
        };
        Ok(RedisStore { server: Server::new(parsed), config: config.clone(), idle: Mutex::default() })
    }

    fn call(&self, name: &str, key: &str, text: Option<Argument<'_>>) -> Result<Answer> {
        let (started, end) = (Instant::now(), call_end());
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
                Fault::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    "it closed the connection and did not answer".into()
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
    let answer = receive(&mut reader)?;
    match reader.buffer() {
        [] => Ok(answer),
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

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};
    use std::net::TcpStream;
    use std::time::Duration;

    use crate::telemetry::tests::hear;

    use super::super::stub::{Stub, assert_that_calls_end_whatever_the_server_does, pieces, reset};
    use super::*;

    fn store(stub: &Stub) -> RedisStore {
        RedisStore::new(&stub.address.to_string(), &RedisConfig::default()).unwrap()
    }

    /// The next command, or `None` if there is none any more.
    fn read_command(reader: &mut BufReader<TcpStream>) -> Option<Vec<String>> {
        let number = |reader: &mut BufReader<TcpStream>, sign: char| {
            let mut line = String::new();
            reader.read_line(&mut line).ok()?;
            line.strip_prefix(sign)?.strip_suffix("\r\n")?.parse::<usize>().ok()
        };
        let count = number(reader, '*')?;
        let mut argument = || {
            let length = number(reader, '$')?;
            let mut bytes = vec![0; length + 2];
            reader.read_exact(&mut bytes).ok()?;
            bytes.truncate(length);
            Some(String::from_utf8(bytes).unwrap())
        };
        (0..count).map(|_| argument()).collect()
    }

    /// Answers each command with what `reply` says; nothing: the connection is reset.
    fn serve(reply: impl Fn(Vec<String>) -> Option<String> + Send + Sync + 'static) -> Stub {
        Stub::new(move |stream, _| {
            let mut reader = BufReader::new(stream);
            while let Some(command) = read_command(&mut reader) {
                match reply(command) {
                    Some(answer) => _ = reader.get_mut().write_all(answer.as_bytes()),
                    None => return reset(reader.into_inner()),
                }
            }
        })
    }

    fn bulk(text: Option<&String>) -> String {
        text.map_or("$-1\r\n".into(), |text| format!("${}\r\n{text}\r\n", text.len()))
    }

    #[test]
    fn texts_are_written_read_and_removed_as_upstream_does_on_one_connection() {
        let (commands, texts) = (Arc::new(Mutex::new(Vec::new())), Mutex::new(HashMap::new()));
        let seen = commands.clone();
        let stub = serve(move |command| {
            seen.lock().push(command.join(" "));
            let (mut texts, key) = (texts.lock(), command[1].clone());
            Some(match command[0].as_str() {
                "GET" => bulk(texts.get(&key)),
                "SET" => texts.insert(key, command[2].clone()).map_or("+OK\r\n".into(), |_| "+OK\r\n".into()),
                _ => format!(":{}\r\n", u8::from(texts.remove(&key).is_some())),
            })
        });
        let store = store(&stub);
        let key = "mooncake/ram/node A:12345";
        assert_eq!(store.get(key).unwrap(), None);
        store.put(key, &pieces(&["{\"a\":", "", "1}\n"])).unwrap();
        assert_eq!(store.get(key).unwrap().unwrap(), "{\"a\":1}\n");
        store.remove(key).unwrap();
        store.remove(key).unwrap();
        assert_eq!(
            *commands.lock(),
            [
                "GET mooncake/ram/node A:12345",
                "SET mooncake/ram/node A:12345 {\"a\":1}\n",
                "GET mooncake/ram/node A:12345",
                "DEL mooncake/ram/node A:12345",
                "DEL mooncake/ram/node A:12345",
            ]
        );
        let long: Vec<Arc<str>> = (0..1000).map(|number| format!("{number:>4000}").into()).collect();
        store.put(key, &long).unwrap();
        assert_eq!(store.get(key).unwrap().unwrap(), long.concat());
        assert_eq!(stub.connections(), 1);
    }

    #[test]
    fn a_connection_begins_with_password_and_database() {
        for (username, password, database, expected) in [
            (None, None, 0, &["GET key"][..]),
            (Some("me"), None, 0, &["GET key"]),
            (None, Some("secret"), 0, &["AUTH secret", "GET key"]),
            (Some("me"), Some("secret"), 7, &["AUTH me secret", "SELECT 7", "GET key"]),
        ] {
            let commands = Arc::new(Mutex::new(Vec::new()));
            let seen = commands.clone();
            let stub = serve(move |command| {
                seen.lock().push(command.join(" "));
                Some(if command[0] == "GET" { bulk(None) } else { "+OK\r\n".into() })
            });
            let config = RedisConfig { username: username.map(Into::into), password: password.map(Into::into), database };
            let store = RedisStore::new(&stub.address.to_string(), &config).unwrap();
            assert_eq!(store.get("key").unwrap(), None);
            assert_eq!(*commands.lock(), expected);
        }
    }

    #[test]
    fn an_error_of_the_server_is_one_here_and_costs_no_connection() {
        let stub = serve(|_| Some("-NOAUTH Authentication required.\r\n".into()));
        let store = store(&stub);
        for error in
            [store.get("key").unwrap_err(), store.put("key", &pieces(&["{}\n"])).unwrap_err(), store.remove("key").unwrap_err()]
        {
            assert_eq!(error.code(), Code::Metadata);
            let (text, server) = (error.message(), format!("redis://{}", stub.address));
            assert!(text.contains("NOAUTH") && text.contains("MC_REDIS_PASSWORD") && text.contains(&server), "{text}");
        }
        assert_eq!(stub.connections(), 1);
    }

    #[test]
    fn a_refused_password_is_named_as_the_reason_and_not_shown() {
        let stub = serve(|_| Some("-WRONGPASS invalid username-password pair\r\n".into()));
        let config = RedisConfig { password: Some("secret".into()), ..RedisConfig::default() };
        let error = RedisStore::new(&stub.address.to_string(), &config).unwrap().get("key").unwrap_err();
        assert!(error.message().contains("WRONGPASS") && !error.message().contains("secret"), "{error}");
    }

    #[test]
    fn a_kept_connection_that_was_lost_is_replaced_once() {
        let count = Mutex::new(0);
        let stub = serve(move |_| {
            let mut count = count.lock();
            *count += 1;
            // The second command of the first connection.
            (*count != 2).then(|| bulk(None))
        });
        let store = store(&stub);
        store.get("key").unwrap();
        store.get("key").unwrap();
        assert_eq!(stub.connections(), 2);
        let stub = serve(|_| None);
        assert_eq!(self::store(&stub).get("key").unwrap_err().code(), Code::Metadata);
        assert_eq!(stub.connections(), 2);
    }

    #[test]
    fn answers_that_are_none_are_errors_and_end_the_connection() {
        let long_line = format!("+{}", "x".repeat(LONGEST_LINE as usize));
        let too_long = format!("${}\r\n", LONGEST_TEXT + 1);
        for (said, expected) in [
            ("", "closed the connection"),
            ("garbage", "closed the connection"),
            ("HTTP/1.1 400 Bad Request\r\n\r\n", "is it a redis server"),
            ("\r\n", "is it a redis server"),
            ("$x\r\n", "is it a redis server"),
            ("$-2\r\n", "is it a redis server"),
            ("$100\r\nhalf", "closed the connection"),
            ("$4\r\nlonger\r\n", "longer than announced"),
            ("$2\r\nab\r\n+OK\r\n", "more than was asked for"),
            ("$1\r\n\u{0}\r\n", ""),
            (":1\r\n", "no text"),
            (&long_line, "does not end"),
            (&too_long, "more than"),
        ] {
            let said: Arc<str> = said.into();
            let answer = said.clone();
            let stub = Stub::new(move |stream, _| {
                let mut reader = BufReader::new(stream);
                read_command(&mut reader);
                let _ = reader.get_mut().write_all(answer.as_bytes());
            });
            match store(&stub).get("key") {
                // Bytes are bytes: whoever asked looks at what they mean.
                Ok(text) => assert_eq!((&*said, text.as_deref()), ("$1\r\n\u{0}\r\n", Some("\u{0}"))),
                Err(error) => assert!(!expected.is_empty() && error.message().contains(expected), "{}: {error}", excerpt(&said)),
            }
        }
    }

    #[test]
    fn calls_end_whatever_the_server_does() {
        let connect = |address: std::net::SocketAddr| RedisStore::new(&address.to_string(), &RedisConfig::default()).unwrap();
        assert_that_calls_end_whatever_the_server_does(connect, b"$1000000\r\n");
    }

    #[test]
    fn a_slow_write_holds_up_no_read() {
        let (go, gone) = std::sync::mpsc::channel::<()>();
        let gone = Mutex::new(gone);
        let stub = serve(move |command| match command[0].as_str() {
            "SET" => gone.lock().recv().ok().map(|()| "+OK\r\n".into()),
            _ => Some(bulk(None)),
        });
        let store = store(&stub);
        std::thread::scope(|scope| {
            let put = scope.spawn(|| store.put("key", &pieces(&["{}\n"])));
            // The SET ends only when the GET has.
            assert_eq!(store.get("key").unwrap(), None);
            go.send(()).unwrap();
            put.join().unwrap().unwrap();
        });
    }

    #[test]
    fn threads_get_each_its_own_answer_of_a_server_that_delays_drops_and_errs() {
        let (dropped, texts) = (Mutex::new(HashSet::new()), Mutex::new(HashMap::new()));
        let stub = serve(move |command| {
            let key = command[1].clone();
            if key.contains("delay") {
                std::thread::sleep(Duration::from_millis(5));
            }
            let first = dropped.lock().insert((command[0].clone(), key.clone()));
            if key.contains("gone") || (key.contains("drop") && first) {
                return None;
            }
            Some(match command[0].as_str() {
                _ if key.contains("err") => "-ERR no\r\n".into(),
                "SET" => texts.lock().insert(key, command[2].clone()).map_or("+OK\r\n".into(), |_| "+OK\r\n".into()),
                _ => bulk(texts.lock().get(&key)),
            })
        });
        let store = store(&stub);
        std::thread::scope(|scope| {
            for thread in 0..32 {
                let store = &store;
                scope.spawn(move || {
                    for round in 0..4 {
                        for what in ["good", "delay", "drop", "err", "gone"] {
                            let key = format!("{what}{thread}.{round}");
                            let (put, got) = (store.put(&key, &pieces(&[&key, "\n"])), store.get(&key));
                            match what {
                                "err" | "gone" => assert!(put.is_err() && got.is_err(), "{key}"),
                                _ => assert_eq!((put.ok(), got.unwrap()), (Some(()), Some(key + "\n"))),
                            }
                        }
                    }
                });
            }
        });
        assert!(store.idle.lock().len() <= KEPT);
    }

    #[test]
    fn a_password_in_an_address_is_not_logged() {
        let heard = hear(|| {
            for text in [":secret@h:6379/0", "user:secret@h", "secret@"] {
                assert!(RedisStore::new(text, &RedisConfig::default()).is_err());
            }
        });
        assert!(heard.contains("MC_REDIS_PASSWORD") && !heard.contains("secret"), "{heard}");
    }

    #[test]
    fn addresses_are_read_by_upstreams_rules_and_what_has_more_is_refused() {
        for (text, address) in [("h", "h:12001"), ("h:6379", "h:6379"), ("[::1]:6379", "[::1]:6379"), ("::1", "[::1]:12001")] {
            assert_eq!(RedisStore::new(text, &RedisConfig::default()).unwrap().server.address.to_string(), address);
        }
        for text in ["h:6379/0", "h:6379/", "user:secret@h:6379", ":6379", "h?db=1"] {
            let error = RedisStore::new(text, &RedisConfig::default()).err().unwrap();
            assert_eq!(error.code(), Code::InvalidArgument);
            assert!(error.message().contains("MC_REDIS_DB_INDEX") && !error.message().contains("secret"), "{error}");
        }
    }
}
