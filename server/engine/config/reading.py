"""Reads the configuration files of a model's folder and of its versions, and fills in defaults.

A version's own configuration replaces fields of the model's. There is one rule: a field is replaced as a whole, so no
block or list is ever merged with another. In maps, such as `parameters`, single entries are replaced. Fields about the
model, not a version, cannot be changed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from inferd.server.engine.config.completion import fill_defaults, identify
from inferd.server.engine.config.ensemble import is_ensemble
from inferd.server.engine.config.files import check_paths
from inferd.server.engine.config.findings import Finding, raise_any
from inferd.server.engine.config.parameters import VERSION_LABELS
from inferd.server.engine.pbtxt.parse import NO_VARIABLES, parse_file
from inferd.server.engine.pbtxt.source import FieldPath, Source
from inferd.server.engine.pbtxt.variables import Variables
from inferd.server.engine.repository.folders import CONFIG_FILE, NAMED_CONFIGS, ModelFolder, select_versions
from inferd.server.errors import ConfigError
from inferd.server.settings import DEFAULTS
from inferd_client.pb import model_config_pb2 as pb


@dataclass(frozen=True, slots=True)
class Options:
    """How configurations are read."""

    auto_complete: bool = True
    config_name: str = ""  # prefer configs/<config_name>.pbtxt
    default_max_batch_size: int = DEFAULTS.default_max_batch_size
    gpus: int = 0  # how many there are
    variables: Variables = NO_VARIABLES  # environment variables that configurations may use


log = logging.getLogger("inferd.config")

Tensor = TypeVar("Tensor", pb.ModelInput, pb.ModelOutput)


def read_written(
    model_dir: Path, options: Options, override: pb.ModelConfig | None = None
) -> tuple[pb.ModelConfig, Source]:
    """The written configuration of a model as a whole, and its source. A missing file counts as an empty one.

    Args:
        model_dir: the model's folder.
        options: how it is read.
        override: a configuration in place of the one in the folder.

    Raises:
        ConfigError: the file cannot be read.
    """
    if override is not None:
        config = pb.ModelConfig()
        config.CopyFrom(override)
        return _without_copies(config, Source(Path("config override"), from_client=True))
    path = config_path(model_dir, options)
    if _exists(str(path)):
        return _without_copies(*parse_file(path, model_dir, options.variables))
    if other := next((each for each in _meant_as_config(model_dir) if each.is_file()), None):
        raise ConfigError(f"{other}: is this the configuration? Its name must be {CONFIG_FILE}")
    if options.auto_complete:
        return pb.ModelConfig(), Source(path)
    raise ConfigError(f"{path}: there is no such file, and auto-complete is off")


def read_own(version_dir: Path, model_dir: Path, options: Options) -> tuple[pb.ModelConfig, Source] | None:
    """The written configuration in a version's folder, and its source; None without one.

    Raises:
        ConfigError: the file cannot be read.
    """
    if not options.config_name and not _exists(f"{version_dir}/{CONFIG_FILE}"):
        return None
    path = config_path(version_dir, options)
    return _without_copies(*parse_file(path, model_dir, options.variables)) if _exists(str(path)) else None


def settle(config: pb.ModelConfig, model_dir: Path, version_dir: Path, source: Source, options: Options) -> None:
    """Check the configured paths, find the backend by the model's file, and fill in the defaults.

    Args:
        version_dir: of the version that the configuration is for.

    Raises:
        ConfigError: a path leads out of the folder, a name or platform contradicts, or the backend is unknown.
    """
    check_paths(config, model_dir, version_dir, source)
    identify(config, model_dir, version_dir, source)
    fill_defaults(config, options.gpus)


def config_path(folder: Path, options: Options) -> Path:
    """The configuration file of a model or version: configs/<name>.pbtxt, if configured and present; else
    config.pbtxt."""
    if options.config_name:
        named = folder / NAMED_CONFIGS / f"{options.config_name}.pbtxt"
        if named.exists():
            return named
    return folder / CONFIG_FILE


def _without_copies(config: pb.ModelConfig, source: Source) -> tuple[pb.ModelConfig, Source]:
    """The configuration without inputs and outputs that repeat an earlier one field by field.

    Some published configurations have such copies, and Triton serves them.
    """
    _leave_copies_out("input", config.input, source)
    _leave_copies_out("output", config.output, source)
    return config, source


def _leave_copies_out(field: str, tensors: RepeatedCompositeFieldContainer[Tensor], source: Source) -> None:
    kept: dict[bytes, int] = {}
    for index, tensor in enumerate(tensors):
        if kept.setdefault(tensor.SerializeToString(deterministic=True), index) != index:
            where = source.at(field, index)
            log.warning("%s: %s '%s' is the same as one before it, and has no effect", where, field, tensor.name)
    if len(kept) < len(tensors):
        first = [tensors[index] for index in kept.values()]
        source.keep(field, list(kept.values()))
        del tensors[:]
        tensors.extend(first)


def _exists(path: str) -> bool:
    return os.path.exists(path)  # noqa: PTH110 (called twice for each model at the start)


def _meant_as_config(model_dir: Path) -> list[Path]:
    """Paths that are often used for the configuration by mistake, and which the server does not read."""
    names = (f"{CONFIG_FILE}.txt", "config.txt", "config.pbtext", "config.prototxt", "config.pb")
    return [model_dir / name for name in names]


OF_THE_MODEL = ("version_policy", "model_repository_agents")
"""Fields that concern the model as a whole, beside its name; a version may only repeat the model's values."""

