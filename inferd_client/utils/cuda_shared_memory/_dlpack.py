"""DLPack for tensors in a device's memory, which numpy cannot exchange: taking and giving them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

CPU, CUDA, CUDA_HOST = 1, 2, 3
"""Kinds of devices."""
KINDS = {
    "BOOL": (6, 8), "INT8": (0, 8), "INT16": (0, 16), "INT32": (0, 32), "INT64": (0, 64), "UINT8": (1, 8),
    "UINT16": (1, 16), "UINT32": (1, 32), "UINT64": (1, 64), "FP16": (2, 16), "FP32": (2, 32), "FP64": (2, 64),
    "BF16": (4, 16),
}  # fmt: skip
"""DLPack's code and bits by datatype of the protocol."""


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("number", ctypes.c_int32))


class _Datatype(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("datatype", _Datatype),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


_python = ctypes.pythonapi
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _python))
_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_capsule_of = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _Destructor)(
    ("PyCapsule_New", _python)
)
_raw_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _python))
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _python))
_NAME = b"dltensor"


@dataclass(frozen=True, slots=True)
class Taken:
    """The memory of a tensor, for as long as this lives.

    Attributes:
        address: of its first byte.
        size: bytes.
    """

    address: int
    size: int
    capsule: Any


def taken(tensor: Any, stream: int) -> Taken:
    """Take a tensor of a CUDA device; later work on the stream comes after the work that makes the tensor.

    Raises:
        ValueError: the tensor is not contiguous.
    """
    capsule = tensor.__dlpack__(stream=stream)
    found = _Managed.from_address(_pointer_of(capsule, _NAME)).tensor
    shape = found.shape[: found.ndim]
    if found.strides:
        step = 1
        for size, stride in zip(reversed(shape), reversed(found.strides[: found.ndim]), strict=True):
            if size > 1 and stride != step:
                raise ValueError("the tensor is not contiguous: call contiguous() first")
            step *= size
    width = found.datatype.bits * found.datatype.lanes
    return Taken((found.data or 0) + found.byte_offset, math.prod(shape) * width // 8, capsule)


# Tensors that were given away and not released yet, by the address of their _Managed.
_given: dict[int, tuple[_Managed, Any, Callable[[], None]]] = {}


def _let_go(address: int) -> None:
    found = _given.pop(address, None)
    if found is not None:
        found[2]()


def _unwanted(capsule: int) -> None:
    """The destructor of a capsule; if nobody has taken its tensor, it releases that."""
    if _is_valid(capsule, _NAME):
        _let_go(_raw_pointer(capsule, _NAME))


_deleter, _destructor = _Deleter(_let_go), _Destructor(_unwanted)


def given(address: int, device: int, datatype: str, shape: Sequence[int], done: Callable[[], None]) -> Any:
    """A DLPack capsule with a tensor of a CUDA device; `done` is called when the tensor is released."""
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    code, bits = KINDS[datatype]
    tensor = _Tensor(
        address, _Device(CUDA, device), len(shape), _Datatype(code, bits, 1),
        ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64)), None, 0,
    )  # fmt: skip
    managed = _Managed(tensor, None, _deleter)
    at = ctypes.addressof(managed)
    _given[at] = managed, sizes, done
    return _capsule_of(at, _NAME, _destructor)
