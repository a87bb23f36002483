"""Long work on the event loop, in parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from itertools import islice
from typing import Final, TypeVar

T = TypeVar("T")

SLICE: Final = 32
"""Models per slice, at some 3 us each."""


LARGE: Final = 256
"""Models per slice, at some 0.3 us each."""


async def slices(items: Iterable[T], size: int = SLICE) -> AsyncIterator[list[T]]:
    """Yield the items in slices; the loop does other work after each."""
    left = iter(items)
    while part := list(islice(left, size)):
        yield part
        await asyncio.sleep(0)
