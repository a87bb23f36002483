"""Decides when models are loaded and unloaded: once, on demand, or as the repositories change."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from _native.model_files import Watch
from server.engine.housekeeping.threads import on_thread
from server.engine.loading.candidates import Failure
from server.engine.loading.lifecycle import Lifecycle
from server.engine.repository.sources import Repositories
from server.errors import ServerError

log = logging.getLogger("inferd.repository")

ALL = "*"
"""Stands for every model of the repositories."""


class ControlMode(enum.Enum):
    """tritonserver's --model-control-mode."""

    NONE = "none"  # load every model at the start
    EXPLICIT = "explicit"  # load named models, at the start or later
    POLL = "poll"  # load every model at the start, and changed ones later
    LAZY = "lazy"  # load named models at the start, others at their first request


@dataclass(frozen=True, slots=True)
class ModelControl:
    """The mode and limits of loading models.

    Attributes:
        mode: see ControlMode.
        load: names of models to load at the start in the modes EXPLICIT and LAZY; ALL for every model.
        poll_seconds: seconds between two looks at the repositories in the mode POLL.
        budget: bytes of files that loaded models may have in the mode LAZY; 0 for any number.
    """

    mode: ControlMode = ControlMode.NONE
    load: tuple[str, ...] = ()
    poll_seconds: float = 15.0
    budget: int = 0

    def at_start(self, present: Iterable[str]) -> tuple[str, ...]:
        """The models to load at the start: of those present, and named ones that may be missing."""
        if self.mode in (ControlMode.EXPLICIT, ControlMode.LAZY) and self.load != (ALL,):
            return self.load
        return tuple(present)


class Poller:
    """Looks at the repositories every few seconds, and loads and unloads models that have changed.

    A model that fails to load is tried again after its next change; a model that could not be read, whose load could
    not begin, or for which the server lacked something, at the next look.
    """

    def __init__(self, repositories: Repositories, lifecycle: Lifecycle, seconds: float) -> None:
        self._repositories = repositories
        self._lifecycle = lifecycle
        self._seconds = seconds
        self._seen: dict[str, object] = {}  # the state of each model at the last look
        self._watch = Watch()
        self._task: asyncio.Task[None] | None = None
        self._unreached: set[str] = set()
        repositories.unreached = self._unreached

    async def remember(self) -> None:
        """Remember the present state of all models, which are about to be found and loaded."""
        self._seen = await on_thread(self._repositories.look, self._watch)

    def start(self, failures: Mapping[str, Failure]) -> None:
        """Begin to look every few seconds, after these failures of the first load."""
        self._try_again(failures)
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop looking, and end a look that is under way. A running load goes on."""
        self._watch.end()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            try:
                await self.look()
            except ServerError as error:
                log.error("%s", error)
            except Exception:
                log.exception("the model repositories could not be polled")

    async def look(self) -> None:
        """Look once, and return when each changed model was loaded or has failed."""
        seen = await on_thread(self._repositories.look, self._watch)
        before, self._seen = self._seen, seen
        for name in before.keys() - seen.keys():
            try:
                await self._lifecycle.remove(name)
            except (ServerError, OSError) as error:
                log.error("'%s' is not in the repositories any more, but could not be unloaded yet: %s", name, error)
                self._look_again(name, before)
        changed = sorted(name for name, found in seen.items() if before.get(name) != found)
        for name in filter(self._lifecycle.is_crowded, tuple(changed)):  # at the next look: others shall not wait
            changed.remove(name)
            self._look_again(name, before)
        if changed:
            log.info("changed in the repositories: %s", ", ".join(changed))
            try:
                self._try_again(await self._lifecycle.load(changed))
            except BaseException:
                for name in changed:
                    self._look_again(name, before)
                raise

    def _try_again(self, failures: Mapping[str, Failure]) -> None:
        """Have the next look treat models as changed whose failures say nothing about their files."""
        for name, failure in failures.items():
            if name in self._seen and (failure.lacks or name in self._unreached):
                self._seen[name] = None

    def _look_again(self, name: str, before: Mapping[str, object]) -> None:
        """Have the next look treat this model as changed."""
        self._seen.pop(name, None)
        if name in before:
            self._seen[name] = before[name]
