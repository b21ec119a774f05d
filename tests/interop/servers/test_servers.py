"""Engines that find each other through a metadata server: every server, and upstream's package as the peer where it speaks to it."""

import json
import re

from backends import (EtcdServer, EtcdWithPassword, OwnServer, PythonServer, RedisServer, RedisWithPassword, ServerTestCase, Stub, mask,
                      with_each)
from engine import READ, WRITE
from harness import MIB, WHEEL, better_than_upstream, checks_itself
from metadata_servers import escape

NAMES = [("nodeA:12345", "nodeB"), ("with space", "group/node"), ("ünïcödé ✓", "a/b c/%41+&=#?\"<\\>'~ü:1")]
ALL_CHARACTERS = "".join(chr(code) for code in range(0x20, 0x7f) if chr(code) != "/") + "ü✓\U0001f600"


@with_each(OwnServer, RedisServer, RedisWithPassword, EtcdServer, EtcdWithPassword, PythonServer, Stub)
class Servers:
    def test_bytes_and_notifications_go_both_ways(self):
        for names in NAMES:
            for what, first, second in self.pairs(*names):
                for number, (initiator, target) in enumerate([(first, second), (second, first)]):
                    for opcode in (WRITE, READ):
                        for size in (1, 4097, MIB + 1):
                            seed = number * 1000 + opcode * 100 + size % 100
                            source, sink = ((initiator, 0), (target, 4 * MIB)) if opcode == WRITE else ((target, 0), (initiator, 4 * MIB))
                            source[0].fill(offset=0, length=size, seed=seed)
                            sink[0].paint(offset=4 * MIB, length=size)
                            remote = target.base + (4 * MIB if opcode == WRITE else 0)
                            local = 0 if opcode == WRITE else 4 * MIB
                            self.assertMoved(initiator.transfer(peer=target.name, opcode=opcode, local=local, remote=remote, length=size))
                            self.assertIntact(*sink, size, seed, f"{what}, {size} bytes")
                    self.assertMoved(initiator.write(target.name, 0, target.base, 100, notify=["with", "ü"]))
                    self.assertEqual(target.take_when_notified(seconds=20)[0], [["with", "ü"]], what)
                    self.assertEqual(initiator.notify(peer=target.name, name="alone", text="ü"), 0)
                    self.assertEqual(target.take_when_notified(seconds=20)[0], [["alone", "ü"]], what)
                    self.assertEqual(initiator.probe(peer=target.name), 0, what)

    def test_keys_and_texts_are_those_of_the_format(self):
        for name in ("nodeA:12345", "group/ü"):
            engine = self.start(name)
            rpc, segment = f"mooncake/rpc_meta/{name}", f"mooncake/{name}" if "/" in name else f"mooncake/ram/{name}"
            newline, quoted = self.server.newline, json.dumps(name).encode()
            location = b'{"ip_or_host_name":"127.0.0.1","rpc_port":%d}' % engine.port
            self.assertEqual(self.server.get(rpc), location + newline)

            def expect(*regions):
                buffers = b",".join(b'{"addr":%d,"length":%d,"name":%s}' % (engine.base + at, length, quoted) for at, length in regions)
                text = self.server.get(segment)
                port = json.loads(text)["tcp_data_port"]
                # What upstream's package writes of other transports, and where it says for itself that its data port is.
                for more in (b'"rdma_server_name":"",', b'"tcp_data_host":"127.0.0.1",'):
                    text = text.replace(more, b"")
                self.assertEqual(mask(text), b'{"buffers":[%s],"name":%s,"protocol":"tcp","tcp_data_port":%d,"tcp_proto_version":2,'
                                 b'"timestamp":"-"}' % (buffers, quoted, port) + newline)

            expect()
            self.assertEqual(engine.register(offset=MIB, length=4096), 0)
            expect((MIB, 4096))
            self.assertEqual(engine.register(offset=0, length=5), 0)
            expect((MIB, 4096), (0, 5))
            self.assertEqual(engine.unregister(offset=MIB), 0)
            expect((0, 5))
            before = self.server.get(segment)
            self.assertNotEqual(engine.register(offset=4, length=1), 0)
            self.assertEqual(self.server.get(segment), before)
            engine.destroy()
            self.assertEqual((self.server.get(rpc), self.server.get(segment)), (None, None))
            engine.close()

    def test_clusters_do_not_see_each_other(self):
        for cluster in ("clusterX", "clusterX/"):
            inside = self.start("nodeA", MC_METADATA_CLUSTER_ID=cluster, registered=MIB)
            self.assertIn(b'"addr":%d,' % inside.base, self.server.get("mooncake/clusterX/ram/nodeA"))
            self.assertIn(b'"rpc_port":%d}' % inside.port, self.server.get("mooncake/clusterX/rpc_meta/nodeA"))
            self.assertIsNone(self.server.get("mooncake/ram/nodeA"))
            beside = self.start("nodeB", WHEEL if self.wheel_speaks else None, MC_METADATA_CLUSTER_ID="clusterX", registered=MIB)
            self.assertMoved(beside.write("nodeA", 0, inside.base, 100))
            outside = self.start("nodeC", registered=MIB)
            self.assertFalse(self.reaches(outside, inside))
            for engine in (inside, beside, outside):
                engine.destroy()
                engine.close()

    @better_than_upstream
    def test_a_peer_comes_back_under_its_name(self):
        """An engine that has its segment open reaches what is there now; so do notifications."""
        ours = self.start("initiator", registered=MIB)
        for kind in [None, WHEEL] if self.wheel_speaks and not checks_itself() else [None]:
            for _ in range(2):
                peer = self.start("comes and goes", kind, registered=MIB)
                ours.fill(offset=0, length=1000, seed=peer.port)
                peer.paint(offset=64, length=1000)
                self.assertRecovers(lambda: ours.write(peer.name, 0, peer.base + 64, 1000))
                self.assertIntact(peer, 64, 1000, peer.port)
                self.assertEqual(ours.notify(peer=peer.name, name="to", text=str(peer.port)), 0)
                self.assertEqual(peer.take_when_notified(seconds=20)[0], [["to", str(peer.port)]])
                peer.destroy()
                peer.close()

    @better_than_upstream
    def test_a_killed_predecessor_is_in_nobodys_way(self):
        """What it left is neither an obstacle, where a server refuses to write some keys again, nor taken over."""
        old = self.start("killed", registered=MIB)
        old.kill()
        self.assertIn(b'"addr":%d,' % old.base, self.server.get("mooncake/ram/killed"))
        # Not an address of the successor by chance: what the predecessor had is where nobody has anything.
        self.server.put("mooncake/ram/killed", self.server.get("mooncake/ram/killed").replace(b'"addr":%d,' % old.base, b'"addr":4096,'))
        new = self.start("killed")
        self.assertEqual(json.loads(self.server.get("mooncake/ram/killed"))["buffers"], [])
        self.assertEqual(new.register(offset=MIB, length=MIB), 0)
        buffers = json.loads(self.server.get("mooncake/ram/killed"))["buffers"]
        self.assertEqual([buffer["addr"] for buffer in buffers], [new.base + MIB])
        self.assertIn(b'"rpc_port":%d}' % new.port, self.server.get("mooncake/rpc_meta/killed"))
        peer = self.start("peer", registered=MIB)
        self.assertMoved(peer.write("killed", 0, new.base + MIB, 100))


