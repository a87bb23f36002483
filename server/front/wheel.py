"""Deadlines of all connections on one timer of the event loop.

They are coarse: what is due fires up to GRANULARITY late, never early, and everything due in the same slot fires
together. A thousand connections that wait for something hours away cost one timer.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable

GRANULARITY = 0.25  # seconds


class TimerWheel:
    """Calls each entry's function at its deadline.

    Args:
        loop: whose clock the deadlines are on.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._slots: dict[int, set[Entry]] = {}
        self._order: list[int] = []  # heap of the slots' numbers
        self._timer: asyncio.TimerHandle | None = None

    def entry(self, function: Callable[[], None]) -> Entry:
        """A new entry without a deadline."""
        return Entry(self, function)

    def close(self) -> None:
        """Fire nothing more."""
        if self._timer is not None:
            self._timer.cancel()
        self._slots.clear()
        self._order.clear()

    def _add(self, slot: int, entry: Entry) -> None:
        if slot not in self._slots:
            self._slots[slot] = set()
            heapq.heappush(self._order, slot)
            if self._order[0] == slot:
                self._arm()
        self._slots[slot].add(entry)

    def _remove(self, slot: int, entry: Entry) -> None:
        # the slot stays, empty: it costs one wake-up at most
        if slot in self._slots:
            self._slots[slot].discard(entry)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._order[0] * GRANULARITY, self._fire) if self._order else None

    def _fire(self) -> None:
        self._timer = None
        now = self._loop.time()
        due: list[Entry] = []
        # uvloop's timers may fire up to a millisecond early
        while self._order and self._order[0] * GRANULARITY <= now + 0.002:
            due += self._slots.pop(heapq.heappop(self._order))
        for entry in due:
            entry.slot = None
            self._loop.call_soon(entry.function)
        self._arm()


class Entry:
    """One deadline, which may be moved at any time; the function may still be called once after `cancel`."""

    __slots__ = ("_wheel", "function", "slot")

    def __init__(self, wheel: TimerWheel, function: Callable[[], None]) -> None:
        self._wheel = wheel
        self.function = function
        self.slot: int | None = None

    def set(self, deadline: float) -> None:
        """Fire at `deadline`, and not before; infinity for never."""
        slot = None if math.isinf(deadline) else math.ceil(deadline / GRANULARITY)
        if slot == self.slot:
            return
        self.cancel()
        self.slot = slot
        if slot is not None:
            self._wheel._add(slot, self)

    def cancel(self) -> None:
        """Forget the deadline."""
        if self.slot is not None:
            self._wheel._remove(self.slot, self)
            self.slot = None
