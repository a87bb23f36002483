"""The beginning of a connection with TLS: until its handshake is over, the socket has no driver."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from inferd._native.transport.handshake import Handshake
from inferd._native.transport.io_thread import IoThreads
from inferd._native.transport.tls import TlsContext


class PendingHandshake:
    """Waits for the handshake of TLS of an accepted socket.

    Args:
        io: the thread that reads and writes the socket.
        context: of the listener.
        accepted: the socket, which `on_over` then owns.
        client: the number of the client, for its share of the thread pool.
        patience: seconds that the handshake may take.
        on_over: called when the handshake is done, or has failed.

    Raises:
        OSError, MemoryError: the handshake cannot begin.
    """

    silent = True
    """The client has not spoken HTTP/2 yet."""

    def __init__(
        self,
        io: IoThreads,
        context: TlsContext,
        accepted: socket.socket,
        client: int,
        patience: float,
        on_over: Callable[[PendingHandshake], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self._accepted = accepted
        self._on_over = on_over
        self.closed: asyncio.Future[None] = loop.create_future()
        self.session = Handshake(io, context, accepted.fileno(), client, self._is_over)
        self._alarm = loop.call_later(min(patience, NEVER), self.abort)

    def _is_over(self) -> None:
        self._alarm.cancel()
        try:
            self._on_over(self)
        finally:
            if not self.closed.done():
                self.closed.set_result(None)

    def abort(self) -> None:
        """Let the handshake fail soon."""
        self.session.abort()


NEVER = 1e8  # seconds
