"""Decides when models are loaded and unloaded: once, on demand, or as the repositories change."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from inferd._native.model_files import Watch
from inferd.server.engine.housekeeping.threads import on_thread
from inferd.server.engine.loading.candidates import Failure
from inferd.server.engine.loading.lifecycle import Lifecycle
from inferd.server.engine.repository.sources import Repositories
from inferd.server.errors import ServerError
from inferd.server.settings import DEFAULTS

log = logging.getLogger("inferd.repository")

CHANGES: Final = 64
"""The most concurrent changes of polls: each has a lock, against which further locks are checked."""

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
        budget: bytes of files that loaded models may have in the mode LAZY; None: any number.
    """

    mode: ControlMode = ControlMode.NONE
    load: tuple[str, ...] = ()
    poll_seconds: float = DEFAULTS.repository_poll_secs
    budget: int | None = None

    def at_start(self, present: Iterable[str]) -> tuple[str, ...]:
        """The models to load at the start: of those present, and named ones that may be missing."""
        if self.mode in (ControlMode.EXPLICIT, ControlMode.LAZY) and self.load != (ALL,):
            return self.load
        return tuple(present)


class Poller:
    """Looks at the repositories every few seconds, and loads and unloads models that have changed.

    Changes are independent: a model that loads or downloads slowly delays only the models that ensembles tie to it, and
    no look waits for it. The look after its end finds further changes.

    A model that fails to load is tried again after its next change, an ensemble also after one of a model of its steps;
    a model that could not be read, whose load could not begin, or for which the server lacked a resource, at the next
    look.
    """

    def __init__(self, repositories: Repositories, lifecycle: Lifecycle, seconds: float) -> None:
        self._repositories = repositories
        self._lifecycle = lifecycle
        self._seconds = seconds
        self._seen: dict[str, object] = {}  # the state of each model at the last look
        self._watch = Watch()
        self._task: asyncio.Task[None] | None = None
        self._changes: dict[asyncio.Task[None], frozenset[str]] = {}  # running ones, each with its models
        self._crowds: set[str] = set()  # sentences of the last look about models whose changes have to wait
        self._places = asyncio.Semaphore(CHANGES)
        self._unreached: set[str] = set()
        repositories.unreached = self._unreached

    async def remember(self) -> None:
        """Remember the present state of all models, before they are found and loaded."""
        self._seen = await on_thread(self._repositories.look, self._watch)

    def start(self, failures: Mapping[str, Failure]) -> None:
        """Begin to look every few seconds, after these failures of the first load."""
        self._try_again(failures)
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop looking, and end a running look. A running load continues."""
        self._watch.end()
        tasks = {*self._changes, *((self._task,) if self._task is not None else ())}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            try:
                for change in await self._begin():
                    change.add_done_callback(_log)
            except ServerError as error:
                log.error("%s", error)
            except Exception:
                log.exception("the model repositories could not be polled")

    async def look(self) -> None:
        """Look once, and return when each model that has changed was loaded or has failed."""
        if changes := await self._begin():
            await asyncio.wait(changes)
        for change in changes:
            change.result()

    async def _begin(self) -> list[asyncio.Task[None]]:
        """Look once, and begin what has changed: tasks for models that are not tied to each other."""
        seen = await on_thread(self._repositories.look, self._watch)
        before, self._seen = self._seen, seen
        under_way = frozenset().union(*self._changes.values())
        changes: list[asyncio.Task[None]] = []
        for name in before.keys() - seen.keys():
            if name in under_way:
                self._look_again((name,), before)
            else:
                changes.append(self._change(self._remove(name, before), (name,)))
        changed: list[str] = []
        told, self._crowds = self._crowds, set()
        different = {name for name, found in seen.items() if before.get(name) != found}
        different |= self._lifecycle.failed_users_of(different) & seen.keys()
        for names in self._lifecycle.tied(sorted(different)):
            crowds = {crowd for name in names if (crowd := self._lifecycle.crowd(name))}
            self._crowds |= crowds
            for crowd in sorted(crowds - told):
                log.warning("%s; what has changed waits for one of them", crowd)
            if crowds or not under_way.isdisjoint(names):
                self._look_again(names, before)
            else:
                changed += names
                changes.append(self._change(self._load(names, before), names))
        if changed:
            log.info("changed in the repositories: %s", ", ".join(sorted(changed)))
        return changes

    def _change(self, work: Coroutine[Any, Any, None], names: Iterable[str]) -> asyncio.Task[None]:
        change = asyncio.create_task(work)
        self._changes[change] = frozenset(names)
        change.add_done_callback(self._changes.pop)
        return change

    async def _remove(self, name: str, before: Mapping[str, object]) -> None:
        try:
            await self._lifecycle.remove(name)
        except (ServerError, OSError) as error:
            log.error("'%s' is not in the repositories any more, but could not be unloaded yet: %s", name, error)
            self._look_again((name,), before)

    async def _load(self, names: Iterable[str], before: Mapping[str, object]) -> None:
        try:
            async with self._places:
                self._try_again(await self._lifecycle.load(names))
        except BaseException:
            self._look_again(names, before)
            raise

    def _try_again(self, failures: Mapping[str, Failure]) -> None:
        """Have the next look treat as changed the models whose failures were not their files' fault."""
        for name, failure in failures.items():
            if name in self._seen and (failure.lacks or name in self._unreached):
                self._seen[name] = None

    def _look_again(self, names: Iterable[str], before: Mapping[str, object]) -> None:
        """Have the next look treat these models as changed."""
        for name in names:
            self._seen.pop(name, None)
            if name in before:
                self._seen[name] = before[name]


def _log(change: asyncio.Task[None]) -> None:
    """Log why a change could not be made."""
    error = None if change.cancelled() else change.exception()
    if isinstance(error, ServerError):
        log.error("%s", error)
    elif error is not None:
        log.error("a change of the model repositories could not be made", exc_info=error)
