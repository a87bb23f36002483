"""The interface of a front door: the registration functions of a grpc.aio server, a start and a stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import grpc

STOPPING = "GRPC server is shutting down and has stopped accepting new requests"
"""The text, Triton's, for calls that a stopping server refuses with UNAVAILABLE."""


class Door(Protocol):
    """A transport. Everything is registered before `start`."""

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[grpc.GenericRpcHandler[Any, Any]], /) -> None:
        """Host generic handlers, each of which looks up methods."""

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]], /
    ) -> None:
        """Host handlers by `service_name` and method name."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses on which it listens since `start`, with the bound ports."""

    async def start(self, *addresses: str) -> int:
        """Listen on each `host:port` (port 0: any free one) or `unix:path`.

        Returns the bound port of the first one, 0 for a unix socket.

        Raises:
            OSError: an address cannot be bound; the text names it.
        """

    async def stop(self, grace: float | None) -> None:
        """Refuse new calls, give running ones `grace` seconds, then end the rest."""

    def remove_files(self) -> None:
        """Remove the files of unix sockets; `stop` does so, too."""
