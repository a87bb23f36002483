"""Gives back to the system the memory that nobody has used for some seconds."""

from __future__ import annotations

import asyncio
from typing import Final

from _native.memory import resource

SHARE: Final = 8
"""Of the memory that the server may use, one part in so many is kept for reuse while it is asked for."""

LEAST: Final = 128 << 20
"""Bytes that are kept on any machine."""

INTERVAL: Final = 1.0
"""Seconds from one look to the next; what was free at four of them in turn goes."""


async def look_after_memory(usable: int) -> None:
    """Watch the pool of messages and tensors for as long as the server serves.

    To unmap memory takes its time, so it happens beside the loop.

    Args:
        usable: bytes of memory that the server may use.
    """
    resource.keep_at_most(max(LEAST, usable // SHARE))
    while True:
        await asyncio.sleep(INTERVAL)
        await asyncio.to_thread(resource.cool)
