"""The two wire protocols, spoken with plain sockets: the handshake channel (frames of JSON) and the TCP data channel.

`FakePeer` is a peer that does what a test wants; `HandshakeProxy` gives an engine a name that survives its process.
"""

import contextlib
import json
import socket
import struct
import threading
import time

CONNECTION, METADATA, NOTIFY, PROBE = range(4)
READ, WRITE, V2 = 0, 1, 0x80
HEADER_LENGTH = 24
OK = struct.pack("<Q", 0x4D43545600000000)
REJECTED = struct.pack("<Q", 0x4D43545600000001)
PATIENCE = 20  # seconds that a read waits before the test fails


def header(opcode, address, size, padding=bytes(7)):
    """The 24 bytes that open a request on the data channel."""
    return struct.pack("<QQB", size, address, opcode) + padding


def parse_header(text):
    size, address, opcode = struct.unpack("<QQB", text[:17])
    return opcode, address, size


def read_exactly(connection, count):
    """`count` bytes, or fewer if the connection ends before."""
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            break
        parts += part
    return bytes(parts)


def frame(kind, document):
    """A handshake frame. `document` is JSON text, or something to turn into it the way upstream does."""
    if not isinstance(document, bytes):
        document = json.dumps(document, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    return struct.pack("<QB", len(document) + 1, kind) + document


def read_frame(connection):
    """(type, JSON text) of the next frame, or None if the connection ends."""
    start = read_exactly(connection, 8)
    if len(start) < 8:
        return None
    (length,) = struct.unpack("<Q", start)
    payload = read_exactly(connection, length)
    return (payload[0], payload[1:]) if len(payload) == length else None


def dial(port, host="127.0.0.1"):
    connection = socket.create_connection((host, port), PATIENCE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def ask(port, kind, document):
    """One handshake exchange. Returns the JSON text of the reply, or None if there was none."""
    with dial(port) as connection:
        connection.sendall(frame(kind, document))
        reply = read_frame(connection)
        return reply[1] if reply else None


def fetch_descriptor(port):
    return json.loads(ask(port, METADATA, {"buffers": []}))


def drain(connection):
    """Everything until the connection ends, and how it ended: "closed" or "reset"."""
    received = bytearray()
    while True:
        try:
            part = connection.recv(1 << 20)
        except ConnectionResetError:
            return bytes(received), "reset"
        if not part:
            return bytes(received), "closed"
        received += part


def reset(connection):
    """Ends a connection with RST."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


class Listener:
    """A listening socket on loopback; a thread for each connection. Connections end with the listener."""

    def __init__(self, handle, host="127.0.0.1"):
        self.socket = socket.create_server((host, 0))
        self.port = self.socket.getsockname()[1]
        self.handle = handle
        self.connections = []
        self.accepted = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.accepted += 1
            self.connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with contextlib.suppress(OSError):
            self.handle(connection)
        with contextlib.suppress(OSError):
            connection.close()

    def end_connections(self):
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self):
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self.end_connections()


class FakePeer:
    """A peer with `size` bytes of memory at `base`. Serves requests as upstream does unless `interfere` takes them over.

    version            tcp_proto_version of the descriptor; None leaves it out, as peers that speak v1 alone do
    once               closes the data connection after one request, as the oldest peers do
    interfere          called as interfere(peer, connection, header) before a request is served; True: it has been dealt with, and
                       the connection is closed
    requests           (header, body) of each request, in order of arrival
    """

    base = 0x7000_0000_0000

    def __init__(self, size=1 << 20, version=2, once=False, interfere=None, data_host=None):
        self.memory = bytearray(size)
        self.version, self.once, self.interfere, self.data_host = version, once, interfere, data_host
        self.requests = []
        self.notifications = []
        self.descriptors_served = 0
        self.endings = []
        self.data = Listener(self._serve_data, data_host or "127.0.0.1")
        self.handshake = Listener(self._serve_handshake)
        self.port = self.handshake.port
        self.name = f"127.0.0.1:{self.port}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.handshake.close()
        self.data.close()

    def move_data_port(self):
        """What a restart of the peer looks like from outside: its connections end, and its data port is another."""
        self.data.close()
        self.data = Listener(self._serve_data, self.data_host or "127.0.0.1")

    def descriptor(self):
        document = {
            "buffers": [{"addr": self.base, "length": len(self.memory), "name": self.name}], "name": self.name, "protocol": "tcp",
            "tcp_data_port": self.data.port, "timestamp": "2026-01-02 03:04:05.678901",
        }
        if self.version is not None:
            document["tcp_proto_version"] = self.version
        if self.data_host is not None:
            document["tcp_data_host"] = self.data_host
        return document

    def _serve_handshake(self, connection):
        request = read_frame(connection)
        if request is None:
            return
        kind, text = request
        if kind == METADATA:
            self.descriptors_served += 1
            reply = self.descriptor()
        elif kind == NOTIFY:
            message = json.loads(text)
            self.notifications.append((message["name"], message["notify_msg"]))
            reply = {"name": "", "notify_msg": "success"}
        else:
            reply = {"status": "success"}
        connection.sendall(frame(kind, reply))

    def _serve_data(self, connection):
        while True:
            start = read_exactly(connection, HEADER_LENGTH)
            if len(start) < HEADER_LENGTH:
                self.endings.append(start)
                return
            if self.interfere and self.interfere(self, connection, start):
                self.requests.append((start, None))
                return
            opcode, address, size = parse_header(start)
            offset = address - self.base
            if size == 0 or offset < 0 or offset + size > len(self.memory):
                if opcode & V2:
                    connection.sendall(REJECTED)
                self.requests.append((start, None))
                return
            if opcode & 0x7F == WRITE:
                body = read_exactly(connection, size)
                self.memory[offset:offset + len(body)] = body
                self.requests.append((start, body))
                if len(body) < size:
                    return
                if opcode & V2:
                    connection.sendall(OK)
            else:
                self.requests.append((start, b""))
                connection.sendall((OK if opcode & V2 else b"") + bytes(self.memory[offset:offset + size]))
            if self.once:
                return


class HandshakeProxy:
    """A handshake address that stands for whichever engine `target` names: engines cannot choose their port, so this is how a test
    restarts one under the same name. Descriptors that pass through are given the proxy's name."""

    def __init__(self, target=None):
        self.target = target
        self.listener = Listener(self._serve)
        self.port = self.listener.port
        self.name = f"127.0.0.1:{self.port}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.listener.close()

    def _serve(self, connection):
        request = read_frame(connection)
        if request is None or self.target is None:
            return
        kind, text = request
        reply = ask(self.target, kind, text)
        if reply is None:
            return
        if kind == METADATA:
            document = json.loads(reply)
            document["name"] = self.name
            for buffer in document["buffers"]:
                buffer["name"] = self.name
            reply = document
        connection.sendall(frame(kind, reply))


def wait_until(condition, seconds=PATIENCE, step=0.01):
    """Whether `condition()` became true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(step)
    return True
