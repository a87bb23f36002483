"""Makes the metrics of the server, and the recording of its requests, from the settings."""

from __future__ import annotations

import logging
from importlib import metadata

from inferd.server.engine.engine import Engine
from inferd.server.errors import InvalidArgument, StartError
from inferd.server.front.door import Door
from inferd.server.front.native import NativeDoor
from inferd.server.front.scrape import ScrapeListener
from inferd.server.front.services import CALL_KINDS
from inferd.server.observe.logs import Logs
from inferd.server.observe.metrics.catalogue import chosen
from inferd.server.observe.metrics.exemplars import Exemplars
from inferd.server.observe.metrics.gpu import GpuMetrics
from inferd.server.observe.metrics.page import Page
from inferd.server.observe.metrics.process import Machine
from inferd.server.observe.metrics.service import Service, Traffic
from inferd.server.observe.recording import Recording
from inferd.server.settings import Settings

log = logging.getLogger("inferd")


def make_service(settings: Settings, engine: Engine, door: Door, logs: Logs) -> Service:
    """The sources of the server's metrics."""
    build = {"version": metadata.version("inferd"), "transport": settings.transport}
    traffic = door.traffic if isinstance(door, NativeDoor) else Traffic
    return Service(engine, build, kinds=CALL_KINDS, traffic=traffic, lines_lost=lambda: logs.lost)


async def serve_metrics(settings: Settings, service: Service, exemplars: Exemplars | None) -> ScrapeListener | None:
    """Start the listener for scrapers; None without metrics.

    Raises:
        StartError: the server cannot listen on the address of metrics.
    """
    if not settings.allow_metrics:
        return None
    interval = settings.metrics_interval_ms / 1000
    page = Page(
        service,
        chosen(settings.metrics_switches),
        machine=Machine(interval) if settings.allow_cpu_metrics else None,
        gpus=GpuMetrics(interval) if settings.allow_gpu_metrics else None,
        exemplars=exemplars,
    )
    listener = ScrapeListener(lambda openmetrics, packed: page.render(openmetrics=openmetrics, packed=packed))
    try:
        log.info("Started Metrics Service at %s", await listener.start(settings.metrics_bind))
    except OSError as error:
        raise StartError(str(error)) from error
    return listener


def make_recording(settings: Settings, engine: Engine) -> Recording:
    """The recording of requests for traces and logs.

    Raises:
        StartError: traces cannot be written or sent as the settings say.
    """
    try:
        return Recording(settings, engine)
    except InvalidArgument as error:
        raise StartError(str(error)) from error
