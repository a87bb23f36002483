"""The bridge: responses and errands travel from every other thread to the loop, which owns the sinks.

Instance threads append chains of responses and write to an eventfd, once until the loop has looked. The loop then
calls each sink's `deliver`, and frees the request after its final response. A sink hears of the end at most once: by
the final response, or by DEADLINE_EXCEEDED from the timer, or not at all when it has left (`bridge_abandon`).

Whoever wants to free a request must own it: the loop owns it before it is queued, when it got it back out of the lane,
and when its final response came over the bridge; in between it belongs to the lane and then to the instance.
"""

from libc.errno cimport errno
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from posix.unistd cimport close, read, write

from _native.atomic cimport exchange32, fetch_add32, store32
from _native.clock cimport now_ns
from _native.lane cimport Lane
from _native.request cimport (
    REQUEST_NEW,
    STATUS_DEADLINE_EXCEEDED,
    STATUS_OK,
    Request,
    Response,
    request_free,
    response_free,
)
from _native.statistics cimport statistics_failed
from _native.text cimport text_or_no_memory
from _native.threads cimport lock, mutex_destroy, mutex_init, unlock

cdef extern from *:
    """
    #include <stdint.h>
    #include <sys/eventfd.h>
    #include <sys/timerfd.h>
    static inline int inferd_eventfd(void) { return eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC); }
    static inline int inferd_timerfd(void) { return timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC); }
    static inline void inferd_timer_set(int fd, int64_t ns) {
        struct itimerspec t = {{0, 0}, {(time_t)(ns / 1000000000), (long)(ns % 1000000000)}};
        timerfd_settime(fd, TFD_TIMER_ABSTIME, &t, NULL);
    }
    """
    int make_eventfd "inferd_eventfd"() nogil
    int make_timerfd "inferd_timerfd"() nogil
    void timer_set "inferd_timer_set"(int fd, int64_t ns) nogil


cdef enum:
    NOTED_REFUSALS = 32      # texts kept between two calls of take_refusals


# ---------------------------------------------------------------------------------------------------------------------
# Deadlines: a binary heap whose members know their place

cdef inline void place(Bridge *bridge, Request *request, uint32_t slot) noexcept nogil:
    bridge.deadlines[slot] = request
    request.timer_slot = slot


