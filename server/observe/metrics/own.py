"""Metrics that models make (`pb_utils.MetricFamily`), from the engine."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator

from inferd.server.engine.models.measures import FamilySnapshot
from inferd.server.observe.metrics.text import LABEL, NAME, Family, braced, encoded, number, written

log = logging.getLogger("inferd.metrics")


class OwnMetrics:
    """Writes metrics of models. Families whose names are invalid or taken are left out, and logged once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def render(
        self, families: Iterable[FamilySnapshot], taken: Collection[str], *, openmetrics: bool
    ) -> Iterator[bytes]:
        """The families, without those whose names are `taken`, by the server or by an earlier family."""
        taken = set(taken)
        for snapshot in families:
            problem = _problem(snapshot, taken)
            if problem:
                self._tell(snapshot.name, problem)
                continue
            taken |= names_of(snapshot.name, snapshot.kind)
            yield Family(snapshot.name, snapshot.description, snapshot.kind).head(openmetrics=openmetrics)
            yield encoded("".join(_lines(snapshot)))

    def _tell(self, name: str, problem: str) -> None:
        if name not in self._told:
            self._told.add(name)
            log.warning("the metric family '%s' of a model is not shown: %s", name, problem)


def names_of(name: str, kind: str) -> set[str]:
    """The names that a family uses: its own, and those of its samples."""
    if kind == "histogram":
        return {name, f"{name}_bucket", f"{name}_count", f"{name}_sum"}
    if kind == "counter":
        return {name, name.removesuffix("_total")}  # without the suffix: the family's name in OpenMetrics
    return {name}


def _problem(snapshot: FamilySnapshot, taken: set[str]) -> str:
    if not NAME.fullmatch(snapshot.name):
        return "this is not the name of a metric"
    if used := sorted(names_of(snapshot.name, snapshot.kind) & taken):
        return f"the name {used[0]} is that of another metric"
    for sample in snapshot.samples:
        for label in sample.labels:
            if not LABEL.fullmatch(label) or label == "le":
                return f"'{label}' is not the name of a label"
    return ""


def _lines(snapshot: FamilySnapshot) -> Iterator[str]:
    for sample in snapshot.samples:
        labels = written(sample.labels)
        if snapshot.kind != "histogram":
            yield f"{snapshot.name}{braced(labels)} {number(sample.value)}\n"
            continue
        for bound, count in sample.buckets:
            le = f'le="{number(float(bound))}"'
            yield f"{snapshot.name}_bucket{{{f'{labels},{le}' if labels else le}}} {count}\n"
        yield f"{snapshot.name}_count{braced(labels)} {sample.buckets[-1][1] if sample.buckets else 0}\n"
        yield f"{snapshot.name}_sum{braced(labels)} {number(sample.value)}\n"
