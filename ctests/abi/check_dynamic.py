"""The shared library has the name that programs ask for, and needs nothing but the C library, its loader and the unwinder.

usage: check_dynamic.py LIBRARY
"""

import re
import subprocess
import sys

ALLOWED = {"libc.so.6", "libm.so.6", "libgcc_s.so.1"}
LOADER = re.compile(r"ld-linux.*\.so\.\d+")

output = subprocess.run(["readelf", "-d", "-W", sys.argv[1]], check=True, capture_output=True, text=True).stdout
soname = re.findall(r"\(SONAME\).*\[(.*)\]", output)
needed = re.findall(r"\(NEEDED\).*\[(.*)\]", output)
paths = re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", output)

print(f"SONAME {soname}, NEEDED {needed}")
faults = []
if soname != ["libtransfer_engine.so"]:
    faults.append("SONAME must be libtransfer_engine.so")
if "libc.so.6" not in needed:
    faults.append("libc.so.6 is not listed; this script no longer understands readelf")
faults += [f"must not need {name}" for name in needed if name not in ALLOWED and not LOADER.fullmatch(name)]
faults += [f"must not have a search path of its own: {path}" for path in paths]
if "(TEXTREL)" in output:
    faults.append("must not need text relocations")
sys.exit("\n".join(faults) or 0)
