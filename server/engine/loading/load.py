"""One load: it makes its candidates, which then take over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from inferd.backends.api import BackendError, InstanceSpec
from inferd.server.engine import config as configuration
from inferd.server.engine.config.parameters import VERSION_LABELS
from inferd.server.engine.housekeeping.threads import on_thread
from inferd.server.engine.loading.candidates import Candidate, Failure, Maker
from inferd.server.engine.loading.endings import Endings
from inferd.server.engine.loading.model_locks import Deadlock, ModelLock
from inferd.server.engine.loading.room import Room
from inferd.server.engine.models.registry import LOADING, READY, UNAVAILABLE, Models, ModelState, VersionState
from inferd.server.engine.repository.folders import REST
from inferd.server.errors import ServerError
from inferd_client.pb import model_config_pb2 as pb

log = logging.getLogger("inferd.engine")


class Loading:
    """The load of candidates that belong together, or were requested together.

    A model is reloaded only when few of its replaced versions are left. With `waits`, the lifecycle has waited for
    that; without, the load may fail. Candidates that ensembles tie together form a part. A part is made as a whole, and
    then takes over at once: no new request reaches a new step through an old ensemble, but a request between two steps
    may.
    """

    def __init__(
        self,
        models: Models,
        maker: Maker,
        lock: ModelLock,
        candidates: dict[str, Candidate],
        room: Room,
        *,
        waits: bool,
        is_wanted: Callable[[], bool],
    ) -> None:
        self._waits = waits
        self.is_wanted = is_wanted  # whether requests wait for it
        self.lock = lock
        self.candidates = candidates
        self.failures: dict[str, Failure] = {}
        self.leaving: list[asyncio.Task[None]] = []  # the ends of removed instances
        self._models = models
        self._maker = maker
        self.room = room
        self._parts: dict[str, asyncio.Task[None]] = {}
        self._planned = asyncio.Event()  # the parts are known, or there will be none
        self._part_waits: list[tuple[asyncio.Task[None], asyncio.Task[None]]] = []  # parts that wait for another part
        self._identified: frozenset[str] = frozenset()  # candidates that need fingerprints

    async def run(self, endings: Endings) -> None:
        """Load all candidates; `failures` has those that fail."""
        try:
            await self._compose()
            if self._maker.fingerprints:
                self._identified = self._with_kept_responses()
            for names in self._tied():
                part = asyncio.create_task(self._run_part(names, endings))
                self._parts.update(dict.fromkeys(names, part))
        finally:
            self._planned.set()
        await asyncio.gather(*set(self._parts.values()))

    def halt(self, names: Iterable[str], why: str) -> None:
        """End the load of these candidates, before the next request of a warm-up; they fail for this reason."""
        for name in names:
            if name in self.candidates:
                self.candidates[name].halt.set(why)

    async def done(self, name: str) -> None:
        """Return when this candidate was loaded or has failed."""
        await self._planned.wait()
        if name in self._parts:
            await asyncio.shield(self._parts[name])

    def needed_by(self, names: Iterable[str]) -> list[str]:
        """The candidates with these names, and those that must be loaded with them: their steps and their users."""
        parts = {self._parts.get(name) for name in names}
        return [name for name, part in self._parts.items() if part in parts]

    @contextmanager
    def waiting(self, names: Iterable[str], other: str) -> Iterator[None]:
        """Inside the block, the candidate `other`, which is being made, waits for these candidates.

        Raises:
            Deadlock: one of these is in the same part as `other`, or its part waits for that part.
        """
        waits = []
        if (waiter := self._parts.get(other)) is not None:  # otherwise the earlier version of the model calls
            awaited = {part for name in names if (part := self._parts.get(name)) is not None}
            self._refuse_circle(awaited, waiter)
            waits = [(waiter, each) for each in awaited]
        self._part_waits.extend(waits)
        try:
            yield
        finally:
            for wait in waits:
                self._part_waits.remove(wait)

    def _refuse_circle(self, awaited: Iterable[asyncio.Task[None]], waiter: asyncio.Task[None]) -> None:
        seen, left = set[asyncio.Task[None]](), list(awaited)
        while left:
            part = left.pop()
            if part is waiter:
                raise Deadlock
            if part not in seen and not part.done():
                seen.add(part)
                left.extend(to for by, to in self._part_waits if by is part)

    # -- before anything is made --

    async def _compose(self) -> None:
        """Complete the ensembles; a candidate that cannot be served fails."""
        own = self._composed_of()
        ensembles = any(each is not None and each.spec.ensemble is not None for each in own.values())
        composed = await on_thread(configuration.compose, own) if ensembles else own
        for name, candidate in self.candidates.items():
            found = composed.get(name)
            if candidate.own is not None:
                self._models[name].steps = candidate.steps
            if candidate.own is None:
                problem = candidate.folder.shown(candidate.problem)
                self._fail(candidate, Failure(name, problem, lacks=candidate.lacks))
            elif isinstance(found, configuration.Prepared):
                candidate.prepared = found
            else:
                self._fail(candidate, Failure(name, candidate.folder.shown(str(found))))

    def _composed_of(self) -> dict[str, configuration.Prepared | None]:
        """The configurations of the candidates, and of all models in the steps of their ensembles."""
        own: dict[str, configuration.Prepared | None] = {}
        todo = list(self.candidates)
        while todo:
            name = todo.pop()
            candidate = self.candidates.get(name)
            if name in own or (candidate is None and name not in self._models):
                continue
            own[name] = (candidate.own if candidate else None) or (
                self._models[name].own if name in self._models else None
            )
            found = own[name]
            if found is not None:
                todo.extend(configuration.models_of(found.spec))
        return own

    def _fail(self, candidate: Candidate, failure: Failure) -> None:
        """A candidate fails; its earlier versions continue to serve."""
        self.failures[candidate.name] = failure
        candidate.prepared = None
        state = self._models[candidate.name]
        if not state.loaded:
            state.problem = failure.problem
            state.versions = {v: VersionState(UNAVAILABLE, reason) for v, reason in failure.versions.items()}
            self._models.publish(candidate.name)
        log.error("%s%s", failure, ": what was loaded before still serves" if state.loaded else "")

    def _tied(self) -> list[list[str]]:
        """The candidates in parts that have no step in common; steps come before their ensembles."""
        part_of: dict[str, list[str]] = {}
        for name in self._ordered():
            joined = {id(part): part for step in self.candidates[name].steps if (part := part_of.get(step))}
            largest, *others = sorted(joined.values(), key=len, reverse=True) or [[]]
            for moved in (*others, [name]):
                largest.extend(moved)
                part_of.update(dict.fromkeys(moved, largest))
        return list({id(part): part for part in part_of.values()}.values())

    def _ordered(self) -> list[str]:
        order: dict[str, None] = {}
        for name in self.candidates:
            self._put(name, order, frozenset())
        return list(order)

    def _put(self, name: str, order: dict[str, None], above: frozenset[str]) -> None:
        """Add a candidate to the order, after the candidates of its steps."""
        if name in order or name in above or name not in self.candidates:
            return
        for step in sorted(self.candidates[name].steps):
            self._put(step, order, above | {name})
        order[name] = None

    def _with_kept_responses(self) -> frozenset[str]:
        """The candidates on whose files cached responses depend: those with a cache, and the models in their steps."""
        prepared = {name: candidate.prepared for name, candidate in self.candidates.items()}
        found: set[str] = set()
        todo = [name for name, each in prepared.items() if each and _caches(each)]
        todo += [name for name, state in self._models.items() if state.prepared and _caches(state.prepared)]
        while todo:
            name = todo.pop()
            each = prepared[name] if name in prepared else self._models.prepared(name)
            if name not in found and each is not None:
                found.add(name)
                todo.extend(configuration.models_of(each.spec))
        return frozenset(found)

    # -- one part --

    async def _run_part(self, names: list[str], endings: Endings) -> None:
        part = [self.candidates[name] for name in names]
        makings: dict[str, asyncio.Task[None]] = {}
        if len(part) == 1:
            await self._make(part[0], makings, endings)
        else:
            for candidate in part:
                makings[candidate.name] = asyncio.create_task(self._make(candidate, makings, endings))
            await asyncio.gather(*makings.values())
        for candidate in part:  # no await: all take over in one step of the loop
            if not candidate.warms_steps:
                self._take_over(candidate, endings)
        for candidate in part:
            if candidate.warms_steps:
                await self._warm(candidate)
                self._take_over(candidate, endings)
        for candidate in part:
            for leave in candidate.leaving:
                self.leaving.append(endings.leaving(candidate.name, leave))
            if self._is_unfit(candidate):
                endings.refuse(candidate.name, self.failures[candidate.name].problem)
            if not candidate.made:
                await candidate.discard()

    def _is_unfit(self, candidate: Candidate) -> bool:
        """Whether a serving ensemble does not fit the new models of its steps."""
        failure = self.failures.get(candidate.name)
        if failure is None or not failure.problem or candidate.own is None:
            return False
        return any(step in self.candidates and step not in self.failures for step in candidate.steps)

    async def _make(self, candidate: Candidate, makings: Mapping[str, asyncio.Task[None]], endings: Endings) -> None:
        """Make the new versions of a candidate, and change the instances of those that stay."""
        prepared = candidate.prepared
        if prepared is None:
            return
        for step in sorted(filter(makings.__contains__, candidate.steps)):
            await asyncio.shield(makings[step])
            if step in self.failures and self._is_missing(step):
                text = (
                    f"ensemble '{candidate.name}' depends on '{step}' which has no loaded version. Model '{step}' "
                    f"loading failed with error: {self.failures[step]}"
                )
                cause = self.failures[step]
                self._fail(candidate, Failure(candidate.name, text, lacks=cause.lacks, halted=cause.halted))
                return
        state = self._models[candidate.name]
        candidate.kept = {v: state.versions[v] for v in prepared.versions if self._stays(candidate, state, v)}
        missing = [version for version in prepared.by_version if version not in candidate.kept]
        candidate.reasons.update(prepared.problems)
        if not state.loaded:
            state.versions = {version: VersionState(LOADING) for version in missing}
            state.problem = ""
            self._models.note(candidate.name)
        elif candidate.reasons:  # the candidate changes nothing
            missing = []
        if len(missing) == 1:
            await self._make_version(candidate, prepared, missing[0], endings)
        else:
            await asyncio.gather(*(self._make_version(candidate, prepared, version, endings) for version in missing))
        await self._identify(candidate, prepared)
        if not candidate.reasons:
            await self._scale(candidate, prepared)
        await self._report_failures(candidate)

    def _is_missing(self, step: str) -> bool:
        """Whether a failed step is missing: its new version was needed, or it has no old one."""
        return not self._models[step].loaded or self.candidates[step].own is not None

    @staticmethod
    def _stays(candidate: Candidate, state: ModelState, version: int) -> bool:
        """Whether a serving version equals the one that would be made, except for the number of instances."""
        entry = state.versions.get(version)
        if entry is None or entry.loaded is None or state.prepared is None or state.folder is None:
            return False
        assert candidate.prepared is not None
        here, there = (each.by_version.get(version) for each in (candidate.prepared, state.prepared))
        if here is None or there is None or candidate.folder.source != state.folder.source:
            return False
        if not _is_same(here, there):
            return False
        if here.config.instance_group != there.config.instance_group and not entry.loaded.is_scalable:
            return False
        return all(candidate.marks.get(part) == state.marks.get(part) for part in (REST, str(version)))

    async def _make_version(
        self, candidate: Candidate, prepared: configuration.Prepared, version: int, endings: Endings
    ) -> None:
        try:
            if not self._waits:
                endings.require_room(candidate.name)
            make = partial(self._maker.make, identify=candidate.name in self._identified)
            candidate.made[version] = await self.room.work(
                candidate.name, partial(make, prepared, candidate.folder, version, candidate.halt)
            )
        except Exception as error:
            self._note_failure(candidate, version, error)

    def _note_failure(self, candidate: Candidate, version: int, error: Exception) -> None:
        # a traceback is of use where no backend has foreseen the error
        if not isinstance(error, (BackendError, ServerError)) and self._maker.is_news(candidate.name, error):
            log.error("model %s version %d did not load", candidate.name, version, exc_info=error)
        candidate.reasons[version] = candidate.why(error)

    async def _identify(self, candidate: Candidate, prepared: configuration.Prepared) -> None:
        """Give fingerprints to versions that stay, if they need them now."""
        if candidate.name not in self._identified:
            return
        for version, entry in candidate.kept.items():
            assert entry.loaded is not None
            if not entry.loaded.fingerprint:
                config = prepared.of(version).config
                entry.loaded.fingerprint = await self._maker.fingerprint(config, candidate.folder, version)

    async def _scale(self, candidate: Candidate, prepared: configuration.Prepared) -> None:
        """Give the versions that stay their configured instances; if one fails, all keep their former ones."""
        there = self._models[candidate.name].prepared
        before: dict[int, tuple[pb.ModelConfig, Sequence[InstanceSpec]]] = {}
        for version, entry in candidate.kept.items():
            assert entry.loaded is not None
            assert there is not None
            own, had = prepared.of(version), (entry.loaded.config, entry.loaded.spec.instances)
            if there.of(version).config.instance_group == own.config.instance_group:
                continue
            try:
                leave = await on_thread(entry.loaded.change_instances, own.config, own.spec.instances, candidate.halt)
            except Exception as error:
                self._note_failure(candidate, version, error)
                await self._scale_back(candidate, before)
                return
            before[version] = had
            candidate.leaving.append(leave)
            log.info("'%s' version %d has %d instances", candidate.name, version, len(own.spec.instances))

    @staticmethod
    async def _scale_back(
        candidate: Candidate, before: Mapping[int, tuple[pb.ModelConfig, Sequence[InstanceSpec]]]
    ) -> None:
        """Give these versions their former instances again."""
        for version, (config, instances) in before.items():
            loaded = candidate.kept[version].loaded
            assert loaded is not None
            try:
                leave = await on_thread(loaded.change_instances, config, instances)
            except Exception as error:
                log.error("'%s' version %d could not have its instances again: %s", candidate.name, version, error)
                continue
            candidate.leaving.append(leave)
            log.info("'%s' version %d has %d instances again", candidate.name, version, len(instances))

    async def _report_failures(self, candidate: Candidate) -> None:
        """Handle versions that could not be made: a serving model changes as a whole, or not at all."""
        if not candidate.reasons:
            return
        reasons = {version: candidate.folder.shown(why) for version, why in sorted(candidate.reasons.items())}
        failure = Failure(candidate.name, versions=reasons, lacks=candidate.lacks, halted=candidate.halt.is_set)
        if self._models[candidate.name].loaded:
            await asyncio.gather(*(on_thread(version.close) for version in candidate.made.values()))
            candidate.made = {}
            self._fail(candidate, failure)
            return
        self.failures[candidate.name] = failure
        for version, reason in failure.versions.items():
            log.error("failed to load '%s' version %d: %s", candidate.name, version, reason)

    async def _warm(self, candidate: Candidate) -> None:
        """Warm up an ensemble: a version whose warm-up fails is not served."""
        for version, loaded in tuple(candidate.made.items()):
            try:
                await self._maker.warm_up(loaded, candidate.halt)
            except Exception as error:
                self._note_failure(candidate, version, error)
                del candidate.made[version]
                await on_thread(loaded.close)
        await self._report_failures(candidate)

    # -- taking over --

    def _take_over(self, candidate: Candidate, endings: Endings) -> None:
        """From the next request on, let requests find the new versions; end the replaced ones."""
        prepared, name = candidate.prepared, candidate.name
        if prepared is None:
            return
        state = self._models[name]
        latest = max(state.loaded, default=0)
        labels = state.labels
        old = {}
        for version, entry in state.loaded.items():
            if version not in candidate.kept and entry.loaded is not None:
                old[version], entry.loaded = entry.loaded, None
        state.versions = {
            **{version: VersionState(UNAVAILABLE, reason) for version, reason in candidate.reasons.items()},
            **{version: VersionState(READY, loaded=loaded) for version, loaded in candidate.made.items()},
            **candidate.kept,
        }
        if state.loaded:
            cleanup = self._remember(candidate, prepared, state)
            endings.replaced(name, old.values(), cleanup)
            passed = {version for label, version in labels.items() if state.labels.get(label) != version}
            if latest < max(state.loaded):
                passed.add(latest)
            for version in passed & set(candidate.kept):
                kept = candidate.kept[version].loaded
                assert kept is not None
                endings.passed(name, kept)
        self._models.publish(name)
        for version in sorted({*old, *candidate.made}):
            if version in candidate.made:
                seconds = candidate.made[version].seconds
                log.info("successfully loaded '%s' version %d in %.2f s", name, version, seconds)
                self._models.watch(name, version)
            self._models.announce(name, version, version in candidate.made)

    @staticmethod
    def _remember(
        candidate: Candidate, prepared: configuration.Prepared, state: ModelState
    ) -> Callable[[], object] | None:
        """Record the served candidate; return a function that removes the files of its predecessor."""
        state.own, state.prepared = candidate.own, prepared
        state.explicit = state.explicit or candidate.explicit
        for version, entry in candidate.kept.items():
            assert entry.loaded is not None
            entry.loaded.describe(prepared.of(version).config, prepared.of(version).spec)
        if candidate.is_user:
            return None
        before, state.override = state.override, candidate.override
        state.folder, state.marks, state.is_own = candidate.folder, candidate.marks, candidate.is_own
        return before.cleanup if before is not None else None


def _caches(prepared: configuration.Prepared) -> bool:
    """Whether the responses of a version are cached."""
    return any(each.spec.caches for each in prepared.by_version.values())


def _is_same(one: configuration.VersionConfig, other: configuration.VersionConfig) -> bool:
    """Whether two configurations differ at most in the version policy, labels and the numbers of instances."""
    specs = [replace(each.spec, instances=()) for each in (one, other)]
    return specs[0] == specs[1] and _without_numbers(one.config) == _without_numbers(other.config)


def _without_numbers(config: pb.ModelConfig) -> pb.ModelConfig:
    copy = pb.ModelConfig()
    copy.CopyFrom(config)
    copy.ClearField("version_policy")
    copy.parameters.pop(VERSION_LABELS, None)
    for group in copy.instance_group:
        group.ClearField("count")
    return copy
