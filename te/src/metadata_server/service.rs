//! What the server answers to each request.
//!
//! The store is at one path, with the key in the query: `PUT`, `GET` (and `HEAD`) and `DELETE /metadata?key=KEY`. Only 200 means
//! success to upstream's clients, which is why it is the answer to every change that leaves things as the client wants them: also to
//! a `PUT` of a key that is there, whoever wrote it, and to a `DELETE` of one that is not. Keys are compared decoded.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Bytes};
use hyper::header::{ALLOW, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderValue, TRANSFER_ENCODING};
use hyper::http::request::Parts;
use hyper::{Method, Request, Response, StatusCode, Uri};

use super::metrics::{Gauges, Metrics};
use super::store::{Memory, Refusal, Store, Upload};

/// An answer, whole in memory, so that it has a `Content-Length`.
pub type Answer = Response<Full<Bytes>>;

/// The store as clients see it. Any number of requests may be answered at a time.
pub struct Service {
    /// Where the store is: a path that begins with `/`.
    pub path: String,
    /// Bytes that a value may have.
    pub max_value: usize,
    /// How long a value may take to arrive.
    pub timeout: Duration,
    /// Bytes that all keys and values may take.
    pub memory: Arc<Memory>,
    /// Counts.
    pub metrics: Metrics,
    store: Store,
    /// Whether the last value that was to be stored found no memory, which is logged once each time that it begins.
    is_full: AtomicBool,
}

impl Service {
    /// A store without values.
    pub fn new(path: String, max_value: usize, max_memory: usize, timeout: Duration) -> Service {
        Service {
            path,
            max_value,
            timeout,
            memory: Memory::new(max_memory),
            metrics: Metrics::default(),
            store: Store::default(),
            is_full: AtomicBool::new(false),
        }
    }

    /// How many keys there are.
    pub fn keys(&self) -> usize {
        self.store.totals().0
    }

    /// Answers a request. A body that was not wanted is not read, and the answer then says that the connection will be closed.
    pub async fn answer<B>(&self, request: Request<B>, connections: usize) -> Answer
    where
        B: Body<Data = Bytes> + Unpin,
    {
        let started = Instant::now();
        let has_body = !request.body().is_end_stream();
        let (Parts { method, uri, headers, .. }, body) = request.into_parts();
        let mut answer = match uri.path() {
            path if path == self.path => self.answer_for_key(&method, &uri, &headers, body).await,
            "/health" => answer_for_page(&method, || text(StatusCode::OK, "OK")),
            "/metrics" => answer_for_page(&method, || self.answer_metrics(connections)),
            path => text(StatusCode::NOT_FOUND, format!("nothing is at {path}; the metadata is at {}?key=KEY", self.path)),
        };
        if has_body && !(method == Method::PUT && answer.status() == StatusCode::OK) {
            answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        self.metrics.count(&method, answer.status(), started.elapsed());
        answer
    }

    async fn answer_for_key<B>(&self, method: &Method, uri: &Uri, headers: &HeaderMap, body: B) -> Answer
    where
        B: Body<Data = Bytes> + Unpin,
    {
        if ![Method::GET, Method::HEAD, Method::PUT, Method::DELETE].contains(method) {
            return not_allowed("GET, HEAD, PUT, DELETE");
        }
        let key = match find_key(uri) {
            Ok(key) => key,
            Err(fault) => return text(StatusCode::BAD_REQUEST, fault),
        };
        match *method {
            // Not a value of no bytes.
            Method::PUT if !headers.contains_key(CONTENT_LENGTH) && !headers.contains_key(TRANSFER_ENCODING) => {
                text(StatusCode::LENGTH_REQUIRED, "say how long the value is: Content-Length, or Transfer-Encoding: chunked")
            }
            Method::PUT => match tokio::time::timeout(self.timeout, self.store(key, body)).await {
                Ok(Ok(())) => text(StatusCode::OK, "stored"),
                Ok(Err(refused)) => refused,
                Err(_) => {
                    text(StatusCode::REQUEST_TIMEOUT, format!("the value did not arrive within {} s", self.timeout.as_secs()))
                }
            },
            Method::DELETE => {
                self.store.remove(&key);
                text(StatusCode::OK, "removed")
            }
            _ => match self.store.get(&key) {
                Some(value) => with_type("application/json", value),
                None => text(StatusCode::NOT_FOUND, "the key has no value"),
            },
        }
    }

    /// Stores a value once it has arrived whole.
    async fn store<B>(&self, key: String, mut body: B) -> Result<(), Answer>
    where
        B: Body<Data = Bytes> + Unpin,
    {
        let announced = body.size_hint().exact().unwrap_or(0);
        if announced > self.max_value as u64 {
            return Err(self.refuse(Refusal::TooLarge));
        }
        let largest = if announced > 0 { announced as usize } else { self.max_value };
        let mut upload = Upload::new(&self.memory, key, largest).map_err(|refusal| self.refuse(refusal))?;
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| text(StatusCode::BAD_REQUEST, "the value did not arrive whole"))?;
            if let Some(piece) = frame.data_ref() {
                upload.push(piece).map_err(|refusal| self.refuse(refusal))?;
            }
        }
        self.store.put(upload);
        self.is_full.store(false, Relaxed);
        Ok(())
    }

    fn refuse(&self, refusal: Refusal) -> Answer {
        match refusal {
            Refusal::TooLarge => {
                text(StatusCode::PAYLOAD_TOO_LARGE, format!("a value may have {} bytes (--max-value)", self.max_value))
            }
            Refusal::OutOfMemory => {
                let limit = self.memory.limit();
                if !self.is_full.swap(true, Relaxed) {
                    eprintln!("te: values are refused: the {limit} bytes for keys and values are taken; raise --max-memory");
                }
                let fault = format!("the {limit} bytes for keys and values are taken (--max-memory)");
                text(StatusCode::INSUFFICIENT_STORAGE, fault)
            }
        }
    }

    fn answer_metrics(&self, connections: usize) -> Answer {
        let (keys, value_bytes) = self.store.totals();
        let (memory_bytes, memory_limit_bytes) = (self.memory.used(), self.memory.limit());
        let gauges = Gauges { keys, value_bytes, memory_bytes, memory_limit_bytes, connections };
        with_type("text/plain; version=0.0.4; charset=utf-8", self.metrics.render(&gauges).into())
    }
}

