"""A model that is ready to be loaded."""

from __future__ import annotations

from dataclasses import dataclass

from backends.api import ModelSpec
from server.engine.config.source import Source
from server.pb import model_config_pb2 as pb


@dataclass(frozen=True, slots=True)
class Prepared:
    """A configuration, complete and valid by itself; that of an ensemble also by its models once it was composed."""

    config: pb.ModelConfig  # what ModelConfig answers
    spec: ModelSpec
    versions: tuple[int, ...]  # to be served, ascending
    source: Source  # of the configuration, for what is found wrong later
