"""Counts the lines of code of a source tree by package, and how many of them are repeated elsewhere.

python tools/measure_tree.py [FOLDER]; to compare: git archive REVISION | tar -x -C FOLDER

A line counts as repeated if it is part of six consecutive lines that occur in another place, too. Blank lines,
comments, imports and generated code do not count.
"""

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("inferd", "_native", "server", "backends", "inferd_client", "bench", "tests", "tools", "examples")
SUFFIXES = {".py", ".pyx", ".pxd", ".pyi", ".c", ".h"}
RUN = 6


def sources(package: Path) -> Iterator[Path]:
    """Hand-written files."""
    for path in sorted(package.rglob("*")):
        generated = "_pb2" in path.name or (path.suffix == ".c" and path.with_suffix(".pyx").exists())
        if path.suffix in SUFFIXES and path.is_file() and not generated:
            yield path


def code_of(path: Path) -> list[str]:
    """The file's lines of code, white space folded."""
    lines = (re.sub(r"\s+", " ", line.strip()) for line in path.read_text(errors="replace").splitlines())
    return [line for line in lines if len(line) > 2 and not line.startswith(("#", "import ", "from ", "cimport "))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path())
    root = parser.parse_args().folder
    files, lines = Counter[str](), Counter[str]()
    runs: dict[tuple[str, ...], list[tuple[str, Path, int]]] = defaultdict(list)
    for package in PACKAGES:
        for path in sources(root / package):
            code = code_of(path)
            files[package] += 1
            lines[package] += len(code)
            for first in range(len(code) - RUN + 1):
                runs[tuple(code[first : first + RUN])].append((package, path, first))
    places = (place for found in runs.values() if len(found) > 1 for place in found)
    repeated = {(package, path, first + more) for package, path, first in places for more in range(RUN)}
    again = Counter(package for package, _, _ in repeated)
    print("| package | files | lines of code | repeated lines |\n|---|---:|---:|---:|")
    for package in PACKAGES:
        print(f"| `{package}` | {files[package]} | {lines[package]:,} | {again[package]} |")
    print(f"| all | {files.total()} | {lines.total():,} | {again.total()} |")


if __name__ == "__main__":
    main()
