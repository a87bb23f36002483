"""Sequencers: the lane of a model whose requests belong to sequences.

`inferd._native.sequences.slots` has the policy; this module adds the lock, the responses and the clock. Each instance
has a line of the dispatcher (`inferd._native.scheduling.dispatcher`) of its own, because sequences are tied to
instances.

One timer of the front ends idle sequences. It is set while any sequence is live, and counts as a request in flight, so
the lane outlives it.
"""

from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy

from inferd._native.atomic cimport fetch_add32, load32
from inferd._native.clock cimport now_ns
from inferd._native.memory.resource cimport block_take
from inferd._native.request.accounting cimport account_failed
from inferd._native.request.bridge cimport Bridge, PostedCallback, bridge_post, bridge_return
from inferd._native.request.lane cimport (
    PUSHED,
    Lane,
    LaneHandle,
    Pushed,
    Scheduler,
    SequenceHooks,
    lane_free,
    lane_new,
    stricter,
)
from inferd._native.request.request cimport Correlation, InputData, Request, Terms, request_fail
from inferd._native.request.signature cimport SUPPLY_STATE, Signature, TensorSignature
from inferd._native.request.statistics cimport FAILURE_OTHER
from inferd._native.scheduling.dispatcher cimport (
    Consumer,
    Dispatcher,
    Line,
    dispatcher_clear,
    dispatcher_init,
    line_init,
    line_touch,
)
from inferd._native.scheduling.limiter cimport RateLimiter
from inferd._native.scheduling.policy cimport LONGEST_DELAY, NEVER, BatchPlan, policy_set_oldest
from inferd._native.scheduling.waking cimport BatchScheduler, lines_look
from inferd._native.sequences.batch cimport slots_cut, slots_plan
from inferd._native.sequences.entry cimport slot_deadline, slots_push
from inferd._native.sequences.sequence cimport Sequence, StatePlan, states_commit, states_drop, table_find_sequence
from inferd._native.sequences.slots cimport (
    EVICTIONS,
    Eviction,
    Slots,
    slots_add_set,
    slots_again,
    slots_clear,
    slots_close,
    slots_done,
    slots_evict,
    slots_expire,
    slots_leave,
    slots_reconsider,
    slots_remember,
    slots_remove,
    slots_request_done,
    slots_supersede,
)
from inferd._native.status cimport STATUS_CANCELLED, STATUS_OK, STATUS_RESOURCE_EXHAUSTED
from inferd._native.text cimport format_text
from inferd._native.threads cimport lock, unlock
from inferd._native.timers cimport Timer, timers_clear, timers_set

import os

cdef int64_t SHORTEST_SWEEP_NS = 1_000_000   # between two searches for idle sequences


# ---------------------------------------------------------------------------------------------------------------------
# After each change: responses and decisions

cdef void answer(Sequencer *self, Request *chain) noexcept nogil:
    # return requests that have failed in the lane
    cdef int64_t now = now_ns()
    cdef Request *following
    while chain != NULL:
        following = chain.next
        account_failed(chain, now, FAILURE_OTHER)
        bridge_return(<Bridge *>chain.bridge, &chain.response, &chain.response)
        chain = following


cdef inline Request *take_fallen(Sequencer *self) noexcept nogil:
    cdef Request *fallen = self.slots.fallen
    self.slots.fallen = NULL
    return fallen


cdef void stir(Sequencer *self) noexcept nogil:
    # let the dispatcher decide about lines that may have a batch now; with the lock held
    cdef bint ending = self.slots.closed and self.slots.backlog.count == 0
    cdef uint32_t i
    for i in range(self.slots.slot_set_count):
        if self.lines[i].idle_count and (self.slots.slot_sets[i].stirred or ending):
            line_touch(self.lines[i])


cdef void tell(Sequencer *self) noexcept nogil:
    # wake the front when the last sequence of a draining lane has ended; with the lock held
    if self.slots.draining and not self.drained_posted and self.slots.table.count == 0 and self.slots.bridge != NULL:
        self.drained_posted = True
        post(self, &self.drained, drained)


