"""`triton_python_backend_utils`: the module that models written for Triton's Python backend import.

import triton_python_backend_utils as pb_utils
"""

from __future__ import annotations

from typing import Any

from .calls import InferenceRequest, ResponseIterator
from .config import (
    ModelConfig,
    get_input_config_by_name,
    get_output_config_by_name,
    using_decoupled_model_transaction_policy,
)
from .datatypes import numpy_to_triton_type, string_types, triton_string_to_numpy, triton_to_numpy_type
from .errors import TritonError, TritonModelException
from .loader import get_model_dir, is_model_ready, load_model, unload_model
from .logger import Logger, LogLevel
from .memory import CPU as TRITONSERVER_MEMORY_CPU
from .memory import GPU as TRITONSERVER_MEMORY_GPU
from .memory import MemoryType, PreferredMemory
from .metrics import Metric, MetricFamily, MetricKind
from .request import RELEASE_ALL as TRITONSERVER_REQUEST_RELEASE_ALL
from .request import RELEASE_RESCHEDULE as TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
from .request import SEQUENCE_END as TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
from .request import SEQUENCE_START as TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
from .request import InferenceTrace
from .response import FINAL as TRITONSERVER_RESPONSE_COMPLETE_FINAL
from .response import InferenceResponse
from .sender import InferenceResponseSender
from .strings import deserialize_bytes_tensor, serialize_byte_tensor
from .tensor import Tensor


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """The input of this name; None if the request leaves it out."""
    for tensor in inference_request.inputs():
        if tensor._name == name:
            return tensor
    return None


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """The output of this name; None if the response has none."""
    for tensor in inference_response.output_tensors():
        if tensor._name == name:
            return tensor
    return None


# Printed and pickled under the name that models know.
for _public in (InferenceRequest, InferenceResponse, InferenceResponseSender, InferenceTrace, Metric, MetricFamily,
                ModelConfig, PreferredMemory, ResponseIterator, Tensor, TritonError, TritonModelException):  # fmt: skip
    _public.__module__ = "triton_python_backend_utils"


def __getattr__(name: str) -> Any:
    if name == "TRITON_STRING_TO_NUMPY":  # on demand, because it needs numpy
        return string_types()
    raise AttributeError(f"module 'triton_python_backend_utils' has no attribute '{name}'")


class _SharedMemory:
    """The memory of tensors, which grows as needed; for programs that look at its room."""

    def free_memory(self) -> int:
        """Bytes that it can still take: always the same number."""
        return 1 << 40


shared_memory = _SharedMemory()

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "LogLevel",
    "Logger",
    "MemoryType",
    "Metric",
    "MetricFamily",
    "MetricKind",
    "ModelConfig",
    "PreferredMemory",
    "ResponseIterator",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "shared_memory",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]
