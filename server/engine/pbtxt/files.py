"""Files that a configuration names: read only if they are regular files inside the model's folder."""

from __future__ import annotations

from codecs import BOM_UTF8
from pathlib import Path

from inferd.backends import paths
from inferd.server.engine.housekeeping.regular_files import read_regular
from inferd.server.errors import ConfigError


def inside(base: Path, name: str, model_dir: Path) -> Path:
    """See `inferd.backends.paths.inside`.

    Raises:
        ConfigError: the name leads out of the folder.
    """
    try:
        return paths.inside(base, name, model_dir)
    except paths.OutsideError as error:
        raise ConfigError(str(error)) from None


def read_bytes(base: Path, name: str, model_dir: Path, limit: int) -> bytes:
    """The content of the regular file `base`/`name`, of at most `limit` bytes, inside `model_dir`.

    Raises:
        ConfigError: it is anything else.
    """
    path = inside(base, name, model_dir)
    try:
        data = read_regular(path, limit)
    except OSError as error:
        raise ConfigError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    if len(data) > limit:
        raise ConfigError(f"{path}: the file has more than {limit} bytes")
    return data


def read_text(base: Path, name: str, model_dir: Path, limit: int) -> str:
    """The text of the regular UTF-8 file `base`/`name`, of at most `limit` bytes, inside `model_dir`.

    Raises:
        ConfigError: it is anything else.
    """
    data = read_bytes(base, name, model_dir, limit)
    try:
        return data.removeprefix(BOM_UTF8).decode()  # a mark that editors on Windows write
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{base / name}:{line}: the text is not UTF-8") from None
