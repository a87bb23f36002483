"""Ways in which the bytes of a client get into a connection: `feed` gives it bytes that arrive together."""

from __future__ import annotations

import socket

from inferd._native.transport.connection import Connection


class Given:
    """A reader that is given the bytes in memory."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def feed(self, data: bytes) -> None:
        self.connection.receive(data)

    def close(self) -> None:
        """Called when no bytes come any more."""


class Read:
    """Through a socket, from which large messages are read to their place."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.ours, self.theirs = socket.socketpair()
        for end in (self.ours, self.theirs):
            end.setblocking(False)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)

    def feed(self, data: bytes) -> None:
        while data:
            data = data[self.theirs.send(data) :]
            while self.ours.fileno() >= 0 and waits(self.ours):
                self.read()

    def read(self) -> None:
        """One turn."""
        self.connection.read(self.ours.fileno())

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


def waits(end: socket.socket) -> bool:
    """Whether there is something to read."""
    try:
        return bool(end.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False
