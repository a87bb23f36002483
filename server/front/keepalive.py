"""The rules by which a connection is pinged, ended or dropped: keepalive, age and end, without clock and I/O.

Times are seconds of the caller's clock. The caller calls each rule again at its `deadline`, and the rule returns the
action. The rules are those of gRPC's C core (doc/keepalive.md and the proposals A8 and A9 of gRPC), except where the
docstrings say otherwise.
"""

from __future__ import annotations

import enum
import math
import random
from dataclasses import dataclass

from inferd.server.settings import DEFAULTS

THROTTLED = 60.0  # between pings, once `max_pings_without_data` have been sent
IDLE_PING_INTERVAL = 7200.0  # between pings of clients without calls, where those are not permitted
AGE_NOTICE = 1.0  # between announcing the end and refusing streams: calls in flight must arrive
FAREWELL = 1.0  # for a peer that has received everything to close its end
LOOK = 0.25  # between looks at what a peer has received of the last bytes
# Bytes, and bytes a second, as in expiry.pyx.
SMALL, SLOWEST, SLOWEST_OF_MORE = 1 << 20, 16 << 10, 256 << 10
AGE_JITTER = 0.1  # of the age, so connections that began together do not end together


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionPolicy:
    """How long connections may be silent or old, and how often peers may ping; in seconds. Names are the options'.

    `max_streams` is the number of calls that one connection may have open at a time.
    """

    keepalive_time: float = DEFAULTS.grpc_keepalive_time / 1000
    keepalive_timeout: float = DEFAULTS.grpc_keepalive_timeout / 1000
    permit_without_calls: bool = DEFAULTS.grpc_keepalive_permit_without_calls
    max_pings_without_data: int | None = DEFAULTS.grpc_http2_max_pings_without_data or None  # None: no limit
    min_ping_interval: float = DEFAULTS.grpc_http2_min_recv_ping_interval_without_data / 1000
    max_ping_strikes: int | None = DEFAULTS.grpc_http2_max_ping_strikes or None  # None: no limit
    max_age: float = math.inf
    age_grace: float = math.inf
    handshake_timeout: float = DEFAULTS.grpc_handshake_timeout / 1000  # until the first bytes behind the preface
    send_timeout: float = DEFAULTS.grpc_send_timeout / 1000  # for the last bytes; those that the peer receives add time
    max_streams: int = DEFAULTS.grpc_max_concurrent_streams


class Action(enum.Enum):
    """The action for a connection."""

    NOTHING = enum.auto()
    PING = enum.auto()
    DROP = enum.auto()  # close the socket at once
    ANNOUNCE = enum.auto()  # announce the end
    LEAVE = enum.auto()  # refuse further streams, close when the open ones are answered
    FAIL = enum.auto()  # end the unanswered calls


class Keepalive:
    """Pings a silent peer, and drops it if it stays silent.

    Any byte is a sign of life, not only a ping's answer, which may come late behind a large upload. After
    `max_pings_without_data` pings, one a minute follows, so a peer that dies later is still found.
    """

    def __init__(self, policy: ConnectionPolicy, now: float) -> None:
        self._policy = policy
        self._pinged_at: float | None = None  # an unanswered ping
        self._last_ping = -math.inf
        self._pings_without_data = 0
        self._response_frames = 0
        self.deadline = now + policy.keepalive_time

    def due(self, now: float, *, received_at: float, response_frames: int, streams: int) -> Action:
        """To be called at the deadline.

        Args:
            received_at: when the peer last sent a byte.
            response_frames: frames of responses sent to it so far.
            streams: its open calls.
        """
        policy = self._policy
        if self._pinged_at is not None:
            if received_at < self._pinged_at:
                return self._wait_for_answer(now)
            self._pinged_at = None
        if response_frames != self._response_frames:
            self._response_frames = response_frames
            self._pings_without_data = 0
        at = max(received_at, self._last_ping) + policy.keepalive_time
        if policy.max_pings_without_data is not None and self._pings_without_data >= policy.max_pings_without_data:
            at = max(at, self._last_ping + THROTTLED)
        if now < at:
            self.deadline = at
            return Action.NOTHING
        if not streams and not policy.permit_without_calls:
            self.deadline = now + policy.keepalive_time
            return Action.NOTHING
        self._pinged_at = self._last_ping = now
        self._pings_without_data += 1
        self.deadline = now + min(policy.keepalive_timeout, policy.keepalive_time)
        return Action.PING

    def _wait_for_answer(self, now: float) -> Action:
        assert self._pinged_at is not None
        end = self._pinged_at + self._policy.keepalive_timeout
        self.deadline = min(end, now + self._policy.keepalive_time)
        return Action.NOTHING if now < end else Action.DROP


