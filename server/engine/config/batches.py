"""The rules for how a batch changes tensors: reshaping, ragged inputs, padding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from inferd.server.engine.config.findings import Finding
from inferd.server.engine.config.parameters import of_server
from inferd.server.engine.pbtxt.source import FieldPath
from inferd.server.pb import model_config_pb2 as pb

UNPADDED = {pb.TYPE_STRING, pb.TYPE_BF16}
"""Datatypes that cannot be padded."""


def wrong_batches(config: pb.ModelConfig) -> Iterator[Finding]:
    """One finding for each rule that is broken, of a configuration whose parameters can be read."""
    for index, given in enumerate(config.input):
        yield from _reshape(config, "input", given, ("input", index, "reshape"))
    for index, output in enumerate(config.output):
        yield from _reshape(config, "output", output, ("output", index, "reshape"))
    yield from _ragged(config)
    yield from _batch_inputs(config)
    yield from _batch_outputs(config)
    yield from _padding(config)


def _reshape(
    config: pb.ModelConfig, kind: str, tensor: pb.ModelInput | pb.ModelOutput, path: FieldPath
) -> Iterator[Finding]:
    if not tensor.HasField("reshape"):
        return
    which = f"model {kind} '{tensor.name}'"
    shape = tensor.reshape.shape
    if not shape and config.max_batch_size == 0:
        yield Finding(
            path, f"{which} cannot have empty reshape for non-batching model as scalar tensors are not served"
        )
        return
    if any(dim < 1 and dim != -1 for dim in shape):
        yield Finding(path, f"{which} reshape dimensions must be integer >= 1, or -1", f"got {list(shape)}")
        return
    if list(tensor.dims).count(-1) != list(shape).count(-1):
        yield Finding(path, f"{which} has different number of variable dimensions for dims and reshape")
    elif _fixed_size(tensor.dims) != _fixed_size(shape):
        yield Finding(path, f"{which} has different size for dims and reshape")


def _fixed_size(dims: Iterable[int]) -> int:
    return math.prod(dim for dim in dims if dim != -1)


def _ragged(config: pb.ModelConfig) -> Iterator[Finding]:
    for index, tensor in enumerate(config.input):
        if tensor.allow_ragged_batch and config.max_batch_size == 0:
            path = ("input", index, "allow_ragged_batch")
            yield Finding(path, f"input '{tensor.name}' is ragged, but max_batch_size is 0", "write max_batch_size")
        if tensor.allow_ragged_batch and tensor.HasField("reshape"):
            path = ("input", index, "reshape")
            yield Finding(path, f"input '{tensor.name}' is ragged: the model gets its elements in one dimension")


def _batch_inputs(config: pb.ModelConfig) -> Iterator[Finding]:
    inputs = {tensor.name for tensor in config.input}
    targets: set[str] = set()
    for index, each in enumerate(config.batch_input):
        path: FieldPath = ("batch_input", index)
        if len(each.source_input) != 1:
            yield Finding(path, f"batch input kind expects 1 source input, got {len(each.source_input)},")
        if each.data_type not in (pb.TYPE_INT32, pb.TYPE_FP32):
            yield Finding(path, "batch input data type must be TYPE_INT32 or TYPE_FP32")
        for source in each.source_input:
            if source not in inputs:
                yield Finding(path, f"unknown source input name '{source}'")
        for target in each.target_name:
            if target in targets or target in inputs:
                yield Finding(path, f"target input name '{target}' can only be specified once")
            targets.add(target)
        if not each.target_name:
            yield Finding(path, "batch input must specify 'target_name'")


def _batch_outputs(config: pb.ModelConfig) -> Iterator[Finding]:
    ragged = {tensor.name for tensor in config.input if tensor.allow_ragged_batch}
    outputs = {tensor.name for tensor in config.output}
    targets: set[str] = set()
    for index, each in enumerate(config.batch_output):
        path: FieldPath = ("batch_output", index)
        if len(each.source_input) != 1:
            yield Finding(path, f"batch output kind expects 1 source input, got {len(each.source_input)},")
        for source in each.source_input:
            if source not in ragged:
                yield Finding(path, f"unknown source input name '{source}'", "name an input with allow_ragged_batch")
        for target in each.target_name:
            if target not in outputs:
                yield Finding(path, f"unknown target output name '{target}'")
            if target in targets:
                yield Finding(path, f"target output name '{target}' can only be specified once")
            targets.add(target)


def _padding(config: pb.ModelConfig) -> Iterator[Finding]:
    own = of_server(config)
    inputs = {tensor.name: tensor for tensor in config.input}
    outputs = {tensor.name: tensor for tensor in config.output}
    if own["pad"] and config.max_batch_size == 0:
        yield Finding(("parameters", "pad"), "inputs are padded, but max_batch_size is 0", "write max_batch_size")
    for name in own["pad"]:
        path: FieldPath = ("parameters", "pad")
        tensor = inputs.get(name)
        if tensor is None:
            yield Finding(path, f"there is no input '{name}'")
        elif list(tensor.dims).count(-1) != 1:
            yield Finding(path, f"input '{name}' must have one variable dimension", f"it has dims {list(tensor.dims)}")
        elif tensor.data_type in UNPADDED or tensor.allow_ragged_batch or tensor.HasField("reshape"):
            yield Finding(
                path, f"input '{name}' cannot be padded", "not with TYPE_STRING, TYPE_BF16, ragged or reshape"
            )
    for name, source in own["unpad"].items():
        path = ("parameters", "unpad")
        output = outputs.get(name)
        if output is None:
            yield Finding(path, f"there is no output '{name}'")
        elif list(output.dims).count(-1) != 1 or output.data_type == pb.TYPE_STRING or output.HasField("reshape"):
            yield Finding(path, f"output '{name}' must have one variable dimension, of fixed-size elements, no reshape")
        if source not in own["pad"]:
            yield Finding(path, f"input '{source}' is not padded", "name it in the parameter pad")
