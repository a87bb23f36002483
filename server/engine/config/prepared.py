"""A model with complete configurations, ready to be loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from inferd.backends.api import Backend, ModelSpec
from inferd.server.engine.pbtxt.source import Source
from inferd.server.pb import model_config_pb2 as pb


@dataclass(frozen=True, slots=True)
class VersionConfig:
    """The configuration of a version: complete, and valid by itself."""

    config: pb.ModelConfig  # what ModelConfig answers
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
    def spec(self) -> ModelSpec:
        """See `config`."""
        return self.of().spec

    @property
    def source(self) -> Source:
        """See `config`."""
        return self.of().source
