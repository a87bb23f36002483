"""Loads and unloads of models while others serve.

A load makes the new version beside the one that serves, off the loop. The new version takes over in one step on the
loop: the next request finds it, and the old one finishes its requests and ends by itself. A load that fails changes
nothing. A version that has not changed is kept; if only the number of instances has changed, instances are added or
removed.

A sequence stays with the version on which it began. A version with live sequences departs when it is replaced or
unloaded: only requests of these sequences still find it (`inferd._native.service.table`), until they have ended or
their time is over.

Loads and unloads of the same models are executed one after the other (`inferd.server.engine.loading.model_locks`),
others concurrently. An ensemble is loaded under one lock with the models of its steps, and when a model is loaded, the
ensembles that have it as a step are completed again. An unload, and the end of the server, wait for a load in progress,
but not for the rest of its warm-up. If requests wait for the load, an unload waits for the warm-up, too, because these
requests would start the load again.

Loads and unloads do not wait for the end of replaced versions, because a model may reload itself or its callers. There
are two exceptions: a client's load that removes instances returns when these have ended; and if MOST_REPLACED versions
of one model still finish their requests, a load waits for one of them (a client's for LOOK_SECONDS at most), or fails
if a model asked for it. While it waits it has no lock: these requests may need a model that is loaded under that lock.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Set
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

from inferd.server.engine import config as configuration
from inferd.server.engine.housekeeping.threads import on_thread, slices
from inferd.server.engine.instances.warmup import Halt
from inferd.server.engine.loading.candidates import Candidate, Failure, Maker
from inferd.server.engine.loading.endings import End, Endings
from inferd.server.engine.loading.load import Loading
from inferd.server.engine.loading.model_locks import Deadlock, ModelLock, ModelLocks
from inferd.server.engine.loading.overrides import NOTHING, Override
from inferd.server.engine.loading.reading import Listed, Reader
from inferd.server.engine.loading.room import Room
from inferd.server.engine.models.registry import Models
from inferd.server.engine.repository.folders import size_of
from inferd.server.engine.repository.sources import Repositories
from inferd.server.errors import Denied, Status, Unavailable

log = logging.getLogger("inferd.engine")

T = TypeVar("T")
PACE = 0.005
"""If no load has begun for this many seconds, another one begins beside the running ones, up to the number of threads.

While many models are loaded, the loop wakes this often, and a wake-up costs more than the load of a small model.
"""
USERS_SECONDS = 30.0
"""Seconds for which the unload of a model waits for requests of the ensembles above it."""
HALTED = "it is unloaded before its load has ended"
"""The reason of a load that an unload has halted."""
STOPPED = "the server stops before the load has ended"
Allowed = Callable[[str], bool]
"""Whether the caller may load and unload the model of this name."""


def anything(_: str) -> bool:
    """`Allowed` for the server itself, and for models."""
    return True


def by_nobody() -> bool:
    """`is_wanted` of a load for which no request waits."""
    return False


Fits = Callable[[Mapping[str, int]], bool]
"""Whether a load has room for models of these sizes in bytes."""


def without_limit(_: Mapping[str, int]) -> bool:
    """`Fits` of a load that needs no room."""
    return True


class Outgrown(Exception):
    """The models of a load are larger than its room. Nothing was loaded.

    Attributes:
        sizes: their bytes, by name.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.sizes = sizes


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """The arguments of `Lifecycle.load`.

    Attributes:
        halts: end the loads of these models; a running load's candidates have them.
    """

    wanted: frozenset[str]
    override: Override
    listed: Listed
    explicit: bool
    asked_by: str
    allowed: Allowed
    is_wanted: Callable[[], bool]
    fits: Fits
    halts: dict[str, Halt] = field(default_factory=dict)


