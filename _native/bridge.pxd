# The way back from instance threads to the event loop, and the deadlines of requests on the loop.

from libc.stdint cimport int32_t, int64_t, uint32_t

from _native.request cimport Request
from _native.threads cimport Mutex

cdef struct Bridge:
    Mutex guard              # guards the list of finished requests
    Request *head
    Request *tail
    int32_t signalled        # atomic: the loop has been told and has not looked yet
    int event_fd             # readable when requests have finished
    # Used on the loop thread only:
    Request **deadlines      # binary heap, the earliest at place 1
    uint32_t deadline_count
    uint32_t deadline_capacity
    int timer_fd             # readable when the earliest deadline may have passed
    int64_t armed_ns         # what the timer is set to; 0: nothing
    uint32_t in_house        # requests admitted and not yet freed
    void *owner              # the BridgeHandle; not a reference

# From any thread: hand over a chain of finished requests. The loop delivers and frees them.
cdef void bridge_return(Bridge *bridge, Request *first, Request *last) noexcept nogil
# On the loop: watch request.deadline_ns. At the deadline the sink gets DEADLINE_EXCEEDED. False: no memory.
cdef bint bridge_watch(Bridge *bridge, Request *request) noexcept nogil
# On the loop: the sink no longer wants the answer. Queued work leaves the queue; running work is not disturbed.
cdef void bridge_abandon(Request *request) noexcept nogil


cdef class BridgeHandle:
    # owns a Bridge for Python
    cdef Bridge bridge
    cdef list refused        # (status, details) of requests that no instance has seen
    cdef int64_t more_refused
    cdef void note_refusal(self, Request *request) noexcept
