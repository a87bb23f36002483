"""The values of metrics that models make (`pb_utils.MetricFamily`), kept in the server for all exporters.

As in Triton, instances count together: a family exists once in the server, for all models and instances that name it,
and a metric once in its family for its labels. A metric ends with its last worker, a family with its last metric and
user.
"""

from __future__ import annotations

import bisect
import logging
import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger("inferd.engine")

KINDS = ("counter", "gauge", "histogram")

MOST = 10_000
"""The most families, metrics and buckets of all models together; further ones are refused."""

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """A snapshot of a metric.

    Attributes:
        labels: by name.
        value: of a counter or gauge; of a histogram the sum of its values.
        buckets: of a histogram: upper bounds, the last one infinite, and how many values were up to each.
    """

    labels: Mapping[str, str]
    value: float
    buckets: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True, slots=True)
class FamilySnapshot:
    """A snapshot of a family."""

    name: str
    description: str
    kind: str
    samples: tuple[Sample, ...]


@dataclass(slots=True)
class _Metric:
    bounds: tuple[float, ...] = ()
    value: float = 0.0
    counts: list[int] = field(default_factory=list)  # of values between two bounds
    users: Counter[object] = field(default_factory=Counter)

    @property
    def size(self) -> int:
        """How much of `MOST` the metric takes."""
        return 1 + len(self.counts)

    def sample(self, labels: Labels) -> Sample:
        total, buckets = 0, []
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=False):
            total += count
            buckets.append((bound, total))
        return Sample(dict(labels), self.value, tuple(buckets))


@dataclass(slots=True)
class _Family:
    description: str
    kind: str
    metrics: dict[Labels, _Metric] = field(default_factory=dict)
    users: Counter[object] = field(default_factory=Counter)


class Measures:
    """All metrics of models. Any thread may use it.

    A user is an instance of a Python model. Metrics belong to one or more users, and end with the last of them.
    """

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}
        self._size = 0  # of `MOST`
        self._guard = threading.Lock()

    def change(self, user: object, change: Mapping[str, Any]) -> None:
        """Apply a change; a wrong one is logged.

        Args:
            user: the owner of the metric.
            change: as `backends/python/worker/protocol.py` describes METRIC.
        """
        with self._guard:
            try:
                problem = self._change(user, change)
            except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
        if problem:
            log.warning("a metric of %s: %s", user, problem)

    def value(self, family: str, labels: Mapping[str, str]) -> float:
        """The value of a counter or gauge, over all of its users.

        Raises:
            KeyError: there is no such metric.
        """
        with self._guard:
            return self._families[family].metrics[_key(labels)].value

    def release(self, user: object) -> None:
        """Remove a user, and metrics without other users."""
        with self._guard:
            for name, family in tuple(self._families.items()):
                family.users.pop(user, None)
                for labels, metric in tuple(family.metrics.items()):
                    metric.users.pop(user, None)
                    if not metric.users:
                        self._drop(family, labels)
                self._tidy(name, family)

    def snapshot(self) -> list[FamilySnapshot]:
        """All families as they are now, by name."""
        with self._guard:
            return [
                FamilySnapshot(
                    name,
                    family.description,
                    family.kind,
                    tuple(metric.sample(labels) for labels, metric in sorted(family.metrics.items())),
                )
                for name, family in sorted(self._families.items())
            ]

    # -- with the lock --

    def _change(self, user: object, change: Mapping[str, Any]) -> str:
        """Apply a change; the problem, empty without one."""
        operation, name, kind = change["op"], _text(change["family"]), change["kind"]
        if operation == "family":
            return self._add_family(user, name, _text(change["description"]), kind)
        family = self._families.get(name)
        if family is None or family.kind != kind or not family.users[user]:
            return ""  # a family that was refused before
        if operation == "delete_family":
            family.users[user] -= 1
            family.users += Counter()  # drops those with none left
            self._tidy(name, family)
            return ""
        labels = _key(change["labels"])
        if operation == "metric":
            return self._add_metric(user, name, family, labels, change["buckets"])
        metric = family.metrics.get(labels)
        if metric is None:
            return ""
        if operation == "delete_metric":
            metric.users[user] -= 1
            metric.users += Counter()
            if not metric.users:
                self._drop(family, labels)
            return ""
        return _apply(metric, operation, float(change["value"]))

    def _add_family(self, user: object, name: str, description: str, kind: str) -> str:
        if kind not in KINDS:
            return f"family '{name}' is of no kind: '{kind}'"
        family = self._families.get(name)
        if family is None:
            if self._size >= MOST:
                return f"family '{name}' is one more than {MOST} families, metrics and buckets: it is not counted"
            family = self._families[name] = _Family(description, kind)
            self._size += 1
        if family.kind != kind:
            return f"family '{name}' is a {family.kind} already and cannot be a {kind}, too: it is not counted"
        family.users[user] += 1
        return ""

    def _add_metric(self, user: object, name: str, family: _Family, labels: Labels, bounds: Sequence[float]) -> str:
        metric = family.metrics.get(labels)
        if metric is None:
            # An infinite bound is left out: every histogram has one already.
            metric = _Metric(tuple(bound for bound in map(float, bounds) if bound < math.inf))
            if family.kind == "histogram":
                metric.counts = [0] * (len(metric.bounds) + 1)
            if self._size + metric.size > MOST:
                return (
                    f"metric {dict(labels)} of family '{name}' is more than {MOST} families, metrics and buckets: "
                    "it is not counted"
                )
            family.metrics[labels] = metric
            self._size += metric.size
        metric.users[user] += 1
        return ""

    def _drop(self, family: _Family, labels: Labels) -> None:
        self._size -= family.metrics.pop(labels).size

    def _tidy(self, name: str, family: _Family) -> None:
        if not family.users and not family.metrics:
            del self._families[name]
            self._size -= 1


def _apply(metric: _Metric, operation: str, number: float) -> str:
    match operation:
        case "increment":
            metric.value += number
        case "set":
            metric.value = number
        case "observe" if metric.counts:
            metric.value += number
            metric.counts[bisect.bisect_left(metric.bounds, number)] += 1
        case _:
            return f"it cannot {operation}"
    return ""


def _key(labels: Mapping[str, str]) -> Labels:
    return tuple(sorted((_text(name), _text(value)) for name, value in labels.items()))


def _text(value: object) -> str:
    """The text, with "?" in place of characters that UTF-8 cannot encode, such as half of a surrogate pair."""
    return str(value).encode("utf-8", "replace").decode()
