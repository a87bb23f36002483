"""The interface of a call for handlers; a front door provides it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from inferd._native.service.ticket import CallOrigin

Metadata = Sequence[tuple[str, str | bytes]]

LONGEST = 1e9
"""The longest time to a deadline in seconds, 31 years: clients may send times that do not fit 64 bits of
nanoseconds."""


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """The process at the other end of a unix socket, as the kernel reported it when the process connected."""

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
        """The client's address in gRPC's form: `ipv4:127.0.0.1:4711`, `unix:/run/inferd.sock`."""

    @property
    def caller(self) -> int:
        """The caller's id, from the authorizer; 0 if unknown."""

    @property
    def forwarded(self) -> bytes:
        """Encoded request parameters made of the call's headers, for each of its requests."""

    def may_use(self, model: str) -> bool:
        """Whether the caller may make this call about a model, by the present rights."""

    def require_every_model(self) -> None:
        """Raises `Denied` unless the caller may use every model."""

    def require_overrides(self) -> None:
        """Raises `Denied` unless the caller's loads may bring a configuration and files."""

    @property
    def peer_credentials(self) -> PeerCredentials | None:
        """The client's process, if it uses a unix socket of the native door, else None."""

    @property
    def user(self) -> int:
        """The user of that process; -1 if unknown."""

    @property
    def identity(self) -> int:
        """A number for the owner of the client's certificate, or for its user; 0 if unknown."""

    @property
    def client(self) -> int:
        """A number for the client, the same on all its connections; see
        `inferd.server.front.connection_limits.client_name`."""

    @property
    def connection(self) -> int:
        """The number of the client's connection, which no other has; 0 if the door does not tell connections apart."""

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Register `callback`, called when the client's connection has ended."""

    @property
    def peer_names(self) -> tuple[str, ...]:
        """The subject's common name and alternative names in the client's verified certificate."""

    def hold(self, size: int) -> None:
        """Charge the call `size` bytes more, for unanswered requests and waiting responses; less if `size` is negative.
        A front door with a limit ends the calls with the largest charges. The charge ends with the call."""

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline, never negative; None without a deadline."""


def timeout_ns(call: Call) -> int:
    """The time left to a call in nanoseconds, in the engine's form: -1 without a deadline."""
    remaining = call.time_remaining()
    return -1 if remaining is None else int(min(remaining, LONGEST) * 1e9)


def origin(call: Call, stream_number: int = 0) -> CallOrigin:
    """Where the requests of this call come from.

    Args:
        call: the call.
        stream_number: of the stream, if the call is one: a number that no other stream has; else 0.
    """
    return CallOrigin(
        caller=call.caller,
        user=call.user,
        identity=call.identity,
        client=call.client,
        trace=_trace_context(call),
        peer=call.peer,
        forwarded=call.forwarded,
        stream=stream_number != 0,
        stream_number=stream_number,
    )


def _trace_context(call: Call) -> tuple[str, str]:
    """The trace context from the client: W3C's headers traceparent and baggage, or empty."""
    found: dict[str, str] = {}
    for name, value in call.metadata:
        if name in ("traceparent", "baggage"):
            found.setdefault(name, str(value))
    return found.get("traceparent", ""), found.get("baggage", "")


def flag(call: Call, key: str) -> bool:
    """Whether the client's metadata turn `key` on: its last value is "true" (in any case) or "1"."""
    values = [value for name, value in call.metadata if name == key]
    return bool(values) and str(values[-1]).lower() in ("true", "1")
