"""Assigns arriving requests to sequences, or refuses them.

A request belongs to the live sequence with its id, or begins one. Error texts begin like those of Triton's sequence
batcher ("sequence_batch_scheduler.cc"), followed by what came and what to do.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free

from inferd._native.execution.supply cimport (
    END_CANCELLED,
    END_IDLE,
    END_NONE,
    END_REPLACED,
    END_STREAM,
    END_TIMEOUT,
    END_UNLOADED,
)
from inferd._native.protobuf.datatype cimport DT_BYTES, datatype_name
from inferd._native.refusal cimport REFUSAL_QUEUE_FULL, REFUSAL_SEQUENCE_ENDED
from inferd._native.request.lane cimport LANE_CLOSED, LANE_FULL, LANE_REFUSED, PUSHED, Pushed
from inferd._native.request.life cimport request_move
from inferd._native.request.request cimport (
    REQUEST_NEW,
    REQUEST_QUEUED,
    Correlation,
    Request,
    request_fail,
    request_refuse,
)
from inferd._native.request.signature cimport SUPPLY_CORRELATION, Signature, TensorSignature
from inferd._native.sequences.sequence cimport (
    Sequence,
    correlation_hash,
    sequence_append,
    sequence_free,
    sequence_new,
    sequences_append,
    sequences_remove,
    table_add_sequence,
    table_find_sequence,
    table_remove_sequence,
)
from inferd._native.sequences.slots cimport (
    Eviction,
    Slots,
    slots_count,
    slots_eviction,
    slots_notify,
    slots_place,
    slots_ready,
    slots_set_of,
    slots_stir,
    slots_tie,
)
from inferd._native.status cimport STATUS_INVALID_ARGUMENT, STATUS_RESOURCE_EXHAUSTED, STATUS_UNAVAILABLE
from inferd._native.text cimport clip, format_text

cdef int64_t NEVER = 0x7fffffffffffffff


cdef Pushed refuse_sequence(Request *request, int status, char *details) noexcept nogil:
    request_fail(request, status, details)
    return LANE_REFUSED


cdef char *id_text(const Correlation *correlation) noexcept nogil:
    # from malloc
    if correlation.text.data == NULL:
        return format_text("%llu", <unsigned long long>correlation.number)
    return format_text("%.*s", clip(correlation.text), correlation.text.data)


cdef const char *end_text(int32_t reason) noexcept nogil:
    if reason == END_IDLE:
        return ": the sequence was ended because no request had come for max_sequence_idle_microseconds"
    if reason == END_CANCELLED:
        return ": the sequence was ended when a request of it was cancelled or its deadline passed"
    if reason == END_STREAM:
        return ": the sequence was ended with the stream that it had started on"
    if reason == END_UNLOADED:
        return ": the sequence was ended when the version of the model on which it had started was replaced"
    if reason == END_TIMEOUT:
        return ": the sequence was ended because it had waited for a slot longer than its timeout"
    return ""


cdef Pushed refuse_unknown(Slots *slots, Request *request) noexcept nogil:
    cdef uint64_t hash = correlation_hash(&request.correlation)
    cdef const Eviction *eviction = slots_eviction(slots, hash)
    cdef char *id = id_text(&request.correlation)
    cdef int32_t reason = eviction.reason if eviction.hash == hash else <int32_t>END_NONE
    refuse_sequence(request, STATUS_INVALID_ARGUMENT, NULL if id == NULL else format_text(
        "inference request for sequence %s to model '%s' must specify the START flag on the first request of the "
        "sequence%s", id, slots.lane.signature.name.data, end_text(reason)))
    if reason != END_NONE:
        request.response.refusal = REFUSAL_SEQUENCE_ENDED
    free(id)
    return LANE_REFUSED


cdef bint id_fits(const Slots *slots, Request *request) noexcept nogil:
    # Whether the id has the type that the model's CORRID takes. False: the request is refused.
    cdef const Signature *signature = &slots.lane.signature
    cdef const TensorSignature *tensor
    cdef bint text = request.correlation.text.data != NULL
    cdef uint32_t i
    for i in range(signature.supplied_count):
        tensor = &signature.inputs[signature.input_count + i]
        if signature.supplied[i].kind == SUPPLY_CORRELATION and (tensor.datatype == DT_BYTES) != text:
            refuse_sequence(request, STATUS_INVALID_ARGUMENT, format_text(
                "sequence batching control '%s' data-type is '%s', but model '%s' expects '%s'", tensor.name.data,
                b"BYTES" if text else b"UINT64", signature.name.data, datatype_name(tensor.datatype)))
            return False
    return True


cdef bint is_well_formed(const Slots *slots, Request *request) noexcept nogil:
    # Check what every request must have. False: it is refused.
    cdef const char *name = slots.lane.signature.name.data
    if slots.direct and request.rows > 1:
        refuse_sequence(request, STATUS_INVALID_ARGUMENT, format_text(
            "inference request to model '%s' must specify batch-size 1 due to requirements of sequence batcher, got "
            "%u: with strategy 'direct' a sequence is one row of the batch", name, request.rows))
        return False
    if not request.correlation.given and not slots.iterative:
        refuse_sequence(request, STATUS_INVALID_ARGUMENT, format_text(
            "inference request to model '%s' must specify a non-zero or non-empty correlation ID", name))
        return False
    return not request.correlation.given or id_fits(slots, request)


cdef bint rows_fit(const Slots *slots, const Sequence *sequence, Request *request) noexcept nogil:
    # a request must have as many rows as the state of its sequence
    if slots.lane.signature.state_count == 0 or request.sequence_start or request.rows == sequence.rows:
        return True
    refuse_sequence(request, STATUS_INVALID_ARGUMENT, format_text(
        "inference request to model '%s' must have the batch size %u with which its sequence started, got %u: the "
        "sequence has a state for each row", slots.lane.signature.name.data, sequence.rows, request.rows))
    return False


cdef Sequence *open_sequence(Slots *slots, Request *request) noexcept nogil:
    # a new sequence with a slot, or in the backlog; NULL: the request is refused
    cdef Sequence *sequence
    if slots.vacant_count == 0 and slots.max_backlog and slots.backlog.count >= slots.max_backlog:
        request_refuse(request, REFUSAL_QUEUE_FULL, format_text(
            "Exceeds maximum queue size: all slots of model '%s' are taken, and %u sequences wait for one, which is "
            "its limit", slots.lane.signature.name.data, slots.backlog.count))
        return NULL
    sequence = sequence_new(&request.correlation, slots.lane.signature.state_count)
    if sequence == NULL:
        refuse_sequence(request, STATUS_RESOURCE_EXHAUSTED, NULL)
        return NULL
    if not slots.iterative and not table_add_sequence(&slots.table, sequence):
        sequence_free(sequence)
        refuse_sequence(request, STATUS_RESOURCE_EXHAUSTED, NULL)
        return NULL
    if slots_eviction(slots, sequence.hash).hash == sequence.hash:
        slots_eviction(slots, sequence.hash).reason = END_NONE
    slots.live += 1
    if slots.vacant_count:
        slots_place(slots, sequence)
    else:
        sequences_append(&slots.backlog, sequence, request.queued_ns)
    return sequence


cdef int64_t slot_deadline(const Slots *slots, const Request *request, int64_t now) noexcept nogil:
    cdef int64_t longest = slots.timeout_ns
    cdef int64_t own = 1000 * min(request.terms.timeout_us, NEVER // 4000)
    if own and (longest == 0 or own < longest):
        longest = own
    return now + longest if longest else 0


cdef Pushed slots_push(Slots *slots, Request *request, int64_t now) noexcept nogil:
    cdef Sequence *sequence = NULL
    cdef bint at_rest
    if slots.closed:
        return LANE_CLOSED
    if slots.lane.max_queue and slots.waiting >= slots.lane.max_queue:
        return LANE_FULL
    if not is_well_formed(slots, request):
        return LANE_REFUSED
    if slots.iterative:
        begin_iteration(slots, request)
    elif slots.draining and request.sequence_start:
        return refuse_sequence(request, STATUS_UNAVAILABLE, format_text(
            "Server is stopping, scheduler for model has stopped accepting new inference requests: no sequence begins "
            "on model '%s' any more, those that have begun go on", slots.lane.signature.name.data))
    else:
        sequence = table_find_sequence(&slots.table, &request.correlation)
        if sequence == NULL and not request.sequence_start:
            return refuse_unknown(slots, request)
    if sequence != NULL and not rows_fit(slots, sequence, request):
        return LANE_REFUSED
    if sequence == NULL:
        sequence = open_sequence(slots, request)
        if sequence == NULL:
            return LANE_REFUSED
        at_rest = sequence.slot >= 0
    else:
        at_rest = sequence.queue.first == NULL and sequence.running == NULL
        if sequence.list == &slots.idle:
            sequences_remove(sequence)
        if request.sequence_start:
            slots_notify(slots, sequence, END_REPLACED, now)  # its waiting requests still run
    if request.sequence_start:
        sequence.rows = request.rows
        if slots.tied:
            slots_tie(slots, sequence, request.origin.stream)
    request_move(request, REQUEST_NEW, REQUEST_QUEUED)
    request.queued_ns = now
    sequence_append(sequence, request)
    slots_count(slots, sequence, 1)
    if request.sequence_end or slots.iterative:
        sequence.over = True
        table_remove_sequence(&slots.table, sequence)
    if sequence.slot < 0:
        request.expires_ns = 0 if request.shared else slot_deadline(slots, request, now)
    if at_rest:
        slots_ready(slots, sequence, now)
    elif slots.direct and sequence.slot >= 0:
        slots_set_of(slots, sequence).stirred = True
    if slots.hold or slots.hold_backlog:
        slots_stir(slots)  # instances may be held until so many requests wait
    return PUSHED


cdef void begin_iteration(Slots *slots, Request *request) noexcept nogil:
    # each request is a sequence of its own, and starts it
    request.sequence_start = True
    request.sequence_end = False
    if not request.correlation.given:
        slots.last_id += 1
        request.correlation.given = True
        request.correlation.number = slots.last_id
