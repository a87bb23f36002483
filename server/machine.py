"""The memory and the cores that the server may use: those of the machine, or what a control group leaves of them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple


class _Group(NamedTuple):
    """The folder of a control group, of the first or the second version of control groups."""

    folder: Path
    first: bool


class _Files(NamedTuple):
    """The files of a control group about memory."""

    limit: str
    used: str
    droppable: str  # the key in memory.stat of file cache that was not used lately


_FIRST = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_SECOND = _Files("memory.max", "memory.current", "inactive_file")


class Memory(NamedTuple):
    """Bytes that may be used, and those of them that are in use and cannot be dropped."""

    limit: int
    used: int


def memory(root: Path = Path("/")) -> Memory:
    """The memory of this process's control group with the lowest limit; without a limit, that of the machine.

    A container is a control group, and so is a unit of systemd.

    Args:
        root: the folder that has proc and sys.

    Raises:
        OSError, ValueError, KeyError: the system does not tell the memory of the machine.
    """
    return min((machine_memory(root), *_of_groups(root)), key=lambda each: each.limit)


def machine_memory(root: Path = Path("/")) -> Memory:
    """The memory of the machine; see `memory`."""
    lines = (line.partition(":") for line in (root / "proc/meminfo").read_text().splitlines())
    told = {name: int(rest.split()[0]) * 1024 for name, _, rest in lines}
    return Memory(told["MemTotal"], told["MemTotal"] - told["MemAvailable"])


def usable_memory() -> int:
    """Bytes of the machine's memory, or of a lower limit."""
    return memory().limit


def cores(root: Path = Path("/")) -> int:
    """How many cores the process may use at a time: its affinity, or a lower quota of its control groups; at least 1.

    A quota of 2.5 cores counts as 3.

    Args:
        root: the folder that has proc and sys.
    """
    quotas = [quota for quota in map(_quota, _groups(root, "cpu")) if quota is not None]
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.ceil, quotas)]))


def _quota(group: _Group) -> float | None:
    """Cores that a group may use; None: as many as there are."""
    try:
        if group.first:
            quota = (group.folder / "cpu.cfs_quota_us").read_text().strip()
            period = (group.folder / "cpu.cfs_period_us").read_text().strip()
        else:
            quota, period = (group.folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else None


def _of_groups(root: Path) -> Iterator[Memory]:
    for group in _groups(root, "memory"):
        files = _FIRST if group.first else _SECOND
        try:
            limit = (group.folder / files.limit).read_text().strip()
            used = int((group.folder / files.used).read_text())
            stat = dict(line.split() for line in (group.folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue  # the topmost group has no limit, and a container does not see the host's group
        if limit.isdecimal():
            yield Memory(int(limit), max(0, used - int(stat.get(files.droppable, 0))))


def _groups(root: Path, kind: str) -> Iterator[_Group]:
    """The groups of this process that limit the resource, and those above them."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and kind not in kinds.split(","):
            continue
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):
            yield _Group(root / "sys/fs/cgroup" / (kind if kinds else "") / group, first=bool(kinds))
