"""The engine that is shipped, in the world: its repository, what it does in Python, and what the operator does with it.

The registry, the lifecycle, loads, endings, polling and loading on demand are those of the server. Here are the
repository, whose models are kinds of the simulation; subclasses that tell the simulation what happens; and the deeds.
A configuration is not read from a file: `Shop.prepare` makes it of the kind.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence, Set
from contextvars import Context
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import inferd.server.engine.engine
import inferd.server.engine.housekeeping.deliveries
import inferd.server.engine.loading.candidates
import inferd.server.engine.models.registry
from inferd._native.model_files import NO_FILES, Mark, Watch
from inferd._native.request.bridge import BridgeHandle
from inferd._native.request.lane import LaneHandle
from inferd._native.service.table import ModelTable
from inferd.backends.api import BackendError, ModelSource
from inferd.server.engine import config as configuration
from inferd.server.engine.config.preparation import Prepared, VersionConfig
from inferd.server.engine.config.reading import Outline
from inferd.server.engine.engine import Engine
from inferd.server.engine.instances.instances import Hardware
from inferd.server.engine.loading.candidates import Maker
from inferd.server.engine.loading.control import ControlMode, ModelControl
from inferd.server.engine.loading.demand import Demand
from inferd.server.engine.loading.lifecycle import HALTED
from inferd.server.engine.models.version import LoadedVersion
from inferd.server.engine.pbtxt.source import Source
from inferd.server.engine.repository.folders import CONFIGURATION, REST, ModelFolder
from inferd.server.errors import ConfigError, ServerError
from inferd_client.pb import model_config_pb2
from tests.simulation.audit import Gauge
from tests.simulation.blunders import blunder
from tests.simulation.kernels import Make, draw_make
from tests.simulation.kinds import KINDS, STEPS
from tests.simulation.models import SimulatedBackend, Version, prefix_of
from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from tests.simulation.kind import Kind
    from tests.simulation.simulation import Simulation

US = 1000
MS = 1000 * US
DEEDS = 40  # of the operator in a usual simulation, at most
DISTURBS = 0.3  # how often one of them is that something fails on a GPU
OF_CROWD = 1000  # calls of a crowd, for which there is one deed more
STOPS = ("the server is stopping", "the server stops before the load has ended")
EARLY = (0.0, 0.01, 1.0, 40.0)  # seconds for calls, when a server ends that clients still ask
LAST = 40.0  # seconds that sequences have at the end of a simulation
CACHE = 1 << 16
RETRY = 6000 * MS  # in which an error is told again, and what its requests take
MODELS = Path("/models")
UNREACHABLE = "the repository cannot be reached now"
BROKEN = "the model's file is broken today"
NO_ROOM = "--model-memory-budget lacks"
LACKS_STEP = "which has no loaded version: see its own error"  # of an ensemble, one of whose models has not loaded


def size_of(name: str) -> int:
    """Bytes of a model's files."""
    return 1000 + 100 * len(name)


@dataclass(frozen=True)
class Box:
    """One model as it lies in the repository.

    Attributes:
        generation: of its files.
        revision: of its configuration.
        count: of instances.
        drain_seconds: that sequences may go on when it is replaced.
        late: its instances get threads with the first request.
        make: what they do on GPUs.
        is_wrong: its configuration cannot be served.
    """

    kind: Kind
    generation: int
    revision: int
    count: int
    drain_seconds: int
    late: bool
    make: Make | None = None
    is_wrong: bool = False

    @property
    def key(self) -> tuple[str, int, int]:
        """What says which one it is."""
        return self.kind.name, self.generation, self.revision

    @property
    def folder(self) -> ModelFolder:
        """The folder as a repository tells of it."""
        marks = {
            "1": Mark(self.generation + 1, 1, size_of(self.kind.name)),
            CONFIGURATION: Mark(self.revision + 1, 1, 1),
            REST: NO_FILES,
        }
        return ModelFolder(self.kind.name, MODELS / self.kind.name, MODELS, (1,), seen=marks)


