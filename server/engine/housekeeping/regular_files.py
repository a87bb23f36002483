"""Reads regular files only, in folders where others may put anything: opening a FIFO would wait for ever."""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path

from inferd._native import file_contents

NOT_REGULAR = "expected a regular file"


def read_regular(path: Path, limit: int = sys.maxsize) -> bytes:
    """The content of a regular file; of a file with more than `limit` bytes, the first `limit` + 1 bytes.

    The type is that of the open file, so it cannot change after the check.

    Raises:
        OSError: it cannot be read, or is something else.
    """
    try:
        return file_contents.read_regular(str(path), limit)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise OSError(errno.EINVAL, NOT_REGULAR, str(path)) from None
        raise


def check_regular(about: os.stat_result) -> None:
    """Refuse a file that is not a regular one.

    Raises:
        OSError: the file is of another type.
    """
    if not stat.S_ISREG(about.st_mode):
        raise OSError(errno.EINVAL, NOT_REGULAR)
