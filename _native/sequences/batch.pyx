"""Forms batches of sequences by the model's strategy (`inferd._native.sequences.slots`)."""

from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memcmp

from inferd._native.assertion cimport assert_that
from inferd._native.execution.supply cimport END_CLIENT
from inferd._native.memory.resource cimport block_share
from inferd._native.refusal cimport REFUSAL_NONE
from inferd._native.request.life cimport request_move
from inferd._native.request.request cimport (
    REQUEST_NEW,
    REQUEST_QUEUED,
    REQUEST_TAKEN,
    InputData,
    Request,
    request_alike,
    request_free,
    request_new,
    request_reserve,
)
from inferd._native.scheduling.policy cimport (
    MISFIT,
    NEVER,
    BatchPlan,
    Candidates,
    candidates_add,
    candidates_begin,
    candidates_fit,
    candidates_plan,
    plan_nothing,
    policy_end,
)
from inferd._native.sequences.sequence cimport Sequence, sequence_pop, state_ahead, states_begin
from inferd._native.sequences.slots cimport (
    InstanceSlots,
    Slots,
    slots_count,
    slots_end,
    slots_let_fall,
    slots_release,
    slots_set_of,
    slots_unlist,
)
from inferd._native.status cimport STATUS_RESOURCE_EXHAUSTED

cdef int64_t RETRY_NS = 10_000_000           # after a lack of memory


cdef bint states_alike(const Slots *slots, const Sequence *a, const Sequence *b) noexcept nogil:
    # whether the states of the two have the same shapes, except for the batch dimension
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
    # whether their next requests may share a batch
    if not slots.lane.signature.uniform and not request_alike(a.queue.first, b.queue.first):
        return False
    return slots.steady or states_alike(slots, a, b)


cdef bint begin_state(Slots *slots, Sequence *sequence, int64_t now) noexcept nogil:
    # Set the initial state if the next request starts the sequence. False: no memory; the sequence has ended with all
    # its requests.
    cdef Request *request = sequence.queue.first
    if not request.sequence_start or states_begin(sequence, slots.plans, request.rows):
        return True
    slots_unlist(slots, sequence)
    slots_let_fall(slots, sequence, request, STATUS_RESOURCE_EXHAUSTED, NULL, REFUSAL_NONE)
    slots_end(slots, sequence, now)
    return False


cdef Request *give_out(Slots *slots, Sequence *sequence, int64_t now) noexcept nogil:
    # take the sequence's next request for the instance
    cdef Request *request
    slots_unlist(slots, sequence)
    request = sequence_pop(sequence)
    slots_count(slots, sequence, -1)
    request_move(request, REQUEST_QUEUED, REQUEST_TAKEN)
    request.sequenced.states = sequence.states
    if request.sequence_end and not request.sequenced.unasked:
        request.sequenced.end_reason = END_CLIENT
    assert_that(sequence.running == NULL and sequence.slot >= 0)
    sequence.running = request
    sequence.begun = not request.sequenced.unasked  # not after a notice of an end: the START behind it may never run
    slots_set_of(slots, sequence).running += 1
    if slots.direct and request.sequence_end and sequence.queue.first == NULL:
        slots_release(slots, sequence, now)   # its row is free for the next batch
    return request


cdef inline Request *join(Request *last, Request *request) noexcept nogil:
    # append the request to a chain; returns the last request of it
    if last != NULL:
        last.next = request
    request.next = NULL
    return request


# ---------------------------------------------------------------------------------------------------------------------
# Oldest

cdef void plan_oldest(const Slots *slots, InstanceSlots *slot_set, int64_t now, BatchPlan *plan) noexcept nogil:
    # over the sequences whose next request may run
    cdef const Sequence *oldest = slot_set.ready.first
    cdef const Sequence *sequence = oldest
    cdef Candidates found
    if oldest == NULL:
        return
    candidates_begin(&found)
    while sequence != NULL and candidates_fit(&found, &slots.policy, sequence.queue.first.rows):
        if sequence != oldest and not may_share(slots, oldest, sequence):
            found.full = MISFIT
            break
        candidates_add(&found, &slots.policy, sequence.queue.first.rows, sequence.since_ns)
        found.end_ns = min(found.end_ns, policy_end(&slots.policy, sequence.queue.first))
        sequence = sequence.next
    candidates_plan(&found, &slots.policy, NULL, NEVER if slots.closed else now, plan)
    if plan.count == 0:
        slot_set.wake_rows = plan.wake_rows
        slot_set.wake_ns = plan.wake_ns


cdef Request *cut_oldest(Slots *slots, InstanceSlots *slot_set, int64_t now, BatchPlan *plan) noexcept nogil:
    cdef Sequence *sequence = slot_set.ready.first
    cdef Request *first = NULL
    cdef Request *last = NULL
    cdef uint32_t _
    for _ in range(plan.count):
        if not begin_state(slots, sequence, now):
            plan.wake_ns = now
            return NULL
        sequence = sequence.next
    for _ in range(plan.count):
        last = join(last, give_out(slots, slot_set.ready.first, now))
        if first == NULL:
            first = last
    return first


# ---------------------------------------------------------------------------------------------------------------------
# Direct

