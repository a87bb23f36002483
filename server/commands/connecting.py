"""The options by which commands connect to a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from inferd.server.errors import Misused

if TYPE_CHECKING:
    from inferd.server.tools.reach import Reach

Several = Annotated[tuple[str, ...], Parameter(negative=())]
Switch = Annotated[bool, Parameter(negative=())]
Format = Literal["table", "json"]


@Parameter(name="*")
@dataclass(frozen=True)
class Server:
    """The address of a server, and how to connect to it.

    Attributes:
        url: HOST:PORT, or unix:PATH.
        root_cert: PEM file to check the server's certificate against; without it, and --tls, the connection is plain.
        tls: Use TLS; without --root-cert with the system's trusted certificates.
        client_cert: PEM file of the client's certificate, if the server asks for one.
        client_key: PEM file of its key.
        header: KEY=VALUE, such as authorization; may be given several times.
        timeout: The most seconds for a response.
    """

    url: Annotated[str, Parameter(name=("--url", "-u"))] = "127.0.0.1:8001"
    root_cert: Path | None = None
    tls: Switch = False
    client_cert: Path | None = None
    client_key: Path | None = None
    header: Several = ()
    timeout: float = 60.0

    def reach(self) -> Reach:
        """The checked values.

        Raises:
            Misused: a value is wrong.
        """
        from inferd.server.tools.reach import Reach

        if not self.timeout > 0:
            raise Misused("--timeout: expected more than 0 seconds")
        headers = metadata(self.header)
        return Reach(self.url, self.root_cert, self.client_cert, self.client_key, headers, self.timeout, self.tls)


def metadata(headers: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """The pairs of texts "KEY=VALUE".

    Raises:
        Misused: a text has another form, or two have the same key.
    """
    found: dict[str, str] = {}
    for each in headers:
        key, equals, value = each.partition("=")
        if not key or not equals:
            raise Misused(f"--header: expected KEY=VALUE, got '{each}'")
        if key.lower() in found:
            raise Misused(f"--header: '{key.lower()}' is given twice: join its values with a comma")
        found[key.lower()] = value
    return tuple(found.items())


HERE = Server()
