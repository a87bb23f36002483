"""Slots: the policy of sequence batching.

Every instance has slots. A sequence gets a free slot with its first request, the lowest of all instances first, and
keeps it until it ends; so one instance executes all its requests, in order. Sequences without a slot wait in the
backlog, with all their requests and in the order of their start. An instance never has two requests of one sequence.

*direct*: a slot is a row of the batch, `max_batch_size` for each instance. A batch consists of the rows up to the last
one with a request; the others are null requests, for which the model gets READY = false. With a delay and a minimum
utilization, a batch waits until enough slots have a request, or until the oldest has waited for the delay. The oldest
request determines the shapes of a batch; rows of other shapes wait for the next one.

*oldest*: a slot is a candidate, and each instance batches the next requests of its candidates by the rules of dynamic
batching (`inferd._native.scheduling.policy`), in the order in which they became ready.

A sequence ends with the request that has END; when it has had no request for `max_sequence_idle_microseconds`; when a
request of it is cancelled while it waits, together with the requests behind it; and with its stream, if it is tied to
one. In the last three cases, if the model wants to know, the policy makes a request with END and the reason.

Behaviour follows Triton's sequence batcher ("sequence_batch_scheduler.cc"), except for the differences in
docs/differences.md.
"""

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memset

from inferd._native.assertion cimport assert_that
from inferd._native.atomic cimport fetch_add32
from inferd._native.execution.supply cimport (
    END_CANCELLED,
    END_IDLE,
    END_REPLACED,
    END_STREAM,
    END_TIMEOUT,
    END_UNLOADED,
    EndReason,
)
from inferd._native.memory.resource cimport block_give, block_take
from inferd._native.protobuf.datatype cimport DT_BYTES, datatype_size
from inferd._native.refusal cimport REFUSAL_NONE, REFUSAL_QUEUE_TIMEOUT, Refusal
from inferd._native.request.lane cimport lane_discard
from inferd._native.request.life cimport request_move
from inferd._native.request.record cimport Record
from inferd._native.request.request cimport (
    REQUEST_NEW,
    REQUEST_QUEUED,
    REQUEST_TAKEN,
    Correlation,
    InputData,
    Request,
    Terms,
    request_fail,
    request_new,
    request_reserve,
    terms_begin,
)
from inferd._native.request.signature cimport Signature, TensorSignature
from inferd._native.scheduling.policy cimport policy_end
from inferd._native.sequences.sequence cimport (
    Sequence,
    sequence_append,
    sequence_cut,
    sequence_free,
    sequence_prepend,
    sequences_append,
    sequences_remove,
    table_find_sequence,
    table_free_sequences,
    table_remove_sequence,
)
from inferd._native.status cimport STATUS_CANCELLED, STATUS_UNAVAILABLE
from inferd._native.text cimport format_text

cdef int64_t NEVER = 0x7fffffffffffffff


# ---------------------------------------------------------------------------------------------------------------------
# The slots of the sequences

cdef inline bint is_lower(Vacancy a, Vacancy b) noexcept nogil:
    return a.slot < b.slot or (a.slot == b.slot and a.instance < b.instance)


