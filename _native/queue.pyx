"""Queues: where the requests of a stateless model wait, and when an instance may take how many of them.

Instances pull. One that is free asks the policy, and takes what it gets or waits: until the time that the policy named,
or until enough rows have come to make another answer possible. So batches grow exactly while all instances are busy,
and a request never waits behind an idle instance longer than `max_queue_delay`.

When a batch is ready (queue_plan), for a model with dynamic batching:

* The candidates are the oldest request and those behind it, up to the first that would exceed `max_batch_size` or has
  other shapes or inputs. Requests are never reordered and never split.
* With no delay, or once the oldest has waited for the delay, all candidates go.
* Before that, the largest prefix of the candidates whose rows are a preferred size goes. The preferred size is
  `max_batch_size` when the configuration names none.
* Before that, too, the candidates go when they cannot become more: they are full, or the next one does not fit, or the
  oldest alone exceeds every preferred size.

Without dynamic batching every request is a batch of its own.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from _native.clock cimport now_ns
from _native.lane cimport (
    LANE_CLOSED,
    LANE_FULL,
    PUSHED,
    Lane,
    LaneHandle,
    Pushed,
    Scheduler,
    Seat,
    lane_clear,
    lane_init,
)
from _native.request cimport REQUEST_QUEUED, REQUEST_TAKEN, Request, request_alike, request_free, request_new
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

cdef int64_t NEVER = 0x7fffffffffffffff
cdef int64_t LONGEST_DELAY = NEVER // 4    # 73 years; a time plus it does not overflow


# ---------------------------------------------------------------------------------------------------------------------
# The policy

cdef inline bint is_preferred(const Queue *queue, uint64_t rows) noexcept nogil:
    cdef uint32_t i
    for i in range(queue.preferred_count):
        if queue.preferred[i] == rows:
            return True
    return False


cdef uint64_t next_preferred(const Queue *queue, uint64_t rows) noexcept nogil:
    # the smallest preferred size above `rows`, at most max_rows
    cdef uint64_t best = queue.max_rows
    cdef uint32_t i
    for i in range(queue.preferred_count):
        if rows < queue.preferred[i] < best:
            best = queue.preferred[i]
    return best


cdef inline bint exceeds_preferred(const Queue *queue, uint64_t rows) noexcept nogil:
    cdef uint32_t i
    for i in range(queue.preferred_count):
        if rows <= queue.preferred[i]:
            return False
    return True


cdef uint32_t queue_plan(const Queue *queue, int64_t now, int64_t *wake, uint64_t *wake_rows) noexcept nogil:
    cdef const Request *oldest = queue.head
    cdef const Request *request
    cdef uint64_t rows
    cdef uint32_t count = 1
    cdef uint32_t preferred = 0
    cdef bint full
    if oldest == NULL:
        wake[0] = NEVER
        wake_rows[0] = ANY_ROWS
        return 0
    if not queue.batching:
        return 1
    rows = oldest.rows
    if is_preferred(queue, rows):
        preferred = 1
    full = rows >= queue.max_rows
    request = oldest.next
    while request != NULL and not full:
        if rows + request.rows > queue.max_rows:
            full = True
        elif not queue.lane.signature.uniform and not request_alike(oldest, request):
            full = True
        else:
            rows += request.rows
            count += 1
            if is_preferred(queue, rows):
                preferred = count
            full = rows >= queue.max_rows
            request = request.next
    if now - oldest.queued_ns >= queue.delay_ns:
        return count
    if preferred:
        return preferred
    if full:
        return count
    if exceeds_preferred(queue, oldest.rows):
        return 1
    wake[0] = oldest.queued_ns + queue.delay_ns
    wake_rows[0] = next_preferred(queue, rows)
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# The queue

cdef Pushed push(Lane *lane, Request *request) noexcept nogil:
    cdef Queue *queue = <Queue *>lane
    lock(&queue.guard)
    if queue.closed:
        unlock(&queue.guard)
        return LANE_CLOSED
    if queue.lane.max_queue and queue.count >= queue.lane.max_queue:
        unlock(&queue.guard)
        return LANE_FULL
    request.state = REQUEST_QUEUED
    request.next = NULL
    request.previous = queue.tail
    if queue.tail == NULL:
        queue.head = request
    else:
        queue.tail.next = request
        if not queue.lane.signature.uniform and not request_alike(queue.tail, request):
            queue.broken = True
    queue.tail = request
    queue.count += 1
    queue.rows += request.rows
    unlock(&queue.guard)
    return PUSHED


cdef void wake(Lane *lane) noexcept nogil:
    cdef Queue *queue = <Queue *>lane
    cdef bint notify
    lock(&queue.guard)
    notify = queue.idle > 0 and queue.count > 0 and (queue.rows >= queue.wake_rows or queue.broken)
    queue.broken = False
    unlock(&queue.guard)
    if notify:
        notify_one(&queue.work)


cdef inline void unlink(Queue *queue, Request *request) noexcept nogil:
    if request.previous == NULL:
        queue.head = request.next
    else:
        request.previous.next = request.next
    if request.next == NULL:
        queue.tail = request.previous
    else:
        request.next.previous = request.previous
    queue.count -= 1
    queue.rows -= request.rows
    request.previous = NULL
    request.next = NULL
    request.state = REQUEST_TAKEN


cdef bint remove(Lane *lane, Request *request) noexcept nogil:
    cdef Queue *queue = <Queue *>lane
    cdef bint queued
    lock(&queue.guard)
    queued = request.state == REQUEST_QUEUED
    if queued:
        unlink(queue, request)
    unlock(&queue.guard)
    return queued


cdef Request *cut(Queue *queue, uint32_t count) noexcept nogil:
    # the first `count` requests as a chain of their own
    cdef Request *first = queue.head
    cdef Request *last = NULL
    cdef Request *request = first
    cdef uint32_t _
    for _ in range(count):
        request.state = REQUEST_TAKEN
        queue.rows -= request.rows
        last = request
        request = request.next
    queue.count -= count
    queue.head = request
    last.next = NULL
    if request == NULL:
        queue.tail = NULL
    else:
        request.previous = NULL
    return first


cdef Request *take(Lane *lane, Seat *seat) noexcept nogil:
    cdef Queue *queue = <Queue *>lane
    cdef Request *batch = NULL
    cdef int64_t wake
    cdef uint32_t count
    cdef bint more = False
    lock(&queue.guard)
    while True:
        # once closed, nothing more will come: wait for nothing
        count = queue_plan(queue, NEVER if queue.closed else now_ns(), &wake, &queue.wake_rows)
        if count:
            batch = cut(queue, count)
            more = queue.head != NULL and queue.idle > 0
            break
        if queue.closed:
            break
        queue.idle += 1
        if wake == NEVER:
            wait(&queue.work, &queue.guard)
        else:
            wait_until(&queue.work, &queue.guard, wake)
        queue.idle -= 1
    unlock(&queue.guard)
    if more:
        notify_one(&queue.work)  # what is left may be a batch already
    return batch


cdef void close(Lane *lane) noexcept nogil:
    cdef Queue *queue = <Queue *>lane
    lock(&queue.guard)
    queue.closed = True
    unlock(&queue.guard)
    notify_all(&queue.work)


# ---------------------------------------------------------------------------------------------------------------------
# Life

cdef uint32_t pending(Lane *lane) noexcept nogil:
    cdef Queue *queue = <Queue *>lane
    cdef uint32_t count
    lock(&queue.guard)
    count = queue.count
    unlock(&queue.guard)
    return count


cdef void queue_free(Lane *lane) noexcept nogil:
    cdef Queue *queue = <Queue *>lane
    lane_clear(lane)
    condition_destroy(&queue.work)
    mutex_destroy(&queue.guard)
    free(queue)


cdef Scheduler QUEUE = Scheduler(push, wake, remove, take, close, pending, queue_free, NULL)


cdef int set_policy(Queue *queue, object spec) except -1:
    cdef object batching = spec.batching
    queue.max_rows = max(1, spec.max_batch_size)
    if batching is None:
        return 0
    queue.batching = True
    queue.delay_ns = min(batching.max_queue_delay_us * 1000, LONGEST_DELAY)
    if len(batching.preferred_sizes) > MAX_PREFERRED:
        raise ValueError(f"{len(batching.preferred_sizes)} preferred batch sizes, at most {MAX_PREFERRED} are served")
    for size in batching.preferred_sizes or (queue.max_rows,):
        queue.preferred[queue.preferred_count] = size
        queue.preferred_count += 1
    return 0


cdef Queue *queue_new(object spec, int64_t version) except NULL:
    cdef Queue *queue = <Queue *>calloc(1, sizeof(Queue))
    if queue == NULL:
        raise MemoryError
    try:
        set_policy(queue, spec)
        lane_init(&queue.lane, &QUEUE, spec, version)
    except BaseException:
        free(queue)
        raise
    queue.wake_rows = ANY_ROWS
    mutex_init(&queue.guard, NULL)
    condition_init(&queue.work)
    return queue


cdef class QueueLane(LaneHandle):
    """The lane of a model whose requests are independent.

    Args:
        spec: the version's backends.api.ModelSpec.
        version: its number.
        max_queue: requests that may wait in it; 0 for any number.
    """

    def __cinit__(self, spec, version: int, *, max_queue: int = 0):
        self.lane = &queue_new(spec, version).lane
        self.lane.max_queue = max_queue


cdef class PolicyProbe:
    """The policy with time as an argument and requests that have only a number of rows: for tests and models."""

    cdef QueueLane handle

    def __init__(self, spec):
        self.handle = QueueLane(spec, 1)
        self.handle.lane.signature.uniform = True

    def __dealloc__(self):
        cdef Request *request
        while self.handle is not None and self.handle.queue().head != NULL:
            request = cut(self.handle.queue(), 1)
            request_free(request)

    def push(self, rows: int, now: int) -> None:
        """Queue a request of `rows` rows at the time `now`, in nanoseconds."""
        cdef Request *request = request_new()
        if request == NULL:
            raise MemoryError
        request.rows = rows
        request.queued_ns = now
        push(self.handle.lane, request)

    def plan(self, now: int) -> tuple[int, int, int]:
        """(requests to take, time to ask again, rows at which to ask earlier); the last two only when none."""
        cdef int64_t wake = 0
        cdef uint64_t wake_rows = 0
        cdef uint32_t count = queue_plan(self.handle.queue(), now, &wake, &wake_rows)
        return (count, wake, wake_rows)

    def take(self, count: int) -> list[int]:
        """Remove `count` requests from the head; their rows."""
        cdef Request *request = cut(self.handle.queue(), count) if count else NULL
        cdef Request *following
        rows = []
        while request != NULL:
            following = request.next
            rows.append(request.rows)
            request_free(request)
            request = following
        return rows
