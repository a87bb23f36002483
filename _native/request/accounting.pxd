# How requests get into the counters of their lanes.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from _native.request.request cimport Request, Response
from _native.request.statistics cimport Bounds, Execution, Failure, time_index
from _native.scheduling.lane cimport Lane

# One request has failed, or has been given up, by `now`: count it on its lane. What tells of itself that it was refused
# by its queue or given up is counted as that, anything else as `otherwise`.
cdef void account_failed(const Request *request, int64_t now, Failure otherwise) noexcept nogil
# One request, executed by itself from `taken_ns` until now, has ended: count it.
cdef void account_detached(const Request *request, int64_t taken_ns) noexcept nogil
# On the loop: a response of a decoupled model passes.
cdef void account_response(Request *request, const Response *response) noexcept nogil
# How the request ended, for those that are counted otherwise.
cdef Failure failure_of(const Request *request, Failure otherwise) noexcept nogil

# One of the requests that succeeded in a batch; execution.end_ns is set.
cdef inline void execution_add(Execution *execution, const Request *request, int64_t taken_ns) noexcept nogil:
    cdef const Bounds *bounds = &(<const Lane *>request.lane).statistics.bounds
    cdef int64_t passed = execution.end_ns - request.arrived_ns
    cdef int64_t waited = taken_ns - request.queued_ns
    cdef uint32_t index = time_index(bounds, passed)
    execution.requests += 1
    execution.served_rows += request.rows
    execution.success_ns += <uint64_t>passed
    execution.request_times[index] += 1
    execution.longest = max(execution.longest, index)
    index = time_index(bounds, waited)
    execution.queue_ns += <uint64_t>waited
    execution.queue_times[index] += 1
    execution.longest_queue = max(execution.longest_queue, index)
