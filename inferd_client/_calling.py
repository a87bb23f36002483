"""The common part of both clients' calls: headers, status, compression, retries."""

from __future__ import annotations

import base64
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from inferd_client._connecting import CONNECT_SECONDS, Target
from inferd_client._native.link import Call
from inferd_client._native.messages import Content, Message, framed
from inferd_client.utils import InferenceServerException, raise_error

STATUSES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, INTERNAL, UNAVAILABLE = (
    STATUSES.index(name) for name in ("DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "INTERNAL", "UNAVAILABLE")
)
Pieces = list[bytes | Content]
"""The pieces of a framed message, in the order of sending."""
SERVICE = "/inference.GRPCInferenceService/"
ENCODINGS = {"gzip": 31, "deflate": 15}
"""Compression algorithms of messages, and zlib's `wbits` for each."""
LEVELS = {"low": 1, "medium": 6, "high": 9}
"""Compression efforts, under the server's names, and zlib's level for each."""
TRANSPARENT = 3
"""The number of times that the client repeats a call that the server has not touched."""
LONGEST_DELAY = 3600
"""Seconds: the client ignores longer waits that a server requests."""
NOT_REPEATED = frozenset({"RepositoryModelLoad", "RepositoryModelUnload"})
"""RPCs that the client does not repeat if the server may have executed them."""


def error_of(status: int, text: str, details: bytes = b"") -> InferenceServerException:
    """The exception for a call's status."""
    return InferenceServerException(text, f"StatusCode.{STATUSES[status]}", _decoded(details) or None)


def failure(call: Call) -> InferenceServerException:
    """The exception for a call that ended without OK."""
    return error_of(*call.status(), call.details)


def too_late() -> InferenceServerException:
    """The error of a call whose deadline passed before the server's response."""
    return error_of(DEADLINE_EXCEEDED, "Deadline Exceeded")


class Failed:
    """The last attempt to connect to a server, if it failed.

    All calls that wait for a connection while an attempt fails share that failure. If each of many calls tried again,
    the last one would learn only after hours that a host drops packets.
    """

    __slots__ = ("_began", "_error", "_target")

    def __init__(self, target: Target) -> None:
        self._target = target
        self._began = 0.0
        self._error: OSError | None = None

    def note(self, began: float, error: OSError, timeout: float | None) -> InferenceServerException:
        """Record an attempt that failed. Returns the exception for the call that made it.

        Args:
            began: when the attempt began, in time.monotonic().
            error: its failure.
            timeout: seconds that the call had left at that time; None: it has no deadline.
        """
        if isinstance(error, TimeoutError) and timeout is not None and timeout <= CONNECT_SECONDS:
            return too_late()  # the deadline ended the attempt, so this says nothing about the server
        self._began, self._error = began, error
        return self._unreachable(error)

    def forget(self) -> None:
        """A connection was made."""
        self._error = None

    def check(self, since: float) -> None:
        """Let a call share the failure of an attempt, if the call has waited since before the attempt began.

        Args:
            since: when the call began to wait, in time.monotonic().

        Raises:
            InferenceServerException: the attempt's failure.
        """
        if self._error is not None and self._began >= since:
            raise self._unreachable(self._error)

    def _unreachable(self, error: OSError) -> InferenceServerException:
        text = error.strerror or str(error) or "timed out"
        return error_of(UNAVAILABLE, f"failed to connect to {self._target.text}: {text}")


def end_of(timeout: float | None) -> float | None:
    """The deadline `timeout` seconds from now, in time.monotonic(); None: no deadline."""
    return None if timeout is None else time.monotonic() + timeout


def left_of(ends: float | None) -> float | None:
    """Seconds until a deadline, 0 after it; None: no deadline."""
    return None if ends is None else max(ends - time.monotonic(), 0.0)


# ---- headers --------------------------------------------------------------------------------------------------------


class Headers:
    """The headers of calls to one server.

    Args:
        authority: of requests.
        secure: the connections use TLS.
        user_agent: the value of the header user-agent.
    """

    def __init__(self, authority: str, *, secure: bool, user_agent: str = "inferd-client") -> None:
        self._before = [(b":method", b"POST"), (b":scheme", b"https" if secure else b"http")]
        self._after = [
            (b":authority", authority.encode()),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"user-agent", user_agent.encode()),
            (b"grpc-accept-encoding", b"identity, deflate, gzip"),
        ]
        self._made: dict[str, list[tuple[bytes, bytes]]] = {}

    def of(self, method: str, metadata: Mapping[str, Any] | None, encoding: str = "") -> list[tuple[bytes, bytes]]:
        """The headers of a call of a method; calls may share the list."""
        found = self._made.get(method)
        if found is None:
            found = self._made[method] = [*self._before, (b":path", method.encode()), *self._after]
        if not metadata and not encoding:
            return found
        more = [(b"grpc-encoding", encoding.encode())] if encoding else []
        return [*found, *more, *_metadata(metadata or {})]


