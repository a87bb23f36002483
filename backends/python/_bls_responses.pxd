# A call of a model to another one, and the responses on their way to the worker.

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from inferd._native.memory.resource cimport Block
from inferd._native.request.bridge cimport PostedCallback
from inferd._native.request.request cimport Request, Response
from inferd.backends.python._channel cimport Channel
from inferd.backends.python._wire cimport Head

cdef struct Held:
    # a response that waits for credit
    Held *next
    Head head
    Block *record            # with the bytes, or with the future lease
    Block *ack

cdef struct BlsCall:
    PostedCallback callback
    Channel *channel
    uint64_t life            # of the worker that makes the call
    uint64_t id
    bint decoupled
    int64_t timeout_ns       # from its arrival; -1: none
    Block *block             # contains the message
    const uint8_t *data
    size_t size
    uint64_t bytes           # bytes that count against the limit
    uint64_t parent          # number of the request on whose behalf the call is made; 0: none
    # used in the front
    Channel *loading         # of the model whose load waits for the call, as far as is known; NULL: none does
    Request *request         # NULL: the call is over
    BlsCall *next            # the next call in the same bucket of ids
    BlsCall *sibling         # the next call in the same bucket of parents; not for calls without parent
    BlsCall **sibling_link   # the pointer to this call in that list
    uint32_t credit
    Held *first_held
    Held *last_held

# All in the front.

# Send a response to the worker, at once or when there is credit for it.
cdef void call_answer(BlsCall *call, const Response *response, bint final) noexcept nogil
# Send an error instead, with these flags of a head.
cdef void call_fail(BlsCall *call, int status, const char *details, uint32_t flags) noexcept nogil
# There is credit: send the responses that wait for it.
cdef void call_send_held(BlsCall *call) noexcept nogil
# Drop the responses that wait.
cdef void call_drop_held(BlsCall *call) noexcept nogil
# From any thread: tell this worker that the server has no room for its call with this id.
cdef void call_refuse(Channel *channel, uint64_t life, uint64_t id, const char *text, uint32_t flags) noexcept nogil
