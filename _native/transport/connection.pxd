# Connections, as objects for Python.

from inferd._native.transport.call cimport CallOwner
from inferd._native.transport.client cimport ClientUse
from inferd._native.transport.endpoint cimport Endpoint, InterceptorHandle
from inferd._native.transport.stream cimport Conn


cdef class Connection(CallOwner):
    cdef Conn conn
    cdef Endpoint endpoint
    cdef ClientUse use           # counts against the client's limits; None: no limits
    cdef InterceptorHandle interceptor
    cdef public object on_ping   # called without arguments for PINGs of the peer
    cdef public object on_refused  # called with a text when the peer violated HTTP/2
    cdef public object on_shut   # called when an I/O thread writes nothing but the last output any more
    cdef public object on_lost   # called when an I/O thread has left the socket
    cdef public object admission  # the owner's counts that include the connection
    cdef public object client    # what the owner knows about the peer, for handlers
    cdef int leave(self, bint output) except -1
