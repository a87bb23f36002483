# Calls of a model to other models (BLS): the part of the channel.

from libc.stdint cimport uint8_t, uint64_t

from inferd.backends.python._channel cimport Channel
from inferd.backends.python._wire cimport Head

# On the attendant's thread: a worker was started, or has ended. The front begins or stops to read its socket of calls.
cdef void bls_open(Channel *channel) noexcept nogil
cdef void bls_close(Channel *channel) noexcept nogil
# On the attendant's thread: process a packet of the side socket about calls; False: it is about something else.
cdef bint bls_take(Channel *channel, const Head *head, const uint8_t *record) noexcept nogil
# In the front, while it abandons this request of the worker: cancel the calls on behalf of the request.
cdef void bls_leave(Channel *channel, uint64_t number) noexcept nogil
# On the attendant's thread, after bls_close: the worker has ended, so abandon its calls.
cdef void bls_abandon(Channel *channel) noexcept nogil
