"""A version's own configuration, which replaces fields of the model's configuration.

There is one rule: a field is replaced as a whole, so that nobody has to know how two blocks or lists would be merged.
In maps, such as `parameters`, single entries are replaced. Fields about the model, not a version, cannot be changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from server.engine.config.ensemble import is_ensemble
from server.engine.config.findings import Finding, raise_any
from server.engine.pbtxt.source import FieldPath, Source
from server.pb import model_config_pb2 as pb

OF_THE_MODEL = ("version_policy", "model_repository_agents")
"""Beside its name, what concerns the model as a whole; a version may repeat what the model's configuration says."""

_FIELDS = pb.ModelConfig.DESCRIPTOR.fields_by_name
_MAPS = frozenset(
    name for name, field in _FIELDS.items() if field.message_type and field.message_type.GetOptions().map_entry
)
_OF_THE_BACKEND = ("platform", "backend", "runtime")
"""A version that says its platform or backend has none of these from the model."""


@dataclass(slots=True, kw_only=True)
class LayeredSource(Source):
    """Of a configuration that two files make: `path` is the version's."""

    model: Source
    version: Source

    def has(self, *path: str | int) -> bool:
        """See Source."""
        return self._layer(path).has(*path)

    def at(self, *path: str | int) -> str:
        """See Source; for what neither file has, it is the version's."""
        return self._layer(path).at(*path)

    def _layer(self, path: FieldPath) -> Source:
        """The file that has said the last word about a field."""
        if not path or _says(self.version, path):
            return self.version
        return self.model if _says(self.model, path) else self.version


def _says(source: Source, path: FieldPath) -> bool:
    within = path[: 2 if path[0] in _MAPS else 1]
    return source.has(*within)


def overlay(
    config: pb.ModelConfig, source: Source, own: pb.ModelConfig, own_source: Source, *, renamed: bool = False
) -> tuple[pb.ModelConfig, Source]:
    """What a version is configured by.

    Args:
        config: what is written for the model, with its name.
        source: where that is written.
        own: what is written for the version.
        own_source: where that is written.
        renamed: the model is called otherwise than any configuration says.

    Raises:
        ConfigError: the version says what is not for it to say.
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
    config: pb.ModelConfig, merged: pb.ModelConfig, written: set[str], path: Path
) -> Iterator[Finding]:
    for name in ("name", *OF_THE_MODEL):
        if name in written and getattr(merged, name) != getattr(config, name):
            text = f"{name} is the same for all versions of model '{config.name}'"
            yield Finding((name,), text, f"write it into {path} alone", names_model=True)
    if is_ensemble(merged) != is_ensemble(config):
        field = "ensemble_scheduling" if "ensemble_scheduling" in written else "platform"
        text = f"all versions of model '{config.name}' are ensembles, or none is"
        yield Finding((field,), text, f"write it into {path} alone", names_model=True)
