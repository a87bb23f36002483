# Compression and inflation of messages: small ones at once, large ones on the thread pool.

from libc.stddef cimport size_t
from libc.stdint cimport uint64_t

from inferd._native.transport.compression cimport Encoding, Result
from inferd._native.transport.ledger cimport Account
from inferd._native.transport.message cimport Incoming
from inferd._native.transport.outgoing cimport Outgoing
from inferd._native.transport.thread_pool cimport Job, ThreadPool

cdef struct MessageOwner:
    # the call whose message is compressed or inflated
    void *call               # for `then`
    Job **job                # set while the message is on the thread pool; `compression_abandon` takes it
    uint64_t client          # whose turns the job takes
    Account *account         # is charged for the bytes inflated so far
    ThreadPool *thread_pool  # NULL: there is none

# Callbacks, in the front. `message` has the inflated bytes if the result is RESULT_OK, else the received ones.
# `deflated` is NULL if the plain message is to be sent. The callback takes over all of them.
ctypedef void (*inflated_fn)(void *call, Incoming *message, Result result) noexcept nogil
ctypedef void (*deflated_fn)(void *call, Outgoing *plain, Outgoing *deflated) noexcept nogil

# Inflate the message to at most `limit` bytes, with room for `behind` more. True: done, `result` is set. False: `then`
# will be called with the message, and until then the owner's job is set.
cdef bint message_inflate(const MessageOwner *owner, Incoming *message, Encoding encoding, size_t limit, size_t behind,
                          Result *result, inflated_fn then) noexcept nogil
# Compress the message with zlib's `level`. Returns as message_inflate, with `deflated`.
cdef bint message_deflate(const MessageOwner *owner, Outgoing *plain, Encoding encoding, int level,
                          Outgoing **deflated, deflated_fn then) noexcept nogil
# Abandon the job of a call, if there is one. Its charge is released now. The result is discarded when the thread
# returns it, without a callback.
cdef void compression_abandon(Job **job) noexcept nogil
