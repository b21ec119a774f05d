"""A libtransfer_engine.so beside the upstream package over RDMA, in the lab: compare_rdma.py LIBRARY SCRATCH_DIRECTORY [options].

The two take turns in every round, and the processes of the one that is not measured are stopped meanwhile; ratios are formed round by
round. Both are called from Python, which costs both the same. Figures are medians with the smallest and largest of all rounds.
"""

import argparse
import os
import shutil
import signal
import statistics
import tempfile

import harness
from engine import READ, WRITE
from harness import WHEEL, Engine

KIB = 1 << 10
REGION, STRIDE = 4 * KIB, 8 * KIB
PART = 512
DEVICES = dict(entry.split("=") for entry in os.environ.get("RDMA_LAB_DEVICES", "").split() if entry.startswith("rxe"))
NAMES = sorted(DEVICES)


def spread(values):
    digits = 2 if statistics.median(values) < 10 else 0
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"


class Side:
    """Engines of one kind, which run only while they are measured: `with side:`."""

    def __init__(self, kind, nics, arena):
        self.engines = [Engine(kind, arena, {"TE_TEST_HOST": DEVICES[nic], "TE_TEST_NICS": nic, "MC_GID_INDEX": "1"}) for nic in nics]
        self.__exit__()

    def __enter__(self):
        for engine in self.engines:
            engine.signal(signal.SIGCONT)
        return self.engines

    def __exit__(self, *_):
        for engine in self.engines:
            engine.signal(signal.SIGSTOP)

    def close(self):
        for engine in self.engines:
            engine.close()


def compare_registration(library, counts, rounds, calls):
    print(f"{calls} regions of {REGION >> 10} KiB are registered and unregistered one by one, µs a call:")
    print(f"{'':10} {'regions':>8} {'ours':>20} {'upstream':>26} {'upstream / ours':>20}")
    arena = (max(counts) + calls) * STRIDE
    sides = [Side(library, NAMES[:1], arena), Side(WHEEL, NAMES[:1], arena)]
    there = 0
    for count in counts:
        # One by one: upstream takes longer for a batch over RDMA, with a thread for each region. In parts, each of which takes a while.
        for first in range(there, count, PART):
            for side in sides:
                with side as (engine,):
                    assert engine.register_each(first=first, count=min(PART, count - first), stride=STRIDE, length=REGION) == 0
        there = count
        seconds = [[], []]
        for _ in range(rounds):
            for side, of_side in zip(sides, seconds):
                with side as (engine,):
                    of_side.append(engine.time_registrations(first=count, count=calls, stride=STRIDE, length=REGION))
        for number, operation in enumerate(("register", "unregister")):
            ours, wheel = ([figures[number] / calls * 1e6 for figures in of_side] for of_side in seconds)
            ratios = [theirs / own for own, theirs in zip(ours, wheel)]
            print(f"{operation:10} {count:8} {spread(ours):>20} {spread(wheel):>26} {spread(ratios):>20}", flush=True)
    for side in sides:
        side.close()


def compare_transfers(library, sizes, batches, rounds, seconds):
    print(f"Transfers between {NAMES[0]} and {NAMES[1]}, MB/s:")
    print(f"{'':5} {'size':>8} {'batch':>5} {'ours':>18} {'upstream':>18} {'ours / upstream':>20}")
    arena = max(sizes) * max(batches)
    sides = [Side(library, NAMES[:2], arena), Side(WHEEL, NAMES[:2], arena)]
    for side in sides:
        with side as engines:
            for engine in engines:
                engine.fill(offset=0, length=arena, seed=1)
                assert engine.register(offset=0, length=arena) == 0
    for opcode, operation in ((READ, "read"), (WRITE, "write")):
        for size in sizes:
            for batch in batches:
                rates = [[], []]
                for turn in range(rounds + 1):
                    for side, of_side in zip(sides, rates):
                        with side as (initiator, target):
                            items = [[at * size, target.base + at * size, size] for at in range(batch)]
                            limit = seconds if turn else 0
                            count, spent = initiator.time_transfers(peer=target.name, opcode=opcode, items=items, seconds=limit)
                            if turn:  # the first one connects
                                of_side.append(count * batch * size / spent / 1e6)
                ratios = [ours / wheel for ours, wheel in zip(*rates)]
                print(f"{operation:5} {size >> 10:4} KiB {batch:5} {spread(rates[0]):>18} {spread(rates[1]):>18} {spread(ratios):>20}",
                      flush=True)
    for side in sides:
        side.close()


def numbers(text):
    return [int(part) for part in text.split(",") if part]


def main():
    parser = argparse.ArgumentParser(prog="tests/interop/run --compare LIBRARY")
    parser.add_argument("--regions", type=numbers, default=[256, 1024, 8192], help="how many are there already; none: skip this")
    parser.add_argument("--calls", type=int, default=64, help="regions in a round")
    parser.add_argument("--sizes", type=numbers, default=[64, 1024], help="KiB of a request; none: skip this")
    parser.add_argument("--batches", type=numbers, default=[1, 32], help="requests in a call")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="how long transfers are measured in a round")
    parser.add_argument("library")
    parser.add_argument("scratch")
    arguments = parser.parse_args()
    if len(NAMES) < 2:
        parser.error("needs two soft-RoCE devices: scripts/rdma-lab --devices rxe0,rxe1 -- tests/interop/run --compare …")
    logs = tempfile.mkdtemp(prefix="logs-", dir=arguments.scratch)
    harness.configure(arguments.library, logs)
    if arguments.sizes:
        sizes = [size * KIB for size in arguments.sizes]
        compare_transfers(arguments.library, sizes, arguments.batches, arguments.rounds, arguments.seconds)
    if arguments.regions:
        compare_registration(arguments.library, arguments.regions, arguments.rounds, arguments.calls)
    shutil.rmtree(logs)


if __name__ == "__main__":
    main()
