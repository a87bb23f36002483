"""What a larger machine would serve, and which part saturates first: a model from measured parts.

    python -m bench.projection                 from bench/results/peers.json
    python -m bench.projection --cores 64 --network-gbit 400

I/O threads receive and send. What they do in between takes the front's lock, so it has one core's time however many
threads there are. Instances and workers take the rest of a request's CPU, on the other cores. Each figure below is a
line to change. Nothing here has been measured on such a machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass

from bench.peers.page import RESULTS, best
from inferd.server.composition.door import CORES_PER_IO_THREAD

IO_SHARE = 0.6  # of a native request's CPU that the I/O thread takes: perf, 64 bytes, 32 in flight
LOCKED_SHARE = 0.6  # of a small request's CPU that is under the front's lock, also for a large one: the same
NETWORK_GBIT = 100
NETWORK_USABLE = 0.9  # of that, without packet headers
MEMORY_GBYTE = 150  # a second, of one socket
COPIES = 3  # of each byte of a tensor: in by the kernel, out by the kernel, and once between
GPUS = 8
GPU_GBYTE = 50  # a second to or from each, PCIe 5 x16, pinned memory
CORES = (4, 16, 64)
SMALL = "small_32"
ROWS = {SMALL: 64, "large": 600_000, "huge": 16 << 20}  # rows of bench.peers and the bytes of their tensors
WAY = "inferd, native"


@dataclass(frozen=True, slots=True)
class Machine:
    cores: int
    network_gbit: float
    gpus: int


def limits(cpu_us: float, small_cpu_us: float, size: int, machine: Machine) -> dict[str, float]:
    """Requests a second at which each part of the machine saturates; tensors of `size` bytes in and out."""
    threads = max(1, machine.cores // CORES_PER_IO_THREAD)
    per_second = {
        "the front's lock": 1e6 / (small_cpu_us * LOCKED_SHARE),
        "I/O threads": threads * 1e6 / (cpu_us * IO_SHARE),
        "cores": machine.cores * 1e6 / cpu_us,
        "network": machine.network_gbit * NETWORK_USABLE / 8 * 1e9 / size,
        "memory": MEMORY_GBYTE * 1e9 / (2 * COPIES * size),
    }
    if machine.gpus:
        per_second["transfers to GPUs"] = machine.gpus * GPU_GBYTE * 1e9 / size
    return per_second


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.projection", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--cores", type=int, nargs="+", default=CORES)
    parser.add_argument("--network-gbit", type=float, default=NETWORK_GBIT)
    parser.add_argument("--gpus", type=int, default=GPUS)
    given = parser.parse_args()
    rows = json.loads(RESULTS.read_text())["rows"]
    print("| tensor | cores | requests/s | GB/s each way | full first | then |")
    print("|---|---:|---:|---:|---|---|")
    cpu = {key: best(rows[key]["ways"][WAY])["cpu_us"] for key in ROWS}
    for key, size in ROWS.items():
        for cores in given.cores:
            found = limits(cpu[key], cpu[SMALL], size, Machine(cores, given.network_gbit, given.gpus))
            (first, rate), (second, further), *_ = sorted(found.items(), key=lambda each: each[1])
            print(
                f"| {size:,} B | {cores} | {rate:,.0f} | {rate * size / 1e9:,.2f} | {first} | "
                f"{second}, at {further:,.0f}/s |"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
