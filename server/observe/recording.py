"""Passes the records of single requests on: to traces, the access log and the log of slow requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from inferd._native.request.recorder import RecorderHandle
from inferd.backends.installing import pip_install
from inferd.server.errors import InvalidArgument
from inferd.server.observe.access import AccessLog
from inferd.server.observe.metrics.exemplars import Exemplars
from inferd.server.observe.tracing.control import TraceControl
from inferd.server.observe.tracing.pump import Pump, Record, Sink
from inferd.server.observe.tracing.triton import TraceFiles
from inferd.server.settings import Settings
from inferd.server.settings.tracing import TraceConfig

if TYPE_CHECKING:
    from inferd.server.engine.engine import Engine


class Recording:
    """Records the requests of an engine as the settings say. Made and changed on the event loop.

    Without any trace or log of requests, nothing is recorded and no thread runs.

    Attributes:
        control: which requests are traced.
        exemplars: traced requests for metrics; None if traces go to files, whose ids no other program knows.

    Raises:
        InvalidArgument: the exporter of traces is not installed, or their file cannot be written.
    """

    def __init__(self, settings: Settings, engine: Engine) -> None:
        config = settings.tracing
        self._recorder = RecorderHandle()
        self._traces = _Later(config, settings.id, lambda: self.control.sampling().log_frequency)
        self.control = TraceControl(config, self._recorder, engine, self._traces.sink)
        slow_ns = settings.slow_request_ms * 1_000_000
        self._logs = bool(settings.access_log or slow_ns)
        self._recorder.keep(
            access_rate=settings.access_log, slow_ns=int(config.slow_ms * 1_000_000), log_slow_ns=slow_ns
        )
        if config.on:
            self._traces.sink()  # raises at the start if a library or file is missing
        self.exemplars = Exemplars() if config.mode == "opentelemetry" else None
        self._sinks: list[Sink] = [AccessLog(slow_ns), self._traces]
        if self.exemplars is not None:
            self._sinks.append(self.exemplars)
        self._pump: Pump | None = None
        engine.infer.record(self._recorder)
        self.control.watch(self._switch)
        self._switch()

    def close(self) -> None:
        """Write the remaining records. On any thread."""
        if self._pump is not None:
            self._pump.close()

    def _switch(self) -> None:
        on = self._logs or self.control.on
        self._recorder.switch(on)
        if on and self._pump is None:
            self._pump = Pump(self._recorder, self._sinks)


class _Later:
    """The sink of traces, which is made when the first trace needs it."""

    def __init__(self, config: TraceConfig, service: str, frequency: Callable[[], int]) -> None:
        self._config = config
        self._service = service
        self._frequency = frequency
        self._guard = threading.Lock()
        self._sink: Sink | None = None

    def sink(self) -> Sink:
        """The sink, which the first call makes.

        Raises:
            InvalidArgument: there is no file for traces, or it cannot be written; or a library is missing.
        """
        with self._guard:
            if self._sink is None:
                self._sink = self._make()
            return self._sink

    def _make(self) -> Sink:
        config = self._config
        if config.mode == "triton":
            if not config.file:
                raise InvalidArgument(
                    "trace-config: the server has no place for traces: start it with --trace-config triton,file=PATH, "
                    "or with --trace-config mode=opentelemetry"
                )
            files = TraceFiles(Path(config.file), self._frequency)
            try:
                files.check()
            except OSError as error:
                raise InvalidArgument(f"trace-config: triton,file={config.file}: {error.strerror}") from error
            return files
        try:
            from inferd.server.observe.tracing.otel import Spans, exporter
        except ImportError as error:
            raise InvalidArgument(
                f"trace-config: mode=opentelemetry needs the extra otel: {pip_install('inferd[otel]')} ({error})"
            ) from error
        return Spans(config, self._service, exporter(config))

    def take(self, records: Sequence[Record]) -> None:
        if any(record["kept"] for record in records):
            self.sink().take(records)

    def close(self) -> None:
        if self._sink is not None:
            self._sink.close()
