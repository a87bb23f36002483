"""Addresses of servers, and connections to them: TCP or unix sockets, with TLS or without."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from inferd_client._native.link import Link

if TYPE_CHECKING:
    import ssl

    from inferd_client._native.tls import Tls

CONNECT_SECONDS = 20.0
"""Seconds that making a connection may take; the deadline of a call can shorten them."""

UNIX_BUFFER = 1 << 20  # bytes of the kernel's buffer; TCP's grows by itself


class Target(NamedTuple):
    """A server.

    Attributes:
        host: its name or address; empty for a unix socket.
        port: its TCP port.
        path: of its unix socket; begins with a NUL for an abstract one.
        authority: the header :authority of requests.
        more: further hosts and ports of the same server.
    """

    host: str = ""
    port: int = 0
    path: str = ""
    authority: str = ""
    more: tuple[tuple[str, int], ...] = ()

    @property
    def all(self) -> list[tuple[str, int]]:
        """All hosts and ports."""
        return [(self.host, self.port), *self.more]

    @property
    def text(self) -> str:
        """The address, for messages."""
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def target_of(url: str) -> Target:
    """The server of an address: HOST:PORT, unix:PATH, unix:///PATH, and gRPC's dns:, ipv4:A:PORT,B:PORT and ipv6:.

    Raises:
        ValueError: the address has another form.
    """
    if url.startswith(("unix:", "unix-abstract:")):
        kind, _, path = url.partition(":")
        if path.startswith("//"):
            path = path[2:]
        if not path:
            raise ValueError(f"{url!r}: expected unix:PATH")
        return Target(path=f"\0{path}" if kind == "unix-abstract" else path, authority="localhost")
    rest = url
    if url.startswith(("ipv4:", "ipv6:")) and "," in url:
        first, *others = (target_of(url[:5] + each) for each in url[5:].split(","))
        return first._replace(more=tuple((each.host, each.port) for each in others))
    for scheme in ("dns:///", "dns:", "ipv4:", "ipv6:", "grpc://", "grpcs://"):
        rest = rest.removeprefix(scheme)
    host, colon, port = rest.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535 or "/" in host or not host:
        raise ValueError(f"{url!r}: expected HOST:PORT or unix:PATH")
    host = host.strip("[]")
    try:
        host.encode("idna")  # as getaddrinfo does
    except UnicodeError:
        raise ValueError(f"{url!r}: expected a HOST whose parts between dots have 1 to 63 characters") from None
    return Target(host, int(port), authority=rest)


class Options:
    """The options of links.

    Args:
        context: of TLS; None: plain text.
        server_name: the name that the certificate must have; empty: that of the host.
        keepalive: seconds until a PING, seconds to wait for its answer, and whether idle links send PINGs; None: no
            PINGs.
        limit: bytes of the largest message that is received.
        busy_poll: seconds for which a thread that waits for a response polls before it sleeps.
    """

    __slots__ = ("busy_poll", "context", "keepalive", "limit", "server_name")

    def __init__(
        self,
        context: ssl.SSLContext | None = None,
        server_name: str = "",
        keepalive: tuple[float, float, bool] | None = None,
        limit: int = (1 << 31) - 1,
        busy_poll: float = 0.0,
    ) -> None:
        self.busy_poll = busy_poll
        self.context = context
        self.server_name = server_name
        self.keepalive = keepalive
        self.limit = limit


def tls_context(root: str | None, key: str | None, chain: str | None) -> ssl.SSLContext:
    """A TLS context of PEM files: trusted roots (None: the system's), and this client's key and certificate chain.

    Raises:
        OSError: a file cannot be read, or has the wrong content; the text names the file.
    """
    import ssl

    given = {"root_certificates": root, "private_key": key, "certificate_chain": chain}
    for what, path in given.items():
        if path is not None:
            with open(path, "rb"):  # noqa: PTH123 - pathlib is slow to import; ssl's errors name no file
                given[what] = f"{what} {path}"
    try:
        context = ssl.create_default_context(cafile=root)
    except ssl.SSLError as error:
        raise OSError(f"{given['root_certificates']} has no certificate that can be read: {error}") from None
    if root is not None:
        # Contexts of Python 3.13 and newer refuse roots without the extension for key usage, as `openssl req -x509`
        # makes them. Older ones take them, and so does grpcio.
        context.verify_flags &= ~ssl.VerifyFlags.VERIFY_X509_STRICT
    if chain is not None:
        try:
            context.load_cert_chain(chain, key)
        except ssl.SSLError as error:
            files = " and ".join(filter(None, (given["certificate_chain"], given["private_key"])))
            raise OSError(f"{files}: no certificate chain with its key: {error}") from None
    context.set_alpn_protocols(["h2"])
    return context


class Handshake:
    """A TLS handshake in memory: the caller does the reading and writing."""

    def __init__(self, context: ssl.SSLContext, name: str) -> None:
        import ssl

        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.connection = context.wrap_bio(self.incoming, self.outgoing, server_hostname=name or None)

    def steps(self) -> Iterator[bytes]:
        """Yields bytes to write. While `version` is None, the caller then writes what it reads to `incoming`."""
        import ssl

        while True:
            try:
                self.connection.do_handshake()
            except ssl.SSLWantReadError:
                yield self.outgoing.read()
            else:
                break
        if rest := self.outgoing.read():
            yield rest


def secured(shake: Handshake | None, target: Target) -> Tls | None:
    """TLS after its handshake.

    Raises:
        OSError: the server does not speak HTTP/2.
    """
    if shake is None:
        return None
    from inferd_client._native.tls import Tls

    if shake.connection.selected_alpn_protocol() != "h2":
        raise OSError(f"{target.text} speaks TLS, but not HTTP/2 (ALPN: h2)")
    return Tls(shake.connection, shake.incoming, shake.outgoing)


def prepare(sock: socket.socket) -> None:
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def connect(target: Target, options: Options, timeout: float | None) -> Link:
    """A link to the server.

    Raises:
        OSError: no connection can be made; TimeoutError: none was made in time.
    """
    sock, tls = opened(target, options, timeout)
    return Link(
        sock.detach(), target.text, tls, limit=options.limit, keepalive=options.keepalive, busy_poll=options.busy_poll
    )


def opened(target: Target, options: Options, timeout: float | None) -> tuple[socket.socket, Tls | None]:
    """A socket that is connected and does not block, and its TLS.

    Raises:
        OSError: no connection can be made; TimeoutError: none was made in time.
    """
    ends = time.monotonic() + min(timeout if timeout is not None else CONNECT_SECONDS, CONNECT_SECONDS)
    left = max(ends - time.monotonic(), 0.001)
    if target.path:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(left)
        try:
            sock.connect(target.path)
        except OSError:
            sock.close()
            raise
    else:
        sock = _reached(target, ends)
    try:
        prepare(sock)
        shake = None
        if options.context is not None:
            shake = Handshake(options.context, options.server_name or target.host or "localhost")
            for data in shake.steps():
                sock.settimeout(max(ends - time.monotonic(), 0.001))
                sock.sendall(data)
                if not shake.connection.version():
                    take(shake, sock.recv(1 << 16), target)
        sock.setblocking(False)
        return sock, secured(shake, target)
    except BaseException:
        sock.close()
        raise


def share_of(ends: float, attempts: int) -> float:
    """Seconds for the next of so many attempts until `ends`: an attempt that hangs leaves time for the others."""
    return max((ends - time.monotonic()) / attempts, 0.001)


class Dialling:
    """Attempts to connect to the addresses of a server, one after the other; each has its share of the time.

    Attributes:
        places: the addresses, as getaddrinfo returns them.
    """

    def __init__(self, target: Target, ends: float) -> None:
        self.places: list[Any] = []
        self._target, self._ends = target, ends
        self._error: OSError | None = None

    @contextmanager
    def noting(self, sock: socket.socket | None = None) -> Iterator[None]:
        """Note an OSError of the code within, and go on behind it; close the socket after any exception."""
        try:
            yield
        except BaseException as found:
            if sock is not None:
                sock.close()
            if not isinstance(found, OSError):
                raise
            self._error = found

    def sockets(self) -> Iterator[tuple[socket.socket, Any, float]]:
        """For each address a socket, the address, and the seconds that its attempt may take."""
        for left, (family, kind, protocol, _, address) in zip(range(len(self.places), 0, -1), self.places, strict=True):
            try:
                sock = socket.socket(family, kind, protocol)
            except OSError as found:  # such as an address of IPv6 where the system has none
                self._error = found
            else:
                yield sock, address, share_of(self._ends, left)

    def failure(self) -> OSError:
        """The error of the last attempt."""
        return self._error or OSError(f"{self._target.text}: there is no such host")


def _reached(target: Target, ends: float) -> socket.socket:
    """A socket that is connected to the first address that accepts connections."""
    dialling = Dialling(target, ends)
    for host, port in target.all:
        with dialling.noting():
            dialling.places += socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for sock, address, seconds in dialling.sockets():
        with dialling.noting(sock):
            sock.settimeout(seconds)
            sock.connect(address)
            return sock
    raise dialling.failure()


def take(shake: Handshake, data: bytes, target: Target) -> None:
    if not data:
        raise ConnectionResetError(f"{target.text} closed the connection during the TLS handshake")
    shake.incoming.write(data)
