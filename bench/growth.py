"""How cost grows with the work: curves that have to stay flat.

    python -m bench.growth [--only pool|models] [--record]

Each curve is printed with the figures of the last record beside it and with its slope: the power of the size by which
its cost grows. What costs the same for each byte, or for each model, has a slope of 0. CPU time is that of the process,
so other work on the machine disturbs it less than it would the clock; page faults are exact.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import math
import os
import platform
import resource as system
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from _native.memory import resource
from backends.loader import BackendLoader
from server.engine.config import Options
from server.engine.engine import Engine
from server.memory import usable_memory

RESULTS = Path(__file__).parent / "results" / "growth.json"
PAGE = RESULTS.with_suffix(".md")
MIB = 1 << 20
SIZES = (1 << 10, 64 << 10, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
MODELS = (100, 200, 400, 800)
MODEL = """
backend: "identity"
input { name: "x" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "y" data_type: TYPE_INT64 dims: [ -1 ] }
"""


@dataclass(frozen=True)
class Point:
    """One size and what it costs, by unit."""

    size: int
    cost: float
    faults: float = 0.0


@dataclass(frozen=True)
class Curve:
    """One axis of growth."""

    name: str
    title: str
    unit: str
    points: tuple[Point, ...]

    @property
    def slope(self) -> float:
        """Least squares of the logarithms."""
        xs = [math.log(point.size) for point in self.points]
        ys = [math.log(max(point.cost, 1e-9)) for point in self.points]
        x, y = sum(xs) / len(xs), sum(ys) / len(ys)
        above = sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True))
        return above / sum((a - x) ** 2 for a in xs)


def pool() -> Curve:
    """Blocks that are taken, written, read by a copy and given back, after a burst of another size filled the pool."""
    resource.keep_at_most(max(128 * MIB, usable_memory() // 8))
    points = []
    for size in SIZES:
        burst = [resource.host().take(7 * MIB) for _ in range(32)]
        burst.clear()
        rounds = max(5, min(2000, 256 * MIB // size))
        _use(size)
        faults, started = system.getrusage(system.RUSAGE_THREAD).ru_minflt, time.thread_time_ns()
        for _ in range(rounds):
            _use(size)
        spent = time.thread_time_ns() - started
        faults = system.getrusage(system.RUSAGE_THREAD).ru_minflt - faults
        points.append(Point(size, spent / rounds / size, faults / rounds))
    resource.trim()
    return Curve("pool", "a block written and given back after 32 x 7 MiB", "ns of CPU a byte", tuple(points))


def _use(size: int) -> None:
    block = resource.host().take(size)
    ctypes.memset(block.address, 1, size)


def models() -> Curve:
    """Identity models loaded at the start of an engine."""
    return Curve("models", "start of an engine", "ms of CPU a model", tuple(map(_start, MODELS)))


def _start(count: int) -> Point:
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            path = Path(folder, f"m{number}")
            (path / "1").mkdir(parents=True)
            (path / "config.pbtxt").write_text(MODEL)

        async def start() -> float:
            engine = Engine([Path(folder)], BackendLoader(), Options())
            before = time.process_time()
            await engine.start()
            spent = time.process_time() - before
            await engine.close()
            return spent

        return Point(count, 1000 * asyncio.run(start()) / count)


CURVES: dict[str, Callable[[], Curve]] = {"pool": pool, "models": models}


def lines(curve: Curve, before: dict[int, float]) -> list[str]:
    """The curve as a table."""
    faults = any(point.faults >= 1 for point in curve.points) or curve.name == "pool"
    heads = ["size", curve.unit, "last record", *(["page faults"] if faults else [])]
    out = [f"## {curve.name}: {curve.title}", "", f"| {' | '.join(heads)} |", "|" + "---:|" * len(heads)]
    for point in curve.points:
        last = f"{before[point.size]:.3f}" if point.size in before else "-"
        cells = [f"{point.size:,}", f"{point.cost:.3f}", last, *([f"{point.faults:.1f}"] if faults else [])]
        out.append(f"| {' | '.join(cells)} |")
    return [*out, "", f"slope {curve.slope:+.2f}", ""]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", choices=CURVES)
    parser.add_argument("--record", action="store_true", help="write bench/results/growth.md and growth.json")
    parser.add_argument("--note", default="", help="of the machine, for the record")
    given = parser.parse_args(arguments)
    known = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    page = [f"# Growth, {time.strftime('%Y-%m-%d')}", ""]
    cores = len(os.sched_getaffinity(0))
    page += [
        f"`python -m bench.growth`; {cores} cores, {platform.machine()}, Linux {platform.release()}. {given.note}",
        "",
    ]
    for name in [given.only] if given.only else CURVES:
        curve = CURVES[name]()
        before = {point["size"]: point["cost"] for point in known.get(name, {}).get("points", ())}
        page += lines(curve, before)
        known[name] = asdict(curve)
    print("\n".join(page))
    if given.record:
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")
        PAGE.write_text("\n".join(page))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
