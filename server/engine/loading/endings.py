"""The ends of versions: new requests do not find them, and accepted requests finish.

A version with live sequences departs first: requests of these find it until they have ended or their time is over.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from inferd.backends.api import BackendError
from inferd.server.engine import config as configuration
from inferd.server.engine.housekeeping.threads import on_thread
from inferd.server.engine.instances.warmup import Halt
from inferd.server.engine.models.registry import UNAVAILABLE, UNLOADED, UNLOADING, Departing, Models
from inferd.server.engine.models.version import LoadedVersion
from inferd.server.errors import Unavailable

log = logging.getLogger("inferd.engine")

End = Callable[[LoadedVersion], Awaitable[None]]

MOST_REPLACED = 2
"""The most replaced versions of one model that still finish their requests; each keeps its instances and memory."""
LOOK_SECONDS = 45.0
"""Seconds for which a client's load waits for replaced versions; other loads wait on, and the log names the instances.

Longer than the usual `stub-timeout-seconds`, after which a worker is ended that executes what everybody has given up,
and shorter than the time that `inferd models load` gives a load: so the user of that command sees the error.
"""


@dataclass(frozen=True)
class _End:
    """A running end of versions of one model.

    Attributes:
        versions: weak references to the versions that it ends.
        steps: models that these need until they have ended; they are ensembles.
        is_waited_for: it counts for MOST_REPLACED. The end of versions with sequences does not: its time is bounded.
    """

    versions: list[weakref.ref[LoadedVersion]]
    steps: frozenset[str]
    is_waited_for: bool


class Endings:
    """Ends versions that are no longer served. Used on the event loop only.

    Args:
        models: the registry.
        drained: returns when the last sequence on a draining version has ended.
        end: finishes the accepted requests of a version and closes it.
    """

    def __init__(self, models: Models, drained: End, end: End) -> None:
        self._models = models
        self._drained = drained
        self._end = end
        self._tasks: dict[asyncio.Task[None], str] = {}  # all that runs, each with its model's name
        self._ends: dict[str, dict[asyncio.Task[None], _End]] = {}  # those of versions, by model
        self._above: dict[str, dict[asyncio.Task[None], None]] = {}  # those of ensembles, by the models of their steps
        self._closing = False

    def withdraw(self, name: str) -> asyncio.Task[None]:
        """Hide a model from requests; the task ends with its last request."""
        state = self._models[name]
        versions = {version: entry.loaded for version, entry in state.loaded.items() if entry.loaded is not None}
        is_ending = name in self._ends  # what was unloaded or replaced before
        for entry in state.versions.values():
            entry.state, entry.reason = (UNLOADING, "") if entry.loaded or is_ending else (UNAVAILABLE, UNLOADED)
            entry.loaded = None
        override, state.override = state.override, None
        state.own = state.prepared = state.folder = None
        state.problem, state.explicit, state.is_own, state.marks = "", False, True, {}
        self._depart(name, versions.values())
        self._models.publish(name)
        for version in versions:
            self._models.announce(name, version, False)

        count = len(versions)
        ends = [self._see_out(name, version) for version in versions.values()]  # each lets go of its version

        async def end() -> None:
            await asyncio.gather(*ends)
            if override is not None:
                await on_thread(override.cleanup)
            if count:
                log.info("successfully unloaded '%s'", name)

        return self._begin_end(end(), name, versions.values())

    def replaced(self, name: str, old: Iterable[LoadedVersion], cleanup: Callable[[], object] | None) -> None:
        """End versions that new requests do not find any more, then call `cleanup` on a thread."""
        versions = tuple(old)
        self._depart(name, versions)

        ends = [self._see_out(name, version) for version in versions]  # each lets go of its version

        async def end() -> None:
            await asyncio.gather(*ends)
            if cleanup is not None:
                await on_thread(cleanup)

        if versions or cleanup is not None:
            self._begin_end(end(), name, versions)

    def _begin_end(
        self, work: Coroutine[Any, Any, None], name: str, old: Collection[LoadedVersion]
    ) -> asyncio.Task[None]:
        """Run the end of these versions."""
        task = self.begin(work, name)
        departing = {each.loaded for each in self._models[name].departing if each.loaded.sequences}
        steps = frozenset[str]().union(*(configuration.models_of(version.spec) for version in old))
        self._ends.setdefault(name, {})[task] = _End(
            [weakref.ref(version) for version in old], steps, any(version not in departing for version in old)
        )
        for step in steps:
            self._above.setdefault(step, {})[task] = None
        return task

    def above(self, name: str) -> list[asyncio.Task[None]]:
        """The running ends of ensembles whose accepted requests may still need this model."""
        return list(self._above.get(name, ()))

    def _replaced(self, name: str) -> dict[asyncio.Task[None], _End]:
        """The running ends that a load of this model waits for, if they are too many."""
        return {task: end for task, end in self._ends.get(name, {}).items() if end.is_waited_for}

    async def room_for(self, names: Collection[str], halts: Mapping[str, Halt], *, bounded: bool) -> None:
        """Return when none of these models is crowded; a model whose halt was set does not count.

        Args:
            bounded: the wait ends after LOOK_SECONDS.

        Raises:
            Unavailable: that time is over.
        """
        while left := [name for name in names if self.is_crowded(name) and not halts[name].is_set]:
            for name in left:
                log.warning("%s; the load waits for one of them", self.crowd(name))
            ends = {end for name in left for end in self._replaced(name)}
            halted = {asyncio.create_task(halts[name].wait()) for name in left}
            ended, _ = await asyncio.wait(ends | halted, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            for each in halted:
                each.cancel()
            if not ended and bounded:
                raise Unavailable(
                    f"{'; '.join(map(self.crowd, left))}; the load has waited {LOOK_SECONDS:g} s for one of them: try "
                    "again when one has ended, or end the process that hangs"
                )

    def require_room(self, name: str) -> None:
        """Raise BackendError if the model is crowded, and a load of it cannot wait."""
        if self.is_crowded(name):
            raise BackendError(f"{self.crowd(name)}; a load that a model asks for does not wait for them, try again")

    def crowd(self, name: str) -> str:
        """A sentence about the versions of a crowded model that end, with their instances and processes."""
        ends = self._replaced(name)
        versions = [version for end in ends.values() for each in end.versions if (version := each()) is not None]
        working = [instance for version in versions for instance in version.working()]
        return (
            f"'{name}' was replaced or unloaded {len(ends)} times, and what was before still finishes its requests"
            f"{': ' if working else ''}{', '.join(working)}"
        )

    def hurry(self, name: str) -> None:
        """End the sequences on the model's departing versions now."""
        for departing in self._models[name].departing:
            departing.end()

    def close(self) -> None:
        """End the sequences on all departing versions, now and from now on."""
        self._closing = True
        for name in self._models:
            self.hurry(name)

    async def all(self) -> None:
        """Return when all ends are over."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def is_crowded(self, name: str) -> bool:
        """Whether a load of this model would have to wait for replaced versions of it."""
        return len(self._replaced(name)) >= MOST_REPLACED

    def passed(self, name: str, version: LoadedVersion) -> None:
        """A version is no longer the latest: requests without a version find a later one."""

        async def end() -> None:
            await self._let_go_on(name, departing)

        if version.sequences and version.drain_seconds and not self._closing:
            departing = Departing(version)
            self._models[name].departing.insert(0, departing)
            self.begin(end(), name)

    def _depart(self, name: str, versions: Iterable[LoadedVersion]) -> None:
        """From the next `publish` on, let only requests of sequences find these versions."""
        state = self._models[name]
        for version in sorted(versions, key=lambda each: each.version):
            for before in [each for each in state.departing if each.loaded is version]:  # see `passed`
                state.departing.remove(before)
                before.end()
            if version.has_sequences and version.drain_seconds and not self._closing:
                state.departing.insert(0, Departing(version))  # until then a sequence may begin on it

    async def _see_out(self, name: str, version: LoadedVersion) -> None:
        """Let sequences continue, then close the version; return when it is closed."""
        departing = next((each for each in self._models[name].departing if each.loaded is version), None)
        if departing is not None:
            version.drain()  # its successor has been published: new sequences begin there
            if version.sequences:
                log.info("'%s' version %d: %d sequences go on", name, version.version, version.sequences)
            await self._let_go_on(name, departing)
        if version.sequences:
            log.warning("'%s' version %d: %d sequences are ended", name, version.version, version.sequences)
            for successor in self._models.versions(name):
                successor.succeed(version)
        await self._end(version)

    async def _let_go_on(self, name: str, departing: Departing) -> None:
        """Return when the sequences have ended, or their time is over; then no request finds the version."""
        drained = asyncio.ensure_future(self._drained(departing.loaded))
        try:
            await asyncio.wait(
                (drained, departing.stop),
                timeout=departing.loaded.drain_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            drained.cancel()
        state = self._models[name]
        if departing in state.departing:
            state.departing.remove(departing)
            self._models.publish(name)

    def leaving(self, name: str, wait: Callable[[], None]) -> asyncio.Task[None]:
        """Call `wait`, which waits for instances that were told to end, on a thread; the task ends with it."""
        return self.begin(on_thread(wait), name)

    def refuse(self, name: str, problem: str) -> None:
        """Hide a model from requests, which get this reason."""
        self.withdraw(name)
        state = self._models[name]
        state.versions, state.problem = {}, problem
        self._models.publish(name)

    def begin(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run an end as a task."""
        task = asyncio.create_task(work)
        self._tasks[task] = name
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        name = self._tasks.pop(task)
        if (end := self._ends.get(name, {}).pop(task, None)) is not None:
            for step in end.steps:
                del self._above[step][task]
                if not self._above[step]:
                    del self._above[step]
            if not self._ends[name]:
                del self._ends[name]
                self._settle(name)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("'%s' did not end well", name, exc_info=error)

    def _settle(self, name: str) -> None:
        """The last end of a model is over: its versions that were not loaded again are not there any more."""
        for entry in self._models[name].versions.values() if name in self._models else ():
            if entry.state == UNLOADING:
                entry.state, entry.reason = UNAVAILABLE, UNLOADED
