"""The asynchronous side: links that an event loop polls, and calls that coroutines wait for. It makes no thread."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from contextlib import suppress
from typing import Any

from inferd_client._balancing import (
    HEALTH_SECONDS,
    OTHERS_SECONDS,
    ROUND_ROBIN,
    Health,
    Place,
    Places,
    known_as,
    numeric,
)
from inferd_client._calling import (
    Attempts,
    Failed,
    Headers,
    Pieces,
    RetryOptions,
    end_of,
    error_of,
    failure,
    left_of,
    response_of,
    too_late,
)
from inferd_client._channel import CLOSED, HeaderList, forking
from inferd_client._connecting import CONNECT_SECONDS, Dialling, Handshake, Options, Target, prepare, secured, take
from inferd_client._native.link import Call, Link
from inferd_client.utils import InferenceServerException

TOGETHER = 8
"""How many requests at most are written together: the server works on them while the client makes others."""
MOST_UNSENT = 1 << 20
"""How many unsent bytes of a stream's requests may wait before the client asks for the next request."""


class Polled:
    """A link and its callbacks in the event loop."""

    def __init__(self, link: Link, loop: asyncio.AbstractEventLoop) -> None:
        self.link = link
        self._loop = loop
        self._fd = link.fd
        self._polled = True
        self._writing = False
        self._flushing = False
        self._unwritten = 0
        self._senders: list[tuple[Call, asyncio.Future[None]]] = []
        self._alarm: asyncio.TimerHandle | None = None
        loop.add_reader(self._fd, self._ready)

    def _ready(self) -> None:
        self.link.serve()
        self._polls()

    def _polls(self) -> None:
        """Poll for the events that the link needs, and wake coroutines that have more to send."""
        if self._senders:
            dead = self.link.dead
            waiting = []
            for call, each in self._senders:
                if call.unsent <= MOST_UNSENT or call.done or dead:
                    if not each.done():
                        each.set_result(None)
                else:
                    waiting.append((call, each))
            self._senders = waiting
        if self.link.dead:
            self.forget()
        elif self._polled and self.link.blocked != self._writing:
            self._writing = not self._writing
            if self._writing:
                self._loop.add_writer(self._fd, self._ready)
            else:
                self._loop.remove_writer(self._fd)

    def flush_soon(self) -> None:
        """Write the output of new calls: at once for a single call or for TOGETHER calls, else after this loop turn."""
        self._unwritten += 1
        if self.link.count <= 1 or self._unwritten >= TOGETHER:
            self._flush()
        elif not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush_rest)

    def _flush_rest(self) -> None:
        self._flushing = False
        if self._unwritten:
            self._flush()

    def _flush(self) -> None:
        self._unwritten = 0
        self.link.flush()
        if self.link.dead:
            self.link.news()
        self._polls()

    async def room(self, call: Call) -> None:
        """Wait until at most MOST_UNSENT bytes of the call's messages are unsent, or the call has ended."""
        while call.unsent > MOST_UNSENT and not call.done and not self.link.dead:
            waiting = self._loop.create_future()
            self._senders.append((call, waiting))
            await waiting

    def keep_alive(self) -> None:
        """Send PINGs that are due, now and later."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        due = self.link.tick()
        self._polls()
        if due is not None and self._polled:
            self._alarm = self._loop.call_later(due, self.keep_alive)

    def forget(self) -> None:
        """Poll the link no more."""
        if self._alarm is not None:
            self._alarm.cancel()
        if self._polled:
            self._polled = False
            self._loop.remove_reader(self._fd)
            if self._writing:
                self._loop.remove_writer(self._fd)

    def close(self) -> None:
        """End the link and its calls."""
        self.forget()
        self.link.close()


class LoopChannel:
    """Links to a server, made when they are needed, in the event loop that makes calls.

    Args:
        target: the server.
        options: how links are made.
        connections: how many links; a call takes the one with the fewest calls in flight.
        retries: see RetryOptions; None: the caller gets every failure.
    """

    def __init__(self, target: Target, options: Options, connections: int = 1, retries: RetryOptions | None = None):
        self.target = target
        self.options = options
        self._retries = retries
        self._links: list[Polled | None] = [None] * connections
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connecting: asyncio.Lock | None = None
        self._failed = Failed(target)
        self._closed = False
        self.forks = 0  # the number of forks between the process that made this and the present one
        forking.add(self)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._leave()

    def _leave(self) -> None:
        """Have the loop close the links, which it polls and so would keep; any thread may call this."""
        if self._loop is not None and any(held := self._held()):
            with suppress(RuntimeError):  # the loop is closed, and so no longer polls
                self._loop.call_soon_threadsafe(_close, held)

    def _held(self) -> list[Polled | None]:
        """All links, which the channel no longer has."""
        links, self._links = self._links, [None] * len(self._links)
        return links

    def _moved(self) -> None:
        """The channel is in another loop than before."""

    def forked(self) -> None:
        """See Forking. The event loop is the parent's, too: both processes share its selector."""
        self.forks += 1
        self._loop = self._connecting = None
        self._links = [None] * len(self._links)
        self._moved()

    def usable(self, loop: asyncio.AbstractEventLoop) -> Polled | None:
        """A link of this loop that takes calls, if there is one."""
        if loop is not self._loop:
            return None
        best = self._links[0]
        if len(self._links) > 1:
            best = min(self._links, key=lambda each: each.link.count if each and each.link.usable else -1)
        return best if best is not None and best.link.usable else None

    async def link(self, ends: float | None = None, since: float | None = None) -> Polled:
        """A link that takes calls; makes one if needed. The arguments are those of Channel.link.

        Raises:
            InferenceServerException: no connection was made, or none in time, or the client is closed.
        """
        if self._closed:
            raise error_of(1, CLOSED)
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._leave()
            self._loop, self._connecting = loop, asyncio.Lock()
            self._moved()
        assert self._connecting is not None
        connecting = self._connecting
        since = time.monotonic() if since is None else since
        try:
            async with asyncio.timeout(left_of(ends)):
                await connecting.acquire()
        except TimeoutError:
            raise too_late() from None
        try:
            made = await self._made(ends, since)
        finally:
            connecting.release()
        return made or self.usable(loop) or await self.link(ends, since)

    async def _made(self, ends: float | None, since: float) -> Polled | None:
        """A new link in place of a missing one; None: no link is missing."""
        for i, each in enumerate(self._links):
            if each is None or not each.link.usable:
                self._failed.check(since)
                return await self._connected(i, left_of(ends))
        return None

    async def _connected(self, place: int, timeout: float | None) -> Polled:
        began = time.monotonic()
        try:
            link = await connect_in_loop(self.target, self.options, timeout)
        except OSError as error:
            raise self._failed.note(began, error, timeout) from None
        self._failed.forget()
        made = Polled(link, asyncio.get_running_loop())
        if self._closed:
            made.close()
            raise error_of(1, CLOSED)
        self._links[place] = made
        return made

    async def unary(self, headers: HeaderList, pieces: Pieces, timeout: float | None = None, once: bool = False) -> Any:
        """Make a call. Returns the bytes of the response, a buffer. The arguments are those of Channel.unary.

        Raises:
            InferenceServerException: the call failed.
        """
        ends = end_of(timeout)
        attempts = None
        while True:
            loop = asyncio.get_running_loop()
            safe, answered = False, None
            try:
                polled = self.usable(loop) or await self.link(ends)
            except InferenceServerException as found:
                error = found
            else:
                left = left_of(ends)
                future = loop.create_future()
                call = Call(headers, pieces, left, future=future)
                if not polled.link.start(call, flush=False):
                    continue
                polled.flush_soon()
                if self.options.keepalive is not None:
                    polled.keep_alive()
                alarm = loop.call_later(left, give_up, polled, call, True) if left is not None else None
                try:
                    await future
                except asyncio.CancelledError:
                    give_up(polled, call, False)
                    raise
                finally:
                    if alarm is not None:
                        alarm.cancel()
                if (response := response_of(call, self.options.limit)) is not None:
                    return response
                error, answered = failure(call), call.answered
                safe = call.safe_to_repeat and not self._closed
            attempts = attempts or Attempts(self._retries, ends, once)
            pause = attempts.pause(error, safe, answered)
            if pause is None:
                try:
                    raise error
                finally:
                    del error  # it refers to this frame, and so to the call and its tensors
            await asyncio.sleep(pause)

    def close(self) -> None:
        """End all calls and links."""
        self._closed = True
        held = self._held()
        if self._loop is not None and not self._loop.is_closed():
            _close(held)


