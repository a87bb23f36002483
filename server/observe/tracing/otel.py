"""Traces as spans of OpenTelemetry, sent to a collector by OTLP (extra `otel`).

    InferRequest            the call, from arrival to response; part of its client's trace
    └─ <model>              the request in the server; below it are requests that models and ensembles make for it
       ├─ cache             the look-up in the response cache
       ├─ sequence wait     until its sequence had a slot, if it waited for one
       ├─ queue             until an instance took it
       └─ batch             its execution; linked to the spans of other traced requests of the batch
          └─ compute        while the model computed

The span of a decoupled model's request has the event "first response".

If identical requests are executed once, or responses are cached, the execution has a span of its own with the name of
the model, below the span of the request that caused it. The spans of requests with the same response are linked to it.

The pump's thread makes the spans from the record of an ended request, so they delay no request. Ids are those of the
record, which models already know.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace import set_span_in_context as below

from inferd.server.errors import Status as Grpc
from inferd.server.observe.tracing.pump import Record
from inferd.server.settings.tracing import TraceConfig

SAMPLED = TraceFlags(TraceFlags.SAMPLED)

# Names of the semantic conventions for RPC, in one place, because they are not stable yet.
RPC_SYSTEM = "rpc.system.name"
RPC_METHOD = "rpc.method"
RPC_STATUS = "rpc.response.status_code"
CLIENT_ADDRESS = "client.address"
CLIENT_PORT = "client.port"
MOST_LINKS = 128
"""The most links of a span, OpenTelemetry's default: all requests of a batch to all others would be its square."""
SERVICE = "inference.GRPCInferenceService"


class _Ids(IdGenerator):
    """Gives the id that was set for the next span, else a random one."""

    def __init__(self) -> None:
        self._random = RandomIdGenerator()
        self.span = 0
        self.trace = 0

    def generate_span_id(self) -> int:
        found, self.span = self.span, 0
        return found or self._random.generate_span_id()

    def generate_trace_id(self) -> int:
        return self.trace or self._random.generate_trace_id()


def exporter(config: TraceConfig) -> SpanExporter:
    """The exporter to the collector."""
    if config.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=config.url, insecure=not config.url.startswith("https"))
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=config.url)


def resource_of(configured: Mapping[str, str], service: str) -> Resource:
    """The attributes of the server.

    Args:
        configured: attributes from the server's options; they replace those from the environment.
        service: the service's name, unless the options, OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES set another.
    """
    detected = OTELResourceDetector().detect().attributes
    return Resource.create({**({} if "service.name" in detected else {"service.name": service}), **configured})


