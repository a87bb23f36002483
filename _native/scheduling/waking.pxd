# Carries out the dispatcher's decisions: wakes threads that wait for batches, and begins batches in the front.

from libc.stdint cimport int64_t

from inferd._native.request.lane cimport Lane, Scheduler
from inferd._native.request.request cimport Request
from inferd._native.scheduling.dispatcher cimport Claim, Consumer, Dispatcher, Line

cdef struct BatchScheduler:
    # the type of every lane's `scheduler`; it also finds the line of an instance
    Scheduler requests
    # The line from which the instance gets its batches. NULL: it gets none.
    Line *(*line)(Lane *lane, const Consumer *consumer) noexcept nogil

# Before its thread runs, and after it.
cdef int consumer_init(Consumer *consumer) except -1
cdef void consumer_clear(Consumer *consumer) noexcept nogil

# On the instance's thread: wait for its next batch, a chain by Request.next, oldest first, which then belongs to the
# caller. NULL: see consumer.given. The consumer holds the resources for the batch until it takes again.
cdef Request *consumer_take(Lane *lane, Consumer *consumer) noexcept nogil
# On the instance's thread, while it executes a batch: the next one, if waiting would not change it and no idle instance
# can have it; otherwise NULL.
cdef Request *consumer_take_full(Lane *lane, Consumer *consumer) noexcept nogil
# On the instance's thread: wait for the resources for this batch, which does not come from the lane.
cdef Request *consumer_hold(Consumer *consumer, Request *batch) noexcept nogil
# Give the resources back now.
cdef void consumer_release(Consumer *consumer) noexcept nogil
# From any thread: the consumer gets GIVEN_END when it takes next, or now if it waits.
cdef void consumer_retire(Lane *lane, Consumer *consumer) noexcept nogil

# In the front, after a batch of the instance has ended: its next batch. NULL: the instance is no longer lent to the
# front.
cdef Request *consumer_next(Consumer *consumer) noexcept nogil
# In the front: pass this batch, which has not begun, to the instance's thread. NULL: GIVEN_BACK.
cdef void consumer_recall(Consumer *consumer, Request *batch) noexcept nogil

# Decide after a change in the line. The caller holds the dispatcher's lock, which is released. `in_front`: instances
# that the front can use begin at once.
cdef void line_look(Line *line, bint in_front) noexcept nogil
# With the lock: the same after changes in several lines; on any thread.
cdef void lines_look(Dispatcher *dispatcher, int64_t now) noexcept nogil
# With the lock, once: the lane is about to be closed, and the line no longer needs its alarm.
cdef void line_silence(Line *line) noexcept nogil
