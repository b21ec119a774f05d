"""Version 1 of the data protocol, which old peers speak: a request is a header, a body or payload follows, and nothing is acknowledged."""

import socket
import time

import wire
from engine import READ, WRITE
from harness import MIB, WHEEL, TestCase, better_than_upstream, checks_itself

# What upstream sends, recorded: 10 bytes, and 1 MiB, at FakePeer.base.
WRITE_10 = bytes.fromhex("0a00000000000000 0000000000700000 01 00000000000000")
READ_10 = bytes.fromhex("0a00000000000000 0000000000700000 00 00000000000000")
WRITE_MIB = bytes.fromhex("0000100000000000 0000000000700000 01 00000000000000")


class Server(TestCase):
    """A client of old, by plain sockets, against ours."""

    @classmethod
    def setUpClass(cls):
        cls.ours = cls.shared_engine(registered=16 * MIB)
        cls.port = wire.fetch_descriptor(cls.ours.port)["tcp_data_port"]

    def setUp(self):
        self.connection = wire.dial(self.port)
        self.addCleanup(self.connection.close)
        self.ours.paint(offset=0, length=MIB)

    def expect(self, data):
        self.assertEqual(wire.read_exactly(self.connection, len(data)), data)

    def test_write_then_read(self):
        base = self.ours.base
        self.connection.sendall(wire.header(WRITE, base + 3, 10) + b"0123456789" + wire.header(READ, base + 3, 10))
        self.expect(b"0123456789")
        self.connection.sendall(wire.header(READ, base + 2, 12))
        self.expect(b"\xa50123456789\xa5")

    def test_large_write_and_read(self):
        body = bytes(range(256)) * 20000
        self.connection.sendall(wire.header(WRITE, self.ours.base + 7, len(body)) + body)
        self.connection.sendall(wire.header(READ, self.ours.base + 7, len(body)))
        self.expect(body)

    def test_nothing_is_said_about_a_write(self):
        self.connection.sendall(wire.header(WRITE, self.ours.base, 4) + b"abcd")
        self.connection.settimeout(0.3)
        with self.assertRaises(TimeoutError):
            self.connection.recv(1)
        self.assertEqual(self.ours.peek(3), b"d")

    def test_both_versions_on_one_connection(self):
        base = self.ours.base
        self.connection.sendall(
            wire.header(WRITE, base, 4) + b"wxyz" + wire.header(READ, base, 4) + wire.header(WRITE | wire.V2, base + 4, 4) + b"1234"
            + wire.header(READ, base + 4, 4) + wire.header(READ | wire.V2, base, 8))
        self.expect(b"wxyz" + wire.OK + b"1234" + wire.OK + b"wxyz1234")

    def test_requests_are_served_one_after_the_other(self):
        """As upstream does: a read is answered with what was there before a write that was sent behind it."""
        base = self.ours.base
        for version in (0, wire.V2):
            ok = wire.OK if version else b""
            self.connection.sendall(wire.header(WRITE | version, base, 4) + b"old." + wire.header(READ | version, base, 4)
                                    + wire.header(WRITE | version, base, 4) + b"new." + wire.header(READ | version, base, 4))
            self.expect(ok + ok + b"old." + ok + ok + b"new.")
        self.ours.paint(offset=0, length=16 * MIB - 64)
        self.connection.sendall(wire.header(READ | wire.V2, base, 12 * MIB) + wire.header(WRITE | wire.V2, base + 12 * MIB - 4, 4) + b"late")
        time.sleep(0.2)  # so long that the payload fills every buffer on the way
        self.expect(wire.OK + b"\xa5" * (12 * MIB) + wire.OK)

    def test_padding_is_ignored(self):
        base = self.ours.base
        self.connection.sendall(wire.header(WRITE, base, 4, b"garbage") + b"wxyz" + wire.header(READ | wire.V2, base, 4, b"\xff" * 7))
        self.expect(wire.OK + b"wxyz")

    def test_dripped_byte_by_byte(self):
        request = wire.header(WRITE, self.ours.base, 4) + b"drip" + wire.header(READ, self.ours.base, 4)
        for byte in request:
            self.connection.sendall(bytes([byte]))
            time.sleep(0.002)
        self.expect(b"drip")

    def test_requests_cut_anywhere(self):
        count = 40
        requests = b"".join(wire.header(WRITE | wire.V2, self.ours.base + i * 9, 9) + bytes([i]) * 9 for i in range(count))
        requests += b"".join(wire.header(READ, self.ours.base + i * 9, 9) for i in range(count))
        for start in range(0, len(requests), 7):
            self.connection.sendall(requests[start:start + 7])
        self.expect(wire.OK * count + b"".join(bytes([i]) * 9 for i in range(count)))

    def test_hundreds_of_requests_in_one_piece(self):
        count = 300
        requests = b"".join(wire.header(WRITE | wire.V2, self.ours.base + i * 64, 37) + bytes([i % 251]) * 37 for i in range(count))
        requests += b"".join(wire.header(READ | wire.V2, self.ours.base + i * 64, 37) for i in range(count))
        self.connection.sendall(requests)
        self.expect(wire.OK * count + b"".join(wire.OK + bytes([i % 251]) * 37 for i in range(count)))

    def test_other_opcodes_are_reads(self):
        self.connection.sendall(wire.header(0x7F, self.ours.base, 4) + wire.header(0xFF, self.ours.base, 4))
        self.expect(b"\xa5" * 4 + wire.OK + b"\xa5" * 4)

    def test_a_refused_request_closes_the_connection_without_a_word(self):
        for opcode, address, size in ((READ, 8, 4), (WRITE, 8, 4), (READ, self.ours.base, 0), (READ, self.ours.base + 16 * MIB - 1, 2),
                                      (WRITE, self.ours.base + 16 * MIB - 1, 2), (READ, (1 << 64) - 2, 4)):
            with self.subTest(opcode=opcode, address=hex(address), size=size), wire.dial(self.port) as connection:
                connection.sendall(wire.header(opcode, address, size))
                received, end = wire.drain(connection)
                self.assertEqual(received, b"")
                # An orderly end would tell the writer that its bytes were applied; upstream resets only when some have arrived.
                self.assertIn(end, ("closed", "reset") if opcode == WRITE else ("closed",))
        self.assertServes(self.ours)

    def test_refused_write_with_its_body(self):
        """The client can tell: the connection is reset, and is not when a write has been applied."""
        for size in (1, 4096, 8 * MIB):
            with self.subTest(size=size), wire.dial(self.port) as connection:
                with self.assertRaises((ConnectionError, OSError)):
                    connection.sendall(wire.header(WRITE, self.ours.base + 16 * MIB, size) + bytes(size))
                    connection.shutdown(socket.SHUT_WR)
                    if wire.drain(connection)[1] == "reset":
                        raise ConnectionResetError
        self.assertServes(self.ours)

    def test_applied_write_ends_cleanly(self):
        for size in (1, 4096, 8 * MIB):
            body = bytes([size % 255]) * size
            with self.subTest(size=size), wire.dial(self.port) as connection:
                connection.sendall(wire.header(WRITE, self.ours.base, size) + body)
                connection.shutdown(socket.SHUT_WR)
                self.assertEqual(wire.drain(connection), (b"", "closed"))
                self.assertEqual(self.ours.peek(size - 1), body[-1:])

    def test_body_that_never_comes(self):
        with wire.dial(self.port) as connection:
            connection.sendall(wire.header(WRITE, self.ours.base, 100) + b"half")
            connection.shutdown(socket.SHUT_WR)
            wire.drain(connection)
        self.assertEqual(self.ours.peek(4), b"\xa5")
        self.assertServes(self.ours)


