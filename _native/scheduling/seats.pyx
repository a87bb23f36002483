"""Free seats: instances that the loop itself uses while their threads wait for a batch (`_native.execution.remote`).

A seat is kept by its thread, by nobody or by the loop. It is free, which is kept by nobody, from when its thread found
nothing to take until the loop begins a batch there. When that is over, the loop takes the next one, and lets the seat
go when there is none. The thread is called when the loop cannot go on with the instance, and when the lane is closed or
the seat retired. A seat is never free while there is a batch that it could take, but for the time between a push and
the wake that follows it on the loop.
"""

from _native.atomic cimport load32
from _native.inference.request cimport Request
from _native.scheduling.lane cimport KEPT_BY_LOOP, KEPT_BY_NOBODY, KEPT_BY_THREAD, Lane, Seat
from _native.scheduling.policy cimport Plan
from _native.scheduling.queue cimport Queue, queue_cut_now
from _native.threads cimport lock, notify_one, unlock, wait


cdef inline void be_free(Queue *queue, Seat *seat) noexcept nogil:
    # with `guard` held
    seat.keeper = KEPT_BY_NOBODY
    seat.next_free = queue.free
    queue.free = seat
    queue.idle += 1


cdef inline Seat *leave_free(Queue *queue) noexcept nogil:
    # the first; with `guard` held
    cdef Seat *seat = queue.free
    queue.free = seat.next_free
    queue.idle -= 1
    return seat


cdef inline void call_thread(Seat *seat) noexcept nogil:
    # with `guard` held
    seat.keeper = KEPT_BY_THREAD
    notify_one(&seat.called)


cdef void seats_call(Queue *queue) noexcept nogil:
    while queue.free != NULL:
        call_thread(leave_free(queue))


cdef Seat *useful_seat(Queue *queue) noexcept nogil:
    # with `guard` held: the first that is free, which is ready
    while queue.free != NULL and not queue.free.ready(queue.free):
        queue.free.recalled = True
        call_thread(leave_free(queue))
    return queue.free


cdef void seats_use(Queue *queue) noexcept nogil:
    cdef Request *batch = NULL
    cdef Seat *seat
    cdef Plan plan
    while True:
        lock(&queue.guard)
        seat = useful_seat(queue)
        batch = queue_cut_now(queue, &plan) if seat != NULL else NULL
        if batch != NULL:
            leave_free(queue).keeper = KEPT_BY_LOOP
        unlock(&queue.guard)
        if batch == NULL:
            return
        seat.why = plan.why
        seat.begin(seat, batch)


cdef Request *seat_next(Lane *lane, Seat *seat) noexcept nogil:
    cdef Queue *queue = <Queue *>lane
    cdef Request *batch = NULL
    cdef Plan plan
    lock(&queue.guard)
    seat.recalled = not seat.ready(seat)
    if not seat.recalled and not load32(&seat.retired):
        batch = queue_cut_now(queue, &plan)
    if batch != NULL:
        seat.why = plan.why
    elif seat.recalled or queue.closed or load32(&seat.retired):
        call_thread(seat)
    else:
        be_free(queue, seat)
    unlock(&queue.guard)
    return batch


cdef void seat_recall(Lane *lane, Seat *seat, Request *batch) noexcept nogil:
    cdef Queue *queue = <Queue *>lane
    lock(&queue.guard)
    seat.handed = batch
    seat.recalled = batch == NULL
    call_thread(seat)
    unlock(&queue.guard)


cdef Request *seat_stand_by(Queue *queue, Seat *seat) noexcept nogil:
    cdef Request *batch
    be_free(queue, seat)
    while seat.keeper != KEPT_BY_THREAD:
        wait(&seat.called, &queue.guard)
    batch = seat.handed
    seat.handed = NULL
    return batch
