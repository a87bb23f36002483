"""What `python -m tests.simulation` does: runs simulations, many (`--seeds 1000`), or one with its story (`--seed 42`).

A seed that fails is told, then shrunk to fewer calls, clients, models and features, and its story is written.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import platform
import resource
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from tests.simulation.scales import drawn_scale
from tests.simulation.shrink import TRIALS, shrunk
from tests.simulation.simulation import Outcome, Scale
from tests.simulation.workers import MOST, Sandbox, jobs, outcomes

HOUR_NS = 3_600_000_000_000


def main() -> int:
    """0 if every rule was kept."""
    parser = argparse.ArgumentParser(prog="tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--these", type=int, nargs="+", help="these seeds, and no others")
    parser.add_argument("--seed", type=int, help="only this one, with its story")
    parser.add_argument("--random", action="store_true", help="one more seed, that nobody knows")
    parser.add_argument(
        "--takes",
        type=int,
        nargs="?",
        const=1,
        help="have each take of memory of few calls fail, or each Nth",
    )
    parser.add_argument("--seconds", type=float, default=0, help="go on with further seeds for so long")
    parser.add_argument("--cpu", type=float, default=math.inf, help="begin no other seed after so many seconds of CPU")
    parser.add_argument("--most", type=float, default=MOST, help="one that uses more seconds of CPU does not end")
    parser.add_argument("--twice", action="store_true", help="run each seed again: the same must happen")
    parser.add_argument("--jobs", type=int, default=jobs(), help="at a time")
    parser.add_argument("--keep-going", action="store_true", help="after a seed that fails")
    parser.add_argument("--no-shrink", action="store_true", help="tell what a seed has found, not its story")
    parser.add_argument("--scale", type=json.loads, default={}, help="a Scale as JSON, as a shrunk seed prints it")
    parser.add_argument("--wide", action="store_true", help="each seed draws its own scale, of any size")
    parser.add_argument("--crowd", type=int, default=0, help="calls of a crowd in each, beside those of the clients")
    parser.add_argument("--trials", type=int, default=TRIALS, help="to make a seed that fails smaller, at most")
    parser.add_argument("--report", type=Path, help="write figures there")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    sandbox = Sandbox(arguments.most)
    scale = Scale(**{key: tuple(value) if isinstance(value, list) else value for key, value in arguments.scale.items()})

    def scale_of(seed: int) -> Scale:
        drawn = drawn_scale(seed) if arguments.wide else scale
        return replace(drawn, crowd=arguments.crowd) if arguments.crowd else drawn

    if arguments.seed is not None:
        outcome = sandbox.run(arguments.seed, scale_of(arguments.seed), keep=0)
        print(outcome.log)
        print(f"seed {outcome.seed}: {outcome.problem or 'every rule was kept'}; {outcome.calls} calls")
        return bool(outcome.problem)
    if arguments.takes:
        return each_take(sandbox, arguments.first, scale, arguments.takes)
    totals, failed = Totals(), []
    for outcome in outcomes(sandbox, seeds(arguments), scale_of, arguments.jobs):
        totals.add(outcome)
        if arguments.twice and sandbox.run(outcome.seed, scale_of(outcome.seed), keep=0).story != outcome.story:
            outcome.problem = outcome.problem or "something else happens when it runs again"
        if outcome.problem:
            failed.append(outcome)
            print(f"seed {outcome.seed}: {outcome.problem}", flush=True)
            if not arguments.keep_going:
                break
    print(totals)
    if arguments.report:
        arguments.report.write_text(json.dumps(totals.figures(), indent=1) + "\n")
    if failed and not (arguments.keep_going or arguments.no_shrink):
        tell(sandbox, failed[0], scale_of(failed[0].seed), arguments.trials)
    return bool(failed)


def seeds(arguments: argparse.Namespace) -> Iterator[int]:
    """The seeds that the arguments ask for."""
    if arguments.these:
        yield from (seed for seed in arguments.these if cpu_of_forks() < arguments.cpu)
        return
    until = time.monotonic() + arguments.seconds
    seed = arguments.first
    while (seed < arguments.first + arguments.seeds or time.monotonic() < until) and cpu_of_forks() < arguments.cpu:
        yield seed
        seed += 1
    if arguments.random:
        seed = secrets.randbits(48)
        print(f"random seed {seed}", flush=True)
        yield seed


def cpu_of_forks() -> float:
    """Seconds of CPU that simulations have used, which have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def each_take(sandbox: Sandbox, seed: int, scale: Scale, every: int) -> int:
    """A simulation for each take of memory in it, or each Nth, which is refused; 0 if every rule was kept in all."""
    failed = refused = 0
    take = 1 - every
    while True:
        take += every
        outcome = sandbox.run(seed, replace(scale, fails_at=take))
        if outcome.problem:
            print(f"take {take} of seed {seed}: {outcome.problem}", flush=True)
            failed += 1
        elif outcome.failed_takes == 0:
            print(f"{refused} takes of memory were refused in turn, {failed} of them broke a rule")
            return bool(failed)
        refused += 1


def tell(sandbox: Sandbox, outcome: Outcome, scale: Scale, trials: int) -> None:
    """Tell what a seed has found, in as few calls as possible."""
    small, found = shrunk(sandbox, outcome, scale, trials)
    changed = {key: value for key, value in asdict(small).items() if value != getattr(Scale(), key)}
    print(f"\nThe story of seed {found.seed}, shrunk to {found.calls} calls:\n{found.log}\n\n{found.problem}\n")
    print(f"again: python -m tests.simulation --seed {found.seed} --scale '{json.dumps(changed)}'")


class Totals:
    """Over all simulations."""

    def __init__(self) -> None:
        self.simulations = self.calls = self.crowd = self.cancelled = self.streamed = self.hostile = 0
        self.batches = self.switches = self.failed_takes = 0
        self.virtual_ns = 0
        self.statuses: Counter[int] = Counter()
        self.began = time.monotonic()

    def add(self, outcome: Outcome) -> None:
        self.simulations += 1
        self.calls += outcome.calls
        self.crowd += outcome.crowd
        self.cancelled += outcome.cancelled
        self.streamed += outcome.streamed
        self.hostile += outcome.hostile
        self.batches += outcome.batches
        self.switches += outcome.switches
        self.failed_takes += outcome.failed_takes
        self.virtual_ns += outcome.virtual_ns
        self.statuses.update(outcome.statuses)

    def figures(self) -> dict[str, object]:
        """The figures as they are recorded."""
        cpu = cpu_of_forks()
        return {
            "simulations": self.simulations,
            "calls": self.calls,
            "of crowds": self.crowd,
            "on streams": self.streamed,
            "cancelled": self.cancelled,
            "hostile peers": self.hostile,
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "batches of Python models": self.batches,
            "changes of threads": self.switches,
            "refusals of memory": self.failed_takes,
            "virtual hours": round(self.virtual_ns / HOUR_NS, 2),
            "seconds": round(time.monotonic() - self.began, 1),
            "seconds of CPU": round(cpu, 1),
            "calls per minute of CPU": round(self.calls / max(cpu, 0.001) * 60),
            "python": platform.python_version(),
            "machine": platform.machine(),
        }

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.figures().items())
