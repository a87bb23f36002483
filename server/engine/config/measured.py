"""The part of a configuration about metrics: tags, and buckets of histograms."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from inferd.server.engine.config.findings import Finding
from inferd.server.engine.pbtxt.source import FieldPath
from inferd_client.pb import model_config_pb2 as pb

HISTOGRAMS: Mapping[str, int] = MappingProxyType(
    {
        "nv_inference_first_response_histogram_ms": 1_000_000,
        "nv_inference_request_duration_histogram_us": 1000,
        "nv_inference_queue_duration_histogram_us": 1000,
        "nv_inference_compute_input_duration_histogram_us": 1000,
        "nv_inference_compute_infer_duration_histogram_us": 1000,
        "nv_inference_compute_output_duration_histogram_us": 1000,
        "inference_inter_response_histogram_us": 1000,
    }
)
"""Histograms of times that each model has, and the nanoseconds in the unit of each."""

FIRST_RESPONSE = tuple(bound * 1_000_000 for bound in (100, 500, 2000, 5000))
"""Default bounds of the first histogram in nanoseconds: Triton's."""

MOST_BUCKETS = 32
"""The most buckets of a model's histograms together: each costs memory, and time for every request."""

LARGEST_NS = 1 << 62
"""The bounds of buckets are smaller, in nanoseconds."""

_TAG = re.compile(r"[a-zA-Z0-9_]+")


def wrong_metrics(config: pb.ModelConfig) -> Iterator[Finding]:
    """Findings about tags that are no labels, and about buckets that cannot be served."""
    for tag in config.metric_tags:
        if not _TAG.fullmatch(tag):
            yield Finding(("metric_tags",), f"metric_tags key {tag!r} is not of letters, digits and _")
    for index, control in enumerate(config.model_metrics.metric_control):
        path: FieldPath = ("model_metrics", "metric_control", index)
        family = control.metric_identifier.family
        if family not in HISTOGRAMS:
            yield Finding(path, f"model_metrics names '{family}'", f"use one of {', '.join(HISTOGRAMS)}")
            continue
        buckets = list(control.histogram_options.buckets)
        bounds = [_ns(family, bound) for bound in buckets]
        if 0 in bounds or bounds != sorted(set(bounds)):
            instead = "write numbers in ascending order, of at least a nanosecond"
            yield Finding(path, f"the buckets of '{family}' are {buckets}", instead)
    if len(_bounds(config)) > MOST_BUCKETS:
        yield Finding(
            ("model_metrics",), f"model_metrics has {len(_bounds(config))} buckets, at most {MOST_BUCKETS} are served"
        )


def bounds_of(config: pb.ModelConfig) -> list[int]:
    """Further bounds in nanoseconds by which the model's requests are counted."""
    return sorted({*FIRST_RESPONSE, *_bounds(config)})


def own_bounds(config: pb.ModelConfig) -> dict[str, tuple[int, ...]]:
    """The bounds in nanoseconds of histograms for which the configuration has its own; it obeys `wrong_metrics`."""
    found = {}
    for control in config.model_metrics.metric_control:
        family = control.metric_identifier.family
        if family in HISTOGRAMS and control.histogram_options.buckets:
            found[family] = tuple(_ns(family, bound) for bound in control.histogram_options.buckets)
    return found


def _ns(family: str, bound: float) -> int:
    """A bucket's bound in nanoseconds; 0 for one that cannot be served, such as NaN."""
    ns = bound * HISTOGRAMS[family]
    return round(ns) if 0 < ns < LARGEST_NS else 0


def _bounds(config: pb.ModelConfig) -> set[int]:
    return {bound for bounds in own_bounds(config).values() for bound in bounds}
