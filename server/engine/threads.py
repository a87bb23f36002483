"""Work that blocks, each on a thread of its own.

No pool: what is loaded may itself have something loaded and wait for it, and what ends may wait for anything; a bound
on the number of threads would let them wait for each other.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


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

    threading.Thread(target=run, name=f"engine {getattr(work, '__name__', 'work')}", daemon=True).start()
    await done
    if returned:
        return returned.pop()
    error = raised.pop()
    try:
        raise error
    finally:
        del error
