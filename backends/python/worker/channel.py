"""The interface between a model's runtime and a transport to the server.

A worker has a channel on sockets and shared memory; a process that the model has forked has one to its parent.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .request import Request
    from .response import InferenceResponse


class Waiter:
    """Waits for an event of a channel."""

    __slots__ = ("_event", "done")

    done: bool
    _event: threading.Event | None  # made when the waiter must sleep, which is rare

    def __init__(self) -> None:
        self.done = False
        self._event = None

    def wake(self) -> None:
        """Wake the waiter: its result has come, or it must read for the others."""
        if self._event is not None:
            self._event.set()

    def finish(self) -> None:
        """The answer has come."""
        self.done = True
        self.wake()

    def prepare(self) -> None:
        """Prepare to sleep: from now on no `wake` is lost."""
        if self._event is None:
            self._event = threading.Event()

    def sleep(self) -> None:
        """Wait for `wake`, after `prepare`."""
        assert self._event is not None
        self._event.wait()
        self._event.clear()


class Call(Waiter, abc.ABC):
    """One call to another model under way, as a channel knows it.

    Attributes:
        number: the channel's number of the call.
        model: the called model.
        decoupled: more than one response may come.
        large: its request does not fit into a packet.
        final: the last response has been delivered.
        blocking: its thread waits for the one response.
    """

    __slots__ = ("decoupled", "final", "large", "model", "number")

    blocking = False

    def __init__(self, model: str, decoupled: bool) -> None:
        super().__init__()
        self.number = 0
        self.model = model
        self.decoupled = decoupled
        self.large = False
        self.final = False

    @abc.abstractmethod
    def deliver(self, response: InferenceResponse, final: bool) -> None:
        """A response has come. Called by the channel, one response at a time."""


class Channel(abc.ABC):
    """The way to the server. Every method may be called from any thread, and raises TritonModelException.

    The channel gives each request a key, by which its methods name the request.

    Attributes:
        name: of the model's instance, for messages.
        output_index: indices of the model's outputs by name.
    """

    name: str
    output_index: Mapping[str, int]

    @abc.abstractmethod
    def respond(self, key: int, response: InferenceResponse | None, final: bool, wanted: frozenset[int] | None) -> None:
        """Send a response to a request; None with `final` only ends it. May wait for a slow client.

        Args:
            key: of the request.
            response: to it.
            final: no other response follows.
            wanted: indices of the requested outputs; None for all.
        """

    @abc.abstractmethod
    def respond_written(self, key: int, record: bytes, final: bool) -> None:
        """Send a response that is its record already, and fits into a packet."""

    @abc.abstractmethod
    def is_cancelled(self, key: int) -> bool:
        """Whether no client waits for responses to this request any more."""

    @abc.abstractmethod
    def call(self, request: Request, call: Call, parent: tuple[int, str]) -> None:
        """Send a request to another model; give its responses to the call as they come, from any thread.

        Args:
            request: the request.
            call: takes the responses.
            parent: key and id of the request on whose behalf this one is made; the key is 0 for none. This one inherits
                deadline, cancellation, trace and id where it has none of its own.

        An error after sending is delivered as a response.

        Raises:
            TritonModelException: the request was not sent, and nothing is delivered.
        """

    @abc.abstractmethod
    def cancel(self, call: Call) -> None:
        """Tell the server that no caller waits for a call any more."""

    @abc.abstractmethod
    def consumed(self, call: Call) -> None:
        """Tell the server that the model has taken one response of a call, so it may send another."""

    @abc.abstractmethod
    def wait(self, call: Call) -> None:
        """Wait until a response of the call has come."""

    def expect(self) -> None:
        """From now on, expect responses for which no thread waits."""
        return

    @abc.abstractmethod
    def ask(self, question: str, arguments: Mapping[str, Any]) -> Any:
        """Ask the server for something other than inference, and wait for the answer.

        Questions, their arguments and results are those of `protocol`, CALL.

        Raises:
            TritonModelException: the server refused; with its reason.
        """

    @abc.abstractmethod
    def metric(self, change: Mapping[str, Any]) -> None:
        """Report one change of a metric, as in `protocol`, METRIC."""

    @abc.abstractmethod
    def log(self, level: int, text: str, *, always: bool = False) -> None:
        """Write to the server's log, at one of the LOG levels of `protocol`; `always`: without a limit of rate."""
