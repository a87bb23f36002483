"""What a configuration leaves out: Triton's defaults, and what the model file says."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from inferd.backends.api import GpuSpec, SequenceSpec, Signature, TensorSpec
from inferd.backends.loader import BUILTIN, PLATFORMS, backend_of_platform, model_files
from inferd.server.engine.config.findings import Finding, error_of
from inferd.server.engine.config.tensors import TYPE_OF, supplied_inputs
from inferd.server.engine.pbtxt.source import NOWHERE, Source
from inferd.server.settings import DEFAULTS
from inferd_client.pb import model_config_pb2 as pb

ENSEMBLE = "ensemble"
"""The platform of ensembles, which have no backend."""

# Where the configuration has no count, Triton runs two instances on the CPU with these backends. Triton does so with
# TensorFlow, too; here each instance of TensorFlow has a process and a copy of the graph to itself.
TWO_CPU_INSTANCES = {"onnxruntime"}

SEQUENCES, GPU = SequenceSpec(), GpuSpec()
"""Their defaults are those of configurations."""


def identify_name(config: pb.ModelConfig, model_dir: Path, source: Source) -> None:
    """Fill in the name.

    Raises:
        ConfigError: the configured name is not the folder's.
    """
    if not config.name:
        config.name = model_dir.name
    if config.name != model_dir.name:
        text = f"unexpected directory name '{model_dir.name}', directory name must equal model name,"
        instead = f'write name: "{model_dir.name}" or rename the folder'
        raise error_of([Finding(("name",), text, instead)], config.name, source)


def identify(config: pb.ModelConfig, model_dir: Path, version_dir: Path, source: Source) -> None:
    """Fill in name, platform, backend and model file.

    Raises:
        ConfigError: the name is not the folder's, or the backend is unknown or cannot be determined.
    """
    identify_name(config, model_dir, source)
    if config.HasField("ensemble_scheduling") and not config.platform and not config.backend:
        config.platform = ENSEMBLE
    if config.platform == ENSEMBLE and not config.backend:
        return
    if not config.backend:
        config.backend = _backend(config, model_dir, version_dir, source)
    if not config.platform:
        config.platform = _platform(config, version_dir)
    expected = backend_of_platform(config.platform) if config.platform else config.backend
    if expected != config.backend:
        text = f"unexpected 'platform' and 'backend' pair, got: {config.platform}, {config.backend},"
        raise error_of([Finding(("platform",), text, "remove platform")], config.name, source)
    if not config.default_model_filename and config.backend in BUILTIN:
        config.default_model_filename = model_files(config.backend)[config.platform]


def fill_defaults(config: pb.ModelConfig, gpus: int = 0) -> None:
    """Fill in all other defaults on a machine with `gpus` GPUs. A second call changes nothing."""
    policy = config.version_policy
    if policy.WhichOneof("policy_choice") in (None, "latest") and not policy.latest.num_versions:
        policy.latest.num_versions = 1
    if config.platform == ENSEMBLE:
        return  # the rest is for models that have instances
    if not config.optimization.HasField("input_pinned_memory"):
        config.optimization.input_pinned_memory.enable = GPU.pinned_inputs
    if not config.optimization.HasField("output_pinned_memory"):
        config.optimization.output_pinned_memory.enable = GPU.pinned_outputs
    if config.HasField("dynamic_batching") and not config.dynamic_batching.preferred_batch_size:
        config.dynamic_batching.preferred_batch_size.extend(preferred_by_default(config))
    _normalise_sequences(config)
    _normalise_instances(config, gpus)


def preferred_by_default(config: pb.ModelConfig) -> tuple[int, ...]:
    """The preferred sizes that ModelConfig shows, as Triton does, where the configuration has none."""
    return (config.max_batch_size,) if config.max_batch_size > 0 else ()


def _normalise_sequences(config: pb.ModelConfig) -> None:
    if not config.HasField("sequence_batching"):
        return
    batching = config.sequence_batching
    if not batching.max_sequence_idle_microseconds:
        batching.max_sequence_idle_microseconds = SEQUENCES.max_idle_us
    if batching.HasField("oldest") and not batching.oldest.preferred_batch_size:
        batching.oldest.preferred_batch_size.extend(preferred_by_default(config))


def _normalise_instances(config: pb.ModelConfig, gpus: int) -> None:
    if not config.instance_group:
        config.instance_group.add(name=config.name)
    for index, group in enumerate(config.instance_group):
        if not group.name:
            group.name = f"{config.name}_{index}"
        if group.kind == pb.ModelInstanceGroup.KIND_AUTO:
            group.kind = _best_kind(config, group, gpus)
        if group.kind == pb.ModelInstanceGroup.KIND_GPU and not group.gpus:
            group.gpus.extend(range(gpus))
        if not group.count:
            on_cpu = group.kind == pb.ModelInstanceGroup.KIND_CPU
            group.count = 2 if on_cpu and config.backend in TWO_CPU_INSTANCES else 1


def _best_kind(config: pb.ModelConfig, group: pb.ModelInstanceGroup, gpus: int) -> pb.ModelInstanceGroup.Kind:
    """The kind that KIND_AUTO means: GPU if the group's GPUs exist and the model is quicker there."""
    quicker = config.backend in BUILTIN and BUILTIN[config.backend].on_gpu
    accelerated = bool(config.optimization.execution_accelerators.gpu_execution_accelerator)
    if (quicker or accelerated or group.gpus) and gpus and all(0 <= gpu < gpus for gpu in group.gpus):
        return pb.ModelInstanceGroup.KIND_GPU
    return pb.ModelInstanceGroup.KIND_CPU


