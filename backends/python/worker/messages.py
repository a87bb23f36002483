"""ModelInferRequest and ModelInferResponse on the wire, for calls to other models.

https://protobuf.dev/programming-guides/encoding/, and the field numbers of `proto/grpc_service.proto`. The code is
hand-written because a model's environment need not have protobuf, and because it accesses tensors in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from struct import Struct
from typing import Any

from .datatypes import BYTES, NAMES, SIZES
from .errors import TritonModelException
from .tensor import Tensor, received, wire_bytes

_DOUBLE = Struct("<d")

VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5

COPIED = 4096  # bytes up to which copying an array costs less than a view
REMEMBERED = 256  # heads of messages, each of some hundred bytes


def varint(number: int) -> bytes:
    """An integer of 64 bits; a negative one as its two's complement."""
    number &= 0xFFFFFFFFFFFFFFFF
    if number < 0x80:
        return bytes((number,))
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _delimited(field: int, data: bytes) -> bytes:
    return varint(field << 3 | DELIMITED) + varint(len(data)) + data


def _text(field: int, text: str) -> bytes:
    return _delimited(field, text.encode()) if text else b""


def _parameter(name: str, value: bool | int | str | float) -> bytes:
    if isinstance(value, bool):
        encoded = b"\x08" + varint(value)
    elif isinstance(value, int):
        encoded = (b"\x10" if value < 1 << 63 else b"\x28") + varint(value)
    elif isinstance(value, str):
        encoded = _delimited(3, value.encode())
    else:
        encoded = b"\x21" + _DOUBLE.pack(value)
    return _delimited(4, _text(1, name) + _delimited(2, encoded))


def encode_request(
    model_name: str,
    model_version: str,
    request_id: str,
    parameters: Mapping[str, bool | int | str | float],
    inputs: list[Tensor],
    outputs: list[str],
) -> list[Any]:
    """The pieces of a ModelInferRequest in order: bytes, and the inputs' data in place."""
    signature = [(tensor._name, tensor._dtype, tensor._shape) for tensor in inputs]
    pieces: list[Any] = [_request_head(model_name, model_version, tuple(outputs), *signature)]
    if request_id:
        pieces.append(_text(3, request_id))
    for name, value in parameters.items():
        pieces.append(_parameter(name, value))
    for tensor in inputs:
        array = tensor._array
        if array is not None and array.nbytes <= COPIED and tensor._dtype != BYTES:
            data = array.tobytes()
            pieces += (_raw_head(len(data)), data)
        else:
            view = memoryview(wire_bytes(tensor))
            pieces.append(_raw_head(view.nbytes))
            if view.nbytes:
                pieces.append(view.cast("B"))
    return pieces


# A model repeatedly calls the same models with the same shapes.


@lru_cache(REMEMBERED)
def _request_head(
    model_name: str, model_version: str, outputs: tuple[str, ...], *inputs: tuple[str, int, tuple[int, ...]]
) -> bytes:
    """The beginning of a request, without its id, parameters and data."""
    head = [_text(1, model_name), _text(2, model_version)]
    for name, datatype, dims in inputs:
        shape = b"".join(map(varint, dims))
        head.append(_delimited(5, _text(1, name) + _text(2, NAMES[datatype]) + _delimited(3, shape)))
    head += [_delimited(6, _text(1, name)) for name in outputs]
    return b"".join(head)


@lru_cache(REMEMBERED)
def _raw_head(size: int) -> bytes:
    return b"\x3a" + varint(size)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7


