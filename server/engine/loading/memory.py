"""Executes the decisions of the memory budget: loads wait for room, and models leave for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Final

from inferd.server.engine import config as configuration
from inferd.server.engine.loading.budget import Budget, Resident, Residents, Stay, Use, Waiters
from inferd.server.engine.loading.lifecycle import Lifecycle
from inferd.server.engine.models.registry import Models
from inferd.server.engine.repository.folders import ModelFolder, marks, size_of
from inferd.server.engine.repository.sources import Repositories
from inferd.server.errors import ConfigError, Exhausted

log = logging.getLogger("inferd.engine")

LEAVING_SECONDS = 30.0
"""Seconds for which loads wait for a leaving model; then they continue beside it."""
PATIENCE_SECONDS = 300.0
"""Seconds for which a load waits for room."""
LOOK_AGAIN_SECONDS: Final = 0.25
"""Seconds between two looks while a load waits and only the end of a sequence may make room."""


class NoRoomInTime(Exhausted):
    """A load has waited for room as long as it may; the next one may get it."""


class Memory:
    """The room of loaded models; without a budget, each load has it. Used on the event loop only.

    Args:
        models: the registry.
        lifecycle: has models leave.
        budget: bytes of files that loaded models may have; None: any number.
        pinned: names of models that stay.
        is_wanted: whether requests still wait for a model to be loaded on demand.
        waiters: returns the models whose loads wait for the load of another, by that one.
    """

    def __init__(
        self,
        models: Models,
        lifecycle: Lifecycle,
        *,
        budget: int | None,
        pinned: frozenset[str],
        is_wanted: Callable[[str], bool],
        waiters: Callable[[], Waiters],
    ) -> None:
        self._models = models
        self._lifecycle = lifecycle
        self._pinned = pinned
        self._is_wanted = is_wanted
        self._waiters = waiters
        self._budget = Budget(budget or 0)
        self.is_limited = budget is not None
        self._loaded: dict[str, Resident] = {}  # as if no sequence was live
        self._begins: dict[Hashable, asyncio.Future[bool]] = {}  # of waiting claims
        self._retires: dict[str, asyncio.Task[None]] = {}  # models that leave to make room
        self._next: asyncio.TimerHandle | None = None
        self._over = 0
        self._closed = False
        if self.is_limited:
            lifecycle.withdrawn = self._withdrawn
            models.subscribe(self._changed)

    @asynccontextmanager
    async def room(self, name: str, sizes: dict[str, int], *, on_demand: bool) -> AsyncIterator[bool]:
        """Hold room for a load inside the block. False: the model was loaded meanwhile, or no request waits for it.

        Args:
            name: of the model.
            sizes: bytes of all models that are loaded together.
            on_demand: requests wait for the model; else a client or a model reloads it.

        Raises:
            Exhausted: it does not fit beside the models that stay; or, NoRoomInTime, the others have not left in time.
        """
        if not self.is_limited:
            yield not self._closed and self._is_wanted(name) and not self._models.versions(name)
            return
        key: Hashable = name if on_demand else (name, object())
        begins = self._begins[key] = asyncio.get_running_loop().create_future()
        self._budget.claim(key, sizes, asked=name, reloads=not on_demand)
        if self._closed:
            begins.set_result(False)
        try:
            self.look()
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    begun = await begins
            except TimeoutError:
                raise self._out_of_patience(key, name, sizes) from None
            yield begun
        finally:
            del self._begins[key]
            self._budget.end(key)
            self.look()

    def is_room_for(self, found: Mapping[str, int], sizes: Mapping[str, int]) -> bool:
        """Whether each model's `found` bytes fit into its reservation in `sizes`, or into its present size."""
        return all(
            size <= sizes.get(name, 0) or (name in self._loaded and size <= self._loaded[name].size)
            for name, size in found.items()
        )

    def _out_of_patience(self, key: Hashable, name: str, sizes: dict[str, int]) -> NoRoomInTime:
        holders = self._budget.holders(key, self._residents()) if key in self._budget.waiting else []
        return NoRoomInTime(
            f"load failed for model '{name}': its files have {sum(sizes.values())} bytes, for which "
            f"--model-memory-budget had no room in {PATIENCE_SECONDS:g} s beside "
            f"{', '.join(map(repr, holders)) or 'others'}: try again"
        )

    def close(self) -> None:
        """End all waits for room."""
        self._closed = True
        for begins in self._begins.values():
            _answer(begins, False)
        if self._next is not None:
            self._next.cancel()

    # -- decisions --

    def look(self) -> None:
        """Decide which loads begin and which models leave; called after every change."""
        if self._closed or not self.is_limited:
            return
        for key in tuple(self._budget.waiting):
            if isinstance(key, str) and not self._is_wanted(key):
                self._budget.end(key)
                _answer(self._begins[key], False)
        residents = self._residents()
        decision = self._budget.look(residents, self._used, self._waiters())
        for key in decision.begin:
            _answer(self._begins[key], True)
        for key in decision.ready:
            _answer(self._begins[key], False)
        for key, lack in decision.refuse.items():
            if not self._begins[key].done():
                self._begins[key].set_exception(self._refusal(key, lack))
        for name in decision.leave:
            self._dismiss(name)
        if decision.over and decision.over != self._over:
            log.warning("over --model-memory-budget by %d bytes with what cannot leave", decision.over)
        self._over = decision.over
        if self._budget.waiting and any(each.stay is Stay.FOR_NOW for each in residents.values()):
            self._look_later()

    def _look_later(self) -> None:
        if self._next is None and not self._closed:
            self._next = asyncio.get_running_loop().call_later(LOOK_AGAIN_SECONDS, self._look_again)

    def _look_again(self) -> None:
        self._next = None
        self.look()

    def _refusal(self, key: Hashable, lack: int) -> Exhausted:
        name = key if isinstance(key, str) else key[0]  # type: ignore[index]
        return Exhausted(
            f"load failed for model '{name}': --model-memory-budget lacks {lack} bytes for its files, with those of "
            "the models of its steps and beside what stays: raise it, or have fewer models stay"
        )

    def _residents(self) -> Residents:
        """The loaded models."""
        live = {
            version.name: replace(self._loaded[version.name], stay=Stay.FOR_NOW)
            for version in self._models.with_sequences()
            if version.sequences and version.name not in self._pinned and version in self._models.versions(version.name)
        }
        return {**self._loaded, **live} if live else self._loaded

    def _changed(self, name: str, *_: object) -> None:
        """A version of this model has become ready or unready."""
        versions = self._models.versions(name)
        if not versions:
            self._loaded.pop(name, None)
            return
        state = self._models[name]
        size = size_of(state.marks, (each.version for each in versions))
        steps = configuration.models_of(state.prepared.spec) if state.prepared else frozenset[str]()
        self._loaded[name] = Resident(size, steps, Stay.PINNED if name in self._pinned else Stay.MAY_LEAVE)

    def _used(self, name: str) -> Use:
        """The time of the model's load, or of its last response."""
        versions = self._models.versions(name)
        busy = any(version.lane.in_flight for version in versions)
        return busy, max((max(version.made_ns, version.lane.last_used_ns) for version in versions), default=0)

    # -- leaving --

    def _dismiss(self, name: str) -> None:
        """Make a model leave, after the ensembles above it have left."""
        log.info("'%s' leaves to make room", name)
        above = [self._retires[user.name] for user in self._models.ensembles_of(name) if user.name in self._retires]
        self._retires[name] = task = asyncio.create_task(self._see_out(name, above))
        self._watch(name, task)

    async def _see_out(self, name: str, above: list[asyncio.Task[None]]) -> None:
        if above:
            await asyncio.wait(above)
        await self._lifecycle.retire(name, lambda: self._budget.may_leave(name, self._residents()))

    def _withdrawn(self, name: str, size: int, ending: asyncio.Task[None]) -> None:
        """A model was unloaded by hand; it takes its memory until it has ended."""
        self._budget.leave(name, size)
        self._watch(name, ending)

    def _watch(self, name: str, task: asyncio.Task[None]) -> None:
        timer = asyncio.get_running_loop().call_later(LEAVING_SECONDS, self._late, name)

        def over(task: asyncio.Task[None]) -> None:
            timer.cancel()
            if self._retires.get(name) is task:
                del self._retires[name]
            self._budget.left(name)
            if task.cancelled() or task.exception() is not None:  # another look now would probably fail again
                self._look_later()
            else:
                self.look()

        task.add_done_callback(over)

    def _late(self, name: str) -> None:
        log.warning("'%s' still finishes what it has accepted, others are loaded beside it", name)
        self._budget.late(name)
        self.look()


