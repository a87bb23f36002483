"""The model repository as clients see and control it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from server.errors import InvalidArgument, Unimplemented
from server.pb import grpc_service_pb2 as pb
from server.rpc.call import Call

if TYPE_CHECKING:
    from server.engine.engine import Engine

CONFIG = "config"
FILE = "file:"
UNLOAD_DEPENDENTS = "unload_dependents"

Parameters = Mapping[str, pb.ModelRepositoryParameter]


class Repository:
    """Listing of models and their states, loading and unloading. Whether the caller may is judged before."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def index(self, request: pb.RepositoryIndexRequest, call: Call) -> pb.RepositoryIndexResponse:
        _require_all(request.repository_name)
        response = pb.RepositoryIndexResponse()
        for entry in await self._engine.repository_index():
            if (entry.state == "READY" or not request.ready) and call.may_use(entry.name):
                response.models.add(name=entry.name, version=entry.version, state=entry.state, reason=entry.reason)
        return response

    async def load(self, request: pb.RepositoryModelLoadRequest, call: Call) -> pb.RepositoryModelLoadResponse:  # noqa: ARG002
        _require_all(request.repository_name)
        await self._engine.load(request.model_name, *_overrides(request.parameters))
        return pb.RepositoryModelLoadResponse()

    async def unload(self, request: pb.RepositoryModelUnloadRequest, call: Call) -> pb.RepositoryModelUnloadResponse:  # noqa: ARG002
        _require_all(request.repository_name)
        await self._engine.unload(request.model_name, dependents=_with_dependents(request.parameters))
        return pb.RepositoryModelUnloadResponse()


def _require_all(repository: str) -> None:
    if repository:
        raise Unimplemented("'repository_name' specification is not supported")


def _overrides(parameters: Parameters) -> tuple[str, dict[str, bytes]]:
    """The configuration and the files that a load brings; the texts of errors are Triton's."""
    config, files = "", {}
    for name, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if name == CONFIG:
            config = parameter.string_param
            expected = "string_param"
        elif name.startswith(FILE):
            files[name] = parameter.bytes_param
            expected = "bytes_param"
        else:
            raise InvalidArgument(f"unrecognized load parameter '{name}'.")
        if kind != expected:
            raise InvalidArgument(f"invalid value type for load parameter '{name}', expected {expected}.")
    return config, files


def _with_dependents(parameters: Parameters) -> bool:
    for name, parameter in parameters.items():
        if name != UNLOAD_DEPENDENTS:
            raise InvalidArgument(f"unrecognized unload parameter '{name}'.")
        if parameter.WhichOneof("parameter_choice") != "bool_param":
            raise InvalidArgument(f"invalid value type for '{name}' parameter, expected bool_param.")
    return bool(parameters) and parameters[UNLOAD_DEPENDENTS].bool_param