cdef void post(Sequencer *self, Notice *notice, void (*run)(PostedCallback *callback) noexcept nogil) noexcept nogil:
    fetch_add32(&self.lane.in_flight, 1)
    notice.callback.run = run
    notice.lane = self
    bridge_post(<Bridge *>self.slots.bridge, &notice.callback)


cdef void drained(PostedCallback *callback) noexcept nogil:
    # in the front, which then looks whether its lanes have drained
    fetch_add32(&(<Notice *>callback).lane.lane.in_flight, -1)


cdef void decide_and_unlock(Sequencer *self) noexcept nogil:
    # The end of every change of the slots: decide, release the lock, return failed requests.
    cdef Request *fallen = take_fallen(self)
    stir(self)
    lines_look(self.dispatcher, now_ns() if self.dispatcher.touched != NULL else 0)
    tell(self)
    unlock(&self.dispatcher.guard)
    answer(self, fallen)


# ---------------------------------------------------------------------------------------------------------------------
# The lane

cdef Pushed push(Lane *lane, Request *request) noexcept nogil:
    cdef Sequencer *self = <Sequencer *>lane
    cdef Pushed pushed
    lock(&self.dispatcher.guard)
    self.slots.bridge = request.bridge
    pushed = slots_push(&self.slots, request, request.queued_ns)
    unlock(&self.dispatcher.guard)
    if pushed == PUSHED and not self.armed:
        arm(self, request.queued_ns + self.slots.idle_ns)
    return pushed


cdef void wake(Lane *lane) noexcept nogil:
    cdef Sequencer *self = <Sequencer *>lane
    lock(&self.dispatcher.guard)
    decide_and_unlock(self)


cdef bint remove(Lane *lane, Request *request) noexcept nogil:
    cdef Sequencer *self = <Sequencer *>lane
    cdef bint removed
    lock(&self.dispatcher.guard)
    removed = slots_remove(&self.slots, request, now_ns())
    decide_and_unlock(self)
    return removed


cdef bint expire(Lane *lane, Request *request) noexcept nogil:
    # the whole sequence of the request ends, and its requests fail
    cdef Sequencer *self = <Sequencer *>lane
    lock(&self.dispatcher.guard)
    slots_expire(&self.slots, request, now_ns())
    decide_and_unlock(self)
    return False


cdef void limit(Lane *lane, Request *request) noexcept nogil:
    request.expires_ns = slot_deadline(&(<Sequencer *>lane).slots, request, request.terms.executable_ns)


cdef bint reconsider(Lane *lane, Request *request, const Terms *terms) noexcept nogil:
    cdef Sequencer *self = <Sequencer *>lane
    cdef bint waits
    lock(&self.dispatcher.guard)
    waits = slots_reconsider(&self.slots, request, terms)
    decide_and_unlock(self)
    return waits


cdef Line *line_of(Lane *lane, const Consumer *consumer) noexcept nogil:
    cdef Sequencer *self = <Sequencer *>lane
    cdef bint good = True
    cdef Line *line
    lock(&self.dispatcher.guard)
    while good and self.slots.slot_set_count <= consumer.index:
        good = add_line(self)
    line = self.lines[consumer.index] if good else NULL
    unlock(&self.dispatcher.guard)
    return line


cdef void plan(Line *line, int64_t now, BatchPlan *plan) noexcept nogil:
    cdef Sequencer *self = <Sequencer *>line.owner
    slots_plan(&self.slots, line.index, now, plan)
    line.over = plan.count == 0 and slots_done(&self.slots, line.index)


cdef Request *cut(Line *line, int64_t now, BatchPlan *plan) noexcept nogil:
    # Also returns requests that fail meanwhile, and lets other instances take slots that are free now.
    cdef Sequencer *self = <Sequencer *>line.owner
    cdef Request *batch = slots_cut(&self.slots, line.index, now, plan)
    if self.slots.fallen != NULL:
        answer(self, take_fallen(self))
        tell(self)
    stir(self)
    return batch