class Lifecycle:
    """Loads and unloads models. Used on the event loop only.

    Args:
        repositories: the sources of models.
        models: the registry.
        maker: makes versions.
        drained: returns when the last sequence on a draining version has ended.
        end: finishes the accepted requests of a version and closes it.
        threads: models that are prepared or made at a time; loads that a loading model asks for come on top.
        patience: seconds for which a load waits at most while no other load makes progress.
    """

    def __init__(
        self,
        repositories: Repositories,
        models: Models,
        maker: Maker,
        drained: End,
        end: End,
        *,
        threads: int,
        patience: float = math.inf,
    ) -> None:
        self._repositories = repositories
        self._models = models
        self._maker = maker
        self._reader = Reader(repositories, models, maker, threads)
        self._threads = threads
        self._room = Room(threads, patience, PACE)
        self._locks = ModelLocks()
        self._made_in: dict[str, Loading] = {}  # models that are being made now
        # whose configurations are being read, or which wait for replaced versions
        self._looking: dict[_Request, None] = {}
        self._endings = Endings(models, drained, end)
        self._work: set[asyncio.Task[Any]] = set()
        self._stopping = False
        # called for each unloaded model, with its name, its bytes, and the end of its last request
        self.withdrawn: Callable[[str, int, asyncio.Task[None]], None] | None = None
        self.loaded = 0  # versions since the start
        self.failed = 0  # failed loads since the start

    def _to_its_end(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """The result of `work`, which continues if the caller is cancelled: clients may disconnect."""
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._done)
        return asyncio.shield(task)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._work.discard(task)
        if not task.cancelled():
            task.exception()  # marked as seen: the caller has it, and it was logged

    @asynccontextmanager
    async def lock(self, names: frozenset[str], asked_by: str = "") -> AsyncIterator[ModelLock]:
        """Hold the lock of these models inside the block: nothing else changes them.

        Raises:
            Unavailable: the lock would wait for `asked_by`, which waits for the lock.
        """
        outer = self._made_in.get(asked_by)
        try:
            async with self._locks.of(names, outer.lock if outer else None) as lock:
                yield lock
        except Deadlock as circle:
            raise _circle(names, asked_by, circle) from None

    # -- loading --

    async def load(
        self,
        names: Iterable[str],
        override: Override = NOTHING,
        *,
        explicit: bool = True,
        asked_by: str = "",
        allowed: Allowed = anything,
        listed: Listed = MappingProxyType({}),
        is_wanted: Callable[[], bool] = by_nobody,
        fits: Fits = without_limit,
    ) -> dict[str, Failure]:
        """Load these models, or reload those that have changed.

        Args:
            names: of the models.
            override: of a single model, in place of the repository's content.
            explicit: a client or option has named the models.
            asked_by: the model that waits for it; empty for none.
            allowed: whether the caller may load the model of a step.
            listed: models that a scan has just found; others are searched.
            is_wanted: tells whether requests wait for the load now: then an unload does not halt it.
            fits: tells whether there is room for the models as they have been read; called before any is made.

        Returns:
            The failures, by model, also of models that had to be loaded with them.

        Raises:
            Unavailable: the server stops, or this load would wait for `asked_by`.
            Denied: the caller may not load the model of an ensemble's step.
            InvalidArgument, Internal: the override's files cannot be written.
            Outgrown: `fits` says no.
        """
        request = _Request(frozenset(names), override, listed, explicit, asked_by, allowed, is_wanted, fits)
        return await self._to_its_end(self._load(request))

    @contextmanager
    def awaited(self, name: str) -> Iterator[None]:
        """Inside the block, loads of this model need no free place, because loads with places may wait for them."""
        if not self._made_in:  # no load can wait
            yield
            return
        with self._room.urge(self._locks.ahead((name,))):
            yield

    def is_loaded_with(self, name: str, other: str) -> bool:
        """Whether a running load is of both models."""
        return other in self._made_in and name in self._made_in[other].candidates

    def lock_of_load(self, name: str) -> ModelLock | None:
        """The lock of the running load of this model; None without one."""
        return self._made_in[name].lock if name in self._made_in else None

    @contextmanager
    def waiting(self, name: str, asked_by: str) -> Iterator[None]:
        """Inside the block, `asked_by`, which may be loading, waits for all loads of this model.

        Raises:
            Unavailable: one of these loads waits for `asked_by`.
        """
        outer = self._made_in.get(asked_by)
        if outer is None:
            yield
            return
        joins = name in outer.candidates
        try:
            with outer.waiting((name,), asked_by) if joins else self._locks.waiting(outer.lock, name):
                yield
        except Deadlock as circle:
            raise _circle((name,), asked_by, circle) from None

    async def _load(self, request: _Request) -> dict[str, Failure]:
        wanted, asked_by = request.wanted, request.asked_by
        outer = self._made_in.get(asked_by)
        if outer is not None and wanted <= set(outer.candidates):
            with outer.room.urge(outer.needed_by(wanted)):
                return await _join(outer, wanted, asked_by)
        if outer is None:
            return await self._load_in(self._room, request)
        # Earlier loads of the same models may wait for a place, which the calling model holds while it waits for them.
        with self._room.urge(self._locks.ahead(wanted | self._users_of(wanted))):
            return await self._load_in(Room(self._threads, pace=PACE), request)

    async def _load_in(self, room: Room, request: _Request) -> dict[str, Failure]:
        wanted, asked_by = request.wanted, request.asked_by
        needed = wanted | self._users_of(wanted)
        try:
            while True:
                self._refuse_when_stopping()
                async with self.lock(needed, asked_by) as lock:
                    candidates = await self._look_under(lock, request, room)
                    needed = frozenset(candidates) | wanted
                    is_whole = needed <= lock.names
                    crowded = self._crowded(candidates) if is_whole and not asked_by else frozenset[str]()
                    if is_whole and not crowded:
                        if not request.fits(sizes := {name: each.size for name, each in candidates.items()}):
                            raise Outgrown(sizes)
                        for name in wanted & set(candidates):
                            candidates[name].explicit = request.explicit
                        self._looking.pop(request, None)
                        loading = Loading(
                            self._models,
                            self._maker,
                            lock,
                            candidates,
                            room,
                            waits=not asked_by,
                            is_wanted=request.is_wanted,
                        )
                        failures = await self._run(loading, wanted)
                        break
                    for candidate in candidates.values():
                        await candidate.discard()
                await self._endings.room_for(crowded, request.halts, bounded=request.explicit)
        finally:
            self._looking.pop(request, None)
        if loading.leaving and not asked_by:  # a model might wait for the end of its own instance
            await asyncio.wait(loading.leaving)
        return failures

    def _crowded(self, candidates: Mapping[str, Candidate]) -> frozenset[str]:
        """The candidates that are reloaded and must wait for a replaced version."""
        changed = frozenset(name for name, candidate in candidates.items() if not self._stays(candidate))
        return frozenset(
            name
            for name in (changed | self._users_of(changed)) & candidates.keys()
            if self._endings.is_crowded(name) and not candidates[name].halt.is_set
        )

    async def _run(self, loading: Loading, wanted: frozenset[str]) -> dict[str, Failure]:
        names = set(loading.candidates)
        self._made_in.update(dict.fromkeys(names, loading))
        if self._stopping:
            loading.halt(loading.candidates, STOPPED)
        try:
            await loading.run(self._endings)
        finally:
            for name in names:
                self._made_in.pop(name, None)
            self.failed += len(loading.failures)
            self.loaded += sum(len(candidate.made) for candidate in loading.candidates.values())
        return {**loading.failures, **{name: Failure(name) for name in wanted - names}}

    async def _look_under(self, lock: ModelLock, request: _Request, room: Room) -> dict[str, Candidate]:
        """See `_look`; an unload can halt these loads meanwhile."""
        for name in lock.names:
            request.halts.setdefault(name, Halt())
        self._looking[request] = None
        candidates = await self._look(request, room)
        for name in request.halts.keys() & candidates.keys():
            candidates[name].halt = request.halts[name]
        return candidates

    async def _look(self, request: _Request, room: Room) -> dict[str, Candidate]:
        """The candidates: these models, the models of their steps, and loaded ensembles that use changed ones."""
        found: dict[str, Candidate] = {}
        names, looked_for = request.wanted, set[str]()
        overrides = {} if request.override is NOTHING else dict.fromkeys(request.wanted, request.override)
        while names:
            looked_for |= names
            candidates = await self._reader.candidates(sorted(names), overrides, request.listed, room)
            found.update((candidate.name, candidate) for candidate in candidates)
            names = frozenset(step for candidate in found.values() for step in candidate.steps) - looked_for
            if not all(map(request.allowed, names)):  # checked before their files are read or run
                for candidate in found.values():
                    await candidate.discard()
                raise _not_allowed(request.wanted)
        changed = frozenset(name for name, candidate in found.items() if not self._stays(candidate))
        for name in self._users_of(changed) - set(found):
            state = self._models[name]
            assert state.folder is not None
            found[name] = Candidate(name, state.folder, state.marks, is_user=True, own=state.own)
        return found

    def _stays(self, candidate: Candidate) -> bool:
        """Whether the model's configuration was found to be the one in force."""
        name = candidate.name
        return candidate.own is not None and name in self._models and self._models[name].own is candidate.own

    def _users_of(self, names: frozenset[str]) -> frozenset[str]:
        """The loaded ensembles that have one of these in a step, or in an ensemble in a step."""
        found: set[str] = set()
        left = set(names)
        while left:
            users = {ensemble.name for ensemble in self._models.ensembles_of(left.pop())}
            left |= users - found
            found |= users
        return frozenset(found)

    def failed_users_of(self, names: Set[str]) -> set[str]:
        """The ensembles that could not be loaded, and have one of these in a step, or in an ensemble in a step."""
        if not names:
            return set()
        failed = (name for name, state in self._models.items() if state.steps and not state.is_ready)
        return {name for name in failed if not self._models.needs(name).isdisjoint(names)}

    # -- unloading --

    async def unload(
        self,
        name: str,
        *,
        dependents: bool = False,
        users: bool = False,
        asked_by: str = "",
        allowed: Allowed = anything,
    ) -> None:
        """Unload a model: no new request finds it. Accepted requests finish in the background.

        Args:
            name: of the model; nothing happens if there is none. If it was unloaded before, its departing versions
                end their sequences.
            dependents: of an ensemble, also unload the models of its steps, after its last request, unless they were
                loaded by name or another ensemble has them.
            users: also unload the ensembles that have the model as a step, before it: their accepted requests find it,
                for USERS_SECONDS at most; without waiting if a model asks, which may be at work on one of these.
            asked_by: the model that waits for it; empty for none.
            allowed: whether the caller may unload the model of a step; else it stays.

        Raises:
            Unavailable: the server stops, or the unload would wait for `asked_by`.
        """
        unload = self._unload(name, dependents=dependents, users=users, asked_by=asked_by, allowed=allowed)
        await self._to_its_end(unload)

    async def _unload(self, name: str, *, dependents: bool, users: bool, asked_by: str, allowed: Allowed) -> None:
        self._refuse_when_stopping()
        loading = self._made_in.get(name)
        if loading is not None and loading is not self._made_in.get(asked_by) and not loading.is_wanted():
            loading.halt((name,), HALTED)
        if name != asked_by:
            for request in self._looking:
                if name in request.halts and not request.is_wanted():
                    request.halts[name].set(HALTED)
        async with self._lock_with_users(name, users, asked_by) as found:
            if name not in self._models:
                return
            await self._unload_users(name, found, waits=users and not asked_by)
            state = self._models[name]
            steps = configuration.models_of(state.prepared.spec) if dependents and state.prepared else frozenset()
            if not state.loaded:
                self._endings.hurry(name)
            ending = self._withdraw(name)
        if steps:
            followers = self._endings.begin(self._unload_steps(ending, steps, allowed), name)
            if not asked_by:  # a model might wait for its own end
                await followers

    @asynccontextmanager
    async def _lock_with_users(self, name: str, users: bool, asked_by: str) -> AsyncIterator[frozenset[str]]:
        """Hold the lock of a model and, with `users`, of the ensembles above it, which are told."""
        one = frozenset((name,))
        while True:
            found = self._users_of(one) if users else frozenset[str]()
            async with self.lock(one | found, asked_by):
                if not users or self._users_of(one) <= found:
                    yield found & self._users_of(one)
                    return

    async def _unload_users(self, name: str, users: frozenset[str], *, waits: bool) -> None:
        """Unload the ensembles above a model, outer ones first.

        With `waits`, each level, and ensembles withdrawn before, finish their requests before the models below leave.
        """
        end = time.monotonic() + USERS_SECONDS
        left = set(users)
        while left:
            outer = {name for name in left if not left & self._users_of(frozenset((name,)))}
            for user in sorted(outer):
                if waits:
                    await self._above_ended(user, end)
                self._withdraw(user)
            left -= outer
        if waits:
            await self._above_ended(name, end)

    async def _above_ended(self, name: str, end: float = math.inf) -> None:
        """Return when the ensembles above a model that were withdrawn have finished, or at this time."""
        while (above := self._endings.above(name)) and (left := end - time.monotonic()) > 0:
            await asyncio.wait(above, timeout=None if math.isinf(left) else left)

    def _withdraw(self, name: str) -> asyncio.Task[None]:
        """See `Endings.withdraw`; reports it."""
        state = self._models[name]
        size = size_of(state.marks, state.loaded)
        was_loaded = bool(state.loaded)
        ending = self._endings.withdraw(name)
        if was_loaded and self.withdrawn is not None:
            self.withdrawn(name, size, ending)
        return ending

    async def retire(self, name: str, may_leave: Callable[[], bool]) -> None:
        """Unload a model to make room, after ensembles above it that were withdrawn; return when its memory is free.

        Args:
            name: of the model.
            may_leave: called when nothing else changes the model any more, just before requests stop finding it.

        Raises:
            Unavailable: the server stops.
        """
        ending: asyncio.Task[None] | None = None
        while ending is None:
            await self._above_ended(name)
            self._refuse_when_stopping()
            async with self.lock(frozenset((name,))):
                if not may_leave():
                    return
                if not self._endings.above(name):
                    ending = self._endings.withdraw(name)
        await ending

    async def _unload_steps(self, ending: asyncio.Task[None], steps: frozenset[str], allowed: Allowed) -> None:
        """After the end of an ensemble, unload the models of its steps that nothing else needs.

        These were not loaded by name, and no other ensemble has them, not even one being loaded.
        """
        await ending
        for step in sorted(filter(allowed, steps)):
            if self._stopping:
                return
            async with self.lock(frozenset((step,))):
                prepared = self._models.prepared(step)
                if prepared is None or self._models[step].explicit or self._users_of(frozenset((step,))):
                    continue
                below = configuration.models_of(prepared.spec)
                end = self._withdraw(step)
            await self._unload_steps(end, below, allowed)

    async def remove(self, name: str) -> None:
        """Unload and forget a model that no repository has any more."""
        async with self._locks.of((name,)):
            if name in self._models and await on_thread(self._repositories.find, name) is None:
                ending = self._endings.withdraw(name)
                log.info("'%s' is in no repository any more", name)
                self._endings.begin(self._forget(name, ending), name)

    async def _forget(self, name: str, ending: asyncio.Task[None]) -> None:
        await ending
        if name in self._models and self._models[name].own is None and not self._models[name].departing:
            self._models.remove(name)

    def tied(self, names: Iterable[str]) -> list[list[str]]:
        """The models in groups: no loaded ensemble ties a model of one group to a model of another."""
        found: dict[int, list[str]] = {}
        reached: dict[int, set[str]] = {}  # by group, its models and those that ensembles tie to these
        group_of: dict[str, int] = {}
        for group, name in enumerate(names):
            found[group] = [name]
            reached[group] = {name, *self._users_of(frozenset((name,))), *self._models.needs(name)}
            reached[group].update(*(self._models.needs(user) for user in reached[group]))
            joined = {group_of[each] for each in reached[group] if each in group_of}
            largest = max((group, *joined), key=lambda each: len(reached[each]))
            for other in sorted({group, *joined} - {largest}):
                found[largest] += found.pop(other)
                reached[largest] |= (moved := reached.pop(other))
                group_of.update(dict.fromkeys(moved, largest))
            if largest == group:
                group_of.update(dict.fromkeys(reached[group], group))
        return list(found.values())

    # -- the end --

    def crowd(self, name: str) -> str:
        """A sentence about the replaced versions that a load of this model would wait for; empty if it would not."""
        return self._endings.crowd(name) if self._endings.is_crowded(name) else ""

    def stop(self) -> None:
        """Refuse loads and unloads from now on; running warm-ups end, and with them their loads."""
        self._stopping = True
        for loading in set(self._made_in.values()):
            loading.halt(loading.candidates, STOPPED)
        for request in self._looking:
            for halt in request.halts.values():
                halt.set(STOPPED)

    async def close(self) -> None:
        """Unload everything, ensembles before the models of their steps; accepted requests finish first."""
        self.stop()
        self._endings.close()
        await self._locks.idle()
        for names in reversed(self._models.layers()):
            parts = slices(names)  # requests that came before are answered meanwhile
            for ending in [self._endings.withdraw(name) async for part in parts for name in part]:
                await ending
        await self._endings.all()

    def _refuse_when_stopping(self) -> None:
        if self._stopping:
            raise Unavailable("the server is stopping: models are not loaded or unloaded any more")


