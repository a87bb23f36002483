"""The models of a simulation as the server has them: their backend, and their versions with the threads of these."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from _native.memory.arena import ArenaHandle
from backends.api import Backend, Instance, InstanceSpec, Model, ModelSource, ModelSpec
from backends.identity import IdentityGpuInstance
from backends.python._link import TeamHandle
from server.engine.instances.instances import Hardware
from server.engine.instances.resources import Resources
from server.engine.models.version import LoadedVersion
from server.pb import model_config_pb2
from tests.simulation.gpus import Graphics
from tests.simulation.instances import (
    Executions,
    NativeSimulated,
    RaggedInstance,
    SequenceInstance,
    SimulatedInstance,
    TextInstance,
)
from tests.simulation.kind import Kind
from tests.simulation.processes import Town, WorkerInstance
from tests.simulation.world import MS, World, WorldThread


class SimulatedBackend(Backend):
    """Makes models of a kind."""

    name = "simulated"

    def __init__(self, kind: Kind, world: World, random: Random, executions: Executions, town: Town) -> None:
        super().__init__()
        self.kind = kind
        self.world = world
        self.salt = random.random()
        self.late = False  # instances get their threads with the first request
        self.executions = executions
        self.town = town
        self.workers: list[WorkerInstance] = []
        self.executed = self.rows = 0  # batches, and in them

    def load(self, source: ModelSource) -> Model:
        return SimulatedModel(self, source.spec)


@dataclass
class SimulatedModel(Model):
    backend: SimulatedBackend
    spec: ModelSpec

    def __post_init__(self) -> None:
        if self.backend.kind.style == "worker":
            self.arena = ArenaHandle(f"simulated {self.backend.kind.name}")
            self.team = TeamHandle()

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
            return IdentityGpuInstance(self.spec, spec)
        if backend.kind.style.startswith("native"):
            return NativeSimulated(backend)
        if backend.kind.sequential:
            return SequenceInstance(backend, spec.name)
        if backend.kind.text:
            return TextInstance(backend, spec.name)
        return (RaggedInstance if backend.kind.ragged else SimulatedInstance)(backend, spec.name)

    def close(self) -> None:
        pass


class InstanceThread(threading.Thread):
    """The thread of an instance: of the world from when the instance is made until it has ended."""

    world: World
    is_refused: Callable[[], bool]

    def __init__(self, *, args: tuple[Any, ...], **arguments: Any) -> None:
        super().__init__(args=args, **arguments)
        self.late = len(args) == 1  # its instance was made before, on another thread
        self._gone = False

    def start(self) -> None:
        """Begin, and return when the instance is made: what several take of a device they take in one order."""
        if not self.late:
            _, _, ready = self._args  # type: ignore[attr-defined]
            super().start()
            ready.exception()
        elif self.is_refused():
            raise RuntimeError("can't start new thread")
        else:
            may_fail = self.world.may_fail(0)
            super().start()
            self.world.admit(1)
            self.world.may_fail(may_fail)

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._gone = True
            self.world.leave()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end: within the world, where another thread of the world does, for this one needs its turns."""
        is_elsewhere = threading.current_thread() is not threading.main_thread()
        while is_elsewhere and self.is_alive() and not self._gone:
            self.world.sleep(MS)
        super().join(timeout)


def threads_of(world: World, is_refused: Callable[[], bool]) -> SimpleNamespace:
    """Stands for the module `threading` where instances get their threads, some of which the system refuses."""
    thread = type("InstanceThread", (InstanceThread,), {"world": world, "is_refused": staticmethod(is_refused)})
    return SimpleNamespace(Thread=thread, Event=threading.Event, Lock=threading.Lock)


class Version:
    """A version of a model, from its load to the end of its last thread."""

    def __init__(self, kind: Kind, generation: int, count: int, backend: SimulatedBackend, loaded: LoadedVersion):
        self.kind = kind
        self.prefix = prefix_of(kind, generation)
        self.count = 0 if kind.steps else count
        self.backend = backend
        self.loaded = loaded
        self.joined = self.closes = False
        self.threads: list[InstanceThread] = []
        self.waits: list[Callable[[], None]] = []  # for instances that have ended
        self.over = 0  # requests, as it has said
        self.told: dict[str, float] = {}  # by its metrics
        self.loaded_ns = backend.world.now()
        self.threadless_ns = 0  # since when requests wait, and no thread has begun
        self._note_threads()

    @property
    def ended(self) -> bool:
        self._note_threads()
        attendants = (worker.thread for worker in self.backend.workers)
        return not any(thread.is_alive() for thread in (*self.threads, *attendants))

    @property
    def executed(self) -> int:
        """Batches so far; native instances count them in the statistics alone."""
        if self.kind.style.startswith("native"):
            return int(self.loaded.statistics().execution_count)
        return self.backend.executed

    @property
    def has_threads(self) -> bool:
        if not self.threads:
            self._note_threads()
        return bool(self.threads)

    def _note_threads(self) -> int:
        """Those that are new; how many of them have still to be let into the world."""
        begun = [runner.thread for runner in self.loaded._instances._runners if runner.thread is not None]
        new = [thread for thread in begun if thread not in self.threads]
        self.threads += new  # type: ignore[arg-type]
        return sum(not thread.late for thread in new)  # type: ignore[attr-defined]

    def change(self, count: int, world: World) -> None:
        """Have so many instances instead."""
        self._note_threads()
        specs = self.kind.spec(self.prefix, count).instances
        self.waits.append(self.loaded.change_instances(self.loaded.config, specs))
        made = self._note_threads()
        # workers have attendants, and instances on GPUs a thread for what is completed
        world.admit(2 * made if self.kind.style in ("worker", "gpu") else made)
        self.count = count

    def drain(self) -> None:
        """No requests will come: its instances wait for no worker any more."""
        for worker in sorted(self.backend.workers, key=str):
            worker.drain()

    def close(self) -> None:
        """Its threads have ended."""
        if not self.backend.late:
            self._close()
        elif not self.closes:  # it may execute what no thread has, and wait for clients
            self.closes = True
            WorldThread(self.backend.world, self._close, f"close {self.prefix}").start()
            self.backend.world.admit(1)

    def _close(self) -> None:
        for wait in self.waits:
            wait()
        self.loaded.close()
        self.joined = True


def prefix_of(kind: Kind, generation: int) -> str:
    return f"{kind.name[:8]}.{generation}"


def load(
    kind: Kind,
    generation: int,
    count: int,
    service: object,
    world: World,
    random: Random,
    executions: Executions,
    resources: Resources,
    town: Town,
    graphics: Graphics,
    late: float,
) -> Version:
    """A version that serves; `late` is how often its instances get their threads with the first request."""
    backend = SimulatedBackend(kind, world, random, executions, town)
    backend.late = kind.may_be_late and random.random() < late
    source = ModelSource(kind.spec(prefix_of(kind, generation), count), 1, Path("/"))
    closers = graphics.closers()
    loaded = LoadedVersion(
        model_config_pb2.ModelConfig(name=kind.name),
        None if kind.steps else backend,
        source,
        service,  # type: ignore[arg-type]
        hardware=Hardware(resources=None if backend.late else resources, gpus=graphics.gpus),
    )
    version = Version(kind, generation, count, backend, loaded)
    if version.threads:
        others = len(backend.workers)  # which have attendants
        if kind.style == "gpu":
            graphics.use()
            others = version.count + graphics.closers() - closers  # each has one for what is completed
        world.admit(len(version.threads) + others)
    return version
