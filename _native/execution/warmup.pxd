# Warm-up: requests that the server makes before a model version is ready.

from libc.stdint cimport uint32_t

from inferd._native.front cimport PythonEvent
from inferd._native.request.bridge cimport BridgeHandle
from inferd._native.request.lane cimport Lane
from inferd._native.request.request cimport Request

cdef struct Outcome:
    # the outcome of the requests of one warm-up
    uint32_t pending
    int status               # of the first that failed
    char *details            # from malloc
    void (*over)(Outcome *outcome) noexcept nogil   # NULL, or called when no request is pending any more
    void *bridge             # the Bridge of the requests, for `over`
    PythonEvent event        # for `over`

# `count` requests with these tensors, {name: (shape, bytes)}, as a chain by Request.next, which report to `outcome`.
# They count as in flight on the lane, and return over `bridge` (a Bridge). Raises ValueError if they do not fit the
# model.
cdef Request *warmup_requests(Lane *lane, dict tensors, uint32_t count, void *bridge, Outcome *outcome) except NULL
# Wait for the responses to requests that return over a bridge of their own. Raises ValueError with the first error.
cdef int warmup_end(BridgeHandle bridge, Outcome *outcome) except -1
