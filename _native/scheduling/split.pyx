"""Splitting: a request with more rows than max_batch_size becomes several, for different batches and instances.

The parts share the data of the whole request, which waits for them with its own deadline. It is answered when the last
part has been. The first error of a part ends the whole request and the other parts. Everything happens in the front.
"""

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, uint8_t, uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, strlen

from inferd._native.atomic cimport fetch_add32
from inferd._native.clock cimport now_ns
from inferd._native.memory.resource cimport Block, block_give, block_share, block_take
from inferd._native.protobuf.datatype cimport DT_BYTES, bytes_of_elements
from inferd._native.refusal cimport REFUSAL_NONE
from inferd._native.request.accounting cimport account_answered, account_failed
from inferd._native.request.bridge cimport Bridge, bridge_abandon, bridge_deliver
from inferd._native.request.lane cimport Lane, lane_discard
from inferd._native.request.life cimport request_reconsider, request_stop_waiting, request_wait
from inferd._native.request.request cimport (
    REQUEST_NEW,
    REQUEST_TAKEN,
    InputData,
    OutputData,
    Request,
    Response,
    Terms,
    Wait,
    request_fail,
    request_free,
    request_twin,
)
from inferd._native.request.statistics cimport FAILURE_BACKEND, FAILURE_CANCELED, FAILURE_OTHER, Failure
from inferd._native.shape cimport elements_of
from inferd._native.status cimport STATUS_INTERNAL, STATUS_OK
from inferd._native.tensors.completion cimport response_complete, response_lacks
from inferd._native.text cimport format_text

cdef struct Part:
    Split *split
    Request *request         # NULL: answered
    OutputData *outputs      # of its response, each with a reference; NULL: none yet

cdef struct Split:
    Request *whole
    Part *parts
    uint32_t count
    uint32_t pending


# ---------------------------------------------------------------------------------------------------------------------
# Taking apart

cdef void take_rows(const Request *whole, Request *part, size_t *taken, uint32_t rows) noexcept nogil:
    # The inputs of the part are the next rows of the whole. `taken`: bytes of each input that earlier parts have, so
    # that the lengths of strings are read once, whatever the number of parts.
    cdef const InputData *given
    cdef InputData *own
    cdef uint32_t i
    part.rows = rows
    for i in range(whole.signature.input_count):
        given = &whole.inputs[i]
        own = &part.inputs[i]
        if not given.present:
            continue
        own.shape[0] = rows
        if given.region != NULL:
            own.address = given.address + taken[i]
        else:
            own.data = given.data + taken[i]
        if whole.signature.inputs[i].datatype == DT_BYTES:
            own.size = bytes_of_elements(own.data, given.size - taken[i],
                                         elements_of(given.shape + 1, given.rank - 1) * rows)
        else:
            own.size = given.size // whole.rows * rows
        taken[i] += own.size


cdef Split *split_new(Request *whole, uint32_t count) noexcept nogil:
    cdef Split *split = <Split *>calloc(1, sizeof(Split) + count * sizeof(Part))
    if split != NULL:
        split.whole = whole
        split.parts = <Part *>(split + 1)
        split.count = count
    return split


cdef void split_free(Split *split) noexcept nogil:
    cdef uint32_t i, k
    for i in range(split.count):
        if split.parts[i].outputs == NULL:
            continue
        for k in range(split.whole.signature.output_count):
            block_give(split.parts[i].outputs[k].block)
        free(split.parts[i].outputs)
    free(split)


cdef bint make_parts(Split *split) noexcept nogil:
    # False: no memory for all of them
    cdef Request *part
    cdef uint32_t i
    for i in range(split.count):
        part = request_twin(split.whole)
        if part == NULL:
            return False
        part.single = True
        part.uncounted = True
        part.deliver = part_answered
        part.sink = &split.parts[i]
        split.parts[i].split = split
        split.parts[i].request = part
    return True


cdef void free_parts(Split *split) noexcept nogil:
    # none has been pushed
    cdef uint32_t i
    for i in range(split.count):
        if split.parts[i].request != NULL:
            request_free(split.parts[i].request)


cdef Request *split_enter(Request *whole) noexcept nogil:
    cdef uint32_t most = <uint32_t>whole.signature.max_batch_size
    cdef uint32_t count = (whole.rows + most - 1) // most
    cdef Split *split = split_new(whole, count)
    cdef size_t *taken = <size_t *>calloc(max(whole.signature.input_count, <uint32_t>1), sizeof(size_t))
    cdef uint32_t i
    if split == NULL or taken == NULL or not make_parts(split):
        if split != NULL:
            free_parts(split)
            free(split)
        free(taken)
        return NULL
    for i in range(count):
        take_rows(whole, split.parts[i].request, taken, min(most, whole.rows - i * most))
        split.parts[i].request.next = split.parts[i + 1].request if i + 1 < count else NULL
    free(taken)
    fetch_add32(&(<Lane *>whole.lane).in_flight, <int32_t>count)
    split.pending = count
    request_wait(whole, &FOR_PARTS, split)
    return split.parts[0].request


# ---------------------------------------------------------------------------------------------------------------------
# The end of the whole

cdef void abandon_parts(Split *split) noexcept nogil:
    cdef Request *part
    cdef uint32_t i
    for i in range(split.count):
        part = split.parts[i].request
        if part != NULL:
            split.parts[i].request = NULL
            bridge_abandon(part)


