"""Sockets of the world: the server's ends, as what the door accepts, and those of its peers; see `struct wire`."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation
    from tests.simulation.world import World

SMALL, USUAL = (300, 2000, 16_000), (1 << 16, 1 << 18, 1 << 20, 1 << 23)  # bytes that are under way, at most
MOST_NEWS = 512
FIRST_PORT = 1000
HOSTS = 3  # from which peers come; each is a client for the server's limits
OPEN, ENDED, BROKEN = range(3)  # what a peer sees of the server's end


class Peer(Protocol):
    """The owner of the other end of a socket."""

    def heard(self) -> None:
        """There is something to read, or room for what is to be sent; or the server has acted upon what was sent."""


class End:
    """The peer's end of one connection.

    Args:
        sockets: where.
        peer: whose it is.
        number: of the peer.
        random: of the peer.
        grain: bytes that the server reads at a time, at most; 0 for any.
        roomy: its buffers have room for what is said without reading.
        output: bytes from the server that are under way, at most; 0: as drawn.
    """

    def __init__(
        self, sockets: Sockets, peer: Peer, number: int, random: Random, grain: int, roomy: bool, output: int = 0
    ) -> None:
        sizes = [random.choice(USUAL if roomy else random.choice((SMALL, USUAL, USUAL))) for _ in range(2)]
        sizes[1] = output or sizes[1]
        self._sockets = sockets
        self._world = sockets.simulation.world.quick
        self.peer: Peer | None = peer
        self.host = number % HOSTS
        self.wire = int(self._world.world_connect(*sizes, grain))
        self.sent = 0  # bytes that the server's end has, or had
        self.knew = False  # the peer knew that the connection ends, before further calls were refused
        self.dropped = False  # the door has closed it at once
        self.over: set[str] = set()  # what open calls were told when their time was over: each time may end another one
        self._marks: deque[tuple[int, Callable[[], None], bool]] = deque()

    @property
    def address(self) -> str:
        """The address of this end as the server knows it."""
        return f"ipv4:10.0.0.{self.host}:{FIRST_PORT + self.wire}"

    def send(self, data: bytes) -> int:
        """How many of these bytes there was room for; none, where the connection is broken."""
        size = max(0, int(self._world.world_send(self.wire, data, len(data))))
        self.sent += size
        return size

    def take(self, size: int) -> bytes:
        """Take the bytes that have come, at most so many."""
        size = min(size, self.untaken)
        if not size:
            return b""
        data = ctypes.create_string_buffer(size)
        got = int(self._world.world_take(self.wire, data, size))
        return data.raw[:got]

    @property
    def untaken(self) -> int:
        """Bytes that have come."""
        return int(self._world.world_untaken(self.wire))

    @property
    def seen(self) -> int:
        """The state of the server's end as the peer sees it: OPEN, ENDED, or BROKEN."""
        return int(self._world.world_seen(self.wire))

    @property
    def closed(self) -> bool:
        """Whether the server has closed its end, of which the peer hears behind what it has still to take."""
        return bool(self._world.world_closed(self.wire))

    @property
    def full_ns(self) -> int:
        """When there was no room for what the server had to say, last."""
        return int(self._world.world_full_ns(self.wire))

    @property
    def silent_ns(self) -> int:
        """For how long the server had read nothing, until now or until it closed its end."""
        return int(self._world.world_silence(self.wire))

    def flows(self, since_ns: int) -> bool:
        """Whether the server could say at once all that it had to say since then."""
        return self.full_ns < since_ns and not self.untaken

    @property
    def reads(self) -> int:
        """By so many the server has read what was sent."""
        return int(self._world.world_reads(self.wire))

    @property
    def done(self) -> int:
        """Bytes that the server has read and acted upon."""
        return int(self._world.world_done(self.wire))

    def when_done(self, at: int, what: Callable[[], None], *, anyway: bool = False) -> None:
        """Do this when the server has acted upon so many bytes; with `anyway` also if it has acted upon the end."""
        self._marks.append((at, what, anyway))

    def part(self, *, reset: bool) -> None:
        """Close this end, or reset the connection. Nothing is read any more."""
        self.peer = None
        self._world.world_part(self.wire, reset)
        if self._world.world_done_end(self.wire):
            self.hear()  # the server has closed its end before: nothing more will be heard of it

    def hear(self) -> None:
        """Something has happened."""
        ended = bool(self._world.world_done_end(self.wire))
        done = self.done if self._marks else 0
        while self._marks and (ended or self._marks[0][0] <= done):
            at, what, anyway = self._marks.popleft()
            if anyway or at <= done:
                what()
        if self.peer is not None:
            self.peer.heard()
        elif ended:
            self._sockets.forget(self)