class Spans:
    """Makes spans; an `inferd.server.observe.tracing.pump.Sink`.

    Args:
        config: of the server.
        service: the service's name, if the configured resource has none.
        exporter: sends the spans.
    """

    def __init__(self, config: TraceConfig, service: str, exporter: SpanExporter) -> None:
        self._ids = _Ids()
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=resource_of(config.resource, service),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        batching = config.batching
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter,
                max_queue_size=batching["bsp_max_queue_size"],
                schedule_delay_millis=batching["bsp_schedule_delay"],
                max_export_batch_size=min(batching["bsp_max_export_batch_size"], batching["bsp_max_queue_size"]),
            )
        )
        self._tracer = self._provider.get_tracer("inferd")

    def take(self, records: Sequence[Record]) -> None:
        kept = [record for record in records if record["kept"]]
        mates: dict[int, list[Record]] = defaultdict(list)
        for record in kept:
            if record["batch"]:
                mates[record["batch"]].append(record)
        for record in kept:
            others = (mate for mate in mates.get(record["batch"], ()) if mate is not record)
            self._tell(record, list(islice(others, MOST_LINKS)))

    def close(self) -> None:
        """Send waiting spans."""
        self._provider.shutdown()

    def _tell(self, record: Record, mates: list[Record]) -> None:
        self._ids.trace = int(record["trace_id"], 16)
        parent = _context(record["trace_id"], record["parent_id"]) if int(record["parent_id"], 16) else None
        call = None
        if not record["inner"]:
            call = self._span("InferRequest", parent, _of_call(record), record["arrived"], kind=SpanKind.SERVER)
            parent = call.get_span_context()
        self._ids.span = int(record["span_id"], 16)
        links = [Link(_context(*record["link"]))] if record["link"] else []
        model = self._span(record["model"] or "unknown", parent, _of_model(record), record["arrived"], links=links)
        here = model.get_span_context()
        if record["first"]:
            model.add_event("first response", timestamp=record["first"])
        self._waits(record, here)
        if record["taken"]:
            self._batch(record, here, mates)
        for span in filter(None, (model, call)):
            if record["status"]:
                span.set_status(Status(StatusCode.ERROR, record["error"]))
            span.end(record["ended"])

    def _waits(self, record: Record, parent: SpanContext) -> None:
        """The spans of a request before an instance takes it."""
        if record["looked"]:
            hit = {"inferd.cache.hit": record["cached"]}
            self._span("cache", parent, hit, record["looked"]).end(record["found"])
        if record["placed"]:
            self._span("sequence wait", parent, {}, record["queued"]).end(record["placed"])
        others = record["shared"] or record["stepped"]  # another execution, or steps, made its response
        if record["queued"] and (record["taken"] or (record["status"] and not others)):
            start = record["placed"] or record["queued"]
            self._span("queue", parent, {}, start).end(record["taken"] or record["ended"])

    def _batch(self, record: Record, parent: SpanContext, mates: list[Record]) -> None:
        links = [Link(_context(mate["trace_id"], mate["span_id"])) for mate in mates]
        batch = self._span("batch", parent, _of_batch(record), record["taken"], links=links)
        if record["input_end"] and record["output_start"]:
            compute = self._span("compute", batch.get_span_context(), {}, record["input_end"])
            compute.end(max(record["output_start"], record["input_end"]))
        batch.end(record["computed"] or record["ended"])

    def _span(
        self,
        name: str,
        parent: SpanContext | None,
        attributes: Mapping[str, Any],
        start: int,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[Link] = (),
    ) -> Any:
        context = below(NonRecordingSpan(parent)) if parent is not None else None
        return self._tracer.start_span(
            name, context=context, kind=kind, attributes=dict(attributes), links=links, start_time=start
        )


def _context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=SAMPLED)


def _of_call(record: Record) -> dict[str, Any]:
    found = {
        RPC_SYSTEM: "grpc",
        RPC_METHOD: f"{SERVICE}/{record['method']}",
        RPC_STATUS: Grpc(record["status"]).name,
    }
    return {**found, **client_of(record["peer"])}


def client_of(peer: str) -> dict[str, Any]:
    """The attributes of a client's address as gRPC writes it, such as ipv4:127.0.0.1:4711; a unix socket has none."""
    scheme, _, rest = peer.partition(":")
    host, _, port = rest.rpartition(":")
    if scheme not in ("ipv4", "ipv6") or not port.isdecimal():
        return {}
    return {CLIENT_ADDRESS: host.strip("[]"), CLIENT_PORT: int(port)}


def _of_model(record: Record) -> dict[str, Any]:
    found = {
        "triton.model_name": record["model"],
        "triton.model_version": record["version"],
        "triton.trace_id": record["number"],
        "triton.trace_parent_id": record["parent"],
        "inferd.cached": record["cached"],
        "inferd.shared": record["shared"],
    }
    return {**found, "triton.request_id": record["request_id"]} if record["request_id"] else found


def _of_batch(record: Record) -> dict[str, Any]:
    return {
        "inferd.batch.rows": record["batch_rows"],
        "inferd.batch.requests": record["batch_requests"],
        "inferd.batch.reason": record["why"],
        "inferd.instance": record["instance"],
    }
