"""The synchronous side: links to one server, and calls that threads wait for or are told of."""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Any, Protocol

from inferd_client._calling import (
    INTERNAL,
    TRANSPARENT,
    UNAVAILABLE,
    RetryOptions,
    error_of,
    failure,
    plain,
)
from inferd_client._connecting import Options, Target, connect
from inferd_client._native.link import Call, Link
from inferd_client._native.messages import Content
from inferd_client.utils import InferenceServerException

Pieces = list[bytes | Content]
HeaderList = list[tuple[bytes, bytes]]

_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


class Told(Protocol):
    """Who is told of the end of a call."""

    def ended(self, message: Any, error: InferenceServerException | None) -> None:
        """With the bytes of the answer, or what went wrong."""


class Channel:
    """Links to a server, made when they are needed.

    Args:
        target: the server.
        options: how links are made.
        connections: how many; a call takes the one with the fewest in flight.
        retries: see RetryOptions; None: failures are the caller's.
    """

    def __init__(self, target: Target, options: Options, connections: int = 1, retries: RetryOptions | None = None):
        self.target = target
        self.options = options
        self._retries = retries
        self._links: list[Link | None] = [None] * connections
        self._connecting = threading.Lock()
        self._closed = False
        _channels.add(self)

    def link(self, timeout: float | None = None) -> Link:
        """One that takes calls.

        Raises:
            InferenceServerException: no connection can be made, or the client is closed.
        """
        best = self._links[0]
        if len(self._links) > 1:
            best = min(self._links, key=_busy)
        if best is not None and best.usable:
            return best
        if self._closed:
            raise error_of(1, "the client is closed")
        with self._connecting:
            for i, each in enumerate(self._links):
                if each is None or not each.usable:
                    return self._connected(i, timeout)
        return self.link(timeout)

    def _connected(self, place: int, timeout: float | None) -> Link:
        try:
            link = connect(self.target, self.options, timeout)
        except TimeoutError:
            raise error_of(4 if timeout is not None else UNAVAILABLE, "Deadline Exceeded") from None
        except OSError as error:
            raise error_of(UNAVAILABLE, f"failed to connect to {self.target.text}: {error.strerror or error}") from None
        self._links[place] = link
        if self.options.keepalive is not None and self.options.keepalive[2]:
            self._attend(link)
        return link

    # ---- calls that are waited for

    def unary(self, headers: HeaderList, pieces: Pieces, timeout: float | None = None) -> Any:
        """Make a call and wait. Returns the bytes of the answer, a buffer.

        Raises:
            InferenceServerException: it failed.
        """
        ends = None if timeout is None else time.monotonic() + timeout
        tried = repeated = 0
        while True:
            left = None if ends is None else max(ends - time.monotonic(), 0.0)
            link = self.link(left)
            call = Call(headers, pieces, left)
            if not link.run(call):
                continue
            status, text = call.status()
            if status == 0:
                return self.answer(call)
            if call.safe_to_repeat and repeated < TRANSPARENT and not self._closed:
                repeated += 1
                continue
            tried += 1
            pause = self._retries.pause(tried, status, call.details) if self._retries is not None else None
            if pause is None or (ends is not None and time.monotonic() + pause >= ends):
                raise error_of(status, text, call.details)
            time.sleep(pause)

    def answer(self, call: Call) -> Any:
        """The bytes of the only message of a call that ended with OK."""
        found = call.message()
        if found is None:
            raise error_of(INTERNAL, "the answer is not one message")
        return plain(*found, self.options.limit)

    # ---- calls that one is told of

    def start(self, headers: HeaderList, pieces: Pieces, timeout: float | None, told: Told) -> Pending:
        """Begin a call; its end is told in another thread."""
        pending = Pending(self, headers, pieces, None if timeout is None else time.monotonic() + timeout, told)
        try:
            pending.begin()
        except InferenceServerException as error:
            threading.Thread(target=told.ended, args=(None, error), name="inferd-client").start()
        return pending

    def announced(self, call: Call, timeout: float | None) -> Link:
        """The link on which a call that announces itself was begun."""
        while True:
            link = self.link(timeout)
            self._attend(link)
            if link.start(call):
                return link

    def _attend(self, link: Link) -> None:
        if link.owner is None:
            with self._connecting:
                if link.owner is None:
                    link.owner = threading.Thread(target=link.attend, name="inferd-client", daemon=True)
                    link.owner.start()

    # ---- the end

    def close(self) -> None:
        """End all calls and links."""
        self._closed = True
        links = [link for link in self._links if link is not None]
        self._links = [None] * len(self._links)
        for link in links:
            link.close()
            if link.owner is not None and link.owner is not threading.current_thread():
                link.owner.join()

    def forked(self) -> None:
        """This process is a copy: the links are its parent's."""
        self._links = [None] * len(self._links)
        self._connecting = threading.Lock()


def _busy(link: Link | None) -> float:
    return link.count if link is not None and link.usable else -1


class Pending:
    """A call that one is told of."""

    def __init__(self, channel: Channel, headers: HeaderList, pieces: Pieces, ends: float | None, told: Told) -> None:
        self._channel = channel
        self._headers = headers
        self._pieces = pieces
        self._ends = ends
        self._told = told
        self._repeated = 0
        self._cancelled = False
        self._call: Call | None = None
        self._link: Link | None = None

    def begin(self) -> None:
        """Make the call, or make it again."""
        left = None if self._ends is None else max(self._ends - time.monotonic(), 0.0)
        self._call = Call(self._headers, self._pieces, left, owner=self)
        self._link = self._channel.announced(self._call, left)

    def told(self, call: Call, done: bool) -> None:
        """See Owner of link.pyi."""
        if not done:
            return
        message = error = None
        if call.status()[0] == 0:
            try:
                message = self._channel.answer(call)
            except InferenceServerException as found:
                error = found
        elif call.safe_to_repeat and self._repeated < TRANSPARENT and not self._cancelled:
            self._repeated += 1
            try:
                self.begin()
            except InferenceServerException as found:
                error = found
            else:
                return
        else:
            error = failure(call)
        self._told.ended(message, error)

    def cancel(self) -> None:
        """The caller wants no answer; it is told CANCELLED, unless there is one already."""
        self._cancelled = True
        if self._link is not None and self._call is not None:
            self._link.give_up(self._call)


def _after_fork() -> None:
    for channel in list(_channels):
        channel.forked()


os.register_at_fork(after_in_child=_after_fork)