cdef void commit_state(Sequencer *self, Request *request) noexcept nogil:
    # Without the lock: no other thread uses the state of a sequence while a request of it is executed. Giving back the
    # blocks of the request may need the GIL, whose owner may wait for the lock.
    cdef Sequence *sequence = <Sequence *>request.sequenced.sequence
    if request.response.status != STATUS_OK:
        states_drop(sequence)
    elif not states_commit(sequence, self.slots.plans, request):
        request_fail(request, STATUS_RESOURCE_EXHAUSTED, NULL)


cdef void request_done(Lane *lane, Request *request) noexcept nogil:
    cdef Sequencer *self = <Sequencer *>lane
    commit_state(self, request)
    lock(&self.dispatcher.guard)
    slots_request_done(&self.slots, request, now_ns())
    decide_and_unlock(self)


cdef bint again(Lane *lane, Request *request) noexcept nogil:
    cdef Sequencer *self = <Sequencer *>lane
    commit_state(self, request)
    if request.response.status != STATUS_OK:
        return False  # it would lose each further state, and might never end
    lock(&self.dispatcher.guard)
    slots_again(&self.slots, request, now_ns())
    if load32(&request.abandonment.happened):  # its client left while it was executed
        slots_remove(&self.slots, request, now_ns())
        request_fail(request, STATUS_CANCELLED, format_text("no client waits for the response any more"))
        request.next = self.slots.fallen
        self.slots.fallen = request
    decide_and_unlock(self)
    return True


cdef uint32_t pending(Lane *lane) noexcept nogil:
    cdef Sequencer *self = <Sequencer *>lane
    cdef uint32_t count
    lock(&self.dispatcher.guard)
    count = self.slots.waiting
    unlock(&self.dispatcher.guard)
    return count


# ---------------------------------------------------------------------------------------------------------------------
# Idle sequences, and the end

cdef void arm(Sequencer *self, int64_t due) noexcept nogil:
    # in the front
    self.timer.fire = sweep
    self.timer.owner = self
    if timers_set((<Bridge *>self.slots.bridge).timers, &self.timer, due):
        self.armed = True
        fetch_add32(&self.lane.in_flight, 1)


cdef void sweep(Timer *timer, int64_t now) noexcept nogil:
    # In the front: end sequences that have idled for too long. One timer suffices: a sequence that becomes idle after
    # this sweep is not due before the next one.
    cdef Sequencer *self = <Sequencer *>timer.owner
    cdef int64_t next
    lock(&self.dispatcher.guard)
    next = slots_evict(&self.slots, now)
    decide_and_unlock(self)
    self.armed = next != NEVER and timers_set(
        (<Bridge *>self.slots.bridge).timers, timer, max(next, now + SHORTEST_SWEEP_NS))
    if not self.armed:
        fetch_add32(&self.lane.in_flight, -1)


cdef void disarm(PostedCallback *callback) noexcept nogil:
    # in the front, after the lane was closed
    cdef Sequencer *self = (<Notice *>callback).lane
    if self.armed:
        timers_clear((<Bridge *>self.slots.bridge).timers, &self.timer)
        self.armed = False
        fetch_add32(&self.lane.in_flight, -1)
    fetch_add32(&self.lane.in_flight, -1)


cdef void close(Lane *lane) noexcept nogil:
    cdef Sequencer *self = <Sequencer *>lane
    cdef bint before
    lock(&self.dispatcher.guard)
    before = self.slots.closed
    slots_close(&self.slots, now_ns())
    if self.slots.bridge != NULL and not before:
        post(self, &self.leaving, disarm)
    decide_and_unlock(self)


cdef bint has_sequence(Lane *lane, const Correlation *correlation) noexcept nogil:
    cdef Sequencer *self = <Sequencer *>lane
    cdef bint found
    lock(&self.dispatcher.guard)
    found = table_find_sequence(&self.slots.table, correlation) != NULL
    unlock(&self.dispatcher.guard)
    return found


