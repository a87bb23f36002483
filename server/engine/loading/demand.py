"""Loads models at their first request.

A request for a model that is not loaded waits in the server (`InferService.load_on_demand`) until the model is ready;
so does a step of an ensemble's request whose model was unloaded meanwhile. All requests that wait for a model share one
load. If it fails, all of them get the error, and so do requests in the next seconds; then a request tries again. An
unload lets a load with waiting requests end, and then unloads the model: a halted load would only start again.

With a budget, a load waits for room (`inferd.server.engine.loading.memory`): its cost is the size of the files of the
served versions, with those of the models of its steps. The least recently used models leave for it. The load reads the
files again. Where it finds more bytes, since one of them could not be read before or has changed, it begins again when
there is room for these.

Models are loaded concurrently, because one may ask for another while it is loaded or warmed up. A load waits only a
limited time for models that leave, because these may wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from copy import copy
from functools import partial
from typing import Any, Protocol, TypeVar

from inferd._native.service.infer import InferService
from inferd.server.engine import config as configuration
from inferd.server.engine.housekeeping.threads import on_thread
from inferd.server.engine.loading.candidates import Failure
from inferd.server.engine.loading.lifecycle import Allowed, Fits, Lifecycle, Outgrown, without_limit
from inferd.server.engine.loading.memory import Memory, NoRoomInTime, sizes_of
from inferd.server.engine.loading.model_locks import ModelLock
from inferd.server.engine.models.registry import Models
from inferd.server.engine.repository.sources import Repositories
from inferd.server.errors import ConfigError, NotFound, ServerError, Unavailable

log = logging.getLogger("inferd.engine")

T = TypeVar("T")


class Load(Protocol):
    """Loads a model, if `fits` says that there is room for it, and returns the failures."""

    def __call__(self, *, fits: Fits) -> Coroutine[Any, Any, Mapping[str, Failure]]: ...


RETRY_SECONDS = 5.0
"""Seconds after a failed load in which the model is not tried again."""
STOPPING = "the server is stopping: models are not loaded any more"
LOOKS = 16
"""The most look-ups in repositories at a time, each on a thread: clients may name any number of models."""


class Demand:
    """Loads models on demand. Used on the event loop only.

    Args:
        repositories: where models come from.
        models: the registry.
        lifecycle: loads and unloads.
        infer: holds the waiting requests.
        options: how configurations are read.
        budget: bytes of files that loaded models may have; None: any number.
        pinned: names of models that stay.
        clock: seconds.
    """

    def __init__(
        self,
        repositories: Repositories,
        models: Models,
        lifecycle: Lifecycle,
        infer: InferService,
        options: configuration.Options,
        *,
        budget: int | None,
        pinned: Iterable[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._repositories = repositories
        self._models = models
        self._lifecycle = lifecycle
        self._infer = infer
        self._options = options
        self._memory = Memory(
            models,
            lifecycle,
            budget=budget,
            pinned=frozenset(pinned),
            is_wanted=self._is_wanted,
            waiters=self._waiters_by_model,
        )
        self._clock = clock
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._urged: dict[str, contextlib.ExitStack] = {}  # loads for which a model waits
        # for each model, the loads that wait for it, each with the model that asks
        self._waiters: dict[str, dict[tuple[ModelLock, str], contextlib.ExitStack]] = {}
        # for each model, the models whose loads wait for it otherwise than with a request
        self._askers: dict[str, Counter[str]] = {}
        self._callers = Counter[str]()  # of `bring`, which wait for the model
        self._others: set[asyncio.Task[Any]] = set()  # further running work: joins, and loads for clients
        self._failed: dict[str, tuple[float, ServerError]] = {}  # the end of the pause after a failure, and the failure
        self._looking = asyncio.Semaphore(LOOKS)
        self._closed = False
        models.subscribe(self._changed)
        infer.load_on_demand(self._missed)

    def failure(self, name: str) -> ServerError | None:
        """The recent failure that keeps this model from being tried again now; None without one."""
        until, error = self._failed.get(name, (0.0, None))
        return copy(error) if self._clock() < until else None  # to be raised: it gets a traceback

    async def has(self, name: str) -> bool:
        """Whether a repository has a model of this name; also False if no repository can tell now."""
        async with self._looking:
            return await on_thread(self._repositories.has, name)

    def _missed(self, name: str, by_model: bool, asked_by: str) -> str:
        """Have a request, of a client or of the model `asked_by`, wait for this model.

        If `asked_by` is being loaded, its load waits, too.

        Returns:
            Why the request must not wait; empty: it may.
        """
        if self._closed:
            return STOPPING
        joins = self._lifecycle.is_loaded_with(name, asked_by)
        load = self._lifecycle.lock_of_load(asked_by)
        if load is not None and (load, asked_by) not in self._waiters.get(name, ()):
            try:
                self._note_waiter(name, load, asked_by)
            except Unavailable as circle:
                return str(circle)
            if joins:
                self._keep(self._join(name, asked_by))
            else:
                asyncio.get_running_loop().call_soon(self._memory.look)  # it may not wait for the room of `asked_by`
        if not joins:
            asyncio.get_running_loop().call_soon(self._serve, name, by_model)  # after the request has been submitted
        return ""

    def _keep(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run work that continues even if its callers stop waiting."""
        self._others.add(task := asyncio.create_task(work))
        task.add_done_callback(self._kept)
        return task

    def _kept(self, task: asyncio.Task[Any]) -> None:
        self._others.discard(task)
        _mark_seen(task)

    def _is_wanted(self, name: str) -> bool:
        """Whether requests or callers still wait for this model."""
        return not self._closed and (self._callers[name] > 0 or self._infer.awaits(name))

    def _changed(self, name: str, version: int | None, ready: bool) -> None:
        """A version has become ready or unready. Once one is ready, no request waits for the rest of the load, and a
        failure before, after which somebody else has had it loaded, says nothing any more."""
        if ready and version is not None and self._models.versions(name):
            self._failed.pop(name, None)
            if name in self._loads:
                self._infer.resume(name)

    def _note_waiter(self, name: str, load: ModelLock, asked_by: str) -> None:
        """Record that the load of `asked_by` waits for a load of this model, until that load ends.

        Raises:
            Unavailable: the load of this model waits for that of `asked_by`.
        """
        wait = contextlib.ExitStack()
        wait.enter_context(self._lifecycle.waiting(name, asked_by))
        self._waiters.setdefault(name, {})[load, asked_by] = wait

    def _forget_waiters(self, name: str) -> None:
        for wait in self._waiters.pop(name, {}).values():
            wait.close()

    def _waiters_by_model(self) -> dict[str, list[str]]:
        """The models whose loads wait for the load of another, by that one: a few."""
        return {
            name: [*(asked_by for _, asked_by in self._waiters.get(name, ())), *self._askers.get(name, ())]
            for name in self._waiters.keys() | self._askers.keys()
        }

    @contextlib.contextmanager
    def _asked(self, name: str, asked_by: str) -> Iterator[None]:
        """Inside the block, the load of `asked_by`, if there is one, waits for this model."""
        if self._lifecycle.lock_of_load(asked_by) is None:
            yield
            return
        askers = self._askers.setdefault(name, Counter())
        askers[asked_by] += 1
        self._memory.look()  # the model may not wait for the room of `asked_by`
        try:
            yield
        finally:
            askers[asked_by] -= 1
            askers += Counter()  # drops those with none left
            if not askers:
                self._askers.pop(name, None)

    async def _join(self, name: str, asked_by: str) -> None:
        """Answer the requests for a model that is loaded together with `asked_by`, which calls it."""
        error: ServerError | None = None
        try:
            await self._joined(name, asked_by)
        except ServerError as failure:
            error = failure
        except Exception as failure:
            error = _unexpected(name, failure)
        if error is None and not self._models.versions(name) and self._is_wanted(name):
            self._begin(name, by_model=True)  # it was unloaded before its requests could resume
        else:
            self._tell(name, error)

    def _serve(self, name: str, by_model: bool) -> None:
        """Load a model for its requests. If it is loaded, they ask for a version that it does not have: resume them.

        All versions of a load come at once, so such requests need not wait for a load that has begun.
        """
        if self._models.versions(name):
            self._tell(name, None)
        else:
            self._begin(name, by_model)

    def _begin(self, name: str, by_model: bool = False) -> asyncio.Task[None]:
        if name not in self._loads:
            self._loads[name] = load = asyncio.create_task(self._answer(name))
            load.add_done_callback(_mark_seen)
        if by_model and name not in self._urged:
            self._urged[name] = contextlib.ExitStack()
            self._urged[name].enter_context(self._lifecycle.awaited(name))
        return self._loads[name]

    async def bring(self, name: str, *, asked_by: str = "") -> None:
        """Return when the model is served, or is in no repository; the load continues if the caller is cancelled.

        Args:
            name: of the model.
            asked_by: the model that waits, and may be loading itself; empty for none.

        Raises:
            Unavailable: the model could not be loaded, or its load waits for the model `asked_by`.
            Exhausted: the memory budget has no room for it.
        """
        while not self._models.versions(name):  # again if it was unloaded before the caller could resume
            if self._closed:
                raise Unavailable(STOPPING)
            if self._lifecycle.is_loaded_with(name, asked_by):  # another load would wait for that one
                await self._joined(name, asked_by)
                continue
            self._callers[name] += 1
            try:
                with self._lifecycle.waiting(name, asked_by), self._asked(name, asked_by):
                    await asyncio.shield(self._begin(name, bool(asked_by)))
            except NotFound:
                return
            finally:
                self._callers[name] -= 1
                self._callers += Counter()  # drops those with none left

    async def _joined(self, name: str, asked_by: str) -> None:
        """Wait for the load of this model together with `asked_by`.

        Raises:
            Unavailable: it has failed.
        """
        failures = await self._lifecycle.load((name,), asked_by=asked_by)
        if failure := failures.get(name):
            raise Unavailable(failure.answer)

    async def _answer(self, name: str) -> None:
        """Load a model while requests wait for it, and resume them.

        Raises:
            ServerError: why it is not loaded.
        """
        error: ServerError | None = None
        try:
            error = self.failure(name)
            while error is None and not self._models.versions(name) and self._is_wanted(name):
                await self._load(name)
        except ServerError as failure:
            error = failure
        except Exception as failure:
            error = _unexpected(name, failure)
        finally:
            del self._loads[name]
            if name in self._urged:
                self._urged.pop(name).close()
        if self._models.versions(name):  # somebody else has had it loaded meanwhile
            error = None
        if error is None:
            self._failed.pop(name, None)
        elif not isinstance(error, (NotFound, NoRoomInTime)) and self.failure(name) is None:
            self._note_failure(name, error)
            self._models.announce(name, None, False)
        self._tell(name, error)
        if error is not None:
            raise error

    def _tell(self, name: str, error: ServerError | None) -> None:
        """Submit or refuse the waiting requests: the load has ended."""
        self._forget_waiters(name)
        if error is None or isinstance(error, NotFound):  # its requests are refused like those for an unknown name
            self._infer.resume(name)
        else:
            self._infer.resume(name, int(error.status), str(error))

    def _note_failure(self, name: str, error: ServerError) -> None:
        """Record a failure and drop old ones: while a repository cannot be read, clients may name anything."""
        now = self._clock()
        self._failed.pop(name, None)
        self._failed[name] = (now + RETRY_SECONDS, copy(error))  # without a traceback, whose frames hold the models
        while (oldest := next(iter(self._failed))) != name and self._failed[oldest][0] <= now:
            del self._failed[oldest]

    async def _load(self, name: str) -> None:
        """Load a model; return without it if an unload has halted the load, or no request waits for it any more."""
        sizes = await self._sizes(name)
        if sizes is None:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        load = partial(self._lifecycle.load, (name,), is_wanted=partial(self._is_wanted, name))
        failures = await self._in_room(name, sizes, load, on_demand=True)
        failure = failures.get(name)
        if failure and not failure.halted and not self._models.versions(name):  # no version is served
            raise Unavailable(failure.answer)

    async def _in_room(self, name: str, sizes: dict[str, int], load: Load, *, on_demand: bool) -> Mapping[str, Failure]:
        """Load a model when there is room for it; with more room if the load finds more bytes than these `sizes`.

        Returns:
            The failures; none, and no load, if no request waits for the model any more, or somebody else has loaded it.
        """
        while True:
            async with self._memory.room(name, sizes, on_demand=on_demand) as begun:
                if on_demand and not begun:
                    return {}
                try:
                    return await load(fits=partial(self._memory.is_room_for, sizes=sizes))
                except Outgrown as found:
                    log.info("'%s' has more bytes than were counted: its load waits for room for them", name)
                    sizes = {**sizes, **{each: max(size, sizes.get(each, 0)) for each, size in found.sizes.items()}}

    async def _sizes(self, name: str) -> dict[str, int] | None:
        """Bytes of the models that are loaded together with this one; None if no repository has it."""
        try:
            async with self._looking:
                if self._memory.is_limited:
                    return await on_thread(sizes_of, self._repositories, self._options, name)
                return {name: 0} if await on_thread(self._repositories.find, name) is not None else None
        except ConfigError as error:
            raise Unavailable(f"load failed for model '{name}': {error}") from error

    async def load(
        self, name: str, load: Load, *, asked_by: str, allowed: Allowed, is_override: bool
    ) -> Mapping[str, Failure]:
        """Make room for a load for a client or a model; the load continues if the caller is cancelled.

        Args:
            name: of the model.
            load: see `Load`.
            asked_by: the model that waits; empty for a client.
            allowed: whether the caller may load a model of this name; no model leaves for a denied load.
            is_override: the load has a content of its own, whose size is not known before: others leave afterwards.

        Raises:
            Exhausted: the memory budget has no room for it.
            ServerError: what `load` raises.
        """
        if not self._memory.is_limited:
            return await load(fits=without_limit)
        with self._asked(name, asked_by):
            return await asyncio.shield(self._keep(self._load_with_room(name, load, allowed, is_override)))

    async def _load_with_room(
        self, name: str, load: Load, allowed: Allowed, is_override: bool
    ) -> Mapping[str, Failure]:
        sizes = None if is_override else await self._sizes(name)
        if sizes is not None and all(map(allowed, sizes)):
            return await self._in_room(name, sizes, load, on_demand=False)
        try:
            return await load(fits=without_limit)
        finally:
            self._memory.look()

    async def close(self) -> None:
        """Refuse all waiting requests."""
        self._closed = True
        self._memory.close()
        self._infer.resume(None, int(Unavailable.status), STOPPING)
        if under_way := {*self._loads.values(), *self._others}:
            await asyncio.wait(under_way)


def _unexpected(name: str, failure: Exception) -> Unavailable:
    log.error("model %s could not be loaded", name, exc_info=failure)
    return Unavailable(f"load failed for model '{name}': {type(failure).__name__}")


def _mark_seen(task: asyncio.Task[Any]) -> None:
    """asyncio logs an exception that nobody has retrieved: the caller who would retrieve it may have left."""
    if not task.cancelled():
        task.exception()
