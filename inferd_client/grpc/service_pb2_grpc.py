"""The service for programs that use grpcio themselves, with the names that tritonclient has for it.

The service is made from the descriptors, not generated: `GRPCInferenceServiceStub` needs only its channel of grpcio;
`add_GRPCInferenceServiceServicer_to_server` imports grpcio.
"""

from __future__ import annotations

from typing import Any

from inferd_client.pb import grpc_service_pb2

__all__ = [
    "GRPCInferenceService",
    "GRPCInferenceServiceServicer",
    "GRPCInferenceServiceStub",
    "add_GRPCInferenceServiceServicer_to_server",
]

_SERVICE = grpc_service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
_KINDS = {(False, False): "unary_unary", (False, True): "unary_stream", (True, True): "stream_stream"}


def _kind(method: Any) -> str:
    return _KINDS[method.client_streaming, method.server_streaming]


def _messages(method: Any) -> tuple[Any, Any]:
    return getattr(grpc_service_pb2, method.input_type.name), getattr(grpc_service_pb2, method.output_type.name)


def _path(method: Any) -> str:
    return f"/{_SERVICE.full_name}/{method.name}"


class GRPCInferenceServiceStub:
    """The RPCs of a server, each a callable of grpcio.

    Args:
        channel: of grpcio, or of grpcio's asyncio.
    """

    def __init__(self, channel: Any) -> None:
        for method in _SERVICE.methods:
            request_type, response_type = _messages(method)
            made = getattr(channel, _kind(method))(
                _path(method),
                request_serializer=request_type.SerializeToString,
                response_deserializer=response_type.FromString,
            )
            setattr(self, method.name, made)


class GRPCInferenceServiceServicer:
    """Base of servers written with grpcio: methods that are not overridden are UNIMPLEMENTED."""

    def __getattr__(self, name: str) -> Any:
        if name not in _SERVICE.methods_by_name:
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return _refuse


def _refuse(request: Any, context: Any) -> Any:  # noqa: ARG001 - a handler's arguments
    import grpc

    context.set_code(grpc.StatusCode.UNIMPLEMENTED)
    context.set_details("Method not implemented!")
    raise NotImplementedError("Method not implemented!")


def add_GRPCInferenceServiceServicer_to_server(servicer: Any, server: Any) -> None:  # noqa: N802 - tritonclient's name
    """Have a server of grpcio answer with the methods of a servicer."""
    import grpc

    handlers = {}
    for method in _SERVICE.methods:
        request_type, response_type = _messages(method)
        handlers[method.name] = getattr(grpc, f"{_kind(method)}_rpc_method_handler")(
            getattr(servicer, method.name),
            request_deserializer=request_type.FromString,
            response_serializer=response_type.SerializeToString,
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers),))


def _call(method: Any) -> Any:
    def call(request: Any, target: str, options: Any = (), **named: Any) -> Any:
        from grpc import experimental

        request_type, response_type = _messages(method)
        return getattr(experimental, _kind(method))(
            request, target, _path(method), request_type.SerializeToString, response_type.FromString, options, **named
        )

    call.__doc__ = f"{method.name}, as `grpc.experimental` makes calls: without a channel that the caller has made."
    return staticmethod(call)


GRPCInferenceService = type(
    "GRPCInferenceService",
    (),
    {"__doc__": "Each RPC as a function.", **{method.name: _call(method) for method in _SERVICE.methods}},
)
