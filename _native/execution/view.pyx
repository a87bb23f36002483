"""Tensors for Python: views that frameworks read in place, and arrays that the server uses in place.

Both directions support the buffer protocol and DLPack (https://dmlc.github.io/dlpack/, version 0 capsules), on the CPU.
"""

from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS,
    PyBUF_FORMAT,
    PyBUF_ND,
    PyBuffer_FillInfo,
    PyBuffer_Release,
    PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_SetName
from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from inferd._native.assertion cimport assert_that
from inferd._native.execution.dlpack cimport DLPACK_CPU, DLManagedTensor, Tensor, check_rank, dlpack_read
from inferd._native.memory.owned cimport Owned, owned_release
from inferd._native.memory.resource cimport Block, block_give, block_share, block_wrap
from inferd._native.protobuf.datatype cimport (
    DT_BF16,
    DT_BOOL,
    DT_BYTES,
    DT_FP16,
    DT_FP32,
    DT_FP64,
    DT_INT8,
    DT_INT16,
    DT_INT32,
    DT_INT64,
    DT_INVALID,
    DT_UINT8,
    DT_UINT16,
    DT_UINT32,
    DT_UINT64,
    Datatype,
    datatype_name,
)

import numpy as np


def _bfloat16():
    try:
        import ml_dtypes
    except ImportError:
        return np.dtype(np.uint16)  # ml_dtypes defines the type; without it numpy gets the bits
    return np.dtype(ml_dtypes.bfloat16)


cdef object numpy_type(Datatype datatype):
    if datatype == DT_BF16:
        return _bfloat16()
    return NUMPY_TYPES[<int>datatype]


NUMPY_TYPES = {
    <int>DT_BOOL: np.dtype(np.bool_),
    <int>DT_UINT8: np.dtype(np.uint8),
    <int>DT_UINT16: np.dtype(np.uint16),
    <int>DT_UINT32: np.dtype(np.uint32),
    <int>DT_UINT64: np.dtype(np.uint64),
    <int>DT_INT8: np.dtype(np.int8),
    <int>DT_INT16: np.dtype(np.int16),
    <int>DT_INT32: np.dtype(np.int32),
    <int>DT_INT64: np.dtype(np.int64),
    <int>DT_FP16: np.dtype(np.float16),
    <int>DT_FP32: np.dtype(np.float32),
    <int>DT_FP64: np.dtype(np.float64),
}


# ---------------------------------------------------------------------------------------------------------------------
# Out to Python

cdef class View(Tensor):
    """A tensor in memory that is not Python's, readable in place. The memory lives as long as anything made from it."""

    def __dealloc__(self):
        block_give(self.block)

    def numpy(self):
        """An array on the same memory, read-only if others can see the memory; for BYTES a new object array of bytes.

        BF16 comes as ml_dtypes.bfloat16 where that package is installed, else as its bits in uint16.
        """
        if self.type == DT_BYTES:
            strings = self.strings()
            array = np.empty(len(strings), dtype=object)
            array[:] = strings
            return array.reshape(self.shape)
        if self.size == 0:
            return np.empty(self.shape, dtype=numpy_type(self.type))
        return np.frombuffer(self, dtype=numpy_type(self.type)).reshape(self.shape)

    def strings(self) -> list:
        """The elements of a BYTES tensor in row-major order.

        Raises:
            ValueError: its lengths no longer fit: another process has written to its memory. Clients can write to
                their own regions, and a worker to its model's memory.
        """
        cdef const uint8_t *at = self.data
        cdef const uint8_t *end = self.data + self.size
        cdef uint32_t length
        cdef list out = []
        if self.type != DT_BYTES:
            raise TypeError(f"a {self.datatype} tensor has no strings")
        while at < end:
            if end - at < 4:
                raise ValueError("a BYTES tensor was changed while it is read")
            memcpy(&length, at, 4)
            at += 4
            if <size_t>(end - at) < length:
                raise ValueError("a BYTES tensor was changed while it is read")
            out.append((<const char *>at)[:length])
            at += length
        return out

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, <void *>self.data, <Py_ssize_t>self.size, not self.writable, flags)

    def __dlpack_device__(self) -> tuple:
        return (DLPACK_CPU, 0)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """A DLPack capsule over the same memory; not for BYTES.

        Memory that others can see is lent only in a read-only capsule, which the consumer asks for by `max_version` of
        1.0.
        """
        if self.type == DT_BYTES:
            raise BufferError("a BYTES tensor cannot be exchanged by DLPack")
        return self.lend(self.block, DLPACK_CPU, 0, <void *>self.data, dl_device, copy, not self.writable, max_version)


cdef View view_new(Block *block, const uint8_t *data, size_t size, Datatype datatype, const int64_t *shape,
                   uint32_t rank, bint writable):
    cdef View view = View.__new__(View)
    view.block = block_share(block)
    view.data = data
    view.writable = writable
    view.describe(size, datatype, shape, rank)
    return view


# ---------------------------------------------------------------------------------------------------------------------
# In from Python

