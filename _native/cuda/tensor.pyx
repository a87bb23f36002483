"""Tensors on a device at the border to Python: what frameworks read and write in place, by DLPack or by address."""

from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int32_t, int64_t, uint32_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from _native.cuda.driver cimport DevicePointer
from _native.execution.dlpack cimport DLPACK_CUDA, DLDataType, DLManagedTensor, DLTensor, dlpack_capsule, dlpack_type
from _native.inference.signature cimport MAX_RANK
from _native.protobuf.datatype cimport Datatype, datatype_name, datatype_size

cdef struct Exported:
    DLManagedTensor managed
    int64_t shape[MAX_RANK]


cdef void exported_delete(DLManagedTensor *managed) noexcept:
    free(managed.manager_ctx)


cdef class DeviceTensor:
    """A C-contiguous tensor in the memory of an instance: valid until the batch is answered, and no longer."""

    def __init__(self):
        raise TypeError("DeviceTensor cannot be created from Python")

    @property
    def pointer(self) -> int:
        """Its address on the device, a multiple of 256."""
        return self.address

    @property
    def datatype(self) -> str:
        """Its v2 datatype, such as "FP32"."""
        return datatype_name(self.type).decode()

    @property
    def shape(self) -> tuple:
        """Its dimensions, the batch's included."""
        return tuple([self.dims[i] for i in range(self.rank)])

    def __dlpack_device__(self) -> tuple:
        return (DLPACK_CUDA, self.device)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """A DLPack capsule over the same memory. The batch's stream is in order with it; others have to wait."""
        cdef Exported *exported
        if dl_device is not None and tuple(dl_device) != (DLPACK_CUDA, self.device):
            raise BufferError(f"the tensor is on CUDA device {self.device}")
        if copy:
            raise BufferError("the tensor is exchanged without a copy")
        exported = <Exported *>malloc(sizeof(Exported))
        if exported == NULL:
            raise MemoryError
        memcpy(exported.shape, self.dims, self.rank * sizeof(int64_t))
        return dlpack_capsule(&exported.managed, exported, exported_delete, DLPACK_CUDA, self.device,
                              <void *><uintptr_t>self.address, self.type, exported.shape, <int32_t>self.rank)


cdef DeviceTensor tensor_new(int device, DevicePointer address, size_t size, Datatype type, const int64_t *shape,
                             uint32_t rank):
    cdef DeviceTensor tensor = DeviceTensor.__new__(DeviceTensor)
    tensor.device = device
    tensor.address = address
    tensor.size = size
    tensor.type = type
    tensor.rank = rank
    memcpy(tensor.dims, shape, rank * sizeof(int64_t))
    return tensor


cdef DevicePointer address_of(object tensor, int device, Datatype datatype, str name, size_t *size, int64_t *shape,
                              uint32_t *rank) except? 0:
    cdef object capsule
    cdef DLTensor *found
    cdef DLDataType wanted = dlpack_type(datatype)
    cdef int64_t elements = 1
    cdef bint contiguous = True
    cdef int i
    if not hasattr(tensor, "__dlpack__"):
        raise ValueError(f"output '{name}' must be a tensor with __dlpack__, got {type(tensor).__name__}")
    capsule = tensor.__dlpack__(stream=-1)  # no synchronisation: it was made on the batch's stream
    found = &(<DLManagedTensor *>PyCapsule_GetPointer(capsule, "dltensor")).dl_tensor
    if found.device.device_type != DLPACK_CUDA or found.device.device_id != device:
        raise ValueError(f"output '{name}' must be on CUDA device {device}")
    if found.dtype.code != wanted.code or found.dtype.bits != wanted.bits or found.dtype.lanes != 1:
        raise ValueError(f"output '{name}' must be {datatype_name(datatype).decode()}, got a tensor of another type")
    if found.ndim > MAX_RANK:
        raise ValueError(f"output '{name}' has {found.ndim} dimensions, at most {MAX_RANK} are served")
    for i in range(found.ndim - 1, -1, -1):
        if found.strides != NULL and found.shape[i] > 1 and found.strides[i] != elements:
            contiguous = False
        elements *= found.shape[i]
        shape[i] = found.shape[i]
    if elements and not contiguous:
        raise ValueError(f"output '{name}' must be C-contiguous")
    size[0] = <size_t>elements * datatype_size(datatype)
    rank[0] = <uint32_t>found.ndim
    return <DevicePointer><uintptr_t>found.data + found.byte_offset
