# A thread that releases resources for which the driver may take long.

cdef struct Closing:
    # a member of the structure that is to be closed
    void (*close)(void *argument) noexcept nogil
    void *argument
    Closing *next

# Start the thread, before any resource exists that it may have to close.
cdef int closing_start() except -1
# Let the thread call `close(argument)` once. Any thread may call this; it returns at once and needs no memory.
cdef void close_later(Closing *closing) noexcept nogil
