"""Returns unused memory to the system after some seconds."""

from __future__ import annotations

import asyncio
from typing import Final

from inferd._native.memory import resource

SHARE: Final = 8
"""The part (1/SHARE) of the server's memory that is kept for reuse, while allocations continue."""

LEAST: Final = 128 << 20
"""Bytes that are kept on any machine."""

INTERVAL: Final = 1.0
"""Seconds between two looks; memory that was free at four looks in turn is returned."""

LOOKS: Final = 5
"""Looks without any allocation between them, after which no memory is left to return."""

REST: Final = 5.0
"""Seconds between looks when no memory is left to return."""

RESTS: Final = 12
"""After each so many of these looks, the heap of the C library, which other code uses, is trimmed."""


async def look_after_memory(usable: int) -> None:
    """Watch the pool of messages and tensors for as long as the server serves.

    Unmapping memory takes time, so another thread does it.

    Args:
        usable: bytes of memory that the server may use.
    """
    resource.keep_at_most(max(LEAST, usable // SHARE))
    still = 0
    while True:
        await asyncio.sleep(INTERVAL if still < LOOKS else REST)
        still = still + 1 if resource.is_still() else 0
        if still < LOOKS or still % RESTS == 0:
            await asyncio.to_thread(resource.cool)
