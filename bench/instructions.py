"""Instructions of single lanes for each request, counted by callgrind: the same on every machine, however busy it is.

    python -m bench.instructions        needs valgrind

A request is pushed and taken, by one thread and without contention, in batches of 1 and of 64. System calls count as
nothing, also asking the clock.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace

from backends.api import BatchingSpec, ModelSpec, TensorSpec
from bench import messages
from bench.micro import LEVELS, SPEC

LANES: dict[str, ModelSpec] = {
    "plain": SPEC,
    "one shape": replace(
        SPEC,
        inputs=(TensorSpec("INPUT0", "FP32", (16,)),),
        outputs=(TensorSpec("OUTPUT0", "FP32", (16,)),),
    ),
    "no batching": replace(SPEC, batching=None),
    "delay": replace(SPEC, batching=BatchingSpec((1, 64), 1_000_000)),
    "adaptive delay": replace(SPEC, batching=BatchingSpec((), 0, adaptive=True)),
    "levels, limits and timeouts": LEVELS,
}
SIZES = (1, 64)
REQUESTS = 64_000  # so many that making the lane is nothing
FUNCTION = "__pyx_pf_*native_speed*lane_ns*"
COLLECTED = re.compile(r"Collected : (\d+)")


def each(lane: str, size: int) -> float:
    """Instructions for each request."""
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", f"--toggle-collect={FUNCTION}"]
    command += [sys.executable, "-m", "bench.instructions", lane, str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = COLLECTED.search(done.stderr)
    if found is None:
        raise RuntimeError(f"callgrind did not count:\n{done.stderr}")
    return int(found[1]) / REQUESTS


def run(lane: str, size: int) -> None:
    """What callgrind looks at."""
    from bench.native_speed import lane_ns

    lane_ns(LANES[lane], messages.identity(64).request, size, REQUESTS // size)


def main() -> int:
    if len(sys.argv) == 3:
        run(sys.argv[1], int(sys.argv[2]))
        return 0
    if shutil.which("valgrind") is None:
        raise SystemExit("valgrind is not installed")
    print("| lane | batches of 1 | of 64 |\n|---|---:|---:|")
    for lane in LANES:
        cells = [f"{each(lane, size):.0f}" if size == 1 or LANES[lane].batching else "" for size in SIZES]
        print(f"| {lane} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
