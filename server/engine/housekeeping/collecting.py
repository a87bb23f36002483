"""Keeps the objects of models out of the way of Python's garbage collector.

A full collection scans every object while it holds the interpreter lock, and so stops the event loop: with thousands of
models, whose objects live as long as the server, it would delay all requests by tenths of a second. So the collector
skips all objects that exist after the start. When a version ends, reference counts free its objects. Only if a
backend's objects form a cycle does the collector scan everything once.
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
        if usual != RARE:  # otherwise another engine does the same, and will restore them
            gc.set_threshold(*usual)


def set_aside() -> None:
    """Collect once more, and have the collector skip all objects that are left."""
    global _is_aside
    gc.unfreeze()  # so this collection frees garbage of the frameworks' imports
    gc.collect()
    gc.freeze()
    _is_aside = True


def collect_if_left(left: Iterable[weakref.ref[object]]) -> None:
    """Collect all objects once, skipped ones included, if one of these still exists."""
    if _is_aside and any(each() is not None for each in left):
        set_aside()


def bring_back() -> None:
    """Have the next full collection scan the skipped objects, except for those frozen before."""
    global _is_aside
    if _is_aside:
        _is_aside = False
        gc.unfreeze()
