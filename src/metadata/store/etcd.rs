//! etcd as the metadata server, through the gateway that takes its calls as JSON over HTTP. etcd has it from version 3.4 on.
//!
//! Keys and texts are those of upstream's client, which speaks gRPC. A text ends with a newline.
//!
//! Of several endpoints, the one that answered last is asked first; the next is asked when one does not answer, or says that it
//! cannot at present. Where there is a user, the token that stands for it is shared by all calls and fetched anew when the server does not
//! know it any more. One mutex guards it, and nothing is sent under it.
//!
//! A PUT copies its text three times, into base64 and into ureq's buffer.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use parking_lot::Mutex;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use ureq::http::Method;

use super::http::{Client, REQUEST_LIMIT, Reply, unescape};
use super::{Store, call_end, failed, text_of};
use crate::error::{Code, Error, Result};
use crate::metadata::{excerpt, write_json_string};

const DEFAULT_PORT: u16 = 2379;

/// Members of one cluster of etcd.
pub(super) struct EtcdStore {
    endpoints: Vec<Client>,
    /// Index of the endpoint to ask first.
    preferred: AtomicUsize,
    user: Option<User>,
    token: Mutex<Option<Arc<str>>>,
}

struct User {
    name: String,
    password: String,
}

/// Why an endpoint gave no answer.
enum Fault {
    /// Others may give one.
    Absent(String),
    /// Others would say the same.
    Refused(String),
}

#[derive(Deserialize)]
struct Ranged {
    #[serde(default)]
    kvs: Vec<KeyValue>,
}

#[derive(Deserialize)]
struct KeyValue {
    #[serde(default)]
    value: String,
}

#[derive(Deserialize)]
struct Authenticated {
    token: String,
}

/// What the gateway says where it says no.
#[derive(Deserialize)]
struct Complaint {
    error: String,
}

/// What any answer to a change is: an object.
#[derive(Deserialize)]
struct Changed {}

impl EtcdStore {
    /// `text` is `[user:password@]endpoint,endpoint;…`, an endpoint `[http[s]://]host[:port]`. User and password may be escaped as in URLs.
    pub(super) fn new(text: &str) -> Result<EtcdStore> {
        let (credentials, list) = match text.rsplit_once('@') {
            Some((credentials, list)) => (Some(credentials), list),
            None => (None, text),
        };
        let malformed = |reason: &str| {
            let text = format!(
                "'{}' are no endpoints of etcd, such as etcd://host:2379,host:2379 or etcd://user:password@host:2379: {reason}",
                excerpt(list)
            );
            Error::new(Code::InvalidArgument, text)
        };
        let user = match credentials.map(|credentials| credentials.split_once(':')) {
            None => None,
            Some(Some((name, password))) if !name.is_empty() && !password.starts_with("//") => {
                let decode =
                    |text| String::from_utf8(unescape(text)).map_err(|_| malformed("the user or the password is no UTF-8"));
                Some(User { name: decode(name)?, password: decode(password)? })
            }
            Some(_) => return Err(malformed("what is before the '@' is not user:password, once, before all endpoints")),
        };
        let endpoint = |text: &str| match text.contains("://") {
            true => Client::new(text.trim_end_matches('/'), Some(DEFAULT_PORT)),
            false => Client::new(&format!("http://{text}"), Some(DEFAULT_PORT)),
        };
        let endpoints = list.split([',', ';']).map(str::trim).filter(|text| !text.is_empty()).map(endpoint);
        let endpoints: Vec<Client> = endpoints.collect::<Result<_>>()?;
        if endpoints.is_empty() {
            return Err(malformed("there is none"));
        }
        Ok(EtcdStore { endpoints, preferred: AtomicUsize::new(0), user, token: Mutex::default() })
    }

    /// What an endpoint answers to a call of the gateway; `name` and `key` are for texts.
    fn call<T: DeserializeOwned>(&self, name: &str, key: &str, path: &str, body: &[&[u8]]) -> Result<T> {
        let call_end = call_end();
        let preferred = self.preferred.load(Ordering::Relaxed);
        let mut reasons = Vec::new();
        for attempt in 1..=self.endpoints.len() {
            let index = (preferred + attempt - 1) % self.endpoints.len();
            let endpoint = &self.endpoints[index];
            // Those that are left need time as well.
            let limit = if attempt == self.endpoints.len() { REQUEST_LIMIT } else { REQUEST_LIMIT / 2 };
            let reason = match self.ask(endpoint, path, body, call_end.min(Instant::now() + limit)) {
                Ok(answer) => {
                    self.preferred.store(index, Ordering::Relaxed);
                    return Ok(answer);
                }
                Err(Fault::Refused(reason)) => return Err(failed(name, key, endpoint.shown(), reason)),
                Err(Fault::Absent(reason)) => reason,
            };
            reasons.push(if self.endpoints.len() > 1 { format!("{}: {reason}", endpoint.shown()) } else { reason });
        }
        let shown: Vec<&str> = self.endpoints.iter().map(Client::shown).collect();
        Err(failed(name, key, &shown.join(","), reasons.join("; ")))
    }

