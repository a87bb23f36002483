"""HTTP/2 frame sequences that a peer should not send, or that it may although few do, and what must come of each.

After the sections of RFC 9113 and RFC 7541, as far as they are about frames and not about HTTP semantics. A case is
what a client sends after its preface and SETTINGS; the outcome is one of:

    ("alive",)             a PING behind the case is answered, and no stream is reset
    ("reset", CODE, ...)   RST_STREAM with one of these codes; the connection lives
    ("goaway", CODE, ...)  GOAWAY with one of these codes, then the end
    ("closed",)            the end, with or without GOAWAY

A stream error may be treated as a connection error (RFC 9113 section 5.4.1), so "reset" is satisfied by "goaway" too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from hpack import Encoder
from hyperframe.frame import Frame, GoAwayFrame, PingFrame, RstStreamFrame

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 1, 1, 4, 8, 32
NO_ERROR, PROTOCOL, INTERNAL, FLOW, SETTINGS_TIMEOUT, CLOSED, FRAME_SIZE, REFUSED, CANCEL, COMPRESSION = range(10)
CALM = 11
MARK = b"the mark"
LARGEST_FRAME = 256 << 10  # what the server announces
PATH = "/test.Nothing/Nothing"  # UNIMPLEMENTED on every server


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """A frame as it stands on the wire; nothing is checked."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def block(without: tuple[str, ...] = (), extra: tuple[tuple[str, str], ...] = (), **replaced: str) -> bytes:
    """The header block of a call, without reference to any state."""
    fields = {":method": "POST", ":scheme": "http", ":path": PATH, ":authority": "test"}
    fields |= {"content-type": "application/grpc", "te": "trailers"}
    fields |= {name.replace("pseudo_", ":"): value for name, value in replaced.items()}
    items = [(name, value) for name, value in fields.items() if name not in without]
    return literals((*items, *extra))


def literals(fields: tuple[tuple[str, str], ...]) -> bytes:
    """Literal header fields that are never indexed, so that order and case stay as given."""
    out = bytearray()
    for name, value in fields:
        out += b"\x10" + length(len(name)) + name.encode() + length(len(value)) + value.encode()
    return bytes(out)


def length(size: int) -> bytes:
    """An HPACK integer with a prefix of 7 bits, no Huffman code."""
    if size < 127:
        return bytes([size])
    out, size = bytearray([127]), size - 127
    while size >= 128:
        out.append(size & 127 | 128)
        size >>= 7
    return bytes([*out, size])


def headers(stream: int = 1, flags: int = END_HEADERS, payload: bytes | None = None) -> bytes:
    return frame(HEADERS, flags, stream, block() if payload is None else payload)


def settings(*pairs: tuple[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *pair) for pair in pairs))


def window(stream: int, increment: int) -> bytes:
    return frame(WINDOW, 0, stream, struct.pack(">I", increment))


def reset(stream: int, code: int = CANCEL) -> bytes:
    return frame(RST, 0, stream, struct.pack(">I", code))


def priority(stream: int, depends_on: int = 0) -> bytes:
    return frame(PRIORITY, 0, stream, struct.pack(">IB", depends_on, 15))


def goaway(code: int = 0, stream: int = 0) -> bytes:
    return frame(GOAWAY, 0, stream, struct.pack(">II", 0, code))


@dataclass(frozen=True)
class Case:
    name: str
    sent: bytes
    outcome: tuple
    greeting: bytes = PREFACE + settings()


OPEN = headers()
ENDED = headers(flags=END_HEADERS | END_STREAM)
HALF = headers(flags=0)  # a block that is not complete
ALIVE = ("alive",)
CLOSE = ("closed",)


def goes(*codes: int) -> tuple:
    return ("goaway", *codes)


def resets(*codes: int) -> tuple:
    return ("reset", *codes)


def malformed(name: str, payload: bytes) -> Case:
    return Case(f"8 {name}", headers(payload=payload), resets(PROTOCOL))


def compressed(name: str, payload: bytes) -> Case:
    return Case(f"hpack {name}", headers(payload=payload), goes(COMPRESSION, PROTOCOL))


