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
        self._awaited: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []  # checked after each delivery

    def begin(self) -> None:
        """Deliver from now on, on the running loop."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self.bridge.event_fd, self.deliver)
        loop.add_reader(self.bridge.timers.fd, self._expire)

    def end(self) -> None:
        """Deliver no more."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.bridge.event_fd)
        loop.remove_reader(self.bridge.timers.fd)

    def after_each(self, callback: Callable[[], None]) -> None:
        """Register `callback`, to be called after each delivery."""
        self._callbacks.append(callback)

    def deliver(self) -> None:
        """Deliver all responses that have come, log refused requests, and wake the waiters of `until`."""
        self.bridge.drain()
        for callback in self._callbacks:
            callback()
        refusals, more = self.bridge.take_refusals()
        if refusals:
            self._refusals.add(refusals, more)
        if self._awaited:
            for is_over, last in self._awaited:
                if is_over() and not last.done():
                    last.set_result(None)

    def _expire(self) -> None:
        self.bridge.expire()
        for callback in self._callbacks:
            callback()

    async def until(self, is_over: Callable[[], bool]) -> None:
        """Return when the condition holds; it is checked after each delivery."""
        while not is_over():
            awaited = is_over, asyncio.get_running_loop().create_future()
            self._awaited.append(awaited)
            try:
                await awaited[1]
            finally:
                self._awaited.remove(awaited)