    fn ask<T: DeserializeOwned>(
        &self,
        endpoint: &Client,
        path: &str,
        body: &[&[u8]],
        end: Instant,
    ) -> std::result::Result<T, Fault> {
        let Some(user) = &self.user else {
            return read(post(endpoint, path, None, body, end)?);
        };
        // Bound first: nothing may be sent under the lock.
        let known = self.token.lock().clone();
        let token = match known {
            Some(token) => {
                let reply = post(endpoint, path, Some(&token), body, end)?;
                if !is_token_unknown(&reply) {
                    return read(reply);
                }
                self.authenticate(endpoint, user, end)?
            }
            None => self.authenticate(endpoint, user, end)?,
        };
        read(post(endpoint, path, Some(&token), body, end)?)
    }

    fn authenticate(&self, endpoint: &Client, user: &User, end: Instant) -> std::result::Result<Arc<str>, Fault> {
        let mut body = String::from("{\"name\":");
        write_json_string(&user.name, &mut body);
        body.push_str(",\"password\":");
        write_json_string(&user.password, &mut body);
        body.push('}');
        let reply = post(endpoint, "/v3/auth/authenticate", None, &[body.as_bytes()], end)?;
        let Authenticated { token } = read(reply)?;
        let token: Arc<str> = token.into();
        *self.token.lock() = Some(token.clone());
        Ok(token)
    }
}

fn post(endpoint: &Client, path: &str, token: Option<&str>, body: &[&[u8]], end: Instant) -> std::result::Result<Reply, Fault> {
    let mut headers = vec![("Content-Type", "application/json")];
    headers.extend(token.map(|token| ("Authorization", token)));
    endpoint.exchange(Method::POST, path, &headers, Some(body), end).map_err(Fault::Absent)
}

/// The server has forgotten the token: it was restarted, or five minutes have passed.
fn is_token_unknown(reply: &Reply) -> bool {
    reply.status == 401 || (reply.status != 200 && String::from_utf8_lossy(&reply.body).contains("invalid auth token"))
}

fn read<T: DeserializeOwned>(reply: Reply) -> std::result::Result<T, Fault> {
    match reply.status {
        200 => serde_json::from_slice(&reply.body).map_err(|error| {
            let said = excerpt(&String::from_utf8_lossy(&reply.body[..reply.body.len().min(1000)]));
            Fault::Absent(format!("it answered '{said}', which is not etcd's: {error}"))
        }),
        status => {
            let said = match serde_json::from_slice::<Complaint>(&reply.body) {
                Ok(Complaint { error }) => format!("it answered with status {status}: {}", excerpt(&error)),
                Err(_) => reply.complaint(),
            };
            let advice = if status == 404 {
                "; etcd has /v3 from version 3.4 on"
            } else if said.contains("too large") || said.contains("larger than max") {
                "; etcd takes 1.5 MiB unless it is started with a larger --max-request-bytes"
            } else if said.contains("user name is empty") || said.contains("permission denied") {
                "; give a user that may read and write the keys: etcd://user:password@host:2379"
            } else {
                ""
            };
            match status {
                404 | 500.. => Err(Fault::Absent(said + advice)),
                _ => Err(Fault::Refused(said + advice)),
            }
        }
    }
}

/// The JSON that names a key.
fn request(key: &str) -> String {
    format!("{{\"key\":\"{}\"}}", BASE64_STANDARD.encode(key))
}

impl Store for EtcdStore {
    fn get(&self, key: &str) -> Result<Option<String>> {
        let Ranged { kvs } = self.call("range", key, "/v3/kv/range", &[request(key).as_bytes()])?;
        let Some(KeyValue { value }) = kvs.into_iter().next() else { return Ok(None) };
        let bytes = BASE64_STANDARD.decode(value).map_err(|error| error.to_string());
        let text = bytes.and_then(text_of);
        text.map(Some).map_err(|reason| {
            let shown: Vec<&str> = self.endpoints.iter().map(Client::shown).collect();
            failed("range", key, &shown.join(","), reason)
        })
    }

