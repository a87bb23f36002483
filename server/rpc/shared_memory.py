"""Registration of clients' shared memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from inferd.server.engine.instances.shared_memory import CUDA, SYSTEM, User
from inferd.server.errors import InvalidArgument, Unimplemented
from inferd.server.rpc.call import Call
from inferd_client.pb import grpc_service_pb2 as pb

if TYPE_CHECKING:
    from inferd.server.engine.engine import Engine

Result = TypeVar("Result")

LIFETIME = "inferd-shm-lifetime"
"""Metadata of a registration: with "connection", the region is unregistered when the client's connection ends."""


class SharedMemoryRegistration:
    """The RPCs for system and for CUDA shared memory."""

    def __init__(self, engine: Engine) -> None:
        self._memory = engine.shared_memory
        self._owners: set[int] = set()  # open connections that own regions, or owned some

    async def system_status(
        self, request: pb.SystemSharedMemoryStatusRequest, call: Call
    ) -> pb.SystemSharedMemoryStatusResponse:
        response = pb.SystemSharedMemoryStatusResponse()
        for region in self._memory.status(user_of(call), SYSTEM, request.name):
            told = response.regions[region.name]
            told.name, told.key = region.name, region.key
            told.offset, told.byte_size = region.offset, region.byte_size
        return response

    async def system_register(
        self, request: pb.SystemSharedMemoryRegisterRequest, call: Call
    ) -> pb.SystemSharedMemoryRegisterResponse:
        self._memory.register_system(
            user_of(call), request.name, request.key, request.offset, request.byte_size, self.owner(call)
        )
        return pb.SystemSharedMemoryRegisterResponse()

    async def system_unregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest, call: Call
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        await self._unregister(call, SYSTEM, request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def cuda_status(
        self, request: pb.CudaSharedMemoryStatusRequest, call: Call
    ) -> pb.CudaSharedMemoryStatusResponse:
        response = pb.CudaSharedMemoryStatusResponse()
        for region in self._memory.status(user_of(call), CUDA, request.name):
            told = response.regions[region.name]
            told.name, told.device_id, told.byte_size = region.name, region.device, region.byte_size
        return response

    async def cuda_register(
        self, request: pb.CudaSharedMemoryRegisterRequest, call: Call
    ) -> pb.CudaSharedMemoryRegisterResponse:
        user, owner = user_of(call), self.owner(call)

        def register() -> None:
            self._memory.register_cuda(
                user, request.name, request.raw_handle, request.device_id, request.byte_size, owner
            )
            if owner and owner not in self._owners:  # the connection has ended meanwhile
                self._memory.withdraw(owner)

        await _aside(register)
        return pb.CudaSharedMemoryRegisterResponse()

    async def cuda_unregister(
        self, request: pb.CudaSharedMemoryUnregisterRequest, call: Call
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        await self._unregister(call, CUDA, request.name)
        return pb.CudaSharedMemoryUnregisterResponse()

    async def _unregister(self, call: Call, kind: int, name: str) -> None:
        await _aside(self._memory.unregister, user_of(call), kind, name)

    def owner(self, call: Call) -> int:
        """The owner of a region that `call` registers: its connection, if the client wants that; 0 for none."""
        if not _is_limited(call):
            return 0
        connection = call.connection
        if not connection:
            raise Unimplemented(
                f"{LIFETIME}: this front door cannot tell when a connection ends; leave it out, or use "
                "--transport native"
            )
        if connection not in self._owners:
            self._owners.add(connection)
            call.on_disconnect(lambda: self._departed(connection))
        return connection

    def _departed(self, owner: int) -> None:
        self._owners.discard(owner)
        asyncio.get_running_loop().run_in_executor(None, self._memory.withdraw, owner)


def user_of(call: Call) -> User | None:
    """The client's user, if it uses a unix socket."""
    credentials = call.peer_credentials
    return None if credentials is None else User(credentials.uid, credentials.pid)


def _is_limited(call: Call) -> bool:
    """Whether the region ends with the connection."""
    given = {value for key, value in call.metadata if key == LIFETIME} or {"server"}
    if not given <= {"connection", "server"} or len(given) > 1:
        raise InvalidArgument(f"{LIFETIME}: expected 'connection' or 'server', got {sorted(map(str, given))}")
    return given == {"connection"}


async def _aside(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call on a thread: unmapping a large region is slow, and so is a GPU's driver."""
    return await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, function, *arguments))
