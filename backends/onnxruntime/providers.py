"""Execution providers, by which ONNX Runtime runs a model on a GPU or faster on a CPU, and their options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from inferd.backends.api import AcceleratorSpec, BackendError, InstanceSpec, ModelSpec
from inferd.backends.installing import pip_install
from inferd.backends.parameters import Parameters

if TYPE_CHECKING:
    import onnxruntime

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
OPENVINO = "OpenVINOExecutionProvider"

GPU_ACCELERATORS = frozenset({"cuda", "tensorrt"})
CPU_ACCELERATORS = frozenset({"openvino"})

BUILDS: Mapping[str, str] = MappingProxyType(
    {CUDA: "onnxruntime-gpu", TENSORRT: "onnxruntime-gpu", OPENVINO: "onnxruntime-openvino"}
)
"""The package to install in place of `onnxruntime`, by the provider that it contains."""

Provider: TypeAlias = tuple[str, dict[str, str]]
"""The name of a provider and its options, as InferenceSession takes them."""

CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "cudnn_conv_algo_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
        "arena_extend_strategy": ("kNextPowerOfTwo", "kSameAsRequested"),
    }
)
"""Model parameters that Triton takes as a number for CUDA's provider, and what each number means."""
CUDA_PARAMETERS = frozenset({*CHOICES, "gpu_mem_limit", "do_copy_in_default_stream"})

OF_THE_SERVER = frozenset({"device_id", "user_compute_stream", "has_user_compute_stream"})
"""Options that choose the device of an instance, as the instance group does already."""
GRAPHS = frozenset({"enable_cuda_graph", "trt_cuda_graph_enable"})
"""Options for CUDA graphs. These need inputs at fixed addresses, but each batch uses one of several sets of buffers."""

POINTERS = frozenset(
    {
        "gpu_external_alloc",
        "gpu_external_empty_cache",
        "gpu_external_free",
        "trt_external_data_bytestream",
        "trt_external_data_bytestream_size",
        "trt_onnx_bytestream",
        "trt_onnx_bytestream_size",
    }
)
"""Options whose values are addresses in the process."""
PATHS = frozenset(
    {
        "cache_dir",
        "load_config",
        "trt_engine_cache_path",
        "trt_engine_decryption_lib_path",
        "trt_ep_context_file_path",
        "trt_extra_plugin_lib_paths",
        "trt_onnx_model_folder_path",
        "trt_timing_cache_path",
    }
)
"""Options that name files and libraries anywhere."""
NAMES = frozenset({"int8_calibration_table_name", "trt_engine_cache_prefix", "trt_int8_calibration_table_name"})
"""Options whose values are parts of the names of files."""
CACHES: Mapping[str, str] = MappingProxyType(
    {"trt_engine_cache_enable": "trt_engine_cache_path", "trt_timing_cache_enable": "trt_timing_cache_path"}
)
"""Options by which TensorRT's provider keeps its engines, and the options that name the folder for them."""

PRECISIONS: Mapping[str, str] = MappingProxyType(
    {"FP32": "", "FP16": "trt_fp16_enable", "BF16": "trt_bf16_enable", "INT8": "trt_int8_enable"}
)
RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "max_workspace_size_bytes": "trt_max_workspace_size",
        "int8_calibration_table_name": "trt_int8_calibration_table_name",
        "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
    }
)
"""Triton's names of some options of TensorRT's provider; its other options have the provider's own names."""
TENSORRT_OPTIONS = frozenset(
    {
        "trt_auxiliary_streams",
        "trt_build_heuristics_enable",
        "trt_builder_optimization_level",
        "trt_context_memory_sharing_enable",
        "trt_cuda_graph_enable",
        "trt_detailed_build_log",
        "trt_dla_core",
        "trt_dla_enable",
        "trt_dump_ep_context_model",
        "trt_dump_subgraphs",
        "trt_engine_cache_enable",
        "trt_engine_cache_path",
        "trt_engine_cache_prefix",
        "trt_engine_decryption_enable",
        "trt_engine_decryption_lib_path",
        "trt_engine_hw_compatible",
        "trt_ep_context_embed_mode",
        "trt_ep_context_file_path",
        "trt_extra_plugin_lib_paths",
        "trt_force_sequential_engine_build",
        "trt_force_timing_cache",
        "trt_layer_norm_fp32_fallback",
        "trt_load_user_initializer",
        "trt_max_partition_iterations",
        "trt_min_subgraph_size",
        "trt_onnx_model_folder_path",
        "trt_op_types_to_exclude",
        "trt_preview_features",
        "trt_profile_max_shapes",
        "trt_profile_min_shapes",
        "trt_profile_opt_shapes",
        "trt_sparsity_enable",
        "trt_tactic_sources",
        "trt_timing_cache_enable",
        "trt_timing_cache_path",
        "trt_weight_stripped_engine_enable",
    }
)


