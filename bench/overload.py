"""Goodput beyond capacity: an open loop that offers more than a model can serve.

    python -m bench.overload                    2 and 5 times the capacity, 30 s each, on the native door
    python -m bench.overload --door grpcio --seconds 10 --factor 2
    python -m bench.overload --policy timeout   no limit but 20 ms in the queue

The model is a stub whose batches of at most 8 take 5 ms. The policy bounds its queue: `server`
(--max-queued-requests-per-model) and `size` (max_queue_size) let 64 requests wait (`--queue` changes the number),
`timeout` (default_timeout_microseconds) any number for 20 ms, `none` any number without a limit. Capacity is measured
first, in a closed loop, below every bound. During the load a probe makes one call after the other, and measures
accepted and refused calls apart. Beside the p99 of accepted calls stands the policy's bound: the batch in execution
when a request comes and all batches of a full queue, its own included; or the time in the queue and its own batch. A
batch counts with its time at capacity, which on a busy machine is more than 5 ms.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from bench import inferd, messages
from bench.repository import Identity, write
from inferd_client.driver import INFER_PATH, Driver, Fixed
from inferd_client.driver.report import Report

ROWS, BATCH_MS, TIMEOUT_MS = 8, 5, 20
POLICIES = ("server", "size", "timeout", "none")
REQUEST = messages.identity(64, "stub").request
CONNECTIONS = 8
OK, UNAVAILABLE = 0, 14
HEAD = """\
| offered | calls/s | goodput/s | of capacity | refused/s | other ends | accepted p99 ms | promised | refused p99 ms |
|---|---|---|---|---|---|---|---|---|"""


def model(policy: str, queue: int) -> Identity:
    """The stub with this policy."""
    said = {"size": f"max_queue_size: {queue}", "timeout": f"default_timeout_microseconds: {TIMEOUT_MS * 1000}"}
    return Identity(
        "stub",
        (("FP32", 1),),
        max_batch_size=ROWS,
        batching=f"dynamic_batching {{ default_queue_policy {{ {said.get(policy, '')} }} }}",
        parameters={"delay_us": str(BATCH_MS * 1000)},
    )


def promised_ms(policy: str, queue: int, batch_ms: float) -> float | None:
    """The longest time of an accepted request, without its way to the queue and back."""
    if policy == "timeout":
        return TIMEOUT_MS + batch_ms
    return (math.ceil(queue / ROWS) + 1) * batch_ms if queue and policy != "none" else None


@dataclass
class Probe:
    """Calls one after the other from a thread, inside a `with` block; latencies in ms by status code."""

    address: str
    request: bytes = REQUEST
    latencies: dict[int, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="probe")

    def _run(self) -> None:
        with grpc.insecure_channel(self.address) as channel:
            call = channel.unary_unary(INFER_PATH, None, None)
            while not self._stop.wait(0.002):
                code, start = OK, time.perf_counter()
                try:
                    call(self.request)
                except grpc.RpcError as error:
                    code = error.code().value[0]  # type: ignore[attr-defined]
                self.latencies.setdefault(code, []).append((time.perf_counter() - start) * 1e3)

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()

    def p99(self, code: int) -> str:
        found = sorted(self.latencies.get(code, ()))
        return f"{found[int(len(found) * 0.99)]:.1f}" if found else "-"


def drive(address: str, seconds: float, *, rate: float = 0.0, in_flight: int = 16) -> Report:
    with Driver(address, connections=CONNECTIONS) as driver:
        return driver.run(Fixed([REQUEST]), in_flight=in_flight, seconds=seconds, rate=rate)


def line(name: str, report: Report, capacity: float, probe: Probe, promised: float | None) -> str:
    """A row of the table."""
    answered, refused = report.statuses.get(OK, 0), report.statuses.get(UNAVAILABLE, 0)
    others = report.requests - answered - refused
    goodput = answered / report.seconds
    cells = (
        name,
        f"{report.requests / report.seconds:,.0f}",
        f"{goodput:,.0f}",
        f"{goodput / capacity:.1%}",
        f"{refused / report.seconds:,.0f}",
        str(others),
        probe.p99(OK),
        f"{promised:.1f}" if promised else "-",
        probe.p99(UNAVAILABLE),
    )
    return f"| {' | '.join(cells)} |"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--door", choices=inferd.DOORS, default="native")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--factor", type=float, action="append", help="times the capacity; 2 and 5 when not given")
    parser.add_argument("--policy", choices=POLICIES, default="server")
    parser.add_argument("--queue", type=int, default=64)
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    policy, queue = arguments.policy, arguments.queue
    options = (f"--max-queued-requests-per-model={queue if policy == 'server' else 0}",)
    with tempfile.TemporaryDirectory(prefix="inferd-overload-") as folder:
        repository = write(Path(folder) / "models", [model(policy, queue)])
        server = inferd.start(repository, Path(folder) / "log", door=arguments.door, options=options)
        try:
            drive(server.address, 1.0, in_flight=4)
            measured = drive(server.address, 5.0, in_flight=4)
            capacity = measured.statuses[OK] / measured.seconds
            batch_ms = max(ROWS / capacity * 1000, BATCH_MS)
            print(f"capacity {capacity:,.0f}/s, {batch_ms:.2f} ms a batch, policy {policy}, {arguments.door} door")
            print(HEAD)
            for factor in arguments.factor or (2.0, 5.0):
                with Probe(server.address) as probe:
                    report = drive(server.address, arguments.seconds, rate=factor * capacity, in_flight=256)
                promised = promised_ms(policy, queue, batch_ms)
                print(line(f"{factor:g} x", report, capacity, probe, promised), flush=True)
        finally:
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