class Shelf:
    """A `RepositorySource`, of which threads of the server read, and take their time."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._random = Random(f"{simulation.outcome.seed} shelf")
        self._boxes: dict[str, Box] = {}
        self._known: dict[tuple[str, int, int], Box] = {}
        self.moody = 0.0  # how often it cannot be read
        self.slow_ns = (0, 0, 0, 50 * US, 50 * US, MS, 20 * MS)

    def __str__(self) -> str:
        return "the shelf"

    # -- the operator's side, on the main thread

    def lay(self, kind: Kind, *, files: bool = True) -> None:
        """A model with other files, or with another configuration alone."""
        random, old = self._random, self._boxes.get(kind.name)
        count = random.randint(*kind.instances)
        if old is not None and not files:
            box = replace(old, revision=old.revision + 1, count=count, is_wrong=False)
        else:
            generation, revision = (old.generation + 1, old.revision) if old is not None else (0, 0)
            late = kind.may_be_late and random.random() < self._simulation.late
            make = None
            if kind.style == "gpu":
                make = draw_make(Random(f"{self._simulation.outcome.seed} {kind.name} {generation}"), kind)
            box = Box(kind, generation, revision, count, random.choice((0, 1, 1, 3)), late, make)
        self._boxes[kind.name] = self._known[kind.name, box.generation, box.revision] = box

    def spoil(self, name: str) -> Box:
        """The model has a configuration that cannot be served."""
        old = self._boxes[name]
        box = replace(old, revision=old.revision + 1, is_wrong=True)
        self._boxes[name] = self._known[name, box.generation, box.revision] = box
        return box

    def lies(self, box: Box) -> bool:
        """Whether it is still there: nothing has been laid in its place."""
        return self._boxes.get(box.kind.name) is box

    def mend(self, box: Box) -> None:
        """Correct this configuration, unless there is another one."""
        name = box.kind.name
        if self.lies(box):
            right = replace(box, revision=box.revision + 1, is_wrong=False)
            self._boxes[name] = self._known[name, right.generation, right.revision] = right

    def take(self, name: str) -> None:
        """The model is there no more."""
        self._simulation.shop.taken[name] = self._boxes.pop(name)

    def bring(self, name: str) -> None:
        """Bring the model back."""
        self._boxes[name] = self._simulation.shop.taken.pop(name)

    def generation_of(self, name: str) -> int:
        """The generation of a model's files; negative: the model is not there."""
        box = self._boxes.get(name)
        return box.generation if box is not None else -1

    def box_of(self, folder: ModelFolder) -> Box:
        """The box of which a folder was made."""
        assert folder.seen is not None
        return self._known[folder.name, folder.seen["1"].digest - 1, folder.seen[CONFIGURATION].digest - 1]

    # -- the server's side, on its threads

    def pause(self) -> None:
        """Reading takes time."""
        self._simulation.world.sleep(self._random.choice(self.slow_ns))

    def _read(self) -> None:
        self.pause()
        if self.moody and self._random.random() < self.moody:
            raise ConfigError(UNREACHABLE)

    def scan(self, but: Set[str] = frozenset()) -> list[ModelFolder]:
        """See RepositorySource."""
        self._read()
        return [box.folder for name, box in sorted(self._boxes.items()) if name not in but]

    def look(self, watch: Watch) -> dict[str, object]:
        """See RepositorySource."""
        self._read()
        return {name: (box.generation, box.revision) for name, box in sorted(self._boxes.items())}

    def find(self, name: str) -> ModelFolder | None:
        """See RepositorySource."""
        self._read()
        box = self._boxes.get(name)
        return box.folder if box is not None else None

    def has(self, name: str) -> bool:
        """See RepositorySource."""
        self.pause()
        return name in self._boxes

    def close(self) -> None:
        """See RepositorySource."""