def _backend(config: pb.ModelConfig, model_dir: Path, version_dir: Path, source: Source) -> str:
    """The backend from the platform, else from the model's file, else from the folder's name `<model>.<backend>`."""
    if config.platform:
        return _platform_backend(config, source)
    for name in BUILTIN:
        if any(_has_model(version_dir, config.default_model_filename, file) for file in model_files(name).values()):
            return name
    if "." in model_dir.name:
        return model_dir.name.rpartition(".")[2]
    text = "must specify 'platform' or 'backend': could not determine backend"
    instead = _misplaced(model_dir, version_dir)
    if not instead:
        known = ", ".join(f"{file} ({name})" for name in BUILTIN for file in model_files(name).values() if file)
        instead = f'write backend: "...", or put one of {known} into the version folder'
    raise error_of([Finding(("backend",), text, instead)], config.name, source)


def _misplaced(model_dir: Path, version_dir: Path) -> str:
    """Advice about a single file that may be the model's, under another name or in another folder."""
    usual = {Path(file).suffix: file for name in BUILTIN for file in model_files(name).values() if file}
    for folder in filter(Path.is_dir, (version_dir, model_dir)):
        files = [entry for entry in folder.iterdir() if entry.suffix in usual and entry.suffix != ".py"]
        if len(files) == 1:
            there = version_dir / usual[files[0].suffix]
            return f"{files[0].relative_to(model_dir)} is there: name it {there.relative_to(model_dir)}"
    return ""


def _platform(config: pb.ModelConfig, version_dir: Path) -> str:
    """The platform of the backend whose model file exists, else the usual one."""
    if config.backend not in BUILTIN:
        return ""
    files = model_files(config.backend)
    found = (name for name, file in files.items() if _has_model(version_dir, config.default_model_filename, file))
    return next(found, next(iter(files)))


def _has_model(version_dir: Path, given: str, usual: str) -> bool:
    """Whether the version holds the model's file, under its given name or the platform's usual one."""
    if not usual:
        return False
    if given and Path(given).suffix != Path(usual).suffix:
        return False
    return (version_dir / (given or usual)).exists()


def _platform_backend(config: pb.ModelConfig, source: Source) -> str:
    found = backend_of_platform(config.platform)
    if found:
        return found
    text = f"unexpected platform type '{config.platform}'"
    known = (*PLATFORMS, ENSEMBLE)
    close = difflib.get_close_matches(config.platform, known, 1)
    instead = f"did you mean '{close[0]}'?" if close else f"it is one of {', '.join(known)}"
    raise error_of([Finding(("platform",), text, instead)], config.name, source)


ModelTensor: TypeAlias = pb.ModelInput | pb.ModelOutput


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
    default_max_batch_size: int = DEFAULTS.default_max_batch_size,
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
