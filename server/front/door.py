"""What every front door offers: the registration surface of a grpc.aio server, a start and a stop."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import grpc


class Door(Protocol):
    """A transport. Everything is registered before `start`."""

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[grpc.GenericRpcHandler[Any, Any]], /) -> None:
        """Host handlers that are found by asking each of them for a method."""

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]], /
    ) -> None:
        """Host handlers that are found by `service_name` and method name."""

    async def start(self, address: str) -> int:
        """Listen on `host:port` (port 0: any free one) or `unix:path`; returns the bound port, 0 for a unix socket.

        Raises:
            OSError: the address cannot be bound.
        """

    async def stop(self, grace: float | None) -> None:
        """Refuse new calls, give those in progress `grace` seconds, then cancel what is left."""


def is_local(address: str) -> bool:
    """Whether only this machine can connect to a listener's address: a unix socket or a loopback interface."""
    if address.startswith("unix:") or address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False
