# Calls that a model makes to other models.

from libc.stdint cimport uint8_t, uint64_t

from backends.python._channel cimport Channel
from backends.python._wire cimport Head

# A worker was started, or is gone: the loop reads what it sends on the socket of calls, or does so no longer. From the
# attendant's thread.
cdef void bls_open(Channel *channel) noexcept nogil
cdef void bls_close(Channel *channel) noexcept nogil
# Deal with a packet of the side socket about calls; False: it is not one of those. From the attendant's thread.
cdef bint bls_take(Channel *channel, const Head *head, const uint8_t *record) noexcept nogil
# On the loop, from within abandoning it: nobody waits for this request of the worker any more.
cdef void bls_leave(Channel *channel, uint64_t number) noexcept nogil
# The worker is gone: nobody waits for its calls any more. From the attendant's thread, after bls_close.
cdef void bls_abandon(Channel *channel) noexcept nogil
