"""Which lines and branches of the native code simulations reach, by package and by file.

    python tools/coverage.py [--seeds 200] [--jobs 2] [--report TABLE.md] [--missed MISSED.txt]

The sources are copied to $INFERD_SANITIZE/coverage, by default under the temporary directory (as `tools/sanitize.sh`
does), built there with INFERD_BUILD=coverage, and simulated as mutants are: seeds, and few calls, again for each take
of memory in them, which fails. A second run builds only what has changed.

gcov counts lines and branches of the C that Cython has made. Each C line belongs to the statement of the source that
the comment above it names. A statement is reached when one of its C lines was executed. Branches are those of
conditions and loops of the source; what Cython adds, such as the check of every call for an exception, is left out, and
so is the wrapper that unpacks the arguments of a Python function. The code of a .pxd is in many modules: it is reached
when it is in one of them. Left out is, too, what no input can decide: assertions, which release builds do not compute;
the defaults of arguments; how many values are unpacked; and whether an iteration over a Python object, which Cython
writes for lists, for tuples and for iterators, is over one or another of these. Of the copies that Cython makes of a
`finally`, one for each way out, the decisions are counted once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("_native", "backends/python", "backends/identity")
NEEDED = ("inferd_client", "tests/simulation", "tests/native")  # by the simulations
ORIGIN = re.compile(r'/\* "inferd/((?:_native|backends)/[\w/]+\.(?:pyx|pxd))":(\d+)$')
END = re.compile(r"\s*/\* (?:function exit code|Python wrapper|#### Code section)")
DECISION = re.compile(r"\s*(?:\} else )?(?:if|while|for|switch) \(|\s*case |\s*default:")
OF_CYTHON = re.compile(r"__PYX_ERR|\bPy[A-Z_]|__Py[a-z]|_Py[A-Z]|CYTHON_|__pyx_(?:err|exc|lineno|gilstate)")
# arguments, unpacked values, generators, and the three ways of an iteration
OF_CYTHON_TOO = re.compile(
    r"__pyx_nargs|__pyx_optional_args|__pyx_cur_scope|\bvalues\[\d+\]|\bexc_type\b|\bindex ?=|unlikely\(size != \d"
    r"|\(likely\(!__pyx_t_\d+\)|unlikely\(!__pyx_t_\d+\)|unlikely\(__pyx_t_\d+ == \d+\)\) break"
)
ITERATION = re.compile(r"__pyx_t_\d+ >= __pyx_temp\) break;")  # of lists, and again of tuples
TEMPORARY = re.compile(r"__pyx_(?:t_|L|lineno)\d*|__pyx_fuse_\d+")
UNDECIDED = re.compile(r"\s*(?:assert_that\(|assert_move\(|(?:cdef|cpdef|def)\b[^=]*?\w+\()")
DEFINITION = re.compile(r"\s*(?:cdef|cpdef|def|class|ctypedef)\b[^=]*?(?:\(|:$)|\s*@|\s*(?:from|import|cimport)\b")
FUNCTION = re.compile(r"(\s*)(?:cdef|cpdef|def)\b[^=]*?(\w+)\(")
# Forks end by os._exit, which writes no counts.
DRIVER = """
import ctypes, os, sys
os._exit = ctypes.CDLL(None).exit
from tests.mutants.copies import EACH_TAKE
from tests.simulation.command import main
sys.argv[1:] = EACH_TAKE[int(sys.argv[2])] if sys.argv[1] == "take" else sys.argv[1:]
sys.exit(main())
"""
TAKES = 2  # kinds of simulations in which each take fails


@dataclass
class Statement:
    """One line of a source, from which C was made."""

    count: int = 0
    branches: dict[tuple[int, int], int] = field(default_factory=dict)  # by decision: how often it was taken


ITERATED = 1 << 20  # the place of the end of an iteration
Statements = dict[str, dict[int, Statement]]  # by file and line


def main() -> int:
    """0 if every simulation kept the rules."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--report", type=Path, help="write the table there, in Markdown")
    parser.add_argument("--missed", type=Path, help="write the lines that are never reached there")
    parser.add_argument("--keep", action="store_true", help="simulate nothing: report the last run")
    arguments = parser.parse_args()
    tree = Path(os.environ.get("INFERD_SANITIZE", Path(tempfile.gettempdir()) / "inferd-sanitize")) / "coverage"
    code = 0
    if not arguments.keep:
        build(tree)
        code = simulate(tree, arguments.seeds, arguments.jobs)
    statements = collect(tree)
    report = table(statements)
    print(report)
    if arguments.report:
        arguments.report.write_text(report + "\n")
    if arguments.missed:
        arguments.missed.write_text("\n".join(missed(statements)) + "\n")
    return code


