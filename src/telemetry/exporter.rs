//! Answers whoever connects to a unix socket with a text, such as the numbers of an engine.
//!
//! A request that ends with an empty line is answered as HTTP/1.0, whatever it asks for, so that `curl --unix-socket` and proxies of scrapers
//! can read it; one that ends otherwise, by closing its direction, gets the bare text.
//!
//! **Who may read.** The socket has mode 0600 from the moment it exists, and connections of other users than this one and root are closed
//! unanswered. Names are drawn only in a directory into which nobody else can write. `bind` follows no symbolic link at the end of a path.
//! What is at the path already is replaced only if it is a socket of this user at which nobody listens any more.
//!
//! **Who waits for whom.** A thread of its own, which sleeps until somebody connects: making the text takes locks of the engine that are held
//! for seconds while a transport is installed, and the handshake thread must answer peers meanwhile. It never blocks on a
//! connection: at most [`PLACES`] are open, and the one that came first goes when there are more. So a reader that is silent or
//! slow costs a descriptor and one text at most, and no clock is needed. The thread owns all of it; [`Exporter`] has the event that stops it.
//!
//! In a child of `fork` the thread does not exist, and the parent's socket is left as it is. A child has open what its parent had: connections
//! are therefore taken out of the set and shut down before they are closed, or the set would report them, and readers wait, until the
//! child ends.

use std::collections::VecDeque;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, ErrorKind, Read};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use socket2::{Domain, SockAddr, SockRef, Socket, Type};

use super::prometheus;
use crate::error::{Code, Error, Result};
use crate::sys::epoll::{Epoll, Events, Interest};
use crate::sys::event::EventFd;
use crate::sys::peer::{self, Peer};
use crate::sys::{fork, limits, thread};

/// How names that are drawn begin: `te info --watch` finds them by it.
pub const PREFIX: &str = "transfer-engine-";

/// Most connections at a time.
pub const PLACES: usize = 8;

/// Longest request.
const LONGEST_REQUEST: usize = 16 << 10;

const TOKEN_STOP: u64 = 0;
const TOKEN_LISTENER: u64 = 1;
const TOKEN_FIRST_CONNECTION: u64 = 2;

/// Number of the next name that is drawn in this process.
static DRAWN: AtomicU64 = AtomicU64::new(1);
/// Held while a path is taken, so that engines of this process do not take one for stale that is about to be listened at.
static TAKING: Mutex<()> = Mutex::new(());

/// Where a socket is opened.
#[derive(Clone, Copy, Debug)]
pub enum Place<'a> {
    /// At this path.
    Path(&'a Path),
    /// In this directory, which is made if need be, as [`PREFIX`], process id, a number and `.sock`.
    Directory(&'a Path),
}

/// A socket that is answered until this is dropped.
pub struct Exporter {
    path: PathBuf,
    /// Device and inode, by which a successor's socket is told from it.
    file: (u64, u64),
    generation: u32,
    stop: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
}

/// The directory where nothing is said of one.
pub fn default_directory() -> PathBuf {
    format!("/tmp/transfer-engine-{}", peer::own_user()).into()
}

/// The path from the root, so that the socket is found, and removed, wherever the process goes. An empty one is refused: the system would
/// draw a name that is in no directory.
pub fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|error| {
        Error::new(Code::InvalidArgument, format!("{:?} cannot be where metrics are shown: {error}; name a path", path))
    })
}

