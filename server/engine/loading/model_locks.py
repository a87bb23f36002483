"""Locks of models: changes of the same models happen one after the other, in the order of their requests.

A lock is for a set of names, and waits for every earlier lock that shares a name with it. So it holds all its names or
none, and other models can be locked meanwhile. A lock may be taken on behalf of another lock that waits for it: this
distinguishes a model that loads another one during its own load from a model that waits for itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field


class Deadlock(Exception):
    """The lock would wait for a lock that waits for it.

    Attributes:
        between: the names of the locks between the two; each waits for the next one, and the last one for the first
            lock.
    """

    def __init__(self, between: Sequence[frozenset[str]] = ()) -> None:
        super().__init__()
        self.between = tuple(between)


@dataclass(eq=False, slots=True)
class ModelLock:
    """One change, from its request to its end."""

    names: frozenset[str]
    parent: ModelLock | None  # the lock that waits for this one
    ahead: list[ModelLock]  # earlier locks of the same names, at the time of the request
    over: asyncio.Event = field(default_factory=asyncio.Event)


class ModelLocks:
    """Used on one event loop only."""

    def __init__(self) -> None:
        self._locks: dict[ModelLock, None] = {}  # held and waiting ones, in order
        self._named: dict[str, dict[ModelLock, None]] = {}  # the same by each of their names
        self._waits: list[tuple[ModelLock, str]] = []  # changes that wait for all locks of a name, later ones included

    @asynccontextmanager
    async def of(self, names: Iterable[str], parent: ModelLock | None = None) -> AsyncIterator[ModelLock]:
        """Hold the lock of these names inside the block.

        Raises:
            Deadlock: the lock would wait for `parent`, or for a change that waits for all locks of one of its names.
        """
        wanted = frozenset(names)
        lock = ModelLock(wanted, parent, list(self._of(wanted)))
        waiting = [each for each, name in self._waits if name in wanted]
        for each in ([parent] if parent is not None else []) + waiting:
            self._refuse_circle(lock.ahead, each)
        self._locks[lock] = None
        for name in wanted:
            self._named.setdefault(name, {})[lock] = None
        try:
            for other in lock.ahead:
                await other.over.wait()
            yield lock
        finally:
            del self._locks[lock]
            for name in wanted:
                del self._named[name][lock]
                if not self._named[name]:
                    del self._named[name]
            lock.over.set()

    def _of(self, names: Iterable[str]) -> dict[ModelLock, None]:
        """The locks that have one of these names."""
        return {lock: None for name in names for lock in self._named.get(name, ())}

    @contextmanager
    def waiting(self, waiter: ModelLock, name: str) -> Iterator[None]:
        """Inside the block, the change `waiter` waits for all changes of a model.

        Raises:
            Deadlock: one of these changes waits for `waiter`.
        """
        self._refuse_circle(self._of((name,)), waiter)
        wait = (waiter, name)
        self._waits.append(wait)
        try:
            yield
        finally:
            self._waits.remove(wait)

    def ahead(self, names: Iterable[str]) -> frozenset[str]:
        """The names, and the names of all changes for which a lock of them would wait now."""
        found = set(names)
        left = list(found)
        while left:
            more = frozenset[str]().union(*(lock.names for lock in self._of((left.pop(),)))) - found
            found |= more
            left.extend(more)
        return frozenset(found)

    async def idle(self) -> None:
        """Return when no lock is held or waited for."""
        while self._locks:
            await next(reversed(self._locks)).over.wait()

    def _refuse_circle(self, locks: Iterable[ModelLock], end: ModelLock) -> None:
        """Raises Deadlock if one of `locks` is `end`, or waits for it directly or through others."""
        before: dict[ModelLock, ModelLock | None] = {lock: None for lock in locks if not lock.over.is_set()}
        open_ = list(before)
        while open_:
            lock = open_.pop()
            if lock is end:
                raise Deadlock(_names_of(before, before[end]))
            awaited = {name for waiter, name in self._waits if waiter is lock}
            children = [other for other in self._locks if other.parent is lock]
            for other in (*lock.ahead, *children, *self._of(awaited)):
                if not other.over.is_set() and other not in before:
                    before[other] = lock
                    open_.append(other)


def _names_of(before: Mapping[ModelLock, ModelLock | None], last: ModelLock | None) -> list[frozenset[str]]:
    """The names of the locks up to the last one, from the first one on."""
    found = []
    while last is not None:
        found.append(last.names)
        last = before[last]
    return found[::-1]
