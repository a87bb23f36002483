"""Limits the number of concurrent loads, although a loading model may wait for another one."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar

from inferd.server.engine.housekeeping.threads import WorkItem, begin

T = TypeVar("T")


class Room:
    """Places for loads; a load waits while all are taken. Used on one event loop only.

    A load with a place may wait for a load without one. A caller that knows this calls `urge`. If none does, and no
    load has got a place for a time, one waiting load runs beside the others, and the next one when it has left.

    With a `pace`, work begins beside other work only when none has begun for that time, and a thread whose work ends
    sooner continues with waiting work before it gives its place back. So long work soon has all places, while one
    thread does short work, such as reading the configurations of thousands of models: the interpreter executes one
    thread at a time anyway, and contending threads take several times as long.

    Args:
        places: how many.
        patience: seconds in which no load gets a place, after which one waiting load runs beside the others.
        pace: seconds without a begin after which more work begins beside the running work.
    """

    def __init__(self, places: int, patience: float = math.inf, pace: float = 0.0) -> None:
        self._places = places
        self._free = places  # negative while loads run beside the places
        self._patience = patience
        self._pace = pace
        # In order. A dict would search for its first entry behind all those that were removed.
        self._waiting: OrderedDict[asyncio.Future[bool], _Waiting] = OrderedDict()
        self._guard = Lock()  # guards `_waiting`, from which threads take entries
        self._urgent: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._begun = -math.inf  # time of the last begin; threads set it, too
        self._next: asyncio.TimerHandle | None = None  # looks for a free place

    @asynccontextmanager
    async def place(self, name: str = "") -> AsyncIterator[None]:
        """Hold a place for this model inside the block."""
        beside = await self._enter(name)
        try:
            yield
        finally:
            self._leave(beside)

    async def work(self, name: str, work: Callable[[], T]) -> T:
        """Return or raise the result of `work` on a thread with a place for this model.

        Running work continues if the caller is cancelled; work that has not begun does not begin then.
        """
        (result,) = await self.work_all({name: work})
        return result

    async def work_all(self, works: Mapping[str, Callable[[], T]]) -> list[T]:
        """Return the results of several works, in order, when all are over; see `work`. The first error is raised.

        It waits for one after the other, so thousands of models do not need a task each.
        """
        items = [self._line_up(name, work) for name, work in works.items()]
        try:
            for item in items:
                await item.done
        except asyncio.CancelledError:
            for item in items:
                self._forget(item.done)
            raise
        return [item.result() for item in items]

    def _line_up(self, name: str, work: Callable[[], T]) -> WorkItem[T]:
        """Begin the work now, or when there is a place for it."""
        item = WorkItem(work, asyncio.get_running_loop().create_future())
        if self._may_come(name):
            self._take()
            self._begin(item, beside=False)
        else:
            self._wait(item.done, _Waiting(name, item))
        return item

    @contextmanager
    def urge(self, names: Collection[str]) -> Iterator[None]:
        """Inside the block, a load with a place waits for these models, which get places at once."""
        self._urgent.update(names)
        with self._guard:
            urgent = [place for place, each in self._waiting.items() if each.name in names]
        for place in urgent:
            self._give(place, beside=False)
        try:
            yield
        finally:
            self._urgent.subtract(names)
            self._urgent = +self._urgent

    # -- places --

    def _may_come(self, name: str) -> bool:
        return name in self._urgent or (not self._waiting and self._is_open())

    async def _enter(self, name: str) -> bool:
        if self._may_come(name):
            self._take()
            return False
        place: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._wait(place, _Waiting(name))
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._leave(place.result())  # the cancelled load had got a place
            self._forget(place)
            raise

    def _wait(self, place: asyncio.Future[bool], who: _Waiting) -> None:
        with self._guard:
            self._waiting[place] = who
        self._watch()

    def _forget(self, place: asyncio.Future[bool]) -> None:
        with self._guard:
            self._waiting.pop(place, None)

    def _take(self) -> None:
        self._free -= 1
        self._begun = time.monotonic()

    def _is_open(self) -> bool:
        """Whether one more load may begin now."""
        if self._free <= 0 or self._free == self._places or not self._pace:
            return self._free > 0
        return time.monotonic() >= self._begun + self._pace

    def _leave(self, beside: bool) -> None:
        self._free += 1
        if beside or self._is_open():
            self._let_in(beside)
        else:
            self._watch()

    def _let_in(self, beside: bool) -> None:
        """Give the first waiting load a place; cancelled loads may still be in the list."""
        while (place := self._first()) is not None:
            if self._give(place, beside):
                break
        self._unwatch()
        self._watch()

    def _first(self) -> asyncio.Future[bool] | None:
        with self._guard:
            return next(iter(self._waiting), None)

    def _give(self, place: asyncio.Future[bool], beside: bool) -> bool:
        """Whether the load takes the place."""
        with self._guard:
            who = self._waiting.pop(place, None)
        if who is None or place.done():  # a thread has taken it, or it is cancelled
            return False
        self._take()
        if who.item is not None:
            self._begin(who.item, beside)
        else:
            place.set_result(beside)
        return True

    # -- timers --

    def _watch(self) -> None:
        if not self._waiting:
            return
        if self._timer is None and not math.isinf(self._patience):
            self._timer = asyncio.get_running_loop().call_later(self._patience, self._out_of_patience)
        if self._next is None and self._free > 0:
            left = self._begun + self._pace - time.monotonic()
            self._next = asyncio.get_running_loop().call_later(max(left, self._pace / 2), self._look)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """Give the first waiting load a free place, or check again later."""
        self._next = None
        if self._is_open():
            self._let_in(beside=False)
        else:
            self._watch()

    def _out_of_patience(self) -> None:
        self._timer = None
        self._let_in(beside=True)

    # -- work on threads --

    def _begin(self, item: WorkItem[Any], beside: bool) -> None:
        """Have a thread do this work, and then other waiting work."""
        loop = asyncio.get_running_loop()
        items = [item]
        end = time.monotonic() + self._pace
        # The last item may wait for the effects of an earlier one; all earlier items are over at `end`.
        late = loop.call_later(2 * self._pace, self._tell, items) if self._pace else None

        def over() -> None:
            if late is not None:
                late.cancel()
            self._tell(items)
            loop.call_soon(self._leave, beside)  # after the callers: the next thread would contend with them

        def tell() -> None:
            try:
                loop.call_soon_threadsafe(over)
            except RuntimeError:  # the loop is closed: no caller waits
                return

        try:
            begin(lambda: self._do(items, end), tell)
        except RuntimeError as error:  # the system has no thread for it
            item.fail(error)
            loop.call_soon(over)

    def _do(self, items: list[WorkItem[Any]], end: float) -> None:
        """On a thread: do the work in the list, then other waiting work, which joins the list; none after `end`."""
        items[0].do()
        while time.monotonic() < end and self._take_along(items):
            items[-1].do()

    def _take_along(self, items: list[WorkItem[Any]]) -> bool:
        with self._guard:
            place = next(iter(self._waiting), None) if self._free >= 0 else None  # else more run than there are places
            if place is None or self._waiting[place].item is None:
                return False
            item = self._waiting.pop(place).item
        assert item is not None
        items.append(item)
        self._begun = time.monotonic()
        return True

    @staticmethod
    def _tell(items: list[WorkItem[Any]]) -> None:
        """Resume the callers whose work has ended."""
        for item in items:
            if item.is_over:
                item.tell()


@dataclass(eq=False, slots=True)
class _Waiting:
    """A load that waits for a place. With an `item`, the thread that gets the place does this work."""

    name: str
    item: WorkItem[Any] | None = None
