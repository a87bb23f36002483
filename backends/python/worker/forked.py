"""Processes that a model forks: `multiprocessing` as it starts processes on Linux, `os.fork`, loaders of data.

A fork has its parent's sockets, which two must not read. So each gets a socket of its own to its parent, where a thread
does for it what it asks: calls to other models, logs, metrics. Requests are answered by the process that got them.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .errors import TritonError, TritonModelException
from .response import InferenceResponse
from .runtime import PARENT

if TYPE_CHECKING:
    from .calls import Call
    from .channel import Channel
    from .link import Link
    from .request import InferenceRequest


class Forks:
    """Sees to the forks of this process, from now on.

    Args:
        link: that of the process.
        channel: does for forks what they ask.
        left: called in a fork.
    """

    def __init__(self, link: Link, channel: Channel, left: Callable[[Parent], None]) -> None:
        self._link = link
        self._channel = channel
        self._left = left
        self._lock = threading.Lock()  # one fork at a time
        self._pair: tuple[socket.socket, socket.socket]
        self._ends: set[socket.socket] = set()  # the parent's
        os.register_at_fork(before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child)

    def _before(self) -> None:
        self._lock.acquire()
        self._pair = socket.socketpair()

    def _in_parent(self) -> None:
        end, its_end = self._pair
        its_end.close()
        self._ends.add(end)
        self._lock.release()
        threading.Thread(target=self._serve, args=(end,), name="inferd-fork", daemon=True).start()

    def _in_child(self) -> None:
        end, its_end = self._pair
        for other in (end, *self._ends):
            other.close()  # else they would not end with their other side
        self._ends.clear()
        self._lock.release()
        self._link.forked = True
        self._left(Parent(its_end))

    def _serve(self, end: socket.socket) -> None:
        from multiprocessing.connection import Connection

        connection = Connection(os.dup(end.fileno()))
        try:
            while True:
                method, parent, arguments = connection.recv()
                PARENT.set(parent)
                try:
                    connection.send((getattr(self, "_" + method)(*arguments), None))
                except Exception as error:
                    connection.send((None, error))
        except (EOFError, OSError):  # the fork has ended
            pass
        finally:
            connection.close()
            self._ends.discard(end)
            end.close()

    # -- what forks ask

    def _exchange(self, request: InferenceRequest) -> InferenceResponse:
        from .calls import exchange

        return exchange(request)

    def _collect(self, request: InferenceRequest) -> list[InferenceResponse]:
        from .calls import ResponseIterator, start

        return list(ResponseIterator(start(request, True)))

    def _ask(self, question: str, arguments: Mapping[str, Any]) -> Any:
        return self._channel.ask(question, arguments)

    def _metric(self, change: Mapping[str, Any]) -> None:
        self._channel.metric(change)

    def _log(self, level: int, text: str) -> None:
        self._channel.log(level, text)


class Parent:
    """What a fork does for its model: it asks its parent, for one thing at a time.

    Args:
        end: its socket to the parent.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._connection: Any = None
        self._lock = threading.Lock()

    def _do(self, method: str, parent: tuple[int, str], *arguments: Any) -> Any:
        """Have the parent do it.

        Raises:
            TritonModelException: the parent is gone; or what it has raised.
        """
        from multiprocessing.connection import Connection

        try:
            with self._lock:
                if self._connection is None:
                    self._connection = Connection(self._end.detach())
                self._connection.send((method, parent, arguments))
                result, error = self._connection.recv()
        except (EOFError, OSError):
            raise TritonModelException("the process of the model that has forked this one is gone") from None
        if error is not None:
            raise error
        return result

    def exchange(self, request: InferenceRequest, parent: tuple[int, str]) -> InferenceResponse:
        """See Channel."""
        response: InferenceResponse = self._do("exchange", parent, request)
        return response

    def call(self, request: InferenceRequest, call: Call, parent: tuple[int, str]) -> None:
        """See Channel; a decoupled model's responses come together."""
        threading.Thread(target=self._call, args=(request, call, parent), daemon=True).start()

    def _call(self, request: InferenceRequest, call: Call, parent: tuple[int, str]) -> None:
        try:
            if call.decoupled:
                responses = self._do("collect", parent, request)
            else:
                responses = [self._do("exchange", parent, request)]
        except Exception as error:
            responses = [InferenceResponse(error=TritonError(str(error)))]
        for index, response in enumerate(responses):
            call.deliver(response, index + 1 == len(responses))

    def wait(self, call: Call) -> None:
        """See Channel."""
        call.prepare()
        while not call.done:
            call.sleep()

    def ask(self, question: str, arguments: Mapping[str, Any]) -> Any:
        """See Channel."""
        return self._do("ask", PARENT.get(), question, dict(arguments))

    def metric(self, change: Mapping[str, Any]) -> None:
        """See Channel."""
        if not change["op"].startswith("delete"):  # the parent's go with the parent's objects
            self._do("metric", PARENT.get(), dict(change))

    def log(self, level: int, text: str) -> None:
        """See Channel."""
        self._do("log", PARENT.get(), level, text)
