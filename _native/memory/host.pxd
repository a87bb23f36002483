# Host memory. Its users take and give blocks by `_native.memory.resource`.

from libc.stddef cimport size_t
from libc.stdint cimport int64_t

from _native.memory.resource cimport Block, Resource

# A block of at least `size` bytes with one reference; NULL when there is no memory.
cdef Block *host_take(size_t size) noexcept nogil
# Its last reference is gone.
cdef void host_give(Block *block) noexcept nogil
# So many blocks more are alive that are not of host memory.
cdef void host_count(int64_t n) noexcept nogil

cdef Resource *host_resource() noexcept nogil
# Blocks that are alive, of whatever resource.
cdef int64_t host_blocks() noexcept nogil
# Free bytes that are kept for reuse.
cdef int64_t host_pooled() noexcept nogil
# The same, and those that wait for `host_cool` to give them back.
cdef int64_t host_free() noexcept nogil
# Return free blocks to the system: all but those in the lists of other threads; the number of bytes freed.
cdef int64_t host_trim() noexcept nogil
# To be called about once a second, by any thread but one that must not wait: return to the system what was free at the
# last few calls and all the time between; the number of bytes. Blocks in the lists of threads stay.
cdef int64_t host_cool() noexcept nogil
# Whether nothing was given back or taken since the last `host_cool`, but by threads from their own.
cdef bint host_is_still() noexcept nogil
# Keep at most so many free bytes.
cdef void host_keep(int64_t size) noexcept nogil
