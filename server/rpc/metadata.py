"""Health, metadata, configuration and statistics."""

# ruff: noqa: ARG002 - handlers share one signature, whatever they need of it

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inferd.backends.api import TensorSpec
from inferd.server.engine.config.parameters import VERSION_LABELS
from inferd.server.errors import InvalidArgument, NotFound, Unavailable
from inferd.server.rpc.call import Call
from inferd.server.settings import DEFAULTS
from inferd_client.pb import grpc_service_pb2 as pb

if TYPE_CHECKING:
    from inferd.server.engine.engine import Engine
    from inferd.server.engine.models.version import LoadedVersion

EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)
"""The extensions of the v2 protocol that are served, in Triton's order: a client may rely on each of them."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The server's name and version."""

    name: str = DEFAULTS.id
    version: str = ""
    extensions: tuple[str, ...] = EXTENSIONS


class Information:
    """The handlers that only report: health, metadata, configurations, statistics."""

    def __init__(self, engine: Engine, identity: Identity) -> None:
        self._engine = engine
        self._identity = identity

    async def server_live(self, request: pb.ServerLiveRequest, call: Call) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=self._engine.live)

    async def server_ready(self, request: pb.ServerReadyRequest, call: Call) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=await self._engine.check())

    async def model_ready(self, request: pb.ModelReadyRequest, call: Call) -> pb.ModelReadyResponse:
        if await self._engine.is_on_demand(request.name):
            return pb.ModelReadyResponse(ready=True)
        try:
            loaded = self._engine.model(request.name, request.version)
        except (NotFound, Unavailable):
            return pb.ModelReadyResponse(ready=False)  # not an error: clients poll until a model is ready
        return pb.ModelReadyResponse(ready=await loaded.check())

    async def server_metadata(self, request: pb.ServerMetadataRequest, call: Call) -> pb.ServerMetadataResponse:
        identity = self._identity
        return pb.ServerMetadataResponse(name=identity.name, version=identity.version, extensions=identity.extensions)

    async def model_metadata(self, request: pb.ModelMetadataRequest, call: Call) -> pb.ModelMetadataResponse:
        await self._engine.bring(request.name)
        loaded = self._engine.model(request.name, request.version)
        shown = (loaded,) if request.version else self._engine.versions(request.name)
        spec = loaded.spec
        batches = spec.max_batch_size > 0
        return pb.ModelMetadataResponse(
            name=loaded.name,
            versions=[str(each.version) for each in shown],
            platform=spec.platform or spec.backend,
            inputs=_tensors(spec.inputs, batches),
            outputs=_tensors(spec.outputs, batches),
            properties={
                key: value.string_value for key, value in loaded.config.parameters.items() if key == VERSION_LABELS
            },
        )

    async def model_config(self, request: pb.ModelConfigRequest, call: Call) -> pb.ModelConfigResponse:
        await self._engine.bring(request.name)
        return pb.ModelConfigResponse(config=self._engine.model(request.name, request.version).config)

    async def model_statistics(self, request: pb.ModelStatisticsRequest, call: Call) -> bytes:
        chosen = self._all_ready(call) if not request.name else self._chosen(request.name, request.version)
        return await self._engine.statistics(chosen)

    def _all_ready(self, call: Call) -> Iterator[LoadedVersion]:
        for name in filter(call.may_use, self._engine.names):
            yield from self._ready_versions(name)

    def _chosen(self, name: str, version: str) -> Iterable[LoadedVersion]:
        ready = self._ready_versions(name)
        if not ready:
            raise InvalidArgument(f"requested model '{name}' is not available")
        if not version:
            return ready
        try:
            return (self._engine.model(name, version),)
        except (NotFound, Unavailable) as error:
            raise InvalidArgument(
                f"requested model version is not available for model '{name}': expected one of "
                f"{', '.join(str(loaded.version) for loaded in ready)}, got {version}"
            ) from error

    def _ready_versions(self, name: str) -> tuple[LoadedVersion, ...]:
        try:
            return self._engine.versions(name)
        except (NotFound, Unavailable):
            return ()


def _tensors(specs: Iterable[TensorSpec], batches: bool) -> Iterator[pb.ModelMetadataResponse.TensorMetadata]:
    for spec in specs:
        yield pb.ModelMetadataResponse.TensorMetadata(
            name=spec.name, datatype=spec.datatype, shape=_shape(spec, batches)
        )


def _shape(spec: TensorSpec, batches: bool) -> tuple[int, ...]:
    """The shape that clients send. A batch adds the first dimension, to a shape tensor one element: the batch size."""
    if batches and spec.shape_tensor:
        return (spec.dims[0] + 1,)
    return (-1, *spec.dims) if batches else spec.dims
