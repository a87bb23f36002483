"""The second front door: grpc.aio, which is gRPC's C core. Same handlers and same bytes as the native door."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

UNLIMITED = -1

_SECOND = 1000
_OPTIONS: tuple[tuple[str, int], ...] = (
    # Streams of one connection and calls waiting for this process: both are needed, else C core answers valid calls
    # of a burst with CANCELLED. Above these it refuses the stream, which clients retry.
    ("grpc.max_concurrent_streams", 256),
    ("grpc.server.max_pending_requests", 20_000),
    ("grpc.server.max_pending_requests_hard_limit", 40_000),
    # A dead peer is found after a minute, and clients that ping each ten seconds are not sent away.
    ("grpc.keepalive_time_ms", 30 * _SECOND),
    ("grpc.keepalive_timeout_ms", 10 * _SECOND),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.ping_timeout_ms", 10 * _SECOND),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10 * _SECOND),
    ("grpc.server_handshake_timeout_ms", 10 * _SECOND),
    ("grpc.max_metadata_size", 8192),
)


COMPRESSION_LEVELS = {"none": 0, "low": 1, "medium": 2, "high": 3}
"""C core's own levels. They choose the algorithm among those that the client takes, for all responses of the server:
grpc.aio offers nothing that does it for one method."""


def channel_options(
    *, max_message_bytes: int = UNLIMITED, reuse_port: bool = False, compression_level: str = "none"
) -> tuple[tuple[str, int], ...]:
    """The options of the C core server; `max_message_bytes` holds both ways, UNLIMITED as in Triton."""
    return (
        *_OPTIONS,
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.so_reuseport", int(reuse_port)),
        ("grpc.default_compression_level", COMPRESSION_LEVELS[compression_level]),
    )


class GrpcioDoor:
    """A `server.front.door.Door` on grpc.aio. One event loop of a process may use grpc.aio, and only one."""

    def __init__(
        self, *, max_message_bytes: int = UNLIMITED, reuse_port: bool = False, compression_level: str = "none"
    ) -> None:
        self._options = channel_options(
            max_message_bytes=max_message_bytes, reuse_port=reuse_port, compression_level=compression_level
        )
        self._generic: list[grpc.GenericRpcHandler[Any, Any]] = []
        self._server: grpc.aio.Server | None = None

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[grpc.GenericRpcHandler[Any, Any]], /) -> None:
        self._generic.extend(generic_rpc_handlers)

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]], /
    ) -> None:
        # grpc.aio accepts this call and then ignores it; a method that is registered only here must be found too.
        self._generic.append(grpc.method_handlers_generic_handler(service_name, dict(method_handlers)))

    async def start(self, address: str) -> int:
        # Made here, not in the constructor: grpc.aio binds a server to the loop that runs when it is made.
        server = grpc.aio.server(handlers=self._generic, options=self._options)
        try:
            port = server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: is it in use, or not an address of this machine?") from error
        await server.start()
        self._server = server
        return 0 if address.startswith("unix:") else port

    async def stop(self, grace: float | None) -> None:
        if self._server is not None:
            await self._server.stop(grace)
