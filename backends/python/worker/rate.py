"""Limits messages to the log: those of one model must not keep the server from its other work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SECOND = 1.0


class Rate:
    """Admits a number of messages in each second, which begins with the first message.

    It counts the dropped messages, and reports their number after the second.

    Args:
        most: that number.
        tell: called with the number of dropped messages, on any thread.
    """

    def __init__(self, most: int, tell: Callable[[int], None]) -> None:
        self._most = most
        self._tell = tell
        self._lock = threading.RLock()  # a signal handler may log, too
        self._ends = 0.0  # begin of the current second, by time.monotonic()
        self._left = 0
        self._dropped = 0

    def admits(self) -> bool:
        """Admit one more message; False if the limit is reached."""
        with self._lock:
            now = time.monotonic()
            if now >= self._ends:
                self._ends = now + SECOND
                self._left = self._most
            if self._left:
                self._left -= 1
                return True
            self._dropped += 1
            if self._dropped == 1:
                later = threading.Timer(self._ends - now, self.tell_dropped)
                later.daemon = True
                later.start()
            return False

    def tell_dropped(self) -> None:
        """Report the number of dropped messages, if any."""
        with self._lock:
            dropped, self._dropped = self._dropped, 0
        if dropped:
            self._tell(dropped)
