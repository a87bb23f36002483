"""The present work of a server, from two looks at its metrics: see `inferd.server.tools.looking`."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: \d+)?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Labels = frozenset[tuple[str, str]]
Model = tuple[str, str]
"""Name and version."""


@dataclass(frozen=True, slots=True)
class Look:
    """Metrics at one moment: values by name and labels."""

    at: float
    samples: Mapping[str, Mapping[Labels, float]]

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples with these labels; 0 without any."""
        wanted = labels.items()
        return sum(value for having, value in self.samples.get(name, {}).items() if wanted <= set(having))

    def has(self, name: str) -> bool:
        return name in self.samples

    def by_model(self) -> dict[Model, Look]:
        """The samples of each model version apart, so that they can be added up without reading those of the others."""
        found: dict[Model, dict[str, dict[Labels, float]]] = defaultdict(lambda: defaultdict(dict))
        for name, samples in self.samples.items():
            for having, value in samples.items():
                labels = dict(having)
                if "model" in labels and "version" in labels:
                    found[labels["model"], labels["version"]][name][having] = value
        return {model: Look(self.at, own) for model, own in found.items()}


def parse_metrics(text: str, at: float) -> Look:
    """Parse a page in Prometheus' text format, which was read at the time `at`.

    Raises:
        ValueError: the text has another form.
    """
    samples: dict[str, dict[Labels, float]] = defaultdict(dict)
    for line in text.split("\n"):  # labels may have other characters that begin a line elsewhere
        if not line or line.startswith("#"):
            continue
        found = _SAMPLE.fullmatch(line)
        if found is None:
            raise ValueError(f"this is no line of metrics: {line[:80]!r}")
        samples[found[1]][frozenset(_LABEL.findall(found[2] or ""))] = float(found[3])
    return Look(at, dict(samples))


@dataclass(frozen=True, slots=True)
class ModelRates:
    """The work of one model version; None: the server does not tell. Times in microseconds."""

    model: str
    version: str
    requests: float  # per second, as are failures
    failures: float
    pending: float | None
    batch: float | None  # mean rows of a batch
    mean_us: float | None
    p50_us: float | None
    p99_us: float | None
    queue_us: float | None  # p99, else mean
    compute_us: float | None
    busy: float | None  # part of the time in which its instances executed

    @property
    def busy_at_all(self) -> bool:
        """Whether requests ended, wait, or are executed."""
        return bool(self.requests or self.failures or self.pending or self.busy)


SORTS = ("name", "requests", "failures", "p99", "queue", "compute", "batch", "pending", "busy")
"""The keys for sorting models: the name ascending, others descending."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The shown models, and their order.

    Attributes:
        sort: one of SORTS.
        pattern: of names, with * and ?; empty: all.
        idle: also those that did nothing.
    """

    sort: str = "name"
    pattern: str = ""
    idle: bool = True

    def of(self, models: Iterable[ModelRates]) -> tuple[ModelRates, ...]:
        """The chosen ones."""
        found = [
            each for each in models if fnmatchcase(each.model, self.pattern or "*") and (self.idle or each.busy_at_all)
        ]
        if self.sort == "name":
            return tuple(found)
        field = self.sort if hasattr(ModelRates, self.sort) else f"{self.sort}_us"
        return tuple(sorted(found, key=lambda each: -(getattr(each, field) or 0.0)))


@dataclass(frozen=True, slots=True)
class Rates:
    """The server, between two looks."""

    seconds: float
    models: tuple[ModelRates, ...]
    server: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        models = [{name: _rounded(getattr(each, name)) for name in each.__slots__} for each in self.models]
        return {
            "seconds": round(self.seconds, 3),
            "models": models,
            "server": {name: _rounded(value) for name, value in self.server.items()},
        }


EVERYTHING = Choice()


