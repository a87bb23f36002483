"""Ways in which the bytes of a client get into a connection: `feed` gives it bytes that arrive together."""

from __future__ import annotations

import socket

from inferd._native.transport.connection import Connection
from inferd._native.transport.endpoint import Endpoint


class Buffered:
    """Through the buffer that all connections share."""

    def __init__(self, endpoint: Endpoint, connection: Connection) -> None:
        self.connection = connection
        self.buffer = memoryview(endpoint.receive_buffer()).cast("B")

    def feed(self, data: bytes) -> None:
        for at in range(0, len(data), len(self.buffer)):
            part = data[at : at + len(self.buffer)]
            self.buffer[: len(part)] = part
            self.connection.received(len(part))

    def close(self) -> None:
        """Nothing more comes."""


class Direct:
    """To where the connection wants them, in reads as long as it wants them."""

    def __init__(self, endpoint: Endpoint, connection: Connection) -> None:
        self.connection = connection
        self.buffer = connection.receive_buffer()

    def feed(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            with memoryview(self.buffer).cast("B") as view:
                part = data[at : at + len(view)]
                view[: len(part)] = part
                self.connection.received(len(part))
            at += len(part)

    def close(self) -> None:
        """Nothing more comes."""


class Socket:
    """Through a socket, read as an event loop and the connection read it together."""

    def __init__(self, endpoint: Endpoint, connection: Connection) -> None:
        self.connection = connection
        self.buffer = connection.receive_buffer()
        self.ours, self.theirs = socket.socketpair()
        for end in (self.ours, self.theirs):
            end.setblocking(False)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)

    def feed(self, data: bytes) -> None:
        while data:
            data = data[self.theirs.send(data) :]
            while self.read():
                pass

    def read(self) -> int:
        """One read of the loop, and what the connection reads behind it; 0 when there is nothing."""
        try:
            size = self.ours.recv_into(self.buffer)
        except BlockingIOError:
            return 0
        self.connection.received(size, self.ours.fileno())
        return size

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()
