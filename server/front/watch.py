"""Carries out what `server.front.keepalive` says: one watch for each native connection, on one timer for all."""

from __future__ import annotations

import asyncio
from typing import Protocol

from _native.transport.connection import Connection, Endpoint
from server.front.keepalive import Action, Age, ConnectionPolicy, Handshake, Keepalive, PingStrikes
from server.front.wheel import Entry, TimerWheel


class Watched(Protocol):
    """The driver of a connection."""

    def flush(self) -> None:
        """Write what the connection has to say."""

    def abort(self) -> None:
        """Close the socket at once."""


EXPIRY = 1.0  # seconds between looks at the requests that are arriving


class Watchman:
    """The watches of all connections of an endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._watches: set[Watch] = set()
        self._expiry: Entry | None = None
        self._wheel: TimerWheel | None = None

    def watch(self, driver: Watched, connection: Connection, policy: ConnectionPolicy, accepted: float) -> Watch:
        """Watch a new connection; to be called on the loop.

        Args:
            accepted: when it was accepted, on the loop's clock.
        """
        loop = asyncio.get_running_loop()
        if self._wheel is None:
            self._wheel = TimerWheel(loop)
            self._expiry = self._wheel.entry(self._expire)
        if not self._watches and self._expiry is not None:
            self._expiry.set(loop.time() + EXPIRY)
        watch = Watch(self, self._wheel, loop, driver, connection, policy, accepted)
        self._watches.add(watch)
        return watch

    def forget(self, watch: Watch) -> None:
        """Its connection is gone."""
        self._watches.discard(watch)

    def _expire(self) -> None:
        more = self._endpoint.expire()
        if (self._watches or more) and self._expiry is not None:
            self._expiry.set(asyncio.get_running_loop().time() + EXPIRY)

    def close(self) -> None:
        """Watch nothing any more."""
        if self._wheel is not None:
            self._wheel.close()


class Watch:
    """What is due for one connection: its greeting, pings, age, and its end when the peer does not take it."""

    def __init__(
        self,
        watchman: Watchman,
        wheel: TimerWheel,
        loop: asyncio.AbstractEventLoop,
        driver: Watched,
        connection: Connection,
        policy: ConnectionPolicy,
        accepted: float,
    ) -> None:
        now = loop.time()
        self._policy = policy
        self._watchman = watchman
        self._loop = loop
        self._driver = driver
        self._connection: Connection | None = connection
        self._handshake = Handshake(policy, accepted)
        self._keepalive = Keepalive(policy, now)
        self._strikes = PingStrikes(policy)
        self._age = Age(policy, now)
        self._is_closing = False
        self._entry = wheel.entry(self._check)
        self._schedule()
        connection.on_ping = self._pinged

    def stop(self) -> None:
        """The connection is gone."""
        if self._connection is not None:
            self._connection.on_ping = None
            self._connection = None
            self._watchman.forget(self)
        self._entry.cancel()

    def closing(self) -> None:
        """The socket will be closed when all is written: give that the time of a handshake."""
        self._is_closing = True
        self._entry.set(self._loop.time() + self._policy.handshake_timeout)

    def _schedule(self) -> None:
        self._entry.set(min(self._handshake.deadline, self._keepalive.deadline, self._age.deadline))

    def _pinged(self) -> None:
        connection = self._connection
        if connection is None:
            return
        if self._strikes.pinged(self._loop.time(), answer_frames=connection.answer_frames, streams=connection.streams):
            connection.calm("too_many_pings")  # written when this read has been processed

    def _check(self) -> None:
        connection, now = self._connection, self._loop.time()
        if connection is None:
            return
        if self._is_closing:
            self._driver.abort()
            return
        actions = {self._handshake.due(now, greeted=connection.greeted), self._age.due(now)}
        if now >= self._keepalive.deadline:
            actions.add(
                self._keepalive.due(
                    now,
                    received_at=connection.received_at,
                    answer_frames=connection.answer_frames,
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
        if actions != {Action.NOTHING}:
            self._driver.flush()