def cpu_providers(spec: ModelSpec, *, from_client: bool = False) -> list[Provider]:
    """Providers for instances on the CPU; an earlier one has precedence.

    Args:
        from_client: whether the configuration came with a client's load request, and so must name no files.

    Raises:
        BackendError: the installed runtime lacks one, or an option is wrong.
    """
    for each in spec.cpu_accelerators:
        _check_options(spec, each, from_client=from_client)
    found = [(OPENVINO, {"device_type": "CPU", **each.parameters}) for each in spec.cpu_accelerators]
    _require(f"model '{spec.name}'", (name for name, _ in found))
    return [*found, (CPU, {})]


def gpu_providers(
    spec: ModelSpec,
    parameters: Parameters,
    instance: InstanceSpec,
    stream: int,
    *,
    from_client: bool = False,
    cache: Callable[[], Path] | None = None,
) -> list[Provider]:
    """Providers for an instance on a GPU whose work goes to this stream.

    Args:
        from_client: as for `cpu_providers`.
        cache: the folder for TensorRT's engines, if the configuration wants them kept and names no folder.

    Raises:
        BackendError: the installed runtime lacks one, or an option is wrong.
    """
    place = {"device_id": str(instance.device), "user_compute_stream": str(stream)}
    cuda = _cuda_parameters(parameters)
    found: list[Provider] = []
    for each in spec.gpu_accelerators:
        _check_options(spec, each, from_client=from_client)
        if each.name == "cuda":
            cuda.update(each.parameters)
        else:
            found.append((TENSORRT, {**_with_caches(_tensorrt_options(spec, each), cache), **place}))
    found.append((CUDA, {**cuda, **place}))
    _require(f"instance '{instance.name}'", (name for name, _ in found))
    return [*found, (CPU, {})]


def _require(who: str, names: Iterable[str]) -> None:
    import onnxruntime

    present = onnxruntime.get_available_providers()
    for name in names:
        if name not in present:
            beside = f", or openvino beside it: {pip_install('openvino')}" if name == OPENVINO else ""
            raise BackendError(
                f"{who} needs {name}, which the installed ONNX Runtime {onnxruntime.__version__} is built without (it "
                f"has {', '.join(present)}): install {BUILDS[name]} in place of onnxruntime{beside}"
            )


def check_active(session: onnxruntime.InferenceSession, wanted: Iterable[Provider], who: str) -> None:
    """Check that a session has every wanted provider: the runtime continues without providers that do not load.

    Raises:
        BackendError: the session lacks one.
    """
    active = session.get_providers()
    missing = [name for name, _ in wanted if name not in active]
    if missing:
        raise BackendError(
            f"{who}: {', '.join(missing)} of ONNX Runtime could not be loaded, most often because a library that "
            "it was built for (CUDA, cuDNN, TensorRT, OpenVINO) is not there: the standard error output names it"
        )


def _with_caches(options: dict[str, str], cache: Callable[[], Path] | None) -> dict[str, str]:
    for key, place in CACHES.items():
        if cache is not None and options.get(key, "0").strip().lower() in ("1", "true") and not options.get(place):
            options[place] = str(cache())
    return options


def _check_options(spec: ModelSpec, accelerator: AcceleratorSpec, *, from_client: bool) -> None:
    where = f"model '{spec.name}': execution accelerator '{accelerator.name}'"
    for key, value in accelerator.parameters.items():
        if key in POINTERS:
            raise BackendError(f"{where}: '{key}' is an address in the server: remove it")
        if key in PATHS and from_client:
            raise BackendError(f"{where}: '{key}' names files, which a configuration that a client brings must not")
        if key in NAMES and from_client and "/" in value:
            raise BackendError(f"{where}: '{key}' is '{value}', expected the name of a file without a folder")
        if key in OF_THE_SERVER:
            raise BackendError(f"{where}: '{key}' follows from the instance group: remove it")
        if key in GRAPHS and value.strip().lower() not in ("0", "false"):
            raise BackendError(
                f"{where}: '{key}' is not served, because the inputs of batches do not stay in one place"
            )


def _cuda_parameters(parameters: Parameters) -> dict[str, str]:
    """Options of CUDA's provider from the model's parameters, where Triton had them before accelerators."""
    found = {key: text for key in sorted(CUDA_PARAMETERS - CHOICES.keys()) if (text := parameters.text(key))}
    for key, choices in CHOICES.items():
        number = parameters.integer(key)
        if number is not None and number >= len(choices):
            raise parameters.error(key, f"unsupported {key} value, expected a number up to {len(choices) - 1}")
        if number is not None:
            found[key] = choices[number]
    return found


def _tensorrt_options(spec: ModelSpec, accelerator: AcceleratorSpec) -> dict[str, str]:
    found = {}
    for key, value in accelerator.parameters.items():
        if key == "precision_mode":
            if value not in PRECISIONS:
                raise BackendError(
                    f"model '{spec.name}': unsupported precision mode '{value}' is requested, expected one of "
                    f"{', '.join(PRECISIONS)}"
                )
            if PRECISIONS[value]:
                found[PRECISIONS[value]] = "1"
        elif key in RENAMED or key in TENSORRT_OPTIONS:
            found[RENAMED.get(key, key)] = value
        else:
            raise BackendError(
                f"model '{spec.name}': unknown parameter '{key}' is provided for TensorRT Execution Accelerator"
            )
    return found