class Escaping(ServerTestCase):
    """Requests on the wire beside those of upstream's package: its server compares keys as they are escaped."""

    make = Stub.make

    def record(self, kind, name):
        """What an engine writes and removes: (method, target, text with what differs between engines masked)."""
        with self.server.lock:
            self.server.requests.clear()
        engine = self.start(name, kind)
        self.assertEqual((engine.register(offset=0, length=MIB), engine.unregister(offset=0)), (0, 0))
        engine.destroy()
        base, port = engine.base, engine.port
        engine.close()
        with self.server.lock:
            requests = list(self.server.requests)
        masked = []
        for method, target, text in requests:
            if method != "GET":
                text = mask(text).replace(b'"addr":%d,' % base, b'"addr":-,').replace(b'"rpc_port":%d}' % port, b'"rpc_port":-}')
                for more in (b'"rdma_server_name":"",', b'"tcp_data_host":"127.0.0.1",'):
                    text = text.replace(more, b"")
                masked.append((method, target, re.sub(rb'"tcp_data_port":\d+,', b'"tcp_data_port":-,', text)))
        return masked

    def test_requests_are_those_of_upstream(self):
        for name in ("nodeA:12345", "group/node", ALL_CHARACTERS, "/" + ALL_CHARACTERS, "%41"):
            with self.subTest(name=name):
                ours, wheel = self.record(None, name), self.record(WHEEL, name)
                self.assertEqual(ours, wheel)
                segment = f"mooncake/{name}" if "/" in name else f"mooncake/ram/{name}"
                self.assertEqual({target for _, target, _ in ours},
                                 {f"/metadata?key={escape(key)}" for key in (segment, f"mooncake/rpc_meta/{name}")})
