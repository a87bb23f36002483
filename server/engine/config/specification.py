"""Makes the frozen ModelSpec for backends and engine from a ModelConfig."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from inferd.backends.api import (
    AcceleratorSpec,
    BatchingSpec,
    GpuSpec,
    GraphSpec,
    InstanceSpec,
    ModelSpec,
    ResourceSpec,
    TensorSpec,
)
from inferd.server.engine.config.batching import queue_spec
from inferd.server.engine.config.ensemble import ensemble_spec
from inferd.server.engine.config.parameters import of_backend, of_server
from inferd.server.engine.config.sequences import broken_sequence_rules, sequence_spec
from inferd.server.engine.config.tensors import NAME_OF, kept_outputs, supplied_inputs
from inferd.server.engine.config.warmup import warmup_specs
from inferd.server.engine.pbtxt.files import read_text
from inferd.server.engine.pbtxt.source import NOWHERE, Source
from inferd.server.errors import ConfigError
from inferd_client.pb import model_config_pb2 as pb

MAX_LABEL_FILE_SIZE = 16 << 20


def to_spec(config: pb.ModelConfig, model_dir: Path, source: Source = NOWHERE) -> ModelSpec:
    """The specification of a normalised configuration, which may be incomplete.

    Raises:
        ConfigError: a named file lies outside the model's folder, or the labels cannot be read.
    """
    own = of_server(config)
    graph = config.optimization.graph if config.optimization.HasField("graph") else None
    return ModelSpec(
        name=config.name,
        backend=config.backend,
        platform=config.platform,
        runtime=config.runtime,
        max_batch_size=config.max_batch_size,
        inputs=tuple(_input(tensor, own["pad"]) for tensor in config.input),
        outputs=tuple(
            _output(config, tensor, own["unpad"], _labels(tensor, model_dir, source, index))
            for index, tensor in enumerate(config.output)
        ),
        batching=_batching(config),
        queue=queue_spec(config),
        sequence=None if any(broken_sequence_rules(config)) else sequence_spec(config, model_dir, source),
        instances=tuple(instance_specs(config)),
        parameters=MappingProxyType(of_backend(config)),
        default_model_filename=config.default_model_filename,
        coalesces=own["coalesce_requests"],
        splits=own["split_requests"],
        caches=config.response_cache.enable,
        graph_level=graph.level if graph else None,
        warmup=tuple(warmup_specs(config, model_dir, source)),
        pad_buckets=own["pad_buckets"],
        supplied=tuple(supplied_inputs(config)),
        kept=tuple(kept_outputs(config)),
        decoupled=config.model_transaction_policy.decoupled,
        single_responses=own["decoupled_model_infer"],
        gpu=_gpu(config),
        gpu_accelerators=_accelerators(config.optimization.execution_accelerators.gpu_execution_accelerator),
        cpu_accelerators=_accelerators(config.optimization.execution_accelerators.cpu_execution_accelerator),
        model_filenames=MappingProxyType(dict(config.cc_model_filenames)),
        ensemble=ensemble_spec(config),
    )


def _input(tensor: pb.ModelInput, padding: Mapping[str, float]) -> TensorSpec:
    return TensorSpec(
        tensor.name,
        NAME_OF.get(tensor.data_type, ""),
        tuple(tensor.dims),
        optional=tensor.optional,
        model_shape=_reshape(tensor),
        ragged=tensor.allow_ragged_batch,
        shape_tensor=tensor.is_shape_tensor,
        pad_value=padding.get(tensor.name),
    )


def _output(
    config: pb.ModelConfig, tensor: pb.ModelOutput, unpad: Mapping[str, str], labels: tuple[str, ...]
) -> TensorSpec:
    scattered = (each.source_input[:1] for each in config.batch_output if tensor.name in each.target_name)
    return TensorSpec(
        tensor.name,
        NAME_OF.get(tensor.data_type, ""),
        tuple(tensor.dims),
        labels=labels,
        shape_tensor=tensor.is_shape_tensor,
        model_shape=_reshape(tensor),
        cut_like=unpad.get(tensor.name, ""),
        like_input="".join(next(scattered, ())),
    )


def _reshape(tensor: pb.ModelInput | pb.ModelOutput) -> tuple[int, ...] | None:
    return tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None


def _labels(tensor: pb.ModelOutput, model_dir: Path, source: Source, index: int) -> tuple[str, ...]:
    """One label a line; the line's number is the class."""
    if not tensor.label_filename:
        return ()
    try:
        text = read_text(model_dir, tensor.label_filename, model_dir, MAX_LABEL_FILE_SIZE)
    except ConfigError as error:
        where = source.at("output", index, "label_filename")
        raise ConfigError(f"{where}: label file of output '{tensor.name}': {error}") from None
    return tuple(text.splitlines())


