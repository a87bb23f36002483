# Requests that come through Python.

from libc.stdint cimport uint64_t

from inferd._native.memory.resource cimport Block
from inferd._native.request.request cimport Origin, Request, Response
from inferd._native.traceparent cimport TraceContext


cdef class CallOrigin:
    cdef Origin origin           # without the caller, which the submission sets
    cdef uint64_t caller
    cdef readonly bint stream    # its requests take any number of responses; else one
    cdef TraceContext context
    cdef bytes baggage           # of the context
    cdef str peer
    cdef Block *address          # contains the peer; NULL: unknown, or there was no memory
    cdef readonly bytes forwarded


cdef class Ticket:
    cdef Request *request        # NULL after its final response, and after `cancel`
    cdef object deliver          # called with each response; see InferService.submit
    cdef CallOrigin call
    cdef readonly int refusal    # of an error, a number of the table of refusals; 0: the usual one of its status
    cdef readonly bint done      # the final response has been delivered
    cdef object acks             # of each delivered response, the oldest first, its acknowledgement; None: it has none
    cdef void answer(self, Response *response, int status, const char *details) noexcept

# The ticket of a new request, whose sink it becomes.
cdef Ticket ticket_new(Request *request, object deliver, CallOrigin call)
