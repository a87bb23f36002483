# Requests that come through Python.

from inferd._native.request.request cimport Request, Response


cdef class Ticket:
    cdef Request *request        # NULL after its final response, and after `cancel`
    cdef object deliver          # called with each response; see InferService.submit
    cdef bint stream             # it takes any number of responses; else one
    cdef str peer                # the client's address, for the log
    cdef readonly str reason     # of an error, for google.rpc.ErrorInfo; empty for the usual one of its status
    cdef readonly bint done      # the final response has been delivered
    cdef object acks             # of each delivered response, the oldest first, its acknowledgement; None: it has none
    cdef void answer(self, Response *response, int status, const char *details) noexcept

# The ticket of a new request, whose sink it becomes.
cdef Ticket ticket_new(Request *request, object deliver, bint stream, str peer)
