"""Makes the complete, valid configuration of each version to be served from a model's folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from inferd.backends.api import Backend, BackendError, ModelSource, ModelSpec
from inferd.backends.loader import BackendLoader
from inferd.server.engine.config.alike import Alike
from inferd.server.engine.config.backend_rules import broken_accelerator_rules, broken_runtime_rules
from inferd.server.engine.config.completion import complete, fill_defaults, identify_name, needs_signature
from inferd.server.engine.config.ensemble import is_ensemble, warn_parameters
from inferd.server.engine.config.files import refuse_pointers, run_agents
from inferd.server.engine.config.findings import Finding, raise_any
from inferd.server.engine.config.parameters import VERSION_LABELS, version_labels, wrong
from inferd.server.engine.config.reading import Options, config_path, overlay, read_own, read_written, settle
from inferd.server.engine.config.refused import refusals, warn_carried
from inferd.server.engine.config.rules import excessive, validate
from inferd.server.engine.config.specification import to_spec
from inferd.server.engine.pbtxt.as_json import config_from_json, config_to_json
from inferd.server.engine.pbtxt.source import Source
from inferd.server.engine.repository.folders import ModelFolder, select_versions, warn_misnamed_versions
from inferd.server.errors import ConfigError, ServerError, lack_of, text_of
from inferd_client.pb import model_config_pb2 as pb


@dataclass(frozen=True, slots=True)
class VersionConfig:
    """The configuration of a version: complete, and valid by itself."""

    config: pb.ModelConfig  # the response of ModelConfig
    spec: ModelSpec
    source: Source  # of the configuration, for later errors
    backend: Backend | None  # of the model; None for an ensemble


@dataclass(frozen=True, slots=True)
class Prepared:
    """The configurations of a model's versions; those of an ensemble fit its models after `compose`.

    Attributes:
        by_version: the configurations of versions that can be served, at least one.
        problems: why other versions cannot be served.
    """

    by_version: Mapping[int, VersionConfig]
    problems: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions to be served, ascending."""
        return tuple(sorted({*self.by_version, *self.problems}))

    def of(self, version: int = -1) -> VersionConfig:
        """The configuration of a version that can be served; -1 is the latest."""
        return self.by_version[max(self.by_version) if version < 0 else version]

    @property
    def config(self) -> pb.ModelConfig:
        """The latest version's: fields of the model as a whole are equal in all versions."""
        return self.of().config

    @property
    def labels(self) -> Mapping[str, int]:
        """The version that each label stands for."""
        return version_labels(self.config)

    @property
    def spec(self) -> ModelSpec:
        """See `config`."""
        return self.of().spec

    @property
    def source(self) -> Source:
        """See `config`."""
        return self.of().source


log = logging.getLogger("inferd.config")


Each = Callable[[Callable[[int], None], Sequence[int]], None]
"""Calls a function, which must not raise, with each number, and returns when all calls are done."""


def one_by_one(work: Callable[[int], None], numbers: Sequence[int]) -> None:
    """`Each` on this thread."""
    for number in numbers:
        work(number)


def prepare(
    folder: ModelFolder,
    options: Options,
    loader: BackendLoader,
    override: pb.ModelConfig | None = None,
    *,
    known: Mapping[int, VersionConfig] | None = None,
    each: Each = one_by_one,
    alike: Alike | None = None,
) -> Prepared:
    """Read, complete and check the configurations of a model. Blocks: it may load the model's files to look into them.

    Args:
        override: a configuration in place of all those in the folder.
        known: configurations of versions that have not changed since they were made.
        each: calls a function for each of several versions.
        alike: the kinds of models that were prepared with these options.

    Raises:
        ConfigError: no version can be served; the text has a line for each error of the latest.
        BackendError: no version can be served: the backend is missing or cannot read the latest one's file.
    """
    if folder.problem:
        raise ConfigError(folder.problem)
    config, source = read_written(folder.path, options, override)
    if folder.stands_for:
        source.path = folder.shown(str(source.path))
    if folder.renamed and override is None:
        config.name = folder.path.name
    identify_name(config, folder.path, source)
    raise_any(excessive(config), config.name, source)
    run_agents(config, folder.path, source)
    versions = select_versions(config, folder)
    warn_misnamed_versions(folder)
    preparation = _Preparation(folder, options, loader, alike or Alike(), config, source)
    return preparation.of_versions(versions, known or {}, each)


class _Completed(NamedTuple):
    """The configuration of a version before it is checked; `scalars` are tensors with a batch dimension alone."""

    config: pb.ModelConfig
    source: Source
    scalars: frozenset[str]
    backend: Backend | None


