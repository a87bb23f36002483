# The lane of a model whose requests are independent: a queue from which instances take batches.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from inferd._native.front cimport PythonEvent, PythonEvents
from inferd._native.request.lane cimport Lane, LaneHandle, Pushed
from inferd._native.request.request cimport Request
from inferd._native.request.statistics cimport Duration
from inferd._native.scheduling.adaptive cimport ArrivalPredictor
from inferd._native.scheduling.dispatcher cimport Dispatcher, Line
from inferd._native.scheduling.levels cimport Levels
from inferd._native.scheduling.policy cimport Policy
from inferd._native.shares cimport Shares

cdef struct Queue:
    Lane lane
    Policy policy
    Dispatcher *dispatcher   # its own, or the limiter's; its lock protects all below, and Request.state of the queued
    Dispatcher own
    Line line
    Levels levels
    ArrivalPredictor predictor  # if the policy is adaptive
    Duration waited          # batches for which an idle instance waited, and the time
    int64_t waits_since      # since when one waits although there are requests; 0: none does
    uint32_t held            # hold batches until so many requests have been queued at once; 0: do not
    uint64_t enough_rows     # with fewer rows there is no batch before watched_ns, if the requests that come are alike
    int64_t end_ns           # when the first of the waiting requests must have been executed; NEVER: no limit
    Shares shares            # of clients, while the queue is full or was until recently
    uint32_t full_count      # requests that waited when it was full
    bint gathers             # takes requests of one shape from among others, if responses need no order
    bint tracks_requests     # arrivals and departures must be noted: it is timed, or counts shares
    bint closed
    PythonEvent first_came   # calls `first` of its owner, the QueueLane; without an owner it calls nothing
    PythonEvents *posted_to  # where `first_came` has been posted; NULL: nowhere yet

# The Scheduler's functions, with the lock held and without a decision. Put a request in; `ousted` becomes a chain of
# requests that were removed to make room, which the caller must refuse. Anything but PUSHED: the request is not in the
# queue, `level` is its level.
cdef Pushed queue_put(Queue *queue, Request *request, uint32_t *level, Request **ousted) noexcept nogil
# Set the error of a request that got LANE_REFUSED.
cdef void queue_refuse(const Queue *queue, Request *request, uint32_t level) noexcept nogil
# Remove a request if it waits here. False: it does not.
cdef bint queue_take_out(Queue *queue, Request *request) noexcept nogil
# Put a request whose time is over behind the others.
cdef void queue_yield(Queue *queue, Request *request) noexcept nogil
# Whether a decision is necessary after requests were put in.
cdef inline bint queue_is_due(const Queue *queue) noexcept nogil:
    return queue.line.idle_count > 0 and not queue.line.lacking and queue.levels.rows >= queue.enough_rows


cdef class QueueLane(LaneHandle):
    cdef object first        # see await_first

    cdef inline Queue *queue(self) noexcept:
        return <Queue *>self.lane
