"""Blocking work, each piece on a thread that does nothing else meanwhile.

The number of threads has no limit: what is being loaded may load something else and wait for it, and what ends may wait
for anything; with a limit they could wait for each other. A thread that has finished its work takes more for a while,
so that the start of many models does not make a thread for each.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Work = Callable[[], None]
Todo = tuple[Work, Work]
"""A function to call on a thread, and one that the thread calls afterwards to tell the caller."""

MOST_IDLE: Final = 4
"""Threads that wait for work at a time."""

IDLE_SECONDS: Final = 0.2
"""For how long they do."""


async def on_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `work` returns or raises; the loop goes on meanwhile, and the work does if the caller is cancelled."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    todo = [partial(work, *args, **kwargs)]
    # No future holds the error: its traceback has the frames that hold the future, and what else they hold would stay.
    returned: list[T] = []
    raised: list[BaseException] = []

    def finish() -> None:
        if not done.cancelled():
            done.set_result(None)

    def tell() -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(finish)

    def run() -> None:
        # When the caller goes on, this thread may not have ended yet: it must not hold anything by then.
        try:
            returned.append(todo.pop()())
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            raised.append(error)

    _start(run, tell)
    await done
    if returned:
        return returned.pop()
    error = raised.pop()
    try:
        raise error
    finally:
        del error


_guard = threading.Lock()
_idle: list[SimpleQueue[Todo]] = []  # of each thread that waits, the last one to begin it at the end


def _start(work: Work, tell: Work) -> None:
    """Have it done, by a thread that waits or by a new one, and then have that told."""
    with _guard:
        waiting = _idle.pop() if _idle else None
    if waiting is not None:
        waiting.put((work, tell))
    else:
        threading.Thread(target=_work, args=([(work, tell)],), name="engine", daemon=True).start()


def _work(todo: list[Todo]) -> None:
    """Do it, and what comes while the thread may wait; it holds nothing of what it has done."""
    own: SimpleQueue[Todo] = SimpleQueue()
    while todo:
        work, tell = todo.pop()
        work()
        del work
        with _guard:
            waits = len(_idle) < MOST_IDLE
            if waits:
                _idle.append(own)
        tell()  # now, so that what comes next need not start another thread
        del tell
        if not waits:
            return
        try:
            todo.append(own.get(timeout=IDLE_SECONDS))
        except Empty:
            with _guard:
                if own in _idle:
                    _idle.remove(own)
                    return
            todo.append(own.get())  # it was given between the two
