"""Keeps the objects of models out of the way of Python's garbage collector.

A full collection looks at every object while it holds the interpreter lock, and so stops the event loop: with thousands
of models, whose objects stay for as long as the server runs, it would delay all requests by tenths of a second. So the
collector skips all objects that exist when the start is over. When a version ends, its objects are freed because
nothing refers to them any more. Only if a backend's objects refer to each other, the collector looks at everything
once.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

RARE: Final = (50_000, 50, 100)
"""Thresholds of the collector while all models are loaded or unloaded."""

_is_aside = False


@contextmanager
def rarely() -> Iterator[None]:
    """Inside of the block, the collector runs rarely: the many objects made there stay, or are freed without it."""
    usual = gc.get_threshold()
    gc.set_threshold(*RARE)
    try:
        yield
    finally:
        if usual != RARE:  # else another engine does so, too, and has them as they were
            gc.set_threshold(*usual)


def set_aside() -> None:
    """Collect once more, and have the collector skip all objects that are left."""
    global _is_aside
    gc.unfreeze()  # so that this collection frees garbage of the frameworks' imports
    gc.collect()
    gc.freeze()
    _is_aside = True


def collect_if_left(left: Iterable[weakref.ref[object]]) -> None:
    """Collect all objects once, skipped ones included, if one of these still exists."""
    if _is_aside and any(each() is not None for each in left):
        set_aside()


def bring_back() -> None:
    """Have the next full collection look at the skipped objects, but for those that others have frozen."""
    global _is_aside
    if _is_aside:
        _is_aside = False
        gc.unfreeze()
