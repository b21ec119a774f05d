"""Peers die, stop answering, come back as another process under the same name."""

import contextlib
import signal
import time

import wire
from engine import READ, WRITE
from harness import MIB, WHEEL, TestCase, better_than_upstream

LARGE = 256 * MIB
SOON = 10  # seconds within which a transfer to a dead peer has to end


class Restart(TestCase):
    @better_than_upstream
    def test_wheel_restarted_under_its_name(self):
        """At most one transfer fails; the caller keeps its segment."""
        ours = self.engine(registered=8 * MIB)
        with wire.HandshakeProxy() as proxy:
            for life in range(3):
                # Each life has its memory at another address and another data port.
                wheel = self.engine(WHEEL, arena=(64 + 8 * life) * MIB, registered=8 * MIB)
                proxy.target = wheel.port
                failures = 0
                for number in range(8):
                    seed = life * 100 + number
                    ours.fill(offset=0, length=70001, seed=seed)
                    wheel.paint(offset=64, length=70001)
                    outcome = ours.write(proxy.name, 0, wheel.base + 64, 70001)
                    self.assertLess(outcome.seconds, SOON, str(outcome))
                    if not outcome.ok:
                        failures += 1
                        self.assertEqual(number, 0, f"transfer {number} after restart {life}: {outcome}")
                        continue
                    self.assertIntact(wheel, 64, 70001, seed)
                self.assertLessEqual(failures, 1 if life else 0)
                wheel.kill()

    @better_than_upstream
    def test_wheel_restarted_while_transfers_were_failing(self):
        """Failures of the time between leave nothing behind."""
        ours = self.engine(registered=MIB)
        with wire.HandshakeProxy() as proxy:
            wheel = self.engine(WHEEL, registered=MIB)
            proxy.target = wheel.port
            self.assertMoved(ours.write(proxy.name, 0, wheel.base, 100))
            wheel.kill()
            proxy.target = None
            for _ in range(3):
                self.assertFailed(ours.write(proxy.name, 0, wheel.base, 100), SOON)
            wheel = self.engine(WHEEL, arena=32 * MIB, registered=MIB)
            proxy.target = wheel.port
            outcomes = [ours.write(proxy.name, 0, wheel.base, 100) for _ in range(2)]
            self.assertMoved(outcomes[-1], f"the second transfer after the restart (the first: {outcomes[0]})")

    def test_ours_restarted_under_its_name(self):
        """Upstream's initiator looks a peer up again only if told to, which this one is."""
        wheel = self.engine(WHEEL, registered=8 * MIB, MC_DISABLE_METACACHE="1")
        with wire.HandshakeProxy() as proxy:
            for life in range(3):
                ours = self.engine(arena=(64 + 8 * life) * MIB, registered=8 * MIB)
                proxy.target = ours.port
                outcomes = []
                for number in range(4):
                    wheel.fill(offset=0, length=70001, seed=number)
                    ours.paint(offset=64, length=70001)
                    outcomes.append(wheel.write(proxy.name, 0, ours.base + 64, 70001))
                    if outcomes[-1].ok:
                        self.assertIntact(ours, 64, 70001, number)
                self.assertTrue(all(outcome.ok for outcome in outcomes[1:]), outcomes)
                self.assertTrue(outcomes[0].ok or life > 0, outcomes)
                ours.kill()

    def test_memory_registered_after_the_segment_was_opened(self):
        for initiator, target in ((self.engine(), self.engine(WHEEL)), (self.engine(WHEEL), self.engine())):
            self.assertEqual(target.register(offset=0, length=4096), 0)
            self.assertMoved(initiator.write(target.name, 0, target.base, 4096))
            self.assertEqual(target.register(offset=MIB, length=4096), 0)
            initiator.fill(offset=0, length=4096, seed=5)
            target.paint(offset=MIB, length=4096)
            self.assertMoved(initiator.write(target.name, 0, target.base + MIB, 4096))
            self.assertIntact(target, MIB, 4096, 5)

    @better_than_upstream
    def test_data_port_moves(self):
        """The peer comes back on another data port; its handshake address stays."""
        ours = self.engine(registered=MIB)
        with wire.FakePeer() as peer:
            for _ in range(3):
                outcomes = [ours.write(peer.name, 0, peer.base, 64) for _ in range(3)]
                self.assertTrue(all(outcome.ok for outcome in outcomes[1:]), [str(outcome) for outcome in outcomes])
                peer.move_data_port()

    @better_than_upstream
    def test_peer_that_ends_idle_connections(self):
        """A connection that the peer has closed while it was idle costs no transfer."""
        ours = self.engine(registered=MIB)
        with wire.FakePeer() as peer:
            for _ in range(5):
                for number in range(3):
                    self.assertMoved(ours.write(peer.name, 0, peer.base + number, 64))
                    self.assertMoved(ours.read(peer.name, 0, peer.base + number, 64))
                peer.data.end_connections()
                time.sleep(0.1)


