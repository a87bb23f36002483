"""Pointer files: in a clone without Git LFS, a small text stands in place of each model file."""

from __future__ import annotations

from pathlib import Path

from inferd._native.file_contents import find_beginning
from inferd.server.errors import ConfigError

BEGINNING = b"version https://git-lfs.github.com/spec/"
LARGEST = 1024  # bytes of such a text, by its specification


def refuse_pointers(version: Path) -> None:
    """Check that the version's folder holds no pointer file.

    Raises:
        ConfigError: the folder holds one, or cannot be read.
    """
    try:
        found = find_beginning(str(version), BEGINNING, LARGEST)
    except OSError as error:
        raise ConfigError(f"{error.filename or version}: {(error.strerror or str(error)).lower()}") from None
    if found is not None:
        raise ConfigError(f"{version / found}: it is a pointer of Git LFS, not the file itself: run git lfs pull")
