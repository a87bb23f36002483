"""A client's side of HTTP/2 as frames, so that a simulation decides where bytes are cut and when windows open.

It checks what a server must keep to: windows, the order of frames on a stream, one end for each stream.
"""

from __future__ import annotations

import functools
import gzip
import struct
import zlib
from dataclasses import dataclass, field

from hpack import Decoder

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PUSH, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 8, 9
END_STREAM, END_HEADERS, ACK, PADDED = 1, 4, 1, 8
FRAME = 16_384
NO_ERROR, CANCEL = 0, 8
PROTOCOL_ERROR = b"\0\0\0\1"
ALL_STREAMS = (1 << 31) - 1


class Violation(AssertionError):
    """A rule of the protocol, or a promise of the server, was broken."""


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """One frame."""
    return struct.pack(">IBBI", len(payload), kind, flags, stream)[1:] + payload


def literal(name: str, value: str) -> bytes:
    """A header field that is not indexed."""
    return b"\0" + measured(name) + name.encode() + measured(value) + value.encode()


def measured(text: str) -> bytes:
    """The length of a text of a header field."""
    size = len(text.encode())
    if size < 127:
        return bytes([size])
    out, size = bytearray([127]), size - 127
    while size > 127:
        out.append(size & 127 | 128)
        size >>= 7
    return bytes([*out, size])


def framed(message: bytes, *, packed: str = "") -> bytes:
    """The message as gRPC puts it on a stream, compressed if `packed` says how."""
    if packed:
        message = gzip.compress(message, 1, mtime=0) if packed == "gzip" else zlib.compress(message, 1)
    return bytes([bool(packed)]) + len(message).to_bytes(4, "big") + message


def take_message(data: bytearray) -> bytes | None:
    """The first message that gRPC has put on a stream; None: it is not complete."""
    if len(data) < 5 or len(data) < 5 + int.from_bytes(data[1:5], "big"):
        return None
    end = 5 + int.from_bytes(data[1:5], "big")
    packed, message = data[0], bytes(data[5:end])
    del data[:end]
    return zlib.decompress(message, wbits=zlib.MAX_WBITS | 32) if packed else message  # of either format


@functools.cache
def request_headers(path: str, extra: tuple[tuple[str, str], ...]) -> bytes:
    """The header block of a gRPC call."""
    usual = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "sim", "te": "trailers"}
    usual["content-type"] = "application/grpc"
    told = [pair for pair in extra if pair[0] not in usual]
    fields = [*(usual | {name: value for name, value in extra if name in usual}).items(), *told]
    return b"".join(literal(name, value) for name, value in fields if name != "te" or value)


@functools.lru_cache(4096)
def decoded(block: bytes) -> dict[str, str]:
    """The fields of a header block; the server was told to keep no table, so a block stands for itself."""
    decoder = Decoder()
    return {str(name): str(value) for name, value in decoder.decode(block)}


@dataclass
class Stream:
    """One call as the client sees it."""

    number: int
    window: int  # what the client may send
    credit: int  # what the server may send
    body: bytearray = field(default_factory=bytearray)  # still to be sent; what is sent is deleted, without a copy
    more: bool = False  # and more will come
    sent_end: bool = False
    headers: dict[str, str] | None = None
    trailers: dict[str, str] | None = None
    data: bytearray = field(default_factory=bytearray)
    reset: int | None = None
    cancelled: bool = False
    ended: bool = False

    @property
    def over(self) -> bool:
        return self.ended or self.reset is not None or self.cancelled


