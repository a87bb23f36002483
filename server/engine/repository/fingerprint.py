"""The fingerprint of a version: a digest of everything on which its responses depend.

Responses that outlive the server are stored under it. So a version with changed files or configuration never returns
old responses, and servers with equal files share responses.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger("inferd.cache")

CHUNK = 1 << 20


def fingerprint(path: Path, config_json: str) -> bytes:
    """The SHA-256 of a version's configuration and of the names and contents of its files. Blocks: it reads all files.

    Args:
        path: the version's folder.
        config_json: its complete configuration.

    Returns:
        32 bytes; empty if a file cannot be read, which is logged.
    """
    whole = hashlib.sha256(config_json.encode())
    try:
        for file in _files(path):
            whole.update(str(file.relative_to(path)).encode(errors="surrogateescape") + b"\0")
            whole.update(_digest(file))
    except OSError as error:
        log.warning("responses of %s are not kept: %s", path, error)
        return b""
    return whole.digest()


def _files(path: Path) -> Iterator[Path]:
    """The files in the folder, without those that interpreters leave there."""
    for entry in sorted(path.rglob("*")):
        if entry.is_file() and "__pycache__" not in entry.parts:
            yield entry


def _digest(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.digest()
