# Free blocks of host memory, shared by all threads. Users take and give blocks through
# `inferd._native.memory.resource`.

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t

from inferd._native.memory.block cimport Block, Resource

# The figures of host memory: bytes that it holds, their peak, and how often there was no memory.
cdef Resource *common_resource() noexcept nogil

# A chain of up to `wanted` blocks of a size class, and how many they are: free ones, or a new one if none is free.
# NULL: there is no memory.
cdef Block *common_take(int index, int32_t wanted, int32_t *count) noexcept nogil
# Give back a chain of `count` blocks of a size class, from `first` to `last`.
cdef void common_give(Block *first, Block *last, int index, int32_t count) noexcept nogil

# A block that belongs to no pool, for a size beyond all classes (`size_class` is CLASS_LARGE). NULL: there is no
# memory.
cdef Block *block_new(size_t size, int size_class) noexcept nogil
cdef void block_delete(Block *block) noexcept nogil

# The free bytes that are kept for reuse, without those in lists of threads.
cdef int64_t common_pooled() noexcept nogil
# Other free bytes, which `common_cool` will return to the system.
cdef int64_t common_aside() noexcept nogil
# Keep at most so many free bytes.
cdef void common_keep(int64_t size) noexcept nogil
# Return all free blocks to the system.
cdef void common_trim() noexcept nogil
# Return to the system the blocks that have been free since the last few calls; the number of bytes. To be called about
# once a second, by any thread that may block.
cdef int64_t common_cool() noexcept nogil
# Whether no block was given back since the last `common_cool`.
cdef bint common_is_still() noexcept nogil
