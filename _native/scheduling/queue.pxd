# The lane of a model whose requests are independent: a queue from which instances take batches.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from _native.inference.bridge cimport Bridge
from _native.inference.errand cimport Errand
from _native.inference.request cimport Request
from _native.inference.statistics cimport Duration
from _native.inference.timers cimport Timer
from _native.scheduling.adaptive cimport Outlook
from _native.scheduling.lane cimport Lane, LaneHandle, Seat
from _native.scheduling.levels cimport Levels
from _native.scheduling.policy cimport Plan, Policy
from _native.threads cimport Condition, Mutex

cdef struct Queue:
    Lane lane
    Policy policy
    Mutex guard              # guards all below, and Request.state of the queued
    Condition work
    Levels levels
    Outlook outlook          # of an adaptive policy
    Duration waited          # batches for which an instance without work waited, and for how long
    uint32_t idle            # instances waiting, the free seats among them
    Seat *free               # whose instances the loop may use: the one that was used last in front
    uint32_t held            # no batch before so many requests have been queued at once; 0: no such wait
    uint64_t wake_rows       # notify a waiting instance when this many rows are queued
    bint changed             # more than rows at the end came: the plan may be another
    bint closed
    Timer alarm              # the loop's: when there may be a batch for a free seat
    Bridge *bridge           # of the alarm; NULL: there was none yet
    Errand silence           # ends the alarm when the lane is closed
    int64_t waited_since     # the time since when a free seat has waited although requests did; 0: none does

# With `guard` held: the batch that may be taken at the time `now`, a chain; NULL when there is none, then plan.wake_ns
# is when there may be one.
cdef Request *queue_cut(Queue *queue, int64_t now, Plan *plan) noexcept nogil
cdef Request *queue_cut_now(Queue *queue, Plan *plan) noexcept nogil
# With `guard` held: an instance that has waited since that time although there were requests has got a batch.
cdef void queue_waited(Queue *queue, int64_t since) noexcept nogil


cdef class QueueLane(LaneHandle):
    cdef inline Queue *queue(self) noexcept:
        return <Queue *>self.lane
