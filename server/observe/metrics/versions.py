"""The metrics of model versions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from inferd._native.request.lane import LaneHandle
from inferd._native.service.exposition import ModelMetrics
from inferd.server.engine.config.measured import own_bounds
from inferd.server.observe.metrics.catalogue import ModelFamily
from inferd.server.observe.metrics.exemplars import Exemplars
from inferd.server.observe.metrics.text import Family, Sample, written

if TYPE_CHECKING:
    from inferd.server.engine.models.version import LoadedVersion

LOAD = Family("nv_model_load_duration_secs", "Time that loading took, with warm-up")
INSTANCES = Family("inferd_instances", "Instances of the version")
BUSY = Family(
    "inferd_instance_busy_seconds_total",
    "Time in which the instance has executed batches; its rate is the busy ratio",
    "counter",
)
RUNNING = Family("inferd_instance_running_requests", "Requests that the instance executes now")
WORKER_STATE = Family("inferd_worker_state", "1 for the state in which the process of an instance is, 0 for the others")
WORKER_RESTARTS = Family(
    "inferd_worker_restarts_total",
    "Processes that were started for an instance because its own had ended",
    "counter",
)
WORKER_RESIDENT = Family("inferd_worker_resident_memory_bytes", "Memory of the process of an instance that is in RAM")

OTHERS = (LOAD, INSTANCES, BUSY, RUNNING, WORKER_STATE, WORKER_RESTARTS, WORKER_RESIDENT)
"""The families of versions that the catalogue does not have."""

PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class _Known:
    """Values of a version that are kept between scrapes."""

    labels: str
    encoded: bytes
    bounds: Mapping[str, tuple[int, ...]]  # those that the version's configuration sets, by family


class Versions:
    """Reads model versions and writes their families.

    Args:
        families: that are shown.
        exemplars: of traced requests; None without traces.
    """

    def __init__(self, families: tuple[ModelFamily, ...], exemplars: Exemplars | None = None) -> None:
        self._families = families
        self._exemplars = exemplars
        self._known: WeakKeyDictionary[LoadedVersion, _Known] = WeakKeyDictionary()

    def render(self, loaded: Iterable[LoadedVersion], *, openmetrics: bool) -> Iterator[bytes]:
        """The families of these versions, rendered mostly without the GIL."""
        plain: list[LoadedVersion] = []
        special: list[LoadedVersion] = []
        for version in sorted(loaded, key=lambda each: (each.name, each.version)):
            (special if self._of(version).bounds else plain).append(version)
        ordered = [*plain, *special]
        metrics = ModelMetrics([self._native(version) for version in ordered])
        metrics.read()
        if openmetrics and self._exemplars is not None:
            for index, version in enumerate(ordered):
                if found := self._exemplars.of(version.name, version.version):
                    metrics.illustrate(index, found)
        for shown in self._families:
            yield shown.family.head(openmetrics=openmetrics)
            name = shown.family.name.encode()
            point = openmetrics and shown.family.kind == "histogram"
            yield metrics.render(shown.kind, name, shown.unit, shown.bounds, point, 0, len(plain))
            for index, version in enumerate(special, len(plain)):
                bounds = self._of(version).bounds.get(shown.family.name, shown.bounds)
                yield metrics.render(shown.kind, name, shown.unit, bounds, point, index, index + 1)
        for family, samples in self._others(ordered):
            yield family.head(openmetrics=openmetrics)
            yield family.samples(samples)

    def _others(self, versions: list[LoadedVersion]) -> Iterator[tuple[Family, Iterator[Sample]]]:
        yield LOAD, ((self._of(version).labels, round(version.seconds, 6)) for version in versions)
        yield INSTANCES, self._instances(versions, lambda version: [("", len(version.uses()))])
        yield BUSY, self._instances(versions, lambda version: [(use.name, use.busy_ns / 1e9) for use in version.uses()])
        yield RUNNING, self._instances(versions, lambda version: [(use.name, use.running) for use in version.uses()])

        workers = [(f"{self._of(version).labels},{written({'instance': name})}", worker)
                   for version in versions for name, worker in version.workers()]  # fmt: skip
        if workers:
            yield (
                WORKER_STATE,
                (
                    (f'{labels},state="{state}"', int(worker.state == state))
                    for labels, worker in workers
                    for state in worker.STATES
                ),
            )
            yield WORKER_RESTARTS, ((labels, worker.restarts) for labels, worker in workers)
            sizes = ((labels, _resident(worker.pid)) for labels, worker in workers if worker.pid)
            yield WORKER_RESIDENT, ((labels, size) for labels, size in sizes if size)

    def _instances(
        self, versions: list[LoadedVersion], values: Callable[[LoadedVersion], list[tuple[str, float]]]
    ) -> Iterator[Sample]:
        for version in versions:
            labels = self._of(version).labels
            for name, value in values(version):
                yield (f"{labels},{written({'instance': name})}" if name else labels), value

    def _native(self, version: LoadedVersion) -> tuple[LaneHandle, bytes, bool, bool, bool]:
        spec = version.spec
        return version.lane, self._of(version).encoded, spec.ensemble is None, spec.caches, spec.decoupled

    def _of(self, version: LoadedVersion) -> _Known:
        known = self._known.get(version)
        if known is None:
            labels = labels_of(version)
            known = self._known[version] = _Known(labels, labels.encode(), own_bounds(version.config))
        return known


def _resident(pid: int) -> int:
    """Bytes of a process's memory in RAM; 0 if the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * PAGE
    except (OSError, ValueError, IndexError):
        return 0


def labels_of(version: LoadedVersion) -> str:
    """The labels of a version's samples: its name and number, and the configured `metric_tags` as Triton names them."""
    tags = {f"_{name}": value for name, value in sorted(version.config.metric_tags.items())}
    return written({"model": version.name, "version": version.version, **tags})
