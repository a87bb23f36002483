"""Where `inferd serve` listens, by the environment and the file that configure it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from inferd.server.addresses import Bind, SettingsError, TcpAddress, parse_bind
from inferd.server.errors import Misused

ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that stand for all addresses of a machine, and for each the one by which the machine reaches itself."""


class OwnServer(NamedTuple):
    """An address of the server.

    Attributes:
        url: HOST:PORT or unix:PATH.
        certificate: PEM file of the server's certificate; None: the address has no TLS.
    """

    url: str
    certificate: Path | None = None


def own_server(environment: Mapping[str, str]) -> OwnServer:
    """The address for health checks: one that serves the health service, without TLS if possible.

    Raises:
        Misused: the environment or the file sets an address that is not valid, or no address can be asked.
    """
    options = _ServerOptions(environment)
    try:
        binds = [parse_bind(text, int(options.of("grpc-port", "8001"))) for text in options.list_of("grpc-address")]
    except (SettingsError, ValueError) as error:
        raise Misused(f"health: the server's own address is not known: {error}; give --url") from None
    encrypts = options.is_on("grpc-use-ssl") or options.is_on("grpc-use-ssl-mutual")
    answering = [bind for bind in binds if bind.rules.groups is None or "health" in bind.rules.groups]
    answering.sort(key=lambda bind: _has_tls(bind, encrypts))
    for bind in answering:
        if isinstance(bind.address, TcpAddress) and not bind.address.port:
            continue
        certificate = Path(options.of("grpc-server-cert", "")) if _has_tls(bind, encrypts) else None
        return OwnServer(_url(bind), certificate)
    raise Misused("health: none of the server's addresses has a known port and serves health: give --url")


def _has_tls(bind: Bind, encrypts: bool) -> bool:
    if not isinstance(bind.address, TcpAddress):
        return False
    return encrypts if bind.rules.tls is None else bind.rules.tls


def _url(bind: Bind) -> str:
    address = bind.address
    if isinstance(address, TcpAddress):
        return str(TcpAddress(ANY.get(address.host, address.host), address.port))
    return str(address)


class _ServerOptions:
    """Options of the server, from the environment, else from the file that INFERD_CONFIG names."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._file: dict[str, Any] = {}
        if path := environment.get("INFERD_CONFIG"):
            import tomllib

            try:
                written = tomllib.loads(Path(path).read_text())
            except (OSError, ValueError) as error:
                raise Misused(f"health: INFERD_CONFIG={path}: {error}") from None
            self._file = {key.replace("_", "-"): value for key, value in written.items()}

    def of(self, name: str, default: str) -> str:
        value = self._environment.get(f"INFERD_{name.upper().replace('-', '_')}")
        return str(self._file.get(name, default)) if value is None else value

    def list_of(self, name: str) -> list[str]:
        value = self._file.get(name)
        if isinstance(value, list) and f"INFERD_{name.upper().replace('-', '_')}" not in self._environment:
            return [str(each) for each in value]
        return self.of(name, "127.0.0.1").split()

    def is_on(self, name: str) -> bool:
        return self.of(name, "").lower() in ("1", "true", "yes", "y", "t", "on")
