# Host memory. Users take and give blocks through `inferd._native.memory.resource`.

from libc.stddef cimport size_t
from libc.stdint cimport int64_t

from inferd._native.memory.block cimport Block

# A block of at least `size` bytes with one reference; NULL if there is no memory.
cdef Block *host_take(size_t size) noexcept nogil
# The same with an allocation of its own: the block is none of the free blocks that are kept for reuse, and its last
# reference returns it to the system.
cdef Block *host_take_apart(size_t size) noexcept nogil
# To be called when the last reference of a block is gone.
cdef void host_give(Block *block) noexcept nogil
# Count `n` more live blocks that are not of host memory.
cdef void host_count(int64_t n) noexcept nogil

# The number of live blocks, of any resource.
cdef int64_t host_blocks() noexcept nogil
# The free bytes that are kept for reuse.
cdef int64_t host_pooled() noexcept nogil
# All free bytes: those kept for reuse, and those that `common_cool` will return to the system.
cdef int64_t host_free() noexcept nogil
# Return free blocks to the system, except those in the lists of other threads; the number of bytes.
cdef int64_t host_trim() noexcept nogil
