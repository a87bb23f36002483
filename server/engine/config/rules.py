"""The rules for the fields that are served; `inferd.server.engine.config.refused` has the other fields."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from typing import TypeAlias

from inferd.server.engine.config.backend_rules import broken_plan_rules
from inferd.server.engine.config.batching import queue_rules, wrong_batches
from inferd.server.engine.config.ensemble import ensemble_rules
from inferd.server.engine.config.findings import Finding, raise_any
from inferd.server.engine.config.measured import wrong_metrics
from inferd.server.engine.config.parameters import of_server, wrong
from inferd.server.engine.config.refused import refusals
from inferd.server.engine.config.sequences import broken_sequence_rules
from inferd.server.engine.config.tensors import NAME_OF
from inferd.server.engine.config.warmup import too_many_warmups, wrong_warmup
from inferd.server.engine.pbtxt.source import NOWHERE, FieldPath, Source
from inferd_client.pb import model_config_pb2 as pb

ModelTensor: TypeAlias = pb.ModelInput | pb.ModelOutput

# No real model comes near these limits. A larger number would use up memory or threads before anyone noticed it.
MAX_BATCH_SIZE = 1 << 20
MAX_INSTANCES = 1024
MAX_TENSORS = 4096
MAX_RANK = 16  # batch dimension included
MAX_ELEMENTS = 1 << 40  # of one tensor, all its fixed dimensions and the largest batch
MAX_NAME_BYTES = 1024

KIND = pb.ModelInstanceGroup.Kind


def validate(
    config: pb.ModelConfig,
    source: Source = NOWHERE,
    scalars: Collection[str] = (),
    gpus: int = 0,
    needs_tensors: bool = True,
) -> None:
    """Check a complete configuration.

    Args:
        scalars: names of tensors that are scalars in the model file: the configuration may leave out their dims.
        gpus: how many GPUs the machine has.
        needs_tensors: there must be an input and an output.

    Raises:
        ConfigError: the configuration has a field that is not served or breaks a rule; the text has a line for each.
    """
    missing = _missing_tensors(config) if needs_tensors else ()
    raise_any(
        [*refusals(config), *missing, *wrong_metrics(config), *broken_rules(config, scalars, gpus)], config.name, source
    )


def broken_rules(config: pb.ModelConfig, scalars: Collection[str], gpus: int) -> Iterator[Finding]:
    yield from _max_batch_size(config)
    yield from _version_policy(config)
    yield from _tensors(config, "input", config.input, scalars)
    yield from _tensors(config, "output", config.output, scalars)
    for index, tensor in enumerate(config.input):
        yield from _format(tensor, ("input", index))
    yield from _dynamic_batching(config)
    yield from broken_sequence_rules(config)
    yield from _instance_groups(config, gpus)
    yield from _gpu_options(config)
    yield from ensemble_rules(config)
    unreadable = list(wrong(config))
    yield from unreadable
    if not unreadable:
        yield from queue_rules(config)
        yield from broken_plan_rules(config)
        yield from wrong_batches(config)
        yield from wrong_warmup(config)
        yield from too_many_warmups(config)
        yield from _response_cache(config)
        yield from _splitting(config)


def _max_batch_size(config: pb.ModelConfig) -> Iterator[Finding]:
    size = config.max_batch_size
    if size < 0:
        yield Finding(("max_batch_size",), "'max_batch_size' must be non-negative value", f"got {size}")
    elif size > MAX_BATCH_SIZE:
        yield Finding(("max_batch_size",), f"'max_batch_size' must be <= {MAX_BATCH_SIZE}", f"got {size}")


def _version_policy(config: pb.ModelConfig) -> Iterator[Finding]:
    for index, version in enumerate(config.version_policy.specific.versions):
        if version < 0:
            path = ("version_policy", "specific", "versions", index)
            yield Finding(path, "a version must be non-negative", f"got {version}")


# ---- tensors --------------------------------------------------------------------------------------------------------


def _missing_tensors(config: pb.ModelConfig) -> Iterator[Finding]:
    for kind in ("input", "output"):
        if not getattr(config, kind):
            instead = f'write {kind} [ {{ name: "..." data_type: TYPE_FP32 dims: [ -1 ] }} ]'
            yield Finding((kind,), f"model configuration must contain at least one {kind}", instead)


def _tensors(
    config: pb.ModelConfig,
    kind: str,
    tensors: Collection[ModelTensor],
    scalars: Collection[str],
) -> Iterator[Finding]:
    if len(tensors) > MAX_TENSORS:
        yield Finding((kind,), f"at most {MAX_TENSORS} {kind}s are served, got {len(tensors)},")
        return
    counts = Counter(tensor.name for tensor in tensors)
    for index, tensor in enumerate(tensors):
        path = (kind, index)
        yield from _tensor(config, kind, tensor, path, scalars)
        if tensor.name and counts[tensor.name] > 1:
            yield Finding((*path, "name"), f"{kind} '{tensor.name}' is given {counts[tensor.name]} times")


def _tensor(
    config: pb.ModelConfig, kind: str, tensor: ModelTensor, path: FieldPath, scalars: Collection[str]
) -> Iterator[Finding]:
    which = f"model {kind} '{tensor.name}'"
    if not tensor.name:
        yield Finding(path, f"model {kind} must specify 'name'")
    elif not _is_name(tensor.name):
        yield Finding((*path, "name"), f"the name of model {kind} {path[1]} {A_NAME}")
    if tensor.data_type not in NAME_OF:
        yield Finding(path, f"{which} must specify 'data_type'", "write data_type: TYPE_FP32 or another of the types")
    if not tensor.dims and tensor.name not in scalars:
        yield Finding(path, f"{which} must specify 'dims'", "write dims: [ ... ], -1 for each variable dimension")
    for dim in tensor.dims:
        if dim < 1 and dim != -1:
            text = f"{which} dimension must be integer >= 1, or -1 to indicate a variable-size dimension"
            yield Finding((*path, "dims"), text, f"got {dim}")
    batches = config.max_batch_size > 0
    rank = len(tensor.dims) + batches
    if rank > MAX_RANK:
        yield Finding((*path, "dims"), f"{which} has {rank} dimensions, at most {MAX_RANK} are served")
    rank = len(tensor.reshape.shape) + batches
    if rank > MAX_RANK:
        yield Finding((*path, "reshape"), f"{which} is reshaped to {rank} dimensions, at most {MAX_RANK} are served")
    elements = math.prod(dim for dim in tensor.dims if dim > 0) * max(1, config.max_batch_size)
    if elements > MAX_ELEMENTS:
        text = f"{which} has {elements} elements in the largest batch, at most {MAX_ELEMENTS} are served"
        yield Finding((*path, "dims"), text, "write smaller dims or max_batch_size")


A_NAME = f"must be printable and at most {MAX_NAME_BYTES} bytes long"


def _is_name(text: str) -> bool:
    return text.isprintable() and len(text.encode()) <= MAX_NAME_BYTES


def _format(tensor: pb.ModelInput, path: FieldPath) -> Iterator[Finding]:
    if tensor.format != pb.ModelInput.FORMAT_NONE and len(tensor.dims) != 3:
        name = pb.ModelInput.Format.Name(tensor.format).removeprefix("FORMAT_")
        text = f"model input {name} require 3 dims"
        yield Finding((*path, "format"), text, f"'{tensor.name}' has {len(tensor.dims)}")


# ---- scheduling -----------------------------------------------------------------------------------------------------


def _dynamic_batching(config: pb.ModelConfig) -> Iterator[Finding]:
    if not config.HasField("dynamic_batching"):
        return
    for index, size in enumerate(config.dynamic_batching.preferred_batch_size):
        path: FieldPath = ("dynamic_batching", "preferred_batch_size", index)
        if size <= 0:
            yield Finding(path, "dynamic batching preferred size must be positive", f"got {size}")
        elif size > config.max_batch_size:
            text = f"dynamic batching preferred size must be <= max batch size {config.max_batch_size}"
            yield Finding(path, text, f"got {size}")
    if config.dynamic_batching.max_queue_delay_microseconds > 1 << 62:
        path = ("dynamic_batching", "max_queue_delay_microseconds")
        yield Finding(path, f"dynamic batching delay must be <= {1 << 62}")


def _splitting(config: pb.ModelConfig) -> Iterator[Finding]:
    path: FieldPath = ("parameters", "split_requests")
    if not of_server(config)["split_requests"]:
        return
    if config.max_batch_size == 0:
        yield Finding(path, "requests without a batch dimension cannot be split", "write max_batch_size")
    if config.HasField("sequence_batching") or config.HasField("ensemble_scheduling"):
        yield Finding(path, "requests of sequences and ensembles are not split", "remove it")
    if config.model_transaction_policy.decoupled:
        yield Finding(path, "requests of decoupled models are not split", "remove it")


def _response_cache(config: pb.ModelConfig) -> Iterator[Finding]:
    # the responses of such models depend on more than the request
    reuse = "Response Cache" if config.response_cache.enable else "coalesce_requests"
    path: FieldPath = ("response_cache",) if config.response_cache.enable else ("parameters", "coalesce_requests")
    if not config.response_cache.enable and not of_server(config)["coalesce_requests"]:
        return
    if config.HasField("sequence_batching"):
        yield Finding(path, f"{reuse} does not currently support model with 'sequence_batching' scheduler", "remove it")
    if config.model_transaction_policy.decoupled:
        yield Finding(
            path, f"{reuse} does not currently support model with 'decoupled' transaction policy", "remove it"
        )


def _gpus(group: pb.ModelInstanceGroup, path: FieldPath, which: str, gpus: int) -> Iterator[Finding]:
    if not gpus:
        instead = f"write kind: KIND_CPU{' and remove gpus' if group.gpus else ''}"
        yield Finding(
            (*path, "kind"), f"{which} has kind KIND_GPU but no GPUs are available", instead, names_model=True
        )
        return
    for gpu in group.gpus:
        if not 0 <= gpu < gpus:
            text = f"{which} specifies invalid or unsupported gpu id {gpu}"
            instead = f"the ids of GPUs are {', '.join(map(str, range(gpus)))}"
            yield Finding((*path, "gpus"), text, instead, names_model=True)


def _gpu_options(config: pb.ModelConfig) -> Iterator[Finding]:
    for index, spec in enumerate(config.optimization.cuda.graph_spec):
        path = ("optimization", "cuda", "graph_spec", index)
        lowest = spec.graph_lower_bound.batch_size if spec.HasField("graph_lower_bound") else spec.batch_size
        if not 0 <= spec.batch_size <= config.max_batch_size:
            text = f"the batch_size of a graph_spec must be 0 to max_batch_size, which is {config.max_batch_size},"
            yield Finding((*path, "batch_size"), text, f"got {spec.batch_size}")
        if lowest > spec.batch_size:
            text = f"graph_lower_bound must not be above the batch_size {spec.batch_size} of its graph_spec"
            yield Finding((*path, "graph_lower_bound"), text, f"got {lowest}")
        yield from _graph_shapes(config, spec, path)


def _graph_shapes(
    config: pb.ModelConfig, spec: pb.ModelOptimizationPolicy.Cuda.GraphSpec, path: FieldPath
) -> Iterator[Finding]:
    inputs = {each.name: each.reshape.shape if each.HasField("reshape") else each.dims for each in config.input}
    for name, shape in spec.input.items():
        if name not in inputs:
            text = f"graph_spec has a shape for '{name}', which is no input of the model"
            yield Finding((*path, "input"), text, f"the inputs are {', '.join(inputs)}")
            continue
        wanted = list(inputs[name])
        fits = len(shape.dim) == len(wanted) and all(d == w or w == -1 for d, w in zip(shape.dim, wanted, strict=True))
        if not fits or min(shape.dim, default=0) < 0:
            text = f"the shape of input '{name}' in a graph_spec, without the batch dimension, must match {wanted}"
            yield Finding((*path, "input"), text, f"got {list(shape.dim)}")
    for name, shape in spec.graph_lower_bound.input.items():
        if name not in spec.input or list(spec.input[name].dim) != list(shape.dim):
            text = f"the shape of input '{name}' in graph_lower_bound must be the same as in its graph_spec"
            rest = "for several lengths, pad to fixed ones (parameter pad_buckets) and write a graph_spec for each"
            yield Finding((*path, "graph_lower_bound"), text, rest)


def excessive(config: pb.ModelConfig) -> Iterator[Finding]:
    """Findings about numbers so large that checking the other rules would take much memory or time."""
    yield from _too_many_instances(config)
    yield from too_many_warmups(config)


def _too_many_instances(config: pb.ModelConfig) -> Iterator[Finding]:
    total = sum(max(0, group.count) * max(1, len(group.gpus)) for group in config.instance_group)
    if total > MAX_INSTANCES:
        yield Finding(("instance_group",), f"at most {MAX_INSTANCES} instances are served", f"got {total}")


def _instance_groups(config: pb.ModelConfig, gpus: int) -> Iterator[Finding]:
    names: set[str] = set()
    for index, group in enumerate(config.instance_group):
        path = ("instance_group", index)
        which = f"instance group {group.name} of model {config.name}"
        if group.count < 0:
            text = f"{which} must not have a negative count"
            yield Finding((*path, "count"), text, f"got {group.count}", names_model=True)
        if group.kind == KIND.KIND_GPU:
            yield from _gpus(group, path, which, gpus)
        elif group.gpus:
            text = f"{which} has kind {KIND.Name(group.kind)} but specifies one or more GPUs"
            yield Finding((*path, "gpus"), text, "remove gpus", names_model=True)
        if not _is_name(group.name):
            yield Finding((*path, "name"), f"the name of instance group {index} {A_NAME}")
        if group.name in names:
            text = f"there are two instance groups named '{group.name}'"
            yield Finding((*path, "name"), text, "name them differently")
        names.add(group.name)
        yield from _rate_limiter(group, path)
    if config.instance_group and all(group.passive for group in config.instance_group):
        text = f"requests for model '{config.name}' would wait for ever, because all its instances are passive"
        yield Finding(("instance_group",), text, "write passive: false for one group", names_model=True)
    yield from _too_many_instances(config)


def _rate_limiter(group: pb.ModelInstanceGroup, path: FieldPath) -> Iterator[Finding]:
    names = [resource.name for resource in group.rate_limiter.resources]
    for index, name in enumerate(names):
        where = (*path, "rate_limiter", "resources", index)
        if not name:
            yield Finding(where, f"resource {index} of instance group {group.name} must have a name")
        elif name in names[:index]:
            yield Finding(where, f"resource '{name}' of instance group {group.name} is given twice")
