"""Runs benchmark programs that have the command line of Mooncake's transfer_engine_bench, one as the target of the other, over TCP.

    benchmark.py PROGRAM          with itself
    benchmark.py PROGRAM wheel    with the package's own, as its target and as its initiator; for the package's Python
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

import wire

# The package counts as many bytes as all its threads have under way, so both sides are given the same figures.
SHARED = ["--protocol=tcp", "--metadata_server=P2PHANDSHAKE", "--threads=2", "--batch_size=4", "--block_size=65536", "--buffer_size=1048576"]
LIMIT = 90  # seconds until a program that is not ready, or does not end, is given up
NAMED = re.compile(r"(?:P2P handshake, listening on|^target is) (\S+)", re.MULTILINE)
COMPLETED = re.compile(r"Test completed: duration [\d.]+, batch count (\d+), throughput [\d.]+ MiB/s")


@contextlib.contextmanager
def target(program):
    """A target that serves; the name that it can be opened by."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([program, "--mode=target", "--local_server_name=127.0.0.1:12345", *SHARED], stdout=log, stderr=log)
        try:
            yield wait_until_ready(process, log)
            if process.poll() is not None:
                raise AssertionError(f"{program} has ended as the target with {process.returncode}: {read(log)}")
            process.send_signal(signal.SIGTERM)
            process.wait(LIMIT)
        finally:
            process.kill()
            process.wait()


def read(log):
    log.seek(0)
    return log.read()


def wait_until_ready(process, log):
    end = time.monotonic() + LIMIT
    while time.monotonic() < end and process.poll() is None:
        name = NAMED.search(read(log))
        if name:
            with contextlib.suppress(OSError, KeyError):
                if wire.fetch_descriptor(int(name[1].rsplit(":", 1)[1])).get("buffers"):
                    return name[1]
        time.sleep(0.05)
    raise AssertionError(f"{process.args[0]} is no target after {LIMIT} s: {read(log)}")


def run(initiator, target_program):
    with target(target_program) as name:
        for operation in "write", "read":
            arguments = ["--mode=initiator", "--local_server_name=127.0.0.1:12346", f"--segment_id={name}", "-operation", operation,
                         "--duration", "1", "--report_unit=MiB", *SHARED]
            result = subprocess.run([initiator, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT)
            completed = COMPLETED.search(result.stdout)
            if result.returncode != 0 or not completed or int(completed[1]) == 0:
                raise AssertionError(f"{initiator} as the initiator, {operation}: ended with {result.returncode}: {result.stdout}")
            print(f"{os.path.basename(os.path.dirname(initiator))} to {os.path.basename(os.path.dirname(target_program))}, "
                  f"{operation}: {completed[0]}")


def main():
    program = os.path.realpath(sys.argv[1])
    if sys.argv[2:] == ["wheel"]:
        import mooncake

        package = os.path.join(os.path.dirname(mooncake.__file__), "transfer_engine_bench")
        run(program, package)
        run(package, program)
    else:
        run(program, program)


if __name__ == "__main__":
    main()
