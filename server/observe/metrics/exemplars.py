"""Exemplars: single requests whose traces explain a bucket of a histogram."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final

MOST_VERSIONS: Final = 4096
"""The most model versions with exemplars; those that were traced last stay."""

Key = tuple[str, int]
"""Name and version."""


class Exemplars:
    """Keeps the last traced request of each magnitude; an `inferd.server.observe.tracing.pump.Sink`.

    It keeps successful requests only, as the histograms have no others. The pump's thread writes them, and the thread
    that renders metrics reads them.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._kept: OrderedDict[Key, dict[int, tuple[int, bytes]]] = OrderedDict()

    def take(self, records: Sequence[Mapping[str, Any]]) -> None:
        with self._guard:
            for record in records:
                if record["kept"] and record["status"] == 0:
                    self._keep(record)

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def of(self, model: str, version: int) -> list[tuple[int, bytes]]:
        """Pairs, ascending: the duration of a request in nanoseconds, and its exemplar as text (in microseconds)."""
        with self._guard:
            return sorted(self._kept.get((model, version), {}).values())

    def _keep(self, record: Mapping[str, Any]) -> None:
        key = record["model"], record["version"]
        ns = max(record["ended"] - record["arrived"], 1)
        ids = f'trace_id="{record["trace_id"]}",span_id="{record["span_id"]}"'
        text = f" # {{{ids}}} {ns / 1000:.3f} {record['ended'] / 1e9:.3f}"
        self._kept.setdefault(key, {})[ns.bit_length()] = ns, text.encode()
        self._kept.move_to_end(key)
        if len(self._kept) > MOST_VERSIONS:
            self._kept.popitem(last=False)
