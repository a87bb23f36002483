"""The log of refused requests: a line for each, at a limited rate."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from server.errors import Status

log = logging.getLogger("inferd.requests")

LINES_PER_SECOND = 20
"""A client that sends nothing but wrong requests must not fill the disk, nor take the loop's time."""

CUT_AT = 512
"""Characters of a text that are logged."""


TOLD_ELSEWHERE = (Status.UNAUTHENTICATED, Status.PERMISSION_DENIED)
"""What was refused for want of rights the log of access has, with its peer."""


class RefusalLog:
    """Writes a line for each refused request, and beyond the limit one line with the number of those left out."""

    def __init__(self, lines_per_second: int = LINES_PER_SECOND) -> None:
        self._limit = lines_per_second
        self._second = 0
        self._lines = 0
        self._left_out = 0

    def add(self, refusals: Iterable[tuple[int, str]], left_out: int = 0, now: float | None = None) -> None:
        """Log requests that were answered with (status, text), and `left_out` more whose texts are not known.

        Args:
            now: seconds on any clock that does not go back; the monotonic one when not given.
        """
        second = int(time.monotonic() if now is None else now)
        if second != self._second:
            self._begin(second)
        for status, text in refusals:
            if status in TOLD_ELSEWHERE:
                continue
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
