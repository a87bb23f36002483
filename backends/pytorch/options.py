"""The model parameters of the PyTorch backend, and the switches of the process that some of them set."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from inferd.backends.parameters import MOST_THREADS, Parameters, default_intra_op_threads

log = logging.getLogger("inferd.backends")

JIT_SWITCHES = {
    "ENABLE_JIT_EXECUTOR": "_jit_set_profiling_executor",
    "ENABLE_JIT_PROFILING": "_jit_set_profiling_mode",
    "ENABLE_TENSOR_FUSER": "_jit_set_texpr_fuser_enabled",
}
"""Parameters that set a switch of the process, and the function of torch._C that sets it."""
KNOWN = JIT_SWITCHES.keys() | {
    "DISABLE_CUDNN",
    "ENABLE_CACHE_CLEANING",
    "DISABLE_OPTIMIZED_EXECUTION",
    "INFERENCE_MODE",
    "ENABLE_WEIGHT_SHARING",
    "INTRA_OP_THREAD_COUNT",
    "INTER_OP_THREAD_COUNT",
    "ALLOW_FATAL_CHECKS",
}


@dataclass(frozen=True, slots=True)
class Options:
    """The parameters of one model that concern its own instances."""

    inference_mode: bool
    optimized_execution: bool
    share_weights: bool
    clean_cache: bool  # on a GPU, free after each batch the memory that PyTorch keeps for the next
    fatal_checks: bool  # serve a package in which an index out of range ends the server


def read_options(parameters: Parameters) -> Options:
    """Read and check a model's parameters; apply those that concern the whole process.

    Raises:
        BackendError: a value is not what its parameter takes.
    """
    parameters.warn_unknown(KNOWN)
    if parameters.flag("DISABLE_CUDNN", False):
        _disable_cudnn()
    _set_jit_switches(parameters)
    _set_threads(parameters)
    return Options(
        inference_mode=parameters.flag("INFERENCE_MODE", True),
        optimized_execution=not parameters.flag("DISABLE_OPTIMIZED_EXECUTION", False),
        share_weights=parameters.flag("ENABLE_WEIGHT_SHARING", False),
        clean_cache=parameters.flag("ENABLE_CACHE_CLEANING", False),
        fatal_checks=parameters.flag("ALLOW_FATAL_CHECKS", False),
    )


def _disable_cudnn() -> None:
    """Turn cuDNN off for the whole process, as Triton does."""
    import torch

    torch.backends.cudnn.enabled = False


def _set_jit_switches(parameters: Parameters) -> None:
    """Set switches of the process: as in Triton, the model loaded last decides, and one without the parameter changes
    nothing."""
    import torch

    for key, function in JIT_SWITCHES.items():
        if parameters.text(key):
            getattr(torch._C, function)(parameters.flag(key, True))


_threads_lock = threading.Lock()
_threads_set: dict[str, int] = {}


def _set_threads(parameters: Parameters) -> None:
    """Size the process's thread pools for the first model that is loaded; they cannot be resized safely after that."""
    import torch

    wanted = {
        key: parameters.integer(key, minimum=1, maximum=MOST_THREADS)
        for key in ("INTRA_OP_THREAD_COUNT", "INTER_OP_THREAD_COUNT")
    }
    with _threads_lock:
        if not _threads_set:
            _threads_set["INTRA_OP_THREAD_COUNT"] = wanted["INTRA_OP_THREAD_COUNT"] or default_intra_op_threads()
            torch.set_num_threads(_threads_set["INTRA_OP_THREAD_COUNT"])
            if wanted["INTER_OP_THREAD_COUNT"]:
                torch.set_num_interop_threads(wanted["INTER_OP_THREAD_COUNT"])
            _threads_set["INTER_OP_THREAD_COUNT"] = torch.get_num_interop_threads()
        for key, count in wanted.items():
            if count is not None and count != _threads_set[key]:
                log.warning("parameter '%s' is %d, but the first PyTorch model set %d", key, count, _threads_set[key])
