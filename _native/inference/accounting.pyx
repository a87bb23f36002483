"""Accounting: how requests get into the counters of their lanes.

What the server asks its models for itself, before they are ready, is no traffic: it is not counted, on whichever lanes
it comes to.
"""

from libc.stdint cimport int64_t
from libc.string cimport memset, strncmp

from _native.clock cimport now_ns
from _native.inference.request cimport STATUS_CANCELLED, STATUS_DEADLINE_EXCEEDED, Request
from _native.inference.statistics cimport (
    FAILURE_CANCELED,
    FAILURE_REJECTED,
    Execution,
    Failure,
    statistics_executed,
    statistics_failed,
)
from _native.scheduling.lane cimport Lane

cdef Failure failure_of(const Request *request, Failure otherwise) noexcept nogil:
    cdef int status = request.response.status
    if status == STATUS_CANCELLED or status == STATUS_DEADLINE_EXCEEDED:
        return FAILURE_CANCELED
    if request.response.reason != NULL and strncmp(request.response.reason, "QUEUE_", 6) == 0:
        return FAILURE_REJECTED
    return otherwise


cdef void account_failed(const Request *request, int64_t now, Failure otherwise) noexcept nogil:
    if not request.rehearsed:
        statistics_failed(&(<Lane *>request.lane).statistics, failure_of(request, otherwise), 1,
                          <uint64_t>(now - request.arrived_ns))


cdef void account_detached(const Request *request, int64_t taken_ns) noexcept nogil:
    cdef Execution execution
    if request.rehearsed:
        return
    memset(&execution, 0, sizeof(Execution))
    execution.end_ns = now_ns()
    execution_add(&execution, request, taken_ns)
    execution.rows = request.rows
    execution.infer_ns = <uint64_t>(execution.end_ns - taken_ns)
    statistics_executed(&(<Lane *>request.lane).statistics, &execution)
