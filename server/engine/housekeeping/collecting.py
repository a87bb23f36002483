"""What models are made of, out of the way of Python's garbage collector.

A full collection looks at every object while it has the interpreter, and so the event loop: at thousands of models,
whose objects stay for as long as the server runs, each would hold all requests up for tenths of a second. So what is
there when the start is over is not looked at again. The objects of a version that ends are freed as nothing refers to
them any more. Only where a backend's objects refer to each other does this not happen, and everything is looked at
once.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

_is_aside = False


def set_aside() -> None:
    """Collect once more, and look at nothing of what is left from then on."""
    global _is_aside
    gc.unfreeze()  # what was garbage when a framework was imported is found here
    gc.collect()
    gc.freeze()
    _is_aside = True


def collect_if_left(left: Iterable[weakref.ref[object]]) -> None:
    """Look at everything that was set aside, once, if one of these is still there."""
    if _is_aside and any(each() is not None for each in left):
        set_aside()


def bring_back() -> None:
    """Look at what was set aside in the next full collection; what others have frozen stays so."""
    global _is_aside
    if _is_aside:
        _is_aside = False
        gc.unfreeze()
