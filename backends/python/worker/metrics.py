"""A model's own metrics, which the server exposes with its own."""

from __future__ import annotations

import math
import re
from typing import Any

from . import runtime
from .errors import ErrorCode, TritonModelException

# https://prometheus.io/docs/concepts/data_model/
METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class MetricKind(ErrorCode):
    """A kind of metric: an int with a name."""

    COUNTER: MetricKind
    GAUGE: MetricKind
    HISTOGRAM: MetricKind

    def __repr__(self) -> str:
        return f"MetricKind.{self.name}"


MetricKind.COUNTER = MetricKind(0, "COUNTER")
MetricKind.GAUGE = MetricKind(1, "GAUGE")
MetricKind.HISTOGRAM = MetricKind(2, "HISTOGRAM")


class MetricFamily:
    """Metrics of one name with different labels.

    Args:
        name: as Prometheus shows it.
        description: of what is measured.
        kind: MetricFamily.COUNTER, GAUGE or HISTOGRAM.

    Raises:
        TritonModelException: the name is no valid name of a metric.
    """

    COUNTER = MetricKind.COUNTER
    GAUGE = MetricKind.GAUGE
    HISTOGRAM = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        if not isinstance(kind, MetricKind):
            raise TypeError(f"MetricFamily expects MetricFamily.COUNTER, GAUGE or HISTOGRAM as its kind, got {kind!r}")
        if not METRIC_NAME.fullmatch(name):
            raise TritonModelException(f"Error when creating MetricFamily: '{name}' is no name of a metric")
        self._name = name
        self._kind = kind
        self._runtime = runtime.current()
        self._change("family", description=str(description))

    def Metric(self, labels: dict[str, Any] | None = None, buckets: list[float] | None = None) -> Metric:  # noqa: N802
        """A metric of this family.

        Args:
            labels: its labels; their values are turned into texts.
            buckets: the upper bounds of a histogram's, ascending; nothing else has any.

        Raises:
            TritonModelException: the labels are no dictionary or have impossible names, or buckets are missing, wrong
                or too many.
        """
        if labels is not None and not isinstance(labels, dict):
            raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
        if buckets is None:
            if self._kind == MetricKind.HISTOGRAM:
                raise TritonModelException("Failed to create metric. Missing required buckets.")
        elif not isinstance(buckets, list):
            raise TritonModelException("Failed to create metric. Buckets must be a list.")
        elif self._kind != MetricKind.HISTOGRAM:
            raise TritonModelException("Failed to create metric. Unexpected buckets found.")
        elif sorted(set(buckets)) != buckets:
            raise TritonModelException("Failed to create metric. Buckets must ascend.")
        for name in labels or ():
            if not isinstance(name, str) or not LABEL_NAME.fullmatch(name):
                raise TritonModelException(f"Error when creating Metric: {name!r} is no name of a label")
        return Metric(self, {name: str(value) for name, value in (labels or {}).items()}, buckets)

    def _change(self, operation: str, **more: Any) -> None:
        # With the kind: the server has refused this family if the name has another kind.
        self._runtime.channel.metric({"op": operation, "family": self._name, "kind": self._kind.name.lower(), **more})

    def __del__(self) -> None:
        if "_runtime" in self.__dict__:
            self._change("delete_family")


class Metric:
    """One metric, from `MetricFamily.Metric`. It disappears with this object."""

    def __init__(self, family: MetricFamily, labels: dict[str, str], buckets: list[float] | None) -> None:
        if not isinstance(family, MetricFamily):
            raise TypeError("a Metric comes from MetricFamily.Metric()")
        self._family = family  # kept: a family disappears with its last metric
        self._labels = labels
        family._change("metric", labels=labels, buckets=buckets or [])

    def increment(self, value: float) -> None:
        """Add to a counter or a gauge; a gauge also takes a negative number.

        Raises:
            TritonModelException: the metric is a histogram, or a counter and the number negative.
        """
        if self._family._kind == MetricKind.HISTOGRAM:
            raise self._refusal("increment", "does not support Increment")
        if self._family._kind == MetricKind.COUNTER and value < 0:
            raise self._refusal("increment", "can only be incremented monotonically by non-negative values.")
        self._change("increment", value)

    def set(self, value: float) -> None:
        """Set a gauge.

        Raises:
            TritonModelException: it is none.
        """
        if self._family._kind != MetricKind.GAUGE:
            raise self._refusal("set", "does not support Set")
        self._change("set", value)

    def observe(self, value: float) -> None:
        """Count a value into a histogram.

        Raises:
            TritonModelException: it is none.
        """
        if self._family._kind != MetricKind.HISTOGRAM:
            raise self._refusal("observe", "does not support Observe")
        self._change("observe", value)

    def value(self) -> float:
        """Get from the server the sum over all instances for these labels, or the value that was set last.

        Raises:
            TritonModelException: the metric is a histogram, or the server does not know it.
        """
        if self._family._kind == MetricKind.HISTOGRAM:
            raise self._refusal("get", "does not support Value")
        arguments = {"family": self._family._name, "labels": self._labels}
        return float(self._family._runtime.channel.ask("metric_value", arguments))

    def _change(self, operation: str, value: float) -> None:
        number = float(value)
        if not math.isfinite(number):
            raise TritonModelException(f"Failed to {operation} metric value: {number} is no finite number")
        self._family._change(operation, labels=self._labels, value=number)

    def _refusal(self, operation: str, why: str) -> TritonModelException:
        kind = self._family._kind.name
        return TritonModelException(f"Failed to {operation} metric value: TRITONSERVER_METRIC_KIND_{kind} {why}")

    def __del__(self) -> None:
        if "_labels" in self.__dict__:
            self._family._change("delete_metric", labels=self._labels)
