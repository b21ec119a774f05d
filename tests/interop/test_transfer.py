"""Bytes move between the engine under test and the upstream package, both ways, and nothing else changes."""

import random
import time

import wire
from engine import READ, WRITE
from harness import MIB, WHEEL, TestCase, better_than_upstream, library_only

SIZES = [1, 2, 3, 7, 8, 9, 63, 64, 65, 4095, 4096, 4097, 65535, 65536, 65537, MIB - 1, MIB, MIB + 1, 16 * MIB - 1, 16 * MIB + 1, 256 * MIB]
ARENA = 258 * MIB
LEAST_OFFSET = 4096


class EverySize(TestCase):
    @classmethod
    def setUpClass(cls):
        cls.ours = cls.shared_engine(arena=ARENA, registered=ARENA)
        cls.wheel = cls.shared_engine(WHEEL, arena=ARENA, registered=ARENA)

    def tearDown(self):
        self.ours.forget_memory()
        self.wheel.forget_memory()

    def move(self, initiator, target, opcode):
        for number, size in enumerate(SIZES):
            seed = random.randrange(1 << 30)
            local, remote = LEAST_OFFSET + number % 9, LEAST_OFFSET + (number * 5) % 11
            source, sink = ((initiator, local), (target, remote)) if opcode == WRITE else ((target, remote), (initiator, local))
            source[0].fill(offset=source[1], length=size, seed=seed)
            sink[0].paint(offset=sink[1], length=size)
            outcome = initiator.transfer(peer=target.name, opcode=opcode, local=local, remote=target.base + remote, length=size)
            self.assertMoved(outcome, f"{size} bytes")
            self.assertIntact(*sink, size, seed, f"{size} bytes, seed {seed}")

    def test_write_to_wheel(self):
        self.move(self.ours, self.wheel, WRITE)

    def test_read_from_wheel(self):
        self.move(self.ours, self.wheel, READ)

    def test_write_by_wheel(self):
        self.move(self.wheel, self.ours, WRITE)

    def test_read_by_wheel(self):
        self.move(self.wheel, self.ours, READ)


class Batches(TestCase):
    @classmethod
    def setUpClass(cls):
        cls.ours = cls.shared_engine(registered=64 * MIB)
        cls.wheel = cls.shared_engine(WHEEL, registered=64 * MIB)

    def move(self, initiator, target, opcode, method="batch"):
        """64 small and odd ranges and one large one, scattered."""
        seeds = random.Random(7)
        lengths = [seeds.randrange(1, 9000) for _ in range(64)] + [5 * MIB + 3]
        items, seeds = [], []
        local, remote = 4096, 8192
        for number, length in enumerate(lengths):
            items.append((local, remote, length))
            seeds.append(random.randrange(1 << 30))
            local += length + 64 + number % 7
            remote += length + 128 + number % 5
        source, sink = (initiator, target) if opcode == WRITE else (target, initiator)
        for (local, remote, length), seed in zip(items, seeds):
            source.fill(offset=local if source is initiator else remote, length=length, seed=seed)
            sink.paint(offset=local if sink is initiator else remote, length=length)
        outcome = getattr(initiator, method)(peer=target.name, opcode=opcode,
                                             items=[(local, target.base + remote, length) for local, remote, length in items])
        self.assertMoved(outcome)
        for (local, remote, length), seed in zip(items, seeds):
            self.assertIntact(sink, local if sink is initiator else remote, length, seed)

    def test_write_to_wheel(self):
        self.move(self.ours, self.wheel, WRITE)

    def test_read_from_wheel(self):
        self.move(self.ours, self.wheel, READ)

    def test_write_by_wheel(self):
        self.move(self.wheel, self.ours, WRITE)

    def test_read_by_wheel(self):
        self.move(self.wheel, self.ours, READ)

    @library_only
    def test_one_synchronous_call_writes_to_wheel(self):
        self.move(self.ours, self.wheel, WRITE, "native_batch")

    @library_only
    def test_one_synchronous_call_reads_from_wheel(self):
        self.move(self.ours, self.wheel, READ, "native_batch")

    def test_one_bad_target_fails_the_batch_and_no_other_byte(self):
        self.ours.fill(offset=0, length=64 * 100, seed=1)
        self.wheel.paint(offset=4096, length=64 * 200)
        items = [(i * 100, self.wheel.base + 4096 + i * 200, 100) for i in range(64)]
        items[40] = (4000, self.wheel.base + 64 * MIB, 100)
        self.assertFailed(self.ours.batch(peer=self.wheel.name, opcode=WRITE, items=items), 10)
        self.assertUntouched(self.wheel, 4096 + 40 * 200, 100)
        self.assertMoved(self.ours.batch(peer=self.wheel.name, opcode=WRITE, items=items[:40] + items[41:]))
        for i in list(range(40)) + list(range(41, 64)):
            self.wheel.read(peer=self.ours.name, local=MIB, remote=self.ours.base + i * 100, length=100)
            self.assertEqual(self.wheel.peek(MIB), self.wheel.peek(4096 + i * 200))


