"""Registration of clients' shared memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from server.engine.shared_memory import SYSTEM, User
from server.errors import InvalidArgument, Unimplemented
from server.pb import grpc_service_pb2 as pb
from server.rpc.call import Call

if TYPE_CHECKING:
    from server.engine.engine import Engine

LIFETIME = "inferd-shm-lifetime"
"""Metadata of a registration: with "connection", the region is unregistered when the client's connection ends."""


class SharedMemoryRegistration:
    """The RPCs for system shared memory."""

    def __init__(self, engine: Engine) -> None:
        self._memory = engine.shared_memory

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
        self.register(
            call,
            lambda user: self._memory.register_system(
                user, request.name, request.key, request.offset, request.byte_size
            ),
        )
        return pb.SystemSharedMemoryRegisterResponse()

    async def system_unregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest, call: Call
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        await _aside(self._memory.unregister, user_of(call), SYSTEM, request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    def register(self, call: Call, enter: Callable[[User | None], int]) -> None:
        """Register a region by `enter(user)`, which returns the serial, for as long as the client asks."""
        limited = _is_limited(call)
        serial = enter(user_of(call))
        if limited and not call.on_disconnect(lambda: _later(self._memory.withdraw, serial)):
            self._memory.withdraw(serial)
            raise Unimplemented(
                f"{LIFETIME}: this front door cannot tell when a connection ends; leave it out, or use "
                "--transport native"
            )


def user_of(call: Call) -> User | None:
    """The client's user, when it came over a unix socket."""
    credentials = call.peer_credentials
    return None if credentials is None else User(credentials.uid, credentials.pid)


def _is_limited(call: Call) -> bool:
    """Whether the region shall go with the connection."""
    given = {value for key, value in call.metadata if key == LIFETIME} or {"server"}
    if not given <= {"connection", "server"} or len(given) > 1:
        raise InvalidArgument(f"{LIFETIME}: expected 'connection' or 'server', got {sorted(map(str, given))}")
    return given == {"connection"}


async def _aside(function: Callable[..., None], *arguments: Any) -> None:
    """Call where it may take its time: taking a large mapping away does."""
    await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, function, *arguments))


def _later(function: Callable[..., None], *arguments: Any) -> None:
    asyncio.get_running_loop().run_in_executor(None, function, *arguments)
