"""Delivers finished responses on the event loop, and runs the engine's work that follows them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from inferd._native.request.bridge import BridgeHandle
from inferd.server.engine.refusals import RefusalLog


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
        """An I/O thread delivers from now on; or the loop does again, what has come meanwhile first."""
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