def _metadata(metadata: Mapping[str, Any]) -> Iterator[tuple[bytes, bytes]]:
    for key, value in metadata.items():
        name = str(key).lower()
        if not name or not all(letter.isascii() and (letter.isalnum() or letter in "-_.") for letter in name):
            raise_error(f"headers: {key!r} is no name of a header")
        content = value if isinstance(value, bytes) else str(value).encode()
        if name.endswith("-bin"):
            content = base64.b64encode(content).rstrip(b"=")
        elif not all(0x20 <= byte < 0x7F for byte in content):
            raise_error(f"headers: the value of {key!r} is not of printable ASCII characters")
        yield name.encode(), content


# ---- messages -------------------------------------------------------------------------------------------------------


class Packing(NamedTuple):
    """How the requests of a call are compressed.

    Attributes:
        encoding: "" for no compression.
        level: zlib's.
    """

    encoding: str
    level: int

    def packed(self, pieces: Pieces) -> Pieces:
        """A framed message, compressed where there is an encoding."""
        if not self.encoding:
            return pieces
        packer = zlib.compressobj(self.level, wbits=ENCODINGS[self.encoding])
        whole = b"".join(bytes(piece) for piece in pieces)
        message = packer.compress(memoryview(whole)[5:]) + packer.flush()
        return [b"\1" + framed(message)[1:]]


def level_of(name: str) -> int:
    """zlib's level for one of `LEVELS`.

    Raises:
        InferenceServerException: there is no such level.
    """
    if name not in LEVELS:
        raise_error(f"compression_level: expected {', '.join(LEVELS)}, got {name!r}")
    return LEVELS[name]


def packing_of(algorithm: str | None, level: int) -> Packing:
    """The compression of requests with this algorithm; None for no compression.

    Raises:
        InferenceServerException: there is no such algorithm.
    """
    if algorithm is None:
        return Packing("", level)
    if algorithm.lower() not in ENCODINGS:
        raise_error(f"compression_algorithm: expected gzip, deflate or None, got {algorithm!r}")
    return Packing(algorithm.lower(), level)


def plain(message: Message, encoding: str, limit: int) -> Any:
    """The bytes of a message that may be compressed: a buffer.

    Raises:
        InferenceServerException: the message cannot be decompressed, or exceeds `limit` then.
    """
    if not encoding:
        return message
    if encoding not in ENCODINGS:
        raise error_of(INTERNAL, f"the response is said to be compressed with {encoding!r}: expected gzip or deflate")
    opener = zlib.decompressobj(wbits=ENCODINGS[encoding])
    try:
        found = opener.decompress(memoryview(message), limit + 1)
    except zlib.error as error:
        raise error_of(INTERNAL, f"the response cannot be decompressed with {encoding}: {error}") from None
    if len(found) > limit:
        raise error_of(RESOURCE_EXHAUSTED, f"Received message larger than max (decompressed, vs. {limit})")
    if not opener.eof:
        raise error_of(INTERNAL, f"the response cannot be decompressed with {encoding}: its end is missing")
    return found


def response_of(call: Call, limit: int) -> Any | None:
    """The bytes of the only message of a call that has ended: a buffer. None if the call failed.

    Raises:
        InferenceServerException: the call ended with OK, but without exactly one message, or see `plain`.
    """
    if (response := call.response()) is not None:
        return response
    if call.status()[0] != 0:
        return None
    found = call.message()
    if found is None:
        raise error_of(INTERNAL, "the response is not one message")
    return plain(*found, limit)


# ---- retries --------------------------------------------------------------------------------------------------------


