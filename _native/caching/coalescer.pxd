# Identical requests: those in flight are executed once, and responses may be kept for later ones, here or in a store
# outside of the server. Used in the front.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from inferd._native.caching.cache_key cimport Digest
from inferd._native.request.lane cimport Lane
from inferd._native.request.request cimport Request, Requests, Response

cdef struct Memo:
    # one cache key, whose response is being computed or is kept
    Memo *in_bucket          # the next one in the same bucket
    Coalescer *home
    Digest digest
    uint64_t era             # value of Coalescer.era at its begin
    Request *work            # goes to the model, and keeps the response
    uint32_t output_count    # of requested outputs
    Requests waiting         # for the response, in order of arrival
    uint32_t count           # the number of waiting requests
    uint32_t late            # the number of these that go behind others, because their time in the queue is over
    bint taken               # an instance has the work: the terms of waiting requests do not matter any more
    bint stale               # a request has left, so the terms of the others may be weaker: see coalescer_settle
    bint answered
    bint delivering          # the response is being delivered to the waiting requests
    bint asking              # a lookup in the store is in progress; `work` has not been pushed
    void *lookup             # of the store, from `look` until `forget`; NULL: the store does not have the key
    int64_t asked_ns         # when the lookup began
    Memo *previous           # in Coalescer.kept, or before that in Coalescer.stale
    Memo *next
    Memo *before             # in Lane.kept
    Memo *behind
    size_t size              # bytes of the cache that it uses
    int64_t expires_ns       # 0: never

cdef struct Memos:
    # a list of them; see inferd._native.list
    Memo *first
    Memo *last

cdef struct Store:
    # Keeps responses outside of the server, also for other servers. Used in the front; nothing blocks.
    void *owner              # NULL: there is no store
    # Begin to look the key up; sets memo.lookup. Later, not within a delivery, coalescer_found or coalescer_missing is
    # called once, unless `forget` is called before. False: the store cannot be asked now.
    bint (*look)(void *owner, Memo *memo) noexcept nogil
    # Keep this response for a key that was missing.
    void (*keep)(void *lookup, const Response *response) noexcept nogil
    # The memo is freed.
    void (*forget)(void *lookup) noexcept nogil

cdef struct Coalescer:
    Memo **buckets
    uint32_t bucket_count    # a power of two, or 0 before the first memo
    uint32_t count
    Memos kept               # memos with responses, by last use, the newest last
    Memos stale              # memos to be settled
    uint64_t entries         # of `kept`
    size_t size
    size_t limit             # of `size`; 0: there is no cache
    size_t largest           # of an entry
    bint compares            # compares large inputs byte by byte, and so keeps them
    int64_t ttl_ns           # lifetime of responses; 0: no limit
    Store store
    void (*push)(void *context, Request *work) noexcept nogil    # queues work that start_over has made
    void *push_context
    uint64_t era             # increases with coalescer_forget
    uint64_t followers       # requests that got the response to another one in flight
    uint64_t hits
    uint64_t misses
    uint64_t evictions

# Enter a bound request for a lane that coalesces or caches. Returns the request to push: this one, or one that is made
# for it and for identical ones that follow. NULL: its response needs no execution. In the last two cases the request
# waits, or has gone back over its bridge.
cdef Request *coalescer_enter(Coalescer *self, Request *request) noexcept nogil
# The store has found the response: waiting requests get the outputs and parameters of memo.work.response, which the
# caller has set, over the bridge. The memo is freed.
cdef void coalescer_found(Memo *memo) noexcept nogil
# The store does not have the key: push the returned request, which is made for the waiting ones.
cdef Request *coalescer_missing(Memo *memo) noexcept nogil
# After a round in which requests may have left: let the work of each memo have the terms of those that still wait.
cdef void coalescer_settle(Coalescer *self) noexcept nogil
# No later request gets a response of this lane that is kept or being computed now. Then call coalescer_drop.
cdef void coalescer_forget(Coalescer *self, Lane *lane) noexcept nogil
# Free up to `most` forgotten responses of the lane. True: there are more.
cdef bint coalescer_drop(Coalescer *self, Lane *lane, uint32_t most) noexcept nogil
# Free all. To be called when nothing is in flight.
cdef void coalescer_clear(Coalescer *self) noexcept nogil
