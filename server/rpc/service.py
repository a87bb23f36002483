"""The one table of `inference.GRPCInferenceService`: every front door registers the methods in it."""

# ruff: noqa: ARG001 - handlers share one signature, whatever they need of it

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor import MethodDescriptor

from inferd.server.errors import Unimplemented
from inferd.server.rpc.call import Call
from inferd.server.rpc.infer import STREAM_WINDOW, Inference
from inferd.server.rpc.logs import LogControl, LogSettings
from inferd.server.rpc.metadata import Identity, Information
from inferd.server.rpc.repository import Repository
from inferd.server.rpc.shared_memory import SharedMemoryRegistration
from inferd.server.rpc.trace import TraceControl, TraceSetting
from inferd_client.pb import grpc_service_pb2 as pb

if TYPE_CHECKING:
    from inferd.server.engine.engine import Engine

_DESCRIPTOR = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]

SERVICE: str = _DESCRIPTOR.full_name

RAW = frozenset({"ModelInfer", "ModelStreamInfer"})
"""Methods whose messages stay bytes, because the engine decodes them."""

ENCODED = RAW | {"ModelStatistics", "RepositoryIndex"}
"""Methods whose handlers return bytes: responses about all models are long."""

GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "health": (
            f"{SERVICE}/ServerLive",
            f"{SERVICE}/ServerReady",
            f"{SERVICE}/ModelReady",
            "grpc.health.v1.Health/Check",
            "grpc.health.v1.Health/Watch",
            "grpc.health.v1.Health/List",  # hosted by newer versions of the library, and not served
        ),
        "metadata": (f"{SERVICE}/ServerMetadata", f"{SERVICE}/ModelMetadata"),
        "inference": (f"{SERVICE}/ModelInfer", f"{SERVICE}/ModelStreamInfer"),
        "shared-memory": (
            f"{SERVICE}/SystemSharedMemoryStatus",
            f"{SERVICE}/SystemSharedMemoryRegister",
            f"{SERVICE}/SystemSharedMemoryUnregister",
            f"{SERVICE}/CudaSharedMemoryStatus",
            f"{SERVICE}/CudaSharedMemoryRegister",
            f"{SERVICE}/CudaSharedMemoryUnregister",
        ),
        "model-config": (f"{SERVICE}/ModelConfig",),
        "model-repository": (
            f"{SERVICE}/RepositoryIndex",
            f"{SERVICE}/RepositoryModelLoad",
            f"{SERVICE}/RepositoryModelUnload",
        ),
        "statistics": (f"{SERVICE}/ModelStatistics",),
        "trace": (f"{SERVICE}/TraceSetting",),
        "logging": (f"{SERVICE}/LogSettings",),
        "reflection": ("grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",),
    }
)
"""Every RPC that the server hosts by the group that access rules name: Triton's groups, and reflection."""

GROUP_OF: Mapping[str, str] = MappingProxyType({f"/{path}": group for group, paths in GROUPS.items() for path in paths})
"""The group of a `/service/method`."""

MODEL_FIELD: Mapping[str, str] = MappingProxyType(
    {
        "ModelReady": "name",
        "ModelMetadata": "name",
        "ModelConfig": "name",
        "ModelStatistics": "name",
        "RepositoryModelLoad": "model_name",
        "RepositoryModelUnload": "model_name",
        "TraceSetting": "model_name",
    }
)
"""The field of a request that names its model. An empty name means no model, or all."""

KINDS: Mapping[str, str] = MappingProxyType(
    {
        f"/{SERVICE}/{method.name}": "bidi_stream" if method.client_streaming else "unary"
        for method in _DESCRIPTOR.methods
    }
)
"""The type of each method by its path, as metrics of gRPC name it."""

UnaryHandler = Callable[[Any, Call], Awaitable[Any]]
StreamHandler = Callable[[AsyncIterator[Any], Call], AsyncIterator[Any]]
Handler = UnaryHandler | StreamHandler


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC. Its handler raises an `inferd.server.errors.ServerError` for a status that is not OK.

    A unary handler is `async (request, call) -> response`, that of a stream an async generator
    `(requests, call) -> responses`. If the class of requests or of responses is None, these are encoded bytes.
    """

    name: str
    request: type[Any] | None
    response: type[Any] | None
    client_streaming: bool
    server_streaming: bool
    handler: Handler


def table(
    engine: Engine,
    identity: Identity,
    *,
    logs: LogControl | None = None,
    traces: TraceControl | None = None,
    stream_window: int = STREAM_WINDOW,
) -> tuple[Method, ...]:
    """All methods of the service over `engine`, in the order of the .proto file.

    LogSettings shows and changes `logs`, and TraceSetting `traces`. If one is None, its method is not served.

    `stream_window` bounds the requests of one stream that are read but not yet answered to the client.
    """
    served = dict(_handlers(engine, identity, stream_window))
    if logs is not None:
        served["LogSettings"] = LogSettings(logs).log_settings
    if traces is not None:
        served["TraceSetting"] = TraceSetting(traces, engine).trace_setting
    return tuple(_method(method, served) for method in _DESCRIPTOR.methods)


def _handlers(engine: Engine, identity: Identity, stream_window: int) -> Mapping[str, Handler]:
    information = Information(engine, identity)
    inference = Inference(engine, stream_window)
    repository = Repository(engine)
    memory = SharedMemoryRegistration(engine)
    return {
        "ServerLive": information.server_live,
        "ServerReady": information.server_ready,
        "ModelReady": information.model_ready,
        "ServerMetadata": information.server_metadata,
        "ModelMetadata": information.model_metadata,
        "ModelConfig": information.model_config,
        "ModelStatistics": information.model_statistics,
        "ModelInfer": inference.infer,
        "ModelStreamInfer": inference.stream,
        "RepositoryIndex": repository.index,
        "RepositoryModelLoad": repository.load,
        "RepositoryModelUnload": repository.unload,
        "SystemSharedMemoryStatus": memory.system_status,
        "SystemSharedMemoryRegister": memory.system_register,
        "SystemSharedMemoryUnregister": memory.system_unregister,
        "CudaSharedMemoryStatus": memory.cuda_status,
        "CudaSharedMemoryRegister": memory.cuda_register,
        "CudaSharedMemoryUnregister": memory.cuda_unregister,
    }


def _method(method: MethodDescriptor, served: Mapping[str, Handler]) -> Method:
    return Method(
        name=method.name,
        request=None if method.name in RAW else getattr(pb, method.input_type.name),
        response=None if method.name in ENCODED else getattr(pb, method.output_type.name),
        client_streaming=method.client_streaming,
        server_streaming=method.server_streaming,
        handler=served.get(method.name) or _refusal(method.name),
    )


def _refusal(name: str) -> UnaryHandler:
    async def refuse(request: Any, call: Call) -> Any:
        raise Unimplemented(f"{name} is part of the protocol, but this server does not serve it")

    return refuse
