"""Parameters of requests and responses: a model gives a dictionary and reads JSON text, as in Triton."""

from __future__ import annotations

from typing import Any

from .errors import TritonModelException


def checked(parameters: dict[str, Any] | None) -> dict[str, Any] | None:
    """The parameters that a model gives; None for none at all.

    Floats are accepted, which Triton refuses although the protocol carries them.

    Raises:
        TritonModelException: the value is no dictionary, or a key or value has a type that the protocol does not have.
    """
    if parameters is None:
        return None
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect dict, got {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, (bool, int, str, float)):
            raise TritonModelException(
                f"Expect parameters values to have type bool/int/str, found type {type(value)} of '{key}' (float is "
                "taken as well)"
            )
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise TritonModelException(f"parameter '{key}' is {value}, which no integer of 64 bits can be")
    return dict(parameters) or None


def as_json(parameters: dict[str, Any] | None) -> str:
    """The JSON text of parameters."""
    if not parameters:
        return "{}"
    import json

    return json.dumps(parameters)
