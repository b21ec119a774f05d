"""The example in README.md is the file in examples/, and works between two processes.

usage: run_readme_example.py SOURCE_DIRECTORY PREFIX COMPILER DIRECTORY
"""

import ctypes
import os
import pathlib
import re
import signal
import subprocess
import sys

source_directory, prefix, compiler, directory = sys.argv[1:]
source = pathlib.Path(source_directory, "examples", "hello.c")
readme = pathlib.Path(source_directory, "README.md").read_text()

blocks = re.findall(r"^```c\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
if blocks != [source.read_text()]:
    sys.exit(f"README.md must hold one block of C, and it must be {source}")

os.makedirs(directory, exist_ok=True)
program = f"{directory}/hello"
subprocess.run(
    [compiler, "-std=gnu99", "-Wall", "-Wextra", "-Werror", "-pedantic", source, f"-I{prefix}/include", f"-L{prefix}/lib",
     "-ltransfer_engine", "-o", program],
    check=True,
)
environment = {**os.environ, "LD_LIBRARY_PATH": f"{prefix}/lib"}
die_with_parent = lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL)
target = subprocess.Popen([program], stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=die_with_parent)
try:
    name = target.stdout.readline().strip()
    subprocess.run([program, name], check=True, timeout=60, env=environment)
    output, _ = target.communicate(timeout=60)
finally:
    target.kill()
if target.returncode != 0 or output != "received: Hello from the other process\n":
    sys.exit(f"the target ended with {target.returncode} and said {output!r}")
print(f"{name} {output}", end="")
