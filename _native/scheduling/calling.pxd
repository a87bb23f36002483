# Carrying out what the dispatcher decides: threads wait for batches and are called, and the loop begins batches.

from libc.stdint cimport int64_t

from _native.request.request cimport Request
from _native.scheduling.dispatcher cimport Claim, Consumer, Dispatcher, Line
from _native.scheduling.lane cimport Lane

# Before its thread runs, and after.
cdef void consumer_init(Consumer *consumer) noexcept nogil
cdef void consumer_clear(Consumer *consumer) noexcept nogil

# On the instance's thread: wait for its next batch, a chain by Request.next, oldest first, now the caller's. NULL:
# consumer.given says why. It holds the resources that the batch needs until it takes again.
cdef Request *consumer_take(Lane *lane, Consumer *consumer) noexcept nogil
# On the instance's thread: wait for the resources that this batch needs, which does not come from the lane.
cdef Request *consumer_hold(Consumer *consumer, Request *batch) noexcept nogil
# Give the resources back already now.
cdef void consumer_release(Consumer *consumer) noexcept nogil
# From any thread: have it get GIVEN_END when it takes next, or now if it waits.
cdef void consumer_retire(Lane *lane, Consumer *consumer) noexcept nogil

# On the loop, which has ended a batch on the instance: its next one. NULL: the loop has the instance no more.
cdef Request *consumer_next(Consumer *consumer) noexcept nogil
# On the loop: the instance's thread is to go on with this batch, which nobody has begun, or with GIVEN_BACK (NULL).
cdef void consumer_recall(Consumer *consumer, Request *batch) noexcept nogil

# With the dispatcher's guard, which is released: something has changed in the line. `on_loop`: instances that the loop
# can use begin at once.
cdef void line_look(Line *line, bint on_loop) noexcept nogil
# With the guard: the same, for whoever changes more; on any thread.
cdef void lines_look(Dispatcher *dispatcher, int64_t now) noexcept nogil
# With the guard, once: the lane is about to be closed, and the line needs no alarm any more.
cdef void line_silence(Line *line) noexcept nogil
