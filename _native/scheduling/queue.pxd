# The lane of a model whose requests are independent: a queue from which instances take batches.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from _native.request.request cimport Request
from _native.request.statistics cimport Duration
from _native.scheduling.adaptive cimport Outlook
from _native.scheduling.dispatcher cimport Dispatcher, Line
from _native.scheduling.lane cimport Lane, LaneHandle
from _native.scheduling.levels cimport Levels
from _native.scheduling.policy cimport Policy

cdef struct Queue:
    Lane lane
    Policy policy
    Dispatcher *dispatcher   # its own, or the limiter's; its guard guards all below, and Request.state of the queued
    Dispatcher own
    Line line
    Levels levels
    Outlook outlook          # of an adaptive policy
    Duration waited          # batches for which an instance without work waited, and for how long
    int64_t waits_since      # since when one does although there are requests; 0: none does
    uint32_t held            # no batch before so many requests have been queued at once; 0: no such wait
    uint64_t enough_rows     # with fewer, only more of the same kind at the end, there is no batch before watched_ns
    int64_t end_ns           # when one of those that such a wait is for must have been executed; NEVER: none need be
    bint closed

# What the Scheduler's functions do, with the guard held and without a decision. Take a request out. False: it does not
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
