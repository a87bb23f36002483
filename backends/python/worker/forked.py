"""Processes that a model forks: by `multiprocessing` on Linux, `os.fork`, data loaders.

A fork has its parent's sockets, but only one process may read them. So each fork gets a socket of its own to its
parent. There a thread executes the fork's orders: calls to other models, logs, metrics. The process that received a
request answers it.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .calls import ResponseIterator, infer, start
from .channel import Call, Channel
from .errors import TritonError, TritonModelException
from .response import InferenceResponse
from .runtime import PARENT, Runtime

if TYPE_CHECKING:
    from .link import Link
    from .request import Request


class Forks:
    """Prepares every later fork of this process: the fork's runtime gets a channel to this process.

    Args:
        link: that of the process.
        runtime: its channel executes the forks' orders.
    """

    def __init__(self, link: Link, runtime: Runtime) -> None:
        self._link = link
        self._runtime = runtime
        self._lock = threading.Lock()  # one fork at a time
        self._pair: tuple[socket.socket, socket.socket] | None = None
        self._ends: set[socket.socket] = set()  # the parent's
        os.register_at_fork(before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child)

    def _before(self) -> None:
        self._lock.acquire()
        try:
            self._pair = socket.socketpair()
        except OSError:  # no descriptors are left: the fork's orders raise an error
            self._pair = None

    def _in_parent(self) -> None:
        pair, self._pair = self._pair, None
        if pair is not None:
            end, its_end = pair
            its_end.close()
            self._ends.add(end)
        self._lock.release()
        if pair is not None:
            try:
                threading.Thread(target=self._serve, args=(end,), name="inferd-fork", daemon=True).start()
            except RuntimeError:  # the limit of threads is reached: the fork's orders raise an error
                self._close(end)

    def _in_child(self) -> None:
        pair, self._pair = self._pair, None
        for other in self._ends:
            other.close()  # otherwise this fork would keep them open
        self._ends.clear()
        its_end = None
        if pair is not None:
            end, its_end = pair
            end.close()
        self._lock.release()
        self._link.forked = True
        self._runtime.channel = Parent(its_end, self._runtime.channel)

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
            self._close(end)

    def _close(self, end: socket.socket) -> None:
        self._ends.discard(end)
        end.close()

    # -- orders of forks

    def _call(self, request: Request, decoupled: bool) -> list[InferenceResponse]:
        return list(ResponseIterator(start(request, True))) if decoupled else [infer(request)]

    def _ask(self, question: str, arguments: Mapping[str, Any]) -> Any:
        return self._runtime.channel.ask(question, arguments)

    def _metric(self, change: Mapping[str, Any]) -> None:
        self._runtime.channel.metric(change)

    def _log(self, level: int, text: str) -> None:
        self._runtime.channel.log(level, text)


class Parent(Channel):
    """The channel of a fork: it sends orders to its parent, one at a time.

    Args:
        end: its socket to the parent; None: there is none.
        channel: the parent's own; a fork may use only its memory.
    """

    def __init__(self, end: socket.socket | None, channel: Channel) -> None:
        self.name = channel.name
        self.output_index = channel.output_index
        self._end = end
        self._channel = channel
        self._connection: Any = None
        self._lock = threading.Lock()

    def _do(self, method: str, parent: tuple[int, str], *arguments: Any) -> Any:
        """Make the parent call a method.

        Raises:
            TritonModelException: the parent is gone, or the method raised this.
        """
        if self._end is None:
            raise TritonModelException(
                "this process has no connection to its parent, which had no file descriptors left when it forked"
            )
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

    def respond(self, *_: Any) -> None:
        raise TritonModelException(
            "a process that the model has forked cannot answer requests: answer them in the process that received them"
        )

    def respond_written(self, *_: Any) -> None:
        self.respond()

    def is_cancelled(self, key: int) -> bool:
        return self._channel.is_cancelled(key)

    def call(self, request: Request, call: Call, parent: tuple[int, str]) -> None:
        if call.blocking:
            self._call(request, call, parent)
        else:
            threading.Thread(target=self._call, args=(request, call, parent), daemon=True).start()

    def _call(self, request: Request, call: Call, parent: tuple[int, str]) -> None:
        # A decoupled model's responses come together.
        try:
            responses = self._do("call", parent, request, call.decoupled)
        except Exception as error:
            responses = [InferenceResponse(error=TritonError(str(error)))]
        for index, response in enumerate(responses):
            call.deliver(response, index + 1 == len(responses))

    def wait(self, call: Call) -> None:
        call.prepare()
        while not call.done:
            call.sleep()

    def cancel(self, call: Call) -> None:
        """Do nothing: the call ends by itself, as the parent waits for it."""

    def consumed(self, call: Call) -> None:
        """Do nothing: all responses have come."""

    def ask(self, question: str, arguments: Mapping[str, Any]) -> Any:
        return self._do("ask", PARENT.get(), question, dict(arguments))

    def metric(self, change: Mapping[str, Any]) -> None:
        if not change["op"].startswith("delete"):  # the parent's objects own its metrics
            self._do("metric", PARENT.get(), dict(change))

    def log(self, level: int, text: str, *, always: bool = False) -> None:  # noqa: ARG002 (the parent's own text)
        self._do("log", PARENT.get(), level, text)