class Initiator(TestCase):
    """Ours against a peer whose descriptor does not name a version. `once`: the oldest peers close after each request."""

    @classmethod
    def setUpClass(cls):
        cls.ours = cls.shared_engine(registered=64 * MIB)

    def requests_of(self, peer, count):
        """What the peer has seen. Completed means that it is there: only upstream's initiator has to be waited for."""
        if checks_itself():
            wire.wait_until(lambda: len(peer.requests) >= count, 5)
        self.assertEqual(len(peer.requests), count)
        return peer.requests

    def check_bytes(self, once):
        with wire.FakePeer(size=4 * MIB, version=None, once=once) as peer:
            ours = self.ours
            ours.fill(offset=100, length=MIB, seed=3)
            self.assertMoved(ours.write(peer.name, 100, peer.base, MIB))
            self.assertMoved(ours.write(peer.name, 100, peer.base, 10))
            requests = self.requests_of(peer, 2)
            self.assertEqual([start for start, _ in requests], [WRITE_MIB, WRITE_10])
            self.assertEqual([len(body) for _, body in requests], [MIB, 10])
            ours.paint(offset=8 * MIB, length=10)
            self.assertMoved(ours.read(peer.name, 8 * MIB, peer.base, 10))
            self.assertEqual(self.requests_of(peer, 3)[2], (READ_10, b""))
            ours.paint(offset=8 * MIB, length=MIB)
            self.assertMoved(ours.read(peer.name, 8 * MIB, peer.base, MIB))
            self.assertIntact(ours, 8 * MIB, MIB, 3)
            for number in range(20):
                self.assertMoved(ours.write(peer.name, 100, peer.base + MIB + 10 * number, 10))
                self.assertMoved(ours.read(peer.name, 8 * MIB, peer.base + MIB + 10 * number, 10))
            self.requests_of(peer, 44)
            self.assertEqual(bytes(peer.memory[MIB:MIB + 200]), bytes(peer.memory[:10]) * 20)

    def test_bytes_sent_to_a_peer_of_version_1(self):
        self.check_bytes(once=False)

    @better_than_upstream
    def test_peer_that_serves_one_request_a_connection(self):
        self.check_bytes(once=True)

    def test_version_1_named(self):
        with wire.FakePeer(version=1) as peer:
            self.assertMoved(self.ours.write(peer.name, 0, peer.base, 10))
            self.assertMoved(self.ours.read(peer.name, 0, peer.base, 10))
            self.assertEqual([start for start, _ in self.requests_of(peer, 2)], [WRITE_10, READ_10])

    def test_version_3_is_spoken_to_in_version_2(self):
        with wire.FakePeer(version=3) as peer:
            self.assertMoved(self.ours.write(peer.name, 0, peer.base, 10))
            self.assertEqual([start[16] for start, _ in peer.requests], [WRITE | wire.V2])

    def check_batch(self, once):
        with wire.FakePeer(version=None, once=once) as peer:
            self.ours.fill(offset=0, length=640, seed=5)
            items = [(i * 10, peer.base + i * 10, 10) for i in range(64)]
            self.assertMoved(self.ours.batch(peer=peer.name, opcode=WRITE, items=items))
            self.requests_of(peer, 64)
            self.ours.paint(offset=MIB, length=640)
            self.assertMoved(self.ours.batch(peer=peer.name, opcode=READ, items=[(MIB + i * 10, peer.base + i * 10, 10) for i in range(64)]))
            self.assertIntact(self.ours, MIB, 640, 5)

    def test_batch_to_a_peer_of_version_1(self):
        self.check_batch(once=False)

    @better_than_upstream
    def test_batch_to_a_peer_that_serves_one_request_a_connection(self):
        self.check_batch(once=True)

    def test_connection_ends_in_the_body(self):
        def cut(_, connection, __):
            wire.read_exactly(connection, MIB)
            wire.reset(connection)
            return True

        with wire.FakePeer(size=64 * MIB, version=None, interfere=cut) as peer:
            self.assertFailed(self.ours.write(peer.name, 0, peer.base, 48 * MIB), 10)
        with wire.FakePeer(version=None) as peer:
            self.assertMoved(self.ours.write(peer.name, 0, peer.base, 10))

    def test_connection_ends_in_the_payload(self):
        def cut(_, connection, start):
            connection.sendall(bytes(wire.parse_header(start)[2] // 2))
            return True

        with wire.FakePeer(size=64 * MIB, version=None, interfere=cut) as peer:
            self.assertFailed(self.ours.read(peer.name, 0, peer.base, 10), 10)
            self.assertFailed(self.ours.read(peer.name, 0, peer.base, 48 * MIB), 10)

    def test_refused_read(self):
        with wire.FakePeer(version=None) as peer:
            self.assertFailed(self.ours.read(peer.name, 0, peer.base + MIB, 10), 10)
            self.assertMoved(self.ours.read(peer.name, 0, peer.base, 10))


class InitiatorOfUpstream(TestCase):
    def test_wheel_told_to_speak_version_1_with_ours(self):
        ours = self.engine(registered=32 * MIB)
        wheel = self.engine(WHEEL, registered=32 * MIB, MC_TCP_PROTO="1")
        for number, length in enumerate((1, 10, 4097, 65537, 5 * MIB + 1)):
            wheel.fill(offset=1, length=length, seed=number)
            ours.paint(offset=4096 + number, length=length)
            self.assertMoved(wheel.write(ours.name, 1, ours.base + 4096 + number, length))
            # A write of version 1 is not acknowledged: it is there at the latest when a read behind it is answered.
            wheel.paint(offset=16 * MIB, length=length)
            self.assertMoved(wheel.read(ours.name, 16 * MIB, ours.base + 4096 + number, length))
            self.assertTrue(wire.wait_until(lambda: ours.check(offset=4096 + number, length=length, seed=number) == ""))
            self.assertIntact(wheel, 16 * MIB, length, number)
        self.assertFailed(wheel.read(ours.name, 0, ours.base + 32 * MIB, 10), 10)

    def test_ours_told_to_speak_version_1_with_wheel(self):
        ours = self.engine(registered=32 * MIB, MC_TCP_PROTO="1")
        wheel = self.engine(WHEEL, registered=32 * MIB)
        for number, length in enumerate((1, 10, 4097, 65537, 5 * MIB + 1)):
            ours.fill(offset=1, length=length, seed=number)
            wheel.paint(offset=4096 + number, length=length)
            self.assertMoved(ours.write(wheel.name, 1, wheel.base + 4096 + number, length))
            self.assertTrue(wire.wait_until(lambda: wheel.check(offset=4096 + number, length=length, seed=number) == ""))
            ours.paint(offset=16 * MIB, length=length)
            self.assertMoved(ours.read(wheel.name, 16 * MIB, wheel.base + 4096 + number, length))
            self.assertIntact(ours, 16 * MIB, length, number)
        self.assertFailed(ours.read(wheel.name, 0, wheel.base + 32 * MIB, 10), 10)