def build(tree: Path) -> None:
    """Bring the copy up to date, and forget what was counted before."""
    tree.mkdir(parents=True, exist_ok=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout
    pack = ["tar", "--create", "--null", "--files-from=-", "--ignore-failed-read", "--warning=no-failed-read"]
    packed = subprocess.run(pack, cwd=ROOT, check=True, capture_output=True, input=names).stdout
    subprocess.run(["tar", "--extract", "--directory", tree], check=True, input=packed)
    made = ROOT / "build/cython-release"  # the same C, compiled in another way
    if made.exists():
        (tree / "build/cython-coverage").mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "--archive", "--update", f"{made}/.", tree / "build/cython-coverage"], check=True)
    modules = ",".join(
        ".".join((*prefix, *path.relative_to(tree).with_suffix("").parts))
        for prefix, packages in ((("inferd",), PACKAGES), ((), NEEDED))
        for package in packages
        for path in (tree / package).rglob("*.pyx")
        if (ROOT / path.relative_to(tree)).exists()
    )
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    environment = os.environ | {"INFERD_BUILD": "coverage", "INFERD_ONLY": modules}
    subprocess.run(command, cwd=tree, check=True, env=environment)
    for counts in tree.rglob("*.gcda"):
        counts.unlink()


def simulate(tree: Path, seeds: int, jobs: int) -> int:
    """Run the simulations; return 0 if every one kept the rules."""
    environment = os.environ | {
        "PYTHONHASHSEED": "0",
        "OPENBLAS_NUM_THREADS": "1",
        "INFERD_SIMULATION": "fixed",
        "PYTHONPATH": str(tree),
    }
    program = ("setarch", "--addr-no-randomize", sys.executable, "-c", DRIVER)
    drawn = ("--seeds", str(seeds), "--jobs", str(jobs), "--keep-going", "--no-shrink")
    runs = [drawn, *(("take", str(number)) for number in range(TAKES))]
    codes = [subprocess.run([*program, *run], cwd=tree, env=environment, check=False).returncode for run in runs]
    return int(any(codes))


def collect(tree: Path) -> Statements:
    """gcov's counts of every module, by statements of the sources; modules not loaded count as not reached."""
    statements: Statements = defaultdict(lambda: defaultdict(Statement))
    for notes in sorted(tree.rglob("*.gcno")):
        source = tree / "build/cython-coverage" / str(notes).partition("cython-coverage/")[2]
        source = source.with_suffix(".c")
        name = str(source).partition("cython-coverage/inferd/")[2]
        is_left = not (ROOT / name).with_suffix(".pyx").exists()  # of a module that has gone since an earlier run
        if is_left or not source.exists() or not name.startswith(PACKAGES):
            continue
        command = ["gcov", "--json-format", "--stdout", "--branch-probabilities", str(notes)]
        done = subprocess.run(command, cwd=tree, check=True, capture_output=True, text=True)
        origins = origins_of(source.read_text())
        for line in done.stdout.splitlines():
            for file in json.loads(line)["files"]:
                if file["file"].endswith(source.name):
                    add(statements, file["lines"], origins)
    return statements


@dataclass(frozen=True)
class Origin:
    """Where a line of C comes from.

    Attributes:
        file, line: of the source.
        place: its number among the decisions of that statement; negative if Cython added the decision.
    """

    file: str
    line: int
    place: int


def origins_of(text: str) -> dict[int, Origin]:
    """By the number of a line of C."""
    origins: dict[int, Origin] = {}
    places: dict[tuple[str, int], int] = {}
    copies: dict[tuple[str, int, str], list[int]] = {}  # the places of what was seen before
    for (file, line), visit in visits_of(text):
        decided = [number for number, code in visit if is_decision(code)]
        if line in undecided(file):
            decided = []
        told = "\n".join(code.strip() for number, code in visit if decided and number <= decided[-1])
        key = (file, line, TEMPORARY.sub("T", told))
        if key not in copies:
            first = places.get((file, line), 0)
            copies[key] = list(range(first, first + len(decided)))
            places[file, line] = first + len(decided)
        place_of = dict(zip(decided, copies[key], strict=True))
        for number, code in visit:
            place = ITERATED if number in place_of and ITERATION.search(code) else place_of.get(number, -1)
            origins[number] = Origin(file, line, place)
    return origins