class MidTransfer(TestCase):
    def break_off(self, opcode):
        """Kills the wheel when some of the bytes have moved and others have not."""
        ours = self.engine(arena=LARGE + MIB, registered=LARGE)
        other = self.engine(WHEEL, registered=MIB)
        for _ in range(5):
            wheel = self.engine(WHEEL, arena=LARGE + MIB, registered=LARGE)
            source, sink = (ours, wheel) if opcode == WRITE else (wheel, ours)
            source.fill(offset=0, length=LARGE, seed=1)
            sink.paint(offset=0, length=LARGE)
            before, after = sink.peek(100), source.peek(100)
            self.assertNotEqual(before, after)
            ours.begin("transfer", peer=wheel.name, opcode=opcode, local=0, remote=wheel.base, length=LARGE)
            self.assertTrue(wire.wait_until(lambda: sink.peek(100) != before, step=0), "no byte has moved")
            wheel.signal(signal.SIGSTOP)
            if ours.has_answered(0.3):
                self.assertMoved(ours.finish())  # it was over before the signal came
                wheel.close()
                continue
            start = time.monotonic()
            wheel.kill()
            outcome = ours.finish(60)
            self.assertFalse(outcome.ok, "a transfer that was broken off reports success")
            self.assertFalse(outcome.stuck)
            self.assertLess(time.monotonic() - start, SOON)
            break
        else:
            self.fail("the transfer was over before it could be broken off, five times")
        ours.fill(offset=0, length=5000, seed=2)
        other.paint(offset=64, length=5000)
        self.assertMoved(ours.write(other.name, 0, other.base + 64, 5000))
        self.assertIntact(other, 64, 5000, 2)
        self.assertMoved(other.write(ours.name, 0, ours.base, 5000))

    def test_wheel_killed_during_a_write(self):
        self.break_off(WRITE)

    def test_wheel_killed_during_a_read(self):
        self.break_off(READ)

    def test_wheel_initiator_killed_during_a_write(self):
        """Our side of it stays usable and loses no descriptors."""
        ours = self.engine(arena=LARGE + MIB, registered=LARGE)
        other = self.engine(WHEEL, registered=MIB)
        self.assertMoved(other.write(ours.name, 0, ours.base, 100))
        descriptors = ours.descriptor_count()
        for _ in range(3):
            wheel = self.engine(WHEEL, arena=LARGE + MIB)
            wheel.fill(offset=0, length=LARGE, seed=1)
            ours.paint(offset=0, length=4096)
            before = ours.peek(100)
            wheel.begin("transfer", peer=ours.name, opcode=WRITE, local=0, remote=ours.base, length=LARGE)
            self.assertTrue(wire.wait_until(lambda: ours.peek(100) != before, step=0))
            wheel.kill()
        self.assertMoved(other.write(ours.name, 0, ours.base, 100))
        self.assertTrue(wire.wait_until(lambda: ours.descriptor_count() <= descriptors + 1), "connections of dead peers are kept")


class Misbehaviour(TestCase):
    """Peers that break the protocol. The transfer fails in time, and the next one to a good peer succeeds."""

    @classmethod
    def setUpClass(cls):
        cls.ours = cls.shared_engine(registered=64 * MIB, MC_TCP_STATUS_TIMEOUT_SEC="2", MC_SLICE_TIMEOUT="3")
        cls.wheel = cls.shared_engine(WHEEL, registered=MIB)

    def expect_failure(self, interfere, opcode, length, within=SOON):
        with wire.FakePeer(size=64 * MIB, interfere=interfere) as peer:
            outcome = self.ours.transfer(peer=peer.name, opcode=opcode, local=0, remote=peer.base, length=length)
            self.assertFailed(outcome, within)
        self.assertMoved(self.ours.write(self.wheel.name, 0, self.wheel.base, 100))

    def test_rejection_before_the_body_is_sent(self):
        def reject(_, connection, __):
            connection.sendall(wire.REJECTED)
            with contextlib.suppress(TimeoutError):  # the body stays unread
                connection.settimeout(0.5)
                connection.recv(1)
                time.sleep(0.5)
            return True

        self.expect_failure(reject, WRITE, 48 * MIB)
        self.expect_failure(reject, READ, 1000)

    def test_reset_in_the_body(self):
        def cut(_, connection, __):
            wire.read_exactly(connection, MIB)
            wire.reset(connection)
            return True

        self.expect_failure(cut, WRITE, 48 * MIB)

    def test_end_in_the_payload(self):
        def cut(_, connection, start):
            connection.sendall(wire.OK + bytes(wire.parse_header(start)[2] // 2))
            return True

        self.expect_failure(cut, READ, 100_000)

    def test_status_without_the_magic(self):
        def lie(_, connection, start):
            opcode, _, size = wire.parse_header(start)
            if opcode & wire.WRITE:
                wire.read_exactly(connection, size)
            connection.sendall(bytes(8) + bytes(size))
            return True

        self.expect_failure(lie, READ, 1000)
        self.expect_failure(lie, WRITE, 1000)

    def test_silence_instead_of_a_status(self):
        def wait(_, connection, __):
            wire.drain(connection)
            return True

        self.expect_failure(wait, READ, 1000)
        self.expect_failure(wait, WRITE, 1000)

    @better_than_upstream
    def test_silence_in_the_payload(self):
        def wait(_, connection, __):
            connection.sendall(wire.OK + bytes(100))
            wire.drain(connection)
            return True

        self.expect_failure(wait, READ, 1000, within=8)

    def test_status_cut_in_two(self):
        def dribble(_, connection, start):
            wire.read_exactly(connection, wire.parse_header(start)[2])
            connection.sendall(wire.OK[:3])
            time.sleep(0.1)
            connection.sendall(wire.OK[3:])
            return True

        with wire.FakePeer(interfere=dribble) as peer:
            self.assertMoved(self.ours.write(peer.name, 0, peer.base, 1000))

    def test_nobody_listens(self):
        with wire.FakePeer() as peer:
            self.assertMoved(self.ours.write(peer.name, 0, peer.base, 1000))
        self.assertFailed(self.ours.write(peer.name, 0, peer.base, 1000), SOON)
        self.assertMoved(self.ours.write(self.wheel.name, 0, self.wheel.base, 100))