def cases() -> list[Case]:
    """All of them."""
    return [
        # -- 3.4 the preface --
        Case("3.4 wrong preface", b"INVALID CONNECTION PREFACE\r\n\r\n", CLOSE, b""),
        Case("3.4 HTTP/1.1", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", CLOSE, b""),
        Case("3.4 TLS hello", bytes.fromhex("16030100c8010000c40303") + bytes(200), CLOSE, b""),
        Case("3.4 no SETTINGS behind the preface", frame(PING, 0, 0, MARK), goes(PROTOCOL), PREFACE),
        Case("3.4 HEADERS behind the preface", ENDED, goes(PROTOCOL), PREFACE),
        Case("3.4 SETTINGS ACK behind the preface", frame(SETTINGS, ACK), goes(PROTOCOL), PREFACE),
        Case("3.4 the preface twice", PREFACE, ("closed",)),
        # -- 4 frames --
        Case("4.1 unknown type", frame(0xFF, 0xFF, 0, b"x" * 100), ALIVE),
        Case("4.1 unknown type on a stream", OPEN + frame(0x16, 0, 1, b"x"), ALIVE),
        Case("4.1 undefined flags", frame(PING, 0xFE, 0, b"x" * 8), ALIVE),
        Case("4.1 reserved bit", frame(PING, 0, 1 << 31, b"x" * 8), ALIVE),
        Case("4.2 DATA of 2^14", OPEN + frame(DATA, 0, 1, b"\0\0\0\x3f\xfb" + bytes((1 << 14) - 5)), ALIVE),
        Case("4.2 DATA too large", OPEN + frame(DATA, 0, 1, bytes(LARGEST_FRAME + 1)), resets(FRAME_SIZE)),
        Case("4.2 HEADERS too large", headers(payload=bytes(LARGEST_FRAME + 1)), goes(FRAME_SIZE)),
        Case("4.2 PING too large", frame(PING, 0, 0, bytes(LARGEST_FRAME + 1)), goes(FRAME_SIZE)),
        Case("4.2 unknown type too large", frame(0x42, 0, 0, bytes(LARGEST_FRAME + 1)), goes(FRAME_SIZE)),
        Case("4.3 broken block", headers(payload=b"\xff" * 20), goes(COMPRESSION)),
        Case("4.3 PRIORITY inside of a block", HALF + priority(1), goes(PROTOCOL)),
        Case("4.3 PING inside of a block", HALF + frame(PING, 0, 0, MARK), goes(PROTOCOL)),
        Case("4.3 SETTINGS inside of a block", HALF + settings(), goes(PROTOCOL)),
        Case("4.3 WINDOW_UPDATE inside of a block", HALF + window(0, 1), goes(PROTOCOL)),
        Case("4.3 DATA inside of a block", HALF + frame(DATA, 0, 1, b"x"), goes(PROTOCOL)),
        Case("4.3 RST_STREAM inside of a block", HALF + reset(1), goes(PROTOCOL)),
        Case("4.3 GOAWAY inside of a block", HALF + goaway(), goes(PROTOCOL)),
        Case("4.3 unknown type inside of a block", HALF + frame(0x42), goes(PROTOCOL)),
        Case("4.3 HEADERS of another stream inside of a block", HALF + headers(3), goes(PROTOCOL)),
        # -- 5.1 states of streams --
        Case("5.1 idle: DATA", frame(DATA, END_STREAM, 1, b"x"), goes(PROTOCOL, CLOSED)),
        Case("5.1 idle: RST_STREAM", reset(1), goes(PROTOCOL)),
        Case("5.1 idle: WINDOW_UPDATE", window(1, 100), goes(PROTOCOL)),
        Case("5.1 idle: CONTINUATION", frame(CONTINUATION, END_HEADERS, 1, block()), goes(PROTOCOL)),
        Case("5.1 half-closed: DATA", ENDED + frame(DATA, END_STREAM, 1, b"x"), resets(CLOSED)),
        Case("5.1 half-closed: HEADERS", ENDED + ENDED, resets(CLOSED, PROTOCOL)),
        Case("5.1 half-closed: CONTINUATION", ENDED + frame(CONTINUATION, END_HEADERS, 1, b""), goes(PROTOCOL)),
        Case("5.1 half-closed: WINDOW_UPDATE", ENDED + window(1, 1), ALIVE),
        Case("5.1 half-closed: PRIORITY", ENDED + priority(1), ALIVE),
        Case("5.1 half-closed: RST_STREAM", ENDED + reset(1), ALIVE),
        Case("5.1 reset: DATA", OPEN + reset(1) + frame(DATA, 0, 1, b"x"), (*ALIVE, CLOSED)),
        Case("5.1 reset: HEADERS", OPEN + reset(1) + headers(1), resets(CLOSED)),
        Case("5.1 reset: CONTINUATION", OPEN + reset(1) + frame(CONTINUATION, 4, 1, b""), goes(PROTOCOL, CLOSED)),
        Case("5.1 reset: RST_STREAM", OPEN + reset(1) + reset(1), ALIVE),
        Case("5.1 reset: WINDOW_UPDATE", OPEN + reset(1) + window(1, 1), ALIVE),
        Case("5.1 reset: PRIORITY", OPEN + reset(1) + priority(1), ALIVE),
        Case("5.1.1 even stream", headers(2), goes(PROTOCOL)),
        Case("5.1.1 descending streams", headers(5) + headers(3), (*ALIVE, PROTOCOL, CLOSED)),
        Case("5.1.1 the last stream, then a new one", headers(2**31 - 1) + headers(1), (*ALIVE, PROTOCOL, CLOSED)),
        # -- 5.3 priorities --
        Case(
            "5.3 HEADERS depend on themselves", headers(1, 4 | 32, struct.pack(">IB", 1, 9) + block()), resets(PROTOCOL)
        ),
        Case("5.3 PRIORITY depends on itself", priority(1, 1), (*ALIVE, PROTOCOL)),
        Case("5.3 PRIORITY of an idle stream", priority(101), ALIVE),
        Case("5.3 HEADERS with priority", headers(1, 4 | 32, struct.pack(">IB", 3, 9) + block()), ALIVE),
        Case("5.3 HEADERS too short for a priority", headers(1, 4 | 32, b"abc"), goes(FRAME_SIZE, PROTOCOL)),
        # -- 6.1 DATA --
        Case("6.1 DATA on the connection", frame(DATA, 0, 0, b"x"), goes(PROTOCOL)),
        Case("6.1 padding longer than the frame", OPEN + frame(DATA, PADDED, 1, b"\x06abcd"), goes(PROTOCOL)),
        Case(
            "6.1 no room for the length of the padding", OPEN + frame(DATA, PADDED, 1, b""), goes(FRAME_SIZE, PROTOCOL)
        ),
        Case("6.1 nothing but padding", OPEN + frame(DATA, PADDED, 1, b"\x03abc"), ALIVE),
        # -- 6.2 HEADERS --
        Case("6.2 HEADERS on the connection", headers(0), goes(PROTOCOL)),
        Case("6.2 padding longer than the frame", headers(1, 4 | PADDED, b"\xff" + block()[:9]), goes(PROTOCOL)),
        Case("6.2 no room for the length of the padding", headers(1, 4 | PADDED, b""), goes(FRAME_SIZE, PROTOCOL)),
        Case("6.2 padded", headers(1, 4 | PADDED, b"\x03" + block() + b"abc"), ALIVE),
        # -- 6.3 PRIORITY --
        Case("6.3 PRIORITY on the connection", priority(0), goes(PROTOCOL)),
        Case("6.3 PRIORITY of four bytes", OPEN + frame(PRIORITY, 0, 1, bytes(4)), resets(FRAME_SIZE)),
        # -- 6.4 RST_STREAM --
        Case("6.4 RST_STREAM on the connection", reset(0), goes(PROTOCOL)),
        Case("6.4 RST_STREAM of three bytes", OPEN + frame(RST, 0, 1, bytes(3)), goes(FRAME_SIZE)),
        Case("6.4 unknown code", OPEN + reset(1, 0xFF), ALIVE),
        # -- 6.5 SETTINGS --
        Case("6.5 ACK with settings", frame(SETTINGS, ACK, 0, bytes(6)), goes(FRAME_SIZE)),
        Case("6.5 ACK that nobody asked for", frame(SETTINGS, ACK) * 2, (*ALIVE, PROTOCOL)),
        Case("6.5 on a stream", frame(SETTINGS, 0, 1), goes(PROTOCOL)),
        Case("6.5 of five bytes", frame(SETTINGS, 0, 0, bytes(5)), goes(FRAME_SIZE)),
        Case("6.5.2 ENABLE_PUSH 2", settings((2, 2)), goes(PROTOCOL)),
        Case("6.5.2 INITIAL_WINDOW_SIZE 2^31", settings((4, 1 << 31)), goes(FLOW)),
        Case("6.5.2 MAX_FRAME_SIZE 2^14 - 1", settings((5, (1 << 14) - 1)), goes(PROTOCOL)),
        Case("6.5.2 MAX_FRAME_SIZE 2^24", settings((5, 1 << 24)), goes(PROTOCOL)),
        Case("6.5.2 unknown setting", settings((0xFF, 1)), ALIVE),
        Case("6.5.2 one setting many times", settings(*[(4, n) for n in range(30)]), ALIVE),
        Case("6.5.2 a thousand settings", settings(*[(4, n) for n in range(1000)]), goes(CALM)),
        Case("6.5.2 HEADER_TABLE_SIZE 0 and 2^32 - 1", settings((1, 0)) + settings((1, 2**32 - 1)), ALIVE),
        Case("6.5.2 MAX_HEADER_LIST_SIZE 0", settings((6, 0)), ALIVE),
        # -- 6.6 PUSH_PROMISE --
        Case("6.6 PUSH_PROMISE of a client", OPEN + frame(PUSH, 4, 1, bytes([0, 0, 0, 2]) + block()), goes(PROTOCOL)),
        # -- 6.7 PING --
        Case("6.7 on a stream", frame(PING, 0, 1, bytes(8)), goes(PROTOCOL)),
        Case("6.7 of seven bytes", frame(PING, 0, 0, bytes(7)), goes(FRAME_SIZE)),
        Case("6.7 ACK that nobody asked for", frame(PING, ACK, 0, bytes(8)), ALIVE),
        # -- 6.8 GOAWAY --
        Case("6.8 on a stream", goaway(stream=1), goes(PROTOCOL)),
        Case("6.8 of seven bytes", frame(GOAWAY, 0, 0, bytes(7)), goes(FRAME_SIZE)),
        Case("6.8 unknown code", OPEN + goaway(0xFF), ("alive or closed",)),
        # -- 6.9 WINDOW_UPDATE --
        Case("6.9 0 on the connection", window(0, 0), goes(PROTOCOL)),
        Case("6.9 0 on a stream", OPEN + window(1, 0), resets(PROTOCOL)),
        Case("6.9 of three bytes", frame(WINDOW, 0, 0, bytes(3)), goes(FRAME_SIZE)),
        Case("6.9.1 connection above 2^31 - 1", window(0, 2**31 - 1), goes(FLOW)),
        Case("6.9.1 stream above 2^31 - 1", OPEN + window(1, 2**31 - 1), resets(FLOW)),
        Case(
            "6.9.2 settings lift a stream above 2^31 - 1",
            OPEN + window(1, 2**31 - 1 - 65535) + settings((4, 65536)),
            resets(FLOW),
        ),
        Case("6.9.2 a window below zero", OPEN + settings((4, 0)), ALIVE),
        # -- 6.10 CONTINUATION --
        Case(
            "6.10 a block in three parts",
            headers(1, 0, block()[:5])
            + frame(CONTINUATION, 0, 1, block()[5:30])
            + frame(CONTINUATION, END_HEADERS, 1, block()[30:]),
            ALIVE,
        ),
        Case("6.10 on the connection", HALF + frame(CONTINUATION, 4, 0, b""), goes(PROTOCOL)),
        Case("6.10 on another stream", HALF + frame(CONTINUATION, 4, 3, b""), goes(PROTOCOL)),
        Case("6.10 behind a complete block", OPEN + frame(CONTINUATION, 4, 1, b""), goes(PROTOCOL)),
        Case("6.10 behind DATA", OPEN + frame(DATA, 0, 1, b"x") + frame(CONTINUATION, 4, 1, b""), goes(PROTOCOL)),
        Case("6.10 eighty empty ones", HALF + frame(CONTINUATION, 0, 1, b"") * 80, CLOSE),
        # -- 8 malformed requests --
        malformed("upper case", block(extra=(("X-Upper", "1"),))),
        malformed("unknown pseudo-header", block(extra=((":unknown", "1"),))),
        malformed("pseudo-header of responses", block(extra=((":status", "200"),))),
        malformed("pseudo-header behind another", block((":path",), extra=((":path", "/"),))),
        malformed("connection", block(extra=(("connection", "close"),))),
        malformed("transfer-encoding", block(extra=(("transfer-encoding", "chunked"),))),
        malformed("te: gzip", block(("te",), extra=(("te", "gzip"),))),
        malformed("no :method", block((":method",))),
        malformed("no :scheme", block((":scheme",))),
        malformed("no :path", block((":path",))),
        malformed("empty :path", block(pseudo_path="")),
        malformed(":method twice", literals(((":method", "POST"),)) + block()),
        malformed(":path twice", literals(((":path", "/"),)) + block()),
        malformed("newline in a value", block(extra=(("x", "a\nb"),))),
        malformed("NUL in a value", block(extra=(("x", "a\0b"),))),
        malformed("empty name", block(extra=(("", "1"),))),
        malformed("space in a name", block(extra=(("a b", "1"),))),
        Case(
            "8 content-length larger than the DATA",
            headers(payload=block(extra=(("content-length", "9"),))) + frame(DATA, 1, 1, b"\0\0\0\0\0"),
            resets(PROTOCOL),
        ),
        Case("8 trailers without END_STREAM", OPEN + headers(1, 4, literals((("x", "y"),))), resets(PROTOCOL)),
        Case("8 pseudo-header in trailers", OPEN + headers(1, 5, literals(((":path", "/"),))), resets(PROTOCOL)),
        # -- RFC 7541 --
        compressed("index 0", b"\x80"),
        compressed("index beyond the tables", b"\xfe"),
        compressed("integer without an end", b"\xff" + b"\xff" * 12),
        compressed("string longer than the block", b"\x00\x7f\xff\x7f"),
        compressed("table size above the setting", b"\x3f\xe1\x7f" + block()),
        compressed("table size behind a field", block() + b"\x20"),
        compressed("Huffman padding of more than 7 bits", block() + b"\x00\x81\x87\x84\xff\xff\xff\xff"),
        compressed("Huffman EOS", block() + b"\x00\x84\xff\xff\xff\xff\x01x"),
        Case("hpack table size 0, then back", headers(payload=b"\x20\x3f\xe1\x1f" + block()), ALIVE),
        Case("hpack bomb", headers(payload=bomb(4000, 10_000)), goes(CALM)),
        Case("hpack bomb in trailers", OPEN + headers(1, 5, bomb(4000, 10_000)[len(block()) :]), goes(CALM)),
    ]


def bomb(size: int, count: int) -> bytes:
    """A block of a few bytes for each field of `size` bytes: one entry of the table, referred to again and again."""
    entry = b"\x40" + length(1) + b"x" + length(size) + b"y" * size
    return block() + entry + b"\xbe" * count


def encoded(fields: list[tuple[str, str]]) -> bytes:
    """A header block as a well-behaved client writes it."""
    return Encoder().encode(fields)


def frames(data: bytes) -> list[Frame]:
    """The frames that a server sent; none when it has answered in HTTP/1."""
    found, at = [], 0
    if data.startswith(b"HTTP/1.1 "):
        return found
    while at + 9 <= len(data):
        parsed, size = Frame.parse_frame_header(memoryview(data)[at : at + 9])
        assert at + 9 + size <= len(data), "the last frame is not complete"
        parsed.parse_body(memoryview(data)[at + 9 : at + 9 + size])
        found.append(parsed)
        at += 9 + size
    return found


@dataclass
class Seen:
    """How a server reacted to a case."""

    frames: list[Frame]
    closed: bool

    @property
    def goaway(self) -> int | None:
        return next((f.error_code for f in reversed(self.frames) if isinstance(f, GoAwayFrame)), None)

    @property
    def resets(self) -> list[int]:
        return [f.error_code for f in self.frames if isinstance(f, RstStreamFrame) and f.error_code != NO_ERROR]

    @property
    def answered(self) -> bool:
        return any(isinstance(f, PingFrame) and "ACK" in f.flags and f.opaque_data == MARK for f in self.frames)

    def __str__(self) -> str:
        return f"goaway={self.goaway} resets={self.resets} answered={self.answered} closed={self.closed}"

    def judge(self, case: Case) -> None:
        """Fails unless the outcome is the case's."""
        kind, *codes = case.outcome
        what = f"{case.name}: expected {case.outcome}, got {self}"
        if kind == "closed":
            assert self.closed, what
        elif kind == "alive or closed":
            assert self.closed or self.answered, what
        elif self.goaway not in (None, NO_ERROR):
            assert kind in ("goaway", "reset") or codes, what
            assert self.goaway in codes, what
            assert self.closed, what
        else:
            assert kind != "goaway", what
            assert self.answered and not self.closed, what
            assert all(code in codes for code in self.resets), what
            assert kind != "reset" or self.resets, what


Exchange = Callable[[bytes], Seen]


def run(case: Case, exchange: Exchange) -> None:
    """Send a case and judge; `exchange` sends bytes and says what came until the server fell silent."""
    exchange(case.greeting + case.sent + frame(PING, 0, 0, MARK)).judge(case)
