"""The content of requests. `calls` has requests that a model makes, `received` those that it receives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import parameters as _parameters
from .errors import TritonModelException
from .memory import ANY_MEMORY, PreferredMemory
from .response import require_tensors
from .tensor import Tensor
from .texts import text_of

SEQUENCE_START = 1
SEQUENCE_END = 2
RELEASE_ALL = 1
RELEASE_RESCHEDULE = 2

NOT_EMPTY = "for request with id '{}' and model name '{}' should not be empty."


class InferenceTrace:
    """The trace of a request; pass it to the requests made for it, `trace=request.trace()`."""

    __slots__ = ("_context", "_key")

    def __init__(self, key: int = 0, context: str = "") -> None:
        self._key = key
        self._context = context

    def get_context(self) -> str | None:
        """The trace's context as JSON text with a W3C `traceparent`; None if the request is not traced."""
        return self._context or None


NO_TRACE = InferenceTrace()


class Request:
    """The content of a request to a model.

    Args:
        request_id: a name for the request; by default the one of the request being executed.
        correlation_id: the sequence that it belongs to: an int or str; 0 or "" for none.
        inputs: its inputs.
        requested_output_names: the outputs wanted; all of them if the list is empty.
        model_name: the called model.
        model_version: its version; -1 for the latest.
        flags: TRITONSERVER_REQUEST_FLAG_SEQUENCE_START and _END.
        timeout: how long the request may wait, in microseconds; 0 for no limit of its own.
        preferred_memory: where the outputs are wanted.
        trace: the trace that the request belongs to; by default the one of the request being executed.
        parameters: str keys, values of bool, int, str or float.
        priority: 1 is the highest; 0 for the model's default.

    Raises:
        TritonModelException: an input is None, an output's name is empty, or a parameter or the correlation id is of a
            type that the protocol does not have.
        TypeError: an input is no Tensor, or a name is no str.
    """

    __slots__ = (
        "_correlation_id",
        "_flags",
        "_inputs",
        "_model_name",
        "_model_version",
        "_outputs",
        "_parameters",
        "_preferred_memory",
        "_priority",
        "_request_id",
        "_timeout",
        "_trace",
    )

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: dict[str, Any] | None = None,
        priority: int = 0,
    ) -> None:
        if correlation_id is None:
            raise TypeError("InferenceRequest expects an int or str as its correlation_id, got None")
        if not isinstance(correlation_id, (int, str)):
            raise TritonModelException("Correlation ID must be integer or string")
        model_name = text_of(model_name, "the model_name of an InferenceRequest")
        request_id = text_of(request_id, "the request_id of an InferenceRequest")
        if not model_name:
            raise TypeError("InferenceRequest expects a model_name")
        self._inputs = list(inputs)
        require_tensors(self._inputs, "Input tensor " + NOT_EMPTY, request_id, model_name)
        self._outputs = [text_of(name, "each of requested_output_names") for name in requested_output_names]
        if "" in self._outputs:
            raise TritonModelException("Requested output name " + NOT_EMPTY.format(request_id, model_name))
        self._request_id = request_id
        self._correlation_id = correlation_id
        self._model_name = model_name
        self._model_version = int(model_version)
        self._flags = int(flags)
        self._timeout = int(timeout)
        self._priority = int(priority)
        self._preferred_memory = ANY_MEMORY if preferred_memory is None else preferred_memory
        self._trace = NO_TRACE if trace is None else trace
        self._parameters = None if parameters is None else _parameters.checked(parameters)

    # -----------------------------------------------------------------------------------------------------------------
    # Content

    def inputs(self) -> list[Tensor]:
        """The inputs of the request; optional ones may be missing."""
        return self._inputs

    def request_id(self) -> str:
        """The id of the request; empty if the client gave none."""
        return self._request_id

    def correlation_id(self) -> int | str:
        """The sequence that it belongs to; 0 for none."""
        return self._correlation_id

    def requested_output_names(self) -> list[str]:
        """The outputs wanted."""
        return list(self._outputs)

    def model_name(self) -> str:
        """The name of the called model. (Not in Triton.)"""
        return self._model_name

    def model_version(self) -> int:
        """The version of the called model; -1 for the latest. (Not in Triton.)"""
        return self._model_version

    def preferred_memory(self) -> PreferredMemory:
        """Where the outputs are wanted. (Not in Triton.)"""
        return self._preferred_memory

    def flags(self) -> int:
        """TRITONSERVER_REQUEST_FLAG_SEQUENCE_START and _END."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """Set the flags of a request that the model is to make."""
        self._flags = int(flags)

    def timeout(self) -> int:
        """How long the request may wait, in microseconds; 0 for no limit."""
        return self._timeout

    def priority(self) -> int:
        """1 is the highest; 0 for the model's default. (Not in Triton.)"""
        return self._priority

    def parameters(self) -> str:
        """The parameters as JSON text: `json.loads` makes a dictionary of them."""
        return _parameters.as_json(self._parameters)

    def trace(self) -> InferenceTrace:
        """The trace that it belongs to."""
        return self._trace

    def __repr__(self) -> str:
        return f"InferenceRequest({self._model_name!r}, id {self._request_id!r}, {self._inputs!r})"
