"""config.pbtxt → a complete, valid configuration and the frozen specification made of it.

`prepare` takes a model's folder through all steps, each of which is a module of this package:

    parse (file → message, with the line of each field) → defaults (what was not written) → refused (what is not served)
    → completion (from the model file) → rules (what must hold) → specification

`compose` then completes ensembles by the models of their steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from backends.api import Backend, BackendError, ModelSource
from backends.loader import BackendLoader
from server.engine.config.accelerators import broken_accelerator_rules
from server.engine.config.agents import run_agents
from server.engine.config.as_json import config_from_json, config_to_json
from server.engine.config.completion import DEFAULT_MAX_BATCH_SIZE, complete, needs_signature
from server.engine.config.composition import compose, models_of
from server.engine.config.defaults import fill_defaults, identify
from server.engine.config.ensemble import is_ensemble, warn_parameters
from server.engine.config.findings import Finding, raise_any
from server.engine.config.parameters import wrong
from server.engine.config.parse import NO_VARIABLES, parse_file
from server.engine.config.paths import check_paths
from server.engine.config.pointers import refuse_pointers
from server.engine.config.prepared import Prepared
from server.engine.config.refused import refusals, warn_carried
from server.engine.config.rules import excessive, validate, validate_instances
from server.engine.config.runtimes import broken_runtime_rules
from server.engine.config.source import Source
from server.engine.config.specification import instance_specs, to_spec
from server.engine.config.variables import Variables
from server.engine.repository import (
    CONFIG_FILE,
    ModelFolder,
    select_versions,
    versions_of,
    warn_misnamed_versions,
)
from server.errors import ConfigError
from server.pb import model_config_pb2 as pb

__all__ = [
    "Options",
    "Prepared",
    "complete",
    "compose",
    "config_from_json",
    "config_to_json",
    "instance_specs",
    "load_config",
    "models_of",
    "prepare",
    "read",
    "to_spec",
    "validate",
    "validate_instances",
]

FILE = CONFIG_FILE


@dataclass(frozen=True, slots=True)
class Options:
    """How configurations are read."""

    auto_complete: bool = True
    config_name: str = ""  # prefer configs/<config_name>.pbtxt
    default_max_batch_size: int = DEFAULT_MAX_BATCH_SIZE
    gpus: int = 0  # how many there are
    variables: Variables = NO_VARIABLES  # of the environment, that they may use


def prepare(
    folder: ModelFolder, options: Options, loader: BackendLoader, override: pb.ModelConfig | None = None
) -> Prepared:
    """Read, complete and check the configuration of a model. Blocks: it may load the model's file to look into it.

    Args:
        override: a configuration that stands for the one in the folder.

    Raises:
        ConfigError: the configuration cannot be served; one line for each thing that is wrong.
        BackendError: the backend cannot be had or cannot read the model's file.
    """
    if folder.problem:
        raise ConfigError(folder.problem)
    config, source = read(folder.path, options, override, renamed=folder.renamed, versions=folder.versions)
    raise_any(excessive(config), config.name, source)
    run_agents(config, folder.path, source)
    versions = select_versions(config, folder)
    warn_misnamed_versions(folder.path)
    for version in versions:
        refuse_pointers(folder.version_path(version))
    if is_ensemble(config):
        validate(config, source, gpus=options.gpus)
        raise_any(_broken_backend_rules(config, None), config.name, source)
        warn_carried(config, source)
        warn_parameters(config, source)
        return Prepared(config, to_spec(config, folder.path, source), tuple(versions), source)
    folders = (folder.version_path(versions[-1]), folder.path)
    scalars: Collection[str] = ()
    if options.auto_complete:
        _complete_by_model(config, source, folder, versions, loader)
    if options.auto_complete and needs_signature(config, source) and _inspects(config, source, loader, folders):
        raise_any([*refusals(config), *wrong(config)], config.name, source)  # before the model's file is looked into
        backend = _backend(config, source, loader, folders)
        raise_any(_broken_backend_rules(config, backend), config.name, source)
        incomplete = ModelSource(
            to_spec(config, folder.path, source),
            versions[-1],
            folder.version_path(versions[-1]),
            from_client=source.from_client,
        )
        signature = backend.inspect(incomplete)
        if signature is not None:
            scalars = complete(config, signature, source, options.default_max_batch_size)
    backend = _backend(config, source, loader, folders)
    validate(config, source, scalars, options.gpus, backend.needs_tensors)
    warn_carried(config, source)
    raise_any(_broken_backend_rules(config, backend), config.name, source)
    return Prepared(config, to_spec(config, folder.path, source), tuple(versions), source)


def _broken_backend_rules(config: pb.ModelConfig, backend: Backend | None) -> Iterator[Finding]:
    yield from broken_accelerator_rules(config, backend)
    yield from broken_runtime_rules(config, backend)


def _complete_by_model(
    config: pb.ModelConfig, source: Source, folder: ModelFolder, versions: Sequence[int], loader: BackendLoader
) -> None:
    """Take over what the model's own code says: as in Triton, tensors, batching and the transaction policy alone."""
    version = versions[-1]
    backend = _backend(config, source, loader, (folder.version_path(version), folder.path))
    if not backend.completes:
        return
    raise_any(refusals(config), config.name, source)  # before the model's code runs
    incomplete = ModelSource(
        to_spec(config, folder.path, source),
        version,
        folder.version_path(version),
        partial(config_to_json, config),
        from_client=source.from_client,
    )
    text = backend.complete(incomplete)
    if text is None:
        return
    try:
        completed = config_from_json(text)
    except ValueError as error:
        raise ConfigError(
            f"auto_complete_config of model '{config.name}' made no valid configuration: {error}"
        ) from error
    config.max_batch_size = completed.max_batch_size
    for field in ("input", "output"):
        config.ClearField(field)
        getattr(config, field).extend(getattr(completed, field))
    if completed.HasField("dynamic_batching") and config.WhichOneof("scheduling_choice") is None:
        config.dynamic_batching.CopyFrom(completed.dynamic_batching)
    if completed.HasField("model_transaction_policy"):
        config.model_transaction_policy.CopyFrom(completed.model_transaction_policy)
    fill_defaults(config)


