"""What the server does in Python, on an event loop of the world.

The simulation decides when the loop has its turn, and when it reads its descriptors.
"""

from __future__ import annotations

import asyncio
from asyncio import events
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from inferd.server.engine.housekeeping.threads import on_thread
from inferd.server.front.connection_limits import Admission, ListenerPolicy
from inferd.server.front.peer import Peer
from tests.simulation.wire import Violation
from tests.simulation.world import LOOP_FDS, UNWATCHED, World

if TYPE_CHECKING:
    from inferd._native.transport.call import Call
    from inferd._native.transport.client import ClientUse
    from inferd._native.transport.connection import Connection
    from tests.simulation.simulation import Simulation

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
UNIMPLEMENTED = 12


class Loop(asyncio.AbstractEventLoop):
    """An event loop; `later` does something after so many nanoseconds."""

    def __init__(self, world: World, later: Callable[[int, Callable[[], None]], None]) -> None:
        self.world = world
        self._later = later
        self.ready: deque[asyncio.Handle] = deque()
        self.problem = ""
        self.readers: dict[int, Callable[[], Any]] = {}  # by what a descriptor tells the main thread
        self._codes: dict[int, int] = {}  # of descriptors

    def time(self) -> float:
        return self.world.now() / 1e9

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(self, callback: Any, *arguments: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, arguments, self, context)
        self.ready.append(handle)
        return handle

    def call_later(self, delay: float, callback: Any, *arguments: Any, context: Any = None) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(self.time() + delay, callback, arguments, self, context)
        self._later(int(delay * 1e9), lambda: self.ready.append(handle))
        return handle

    def call_at(self, when: float, callback: Any, *arguments: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_later(max(0.0, when - self.time()), callback, *arguments, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is skipped when it is due."""

    def call_soon_threadsafe(self, callback: Any, *arguments: Any, context: Any = None) -> asyncio.Handle:
        handle = self.call_soon(callback, *arguments, context=context)
        self.world.has_tasks()
        return handle

    def run_in_executor(self, executor: Any, work: Any, *arguments: Any) -> asyncio.Future[Any]:
        assert executor is None
        return self.create_task(on_thread(work, *arguments))

    def add_reader(self, fd: Any, callback: Any, *arguments: Any) -> None:
        code = next(bit for bit in LOOP_FDS if bit not in self.readers)
        self._codes[fd], self.readers[code] = code, partial(callback, *arguments)
        self.world.watch(fd, code)

    def remove_reader(self, fd: Any) -> bool:
        code = self._codes.pop(fd, None)
        if code is None:
            return False
        del self.readers[code]
        self.world.watch(fd, UNWATCHED)
        return True

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coroutine: Any, *, name: Any = None, context: Any = None) -> asyncio.Task[Any]:
        return asyncio.Task(coroutine, loop=self, name=name, context=context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.problem = self.problem or f"the loop: {context.get('message')}: {context.get('exception')!r}"

    def turn(self) -> None:
        """What is ready now, and not what that makes ready."""
        for _ in range(len(self.ready)):
            handle = self.ready.popleft()
            if not handle.cancelled():
                handle._run()

    def read(self, ready: int) -> None:
        """What these descriptors have is read."""
        for code in LOOP_FDS:
            if ready & code and code in self.readers:
                self.readers[code]()


class Desk:
    """Takes the calls that are not native: there is no handler for any."""

    def __init__(self, simulation: Simulation) -> None:
        self.loop = Loop(simulation.world, simulation.later)
        events._set_running_loop(self.loop)
        self._listener_policy = ListenerPolicy()

    def meet(self, connection: Connection, use: ClientUse, address: str) -> None:
        """A connection has been made."""
        connection.client = Peer(address)
        connection.admission = Admission(self._listener_policy, use)

    def take(self, call: Call) -> None:
        """See `Endpoint`."""
        call.end(UNIMPLEMENTED)

    def turn(self) -> None:
        """The tasks that can go on do, until they wait."""
        self.loop.turn()
        if self.loop.problem:
            raise Violation(self.loop.problem)

    def leave(self) -> None:
        """Nothing will come any more."""
        events._set_running_loop(None)
