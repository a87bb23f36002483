"""Models whose instances are worker processes: the attendants that are shipped, on threads of the world, and workers
that the main thread plays by a script, at the other ends of real sockets and in the real arena.

A worker keeps to the protocol (`backends.python.worker.protocol`), or it ends in the middle, says nothing any more, or
sends what none may send.
"""

from __future__ import annotations

import itertools
import mmap
import os
import socket
import struct
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

import backends.python.attendant
import backends.python.instance
import backends.python.process
from _native.memory.arena import ArenaHandle
from backends.api import BackendError
from backends.python._link import TeamHandle
from backends.python.attendant import Attendant, Post
from backends.python.instance import PythonInstance
from backends.python.process import AnyWorker
from backends.python.worker import protocol as p

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.models import SimulatedBackend
    from tests.simulation.simulation import Simulation

US = 1000
MS = 1000 * US
SECOND = 1000 * MS
INT64 = 9
EXECUTION_TIMEOUT = 0.2  # seconds
FINISH_TIMEOUT = 1.0
TEMPERS = ("good", "good", "dying", "silent", "talking")


class Town:
    """All workers of one simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.world = simulation.world
        self.sockets: dict[int, tuple[Process, socket.socket]] = {}  # by descriptor
        world = simulation.world
        clock = SimpleNamespace(monotonic=lambda: world.now() / 1e9)
        backends.python.attendant.time = clock  # type: ignore[assignment]
        backends.python.process.time = clock  # type: ignore[assignment]
        backends.python.attendant.Worker = Process  # type: ignore[misc, assignment]
        backends.python.instance.Attendant = WorldAttendant  # type: ignore[misc, assignment]

    def watch(self, process: Process, end: socket.socket) -> None:
        self.sockets[end.fileno()] = (process, end)
        self.simulation.poller.register(end.fileno(), 1)

    def forget(self, end: socket.socket) -> None:
        del self.sockets[end.fileno()]
        self.simulation.poller.unregister(end.fileno())

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
        answer.set_exception(BackendError(f"nobody does '{what}'"))
        return answer

    def measure(self, user: object, change: object) -> None:
        """See `Services`."""

    def forget_measures(self, user: object) -> None:
        """See `Services`."""


@dataclass(frozen=True)
class Launch:
    """What a worker is started with; stands for `backends.python.process.Launch`."""

    backend: SimulatedBackend
    name: str
    lives: itertools.count[int]
    in_process: bool = False
    timeout: float = 60.0

    @property
    def configuration(self) -> dict[str, Any]:
        return {"mode": "serve"}

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
        launch: Any = Launch(backend, name, itertools.count())
        post = Post(launch, arena, team, EXECUTION_TIMEOUT, FINISH_TIMEOUT)
        super().__init__(post, backend.kind.name, backend.town)  # type: ignore[arg-type]

    @property
    def thread(self) -> threading.Thread:
        """The attendant's."""
        return self._attendant._thread


@dataclass
class Order:
    """An EXECUTE.

    Attributes:
        number: of the batch.
        requests: the numbers that the wire gives them.
        inputs: what each has, and where: the offset in the arena, or -1.
        grant, grant_size: where outputs may lie.
    """

    number: int
    requests: list[int]
    inputs: list[tuple[np.ndarray, int]]
    grant: int
    grant_size: int


