"""Spreads calls over the addresses of a name: decides which connection takes the next call, and when to connect.

Nothing here waits or connects; `_channel` and `_loops` do that for threads and for event loops.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from inferd_client._calling import Headers, fields_of
from inferd_client._connecting import CONNECT_SECONDS, Options, Target, share_of
from inferd_client._native.link import Call
from inferd_client._native.messages import framed

PICK_FIRST, ROUND_ROBIN = POLICIES = ("pick_first", "round_robin")
LOOK_SECONDS = 0.1
"""The least seconds between two checks of the addresses, while there are calls."""
RESOLVE_SECONDS, RESOLVE_AGAIN_SECONDS = 30.0, 1.0
"""Seconds after which the name is resolved again: while all addresses are connected, and while one is not."""
FIRST_BACKOFF, LAST_BACKOFF = 0.2, 20.0
"""Seconds until an unreachable address is tried again: the first pause and the longest."""
OTHERS_SECONDS = 0.1
"""Seconds for which the first call waits at most for the other addresses, once one is connected."""
HEALTH_SECONDS = 1.0
"""Seconds for which a new connection waits at most for the server's health before it takes calls."""
WATCH = "/grpc.health.v1.Health/Watch"
SERVING = 1


class Health:
    """What the server at the other end of one connection says of its health.

    Args:
        heard: is called when the server has said something, and when it says nothing more.

    Attributes:
        call: the call that reports the health; None: it has ended, so that it no longer keeps the connection's memory.
        serving: whether the server serves; True if it does not report that.
    """

    __slots__ = ("_heard", "call", "serving")

    def __init__(self, heard: Callable[[], None]) -> None:
        self.call: Call | None = None
        self.serving = True
        self._heard = heard

    def watched(self, headers: Headers) -> Call:
        """The call, to be started on the connection."""
        self.call = Call(headers.of(WATCH, None), [framed(b"")], None, many=True, owner=self)
        return self.call

    def call_changed(self, call: Call, done: bool) -> None:
        """See Owner of link.pyi."""
        for message, encoding in call.messages():
            if not encoding:
                self.serving = dict(fields_of(bytes(memoryview(message)))).get(1, 0) == SERVING
        if done:
            self.call = None
            self.serving = True  # without a health service, or without the connection, the health is unknown
        self._heard()


class Place:
    """An address of the server, and the connection to it.

    Args:
        target: its numeric address.

    Attributes:
        holder: the connection, a Link or Polled; None: there is none.
        link: its Link.
        health: its Health.
        busy: whether a connection is being made.
        due: when the next connection may be made, in time.monotonic().
        gone: the name no longer has this address.
    """

    __slots__ = ("_failures", "busy", "due", "gone", "health", "holder", "link", "target")

    def __init__(self, target: Target) -> None:
        self.target = target
        self.holder: Any = None
        self.link: Any = None
        self.health: Health | None = None
        self.busy = self.gone = False
        self.due = 0.0
        self._failures = 0

    @property
    def serving(self) -> bool:
        """Whether the server serves."""
        health = self.health
        return health is None or health.serving

    def connected(self, holder: Any, link: Any, health: Health) -> None:
        self.holder, self.link, self.health = holder, link, health
        self._failures = 0

    def failed(self) -> None:
        from random import uniform

        self.due = time.monotonic() + min(FIRST_BACKOFF * 2**self._failures, LAST_BACKOFF) * uniform(0.8, 1.2)
        self._failures = min(self._failures + 1, 10)

    def left(self) -> None:
        """Its connection takes no further calls, and closes when those in flight have ended."""
        watch = self.health.call if self.health is not None else None  # it may end at any time
        if watch is not None:
            self.link.give_up(watch)
        self.holder = self.link = self.health = None


class Places:
    """The addresses of a target.

    Args:
        target: a name, or several addresses.
        connections: how many to each address.
    """

    def __init__(self, target: Target, connections: int) -> None:
        self._target = target
        self._connections = connections
        self._turn = 0
        self._resolved = float("-inf")  # when the name was resolved, in time.monotonic()
        self._look = 0.0  # when to check the places
        self.all: list[Place] = []
        self.resolving = False

    def pick(self) -> Place | None:
        """The next place in turn that takes calls; one whose server does not serve only if there is no other."""
        places, turn, other = self.all, self._turn, None  # threads may pick at the same time
        for _ in range(len(places)):
            turn = (turn + 1) % len(places)
            place, link = places[turn], places[turn].link
            if link is not None and link.usable:
                if place.serving:
                    self._turn = turn
                    return place
                other = place
        return other

    def shares(self, began: float, ends: float | None) -> Iterator[tuple[Place, float]]:
        """Each place, and the seconds that a connection to it may take: all together have CONNECT_SECONDS, or less."""
        places = list(self.all)
        until = min(began + CONNECT_SECONDS, ends if ends is not None else float("inf"))
        for left, place in zip(range(len(places), 0, -1), places, strict=True):
            yield place, share_of(until, left)

    @property
    def connected(self) -> bool:
        """Whether a place takes calls."""
        return any(place.link is not None and place.link.usable for place in self.all)

    def due(self) -> bool:
        """Whether it is time to check the places."""
        now = time.monotonic()
        if now < self._look:
            return False
        self._look = now + LOOK_SECONDS
        return True

    def to_connect(self) -> list[Place]:
        """Places to connect now; their `busy` is set."""
        now = time.monotonic()
        found = []
        for place in self.all:
            if place.link is not None and not place.link.usable:
                place.left()
            if place.link is None and not place.busy and place.due <= now:
                place.busy = True
                found.append(place)
        return found

    def to_resolve(self) -> bool:
        """Whether to resolve the name now; `resolving` is then set."""
        whole = all(place.link is not None for place in self.all)
        wait = RESOLVE_SECONDS if whole and self.all else RESOLVE_AGAIN_SECONDS
        if self.resolving or time.monotonic() < self._resolved + wait:
            return False
        self.resolving = True
        return True

    def resolved(self, addresses: Iterable[tuple[str, int]]) -> list[Place]:
        """Set the addresses of the name. Returns the places that are no longer among them."""
        self._resolved = time.monotonic()
        wanted = list(dict.fromkeys(addresses))
        kept: dict[tuple[str, int], list[Place]] = {}
        for place in self.all:
            kept.setdefault((place.target.host, place.target.port), []).append(place)
        self.all = [
            place
            for host, port in wanted
            for place in kept.pop((host, port), None)
            or [Place(self._target._replace(host=host, port=port, more=())) for _ in range(self._connections)]
        ]
        gone = [place for places in kept.values() for place in places]
        for place in gone:
            place.gone = True
        return gone


def known_as(options: Options, target: Target) -> Options:
    """The options for connections to numeric addresses of a target: certificates have its name."""
    return Options(
        options.context, options.server_name or target.host, options.keepalive, options.limit, options.busy_poll
    )


def addresses_of(target: Target) -> list[tuple[str, int]]:
    """The numeric addresses of a target.

    Raises:
        OSError: a name has none.
    """
    found = []
    for host, port in target.all:
        found += numeric(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    return found


def numeric(places: Sequence[Any]) -> list[tuple[str, int]]:
    """Hosts and ports of getaddrinfo's results; a link-local address is nothing without its interface."""
    return [
        (f"{address[0]}%{address[3]}" if len(address) == 4 and address[3] else address[0], address[1])
        for *_, address in places
    ]
