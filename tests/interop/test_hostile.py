"""Peers and strangers that misuse the ports of the engine under test. Others are served, and memory stays bounded."""

import contextlib
import os
import socket
import struct
import time

import wire
from harness import MIB, WHEEL, TestCase, better_than_upstream


class DataPort(TestCase):
    @classmethod
    def setUpClass(cls):
        cls.ours = cls.shared_engine(registered=16 * MIB)
        cls.wheel = cls.shared_engine(WHEEL, registered=MIB)
        cls.ours.write(cls.wheel.name, 0, cls.wheel.base, 1)  # so that descriptors are known and connections exist
        cls.wheel.write(cls.ours.name, 0, cls.ours.base, 1)
        cls.data_port = wire.fetch_descriptor(cls.ours.port)["tcp_data_port"]

    def setUp(self):
        self.in_use = self.ours.memory_in_use()

    def tearDown(self):
        self.assertTrue(self.ours.alive())
        self.assertMoved(self.wheel.write(self.ours.name, 0, self.ours.base, 5000))
        self.assertMoved(self.ours.write(self.wheel.name, 0, self.wheel.base, 5000))
        self.assertLess(self.ours.memory_in_use(), self.in_use + 64 * MIB)

    def test_garbage_on_the_data_port(self):
        self.ours.paint(offset=0, length=8 * MIB)
        for _ in range(50):
            with contextlib.suppress(ConnectionError), wire.dial(self.data_port) as connection:
                connection.sendall(os.urandom(1000))
                wire.drain(connection)
        self.assertUntouched(self.ours, 0, 8 * MIB)

    def test_half_a_header_then_silence(self):
        with contextlib.ExitStack() as open_connections:
            for count in range(1, 24):
                connection = open_connections.enter_context(wire.dial(self.data_port))
                connection.sendall(wire.header(wire.WRITE | wire.V2, self.ours.base, 10)[:count])
            self.assertServes(self.ours)

    def test_half_a_body_then_silence(self):
        with contextlib.ExitStack() as open_connections:
            for _ in range(20):
                connection = open_connections.enter_context(wire.dial(self.data_port))
                connection.sendall(wire.header(wire.WRITE | wire.V2, self.ours.base + MIB, MIB) + bytes(MIB // 2))
            self.assertServes(self.ours)

    def test_reader_that_never_reads(self):
        with contextlib.ExitStack() as open_connections:
            for _ in range(20):
                connection = open_connections.enter_context(wire.dial(self.data_port))
                connection.sendall(wire.header(wire.READ | wire.V2, self.ours.base, 16 * MIB) * 100)
            self.assertServes(self.ours)

    def test_flood_of_idle_connections(self):
        with contextlib.ExitStack() as open_connections:
            for _ in range(200):
                open_connections.enter_context(wire.dial(self.data_port))
            start = time.monotonic()
            for _ in range(20):
                self.assertMoved(self.wheel.write(self.ours.name, 0, self.ours.base, 5000))
            self.assertLess(time.monotonic() - start, 2)

    def test_slow_drip(self):
        """A writer of one byte every few milliseconds is served, and so is everybody else meanwhile."""
        request = wire.header(wire.WRITE | wire.V2, self.ours.base + MIB, 20) + b"one byte at a time.."
        with wire.dial(self.data_port) as connection:
            for byte in request:
                connection.sendall(bytes([byte]))
                if byte % 5 == 0:
                    self.assertServes(self.ours)
                time.sleep(0.005)
            self.assertEqual(wire.read_exactly(connection, 8), wire.OK)


class HandshakePort(TestCase):
    """Upstream serves one connection after the other, and its process ends on some documents."""

    def setUp(self):
        self.ours = self.engine(registered=MIB)

    def assertAnswersAtOnce(self):
        start = time.monotonic()
        self.assertTrue(self.ours.alive(), "the engine's process has ended")
        try:
            self.assertTrue(wire.fetch_descriptor(self.ours.port)["buffers"])
        except OSError as error:
            self.fail(f"no descriptor: {error}")
        self.assertLess(time.monotonic() - start, 1)

    @better_than_upstream
    def test_idle_connections_delay_nobody(self):
        with contextlib.ExitStack() as open_connections:
            for number in range(100):
                connection = open_connections.enter_context(wire.dial(self.ours.port))
                connection.sendall(wire.frame(wire.METADATA, {})[:number % 12])
            for _ in range(10):
                self.assertAnswersAtOnce()
            wheel = self.engine(WHEEL, registered=MIB)
            self.assertMoved(wheel.write(self.ours.name, 0, self.ours.base, 5000))

    @better_than_upstream
    def test_frames_that_are_none(self):
        """Each is dropped, or answered as upstream does, in time."""
        in_use = self.ours.memory_in_use()
        frames = [
            struct.pack("<Q", 0), struct.pack("<Q", 1 << 63), struct.pack("<Q", (1 << 64) - 1), struct.pack("<QB", 1 << 40, 1),
            struct.pack("<QB", 1, 1), wire.frame(wire.METADATA, b"{"), wire.frame(0x05, b"{}"), wire.frame(0x80, b"{}"), wire.frame(0xFE, b"{}"),
            wire.frame(wire.NOTIFY, b"[" * 50_000), wire.frame(wire.METADATA, b'{"a":' * 20_000), wire.frame(wire.NOTIFY, b"\xff\xfe"),
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        ]
        for text in frames:
            with wire.dial(self.ours.port) as connection, contextlib.suppress(ConnectionError):
                connection.sendall(text)
                connection.shutdown(socket.SHUT_WR)
                start = time.monotonic()
                wire.drain(connection)
                self.assertLess(time.monotonic() - start, 10, text[:50])
            self.assertAnswersAtOnce()
        self.assertEqual(self.ours.take_notifications(), [])
        self.assertLess(self.ours.memory_in_use(), in_use + 64 * MIB)

    @better_than_upstream
    def test_documents_of_wrong_types(self):
        for kind, text in ((wire.NOTIFY, b'{"name":{},"notify_msg":[]}'), (wire.NOTIFY, b"[]"), (wire.NOTIFY, b"3"), (wire.CONNECTION, b"[]"),
                           (wire.CONNECTION, b'{"qp_num":["x"]}'), (wire.CONNECTION, b"3"), (wire.METADATA, b"3"), (wire.PROBE, b"[]")):
            with contextlib.suppress(ConnectionError):
                wire.ask(self.ours.port, kind, text)
            self.assertAnswersAtOnce()
