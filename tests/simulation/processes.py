"""Models whose instances are worker processes: the attendants that are shipped, on threads of the world, and what they
look after, which `tests.simulation.process` plays.
"""

from __future__ import annotations

import itertools
import socket
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

import inferd.backends.python.attendant
import inferd.backends.python.instance
import inferd.backends.python.process
from inferd._native.memory.arena import ArenaHandle
from inferd.backends.api import BackendError
from inferd.backends.python._link import TeamHandle
from inferd.backends.python.attendant import Attendant, Post
from inferd.backends.python.instance import PythonInstance
from inferd.backends.python.process import AnyWorker
from inferd.backends.python.worker.protocol import PACKET
from tests.simulation.process import Process
from tests.simulation.world import UNWATCHED, WORKER_FD

if TYPE_CHECKING:
    from tests.simulation.models import SimulatedBackend
    from tests.simulation.simulation import Simulation

MS = 1_000_000
SECOND = 1000 * MS
EXECUTION_TIMEOUT = 0.2  # seconds
LONG_TIMEOUT = 36_000.0  # of one that waits for other models: that it waits in vain is found before
FINISH_TIMEOUT = 1.0
LONG = 0.3  # of workers whose configuration does not fit into a packet


class Town:
    """All workers of one simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.world = simulation.world
        self.sockets: dict[int, tuple[Process, socket.socket]] = {}  # by descriptor
        self.resting: set[socket.socket] = set()  # of these, those that their workers do not read
        world = simulation.world
        clock = SimpleNamespace(monotonic=lambda: world.now() / 1e9)
        inferd.backends.python.attendant.time = clock  # type: ignore[assignment]
        inferd.backends.python.process.time = clock  # type: ignore[assignment]
        inferd.backends.python.attendant.Worker = Process  # type: ignore[misc, assignment]
        inferd.backends.python.instance.Attendant = WorldAttendant  # type: ignore[misc, assignment]

    def watch(self, process: Process, end: socket.socket) -> None:
        self.sockets[end.fileno()] = (process, end)
        self.world.watch(end.fileno(), WORKER_FD)

    def forget(self, end: socket.socket) -> None:
        self.rest(end)
        self.resting.remove(end)
        del self.sockets[end.fileno()]

    def rest(self, end: socket.socket) -> None:
        """A worker does not read this for a while."""
        if end not in self.resting:
            self.resting.add(end)
            self.world.watch(end.fileno(), UNWATCHED)

    def go_on(self, end: socket.socket) -> None:
        """The worker reads this socket again."""
        if end in self.resting:
            self.resting.remove(end)
            self.world.watch(end.fileno(), WORKER_FD)

    def turn(self, fd: int) -> None:
        """A worker reads what it was sent."""
        found = self.sockets.get(fd)
        if found is not None:  # else its attendant has just ended it: a wait of the loop for that thread lets both run
            process, end = found
            process.read(end)

    # -- for the models

    @property
    def entrance(self) -> object:
        """See `Services`."""
        return self.simulation.service.entrance

    def ask(self, what: str, arguments: object) -> Future[object]:
        """See `Services`."""
        answer: Future[object] = Future()
        if what == "is_model_ready":
            answer.set_result(True)
        else:
            answer.set_exception(BackendError(f"nobody does '{what}'"))
        return answer

    def measure(self, user: object, change: object) -> None:
        """See `Services`."""

    def forget_measures(self, user: object) -> None:
        """See `Services`."""


@dataclass(frozen=True)
class Launch:
    """What a worker is started with; stands for `inferd.backends.python.process.Launch`.

    Attributes:
        lives: numbers of its workers.
        states: of sequences, as the server has to have them.
        heard: what the worker has printed, as far as its attendant has read that.
    """

    backend: SimulatedBackend
    name: str
    lives: itertools.count[int]
    states: dict[int, np.ndarray]
    heard: dict[int, bytearray]
    in_process: bool = False
    timeout: float = 60.0
    load_timeout: float = 0.0

    @property
    def configuration(self) -> dict[str, Any]:
        is_long = Random(f"{self.backend.salt} {self.name} is long").random() < LONG
        return {"mode": "serve", "name": self.name, "path": "x" * PACKET if is_long else ""}

    @property
    def environment(self) -> SimpleNamespace:
        return SimpleNamespace(python="python")


class Bell:
    """An event of the world's threads."""

    def __init__(self, attendant: WorldAttendant) -> None:
        self._attendant = attendant
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, seconds: float) -> None:
        world = self._attendant.town.world
        until = world.now() + int(seconds * SECOND)
        while not self._is_set and world.now() < until:
            world.sleep(min(10 * MS, until - world.now()))


class WorldAttendant(Attendant):
    """The attendant, on a thread of the world, which nobody waits for outside it."""

    def __init__(self, post: Post, *arguments: Any) -> None:
        super().__init__(post, *arguments)
        self.town: Town = post.launch.backend.town  # type: ignore[attr-defined]
        self.gone = False
        self._closing = Bell(self)  # type: ignore[assignment]
        self._loaded.set_result(None)  # an instance does not wait for its first worker
        self._thread = threading.Thread(target=self._in_world, name=f"attend {post.launch.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._closing.set()
        self.link.nudge()
        while not self.gone:
            self.town.world.sleep(MS)

    def _live(self) -> tuple[AnyWorker | None, str]:
        worker, why = super()._live()
        if isinstance(worker, Process) and (wrong := worker.judge(why)):
            worker.backend.executions.complain(f"{worker.name}: {wrong}")
        return worker, why

    def on_output(self, stream: int, data: bytes) -> None:
        self._post.launch.heard[stream] += data  # type: ignore[attr-defined]
        super().on_output(stream, data)

    def _in_world(self) -> None:
        world = self.town.world
        world.join(f"{self._name}+")
        try:
            self._run()
        finally:
            self.gone = True
            world.leave()


class WorkerInstance(PythonInstance):
    """An instance of a simulated model, whose work is done by a `Process`."""

    def __init__(self, backend: SimulatedBackend, name: str, arena: ArenaHandle, team: TeamHandle) -> None:
        launch: Any = Launch(backend, name, itertools.count(), {}, {1: bytearray(), 2: bytearray()})
        kind = backend.kind
        timeout = LONG_TIMEOUT if kind.asks and not kind.mortal else EXECUTION_TIMEOUT
        post = Post(launch, arena, team, timeout, FINISH_TIMEOUT)
        super().__init__(post, kind.name, backend.town)  # type: ignore[arg-type]

    @property
    def thread(self) -> threading.Thread:
        """The attendant's."""
        return self._attendant._thread
