"""Responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import parameters as _parameters
from .errors import TritonError, TritonModelException
from .tensor import Tensor

FINAL = 1
"""TRITONSERVER_RESPONSE_COMPLETE_FINAL: no response comes after this one."""


def require_tensors(values: Sequence[object], none: str, *about: str) -> None:
    """Check that a list holds nothing but tensors.

    Raises:
        TritonModelException: with the text `none`, into which `about` is put, for a None.
        TypeError: for anything else.
    """
    for value in values:
        if not isinstance(value, Tensor):
            if value is None:
                raise TritonModelException(none.format(*about))
            raise TypeError(f"a list of Tensor objects is expected, found {type(value).__name__}")


class InferenceResponse:
    """A response: of the model, or to its call to another model.

    Args:
        output_tensors: its outputs, none for an error.
        error: why there are none.
        parameters: str keys, values of bool, int, str or float.

    Raises:
        TritonModelException: an output is None, or a parameter is of a type that the protocol does not have.
        TypeError: an output is no Tensor, or the error no TritonError.
    """

    __slots__ = ("_error", "_outputs", "_parameters")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> None:
        outputs = list(output_tensors)
        for tensor in outputs:
            if tensor.__class__ is not Tensor:
                require_tensors(outputs, "Output tensor for inference response should not be empty.")
                break
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"InferenceResponse expects a TritonError as its error, got {type(error).__name__}")
        self._outputs = outputs
        self._error = error
        self._parameters = None if parameters is None else _parameters.checked(parameters)

    def output_tensors(self) -> list[Tensor]:
        """The outputs of the response."""
        return self._outputs

    def has_error(self) -> bool:
        """Whether this is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """The error; None if there is none."""
        return self._error

    def parameters(self) -> str:
        """The parameters as JSON text: `json.loads` makes a dictionary of them."""
        return _parameters.as_json(self._parameters)

    def __repr__(self) -> str:
        return f"InferenceResponse({self._error if self._error is not None else self._outputs!r})"
