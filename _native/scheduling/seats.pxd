# Seats of a queue whose instances the loop itself can use.

from _native.inference.request cimport Request
from _native.scheduling.lane cimport Lane, Seat
from _native.scheduling.queue cimport Queue

# On the loop: begin a batch on each free seat as long as there is one.
cdef void seats_use(Queue *queue) noexcept nogil
# With `guard` held: every free seat's thread looks what has become of the lane and of its seat.
cdef void seats_call(Queue *queue) noexcept nogil
# The same: nothing will be waited for any more. Once, before the lane is closed.
cdef void seats_end_alarm(Queue *queue) noexcept nogil
# With `guard` held, on the seat's thread, when there is nothing to take: let the loop use the instance until it hands a
# batch over, or (NULL) there is another reason to look.
cdef Request *seat_stand_by(Queue *queue, Seat *seat) noexcept nogil
# `next` and `recall` of the queue's Scheduler.
cdef Request *seat_next(Lane *lane, Seat *seat) noexcept nogil
cdef void seat_recall(Lane *lane, Seat *seat, Request *batch) noexcept nogil