cdef void end_sequence(Lane *lane, const Correlation *correlation) noexcept nogil:
    # Only while the lane drains: otherwise another client may have begun a sequence with this id.
    cdef Sequencer *self = <Sequencer *>lane
    lock(&self.dispatcher.guard)
    if self.slots.draining:
        slots_supersede(&self.slots, correlation, now_ns())
    decide_and_unlock(self)


# ---------------------------------------------------------------------------------------------------------------------
# Life

cdef bint add_line(Sequencer *self) noexcept nogil:
    # add a line, with its slots, for one more instance; False: no memory
    cdef Line *line = <Line *>calloc(1, sizeof(Line))
    cdef Line **lines = <Line **>realloc(self.lines, (self.slots.slot_set_count + 1) * sizeof(Line *))
    if lines != NULL:
        self.lines = lines
    if line == NULL or lines == NULL or not slots_add_set(&self.slots):
        free(line)
        return False
    line_init(line, self.dispatcher, &self.lane)
    line.index = self.slots.slot_set_count - 1
    line.timed = True
    line.plan = plan
    line.cut = cut
    self.lines[line.index] = line
    return True


cdef void sequencer_free(Lane *lane) noexcept nogil:
    cdef Sequencer *self = <Sequencer *>lane
    cdef uint32_t i
    for i in range(self.slots.slot_set_count):
        free(self.lines[i])
    free(self.lines)
    slots_clear(&self.slots)
    dispatcher_clear(&self.own)
    lane_free(lane)


cdef BatchScheduler SEQUENCER = BatchScheduler(
    Scheduler(push, wake, remove, expire, limit, reconsider, close, pending, sequencer_free), line_of)
cdef SequenceHooks HOOKS = SequenceHooks(request_done, NULL, has_sequence, end_sequence)
cdef SequenceHooks ITERATIVE = SequenceHooks(request_done, again, NULL, NULL)


cdef int set_policy(Slots *slots, object spec) except -1:
    cdef object sequence = spec.sequence
    slots.direct = sequence.direct
    slots.iterative = sequence.iterative
    slots.notice = sequence.notices_end
    slots.tied = sequence.ends_with_stream
    policy_set_oldest(&slots.policy, spec)
    slots.policy.uniform = slots.lane.signature.uniform
    slots.per_instance = slots.policy.max_rows if sequence.direct else sequence.max_candidates or slots.policy.max_rows
    slots.idle_ns = min(sequence.max_idle_us * 1000, LONGEST_DELAY)
    slots.min_utilization = sequence.min_slot_utilization
    slots.max_backlog = sequence.max_backlog
    slots.timeout_ns = min(spec.queue.levels[0].timeout_us * 1000, LONGEST_DELAY)
    slots.hold = int(os.environ.get("TRITONSERVER_DELAY_SCHEDULER", 0))
    slots.hold_backlog = int(os.environ.get("TRITONSERVER_BACKLOG_DELAY_SCHEDULER", 0))
    return 0


cdef int plan_state(StatePlan *plan, const TensorSignature *tensor, object state, bint batches) except -1:
    cdef InputData *initial = &plan.initial
    cdef bytes data = state.initial
    cdef uint32_t k
    plan.same_buffer = state.same_buffer
    plan.growable = state.growable
    initial.rank = tensor.rank + batches
    initial.shape[0] = 1
    for k in range(tensor.rank):
        initial.shape[k + batches] = state.dims[k]
    initial.size = len(data)
    initial.block = block_take(initial.size)
    if initial.block == NULL:
        raise MemoryError
    initial.data = initial.block.data
    memcpy(initial.block.data, <const char *>data, initial.size)
    return 0


