"""What the server does in Python, on an event loop of the world.

The simulation decides when the loop has its turn, and when it reads its descriptors.
"""

from __future__ import annotations

import asyncio
import threading
from asyncio import events
from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import inferd.server.front.driver
import inferd.server.front.keepalive
import inferd.server.front.native
import inferd.server.front.outstanding
from inferd._native.transport.connection import Connection
from inferd.server.engine.housekeeping.threads import on_thread
from inferd.server.front.connection_log import ConnectionLog
from inferd.server.front.native import NativeDoor
from tests.simulation.sockets import Listening, Sockets, ask_socket
from tests.simulation.wire import Violation
from tests.simulation.world import LOOP_FDS, UNWATCHED, World

if TYPE_CHECKING:
    from inferd._native.service.infer import InferService
    from inferd.server.front.keepalive import ConnectionPolicy
    from tests.simulation.simulation import Simulation

SEVERAL, THREE = 0.4, 0.25  # of all simulations have several I/O threads; and of these three
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


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
        if threading.current_thread() is not threading.main_thread():
            self.world.complain(f"the loop is given {callback} by thread {threading.current_thread().name}")
        return self._ready(callback, arguments, context)

    def _ready(self, callback: Any, arguments: tuple[Any, ...], context: Any) -> asyncio.Handle:
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
        """Nothing to do: a cancelled handle is skipped when it is due."""

    def call_soon_threadsafe(self, callback: Any, *arguments: Any, context: Any = None) -> asyncio.Handle:
        handle = self._ready(callback, arguments, context)
        self.world.has_tasks()
        return handle

    def run_in_executor(self, _: Any, work: Any, *arguments: Any) -> asyncio.Future[Any]:
        return self.create_task(on_thread(work, *arguments))

    def add_reader(self, fd: Any, callback: Any, *arguments: Any) -> None:
        code = next(bit for bit in LOOP_FDS if bit not in self.readers)
        self._codes[fd], self.readers[code] = code, partial(callback, *arguments)
        self.world.watch(fd if isinstance(fd, int) else fd.fileno(), code)

    def remove_reader(self, fd: Any) -> bool:
        code = self._codes.pop(fd, None)
        if code is None:
            return False
        del self.readers[code]
        self.world.watch(fd if isinstance(fd, int) else fd.fileno(), UNWATCHED)
        return True

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coroutine: Any, *, name: Any = None, context: Any = None) -> asyncio.Task[Any]:
        return asyncio.Task(coroutine, loop=self, name=name, context=context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.problem = self.problem or f"the loop: {context.get('message')}: {context.get('exception')!r}"

    def turn(self) -> None:
        """Run the callbacks that are ready now, and not those that they make ready."""
        for _ in range(len(self.ready)):
            handle = self.ready.popleft()
            if not handle.cancelled():
                handle._run()

    def read(self, ready: int) -> None:
        """Read what these descriptors have."""
        for code in LOOP_FDS:
            if ready & code and code in self.readers:
                self.readers[code]()


class Desk:
    """The loop, and the door that is shipped, at a socket of the world. There is no handler for any call that is not
    native.

    Attributes:
        door: None: it is not open yet.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.loop = Loop(simulation.world, simulation.later)
        events._set_running_loop(self.loop)

    def make_door(self, infer: InferService, pool: int, policy: ConnectionPolicy, **limits: Any) -> NativeDoor:
        """The door, with so many threads that compress and inflate."""
        simulation = self._simulation
        hook_door(simulation, pool)
        threads = 1
        if simulation.has("two I/O threads", SEVERAL, when=True):
            threads = 3 if simulation.has("three I/O threads", THREE, when=True) else 2
        return NativeDoor(
            None if simulation.by_python else infer,
            access=simulation.rights.access,
            receive_timeout=limits["receive_timeout"],
            send_timeout=30.0,
            policy=simulation.secure.policy(),
            connections=policy,
            max_held_bytes=limits["max_held_bytes"],
            clients=simulation.quota.limits,
            compression_level=limits["compression"],
            io_threads=threads,
        )

    def turn(self) -> None:
        """The tasks that can go on do, until they wait."""
        self.loop.turn()
        if self.loop.problem:
            raise Violation(self.loop.problem)

    def leave(self) -> None:
        """Called when nothing will come any more."""
        events._set_running_loop(None)


class WatchedConnection(Connection):
    """Has its peer know what the server does to it."""

    sockets: Sockets

    def go_away(self, reason: str = "") -> None:
        if (end := self.sockets.end_at(self.peer)) is not None:
            end.knew = self.told
        super().go_away(reason)

    def fail_calls(self, details: str) -> None:
        if (end := self.sockets.end_at(self.peer)) is not None:
            end.over.add(details)
        super().fail_calls(details)


def hook_door(simulation: Simulation, pool: int) -> None:
    """Have the modules of the door ask the world for sockets and threads."""
    front = inferd.server.front
    front.native.os = SimpleNamespace(cpu_count=lambda: 2 * pool)  # type: ignore[assignment]
    front.native.open_tcp = lambda *_, **__: [Listening(simulation.sockets)]  # type: ignore[assignment]
    front.native.ConnectionLog = partial(TellingLog, simulation)  # type: ignore[assignment, misc]
    front.outstanding.fcntl = SimpleNamespace(ioctl=partial(ask_socket, simulation.world))  # type: ignore[assignment]
    front.keepalive.random = Random(f"{simulation.outcome.seed} ages")  # type: ignore[assignment]
    WatchedConnection.sockets = simulation.sockets
    front.driver.Connection = WatchedConnection  # type: ignore[misc]


def forget_door() -> None:
    """All is over: the modules of the door keep nothing of it."""
    front = inferd.server.front
    del front.native.open_tcp, front.native.ConnectionLog, WatchedConnection.sockets  # type: ignore[attr-defined]
    events._set_running_loop(None)


class TellingLog(ConnectionLog):
    """The story has it."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation

    def _say(self, line: str, peer: str, reason: str) -> None:
        self._simulation.tell("door", f"{peer}: {reason}")
