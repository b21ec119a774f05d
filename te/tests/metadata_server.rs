//! `te metadata-server` as clients meet it: over sockets, with requests that are well made and requests that are not.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv6Addr, Shutdown, TcpListener, TcpStream};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::Duration;

/// A server of its own for a test.
struct Server {
    child: Child,
    log: BufReader<ChildStderr>,
    host: &'static str,
    port: u16,
}

impl Server {
    fn start(arguments: &[&str]) -> Server {
        Server::start_on("127.0.0.1", arguments)
    }

    fn start_on(host: &'static str, arguments: &[&str]) -> Server {
        let mut child = Command::new(env!("CARGO_BIN_EXE_te"))
            .args(["metadata-server", "--listen", &format!("{host}:0")])
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        log.read_line(&mut String::new()).unwrap();
        Server { child, log, host, port: line.trim().parse().unwrap() }
    }

    fn connect(&self) -> Client {
        let stream = TcpStream::connect((self.host.trim_matches(['[', ']']), self.port)).unwrap();
        // So that a fault shows as one, instead of as a test that hangs.
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        Client { stream: BufReader::new(stream) }
    }

    /// Status and content of the answer to a request on a connection of its own.
    fn ask(&self, method: &str, target: &str, body: &[u8]) -> (u16, Vec<u8>) {
        self.connect().ask(method, target, body)
    }

