"""Finds and reads the configuration files of a model's folder, and fills in defaults."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TypeVar

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from inferd.server.engine.config.defaults import fill_defaults, identify
from inferd.server.engine.config.options import Options
from inferd.server.engine.config.paths import check_paths
from inferd.server.engine.pbtxt.parse import parse_file
from inferd.server.engine.pbtxt.source import Source
from inferd.server.engine.repository.folders import CONFIG_FILE, NAMED_CONFIGS
from inferd.server.errors import ConfigError
from inferd.server.pb import model_config_pb2 as pb

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
    """The configuration with one of each input and output that is written several times with the same fields.

    Published configurations have such copies, and Triton serves them.
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
    return os.path.exists(path)  # noqa: PTH110 (a start looks for two files of each of all models)


def _meant_as_config(model_dir: Path) -> list[Path]:
    """Files with names that people give the configuration by mistake, and that the server would not read."""
    names = (f"{CONFIG_FILE}.txt", "config.txt", "config.pbtext", "config.prototxt", "config.pb")
    return [model_dir / name for name in names]