cdef void split_refused(Request *whole, Request *first) noexcept nogil:
    cdef Split *split = <Split *>whole.awaited
    cdef uint32_t i
    request_stop_waiting(whole, REQUEST_NEW)
    request_fail(whole, first.response.status, first.response.details)
    whole.response.refusal = first.response.refusal
    first.response.details = NULL
    for i in range(split.count):
        lane_discard(split.parts[i].request)
    split_free(split)


cdef void leave_parts(Request *whole) noexcept nogil:
    cdef Split *split = <Split *>whole.awaited
    request_stop_waiting(whole, REQUEST_TAKEN)
    abandon_parts(split)
    split_free(split)
    account_failed(whole, now_ns(), FAILURE_CANCELED)


cdef bint reconsider(Request *whole, const Terms *terms) noexcept nogil:
    cdef Split *split = <Split *>whole.awaited
    cdef bint matters = False
    cdef uint32_t i
    whole.terms = terms[0]
    for i in range(split.count):
        if split.parts[i].request != NULL and request_reconsider(split.parts[i].request, terms):
            matters = True
    return matters


cdef Wait FOR_PARTS = Wait(leave_parts, NULL, reconsider)


cdef void part_answered(void *sink, Response *response, int status, const char *details) noexcept nogil:
    cdef Part *part = <Part *>sink
    cdef Split *split = part.split
    cdef Request *whole = split.whole
    cdef Failure otherwise = FAILURE_OTHER if part.request.state == REQUEST_NEW else FAILURE_BACKEND
    part.request = NULL
    split.pending -= 1
    if status != STATUS_OK:
        request_fail(whole, status, format_text("%.*s", <int>strlen(details), details))
        whole.response.refusal = response.refusal if response != NULL else REFUSAL_NONE
    elif not keep_outputs(part, response):
        request_fail(whole, STATUS_INTERNAL, NULL)
    if response != NULL:
        whole.phases = response.request.phases  # the last part to be answered stands for all
    if whole.response.status == STATUS_OK and split.pending:
        return
    request_stop_waiting(whole, REQUEST_TAKEN)
    if whole.response.status == STATUS_OK and join_all(split):
        response_complete(&whole.response)
    abandon_parts(split)
    split_free(split)
    if whole.response.status == STATUS_OK:
        account_answered(whole, now_ns())
    else:
        account_failed(whole, now_ns(), otherwise)
    bridge_deliver(<Bridge *>whole.bridge, &whole.response)


cdef bint keep_outputs(Part *part, const Response *response) noexcept nogil:
    cdef uint32_t count = response.request.signature.output_count
    cdef uint32_t i
    part.outputs = <OutputData *>calloc(max(count, <uint32_t>1), sizeof(OutputData))
    if part.outputs == NULL:
        return False
    for i in range(count):
        part.outputs[i] = response.outputs[i]
        if not response.outputs[i].wanted:
            part.outputs[i].block = NULL
        elif part.outputs[i].block != NULL:
            block_share(part.outputs[i].block)
    return True


# ---------------------------------------------------------------------------------------------------------------------
# Joining

cdef bint join_all(Split *split) noexcept nogil:
    # False: the whole carries the error
    cdef uint32_t i
    for i in range(split.whole.signature.output_count):
        if split.whole.response.outputs[i].wanted and not join(split, i):
            return False
    return True


cdef uint32_t lacking(const Split *split, uint32_t output) noexcept nogil:
    # the number of parts whose response lacks this output, as only a response to a step may
    cdef uint32_t count = 0
    cdef uint32_t i
    for i in range(split.count):
        count += not split.parts[i].outputs[output].wanted
    return count


cdef bint join(Split *split, uint32_t output) noexcept nogil:
    cdef OutputData *out = &split.whole.response.outputs[output]
    cdef const OutputData *first = &split.parts[0].outputs[output]
    cdef const OutputData *part
    cdef Block *block
    cdef uint8_t *at
    cdef size_t size = 0
    cdef uint32_t lacks = lacking(split, output)
    cdef uint32_t i
    if lacks == split.count:
        return True
    if lacks:
        response_lacks(&split.whole.response, output)
        return False
    for i in range(split.count):
        part = &split.parts[i].outputs[output]
        if part.datatype != first.datatype or part.rank != first.rank or part.rank == 0 or memcmp(
                part.shape + 1, first.shape + 1, (first.rank - 1) * sizeof(first.shape[0])) != 0:
            request_fail(split.whole, STATUS_INTERNAL, format_text(
                "output '%s' has another shape or datatype in each part of a request that was split",
                split.whole.signature.outputs[output].name.data))
            return False
        size += part.size
    block = block_take(size)
    if block == NULL:
        request_fail(split.whole, STATUS_INTERNAL, NULL)
        return False
    at = block.data
    for i in range(split.count):
        part = &split.parts[i].outputs[output]
        if part.size:
            memcpy(at, part.data, part.size)
        at += part.size
    out.block = block
    out.data = block.data
    out.size = size
    out.classes = 0  # the parts are classified
    out.datatype = first.datatype
    out.rank = first.rank
    memcpy(out.shape, first.shape, first.rank * sizeof(first.shape[0]))
    out.shape[0] = split.whole.rows
    return True
