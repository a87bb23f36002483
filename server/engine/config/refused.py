"""The fields of config.pbtxt that no code serves yet: each is refused by name, never ignored."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.message import Message

from server.engine.config.findings import Finding
from server.engine.config.source import FieldPath, Source
from server.pb import model_config_pb2 as pb

log = logging.getLogger("inferd.config")


@dataclass(frozen=True, slots=True)
class Field:
    """A field as a path of names, and why it does not do what it does in Triton.

    A scalar counts when it has another value than its default, a list or map when it is not empty, a message when it
    is present.
    """

    path: str
    why: str
    instead: str = "remove it"


_LINEAR = "tensors are row-major"
_LINEAR_INSTEAD = "build the plan with linear formats of its inputs and outputs"

REFUSED = (
    # schedulers
    Field("ensemble_scheduling.step.model_namespace", "there are no namespaces of models"),
    # tensors
    Field("input.is_non_linear_format_io", _LINEAR, _LINEAR_INSTEAD),
    Field("output.is_non_linear_format_io", _LINEAR, _LINEAR_INSTEAD),
    # instances
    Field("instance_group.secondary_devices", "secondary devices are not served"),
    # optimization
    # the model as a whole
    Field("runtime", "choosing the runtime of a backend is not served yet"),
    Field("model_operations.op_library_filename", "custom operations are not served yet"),
    Field("model_repository_agents.agents", "repository agents are not served yet"),
)

CARRIED = (
    Field(
        "optimization.eager_batching",
        "instances on GPUs always gather and upload the next batch while one is executed; those on CPUs gather on the "
        "thread that executes, and a batch that was fixed earlier would only be smaller",
    ),
    Field("metric_tags", "there are no metrics yet that could carry them"),
    Field("model_metrics", "there are no metrics yet that it could shape"),
)
"""Fields that change no answer: kept, returned by ModelConfig, and mentioned in the log."""


def refusals(config: pb.ModelConfig) -> Iterator[Finding]:
    """One finding for each place where a refused field is used."""
    for field in REFUSED:
        for path in uses(config, tuple(field.path.split("."))):
            yield Finding(path, f"{field.path} is not supported, {field.why},", field.instead)


def warn_carried(config: pb.ModelConfig, source: Source) -> None:
    """Log one line for each carried field that the configuration has."""
    for field in CARRIED:
        for path in uses(config, tuple(field.path.split("."))):
            log.warning("%s: %s of model '%s' has no effect: %s", source.at(*path), field.path, config.name, field.why)


def uses(message: Message, names: tuple[str, ...], before: FieldPath = ()) -> Iterator[FieldPath]:
    """The places where the field is used, as paths with indices."""
    name, *rest = names
    descriptor = message.DESCRIPTOR.fields_by_name[name]
    path = (*before, name)
    value = getattr(message, name)
    if not rest:
        if message.HasField(name) if descriptor.has_presence else bool(value):
            yield path
    elif descriptor.is_repeated:
        for index, element in enumerate(value):
            yield from uses(element, tuple(rest), (*path, index))
    elif message.HasField(name):
        yield from uses(value, tuple(rest), path)
