"""Tensors, their datatypes and errors, with the names of `tritonclient.utils`.

Nothing here imports numpy before it is needed.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from inferd_client._native.messages import packed_strings, unpacked_strings

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "InferenceServerException",
    "TRITON_RESERVED_REQUEST_PARAMS",
    "TRITON_RESERVED_REQUEST_PARAMS_PREFIX",
    "deserialize_bytes_tensor",
    "np_to_triton_dtype",
    "raise_error",
    "serialize_byte_tensor",
    "serialized_byte_size",
    "triton_to_np_dtype",
]

TRITON_RESERVED_REQUEST_PARAMS = [
    "sequence_id",
    "sequence_start",
    "sequence_end",
    "priority",
    "timeout",
    "headers",
    "binary_data_output",
]
TRITON_RESERVED_REQUEST_PARAMS_PREFIX = "triton_"

NUMBERS = {
    "BOOL": "bool",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
}
"""Datatypes of the protocol and numpy's names of them."""


class InferenceServerException(Exception):
    """A call that did not succeed.

    Args:
        msg: the error in words.
        status: the gRPC status, such as "StatusCode.UNAVAILABLE"; None where no call was made.
        debug_details: further details.
    """

    def __init__(self, msg: str | None, status: str | None = None, debug_details: Any = None) -> None:
        super().__init__(msg)
        self._msg = msg
        self._status = status
        self._debug_details = debug_details

    def __reduce__(self) -> Any:
        return type(self), (self._msg, self._status, self._debug_details)

    def __str__(self) -> str:
        text = "" if self._msg is None else str(self._msg)
        return text if self._status is None else f"[{self._status}] {text}"

    def message(self) -> str | None:
        """The error in words."""
        return self._msg

    def status(self) -> str | None:
        """The gRPC status, such as "StatusCode.UNAVAILABLE"; None where no call was made."""
        return self._status

    def debug_details(self) -> Any:
        """Further details."""
        return self._debug_details


def raise_error(msg: str) -> NoReturn:
    """Raise an InferenceServerException with this text."""
    raise InferenceServerException(msg) from None


@cache
def _bfloat16() -> Any:
    """numpy's type for BF16: ml_dtypes.bfloat16 if that is installed, else uint16, which has the bits."""
    import numpy as np

    try:
        import ml_dtypes
    except ImportError:
        return np.uint16
    return ml_dtypes.bfloat16


@cache
def triton_to_np_dtype(dtype: str) -> Any:
    """numpy's type for a datatype of the protocol; None: there is none."""
    import numpy as np

    if dtype == "BYTES":
        return np.object_
    if dtype == "BF16":
        return _bfloat16()
    if dtype == "BOOL":
        return bool
    return getattr(np, NUMBERS[dtype]) if dtype in NUMBERS else None


@cache
def _datatypes() -> dict[Any, str]:
    import numpy as np

    found: dict[Any, str] = {np.dtype(name): datatype for datatype, name in NUMBERS.items()}
    if _bfloat16() is not np.uint16:
        found[np.dtype(_bfloat16())] = "BF16"
    return found


def np_to_triton_dtype(np_dtype: Any) -> str | None:
    """The datatype of the protocol for a type of numpy; None: there is none."""
    import numpy as np

    wanted = np.dtype(np_dtype)
    if wanted.kind in "OS":
        return "BYTES"
    return _datatypes().get(wanted.newbyteorder("=") if wanted.byteorder not in "=|" else wanted)


def serialized_byte_size(tensor_value: np.ndarray) -> int:
    """The sum of the lengths of the elements of an array of objects.

    Raises:
        InferenceServerException: the array is not of objects.
    """
    import numpy as np

    if tensor_value.dtype != np.object_:
        raise_error("The tensor_value dtype must be np.object_")
    return sum(map(len, tensor_value.ravel()))


def serialize_byte_tensor(input_tensor: np.ndarray) -> np.ndarray:
    """The content of a BYTES tensor, as the only element of an array of objects; for an empty tensor an empty array.

    Raises:
        InferenceServerException: the array is neither of objects nor of bytes.
    """
    import numpy as np

    if input_tensor.size == 0:
        return np.empty([0], dtype=np.object_)
    if input_tensor.dtype.kind not in "OS":
        raise_error("cannot serialize bytes tensor: invalid datatype")
    return np.asarray(packed_strings(input_tensor.ravel().tolist()), dtype=np.object_)


def deserialize_bytes_tensor(encoded_tensor: Any) -> np.ndarray:
    """The elements of a BYTES tensor, from its content, as an array of one dimension.

    Raises:
        ValueError: an element is longer than the remaining content.
    """
    import numpy as np

    found = unpacked_strings(encoded_tensor)
    out = np.empty(len(found), dtype=np.object_)
    out[:] = found
    return out
