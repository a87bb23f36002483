"""The driver of a connection with TLS: moves bytes between it and an asyncio transport, which encrypts them."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress
from typing import Any

from inferd._native.timers import TimersHandle
from inferd._native.transport.connection import Connection
from inferd._native.transport.endpoint import Endpoint
from inferd.server.front.connection_limits import Admission, ConnectionLimits
from inferd.server.front.connection_log import ConnectionLog
from inferd.server.front.connection_monitor import ConnectionMonitor
from inferd.server.front.driver import connection_of, prepare
from inferd.server.front.outstanding import Outstanding
from inferd.server.front.peer import Peer, identified
from inferd.server.front.sessions import is_resumed
from inferd.server.front.tls import ALPN

PART = 128 << 10
"""Bytes of output that the transport gets at a time to encrypt them. It keeps as many more behind what it tells of."""
UNWRITTEN = 64 << 10
"""Bytes that the transport may have before it reports that it is full."""


class EncryptedDriver(asyncio.BufferedProtocol):
    """Moves bytes between the transport of TLS and a connection.

    Args:
        endpoint: of the connection.
        protocols: where it is while it is connected.
        timers: of the loop.
        limits: count its connection, until it is lost.
        accepted: the socket, before the handshake of TLS.
        client: at the other end of it.
        admission: of the connection, whose driver this becomes.
        refused: the log.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        protocols: set[Any],
        timers: TimersHandle,
        limits: ConnectionLimits,
        accepted: socket.socket,
        client: Peer,
        admission: Admission,
        refused: ConnectionLog,
    ) -> None:
        self._refused = refused
        self._limits = limits
        self._accepted = accepted
        self._accepted_at = timers.time()
        self._client = client
        self._admission = admission
        admission.driver = self
        self._endpoint = endpoint
        self._protocols = protocols
        self._timers = timers
        self._monitor: ConnectionMonitor | None = None
        self._buffer = memoryview(endpoint.receive_buffer())  # uvloop's TLS asks it for its length
        self._paused = False
        self._waiting = False  # output waits for the socket, as the connection knows
        self._descriptor = accepted.fileno()
        self._transport: asyncio.Transport | None = None
        self._connection: Connection | None = None
        self._ended: Connection | None = None  # the same, after the last output
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        accepted = self._accepted
        prepare(accepted, self._endpoint.send_timeout)
        if not self._may_speak(transport.get_extra_info("ssl_object")):
            transport.abort()
            return
        transport.set_write_buffer_limits(UNWRITTEN, 0)
        self._connection = connection_of(self._endpoint, self._client, self._admission, self._refused)
        self._connection.flush = self._flush
        self._monitor = ConnectionMonitor(
            self, self._connection, self._admission.listener_policy.connections, self._timers, self._accepted_at
        )
        self._protocols.add(self)
        self._flush()

    def _may_speak(self, tls: ssl.SSLObject) -> bool:
        """Whether the client may continue after its handshake; from now on its certificate identifies it."""
        if tls.selected_alpn_protocol() != ALPN:
            self._refused.add(self._client.address, "TLS: it did not offer HTTP/2 (ALPN 'h2')")
            return False
        if is_resumed(tls):
            self._refused.add(self._client.address, "TLS: it resumed a session: its certificate was not checked")
            return False
        self._client = identified(self._client, tls)
        return self._limits.identify(self._admission, self._client)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        self._protocols.discard(self)
        connection, self._connection, self._ended = self._connection or self._ended, None, None
        if connection is not None:
            connection.close()
            for callback in connection.client.departed:
                callback()
        self._limits.release(self._admission)
        if self._monitor is not None:
            self._monitor.stop()
        if not self.closed.done():
            self.closed.set_result(None)

    def get_buffer(self, sizehint: int) -> Any:  # noqa: ARG002 - the protocol's signature
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        connection = self._connection
        if connection is not None:
            connection.received(nbytes)
            self._flush()

    def eof_received(self) -> bool:
        return False

    def flush(self) -> None:
        """Write the connection's output."""
        self._flush()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._flush()

    def _flush(self) -> None:
        connection, transport = self._connection, self._transport
        if connection is None or transport is None or transport.is_closing():
            return
        if not self._paused:
            if not self._write(connection, transport):
                return
            if self._paused or self._waiting:
                self._note_waiting(connection, transport)
        if connection.stalled:
            transport.abort()
        elif connection.finished or (self._paused and connection.parting):
            self._shut(connection, transport)

    def _write(self, connection: Connection, transport: asyncio.Transport) -> bool:
        """Write until the socket is full or all is written; False if the connection has ended meanwhile."""
        while not self._paused and connection.collect_output(PART):
            transport.write(b"".join(connection.take_ready()))  # a record for each piece would cost more than the copy
            if self._connection is None:
                return False
        return True

    def _note_waiting(self, connection: Connection, transport: asyncio.Transport) -> None:
        """Tell the connection how many bytes wait for the socket, or that none do."""
        self._waiting = self._paused
        if self._paused:
            connection.waits(transport.get_write_buffer_size(), PART, self._descriptor)
        else:
            connection.waits(0)

    def _shut(self, connection: Connection, transport: asyncio.Transport) -> None:
        """The output is complete: shut the socket for writing after it, and discard input until the client closes.

        A socket that is closed while the client still sends, if only a WINDOW_UPDATE, resets the connection, and bytes
        that the client has not received are lost.
        """
        self._connection, self._ended = None, connection
        transport.write(b"".join(connection.take_output()))  # the last output does not wait for room
        connection.shut()
        outstanding = Outstanding(transport.get_extra_info("socket"), transport.get_write_buffer_size)
        transport.close()  # of TLS: it sends close_notify behind the rest, and discards until the client's end
        if self._monitor is not None:
            self._monitor.shut(outstanding)

    @property
    def told(self) -> bool:
        """The client knows of the shutdown, or is gone."""
        return self._connection is None or self._connection.told

    def announce_shutdown(self) -> None:
        if self._connection is not None:
            self._connection.announce_shutdown()
            self._flush()

    def go_away(self) -> None:
        """Repeated calls have no effect."""
        if self._connection is not None and self._connection.state in ("open", "announced"):
            self._connection.go_away()
            self._flush()

    def fail_calls(self, details: str) -> None:
        if self._connection is not None:
            self._connection.fail_calls(details)
            self._flush()

    @property
    def silent(self) -> bool:
        """The client has not spoken HTTP/2 yet."""
        return self._ended is None and (self._connection is None or not self._connection.greeted)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            return
        with suppress(OSError):  # in the handshake of TLS: it fails
            self._accepted.shutdown(socket.SHUT_RDWR)
