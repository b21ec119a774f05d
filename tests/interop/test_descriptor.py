"""The segment descriptor: what ours looks like, and large ones in both directions."""

import json
import re

import wire
from harness import MIB, WHEEL, TestCase, library_only

MANY = 10_000
STRIDE, LENGTH = 8192, 4096
LARGEST_FOR_UPSTREAM = 1 << 20


class Shape(TestCase):
    @classmethod
    def setUpClass(cls):
        cls.ours, cls.wheel = cls.shared_engine(), cls.shared_engine(WHEEL)
        for engine in (cls.ours, cls.wheel):
            for offset in (3 * MIB, 0, 2 * MIB):  # not in order of address
                assert engine.register(offset=offset, length=4096 + offset // MIB) == 0
        cls.text = wire.ask(cls.ours.port, wire.METADATA, {"buffers": []})
        cls.document = json.loads(cls.text)
        cls.reference = json.loads(wire.ask(cls.wheel.port, wire.METADATA, {"buffers": []}))

    def test_text_is_compact_sorted_and_ends_with_a_newline(self):
        compact = json.dumps(self.document, sort_keys=True, separators=(",", ":")).encode() + b"\n"
        self.assertEqual(self.text, compact)

    def test_keys_and_types_are_those_of_upstream(self):
        # Upstream's package always writes the two that are left out here; its readers do without them.
        missing = set(self.reference) - set(self.document) - {"rdma_server_name", "tcp_data_host"}
        self.assertEqual(missing, set())
        for key in set(self.document) & set(self.reference):
            self.assertIs(type(self.document[key]), type(self.reference[key]), key)
        self.assertEqual(set(self.document) - set(self.reference) - {"rdma_server_name"}, set())

    def test_values(self):
        document = self.document
        self.assertEqual(document["name"], self.ours.name)
        self.assertEqual(document["protocol"], "tcp")
        self.assertEqual(document["tcp_proto_version"], 2)
        self.assertIn(document["tcp_data_port"], range(1, 65536))
        self.assertRegex(document["timestamp"], re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}$"))
        self.assertIn(document.get("tcp_data_host", ""), ("", "127.0.0.1"))

    def test_buffers_in_registration_order(self):
        expected = [(engine.base + offset, 4096 + offset // MIB) for engine in (self.ours,) for offset in (3 * MIB, 0, 2 * MIB)]
        self.assertEqual([(buffer["addr"], buffer["length"]) for buffer in self.document["buffers"]], expected)
        for buffer in self.document["buffers"]:
            self.assertEqual(set(buffer), set(self.reference["buffers"][0]))
            self.assertEqual(buffer["name"], self.ours.name)

    def test_wheel_finds_the_first_buffer(self):
        self.assertEqual(self.wheel.first_buffer(peer=self.ours.name), self.ours.base + 3 * MIB)

    def test_every_request_body_is_answered(self):
        """Upstream does not look at it."""
        for body in (b"{}", b"[]", b"null", b'{"buffers":[]}', json.dumps(self.reference).encode()):
            with self.subTest(body=body[:20]):
                reply = wire.ask(self.ours.port, wire.METADATA, body)
                self.assertEqual(json.loads(reply)["buffers"], self.document["buffers"])

    def test_data_host_of_a_peer_is_used(self):
        """A peer may say that its data port is at another address than its name's, as the package's initiator knows."""
        with wire.FakePeer(data_host="127.0.0.2") as peer:
            self.ours.fill(offset=0, length=100, seed=1)
            self.assertMoved(self.ours.write(peer.name, 0, peer.base, 100))
            self.assertEqual(len(peer.requests), 1)


class Large(TestCase):
    def test_wheel_opens_ours_with_10000_regions(self):
        ours, wheel = self.engine(arena=128 * MIB), self.engine(WHEEL, registered=MIB)
        self.assertEqual(ours.register_many(count=MANY, stride=STRIDE, length=LENGTH), 0)
        text = wire.ask(ours.port, wire.METADATA, {"buffers": []})
        self.assertLess(len(text), LARGEST_FOR_UPSTREAM)
        self.assertEqual(len(json.loads(text)["buffers"]), MANY)
        for number in (0, 1, 5000, MANY - 1):
            offset = number * STRIDE
            wheel.fill(offset=0, length=LENGTH, seed=number)
            ours.paint(offset=offset, length=LENGTH)
            self.assertMoved(wheel.write(ours.name, 0, ours.base + offset, LENGTH))
            self.assertIntact(ours, offset, LENGTH, number)
        self.assertFailed(wheel.write(ours.name, 0, ours.base + LENGTH - 1, 2), 10)

    def test_ours_opens_wheel_with_10000_regions(self):
        ours, wheel = self.engine(registered=MIB), self.engine(WHEEL, arena=128 * MIB)
        self.assertEqual(wheel.register_many(count=MANY, stride=STRIDE, length=LENGTH), 0)
        for number in (0, 1, 5000, MANY - 1):
            offset = number * STRIDE
            ours.fill(offset=0, length=LENGTH, seed=number)
            wheel.paint(offset=offset, length=LENGTH)
            self.assertMoved(ours.write(wheel.name, 0, wheel.base + offset, LENGTH))
            self.assertIntact(wheel, offset, LENGTH, number)
        self.assertFailed(ours.write(wheel.name, 0, wheel.base + LENGTH - 1, 2), 10)

    @library_only
    def test_ours_lists_the_memory_of_wheel(self):
        ours, wheel = self.engine(), self.engine(WHEEL)
        for offset in (3 * MIB, 0, 2 * MIB):
            self.assertEqual(wheel.register(offset=offset, length=4096 + offset // MIB), 0)
        expected = [[wheel.base + offset, 4096 + offset // MIB] for offset in (3 * MIB, 0, 2 * MIB)]
        self.assertEqual(ours.list_segment(peer=wheel.name), expected)
