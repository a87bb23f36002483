"""Runs blocking work, each piece on a thread of its own.

The number of threads has no limit: a model that is being loaded may load another one and wait for it, and a model that
ends may wait for anything; with a limit they could wait for each other. A thread that has finished its work waits a
while for more, so that the start of many models does not make a thread for each.
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
"""The most threads that wait for work at a time."""

IDLE_SECONDS: Final = 0.2
"""Seconds for which a thread waits for work."""


async def on_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return or raise the result of `work` on a thread. The work goes on if the caller is cancelled."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    todo = [partial(work, *args, **kwargs)]
    # A future must not hold the error: the error's traceback has frames that hold the future, so both would stay.
    returned: list[T] = []
    raised: list[BaseException] = []

    def finish() -> None:
        if not done.cancelled():
            done.set_result(None)

    def tell() -> None:
        with suppress(RuntimeError):  # the loop is closed: no caller waits any more
            loop.call_soon_threadsafe(finish)

    def run() -> None:
        # This thread may outlast the caller's wait: it must not hold any of the work's objects by then.
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
_idle: list[SimpleQueue[Todo]] = []  # queues of waiting threads, the latest last


def _start(work: Work, tell: Work) -> None:
    """Have a waiting thread, or a new one, call `work` and then `tell`."""
    with _guard:
        waiting = _idle.pop() if _idle else None
    if waiting is not None:
        waiting.put((work, tell))
    else:
        threading.Thread(target=_work, args=([(work, tell)],), name="engine", daemon=True).start()


def _work(todo: list[Todo]) -> None:
    """Do the work, and further work that comes while the thread waits, without keeping any of its objects."""
    own: SimpleQueue[Todo] = SimpleQueue()
    while todo:
        work, tell = todo.pop()
        work()
        del work
        with _guard:
            waits = len(_idle) < MOST_IDLE
            if waits:
                _idle.append(own)
        tell()  # after the thread is in the list, so that the caller's next work finds it
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
            todo.append(own.get())  # work came after the time was over
