"""The RPCs of the model repository: index, load and unload."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import TYPE_CHECKING

from inferd.server.engine.housekeeping.threads import LARGE, slices
from inferd.server.engine.models.overview import encoded_index
from inferd.server.engine.models.registry import READY, IndexEntry
from inferd.server.errors import InvalidArgument, Unimplemented
from inferd.server.rpc.call import Call
from inferd_client.pb import grpc_service_pb2 as pb

if TYPE_CHECKING:
    from inferd.server.engine.engine import Engine

CONFIG = "config"
FILE = "file:"
UNLOAD_DEPENDENTS = "unload_dependents"
HIDDEN = "it depends on a model that the token does not allow"
"""The text in place of a reason that names a model which the caller may not know."""

Parameters = Mapping[str, pb.ModelRepositoryParameter]


class Repository:
    """Lists models and their states, loads and unloads; rights to the named models were checked before."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def index(self, request: pb.RepositoryIndexRequest, call: Call) -> bytes:
        _require_all(request.repository_name)
        entries = await self._engine.repository_index()
        parts = slices(entries, LARGE)
        hidden = {entry.name async for part in parts for entry in part if not call.may_use(entry.name)}
        shown = (e for e in entries if (e.state == READY or not request.ready) and e.name not in hidden)
        return await encoded_index(_without(hidden, shown, call))

    async def load(self, request: pb.RepositoryModelLoadRequest, call: Call) -> pb.RepositoryModelLoadResponse:
        _require_all(request.repository_name)
        config, files = _overrides(request.parameters)
        if config or files:
            call.require_overrides()
        await self._engine.load(request.model_name, config, files, allowed=call.may_use)
        return pb.RepositoryModelLoadResponse()

    async def unload(self, request: pb.RepositoryModelUnloadRequest, call: Call) -> pb.RepositoryModelUnloadResponse:
        _require_all(request.repository_name)
        dependents = _with_dependents(request.parameters)
        await self._engine.unload(request.model_name, dependents=dependents, allowed=call.may_use)
        return pb.RepositoryModelUnloadResponse()


def _without(hidden: Set[str], entries: Iterable[IndexEntry], call: Call) -> Iterator[IndexEntry]:
    """The entries. A reason is replaced if it may name a hidden model, or another one that the caller may not use."""
    odd = tuple(f"'{name}'" for name in hidden if "'" in name)
    for entry in entries:
        if not entry.reason:
            yield entry
            continue
        quoted = entry.reason.split("'")[1:-1]  # one pass for all names: there may be thousands
        told = hidden.isdisjoint(quoted) and not any(name in entry.reason for name in odd)
        yield entry if told and all(map(call.may_use, entry.needs)) else entry._replace(reason=HIDDEN)


def _require_all(repository: str) -> None:
    if repository:
        raise Unimplemented("'repository_name' specification is not supported")


def _overrides(parameters: Parameters) -> tuple[str, dict[str, bytes]]:
    """The configuration and the files of a load; the texts of errors are Triton's."""
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
