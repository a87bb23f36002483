"""Tensors: arrays with a name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .datatypes import BF16, BYTES, SIZES, bfloat16, dtype_of, number_of
from .errors import TritonModelException
from .strings import pack_array, unpack_array
from .texts import text_of

if TYPE_CHECKING:
    import numpy as np

    from .device import SharedTensor
    from .dlpack import Foreign

CPU_DEVICE = (1, 0)
GPU_DEVICE_TYPES = (2,)  # DLPack's kDLCUDA; memory of the host that CUDA has pinned is the CPU's
CPU_DEVICE_TYPES = (1, 3)


_numpy: Any = None


def numpy() -> Any:
    """The module numpy, imported at the first call. An import statement takes as long as making an array."""
    global _numpy
    if _numpy is None:
        import numpy as _numpy
    return _numpy


class Tensor:
    """An array with a name, as the input or output of a model.

    Args:
        name: of the input or output.
        numpy_array: the data. A C-contiguous array is not copied: do not write to it until the response or request is
            sent. Any other is copied.

    Raises:
        TritonModelException: the name is empty, or the protocol does not have the array's dtype.

    A received tensor reads its data at the first access, in place: `as_numpy` is a view on the memory that
    the request arrived in, and may be written to.
    """

    # One of these holds the data:
    # `_array`: of a tensor that the model has made, or that was read from one of the others;
    # `_buffer`: of a received tensor, `_size` bytes at `_offset`;
    # `_foreign`: the DLPack tensor that it was made from, or a client's shared GPU memory.
    __slots__ = ("_array", "_buffer", "_dtype", "_foreign", "_name", "_offset", "_shape", "_size")

    _array: np.ndarray[Any, Any] | None
    _buffer: Any
    _foreign: Foreign | SharedTensor | None
    _offset: int
    _size: int

    def __init__(self, name: str, numpy_array: np.ndarray[Any, Any]) -> None:
        if name.__class__ is not str:
            name = text_of(name, "a tensor's name")
        try:
            self._dtype = number_of(numpy_array.dtype)
            if not numpy_array.flags.c_contiguous:
                numpy_array = numpy().ascontiguousarray(numpy_array)
        except AttributeError:
            raise TypeError(f"tensor '{name}' expects a numpy array, got {type(numpy_array).__name__}") from None
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        self._name = name
        self._array = numpy_array
        self._shape = numpy_array.shape
        self._buffer = None
        self._foreign = None

    def name(self) -> str:
        """The name of the input or output."""
        return self._name

    def shape(self) -> list[int]:
        """The dimensions of the tensor."""
        return list(self._shape)

    def triton_dtype(self) -> int:
        """Triton's number of its datatype: 11 for FP32."""
        return self._dtype

    def is_cpu(self) -> bool:
        """Whether its data is in the memory of the CPU."""
        return self._foreign is None or self._foreign.device[0] in CPU_DEVICE_TYPES

    def as_numpy(self) -> np.ndarray[Any, Any]:
        """The data as an array: of bytes objects for BYTES, of ml_dtypes.bfloat16 for BF16.

        BF16 comes as the bits in uint16 where ml_dtypes is not installed. A tensor in the memory of a GPU is copied to
        the CPU's.
        """
        array = self._array
        if array is None:
            array = self._array = self._read()
        return array

    def _read(self) -> np.ndarray[Any, Any]:
        foreign = self._foreign
        if foreign is not None:
            if self.is_cpu():
                return foreign.numpy()  # type: ignore[union-attr]  # a SharedTensor is on a GPU
            return copied_to_host(self._name, foreign)
        if self._dtype == BYTES:
            return unpack_array(buffer_of(self), self._shape)
        if not self._size:
            return numpy().empty(self._shape, dtype_of(self._dtype))  # type: ignore[no-any-return]
        return numpy().ndarray(  # type: ignore[no-any-return]
            self._shape, dtype_of(self._dtype), self._buffer, self._offset
        )

    # -----------------------------------------------------------------------------------------------------------------
    # DLPack

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """A tensor on the memory of another framework's tensor.

        Args:
            name: of the input or output.
            tensor: something with `__dlpack__` and `__dlpack_device__`, or a DLPack capsule.

        Raises:
            TritonModelException: the name is empty, the tensor is not C-contiguous, or the protocol does not have its
                datatype or device.
        """
        from .dlpack import Foreign, is_capsule

        name = text_of(name, "a tensor's name")
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        if not is_capsule(tensor):
            if not (hasattr(tensor, "__dlpack__") and hasattr(tensor, "__dlpack_device__")):
                raise TritonModelException(
                    "Provided tensor is not supported. Tensor must be a DLPack capsule or have `__dlpack__` and "
                    "`__dlpack_device__` attributes"
                )
            device = int(tensor.__dlpack_device__()[0])
            _check_device(device)
            tensor = _capsule_of(tensor, device)
        foreign = Foreign(tensor)
        _check_device(foreign.device[0])
        return _on_foreign(name, foreign)

    def to_dlpack(self) -> Any:
        """A DLPack capsule on the same memory, or on a copy if the array is read-only.

        Raises:
            TritonModelException: the tensor is BYTES.
        """
        if self._dtype == BYTES:
            raise TritonModelException("DLPack does not have support for string tensors.")
        from .dlpack import array_at, make_capsule

        foreign = self._foreign
        if foreign is not None and not self.is_cpu():
            stand_in = array_at(foreign.address, foreign.nbytes, foreign)
            bits = stand_in.view(f"u{SIZES[self._dtype]}").reshape(self._shape)
            return make_capsule(bits, self._dtype, foreign.device)
        return make_capsule(self.as_numpy(), self._dtype)

    def __dlpack__(
        self, stream: Any = None, *, max_version: Any = None, dl_device: Any = None, copy: bool | None = None
    ) -> Any:
        """Does what `to_dlpack` does. No work on the tensor is under way, so there is no stream to wait for."""
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"tensor '{self._name}' is on the device {self.__dlpack_device__()}")
        if copy:
            raise BufferError(f"tensor '{self._name}' cannot be copied on exchange")
        return self.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's device type and number."""
        return CPU_DEVICE if self._foreign is None else self._foreign.device

    def __reduce__(self) -> tuple[Any, ...]:
        return Tensor, (self._name, self.as_numpy())

    def __repr__(self) -> str:
        return f"Tensor({self._name!r}, {dtype_of(self._dtype).name}{list(self._shape)})"