class Accepted:
    """A socket that the server has accepted, as far as the door needs a `socket.socket`."""

    family = socket.AF_INET

    def __init__(self, sockets: Sockets, end: End) -> None:
        self._world = sockets.simulation.world.quick
        self._wire = end.wire
        self._fd = int(self._world.world_accept(end.wire))

    def fileno(self) -> int:
        return self._fd

    def setblocking(self, blocks: bool) -> None:
        assert not blocks

    def setsockopt(self, *_: Any) -> None:
        """Nothing to do: the socket has no options."""

    def getsockopt(self, *_: Any) -> bytes:
        raise OSError("not here")

    def close(self) -> None:
        if self._fd >= 0:
            self._fd = -1
            self._world.world_close(self._wire)


class Listening:
    """The socket at which the door accepts."""

    family = socket.AF_INET

    def __init__(self, sockets: Sockets) -> None:
        self._sockets = sockets
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def getsockname(self) -> tuple[str, int]:
        return "10.0.0.0", 8001

    def listen(self, _: int) -> None:
        self._sockets.listening = self
        if self._sockets.waiting:
            self.wake()

    def wake(self) -> None:
        """Somebody waits."""
        os.eventfd_write(self._fd, 1)

    def accept(self) -> tuple[Accepted, tuple[str, int]]:
        sockets = self._sockets
        if sockets.random.random() < 0.02:
            raise ConnectionAbortedError
        if not sockets.waiting:
            with suppress(BlockingIOError):
                os.eventfd_read(self._fd)
            raise BlockingIOError
        end = sockets.waiting.popleft()
        return Accepted(sockets, end), (f"10.0.0.{end.host}", FIRST_PORT + end.wire)

    def close(self) -> None:
        self._sockets.listening = None
        os.close(self._fd)


class Sockets:
    """All of a simulation.

    Attributes:
        listening: at which the server accepts; None: it does not.
        waiting: those that it has not accepted.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.random = Random(f"{simulation.outcome.seed} sockets")
        self.listening: Listening | None = None
        self.waiting: deque[End] = deque()
        self._ends: dict[int, End] = {}
        self._news = (ctypes.c_int * MOST_NEWS)()

    def connect(
        self, peer: Peer, number: int, random: Random, grain: int = 0, *, roomy: bool = False, output: int = 0
    ) -> End:
        """A peer of this number connects."""
        end = End(self, peer, number, random, grain, roomy, output)
        self._ends[end.wire] = end
        self.waiting.append(end)
        if self.listening is not None:
            self.listening.wake()
        return end

    def end_at(self, address: str) -> End | None:
        """The peer's end of a connection of the server; None: its peer has gone."""
        return self._ends.get(int(address.rpartition(":")[2]) - FIRST_PORT)

    def forget(self, end: End) -> None:
        """Neither side needs it any more."""
        if self._ends.get(end.wire) is not end:
            return  # it has gone before
        del self._ends[end.wire]
        self.simulation.world.quick.world_forget(end.wire)

    def hear(self) -> int:
        """Tell peers what has happened to their connections. Returns the number of connections with news."""
        count = int(self.simulation.world.quick.world_news(self._news, MOST_NEWS))
        for place in range(count):
            if (end := self._ends.get(self._news[place])) is not None:  # else it has gone meanwhile
                end.hear()
        return count


def ask_socket(world: World, fd: int, _request: int, _argument: bytes) -> bytes:
    """`fcntl.ioctl` for the bytes that a peer has not received."""
    waiting = int(world.quick.world_waiting(fd))
    if waiting < 0:
        raise OSError(errno.EBADF, "closed")
    return struct.pack("i", waiting)