class PingStrikes:
    """Counts pings of a peer that come too soon after the previous one; sending a response resets the count.

    The first ping after a response is not counted: clients measure the bandwidth with it.
    """

    def __init__(self, policy: ConnectionPolicy) -> None:
        self._policy = policy
        self._last = -math.inf
        self._strikes = 0
        self._response_frames = 0

    def pinged(self, now: float, *, response_frames: int, streams: int) -> bool:
        """Count a ping; return whether the connection must end for it.

        Args:
            response_frames: frames of responses that had been sent when it came.
            streams: open calls of the peer.
        """
        policy = self._policy
        if response_frames != self._response_frames:
            self._response_frames = response_frames
            self._last = -math.inf
            self._strikes = 0
        idle = not streams and not policy.permit_without_calls
        if now < self._last + (IDLE_PING_INTERVAL if idle else policy.min_ping_interval):
            self._strikes += 1
        self._last = now
        return policy.max_ping_strikes is not None and self._strikes > policy.max_ping_strikes


class Age:
    """Ends an old connection: first the announcement, then no new streams, and after the grace no calls.

    Args:
        draw: a random number in [0, 1).
    """

    def __init__(self, policy: ConnectionPolicy, now: float, draw: float | None = None) -> None:
        draw = random.random() if draw is None else draw
        self._grace = policy.age_grace
        self._steps = [Action.ANNOUNCE, Action.LEAVE, Action.FAIL]
        self.deadline = now + policy.max_age * (1 + AGE_JITTER * (2 * draw - 1))

    def due(self, now: float) -> Action:
        """To be called at the deadline."""
        if now < self.deadline:
            return Action.NOTHING
        step = self._steps.pop(0)
        if step is Action.ANNOUNCE:
            self.deadline = now + min(AGE_NOTICE, self._grace)
        elif step is Action.LEAVE:
            self.deadline = now + max(0.0, self._grace - AGE_NOTICE)
        else:
            self.deadline = math.inf
        return step


class Handshake:
    """Drops a peer that connects and does not speak HTTP/2; bytes alone do not count.

    Args:
        accepted: when it connected, before the handshake of TLS.
    """

    def __init__(self, policy: ConnectionPolicy, accepted: float) -> None:
        self.deadline = accepted + policy.handshake_timeout

    def due(self, now: float, *, greeted: bool) -> Action:
        """To be called at the deadline.

        Args:
            greeted: the preface and the first SETTINGS have come.
        """
        if greeted:
            self.deadline = math.inf
        return Action.DROP if now >= self.deadline else Action.NOTHING


class Farewell:
    """Limits the time of a connection that is shut for writing.

    Bytes in flight have as long as a response (`--grpc-send-timeout`): progress adds time. A peer that has received
    everything has a moment to close its end. Until then the socket must stay open and be read: if it were closed with
    unread bytes, the kernel would reset the connection and drop the bytes in flight.
    """

    def __init__(self, policy: ConnectionPolicy, now: float) -> None:
        self._begin = now
        self._patience = policy.send_timeout
        self._received_at: float | None = None  # when a look found that the peer had received everything
        self.deadline = now + min(LOOK, self._patience)

    def due(self, now: float, *, waiting: int, moved: int) -> Action:
        """To be called at the deadline.

        Args:
            waiting: bytes that the peer has not received.
            moved: those that it has received since the beginning.
        """
        self.deadline = now + LOOK
        if waiting == 0:
            self._received_at = now if self._received_at is None else self._received_at
            return Action.DROP if now >= self._received_at + FAREWELL else Action.NOTHING
        self._received_at = None
        small = min(moved, SMALL)
        allowed = self._patience + small / SLOWEST + (moved - small) / SLOWEST_OF_MORE
        return Action.DROP if now >= self._begin + allowed else Action.NOTHING


DEFAULT_POLICY = ConnectionPolicy()
