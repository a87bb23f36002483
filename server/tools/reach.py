"""How commands connect to a server of the v2 protocol, of inferd or of others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import inferd_client.grpc as grpcclient
from inferd.server.errors import Misused, ServerError
from inferd.server.observe.escaping import visible
from inferd_client._connecting import tls_context
from inferd_client.utils import InferenceServerException

if TYPE_CHECKING:
    import ssl


class CallFailed(ServerError):
    """A command could not call a server, or the call failed; the text has the reason."""


@dataclass(frozen=True, slots=True)
class Reach:
    """A server, and how to connect to it.

    Attributes:
        url: HOST:PORT or unix:PATH.
        root_cert: PEM file that the server's certificate is checked against.
        pinned: without root_cert: PEM file of the one certificate that the server may have, whatever its name.
        secure: without both: check the server's certificate against those that the system trusts. Otherwise the
            connection is plain text.
        client_cert, client_key: PEM files of the client's identity, if the server asks for one.
        headers: sent with each call.
        timeout: seconds that a response may take.
    """

    url: str = "127.0.0.1:8001"
    root_cert: Path | None = None
    client_cert: Path | None = None
    client_key: Path | None = None
    headers: tuple[tuple[str, str], ...] = ()
    timeout: float = 60.0
    secure: bool = False
    pinned: Path | None = None

    @property
    def metadata(self) -> dict[str, str]:
        """The headers."""
        return dict(self.headers)

    def tls(self) -> ssl.SSLContext | None:
        """The TLS context of connections; None: plain text.

        Raises:
            CallFailed: a file cannot be read, or is of no use.
            Misused: the client's key has no certificate, or the connection would be plain text, which sends none.
        """
        if self.client_key is not None and self.client_cert is None:
            raise Misused("--client-key: it needs --client-cert")
        root_cert = self.root_cert or self.pinned
        if root_cert is None and not self.secure:
            if self.client_cert is not None:
                raise Misused("--client-cert: it needs TLS: add --root-cert, or --tls")
            return None
        files = {
            "--root-cert" if self.root_cert else "--grpc-server-cert": root_cert,
            "--client-cert": self.client_cert,
            "--client-key": self.client_key,
        }
        for option, path in files.items():
            if path is not None and not path.is_file():
                raise CallFailed(f"{option}: there is no file {path}")
        root, chain, key = (str(path) if path else None for path in files.values())
        try:
            context = tls_context(root, key, chain)
        except OSError as error:
            raise CallFailed(f"{', '.join(name for name, path in files.items() if path)}: {error}") from None
        if root_cert is not None and root_cert is self.pinned:
            import ssl

            context.check_hostname = False
            context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
        return context

    def client(self) -> grpcclient.InferenceServerClient:
        """A client of the server.

        Raises:
            CallFailed: a file cannot be read, or is of no use.
            Misused: the address is not valid; or see `tls`.
        """
        try:
            return grpcclient.InferenceServerClient(self.url, creds=self.tls())
        except InferenceServerException as error:
            raise Misused(f"--url: {error.message()}") from None


def failure(reach: Reach, error: InferenceServerException) -> CallFailed:
    """The error of a call, with advice."""
    text = f"{reach.url}: {visible(str(error))}"  # a server's text may contain control sequences of terminals
    if error.status() == "StatusCode.UNAVAILABLE" and "failed to connect" in str(error):
        text += "; is a server running there? --url HOST:PORT is the address of another one"
    if "explicit model load / unload is not allowed" in str(error):
        text += "; start the server with --model-control-mode=explicit"
    return CallFailed(text)