class RetryOptions(NamedTuple):
    """The rules by which the client repeats a call that has failed, or that got no connection.

    The client waits as long as the server requests (google.rpc.RetryInfo, at most an hour). If the server requests no
    time, the pause grows from attempt to attempt, with a random part. The client never repeats a call whose deadline
    has passed, or would pass during the pause. Even without these options, it repeats calls that the server has not
    touched: the connection ended before, or the server said so. It does not restart streams.

    If the connection is lost before the server sends a status, the server may have executed the call, and would execute
    a repeated call twice. The client then does not repeat requests of sequences, nor loads and unloads of models.

    Attributes:
        attempts: how many attempts at most, the first included.
        initial_backoff: seconds of the pause after the first attempt.
        max_backoff: seconds of a pause at most.
        statuses: names of the statuses after which the client repeats a call.
    """

    attempts: int = 3
    initial_backoff: float = 0.1
    max_backoff: float = 5.0
    statuses: tuple[str, ...] = ("UNAVAILABLE", "RESOURCE_EXHAUSTED")

    def pause(self, tried: int, error: InferenceServerException) -> float | None:
        """Seconds until the next attempt after `tried` attempts; None: there is none."""
        if tried >= self.attempts or str(error.status()).removeprefix("StatusCode.") not in self.statuses:
            return None
        requested = retry_delay(error.debug_details() or b"")
        if requested is not None:
            return requested
        from random import uniform

        pause = min(self.initial_backoff * 2.0 ** min(tried - 1, 100), self.max_backoff) * uniform(0.8, 1.2)
        return float(max(pause, 0.0))


class Attempts:
    """The failed attempts at one call; decides when the next one is made.

    Args:
        retries: None: only calls that the server has not touched are repeated.
        ends: the call's deadline, in time.monotonic(); None: no deadline.
        once: make no further attempt after one that the server may have executed.
    """

    __slots__ = ("_ends", "_once", "_repeated", "_retries", "_tried")

    def __init__(self, retries: RetryOptions | None, ends: float | None, once: bool = False) -> None:
        self._retries = retries
        self._ends = ends
        self._once = once
        self._tried = self._repeated = 0

    def pause(self, error: InferenceServerException, safe: bool = False, answered: bool | None = None) -> float | None:
        """Seconds until the next attempt; None: there is none.

        Args:
            error: the failure of the last attempt.
            safe: whether the server has not touched that attempt.
            answered: whether the server has sent a status; None: the attempt got no connection.
        """
        if safe and self._repeated < TRANSPARENT:
            self._repeated += 1
            return 0.0
        if self._once and not safe and answered is False:
            return None
        self._tried += 1
        pause = self._retries.pause(self._tried, error) if self._retries is not None else None
        if pause is None or (self._ends is not None and time.monotonic() + pause >= self._ends):
            return None
        return pause


def _decoded(details: bytes) -> bytes:
    try:
        return base64.b64decode(details + b"=" * (-len(details) % 4)) if details else b""
    except ValueError:
        return b""


def fields_of(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message, up to the first malformed one: pairs of the number, and an int or bytes."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    try:
        while at < len(data):
            tag = number()
            if tag & 7 == 0:
                yield tag >> 3, number()
            elif tag & 7 == 2:
                size = number()
                yield tag >> 3, data[at : at + size]
                at += size
            else:
                at += 8 if tag & 7 == 1 else 4
    except IndexError:
        return


def retry_delay(status: bytes) -> float | None:
    """The pause in seconds that a google.rpc.Status asks for; None without one from 0 to LONGEST_DELAY."""
    for number, detail in fields_of(status):
        if number != 3 or not isinstance(detail, bytes):
            continue
        any_of = dict(fields_of(detail))
        if isinstance(any_of.get(1), bytes) and any_of[1].endswith(b"google.rpc.RetryInfo"):
            info = any_of.get(2, b"")
            return _delay(dict(fields_of(info)).get(1, b"")) if isinstance(info, bytes) else None
    return None


def _delay(duration: Any) -> float | None:
    """Seconds of a google.protobuf.Duration; None if malformed, or not from 0 to LONGEST_DELAY."""
    if not isinstance(duration, bytes):
        return None
    parts = dict(fields_of(duration))
    seconds, nanoseconds = parts.get(1, 0), parts.get(2, 0)
    if not isinstance(seconds, int) or not isinstance(nanoseconds, int):
        return None
    # a negative number was read as a huge one
    if seconds > LONGEST_DELAY or nanoseconds >= 10**9 or seconds * 10**9 + nanoseconds > LONGEST_DELAY * 10**9:
        return None
    return seconds + nanoseconds / 1e9
