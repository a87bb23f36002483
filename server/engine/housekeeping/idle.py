"""Returns memory to the system that nobody has used for some seconds."""

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

LOOKS: Final = 5
"""With nothing taken or given back in between, after which there is nothing left to give back."""

REST: Final = 5.0
"""Seconds between looks whether that is still so."""

RESTS: Final = 12
"""After so many of them the heap of the C library is looked at, too, which others use as well."""


async def look_after_memory(usable: int) -> None:
    """Watch the pool of messages and tensors for as long as the server serves.

    To unmap memory takes its time, so it happens beside the loop.

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
