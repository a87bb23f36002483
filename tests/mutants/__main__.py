"""Draws mutants of the native code, one after another, and records who finds each: `make mutants HOURS=2`.

    python -m tests.mutants [--package PACKAGE ...] [--hours 1] [--draw 1] [--again OUTCOME] [--measure] [--alone]
                            [--join] [--table]

With --alone simulations judge alone, while they are worked on. With --join what they have said becomes part of the
record; tests judge what they have not found.

The packages take turns. A run may be killed at any time: the next one goes on from the record. The tree must be freshly
built; it is copied to a temporary folder, and never touched.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.mutants.copies import ROOT, Copy
from tests.mutants.equivalent import PROOFS
from tests.mutants.operators import Mutant
from tests.mutants.packages import drawn, package_of, sources
from tests.mutants.reach import SIMULATIONS, Reach, measure
from tests.mutants.reach import TESTS as TESTED
from tests.mutants.record import Entry, Record, entry, gone, outcome_of, table
from tests.mutants.trial import STEADY_CPU, SURVIVED, TESTS, VOID, Trials, Unsound

RECORD = ROOT / "bench/results/mutants.jsonl"
ALONE = ROOT / "build/mutants/alone.jsonl"  # what simulations find by themselves, while they are worked on
MEASURED = 60  # seeds
PARTS = ("simulations", "tests")
ENOUGH = 40  # of each package, unless more are asked for


def main() -> int:
    """0 unless the sound tree does not pass."""
    parser = argparse.ArgumentParser(
        prog="tests.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--package", nargs="*", default=[], help="such as memory or backends/python; none: all")
    parser.add_argument("--hours", type=float, default=1.0, help="begin no other mutant after so long")
    parser.add_argument("--draw", type=int, default=1, help="the number that says in which order they are drawn")
    parser.add_argument("--count", type=int, default=ENOUGH, help="of each package that are other programs")
    parser.add_argument("--cpu", type=float, default=STEADY_CPU, help="seconds of CPU for the simulations of each")
    parser.add_argument(
        "--again", choices=[SURVIVED, TESTS, "all"], help="what the record has with this outcome, once more"
    )
    parser.add_argument("--alone", action="store_true", help=f"ask simulations only; recorded in {ALONE.name} instead")
    parser.add_argument("--join", action="store_true", help=f"try no others than those of {ALONE.name}, by tests")
    parser.add_argument("--record", type=Path, default=RECORD, help="lines of JSON; the table lies beside it")
    parser.add_argument(
        "--measure", nargs="*", choices=PARTS, help="first, which of so many seeds, or tests, or both reach what"
    )
    parser.add_argument("--jobs", type=int, default=1, help="that run tests while they are measured")
    parser.add_argument("--seeds", type=int, default=MEASURED, help="that are measured")
    parser.add_argument("--table", action="store_true", help="only write the table anew")
    arguments = parser.parse_args()
    record = Record(arguments.record)
    if not arguments.table:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the folder goes, and processes end
        try:
            run(record, arguments)
        except Unsound as error:
            print(f"the sound tree does not pass, so that nothing can be told of mutants: {error}")
            return 2
    arguments.record.with_suffix(".md").write_text(table(record, PROOFS, gone(record, ROOT)))
    return 0


def run(record: Record, arguments: argparse.Namespace) -> None:
    """Try mutants until the time is over or there are enough."""
    until = time.monotonic() + arguments.hours * 3600
    commit = described()
    files = {
        package: each
        for package, each in sources(ROOT).items()
        if not arguments.package or {package, package.removeprefix("_native/")} & set(arguments.package)
    }
    if not files:
        sys.exit(f"there is no such package; there are {', '.join(sources(ROOT))}")
    if arguments.measure is not None:
        measured = [file for each in files.values() for file in each]
        measure(measured, arguments.seeds, arguments.jobs, arguments.measure or PARTS)
    with tempfile.TemporaryDirectory(prefix="inferd-mutants-") as folder:
        copy = Copy(Path(folder), more=True)
        parts = PARTS[:1] if arguments.alone else PARTS[1:] if arguments.join else PARTS
        trials = Trials(copy, Reach.read(SIMULATIONS), Reach.read(TESTED), parts)
        if PARTS[0] in parts:
            trials.prepare(arguments.cpu)
            print(f"each mutant is tried by {trials.seeds} seeds", flush=True)
        queues = [drawn(copy.root, each, arguments.draw) for each in files.values()]
        kept = Record(ALONE) if arguments.alone else record
        said = Record(ALONE).last() if arguments.join else {}
        if arguments.join:
            turns = joined(record, said, queues)
        elif arguments.again:
            turns = again(record, queues, arguments.again)
        else:
            turns = round_robin(kept, queues, arguments.count)
        for mutant in turns:
            verdict = trials.try_mutant(mutant)
            if mutant.key in said:
                verdict.seeds = said[mutant.key].seeds
                verdict.seconds = said[mutant.key].seconds | verdict.seconds
            kept.add(entry(mutant, verdict, arguments.draw, commit))
            about = f"{mutant.file}:{mutant.line} {mutant.operator}: {verdict.outcome} {verdict.found}"
            print(about.rstrip(), flush=True)
            if kept is record:
                arguments.record.with_suffix(".md").write_text(table(record, PROOFS, gone(record, ROOT)))
            elif verdict.outcome == SURVIVED:
                print(f"  {mutant.before}\n  -> {mutant.after}", flush=True)
            if time.monotonic() > until:
                return


def round_robin(record: Record, queues: list[list[Mutant]], count: int) -> Iterator[Mutant]:
    """The next mutants that the record lacks, packages in turn, until `count` differ from the original."""
    waiting = [iter(queue) for queue in queues]
    while waiting:
        for queue in list(waiting):
            known = record.last()
            mutant = next((each for each in queue if each.key not in known), None)
            if mutant is None or tried(record, package_of(mutant.file)) >= count:
                waiting.remove(queue)
            else:
                yield mutant


def tried(record: Record, package: str) -> int:
    """How many mutants of a package are known that are other programs."""
    outcomes = [outcome_of(each, PROOFS) for each in record.last().values() if each.package == package]
    return sum(outcome in ("simulation", "tests", SURVIVED) for outcome in outcomes)


def again(record: Record, queues: list[list[Mutant]], outcome: str) -> Iterator[Mutant]:
    """The mutants that the record has with this outcome, as far as the sources still have them."""
    known = record.last()
    for queue in queues:
        for mutant in queue:
            entry = known.get(mutant.key)
            if entry and entry.outcome != VOID and outcome in ("all", outcome_of(entry, PROOFS)):
                yield mutant


def joined(record: Record, said: dict[str, Entry], queues: list[list[Mutant]]) -> Iterator[Mutant]:
    """Record what simulations have found alone; the mutants that they have not found, and that are not recorded."""
    known = record.last()
    for key, each in said.items():
        if each.outcome != SURVIVED and (key not in known or known[key].outcome in (TESTS, SURVIVED)):
            record.add(each)
    for queue in queues:
        yield from (each for each in queue if each.key in said and each.key not in record.last())


def described() -> str:
    """The commit of the tree."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
