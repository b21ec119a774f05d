"""What peers may reach in the memory of the engine under test, and what they may not."""

import random

import wire
from harness import MIB, WHEEL, TestCase, library_only

END = 8 * MIB  # what is registered ends here


class Refusals(TestCase):
    """Targets that are not wholly registered: a failure, nothing written, and the next good transfer works."""

    @classmethod
    def setUpClass(cls):
        cls.ours = cls.shared_engine(arena=64 * MIB)
        assert cls.ours.register(offset=MIB, length=END - MIB) == 0
        cls.wheel = cls.shared_engine(WHEEL, registered=32 * MIB)
        cls.port = wire.fetch_descriptor(cls.ours.port)["tcp_data_port"]

    # (offset from the arena's start, or an absolute address; length)
    RELATIVE = [(END, 1), (END - 1, 2), (END - 4096, 4097), (MIB - 1, 1), (MIB - 1, 2), (MIB - 1, END - MIB + 2), (0, 100), (END + MIB, 4096),
                (2 * MIB, END)]
    ABSOLUTE = [(0, 1), (8, 4096), ((1 << 64) - 1, 1), ((1 << 64) - 8, 16), ((1 << 63), 8)]

    def targets(self):
        yield from ((self.ours.base + offset, length) for offset, length in self.RELATIVE)
        yield from self.ABSOLUTE

    def setUp(self):
        self.ours.paint(offset=0, length=20 * MIB)

    def check(self):
        self.assertUntouched(self.ours, 0, 20 * MIB)
        self.ours.paint(offset=0, length=20 * MIB)

    def test_wheel(self):
        self.wheel.fill(offset=0, length=20 * MIB, seed=4)
        for address, length in self.targets():
            what = f"{length} bytes at {address:#x}"
            self.assertFailed(self.wheel.write(self.ours.name, 0, address, length), 10, "write of " + what)
            self.assertFailed(self.wheel.read(self.ours.name, 24 * MIB, address, length), 10, "read of " + what)
            self.check()
        self.assertRecovers(lambda: self.wheel.write(self.ours.name, 0, self.ours.base + MIB, 100), "a good write after refusals")
        self.assertIntact(self.ours, MIB, 100, 4)
        self.assertMoved(self.wheel.read(self.ours.name, 0, self.ours.base + END - 100, 100), "a good read after refusals")

    def test_v2_by_plain_sockets(self):
        for address, length in [*self.targets(), (self.ours.base + MIB, 0), (self.ours.base + MIB, 1 << 63), (self.ours.base + MIB, (1 << 64) - 1)]:
            for opcode in (wire.READ | wire.V2, wire.WRITE | wire.V2):
                with self.subTest(address=hex(address), length=length, opcode=opcode), wire.dial(self.port) as connection:
                    connection.sendall(wire.header(opcode, address, length))
                    received, _ = wire.drain(connection)
                    self.assertEqual(received, wire.REJECTED)
        self.check()
        self.assertServes(self.ours, MIB)

    def test_rejected_body_is_not_taken_for_requests(self):
        """The body of a refused write is dropped, though it reads like a good request, and what was sent behind it is not served."""
        evil = wire.header(wire.WRITE | wire.V2, self.ours.base + 2 * MIB, 4) + b"evil"
        with wire.dial(self.port) as connection:
            connection.sendall(wire.header(wire.WRITE | wire.V2, self.ours.base + MIB, 4) + b"\xa5" * 4
                               + wire.header(wire.WRITE | wire.V2, self.ours.base, len(evil)) + evil + evil)
            received, _ = wire.drain(connection)
            self.assertEqual(received[:8], wire.OK)
            self.assertIn(received[8:], (wire.REJECTED, b""))  # a reset may overtake the frame
        self.check()
        self.assertServes(self.ours, MIB)

    def test_large_refused_bodies(self):
        """A refusal of a large write reaches a peer that is still sending it."""
        for _ in range(3):
            self.assertFailed(self.wheel.write(self.ours.name, 0, self.ours.base + END - MIB, 20 * MIB), 10)
        self.check()
        self.assertServes(self.ours, MIB)

    def test_unregistered_again(self):
        self.assertEqual(self.ours.register(offset=24 * MIB, length=MIB), 0)
        target = self.ours.base + 24 * MIB
        self.assertRecovers(lambda: self.wheel.write(self.ours.name, 0, target, 4096))
        self.assertEqual(self.ours.unregister(offset=24 * MIB), 0)
        self.ours.paint(offset=24 * MIB, length=MIB)
        self.assertFailed(self.wheel.write(self.ours.name, 0, target, 4096), 10)
        self.assertFailed(self.wheel.read(self.ours.name, 0, target, 4096), 10)
        self.assertUntouched(self.ours, 24 * MIB, MIB)
        self.assertRecovers(lambda: self.wheel.write(self.ours.name, 0, self.ours.base + MIB, 100))

    def test_ours_refused_by_wheel(self):
        """The other way round: the wheel refuses, ours fails in time and goes on."""
        wheel = self.engine(WHEEL)
        self.assertEqual(wheel.register(offset=MIB, length=END - MIB), 0)
        wheel.paint(offset=0, length=20 * MIB)
        for address, length in [*((wheel.base + offset, length) for offset, length in self.RELATIVE), *self.ABSOLUTE]:
            what = f"{length} bytes at {address:#x}"
            self.assertFailed(self.ours.write(wheel.name, 32 * MIB, address, length), 10, "write of " + what)
            self.assertFailed(self.ours.read(wheel.name, 32 * MIB, address, length), 10, "read of " + what)
        self.assertUntouched(wheel, 0, 20 * MIB)
        self.assertMoved(self.ours.write(wheel.name, 32 * MIB, wheel.base + END - 100, 100))

    def test_wheel_refused_under_load(self):
        """Refusals of strangers between good transfers of several threads harm none of them."""
        self.assertRecovers(lambda: self.wheel.write(self.ours.name, 0, self.ours.base + MIB, 100))
        self.wheel.begin("storm", peer=self.ours.name, remote=self.ours.base + MIB, threads=4, rounds=60, length=20000, stride=MIB)
        for _ in range(60):
            offset, length = random.choice(self.RELATIVE)
            with wire.dial(self.port) as connection:
                connection.sendall(wire.header(wire.READ | wire.V2, self.ours.base + offset, length))
                self.assertEqual(wire.drain(connection)[0], wire.REJECTED)
        self.assertEqual(self.wheel.finish(), [])


