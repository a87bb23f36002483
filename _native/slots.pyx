"""Slots: the policy of sequence batching.

Every instance has slots. A sequence gets a free one with its first request, the lowest slot of all instances first, and
keeps it until it ends; so one instance executes all its requests, in order. Sequences that find none wait in the
backlog, as a whole and in the order in which they started. An instance never has two requests of one sequence.

*direct*: a slot is a row of the batch, `max_batch_size` to an instance. A batch consists of the rows up to the last
that has a request; the others are null requests, for which the model is told READY = false. With a delay and a minimum
utilization, a batch waits until so many slots have a request, or until the oldest has waited for the delay. The oldest
request decides which shapes a batch has; rows of other shapes wait for the next one.

*oldest*: a slot is a candidate, and each instance batches the next requests of its candidates by the rules of dynamic
batching (`_native.queue`), in the order in which they became ready.

A sequence ends with the request that says END; when it has had no request for `max_sequence_idle_microseconds`; when a
request of it is cancelled while it waits, with the requests behind it; and with its stream, if it is tied to it. Where
the model asks for it, it is told of the last three by a request that the policy makes, with END and the reason.

Behaviour follows Triton's sequence batcher ("sequence_batch_scheduler.cc"); docs/differences.md says where it does not.
"""

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcmp, memset

from _native.atomic cimport fetch_add32
from _native.datatype cimport DT_BYTES, datatype_name, datatype_size
from _native.lane cimport LANE_CLOSED, LANE_FULL, LANE_REFUSED, PUSHED, Pushed
from _native.memory cimport block_give, block_share, block_take
from _native.preferred cimport is_preferred, next_preferred
from _native.request cimport (
    REQUEST_QUEUED,
    REQUEST_TAKEN,
    STATUS_CANCELLED,
    STATUS_INVALID_ARGUMENT,
    STATUS_RESOURCE_EXHAUSTED,
    STATUS_UNAVAILABLE,
    Correlation,
    InputData,
    Request,
    request_alike,
    request_fail,
    request_free,
    request_new,
    request_reserve,
)
from _native.sequence cimport (
    Sequence,
    correlation_hash,
    sequence_append,
    sequence_cut,
    sequence_free,
    sequence_new,
    sequence_pop,
    sequence_prepend,
    sequences_append,
    sequences_remove,
    state_ahead,
    states_begin,
    table_add_sequence,
    table_find_sequence,
    table_free_sequences,
    table_remove_sequence,
)
from _native.signature cimport SUPPLY_CORRELATION, Signature, TensorSignature
from _native.supply cimport (
    END_CANCELLED,
    END_CLIENT,
    END_IDLE,
    END_NONE,
    END_REPLACED,
    END_STREAM,
    END_TIMEOUT,
    EndReason,
)
from _native.text cimport clip, format_text

cdef int64_t NEVER = 0x7fffffffffffffff
cdef int64_t RETRY_NS = 10_000_000           # after a lack of memory


# ---------------------------------------------------------------------------------------------------------------------
# Slots

cdef inline bint is_lower(Vacancy a, Vacancy b) noexcept nogil:
    return a.slot < b.slot or (a.slot == b.slot and a.seat < b.seat)


