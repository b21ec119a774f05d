"""What registering costs metadata servers, and what becomes of it when they fail."""

import json
import random
import sys
import time

import metadata_servers as servers
import wire
from backends import LENGTH, STRIDE, EtcdServer, OwnServer, PythonServer, RedisServer, ServerTestCase, Stub, with_each
from harness import MIB, better_than_upstream, library_only

MANY = 8192
ARENA = 100 * MIB
THREADS = 16


def regions(text):
    """Where the regions of a descriptor are, in order; nothing if there is no descriptor."""
    return [buffer["addr"] for buffer in json.loads(text)["buffers"]] if text else []


@with_each(OwnServer, RedisServer, EtcdServer, PythonServer, Stub)
class Publishing:
    """Two engines with many regions."""

    @better_than_upstream
    def test_callers_share_puts_and_one_alone_does_not_wait(self):
        server = self.server
        if not hasattr(server, "count_puts"):  # it does not tell: somebody in between counts
            server = servers.Relay(self.server.port)
            self.addCleanup(server.close)
        engines = [self.start(name, server=server, arena=ARENA) for name in ("one", "two")]
        for engine in engines:
            before = server.count_puts()
            self.assertEqual(engine.register_many(count=MANY, stride=STRIDE, length=LENGTH), 0)
            self.assertEqual(server.count_puts() - before, 1)
        engine, first = engines[0], MANY * STRIDE

        alone = 10
        before = server.count_puts()
        calls = engine.register_together(threads=1, each=alone, first=first, stride=STRIDE, length=LENGTH)
        self.assertEqual([result for _, result, _, _ in calls], [0] * alone)
        self.assertEqual(server.count_puts() - before, alone)
        first += alone * STRIDE

        each = 20
        before = server.count_puts()
        for engine in engines:
            engine.begin("register_together", threads=THREADS, each=each, first=first, stride=STRIDE, length=LENGTH)
        calls = [call for engine in engines for call in engine.finish()]
        self.assertEqual([result for _, result, _, _ in calls], [0] * (2 * THREADS * each))
        self.assertLessEqual(server.count_puts() - before, len(calls) / 4)
        first += THREADS * each * STRIDE

        # Who looks as soon as a call has returned finds what it has registered.
        for engine in engines:
            calls = engine.register_together(threads=THREADS, each=2, first=first, stride=STRIDE, length=LENGTH, uri=self.server.uri,
                                             key=f"mooncake/ram/{engine.name}")
            self.assertEqual([(result, visible) for _, result, _, visible in calls], [(0, True)] * (THREADS * 2))
        first += THREADS * 2 * STRIDE

        for engine in engines:
            found = regions(self.server.get(f"mooncake/ram/{engine.name}"))
            expected = {engine.base + offset for offset in range(0, first, STRIDE)}
            if engine is engines[1]:
                expected -= {engine.base + offset for offset in range(MANY * STRIDE, (MANY + alone) * STRIDE, STRIDE)}
            self.assertEqual((set(found), len(found)), (expected, len(expected)))
            other = engines[engine is engines[0]]
            other.fill(offset=0, length=LENGTH, seed=3)
            last = first - STRIDE
            engine.paint(offset=last, length=LENGTH)
            self.assertMoved(other.write(engine.name, 0, engine.base + last, LENGTH))
            self.assertIntact(engine, last, LENGTH, 3)