class LocalOnly(TestCase):
    """Memory registered with remote_accessible = 0."""

    @library_only
    def test_wheel_can_neither_read_nor_write_it(self):
        ours, wheel = self.engine(), self.engine(WHEEL, registered=MIB)
        # A private region between two shared ones that touch it.
        for offset, remote in ((0, True), (4096, False), (8192, True)):
            self.assertEqual(ours.register(offset=offset, length=4096, remote=remote), 0)
        ours.paint(offset=0, length=12288)
        wheel.fill(offset=0, length=12288, seed=6)
        wheel.paint(offset=32768, length=12288)
        for offset, length in ((4096, 4096), (4096, 1), (8191, 1), (5000, 100), (4095, 2), (8191, 2), (0, 12288)):
            what = f"{length} bytes at {offset}"
            self.assertFailed(wheel.write(ours.name, 0, ours.base + offset, length), 10, "write of " + what)
            self.assertUntouched(ours, 0, 12288)
            self.assertFailed(wheel.read(ours.name, 32768, ours.base + offset, length), 10, "read of " + what)
            self.assertUntouched(wheel, 32768, 12288)
        port = wire.fetch_descriptor(ours.port)["tcp_data_port"]
        for opcode, expected in ((wire.READ | wire.V2, wire.REJECTED), (wire.WRITE | wire.V2, wire.REJECTED), (wire.READ, b""), (wire.WRITE, b"")):
            with wire.dial(port) as connection:
                connection.sendall(wire.header(opcode, ours.base + 4096, 64))
                self.assertEqual(wire.drain(connection)[0], expected)
        self.assertUntouched(ours, 0, 12288)
        self.assertRecovers(lambda: wheel.write(ours.name, 0, ours.base, 4096))
        self.assertMoved(wheel.write(ours.name, 0, ours.base + 8192, 4096))

    @library_only
    def test_it_works_as_local_memory(self):
        ours, wheel = self.engine(), self.engine(WHEEL, registered=MIB)
        self.assertEqual(ours.register(offset=0, length=MIB, remote=False), 0)
        ours.fill(offset=0, length=50000, seed=8)
        wheel.paint(offset=64, length=50000)
        self.assertMoved(ours.write(wheel.name, 0, wheel.base + 64, 50000))
        self.assertIntact(wheel, 64, 50000, 8)
        ours.paint(offset=100000, length=50000)
        self.assertMoved(ours.read(wheel.name, 100000, wheel.base + 64, 50000))
        self.assertIntact(ours, 100000, 50000, 8)
