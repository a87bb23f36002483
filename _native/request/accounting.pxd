# Counts requests in the statistics of their lanes.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from _native.request.lane cimport Lane
from _native.request.request cimport Request, Response
from _native.request.statistics cimport Bounds, Execution, Failure, time_index

# One request has failed, or was abandoned, at `now`: count it on its lane. A request that its queue refused, or that
# was abandoned, is counted as such, any other as `otherwise`.
cdef void account_failed(const Request *request, int64_t now, Failure otherwise) noexcept nogil
# One request, which was executed alone since `taken_ns`, has ended now: count it, and note its phases.
cdef void account_detached(Request *request, int64_t taken_ns) noexcept nogil
# On the loop: count a response of a decoupled model that passes the bridge.
cdef void account_response(Request *request, const Response *response) noexcept nogil
# How the request ended, for counters elsewhere.
cdef Failure failure_of(const Request *request, Failure otherwise) noexcept nogil

# A request for which others were executed has ended at `end` with the status OK: count it. Its phases are those of one
# of them: the last parts of its time count as the last phases, and what is left as time in the queue.
cdef void account_answered(const Request *request, int64_t end) noexcept nogil
# A request that was executed several times has ended: count it, with the sums of its phases.
cdef void account_repeated(const Request *request, int64_t end) noexcept nogil

# Count one successful request of a batch; execution.end_ns is set.
cdef inline void execution_add(Execution *execution, const Request *request, int64_t taken_ns) noexcept nogil:
    execution.some = True
    execution.served_rows += request.rows
    if not request.uncounted:
        execution_count(execution, request, taken_ns)


cdef inline void execution_count(Execution *execution, const Request *request, int64_t taken_ns) noexcept nogil:
    cdef const Bounds *bounds = &(<const Lane *>request.lane).statistics.bounds
    cdef int64_t passed = execution.end_ns - request.arrived_ns
    cdef int64_t waited = taken_ns - request.queued_ns
    cdef uint32_t index = time_index(bounds, passed)
    execution.requests += 1
    execution.success_ns += <uint64_t>passed
    execution.request_times[index] += 1
    execution.longest = max(execution.longest, index)
    index = time_index(bounds, waited)
    execution.queue_ns += <uint64_t>waited
    execution.queue_times[index] += 1
    execution.longest_queue = max(execution.longest_queue, index)
