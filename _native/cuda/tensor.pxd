# Tensors on a device, as backends see them.

from libc.stdint cimport int64_t, uint32_t

from _native.cuda.driver cimport DevicePointer
from _native.execution.dlpack cimport Tensor
from _native.protobuf.datatype cimport Datatype


cdef class DeviceTensor(Tensor):
    cdef readonly int device          # its ordinal
    cdef DevicePointer address

cdef DeviceTensor tensor_new(int device, DevicePointer address, size_t size, Datatype type, const int64_t *shape,
                             uint32_t rank)
# Where a C-contiguous tensor of a framework lies on this device, by DLPack. It stays the framework's: keep the object.
# Raises ValueError when it is no tensor of `datatype` there.
cdef DevicePointer address_of(object tensor, int device, Datatype datatype, str name, size_t *size, int64_t *shape,
                              uint32_t *rank) except? 0
