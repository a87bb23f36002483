"""Warm-up: requests that the server makes before a model version is ready.

They go directly to an instance, not through the lane, on the instance's own thread. Their responses return over a
separate bridge, and are only checked for errors.
"""

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset, strlen

from inferd._native.atomic cimport fetch_add32
from inferd._native.clock cimport now_ns
from inferd._native.memory.resource cimport block_give, block_of_object, block_take
from inferd._native.protobuf.codec cimport Str
from inferd._native.protobuf.datatype cimport datatype_size
from inferd._native.request.bridge cimport BridgeHandle
from inferd._native.request.request cimport InputData, Response, request_free, request_new, request_reserve, terms_begin
from inferd._native.request.signature cimport MAX_RANK, SUPPLY_STATE, Signature, TensorSignature, input_find
from inferd._native.shape cimport elements_of
from inferd._native.tensors.binding cimport request_check
from inferd._native.text cimport format_text, text_or_no_memory

import select


cdef void take_response(void *sink, Response *response, int status, const char *details) noexcept nogil:
    # `response` is never NULL: warm-up requests have no deadline, and only the model ends them
    cdef Outcome *outcome = <Outcome *>sink
    if status and outcome.status == 0:
        outcome.status = status
        outcome.details = format_text("%.*s", <int>strlen(details), details)
    if response.final:
        free_states(response.request)
        outcome.pending -= 1
        if outcome.pending == 0 and outcome.over != NULL:
            outcome.over(outcome)


# ---------------------------------------------------------------------------------------------------------------------
# The state of a sequence that begins: zeros

cdef bint fill_states(Request *request) noexcept nogil:
    # False: no memory
    cdef const Signature *signature = request.signature
    cdef const TensorSignature *tensor
    cdef InputData *state
    cdef bint batches = signature.max_batch_size > 0
    cdef uint32_t i, k
    if signature.state_count == 0:
        return True
    request.sequenced.states = <InputData *>calloc(2 * signature.state_count, sizeof(InputData))
    if request.sequenced.states == NULL:
        return False
    for i in range(signature.supplied_count):
        if signature.supplied[i].kind != SUPPLY_STATE:
            continue
        tensor = &signature.inputs[signature.input_count + i]
        state = &request.sequenced.states[signature.supplied[i].source]
        state.present = True
        state.rank = tensor.rank + batches
        state.shape[0] = request.rows
        for k in range(tensor.rank):
            state.shape[k + batches] = tensor.dims[k] if tensor.dims[k] > 0 else 1
        state.size = <size_t>elements_of(state.shape, state.rank) * max(4, datatype_size(tensor.datatype))
        state.block = block_take(state.size)
        if state.block == NULL:
            return False
        memset(state.block.data, 0, state.size)  # of BYTES: empty ones
        state.data = state.block.data
        if datatype_size(tensor.datatype):
            state.size = <size_t>elements_of(state.shape, state.rank) * datatype_size(tensor.datatype)
    return True


cdef void free_states(Request *request) noexcept nogil:
    cdef uint32_t i
    if request.sequenced.states == NULL:
        return
    for i in range(2 * request.signature.state_count):
        block_give(request.sequenced.states[i].block)
    free(request.sequenced.states)
    request.sequenced.states = NULL


# ---------------------------------------------------------------------------------------------------------------------


cdef int fill_input(Request *request, str name, object shape, bytes data) except -1:
    cdef bytes encoded = name.encode()
    cdef Str key
    cdef InputData *input
    cdef int index
    cdef uint32_t i
    key.data = <const char *>encoded
    key.size = <uint32_t>len(encoded)
    index = input_find(request.signature, key)
    if index < 0 or <uint32_t>index >= request.signature.input_count:
        raise ValueError(f"the model has no input '{name}'")
    if len(shape) > MAX_RANK:
        raise ValueError(f"input '{name}' has {len(shape)} dimensions, at most {MAX_RANK} are served")
    input = &request.inputs[index]
    input.data = <const uint8_t *><const char *>data
    input.size = len(data)
    input.block = block_of_object(data, input.data, input.size)
    if input.block == NULL:
        raise MemoryError
    input.present = True
    input.rank = <uint32_t>len(shape)
    for i in range(input.rank):
        input.shape[i] = shape[i]
    return 0


cdef Request *request_of(Lane *lane, dict tensors) except NULL:
    cdef Request *request = request_new()
    cdef uint32_t i
    if request == NULL:
        raise MemoryError
    try:
        if not request_reserve(request, &lane.signature):
            raise MemoryError
        for name, (shape, data) in tensors.items():
            fill_input(request, name, shape, data)
        for i in range(lane.signature.output_count):
            request.response.outputs[i].wanted = True
        if not request_check(request):
            raise ValueError(text_or_no_memory(request.response.details).decode("utf-8", "replace"))
        if not fill_states(request):
            raise MemoryError
    except BaseException:
        free_states(request)
        request_free(request)
        raise
    return request


cdef Request *warmup_requests(Lane *lane, dict tensors, uint32_t count, void *bridge, Outcome *outcome) except NULL:
    cdef Request *first = NULL
    cdef Request *request
    cdef uint32_t _
    try:
        for _ in range(count):
            request = request_of(lane, tensors)
            request.next = first
            first = request
    except BaseException:
        while first != NULL:
            request = first
            first = request.next
            free_states(request)
            request_free(request)
        raise
    request = first
    while request != NULL:
        request.lane = lane
        request.is_warmup = True
        fetch_add32(&lane.in_flight, 1)
        request.bridge = bridge
        request.arrived_ns = now_ns()
        terms_begin(&request.terms, request.arrived_ns)
        request.deliver = take_response
        request.sink = outcome
        outcome.pending += 1
        request = request.next
    return first


cdef int warmup_end(BridgeHandle bridge, Outcome *outcome) except -1:
    poll = select.poll()  # select.select takes no descriptor above 1023
    poll.register(bridge.event_fd, select.POLLIN)
    while True:
        bridge.drain()
        if outcome.pending == 0:
            break
        poll.poll()  # an executor may respond later
    if outcome.status:
        text = text_or_no_memory(outcome.details).decode("utf-8", "replace")
        free(outcome.details)
        raise ValueError(text)
    return 0
