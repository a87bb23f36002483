"""Reads models for a load: their files, and their configurations unless these are known."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Semaphore
from types import MappingProxyType
from typing import Final

from inferd.server.engine import config as configuration
from inferd.server.engine.housekeeping.threads import on_thread
from inferd.server.engine.loading.candidates import Candidate, Maker
from inferd.server.engine.loading.overrides import NOTHING, Override, write_files
from inferd.server.engine.loading.room import Room
from inferd.server.engine.models.registry import Models
from inferd.server.engine.repository.folders import CONFIGURATION, REST, Marks, ModelFolder, marks
from inferd.server.engine.repository.sources import Repositories
from inferd.server.errors import ConfigError, Exhausted

Listed = Mapping[str, ModelFolder]
"""Models that a scan has just found, by name."""

_NO_MARKS: Final[Marks] = MappingProxyType({})


class Reader:
    """Makes candidates of the models in the repositories. Used on the event loop only.

    Args:
        repositories: the sources of models.
        models: the registry.
        maker: prepares configurations.
        threads: how many threads may read the versions of one model at a time.
    """

    def __init__(self, repositories: Repositories, models: Models, maker: Maker, threads: int) -> None:
        self._repositories = repositories
        self._models = models
        self._maker = maker
        self._threads = threads

    async def candidates(
        self, names: Iterable[str], overrides: Mapping[str, Override], listed: Listed, room: Room
    ) -> list[Candidate]:
        """Read these models, each in a place of `room`; those that no repository has are left out.

        Args:
            names: of the models.
            overrides: of some of them, in place of the repository's content.
            listed: those that a scan has just found; others are searched.
            room: has the places.
        """
        found = await room.work_all({name: self._reading(name, overrides, listed, room) for name in names})
        return [candidate for candidate in found if candidate is not None]

    def _reading(
        self, name: str, overrides: Mapping[str, Override], listed: Listed, room: Room
    ) -> Callable[[], Candidate | None]:
        override = overrides.get(name, NOTHING)
        known: tuple[configuration.Prepared | None, Marks] = None, _NO_MARKS
        if override is NOTHING and name in self._models:
            state = self._models[name]
            if state.is_own and state.is_complete:
                known = state.own, state.marks
        return partial(self._read, name, override, listed.get(name), *known, self._each(room, name))

    def _each(self, room: Room, name: str) -> configuration.Each:
        """Divides work between the thread that has a place for this model, and others as they get places."""
        loop = asyncio.get_running_loop()

        def each(work: Callable[[int], None], numbers: Sequence[int]) -> None:
            if len(numbers) == 1:
                work(numbers[0])
                return
            left, done = deque(numbers), Semaphore(0)
            waiting: dict[asyncio.Task[None] | None, None] = {}

            def run() -> None:
                with suppress(IndexError):
                    while True:
                        number = left.popleft()
                        try:
                            work(number)
                        finally:  # the first thread waits for all, even if one raises
                            done.release()

            async def take_part() -> None:
                if left:
                    waiting[asyncio.current_task()] = None
                    async with room.place(name):
                        waiting.pop(asyncio.current_task(), None)
                        await on_thread(run)

            def send_away() -> None:
                for task in waiting:
                    if task is not None:
                        task.cancel()

            helpers = min(len(numbers), self._threads) - 1
            for _ in range(helpers):
                asyncio.run_coroutine_threadsafe(take_part(), loop)
            run()
            if helpers > 0:
                loop.call_soon_threadsafe(send_away)  # cancels helpers that still wait for a place
            for _ in numbers:
                done.acquire()

        return each

    def _read(
        self,
        name: str,
        override: Override,
        listed: ModelFolder | None,
        own: configuration.Prepared | None,
        seen: Marks,
        each: configuration.Each,
    ) -> Candidate | None:
        """The model of its repository or of an override; with `own` as its configuration if its marks are those
        `seen`."""
        holder = None
        try:
            folder = self._repositories.find(name) if listed is None else self._repositories.brought(listed)
            if override.files:
                folder, holder = write_files(name, override.files)
            if folder is None:
                return None
            candidate = Candidate(name, folder, marks(folder), holder, is_own=override is NOTHING)
        except (ConfigError, Exhausted) as error:
            if holder is not None:
                holder.cleanup()
            candidate = Candidate(name, ModelFolder(name, Path(name), Path()), {})
            candidate.problem = candidate.why(error)
            return candidate
        if own is not None and candidate.marks == seen and not folder.problem:
            candidate.own = own
        else:
            candidate.prepare(self._maker, override.config, _unchanged(own, seen, candidate.marks), each)
        return candidate


def _unchanged(
    own: configuration.Prepared | None, seen: Marks, marks: Marks
) -> Mapping[int, configuration.VersionConfig]:
    """The configurations of versions whose marks are still those `seen`."""
    if own is None or any(seen.get(part) != marks.get(part) for part in (CONFIGURATION, REST)):
        return {}
    return {version: own.of(version) for version in own.by_version if seen.get(str(version)) == marks.get(str(version))}
