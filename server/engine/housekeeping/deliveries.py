"""Delivers finished responses on the event loop, runs the work that follows them, and logs refused requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from inferd._native.request.bridge import BridgeHandle
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


class Deliveries:
    """The event loop's end of the bridge.

    Attributes:
        bridge: brings responses from the threads of instances.
    """

    def __init__(self) -> None:
        self.bridge = BridgeHandle()
        self._callbacks: list[Callable[[], None]] = []
        self._refusals = RefusalLog()
        self._awaited: list[tuple[Callable[[], bool], asyncio.Event]] = []  # checked after each delivery

    def begin(self) -> None:
        """Deliver from now on, on the running loop or, while there is one, on an I/O thread."""
        timers = self.bridge.timers
        asyncio.get_running_loop().add_reader(timers.hear(), timers.run_events)
        self.bridge.on_news = self._delivered
        self.bridge.on_hand_over = self._hand_over
        self._hand_over(False)

    def end(self) -> None:
        """Deliver no more."""
        self._hand_over(True)
        self.bridge.on_news = self.bridge.on_hand_over = None
        asyncio.get_running_loop().remove_reader(self.bridge.timers.hear())

    def _hand_over(self, away: bool) -> None:
        """`away`: an I/O thread delivers from now on. Else the loop delivers, the responses that wait first."""
        loop = asyncio.get_running_loop()
        if away:
            loop.remove_reader(self.bridge.event_fd)
            loop.remove_reader(self.bridge.timers.fd)
        else:
            loop.add_reader(self.bridge.event_fd, self.deliver)
            loop.add_reader(self.bridge.timers.fd, self._expire)
            loop.call_soon(self.deliver)

    def after_each(self, callback: Callable[[], None]) -> None:
        """Register `callback`, to be called after each delivery."""
        self._callbacks.append(callback)

    def deliver(self) -> None:
        """Deliver all responses that have come, on the loop."""
        self.bridge.drain()
        for callback in self._callbacks:
            callback()
        self._delivered()

    def _delivered(self) -> None:
        """Log refused requests, and wake the waiters of `until`."""
        refusals, more = self.bridge.take_refusals()
        if refusals:
            self._refusals.add(refusals, more)
        if self._awaited:
            for is_over, changed in self._awaited:
                if is_over():
                    changed.set()

    def _expire(self) -> None:
        self.bridge.expire()
        for callback in self._callbacks:
            callback()

    async def until(self, is_over: Callable[[], bool]) -> None:
        """Return when the condition holds; it is checked after each delivery."""
        awaited = is_over, asyncio.Event()
        self._awaited.append(awaited)
        self.bridge.watch(True)
        try:
            while not is_over():
                awaited[1].clear()
                await awaited[1].wait()
        finally:
            self._awaited.remove(awaited)
            self.bridge.watch(bool(self._awaited))
