"""Lanes: the entry of requests into a model version. Behind it, a scheduler decides how they are executed.

There is one kind of lane for each kind of scheduling, for example `inferd._native.scheduling.queue` for models whose
requests are independent. All have the same head, through which requests come in and instances take batches.
"""

from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport calloc, free

from inferd._native.atomic cimport fetch_add32, load32
from inferd._native.front cimport front_enter, front_leave
from inferd._native.memory.arena cimport ArenaHandle, arena_give, arena_share
from inferd._native.memory.resource cimport LIVE_LANES, live_add
from inferd._native.request.order cimport order_free, order_new
from inferd._native.request.request cimport Request, request_free
from inferd._native.request.signature cimport signature_build, signature_clear
from inferd._native.request.statistics cimport (
    POWERS,
    TIMES,
    statistics_add_bounds,
    statistics_clear,
    statistics_dict,
    statistics_init,
    statistics_last_used,
    statistics_totals,
)


cdef Lane *lane_new(size_t size, const Scheduler *scheduler, object spec, int64_t version) except NULL:
    cdef Lane *lane = <Lane *>calloc(1, size)
    if lane == NULL:
        raise MemoryError
    try:
        signature_build(&lane.signature, spec, version)
    except BaseException:
        free(lane)
        raise
    statistics_init(&lane.statistics)
    live_add(LIVE_LANES, 1)
    lane.scheduler = scheduler
    lane.coalesces = spec.coalesces
    lane.caches = spec.caches
    if spec.queue.preserve_ordering:
        lane.order = order_new(lane)
        if lane.order == NULL:
            lane_free(lane)
            raise MemoryError
    return lane


cdef void lane_free(Lane *lane) noexcept nogil:
    arena_give(lane.arena)
    order_free(lane.order)
    signature_clear(&lane.signature)
    statistics_clear(&lane.statistics)
    live_add(LIVE_LANES, -1)
    free(lane)


cdef void lane_discard(Request *request) noexcept nogil:
    cdef Lane *lane = <Lane *>request.lane
    request_free(request)
    fetch_add32(&lane.in_flight, -1)


cdef class LaneHandle:
    """The lane of one model version, as Python holds it.

    The handle must outlive the instances that take from the lane and the requests in it: see `in_flight`.
    """

    def __dealloc__(self):
        if self.lane != NULL:
            front_enter()
            self.lane.scheduler.free(self.lane)
            front_leave()

    def receive_into(self, ArenaHandle arena not None) -> None:
        """Receive large messages into this arena. Call this before anyone can find the lane."""
        self.lane.arena = arena_share(arena.arena)

    def set_bounds(self, ns) -> None:
        """Add upper bounds, in nanoseconds, to the histograms of times. Call this before anyone can find the lane.

        Raises:
            ValueError: they are too many, or not positive.
        """
        cdef int64_t bounds[TIMES]
        cdef uint32_t count = 0
        for bound in ns:
            if count == TIMES:
                break
            bounds[count] = bound
            count += 1
        if not statistics_add_bounds(&self.lane.statistics, bounds, count):
            raise ValueError(f"at most {TIMES - 1 - POWERS} further bounds are served, all above 0, got {list(ns)}")

    def close(self) -> None:
        """Refuse further requests; instances finish the queued requests and leave."""
        front_enter()
        self.lane.scheduler.close(self.lane)
        front_leave()

    @property
    def in_flight(self) -> int:
        """Requests that refer to this lane: queued, running, or answered but not yet delivered."""
        return load32(&self.lane.in_flight)

    @property
    def pending(self) -> int:
        """Requests that wait."""
        return self.lane.scheduler.pending(self.lane)

    def statistics(self) -> dict[str, object]:
        """The counters of inference.ModelStatistics; durations are (count, nanoseconds).

        `failures` are the parts of `fail` by Triton's reasons: "REJECTED", "CANCELED", "BACKEND", "OTHER".
        `queue_times` is a histogram of the times that served requests waited: (microseconds, count), where each
        request counts once, at the first bound that it did not exceed; the last bound is None.
        `responses` are those of a decoupled model by their index, with the parts of response_stats.
        """
        return statistics_dict(&self.lane.statistics)

    @property
    def last_used_ns(self) -> int:
        """When a request was last executed, or answered from the response cache, as time.monotonic_ns(); 0: never."""
        return statistics_last_used(&self.lane.statistics)

    def totals(self) -> tuple[int, int, int]:
        """Requests that succeeded, requests that failed, and the nanoseconds in which batches computed."""
        return statistics_totals(&self.lane.statistics)
