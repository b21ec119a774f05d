"""Notifications between the engine under test and the upstream package."""

import json

import wire
from harness import MIB, WHEEL, TestCase

TEXTS = [("request-1", "done"), ("ünïcödé", "\u2713 \"quoted\" \\ and \n a new line"), ("long", "x" * 100_000)]


class Notify(TestCase):
    @classmethod
    def setUpClass(cls):
        cls.ours = cls.shared_engine(registered=32 * MIB)
        cls.wheel = cls.shared_engine(WHEEL, registered=32 * MIB)

    def with_transfer(self, sender, receiver):
        """The message comes after the bytes, every time, and once."""
        for number in range(15):
            length = 4 * MIB + number
            sender.fill(offset=0, length=length, seed=number)
            receiver.paint(offset=64, length=length)
            receiver.begin("take_when_notified", seconds=20, offset=64, length=length, seed=number)
            outcome = sender.write(receiver.name, 0, receiver.base + 64, length, notify=[f"name {number}", f"text {number}"])
            self.assertMoved(outcome)
            messages, fault = receiver.finish()
            self.assertEqual(messages, [[f"name {number}", f"text {number}"]])
            self.assertEqual(fault, "", "the message overtook the bytes")
        self.assertEqual(receiver.take_notifications(), [])

    def alone(self, sender, receiver):
        for name, text in TEXTS:
            self.assertEqual(sender.notify(peer=receiver.name, name=name, text=text), 0)
            self.assertEqual(receiver.take_when_notified(seconds=20)[0], [[name, text]])
        for number in range(20):
            self.assertEqual(sender.notify(peer=receiver.name, name=str(number), text=""), 0)
        received = []
        while len(received) < 20:
            messages = receiver.take_when_notified(seconds=20)[0]
            self.assertTrue(messages, f"only {len(received)} of 20 messages have come")
            received += messages
        self.assertEqual(received, [[str(number), ""] for number in range(20)])

    def test_with_a_transfer_to_wheel(self):
        self.with_transfer(self.ours, self.wheel)

    def test_with_a_transfer_by_wheel(self):
        self.with_transfer(self.wheel, self.ours)

    def test_alone_to_wheel(self):
        self.alone(self.ours, self.wheel)

    def test_alone_by_wheel(self):
        self.alone(self.wheel, self.ours)

    def test_read_with_notify_to_wheel(self):
        self.wheel.fill(offset=0, length=5000, seed=9)
        self.ours.paint(offset=64, length=5000)
        self.assertMoved(self.ours.read(self.wheel.name, 64, self.wheel.base, 5000, notify=["read", "taken"]))
        self.assertIntact(self.ours, 64, 5000, 9)
        self.assertEqual(self.wheel.take_when_notified(seconds=20)[0], [["read", "taken"]])

    def test_failed_transfer_sends_no_message(self):
        self.assertFailed(self.ours.write(self.wheel.name, 0, self.wheel.base + 33 * MIB, 100, notify=["never", "sent"]), 10)
        self.assertMoved(self.ours.write(self.wheel.name, 0, self.wheel.base, 100, notify=["after", "sent"]))
        self.assertEqual(self.wheel.take_when_notified(seconds=20)[0], [["after", "sent"]])

    def test_replies_are_those_of_upstream(self):
        exchanges = [(wire.NOTIFY, {"name": "n", "notify_msg": "m"}), (wire.PROBE, {})]
        for kind, document in exchanges:
            with self.subTest(kind=kind):
                self.assertEqual(json.loads(wire.ask(self.ours.port, kind, document)), json.loads(wire.ask(self.wheel.port, kind, document)))
        self.assertEqual(self.ours.take_notifications(), [["n", "m"]])
        self.wheel.take_notifications()

    def test_probe_both_ways(self):
        self.assertEqual(self.wheel.probe(peer=self.ours.name), 0)
        self.assertEqual(self.ours.probe(peer=self.wheel.name), 0)
