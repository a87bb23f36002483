"""The shared memory of each model: one arena for its versions and instances."""

from __future__ import annotations

import threading
import weakref

from inferd._native.memory.arena import ArenaHandle

_arenas: weakref.WeakValueDictionary[str, ArenaHandle] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def arena_of(model: str) -> ArenaHandle:
    """The arena of the model with this name; it lives as long as it is referenced.

    Raises:
        OSError: the system gives no shared memory.
    """
    with _lock:
        arena = _arenas.get(model)
        if arena is None:
            _arenas[model] = arena = ArenaHandle(f"inferd:{model}")
        return arena
