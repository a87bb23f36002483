"""Limits how many models are loaded at a time, although a loading model may wait for another one."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager


class Room:
    """Places for loads; a load waits while all are taken. Used on one event loop only.

    A load with a place may wait for a load without one. A caller that knows this tells it by `urge`. If no caller does,
    and no load has got a place for a time, one waiting load goes on beside the others, and the next when it has left.

    Args:
        places: how many.
        patience: that time, in seconds.
    """

    def __init__(self, places: int, patience: float = math.inf) -> None:
        self._free = places  # negative while loads run beside the places
        self._patience = patience
        self._waiting: dict[asyncio.Future[bool], str] = {}  # in order; the result: whether it runs beside the places
        self._urgent: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def place(self, name: str = "") -> AsyncIterator[None]:
        """Have a place for this model inside of the block."""
        beside = await self._enter(name)
        try:
            yield
        finally:
            self._leave(beside)

    @contextmanager
    def urge(self, names: Collection[str]) -> Iterator[None]:
        """Inside of the block, a load with a place waits for these models, which get places at once."""
        self._urgent.update(names)
        for place in [place for place, name in self._waiting.items() if name in names]:
            self._give(place, beside=False)
        try:
            yield
        finally:
            self._urgent.subtract(names)
            self._urgent = +self._urgent

    async def _enter(self, name: str) -> bool:
        if self._free > 0 or name in self._urgent:  # while a place is free, no load waits
            self._free -= 1
            return False
        place: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[place] = name
        self._watch()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._leave(place.result())  # the cancelled load had got a place
            self._waiting.pop(place, None)
            raise

    def _leave(self, beside: bool) -> None:
        self._free += 1
        if self._free > 0 or beside:
            self._let_in(beside)

    def _let_in(self, beside: bool) -> None:
        """Give the first waiting load a place; cancelled loads may still be in the list."""
        while self._waiting:
            if self._give(next(iter(self._waiting)), beside):
                break
        self._unwatch()
        self._watch()

    def _give(self, place: asyncio.Future[bool], beside: bool) -> bool:
        """Whether the load takes the place."""
        del self._waiting[place]
        if place.done():
            return False
        self._free -= 1
        place.set_result(beside)
        return True

    def _watch(self) -> None:
        if self._waiting and self._timer is None and not math.isinf(self._patience):
            self._timer = asyncio.get_running_loop().call_later(self._patience, self._out_of_patience)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _out_of_patience(self) -> None:
        self._timer = None
        self._let_in(beside=True)
