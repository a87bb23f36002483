"""A collector of spans: takes OTLP over HTTP and over gRPC."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass
class Collector:
    """The traces that have come."""

    url: str = ""
    spans: list[Any] = field(default_factory=list)
    resource: dict[str, str] = field(default_factory=dict)
    _more: threading.Condition = field(default_factory=threading.Condition)

    def take(self, message: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(message)
        with self._more:
            for each in request.resource_spans:
                self.resource = {pair.key: pair.value.string_value for pair in each.resource.attributes}
                for scope in each.scope_spans:
                    self.spans += scope.spans
            self._more.notify_all()

    def wait(self, holds) -> list[Any]:
        """The spans, when this holds of them."""
        with self._more:
            assert self._more.wait_for(lambda: holds(self.spans), 60), [span.name for span in self.spans]
            return list(self.spans)


@contextmanager
def http_collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            collector.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        collector.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    collector = Collector()

    def export(message, context):
        collector.take(message)
        return ExportTraceServiceResponse().SerializeToString()

    handler = grpc.method_handlers_generic_handler(
        "opentelemetry.proto.collector.trace.v1.TraceService", {"Export": grpc.unary_unary_rpc_method_handler(export)}
    )
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((handler,))
    collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()
