"""The log of connections that violate HTTP/2 or speak another protocol: one line a minute for each reason."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger("inferd.front")

INTERVAL = 60.0
"""Seconds: probes that speak HTTP/1 come every few seconds, and hostile peers as fast as they can."""

REASONS = 256
"""At most so many are told apart; there are a few dozen."""


class ConnectionLog:
    """Writes a line for the first time of each reason, and then at most one a minute, with their number.

    Args:
        clock: seconds that do not go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def add(self, peer: str, reason: str) -> None:
        """What `peer` sent is refused, and so the call or the connection is."""
        now = self._clock()
        if now - self._said.get(reason, now - INTERVAL) < INTERVAL:
            self._left_out[reason] = self._left_out.get(reason, 0) + 1
            return
        if len(self._said) >= REASONS:
            self._said.clear()
            self._left_out.clear()
        more = self._left_out.pop(reason, 0)
        self._said[reason] = now
        others = f" ({more} more like it since the last line)" if more else ""
        log.warning("refused, from %s: %s%s", peer, reason, others)