class Shop:
    """Makes configurations of the kinds, and keeps the books on all versions that there are.

    Attributes:
        versions: those that requests find, by model.
        ending: those that finish what they have accepted.
        gauges: of all versions that have not ended.
        bounded: of those that limit their queues and do not end yet.
        changes: how often `versions` has changed.
        problem: what the server has done wrong, empty for nothing.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self._random = Random(f"{simulation.outcome.seed} shop")
        self._by_lane: dict[LaneHandle, Version] = {}
        self.gauges: list[Gauge[Version]] = []
        self.bounded: list[Gauge[Version]] = []
        self.changes = 0
        self._numbers: dict[str, int] = {}  # of versions made so far, by model
        self.versions: dict[str, Version] = {}
        self.ending: list[Version] = []
        self.taken: dict[str, Box] = {}
        self.moody = 0.0  # how often a model does not load
        self.blunders: dict[tuple[str, int, int], str] = {}  # what is said of configurations that cannot be served
        self.failed_ns: dict[str, int] = {}  # when the load of a model failed last
        self.generations: dict[str, tuple[str, int]] = {}  # by prefix, the model and the generation of its files
        self.problem = ""

    def prepare(self, folder: ModelFolder) -> Prepared:
        """The configuration of a model, on a thread of the server."""
        simulation = self.simulation
        box = simulation.shelf.box_of(folder)
        kind = box.kind
        simulation.shelf.pause()
        serving = self.versions.get(kind.name)
        # one that may stay keeps its instances, and these their names
        stays = serving is not None and serving.backend.generation == box.generation and serving.loaded.is_scalable
        if kind.steps:
            prefix = ""
        elif stays:
            assert serving is not None
            prefix = serving.prefix
        else:
            prefix = self._next_prefix(kind)
        spec = kind.spec(prefix, box.count)
        if kind.warms and not kind.steps:
            simulation.warming.add(prefix)
        if spec.sequence is not None:
            spec = replace(spec, sequence=replace(spec.sequence, drain_seconds=box.drain_seconds))
        backend = SimulatedBackend(
            kind, simulation.world, self._random, simulation.executions, simulation.town, prefix=prefix
        )
        backend.late, backend.generation = box.late, box.generation
        backend.make, backend.graphics = box.make, simulation.graphics
        if box.make is not None:
            spec = box.make.applied(spec)
            simulation.tell("operator", f"has {box.make} for '{kind.name}'")
        config = model_config_pb2.ModelConfig(name=kind.name, max_batch_size=spec.max_batch_size)
        config.parameters["generation"].string_value = str(box.generation)  # the fingerprint has it
        self.generations[prefix] = kind.name, box.generation
        if box.is_wrong:
            chosen = Random(f"{simulation.outcome.seed} {kind.name} {box.generation} {box.revision}")
            spec, self.blunders[box.key] = blunder(chosen, spec)
            config.parameters["wrong"].string_value = str(box.revision)
        if not kind.steps:
            config.instance_group.add(name="instances", count=box.count)
        return Prepared({1: VersionConfig(config, spec, Source(folder.path), None if kind.steps else backend)})

    def _next_prefix(self, kind: Kind) -> str:
        number = self._numbers[kind.name] = self._numbers.get(kind.name, -1) + 1
        return prefix_of(kind, number)

    def breaks(self, name: str) -> None:
        """A model is about to be loaded.

        Raises:
            BackendError: it cannot be.
        """
        self.simulation.shelf.pause()
        if self.moody and self._random.random() < self.moody:
            raise BackendError(BROKEN)
        self.simulation.tell("engine", f"loads '{name}'")

    def made(self, loaded: WatchedVersion, backend: SimulatedBackend | None) -> None:
        """A version has been made, which nothing finds yet."""
        simulation = self.simulation
        kind = simulation.kinds[loaded.name]
        if backend is None:  # of an ensemble
            prefix = self._next_prefix(kind)
            backend = SimulatedBackend(
                kind, simulation.world, self._random, simulation.executions, simulation.town, prefix=prefix
            )
        version = Version(kind, backend, loaded)
        self._by_lane[loaded.lane] = version
        limits = tuple(level.max_size for level in kind.queue.levels)
        gauge = Gauge(loaded.lane, version, limits, kind.sequence.max_backlog if kind.sequence else 0)
        self.gauges.append(gauge)
        if kind.bounded:
            self.bounded.append(gauge)
        simulation.traces.loaded(version)
        if kind.steps and kind.warms:
            simulation.oracle.asked(kind, at_any_time=True)  # its steps, before it serves

    def version_of(self, loaded: LoadedVersion) -> Version:
        return self._by_lane[loaded.lane]

    # -- on the main thread

    def published(self, name: str, lane: LaneHandle | None) -> None:
        """From now on requests for this model come to this lane, or to none."""
        simulation = self.simulation
        version = None if lane is None else self._by_lane[lane]
        if version is self.versions.get(name):
            return
        self.changes += 1
        if version is None:
            del self.versions[name]
            simulation.tell("engine", f"serves '{name}' no more")
            simulation.oracle.unloaded(name)
        else:
            self.versions[name] = version
            files = version.backend.generation
            simulation.tell("engine", f"serves {version.prefix} of files {files} with {version.count} instances")
            simulation.oracle.loaded(name)

    def ends(self, loaded: LoadedVersion) -> None:
        """A version that nothing finds begins to end."""
        version = self._by_lane[loaded.lane]
        if loaded.sequences:
            self.simulation.tell("engine", f"ends {loaded.sequences} sequences of {version.prefix}")
            self.simulation.cut_ns[loaded.name] = self.simulation.world.now()
        self.ending.append(version)
        self.bounded = without(version, self.bounded)

    def ended(self, loaded: LoadedVersion) -> None:
        """Check that the version has ended, and all of its requests with it."""
        simulation, version = self.simulation, self._by_lane.pop(loaded.lane)
        self.gauges = without(version, self.gauges)
        simulation.tell("engine", f"has seen {version.prefix} off")
        self.ending.remove(version)
        version.note_threads()
        if any(thread.is_alive() for thread in version.threads):
            raise Violation(f"{version.prefix} has ended, and its threads have not")
        simulation.oracle.leaves(version)
        # Redis may be asked for longer than a request lives
        all_looked_up = not (simulation.is_faulty or simulation.sharing or simulation.remote.on)
        simulation.books.left(version, all_looked_up=all_looked_up, is_faulty=simulation.is_faulty)

    def closed(self, loaded: LoadedVersion) -> None:
        """A version has been closed, which perhaps nothing has ever found: its warm-up has failed."""
        version = self._by_lane.get(loaded.lane)
        if version is not None and version not in self.ending:
            self.simulation.tell("engine", f"never serves {version.prefix}")
            del self._by_lane[loaded.lane]
            self.gauges = without(version, self.gauges)
            self.bounded = without(version, self.bounded)

    def failed(self, name: str) -> None:
        """The load of a model has failed."""
        self.failed_ns[name] = self.simulation.world.now()

    def every(self) -> list[Version]:
        """All versions that have not ended."""
        return list(self._by_lane.values())

    def left(self) -> list[str]:
        """Versions that have not ended."""
        return [version.prefix for version in self._by_lane.values()]


def without(version: Version, gauges: list[Gauge[Version]]) -> list[Gauge[Version]]:
    """Those of all other versions."""
    return [gauge for gauge in gauges if gauge.owner is not version]


class WatchedVersion(LoadedVersion):
    """Tells when it is made, and changed."""

    shop: Shop

    def __init__(
        self,
        config: model_config_pb2.ModelConfig,
        backend: Any,
        source: ModelSource,
        service: Any,
        max_queue: int = 0,
        hardware: Hardware | None = None,
        halt: Any = None,
    ) -> None:
        self.shop.breaks(source.spec.name)
        assert hardware is not None
        if backend is not None and backend.late:
            hardware = replace(hardware, resources=None)
        try:
            super().__init__(config, backend, source, service, max_queue, hardware, halt)
        except ValueError as error:
            if "wrong" not in config.parameters:
                raise
            raise BackendError(str(error)) from None  # what the configuration's own rules find, before
        self.shop.made(self, backend)

    def change_instances(self, config: Any, specs: Sequence[Any], halt: Any = None) -> Any:
        version = self.shop.version_of(self)
        self.shop.simulation.tell("engine", f"has {len(specs)} instances of {version.prefix}, not {version.count}")
        wait = super().change_instances(config, specs, halt)
        version.count = len(specs)
        return wait

    def close(self) -> None:
        super().close()
        self.shop.closed(self)


class WatchedTable(ModelTable):
    """Tells what requests find."""

    shop: Shop

    def set(self, name: str, lanes: Mapping[int, LaneHandle | None], *others: Any, **named: Any) -> None:
        super().set(name, lanes, *others, **named)
        self.shop.published(name, lanes.get(1))

    def remove(self, name: str) -> None:
        super().remove(name)
        self.shop.published(name, None)


class FallibleBridge(BridgeHandle):
    """While it delivers, memory may be refused."""

    shop: Shop

    def drain(self) -> None:
        world = self.shop.simulation.world
        before = world.may_fail(1)
        try:
            super().drain()
        finally:
            world.may_fail(before)

    def expire(self) -> None:
        world = self.shop.simulation.world
        before = world.may_fail(1)
        try:
            super().expire()
        finally:
            world.may_fail(before)


class ShopMaker(Maker):
    """Takes the configurations of the shop."""

    shop: Shop

    def prepare(
        self, folder: ModelFolder, override: Any, known: Mapping[int, VersionConfig], each: configuration.Each
    ) -> Prepared:
        return self.shop.prepare(folder)


class WatchedDemand(Demand):
    """Tells which loads have failed."""

    shop: Shop

    def _missed(self, name: str, by_model: bool, asked_by: str) -> str:
        # memory is not refused to the load, which a handler may have asked for to which it may be
        return Context().run(super()._missed, name, by_model, asked_by)

    def _note_failure(self, name: str, error: ServerError) -> None:
        self.shop.failed(name)
        super()._note_failure(name, error)


class Loader:
    """Stands for the loader of backends, which nobody asks for any."""

    def serve(self, services: Any) -> None:
        """See `inferd.backends.loader.BackendLoader`."""


class WatchedEngine(Engine):
    """Tells when versions end."""

    shop: Shop

    async def _end(self, version: LoadedVersion) -> None:
        self.shop.ends(version)
        await super()._end(version)
        self.shop.ended(version)


WATCHED = (WatchedVersion, WatchedTable, FallibleBridge, ShopMaker, WatchedDemand, WatchedEngine)


def forget_shop() -> None:
    """All is over: the classes of the engine keep nothing of it."""
    for each in WATCHED:
        del each.shop


def outline_of(folder: ModelFolder, _: configuration.Options) -> Outline:
    """What the text of a model's configuration would say of its steps."""
    return Outline(folder.versions, frozenset(step.model for step in KINDS[folder.name].steps))


