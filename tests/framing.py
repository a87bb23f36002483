"""gRPC's framing of messages, for the clients that speak HTTP/2 themselves."""

from __future__ import annotations

import struct


def framed(message: bytes, compressed: int = 0) -> bytes:
    """A message with gRPC's five bytes in front."""
    return struct.pack(">BI", compressed, len(message)) + message


def unframed(data: bytes) -> list[bytes]:
    """The messages in the DATA of an answer."""
    messages = []
    while data:
        compressed, size = struct.unpack_from(">BI", data)
        assert compressed == 0
        assert len(data) >= 5 + size
        messages.append(data[5 : 5 + size])
        data = data[5 + size :]
    return messages
