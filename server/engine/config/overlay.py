"""A version's own configuration, which replaces fields of the model's configuration.

There is one rule: a field is replaced as a whole, so no block or list is ever merged with another.
In maps, such as `parameters`, single entries are replaced. Fields about the model, not a version, cannot be changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from inferd.server.engine.config.ensemble import is_ensemble
from inferd.server.engine.config.findings import Finding, raise_any
from inferd.server.engine.pbtxt.source import FieldPath, Source
from inferd.server.pb import model_config_pb2 as pb

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
    """The configuration of a version, of the model's and its own.

    Args:
        config: the model's written configuration, with its name.
        source: of `config`.
        own: the version's written configuration.
        own_source: of `own`.
        renamed: the model has another name than the configurations say.

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
    if is_ensemble(merged) != is_ensemble(config):
        field = "ensemble_scheduling" if "ensemble_scheduling" in written else "platform"
        text = f"all versions of model '{config.name}' are ensembles, or none is"
        yield Finding((field,), text, f"write it into {path} alone", names_model=True)
