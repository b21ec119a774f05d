"""The library exports each name that upstream's declarations have: check_names.py DECLARED.o LIBRARY"""

import subprocess
import sys


def symbols(*arguments):
    lines = subprocess.run(["nm", *arguments], check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.split()[-1].split("@")[0] for line in lines if line.strip()}


def main():
    declared, library = sys.argv[1:]
    names = {name for name in symbols("--undefined-only", declared) if name.startswith(("_ZN8mooncake", "_ZNK8mooncake")) and "3useIJ" not in name}
    exported = symbols("--dynamic", "--defined-only", library)
    known = {
        "_ZN8mooncake14TransferEngine14submitTransferEmRKSt6vectorINS_9Transport15TransferRequestESaIS3_EE",
        "_ZN8mooncake14TransferEngine17getTransferStatusEmmRNS_9Transport14TransferStatusE",
    }
    if not known <= names:
        sys.exit(f"the compiler makes other names than upstream's tests look up: {known - names}")
    if len(names) < 90:
        sys.exit(f"only {len(names)} names are declared: the check does not see what it is for")
    missing = sorted(names - exported)
    for name in missing:
        print(subprocess.run(["c++filt", name], capture_output=True, text=True).stdout.strip(), file=sys.stderr)
    if missing:
        sys.exit(f"{library} does not export {len(missing)} of {len(names)} names")
    print(f"{len(names)} names")


if __name__ == "__main__":
    main()
