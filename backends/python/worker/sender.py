"""The sender with which a model answers a request at any time."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .errors import TritonError, TritonModelException
from .response import FINAL, InferenceResponse

if TYPE_CHECKING:
    from .runtime import Runtime


class InferenceResponseSender:
    """Sends the responses to one request. Safe to use from any thread, also after `execute` has returned.

    A sender that is dropped without a final response answers its request with an error.
    """

    __slots__ = ("__weakref__", "_closed", "_decoupled", "_key", "_lock", "_runtime", "_sent", "_wanted")

    _closed: bool
    _decoupled: bool
    _key: int
    _lock: Any
    _runtime: Runtime
    _sent: int
    _wanted: frozenset[int] | None

    def __init__(self) -> None:
        raise TypeError("an InferenceResponseSender comes from request.get_response_sender()")

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response, or the end of the responses.

        Args:
            response: may be left out where the flags say that this is the end.
            flags: 0 or TRITONSERVER_RESPONSE_COMPLETE_FINAL.

        Raises:
            TritonModelException: unknown flags, nothing to send, the sender has been closed, a second response of a
                model that is not decoupled, or an output that the protocol cannot carry.

        The call blocks while the client of a decoupled model reads more slowly than the model sends.
        """
        if flags not in (0, FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is None and flags == 0:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        if response is not None and not isinstance(response, InferenceResponse):
            raise TypeError(f"send expects an InferenceResponse, got {type(response).__name__}")
        with self._lock:
            self._count(response, flags)
        self._runtime.channel.respond(self._key, response, flags == FINAL, self._wanted)

    def send_written(self, record: bytes, final: bool) -> None:
        """Send a response of a decoupled model that is its record already, and fits into a packet.

        Raises:
            TritonModelException: the sender has been closed.
        """
        with self._lock:
            self._count(None, FINAL if final else 0)
        self._runtime.channel.respond_written(self._key, record, final)

    def _count(self, response: InferenceResponse | None, flags: int) -> None:
        if not self._decoupled:
            if response is not None and self._sent > 0:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send more than one response."
                )
            if response is None and self._sent == 0:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
                )
        if self._closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        self._closed = flags == FINAL
        self._sent += 1

    def is_cancelled(self) -> bool:
        """Whether responses are no longer wanted: the client cancelled, its deadline passed or it disconnected."""
        return self._runtime.channel.is_cancelled(self._key)

    def __del__(self) -> None:
        if not self._closed:
            abandon(self)


def make_sender(runtime: Runtime, key: int, decoupled: bool, wanted: frozenset[int] | None) -> InferenceResponseSender:
    """The sender of the request with this key in the runtime's channel; `wanted` as for `Channel.respond`."""
    sender = InferenceResponseSender.__new__(InferenceResponseSender)
    sender._runtime = runtime
    sender._key = key
    sender._decoupled = decoupled
    sender._closed = False
    sender._sent = 0
    sender._wanted = wanted
    sender._lock = threading.Lock()
    return sender


def abandon(sender: InferenceResponseSender) -> None:
    """Answer for a model that dropped a sender: every request gets a final response."""
    sender._closed = True
    complete = sender._sent and not sender._decoupled
    error = TritonError(
        f"model '{sender._runtime.channel.name}' let go of the request without a final response: call "
        "response_sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL) after the last one"
    )
    response = None if complete else InferenceResponse(error=error)

    def answer() -> None:
        with suppress(TritonModelException):  # a fork cannot answer: its parent does
            sender._runtime.channel.respond(sender._key, response, True, sender._wanted)

    # On a thread of its own: the interpreter may drop a sender at any point, even while its thread holds a lock that
    # sending needs.
    with suppress(RuntimeError):  # the interpreter ends: no client waits any more
        threading.Thread(target=answer, daemon=True).start()


def close(sender: InferenceResponseSender) -> bool:
    """Close a sender, whose request gets another answer; False if the model has sent the final response."""
    with sender._lock:
        was_open, sender._closed = not sender._closed, True
    return was_open


def take_final(sender: InferenceResponseSender, response: InferenceResponse) -> None:
    """Count a response that `execute` returned as the sender's final one.

    Raises:
        TritonModelException: the model has answered already.
    """
    with sender._lock:
        sender._count(response, FINAL)


def reopen(sender: InferenceResponseSender) -> None:
    """Undo `take_final`: the response that `execute` returned is not sent."""
    with sender._lock:
        sender._closed = False
        sender._sent -= 1
