"""The model repository as clients see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.errors import Unimplemented
from server.pb import grpc_service_pb2 as pb
from server.rpc.call import Call

if TYPE_CHECKING:
    from server.engine.engine import Engine


class Repository:
    """Listing of models and their states."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def index(self, request: pb.RepositoryIndexRequest, call: Call) -> pb.RepositoryIndexResponse:
        if request.repository_name:
            raise Unimplemented("'repository_name' specification is not supported")
        response = pb.RepositoryIndexResponse()
        for entry in self._engine.index():
            if (entry.state == "READY" or not request.ready) and call.may_use(entry.name):
                response.models.add(name=entry.name, version=entry.version, state=entry.state, reason=entry.reason)
        return response