class Process(AnyWorker):
    """A worker.

    Args:
        launch: what it is.
        arena: of its model.
    """

    def __init__(self, launch: Launch, arena: ArenaHandle) -> None:
        self.backend = launch.backend
        self.town = launch.backend.town
        self.name = launch.name
        self.random = Random(f"{launch.backend.salt} {launch.name} {next(launch.lives)}")
        self.temper = self.random.choice(TEMPERS) if self.backend.kind.mortal else "good"
        kind, flags = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK, 0
        pairs = [socket.socketpair(socket.AF_UNIX, kind, flags) for _ in range(3)]
        for mine, _ in pairs:
            mine.setblocking(True)
        self._mine = [mine for mine, _ in pairs]
        self._theirs = [its for _, its in pairs]
        self.work, self.side, self.calls = (mine.fileno() for mine in self._mine)
        self.its_work, self.its_side, self.its_calls = self._theirs
        self.pid_fd, self._running = os.pipe2(os.O_CLOEXEC)
        self.memory = mmap.mmap(arena.fd, 0)
        self.order: Order | None = None
        for end in self._theirs:
            self.town.watch(self, end)
        self.say(self.its_work, p.HELLO, number=p.VERSION)

    # -- what the attendant does with it

    def kill(self) -> None:
        self.end()

    def kill_supervisor(self) -> None:
        pass

    def reap(self) -> str:
        return "worker process has ended"

    def close(self) -> None:
        self.end()
        for mine in self._mine:
            mine.close()
        os.close(self.pid_fd)

    # -- its life, on the main thread

    def end(self) -> None:
        """It is gone, whatever it was doing."""
        if self._running < 0:
            return
        for end in self._theirs:
            self.town.forget(end)
            end.close()
        self.memory.close()
        os.close(self._running)
        self._running = -1

    @property
    def alive(self) -> bool:
        return self._running >= 0

    def say(
        self, to: socket.socket, kind: int, record: bytes = b"", *, flags: int = 0, number: int = 0, offset: int = 0
    ) -> None:
        """Send a packet, if the server is there."""
        try:
            to.send(p.HEAD.pack(kind, flags, 0, len(record), number, offset) + record)
        except OSError:
            self.end()

    def later(self, ns: int, what: Callable[[], None]) -> None:
        """Do it then, if it still lives."""
        self.town.simulation.later(ns, lambda: what() if self.alive else None)

    def read(self, end: socket.socket) -> None:
        """One packet."""
        try:
            data = end.recv(p.PACKET)
        except OSError:
            data = b""
        if not data:
            self.end()
            return
        kind, flags, code, size, number, offset = p.HEAD.unpack_from(data)
        place = offset if flags & p.IN_ARENA else -1
        record = self.memory[offset : offset + size] if flags & p.IN_ARENA else data[p.HEAD.size :]
        if kind == p.CONFIGURE:
            self.later(self.random.randint(0, MS), lambda: self.say(self.its_work, p.READY, b"{}"))
        elif kind == p.EXECUTE:
            self._execute(number, record, place)
        elif kind == p.ALLOCATED and end is self.its_work and self.order is not None:
            self._answer_in_arena(self.order, offset if code == 0 else -1)
        elif kind == p.ALLOCATED and code == 0:
            self.say(self.its_side, p.FREE, offset=offset)
        elif kind == p.FINALIZE:
            self.say(self.its_work, p.FINALIZED)
            self.end()

    # -- executions

    def _execute(self, number: int, record: bytes, place: int) -> None:
        count, rows, grant, grant_size = p.EXECUTE_HEAD.unpack_from(record)
        requests, inputs = [], []
        for at in struct.unpack_from(f"<{count}I", record, p.EXECUTE_HEAD.size):
            requests.append(p.REQUEST.unpack_from(record, at)[0])
            _, _, rank, where, offset, size = p.TENSOR.unpack_from(record, at + p.REQUEST.size)
            shape = struct.unpack_from(f"<{rank}q", record, at + p.REQUEST.size + p.TENSOR.size)
            source = self.memory if where == p.ARENA else record
            x = np.frombuffer(source[offset : offset + size], np.int64).reshape(shape)
            inputs.append((x, offset if where == p.ARENA else place + offset if place >= 0 else -1))
        self.order = order = Order(number, requests, inputs, grant, grant_size)
        self._note([int(abs(x[0, 0])) >> 20 for x, _ in inputs], rows)
        if self.temper == "dying" and self.random.random() < 0.2:
            self.later(self.random.randint(0, 300 * US), self.end)
        elif self.temper == "silent" and self.random.random() < 0.05:
            return
        elif self.temper == "talking" and self.random.random() < 0.1:
            self._talk_nonsense(order)
        else:
            duration = int(self.random.random() ** 4 * self.backend.kind.duration_us * US)
            self.later(duration, lambda: self._answer(order))

    def _note(self, numbers: list[int], rows: int) -> None:
        backend, executions = self.backend, self.backend.executions
        executions.batches += 1
        backend.executed += 1
        if rows > backend.kind.rows:
            executions.complain(f"a batch of {rows} rows for model '{backend.kind.name}'")
        executions.log(self.name, f"executes {numbers} in its worker")
        for number in dict.fromkeys(numbers):
            executions.count[backend.kind.name, number] = executions.count.get((backend.kind.name, number), 0) + 1

    def _talk_nonsense(self, order: Order) -> None:
        kind, number = self.random.choice(
            ((p.DONE, order.number + 1), (p.DONE, order.number), (99, 0), (p.READY, 0), (p.RESPONSE, 1 << 40))
        )
        to = self.random.choice(self._theirs)
        flags = self.random.choice((0, p.FINAL, p.EMPTY, p.IN_ARENA))
        self.say(to, kind, self.random.randbytes(self.random.randint(0, 40)), flags=flags, number=number)

    def _answer(self, order: Order) -> None:
        """By one of the ways in which outputs may come."""
        size = sum(p.align(x.nbytes) for x, _ in order.inputs)
        ways = ["inline", "open"] if size < p.PACKET // 2 else []
        ways += ["asked"]
        if sum(-(-x.nbytes // 64) * 64 for x, _ in order.inputs) <= order.grant_size:
            ways += ["granted", "granted"]
        if all(place >= 0 for _, place in order.inputs):
            ways += ["in place"]
        way = self.random.choice(ways)
        if way == "inline":
            self._done(order, self._inline(order.inputs))
        elif way == "open":
            self._open(order)
        elif way == "granted":
            self._answer_in_arena(order, order.grant)
        elif way == "in place":
            self._done(order, b"".join(self._written(x, place) for x, place in order.inputs))
        else:
            size = sum(-(-x.nbytes // 64) * 64 for x, _ in order.inputs)
            self.say(self.its_work, p.ALLOCATE, number=self.random.randrange(1 << 30), offset=size)

    def _done(self, order: Order, record: bytes) -> None:
        self.order = None
        keeps = self.random.random() < 0.1  # what the EXECUTE has referred to
        self.say(self.its_work, p.DONE, record, flags=p.KEPT if keeps else 0, number=order.number)
        if keeps:
            self.later(self.random.randint(0, MS), lambda: self.say(self.its_side, p.RELEASE, number=order.number))
        self._chat()

    def _chat(self) -> None:
        """Say something beside the work."""
        if not self.alive or self.random.random() > 0.2:
            return
        kind = self.random.choice((p.LOG, p.METRIC, p.HEALTH, p.ALLOCATE))
        record = b'{"op": "nothing"}' if kind == p.METRIC else b"" if kind == p.ALLOCATE else b"well"
        self.say(self.its_side, kind, record, offset=self.random.randint(1, 1 << 16) if kind == p.ALLOCATE else 0)

    def _answer_in_arena(self, order: Order, at: int) -> None:
        if at < 0:  # there is no memory
            text = b"no memory for outputs"
            text += bytes(-(p.RESPONSE_HEAD.size + len(text)) % 8)
            size = p.RESPONSE_HEAD.size + len(text)
            head = p.RESPONSE_HEAD.pack(p.STATUS_ERROR, p.CODE_UNAVAILABLE, 0, len(text), 0, size)
            self._done(order, (head + text) * len(order.inputs))
            return
        parts = []
        for x, _ in order.inputs:
            parts.append(self._written(x, at))
            at += -(-x.nbytes // 64) * 64
        self._done(order, b"".join(parts))

    def _written(self, x: np.ndarray, at: int) -> bytes:
        """A response whose output was written to the arena."""
        self.memory[at : at + x.nbytes] = product(x).tobytes()
        return self._response(x, p.ARENA, at, b"")

    def _inline(self, inputs: list[tuple[np.ndarray, int]]) -> bytes:
        """Responses with their outputs behind each."""
        out = b""
        for x, _ in inputs:
            at = len(out) + p.RESPONSE_HEAD.size + p.TENSOR.size + 8 * x.ndim
            out += self._response(x, p.INLINE, at, product(x).tobytes())
        return out

    @staticmethod
    def _response(x: np.ndarray, place: int, at: int, data: bytes) -> bytes:
        tensor = p.TENSOR.pack(0, INT64, x.ndim, place, at, x.nbytes) + struct.pack(f"<{x.ndim}q", *x.shape)
        size = p.RESPONSE_HEAD.size + len(tensor) + len(data)
        return p.RESPONSE_HEAD.pack(p.STATUS_OK, 0, 1, 0, 0, size) + tensor + data

    def _open(self, order: Order) -> None:
        """Answer by senders, before or after DONE."""
        status = p.RESPONSE_HEAD.pack(p.STATUS_OPEN, 0, 0, 0, 0, p.RESPONSE_HEAD.size)
        for number, given in zip(order.requests, order.inputs, strict=True):
            if self.random.random() < 0.3:
                self._send(number, given)
            else:
                delay = self.random.randint(0, MS)
                self.later(delay, lambda number=number, given=given: self._send(number, given))  # type: ignore[misc]
        self._done(order, status * len(order.requests))

    def _send(self, number: int, given: tuple[np.ndarray, int]) -> None:
        if self.random.random() < 0.5:
            self.say(self.its_side, p.RESPONSE, self._inline([given]), flags=p.FINAL, number=number)
            return
        self.say(self.its_side, p.RESPONSE, self._inline([given]), number=number)
        if self.alive:
            self.say(self.its_side, p.RESPONSE, flags=p.FINAL | p.EMPTY, number=number)


def product(x: np.ndarray) -> np.ndarray:
    """What the model answers."""
    y = x.copy()
    y[:, 1:] *= 2
    return y