def _batching(config: pb.ModelConfig) -> BatchingSpec | None:
    if not config.HasField("dynamic_batching") or config.max_batch_size < 1:
        return None
    batching = config.dynamic_batching
    adaptive = of_server(config)["adaptive_queue_delay"]
    return BatchingSpec(tuple(batching.preferred_batch_size), batching.max_queue_delay_microseconds, adaptive=adaptive)


def instance_specs(config: pb.ModelConfig) -> list[InstanceSpec]:
    """`<group>_<i>` for each instance of each group; a group with several GPUs has its count on each."""
    kinds = pb.ModelInstanceGroup.Kind
    return [
        InstanceSpec(
            f"{group.name}_{i}",
            kinds.Name(group.kind).removeprefix("KIND_"),
            device,
            host_policy=group.host_policy,
            passive=group.passive,
            profiles=tuple(int(profile) for profile in group.profile if profile.isdecimal()),
            resources=tuple(
                ResourceSpec(each.name, each.count, getattr(each, "global")) for each in group.rate_limiter.resources
            ),
            priority=group.rate_limiter.priority,
        )
        for group in config.instance_group
        for i, device in enumerate(device for _ in range(group.count) for device in group.gpus or (0,))
    ]


def _accelerators(
    given: Iterable[pb.ModelOptimizationPolicy.ExecutionAccelerators.Accelerator],
) -> tuple[AcceleratorSpec, ...]:
    return tuple(AcceleratorSpec(each.name, MappingProxyType(dict(each.parameters))) for each in given)


def _gpu(config: pb.ModelConfig) -> GpuSpec:
    optimization = config.optimization
    on_gpu = any(group.kind == pb.ModelInstanceGroup.KIND_GPU for group in config.instance_group)
    return GpuSpec(
        graphs=_graphs(config) if optimization.cuda.graphs and on_gpu else (),
        busy_wait=optimization.cuda.busy_wait_events,
        priority={pb.ModelOptimizationPolicy.PRIORITY_MAX: 1, pb.ModelOptimizationPolicy.PRIORITY_MIN: -1}.get(
            optimization.priority, 0
        ),
        pinned_inputs=optimization.input_pinned_memory.enable,
        pinned_outputs=optimization.output_pinned_memory.enable,
    )


def _graphs(config: pb.ModelConfig) -> tuple[GraphSpec, ...]:
    """The graphs of `graph_spec`; without any, as in Triton, graphs for batches of 1, of preferred sizes and the
    largest."""
    specs = config.optimization.cuda.graph_spec
    if not specs:
        sizes = {1, max(1, config.max_batch_size), *config.dynamic_batching.preferred_batch_size}
        return tuple(GraphSpec(size, size) for size in sorted(sizes))
    return tuple(
        GraphSpec(
            rows=max(1, spec.batch_size),
            lowest=max(1, (spec.graph_lower_bound if spec.HasField("graph_lower_bound") else spec).batch_size),
            shapes=MappingProxyType({name: tuple(shape.dim) for name, shape in spec.input.items()}),
        )
        for spec in specs
    )