def _answer(future: asyncio.Future[bool], begun: bool) -> None:
    if not future.done():
        future.set_result(begun)


def sizes_of(repositories: Repositories, options: configuration.Options, name: str) -> dict[str, int] | None:
    """Bytes of a model's served versions, and of all models of its steps; None: no repository has it.

    A model that cannot be read counts 0: its load reports the reason, or finds that it is larger (`Outgrown`). Blocks.

    Raises:
        ConfigError: the model cannot be fetched now.
    """
    folder = repositories.find(name)
    if folder is None:
        return None
    sizes: dict[str, int] = {}
    left: list[tuple[str, ModelFolder | None]] = [(name, folder)]
    while left:
        each, folder = left.pop()
        sizes[each], steps = _size_of(folder, options) if folder else (0, frozenset[str]())
        left.extend((step, _found(repositories, step)) for step in steps if step not in sizes)
    return sizes


def _found(repositories: Repositories, name: str) -> ModelFolder | None:
    with suppress(ConfigError):
        return repositories.find(name)
    return None


def _size_of(folder: ModelFolder, options: configuration.Options) -> tuple[int, frozenset[str]]:
    with suppress(ConfigError, Exhausted):
        outline = configuration.outline(folder, options)
        return size_of(marks(folder), outline.versions), outline.steps
    return 0, frozenset()
