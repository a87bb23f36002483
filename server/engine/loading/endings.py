"""The ends of versions: nothing new finds them, and what they have accepted is finished.

A version with live sequences departs first: requests of these find it until they have ended or their time is over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from backends.api import BackendError
from server.engine.housekeeping.threads import on_thread
from server.engine.instances.warmup import Halt
from server.engine.models.registry import UNAVAILABLE, UNLOADED, UNLOADING, Departing, Models
from server.engine.models.version import LoadedVersion

log = logging.getLogger("inferd.engine")

End = Callable[[LoadedVersion], Awaitable[None]]

MOST_REPLACED = 2
"""Of one model that finish their requests, while it is not made anew: each keeps its instances and their memory."""


class Endings:
    """What happens to what is not served any more. Used on the event loop only.

    Args:
        models: what there is.
        drained: returns when no sequence is open on a version that drains.
        end: finishes what a version has accepted and closes it; returns when it is over.
    """

    def __init__(self, models: Models, drained: End, end: End) -> None:
        self._models = models
        self._drained = drained
        self._end = end
        self._tasks: dict[asyncio.Task[None], str] = {}  # the ends that are under way: of which model
        self._replaced: dict[str, set[asyncio.Task[None]]] = {}  # by model: the ends of what served at a time
        self._closing = False

    def withdraw(self, name: str) -> asyncio.Task[None]:
        """Have requests find nothing of the model from now on; the task ends with the last request."""
        state = self._models[name]
        old = state.loaded
        versions = {version: entry.loaded for version, entry in old.items() if entry.loaded is not None}
        for entry in state.versions.values():
            entry.state, entry.reason = (UNLOADING, "") if entry.loaded else (UNAVAILABLE, UNLOADED)
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
            for entry in old.values():
                entry.state, entry.reason = UNAVAILABLE, UNLOADED
            if override is not None:
                await on_thread(override.cleanup)
            if count:
                log.info("successfully unloaded '%s'", name)

        return self.begin(end(), name, serves=self._is_waited_for(name, versions.values()))

    def replaced(self, name: str, old: Iterable[LoadedVersion], cleanup: Callable[[], object] | None) -> None:
        """No request finds these any more: let them end, then call `cleanup` on a thread."""
        versions = tuple(old)
        self._depart(name, versions)

        ends = [self._see_out(name, version) for version in versions]  # each lets go of its version

        async def end() -> None:
            await asyncio.gather(*ends)
            if cleanup is not None:
                await on_thread(cleanup)

        if versions or cleanup is not None:
            self.begin(end(), name, serves=self._is_waited_for(name, versions))

    def _is_waited_for(self, name: str, old: Iterable[LoadedVersion]) -> bool:
        """Whether these count among MOST_REPLACED: not those with sequences, which go on for a time that is bounded."""
        departing = {each.loaded for each in self._models[name].departing}
        return any(version not in departing for version in old)

    async def room_for(self, name: str, halt: Halt, *, waits: bool) -> None:
        """Return when few enough of what was replaced of the model before are left.

        Args:
            halt: ends the wait.
            waits: else there must be room now.

        Raises:
            BackendError: the load is to end, or there is no room.
        """
        told = False
        while len(left := self._replaced.get(name, ())) >= MOST_REPLACED:
            if not waits:
                raise BackendError(
                    f"'{name}' was replaced {len(left)} times, and what was before still finishes its requests: a "
                    "load that a model asks for does not wait for them, try again"
                )
            if not told:
                log.info("'%s' is loaded when one of %d has ended that were replaced before", name, len(left))
                told = True
            halted = asyncio.create_task(halt.wait())
            await asyncio.wait({*left, halted}, return_when=asyncio.FIRST_COMPLETED)
            halted.cancel()
            halt.check()

    def hurry(self, name: str) -> None:
        """Have the sequences of the model that still go on end now."""
        for departing in self._models[name].departing:
            departing.end()

    def close(self) -> None:
        """From now on no sequence goes on where its model is not served any more; those that do end now."""
        self._closing = True
        for name in self._models:
            self.hurry(name)

    async def all(self) -> None:
        """Return when everything has ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def is_crowded(self, name: str) -> bool:
        """Whether a load of this model would have to wait for what it was before."""
        return len(self._replaced.get(name, ())) >= MOST_REPLACED

    def passed(self, name: str, version: LoadedVersion) -> None:
        """This one still serves, but requests that name no version find a later one from now on."""

        async def end() -> None:
            await self._let_go_on(name, departing)

        if version.sequences and version.drain_seconds and not self._closing:
            departing = Departing(version)
            self._models[name].departing.insert(0, departing)
            self.begin(end(), name)

    def _depart(self, name: str, versions: Iterable[LoadedVersion]) -> None:
        """Have requests of sequences still find these, from the next time on that the model is published."""
        state = self._models[name]
        for version in sorted(versions, key=lambda each: each.version):
            for before in [each for each in state.departing if each.loaded is version]:  # see `passed`
                state.departing.remove(before)
                before.end()
            if version.sequences and version.drain_seconds and not self._closing:
                version.drain()
                state.departing.insert(0, Departing(version))

    async def _see_out(self, name: str, version: LoadedVersion) -> None:
        """Let sequences go on, then close the version; returns when it is over."""
        departing = next((each for each in self._models[name].departing if each.loaded is version), None)
        if departing is not None:
            log.info("'%s' version %d: %d sequences go on", name, version.version, version.sequences)
            await self._let_go_on(name, departing)
        if version.sequences:
            log.warning("'%s' version %d: %d sequences are ended", name, version.version, version.sequences)
            for successor in self._models.versions(name):
                successor.succeed(version)
        await self._end(version)

    async def _let_go_on(self, name: str, departing: Departing) -> None:
        """Return when the sequences have ended, or their time is over; requests do not find them any more then."""
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
        """Instances of the model have been told to end: let `wait` wait for it, on a thread; done when they have."""
        return self.begin(on_thread(wait), name)

    def refuse(self, name: str, problem: str) -> None:
        """Have no request find the model any more, for this reason."""
        self.withdraw(name)
        state = self._models[name]
        state.versions, state.problem = {}, problem
        self._models.publish(name)

    def begin(self, work: Coroutine[Any, Any, None], name: str, *, serves: bool = False) -> asyncio.Task[None]:
        """Have an end come; of what still `serves` requests that it has accepted, so that it may take long."""
        task = asyncio.create_task(work)
        self._tasks[task] = name
        if serves:
            self._replaced.setdefault(name, set()).add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        name = self._tasks.pop(task)
        if task in self._replaced.get(name, ()):
            self._replaced[name].discard(task)
            if not self._replaced[name]:
                del self._replaced[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("'%s' did not end well", name, exc_info=error)
