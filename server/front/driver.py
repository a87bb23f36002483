"""The driver of a connection: Python begins and ends it, an I/O thread reads and writes its socket."""

from __future__ import annotations

import asyncio
import math
import socket
from functools import partial
from typing import Any

from inferd._native.timers import TimersHandle
from inferd._native.transport.connection import Connection
from inferd._native.transport.endpoint import Endpoint
from inferd._native.transport.io_thread import IoThreads
from inferd._native.transport.tls import TlsSession
from inferd.server.front.connection_limits import Admission, ConnectionLimits
from inferd.server.front.connection_log import ConnectionLog
from inferd.server.front.connection_monitor import ConnectionMonitor
from inferd.server.front.outstanding import Outstanding
from inferd.server.front.peer import Peer

TCP_USER_TIMEOUT = 18
"""The socket option (Linux): milliseconds for which a peer may accept none of the sent bytes."""
UNIX_SEND_BUFFER = 1 << 20
"""Bytes that a client on a unix socket has not read and the kernel may hold; the kernel may allow less."""


def prepare(accepted: socket.socket, send_timeout: float) -> None:
    """Set the options of an accepted socket."""
    if accepted.family == socket.AF_UNIX:  # TCP's buffers grow by themselves, those of unix sockets do not
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_SEND_BUFFER)
        return
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if send_timeout != math.inf:  # for bytes that only the kernel still has
        accepted.setsockopt(socket.IPPROTO_TCP, TCP_USER_TIMEOUT, int(send_timeout * 1000))


class SocketDriver:
    """Begins and ends one connection.

    Args:
        io: the threads, one of which reads and writes the socket.
        endpoint: of the connection.
        drivers: the set of all drivers; this one is in it while the connection exists.
        timers: of the front.
        limits: count the connection until it is lost.
        accepted: the socket, which the driver then owns.
        client: at the other end of the socket.
        admission: of the connection; this becomes its driver.
        refused: the log.
        accepted_at: when the connection was accepted, on the timers' clock.
        session: of TLS, after the handshake; without a session the socket is not encrypted.

    Raises:
        OSError, MemoryError: the connection cannot be served; the owner closes the socket.
    """

    def __init__(
        self,
        io: IoThreads,
        endpoint: Endpoint,
        drivers: dict[Any, None],
        timers: TimersHandle,
        limits: ConnectionLimits,
        accepted: socket.socket,
        client: Peer,
        admission: Admission,
        refused: ConnectionLog,
        accepted_at: float,
        session: TlsSession | None = None,
    ) -> None:
        self._io = io
        self._drivers = drivers
        self._limits = limits
        self._accepted = accepted
        self._admission = admission
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        prepare(accepted, endpoint.send_timeout)
        self._connection = connection = self._connect(endpoint, client, admission, refused)
        connection.on_shut = self._shut
        connection.on_lost = self._lost
        self._monitor = ConnectionMonitor(self, connection, admission.listener_policy.connections, timers, accepted_at)
        admission.driver = self
        drivers[self] = None
        # the server sends nothing before the client's first bytes: these may be HTTP/1, and then so is the response
        try:
            io.take(connection, accepted.fileno(), session)
        except BaseException:
            self._monitor.stop()
            drivers.pop(self, None)
            connection.close()
            raise

    @staticmethod
    def _connect(endpoint: Endpoint, client: Peer, admission: Admission, refused: ConnectionLog) -> Connection:
        """A new connection; what the server refuses on it goes to the log."""
        user = client.credentials.uid if client.credentials is not None else -1
        connection = Connection(
            endpoint, client.address, user, admission.use, admission.listener_policy.interceptor, client.identity
        )
        connection.client = client
        connection.admission = admission
        connection.on_refused = partial(refused.add, client.address)
        return connection

    def _shut(self) -> None:
        """The connection writes its last output, and no more."""
        self._monitor.shut(Outstanding(self._accepted, partial(self._io.unwritten, self._connection)))

    def _lost(self) -> None:
        """The client is gone, or the connection has ended."""
        self._monitor.stop()
        self._drivers.pop(self, None)
        self._accepted.close()
        for callback in self._connection.client.departed:
            callback()
        self._limits.release(self._admission)
        if not self.closed.done():
            self.closed.set_result(None)

    @property
    def told(self) -> bool:
        """Whether the client knows of the shutdown, or is gone."""
        return self._connection.told or self._connection.parting

    def announce_shutdown(self) -> None:
        self._connection.announce_shutdown()

    def go_away(self) -> None:
        """Repeated calls have no effect."""
        if self._connection.state in ("open", "announced"):
            self._connection.go_away()

    def fail_calls(self, details: str) -> None:
        self._connection.fail_calls(details)

    @property
    def silent(self) -> bool:
        """The client has not spoken HTTP/2 yet."""
        return not self._connection.greeted

    def abort(self) -> None:
        """Close the socket at once."""
        self._io.drop(self._connection)