impl Exporter {
    /// Opens a socket and answers with what `render` makes, on a thread of its own; no text closes the connection.
    ///
    /// Errors: InvalidArgument for a path that is too long or a directory that others may write to; Socket when something else is at the path,
    /// or the system refuses it; Limit without room for a descriptor or a thread.
    pub fn start(place: Place<'_>, render: impl Fn() -> Option<String> + Send + 'static) -> Result<Exporter> {
        let taking = TAKING.lock();
        let (path, listener) = match place {
            Place::Path(path) => {
                let path = absolute(path)?;
                let listener = listen(&path)?.ok_or_else(|| {
                    let text = format!(
                        "cannot open a socket for metrics at {}: somebody listens there, or it is not a socket of this user; name \
                         another path",
                        path.display()
                    );
                    Error::new(Code::Socket, text)
                })?;
                (path, listener)
            }
            Place::Directory(directory) => {
                let directory = absolute(directory)?;
                prepare(&directory)?;
                // In another container the same process id is somebody else's.
                loop {
                    let number = DRAWN.fetch_add(1, Ordering::Relaxed);
                    let path = directory.join(format!("{PREFIX}{}-{number}.sock", std::process::id()));
                    if let Some(listener) = listen(&path)? {
                        break (path, listener);
                    }
                }
            }
        };
        drop(taking);
        let refused = |error: io::Error| {
            let _ = fs::remove_file(&path);
            let text = format!("cannot answer at {}: {error}; see the limits of open files and processes", path.display());
            Error::new(Code::Limit, text)
        };
        let file = fs::symlink_metadata(&path).map(|found| (found.dev(), found.ino())).map_err(refused)?;
        let stop = Arc::new(EventFd::new().map_err(refused)?);
        let worker = Worker::new(listener, stop.clone(), Box::new(render)).map_err(refused)?;
        let thread = thread::spawn("te-metrics", move || worker.run()).map_err(refused)?;
        tracing::info!("metrics can be read at {}", path.display());
        Ok(Exporter { path, file, generation: fork::generation(), stop, thread: Some(thread) })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Exporter {
    /// Removes the socket if it is still there, and waits for the thread, unless it is the calling one.
    fn drop(&mut self) {
        if fork::in_child_of(self.generation) {
            return;
        }
        let is_ours = |found: &fs::Metadata| (found.dev(), found.ino()) == self.file;
        if fs::symlink_metadata(&self.path).as_ref().is_ok_and(is_ours) {
            let _ = fs::remove_file(&self.path);
        }
        self.stop.signal();
        if let Some(thread) = self.thread.take().filter(|thread| thread.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }
}

/// Why the system did not do it. `advice` is for all that is no limit.
fn refused(what: String, error: io::Error, advice: &str) -> Error {
    if limits::is_out_of_descriptors(&error) {
        return Error::new(Code::Limit, format!("{what}: {error}; raise the limit of open files (ulimit -n)"));
    }
    Error::new(Code::Socket, format!("{what}: {error}{advice}"))
}

/// Makes the directory if it is not there, makes sure that nobody else can put anything into it, and removes sockets of processes that have
/// ended without doing so.
fn prepare(directory: &Path) -> Result<()> {
    let cannot =
        |error| refused(format!("cannot use {} for metrics", directory.display()), error, "; name a directory of your own");
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(cannot(error)),
        _ => {}
    }
    let found = fs::symlink_metadata(directory).map_err(cannot)?;
    if !found.is_dir() || ![0, peer::own_user()].contains(&found.uid()) || found.mode() & 0o022 != 0 {
        let text = format!(
            "{} is not used for metrics: it must be a directory, no link, of this user (or root), that nobody else may write to; it \
             is of user {} with mode {:o}. Name another one (TE_METRICS_DIRECTORY)",
            directory.display(),
            found.uid(),
            found.mode()
        );
        return Err(Error::new(Code::InvalidArgument, text));
    }
    for entry in fs::read_dir(directory).map_err(cannot)?.flatten() {
        // One that is bound and not yet listened at looks like one that has been left: whose process is there is not touched.
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split_once('-')?.0.parse().ok());
        let is_gone = |process| !Peer { process, user: peer::own_user() }.is_alive();
        if process.is_some_and(is_gone) && is_stale(&entry.path()) {
            let _ = fs::remove_file(entry.path());
        }
    }
    Ok(())
}

/// Nothing where there is something already that is not to be replaced.
fn listen(path: &Path) -> Result<Option<UnixListener>> {
    let cannot = |error| refused(format!("cannot open a socket for metrics at {}", path.display()), error, "");
    let address = SockAddr::unix(path).map_err(|error| {
        Error::new(Code::InvalidArgument, format!("{} cannot be the path of a socket: {error}", path.display()))
    })?;
    let bind = || -> io::Result<UnixListener> {
        // The mode of a socket before it is bound is what its file gets, less the mask of the process.
        let socket = File::from(OwnedFd::from(Socket::new(Domain::UNIX, Type::STREAM, None)?));
        socket.set_permissions(Permissions::from_mode(0o600))?;
        let socket = Socket::from(OwnedFd::from(socket));
        socket.bind(&address)?;
        socket.listen(PLACES as i32)?;
        socket.set_nonblocking(true)?;
        Ok(OwnedFd::from(socket).into())
    };
    match bind() {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            if !is_stale(path) {
                return Ok(None);
            }
            fs::remove_file(path).map_err(cannot)?;
            bind().map(Some).map_err(cannot)
        }
        outcome => outcome.map(Some).map_err(cannot),
    }
}

