"""The synchronous client, with the names of `tritonclient.grpc`. It may be used by any number of threads."""

from inferd_client._calling import RetryOptions
from inferd_client._requests import InferInput, InferRequestedOutput
from inferd_client._results import InferResult
from inferd_client.grpc._client import CallContext, InferenceServerClient
from inferd_client.grpc._options import MAX_GRPC_MESSAGE_SIZE, KeepAliveOptions
from inferd_client.grpc._plugins import InferenceServerClientPlugin, Request
from inferd_client.utils import (
    InferenceServerException,
    deserialize_bytes_tensor,
    np_to_triton_dtype,
    raise_error,
    serialize_byte_tensor,
    serialized_byte_size,
    triton_to_np_dtype,
)

__all__ = [
    "InferenceServerClient",
    "InferInput",
    "InferRequestedOutput",
    "InferResult",
    "InferenceServerException",
    "KeepAliveOptions",
    "RetryOptions",
    "CallContext",
    "InferenceServerClientPlugin",
    "Request",
    "MAX_GRPC_MESSAGE_SIZE",
    "deserialize_bytes_tensor",
    "model_config_pb2",
    "np_to_triton_dtype",
    "raise_error",
    "serialize_byte_tensor",
    "serialized_byte_size",
    "service_pb2",
    "service_pb2_grpc",
    "triton_to_np_dtype",
]


def __getattr__(name: str) -> object:
    """Import protobuf's messages at their first use."""
    if name in ("service_pb2", "service_pb2_grpc", "model_config_pb2"):
        import importlib

        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
