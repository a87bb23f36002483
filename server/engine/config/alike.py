"""The specifications shared by models that differ only in their names.

A repository of thousands of models often has few kinds of them: one for each tenant, or one for each language. One
configuration of each kind is checked, and all models of the kind share one specification, except for their names. That
saves most of the time of a start, and most of the memory of a configuration.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import replace
from threading import Lock
from typing import Final

from inferd.backends.api import Backend, ModelSpec
from inferd_client.pb import model_config_pb2 as pb

KINDS: Final = 256
"""The number of kinds that are kept; beyond it, the least recently used leave."""

Kind = tuple[bytes, frozenset[str], int]


class Alike:
    """Kinds of models and their specifications, under one set of options. Any thread may use it."""

    def __init__(self) -> None:
        self._known: OrderedDict[Kind, tuple[ModelSpec, Backend | None]] = OrderedDict()
        self._guard = Lock()

    def kind(self, config: pb.ModelConfig, scalars: Collection[str], backend: Backend | None) -> Kind | None:
        """The key of a model's kind; None for a model whose specification depends on more.

        Args:
            config: complete, but not checked yet.
            scalars: tensors with a batch dimension alone.
            backend: of the model; None for an ensemble.
        """
        if backend is None or _names_files(config) or not _is_named_by_rule(config):
            return None
        name = config.name
        config.name = ""
        for group in config.instance_group:
            group.name = group.name[len(name) :]
        kind = config.SerializeToString(deterministic=True)
        config.name = name
        for group in config.instance_group:
            group.name = name + group.name
        return kind, frozenset(scalars), id(backend)

    def find(self, kind: Kind, config: pb.ModelConfig) -> ModelSpec | None:
        """The specification of a model of this kind; None if none has been checked."""
        with self._guard:
            known = self._known.get(kind)
            if known is None:
                return None
            self._known.move_to_end(kind)
        spec = known[0]
        name = len(spec.name)
        instances = tuple(replace(each, name=config.name + each.name[name:]) for each in spec.instances)
        return replace(spec, name=config.name, instances=instances)

    def keep(self, kind: Kind, spec: ModelSpec, backend: Backend | None) -> None:
        """Keep the specification of a model of this kind, whose check found no error and no warning."""
        with self._guard:
            self._known[kind] = spec, backend  # while it is kept, no other backend has its identity
            if len(self._known) > KINDS:
                self._known.popitem(last=False)


def _names_files(config: pb.ModelConfig) -> bool:
    """Whether files of the model have a part in its specification."""
    return (
        bool(config.model_warmup)
        or (config.HasField("sequence_batching") and bool(config.sequence_batching.state))
        or any(tensor.label_filename for tensor in config.output)
    )


def _is_named_by_rule(config: pb.ModelConfig) -> bool:
    """Whether all groups of instances have the names that they get where none is given."""
    name = config.name
    return all(group.name in (name, f"{name}_{index}") for index, group in enumerate(config.instance_group))
