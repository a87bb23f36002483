"""The models of a simulation: what they are, what they answer, and what a rule lets them do.

All take `x`, INT64 [-1] in rows of which each begins with the number of its request, and most give `y`: the same
numbers in front, multiples of the others behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np

from _native.execution.batch import Batch
from _native.memory.arena import ArenaHandle
from backends.api import (
    Backend,
    BatchingSpec,
    EnsembleSpec,
    Instance,
    InstanceSpec,
    Model,
    ModelSource,
    ModelSpec,
    QueuePolicySpec,
    QueueSpec,
    ResourceSpec,
    SequenceSpec,
    StepSpec,
    SuppliedSpec,
    TensorSpec,
)
from backends.identity import IdentityGpuInstance, IdentityInstance
from backends.python._link import TeamHandle
from server.engine.instances.instances import Hardware
from server.engine.instances.resources import Resources
from server.engine.models.version import LoadedVersion
from server.pb import model_config_pb2
from tests.simulation.gpus import Graphics
from tests.simulation.processes import Town, WorkerInstance
from tests.simulation.world import World

MAX_ROWS = 8
IDLE_US = 5_000_000  # after which a sequence ends
SCALE = 1 << 20  # numbers of requests are multiples of it in tensors

BATCHING = BatchingSpec()
QUEUE = QueueSpec()
G = (TensorSpec("g", "BOOL", (1,)),)


@dataclass(frozen=True)
class Kind:
    """A sort of model.

    Attributes:
        instances: how many there may be.
        factor: y is so many times x, but for the number in front.
        more: outputs beside y, and what they are multiples by.
        style: how instances work: "fresh" output, "in place", "native", "native gathered", "native decoupled", which
            answers each row on its own, "gpu", "worker", in a process of its own, "again", which is executed more than
            once, or "odd", which says by `g`, BOOL [1], whether the number of the request is.
        rows: of the largest batch.
        duration_us: the longest execution; the shortest takes no time.
        delay_us: a batch may wait so long for more requests; None where nobody can say.
        queue: levels and limits.
        needs: resources of each instance.
        even_factor: in place of `factor` for requests with even numbers; 0 for no other one.
        decoupled: it answers each row on its own, and is asked by streams.
        mortal: its worker processes may end, or break their protocol.
        text: numbers go to and fro as strings; its instances are native.
        tallies: a step of it keeps sequences, and it answers what that step does.
        weight: how often it is asked; 0: it is only a step of others.
    """

    name: str
    instances: tuple[int, int] = (1, 3)
    factor: int = 2
    even_factor: int = 0
    more: tuple[tuple[str, int], ...] = ()
    style: str = "fresh"
    rows: int = MAX_ROWS
    duration_us: int = 300
    batching: BatchingSpec | None = BATCHING
    queue: QueueSpec = QUEUE
    needs: int = 0
    fails: bool = False
    caches: bool = False
    coalesces: bool = False
    splits: bool = False
    decoupled: bool = False
    mortal: bool = False
    text: bool = False
    tallies: bool = False
    sequence: SequenceSpec | None = None
    steps: tuple[StepSpec, ...] = ()
    weight: int = 2

    @property
    def delay_us(self) -> int | None:
        """How long an idle instance may leave requests waiting; None: that is not ruled."""
        batching = self.batching
        # one of a decoupled model may wait for its client, too
        if self.needs or self.sequence or self.decoupled or self.style in ("worker", "gpu"):
            return None
        if batching is None:
            return 0
        return None if batching.adaptive else batching.max_queue_delay_us

    @property
    def sequential(self) -> bool:
        """Whether its requests belong to sequences of clients."""
        return self.tallies or (self.sequence is not None and not self.sequence.iterative)

    @property
    def datatype(self) -> str:
        """Of x and y."""
        return "BYTES" if self.text else "INT64"

    def encoded(self, x: np.ndarray) -> bytes:
        """The numbers as a request or an answer has them."""
        return serialize_strings([written(value) for value in x.reshape(-1).tolist()]) if self.text else x.tobytes()

    @property
    def max_rows(self) -> int:
        return 3 * self.rows if self.splits else self.rows

    def factors(self, number: int) -> dict[str, int]:
        """What the outputs of a request of this number are multiples by."""
        factor = self.even_factor if self.even_factor and number % 2 == 0 else self.factor
        return {"y": factor, **dict(self.more)}

    @property
    def bounded(self) -> bool:
        """Whether its queue may be full."""
        return any(level.max_size for level in self.queue.levels)

    @property
    def reuses(self) -> bool:
        return self.caches or self.coalesces

    def spec(self, version: str, count: int) -> ModelSpec:
        """With so many instances."""
        needs = (ResourceSpec("R", self.needs),) if self.needs else ()
        names = ("y", *dict(self.more))
        on = "GPU" if self.style == "gpu" else "CPU"
        instances = tuple(InstanceSpec(f"{version}_{i}", on, resources=needs, priority=i) for i in range(count))
        supplied: tuple[SuppliedSpec, ...] = ()
        if self.sequence is not None and not self.sequence.iterative:
            supplied = (
                SuppliedSpec("START", TensorSpec("start", "INT32", (1,))),
                SuppliedSpec("READY", TensorSpec("ready", "INT32", (1,))),
                SuppliedSpec("CORRID", TensorSpec("corrid", "UINT64", (1,))),
            )
        return ModelSpec(
            self.name,
            "" if self.steps else "simulated",
            platform="ensemble" if self.steps else "",
            max_batch_size=self.rows,
            inputs=(TensorSpec("x", self.datatype, (-1,)),),
            outputs=G if self.style == "odd" else tuple(TensorSpec(name, self.datatype, (-1,)) for name in names),
            batching=self.batching,
            queue=self.queue,
            sequence=self.sequence,
            instances=() if self.steps else instances,
            caches=self.caches,
            coalesces=self.coalesces,
            splits=self.splits,
            supplied=supplied,
            decoupled=self.decoupled,
            ensemble=EnsembleSpec(self.steps) if self.steps else None,
        )


def written(value: int) -> bytes:
    """A number as a string, of a length that the number does not tell; one of sixteen is empty."""
    return b"" if value % 16 == 7 else str(value).encode() + b"\0" * (value % 5)


def serialize_strings(strings: list[bytes]) -> bytes:
    """As a tensor of BYTES has them: each behind its length."""
    return b"".join(len(each).to_bytes(4, "little") + each for each in strings)


def step(model: str, source: str, result: str) -> StepSpec:
    return StepSpec(model, inputs={"x": source}, outputs={"y": result})


def gated(model: str, source: str, result: str, *, inverted: bool = False) -> StepSpec:
    """One that runs where `g` says yes, or no."""
    return StepSpec(model, inputs={"x": source}, outputs={"y": result}, gate="g", gate_inverted=inverted)


DELAYED = BatchingSpec(preferred_sizes=(4,), max_queue_delay_us=500)
LEVELS = QueueSpec(
    levels=(
        QueuePolicySpec(max_size=6),
        QueuePolicySpec(max_size=4, timeout_us=800),
        QueuePolicySpec(timeout_us=500, yields=True),
    ),
    default_level=2,
)

KINDS = {
    kind.name: kind
    for kind in (
        Kind("plain", weight=4),
        Kind("quick", duration_us=0, weight=4),
        Kind("alone", batching=None),
        Kind("delayed", batching=DELAYED, weight=4),
        Kind("patient", batching=BatchingSpec(preferred_sizes=(6,), max_queue_delay_us=5000), weight=4),
        Kind("adaptive", batching=BatchingSpec(max_queue_delay_us=700, adaptive=True)),
        Kind("levels", queue=LEVELS, instances=(1, 1), weight=4),
        Kind("ordered", instances=(2, 3), duration_us=5000, queue=QueueSpec(preserve_ordering=True), weight=6),
        Kind("needy", needs=1),
        Kind("needier", needs=2),
        Kind("cached", caches=True),
        Kind("twins", coalesces=True),
        Kind("both", caches=True, coalesces=True, style="in place"),
        Kind("parts", splits=True),
        Kind("inplace", style="in place"),
        Kind("slow", duration_us=30_000),
        Kind("failing", fails=True),
        Kind("native", style="native", factor=1, weight=4),
        Kind("gathered", style="native gathered", factor=1),
        Kind("words", style="native", factor=1, text=True),
        Kind("sentences", style="native gathered", factor=1, text=True, splits=True, batching=DELAYED),
        Kind("sayings", style="native gathered", factor=1, text=True, caches=True, coalesces=True),
        Kind("direct", sequence=SequenceSpec(max_idle_us=IDLE_US), weight=4),
        Kind("oldest", sequence=SequenceSpec(direct=False, max_candidates=4, max_idle_us=IDLE_US), weight=4),
        Kind(
            "again",
            style="again",
            sequence=SequenceSpec(direct=False, iterative=True, max_candidates=4, max_idle_us=IDLE_US),
        ),
        Kind("decoupled", style="native decoupled", factor=1, rows=150, decoupled=True, weight=4),
        Kind("worker", style="worker", weight=4),
        Kind("mortal", style="worker", mortal=True),
        # not by the loop, since it waits for resources
        Kind("bound", style="worker", mortal=True, needs=1),
        Kind("gpu", style="gpu", factor=1, weight=4),
        Kind("odd", style="odd", weight=0),
        Kind("chain", steps=(step("plain", "x", "t"), step("inplace", "t", "y")), factor=4),
        Kind(
            "fan",
            steps=(step("cached", "x", "a"), step("both", "a", "b"), step("delayed", "b", "y")),
            factor=8,
        ),
        # ensembles of ensembles
        Kind("nest", steps=(step("chain", "x", "t"), step("both", "t", "u"), step("twins", "u", "y")), factor=16),
        Kind("studio", steps=(step("gpu", "x", "t"), step("inplace", "t", "u"), step("gpu", "u", "y"))),
        Kind("office", steps=(step("worker", "x", "t"), step("plain", "t", "y")), factor=4),
        Kind("speech", steps=(step("words", "x", "t"), step("sayings", "t", "y")), factor=1, text=True),
        # requests that wait for others, and come from other threads than the loop's
        Kind("queueing", steps=(step("plain", "x", "t"), step("patient", "t", "y")), factor=4),
        Kind("tally", steps=(step("native", "x", "t"), step("direct", "t", "y")), factor=1, tallies=True),
        # two that write to the same input in place, beside one that reads it
        Kind(
            "fork",
            steps=(step("inplace", "x", "y"), step("both", "x", "z"), step("native", "x", "w")),
            more=(("z", 2), ("w", 1)),
        ),
        Kind(
            "gated",
            steps=(
                StepSpec("odd", inputs={"x": "x"}, outputs={"g": "g"}),
                gated("plain", "x", "y"),
                gated("chain", "x", "y", inverted=True),
            ),
            even_factor=4,
        ),
        # each response of the first step goes through the second on its own
        Kind(
            "spread",
            steps=(
                StepSpec("decoupled", inputs={"x": "x"}, outputs={"y": "t"}, decoupled=True),
                step("parts", "t", "y"),
            ),
            decoupled=True,
        ),
    )
}


@dataclass
class Executions:
    """What models were asked to do, as they saw it.

    Attributes:
        resources: that instances share.
        excused: numbers of requests whose inputs may change, for they are in memory that their client has taken back.
        count: by model and number of a request, how often it was executed.
        failed: numbers of requests whose execution failed.
        log: called with what happens.
    """

    log: Callable[[str, str], None]
    resources: int  # that there are
    count: dict[tuple[str, int], int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    excused: set[int] = field(default_factory=set)
    order: dict[str, list[int]] = field(default_factory=dict)
    batches: int = 0
    problem: str = ""
    resources_used: int = 0

    def complain(self, text: str) -> None:
        """A rule is broken; said on the thread of an instance, which would take an exception for the model's."""
        self.problem = self.problem or text


