"""What modules in Python ask of the system, in the world's way: the time, threads, and queues between threads.

The counterpart of the hooks in `world.c`: the modules are those that are shipped; these names in them mean others.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import Empty
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import inferd._native.transport.io_thread
import inferd._native.transport.thread_pool
import inferd.server.engine.housekeeping.threads as engine_threads
from inferd._native.cuda.driver import CudaError
from inferd.server.engine.loading.demand import Demand
from tests.simulation.world import NEVER, World, WorldThread

if TYPE_CHECKING:
    from collections.abc import Iterable

REAL_SECONDS = 1_700_000_000  # when the world began, on the calendar; see `world.c`
MARKED = re.compile(r"error ([0-9a-f]{8}): (.*)")
CLOCKS = ("inferd.server.", "inferd.backends.")


class Clock:
    """Stands for the module `time`; what it does not tell is as there."""

    def __init__(self, world: World) -> None:
        self._world = world

    def monotonic_ns(self) -> int:
        return int(self._world.now())

    def monotonic(self) -> float:
        return float(self._world.now()) / 1e9

    perf_counter, perf_counter_ns = monotonic, monotonic_ns

    def time_ns(self) -> int:
        return int(self._world.now()) + REAL_SECONDS * 1_000_000_000

    def time(self) -> float:
        return self.time_ns() / 1e9

    def sleep(self, seconds: float) -> None:
        self._world.sleep(int(seconds * 1e9))

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class WorldQueue:
    """A `queue.SimpleQueue` of threads of the world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._world.notify(id(self))

    def get(self, timeout: float | None = None) -> Any:
        world = self._world
        until = NEVER if timeout is None else world.now() + int(timeout * 1e9)
        while not self._items:
            if world.now() >= until:
                raise Empty
            world.wait(id(self), until)
        return self._items.popleft()


class Servant(WorldThread):
    """A thread of the world from its start on, with the arguments of a `threading.Thread`."""

    def __init__(
        self, world: World, *, target: Callable[..., None], args: Iterable[Any] = (), name: str, daemon: bool
    ) -> None:
        super().__init__(world, partial(target, *args) if args else target, name)
        self.daemon = daemon
        self.ident: int | None = None

    def start(self) -> None:
        may_fail = self._world.may_fail(0)
        super().start()
        self.ident = self._thread.ident
        self._world.admit(1)
        self._world.may_fail(may_fail)

    def join(self) -> None:
        """Wait for its end. On the main thread, others run meanwhile."""
        if threading.current_thread() is not threading.main_thread():
            super().join()
        while not self._gone:
            if self._world.run() < 0:
                self._world.complain(f"thread {self._name} never ends")
                return


class Unforeseen(logging.Handler):
    """Keeps the first exception that the server has logged with its traceback: nobody has foreseen it.

    Attributes:
        told: the causes of errors of which clients get only the mark, by this mark.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.first = ""
        self.told: dict[str, str] = {}

    @classmethod
    def of_server(cls) -> Unforeseen:
        """A handler that gets all errors that the server logs."""
        heard, told = cls(), logging.getLogger()
        logging.disable(logging.NOTSET)
        told.handlers = [heard]
        told.setLevel(logging.ERROR)
        return heard

    def emit(self, record: logging.LogRecord) -> None:
        if found := MARKED.search(record.getMessage()):
            self.told[found[1]] = found[2]
        # what the driver refuses is said to whoever has asked, too, and judged there
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not self.first and not isinstance(error, CudaError):
            self.first = f"{record.getMessage()}: {error!r}"


def hook(world: World) -> None:
    """Have the modules of the server ask this world."""
    clock = Clock(world)
    for name, module in list(sys.modules.items()):
        if name.startswith(CLOCKS) and isinstance(getattr(module, "time", None), (ModuleType, Clock)):
            module.time = clock  # type: ignore[attr-defined]
    assert Demand.__init__.__kwdefaults__ is not None
    Demand.__init__.__kwdefaults__["clock"] = clock.monotonic
    engine_threads.threading = SimpleNamespace(  # type: ignore[assignment]
        Thread=partial(Servant, world), Lock=threading.Lock
    )
    inferd._native.transport.io_thread.threading = SimpleNamespace(  # type: ignore[attr-defined]
        Thread=partial(Servant, world)
    )
    inferd._native.transport.thread_pool.threading = SimpleNamespace(  # type: ignore[attr-defined]
        Thread=partial(Servant, world), get_native_id=threading.get_native_id
    )
    engine_threads.SimpleQueue = partial(WorldQueue, world)  # type: ignore[assignment, misc]
