"""gRPC over HTTP/2, for the clients that speak HTTP/2 themselves."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import h2.events


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


@dataclass
class Answer:
    """Everything that came back on one stream."""

    headers: dict[str, str] = field(default_factory=dict)
    trailers: dict[str, str] = field(default_factory=dict)
    data: bytearray = field(default_factory=bytearray)
    ended: bool = False
    reset: int | None = None  # the error code of RST_STREAM

    @property
    def messages(self) -> list[bytes]:
        return unframed(bytes(self.data))

    @property
    def status(self) -> int | None:
        """grpc-status, from the trailers or from an answer of trailers only."""
        text = self.trailers.get("grpc-status", self.headers.get("grpc-status"))
        return None if text is None else int(text)

    @property
    def details(self) -> str:
        """grpc-message as it was sent, percent-encoded."""
        return self.trailers.get("grpc-message", self.headers.get("grpc-message", ""))

    def note(self, event: h2.events.Event) -> None:
        """Take over what an event of its stream says."""
        if isinstance(event, h2.events.ResponseReceived):
            self.headers = dict(event.headers)
        elif isinstance(event, h2.events.TrailersReceived):
            self.trailers = dict(event.headers)
        elif isinstance(event, h2.events.DataReceived):
            self.data += event.data
        elif isinstance(event, h2.events.StreamEnded):
            self.ended = True
        elif isinstance(event, h2.events.StreamReset):
            self.reset = int(event.error_code)
