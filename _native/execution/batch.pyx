"""Batches: from the requests that an instance took to their responses.

Everything here works without the GIL, for native executors. `inferd._native.execution.python_batch` is for Python
backends.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memset

from inferd._native.assertion cimport assert_that
from inferd._native.atomic cimport add_own, fetch_add32
from inferd._native.clock cimport now_ns
from inferd._native.memory.resource cimport block_give
from inferd._native.request.accounting cimport account_failed, account_repeated, execution_add
from inferd._native.request.bridge cimport Bridge, bridge_return
from inferd._native.request.lane cimport Lane
from inferd._native.request.record cimport Record, record_inputs, record_taken
from inferd._native.request.request cimport Request, request_expired, request_fail, request_free
from inferd._native.request.statistics cimport (
    FAILURE_BACKEND,
    FAILURE_OTHER,
    FAILURE_REJECTED,
    Execution,
    statistics_executed,
)
from inferd._native.status cimport (
    STATUS_CANCELLED,
    STATUS_DEADLINE_EXCEEDED,
    STATUS_INTERNAL,
    STATUS_INVALID_ARGUMENT,
    STATUS_OK,
    STATUS_RESOURCE_EXHAUSTED,
)
from inferd._native.tensors.completion cimport response_complete
from inferd._native.tensors.placement cimport inputs_fetch
from inferd._native.text cimport format_text, text_or_no_memory

import os


cdef str batch_fail_by(NativeBatch *batch, str text):
    cdef const Request *request
    cdef uint32_t waiting = 0  # requests that a client waits for
    cdef uint32_t i
    cdef str for_clients = text
    cdef bytes encoded
    for i in range(batch.count):
        request = batch.requests[i]
        waiting += request != NULL and not request.sequenced.unasked and not request.is_warmup
    if waiting > 1 and not batch.failed:
        mark = os.urandom(4).hex()
        for_clients = f"a batch of {waiting} requests failed; the server's log says why, as error {mark}"
        text = f"error {mark}: {text}"
    encoded = for_clients.encode("utf-8", "replace")
    batch_fail(batch, format_text("%s", <const char *>encoded))
    return text


# ---------------------------------------------------------------------------------------------------------------------
# Beginning

cdef int batch_init(NativeBatch *batch, Lane *lane) except -1:
    memset(batch, 0, sizeof(NativeBatch))
    batch.lane = lane
    batch.signature = &lane.signature
    batch.writes_inputs = True
    batch.inputs = <GatheredInput *>calloc(lane.signature.input_count + lane.signature.supplied_count + 1,
                                           sizeof(GatheredInput))
    batch.capacity = 64
    batch.requests = <Request **>malloc(batch.capacity * sizeof(Request *))
    if batch.inputs == NULL or batch.requests == NULL:
        batch_free(batch)
        raise MemoryError
    return 0


cdef void batch_free(NativeBatch *batch) noexcept nogil:
    free(batch.inputs)
    free(batch.requests)
    free(batch.details)
    memset(batch, 0, sizeof(NativeBatch))


cdef void batch_begin(NativeBatch *batch, Request *chain) noexcept nogil:
    cdef Request *following
    batch.taken_ns = now_ns()
    batch.input_end_ns = 0
    batch.output_start_ns = 0
    batch.failed = False
    batch.stopped = False
    batch.blamed = False
    batch.recorded = False
    batch.count = 0
    batch.rows = 0
    while chain != NULL:
        following = chain.next
        if late(batch, chain):
            let_expire(batch, chain)
        elif reserve(batch):
            chain.taken_ns = batch.taken_ns
            if chain.record != NULL:
                batch.recorded = True
                record_taken(chain)
            batch.requests[batch.count] = chain
            batch.count += 1
            batch.rows += chain.rows
        else:
            request_fail(chain, STATUS_RESOURCE_EXHAUSTED, NULL)
            account_failed(chain, batch.taken_ns, FAILURE_OTHER)
            bridge_return(<Bridge *>chain.bridge, &chain.response, &chain.response)
        chain = following
    add_own(&batch.running, batch.count - batch.running)


cdef inline bint late(const NativeBatch *batch, const Request *request) noexcept nogil:
    # Whether the request waited too long. Only the front ends a request of a sequence, with those that depend on it.
    if request.sequenced.sequence != NULL:
        return False
    if 0 < request.terms.deadline_ns <= batch.taken_ns:
        return True
    return 0 < request.expires_ns <= batch.taken_ns and not request.yields


cdef bint reserve(NativeBatch *batch) noexcept nogil:
    # make room for one more request
    cdef Request **grown
    if batch.count < batch.capacity:
        return True
    grown = <Request **>realloc(batch.requests, batch.capacity * 2 * sizeof(Request *))
    if grown == NULL:
        return False
    batch.requests = grown
    batch.capacity *= 2
    return True


cdef void let_expire(NativeBatch *batch, Request *request) noexcept nogil:
    # The front was too busy to take the request out of the queue in time.
    if 0 < request.terms.deadline_ns <= batch.taken_ns:
        request_fail(request, STATUS_DEADLINE_EXCEEDED, format_text("Deadline Exceeded"))
    else:
        request_expired(request)
    account_failed(request, batch.taken_ns, FAILURE_REJECTED)
    bridge_return(<Bridge *>request.bridge, &request.response, &request.response)


cdef void batch_fetch(NativeBatch *batch, int device, bint in_place) noexcept nogil:
    cdef Request *request
    cdef uint32_t i
    for i in range(batch.count):
        request = batch.requests[i]
        if not request.on_device:
            continue
        if not inputs_fetch(request, device, in_place):
            batch.rows -= request.rows
            account_failed(request, now_ns(), FAILURE_OTHER)
            bridge_return(<Bridge *>batch_detach(batch, i).bridge, &request.response, &request.response)
        elif request.record != NULL:
            record_inputs(request)
    forget_detached(batch)


# ---------------------------------------------------------------------------------------------------------------------
# Responses

cdef void fail_request(NativeBatch *batch, Request *request) noexcept nogil:
    cdef int status = STATUS_INTERNAL
    if batch.stopped:
        status = STATUS_CANCELLED
    elif batch.blamed:
        status = STATUS_INVALID_ARGUMENT
    request_fail(request, status, format_text("%s", text_or_no_memory(batch.details)))


cdef Request *batch_detach(NativeBatch *batch, uint32_t index) noexcept nogil:
    cdef Request *request = batch.requests[index]
    assert_that(index < batch.count and request != NULL)
    batch.requests[index] = NULL
    return request


cdef void forget_detached(NativeBatch *batch) noexcept nogil:
    cdef uint32_t kept = 0
    cdef uint32_t i
    for i in range(batch.count):
        if batch.requests[i] != NULL:
            batch.requests[kept] = batch.requests[i]
            kept += 1
    batch.count = kept


cdef bint batch_reschedule(NativeBatch *batch, uint32_t index) noexcept nogil:
    batch.requests[index].sequenced.again = batch.lane.sequences != NULL and batch.lane.sequences.again != NULL
    return batch.requests[index].sequenced.again


cdef void hand_back(NativeBatch *batch) noexcept nogil:
    # return the requests that are to be executed again to their lane, unless they or the batch have failed
    cdef Request *request
    cdef bint is_warmup
    cdef uint32_t i
    batch.handed_back = 0
    if batch.lane.sequences == NULL or batch.lane.sequences.again == NULL:
        return
    batch.end_ns = now_ns()
    for i in range(batch.count):
        request = batch.requests[i]
        if request != NULL and request.sequenced.again:
            request.sequenced.again = False
            if not batch.failed:
                is_warmup = request.is_warmup
                add_phases(batch, request)
                request.queued_ns = batch.end_ns
                if batch.lane.sequences.again(batch.lane, request):
                    batch.requests[i] = NULL
                    batch.handed_back += not is_warmup


cdef void add_phases(const NativeBatch *batch, Request *request) noexcept nogil:
    # add the phases of this execution, which ends at batch.end_ns, to those of earlier ones
    request.phases.queue += <uint64_t>(batch.taken_ns - request.queued_ns)
    request.phases.input += <uint64_t>(input_end(batch) - batch.taken_ns)
    request.phases.infer += <uint64_t>(output_start(batch) - input_end(batch))
    request.phases.output += <uint64_t>(batch.end_ns - output_start(batch))


# A native executor that works request by request has no phases of input and output.

cdef inline int64_t input_end(const NativeBatch *batch) noexcept nogil:
    return batch.input_end_ns if batch.input_end_ns else batch.taken_ns


cdef inline int64_t output_start(const NativeBatch *batch) noexcept nogil:
    return batch.output_start_ns if batch.output_start_ns else batch.end_ns


cdef void batch_give_inputs(NativeBatch *batch) noexcept nogil:
    cdef uint32_t i
    for i in range(batch.signature.input_count + batch.signature.supplied_count):
        block_give(batch.inputs[i].block)
        batch.inputs[i].block = NULL


cdef void drop_unasked(NativeBatch *batch) noexcept nogil:
    # free the requests of the scheduler itself: idle rows, and notices that a sequence has ended
    cdef Request *request
    cdef uint32_t i
    for i in range(batch.count):
        request = batch.requests[i]
        if request == NULL or not request.sequenced.unasked:
            continue
        if request.sequenced.sequence != NULL:
            batch.lane.sequences.request_done(batch.lane, request)
        if request.lane != NULL:
            fetch_add32(&batch.lane.in_flight, -1)
        request_free(request)
        batch.requests[i] = NULL


cdef void batch_finish(NativeBatch *batch) noexcept nogil:
    cdef uint32_t i
    cdef Request *request
    batch_give_inputs(batch)
    drop_unasked(batch)
    hand_back(batch)
    forget_detached(batch)
    for i in range(batch.count):
        request = batch.requests[i]
        if batch.failed:
            fail_request(batch, request)
        elif request.response.status == STATUS_OK:
            response_complete(&request.response)
        if request.sequenced.sequence != NULL:
            batch.lane.sequences.request_done(batch.lane, request)
    account(batch)
    return_requests(batch)


cdef void account(NativeBatch *batch) noexcept nogil:
    cdef Execution execution
    cdef Request *request
    cdef int64_t end = now_ns()
    cdef bint repeats = batch.lane.sequences != NULL and batch.lane.sequences.again != NULL
    cdef uint32_t i
    memset(&execution, 0, sizeof(Execution))
    execution.end_ns = end
    execution.why = batch.why
    batch.end_ns = end
    add_own(&batch.busy_ns, end - max(batch.taken_ns, batch.busy_before_ns))
    add_own(&batch.running, -batch.running)
    if repeats:
        account_iteration(batch, &execution)
    else:
        for i in range(batch.count):
            request = batch.requests[i]
            if request.response.status != STATUS_OK:
                account_failed(request, end, FAILURE_BACKEND)
            elif not request.is_warmup:
                execution_add(&execution, request, batch.taken_ns)
    if execution.some:
        execution.rows = batch.rows
        execution.input_ns = <uint64_t>(input_end(batch) - batch.taken_ns)
        execution.infer_ns = <uint64_t>(output_start(batch) - input_end(batch))
        execution.output_ns = <uint64_t>(end - output_start(batch))
        statistics_executed(&batch.lane.statistics, &execution)
        if batch.lane.learn != NULL:
            batch.lane.learn(batch.lane, batch.rows, end - batch.taken_ns)
        if not repeats:
            tell_phases(batch)
    if batch.recorded:
        note(batch, end)


cdef void account_iteration(NativeBatch *batch, Execution *execution) noexcept nogil:
    # A request counts when it has ended, with all its executions; an execution counts in any case.
    cdef Request *request
    cdef uint32_t i
    execution.some = batch.handed_back > 0
    for i in range(batch.count):
        request = batch.requests[i]
        if request.response.status != STATUS_OK:
            account_failed(request, batch.end_ns, FAILURE_BACKEND)
        elif not request.is_warmup:
            add_phases(batch, request)
            execution.some = True
            execution.served_rows += request.rows
            account_repeated(request, batch.end_ns)


cdef void tell_phases(const NativeBatch *batch) noexcept nogil:
    # add the times of the phases to the requests that inner requests of the batch serve
    cdef uint32_t i
    for i in range(batch.count):
        if batch.requests[i].inner:
            add_phases(batch, batch.requests[i])


cdef void note(const NativeBatch *batch, int64_t end) noexcept nogil:
    # Note the times in the records of the requests that have one; batch_log has noted the begin.
    cdef Record *record
    cdef uint32_t i
    for i in range(batch.count):
        record = <Record *>batch.requests[i].record
        if record == NULL:
            continue
        record.input_end_ns = batch.input_end_ns
        record.output_start_ns = batch.output_start_ns
        record.computed_ns = end


cdef void return_requests(NativeBatch *batch) noexcept nogil:
    # once for each run of requests with the same bridge: usually once in all
    cdef uint32_t first = 0
    cdef uint32_t i
    for i in range(1, batch.count + 1):
        if i < batch.count and batch.requests[i].bridge == batch.requests[first].bridge:
            batch.requests[i - 1].response.next = &batch.requests[i].response
        else:
            bridge_return(<Bridge *>batch.requests[first].bridge, &batch.requests[first].response,
                          &batch.requests[i - 1].response)
            first = i
    batch.count = 0
