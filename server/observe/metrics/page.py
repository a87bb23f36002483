"""The page for scrapers."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from inferd.server.observe.metrics import process
from inferd.server.observe.metrics.catalogue import ModelFamily
from inferd.server.observe.metrics.exemplars import Exemplars
from inferd.server.observe.metrics.gpu import GpuMetrics
from inferd.server.observe.metrics.own import OwnMetrics, names_of
from inferd.server.observe.metrics.process import Machine
from inferd.server.observe.metrics.service import Service
from inferd.server.observe.metrics.text import Family, Sample
from inferd.server.observe.metrics.versions import OTHERS, Versions

if TYPE_CHECKING:
    from inferd.server.engine.models.version import LoadedVersion

GZIP = 16 + zlib.MAX_WBITS
"""zlib's `wbits` for the format of gzip."""


class Page:
    """Renders metrics on a thread of its own; scrapers that come meanwhile share a rendering.

    Args:
        service: the source of the server's own families.
        families: of models that are shown.
        machine: families of the machine; None: not shown.
        gpus: families of GPUs; None: not shown.
        exemplars: of traced requests, for OpenMetrics.
    """

    def __init__(
        self,
        service: Service,
        families: tuple[ModelFamily, ...],
        *,
        machine: Machine | None = None,
        gpus: GpuMetrics | None = None,
        exemplars: Exemplars | None = None,
    ) -> None:
        self._service = service
        self._versions = Versions(families, exemplars)
        self._own = OwnMetrics()
        self._sources: list[Machine | GpuMetrics] = [source for source in (machine, gpus) if source is not None]
        shown = [*(each.family for each in families), *OTHERS]
        self._taken = {name for family in shown for name in names_of(family.name, family.kind)}
        self._running: dict[tuple[bool, bool], asyncio.Task[list[bytes]]] = {}
        self._turn = asyncio.Lock()

    async def render(self, *, openmetrics: bool = False, packed: bool = False) -> list[bytes]:
        """The page in pieces.

        Args:
            openmetrics: use that format instead of Prometheus' own.
            packed: compressed by gzip.
        """
        key = openmetrics, packed
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = asyncio.create_task(self._render(openmetrics=openmetrics, packed=packed))
            running.add_done_callback(lambda _: self._running.pop(key, None))
        return await asyncio.shield(running)

    async def _render(self, *, openmetrics: bool, packed: bool) -> list[bytes]:
        async with self._turn:  # one rendering at a time: they share values that are kept from one to the next
            service = self._service.families()
            loaded = self._service.engine.loaded()
            return await asyncio.to_thread(self._pieces, service, loaded, openmetrics, packed)

    def _pieces(
        self,
        service: list[tuple[Family, list[Sample]]],
        loaded: list[LoadedVersion],
        openmetrics: bool,
        packed: bool,
    ) -> list[bytes]:
        pieces = self._text(service, loaded, openmetrics)
        if not packed:
            return list(filter(None, pieces))
        packer = zlib.compressobj(1, wbits=GZIP)
        return [*filter(None, map(packer.compress, pieces)), packer.flush()]

    def _text(
        self, service: list[tuple[Family, list[Sample]]], loaded: list[LoadedVersion], openmetrics: bool
    ) -> Iterator[bytes]:
        yield from self._versions.render(loaded, openmetrics=openmetrics)
        sources: list[Iterable[tuple[Family, Iterable[Sample]]]] = [service, process.process()]
        sources += [source.samples() for source in self._sources]
        for source in sources:
            for family, samples in source:
                self._taken |= names_of(family.name, family.kind)
                yield family.head(openmetrics=openmetrics)
                yield family.samples(samples)
        own = self._service.engine.measures.snapshot()
        yield from self._own.render(own, self._taken, openmetrics=openmetrics)
        if openmetrics:
            yield b"# EOF\n"
