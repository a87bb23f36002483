"""Micro-benchmarks of the native parts, one thread, nothing else: `python -m bench.micro` prints the table.

All data is in the nearest cache and every branch is predicted, so these are lower bounds; they show the effect of a
change on one part.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from bench import messages
from bench.memory_speed import MappedMemory, pair_ns
from bench.native_speed import bind_ns, block_ns, gather_ns, lane_ns, share_ns
from inferd._native.memory import resource as memory
from inferd.backends.api import BatchingSpec, ModelSpec, QueuePolicySpec, QueueSpec, TensorSpec

ROUNDS = 5

SPEC = ModelSpec(
    name="identity",
    backend="identity",
    max_batch_size=64,
    inputs=(TensorSpec("INPUT0", "FP32", (-1,)),),
    outputs=(TensorSpec("OUTPUT0", "FP32", (-1,)),),
    batching=BatchingSpec(),
)


LEVELS = replace(SPEC, queue=QueueSpec((QueuePolicySpec(1000, 1_000_000, overridable=True),) * 3, 2))


def rows() -> list[tuple[str, float]]:
    """Each part and its nanoseconds: the best of a few rounds."""
    message = messages.identity(64).request
    image = messages.identity(602_112).request
    measured: dict[str, Callable[[], float]] = {
        "block of 64 bytes: take and give": lambda: block_ns(64, 500_000),
        "block of 64 KiB: take and give": lambda: block_ns(1 << 16, 500_000),
        "block of 1 MiB: take and give": lambda: block_ns(1 << 20, 100_000),
        "block of 64 MiB: take and give": lambda: block_ns(1 << 26, 2_000),
        "reference to a block: share and give": lambda: share_ns(1_000_000),
        "request: block, decode, check, free": lambda: bind_ns(SPEC, message, 200_000),
        "lane: push and take, batches of 1, per request": lambda: lane_ns(SPEC, message, 1, 500_000),
        "lane: push and take, batches of 8, per request": lambda: lane_ns(SPEC, message, 8, 50_000),
        "lane: push and take, batches of 64, per request": lambda: lane_ns(SPEC, message, 64, 10_000),
        "gather 64 bytes, batches of 32, per request": lambda: gather_ns(SPEC, message, 32, 50_000),
        "gather 600 kB, batches of 8, per request": lambda: gather_ns(SPEC, image, 8, 200),
        "lane with levels, limits and timeouts: batches of 1": lambda: lane_ns(LEVELS, message, 1, 500_000),
        "lane with levels, limits and timeouts: batches of 64": lambda: lane_ns(LEVELS, message, 64, 10_000),
    }
    mapped = MappedMemory(64 << 20)
    for size, name in ((4096, "4 KiB"), (1 << 20, "1 MiB")):
        for threads in (1, 4):
            for what, resource in (("host", memory.host()), ("pooled", mapped)):
                text = f"{what} memory of {name}: take and give, {threads} thread{'s' if threads > 1 else ''}"
                measured[text] = partial(together_ns, resource, size, threads)
    return [(what, min(measure() for _ in range(ROUNDS))) for what, measure in measured.items()]


def together_ns(resource: memory.Memory, size: int, threads: int) -> float:
    """Nanoseconds of CPU time for a take and a give while `threads` threads do the same; their mean."""
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(lambda _: pair_ns(resource, size, 200_000), range(threads))) / threads


def main() -> None:
    print("| part | ns |\n|---|---:|")
    for what, ns in rows():
        print(f"| {what} | {ns:.0f} |")


if __name__ == "__main__":
    main()
