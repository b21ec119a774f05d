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
use super::{CALL_LIMIT, Store, failed, text_of};
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
        let call_end = Instant::now() + CALL_LIMIT;
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
        404 => Err(Fault::Absent(format!("{}; etcd has /v3 from version 3.4 on", reply.complaint()))),
        500.. => Err(Fault::Absent(reply.complaint())),
        _ => {
            let complaint = reply.complaint();
            let said = String::from_utf8_lossy(&reply.body);
            let advice = if said.contains("too large") || said.contains("larger than max") {
                "; etcd takes 1.5 MiB unless it is started with a larger --max-request-bytes"
            } else if said.contains("user name is empty") || said.contains("permission denied") {
                "; give a user that may read and write the keys: etcd://user:password@host:2379"
            } else {
                ""
            };
            Err(Fault::Refused(complaint + advice))
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
