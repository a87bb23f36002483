"""Applies the rules of `inferd.server.front.keepalive`: each native connection has a monitor with one alarm."""

from __future__ import annotations

from typing import Protocol

from inferd._native.timers import Alarm, TimersHandle
from inferd._native.transport.connection import Connection
from inferd.server.front.keepalive import Action, Age, ConnectionPolicy, Farewell, Handshake, Keepalive, PingStrikes
from inferd.server.front.outstanding import Outstanding

TOO_OLD = "the connection is older than --grpc-max-connection-age, and its grace is over"


class Monitored(Protocol):
    """The driver of a connection."""

    def abort(self) -> None:
        """Close the socket at once."""


class ConnectionMonitor:
    """Enforces the limits of one connection: its greeting, pings, age, and the time for its end.

    Args:
        driver: closes the connection.
        connection: has just begun.
        policy: the rules for it.
        timers: of the front, for the alarm.
        accepted: time of its accept, on the timers' clock.
    """

    def __init__(
        self,
        driver: Monitored,
        connection: Connection,
        policy: ConnectionPolicy,
        timers: TimersHandle,
        accepted: float,
    ) -> None:
        now = timers.time()
        self._policy = policy
        self._timers = timers
        self._driver = driver
        self._connection: Connection | None = connection
        self._handshake = Handshake(policy, accepted)
        self._keepalive = Keepalive(policy, now)
        self._strikes = PingStrikes(policy)
        self._age = Age(policy, now)
        self._farewell: Farewell | None = None
        self._outstanding: Outstanding | None = None
        self._alarm = Alarm(timers, self._check)
        self._schedule()
        connection.on_ping = self._pinged

    def stop(self) -> None:
        """The connection is gone."""
        if self._connection is not None:
            self._connection.on_ping = None
            self._connection = None
        self._alarm.cancel()

    def shut(self, outstanding: Outstanding) -> None:
        """All output is written, `outstanding` is in flight, and the peer is to close its end."""
        self._farewell = Farewell(self._policy, self._timers.time())
        self._outstanding = outstanding
        self._alarm.set(self._farewell.deadline)

    def _take_leave(self, farewell: Farewell, outstanding: Outstanding) -> None:
        action = farewell.due(self._timers.time(), waiting=outstanding.waiting, moved=outstanding.moved)
        if action is Action.DROP:
            self._driver.abort()
        else:
            self._alarm.set(farewell.deadline)

    def _schedule(self) -> None:
        self._alarm.set(min(self._handshake.deadline, self._keepalive.deadline, self._age.deadline))

    def _pinged(self) -> None:
        connection = self._connection
        if connection is None:
            return
        now = self._timers.time()
        if self._strikes.pinged(now, response_frames=connection.pinged_frames, streams=connection.streams):
            connection.calm("too_many_pings")  # written when this read has been processed

    def _check(self) -> None:
        connection, now = self._connection, self._timers.time()
        if connection is None:
            return
        if self._farewell is not None and self._outstanding is not None:
            self._take_leave(self._farewell, self._outstanding)
            return
        actions = {self._handshake.due(now, greeted=connection.greeted), self._age.due(now)}
        if now >= self._keepalive.deadline:
            actions.add(
                self._keepalive.due(
                    now,
                    received_at=connection.received_at,
                    response_frames=connection.response_frames,
                    streams=connection.streams,
                )
            )
        if Action.DROP in actions:
            self._driver.abort()
            return
        self._schedule()
        if Action.PING in actions:
            connection.ping()
        if Action.ANNOUNCE in actions:
            connection.announce_shutdown()
        if Action.LEAVE in actions:
            connection.go_away("max_age")
        if Action.FAIL in actions:
            connection.fail_calls(TOO_OLD)
