# The lane of a model whose requests are independent: a queue from which instances take batches.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from _native.request.request cimport Request
from _native.request.statistics cimport Duration
from _native.scheduling.adaptive cimport ArrivalPredictor
from _native.scheduling.dispatcher cimport Dispatcher, Line
from _native.scheduling.lane cimport Lane, LaneHandle, Pushed
from _native.scheduling.levels cimport Levels
from _native.scheduling.policy cimport Policy
from _native.scheduling.shares cimport Shares

cdef struct Queue:
    Lane lane
    Policy policy
    Dispatcher *dispatcher   # its own, or the limiter's; its guard guards all below, and Request.state of the queued
    Dispatcher own
    Line line
    Levels levels
    ArrivalPredictor predictor  # of an adaptive policy
    Duration waited          # batches for which an instance without work waited, and for how long
    int64_t waits_since      # since when one does although there are requests; 0: none does
    uint32_t held            # no batch before so many requests have been queued at once; 0: no such wait
    uint64_t enough_rows     # with fewer, only more of the same kind at the end, there is no batch before watched_ns
    int64_t end_ns           # when one of those that such a wait is for must have been executed; NEVER: none need be
    Shares shares            # of clients, while it is full or has been so lately
    uint32_t full_count      # requests that waited when it was
    bint gathers             # requests of one shape from among others, where no order of answers is promised
    bint attends             # to what comes and goes: it is timed, or counts shares
    bint closed

# What the Scheduler's functions do, with the guard held and without a decision. Put a request in; `ousted` are those
# that have made room for it, a chain that the caller has to refuse. Anything but PUSHED: it is not in, `level` is its.
cdef Pushed queue_put(Queue *queue, Request *request, uint32_t *level, Request **ousted) noexcept nogil
# Give a request the error of LANE_REFUSED.
cdef void queue_refuse(const Queue *queue, Request *request, uint32_t level) noexcept nogil
# Take a request out. False: it does not
# wait here.
cdef bint queue_take_out(Queue *queue, Request *request) noexcept nogil
# Put one whose time is over behind the others.
cdef void queue_yield(Queue *queue, Request *request) noexcept nogil
# Whether requests that have been put in make a decision necessary.
cdef inline bint queue_is_due(const Queue *queue) noexcept nogil:
    return queue.line.idle_count > 0 and not queue.line.lacking and queue.levels.rows >= queue.enough_rows


cdef class QueueLane(LaneHandle):
    cdef inline Queue *queue(self) noexcept:
        return <Queue *>self.lane
