# Calls of methods that Python handles.

from libc.stdint cimport int64_t, uint32_t

from inferd._native.front cimport PythonEvent
from inferd._native.refusal cimport Refusal
from inferd._native.transport.stream cimport Service, Stream

cdef Service PYTHON          # of all paths that are not a native method's


cdef class CallOwner:
    # the part of a connection that calls and the endpoint use; Conn.owner is one
    cdef readonly object peer    # the address of the peer, for handlers and logs
    cdef public object flush     # called without arguments when there is output to send
    # A stream has got output outside of a read of the connection.
    cdef int has_output(self) except -1
    # Run the events for Python that wait, unless I/O threads run: then the event loop runs them by itself.
    cdef int dispatch(self) except -1
    # Within the front, before a call is used: set the time of the host.
    cdef void look(self) noexcept
    cdef object begin_call(self, Call call)


cdef struct CallLink:
    # A call between the front, which has the stream, and Python, which has the Call.
    PythonEvent event        # the first member
    Stream *stream           # NULL once the stream is closed
    void *call               # the Call: a reference until Python has heard that the stream is closed; NULL: none yet
    uint32_t news            # bits of NEWS_*: what Python has not heard of
    uint32_t messages        # that have come and Python has not heard of
    uint32_t closed_by       # HTTP/2 error code
    size_t memory            # bytes of the call itself, without its messages


cdef class Call:
    cdef CallLink *link          # NULL once Python has heard that the stream is closed
    cdef readonly CallOwner connection
    cdef readonly str path
    cdef readonly tuple metadata
    cdef readonly int64_t timeout_ns
    cdef readonly object closed_by   # HTTP/2 error code with which the stream closed; None while it is open
    cdef public object on_event      # called with one of the EVENT_* names
    cdef size_t memory               # bytes of the call itself, without its messages
    cdef size_t held                 # bytes that its handler holds, see `hold`
    cdef Stream *enter(self) noexcept
    cdef Stream *enter_open(self) except NULL
    cdef int leave(self, bint output) except -1
    cdef int finish(self, int status, str details, tuple metadata, Refusal refusal) except -1
