# Identical requests: those in flight are executed once, and answers may be kept for later ones, here or in a store
# outside of the server. All on the loop.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from _native.caching.cache_key cimport Digest
from _native.request.request cimport Request, Requests, Response
from _native.scheduling.lane cimport Lane

cdef struct Memo:
    # one cache key, whose answer is being computed or is kept
    Memo *in_bucket          # the next in its bucket
    Coalescer *home
    Digest digest
    uint64_t era             # in which it was asked
    Request *work            # goes to the model, and keeps the answer
    uint32_t output_count    # that are asked for
    Requests waiting         # for the answer, in order of arrival
    bint answered
    bint delivering          # the answer is being handed to those who wait
    bint asking              # the store is being asked; `work` has not been pushed
    void *lookup             # of the store, from `look` on until `forget`; NULL: it does not have the key
    int64_t asked_ns         # when the store was asked
    Memo *previous           # in Coalescer.kept
    Memo *next
    size_t size              # bytes that the cache holds for it
    int64_t expires_ns       # 0: never

cdef struct Memos:
    # a list of them; see _native.list
    Memo *first
    Memo *last

cdef struct Store:
    # Keeps answers outside of the server, for it and for others. Nothing of it blocks, and all of it is on the loop.
    void *owner              # NULL: there is no store
    # Begin to look the key up; sets memo.lookup. coalescer_found or coalescer_missing is called once, later and
    # not from inside of a delivery, unless it is told to forget before. False: it cannot be asked now.
    bint (*look)(void *owner, Memo *memo) noexcept nogil
    # This is the answer for a key that was missing.
    void (*keep)(void *lookup, const Response *response) noexcept nogil
    # The memo goes.
    void (*forget)(void *lookup) noexcept nogil

cdef struct Coalescer:
    Memo **buckets
    uint32_t bucket_count    # a power of two, or 0 before the first memo
    uint32_t count
    Memos kept               # the answered ones, by last use, the newest last
    uint64_t entries         # of `kept`
    size_t size
    size_t limit             # of `size`; 0: there is no cache
    size_t largest           # of an entry
    bint compares            # large inputs byte by byte, and so keeps them
    int64_t ttl_ns           # how long answers are kept; 0: for ever
    Store store
    uint64_t era             # counts what was forgotten
    uint64_t followers       # requests that got the answer of another one in flight
    uint64_t hits
    uint64_t misses
    uint64_t evictions

# A bound request for a lane that coalesces or caches. Returns the request that is to be pushed: this one, or one on
# behalf of it and of those who will join; NULL when its answer comes without. In the last two cases the request waits,
# or has gone back over its bridge.
cdef Request *coalescer_enter(Coalescer *self, Request *request) noexcept nogil
# What the store has found: who waits gets the outputs and parameters of memo.work.response, which the caller has set,
# over the bridge. The memo is gone.
cdef void coalescer_found(Memo *memo) noexcept nogil
# The store has nothing: the request returned is to be pushed, on behalf of those who wait.
cdef Request *coalescer_missing(Memo *memo) noexcept nogil
# Forget the kept answers of a lane that ends; of all lanes for NULL.
cdef void coalescer_forget(Coalescer *self, const Lane *lane) noexcept nogil
# After the last coalescer_forget, when nothing is in flight.
cdef void coalescer_clear(Coalescer *self) noexcept nogil