def load_config(model_dir: Path, options: Options) -> pb.ModelConfig:
    """`read` without the positions."""
    return read(model_dir, options)[0]


def read(
    model_dir: Path,
    options: Options,
    override: pb.ModelConfig | None = None,
    *,
    renamed: bool = False,
    versions: Sequence[int] | None = None,
) -> tuple[pb.ModelConfig, Source]:
    """The configuration with defaults filled in, and where its fields were written. A missing file is an empty one.

    Args:
        model_dir: the model's folder.
        options: how it is read.
        override: a configuration that stands for the one in the folder.
        renamed: the model has the folder's name, whatever the configuration says.
        versions: those that the folder has; None: it is looked for them.

    Raises:
        ConfigError: the file cannot be read, contradicts the folder's name, or does not tell the backend.
    """
    path = config_path(model_dir, options)
    if override is not None:
        config, source = pb.ModelConfig(), Source(Path("config override"), from_client=True)
        config.CopyFrom(override)
    elif path.exists():
        config, source = parse_file(path, model_dir, options.variables)
    elif other := next((each for each in _meant_as_config(model_dir) if each.is_file()), None):
        raise ConfigError(f"{other}: is this the configuration? Its name must be {FILE}")
    elif options.auto_complete:
        config, source = pb.ModelConfig(), Source(path)
    else:
        raise ConfigError(f"{path}: there is no such file, and auto-complete is off")
    if renamed and override is None:
        config.name = model_dir.name
    there = versions_of(model_dir) if versions is None else versions
    version_dirs = [model_dir / str(version) for version in reversed(there)]
    check_paths(config, model_dir, version_dirs, source)
    identify(config, model_dir, version_dirs, source)
    fill_defaults(config, options.gpus)
    return config, source


def _meant_as_config(model_dir: Path) -> list[Path]:
    """Names that editors and people give the file, of which nothing would be read."""
    return [model_dir / name for name in (f"{FILE}.txt", "config.txt", "config.pbtext", "config.prototxt", "config.pb")]


def config_path(model_dir: Path, options: Options) -> Path:
    """configs/<name>.pbtxt if a name was asked for and it exists, else config.pbtxt."""
    named = model_dir / "configs" / f"{options.config_name}.pbtxt"
    return named if options.config_name and named.exists() else model_dir / FILE


def _inspects(config: pb.ModelConfig, source: Source, loader: BackendLoader, folders: Sequence[Path]) -> bool:
    """Whether the backend looks into model files at all."""
    return type(_backend(config, source, loader, folders)).inspect is not Backend.inspect


def _backend(config: pb.ModelConfig, source: Source, loader: BackendLoader, folders: Sequence[Path]) -> Backend:
    try:
        return loader.backend_of_model(config.backend, folders)
    except BackendError as error:
        raise ConfigError(f"{source.at('backend')}: {error} for model '{config.name}'") from error
