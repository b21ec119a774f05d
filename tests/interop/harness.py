"""What the tests stand on: engines in processes of their own, and the test case that starts and ends them."""

import collections
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import unittest

import wire
from engine import READ, STUCK, WRITE

MIB = 1 << 20
WHEEL = "wheel"
ANSWER_LIMIT = 120  # seconds until a process that does not answer is given up

_settings = {}


def configure(subject, logs):
    """`subject`: the engine under test, a library's path or "wheel". `logs`: an empty directory."""
    _settings.update(subject=subject, logs=logs, started=0)


def subject():
    return _settings["subject"]


def checks_itself():
    """Whether upstream plays the part of the engine under test."""
    return subject() == WHEEL


def library_only(test):
    """A test of something that the upstream package has no call for."""

    @functools.wraps(test)
    def run(self):
        if checks_itself():
            self.skipTest("the upstream package has no call for this")
        test(self)

    return run


def better_than_upstream(test):
    """A test that upstream is known to fail: where the suite checks itself, it has to fail."""

    @functools.wraps(test)
    def run(self):
        if not checks_itself():
            return test(self)
        try:
            test(self)
        except AssertionError:
            return None
        raise AssertionError("upstream passes this test, which it is known to fail: the test does not see what it is for")

    return run


class Outcome(collections.namedtuple("Outcome", "result seconds text")):
    """How a transfer ended."""

    @property
    def ok(self):
        return self.result == 0

    @property
    def stuck(self):
        return self.result == STUCK

    def __str__(self):
        return f"{self.result or 'completed'} after {self.seconds:.2f} s {self.text}"


class Engine:
    """An engine in a process of its own. Its requests are the methods of engine.py's classes, called as if they were here."""

    def __init__(self, kind, arena=64 * MIB, environment=None):
        _settings["started"] += 1
        label = "wheel" if kind == WHEEL else "library"
        self.log = os.path.join(_settings["logs"], f"{_settings['started']:03}-{label}.log")
        mine, its = socket.socketpair()
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, os.path.join(os.path.dirname(os.path.abspath(__file__)), "engine.py"), str(its.fileno()),
                 str(os.getpid()), kind, str(arena)],
                pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **(environment or {})})
        its.close()
        self.channel = mine
        self.pending = b""
        self.name, self.port, self.base = self.finish()

    def begin(self, method, **arguments):
        """Sends a request; `finish` waits for its answer."""
        self.channel.sendall(json.dumps({"method": method, "arguments": arguments}).encode() + b"\n")

    def finish(self, seconds=ANSWER_LIMIT):
        end = time.monotonic() + seconds
        while b"\n" not in self.pending:
            if not select.select([self.channel], [], [], max(end - time.monotonic(), 0))[0]:
                raise AssertionError(f"{self.describe()} does not answer within {seconds} s")
            part = self.channel.recv(1 << 20)
            if not part:
                raise AssertionError(f"{self.describe()} has died")
            self.pending += part
        line, self.pending = self.pending.split(b"\n", 1)
        answer = json.loads(line)
        if "error" in answer:
            raise AssertionError(f"{self.describe()}: {answer['error']}")
        value = answer["value"]
        return Outcome(**value) if isinstance(value, dict) else value

    def has_answered(self, seconds):
        return b"\n" in self.pending or bool(select.select([self.channel], [], [], seconds)[0])

    def __getattr__(self, method):
        if method.startswith("_"):
            raise AttributeError(method)

        def call(**arguments):
            self.begin(method, **arguments)
            return self.finish()

        return call

    def write(self, peer, local, remote, length, notify=None):
        return self.transfer(peer=peer, opcode=WRITE, local=local, remote=remote, length=length, notify=notify)

    def read(self, peer, local, remote, length, notify=None):
        return self.transfer(peer=peer, opcode=READ, local=local, remote=remote, length=length, notify=notify)

    def peek(self, offset):
        """One byte of the arena, read from outside while the process is at work."""
        with open(f"/proc/{self.process.pid}/mem", "rb", buffering=0) as memory:
            memory.seek(self.base + offset)
            return memory.read(1)

    def alive(self):
        return self.process.poll() is None

    def signal(self, number):
        self.process.send_signal(number)

    def kill(self):
        if self.alive():
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(10)

    def close(self):
        self.kill()
        self.channel.close()

    def describe(self):
        with open(self.log, errors="replace") as log:
            tail = "".join(log.readlines()[-15:])
        status = f", ended with {self.process.returncode}" if not self.alive() else ""
        return f"process {self.process.pid} ({os.path.basename(self.log)}{status}; its last words: {tail!r})"


class TestCase(unittest.TestCase):
    """Engines started with `engine` live as long as the test; those of `shared_engine` as long as the class."""

    def engine(self, kind=None, arena=64 * MIB, registered=None, **environment):
        """Starts an engine and registers the first `registered` bytes of its arena."""
        return _start(self.addCleanup, kind, arena, registered, environment)

    @classmethod
    def shared_engine(cls, kind=None, arena=64 * MIB, registered=None, **environment):
        return _start(cls.addClassCleanup, kind, arena, registered, environment)

    def assertMoved(self, outcome, what="the transfer"):
        if not outcome.ok:
            self.fail(f"{what}: {outcome}")

    def assertRecovers(self, attempt, what="the transfer"):
        """The transfer succeeds, if need be after a pause: upstream's initiator refuses all work for a second once four of its
        transfers to a peer have ended badly."""
        outcome = attempt()
        for _ in range(5):
            if outcome.ok:
                return
            time.sleep(0.5)
            outcome = attempt()
        self.fail(f"{what}: {outcome}")

    def assertFailed(self, outcome, within, what="the transfer"):
        """The transfer must have ended with a failure, in time."""
        self.assertFalse(outcome.ok, f"{what} reports success")
        self.assertFalse(outcome.stuck, f"{what} does not end")
        self.assertLess(outcome.seconds, within, f"{what}: {outcome}")

    def assertIntact(self, engine, offset, length, seed, what=""):
        fault = engine.check(offset=offset, length=length, seed=seed)
        self.assertEqual(fault, "", what)

    def assertUntouched(self, engine, offset, length, what="memory that must not change"):
        self.assertTrue(engine.untouched(offset=offset, length=length), f"{what} has changed")

    def assertServes(self, engine, offset=0, message=b"good"):
        """A plain client can write to registered memory of the engine and read it back."""
        port = wire.fetch_descriptor(engine.port)["tcp_data_port"]
        with wire.dial(port) as connection:
            connection.sendall(wire.header(wire.WRITE | wire.V2, engine.base + offset, len(message)) + message)
            self.assertEqual(wire.read_exactly(connection, 8), wire.OK)
            connection.sendall(wire.header(wire.READ | wire.V2, engine.base + offset, len(message)))
            self.assertEqual(wire.read_exactly(connection, 8 + len(message)), wire.OK + message)


def _start(when_done, kind, arena, registered, environment):
    engine = Engine(kind or subject(), arena, environment)
    when_done(engine.close)
    if registered:
        result = engine.register(offset=0, length=registered)
        assert result == 0, f"registration: {result}"
    return engine
