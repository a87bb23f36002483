"""The listener for metrics: HTTP/1.1, GET only, for /metrics.

No scraper can cost much. At most `MOST` are connected. When one more connects, a connection that has sent no request is
closed: the oldest one of the address that has most of these. A scraper has `ASK_SECONDS` to send a request and
`READ_SECONDS` to read the page, and a request has at most `LONGEST` bytes. Scrapers that come while a page is rendered
share it. The page is passed to the socket in small pieces, as fast as the scraper reads them.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from inferd.server.addresses import Address, TcpAddress, UnixAddress
from inferd.server.front.listeners import ListenPolicy, UnixFile, open_tcp, open_unix, try_to_listen
from inferd.server.observe.metrics.text import OPENMETRICS, PROMETHEUS

log = logging.getLogger("inferd.metrics")

MOST = 32
"""Connections at a time."""

LONGEST = 8192
"""Bytes of a request."""

ASK_SECONDS = 5.0
READ_SECONDS = 30.0

PIECE = 64 << 10
"""Bytes written to a socket at once."""

PATH = "/metrics"

POLICY = ListenPolicy()


@dataclass(frozen=True, slots=True)
class ScrapeRequest:
    """The method, path and headers of a request."""

    method: str
    path: str
    headers: Mapping[str, str]  # by name in lower case

    @property
    def openmetrics(self) -> bool:
        """Whether the scraper prefers OpenMetrics to the text format."""
        return _quality(self.headers.get("accept", ""), "application/openmetrics-text") > max(
            _quality(self.headers.get("accept", ""), "text/plain") - 1e-9, 0
        )

    @property
    def accepts_gzip(self) -> bool:
        return _quality(self.headers.get("accept-encoding", ""), "gzip") > 0


class BadRequestError(ValueError):
    """The bytes are not HTTP; the text has the reason."""


def parse_request(head: bytes) -> ScrapeRequest:
    """Parse a request from its first line to the empty line after its headers.

    Raises:
        BadRequestError: the bytes are no such request.
    """
    lines = head.decode("latin-1").split("\r\n")
    parts = lines[0].split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1.") or not parts[0].isalpha() or not parts[1].startswith("/"):
        raise BadRequestError("expected METHOD /PATH HTTP/1.1")
    headers: dict[str, str] = {}
    for line in filter(None, lines[1:]):
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise BadRequestError("expected NAME: VALUE in each header")
        name = name.lower()
        headers[name] = f"{headers[name]},{value.strip()}" if name in headers else value.strip()
    return ScrapeRequest(parts[0].upper(), parts[1].partition("?")[0], headers)


def _quality(accept: str, kind: str) -> float:
    """The weight of this kind in a header such as Accept; 0: not wanted."""
    for entry in accept.split(","):
        name, *parameters = (part.strip() for part in entry.split(";"))
        if name.lower() != kind:
            continue
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip().lower() == "q":
                try:
                    return max(0.0, min(1.0, float(value)))
                except ValueError:
                    return 0.0
        return 1.0
    return 0.0


Render = Callable[[bool, bool], Awaitable[list[bytes]]]
"""Makes the page in pieces. Arguments: whether it is in OpenMetrics, and whether it is compressed with gzip."""


class ScrapeListener:
    """Serves the page.

    Args:
        render: makes it.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._servers: list[asyncio.Server] = []
        self._file: UnixFile | None = None
        self._open = 0
        self._waiting: dict[asyncio.WriteTransport, str] = {}  # connections without a request, and their addresses

    async def start(self, address: Address) -> str:
        """Listen; return the address as text, with the port that port 0 became.

        Raises:
            OSError: it cannot listen there; the text names the address.
        """
        try:
            if isinstance(address, UnixAddress):
                opened, self._file = open_unix(address, POLICY)
                self._servers.append(await asyncio.start_unix_server(self._serve, sock=opened, limit=LONGEST))
                return f"unix://{address.path}"
            sockets = open_tcp(address)
            port = sockets[0].getsockname()[1]
            for each in sockets:
                self._servers.append(await asyncio.start_server(self._serve, sock=each, limit=LONGEST))
        except OSError as error:
            raise _explained(address, error) from error
        return f"http://{TcpAddress(address.host, port)}{PATH}"

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        self.remove_file()

    def remove_file(self) -> None:
        """Remove the file of a unix socket, unless another server has replaced it."""
        if self._file is not None:
            self._file.remove()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._open >= MOST and not self._make_room():
            writer.transport.abort()
            return
        self._open += 1
        self._waiting[writer.transport] = str((writer.get_extra_info("peername") or ("",))[0])
        try:
            await self._respond(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the scraper has left, or is too slow
        except asyncio.CancelledError:
            pass  # the server ends: asyncio would log the cancelled task of a connection
        except Exception:
            log.exception("metrics could not be rendered")
        finally:
            self._open -= 1
            self._waiting.pop(writer.transport, None)
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    def _make_room(self) -> bool:
        """Close a connection that has sent no request yet. False: there is none."""
        if not self._waiting:
            return False
        most = Counter(self._waiting.values())
        yielding = max(self._waiting, key=lambda transport: most[self._waiting[transport]])  # the first of these
        del self._waiting[yielding]
        yielding.abort()
        return True

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ASK_SECONDS):
                request = parse_request(await reader.readuntil(b"\r\n\r\n"))
            self._waiting.pop(writer.transport, None)
        except asyncio.LimitOverrunError:
            await _send(writer, "431 Request Header Fields Too Large")
            return
        except BadRequestError as error:
            await _send(writer, "400 Bad Request", f"{error}\n".encode())
            return
        if request.method not in ("GET", "HEAD"):
            await _send(writer, "405 Method Not Allowed", extra="Allow: GET, HEAD\r\n")
        elif request.path != PATH:
            await _send(writer, "404 Not Found", f"metrics are at {PATH}\n".encode())
        else:
            await self._send_page(writer, request)

    async def _send_page(self, writer: asyncio.StreamWriter, request: ScrapeRequest) -> None:
        pieces = await self._render(request.openmetrics, request.accepts_gzip)
        extra = "Content-Encoding: gzip\r\n" if request.accepts_gzip else ""
        extra += "Vary: Accept, Accept-Encoding\r\n"
        kind = OPENMETRICS if request.openmetrics else PROMETHEUS
        body = pieces if request.method == "GET" else []
        await _send(writer, "200 OK", *body, kind=kind, extra=extra, size=sum(map(len, pieces)))


