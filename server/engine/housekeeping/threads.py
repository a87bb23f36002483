"""Runs blocking work, each piece on a thread of its own.

The number of threads has no limit: a model that is being loaded may load another one and wait for it, and an ending
model may wait for anything; with a limit they could deadlock. A thread that has finished its work waits a while for
more, so the start of many models does not need a thread for each. Long work on the event loop is done in slices.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Final, Generic, ParamSpec, TypeVar

from inferd.server.errors import NO_TEXT, text_of

P = ParamSpec("P")
T = TypeVar("T")
Work = Callable[[], None]
Todo = tuple[Work, Work]
"""A function to call on a thread, and one that the thread calls afterwards to tell the caller."""

MOST_IDLE: Final = 4
"""The most threads that wait for work at a time."""

IDLE_SECONDS: Final = 0.2
"""Seconds for which a thread waits for work."""


class WorkItem(Generic[T]):
    """Work for a thread.

    Args:
        work: a thread calls it once.
        done: the caller waits for it. This future holds no error: the frames of the error's traceback hold the future,
            so both would stay.
    """

    __slots__ = ("_raised", "_returned", "_todo", "done", "is_over")

    def __init__(self, work: Callable[[], T], done: asyncio.Future[bool]) -> None:
        self._todo = [work]
        self._returned: list[T] = []
        self._raised: list[BaseException] = []
        self.done = done
        self.is_over = False

    def do(self) -> None:
        """Call the work. The thread, which may wait for other work afterwards, keeps no object of this one."""
        try:
            self._returned.append(self._todo.pop()())
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            self._raised.append(_as_exception(error))
        self.is_over = True

    def fail(self, error: BaseException) -> None:
        """Give the caller this error, without calling the work."""
        self._raised.append(error)
        self.is_over = True

    def tell(self) -> None:
        """Resume the caller, if it still waits. Call it on the loop."""
        if not self.done.done():
            self.done.set_result(True)

    def result(self) -> T:
        """Return or raise the result, once."""
        if self._returned:
            return self._returned.pop()
        error = self._raised.pop()
        try:
            raise error
        finally:
            del error


def _as_exception(error: BaseException) -> Exception:
    """The error; or a RuntimeError in place of one that would end the server or has no text, which models may raise."""
    text = text_of(error)
    if isinstance(error, Exception) and text != NO_TEXT:
        return error
    wrapped = RuntimeError(f"the code has raised {type(error).__name__}: {text}")
    wrapped.__cause__ = error
    return wrapped


async def on_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return or raise the result of `work` on a thread. The work continues if the caller is cancelled.

    Raises:
        RuntimeError: the work has raised an error that is no Exception or has no text, or the system has no thread.
    """
    loop = asyncio.get_running_loop()
    item = WorkItem(partial(work, *args, **kwargs), loop.create_future())

    def tell() -> None:
        with suppress(RuntimeError):  # the loop is closed: no caller waits
            loop.call_soon_threadsafe(item.tell)

    begin(item.do, tell)
    await item.done
    return item.result()


_guard = threading.Lock()
_idle: list[SimpleQueue[Todo]] = []  # queues of waiting threads, the latest last


def begin(work: Work, tell: Work) -> None:
    """Have a waiting thread, or a new one, call `work` and then `tell`.

    Raises:
        RuntimeError: the system has no thread for it.
    """
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


SLICE: Final = 32
"""Models per slice, at some 3 us each."""


LARGE: Final = 256
"""Models per slice, at some 0.3 us each."""


async def slices(items: Iterable[T], size: int = SLICE) -> AsyncIterator[list[T]]:
    """Yield the items in slices; the loop does other work after each."""
    left = iter(items)
    while part := list(islice(left, size)):
        yield part
        await asyncio.sleep(0)
