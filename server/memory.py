"""The memory that the server may use, and its used part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple


class _Files(NamedTuple):
    """The files of a control group about memory, in the folder of one version of control groups."""

    root: str
    limit: str
    used: str
    droppable: str  # the key in memory.stat of file cache that was not used lately


_FIRST = _Files("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_SECOND = _Files("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


class Memory(NamedTuple):
    """Bytes that may be used, and those of them that are in use and cannot be dropped."""

    limit: int
    used: int


def memory(root: Path = Path("/")) -> Memory:
    """That of the control group of this process with the lowest limit; without a limit that of the machine.

    A container is a control group, and so is a unit of systemd.

    Args:
        root: the folder that has proc and sys.

    Raises:
        OSError, ValueError, KeyError: the system does not tell the memory of the machine.
    """
    return min((machine_memory(root), *_of_groups(root)), key=lambda each: each.limit)


def machine_memory(root: Path = Path("/")) -> Memory:
    """That of the machine; see `memory`."""
    lines = (line.partition(":") for line in (root / "proc/meminfo").read_text().splitlines())
    told = {name: int(rest.split()[0]) * 1024 for name, _, rest in lines}
    return Memory(told["MemTotal"], told["MemTotal"] - told["MemAvailable"])


def usable_memory() -> int:
    """Bytes of the machine's memory, or of a lower limit."""
    return memory().limit


def _of_groups(root: Path) -> Iterator[Memory]:
    for files, folder in _groups(root):
        try:
            limit = (folder / files.limit).read_text().strip()
            used = int((folder / files.used).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue  # the topmost group has no limit, and a container does not see the host's group
        if limit.isdecimal():
            yield Memory(int(limit), max(0, used - int(stat.get(files.droppable, 0))))


def _groups(root: Path) -> Iterator[tuple[_Files, Path]]:
    """The folders of this process's groups and of those above them."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        files = _FIRST if kinds else _SECOND
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):
            yield files, root / files.root / group