async def _join(outer: Loading, wanted: frozenset[str], asked_by: str) -> dict[str, Failure]:
    """Wait for models that a running load makes together with `asked_by`, which calls them."""
    try:
        with outer.waiting(wanted, asked_by):
            for name in wanted:
                await outer.done(name)
    except Deadlock as circle:
        raise _circle(wanted, asked_by, circle) from None
    return {name: outer.failures[name] for name in wanted if name in outer.failures}


def _not_allowed(wanted: Iterable[str]) -> Denied:
    """The error does not name the step, since the caller must not learn that such a model exists."""
    shown = ", ".join(f"'{name}'" for name in sorted(wanted))
    return Denied(
        Status.PERMISSION_DENIED,
        f"the token does not allow the model of a step of ensemble {shown}: a load needs the right to all of them",
    )


def _circle(names: Iterable[str], asked_by: str, circle: Deadlock) -> Unavailable:
    shown = _shown(names)
    if not asked_by:
        return Unavailable(f"a model that is loaded waits for {shown}, whose load waits for that model")
    waits = [f" waits for that of {_shown(each)}, which" for each in circle.between if not each.issuperset(names)]
    return Unavailable(
        f"model '{asked_by}' asks for {shown} while it is loaded itself, and the load of {shown}{''.join(waits)} waits "
        f"for that of '{asked_by}'"
    )


def _shown(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names))