class Threads(TestCase):
    def test_six_threads_of_ours_against_wheel(self):
        ours, wheel = self.engine(registered=64 * MIB), self.engine(WHEEL, registered=64 * MIB)
        for length, rounds in ((1000, 60), (300001, 8)):
            faults = ours.storm(peer=wheel.name, remote=wheel.base + 7, threads=6, rounds=rounds, length=length, stride=MIB)
            self.assertEqual(faults, [])

    def test_six_threads_of_wheel_against_ours(self):
        ours, wheel = self.engine(registered=64 * MIB), self.engine(WHEEL, registered=64 * MIB)
        for length, rounds in ((1000, 60), (300001, 8)):
            faults = wheel.storm(peer=ours.name, remote=ours.base + 7, threads=6, rounds=rounds, length=length, stride=MIB)
            self.assertEqual(faults, [])

    def test_both_directions_at_once_with_two_wheels(self):
        ours = self.engine(registered=64 * MIB)
        first, second = (self.engine(WHEEL, registered=64 * MIB) for _ in range(2))
        ours.begin("storm", peer=first.name, remote=first.base + 32 * MIB, threads=3, rounds=30, length=70000, stride=MIB)
        first.begin("storm", peer=ours.name, remote=ours.base + 32 * MIB, threads=3, rounds=30, length=70000, stride=MIB)
        second.begin("storm", peer=ours.name, remote=ours.base + 48 * MIB, threads=3, rounds=30, length=70000, stride=MIB)
        for engine in (ours, first, second):
            self.assertEqual(engine.finish(), [])


class TouchingRegions(TestCase):
    """One range of a transfer lies across registrations that touch."""

    PIECES = [4096, 8192, 4096, 12288]

    def register_pieces(self, engine):
        offset = 0
        for piece in self.PIECES:
            self.assertEqual(engine.register(offset=offset, length=piece), 0)
            offset += piece
        return offset

    def cross(self, initiator, target):
        total = self.register_pieces(target)
        self.assertEqual(initiator.register(offset=0, length=MIB), 0)
        for remote, length in ((1, total - 2), (4095, 2), (0, total), (4000, 4096 + 8192)):
            initiator.fill(offset=0, length=length, seed=remote)
            target.paint(offset=remote, length=length)
            self.assertMoved(initiator.write(target.name, 0, target.base + remote, length), f"write of {length} bytes at {remote}")
            fault = target.check(offset=remote, length=length, seed=remote)
            self.assertEqual(fault, "")
            initiator.paint(offset=MIB // 2, length=length)
            self.assertMoved(initiator.read(target.name, MIB // 2, target.base + remote, length), f"read of {length} bytes at {remote}")
            self.assertIntact(initiator, MIB // 2, length, remote)
        # Past the last of them nothing is registered: whole refusal.
        target.paint(offset=total - 100, length=200)
        self.assertFailed(initiator.write(target.name, 0, target.base + total - 100, 200), 10)
        self.assertUntouched(target, total - 100, 200)
        self.assertRecovers(lambda: initiator.write(target.name, 0, target.base + total - 100, 100))

    @better_than_upstream
    def test_ours_to_wheel(self):
        self.cross(self.engine(), self.engine(WHEEL))

    @better_than_upstream
    def test_wheel_to_ours(self):
        self.cross(self.engine(WHEEL), self.engine())


class LocalSource(TestCase):
    def test_unregistered_local_memory_works_with_wheel(self):
        """As upstream: a TCP initiator's own memory need not be registered."""
        ours, wheel = self.engine(), self.engine(WHEEL, registered=MIB)
        ours.fill(offset=100, length=5000, seed=3)
        wheel.paint(offset=100, length=5000)
        self.assertMoved(ours.write(wheel.name, 100, wheel.base + 100, 5000))
        self.assertIntact(wheel, 100, 5000, 3)


class ManySmall(TestCase):
    def test_connections_are_kept(self):
        """A peer that counts them sees a handful of connections for 2,000 transfers."""
        ours = self.engine(registered=MIB)
        with wire.FakePeer() as peer:
            start = time.monotonic()
            for number in range(2000):
                outcome = ours.write(peer.name, 0, peer.base + number, 8)
                self.assertMoved(outcome)
            self.assertEqual(len(peer.requests), 2000)
            self.assertLessEqual(peer.data.accepted, 16)
            self.assertLess(time.monotonic() - start, 30)
