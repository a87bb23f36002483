"""Reads models that are to be loaded: their files, and their configurations unless these are known already."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Semaphore

from server.engine import config as configuration
from server.engine.housekeeping.threads import on_thread
from server.engine.loading.candidates import Candidate, Maker
from server.engine.loading.overrides import NOTHING, Override, write_files
from server.engine.loading.room import Room
from server.engine.models.registry import Models, ModelState
from server.engine.repository.folders import CONFIGURATION, REST, Marks, ModelFolder, marks
from server.engine.repository.sources import Repositories
from server.errors import ConfigError


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

    async def candidate(self, name: str, override: Override, room: Room) -> Candidate | None:
        """Read one model, in a place of `room`; None if no repository has it."""
        state = self._models[name] if name in self._models else ModelState()
        may_stay = override is NOTHING and state.is_own and state.is_complete
        known = (state.own, state.marks) if may_stay else (None, {})
        return await room.work(name, partial(self._read, name, override, *known, self._each(room, name)))

    def _each(self, room: Room, name: str) -> configuration.Each:
        """Divides work between the thread that has a place for this model, and others as they get places."""
        loop = asyncio.get_running_loop()

        def each(work: Callable[[int], None], numbers: Sequence[int]) -> None:
            left, done = deque(numbers), Semaphore(0)
            waiting: set[asyncio.Task[None] | None] = set()

            def run() -> None:
                with suppress(IndexError):
                    while True:
                        number = left.popleft()
                        try:
                            work(number)
                        finally:  # the first thread waits for all, whatever one raises
                            done.release()

            async def take_part() -> None:
                if left:
                    waiting.add(asyncio.current_task())
                    async with room.place(name):
                        waiting.discard(asyncio.current_task())
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
        own: configuration.Prepared | None,
        seen: Marks,
        each: configuration.Each,
    ) -> Candidate | None:
        """The model of its repository or of an override; with `own` as its configuration if its marks are those
        `seen`."""
        holder = None
        try:
            folder = self._repositories.find(name)
        except ConfigError as error:
            return Candidate(name, ModelFolder(name, Path(name), Path()), {}, problem=str(error))
        if override.files:
            folder, holder = write_files(name, override.files)
        if folder is None:
            return None
        candidate = Candidate(name, folder, marks(folder), holder, is_own=override is NOTHING)
        if own is not None and candidate.marks == seen:
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
