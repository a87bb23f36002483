# What the driver may take its time to give back is given back by a thread of its own.

cdef struct Closing:
    # lies in what is to be closed
    void (*close)(void *argument) noexcept nogil
    void *argument
    Closing *next

# Have the thread: before anything that may have to be closed.
cdef int closing_start() except -1
# Have the thread call `close(argument)`, once; by any thread, at once and without memory.
cdef void close_later(Closing *closing) noexcept nogil
