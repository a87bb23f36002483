"""The results of a run of the load driver."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple


def frame(message: bytes, *, compressed: bool = False) -> bytes:
    """A gRPC message as it travels in DATA frames: whether it is compressed, length, bytes."""
    return (b"\1" if compressed else b"\0") + len(message).to_bytes(4, "big") + message


@dataclass(frozen=True, slots=True)
class Latency:
    """Round-trip times in microseconds; each bucket is within 0.8 % of the true value."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    p999: float
    max: float


class Answered(NamedTuple):
    """A call of a run whose calls are listed.

    Attributes:
        number: of the request within the run.
        due_ns, ended_ns: when it was, or should have been, sent, and its end; of the monotonic clock.
        sequence: the id of its sequence; 0: none.
        answer: the serialized response; empty if the call failed.
    """

    number: int
    due_ns: int
    ended_ns: int
    sequence: int
    answer: bytes


@dataclass(frozen=True, slots=True)
class Report:
    """Every request of a run ends in exactly one of `answered`, `cancelled`, `reset` and `lost`.

    answered    the server closed the call with a status (`statuses` counts them) or, without gRPC, an HTTP status
    cancelled   the driver reset the stream before the response was complete
    reset       the server reset the stream
    lost        no end was seen: the connection died, or the run stalled for `stall_seconds`

    Of those answered, `correct` agreed with what the workload expects and `wrong` counts the others by reason. A
    response with OK to a call with a deadline is checked like any other.
    """

    requests: int
    answered: int
    cancelled: int
    reset: int
    lost: int
    correct: int
    deadlines: int  # calls that carried a grpc-timeout
    statuses: dict[int, int]  # grpc-status -> calls; -1 where the response had none
    wrong: dict[str, int]
    samples: list[str]  # the first few wrong responses in words
    seconds: float
    rate: float  # responses per second
    bytes_sent: int  # message bytes, without HTTP/2 framing
    bytes_received: int
    driver_cpu_seconds: float
    latency: Latency
    histogram: list[tuple[float, int]]  # microseconds that a bucket's calls did not exceed, calls
    calls: list[Answered] = field(default_factory=list)  # those answered, if the run lists its calls

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Progress:
    """Counters of a running run, readable from another thread."""

    issued: int
    finished: int
    wrong: int = field(default=0)
