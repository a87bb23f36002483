"""Connection limits of the native front door: for the server, for each listener, and for each client.

A client is, over all its connections, the subject of its certificate with mutual TLS; else the user of its
process on a unix socket; else its IP address. Behind a proxy all clients are one, the proxy.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from _native.transport.client import ClientUse
from _native.transport.endpoint import InterceptorHandle
from server.front.keepalive import DEFAULT_POLICY, ConnectionPolicy
from server.front.peer import Peer, identity_key


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """What one client may have at a time; 0 for any number."""

    connections: int = 0
    calls: int = 0
    streams: int = 0  # of the calls, those that are streams
    bytes_in_flight: int = 0


@dataclass(eq=False, slots=True, kw_only=True)
class ListenerPolicy:
    """What holds for the connections of one listener."""

    connections: ConnectionPolicy = DEFAULT_POLICY
    max_connections: int = 0  # 0: any number
    groups: frozenset[str] | None = None  # RPC groups that are served; None: all
    trusted: bool = False  # nobody is asked for a token or for the header of a restricted protocol
    interceptor: InterceptorHandle | None = None  # of native calls
    count: int = 0


@dataclass(eq=False, slots=True)
class Admission:
    """What a connection has been counted for."""

    listener_policy: ListenerPolicy
    use: ClientUse


@dataclass(slots=True)
class ConnectionLimits:
    """How many connections the server, each listener and each client have, and may have.

    Args:
        max_connections: of the server; 0 for any number.
        per_client: what each client may have.
    """

    max_connections: int = 0
    per_client: ClientLimits = field(default_factory=ClientLimits)
    count: int = 0
    accepted: int = 0  # connections, ever
    refused: int = 0
    _clients: WeakValueDictionary[tuple[int, str], ClientUse] = field(default_factory=WeakValueDictionary)

    def admit(self, listener_policy: ListenerPolicy, peer: Peer) -> Admission | None:
        """Count a connection; None when there is no room for it."""
        use = self._use(peer)
        counts = (
            (self.count, self.max_connections),
            (listener_policy.count, listener_policy.max_connections),
            (use.connections, self.per_client.connections),
        )
        if any(0 < most <= count for count, most in counts):
            self.refused += 1
            return None
        self.count += 1
        self.accepted += 1
        listener_policy.count += 1
        use.connections += 1
        return Admission(listener_policy, use)

    def release(self, admission: Admission) -> None:
        """A connection that was let in is gone."""
        self.count -= 1
        admission.listener_policy.count -= 1
        admission.use.connections -= 1

    def _use(self, peer: Peer) -> ClientUse:
        name = client_name(peer)
        key = (peer.identity, name)  # two certificates may show the same name and belong to two owners
        use = self._clients.get(key)
        if use is None:
            use = ClientUse(
                name,
                max_calls=self.per_client.calls,
                max_streams=self.per_client.streams,
                max_bytes=self.per_client.bytes_in_flight,
            )
            self._clients[key] = use
        return use


def client_name(peer: Peer) -> str:
    """The client that a connection belongs to, in words."""
    auth: Mapping[str, Any] = peer.auth
    key = identity_key(auth)
    if key is not None:
        return "certificate " + ",".join(name.decode("utf-8", "replace") for name in auth[key])
    if peer.credentials is not None:
        return f"user {peer.credentials.uid}"
    return host_of(peer.address)


def host_of(address: str) -> str:
    """Of a peer's address as gRPC writes it; the address itself where it has none."""
    host = address.rpartition(":")[0].partition(":")[2].strip("[]")
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return address
    mapped = getattr(ip, "ipv4_mapped", None)  # an IPv4 client of a socket that takes both
    return str(mapped or ip)
