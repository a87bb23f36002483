"""Loads models at their first request, and unloads them when others need their memory.

A request for a model that is not loaded waits in the server (`InferService.load_on_demand`) until the load has ended;
all requests for one model share one load. If it fails, all of them get the error, and so do requests in the next
seconds; then a request tries again.

The cost of a loaded model is the size of the files of the versions that are served. Before a load, and after it, the
models that were used least recently are unloaded until all fit into the budget; each first finishes its requests.

Models are loaded concurrently, because one may ask for another while it is loaded or warmed up. A load waits only a
limited time for other models that are being loaded or unloaded, because these may wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable

from _native.model_files import NO_FILES
from _native.service.infer import InferService
from server.engine import config as configuration
from server.engine.housekeeping.threads import on_thread
from server.engine.loading.lifecycle import Lifecycle
from server.engine.loading.model_locks import ModelLock
from server.engine.models.registry import Models
from server.engine.repository.folders import ModelFolder, marks
from server.engine.repository.sources import Repositories
from server.errors import ConfigError, Exhausted, NotFound, ServerError, Unavailable

log = logging.getLogger("inferd.engine")

RETRY_SECONDS = 5.0
"""Seconds after a failed load in which the model is not tried again."""
LEAVING_SECONDS = 30.0
"""Seconds for which a load waits for models that leave to make room; then it goes on beside them."""
PATIENCE_SECONDS = 300.0
"""Seconds for which a load waits for other loads beside which it does not fit; their models may leave for it."""
LOOKS = 16
"""The most look-ups in repositories at a time, each on a thread: clients may name any number of models."""


class Demand:
    """Loads models on demand. Used on the event loop only.

    Args:
        repositories: where models come from.
        models: the registry.
        lifecycle: loads and unloads.
        infer: holds the waiting requests.
        budget: bytes of files that loaded models may have; 0 for any number.
        pinned: names of models that stay.
        clock: seconds.
    """

    def __init__(
        self,
        repositories: Repositories,
        models: Models,
        lifecycle: Lifecycle,
        infer: InferService,
        *,
        budget: int,
        pinned: Iterable[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._repositories = repositories
        self._models = models
        self._lifecycle = lifecycle
        self._infer = infer
        self._budget = budget
        self._pinned = frozenset(pinned)
        self._clock = clock
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._urged: dict[str, contextlib.ExitStack] = {}  # loads that a model, which may be loading itself, waits for
        # for each model, the loads that wait for it, each with the model that asks
        self._waiters: dict[str, dict[tuple[ModelLock, str], contextlib.ExitStack]] = {}
        self._joins: set[asyncio.Task[None]] = set()
        self._failed: dict[str, tuple[float, ServerError]] = {}  # the end of the pause after a failure, and the failure
        self._asked: dict[str, int] = {}  # when each model was last asked for, in time.monotonic_ns
        self._coming: dict[str, int] = {}  # bytes of running loads, for which room was made
        self._leaving: dict[asyncio.Task[None], str] = {}
        self._looking = asyncio.Semaphore(LOOKS)
        infer.load_on_demand(self._missed)

    def pins(self, name: str) -> bool:
        """Whether this model is never unloaded for others."""
        return name in self._pinned

    def failure(self, name: str) -> ServerError | None:
        """The recent failure because of which this model is not tried again now; None without one."""
        until, error = self._failed.get(name, (0.0, None))
        return error if self._clock() < until else None

    async def has(self, name: str) -> bool:
        """Whether a repository has a model of this name; False also if that cannot be found out now."""
        async with self._looking:
            return await on_thread(self._repositories.has, name)

    def _missed(self, name: str, by_model: bool, asked_by: str) -> str:
        """A request of a client, or of another model, is to wait for this model. The load of `asked_by` waits for it.

        Returns:
            Why the request must not wait; empty: it may.
        """
        joins = self._lifecycle.is_loaded_with(name, asked_by)
        load = self._lifecycle.lock_of_load(asked_by)
        if load is not None and (load, asked_by) not in self._waiters.get(name, ()):
            try:
                self._note_waiter(name, load, asked_by)
            except Unavailable as circle:
                return str(circle)
            if joins:
                self._joins.add(join := asyncio.create_task(self._join(name, asked_by)))
                join.add_done_callback(self._joins.discard)
        if not joins:
            asyncio.get_running_loop().call_soon(self._begin, name, by_model)  # after the request has been submitted
        return ""

    def _note_waiter(self, name: str, load: ModelLock, asked_by: str) -> None:
        """Note that this load of `asked_by` waits for a load of this model, until that one ends.

        Raises:
            Unavailable: the load of this model waits for that of `asked_by`.
        """
        wait = contextlib.ExitStack()
        wait.enter_context(self._lifecycle.waiting(name, asked_by))
        self._waiters.setdefault(name, {})[load, asked_by] = wait

    def _forget_waiters(self, name: str) -> None:
        for wait in self._waiters.pop(name, {}).values():
            wait.close()

    async def _join(self, name: str, asked_by: str) -> None:
        """Answer the requests for a model that is loaded together with `asked_by`, which asks for it."""
        error: ServerError | None = None
        try:
            failures = await self._lifecycle.load((name,), asked_by=asked_by)
            if failure := failures.get(name):
                error = Unavailable(failure.answer)
        except ServerError as failure:
            error = failure
        except Exception as failure:
            error = _unexpected(name, failure)
        self._tell(name, error)

    def _begin(self, name: str, by_model: bool = False) -> asyncio.Task[None]:
        if name not in self._loads:
            self._loads[name] = asyncio.create_task(self._answer(name))
        if by_model and name not in self._urged:
            self._urged[name] = contextlib.ExitStack()
            self._urged[name].enter_context(self._lifecycle.awaited(name))
        return self._loads[name]

    async def bring(self, name: str, *, asked_by: str = "") -> None:
        """Return when the model is served, or is in no repository; the load goes on when the caller is cancelled.

        Args:
            name: of the model.
            asked_by: the model that waits, and may be loading itself; empty for none.

        Raises:
            Unavailable: the model could not be loaded, or its load waits for the model `asked_by`.
            Exhausted: the memory budget has no room for it.
        """
        if self._models.versions(name):
            return
        if self._lifecycle.is_loaded_with(name, asked_by):  # another load would wait for that one
            failures = await self._lifecycle.load((name,), asked_by=asked_by)
            if failure := failures.get(name):
                raise Unavailable(failure.answer)
            return
        with self._lifecycle.waiting(name, asked_by):
            await asyncio.shield(self._begin(name, bool(asked_by)))
        if error := self.failure(name):
            raise error

    async def _answer(self, name: str) -> None:
        """Load a model, and resume the requests that wait for it."""
        error: ServerError | None = None
        try:
            error = self.failure(name)
            if error is None and not self._models.versions(name):
                await self._load(name)
                self._failed.pop(name, None)
        except ServerError as failure:
            error = failure
        except Exception as failure:
            error = _unexpected(name, failure)
        finally:
            del self._loads[name]
            if name in self._urged:
                self._urged.pop(name).close()
        if error is not None and not isinstance(error, NotFound) and self.failure(name) is None:
            self._note_failure(name, error)
            self._models.announce(name, None, False)
        self._tell(name, error)

    def _tell(self, name: str, error: ServerError | None) -> None:
        """Submit or refuse the waiting requests: the load has ended."""
        self._forget_waiters(name)
        if error is None or isinstance(error, NotFound):  # its requests are refused as those for an unknown name
            self._infer.resume(name)
        else:
            self._infer.resume(name, int(error.status), str(error))

    def _note_failure(self, name: str, error: ServerError) -> None:
        """Note a failure and drop old ones: while a repository cannot be read, clients may name anything."""
        now = self._clock()
        self._failed.pop(name, None)
        self._failed[name] = (now + RETRY_SECONDS, error)
        while (oldest := next(iter(self._failed))) != name and self._failed[oldest][0] <= now:
            del self._failed[oldest]

    async def _load(self, name: str) -> None:
        try:
            async with self._looking:
                folder = await on_thread(self._repositories.find, name)
        except ConfigError as error:
            raise Unavailable(f"load failed for model '{name}': {error}") from error
        if folder is None:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        self._asked[name] = time.monotonic_ns()
        if self._budget:
            await self._make_room(name, await on_thread(_size_of_latest, folder))
        try:
            failures = await self._lifecycle.load((name,))
        finally:
            self._coming.pop(name, None)
        if (failure := failures.get(name)) and not self._models.versions(name):  # no version is served
            raise Unavailable(failure.answer)
        if self._budget:
            await self._make_room(name, 0)

    # -- memory --

    def _cost(self, name: str) -> int:
        """Bytes of the files of the model's versions that are served."""
        state = self._models[name]
        return sum(state.marks.get(str(version), NO_FILES).size for version in state.loaded)

    async def _make_room(self, name: str, needed: int) -> None:
        """Unload models until there is room for so many bytes; `name` and the models of its steps stay.

        Raises:
            Exhausted: there cannot be enough room. Then no model was unloaded, unless the size was known only after the
                load.
        """
        leaving, excess = self._choose(name, needed)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_SECONDS):
                while excess > 0 and needed and self._coming:
                    loads = [self._loads[each] for each in self._coming]
                    await asyncio.wait(loads, return_when=asyncio.FIRST_COMPLETED)
                    leaving, excess = self._choose(name, needed)
        if excess > 0:
            if not needed:
                log.warning("'%s' is over --model-memory-budget by %d bytes with what cannot leave", name, excess)
            else:
                raise Exhausted(
                    f"load failed for model '{name}': its files have {needed} bytes, and --model-memory-budget lacks "
                    f"{excess} of them with what stays"
                )
        if needed:
            self._coming[name] = needed
        try:
            await self._see_out(leaving, name)
        except BaseException:
            self._coming.pop(name, None)
            raise

    def _choose(self, name: str, needed: int) -> tuple[list[str], int]:
        """The models to unload, and the bytes that are still lacking then."""
        prepared = self._models.prepared(name)
        staying = {name} | (configuration.models_of(prepared.spec) if prepared else set())
        gone = set(self._leaving.values())
        costs = {each: self._cost(each) for each, state in self._models.items() if state.loaded and each not in gone}
        coming = sum(size for each, size in self._coming.items() if each not in costs)
        excess = sum(costs.values()) + coming + needed - self._budget
        leaving: list[str] = []
        for each in sorted(costs, key=lambda each: (self._is_busy(each), self._last_asked(each))):
            if excess <= 0:
                break
            users = self._users_of(each)
            if costs[each] and staying.isdisjoint((each, *users)) and all(map(self._may_leave, (each, *users))):
                leaving.append(each)
                excess -= costs[each]
        return leaving, excess

    def _users_of(self, name: str) -> list[str]:
        """The loaded ensembles that have the model as a step, directly or through other ensembles; outer ones first."""
        levels = [[name]]
        while levels[-1]:
            levels.append(sorted({user.name for each in levels[-1] for user in self._models.ensembles_of(each)}))
        return list(dict.fromkeys(user for level in levels[:0:-1] for user in level))

    async def _see_out(self, leaving: list[str], name: str) -> None:
        """Unload these models to make room for `name`; return when they have ended, or after LEAVING_SECONDS."""
        retiring: set[asyncio.Task[None]] = set()
        for each in leaving:
            log.info("'%s' leaves to make room for '%s'", each, name)
            task = asyncio.create_task(self._retire(each))
            self._leaving[task] = each
            task.add_done_callback(self._left)
            retiring.add(task)
        if not retiring:
            return
        left, late = await asyncio.wait(retiring, timeout=LEAVING_SECONDS)
        for task in left:
            task.result()
        for each in (self._leaving.pop(task) for task in late):
            log.warning("'%s' still finishes what it has accepted, '%s' is loaded beside it", each, name)

    async def _retire(self, name: str) -> None:
        """Unload a model after the ensembles that need it, whose accepted requests finish first."""
        for user in self._users_of(name):
            await self._lifecycle.retire(user)
        await self._lifecycle.retire(name)

    def _left(self, task: asyncio.Task[None]) -> None:
        self._leaving.pop(task, None)
        if not task.cancelled():
            task.exception()  # marked as seen: the waiting caller has it, unless the server stops

    def _is_busy(self, name: str) -> bool:
        """Whether the model has running requests, which may wait for a model that is to be loaded."""
        return any(version.lane.in_flight for version in self._models.versions(name))

    def _may_leave(self, name: str) -> bool:
        """Whether the model is not pinned, not being loaded, and without open sequences."""
        if name in self._pinned or name in self._loads:
            return False
        return not any(version.sequences for version in self._models.versions(name))

    def _last_asked(self, name: str) -> int:
        """When the model's last request was executed, or the model was loaded, in time.monotonic_ns."""
        used = [version.lane.statistics()["last_inference_ns"] for version in self._models.versions(name)]
        return max(self._asked.get(name, 0), *used, 0)

    async def let_go(self, name: str, asked_by: str) -> None:
        """Unload the ensembles with a step whose model was unloaded: a request loads them together again."""
        if not self._models.versions(name):
            for ensemble in self._models.ensembles_of(name):
                await self._lifecycle.unload(ensemble.name, asked_by=asked_by)
                await self.let_go(ensemble.name, asked_by)

    async def close(self) -> None:
        """Refuse all waiting requests."""
        self._infer.resume(None, int(Unavailable.status), "the server is stopping: models are not loaded any more")
        if under_way := {*self._loads.values(), *self._joins}:
            await asyncio.wait(under_way)


def _unexpected(name: str, failure: Exception) -> Unavailable:
    log.error("model %s could not be loaded", name, exc_info=failure)
    return Unavailable(f"load failed for model '{name}': {type(failure).__name__}")


def _size_of_latest(folder: ModelFolder) -> int:
    return marks(folder).get(str(folder.versions[-1]), NO_FILES).size if folder.versions else 0
