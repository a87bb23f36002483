"""The synchronous side: links to one server, calls that a thread waits for, and calls that end in a callback."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from heapq import heapify, heappop, heappush
from typing import Any, Protocol

from inferd_client._balancing import (
    HEALTH_SECONDS,
    OTHERS_SECONDS,
    ROUND_ROBIN,
    Health,
    Place,
    Places,
    addresses_of,
    known_as,
)
from inferd_client._calling import (
    RESOURCE_EXHAUSTED,
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
from inferd_client._connecting import Options, Target, connect
from inferd_client._native.link import Call, Link
from inferd_client.utils import InferenceServerException

HeaderList = list[tuple[bytes, bytes]]
LOCALLY_CANCELLED = "Locally cancelled by application!"
CLOSED = "the client is closed"
LONGEST_WAIT = 3600.0
"""The longest single wait of a thread in seconds: the system cannot wait for more than some millions."""


class Forking(Protocol):
    """Owns connections of this process."""

    def forked(self) -> None:
        """This process is a fork: the connections are its parent's, and must not be touched."""


forking: weakref.WeakSet[Forking] = weakref.WeakSet()


class EndListener(Protocol):
    """Is told of the end of a call."""

    def ended(self, message: Any, error: InferenceServerException | None) -> None:
        """The call has ended, with the bytes of the response or with an error."""


