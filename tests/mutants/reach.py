"""Which simulations and tests reach a statement: those that do not cannot tell whether a mutant of it is there.

It is measured once, in a copy of the tree with marks (`marks.py`), and kept in `build/mutants/`, in a file for
simulations, which take minutes, and one for tests, which take half an hour. What it says of a source holds as long as
that source is the same, and what it says of a test as long as the file of that test is. Nobody notices that the
simulation changes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.mutants.copies import EACH_TAKE, ROOT, USUAL, Copy
from tests.mutants.marks import FOLDER, Marks, declared, take
from tests.mutants.noting import NOTES, note
from tests.mutants.operators import Mutant
from tests.mutants.packages import module_of, parts_of, selected_tests

SIMULATIONS = ROOT / "build/mutants/simulations.json"
TESTS = ROOT / "build/mutants/tests.json"
TAKES = "takes"  # how the runs are called that refuse each take of memory: "takes 0"
SEED = "seed"


@dataclass
class Reach:
    """Which runs reach which marks.

    Attributes:
        runs: "seed 3", "takes 0", or a test, with the seconds that it took.
        reached: by source, for each mark the runs that reach it, a bit each, as a hexadecimal number.
        sources, tests: digests of the sources, and of the files of tests, that were measured.
    """

    runs: dict[str, float] = field(default_factory=dict)
    reached: dict[str, list[str]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    tests: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Reach:
        """Read the last measurement."""
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def write(self, path: Path) -> None:
        """Keep it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)))

    def of(self, mutant: Mutant, source: str) -> list[str] | None:
        """The runs that reach what a mutant of this source changes, the quickest first; None: nobody knows."""
        if self.sources.get(mutant.file) != digest(source):
            return None
        number = Marks(source).number(mutant.start)
        if number < 0:
            return None
        found = int(self.reached[mutant.file][number], 16)
        runs = (run for index, run in enumerate(self.runs) if found >> index & 1)
        return sorted(runs, key=lambda run: (self.runs[run], run))

    def knows(self, file: str, root: Path) -> bool:
        """Whether the tests of this file are those that were measured."""
        path = root / file
        return path.exists() and self.tests.get(file) == digest(path.read_text())


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def measure(files: Iterable[str], seeds: int, jobs: int, parts: Iterable[str]) -> None:
    """Find what reaches each statement: build these sources with marks in a copy, and run seeds and tests there.

    Args:
        seeds: number of simulations.
        jobs: processes for tests.
        parts: "simulations" or "tests" or both.
    """
    files = list(files)
    with tempfile.TemporaryDirectory(prefix="inferd-reach-") as folder:
        copy = Copy(Path(folder) / "tree", more=True)
        places = mark(copy, files)
        print(f"{len(files)} sources have marks", flush=True)
        if "simulations" in parts:
            notes = note_simulations(copy, Path(folder) / "simulations", seeds)
            summed(copy.root, [notes], places, []).write(SIMULATIONS)
        if "tests" in parts:
            tests = sorted({test for file in files for test in selected_tests(copy.root, file)})
            with ThreadPoolExecutor(jobs) as pool:
                shares = [(Path(folder) / f"tests{number}", tests[number::jobs]) for number in range(jobs)]
                noted = list(pool.map(lambda share: note_tests(copy, *share), shares))
            summed(copy.root, noted, places, tests).write(TESTS)


def note_simulations(copy: Copy, folder: Path, seeds: int) -> Path:
    """Run them; the file of what each of them reaches."""
    hits, notes = folder / "reached", folder / "notes"
    hits.mkdir(parents=True)
    os.environ[FOLDER] = copy.environment[FOLDER] = str(hits)
    runs = {f"{SEED} {seed}": (*USUAL, "--jobs", "1", "--seeds", "1", "--first", str(seed)) for seed in range(seeds)}
    runs |= {f"{TAKES} {number}": arguments for number, arguments in enumerate(EACH_TAKE)}
    for name, arguments in runs.items():
        began = time.monotonic()
        if found := copy.simulate(arguments)[0]:
            print(f"left out, for the sound tree does not pass: {found}", flush=True)
            take(hits)
            continue
        note(notes, name, time.monotonic() - began)
    return notes


def note_tests(copy: Copy, folder: Path, tests: list[str]) -> Path:
    """Run them, one after another; the file of what each of them reaches."""
    hits, notes = folder / "reached", folder / "notes"
    hits.mkdir(parents=True)
    options = ("-q", "-p", "tests.mutants.noting", "-p", "no:cacheprovider", "-o", "timeout=300")
    command = [sys.executable, "-m", "pytest", *options, *tests]
    done = copy.run(command, **{FOLDER: str(hits), NOTES: str(notes)})
    print(done.stdout[-2000:], flush=True)
    return notes


def mark(copy: Copy, files: list[str]) -> dict[str, tuple[str, Marks]]:
    """Build them with marks; of each source its module and marks."""
    sound = {file: (copy.root / file).read_text() for file in files}
    modules: dict[str, list[str]] = {}
    for file in files:
        modules.setdefault(module_of(file, copy.root), [])
    places: dict[str, tuple[str, Marks]] = {}
    for module, parts in modules.items():
        parts += [part for part in parts_of(module, copy.root) if part in sound]
        count = 0
        for part in parts:
            marks = Marks(sound[part], count)
            (copy.root / part).write_text(marks.text())
            places[part] = module, marks
            count += marks.count
        main = copy.root / parts_of(module, copy.root)[0]
        main.write_text(main.read_text() + declared(module, count))
    copy.build_modules(list(modules), INFERD_BUILD="quick")
    for file, text in sound.items():
        (copy.root / file).write_text(text)
    return places


def summed(root: Path, notes: list[Path], places: dict[str, tuple[str, Marks]], tests: list[str]) -> Reach:
    """The notes of all runs, the other way round."""
    reach = Reach()
    found: dict[str, list[int]] = {file: [0] * marks.count for file, (_, marks) in places.items()}
    for line in itertools.chain.from_iterable(path.read_text().splitlines() for path in notes):
        noted = json.loads(line)
        bit = 1 << len(reach.runs)
        reach.runs[noted["run"]] = noted["seconds"]
        for file, (module, marks) in places.items():
            bits = int(noted["reached"].get(module, "0"), 16) >> marks.first & (1 << marks.count) - 1
            while bits:
                found[file][bits.bit_length() - 1] |= bit
                bits ^= 1 << bits.bit_length() - 1
    reach.reached = {file: [f"{each:x}" for each in counts] for file, counts in found.items()}
    reach.sources = {file: digest((root / file).read_text()) for file in places}
    reach.tests = {test: digest((root / test).read_text()) for test in tests}
    return reach
