"""What a model's written configuration says about its size: the versions to be served, and the models of its steps."""

from __future__ import annotations

from typing import NamedTuple

from inferd.server.engine.config.options import Options
from inferd.server.engine.config.reading import read_written
from inferd.server.engine.repository.folders import ModelFolder, select_versions


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
