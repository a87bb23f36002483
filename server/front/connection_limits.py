"""Connection limits of the native front door: for the server, for each listener, and for each client.

With mutual TLS, a client is the subject of a certificate; on a unix socket, the user of a process; otherwise an IP
address. It may have any number of connections. Behind a proxy all clients are one, the proxy.

A connection counts from its accept, before the handshake of TLS; until the handshake ends it counts for its address. If
the server, a listener, or the limit of open files has no room for one more, the client with most silent connections
makes room; a connection is silent until it has spoken HTTP/2.
"""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakValueDictionary

from inferd._native.transport.client import ClientUse
from inferd._native.transport.endpoint import InterceptorHandle
from inferd.server.front.keepalive import DEFAULT_POLICY, ConnectionPolicy
from inferd.server.front.peer import Peer, identity_key

LOOK = 64
"""Connections of one client that are checked for silence at a time: a flood must cost little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """The limits of one client; None: any number."""

    connections: int | None = None
    calls: int | None = None
    streams: int | None = None  # of the calls, those that are streams
    bytes_in_flight: int | None = None


@dataclass(eq=False, slots=True, kw_only=True)
class ListenerPolicy:
    """The rules for the connections of one listener."""

    connections: ConnectionPolicy = DEFAULT_POLICY
    max_connections: int | None = None  # None: any number
    groups: frozenset[str] | None = None  # RPC groups that are served; None: all
    trusted: bool = False  # callers need neither a token nor the header of a restricted protocol
    interceptor: InterceptorHandle | None = None  # of native calls
    count: int = 0


class Driver(Protocol):
    """The driver of a connection."""

    @property
    def silent(self) -> bool:
        """The client has not spoken HTTP/2 yet."""

    def abort(self) -> None:
        """Close the socket at once."""


@dataclass(eq=False, slots=True)
class Admission:
    """The counts of which one connection is part."""

    listener_policy: ListenerPolicy
    use: ClientUse
    driver: Driver | None = None
    counted: bool = True  # it is not released


_Group = tuple[ClientUse, ListenerPolicy]
"""The silent connections of one client at one listener."""


class _Ranking:
    """Groups by their size, so that a full server finds the largest one without a look at all."""

    def __init__(self) -> None:
        self._of_size: list[dict[_Group, None]] = [{}]

    def move(self, group: _Group, before: int, after: int) -> None:
        """Note that this group had `before` connections and now has `after`; 0: it is not in the ranking."""
        if before:
            del self._of_size[before][group]
        if after:
            self._of_size += ({} for _ in range(len(self._of_size), after + 1))
            self._of_size[after][group] = None
        while len(self._of_size) > 1 and not self._of_size[-1]:
            self._of_size.pop()

    def largest(self) -> tuple[_Group | None, int]:
        """The group with most connections, and how many it has."""
        return next(iter(self._of_size[-1]), None), len(self._of_size) - 1


@dataclass(slots=True)
class ConnectionLimits:
    """How many connections the server, each listener and each client have, and may have.

    Args:
        max_connections: of the server; None: any number.
        per_client: the limits of each client.
    """

    max_connections: int | None = None
    per_client: ClientLimits = field(default_factory=ClientLimits)
    count: int = 0
    accepted: int = 0  # connections, ever
    refused: int = 0
    _clients: WeakValueDictionary[tuple[int, str], ClientUse] = field(default_factory=WeakValueDictionary)
    _silent: dict[_Group, dict[Admission, None]] = field(default_factory=dict)
    """The oldest first; some may have spoken since."""
    _rankings: defaultdict[ListenerPolicy | None, _Ranking] = field(default_factory=lambda: defaultdict(_Ranking))
    """Rankings of the groups in `_silent`: one for each listener, and one for all."""

    def admit(self, listener_policy: ListenerPolicy, peer: Peer, *, scarce: bool = False) -> Admission | None:
        """Count an accepted connection; None if there is no room for it. Set the `driver` of the result.

        Args:
            scarce: the process may open few more files.
        """
        use = self._use(peer)
        if (
            _is_full(use.connections, self.per_client.connections)
            or (
                _is_full(listener_policy.count, listener_policy.max_connections)
                and not self._make_room(use, listener_policy, listener_policy)
            )
            or ((scarce or _is_full(self.count, self.max_connections)) and not self._make_room(use, listener_policy))
        ):
            self.refused += 1
            return None
        self.count += 1
        self.accepted += 1
        listener_policy.count += 1
        use.connections += 1
        admission = Admission(listener_policy, use)
        self._note(admission)
        return admission

    def identify(self, admission: Admission, peer: Peer) -> bool:
        """Count a connection for the owner of its certificate, now known; False if that owner has too many."""
        use = self._use(peer)
        if use is admission.use:
            return True
        if _is_full(use.connections, self.per_client.connections):
            self.refused += 1
            return False
        self._forget(admission)
        admission.use.connections -= 1
        use.connections += 1
        admission.use = use
        self._note(admission)
        return True

    def release(self, admission: Admission) -> None:
        """An admitted connection has ended. Repeated calls have no effect."""
        if not admission.counted:
            return
        admission.counted = False
        admission.driver = None
        self._forget(admission)
        self.count -= 1
        admission.listener_policy.count -= 1
        admission.use.connections -= 1

    def _make_room(
        self, newcomer: ClientUse, listener_policy: ListenerPolicy, at: ListenerPolicy | None = None
    ) -> bool:
        """Close the oldest connection of the largest group, at listener `at` or (None) anywhere. False: no group is
        larger than the newcomer's would be with its new connection."""
        self._look(newcomer, listener_policy)
        least = len(self._silent.get((newcomer, listener_policy), ())) + 2
        while True:
            most, count = self._rankings[at].largest()
            if most is None or count < least:
                return False
            if self._look(*most):
                continue
            yielding = next(iter(self._silent[most]))
            driver = yielding.driver
            self.release(yielding)
            self.refused += 1
            if driver is not None:
                driver.abort()
            return True

    def _look(self, use: ClientUse, listener_policy: ListenerPolicy) -> bool:
        """Forget those of a group's oldest connections that have spoken; return whether there were any."""
        silent, spoken = 0, []
        for admission in self._silent.get((use, listener_policy), ()):
            if admission.driver is None or admission.driver.silent:
                silent += 1
            else:
                spoken.append(admission)
            if silent == LOOK:
                break
        for admission in spoken:
            self._forget(admission)
        return bool(spoken)

    def _note(self, admission: Admission) -> None:
        """Note that the connection is silent."""
        group = (admission.use, admission.listener_policy)
        self._silent.setdefault(group, {})[admission] = None
        self._rank(group, len(self._silent[group]) - 1)

    def _forget(self, admission: Admission) -> None:
        """Note that the connection is no longer silent."""
        group = (admission.use, admission.listener_policy)
        if admission in self._silent.get(group, ()):
            del self._silent[group][admission]
            self._rank(group, len(self._silent[group]) + 1)
            if not self._silent[group]:
                del self._silent[group]

    def _rank(self, group: _Group, before: int) -> None:
        for listener_policy in (None, group[1]):
            self._rankings[listener_policy].move(group, before, len(self._silent[group]))

    def _use(self, peer: Peer) -> ClientUse:
        name = client_name(peer)
        key = (peer.identity, name)  # two owners' certificates may have the same name
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


def _is_full(count: int, most: int | None) -> bool:
    return most is not None and count >= most


def client_name(peer: Peer) -> str:
    """The client of a connection, in words."""
    auth: Mapping[str, Any] = peer.auth
    key = identity_key(auth)
    if key is not None:
        return "certificate " + ",".join(name.decode("utf-8", "replace") for name in auth[key])
    if peer.credentials is not None:
        return f"user {peer.credentials.uid}"
    return host_of(peer.address)


def host_of(address: str) -> str:
    """The host of a peer's address in gRPC's form; the address itself if it has none."""
    host = address.rpartition(":")[0].partition(":")[2].strip("[]")
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return address
    mapped = getattr(ip, "ipv4_mapped", None)  # an IPv4 client of a socket that takes both
    return str(mapped or ip)