fn answer_for_page(method: &Method, page: impl FnOnce() -> Answer) -> Answer {
    if [Method::GET, Method::HEAD].contains(method) { page() } else { not_allowed("GET, HEAD") }
}

fn with_type(media_type: &'static str, content: Bytes) -> Answer {
    let mut answer = Response::new(Full::new(content));
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
    answer
}

fn text(status: StatusCode, message: impl Into<String>) -> Answer {
    let mut answer = with_type("text/plain; charset=utf-8", (message.into() + "\n").into());
    *answer.status_mut() = status;
    answer
}

fn not_allowed(methods: &'static str) -> Answer {
    let mut answer = text(StatusCode::METHOD_NOT_ALLOWED, format!("the methods are {methods}"));
    answer.headers_mut().insert(ALLOW, HeaderValue::from_static(methods));
    answer
}

/// The key that a query names, decoded; of several, the first.
fn find_key(uri: &Uri) -> Result<String, &'static str> {
    let mut parameters = uri.query().unwrap_or_default().split('&');
    let encoded = parameters.find_map(|parameter| parameter.strip_prefix("key=")).ok_or("the query has no key")?;
    let key = decode(encoded).ok_or("the key is not percent-encoded UTF-8")?;
    if key.is_empty() { Err("the key is empty") } else { Ok(key) }
}

