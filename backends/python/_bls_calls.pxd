# The calls to other models that workers have in flight.

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from inferd._native.request.bridge cimport PostedCallback
from inferd.backends.python._bls_responses cimport BlsCall
from inferd.backends.python._channel cimport Channel
from inferd.backends.python._wire cimport Head

# From any thread: read a BLS_REQUEST; the callback of the call makes it. NULL: it was refused, or the worker is ended.
cdef BlsCall *call_new(Channel *channel, const Head *head, const uint8_t *record) noexcept nogil

# All below in the front.

# Make the call, which is in flight from then on.
cdef void call_make(PostedCallback *callback) noexcept nogil
# NULL: the call is over.
cdef BlsCall *call_find(Channel *channel, uint64_t life, uint64_t id) noexcept nogil
# The worker accepts so many more responses.
cdef void call_credit(Channel *channel, uint64_t life, uint64_t id, uint32_t credit) noexcept nogil
# The worker has cancelled a call, or all calls on behalf of a request.
cdef void call_cancel(BlsCall *call) noexcept nogil
cdef void calls_cancel(Channel *channel, uint64_t life, uint64_t parent) noexcept nogil
# The worker has ended: abandon its calls.
cdef void calls_leave(Channel *channel, uint64_t life) noexcept nogil
