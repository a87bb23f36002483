# DONE: a worker reports the outcome of the batch that it has executed.

from libc.stdint cimport uint64_t

from inferd._native.execution.batch cimport NativeBatch
from inferd.backends.python._channel cimport Channel
from inferd.backends.python._slots cimport Slot
from inferd.backends.python._wire cimport Head

# With the lock: the slot of a request of the batch. Waits until the attendant has finished with it.
cdef Slot *slot_at_rest(Channel *channel, uint64_t number) noexcept nogil
# Process a DONE: the outcome of each request. False: the worker has broken a rule, or has ended.
cdef bint done_take(Channel *channel, NativeBatch *batch, const Head *head) noexcept nogil
