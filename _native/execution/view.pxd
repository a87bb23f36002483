# Tensors for Python: views of blocks, and blocks over arrays.

from libc.stdint cimport int64_t, uint8_t, uint32_t

from inferd._native.execution.dlpack cimport Tensor
from inferd._native.memory.resource cimport Block
from inferd._native.protobuf.datatype cimport Datatype

cdef class View(Tensor):
    # a tensor in a block; holds one reference
    cdef Block *block
    cdef const uint8_t *data
    cdef bint writable            # no one else uses the memory

# A view that shares the block.
cdef View view_new(Block *block, const uint8_t *data, size_t size, Datatype datatype, const int64_t *shape,
                   uint32_t rank, bint writable)

# A block over the memory of a C-contiguous CPU array, by the buffer protocol or DLPack, without a copy. Sets `data`,
# `size`, `shape` (room for MAX_RANK) and `rank`. Raises ValueError if it is not an array of `datatype`.
cdef Block *block_of_array(object array, Datatype datatype, str name, const uint8_t **data, size_t *size,
                           int64_t *shape, uint32_t *rank) except NULL
