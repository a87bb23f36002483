# Identical requests: those in flight are executed once, and answers may be kept for later ones. All on the loop.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from _native.lane cimport Lane
from _native.question cimport Digest
from _native.request cimport Request

cdef struct Memo:
    # one question that is being answered, or has been
    Memo *next               # in its bucket
    Coalescer *home
    Digest digest
    Request *work            # carries the question to the model, and keeps the answer
    Request *first           # those who wait, in order of arrival, by Request.next and .previous
    Request *last
    bint answered
    bint delivering          # the answer is being handed to those who wait
    Memo *newer              # of the answered, by last use
    Memo *older
    size_t size              # bytes that the cache holds for it
    int64_t expires_ns       # 0: never

cdef struct Coalescer:
    Memo **buckets
    uint32_t bucket_count    # a power of two, or 0 before the first memo
    uint32_t count
    Memo *newest
    Memo *oldest
    size_t size
    size_t limit             # of `size`; 0: there is no cache
    int64_t ttl_ns           # how long answers are kept; 0: for ever
    uint64_t followers       # requests that got the answer of another one in flight
    uint64_t hits
    uint64_t misses
    uint64_t evictions

# A bound request for a lane that coalesces or caches. Returns the request that is to be pushed: this one, or one on
# behalf of it and of those who will join; NULL when its answer comes without. In the last two cases the request waits,
# or has gone back over its bridge.
cdef Request *coalescer_enter(Coalescer *self, Request *request) noexcept nogil
# Forget the kept answers of a lane that ends; of all lanes for NULL.
cdef void coalescer_forget(Coalescer *self, const Lane *lane) noexcept nogil
# After the last coalescer_forget, when nothing is in flight.
cdef void coalescer_clear(Coalescer *self) noexcept nogil
