"""Turns: changes of the same models happen one after the other, in the order in which they were asked for.

A turn is for a set of names, and waits for every earlier one that shares a name with it: so it has all of them or none,
and turns of other models run meanwhile. A turn may be taken on behalf of another one that waits for it: that is how a
model which loads another one while it is loaded itself can be told from one that waits for itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


class Circle(Exception):
    """The turn would wait for the one that waits for it."""


@dataclass(eq=False, slots=True)
class Turn:
    """One change, from when it is asked for until it is over."""

    names: frozenset[str]
    parent: Turn | None  # that waits for this one
    ahead: list[Turn]  # earlier ones of the same names, when this one was asked for
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Turns:
    """Used on one event loop only."""

    def __init__(self) -> None:
        self._turns: list[Turn] = []  # those that run and those that wait, in order

    @asynccontextmanager
    async def of(self, names: Iterable[str], parent: Turn | None = None) -> AsyncIterator[Turn]:
        """Have the turn of these names inside of the block.

        Raises:
            Circle: it would wait for `parent`, which is to wait for it.
        """
        wanted = frozenset(names)
        turn = Turn(wanted, parent, [other for other in self._turns if other.names & wanted])
        if parent is not None and self._reaches(turn.ahead, parent):
            raise Circle
        self._turns.append(turn)
        try:
            for other in turn.ahead:
                await other.over.wait()
            yield turn
        finally:
            self._turns.remove(turn)
            turn.over.set()

    def ahead(self, names: Iterable[str]) -> frozenset[str]:
        """These names, and those of all changes that one of them would have to wait for now."""
        found, left = frozenset(names), True
        while left:
            more = found.union(*(turn.names for turn in self._turns if turn.names & found))
            left, found = more != found, more
        return found

    async def idle(self) -> None:
        """Return when no turn is left."""
        while self._turns:
            await self._turns[-1].over.wait()

    def _reaches(self, turns: Iterable[Turn], end: Turn) -> bool:
        """Whether one of `turns` is `end` or waits for it, through whatever others."""
        seen: set[Turn] = set()
        open_ = [turn for turn in turns if not turn.over.is_set()]
        while open_:
            turn = open_.pop()
            if turn is end:
                return True
            if turn not in seen:
                seen.add(turn)
                children = [other for other in self._turns if other.parent is turn]
                open_.extend(other for other in (*turn.ahead, *children) if not other.over.is_set())
        return False
