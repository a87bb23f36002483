"""The families of every model version, and the choice of shown ones.

The counters, and the first histogram, have Triton's names and meanings; the other histograms have the names in Triton's
own proposal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from inferd.server.engine.config.measured import FIRST_RESPONSE, HISTOGRAMS
from inferd.server.observe.metrics.text import Family

USUAL_BOUNDS = tuple(1000 << power for power in range(4, 25))
"""Default bounds of histograms of times: 16 us, 32 us, ... 16.8 s, in nanoseconds."""


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """A family with samples for each model version.

    Attributes:
        family: name, help and type.
        kind: the name of the values in `inferd._native.service.exposition.ModelMetrics`.
        unit: nanoseconds in the unit in which times are shown.
        bounds: of a histogram of times, in nanoseconds.
        group: the switch of --metrics-config that turns it on; empty for none.
    """

    family: Family
    kind: str
    unit: int = 1
    bounds: tuple[int, ...] = field(default=())
    group: str = ""


def _counter(name: str, kind: str, text: str, group: str = "") -> ModelFamily:
    return ModelFamily(Family(name, text, "counter"), kind, group=group)


def _histogram(name: str, kind: str, text: str, bounds: tuple[int, ...] = USUAL_BOUNDS) -> ModelFamily:
    return ModelFamily(Family(name, text, "histogram"), kind, HISTOGRAMS[name], bounds, "histogram_latencies")


MODEL_FAMILIES: tuple[ModelFamily, ...] = (
    _counter("nv_inference_request_success", "success", "Requests that succeeded, cached responses included"),
    _counter("nv_inference_request_failure", "failures", "Requests that failed, by reason"),
    _counter("nv_inference_count", "inferences", "Inferences: rows of executed requests, cached responses excluded"),
    _counter("nv_inference_exec_count", "executions", "Executed batches"),
    _counter(
        "nv_inference_request_duration_us",
        "request",
        "Time of successful requests from arrival to response, cached responses included",
        "counter_latencies",
    ),
    _counter("nv_inference_queue_duration_us", "queue", "Time of executed requests in the queue", "counter_latencies"),
    _counter(
        "nv_inference_compute_input_duration_us",
        "compute_input",
        "Time of executed requests in which inputs were prepared",
        "counter_latencies",
    ),
    _counter(
        "nv_inference_compute_infer_duration_us",
        "compute_infer",
        "Time of executed requests in which the model computed",
        "counter_latencies",
    ),
    _counter(
        "nv_inference_compute_output_duration_us",
        "compute_output",
        "Time of executed requests in which outputs were taken",
        "counter_latencies",
    ),
    ModelFamily(Family("nv_inference_pending_request_count", "Requests that wait for an instance", "gauge"), "pending"),
    _counter("nv_cache_num_hits_per_model", "cache_hits", "Requests answered from the response cache"),
    _counter(
        "nv_cache_num_misses_per_model", "cache_misses", "Requests whose response the response cache did not have"
    ),
    _counter(
        "nv_cache_hit_duration_per_model",
        "cache_hit",
        "Time of hits, in us, in the response cache",
        "counter_latencies",
    ),
    _counter(
        "nv_cache_miss_duration_per_model",
        "cache_miss",
        "Time of misses, in us, in the response cache: looking for the response and keeping it",
        "counter_latencies",
    ),
    _histogram(
        "nv_inference_first_response_histogram_ms",
        "first_response_histogram",
        "Time from arrival to the first response",
        FIRST_RESPONSE,
    ),
    _histogram(
        "nv_inference_request_duration_histogram_us",
        "request_histogram",
        "Time of successful requests from arrival to response",
    ),
    _histogram("nv_inference_queue_duration_histogram_us", "queue_histogram", "Time of executed requests in the queue"),
    _histogram(
        "nv_inference_compute_input_duration_histogram_us",
        "compute_input_histogram",
        "Time in which the inputs of a request's batch were prepared",
    ),
    _histogram(
        "nv_inference_compute_infer_duration_histogram_us",
        "compute_infer_histogram",
        "Time in which the model computed a request's batch",
    ),
    _histogram(
        "nv_inference_compute_output_duration_histogram_us",
        "compute_output_histogram",
        "Time in which the outputs of a request's batch were taken",
    ),
    _histogram(
        "inference_inter_response_histogram_us",
        "next_response_histogram",
        "Time between two responses to one request, of models that give several",
    ),
    ModelFamily(
        Family("inference_batch_size", "Rows of executed batches", "histogram"), "batch_histogram", group="batches"
    ),
    _counter("inferd_batches_total", "batches", "Executed batches by the reason why they left the queue", "batches"),
    _counter("inferd_model_received_bytes_total", "received", "Bytes of the messages of clients' requests"),
    _counter("inferd_model_sent_bytes_total", "sent", "Bytes of the messages of responses to clients"),
)


def chosen(switches: Mapping[str, bool]) -> tuple[ModelFamily, ...]:
    """The families that these switches, by the names of --metrics-config, leave on."""
    return tuple(each for each in MODEL_FAMILIES if switches.get(each.group, True))
