"""TLS between a test's clients and its server: one certificate for both ends."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from tests.front.certificates import Authority


class Encryption:
    """The server's options, and how clients connect; without a folder for the certificate nothing is encrypted."""

    def __init__(self, folder: Path | None) -> None:
        self.options: list[str] = []
        self.context: ssl.SSLContext | None = None
        self.credentials: grpc.ChannelCredentials | None = None
        self.root: Path | None = None
        if folder is not None:
            self._trust(folder)

    def _trust(self, folder: Path) -> None:
        authority = Authority(folder)
        pair = authority.issue("server", "DNS:localhost", "IP:127.0.0.1")
        self.options = ["--grpc-use-ssl", f"--grpc-server-cert={pair.certificate}", f"--grpc-server-key={pair.key}"]
        self.believe(authority.root)

    def believe(self, root: Path) -> None:
        """Have clients trust certificates that this one has signed."""
        self.root = root
        self.context = ssl.create_default_context(cafile=root)
        self.context.set_alpn_protocols(["h2"])
        self.credentials = grpc.ssl_channel_credentials(root.read_bytes())

    def wrap(self, peer: socket.socket, host: str) -> socket.socket:
        """Shake hands on a new connection, which is taken over."""
        if self.context is None or peer.family == socket.AF_UNIX:
            return peer
        return self.context.wrap_socket(peer, server_hostname=host, suppress_ragged_eofs=False)

    def channel(self, address: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.Channel:
        """To an address; unix sockets are never encrypted."""
        if self.credentials is None or address.startswith("unix:"):
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, self.credentials, options=options)

    def aio_channel(self, address: str, options: Sequence[tuple[str, Any]] = (), **more: Any) -> grpc.aio.Channel:
        """A channel as `channel` makes it, for the running event loop."""
        if self.credentials is None or address.startswith("unix:"):
            return grpc.aio.insecure_channel(address, options=options, **more)
        return grpc.aio.secure_channel(address, self.credentials, options=options, **more)
