"""How busy the server is, for balancers: an OrcaLoadReport, made once a second and sent with every answer.

cpu_utilization           processor time of this process over that of the processors it may use
application_utilization   time that instances computed over the time that there was, of the busiest model version:
                          what limits the server, also where processors are idle because a GPU works
rps_fractional, eps       inferences answered, and of them failed, per second
named_metrics             queue_depth (requests waiting), inflight_requests (in the house)
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from server.pb.load_report_pb2 import OrcaLoadReport

if TYPE_CHECKING:
    from server.engine.engine import Engine
    from server.engine.version import LoadedVersion

TRAILER = "endpoint-load-metrics-bin"

INTERVAL = 1.0
"""Seconds between two reports."""


class LoadMeter:
    """Reports the load of an engine.

    Args:
        engine: what is loaded.
        clock: seconds that never go back.
        cpu_clock: seconds of processor time that the process has used.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._then = clock()
        self._cpu = cpu_clock()
        self._counts: dict[tuple[str, int], _Counts] = {}
        self.report = b""
        self.sample()

    async def run(self) -> None:
        """Make a report every second."""
        while True:
            await asyncio.sleep(INTERVAL)
            self.sample()

    def sample(self) -> None:
        """Make a report of what was since the last one, and give it to the native path."""
        now, cpu = self._clock(), self._cpu_clock()
        passed = max(now - self._then, 1e-6)
        report = OrcaLoadReport(cpu_utilization=min(1.0, (cpu - self._cpu) / passed / len(os.sched_getaffinity(0))))
        before, self._counts = self._counts, {}
        queued = 0
        for version in self._versions():
            key = (version.name, version.version)
            counts = self._counts[key] = _Counts(version)
            since = counts.since(before.get(key))
            queued += version.lane.pending
            report.rps_fractional += since.answered / passed
            report.eps += since.failed / passed
            busy = since.busy_ns / 1e9 / passed / max(1, len(version.spec.instances))
            report.application_utilization = min(1.0, max(report.application_utilization, busy))
        report.named_metrics["queue_depth"] = queued
        report.named_metrics["inflight_requests"] = self._engine.infer.in_house
        self._then, self._cpu = now, cpu
        self.report = report.SerializeToString(deterministic=True)
        self._engine.infer.set_load_report(self.report)

    def _versions(self) -> list[LoadedVersion]:
        names = {entry.name for entry in self._engine.index()}
        return [version for name in names for version in self._engine.versions(name)]


class _Counts:
    """Counters of a model version at one time."""

    def __init__(self, version: LoadedVersion | None = None) -> None:
        self.answered = self.failed = self.busy_ns = 0
        if version is not None:
            counters = version.lane.statistics()
            self.failed = counters["fail"][0]
            self.answered = counters["success"][0] + self.failed
            self.busy_ns = sum(compute[1] for _, _, compute, _ in counters["batches"])

    def since(self, before: _Counts | None) -> _Counts:
        """What was counted after `before`; all of it for a version that is new."""
        difference = _Counts()
        start = before or _Counts()
        difference.answered = self.answered - start.answered
        difference.failed = self.failed - start.failed
        difference.busy_ns = self.busy_ns - start.busy_ns
        return difference
