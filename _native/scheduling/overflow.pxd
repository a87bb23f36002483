# Full queues: which requests make room for others. With the dispatcher's lock held, except refuse_ousted.

from libc.stdint cimport uint32_t

from inferd._native.request.request cimport Request
from inferd._native.scheduling.queue cimport Queue

# Whether no further request fits in the queue.
cdef inline bint is_full(const Queue *queue) noexcept nogil:
    return queue.lane.max_queue and queue.levels.count >= queue.lane.max_queue

# To be called after the shares of a queue begin or end.
cdef inline void set_attention(Queue *queue) noexcept nogil:
    queue.attends = queue.line.timed or queue.shares.buckets != NULL

# The queue, or this level of it, is full: remove the latest requests of the client with most of the queue, as a chain
# for refuse_ousted. Levels above that of the arriving request are left alone. NULL: no client has more of the queue
# than the client of the arriving request, or there is no memory.
cdef Request *oust(Queue *queue, const Request *coming, uint32_t level) noexcept nogil
# Refuse the requests of this chain. Without the lock.
cdef void refuse_ousted(Request *chain) noexcept nogil
