# The queue of one model version and the policy by which instances take batches from it.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from _native.request cimport Request
from _native.signature cimport Signature
from _native.statistics cimport Statistics
from _native.threads cimport Condition, Mutex

cdef enum:
    MAX_PREFERRED = 64

cdef struct Lane:
    Signature signature
    Statistics statistics
    int32_t in_flight            # atomic: requests that refer to this lane, queued, running or on their way back

    # The policy; see lane_plan.
    bint batching
    uint32_t max_rows
    int64_t delay_ns
    uint32_t preferred[MAX_PREFERRED]
    uint32_t preferred_count
    uint32_t max_queue           # requests that may wait; 0: any number

    Mutex guard                  # guards all below, and Request.state of the queued
    Condition work
    Request *head                # oldest
    Request *tail
    uint32_t count
    uint64_t rows
    uint32_t idle                # instances waiting
    uint64_t wake_rows           # notify a waiting instance when this many rows are queued
    bint broken                  # a request was queued that cannot join the one before it
    bint closed

cdef enum Pushed:
    PUSHED
    LANE_CLOSED
    LANE_FULL

# Read by attribute from a backends.api.ModelSpec; raises ValueError or MemoryError.
cdef Lane *lane_new(object spec, int64_t version) except NULL
# No request may refer to it any more and no instance may wait in it.
cdef void lane_free(Lane *lane) noexcept nogil

# Queue a request, which now belongs to the lane. Never blocks for long. The caller calls lane_wake afterwards, once for
# all requests that arrived together: that gives larger batches and fewer wake-ups. Anything but PUSHED: the request
# is still the caller's.
cdef Pushed lane_push(Lane *lane, Request *request) noexcept nogil
cdef void lane_wake(Lane *lane) noexcept nogil
# Take a request out of the queue, in O(1). False: it is not queued any more, an instance has it.
cdef bint lane_remove(Lane *lane, Request *request) noexcept nogil
# Wait for the next batch: a chain by Request.next, oldest first, now the caller's. NULL: the lane is closed and empty.
cdef Request *lane_take(Lane *lane) noexcept nogil
# Refuse further requests; instances drain the queue and then get NULL.
cdef void lane_close(Lane *lane) noexcept nogil

# The policy without clock or thread: how many requests from the head form a batch at the time `now`; 0: none yet, and
# then `wake` is when to ask again at the latest and `wake_rows` the queued rows at which to ask earlier.
cdef uint32_t lane_plan(const Lane *lane, int64_t now, int64_t *wake, uint64_t *wake_rows) noexcept nogil


cdef class LaneHandle:
    # owns a Lane for Python
    cdef Lane *lane
