"""The shared library exports exactly the functions that the headers declare.

usage: check_symbols.py LIBRARY COMPILER INCLUDE_DIRECTORY HEADER...
"""

import re
import subprocess
import sys


def exported(library):
    output = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    return {line.split()[2] for line in output.splitlines()}


def declared(compiler, directory, header):
    """Names of functions that the header itself declares: identifiers before a parenthesis, outside of all brackets."""
    command = [compiler, "-E", "-x", "c", "-I", directory, f"{directory}/{header}"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    own, keep = [], False
    for line in text.splitlines():
        marker = re.match(r'# \d+ "([^"]*)"', line)
        if marker:
            keep = marker[1].endswith("/" + header)
        elif keep:
            own.append(line)
    names, depth, statement = set(), 0, ""
    for character in "\n".join(own):
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
        elif depth == 0 and character == ";":
            match = re.search(r"(\w+)\s*\(", statement)
            if match and "typedef" not in statement.split():
                names.add(match[1])
            statement = ""
        elif depth == 0:
            statement += character
    return names


def main():
    library, compiler, directory, *headers = sys.argv[1:]
    functions = set().union(*(declared(compiler, directory, header) for header in headers))
    if len(functions) < 27:
        sys.exit(f"only {len(functions)} functions were found in {headers}; this script no longer understands them")
    symbols = exported(library)
    for name in sorted(functions - symbols):
        print(f"declared, but not exported: {name}")
    for name in sorted(symbols - functions):
        print(f"exported, but not declared: {name}")
    if functions != symbols:
        sys.exit(1)
    print(f"{len(symbols)} functions, exported and declared")


main()
