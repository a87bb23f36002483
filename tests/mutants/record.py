"""The outcome of each mutant: a line of JSON each, and a table of them for people."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.mutants.equivalent import Proof
from tests.mutants.operators import Mutant, mutants_of
from tests.mutants.packages import package_of
from tests.mutants.trial import SAME, SIMULATION, SURVIVED, TESTS, VOID, Verdict

PROVED = "proved"  # to do the same


@dataclass
class Entry:
    """A trial. The last one of a mutant counts, and its first tells what was found before tests were added.

    Attributes:
        key: of the mutant.
        draw: the number by which it was drawn.
        commit: of the tree.
    """

    key: str
    file: str
    line: int
    function: str
    operator: str
    before: str
    after: str
    outcome: str
    found: str = ""
    seeds: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    draw: int = 0
    commit: str = ""

    @property
    def package(self) -> str:
        return package_of(self.file)

    @property
    def diff(self) -> str:
        """For people."""
        lines = [f"-{line}" for line in self.before.splitlines()] + [f"+{line}" for line in self.after.splitlines()]
        return "\n".join(lines)


def entry(mutant: Mutant, verdict: Verdict, draw: int, commit: str) -> Entry:
    """The entry of a trial."""
    about = {name: getattr(mutant, name) for name in ("key", "file", "line", "function", "operator", "before", "after")}
    return Entry(**about, **asdict(verdict), draw=draw, commit=commit)


class Record:
    """A file to which each trial adds a line, so that a run may end at any time; the next one goes on from it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = list(read(path)) if path.exists() else []

    def last(self) -> dict[str, Entry]:
        """By key: the trial that counts."""
        return {each.key: each for each in self.entries}

    def first(self) -> dict[str, Entry]:
        """By key: the trial before tests were added for what it tells."""
        return {each.key: each for each in reversed(self.entries)}

    def add(self, added: Entry) -> None:
        """Append the entry; it is in the file when this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torn = self.path.exists() and self.path.read_bytes()[-1:] not in (b"", b"\n")
        with self.path.open("a") as file:
            file.write(("\n" if torn else "") + json.dumps(asdict(added)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.entries.append(added)


def read(path: Path) -> Iterator[Entry]:
    """The trials of a file; a line that was cut short when a run ended is none."""
    for line in path.read_text().splitlines():
        try:
            yield Entry(**json.loads(line))
        except (json.JSONDecodeError, TypeError):
            continue


def outcome_of(each: Entry, proofs: Iterable[Proof]) -> str:
    """With what people have proved."""
    if each.outcome != SAME and any(proof.covers(each) for proof in proofs):
        return PROVED
    return each.outcome


class Row:
    """The sums of a package."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys((VOID, SAME, PROVED, SIMULATION, TESTS, SURVIVED), 0)
        self.seconds = 0.0
        self.seeds = 0

    def add(self, outcome: str, each: Entry) -> None:
        self.counts[outcome] += 1
        self.seconds += sum(each.seconds.values())
        self.seeds += each.seeds

    @property
    def real(self) -> int:
        """The number of mutants that differ from the original."""
        return self.counts[SIMULATION] + self.counts[TESTS] + self.counts[SURVIVED]

    def cells(self) -> str:
        counts = self.counts
        both = counts[SIMULATION] + counts[TESTS]
        drawn = self.real + counts[SAME] + counts[PROVED]
        return (
            f"{drawn} | {counts[SAME]} | {counts[PROVED]} | {counts[SIMULATION]} | {counts[TESTS]} | {counts[SURVIVED]}"
            f" | {share(counts[SIMULATION], self.real)} | {share(both, self.real)} | {self.seeds} | {self.seconds:.0f}"
        )


def listed(entries: list[Entry]) -> list[str]:
    """The lines of a section with these."""
    lines = []
    for each in sorted(entries, key=lambda each: (each.file, each.line)):
        lines += [f"`{each.file}`:{each.line}, `{each.function}`", "", "```diff", each.diff, "```", ""]
    return lines or ["None.", ""]


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else ""


HEAD = """\
# Mutants of the native code

Written by `make mutants`, from `mutants.jsonl`, which has each trial. A mutant is a change of one place of a function,
made by a program (`tests/mutants/operators.py`) and drawn by a number, never chosen: the order of all mutants of a
package is that of digests of the number and the mutant.

A mutant is built alone into a copy of the tree, with the assertions of its module. Where its extension has the same
bytes as before, it is equivalent (*same code*). Otherwise simulations run, by one process, for less than a minute of
CPU: seeds, and few calls, again for each fourth take of memory in them, which fails. Where they find nothing, the tests
run that import its package or speak of it (`tests/mutants/packages.py`). Of both only those run that reach the
statement, as far as that has been measured (`tests/mutants/reach.py`), and of the tests as many, the quickest first, as
take 90 seconds. A failing test counts when it fails twice with the mutant and passes without it. *Proved* are those
that change nothing which can be seen, each with its reason (`tests/mutants/equivalent.py`). What does not compile is no
mutant.

The seconds are those of a machine which others use too.
"""
COLUMNS = (
    "| package | drawn | same code | proved | found by simulation | by tests | survived | simulation | both | seeds "
    "| seconds |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def gone(record: Record, root: Path) -> set[str]:
    """The keys of the survivors that nobody can try again: their sources have no such mutant any more."""
    survivors = [each for each in record.last().values() if each.outcome == SURVIVED]
    files = {each.file for each in survivors if (root / each.file).exists()}
    there = {mutant.key for file in files for mutant in mutants_of(file, (root / file).read_text())}
    return {each.key for each in survivors} - there


def table(record: Record, proofs: Iterable[Proof], gone: Collection[str] = ()) -> str:
    """For people, in Markdown.

    Args:
        gone: the keys of survivors that count among the first trials only.
    """
    proofs = tuple(proofs)
    parts = [HEAD, f"Python {platform.python_version()}, {platform.machine()}.\n"]
    survived, left = [], []
    for title, entries in (("", record.last()), ("## At the first trial of each", record.first())):
        rows: dict[str, Row] = {}
        total = Row()
        for each in entries.values():
            outcome = outcome_of(each, proofs)
            if not title and outcome == SURVIVED and each.key in gone:
                left.append(each)
                continue
            for row in (rows.setdefault(each.package, Row()), total):
                row.add(outcome, each)
            if not title and outcome == SURVIVED:
                survived.append(each)
        if title:
            parts += [title, "", "Before tests and rules were added for those that survived.", ""]
        parts += [COLUMNS, *(f"| `{package}` | {row.cells()} |" for package, row in sorted(rows.items()))]
        parts += [f"| **all** | {total.cells()} |", ""]
    parts += ["## Survivors", ""]
    parts += listed(survived)
    if left:
        parts += ["## Survivors that are gone", ""]
        parts += ["The sources have no such mutant any more: they changed there after the trial.", "", *listed(left)]
    parts += ["## Proved equivalent", ""]
    used = [proof for proof in proofs if any(proof.covers(each) for each in record.last().values())]
    parts += [f"- `{proof.file}`, `{proof.function}`: `{proof.change}`: {proof.why}" for proof in used] or ["None."]
    return "\n".join(parts) + "\n"
