"""Counters of gRPC calls, with the names of go-grpc-prometheus."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from inferd.server.observe.metrics.text import Family, Sample, written

STARTED = Family("grpc_server_started_total", "Calls that began", "counter")
HANDLED = Family("grpc_server_handled_total", "Calls that ended, by status", "counter")

CODES = (
    "OK",
    "Canceled",
    "Unknown",
    "InvalidArgument",
    "DeadlineExceeded",
    "NotFound",
    "AlreadyExists",
    "PermissionDenied",
    "ResourceExhausted",
    "FailedPrecondition",
    "Aborted",
    "OutOfRange",
    "Unimplemented",
    "Internal",
    "Unavailable",
    "DataLoss",
    "Unauthenticated",
)
"""The names of gRPC for Go, which dashboards use."""

Counts = tuple[int, list[int]]
"""How many calls began, and how many ended, by status."""


@dataclass(slots=True)
class Calls:
    """Counts the calls that Python handles. On the loop."""

    counts: dict[str, Counts] = field(default_factory=lambda: defaultdict(lambda: (0, [0] * len(CODES))))

    def began(self, path: str) -> None:
        started, handled = self.counts[path]
        self.counts[path] = (started + 1, handled)

    def ended(self, path: str, status: int) -> None:
        self.counts[path][1][status] += 1


def families(calls: Mapping[str, Counts], kinds: Mapping[str, str]) -> Iterator[tuple[Family, Iterable[Sample]]]:
    """The families of calls by path; `kinds` has each path's type, such as "unary" or "bidi_stream"."""
    labelled = {path: _labels(path, kinds.get(path, "unary")) for path in sorted(calls)}
    yield STARTED, [(labels, calls[path][0]) for path, labels in labelled.items()]
    yield (
        HANDLED,
        [
            (f'{labels},grpc_code="{code}"', count)
            for path, labels in labelled.items()
            for code, count in zip(CODES, calls[path][1], strict=True)
            if count or code == "OK"
        ],
    )


def _labels(path: str, kind: str) -> str:
    _, service, method = path.split("/")
    return written({"grpc_type": kind, "grpc_service": service, "grpc_method": method})