def is_decision(code: str) -> bool:
    """Whether a line of C decides something that the source has decided."""
    return DECISION.match(code) is not None and OF_CYTHON.search(code) is None and OF_CYTHON_TOO.search(code) is None


def visits_of(text: str) -> Iterator[tuple[tuple[str, int], list[tuple[int, str]]]]:
    """The runs of lines of C, with their numbers, that come from one line of a source."""
    current: tuple[str, int] | None = None
    visit: list[tuple[int, str]] = []
    in_comment = False
    for number, code in enumerate(text.splitlines(), 1):
        found = ORIGIN.search(code)
        if found or END.match(code):
            if current is not None:
                yield current, visit
            current, visit = (found[1], int(found[2])) if found else None, []
            in_comment = in_comment or found is not None
        if not in_comment and current is not None:
            visit.append((number, code))
        if in_comment and code.rstrip().endswith("*/"):
            in_comment = False
    if current is not None:
        yield current, visit


@cache
def undecided(file: str) -> frozenset[int]:
    """The lines of a source with assertions, and with the arguments of functions: no input decides anything there."""
    found, depth = set(), 0
    for number, line in enumerate((ROOT / file).read_text().splitlines(), 1):
        if depth or UNDECIDED.match(line):
            found.add(number)
            depth += line.count("(") - line.count(")")
    return frozenset(found)


def add(statements: Statements, lines: list[dict[str, Any]], origins: dict[int, Origin]) -> None:
    """gcov's counts of one module."""
    for line in lines:
        origin = origins.get(line["line_number"])
        if origin is None:
            continue
        statement = statements[origin.file][origin.line]
        statement.count += line["count"]
        if origin.place < 0:
            continue
        for index, branch in enumerate(line["branches"]):
            key = (origin.place, index)
            statement.branches[key] = statement.branches.get(key, 0) + branch["count"]


class Sums:
    """The sums of a file or a package."""

    def __init__(self) -> None:
        self.lines = self.reached = self.branches = self.taken = 0

    def add(self, file: str, statements: dict[int, Statement]) -> None:
        text = (ROOT / file).read_text().splitlines()
        for number, statement in statements.items():
            if is_definition(text, number):
                continue
            self.lines += 1
            self.reached += statement.count > 0
            self.branches += len(statement.branches)
            self.taken += sum(count > 0 for count in statement.branches.values())

    def row(self, name: str) -> str:
        return (
            f"| {name} | {self.reached} of {self.lines} | {share(self.reached, self.lines)} "
            f"| {self.taken} of {self.branches} | {share(self.taken, self.branches)} |"
        )


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else ""


def is_definition(text: list[str], number: int) -> bool:
    """Whether a line only declares something."""
    # line 1: what Cython does for the whole module
    return not 1 < number <= len(text) or DEFINITION.match(text[number - 1]) is not None


def table(statements: Statements) -> str:
    """By package and file."""
    packages: dict[str, Sums] = defaultdict(Sums)
    files: dict[str, Sums] = defaultdict(Sums)
    total = Sums()
    for file, lines in sorted(statements.items()):
        for sums in (files[file], packages[str(Path(file).parent)], total):
            sums.add(file, lines)
    rows = ["| | lines | | branches | |", "|---|---|---|---|---|"]
    for package, sums in sorted(packages.items()):
        rows.append(sums.row(f"**`{package}`**"))
        rows += [
            files[file].row(f"`{Path(file).name}`")
            for file in sorted(files)
            if str(Path(file).parent) == package and files[file].lines
        ]
    return "\n".join([*rows, total.row("**all**")])


def missed(statements: Statements) -> Iterator[str]:
    """Statements that are never reached, and conditions that always go the same way, by file and function."""
    for file, lines in sorted(statements.items()):
        text = (ROOT / file).read_text().splitlines()
        function = ""
        yield f"== {file}"
        for number, line in enumerate(text, 1):
            if found := FUNCTION.match(line):
                function = found[2]
            statement = lines.get(number)
            if statement is None or is_definition(text, number):
                continue
            if statement.count == 0:
                yield f"{file}:{number}: {function}: never: {line.strip()}"
            elif any(count == 0 for count in statement.branches.values()):
                ways = "".join("+" if count else "-" for _, count in sorted(statement.branches.items()))
                yield f"{file}:{number}: {function}: {ways}: {line.strip()}"


if __name__ == "__main__":
    sys.exit(main())
