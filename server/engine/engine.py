"""The engine: models from repositories, brought to readiness and served until it is closed.

It lives on one event loop. Loading and unloading run on threads; requests are native (`_native.infer`) and come back to
the loop over the bridge.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from _native.bridge import BridgeHandle
from _native.infer import InferService, Ticket
from _native.table import ModelTable
from backends.api import BackendError, ModelSource
from backends.loader import BackendLoader
from server.caching import CacheConfig, LocalCache, RedisCache
from server.engine import config as configuration
from server.engine.fingerprint import fingerprint
from server.engine.instances import Placement
from server.engine.redis_store import RedisStore
from server.engine.refusals import RefusalLog
from server.engine.repository import ModelFolder, scan
from server.engine.services import EngineServices
from server.engine.shared_memory import SharedMemory, SharedMemoryPolicy
from server.engine.version import LoadedVersion
from server.engine.warmup import warm_up_ensemble
from server.errors import ConfigError, Internal, InvalidArgument, NotFound, ServerError, Status, Unavailable
from server.pb import model_config_pb2

log = logging.getLogger("inferd.engine")

Deliver = Callable[[int, str, bytes | None], None]
Watcher = Callable[[str, int | None, bool], None]

READY = "READY"
LOADING = "LOADING"
UNLOADING = "UNLOADING"
UNAVAILABLE = "UNAVAILABLE"

_FAMILIES: dict[Status, type[ServerError]] = {
    family.status: family for family in (InvalidArgument, NotFound, Unavailable, Internal)
}


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One line of the repository index; version and state are empty for a model that was never loaded."""

    name: str
    version: str
    state: str
    reason: str


@dataclass(slots=True)
class _Version:
    state: str
    reason: str = ""
    loaded: LoadedVersion | None = None
    fingerprint: bytes = b""  # where answers are kept under it


@dataclass(slots=True)
class _Model:
    versions: dict[int, _Version] = field(default_factory=dict)
    prepared: configuration.Prepared | None = None
    problem: str = ""  # why no version could even be named