cdef Sequence *find_like(const Slots *slots, const InstanceSlots *slot_set, int64_t now, int64_t *wake) noexcept nogil:
    # the sequence whose request determines the shapes of the next batch; NULL: there is no batch yet
    cdef Sequence *oldest = NULL
    cdef Sequence *sequence
    cdef uint32_t ready = 0
    cdef int64_t due = NEVER
    cdef uint32_t slot
    if slot_set.running:
        return NULL   # rows keep their place from one batch to the next
    for slot in range(slots.per_instance if slot_set.waiting else 0):
        sequence = slot_set.slots[slot]
        if sequence != NULL and sequence.queue.first != NULL:
            ready += 1
            due = min(due, policy_end(&slots.policy, sequence.queue.first))
            if oldest == NULL or sequence.queue.first.queued_ns < oldest.queue.first.queued_ns:
                oldest = sequence
    if oldest == NULL or slots.closed or slots.policy.delay_ns == 0 or slots.min_utilization == 0:
        return oldest
    due = min(due, oldest.queue.first.queued_ns + slots.policy.delay_ns)
    if now >= due or ready >= slots.min_utilization * slots.per_instance:
        return oldest
    wake[0] = due
    return NULL


cdef Request *null_new(const Request *like) noexcept nogil:
    # an idle row with the tensors of `like`, which the model must not change through it; NULL: no memory
    cdef Request *request = request_new()
    cdef uint32_t i
    if request == NULL:
        return NULL
    request.sequenced.unasked = request.sequenced.null = True
    request_move(request, REQUEST_NEW, REQUEST_TAKEN)
    if not request_reserve(request, like.signature):
        request_free(request)
        return NULL
    for i in range(like.signature.input_count):
        request.inputs[i] = like.inputs[i]
        if like.inputs[i].present:
            block_share(like.inputs[i].block)
            request.inputs[i].exclusive = False
        else:
            request.inputs[i].block = NULL
    request.rows = 1
    request.sequenced.states = (<Sequence *>like.sequenced.sequence).states
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
    # `count` idle rows, or none
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


cdef bint begin_states(Slots *slots, InstanceSlots *slot_set, int64_t now) noexcept nogil:
    cdef Sequence *sequence
    cdef uint32_t slot
    for slot in range(slots.per_instance):
        sequence = slot_set.slots[slot]
        if sequence != NULL and sequence.queue.first != NULL and not begin_state(slots, sequence, now):
            return False
    return True


cdef uint32_t choose_rows(const Slots *slots, const InstanceSlots *slot_set, const Sequence *like,
                          uint32_t *idle) noexcept nogil:
    # mark the sequences that get their row; the number of rows, and how many of them are idle
    cdef Sequence *sequence
    cdef uint32_t rows = 0
    cdef uint32_t ready = 0
    cdef uint32_t slot
    for slot in range(slots.per_instance):
        sequence = slot_set.slots[slot]
        if sequence != NULL and sequence.queue.first != NULL and may_share(slots, like, sequence):
            sequence.chosen = True
            rows = slot + 1
            ready += 1
    idle[0] = rows - ready
    return rows


cdef void plan_direct(const Slots *slots, InstanceSlots *slot_set, int64_t now, BatchPlan *plan) noexcept nogil:
    slot_set.like = find_like(slots, slot_set, now, &plan.wake_ns)
    plan.count = slot_set.like != NULL


cdef Request *cut_direct(Slots *slots, InstanceSlots *slot_set, int64_t now, BatchPlan *plan) noexcept nogil:
    cdef Sequence *like = slot_set.like
    cdef Sequence *sequence
    cdef Request *nulls
    cdef Request *following
    cdef Request *first = NULL
    cdef Request *last = NULL
    cdef uint32_t idle = 0
    cdef uint32_t rows, slot
    cdef bint good
    if slots.lane.signature.state_count and not begin_states(slots, slot_set, now):
        plan.wake_ns = now
        return NULL
    rows = choose_rows(slots, slot_set, like, &idle)
    nulls = null_rows(like.queue.first, idle, &good)
    for slot in range(rows):
        sequence = slot_set.slots[slot]
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
        plan.wake_ns = now + RETRY_NS
    return first


# ---------------------------------------------------------------------------------------------------------------------

cdef bint is_held(const Slots *slots, InstanceSlots *slot_set) noexcept nogil:
    # for external tests that need several requests to wait at once: see TRITONSERVER_DELAY_SCHEDULER
    cdef uint32_t waiting, i
    if slot_set.released or slots.closed or (slots.hold == 0 and slots.hold_backlog == 0):
        return False
    waiting = slots.waiting - slots.backlog_waiting if slots.direct else slot_set.ready.count
    slot_set.released = waiting >= slots.hold and slots.backlog_waiting >= slots.hold_backlog
    if slot_set.released and slots.direct:
        for i in range(slots.slot_set_count):  # the requests that this instance takes now do not count for the others
            slots.slot_sets[i].released = True
    return not slot_set.released


cdef void slots_plan(Slots *slots, uint32_t instance, int64_t now, BatchPlan *plan) noexcept nogil:
    cdef InstanceSlots *slot_set = slots.slot_sets[instance]
    plan_nothing(plan)
    slot_set.stirred = False
    slot_set.wake_rows = 1
    slot_set.wake_ns = NEVER
    if is_held(slots, slot_set):
        return
    if slots.direct:
        plan_direct(slots, slot_set, now, plan)
    else:
        plan_oldest(slots, slot_set, now, plan)


cdef Request *slots_cut(Slots *slots, uint32_t instance, int64_t now, BatchPlan *plan) noexcept nogil:
    if slots.direct:
        return cut_direct(slots, slots.slot_sets[instance], now, plan)
    return cut_oldest(slots, slots.slot_sets[instance], now, plan)