/// Whether this is a socket of this user whose process is gone. A child of that process may have it open still, without answering.
fn is_stale(path: &Path) -> bool {
    let Ok(found) = fs::symlink_metadata(path) else { return false };
    if !found.file_type().is_socket() || found.uid() != peer::own_user() {
        return false;
    }
    // Not by a call that waits for room in a full queue.
    let connected = SockAddr::unix(path).and_then(|address| {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        socket.connect(&address)?;
        Peer::of(&socket)
    });
    match connected {
        Ok(peer) => peer.process != 0 && !peer.is_alive(),
        Err(error) => error.kind() == ErrorKind::ConnectionRefused,
    }
}

struct Connection {
    token: u64,
    stream: UnixStream,
    request: Vec<u8>,
    /// What is left to be sent, once the request is there.
    reply: Option<(Vec<u8>, usize)>,
}

type Render = Box<dyn Fn() -> Option<String> + Send>;

struct Worker {
    epoll: Epoll,
    listener: UnixListener,
    stop: Arc<EventFd>,
    render: Render,
    /// In the order in which they came.
    connections: VecDeque<Connection>,
    next_token: u64,
}

impl Worker {
    fn new(listener: UnixListener, stop: Arc<EventFd>, render: Render) -> io::Result<Worker> {
        let epoll = Epoll::new()?;
        epoll.add(&*stop, Interest::READ, TOKEN_STOP)?;
        epoll.add(&listener, Interest::READ, TOKEN_LISTENER)?;
        Ok(Worker { epoll, listener, stop, render, connections: VecDeque::new(), next_token: TOKEN_FIRST_CONNECTION })
    }

    fn run(mut self) {
        let mut events = Events::with_capacity(2 + PLACES);
        loop {
            let Ok(ready) = self.epoll.wait(&mut events, None) else { break };
            for event in ready {
                match event.token {
                    // Before each: what others ask for may take long, and whoever ends this waits for none of them.
                    _ if self.stop.clear() => {
                        // Nobody is to wait at a socket that a forked child has open, too.
                        let _ = SockRef::from(&self.listener).shutdown(Shutdown::Both);
                        self.connections.drain(..).for_each(|connection| connection.end(&self.epoll));
                        return drop(self.stop);
                    }
                    TOKEN_LISTENER => self.accept(),
                    token => self.step(token),
                }
            }
        }
    }

    fn accept(&mut self) {
        let stream = match self.listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Such as without a descriptor left: one of ours goes, and if there is none the queue of the socket is waited for.
                if error.kind() != ErrorKind::WouldBlock {
                    match self.connections.pop_front() {
                        Some(oldest) => oldest.end(&self.epoll),
                        None => std::thread::sleep(std::time::Duration::from_millis(100)),
                    }
                }
                return;
            }
        };
        let is_allowed = Peer::of(&stream).is_ok_and(|peer| [0, peer::own_user()].contains(&peer.user));
        let token = self.next_token;
        self.next_token += 1;
        let added = || stream.set_nonblocking(true).and_then(|()| self.epoll.add(&stream, Interest::READ, token));
        if !is_allowed || added().is_err() {
            let _ = stream.shutdown(Shutdown::Both);
            return;
        }
        if self.connections.len() == PLACES
            && let Some(oldest) = self.connections.pop_front()
        {
            oldest.end(&self.epoll);
        }
        self.connections.push_back(Connection { token, stream, request: Vec::new(), reply: None });
    }

    /// Does what can be done without waiting. Connections that are over are closed.
    fn step(&mut self, token: u64) {
        let Some(position) = self.connections.iter().position(|connection| connection.token == token) else { return };
        let connection = &mut self.connections[position];
        let outcome = match &connection.reply {
            Some(_) => connection.send(),
            None => connection.receive(&self.render).and_then(|()| match connection.reply {
                Some(_) => connection.send(),
                None => Ok(false),
            }),
        };
        let is_waiting = match outcome {
            Ok(true) => false,
            Ok(false) => true,
            Err(error) => error.kind() == ErrorKind::WouldBlock,
        };
        let interest = if connection.reply.is_some() { Interest::WRITE } else { Interest::READ };
        if (!is_waiting || self.epoll.modify(&connection.stream, interest, token).is_err())
            && let Some(connection) = self.connections.remove(position)
        {
            connection.end(&self.epoll);
        }
    }
}