def _rounded(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


def between(before: Look, after: Look, choice: Choice = EVERYTHING) -> Rates:
    """The work between two looks, of the chosen models. A counter that has decreased has restarted."""
    seconds = max(after.at - before.at, 1e-3)
    earlier, later = before.by_model(), after.by_model()
    nothing = Look(before.at, {})
    models = sorted(model for model, own in later.items() if own.has("nv_inference_count"))
    has_pending = after.has(PENDING)
    found = (_of_model(earlier.get(each, nothing), later[each], each, seconds, has_pending) for each in models)
    return Rates(seconds, choice.of(found), _of_server(before, after, seconds))


PENDING = "nv_inference_pending_request_count"


def _grown(before: Look, after: Look, name: str, **labels: str) -> float:
    now, then = after.total(name, **labels), before.total(name, **labels)
    return now - then if now >= then else now


def _of_model(before: Look, after: Look, model: Model, seconds: float, has_pending: bool) -> ModelRates:
    """The work of a model version, from the samples of this version alone."""

    def grown(name: str) -> float:
        return _grown(before, after, name)

    succeeded, executed = grown("nv_inference_request_success"), grown("nv_inference_exec_count")

    def mean(part: str) -> float | None:
        return grown(f"nv_inference_{part}_duration_us") / succeeded if succeeded else None

    def quantile(part: str, which: float) -> float | None:
        return _quantile(before, after, f"nv_inference_{part}_duration_histogram_us", which)

    instances = after.total("inferd_instances")
    busy = grown("inferd_instance_busy_seconds_total") / seconds / instances if instances else None
    queue, compute = quantile("queue", 0.99), quantile("compute_infer", 0.99)
    return ModelRates(
        model=model[0],
        version=model[1],
        requests=succeeded / seconds,
        failures=grown("nv_inference_request_failure") / seconds,
        pending=after.total(PENDING) if has_pending else None,
        batch=grown("nv_inference_count") / executed if executed else None,
        mean_us=mean("request"),
        p50_us=quantile("request", 0.5),
        p99_us=quantile("request", 0.99),
        queue_us=mean("queue") if queue is None else queue,
        compute_us=mean("compute_infer") if compute is None else compute,
        busy=busy,
    )


def _quantile(before: Look, after: Look, name: str, which: float) -> float | None:
    """A quantile as histogram_quantile() of Prometheus computes it: interpolated within the bucket."""
    counts = sorted(_buckets(before, after, f"{name}_bucket"))
    if not counts or counts[-1][1] <= 0:
        return None
    wanted = which * counts[-1][1]
    low, below = 0.0, 0.0
    for bound, count in counts:
        if count >= wanted:
            return low if math.isinf(bound) else low + (bound - low) * (wanted - below) / max(count - below, 1e-9)
        low, below = bound, count
    return low


def _buckets(before: Look, after: Look, name: str) -> Iterator[tuple[float, float]]:
    then = before.samples.get(name, {})
    for having, count in after.samples.get(name, {}).items():
        earlier = then.get(having, 0.0)
        if (bound := dict(having).get("le")) is not None:
            yield float(bound), count - earlier if count >= earlier else count


SERVER = {
    "connections": "inferd_connections",
    "open_calls": "inferd_open_calls",
    "inflight": "inferd_inflight_requests",
    "resident_bytes": "process_resident_memory_bytes",
    "cache_bytes": "inferd_cache_bytes",
}
SERVER_RATES = {
    "cpu": "process_cpu_seconds_total",
    "received_bytes": "inferd_received_bytes_total",
    "sent_bytes": "inferd_sent_bytes_total",
    "refused": "inferd_refused_requests_total",
}


def _of_server(before: Look, after: Look, seconds: float) -> dict[str, float]:
    found = {shown: after.total(name) for shown, name in SERVER.items() if after.has(name)}
    rates = {shown: _grown(before, after, name) / seconds for shown, name in SERVER_RATES.items() if after.has(name)}
    return {**found, **rates}
