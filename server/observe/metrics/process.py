"""The metrics of the process and of the machine, from /proc."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from inferd.server.machine import machine_memory
from inferd.server.machine import memory as limited_memory
from inferd.server.observe.metrics.text import Family, Sample

CPU = Family("process_cpu_seconds_total", "Processor time that the process has used", "counter")
RESIDENT = Family("process_resident_memory_bytes", "Memory of the process that is in RAM")
VIRTUAL = Family("process_virtual_memory_bytes", "Memory that the process has mapped")
DESCRIPTORS = Family("process_open_fds", "Open file descriptors")
MOST_DESCRIPTORS = Family("process_max_fds", "File descriptors that may be open")
THREADS = Family("process_threads", "Threads of the process")
STARTED = Family("process_start_time_seconds", "When the process started, in seconds since 1970")

UTILIZATION = Family("nv_cpu_utilization", "Part of the machine's processor time that was used, 0 to 1")
TOTAL = Family("nv_cpu_memory_total_bytes", "RAM of the machine")
USED = Family("nv_cpu_memory_used_bytes", "RAM of the machine that is not available to programs")
LIMIT = Family("inferd_memory_limit_bytes", "Memory limit of the server's control group, else RAM of the machine")
UNDER_LIMIT = Family("inferd_memory_used_bytes", "Used memory that counts towards inferd_memory_limit_bytes")

PROC = Path("/proc")


def process() -> Iterator[tuple[Family, Iterable[Sample]]]:
    """The families of this process, without those that the system does not report."""
    yield CPU, [("", time.process_time())]
    with suppress(OSError, ValueError, IndexError):
        fields = (PROC / "self/stat").read_text().rpartition(")")[2].split()
        page = os.sysconf("SC_PAGE_SIZE")
        started = _boot_time() + int(fields[19]) / os.sysconf("SC_CLK_TCK")
        yield VIRTUAL, [("", int(fields[20]))]
        yield RESIDENT, [("", int(fields[21]) * page)]
        yield THREADS, [("", int(fields[17]))]
        yield STARTED, [("", started)]
    with suppress(OSError):
        yield DESCRIPTORS, [("", sum(1 for _ in (PROC / "self/fd").iterdir()))]
        yield MOST_DESCRIPTORS, [("", resource.getrlimit(resource.RLIMIT_NOFILE)[0])]


def _boot_time() -> float:
    for line in (PROC / "stat").read_text().splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    raise ValueError("/proc/stat has no btime")


class Machine:
    """The families of the machine, Triton's CPU metrics, sampled at most every `interval` seconds."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._then = -interval
        self._times = (0, 0)
        self._samples: list[tuple[Family, list[Sample]]] = []

    def samples(self) -> list[tuple[Family, list[Sample]]]:
        now = time.monotonic()
        if now - self._then >= self._interval:
            self._then = now
            with suppress(OSError, ValueError, KeyError, IndexError):
                self._samples = list(self._look())
        return self._samples

    def _look(self) -> Iterator[tuple[Family, list[Sample]]]:
        times = [int(each) for each in (PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
        idle, total = times[3] + times[4], sum(times)
        idle_before, total_before = self._times
        self._times = idle, total
        passed = total - total_before
        yield UTILIZATION, [("", round(1 - (idle - idle_before) / passed, 4) if passed else 0.0)]
        for memory, limit, used in ((machine_memory(), TOTAL, USED), (limited_memory(), LIMIT, UNDER_LIMIT)):
            yield limit, [("", memory.limit)]
            yield used, [("", memory.used)]
