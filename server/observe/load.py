"""The load of the server, for balancers: an OrcaLoadReport, made once a second and sent with every response.

cpu_utilization           CPU time of this process divided by that of the processors it may use
application_utilization   the share of time in which the instances of the busiest model version computed:
                          they limit the server, even if processors are idle while a GPU works
rps_fractional, eps       inferences answered per second, and how many of them failed
named_metrics             queue_depth (waiting requests), inflight_requests (requests in the server)
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from inferd.server.engine.housekeeping.threads import slices
from inferd_client.pb.load_report_pb2 import OrcaLoadReport

if TYPE_CHECKING:
    from inferd.server.engine.engine import Engine
    from inferd.server.engine.models.version import LoadedVersion

TRAILER = "endpoint-load-metrics-bin"

INTERVAL = 1.0
"""Seconds between two reports."""


class LoadMeter:
    """Reports the load of an engine.

    Args:
        engine: serves the models.
        clock: monotonic seconds.
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
        self._totals: dict[tuple[str, int], tuple[int, int, int]] = {}  # last counters of each version
        self.report = b""
        self._publish(OrcaLoadReport(), queued=0)

    async def run(self) -> None:
        """Make a report every second."""
        while True:
            await asyncio.sleep(INTERVAL)
            await self.sample()

    async def sample(self) -> None:
        """Make the report of the time since the last one, and publish it, also to the native path."""
        now, cpu = self._clock(), self._cpu_clock()
        passed = max(now - self._then, 1e-6)
        report = OrcaLoadReport(cpu_utilization=min(1.0, (cpu - self._cpu) / passed / len(os.sched_getaffinity(0))))
        before, self._totals = self._totals, {}
        queued = answered = failed = 0
        async for part in slices(self._versions()):
            for version in part:
                key = (version.name, version.version)
                totals = self._totals[key] = version.lane.totals()
                succeeded, refused, busy_ns = (
                    max(0, a - b) for a, b in zip(totals, before.get(key, (0, 0, 0)), strict=True)
                )
                answered += succeeded + refused
                failed += refused
                queued += version.lane.pending
                busy = busy_ns / 1e9 / passed / max(1, len(version.spec.instances))
                report.application_utilization = min(1.0, max(report.application_utilization, busy))
        report.rps_fractional, report.eps = answered / passed, failed / passed
        self._then, self._cpu = now, cpu
        self._publish(report, queued)

    def _publish(self, report: OrcaLoadReport, queued: int) -> None:
        report.named_metrics["queue_depth"] = queued
        report.named_metrics["inflight_requests"] = self._engine.infer.admitted_count
        self.report = report.SerializeToString(deterministic=True)
        self._engine.infer.set_load_report(self.report)

    def _versions(self) -> Iterator[LoadedVersion]:
        for name in self._engine.names:
            yield from self._engine.versions(name)
