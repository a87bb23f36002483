"""Batches and the queues before them: preferred sizes, queue policies, and how a batch changes tensors.

Queue policies are those of dynamic_batching, and the parameters for models with another scheduler. A batch changes
tensors by reshaping, ragged inputs and padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from inferd.backends.api import QueuePolicySpec, QueueSpec
from inferd.server.engine.config.findings import Finding
from inferd.server.engine.config.parameters import QUEUE_PREFIX, of_server
from inferd.server.engine.config.tensors import NAME_OF, SIZE_OF
from inferd.server.engine.pbtxt.source import FieldPath
from inferd_client.pb import model_config_pb2 as pb

MAX_LEVELS = 256

OF_SEQUENCES = ("max_queue_size", "default_timeout_microseconds")
"""The queue parameters of models with sequence_batching, which cannot move a late request behind others."""

DELAY = pb.ModelQueuePolicy.DELAY


def queue_spec(config: pb.ModelConfig) -> QueueSpec:
    """How requests wait for the model, with any scheduler, by a configuration that obeys the rules below."""
    if not config.HasField("dynamic_batching"):
        return QueueSpec((_from_parameters(config),))
    batching = config.dynamic_batching
    default = batching.default_queue_policy
    chosen = batching.priority_queue_policy
    levels = min(batching.priority_levels, MAX_LEVELS)
    return QueueSpec(
        levels=tuple(_policy(chosen.get(i, default)) for i in range(1, levels + 1)) or (_policy(default),),
        default_level=batching.default_priority_level or 1,
        preserve_ordering=batching.preserve_ordering,
    )


def _policy(policy: pb.ModelQueuePolicy) -> QueuePolicySpec:
    return QueuePolicySpec(
        max_size=policy.max_queue_size,
        timeout_us=policy.default_timeout_microseconds,
        overridable=policy.allow_timeout_override,
        yields=policy.timeout_action == DELAY,
    )


def _from_parameters(config: pb.ModelConfig) -> QueuePolicySpec:
    own = of_server(config)
    return QueuePolicySpec(
        max_size=own[f"{QUEUE_PREFIX}max_queue_size"],
        timeout_us=own[f"{QUEUE_PREFIX}default_timeout_microseconds"],
        overridable=own[f"{QUEUE_PREFIX}allow_timeout_override"],
        yields=own[f"{QUEUE_PREFIX}timeout_action"] == "DELAY",
    )


def queue_rules(config: pb.ModelConfig) -> Iterator[Finding]:
    """Findings about queue policies, with Triton's texts."""
    scheduler = config.WhichOneof("scheduling_choice")
    for key in config.parameters:
        field = key.removeprefix(QUEUE_PREFIX)
        path: FieldPath = ("parameters", key)
        if not key.startswith(QUEUE_PREFIX):
            continue
        if scheduler == "dynamic_batching":
            way_out = f"write dynamic_batching {{ default_queue_policy {{ {field} }} }}"
            yield Finding(path, f"parameter '{key}' is for models without dynamic_batching", way_out)
        elif scheduler == "sequence_batching" and field not in OF_SEQUENCES:
            way_out = "remove it: a late sequence is refused, and a request's timeout may shorten its time"
            yield Finding(path, f"parameter '{key}' is for models without sequence_batching", way_out)
    batches = scheduler == "dynamic_batching" and config.max_batch_size > 0
    if of_server(config)["adaptive_queue_delay"] and not batches:
        text = "parameter 'adaptive_queue_delay' is for models with max_batch_size and dynamic_batching"
        yield Finding(("parameters", "adaptive_queue_delay"), text, "remove it")
    if scheduler != "dynamic_batching":
        return
    yield from _priorities(config.dynamic_batching)
    if config.dynamic_batching.preserve_ordering:
        yield from _ordering(config)


def _priorities(batching: pb.ModelDynamicBatching) -> Iterator[Finding]:
    levels = batching.priority_levels
    default: FieldPath = ("dynamic_batching", "default_priority_level")
    chosen: FieldPath = ("dynamic_batching", "priority_queue_policy")
    if levels > MAX_LEVELS:
        path = ("dynamic_batching", "priority_levels")
        yield Finding(path, f"at most {MAX_LEVELS} priority levels are served", f"got {levels}")
    elif levels == 0:
        for field, given in ((default, batching.default_priority_level), (chosen, batching.priority_queue_policy)):
            if given:
                yield Finding(field, f"{field[-1]} has no effect without priority_levels", "write priority_levels")
    else:
        if not 1 <= batching.default_priority_level <= levels:
            text = f"default priority level must be in range [1, {levels}]"
            yield Finding(default, text, f"got {batching.default_priority_level}")
        for level in batching.priority_queue_policy:
            if not 1 <= level <= levels:
                text = f"priority queue policy must have priority level in range [1, {levels}]"
                yield Finding((*chosen, str(level)), text, f"got {level}")


def _ordering(config: pb.ModelConfig) -> Iterator[Finding]:
    batching = config.dynamic_batching
    path: FieldPath = ("dynamic_batching", "preserve_ordering")
    if batching.priority_levels > 1:
        text = "Only one priority level is allowed when 'preserve_ordering' is true"
        yield Finding(path, text, "remove priority_levels or preserve_ordering")
    policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
    if any(each.timeout_action == DELAY and each.default_timeout_microseconds for each in policies):
        text = "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true"
        yield Finding(path, text, "write timeout_action: REJECT")
    if config.response_cache.enable or of_server(config)["coalesce_requests"]:
        text = "'preserve_ordering' can not be combined with 'response_cache' or coalesce_requests"
        yield Finding(path, text, "remove one of them: known responses would have to wait for others")


LARGEST = {"FP16": 65504.0, "FP32": 3.4028235e38}


def _has_value(datatype: str, value: float) -> bool:
    """Whether an element of this datatype may have the value; a fraction may be rounded."""
    if datatype.startswith("FP"):
        return not math.isfinite(value) or abs(value) <= LARGEST.get(datatype, math.inf)
    bits = 1 if datatype == "BOOL" else 8 * SIZE_OF.get(datatype, 8)
    lowest, end = (-(1 << bits - 1), 1 << bits - 1) if datatype.startswith("INT") else (0, 1 << bits)
    return lowest <= value < end and value == int(value)


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
    for name, value in own["pad"].items():
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
        elif not _has_value(NAME_OF.get(tensor.data_type, ""), value):
            yield Finding(path, f"input '{name}' cannot be padded with {value:g}", "write a value of its data_type")
    for name, source in own["unpad"].items():
        path = ("parameters", "unpad")
        output = outputs.get(name)
        if output is None:
            yield Finding(path, f"there is no output '{name}'")
        elif list(output.dims).count(-1) != 1 or output.data_type == pb.TYPE_STRING or output.HasField("reshape"):
            yield Finding(path, f"output '{name}' must have one variable dimension, of fixed-size elements, no reshape")
        if source not in own["pad"]:
            yield Finding(path, f"input '{source}' is not padded", "name it in the parameter pad")
