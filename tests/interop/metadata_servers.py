"""Metadata servers: those that the tests start, and one in this process that does what a test wants.

Each has `uri`, as an engine is given it, and `environment`, what an engine needs besides; `get`, `put` and `remove`, which go past
all engines; and `kill` and `start`, with the same port. `fetch` reads a key of whatever server a URI names.
"""

import base64
import contextlib
import hashlib
import http.client
import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from urllib.parse import quote, unquote, urlsplit

PATIENCE = 30  # seconds until a server that does not start, or does not answer, fails the test


def escape(key):
    """A key as libcurl escapes it."""
    return quote(key, safe="-._~")


class Http:
    """A client of the HTTP metadata service: one connection for each request."""

    def __init__(self, uri):
        self.address, self.path = urlsplit(uri).netloc, urlsplit(uri).path

    def ask(self, method, key, body=None):
        """(status, body)"""
        return self.send(method, f"{self.path}?key={escape(key)}", body)

    def send(self, method, target, body=None, headers={}):
        connection = http.client.HTTPConnection(self.address, timeout=PATIENCE)
        with contextlib.closing(connection):
            connection.request(method, target, body, headers)
            response = connection.getresponse()
            return response.status, response.read()

    def get(self, key):
        status, body = self.ask("GET", key)
        if status not in (200, 404):
            raise AssertionError(f"GET of {key}: {status} {body}")
        return body if status == 200 else None

    def put(self, key, body):
        status, answer = self.ask("PUT", key, body)
        if status != 200:
            raise AssertionError(f"PUT of {key}: {status} {answer}")

    def remove(self, key):
        self.ask("DELETE", key)


class Redis:
    """A client of redis: one connection for each request."""

    def __init__(self, address, database=0, user="", password=""):
        self.host, self.port = address.rsplit(":", 1)
        self.prelude = [["AUTH", *([user] if user else []), password]] if password else []
        self.prelude += [["SELECT", str(database)]] if database else []

    def ask(self, *words):
        with socket.create_connection((self.host, int(self.port)), PATIENCE) as connection, connection.makefile("rb") as reader:
            for command in [*self.prelude, words]:
                parts = [word if isinstance(word, bytes) else word.encode() for word in command]
                connection.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts))
                reply = self._read(reader)
        return reply

    def _read(self, reader):
        line = reader.readline().rstrip(b"\r\n")
        if line[:1] == b"$":
            length = int(line[1:])
            return None if length < 0 else reader.read(length + 2)[:-2]
        if line[:1] == b"-" or not line:
            raise AssertionError(f"redis says {line}")
        return line[1:]

    def get(self, key):
        return self.ask("GET", key)

    def put(self, key, text):
        self.ask("SET", key, text)

    def remove(self, key):
        self.ask("DEL", key)


class Etcd:
    """A client of etcd's JSON gateway."""

    def __init__(self, address, user="", password=""):
        self.http = Http(f"http://{address}")
        self.headers = {}
        if user:
            self.headers = {"Authorization": self.ask("auth/authenticate", name=user, password=password)["token"]}

    def ask(self, path, **document):
        status, body = self.http.send("POST", f"/v3/{path}", json.dumps(document), self.headers)
        if status != 200:
            raise AssertionError(f"etcd answers {path} with {status} {body}")
        return json.loads(body)

    def get(self, key):
        found = self.ask("kv/range", key=self._encode(key.encode())).get("kvs")
        return base64.b64decode(found[0]["value"]) if found else None

    def put(self, key, text):
        self.ask("kv/put", key=self._encode(key.encode()), value=self._encode(text))

    def remove(self, key):
        self.ask("kv/deleterange", key=self._encode(key.encode()))

    def _encode(self, octets):
        return base64.b64encode(octets).decode()


def fetch(uri, key):
    """The text under a key of a server without passwords, or None."""
    scheme, _, address = uri.partition("://")
    client = Http(uri) if scheme == "http" else Redis(address) if scheme == "redis" else Etcd(address)
    return client.get(key)