cdef void sift_up(Bridge *bridge, Request *request, uint32_t slot) noexcept nogil:
    while slot > 1 and bridge.deadlines[slot // 2].deadline_ns > request.deadline_ns:
        place(bridge, bridge.deadlines[slot // 2], slot)
        slot //= 2
    place(bridge, request, slot)


cdef void sift_down(Bridge *bridge, Request *request, uint32_t slot) noexcept nogil:
    cdef uint32_t child = slot * 2
    while child <= bridge.deadline_count:
        if (child < bridge.deadline_count
                and bridge.deadlines[child + 1].deadline_ns < bridge.deadlines[child].deadline_ns):
            child += 1
        if bridge.deadlines[child].deadline_ns >= request.deadline_ns:
            break
        place(bridge, bridge.deadlines[child], slot)
        slot = child
        child = slot * 2
    place(bridge, request, slot)


cdef void arm(Bridge *bridge) noexcept nogil:
    # set the timer when the earliest deadline is before what it is set to; a timer that fires early does no harm
    cdef int64_t earliest
    if bridge.deadline_count == 0:
        return
    earliest = bridge.deadlines[1].deadline_ns
    if bridge.armed_ns == 0 or earliest < bridge.armed_ns:
        bridge.armed_ns = earliest
        timer_set(bridge.timer_fd, earliest)


cdef bint bridge_watch(Bridge *bridge, Request *request) noexcept nogil:
    cdef uint32_t capacity
    cdef Request **grown
    if bridge.deadline_count + 1 >= bridge.deadline_capacity:
        capacity = max(64, bridge.deadline_capacity * 2)
        grown = <Request **>realloc(bridge.deadlines, capacity * sizeof(Request *))
        if grown == NULL:
            return False
        bridge.deadlines = grown
        bridge.deadline_capacity = capacity
    bridge.deadline_count += 1
    sift_up(bridge, request, bridge.deadline_count)
    arm(bridge)
    return True


cdef void unwatch(Bridge *bridge, Request *request) noexcept nogil:
    cdef uint32_t slot = request.timer_slot
    cdef Request *last
    if slot == 0:
        return
    request.timer_slot = 0
    last = bridge.deadlines[bridge.deadline_count]
    bridge.deadline_count -= 1
    if last == request:
        return
    if slot > 1 and bridge.deadlines[slot // 2].deadline_ns > last.deadline_ns:
        sift_up(bridge, last, slot)
    else:
        sift_down(bridge, last, slot)


# ---------------------------------------------------------------------------------------------------------------------
# Ends of a request

cdef inline void signal(Bridge *bridge) noexcept nogil:
    cdef uint64_t one = 1
    if exchange32(&bridge.signalled, 1) == 0:
        write(bridge.event_fd, &one, sizeof(one))


cdef void bridge_return(Bridge *bridge, Response *first, Response *last) noexcept nogil:
    last.next = NULL
    lock(&bridge.guard)
    if bridge.tail == NULL:
        bridge.head = first
    else:
        bridge.tail.next = first
    bridge.tail = last
    unlock(&bridge.guard)
    signal(bridge)


cdef void bridge_post(Bridge *bridge, Errand *errand) noexcept nogil:
    errand.next = NULL
    lock(&bridge.guard)
    if bridge.last_errand == NULL:
        bridge.first_errand = errand
    else:
        bridge.last_errand.next = errand
    bridge.last_errand = errand
    unlock(&bridge.guard)
    signal(bridge)


cdef void finish(Request *request) noexcept nogil:
    cdef Lane *lane = <Lane *>request.lane
    if request.admitted:
        (<Bridge *>request.bridge).in_house -= 1
    request_free(request)
    if lane != NULL:
        fetch_add32(&lane.in_flight, -1)


cdef void drop_if_queued(Request *request) noexcept nogil:
    # the sink is gone; what an instance has taken comes back over the bridge and is freed then
    cdef Lane *lane = <Lane *>request.lane
    request.sink = NULL
    store32(&request.abandoned, 1)
    if lane != NULL and lane.scheduler.remove(lane, request):
        statistics_failed(&lane.statistics, 1, <uint64_t>(now_ns() - request.arrived_ns))
        finish(request)


cdef void bridge_abandon(Request *request) noexcept nogil:
    unwatch(<Bridge *>request.bridge, request)
    drop_if_queued(request)


cdef void expire(Bridge *bridge) noexcept nogil:
    cdef Request *request
    cdef int64_t now = now_ns()
    bridge.armed_ns = 0
    while bridge.deadline_count and bridge.deadlines[1].deadline_ns <= now:
        request = bridge.deadlines[1]
        unwatch(bridge, request)
        request.deliver(request.sink, NULL, STATUS_DEADLINE_EXCEEDED, "Deadline Exceeded")
        drop_if_queued(request)
    arm(bridge)
    after_round(bridge)


cdef void deliver_all(Bridge *bridge) noexcept nogil:
    cdef Response *response
    cdef Response *following
    cdef Errand *errand
    cdef Errand *next_errand
    store32(&bridge.signalled, 0)  # before looking, so that what comes later signals again
    lock(&bridge.guard)
    response = bridge.head
    errand = bridge.first_errand
    bridge.head = NULL
    bridge.tail = NULL
    bridge.first_errand = NULL
    bridge.last_errand = NULL
    unlock(&bridge.guard)
    while errand != NULL:
        next_errand = errand.next
        errand.run(errand)
        errand = next_errand
    while response != NULL:
        following = response.next
        deliver(bridge, response)
        response = following
    after_round(bridge)


cdef inline void after_round(Bridge *bridge) noexcept nogil:
    # what was delivered may have submitted more
    if bridge.after != NULL:
        bridge.after(bridge.after_context)


cdef void deliver(Bridge *bridge, Response *response) noexcept nogil:
    cdef Request *request = response.request
    cdef bint final = response.final
    if final:
        unwatch(bridge, request)
        if response.status != STATUS_OK and request.state == REQUEST_NEW:
            with gil:
                (<BridgeHandle>bridge.owner).note_refusal(response)
    if request.sink != NULL:
        request.deliver(request.sink, response, response.status, text_or_no_memory(response.details))
    if response != &request.response:
        response_free(response)
    if final:
        finish(request)


cdef class BridgeHandle:
    """The bridge to one event loop.

    Register `event_fd` with `drain` and `timer_fd` with `expire` as readers of the loop.
    """

    def __cinit__(self):
        mutex_init(&self.bridge.guard, NULL)
        self.bridge.owner = <void *>self
        self.refused = []
        self.bridge.event_fd = make_eventfd()
        self.bridge.timer_fd = make_timerfd()
        if self.bridge.event_fd < 0 or self.bridge.timer_fd < 0:
            raise OSError(errno, "cannot make the descriptors of the bridge")

    def __dealloc__(self):
        close(self.bridge.event_fd)
        close(self.bridge.timer_fd)
        free(self.bridge.deadlines)
        mutex_destroy(&self.bridge.guard)

    cdef void note_refusal(self, Response *response) noexcept:
        if len(self.refused) < NOTED_REFUSALS:
            self.refused.append((response.status, text_or_no_memory(response.details).decode("utf-8", "replace")))
        else:
            self.more_refused += 1

    def take_refusals(self) -> tuple[list[tuple[int, str]], int]:
        """Requests that were refused before any instance saw them: some as (status, text), and how many more."""
        out = (self.refused, self.more_refused)
        self.refused = []
        self.more_refused = 0
        return out

    @property
    def in_house(self) -> int:
        """Requests that were admitted and are not over: queued, running, or on their way back."""
        return self.bridge.in_house

    @property
    def event_fd(self) -> int:
        """Readable when requests have finished."""
        return self.bridge.event_fd

    @property
    def timer_fd(self) -> int:
        """Readable when a deadline may have passed."""
        return self.bridge.timer_fd

    def drain(self) -> None:
        """Deliver everything that has finished."""
        cdef uint64_t count
        read(self.bridge.event_fd, &count, sizeof(count))
        deliver_all(&self.bridge)

    def expire(self) -> None:
        """Answer everything whose deadline has passed."""
        cdef uint64_t count
        read(self.bridge.timer_fd, &count, sizeof(count))
        expire(&self.bridge)