    fn metric(&self, name: &str) -> u64 {
        let (_, text) = self.ask("GET", "/metrics", b"");
        let text = String::from_utf8(text).unwrap();
        let value =
            text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).unwrap_or_else(|| panic!("{name}\n{text}"));
        value.parse().unwrap()
    }

    fn signal(&self, name: &str) {
        assert!(Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap().success());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Client {
    stream: BufReader<TcpStream>,
}

impl Client {
    fn send(&mut self, bytes: &[u8]) {
        // The server may have closed the connection already, with an answer that is still to be read.
        let _ = self.stream.get_mut().write_all(bytes);
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.stream.read_line(&mut line).unwrap();
        line
    }

    /// Status, head and content of an answer, which must say its length.
    fn answer(&mut self, has_content: bool) -> (u16, String, Vec<u8>) {
        let first = self.line();
        let status = first.split(' ').nth(1).unwrap_or_else(|| panic!("{first:?}")).parse().unwrap();
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") && !head.starts_with("\r\n") {
            let line = self.line();
            assert!(!line.is_empty(), "{first}{head}");
            head.push_str(&line.to_ascii_lowercase());
        }
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let length: usize = length.unwrap_or_else(|| panic!("{first}{head}")).parse().unwrap();
        let mut content = vec![0; if has_content { length } else { 0 }];
        self.stream.read_exact(&mut content).unwrap();
        (status, head, content)
    }

    fn ask(&mut self, method: &str, target: &str, body: &[u8]) -> (u16, Vec<u8>) {
        self.send(format!("{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", body.len()).as_bytes());
        self.send(body);
        let (status, _, content) = self.answer(method != "HEAD");
        (status, content)
    }

    /// Sends the head of a `PUT` and waits until the server wants the value, so that it is known to be at it.
    fn begin_put(&mut self, target: &str, length: usize) {
        self.send(
            format!("PUT {target} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {length}\r\n\r\n").as_bytes(),
        );
        assert_eq!((self.line().as_str(), self.line().as_str()), ("HTTP/1.1 100 Continue\r\n", "\r\n"));
    }

    /// Whether the server has closed the connection, once it has.
    fn is_closed(&mut self) -> bool {
        match self.stream.read(&mut [0]) {
            Ok(length) => length == 0,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

#[test]
fn values_are_kept_as_clients_put_them() {
    let server = Server::start(&[]);
    let mut client = server.connect();
    let target = "/metadata?key=mooncake%2Fram%2Fnode%3A1";
    assert_eq!(client.ask("GET", target, b"").0, 404);
    for value in [&b"{\"buffers\":[]}"[..], &[b' '; 3 << 20], b"{}"] {
        assert_eq!(client.ask("PUT", target, value).0, 200);
        client.send(format!("GET {target} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes());
        let (status, head, content) = client.answer(true);
        assert!(status == 200 && head.contains("content-type: application/json\r\n") && content == value, "{head}");
        assert_eq!(server.ask("GET", "/metadata?key=mooncake/ram/node:1", b""), (200, value.to_vec()));
    }
    assert_eq!(client.ask("HEAD", target, b"").0, 200);
    assert_eq!(client.ask("DELETE", target, b"").0, 200);
    assert_eq!(client.ask("DELETE", target, b"").0, 200);
    assert_eq!(client.ask("GET", target, b"").0, 404);
    assert_eq!(client.ask("GET", "/health", b"").0, 200);
    assert_eq!(server.metric("te_metadata_requests_total{method=\"PUT\",status=\"200\"}"), 3);
}

#[test]
fn odd_requests_get_the_right_status_and_the_server_goes_on() {
    let server = Server::start(&["--max-value", "1K"]);
    assert_eq!(server.ask("PUT", "/metadata?key=a", b"old").0, 200);
    let put = "PUT /metadata?key=a HTTP/1.1\r\nHost: x\r\n";
    let headers: String = (0..300).map(|index| format!("X{index}: y\r\n")).collect();
    let vectors = [
        ("GARBAGE\r\n\r\n".to_string(), &[400][..]),
        ("\x16\x03\x01\x02\x00\x01\x00\x01".to_string(), &[400]),
        ("GET\r\n\r\n".to_string(), &[400]),
        ("GET /health HTTP/3.0\r\n\r\n".to_string(), &[400]),
        ("GET /health HTTP/1.1\r\nno colon\r\n\r\n".to_string(), &[400]),
        (format!("GET /health HTTP/1.1\r\n{headers}\r\n"), &[431]),
        (format!("GET /health HTTP/1.1\r\nX: {}\r\n\r\n", "y".repeat(140_000)), &[431]),
        (format!("GET /metadata?key={} HTTP/1.1\r\n\r\n", "y".repeat(66_000)), &[414]),
        (format!("{put}Content-Length: -5\r\n\r\n12345"), &[400]),
        (format!("{put}Content-Length: 5\r\nContent-Length: 6\r\n\r\n123456"), &[400]),
        (format!("{put}Content-Length: 99999999999999999999999\r\n\r\n"), &[400]),
        (format!("{put}Content-Length: 5\r\n\r\n123"), &[400]),
        (format!("{put}Transfer-Encoding: chunked\r\n\r\nzz\r\n"), &[400]),
        (format!("{put}Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"), &[400]),
        (format!("{put}\r\n"), &[411]),
        ("PUT /metadata?key=a HTTP/1.0\r\n\r\nabc".to_string(), &[411]),
        (format!("{put}Content-Length: 1025\r\n\r\n{}", "y".repeat(1025)), &[413]),
        (format!("{put}Content-Length: 18446744073709551000\r\n\r\n{}", "y".repeat(20_000)), &[413]),
        (format!("{put}Transfer-Encoding: chunked\r\n\r\n{}", "100\r\n".to_string() + &"y".repeat(255)), &[400]),
        (format!("{put}Transfer-Encoding: chunked\r\n\r\n{}", format!("100\r\n{}\r\n", "y".repeat(256)).repeat(100)), &[413]),
        ("POST /metadata?key=a HTTP/1.1\r\nHost: x\r\n\r\n".to_string(), &[405]),
        ("CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n".to_string(), &[404]),
        ("OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n".to_string(), &[404]),
        ("GET /metadata?key=a HTTP/1.0\r\n\r\n".to_string(), &[200]),
        (
            "GET /metadata HTTP/1.1\r\nHost: x\r\n\r\nGET /metadata?key=a HTTP/1.1\r\nHost: x\r\n\r\nGET /x HTTP/1.1\r\n\r\n"
                .to_string(),
            &[400, 200, 404],
        ),
        ("GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\nGET /health HTTP/1.0\r\n\r\n".to_string(), &[200, 200]),
    ];
    for (request, statuses) in vectors {
        let shown = &request[..request.len().min(100)];
        let mut client = server.connect();
        client.send(request.as_bytes());
        let _ = client.stream.get_ref().shutdown(Shutdown::Write);
        // For where the test fails.
        eprintln!("{shown:?}");
        for status in statuses {
            assert_eq!(client.answer(true).0, *status, "{shown:?}");
        }
        assert!(client.is_closed(), "{shown:?}");
        // Whatever it was, it has not replaced the value.
        assert_eq!(server.ask("GET", "/metadata?key=a", b""), (200, b"old".to_vec()), "{shown:?}");
    }
    assert!(server.metric("te_metadata_malformed_requests_total") >= 8);
    assert_eq!(server.metric("te_metadata_keys"), 1);
}

#[test]
fn clients_may_wait_for_leave_to_send_and_may_send_in_chunks() {
    let server = Server::start(&["--max-value", "1M"]);
    let mut client = server.connect();
    client.begin_put("/metadata?key=a", 1 << 20);
    client.send(&[b'1'; 1 << 20]);
    assert_eq!(client.answer(true).0, 200);
    client
        .send(b"PUT /metadata?key=b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n");
    assert_eq!(client.answer(true).0, 200);
    assert_eq!(client.ask("GET", "/metadata?key=a", b""), (200, vec![b'1'; 1 << 20]));
    assert_eq!(client.ask("GET", "/metadata?key=b", b""), (200, b"abcde".to_vec()));
    // Leave is not given for what is too large.
    client.send(b"PUT /metadata?key=a HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 1048577\r\n\r\n");
    assert_eq!(client.answer(true).0, 413);
    assert!(client.is_closed());
}

#[test]
fn clients_at_the_same_time_read_values_that_are_whole() {
    let server = Server::start(&[]);
    std::thread::scope(|scope| {
        for number in 0..16u8 {
            let server = &server;
            scope.spawn(move || {
                let mut client = server.connect();
                for round in 0..20 {
                    let own = format!("/metadata?key=own%2F{number}");
                    let value = vec![number; 50_000 + 1000 * round];
                    assert_eq!(client.ask("PUT", &own, &value).0, 200);
                    assert_eq!(client.ask("PUT", "/metadata?key=common", &value).0, 200);
                    assert_eq!(client.ask("GET", &own, b""), (200, value));
                    let (status, common) = client.ask("GET", "/metadata?key=common", b"");
                    assert!(status == 200 && common.len() >= 50_000 && common.iter().all(|byte| *byte == common[0]));
                }
            });
        }
    });
    assert_eq!(server.metric("te_metadata_keys"), 17);
}

#[test]
fn a_stop_lets_what_is_in_flight_end_and_closes_what_is_idle() {
    for signal in ["-TERM", "-INT"] {
        let mut server = Server::start(&["--timeout", "86400", "--grace", "86400"]);
        let (mut idle, mut upload) = (server.connect(), server.connect());
        assert_eq!(idle.ask("GET", "/health", b"").0, 200);
        upload.begin_put("/metadata?key=a", 5);
        upload.send(b"12");
        server.signal(signal);
        assert!(idle.is_closed());
        upload.send(b"345");
        assert_eq!(upload.answer(true).0, 200);
        assert!(upload.is_closed());
        assert_eq!(server.child.wait().unwrap().code(), Some(0));
        assert!(TcpStream::connect((server.host, server.port)).is_err());
        let mut log = String::new();
        server.log.read_to_string(&mut log).unwrap();
        assert!(log.contains("stops") && log.lines().count() == 1, "{log}");
    }
}

#[test]
fn a_stop_does_not_wait_for_clients_that_stall() {
    let mut server = Server::start(&["--timeout", "86400"]);
    let (mut upload, _silent) = (server.connect(), server.connect());
    upload.begin_put("/metadata?key=a", 5);
    server.signal("-TERM");
    assert_eq!(server.child.wait().unwrap().code(), Some(0));
    assert!(upload.is_closed());
}

#[test]
fn clients_that_take_too_long_lose_their_connection() {
    let server = Server::start(&["--timeout", "3"]);
    // More than the sockets hold. It may take too long itself where the machine is busy.
    while server.ask("PUT", "/metadata?key=a", &[b'1'; 16 << 20]).0 != 200 {}
    let (mut silent, mut idle, mut head, mut body, mut reader) =
        (server.connect(), server.connect(), server.connect(), server.connect(), server.connect());
    assert_eq!(idle.ask("GET", "/health", b"").0, 200);
    head.send(b"GET /health HTTP/1.1\r\nX: ");
    body.send(b"PUT /metadata?key=b HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n123");
    reader.send(b"GET /metadata?key=a HTTP/1.1\r\nHost: x\r\n\r\n");
    assert_eq!(body.answer(true).0, 408);
    for client in [&mut silent, &mut idle, &mut head, &mut body] {
        assert!(client.is_closed());
    }
    // The one that does not read is gone too, and with it what it held of a value that is removed.
    assert_eq!(server.ask("DELETE", "/metadata?key=a", b"").0, 200);
    while server.metric("te_metadata_connections") > 1 || server.metric("te_metadata_memory_bytes") > 0 {
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn connections_beyond_the_limit_are_refused_until_one_is_free() {
    let server = Server::start(&["--max-connections", "2"]);
    let mut held = [server.connect(), server.connect()];
    for client in &mut held {
        assert_eq!(client.ask("GET", "/health", b"").0, 200);
    }
    let (status, _, text) = server.connect().answer(true);
    assert!(status == 503 && String::from_utf8(text).unwrap().contains("--max-connections"));
    drop(held);
    let mut client = loop {
        let mut client = server.connect();
        client.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n");
        if client.stream.fill_buf().is_ok_and(|answer| answer.starts_with(b"HTTP/1.1 200")) {
            break client;
        }
    };
    assert_eq!(client.answer(true).2, b"OK\n");
    let (_, metrics) = client.ask("GET", "/metrics", b"");
    let metrics = String::from_utf8(metrics).unwrap();
    assert!(!metrics.contains("te_metadata_refused_connections_total 0"), "{metrics}");
}

#[test]
fn memory_is_bounded_and_what_is_on_its_way_counts() {
    let server = Server::start(&["--max-memory", "1M", "--max-value", "1M"]);
    let mut upload = server.connect();
    upload.begin_put("/metadata?key=a", 600_000);
    upload.send(&[b'1'; 400_000]);
    while server.metric("te_metadata_memory_bytes") < 400_000 {
        std::thread::sleep(Duration::from_millis(5));
    }
    let (status, text) = server.ask("PUT", "/metadata?key=b", &[b'2'; 700_000]);
    assert!(status == 507 && String::from_utf8(text).unwrap().contains("--max-memory"), "{status}");
    upload.send(&[b'1'; 200_000]);
    assert_eq!(upload.answer(true).0, 200);

    // Many small ones do not get past the limit either.
    let mut client = server.connect();
    let statuses: Vec<u16> = (0..3000).map(|number| client.ask("PUT", &format!("/metadata?key=small{number}"), b"").0).collect();
    assert_eq!((statuses[0], statuses[2999]), (200, 507));
    assert!(server.metric("te_metadata_memory_bytes") <= 1 << 20);

    assert_eq!(client.ask("DELETE", "/metadata?key=a", b"").0, 200);
    assert_eq!(server.ask("PUT", "/metadata?key=b", &[b'2'; 500_000]).0, 200);
}

#[test]
fn it_listens_on_ipv6() {
    if TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_err() {
        eprintln!("this machine has no IPv6");
        return;
    }
    let server = Server::start_on("[::1]", &["--path", "/else/where"]);
    assert_eq!(server.ask("PUT", "/else/where?key=a", b"{}").0, 200);
    assert_eq!(server.ask("GET", "/else/where?key=a", b""), (200, b"{}".to_vec()));
    assert_eq!(server.ask("GET", "/metadata?key=a", b"").0, 404);
}

#[test]
fn what_cannot_be_done_is_said_at_the_start() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    for (arguments, status) in [
        (&["--listen", &taken][..], 1),
        (&["--listen", "8080"], 1),
        (&["--path", "metadata"], 2),
        (&["--path", "/metrics"], 2),
        (&["--max-memory", "0"], 2),
        (&["--max-connections", "0"], 2),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_te")).arg("metadata-server").args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(status), "{arguments:?}");
        assert!(output.stdout.is_empty() && String::from_utf8(output.stderr).unwrap().contains(arguments[1]), "{arguments:?}");
    }
}
