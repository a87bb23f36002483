# Calls of methods that Python handles.

from libc.stdint cimport int64_t

from inferd._native.transport.stream cimport Service, Stream

cdef Service PYTHON          # of all paths that are not a native method's


# The peer of a native call, for its Record; a new reference to the text.
cdef void *call_peer(const Stream *stream) noexcept nogil


cdef class CallOwner:
    # the part of a connection that calls and the endpoint use; Conn.owner is one
    cdef readonly object peer    # the other end, for handlers and logs
    cdef object events           # deque of (Call, kind) for the handlers
    cdef public object flush     # called without arguments when there is output to send
    # A stream has got output outside of a read of the connection.
    cdef int has_output(self) except -1
    # Deliver the events.
    cdef int dispatch(self) except -1


cdef class Call:
    cdef Stream *stream          # NULL once the stream is closed
    cdef readonly CallOwner connection
    cdef readonly str path
    cdef readonly tuple metadata
    cdef readonly int64_t timeout_ns
    cdef readonly object closed_by   # HTTP/2 error code with which the stream closed; None while it is open
    cdef public object on_event      # called with one of the EVENT_* names
    cdef size_t memory               # bytes of the call itself, without its messages
    cdef size_t held                 # bytes that its handler holds, see `hold`
    cdef Stream *open_stream(self) except NULL