cdef Datatype datatype_of_format(const char *format, Py_ssize_t itemsize) noexcept:
    # native struct format characters; the size decides, because that of `l` depends on the platform
    cdef char c
    if format == NULL:
        return DT_UINT8
    c = format[1] if format[0] == c"@" or format[0] == c"=" or format[0] == c"<" else format[0]
    if c == c"?":
        return DT_BOOL
    if c == c"e":
        return DT_FP16
    if c == c"f":
        return DT_FP32
    if c == c"d":
        return DT_FP64
    if c == c"b" or c == c"h" or c == c"i" or c == c"l" or c == c"q":
        return (DT_INT8 if itemsize == 1 else DT_INT16 if itemsize == 2 else DT_INT32 if itemsize == 4 else DT_INT64)
    if c == c"B" or c == c"H" or c == c"I" or c == c"L" or c == c"Q":
        return (DT_UINT8 if itemsize == 1 else DT_UINT16 if itemsize == 2 else DT_UINT32 if itemsize == 4
                else DT_UINT64)
    return DT_INVALID


cdef struct OwnedBuffer:
    Owned owned              # the first member
    Py_buffer buffer

cdef struct OwnedTensor:
    Owned owned              # the first member
    DLManagedTensor *managed


cdef void release_buffer(Owned *owned) noexcept:
    PyBuffer_Release(&(<OwnedBuffer *>owned).buffer)
    free(owned)


cdef void release_dlpack(Owned *owned) noexcept:
    cdef DLManagedTensor *managed = (<OwnedTensor *>owned).managed
    if managed.deleter != NULL:
        managed.deleter(managed)
    free(owned)


cdef int check_array(str name, Datatype expected, Datatype got, long rank) except -1:
    if got != expected:
        raise ValueError(f"output '{name}' must be {datatype_name(expected).decode()}, got "
                         f"{datatype_name(got).decode() if got != DT_INVALID else 'another type'}")
    return check_rank(name, rank)


cdef Block *block_of_buffer(object array, Datatype datatype, str name, const uint8_t **data, size_t *size,
                            int64_t *shape, uint32_t *rank) except NULL:
    cdef OwnedBuffer *owner = <OwnedBuffer *>malloc(sizeof(OwnedBuffer))
    cdef Py_buffer *buffer = &owner.buffer
    cdef Block *block = NULL
    cdef Datatype found
    cdef int i
    if owner == NULL:
        raise MemoryError
    owner.owned.let_go = release_buffer
    try:
        PyObject_GetBuffer(array, buffer, PyBUF_ND | PyBUF_FORMAT | PyBUF_C_CONTIGUOUS)
    except BaseException:
        free(owner)
        raise
    try:
        found = datatype_of_format(buffer.format, buffer.itemsize)
        if datatype == DT_BF16 and found == DT_UINT16:
            found = DT_BF16
        check_array(name, datatype, found, buffer.ndim)
        data[0] = <const uint8_t *>buffer.buf
        size[0] = <size_t>buffer.len
        rank[0] = <uint32_t>buffer.ndim
        for i in range(buffer.ndim):
            shape[i] = buffer.shape[i]
        block = block_wrap(buffer.buf, size[0], owned_release, owner)
        if block == NULL:
            raise MemoryError
    except BaseException:
        release_buffer(&owner.owned)
        raise
    assert_that(block.data == data[0] and block.size == size[0])
    return block


cdef Block *block_of_dlpack(object array, Datatype datatype, str name, const uint8_t **data, size_t *size,
                            int64_t *shape, uint32_t *rank) except NULL:
    cdef object capsule = array.__dlpack__()
    cdef DLManagedTensor *managed = <DLManagedTensor *>PyCapsule_GetPointer(capsule, "dltensor")
    cdef OwnedTensor *owner
    cdef Block *block
    if managed.dl_tensor.device.device_type != DLPACK_CPU:
        raise ValueError(f"output '{name}' must be in CPU memory")
    data[0] = dlpack_read(&managed.dl_tensor, datatype, name, size, shape, rank)
    owner = <OwnedTensor *>malloc(sizeof(OwnedTensor))
    if owner == NULL:
        raise MemoryError
    owner.owned.let_go = release_dlpack
    owner.managed = managed
    block = block_wrap(data[0], size[0], owned_release, owner)
    if block == NULL:
        free(owner)
        raise MemoryError
    PyCapsule_SetName(capsule, "used_dltensor")
    assert_that(block.data == data[0] and block.size == size[0])
    return block


cdef Block *block_of_view(View view, Datatype datatype, str name, const uint8_t **data, size_t *size,
                          int64_t *shape, uint32_t *rank) except NULL:
    check_array(name, datatype, view.type, view.rank)
    data[0] = view.data
    size[0] = view.size
    rank[0] = view.rank
    memcpy(shape, view.dims, view.rank * sizeof(int64_t))
    return block_share(view.block)


cdef Block *block_of_array(object array, Datatype datatype, str name, const uint8_t **data, size_t *size,
                           int64_t *shape, uint32_t *rank) except NULL:
    if isinstance(array, View):
        return block_of_view(array, datatype, name, data, size, shape, rank)
    if datatype == DT_BYTES:
        raise ValueError(f"output '{name}' is BYTES: hand it over with set_bytes_output")
    if datatype == DT_BF16 and isinstance(array, np.ndarray) and array.dtype == _bfloat16():
        array = array.view(np.uint16)  # numpy exports no bfloat16
    if PyObject_CheckBuffer(array):
        return block_of_buffer(array, datatype, name, data, size, shape, rank)
    if hasattr(array, "__dlpack__"):
        return block_of_dlpack(array, datatype, name, data, size, shape, rank)
    raise ValueError(f"output '{name}' must be an array with the buffer protocol or __dlpack__, "
                     f"got {type(array).__name__}")