class BalancedLoopChannel(LoopChannel):
    """As BalancedChannel, in an event loop, with tasks in place of threads."""

    def __init__(self, target: Target, options: Options, headers: Headers, connections: int, retries: Any) -> None:
        super().__init__(target, known_as(options, target), 0, retries)
        self._headers = headers
        self._connections = connections
        self._places = Places(target, connections)
        self._tasks: set[asyncio.Task[None]] = set()  # that connect or resolve; a loop has only weak references to them

    def usable(self, loop: asyncio.AbstractEventLoop) -> Polled | None:
        if loop is not self._loop:
            return None
        if self._places.due():
            self._tend(loop)
        place = self._places.pick()
        return place.holder if place is not None else None

    def _moved(self) -> None:
        self._places = Places(self.target, self._connections)

    async def _made(self, ends: float | None, since: float) -> Polled | None:
        if self._places.pick() is not None:
            return None
        self._failed.check(since)
        began = time.monotonic()
        error: OSError = OSError(f"{self.target.host} has no address")
        try:
            async with asyncio.timeout(left_of(ends)):
                await self._resolve()
        except OSError as found:
            error = found
        for place, seconds in self._places.shares(began, ends):
            try:
                await self._connect(place, seconds)
            except OSError as found:
                error = found
                place.failed()
            if place.link is not None and place.link.usable:
                self._failed.forget()
                if begun := self._tend(asyncio.get_running_loop()):
                    await asyncio.wait(begun, timeout=OTHERS_SECONDS)
                return place.holder  # type: ignore[no-any-return]
        if self._closed:
            raise error_of(1, CLOSED)
        raise self._failed.note(began, error, left_of(ends)) from None

    def _tend(self, loop: asyncio.AbstractEventLoop) -> list[asyncio.Task[None]]:
        """Begin due connections, without waiting for them. Returns the tasks that make them."""
        for idle in [each for each in self._links if each is not None and not each.link.count]:
            self._links.remove(idle)
            idle.close()
        if not self._places.connected:
            return []  # the call connects, because it gets the error if that fails
        begun = [loop.create_task(self._try(place)) for place in self._places.to_connect()]
        if self._places.to_resolve():
            begun.append(loop.create_task(self._resolve_again()))
        for task in begun:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return begun

    async def _resolve(self) -> None:
        loop = asyncio.get_running_loop()
        found = [place for host, port in self.target.all for place in await _resolved(host, port, loop)]
        for place in self._places.resolved(numeric(found)):
            holder = place.holder
            place.left()
            if holder is not None:
                self._links.append(holder)

    async def _resolve_again(self) -> None:
        try:
            with suppress(OSError):  # the known addresses remain
                await self._resolve()
        finally:
            self._places.resolving = False

    async def _try(self, place: Place) -> None:
        try:
            await self._connect(place, None)
        except OSError:
            place.failed()
        finally:
            place.busy = False

    async def _connect(self, place: Place, timeout: float | None) -> None:
        link = await connect_in_loop(place.target, self.options, timeout)
        made = Polled(link, asyncio.get_running_loop())
        heard = asyncio.Event()
        health = Health(heard.set)
        wanted = False
        try:
            if link.start(health.watched(self._headers), flush=False):
                made.flush_soon()
                with suppress(TimeoutError):
                    await asyncio.wait_for(heard.wait(), HEALTH_SECONDS)
            # another task may have connected to the same place
            wanted = not (self._closed or place.gone or (place.link is not None and place.link.usable))
        finally:  # also if the call is cancelled
            if not wanted:
                made.close()
        if wanted:
            place.connected(made, link, health)

    def _held(self) -> list[Polled | None]:
        held = [*self._links, *(place.holder for place in self._places.all)]
        for place in self._places.all:
            place.holder = place.link = place.health = None
        return held