@with_each(OwnServer, RedisServer, EtcdServer)
class Death:
    """The server is killed while two engines register, and comes back on its port: redis and ours without data, etcd with."""

    @library_only
    def test_what_was_registered_is_there_when_the_server_is_back(self):
        engines = [self.start(name, arena=32 * MIB) for name in ("one", "two")]
        fixed, threads, each = 256, 8, 16
        for engine in engines:
            self.assertEqual(engine.register_many(count=fixed, stride=STRIDE, length=LENGTH), 0)
            engine.begin_churn(threads=threads, each=each, first=fixed * STRIDE, stride=STRIDE, length=LENGTH)
        for engine in engines:
            self.assertTrue(wire.wait_until(lambda: engine.watch_churn()[0] > 200, 60), "nothing is registered")
            self.assertEqual(engine.watch_churn()[1], 0, "calls have failed although the server is there")
        self.server.kill()
        for engine in engines:
            self.assertTrue(wire.wait_until(lambda: engine.watch_churn()[1] > 2 * threads, 60), "no call has failed without the server")

        # One has nothing more to say, and heals by itself; the other one goes on.
        present = {"one": engines[0].end_churn()}
        self.server.start()
        start = time.monotonic()

        def is_healed(engine):
            found = regions(self.server.get(f"mooncake/ram/{engine.name}"))
            expected = [engine.base + offset for offset in [*range(0, fixed * STRIDE, STRIDE), *present[engine.name]]]
            return (self.server.get(f"mooncake/rpc_meta/{engine.name}") is not None and len(found) == len(expected)
                    and set(found) == set(expected))

        self.assertTrue(wire.wait_until(lambda: is_healed(engines[0]), 60), "an idle engine does not heal")
        idle = time.monotonic() - start
        failures = engines[1].watch_churn()[1]
        calls = engines[1].watch_churn()[0]
        self.assertTrue(wire.wait_until(lambda: engines[1].watch_churn()[0] - calls > 200, 60), "calls still fail")
        present["two"] = engines[1].end_churn()
        self.assertTrue(wire.wait_until(lambda: is_healed(engines[1]), 60), "a busy engine does not heal")
        _, failures_at_the_end, longest = engines[1].watch_churn()
        print(f"{type(self).__name__}: idle engine healed {idle:.2f} s after the server was back; longest call {longest:.2f} s; "
              f"{failures} failed calls, {failures_at_the_end - failures} of them after that", file=sys.stderr)
        self.assertLess(longest, 30)

        for engine, other in (engines, engines[::-1]):
            other.fill(offset=0, length=LENGTH, seed=7)
            engine.paint(offset=STRIDE, length=LENGTH)
            self.assertMoved(other.write(engine.name, 0, engine.base + STRIDE, LENGTH))
            self.assertIntact(engine, STRIDE, LENGTH, 7)
            # Nothing is half done: what failed can be registered.
            for offset in range(fixed * STRIDE, (fixed + threads * each) * STRIDE, STRIDE):
                result = engine.register(offset=offset, length=LENGTH)
                self.assertEqual(result, -7 if offset in present[engine.name] else 0)


class BadServer(ServerTestCase):
    """A server that is late, closes connections before or after the work, and fails."""

    make = Stub.make

    @library_only
    def test_32_threads_end_within_bounds_and_what_succeeded_is_there(self):
        engine, peer = self.start("engine"), self.start("peer", registered=MIB)
        threads, each = 32, 8
        random.seed(5)

        def interfere(method, key):
            dice = random.random()
            if dice < 0.03:
                time.sleep(8)  # longer than any call waits for a server
                return "drop"
            if dice < 0.3:
                time.sleep(random.random() / 5)
            return "drop" if dice > 0.9 else "drop late" if dice > 0.8 else 500 if dice > 0.7 else None

        self.server.interfere = interfere
        self.addCleanup(setattr, self.server, "interfere", None)
        key = "mooncake/ram/engine"
        calls = engine.register_together(threads=threads, each=each, first=0, stride=STRIDE, length=LENGTH, uri=self.server.undisturbed,
                                         key=key)
        self.assertEqual(len(calls), threads * each)
        self.assertLess(max(seconds for _, _, seconds, _ in calls), 30)
        succeeded = {offset for offset, result, _, _ in calls if result == 0}
        failed = {offset for offset, result, _, _ in calls if result != 0}
        longest = max(seconds for _, _, seconds, _ in calls)
        print(f"{len(succeeded)} of {len(calls)} registrations succeeded; the longest took {longest:.2f} s", file=sys.stderr)
        self.assertTrue(succeeded and failed, "the server is not as bad as it should be")
        self.assertEqual([offset for offset, result, _, visible in calls if result == 0 and not visible], [])

        self.server.interfere = None
        expected = {engine.base + offset for offset in succeeded}
        self.assertTrue(wire.wait_until(lambda: set(regions(self.server.get(key))) == expected, 60), "what failed stays published")
        for offset in failed:
            self.assertEqual(engine.register(offset=offset, length=LENGTH), 0)
        for offset in (min(succeeded), min(failed)):
            self.assertMoved(peer.write("engine", 0, engine.base + offset, 100))