_new = Tensor.__new__


def received(name: str, dtype: int, shape: tuple[int, ...], buffer: Any, offset: int, size: int) -> Tensor:
    """A received tensor.

    Args:
        name: of the input or output.
        dtype: Triton's number.
        shape: its dimensions.
        buffer: holds the data; kept as long as the tensor or anything made from it.
        offset: of the data in the buffer.
        size: its bytes, as many as datatype and shape require.
    """
    tensor = _new(Tensor)
    tensor._name = name
    tensor._dtype = dtype
    tensor._shape = shape
    tensor._buffer = buffer
    tensor._offset = offset
    tensor._size = size
    tensor._array = None
    tensor._foreign = None
    return tensor


def received_on_gpu(name: str, data: SharedTensor) -> Tensor:
    """A received tensor on a GPU."""
    return _on_foreign(name, data)


def buffer_of(tensor: Tensor) -> memoryview:
    """The bytes of a received tensor."""
    return memoryview(tensor._buffer)[tensor._offset : tensor._offset + tensor._size]


def wire_bytes(tensor: Tensor) -> Any:
    """The data in the protocol's form: bytes of a BYTES tensor, otherwise an object with the buffer protocol."""
    if tensor._buffer is not None and tensor._array is None:
        return buffer_of(tensor)
    array = tensor.as_numpy()
    if tensor._dtype == BYTES:
        return pack_array(array)
    if tensor._dtype == BF16 and array.dtype == bfloat16():
        return array.view("u2")  # ml_dtypes' type lacks the buffer protocol
    return array


def copied_to_host(name: str, foreign: Foreign | SharedTensor) -> np.ndarray[Any, Any]:
    """The data of a tensor in the memory of a GPU, copied.

    Raises:
        TritonModelException: the CUDA driver is not there, or refuses.
    """
    from .device import copy_to_host

    array: np.ndarray[Any, Any] = numpy().empty(foreign.shape, dtype_of(foreign.datatype))
    try:
        copy_to_host(foreign.address, foreign.nbytes, foreign.device[1], array.ctypes.data)
    except TritonModelException as error:
        raise TritonModelException(f"tensor '{name}' cannot be copied to the CPU: {error}") from None
    return array


def _on_foreign(name: str, foreign: Foreign | SharedTensor) -> Tensor:
    tensor = received(name, foreign.datatype, foreign.shape, None, 0, foreign.nbytes)
    tensor._foreign = foreign
    return tensor


def _check_device(device: int) -> None:
    if device not in CPU_DEVICE_TYPES and device not in GPU_DEVICE_TYPES:
        raise TritonModelException(f"DLDevice type {device} is not support by Python backend.")


def _capsule_of(tensor: Any, device: int) -> Any:
    """The tensor's capsule; its producer orders pending work before reads of its memory."""
    if device in CPU_DEVICE_TYPES:
        return tensor.__dlpack__()
    # 1 is CUDA's legacy default stream: the producer makes it wait for the tensor, so copies on it come later.
    return tensor.__dlpack__(stream=1)
