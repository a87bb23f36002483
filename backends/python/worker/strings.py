"""BYTES tensors: each element follows its length in four bytes, least significant first."""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Any

from .errors import TritonModelException

if TYPE_CHECKING:
    import numpy as np

_native: Any
try:
    from . import _strings as _native  # built for the server's own interpreter only
except ImportError:
    _native = None

_LENGTH = Struct("<I")
LONGEST = 0xFFFFFFFF


def pack(elements: list[Any]) -> bytes:
    """The encoded tensor of these elements; others than bytes and str are converted to str, as in Triton.

    Raises:
        TritonModelException: an element is longer than 4 GiB, which its length cannot express.
    """
    encoded = [element if element.__class__ is bytes else _encoded(element) for element in elements]
    for element in encoded:
        if len(element) > LONGEST:
            raise TritonModelException(f"an element of a BYTES tensor has {len(element)} bytes, at most {LONGEST} fit")
    return _native.pack(encoded) if _native is not None else pack_slowly(encoded)


def _encoded(element: Any) -> bytes:
    if isinstance(element, (bytes, bytearray, memoryview)):
        return bytes(element)
    return str(element).encode()


def pack_slowly(elements: list[bytes]) -> bytes:
    """Pack elements that are bytes, in Python."""
    length_of = _LENGTH.pack
    return b"".join([part for element in elements for part in (length_of(len(element)), element)])


def unpack(data: Any) -> list[bytes]:
    """The elements of an encoded tensor.

    Raises:
        TritonModelException: the data ends within an element.
    """
    elements = _native.unpack(data) if _native is not None else None
    return unpack_slowly(data) if elements is None else elements  # the slow form also finds the error


def unpack_slowly(data: Any) -> list[bytes]:
    """Unpack elements, in Python."""
    data = bytes(data)
    size = len(data)
    length_at = _LENGTH.unpack_from
    elements = []
    at = 0
    while at < size:
        if at + 4 > size:
            raise TritonModelException("Invalid bytes tensor data: incomplete length field")
        end = at + 4 + length_at(data, at)[0]
        if end > size:
            raise TritonModelException("Invalid bytes tensor data: string extends beyond buffer")
        elements.append(data[at + 4 : end])
        at = end
    return elements


def pack_array(array: np.ndarray[Any, Any]) -> bytes:
    """The encoded tensor of an array of objects or of fixed-length bytes."""
    return pack(array.ravel().tolist())


def unpack_array(data: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """An array of bytes objects of this shape.

    Raises:
        TritonModelException: the data has another number of elements.
    """
    import numpy as np

    elements = unpack(data)
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    try:
        return array.reshape(shape)
    except ValueError:
        raise TritonModelException(f"a BYTES tensor of shape {list(shape)} has {len(elements)} elements") from None


# ---------------------------------------------------------------------------------------------------------------------
# As triton_python_backend_utils has them


def serialize_byte_tensor(input_tensor: np.ndarray[Any, Any]) -> bytes | tuple[()] | None:
    """The encoded tensor of an array of objects or of fixed-length bytes, in C order.

    Returns:
        An empty tuple for an array without elements, None for one of another type.
    """
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype.kind not in "OS":
        return None
    return pack_array(input_tensor)


def deserialize_bytes_tensor(encoded_tensor: bytes | memoryview) -> np.ndarray[Any, Any]:
    """A 1-D array of bytes objects."""
    import numpy as np

    elements = unpack(encoded_tensor)
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array
