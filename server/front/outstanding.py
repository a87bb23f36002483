"""How many of the bytes that were written to a socket its peer has not received."""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
from collections.abc import Callable
from typing import Any

_ACKED = struct.Struct("120xQ")  # tcpi_bytes_acked, in Linux's struct tcp_info


class Outstanding:
    """Bytes in flight to a peer, of a connection whose output is complete.

    Args:
        opened: its TCP or unix socket.
        unwritten: the number of bytes that the socket has not accepted yet.
    """

    def __init__(self, opened: Any, unwritten: Callable[[], int]) -> None:
        self._unwritten = unwritten
        self._socket = opened
        self._begin = self._acked()
        self._most = self.waiting

    @property
    def buffered(self) -> int:
        """Bytes that the server's kernel has not accepted yet."""
        return self._unwritten()

    @property
    def waiting(self) -> int:
        """Bytes that the peer's kernel has not acknowledged; on a unix socket, that the peer has not read."""
        try:
            (queued,) = struct.unpack("i", fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, bytes(4)))
        except OSError:  # the socket is closed, or broken
            queued = 0
        return self.buffered + int(queued)

    @property
    def moved(self) -> int:
        """Bytes that the peer has received since this object was made."""
        if self._begin is not None and (acked := self._acked()) is not None:
            return acked - self._begin
        return max(0, self._most - self.waiting)

    def _acked(self) -> int | None:
        # TLS keeps bytes between its buffer and the kernel's: acknowledged bytes include them
        if self._socket.family == socket.AF_UNIX:
            return None
        try:
            return int(_ACKED.unpack(self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED.size))[0])
        except (OSError, struct.error):
            return None
