"""What a handler may know about the call that it answers; a front door provides it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Metadata = Sequence[tuple[str, str | bytes]]

LONGEST = 1e9
"""Seconds that a deadline is at most away, 31 years: clients may name times that do not fit 64 bits of nanoseconds."""


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """The process at the other end of a unix socket, as the kernel knew it when it connected."""

    pid: int  # 0: in another PID namespace
    uid: int
    gid: int


class Call(Protocol):
    """One RPC in progress."""

    @property
    def metadata(self) -> Metadata:
        """The client's metadata in order; keys are lower case, the values of `-bin` keys are bytes."""

    @property
    def peer(self) -> str:
        """The client's address as gRPC writes it: `ipv4:127.0.0.1:4711`, `unix:/run/inferd.sock`."""

    @property
    def caller(self) -> int:
        """Who calls, for `Engine.submit`; 0 for nobody known."""

    @property
    def forwarded(self) -> bytes:
        """Encoded request parameters made of the call's headers, for each of its requests."""

    def may_use(self, model: str) -> bool:
        """Whether the caller may ask this of a model, by what is allowed now."""

    def require_every_model(self) -> None:
        """Raises `Denied` unless the caller may use every model."""

    def require_overrides(self) -> None:
        """Raises `Denied` unless the caller's loads may bring a configuration and files."""

    @property
    def peer_credentials(self) -> PeerCredentials | None:
        """The client's process when it came over a unix socket of the native door, else None."""

    @property
    def user(self) -> int:
        """The user of that process; -1 when it is not known."""

    @property
    def identity(self) -> int:
        """A number that stands for whoever has the client's certificate, or is that user; 0 when nobody knows."""

    @property
    def client(self) -> int:
        """A number that stands for the client, whatever its connections; see
        `server.front.connection_limits.client_name`."""

    @property
    def connection(self) -> int:
        """A number that the client's connection shares with no other; 0 where the door does not tell of connections."""

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Have `callback` called when the client's connection has ended."""

    @property
    def peer_names(self) -> tuple[str, ...]:
        """The subject's common name and alternative names in the certificate that the client has proved to own."""

    def hold(self, size: int) -> None:
        """The call holds so many bytes more, of requests that are not answered and of responses that wait; fewer when
        `size` is negative. A front door with a limit ends the calls that hold most; all are let go of with the call."""

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline, never negative; None when it set none."""


def timeout_ns(call: Call) -> int:
    """The time left to a call in nanoseconds as the engine takes it: -1 when there is no deadline."""
    remaining = call.time_remaining()
    return -1 if remaining is None else int(min(remaining, LONGEST) * 1e9)


def trace_context(call: Call) -> tuple[str, str]:
    """What the client says of the trace that the call belongs to: W3C's headers traceparent and baggage, or empty."""
    found: dict[str, str] = {}
    for name, value in call.metadata:
        if name in ("traceparent", "baggage"):
            found.setdefault(name, str(value))
    return found.get("traceparent", ""), found.get("baggage", "")


def flag(call: Call, key: str) -> bool:
    """Whether the client's metadata switch `key` on: its last value is "true" (in any case) or "1"."""
    values = [value for name, value in call.metadata if name == key]
    return bool(values) and str(values[-1]).lower() in ("true", "1")
