"""Long work on the event loop, in parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from itertools import islice
from typing import Final, TypeVar

T = TypeVar("T")

SLICE: Final = 32
"""Models after which others have their turn: some 3 us each."""


async def slices(items: Iterable[T]) -> AsyncIterator[list[T]]:
    """The items, SLICE at a time; the loop does what else there is after each part."""
    left = iter(items)
    while part := list(islice(left, SLICE)):
        yield part
        await asyncio.sleep(0)
