"""Folders of files that the server needs while it runs.

A server removes its own when it stops. Those of a server that was killed are removed by the next one that starts. Each
has a file with a lock, which the system releases at any end of the process: so no server removes a folder in use.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
import weakref
from pathlib import Path

log = logging.getLogger("inferd.backends")

PREFIX = "inferd-"
HELD = ".held"
"""The file with the lock."""


class TemporaryFolder:
    """A new folder. `cleanup` removes it, or the end of this object or of the process.

    Args:
        kind: part of its name.
        parent: the folder that it is made in; empty for the system's temporary one.

    Attributes:
        path: of the folder.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, kind: str, parent: str = "") -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-", dir=parent or None))
        try:
            held = _hold(self.path)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        self._end = weakref.finalize(self, _remove, self.path, held)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        """Remove it with all that is in it."""
        self._end()


def remove_left_folders(parent: str = "") -> None:
    """Remove leftovers of killed servers from this folder, or from the system's temporary one. Blocks."""
    place = Path(parent or tempfile.gettempdir())
    try:
        found = [folder for folder in place.iterdir() if folder.name.startswith(PREFIX)]
    except OSError as error:
        log.warning("%s cannot be searched for what servers have left: %s", place, error.strerror)
        return
    for folder in found:
        if (held := _take_over(folder)) is not None:
            log.info("%s is removed: a server that was killed has left it", folder)
            _remove(folder, held)


def _hold(folder: Path) -> int | None:
    """Make the file appear in the folder with its lock already held. Returns the descriptor that holds the lock.

    None if the file system has no locks: then the folder lacks the file, and no other server removes it.
    """
    incoming = folder / f"{HELD}.new"
    held = os.open(incoming, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # ENOLCK of NFS, ENOSYS of Lustre
        os.close(held)
        incoming.unlink()
        return None
    try:
        incoming.rename(folder / HELD)
    except BaseException:
        os.close(held)
        raise
    return held


def _take_over(folder: Path) -> int | None:
    """Lock a folder of this user; None if a process holds the lock, or there is none."""
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return None
        held = os.open(folder / HELD, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # it has none yet, or is being removed
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        return None
    return held


def _remove(folder: Path, held: int | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if held is not None:
        os.close(held)
