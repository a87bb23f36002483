"""Auto-complete: reads from the model file what the configuration leaves out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol, TypeAlias

from inferd.backends.api import Signature, TensorSpec
from inferd.server.engine.config.datatypes import TYPE_OF
from inferd.server.engine.config.defaults import fill_defaults
from inferd.server.engine.config.findings import Finding, error_of
from inferd.server.engine.config.supplied import supplied_inputs
from inferd.server.engine.pbtxt.source import NOWHERE, Source
from inferd.server.pb import model_config_pb2 as pb

ModelTensor: TypeAlias = pb.ModelInput | pb.ModelOutput

DEFAULT_MAX_BATCH_SIZE = 4


class Tensors(Protocol):
    """The inputs or the outputs of a configuration."""

    def add(self, *, name: str) -> ModelTensor: ...
    def __iter__(self) -> Iterator[ModelTensor]: ...
    def __len__(self) -> int: ...


def needs_signature(config: pb.ModelConfig, source: Source) -> bool:
    """Whether the model file could complete anything."""
    tensors: list[ModelTensor] = [*config.input, *config.output]
    return (
        not config.input
        or not config.output
        or any(not tensor.data_type or not tensor.dims for tensor in tensors)
        or not source.has("max_batch_size")
    )


def complete(
    config: pb.ModelConfig,
    signature: Signature,
    source: Source = NOWHERE,
    default_max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
) -> frozenset[str]:
    """Fill in, in place and as Triton does: tensors, the largest batch of a model that can batch, dynamic batching.

    A maximum batch size is not added if the file has max_batch_size 0, or if its tensors have the batch dimension among
    their dims: both mean that the model is to be served without batching.

    Returns:
        The names of tensors that have no dimension but the batch dimension.

    Raises:
        ConfigError: max_batch_size is set for a model that cannot batch.
    """
    if 0 < signature.max_batch_size < config.max_batch_size:
        raise error_of([_too_many_rows(config, signature)], config.name, source)
    if config.max_batch_size > 0 and not signature.batches:
        text = "autofill failed: model does not support batching while non-zero max_batch_size is specified"
        instead = "write max_batch_size: 0, and dims with all dimensions of the model"
        raise error_of([Finding(("max_batch_size",), text, instead)], config.name, source)
    if signature.batches and not config.max_batch_size and _may_batch(config, signature, source):
        config.max_batch_size = signature.max_batch_size or default_max_batch_size
        if config.max_batch_size > 1 and config.WhichOneof("scheduling_choice") is None:
            config.dynamic_batching.SetInParent()
    whole = signature.batches and not config.max_batch_size
    supplied = {spec.tensor.name for spec in supplied_inputs(config)}
    kept = {spec.source for spec in supplied_inputs(config) if spec.kind == "STATE"}
    scalars = _fill(config.input, signature.inputs, whole, supplied)
    scalars |= _fill(config.output, signature.outputs, whole, kept)
    fill_defaults(config)
    return scalars


def _too_many_rows(config: pb.ModelConfig, signature: Signature) -> Finding:
    # only plans of TensorRT set a limit
    text = (
        f"autofill failed for model '{config.name}': configuration specified max-batch {config.max_batch_size} but "
        f"TensorRT engine only supports max-batch {signature.max_batch_size}"
    )
    return Finding(("max_batch_size",), text, f"write at most {signature.max_batch_size}", names_model=True)


def _may_batch(config: pb.ModelConfig, signature: Signature, source: Source) -> bool:
    if source.has("max_batch_size"):
        return False
    return _ranks_fit(config.input, signature.inputs) and _ranks_fit(config.output, signature.outputs)


def _ranks_fit(tensors: Tensors, specs: Sequence[TensorSpec]) -> bool:
    """Whether no configured tensor has more dimensions than the model's has without its batch dimension."""
    ranks = {spec.name: len(spec.dims) for spec in specs}
    return all(len(tensor.dims) <= max(1, ranks.get(tensor.name, 0)) for tensor in tensors if tensor.name in ranks)


def _fill(tensors: Tensors, specs: Sequence[TensorSpec], whole: bool, others: Collection[str]) -> frozenset[str]:
    """Add all tensors but the `others` if none is given, else complete the given ones.

    Args:
        whole: the model can batch, but is to be served without batching.
    """
    if not tensors:
        for spec in specs:
            if spec.name not in others:
                tensors.add(name=spec.name).is_shape_tensor = spec.shape_tensor
    known = {spec.name: spec for spec in specs}
    scalars = set()
    for tensor in tensors:
        if tensor.name not in known:
            continue  # the backend reports it when it loads the model
        spec = known[tensor.name]
        if not tensor.data_type:
            tensor.data_type = TYPE_OF[spec.datatype]
        if not tensor.dims:
            tensor.dims.extend(_whole(spec) if whole else spec.dims)
        if not tensor.dims:
            scalars.add(tensor.name)
    return frozenset(scalars)


def _whole(spec: TensorSpec) -> tuple[int, ...]:
    """The dims of a tensor of a model that can batch, but is to be served without batching."""
    return (spec.dims[0] + 1,) if spec.shape_tensor else (-1, *spec.dims)
