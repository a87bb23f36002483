"""PyTorch's functions for libraries compiled by AOTInductor: found once, called without the GIL."""

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.string cimport memcpy
from posix.dlfcn cimport RTLD_LOCAL, RTLD_NOW, dlerror, dlopen, dlsym

from inferd._native.memory.resource cimport Block, block_take
from inferd._native.protobuf.datatype cimport (
    DT_BF16,
    DT_BOOL,
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
    datatype_size,
)
from inferd._native.request.signature cimport MAX_RANK

ctypedef int32_t (*number_fn)() noexcept nogil

cdef bint torch_ready = False

cdef dict TORCH_NAMES = {
    DT_BOOL: "bool", DT_UINT8: "uint8", DT_UINT16: "uint16", DT_UINT32: "uint32", DT_UINT64: "uint64",
    DT_INT8: "int8", DT_INT16: "int16", DT_INT32: "int32", DT_INT64: "int64", DT_FP16: "float16", DT_FP32: "float32",
    DT_FP64: "float64", DT_BF16: "bfloat16",
}


class AotiError(RuntimeError):
    """A library cannot be loaded, or a call of it has failed."""


# ---------------------------------------------------------------------------------------------------------------------
# Finding functions

cdef void *symbol(void *library, str name) except NULL:
    cdef void *found = dlsym(library, name.encode())
    if found == NULL:
        raise AotiError(f"the library lacks {name}: it was compiled for another version of PyTorch than is installed")
    return found


cdef int32_t number(void *library, str name) except? -1:
    return (<number_fn>symbol(library, name))()


cdef int find_torch(str path) except -1:
    # PyTorch is loaded already: this finds its library again
    global torch_ready
    cdef void *library
    if torch_ready:
        return 0
    library = dlopen(path.encode(), RTLD_NOW | RTLD_LOCAL)
    if library == NULL:
        raise AotiError((<bytes>dlerror()).decode(errors="replace"))
    torch.from_blob = <from_blob_fn>symbol(library, "aoti_torch_create_tensor_from_blob_v2")
    torch.delete = <int32_t (*)(Handle) noexcept nogil>symbol(library, "aoti_torch_delete_tensor_object")
    torch.data = <int32_t (*)(Handle, void **) noexcept nogil>symbol(library, "aoti_torch_get_data_ptr")
    torch.rank = <int32_t (*)(Handle, int64_t *) noexcept nogil>symbol(library, "aoti_torch_get_dim")
    torch.sizes = <int32_t (*)(Handle, int64_t **) noexcept nogil>symbol(library, "aoti_torch_get_sizes")
    torch.strides = <int32_t (*)(Handle, int64_t **) noexcept nogil>symbol(library, "aoti_torch_get_strides")
    torch.dtype = <int32_t (*)(Handle, int32_t *) noexcept nogil>symbol(library, "aoti_torch_get_dtype")
    for datatype, name in TORCH_NAMES.items():
        torch.types[<int>datatype] = number(library, f"aoti_torch_dtype_{name}")
    torch.cpu = number(library, "aoti_torch_device_type_cpu")
    torch.cuda = number(library, "aoti_torch_device_type_cuda")
    torch.strided = number(library, "aoti_torch_layout_strided")
    torch_ready = True
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# Tensors

cdef Datatype datatype_of(Handle tensor) noexcept nogil:
    cdef int32_t dtype = 0
    cdef int i
    torch.dtype(tensor, &dtype)
    for i in range(DT_BOOL, DT_BF16 + 1):
        if torch.types[i] == dtype and datatype_size(i):
            return <Datatype>i
    return DT_INVALID


cdef int32_t tensor_over(const void *data, Datatype datatype, const int64_t *shape, uint32_t rank, int32_t device_type,
                         int32_t device, Handle *out) noexcept nogil:
    # a contiguous tensor in memory of another owner
    cdef int64_t strides[MAX_RANK]
    cdef int64_t stride = 1
    cdef uint32_t i
    for i in range(rank):
        strides[rank - 1 - i] = stride
        stride *= max(shape[rank - 1 - i], <int64_t>1)
    return torch.from_blob(<void *>data, rank, shape, strides, 0, torch.types[<int>datatype], device_type, device, out,
                           torch.strided, NULL, 0)


cdef bint is_contiguous(const int64_t *sizes, const int64_t *strides, int64_t rank) noexcept nogil:
    cdef int64_t expected = 1
    cdef int64_t i
    for i in range(rank - 1, -1, -1):
        if sizes[i] > 1 and strides[i] != expected:
            return False
        expected *= sizes[i]
    return True


cdef Block *contiguous_copy(const uint8_t *data, const int64_t *sizes, const int64_t *strides, int64_t rank,
                            size_t element, size_t size) noexcept nogil:
    # An element at a time, because it is rare: compiled models usually return contiguous outputs.
    cdef Block *block = block_take(max(size, <size_t>1))
    cdef int64_t index[MAX_RANK]
    cdef const uint8_t *source
    cdef size_t at
    cdef int64_t i
    if block == NULL:
        return NULL
    for i in range(rank):
        index[i] = 0
    for at in range(size // element):
        source = data
        for i in range(rank):
            source += index[i] * strides[i] * <int64_t>element
        memcpy(block.data + at * element, source, element)
        i = rank - 1
        while i >= 0:
            index[i] += 1
            if index[i] < sizes[i]:
                break
            index[i] = 0
            i -= 1
    return block


cdef void delete_tensor(void *tensor) noexcept nogil:
    torch.delete(tensor)
