"""The sources of `inferd top`: the metrics page of a server, or the statistics that a v2 server gives by gRPC."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc

from inferd.server.observe.escaping import visible
from inferd.server.tools.rates import Labels, Look, parse_metrics
from inferd_client.pb import grpc_service_pb2 as pb

TIMEOUT = 5.0
MOST_BYTES = 64 << 20

STATISTICS = "/inference.GRPCInferenceService/ModelStatistics"

_TIMES = {
    "request": "success",
    "queue": "queue",
    "compute_input": "compute_input",
    "compute_infer": "compute_infer",
    "compute_output": "compute_output",
}
"""Parts of the names of metrics of times, and the fields of InferStatistics with the same times."""


class Target(Protocol):
    """A source of metrics."""

    @property
    def url(self) -> str:
        """The URL as it was given."""

    def look(self) -> Look:
        """Look once.

        Raises:
            OSError: no server answers there.
            ValueError: the response is no page of metrics.
        """


def target_of(url: str, root_cert: Path | None = None, headers: tuple[tuple[str, str], ...] = ()) -> Target:
    """The source at an address: `http://HOST:PORT/PATH` are metrics, `grpc://HOST:PORT` and others a v2 server.

    Args:
        url: `grpc://HOST:PORT`, HOST:PORT and unix:PATH mean the same.
        root_cert: PEM file that a v2 server's certificate is checked against; None: plain text.
        headers: for a v2 server, such as a token.

    Raises:
        ValueError: the address is not valid.
        OSError: the file cannot be read.
    """
    if url.startswith(("http://", "https://")):
        return Page(url)
    target = url.removeprefix("grpc://")
    if "://" in target or not target:
        raise ValueError("expected http://HOST:PORT/metrics, grpc://HOST:PORT or unix:PATH")
    return Statistics(url, target, root_cert.read_bytes() if root_cert is not None else None, headers)


@dataclass(frozen=True, slots=True)
class Page:
    """A page of metrics."""

    url: str

    def look(self) -> Look:
        """See Target."""
        try:
            with urllib.request.urlopen(self.url, timeout=TIMEOUT) as answer:
                text = answer.read(MOST_BYTES).decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            raise OSError(f"HTTP status {error.code}: are metrics served there?") from None
        except urllib.error.URLError as error:
            raise OSError(getattr(error.reason, "strerror", None) or str(error.reason)) from None
        except http.client.HTTPException as error:
            raise OSError(f"the response is not HTTP: {type(error).__name__}: {error}") from None
        return parse_metrics(text, time.monotonic())


@dataclass(slots=True)
class Statistics:
    """The RPC ModelStatistics of a v2 server.

    Attributes:
        url: as it was given.
        target: the same for gRPC.
        root: certificates, PEM; None: the connection is plain text.
        headers: sent with each call.
    """

    url: str
    target: str
    root: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()
    _ask: Any = field(default=None, repr=False)

    def look(self) -> Look:
        """See Target."""
        if self._ask is None:
            self._ask = self._connected()
        try:
            answer = self._ask(pb.ModelStatisticsRequest(), timeout=TIMEOUT, metadata=self.headers)
        except grpc.RpcError as error:
            raise OSError(f"{error.code().name}: {visible(str(error.details()))}") from None
        return as_metrics(answer, time.monotonic())

    def _connected(self) -> Any:
        options = (("grpc.max_receive_message_length", MOST_BYTES),)
        channel = (
            grpc.insecure_channel(self.target, options)
            if self.root is None
            else grpc.secure_channel(self.target, grpc.ssl_channel_credentials(self.root), options)
        )
        return channel.unary_unary(
            STATISTICS,
            request_serializer=pb.ModelStatisticsRequest.SerializeToString,
            response_deserializer=pb.ModelStatisticsResponse.FromString,
        )


def as_metrics(answer: pb.ModelStatisticsResponse, at: float) -> Look:
    """Statistics under the names of the metrics."""
    samples: dict[str, dict[Labels, float]] = defaultdict(dict)
    for model in answer.model_stats:
        having = (("model", model.name), ("version", model.version))
        labels, stats = frozenset(having), model.inference_stats
        samples["nv_inference_count"][labels] = model.inference_count
        samples["nv_inference_exec_count"][labels] = model.execution_count
        samples["nv_inference_request_success"][labels] = stats.success.count
        samples["nv_inference_request_failure"][labels] = stats.fail.count
        for part, name in _TIMES.items():
            samples[f"nv_inference_{part}_duration_us"][labels] = getattr(stats, name).ns / 1000
        total = 0
        for bucket in sorted(model.queue_times, key=lambda each: each.us or float("inf")):
            total += bucket.count
            le = ("le", str(bucket.us) if bucket.us else "+Inf")
            samples["nv_inference_queue_duration_histogram_us_bucket"][frozenset((*having, le))] = total
    return Look(at, dict(samples))