class _Preparation:
    """Prepares the versions of one model.

    Args:
        alike: the kinds of models that are known.
        config: the model's written configuration, with its name.
        source: of `config`.
    """

    def __init__(
        self,
        folder: ModelFolder,
        options: Options,
        loader: BackendLoader,
        alike: Alike,
        config: pb.ModelConfig,
        source: Source,
    ) -> None:
        self._folder = folder
        self._options = options
        self._loader = loader
        self._alike = alike
        self._config = config
        self._source = source
        self._backends: dict[tuple[str, Path], Backend] = {}  # by name and version: folders are looked into
        # By the backend's id(): a user's backend may not be hashable. The value keeps the backend, so no other gets the
        # same id.
        self._known: dict[tuple[bytes, frozenset[str], int], tuple[VersionConfig, Backend | None]] = {}

    def of_versions(self, versions: list[int], known: Mapping[int, VersionConfig], each: Each) -> Prepared:
        """The configurations of these versions; see `prepare`.

        Raises:
            Exception: no version can be served; this is the latest version's error.
        """
        found = {version: known[version] for version in versions if version in known}
        completed: dict[int, _Completed] = {}
        errors: dict[int, Exception] = {}

        def look(version: int) -> None:
            try:
                completed[version] = self._completed(version)
            except Exception as error:  # a framework's; other versions may still be good
                errors[version] = error
            except BaseException as error:  # such as SystemExit: a framework's code must not end the server
                what = f"{type(error).__name__}: {text_of(error)}"
                errors[version] = BackendError(f"the code that looks into the model's files has raised {what}")

        each(look, [version for version in reversed(versions) if version not in found])
        for version in sorted(completed, reverse=True):
            try:
                found[version] = self._checked_once(completed[version])
            except Exception as error:
                errors[version] = error
        if not found:
            raise _only(errors, versions[-1])
        for version, problem in errors.items():
            if lack_of(problem):  # the error is not the version's fault
                raise _only(errors, version)
        for version, problem in errors.items():
            if not _is_foreseen(problem):
                log.error("model %s version %d could not be prepared", self._config.name, version, exc_info=problem)
            problem.with_traceback(None)  # its frames would hold the read files until a garbage collection
        told = {version: _told(problem) for version, problem in sorted(errors.items())}
        prepared = Prepared(dict(sorted(found.items())), told)
        raise_any(_broken_label_rules(prepared), self._config.name, prepared.source)
        return prepared

    def _completed(self, version: int) -> _Completed:
        """The configuration of one version. Several threads call this for different versions."""
        path = self._folder.version_path(version)
        config, source = self._written(path)
        settle(config, self._folder.path, path, source, self._options)
        raise_any(excessive(config), config.name, source)
        refuse_pointers(path)
        scalars: frozenset[str] = frozenset()
        backend = None
        if not is_ensemble(config):
            scalars = self._complete(config, source, path, version)
            backend = self._backend(config, source, path)
        return _Completed(config, source, scalars, backend)

    def _checked_once(self, completed: _Completed) -> VersionConfig:
        """A checked configuration; versions with equal configurations share one."""
        if len(self._folder.versions) == 1:
            return self._checked(*completed)
        key = (completed.config.SerializeToString(deterministic=True), completed.scalars, id(completed.backend))
        if key not in self._known:
            self._known[key] = self._checked(*completed), completed.backend
        return self._known[key][0]

    def _written(self, path: Path) -> tuple[pb.ModelConfig, Source]:
        """The written configuration of the version with this folder, and its source."""
        config = pb.ModelConfig()
        config.CopyFrom(self._config)
        if self._source.from_client or self._folder.is_bare:
            return config, self._source
        own = read_own(path, self._folder.path, self._options)
        if own is None:
            return config, self._source
        if is_ensemble(config):
            raise ConfigError(
                f"{config_path(path, self._options)}: all versions of ensemble '{config.name}' have one configuration: "
                f"remove the file, or move its content into {self._source.path}"
            )
        return overlay(config, self._source, *own, renamed=self._folder.renamed)

    def _complete(self, config: pb.ModelConfig, source: Source, path: Path, version: int) -> frozenset[str]:
        """Complete the configuration from the version's files; returns the names of tensors with a batch dimension
        alone."""
        if not self._options.auto_complete:
            return frozenset()
        self._complete_by_model(config, source, path, version)
        if not needs_signature(config, source) or not self._inspects(config, source, path):
            return frozenset()
        raise_any([*refusals(config), *wrong(config)], config.name, source)  # before the model's file is looked into
        backend = self._backend(config, source, path)
        raise_any(_broken_backend_rules(config, backend), config.name, source)
        signature = backend.inspect(self._incomplete(config, source, path, version))
        if signature is None:
            return frozenset()
        return complete(config, signature, source, self._options.default_max_batch_size)

    def _complete_by_model(self, config: pb.ModelConfig, source: Source, path: Path, version: int) -> None:
        """Take over from the model's code, as Triton does, only tensors, batching and the transaction policy."""
        backend = self._backend(config, source, path)
        if not backend.completes or (backend.completes_missing and not _lacks(config, source)):
            return
        raise_any([*refusals(config), *wrong(config)], config.name, source)  # before the model's code runs
        text = backend.complete(self._incomplete(config, source, path, version))
        if text is None:
            return
        try:
            completed = config_from_json(text)
        except ValueError as error:
            raise ConfigError(
                f"auto_complete_config of model '{config.name}' made no valid configuration: {error}"
            ) from error
        config.max_batch_size = completed.max_batch_size
        for tensors in ("input", "output"):
            config.ClearField(tensors)
            getattr(config, tensors).extend(getattr(completed, tensors))
        if completed.HasField("dynamic_batching") and config.WhichOneof("scheduling_choice") is None:
            config.dynamic_batching.CopyFrom(completed.dynamic_batching)
        if completed.HasField("model_transaction_policy"):
            config.model_transaction_policy.CopyFrom(completed.model_transaction_policy)
        fill_defaults(config)

    def _incomplete(self, config: pb.ModelConfig, source: Source, path: Path, version: int) -> ModelSource:
        return ModelSource(
            to_spec(config, self._folder.path, source),
            version,
            path,
            partial(config_to_json, config),
            from_client=source.from_client,
        )

    def _checked(
        self, config: pb.ModelConfig, source: Source, scalars: Collection[str], backend: Backend | None
    ) -> VersionConfig:
        config = pb.ModelConfig.FromString(config.SerializeToString())  # half the memory of one filled by fields
        kind = self._alike.kind(config, scalars, backend)
        spec = self._alike.find(kind, config) if kind is not None else None
        if spec is not None:
            return VersionConfig(config, spec, source, backend)
        validate(config, source, scalars, self._options.gpus, backend is None or backend.needs_tensors)
        raise_any(_broken_backend_rules(config, backend), config.name, source)
        warned = warn_carried(config, source)
        if backend is None:
            warn_parameters(config, source)
        spec = to_spec(config, self._folder.path, source)
        if kind is not None and not warned:
            self._alike.keep(kind, spec, backend)
        return VersionConfig(config, spec, source, backend)

    def _inspects(self, config: pb.ModelConfig, source: Source, path: Path) -> bool:
        """Whether the backend looks into model files at all."""
        return type(self._backend(config, source, path)).inspect is not Backend.inspect

    def _backend(self, config: pb.ModelConfig, source: Source, path: Path) -> Backend:
        found = self._backends.get((config.backend, path))
        if found is not None:
            return found
        try:
            found = self._loader.backend_of_model(config.backend, (path, self._folder.path))
        except BackendError as error:
            raise ConfigError(f"{source.at('backend')}: model '{config.name}': {error}") from error
        self._backends[config.backend, path] = found
        return found


