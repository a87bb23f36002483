"""Files for logs and traces. To open one never waits, and a path that is neither a file nor a device is refused."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def opened(path: Path, flags: int, *, pipes: bool = False, mode: int = 0o666) -> int:
    """A descriptor for writing; creates the file if it does not exist. Does not wait.

    Args:
        path: of a file, or of a device such as /dev/null.
        flags: further ones, such as os.O_APPEND.
        pipes: the path may also be a pipe with a reader.
        mode: of a file that is created, less the umask.

    Raises:
        OSError: the path cannot be opened, or is something else.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | flags, mode)
    except OSError as error:
        if error.errno == errno.ENXIO:
            text = "expected a file, it is a pipe without a reader, or a socket"
            raise OSError(errno.ENXIO, text, str(path)) from None
        raise
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode) and not pipes:
        os.close(descriptor)
        raise OSError(errno.EINVAL, "expected a file, it is a pipe", str(path))
    os.set_blocking(descriptor, True)
    return descriptor


def write_all(descriptor: int, data: bytes) -> None:
    """Write all data.

    Raises:
        OSError: a part could not be written.
    """
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
