"""Queues with time as an argument, for tests and models: the native code without threads, sockets and clocks."""

from libc.stdlib cimport calloc, free

from _native.lane cimport LANE_CLOSED, LANE_FULL, PUSHED, Pushed
from _native.policy cimport NEVER as NEVER_NS, Plan
from _native.queue cimport QueueLane, queue_cut
from _native.request cimport REQUEST_TAKEN, Request, request_free, request_new, request_reserve
from _native.timers cimport Timer, Timers, timers_clear, timers_due, timers_free, timers_have_room, timers_set

NEVER = NEVER_NS


cdef class QueueProbe:
    """A queue whose requests are numbers of rows of one input "x" of any width.

    Args:
        spec: a backends.api.ModelSpec with that input.
        max_queue, held: as for QueueLane.
    """

    cdef QueueLane handle
    cdef Plan plan
    cdef Timers timers
    cdef dict requests       # tag -> address of what is queued

    def __init__(self, spec, *, max_queue: int = 0, held: int = 0):
        self.handle = QueueLane(spec, 1, max_queue=max_queue, held=held)
        self.requests = {}

    def __dealloc__(self):
        for address in self.requests.values() if self.requests is not None else ():
            request_free(<Request *><size_t>address)
        timers_free(&self.timers)

    cdef Request *forget(self, int tag) except NULL:
        cdef Request *request = <Request *><size_t>self.requests.pop(tag)
        timers_clear(&self.timers, &request.timer)
        return request

    def push(self, tag: int, rows: int, now: int, *, priority: int = 0, timeout_us: int = 0, width: int = 1):
        """Queue the request `tag` at the time `now`, in nanoseconds; why it was refused, None when it was not."""
        cdef Request *request = request_new()
        cdef Pushed pushed
        if request == NULL or not timers_have_room(&self.timers) or not request_reserve(
                request, &self.handle.lane.signature):
            raise MemoryError
        request.inputs[0].present = True
        request.inputs[0].rank = 2
        request.inputs[0].shape[0] = rows
        request.inputs[0].shape[1] = width
        request.rows = rows
        request.arrived_ns = request.queued_ns = now
        request.priority = priority
        request.timeout_us = timeout_us
        pushed = self.handle.lane.scheduler.push(self.handle.lane, request)
        if pushed != PUSHED:
            text = (
                "closed" if pushed == LANE_CLOSED else
                "lane full" if pushed == LANE_FULL else
                request.response.details.decode()
            )
            request_free(request)
            return text
        self.requests[tag] = <size_t>request
        request.id.size = tag
        if request.expires_ns:
            timers_set(&self.timers, &request.timer, request.expires_ns)
            request.timer.owner = request
        return None

    def remove(self, tag: int) -> bool:
        """The client of this request has gone; False: an instance has it."""
        if tag not in self.requests:
            return False
        cdef Request *request = <Request *><size_t>self.requests[tag]
        if not self.handle.lane.scheduler.remove(self.handle.lane, request):
            return False
        request_free(self.forget(tag))
        return True

    def expire(self, now: int) -> list[int]:
        """What the loop does when timers are due: the requests that are refused because their time is over."""
        cdef Timer *timer = timers_due(&self.timers, now)
        cdef Request *request
        refused = []
        while timer != NULL:
            request = <Request *>timer.owner
            if self.handle.lane.scheduler.expire(self.handle.lane, request):
                refused.append(<int>request.id.size)
                request_free(self.forget(<int>request.id.size))
            timer = timers_due(&self.timers, now)
        return refused

    def take(self, now: int) -> list[int]:
        """What an instance that asks at this time gets; nothing when it has to wait."""
        cdef Request *request = queue_cut(self.handle.queue(), now, &self.plan)
        cdef Request *following
        taken = []
        while request != NULL:
            following = request.next
            if request.state != REQUEST_TAKEN:
                raise AssertionError("a request was taken that does not know it")
            taken.append(<int>request.id.size)
            request_free(self.forget(<int>request.id.size))
            request = following
        return taken

    @property
    def wake(self) -> tuple[int, int]:
        """After `take` had nothing: when to ask again at the latest, and the rows at which to ask earlier."""
        return (self.plan.wake_ns, self.plan.wake_rows)

    @property
    def why(self) -> str:
        """Why what was taken last was a batch."""
        return self.plan.why.decode() if self.plan.why != NULL else ""

    @property
    def pending(self) -> list[int]:
        """What waits, in the order of service."""
        cdef Request *request = self.handle.queue().levels.first
        waiting = []
        while request != NULL:
            waiting.append(<int>request.id.size)
            request = request.next
        return waiting

    def close(self) -> None:
        """Refuse further requests; what waits goes without delay."""
        self.handle.close()


cdef class TimersProbe:
    """Timers told apart by numbers from 0."""

    cdef Timers timers
    cdef Timer *each
    cdef int count

    def __cinit__(self, count: int):
        self.count = count
        self.each = <Timer *>calloc(count, sizeof(Timer))
        if self.each == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.each)
        timers_free(&self.timers)

    def set(self, number: int, due: int) -> None:
        """Set it, or move it when it is set."""
        if not timers_have_room(&self.timers):
            raise MemoryError
        timers_set(&self.timers, &self.each[number], due)

    def clear(self, number: int) -> None:
        """Take it out if it is in."""
        timers_clear(&self.timers, &self.each[number])

    def due(self, now: int) -> list[int]:
        """Those that are due, in order; they are out then."""
        cdef Timer *timer = timers_due(&self.timers, now)
        found = []
        while timer != NULL:
            found.append(timer - self.each)
            timer = timers_due(&self.timers, now)
        return found
