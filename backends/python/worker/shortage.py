"""Replaces responses that got no memory by errors, in the record of a batch.

The other responses of the batch stay the same. INLINE data has an offset in the record, which changes when responses
before it become longer or shorter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from . import protocol as p

SHORT = "no shared memory"
"""The short text, used when a longer one for each response does not fit."""


def error_response(code: int, text: str) -> bytes:
    """An error response, in the form of a record."""
    encoded = text.replace("\0", "\\0").encode("utf-8", "replace")  # the server reads the text up to a zero byte
    total = p.align(p.RESPONSE_HEAD.size + len(encoded))
    head = p.RESPONSE_HEAD.pack(p.STATUS_ERROR, code, 0, len(encoded), 0, total)
    return (head + encoded).ljust(total, b"\0")


def without(record: bytes, places: Mapping[int, str]) -> bytes:
    """The record with each response that contains one of these places replaced by an error with this text."""
    responses = _responses(record)
    errors: dict[int, bytes] = {}
    number = 0
    for place in sorted(places):
        while number + 1 < len(responses) and responses[number + 1] <= place:
            number += 1
        errors.setdefault(number, error_response(p.CODE_INTERNAL, places[place]))
    return _replaced(record, responses, errors)


def fitting(record: bytes, limit: int, text: str) -> bytes:
    """The record with its largest responses replaced by this error until it has at most `limit` bytes.

    It has more if even an error for each response does not fit.
    """
    responses = _responses(record)
    sizes = [end - begin for begin, end in zip(responses, [*responses[1:], len(record)])]
    for error in (error_response(p.CODE_INTERNAL, each) for each in (text, SHORT)):
        chosen: dict[int, bytes] = {}
        excess = len(record) - limit
        for number in _largest(sizes, len(error)):
            if excess <= 0:
                break
            chosen[number] = error
            excess -= sizes[number] - len(error)
        if excess <= 0:
            break
    return _replaced(record, responses, chosen)


def _largest(sizes: Collection[int], least: int) -> list[int]:
    """The indices of the sizes above `least`, the largest first."""
    larger = [(size, number) for number, size in enumerate(sizes) if size > least]
    return [number for _, number in sorted(larger, reverse=True)]


def _responses(record: bytes) -> list[int]:
    """The offset of each response."""
    found = []
    at = 0
    while at < len(record):
        found.append(at)
        at += p.RESPONSE_HEAD.unpack_from(record, at)[-1]
    return found


def _replaced(record: bytes, responses: list[int], errors: Mapping[int, bytes]) -> bytes:
    parts = []
    size = 0
    for number, (begin, end) in enumerate(zip(responses, [*responses[1:], len(record)])):
        part = errors.get(number) or _moved(record[begin:end], size - begin)
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _moved(response: bytes, by: int) -> bytes:
    """A response moved by `by` bytes."""
    if by == 0:
        return response
    moved = bytearray(response)
    at = p.RESPONSE_HEAD.size
    for _ in range(p.RESPONSE_HEAD.unpack_from(response)[2]):
        index, datatype, rank, place, offset, size = p.TENSOR.unpack_from(response, at)
        if place == p.INLINE:
            p.TENSOR.pack_into(moved, at, index, datatype, rank, place, offset + by, size)
        at += p.TENSOR.size + 8 * rank
    return bytes(moved)
