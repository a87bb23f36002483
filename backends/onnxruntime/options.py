"""ONNX Runtime's session and run options from a model's configuration."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from inferd.backends.api import BackendError, ModelSpec
from inferd.backends.onnxruntime.providers import CUDA_PARAMETERS
from inferd.backends.parameters import MOST_THREADS, Parameters, default_intra_op_threads

if TYPE_CHECKING:
    import onnxruntime

INTRA_OP_THREADS = "intra_op_thread_count"
INTER_OP_THREADS = "inter_op_thread_count"
EXECUTION_MODE = "execution_mode"
MEM_ARENA = "enable_mem_arena"
MEM_PATTERN = "enable_mem_pattern"
ARENA_SHRINKAGE = "memory.enable_memory_arena_shrinkage"
SHARE_SESSION = "share_session_between_instances"
GLOBAL_THREADS = "enable-global-threadpool"

KNOWN = CUDA_PARAMETERS | {
    INTRA_OP_THREADS,
    INTER_OP_THREADS,
    EXECUTION_MODE,
    MEM_ARENA,
    MEM_PATTERN,
    ARENA_SHRINKAGE,
    SHARE_SESSION,
}

OF_FILES = ("file", "path", "folder", "settings")
"""Parts of the names of session entries whose values name files: files to read, such as weights and the layout of a
graph, or files to write, such as statistics."""

# The severity of the runtime's own log. Its errors also come as exceptions, so it need not log them.
LOG_NOTHING_BUT_FATAL = 4

# Guards the pool of all models: the runtime sizes it when the process first uses it.
_global_threads = threading.Lock()
_global_threads_set = threading.Event()


def for_inspection(config: Parameters) -> onnxruntime.SessionOptions:
    """Options of the cheapest session: one thread, the graph as it stands."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = LOG_NOTHING_BUT_FATAL
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if not _use_global_threads(settings, config):
        settings.intra_op_num_threads = 1
    return settings


def for_model(
    spec: ModelSpec, parameters: Parameters, config: Parameters, *, from_client: bool = False
) -> onnxruntime.SessionOptions:
    """The session options of one model.

    Args:
        spec: the model's configuration.
        parameters: its parameters.
        config: the backend's configuration.
        from_client: whether the configuration came with a client's load request, and so must name no files.

    Raises:
        BackendError: a value is out of range.
    """
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = LOG_NOTHING_BUT_FATAL
    settings.graph_optimization_level = _graph_level(spec)
    settings.execution_mode = _execution_mode(parameters)
    settings.enable_cpu_mem_arena = parameters.flag(MEM_ARENA, True)
    settings.enable_mem_pattern = parameters.flag(MEM_PATTERN, True)
    for key, value in spec.parameters.items():
        if key.startswith("session."):
            if from_client and any(word in key for word in OF_FILES):
                raise parameters.error(key, "expected nothing: a configuration that a client brings names no files")
            settings.add_session_config_entry(key, value)
    if not _use_global_threads(settings, config):
        intra = parameters.integer(INTRA_OP_THREADS, maximum=MOST_THREADS)
        settings.intra_op_num_threads = intra or default_intra_op_threads()
        settings.inter_op_num_threads = parameters.integer(INTER_OP_THREADS, 0, maximum=MOST_THREADS) or 0
    return settings


def _graph_level(spec: ModelSpec) -> onnxruntime.GraphOptimizationLevel:
    """The optimisations that optimization.graph.level asks for: 0 or absent all, 1 extended, -1 basic, 2 none."""
    from onnxruntime import GraphOptimizationLevel

    levels = {
        0: GraphOptimizationLevel.ORT_ENABLE_ALL,
        1: GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
        -1: GraphOptimizationLevel.ORT_ENABLE_BASIC,
        2: GraphOptimizationLevel.ORT_DISABLE_ALL,
    }
    level = spec.graph_level or 0
    if level not in levels:
        raise BackendError(f"model '{spec.name}': optimization.graph.level is {level}, expected -1, 0, 1 or 2")
    return levels[level]


def _execution_mode(parameters: Parameters) -> onnxruntime.ExecutionMode:
    from onnxruntime import ExecutionMode

    mode = parameters.text(EXECUTION_MODE, "0")
    if mode not in ("0", "1"):
        raise parameters.error(EXECUTION_MODE, "Expected values for execution_mode are 0 or 1")
    return ExecutionMode.ORT_PARALLEL if mode == "1" else ExecutionMode.ORT_SEQUENTIAL


def _use_global_threads(settings: onnxruntime.SessionOptions, config: Parameters) -> bool:
    """Whether all models share one thread pool; once a session uses it, every session must."""
    if not config.flag(GLOBAL_THREADS, False):
        return False
    import onnxruntime

    with _global_threads:
        if not _global_threads_set.is_set():
            intra = config.integer(INTRA_OP_THREADS, maximum=MOST_THREADS) or default_intra_op_threads()
            inter = config.integer(INTER_OP_THREADS, 0, maximum=MOST_THREADS) or 0
            onnxruntime.set_global_thread_pool_sizes(intra, inter)
            _global_threads_set.set()
    settings.use_per_session_threads = False
    return True


def run_config(parameters: Parameters) -> Mapping[str, str]:
    """Entries for the options of each run."""
    shrinkage = parameters.text(ARENA_SHRINKAGE)
    return MappingProxyType({ARENA_SHRINKAGE: shrinkage} if shrinkage else {})


def run_options(config: Mapping[str, str]) -> onnxruntime.RunOptions:
    """The options of an instance's runs."""
    import onnxruntime

    made = onnxruntime.RunOptions()
    made.log_severity_level = LOG_NOTHING_BUT_FATAL
    for key, value in config.items():
        made.add_run_config_entry(key, value)
    return made
