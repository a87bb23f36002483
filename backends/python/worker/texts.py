"""Names and messages that models give."""

from __future__ import annotations


def text_of(value: object, what: str) -> str:
    """A text as a str. As in Triton, bytes are accepted, too: an element of a BYTES tensor may name a model.

    Raises:
        TypeError: the value is neither; `what` names it in the text.
        UnicodeDecodeError: the bytes are not UTF-8.
    """
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (bytes, bytearray)):
        return value.decode()
    raise TypeError(f"{what} must be a str, got {type(value).__name__}")
