"""Models in a load: their state until they take over, the making of their versions, and failures."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from inferd._native.service.infer import InferService
from inferd.backends.api import BackendError, ModelSource
from inferd.backends.loader import BackendLoader
from inferd.backends.temporary import TemporaryFolder
from inferd.server.caching import CacheConfig, RedisCache
from inferd.server.engine import config as configuration
from inferd.server.engine.housekeeping.threads import on_thread
from inferd.server.engine.instances.instances import Hardware
from inferd.server.engine.instances.warmup import Halt, warm_up_ensemble
from inferd.server.engine.models.registry import UNAVAILABLE, VersionState
from inferd.server.engine.models.version import LoadedVersion
from inferd.server.engine.repository.fingerprint import fingerprint
from inferd.server.engine.repository.folders import Marks, ModelFolder, size_of
from inferd.server.errors import Exhausted, Internal, InvalidArgument, ServerError, lack_of, text_of
from inferd_client.pb import model_config_pb2 as pb

log = logging.getLogger("inferd.engine")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a model was not loaded: a problem of the model, or of its versions; without either, no repository has it.

    Attributes:
        lacks: the cause is that the server, or its machine, has run out of a resource.
        halted: the load was ended early, so the model may be right.
    """

    name: str
    problem: str = ""
    versions: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    lacks: bool = False
    halted: bool = False

    def __str__(self) -> str:
        """The failure in one line."""
        for version, reason in self.versions.items():
            return f"failed to load '{self.name}' version {version}: {reason}"
        if self.is_missing:
            return f"failed to load '{self.name}', failed to poll from model repository"
        return f"failed to load '{self.name}': {self.problem}"

    @property
    def is_missing(self) -> bool:
        """Whether no repository has the model."""
        return not self.problem and not self.versions

    @property
    def answer(self) -> str:
        """The failure in Triton's words for clients."""
        if self.is_missing:
            return str(self)
        reasons = [
            f"version {version} is at {UNAVAILABLE} state: {reason};" for version, reason in self.versions.items()
        ]
        return f"load failed for model '{self.name}': {' '.join(reasons) or self.problem}"

    @property
    def error(self) -> ServerError:
        """The failure as the error for a client's load request."""
        family = Internal if self.is_missing else Exhausted if self.lacks else InvalidArgument
        return family(self.answer)


class Maker:
    """Makes versions of models, all with the same options.

    Args:
        loader: finds backends.
        options: how configurations are read.
        service: takes the requests of an ensemble's steps.
        max_queued: requests that may wait for one version; 0 for any number.
        hardware: the devices and limits of instances.
        cache: keeps responses; a cache that outlives the server needs fingerprints of versions.
        retries: how many times the load of a version is repeated after it failed.
    """

    def __init__(
        self,
        loader: BackendLoader,
        options: configuration.Options,
        service: InferService,
        *,
        max_queued: int,
        hardware: Hardware,
        cache: CacheConfig,
        retries: int = 0,
    ) -> None:
        self._loader = loader
        self._options = options
        self._alike = configuration.Alike()
        self._service = service
        self._max_queued = max_queued
        self._hardware = hardware
        self._has_cache = cache is not None
        self._retries = retries
        self._unexpected: dict[str, str] = {}  # the last unforeseen error, by model
        self.fingerprints = isinstance(cache, RedisCache)

    def is_news(self, name: str, error: Exception) -> bool:
        """Whether the error differs from the model's last one, so that its traceback is worth logging."""
        text = f"{type(error).__name__}: {text_of(error)}"
        before, self._unexpected[name] = self._unexpected.get(name), text
        return before != text

    def prepare(
        self,
        folder: ModelFolder,
        override: pb.ModelConfig | None,
        known: Mapping[int, configuration.VersionConfig],
        each: configuration.Each,
    ) -> configuration.Prepared:
        """See `config.prepare`. Blocks."""
        return configuration.prepare(
            folder, self._options, self._loader, override, known=known, each=each, alike=self._alike
        )

    def make(
        self, prepared: configuration.Prepared, folder: ModelFolder, version: int, halt: Halt, *, identify: bool
    ) -> LoadedVersion:
        """Make a version that no request can find yet. Blocks.

        Args:
            identify: whether the version gets its fingerprint.

        Raises:
            BackendError: the model does not load, or `halt` was set.
        """
        own = prepared.of(version)
        if own.spec.caches and not self._has_cache:
            log.warning("model '%s' has response_cache enabled, but there is no --cache-config", own.spec.name)
        log.info("loading '%s' version %d", own.spec.name, version)
        begin = time.monotonic()
        mark = _fingerprint(own.config, folder, version) if identify else b""
        loaded = self._load(own, folder, version, halt)
        loaded.fingerprint = mark
        loaded.seconds = time.monotonic() - begin
        return loaded

    def _load(self, own: configuration.VersionConfig, folder: ModelFolder, version: int, halt: Halt) -> LoadedVersion:
        spec, config = own.spec, own.config
        source = ModelSource(
            spec,
            version,
            folder.version_path(version),
            lambda: configuration.config_to_json(config),
            from_client=own.source.from_client,
        )
        for left in reversed(range(self._retries + 1)):
            halt.check()
            try:
                return LoadedVersion(config, own.backend, source, self._service, self._max_queued, self._hardware, halt)
            except BackendError as error:
                if not left or halt.is_set:
                    raise
                log.warning("'%s' version %d is loaded once more, it has failed: %s", spec.name, version, error)
        raise AssertionError("there is at least one try")

    async def fingerprint(self, config: pb.ModelConfig, folder: ModelFolder, version: int) -> bytes:
        """See `fingerprint`."""
        return await on_thread(_fingerprint, config, folder, version)

    async def warm_up(self, loaded: LoadedVersion, halt: Halt) -> None:
        """Warm up an ensemble whose steps are served.

        Raises:
            BackendError: a sample fails, or `halt` was set.
        """
        await warm_up_ensemble(self._service, loaded.lane, loaded.spec, halt)


