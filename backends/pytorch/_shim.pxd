# The functions that PyTorch exports for libraries compiled by AOTInductor, with tensors as handles. They are in
# torch/csrc/inductor/aoti_torch/c/shim.h.

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t

from inferd._native.memory.resource cimport Block
from inferd._native.protobuf.datatype cimport Datatype

cdef enum:
    TYPES = 16               # the protocol's datatypes, and room for more

ctypedef void *Handle        # of a tensor
ctypedef int32_t (*from_blob_fn)(void *data, int64_t rank, const int64_t *sizes, const int64_t *strides, int64_t offset,
                                 int32_t dtype, int32_t device_type, int32_t device, Handle *out, int32_t layout,
                                 const uint8_t *metadata, int64_t metadata_size) noexcept nogil

cdef struct Torch:
    # functions that PyTorch exports; each returns 0 on success
    from_blob_fn from_blob
    int32_t (*delete)(Handle tensor) noexcept nogil
    int32_t (*data)(Handle tensor, void **out) noexcept nogil
    int32_t (*rank)(Handle tensor, int64_t *out) noexcept nogil
    int32_t (*sizes)(Handle tensor, int64_t **out) noexcept nogil
    int32_t (*strides)(Handle tensor, int64_t **out) noexcept nogil
    int32_t (*dtype)(Handle tensor, int32_t *out) noexcept nogil
    int32_t types[TYPES]     # PyTorch's number of each datatype of the protocol
    int32_t cpu
    int32_t cuda
    int32_t strided

cdef Torch torch             # set by find_torch

# Find the functions in PyTorch's own library, libtorch_cpu.so, which is loaded. Raises AotiError.
cdef int find_torch(str path) except -1
# A function of a library; raises AotiError if it is missing.
cdef void *symbol(void *library, str name) except NULL

cdef Datatype datatype_of(Handle tensor) noexcept nogil
# A contiguous tensor on memory of another owner; 0 on success.
cdef int32_t tensor_over(const void *data, Datatype datatype, const int64_t *shape, uint32_t rank, int32_t device_type,
                         int32_t device, Handle *out) noexcept nogil
cdef bint is_contiguous(const int64_t *sizes, const int64_t *strides, int64_t rank) noexcept nogil
# A copy whose elements, of `element` bytes each, are contiguous, `size` bytes in all; NULL if there is no memory.
cdef Block *contiguous_copy(const uint8_t *data, const int64_t *sizes, const int64_t *strides, int64_t rank,
                            size_t element, size_t size) noexcept nogil
# A release_fn that frees a tensor.
cdef void delete_tensor(void *tensor) noexcept nogil
