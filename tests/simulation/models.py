"""The models of a simulation as the server has them: their backend, and their versions with the threads of these."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

from inferd._native.gpu.instance import GpuLoop
from inferd._native.memory.arena import ArenaHandle
from inferd._native.request.lane import LaneHandle
from inferd.backends.api import Backend, Instance, InstanceSpec, Model, ModelSource, ModelSpec
from inferd.backends.python._link import TeamHandle
from inferd.server.engine.models.version import LoadedVersion
from tests.simulation.gpus import Graphics
from tests.simulation.instances import (
    AlternatingInstance,
    Executions,
    NativeSimulated,
    RaggedInstance,
    SequenceInstance,
    SimulatedInstance,
    TextInstance,
)
from tests.simulation.kernels import KernelInstance, Make
from tests.simulation.kind import Kind
from tests.simulation.processes import Town, WorkerInstance
from tests.simulation.world import MS, World


class SimulatedBackend(Backend):
    """Makes models of a kind."""

    name = "simulated"

    def __init__(
        self, kind: Kind, world: World, random: Random, executions: Executions, town: Town, prefix: str
    ) -> None:
        super().__init__()
        self.prefix = prefix  # of the names of its instances
        self.generation = -1  # of the model's files
        self.kind = kind
        self.world = world
        self.salt = random.random()
        self.late = False  # instances get their threads with the first request
        self.make: Make | None = None  # what it does on GPUs
        self.graphics: Graphics
        self.lane: LaneHandle  # of its version
        self.executions = executions
        self.town = town
        self.workers: list[WorkerInstance] = []
        self.executed = self.rows = 0  # batches, and in them
        self.busy_ns = self.served_ns = 0  # that executions took, and as often as they had requests

    def load(self, source: ModelSource) -> Model:
        return SimulatedModel(self, source.spec)


WARMS_NS = 10_000  # after which it is looked whether an instance is warm


@dataclass
class SimulatedModel(Model):
    backend: SimulatedBackend
    spec: ModelSpec

    def __post_init__(self) -> None:
        self._in_front: memoryview | None = None
        if self.backend.kind.style == "worker":
            self.arena = ArenaHandle(f"simulated {self.backend.kind.name}")
            self.team = TeamHandle()
            self._in_front = self._take_some()

    def _take_some(self) -> memoryview:
        """Have what workers get lie elsewhere than where the arena begins."""
        may_fail = self.backend.world.may_fail(0)
        _, block = self.arena._take(1)
        self.backend.world.may_fail(may_fail)
        return block

    @property
    def any_thread(self) -> bool:  # type: ignore[override]
        return self.backend.late

    def create_instance(self, spec: InstanceSpec) -> Instance:
        backend = self.backend
        if self.arena is not None:
            worker = WorkerInstance(backend, spec.name, self.arena, self.team)
            backend.workers.append(worker)
            return worker
        if backend.kind.style == "gpu":
            assert backend.make is not None
            random = Random(f"{backend.salt} {spec.name}")
            return KernelInstance(backend.graphics, backend.make, spec, random)
        if backend.kind.style.startswith("native"):
            return NativeSimulated(backend)
        if backend.kind.sequential:
            return SequenceInstance(backend, spec.name)
        if backend.kind.text:
            return TextInstance(backend, spec.name)
        if backend.kind.style == "alternating":
            return AlternatingInstance(backend, spec.name)
        return (RaggedInstance if backend.kind.ragged else SimulatedInstance)(backend, spec.name)

    def close(self) -> None:
        self._in_front = None


class InstanceThread(threading.Thread):
    """The thread of an instance: of the world from when the instance is made until it has ended."""

    world: World
    is_refused: Callable[[], bool]
    graphics: Graphics
    warming: set[str]

    def __init__(self, *, args: tuple[Any, ...], **arguments: Any) -> None:
        super().__init__(args=args, **arguments)
        self._arguments = args
        self.warms = arguments.get("name", "").rpartition("_")[0] in self.warming
        self.late = len(args) == 1  # its instance was made before, on another thread
        self._gone = False

    def start(self) -> None:
        """Begin, and return when the instance is made: what several take of a device they take in one order."""
        if not self.late:
            _, runner, ready = self._arguments
            made = [runner]
            ready.add_done_callback(lambda ready: self._is_made(made, ready))
            closers = self.graphics.closers()
            super().start()
            if self.warms:  # which takes mutexes
                self.world.admit(1)
                while not ready.done():
                    self.world.sleep(WARMS_NS)
            elif ready.exception() is None:
                self.world.admit(1 + self._companions(runner, closers))
        elif self.is_refused():
            raise RuntimeError("can't start new thread")
        else:
            may_fail = self.world.may_fail(0)
            super().start()
            self.world.admit(1)
            self.world.may_fail(may_fail)

    def _companions(self, runner: Any, closers: int) -> int:
        """Threads that the instance has beside this one; there were so many before that close what is closed slowly."""
        if isinstance(runner.instance, WorkerInstance):
            return 1  # its attendant
        if isinstance(runner.loop, GpuLoop):
            self.graphics.use()
            return 1 + self.graphics.closers() - closers  # for what is completed
        return 0

    def _is_made(self, made: list[Any], ready: Any) -> None:
        """On this thread: the instance is there, or cannot be made, and then the thread ends."""
        runner = made.pop()  # the future keeps what it has called
        if self.warms:
            self.world.join(self.name)  # unless it has, for its warm-up
        elif ready.exception() is None:
            self.world.stay_out(0)
        if isinstance(runner.instance, KernelInstance):
            runner.instance.serves()

    def run(self) -> None:
        if not self.late:
            self.world.stay_out(not self.warms)  # warm-up in the world takes mutexes
            self.graphics.stub.run_all(runs=True)
        try:
            super().run()
        finally:
            del self._arguments
            self._gone = True
            self.world.leave()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end: within the world, where another thread of the world does, for this one needs its turns."""
        is_elsewhere = threading.current_thread() is not threading.main_thread()
        while is_elsewhere and self.is_alive() and not self._gone:
            self.world.sleep(MS)
        super().join(timeout)


