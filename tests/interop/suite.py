"""Runs the tests: suite.py wheel|LIBRARY SCRATCH_DIRECTORY TESTS_DIRECTORY [unittest arguments]. Ends with the line `N passed, N failed`."""

import os
import shutil
import signal
import sys
import tempfile
import time
import unittest

import harness

LONGEST_RUN = 900  # seconds; each wait is bounded on its own, this catches what was overlooked
SLOW = 5  # seconds from which on a test's duration is printed


class Result(unittest.TextTestResult):
    """Counts what passed, which unittest does not, and tells which tests take long."""

    passed = 0

    def startTest(self, test):
        super().startTest(test)
        self.start = time.monotonic()

    def stopTest(self, test):
        super().stopTest(test)
        seconds = time.monotonic() - self.start
        if seconds > SLOW:
            self.stream.writeln(f"    ({seconds:.0f} s)")

    def addSuccess(self, test):
        super().addSuccess(test)
        self.passed += 1

    def addExpectedFailure(self, test, error):
        super().addExpectedFailure(test, error)
        self.passed += 1


def main():
    subject, scratch, directory, *arguments = sys.argv[1:]
    sys.path.insert(0, directory)
    logs = tempfile.mkdtemp(prefix="logs-", dir=scratch)
    harness.configure(subject, logs)
    signal.signal(signal.SIGALRM, lambda *_: (print(f"still running after {LONGEST_RUN} s: given up", file=sys.stderr), os._exit(1)))
    signal.alarm(LONGEST_RUN)
    names = [] if any(not argument.startswith("-") for argument in arguments) and "-k" not in arguments else ["discover", "-s", directory]
    runner = unittest.TextTestRunner(verbosity=2, descriptions=False, resultclass=Result)
    program = unittest.main(module=None, argv=["interop", *names, *arguments], testRunner=runner, exit=False)
    result = program.result
    failed = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    good = failed == 0 and result.passed > 0
    if good:
        shutil.rmtree(logs)
    else:
        print(f"what the engines said: {logs}")
    skipped = f", {len(result.skipped)} skipped" if result.skipped else ""
    print(f"{result.passed} passed, {failed} failed{skipped}", flush=True)
    os._exit(0 if good else 1)


if __name__ == "__main__":
    main()
