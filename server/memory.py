"""The memory that the server may use."""

from __future__ import annotations

import os
from pathlib import Path

_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files with the memory limit of the process's container, of both versions of control groups."""


def usable_memory() -> int:
    """Bytes of the machine's memory, or of the container's limit."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _LIMITS:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            limits.append(int(text))
    return min(limits)
