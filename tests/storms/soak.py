"""The soak test: random requests through a running server, every answer checked to be its own.

    python -m tests.storms.soak                               1,000,000 requests, half through each door
    python -m tests.storms.soak --door native --requests 1e7
    python -m tests.storms.soak --address 127.0.0.1:8001      a running server, on --write-models DIR's repository

Requests differ in model, datatype, rows, shape, size, id and in whether tensors are raw or typed; 10 % are reset by
the client, 10 % carry a deadline, 5 % are wrong on purpose. What must hold, for each door:

    lost      0   every call ends
    wrong     0   every status is the right one; every answer has the id, the shapes and every byte of its request;
                  no deadline fires early (through the grpcio door: by more than the millisecond of its clock)
    reset     0   the server resets no stream, except one whose deadline has passed
    growth        resident memory does not grow: Theil-Sen slope over the last two thirds of the run, times its length
                  (through the grpcio door: beyond what grpc.aio loses with each call that is cancelled or too late)
    live          every native object is gone when the server has stopped

The summary is printed as JSON; the exit status is 0 when all of it holds.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench import inferd
from bench.nonce import NonceWorkload
from bench.processes import ServerProcess
from bench.repository import SOAK, write
from inferd_client.driver import Driver
from inferd_client.driver.report import Report

MIB = 1 << 20
DEADLINE_EXCEEDED = 4
# The clock by which gRPC's C core, and so grpc.aio without any code of ours, fires deadlines counts milliseconds.
EARLY_US = {"native": 0, "grpcio": 1000}
# What grpc.aio itself loses with each call that ends before its answer (https://github.com/grpc/grpc/issues/43360):
# about 400 bytes with grpcio 1.81, while the number of Python objects and of native objects of ours stays the same.
LOST_BYTES = {"native": 0, "grpcio": 512}
# With fewer samples a slope says nothing.
ENOUGH_SAMPLES = 20
LIVE_LINE = re.compile(r"^live: (\{.*\})", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests to send, and the growth of the server that is allowed."""

    requests: int = 1_000_000
    connections: int = 8
    in_flight: int = 16
    cancel_fraction: float = 0.20  # marked; about half of those are answered before they are cancelled
    deadline_fraction: float = 0.10
    deadline_us: tuple[int, int] = (100, 20_000)
    fault_fraction: float = 0.05
    large_fraction: float = 0.01
    seed: int = 1
    early_us: int = 0  # a call may be answered DEADLINE_EXCEEDED this much before its deadline
    growth_limit: int = 8 * MIB
    sample_seconds: float = 0.25


class MemoryWatch:
    """Samples the resident memory of a server from a thread, inside a `with` block."""

    def __init__(self, server: ServerProcess, interval: float) -> None:
        self.samples: list[tuple[float, int]] = []
        self._server = server
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory watch")

    def _watch(self) -> None:
        start = time.monotonic()
        while not self._stop.wait(self._interval):
            self.samples.append((time.monotonic() - start, self._server.rss()))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()