cdef void vacate(Slots *slots, Vacancy vacancy) noexcept nogil:
    cdef uint32_t at
    slots.vacant_count += 1
    at = slots.vacant_count
    while at > 1 and is_lower(vacancy, slots.vacant[at // 2]):
        slots.vacant[at] = slots.vacant[at // 2]
        at //= 2
    slots.vacant[at] = vacancy


cdef Vacancy lowest_vacancy(Slots *slots) noexcept nogil:
    # take it out
    cdef Vacancy found = slots.vacant[1]
    cdef Vacancy last = slots.vacant[slots.vacant_count]
    cdef uint32_t at = 1
    cdef uint32_t child = 2
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


cdef inline Bench *bench_of(const Slots *slots, const Sequence *sequence) noexcept nogil:
    return slots.benches[sequence.seat]


cdef void place(Slots *slots, Sequence *sequence, Vacancy vacancy) noexcept nogil:
    sequence.slot = <int32_t>vacancy.slot
    sequence.seat = vacancy.seat
    slots.benches[vacancy.seat].slots[vacancy.slot] = sequence


cdef void release_slot(Slots *slots, Sequence *sequence, int64_t now) noexcept nogil:
    # the next of the backlog gets it
    cdef Sequence *following = slots.backlog.first
    cdef Bench *bench = bench_of(slots, sequence)
    cdef Vacancy vacancy
    if sequence.slot < 0:
        return
    vacancy.slot = <uint32_t>sequence.slot
    vacancy.seat = sequence.seat
    sequence.slot = -1
    bench.slots[vacancy.slot] = NULL
    if following == NULL:
        vacate(slots, vacancy)
        return
    sequences_remove(following)
    place(slots, following, vacancy)
    slots.backlog_waiting -= following.waiting
    bench.waiting += following.waiting
    make_ready(slots, following, now)


cdef void make_ready(Slots *slots, Sequence *sequence, int64_t now) noexcept nogil:
    # its next request may run
    cdef Bench *bench = bench_of(slots, sequence)
    if not slots.direct:
        sequences_append(&bench.ready, sequence, now)
        bench.ready_rows += sequence.head.rows
    if slots.direct or bench.ready_rows >= bench.wake_rows or not slots.lane.signature.uniform:
        bench.stirred = True


cdef void leave_list(Slots *slots, Sequence *sequence) noexcept nogil:
    # idle or ready, but not the backlog
    cdef Bench *bench
    if sequence.list == NULL or sequence.list == &slots.backlog:
        return
    if sequence.list != &slots.idle:
        bench = bench_of(slots, sequence)
        bench.ready_rows -= sequence.head.rows
    sequences_remove(sequence)


cdef bint slots_add_bench(Slots *slots) noexcept nogil:
    cdef uint32_t count = slots.bench_count + 1
    cdef Bench *bench = <Bench *>calloc(1, sizeof(Bench))
    cdef Bench **benches = <Bench **>realloc(slots.benches, count * sizeof(Bench *))
    cdef Vacancy *vacant = <Vacancy *>realloc(
        slots.vacant, (<size_t>count * slots.per_seat + 1) * sizeof(Vacancy))
    cdef Vacancy vacancy
    if benches != NULL:
        slots.benches = benches
    if vacant != NULL:
        slots.vacant = vacant
    if bench != NULL:
        bench.slots = <Sequence **>calloc(slots.per_seat, sizeof(Sequence *))
    if bench == NULL or benches == NULL or vacant == NULL or bench.slots == NULL:
        if bench != NULL:
            free(bench.slots)
        free(bench)
        return False
    slots.benches[slots.bench_count] = bench
    slots.bench_count = count
    vacancy.seat = count - 1
    for vacancy.slot in range(slots.per_seat):
        vacate(slots, vacancy)
    return True


cdef void slots_clear(Slots *slots) noexcept nogil:
    cdef uint32_t i, k
    cdef Sequence *sequence
    for i in range(slots.bench_count):
        for k in range(slots.per_seat):
            sequence = slots.benches[i].slots[k]
            if sequence != NULL:
                sequence_free(sequence)
        free(slots.benches[i].slots)
        free(slots.benches[i])
    table_free_sequences(&slots.table)
    free(slots.benches)
    free(slots.vacant)
    free(slots.evictions)
    if slots.plans != NULL:
        for i in range(slots.lane.signature.state_count):
            block_give(slots.plans[i].initial.block)
    free(slots.plans)


# ---------------------------------------------------------------------------------------------------------------------
# The life of a sequence

cdef void end_sequence(Slots *slots, Sequence *sequence, int64_t now) noexcept nogil:
    # it has no requests
    leave_list(slots, sequence)
    sequences_remove(sequence)
    table_remove_sequence(&slots.table, sequence)
    release_slot(slots, sequence, now)
    slots.live -= 1
    sequence_free(sequence)


cdef void go_on(Slots *slots, Sequence *sequence, int64_t now) noexcept nogil:
    # no request of it runs, and it is in no list but perhaps the backlog: what next
    if sequence.head != NULL:
        if sequence.slot >= 0:
            make_ready(slots, sequence, now)
    elif sequence.over or slots.closed:
        end_sequence(slots, sequence, now)
    else:
        sequences_append(&slots.idle, sequence, now)


cdef void stir_all(Slots *slots) noexcept nogil:
    cdef uint32_t i
    for i in range(slots.bench_count):
        slots.benches[i].stirred = True


cdef void add_waiting(Slots *slots, Sequence *sequence, int32_t count) noexcept nogil:
    slots.waiting += count
    if sequence.slot >= 0:
        bench_of(slots, sequence).waiting += count
    else:
        slots.backlog_waiting += count


cdef void let_fall(Slots *slots, Request *request, int status, char *details, const char *reason) noexcept nogil:
    # a request that will not run; `details` is taken over
    request.sequence = NULL
    request.state = REQUEST_TAKEN
    request_fail(request, status, details)
    request.response.reason = reason
    request.next = slots.fallen
    slots.fallen = request


cdef void free_unasked(Slots *slots, Request *request) noexcept nogil:
    fetch_add32(&slots.lane.in_flight, -1)
    request_free(request)


cdef inline Eviction *eviction_of(const Slots *slots, uint64_t hash) noexcept nogil:
    return &slots.evictions[hash % EVICTIONS]


cdef void cut_short(Slots *slots, Sequence *sequence, EndReason reason, int64_t now) noexcept nogil:
    # it ends without an END of the client, after what still waits in it; its lists fit that already
    cdef Request *notice = NULL
    table_remove_sequence(&slots.table, sequence)
    sequence.over = True
    eviction_of(slots, sequence.hash).hash = sequence.hash
    eviction_of(slots, sequence.hash).reason = reason
    if slots.notice and (sequence.begun or sequence.head != NULL) and not ends_itself(sequence):
        notice = notice_new(slots, sequence, reason, now)
    if sequence.list == &slots.idle:
        sequences_remove(sequence)
    if notice != NULL:
        sequence_append(sequence, notice)
        add_waiting(slots, sequence, 1)
    if sequence.running == NULL and (sequence.list == NULL or sequence.head == NULL):
        go_on(slots, sequence, now)


cdef bint ends_itself(const Sequence *sequence) noexcept nogil:
    if sequence.tail != NULL:
        return sequence.tail.sequence_end
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
    # the request by which the model hears that a sequence has ended; NULL: no memory
    cdef const Signature *signature = &slots.lane.signature
    cdef Request *request = request_new()
    cdef bint good
    cdef uint32_t i
    if request == NULL:
        return NULL
    request.unasked = True
    request.lane = slots.lane
    fetch_add32(&slots.lane.in_flight, 1)
    request.bridge = slots.bridge
    request.rows = sequence.rows
    request.correlation = sequence.correlation
    request.sequence_end = True
    request.end_reason = reason
    request.state = REQUEST_QUEUED
    request.arrived_ns = request.queued_ns = now
    good = request_reserve(request, signature)
    for i in range(signature.input_count if good else 0):
        if not signature.inputs[i].optional:
            fill_zero(&signature.inputs[i], signature.max_batch_size > 0, request.rows, &request.inputs[i])
            good = good and request.inputs[i].present
    if not good:
        free_unasked(slots, request)
        return NULL
    return request


# ---------------------------------------------------------------------------------------------------------------------
# Requests come

cdef Pushed refuse(Request *request, int status, char *details) noexcept nogil:
    request_fail(request, status, details)
    return LANE_REFUSED


cdef char *id_text(const Correlation *correlation) noexcept nogil:
    # from malloc
    if correlation.text.data == NULL:
        return format_text("%llu", <unsigned long long>correlation.number)
    return format_text("%.*s", clip(correlation.text.size), correlation.text.data)


cdef const char *end_text(int32_t reason) noexcept nogil:
    if reason == END_IDLE:
        return ": the sequence was ended because no request had come for max_sequence_idle_microseconds"
    if reason == END_CANCELLED:
        return ": the sequence was ended when a request of it was cancelled or its deadline passed"
    if reason == END_STREAM:
        return ": the sequence was ended with the stream that it had started on"
    if reason == END_TIMEOUT:
        return ": the sequence was ended because it had waited for a slot longer than its timeout"
    return ""


cdef Pushed refuse_unknown(Slots *slots, Request *request) noexcept nogil:
    cdef uint64_t hash = correlation_hash(&request.correlation)
    cdef const Eviction *eviction = eviction_of(slots, hash)
    cdef char *id = id_text(&request.correlation)
    cdef int32_t reason = eviction.reason if eviction.hash == hash else <int32_t>END_NONE
    refuse(request, STATUS_INVALID_ARGUMENT, NULL if id == NULL else format_text(
        "inference request for sequence %s to model '%s' must specify the START flag on the first request of the "
        "sequence%s", id, slots.lane.signature.name.data, end_text(reason)))
    if reason != END_NONE:
        request.response.reason = "SEQUENCE_ENDED"
    free(id)
    return LANE_REFUSED


cdef bint id_fits(const Slots *slots, Request *request) noexcept nogil:
    # the kind of id that the model's CORRID takes; False: the request is refused
    cdef const Signature *signature = &slots.lane.signature
    cdef const TensorSignature *tensor
    cdef bint text = request.correlation.text.data != NULL
    cdef uint32_t i
    for i in range(signature.supplied_count):
        tensor = &signature.inputs[signature.input_count + i]
        if signature.supplied[i].kind == SUPPLY_CORRELATION and (tensor.datatype == DT_BYTES) != text:
            refuse(request, STATUS_INVALID_ARGUMENT, format_text(
                "sequence batching control '%s' data-type is '%s', but model '%s' expects '%s'", tensor.name.data,
                b"BYTES" if text else b"UINT64", signature.name.data, datatype_name(tensor.datatype)))
            return False
    return True


cdef bint is_well_formed(const Slots *slots, Request *request) noexcept nogil:
    # what a request must have whatever its sequence; False: it is refused
    cdef const char *name = slots.lane.signature.name.data
    if slots.direct and request.rows > 1:
        refuse(request, STATUS_INVALID_ARGUMENT, format_text(
            "inference request to model '%s' must specify batch-size 1 due to requirements of sequence batcher, got "
            "%u: with strategy 'direct' a sequence is one row of the batch", name, request.rows))
        return False
    if not request.correlation.given and not slots.iterative:
        refuse(request, STATUS_INVALID_ARGUMENT, format_text(
            "inference request to model '%s' must specify a non-zero or non-empty correlation ID", name))
        return False
    return not request.correlation.given or id_fits(slots, request)


cdef bint rows_fit(const Slots *slots, const Sequence *sequence, Request *request) noexcept nogil:
    # the state of a sequence has a row for each of a request's
    if slots.lane.signature.state_count == 0 or request.sequence_start or request.rows == sequence.rows:
        return True
    refuse(request, STATUS_INVALID_ARGUMENT, format_text(
        "inference request to model '%s' must have the batch size %u with which its sequence started, got %u: the "
        "sequence has a state for each row", slots.lane.signature.name.data, sequence.rows, request.rows))
    return False


cdef Sequence *open_sequence(Slots *slots, Request *request) noexcept nogil:
    # a new sequence with a slot, or in the backlog; NULL: the request is refused
    cdef Sequence *sequence
    if slots.vacant_count == 0 and slots.max_backlog and slots.backlog.count >= slots.max_backlog:
        refuse(request, STATUS_UNAVAILABLE, format_text(
            "Exceeds maximum queue size: all slots of model '%s' are taken, and %u sequences wait for one, which is "
            "its limit", slots.lane.signature.name.data, slots.backlog.count))
        request.response.reason = "QUEUE_FULL"
        return NULL
    sequence = sequence_new(&request.correlation, slots.lane.signature.state_count)
    if sequence == NULL:
        refuse(request, STATUS_RESOURCE_EXHAUSTED, NULL)
        return NULL
    if not slots.iterative and not table_add_sequence(&slots.table, sequence):
        sequence_free(sequence)
        refuse(request, STATUS_RESOURCE_EXHAUSTED, NULL)
        return NULL
    if eviction_of(slots, sequence.hash).hash == sequence.hash:
        eviction_of(slots, sequence.hash).reason = END_NONE
    if slots.tied:
        sequence.stream = request.stream
    slots.live += 1
    if slots.vacant_count:
        place(slots, sequence, lowest_vacancy(slots))
    else:
        sequences_append(&slots.backlog, sequence, request.queued_ns)
    return sequence


cdef void begin_anew(Slots *slots, Sequence *sequence, int64_t now) noexcept nogil:
    # START in a sequence that lives: what waits in it still runs, and the model hears of its end if it wants to
    cdef Request *notice = NULL
    if slots.notice and (sequence.begun or sequence.head != NULL) and not ends_itself(sequence):
        notice = notice_new(slots, sequence, END_REPLACED, now)
    if notice != NULL:
        sequence_append(sequence, notice)
        add_waiting(slots, sequence, 1)


cdef int64_t slot_deadline(const Slots *slots, const Request *request, int64_t now) noexcept nogil:
    # until when its sequence may wait for a slot; 0: as long as it takes
    cdef int64_t longest = slots.timeout_ns
    cdef int64_t own = 1000 * min(request.timeout_us, NEVER // 4000)
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
        at_rest = sequence.head == NULL and sequence.running == NULL
        if sequence.list == &slots.idle:
            sequences_remove(sequence)
        if request.sequence_start:
            begin_anew(slots, sequence, now)
    if request.sequence_start:
        sequence.rows = request.rows
    request.state = REQUEST_QUEUED
    request.queued_ns = now
    sequence_append(sequence, request)
    add_waiting(slots, sequence, 1)
    if request.sequence_end or slots.iterative:
        sequence.over = True
        table_remove_sequence(&slots.table, sequence)
    if sequence.slot < 0:
        request.expires_ns = slot_deadline(slots, request, now)
    if at_rest:
        make_ready(slots, sequence, now)
    elif slots.direct and sequence.slot >= 0:
        bench_of(slots, sequence).stirred = True
    if slots.hold or slots.hold_backlog:
        stir_all(slots)  # they may be held until so many wait
    return PUSHED


cdef void begin_iteration(Slots *slots, Request *request) noexcept nogil:
    # a request is a sequence of its own, begun by itself
    request.sequence_start = True
    request.sequence_end = False
    if not request.correlation.given:
        slots.last_id += 1
        request.correlation.given = True
        request.correlation.number = slots.last_id


# ---------------------------------------------------------------------------------------------------------------------
# Requests go

cdef bint states_alike(const Slots *slots, const Sequence *a, const Sequence *b) noexcept nogil:
    # the states that they bring have the same shapes, but for the batch dimension
    cdef bint batches = slots.lane.signature.max_batch_size > 0
    cdef const InputData *x
    cdef const InputData *y
    cdef uint32_t i
    for i in range(slots.lane.signature.state_count):
        x = state_ahead(a, slots.plans, i)
        y = state_ahead(b, slots.plans, i)
        if memcmp(x.shape + batches, y.shape + batches, (x.rank - batches) * sizeof(int64_t)) != 0:
            return False
    return True


cdef inline bint may_share(const Slots *slots, const Sequence *a, const Sequence *b) noexcept nogil:
    # their next requests may share a batch
    if not slots.lane.signature.uniform and not request_alike(a.head, b.head):
        return False
    return slots.steady or states_alike(slots, a, b)


cdef void let_all_fall(Slots *slots, Sequence *sequence, Request *first, int status, const char *text,
                       const char *reason) noexcept nogil:
    # a request that waits and all behind it; `text` NULL: no memory
    cdef Request *request = first
    cdef Request *following
    add_waiting(slots, sequence, -<int32_t>chain_length(first))
    sequence_cut(sequence, first)
    while request != NULL:
        following = request.next
        if request.unasked:
            free_unasked(slots, request)
        else:
            let_fall(slots, request, status, NULL if text == NULL else format_text("%s", text), reason)
        request = following


cdef uint32_t chain_length(const Request *request) noexcept nogil:
    cdef uint32_t count = 0
    while request != NULL:
        count += 1
        request = request.next
    return count


cdef bint begin_state(Slots *slots, Sequence *sequence, int64_t now) noexcept nogil:
    # of its next request, which stands for a batch; False: no memory, and the sequence is gone with all its requests
    cdef Request *request = sequence.head
    if not request.sequence_start or states_begin(sequence, slots.plans, request.rows):
        return True
    leave_list(slots, sequence)
    let_all_fall(slots, sequence, request, STATUS_RESOURCE_EXHAUSTED, NULL, NULL)
    end_sequence(slots, sequence, now)
    return False


cdef Request *give_out(Slots *slots, Sequence *sequence, int64_t now) noexcept nogil:
    # its next request to the instance
    cdef Request *request
    leave_list(slots, sequence)
    request = sequence_pop(sequence)
    add_waiting(slots, sequence, -1)
    request.state = REQUEST_TAKEN
    request.states = sequence.states
    if request.sequence_end and not request.unasked:
        request.end_reason = END_CLIENT
    sequence.running = request
    sequence.begun = True
    bench_of(slots, sequence).running += 1
    if slots.direct and request.sequence_end and sequence.head == NULL:
        release_slot(slots, sequence, now)   # its row is free for the next batch
    return request


cdef uint32_t plan_oldest(const Slots *slots, Bench *bench, int64_t now, int64_t *wake) noexcept nogil:
    # how many of the ready sequences form a batch; 0: none yet. See queue_plan.
    cdef const Sequence *oldest = bench.ready.first
    cdef const Sequence *sequence
    cdef uint64_t rows
    cdef uint32_t count = 1
    cdef uint32_t preferred = 0
    cdef bint full
    bench.wake_rows = 1
    if oldest == NULL:
        return 0
    rows = oldest.head.rows
    if is_preferred(&slots.preferred, rows):
        preferred = 1
    full = rows >= slots.max_rows
    sequence = oldest.next
    while sequence != NULL and not full:
        if rows + sequence.head.rows > slots.max_rows or not may_share(slots, oldest, sequence):
            full = True
        else:
            rows += sequence.head.rows
            count += 1
            if is_preferred(&slots.preferred, rows):
                preferred = count
            full = rows >= slots.max_rows
            sequence = sequence.next
    if slots.closed or now - oldest.since_ns >= slots.delay_ns:
        return count
    if preferred:
        return preferred
    if full:
        return count
    wake[0] = oldest.since_ns + slots.delay_ns
    bench.wake_rows = next_preferred(&slots.preferred, rows, slots.max_rows)
    return 0


cdef Request *take_oldest(Slots *slots, Bench *bench, int64_t now, int64_t *wake) noexcept nogil:
    cdef uint32_t count = plan_oldest(slots, bench, now, wake)
    cdef Sequence *sequence = bench.ready.first
    cdef Request *first = NULL
    cdef Request *last = NULL
    cdef uint32_t _
    for _ in range(count):
        if not begin_state(slots, sequence, now):
            wake[0] = now
            return NULL
        sequence = sequence.next
    for _ in range(count):
        last = join(last, give_out(slots, bench.ready.first, now))
        if first == NULL:
            first = last
    return first


cdef inline Request *join(Request *last, Request *request) noexcept nogil:
    # behind the others of a chain; the last of it now
    if last != NULL:
        last.next = request
    request.next = NULL
    return request


cdef Sequence *plan_direct(const Slots *slots, const Bench *bench, int64_t now, int64_t *wake) noexcept nogil:
    # the sequence whose request decides what a batch looks like; NULL: there is none yet
    cdef Sequence *oldest = NULL
    cdef Sequence *sequence
    cdef uint32_t ready = 0
    cdef uint32_t slot
    if bench.running:
        return NULL   # rows keep their place from one batch to the next
    for slot in range(slots.per_seat if bench.waiting else 0):
        sequence = bench.slots[slot]
        if sequence != NULL and sequence.head != NULL:
            ready += 1
            if oldest == NULL or sequence.head.queued_ns < oldest.head.queued_ns:
                oldest = sequence
    if oldest == NULL or slots.closed or slots.delay_ns == 0 or slots.min_utilization == 0:
        return oldest
    if now - oldest.head.queued_ns >= slots.delay_ns or ready >= slots.min_utilization * slots.per_seat:
        return oldest
    wake[0] = oldest.head.queued_ns + slots.delay_ns
    return NULL


cdef Request *null_new(const Request *like) noexcept nogil:
    # an idle row with the tensors of another; NULL: no memory
    cdef Request *request = request_new()
    cdef uint32_t i
    if request == NULL:
        return NULL
    request.unasked = request.null = True
    request.state = REQUEST_TAKEN
    if not request_reserve(request, like.signature):
        request_free(request)
        return NULL
    for i in range(like.signature.input_count):
        request.inputs[i] = like.inputs[i]
        if like.inputs[i].present:
            block_share(like.inputs[i].block)
        else:
            request.inputs[i].block = NULL
    request.rows = 1
    request.states = (<Sequence *>like.sequence).states
    request.bridge = like.bridge
    request.arrived_ns = like.arrived_ns
    request.queued_ns = like.queued_ns
    return request


cdef void free_chain(Request *chain) noexcept nogil:
    cdef Request *following
    while chain != NULL:
        following = chain.next
        request_free(chain)
        chain = following


cdef Request *null_rows(const Request *like, uint32_t count, bint *good) noexcept nogil:
    # so many idle rows, or none
    cdef Request *chain = NULL
    cdef Request *request
    cdef uint32_t _
    good[0] = True
    for _ in range(count):
        request = null_new(like)
        if request == NULL:
            free_chain(chain)
            good[0] = False
            return NULL
        request.next = chain
        chain = request
    return chain


cdef bint begin_states(Slots *slots, Bench *bench, int64_t now) noexcept nogil:
    cdef Sequence *sequence
    cdef uint32_t slot
    for slot in range(slots.per_seat):
        sequence = bench.slots[slot]
        if sequence != NULL and sequence.head != NULL and not begin_state(slots, sequence, now):
            return False
    return True


cdef uint32_t choose_rows(const Slots *slots, const Bench *bench, const Sequence *like, uint32_t *idle) noexcept nogil:
    # mark the sequences that get their row; the number of rows, and how many of them are idle
    cdef Sequence *sequence
    cdef uint32_t rows = 0
    cdef uint32_t ready = 0
    cdef uint32_t slot
    for slot in range(slots.per_seat):
        sequence = bench.slots[slot]
        if sequence != NULL and sequence.head != NULL and may_share(slots, like, sequence):
            sequence.chosen = True
            rows = slot + 1
            ready += 1
    idle[0] = rows - ready
    return rows


cdef Request *take_direct(Slots *slots, Bench *bench, int64_t now, int64_t *wake) noexcept nogil:
    cdef Sequence *like = plan_direct(slots, bench, now, wake)
    cdef Sequence *sequence
    cdef Request *nulls
    cdef Request *following
    cdef Request *first = NULL
    cdef Request *last = NULL
    cdef uint32_t idle = 0
    cdef uint32_t rows, slot
    cdef bint good
    if like == NULL:
        return NULL
    if slots.lane.signature.state_count and not begin_states(slots, bench, now):
        wake[0] = now
        return NULL
    rows = choose_rows(slots, bench, like, &idle)
    nulls = null_rows(like.head, idle, &good)
    for slot in range(rows):
        sequence = bench.slots[slot]
        if sequence != NULL and sequence.chosen:
            sequence.chosen = False
            if good:
                last = join(last, give_out(slots, sequence, now))
        elif good:
            following = nulls.next
            last = join(last, nulls)
            nulls = following
        if first == NULL:
            first = last
    if not good:
        wake[0] = now + RETRY_NS
    return first


cdef bint is_held(const Slots *slots, Bench *bench) noexcept nogil:
    # for outside tests, which want requests to meet: see TRITONSERVER_DELAY_SCHEDULER
    cdef uint32_t waiting
    if bench.released or slots.closed or (slots.hold == 0 and slots.hold_backlog == 0):
        return False
    waiting = slots.waiting - slots.backlog_waiting if slots.direct else bench.ready.count
    bench.released = waiting >= slots.hold and slots.backlog_waiting >= slots.hold_backlog
    return not bench.released


cdef Request *slots_take(Slots *slots, uint32_t seat, int64_t now, int64_t *wake) noexcept nogil:
    cdef Bench *bench = slots.benches[seat]
    wake[0] = NEVER
    bench.stirred = False
    bench.wake_rows = 1
    if is_held(slots, bench):
        return NULL
    if slots.direct:
        return take_direct(slots, bench, now, wake)
    return take_oldest(slots, bench, now, wake)


# ---------------------------------------------------------------------------------------------------------------------
# Requests come back, or do not

cdef void slots_settle(Slots *slots, Request *request, int64_t now) noexcept nogil:
    cdef Sequence *sequence = <Sequence *>request.sequence
    cdef Bench *bench = bench_of(slots, sequence)
    request.sequence = NULL
    request.states = NULL
    sequence.running = NULL
    bench.running -= 1
    if slots.direct and bench.running == 0:
        bench.stirred = True
    go_on(slots, sequence, now)


cdef void slots_again(Slots *slots, Request *request, int64_t now) noexcept nogil:
    cdef Sequence *sequence = <Sequence *>request.sequence
    cdef Bench *bench = bench_of(slots, sequence)
    request.sequence_start = False
    request.state = REQUEST_QUEUED
    request.queued_ns = now
    sequence.running = NULL
    bench.running -= 1
    sequence_prepend(sequence, request)
    add_waiting(slots, sequence, 1)
    go_on(slots, sequence, now)


cdef bint slots_remove(Slots *slots, Request *request, int64_t now) noexcept nogil:
    cdef Sequence *sequence = <Sequence *>request.sequence
    if request.state != REQUEST_QUEUED:
        return False
    if request == sequence.head:
        leave_list(slots, sequence)
    if request.next != NULL:
        let_all_fall(slots, sequence, request.next, STATUS_CANCELLED,
                     "the sequence has ended: an earlier request of it was cancelled or its deadline passed", NULL)
    add_waiting(slots, sequence, -1)
    sequence_cut(sequence, request)
    request.sequence = NULL
    request.state = REQUEST_TAKEN
    cut_short(slots, sequence, END_CANCELLED, now)
    return True


cdef void slots_expire(Slots *slots, Request *request, int64_t now) noexcept nogil:
    cdef Sequence *sequence = <Sequence *>request.sequence
    if request.state != REQUEST_QUEUED or sequence.slot >= 0:
        return
    let_all_fall(slots, sequence, sequence.head, STATUS_UNAVAILABLE,
                 "timeout of the corresponding sequence has been expired", "QUEUE_TIMEOUT")
    cut_short(slots, sequence, END_TIMEOUT, now)


cdef int64_t slots_evict(Slots *slots, int64_t now) noexcept nogil:
    while slots.idle.first != NULL and now - slots.idle.first.since_ns >= slots.idle_ns:
        cut_short(slots, slots.idle.first, END_IDLE, now)
    if slots.idle.first != NULL:
        return slots.idle.first.since_ns + slots.idle_ns
    return now + slots.idle_ns if slots.live else NEVER


cdef void slots_leave(Slots *slots, uint64_t stream, int64_t now) noexcept nogil:
    cdef Sequence *sequence
    cdef Sequence *following
    cdef uint32_t i
    for i in range(slots.table.bucket_count if slots.tied else 0):
        sequence = slots.table.buckets[i]
        while sequence != NULL:
            following = sequence.in_bucket
            if sequence.stream == stream:
                cut_short(slots, sequence, END_STREAM, now)
            sequence = following


cdef void slots_close(Slots *slots, int64_t now) noexcept nogil:
    slots.closed = True
    while slots.idle.first != NULL:
        end_sequence(slots, slots.idle.first, now)
    stir_all(slots)


cdef bint slots_done(const Slots *slots, uint32_t seat) noexcept nogil:
    cdef const Bench *bench = slots.benches[seat]
    return slots.closed and bench.waiting == 0 and bench.running == 0 and slots.backlog.count == 0