class Server:
    """A server process on a port of its own on loopback, with a directory of its own. Ends with `close`."""

    newline = b""  # what ends a text on this server
    environment = {}

    def __init__(self):
        self.directory = tempfile.mkdtemp(prefix="server-")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.process = None
        self.prepare()
        self.start()

    def prepare(self):
        """Before the first start."""

    def start(self):
        """Starts it, and returns when it answers."""
        with open(os.path.join(self.directory, "log"), "ab") as log:
            self.process = subprocess.Popen(self.command(), cwd=self.directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                            preexec_fn=die_with_parent)
        end = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException, AssertionError):
                self.check()
                return
            if self.process.poll() is not None or time.monotonic() > end:
                self.kill()
                with open(os.path.join(self.directory, "log"), errors="replace") as log:
                    raise AssertionError(f"{self.command()[0]} does not start: {log.read()[-2000:]}")
            time.sleep(0.02)

    def check(self):
        """Fails as long as the server does not answer."""
        self.get("nothing")

    def kill(self):
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(10)

    def close(self):
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def get(self, key):
        return self.client().get(key)

    def put(self, key, text):
        self.client().put(key, text)

    def remove(self, key):
        self.client().remove(key)


def die_with_parent():
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


class HttpServer(Server):
    @property
    def uri(self):
        return f"http://127.0.0.1:{self.port}/metadata"

    def client(self):
        return Http(self.uri)


class RedisServer(Server):
    newline = b"\n"
    database, user, password = 0, "", ""

    @property
    def uri(self):
        return f"redis://127.0.0.1:{self.port}"

    def command(self):
        return ["redis-server", "--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no", "--dir",
                self.directory]

    def client(self):
        return Redis(f"127.0.0.1:{self.port}", self.database, self.user, self.password)

    def count_puts(self):
        lines = self.client().ask("INFO", "commandstats").decode().splitlines()
        return next((int(line.split("calls=")[1].split(",")[0]) for line in lines if line.startswith("cmdstat_set:")), 0)


class RedisWithPassword(RedisServer):
    """Keys are in database 3 and open to one user. What everybody else gets is in the way: another database, no right to anything."""

    database, user, password = 3, "mooncake", "pass word"
    environment = {"MC_REDIS_DB_INDEX": "3", "MC_REDIS_USERNAME": "mooncake", "MC_REDIS_PASSWORD": "pass word"}

    def prepare(self):
        with open(os.path.join(self.directory, "users"), "w") as file:
            digest = hashlib.sha256(self.password.encode()).hexdigest()
            file.write(f"user default off\nuser {self.user} on #{digest} ~* &* +@all\n")

    def command(self):
        return [*super().command(), "--aclfile", os.path.join(self.directory, "users")]


class EtcdServer(Server):
    """Keeps its data over a restart."""

    newline = b"\n"

    def prepare(self):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.peer_port = listener.getsockname()[1]

    @property
    def uri(self):
        return f"etcd://127.0.0.1:{self.port}"

    def command(self):
        own, peers = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self.peer_port}"
        return ["etcd", "--data-dir", os.path.join(self.directory, "data"), "--listen-client-urls", own, "--advertise-client-urls", own,
                "--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}",
                "--log-level", "warn"]

    def client(self):
        return Etcd(f"127.0.0.1:{self.port}")

    def count_puts(self):
        _, text = Http(f"http://127.0.0.1:{self.port}").send("GET", "/metrics")
        name = "etcd_debugging_mvcc_put_total "
        return next(int(float(line[len(name):])) for line in text.decode().splitlines() if line.startswith(name))


class EtcdWithPassword(EtcdServer):
    """Open to one user only."""

    user, password = "moon cake", "pass@word/:%"

    def prepare(self):
        super().prepare()
        self.is_locked = False

    @property
    def uri(self):
        return f"etcd://{escape(self.user)}:{escape(self.password)}@127.0.0.1:{self.port}"

    def check(self):
        if not self.is_locked:
            server = Etcd(f"127.0.0.1:{self.port}")
            for user in (self.user, "root"):
                server.ask("auth/user/add", name=user, password=self.password)
                server.ask("auth/user/grant", user=user, role="root")
            server.ask("auth/enable")
            self.is_locked = True
        super().check()

    def client(self):
        return Etcd(f"127.0.0.1:{self.port}", self.user, self.password)


