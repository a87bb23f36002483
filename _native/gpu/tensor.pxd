# Tensors on a device, for backends.

from libc.stdint cimport int64_t, uint32_t

from inferd._native.cuda.driver cimport DevicePointer
from inferd._native.execution.dlpack cimport Tensor
from inferd._native.protobuf.datatype cimport Datatype


cdef class DeviceTensor(Tensor):
    cdef readonly int device          # its ordinal
    cdef DevicePointer address

cdef DeviceTensor tensor_new(int device, DevicePointer address, size_t size, Datatype type, const int64_t *shape,
                             uint32_t rank)
# The address of a C-contiguous tensor of a framework on this device, by DLPack. The framework still owns it: keep the
# object. Raises ValueError if it is no tensor of `datatype` on the device.
cdef DevicePointer address_of(object tensor, int device, Datatype datatype, str name, size_t *size, int64_t *shape,
                              uint32_t *rank) except? 0
