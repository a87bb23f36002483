"""The log of refused requests: a line for each, at a limited rate."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from inferd.server.errors import Status

log = logging.getLogger("inferd.requests")

LINES_PER_SECOND = 20
"""The limit keeps a client with many wrong requests from filling the disk and taking the loop's time."""

CUT_AT = 512
"""How many characters of a text are logged."""


class RefusalLog:
    """Writes a line for each refused request, and one with the number of requests beyond the limit."""

    def __init__(self, lines_per_second: int = LINES_PER_SECOND) -> None:
        self._limit = lines_per_second
        self._second = 0
        self._lines = 0
        self._left_out = 0

    def add(self, refusals: Iterable[tuple[int, str]], left_out: int = 0, now: float | None = None) -> None:
        """Log requests that were answered with (status, text), and `left_out` more without texts.

        Args:
            now: seconds of a monotonic clock; by default time.monotonic().
        """
        second = int(time.monotonic() if now is None else now)
        if second != self._second:
            self._begin(second)
        for status, text in refusals:
            if self._lines < self._limit:
                self._lines += 1
                log.warning("refused: %s: %s", Status(status).name, text[:CUT_AT])
            else:
                self._left_out += 1
        self._left_out += left_out

    def _begin(self, second: int) -> None:
        if self._left_out:
            log.warning("refused: %d more requests, left out here", self._left_out)
        self._second, self._lines, self._left_out = second, 0, 0
