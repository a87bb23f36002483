# Counts requests in the statistics of their lanes.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from inferd._native.request.lane cimport Lane
from inferd._native.request.request cimport Request, Response
from inferd._native.request.statistics cimport Bounds, Execution, Failure, time_index

# Count a request that has failed, or was abandoned, at `now`. The reason is the one that its status and refusal tell,
# else `otherwise`.
cdef void account_failed(const Request *request, int64_t now, Failure otherwise) noexcept nogil
# Count a request that has left its batch, was taken at `taken_ns` and has ended now; set its phases.
cdef void account_detached(Request *request, int64_t taken_ns) noexcept nogil
# In the front: count a response of a decoupled model that passes the bridge.
cdef void account_response(Request *request, const Response *response) noexcept nogil
# The reason for which account_failed would count the request, for other counters.
cdef Failure failure_of(const Request *request, Failure otherwise) noexcept nogil

# Count a request that ended at `end` with the status OK, and for which other requests were executed. `request.phases`
# are those of one of the others. They count as far as the request's own time allows; the rest of its time counts as
# time in the queue.
cdef void account_answered(const Request *request, int64_t end) noexcept nogil
# Count a request that was executed several times and has ended, with the sums of its phases.
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
