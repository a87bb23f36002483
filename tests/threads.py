"""Work in several threads at once."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ClassVar, TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_threads(work: Callable[[T], R], values: Iterable[T]) -> list[R]:
    """What `work` returns for each value, in a thread each. The error of one is raised when all have ended."""
    given = list(values)
    with ThreadPoolExecutor(len(given)) as pool:
        return list(pool.map(work, given))


class Stack(ctypes.Structure):
    """stack_t of <signal.h>."""

    _fields_: ClassVar = [("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]


@contextmanager
def alternate_stack_kept() -> Iterator[None]:
    """Afterwards this thread has the alternate stack for handlers of signals that it has now.

    OpenVINO's CPU plugin gives another one to a thread that uses it, and may unmap that later from another thread. The
    next signal for which Python has a handler would then end the process without a word.
    """
    before = Stack()
    system = ctypes.CDLL(None)
    system.sigaltstack(None, ctypes.byref(before))
    try:
        yield
    finally:
        system.sigaltstack(ctypes.byref(before), None)


def leaves_turns(work: Callable[[], object]) -> bool:
    """Whether this thread gets turns, a millisecond after the last one each, while another one does the work.

    On a busy machine it may get few by chance, so that the work is done some times; beside work that leaves it none it
    never gets more than those before and behind it.
    """
    return any(_turns_beside(work) > 5 for _ in range(30))


def _turns_beside(work: Callable[[], object]) -> int:
    thread = threading.Thread(target=work)
    thread.start()
    turns = 0
    while thread.is_alive():
        turns += 1
        time.sleep(0.001)
    return turns