class Wire:
    """One connection.

    Args:
        window: what the server may send ahead on each stream.
        conn_window: what it may send ahead on all of them.
        broad: the client sends frames as large as the server takes, and not those of the usual size.
        takes: the largest frame that the client takes.
    """

    def __init__(self, window: int, conn_window: int, *, broad: bool = False, takes: int = FRAME) -> None:
        self.out = bytearray(PREFACE)
        self._takes = takes
        settings = struct.pack(">HIHIHI", 1, 0, 2, 0, 4, window)
        if takes > FRAME:
            settings += struct.pack(">HI", 5, takes)
        self.out += frame(SETTINGS, 0, 0, settings)
        if conn_window > 65_535:
            self.out += frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", conn_window - 65_535))
        self.broad = broad
        self.largest = FRAME  # frame that it sends
        self.window = window
        self.credit = max(conn_window, 65_535)
        self.acknowledged = False  # the server knows the window of streams
        self.streams: dict[int, Stream] = {}
        self.next_stream = 1
        self.send_window = 65_535
        self.initial_window = 65_535
        self.went_away: int | None = None  # with this error
        self.last_stream = ALL_STREAMS  # that the server takes
        self.farewell = ""
        self.unanswered = 0  # PINGs
        self.pings = 0  # that it has sent
        self.told: dict[int, int] = {}  # settings of the server
        self.most_window = self.send_window  # that there ever was
        self._in = bytearray()
        self._block: tuple[Stream, bool, bytearray] | None = None
        self.begun: list[Stream] = []  # with what is not a refusal
        self.finished: list[Stream] = []

    # -- to the server --

    def open(self, path: str, extra: tuple[tuple[str, str], ...], body: bytes) -> Stream:
        """Begin a call; its body goes as windows let it."""
        stream = Stream(self.next_stream, self.initial_window, self.window, bytearray(body))
        self.next_stream += 2
        self.streams[stream.number] = stream
        self.out += frame(HEADERS, END_HEADERS, stream.number, request_headers(path, extra))
        return stream

    def push(self, stream: Stream, limit: int) -> bool:
        """Send at most so much of the body; whether all is sent."""
        if stream.over or stream.sent_end or (stream.more and not stream.body):
            return True
        size = max(0, min(limit, self.largest, len(stream.body), stream.window, self.send_window))
        if size == 0 and stream.body:
            return False
        part = bytes(stream.body[:size])
        del stream.body[:size]
        stream.window -= size
        self.send_window -= size
        stream.sent_end = not stream.body and not stream.more
        self.out += frame(DATA, END_STREAM if stream.sent_end else 0, stream.number, part)
        return not stream.body

    def cancel(self, stream: Stream) -> None:
        stream.cancelled = True
        self.out += frame(RST_STREAM, 0, stream.number, struct.pack(">I", CANCEL))

    def ping(self) -> None:
        self.out += frame(PING, 0, 0, b"simulate")
        self.unanswered += 1
        self.pings += 1

    def give(self, stream: Stream | None, size: int) -> None:
        """Let the server send so much more."""
        if size == 0:
            return
        if stream is None:
            self.credit += size
        else:
            stream.credit += size
        number = 0 if stream is None else stream.number
        self.out += frame(WINDOW_UPDATE, 0, number, struct.pack(">I", size))

    def judge(self) -> None:
        """All has been said, and the connection is still there.

        Raises:
            Violation: something is never answered, or never given back.
        """
        if self.unanswered:
            raise Violation(f"{self.unanswered} PINGs are never answered")
        if self.send_window < self.most_window // 2:
            raise Violation(f"{self.send_window} bytes of the window of a connection are left of {self.most_window}")

    # -- from the server --

    def receive(self, data: bytes) -> None:
        """Take bytes in; `begun` and `finished` have the streams whose answers do."""
        buffer = self._in
        buffer += data
        at = 0
        while len(buffer) - at >= 9:
            size = int.from_bytes(buffer[at : at + 3], "big")
            if len(buffer) - at < 9 + size:
                break
            kind, flags = buffer[at + 3], buffer[at + 4]
            number = int.from_bytes(buffer[at + 5 : at + 9], "big")
            payload = bytes(buffer[at + 9 : at + 9 + size])
            at += 9 + size
            if size > self._takes:
                raise Violation(f"a frame of {size} bytes")
            if self._block is not None and kind != CONTINUATION:
                raise Violation("a frame within a header block")
            self._frame(kind, flags, number, payload)
        del buffer[:at]

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == DATA:
            self._data(self._stream(number), payload, flags)
        elif kind == HEADERS:
            self._block = (self._stream(number), bool(flags & END_STREAM), bytearray(payload))
            self._end_block(flags)
        elif kind == CONTINUATION:
            if self._block is None:
                raise Violation("a CONTINUATION without HEADERS")
            self._block[2].extend(payload)
            self._end_block(flags)
        elif kind == RST_STREAM:
            stream = self._stream(number)
            if stream.ended and int.from_bytes(payload, "big") != NO_ERROR:
                raise Violation(f"RST_STREAM on stream {number}, whose answer was complete")
            if stream.reset is None and not stream.ended:
                stream.reset = int.from_bytes(payload, "big")
                self.finished.append(stream)
        elif kind == SETTINGS:
            self._settings(flags, payload)
        elif kind == PING:
            if not flags & ACK:
                self.out += frame(PING, ACK, 0, payload)
            elif payload == b"simulate":
                self.unanswered -= 1
                if self.unanswered < 0:
                    raise Violation("a PING is answered twice")
        elif kind == GOAWAY:
            last = int.from_bytes(payload[:4], "big")
            # of who breaks the protocol libnghttp2 tells the last stream that it knows, also behind another GOAWAY
            if last > self.last_stream and payload[4:8] != PROTOCOL_ERROR:
                raise Violation(f"GOAWAY tells {last} as the last stream, and told {self.last_stream} before")
            self.last_stream = min(last, self.last_stream)
            self.went_away = int.from_bytes(payload[4:8], "big")
            self.farewell = payload[8:].decode()
        elif kind == WINDOW_UPDATE:
            size = int.from_bytes(payload, "big")
            if number == 0:
                self.send_window += size
                self.most_window = max(self.most_window, self.send_window)
            elif number in self.streams:
                self.streams[number].window += size
        else:
            raise Violation(f"a frame of type {kind}")

    def _stream(self, number: int) -> Stream:
        if number not in self.streams:
            raise Violation(f"a frame on stream {number}, which does not exist")
        return self.streams[number]

    def _data(self, stream: Stream, payload: bytes, flags: int) -> None:
        if stream.ended or stream.reset is not None:
            raise Violation(f"DATA on stream {stream.number}, which has ended")
        if stream.headers is None:
            raise Violation(f"DATA on stream {stream.number} before HEADERS")
        if flags & END_STREAM:
            raise Violation(f"stream {stream.number} ends without trailers")
        self.credit -= len(payload)
        stream.credit -= len(payload)
        if self.credit < 0 or (stream.credit < 0 and self.acknowledged):
            raise Violation(f"stream {stream.number}: more DATA than the window")
        stream.data += payload

    def _end_block(self, flags: int) -> None:
        if not flags & END_HEADERS:
            return
        assert self._block is not None
        stream, last, block = self._block
        self._block = None
        fields = decoded(bytes(block))
        if stream.ended or stream.reset is not None:
            raise Violation(f"HEADERS on stream {stream.number}, which has ended")
        if stream.headers is None:
            stream.headers = fields
            if not last:
                self.begun.append(stream)
        elif not last:
            raise Violation(f"second HEADERS on stream {stream.number}")
        if last:
            stream.trailers = fields
            stream.ended = True
            self.finished.append(stream)

    def _settings(self, flags: int, payload: bytes) -> None:
        if flags & ACK:
            self.acknowledged = True
            return
        for at in range(0, len(payload), 6):
            key, value = struct.unpack_from(">HI", payload, at)
            self.told[key] = value
            if key == 4:
                for stream in self.streams.values():
                    stream.window += value - self.initial_window
                self.initial_window = value
            elif key == 5 and self.broad:
                self.largest = value
        self.out += frame(SETTINGS, ACK, 0, b"")
