"""The log of connections that violate HTTP/2 or speak another protocol: one line a minute for each reason."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable

log = logging.getLogger("inferd.front")

INTERVAL = 60.0
"""Seconds: probes that speak HTTP/1 come every few seconds, and hostile peers as fast as they can."""

SPARE_DESCRIPTORS = 16
"""Descriptors reserved for other uses than connections: a starting worker takes about as many."""

REASONS = 256
"""The most distinct reasons; there are a few dozen."""


class ConnectionLog:
    """Writes a line when a reason first occurs, and then at most one a minute, with the number of occurrences.

    Args:
        clock: seconds that do not go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def add(self, peer: str, reason: str) -> None:
        """Something that `peer` sent is refused, and with it the call or the connection."""
        self._say("refused, from %s: %s%s", peer, reason)

    def is_scarce(self, peer: str, descriptor: int) -> bool:
        """Whether a connection with this descriptor, the lowest free one, leaves the server too few."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        spare = min(SPARE_DESCRIPTORS, most // 8)
        if most < 0 or descriptor + spare < most:
            return False
        self.add(peer, f"the last {spare} of the server's {most} open files (ulimit -n) are for loads and workers")
        return True

    def fails(self, address: str, error: OSError) -> None:
        """Accepting connections there fails now."""
        self._say("cannot accept at %s: %s%s", address, str(error.strerror or error))

    def _say(self, line: str, peer: str, reason: str) -> None:
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
        log.warning(line, peer, reason, others)
