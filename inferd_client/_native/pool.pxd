# Reuses the memory of large messages. Otherwise the kernel zeroes new pages for each response, which costs as much as
# receiving it.

from libc.stdint cimport uint8_t

# Room for `size` bytes, which end at a multiple of ALIGNMENT: so the tensor at the end of a message is aligned. NULL if
# there is no memory. Pass size and capacity when the memory is given back.
cdef uint8_t *pool_take(size_t size, size_t *capacity) noexcept nogil
cdef void pool_give(uint8_t *data, size_t size, size_t capacity) noexcept nogil
