"""The one way in which tests wait for what nothing tells of: they look until it holds, and only a fault takes long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 120.0
"""Seconds that something may take before it counts as a fault, also on a machine that does much else."""
PAUSE = 0.01
"""Seconds between two looks."""


def wait_until(condition: Callable[[], object], missing: str = "it did not happen", *also: type[Exception]) -> None:
    """Look until the condition holds.

    Args:
        missing: what is said when it does not.
        also: errors of the condition that mean that it does not hold yet.
    """
    end = time.monotonic() + PATIENCE
    while not _holds(condition, also):
        assert time.monotonic() < end, missing
        time.sleep(PAUSE)


def _holds(condition: Callable[[], object], also: tuple[type[Exception], ...]) -> object:
    try:
        return condition()
    except also:
        return False


async def until(condition: Callable[[], object], missing: str = "it did not happen") -> None:
    """Wait for the condition while the event loop turns."""
    end = time.monotonic() + PATIENCE
    turns = 0
    while not condition():
        assert time.monotonic() < end, missing
        turns += 1
        await asyncio.sleep(0 if turns < 100 else PAUSE)


def at_rest(look: Callable[[], T]) -> T:
    """What a hundred looks in a row find alike. Each look should be a round trip to the server, which so can go on."""
    found, same = look(), 0
    while same < 100:
        before, found = found, look()
        same = same + 1 if found == before else 0
    return found


def look_until(look: Callable[[], T], wanted: Callable[[T], object] = bool) -> T:
    """Look until what is found is wanted, which by default is what is true; returns it, and tells it in a failure."""
    end = time.monotonic() + PATIENCE
    while not wanted(found := look()):
        assert time.monotonic() < end, f"found last: {found!r}"
        time.sleep(PAUSE)
    return found