class SimulatedBackend(Backend):
    """Makes models of a kind."""

    name = "simulated"

    def __init__(self, kind: Kind, world: World, random: Random, executions: Executions, town: Town) -> None:
        super().__init__()
        self.kind = kind
        self.world = world
        self.salt = random.random()
        self.executions = executions
        self.town = town
        self.workers: list[WorkerInstance] = []
        self.executed = 0  # batches

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
        return SimulatedInstance(backend, spec.name)

    def close(self) -> None:
        pass


class NativeSimulated(IdentityInstance):
    """The identity backend's own executor; its delays pass in virtual time."""

    def __init__(self, backend: SimulatedBackend) -> None:
        kind = backend.kind
        super().__init__((kind.duration_us // 2, 3), kind.style.endswith("gathered"), kind.decoupled)


class SimulatedInstance(Instance):
    """Computes in Python, for as long as the seed says."""

    def __init__(self, backend: SimulatedBackend, name: str) -> None:
        self.backend = backend
        self.kind = backend.kind
        self.name = name
        self.sums: dict[int, int] = {}
        self.busy = False
        # what it draws does not depend on what the others have drawn
        self.random = Random(f"{backend.salt} {name}")

    @property
    def writes_inputs(self) -> bool:
        return self.kind.style == "in place"

    def execute(self, batch: Batch) -> None:
        executions = self.backend.executions
        if self.busy:
            executions.complain(f"instance {self.name} executes two batches at a time")
        self.busy = True
        executions.resources_used += self.kind.needs
        if executions.resources_used > executions.resources:
            executions.complain(
                f"instances execute with {executions.resources_used} of {executions.resources} resources"
            )
        try:
            if self.kind.sequential:
                self._add_up(batch)
            else:
                self._multiply(batch)
        finally:
            self.busy = False
            executions.resources_used -= self.kind.needs

    def _begin(self, batch: Batch, numbers: list[int]) -> None:
        executions = self.backend.executions
        name = self.kind.name
        executions.batches += 1
        self.backend.executed += 1
        if batch.rows > MAX_ROWS:
            executions.complain(f"a batch of {batch.rows} rows for model '{name}', which takes {MAX_ROWS}")
        if self.kind.batching is None and self.kind.sequence is None and batch.request_count != 1:
            executions.complain(f"a batch of {batch.request_count} requests for model '{name}', which does not batch")
        executions.log(self.name, f"executes {numbers}")
        order = executions.order.setdefault(name, [])
        for number in numbers:
            executions.count[name, number] = executions.count.get((name, number), 0) + 1
            order.append(number)

    def _take_time(self) -> None:
        if self.kind.duration_us:
            draw = self.random.random()
            self.backend.world.sleep(int(draw**4 * self.kind.duration_us * 1000))

    def _multiply(self, batch: Batch) -> None:
        executions = self.backend.executions
        view = batch.input("x")
        assert view is not None
        x = view.numpy()
        numbers = list(dict.fromkeys((abs(x[:, 0]) // SCALE).tolist()))
        before = x.copy()
        self._begin(batch, numbers)
        self._take_time()
        if not np.array_equal(before, x) and executions.excused.isdisjoint(numbers):
            self.backend.executions.complain(f"inputs of {numbers} changed while instance {self.name} had them")
        if self.kind.style == "odd":
            batch.set_output("g", (before[:, :1] // SCALE) % 2 == 1)
            return
        if self.kind.style == "again":
            self._send_back(batch)
        if self.kind.fails and (x[:, 0] < 0).any():
            self.backend.executions.failed.update(numbers)
            raise ValueError("negative")
        y = x if self.kind.style == "in place" else before
        y[:, 1:] *= 2
        batch.set_output("y", y)
        if self.random.random() < 0.3:
            self._take_time()

    def _send_back(self, batch: Batch) -> None:
        """Some of its requests are to be executed again, as they are."""
        for index in range(batch.request_count):
            if self.random.random() < 0.4:
                batch.reschedule(index)

    def _add_up(self, batch: Batch) -> None:
        # y is x with the sum of the second column over its sequence in place of that column
        x, start = (self._input(batch, name) for name in ("x", "start"))
        ready, corrid = (self._input(batch, name).reshape(-1) for name in ("ready", "corrid"))
        numbers = (x[:, 0] // SCALE).tolist()
        self._begin(batch, [number for number, is_ready in zip(numbers, ready, strict=True) if is_ready])
        self._take_time()
        y = x.copy()
        if len(set(corrid[ready != 0].tolist())) != int((ready != 0).sum()):
            self.backend.executions.complain(
                f"two requests of one sequence in a batch of instance {self.name}: {corrid.tolist()}"
            )
        for at, is_ready in enumerate(ready):
            if is_ready:
                name = int(corrid[at])
                self.sums[name] = (0 if start.reshape(-1)[at] else self.sums.get(name, 0)) + int(x[at, 1])
                y[at, 1] = self.sums[name]
        batch.set_output("y", y)

    @staticmethod
    def _input(batch: Batch, name: str) -> np.ndarray:
        view = batch.input(name)
        assert view is not None
        return np.array(view.numpy())


class InstanceThread(threading.Thread):
    """The thread of an instance: of the world from when the instance is made until it has ended."""

    world: World

    def start(self) -> None:
        """Begin, and return when the instance is made: what several take of a device they take in one order."""
        _, _, ready = self._args  # type: ignore[attr-defined]
        super().start()
        ready.exception()

    def run(self) -> None:
        try:
            super().run()
        finally:
            self.world.leave()


def threads_of(world: World) -> SimpleNamespace:
    """Stands for the module `threading` where instances get their threads."""
    thread = type("InstanceThread", (InstanceThread,), {"world": world})
    return SimpleNamespace(Thread=thread, Event=threading.Event, Lock=threading.Lock)


class Version:
    """A version of a model, from its load to the end of its last thread."""

    def __init__(self, kind: Kind, generation: int, count: int, backend: SimulatedBackend, loaded: LoadedVersion):
        self.kind = kind
        self.prefix = prefix_of(kind, generation)
        self.count = 0 if kind.steps else count
        self.backend = backend
        self.loaded = loaded
        self.idle_since = 0  # instances are idle beside the same requests
        self.waiting = (0, 0, 0, 0)
        self.joined = False
        self.threads: list[InstanceThread] = []
        self.waits: list[Callable[[], None]] = []  # for instances that have ended
        self.over = 0  # requests, as it has said
        self._note_threads()

    @property
    def ended(self) -> bool:
        attendants = (worker.thread for worker in self.backend.workers)
        return not any(thread.is_alive() for thread in (*self.threads, *attendants))

    @property
    def executed(self) -> int:
        """Batches so far; native instances count them in the statistics alone."""
        if self.kind.style.startswith("native"):
            return int(self.loaded.statistics().execution_count)
        return self.backend.executed

    def _note_threads(self) -> None:
        """Those that are new."""
        for runner in self.loaded._instances._runners:
            if runner.thread not in self.threads:
                self.threads.append(runner.thread)  # type: ignore[arg-type]

    def change(self, count: int, world: World) -> None:
        """Have so many instances instead."""
        before = len(self.threads)
        specs = self.kind.spec(self.prefix, count).instances
        self.waits.append(self.loaded.change_instances(self.loaded.config, specs))
        self._note_threads()
        made = len(self.threads) - before
        # workers have attendants, and instances on GPUs a thread for what is completed
        world.admit(2 * made if self.kind.style in ("worker", "gpu") else made)
        self.count = count

    def drain(self) -> None:
        """No requests will come: its instances wait for no worker any more."""
        for worker in sorted(self.backend.workers, key=str):
            worker.drain()

    def close(self) -> None:
        """Its threads have ended."""
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
) -> Version:
    """A version that serves."""
    backend = SimulatedBackend(kind, world, random, executions, town)
    source = ModelSource(kind.spec(prefix_of(kind, generation), count), 1, Path("/"))
    closers = graphics.closers()
    loaded = LoadedVersion(
        model_config_pb2.ModelConfig(name=kind.name),
        None if kind.steps else backend,
        source,
        service,  # type: ignore[arg-type]
        hardware=Hardware(resources=resources, gpus=graphics.gpus),
    )
    version = Version(kind, generation, count, backend, loaded)
    if version.count:
        others = len(backend.workers)  # which have attendants
        if kind.style == "gpu":
            graphics.used = True
            others = version.count + graphics.closers() - closers  # each has one for what is completed
        world.admit(version.count + others)
    return version


def depth(kind: Kind) -> int:
    """Of ensembles in ensembles; 0: it is none."""
    return max((1 + depth(KINDS[step.model]) for step in kind.steps), default=0)


def with_steps(kind: Kind) -> set[str]:
    """Names of all models that a request of this one may ask, with its own."""
    return {kind.name}.union(*(with_steps(KINDS[step.model]) for step in kind.steps))


def kinds_with_steps(names: Mapping[str, Kind]) -> list[str]:
    """Their names, those that others have as steps first."""
    return sorted(names, key=lambda name: depth(names[name]))
