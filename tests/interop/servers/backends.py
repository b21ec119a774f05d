"""The metadata servers that the tests of this directory run with, and what they have in common."""

import os
import re
import unittest

import harness
import metadata_servers as servers
from harness import MIB, WHEEL, TestCase

STRIDE, LENGTH = 8192, 4096


def mask(text):
    """A descriptor without the time of its encoding."""
    return re.sub(rb'"timestamp":"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}"', b'"timestamp":"-"', text)


class ServerTestCase(TestCase):
    """`server` is what the engines of the class are told of."""

    make = None  # starts a server
    wheel_speaks = True  # whether upstream's package does; it ends the process where it does not

    @classmethod
    def setUpClass(cls):
        if harness.checks_itself() and not cls.wheel_speaks:
            raise unittest.SkipTest("upstream's package does not speak to this server")
        if cls.make is servers.OwnServer and harness.checks_itself() and "TE_PROGRAM" not in os.environ:
            raise unittest.SkipTest("TE_PROGRAM does not say where te is")
        cls.server = cls.make()
        cls.addClassCleanup(cls.server.close)

    def start(self, name, kind=None, server=None, **arguments):
        """An engine of that name."""
        server = server or self.server
        environment = {"TE_TEST_METADATA": server.uri, "TE_TEST_NAME": name, "MC_TCP_BIND_ADDRESS": "127.0.0.1", **server.environment}
        return self.engine(kind, **{"arena": 16 * MIB, **environment, **arguments})

    def reaches(self, initiator, target):
        """Whether an engine can write to another one, which can be: not found, or not reached."""
        try:
            return initiator.write(target.name, 0, target.base, 100).ok
        except AssertionError as error:
            if "cannot open" not in str(error):
                raise
            return False

    def pairs(self, *names):
        """Two engines whose names begin so, as (what they are, first, second), in each combination that there is."""
        kinds = [("ours and ours", None, None)]
        if self.wheel_speaks:
            kinds += [("ours and upstream's", None, WHEEL), ("upstream's and ours", WHEEL, None)]
        for what, first, second in kinds:
            with self.subTest(what=what, names=names):
                # Names of their own, since they leave their keys: to destroy an engine of upstream takes a second.
                name = [f"{name} of {what}" for name in names]
                engines = self.start(name[0], first, registered=8 * MIB), self.start(name[1], second, registered=8 * MIB)
                yield what, *engines
                for engine in engines:
                    engine.close()


class OwnServer:
    make = servers.OwnServer


class RedisServer:
    make = servers.RedisServer
    wheel_speaks = False


class RedisWithPassword(RedisServer):
    make = servers.RedisWithPassword


class EtcdServer:
    make = servers.EtcdServer


class EtcdWithPassword(EtcdServer):
    make = servers.EtcdWithPassword
    wheel_speaks = False


class PythonServer:
    make = servers.PythonServer


class Stub:
    """As the server in upstream's master."""

    make = servers.Stub


def with_each(*backends):
    """Makes the decorated class's tests those of each server: a class for each in the module."""

    def decorate(tests):
        import sys

        module = sys.modules[tests.__module__]
        for backend in backends:
            name = f"{tests.__name__}With{backend.__name__}"
            setattr(module, name, type(name, (backend, tests, ServerTestCase), {"__module__": tests.__module__, "__doc__": tests.__doc__}))
        return tests

    return decorate
