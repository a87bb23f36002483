"""The addresses on which the server listens, and the rules for single ones.

127.0.0.1:8001                                            an address, to which the server's options apply
unix:///run/x.sock,mode=0600,tokens=off                   an address with rules of its own, after commas
0.0.0.0:8002,groups=inference+health,max-connections=500
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields

LONGEST_SOCKET_PATH = 107  # bytes, the kernel's limit

RESTRICTABLE = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
    "reflection",
)
"""The RPC groups: tritonserver's, and reflection, which it does not have."""


class SettingsError(ValueError):
    """The value of an option is out of its range; the text names the option."""


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A host, by name or number, and a port; port 0 means any free port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """The path of a unix socket."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        return True


Address = TcpAddress | UnixAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of one address, times in milliseconds; where one is None, the server's options decide."""

    tls: bool | None = None
    groups: tuple[str, ...] | None = None  # the RPC groups that are served there
    tokens: bool | None = None  # False: clients need neither a token nor a restricted protocol's header
    reflection: bool | None = None
    mode: int | None = None
    owner: str | None = None
    max_connections: int | None = None
    keepalive_time: int | None = None
    keepalive_timeout: int | None = None
    max_connection_age: int | None = None
    max_connection_age_grace: int | None = None
    handshake_timeout: int | None = None

    def __str__(self) -> str:
        """The rules in the form that follows an address."""
        given = ((each.name, getattr(self, each.name)) for each in fields(self))
        return "".join(f",{name.replace('_', '-')}={_shown(name, value)}" for name, value in given if value is not None)


def _shown(name: str, value: object) -> str:
    if name == "mode":
        return f"{value:04o}"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "+".join(value) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True, slots=True)
class Bind:
    """An address and its rules."""

    address: Address
    rules: Rules = field(default_factory=Rules)

    def __str__(self) -> str:
        return f"{self.address}{self.rules}"


def parse_address(text: str, port: int, option: str = "grpc-address") -> Address:
    """`HOST`, `HOST:PORT`, `[IPV6]:PORT`, a bare IPv6 address, `unix:PATH` or `unix://PATH`.

    Args:
        text: the address.
        port: the port where it names none.
        option: the option that has the address, for errors.

    Raises:
        SettingsError: the text has another form, or the port is not valid.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:").removeprefix("//")
        if not path or "\0" in path or len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
            raise SettingsError(f"{option}: expected unix:PATH of 1 to {LONGEST_SOCKET_PATH} bytes, got {text!r}")
        return UnixAddress(path)
    if _is_ipv6(text):
        return TcpAddress(text, port)
    found = re.fullmatch(r"(?:\[(?P<ipv6>[^\[\]/]+)\]|(?P<host>[^:\[\]/]+))(?::(?P<port>\d{1,5}))?", text)
    if found is None or (found["ipv6"] and not _is_ipv6(found["ipv6"])):
        raise SettingsError(f"{option}: expected HOST, HOST:PORT, [IPV6]:PORT or unix:PATH, got {text!r}")
    number = int(found["port"]) if found["port"] else port
    if number > 65535:
        raise SettingsError(f"{option}: expected a port of 0 to 65535, got {text!r}")
    return TcpAddress(found["ipv6"] or found["host"], number)


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


_RULE = re.compile(r",([a-z]+(?:-[a-z]+)*)=([^,]*)")


def parse_bind(text: str, port: int) -> Bind:
    """An address with the rules behind it.

    Args:
        text: `ADDRESS,key=value,key=value`; keys are the fields of `Rules`, with hyphens.
        port: the port where it names none.

    Raises:
        SettingsError: the address or a rule is not valid, or a rule does not fit the address.
    """
    first = _RULE.search(text)
    address = parse_address(text[: first.start()] if first else text, port)
    rest = text[first.start() :] if first else ""
    found: dict[str, object] = {}
    for rule in _RULE.finditer(rest):
        name = rule[1].replace("-", "_")
        if name not in _READERS:
            known = ", ".join(key.replace("_", "-") for key in _READERS)
            raise SettingsError(f"grpc-address: {address}: unknown option {rule[1]!r}, expected some of {known}")
        if name in found:
            raise SettingsError(f"grpc-address: {address}: {rule[1]} is given twice")
        try:
            found[name] = _READERS[name](rule[2])
        except ValueError as error:
            raise SettingsError(f"grpc-address: {address}: {rule[1]}: {error}, got {rule[2]!r}") from None
    if _RULE.sub("", rest):
        raise SettingsError(f"grpc-address: expected ADDRESS,KEY=VALUE,KEY=VALUE, got {text!r}")
    rules = Rules(**found)  # type: ignore[arg-type]  # each value is of its reader
    is_unix = isinstance(address, UnixAddress)
    if not is_unix and (rules.mode is not None or rules.owner is not None):
        raise SettingsError(f"grpc-address: {address}: mode and owner are of unix sockets")
    if is_unix and rules.tls:
        raise SettingsError(f"grpc-address: {address}: TLS is for TCP, a unix socket is guarded by its mode")
    return Bind(address, rules)


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise ValueError("expected on or off")
    return text == "on"


def _groups(text: str) -> tuple[str, ...]:
    groups = tuple(text.split("+"))
    if not set(groups) <= set(RESTRICTABLE):
        raise ValueError(f"expected some of {', '.join(RESTRICTABLE)} with + between")
    return groups


def _mode(text: str) -> int:
    if not re.fullmatch("0?[0-7]{3}", text) or text.strip("0") == "":
        raise ValueError("expected an octal mode such as 0600")
    return int(text, 8)


def _number(lowest: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"\d{1,10}", text) or not lowest <= int(text) < 2**31:
            raise ValueError(f"expected {lowest} to 2147483647")
        return int(text)

    return read


_READERS: dict[str, Callable[[str], object]] = {
    "tls": _switch,
    "groups": _groups,
    "tokens": _switch,
    "reflection": _switch,
    "mode": _mode,
    "owner": str,
    "max_connections": _number(0),
    "keepalive_time": _number(1),
    "keepalive_timeout": _number(1),
    "max_connection_age": _number(0),
    "max_connection_age_grace": _number(0),
    "handshake_timeout": _number(1),
}