class Engine:
    """Serves the models of `repositories`.

    Args:
        repositories: folders of model folders.
        loader: finds backends.
        options: how configurations are read.
        load_threads: models loaded at a time.
        strict_readiness: be ready only while every model is.
        max_inflight: requests that may be in the house; 0 for any number.
        max_queued: requests that may wait for one version of a model; 0 for any number.
        shared_memory: what clients may do with shared memory.
        cache: where answers of models with response_cache are kept.
        placement: where instances run and what limits them.
    """

    def __init__(
        self,
        repositories: Sequence[Path],
        loader: BackendLoader,
        options: configuration.Options,
        *,
        load_threads: int = 4,
        strict_readiness: bool = True,
        max_inflight: int = 0,
        max_queued: int = 0,
        shared_memory: SharedMemoryPolicy | None = None,
        cache: CacheConfig = None,
        placement: Placement | None = None,
    ) -> None:
        self._repositories = tuple(repositories)
        self._loader = loader
        self._options = options
        self._strict = strict_readiness
        self._max_queued = max_queued
        self._placement = placement or Placement()
        self.gpus = self._placement.gpus
        self._models: dict[str, _Model] = {}
        self._watchers: list[Watcher] = []
        self._after_delivery: list[Callable[[], None]] = []
        self._table = ModelTable()
        self._bridge = BridgeHandle()
        self._pool = ThreadPoolExecutor(load_threads, thread_name_prefix="load")
        self._refusals = RefusalLog()
        self._leaving: list[tuple[LoadedVersion, asyncio.Future[None]]] = []  # closed, with answers on their way
        self._started = False
        self._closing = False
        self.shared_memory = SharedMemory(shared_memory, self.gpus)
        self.infer = InferService(self._table, self._bridge, max_inflight=max_inflight)
        self._has_cache = cache is not None
        if isinstance(cache, LocalCache):
            self.infer.keep_answers(cache.size, ttl=cache.ttl)
        self._store = RedisStore(cache, self._identity) if isinstance(cache, RedisCache) else None
        if self._store is not None:
            self.infer.keep_answers_in(self._store)
        self.shared_memory.serve(self.infer)

    # -- life --

    async def start(self) -> list[str]:
        """Load every model of the repositories; what went wrong, one line for each model that is not ready."""
        loop = asyncio.get_running_loop()
        self._loader.serve(EngineServices(self))
        loop.add_reader(self._bridge.event_fd, self._on_finished)
        loop.add_reader(self._bridge.timer_fd, self._on_timer)
        if self._store is not None:
            await self._store.start()
        folders = await loop.run_in_executor(self._pool, scan, self._repositories)
        problems = await self._load_all(folders)
        self._started = True
        self._announce("", None, self.ready)
        return [problem for problem in problems if problem]

    async def close(self) -> None:
        """Unload everything. Requests that are queued are executed first; the loop must still run."""
        self._closing = True
        for names in reversed(self._layers()):  # ensembles before the models of their steps
            await asyncio.gather(*map(self._unload, names))
        if self._store is not None:
            await self._store.close()
        self._on_finished()  # the refused refer to no version, so nobody has waited for them
        self.shared_memory.close()
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._bridge.event_fd)
        loop.remove_reader(self._bridge.timer_fd)
        self._pool.shutdown()

    def drain(self) -> None:
        """Be not ready any more, for good; requests are still served."""
        self._closing = True
        self._announce("", None, False)

    def after_delivery(self, callback: Callable[[], None]) -> None:
        """Have `callback` called after each round of answers, for a front door that writes them then."""
        self._after_delivery.append(callback)

    def _on_finished(self) -> None:
        self._bridge.drain()
        for callback in self._after_delivery:
            callback()
        refusals, more = self._bridge.take_refusals()
        if refusals:
            self._refusals.add(refusals, more)
        if self._leaving:
            self._release_leaving()

    def _release_leaving(self) -> None:
        gone = [(version, last) for version, last in self._leaving if not version.lane.in_flight]
        self._leaving = [each for each in self._leaving if each not in gone]
        for _, last in gone:
            if not last.done():
                last.set_result(None)

    def _on_timer(self) -> None:
        self._bridge.expire()
        for callback in self._after_delivery:
            callback()

    # -- loading --

    async def _load_all(self, folders: Sequence[ModelFolder]) -> list[str]:
        """Load these models, each ensemble behind the models of its steps; what went wrong, one line for each."""
        await asyncio.gather(*map(self._prepare, folders))
        prepared = {name: model.prepared for name, model in self._models.items()}
        composed = await asyncio.get_running_loop().run_in_executor(self._pool, configuration.compose, prepared)
        for name, found in composed.items():
            if isinstance(found, configuration.Prepared):
                self._models[name].prepared = found
            else:
                self._refuse(name, str(found))
        loading: dict[str, asyncio.Task[str]] = {}
        for folder in folders:
            loading[folder.name] = asyncio.create_task(self._load(folder, loading))
        return [problem for problem in await asyncio.gather(*loading.values()) if problem]

    async def _prepare(self, folder: ModelFolder) -> None:
        """Read a model's configuration, or note why it cannot be served."""
        model = self._models.setdefault(folder.name, _Model())
        try:
            model.prepared = await asyncio.get_running_loop().run_in_executor(
                self._pool, configuration.prepare, folder, self._options, self._loader
            )
        except (ServerError, BackendError) as error:
            self._refuse(folder.name, str(error))
        except Exception as error:
            log.exception("model %s could not be prepared", folder.name)
            self._refuse(folder.name, f"{type(error).__name__}: {error}")

    def _refuse(self, name: str, problem: str) -> None:
        self._models[name].problem = problem
        self._models[name].prepared = None
        self._table.set(name, {})
        log.error("failed to load '%s': %s", name, problem)

    async def _load(self, folder: ModelFolder, loading: Mapping[str, asyncio.Task[str]]) -> str:
        """Load one model; returns why it is not ready, "" when it is."""
        name = folder.name
        model = self._models[name]
        prepared = model.prepared
        if prepared is None:
            return f"failed to load '{name}': {model.problem}"
        for step in sorted(configuration.models_of(prepared.spec)):
            if problem := await asyncio.shield(loading[step]):
                text = (
                    f"ensemble '{name}' depends on '{step}' which has no loaded version. Model '{step}' loading failed"
                )
                self._refuse(name, f"{text} with error: {problem}")
                return f"failed to load '{name}': {model.problem}"
        if prepared.spec.caches and not self._has_cache:
            log.warning("model '%s' has response_cache enabled, but there is no --cache-config", name)
        for version in prepared.versions:
            model.versions[version] = _Version(LOADING)
        results = await asyncio.gather(*(self._load_version(folder, prepared, v) for v in prepared.versions))
        return next((problem for problem in results if problem), "")

    async def _load_version(self, folder: ModelFolder, prepared: configuration.Prepared, version: int) -> str:
        loop = asyncio.get_running_loop()
        entry = self._models[folder.name].versions[version]
        source = ModelSource(
            prepared.spec, version, folder.version_path(version), configuration.config_to_json(prepared.config)
        )
        begin = time.monotonic()
        if self._store is not None and folder.name in self._kept_elsewhere():
            entry.fingerprint = await loop.run_in_executor(self._pool, fingerprint, source.path, source.config_json)
        try:
            backend = None if prepared.spec.ensemble else self._loader.backend(prepared.spec.backend)
            entry.loaded = await loop.run_in_executor(
                self._pool,
                LoadedVersion,
                prepared.config,
                backend,
                source,
                self.infer,
                self._max_queued,
                self._placement,
            )
            if prepared.spec.ensemble:
                await warm_up_ensemble(self.infer, entry.loaded.lane, prepared.spec)
        except Exception as error:
            if not isinstance(error, (BackendError, ServerError)):
                log.exception("model %s version %d did not load", folder.name, version)
            await self._close_failed(entry)
            entry.state, entry.reason = UNAVAILABLE, str(error) or type(error).__name__
            self._publish(folder.name)
            log.error("failed to load '%s' version %d: %s", folder.name, version, entry.reason)
            return f"failed to load '{folder.name}' version {version}: {entry.reason}"
        entry.state = READY
        entry.loaded.watch(partial(loop.call_soon_threadsafe, self._on_instances, folder.name, version))
        self._publish(folder.name)
        log.info("successfully loaded '%s' version %d in %.2f s", folder.name, version, time.monotonic() - begin)
        self._announce(folder.name, version, True)
        return ""

    async def _close_failed(self, entry: _Version) -> None:
        """Close a version that was made, but did not get warm."""
        loaded, entry.loaded = entry.loaded, None
        if loaded is not None:
            await asyncio.get_running_loop().run_in_executor(self._pool, loaded.close)

    def _layers(self) -> list[list[str]]:
        """All models, each ensemble in a later list than the models of its steps."""
        depth: dict[str, int] = {}

        def depth_of(name: str) -> int:
            if name not in depth:
                model = self._models.get(name)
                steps = configuration.models_of(model.prepared.spec) if model and model.prepared else ()
                depth[name] = 1 + max(map(depth_of, steps), default=-1)
            return depth[name]

        layers: list[list[str]] = []
        for name in self._models:
            while len(layers) <= depth_of(name):
                layers.append([])
            layers[depth_of(name)].append(name)
        return layers

    async def _unload(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        for version, entry in self._models[name].versions.items():
            loaded, entry.loaded = entry.loaded, None
            if loaded is None:
                continue
            entry.state, entry.reason = UNLOADING, ""
            self._publish(name)
            if self._store is not None:
                self._store.release(name)
            await loop.run_in_executor(self._pool, loaded.close)
            await self._delivered(loaded)
            self.infer.forget(loaded.lane)
            entry.state, entry.reason = UNAVAILABLE, "unloaded"
            self._announce(name, version, False)

    async def _delivered(self, version: LoadedVersion) -> None:
        """Return when the last answer of a closed version has reached its sink."""
        if version.lane.in_flight:
            last: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._leaving.append((version, last))
            await last

    def _publish(self, name: str) -> None:
        versions = self._models[name].versions
        self._table.set(name, {v: entry.loaded.lane if entry.loaded else None for v, entry in versions.items()})
        for ensemble in self._ensembles_of(name):
            self.infer.forget(ensemble.lane)  # another version may answer now

    def _on_instances(self, name: str, version: int) -> None:
        """An instance has become ready or stopped to be so."""
        entry = self._models[name].versions.get(version)
        if entry is not None and entry.loaded is not None and entry.state == READY:
            self._announce(name, version, entry.loaded.ready)
            self._announce("", None, self.ready)

    def _announce(self, name: str, version: int | None, ready: bool) -> None:
        for watcher in self._watchers:
            watcher(name, version, ready)
        for ensemble in self._ensembles_of(name):
            self._announce(ensemble.name, ensemble.version, self._serves(ensemble))

    def _ensembles_of(self, name: str) -> list[LoadedVersion]:
        """The loaded ensembles with a step of this model."""
        loaded = [entry.loaded for model in self._models.values() for entry in model.versions.values()]
        return [each for each in loaded if each is not None and name in configuration.models_of(each.spec)]

    def _serves(self, loaded: LoadedVersion) -> bool:
        try:
            self.model(loaded.name, str(loaded.version))
        except ServerError:
            return False
        return True

    async def scale(self, name: str, counts: Mapping[str, int]) -> None:
        """Have so many instances of these instance groups, in every ready version of the model, while it serves.

        New instances are made before others end; an instance that ends finishes its batch.

        Args:
            name: of the model.
            counts: instances of each group that is to change, by the group's name as ModelConfig shows it.

        Raises:
            NotFound, Unavailable: as for a request for the model.
            ConfigError: there is no such group, or the number is not served.
            BackendError: an instance cannot be made, or the model's scheduler ties requests to instances.
        """
        self.model(name)
        loop = asyncio.get_running_loop()
        for loaded in self.versions(name):
            config = model_config_pb2.ModelConfig()
            config.CopyFrom(loaded.config)
            groups = {group.name: group for group in config.instance_group}
            for group, count in counts.items():
                if group not in groups or count < 1:
                    known = ", ".join(groups) or "none"
                    raise ConfigError(
                        f"expected at least 1 instance of a group of model '{name}', which has {known}, got {count} of "
                        f"'{group}'"
                    )
                groups[group].count = count
            configuration.validate_instances(config)
            specs = configuration.instance_specs(config)
            await loop.run_in_executor(self._pool, loaded.change_instances, config, specs)
            log.info("'%s' version %d has %d instances", name, loaded.version, len(specs))

    def _kept_elsewhere(self) -> set[str]:
        """The models on whose files answers in a store depend: those with a cache, and what their steps use."""
        found: set[str] = set()
        todo = [name for name, model in self._models.items() if model.prepared and model.prepared.spec.caches]
        while todo:
            name = todo.pop()
            model = self._models.get(name)
            if name not in found and model is not None and model.prepared is not None:
                found.add(name)
                todo.extend(configuration.models_of(model.prepared.spec))
        return found

    def _identity(self, name: str, version: int) -> bytes | None:
        """What a version's answers depend on: its fingerprint, and those of the models of its steps."""
        entry = self._models[name].versions.get(version)
        if entry is None or entry.loaded is None or not entry.fingerprint:
            return None
        ensemble = entry.loaded.spec.ensemble
        if ensemble is None:
            return entry.fingerprint
        steps = [
            self._identity(step.model, ready[-1].version if step.version < 0 else step.version)
            for step in ensemble.steps
            if (ready := self.versions(step.model))
        ]
        if len(steps) < len(ensemble.steps) or None in steps:
            return None
        return hashlib.sha256(b"".join([entry.fingerprint, *filter(None, steps)])).digest()

    # -- what there is --

    @property
    def live(self) -> bool:
        """The engine answers."""
        return True

    @property
    def ready(self) -> bool:
        """Requests are welcome: everything has been loaded and nothing is about to end."""
        if not self._started or self._closing:
            return False
        return not self._strict or all(self._is_ready(model) for model in self._models.values())

    @staticmethod
    def _is_ready(model: _Model) -> bool:
        return not model.problem and all(
            entry.state == READY and entry.loaded is not None and entry.loaded.ready
            for entry in model.versions.values()
        )

    async def check(self) -> bool:
        """`ready`, and every model that can tell says so of itself, where readiness is strict."""
        if not self.ready or not self._strict:
            return self.ready
        loaded = [version for name in self._models for version in self.versions(name)]
        return all(await asyncio.gather(*(version.check() for version in loaded)))

    def subscribe(self, watcher: Watcher) -> None:
        """Have `watcher(name, version, ready)` called on the loop at each change; the name is "" for the server."""
        self._watchers.append(watcher)

    def model(self, name: str, version: str = "") -> LoadedVersion:
        """A ready version: the one asked for, or the latest.

        Raises:
            NotFound, Unavailable, InvalidArgument: with the texts that a request for it would get.
        """
        status, text = self._table.find(name, version)
        if status != Status.OK:
            raise _FAMILIES[Status(status)](text)
        ready = self.versions(name)
        found = ready[-1] if version in ("", "-1") else next(v for v in ready if v.version == int(version))
        for step in found.spec.ensemble.steps if found.spec.ensemble else ():
            try:
                self.model(step.model, str(step.version))
            except ServerError as error:
                raise Unavailable(f"in ensemble '{name}', {error}") from error
        return found

    def versions(self, name: str) -> tuple[LoadedVersion, ...]:
        """The ready versions of a model, ascending; empty when there is none or no such model."""
        model = self._models.get(name, _Model())
        return tuple(entry.loaded for _, entry in sorted(model.versions.items()) if entry.loaded is not None)

    def index(self) -> list[IndexEntry]:
        """All models and versions that the repositories hold, with their states."""
        entries = []
        for name, model in sorted(self._models.items()):
            if not model.versions:
                entries.append(IndexEntry(name, "", UNAVAILABLE, model.problem))
            for version, entry in sorted(model.versions.items()):
                entries.append(IndexEntry(name, str(version), entry.state, entry.reason))
        return entries

    # -- requests --

    def submit(
        self,
        message: bytes,
        deliver: Deliver,
        *,
        timeout_ns: int = -1,
        stream: bool = False,
        stream_number: int = 0,
        caller: int = 0,
        user: int = -1,
    ) -> Ticket:
        """Decode, check and queue one encoded ModelInferRequest; see `_native.infer.InferService.submit`."""
        return self.infer.submit(
            message,
            deliver,
            timeout_ns=timeout_ns,
            stream=stream,
            stream_number=stream_number,
            caller=caller,
            user=user,
        )

    def stream_ended(self, number: int) -> None:
        """A stream has ended, and with it the sequences that are tied to it."""
        for model in self._models.values():
            for entry in model.versions.values():
                if entry.loaded is not None:
                    entry.loaded.stream_ended(number)
