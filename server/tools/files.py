"""Files that commands write."""

from __future__ import annotations

import os
from pathlib import Path

from inferd.server.errors import Misused


def check_writable(option: str, path: Path, *endings: str) -> None:
    """Check, before the work, that its results can be written.

    Raises:
        Misused: the name ends otherwise, or such a file cannot be written.
    """
    if path.suffix not in endings:
        raise Misused(f"{option} {path}: expected a name that ends in {' or '.join(endings)}")
    if not path.parent.is_dir():
        raise Misused(f"{option} {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise Misused(f"{option} {path}: you may not write there")