def loop_channel_to(
    target: Target, options: Options, headers: Headers, connections: int, retries: RetryOptions | None, policy: str
) -> LoopChannel:
    """The channel of a client with a policy of `_balancing.POLICIES`."""
    if policy == ROUND_ROBIN and not target.path:
        return BalancedLoopChannel(target, options, headers, connections, retries)
    return LoopChannel(target, options, connections, retries)


def _close(links: list[Polled | None]) -> None:
    for each in filter(None, links):
        each.close()


def give_up(polled: Polled, call: Call, expired: bool) -> None:
    """End a call whose caller stopped waiting, or whose deadline has passed."""
    polled.link.give_up(call, expired=expired)
    polled.link.news()


# ---- connections -----------------------------------------------------------------------------------------------------


async def connect_in_loop(target: Target, options: Options, timeout: float | None) -> Link:
    """As `connect`, in the running event loop."""
    seconds = min(timeout if timeout is not None else CONNECT_SECONDS, CONNECT_SECONDS)
    async with asyncio.timeout(seconds):
        return await _connect_in_loop(target, options, time.monotonic() + seconds)


async def _connect_in_loop(target: Target, options: Options, ends: float) -> Link:
    loop = asyncio.get_running_loop()
    sock = await _dialled(target, loop, ends)
    try:
        prepare(sock)
        shake = None
        if options.context is not None:
            shake = Handshake(options.context, options.server_name or target.host or "localhost")
            for data in shake.steps():
                await loop.sock_sendall(sock, data)
                if not shake.connection.version():
                    take(shake, await loop.sock_recv(sock, 1 << 16), target)
        tls = secured(shake, target)
        return Link(sock.detach(), target.text, tls, limit=options.limit, keepalive=options.keepalive, evented=True)
    except BaseException:
        sock.close()
        raise


async def _dialled(target: Target, loop: asyncio.AbstractEventLoop, ends: float) -> socket.socket:
    """A socket that is connected to the first address that accepts connections."""
    dialling = Dialling(target, ends)
    if target.path:
        dialling.places = [(socket.AF_UNIX, socket.SOCK_STREAM, 0, "", target.path)]
    for host, port in [] if target.path else target.all:
        with dialling.noting():
            dialling.places += await _resolved(host, port, loop)
    for sock, address, seconds in dialling.sockets():
        with dialling.noting(sock):
            sock.setblocking(False)
            async with asyncio.timeout(seconds):
                await loop.sock_connect(sock, address)
            return sock
    raise dialling.failure()


async def _resolved(host: str, port: int, loop: asyncio.AbstractEventLoop) -> list[Any]:
    """getaddrinfo's results. Only a name, not an address, needs a thread of the loop."""
    if _is_address(host):
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    return await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)


def _is_address(host: str) -> bool:
    """Whether the host is an address, not a name."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return True
    return False