def make_engine(simulation: Simulation, *, max_inflight: int | None, ttl: float, resources: Any) -> Engine:
    """The engine of a simulation, with its repository."""
    for each in WATCHED:
        each.shop = simulation.shop
    inferd.server.engine.loading.candidates.LoadedVersion = WatchedVersion  # type: ignore[misc]
    inferd.server.engine.models.registry.ModelTable = WatchedTable  # type: ignore[misc]
    inferd.server.engine.housekeeping.deliveries.BridgeHandle = FallibleBridge  # type: ignore[misc]
    configuration.outline = outline_of  # type: ignore[assignment]
    inferd.server.engine.engine.Maker = ShopMaker  # type: ignore[misc]
    inferd.server.engine.engine.Demand = WatchedDemand  # type: ignore[misc]
    inferd.server.engine.engine.remove_left_folders = lambda: None  # type: ignore[assignment]
    return WatchedEngine(
        [simulation.shelf],
        Loader(),  # type: ignore[arg-type]
        configuration.Options(),
        load_threads=simulation.random.choice((1, 2, 4)),
        max_inflight=max_inflight,
        cache=simulation.remote.cache(CACHE, ttl),
        hardware=Hardware(resources=resources, gpus=simulation.graphics.gpus),
        control=simulation.operator.control,
    )