def threads_of(world: World, is_refused: Callable[[], bool], graphics: Graphics, warming: set[str]) -> SimpleNamespace:
    """Stands for the module `threading` where instances get their threads, some of which the system refuses.

    Args:
        world: whose the threads are.
        is_refused: whether the next one is.
        graphics: its devices.
        warming: prefixes of versions that warm up.
    """
    known = {"world": world, "is_refused": staticmethod(is_refused), "graphics": graphics, "warming": warming}
    thread = type("InstanceThread", (InstanceThread,), known)
    return SimpleNamespace(Thread=thread, Event=threading.Event, Lock=threading.Lock)


class Version:
    """A version of a model, from when it is made to the end of its last request."""

    def __init__(self, kind: Kind, backend: SimulatedBackend, loaded: LoadedVersion) -> None:
        self.kind = kind
        self.prefix = backend.prefix
        self.count = len(loaded.spec.instances)
        self.backend = backend
        backend.lane = loaded.lane
        self.loaded = loaded
        self.threads: list[InstanceThread] = []
        self.over = 0  # requests, as it has said
        self.told: dict[str, float] = {}  # by its metrics
        self.loaded_ns = backend.world.now()

    @property
    def executed(self) -> int:
        """Batches so far; native instances count them in the statistics alone."""
        if self.kind.style.startswith("native"):
            return int(self.loaded.statistics().execution_count)
        return self.backend.executed

    @property
    def has_threads(self) -> bool:
        if not self.threads:
            self.note_threads()
        return bool(self.threads)

    def note_threads(self) -> None:
        """Note the threads of the model's instances, where an instance has one."""
        begun = [runner.thread for runner in self.loaded._instances._runners if runner.thread is not None]
        self.threads += [thread for thread in begun if thread not in self.threads]  # type: ignore[misc]


def prefix_of(kind: Kind, number: int) -> str:
    return f"{kind.name[:8]}.{number}"
