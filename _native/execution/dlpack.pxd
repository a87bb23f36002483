# Tensors as frameworks hand them to each other in one process: the structures of DLPack, https://dmlc.github.io/dlpack,
# in capsules of version 0, which are named "dltensor" until somebody has taken them over.

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint64_t

from _native.protobuf.datatype cimport (
    DT_BF16,
    DT_BOOL,
    DT_FP16,
    DT_FP32,
    DT_FP64,
    DT_INT8,
    DT_INT64,
    Datatype,
    datatype_size,
)

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


cdef inline DLDataType dlpack_type(Datatype datatype) noexcept nogil:
    cdef DLDataType out
    out.bits = <uint8_t>(8 * datatype_size(datatype))
    out.lanes = 1
    if datatype == DT_BOOL:
        out.code = DLPACK_BOOL
    elif datatype == DT_BF16:
        out.code = DLPACK_BFLOAT
    elif datatype == DT_FP16 or datatype == DT_FP32 or datatype == DT_FP64:
        out.code = DLPACK_FLOAT
    elif DT_INT8 <= datatype <= DT_INT64:
        out.code = DLPACK_INT
    else:
        out.code = DLPACK_UINT
    return out


cdef inline void capsule_delete(object capsule) noexcept:
    # a capsule that nobody consumed; a consumer renames it and calls the deleter itself
    cdef DLManagedTensor *managed
    if PyCapsule_IsValid(capsule, "dltensor"):
        managed = <DLManagedTensor *>PyCapsule_GetPointer(capsule, "dltensor")
        managed.deleter(managed)


# A capsule over a contiguous tensor; `managed` and `shape` lie in `owner`, which `deleter` frees.
cdef inline object dlpack_capsule(DLManagedTensor *managed, void *owner, void (*deleter)(DLManagedTensor *) noexcept,
                                  int32_t device_type, int32_t device, void *data, Datatype datatype, int64_t *shape,
                                  int32_t rank):
    managed.dl_tensor.data = data
    managed.dl_tensor.device.device_type = device_type
    managed.dl_tensor.device.device_id = device
    managed.dl_tensor.ndim = rank
    managed.dl_tensor.dtype = dlpack_type(datatype)
    managed.dl_tensor.shape = shape
    managed.dl_tensor.strides = NULL
    managed.dl_tensor.byte_offset = 0
    managed.manager_ctx = owner
    managed.deleter = deleter
    return PyCapsule_New(managed, "dltensor", <void (*)(object) noexcept>capsule_delete)
