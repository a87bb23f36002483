# The lane of a model whose requests are independent: a queue, and the policy by which instances take batches from it.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from _native.lane cimport Lane, LaneHandle
from _native.request cimport Request
from _native.threads cimport Condition, Mutex

cdef enum:
    MAX_PREFERRED = 64

cdef struct Queue:
    Lane lane

    # The policy; see queue_plan.
    bint batching
    uint32_t max_rows
    int64_t delay_ns
    uint32_t preferred[MAX_PREFERRED]
    uint32_t preferred_count

    Mutex guard              # guards all below, and Request.state of the queued
    Condition work
    Request *head            # oldest
    Request *tail
    uint32_t count
    uint64_t rows
    uint32_t idle            # instances waiting
    uint64_t wake_rows       # notify a waiting instance when this many rows are queued
    bint broken              # a request was queued that cannot join the one before it
    bint closed

# The policy without clock or thread: how many requests from the head form a batch at the time `now`; 0: none yet, and
# then `wake` is when to ask again at the latest and `wake_rows` the queued rows at which to ask earlier.
cdef uint32_t queue_plan(const Queue *queue, int64_t now, int64_t *wake, uint64_t *wake_rows) noexcept nogil


cdef class QueueLane(LaneHandle):
    cdef inline Queue *queue(self) noexcept:
        return <Queue *>self.lane
