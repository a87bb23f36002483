"""Work in several threads at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_threads(work: Callable[[T], R], values: Iterable[T]) -> list[R]:
    """What `work` returns for each value, in a thread each. The error of one is raised when all have ended."""
    given = list(values)
    with ThreadPoolExecutor(len(given)) as pool:
        return list(pool.map(work, given))


def turns_beside(work: Callable[[], object]) -> int:
    """How often this thread gets its turn, a millisecond after the last one, while another one does the work."""
    thread = threading.Thread(target=work)
    thread.start()
    turns = 0
    while thread.is_alive():
        turns += 1
        time.sleep(0.001)
    return turns