class Operator:
    """What the operator does while requests go on.

    Attributes:
        control: who loads models, and when.
        is_stopping: the server has been told to end.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._random = Random(f"{simulation.outcome.seed} operator")
        self._deeds = 0
        self._under_way = 0
        self.is_stopping = False
        self._unloaded_ns: dict[str, int] = {}  # when a model was unloaded last
        self._outdated: set[str] = set()  # models whose last load has failed
        scale = simulation.scale
        mode = ControlMode.EXPLICIT
        if simulation.demand.on:
            mode = ControlMode.LAZY
        elif simulation.has("polling", 0.12, when=scale.operator):
            mode = ControlMode.POLL
        names = tuple(sorted(simulation.kinds))
        if mode is ControlMode.LAZY:
            names = tuple(name for name in names if self._random.random() < 0.5)
        budget = self._random.choice((None, None, 8000)) if mode is ControlMode.LAZY and scale.operator else None
        self.control = ModelControl(mode, names, poll_seconds=self._random.choice((0.005, 0.1, 1.0)), budget=budget)
        self._is_moody = scale.operator and self._random.random() < 0.3

    @property
    def polls(self) -> bool:
        """Whether the server looks by itself what there is."""
        return self.control.mode is ControlMode.POLL

    def open(self) -> None:
        """The repository has all models before the server starts."""
        simulation = self._simulation
        for kind in simulation.kinds.values():
            simulation.shelf.lay(kind)

    def begin(self) -> None:
        """Models have been loaded; some loads fail from now on."""
        if self._is_moody:
            self._simulation.shelf.moody = self._simulation.shop.moody = self._random.choice((0.05, 0.2))
        if self._simulation.scale.operator:
            self._simulation.later(self._random.choice((1, 10)) * MS, self._act)

    def _act(self) -> None:
        """The next deed."""
        simulation, random = self._simulation, self._random
        scale = simulation.scale
        most = DEEDS * max(1, scale.calls // type(scale).calls) + scale.crowd // OF_CROWD
        if not simulation.is_asked() or self._deeds >= most:
            return
        simulation.rights.change()
        simulation.reports.change()
        if simulation.disturbs and random.random() < DISTURBS:
            simulation.tell("operator", simulation.graphics.disturb())
        if simulation.has_lodgers:
            for _ in range(random.choice((1, 3, 10))):
                simulation.tell("lodger", simulation.lodgers.act())
            simulation.registrar.act()
        simulation.library.visit()
        simulation.trials.make()
        simulation.devices.act()
        self._deed(random.choice(sorted(simulation.kinds)))
        simulation.later(random.choice((200 * US, 2 * MS, 20 * MS)), self._act)

    def _deed(self, name: str) -> None:
        simulation = self._simulation
        deed = self._random.random()
        if name in simulation.shop.taken:
            self._bring_back(name)
        elif name not in simulation.shop.versions or deed < (0.3 if simulation.demand.on else 0.6):
            self._change(name, files=deed < 0.9)
        elif deed < 0.7 and (simulation.demand.on or not self._is_step(name)):
            self._unload(name)
            # clients would only be told that it is not there
            simulation.later(self._random.choice((MS, 5 * MS, 50 * MS)), lambda: self._bring_back(name))
        elif deed < 0.75 and not (self.polls or simulation.demand.on or self._is_moody):
            self._err(name)
        elif deed < 0.85:
            self._change(name, files=False)
        else:
            simulation.look(name)

    def _change(self, name: str, *, files: bool) -> None:
        """Other files, or another configuration; and have the server know."""
        simulation = self._simulation
        simulation.shelf.lay(simulation.kinds[name], files=files)
        what = f"files {simulation.shelf.generation_of(name)}" if files else "another configuration"
        simulation.tell("operator", f"has {what} of '{name}'")
        if self.polls:
            self._deeds += 1
        else:
            self._ask(name, simulation.engine.load(name), "load")

    def _err(self, name: str) -> None:
        """Have the server load what cannot be served, and then go back to what can."""
        simulation = self._simulation
        if simulation.kinds[name].steps or self._is_step(name):
            return  # the engine's own rules find what does not fit together, before
        simulation.tell("operator", f"has a wrong configuration of '{name}'")
        self._ask(name, self._blunder(name, simulation.shelf.spoil(name)), "wrong load")

    async def _blunder(self, name: str, box: Box) -> None:
        shop, shelf = self._simulation.shop, self._simulation.shelf
        try:
            await self._simulation.engine.load(name)
        except ServerError as error:
            said = shop.blunders.get(box.key)
            if said is None or said not in str(error):
                raise
            self._simulation.tell("operator", f"hears of '{name}': {error}")
        else:
            if box.key in shop.blunders and shelf.lies(box) and not self._simulation.is_faulty:
                raise Violation(f"'{name}' loads, where this was to be said: {shop.blunders[box.key]}")
        finally:
            shelf.mend(box)

    def _unload(self, name: str) -> None:
        simulation = self._simulation
        simulation.tell("operator", f"unloads '{name}'")
        if self.polls:
            self._deeds += 1
            simulation.shelf.take(name)
        else:
            self._unloaded_ns[name] = 1 << 62  # that takes its time
            self._ask(name, simulation.engine.unload(name), "unload")

    def _bring_back(self, name: str) -> None:
        simulation = self._simulation
        if self.is_stopping:
            return
        if name in simulation.shop.taken:
            simulation.tell("operator", f"brings '{name}' back")
            simulation.shelf.bring(name)
        elif name not in simulation.shop.versions and not self.polls:
            self._ask(name, simulation.engine.load(name), "load")

    def _ask(self, name: str, work: Any, what: str) -> None:
        self._deeds += 1
        self._under_way += 1
        task = simulation_task(self._simulation, self._asked(name, work, what))
        task.add_done_callback(lambda _: self._over(task))

    def _over(self, task: asyncio.Task[None]) -> None:
        self._under_way -= 1
        if (error := task.exception()) is not None:
            self._simulation.shop.problem = self._simulation.shop.problem or str(error)

    async def _asked(self, name: str, work: Any, what: str) -> None:
        """Have the server do it, which may refuse only with a reason."""
        began_ns = self._simulation.world.now()
        try:
            await work
            if what == "unload":
                self._unloaded_ns[name] = self._simulation.world.now()
            elif what == "load":
                self._outdated.discard(name)
        except ServerError as error:
            text = str(error)
            self._outdated.add(name)
            self._simulation.tell("operator", f"hears of the {what} of '{name}': {text}")
            is_moody = self._is_moody or self._simulation.graphics.is_moody
            lacks_step = LACKS_STEP in text and (is_moody or self._lacks(text, began_ns))
            known = (
                (self.is_stopping and any(stops in text for stops in STOPS))
                or HALTED in text
                or UNREACHABLE in text
                or BROKEN in text
                or any(said in text for said in self._simulation.shop.blunders.values())
            )
            known = known or self._simulation.graphics.explains(text, began_ns)
            known = known or (NO_ROOM in text and self._simulation.demand.lacks_room(STEPS[name]))
            if not (known or lacks_step or self._simulation.is_faulty):
                raise Violation(f"the {what} of '{name}': {text}") from error

    def _lacks(self, text: str, since_ns: int) -> bool:
        """Whether a model that an ensemble in this text needs is not there, or was unloaded since then."""
        needed: set[str] = set().union(*(STEPS[name] for name in re.findall(r"'([^']*)'", text) if name in STEPS))
        gone = {name for name in needed if name in self._unloaded_ns and name not in self._simulation.versions}
        return bool(gone) or self.has_unloaded(needed, since_ns)

    def has_unloaded(self, names: Set[str], since_ns: int) -> bool:
        """Whether one of these models was unloaded since then."""
        return any(self._unloaded_ns.get(name, 0) >= since_ns for name in names)

    def _is_step(self, name: str) -> bool:
        return any(step.model == name for kind in self._simulation.kinds.values() for step in kind.steps)

    # -- the end

    def stop(self, *, early: bool = False) -> None:
        """Stop the server as a signal does; `early`: while clients go on."""
        if self.is_stopping:
            return
        self.is_stopping = True
        self._simulation.shelf.moody = 0.0
        self._under_way += 1
        task = simulation_task(self._simulation, self._stop_early() if early else self._stop())
        task.add_done_callback(lambda _: self._over(task))

    async def _stop_early(self) -> None:
        engine, grace = self._simulation.engine, self._random.choice(EARLY)
        self._simulation.tell("operator", f"has the server end within {grace} s")
        engine.drain()
        await engine.finish_sequences(grace / 2)
        await self._simulation.stop_door(grace)
        await engine.close()

    async def _stop(self) -> None:
        engine = self._simulation.engine
        if self.polls:
            await asyncio.sleep(2 * self.control.poll_seconds + LAST)
        self._check_served()
        await self._simulation.settle()
        self._simulation.tell("operator", "has the server end")
        engine.drain()
        await engine.finish_sequences(LAST)
        await self._simulation.stop_door(LAST)
        await engine.close()

    def _check_served(self) -> None:
        """What is served lies in the repository so: nothing was changed that the server does not know.

        Raises:
            Violation: a version is of files that have been replaced.
        """
        simulation = self._simulation
        if self._is_moody or simulation.is_faulty or simulation.graphics.is_moody:
            return
        for name, version in simulation.versions.items():
            generation = simulation.shelf.generation_of(name)
            if name in self._outdated:
                continue  # a load has failed, perhaps by a wrong configuration, and the operator did not try again
            if not version.kind.steps and version.backend.generation != generation:
                raise Violation(
                    f"{version.prefix} is of files {version.backend.generation}, and there are {generation}"
                )

    @property
    def waits(self) -> int:
        """Deeds that are not done yet."""
        return self._under_way


def simulation_task(simulation: Simulation, work: Any) -> asyncio.Task[None]:
    """A task of the loop, for what memory is not refused to."""
    task: asyncio.Task[None] = simulation.desk.loop.create_task(work)
    return task
