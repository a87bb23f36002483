# A call that a model makes to another one, and what it is answered on its way to the worker.

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from _native.memory.resource cimport Block
from _native.request.bridge cimport PostedCallback
from _native.request.request cimport Request, Response
from backends.python._channel cimport Channel
from backends.python._wire cimport Head

cdef struct Held:
    # a response that waits for credit
    Held *next
    Head head
    Block *record            # with the bytes, or with the lease to be
    Block *ack

cdef struct BlsCall:
    PostedCallback callback
    Channel *channel
    uint64_t life            # of the worker that makes it
    uint64_t id
    bint decoupled
    int64_t timeout_ns       # from when it came; -1: none
    Block *block             # holds the message
    const uint8_t *data
    size_t size
    uint64_t bytes           # that it counts in the limit
    uint64_t parent          # number of the request on whose behalf it is made; 0: none
    # all on the loop
    Request *request         # NULL: over
    BlsCall *next            # that has such an id
    BlsCall *sibling         # that has such a parent; not of a call that has none
    BlsCall **sibling_link   # what points to this one among those
    uint32_t credit
    Held *first_held
    Held *last_held

# All on the loop.

# A response to the call; it is sent at once, or when there is credit for it.
cdef void call_answer(BlsCall *call, const Response *response, bint final) noexcept nogil
# An error in the place of one, with flags of a head.
cdef void call_fail(BlsCall *call, int status, const char *details, uint32_t flags) noexcept nogil
# There is credit: send what waits for it.
cdef void call_send_held(BlsCall *call) noexcept nogil
# Nobody wants what waits.
cdef void call_drop_held(BlsCall *call) noexcept nogil
# Tell this worker, from any thread, that the server has no room for what it asks with this id.
cdef void call_refuse(Channel *channel, uint64_t life, uint64_t id, const char *text, uint32_t flags) noexcept nogil
