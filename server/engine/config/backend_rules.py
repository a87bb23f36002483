"""The rules for fields that backends differ in: runtimes, accelerators, and the fields of TensorRT models.

Accelerators of a kind of device on which the model has no instance are hints without effect, see `refused`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from inferd.backends.api import Backend
from inferd.server.engine.config.findings import Finding
from inferd.server.engine.config.parameters import of_server
from inferd.server.engine.pbtxt.source import FieldPath
from inferd_client.pb import model_config_pb2 as pb


def broken_runtime_rules(config: pb.ModelConfig, backend: Backend | None) -> Iterator[Finding]:
    """Findings about the runtime of a complete configuration; `backend` is None for an ensemble."""
    usual = f"libtriton_{config.backend}.so"  # the default in Triton's own configurations
    others = backend.runtimes if backend is not None else frozenset()
    if config.runtime and config.runtime not in {usual, *others}:
        known = ", ".join(sorted(others))
        instead = f"write {known}, or remove it" if others else "remove it"
        yield Finding(("runtime",), f"backend '{config.backend}' has no runtime '{config.runtime}'", instead)


KIND = pb.ModelInstanceGroup.Kind


def broken_accelerator_rules(config: pb.ModelConfig, backend: Backend | None) -> Iterator[Finding]:
    """Findings about the accelerators of a complete configuration; `backend` is None for an ensemble."""
    accelerators = config.optimization.execution_accelerators
    for name, entries, known, kind in (
        ("gpu_execution_accelerator", accelerators.gpu_execution_accelerator, "gpu_accelerators", KIND.KIND_GPU),
        ("cpu_execution_accelerator", accelerators.cpu_execution_accelerator, "cpu_accelerators", KIND.KIND_CPU),
    ):
        names: frozenset[str] = getattr(backend, known, frozenset())
        used = any(group.kind == kind for group in config.instance_group)
        for index, entry in enumerate(entries):
            path = ("optimization", "execution_accelerators", name, index)
            if used and entry.name not in names:
                text = f"unknown Execution Accelerator '{entry.name}' is requested"
                served = f"those of backend '{config.backend}' are {', '.join(sorted(names))}" if names else "remove it"
                yield Finding((*path, "name"), text, served)


BACKEND = "tensorrt"
SHAPE_TYPES = (pb.TYPE_INT32, pb.TYPE_INT64)
CAPABILITY = re.compile(r"\d+\.\d+")


def broken_plan_rules(config: pb.ModelConfig) -> Iterator[Finding]:
    """One finding for each rule that is broken; of a configuration whose parameters can be read."""
    for index, given in enumerate(config.input):
        if given.is_shape_tensor:
            yield from _shape_tensor(config, given, ("input", index))
    for index, output in enumerate(config.output):
        if output.is_shape_tensor:
            yield from _shape_tensor(config, output, ("output", index))
    for index, group in enumerate(config.instance_group):
        if group.profile:
            yield from _profiles(config, group, ("instance_group", index, "profile"))
    yield from _files(config)


def _shape_tensor(config: pb.ModelConfig, tensor: pb.ModelInput | pb.ModelOutput, path: FieldPath) -> Iterator[Finding]:
    where = (*path, "is_shape_tensor")
    if config.backend != BACKEND:
        yield Finding(where, "shape tensors are only supported for TensorRT platform", "remove it")
        return
    which = f"shape tensor '{tensor.name}'"
    if tensor.data_type not in SHAPE_TYPES:
        yield Finding((*path, "data_type"), f"{which} must be TYPE_INT32 or TYPE_INT64")
    if len(tensor.dims) != 1 or tensor.dims[0] < 1:
        instead = "write how many values a request gives, without the batch size"
        yield Finding((*path, "dims"), f"{which} must have one dimension, which does not vary,", instead)
    if tensor.HasField("reshape"):
        yield Finding((*path, "reshape"), f"{which} cannot be reshaped", "remove it")
    if isinstance(tensor, pb.ModelInput):
        yield from _shape_input(config, tensor, path, which)


def _shape_input(config: pb.ModelConfig, tensor: pb.ModelInput, path: FieldPath, which: str) -> Iterator[Finding]:
    own = of_server(config)
    if tensor.optional:
        yield Finding((*path, "optional"), f"{which} cannot be optional", "remove it")
    if tensor.allow_ragged_batch or tensor.name in own["pad"]:
        yield Finding(path, f"{which} can be neither ragged nor padded", "remove allow_ragged_batch and pad")
    if config.HasField("sequence_batching"):
        yield Finding(path, f"{which} cannot be an input of a model with sequence_batching")
    if own["split_requests"]:
        yield Finding(("parameters", "split_requests"), f"requests with {which} cannot be split", "remove it")


def _profiles(config: pb.ModelConfig, group: pb.ModelInstanceGroup, path: FieldPath) -> Iterator[Finding]:
    which = f"instance group {group.name} of model {config.name}"
    if config.backend != BACKEND:
        yield Finding(path, f"{which} specifies profile field which is only supported for TensorRT models", "remove it")
        return
    for profile in group.profile:
        if not profile.isdecimal():
            text = f"{which} specifies invalid profile {profile}"
            instead = "the field should contain the string representation of a non-negative integer"
            yield Finding(path, text, instead)


def _files(config: pb.ModelConfig) -> Iterator[Finding]:
    path = ("cc_model_filenames",)
    if config.cc_model_filenames and config.backend != BACKEND:
        text = "only plans of TensorRT are made for one kind of GPU; cc_model_filenames is not supported"
        yield Finding(path, text, "name the one file as default_model_filename")
        return
    for capability in config.cc_model_filenames:
        if not CAPABILITY.fullmatch(capability):
            text = f"'{capability}' is no compute capability of a GPU"
            yield Finding((*path, capability), text, 'write for example key: "9.0"')
