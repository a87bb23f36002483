# Memory goes back to the system when a peak is over.

from _native.transport.workers cimport Crew

# Give back what the pools and the allocator keep free; on a worker if there is a crew, else at once.
cdef void memory_trim(Crew *crew) noexcept nogil
