"""Queues: where the requests of a stateless model wait for an instance.

A queue is one line of the dispatcher (`inferd._native.scheduling.dispatcher`) for all instances. The policy
(`inferd._native.scheduling.policy`) says whether the waiting requests are a batch. If not, it says until when, or until
how many rows, there will be none; so most requests that come while an instance waits for more cost no decision. Batches
grow exactly while all instances are busy, and no request waits beside an idle instance longer than `max_queue_delay`.

Requests of different shapes share no batch. When a request of another shape closes a batch, waiting requests of the
batch's shape behind it join, so alternating shapes make batches as large as a single shape. The request that has waited
longest is always served next, so only requests that join the batch of an earlier request pass others. Within one shape
the order stays, and requests pass only others of their own priority. With `preserve_ordering` no request passes
another.

`inferd._native.scheduling.levels` has the order of service and the limits of number and time. If there is no room for a
request, requests of the client with most of the queue make room (`inferd._native.scheduling.overflow`). Timers of the
front watch timeouts, so these are on time even while all instances are busy.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from inferd._native.front cimport PythonEvent, front_enter, front_leave, python_post, python_withdraw
from inferd._native.refusal cimport REFUSAL_QUEUE_FULL
from inferd._native.request.bridge cimport Bridge
from inferd._native.request.lane cimport (
    LANE_CLOSED,
    LANE_FULL,
    LANE_REFUSED,
    PUSHED,
    Lane,
    LaneHandle,
    Pushed,
    Scheduler,
    lane_free,
    lane_new,
)
from inferd._native.request.request cimport REQUEST_QUEUED, Request, Terms, request_alike, request_refuse
from inferd._native.request.statistics cimport Duration
from inferd._native.scheduling.adaptive cimport (
    ArrivalPredictor,
    predictor_arrival,
    predictor_ask,
    predictor_enough,
    predictor_executed,
    predictor_gap,
    predictor_latest,
    predictor_take,
)
from inferd._native.scheduling.dispatcher cimport (
    Consumer,
    Dispatcher,
    Line,
    dispatcher_clear,
    dispatcher_init,
    line_init,
)
from inferd._native.scheduling.levels cimport (
    level_at,
    level_is_full,
    level_of,
    levels_clear,
    levels_cut,
    levels_init,
    levels_move,
    levels_put,
    levels_remove,
    levels_yield,
    set_limit,
)
from inferd._native.scheduling.limiter cimport RateLimiter
from inferd._native.scheduling.overflow cimport oust, refuse_ousted
from inferd._native.scheduling.policy cimport (
    MISFIT,
    NEVER,
    BatchPlan,
    plan_nothing,
    policy_end,
    policy_full,
    policy_plan,
    policy_set,
)
from inferd._native.scheduling.waking cimport BatchScheduler, line_look, line_silence
from inferd._native.shares cimport shares_add, shares_end, shares_subtract
from inferd._native.text cimport format_text
from inferd._native.threads cimport lock, unlock

cdef const char *GATHERED = "gathered from among other shapes"

cdef enum:
    ANY_ROWS = 1
    LOOKS = 64               # requests that `gather` examines, at first and again after each one that joins


# ---------------------------------------------------------------------------------------------------------------------
# Requests that wait; the dispatcher's lock is held

cdef inline bint is_full(const Queue *queue) noexcept nogil:
    return queue.lane.max_queue and queue.levels.count >= queue.lane.max_queue


cdef inline void set_tracking(Queue *queue) noexcept nogil:
    # to be called after the shares of a queue begin or end
    queue.tracks_requests = queue.line.timed or queue.shares.buckets != NULL


cdef inline bint is_new_kind(const Queue *queue, const Request *request) noexcept nogil:
    # whether the request may change the next batch otherwise than by its rows
    if request.next != NULL:
        return True
    return not queue.policy.uniform and request.previous != NULL and not request_alike(request.previous, request)


cdef inline bint waits_too_long(const Queue *queue) noexcept nogil:
    # An idle instance would look at the requests when it is too late to execute one of them in time.
    return queue.end_ns != NEVER and predictor_latest(
        &queue.predictor, queue.levels.rows, queue.end_ns) < queue.line.watched_ns


cdef void note_arrival(Queue *queue, const Request *request) noexcept nogil:
    # count the request; plan again if an instance may no longer wait so long for more
    if queue.shares.buckets != NULL and not shares_add(&queue.shares, request.origin.client, level_at(request)):
        set_tracking(queue)
    if queue.policy.adaptive:
        predictor_arrival(&queue.predictor, request.queued_ns)
    if queue.line.timed and queue.line.idle_count:
        queue.end_ns = min(queue.end_ns, policy_end(&queue.policy, request))
        if waits_too_long(queue):
            queue.enough_rows = 0


cdef void note_departures(Queue *queue, const Request *request) noexcept nogil:
    # the chain leaves the queue
    if queue.shares.buckets == NULL:
        return
    if queue.levels.count <= queue.full_count // 2:
        shares_end(&queue.shares)
        set_tracking(queue)
        return
    while request != NULL:
        shares_subtract(&queue.shares, request.origin.client, level_at(request))
        request = request.next


cdef Request *make_room(Queue *queue, const Request *coming, uint32_t level) noexcept nogil:
    # the queue, or this level of it, is full: see `oust`
    cdef Request *ousted
    if queue.shares.buckets == NULL:
        queue.full_count = queue.levels.count
    ousted = oust(&queue.levels, &queue.shares, coming, level)
    set_tracking(queue)
    if ousted != NULL:
        queue.enough_rows = 0
    return ousted


cdef Pushed queue_put(Queue *queue, Request *request, uint32_t *level, Request **ousted) noexcept nogil:
    ousted[0] = NULL
    if queue.closed:
        return LANE_CLOSED
    level[0] = level_of(&queue.levels, request.terms.priority)
    if not request.follows and (is_full(queue) or level_is_full(&queue.levels, level[0])):
        ousted[0] = make_room(queue, request, level[0])
        if ousted[0] == NULL:
            return LANE_FULL if is_full(queue) else LANE_REFUSED
    levels_put(&queue.levels, request, level[0])
    queue.line.bridge = request.bridge
    if queue.tracks_requests:
        note_arrival(queue, request)
    if queue.line.idle_count and is_new_kind(queue, request):
        queue.enough_rows = 0
    return PUSHED


cdef bint queue_take_out(Queue *queue, Request *request) noexcept nogil:
    if request.state != REQUEST_QUEUED:
        return False
    if queue.shares.buckets != NULL:
        shares_subtract(&queue.shares, request.origin.client, level_at(request))
    levels_remove(&queue.levels, request)
    queue.enough_rows = 0  # fewer requests may be another batch: the policy plans again
    return True


cdef void queue_yield(Queue *queue, Request *request) noexcept nogil:
    levels_yield(&queue.levels, request)
    queue.enough_rows = 0


cdef void plan(Line *line, int64_t now, BatchPlan *plan) noexcept nogil:
    cdef Queue *queue = <Queue *>line.owner
    if queue.levels.count < queue.held and not queue.closed:
        plan_nothing(plan)  # as if the queue were empty
        return
    queue.held = 0
    line.over = queue.closed and queue.levels.count == 0
    if queue.policy.adaptive and queue.levels.count:
        queue.predictor.idle = line.beside
        predictor_ask(&queue.predictor, queue.levels.count, now)
    policy_plan(&queue.policy, &queue.predictor, queue.levels.first, NEVER if queue.closed else now, plan)
    if plan.count:
        return
    queue.enough_rows = plan.wake_rows
    queue.end_ns = plan.end_ns
    if queue.levels.count == 0:
        queue.waits_since = 0
    elif queue.waits_since == 0:
        queue.waits_since = now


cdef bint gather(Queue *queue, Request *batch) noexcept nogil:
    # Add requests of the batch's shape that wait behind one of another shape. False: there is none. The time is bounded
    # by the number of requests that join.
    cdef Request *request = queue.levels.first
    cdef Request *last = batch
    cdef Request *following
    cdef uint64_t rows = batch.rows
    cdef uint32_t place = request.place if request != NULL else 0
    cdef uint32_t looks = LOOKS
    cdef bint some = False
    while last.next != NULL:
        last = last.next
        rows += last.rows
    while request != NULL and request.place == place and looks and rows < queue.policy.max_rows:
        following = request.next
        looks -= 1
        if request_alike(batch, request):
            rows += request.rows
            if rows > queue.policy.max_rows:
                break  # requests behind it must not pass it
            levels_remove(&queue.levels, request)
            last.next = request
            last = request
            looks += LOOKS
            some = True
        request = following
    return some


cdef Request *cut(Line *line, int64_t now, BatchPlan *plan) noexcept nogil:
    cdef Queue *queue = <Queue *>line.owner
    cdef Request *batch
    if queue.waits_since:
        queue.waited.count += 1
        queue.waited.ns += <uint64_t>(now - queue.waits_since)
        queue.waits_since = 0
    queue.enough_rows = ANY_ROWS
    queue.end_ns = NEVER
    batch = levels_cut(&queue.levels, plan.count)
    if queue.gathers and plan.why == MISFIT and gather(queue, batch):
        plan.why = GATHERED
    if queue.tracks_requests:
        predictor_take(&queue.predictor)
        note_departures(queue, batch)
    return batch


cdef const char *grow(Line *line, int64_t now, Request *batch) noexcept nogil:
    # plan the batch again, with the requests that have come since
    cdef Queue *queue = <Queue *>line.owner
    cdef Request *last = batch
    cdef uint32_t count = 1
    cdef BatchPlan plan
    if not queue.policy.batching or queue.levels.count == 0:
        return NULL
    while last.next != NULL:
        last = last.next
        count += 1
    last.next = queue.levels.first
    policy_plan(&queue.policy, &queue.predictor, batch, NEVER if queue.closed else now, &plan)
    last.next = NULL
    if plan.count <= count:
        return NULL
    last.next = levels_cut(&queue.levels, plan.count - count)
    if queue.tracks_requests:
        note_departures(queue, last.next)
    queue.enough_rows = 0
    return plan.why


cdef bint full(const Line *line) noexcept nogil:
    # with several levels, a request of a higher one could overtake the batch
    cdef const Queue *queue = <const Queue *>line.owner
    return (queue.levels.level_count == 1 and queue.levels.count >= queue.held
            and policy_full(&queue.policy, queue.levels.first))


# ---------------------------------------------------------------------------------------------------------------------
# The scheduler

cdef Pushed push(Lane *lane, Request *request) noexcept nogil:
    cdef Queue *queue = <Queue *>lane
    cdef Request *ousted
    cdef Pushed pushed
    cdef uint32_t level = 0
    lock(&queue.dispatcher.guard)
    pushed = queue_put(queue, request, &level, &ousted)
    unlock(&queue.dispatcher.guard)
    if ousted != NULL:
        refuse_ousted(ousted)
    if pushed == LANE_REFUSED:
        queue_refuse(queue, request, level)
    return pushed


cdef void queue_refuse(const Queue *queue, Request *request, uint32_t level) noexcept nogil:
    if queue.levels.level_count == 1:
        request_refuse(request, REFUSAL_QUEUE_FULL, format_text(
            "Exceeds maximum queue size: model '%s' version %s has %u requests waiting, which is its limit",
            request.signature.name.data, request.signature.version_text.data, queue.levels.levels[level].max_size))
    else:
        request_refuse(request, REFUSAL_QUEUE_FULL, format_text(
            "Exceeds maximum queue size: model '%s' version %s has %u requests of priority %u waiting, which is its "
            "limit", request.signature.name.data, request.signature.version_text.data,
            queue.levels.levels[level].max_size, level + 1))


cdef void wake(Lane *lane) noexcept nogil:
    cdef Queue *queue = <Queue *>lane
    lock(&queue.dispatcher.guard)
    if queue_is_due(queue):
        line_look(&queue.line, True)
    else:
        unlock(&queue.dispatcher.guard)


cdef void wake_first(Lane *lane) noexcept nogil:
    # the first request has come: `wake` takes this function's place from now on
    cdef Queue *queue = <Queue *>lane
    lane.scheduler = &QUEUE.requests
    if queue.first_came.owner != NULL:
        queue.posted_to = &(<Bridge *>queue.line.bridge).timers.python
        python_post(queue.posted_to, &queue.first_came)
    wake(lane)


cdef int call_first(PythonEvent *event) except -1:
    cdef QueueLane handle = <QueueLane>event.owner
    front_leave()
    first, handle.first = handle.first, None
    if first is not None:
        first()
    return 0


cdef void replan(Queue *queue) noexcept nogil:
    # Decide again, because the waiting requests or their order have changed. Releases the dispatcher's lock. If the
    # oldest request has left, the end of the wait moves to a later time, but the alarm (Line.watched_ns) stays where it
    # is: when it fires, the policy plans once for nothing, and the alarm is set to the later time.
    if queue.line.idle_count:
        line_look(&queue.line, True)
    else:
        unlock(&queue.dispatcher.guard)


cdef bint remove(Lane *lane, Request *request) noexcept nogil:
    cdef Queue *queue = <Queue *>lane
    cdef bint queued
    lock(&queue.dispatcher.guard)
    queued = queue_take_out(queue, request)
    replan(queue)
    return queued


cdef bint expire(Lane *lane, Request *request) noexcept nogil:
    cdef Queue *queue = <Queue *>lane
    if not request.yields:
        return remove(lane, request)
    lock(&queue.dispatcher.guard)
    if request.state == REQUEST_QUEUED:
        queue_yield(queue, request)
    replan(queue)
    return False


cdef void limit(Lane *lane, Request *request) noexcept nogil:
    cdef Queue *queue = <Queue *>lane
    set_limit(&queue.levels.levels[level_of(&queue.levels, request.terms.priority)], request)
    if queue.policy.adaptive and request.expires_ns and not request.yields:  # as in policy_end
        request.terms.due_ns = stricter_time(request.terms.due_ns, request.expires_ns)


cdef inline int64_t stricter_time(int64_t a, int64_t b) noexcept nogil:
    return min(a, b) if a and b else a + b


cdef void reposition(Queue *queue, Request *request) noexcept nogil:
    # after a change of its terms
    if queue.shares.buckets != NULL:
        shares_subtract(&queue.shares, request.origin.client, level_at(request))
    levels_move(&queue.levels, request, level_of(&queue.levels, request.terms.priority))
    if queue.shares.buckets != NULL and not shares_add(&queue.shares, request.origin.client, level_at(request)):
        set_tracking(queue)
    queue.enough_rows = 0


cdef bint reconsider(Lane *lane, Request *request, const Terms *terms) noexcept nogil:
    cdef Queue *queue = <Queue *>lane
    cdef bint queued
    lock(&queue.dispatcher.guard)
    queued = request.state == REQUEST_QUEUED
    if queued:
        request.terms = terms[0]
        reposition(queue, request)
    replan(queue)
    return queued


cdef Line *line_of(Lane *lane, const Consumer *consumer) noexcept nogil:
    return &(<Queue *>lane).line


cdef void learn(Lane *lane, uint32_t rows, int64_t ns) noexcept nogil:
    cdef Queue *queue = <Queue *>lane
    lock(&queue.dispatcher.guard)
    predictor_executed(&queue.predictor, rows, ns)
    # Executions may now take longer than when the wait began. An instance that executes several batches at a time may
    # be idle meanwhile.
    if queue.line.idle_count and waits_too_long(queue):
        line_look(&queue.line, False)
    else:
        unlock(&queue.dispatcher.guard)


cdef void close(Lane *lane) noexcept nogil:
    cdef Queue *queue = <Queue *>lane
    lock(&queue.dispatcher.guard)
    if not queue.closed:
        line_silence(&queue.line)
    queue.closed = True
    line_look(&queue.line, False)


cdef uint32_t pending(Lane *lane) noexcept nogil:
    cdef Queue *queue = <Queue *>lane
    cdef uint32_t count
    lock(&queue.dispatcher.guard)
    count = queue.levels.count
    unlock(&queue.dispatcher.guard)
    return count


# ---------------------------------------------------------------------------------------------------------------------
# Life

cdef void queue_free(Lane *lane) noexcept nogil:
    cdef Queue *queue = <Queue *>lane
    shares_end(&queue.shares)
    levels_clear(&queue.levels)
    dispatcher_clear(&queue.own)
    lane_free(lane)


cdef BatchScheduler QUEUE = BatchScheduler(
    Scheduler(push, wake, remove, expire, limit, reconsider, close, pending, queue_free), line_of)

# the table of functions until the first request has come, so that later requests pay for no check
cdef BatchScheduler FIRST = BatchScheduler(
    Scheduler(push, wake_first, remove, expire, limit, reconsider, close, pending, queue_free), line_of)


cdef Queue *queue_new(object spec, int64_t version, Dispatcher *shared) except NULL:
    cdef Queue *queue = <Queue *>lane_new(sizeof(Queue), &QUEUE.requests, spec, version)
    dispatcher_init(&queue.own, False)
    queue.dispatcher = shared if shared != NULL else &queue.own
    line_init(&queue.line, queue.dispatcher, &queue.lane)
    queue.line.plan = plan
    queue.line.cut = cut
    queue.line.grow = grow
    queue.line.full = full
    try:
        policy_set(&queue.policy, spec)
        levels_init(&queue.levels, spec.queue)
        queue.lane.level_count = queue.levels.level_count
        queue.lane.default_level = queue.levels.default_level + 1
    except BaseException:
        queue_free(&queue.lane)
        raise
    queue.line.timed = queue.policy.delay_ns > 0
    set_tracking(queue)
    if queue.line.timed:
        queue.lane.learn = learn
    queue.policy.uniform = queue.lane.signature.uniform
    queue.gathers = queue.policy.batching and not queue.policy.uniform and not spec.queue.preserve_ordering
    queue.enough_rows = ANY_ROWS
    queue.end_ns = NEVER
    return queue


cdef class QueueLane(LaneHandle):
    """The lane of a model whose requests are independent.

    Args:
        spec: the version's inferd.backends.api.ModelSpec.
        version: its number.
        max_queue: requests that may wait in it, over all levels; 0 for any number.
        held: make no batch before so many requests have waited once; 0: make batches from the beginning.
        limiter: of the resources that its instances need; None: they need none.
    """

    def __cinit__(self, spec, version: int, *, max_queue: int = 0, held: int = 0, RateLimiter limiter=None):
        cdef Queue *queue = queue_new(spec, version, NULL if limiter is None else &limiter.dispatcher)
        self.limiter = limiter
        self.lane = &queue.lane
        self.lane.max_queue = max_queue
        self.lane.fetches_late = True
        queue.held = held

    def await_first(self, first) -> None:
        """Have `first` called once, when the first request has come. Call this before any request can find the lane.

        Args:
            first: called on the event loop, without arguments; None: nothing is called.
        """
        cdef Queue *queue = self.queue()
        self.first = first
        front_enter()
        if queue.posted_to != NULL:
            python_withdraw(queue.posted_to, &queue.first_came)
        queue.first_came.run = call_first
        queue.first_came.owner = NULL if first is None else <void *>self
        front_leave()
        if first is not None:
            self.lane.scheduler = &FIRST.requests

    def predictor(self) -> dict[str, object] | None:
        """The estimates for an adaptive delay; None if the delay is not adaptive.

        `gap_ns` is the mean time until the next request comes while one waits; a longer time counts as `fixed_ns`. A
        batch takes `fixed_ns`, and `row_ns` for each of its rows. `target` is the number of requests, of one row each,
        for which an instance waits if it finds one. `waited` is how often an instance has waited although there were
        requests, and for how many nanoseconds in all.
        """
        cdef Queue *queue = self.queue()
        cdef ArrivalPredictor predictor
        cdef Duration waited
        if not queue.policy.adaptive:
            return None
        lock(&queue.dispatcher.guard)
        predictor = queue.predictor
        waited = queue.waited
        unlock(&queue.dispatcher.guard)
        return {
            "gap_ns": predictor_gap(&predictor, 1),
            "fixed_ns": predictor.fixed_ns,
            "row_ns": predictor.row_ns,
            "target": predictor_enough(&predictor, 0, 0, queue.policy.max_rows),
            "waited": (waited.count, waited.ns),
        }