    fn put(&self, key: &str, text: &[Arc<str>]) -> Result<()> {
        let head = format!("{{\"key\":\"{}\",\"value\":\"", BASE64_STANDARD.encode(key));
        let value = BASE64_STANDARD.encode(text.concat());
        let Changed {} = self.call("put", key, "/v3/kv/put", &[head.as_bytes(), value.as_bytes(), b"\"}"])?;
        Ok(())
    }

    fn remove(&self, key: &str) -> Result<()> {
        let Changed {} = self.call("deleterange", key, "/v3/kv/deleterange", &[request(key).as_bytes()])?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::net::TcpStream;
    use std::time::Duration;

    use super::super::stub::{Request, Stub, http_stub, misbehave, pieces, reset, unreachable};
    use super::*;

    fn store(stub: &Stub) -> EtcdStore {
        EtcdStore::new(&stub.address.to_string()).unwrap()
    }

    /// A gateway with texts by key.
    fn gateway() -> impl Fn(Request) -> (u16, String) + Send + Sync + 'static {
        let texts = Mutex::new(HashMap::new());
        move |request| {
            assert_eq!(request.method, "POST");
            let body: serde_json::Value = serde_json::from_str(&request.body).unwrap();
            let field = |name: &str| body[name].as_str().unwrap().to_string();
            let mut texts = texts.lock();
            let answer = match request.target.as_str() {
                "/v3/kv/put" => texts.insert(field("key"), field("value")).map(|_| String::new()).unwrap_or_default(),
                "/v3/kv/range" => match texts.get(&field("key")) {
                    Some(text) => format!(
                        ",\"kvs\":[{{\"key\":\"{}\",\"version\":\"1\",\"value\":\"{text}\"}}],\"count\":\"1\"",
                        field("key")
                    ),
                    None => String::new(),
                },
                "/v3/kv/deleterange" => texts.remove(&field("key")).map(|_| ",\"deleted\":\"1\"".into()).unwrap_or_default(),
                _ => return (404, "404 page not found".into()),
            };
            (200, format!("{{\"header\":{{\"cluster_id\":\"1\"}}{answer}}}"))
        }
    }

    #[test]
    fn texts_are_written_read_and_removed() {
        let stub = http_stub(gateway());
        let store = store(&stub);
        let key = "mooncake/ram/nodeA:12345";
        assert_eq!(store.get(key).unwrap(), None);
        store.put(key, &pieces(&["{\"a\":", "", "1}\n"])).unwrap();
        assert_eq!(store.get(key).unwrap().unwrap(), "{\"a\":1}\n");
        store.remove(key).unwrap();
        store.remove(key).unwrap();
        assert_eq!(store.get(key).unwrap(), None);
        let long: Vec<Arc<str>> = (0..1000).map(|number| format!("{number:>4000}").into()).collect();
        store.put(key, &long).unwrap();
        assert_eq!(store.get(key).unwrap().unwrap(), long.concat());
        assert_eq!(stub.connections(), 1);
    }

    #[test]
    fn keys_and_texts_are_in_base64() {
        let requests = Arc::new(Mutex::new(Vec::new()));
        let seen = requests.clone();
        let stub = http_stub(move |request| {
            seen.lock().push(format!("{} {}", request.target, request.body));
            (200, "{}".into())
        });
        let store = store(&stub);
        store.put("ä", &pieces(&["ab", "c\n"])).unwrap();
        store.get("ä").unwrap();
        store.remove("ä").unwrap();
        assert_eq!(
            *requests.lock(),
            [
                "/v3/kv/put {\"key\":\"w6Q=\",\"value\":\"YWJjCg==\"}",
                "/v3/kv/range {\"key\":\"w6Q=\"}",
                "/v3/kv/deleterange {\"key\":\"w6Q=\"}",
            ]
        );
    }

    #[test]
    fn refusals_say_what_to_do() {
        for (status, said, advice) in [
            (400, "etcdserver: request is too large", "--max-request-bytes"),
            (429, "grpc: received message larger than max (4 vs. 2)", "--max-request-bytes"),
            (400, "etcdserver: user name is empty", "etcd://user:password@"),
            (403, "etcdserver: permission denied", "etcd://user:password@"),
            (404, "404 page not found", "version 3.4"),
        ] {
            let stub = http_stub(move |_| (status, format!("{{\"error\":\"{said}\",\"code\":3}}")));
            let error = store(&stub).put("key", &pieces(&["{}\n"])).unwrap_err();
            assert_eq!(error.code(), Code::Metadata);
            assert!(error.message().contains(said) && error.message().contains(advice), "{error}");
        }
    }