def _fingerprint(config: pb.ModelConfig, folder: ModelFolder, version: int) -> bytes:
    return fingerprint(folder.version_path(version), configuration.config_to_json(config))


@dataclass(eq=False, slots=True)
class Candidate:
    """A model that is being loaded from a folder.

    Attributes:
        marks: of the folder's files.
        override: holds the folder if it is not a repository's.
        is_own: the model lies in a repository and has its own configuration.
        is_user: a served ensemble with a step among the other candidates.
        explicit: a client or option has named the model.
        own: its configuration; None before `prepare`, or if that has failed.
        problem: why `prepare` has failed.
        lacks: the load has failed because the server, or its machine, has run out of a resource.
        prepared: an ensemble's configuration, completed by the models of its steps; None if the load has failed.
        kept: serving versions that stay.
        made: new versions that no request can find yet.
        reasons: why other versions could not be made.
        leaving: functions that wait for instances that end.
        halt: ends the load early.
    """

    name: str
    folder: ModelFolder
    marks: Marks
    override: TemporaryFolder | None = None
    is_own: bool = True
    is_user: bool = False
    explicit: bool = False
    own: configuration.Prepared | None = None
    problem: str = ""
    lacks: bool = False
    prepared: configuration.Prepared | None = None
    kept: dict[int, VersionState] = field(default_factory=dict)
    made: dict[int, LoadedVersion] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    leaving: list[Callable[[], None]] = field(default_factory=list)
    halt: Halt = field(default_factory=Halt)

    @property
    def steps(self) -> frozenset[str]:
        """The models of an ensemble's steps."""
        return configuration.models_of(self.own.spec) if self.own else frozenset()

    @property
    def size(self) -> int:
        """Bytes of the files of its versions; 0 if it cannot be served."""
        return size_of(self.marks, self.own.by_version) if self.own else 0

    @property
    def warms_steps(self) -> bool:
        """Whether it is an ensemble with a warm-up, which needs served steps."""
        return self.own is not None and self.own.spec.ensemble is not None and bool(self.own.spec.warmup)

    def prepare(
        self,
        maker: Maker,
        override: pb.ModelConfig | None,
        known: Mapping[int, configuration.VersionConfig],
        each: configuration.Each,
    ) -> None:
        """Read the configuration, or note why it cannot be served; see `config.prepare`. Blocks."""
        try:
            self.own = maker.prepare(self.folder, override, known, each)
        except (ServerError, BackendError) as error:
            self.problem = self.why(error)
        except Exception as error:
            if maker.is_news(self.name, error):
                log.exception("model %s could not be prepared", self.name)
            self.problem = self.why(error, f"{type(error).__name__}: {text_of(error)}")

    def why(self, error: Exception, text: str = "") -> str:
        """The text of an error that keeps a version from being served, with advice if the server lacks a resource."""
        text = text or text_of(error) or type(error).__name__
        advice = lack_of(error)
        self.lacks = self.lacks or bool(advice)
        return text if advice in text else f"{text}: {advice}"

    async def discard(self) -> None:
        """Remove the files of an override whose load is abandoned."""
        if self.override is not None:
            await on_thread(self.override.cleanup)
