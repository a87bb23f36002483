"""Datatypes: conversions between Triton's numbers, the configuration's names and numpy's types.

numpy is imported for the first array, so a model without arrays needs none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import TritonModelException

if TYPE_CHECKING:
    import numpy as np

BOOL, UINT8, UINT16, UINT32, UINT64 = 1, 2, 3, 4, 5
INT8, INT16, INT32, INT64 = 6, 7, 8, 9
FP16, FP32, FP64 = 10, 11, 12
BYTES = 13
BF16 = 14

# By Triton's number: the v2 protocol's name, numpy's name, the size of an element in bytes (0: its own length each).
NAMES = ("", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64",
         "BYTES", "BF16")  # fmt: skip
NUMPY_NAMES = ("", "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16",
               "float32", "float64", "object", "bfloat16")  # fmt: skip
SIZES = (0, 1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 0, 2)

# https://dmlc.github.io/dlpack/: type code and bits by Triton's number
DLPACK_TYPES = {
    BOOL: (6, 8),
    UINT8: (1, 8),
    UINT16: (1, 16),
    UINT32: (1, 32),
    UINT64: (1, 64),
    INT8: (0, 8),
    INT16: (0, 16),
    INT32: (0, 32),
    INT64: (0, 64),
    FP16: (2, 16),
    FP32: (2, 32),
    FP64: (2, 64),
    BF16: (4, 16),
}
FROM_DLPACK = {dlpack: number for number, dlpack in DLPACK_TYPES.items()}

_dtypes: list[Any] = []  # numpy dtypes by Triton's number
_numbers: dict[Any, int] = {}  # Triton's numbers by numpy dtype
_bfloat16: list[Any] = []


def bfloat16() -> Any:
    """The dtype of BF16 arrays: ml_dtypes.bfloat16 where that package is installed, else the bits as uint16."""
    if not _bfloat16:
        import numpy as np

        try:
            import ml_dtypes
        except ImportError:
            _bfloat16.append(np.dtype(np.uint16))
        else:
            _bfloat16.append(np.dtype(ml_dtypes.bfloat16))
    return _bfloat16[0]


def dtype_of(number: int) -> np.dtype[Any]:
    """The numpy dtype of a datatype."""
    if number == BF16:
        return bfloat16()  # type: ignore[no-any-return]
    if not _dtypes:
        import numpy as np

        _dtypes.extend([None, *(np.dtype(name) for name in NUMPY_NAMES[1:BF16])])
    return _dtypes[number]  # type: ignore[no-any-return]


def number_of(dtype: np.dtype[Any]) -> int:
    """Triton's number of an array's dtype.

    Raises:
        TritonModelException: Triton has no such datatype.
    """
    number = _numbers.get(dtype)
    if number is None:
        number = _look_up(dtype)
        _numbers[dtype] = number
    return number


def _look_up(dtype: np.dtype[Any]) -> int:
    if dtype.kind in "OS":
        return BYTES
    if dtype.name in NUMPY_NAMES[1:]:
        if not dtype.isnative:
            raise TritonModelException(
                f"NumPy dtype is not supported. {dtype!r} has another byte order than the machine."
            )
        return NUMPY_NAMES.index(dtype.name)
    if dtype.kind == "U":
        raise TritonModelException(f"NumPy dtype is not supported. {dtype!r}: use np.object_ for strings.")
    raise TritonModelException(f"NumPy dtype is not supported. {dtype!r} is no datatype of the protocol.")


# ---------------------------------------------------------------------------------------------------------------------
# As triton_python_backend_utils has them


def triton_to_numpy_type(data_type: int) -> Any:
    """The numpy type of Triton's number of a datatype; None for a number that is none."""
    if not BOOL <= data_type <= BF16:
        return None
    return dtype_of(data_type).type


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Triton's number of a numpy type or dtype; None for one that has none."""
    import numpy as np

    try:
        return number_of(np.dtype(data_type))
    except (TritonModelException, TypeError):
        return None


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """The numpy type of a configuration's `data_type`, such as "TYPE_FP32".

    Raises:
        KeyError: there is no such datatype.
    """
    return string_types()[triton_type_string]


_string_types: dict[str, Any] = {}


def string_types() -> dict[str, Any]:
    """TRITON_STRING_TO_NUMPY: numpy types by the configuration's names."""
    if not _string_types:
        for number, name in enumerate(NAMES[1:], 1):
            _string_types["TYPE_" + ("STRING" if number == BYTES else name)] = dtype_of(number).type
        _string_types["TYPE_BOOL"] = bool
    return _string_types
