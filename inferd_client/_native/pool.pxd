# Reuses the memory of large messages. Otherwise the kernel zeroes new pages for each response, which costs as much as
# receiving it.

from libc.stdint cimport uint8_t

# At least `size` bytes; NULL if there is no memory. Pass the capacity when the memory is given back.
cdef uint8_t *pool_take(size_t size, size_t *capacity) noexcept nogil
cdef void pool_give(uint8_t *data, size_t capacity) noexcept nogil
