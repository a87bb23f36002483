"""Free seats: instances that the loop itself uses while their threads wait for requests (`_native.execution.remote`).

A seat is kept by its thread, by nobody or by the loop. It is free, which is kept by nobody, from when its thread found
no requests until the loop begins a batch there. When that is over, the loop takes the next one, and frees the seat when
there is none. The thread is called when the loop cannot go on with the instance, and when the lane is closed or the
seat retired. A seat is never free while there is a batch that it could take, but for the time between a push and the
wake that follows it on the loop; where requests wait to become a batch, a timer of the loop stands for that thread's
own waiting.
"""

from libc.stdint cimport int64_t

from _native.atomic cimport fetch_add32, load32
from _native.clock cimport now_ns
from _native.inference.bridge cimport Bridge, bridge_clear_timer, bridge_post, bridge_set_timer
from _native.inference.errand cimport Errand
from _native.inference.request cimport Request
from _native.inference.timers cimport Timer
from _native.scheduling.lane cimport KEPT_BY_LOOP, KEPT_BY_NOBODY, KEPT_BY_THREAD, Lane, Seat
from _native.scheduling.policy cimport NEVER, Plan
from _native.scheduling.queue cimport Queue, queue_cut_now, queue_waited
from _native.threads cimport lock, notify_one, unlock, wait


# ---------------------------------------------------------------------------------------------------------------------
# The list of free seats; with `guard` held

cdef inline void be_free(Queue *queue, Seat *seat) noexcept nogil:
    seat.keeper = KEPT_BY_NOBODY
    seat.next_free = queue.free
    queue.free = seat
    queue.idle += 1


cdef inline Seat *leave_free(Queue *queue) noexcept nogil:
    # the first
    cdef Seat *seat = queue.free
    queue.free = seat.next_free
    queue.idle -= 1
    return seat


cdef inline void call_thread(Seat *seat) noexcept nogil:
    seat.keeper = KEPT_BY_THREAD
    notify_one(&seat.called)


cdef void seats_call(Queue *queue) noexcept nogil:
    while queue.free != NULL:
        call_thread(leave_free(queue))


cdef Seat *useful_seat(Queue *queue) noexcept nogil:
    # one that was free and is ready
    cdef Seat *seat
    while queue.free != NULL:
        seat = leave_free(queue)
        if seat.ready(seat):
            return seat
        seat.recalled = True
        call_thread(seat)
    return NULL


# ---------------------------------------------------------------------------------------------------------------------
# On the loop

cdef void seats_use(Queue *queue) noexcept nogil:
    cdef Request *batch = NULL
    cdef Seat *seat
    while True:
        lock(&queue.guard)
        seat = useful_seat(queue)
        if seat == NULL:
            notify_one(&queue.work)
            unlock(&queue.guard)
            return
        batch = use_or_free(queue, seat)
        unlock(&queue.guard)
        if batch == NULL:
            return
        seat.begin(seat, batch)


cdef Request *seat_next(Lane *lane, Seat *seat) noexcept nogil:
    cdef Queue *queue = <Queue *>lane
    cdef Request *batch = NULL
    lock(&queue.guard)
    seat.recalled = not seat.ready(seat)
    if seat.recalled or load32(&seat.retired):
        call_thread(seat)
    else:
        batch = use_or_free(queue, seat)
    unlock(&queue.guard)
    return batch


cdef Request *use_or_free(Queue *queue, Seat *seat) noexcept nogil:
    # with `guard` held: a batch for the seat; NULL: there is none yet, so that the seat is free, or all is over
    cdef Plan plan
    cdef Request *batch = queue_cut_now(queue, &plan)
    if batch != NULL:
        seat.keeper = KEPT_BY_LOOP
        seat.why = plan.why
        if queue.waited_since:
            queue_waited(queue, queue.waited_since)
            queue.waited_since = 0
    elif queue.closed:
        call_thread(seat)
    else:
        be_free(queue, seat)
        if plan.wake_ns != NEVER:
            wait_for_more(queue, plan.wake_ns)
        else:
            queue.waited_since = 0
    return batch


cdef void wait_for_more(Queue *queue, int64_t until) noexcept nogil:
    # with `guard` held: requests wait, but are no batch before that time
    if queue.waited_since == 0:
        queue.waited_since = now_ns()
    if queue.alarm.slot and queue.alarm.due_ns <= until:
        return  # who looks too early looks again
    queue.bridge = <Bridge *>queue.levels.first.bridge
    if queue.alarm.slot == 0:
        fetch_add32(&queue.lane.in_flight, 1)  # the lane stays until then
    queue.alarm.fire = look
    queue.alarm.owner = queue
    if not bridge_set_timer(queue.bridge, &queue.alarm, until):
        fetch_add32(&queue.lane.in_flight, -1)
        seats_call(queue)  # threads have clocks of their own


cdef void look(Timer *timer, int64_t now) noexcept nogil:
    cdef Queue *queue = <Queue *>timer.owner
    seats_use(queue)
    fetch_add32(&queue.lane.in_flight, -1)


cdef void seats_end_alarm(Queue *queue) noexcept nogil:
    if queue.bridge != NULL:
        fetch_add32(&queue.lane.in_flight, 1)
        queue.silence.run = end_alarm
        queue.silence.owner = queue
        bridge_post(queue.bridge, &queue.silence)


cdef void end_alarm(Errand *errand) noexcept nogil:
    cdef Queue *queue = <Queue *>errand.owner
    if queue.alarm.slot:
        bridge_clear_timer(queue.bridge, &queue.alarm)
        fetch_add32(&queue.lane.in_flight, -1)
    fetch_add32(&queue.lane.in_flight, -1)


cdef void seat_recall(Lane *lane, Seat *seat, Request *batch) noexcept nogil:
    cdef Queue *queue = <Queue *>lane
    lock(&queue.guard)
    seat.handed = batch
    seat.recalled = batch == NULL
    call_thread(seat)
    unlock(&queue.guard)


# ---------------------------------------------------------------------------------------------------------------------
# On the seat's thread

cdef Request *seat_stand_by(Queue *queue, Seat *seat) noexcept nogil:
    cdef Request *batch
    be_free(queue, seat)
    while seat.keeper != KEPT_BY_THREAD:
        wait(&seat.called, &queue.guard)
    batch = seat.handed
    seat.handed = NULL
    return batch
