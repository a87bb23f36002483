"""The metrics of the server as a whole. The event loop reads them."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inferd._native.memory.resource import live_counters
from inferd._native.refusal import refusal_counts
from inferd.server.observe.metrics import calls
from inferd.server.observe.metrics.text import Family, Sample, written

if TYPE_CHECKING:
    from inferd.server.engine.engine import Engine

BUILD = Family("inferd_build_info", "What runs: always 1")
READY = Family("inferd_ready", "1 while ServerReady answers true, else 0")
INFLIGHT = Family("inferd_inflight_requests", "Inference requests that were admitted and have not ended")
REFUSED = Family("inferd_refused_requests_total", "Requests and calls that were refused, by reason", "counter")
LOADS = Family("inferd_model_loads_total", "Versions of models that were loaded", "counter")
FAILED_LOADS = Family("inferd_model_load_failures_total", "Models that failed to load", "counter")
RECEIVED = Family("inferd_received_bytes_total", "Bytes of the messages of inference requests", "counter")
SENT = Family("inferd_sent_bytes_total", "Bytes of the messages of inference responses", "counter")
CONNECTIONS = Family("inferd_connections", "Open connections")
ACCEPTED = Family("inferd_accepted_connections_total", "Connections that were let in", "counter")
TURNED_AWAY = Family(
    "inferd_refused_connections_total", "Connections that were closed at once because there were too many", "counter"
)
OPEN_CALLS = Family("inferd_open_calls", "Calls that have not ended, streams included")
RESETS = Family("inferd_reset_calls_total", "Calls that were broken off, by clients or by the server", "counter")
HELD = Family("inferd_held_bytes", "Memory held for clients, by the stage of their messages: from arriving to framed")
REGIONS = Family("inferd_shared_memory_regions", "Regions of shared memory that clients have registered")
REGION_BYTES = Family("inferd_shared_memory_bytes", "Bytes of these regions together")
MEMORY = Family("inferd_tensor_memory_bytes", "Memory for tensors: used by blocks, or taken from the system (held)")
MEMORY_REFUSED = Family(
    "inferd_tensor_memory_refused_total", "Blocks of memory for tensors that were refused for lack of room", "counter"
)
PINNED_TOTAL = Family("nv_pinned_memory_pool_total_bytes", "Size of the pool of page-locked memory")
PINNED_USED = Family("nv_pinned_memory_pool_used_bytes", "Bytes of that pool that are used")
COALESCED = Family(
    "inferd_coalesced_requests_total", "Requests that got the response of an identical one in flight", "counter"
)
CACHE_HITS = Family("inferd_cache_hits_total", "Requests answered from the response cache", "counter")
CACHE_MISSES = Family("inferd_cache_misses_total", "Requests whose response the response cache did not have", "counter")
CACHE_EVICTIONS = Family(
    "inferd_cache_evictions_total", "Responses that the response cache dropped for newer ones", "counter"
)
CACHE_ENTRIES = Family("inferd_cache_entries", "Responses in the response cache of this process")
CACHE_BYTES = Family("inferd_cache_bytes", "Bytes of these responses")
OBJECTS = Family("inferd_native_objects", "Native objects that are alive, by kind")
LOG_LINES_LOST = Family(
    "inferd_log_lines_dropped_total",
    "Log lines that were left out, because the writer was too slow or a limit was reached",
    "counter",
)


@dataclass(frozen=True, slots=True)
class Traffic:
    """The traffic counters of a front door.

    Attributes:
        calls: of methods that it serves without Python, by path.
        connections: open now; None if the front door does not count.
        accepted: connections accepted since the start.
        refused: connections closed at once since the start.
        open_calls: calls that have not ended.
        resets: calls broken off since the start.
        held: bytes held for clients, by stage.
    """

    calls: Mapping[str, calls.Counts] = field(default_factory=dict)
    connections: int | None = None
    accepted: int = 0
    refused: int = 0
    open_calls: int = 0
    resets: int = 0
    held: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Service:
    """The sources of the families.

    Attributes:
        engine: serves the models.
        build: labels of `inferd_build_info`.
        counted: the calls that Python handles.
        kinds: the type of each method, by path, see `calls.families`.
        traffic: of the front door; None before it exists.
        lines_lost: log lines left out.
    """

    engine: Engine
    build: Mapping[str, str]
    counted: calls.Calls = field(default_factory=calls.Calls)
    kinds: Mapping[str, str] = field(default_factory=dict)
    traffic: Callable[[], Traffic] = Traffic
    lines_lost: Callable[[], int] = int

    def families(self) -> list[tuple[Family, list[Sample]]]:
        """All families with their present values. On the loop."""
        return [(family, list(samples)) for family, samples in self._families()]

    def _families(self) -> Iterator[tuple[Family, Iterable[Sample]]]:
        engine, traffic = self.engine, self.traffic()
        yield BUILD, [(written({**self.build, "python": platform.python_version()}), 1)]
        yield READY, [("", int(engine.ready))]
        yield INFLIGHT, [("", engine.infer.admitted_count)]
        yield (
            REFUSED,
            [(written({"reason": reason}), count) for reason, count in refusal_counts().items()],
        )
        yield LOADS, [("", engine.loads)]
        yield FAILED_LOADS, [("", engine.failed_loads)]
        received, sent = engine.infer.traffic
        yield RECEIVED, [("", received)]
        yield SENT, [("", sent)]
        yield from calls.families({**self.counted.counts, **traffic.calls}, self.kinds)
        if traffic.connections is not None:
            yield CONNECTIONS, [("", traffic.connections)]
            yield ACCEPTED, [("", traffic.accepted)]
            yield TURNED_AWAY, [("", traffic.refused)]
            yield OPEN_CALLS, [("", traffic.open_calls)]
            yield RESETS, [("", traffic.resets)]
            yield HELD, [(written({"what": what}), size) for what, size in traffic.held.items()]
        yield REGIONS, [("", engine.shared_memory.regions.count)]
        yield REGION_BYTES, [("", engine.shared_memory.regions.byte_size)]
        yield from self._memory()
        yield from self._reuse()
        yield OBJECTS, [(written({"kind": kind}), count) for kind, count in live_counters().items()]
        yield LOG_LINES_LOST, [("", self.lines_lost())]

    def _memory(self) -> Iterator[tuple[Family, Iterable[Sample]]]:
        usage = self.engine.memory_usage()
        yield (
            MEMORY,
            [
                (written({"memory": memory, "state": state}), use[state])
                for memory, use in usage.items()
                for state in ("used", "held")
            ],
        )
        yield MEMORY_REFUSED, [(written({"memory": memory}), use["refused"]) for memory, use in usage.items()]
        pinned = [use for memory, use in usage.items() if memory.startswith("page-locked")]
        if pinned:
            yield PINNED_TOTAL, [("", sum(use["limit"] for use in pinned))]
            yield PINNED_USED, [("", sum(use["used"] for use in pinned))]

    def _reuse(self) -> Iterator[tuple[Family, Iterable[Sample]]]:
        reuse = self.engine.infer.reuse()
        yield COALESCED, [("", reuse["followers"])]
        yield CACHE_HITS, [("", reuse["hits"])]
        yield CACHE_MISSES, [("", reuse["misses"])]
        yield CACHE_EVICTIONS, [("", reuse["evictions"])]
        yield CACHE_ENTRIES, [("", reuse["entries"])]
        yield CACHE_BYTES, [("", reuse["bytes"])]
