"""Imports a framework into a running server.

An import opens libraries while it holds the interpreter lock: torch holds it for most of a second, and the server's
Python code stands still. So this module opens the libraries first, by a call that does not hold the lock. An import
also makes so many objects (torch: 200,000) that the garbage collector would scan all of them several times, for up to
0.2 s each. So the collector is off meanwhile, and never scans these objects: they live as long as the process.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import os
import sys
import threading
from pathlib import Path

_lock = threading.Lock()
_importing = 0  # threads that import a framework
_collects = True  # whether the collector was on before the first of them


def import_framework(package: str) -> None:
    """Import a package without the garbage collector; the import raises what it always does. Safe in any thread."""
    global _importing, _collects
    if package in sys.modules:
        return
    with _lock:
        if not _importing:
            _collects = gc.isenabled()
            gc.disable()
        _importing += 1
    try:
        importlib.import_module(package)
    finally:
        with _lock:
            gc.freeze()
            _importing -= 1
            if not _importing and _collects:
                gc.enable()


def open_libraries(package: str, patterns: tuple[str, ...]) -> None:
    """Open files of an installed package. The import reports a file that is missing or does not open.

    Args:
        package: its import name. Nothing happens if it is imported already, or is not installed.
        patterns: of files, relative to the package's folder; opening a file opens those that it depends on.
    """
    if package in sys.modules:
        return
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return
    dlopen = ctypes.CDLL(None).dlopen  # a foreign call, which runs without the GIL, unlike ctypes.CDLL(path)
    dlopen.argtypes = (ctypes.c_char_p, ctypes.c_int)
    dlopen.restype = ctypes.c_void_p
    for pattern in patterns:
        for file in Path(spec.origin).parent.glob(pattern):
            dlopen(os.fsencode(file), os.RTLD_NOW | os.RTLD_LOCAL)