def theil_sen(samples: list[tuple[float, int]]) -> float:
    """The median slope over all pairs of samples; long series are thinned to 400 samples first."""
    thinned = samples[:: max(1, len(samples) // 400)]
    return statistics.median((y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in combinations(thinned, 2))


def growth(samples: list[tuple[float, int]]) -> int | None:
    """Bytes by which memory grew over the last two thirds of the run, from its slope; None if the run is too short."""
    settled = samples[len(samples) // 3 :]
    if len(settled) < ENOUGH_SAMPLES:
        return None
    return round(theil_sen(settled) * (settled[-1][0] - settled[0][0]))


@dataclass(frozen=True, slots=True)
class Outcome:
    """One door's run."""

    door: str
    report: Report
    rss: list[int] = field(default_factory=list)  # bytes, one a sample
    growth: int | None = None
    live: dict[str, int] | None = None  # native objects left after the server stopped
    exit_status: int | None = None

    @property
    def lost_bytes(self) -> int:
        """The bytes that the transport itself is known to lose in such a run."""
        unanswered = self.report.cancelled + self.report.statuses.get(DEADLINE_EXCEEDED, 0)
        return LOST_BYTES.get(self.door, 0) * unanswered

    def faults(self, plan: Plan) -> list[str]:
        """The faults, in words."""
        report, found = self.report, []
        if report.requests != plan.requests:
            found.append(f"{report.requests} requests were sent, expected {plan.requests}")
        found += [f"{count} {what}" for what, count in (("lost", report.lost), ("reset", report.reset)) if count]
        found += [f"{count} wrong: {reason}" for reason, count in report.wrong.items()]
        limit = plan.growth_limit + self.lost_bytes
        if self.growth is not None and self.growth > limit:
            found.append(f"memory grew by {self.growth / MIB:.1f} MiB, expected at most {limit / MIB:.1f}")
        if self.exit_status is not None:
            if self.exit_status != 0:
                found.append(f"the server ended with {self.exit_status}")
            if self.live is None:
                found.append("the server did not print its live counters")
            found += [f"{count} live {name}" for name, count in (self.live or {}).items() if count]
        return found

    def as_dict(self, plan: Plan) -> dict[str, Any]:
        return {**asdict(self), "faults": self.faults(plan)}


def drive(address: str, plan: Plan) -> Report:
    """Send the plan's requests to a server with the soak models."""
    workload = NonceWorkload(
        SOAK, fault_fraction=plan.fault_fraction, large_fraction=plan.large_fraction, early_us=plan.early_us
    )
    with Driver(address, connections=plan.connections) as driver:
        return driver.run(
            workload,
            in_flight=plan.in_flight,
            requests=plan.requests,
            cancel_fraction=plan.cancel_fraction,
            deadline_fraction=plan.deadline_fraction,
            deadline_us=plan.deadline_us,
            seed=plan.seed,
        )


def soak(door: str, plan: Plan, folder: Path) -> Outcome:
    """Start a server with this door, drive it, stop it, and judge."""
    log = folder / f"{door}.log"
    server = inferd.start(write(folder / "models", SOAK), log, door=door)
    try:
        with MemoryWatch(server, plan.sample_seconds) as memory:
            report = drive(server.address, replace(plan, early_us=EARLY_US[door]))
    finally:
        status = server.stop()
    live = LIVE_LINE.search(log.read_text(errors="replace"))
    return Outcome(
        door,
        report,
        rss=[rss for _, rss in memory.samples],
        growth=growth(memory.samples),
        live=json.loads(live[1]) if live else None,
        exit_status=status,
    )


def parse_arguments() -> argparse.Namespace:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=lambda text: int(float(text)), default=1_000_000, help="over all doors")
    parser.add_argument("--door", choices=inferd.DOORS, action="append", help="both when not given")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--in-flight", type=int, default=16, help="on each connection")
    parser.add_argument("--large-fraction", type=float, default=0.01, help="of tensors with a long first dimension")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sample-seconds", type=float, default=0.25)
    parser.add_argument("--address", help="of a server that runs already and has the soak models")
    parser.add_argument("--write-models", type=Path, help="only write the repository with the soak models there")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if arguments.write_models:
        write(arguments.write_models, SOAK)
        return 0
    doors = arguments.door or list(inferd.DOORS)
    plan = Plan(
        requests=arguments.requests if arguments.address else arguments.requests // len(doors),
        connections=arguments.connections,
        in_flight=arguments.in_flight,
        large_fraction=arguments.large_fraction,
        seed=arguments.seed,
        sample_seconds=arguments.sample_seconds,
    )
    with tempfile.TemporaryDirectory(prefix="inferd-soak-") as folder:
        if arguments.address:
            outcomes = [Outcome(arguments.address, drive(arguments.address, plan))]
        else:
            outcomes = [soak(door, plan, Path(folder)) for door in doors]
    results = [outcome.as_dict(plan) for outcome in outcomes]
    print(json.dumps({"plan": asdict(plan), "doors": results}, indent=2))
    for outcome in outcomes:
        print(f"{outcome.door}: {'; '.join(outcome.faults(plan)) or 'holds'}", file=sys.stderr)
    return 1 if any(result["faults"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
