"""Requests that a model receives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .calls import InferenceRequest
from .errors import TritonModelException
from .request import RELEASE_ALL, RELEASE_RESCHEDULE
from .sender import InferenceResponseSender, make_sender

if TYPE_CHECKING:
    from .runtime import Runtime
    from .tensor import Tensor


class ReceivedRequest(InferenceRequest):
    """A request that a model receives. `serialization` makes it, and sets the attributes that are read on demand."""

    __slots__ = ("_decoupled", "_key", "_release", "_runtime", "_sender", "_states", "_wanted")

    _decoupled: bool
    _key: int
    _release: int
    _runtime: Runtime
    _sender: InferenceResponseSender | None
    _states: list[Tensor]  # states of a rescheduled request; unset for any other
    _wanted: frozenset[int] | None  # indices of the requested outputs; None for all

    def __init__(self) -> None:
        raise TypeError("requests of this class come from the server")

    def get_response_sender(self) -> InferenceResponseSender:
        """The sender of responses to this request, always the same one."""
        sender = self._sender
        if sender is None:
            sender = self._sender = make_sender(self._runtime, self._key, self._decoupled, self._wanted)
        return sender

    def is_cancelled(self) -> bool:
        """Whether the response is no longer wanted."""
        return self._runtime.channel.is_cancelled(self._key)

    def set_release_flags(self, flags: int) -> None:
        """Set the fate of the request after `execute` returns."""
        if flags not in (RELEASE_ALL, RELEASE_RESCHEDULE):
            raise TritonModelException(f"Unable to set release flags. Unsupported flag {flags} provided.")
        self._release = flags