    #[test]
    fn a_user_gets_a_token_and_a_new_one_when_it_is_forgotten() {
        let (requests, valid) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(0)));
        let (seen, current) = (requests.clone(), valid.clone());
        let stub = http_stub(move |request| {
            seen.lock().push(request.target.clone());
            if request.target == "/v3/auth/authenticate" {
                assert_eq!(request.body, "{\"name\":\"me\",\"password\":\"my \\\"secret@\"}");
                *current.lock() += 1;
                return (200, format!("{{\"token\":\"t.{}\"}}", current.lock()));
            }
            match request.head.contains(&format!("authorization: t.{}\r\n", current.lock())) {
                true => (200, "{}".into()),
                false => (401, "{\"error\":\"etcdserver: invalid auth token\",\"code\":16}".into()),
            }
        });
        let store = EtcdStore::new(&format!("me:my%20\"secret%40@{}", stub.address)).unwrap();
        let authenticate = "/v3/auth/authenticate";
        store.put("key", &pieces(&["{}\n"])).unwrap();
        store.remove("key").unwrap();
        assert_eq!(std::mem::take(&mut *requests.lock()), [authenticate, "/v3/kv/put", "/v3/kv/deleterange"]);
        *valid.lock() += 1;
        store.remove("key").unwrap();
        assert_eq!(*requests.lock(), ["/v3/kv/deleterange", authenticate, "/v3/kv/deleterange"]);
    }

    #[test]
    fn a_refused_password_is_not_tried_elsewhere_and_not_shown() {
        let stub = http_stub(|_| (400, "{\"error\":\"etcdserver: authentication failed, invalid user ID or password\"}".into()));
        let store = EtcdStore::new(&format!("me:secret@{0},{0}", stub.address)).unwrap();
        let error = store.get("key").unwrap_err();
        assert!(error.message().contains("authentication failed") && !error.message().contains("secret"), "{error}");
        assert_eq!(stub.connections(), 1);
    }

    #[test]
    fn the_next_endpoint_is_asked_when_one_fails_and_first_from_then_on() {
        let (nowhere, _waiting) = unreachable();
        let drops = Stub::new(|stream, _| reset(stream));
        let silent = Stub::new(|stream, _| super::super::stub::hold(stream));
        let no_leader = http_stub(|_| (503, "{\"error\":\"etcdserver: no leader\",\"code\":14}".into()));
        let garbage = http_stub(|_| (200, "<html>".into()));
        let good = http_stub(gateway());
        for bad in [nowhere, drops.address, silent.address, no_leader.address, garbage.address] {
            let store = EtcdStore::new(&format!("{bad};{}", good.address)).unwrap();
            store.put("key", &pieces(&["{}\n"])).unwrap();
            assert_eq!(store.preferred.load(Ordering::Relaxed), 1);
            assert_eq!(store.get("key").unwrap().unwrap(), "{}\n");
        }
        let asked = garbage.connections();
        let error = EtcdStore::new(&format!("{},{}", no_leader.address, garbage.address)).unwrap().get("key").unwrap_err();
        assert!(error.message().contains("no leader") && error.message().contains("<html>"), "{error}");
        assert_eq!(garbage.connections(), asked + 1);
    }

    /// Were there no deadline, this would not end.
    #[test]
    fn calls_end_whatever_the_endpoints_do() {
        let ignores = Stub::new(misbehave);
        let dribbles = Stub::new(|mut stream: TcpStream, _| {
            use std::io::Write;
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n");
            while stream.write_all(b" ").is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let (nowhere, _waiting) = unreachable();
        let list = format!("{0},{0},{0},{1},{2}", ignores.address, dribbles.address, nowhere);
        let started = Instant::now();
        assert_eq!(EtcdStore::new(&list).unwrap().get("key").unwrap_err().code(), Code::Metadata);
        assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
    }

    #[test]
    fn endpoints_are_read_and_what_is_none_is_refused() {
        let store = EtcdStore::new("h1, h2:1;http://h3:2/ ,,[::1]:3").unwrap();
        let shown: Vec<&str> = store.endpoints.iter().map(Client::shown).collect();
        assert_eq!(shown, ["http://h1:2379", "http://h2:1", "http://h3:2", "http://[::1]:3"]);
        for text in
            [",;", "@h", "me@h", ":secret@h", "http://me:secret@h", "me:secret@", "h:port", "h:99999", "a b", "ftp://h", "::1"]
        {
            let error = EtcdStore::new(text).err().unwrap_or_else(|| panic!("{text}"));
            assert_eq!(error.code(), Code::InvalidArgument, "{text}");
            assert!(!error.message().contains("secret"), "{error}");
        }
        if !cfg!(feature = "tls") {
            assert_eq!(EtcdStore::new("https://h:2379").err().unwrap().code(), Code::NotImplemented);
        }
    }
}
