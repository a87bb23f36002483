"""Models that are loaded when somebody asks for them, and leave when others need their memory.

A request for a model that is not there waits in the house (`InferService.load_on_demand`) until its load has ended: all
that wait for one model share one load. What could not be loaded is answered so to all of them, and to those who come in
the next seconds; then it is tried again.

What a loaded model costs is the size of the files of the versions that are served. Before a load, and after it, those
models that were asked least recently are unloaded until all fit into the budget: each finishes what it has accepted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from _native.service.infer import InferService
from server.engine import config as configuration
from server.engine.lifecycle import Lifecycle
from server.engine.models import Models
from server.engine.places import Repositories
from server.engine.repository import ModelFolder, marks
from server.engine.threads import on_thread
from server.errors import ConfigError, Exhausted, NotFound, ServerError, Unavailable

log = logging.getLogger("inferd.engine")

RETRY_SECONDS = 5.0
"""For which a model that could not be loaded is not tried again."""


class Demand:
    """Used on the event loop only.

    Args:
        repositories: where models come from.
        models: what there is.
        lifecycle: loads and unloads.
        infer: where requests wait.
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
        self._failed: dict[str, tuple[float, ServerError]] = {}  # until when it is not tried again, and why it failed
        self._asked: dict[str, int] = {}  # ms since the epoch, when somebody last had a model loaded
        self._room = asyncio.Lock()  # held while it is found out what must leave, until that has left
        infer.load_on_demand(self._missed)

    def pins(self, name: str) -> bool:
        """Whether this model stays."""
        return name in self._pinned

    def failure(self, name: str) -> ServerError | None:
        """Why this model is not loaded when it is asked for now; None: it is, or would be tried."""
        until, error = self._failed.get(name, (0.0, None))
        return error if self._clock() < until else None

    def _missed(self, name: str) -> None:
        """A request waits for this model."""
        asyncio.get_running_loop().call_soon(self._begin, name)  # what submits it goes on first

    def _begin(self, name: str) -> asyncio.Task[None]:
        if name not in self._loads:
            self._loads[name] = asyncio.create_task(self._answer(name))
        return self._loads[name]

    async def bring(self, name: str) -> None:
        """Return when the model is served, or is in no repository; the load goes on when the caller is cancelled.

        Raises:
            Unavailable: it could not be loaded.
            Exhausted: there is no room for it.
        """
        if self._models.versions(name):
            return
        await asyncio.shield(self._begin(name))
        if error := self.failure(name):
            raise error

    async def _answer(self, name: str) -> None:
        """Load a model, and tell those who wait for it."""
        error: ServerError | None = None
        try:
            error = self.failure(name)
            if error is None and not self._models.versions(name):
                await self._load(name)
                self._failed.pop(name, None)
        except ServerError as failure:
            error = failure
        except Exception as failure:
            log.exception("model %s could not be loaded", name)
            error = Unavailable(f"load failed for model '{name}': {type(failure).__name__}")
        finally:
            del self._loads[name]
        if error is None:
            self._infer.resume(name)
            return
        if not isinstance(error, NotFound):
            if self.failure(name) is None:
                self._failed[name] = (self._clock() + RETRY_SECONDS, error)
                self._models.announce(name, None, False)
            self._infer.resume(name, int(error.status), str(error))
        else:
            self._infer.resume(name)  # it is refused as one of an unknown name

    async def _load(self, name: str) -> None:
        try:
            folder = await on_thread(self._repositories.find, name)
        except ConfigError as error:
            raise Unavailable(f"load failed for model '{name}': {error}") from error
        if folder is None:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        self._asked[name] = _now_ms()
        async with self._room:
            if self._budget:
                await self._make_room(name, await on_thread(_size_of_latest, folder))
            failures = await self._lifecycle.load((name,))
            if failure := failures.get(name):
                raise Unavailable(failure.answer)
            if self._budget:
                await self._make_room(name, 0)

    # -- memory --

    def _cost(self, name: str) -> int:
        """Bytes of the files of the model's versions that are served."""
        state = self._models[name]
        return sum(size for version in state.loaded for _, _, size in state.marks.get(str(version), ()))

    async def _make_room(self, name: str, needed: int) -> None:
        """Have models leave until there is room for so much more; `name` and the models of its steps stay.

        Raises:
            Exhausted: there cannot be. Nothing has left, unless it turned out when the model was loaded.
        """
        prepared = self._models.prepared(name)
        staying = {name} | (configuration.models_of(prepared.spec) if prepared else set())
        costs = {each: self._cost(each) for each, state in self._models.items() if state.loaded}
        excess = sum(costs.values()) + needed - self._budget
        leaving: list[str] = []
        for each in sorted(costs, key=self._last_asked):
            if excess <= 0:
                break
            if each not in staying and costs[each] and self._may_leave(each):
                leaving.append(each)
                excess -= costs[each]
        if excess > 0:
            if not needed:
                log.warning("'%s' is over --model-memory-budget by %d bytes with what cannot leave", name, excess)
            else:
                raise Exhausted(
                    f"load failed for model '{name}': its files have {needed} bytes, and --model-memory-budget lacks "
                    f"{excess} of them with what stays"
                )
        for each in leaving:
            log.info("'%s' leaves to make room for '%s'", each, name)
            await self._lifecycle.retire(each)

    def _may_leave(self, name: str) -> bool:
        """Nobody has said that it stays, no ensemble that is loaded needs it, and no sequence is open on it."""
        if name in self._pinned or name in self._loads or self._models.ensembles_of(name):
            return False
        return not any(version.sequences for version in self._models.versions(name))

    def _last_asked(self, name: str) -> int:
        """When a request for it last was executed, or it was loaded, in ms since the epoch."""
        used = [version.lane.statistics()["last_inference_ms"] for version in self._models.versions(name)]
        return max(self._asked.get(name, 0), *used, 0)

    async def close(self) -> None:
        """Refuse what waits."""
        self._infer.resume(None, int(Unavailable.status), "the server is stopping: models are not loaded any more")
        if self._loads:
            await asyncio.wait(self._loads.values())


def _size_of_latest(folder: ModelFolder) -> int:
    found = marks(folder)
    return sum(size for _, _, size in found.get(str(folder.versions[-1]), ())) if folder.versions else 0


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
