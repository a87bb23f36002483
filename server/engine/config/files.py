"""Files that a configuration names: read only if they are regular files inside the model's folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath

from server.errors import ConfigError


def inside(base: Path, name: str, model_dir: Path) -> Path:
    """`base`/`name` as a path inside the model's folder, links followed; whether it exists is not looked at.

    Raises:
        ConfigError: it leads out of the folder.
    """
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or "\0" in name:
        raise ConfigError(f"'{name}' must stay within the model directory: write a name relative to {base}")
    path = base / name
    if not path.resolve().is_relative_to(model_dir.resolve()):
        raise ConfigError(f"'{name}' must stay within the model directory, but it is a link to {path.resolve()}")
    return path


def read_bytes(path: Path, model_dir: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes inside `model_dir`.

    Raises:
        ConfigError: it is anything else.
    """
    inside(path.parent, path.name, model_dir)
    try:
        # A FIFO would block an ordinary open. What it is is asked of the open file, so that it cannot change meanwhile.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{path}: expected a regular file")
            data = file.read(limit + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    if len(data) > limit:
        raise ConfigError(f"{path}: the file has more than {limit} bytes")
    return data


def read_text(path: Path, model_dir: Path, limit: int) -> str:
    """The text of a regular UTF-8 file of at most `limit` bytes inside `model_dir`.

    Raises:
        ConfigError: it is anything else.
    """
    data = read_bytes(path, model_dir, limit)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: the text is not UTF-8") from None
