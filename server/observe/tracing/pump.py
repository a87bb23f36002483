"""Passes the records of ended requests to their consumers, on a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from inferd._native.request.recorder import RecorderHandle

log = logging.getLogger("inferd.trace")

Record = Mapping[str, Any]
"""See `inferd._native.request.recorder.RecorderHandle.take`."""

INTERVAL: Final = 0.1
"""Seconds between two looks."""

LAST_SECONDS: Final = 5.0
"""Seconds for the remaining records when the server ends."""


class Sink(Protocol):
    """A consumer of records."""

    def take(self, records: Sequence[Record]) -> None:
        """Take the records of requests that ended since the last call. On the pump's thread."""

    def close(self) -> None:
        """No more records come. On the pump's thread."""


class Pump:
    """Moves records from the recorder to sinks.

    Args:
        recorder: has the records.
        sinks: get the records.
    """

    def __init__(self, recorder: RecorderHandle, sinks: Sequence[Sink]) -> None:
        self._recorder = recorder
        self._sinks = sinks
        self._ended = threading.Event()
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Move the remaining records, and close the sinks."""
        self._ended.set()
        self._thread.join(LAST_SECONDS)

    def _run(self) -> None:
        over = False
        while not over:
            over = self._ended.wait(INTERVAL)
            self._guarded(self._move)
        for sink in self._sinks:
            self._guarded(sink.close)

    def _move(self) -> None:
        records = self._recorder.take()
        if self._recorder.lost != self._lost:
            log.warning(
                "%d records of requests were dropped: too many ended at a time", self._recorder.lost - self._lost
            )
            self._lost = self._recorder.lost
        if records:
            for sink in self._sinks:
                self._guarded(sink.take, records)

    @staticmethod
    def _guarded(call: Any, *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception:
            log.exception("records of requests could not be written")
