"""RDMA between the engine under test and upstream's, in the lab: skipped where RDMA_LAB_DEVICES does not name two soft-RoCE devices.

Engines use NICs of their own where there are enough. Upstream finds GIDs of soft-RoCE by MC_GID_INDEX alone."""

import os
import unittest

from harness import MIB, WHEEL, TestCase

DEVICES = dict(entry.split("=") for entry in os.environ.get("RDMA_LAB_DEVICES", "").split() if entry.startswith("rxe"))
NAMES = sorted(DEVICES)
GAP = 4096
ARENA = 32 * MIB
REGISTERED = 24 * MIB
PORT = "21321"  # nothing else runs in the lab


@unittest.skipUnless(len(NAMES) >= 2, "needs the RDMA lab")
class Rdma(TestCase):
    def start(self, kind, nics, **environment):
        return self.engine(kind, arena=ARENA, registered=REGISTERED, TE_TEST_HOST=DEVICES[nics[0]], TE_TEST_NICS=",".join(nics),
                           MC_GID_INDEX="1", **environment)

    def pairs(self, nics=1):
        """Both roles for each kind of peer: (what it is, who submits, to whom)."""
        first, second = NAMES[:nics], NAMES[-nics:]
        ours, wheel = self.start(None, first), self.start(WHEEL, second)
        return [("to upstream", ours, wheel), ("from upstream", wheel, ours)]

    def move(self, what, initiator, target, sizes):
        for seed, size in enumerate(sizes):
            source, sink = GAP, REGISTERED // 2 + GAP
            initiator.fill(offset=source, length=size, seed=seed)
            target.paint(offset=GAP, length=size)
            self.assertMoved(initiator.write(target.name, source, target.base + GAP, size), f"{what}: WRITE of {size} bytes")
            self.assertIntact(target, GAP, size, seed, f"{what}: WRITE of {size} bytes")
            initiator.paint(offset=sink, length=size)
            self.assertMoved(initiator.read(target.name, sink, target.base + GAP, size), f"{what}: READ of {size} bytes")
            self.assertIntact(initiator, sink, size, seed, f"{what}: READ of {size} bytes")

    def test_bytes_move_both_ways(self):
        for what, initiator, target in self.pairs():
            self.move(what, initiator, target, [1, 7, 4096, 65536, 65537, 81921, MIB + 1, 8 * MIB])

    def test_bytes_move_between_two_nics_each(self):
        for what, initiator, target in self.pairs(nics=2):
            self.move(what, initiator, target, [1, 65536, MIB + 1, 8 * MIB])

    def test_batches_arrive_whole(self):
        count, size = 256, 4096
        for what, initiator, target in self.pairs():
            initiator.fill(offset=0, length=count * size, seed=5)
            target.paint(offset=MIB, length=count * size)
            items = [[at * size, target.base + MIB + at * size, size] for at in range(count)]
            self.assertMoved(initiator.batch(peer=target.name, opcode=1, items=items), what)
            self.assertIntact(target, MIB, count * size, 5, what)

    def test_notifications_come_with_the_bytes(self):
        for what, initiator, target in self.pairs():
            initiator.fill(offset=0, length=65536, seed=6)
            target.paint(offset=MIB, length=65536)
            self.assertMoved(initiator.write(target.name, 0, target.base + MIB, 65536, ["name", "text"]), what)
            messages, fault = target.take_when_notified(seconds=20, offset=MIB, length=65536, seed=6)
            self.assertEqual((messages, fault), ([["name", "text"]], ""), what)

    def test_memory_that_is_not_registered_is_refused_and_the_next_transfer_works(self):
        ours, wheel = self.start(None, NAMES[:1]), self.start(WHEEL, NAMES[1:2])
        self.move("before", ours, wheel, [4096])
        self.assertFailed(ours.write(wheel.name, 0, wheel.base + REGISTERED, 4096), 30, "a target that is not registered")
        self.assertFailed(ours.write(wheel.name, REGISTERED, wheel.base, 4096), 30, "a source that is not registered")
        self.move("after", ours, wheel, [4096])

    def test_a_peer_that_dies_and_another_that_comes(self):
        ours = self.start(None, NAMES[:1])
        for _ in range(2):
            wheel = self.start(WHEEL, NAMES[1:2])
            self.move("a new peer", ours, wheel, [65536])
            wheel.kill()
            # Soft-RoCE never gives up by itself; the engine does.
            outcome = ours.native_batch(peer=wheel.name, opcode=1, items=[[0, wheel.base, 4096]], timeout_ms=3000)
            self.assertFailed(outcome, 20, "a dead peer")

    def test_a_peer_killed_amid_a_transfer_comes_back_under_its_name(self):
        """The caller keeps its segment; at most the first transfer to the new process fails."""
        ours = self.start(None, NAMES[:1])
        for life in range(3):
            # Each life has its memory at another address.
            peer = self.engine(None, arena=ARENA + life * 8 * MIB, registered=REGISTERED, TE_TEST_HOST=DEVICES[NAMES[1]],
                               TE_TEST_NICS=NAMES[1], MC_GID_INDEX="1", MC_MIN_RPC_PORT=PORT, MC_MAX_RPC_PORT=PORT)
            self.assertEqual(peer.port, int(PORT))
            name = peer.name
            outcomes = []
            for number in range(4):
                ours.fill(offset=0, length=70001, seed=10 * life + number)
                peer.paint(offset=64, length=70001)
                outcomes.append(ours.native_batch(peer=name, opcode=1, items=[[0, peer.base + 64, 70001]], timeout_ms=20000))
                if outcomes[-1].ok:
                    self.assertIntact(peer, 64, 70001, 10 * life + number)
            self.assertTrue(all(outcome.ok for outcome in outcomes[1 if life else 0:]), [str(outcome) for outcome in outcomes])
            ours.begin("native_batch", peer=name, opcode=1, items=[[0, peer.base, REGISTERED]] * 16, timeout_ms=5000)
            peer.kill()
            self.assertFailed(ours.finish(), 20, "a transfer whose target was killed")

    def test_peers_of_the_same_kind(self):
        first, second = self.start(None, NAMES[:1]), self.start(None, NAMES[1:2])
        self.move("ours to ours", first, second, [1, 65537, 8 * MIB])
        self.move("and back", second, first, [1, 65537, 8 * MIB])