def started(function: Callable[..., None], *arguments: Any) -> threading.Thread:
    """A new thread of the client that runs a function.

    Raises:
        InferenceServerException: the process can have no further thread.
    """
    thread = threading.Thread(target=function, args=arguments, name="inferd-client", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise error_of(RESOURCE_EXHAUSTED, f"the client needs another thread: {error}") from None
    return thread


class TimerThread:
    """Calls functions at given times, in a thread that exists while there are functions to call."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._functions: dict[int, Callable[[], None]] = {}  # by number
        self._times: list[tuple[float, int]] = []  # a heap of times and numbers, some of them of forgotten functions
        self._count = 0
        self._hurries = False
        self._thread: threading.Thread | None = None

    def at(self, when: float, what: Callable[[], None]) -> int:
        """Call a function at a time of time.monotonic(); 0: at once; infinity: when `hurry` is called.

        Returns:
            A number, for `forget`.

        Raises:
            InferenceServerException: see `started`.
        """
        with self._changed:
            if self._thread is None:
                self._thread = started(self._run)  # it waits for the lock
            self._count += 1
            number = self._count
            self._functions[number] = what
            heappush(self._times, (0.0 if self._hurries else when, number))
            self._changed.notify()
        return number

    def forget(self, number: int) -> None:
        """Do not call this function, unless its call has begun."""
        with self._changed:
            if self._functions.pop(number, None) is not None and len(self._times) > 2 * len(self._functions):
                self._drop_forgotten()

    def _drop_forgotten(self) -> None:
        times, count = self._times, self._count
        kept = [each for each in times if each[1] in self._functions]
        heapify(kept)
        if times is self._times and count == self._count:  # otherwise a signal handler has changed them meanwhile
            self._times = kept
            self._changed.notify()

    def hurry(self) -> None:
        """Call every function at once, also those that `at` adds from now on."""
        with self._changed:
            self._hurries = True
            self._times = [(0.0, number) for number in sorted(self._functions)]
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                what = None
                while what is None:
                    while self._times and (left := self._times[0][0] - time.monotonic()) > 0:
                        self._changed.wait(min(left, LONGEST_WAIT))
                    if not self._times:
                        self._thread = None
                        return
                    what = self._functions.pop(heappop(self._times)[1], None)
            try:
                what()
            except BaseException:  # other calls need this thread, even if a callback raises
                sys.excepthook(*sys.exc_info())


class Channel:
    """Links to a server, made when they are needed.

    Args:
        target: the server.
        options: how links are made.
        connections: how many links; a call takes the one with the fewest calls in flight.
        retries: see RetryOptions; None: the caller gets every failure.
    """

    def __init__(self, target: Target, options: Options, connections: int = 1, retries: RetryOptions | None = None):
        self.target = target
        self.options = options
        self.retries = retries
        self.timers = TimerThread()  # ends calls whose deadline passes between attempts; its functions never wait
        self.attempts = TimerThread()  # makes the next attempts of calls, which may wait for a connection
        self._links: list[Link | None] = [None] * connections
        self._connecting = threading.Lock()
        self._attending = threading.Lock()
        self._waiting: list[None] = []  # one entry for each call whose first attempt another thread makes
        self._failed = Failed(target)
        self._closed = False
        self.forks = 0  # the number of forks between the process that made this and the present one
        forking.add(self)

    def usable(self) -> Link | None:
        """A link that takes calls, if there is one."""
        best = self._links[0]
        if len(self._links) > 1:
            best = min(self._links, key=_busy)
        return best if best is not None and best.usable else None

    def link(self, ends: float | None = None, since: float | None = None) -> Link:
        """A link that takes calls; makes one if needed.

        Args:
            ends: the deadline, in time.monotonic(); None: no deadline.
            since: when the call began to wait, in time.monotonic(); None: now.

        Raises:
            InferenceServerException: no connection was made, or none in time, or the client is closed.
        """
        best = self.usable()
        if best is not None:
            return best
        if self._closed:
            raise error_of(1, CLOSED)
        since = time.monotonic() if since is None else since
        left = left_of(ends)
        if not self._connecting.acquire(timeout=-1 if left is None else min(left, LONGEST_WAIT)):
            if left_of(ends) == 0.0:
                raise too_late()
            return self.link(ends, since)
        try:
            if self._closed:
                raise error_of(1, CLOSED)
            for i, each in enumerate(self._links):
                if each is None or not each.usable:
                    self._failed.check(since)
                    return self._connected(i, left_of(ends))
        finally:
            self._connecting.release()
        return self.link(ends, since)

    def _connected(self, place: int, timeout: float | None) -> Link:
        began = time.monotonic()
        try:
            link = connect(self.target, self.options, timeout)
        except OSError as error:
            raise self._failed.note(began, error, timeout) from None
        self._links[place] = link
        self._failed.forget()
        if self._closed:  # `close` was called meanwhile, and may not have seen this link
            link.close()
            raise error_of(1, CLOSED)
        if self.options.keepalive is not None and self.options.keepalive[2]:
            self._attend(link)
        return link

    # ---- calls that a thread waits for

    def unary(self, headers: HeaderList, pieces: Pieces, timeout: float | None = None, once: bool = False) -> Any:
        """Make a call and wait. Returns the bytes of the response, a buffer.

        Args:
            headers, pieces, timeout: see Call.
            once: do not repeat the call if the server may have executed it.

        Raises:
            InferenceServerException: the call failed.
        """
        ends = end_of(timeout)
        attempts = None
        while True:
            safe, answered = False, None
            try:
                link = self.usable() or self.link(ends)
            except InferenceServerException as found:
                error = found
            else:
                call = Call(headers, pieces, left_of(ends))
                if not link.run(call):
                    continue
                if (response := response_of(call, self.options.limit)) is not None:
                    return response
                error, answered = failure(call), call.answered
                safe = call.safe_to_repeat and not self._closed
            attempts = attempts or Attempts(self.retries, ends, once)
            pause = attempts.pause(error, safe, answered)
            if pause is None:
                try:
                    raise error
                finally:
                    del error  # it keeps this frame, and so the call and its tensors
            time.sleep(pause)

    # ---- calls that end in a callback

    def start(
        self, headers: HeaderList, pieces: Pieces, timeout: float | None, listener: EndListener, once: bool = False
    ) -> Pending:
        """Begin a call; the arguments are those of `unary`.

        Another thread calls `listener.ended` when the call has ended. Another thread also makes the connection, if the
        call needs a new one, so this method never waits. Calls begin in the order in which they were started.
        """
        pending = Pending(self, headers, pieces, end_of(timeout), listener, once)
        if self._waiting or not pending.begin(connect=False):
            self._waiting.append(None)
            pending.begin_later(0.0, self._waiting.pop)
        return pending

    def announced(self, call: Call, ends: float | None, since: float | None = None) -> Link:
        """Begin a call that ends in a callback. Returns its link; further arguments and errors are those of `link`."""
        while True:
            link = self.link(ends, since)
            self._attend(link)
            if link.start(call):
                return link

    def announced_if_connected(self, call: Call) -> Link | None:
        """The same, but only on an existing link; None: no link takes calls."""
        while (link := self.usable()) is not None:
            self._attend(link)
            if link.start(call):
                return link
        return None

    def _attend(self, link: Link) -> None:
        if link.owner is None:
            with self._attending:
                if link.owner is None:
                    link.owner = started(link.attend)

    # ---- the end

    def close(self) -> None:
        """End all calls and links. A connection that is being made is not waited for; it is closed when it is made."""
        self._closed = True
        if sys.is_finalizing():
            return  # the threads to wait for have stopped, and may hold locks; the system closes the connections
        for link in self._taken():
            link.close()
            with self._attending:  # the link's thread may be about to start
                owner = link.owner
            if owner is not None and owner is not threading.current_thread():
                owner.join()
        self.timers.hurry()

    def _taken(self) -> list[Link]:
        """The links, which the channel no longer has."""
        links, self._links = self._links, [None] * len(self._links)
        return [each for each in links if each is not None]

    def forked(self) -> None:
        """This process is a fork: the links and their calls are its parent's."""
        self.forks += 1
        self._links = [None] * len(self._links)
        self._connecting = threading.Lock()
        self._attending = threading.Lock()
        self._waiting = []
        self.timers = TimerThread()
        self.attempts = TimerThread()


class BalancedChannel(Channel):
    """Links to all addresses of a server's name, which take calls in turn; see `_balancing`.

    Only calls cause connections: while a client makes no calls, it neither connects nor resolves.
    """

    def __init__(self, target: Target, options: Options, headers: Headers, connections: int, retries: Any) -> None:
        super().__init__(target, known_as(options, target), 0, retries)
        self._headers = headers
        self._connections = connections
        self._places = Places(target, connections)
        self._leaving: list[Link] = []
        self._tending = threading.RLock()  # guards changes of places and `_leaving`; a signal handler may close

    def usable(self) -> Link | None:
        if self._places.due():
            self._tend()
        place = self._places.pick()
        return place.link if place is not None else None

    def link(self, ends: float | None = None, since: float | None = None) -> Link:
        since = time.monotonic() if since is None else since
        while True:
            if self._closed:
                raise error_of(1, CLOSED)
            if (found := self.usable()) is not None:
                return found
            left = left_of(ends)
            if not self._connecting.acquire(timeout=-1 if left is None else min(left, LONGEST_WAIT)):
                if left_of(ends) == 0.0:
                    raise too_late()
                continue
            try:
                if self._places.pick() is None:
                    self._failed.check(since)
                    return self._any(ends)
            finally:
                self._connecting.release()

    def _any(self, ends: float | None) -> Link:
        """A link to the first address to which a connection can be made."""
        began = time.monotonic()
        error: OSError = OSError(f"{self.target.host} has no address")
        try:
            self._resolve()
        except OSError as found:
            error = found
        for place, seconds in self._places.shares(began, ends):
            try:
                self._connect(place, seconds)
            except OSError as found:
                error = found
                place.failed()
            if place.link is not None and place.link.usable:
                self._failed.forget()
                waits = time.monotonic() + OTHERS_SECONDS
                for other in self._tend():
                    other.join(max(waits - time.monotonic(), 0.0))
                return place.link or self.link(ends)
        raise self._failed.note(began, error, left_of(ends)) from None

    def _tend(self) -> list[threading.Thread]:
        """Begin due connections, without waiting for them. Returns the threads that make them."""
        if not self._tending.acquire(blocking=False):
            return []  # another thread does it
        try:
            for each in [each for each in self._leaving if not each.count]:
                self._leaving.remove(each)
                each.close()
            if not self._places.connected:
                return []  # the call connects, because it gets the error if that fails
            begun = []
            for place in self._places.to_connect():
                try:
                    begun.append(started(self._try, place))
                except InferenceServerException:
                    place.failed()
                    place.busy = False
            if self._places.to_resolve():
                try:
                    begun.append(started(self._resolve_again))
                except InferenceServerException:
                    self._places.resolving = False
            return begun
        finally:
            self._tending.release()

    def _resolve(self) -> None:
        addresses = addresses_of(self.target)
        with self._tending:
            for place in self._places.resolved(addresses):
                link = place.link
                place.left()
                if link is not None:
                    self._leaving.append(link)

    def _resolve_again(self) -> None:
        try:
            with suppress(OSError):  # the known addresses remain
                self._resolve()
        finally:
            self._places.resolving = False

    def _try(self, place: Place) -> None:
        try:
            self._connect(place, None)
        except OSError:
            place.failed()
        finally:
            place.busy = False

    def _connect(self, place: Place, timeout: float | None) -> None:
        link = connect(place.target, self.options, timeout)
        try:
            self._attend(link)
        except InferenceServerException as error:
            link.close()
            raise OSError(error.message()) from None
        heard = threading.Event()
        health = Health(heard.set)
        wanted = False
        try:
            if link.start(health.watched(self._headers)):
                heard.wait(HEALTH_SECONDS if timeout is None else min(timeout, HEALTH_SECONDS))
            with self._tending:  # two threads may have connected to one place
                wanted = not (self._closed or place.gone or (place.link is not None and place.link.usable))
                if wanted:
                    place.connected(link, link, health)
        finally:  # also if the handler of a signal raises
            if not wanted:
                link.close()

    def _taken(self) -> list[Link]:
        with self._tending:
            links = [place.link for place in self._places.all if place.link is not None]
            for place in self._places.all:
                place.left()
            leaving, self._leaving = self._leaving, []
            return links + leaving

    def forked(self) -> None:
        super().forked()
        self._places = Places(self.target, self._connections)
        self._leaving = []
        self._tending = threading.RLock()


def channel_to(
    target: Target, options: Options, headers: Headers, connections: int, retries: RetryOptions | None, policy: str
) -> Channel:
    """The channel of a client with a policy of `_balancing.POLICIES`."""
    if policy == ROUND_ROBIN and not target.path:
        return BalancedChannel(target, options, headers, connections, retries)
    return Channel(target, options, connections, retries)


def _busy(link: Link | None) -> float:
    return link.count if link is not None and link.usable else -1


class Pending:
    """A call that ends in a callback."""

    def __init__(
        self,
        channel: Channel,
        headers: HeaderList,
        pieces: Pieces,
        ends: float | None,
        listener: EndListener,
        once: bool,
    ) -> None:
        self._channel = channel
        self._headers = headers
        self._pieces = pieces
        self._ends = ends
        self._listener = listener
        self._forks = channel.forks
        self._attempts = Attempts(channel.retries, ends, once)
        self._changing = threading.RLock()  # guards the fields below; a signal handler may call `cancel`, too
        self._cancelled = False
        self._over = False
        self._call: Call | None = None
        self._link: Link | None = None
        self._alarm: int | None = None  # ends the call if its deadline passes between attempts
        self._next: int | None = None
        self._since = 0.0  # when the attempt of another thread was due, in time.monotonic()
        self._begun: list[Callable[[], None]] = []  # called when another thread has made the first attempt

    def begin(self, *, connect: bool = True) -> bool:
        """Make the call, or repeat it.

        Args:
            connect: whether to make a connection, if there is none. If not, False says that the call was not made.

        Raises:
            InferenceServerException: no connection can be made.
        """
        call = Call(self._headers, self._pieces, left_of(self._ends), owner=self)
        with self._changing:
            self._call, self._link = call, None  # only the call's own link can cancel it
        if connect:
            link = self._channel.announced(call, self._ends, self._since)
        elif (there := self._channel.announced_if_connected(call)) is not None:
            link = there
        else:
            return False
        with self._changing:
            if self._call is not call:
                return True  # it has ended meanwhile, and was repeated
            self._link = link
            unwanted = self._cancelled or self._over
        if unwanted:
            link.give_up(call)
        return True

    def begin_later(self, pause: float, begun: Callable[[], None] | None = None) -> None:
        """Make the call on a thread that may wait for a connection, after a pause in seconds.

        `begun` is called after the attempt, or when it is certain that there will be none.
        """
        # The attempt cannot be made on this thread, which may read the responses of other calls, nor on the one that
        # watches deadlines.
        if begun is not None:
            self._begun = [begun]
        self._since = time.monotonic() + pause
        try:
            if self._alarm is None:
                self._alarm = self._channel.timers.at(float("inf") if self._ends is None else self._ends, self._due)
            self._next = self._channel.attempts.at(self._since if pause else 0.0, self._again)
        except InferenceServerException as error:  # there are no threads; so this one calls back
            self._end(None, error)
            return
        if self._cancelled:  # `cancel` may have come before it could see the alarm
            self._due()
        if self._over:
            self._channel.attempts.forget(self._next)
            self._tell_begun()

    def call_changed(self, call: Call, done: bool) -> None:
        """See Owner of link.pyi."""
        if not done:
            return
        try:
            message = response_of(call, self._channel.options.limit)
        except InferenceServerException as error:
            self._end(None, error)
            return
        if message is None:
            self.failed(failure(call), call.safe_to_repeat, call.answered)
        else:
            self._end(message, None)

    def failed(self, error: InferenceServerException, safe: bool = False, answered: bool | None = None) -> None:
        """An attempt has failed: make another one, now or later, or end the call.

        The arguments are those of Attempts.pause.
        """
        with self._changing:
            self._call = self._link = None
            cancelled = self._cancelled
        if cancelled:
            self._end(None, error_of(1, LOCALLY_CANCELLED))
            return
        pause = self._attempts.pause(error, safe, answered)
        if pause is not None and left_of(self._ends) == 0.0:
            pause, error = None, too_late()
        if pause is None:
            self._end(None, error)
            return
        self.begin_later(pause)

    def _again(self) -> None:
        if not self._over:
            try:
                self.begin()
            except InferenceServerException as error:
                self.failed(error)
        self._tell_begun()

    def _tell_begun(self) -> None:
        with suppress(IndexError):
            self._begun.pop()()

    def _due(self) -> None:
        """End the call, because its deadline has passed, it was cancelled, or the client is closed.

        If an attempt is under way, its link does that.
        """
        with self._changing:
            if self._link is not None:
                return
        if self._cancelled:
            error = error_of(1, LOCALLY_CANCELLED)
        elif left_of(self._ends) == 0.0:
            error = too_late()
        else:
            error = error_of(1, CLOSED)
        self._end(None, error)

    def _end(self, message: Any, error: InferenceServerException | None) -> None:
        with self._changing:
            if self._over:
                return
            self._over = True
        if self._alarm is not None:
            self._channel.timers.forget(self._alarm)
        if self._next is not None:
            self._channel.attempts.forget(self._next)
        self._tell_begun()
        self._listener.ended(message, error)

    def cancel(self) -> None:
        """Cancel the call: the callback gets CANCELLED, unless the response is already here."""
        if self._forks != self._channel.forks:
            return  # the call is the parent process's
        with self._changing:
            self._cancelled = True
            call, link = self._call, self._link
        if link is not None and call is not None:
            link.give_up(call)
        elif self._alarm is not None:
            with suppress(InferenceServerException):  # without a thread, the call ends at its deadline
                self._channel.timers.at(0.0, self._due)


def _after_fork() -> None:
    for channel in list(forking):
        channel.forked()


os.register_at_fork(after_in_child=_after_fork)
