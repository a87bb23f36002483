"""How many models are made at a time, where one that is made may wait for another."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import Self


class Room:
    """Places for so many at a time; who comes when they are taken waits. Used on one event loop only.

    Those that have a place may wait for one of those that have none, by ways that nobody here knows of: so when nobody
    has got a place for a time, one who waits goes on beside them.

    Args:
        places: how many.
        patience: seconds of that time.
    """

    def __init__(self, places: int, patience: float = math.inf) -> None:
        self._free = places  # less than none, while others are let in beside
        self._patience = patience
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        if self._free > 0:  # then nobody waits
            self._free -= 1
            return self
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._watch()
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():
                self._leave()  # it has got one
            elif place in self._waiting:
                self._waiting.remove(place)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        self._free += 1
        if self._free > 0:
            self._let_in()

    def _let_in(self) -> None:
        """Give one who waits a place, if anybody does; those who have given up may still be among them."""
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                self._free -= 1
                place.set_result(None)
                break
        self._unwatch()
        self._watch()

    def _watch(self) -> None:
        if self._waiting and self._timer is None and not math.isinf(self._patience):
            self._timer = asyncio.get_running_loop().call_later(self._patience, self._out_of_patience)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _out_of_patience(self) -> None:
        self._timer = None
        self._let_in()
