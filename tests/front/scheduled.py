"""How Linux schedules threads: attributes as `sched_setattr` takes them, and a program that starts another with them.

`python -m tests.front.scheduled POLICY,FLAGS,RUNTIME,PERIOD COMMAND...`
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from typing import NamedTuple

OTHER, BATCH, DEADLINE = 0, 3, 6
RESET_ON_FORK = 1  # a flag: children have the usual attributes

_ATTR = struct.Struct("<IIQiIQQQ")
_SET, _GET = {"x86_64": (314, 315), "aarch64": (274, 275)}[platform.machine()]
_libc = ctypes.CDLL(None, use_errno=True)


class Attributes(NamedTuple):
    """How Linux schedules a thread; `runtime` has its slices in ns, or what SCHED_DEADLINE grants it in a period."""

    policy: int
    flags: int
    runtime: int
    period: int


def attributes_of(thread: int) -> Attributes:
    """The attributes of the thread with this number; 0 for the calling thread."""
    memory = ctypes.create_string_buffer(_ATTR.size)
    _call(_GET, thread, memory, _ATTR.size, 0)
    _, policy, flags, _, _, runtime, _, period = _ATTR.unpack(memory.raw)
    return Attributes(policy, flags, runtime, period)


def set_attributes(wanted: Attributes) -> None:
    """Set the attributes of the calling thread.

    Raises:
        OSError: the system does not have them, or this process may not.
    """
    given = _ATTR.pack(_ATTR.size, wanted.policy, wanted.flags, 0, 0, wanted.runtime, wanted.period, wanted.period)
    _call(_SET, 0, given, 0)


def _call(*arguments: object) -> None:
    if _libc.syscall(*arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    set_attributes(Attributes(*map(int, sys.argv[1].split(","))))
    os.execvp(sys.argv[2], sys.argv[2:])
