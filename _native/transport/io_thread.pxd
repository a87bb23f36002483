# I/O threads: read and write sockets, and do all work of the front that follows, without the GIL.

from libc.stdint cimport uint32_t

from inferd._native.transport.endpoint cimport Endpoint
from inferd._native.transport.io cimport Io, Source

# Within the front: begin a round soon, because output was made outside of one; `context` is the Io.
cdef void io_wake(void *context) noexcept nogil
# Whether the caller is an I/O thread that will call Host.deliver in this round.
cdef bint io_delivers() noexcept nogil


cdef class IoThreads:
    cdef Io io                   # the first thread's
    cdef Io *more                # the others'
    cdef uint32_t count          # of the others
    cdef readonly Endpoint endpoint
    cdef list threads
    cdef Source timers
    cdef Source jobs
    cdef Io *choose(self) noexcept
