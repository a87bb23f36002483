"""Lanes: where the requests of a model version wait, and when an instance may take how many of them.

Instances pull. One that is free asks the policy, and takes what it gets or waits: until the time that the policy named,
or until enough rows have come to make another answer possible. So batches grow exactly while all instances are busy,
and a request never waits behind an idle instance longer than `max_queue_delay`.

When a batch is ready (lane_plan), for a model with dynamic batching:

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

from _native.atomic cimport load32
from _native.clock cimport now_ns
from _native.memory cimport LIVE_LANES, live_add
from _native.request cimport REQUEST_QUEUED, REQUEST_TAKEN, Request, request_alike, request_free, request_new
from _native.signature cimport signature_build, signature_clear
from _native.statistics cimport statistics_clear, statistics_dict, statistics_init
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

cdef inline bint is_preferred(const Lane *lane, uint64_t rows) noexcept nogil:
    cdef uint32_t i
    for i in range(lane.preferred_count):
        if lane.preferred[i] == rows:
            return True
    return False


cdef uint64_t next_preferred(const Lane *lane, uint64_t rows) noexcept nogil:
    # the smallest preferred size above `rows`, at most max_rows
    cdef uint64_t best = lane.max_rows
    cdef uint32_t i
    for i in range(lane.preferred_count):
        if rows < lane.preferred[i] < best:
            best = lane.preferred[i]
    return best


cdef inline bint exceeds_preferred(const Lane *lane, uint64_t rows) noexcept nogil:
    cdef uint32_t i
    for i in range(lane.preferred_count):
        if rows <= lane.preferred[i]:
            return False
    return True


cdef uint32_t lane_plan(const Lane *lane, int64_t now, int64_t *wake, uint64_t *wake_rows) noexcept nogil:
    cdef const Request *oldest = lane.head
    cdef const Request *request
    cdef uint64_t rows
    cdef uint32_t count = 1
    cdef uint32_t preferred = 0
    cdef bint full
    if oldest == NULL:
        wake[0] = NEVER
        wake_rows[0] = ANY_ROWS
        return 0
    if not lane.batching:
        return 1
    rows = oldest.rows
    if is_preferred(lane, rows):
        preferred = 1
    full = rows >= lane.max_rows
    request = oldest.next
    while request != NULL and not full:
        if rows + request.rows > lane.max_rows:
            full = True
        elif not lane.signature.uniform and not request_alike(oldest, request):
            full = True
        else:
            rows += request.rows
            count += 1
            if is_preferred(lane, rows):
                preferred = count
            full = rows >= lane.max_rows
            request = request.next
    if now - oldest.queued_ns >= lane.delay_ns:
        return count
    if preferred:
        return preferred
    if full:
        return count
    if exceeds_preferred(lane, oldest.rows):
        return 1
    wake[0] = oldest.queued_ns + lane.delay_ns
    wake_rows[0] = next_preferred(lane, rows)
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# The queue

cdef Pushed lane_push(Lane *lane, Request *request) noexcept nogil:
    lock(&lane.guard)
    if lane.closed:
        unlock(&lane.guard)
        return LANE_CLOSED
    if lane.max_queue and lane.count >= lane.max_queue:
        unlock(&lane.guard)
        return LANE_FULL
    request.state = REQUEST_QUEUED
    request.next = NULL
    request.previous = lane.tail
    if lane.tail == NULL:
        lane.head = request
    else:
        lane.tail.next = request
        if not lane.signature.uniform and not request_alike(lane.tail, request):
            lane.broken = True
    lane.tail = request
    lane.count += 1
    lane.rows += request.rows
    unlock(&lane.guard)
    return PUSHED


cdef void lane_wake(Lane *lane) noexcept nogil:
    cdef bint notify
    lock(&lane.guard)
    notify = lane.idle > 0 and lane.count > 0 and (lane.rows >= lane.wake_rows or lane.broken)
    lane.broken = False
    unlock(&lane.guard)
    if notify:
        notify_one(&lane.work)


cdef inline void unlink(Lane *lane, Request *request) noexcept nogil:
    if request.previous == NULL:
        lane.head = request.next
    else:
        request.previous.next = request.next
    if request.next == NULL:
        lane.tail = request.previous
    else:
        request.next.previous = request.previous
    lane.count -= 1
    lane.rows -= request.rows
    request.previous = NULL
    request.next = NULL
    request.state = REQUEST_TAKEN


cdef bint lane_remove(Lane *lane, Request *request) noexcept nogil:
    cdef bint queued
    lock(&lane.guard)
    queued = request.state == REQUEST_QUEUED
    if queued:
        unlink(lane, request)
    unlock(&lane.guard)
    return queued


cdef Request *cut(Lane *lane, uint32_t count) noexcept nogil:
    # the first `count` requests as a chain of their own
    cdef Request *first = lane.head
    cdef Request *last = NULL
    cdef Request *request = first
    cdef uint32_t _
    for _ in range(count):
        request.state = REQUEST_TAKEN
        lane.rows -= request.rows
        last = request
        request = request.next
    lane.count -= count
    lane.head = request
    last.next = NULL
    if request == NULL:
        lane.tail = NULL
    else:
        request.previous = NULL
    return first


cdef Request *lane_take(Lane *lane) noexcept nogil:
    cdef Request *batch = NULL
    cdef int64_t wake
    cdef uint32_t count
    cdef bint more = False
    lock(&lane.guard)
    while True:
        # once closed, nothing more will come: wait for nothing
        count = lane_plan(lane, NEVER if lane.closed else now_ns(), &wake, &lane.wake_rows)
        if count:
            batch = cut(lane, count)
            more = lane.head != NULL and lane.idle > 0
            break
        if lane.closed:
            break
        lane.idle += 1
        if wake == NEVER:
            wait(&lane.work, &lane.guard)
        else:
            wait_until(&lane.work, &lane.guard, wake)
        lane.idle -= 1
    unlock(&lane.guard)
    if more:
        notify_one(&lane.work)  # what is left may be a batch already
    return batch


cdef void lane_close(Lane *lane) noexcept nogil:
    lock(&lane.guard)
    lane.closed = True
    unlock(&lane.guard)
    notify_all(&lane.work)


# ---------------------------------------------------------------------------------------------------------------------
# Life

cdef Lane *lane_new(object spec, int64_t version) except NULL:
    cdef Lane *lane = <Lane *>calloc(1, sizeof(Lane))
    cdef object batching = spec.batching
    if lane == NULL:
        raise MemoryError
    try:
        signature_build(&lane.signature, spec, version)
        lane.max_rows = max(1, spec.max_batch_size)
        if batching is not None:
            lane.batching = True
            lane.delay_ns = min(batching.max_queue_delay_us * 1000, LONGEST_DELAY)
            if len(batching.preferred_sizes) > MAX_PREFERRED:
                raise ValueError(
                    f"{len(batching.preferred_sizes)} preferred batch sizes, at most {MAX_PREFERRED} are served")
            for size in batching.preferred_sizes or (lane.max_rows,):
                lane.preferred[lane.preferred_count] = size
                lane.preferred_count += 1
    except BaseException:
        signature_clear(&lane.signature)
        free(lane)
        raise
    lane.wake_rows = ANY_ROWS
    statistics_init(&lane.statistics)
    mutex_init(&lane.guard, NULL)
    condition_init(&lane.work)
    live_add(LIVE_LANES, 1)
    return lane


cdef void lane_free(Lane *lane) noexcept nogil:
    signature_clear(&lane.signature)
    statistics_clear(&lane.statistics)
    condition_destroy(&lane.work)
    mutex_destroy(&lane.guard)
    free(lane)
    live_add(LIVE_LANES, -1)


cdef class LaneHandle:
    """The lane of one model version, as Python holds it.

    Args:
        spec: the version's backends.api.ModelSpec.
        version: its number.
        max_queue: requests that may wait in it; 0 for any number.

    The handle must outlive the instances that take from the lane and the requests in it: see `in_flight`.
    """

    def __cinit__(self, spec, version: int, *, max_queue: int = 0):
        self.lane = lane_new(spec, version)
        self.lane.max_queue = max_queue

    def __dealloc__(self):
        if self.lane != NULL:
            lane_free(self.lane)

    def close(self) -> None:
        """Refuse further requests; instances finish what is queued and leave."""
        lane_close(self.lane)

    @property
    def in_flight(self) -> int:
        """Requests that refer to this lane: queued, running, or answered but not yet delivered."""
        return load32(&self.lane.in_flight)

    @property
    def pending(self) -> int:
        """Requests in the queue."""
        cdef uint32_t count
        lock(&self.lane.guard)
        count = self.lane.count
        unlock(&self.lane.guard)
        return count

    def statistics(self) -> dict[str, object]:
        """The counters of inference.ModelStatistics; durations are (count, nanoseconds)."""
        return statistics_dict(&self.lane.statistics)


cdef class PolicyProbe:
    """The policy with time as an argument and requests that have only a number of rows: for tests and models."""

    cdef LaneHandle handle

    def __init__(self, spec):
        self.handle = LaneHandle(spec, 1)
        self.handle.lane.signature.uniform = True

    def __dealloc__(self):
        cdef Request *request
        while self.handle is not None and self.handle.lane.head != NULL:
            request = cut(self.handle.lane, 1)
            request_free(request)

    def push(self, rows: int, now: int) -> None:
        """Queue a request of `rows` rows at the time `now`, in nanoseconds."""
        cdef Request *request = request_new()
        if request == NULL:
            raise MemoryError
        request.rows = rows
        request.queued_ns = now
        lane_push(self.handle.lane, request)

    def plan(self, now: int) -> tuple[int, int, int]:
        """(requests to take, time to ask again, rows at which to ask earlier); the last two only when none."""
        cdef int64_t wake = 0
        cdef uint64_t wake_rows = 0
        cdef uint32_t count = lane_plan(self.handle.lane, now, &wake, &wake_rows)
        return (count, wake, wake_rows)

    def take(self, count: int) -> list[int]:
        """Remove `count` requests from the head; their rows."""
        cdef Request *request = cut(self.handle.lane, count) if count else NULL
        cdef Request *following
        rows = []
        while request != NULL:
            following = request.next
            rows.append(request.rows)
            request_free(request)
            request = following
        return rows
