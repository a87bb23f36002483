"""Long work on the event loop, in parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Final, TypeVar

T = TypeVar("T")

SLICE: Final = 4
"""Models after which others have their turn: some 20 us each."""


async def in_slices(items: Iterable[T]) -> AsyncIterator[T]:
    """The items; the loop does what else there is after some of them."""
    for number, item in enumerate(items, 1):
        yield item
        if number % SLICE == 0:
            await asyncio.sleep(0)
