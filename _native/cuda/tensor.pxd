# Tensors on a device, as backends see them.

from libc.stdint cimport int64_t, uint32_t

from _native.cuda.driver cimport DevicePointer
from _native.inference.signature cimport MAX_RANK
from _native.protobuf.datatype cimport Datatype


cdef class DeviceTensor:
    cdef readonly int device          # its ordinal
    cdef DevicePointer address
    cdef readonly size_t size
    cdef Datatype type
    cdef int64_t dims[MAX_RANK]
    cdef uint32_t rank

cdef DeviceTensor tensor_new(int device, DevicePointer address, size_t size, Datatype type, const int64_t *shape,
                             uint32_t rank)
# Where a C-contiguous tensor of a framework lies on this device, by DLPack. It stays the framework's: keep the object.
# Raises ValueError when it is no tensor of `datatype` there.
cdef DevicePointer address_of(object tensor, int device, Datatype datatype, str name, size_t *size, int64_t *shape,
                              uint32_t *rank) except? 0