cdef void vacate(Slots *slots, Vacancy vacancy) noexcept nogil:
    cdef uint32_t at
    assert_that(slots.vacant_count < slots.slot_set_count * slots.per_instance)
    slots.vacant_count += 1
    at = slots.vacant_count
    while at > 1 and is_lower(vacancy, slots.vacant[at // 2]):
        slots.vacant[at] = slots.vacant[at // 2]
        at //= 2
    slots.vacant[at] = vacancy


cdef Vacancy lowest_vacancy(Slots *slots) noexcept nogil:
    # removes it from the heap
    cdef Vacancy found = slots.vacant[1]
    cdef Vacancy last = slots.vacant[slots.vacant_count]
    cdef uint32_t at = 1
    cdef uint32_t child = 2
    assert_that(slots.vacant_count > 0)
    slots.vacant_count -= 1
    while child <= slots.vacant_count:
        if child < slots.vacant_count and is_lower(slots.vacant[child + 1], slots.vacant[child]):
            child += 1
        if not is_lower(slots.vacant[child], last):
            break
        slots.vacant[at] = slots.vacant[child]
        at = child
        child = 2 * at
    slots.vacant[at] = last
    return found


cdef void place(Slots *slots, Sequence *sequence, Vacancy vacancy) noexcept nogil:
    assert_that(sequence.slot < 0 and slots.slot_sets[vacancy.instance].slots[vacancy.slot] == NULL)
    sequence.slot = <int32_t>vacancy.slot
    sequence.instance = vacancy.instance
    slots.slot_sets[vacancy.instance].slots[vacancy.slot] = sequence


cdef void slots_place(Slots *slots, Sequence *sequence) noexcept nogil:
    place(slots, sequence, lowest_vacancy(slots))


cdef void note_place(const Sequence *sequence, int64_t now) noexcept nogil:
    # note the time in the records of the requests that waited for the slot
    cdef const Request *request = sequence.queue.first
    while request != NULL:
        if request.record != NULL:
            (<Record *>request.record).placed_ns = now
        request = request.next


cdef void slots_release(Slots *slots, Sequence *sequence, int64_t now) noexcept nogil:
    # the first sequence of the backlog gets the slot
    cdef Sequence *following = slots.backlog.first
    cdef InstanceSlots *slot_set = slots_set_of(slots, sequence)
    cdef Vacancy vacancy
    if sequence.slot < 0:
        return
    assert_that(slot_set.slots[sequence.slot] == sequence)
    vacancy.slot = <uint32_t>sequence.slot
    vacancy.instance = sequence.instance
    sequence.slot = -1
    slot_set.slots[vacancy.slot] = NULL
    if following == NULL:
        vacate(slots, vacancy)
        return
    sequences_remove(following)
    place(slots, following, vacancy)
    note_place(following, now)
    assert_that(slots.backlog_waiting >= following.waiting)
    slots.backlog_waiting -= following.waiting
    slot_set.waiting += following.waiting
    slots_ready(slots, following, now)


cdef void slots_ready(Slots *slots, Sequence *sequence, int64_t now) noexcept nogil:
    # the next request of the sequence may be executed
    cdef InstanceSlots *slot_set = slots_set_of(slots, sequence)
    if not slots.direct:
        sequences_append(&slot_set.ready, sequence, now)
        slot_set.ready_rows += sequence.queue.first.rows
    if (slots.direct or slot_set.ready_rows >= slot_set.wake_rows or not slots.lane.signature.uniform
            or policy_end(&slots.policy, sequence.queue.first) < slot_set.wake_ns):
        slot_set.stirred = True


cdef void slots_unlist(Slots *slots, Sequence *sequence) noexcept nogil:
    # remove the sequence from the list of idle or ready ones, not from the backlog
    cdef InstanceSlots *slot_set
    if sequence.list == NULL or sequence.list == &slots.backlog:
        return
    if sequence.list != &slots.idle:
        slot_set = slots_set_of(slots, sequence)
        assert_that(sequence.list == &slot_set.ready and slot_set.ready_rows >= sequence.queue.first.rows)
        slot_set.ready_rows -= sequence.queue.first.rows
        slot_set.stirred = True  # the requests that are left may be a batch
    sequences_remove(sequence)


cdef bint slots_add_set(Slots *slots) noexcept nogil:
    cdef uint32_t count = slots.slot_set_count + 1
    cdef InstanceSlots *slot_set = <InstanceSlots *>calloc(1, sizeof(InstanceSlots))
    cdef InstanceSlots **slot_sets = <InstanceSlots **>realloc(slots.slot_sets, count * sizeof(InstanceSlots *))
    cdef Vacancy *vacant = <Vacancy *>realloc(
        slots.vacant, (<size_t>count * slots.per_instance + 1) * sizeof(Vacancy))
    cdef Vacancy vacancy
    if slot_sets != NULL:
        slots.slot_sets = slot_sets
    if vacant != NULL:
        slots.vacant = vacant
    if slot_set != NULL:
        slot_set.slots = <Sequence **>calloc(slots.per_instance, sizeof(Sequence *))
    if slot_set == NULL or slot_sets == NULL or vacant == NULL or slot_set.slots == NULL:
        if slot_set != NULL:
            free(slot_set.slots)
        free(slot_set)
        return False
    slots.slot_sets[slots.slot_set_count] = slot_set
    slots.slot_set_count = count
    vacancy.instance = count - 1
    for vacancy.slot in range(slots.per_instance):
        vacate(slots, vacancy)
    return True


cdef void slots_clear(Slots *slots) noexcept nogil:
    cdef uint32_t i, k
    cdef Sequence *sequence
    for i in range(slots.slot_set_count):
        for k in range(slots.per_instance):
            sequence = slots.slot_sets[i].slots[k]
            if sequence != NULL:
                sequence_free(sequence)
        free(slots.slot_sets[i].slots)
        free(slots.slot_sets[i])
    table_free_sequences(&slots.table)
    free(slots.slot_sets)
    free(slots.vacant)
    free(slots.evictions)
    if slots.plans != NULL:
        for i in range(slots.lane.signature.state_count):
            block_give(slots.plans[i].initial.block)
    free(slots.plans)


# ---------------------------------------------------------------------------------------------------------------------
# The life of a sequence

cdef void slots_tie(Slots *slots, Sequence *sequence, uint64_t stream) noexcept nogil:
    cdef Sequence **first
    if sequence.stream:
        first = &slots.tied_to[sequence.stream % STREAMS]
        if sequence.before != NULL:
            sequence.before.behind = sequence.behind
        else:
            first[0] = sequence.behind
        if sequence.behind != NULL:
            sequence.behind.before = sequence.before
    sequence.stream = stream
    if stream:
        first = &slots.tied_to[stream % STREAMS]
        sequence.before = NULL
        sequence.behind = first[0]
        if sequence.behind != NULL:
            sequence.behind.before = sequence
        first[0] = sequence


cdef void slots_end(Slots *slots, Sequence *sequence, int64_t now) noexcept nogil:
    # the sequence has no requests
    assert_that(sequence.queue.first == NULL and sequence.waiting == 0 and slots.live > 0)
    slots_tie(slots, sequence, 0)
    slots_unlist(slots, sequence)
    sequences_remove(sequence)
    table_remove_sequence(&slots.table, sequence)
    slots_release(slots, sequence, now)
    slots.live -= 1
    sequence_free(sequence)


cdef void sequence_go_on(Slots *slots, Sequence *sequence, int64_t now) noexcept nogil:
    # Continue a sequence of which no request is executed, and which is in no list except perhaps the backlog.
    if sequence.queue.first != NULL:
        if sequence.slot >= 0:
            slots_ready(slots, sequence, now)
    elif sequence.over or slots.closed:
        slots_end(slots, sequence, now)
    else:
        sequences_append(&slots.idle, sequence, now)


cdef void slots_stir(Slots *slots) noexcept nogil:
    cdef uint32_t i
    for i in range(slots.slot_set_count):
        slots.slot_sets[i].stirred = True


cdef void slots_count(Slots *slots, Sequence *sequence, int32_t count) noexcept nogil:
    assert_that(<int64_t>slots.waiting + count >= 0)
    slots.waiting += count
    if sequence.slot >= 0:
        slots_set_of(slots, sequence).waiting += count
    else:
        slots.backlog_waiting += count


cdef void let_fall(Slots *slots, Request *request, int status, char *details, Refusal refusal) noexcept nogil:
    # fail a request that will not be executed; takes over `details`
    request.sequenced.sequence = NULL
    request_move(request, REQUEST_QUEUED, REQUEST_TAKEN)
    request_fail(request, status, details)
    request.response.refusal = refusal
    request.next = slots.fallen
    slots.fallen = request


cdef void slots_let_fall(Slots *slots, Sequence *sequence, Request *first, int status, const char *text,
                         Refusal refusal) noexcept nogil:
    # fail a request that waits and all requests behind it; `text` NULL: no memory
    cdef Request *request = first
    cdef Request *following
    slots_count(slots, sequence, -<int32_t>chain_length(first))
    sequence_cut(sequence, first)
    while request != NULL:
        following = request.next
        if request.sequenced.unasked:
            request_move(request, REQUEST_QUEUED, REQUEST_TAKEN)
            lane_discard(request)
        else:
            let_fall(slots, request, status, NULL if text == NULL else format_text("%s", text), refusal)
        request = following


cdef uint32_t chain_length(const Request *request) noexcept nogil:
    cdef uint32_t count = 0
    while request != NULL:
        count += 1
        request = request.next
    return count


cdef void cut_short(Slots *slots, Sequence *sequence, EndReason reason, int64_t now) noexcept nogil:
    # End a sequence whose client has not sent END, after the requests that still wait in it. If it is in the ready
    # list, it has such a request.
    table_remove_sequence(&slots.table, sequence)
    sequence.over = True
    slots_eviction(slots, sequence.hash).hash = sequence.hash
    slots_eviction(slots, sequence.hash).reason = reason
    if sequence.list == &slots.idle:
        sequences_remove(sequence)
    slots_notify(slots, sequence, reason, now)
    if sequence.running == NULL and (sequence.list == NULL or sequence.queue.first == NULL):
        sequence_go_on(slots, sequence, now)


cdef bint ends_itself(const Sequence *sequence) noexcept nogil:
    # Whether the sequence's last request already marks an end. A START that replaced the sequence puts the notice
    # of the end before itself, and leaves it there when it is cancelled.
    if sequence.queue.last != NULL:
        return sequence.queue.last.sequence_end
    return sequence.running != NULL and sequence.running.sequence_end


cdef void fill_zero(const TensorSignature *tensor, bint batches, uint32_t rows, InputData *out) noexcept nogil:
    # zeros, or empty strings, of the smallest shape that the model takes
    cdef size_t elements = rows
    cdef uint32_t k
    out.rank = tensor.rank + batches
    if batches:
        out.shape[0] = rows
    for k in range(tensor.rank):
        out.shape[k + batches] = max(<int64_t>1, tensor.dims[k])
        elements *= <size_t>out.shape[k + batches]
    out.size = elements * (4 if tensor.datatype == DT_BYTES else datatype_size(tensor.datatype))
    out.block = block_take(out.size)
    if out.block != NULL:
        memset(out.block.data, 0, out.size)
        out.data = out.block.data
        out.present = True


cdef Request *notice_new(Slots *slots, Sequence *sequence, EndReason reason, int64_t now) noexcept nogil:
    # the request that tells the model that a sequence has ended; NULL: no memory
    cdef const Signature *signature = &slots.lane.signature
    cdef Request *request = request_new()
    cdef bint good
    cdef uint32_t i
    if request == NULL:
        return NULL
    request.sequenced.unasked = True
    request.lane = slots.lane
    fetch_add32(&slots.lane.in_flight, 1)
    request.bridge = slots.bridge
    request.rows = sequence.rows
    request.correlation = sequence.correlation
    request.sequence_end = True
    request.sequenced.end_reason = reason
    request_move(request, REQUEST_NEW, REQUEST_QUEUED)
    terms_begin(&request.terms, now)
    request.arrived_ns = request.queued_ns = now
    good = request_reserve(request, signature)
    for i in range(signature.input_count if good else 0):
        if not signature.inputs[i].optional:
            fill_zero(&signature.inputs[i], signature.max_batch_size > 0, request.rows, &request.inputs[i])
            good = good and request.inputs[i].present
    if not good:
        request_move(request, REQUEST_QUEUED, REQUEST_TAKEN)
        lane_discard(request)
        return NULL
    return request


cdef void slots_notify(Slots *slots, Sequence *sequence, EndReason reason, int64_t now) noexcept nogil:
    cdef Request *notice = NULL
    if slots.notice and (sequence.begun or sequence.queue.first != NULL) and not ends_itself(sequence):
        notice = notice_new(slots, sequence, reason, now)
    if notice != NULL:
        sequence_append(sequence, notice)
        slots_count(slots, sequence, 1)


# ---------------------------------------------------------------------------------------------------------------------
# After execution, and early ends

cdef void slots_request_done(Slots *slots, Request *request, int64_t now) noexcept nogil:
    cdef Sequence *sequence = <Sequence *>request.sequenced.sequence
    cdef InstanceSlots *slot_set = slots_set_of(slots, sequence)
    request.sequenced.sequence = NULL
    request.sequenced.states = NULL
    assert_that(sequence.running == request and slot_set.running > 0)
    sequence.running = NULL
    slot_set.running -= 1
    if slots.direct and slot_set.running == 0:
        slot_set.stirred = True
    sequence_go_on(slots, sequence, now)


cdef void slots_again(Slots *slots, Request *request, int64_t now) noexcept nogil:
    cdef Sequence *sequence = <Sequence *>request.sequenced.sequence
    cdef InstanceSlots *slot_set = slots_set_of(slots, sequence)
    request.sequence_start = False
    request_move(request, REQUEST_TAKEN, REQUEST_QUEUED)
    assert_that(sequence.running == request and slot_set.running > 0)
    sequence.running = NULL
    slot_set.running -= 1
    sequence_prepend(sequence, request)
    slots_count(slots, sequence, 1)
    sequence_go_on(slots, sequence, now)


cdef bint slots_remove(Slots *slots, Request *request, int64_t now) noexcept nogil:
    cdef Sequence *sequence = <Sequence *>request.sequenced.sequence
    if request.state != REQUEST_QUEUED:
        return False
    if request == sequence.queue.first:
        slots_unlist(slots, sequence)
    if request.next != NULL:
        slots_let_fall(slots, sequence, request.next, STATUS_CANCELLED,
                       "the sequence has ended: an earlier request of it was cancelled or its deadline passed",
                       REFUSAL_NONE)
    slots_count(slots, sequence, -1)
    sequence_cut(sequence, request)
    request.sequenced.sequence = NULL
    request_move(request, REQUEST_QUEUED, REQUEST_TAKEN)
    cut_short(slots, sequence, END_CANCELLED, now)
    return True


cdef bint slots_reconsider(Slots *slots, Request *request, const Terms *terms) noexcept nogil:
    cdef Sequence *sequence
    if request.state != REQUEST_QUEUED:
        return False
    sequence = <Sequence *>request.sequenced.sequence
    request.terms = terms[0]
    if sequence.slot < 0:
        return True
    slots_set_of(slots, sequence).stirred = True
    return False  # it no longer waits for a slot, so its time is not limited


cdef void slots_expire(Slots *slots, Request *request, int64_t now) noexcept nogil:
    cdef Sequence *sequence = <Sequence *>request.sequenced.sequence
    if request.state != REQUEST_QUEUED or sequence.slot >= 0:
        return
    slots_let_fall(slots, sequence, sequence.queue.first, STATUS_UNAVAILABLE,
                   "timeout of the corresponding sequence has been expired", REFUSAL_QUEUE_TIMEOUT)
    cut_short(slots, sequence, END_TIMEOUT, now)


cdef int64_t slots_evict(Slots *slots, int64_t now) noexcept nogil:
    while slots.idle.first != NULL and now - slots.idle.first.since_ns >= slots.idle_ns:
        cut_short(slots, slots.idle.first, END_IDLE, now)
    if slots.idle.first != NULL:
        return slots.idle.first.since_ns + slots.idle_ns
    return now + slots.idle_ns if slots.live else NEVER


cdef void slots_leave(Slots *slots, uint64_t stream, int64_t now) noexcept nogil:
    cdef Sequence *sequence = slots.tied_to[stream % STREAMS]
    cdef Sequence *following
    while sequence != NULL:
        following = sequence.behind
        if sequence.stream == stream and sequence.listed:
            cut_short(slots, sequence, END_STREAM, now)
        sequence = following


cdef void slots_supersede(Slots *slots, const Correlation *correlation, int64_t now) noexcept nogil:
    cdef Sequence *sequence = table_find_sequence(&slots.table, correlation)
    if sequence != NULL:
        cut_short(slots, sequence, END_REPLACED, now)


cdef void slots_remember(Slots *slots, const Slots *other) noexcept nogil:
    cdef const Sequence *sequence
    cdef uint32_t i
    for i in range(other.table.bucket_count):
        sequence = other.table.buckets[i]
        while sequence != NULL:
            if table_find_sequence(&slots.table, &sequence.correlation) == NULL:
                slots_eviction(slots, sequence.hash).hash = sequence.hash
                slots_eviction(slots, sequence.hash).reason = END_UNLOADED
            sequence = sequence.in_bucket


cdef void slots_close(Slots *slots, int64_t now) noexcept nogil:
    slots.closed = True
    while slots.idle.first != NULL:
        slots_end(slots, slots.idle.first, now)
    slots_stir(slots)


cdef bint slots_done(const Slots *slots, uint32_t instance) noexcept nogil:
    cdef const InstanceSlots *slot_set = slots.slot_sets[instance]
    return slots.closed and slot_set.waiting == 0 and slot_set.running == 0 and slots.backlog.count == 0
