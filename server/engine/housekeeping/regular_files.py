"""Regular files, in places where somebody may put anything: opening a FIFO would wait for ever."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_regular(path: Path) -> int:
    """A descriptor for reading a regular file. The open file tells its type, which therefore cannot change meanwhile.

    Raises:
        OSError: the path cannot be opened, or is something else.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        check_regular(os.fstat(file))
    except OSError:
        os.close(file)
        raise
    return file


def read_regular(path: Path) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: it cannot be read, or is something else.
    """
    with open(open_regular(path), "rb") as file:
        return file.read()


def check_regular(about: os.stat_result) -> None:
    """Refuse a file that is not a regular one.

    Raises:
        OSError: the file is of another type.
    """
    if not stat.S_ISREG(about.st_mode):
        raise OSError(errno.EINVAL, "expected a regular file")
