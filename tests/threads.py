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