class PythonServer(HttpServer):
    """The HTTP server of upstream's package: refuses to write a key that contains rpc_meta and is there."""

    def command(self):
        return [sys.executable, "-m", "mooncake.http_metadata_server", "--host", "127.0.0.1", "--port", str(self.port),
                "--log-level", "ERROR"]


class OwnServer(HttpServer):
    """`te metadata-server`."""

    def command(self):
        return [os.environ["TE_PROGRAM"], "metadata-server", "--listen", f"127.0.0.1:{self.port}"]

    def count_puts(self):
        _, text = Http(self.uri).send("GET", "/metrics")
        start = 'te_metadata_requests_total{method="PUT"'
        return sum(int(line.rsplit(" ", 1)[1]) for line in text.decode().splitlines() if line.startswith(start))


class Relay:
    """Passes on what is said to an HTTP server, and counts the PUTs."""

    environment = {}

    def __init__(self, port):
        self.target, self.puts, self.lock = port, 0, threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self.listener.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}/metadata"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                server = socket.create_connection(("127.0.0.1", self.target))
                for ends in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source, sink, counts):
        start = b"PUT /metadata?"
        tail = b""
        with contextlib.suppress(OSError):
            while part := source.recv(1 << 18):
                if counts:
                    with self.lock:
                        self.puts += (tail + part).count(start)
                    tail = (tail + part)[-(len(start) - 1):]
                sink.sendall(part)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def count_puts(self):
        with self.lock:
            return self.puts

    def close(self):
        self.listener.close()


class Stub:
    """An HTTP server in this process. Keys are the escaped text as it comes: whoever escapes otherwise does not find them. A key that
    contains rpc_meta may be written again with the same body only. Both as the server in upstream's master has it.

    `requests` has (method, target, body) of each request. `interfere`, if there is one, is called with the method and the key before
    a request is answered: it may take its time, and return "drop" to close the connection, "drop late" to do so when all is done, or a
    status to answer without doing anything.
    """

    newline = b""
    environment = {}

    def __init__(self):
        self.texts, self.requests, self.lock, self.interfere = {}, [], threading.Lock(), None
        stub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            wbufsize = -1

            def answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                key = self.path.partition("?key=")[2]
                # What a test itself asks, by another path, is never disturbed.
                fault = stub.interfere(self.command, key) if stub.interfere and self.path.startswith("/metadata?") else None
                if fault == "drop":
                    return self.drop()
                status, text = (fault, b"as told") if isinstance(fault, int) else stub.answer(self.command, self.path, key, body)
                if fault == "drop late":
                    return self.drop()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_PUT = do_DELETE = answer

            def drop(self):
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)

            def log_message(self, *_):
                pass

        class Listener(http.server.ThreadingHTTPServer):
            request_queue_size = 128
            daemon_threads = True

            def handle_error(self, *_):
                pass  # a client that is gone

        self.server = Listener(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self.server.server_address[1]}/metadata"
        self.undisturbed = f"http://127.0.0.1:{self.server.server_address[1]}/undisturbed"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, method, target, key, body):
        with self.lock:
            self.requests.append((method, target, body))
            if not key:
                return 400, b"no key"
            if method == "PUT":
                if "rpc_meta" in key and self.texts.get(key, body) != body:
                    return 400, b"there is another one"
                self.texts[key] = body
                return 200, b""
            if key not in self.texts:
                return 404, b"no such key"
            return 200, self.texts.pop(key) if method == "DELETE" else self.texts[key]

    def count_puts(self):
        with self.lock:
            return sum(method == "PUT" for method, _, _ in self.requests)

    def get(self, key):
        return Http(self.undisturbed).get(key)

    def put(self, key, text):
        Http(self.undisturbed).put(key, text)

    def remove(self, key):
        Http(self.undisturbed).remove(key)

    def close(self):
        self.server.shutdown()
        self.server.server_close()