def _fields(data: memoryview, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Field number, wire type, the value of a VARINT or the offset of another value, and the end of the value."""
    while at < end:
        key, at = _read_varint(data, at)
        kind = key & 7
        if kind == VARINT:
            value, at = _read_varint(data, at)
            yield key >> 3, kind, value, at
        elif kind == DELIMITED:
            size, at = _read_varint(data, at)
            yield key >> 3, kind, at, at + size
            at += size
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
            yield key >> 3, kind, at, at + size
            at += size
        else:
            raise TritonModelException(f"a response has the wire type {kind}, which is none of protobuf's")


def _string(data: memoryview, at: int, end: int) -> str:
    return str(data[at:end], "utf-8")


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _read_parameter(data: memoryview, at: int, end: int) -> tuple[str, bool | int | str | float]:
    name = ""
    value: bool | int | str | float = False
    for field, _, start, stop in _fields(data, at, end):
        if field == 1:
            name = _string(data, start, stop)
        elif field == 2:
            for choice, _, first, last in _fields(data, start, stop):
                if choice == 1:
                    value = bool(first)
                elif choice == 2:
                    value = _signed(first)
                elif choice == 3:
                    value = _string(data, first, last)
                elif choice == 4:
                    value = _DOUBLE.unpack_from(data, first)[0]
                elif choice == 5:
                    value = first
    return name, value


def _read_output(data: memoryview, at: int, end: int) -> tuple[str, int, tuple[int, ...]]:
    name = ""
    datatype = 0
    shape: list[int] = []
    for field, kind, start, stop in _fields(data, at, end):
        if field == 1:
            name = _string(data, start, stop)
        elif field == 2:
            datatype = NAMES.index(_string(data, start, stop))
        elif field == 3 and kind == VARINT:
            shape.append(_signed(start))
        elif field == 3:
            while start < stop:
                dim, start = _read_varint(data, start)
                shape.append(_signed(dim))
    return name, datatype, tuple(shape)


class _Head:
    """The bytes before the data, which end it, of a response with one output and no parameters."""

    __slots__ = ("head", "output", "size")

    def __init__(self, head: bytes, output: tuple[str, int, tuple[int, ...]]) -> None:
        self.head = head
        self.output = output
        self.size = len(head)


_heads: dict[int, _Head] = {}  # by size of the whole response: the last such head


def _remember(size: int, head: _Head) -> None:
    if len(_heads) >= REMEMBERED:
        _heads.clear()
    _heads[size] = head


def decode_response(
    data: memoryview, buffer: Any, base: int
) -> tuple[list[Tensor], dict[str, bool | int | str | float]]:
    """The outputs and parameters of a ModelInferResponse.

    Args:
        data: the message.
        buffer: the memory of the message; the tensors keep it alive.
        base: where in the buffer the message begins.
    """
    known = _heads.get(len(data))
    if known is not None and bytes(data[: known.size]) == known.head:
        name, datatype, shape = known.output
        tensor = received(name, datatype, shape, buffer, base + known.size, len(data) - known.size)
        return [_aligned(tensor)], {}
    outputs: list[tuple[str, int, tuple[int, ...]]] = []
    raw: list[tuple[int, int]] = []
    parameters: dict[str, bool | int | str | float] = {}
    for field, _, start, stop in _fields(data, 0, len(data)):
        if field == 4:
            name, value = _read_parameter(data, start, stop)
            parameters[name] = value
        elif field == 5:
            outputs.append(_read_output(data, start, stop))
        elif field == 6:
            raw.append((start, stop - start))
    if len(raw) != len(outputs):
        raise TritonModelException(f"a response has {len(outputs)} outputs and the data of {len(raw)}")
    if len(outputs) == 1 and not parameters and sum(raw[0]) == len(data):
        _remember(len(data), _Head(bytes(data[: raw[0][0]]), outputs[0]))
    tensors = []
    for (name, datatype, shape), (start, size) in zip(outputs, raw):
        tensors.append(_aligned(received(name, datatype, shape, buffer, base + start, size)))
    return tensors, parameters


def _aligned(tensor: Tensor) -> Tensor:
    """A tensor with aligned elements; in a message they may lie at any address."""
    size = SIZES[tensor._dtype]
    if size > 1 and tensor._offset % size:
        data = bytearray(memoryview(tensor._buffer)[tensor._offset : tensor._offset + tensor._size])
        return received(tensor._name, tensor._dtype, tensor._shape, data, 0, tensor._size)
    return tensor
