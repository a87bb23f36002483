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
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Work = Callable[[], None]

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

    def tell() -> None:
        if not done.cancelled():
            done.set_result(None)

    def run() -> None:
        # When the caller goes on, this thread may not have ended yet: it must not hold anything by then.
        try:
            returned.append(todo.pop()())
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            raised.append(error)
        loop.call_soon_threadsafe(tell)

    _start(run)
    await done
    if returned:
        return returned.pop()
    error = raised.pop()
    try:
        raise error
    finally:
        del error


_guard = threading.Lock()
_idle: list[SimpleQueue[Work]] = []  # of each thread that waits, the last one to begin it at the end


def _start(work: Work) -> None:
    """Have it done, by a thread that waits or by a new one."""
    with _guard:
        waiting = _idle.pop() if _idle else None
    if waiting is not None:
        waiting.put(work)
    else:
        threading.Thread(target=_work, args=([work],), name="engine", daemon=True).start()


def _work(todo: list[Work]) -> None:
    """Do it, and what comes while the thread may wait; it holds nothing of what it has done."""
    own: SimpleQueue[Work] = SimpleQueue()
    while todo:
        todo.pop()()
        with _guard:
            if len(_idle) >= MOST_IDLE:
                return
            _idle.append(own)
        try:
            todo.append(own.get(timeout=IDLE_SECONDS))
        except Empty:
            with _guard:
                if own in _idle:
                    _idle.remove(own)
                    return
            todo.append(own.get())  # it was given between the two
