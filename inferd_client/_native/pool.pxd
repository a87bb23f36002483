# Memory of large messages, used again: the kernel zeroes pages anew for each answer otherwise, which costs as much as
# receiving it.

from libc.stdint cimport uint8_t

# At least `size` bytes; NULL when there is no memory. The capacity goes back with it.
cdef uint8_t *pool_take(size_t size, size_t *capacity) noexcept nogil
cdef void pool_give(uint8_t *data, size_t capacity) noexcept nogil
