"""How punctual queues are: delays of batches and timeouts of requests.

    python -m bench.lateness

Delay: single requests to models with max_queue_delay_microseconds wait for its whole length. Their time less the round
trip to the same model without a delay (its p50) is compared with the delay. Timeout: an instance is always busy, and
each request that waits behind it is refused at its timeout. Lateness is taken from the client's clock, less that round
trip, and from the mean in the server's ModelStatistics.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from bench import inferd, messages
from bench.adaptive import statistics
from bench.processes import ServerProcess
from bench.repository import Identity, write
from inferd_client.driver import Driver, Fixed

DELAYS_US = (100, 300, 500, 1000, 5000)
TIMEOUTS_US = (1000, 5000, 20_000)
BUSY_US = 1_000_000  # of each execution: all but one request a second time out
WAITING = 8
TENSOR = (("FP32", 1),)


def repository(folder: Path) -> Path:
    """One model for each delay and timeout, and one without."""
    models = [Identity("plain", TENSOR)]
    for us in DELAYS_US:
        batching = f"dynamic_batching {{ max_queue_delay_microseconds: {us} }}"
        models.append(Identity(f"delay_{us}", TENSOR, batching=batching))
    for us in TIMEOUTS_US:
        policy = f"default_queue_policy {{ default_timeout_microseconds: {us} }}"
        batching = f"dynamic_batching {{ {policy} }}"
        busy = {"delay_us": str(BUSY_US)}
        models.append(Identity(f"timeout_{us}", TENSOR, max_batch_size=1, batching=batching, parameters=busy))
    return write(folder / "models", models)


def round_trip(server: ServerProcess, name: str, seconds: float, *, in_flight: int = 1) -> tuple[float, float]:
    """p50 and p99 in microseconds."""
    with Driver(server.address) as driver:
        report = driver.run(Fixed([messages.identity(64, name).request]), in_flight=in_flight, seconds=seconds)
    return report.latency.p50, report.latency.p99


def delays(server: ServerProcess, seconds: float, base: float) -> None:
    print("| delay, µs | p50 late by, µs | p99 |\n|---:|---:|---:|")
    for us in DELAYS_US:
        p50, p99 = round_trip(server, f"delay_{us}", seconds)
        print(f"| {us} | {p50 - base - us:+.0f} | {p99 - base - us:+.0f} |", flush=True)


def timeouts(server: ServerProcess, seconds: float, base: float) -> None:
    print("| timeout, µs | p50 late by, µs | p99 | mean by the server's clock | refused |\n|---:|---:|---:|---:|---:|")
    for us in TIMEOUTS_US:
        p50, p99 = round_trip(server, f"timeout_{us}", seconds, in_flight=WAITING)
        refused = statistics(server, f"timeout_{us}").fail_reasons["REJECTED"]
        mean = refused.ns / refused.count / 1000
        cells = (f"{p50 - base - us:+.0f}", f"{p99 - base - us:+.0f}", f"{mean - us:+.0f}", f"{refused.count}")
        print(f"| {us} | {' | '.join(cells)} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each row")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="inferd-lateness-") as folder:
        server = inferd.start(repository(Path(folder)), Path(folder) / "log")
        try:
            base, _ = round_trip(server, "plain", arguments.seconds)
            delays(server, arguments.seconds, base)
            timeouts(server, arguments.seconds, base)
        finally:
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
