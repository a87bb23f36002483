"""The fields of config.pbtxt that have no effect here.

One rule decides: a field that would change a response is refused by name; any other, such as a hint for a device that
does not exist, is kept and logged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.message import Message

from inferd.server.engine.config.findings import Finding
from inferd.server.engine.pbtxt.source import FieldPath, Source
from inferd_client.pb import model_config_pb2 as pb

log = logging.getLogger("inferd.config")

KIND = pb.ModelInstanceGroup.Kind


@dataclass(frozen=True, slots=True)
class Field:
    """A field as a path of names, and why it does not have Triton's effect.

    A scalar counts when it has another value than its default, a list or map when it is not empty, a message when it
    is present.
    """

    path: str
    why: str
    instead: str = "remove it"


_NO_GPU = "no instance of the model is on a GPU"
_LINEAR = "tensors are row-major"
_LINEAR_INSTEAD = "build the plan with linear formats of its inputs and outputs"

REFUSED = (
    # schedulers
    Field("ensemble_scheduling.step.model_namespace", "there are no namespaces of models"),
    # tensors
    Field("input.is_non_linear_format_io", _LINEAR, _LINEAR_INSTEAD),
    Field("output.is_non_linear_format_io", _LINEAR, _LINEAR_INSTEAD),
    # the model as a whole
    Field("model_operations.op_library_filename", "custom operations are not served yet"),
)

CARRIED = (
    Field("instance_group.secondary_devices", "DLA cores are not used; the instance computes on its own device"),
    Field(
        "optimization.eager_batching",
        "instances on GPUs always gather and upload the next batch while one is executed. Instances on CPUs gather on "
        "the thread that executes; forming a batch earlier would only make it smaller",
    ),
)
"""Fields that change no response: the server keeps them, ModelConfig returns them, and the log mentions them."""


ON_DEVICES = {
    "GPU": (
        Field("optimization.priority", "only GPU streams have a priority, and no instance of the model is on a GPU"),
        Field("optimization.cuda.graphs", _NO_GPU),
        Field("optimization.cuda.graph_spec", _NO_GPU),
        Field("optimization.cuda.busy_wait_events", _NO_GPU),
        Field("optimization.execution_accelerators.gpu_execution_accelerator", _NO_GPU),
    ),
    "CPU": (
        Field(
            "optimization.execution_accelerators.cpu_execution_accelerator", "no instance of the model is on the CPU"
        ),
    ),
}
"""Hints for one kind of instances: without effect in models without instances of that kind."""


def refusals(config: pb.ModelConfig) -> Iterator[Finding]:
    """One finding for each place where a refused field is used."""
    for field in REFUSED:
        for path in uses(config, tuple(field.path.split("."))):
            yield Finding(path, f"{field.path} is not supported", f"{field.why}; {field.instead}")


def warn_carried(config: pb.ModelConfig, source: Source) -> bool:
    """Log one line for each carried field that the configuration has; returns whether there is one."""
    warned = False
    kinds = {KIND.Name(group.kind).removeprefix("KIND_") for group in config.instance_group}
    idle = (field for kind, fields in ON_DEVICES.items() if kind not in kinds for field in fields)
    for field in (*CARRIED, *idle):
        for path in uses(config, tuple(field.path.split("."))):
            log.warning("%s: %s of model '%s' has no effect: %s", source.at(*path), field.path, config.name, field.why)
            warned = True
    return warned


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
