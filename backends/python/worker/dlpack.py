"""DLPack capsules, also for data that numpy does not exchange: BF16, and memory of devices.

https://dmlc.github.io/dlpack/latest/c_api.html, version 0 capsules, which every framework reads.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from .datatypes import DLPACK_TYPES, FROM_DLPACK, SIZES, dtype_of
from .errors import TritonModelException

if TYPE_CHECKING:
    import numpy as np

CPU = 1
CUDA = 2
CUDA_HOST = 3


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    pass


_DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _DELETER)]

_UNUSED = b"dltensor"
_USED = b"used_dltensor"

# Own functions: other packages may set other argument types on those of ctypes.pythonapi.
_api = ctypes.PyDLL(None)
_capsule_valid = _api["PyCapsule_IsValid"]
_capsule_valid.argtypes = (ctypes.py_object, ctypes.c_char_p)
_capsule_pointer = _api["PyCapsule_GetPointer"]
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_capsule_rename = _api["PyCapsule_SetName"]
_capsule_rename.argtypes = (ctypes.py_object, ctypes.c_char_p)


def is_capsule(value: Any) -> bool:
    """Whether this is a capsule of any kind."""
    return type(value).__name__ == "PyCapsule"


class Foreign:
    """A tensor taken out of a capsule; its memory goes back to its owner with this object.

    Attributes:
        datatype: Triton's number.
        shape: its dimensions; it is C-contiguous.
        address: of the first element.
        device: DLPack's device type and number.

    Raises:
        TritonModelException: the object is no unused DLPack capsule, or its tensor has a datatype that the protocol
            does not have, or is not C-contiguous.
    """

    __slots__ = ("__weakref__", "_managed", "address", "datatype", "device", "nbytes", "shape")

    def __init__(self, capsule: Any) -> None:
        self._managed = 0
        if not is_capsule(capsule) or not _capsule_valid(capsule, _UNUSED):
            raise TritonModelException("a DLPack capsule is expected, one that nothing has been made from yet")
        address = _capsule_pointer(capsule, _UNUSED)
        tensor = _Managed.from_address(address).tensor
        self.datatype = _datatype_of(tensor.dtype)
        self.shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
        self.device = (tensor.device.type, tensor.device.id)
        self.address = (tensor.data or 0) + tensor.byte_offset
        self.nbytes = SIZES[self.datatype]
        for dim in self.shape:
            self.nbytes *= dim
        if self.nbytes and tensor.strides and not _is_contiguous(self.shape, tensor.strides):
            raise TritonModelException(
                "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are "
                "supported."
            )
        _capsule_rename(capsule, _USED)
        self._managed = address

    def __del__(self) -> None:
        if self._managed:
            managed = _Managed.from_address(self._managed)
            self._managed = 0
            if managed.deleter:
                managed.deleter(ctypes.byref(managed))

    def numpy(self) -> np.ndarray[Any, Any]:
        """An array on the same memory, which must be the CPU's; it holds this object."""
        import numpy as np

        dtype = dtype_of(self.datatype)
        if not self.nbytes:
            return np.empty(self.shape, dtype)
        return array_at(self.address, self.nbytes, self).view(dtype).reshape(self.shape)


class _Lent:
    # How numpy takes memory by address, with an owner to keep.
    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, False)}


def _datatype_of(dtype: Any) -> int:
    number = FROM_DLPACK.get((dtype.code, dtype.bits)) if dtype.lanes == 1 else None
    if number is None:
        raise TritonModelException(
            f"DLPack tensor has the type code {dtype.code} with {dtype.bits} bits and {dtype.lanes} lanes, which is no "
            "datatype of the protocol"
        )
    return number


def _is_contiguous(shape: tuple[int, ...], strides: Any) -> bool:
    expected = 1
    for i in range(len(shape) - 1, -1, -1):
        if shape[i] != 1:
            if strides[i] != expected:
                return False
            expected *= shape[i]
    return True


def make_capsule(array: np.ndarray[Any, Any], datatype: int, device: tuple[int, int] | None = None) -> Any:
    """A capsule around the memory of a C-contiguous array, as a tensor of this datatype.

    numpy makes the capsule, with its destructor in C, for bytes of the right width; then the type is corrected. With
    ctypes alone the destructor would be Python code, which must not run while an exception propagates.

    Args:
        array: the memory; one that must not be written to is copied, because a capsule cannot say so.
        datatype: Triton's number; not BYTES.
        device: DLPack's device type and number, if the array only represents memory of another device.
    """
    import numpy as np

    bits = array.view(np.dtype(f"u{SIZES[datatype]}"))
    capsule = (bits if bits.flags.writeable else bits.copy()).__dlpack__()
    tensor = _Managed.from_address(_capsule_pointer(capsule, _UNUSED)).tensor
    tensor.dtype.code, tensor.dtype.bits = DLPACK_TYPES[datatype]
    if device is not None:
        tensor.device.type, tensor.device.id = device
    return capsule


def array_at(address: int, nbytes: int, owner: object) -> np.ndarray[Any, Any]:
    """Bytes at an address as an array that keeps their owner. Do not read that of a device's memory."""
    import numpy as np

    return np.asarray(_Lent(address, nbytes, owner))
