"""Locks of models: changes of the same models happen one after the other, in the order of their requests.

A lock is for a set of names, and waits for every earlier lock that shares a name with it. So it holds all of them or
none, and locks of other models can be held meanwhile. A lock may be taken on behalf of another one that waits for it:
so a model that loads another one while it is being loaded differs from a model that waits for itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


class Deadlock(Exception):
    """The lock would wait for the one that waits for it."""


@dataclass(eq=False, slots=True)
class ModelLock:
    """One change, from when it is asked for until it is over."""

    names: frozenset[str]
    parent: ModelLock | None  # that waits for this one
    ahead: list[ModelLock]  # earlier ones of the same names, when this one was asked for
    over: asyncio.Event = field(default_factory=asyncio.Event)


class ModelLocks:
    """Used on one event loop only."""

    def __init__(self) -> None:
        self._locks: list[ModelLock] = []  # those that run and those that wait, in order

    @asynccontextmanager
    async def of(self, names: Iterable[str], parent: ModelLock | None = None) -> AsyncIterator[ModelLock]:
        """Hold the lock of these names inside of the block.

        Raises:
            Deadlock: it would wait for `parent`, which is to wait for it.
        """
        wanted = frozenset(names)
        lock = ModelLock(wanted, parent, [other for other in self._locks if other.names & wanted])
        if parent is not None and self._reaches(lock.ahead, parent):
            raise Deadlock
        self._locks.append(lock)
        try:
            for other in lock.ahead:
                await other.over.wait()
            yield lock
        finally:
            self._locks.remove(lock)
            lock.over.set()

    def ahead(self, names: Iterable[str]) -> frozenset[str]:
        """These names, and those of all changes that one of them would have to wait for now."""
        found, left = frozenset(names), True
        while left:
            more = found.union(*(lock.names for lock in self._locks if lock.names & found))
            left, found = more != found, more
        return found

    async def idle(self) -> None:
        """Return when no lock is held or waited for."""
        while self._locks:
            await self._locks[-1].over.wait()

    def _reaches(self, locks: Iterable[ModelLock], end: ModelLock) -> bool:
        """Whether one of `locks` is `end` or waits for it, through whatever others."""
        seen: set[ModelLock] = set()
        open_ = [lock for lock in locks if not lock.over.is_set()]
        while open_:
            lock = open_.pop()
            if lock is end:
                return True
            if lock not in seen:
                seen.add(lock)
                children = [other for other in self._locks if other.parent is lock]
                open_.extend(other for other in (*lock.ahead, *children) if not other.over.is_set())
        return False