impl Connection {
    /// Closes it, also where a child of `fork` has it open.
    fn end(self, epoll: &Epoll) {
        let _ = epoll.remove(&self.stream);
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Reads what there is of the request; at its end there is a reply.
    fn receive(&mut self, render: &Render) -> io::Result<()> {
        let mut bytes = [0; 4096];
        loop {
            let count = self.stream.read(&mut bytes)?;
            self.request.extend_from_slice(&bytes[..count]);
            let ends = [&b"\r\n\r\n"[..], b"\n\n"];
            let is_http = ends.iter().any(|end| self.request.windows(end.len()).any(|part| part == *end));
            if is_http || count == 0 {
                let text = render().ok_or(ErrorKind::NotConnected)?;
                let mut reply = String::new();
                if is_http {
                    let (kind, length) = (prometheus::CONTENT_TYPE, text.len());
                    reply =
                        format!("HTTP/1.0 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
                }
                reply += &text;
                self.reply = Some((reply.into_bytes(), 0));
                return Ok(());
            }
            if self.request.len() > LONGEST_REQUEST {
                return Err(ErrorKind::InvalidData.into());
            }
        }
    }

    /// Sends what the socket takes. True when all is sent.
    fn send(&mut self) -> io::Result<bool> {
        let Some((bytes, sent)) = &mut self.reply else { return Ok(true) };
        while *sent < bytes.len() {
            *sent += SockRef::from(&self.stream).send_with_flags(&bytes[*sent..], libc::MSG_NOSIGNAL)?;
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::symlink;
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    /// A directory that goes with the test.
    struct Directory(PathBuf);

    impl Directory {
        fn new() -> Directory {
            static NUMBER: AtomicUsize = AtomicUsize::new(0);
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let path = std::env::temp_dir().join(format!("te-exporter-{}-{number}", std::process::id()));
            DirBuilder::new().mode(0o700).create(&path).unwrap();
            Directory(path)
        }

        fn socket(&self) -> PathBuf {
            self.0.join("s")
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn start(path: &Path, text: &str) -> Result<Exporter> {
        let text = text.to_string();
        Exporter::start(Place::Path(path), move || Some(text.clone()))
    }

    fn connect(path: &Path) -> UnixStream {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream
    }

    fn ask(path: &Path, request: &str) -> String {
        let mut stream = connect(path);
        stream.write_all(request.as_bytes()).unwrap();
        if request.is_empty() {
            stream.shutdown(Shutdown::Write).unwrap();
        }
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn requests_are_answered_as_http_and_bare_ends_with_the_text() {
        let directory = Directory::new();
        let _exporter = start(&directory.socket(), "a 1\n").unwrap();
        let answer = ask(&directory.socket(), "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.0 200 OK\r\n") && head.contains("\r\nContent-Length: 4\r\n"), "{head}");
        assert_eq!(body, "a 1\n");
        assert_eq!(ask(&directory.socket(), ""), "a 1\n");
    }

    #[test]
    fn a_socket_is_its_owners_alone_and_goes_with_its_exporter() {
        let directory = Directory::new();
        let exporter = start(&directory.socket(), "").unwrap();
        let found = fs::symlink_metadata(exporter.path()).unwrap();
        assert!(found.file_type().is_socket());
        assert_eq!((found.mode() & 0o777, found.uid()), (0o600, peer::own_user()));
        drop(exporter);
        assert!(fs::symlink_metadata(directory.socket()).is_err());
    }

    #[test]
    fn what_others_listen_at_or_is_no_socket_is_left_alone() {
        let directory = Directory::new();
        let first = start(&directory.socket(), "first").unwrap();
        assert_eq!(start(&directory.socket(), "second").err().unwrap().code(), Code::Socket);
        assert_eq!(ask(&directory.socket(), ""), "first");
        drop(first);
        fs::write(directory.socket(), "file").unwrap();
        assert_eq!(start(&directory.socket(), "").err().unwrap().code(), Code::Socket);
        let link = directory.0.join("link");
        symlink(directory.0.join("elsewhere"), &link).unwrap();
        assert_eq!(start(&link, "").err().unwrap().code(), Code::Socket);
        assert!(fs::symlink_metadata(directory.0.join("elsewhere")).is_err(), "a link is not followed");
        let long = directory.0.join("x".repeat(200));
        assert_eq!(start(&long, "").err().unwrap().code(), Code::InvalidArgument);
    }

    #[test]
    fn a_socket_that_nobody_listens_at_is_replaced() {
        let directory = Directory::new();
        drop(UnixListener::bind(directory.socket()).unwrap());
        let exporter = start(&directory.socket(), "new").unwrap();
        assert_eq!(ask(exporter.path(), ""), "new");
    }

    #[test]
    fn a_successors_socket_is_not_removed() {
        let directory = Directory::new();
        let exporter = start(&directory.socket(), "").unwrap();
        fs::remove_file(directory.socket()).unwrap();
        let successor = start(&directory.socket(), "successor").unwrap();
        drop(exporter);
        assert_eq!(ask(successor.path(), ""), "successor");
    }

    #[test]
    fn names_are_drawn_where_nobody_else_can_write_and_what_is_left_of_dead_processes_goes() {
        let directory = Directory::new();
        let inner = directory.0.join("inner");
        let draw = || Exporter::start(Place::Directory(&inner), || Some(String::new()));
        let (first, second) = (draw().unwrap(), draw().unwrap());
        assert_ne!(first.path(), second.path());
        assert_eq!(fs::symlink_metadata(&inner).unwrap().mode() & 0o777, 0o700);
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        let left = inner.join(format!("{PREFIX}{}-1.sock", ended.id()));
        drop(UnixListener::bind(&left).unwrap());
        let third = draw().unwrap();
        assert!(fs::symlink_metadata(&left).is_err());
        assert!([&first, &second, &third].iter().all(|exporter| fs::symlink_metadata(exporter.path()).is_ok()));
        fs::set_permissions(&inner, Permissions::from_mode(0o770)).unwrap();
        assert_eq!(draw().err().unwrap().code(), Code::InvalidArgument);
        let link = directory.0.join("link");
        symlink(&directory.0, &link).unwrap();
        let through_link = Exporter::start(Place::Directory(&link), || None);
        assert_eq!(through_link.err().unwrap().code(), Code::InvalidArgument);
    }

    #[test]
    fn silent_connections_keep_nobody_from_reading_and_go_when_there_are_more() {
        let directory = Directory::new();
        let text = "x".repeat(1 << 20);
        let exporter = start(&directory.socket(), &text).unwrap();
        let mut first = connect(exporter.path());
        // Neither asks to the end, nor reads what it has asked for.
        let _silent: Vec<UnixStream> = (0..PLACES)
            .map(|number| {
                let mut stream = connect(exporter.path());
                stream.write_all(if number % 2 == 0 { b"GET" } else { b"GET\n\n" }).unwrap();
                stream
            })
            .collect();
        assert_eq!(first.read(&mut [0]).unwrap(), 0, "the first has made room");
        assert!(ask(exporter.path(), "").eq(&text));
        drop(exporter);
    }

    #[test]
    fn readers_are_not_served_before_it_ends() {
        let directory = Directory::new();
        let (begins, begun) = mpsc::channel();
        let (may_end, ends) = mpsc::channel();
        let ends = Mutex::new(ends);
        let render = move || {
            begins.send(()).unwrap();
            ends.lock().recv().ok().map(|()| String::new())
        };
        let exporter = Exporter::start(Place::Path(&directory.socket()), render).unwrap();
        let mut readers: Vec<UnixStream> = (1..PLACES).map(|_| connect(exporter.path())).collect();
        // Answered later than the others were accepted.
        may_end.send(()).unwrap();
        ask(exporter.path(), "");
        begun.recv().unwrap();
        readers[0].write_all(b"\n\n").unwrap();
        begun.recv().unwrap();
        // Meanwhile the others ask, too, and then it is to end.
        readers.iter_mut().for_each(|reader| reader.write_all(b"\n\n").unwrap());
        exporter.stop.signal();
        drop(may_end);
        drop(exporter);
        assert_eq!(begun.iter().count(), 0);
    }

    #[test]
    fn a_child_leaves_its_parents_socket_alone() {
        let directory = Directory::new();
        let exporter = start(&directory.socket(), "parent").unwrap();
        let exporter = std::mem::ManuallyDrop::new(exporter);
        let path = directory.socket();
        let code = fork::tests::fork_and_run(|| {
            // What the child has is a copy; dropping it must neither wait nor remove anything.
            let copy: Exporter = Exporter {
                path: path.clone(),
                file: exporter.file,
                generation: exporter.generation,
                stop: exporter.stop.clone(),
                thread: None,
            };
            drop(copy);
            0
        });
        assert_eq!(code, 0);
        assert_eq!(ask(&path, ""), "parent");
        drop(std::mem::ManuallyDrop::into_inner(exporter));
    }

    #[test]
    fn a_connection_ends_also_when_a_child_has_it_open() {
        let directory = Directory::new();
        let exporter = start(&directory.socket(), "a 1\n").unwrap();
        let mut streams = [connect(exporter.path()), connect(exporter.path())];
        // Answered later than both were accepted, so both are open where the child is made.
        assert_eq!(ask(exporter.path(), ""), "a 1\n");
        let (mut child_waits, child_may_end) = UnixStream::pair().unwrap();
        let ends = std::thread::spawn(move || {
            fork::tests::fork_and_run(|| {
                // The end that this child has itself does not count.
                let _ = child_waits.shutdown(Shutdown::Write);
                let _ = child_waits.read(&mut [0]);
                0
            })
        });
        let _ = (&child_may_end).read(&mut [0]);
        for stream in &mut streams {
            stream.shutdown(Shutdown::Write).unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            assert_eq!(answer, "a 1\n", "the end is seen though the child has the connection open");
        }
        child_may_end.shutdown(Shutdown::Both).unwrap();
        assert_eq!(ends.join().unwrap(), 0);
    }

    #[test]
    fn an_empty_path_is_refused() {
        assert_eq!(start(Path::new(""), "").err().unwrap().code(), Code::InvalidArgument);
        assert_eq!(Exporter::start(Place::Directory(Path::new("")), || None).err().unwrap().code(), Code::InvalidArgument);
    }

    #[test]
    fn a_path_is_the_same_wherever_the_process_goes() {
        let relative = PathBuf::from(format!("te-exporter-{}.sock", std::process::id()));
        let exporter = start(&relative, "").unwrap();
        assert!(exporter.path().is_absolute(), "{}", exporter.path().display());
        assert!(fs::symlink_metadata(&relative).is_ok());
        drop(exporter);
        assert!(fs::symlink_metadata(&relative).is_err());
    }

    #[test]
    fn a_socket_that_a_living_process_has_bound_and_not_yet_listens_at_is_left() {
        let directory = Directory::new();
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        let path = directory.0.join(format!("{PREFIX}{}-1000000.sock", std::process::id()));
        socket.bind(&SockAddr::unix(&path).unwrap()).unwrap();
        let _exporter = Exporter::start(Place::Directory(&directory.0), || None).unwrap();
        assert!(fs::symlink_metadata(&path).is_ok());
    }

    #[test]
    fn a_name_that_another_container_has_taken_is_not_drawn() {
        let directory = Directory::new();
        let own = Exporter::start(Place::Directory(&directory.0), || None).unwrap();
        let number = || DRAWN.load(Ordering::Relaxed);
        // Of another namespace of processes, where the same number is somebody else's. Tests beside this one draw, too.
        let taken: Vec<_> = (number()..number() + 100)
            .filter_map(|number| UnixListener::bind(directory.0.join(format!("{PREFIX}{}-{number}.sock", std::process::id()))).ok())
            .collect();
        assert!(taken.len() > 90);
        let other = Exporter::start(Place::Directory(&directory.0), || None).unwrap();
        assert_ne!(own.path(), other.path());
    }
}
