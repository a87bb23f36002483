"""Opens a framework's native libraries before Python imports it.

An import opens libraries with the interpreter locked: with torch that is most of a second in which nothing that needs
Python is answered. Opened here first, by a call that does not hold the lock, they are found already there.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path


def open_libraries(package: str, patterns: tuple[str, ...]) -> None:
    """Open files of an installed package; one that is not there, or does not open, is left to the import to tell of.

    Args:
        package: its import name. Nothing happens if it is imported already, or is not installed.
        patterns: of files, relative to the package's folder; the last of a chain opens those that it depends on.
    """
    if package in sys.modules:
        return
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return
    dlopen = ctypes.CDLL(None).dlopen  # a foreign call: it runs without the lock, unlike ctypes.CDLL(path)
    dlopen.argtypes = (ctypes.c_char_p, ctypes.c_int)
    dlopen.restype = ctypes.c_void_p
    for pattern in patterns:
        for file in Path(spec.origin).parent.glob(pattern):
            dlopen(os.fsencode(file), os.RTLD_NOW | os.RTLD_LOCAL)
