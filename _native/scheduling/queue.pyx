"""Queues: where the requests of a stateless model wait for an instance.

Instances pull. One that is free asks the policy (`_native.scheduling.policy`), and takes what it gets or waits: until
the time that the policy named, or until enough rows have come to make another answer possible. So batches grow exactly
while all instances are busy, and a request never waits behind an idle instance longer than `max_queue_delay`.

On idle instances that let it, the loop itself begins batches (`_native.scheduling.seats`).

The order of service, how many may wait and for how long are the affair of `_native.scheduling.levels`. Timeouts are
watched by the loop's timers, so they are on time even while all instances are busy.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from _native.atomic cimport load32
from _native.clock cimport now_ns
from _native.inference.request cimport (
    REQUEST_QUEUED,
    STATUS_UNAVAILABLE,
    Request,
    request_alike,
    request_fail,
)
from _native.inference.statistics cimport Duration
from _native.scheduling.adaptive cimport (
    Outlook,
    outlook_arrival,
    outlook_ask,
    outlook_enough,
    outlook_executed,
    outlook_gap,
    outlook_take,
)
from _native.scheduling.lane cimport (
    LANE_CLOSED,
    LANE_FULL,
    LANE_REFUSED,
    PUSHED,
    Lane,
    LaneHandle,
    Pushed,
    Scheduler,
    Seat,
    lane_free,
    lane_new,
)
from _native.scheduling.levels cimport (
    level_is_full,
    level_of,
    levels_clear,
    levels_cut,
    levels_init,
    levels_put,
    levels_remove,
    levels_yield,
)
from _native.scheduling.limiter cimport Claim, claim_acquire, claim_release
from _native.scheduling.policy cimport NEVER, Plan, policy_plan, policy_set
from _native.scheduling.seats cimport seat_next, seat_recall, seat_stand_by, seats_call, seats_end_alarm, seats_use
from _native.text cimport format_text
from _native.threads cimport (
    condition_destroy,
    condition_init,
    lock,
    mutex_destroy,
    mutex_init,
    notify_all,
    notify_one,
    unlock,
    wait,
    wait_until,
)

cdef enum:
    ANY_ROWS = 1


# ---------------------------------------------------------------------------------------------------------------------
# What the loop does

cdef inline bint is_new_kind(const Queue *queue, const Request *request) noexcept nogil:
    # an instance waits, and with its neighbours it may form another batch than its rows tell
    if queue.idle == 0:
        return False  # whoever comes looks at all of them
    if request.next != NULL:
        return True
    return not queue.policy.uniform and request.previous != NULL and not request_alike(request.previous, request)


cdef Pushed push(Lane *lane, Request *request) noexcept nogil:
    cdef Queue *queue = <Queue *>lane
    cdef Pushed pushed = PUSHED
    cdef uint32_t level
    lock(&queue.guard)
    if queue.closed:
        pushed = LANE_CLOSED
    elif queue.lane.max_queue and queue.levels.count >= queue.lane.max_queue:
        pushed = LANE_FULL
    else:
        level = level_of(&queue.levels, request.priority)
        if level_is_full(&queue.levels, level):
            pushed = LANE_REFUSED
        else:
            levels_put(&queue.levels, request, level)
            if queue.policy.adaptive:
                outlook_arrival(&queue.outlook, request.queued_ns)
            if is_new_kind(queue, request):
                queue.changed = True
    unlock(&queue.guard)
    if pushed == LANE_REFUSED:
        refuse(queue, request, level)
    return pushed


cdef void refuse(const Queue *queue, Request *request, uint32_t level) noexcept nogil:
    if queue.levels.level_count == 1:
        request_fail(request, STATUS_UNAVAILABLE, format_text(
            "Exceeds maximum queue size: model '%s' version %s has %u requests waiting, which is its limit",
            request.signature.name.data, request.signature.version_text.data, queue.levels.levels[level].max_size))
    else:
        request_fail(request, STATUS_UNAVAILABLE, format_text(
            "Exceeds maximum queue size: model '%s' version %s has %u requests of priority %u waiting, which is its "
            "limit", request.signature.name.data, request.signature.version_text.data,
            queue.levels.levels[level].max_size, level + 1))
    request.response.reason = "QUEUE_FULL"


cdef void wake(Lane *lane) noexcept nogil:
    cdef Queue *queue = <Queue *>lane
    cdef bint notify
    lock(&queue.guard)
    notify = queue.idle > 0 and queue.levels.count > 0 and (queue.levels.rows >= queue.wake_rows or queue.changed)
    queue.changed = False
    if notify and queue.free != NULL:
        unlock(&queue.guard)
        seats_use(queue)
        return
    unlock(&queue.guard)
    if notify:
        notify_one(&queue.work)


cdef bint remove(Lane *lane, Request *request) noexcept nogil:
    cdef Queue *queue = <Queue *>lane
    cdef bint queued
    lock(&queue.guard)
    queued = request.state == REQUEST_QUEUED
    if queued:
        levels_remove(&queue.levels, request)
    unlock(&queue.guard)
    return queued


cdef bint expire(Lane *lane, Request *request) noexcept nogil:
    cdef Queue *queue = <Queue *>lane
    cdef bint yielded
    if not request.yields:
        return remove(lane, request)
    lock(&queue.guard)
    yielded = request.state == REQUEST_QUEUED
    if yielded:
        levels_yield(&queue.levels, request)
        queue.changed = True
    unlock(&queue.guard)
    if yielded:
        wake(lane)
    return False


# ---------------------------------------------------------------------------------------------------------------------
# What instances do

cdef inline int64_t time_of(const Queue *queue) noexcept nogil:
    # now, for a policy that looks at it: asking the clock takes as long as all the rest
    return now_ns() if queue.policy.delay_ns else 0


cdef inline bint has_batch(Queue *queue, int64_t now, Plan *plan) noexcept nogil:
    # with `guard` held: whether there is a batch to be taken now; otherwise wake_rows is set
    cdef const Request *first = queue.levels.first
    if queue.closed:
        now = NEVER  # nothing more will come: wait for nothing
    elif queue.levels.count < queue.held:
        first = NULL  # as if none waited
    else:
        queue.held = 0
    if first != NULL and queue.policy.adaptive:
        queue.outlook.idle = queue.idle
        outlook_ask(&queue.outlook, queue.levels.count, now)
    policy_plan(&queue.policy, &queue.outlook, first, now, plan)
    if plan.count == 0:
        queue.wake_rows = plan.wake_rows
    return plan.count > 0


cdef inline Request *cut(Queue *queue, int64_t now, Plan *plan) noexcept nogil:
    if not has_batch(queue, now, plan):
        return NULL
    if queue.policy.adaptive:
        outlook_take(&queue.outlook)
    return levels_cut(&queue.levels, plan.count)


cdef Request *queue_cut(Queue *queue, int64_t now, Plan *plan) noexcept nogil:
    return cut(queue, now, plan)


cdef Request *queue_cut_now(Queue *queue, Plan *plan) noexcept nogil:
    return cut(queue, time_of(queue), plan)


cdef void queue_waited(Queue *queue, int64_t since) noexcept nogil:
    queue.waited.count += 1
    queue.waited.ns += <uint64_t>(now_ns() - since)


cdef Request *take(Lane *lane, Seat *seat) noexcept nogil:
    cdef Queue *queue = <Queue *>lane
    cdef Request *batch
    cdef Plan plan
    cdef int64_t since = 0   # when it began to wait although requests did
    cdef bint more
    lock(&queue.guard)
    while True:
        if load32(&seat.retired):
            batch = NULL
            more = queue.levels.first != NULL
            break
        batch = cut_claimed(queue, seat.claim, &plan) if seat.claim != NULL else cut(queue, time_of(queue), &plan)
        if batch != NULL or queue.closed:
            more = batch != NULL and queue.levels.first != NULL and queue.idle > 0
            if batch != NULL and since:
                queue_waited(queue, since)
            break
        if load32(&seat.retired):
            continue  # it was told so while it waited for resources
        if seat.begin != NULL and plan.wake_ns == NEVER:
            batch = seat_stand_by(queue, seat)
            if batch == NULL and not seat.recalled:
                continue
            unlock(&queue.guard)
            return batch
        if queue.levels.first == NULL:
            since = 0
        elif since == 0:
            since = now_ns()
        queue.idle += 1
        if plan.wake_ns == NEVER:
            wait(&queue.work, &queue.guard)
        else:
            wait_until(&queue.work, &queue.guard, plan.wake_ns)
        queue.idle -= 1
    unlock(&queue.guard)
    seat.why = plan.why
    if more:
        notify_one(&queue.work)  # what is left may be a batch already
    return batch


cdef Request *cut_claimed(Queue *queue, Claim *claim, Plan *plan) noexcept nogil:
    # with `guard` held, as cut: the requests stay in the queue, where they can be removed, until there are the
    # resources to execute them
    cdef Request *batch
    if not has_batch(queue, time_of(queue), plan):
        return NULL
    unlock(&queue.guard)
    claim_acquire(claim)
    lock(&queue.guard)
    batch = cut(queue, time_of(queue), plan)
    if batch == NULL:
        claim_release(claim)  # others were faster, or the clients left
    return batch


cdef void learn(Lane *lane, uint32_t rows, int64_t ns) noexcept nogil:
    cdef Queue *queue = <Queue *>lane
    lock(&queue.guard)
    outlook_executed(&queue.outlook, rows, ns)
    unlock(&queue.guard)


cdef void close(Lane *lane) noexcept nogil:
    cdef Queue *queue = <Queue *>lane
    lock(&queue.guard)
    if not queue.closed:
        seats_end_alarm(queue)
    queue.closed = True
    seats_call(queue)
    unlock(&queue.guard)
    notify_all(&queue.work)


# ---------------------------------------------------------------------------------------------------------------------
# Life

cdef uint32_t pending(Lane *lane) noexcept nogil:
    cdef Queue *queue = <Queue *>lane
    cdef uint32_t count
    lock(&queue.guard)
    count = queue.levels.count
    unlock(&queue.guard)
    return count


cdef void queue_free(Lane *lane) noexcept nogil:
    cdef Queue *queue = <Queue *>lane
    levels_clear(&queue.levels)
    condition_destroy(&queue.work)
    mutex_destroy(&queue.guard)
    lane_free(lane)


cdef Scheduler QUEUE = Scheduler(push, wake, remove, take, close, pending, queue_free, expire, seat_next, seat_recall)


cdef Queue *queue_new(object spec, int64_t version) except NULL:
    cdef Queue *queue = <Queue *>lane_new(sizeof(Queue), &QUEUE, spec, version)
    mutex_init(&queue.guard, NULL)
    condition_init(&queue.work)
    try:
        policy_set(&queue.policy, spec)
        levels_init(&queue.levels, spec.queue)
    except BaseException:
        queue_free(&queue.lane)
        raise
    if queue.policy.adaptive:
        queue.lane.learn = learn
    queue.policy.uniform = queue.lane.signature.uniform
    queue.wake_rows = ANY_ROWS
    return queue


cdef class QueueLane(LaneHandle):
    """The lane of a model whose requests are independent.

    Args:
        spec: the version's backends.api.ModelSpec.
        version: its number.
        max_queue: requests that may wait in it, over all levels; 0 for any number.
        held: make no batch before so many requests wait, once; 0 for no such wait.
    """

    def __cinit__(self, spec, version: int, *, max_queue: int = 0, held: int = 0):
        cdef Queue *queue = queue_new(spec, version)
        self.lane = &queue.lane
        self.lane.max_queue = max_queue
        self.lane.fetches_late = True
        queue.held = held

    def outlook(self) -> dict[str, object] | None:
        """What an adaptive delay goes by; None where the delay is not adaptive.

        `gap_ns` is the mean time until the next request comes while one waits, of which each counts as `fixed_ns` at
        most; a batch takes `fixed_ns` and `row_ns` for each of its rows. `target` is the number of requests of one row
        each for which an instance waits that finds one of them. `waited` is how often one has waited although there
        were requests, and for how many nanoseconds in all.
        """
        cdef Queue *queue = self.queue()
        cdef Outlook outlook
        cdef Duration waited
        if not queue.policy.adaptive:
            return None
        lock(&queue.guard)
        outlook = queue.outlook
        waited = queue.waited
        unlock(&queue.guard)
        return {
            "gap_ns": outlook_gap(&outlook, 1),
            "fixed_ns": outlook.fixed_ns,
            "row_ns": outlook.row_ns,
            "target": outlook_enough(&outlook, 0, 0, queue.policy.max_rows),
            "waited": (waited.count, waited.ns),
        }

    def nudge(self) -> None:
        """Have every instance that waits look whether it has been retired."""
        cdef Queue *queue = self.queue()
        lock(&queue.guard)  # whoever has looked before waits by now
        seats_call(queue)
        unlock(&queue.guard)
        notify_all(&queue.work)
