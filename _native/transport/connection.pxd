# Connections, as objects for Python.

from libc.stdint cimport uint8_t

from _native.timers cimport TimersHandle
from _native.transport.call cimport CallOwner
from _native.transport.client cimport ClientUse
from _native.transport.direct_read cimport ReadTarget
from _native.transport.stream cimport Conn, Host, Interceptor
from _native.transport.unary cimport Unary
from _native.transport.workers cimport Workers


cdef class Endpoint:
    cdef Host host
    cdef Workers workers
    cdef uint8_t *receive        # the buffer for reads from sockets, one at a time
    cdef object on_call          # called with each new Call
    cdef object dirty_hook       # called when flush_dirty must be called
    cdef readonly TimersHandle timers    # contains the timers of this endpoint
    cdef object own_clock        # seconds; None: time.monotonic()
    # `unary` must outlive the endpoint
    cdef int add_native(self, bytes path, Unary *unary) except -1


cdef class InterceptorHandle:
    # the check of the native calls of some connections, for example those of one listener
    cdef Interceptor interceptor


cdef class Connection(CallOwner):
    cdef Conn conn
    cdef Endpoint endpoint
    cdef ReadTarget target       # of the next read, from `receive_buffer`
    cdef ClientUse use           # counts against the client's limits; None: no limits
    cdef InterceptorHandle interceptor
    cdef public object flush     # called without arguments when there is output to send
    cdef public object on_ping   # called without arguments for each PING of the peer
    cdef public object on_refused  # called with a text when the peer violated HTTP/2
    cdef readonly object peer
    cdef public object admission  # the counts that the connection is part of, for its owner
    cdef public object client    # what the owner knows about the peer, for handlers
    cdef int take_read_target(self, ReadTarget *target) except -1
    cdef void take_in(self, const ReadTarget *target, size_t count, int socket) noexcept nogil
    cdef int dispatch(self) except -1
