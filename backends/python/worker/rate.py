"""Messages to the log, as many as the server writes: those of one model must not keep it from its other work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SECOND = 1.0


class Rate:
    """Admits a number of messages in a second, which begins with the first message.

    It counts the messages that it leaves out, and tells their number when the second is over.

    Args:
        most: that number.
        tell: called with the number of those that were left out, on any thread.
    """

    def __init__(self, most: int, tell: Callable[[int], None]) -> None:
        self._most = most
        self._tell = tell
        self._lock = threading.RLock()  # a signal handler may log, too
        self._ends = 0.0  # the second that counts now, by time.monotonic()
        self._left = 0
        self._dropped = 0

    def admits(self) -> bool:
        """Whether there is room for one more, which is taken."""
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
        """Tell how many were left out, if any were."""
        with self._lock:
            dropped, self._dropped = self._dropped, 0
        if dropped:
            self._tell(dropped)
