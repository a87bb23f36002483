# How requests get into the counters of their lanes.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from _native.inference.request cimport Request
from _native.inference.statistics cimport Execution, Failure, queue_time_index

# One request has failed, or has been given up, by `now`: count it on its lane. What tells of itself that it was refused
# by its queue or given up is counted as that, anything else as `otherwise`.
cdef void account_failed(const Request *request, int64_t now, Failure otherwise) noexcept nogil
# One request, executed by itself from `taken_ns` until now, has ended: count it.
cdef void account_detached(const Request *request, int64_t taken_ns) noexcept nogil
# How the request ended, for those that are counted otherwise.
cdef Failure failure_of(const Request *request, Failure otherwise) noexcept nogil

# One of the requests that succeeded in a batch; execution.end_ns is set.
cdef inline void execution_add(Execution *execution, const Request *request, int64_t taken_ns) noexcept nogil:
    cdef uint32_t index = queue_time_index(taken_ns - request.queued_ns)
    execution.requests += 1
    execution.served_rows += request.rows
    execution.success_ns += <uint64_t>(execution.end_ns - request.arrived_ns)
    execution.queue_ns += <uint64_t>(taken_ns - request.queued_ns)
    execution.queue_times[index] += 1
    if index > execution.longest:
        execution.longest = index
