"""The engine: loads models from repositories, and serves them until it is closed.

It belongs to one event loop. Loads and unloads run on threads. Requests are native (`inferd._native.service.infer`) and
return to the loop over the bridge.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path

from inferd._native.memory.resource import host
from inferd._native.scheduling.report import encode_statistics
from inferd._native.service.infer import InferService
from inferd.backends.loader import BackendLoader
from inferd.backends.temporary import remove_left_folders
from inferd.server.caching import CacheConfig, LocalCache, RedisCache
from inferd.server.engine import config as configuration
from inferd.server.engine.caching.redis_store import RedisStore
from inferd.server.engine.housekeeping.collecting import bring_back, collect_if_left, rarely
from inferd.server.engine.housekeeping.deliveries import Deliveries
from inferd.server.engine.housekeeping.threads import on_thread, slices
from inferd.server.engine.instances.instances import Hardware
from inferd.server.engine.instances.shared_memory import SharedMemory, SharedMemoryPolicy
from inferd.server.engine.loading.candidates import Failure, Maker
from inferd.server.engine.loading.control import ControlMode, ModelControl, Poller
from inferd.server.engine.loading.demand import Demand
from inferd.server.engine.loading.lifecycle import Allowed, Lifecycle, anything
from inferd.server.engine.loading.overrides import NOTHING, read_override
from inferd.server.engine.models import overview
from inferd.server.engine.models.measures import Measures
from inferd.server.engine.models.registry import UNLOADED, IndexEntry, Models, Watcher
from inferd.server.engine.models.services import EngineServices
from inferd.server.engine.models.version import LoadedVersion
from inferd.server.engine.repository.folders import AMBIGUOUS, ModelFolder, check_name
from inferd.server.engine.repository.sources import Repositories, RepositorySource
from inferd.server.errors import Unavailable
from inferd.server.settings import DEFAULTS

log = logging.getLogger("inferd.engine")

LOAD_PATIENCE = 30.0
"""Seconds for which a load on demand waits for a place while no load gets one: a running load may wait for this one."""
LEFT_AFTER = 5.0
"""Seconds after the end of a version in which its objects must be freed; else the garbage collector runs."""
LARGE = 1 << 12
"""A thread reads the configuration of a load request with more characters: it takes a microsecond for each and more."""
ON_DEMAND = "not loaded: the next request for it loads it"

Deliver = Callable[[int, str, bytes | None], None]


class Engine:
    """Serves the models of `repositories`.

    Args:
        repositories: the sources of models; paths are folders of model folders.
        loader: finds backends.
        options: how configurations are read.
        load_threads: models loaded at a time.
        strict_readiness: be ready only while every model is.
        max_inflight: requests that may be in the server; None: any number.
        max_queued: requests that may wait for one version of a model; 0 for any number.
        shared_memory: the policy for shared memory of clients.
        cache: keeps the responses of models with response_cache.
        hardware: the devices and limits of instances.
        control: decides when models are loaded and unloaded.
        load_retries: how many times the load of a version is repeated after it failed.
    """

    def __init__(
        self,
        repositories: Iterable[RepositorySource | Path],
        loader: BackendLoader,
        options: configuration.Options,
        *,
        load_threads: int = DEFAULTS.model_load_thread_count,
        strict_readiness: bool = DEFAULTS.strict_readiness,
        max_inflight: int | None = None,
        max_queued: int = 0,
        shared_memory: SharedMemoryPolicy | None = None,
        cache: CacheConfig = None,
        hardware: Hardware | None = None,
        control: ModelControl | None = None,
        load_retries: int = DEFAULTS.model_load_retry_count,
    ) -> None:
        self._repositories = Repositories(repositories)
        self._loader = loader
        self._options = options
        self._strict = strict_readiness
        self._control = control or ModelControl()
        hardware = hardware or Hardware()
        self.gpus = hardware.gpus
        self._models = Models(lambda: self.ready, lambda lane: self.infer.forget(lane))
        self._deliveries = Deliveries()
        self._started = False
        self._closing = False
        self.measures = Measures()  # metrics that models make
        self.shared_memory = SharedMemory(shared_memory, self.gpus)
        self.infer = InferService(self._models.table, self._deliveries.bridge, max_inflight=max_inflight)
        self.infer.on_stream_over = self.stream_ended
        if isinstance(cache, LocalCache):
            self.infer.keep_responses(cache.size, ttl=cache.ttl, entry=cache.entry, compare=cache.compare)
        self._store = RedisStore(cache, self._models.identity) if isinstance(cache, RedisCache) else None
        if self._store is not None:
            self.infer.keep_responses_in(self._store)
        self.shared_memory.serve(self.infer)
        maker = Maker(
            loader,
            options,
            self.infer,
            max_queued=max_queued,
            hardware=hardware,
            cache=cache,
            retries=load_retries,
        )
        self._lifecycle = Lifecycle(
            self._repositories,
            self._models,
            maker,
            self._drained,
            self._end,
            threads=load_threads,
            patience=LOAD_PATIENCE if self._control.mode is ControlMode.LAZY else math.inf,
        )
        self._poller: Poller | None = None
        self._demand: Demand | None = None
        self.on_demand: tuple[str, ...] = ()  # models found at the start that are loaded on demand
        self.problems: Mapping[str, str] = {}  # why models were not loaded at the start, by model

    # -- life --

    async def start(self, on_loaded: Callable[[], None] = lambda: None) -> list[str]:
        """Load the models of the start; return the errors, one line for each model that is not ready.

        Args:
            on_loaded: called when the models are loaded, before the server is ready.
        """
        self._loader.serve(EngineServices(self, self.measures, self.infer.entrance))
        self._deliveries.begin()
        if self._store is not None:
            await self._store.start()
        await on_thread(remove_left_folders)
        if self._control.mode is ControlMode.POLL:
            self._poller = Poller(self._repositories, self._lifecycle, self._control.poll_seconds)
            await self._poller.remember()  # before the scan: the next look finds later changes
        folders = await on_thread(self._repositories.scan)
        self._tell_emptiness(folders)
        wanted = self._control.at_start([folder.name for folder in folders])
        if self._control.mode is ControlMode.LAZY:
            self._models.require(wanted)
            self.on_demand = tuple(folder.name for folder in folders if folder.name not in wanted)
            self._demand = Demand(
                self._repositories,
                self._models,
                self._lifecycle,
                self.infer,
                self._options,
                budget=self._control.budget,
                pinned=wanted,
            )
        with rarely():
            failures = await self._lifecycle.load(wanted, listed={folder.name: folder for folder in folders})
        self.problems = {name: self._explained(failure, folders) for name, failure in sorted(failures.items())}
        if self._poller is not None:
            self._poller.start(failures)
        on_loaded()
        self._started = True
        self._models.announce("", None, self.ready)
        return list(self.problems.values())

    def _tell_emptiness(self, folders: Sequence[ModelFolder]) -> None:
        if not folders and self._control.mode in (ControlMode.NONE, ControlMode.POLL):
            log.warning(
                "there is no model in %s: a model is a folder with a config.pbtxt or a version folder, such as 1",
                self._repositories,
            )

    def _explained(self, failure: Failure, folders: Sequence[ModelFolder]) -> str:
        """A failure in one line. Logs a model that was not found; other failures were logged before."""
        if not failure.is_missing:
            return str(failure)
        known = {folder.name: folder.problem for folder in folders}
        text = known.get(failure.name) or (
            f"it is in no repository: {self._repositories} has {', '.join(known) or 'no model'}"
        )
        text = f"{failure}: {text}"
        log.error("%s", text)
        return text

    def progress(self) -> str:
        """The loaded models and the running loads, in one line."""
        return overview.progress(self._models)

    def table(self) -> list[str]:
        """A table with a line for each version."""
        return overview.table(self._models)

    def memory_usage(self) -> dict[str, dict[str, int]]:
        """The memory for tensors, as `Memory.usage` says: "host", and of GPUs in use "gpu 0" and "page-locked 0"."""
        return {"host": host().usage(), **self.gpus.usage()}

    async def close(self) -> None:
        """Unload everything, after queued requests were executed. The loop must still run."""
        self._closing = True
        if self._poller is not None:
            await self._poller.close()
        if self._demand is not None:
            await self._demand.close()
        with rarely():
            await self._lifecycle.close()
        if self._store is not None:
            await self._store.close()
        self._deliveries.deliver()  # logs refused requests, for which no version's end waits
        await asyncio.to_thread(self.shared_memory.close)
        await asyncio.to_thread(self._repositories.close)
        self._deliveries.end()
        bring_back()

    def drain(self) -> None:
        """Report not ready from now on; requests are still served."""
        self._closing = True
        self._models.announce("", None, False)

    async def finish_sequences(self, seconds: float) -> None:
        """Refuse new sequences; return when all live ones have ended, or after `seconds`.

        Requests are still served; loads and unloads are refused from now on.
        """
        self._lifecycle.stop()
        for loaded in self._models.with_sequences():
            loaded.drain()
        if self._poller is not None:
            await self._poller.close()
        live = [loaded for loaded in self._models.with_sequences() if loaded.sequences]
        if not live:
            return
        log.info("stopping: %d sequences have %g s to end", sum(loaded.sequences for loaded in live), seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for loaded in live:
                    await self._drained(loaded)

    def after_delivery(self, callback: Callable[[], None]) -> None:
        """Register `callback`, to be called after each round of responses, for a front door that then writes them."""
        self._deliveries.after_each(callback)

    async def _end(self, version: LoadedVersion) -> None:
        """Close a version that no new request finds; return when the last response has reached its sink."""
        if self._store is not None:
            self._store.release(version.name)
        await on_thread(version.close)
        await self._deliveries.until(lambda: not version.lane.in_flight)
        self.infer.forget(version.lane)
        asyncio.get_running_loop().call_later(LEFT_AFTER, collect_if_left, version.weak())

    async def _drained(self, version: LoadedVersion) -> None:
        """Return when the last sequence on a draining version has ended."""
        await self._deliveries.until(lambda: not version.sequences)

    # -- models come and go --

    async def load(
        self,
        name: str,
        config: str = "",
        files: Mapping[str, bytes] | None = None,
        *,
        asked_by: str = "",
        allowed: Allowed = anything,
    ) -> None:
        """Load a model, or reload it if its files have changed; an ensemble with the models of its steps.

        Args:
            name: of the model.
            config: a configuration as JSON text, instead of the one in the model's folder.
            files: contents by "file:<version>/<file>", instead of the model's folder; needs `config`.
            asked_by: the model that calls and waits; empty for a client.
            allowed: whether the caller may load a model of this name; checked for the models of steps, too.

        Raises:
            Unavailable: models are not loaded on demand, or the server is stopping.
            Denied: the caller may not load the model of an ensemble's step; the text does not name it.
            InvalidArgument: the name or the override is not well formed, or the model does not load.
            Exhausted: the server has no more descriptors, threads or memory, which the load needs, or the memory budget
                has no room for the model.
            Internal: the model is in no repository.
        """
        self._require_control(name)
        override = NOTHING
        if config or files:
            read = partial(read_override, name, config, files or {})
            override = await on_thread(read) if len(config) > LARGE else read()

        load = partial(self._lifecycle.load, (name,), override, asked_by=asked_by, allowed=allowed)
        if self._demand is None or self._lifecycle.is_loaded_with(name, asked_by):
            failures: Mapping[str, Failure] = await load()
        else:
            failures = await self._demand.load(
                name, load, asked_by=asked_by, allowed=allowed, is_override=override is not NOTHING
            )
        if failure := failures.get(name):
            raise failure.error

    async def unload(
        self, name: str, *, dependents: bool = False, asked_by: str = "", allowed: Allowed = anything
    ) -> None:
        """Unload a model: no new request finds it. Accepted requests finish in the background.

        Args:
            name: of the model; nothing happens if there is none.
            dependents: of an ensemble, also unload the models of its steps, after its last request, unless they were
                loaded by name or another ensemble has them.
            asked_by: the model that calls and waits; empty for a client.
            allowed: whether the caller may unload a model of this name; dependents that it may not unload stay.

        Raises:
            Unavailable: models are not unloaded on demand, or the server is stopping.
            InvalidArgument: the name is not well formed.
        """
        self._require_control(name)
        users = self._demand is not None  # a request loads them together again
        await self._lifecycle.unload(name, dependents=dependents, users=users, asked_by=asked_by, allowed=allowed)

    def _require_control(self, name: str) -> None:
        if self._control.mode not in (ControlMode.EXPLICIT, ControlMode.LAZY):
            raise Unavailable("explicit model load / unload is not allowed if polling is enabled")
        check_name(name)

    async def bring(self, name: str, *, asked_by: str = "") -> None:
        """Load a model on demand; return when it is served, or when no repository has it.

        Args:
            name: of the model.
            asked_by: the model that waits for the load, and may be loading itself: the two loads run side by side.

        Raises:
            Unavailable, Exhausted: the error that a request for the model would get.
        """
        if self._demand is not None:
            await self._demand.bring(name, asked_by=asked_by)

    def is_awaited(self, name: str) -> bool:
        """Whether a request would load this model, which is or was in a repository."""
        return self._demand is not None and not self._closing and self._demand.failure(name) is None

    async def is_on_demand(self, name: str) -> bool:
        """Whether the model is not loaded and a request would load it; False if no repository can tell now."""
        if self._demand is None or self._models.versions(name) or self._demand.failure(name):
            return False
        return await self._demand.has(name)

    # -- what there is --

    @property
    def live(self) -> bool:
        """The engine answers."""
        return True

    @property
    def ready(self) -> bool:
        """Whether the server wants requests: the start is over, and the server is not stopping."""
        if not self._started or self._closing:
            return False
        return not self._strict or self._models.are_ready

    async def check(self) -> bool:
        """Whether `ready`, and, with strict readiness, every model that checks its readiness reports ready."""
        if not self.ready or not self._strict:
            return self.ready
        return all(await asyncio.gather(*(version.check() for version in self._models.asked())))

    def subscribe(self, watcher: Watcher) -> None:
        """Call `watcher(name, version, ready)` on the loop at each change; the name is "" for the server."""
        self._models.subscribe(watcher)

    def model(self, name: str, version: str = "") -> LoadedVersion:
        """A ready version: the one asked for, or the latest.

        Raises:
            NotFound, Unavailable, InvalidArgument: with the texts that a request for it would get.
        """
        return self._models.find(name, version)

    def versions(self, name: str) -> tuple[LoadedVersion, ...]:
        """The ready versions of a model, ascending; empty when there is none or no such model."""
        return self._models.versions(name)

    def loaded(self) -> list[LoadedVersion]:
        """All versions that serve requests."""
        return list(self._models.every())

    @property
    def loads(self) -> int:
        """How many versions were loaded since the start."""
        return self._lifecycle.loaded

    @property
    def failed_loads(self) -> int:
        """How many loads of models failed since the start."""
        return self._lifecycle.failed

    def index(self) -> list[IndexEntry]:
        """All models that are or were loaded or failed to load, and their versions, with their states."""
        return self._models.index()

    @property
    def names(self) -> list[str]:
        """The names of the models in the index."""
        return sorted(self._models)

    async def repository_index(self) -> list[IndexEntry]:
        """`index`, and the models of the repositories that were never loaded."""
        known = [entry async for part in slices(self.names) for name in part for entry in self._models.index_of(name)]
        names = {entry.name for entry in known}
        but = names if self._demand is None else {name for name in names if self._models.versions(name)}
        folders = await on_thread(self._repositories.scan, but)
        repeated = {folder.name for folder in folders if folder.problem == AMBIGUOUS} & names
        if repeated:  # what serves goes on, and is not loaded again
            known = [
                each if each.name not in repeated or each.reason else each._replace(reason=AMBIGUOUS) for each in known
            ]
        others = [
            IndexEntry(folder.name, "", "UNAVAILABLE" if folder.problem == AMBIGUOUS else "", folder.problem)
            for folder in folders
            if folder.name not in names
        ]
        found = sorted((*known, *others), key=attrgetter("name")) if others else known
        if self._demand is None:
            return found
        there = but.union(folder.name for folder in folders)
        return [
            self._demanded(entry) if entry.name in there else entry async for part in slices(found) for entry in part
        ]

    async def statistics(self, versions: Iterable[LoadedVersion]) -> bytes:
        """The statistics of versions since their loads, as an encoded ModelStatisticsResponse."""
        parts = [encode_statistics([version.account() for version in part]) async for part in slices(versions)]
        return b"".join(parts)

    def _demanded(self, entry: IndexEntry) -> IndexEntry:
        """The entry where models are loaded on demand: a model that is not loaded yet is not missing."""
        assert self._demand is not None
        if error := self._demand.failure(entry.name):
            if entry.reason not in ("", UNLOADED):
                return entry
            return entry._replace(state="UNAVAILABLE", reason=str(error), needs=self._models.needs(entry.name))
        return entry._replace(reason=ON_DEMAND) if entry.reason in ("", UNLOADED) and entry.state != "READY" else entry

    # -- requests --

    def stream_ended(self, number: int) -> None:
        """End the sequences that are tied to a stream, which has ended."""
        for loaded in self._models.with_sequences():
            loaded.stream_ended(number)
