"""What the server does in Python: ModelStreamInfer, by the handlers that are shipped, on an event loop of the world.

The loop has tasks and callbacks only. What it waits for comes from the connections and over the bridge, and the
simulation decides when it has its turn.
"""

from __future__ import annotations

import asyncio
from asyncio import events
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import server.front.context
from server.front import services
from server.front.connection_limits import Admission, ListenerPolicy
from server.front.context import NativeContext
from server.front.peer import Peer
from server.front.serving import serve
from server.rpc.infer import Inference
from server.rpc.service import Method
from tests.simulation.wire import Violation
from tests.simulation.world import World

if TYPE_CHECKING:
    from _native.service.ticket import Ticket
    from _native.transport.call import Call
    from _native.transport.client import ClientUse
    from _native.transport.connection import Connection
    from tests.simulation.simulation import Simulation

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
UNIMPLEMENTED = 12
WINDOW = 6  # requests of one stream that may be read and not yet answered


class Loop(asyncio.AbstractEventLoop):
    """An event loop without descriptors. `later` does something after so many nanoseconds."""

    def __init__(self, world: World, later: Callable[[int, Callable[[], None]], None]) -> None:
        self.world = world
        self._later = later
        self.ready: deque[asyncio.Handle] = deque()
        self.problem = ""

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


class Desk:
    """Takes the calls that are not native; for `Inference`, it is the engine."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.loop = Loop(simulation.world, simulation.later)
        self.open: set[NativeContext] = set()
        method = Method("ModelStreamInfer", None, None, True, True, Inference(self, WINDOW).stream)  # type: ignore
        policy = services.Policy(access=simulation.rights.access, forwarder=simulation.forwarding.forwarder)
        self._handler = services._handler(method, policy)
        self._listener_policy = ListenerPolicy()
        # deadlines are measured from when the handler begins
        server.front.context.time = SimpleNamespace(monotonic=self.loop.time)  # type: ignore
        events._set_running_loop(self.loop)

    def meet(self, connection: Connection, use: ClientUse, address: str) -> None:
        """A connection has been made."""
        connection.client = Peer(address)
        connection.admission = Admission(self._listener_policy, use)

    def take(self, call: Call) -> None:
        """See `Endpoint`."""
        if call.path != STREAM:
            call.end(UNIMPLEMENTED)
            return
        if self.simulation.packing:
            call.set_compression("", 1)
        context = NativeContext(call, self._handler)
        context.task = self.loop.create_task(serve(self._handler, context, None))  # type: ignore
        self.open.add(context)
        context.task.add_done_callback(lambda _: self.open.discard(context))

    def turn(self) -> None:
        """The tasks that can go on do, until they wait."""
        self.loop.turn()
        if self.loop.problem:
            raise Violation(self.loop.problem)

    def leave(self) -> None:
        """Nothing will come any more."""
        events._set_running_loop(None)

    # -- what the engine does for handlers --

    def submit(self, message: bytes, deliver: Any, **arguments: Any) -> Ticket:
        """See `server.engine.engine.Engine.submit`."""
        return self.simulation.service.submit(message, deliver, **arguments)

    def stream_ended(self, number: int) -> None:
        """See `server.engine.engine.Engine.stream_ended`."""
        for version in self.simulation.serving():
            version.loaded.stream_ended(number)
