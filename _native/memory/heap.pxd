# The heap of the C library.

from libc.stdint cimport int64_t

# Return free pages of the heap to the system, if there were many of them at the last few calls; returns the number of
# bytes. To be called about once a second, by one thread at a time.
cdef int64_t heap_cool() noexcept nogil
