"""Counts requests in the statistics of their lanes.

Warm-up requests are not traffic, and no lane counts them.
"""

from libc.stdint cimport int64_t
from libc.string cimport memset

from inferd._native.clock cimport now_ns
from inferd._native.refusal cimport REFUSAL_QUEUE_FULL, REFUSAL_QUEUE_TIMEOUT
from inferd._native.request.lane cimport Lane
from inferd._native.request.record cimport Record
from inferd._native.request.request cimport Request, Response
from inferd._native.request.statistics cimport (
    FAILURE_CANCELED,
    FAILURE_REJECTED,
    RESPONSE_CANCEL,
    RESPONSE_EMPTY,
    RESPONSE_FAIL,
    RESPONSE_SUCCESS,
    Execution,
    Failure,
    ResponseKind,
    Phases,
    statistics_answered,
    statistics_executed,
    statistics_failed,
    statistics_responded,
)
from inferd._native.status cimport STATUS_CANCELLED, STATUS_DEADLINE_EXCEEDED, STATUS_OK

cdef Failure failure_of(const Request *request, Failure otherwise) noexcept nogil:
    cdef int status = request.response.status
    if status == STATUS_CANCELLED or status == STATUS_DEADLINE_EXCEEDED:
        return FAILURE_CANCELED
    if request.response.refusal == REFUSAL_QUEUE_FULL or request.response.refusal == REFUSAL_QUEUE_TIMEOUT:
        return FAILURE_REJECTED
    return otherwise


cdef void account_failed(const Request *request, int64_t now, Failure otherwise) noexcept nogil:
    if not (request.is_warmup or request.uncounted):
        statistics_failed(&(<Lane *>request.lane).statistics, failure_of(request, otherwise), 1,
                          <uint64_t>(now - request.arrived_ns))


cdef void account_answered(const Request *request, int64_t end) noexcept nogil:
    cdef uint64_t passed = <uint64_t>max(<int64_t>0, end - request.arrived_ns)
    cdef uint64_t left = passed
    cdef Phases phases
    if request.is_warmup or request.uncounted:
        return
    phases.output = min(request.phases.output, left)
    left -= phases.output
    phases.infer = min(request.phases.infer, left)
    left -= phases.infer
    phases.input = min(request.phases.input, left)
    phases.queue = left - phases.input
    statistics_answered(&(<Lane *>request.lane).statistics, passed, &phases)


cdef void account_repeated(const Request *request, int64_t end) noexcept nogil:
    if not (request.is_warmup or request.uncounted):
        statistics_answered(&(<Lane *>request.lane).statistics, <uint64_t>(end - request.arrived_ns), &request.phases)


cdef void account_response(Request *request, const Response *response) noexcept nogil:
    cdef int64_t now = now_ns()
    cdef int64_t since = request.responded_ns
    cdef int64_t begun = since
    cdef ResponseKind kind = RESPONSE_SUCCESS
    if since == 0:
        since = request.arrived_ns
        begun = request.taken_ns if request.taken_ns else since
    if request.sink == NULL:
        kind = RESPONSE_CANCEL
    elif response.status != STATUS_OK:
        kind = RESPONSE_FAIL
    elif response.empty:
        kind = RESPONSE_EMPTY
    if not request.is_warmup:
        statistics_responded(&(<Lane *>request.lane).statistics, kind, request.responses, now - since, now - begun)
    request.responses += 1
    request.responded_ns = now


cdef void account_detached(Request *request, int64_t taken_ns) noexcept nogil:
    cdef Execution execution
    cdef Record *record = <Record *>request.record
    if request.is_warmup:
        return
    memset(&execution, 0, sizeof(Execution))
    execution.end_ns = now_ns()
    request.phases.queue = <uint64_t>(taken_ns - request.queued_ns)
    request.phases.infer = <uint64_t>(execution.end_ns - taken_ns)
    if record != NULL:
        record.taken_ns = taken_ns
        record.computed_ns = execution.end_ns
    execution_add(&execution, request, taken_ns)
    execution.rows = request.rows
    execution.infer_ns = <uint64_t>(execution.end_ns - taken_ns)
    statistics_executed(&(<Lane *>request.lane).statistics, &execution)
