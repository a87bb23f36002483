"""Tensors on a device, for Python: frameworks read and write them in place, by DLPack or by address."""

from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int64_t, uint32_t, uintptr_t

from inferd._native.cuda.driver cimport DevicePointer
from inferd._native.execution.dlpack cimport DLPACK_CUDA, DLManagedTensor, DLTensor, dlpack_read
from inferd._native.protobuf.datatype cimport Datatype


cdef class DeviceTensor(Tensor):
    """A C-contiguous tensor in the memory of an instance: valid until the batch is answered, and no longer."""

    @property
    def pointer(self) -> int:
        """Its address on the device, a multiple of 256."""
        return self.address

    def __dlpack_device__(self) -> tuple:
        return (DLPACK_CUDA, self.device)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """A DLPack capsule over the same memory. Work on other streams than the batch's has to wait for that one."""
        return self.lend(NULL, DLPACK_CUDA, self.device, <void *><uintptr_t>self.address, dl_device, copy, False,
                         None)


cdef DeviceTensor tensor_new(int device, DevicePointer address, size_t size, Datatype type, const int64_t *shape,
                             uint32_t rank):
    cdef DeviceTensor tensor = DeviceTensor.__new__(DeviceTensor)
    tensor.device = device
    tensor.address = address
    tensor.describe(size, type, shape, rank)
    return tensor


cdef DevicePointer address_of(object tensor, int device, Datatype datatype, str name, size_t *size, int64_t *shape,
                              uint32_t *rank) except? 0:
    cdef object capsule
    cdef DLTensor *found
    if not hasattr(tensor, "__dlpack__"):
        raise ValueError(f"output '{name}' must be a tensor with __dlpack__, got {type(tensor).__name__}")
    capsule = tensor.__dlpack__(stream=-1)  # no synchronisation, because it was made on the batch's stream
    found = &(<DLManagedTensor *>PyCapsule_GetPointer(capsule, "dltensor")).dl_tensor
    if found.device.device_type != DLPACK_CUDA or found.device.device_id != device:
        raise ValueError(f"output '{name}' must be on CUDA device {device}")
    return <DevicePointer><uintptr_t>dlpack_read(found, datatype, name, size, shape, rank)
