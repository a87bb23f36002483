"""What models are made of, out of the way of Python's garbage collector.

A full collection looks at every object while it has the interpreter, and so the event loop: at thousands of models,
whose objects stay for as long as the server runs, each would hold all requests up for tenths of a second. So what is
there when the start is over is not looked at again. When a version ends it is, as its objects may refer to each other.
"""

from __future__ import annotations

import gc


def set_aside() -> None:
    """Collect once more, and look at nothing of what is left from then on."""
    gc.collect()
    gc.freeze()


def bring_back() -> None:
    """Look at everything in the next full collection."""
    gc.unfreeze()