cdef int plan_states(Slots *slots, object spec) except -1:
    cdef const Signature *signature = &slots.lane.signature
    cdef const TensorSignature *tensor
    cdef uint32_t i
    slots.plans = <StatePlan *>calloc(max(1, signature.state_count), sizeof(StatePlan))
    slots.evictions = <Eviction *>calloc(EVICTIONS, sizeof(Eviction))
    if slots.plans == NULL or slots.evictions == NULL:
        raise MemoryError
    slots.steady = True
    for i in range(signature.supplied_count):
        if signature.supplied[i].kind == SUPPLY_STATE:
            tensor = &signature.inputs[signature.input_count + i]
            slots.steady = slots.steady and not tensor.variable
            plan_state(&slots.plans[signature.supplied[i].source], tensor,
                       spec.sequence.states[signature.supplied[i].source], signature.max_batch_size > 0)
    return 0


cdef Sequencer *sequencer_new(object spec, int64_t version, Dispatcher *shared) except NULL:
    cdef Sequencer *self = <Sequencer *>lane_new(sizeof(Sequencer), &SEQUENCER.requests, spec, version)
    dispatcher_init(&self.own, False)
    self.dispatcher = shared if shared != NULL else &self.own
    self.lane.sequences = &ITERATIVE if spec.sequence.iterative else &HOOKS
    self.slots.lane = &self.lane
    try:
        set_policy(&self.slots, spec)
        plan_states(&self.slots, spec)
        for _ in range(max(1, len(spec.instances))):
            if not add_line(self):
                raise MemoryError
    except BaseException:
        sequencer_free(&self.lane)
        raise
    return self


cdef class SequenceLane(LaneHandle):
    """The lane of a model whose requests belong to sequences.

    Args:
        spec: the version's inferd.backends.api.ModelSpec, with its `sequence`.
        version: its number.
        max_queue: requests that may wait in it, unless its queue policy allows fewer; 0 for any number.
        limiter: of the resources that its instances need; None: they need none.
    """

    def __cinit__(self, spec, version: int, *, max_queue: int = 0, RateLimiter limiter=None):
        self.lane = &sequencer_new(spec, version, NULL if limiter is None else &limiter.dispatcher).lane
        self.limiter = limiter
        self.lane.max_queue = stricter(max_queue, spec.queue.levels[0].max_size)

    cdef uint32_t look(self, const uint32_t *count) noexcept:
        cdef uint32_t now
        lock(&self.sequencer().dispatcher.guard)
        now = count[0]
        unlock(&self.sequencer().dispatcher.guard)
        return now

    @property
    def live(self) -> int:
        """Sequences that have begun and have not ended."""
        return self.look(&self.sequencer().slots.live)

    @property
    def backlog(self) -> int:
        """Sequences that wait for a slot."""
        return self.look(&self.sequencer().slots.backlog.count)

    @property
    def open(self) -> int:
        """Sequences that take further requests: no request with END has come yet."""
        return self.look(&self.sequencer().slots.table.count)

    def drain(self) -> None:
        """Begin no more sequences from now on; open ones continue.

        When the last one has ended, `Bridge.event_fd` becomes readable. Iterative sequences, each of which is one
        request, still begin.
        """
        cdef Sequencer *self_ = self.sequencer()
        lock(&self_.dispatcher.guard)
        self_.slots.draining = True
        unlock(&self_.dispatcher.guard)

    def remember(self, SequenceLane other not None) -> None:
        """Remember the sequences that are open on another lane, which the caller is about to close: this lane then says
        in its refusals why they have ended.

        Call this in the front, where no sequence begins meanwhile.
        """
        cdef Sequencer *self_ = self.sequencer()
        cdef Sequencer *other_ = other.sequencer()
        if self_ == other_:
            return
        lock(&self_.dispatcher.guard)
        if self_.dispatcher != other_.dispatcher:
            lock(&other_.dispatcher.guard)
        slots_remember(&self_.slots, &other_.slots)
        if self_.dispatcher != other_.dispatcher:
            unlock(&other_.dispatcher.guard)
        unlock(&self_.dispatcher.guard)

    def stream_ended(self, stream: int) -> None:
        """End the sequences that are tied to this stream. In the front."""
        cdef Sequencer *self_ = self.sequencer()
        if not self_.slots.tied:
            return
        lock(&self_.dispatcher.guard)
        slots_leave(&self_.slots, stream, now_ns())
        decide_and_unlock(self_)