/// Undoes percent-encoding as forms have it, where a space may be `+`.
fn decode(encoded: &str) -> Option<String> {
    let mut bytes = encoded.bytes();
    let mut decoded = Vec::with_capacity(encoded.len());
    while let Some(byte) = bytes.next() {
        let digit = |byte: u8| char::from(byte).to_digit(16);
        decoded.push(match byte {
            b'%' => (digit(bytes.next()?)? * 16 + digit(bytes.next()?)?) as u8,
            b'+' => b' ',
            _ => byte,
        });
    }
    String::from_utf8(decoded).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(max_value: usize, max_memory: usize) -> Service {
        Service::new("/metadata".to_string(), max_value, max_memory, Duration::from_secs(60))
    }

    fn answer(service: &Service, method: &str, target: &str, body: &[u8]) -> (u16, String, Answer) {
        let request = Request::builder().method(method).uri(target).header(CONTENT_LENGTH, body.len());
        let request = request.body(Full::new(Bytes::copy_from_slice(body))).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let answer = runtime.block_on(service.answer(request, 0));
        let content = runtime.block_on(answer.body().clone().collect()).unwrap().to_bytes();
        (answer.status().as_u16(), String::from_utf8(content.to_vec()).unwrap(), answer)
    }

    #[test]
    fn each_request_has_its_status() {
        let service = service(10, 10_000);
        for (method, target, body, status) in [
            ("GET", "/metadata?key=a", "", 404),
            ("HEAD", "/metadata?key=a", "", 404),
            ("DELETE", "/metadata?key=a", "", 200),
            ("PUT", "/metadata?key=a", "0123456789", 200),
            ("PUT", "/metadata?key=a", "", 200),
            ("PUT", "/metadata?key=a", "0123456789a", 413),
            ("GET", "/metadata?key=a", "", 200),
            ("HEAD", "/metadata?key=a", "", 200),
            ("GET", "http://host:1/metadata?key=a", "", 200),
            ("DELETE", "/metadata?key=a", "", 200),
            ("GET", "/metadata?key=a", "", 404),
            ("POST", "/metadata?key=a", "", 405),
            ("PATCH", "/metadata?key=a", "", 405),
            ("GET", "/metadata", "", 400),
            ("GET", "/metadata?", "", 400),
            ("GET", "/metadata?key", "", 400),
            ("GET", "/metadata?key=", "", 400),
            ("PUT", "/metadata?keys=a", "x", 400),
            ("DELETE", "/metadata?Key=a", "", 400),
            ("GET", "/metadata?key=%", "", 400),
            ("GET", "/metadata?key=%4", "", 400),
            ("GET", "/metadata?key=%+4", "", 400),
            ("GET", "/metadata?key=%zz", "", 400),
            ("GET", "/metadata?key=%ff", "", 400),
            ("GET", "/metadata/?key=a", "", 404),
            ("GET", "/?key=a", "", 404),
            ("PUT", "/elsewhere", "x", 404),
            ("GET", "/health", "", 200),
            ("PUT", "/health", "x", 405),
            ("GET", "/metrics", "", 200),
            ("DELETE", "/metrics", "", 405),
        ] {
            let (given, text, _) = answer(&service, method, target, body.as_bytes());
            assert_eq!(given, status, "{method} {target}: {text}");
            assert!(status == 200 || !text.is_empty(), "{method} {target}");
        }
    }

    #[test]
    fn a_key_is_the_same_however_it_is_encoded() {
        let service = service(10, 10_000);
        answer(&service, "PUT", "/metadata?key=mooncake%2Fram%2Fnode%20A%3A1%2B%C3%A4", b"{}");
        for key in
            ["mooncake/ram/node+A:1%2B%c3%a4", "mooncake%2fram%2fnode%20%41%3a1%2bä&more=1", "mooncake/ram/node%20A:1%2Bä&key=b"]
        {
            let target = format!("/metadata?x=y&key={key}");
            let target = target.replace('ä', "%C3%A4");
            assert_eq!(answer(&service, "GET", &target, b"").0, 200, "{target}");
        }
        assert_eq!(answer(&service, "GET", "/metadata?key=mooncake/ram/nodeA:1%2B%C3%A4", b"").0, 404);
        assert_eq!(service.keys(), 1);
    }

    #[test]
    fn a_key_that_is_there_is_overwritten_and_values_are_json() {
        let service = service(100, 10_000);
        for value in ["{\"ip_or_host_name\":\"a\",\"rpc_port\":1}", "{\"ip_or_host_name\":\"b\",\"rpc_port\":2}"] {
            assert_eq!(answer(&service, "PUT", "/metadata?key=mooncake/rpc_meta/a", value.as_bytes()).0, 200);
            let (status, text, answer) = answer(&service, "GET", "/metadata?key=mooncake/rpc_meta/a", b"");
            assert_eq!(
                (status, text.as_str(), &answer.headers()[CONTENT_TYPE]),
                (200, value, &"application/json".parse().unwrap())
            );
        }
    }

    #[test]
    fn what_has_no_room_is_refused_and_leaves_what_was_there() {
        let service = service(4000, 5000);
        assert_eq!(answer(&service, "PUT", "/metadata?key=a", &[b'1'; 3000]).0, 200);
        let used = service.memory.used();
        for key in ["a", "b"] {
            let (status, text, _) = answer(&service, "PUT", &format!("/metadata?key={key}"), &[b'2'; 3000]);
            assert!(status == 507 && text.contains("--max-memory"), "{status} {text}");
        }
        assert_eq!((service.memory.used(), service.keys()), (used, 1));
        assert_eq!(answer(&service, "GET", "/metadata?key=a", b"").1, "1".repeat(3000));
        assert_eq!(answer(&service, "DELETE", "/metadata?key=a", b"").0, 200);
        assert_eq!(answer(&service, "PUT", "/metadata?key=b", &[b'2'; 3000]).0, 200);
    }

    #[test]
    fn a_connection_is_kept_unless_a_body_was_left_unread() {
        let service = service(10, 10_000);
        for (method, target, body, is_closed) in [
            ("PUT", "/metadata?key=a", "0123456789", false),
            ("GET", "/metadata?key=b", "", false),
            ("GET", "/metadata?key=a", "x", true),
            ("PUT", "/metadata?key=a", "0123456789a", true),
            ("PUT", "/elsewhere", "x", true),
            ("POST", "/metadata?key=a", "x", true),
        ] {
            let (_, _, answer) = answer(&service, method, target, body.as_bytes());
            assert_eq!(answer.headers().contains_key(CONNECTION), is_closed, "{method} {target}");
        }
    }
}
