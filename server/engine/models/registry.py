"""The registry: each model with its versions and their states, for requests, lists and subscribers.

Used on the event loop only.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from inferd._native.request.lane import LaneHandle
from inferd._native.service.table import ModelTable
from inferd.backends.temporary import TemporaryFolder
from inferd.server.engine import config as configuration
from inferd.server.engine.models.version import LoadedVersion
from inferd.server.engine.repository.folders import Marks, ModelFolder
from inferd.server.errors import Internal, InvalidArgument, NotFound, ServerError, Status, Unavailable

Watcher = Callable[[str, int | None, bool], None]

READY = "READY"
LOADING = "LOADING"
UNLOADING = "UNLOADING"
UNAVAILABLE = "UNAVAILABLE"

UNLOADED = "unloaded"
"""The reason of a version that was unloaded on purpose."""

_FAMILIES: dict[Status, type[ServerError]] = {
    family.status: family for family in (InvalidArgument, NotFound, Unavailable, Internal)
}

_NONE: frozenset[str] = frozenset()


class IndexEntry(NamedTuple):
    """One line of the repository index; version and state are empty for a model that was never loaded.

    Attributes:
        needs: the models that the reason may name: those of an ensemble's steps, and those below.
    """

    name: str
    version: str
    state: str
    reason: str
    needs: frozenset[str] = _NONE


@dataclass(eq=False, slots=True)
class VersionState:
    """One version of a model."""

    state: str
    reason: str = ""
    loaded: LoadedVersion | None = None  # set while requests find it

    @property
    def is_wanted(self) -> bool:
        """Whether the version was not unloaded on purpose."""
        return self.state != UNLOADING and self.reason != UNLOADED


@dataclass(eq=False, slots=True)
class Departing:
    """A version on which sequences continue, but no new ones begin.

    It was replaced or unloaded; or it is no longer the latest, or has lost a label, and serves requests that name its
    number.
    """

    loaded: LoadedVersion
    stop: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def end(self) -> None:
        """End its sequences now."""
        if not self.stop.done():
            self.stop.set_result(None)


@dataclass(slots=True)
class ModelState:
    """One model, loaded or not.

    Attributes:
        versions: loaded ones, those that load for the first time, and those that were loaded before.
        own: the model's own configuration in force; None if nothing is loaded.
        prepared: `own`; that of an ensemble is completed by the models of its steps.
        folder: the loaded folder.
        marks: of the folder's files at the time of the load.
        override: holds the folder if it is not a repository's.
        is_own: the model lies in a repository and was loaded with its own configuration.
        steps: the models of its steps in the configuration read last, also if that was not loaded.
        explicit: a client or an option has named the model; a model of a step may be loaded without that.
        problem: why it is not loaded, if not even its versions are known.
        departing: versions that only requests of their live sequences find, the last departed one first.
    """

    versions: dict[int, VersionState] = field(default_factory=dict)
    own: configuration.Prepared | None = None
    prepared: configuration.Prepared | None = None
    folder: ModelFolder | None = None
    marks: Marks = field(default_factory=dict)
    override: TemporaryFolder | None = None
    is_own: bool = True
    steps: frozenset[str] = frozenset()
    explicit: bool = False
    problem: str = ""
    departing: list[Departing] = field(default_factory=list)

    @property
    def loaded(self) -> dict[int, VersionState]:
        """The versions that requests find."""
        return {version: entry for version, entry in self.versions.items() if entry.loaded is not None}

    @property
    def labels(self) -> Mapping[str, int]:
        """The version that each label stands for."""
        return self.prepared.labels if self.prepared is not None else {}

    @property
    def is_complete(self) -> bool:
        """Whether all wanted versions are served."""
        return bool(self.versions) and not self.problem and len(self.loaded) == len(self.versions)

    @property
    def is_ready(self) -> bool:
        """Whether no wanted version is missing. A version in its first load is not missing."""
        return not self.problem and all(
            entry.state == LOADING or (entry.loaded is not None and entry.loaded.ready)
            for entry in self.versions.values()
            if entry.is_wanted
        )


@dataclass(eq=False, slots=True)
class _Known:
    """Facts about an ensemble, updated at each change, so queries need not search all models."""

    ensembles: dict[str, list[LoadedVersion]] = field(default_factory=dict)  # loaded versions, by step


class Models:
    """All models by name, and the native table of requests.

    Code that changes the state of a model calls `publish` or `note` before it returns to the loop. These compute facts
    that are read often: whether the server is ready, and which ensembles use a model.

    Args:
        server_ready: returns whether the server is ready.
        forget: drops the cached responses of a lane.
    """

    def __init__(self, server_ready: Callable[[], bool], forget: Callable[[LaneHandle], None]) -> None:
        self.table = ModelTable()
        self._forget = forget
        self._server_ready = server_ready
        self._states: dict[str, ModelState] = {}
        self._known: dict[str, _Known] = {}
        self._asked: dict[str, tuple[LoadedVersion, ...]] = {}  # versions that report their readiness themselves
        self._with_sequences: dict[str, tuple[LoadedVersion, ...]] = {}  # versions that may have sequences
        self._missing: set[str] = set()  # names of models that are not ready
        self._users: dict[str, dict[str, list[LoadedVersion]]] = {}  # by model: the ensembles that use it
        self._watchers: list[Watcher] = []
        self._required: frozenset[str] | None = None  # models needed for readiness; None: every model

    def __getitem__(self, name: str) -> ModelState:
        """The model's state, a new one if there was none."""
        state = self._states.get(name)
        if state is None:
            state = self._states[name] = ModelState()
        return state

    def __contains__(self, name: str) -> bool:
        return name in self._states

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def items(self) -> Iterator[tuple[str, ModelState]]:
        """Names and states as they are now."""
        yield from tuple(self._states.items())

    def remove(self, name: str) -> None:
        """Forget a model of which nothing is loaded."""
        self._states.pop(name, None)
        self.table.remove(name)
        self.note(name)

    def publish(self, name: str) -> None:
        """From the next request on, let requests find the loaded versions of this model."""
        state = self._states[name]
        self.note(name)
        self.table.set(
            name,
            {v: entry.loaded.lane if entry.loaded else None for v, entry in state.versions.items()},
            [(each.loaded.version, each.loaded.lane) for each in state.departing],
            tuple(state.labels.items()),
        )
        for ensemble in self.ensembles_of(name):
            self._forget(ensemble.lane)  # the responses of its steps may differ now

    def note(self, name: str) -> None:
        """Compute the facts that follow from the state of this model."""
        state = self._states.get(name)
        before, known = self._known.pop(name, _Known()), _Known()
        for step in before.ensembles:
            del self._users[step][name]
        self._asked.pop(name, None)
        self._with_sequences.pop(name, None)
        if state is None:
            self._missing.discard(name)
            return
        self._note_readiness(name, state)
        loaded = [entry.loaded for _, entry in sorted(state.versions.items()) if entry.loaded is not None]
        for version in loaded:
            for step in configuration.models_of(version.spec):
                known.ensembles.setdefault(step, []).append(version)
        for step, ensembles in known.ensembles.items():
            self._users.setdefault(step, {})[name] = ensembles
        if known.ensembles:
            self._known[name] = known
        if asked := tuple(version for version in loaded if version.is_asked):
            self._asked[name] = asked
        served = dict.fromkeys((*loaded, *(each.loaded for each in state.departing)))
        if with_sequences := tuple(version for version in served if version.has_sequences):
            self._with_sequences[name] = with_sequences

    def require(self, names: Iterable[str]) -> None:
        """Make readiness depend only on these models."""
        self._required = frozenset(names)

    def _note_readiness(self, name: str, state: ModelState) -> None:
        if state.is_ready or (self._required is not None and name not in self._required):
            self._missing.discard(name)
        else:
            self._missing.add(name)

    @property
    def are_ready(self) -> bool:
        """Whether every required model is ready."""
        return not self._missing

    def asked(self) -> list[LoadedVersion]:
        """The loaded versions that report their readiness themselves."""
        return [version for versions in self._asked.values() for version in versions]

    def with_sequences(self) -> list[LoadedVersion]:
        """The versions that may have sequences, departing ones included."""
        return [version for versions in self._with_sequences.values() for version in versions]

    # -- watchers --

    def subscribe(self, watcher: Watcher) -> None:
        """Call `watcher(name, version, ready)` at each change; the name is "" for the server."""
        self._watchers.append(watcher)

    def announce(self, name: str, version: int | None, ready: bool) -> None:
        """Tell the watchers about a version, then once about each ensemble that depends on the model."""
        if not self._watchers:
            return
        self._tell(name, version, ready)
        told: set[LoadedVersion] = set()
        left = [name]
        while left:
            for ensemble in self.ensembles_of(left.pop()):
                if ensemble not in told:
                    told.add(ensemble)
                    left.append(ensemble.name)
                    self._tell(ensemble.name, ensemble.version, self.serves(ensemble))

    def _tell(self, name: str, version: int | None, ready: bool) -> None:
        for watcher in self._watchers:
            watcher(name, version, ready)

    def watch(self, name: str, version: int) -> None:
        """Tell the watchers whenever an instance of this loaded version becomes ready or unready."""
        loop, entry = asyncio.get_running_loop(), self._states[name].versions[version]

        def changed() -> None:
            if entry.loaded is not None:
                self._note_readiness(name, self._states[name])
                self.announce(name, version, entry.loaded.ready)
                self.announce("", None, self._server_ready())

        assert entry.loaded is not None
        entry.loaded.watch(lambda: loop.call_soon_threadsafe(changed))

    # -- look-ups --

    def ensembles_of(self, name: str) -> list[LoadedVersion]:
        """The loaded ensembles with a step of this model."""
        return [each for ensembles in self._users.get(name, {}).values() for each in ensembles]

    def serves(self, loaded: LoadedVersion) -> bool:
        """Whether requests for this version find it and the models of its steps."""
        try:
            self.find(loaded.name, str(loaded.version))
        except ServerError:
            return False
        return True

    def find(self, name: str, version: str = "") -> LoadedVersion:
        """A ready version: the one with this number or label, or the latest.

        Raises:
            NotFound, Unavailable, InvalidArgument: with the texts that a request for it would get.
        """
        return self._find(name, version, set())

    def _find(self, name: str, version: str, steps: set[tuple[str, int]]) -> LoadedVersion:
        """See `find`; adds each step that it has found to `steps`, which it does not look for again."""
        status, text = self.table.find(name, version)
        if status != Status.OK:
            raise _FAMILIES[Status(status)](text)
        ready = self.versions(name)
        number = self._states[name].labels.get(version, version)
        found = ready[-1] if number in ("", "-1") else next(v for v in ready if v.version == int(number))
        for step in found.spec.ensemble.steps if found.spec.ensemble else ():
            if (step.model, step.version) in steps:
                continue
            try:
                self._find(step.model, str(step.version), steps)
            except ServerError as error:
                raise Unavailable(f"in ensemble '{name}', {error}") from error
            steps.add((step.model, step.version))
        return found

    def every(self) -> Iterator[LoadedVersion]:
        """All versions that serve requests, departing ones included."""
        for state in self._states.values():
            served = (entry.loaded for entry in state.versions.values() if entry.loaded is not None)
            yield from dict.fromkeys((*served, *(each.loaded for each in state.departing)))

    def versions(self, name: str) -> tuple[LoadedVersion, ...]:
        """The ready versions of a model, ascending; empty when there is none or no such model."""
        state = self._states.get(name)
        if state is None:
            return ()
        known = state.versions
        ascending = known.items() if len(known) < 2 else sorted(known.items())
        return tuple([entry.loaded for _, entry in ascending if entry.loaded is not None])

    def prepared(self, name: str) -> configuration.Prepared | None:
        """The configuration in force of a model; None when nothing of it is loaded."""
        return self._states[name].prepared if name in self._states else None

    def identity(self, name: str, version: int) -> bytes | None:
        """A digest of everything on which a version's responses depend: its fingerprint, and those of its steps."""
        return self._identity(name, version, {})

    def _identity(self, name: str, version: int, known: dict[tuple[str, int], bytes | None]) -> bytes | None:
        """See `identity`; looked up in `known`, or added."""
        if (name, version) not in known:
            known[name, version] = self._digest(name, version, known)
        return known[name, version]

    def _digest(self, name: str, version: int, known: dict[tuple[str, int], bytes | None]) -> bytes | None:
        entry = self._states.get(name, ModelState()).versions.get(version)
        if entry is None or entry.loaded is None or not entry.loaded.fingerprint:
            return None
        ensemble = entry.loaded.spec.ensemble
        if ensemble is None:
            return entry.loaded.fingerprint
        steps = [
            self._identity(step.model, ready[-1].version if step.version < 0 else step.version, known)
            for step in ensemble.steps
            if (ready := self.versions(step.model))
        ]
        if len(steps) < len(ensemble.steps) or None in steps:
            return None
        return hashlib.sha256(b"".join([entry.loaded.fingerprint, *filter(None, steps)])).digest()

    def index(self) -> list[IndexEntry]:
        """All known models and their versions, with their states."""
        return [entry for name in sorted(self._states) for entry in self.index_of(name)]

    def index_of(self, name: str) -> list[IndexEntry]:
        """One model and its versions; empty for an unknown model."""
        state = self._states.get(name)
        if state is None:
            return []
        if not state.departing and len(state.versions) == 1:  # most of thousands of models
            version, entry = next(iter(state.versions.items()))
            return [self._indexed(name, version, entry)]
        entries: list[IndexEntry] = []
        if not state.versions:
            needs = self.needs(name) if state.problem else _NONE
            entries.append(IndexEntry(name, "", UNAVAILABLE if state.problem else "", state.problem, needs))
        going_on = Counter({each.loaded.version: each.loaded.sequences for each in state.departing})
        for version in sorted({*state.versions, *going_on}):
            entry = state.versions.get(version, VersionState(UNLOADING))
            if entry.loaded is None and version in going_on:
                entry = VersionState(UNLOADING, f"{going_on[version]} sequences go on")
            entries.append(self._indexed(name, version, entry))
        return entries

    def _indexed(self, name: str, version: int, entry: VersionState) -> IndexEntry:
        if name in self._known and entry.loaded is not None:
            try:
                self.find(name, str(version))
            except ServerError as error:
                return IndexEntry(name, str(version), UNAVAILABLE, str(error), self.needs(name))
        needs = self.needs(name) if entry.reason else _NONE
        return IndexEntry(name, str(version), entry.state, entry.reason, needs)

    def needs(self, name: str) -> frozenset[str]:
        """The models that an error of this one may name: those of its steps, and those below."""
        found: set[str] = set()
        left = [name]
        while left:
            state = self._states.get(left.pop())
            if state is not None:
                served = configuration.models_of(state.prepared.spec) if state.prepared else frozenset()
                left.extend((state.steps | served) - found)
                found |= state.steps | served
        return frozenset(found)

    def layers(self) -> list[list[str]]:
        """All models, each ensemble in a later list than the models of its steps."""
        layers: list[list[str]] = []
        depths: dict[str, int] = {}
        for name in self._states:
            depth = self._depth_of(name, depths)
            layers.extend([] for _ in range(depth + 1 - len(layers)))
            layers[depth].append(name)
        return layers

    def _depth_of(self, name: str, known: dict[str, int]) -> int:
        """0 for a model that is no ensemble, else one more than its deepest step; looked up in `known`, or added."""
        if name not in known:
            state = self._states.get(name)
            steps = configuration.models_of(state.prepared.spec) if state and state.prepared else ()
            known[name] = 1 + max((self._depth_of(step, known) for step in steps), default=-1)
        return known[name]