_FIELDS = pb.ModelConfig.DESCRIPTOR.fields_by_name
_MAPS = frozenset(
    name for name, field in _FIELDS.items() if field.message_type and field.message_type.GetOptions().map_entry
)
_OF_THE_BACKEND = ("platform", "backend", "runtime")
"""Fields that a version with a platform or backend of its own does not inherit."""


@dataclass(slots=True, kw_only=True)
class LayeredSource(Source):
    """The source of a configuration made of two files: `path` is the version's."""

    model: Source
    version: Source

    def has(self, *path: str | int) -> bool:
        """See Source."""
        return self._layer(path).has(*path)

    def at(self, *path: str | int) -> str:
        """See Source; a field that neither file has is placed in the version's."""
        return self._layer(path).at(*path)

    def _layer(self, path: FieldPath) -> Source:
        """The file from which a field's value comes."""
        if not path or _says(self.version, path):
            return self.version
        return self.model if _says(self.model, path) else self.version


def _says(source: Source, path: FieldPath) -> bool:
    within = path[: 2 if path[0] in _MAPS else 1]
    return source.has(*within)


def overlay(
    config: pb.ModelConfig, source: Source, own: pb.ModelConfig, own_source: Source, *, renamed: bool = False
) -> tuple[pb.ModelConfig, Source]:
    """The configuration of a version: the model's, with the fields of the version's own in place of the model's.

    Args:
        config: the model's written configuration, with its name.
        source: of `config`.
        own: the version's written configuration.
        own_source: of `own`.
        renamed: the model's name differs from the name in the configurations.

    Raises:
        ConfigError: the version's configuration has a field that only the model's may have.
    """
    if renamed:
        own.ClearField("name")
    written = {name for name in _FIELDS if own_source.has(name) and (name != "name" or own.name)}
    merged = pb.ModelConfig()
    merged.CopyFrom(config)
    for name in written - _MAPS | (set(_OF_THE_BACKEND) if written & {"platform", "backend"} else set()):
        merged.ClearField(name)
    merged.MergeFrom(own)
    raise_any(_not_for_a_version(config, merged, written, source.path), config.name, own_source)
    return merged, LayeredSource(own_source.path, from_client=False, model=source, version=own_source)


def _not_for_a_version(
    config: pb.ModelConfig, merged: pb.ModelConfig, written: set[str], path: Path | str
) -> Iterator[Finding]:
    for name in ("name", *OF_THE_MODEL):
        if name in written and getattr(merged, name) != getattr(config, name):
            text = f"{name} is the same for all versions of model '{config.name}'"
            yield Finding((name,), text, f"write it into {path} alone", names_model=True)
    if _labels_text(merged) != _labels_text(config):
        text = f"parameter '{VERSION_LABELS}' is the same for all versions of model '{config.name}'"
        place = ("parameters", VERSION_LABELS)
        yield Finding(place, text, f"write it into {path} alone", names_model=True)
    if is_ensemble(merged) != is_ensemble(config):
        field = "ensemble_scheduling" if "ensemble_scheduling" in written else "platform"
        text = f"all versions of model '{config.name}' are ensembles, or none is"
        yield Finding((field,), text, f"write it into {path} alone", names_model=True)


def _labels_text(config: pb.ModelConfig) -> str:
    return config.parameters[VERSION_LABELS].string_value if VERSION_LABELS in config.parameters else ""


class Outline(NamedTuple):
    """The versions that the version policy selects, and the models of an ensemble's steps."""

    versions: tuple[int, ...]
    steps: frozenset[str]


def outline(folder: ModelFolder, options: Options) -> Outline:
    """Read the configuration of a model as a whole; nothing is completed or checked. Blocks.

    Raises:
        ConfigError: the file cannot be read, or selects no version.
    """
    config, _ = read_written(folder.path, options)
    steps = frozenset(step.model_name for step in config.ensemble_scheduling.step)
    return Outline(tuple(select_versions(config, folder)), steps)
