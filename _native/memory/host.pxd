# Host memory. Users take and give blocks through `_native.memory.resource`.

from libc.stddef cimport size_t
from libc.stdint cimport int64_t

from _native.memory.resource cimport Block, Resource

# A block of at least `size` bytes with one reference; NULL if there is no memory.
cdef Block *host_take(size_t size) noexcept nogil
# To be called when the last reference of a block is gone.
cdef void host_give(Block *block) noexcept nogil
# Count `n` more live blocks that are not of host memory.
cdef void host_count(int64_t n) noexcept nogil

cdef Resource *host_resource() noexcept nogil
# The number of live blocks, of any resource.
cdef int64_t host_blocks() noexcept nogil
# The free bytes that are kept for reuse.
cdef int64_t host_pooled() noexcept nogil
# The same, with the bytes that `host_cool` will return to the system.
cdef int64_t host_free() noexcept nogil
# Return free blocks to the system, except those in the lists of other threads; the number of bytes.
cdef int64_t host_trim() noexcept nogil
# Return to the system the blocks that have been free since the last few calls; the number of bytes. To be called about
# once a second, by any thread that may block. Blocks in the lists of threads stay.
cdef int64_t host_cool() noexcept nogil
# True: no block was given back or taken since the last `host_cool`, except through threads' own lists.
cdef bint host_is_still() noexcept nogil
# Keep at most so many free bytes.
cdef void host_keep(int64_t size) noexcept nogil
