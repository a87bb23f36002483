"""Pointer files: in a clone without Git LFS, a small text stands in place of each model file."""

from __future__ import annotations

import os
from pathlib import Path

from server.errors import ConfigError

BEGINNING = b"version https://git-lfs.github.com/spec/"
LARGEST = 1024  # bytes of such a text, by its specification


def refuse_pointers(version: Path) -> None:
    """Check that the version's folder holds no pointer file.

    Raises:
        ConfigError: the folder holds one, or cannot be read.
    """
    try:
        with os.scandir(version) as entries:
            small = sorted(each.path for each in entries if each.is_file() and each.stat().st_size < LARGEST)
        for file in map(Path, small):
            if file.read_bytes().startswith(BEGINNING):
                raise ConfigError(f"{file}: it is a pointer of Git LFS, not the file itself: run git lfs pull")
    except OSError as error:
        raise ConfigError(f"{error.filename or version}: {(error.strerror or str(error)).lower()}") from None
