# DLPack (https://dmlc.github.io/dlpack): how frameworks in one process pass tensors to each other. The structures are
# in capsules named "dltensor", or "dltensor_versioned" for read-only memory; the consumer renames a capsule when it
# takes the tensor over.

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from inferd._native.memory.resource cimport Block
from inferd._native.protobuf.datatype cimport Datatype
from inferd._native.request.signature cimport MAX_RANK

cdef enum:
    DLPACK_CPU = 1
    DLPACK_CUDA = 2

cdef enum:
    DLPACK_INT = 0
    DLPACK_UINT = 1
    DLPACK_FLOAT = 2
    DLPACK_BFLOAT = 4
    DLPACK_BOOL = 6

cdef struct DLDevice:
    int32_t device_type
    int32_t device_id

cdef struct DLDataType:
    uint8_t code
    uint8_t bits
    uint16_t lanes

cdef struct DLTensor:
    void *data
    DLDevice device
    int32_t ndim
    DLDataType dtype
    int64_t *shape
    int64_t *strides         # in elements; NULL: contiguous
    uint64_t byte_offset

cdef struct DLManagedTensor:
    DLTensor dl_tensor
    void *manager_ctx
    void (*deleter)(DLManagedTensor *) noexcept

cdef struct DLPackVersion:
    uint32_t major
    uint32_t minor

cdef enum:
    DLPACK_READ_ONLY = 1     # flag

cdef struct DLManagedTensorVersioned:
    DLPackVersion version
    void *manager_ctx
    void (*deleter)(DLManagedTensorVersioned *) noexcept
    uint64_t flags
    DLTensor dl_tensor


cdef class Tensor:
    # a tensor for Python, in any memory: the base of more special classes
    cdef readonly size_t size         # bytes
    cdef Datatype type
    cdef int64_t dims[MAX_RANK]
    cdef uint32_t rank

    cdef void describe(self, size_t size, Datatype datatype, const int64_t *shape, uint32_t rank) noexcept
    # A capsule for the tensor at `data` on that device. It keeps `block`; NULL: the memory lives long enough. Raises
    # BufferError if the tensor would have to be moved or copied, or is read-only and the consumer does not support
    # read-only capsules.
    cdef object lend(self, Block *block, int32_t device_type, int32_t device, void *data, object dl_device, object copy,
                     bint read_only, object max_version)

# A capsule for memory; `managed`, `shape` and `strides` (NULL: contiguous) are in `owner`, which `deleter` frees.
cdef object dlpack_capsule(DLManagedTensor *managed, void *owner, void (*deleter)(DLManagedTensor *) noexcept,
                           int32_t device_type, int32_t device, void *data, Datatype datatype, int64_t *shape,
                           int64_t *strides, int32_t rank)
# The address, size, shape and rank of a C-contiguous tensor of `datatype`; `shape` has room for MAX_RANK. Raises
# ValueError if it is something else. The caller checks the device before.
cdef uint8_t *dlpack_read(const DLTensor *tensor, Datatype datatype, str name, size_t *size, int64_t *shape,
                          uint32_t *rank) except? NULL
# Raises ValueError if a tensor for an output has too many dimensions.
cdef int check_rank(str name, long rank) except -1