def _broken_backend_rules(config: pb.ModelConfig, backend: Backend | None) -> Iterator[Finding]:
    yield from broken_accelerator_rules(config, backend)
    yield from broken_runtime_rules(config, backend)


def _broken_label_rules(prepared: Prepared) -> Iterator[Finding]:
    for label, version in prepared.labels.items():
        if version not in prepared.versions:
            text = f"label '{label}' stands for version {version}, which is not served"
            served = ", ".join(map(str, prepared.versions))
            yield Finding(("parameters", VERSION_LABELS), text, f"name one of {served}, or change version_policy")


def _only(errors: dict[int, Exception], version: int) -> Exception:
    """The error of this version; the others are dropped, because the frame that raises this one would hold them."""
    error = errors[version]
    errors.clear()
    return error


def _is_foreseen(error: Exception) -> bool:
    return isinstance(error, (ServerError, BackendError))


def _told(error: Exception) -> str:
    return text_of(error) if _is_foreseen(error) else f"{type(error).__name__}: {text_of(error)}"


def _lacks(config: pb.ModelConfig, source: Source) -> bool:
    """Whether a model could complete anything in a configuration."""
    batches = config.max_batch_size > 1 and config.WhichOneof("scheduling_choice") is None
    return batches or needs_signature(config, source)
