"""Tensors between frameworks and the server, in both directions, by DLPack."""

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from inferd._native.memory.resource cimport Block, block_give, block_share
from inferd._native.protobuf.datatype cimport (
    DT_BF16,
    DT_BOOL,
    DT_FP16,
    DT_FP32,
    DT_FP64,
    DT_INT8,
    DT_INT64,
    Datatype,
    datatype_name,
    datatype_size,
)


cdef DLDataType dlpack_type(Datatype datatype) noexcept nogil:
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


# ---------------------------------------------------------------------------------------------------------------------
# Out

cdef void capsule_delete(object capsule) noexcept:
    # a capsule that no consumer took; a consumer renames the capsule and calls the deleter itself
    cdef DLManagedTensor *managed
    if PyCapsule_IsValid(capsule, "dltensor"):
        managed = <DLManagedTensor *>PyCapsule_GetPointer(capsule, "dltensor")
        managed.deleter(managed)


cdef void versioned_capsule_delete(object capsule) noexcept:
    cdef DLManagedTensorVersioned *managed
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        managed = <DLManagedTensorVersioned *>PyCapsule_GetPointer(capsule, "dltensor_versioned")
        managed.deleter(managed)


cdef void describe_tensor(DLTensor *tensor, int32_t device_type, int32_t device, void *data, Datatype datatype,
                          int64_t *shape, int64_t *strides, int32_t rank) noexcept:
    tensor.data = data
    tensor.device.device_type = device_type
    tensor.device.device_id = device
    tensor.ndim = rank
    tensor.dtype = dlpack_type(datatype)
    tensor.shape = shape
    tensor.strides = strides
    tensor.byte_offset = 0


cdef object dlpack_capsule(DLManagedTensor *managed, void *owner, void (*deleter)(DLManagedTensor *) noexcept,
                           int32_t device_type, int32_t device, void *data, Datatype datatype, int64_t *shape,
                           int64_t *strides, int32_t rank):
    describe_tensor(&managed.dl_tensor, device_type, device, data, datatype, shape, strides, rank)
    managed.manager_ctx = owner
    managed.deleter = deleter
    return PyCapsule_New(managed, "dltensor", <void (*)(object) noexcept>capsule_delete)


cdef struct Lent:
    # a DLPack tensor, with the shape that it points to
    DLManagedTensor managed
    DLManagedTensorVersioned versioned       # in its place, where the memory is read-only
    int64_t shape[MAX_RANK]
    Block *block


cdef void lent_delete(DLManagedTensor *managed) noexcept:
    # perhaps without the GIL
    cdef Lent *lent = <Lent *>managed.manager_ctx
    block_give(lent.block)
    free(lent)


cdef void versioned_lent_delete(DLManagedTensorVersioned *managed) noexcept:
    cdef Lent *lent = <Lent *>managed.manager_ctx
    block_give(lent.block)
    free(lent)


cdef class Tensor:
    """A tensor in memory that is not Python's."""

    def __init__(self):
        raise TypeError(f"{type(self).__name__} cannot be created from Python")

    @property
    def datatype(self) -> str:
        """Its v2 datatype, such as "FP32"."""
        return datatype_name(self.type).decode()

    @property
    def shape(self) -> tuple:
        """Its dimensions, the batch's included."""
        return tuple([self.dims[i] for i in range(self.rank)])

    cdef void describe(self, size_t size, Datatype datatype, const int64_t *shape, uint32_t rank) noexcept:
        self.size = size
        self.type = datatype
        self.rank = rank
        memcpy(self.dims, shape, rank * sizeof(int64_t))

    cdef object lend(self, Block *block, int32_t device_type, int32_t device, void *data, object dl_device,
                     object copy, bint read_only, object max_version):
        cdef Lent *lent
        if dl_device is not None and tuple(dl_device) != (device_type, device):
            raise BufferError("the tensor is in CPU memory" if device_type == DLPACK_CPU else
                              f"the tensor is on CUDA device {device}")
        if copy:
            raise BufferError("the tensor is exchanged without a copy")
        if read_only and (max_version is None or max_version[0] < 1):
            raise BufferError("the tensor's memory is shared and read-only, which a capsule before DLPack 1.0 cannot "
                              "say")
        lent = <Lent *>malloc(sizeof(Lent))
        if lent == NULL:
            raise MemoryError
        memcpy(lent.shape, self.dims, self.rank * sizeof(int64_t))
        lent.block = block_share(block) if block != NULL else NULL
        if not read_only:
            return dlpack_capsule(&lent.managed, lent, lent_delete, device_type, device, data, self.type, lent.shape,
                                  NULL, <int32_t>self.rank)
        describe_tensor(&lent.versioned.dl_tensor, device_type, device, data, self.type, lent.shape, NULL,
                        <int32_t>self.rank)
        lent.versioned.version = DLPackVersion(1, 0)
        lent.versioned.manager_ctx = lent
        lent.versioned.deleter = versioned_lent_delete
        lent.versioned.flags = DLPACK_READ_ONLY
        return PyCapsule_New(&lent.versioned, "dltensor_versioned",
                             <void (*)(object) noexcept>versioned_capsule_delete)


# ---------------------------------------------------------------------------------------------------------------------
# In

cdef int check_rank(str name, long rank) except -1:
    if rank > MAX_RANK:
        raise ValueError(f"output '{name}' has {rank} dimensions, at most {MAX_RANK} are served")
    return 0


cdef uint8_t *dlpack_read(const DLTensor *tensor, Datatype datatype, str name, size_t *size, int64_t *shape,
                          uint32_t *rank) except? NULL:
    cdef DLDataType wanted = dlpack_type(datatype)
    cdef int64_t elements = 1
    cdef bint contiguous = True
    cdef int i
    if tensor.dtype.code != wanted.code or tensor.dtype.bits != wanted.bits or tensor.dtype.lanes != 1:
        raise ValueError(f"output '{name}' must be {datatype_name(datatype).decode()}, got a tensor of another type")
    check_rank(name, tensor.ndim)
    for i in range(tensor.ndim - 1, -1, -1):
        if tensor.strides != NULL and tensor.shape[i] > 1 and tensor.strides[i] != elements:
            contiguous = False
        elements *= tensor.shape[i]
        shape[i] = tensor.shape[i]
    if elements and not contiguous:
        raise ValueError(f"output '{name}' must be C-contiguous")
    size[0] = <size_t>elements * datatype_size(datatype)
    rank[0] = <uint32_t>tensor.ndim
    return <uint8_t *>tensor.data + tensor.byte_offset