def try_to_serve(address: Address) -> None:
    """Open the sockets of the address and close them again, so that a wrong address is told before models are loaded.

    Raises:
        OSError: a socket cannot be opened; the text names the address.
    """
    try:
        try_to_listen(address, POLICY)
    except OSError as error:
        raise _explained(address, error) from error


def _explained(address: Address, error: OSError) -> OSError:
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    in_use = cause.errno == errno.EADDRINUSE  # its text may name options of gRPC's addresses
    text = os.strerror(errno.EADDRINUSE) if in_use else cause.strerror or str(cause)
    return OSError(
        f"metrics cannot be served at {address}: {text}; choose another with --metrics-address or "
        "--metrics-port, or serve none with --allow-metrics=false"
    )


async def _send(
    writer: asyncio.StreamWriter,
    status: str,
    *body: bytes,
    kind: str = "text/plain; charset=utf-8",
    extra: str = "",
    size: int | None = None,
) -> None:
    """Send a response, and return when the socket has accepted all of it."""
    length = sum(map(len, body)) if size is None else size
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n{extra}Connection: close\r\n\r\n"
    async with asyncio.timeout(READ_SECONDS):
        writer.write(head.encode())
        for piece in body:
            view = memoryview(piece)
            for start in range(0, len(view), PIECE):
                writer.write(view[start : start + PIECE])
                await writer.drain()
        writer.transport.set_write_buffer_limits(0)  # `drain` then waits for all of it
        await writer.drain()
