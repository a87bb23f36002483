# Connections and their calls as Python sees them.

from libc.stdint cimport int64_t, uint8_t

from _native.timers cimport TimersHandle
from _native.transport.client cimport ClientUse
from _native.transport.direct_read cimport ReadTarget
from _native.transport.stream cimport Conn, Host, Interceptor, Stream
from _native.transport.unary cimport Unary
from _native.transport.workers cimport Workers


cdef class Endpoint:
    cdef Host host
    cdef Workers workers
    cdef uint8_t *receive        # where sockets are read to, one at a time
    cdef object on_call          # called with each new Call
    cdef public object on_dirty  # called when flush_dirty has become necessary
    cdef readonly TimersHandle timers    # that its own are among
    cdef object own_clock        # seconds; None: time.monotonic()
    # `unary` must outlive the endpoint
    cdef int add_native(self, bytes path, Unary *unary) except -1


cdef class InterceptorHandle:
    # what the native calls of some connections must pass, for example of those of one listener
    cdef Interceptor interceptor


cdef class Connection:
    cdef Conn conn
    cdef Endpoint endpoint
    cdef ReadTarget target       # where the next read goes, as `receive_buffer` said
    cdef ClientUse use           # what limits count; None: nothing does
    cdef InterceptorHandle interceptor
    cdef public object flush     # called without arguments when there is output to take
    cdef public object on_ping   # called without arguments for each PING of the peer
    cdef public object on_refused  # called with a text when what the peer sent breaks HTTP/2
    cdef readonly object peer
    cdef public object admission  # what it has been counted for, for its owner
    cdef public object client    # what else its owner knows of the peer, for handlers
    cdef object events           # deque of (Call, kind) for the calls' owners
    cdef int take_read_target(self, ReadTarget *target) except -1
    cdef void take_in(self, const ReadTarget *target, size_t count, int socket) noexcept nogil
    cdef int dispatch(self) except -1


cdef class Call:
    cdef Stream *stream          # NULL once the stream is closed
    cdef readonly Connection connection
    cdef readonly str path
    cdef readonly tuple metadata
    cdef readonly int64_t timeout_ns
    cdef readonly object closed_by   # HTTP/2 error code with which the stream closed; None while it is open
    cdef public object on_event      # called with one of the EVENT_* names
    cdef Stream *open_stream(self) except NULL
    cdef void touched(self)
